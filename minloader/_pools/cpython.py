"""CPython's private parts, all in one room."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("minloader")

_starting = threading.local()  # .ours: this thread is just starting one of our workers

_stdlib_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """What a child is told at its start, less the main module if it is a worker of ours.

    Without it the child does not import the parent's script again, which would need a guard,
    may hang (cpython #118981) and costs time. Set once and for all rather than around each
    start, so that other threads may start processes meanwhile.
    """
    data = _stdlib_preparation_data(name)
    if getattr(_starting, "ours", False):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


multiprocessing.spawn.get_preparation_data = _preparation_data


@contextmanager
def starting_worker() -> Iterator[None]:
    """Leaves the main module out, and holds Ctrl-C off the child until it can ignore it.

    The child inherits the blocked SIGINT and unblocks it when it has its handler. In the
    parent the signal is not lost, only late.
    """
    _starting.ours = True
    masking = hasattr(signal, "pthread_sigmask")
    if masking:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        if masking:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _starting.ours = False


class TolerantFuture(Future[Any]):
    """A future that may be cancelled, or told its error, while its executor breaks.

    CPython 3.11 sets the error of a broken pool on cancelled futures too; the InvalidStateError
    ended its manager thread, and with it every other future would wait for ever.
    """

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            super().set_exception(exception)
        except InvalidStateError:
            if not self.done():
                raise


class CopyingDict(dict[int, Any]):
    """Tasks or processes of an executor: CPython 3.11 walks over them while others may add some."""

    def items(self) -> Any:
        return list(super().items())

    def values(self) -> Any:
        return list(super().values())
