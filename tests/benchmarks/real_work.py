"""SPDL's own benchmark of transport, and real work: photos, streams, and a fit.

figures.py has these cases among its own.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from ctypes import CDLL
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import peers
import real_peers
from harness import Figure, Line, Metric, Values, workers_of
from peers import Case
from real_peers import Payloads, Photos

import minloader

if "BENCHMARK_FILES" not in os.environ:  # children find what is in there
    _folder = TemporaryDirectory(prefix="benchmark")  # removed at exit
    os.environ["BENCHMARK_FILES"] = _folder.name
FILES = Path(os.environ["BENCHMARK_FILES"])
FORK = ("start", "fork")


# --- measuring, in the child


def import_peers(line: Line) -> None:
    """Import what a program has imported long before it loads anything."""
    names = ["spdl.pipeline"] if line.needs == "spdl" else [line.needs.lower()]
    names += ["spdl.dataloader", "torch"] * (SPDL_LOADER in line.label)
    names += ["spdl.io"] * ("spdl.io" in line.label)
    for name in names:
        importlib.import_module(name)
    _ = minloader.Loader  # imported when it is first asked for


def look(batch: Any) -> int:
    """Read one number of the batch, which is then let go."""
    _ = batch[0].reshape(-1)[0]
    return 1


def cpu_of_all() -> float:
    """Seconds of CPU that the main process and its workers have taken."""
    times = [worker.cpu_times() for worker in workers_of(os.getpid())]
    return time.process_time() + sum(spent.user + spent.system for spent in times)


def peak(pid: int) -> float:
    """Megabytes of memory that a process had at most, shared or not."""
    with suppress(FileNotFoundError), open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith("VmHWM"))
    return 0.0


def check(given: Any, expected: Any, within: int = 0) -> None:
    """Raise if a batch is not the one that was to come."""
    for one, other in zip(given, expected, strict=True):
        if not np.allclose(one, other, rtol=0, atol=within):
            raise ValueError("a batch is not the one that was to come")


def passes(figure: Figure, line: Line) -> Values:
    """Passes over all batches, for a second; CPU time and memory of main and worker."""
    import_peers(line)
    expected = list(figure.case().dataset)
    check(expected[0], expected[0])  # takes memory too
    before = peak(os.getpid())
    loader = figure.make(line)
    for index, batch in enumerate(loader):
        check(batch, expected[index])
        del batch
    count, cpu, begin = 0, cpu_of_all(), time.perf_counter()
    while (seconds := time.perf_counter() - begin) < 1:
        count += sum(map(look, loader))
    cpu = cpu_of_all() - cpu
    memory = sum(peak(pid) for pid in (os.getpid(), *(w.pid for w in workers_of(os.getpid()))))
    return {
        "value": figure.value(seconds / count),
        "cpu": cpu / count * figure.batches,
        "memory": memory - before,
    }


def decodes(figure: Figure, line: Line) -> Values:
    """The first batch, then those that come once the workers are warm."""
    import_peers(line)
    case = figure.case_of(line)
    size = case.batch_size or 1
    begin = time.perf_counter()
    batches = iter(line.adapter(case))
    look(next(batches))
    found = {"first": time.perf_counter() - begin}
    sum(map(look, islice(batches, figure.warm)))
    cpu, begin = cpu_of_all(), time.perf_counter()
    count = size * sum(map(look, islice(batches, figure.batches)))
    seconds, cpu = time.perf_counter() - begin, cpu_of_all() - cpu
    for number in range(1 + figure.warm + figure.batches, len(case.dataset) // size)[:2]:
        images, numbers = next(batches)
        expected = list(zip(*(case.dataset[int(index)] for index in numbers), strict=True))
        check((images, numbers), expected, 20 if "spdl.io" in line.label else 0)
        check(numbers, range(number * size, (number + 1) * size))
    return {**found, "value": count / seconds, "cpu": cpu / count * 1e3}


def streamed(figure: Figure, line: Line) -> Values:
    """Epochs of a stream, or a whole fit, with torch's loader or ours; see streams.py."""
    import streams

    stream, loader = line.label.rsplit(", ", 1)
    if stream == "Lightning":
        return streams.fit(loader, figure.batches)
    folder = FILES / "streams"
    folder.mkdir(exist_ok=True)
    return streams.epochs(stream, loader, 16 * figure.batches, folder)


# --- what is measured


