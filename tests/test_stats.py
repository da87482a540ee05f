"""Where the time went: counters, the verdict on set-ups slow in one place, the timeline."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minloader import SKIP, Loader, concurrent
from minloader._diagnosis.figures import Jump, Timeline
from minloader._diagnosis.inspect import inspect
from minloader._diagnosis.page import table
from minloader._diagnosis.stats import Stats, WorkerMemory
from minloader._epochs.counters import Event, Look
from minloader._worker import lifetimes, processor_time
from tests.conftest import WAYS, eventually, variants
from tests.helpers import Deadly, Squares, stats_of

pytestmark = pytest.mark.usefixtures("quick_starts")

SLOW = 0.02
"""Seconds that the slow part of a set-up takes for each batch; all else takes far less."""


def sleepy(value):
    time.sleep(SLOW)
    return value


class Sleepy:
    """Takes its time for each sample."""

    def __init__(self, n=40, seconds=SLOW):
        self.n, self.seconds = n, seconds

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index


class Uneven(Sleepy):
    """Every 16th takes long."""

    def __getitem__(self, index):
        time.sleep(0.3 if index % 16 == 0 else 0.001)
        return index


class SlowToPack:
    def __reduce__(self):
        time.sleep(SLOW)
        return str, ("packed",)


class SlowToUnpack:
    def __reduce__(self):
        return sleepy, ("unpacked",)


def pack_slowly(index):
    return SlowToPack()


def unpack_slowly(index):
    return SlowToUnpack()


LARGE = partial(np.full, 2_000_000, dtype=np.uint8)


def start_slowly(info):
    time.sleep(0.5)


class SlowItems:
    def __iter__(self):
        for index in range(40):
            time.sleep(SLOW)
            yield index


def run(loader, step=0.0):
    """One epoch of a consumer that takes so many seconds a batch."""
    for _ in loader:
        if step:
            time.sleep(step)
    return loader.stats


# --- counters


def test_what_is_counted_and_how_it_is_shown(make):
    with make(Squares(20), batch_size=3, on_error="skip") as loader:
        assert loader.stats.verdict == "no batch has been delivered yet"
        assert str(loader.stats)
        assert loader.stats.events == ()
        for _ in range(2):
            for _ in loader:
                time.sleep(0.001)
        stats = loader.stats
    assert stats.batches == 14
    assert (
        stats.errors.skipped
        == stats.errors.retries
        == stats.errors.replaced
        == stats.memory.overflowed
        == 0
    )
    assert stats.time.consumer >= 14 * 0.001
    assert 0 < stats.time.startup <= stats.time.wait
    assert stats.seconds == stats.time.wait + stats.time.consumer
    for part in (stats.time.sampler, stats.time.dataset, stats.time.collate, stats.time.unpacking):
        assert part > 0
    assert stats.time.transform == 0
    assert (stats.bytes > 0) == ("process" in make.name)
    assert all(0 < share <= 1 for share in stats.busy.values())
    assert stats.workers.in_flight == 0
    workers = {"inline": 1, "thread": 3, "process-1": 1, "process-2": 2}.get(make.name, 2)
    assert 1 <= len(stats.busy) <= workers
    kinds = {"inline": "inline", "foreign-process": "foreign"}
    assert stats.workers.executor == kinds.get(
        make.name, "thread" if "thread" in make.name else "process"
    )

    table = str(stats)
    for name in ("batches", "consumer waited", "sampler", "dataset", "collate", "transport"):
        assert f"\n{name} " in table
    assert "busy " in table
    assert max(map(len, table.splitlines()[1:])) <= 100
    assert repr(stats) == table

    figures = stats.as_dict()
    assert all(type(value) in (int, float) for value in figures.values())
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in figures)
    assert (figures["batches"], figures["errors_failed"]) == (14, 0)
    assert figures["bytes_per_second"] == pytest.approx(stats.bytes / stats.seconds)
    assert (stats.bytes_per_second > 0) == ("process" in make.name)
    for name in ("busy", "median", "p95"):
        (value, *_) = getattr(stats, name).values()
        assert value in [figures[each] for each in figures if each.startswith(f"{name}_")]


def test_what_was_done_is_in_the_figures_the_timeline_and_the_trace(make, tmp_path):
    """What a worker spends on transform and collate is not the dataset's."""
    path = tmp_path / "run.json"

    def slow_transform(value):
        time.sleep(2 * SLOW)
        return value

    def slow_collate(values):
        time.sleep(3 * SLOW)
        return values

    def in_order():
        """Whether no other program had the machine in between."""
        options = {"transform": slow_transform, "collate_fn": slow_collate}
        begin = time.perf_counter()
        with make(Sleepy(6), [[0], [1], [2]], **options) as loader, loader.trace(path):
            stats = run(loader)
        check_figures(stats)
        check_timeline(stats, begin, time.perf_counter())
        check_trace(path, stats.events)
        return stats.time.dataset < stats.time.transform < stats.time.collate

    assert eventually(in_order)


