"""What is counted and noted of a loader's batches, once a task, in the consumer's thread.

Here are numbers, and the last events as they come. What they say, somebody has to ask for:
``loader.stats`` (``_diagnosis/stats.py``), a trace, the doctor. None of these is loaded before.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._worker.messages import Reply

ERRORS_KEPT = 1000
"""Number of errors kept, the last ones."""

INDEX_KEPT = 1000
"""Most characters, or parts, of the index of a sample that a state has."""

EVENTS_KEPT = 3000
"""Number of events kept for the timeline, the last ones: some 1,000 tasks, in less than 1 MB."""

LOOKS_KEPT = 4000
"""Number of looks at the memory of workers that are kept, the last ones."""

Failed = tuple[int, int, Any, str]
"""A batch that failed, or a sample that was left out of its batch since it failed: epoch, number of
the batch in it, index of the sample (None if it is not known), type and message of the error."""


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
    except Exception as error:
        if breaks_in(error):
            raise
        return brief_repr(sample)


def track_of(worker: int, pid: int) -> str:
    """Return the track of a worker; those of an executor of the user's have no number."""
    if worker >= 0:
        return f"worker {worker}"
    return f"process {pid}" if worker == -1 else f"process {pid}, thread {-worker}"


class Event(NamedTuple):
    """Something that took a while, or that happened in an instant.

    Attributes:
        track: row of the timeline that it belongs to: "consumer", "sampler", "worker 0".
        name: "wait", "draw" or "task"; in an instant "died", "again" or "failed". A task is shown
            with its parts: "dataset", "transform", "collate" or "transport".
        start: when it began, in seconds of ``time.perf_counter``.
        seconds: how long it took; 0 for an instant.
        args: details, such as "batch", "count", "epoch", "cause".
    """

    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


class EventFile(Protocol):
    """A file that events are written to, see :class:`minloader._diagnosis.trace.Trace`."""

    path: Any

    def write(self, event: Event) -> None:
        """Add an event."""

    def close(self) -> None:
        """Complete the file."""


class Look(NamedTuple):
    """What memory a worker was seen to have for itself.

    Attributes:
        worker: its track.
        pid: its process.
        memory: bytes.
        at_start: bytes before its first batch; 0 if that is not known.
        epoch: of the last batch that it had made then.
        batch: the place of that in its epoch.
        item: what it was made of, as text: the item of the sampler, or shard and place in it.
    """

    worker: str
    pid: int
    memory: int
    at_start: int
    epoch: int
    batch: int
    item: str


