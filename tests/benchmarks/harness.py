"""What measures a loader in a process of its own, and prints tables of such measurements."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from peers import Case

CHILD_SECONDS = 120  # a measurement that takes longer has failed
STEADY_SECONDS = 0.8  # slow peers make fewer batches
WARM_SECONDS = 0.3  # chunks grow meanwhile, and what was made ahead of the check is used up
# Not the file itself: spawned workers would import it as their main module, and peers pay for it.
CHILD = f"import sys; sys.path[:] = {sys.path!r}; import figures; figures.main()"

Values = dict[str, Any]


class Line(NamedTuple):
    """A line of a table."""

    label: str
    adapter: Callable[[Case], Iterable[Any]]
    needs: str = "numpy"  # a distribution
    options: tuple[tuple[str, Any], ...] = ()
    against: str = "minloader"  # label of the line that it is compared with
    expect: str = "in order"  # the dataset's batches, or in "any order", or "nothing" of the kind

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.needs.lower()) is not None


class Metric(NamedTuple):
    """A column of a table."""

    key: str
    head: str
    form: str
    better: int = 0  # 1: more is better, -1: less is better, 0: no ratio


@dataclass(frozen=True)
class Figure:
    """A table."""

    title: str
    measure: Callable[[Figure, Line], Values]
    metrics: list[Metric]
    lines: list[Line]
    case: Callable[[], Case]  # made in the child alone
    batches: int = 0  # counted
    warm: int = 0  # made before those
    work: float = 1  # what a batch stands for: value = work / seconds, or work * seconds
    picture: Callable[[dict[str, list[Values]]], str] | None = None  # an SVG of the results

    def case_of(self, line: Line) -> Case:
        return replace(self.case(), **dict(line.options))

    def make(self, line: Line) -> Any:
        return line.adapter(self.case_of(line))

    def value(self, seconds: float) -> float:
        return self.work * seconds ** -self.metrics[0].better


# --- measuring, in the child


def steady(figure: Figure, line: Line) -> Values:
    """The batches to come once the workers are warm."""
    case = figure.case_of(line)
    batches = iter(line.adapter(case))
    drain(map(checker(line, case.whole()), islice(batches, figure.warm)))
    rate(batches, sys.maxsize, WARM_SECONDS)
    return timed(figure, batches)


def timed(figure: Figure, batches: Iterator[Any]) -> Values:
    """The value, and the milliseconds of CPU a batch."""
    seconds, cpu = rate(batches, figure.batches, STEADY_SECONDS)
    return {"value": figure.value(seconds), "cpu": cpu * 1000}


def rate(batches: Iterator[Any], most: int, limit: float) -> tuple[float, float]:
    """Seconds, and those of CPU, a batch: of so many of them, or those in so many seconds.

    No variable ever has a batch here: a peer may have few buffers, and each that somebody holds
    is missing. (SeqTools lost nine tenths of its speed to the last batch of the warm-up.)
    """
    count, cpu, begin = 0, time.process_time(), time.perf_counter()
    for _ in map(touch, islice(batches, most)):
        count += 1
        if time.perf_counter() - begin > limit:
            break
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return seconds / count, cpu / count


def touch(batch: Any) -> None:
    """All that a consumer does with a batch of images: looks at one number."""
    if getattr(batch, "ndim", 0) == 4:
        _ = batch[0, 0, 0, 0]


def drain(iterator: Iterable[Any]) -> None:
    """Goes through all of it and keeps nothing."""
    deque(iterator, 0)


def checker(line: Line, dataset: Any) -> Callable[[Any], None]:
    """What raises unless each batch that it is given is the next of those that are expected."""
    left = dict.fromkeys(range(min(len(dataset), 10_000)))

    def check(batch: Any) -> None:
        among = left if line.expect == "any order" else islice(left, 1)
        index = next((i for i in among if same(batch, dataset.expected(i))), None)
        if index is None:
            raise ValueError(f"not the batch that is expected next, which is {min(left)}")
        del left[index]

    return touch if line.expect == "nothing" else check


def same(found: Any, expected: Any) -> bool:
    """Whether arrays or tensors, or tuples of them, have the same numbers."""
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return np.array_equal(found, expected)


def workers_of(pid: int) -> list[Any]:
    """Its processes, but for the resource tracker, which cleans up after them."""
    from psutil import NoSuchProcess, Process

    found = []
    for worker in Process(pid).children(recursive=True):
        with suppress(NoSuchProcess):  # it has just ended
            found += [worker] * ("resource_tracker" not in " ".join(worker.cmdline()))
    return found


def memory_of_workers() -> list[float]:
    """Megabytes of each, shared pages divided among those that share them (PSS)."""
    return [worker.memory_full_info().pss / 1e6 for worker in workers_of(os.getpid())]


# --- running and printing


def run_child(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Runs a program with a deadline; its exit status, None if it was killed, and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, since a worker left behind would keep pipes open.
        child = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = child.wait(seconds)
        finally:
            if child.poll() is None:
                for process in [*workers_of(child.pid), child]:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def measure(arguments: list[str]) -> Values:
    """Runs one child; its values, or why it failed."""
    status, out, err = run_child([sys.executable, "-c", CHILD, *arguments], CHILD_SECONDS)
    if status is None:
        return {"failed": f"not done after {CHILD_SECONDS} s"}
    if status == 0:
        return dict(json.loads(out.splitlines()[-1]))
    return {"failed": "".join(err.splitlines()[-1:])[:80] or f"exit status {status}"}


def run(figure: Figure, runs: int, arguments: list[str]) -> dict[str, list[Values]]:
    """All measurements of one table."""
    results: dict[str, list[Values]] = {line.label: [] for line in figure.lines}
    for number in range(runs):
        for index, line in enumerate(figure.lines):
            if sys.stderr.isatty():
                print(f"\033[Krun {number + 1}, {line.label}", end="\r", file=sys.stderr)
            if line.installed:
                results[line.label].append(measure([f"--child={index}", *arguments]))
    return results


def spread(values: list[float], form: str) -> str:
    """Median, and lowest to highest."""
    if not values:
        return ""
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def cells(metric: Metric, runs: list[Values], base: list[Values]) -> Iterator[str]:
    """A metric's value, and its ratio if it has one."""
    key, nothing = metric.key, float("nan")
    yield spread([run[key] for run in runs if key in run], metric.form)
    if metric.better:
        pairs = [(run.get(key), ours.get(key)) for run, ours in zip(runs, base, strict=True)]
        ratios = [(b / (a or nothing)) ** metric.better for a, b in pairs if None not in (a, b)]
        yield "" if runs is base else spread(ratios, ".3g")


def table(figure: Figure, results: dict[str, list[Values]]) -> str:
    """Markdown."""
    head = [text for m in figure.metrics for text in ([m.head, "ratio"] if m.better else [m.head])]
    rows, remarks = [["", *head]], []
    for line in figure.lines:
        runs = results[line.label]
        failed = [run["failed"] for run in runs if "failed" in run]
        if not line.installed:
            remarks.append(f"{line.label}: not installed")
        elif failed:
            remarks.append(f"{line.label}: failed: {failed[0]} ({len(failed)} of {len(runs)} runs)")
        else:
            base = results.get(line.against, [])
            row = (text for metric in figure.metrics for text in cells(metric, runs, base))
            rows.append([line.label, *row])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    return "\n".join([*(f"| {line} |" for line in lines), *(f"- {text}" for text in remarks)])