def check_figures(stats):
    assert stats.time.dataset >= 3 * SLOW
    assert stats.time.transform >= 3 * 2 * SLOW
    assert stats.time.collate >= 3 * 3 * SLOW
    assert stats.slowest >= 6 * SLOW
    # Memory is told of our processes only.
    assert set(stats.memory.workers) == set(stats.memory.at_start)
    ours = {f"worker {n}" for n in range(3)} if stats.workers.executor == "process" else set()
    assert set(stats.memory.workers) <= ours


def check_timeline(stats, begin, end):
    events = stats.events
    check_tracks(events)
    assert all(begin <= each.start <= each.start + each.seconds <= end for each in events)
    tasks = [event for event in events if event.name == "task"]
    assert sorted(task.args["batch"] for task in tasks) == [0, 1, 2]
    assert {task.args["epoch"] for task in tasks} == {0}
    assert {event.track for event in tasks} <= {
        *("worker 0", "worker 1", "worker 2"),
        *(name for name in stats.busy if name.startswith("process ")),
    }
    for part in ("dataset", "transform", "collate"):
        assert len([event for event in events if event.name == part]) == 3
    draws = sum(event.args["count"] for event in events if event.name == "draw")
    assert draws == 3
    waits = sum(event.seconds for event in events if event.name == "wait")
    assert waits == pytest.approx(stats.time.wait - stats.time.unpacking)


def check_tracks(events: list[Event]) -> None:
    """In each track but the consumer's (whose waits have the draws in them), one after another."""
    tracks: dict[str, list[Event]] = {}
    for event in events:
        if event.name == "task" or event.track == "sampler":
            tracks.setdefault(event.track, []).append(event)
    for track in tracks.values():
        for before, after in itertools.pairwise(sorted(track, key=lambda event: event.start)):
            assert before.start + before.seconds <= after.start + 1e-6


def check_trace(path, events):
    """It is what Chrome reads."""
    entries = read_trace(path)
    assert [entry["name"] for entry in entries] == [event.name for event in events]
    assert {entry["track"] for entry in entries} == {event.track for event in events}
    for entry, event in zip(entries, events, strict=True):
        assert entry["ts"] == pytest.approx(event.start * 1e6)
        if event.seconds:
            assert (entry["ph"], entry["dur"]) == ("X", pytest.approx(event.seconds * 1e6))


def read_trace(path):
    entries = json.loads(Path(path).read_text())
    tracks = {
        each["tid"]: each["args"]["name"] for each in entries if each["name"] == "thread_name"
    }
    return [each | {"track": tracks[each["tid"]]} for each in entries if each["ph"] != "M"]


def test_streams_are_counted():
    class Stream:
        def __iter__(self):
            return (sleepy(n) for n in range(4))

    for options in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}):
        with Loader(Stream(), batch_size=2, transform=sleepy, **options) as loader:
            stats = run(loader)
        shards = max(1, options["num_workers"])
        assert stats.batches == 2 * shards
        assert stats.time.dataset >= 4 * shards * SLOW
        assert stats.time.transform >= 4 * shards * SLOW
        assert stats.time.unpacking < stats.time.wait / 2


def test_every_moment_of_the_loop_is_waiting_or_the_consumers_own(make):
    """Within 2 % of the wall clock, as soon as a busy machine does nothing in between."""
    with make(Sleepy(30, 0.002), range(30)) as loader:

        def missing():
            before = loader.stats.seconds
            begin = time.perf_counter()
            for epoch, _ in loader.epochs(2):
                assert epoch >= 0
                time.sleep(0.001)
            wall = time.perf_counter() - begin
            share = 1 - (loader.stats.seconds - before) / wall
            assert share >= 0  # no moment is counted twice
            return share

        assert eventually(lambda: missing() < 0.02)


@variants("way", WAYS)
def test_what_is_between_epochs_is_nobodys(way):
    with Loader(Squares(4), range(4), **WAYS[way]) as loader:
        for _ in loader:
            break
        time.sleep(1)
        assert len(list(loader)) == 4
        time.sleep(1)
        list(loader)
        assert loader.stats.time.consumer < 1


def test_work_before_the_first_next_is_no_start_of_workers():
    with Loader(range(40), num_workers=1) as loader:
        batches = iter(loader)
        assert eventually(lambda: any(each.is_ready for each in inspect(loader).workers))
        time.sleep(0.5)  # its own work
        list(batches)
        stats = loader.stats
    assert stats.time.startup <= stats.time.wait
    assert "-" not in stats.verdict


