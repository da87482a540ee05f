"""Count what a loader does, and show where the time went.

:class:`Stats` is what users see: figures, a verdict, a timeline. :class:`Counters` is the same
object while it is written: the epochs update it once a task, and read the clock twice a batch.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minloader._checks import amount, copied, shown
from minloader._insight import page
from minloader._insight.memory import JUMP, Jump, WorkerCount
from minloader._insight.trace import Event, Trace, split_task
from minloader._insight.verdict import judge
from minloader._worker.generators import told
from minloader._worker.messages import Reply

EVENTS_KEPT = 3000
"""Number of events kept for the timeline, the last ones: some 1,000 tasks, in less than 1 MB."""

ERRORS_KEPT = 1000
"""Number of errors kept, the last ones."""

LATELY = 300.0
"""Seconds that ``slowest`` and the times of a batch look back, if so many events are kept."""

SUMS = (
    *("batches", "bytes", "skipped", "skipped_samples", "failed", "wait", "consumer", "startup"),
    *("sampler", "unpacking", "dataset", "transform", "collate", "transport", "computing"),
    *("queued", "asleep", "overflowed", "retries", "replaced", "reread"),
)
"""The figures that only grow."""

logger = logging.getLogger("minloader")


Failed = tuple[int, int, Any, str]
"""A batch that failed, or a sample that was left out of its batch since it failed: epoch, place of
the batch in it, index of the sample (None if it is not known), type and message of the error."""


@dataclass(slots=True, repr=False)
class Stats:
    """Figures of a loader since it was made, over all its epochs.

    All times are in seconds. Those of the workers are summed over all workers.

    Attributes:
        batches: number of batches delivered.
        bytes: size of the batches that workers have sent, packed, delivered or not; 0 where
            batches never leave the process.
        skipped: number of batches that failed and were skipped, or of which no sample was left.
        skipped_samples: number of samples that were left out of their batches.
        failed: number of batches that failed, whatever became of them, and of samples that were
            left out since they failed.
        errors: the last 1,000 of these, as tuples ``(epoch, batch, sample, error)``: the place of
            the batch in its epoch, the index of the sample (None if it is not known), and the
            error as text.
        wait: time that the consumer spent in ``iter()`` and ``next()``.
        consumer: time that the consumer spent on its own work between batches.
        startup: part of ``wait``: the time until the first batch was there.
        sampler: part of ``wait``: drawing items from the sampler.
        unpacking: part of ``wait``: making objects of what workers sent.
        dataset: workers' time in ``dataset[item]``, and in seeding before it.
        transform: workers' time in ``transform``.
        collate: workers' time in ``collate_fn``.
        transport: workers' time for packing batches, and ``unpacking``.
        computing: workers' processor time while they made batches, with all programs that they
            started. This and the next two are sampled, in worker processes where there is
            ``/proc``; else 0.
        queued: workers' time of waiting for a processor, with those programs.
        asleep: workers' time in which neither was so: of waiting for files, the network, locks.
        memory: bytes of memory that a worker process has for itself now, by worker; {} where that
            is not known.
        memory_at_start: the same before its first batch.
        growth: of these, bytes by which a worker has grown steadily so far; {} if none has.
        jumps: the last 100 times that a worker was seen to have grown by more than 50 MB at once,
            as tuples ``(worker, bytes, epoch, batch, item)``: the last batch that it had made then,
            and what it was made of.
        executor: where batches are made: "process", "thread", "inline" or "foreign".
        num_workers: number of workers now.
        reads: most reads at the same time in each worker, where the dataset is one of
            :func:`concurrent`; else 0.
        in_flight: number of tasks under way now.
        chunk_size: most batches that the task sent last may hold.
        slots: number of pieces of shared memory now, used and free.
        slot_bytes: bytes that these have now.
        slot_limit: most bytes that they may have together: ``shared_memory``.
        overflowed: number of batches that found no room in shared memory, and came through the
            pipe.
        retries: number of times that a batch was tried again because its worker had died or hung,
            or because the executor had lost it.
        replaced: number of workers replaced because they died, hung or grew too large.
        reread: number of batches of a stream that were read again, and passed over, to continue
            after them; 0 in an undisturbed epoch.
    """

    batches: int = 0
    bytes: int = 0
    skipped: int = 0
    skipped_samples: int = 0
    failed: int = 0
    errors: tuple[Failed, ...] = field(default=(), repr=False)
    wait: float = 0.0
    consumer: float = 0.0
    startup: float = 0.0
    sampler: float = 0.0
    unpacking: float = 0.0
    dataset: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transport: float = 0.0
    computing: float = 0.0
    queued: float = 0.0
    asleep: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    memory_at_start: dict[str, int] = field(default_factory=dict)
    growth: dict[str, int] = field(default_factory=dict)
    jumps: tuple[Jump, ...] = ()
    executor: str = "process"
    num_workers: int = 0
    reads: int = 0
    in_flight: int = 0
    chunk_size: int = 1
    slots: int = 0
    slot_bytes: int = 0
    slot_limit: int = 0
    overflowed: int = 0
    retries: int = 0
    replaced: int = 0
    reread: int = 0
    # The last events, those of tasks not split yet; when the first epoch began; when this is of;
    # seconds that each worker was busy; and what was counted when num_workers was set last.
    _records: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    _began: float = field(default=0.0, repr=False, compare=False)
    _began_early: bool = field(default=False, repr=False, compare=False)  # by loader.start()
    _at: float = field(default=0.0, repr=False, compare=False)
    _worked: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    _base: Stats | None = field(default=None, repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """All the time that went into the loops over the loader: ``wait + consumer``."""
        return self.wait + self.consumer

    @property
    def busy(self) -> dict[str, float]:
        """Share of ``seconds`` in which a worker made batches, by worker; the time until workers
        were ready is left out."""
        running = max(self.seconds - self._starting, 1e-9)
        return {worker: min(1.0, each / running) for worker, each in self._worked.items()}

    @property
    def median(self) -> dict[str, float]:
        """Seconds that half of a worker's batches took at most, by worker, of the last minutes.

        For a task of several batches it is their mean; likewise for ``p95`` and ``slowest``.
        """
        return {worker: times[len(times) // 2] for worker, times in self._times().items()}

    @property
    def p95(self) -> dict[str, float]:
        """Seconds that 95 % of a worker's batches took at most, by worker, of the last minutes."""
        return {worker: times[len(times) * 19 // 20] for worker, times in self._times().items()}

    @property
    def slowest(self) -> float:
        """Longest time that a batch took a worker in the last minutes."""
        return max((times[-1] for times in self._times().values()), default=0.0)

    def _times(self) -> dict[str, list[float]]:
        """Seconds that batches took lately, sorted, by worker."""
        found: dict[str, list[float]] = {}
        for event in self._records:
            if event.name == "task" and event.start > self._at - LATELY:
                found.setdefault(event.track, []).append(event.seconds / event.args["count"])
        return {worker: sorted(found[worker]) for worker in sorted(found)}

    def as_dict(self) -> dict[str, float]:
        """Return all figures that are numbers, by name: for W&B, TensorBoard or Prometheus.

        What there is for each worker has its name at the end: ``"busy_worker_0"``.
        """
        names = [each.name for each in fields(Stats) if each.name[0] != "_"]
        figures: dict[str, float] = {}
        for name in [*names, "seconds", "slowest", "busy", "median", "p95"]:
            value = getattr(self, name)
            if isinstance(value, dict):
                figures |= {re.sub(r"\W+", "_", f"{name}_{key}"): value[key] for key in value}
            elif isinstance(value, int | float):
                figures[name] = value
        return figures

    def since(self, before: Stats) -> Stats:
        """Return the figures of the time since an earlier copy. What is so now stays as it is."""
        grown: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in SUMS}
        worked = {key: each - before._worked.get(key, 0.0) for key, each in self._worked.items()}
        return replace(
            self,
            **grown,
            errors=self.errors[len(self.errors) - min(grown["failed"], len(self.errors)) :],
            _worked={key: each for key, each in worked.items() if each},
            _records=tuple(event for event in self._records if event.start >= before._at),
            _base=None,
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """The timeline of the last thousand tasks or so."""
        return tuple(part for event in self._records for part in split_task(event))

    @property
    def verdict(self) -> str:
        """One sentence: what limits the loop, and the argument to change.

        It is of the time since ``num_workers`` was set last, and says so if it was.
        """
        told = self._judged[1]
        if self._base is None or self.batches == self._base.batches:
            return told
        return f"since num_workers={self.num_workers} was set, {told}"

    @property
    def _judged(self) -> tuple[str, str]:
        """The bottleneck and the verdict, see :func:`judge`."""
        return judge(self if self._base is None else self.since(self._base))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page for a browser: the verdict, where the time went, the timeline, the table.

        Args:
            path: file to write; overwritten. The page needs no other file.

        Raises:
            OSError: the file cannot be written.
        """
        text = page.render(page.data(self))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def __str__(self) -> str:
        return page.text(self.verdict, page.table(self))

    __repr__ = __str__  # for who types loader.stats at the interpreter's prompt

    def _repr_html_(self) -> str:
        return page.fragment(self.verdict, page.table(self))

    @property
    def _stages(self) -> dict[str, float]:
        """Seconds of all workers together, by what they did."""
        return {
            "dataset": self.dataset,
            "transform": self.transform,
            "collate": self.collate,
            "transport": max(0.0, self.transport - self.unpacking),
        }

    @property
    def _work(self) -> float:
        """Seconds that all workers together were busy."""
        return sum(self._stages.values())

    @property
    def _measured(self) -> float:
        """Seconds of the workers of which it is known how they were spent."""
        return self.computing + self.queued + self.asleep

    @property
    def _capacity(self) -> int:
        """How many workers can make batches. An executor of the user's may have fewer than it is
        given tasks: its workers are those that have made batches, each thread of Dask's one."""
        theirs = sum(name.startswith("process ") for name in self._worked)
        return min(self.num_workers, theirs) if theirs else self.num_workers

    @property
    def _starting(self) -> float:
        """Seconds until workers were ready: ``startup`` without the making of the first batch."""
        if not self.num_workers:
            return 0.0
        return max(0.0, self.startup - self._work / max(self.batches, 1))


# Slots, as Stats has: objects of more than 30 attributes lose CPython's inline values, and each
# access in Batches.__next__ takes twice as long (3.12: 500 ns a batch, against 230).
@dataclass(slots=True, repr=False)
class Counters(Stats):
    """The stats of a loader while the epochs write them, in the consumer's thread.

    Attributes:
        left: when the consumer went to work on a batch; 0 if it has none.
        opening: part of ``wait`` that was not for unpacking.
        workers: what is counted of each worker, by name.
        last_errors: the errors, in order.
        last_jumps: the jumps, in order.
        told_growth: whether the log has said that a worker grows.
        own_generators: names of generators of the dataset's own that several batches have drawn
            from; the log has said so of the first.
        base: what was counted when ``num_workers`` was set last.
        records: the last events, those of tasks not split yet.
        trace: file that events are written to as well, or None.
    """

    left: float = 0.0
    opening: float = 0.0
    workers: dict[str, WorkerCount] = field(default_factory=lambda: defaultdict(WorkerCount))
    last_errors: deque[Failed] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    last_jumps: deque[Jump] = field(default_factory=lambda: deque(maxlen=100))
    told_growth: bool = False
    own_generators: dict[str, None] = field(default_factory=dict)
    base: Stats | None = None
    records: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    trace: Trace | None = None

    def leave(self, begin: float, *, working: bool) -> None:
        """Note that the consumer goes, having waited since ``begin``.

        Args:
            begin: when it came for a batch.
            working: whether it goes to work on a batch, rather than for good.
        """
        now = time.perf_counter()
        self.wait += now - begin
        self.left = now if working else 0.0

    def begin_epoch(self) -> float:
        """Note when the first epoch begins: replies may come before it has begun. Return now."""
        now = time.perf_counter()
        if not self.startup:
            self._began = now
        return now

    def began_epoch(self, begin: float) -> None:
        """Count the start of an epoch, which took since ``begin``."""
        self.opened(begin)
        self.leave(begin, working=False)

    def opened(self, begin: float) -> None:
        """Count the wait for a task and the sending of others, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.opening += seconds
        if self.workers and not self.startup:
            self.startup = self.wait + seconds  # of waiting: the consumer may have worked meanwhile
        self.record("consumer", "wait", begin, seconds, {})

    def drew(self, begin: float, count: int) -> None:
        """Count the drawing of ``count`` items from the sampler, which took since ``begin``."""
        seconds = time.perf_counter() - begin
        self.sampler += seconds
        self.record("sampler", "draw", begin, seconds, {"count": count})

    def made(self, worker: str, reply: Reply, args: dict[str, Any], item: Any) -> None:
        """Count the batches that a worker made.

        Args:
            worker: track of the worker on the timeline.
            reply: what it sent.
            args: "batch", the number of the first; "count", how many there are; and "epoch".
            item: what the last of them was made of.
        """
        now = time.perf_counter()
        transform, collate, packing = reply.timings
        self.dataset += max(0.0, reply.seconds - transform - collate - packing)
        self.transform += transform
        self.collate += collate
        self.transport += packing
        if reply.processor is not None:
            computing, queued, asleep = reply.processor
            self.computing += computing
            self.queued += queued
            self.asleep += asleep
        self.bytes += reply.size
        self.reread += reply.reread
        self.skipped_samples += reply.skipped
        count = self.workers[worker]
        count.seconds += reply.seconds
        count.batches += args["count"]
        grows = bool(reply.memory) and count.note_memory(reply)
        if reply.memory and count.jump > JUMP:
            last = args["batch"] + args["count"] - 1
            self.last_jumps.append(Jump(worker, count.jump, args["epoch"], last, shown(item)))
        if grows and not self.told_growth:
            self.told_growth = True
            logger.warning(
                "%s grew by %s in %d batches, %s each: the dataset keeps something, or a cache is "
                "still being filled; worker_memory_limit replaces workers that grow too large; "
                "said once",
                *(worker, amount(count.growth), count.grown_in),
                amount(count.growth / count.grown_in),
            )
        if reply.drawn:
            if not self.own_generators:
                logger.warning("%s; said once", told(reply.drawn))
            self.own_generators |= dict.fromkeys(reply.drawn)
        start = reply.began
        # perf_counter counts from another moment on another machine: then the end is assumed to
        # be now. Within a machine it is the same clock for all processes.
        if not self._began <= start <= now - reply.seconds:
            start = now - reply.seconds
        self.record(worker, "task", start, reply.seconds, args | {"timings": reply.timings})

    def fail(self, epoch: int, batch: int, sample: Any, error: str) -> None:
        """Count an error; see :data:`Failed`."""
        self.failed += 1
        self.last_errors.append((epoch, batch, sample, error))

    def record(
        self, track: str, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        """Add an event to the timeline; see :class:`Event`."""
        event = Event(track, name, start, seconds, args)
        self.records.append(event)
        trace = self.trace  # once: another thread may close the loader
        if trace is not None:
            trace.write(event)

    def begin_anew(self, stats: Stats) -> None:
        """Have the verdict be of the time from now on."""
        self.base = replace(stats, _records=(), _base=None)

    def end_trace(self) -> None:
        """Complete the trace file, if there is one."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.close()

    def snapshot(self, **now: Any) -> Stats:
        """Return a copy as of now, from any thread.

        Args:
            **now: the fields of :class:`Stats` that are not counted here.
        """
        counted = {each.name: getattr(self, each.name) for each in fields(Stats)}
        stats = Stats(**counted | now)
        stats.unpacking = max(0.0, stats.wait - self.opening)
        stats.transport += stats.unpacking
        stats._records, stats._at = tuple(copied(self.records)), time.perf_counter()
        stats.errors, stats._base = tuple(copied(self.last_errors)), self.base
        stats.jumps = tuple(copied(self.last_jumps))
        workers = sorted(copied(self.workers.items()))
        stats._worked = {name: each.seconds for name, each in workers}
        stats.memory = {name: each.memory for name, each in workers if each.memory}
        stats.memory_at_start = {name: each.at_start for name, each in workers if each.memory}
        stats.growth = {name: each.growth for name, each in workers if each.growth}
        return stats
