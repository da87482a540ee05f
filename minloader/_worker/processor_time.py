"""How long a worker computed, and how long it waited for a processor, with all that it started.

    seconds of work = computing + queued + asleep (files, the network, locks, other computers)

All of it is read from files of the kernel, in the worker, and only now and then: it takes some
50 µs. Where there is no ``/proc``, nothing is told.
"""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple

from minloader._memory.limits import words

COST = 0.002
"""Most of a worker's time that the reading may take. With many threads or programs it is slow."""


class Usage(NamedTuple):
    """What a process used up to some moment, with all that it started.

    Attributes:
        computing: seconds of processor time. Of children too: those that live, and those that were
            waited for.
        threads: nanoseconds that each living thread computed, and waited for a processor.
    """

    computing: float
    threads: dict[str, tuple[int, int]]


def usage(pid: int, proc: str = "/proc") -> Usage | None:
    """Return what a process used until now; None where there is no /proc, or it is gone."""
    ticks, times, pids = 0, {}, [str(pid)]
    for each in pids:  # grows while we walk
        try:
            with open(f"{proc}/{each}/stat", "rb") as file:
                # The second field is the program's name, which may have anything in it.
                ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
            threads = os.listdir(f"{proc}/{each}/task")
        except OSError:
            continue
        for thread in threads:
            folder = f"{proc}/{each}/task/{thread}"
            computed, queued, *_ = *words(folder, "schedstat"), 0, 0
            times[thread] = int(computed), int(queued)
            # A kernel without CONFIG_PROC_CHILDREN has no such file: then live ones are missing.
            pids += words(folder, "children")
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), times) if times else None


class Meter:
    """Tells now and then how a worker process spent the time that its batches took.

    Args:
        proc: where the files of the kernel are.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._last = Usage(0.0, {})
        self._work = 0.0  # seconds since it told last
        self._due = 0.0
        self._tell()

    def add(self, seconds: float) -> tuple[float, float, float] | None:
        """Count the time of a task.

        Returns:
            Of all seconds counted since this was told last: those of computing, those of waiting
            for a processor, and the others. None: not this time. With threads or programs beside
            each other the first two may be more than all.
        """
        self._work += seconds
        return self._tell() if self._work >= self._due else None

    def _tell(self) -> tuple[float, float, float] | None:
        before, work = self._last, self._work
        begin = time.thread_time()  # a busy machine may take the processor away meanwhile
        now = usage(os.getpid(), self._proc)
        if now is None:
            self._due = math.inf
            return None
        self._last, self._work = now, 0.0
        self._due = (time.thread_time() - begin) / COST
        computing = max(0.0, now.computing - before.computing)
        seen = queued = 0.0
        for thread, (ran, waited) in now.threads.items():
            ran_before, waited_before = before.threads.get(thread, (0, 0))
            seen += (ran - ran_before) / 1e9
            queued += (waited - waited_before) / 1e9
        # Of programs that have ended the kernel adds up the computing, not the waiting. They are
        # taken to have waited as the others did, for each second that they computed.
        if seen:
            queued = max(queued, min(queued * computing / seen, work - computing))
        return computing, queued, max(0.0, work - computing - queued)
