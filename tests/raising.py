"""Functions that fail, exceptions that are hard to send; worker processes import them."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
from typing import Any

from helpers import Squares, TwoArguments

from minloader import WorkerInfo


def raise_deep(item: int) -> int:
    def innermost_function() -> None:
        raise ValueError("deep down")

    if item == 1:
        innermost_function()
    return item


def raise_two(item: int) -> int:
    if item == 1:
        raise TwoArguments(7, "seven")
    return item


def raise_locked(item: int) -> int:
    if item == 1:
        error = RuntimeError("has a lock", threading.Lock())
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        error.hint = "kept"  # type: ignore[attr-defined]
        raise error
    return item


class Hopeless(Exception):
    """Can be made in one way only, which no pickle knows."""

    def __new__(cls, *args: Any, key: str) -> Any:
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, key: str) -> None:
        super().__init__(*args)


def raise_hopeless(item: int) -> int:
    if item == 1:
        raise Hopeless("cannot travel", key="k")
    return item


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raise_frozen(item: int) -> int:
    if item == 1:
        raise Frozen(5)
    return item


def exits(item: int) -> int:
    if item == 1:
        raise SystemExit(3)
    return item


def unpicklable(item: int) -> Any:
    return {"x": [0, threading.Lock()]} if item == 1 else item


class LoadsBadly:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("while unpickling")


def loads_badly(item: int) -> Any:
    return LoadsBadly() if item == 1 else item


class FailsToLoad(Squares):
    def __setstate__(self, state: Any) -> None:
        raise ConnectionError("database is down")


def ignore_sigterm(info: WorkerInfo) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
