"""The board: what each worker is doing, in a page of memory that workers and parent share.

A worker writes one line before each batch (0.3 µs, no message); the parent reads it when a
worker died or takes too long. At the end of the same file a worker writes its Python stack when
it is sent a signal, even while it is stuck in C code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minloader._memory.files import SharedFile

Mark = Callable[[int, int, float], None]

"""Called by a worker before it begins with an item: id of the task, index of the item, and the time
by :func:`time.perf_counter`, which every process of a machine reads alike."""


READY = -1

"""In place of a task's id: the worker has started and waits for its first. Before that it is 0."""


_LINE = struct.Struct("qqd")

# A signal that hardly anybody uses; its default action would end a process.
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))


class Line(NamedTuple):
    """What a worker began last.

    Attributes:
        task: id of the task, or READY, or 0.
        place: which of its items.
        began: when, by ``time.perf_counter``.
    """

    task: int
    place: int
    began: float


class Heartbeats:
    """The parent's side.

    Args:
        lines: number of workers.
    """

    def __init__(self, lines: int) -> None:
        self._file = SharedFile()
        size = lines * _LINE.size
        os.truncate(self._file.fd, size)
        self._memory = mmap.mmap(self._file.fd, size)
        self.path = self._file.path

    def line(self, worker_id: int) -> Line:
        """What a worker is doing."""
        return Line(*_LINE.unpack_from(self._memory, worker_id * _LINE.size))

    def stack(self, pid: int, seconds: float) -> str:
        """Python stack of all threads of a worker; "" if it does not answer in that time."""
        if _STACK_SIGNAL is None:
            return ""
        begin = size = os.fstat(self._file.fd).st_size
        deadline = time.monotonic() + seconds
        try:
            os.kill(pid, _STACK_SIGNAL)
        except OSError:  # gone
            return ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(self._file.fd).st_size
            if size == before > begin:  # all is written
                break
        with open(self.path, "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Takes the board down."""
        self._file.close()
        self._memory.close()


def attend(path: str, worker_id: int) -> Mark:
    """The worker's side: returns how to write its line, first that it is READY."""
    start = worker_id * _LINE.size
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), start + _LINE.size)
    if _STACK_SIGNAL is not None and hasattr(faulthandler, "register"):
        stacks: Any = open(path, "ab")  # noqa: SIM115  # faulthandler needs it for good
        faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)

    def mark(task: int, index: int, now: float) -> None:
        _LINE.pack_into(memory, start, task, index, now)

    return mark