def test_the_verdict_and_the_table_use_one_clock():
    loop = {"time_wait": 4.0, "time_consumer": 1.0, "time_startup": 3.0}
    stats = stats_of(batches=100, workers_count=2, **loop)
    assert "the consumer waited 50 % of the time" in stats.verdict
    rows = {name: (value, remark) for name, value, remark in table(stats)}
    assert rows["consumer waited"] == ("4 s", "50 %, without the 3 s until workers were ready")
    assert rows["consumer's own time"] == ("1 s", "50 %")


@pytest.mark.parametrize("started", [False, True])
def test_starting_earlier_is_no_advice_for_who_does(started):
    with Loader(range(40), num_workers=1) as loader:
        if started:
            loader.start()
        stats = loader.stats
    stats.batches = 1
    stats.time.wait = 9.0
    stats.time.startup = 9.0
    assert ("; loader.start() begins earlier" in stats.verdict) is not started


def test_failures_are_counted(make):
    def fail(index):
        if index % 2:
            raise ValueError(index)
        return index

    with make(fail, range(10), on_error=lambda error: SKIP) as loader:
        assert list(loader) == [0, 2, 4, 6, 8]
        stats = loader.stats
    assert (stats.batches, stats.errors.skipped) == (5, 5)
    failed = [event for event in stats.events if event.name == "failed"]
    assert [event.args["batch"] for event in failed] == [1, 3, 5, 7, 9]
    assert failed[0].args["error"] == "ValueError: 1"


def test_tasks_in_flight():
    options = {"executor": "thread", "num_workers": 2, "prefetch_factor": 3}
    with Loader(Sleepy(), range(40), **options) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader.stats.workers.in_flight == 6
        del iterator
        assert loader.stats.workers.in_flight == 0


# --- the verdict

BUSY = "all 2 workers were busy"
IDLE = "workers were idle"

SETUPS = {
    # name: what the loader is made of, its options beside two workers, what is to be said
    "dataset": ((Sleepy(),), {}, ["the dataset is the limit", BUSY]),
    "packing": (
        (pack_slowly, range(40)),
        {},
        ["packing batches is the limit", "minloader.empty"],
    ),
    "unpacking": (
        (unpack_slowly, range(40)),
        {},
        ["unpickling a batch takes", "return arrays"],
    ),
    "sampler": (
        (range(40), SlowItems()),
        {},
        ["the sampler is the limit: it takes 2", "ms a batch", IDLE],
    ),
    "consumer": (
        (Sleepy(seconds=0.001),),
        {"num_workers": 3},
        ["the consumer is the limit", IDLE, "num_workers=1 would do"],
    ),
    "pipe": ((LARGE, range(60)), {"shared_memory": 100_000}, ["shared_memory would help", "pipe"]),
    "uneven": ((Uneven(64),), {}, ["some batches are slow", "prefetch_factor", "in_order=False"]),
    "tiny": ((range(30_000),), {}, ["a batch takes", "µs", "larger batches", "batch_size"]),
    "start": (
        (range(20),),
        {"worker_init_fn": start_slowly},
        ["the first batch took", "loader.start()"],
    ),
}
STEPS = {"consumer": SLOW, "uneven": 0.002}
"""Seconds a batch of the consumer, where it takes any."""


@variants("name", SETUPS, quick=3)
def test_the_verdict_names_the_bottleneck(name):
    """In one of some tries, where other programs may have the machine in between."""
    args, options, said = SETUPS[name]
    texts = []

    def is_said():
        with Loader(*args, **({"num_workers": 2} | options)) as loader:
            if name != "start":  # on a busy machine that may be all there is to say
                loader.start()
                eventually(lambda: all(worker.is_ready for worker in inspect(loader).workers))
            for _ in range(1 if name in ("start", "sampler") else 2):
                stats = run(loader, STEPS.get(name, 0.0))
        texts.append(str(stats))
        assert stats.verdict in texts[-1]
        return all(part in stats.verdict for part in said)

    # It cannot be seen where other programs have the machine for all this time.
    assert eventually(is_said, 180) or "waiting for a processor" in texts[-1], texts[-1]


