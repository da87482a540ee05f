"""Locks, values, queues and pipes of ``multiprocessing`` go along with each worker's start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, get_context
from typing import Any

import pytest
from conftest import dead_at_once, python, require, workers
from helpers import Echo
from sharing import KINDS, Made, Sharing, make

from minloader import Loader, TransportError

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")]


@pytest.fixture(params=[*SLOW, "fork"])
def method(request) -> Iterator[str]:
    """A way to start workers."""
    yield request.param
    if request.param == "forkserver":
        forkserver._forkserver._stop()  # it is the standard library's to keep


def test_each_kind_reaches_each_worker(method):
    """The first ones, those that replace a killed one, and more of them."""
    dataset = Sharing(method)
    with Loader(dataset, KINDS, num_workers=1, mp_context=method) as loader:
        for number, change in enumerate(["start", "", "kill", "", "resize", ""]):
            if change == "kill":
                os.kill(workers(loader)[0].pid, signal.SIGKILL)
            if change == "resize":
                loader.num_workers = 2
            expected = dataset.prepare(number)
            assert dict(zip(KINDS, loader, strict=True)) == expected, change
            dataset.check(number)
        assert loader.stats.errors.replaced >= 1
    dataset.close()


def test_wherever_they_are_they_are_the_same(method):
    context = get_context(method)
    lock, counter = context.Lock(), context.Value("i")
    condition = context.Condition(lock)

    def init(info: Any) -> None:
        with counter.get_lock():
            counter.value += 1

    def collate(samples: Any) -> Any:
        ((sample, seen),) = samples
        with condition:
            is_taken = not lock.acquire(False)
        return sample is lock, seen, is_taken

    options: Any = {"worker_init_fn": init, "collate_fn": collate, "mp_context": context}
    options |= {"transform": lambda sample: (sample, counter.value)}
    with Loader([lock], [[0]], num_workers=2, **options) as loader:
        loader.start()
        ((same, seen, taken),) = loader
        assert same
        assert taken
        assert seen in (1, 2)


def test_a_lock_of_another_context_is_refused_by_its_place():
    dataset = [0, {"counter": get_context("fork").Value("i")}]
    with pytest.raises(TypeError) as told:
        Loader(dataset, [0], num_workers=1, mp_context="spawn")
    assert "dataset[1]['counter'] is a Synchronized (A SemLock created in a" in str(told.value)
    advice = "make it with multiprocessing.get_context('spawn'), or start the workers by 'fork' too"
    assert str(told.value).endswith(advice)


def test_an_executor_of_the_users_is_given_none(foreign_processes):
    for kind in KINDS:
        shared = make(kind, "spawn")
        with pytest.raises(TypeError, match=r"only by the one that starts it\); use executor='pro"):
            Loader([shared], [0], executor=foreign_processes, num_workers=1)


def test_threads_and_this_process_share_them_anyway():
    dataset = Sharing("fork")
    for number, options in enumerate([{"num_workers": 0}, {"executor": "thread"}]):
        with Loader(dataset, KINDS, **options) as loader:
            expected = dataset.prepare(2 * number)
            assert dict(zip(KINDS, loader, strict=True)) == expected
            dataset.check(2 * number)
    dataset.close()


def test_no_batch_and_no_item_has_one():
    with Loader(Made(), KINDS, num_workers=1) as loader:
        batches = iter(loader)
        for _ in KINDS:
            with pytest.raises(TransportError, match=r"batch\['it'\].* is a .*return arrays"):
                next(batches)
    for kind in KINDS:
        shared = make(kind, "spawn")
        error = pytest.raises((TypeError, RuntimeError), match=r"pickle|inheritance")
        with Loader(Echo(), [shared], num_workers=1) as loader, error:
            next(iter(loader))


def test_more_than_a_pipe_takes(method, monkeypatch):
    """The start of a worker that is dead at once must not wait for it to read."""
    values = [get_context(method).Value("i", n) for n in range(1_000)]
    options: Any = {"transform": sum_of, "num_workers": 1, "mp_context": method}
    with (
        dead_at_once(monkeypatch, method, times=1) as killed,
        Loader([values], [0], **options) as loader,
    ):
        assert list(loader) == [499_500]
    assert len(killed) == (method != "fork")


def sum_of(values: Any) -> int:
    return sum(value.value for value in values)


def test_what_is_closed_cannot_be_given_to_the_next_worker():
    here, there = get_context("spawn").Pipe()
    with Loader([there], [0, 0, 0], transform=bool, num_workers=1) as loader:
        batches = iter(loader)
        assert next(batches)
        there.close()
        loader.num_workers = 2
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"cannot be started.*OSError: handle is closed"):
                list(loader)
        with pytest.raises(TypeError, match=r"dataset\[0\] is a Connection \(handle is closed\)"):
            Loader([there], [0], num_workers=1)
    here.close()


def test_what_a_ctypes_class_of_a_script_needs_is_said():
    program = """
import ctypes
from multiprocessing import get_context
from minloader import Loader
class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int)]
try:
    Loader([get_context("spawn").Value(Point)], [0], num_workers=1)
except TypeError as error:
    print(str(error).partition("; ")[2])
Loader([ctypes.c_int(3)], [0], num_workers=1).close()
"""
    assert run(program) == "define its ctypes class in a module, which workers import\n"


def test_in_a_script():
    """Without a guard. The barrier has a function of the script. No semaphore is left."""
    program = """
import os, signal
from multiprocessing import Manager, get_context
from minloader import Loader
context = get_context("spawn")
calls = context.Value("i")
def count():
    calls.value += 1
barrier = context.Barrier(1, action=count)
with Manager() as manager:
    seen = manager.list()
    died = context.Event()
    def wait(index):
        if index == 1 and not died.is_set():
            died.set()
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(index)
        return barrier.wait() + index
    with Loader(wait, range(4), num_workers=1) as loader:
        print(list(loader), died.is_set(), calls.value == len(seen), set(seen))
"""
    warning = "worker 0 (pid"
    assert run(program, warning) == "[0, 1, 2, 3] True True {0, 1, 2, 3}\n"


def run(program: str, warning: str = "") -> str:
    """Run a script, which says nothing but the warning; the system's tracker would complain."""
    done = python(program, options=["-X", "dev"], env={"PYTHONWARNINGS": "error"})
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if not warning or warning not in line] == []
    return done.stdout


@pytest.mark.parametrize("persistent", [False, True])
def test_the_usual_counter_of_epochs(persistent):
    """Workers that stay see it, too."""
    require("torch")
    from minloader.torch import DataLoader

    epoch = get_context("spawn").Value("i")
    options = {"num_workers": 1, "persistent_workers": persistent}
    with DataLoader(Counted(epoch), **options) as loader:
        seen = []
        for epoch.value in range(3):
            ((number, pid),) = loader
            seen.append((int(number), int(pid)))
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({pid for _, pid in seen}) == (1 if persistent else 3)


class Counted:
    def __init__(self, epoch: Any) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return [self.epoch.value, os.getpid()]
