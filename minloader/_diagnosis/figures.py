"""The figures of a loader, and what follows from them: :class:`Stats` without how it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

from minloader._epochs.counters import Event, Failed

STAGES = ("dataset", "transform", "collate", "transport")
"""What a worker does for a batch, one after another."""

LATELY = 300.0
"""Seconds that ``slowest`` and the times of a batch look back, if so many events are kept."""


@dataclass(slots=True, frozen=True)
class Timeline:
    """A copy of the last events.

    Attributes:
        events: those of tasks not split yet.
        began: when the first epoch began, by ``time.perf_counter``.
        taken_at: when this copy was made.
    """

    events: tuple[Event, ...] = ()
    began: float = 0.0
    taken_at: float = 0.0


class Jump(NamedTuple):
    """A worker was seen to have grown by more than 50 MB since its memory was looked at before.

    Attributes:
        worker: its name, as in ``memory``.
        bytes: by which it grew.
        epoch: of the last batch that it had made then.
        batch: the place of that in its epoch.
        item: what it was made of, as text: the item of the sampler, or shard and place in it.
    """

    worker: str
    bytes: int
    epoch: int
    batch: int
    item: str


@dataclass(slots=True)
class TimeStats:
    """Where the time went, in seconds. Those of the workers are summed over all workers.

    Attributes:
        wait: what the consumer spent in ``iter()`` and ``next()``.
        consumer: what the consumer spent on its own work between batches.
        startup: part of ``wait``: until the first batch was there.
        sampler: part of ``wait``: drawing items from the sampler.
        unpacking: part of ``wait``: making objects of what workers sent.
        dataset: workers' time in ``dataset[item]``, and in seeding before it.
        transform: workers' time in ``transform``.
        collate: workers' time in ``collate_fn``.
        transport: workers' time for packing batches.
    """

    wait: float = 0.0
    consumer: float = 0.0
    startup: float = 0.0
    sampler: float = 0.0
    unpacking: float = 0.0
    dataset: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transport: float = 0.0

    SUMS: ClassVar = ("wait", "consumer", "startup", "sampler", "unpacking", *STAGES)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of all workers together, by what they did."""
        return {name: getattr(self, name) for name in STAGES}

    @property
    def work(self) -> float:
        """Seconds that all workers together were busy."""
        return sum(self.stages.values())


@dataclass(slots=True)
class WorkerStats:
    """Who makes the batches, and what these do in their time.

    Attributes:
        executor: where batches are made: "process", "thread", "inline" or "foreign".
        count: number of workers now.
        concurrency: most reads at the same time in each worker, where the dataset is one of
            :class:`minloader.concurrent`; else 0.
        in_order: whether batches come in the order of the sampler.
        in_flight: number of tasks under way now.
        chunk_size: most batches that the task sent last may hold.
        started_early: whether ``loader.start()`` was called.
        seconds: that each worker was busy, by worker.
        computing: seconds of processor time that workers took while they made batches, with all
            programs that they started. This and the next two are sampled by the doctor, in worker
            processes where there is ``/proc``; else 0.
        queued: seconds that workers waited for a processor, with those programs.
        asleep: seconds in which neither was so: workers waited for files, the network, locks.
    """

    executor: str = "process"
    count: int = 0
    concurrency: int = 0
    in_order: bool = True
    in_flight: int = 0
    chunk_size: int = 1
    started_early: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    computing: float = 0.0
    queued: float = 0.0
    asleep: float = 0.0

    SUMS: ClassVar = ("computing", "queued", "asleep")

    @property
    def measured(self) -> float:
        """Seconds of the workers of which it is known how they were spent."""
        return self.computing + self.queued + self.asleep

    @property
    def capacity(self) -> int:
        """How many workers can make batches. An executor of the user's may have fewer than it is
        given tasks: its workers are those that have made batches, each thread of Dask's one."""
        theirs = sum(name.startswith("process ") for name in self.seconds)
        return min(self.count, theirs) if theirs else self.count


