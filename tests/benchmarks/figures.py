"""The figures: minloader and its peers, side by side, in one run.

    python tests/benchmarks/figures.py [--runs 5] [--only tiny,ready,stack,first,skew,import]
                                       [--quick] [--megabytes 100] [--json FILE]

Each measurement has a process of its own, and each run goes through all peers in turn, so that
noise hits all alike. Shown are the median and (lowest to highest). A ratio says how many times
better minloader was, in the same run. CPU time is that of the main process alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import peers
from peers import Case

CHILD_SECONDS = 120  # a measurement that takes longer has failed
STEADY_SECONDS = 4  # slow peers make fewer batches
# Not the file itself: spawned workers would import it as their main module, and peers pay for it.
CHILD = f"import sys; sys.path[:] = {sys.path!r}; import figures; figures.main()"

Values = dict[str, Any]
FORK, SPAWN = ("start", "fork"), ("start", "spawn")


class Line(NamedTuple):
    """A line of a table."""

    label: str
    adapter: Callable[[Case], Iterable[Any]]
    needs: str = "numpy"  # a distribution
    options: tuple[tuple[str, Any], ...] = ()
    against: str = "minloader"  # label of the line that it is compared with

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

    def make(self, line: Line) -> Any:
        return line.adapter(replace(self.case(), **dict(line.options)))

    def value(self, seconds: float) -> float:
        return self.work * seconds ** -self.metrics[0].better


# --- measuring, in the child


def steady(figure: Figure, line: Line) -> Values:
    """The batches to come once the workers are warm."""
    batches = iter(figure.make(line))
    for batch in islice(batches, figure.warm):
        touch(batch)
    return timed(figure, batches)


def second_epoch(figure: Figure, line: Line) -> Values:
    """A whole epoch, after another."""
    loader = figure.make(line)
    for batch in loader:
        touch(batch)
    return timed(figure, iter(loader))


def timed(figure: Figure, batches: Iterator[Any]) -> Values:
    """The value, and the milliseconds of CPU a batch."""
    count, cpu, begin = 0, time.process_time(), time.perf_counter()
    for batch in islice(batches, figure.batches):
        touch(batch)
        count += 1
        if time.perf_counter() - begin > STEADY_SECONDS:
            break
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"value": figure.value(seconds / count), "cpu": cpu / count * 1000}


def touch(batch: Any) -> None:
    """All that a consumer does with a batch of images: looks at one number."""
    if getattr(batch, "ndim", 0) == 4:
        _ = batch[0, 0, 0, 0]


def first_batch(figure: Figure, line: Line) -> Values:
    """The first batch; memory once all workers have worked; the second epoch's first batch."""
    case = replace(figure.case(), **dict(line.options))
    importlib.import_module(line.needs.lower())  # a program has done so long before
    begin = time.perf_counter()
    loader = line.adapter(case)
    batches = iter(loader)
    batch = next(batches)
    found = {"value": time.perf_counter() - begin}
    stages: list[tuple[str, int, set[int]]]
    stages = [("some", 0, set()), ("all", case.dataset.at_once + case.dataset.slow, set())]
    for pid, index, _ in chain([batch], batches):
        for key, since, seen in stages:
            seen.update([pid] * (index >= since))
            if key not in found and len(seen) == case.workers:
                memory = memory_of_workers()
                found |= {key: sum(memory)} if len(memory) >= case.workers else {}
    if line.label.startswith(("minloader", "torch")):  # those that keep their workers
        begin = time.perf_counter()
        batches = iter(loader)
        next(batches)
        found["again"] = (time.perf_counter() - begin) * 1000
    return found


def two_first_batches(figure: Figure, line: Line) -> Values:
    """The first batch of a program's first loader, and of another one after it."""
    import torch  # a program has done so long before

    torch.set_num_threads(1)
    found = {}
    for key in ("value", "again"):
        begin = time.perf_counter()
        batches = iter(figure.make(line))
        next(batches)
        found[key] = time.perf_counter() - begin
    return found


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


# --- what is measured


