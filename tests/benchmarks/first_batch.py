"""Time to the first batch, and the workers' memory, of a dataset that holds a large array.

    python tests/benchmarks/first_batch.py [--megabytes 400] [--workers 4] [--runs 5]

Compares, in turn and in one run, minloader with the bare design it grew from: the dataset
passed to a spawn ProcessPoolExecutor through ``initargs`` and kept in a global.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil

import minloader


class Rows:
    """Rows of 1,000 float64 numbers, 125 rows a megabyte; a batch is one row."""

    def __init__(self, megabytes: int) -> None:
        self.array = np.ones((megabytes * 125, 1000))

    def __getitem__(self, index: int) -> Any:
        return self.array[index] * 2


_dataset: Rows


def keep(dataset: Rows) -> None:
    """Initializer of the bare executor."""
    global _dataset
    _dataset = dataset


def fetch(index: int) -> Any:
    """Task of the bare executor."""
    return _dataset[index]


def pss_of_children() -> float:
    """Megabytes of all worker processes, shared pages divided among those that share them."""
    workers = [
        child
        for child in psutil.Process().children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    return float(sum(worker.memory_full_info().pss for worker in workers)) / 1e6


def bare(dataset: Rows, workers: int) -> tuple[float, float]:
    """Seconds to the first batch and megabytes, for the bare executor."""
    begin = time.perf_counter()
    context = get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=keep, initargs=(dataset,)
    ) as pool:
        futures = deque(pool.submit(fetch, index) for index in range(2 * workers))
        futures.popleft().result()
        seconds = time.perf_counter() - begin
        while futures:
            futures.popleft().result()
        return seconds, pss_of_children()


def ours(dataset: Rows, workers: int) -> tuple[float, float]:
    """Seconds to the first batch and megabytes, for minloader."""
    begin = time.perf_counter()
    with minloader.Loader(dataset, range(2 * workers), num_workers=workers) as loader:
        batches = iter(loader)
        next(batches)
        seconds = time.perf_counter() - begin
        for _ in batches:
            pass
        return seconds, pss_of_children()


def spread(values: list[float], form: str) -> str:
    """Median, and lowest to highest."""
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle:>8} ({low} to {high})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    dataset = Rows(options.megabytes)
    print(
        f"{options.megabytes} MB, {options.workers} workers, {options.runs} runs; Python "
        f"{platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} processors"
    )
    designs: dict[str, Callable[[Rows, int], tuple[float, float]]]
    designs = {"minloader": ours, "bare executor": bare}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in designs}
    for _ in range(options.runs):
        for name, design in designs.items():
            results[name].append(design(dataset, options.workers))
    for name, measured in results.items():
        seconds, memory = (list(column) for column in zip(*measured, strict=True))
        print(f"{name:14} first batch {spread(seconds, '.2f')} s, PSS {spread(memory, '.0f')} MB")
    pairs = list(zip(results["minloader"], results["bare executor"], strict=True))
    for index, what in enumerate(("first batch", "PSS")):
        ratios = [theirs[index] / our[index] for our, theirs in pairs]
        print(f"ratio bare / minloader, {what}: {spread(ratios, '.1f')}")


if __name__ == "__main__":
    main()
