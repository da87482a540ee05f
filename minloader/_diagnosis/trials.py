"""A trial: one loader that runs for a while, and how fast it was."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from minloader._diagnosis.inspect import inspect
from minloader._diagnosis.stats import Stats
from minloader._formats import format_bytes
from minloader._loader import Loader
from minloader._worker.long_start import LongStart
from minloader._worker.processor_time import ProcessorTime

logger = logging.getLogger("minloader")

LEAST = 20
"""Batches from which on a rate is one."""

STEADY = 0.03
"""Standard error, as a share of the rate, up to which two rates can be told apart."""

PATIENCE = 4
"""How many times as long as asked for a trial may run, until its rate is steady."""

HEAD = ["workers", "prefetch", "start", "batches/s", "MB/s", "wait", "busy", "memory", "first"]
"""The heads of the table's columns."""


@dataclass
class Row:
    """One setting, and how fast it was.

    Attributes:
        num_workers: the setting.
        prefetch_factor: the setting.
        start_method: how worker processes were started; "" where there are none of ours.
        batches: number of batches that were counted.
        rate: batches a second.
        is_steady: whether these are enough, and alike enough, to compare the rate with another.
        byte_rate: bytes a second.
        wait: share of the time that the consumer waited, 0 to 1.
        busy: share of the time that a worker was busy, on average; None without workers.
        memory: bytes of memory that all workers have for themselves; 0 without worker processes,
            or where it is not known.
        first: seconds to the first batch, with the start of the workers.
    """

    num_workers: int
    prefetch_factor: int
    start_method: str
    batches: int
    rate: float
    is_steady: bool
    byte_rate: float
    wait: float
    busy: float | None
    memory: int
    first: float

    @property
    def rate_text(self) -> str:
        """The rate in about three digits."""
        return f"{self.rate:,.{2 if self.rate < 10 else 1 if self.rate < 100 else 0}f}"

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        return [
            str(self.num_workers),
            str(self.prefetch_factor) if self.num_workers else "-",
            self.start_method or "-",
            self.rate_text if self.is_steady else f"~{self.rate_text}",
            f"{self.byte_rate / 1e6:,.1f}" if self.byte_rate else "-",
            f"{self.wait:.0%}",
            "-" if self.busy is None else f"{self.busy:.0%}",
            format_bytes(self.memory) if self.memory else "-",
            f"{self.first:.2f} s",
        ]


class Trial(NamedTuple):
    """What was seen of one loader.

    Attributes:
        row: the rates.
        stats: the loader's, of the time that was counted.
        used_up: whether the sampler is an iterator, which has served its one epoch.
    """

    row: Row
    stats: Stats
    used_up: bool


def run(loader: Loader, seconds: float, step: float) -> Trial:
    """Run a loader for a while, which the caller closes. Rates are of the last two thirds.

    Where a sampler is used up before those, they are of all.

    Args:
        loader: the loader to run.
        seconds: how long, from the first batch on; PATIENCE times as long where it takes that
            until the rate is steady.
        step: seconds to sleep after each batch.

    Raises:
        ValueError: an epoch has no batches.
        Exception: the loader raised it.
    """
    view = inspect(loader)
    view.group.plugins += [ProcessorTime(), LongStart()]
    begin = 0.0
    before = Stats()
    looks: list[tuple[float, int]] = []
    for count in _batches(loader, step):
        now = time.perf_counter()
        begin = begin or now
        if now < begin + seconds / 3 or (looks and now < looks[-1][0] + seconds / 40):
            continue
        before = before if looks else loader.stats
        looks.append((now, count))
        if now >= begin + (seconds if is_steady(looks) else PATIENCE * seconds):
            break
    after = loader.stats
    if after.batches == before.batches:  # it was used up at the first look: all of it then
        before = Stats()
    stats = after.since(before)
    for worker, grown in stats.memory.growth.items():
        logger.warning(
            "%s grows steadily, by %s so far: the dataset keeps something, or a cache is still "
            "being filled; worker_memory_limit replaces workers that grow too large",
            worker,
            format_bytes(grown),
        )
    workers = loader.num_workers
    window = max(stats.seconds, 1e-9)
    row = Row(
        num_workers=workers,
        prefetch_factor=view.group.prefetch_factor,
        start_method=view.start_method if workers else "",
        batches=stats.batches,
        rate=stats.batches / window,
        is_steady=is_steady(looks),
        byte_rate=stats.bytes_per_second,
        wait=stats.time.wait / window,
        busy=sum(stats.busy.values()) / workers if workers else None,
        memory=sum(stats.memory.workers.values()),
        first=after.time.startup,
    )
    return Trial(row, stats, view.sampler_used_up)


def _batches(loader: Loader, step: float) -> Iterator[int]:
    """Yield how many batches there were, after each, for as long as the sampler has any."""
    view = inspect(loader)
    counts = itertools.count(1)
    while not view.sampler_used_up:
        count = 0
        for _ in loader:  # no variable holds a batch
            count = next(counts)
            yield count
            if step:
                time.sleep(step)
        if not count:
            raise ValueError(f"the loader has no batches in epoch {loader.epoch - 1}")


def is_steady(looks: list[tuple[float, int]]) -> bool:
    """Return whether the rate can be compared with another."""
    if len(looks) < 5 or looks[-1][1] - looks[0][1] < LEAST:
        return False
    cuts = [looks[n * (len(looks) - 1) // 4] for n in range(5)]
    rates = [(n - m) / (end - begin) for (begin, m), (end, n) in itertools.pairwise(cuts)]
    return statistics.stdev(rates) / 2 <= STEADY * statistics.fmean(rates)
