"""The figures: minloader and its peers, side by side, in one run.

    python tests/benchmarks/figures.py [--runs 5] [--only ready,stack] [--quick]
                                       [--megabytes 100] [--more] [--json FILE] [--pages]

Each measurement has a process of its own, and each run goes through all peers in turn, so that
noise hits all alike. Shown are the median and (lowest to highest). A ratio says how many times
better minloader was, in the same run. Seconds are those of the clock, and CPU time is that of the
main process alone, unless the head of the column names others. The batches of every loader are
compared with those that are expected, before they are timed.

``--pages`` writes the tables and the picture into the pages, and makes those of README.md and
docs/index.md from them; see pages.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from typing import Any

import curves
import pages
import peers
import real_work
from harness import (
    Figure,
    Line,
    Metric,
    Values,
    checker,
    drain,
    memory_of_workers,
    rate,
    run,
    same,
    steady,
    table,
    timed,
)
from peers import Case

COSTS = {"50 µs": 5e-5, "100 µs": 1e-4, "300 µs": 3e-4, "1 ms": 1e-3, "3 ms": 3e-3}
DISTRIBUTIONS = ["numpy", "torch", "torchdata", "SeqTools", "grain", "joblib", "mpire"]
DISTRIBUTIONS += ["webdataset", "spdl-core", "spdl-io", "pillow", "datasets", "lightning"]
FORK, SPAWN = ("start", "fork"), ("start", "spawn")


# --- measuring, in the child


def first_batch(figure: Figure, line: Line) -> Values:
    """The first batch; memory once all workers have worked; the second epoch's first batch."""
    case = figure.case_of(line)
    check = checker(line, case.dataset)

    def who(batch: Any) -> tuple[int, int]:
        """Which worker made which batch."""
        check(batch[2])
        return batch[:2]

    importlib.import_module(line.needs.lower())  # a program has done so long before
    begin = time.perf_counter()
    loader = line.adapter(case)
    batches = map(who, loader)
    first = next(batches)
    found = {"value": time.perf_counter() - begin}
    stages: list[tuple[str, int, set[int]]]
    stages = [("some", 0, set()), ("all", case.dataset.at_once + case.dataset.slow, set())]
    for pid, index in chain([first], batches):
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
        case = figure.case_of(line)
        begin = time.perf_counter()
        batches = iter(line.adapter(case))
        right = same(next(batches), case.dataset[0])
        found[key] = time.perf_counter() - begin
        if not right:
            raise ValueError("a wrong batch")
    return found


def many_workers(figure: Figure, line: Line) -> Values:
    """The share of the ideal rate, and what it takes to get there."""
    case = figure.case_of(line)
    importlib.import_module(line.needs.lower())  # a program has done so long before
    seen: set[int] = set()
    begin = time.perf_counter()
    batches = iter(line.adapter(case))
    for index in count():
        worker, found = next(batches)
        assert found == index
        seen.add(worker)
        if len(seen) == case.workers:
            break
    start = time.perf_counter() - begin
    drain(islice(batches, 2 * case.prefetch * case.workers))  # made while the last one started
    figure = replace(figure, batches=case.workers * figure.batches, work=peers.WAIT / case.workers)
    return timed(figure, batches) | {
        "start": start,
        "memory": sum(memory_of_workers()) / case.workers,
    }


def efficiency(figure: Figure, line: Line, measured: float) -> Values:
    """The time of the work / (the time that a batch takes * workers), for each cost of a batch.

    The time of the work is measured in this process, just before.
    """
    found = {}
    for name in [metric.key for metric in figure.metrics]:
        cost = COSTS[name]
        dataset = peers.Work(1_000_000, cost)
        case = replace(figure.case_of(line), dataset=dataset, chunk=math.ceil(0.01 / cost))
        alone = map(dataset.__getitem__, count())
        work = min(rate(alone, sys.maxsize, measured / 10)[1] for _ in range(3))
        batches = iter(line.adapter(case))
        drain(map(checker(line, dataset), islice(batches, figure.warm)))
        rate(batches, sys.maxsize, measured / 2)
        seconds, _ = rate(batches, sys.maxsize, measured)
        found[name] = 100 * work / seconds / case.workers
        del batches  # its workers end
    return found


def small_curves(results: dict[str, list[Values]]) -> str:
    """The medians as an SVG image, a panel for each number of workers."""
    panels: dict[str, dict[str, curves.Points]] = {}
    for label, runs in results.items():
        if runs and not any("failed" in run for run in runs):
            line, _, workers = label.rpartition(", ")
            panels.setdefault(workers, {})[line] = [
                (COSTS[name], statistics.median(run[name] for run in runs)) for name in runs[0]
            ]
    ticks = {cost: name for name, cost in COSTS.items()}
    return curves.draw("Small batches", panels, ticks, "efficiency, %, by the work of a batch")


# --- what is measured


