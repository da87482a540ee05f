"""Where the time went: what is counted while a loader runs, and what follows from it.

The *counters* is written by the epochs as they go, once a task but for two readings of the clock a
batch. *Stats* is what a user sees of it: numbers, a verdict, a timeline. The *trace* is the
timeline in a file, written as it happens.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minloader._checks import amount, duration
from minloader._insight.trace import Event, Trace, _parts
from minloader._insight.verdict import _share, judge
from minloader._worker.messages import Reply

logger = logging.getLogger("minloader")

KEPT = 3000

"""How many of the last events are kept for the timeline: some 1,000 tasks, in less than 1 MB."""


@dataclass
class Stats:
    """How a loader did since it was made, over all its epochs. Times are in seconds.

    Attributes:
        batches: how many were delivered.
        bytes: what they took, packed; 0 where batches never leave the process.
        skipped: how many failed and were skipped.
        wait: that the consumer spent in ``iter()`` and ``next()``.
        consumer: that it spent on its own between batches.
        startup: part of the wait: until the first batch was there.
        sampler: part of the wait: drawing items.
        unpacking: part of the wait: making objects of what workers sent.
        dataset: of all workers together, for ``dataset[item]`` and the seeds before it.
        transform: of all workers together, in ``transform``.
        collate: of all workers together, in ``collate_fn``.
        transport: packing, of all workers together, and unpacking.
        slowest: the longest that one batch took a worker; of a task of several, their mean.
        busy: by worker, the share of ``seconds`` in which it made batches, start-up left out.
        executor: where they are made: "process", "thread", "inline" or "foreign".
        num_workers: how many there are now.
        in_flight: tasks under way now.
        chunk_size: how many batches the task sent last holds, at most.
        slots: how many pieces of shared memory there are now, used and free.
        slot_bytes: most bytes they may take now.
        overflowed: how many batches found no room in shared memory, and came through the pipe.
        retries: how often a batch was tried again whose worker had died.
        replaced: how many workers were replaced since they died, hung or grew too large.
    """

    batches: int = 0
    bytes: int = 0
    skipped: int = 0
    wait: float = 0.0
    consumer: float = 0.0
    startup: float = 0.0
    sampler: float = 0.0
    unpacking: float = 0.0
    dataset: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transport: float = 0.0
    slowest: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    executor: str = "process"
    num_workers: int = 0
    in_flight: int = 0
    chunk_size: int = 1
    slots: int = 0
    slot_bytes: int = 0
    overflowed: int = 0
    retries: int = 0
    replaced: int = 0
    _records: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    _began: float | None = field(default=None, repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """All the time that went into the loops over the loader: ``wait + consumer``."""
        return self.wait + self.consumer

    @property
    def events(self) -> tuple[Event, ...]:
        """What was done last, and when: a thousand tasks or so."""
        return tuple(part for event in self._records for part in _parts(event))

    @property
    def verdict(self) -> str:
        """What limits the loop, and the argument to change, in a sentence."""
        return judge(self)[1]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page for a browser: the verdict, where the time went, the timeline, the table.

        Args:
            path: file to write; overwritten. It needs no other.

        Raises:
            OSError: it cannot be written.
        """
        from minloader._insight import page  # not for every worker to import

        running = self.seconds - self._starting
        consumer = [("wait", self.wait - self._starting), ("own", self.consumer)]
        sampler = [("draw", self.sampler), ("idle", running - self.sampler)]
        workers = [*self._parts.items(), ("idle", running * max(self.num_workers, 1) - self._work)]
        kind = {"process": "processes", "thread": "threads"}.get(self.executor, "")
        where = f"{self.num_workers} {kind}" if self.num_workers else "none: in this process"
        started = f"the {duration(self._starting)} until workers were ready left out"
        bars = [
            page.Bar(label, [page.Part(*part) for part in parts], remark)
            for label, parts, remark in (
                ("consumer", consumer, started if self._starting else ""),
                ("sampler", sampler, ""),
                ("workers", workers, where),
            )
        ]
        kind, verdict = judge(self)
        subtitle = f"{self.batches:,} batches in {duration(self.seconds)}"
        subtitle += f", the first after {duration(self.startup)}"
        text = page.page(
            verdict[:1].upper() + verdict[1:] + ".",
            *(bars, self._rows(), self.events),
            bottleneck=kind,
            subtitle=subtitle,
            origin=self._began,
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _repr_html_(self) -> str:
        from minloader._insight import page

        title = f"minloader: {self.batches:,} batches in {duration(self.seconds)}"
        return page.table_html(title, self.verdict, self._rows())

    @property
    def _parts(self) -> dict[str, float]:
        """Seconds of all workers together, by what for."""
        packing = max(0.0, self.transport - self.unpacking)
        parts = {"dataset": self.dataset, "transform": self.transform}
        return parts | {"collate": self.collate, "transport": packing}

    @property
    def _work(self) -> float:
        """Seconds that all workers together were busy."""
        return sum(self._parts.values())

    @property
    def _starting(self) -> float:
        """Seconds until the first batch that did not go into making it."""
        if not self.num_workers:
            return 0.0
        return max(0.0, self.startup - self._work / max(self.batches, 1))

    def _rows(self) -> list[tuple[str, str, str]]:
        """The table: what, how much, and more about it."""
        each, total, work = max(self.batches, 1), self.seconds, self._work
        rate = self.batches / total if total else 0.0
        rows = [
            ("batches", f"{self.batches:,}", f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"),
            ("consumer's own time", duration(self.consumer), _share(self.consumer, total)),
            ("consumer waited", duration(self.wait), _share(self.wait, total)),
            ("until the first batch", duration(self.startup), "of the wait"),
            (
                "sampler",
                duration(self.sampler),
                f"of the wait; {duration(self.sampler / each)} a batch",
            ),
        ]
        if self.bytes:
            size = f"{amount(self.bytes)}, {amount(self.bytes / total if total else 0)}/s"
            rows[0] = (*rows[0][:2], f"{rows[0][2]}, {size}")
        for name, seconds in self._parts.items():
            remark = (
                f"{_share(seconds, work)} of the workers' time; {duration(seconds / each)} a batch"
            )
            if name == "transport":
                remark += f"; and {duration(self.unpacking)} here"
            rows.append((name, duration(seconds), remark))
        busy = ", ".join(f"{name}: {share:.0%}" for name, share in self.busy.items())
        chunk = f"; up to {self.chunk_size} batches each" if self.chunk_size > 1 else ""
        rows += [
            ("workers", f"{self.num_workers}", f"busy {busy}" if busy else ""),
            ("tasks under way", f"{self.in_flight}", chunk.removeprefix("; ")),
            ("shared memory", amount(self.slot_bytes), f"{self.slots} slots"),
            ("through the pipe", f"{self.overflowed}", "batches that found no room there"),
        ]
        for name, count, remark in (
            ("retries", self.retries, "batches whose worker died"),
            ("replaced", self.replaced, "workers"),
            ("skipped", self.skipped, "batches that failed"),
        ):
            if count:
                rows.append((name, f"{count}", remark))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        first, second = (max(len(row[n]) for row in rows) for n in (0, 1))
        lines = [f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([self.verdict, "", *lines])


class Counters:
    """What the epochs of a loader count, in the consumer's thread.

    Attributes: as of :class:`Stats`, and
        opening: seconds of the wait that were not for unpacking.
        packing: seconds that workers spent packing.
        work: seconds that each worker was busy, by name.
        records: the last events, those of tasks with all their parts in one.
        began: when the first epoch did.
        left: when the consumer went to work on a batch; 0 if it has none.
        trace: file that they are written to as well.
    """

    def __init__(self) -> None:
        self.batches = self.bytes = self.skipped = 0
        self.wait = self.consumer = self.startup = self.sampler = self.opening = 0.0
        self.transform = self.collate = self.packing = self.slowest = 0.0
        self.chunk_size, self.overflowed, self.retries = 1, 0, 0
        self.work: dict[str, float] = {}
        self.records: deque[Event] = deque(maxlen=KEPT)
        self.trace: Trace | None = None
        self.began = time.perf_counter()  # with the first epoch
        self.left = 0.0

    def enter(self) -> float:
        """The consumer wants a batch. Returns the time."""
        now = time.perf_counter()
        if self.left:
            self.consumer += now - self.left
        return now

    def leave(self, begin: float, *, working: bool = True) -> None:
        """The consumer goes, after ``begin``: to work, or else for good."""
        now = time.perf_counter()
        self.wait += now - begin
        self.left = now if working else 0.0

    def began_epoch(self, begin: float, *, working: bool) -> None:
        """An epoch was begun since ``begin``; ``working``: the consumer still has a batch."""
        if not self.startup:
            self.began = begin
        self.opened(begin)
        self.leave(begin, working=working)

    def opened(self, begin: float) -> None:
        """A task was waited for since ``begin``, and others sent."""
        seconds = time.perf_counter() - begin
        self.opening += seconds
        self.record("consumer", "wait", begin, seconds, {})

    def drew(self, begin: float, count: int) -> None:
        """Items were drawn from the sampler since ``begin``."""
        seconds = time.perf_counter() - begin
        self.sampler += seconds
        self.record("sampler", "draw", begin, seconds, {"count": count})

    def made(self, worker: str, reply: Reply, place: dict[str, Any]) -> None:
        """A worker made batches."""
        transform, collate, packing = reply.timings
        self.transform += transform
        self.collate += collate
        self.packing += packing
        self.bytes += reply.size
        self.work[worker] = self.work.get(worker, 0.0) + reply.seconds
        self.slowest = max(self.slowest, reply.seconds / place["count"])
        now = time.perf_counter()
        if not self.startup:
            self.startup = now - self.began
        start = reply.began
        if not self.began <= start <= now - reply.seconds:  # the clock of another machine
            start = now - reply.seconds
        self.record(worker, "task", start, reply.seconds, place | {"timings": reply.timings})

    def record(
        self, track: str, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        """Notes an event."""
        event = Event(track, name, start, seconds, args)
        self.records.append(event)
        if self.trace is not None:
            self.trace.write(event)

    def end_trace(self) -> None:
        """Completes the file, if there is one."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.close()

    def snapshot(self, **now: Any) -> Stats:
        """What there is to say now; ``now`` has what others know."""
        unpacking = max(0.0, self.wait - self.opening)
        timings = self.transform + self.collate + self.packing
        stats = Stats(
            batches=self.batches,
            bytes=self.bytes,
            skipped=self.skipped,
            wait=self.wait,
            consumer=self.consumer,
            startup=self.startup,
            sampler=self.sampler,
            unpacking=unpacking,
            dataset=max(0.0, sum(self.work.values()) - timings),
            transform=self.transform,
            collate=self.collate,
            transport=self.packing + unpacking,
            slowest=self.slowest,
            chunk_size=self.chunk_size,
            overflowed=self.overflowed,
            retries=self.retries,
            _records=tuple(self.records),
            _began=self.began,
            **now,
        )
        running = max(stats.seconds - stats._starting, 1e-9)
        stats.busy = {name: min(1.0, self.work[name] / running) for name in sorted(self.work)}
        return stats
