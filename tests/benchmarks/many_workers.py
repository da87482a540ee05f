"""The cases of many workers, whose batches wait rather than compute, and of many short epochs."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from operator import itemgetter
from typing import Any

import peers
from harness import Figure, Line, Metric, Values, checker, drain, memory_of_workers, timed
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
    figure = replace(figure, batches=case.workers * figure.batches, work=SECONDS / case.workers)
    return timed(figure, batches) | {
        "start": start,
        "memory": sum(memory_of_workers()) / case.workers,
    }


def short_epochs(figure: Figure, line: Line) -> Values:
    """Epochs, once the workers are warm."""
    case = figure.case_of(line)
    epochs: Iterator[Any] = iter(line.adapter(case))
    drain(map(checker(line, case.whole()), next(epochs)))
    drain(map(drain, islice(epochs, figure.warm)))
    return timed(figure, map(drain, epochs))


def one_by_one(adapter: Callable[[Case], Iterable[Any]], case: Case) -> Iterator[Any]:
    """Yields a loader for each epoch."""
    loader = adapter(case)
    while True:
        yield loader


def without_gap(case: Case) -> Iterator[Any]:
    """Yields an iterator for each epoch."""
    loader: Any = peers.ours(case)
    batches = map(itemgetter(1), loader.epochs())
    while True:
        yield islice(batches, LENGTH)


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
            short_epochs,
            [Metric("value", "ms per epoch", ".2f", -1), Metric("cpu", "CPU, ms", ".3g")],
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
