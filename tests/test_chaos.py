"""Kills workers at random moments, and looks whether a single batch notices.

A thread kills worker processes: idle ones, busy ones, some that are just starting, writing to
shared memory, or answering; one at a time or two at once; while epochs run, are left and begin
anew, and while loaders are closed. Every batch must be what ``num_workers=0`` makes of it, and at
the end nothing may be left. The delays and victims are drawn from the seed; what the scheduler
makes of them is not. More of it in each case, at will::

    CHAOS="150 kills, 3000 batches, seed 7" pytest --timeout=0 -m slow tests/test_chaos.py
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import itertools
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import parent_process, resource_tracker
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import alive, eventually, has_worked

import minloader
from minloader import Loader, get_worker_info

VARIANTS: dict[str, dict[str, Any]] = {
    "slots": {"size": 60_000},  # up to 480 kB a batch
    "chunks": {"size": 3, "seconds": 0.0},
    "pipe": {"size": 30_000, "shared_memory": False},
    "unordered": {"size": 8_000, "in_order": False},
    "fork": {"size": 8_000, "mp_context": "fork"},
    "spawn": {"size": 8_000, "mp_context": "spawn"},
    "stream": {"size": 3_000, "seconds": 0.0005},  # what was delivered is passed over again
}
"""What loaders are run with; ``size`` is the mean number of float64 in a batch, ``seconds`` the
mean time that one takes besides."""

KILLS, BATCHES, SEED = map(int, re.findall(r"\d+", os.environ.get("CHAOS", "10, 300, 1")))
SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGSEGV, signal.SIGTERM]

START = 0.4
"""Seconds after its start within which a worker is killed that has hardly begun."""

EPOCH = 400
"""Batches of an epoch; chunks need more, to grow."""


class Work:
    """Batches of random data, of random size; some start programs, which they never end.

    Args:
        mark: by which the programs are known.
        size: mean number of values.
        seconds: mean time that a batch takes besides.
    """

    def __init__(self, mark: str, size: int, seconds: float = 0.01) -> None:
        self.mark, self.size, self.seconds = mark, size, seconds

    def __getitem__(self, item: int) -> Any:
        info = get_worker_info()
        assert info is not None
        size = int(info.rng.integers(1, 2 * self.size))
        duration = 2 * self.seconds * info.rng.random()
        working = parent_process() is not None
        if working and duration:
            threading.Event().wait(duration)
        if working and item % 100 == 50:
            quiet = {"stdin": subprocess.DEVNULL, "start_new_session": item % 200 == 50}
            subprocess.Popen(["sleep", self.mark], **quiet)  # type: ignore[call-overload]
        if item % 2:
            array = info.rng.random(size)
        else:  # born in shared memory, and written in pieces
            array = minloader.empty(size)
            for start in range(0, size, 10_000):
                array[start : start + 10_000] = info.rng.random(len(array[start : start + 10_000]))
        return {"item": item, "array": array, "random": random.random(), "text": str(item) * 10}


class Stream:
    """The same batches, read one after the other."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for item in range(info.id, EPOCH, info.num_workers):
            yield self.work[item]


def digest(batch: Any) -> str:
    """A batch in short."""
    parts = batch["item"], batch["random"], batch["text"]
    return hashlib.blake2b(repr(parts).encode() + batch["array"].tobytes()).hexdigest()


