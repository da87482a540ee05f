"""Threads that come between any two instructions of another, as they may without a global lock."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import eventually

import minloader
from minloader._memory import slot_writer
from minloader._memory.job_file import JobFile
from minloader._memory.slot_writer import NoSlot
from minloader._pools import foreign
from minloader._pools.base import PoolSettings
from minloader._pools.foreign import JobReference
from minloader._pools.threads import ThreadPool, _Thread
from minloader._worker.messages import Job, Task


def at_each_step(function: Any, call: Callable[[], object], meanwhile: Callable[[], object]) -> int:
    """Makes a call again and again, with something else before another instruction of a function.

    Args:
        function: whose instructions are counted, when the call runs it.
        call: what is called; the first time, the first instruction is waited for, and so on.
        meanwhile: what happens then, once in each call.

    Returns:
        How many instructions there were.
    """
    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether any frame wants to be told
    for step in itertools.count():
        left = step

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code is not function.__code__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left >= 0:
                return trace
            sys.settrace(None)
            meanwhile()
            return None

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(former)
        if left >= 0:
            return step
    raise AssertionError


class Writer(NoSlot):
    def before_fork(self) -> None:
        pass


@pytest.mark.parametrize("function", [slot_writer.empty, slot_writer._before_fork])
def test_a_task_ends_while_a_thread_of_the_dataset_uses_its_slot(function):
    def call() -> None:
        slot_writer.use(Writer())
        function(*[3] * (function is slot_writer.empty))

    try:
        assert at_each_step(function, call, lambda: slot_writer.use(None)) > 5
    finally:
        slot_writer.use(None)


# --- threads that make batches -----------------------------------------------------------------


class Stuck:
    """Pools whose thread takes too long with the first of two batches."""

    def __init__(self) -> None:
        self.pools: list[ThreadPool] = []
        self.released = threading.Event()

    def begin(self) -> None:
        """Makes a new pool, and waits until its thread is in the first batch."""
        self.released.set()
        self.released = released = threading.Event()
        entered = threading.Event()

        def batch(item: int) -> None:
            entered.set()
            released.wait()

        job = Job(batch, None, None, None)
        self.pool = ThreadPool(PoolSettings(1, 0, 0, 1), None, job, timeout=1e-9)
        self.pools.append(self.pool)
        self.future = self.pool.submit(Task(0, 0, [0, 1], id=1))
        entered.wait()

    def end(self) -> None:
        self.released.set()
        assert eventually(self.future.done)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.released.set()
    for pool in stuck.pools:
        pool.close()


def test_a_thread_goes_on_while_it_is_looked_at(stuck):
    """With its first batch it takes too long, with the next one it has only begun."""
    found = []

    def call() -> None:
        stuck.begin()
        stuck.pool._threads[0]._beat(1, 1, float("inf"))

    def look() -> None:
        stuck.pool.watch()
        found.extend(death.item for death in stuck.pool.deaths.values())

    assert at_each_step(_Thread._beat, call, look) > 5
    assert set(found) == {0}


def test_a_thread_ends_while_it_is_looked_at(stuck):
    """Its batch is delivered, or it took too long, never both."""

    def call() -> None:
        stuck.begin()
        stuck.pool.watch()
        late = stuck.future.exception() is not None
        assert (stuck.pool.replaced, len(stuck.pool.deaths)) == (late, late)

    assert at_each_step(ThreadPool._replace_if_late, call, stuck.end) > 50


def test_the_frames_of_a_running_thread_are_not_touched(stuck, monkeypatch):
    """Without a global lock that is a crash."""
    monkeypatch.delattr(sys, "_current_frames")
    stuck.begin()
    stuck.pool.watch()
    stack = stuck.pool.deaths[1].stack
    assert stack.startswith("Thread 0x")
    assert stack.count("Thread 0x") == 1
    assert re.search(rf'"{__file__}", line \d+ in batch\n', stack)


CONTEXT = """
import contextvars, threading
import numpy as np
from minloader import Loader, prefetch
from concurrent.futures import ThreadPoolExecutor

variable = contextvars.ContextVar("variable", default="nobody's")
variable.set("the consumer's")

def look(item):
    return np.geterr()["divide"], variable.get()

with np.errstate(divide="raise"), Loader(look, range(2), executor="thread") as loader:
    print(*set(loader))
    print(*set(prefetch(loader, look)))
    found = []
    thread = threading.Thread(target=lambda: found.append(look(0)))
    thread.start()
    thread.join()
    print(*found)
"""


@pytest.mark.parametrize("inherit", "01")
def test_a_batch_does_not_depend_on_the_context_of_the_consumer(inherit):
    """The function of prefetch is the consumer's: it has what Python gives any thread."""
    done = subprocess.run(
        [sys.executable, "-X", f"thread_inherit_context={inherit}", "-c", CONTEXT],
        env={**os.environ, "PYTHONPATH": str(Path(minloader.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    batches, prefetched, any_thread = done.stdout.splitlines()
    assert batches == str(("warn", "nobody's"))
    assert prefetched == any_thread
    inherits = inherit == "1" and sys.version_info >= (3, 14)
    assert any_thread == (str(("raise", "the consumer's")) if inherits else batches)


# --- jobs of loaders of other processes --------------------------------------------------------


@pytest.fixture
def reference(monkeypatch) -> Iterator[JobReference]:
    monkeypatch.setattr(foreign, "loaded_jobs", {})
    job_file = JobFile("here")
    told = 1, 0, foreign._versions()
    yield JobReference(job_file.address.token, *told, job_file.address, (), 0)
    job_file.close()


def test_a_loader_is_closed_while_its_job_is_looked_for(reference):
    def call() -> None:
        foreign.loaded_jobs.clear()
        assert foreign._find_job(reference).job == "here"

    assert at_each_step(foreign._find_job, call, lambda: foreign.loaded_jobs.clear()) > 50


def test_loaders_are_closed_while_former_jobs_are_looked_through(reference):
    class Former:
        """The connections of all end while this one is asked."""

        @property
        def may_be_needed(self) -> bool:
            foreign.loaded_jobs.clear()
            return False

    foreign.loaded_jobs.update({b"one": Former(), b"other": Former()})  # type: ignore[dict-item]
    assert foreign._find_job(reference).job == "here"
