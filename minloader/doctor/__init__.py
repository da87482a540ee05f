"""What settings should a loader of yours have, and is anything wrong with it?

::

    python -m minloader.doctor train.py:make_loader

runs the loader for a few seconds with each number of workers, then with each ``prefetch_factor``
at the best of these, and prints a table, three verdicts (serialized, reproducible, leaking) and
what it recommends. The consumer does nothing with a batch, or sleeps for ``--step`` milliseconds.

All of it runs in the calling process; every *trial* has a loader of its own, closed at its end.
What a trial counts begins after a third of its time: until then workers start and caches fill.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import importlib
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from minloader._checks import amount, check_int
from minloader._insight.counters import Stats
from minloader._inspect import inspect
from minloader._loader import Loader
from minloader._memory.limits import processors
from minloader.testing import IrreproducibleError, NewLoaders, check_reproducible

SECONDS = 3.0

"""Seconds of a trial: short enough for a dozen of them, and some hundred batches for most."""


TOLERANCE = 0.05

"""Share of the best rate that is not worth more workers, or more prefetching."""


LOOKS = 40

"""How often a trial looks at its processes: often enough for a trend, in 1 % of its time."""


LEAST_LOOKS = 12

"""Looks from which on a trend can be told from chance."""


LEAK = 2 << 20

"""Bytes that a process may grow by: half for what allocators round up, half for the events that a
loader keeps."""


WIDTH = 96

"""Columns of a report."""


Progress = Callable[[float, str], object]

"""Called with the share that is done, 0 to 1, and what is being done."""


@dataclasses.dataclass
class Verdict:
    """An answer ("yes", "no", "in part", "perhaps" or "unknown"), and why."""

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
        byte_rate: bytes a second.
        wait: share of the time that the consumer waited, 0 to 1.
        busy: share of the time that a worker was busy, on average; None if there are none.
        memory: bytes of memory of all workers, where what they share counts once (PSS); None if
            there are none, or it is not known.
        first: seconds to the first batch, with the start of the workers.
    """

    num_workers: int
    prefetch_factor: int
    batches: int
    rate: float
    noise: float
    byte_rate: float
    wait: float
    busy: float | None
    memory: int | None
    first: float

    def cells(self) -> list[str]:
        """As a line of the table."""
        return [
            str(self.num_workers),
            str(self.prefetch_factor) if self.num_workers else "-",
            f"{self.rate:,.{2 if self.rate < 10 else 1 if self.rate < 100 else 0}f}",
            f"{self.noise:.0%}",
            f"{self.byte_rate / 1e6:,.1f}" if self.byte_rate else "-",
            f"{self.wait:.0%}",
            "-" if self.busy is None else f"{self.busy:.0%}",
            "-" if self.memory is None else amount(self.memory),
            f"{self.first:.2f} s",
        ]


@dataclasses.dataclass
class Report:
    """What :func:`examine` found. ``str()`` of it is a table and text, at most 96 columns wide.

    Attributes:
        rows: one for each setting.
        best: the row with the recommended setting.
        recommended: that setting in words, and what it gains.
        bottleneck: what holds it up; "" where ``serialized`` says so.
        serialized: whether more workers do not help, and why.
        reproducible: whether the batches are always the same.
        leaking: whether memory, descriptors, threads or processes grow.
        notes: what else there is to know.
    """

    rows: list[Row]
    best: Row
    recommended: str
    bottleneck: str
    serialized: Verdict
    reproducible: Verdict
    leaking: Verdict
    notes: list[str]

    def __str__(self) -> str:
        head = ["workers", "prefetch", "batches/s", "+-", "MB/s", "wait", "busy", "memory", "first"]
        table = [head, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, cells, widths)) for cells in table]
        lines[1 + self.rows.index(self.best)] += "  <--"
        names = ("serialized", "reproducible", "leaking", "bottleneck", "recommended")
        parts = [(name, str(getattr(self, name))) for name in names]
        parts += [("note", note) for note in self.notes]
        return "\n".join([*lines, "", *(_paragraph(name, text) for name, text in parts if text)])