FIGURES: dict[str, Any] = {
    "batches": 100,
    "time_wait": 1.0,
    "workers_count": 2,
    "workers_computing": 0.01,
    "workers_queued": 0.05,
}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"time_sampler": 0.9}, "the sampler is the limit: it takes 9 ms a batch"),
        ({"time_consumer": 99.0}, "the consumer is the limit: it waited 1 % of the time"),
        (
            {"time_dataset": 0.4, "memory_overflowed": 50},
            "through the pipe, so more shared_memory would help",
        ),
        ({"time_transform": 1.9}, "transform is the limit, with 100 % of the work"),
        ({"time_collate": 1.9}, "collate_fn is the limit, with 100 % of the work"),
        ({"time_dataset": 0.9, "workers_count": 1}, "the worker was busy 90 %"),
        ({"time_dataset": 0.9, "workers_count": 0}, "num_workers=1 makes batches meanwhile"),
        (
            {"time_sampler": 0.9, "workers_count": 0},
            "it takes 9 ms a batch; the consumer waited 100 % of the time",
        ),
        (
            {"time_dataset": 0.2, "time_transport": 0.9, "bytes": 2_000_000_000},
            "batches of 20 MB go through a pipe: without shared_memory=False they would not",
        ),
        ({"time_dataset": 0.2, "bytes": 2_000_000_000}, "batches of 20 MB go through a pipe: with"),
        ({"time_dataset": 1.9, "bytes": 2_000_000_000}, "the dataset is the limit, with 100 %"),
        (
            {"time_dataset": 0.2, "workers_executor": "foreign"},
            "a batch comes each 10 ms, and 2 ms of work are in it: to hand it over costs the rest",
        ),
        (
            {"time_dataset": 1.9, "workers_count": 1, "workers_computing": 0, "workers_queued": 0},
            "or minloader.concurrent(dataset), which waits for several samples at once",
        ),
        (
            {"time_dataset": 0.2, "errors_replaced": 3},
            "3 workers had to be replaced, which takes time",
        ),
    ],
)
def test_the_verdict_on_figures(figures, said):
    stats = stats_of(**FIGURES | figures)
    assert said in stats.verdict
    assert stats.workers.count or "idle" not in stats.verdict


@pytest.mark.parametrize("in_order", [True, False])
def test_the_verdict_advises_nothing_that_is_set_already(in_order):
    stats = stats_of(**FIGURES, time_dataset=0.2, workers_in_order=in_order)
    slow = Event("worker 0", "task", 0.0, 0.5, {"count": 1})
    stats.timeline = Timeline(events=(slow,), began=0.0, taken_at=1.0)
    assert "so a larger prefetch_factor" in stats.verdict
    assert ("in_order=False" in stats.verdict) == in_order


# --- what the workers did in their time