def waiting_lines(quick: bool) -> list[Line]:
    """Each is compared with ours of the same start and number of workers."""
    ours, torch = ("minloader", peers.ours), ("torch", peers.torch_numpy)
    ways = [(*ours, "spawn"), (*torch, "spawn"), (*ours, "fork"), (*torch, "fork")]
    return [
        Line(
            f"{name}, {start}, {workers} workers",
            *(adapter, name, (("start", start), ("workers", workers))),
            f"minloader, {start}, {workers} workers",
        )
        for workers in ((4,) if quick else (4, 16, 64))
        for name, adapter, start in ways
        # Torch takes minutes to spawn 64.
        if start == "fork" or workers == 4 or (name == "minloader" and workers == 64)
    ]


def importing_lines(more: bool) -> list[Line]:
    """The ratios are to the line above them that is ours by fork server."""
    ours, torch = ("minloader.torch", peers.ours_as_torch), ("torch", peers.torch_alone)
    ways = [(*ours, "forkserver"), (*ours, "spawn"), (*torch, "spawn"), (*torch, "fork")]
    return [
        Line(
            f"{name}, {start}, {workers} workers",
            *(adapter, "torch", (("start", start), ("workers", workers))),
            f"minloader.torch, forkserver, {workers} workers",
        )
        for workers in ((2, 8) if more else (2,))
        for name, adapter, start in ways
    ]


OURS = Line("minloader", peers.ours, "minloader")
TORCH = [
    Line("torch tensors, fork", peers.torch_tensors, "torch", (FORK,)),
    Line("torch numpy, fork", peers.torch_numpy, "torch", (FORK,)),
]
OTHERS = [
    Line("SeqTools, fork", peers.seqtools, "SeqTools", (FORK,)),
    Line("grain", peers.grain, "grain"),
    Line("joblib", peers.joblib, "joblib"),
    Line("mpire, fork", peers.mpire, "mpire", (FORK,)),
    Line(
        "webdataset MultiLoader, fork",
        *(peers.webdataset, "webdataset", (FORK,), "minloader", "any order"),
    ),
]
LIMIT = Line("limit: memory copy, one thread", peers.memory_copy, expect="nothing")
STEADY = [OURS, *TORCH, *OTHERS]
PIPES = ("joblib", "mpire", "webdataset")  # by which they send large batches: "ready" shows it
STACKING = [line for line in STEADY if line.needs not in PIPES]
FIRST = [
    OURS,
    Line("minloader, fork", peers.ours, "minloader", (FORK,)),
    TORCH[1],
    TORCH[1]._replace(label="torch numpy, spawn", options=(SPAWN,)),
    *(
        line._replace(label=line.label.replace("fork", "spawn"), options=(SPAWN,))
        for line in OTHERS
        if line.needs != "webdataset"  # to save time: its workers take long to start
    ),
]
SMALL = [
    line._replace(
        label=f"{line.label}, {workers} worker{'s' * (workers > 1)}",
        options=(*line.options, ("workers", workers)),
        against="",
    )
    for workers in (1, 2)
    for line in [OURS, TORCH[1], *OTHERS]
]
IN_PROCESS = Line("in process, no workers", peers.in_process)
CPU = Metric("cpu", "CPU of the main process, ms per batch", ".3g")
MEMORY = [
    Metric("value", "first batch, s", ".2f", -1),
    Metric("some", "workers' memory, MB", ".0f", -1),
    Metric("all", "all read, MB", ".0f", -1),
    Metric("again", "second epoch's first, ms", ".3g", -1),
]


IN_PAGES = {"jpeg", "tiny", "ready", "stack", "first", "streams", "fit"}
"""Those whose tables are in docs/benchmarks.md."""


