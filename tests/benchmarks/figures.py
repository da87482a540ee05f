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
import sys
import time
from dataclasses import replace
from itertools import chain

import peers
from harness import (
    Figure,
    Line,
    Metric,
    Values,
    memory_of_workers,
    run,
    second_epoch,
    steady,
    table,
)
from peers import Case

FORK, SPAWN = ("start", "fork"), ("start", "spawn")


# --- measuring, in the child


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
