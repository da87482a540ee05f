""":class:`Stats`: what users see of what was counted, made when somebody asks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from minloader._diagnosis import page
from minloader._diagnosis.figures import (
    ErrorStats,
    Jump,
    MemoryStats,
    PlainStats,
    Timeline,
    TimeStats,
    WorkerStats,
)
from minloader._diagnosis.verdict import judge
from minloader._epochs.counters import Counters, Look
from minloader._protocols import snapshot

if TYPE_CHECKING:
    from minloader._epochs.options import Shared

LEAK = 16 << 20
"""Bytes that a worker may grow by in any case, and as a cache of a few samples does."""

JUMP = 50_000_000
"""Bytes from which on it is told by which batch a worker grew."""


@dataclass(slots=True, repr=False)
class Stats(PlainStats):
    """Figures of a loader since it was made, over all its epochs.

    Attributes:
        batches: number of batches delivered.
        bytes: their size, packed; 0 where batches never leave the process.
        time: where the time went, see :class:`~minloader._diagnosis.figures.TimeStats`.
        workers: who makes the batches, see :class:`~minloader._diagnosis.figures.WorkerStats`.
        memory: what workers and batches take, see
            :class:`~minloader._diagnosis.figures.MemoryStats`.
        errors: what has failed and what was made again, see
            :class:`~minloader._diagnosis.figures.ErrorStats`.
        timeline: the last events; ``events`` has them as they are shown.
        former: what had been counted when ``num_workers`` was set last; None if it never was.
    """

    @property
    def verdict(self) -> str:
        """One sentence: what limits the loop, and the argument to change.

        It is of the time since ``num_workers`` was set last, and says so if it was.
        """
        text = self._judge()[1]
        if self.former is None or self.batches == self.former.batches:
            return text
        return f"since num_workers={self.workers.count} was set, {text}"

    @property
    def bottleneck(self) -> str:
        """What takes the time on the timeline: "own" for the consumer's work, "draw" for the
        sampler, a stage of the workers, or "" where nothing stands out."""
        return self._judge()[0]

    def _judge(self) -> tuple[str, str]:
        return judge(self if self.former is None else self.since(self.former))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page for a browser: the verdict, where the time went, the timeline, the table.

        Args:
            path: file to write; overwritten. The page needs no other file.

        Raises:
            OSError: the file cannot be written.
        """
        text = page.render(page.data(self, self.bottleneck, self.verdict))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def __str__(self) -> str:
        return page.text(self.verdict, page.table(self))

    __repr__ = __str__  # for who types loader.stats at the interpreter's prompt

    def _repr_html_(self) -> str:
        return page.fragment(self.verdict, page.table(self))


def gather(shared: Shared) -> Stats:
    """Return the stats of a loader as of now, from any thread."""
    counters = shared.counters
    group = shared.group
    slots = [pool.slots for pool in group.pools if pool.slots is not None]
    used = [each.used for each in slots]
    times = _same(TimeStats, counters)
    times.unpacking = max(0.0, times.wait - counters.task_wait)
    workers = _same(WorkerStats, counters)
    workers.executor = group.kind
    workers.count = group.num_workers
    workers.concurrency = shared.options.concurrency
    workers.in_order = shared.options.in_order
    workers.in_flight = group.in_flight
    workers.seconds = dict(sorted(snapshot(counters.worker_seconds.items())))
    memory = memory_stats(snapshot(counters.looks))
    memory.overflowed = counters.overflowed
    memory.slots = sum(count for count, _ in used)
    memory.slot_bytes = sum(size for _, size in used)
    memory.slot_limit = sum(each.budget for each in slots)
    errors = _same(ErrorStats, counters)
    errors.last = tuple(snapshot(counters.last_errors))
    errors.replaced = group.replaced
    timeline = Timeline(
        events=tuple(snapshot(counters.events)),
        began=counters.began,
        taken_at=time.perf_counter(),
    )
    return Stats(
        batches=counters.batches,
        bytes=counters.bytes,
        time=times,
        workers=workers,
        memory=memory,
        errors=errors,
        timeline=timeline,
        former=counters.former,
    )


def _same(part: Any, counters: Counters) -> Any:
    """Return a part of the stats with all that is counted under the names that it has there."""
    names = (each.name for each in fields(part))
    return part(**{name: getattr(counters, name) for name in names if hasattr(counters, name)})


@dataclass(slots=True)
class WorkerMemory:
    """What looks at the memory of one worker say, or of those that took its place one by one.

    Attributes:
        memory: bytes that it has for itself.
        at_start: bytes that it had before its first batch.
        growth: bytes by which it has grown steadily; 0 if it has not.
    """

    memory: int = 0
    at_start: int = 0
    growth: int = 0
    _pid: int = 0
    _pid_before: int = 0  # of the process whose place this one took
    _seen: int = 0  # looks at this process
    _lows: list[int] = field(default_factory=list)  # the least memory of each span of looks

    def note(self, look: Look) -> int:
        """Note a look, and return the bytes by which it has grown since the one before.

        The least memory is noted of each span of looks that is twice as long as the one before. It
        grows steadily if this doubles too, more or less: that of a cache which fills grows less and
        less, and that of a worker whose batches differ does not.
        """
        if look.pid == self._pid_before:  # it leaves: it did what it was given beside the next one
            return 0
        if self._pid != look.pid:  # another process took its place
            self._pid_before = self._pid
            self._pid = look.pid
            self._seen = 0
            self._lows = []
            self.at_start = look.at_start
            self.memory = look.at_start or look.memory
        grown = look.memory - self.memory
        self.memory = look.memory
        self._seen += 1
        if self._seen & (self._seen - 1) == 0:  # a power of two: the next span begins
            self._lows.append(self.memory)
        self._lows[-1] = min(self._lows[-1], self.memory)
        if not self._seen & (self._seen + 1) and len(self._lows) > 3:  # its end
            first, second, third = self._lows[-3:]
            early = second - first
            late = third - second
            is_steady = late > LEAK and 1.4 * early < late < 4 * early
            self.growth = third - first if is_steady else 0
        return grown


def memory_stats(looks: Iterable[Look]) -> MemoryStats:
    """Return what looks at the memory of workers say."""
    workers: dict[str, WorkerMemory] = {}
    jumps = []
    for look in looks:
        grown = workers.setdefault(look.worker, WorkerMemory()).note(look)
        if grown > JUMP:
            jumps.append(Jump(look.worker, grown, look.epoch, look.batch, look.item))
    known = dict(sorted(workers.items()))
    return MemoryStats(
        workers={name: each.memory for name, each in known.items()},
        at_start={name: each.at_start for name, each in known.items()},
        growth={name: each.growth for name, each in known.items() if each.growth},
        jumps=tuple(jumps),
    )