def children() -> list[int]:
    """Processes that this one started and that live, but for the standard library's tracker."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = [each.pid for each in psutil.Process().children()]
    return [pid for pid in found if pid != tracker and alive(pid)]


class Killer(threading.Thread):
    """Kills workers of this process's loaders, in bursts, after each of which they must get on.

    Otherwise no worker would ever get ready, or a batch never finished.

    Args:
        starting: whether only workers count that have just started.

    Attributes:
        loader: whose progress counts.
        kills: how many processes were killed.
        done: whether it has finished.
    """

    def __init__(self, starting: bool) -> None:
        super().__init__(name="killer", daemon=True)
        self.starting = starting
        self.random = random.Random(SEED)
        self.kills = 0
        self.loader: Loader | None = None
        self.end = threading.Event()

    @property
    def done(self) -> bool:
        return self.kills >= KILLS

    def run(self) -> None:
        # A burst must stay below the 8 failed starts in a row that are an error; two go each time.
        bursts = [1, 1, 2] if self.starting else [1, 1, 1, 2, 3]
        while not self.done:
            for _ in range(self.random.choice(bursts)):
                if self.end.wait(self.delay()) or self.done:
                    return
                if self.starting:
                    self.kill_starting()
                else:
                    self.kills += self.kill(children(), self.random.choice([1, 1, 1, 2]))
            while not self.worked() and not self.end.wait(0.005):
                pass

    def delay(self) -> float:
        """Short ones hit workers that are starting, none at all the executor while it breaks."""
        return self.random.choice([0.0, self.random.random() * 0.05, self.random.random() * 0.3])

    def worked(self) -> bool:
        """Whether a batch was made since the last death; nobody is there to make one at times."""
        loader = self.loader
        return loader is not None and has_worked(loader)

    def kill(self, pids: list[int], victims: int = 1) -> int:
        """Kills some of these processes; returns how many."""
        killed = 0
        for pid in self.random.sample(pids, min(victims, len(pids))):
            with suppress(ProcessLookupError):
                os.kill(pid, self.random.choice(SIGNALS))
                killed += 1
        return killed

    def kill_starting(self) -> None:
        """Kills a worker that has just started; another one before, if it must, to have it so."""
        before = children()
        self.kill(before)
        new: list[int] = []
        while not new and not self.end.wait(0.0005):
            new = [pid for pid in children() if pid not in before]
        self.end.wait(self.random.choice([0.0, self.random.random() * START]))
        self.kills += self.kill(list(filter(alive, new)))


@pytest.fixture(autouse=True)
def quiet_crashes() -> Iterator[None]:
    """No core file is written, and a fork that crashes shows no stack."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    faulthandler.disable()
    yield
    faulthandler.enable(sys.__stderr__)
    resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "starting"),
    [*((variant, False) for variant in VARIANTS), ("spawn", True), ("fork", True)],
)
def test_killed_workers_change_nothing(variant, starting):
    options = dict(VARIANTS[variant])
    mark = f"{secrets.randbelow(10**9) + 10**9}.5"  # so many seconds does the program sleep
    work = Work(mark, *(options.pop(name) for name in ("size", "seconds") if name in options))
    length = EPOCH * (5 if variant == "chunks" else 1)
    source: tuple[Any, ...] = (Stream(work),) if variant == "stream" else (work, range(length))
    draw = random.Random(f"{variant} {SEED}")
    killer, memory = Killer(starting), []
    made = replaced = 0
    killer.start()
    # Until both are done: as many batches as wanted, or more, until so many workers are dead.
    for number in itertools.count():
        if made >= BATCHES and killer.done:
            break
        settings: dict[str, Any] = {"seed": SEED + number, "num_workers": 2}
        options["prefetch_factor"] = draw.choice([1, 2, 4])
        with (
            Loader(*source, **settings) as plain,
            Loader(*source, **(settings | options), retries=1000) as loader,
        ):
            plain.num_workers = 0  # a stream has its shards as they were before
            killer.loader = loader
            for _ in range(draw.randint(1, 3)):
                stop = length if draw.random() < 0.5 else draw.randrange(length)  # or left early
                compare(plain, loader, stop, whole=stop == length, ordered=variant != "unordered")
                made += stop
            replaced += loader.stats.errors.replaced
        killer.loader = None
        del plain, loader
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    killer.end.set()
    killer.join()
    assert replaced >= 1
    programs = [each.pid for each in psutil.process_iter() if mark in " ".join(command_of(each))]
    assert eventually(lambda: not any(map(alive, programs))), programs
    quarter = len(memory) // 4
    if quarter >= 2:
        assert np.median(memory[-quarter:]) - np.median(memory[quarter : 2 * quarter]) < 30e6


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def compare(plain: Loader, loader: Loader, stop: int, *, whole: bool, ordered: bool) -> None:
    """Compares the first batches of an epoch, or which they are, if they come in any order."""
    expected, got = map(digest, plain), map(digest, loader)
    if not ordered:
        some = list(itertools.islice(got, stop))
        assert len(some) == len(set(some)) == stop
        assert set(some) <= set(expected)
        return
    for n, batch in enumerate(itertools.islice(got, stop)):
        assert batch == next(expected), f"batch {n} of epoch {loader.epoch - 1}"
    if whole:
        assert next(got, None) is None
