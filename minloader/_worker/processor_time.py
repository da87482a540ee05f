"""How long a worker computed, and how long it waited for a processor, with what it started.

    seconds of work = computing + queued + asleep (files, the network, locks, other computers)

All of it is asked of the kernel, in the worker, and only now and then: it takes some 50 µs. What
the worker started is counted when it has ended. Where there is no ``/proc``, nothing is told.
"""

from __future__ import annotations

import os

from minloader._memory.limits import names, words
from minloader._worker.plugins import Plugin, after_batch


def thread_times(folder: str = "/proc/self/task") -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread computed, and waited for a processor."""
    lines = ((thread, words(f"{folder}/{thread}", "schedstat")) for thread in names(folder))
    return {thread: (int(line[0]), int(line[1])) for thread, line in lines if line}


class ProcessorTime(Plugin):
    """Measures how a worker process spends the time that its batches take."""

    def ready(self) -> None:
        after_batch.append(CpuMeter().measure)


class CpuMeter:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._computed = 0.0
        self._threads: dict[str, tuple[int, int]] = {}
        self.measure(0.0)

    def measure(self, work: float) -> tuple[float, float, float] | None:
        """Return how time was spent since this was called last.

        Args:
            work: seconds that tasks took since then.

        Returns:
            Of these: those of computing, those of waiting for a processor, and the others. None: it
            is not known. With threads or programs beside each other the first two may be more than
            all.
        """
        former = self._computed
        before = self._threads
        computed = sum(os.times()[:4])
        threads = thread_times()
        if not threads:
            return None
        self._computed = computed
        self._threads = threads
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