def of_torch(name: str, needs: str) -> list[Line]:
    """The lines of both loaders, of which ours is compared with torch's; streams.py makes them."""
    ours = f"{name}, minloader.torch"
    return [Line(label, peers.ours, needs, (), ours) for label in (ours, f"{name}, torch")]


def photos(size: int, count: int) -> Photos:
    """So many samples of so many photos, which the first child makes."""
    folder = FILES / "photos"
    if not folder.exists():
        folder.mkdir()
        real_peers.make_photos(folder, count)
    return Photos(size, sorted(map(str, folder.iterdir())))


def needing(name: str, found: bool, *lines: Line) -> list[Line]:
    """The lines, which are not installed unless that is found."""
    return [line if found else line._replace(needs=name) for line in lines]


def has_ffmpeg() -> bool:
    """Whether a library is there that spdl.io needs, of FFmpeg 4 to 9."""
    for version in range(56, 62):
        with suppress(OSError):
            return bool(CDLL(f"libavutil.so.{version}"))
    return False


OURS = Line("minloader", peers.ours, "minloader")
SPDL_LOADER = "SPDL get_pytorch_dataloader"
STREAMS = {"plain": "torch", "webdataset, shuffled": "webdataset"} | dict.fromkeys(
    ("datasets, map", "datasets, streaming", "datasets, shuffle()"), "datasets"
)
"""Those of streams.py, and the package that each needs."""
CPU = Metric("cpu", "CPU of all, ms per image", ".2f", -1)
FIRST = Metric("first", "first batch, s", ".2f", -1)


def make_figures(quick: bool) -> dict[str, Figure]:
    """Cases by name."""
    large, warm, images = (1 << 20, 2, 4) if quick else (1 << 25, 6, 24)
    return {
        "arena": Figure(
            f"16 arrays of {large >> 20} MiB from a worker to the main process, spawned; CPU time "
            "and peak memory (RSS) are those of both",
            passes,
            [
                Metric("value", "GB/s", ".2f", 1),
                Metric("cpu", "CPU, s", ".3f", -1),
                Metric("memory", "memory, MB", ".0f", -1),
            ],
            [
                OURS,
                Line("SPDL, segment pool", real_peers.spdl_pool, "spdl"),
                Line("SPDL, ring buffer", real_peers.spdl_ring, "spdl"),
                Line("SPDL, without an arena", real_peers.spdl_queue, "spdl"),
                Line("torch tensors", peers.torch_tensors, "torch"),
            ],
            lambda: Case(Payloads(16, large), None, large, workers=1),
            *(16, 16, large / 1e9),
        ),
        "jpeg": Figure(
            "JPEG photos of 500 x 375, decoded by Pillow, cut to 224 x 224 and flipped at random, "
            "in batches of 32; 2 workers",
            decodes,
            [Metric("value", "images/s", ".0f", 1), CPU, FIRST],
            needing(
                "pillow",
                find_spec("PIL") is not None,
                OURS,
                Line("minloader, threads", real_peers.our_threads, "minloader"),
                Line("torch tensors, fork", peers.torch_alone, "torch", (FORK,)),
                Line(f"{SPDL_LOADER}, fork", real_peers.spdl_photos, "spdl", (FORK,)),
                Line("SPDL pipeline, threads", real_peers.spdl_threads, "spdl"),
                *needing(
                    "ffmpeg",
                    has_ffmpeg(),
                    Line("SPDL pipeline, threads, spdl.io", real_peers.spdl_threads_io, "spdl"),
                ),
            ),
            lambda: Case(photos(32 * (warm + images + 12), 10 if quick else 300), 32),
            *(images, warm),
        ),
        "streams": Figure(
            "Streams, 0.2 ms of processor time a sample, in batches of 16; 2 workers",
            streamed,
            [
                Metric("value", "a later epoch, s", ".2f", -1),
                Metric("first", "first epoch, s", ".2f", -1),
            ],
            [
                line
                for stream, needs in list(STREAMS.items())[: 2 if quick else None]
                for line in of_torch(stream, needs)
            ],
            lambda: Case(None),
            batches=20 if quick else 400,
        ),
        "fit": Figure(
            "A whole program that fits a small model for one epoch with Lightning; 2 workers",
            streamed,
            [Metric("value", "from start to end, s", ".2f", -1)],
            of_torch("Lightning", "lightning"),
            lambda: Case(None),
            batches=20 if quick else 200,
        ),
    }