def _paragraph(name: str, text: str) -> str:
    """A named text, wrapped; its own line breaks stay."""
    width, indent = WIDTH - 14, "\n" + 14 * " "
    text = text.replace(" %", "\xa0%")  # where no line ends
    parts = (textwrap.wrap(part, width, subsequent_indent="  ") for part in text.splitlines())
    return f"{name:14}{indent.join(itertools.chain.from_iterable(parts))}".replace("\xa0", " ")


class _Usage(NamedTuple):
    """What a process had when so many batches had been delivered.

    Attributes:
        batches: how many.
        memory: bytes of its own.
        descriptors: that are open.
        threads: in it.
        children: processes it has started, with those that ended and were not waited for.
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
        threads = os.listdir(f"{proc}/task")
        descriptors = len(os.listdir(f"{proc}/fd"))
    except OSError:
        return None
    resident, shared = map(int, _words(f"{proc}/statm")[1:3] or (0, 0))
    memory = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    children = sum(len(_words(f"{proc}/task/{each}/children")) for each in threads)
    return _Usage(batches, memory, descriptors, len(threads), children)


def _words(path: str) -> list[str]:
    """Of a file that the kernel makes; none if it does not."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _memory(pid: int) -> int | None:
    """Bytes, of what is shared with others only a share (PSS)."""
    words = _words(f"/proc/{pid}/smaps_rollup")
    return int(words[words.index("Pss:") + 1]) * 1024 if "Pss:" in words else None


