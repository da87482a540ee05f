"""An examination: trials of one loader with several settings, and an audit, one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minloader._checks import check_int
from minloader._inspect import inspect
from minloader._loader import Loader
from minloader._memory.limits import processors
from minloader.doctor.findings import Verdict, growth, leaking, notes, pick, recommend, serialized
from minloader.doctor.schedule import Schedule, audit_runs
from minloader.doctor.trials import HEAD, Row, Trial
from minloader.testing import IrreproducibleError, NewLoaders, check_reproducible

SECONDS = 3.0
"""Seconds of a trial: short enough for a dozen of them, and some hundred batches for most."""

ABOUT = "about "
"""The beginning of the text that says how long the rest takes."""

WIDTH = 96
"""Columns of a report."""

Progress = Callable[[float, str], object]
"""Called with the share that is done, 0 to 1, and what is being done."""


@dataclass
class Report:
    """The result of :func:`examine`. ``str()`` of it is a table and text, 96 columns wide at most.

    Attributes:
        rows: one row for each setting.
        best: the row with the recommended setting.
        recommended: that setting in words, and what it gains.
        bottleneck: what limits the loader; "" where ``serialized`` says so.
        serialized: whether more workers do not help, and why.
        reproducible: whether the batches are always the same.
        leaking: whether memory, descriptors, threads or child processes grow.
        notes: further remarks.
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
        table = [HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, cells, widths)) for cells in table]
        lines[1 + self.rows.index(self.best)] += "  <--"
        names = ("serialized", "reproducible", "leaking", "bottleneck", "recommended")
        parts = [(name, str(getattr(self, name))) for name in names]
        parts += [("note", note) for note in self.notes]
        return "\n".join([*lines, "", *(_paragraph(name, text) for name, text in parts if text)])


def _paragraph(name: str, text: str) -> str:
    """Return a text with its name before it, wrapped. Its own line breaks stay."""
    width, indent = WIDTH - 14, "\n" + 14 * " "
    text = text.replace(" %", "\xa0%")  # so that no line ends before the sign
    parts = (textwrap.wrap(part, width, subsequent_indent="  ") for part in text.splitlines())
    return f"{name:14}{indent.join(itertools.chain.from_iterable(parts))}".replace("\xa0", " ")


