"""Kills workers at random moments, and looks whether a single batch notices.

    python tests/chaos/run.py --kills 1000 --batches 20000 --seed 0 --workers 4
    python tests/chaos/run.py --starting --kills 200 --batches 200 --variant slots

A thread kills worker processes: idle ones, busy ones, some that are just starting, writing to
shared memory, or answering; one at a time or two at once; while epochs run, are left and begin
anew, and while loaders are closed. With ``--starting`` each is killed within START of its start,
maybe before it knows what it has to do. Every batch must be what ``num_workers=0`` makes of it, and
at the end nothing may be left: no process, not even a dead one that nobody has waited for, thread,
descriptor, file, nor memory.

The delays and victims are drawn from the seed; what the scheduler makes of them is not.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import itertools
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

import minloader
from minloader import Loader, get_worker_info
from minloader._inspect import inspect

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

SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGSEGV, signal.SIGTERM]

START = 0.4
"""Seconds after its start within which ``--starting`` kills a worker: it has hardly begun then."""

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
    """Processes that this one started, dead ones too, but for the standard library's tracker."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    pids = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += map(int, (task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    return [pid for pid in pids if pid != tracker]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in b"ZX"


def marked(mark: str) -> list[int]:
    """Programs that batches have started and that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid() and _runs(pid)]


class Killer(threading.Thread):
    """Kills workers of this process's loaders, in bursts, after each of which they must get on.

    Otherwise no worker would ever get ready, or a batch never finished.

    Args:
        kills: how many.
        seed: what delays and victims are drawn from.
        starting: whether only workers count that have just started.

    Attributes:
        loader: whose progress counts.
        kills: how many processes were killed.
        done: whether it has finished.
    """

    def __init__(self, kills: int, seed: int, starting: bool) -> None:
        super().__init__(name="killer", daemon=True)
        self.starting = starting
        self.random = random.Random(seed)
        self.wanted = kills
        self.kills = 0
        self.loader: Loader | None = None
        self.end = threading.Event()

    @property
    def done(self) -> bool:
        return self.kills >= self.wanted

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
        return loader is not None and inspect(loader).has_worked

    def kill(self, pids: list[int], victims: int = 1) -> int:
        """Kills some of these processes; returns how many."""
        killed = 0
        running = list(filter(_runs, pids))
        for pid in self.random.sample(running, min(victims, len(running))):
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
        self.kills += self.kill(new)


class Watch:
    """Knows how long the consumer had to wait, and what this process had at the start."""

    def __init__(self) -> None:
        resource_tracker.ensure_running()
        self.longest = 0.0
        self.memory: list[int] = []
        self.descriptors = self.count_descriptors()
        self.threads = threading.active_count()
        self.files = self.list_files()

    @staticmethod
    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    @staticmethod
    def list_files() -> set[str]:
        folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
        return {str(path) for folder in folders for path in folder.glob("minloader-*")}

    def sample(self) -> None:
        """Takes note of the memory in use."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * resource.getpagesize())

    def left(self, mark: str) -> dict[str, Any]:
        """What is left that was not there at the start."""
        gc.collect()
        found = {
            "children": children(),
            "programs": marked(mark),
            "descriptors": max(0, self.count_descriptors() - self.descriptors),
            "threads": threading.enumerate()[self.threads :],
            "files": sorted(self.list_files() - self.files),
        }
        return {what: value for what, value in found.items() if value}

    def growth(self) -> int:
        """Bytes by which memory grew from the second quarter of the run to the last."""
        quarter = len(self.memory) // 4
        if quarter < 2:
            return 0
        early, late = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return int(np.median(late) - np.median(early))


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def check(
    variant: str, kills: int, batches: int, seed: int, workers: int, starting: bool = False
) -> str:
    """Runs one variant; returns what there is to tell.

    Raises:
        AssertionError: a batch was wrong, or something was left.
    """
    options = dict(VARIANTS[variant])
    mark = f"{secrets.randbelow(10**9) + 10**9}.5"  # so many seconds does the program sleep
    work = Work(mark, *(options.pop(name) for name in ("size", "seconds") if name in options))
    length = EPOCH * (5 if variant == "chunks" else 1)
    source: tuple[Any, ...] = (Stream(work),) if variant == "stream" else (work, range(length))
    draw = random.Random(f"{variant} {seed}")
    watch, killer = Watch(), Killer(kills, seed, starting)
    made = retries = replaced = 0
    begin = time.monotonic()
    killer.start()
    # Until both are done: as many batches as wanted, or more, until so many workers are dead.
    for number in itertools.count():
        if made >= batches and killer.done:
            break
        settings: dict[str, Any] = {"seed": seed + number}
        with (
            Loader(*source, num_workers=workers, **settings) as plain,
            Loader(
                *source,
                **(settings | options),
                num_workers=workers,
                retries=1000,
                prefetch_factor=draw.choice([1, 2, 4]),
            ) as loader,
        ):
            plain.num_workers = 0  # a stream has its shards as they were before
            killer.loader = loader
            for _ in range(draw.randint(1, 3)):
                stop = length if draw.random() < 0.5 else draw.randrange(length)  # or left early
                ordered = variant != "unordered"
                made += compare(plain, loader, stop, watch, whole=stop == length, ordered=ordered)
            retries += loader.stats.retries
            replaced += loader.stats.replaced
            plain.close()
        killer.loader = None
        del plain, loader
        watch.sample()
    seconds = time.monotonic() - begin
    killer.end.set()
    killer.join()
    eventually(lambda: not watch.left(mark), 10)
    left = watch.left(mark)
    assert left == {}, left
    assert watch.growth() < 30e6, watch.memory
    return (
        f"{variant:9} {killer.kills:5} kills, {made:6} batches in {seconds:5.1f} s: "
        f"{retries} tried again, {replaced} workers replaced; the longest wait "
        f"{watch.longest:.1f} s; memory {watch.growth() / 1e6:+.1f} MB"
    )


def compare(
    plain: Loader, loader: Loader, stop: int, watch: Watch, *, whole: bool, ordered: bool
) -> int:
    """Compares the first batches of an epoch, or which they are, if they come in any order."""
    expected = (digest(batch) for batch in plain)
    got = _watched(iter(loader), watch)
    if ordered:
        for n, batch in enumerate(itertools.islice(got, stop)):
            assert digest(batch) == next(expected), f"batch {n} of epoch {loader.epoch - 1}"
        if whole:
            assert next(got, None) is None
        return stop
    some = [digest(batch) for batch in itertools.islice(got, stop)]
    assert len(some) == len(set(some)) == stop
    assert set(some) <= set(expected)
    return stop


def _watched(batches: Iterator[Any], watch: Watch) -> Iterator[Any]:
    while True:
        begin = time.monotonic()
        batch = next(batches, None)
        watch.longest = max(watch.longest, time.monotonic() - begin)
        if batch is None:
            return
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="of workers, in all")
    parser.add_argument("--batches", type=int, default=20_000, help="at least, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one")
    parser.add_argument("--starting", action="store_true", help="only workers that just start")
    parser.add_argument("--deadline", type=float, default=1200, help="seconds")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    variants = [arguments.variant] if arguments.variant else list(VARIANTS)
    shares = arguments.kills // len(variants), arguments.batches // len(variants)
    for variant in variants:
        options = arguments.seed, arguments.workers, arguments.starting
        print(check(variant, *shares, *options), flush=True)


if __name__ == "__main__":
    main()
    sys.exit()