@dataclass(slots=True)
class MemoryStats:
    """What workers and batches take, in bytes.

    Attributes:
        workers: what a worker process has for itself now, by worker; {} where that is not known.
        at_start: the same before its first batch.
        growth: of these, by how much a worker has grown steadily so far; {} if none has.
        jumps: the last times that a worker was seen to have grown by more than 50 MB at once, as
            tuples ``(worker, bytes, epoch, batch, item)``: the last batch that it had made then,
            and what it was made of.
        slots: number of pieces of shared memory now, used and free.
        slot_bytes: bytes that these have now.
        slot_limit: most bytes that they may have together: ``shared_memory``.
        overflowed: number of batches that found no room in shared memory, and came through the
            pipe.
    """

    workers: dict[str, int] = field(default_factory=dict)
    at_start: dict[str, int] = field(default_factory=dict)
    growth: dict[str, int] = field(default_factory=dict)
    jumps: tuple[Jump, ...] = ()
    slots: int = 0
    slot_bytes: int = 0
    slot_limit: int = 0
    overflowed: int = 0

    SUMS: ClassVar = ("overflowed",)


@dataclass(slots=True)
class ErrorStats:
    """What has failed, what was left out, and what was made again.

    Attributes:
        failed: number of batches that failed, whatever became of them, and of samples that were
            left out, or replaced, since they failed; with those that a state has brought along.
        last: the last 1,000 of these, as tuples ``(epoch, batch, sample, error)``: the number of
            the batch in its epoch, the index of the sample (None if it is not known), and the
            error as text.
        skipped: number of batches that failed and were skipped, or of which no sample was left.
        skipped_samples: number of samples that were left out of their batches.
        retries: number of times that a batch was tried again because its worker had died or hung,
            or because the executor had lost it.
        replaced: number of workers replaced because they died, hung or grew too large.
        reread: number of batches of a stream that were read again, and passed over, to continue
            after them; 0 in an undisturbed epoch.
    """

    failed: int = 0
    last: tuple[Failed, ...] = ()
    skipped: int = 0
    skipped_samples: int = 0
    retries: int = 0
    replaced: int = 0
    reread: int = 0

    SUMS: ClassVar = ("failed", "skipped", "skipped_samples", "retries", "replaced", "reread")