def make_figures(quick: bool, megabytes: int, more: bool) -> dict[str, Figure]:
    size, image = (16, (3, 64, 64)) if quick else (256, (3, 224, 224))
    tiny, large, warm, workers = (300, 12, 3, 2) if quick else (100_000, 100, 6, 4)
    beyond = 100_000 if quick else 1000  # the end must not come in sight
    batch = size * math.prod(image)
    title = "The dataset holds an array of {} MB, a batch is a row of it; {} workers; their memory "
    title += "(PSS) when each has made some batches, and when each has read the whole array"
    return {
        "tiny": Figure(
            "A batch is 8 float32 and a label; 2 workers",
            *(steady, [Metric("value", "microseconds per batch", ".1f", -1), CPU], STEADY),
            lambda: Case(peers.Tiny(1_000_000), chunk=1000),
            *(tiny, 100 * warm, 1e6),
        ),
        "ready": Figure(
            f"A batch is a ready-made array of {batch / 1e6:.1f} MB; 2 workers",
            *(steady, [Metric("value", "GB/s", ".2f", 1), CPU], [*STEADY, LIMIT]),
            lambda: Case(peers.Images(large + beyond, 1, (size, *image)), large=batch),
            *(large, warm, batch / 1e9),
        ),
        "stack": Figure(
            f"The loader stacks {size} images to a batch of {batch / 1e6:.1f} MB; 2 workers",
            *(
                steady,
                [Metric("value", "batches/s", ".1f", 1), CPU],
                [*STACKING, IN_PROCESS, LIMIT],
            ),
            lambda: Case(peers.Images((large + beyond) * size, 61, image), size, batch),
            *(large, warm),
        ),
        "first": Figure(
            title.format(megabytes, workers),
            *(first_batch, MEMORY, FIRST),
            lambda: Case(
                peers.Rows(2 * workers, 40 * workers, 20 * workers, megabytes), None, 8000, workers
            ),
        ),
        "import": Figure(
            "Workers that import torch: the first batch of the program's first loader, and of "
            "another one after it",
            two_first_batches,
            [
                Metric("value", "first batch, s", ".2f", -1),
                Metric("again", "another loader's first, s", ".2f", -1),
            ],
            importing_lines(more),
            lambda: Case(peers.tensors()),
        ),
        "many": Figure(
            f"A batch waits {peers.WAIT * 1000:.0f} ms; ideal is one batch per worker in that time",
            many_workers,
            [
                Metric("value", "share of the ideal rate", ".2f", 1),
                Metric("cpu", "CPU of the main process, ms per batch", ".3g", -1),
                Metric("start", "all have delivered, s", ".2f", -1),
                Metric("memory", "memory per worker, MB", ".1f", -1),
            ],
            waiting_lines(quick),
            lambda: Case(peers.Waiting(1_000_000)),
            batches=5 if quick else 50,  # of each worker
        ),
        "small": Figure(
            "Efficiency, %: the time of the work / (the time that a batch takes * workers), for "
            "batches that take so much processor time",
            partial(efficiency, measured=0.02 if quick else 0.1),
            [Metric(name, name, ".0f") for name in list(COSTS)[: 2 if quick else None]],
            SMALL[len(SMALL) // 2 :] if quick else SMALL,
            lambda: Case(None),
            warm=10,
            picture=small_curves,
        ),
    }


# --- running and printing


def heading() -> str:
    """When, with what, on what."""
    import minloader

    versions = [f"minloader {minloader.__version__}"]
    for name in DISTRIBUTIONS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    where = f"{platform.system()}, {os.cpu_count()} processors, {memory:.0f} GiB"
    when = time.strftime("%Y-%m-%d")
    return f"{when}, {where}, CPython {platform.python_version()}; {', '.join(versions)}"


def write_pages(
    figures: dict[str, Figure], results: dict[str, dict[str, list[Values]]], *, is_whole: bool
) -> None:
    """Writes into the pages what was measured; when and with what, if all of it was."""
    page = pages.BENCHMARKS.read_text()
    for name in IN_PAGES & results.keys():
        page = pages.with_table(page, name, table(figures[name], results[name]))
    if is_whole:
        page = pages.with_table(page, "heading", textwrap.fill(f"{heading()}.", 100))
    pages.BENCHMARKS.write_text(page)
    for name in results:
        draw = figures[name].picture
        if draw is not None:
            (pages.BENCHMARKS.parent / f"{name}.svg").write_text(draw(results[name]))
    pages.main()


def main() -> None:
    """Measures and prints; the exit status is 1 if minloader itself failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="5, or with --quick 1")
    parser.add_argument("--only", help="names of cases, with commas between; all of them")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work at all?")
    parser.add_argument("--megabytes", type=int, help="of the case 'first': 100, --quick 4")
    parser.add_argument("--more", action="store_true", help="the lines with 8 workers too")
    parser.add_argument("--json", help="file to write all values to")
    parser.add_argument("--pages", action="store_true", help="write the figures into the pages")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pages and options.quick:
        parser.error("--quick measures nothing that is worth a page; drop --pages or --quick")
    runs = options.runs or (1 if options.quick else 5)
    megabytes = options.megabytes or (4 if options.quick else 100)
    figures = make_figures(options.quick, megabytes, options.more)
    figures |= real_work.make_figures(options.quick)
    if options.child is not None:
        figure = figures[options.only]
        found = figure.measure(figure, figure.lines[options.child])
        print("\n" + json.dumps(found), flush=True)
        return

    print(heading(), flush=True)
    results = {}
    for name in options.only.split(",") if options.only else figures:
        arguments = [f"--only={name}", f"--megabytes={megabytes}"]
        arguments += ["--quick"] * options.quick + ["--more"] * options.more
        figure, begin = figures[name], time.perf_counter()
        results[name] = run(figure, runs, arguments)
        title = f"{name}: {figure.title} ({time.perf_counter() - begin:.0f} s)"
        print(f"\n{title}\n\n{table(figure, results[name])}", flush=True)
    if options.pages:
        write_pages(figures, results, is_whole=not options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"heading": heading(), "results": results}, file, indent=1)
    ours = [(label, x) for lines in results.values() for label in lines for x in lines[label]]
    sys.exit(any("minloader" in label and "failed" in values for label, values in ours))


if __name__ == "__main__":
    main()
