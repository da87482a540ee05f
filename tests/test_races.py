"""Threads that come between any two instructions of another, as they may without a global lock."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from conftest import eventually, have_come, in_a_fork, in_threads, printed_by
from helpers import Numbers
from interrupts import OURS, at_each_step

from minloader import BatchSampler, Loader, get_worker_info
from minloader._diagnosis.inspect import inspect
from minloader._diagnosis.trace import Trace
from minloader._epochs.counters import Counters
from minloader._epochs.course import Course
from minloader._epochs.feed import SamplerFeed
from minloader._epochs.lane import Lane
from minloader._foreign import worker as foreign
from minloader._foreign.worker import JobReference
from minloader._memory import forks, slot_writer, slots
from minloader._memory.job_file import JobFile
from minloader._memory.slot_writer import NoSlot
from minloader._pools import environment, log_reader, processes, threads
from minloader._pools.base import close_pools
from minloader._pools.group import PoolGroup
from minloader._pools.threads import ThreadPool
from minloader._pools.ticket import Bell
from minloader._worker import seeds
from minloader._worker.import_hook import forget, when_imported
from minloader._worker.messages import Job, TaskMessage, WorkerInfo
from minloader._worker.seeds import batch_seed


class Writer(NoSlot):
    def before_fork(self) -> None:
        pass


@pytest.mark.parametrize("function", [slot_writer.empty, slot_writer.before_fork])
def test_a_task_ends_while_a_thread_of_the_dataset_uses_its_slot(function):
    def call() -> None:
        slot_writer.use(Writer())
        function(*[3] * (function is slot_writer.empty))

    try:
        assert at_each_step(function, call, lambda: slot_writer.use(None)) > 5
    finally:
        slot_writer.use(None)


def test_an_epoch_begins_while_a_state_is_taken():
    """The state is of before or after that: it leads to the same batches."""

    def make() -> Loader:
        sampler = BatchSampler(5, 2, shuffle=True, last_batch="rollover")
        return Loader(tuple, sampler, num_workers=0)

    kept: list[Any] = []
    states: list[Any] = []

    def prepare() -> None:
        kept[:] = [make()]
        list(kept[0])

    def call() -> None:
        states.append(kept[0].state_dict())

    assert at_each_step(Course, call, lambda: kept.append(iter(kept[0])), prepare) > 50
    with make() as loader:
        _, *expected = [list(loader) for _ in range(3)]
    for state in states:
        with make() as loader:
            loader.load_state_dict(state)
            assert [list(loader) for _ in range(2)] == expected


def test_two_iterators_let_go_of_the_same_workers():
    """As each does when its next epoch begins, also after a resize."""
    loaders: list[Loader] = []

    def prepare() -> None:
        for each in loaders:
            each.close()
        loaders[:] = [Loader(Numbers(8), num_workers=2, executor="thread")]
        loaders[0].num_workers = 1

    def tidy() -> None:
        inspect(loaders[0]).group.tidy()

    assert at_each_step(PoolGroup, tidy, tidy, prepare) > 10
    loaders[0].close()


def test_a_batch_that_comes_while_others_are_sent_is_not_waited_for(monkeypatch):
    wait = Bell.wait
    may = threading.Event()
    kept: list[Any] = []

    def come() -> None:
        if not may.is_set():
            may.set()
            assert eventually(lambda: have_come(kept[1]))

    def watched(bell: Any) -> None:
        come()
        assert have_come(kept[1]), "it is here already"
        wait(bell)

    def prepare() -> None:
        for loader in kept[:1]:
            loader.close()
        may.clear()
        loader = Loader(lambda n: may.wait() and n, [7], num_workers=1, executor="thread")
        kept[:] = [loader, iter(loader)]

    def call() -> None:
        assert next(kept[1]) == 7

    monkeypatch.setattr(Bell, "wait", watched)
    try:
        assert at_each_step(f"{OURS}/_epochs", call, come, prepare, stride=19) > 50
    finally:
        kept[0].close()


# --- threads that make batches -----------------------------------------------------------------


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
def test_a_thread_worker_has_the_context_of_the_consumer(inherit):
    """So has the function of prefetch, whatever Python gives any thread."""
    said = printed_by(CONTEXT, options=["-X", f"thread_inherit_context={inherit}"])
    batches, prefetched, any_thread = said.splitlines()
    assert batches == str(("raise", "the consumer's"))
    assert prefetched == batches
    inherits = inherit == "1" and sys.version_info >= (3, 14)
    assert any_thread == (batches if inherits else str(("warn", "nobody's")))


# --- jobs of loaders of other processes --------------------------------------------------------


@pytest.fixture
def reference(monkeypatch) -> Iterator[JobReference]:
    monkeypatch.setattr(foreign, "loaded_jobs", {})
    job_file = JobFile("here")
    yield JobReference(
        mark=job_file.mark,
        num_workers=1,
        seed=0,
        versions=foreign.versions(),
        address=job_file.address,
        may_be_remote=False,
    )
    job_file.close()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_loader_is_closed_while_its_job_is_looked_for(loaded, reference):
    def call() -> None:
        assert foreign.find_job(reference).job == "here"

    clear = foreign.loaded_jobs.clear
    assert at_each_step(foreign.find_job, call, clear, call if loaded else clear) > 10


def test_a_job_is_let_go_while_others_are_looked_through(reference, monkeypatch):
    class Former:
        """The others end while this one is asked."""

        @property
        def may_be_needed(self) -> bool:
            foreign.loaded_jobs.clear()
            return False

    monkeypatch.setattr(foreign, "LOOK_SECONDS", 0.0)
    foreign.loaded_jobs.update({b"one": Former(), b"other": Former()})  # type: ignore[dict-item]
    foreign.forget_closed()
    assert foreign.loaded_jobs == {}


# --- batches that threads make in the calling process ------------------------------------------


class Pair:
    """Two datasets, used in two threads: either waits in its batch for a batch of the other."""

    def __init__(self) -> None:
        self.entered = [threading.Event(), threading.Event()]

    def dataset(self, me: int) -> Callable[[int], Any]:
        def draw(item: int) -> Any:
            self.entered[me].set()
            before = random.random(), np.random.random()
            self.entered[1 - me].wait(0.2)  # in vain, since it waits for us
            info = get_worker_info()
            assert info is not None
            return item, before, random.random(), np.random.random(), info.rng.random()

        return draw


def test_two_loaders_make_batches_here_in_two_threads():
    pair = Pair()
    loaders = [Loader(pair.dataset(me), range(2), num_workers=0, seed=me) for me in (0, 1)]
    state = random.getstate()
    together = in_threads(*(partial(list, loader) for loader in loaders))
    assert random.getstate() == state
    for loader, batches in zip(loaders, together, strict=True):
        loader.set_epoch(0)
        assert list(loader) == batches


def test_two_epochs_make_batches_here_in_two_threads():
    pair = Pair()
    numbers = itertools.count()

    def draw(item: int) -> Any:
        return pair.dataset(next(numbers) % 2)(item)

    with Loader(draw, range(2), num_workers=0) as loader:
        together = in_threads(*(partial(list, epoch) for epoch in [iter(loader), iter(loader)]))
        loader.set_epoch(0)
        assert [list(loader), list(loader)] == together


@pytest.fixture
def patience(monkeypatch) -> None:
    """Batches that wait for others do so for a moment only."""
    monkeypatch.setattr(seeds, "patience", 0.1)


@pytest.mark.parametrize("read", [list, lambda inner: in_threads(partial(list, inner))[0]])
def test_a_batch_may_need_others_that_are_made_here(read, patience, caplog):
    """In its own thread, or in another one, which it waits for."""

    def outer(item: int) -> Any:
        return random.random(), read(inner), random.random()

    with (
        Loader(lambda item: random.random(), range(3), num_workers=0) as inner,
        Loader(outer, range(3), num_workers=0) as loader,
    ):
        batches = list(loader)
    for ordinal, (first, numbers, last) in enumerate(batches):
        generator = random.Random(batch_seed(0, 0, ordinal, 0))
        assert (first, last) == (generator.random(), generator.random())
        assert len(numbers) == 3
    assert len(caplog.messages) == (read is not list)
    for message in caplog.messages:
        assert message.startswith("a batch with num_workers=0 has waited 0.1 s for one in another")
        assert "draw from get_worker_info().rng" in message


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_for_no_batch_of_its_parent(caplog):
    entered, released = threading.Event(), threading.Event()

    def wait(item: int) -> bool:
        entered.set()
        return released.wait()

    with ThreadPoolExecutor(1) as thread, Loader(wait, range(1), num_workers=0) as loader:
        future = thread.submit(list, loader)
        entered.wait()
        child = os.fork()
        if child == 0:  # pragma: no cover
            with Loader(abs, range(2), num_workers=0) as other:
                os._exit(list(other) != [0, 1] or len(caplog.messages))
        status = os.waitpid(child, 0)[1]
        released.set()
        assert (status, future.result()) == (0, [True])


LOCKS: dict[str, tuple[Any, str]] = {
    "of a turn": (seeds, "_lock"),
    "of the first use of random": (seeds, "_first_use_lock"),
    "of the environment of a start": (environment, "_lock"),
    "of a job of another process": (foreign, "_lock"),
    "of what is shown": (log_reader, "_showing"),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_of_a_module_is_free_in_a_fork(name):
    """Whichever thread had it, or the one that forks itself, which lets go of it there, too."""
    module, attribute = LOCKS[name]
    lock = getattr(module, attribute)

    def is_free() -> bool:
        if not lock.acquire(timeout=10):
            return False
        lock.release()
        with ThreadPoolExecutor(1) as thread:  # this one may have it still
            return thread.submit(lock.acquire, timeout=10).result()

    taken, released = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            released.wait()

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(hold)
        taken.wait()
        answer = in_a_fork(is_free)
        released.set()
        future.result()
    assert answer == "True"

    def let_go() -> bool:
        lock.release()
        return is_free()

    with lock:
        assert in_a_fork(let_go) == "True"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_pools_of_its_parent():
    """Nor ends them when it exits."""
    with Loader(abs, range(3), num_workers=1) as loader:
        group = inspect(loader).group
        kept = group.pools  # as an iterator that is under way does
        assert len(kept) == 1
        assert in_a_fork(lambda: (len(group._pools), len(processes._pools))) == "(0, 0)"


# --- modules that another thread imports -------------------------------------------------------


@pytest.fixture
def late(tmp_path, monkeypatch) -> Iterator[str]:
    """The name of a module that nothing has imported."""
    (tmp_path / "comes_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "comes_late"
    sys.modules.pop("comes_late", None)


@pytest.mark.parametrize("function", [when_imported, forget])
def test_a_module_is_imported_while_it_is_waited_for(function, late):
    before = list(sys.meta_path)
    seen: list[Any] = []

    def call() -> None:
        sys.modules.pop(late, None)
        seen.clear()
        when_imported(late, seen.append)
        forget(late, seen.append)
        assert (late in sys.modules) >= bool(seen)
        assert function is forget or (late in sys.modules) == bool(seen)
        assert sys.meta_path == before

    assert at_each_step(function, call, lambda: importlib.import_module(late)) > 5


def test_a_batch_ends_while_another_thread_imports():
    def begin() -> None:
        endings.append(seeds.save_globals())
        seeds.seed_globals((0, 0, 5, 0))

    endings: list[Any] = []
    arrive = partial(seeds.seed_on_import, np.random)
    assert at_each_step(seeds.seed_on_import, arrive, lambda: endings[-1](), begin) > 5
    endings[-1]()


def test_batches_are_made_here_while_another_thread_imports_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # it has nothing yet
    with Loader(abs, range(3), num_workers=0) as loader:
        assert list(loader) == [0, 1, 2]


# --- collections that other threads change -----------------------------------------------------


def disturbed(things: Any) -> Any:
    """A copy of a collection to which another thread adds while it is first walked."""

    class Disturbed(type(things)):  # type: ignore[misc]
        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            for number, each in enumerate(super().__iter__()):
                if self.times == 1 and number:
                    raise RuntimeError("changed size during iteration")
                yield each

    return Disturbed(things)


@pytest.fixture
def two_slots(monkeypatch) -> Iterator[list[slots.Slots]]:
    both = [slots.Slots(1 << 20, 1) for _ in range(2)]
    monkeypatch.setattr(slots, "all_slots", disturbed(WeakSet(both)))
    yield both
    for each in both:
        each.close()


def test_a_fork_while_loaders_are_made(two_slots):
    """Memory that is in use is never written again: the fork has it too."""
    lent = [each.lend() for each in two_slots]
    for each, slot in zip(two_slots, lent, strict=True):
        os.truncate(slot.fd, 4096)
        each.settle(slot, 4096, 0)
    memory = [each.lease(slot, retire=False) for each, slot in zip(two_slots, lent, strict=True)]
    slots.before_fork()
    assert [slot.fd for slot in lent] == [-1, -1]
    del memory


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_lets_go_of_slots_while_loaders_are_made(two_slots, monkeypatch):
    told = WeakSet(each for each in forks.told if each in two_slots)
    monkeypatch.setattr(forks, "told", disturbed(told))
    assert in_a_fork(lambda: [each.lend() for each in two_slots]) == "[None, None]"


def test_pools_are_closed_while_others_are_made():
    job = Job(abs, None, None, None)
    pools = [ThreadPool(infos=[WorkerInfo(0, 1, 0, 0)], job=job) for _ in "ab"]
    for pool in pools:
        pool.start()
    close_pools(disturbed(WeakSet(pools)))
    for pool in pools:
        with pytest.raises(RuntimeError, match="closed"):
            pool.start()


def test_a_pool_of_threads_is_closed_while_tasks_are_done():
    begun, released = threading.Event(), threading.Event()

    def batch(item: int) -> None:
        begun.set()
        released.wait()

    pool = ThreadPool(infos=[WorkerInfo(0, 1, 0, 0)], job=Job(batch, None, None, None))
    tickets = [pool.submit(TaskMessage(0, 0, [0, 1], id=number), Bell()) for number in (1, 2)]
    assert begun.wait(60)
    pool.unfinished = disturbed(pool.unfinished)
    pool.leave(time.monotonic())
    assert all(ticket.is_done for ticket in tickets)
    released.set()
    pool.close()


def test_epochs_are_begun_while_those_of_a_loader_are_walked():
    with Loader(Numbers(100), num_workers=1, executor="thread") as loader:
        epochs = [iter(loader), iter(loader)]
        group = inspect(loader).group
        group.epochs = disturbed(group.epochs)
        assert loader.stats.workers.in_flight > 0
        group.epochs = disturbed(group.epochs)
        assert [next(each) for each in epochs] == [0, 0]
        group.epochs = disturbed(group.epochs)
        group.tidy()
        counted = inspect(loader).counters
        counted.events = disturbed(counted.events)
        assert len(loader.stats.events) >= len(counted.events) > 1


@pytest.mark.parametrize("where", [Counters, Trace])
def test_a_trace_ends_while_a_batch_is_counted(where, tmp_path):
    def begin() -> None:
        block.enter_context(loader.trace(tmp_path / "trace"))

    with Loader(range(3), num_workers=0) as loader, ExitStack() as block:
        call = partial(inspect(loader).counters.record, "consumer", "wait", 0.0, 1.0, {})
        assert at_each_step(where, call, block.close, begin) > 20


def test_num_workers_is_set_while_workers_start(monkeypatch):
    with Loader(abs, range(9), num_workers=3, executor="thread") as loader:
        pool = loader._shared.group.pool()

        def resized(info: WorkerInfo) -> WorkerInfo:
            pool.infos = pool.infos[:1]  # as another thread does
            return replace(info)

        monkeypatch.setattr(threads, "replace", resized)
        assert list(loader) == list(range(9))


@pytest.mark.parametrize("step", ["its turn comes", "it is sent"])
def test_a_state_is_taken_as_a_task_goes_on(step, monkeypatch):
    """Another thread finds it, where it was or where it is by then."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # each task has another state
    lanes: list[Lane] = []
    states: list[Any] = []

    def make() -> Any:
        sampler = BatchSampler(12, 2, seed=1)
        return Loader(tuple, sampler, num_workers=1, prefetch_factor=3, executor="thread")

    def prepare() -> None:
        for each in loaders:
            each.close()
        loaders[:] = [make()]
        batches = iter(loaders[0])
        next(batches)
        lane = batches.epoch.lanes[0]
        assert eventually(lambda: lane.tasks[0].ticket is None or lane.tasks[0].ticket.is_done)
        lane.receive_all()
        if step == "it is sent":
            start = lane.position()
            lane.tasks.clear()  # then the next one is drawn once more
            lane.feed = SamplerFeed(loaders[0]._course.source, 0, start)
            lane._draw_items(lane.feed, 0.0)
        lanes[:] = [lane]

    def meanwhile() -> None:
        if step == "it is sent":
            lanes[0]._draw()
        else:
            lanes[0]._begin_with(lanes[0].tasks[0])

    def call() -> None:
        states.append(loaders[0].state_dict())

    loaders: list[Any] = []
    assert at_each_step(Lane, call, meanwhile, prepare) > 9
    with loaders[0] as loader:
        right = list(map(tuple, BatchSampler(12, 2, seed=1)))[1:]
        for state in states:
            loader.load_state_dict(state)
            assert list(loader) == right


@pytest.mark.parametrize("end", ["in the main thread", "by Ctrl-C"])
def test_a_thread_takes_batches_where_an_alarm_has_left_ctrl_c_held(end):
    before = signal.getsignal(signal.SIGINT)
    with Loader(abs, range(6), executor="thread", num_workers=1) as loader:
        batches: Any = iter(loader)
        batches.interrupts.is_on = True
        batches.interrupts.__enter__()
        batches.interrupts.is_on = False  # as if it had come within __exit__
        assert in_threads(lambda: list(batches)) == [[*range(6)]]
        if end == "by Ctrl-C":
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        else:
            assert list(batches) == []
    assert signal.getsignal(signal.SIGINT) is before
