"""How long a worker computed, and how long it waited for a processor, with what it started.

    seconds of work = computing + queued + asleep (files, the network, locks, other computers)

All of it is asked of the kernel, in the worker, and only now and then: it takes some 50 µs. What
the worker started is counted when it has ended. Where there is no ``/proc``, nothing is told.
"""

from __future__ import annotations

import math
import os
import time

from minloader._memory.limits import names, words

COST = 0.002
"""Most of a worker's time that the reading may take. With many threads it is slow."""


def thread_times(folder: str = "/proc/self/task") -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread computed, and waited for a processor."""
    lines = ((thread, words(f"{folder}/{thread}", "schedstat")) for thread in names(folder))
    return {thread: (int(line[0]), int(line[1])) for thread, line in lines if line}


class CpuMeter:
    """Measures now and then how a worker process spent the time that its batches took."""

    def __init__(self) -> None:
        self._computed = 0.0
        self._threads: dict[str, tuple[int, int]] = {}
        self._work = 0.0  # seconds since it measured last
        self._due = 0.0  # how many of these must pass before it measures again
        self._measure()

    def add(self, seconds: float) -> tuple[float, float, float] | None:
        """Count the time of a task.

        Returns:
            Of all seconds counted since it measured last: those of computing, those of waiting
            for a processor, and the others. None: not this time. With threads or programs beside
            each other the first two may be more than all.
        """
        self._work += seconds
        return self._measure() if self._work >= self._due else None

    def _measure(self) -> tuple[float, float, float] | None:
        former = self._computed
        before = self._threads
        work = self._work
        begin = time.thread_time()  # a busy machine may take the processor away meanwhile
        computed = sum(os.times()[:4])
        threads = thread_times()
        if not threads:
            self._due = math.inf
            return None
        self._computed = computed
        self._threads = threads
        self._work = 0.0
        self._due = (time.thread_time() - begin) / COST
        computing = max(0.0, computed - former)
        spent = [
            now - then
            for each in threads
            for now, then in zip(threads[each], before.get(each, (0, 0)), strict=True)
        ]
        seen = sum(spent[::2]) / 1e9
        queued = sum(spent[1::2]) / 1e9
        # Of programs that have ended the kernel adds up the computing, not the waiting. They are
        # taken to have waited as the others did, for each second that they computed.
        if seen:
            queued = max(queued, min(queued * computing / seen, work - computing))
        return computing, queued, max(0.0, work - computing - queued)