def burn(seconds):
    """Take so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measuring(*args, **options):
    """A loader whose workers measure how they spend their time."""
    loader = Loader(*args, **options)
    inspect(loader).group.plugins.append(processor_time.ProcessorTime())
    return loader


BURN = "import time\nwhile time.process_time() < 0.1: pass"


class Burning:
    """0.1 s of processor time for each sample: here, or in programs that end."""

    def __init__(self, where):
        self.where = where

    def __getitem__(self, index):
        if self.where == "here":
            burn(0.1)
        else:
            subprocess.run([sys.executable, "-c", BURN], check=True)
        return index


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "ended"])
def test_what_programs_compute_counts_as_computing(where):
    with measuring(Burning(where), range(10), num_workers=1) as loader:
        stats = run(loader)
    assert stats.workers.computing >= 0.5  # of 1 s: all but that of the last samples
    assert "\ncomputing " in str(stats)


@pytest.mark.slow
def test_waiting_for_a_processor_is_not_waiting_for_files():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        with measuring(Burning("here"), range(12), num_workers=2) as loader:
            stats = run(loader)
    finally:
        os.sched_setaffinity(0, before)
    workers = stats.workers
    assert workers.queued > max(0.2 * workers.computing, 2 * workers.asleep), str(stats)
    with measuring(Sleepy(seconds=0.2), num_workers=2) as loader:
        stats = run(loader)
    workers = stats.workers
    assert workers.asleep > 2 * (workers.computing + workers.queued), str(stats)


@pytest.mark.slow
def test_what_comes_before_the_first_batch_is_not_computed_for_it():
    init = lambda info: burn(1.0)  # noqa: E731
    with measuring(Sleepy(5), num_workers=1, worker_init_fn=init) as loader:
        assert run(loader).workers.computing < 1.0


@pytest.mark.parametrize("make", [Loader, measuring])
def test_processor_time_is_measured_for_who_asks(make):
    """As the doctor does."""
    with make(Sleepy(3), num_workers=1) as loader:
        stats = run(loader)
    assert bool(stats.workers.measured) == ("computing" in str(stats)) == (make is measuring)
    assert bool(stats.memory.workers)


def test_threads_are_not_told_apart():
    with Loader(Sleepy(3), num_workers=2, executor="thread") as loader:
        stats = run(loader)
    assert stats.workers.computing == stats.workers.queued == stats.workers.asleep == 0
    assert "computing" not in str(stats)


def test_what_a_meter_tells(monkeypatch):
    second = 10**9
    ticks: list[float] = []
    threads: dict[str, tuple[int, int]] = {}

    def set_to(times: list[float], **spent: tuple[float, float]) -> None:
        """Times: of user and system, and those of children that ended. Threads: seconds of each."""
        ticks[:] = [*times, 0.0]
        for name, (ran, waited) in spent.items():
            threads[name] = int(ran * second), int(waited * second)

    monkeypatch.setattr("os.times", lambda: ticks)
    monkeypatch.setattr(processor_time, "thread_times", lambda: dict(threads))
    set_to([9, 0, 0, 0], main=(9, 1))
    meter = processor_time.CpuMeter()
    set_to([10, 0, 0, 0], main=(10, 2))
    assert meter.measure(100) == (1, 1, 98)

    # A child has ended, with three seconds. How long it waited nobody knows: as long as we did.
    set_to([11, 0, 2, 1], main=(11, 3))
    assert meter.measure(100) == (4, 4, 92)

    # It cannot have waited longer than it took.
    set_to([11, 0, 92, 1], main=(11.1, 4))
    assert meter.measure(100) == (90, 10, 0)

    # Two threads at once.
    set_to([151, 0, 92, 1], main=(81.1, 44), other=(70, 40))
    assert meter.measure(100) == (140, 80, 0)


def test_where_there_are_no_such_files(monkeypatch, tmp_path):
    times = processor_time.thread_times
    assert times(str(tmp_path / "none")) == {}
    (tmp_path / "1").mkdir()  # a thread that has just ended
    assert times(str(tmp_path)) == {}
    monkeypatch.setattr(processor_time, "thread_times", partial(times, str(tmp_path)))
    assert processor_time.CpuMeter().measure(100) is None


def test_what_no_descriptor_is_left_for_is_not_told():
    """And it is no error of the batch: a dataset may have opened all that a process may have."""
    meter = processor_time.CpuMeter()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        told = meter.measure(100)
        lifetimes.kill_descendants()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert told is None


BUSY_WORKERS: dict[str, Any] = {
    "batches": 100,
    "time_wait": 1.0,
    "time_dataset": 1.96,
    "workers_count": 2,
}
LOOP = "the limit, with 100 % of the work: all 2 workers were busy 98 %, the consumer waited 100 %"


def spent(computing: float, queued: float, asleep: float, **others: int) -> dict[str, Any]:
    """What the workers did in their time, as figures of stats."""
    figures = {"computing": computing, "queued": queued, "asleep": asleep, **others}
    return {f"workers_{name}": value for name, value in figures.items()}


def foreign(tasks: int) -> dict[str, Any]:
    """Figures of two threads of a cluster, and of so many tasks under way."""
    worked = {"process 1, thread 1": 0.98, "process 1, thread 2": 0.98}
    return {"workers_count": tasks, "workers_executor": "foreign", "workers_seconds": worked}


@pytest.mark.parametrize(
    ("figures", "cpus", "said"),
    [
        ({}, 8, f"the dataset is {LOOP} of the time; more workers would help (num_workers)"),
        ({}, 2, "there are 2 processors; if it waits for files or the network, more"),
        (spent(1.9, 0.05, 0.05), 2, "make it cheaper: there are 2 processors, which it keeps busy"),
        (spent(0.9, 1.0, 0.1), 1, "make it cheaper: there is one processor, which it keeps busy"),
        (
            spent(1.0, 0.9, 0.1),
            2,
            "45 % of the work was waiting for a processor, which the consumer or other programs "
            "have",
        ),
        (
            spent(0.1, 0.1, 1.8),
            2,
            "90 % of the work was waiting for files, the network or a lock: more workers help "
            "(num_workers), or minloader.concurrent(dataset), which waits for several samples at "
            "once, unless it is a lock",
        ),
        (spent(1.2, 0.1, 0.7), 8, "more workers would help (num_workers)"),
        (spent(7.5, 0.1, 0.0), 8, "make it cheaper: there are 8 processors, which it keeps busy"),
        (spent(1.2, 0.2, 0.6), 2, "make it cheaper: there are 2 processors"),
        (
            spent(0.1, 0.0, 1.8, concurrency=3),
            2,
            "a larger limit of minloader.concurrent would help (3 now)",
        ),
        (spent(1.8, 0.0, 0.1, concurrency=3), 2, "make it cheaper: there are 2 processors"),
        (foreign(8), 2, f"{LOOP} of the time; more workers of"),
        (foreign(2), 2, "more workers would help (num_workers), if the executor has them"),
    ],
)
def test_the_advice_depends_on_who_works_where(monkeypatch, figures, cpus, said):
    """Of a cluster those threads count that have made batches, where there are more tasks."""
    monkeypatch.setattr("minloader._diagnosis.verdict.processors", lambda: cpus)
    assert said in stats_of(**BUSY_WORKERS | figures).verdict


def test_processors_that_the_process_may_not_use(monkeypatch):
    monkeypatch.setattr("minloader._diagnosis.verdict.processors", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for figures in (spent(1.9, 0.05, 0.05), spent(1.0, 0.9, 0.1), spent(1.2, 0.2, 0.6)):
        told = stats_of(**BUSY_WORKERS | figures).verdict
        assert "; the machine has 64, of which this process may use 2 (its CPU affinity" in told
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert "the machine has" not in stats_of(**BUSY_WORKERS | spent(1.9, 0.05, 0.05)).verdict


@pytest.mark.parametrize(
    ("queued", "cpus", "said"),
    [
        (0.2, 2, "other workers, the consumer or other programs have: num_workers=2 would do"),
        (0.2, 4, "40 % of the work was waiting for a processor, which the consumer"),
        (0.1, 2, "some batches are slow"),
    ],
)
def test_idle_workers_that_wait_for_a_processor(monkeypatch, queued, cpus, said):
    monkeypatch.setattr("minloader._diagnosis.verdict.processors", lambda: cpus)
    slow = Event("worker 0", "task", 0.0, 0.1, {"count": 1})
    stats = stats_of(
        batches=100,
        time_wait=1.0,
        time_dataset=0.5,
        workers_count=4,
        timeline=Timeline(events=(slow,)),
        **spent(0.5 - queued, queued, 0.0),
    )
    assert "but the workers were idle 88 %" in stats.verdict
    assert said in stats.verdict


def test_shared_memory_is_what_is_used_and_the_limit_apart():
    """While tasks are under way, each of which may take a part of the limit."""
    with Loader(partial(np.full, 16_000), range(50), num_workers=2, shared_memory=10**9) as loader:
        for _ in loader:
            stats = loader.stats
            assert stats.memory.slot_bytes <= stats.memory.slots * 2**20
            assert stats.memory.slot_limit == 10**9
    assert re.search(r"^shared memory .* slots, 1 GB at most$", str(stats), re.M), str(stats)


# --- the timeline


def test_a_trace_of_a_part(tmp_path):
    with Loader(Squares(6), num_workers=2) as loader:
        list(loader)
        with loader.trace(tmp_path / "part.json"):
            list(loader)
            with pytest.raises(RuntimeError, match=r"part\.json already"):
                loader.trace(tmp_path / "other.json").__enter__()
        list(loader)
        with pytest.raises(ZeroDivisionError), loader.trace(tmp_path / "failed.json"):
            1 / 0  # noqa: B018
    tasks = [e for e in read_trace(tmp_path / "part.json") if e["name"] == "task"]
    assert {task["args"]["epoch"] for task in tasks} == {1}
    assert sum(task["args"]["count"] for task in tasks) == 6
    assert read_trace(tmp_path / "failed.json") == []
    assert not (tmp_path / "other.json").exists()
    with pytest.raises(RuntimeError, match="closed"), loader.trace(tmp_path / "late.json"):
        pass


@pytest.mark.parametrize(
    ("trace", "error", "message"),
    [
        ("nowhere/run.json", FileNotFoundError, "No such file"),
        (".", IsADirectoryError, "Is a directory"),
        (True, TypeError, "trace must be the path of a file to write, got True"),
        (1, TypeError, "trace must be the path of a file to write, got 1"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused_at_once(
    monkeypatch, tmp_path, trace, error, message
):
    monkeypatch.chdir(tmp_path)
    refused = pytest.raises(error, match=message)
    with Loader(Squares(), num_workers=0) as loader, refused, loader.trace(trace):
        pass


def test_a_trace_without_with_is_told(tmp_path):
    with Loader(Squares(6), num_workers=0) as loader:
        with pytest.warns(
            RuntimeWarning, match=r"nothing was written to .*run\.json: write `with lo"
        ):
            loader.trace(tmp_path / "run.json")
        assert len(list(loader)) == 6


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    with (
        caplog.at_level(logging.WARNING, "minloader"),
        Loader(Squares(6), num_workers=0) as loader,
        loader.trace("/dev/full"),
    ):
        assert list(loader) == [0, 1, 4, 9, 16, 25]
    assert "the trace /dev/full ends here" in caplog.text


def test_a_killed_program_leaves_a_trace_up_to_then(tmp_path):
    script = """
