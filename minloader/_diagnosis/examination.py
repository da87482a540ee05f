"""An examination: trials of one loader with several settings, and an audit, one after the other."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minloader._arguments import checked_int
from minloader._diagnosis.audit import IrreproducibleError, NewLoaders, check_reproducible
from minloader._diagnosis.findings import cause, pick, recommend
from minloader._diagnosis.inspect import with_arguments
from minloader._diagnosis.processors import processors
from minloader._diagnosis.trials import HEAD, Row, Trial, run
from minloader._loader import Loader

SECONDS = 3.0
"""Seconds of a trial: short enough for a dozen of them, and some hundred batches for most."""

LONG_START = 2.0
"""Seconds to the first batch from which on another way to start workers is tried."""

WIDTH = 96
"""Columns of a report."""


@dataclass
class Report:
    """The result of :func:`examine`. ``str()`` of it is a table and text, 96 columns wide at most.

    Attributes:
        rows: one row for each setting.
        best: the row with the recommended setting.
        recommended: that setting in words, and what it gains.
        cause: what limits the loader, or why more workers do not help.
        is_reproducible: whether the batches were always the same.
        reproducible: the same in words, and where they differ.
    """

    rows: list[Row]
    best: Row
    recommended: str
    cause: str
    is_reproducible: bool = False
    reproducible: str = "not checked"

    def __str__(self) -> str:
        return f"{self.timings()}\n{self.lines('reproducible')}"

    def timings(self) -> str:
        """Return what is known before the batches are checked."""
        table = [HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, cells, widths)) for cells in table]
        lines[1 + self.rows.index(self.best)] += "  <--"
        return "\n".join([*lines, "", self.lines("recommended"), self.lines("cause")])

    def lines(self, name: str) -> str:
        """Return what the attribute of a name says, behind the name."""
        text = f"{name:14}{getattr(self, name)}"
        return "\n".join(
            textwrap.fill(part, WIDTH, subsequent_indent=14 * " ") for part in text.splitlines()
        )


def examine(
    make_loader: Callable[..., Loader],
    *,
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] = (2, 1, 4),
    seconds: float = SECONDS,
    step: float = 0.0,
    progress: Callable[[str], object] = lambda text: None,
    timed: Callable[[Report], object] = lambda report: None,
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
        seconds: how long to run each setting, from the first batch on. It becomes up to four
            times that where there are too few batches to tell how fast it is.
        step: seconds that the consumer sleeps after each batch, as if it trained.
        progress: called with what is done next.
        timed: called with the report before the batches are checked, which may take a while.

    Raises:
        Exception: the loader raised it.
        TypeError, ValueError: an argument is wrong, ``make_loader`` makes no new Loader, or it
            has no batches.
    """
    wanted = _usual_workers() if workers is None else workers
    counts = sorted({checked_int("workers", count, 0) for count in wanted})
    factors = [checked_int("prefetch", factor, 1) for factor in dict.fromkeys(prefetch)]
    if not counts or not factors:
        raise ValueError("workers and prefetch must have at least one number each")
    if not 0 < seconds < math.inf or not 0 <= step < math.inf:
        raise ValueError(f"seconds must be above 0, step at least 0, got {seconds} and {step}")
    make = NewLoaders(make_loader)

    def attempt(num_workers: int, factor: int, method: str = "") -> Trial:
        progress(f"num_workers={num_workers}, prefetch_factor={factor}{method and f', {method}'}")
        with _made(make, num_workers, factor, **{"mp_context": method} if method else {}) as loader:
            return run(loader, seconds, step)

    trials = [attempt(count, factors[0]) for count in counts]
    best = pick(trials, step)
    others = [attempt(best.row.num_workers, n) for n in factors[1:] if best.row.num_workers]
    best = pick([*trials, *others], step)
    if best.row.start_method == "spawn" and best.row.first > LONG_START:
        others.append(attempt(best.row.num_workers, best.row.prefetch_factor, "forkserver"))
    rows = [trial.row for trial in trials + others]
    report = Report(rows, best.row, recommend(rows, best.row), cause(trials, best))
    timed(report)
    progress("check_reproducible")
    epochs = 1 if best.used_up else 2
    report.is_reproducible, report.reproducible = _audit(make, counts, best.row, epochs=epochs)
    return report


def _usual_workers() -> list[int]:
    """Return the numbers of workers to run with where none are asked for."""
    count = processors()
    return [n for n in range(count) if n < 5 or n & (n - 1) == 0] + [count, count + 1]


def _made(make: NewLoaders, num_workers: int, prefetch_factor: int, **others: Any) -> Loader:
    """Return a new loader with these settings, and other arguments."""
    settings = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
    return with_arguments(make(**settings), **settings, **others)


def _audit(make: NewLoaders, counts: list[int], best: Row, *, epochs: int) -> tuple[bool, str]:
    """Return whether the loader is reproducible, with the best setting; and that in words."""
    logger = logging.getLogger("minloader")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the audit kills a worker, which is no news
    try:
        report = check_reproducible(
            lambda: _made(make, best.num_workers, best.prefetch_factor),
            workers={counts[0], min(3, counts[-1])},
            batches=max(3, min(20, round(best.rate))),
            epochs=epochs,
        )
    except IrreproducibleError as error:
        return False, f"no: {error}"
    finally:
        logger.setLevel(level)
    return True, f"yes: {report}"
