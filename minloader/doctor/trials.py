"""A trial: one loader that runs for a while, and what its processes used meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from minloader._checks import amount
from minloader._insight.counters import Stats
from minloader._inspect import inspect
from minloader._loader import Loader
from minloader._memory.limits import private_memory, words

SAMPLES = 40
"""How often a trial looks at its processes: often enough for a trend, in 1 % of its time."""

HEAD = ["workers", "prefetch", "batches/s", "+-", "MB/s", "wait", "busy", "memory", "first"]
"""The heads of the table's columns."""


@dataclasses.dataclass
class Row:
    """One setting, and how fast it was.

    Attributes:
        num_workers: the setting.
        prefetch_factor: the setting.
        batches: number of batches that were counted.
        rate: batches a second.
        noise: standard error of the rate, as a share of it.
        byte_rate: bytes a second.
        wait: share of the time that the consumer waited, 0 to 1.
        busy: share of the time that a worker was busy, on average; None without workers.
        memory: bytes of memory of all workers, with shared memory counted once (PSS); None
            without worker processes, or where it is not known.
        first: seconds to the first batch, with the start of the workers.
    """

    num_workers: int
    prefetch_factor: int
    batches: int
    rate: float
    noise: float
    byte_rate: float
    wait: float
    busy: float | None
    memory: int | None
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
            self.rate_text,
            f"{self.noise:.0%}",
            f"{self.byte_rate / 1e6:,.1f}" if self.byte_rate else "-",
            f"{self.wait:.0%}",
            "-" if self.busy is None else f"{self.busy:.0%}",
            "-" if self.memory is None else amount(self.memory),
            f"{self.first:.2f} s",
        ]


class Usage(NamedTuple):
    """What a process used at one moment.

    Attributes:
        memory: bytes of memory that it shares with no other process.
        descriptors: open file descriptors.
        threads: its threads.
        children: processes that it started and did not wait for, running or not.
    """

    memory: int
    descriptors: int
    threads: int
    children: int


def _usage(pid: int) -> Usage | None:
    """Return what a process uses now; None where there is no /proc, or the process is gone."""
    proc = f"/proc/{pid}"
    try:
        threads = os.listdir(f"{proc}/task")
        descriptors = len(os.listdir(f"{proc}/fd"))
    except OSError:
        return None
    # A kernel without CONFIG_PROC_CHILDREN has no such file: then no children are seen.
    children = sum(len(words(f"{proc}/task/{each}", "children")) for each in threads)
    return Usage(private_memory(pid), descriptors, len(threads), children)


def _all_memory(pid: int) -> int | None:
    """Return a process's memory in bytes, with its share of what others map too (PSS).

    The kernel goes through all pages for that, so it is read once a trial.
    """
    found = words(f"/proc/{pid}", "smaps_rollup")
    return int(found[found.index("Pss:") + 1]) * 1024 if "Pss:" in found else None


class Sample(NamedTuple):
    """One observation of a running trial.

    Attributes:
        at: seconds of the clock.
        batches: how many had been delivered.
        usages: what each process used, by its pid.
    """

    at: float
    batches: int
    usages: dict[int, Usage]


class Trial:
    """Runs one loader for a while. Rates are counted after the first third of the time.

    Args:
        loader: the loader to run; the caller closes it.
        seconds: how long to run, from the first batch on.
        step: seconds to sleep after each batch.

    Attributes:
        row: the rates.
        stats: the loader's, of the time that was counted.
        inspection: the view into the loader.
        names: what to call each process, by its pid.
        samples: all observations, in order.
        first_epoch: number of batches of the first epoch; 0 until that is over.
    """

    row: Row
    stats: Stats

    def __init__(self, loader: Loader, seconds: float, step: float) -> None:
        self._loader = loader
        self._seconds = seconds
        self._step = step
        self._before: Stats | None = None  # when counting began
        self._first = 0  # index of the sample then
        self.inspection = inspect(loader)
        self.names = {os.getpid(): "this process"}
        self.samples: list[Sample] = []
        self.first_epoch = 0

    def run(self) -> Iterator[None]:
        """Run the loader, and yield now and then.

        Raises:
            ValueError: an epoch has no batches.
            Exception: the loader raised it.
        """
        count, due, end = 0, 0.0, 0.0
        while not self.inspection.sampler_used_up:
            epoch_began = count
            for count, _ in enumerate(self._loader, epoch_began + 1):
                now = time.perf_counter()
                end = end or now + self._seconds
                if now >= due:
                    due = now + self._seconds / SAMPLES
                    self._look(now, count, end)
                    yield
                    if now >= end and count > self.samples[self._first].batches:
                        return
                if self._step:
                    time.sleep(self._step)
            if count == epoch_began:
                raise ValueError(
                    f"the loader has no batches in epoch {self._loader.epoch - 1}: look at its "
                    "sampler, and at the length of its dataset"
                )
            self.first_epoch = self.first_epoch or count
        self._look(time.perf_counter(), count, end)

    def _look(self, now: float, count: int, end: float) -> None:
        self.names.update((each.pid, f"worker {each.number}") for each in self.inspection.workers)
        usages = ((pid, _usage(pid)) for pid in self.names)
        self.samples.append(Sample(now, count, {pid: usage for pid, usage in usages if usage}))
        if self._before is None and now >= end - self._seconds * 2 / 3:
            self._before, self._first = self._loader.stats, len(self.samples) - 1

    def conclude(self) -> None:
        """Work out the rates when the trial has run, before the loader is closed."""
        samples, after = self.samples[self._first :], self._loader.stats
        first, last = samples[0], samples[-1]
        count, window = last.batches - first.batches, last.at - first.at
        if count == 0:  # there is no batch but the first
            count, window = 1, after.startup
        workers = self._loader.num_workers
        pids = last.usages.keys() - {os.getpid()}
        memory = [size for size in map(_all_memory, pids) if size is not None]
        self.stats = stats = _between(self._before or Stats(), after)
        packing = stats.transport - stats.unpacking
        work = stats.dataset + stats.transform + stats.collate + packing
        self.row = Row(
            num_workers=workers,
            prefetch_factor=self.inspection.prefetch_factor,
            batches=count,
            rate=count / window,
            noise=_noise(samples),
            byte_rate=stats.bytes / window,
            wait=min(1.0, stats.wait / window),
            busy=min(1.0, work / window / workers) if workers else None,
            memory=sum(memory) if memory else None,
            first=after.startup,
        )


SUMS = (
    *("batches", "bytes", "overflowed", "wait", "consumer", "sampler", "unpacking"),
    *("dataset", "transform", "collate", "transport", "computing", "queued", "asleep"),
)
"""The stats that only grow, and on which a verdict depends."""


def _between(before: Stats, after: Stats) -> Stats:
    """Return the stats of the time between two, as if the loader had been made at the first."""
    grown = {name: getattr(after, name) - getattr(before, name) for name in SUMS}
    return dataclasses.replace(after, startup=0.0, **grown)


def _noise(samples: list[Sample]) -> float:
    """Return the standard error of the rate, as a share of it."""
    if len(samples) < 5:
        return 1 / max(1, samples[-1].batches - samples[0].batches)
    cuts = [samples[n * (len(samples) - 1) // 4] for n in range(5)]
    rates = [(b.batches - a.batches) / (b.at - a.at) for a, b in itertools.pairwise(cuts)]
    return statistics.stdev(rates) / statistics.fmean(rates) / 2