import os, sys
from minloader import Loader
with Loader(lambda n: n, range(10), num_workers=1) as loader, loader.trace(sys.argv[1]):
    for n in loader:
        if n == 5:
            os.kill(os.getpid(), 9)
"""
    path = tmp_path / "run.json"
    subprocess.run([sys.executable, "-c", script, path], timeout=250)
    path.write_text(path.read_text() + "]")
    assert {entry["name"] for entry in read_trace(path)} >= {"wait", "draw", "task"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_writes_nothing_into_the_trace(tmp_path):
    path = tmp_path / "run.json"
    with Loader(Squares(3), num_workers=0) as loader, loader.trace(path):
        list(loader)
        pid = os.fork()
        if pid == 0:
            list(loader)
            loader.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        list(loader)
    epochs = [e["args"]["epoch"] for e in read_trace(path) if e["name"] == "task"]
    assert epochs == [0, 0, 0, 1, 1, 1]


def test_deaths_and_what_is_sent_again_are_in_the_timeline(tmp_path):
    with Loader(Deadly({3}, str(tmp_path)), range(8), num_workers=2) as loader:
        assert list(loader) == list(range(8))
        stats = loader.stats
    died = [event for event in stats.events if event.name == "died"]
    assert [(event.args["batch"], event.track[:7]) for event in died] == [(3, "worker ")]
    assert "signal 9" in died[0].args["cause"] or "SIGKILL" in died[0].args["cause"]
    again = [event.args["batch"] for event in stats.events if event.name == "again"]
    assert 3 in again
    assert stats.errors.retries == 1
    assert eventually(lambda: loader.stats.errors.replaced == 1)


# --- the time of a batch, memory, and figures for a logger


def task(worker: str, start: float, seconds: float, count: int = 1) -> Event:
    return Event(worker, "task", start, seconds, {"count": count})


def test_the_times_of_a_batch_are_of_the_last_minutes():
    records = [task("worker 0", 1000.0 + n, 0.01 * n) for n in range(1, 101)]
    records += [task("worker 1", 1100.0, 0.8, count=4), task("worker 1", 0.0, 50.0)]
    stats = Stats(timeline=Timeline(events=tuple(records), taken_at=1110.0))
    assert stats.median == pytest.approx({"worker 0": 0.5, "worker 1": 0.2})
    assert stats.p95 == pytest.approx({"worker 0": 0.95, "worker 1": 0.2})
    assert stats.slowest == pytest.approx(1.0)
    assert Stats().slowest == 0.0


def test_a_share_of_the_batches_is_no_more_than_that():
    for count, median, p95 in (1, 1, 1), (2, 1, 2), (3, 2, 3), (20, 10, 19), (100, 50, 95):
        events = tuple(task("worker 0", 1.0, float(n + 1)) for n in range(count))
        stats = Stats(timeline=Timeline(events))
        assert (stats.median, stats.p95) == ({"worker 0": median}, {"worker 0": p95})


def test_figures_of_the_time_between_two_copies():
    def fail(index):
        if index == 3:
            raise ValueError(index)
        return index

    with Loader(fail, range(5), num_workers=0, on_error="skip") as loader:
        list(loader)
        before = loader.stats
        assert before.since(before).batches == 0
        list(loader)
        stats = loader.stats.since(before)
    assert (stats.batches, stats.errors.skipped, stats.errors.failed) == (4, 1, 1)
    assert [epoch for epoch, *_ in stats.errors.last] == [1]
    assert 0 < stats.time.dataset < loader.stats.time.dataset
    assert stats.workers.count == 0
    assert {event.args["epoch"] for event in stats.events if event.name == "task"} == {1}
    first, second = [Jump("worker 0", 1 << 26, 0, batch, "item") for batch in range(2)]
    before, stats = stats_of(memory_jumps=(first,)), stats_of(memory_jumps=(first, second))
    assert stats.since(before).memory.jumps == (second,)


def test_the_verdict_is_of_the_time_since_num_workers_was_set():
    with Loader(Sleepy(4), num_workers=0) as loader:
        list(loader)
        assert "the dataset is the limit" in loader.stats.verdict
        loader.num_workers = 1
        assert loader.stats.verdict == "no batch has been delivered yet"
        loader.num_workers = 0
        list(loader)
        stats = loader.stats
    assert stats.verdict.startswith("since num_workers=0 was set, the dataset is the limit")
    assert stats.batches == 8


class Keeping:
    """Keeps 1 MB of each sample, for a while, which takes 30 ms: longer than a look at memory."""

    def __init__(self, most):
        self.kept, self.most = [], most

    def __getitem__(self, index):
        time.sleep(0.03)
        if len(self.kept) < self.most:
            self.kept.append(np.ones(1 << 20, np.uint8))
        return index


def test_memory_that_grows_is_told():
    with Loader(Keeping(1000), [*range(1000)], num_workers=1) as loader:
        for _ in loader:
            if loader.stats.memory.growth:
                break
        stats = loader.stats
    assert stats.memory.growth["worker 0"] > 16 << 20
    assert stats.memory.workers["worker 0"] > stats.memory.at_start["worker 0"] + (16 << 20)
    assert "worker 0 grows steadily" in str(stats)
    assert stats.as_dict()["memory_growth_worker_0"] == stats.memory.growth["worker 0"]


class KeepsOne(Sleepy):
    """Of one sample it keeps 80 MB, and of all others nothing."""

    def __getitem__(self, index):
        if index == 13:
            self.kept = np.ones(80_000_000, np.uint8)
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [{}, {"worker_memory_limit": 1 << 40}])
def test_the_sample_by_which_a_worker_grew_is_told(options):
    with Loader(KeepsOne(20, 0.03), num_workers=1, **options) as loader:
        stats = run(loader)
    (jump,) = stats.memory.jumps
    assert (jump.worker, jump.epoch, jump.item) == ("worker 0", 0, str(jump.batch))
    assert jump.batch == 13 if options else jump.batch >= 13  # else it is looked at now and then
    assert jump.bytes > 75_000_000
    assert re.search(
        r"\ngrew at once +8\d MB +worker 0, at 1\d \(batch 1\d of epoch 0\)", str(stats)
    )
    assert "memory_jumps" not in stats.as_dict()


def test_with_a_memory_limit_each_batch_is_a_task():
    """Or the worker would look behind several, and the last one be taken for what leaks."""
    with Loader(range(2000), num_workers=1, worker_memory_limit=1 << 40) as loader:
        assert run(loader).workers.chunk_size == 1


def look(pid, memory, at_start):
    return Look("worker 0", pid, memory, at_start, epoch=0, batch=0, item="")


def growth(sizes, pid=7):
    """What is told of a worker with so many megabytes, observation by observation."""
    worker = WorkerMemory()
    for size in sizes:
        worker.note(look(pid, memory=round(size * 1e6), at_start=1))
    return worker.growth


def test_growth_is_told_from_what_goes_up_and_down():
    rng = random.Random(0)
    n = range(1023)
    assert growth(100 + i for i in n) > 300e6
    assert growth(100 + i + rng.gauss(0, 20) for i in n) > 300e6
    assert growth(100 for i in n) == 0
    assert growth(100 + 0.01 * i for i in n) == 0  # little
    assert growth(100 + min(i, 100) for i in n) == 0  # a cache
    assert growth(100 + 1000 * (1 - 0.99**i) for i in n) == 0  # one that fills slowly
    assert growth(100 + 1000 * (i > 300) for i in n) == 0  # once
    assert sum(growth(rng.uniform(0, 1000) for _ in n) > 0 for _ in range(100)) == 0


def test_a_worker_that_takes_the_place_of_another_begins_anew():
    worker = WorkerMemory()
    for pid in (7, 8):
        for n in range(14):
            memory = 10**9 + n * 10**8
            worker.note(look(pid, memory=memory, at_start=pid))
    assert (worker.memory, worker.at_start, worker.growth) == (memory, 8, 0)


def test_a_worker_that_leaves_beside_the_next_one_does_not_grow_again():
    worker = WorkerMemory()
    grown = [
        worker.note(look(pid, memory=10**9 if pid == 7 else 1, at_start=1)) for pid in (7, 8, 7, 8)
    ]
    assert grown == [10**9 - 1, 0, 0, 0]
    assert worker.memory == 1


# --- the verdict knows where batches are made


def test_reads_at_the_same_time_are_known():
    with Loader(concurrent(Sleepy(4), limit=3), batch_size=2, num_workers=0) as loader:
        assert loader.stats.workers.concurrency == 3


@pytest.mark.parametrize(("gil", "said"), [(True, True), (False, False)])
def test_processes_are_the_advice_where_there_is_a_gil(monkeypatch, gil, said):
    monkeypatch.setattr("minloader._diagnosis.verdict.has_gil", lambda: gil)
    stats = stats_of(**BUSY_WORKERS, workers_executor="thread")
    assert ("executor='process' would help" in stats.verdict) == said


def test_the_threads_of_an_executor_are_counted():
    def is_said():
        with (
            ThreadPoolExecutor(2) as executor,
            Loader(Sleepy(40), executor=executor, num_workers=8) as loader,
        ):
            stats = run(loader)
        texts.append(str(stats))
        assert len(stats.busy) <= 2
        return BUSY in stats.verdict

    texts: list[str] = []
    assert eventually(is_said), texts[-1]