def _processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 if it is not known."""
    ticks = " ".join(_words(f"/proc/{pid}/stat")).rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def _give_back() -> None:
    """Returns the memory that is free in this process to the system, where the C library can.

    What the next trial loses would go there first, unseen.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def steady_growth(values: Sequence[float], tolerance: float) -> float:
    """How much a series grew from its first to its last quarter; 0 if it is no steady growth.

    That is one in each quarter, of more than values differ within one, and that does not slow
    down, as it does while a cache fills.

    Args:
        values: at least four, in order.
        tolerance: what is too little.
    """
    quarters = _quarters(values)
    middles = [statistics.median(quarter) for quarter in quarters]
    steps = [after - before for before, after in itertools.pairwise(middles)]
    grown = middles[-1] - middles[0]
    spread = statistics.fmean(max(quarter) - min(quarter) for quarter in quarters)
    is_steady = min(steps) > 0 and steps[-1] >= grown / 6
    return grown if is_steady and grown > max(tolerance, spread) else 0.0


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    cuts = [n * len(values) // 4 for n in range(5)]
    return [values[begin:end] for begin, end in itertools.pairwise(cuts)]


class _Mark(NamedTuple):
    """How far a trial has come: seconds of the clock, and batches."""

    at: float
    batches: int


class _Trial:
    """Runs one loader for a while.

    Args:
        loader: to run; the caller closes it.
        seconds: how long.
        step: seconds to sleep after each batch.

    Attributes:
        row: what came out.
        making: how many workers were making batches, on average.
        computing: how many processors the workers used, on average.
        once: whether the sampler is an iterator, which serves one epoch.
        executor: of the loader.
        shards: of a stream; None if it is none.
        stats: of the loader, of the time that counts.
    """

    row: Row

    def __init__(self, loader: Loader, seconds: float, step: float) -> None:
        self._loader = loader
        self._seconds = seconds
        self._step = step
        self._marks: list[_Mark] = []
        self._begin: tuple[int, Stats, dict[int, float]] | None = None
        self._names = {os.getpid(): "this process"}
        self._series: dict[int, list[_Usage]] = defaultdict(list)  # by pid
        self._first_epoch: int | None = None  # its number of batches, when it is over
        self.executor = inspect(loader).executor
        self.shards = inspect(loader).shards
        self.once = False
        self.making = self.computing = 0.0
        self.stats = Stats()

    def run(self, tick: Callable[[float], object]) -> None:
        """Runs it; ``tick`` is called now and then with the share that is done.

        Raises:
            ValueError: an epoch has no batches.
            Exception: what the loader raises, with notes of what grew until then.
        """
        count, due, stop = 0, 0.0, 0.0
        try:
            for _ in self._batches():
                now = time.perf_counter()
                count += 1
                stop = stop or now + self._seconds
                if now >= due:
                    due = now + self._seconds / LOOKS
                    self._look(_Mark(now, count), stop)
                    tick(1 - min(1.0, max(0.0, stop - now) / self._seconds))
                    if now >= stop and self._begin and count > self._marks[self._begin[0]].batches:
                        break
                if self._step:
                    time.sleep(self._step)
            else:
                self._look(_Mark(time.perf_counter(), count), stop)
        except Exception as error:
            for finding in self.findings() or ():
                error.add_note(f"until then {finding}")
            raise
        self._conclude()

    def _batches(self) -> Iterator[Any]:
        """Epoch after epoch."""
        while not inspect(self._loader).sampler_used_up:
            count = 0
            for batch in self._loader:
                count += 1
                yield batch
            if count == 0:
                raise ValueError(
                    f"the loader has no batches in epoch {self._loader.epoch - 1}: look at its "
                    "sampler, and at the length of its dataset"
                )
            self._first_epoch = self._first_epoch or count

    def _look(self, mark: _Mark, stop: float) -> None:
        self._marks.append(mark)
        for worker in inspect(self._loader).workers:
            self._names[worker.pid] = f"worker {worker.number}"
        for pid in self._names:
            usage = _usage(pid, mark.batches)
            if usage is not None:
                self._series[pid].append(usage)
        if self._begin is None and mark.at >= stop - self._seconds * 2 / 3:
            used = {pid: _processor_seconds(pid) for pid in self._names}
            self._begin = (len(self._marks) - 1, self._loader.stats, used)

    def _conclude(self) -> None:
        index, before, used = self._begin or (0, Stats(), {})
        marks, after = self._marks[index:], self._loader.stats
        count, window = marks[-1].batches - marks[0].batches, marks[-1].at - marks[0].at
        if count == 0:  # the first is all there is
            count, window = 1, after.startup
        workers = self._loader.num_workers
        pids = [pid for pid in self._names if pid != os.getpid()]
        self.stats = _between(before, after)
        self.making = _work(self.stats) / window
        spent = (_processor_seconds(pid) - used.get(pid, 0.0) for pid in pids)
        self.computing = sum(max(0.0, each) for each in spent) / window  # one may be gone
        self.once = inspect(self._loader).sampler_used_up
        sizes = [size for size in map(_memory, pids) if size is not None]
        self.row = Row(
            num_workers=workers,
            prefetch_factor=inspect(self._loader).prefetch_factor,
            batches=count,
            rate=count / window,
            noise=_noise(marks),
            byte_rate=self.stats.bytes / window,
            wait=min(1.0, self.stats.wait / window),
            busy=min(1.0, self.making / workers) if workers else None,
            memory=sum(sizes) if sizes else None,
            first=after.startup,
        )

    def findings(self) -> list[str] | None:
        """What grew; None if there was too little to see."""
        found, enough = [], False
        for pid, series in self._series.items():
            # Caches had an epoch to fill, if that was over before most of what is looked at.
            epoch = self._first_epoch or math.inf
            over = epoch <= 0.6 * self._marks[-1].batches
            kept = [u for u in series[len(series) // 3 :] if not over or u.batches >= epoch]
            if len(kept) >= LEAST_LOOKS:
                enough = True
                keeps = (
                    "the sampler, or what else runs here," if pid == os.getpid() else "the dataset"
                )
                found += _findings(self._names[pid], kept, f"{keeps} keeps something", over)
        return found if enough else None


CACHE = "; or a cache is still being filled: run more --seconds than an epoch takes to tell"


def _findings(name: str, kept: list[_Usage], keeps: str, over: bool) -> list[str]:
    """What a process had more and more of."""
    found = []
    first, *_, last = map(statistics.median, _quarters([usage.batches for usage in kept]))
    batches = round(last - first)
    size = steady_growth([usage.memory for usage in kept], LEAK + kept[0].memory / 200)
    if size:
        text = (
            f"{name} grew by {amount(size)} in {batches:,} batches, {amount(size / batches)} each"
        )
        found.append(f"{text}: {keeps}{'' if over else CACHE}")
    for kind, why in (
        ("descriptors", "files or sockets are opened and not closed"),
        ("threads", "they are started and do not end"),
        ("children", "processes are started and not waited for"),
    ):
        count = steady_growth([getattr(usage, kind) for usage in kept], 3)
        if count:
            found.append(f"{name} had {count:,.0f} more {kind} after {batches:,} batches: {why}")
    return found


def _between(before: Stats, after: Stats) -> Stats:
    """What was counted from one to the other, as if the loader had been made in between."""
    counts = ("batches", "bytes", "overflowed")
    times = ("wait", "consumer", "sampler", "unpacking")
    timings = ("dataset", "transform", "collate", "transport")
    return dataclasses.replace(
        after,
        startup=0.0,
        **{name: getattr(after, name) - getattr(before, name) for name in counts + times + timings},
    )


def _work(stats: Stats) -> float:
    """Seconds that all workers together were busy."""
    packing = stats.transport - stats.unpacking
    return stats.dataset + stats.transform + stats.collate + packing


def _noise(marks: list[_Mark]) -> float:
    """Standard error of the rate between the first and the last, as a share of it."""
    if len(marks) < 5:
        return 1 / max(1, marks[-1].batches - marks[0].batches)
    cuts = [marks[n * (len(marks) - 1) // 4] for n in range(5)]
    rates = [(b.batches - a.batches) / (b.at - a.at) for a, b in itertools.pairwise(cuts)]
    return statistics.stdev(rates) / statistics.fmean(rates) / 2


def examine(
    make_loader: Callable[..., Loader],
    *,
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] = (2, 1, 4),
    seconds: float = SECONDS,
    step: float = 0.0,
    progress: Progress | None = None,
) -> Report:
    """Runs a loader with several settings, one after the other, and says what it found.

    Runs in the calling process, with workers as the loader has them. It closes all loaders.

    Args:
        make_loader: makes a new loader each time, and all that it is made of. It is given
            ``num_workers`` and ``prefetch_factor`` by name if it takes them; they are set anyway.
        workers: numbers of workers. None: all up to 4, then 8, 16, ... up to the number of
            processors, and one more than that.
        prefetch: values of ``prefetch_factor``: the first with every number of workers, the
            others with the best of these.
        seconds: how long to run each, from the first batch on.
        step: seconds that the consumer sleeps after each batch, as if it trained.
        progress: told how far it is.

    Raises:
        Exception: what the loader raises, with notes of what grew until then.
        TypeError, ValueError: an argument is wrong, ``make_loader`` makes no new Loader, or it
            has no batches.
    """
    if workers is None:
        count = processors()
        workers = [n for n in range(count) if n < 5 or n & (n - 1) == 0] + [count, count + 1]
    counts = sorted({check_int("workers", count, 0) for count in workers})
    factors = [check_int("prefetch", factor, 1) for factor in dict.fromkeys(prefetch)]
    if not counts or not factors:
        raise ValueError("workers and prefetch must have at least one number each")
    if not 0 < seconds < math.inf or not 0 <= step < math.inf:
        raise ValueError(f"seconds must be above 0, step at least 0, got {seconds} and {step}")
    return _Examination(make_loader, seconds, step, progress).run(counts, factors)


class _Examination:
    """The trials of one loader, and what follows from them. For arguments see :func:`examine`."""

    def __init__(
        self,
        make_loader: Callable[..., Loader],
        seconds: float,
        step: float,
        progress: Progress | None,
    ) -> None:
        self._make_loader = NewLoaders(make_loader)
        self._takes = _takes(make_loader)
        self._seconds = seconds
        self._step = step
        self._progress = progress or (lambda share, text: None)
        self._trials: list[_Trial] = []  # those with the first prefetch_factor first
        self._planned = 0

    def run(self, counts: list[int], factors: list[int]) -> Report:
        self._planned = len(counts) + len(factors) + 1  # the audit counts as two
        for count in counts:
            self._try(count, factors[0])
        trials = list(self._trials)
        best = self._pick()
        for factor in factors[1:] if best.row.num_workers else ():
            self._try(best.row.num_workers, factor)
        best = self._pick()
        serialized, reproducible = self._serialized(trials), self._reproducible(best, counts)
        self._progress(1.0, "done")
        return Report(
            rows=[trial.row for trial in self._trials],
            best=best.row,
            recommended=self._recommend(best.row, [trial.row for trial in trials]),
            bottleneck="" if serialized.answer in ("yes", "in part") else best.stats.verdict,
            serialized=serialized,
            reproducible=reproducible,
            leaking=self._leaking(trials),
            notes=self._notes(),
        )

    def _make(self, num_workers: int, prefetch_factor: int) -> Loader:
        """A new loader with these settings."""
        setting = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        loader = self._make_loader(**{name: setting[name] for name in self._takes})
        if inspect(loader).prefetch_factor != prefetch_factor:
            inspect(loader).prefetch_factor = prefetch_factor
        loader.num_workers = num_workers
        return loader

    def _try(self, num_workers: int, prefetch_factor: int) -> None:
        done, planned = len(self._trials), self._planned
        text = f"num_workers={num_workers}, prefetch_factor={prefetch_factor}"
        self._progress(done / planned, text)
        _give_back()
        with self._make(num_workers, prefetch_factor) as loader:
            trial = _Trial(loader, self._seconds, self._step)
            trial.run(lambda share: self._progress((done + share) / planned, text))
        self._trials.append(trial)

    def _pick(self) -> _Trial:
        """The one with the fewest workers of those that are about as fast as the fastest.

        Without a step, no workers look better than they are: nothing goes on beside them.
        """
        trials = [trial for trial in self._trials if trial.row.num_workers or self._step]
        trials = trials or self._trials
        best = max(trials, key=lambda trial: trial.row.rate).row
        fast = [trial for trial in trials if trial.row.rate >= best.rate - _margin(trial.row, best)]
        return min(fast, key=lambda trial: trial.row.num_workers)  # the first of several

    def _recommend(self, best: Row, rows: list[Row]) -> str:
        text = f"num_workers={best.num_workers}"
        if best.num_workers:
            text += f", prefetch_factor={best.prefetch_factor}"
        text += f": {best.cells()[2]} batches/s"
        one = next((row for row in rows if row.num_workers), best)
        if one.num_workers < best.num_workers:
            text += f", {best.rate / one.rate:.1f} times as many as with {_workers(one)}"
        if best.memory is not None:
            text += f"; workers take {amount(best.memory)} of memory"
        if self._step:
            text += f"; a step of {self._step * 1e3:g} ms waits {100 * best.wait:.0f} % of the time"
        more = [row.rate for row in rows if row.num_workers > best.num_workers]
        if more:
            text += f". More workers add {max(0.0, 100 * max(more) / best.rate - 100):.0f} %."
        elif len(rows) > 1:
            text += ". These are the most that were tried: more may be faster yet."
        inline = next((row for row in rows if not row.num_workers), best)
        if inline.rate > best.rate:
            text += (
                f" num_workers=0 makes {inline.cells()[2]} batches/s, but your step stands still "
                "meanwhile: --step tells what is better."
            )
        return text

    def _serialized(self, trials: list[_Trial]) -> Verdict:
        trials = [trial for trial in trials if trial.row.num_workers]
        if len(trials) < 2:
            return Verdict("unknown", "it takes two numbers of workers above 0 to tell")
        few = trials[0].row
        many = max(trials[1:], key=lambda trial: trial.row.rate)
        if self._step and min(few.wait, many.row.wait) < 0.1:
            keeps = few if few.wait < 0.1 else many.row
            text = f"{_workers(keeps)} can keep up with a step of {self._step * 1e3:g} ms"
            return Verdict("no", f"{text}, which waits {100 * keeps.wait:.0f} % of the time")
        gain = many.row.rate / few.rate
        most = max(processors(), few.num_workers + 1)
        share = (gain - 1) / (min(most, many.row.num_workers) / few.num_workers - 1)
        text = f"{_workers(many.row)} make {gain:.1f} times as many batches as {_workers(few)}"
        if share >= 0.6:
            return Verdict("no", text)
        return Verdict("yes" if share < 0.25 else "in part", f"{text}: {_cause(few, many)}")

    def _leaking(self, trials: list[_Trial]) -> Verdict:
        """By the trial with the fewest workers, where each of these sees most of the dataset."""
        trial = next((trial for trial in trials if trial.row.num_workers), trials[0])
        findings, batches = trial.findings(), f"{trial.stats.batches:,} batches"
        if not Path("/proc/self/statm").exists():
            return Verdict("unknown", "processes can be looked at only where there is /proc")
        if findings is None:
            return Verdict("unknown", f"{batches} are too few to tell: run more --seconds")
        if not findings:
            return Verdict("no", f"nothing grew steadily over {batches}")
        sure = any(not finding.endswith(CACHE) for finding in findings)
        return Verdict("yes" if sure else "perhaps", "\n".join(findings))

    def _reproducible(self, best: _Trial, counts: list[int]) -> Verdict:
        done = itertools.count()

        def make() -> Loader:
            share = 1 - 2 / self._planned * 0.8 ** next(done)  # it makes about ten
            self._progress(share, "check_reproducible")
            return self._make(best.row.num_workers, best.row.prefetch_factor)

        logger = logging.getLogger("minloader")
        level = logger.level
        logger.setLevel(logging.ERROR)  # it kills a worker, which is no news
        try:
            report = check_reproducible(
                make,
                workers={counts[0], min(3, counts[-1])},
                batches=min(20, max(3, int(best.row.rate * self._seconds / 4))),
                epochs=1 if best.once else 2,
            )
        except IrreproducibleError as error:
            return Verdict("no", str(error))
        finally:
            logger.setLevel(level)
        batches = " + ".join(map(str, report.batches))
        return Verdict("yes", f"{batches} batches were the same in {len(report.runs)} runs")

    def _notes(self) -> list[str]:
        notes = []
        if self._trials[0].once:
            notes.append("the sampler is an iterator: a run ends with its one epoch")
        if not isinstance(self._trials[0].executor, str):
            notes.append(
                "the executor is your own: num_workers is how many tasks it is given, and its "
                "workers are not looked at"
            )
        if any(trial.stats.replaced for trial in self._trials):
            notes.append("workers died or grew too large, and were replaced: the log tells why")
        if any(trial.row.noise > 0.1 for trial in self._trials):
            notes.append("some rates are uncertain (+-): run more --seconds, on a quiet machine")
        return notes


def _takes(make_loader: Callable[..., Any]) -> set[str]:
    """Which of the settings a function takes by name."""
    parameters = signature(make_loader).parameters.values()
    names = {"num_workers", "prefetch_factor"}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return names
    return names & {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}


def _margin(row: Row, best: Row) -> float:
    """Batches a second by which a row may be slower and count as fast."""
    return best.rate * max(TOLERANCE, min(0.15, 2 * math.hypot(row.noise, best.noise)))


def _workers(row: Row) -> str:
    return f"{row.num_workers} worker{'s' * (row.num_workers != 1)}"


def _cause(few: Row, trial: _Trial) -> str:
    """Why a trial with more workers than a few was no faster."""
    count, cpus = trial.row.num_workers, processors()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)
    if few.num_workers >= cpus:
        return f"there are {cpus} processors" if cpus > 1 else "there is one processor"
    if trial.shards is not None and trial.shards < count:
        return (
            f"each worker reads a shard of the stream, but num_workers was {trial.shards} when it "
            "was cut into these: let make_loader take num_workers"
        )
    if trial.making < 0.6 * count:
        return trial.stats.verdict  # workers are idle, and it says why
    if trial.stats.executor == "thread" and gil():
        return "threads share the interpreter's lock: try executor='process'"
    if trial.computing >= 0.8 * cpus:
        return "all processors are busy, since a batch takes several of them (threads, programs)"
    if trial.row.memory and trial.computing < 0.6 * count:
        return (
            f"workers compute only {100 * trial.computing / count:.0f} % of the time, and wait in "
            "the dataset for the rest: for a lock that they share, the disk or the network"
        )
    return "other programs may have the processors"


class _NotFoundError(Exception):
    """There is nothing of that name."""


def _find(name: str) -> Any:
    """The object that ``module:attribute`` or ``file.py:attribute`` names."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise _NotFoundError(
            f"{name!r} must be module:function or file.py:function, such as train.py:make_loader"
        )
    file = Path(module_name).resolve() if module_name.endswith(".py") else None
    if file is not None:
        if not file.is_file():
            raise _NotFoundError(f"there is no file {file}")
        module_name = file.stem
    sys.path.insert(0, str(file.parent if file else Path.cwd()))  # workers have the same path
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of an import in the module
        raise _NotFoundError(f"there is no module {error.name}") from error
    if file and Path(module.__file__ or "").resolve() != file:
        raise _NotFoundError(
            f"{file} is hidden by {module.__file__ or 'a module'} of the same name: rename it"
        )
    if not hasattr(module, attribute):
        raise _NotFoundError(f"{module_name} has no {attribute}")
    return getattr(module, attribute)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        error = f"must be whole numbers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(error) from None


def _is_plain(error: Exception) -> bool:
    """Whether an error says all by itself, since no code but ours had a part in it."""
    package = Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    ours = all(package in Path(frame.filename).parents for frame in frames)
    return ours and error.__cause__ is None


class _Bar:
    """A line on a terminal that tells how far it is; without a terminal, none."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def __call__(self, share: float, text: str) -> None:
        bar = ("#" * round(24 * share)).ljust(24, "-")
        self._write(f"[{bar}] {share:4.0%}  {text}")

    def _write(self, text: str) -> None:
        if self._shows:
            print(f"\r\x1b[K{text[: WIDTH - 20]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self._write("")


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``python -m minloader.doctor``.

    Args:
        argv: its arguments; None: those of this process.

    Returns:
        0, and the report is printed; 1: the loader raised; 130: Ctrl-C.

    Raises:
        SystemExit: with 2, an argument is wrong.
    """
    about = "Runs a loader with several settings, and says which is best and what is wrong."
    parser = argparse.ArgumentParser(prog="python -m minloader.doctor", description=about)
    add = parser.add_argument
    add("make_loader", help="module:function or file.py:function; the function returns a Loader")
    add("--workers", type=_numbers, metavar="N,N", help="default: 0 to processors + 1")
    add("--prefetch", type=_numbers, metavar="N,N", default=[2, 1, 4], help="default: 2,1,4")
    add("--seconds", type=float, metavar="S", default=SECONDS, help="for each setting; default: 3")
    add("--step", type=float, metavar="MS", default=0.0, help="milliseconds of a training step")
    add("--json", type=Path, metavar="FILE", help="also write the report there")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    sys.argv[1:] = []  # they are not for the module
    bar = _Bar()
    try:
        report = examine(
            _find(options.make_loader),
            workers=options.workers,
            prefetch=options.prefetch,
            seconds=options.seconds,
            step=options.step / 1e3,
            progress=bar,
        )
    except _NotFoundError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        bar.clear()
        return 130
    except Exception as error:
        bar.clear()
        lines = traceback.format_exception_only(error) if _is_plain(error) else None
        print("".join(lines or traceback.format_exception(error)), end="", file=sys.stderr)
        return 1
    bar.clear()
    print(report)
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 0