# Slots: each access in Batches.__next__ takes half as long (3.12: 230 ns a batch, against 500).
@dataclass(slots=True)
class Counters:
    """What is counted of all epochs of a loader. All times are in seconds.

    Attributes:
        batches: number of batches delivered.
        bytes: their size, packed.
        wait, consumer, startup, sampler: where the consumer's time went, as in ``TimeStats``.
        dataset, transform, collate, transport: where that of the workers went, likewise.
        computing, queued, asleep: what they did in it, as in ``WorkerStats``.
        worker_seconds: that each worker was busy, by its track.
        chunk_size: most batches that the task sent last may hold.
        started_early: whether the workers were told to start before the first epoch.
        overflowed: number of batches that found no room in shared memory.
        failed, skipped, skipped_samples, retries, reread: as in ``ErrorStats``.
        left_at: when the consumer went to work on a batch; 0 if it has none.
        task_wait: part of the wait that was for tasks, and so not for unpacking.
        last_errors: the errors, in order.
        looks: the last looks at the memory of workers, in order.
        events: the last events of the timeline.
        began: when the first epoch began, by ``time.perf_counter``.
        file: where events are written as well; None: nowhere.
        former: the stats as they were when ``num_workers`` was set last; None if it never was.
    """

    batches: int = 0
    bytes: int = 0
    wait: float = 0.0
    consumer: float = 0.0
    startup: float = 0.0
    sampler: float = 0.0
    dataset: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transport: float = 0.0
    computing: float = 0.0
    queued: float = 0.0
    asleep: float = 0.0
    worker_seconds: dict[str, float] = field(default_factory=dict)
    chunk_size: int = 1
    started_early: bool = False
    overflowed: int = 0
    failed: int = 0
    skipped: int = 0
    skipped_samples: int = 0
    retries: int = 0
    reread: int = 0
    left_at: float = 0.0
    task_wait: float = 0.0
    last_errors: deque[Failed] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=LOOKS_KEPT))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    began: float = 0.0
    file: EventFile | None = None
    former: Any = None

    def come(self, begin: float) -> None:
        """Note that the consumer came for a batch, at ``begin``."""
        self.began = self.began or begin
        if self.left_at:
            self.consumer += begin - self.left_at
            self.left_at = 0.0

    def leave(self, begin: float, *, working: bool) -> None:
        """Note that the consumer goes, having waited since ``begin``.

        Args:
            begin: when it came for a batch.
            working: whether it goes to work on a batch, rather than for good.
        """
        now = time.perf_counter()
        self.wait += now - begin
        self.left_at = now if working else 0.0

    def count_epoch_start(self, begin: float) -> None:
        """Count the start of an epoch, which took since ``begin``."""
        self.began = self.began or begin
        self.count_task_wait(begin)
        self.leave(begin, working=False)

    def count_task_wait(self, begin: float) -> None:
        """Count the wait for a task and the sending of others, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.task_wait += seconds
        if self.worker_seconds and not self.startup:
            # Of waiting only: the consumer may have worked meanwhile.
            self.startup = self.wait + seconds
        self.record("consumer", "wait", begin, seconds, {})

    def drew(self, begin: float, count: int) -> None:
        """Count the drawing of ``count`` items from the sampler, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.sampler += seconds
        self.record("sampler", "draw", begin, seconds, {"count": count})

    def made(self, reply: Reply, args: dict[str, Any]) -> None:
        """Count the batches that a worker made.

        Args:
            reply: what it sent.
            args: "batch", the number of the first; "count", how many there are; and "epoch".
        """
        now = time.perf_counter()
        worker = track_of(reply.worker, reply.pid)
        figures = reply.figures
        timings = figures.timings
        seconds = timings.seconds
        parts = timings.transform, timings.collate, timings.packing
        self.worker_seconds[worker] = self.worker_seconds.get(worker, 0.0) + seconds
        self.dataset += max(0.0, seconds - sum(parts))
        self.transform += timings.transform
        self.collate += timings.collate
        self.transport += timings.packing
        usage = figures.usage
        if usage.processor is not None:
            computing, queued, asleep = usage.processor
            self.computing += computing
            self.queued += queued
            self.asleep += asleep
        self.bytes += figures.size
        self.overflowed += figures.overflowed
        if reply.shard is not None:
            self.reread += reply.shard.reread
        self.skipped_samples += figures.skipped
        start = timings.began
        # perf_counter counts from another moment on another machine: then the end is assumed to
        # be now. Within a machine it is the same clock for all processes.
        if not self.began <= start <= now - seconds:
            start = now - seconds
        self.record(worker, "task", start, seconds, args | {"timings": parts})

    def note_memory(self, reply: Reply, epoch: int, batch: int, item: Any) -> None:
        """Note the memory that a worker had when it had made a batch.

        Args:
            reply: what it sent.
            epoch: of the batch.
            batch: its number in that.
            item: what it was made of.
        """
        look = Look(
            worker=track_of(reply.worker, reply.pid),
            pid=reply.pid,
            memory=reply.figures.usage.memory,
            at_start=reply.figures.usage.memory_at_start,
            epoch=epoch,
            batch=batch,
            item=brief_repr(item),
        )
        self.looks.append(look)

    def fail(self, epoch: int, batch: int, sample: Any, error: str) -> None:
        """Count an error; see :data:`Failed`."""
        self.failed += 1
        self.last_errors.append((epoch, batch, sample, error))

    def recall(self, errors: Iterable[Failed]) -> None:
        """Have errors of a state that was loaded be among those that are known."""
        known = {(epoch, batch, repr(plain(each))) for epoch, batch, each, _ in self.last_errors}
        former = [error for error in errors if (*error[:2], repr(plain(error[2]))) not in known]
        self.failed += len(former)
        self.last_errors = deque([*former, *self.last_errors], maxlen=ERRORS_KEPT)

    def record(
        self, track: str, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        """Add an event to the timeline; see :class:`Event`."""
        event = Event(track, name, start, seconds, args)
        self.events.append(event)
        file = self.file  # once: another thread may close the loader
        if file is not None:
            file.write(event)
