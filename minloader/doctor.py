"""What settings should a loader of yours have, and is anything wrong with it?

::

    python -m minloader.doctor train.py:make_loader

runs the loader for a few seconds with each number of workers, then with each ``prefetch_factor``
at the best of these, and prints a table, verdicts (serialized, reproducible, leaking) and what it
recommends. The consumer does nothing with a batch, or sleeps for ``--step`` milliseconds.

All of it runs in the calling process; every loader is new, and closed when its *trial* is over.
What a trial counts begins after a third of its time: until then workers start and caches fill.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import statistics
import sys
import textwrap
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minloader.errors import check_int, shown
from minloader.loader import Loader
from minloader.stats import Stats
from minloader.testing import IrreproducibleError, check_reproducible, executors_of

__all__ = ["Report", "Row", "Verdict", "examine", "main"]

logger = logging.getLogger("minloader")

TOLERANCE = 0.05
"""Share of the best throughput that is not worth more workers, or more prefetching."""

LOOKS = 40
"""How often a trial looks at the processes: often enough for a trend, and 1 % of its time."""

LEAST_LOOKS = 12
"""Looks from which on a trend can be told from chance."""

LEAK = 1 << 20
"""Bytes that a process may grow by: allocators round up by as much."""

WIDTH = 96
"""Columns of a report's text."""


@dataclasses.dataclass
class Verdict:
    """An answer.

    Attributes:
        answer: "yes", "no", "in part", "perhaps" or "unknown".
        text: why.
    """

    answer: str
    text: str

    def __str__(self) -> str:
        return f"{self.answer}: {self.text}"


@dataclasses.dataclass
class Row:
    """One setting, and how it did.

    Attributes:
        num_workers: the setting.
        prefetch_factor: the setting.
        batches: how many were counted.
        rate: batches a second.
        noise: standard error of that, as a share of it.
        bytes_rate: bytes a second, of batches.
        wait: share of the time that the consumer waited, 0 to 1.
        busy: share of the time that the workers were busy; None if it is not known.
        memory: bytes of memory of all workers (PSS: what they share is counted once); None if
            there are none, or it is not known.
        first: seconds to the first batch, with the start of the workers.
    """

    num_workers: int
    prefetch_factor: int
    batches: int
    rate: float
    noise: float
    bytes_rate: float
    wait: float
    busy: float | None
    memory: int | None
    first: float

    @property
    def setting(self) -> str:
        """As arguments."""
        if self.num_workers == 0:
            return "num_workers=0"
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}"


@dataclasses.dataclass
class Report:
    """What :func:`examine` found. ``str()`` of it is a table and text, at most 96 columns wide.

    Attributes:
        rows: one for each setting.
        recommended: the row whose setting is the best.
        recommendation: the same in words.
        bottleneck: what holds that setting up.
        serialized: whether more workers do not help, and why.
        reproducible: whether the batches are always the same.
        leaking: whether memory, descriptors, threads or processes grow.
        notes: what else there is to know.
    """

    rows: list[Row]
    recommended: Row
    recommendation: str
    bottleneck: str
    serialized: Verdict
    reproducible: Verdict
    leaking: Verdict
    notes: list[str]

    def __str__(self) -> str:
        head = ("workers", "prefetch", "batches/s", "+-", "MB/s", "wait", "busy", "memory", "first")
        table = [head, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(map(str.rjust, cells, widths)) + " *" * (row is self.recommended)
            for cells, row in zip(table, [None, *self.rows], strict=True)
        ]
        parts = {
            "serialized": str(self.serialized),
            "reproducible": str(self.reproducible),
            "leaking": str(self.leaking),
            "bottleneck": self.bottleneck,
            "recommended": self.recommendation,
        }
        lines += ["", *(_paragraph(name, text) for name, text in parts.items() if text)]
        return "\n".join(lines + [_paragraph("note", note) for note in self.notes])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.num_workers),
        str(row.prefetch_factor) if row.num_workers else "-",
        f"{row.rate:,.{max(0, 2 - int(math.log10(max(1, row.rate))))}f}",
        f"{row.noise:.0%}",
        f"{row.bytes_rate / 1e6:,.1f}" if row.bytes_rate else "-",
        f"{row.wait:.0%}",
        "-" if row.busy is None else f"{row.busy:.0%}",
        "-" if row.memory is None else _size(row.memory),
        f"{row.first:.2f} s",
    )


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if abs(count) >= 1e5 else f"{count / 1e3:,.1f} kB"