def skewed_lines() -> list[Line]:
    """In order with deep prefetch, and out of order."""
    first, second = "minloader, prefetch_factor=16", "minloader, in_order=False"
    deep, loose, ours, torch = ("prefetch", 16), ("in_order", False), peers.ours, peers.torch_numpy
    return [
        Line(first, ours, "minloader", (deep,), first),
        Line("torch numpy, prefetch_factor=16", torch, "torch", (FORK, deep), first),
        Line(second, ours, "minloader", (loose,), second),
        Line("minloader, defaults", ours, "minloader", (), second),
        Line("torch numpy, defaults", torch, "torch", (FORK,), second),
        Line("torch numpy, in_order=False", torch, "torch", (FORK, loose), second),
    ]


def importing_lines(quick: bool) -> list[Line]:
    """The ratios are to the line above them that is ours by fork server."""
    ours, torch = ("minloader.torch", peers.ours_as_torch), ("torch", peers.torch_alone)
    ways = [(*ours, "forkserver"), (*ours, "spawn"), (*torch, "spawn"), (*torch, "fork")]
    return [
        Line(
            f"{name}, {start}, {workers} workers",
            *(adapter, "torch", (("start", start), ("workers", workers))),
            f"minloader.torch, forkserver, {workers} workers",
        )
        for workers in ((2,) if quick else (2, 8))
        for name, adapter, start in ways
    ]


OURS = Line("minloader", peers.ours, "minloader")
TORCH = [
    Line(f"torch {kind}, {start}", adapter, "torch", (("start", start),))
    for kind, adapter in (("tensors", peers.torch_tensors), ("numpy", peers.torch_numpy))
    for start in ("fork", "spawn")
]
OTHERS = [
    Line("SeqTools, fork", peers.seqtools, "SeqTools", (FORK,)),
    Line("grain", peers.grain, "grain"),
    Line("joblib", peers.joblib, "joblib"),
    Line("mpire, fork", peers.mpire, "mpire", (FORK,)),
    Line("webdataset MultiLoader, fork", peers.webdataset, "webdataset", (FORK,)),
    Line("bare executor", peers.bare_executor),
]
LIMIT = Line("limit: memory copy, one thread", peers.memory_copy)
STEADY = [OURS, *TORCH, *OTHERS]
FIRST = [
    OURS,
    Line("minloader, fork", peers.ours, "minloader", (FORK,)),
    *TORCH[2:],
    Line("torch, dataset of a tensor, spawn", peers.torch_table, "torch"),
    *(o._replace(label=o.label.replace("fork", "spawn"), options=(SPAWN,)) for o in OTHERS),
]
IN_PROCESS = Line("in process, no workers", peers.in_process)
CPU = Metric("cpu", "CPU, ms per batch", ".3g")
MEMORY = [
    Metric("value", "first batch, s", ".2f", -1),
    Metric("some", "workers' memory, MB", ".0f", -1),
    Metric("all", "all read, MB", ".0f", -1),
    Metric("again", "second epoch's first, ms", ".3g", -1),
]