def examine(
    make_loader: Callable[..., Loader],
    *,
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] = (2, 1, 4),
    seconds: float = SECONDS,
    step: float = 0.0,
    progress: Progress | None = None,
) -> Report:
    """Run a loader with several settings, one after the other, and report what was found.

    Runs in the calling process, with workers where the loader has them, and closes all loaders.

    Args:
        make_loader: makes a new loader, with a dataset and a sampler of its own, each time. It is
            called with ``num_workers`` and ``prefetch_factor`` by name if it takes them; both are
            set in any case.
        workers: numbers of workers. None: all up to 4, then 8, 16, ... up to the number of
            processors, and one more than that.
        prefetch: values of ``prefetch_factor``: the first is used with every number of workers,
            the others with the best of these.
        seconds: how long to run each setting, from the first batch on. It may become two thirds
            of that, or twice as much, to keep to what was said of how long all of it takes.
        step: seconds that the consumer sleeps after each batch, as if it trained.
        progress: called now and then with how far it is; when the first setting has run, with how
            long the rest takes.

    Raises:
        Exception: the loader raised it; notes say what grew until then.
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
    show = progress or (lambda share, text: None)
    return _Examination(NewLoaders(make_loader), seconds, step, show).run(counts, factors)


@dataclass
class _Examination:
    """The trials of one loader. For the arguments see :func:`examine`."""

    make_loader: NewLoaders
    seconds: float
    step: float
    progress: Progress
    trials: list[Trial] = field(default_factory=list)  # the first prefetch_factor's come first

    def run(self, counts: list[int], factors: list[int]) -> Report:
        """Run all trials, then the audit."""
        likely = max((n for n in counts if n <= processors()), default=counts[0])
        others = factors[1:] if likely else []
        # One with workers comes first: most of the time may be that of their start.
        order = sorted(counts, key=lambda count: (count == 0, count))
        audited = {counts[0], min(3, counts[-1])}
        left = [*order, *[likely] * len(others)]
        self.schedule = Schedule(self.seconds, left, audit_runs({*audited, likely}))
        for count in order:
            self._try(count, factors[0])
        self.trials.sort(key=lambda trial: trial.row.num_workers)
        trials = list(self.trials)
        best = pick(trials, self.step)
        self.schedule.trials = [best.row.num_workers] * len(factors[1:])
        for factor in factors[1:] if best.row.num_workers else ():
            self._try(best.row.num_workers, factor)
        best = pick(self.trials, self.step)
        verdict = serialized(trials, self.step)
        self.schedule.audit = audit_runs({*audited, best.row.num_workers})
        reproducible = self._audit(best, audited)
        self.progress(1.0, "done")
        return Report(
            rows=[trial.row for trial in self.trials],
            best=best.row,
            recommended=recommend(best.row, [trial.row for trial in trials], self.step),
            bottleneck="" if verdict.answer in ("yes", "in part") else best.stats.verdict,
            serialized=verdict,
            reproducible=reproducible,
            leaking=leaking(trials),
            notes=notes(self.trials),
        )

    def _make(self, num_workers: int, prefetch_factor: int) -> Loader:
        """Return a new loader with these settings."""
        loader = self.make_loader(num_workers=num_workers, prefetch_factor=prefetch_factor)
        if inspect(loader).prefetch_factor != prefetch_factor:
            inspect(loader).prefetch_factor = prefetch_factor
        loader.num_workers = num_workers
        return loader

    def _try(self, num_workers: int, prefetch_factor: int) -> None:
        text = f"num_workers={num_workers}, prefetch_factor={prefetch_factor}"
        schedule = self.schedule
        self.progress(schedule.share, text)
        _free_memory()
        seconds, begin = schedule.next_seconds(), schedule.clock()
        with self._make(num_workers, prefetch_factor) as loader:
            made = schedule.clock()
            trial = Trial(loader, seconds, self.step)
            try:
                for _ in trial.run():
                    self.progress(schedule.share, text)
            except Exception as error:
                for finding in growth(trial) or ():
                    error.add_note(f"until then {finding}")
                raise
            trial.conclude()
        self.trials.append(trial)
        schedule.trials.pop(0)
        running = trial.samples[-1].at - trial.samples[0].at
        starting, work = schedule.clock() - made - running, trial.stats._work + trial.stats.sampler
        is_first = not schedule.total
        schedule.learn(num_workers, made - begin, starting, work / (trial.stats.batches or 1))
        if is_first:
            count = len(schedule.trials)
            more = f"{count} more setting{'s' * (count != 1)}, and " if count else ""
            text = f"{ABOUT}{schedule.left:.0f} s to go: {more}check_reproducible"
            self.progress(schedule.share, text)

    def _audit(self, best: Trial, audited: set[int]) -> Verdict:
        """Judge whether the loader is reproducible, with the best setting."""
        self.progress(self.schedule.share, "check_reproducible")
        logger = logging.getLogger("minloader")
        level = logger.level
        logger.setLevel(logging.ERROR)  # the audit kills a worker, which is no news
        runs = itertools.count()

        def make_loader() -> Loader:
            done = next(runs)
            if done > 1 and self.schedule.is_over(best.row.num_workers):
                raise _TimeIsUpError(f"batches were the same in {done} runs, then the time was up")
            return self._make(best.row.num_workers, best.row.prefetch_factor)

        try:
            report = check_reproducible(
                make_loader,
                workers=audited,
                batches=self.schedule.batches(),
                epochs=1 if best.inspection.sampler_used_up else 2,
            )
        except IrreproducibleError as error:
            return Verdict("no", str(error))
        except _TimeIsUpError as error:
            return Verdict("perhaps", f"{error}: check_reproducible does all runs")
        finally:
            logger.setLevel(level)
        batches = " + ".join(map(str, report.batches))
        return Verdict("yes", f"{batches} batches were the same in {len(report.runs)} runs")


class _TimeIsUpError(Exception):
    """The audit has taken longer than it was to take."""


def _free_memory() -> None:
    """Return the memory that is free in this process to the system, where the C library can.

    What the next trial loses would be taken from there first, where nobody can see it.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