def _paragraph(name: str, text: str) -> str:
    """A named text, wrapped; its own line breaks stay."""
    indent = " " * 14
    lines = [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, WIDTH - len(indent), subsequent_indent="  ") or [""]
    ]
    return f"{name:14}" + f"\n{indent}".join(lines)


def examine(
    make_loader: Callable[..., Loader],
    *,
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] = (2, 1, 4),
    seconds: float = 3.0,
    step: float = 0.0,
    progress: Callable[[float, str], object] | None = None,
) -> Report:
    """Runs a loader with several settings, one after the other, and says what it found.

    Runs in the calling process, with workers as the loader has them. It closes all loaders.

    Args:
        make_loader: makes a new loader each time, and all that it is made of. It is given
            ``num_workers`` and ``prefetch_factor`` by name if it takes them; either way they are
            then set.
        workers: numbers of workers. None: from 0 to one more than there are processors, all up
            to 4, then doubling.
        prefetch: values of ``prefetch_factor``: the first with every number of workers, the
            others with the best of these.
        seconds: how long to run each, from the first batch on.
        step: seconds that the consumer sleeps after each batch, in place of a training step.
        progress: called with the share that is done, 0 to 1, and with what is being done.

    Raises:
        Exception: what the loader raises, with a note on what grew until then.
        TypeError, ValueError: an argument is wrong, ``make_loader`` makes no new Loader, or it
            has no batches.
    """
    if workers is None:
        workers = default_workers(processors())
    counts = sorted({check_int("workers", count, 0) for count in workers})
    factors = list(dict.fromkeys(check_int("prefetch", factor, 1) for factor in prefetch))
    for name, values in (("workers", counts), ("prefetch", factors)):
        if not values:
            raise ValueError(f"{name} must have at least one number, got none")
    if not seconds > 0:
        raise ValueError(f"seconds must be more than 0, got {seconds}")
    if not step >= 0:
        raise ValueError(f"step must be at least 0 seconds, got {step}")
    return _Examination(make_loader, seconds, step, progress).run(counts, factors)


