"""What each worker has done, and whether the memory that it has for itself grows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from minloader._worker.messages import Reply

POINTS = 32
"""Observations of which a trend is judged. Then every other one is dropped, and half as many are
made: they are of the whole life of a worker, however long that is."""

LEAK = 16 << 20
"""Bytes that a worker may grow by in any case, and as a cache of a few samples does."""


@dataclass(slots=True)
class WorkerCount:
    """What is counted of one worker, or of those that took its place one after the other.

    Attributes:
        seconds: that it was busy.
        batches: that it made.
        memory: bytes that it has for itself; 0 if that is not known.
        at_start: bytes that it had before its first batch.
        growth: bytes by which it has grown steadily; 0 if it has not.
        grown_in: batches that it made meanwhile.
    """

    seconds: float = 0.0
    batches: int = 0
    memory: int = 0
    at_start: int = 0
    growth: int = 0
    grown_in: int = 0
    _pid: int = 0
    _points: list[tuple[int, int]] = field(default_factory=list)  # batches, bytes
    _next: int = 0  # how many observations to leave out before the next point
    _step: int = 1

    def note_memory(self, reply: Reply) -> bool:
        """Note what a reply says of memory; return whether it is found to grow steadily."""
        if self._pid != reply.pid:  # another process took its place
            self._pid, self.at_start, self._points, self._step = reply.pid, 0, [], 1
            self._next = 1
        self.memory = reply.memory
        self.at_start = self.at_start or reply.memory_at_start
        self._next -= 1
        if self._next > 0:
            return False
        self._next = self._step
        self._points.append((self.batches, reply.memory))
        if len(self._points) < POINTS:
            return False
        batches, memory = zip(*self._points, strict=True)
        self.growth, self.grown_in = steady_growth(memory), batches[-1] - batches[0]
        self._points, self._step = self._points[::2], 2 * self._step
        return self.growth > 0


def steady_growth(values: Sequence[int], tolerance: int = LEAK) -> int:
    """Return how much a series grew; 0 without steady growth.

    Growth is steady if each quarter has some, if it is larger than the values differ within a
    quarter, and if it does not slow down, as it does while a cache fills.

    Args:
        values: at least four, in order.
        tolerance: growth up to this counts as none.
    """
    cuts = [n * len(values) // 4 for n in range(5)]
    quarters = [sorted(values[begin:end]) for begin, end in itertools.pairwise(cuts)]
    middles = [each[len(each) // 2] for each in quarters]
    steps = [after - before for before, after in itertools.pairwise(middles)]
    grown = middles[-1] - middles[0]
    spread = sum(each[-1] - each[0] for each in quarters) / 4
    is_steady = min(steps) > 0 and steps[-1] >= grown / 6 and grown > max(tolerance, spread)
    return values[-1] - values[0] if is_steady else 0
