"""With which program, and which environment, a worker process is started.

The environment is that of this process while it starts one: a start method has no other way. A
process that another thread starts at that moment may have the same.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from minloader._memory import forks
from minloader._sampling.seeding import derive

HASH_SEED = "PYTHONHASHSEED"

_lock = forks.new_lock()  # one sets the environment at a time; reentrant, for signal handlers


@contextmanager
def default_environment(name: str, value: str) -> Iterator[None]:
    """Let what is started in this block have an environment variable, unless it is set."""
    with _lock:
        if name in os.environ:
            yield
            return
        try:
            os.environ[name] = value
            yield
        finally:
            os.environ.pop(name, None)


def hash_seed(seed: int) -> AbstractContextManager[None]:
    """Let what is started in this block hash strings alike, whichever worker it is.

    Args:
        seed: of the loader.
    """
    return default_environment(HASH_SEED, str(derive("hash", seed) & 0xFFFF_FFFF))


def check_executable(start_method: str) -> None:
    """Look whether it is known which program is to be started.

    Raises:
        RuntimeError: it is not, in a program that has Python built in.
    """
    if start_method != "fork" and not multiprocessing.spawn.get_executable():
        raise RuntimeError(
            "workers cannot be started: sys.executable is empty, so it is not known where Python "
            "is; call multiprocessing.set_executable with the path of its program, or have "
            "workers start by 'fork'"
        )


def wrong_executable(start_method: str) -> str:
    """Return what to do if the program that is started may be no Python; "" if it seems to be."""
    if start_method == "fork" or getattr(sys, "frozen", False):
        return ""
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    if "py" in os.path.basename(executable).lower():
        return ""
    return (
        f"; {executable} was started, which may be no Python: call "
        "multiprocessing.set_executable with the path of one"
    )
