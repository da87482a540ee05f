"""Heartbeats: which sample each worker is making, and since when, in memory shared with the parent.

A worker writes its heartbeat before each item (0.3 µs, no message), and before each sample the
number of that in its item (0.03 µs). The parent reads them when the worker died or takes too long.
Behind the heartbeats, in the same file, a worker writes its Python stack when it is sent a signal,
even while it is stuck in C code, and when it dies of a segmentation fault or the like.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from minloader._memory.files import SharedFile, check_access

Beat = Callable[[int, int, float], None]
"""Called by a worker before it begins with an item: id of the task, index of the item, and the time
by :func:`time.perf_counter`, which every process of a machine reads alike."""

READY = -1
"""In place of a task's id: the worker has started and waits for its first. Before that it is 0."""

_FORMAT = struct.Struct("qqqd")

# A signal that hardly anybody uses; its default action would end a process.
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))


class Heartbeat(NamedTuple):
    """The item that a worker began last.

    Attributes:
        sample_number: of the sample in the item, from 0; -1 if none is being made, or it is not
            known.
        task: id of its task, or READY, or 0.
        item: index of the item in the task; -1: it reads a stream again, on its way to the first.
        began: when the worker began with it, by ``time.perf_counter``; ``inf``: it has made all
            of the task, whose last item this is.
    """

    sample_number: int
    task: int
    item: int
    began: float


class Heartbeats:
    """The heartbeats of some workers, for the parent to read.

    Args:
        count: number of workers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._file = SharedFile()
        os.truncate(self._file.fd, count * _FORMAT.size)
        self._memory = mmap.mmap(self._file.fd, count * _FORMAT.size)
        self.path = self._file.path

    def last(self, index: int) -> Heartbeat:
        """Return the last heartbeat of a worker."""
        return Heartbeat._make(_FORMAT.unpack_from(self._memory, index * _FORMAT.size))

    def stack(self, send: Callable[[int], None], seconds: float) -> str:
        """Return the Python stacks of a worker's threads; "" if it does not answer in time.

        Args:
            send: sends the worker a signal.
            seconds: how long to wait.
        """
        if _STACK_SIGNAL is None:
            return ""
        begin = size = os.fstat(self._file.fd).st_size
        deadline = time.monotonic() + seconds
        try:
            send(_STACK_SIGNAL)
        except OSError:  # it has ended
            return ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before = size
            size = os.fstat(self._file.fd).st_size
            if size == before > begin:  # all is written
                break
        return shorten(self._file.text(begin).strip())

    def crash(self) -> str:
        """Return the Python stacks of the worker that crashed last; "" if there are none."""
        written = self._file.text(self.count * _FORMAT.size).strip()
        return shorten(written.rpartition("Fatal Python error: ")[2].partition("\n\n")[2])

    def close(self) -> None:
        """Remove the file. Harmless when repeated."""
        self._file.close()
        self._memory.close()


_OURS = re.compile(r'^ *File ".*[/\\\\]minloader[/\\\\](_worker[/\\\\]|_protocols\.py)')

_HEAD = re.compile(r"(Current t|T)hread 0x")  # not that of a stack in C, from CPython 3.14

_OUR_THREAD = re.compile(r"[/\\\\]minloader[/\\\\]_worker[/\\\\](lifetimes|logs)\.py")

_IDLE = re.compile(r'[/\\\\]minloader[/\\\\]_worker[/\\\\]concurrent\.py", line \d+ in _serve')
"""Of the innermost frame of a thread that waits for a sample to read."""


def shorten(stacks: str) -> str:
    """Return stacks without our threads, and without the frames that lead from us to the user."""
    shown = []
    for stack in stacks.split("\n\n"):
        lines = stack.splitlines()
        cut = next((n for n, line in enumerate(lines) if _OURS.match(line)), len(lines))
        kept = lines[:cut] if cut > 1 else lines  # all of them, where none is the user's
        is_ours = _OUR_THREAD.search(stack) or any(map(_IDLE.search, lines[1:2]))
        if _HEAD.match(stack) and not is_ours:
            shown.append("".join(f"{line}\n" for line in kept))
    # The one that makes the batch first.
    shown.sort(key=lambda stack: not stack.startswith("Current thread"))
    return "\n".join(shown)


def open_heartbeat(path: str, index: int) -> tuple[Beat, Any]:
    """Return what a worker writes its heartbeats with, and where it writes the number of a sample.

    From now on it answers the stack signal, and writes its stack when it crashes.
    """
    check_access(path)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    if _STACK_SIGNAL is not None and hasattr(faulthandler, "register"):
        stacks: Any = open(path, "ab")  # noqa: SIM115  # faulthandler needs it for good
        faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.enable(stacks)
    begin = index * _FORMAT.size
    return partial(_FORMAT.pack_into, memory, begin, -1), memoryview(memory)[begin:][:8].cast("q")