def processors() -> int:
    """How many processors this process may use at a time."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    # A container's share, by versions 2 and 1 of control groups.
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split()
        except OSError:
            continue
        if words[0] not in ("max", "-1"):
            count = min(count, max(1, round(int(words[0]) / int(words[1]))))
    return count


def default_workers(count: int) -> list[int]:
    """The numbers of workers to try with so many processors."""
    doubled = [2**n for n in range(3, count.bit_length())]
    return sorted({*range(min(count, 4) + 1), *doubled, count, count + 1})


# --- what a process has


class _Usage(NamedTuple):
    """What a process had, when so many batches had been delivered.

    Attributes:
        batches: how many.
        memory: bytes of its own.
        descriptors: open ones.
        threads: in it.
        children: processes that it started, those that have ended and were not waited for too.
    """

    batches: int
    memory: int
    descriptors: int
    threads: int
    children: int


def _usage(pid: int, batches: int) -> _Usage | None:
    """None where there is no /proc, or the process is gone."""
    proc = f"/proc/{pid}"
    try:
        with open(f"{proc}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        memory = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        threads = os.listdir(f"{proc}/task")
        children = sum(len(_read_words(f"{proc}/task/{each}/children")) for each in threads)
        descriptors = len(os.listdir(f"{proc}/fd"))
    except OSError:
        return None
    return _Usage(batches, memory, descriptors, len(threads), children)


def _read_words(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:  # a kernel without it; or the thread or process has ended
        return []


def _shared_memory(pid: int) -> int | None:
    """Bytes of memory of a process, what it shares with others counted in part (PSS)."""
    words = _read_words(f"/proc/{pid}/smaps_rollup")
    return int(words[words.index("Pss:") + 1]) * 1024 if "Pss:" in words else None


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 if it is not known."""
    words = " ".join(_read_words(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK") if words else 0.0


# --- one setting


class _Mark(NamedTuple):
    """How far a trial has come.

    Attributes:
        at: seconds of the clock.
        batches: delivered.
        waited: seconds that the consumer did.
    """

    at: float
    batches: int
    waited: float


class _Trial:
    """Runs one loader for a while. See the attributes of the result, a :class:`Row`, too.

    Attributes:
        series: by pid, how its usage went.
        names: by pid, what the process is called.
        epoch: number of batches of the first epoch; None if it was not over.
        once: whether the sampler serves one epoch only.
        window: seconds that are counted.
        spent: seconds in these, by stage (a field of Stats); ``cpu`` and ``parent`` are processor
            time of the workers and of this process.
        stats: of the loader at the end.
    """

    def __init__(self, loader: Loader, seconds: float, step: float) -> None:
        self._loader = loader
        self._seconds = seconds
        self._step = step
        self._marks: list[_Mark] = []
        self._begin: tuple[int, Stats, dict[int, float]] | None = None
        self.executor = loader._crew._executor
        self.shards = loader._shards
        self.series: dict[int, list[_Usage]] = defaultdict(list)
        self.names = {os.getpid(): "this process"}
        self.epoch: int | None = None
        self.once = False
        self.window = 0.0
        self.spent: dict[str, float] = {}
        self.stats = Stats()

    def _batches(self) -> Iterator[Any]:
        """Epoch after epoch."""
        for epoch in itertools.count():
            try:
                batches = iter(self._loader)
            except RuntimeError:
                if epoch == 0:
                    raise
                self.once = True  # an iterator, used up
                return
            count = 0
            for count, batch in enumerate(batches, 1):  # noqa: B007
                yield batch
                del batch  # its memory is wanted for the next
            if count == 0:
                raise ValueError(
                    f"the loader has no batches in epoch {epoch}: look at the sampler, and at the "
                    "length of the dataset"
                )
            self.epoch = self.epoch or count

    def run(self, tick: Callable[[float], object]) -> Row:
        """Runs it; ``tick`` is called now and then with the share that is done."""
        clock = time.perf_counter
        batches = self._batches()
        count, waited, asked = 0, 0.0, clock()
        first, due, stop = 0.0, asked, math.inf
        try:
            for _ in batches:
                now = clock()
                count += 1
                waited += now - asked
                if count == 1:
                    first, waited, stop = now - asked, 0.0, now + self._seconds
                if now >= due:
                    due = now + self._seconds / LOOKS
                    self._look(_Mark(now, count, waited), stop)
                    tick(1 - max(0.0, stop - now) / self._seconds)
                    if now >= stop and self._begin and count > self._begin[0] + 1:
                        break
                if self._step:
                    time.sleep(self._step)
                asked = clock()
            else:
                self._look(_Mark(clock(), count, waited), stop)
        except Exception as error:
            for finding in self.growth()[0]:
                error.add_note(f"until then {finding}")
            raise
        finally:
            batches.close()
        return self._row(first)

    def _look(self, mark: _Mark, stop: float) -> None:
        self._marks.append(mark)
        for executor in executors_of(self._loader):
            for index, process in enumerate(executor.workers):
                self.names[process.pid] = f"worker {executor.station.first_id + index}"
        for pid in self.names:
            usage = _usage(pid, mark.batches)
            if usage is not None:
                self.series[pid].append(usage)
        if self._begin is None and mark.at >= stop - self._seconds * 2 / 3:
            self._begin = (len(self._marks) - 1, self._loader.stats, self._cpu())

    def _cpu(self) -> dict[int, float]:
        return {pid: _cpu_seconds(pid) for pid in self.names}

    def _row(self, first: float) -> Row:
        index, before, cpu = self._begin or (0, Stats(), self._cpu())
        begin, end, stats = self._marks[index], self._marks[-1], self._loader.stats
        count = end.batches - begin.batches
        self.window = end.at - begin.at
        self.stats = stats
        if count == 0:  # one batch is all there is
            count, self.window = 1, first
        for name in ("sampler", "dataset", "transform", "collate", "transport"):
            self.spent[name] = getattr(stats, name, 0.0) - getattr(before, name, 0.0)
        used = {pid: spent - cpu.get(pid, 0.0) for pid, spent in self._cpu().items()}
        self.spent["parent"] = used.pop(os.getpid())
        self.spent["cpu"] = sum(used.values())
        busy = getattr(stats, "busy", {}).values()
        sizes = [_shared_memory(pid) for pid in used]
        known = [size for size in sizes if size is not None]
        return Row(
            *(self._loader.num_workers, self._loader._crew._prefetch_factor),
            batches=count,
            rate=count / self.window,
            noise=_noise(self._marks[index:]),
            bytes_rate=(getattr(stats, "bytes", 0) - getattr(before, "bytes", 0)) / self.window,
            wait=min(1.0, (end.waited - begin.waited) / self.window),
            busy=statistics.fmean(busy) if busy else None,
            memory=sum(known) if known else None,
            first=first,
        )

    def growth(self) -> tuple[list[str], bool]:
        """What grew, and whether there was enough to see."""
        findings, enough = [], False
        for pid, series in self.series.items():
            done = self.epoch if self._past_first_epoch() else None
            kept = [usage for usage in series[len(series) // 3 :] if usage.batches >= (done or 0)]
            if len(kept) < LEAST_LOOKS:
                continue
            enough = True
            batches = (kept[-1].batches - kept[0].batches) * 3 / 4  # between first and last quarter
            own = pid == os.getpid()
            findings += _findings(self.names[pid], own, kept, round(batches), done is not None)
        return findings, enough

    def _past_first_epoch(self) -> bool:
        """Whether caches had a whole epoch to fill, before most of what is looked at."""
        return self.epoch is not None and self.epoch <= 0.6 * self._marks[-1].batches


def _noise(marks: list[_Mark]) -> float:
    """Standard error of the rate between two marks, as a share of it."""
    if len(marks) < 5:
        return 1 / max(1, marks[-1].batches - marks[0].batches)
    cuts = [marks[round(n * (len(marks) - 1) / 4)] for n in range(5)]
    rates = [(b.batches - a.batches) / (b.at - a.at) for a, b in itertools.pairwise(cuts)]
    return statistics.stdev(rates) / statistics.fmean(rates) / 2


def _findings(name: str, own: bool, kept: list[_Usage], batches: int, past: bool) -> list[str]:
    """What a process has more and more of."""
    found = []
    size = steady_growth([usage.memory for usage in kept], LEAK + kept[0].memory // 200)
    if size:
        text = f"{name} grew by {_size(size)} in {batches:,} batches ({_size(size / batches)} each)"
        text += (
            ": the sampler, or what else runs here, keeps something"
            if own
            else (": the dataset keeps something")
        )
        if not past:
            text += "; or a cache was still being filled: more seconds than an epoch takes can tell"
        found.append(text)
    for kind, why in (
        ("descriptors", "files or sockets are opened and not closed"),
        ("threads", "they are started and do not end"),
        ("children", "processes are started and not waited for"),
    ):
        count = steady_growth([getattr(usage, kind) for usage in kept], 3)
        if count:
            found.append(f"{name} had {count:,.0f} {kind} more after {batches:,} batches: {why}")
    return found


def steady_growth(values: Sequence[float], tolerance: float) -> float:
    """How much a series grew from its first to its last quarter; 0 if not in each, or if it slows.

    Args:
        values: at least four, in order.
        tolerance: what is no growth.
    """
    size = len(values)
    quarters = [values[n * size // 4 : (n + 1) * size // 4] for n in range(4)]
    middles = [statistics.median(quarter) for quarter in quarters]
    steps = [b - a for a, b in itertools.pairwise(middles)]
    grown = middles[-1] - middles[0]
    spread = statistics.fmean(max(quarter) - min(quarter) for quarter in quarters)
    if min(steps) <= 0 or grown <= max(tolerance, spread) or steps[-1] < grown / 6:
        return 0.0  # it went up and down, and ended higher by chance; or a cache is nearly full
    return grown


# --- all of them


class _Examination:
    """The trials of one loader, and what follows from them."""

    def __init__(
        self,
        make_loader: Callable[..., Loader],
        seconds: float,
        step: float,
        progress: Callable[[float, str], object] | None,
    ) -> None:
        self._make_loader = make_loader
        self._takes = _takes(make_loader)
        self._seconds = seconds
        self._step = step
        self._progress = progress or (lambda share, text: None)
        self._made: weakref.WeakSet[Loader] = weakref.WeakSet()
        self._trials: dict[int, _Trial] = {}  # by place of the row
        self._rows: list[Row] = []

    def run(self, counts: list[int], factors: list[int]) -> Report:
        others = factors[1:] if counts[-1] else []
        planned = len(counts) + len(others) + 2  # the audit takes about as long as two
        for count in counts:
            self._try(count, factors[0], planned)
        serialized = self._serialized()
        best = self._pick(self._rows)
        for factor in others if best.num_workers else ():
            self._try(best.num_workers, factor, planned)
        leaking = self._leaking()
        best = self._pick(self._rows)
        reproducible = self._reproducible(best, counts, planned)
        self._progress(1.0, "done")
        return Report(
            rows=self._rows,
            recommended=best,
            recommendation=self._recommend(best, factors[0]),
            bottleneck=getattr(self._trial(best).stats, "verdict", ""),
            serialized=serialized,
            reproducible=reproducible,
            leaking=leaking,
            notes=self._notes(),
        )

    def _make(self, num_workers: int, prefetch_factor: int) -> Loader:
        """A new loader with these settings."""
        setting = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        given = {name: value for name, value in setting.items() if name in self._takes}
        loader = self._make_loader(**given)
        if not isinstance(loader, Loader):
            raise TypeError(f"make_loader must return a minloader.Loader, got {shown(loader)}")
        if loader in self._made:
            raise ValueError(
                "make_loader returned the same Loader again; it must make a new one each time"
            )
        self._made.add(loader)
        try:
            if loader._crew._prefetch_factor != prefetch_factor:
                loader.num_workers = 0
                loader._crew._prefetch_factor = prefetch_factor  # pools are made with it
            loader.num_workers = num_workers
        except BaseException:
            loader.close()
            raise
        return loader

    def _try(self, num_workers: int, prefetch_factor: int, planned: int) -> None:
        done = len(self._rows)
        text = f"num_workers={num_workers}, prefetch_factor={prefetch_factor}"
        self._progress(done / planned, text)
        with self._make(num_workers, prefetch_factor) as loader:
            trial = _Trial(loader, self._seconds, self._step)
            row = trial.run(lambda share: self._progress((done + share) / planned, text))
        self._trials[done] = trial
        self._rows.append(row)

    def _trial(self, row: Row) -> _Trial:
        return self._trials[next(n for n, each in enumerate(self._rows) if each is row)]

    # --- verdicts

    def _pick(self, rows: list[Row]) -> Row:
        """The smallest setting that is about as fast as the fastest.

        The first ``prefetch_factor`` counts as smaller than the others: it is the one asked for.
        With no step, a loader without workers looks better than it is: nothing goes on beside it.
        """
        rows = [row for row in rows if row.num_workers or self._step] or rows
        best = max(rows, key=lambda row: row.rate)
        enough = [row for row in rows if row.rate >= best.rate * (1 - _margin(row, best))]
        return min(enough, key=lambda row: row.num_workers)  # the first of those

    def _recommend(self, best: Row, factor: int) -> str:
        rows = [row for row in self._rows if row.prefetch_factor == factor]
        workers = [row for row in rows if row.num_workers]
        text = f"{best.setting}: {best.rate:,.1f} batches/s"
        if workers and best.num_workers > workers[0].num_workers:
            text += f", {best.rate / workers[0].rate:.1f} times as many as with "
            text += _workers(workers[0].num_workers)
        if best.memory is not None:
            text += f"; its workers take {_size(best.memory)} of memory together"
        if self._step:
            text += f"; of the time, {best.wait:.0%} is waiting (a step takes "
            text += f"{self._step * 1e3:g} ms)"
        text += ". "
        if rows[-1].num_workers == best.num_workers and best.num_workers:
            text += "No more were tried; they might be faster yet. " if len(rows) > 1 else ""
        elif best.num_workers:
            most = max(row.rate for row in rows if row.num_workers > best.num_workers)
            gain = max(0.0, most / best.rate - 1)
            text += f"More workers add {gain:.0%}. " if gain > 0.005 else "More add nothing. "
        inline = next((row for row in rows if not row.num_workers), None)
        if inline and not self._step and best.num_workers and inline.rate > best.rate:
            text += (
                f"num_workers=0 makes {inline.rate:,.1f} a second, but while it makes them your "
                "step stands still: --step tells what is better. "
            )
        return text.rstrip()

    def _serialized(self) -> Verdict:
        rows = [row for row in self._rows if row.num_workers]
        if len(rows) < 2:
            return Verdict("unknown", "it takes at least two numbers of workers above 0 to tell")
        least = rows[0]
        most = max(rows[1:], key=lambda row: row.rate)
        who, fewer = _workers(most.num_workers), _workers(least.num_workers)
        if self._step and min(least.wait, most.wait) < 0.1:
            keeps = least if least.wait < 0.1 else most
            text = f"{_workers(keeps.num_workers)} can keep up with a step of {self._step * 1e3:g}"
            return Verdict("no", f"{text} ms (the consumer waits {keeps.wait:.0%} of the time)")
        gain = most.rate / least.rate
        hoped = max(2.0, min(processors(), most.num_workers) / least.num_workers)
        share = (gain - 1) / (hoped - 1)
        text = f"{who} make {gain:.2f} times as many batches as {fewer}"
        if share >= 0.6:
            return Verdict("no", text)
        return Verdict("yes" if share < 0.25 else "in part", f"{text}: {self._cause(rows[1:])}")

    def _cause(self, rows: list[Row]) -> str:
        """Why more workers are no faster, by the trial with the most of them but not too many."""
        cpus = processors()
        row = max((row for row in rows if row.num_workers <= cpus), default=rows[0], key=_count)
        trial = self._trial(row)
        share = {name: spent / trial.window for name, spent in trial.spent.items()}
        piped = trial.stats.overflowed / trial.stats.batches
        makes = sum(share[name] for name in ("dataset", "transform", "collate")) / row.num_workers
        works = share["cpu"] / row.num_workers
        shards = trial.shards
        if cpus < 2:
            return "there is one processor"
        if share["sampler"] >= 0.5:
            return (
                f"the sampler takes {share['sampler']:.0%} of the time, and it runs in the one "
                "process of the loop: do less in it, or make it from lengths that are stored"
            )
        if shards is not None and shards < row.num_workers:
            return (
                f"the stream has {shards} shard{'s' * (shards > 1)}, fixed when the loader was "
                "made: let make_loader take num_workers, and hand it on"
            )
        if trial.executor == "thread" and getattr(sys, "_is_gil_enabled", lambda: True)():
            return "threads share the interpreter's lock: use executor='process'"
        if piped >= 0.5:
            return (
                f"{piped:.0%} of the batches found no room in shared memory and came through a "
                "pipe: raise shared_memory, or make batches smaller"
            )
        if share["parent"] >= 0.7:
            return (
                f"this process is busy {share['parent']:.0%} of the time with taking batches "
                "apart: let them be arrays, and few, rather than lists of many objects"
            )
        if share["cpu"] + share["parent"] >= 0.8 * cpus:
            return (
                "all processors are busy: making a batch takes more than one of them (threads, "
                "subprocesses)"
            )
        if makes >= 0.6 and works < 0.6:
            return (
                f"the workers compute in {works:.0%} of the time only, and wait in the rest, "
                "inside the dataset: for a lock that they share, the disk or the network"
            )
        return "no single cause stands out; other programs may have the processors"

    def _leaking(self) -> Verdict:
        """By the trial with the fewest workers: each of these sees the most of the dataset."""
        row = next((row for row in self._rows if row.num_workers), self._rows[0])
        trial = self._trial(row)
        findings, enough = trial.growth()
        if not trial.series:
            return Verdict("unknown", "this system has no /proc to look at processes")
        if not enough:
            few = trial.stats.batches
            return Verdict("unknown", f"{few:,} batches are too few to tell: take more seconds")
        if not findings:
            return Verdict("no", f"nothing grew over {trial.stats.batches:,} batches")
        sure = any("; or a cache" not in finding for finding in findings)
        return Verdict("yes" if sure else "perhaps", "\n".join(findings))

    def _reproducible(self, best: Row, counts: list[int], planned: int) -> Verdict:
        trial = self._trial(best)
        done = itertools.count(1)

        def make() -> Loader:
            share = 1 - 2 / planned * 0.8 ** next(done)
            self._progress(share, "is it reproducible?")
            return self._make(best.num_workers, best.prefetch_factor)

        try:
            with _quiet():
                report = check_reproducible(
                    make,
                    workers={counts[0], min(3, counts[-1])},
                    batches=min(20, max(3, int(best.rate * self._seconds / 4))),
                    epochs=1 if trial.once else 2,
                )
        except IrreproducibleError as error:
            return Verdict("no", str(error))
        counts_text = " + ".join(map(str, report.batches))
        return Verdict("yes", f"{counts_text} batches are the same in {len(report.runs)} runs")

    def _notes(self) -> list[str]:
        trials = list(self._trials.values())
        notes = []
        if any(trial.once for trial in trials):
            notes.append("the sampler is an iterator: a run ended with its one epoch")
        if trials[0].executor not in ("process", "thread"):
            notes.append(
                "the executor is your own: num_workers says how many tasks it is given, not how "
                "many workers it has; these are not looked at"
            )
        if any(trial.stats.replaced for trial in trials):
            notes.append("workers died, or grew too large, and were replaced: the log tells why")
        noisy = [row for row in self._rows if row.noise > 0.1]
        if noisy:
            notes.append(
                f"{len(noisy)} of {len(self._rows)} rates are uncertain by more than 10 % (+-): "
                "take more seconds, on a quiet machine"
            )
        return notes


def _takes(make_loader: Callable[..., Any]) -> set[str]:
    """Which of the settings a function takes by name."""
    if not callable(make_loader):
        raise TypeError(
            f"make_loader must be a function that makes a Loader, got {shown(make_loader)}"
        )
    names = {"num_workers", "prefetch_factor"}
    try:
        signature = inspect.signature(make_loader)
    except ValueError:  # written in C
        return set()
    found = signature.parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in found):
        names &= {each.name for each in found if each.kind is not each.POSITIONAL_ONLY}
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            "make_loader is called with num_workers and prefetch_factor, if it takes them, and "
            f"nothing else, but its signature is {signature}: {error}; give the others defaults"
        ) from error
    return names


def _margin(row: Row, best: Row) -> float:
    """Share by which a rate may be lower and count as the same."""
    return max(TOLERANCE, min(0.15, 2 * math.hypot(row.noise, best.noise)))


def _count(row: Row) -> int:
    return row.num_workers


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log: the audit kills a worker, which is no news here."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- the command


def find(name: str) -> Any:
    """The object that ``module:attribute`` or ``file.py:attribute`` names.

    Raises:
        ValueError: there is none.
        Exception: what the module raises.
    """
    module_name, _, path = name.rpartition(":")
    if not module_name or not path:
        raise ValueError(
            f"{name!r} is not of the form module:function or file.py:function, such as "
            "train.py:make_loader"
        )
    folder = ""
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        folder, module_name = str(file.parent), file.stem
    sys.path.insert(0, folder or os.getcwd())  # the workers have the same
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name}, here or on sys.path") from error
    if folder and Path(found.__file__ or "").resolve() != file:
        raise ValueError(
            f"{file} cannot be imported, since a module {module_name} is there already, from "
            f"{found.__file__}; rename the file"
        )
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path}")
        found = getattr(found, part)
    return found


def _numbers(least: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        try:
            return [check_int("it", int(part), least) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be numbers of at least {least} with commas, got {text!r}"
            ) from None

    return parse


def _positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return float(text)


class _Bar:
    """A line on a terminal that says how far it is; none where there is no terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def __call__(self, share: float, text: str) -> None:
        if self._shows:
            bar = ("#" * round(24 * share)).ljust(24, "-")
            sys.stderr.write(f"\r\x1b[K[{bar}] {share:4.0%}  {text}"[: WIDTH - 1])
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shows:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``python -m minloader.doctor``.

    Args:
        argv: its arguments; None: those of this process.

    Returns:
        0: the report is printed; 1: the loader raised; 130: Ctrl-C.

    Raises:
        SystemExit: with 2, an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        "python -m minloader.doctor", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("make_loader", help="module:function or file.py:function, which returns a Loader")
    add("--workers", type=_numbers(0), metavar="N,N", help="numbers of workers (0 to processors+1)")
    add("--prefetch", type=_numbers(1), default=[2, 1, 4], metavar="N,N", help="(2,1,4)")
    add("--seconds", type=_positive, default=3.0, help="for each setting (3)")
    add("--step", type=_positive, default=0.0, metavar="MS", help="a training step takes so long")
    add("--json", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args(argv)
    sys.argv[1:] = []  # they are not for the module
    bar = _Bar()
    try:
        make_loader = find(options.make_loader)
        report = examine(
            make_loader,
            workers=options.workers,
            prefetch=options.prefetch,
            seconds=options.seconds,
            step=options.step / 1e3,
            progress=bar,
        )
    except KeyboardInterrupt:
        bar.clear()
        return 130
    except Exception:
        bar.clear()
        traceback.print_exc()
        return 1
    bar.clear()
    print(report)
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