def make_figures(quick: bool, megabytes: int) -> dict[str, Figure]:
    size, image = (16, (3, 64, 64)) if quick else (256, (3, 224, 224))
    tiny, large, skewed, warm, workers = (300, 12, 48, 5, 2) if quick else (20_000, 100, 400, 12, 4)
    more = warm + 20  # the end must not come in sight
    batch = size * math.prod(image)
    title = "The dataset holds an array of {} MB, a batch is a row of it; {} workers; their memory "
    title += "(PSS) when each has made some batches, and when each has read the whole array"
    return {
        "tiny": Figure(
            "A batch is 8 float32 and a label; 2 workers",
            *(steady, [Metric("value", "microseconds per batch", ".0f", -1), CPU], STEADY),
            lambda: Case(peers.Tiny(tiny + 100 * more)),
            *(tiny, 100 * warm, 1e6),
        ),
        "ready": Figure(
            f"A batch is a ready-made array of {batch / 1e6:.1f} MB; 2 workers",
            *(steady, [Metric("value", "GB/s", ".2f", 1), CPU], [*STEADY, LIMIT]),
            lambda: Case(peers.Images(large + more, 1, (size, *image)), large=batch),
            *(large, warm, batch / 1e9),
        ),
        "stack": Figure(
            f"The loader stacks {size} images to a batch of {batch / 1e6:.1f} MB; 2 workers",
            *(steady, [Metric("value", "batches/s", ".1f", 1), CPU], [*STEADY, IN_PROCESS, LIMIT]),
            lambda: Case(peers.Images((large + more) * size, 64, image), size, batch),
            *(large, warm),
        ),
        "first": Figure(
            title.format(megabytes, workers),
            *(first_batch, MEMORY, FIRST),
            lambda: Case(
                peers.Rows(2 * workers, 40 * workers, 20 * workers, megabytes), None, 8000, workers
            ),
        ),
        "skew": Figure(
            f"Every 16th of {skewed} batches takes 50 ms, the others 1 ms; 2 workers "
            "(dealt out in turn, as torch does in order, all slow ones fall to the same worker)",
            *(second_epoch, [Metric("value", "seconds", ".2f", -1), CPU], skewed_lines()),
            lambda: Case(peers.Skew(skewed)),
            *(skewed, 0, skewed),
        ),
        "import": Figure(
            "Workers that import torch: the first batch of the program's first loader, and of "
            "another one after it",
            two_first_batches,
            [
                Metric("value", "first batch, s", ".2f", -1),
                Metric("again", "another loader's first, s", ".2f", -1),
            ],
            importing_lines(quick),
            lambda: Case(peers.tensors()),
        ),
    }


# --- running and printing


def measure(arguments: list[str]) -> Values:
    """Runs one child; its values, or why it failed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, since a worker left behind would keep pipes open.
        command = [sys.executable, "-c", CHILD, *arguments]
        child = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        try:
            status = child.wait(CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {CHILD_SECONDS} s"}
        finally:
            if child.poll() is None:
                for process in [*workers_of(child.pid), child]:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        if status == 0:
            return dict(json.loads(out.read().splitlines()[-1]))
        return {"failed": "".join(err.read().splitlines()[-1:])[:80] or f"exit status {status}"}


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
            base = results[line.against]
            row = (text for metric in figure.metrics for text in cells(metric, runs, base))
            rows.append([line.label, *row])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
    return "\n".join([*(f"| {line} |" for line in lines), *(f"- {text}" for text in remarks)])


def heading() -> str:
    """When, with what, on what."""
    import minloader

    versions = [f"minloader {minloader.__version__}"]
    for name in ("numpy", "torch", *(o.needs for o in OTHERS[:-1])):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    where = f"{platform.system()}, {os.cpu_count()} processors, {memory:.0f} GiB"
    when = time.strftime("%Y-%m-%d")
    return f"{when}, {where}, CPython {platform.python_version()}; {', '.join(versions)}"


def main() -> None:
    """Measures and prints; the exit status is 1 if minloader itself failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="5, or with --quick 1")
    parser.add_argument("--only", default="tiny,ready,stack,first,skew,import")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work at all?")
    parser.add_argument("--megabytes", type=int, help="of the case 'first': 100, --quick 4")
    parser.add_argument("--json", help="file to write all values to")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    runs = options.runs or (1 if options.quick else 5)
    megabytes = options.megabytes or (4 if options.quick else 100)
    figures = make_figures(options.quick, megabytes)
    if options.child is not None:
        figure = figures[options.only]
        found = figure.measure(figure, figure.lines[options.child])
        print("\n" + json.dumps(found), flush=True)
        return

    print(heading(), flush=True)
    results = {}
    for name in options.only.split(","):
        arguments = [f"--only={name}", f"--megabytes={megabytes}", *["--quick"] * options.quick]
        results[name] = run(figures[name], runs, arguments)
        text = table(figures[name], results[name])
        print(f"\n{name}: {figures[name].title}\n\n{text}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"heading": heading(), "results": results}, file, indent=1)
    ours = [(label, x) for lines in results.values() for label in lines for x in lines[label]]
    sys.exit(any("minloader" in label and "failed" in values for label, values in ours))


if __name__ == "__main__":
    main()
