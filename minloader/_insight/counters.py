"""Count what a loader does: the epochs do so once a task, and read the clock twice a batch."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from minloader._checks import brief_repr, snapshot
from minloader._insight.stats import ErrorStats, Failed, MemoryStats, Stats, TimeStats, WorkerStats
from minloader._insight.timeline import Event, EventLog, track_of
from minloader._insight.workers import WorkerLog
from minloader._worker.messages import Reply

ERRORS_KEPT = 1000
"""Number of errors kept, the last ones."""


INDEX_KEPT = 1000
"""Most characters, or parts, of the index of a sample that a state has."""


def plain(sample: Any) -> Any:
    """Return the index of a sample as JSON can have it; of what it cannot, a text."""
    if sample is None or isinstance(sample, bool | float):
        return sample
    if isinstance(sample, str):
        return sample[:INDEX_KEPT]
    if isinstance(sample, tuple | list) and len(sample) <= INDEX_KEPT:
        return [plain(each) for each in sample]
    try:
        return operator.index(sample)  # numpy's, too
    except TypeError:
        pass
    try:
        return repr(sample)[:INDEX_KEPT]  # no short one: many paths begin and end alike
    except Exception:
        return brief_repr(sample)


# Slots: each access in Batches.__next__ takes half as long (3.12: 230 ns a batch, against 500).
@dataclass(slots=True)
class Counters:
    """What the :class:`Stats` of a loader are made from, written in the consumer's thread.

    Attributes:
        batches: number of batches delivered.
        bytes: their size, packed.
        time: where the time went; ``unpacking`` is known in a copy only.
        workers: what workers did in their time; who they are is known in a copy only.
        memory: what found no room; all else is known in a copy only.
        errors: what has failed; ``last`` is known in a copy only.
        left_at: when the consumer went to work on a batch; 0 if it has none.
        task_wait: part of the wait that was for tasks, and so not for unpacking.
        log: the timeline.
        by_worker: what is counted of each worker.
        last_errors: the errors, in order.
        former: what was counted when ``num_workers`` was set last.
    """

    batches: int = 0
    bytes: int = 0
    time: TimeStats = field(default_factory=TimeStats)
    workers: WorkerStats = field(default_factory=WorkerStats)
    memory: MemoryStats = field(default_factory=MemoryStats)
    errors: ErrorStats = field(default_factory=ErrorStats)
    left_at: float = 0.0
    task_wait: float = 0.0
    log: EventLog = field(default_factory=EventLog)
    by_worker: WorkerLog = field(default_factory=WorkerLog)
    last_errors: deque[Failed] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    former: Stats | None = None

    def come(self, begin: float) -> None:
        """Note that the consumer came for a batch, at ``begin``."""
        if self.left_at:
            self.time.consumer += begin - self.left_at
            self.left_at = 0.0

    def leave(self, begin: float, *, working: bool) -> None:
        """Note that the consumer goes, having waited since ``begin``.

        Args:
            begin: when it came for a batch.
            working: whether it goes to work on a batch, rather than for good.
        """
        now = time.perf_counter()
        self.time.wait += now - begin
        self.left_at = now if working else 0.0

    def note_epoch_start(self, begin: float) -> None:
        """Note that an epoch began at ``begin``: replies may come before it has begun."""
        if not self.time.startup:
            self.log.began = begin

    def count_epoch_start(self, begin: float) -> None:
        """Count the start of an epoch, which took since ``begin``."""
        self.count_task_wait(begin)
        self.leave(begin, working=False)

    def count_task_wait(self, begin: float) -> None:
        """Count the wait for a task and the sending of others, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.task_wait += seconds
        if self.by_worker.counts and not self.time.startup:
            # Of waiting only: the consumer may have worked meanwhile.
            self.time.startup = self.time.wait + seconds
        self.record("consumer", "wait", begin, seconds, {})

    def drew(self, begin: float, count: int) -> None:
        """Count the drawing of ``count`` items from the sampler, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.time.sampler += seconds
        self.record("sampler", "draw", begin, seconds, {"count": count})

    def made(self, reply: Reply, args: dict[str, Any], item: Any) -> None:
        """Count the batches that a worker made.

        Args:
            reply: what it sent.
            args: "batch", the number of the first; "count", how many there are; and "epoch".
            item: what the last of them was made of.
        """
        now = time.perf_counter()
        worker = track_of(reply.worker, reply.pid)
        figures = reply.figures
        timings = figures.timings
        seconds = timings.seconds
        parts = timings.transform, timings.collate, timings.packing
        times = self.time
        times.dataset += max(0.0, seconds - sum(parts))
        times.transform += timings.transform
        times.collate += timings.collate
        times.transport += timings.packing
        if figures.usage.processor is not None:
            computing, queued, asleep = figures.usage.processor
            self.workers.computing += computing
            self.workers.queued += queued
            self.workers.asleep += asleep
        self.bytes += figures.size
        self.memory.overflowed += figures.overflowed
        if reply.shard is not None:
            self.errors.reread += reply.shard.reread
        self.errors.skipped_samples += figures.skipped
        self.by_worker.note(worker, reply, args, item)
        start = timings.began
        # perf_counter counts from another moment on another machine: then the end is assumed to
        # be now. Within a machine it is the same clock for all processes.
        if not self.log.began <= start <= now - seconds:
            start = now - seconds
        self.record(worker, "task", start, seconds, args | {"timings": parts})

    def fail(self, epoch: int, batch: int, sample: Any, error: str) -> None:
        """Count an error; see :data:`Failed`."""
        self.errors.failed += 1
        self.last_errors.append((epoch, batch, sample, error))

    def recall(self, errors: Iterable[Failed]) -> None:
        """Have errors of a state that was loaded be among those that are known."""
        known = {(epoch, batch, repr(plain(each))) for epoch, batch, each, _ in self.last_errors}
        former = [error for error in errors if (*error[:2], repr(plain(error[2]))) not in known]
        self.errors.failed += len(former)
        self.last_errors = deque([*former, *self.last_errors], maxlen=ERRORS_KEPT)

    def record(
        self, track: str, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        """Add an event to the timeline; see :class:`Event`."""
        event = Event(track, name, start, seconds, args)
        log = self.log
        log.events.append(event)
        file = log.file  # once: another thread may close the loader
        if file is not None:
            file.write(event)

    def keep_former(self, stats: Stats) -> None:
        """Keep what was counted so far: the verdict is of the time from now on."""
        timeline = replace(stats.timeline, events=())
        self.former = replace(stats, timeline=timeline, former=None)

    def snapshot(self) -> Stats:
        """Return a copy as of now, from any thread. What is not counted here the loader adds."""
        counts = self.by_worker.snapshot()
        known = {name: each for name, each in counts.items() if each.memory}
        times = replace(self.time)
        times.unpacking = max(0.0, times.wait - self.task_wait)
        return Stats(
            batches=self.batches,
            bytes=self.bytes,
            time=times,
            workers=replace(
                self.workers, seconds={name: each.seconds for name, each in counts.items()}
            ),
            memory=replace(
                self.memory,
                workers={name: each.memory for name, each in known.items()},
                at_start={name: each.at_start for name, each in known.items()},
                growth={name: each.growth for name, each in counts.items() if each.growth},
                jumps=tuple(snapshot(self.by_worker.jumps)),
            ),
            errors=replace(self.errors, last=tuple(snapshot(self.last_errors))),
            timeline=self.log.snapshot(time.perf_counter()),
            former=self.former,
        )
