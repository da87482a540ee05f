"""Where the time went: what is counted while a loader runs, and what follows from it.

The *tally* is written by the epochs as they go, once a task but for two readings of the clock a
batch. *Stats* is what a user sees of it: numbers, a verdict, a timeline. The *trace* is the
timeline in a file, written as it happens.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minloader.errors import amount, duration, shown
from minloader.processes import processors
from minloader.tasks import Reply

__all__ = ["Event", "Stats", "Tally", "Trace"]

logger = logging.getLogger("minloader")

KEPT = 3000
"""How many of the last events are kept for the timeline: some 1,000 tasks, in less than 1 MB."""


class Event(NamedTuple):
    """Something that was done, or happened.

    Attributes:
        lane: by whom: "consumer", "sampler", "worker 0".
        name: what: "wait", "draw", "task", "dataset", "transform", "collate", "transport"; or, in
            an instant, "died", "again", "failed".
        start: when it began, by ``time.perf_counter``.
        seconds: how long it took; 0 if it happened in an instant.
        args: more about it.
    """

    lane: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


def _parts(event: Event) -> Iterator[Event]:
    """An event as it is shown: a task followed by its parts, one behind the other.

    What a task of several batches did in turns is added up, part by part.
    """
    laps = event.args.get("laps")
    if laps is None:
        yield event
        return
    transform, collate, transport = laps
    dataset = max(0.0, event.seconds - sum(laps))
    yield event._replace(args={k: v for k, v in event.args.items() if k != "laps"})
    start = event.start
    for name, seconds in (
        ("dataset", dataset),
        ("transform", transform),
        ("collate", collate),
        ("transport", transport),
    ):
        if seconds > 0:
            yield Event(event.lane, name, start, seconds, {})
        start += seconds


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
        return _judge(self)[1]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page for a browser: the verdict, where the time went, the timeline, the table.

        Args:
            path: file to write; overwritten. It needs no other.

        Raises:
            OSError: it cannot be written.
        """
        from minloader import report  # not for every worker to import

        running = self.seconds - self._starting
        consumer = [("wait", self.wait - self._starting), ("own", self.consumer)]
        sampler = [("draw", self.sampler), ("idle", running - self.sampler)]
        workers = [*self._parts.items(), ("idle", running * max(self.num_workers, 1) - self._work)]
        kind = {"process": "processes", "thread": "threads"}.get(self.executor, "")
        where = f"{self.num_workers} {kind}" if self.num_workers else "none: in this process"
        started = f"the {duration(self._starting)} until workers were ready left out"
        bars = [
            report.Bar(label, [report.Part(*part) for part in parts], remark)
            for label, parts, remark in (
                ("consumer", consumer, started if self._starting else ""),
                ("sampler", sampler, ""),
                ("workers", workers, where),
            )
        ]
        kind, verdict = _judge(self)
        subtitle = f"{self.batches:,} batches in {duration(self.seconds)}"
        subtitle += f", the first after {duration(self.startup)}"
        page = report.page(
            verdict[:1].upper() + verdict[1:] + ".",
            *(bars, self._rows(), self.events),
            bottleneck=kind,
            subtitle=subtitle,
            origin=self._began,
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    def _repr_html_(self) -> str:
        from minloader import report

        title = f"minloader: {self.batches:,} batches in {duration(self.seconds)}"
        return report.table_html(title, self.verdict, self._rows())

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


# --- the verdict


def _judge(stats: Stats) -> tuple[str, str]:
    """What limits the loop: a kind of span, or "" if that cannot be said, and the sentence."""
    if not stats.batches:
        return "", "no batch has been delivered yet"
    workers, start = stats.num_workers, stats._starting
    total, wait = stats.seconds - start, stats.wait - start
    if start > 3 * total:
        return "", (
            f"the first batch took {duration(stats.startup)}, {_share(start, stats.seconds)} of "
            "the time so far: look again after more batches; loader.start() begins earlier"
        )
    waited = f"the consumer waited {_share(wait, total)} of the time"
    busy = min(1.0, stats._work / (total * max(workers, 1)))
    idle = f", the workers were idle {_percent(1 - busy)}" if workers else ""
    if wait < 0.1 * total:
        needed = max(1, math.ceil(workers * busy / 0.8))
        fewer = f": num_workers={needed} would do" if needed < workers else ""
        return "own", f"the consumer is the limit: it waited {_share(wait, total)} of the time" + (
            idle + fewer
        )
    if stats.sampler > wait / 2:
        each = duration(stats.sampler / stats.batches)
        return "draw", f"the sampler is the limit: it takes {each} a batch; {waited}{idle}"
    part, share = _largest(stats)
    limit = f"{_NAMES[part]} is the limit, with {_percent(share)} of the work"
    if not workers:
        return part, f"{limit}: {waited}; num_workers=1 or more makes batches meanwhile"
    if busy > 0.6 and stats._work > _TINY * stats.batches:
        who = f"{_who(workers)} busy {_percent(busy)}"
        return part, f"{limit}: {who}, {waited}; {_advice(stats, part)}"
    return "", f"{waited}{idle.replace(',', ', but')}: {_between(stats, total, wait)}"


_TINY = 30e-6
"""Seconds of a worker below which it is the delivery of a batch that costs, not its making."""

_NAMES = {
    "dataset": "the dataset",
    "transform": "transform",
    "collate": "collate_fn",
    "transport": "packing batches",
}


def _largest(stats: Stats) -> tuple[str, float]:
    """What most of the workers' time goes to, and its share."""
    parts = stats._parts
    part = max(parts, key=lambda name: parts[name])
    return part, parts[part] / (stats._work or 1.0)


def _who(workers: int) -> str:
    return {1: "the worker was", 2: "both workers were"}.get(workers, f"all {workers} workers were")


def _advice(stats: Stats, part: str) -> str:
    """What to do where the workers are the limit."""
    if part == "transport":
        if stats.overflowed > stats.batches / 10:
            return "more shared_memory would help, since batches go through the pipe"
        return "make large arrays with collate or minloader.empty, and few small objects"
    if stats.executor == "thread":
        return "executor='process' would help, unless they wait for files or the network"
    if stats.num_workers < processors():
        return "more workers would help (num_workers)"
    return (
        f"make it cheaper, or set num_workers past the {processors()} processors there are if it "
        "waits for files or the network"
    )


def _between(stats: Stats, total: float, wait: float) -> str:
    """What to do where neither sampler nor workers are the limit."""
    each = total / stats.batches
    if stats.replaced > total / 10:
        return (
            f"workers died or grew too large, and it takes time to replace them ({stats.replaced} "
            "so far); the log says why"
        )
    if stats.overflowed > stats.batches / 10:
        return "batches go through the pipe, so more shared_memory would help"
    if each < 200e-6:
        return (
            f"a batch takes {duration(each)}, little for what it costs to hand over, so larger "
            "batches would help (batch_size, or the sampler)"
        )
    if stats.unpacking > wait / 2:
        return (
            f"unpickling a batch takes {duration(stats.unpacking / stats.batches)} in this "
            "process; have the dataset return arrays rather than many objects"
        )
    if stats.slowest > max(3 * stats._work / stats.batches, each):
        return (
            f"some batches are slow ({duration(stats.slowest)}, against "
            f"{duration(stats._work / stats.batches)} on average) and the others wait for them, so "
            "a larger prefetch_factor or in_order=False would help"
        )
    return "more tasks under way would help (prefetch_factor)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(part: float, whole: float) -> str:
    return _percent(part / whole) if whole else _percent(0.0)


# --- what is counted


class Tally:
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
        transform, collate, packing = reply.laps
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
        self.record(worker, "task", start, reply.seconds, place | {"laps": reply.laps})

    def record(
        self, lane: str, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        """Notes an event."""
        event = Event(lane, name, start, seconds, args)
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
        laps = self.transform + self.collate + self.packing
        stats = Stats(
            batches=self.batches,
            bytes=self.bytes,
            skipped=self.skipped,
            wait=self.wait,
            consumer=self.consumer,
            startup=self.startup,
            sampler=self.sampler,
            unpacking=unpacking,
            dataset=max(0.0, sum(self.work.values()) - laps),
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


# --- the trace


class Trace:
    """A file of events, in the format of Chrome's tracing, which Perfetto and others open.

    Each event is written at once. The closing bracket, which the format does not insist on, is
    all that a program killed in the middle leaves out.

    Args:
        path: file to write; overwritten.

    Raises:
        OSError: it cannot be.
        TypeError: it is not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):  # True would be the standard output
            raise TypeError(f"trace must be the path of a file to write, got {shown(path)}")
        self.path = path
        self._pid = os.getpid()
        self._lanes: dict[str, int] = {}
        # No buffer of ours: a fork would write what is left in it once more.
        self._file: io.FileIO | None = io.FileIO(path, "w")
        self._put("[", {"name": "process_name", "ph": "M", "args": {"name": "minloader"}})
        for lane in ("consumer", "sampler"):
            self._lane(lane)

    def write(self, event: Event) -> None:
        """Adds an event. If that fails, the file ends there: a full disk ends no training."""
        if self._file is None or os.getpid() != self._pid:
            return
        tid = self._lane(event.lane)
        for part in _parts(event):
            entry = {"name": part.name, "tid": tid, "ts": part.start * 1e6, "args": part.args}
            if part.seconds:
                self._put(",\n", entry | {"ph": "X", "dur": part.seconds * 1e6})
            else:
                self._put(",\n", entry | {"ph": "i", "s": "t"})

    def _lane(self, name: str) -> int:
        tid = self._lanes.get(name)
        if tid is None:
            tid = self._lanes[name] = len(self._lanes)
            meta = {"ph": "M", "tid": tid}
            self._put(",\n", meta | {"name": "thread_name", "args": {"name": name}})
            self._put(",\n", meta | {"name": "thread_sort_index", "args": {"sort_index": tid}})
        return tid

    def _put(self, before: str, entry: dict[str, Any]) -> None:
        self._send(before + json.dumps({"pid": self._pid} | entry, default=str))

    def _send(self, text: str) -> None:
        if self._file is None:
            return
        data = text.encode()
        try:
            while data:  # a full disk may take a part of it
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            self._file = None
            logger.warning("the trace %s ends here: %s", self.path, error)

    def close(self) -> None:
        """Completes the file. Harmless when repeated, or in a fork."""
        if self._file is None:
            return
        if os.getpid() == self._pid:
            self._send("]\n")
        if self._file is not None:
            self._file.close()
            self._file = None