@dataclass(slots=True, repr=False)
class PlainStats:
    """What was counted, as :class:`minloader.Stats` has it."""

    batches: int = 0
    bytes: int = 0
    time: TimeStats = field(default_factory=TimeStats)
    workers: WorkerStats = field(default_factory=WorkerStats)
    memory: MemoryStats = field(default_factory=MemoryStats)
    errors: ErrorStats = field(default_factory=ErrorStats)
    timeline: Timeline = field(default_factory=Timeline, compare=False)
    former: PlainStats | None = field(default=None, compare=False)

    @property
    def seconds(self) -> float:
        """All the time that went into the loops over the loader: ``time.wait + time.consumer``."""
        return self.time.wait + self.time.consumer

    @property
    def bytes_per_second(self) -> float:
        """``bytes`` for each of these seconds; 0 where batches never leave the process."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def starting(self) -> float:
        """Seconds until workers were ready: ``startup`` without the making of the first batch."""
        if not self.workers.count:
            return 0.0
        return max(0.0, self.time.startup - self.time.work / max(self.batches, 1))

    @property
    def busy(self) -> dict[str, float]:
        """Share of ``seconds`` in which a worker made batches, by worker; the time until workers
        were ready is left out."""
        running = max(self.seconds - self.starting, 1e-9)
        return {name: min(1.0, each / running) for name, each in self.workers.seconds.items()}

    @property
    def median(self) -> dict[str, float]:
        """Seconds that half of a worker's batches took at most, by worker, of the last minutes.

        For a task of several batches it is their mean; likewise for ``p95`` and ``slowest``.
        """
        return {worker: _reached(times, 50) for worker, times in self._times().items()}

    @property
    def p95(self) -> dict[str, float]:
        """Seconds that 95 % of a worker's batches took at most, by worker, of the last minutes."""
        return {worker: _reached(times, 95) for worker, times in self._times().items()}

    @property
    def slowest(self) -> float:
        """Longest time that a batch took a worker in the last minutes."""
        return max((times[-1] for times in self._times().values()), default=0.0)

    def _times(self) -> dict[str, list[float]]:
        """Seconds that batches took lately, sorted, by worker."""
        found: dict[str, list[float]] = {}
        for event in self.timeline.events:
            if event.name == "task" and event.start > self.timeline.taken_at - LATELY:
                found.setdefault(event.track, []).append(event.seconds / event.args["count"])
        return {worker: sorted(found[worker]) for worker in sorted(found)}

    def as_dict(self) -> dict[str, float]:
        """Return all figures that are numbers, by name: for W&B, TensorBoard or Prometheus.

        A figure of a part has the part's name in front: ``"time_wait"``. What there is for each
        worker has its name at the end: ``"busy_worker_0"``.
        """
        return dict(self._figures())

    def _figures(self) -> Iterator[tuple[str, float]]:
        named: dict[str, Any] = {"batches": self.batches, "bytes": self.bytes}
        for part in ("time", "workers", "memory", "errors"):
            record = getattr(self, part)
            named |= {f"{part}_{each.name}": getattr(record, each.name) for each in fields(record)}
        for name in ("seconds", "bytes_per_second", "slowest", "busy", "median", "p95"):
            named[name] = getattr(self, name)
        for name, value in named.items():
            if isinstance(value, dict):
                for key, figure in value.items():
                    yield re.sub(r"\W+", "_", f"{name}_{key}"), figure
            elif type(value) in (int, float):
                yield name, value

    def since(self, before: PlainStats) -> Self:
        """Return the figures of the time since an earlier copy. What is so now stays as it is."""
        workers = _grown(self.workers, before.workers)
        former = before.workers.seconds
        now = self.workers.seconds
        seconds = {name: each - former.get(name, 0.0) for name, each in now.items()}
        workers.seconds = {name: each for name, each in seconds.items() if each}
        errors = _grown(self.errors, before.errors)
        errors.last = self.errors.last[max(0, len(self.errors.last) - errors.failed) :]
        memory = _grown(self.memory, before.memory)
        memory.jumps = tuple(each for each in memory.jumps if each not in before.memory.jumps)
        start = before.timeline.taken_at
        events = tuple(event for event in self.timeline.events if event.start >= start)
        return replace(
            self,
            batches=self.batches - before.batches,
            bytes=self.bytes - before.bytes,
            time=_grown(self.time, before.time),
            workers=workers,
            memory=memory,
            errors=errors,
            timeline=replace(self.timeline, events=events),
            former=None,
        )

    def without_events(self) -> Self:
        """Return what is kept of the stats of another number of workers."""
        return replace(self, timeline=replace(self.timeline, events=()), former=None)

    @property
    def events(self) -> tuple[Event, ...]:
        """The timeline of the last thousand tasks or so."""
        return tuple(part for event in self.timeline.events for part in split_task(event))


def _reached(times: list[float], percent: int) -> float:
    """Return what so many of some times, which are sorted, are at most."""
    return times[(len(times) * percent - 1) // 100]


def _grown(part: Any, before: Any) -> Any:
    """Return a copy of a part of the stats, of the time since an earlier copy."""
    grown = {name: getattr(part, name) - getattr(before, name) for name in part.SUMS}
    return replace(part, **grown)


def split_task(event: Event) -> Iterator[Event]:
    """Yield an event as it is shown: a task, then its stages one behind the other.

    For a task of several batches the time of each stage is summed over these.
    """
    args = dict(event.args)
    timings = args.pop("timings", None)
    yield event._replace(args=args)
    if timings is None:
        return
    start = event.start
    stages = max(0.0, event.seconds - sum(timings)), *timings
    for name, seconds in zip(STAGES, stages, strict=True):
        if seconds > 0:
            yield Event(track=event.track, name=name, start=start, seconds=seconds, args={})
        start += seconds
