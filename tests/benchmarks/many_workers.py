"""The cases of many workers, whose batches wait rather than compute, and of many short epochs."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import peers
from harness import Figure, Line, Metric, Values, memory_of_workers, steady, timed
from peers import Case, Tiny

SECONDS = 0.02  # that a batch waits
LENGTH = 10  # batches in a short epoch


class Waiting(Tiny):
    """A batch waits, as for a disk or a network, and says who made it."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(SECONDS)
        return os.getpid(), index


def many_workers(figure: Figure, line: Line) -> Values:
    """The share of the ideal rate, and what it takes to get there."""
    case = replace(figure.case(), **dict(line.options))
    importlib.import_module(line.needs.lower())  # a program has done so long before
    seen: set[int] = set()
    begin = time.perf_counter()
    batches = iter(line.adapter(case))
    while len(seen) < case.workers:
        seen.add(next(batches)[0])
    start = time.perf_counter() - begin
    for _ in islice(batches, 2 * case.prefetch * case.workers):
        pass  # what was made while the last worker started
    ideal = SECONDS / case.workers
    figure = replace(figure, batches=case.workers * figure.batches, work=ideal)
    found = timed(figure, batches)
    return found | {"start": start, "memory": sum(memory_of_workers()) / case.workers}


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
        if start == "fork" or name == "minloader" or workers == 4  # torch takes minutes to spawn 64
    ]


def one_by_one(adapter: Callable[[Case], Iterable[Any]], case: Case) -> Iterator[None]:
    """Yields after each epoch."""
    loader = adapter(case)
    while True:
        for _ in loader:
            pass
        yield


def without_gap(case: Case) -> Iterator[None]:
    loader: Any = peers.ours(case)
    batches = loader.epochs()
    while True:
        for _ in islice(batches, LENGTH):
            pass
        yield


def make_figures(quick: bool) -> dict[str, Figure]:
    epochs, fork = (20 if quick else 1000), (("start", "fork"),)
    return {
        "many": Figure(
            f"A batch waits {SECONDS * 1000:.0f} ms; ideal is one batch per worker in that time",
            many_workers,
            [
                Metric("value", "share of the ideal rate", ".2f", 1),
                Metric("cpu", "CPU, ms per batch", ".3g", -1),
                Metric("start", "all have delivered, s", ".2f", -1),
                Metric("memory", "memory per worker, MB", ".1f", -1),
            ],
            waiting_lines(quick),
            lambda: Case(Waiting(1_000_000)),
            batches=5 if quick else 50,  # per worker
        ),
        "epochs": Figure(
            f"{epochs} epochs of {LENGTH} batches of 8 float32 and a label; 2 workers",
            *(
                steady,
                [Metric("value", "ms per epoch", ".2f", -1), Metric("cpu", "CPU, ms", ".3g")],
            ),
            [
                Line("minloader", partial(one_by_one, peers.ours), "minloader"),
                Line("minloader, epochs(n)", without_gap, "minloader"),
                Line("minloader.torch", partial(one_by_one, peers.ours_as_torch), "torch"),
                Line("torch numpy, fork", partial(one_by_one, peers.torch_numpy), "torch", fork),
            ],
            lambda: Case(Tiny(LENGTH)),
            *(epochs, 20, 1000),
        ),
    }
