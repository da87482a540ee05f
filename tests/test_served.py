"""The thread of a pool: whatever breaks into the consumer's thread, nothing is left locked."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from conftest import eventually, workers
from helpers import Numbers, Squares
from trouble import Scripted

from minloader import Loader, WorkerDied
from minloader._pools import processes, served
from minloader._pools.base import POOL_CLOSED
from minloader._pools.ticket import Bell, Ticket
from minloader._worker.messages import Reply, TaskMessage


class TimeLimit(BaseException):
    """What the handler of an alarm raises."""


@pytest.fixture
def torn(monkeypatch) -> list[str]:
    """Has an alarm break in wherever the consumer's thread takes a lock of an executor or a future.

    It gives where. CPython looks for signals as the method returns that has taken the lock: nobody
    would give that back.
    """
    found: list[str] = []
    enter = threading.Condition.__enter__
    consumer = threading.get_ident()

    def torn_enter(condition: Any) -> Any:
        result = enter(condition)
        frame: Any = sys._getframe(1)
        while frame is not None and threading.get_ident() == consumer:
            if "concurrent/futures/" in frame.f_code.co_filename:
                found.append(frame.f_code.co_qualname)
                raise TimeLimit
            frame = frame.f_back
        return result

    monkeypatch.setattr(threading.Condition, "__enter__", torn_enter)
    return found


def live(loader: Loader, expected: list[int]) -> None:
    """Whatever has to do with tasks: they are sent, dropped, lost, and sent again."""
    loader.start()
    batches = iter(loader)
    assert next(batches) == expected[0]
    del batches  # what is queued is dropped
    batches = iter(loader)
    got = [next(batches), next(batches)]
    for process in workers(loader)[:1]:
        process.kill()
    assert sorted([*got, *batches]) == expected
    loader.num_workers = 1
    assert sorted(loader) == expected
    loader.close()


@pytest.mark.parametrize(
    ("kind", "dataset"),
    [
        ("process", Squares(40)),
        ("process", Numbers(40)),
        ("thread", Squares(40)),
        ("foreign processes", Squares(40)),
        ("foreign threads", Squares(40)),
    ],
)
def test_the_consumer_takes_no_lock_of_an_executor_or_a_future(kind, dataset, torn):
    """In ``submit``, ``done``, ``cancel`` and the others it would be taken for ever."""
    makers: dict[str, Any] = {
        "foreign processes": lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")),
        "foreign threads": lambda: ThreadPoolExecutor(2),
    }
    executor = makers[kind]() if kind in makers else kind
    expected = [n * n for n in range(40)] if isinstance(dataset, Squares) else list(range(40))
    try:
        live(Loader(dataset, num_workers=2, prefetch_factor=4, executor=executor), expected)
    finally:
        found = list(torn)
        if kind in makers:
            threading.Thread(target=executor.shutdown).start()
    assert found == []


def test_ctrl_c_does_not_wait_for_workers_that_start(monkeypatch):
    start, gate = processes.WorkerProcess.start, threading.Event()
    main: Any = threading.main_thread().ident

    def slow(process: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        # Python does not look at one that comes just before it waits: until the next one comes.
        while not gate.wait(0.1):
            signal.pthread_kill(main, signal.SIGUSR1)
        monkeypatch.undo()
        start(process)

    monkeypatch.setattr(processes.WorkerProcess, "start", slow)
    before = signal.signal(signal.SIGUSR1, lambda *args: None)
    with Loader(Squares(9), num_workers=2) as loader:
        with pytest.raises(KeyboardInterrupt):
            loader.start()
        assert not gate.is_set()
        gate.set()
        assert list(loader) == [n * n for n in range(9)]
        assert loader.stats.errors.replaced == 0
    signal.signal(signal.SIGUSR1, before)


def test_a_start_that_fails_and_then_works(monkeypatch):
    """As where the system has no processes left, for a while: it is the error of what was sent."""
    start, failures = processes.WorkerProcess.start, iter(range(2))

    def failing(process: Any) -> None:
        if next(failures, None) is not None:
            raise BlockingIOError(11, "planned")
        start(process)

    monkeypatch.setattr(processes.WorkerProcess, "start", failing)
    with Loader(Squares(9), num_workers=2, prefetch_factor=1, chunks=False) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(BlockingIOError, match="planned"):
                next(batches)
        assert list(batches) == [n * n for n in range(2, 9)]


def ends_well(info: Any) -> None:
    """Have a worker end with exit code 0 when it is sent SIGTERM, as many frameworks do."""
    signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))


def test_who_ends_since_another_died_is_not_to_blame(tmp_path):
    script = {n: [("touch", tmp_path / f"{n}"), ("wait", tmp_path / "go")] for n in range(3)}
    script[0].append(("die",))
    options = {"num_workers": 3, "prefetch_factor": 1, "retries": 0, "worker_init_fn": ends_well}
    with Loader(Scripted(script), range(6), **options) as loader:
        batches = iter(loader)
        assert eventually(lambda: all((tmp_path / f"{n}").exists() for n in range(3)))
        (tmp_path / "go").touch()
        with pytest.raises(WorkerDied, match="batch 0"):
            next(batches)
        assert list(batches) == [1, 2, 3, 4, 5]


def served_pool() -> tuple[served.ServedPool, threading.Thread]:
    """Return a pool, and its thread."""
    before = threading.enumerate()
    pool = served.ServedPool(infos=[])
    pool.prepare()
    (thread,) = set(threading.enumerate()) - set(before)
    return pool, thread


def test_the_thread_does_not_keep_a_pool_that_is_let_go_of():
    pool, thread = served_pool()
    gone = weakref.ref(pool)
    del pool
    assert eventually(lambda: gone() is None)
    thread.join(60)
    assert not thread.is_alive()


def test_a_pool_whose_thread_ends_as_it_is_told_to_goes(no_collector):
    """It has seen that the pool is closed, and looked for the last time, before it was asked."""
    pool, thread = served_pool()
    pool.closed = True
    pool._inbox.put(int)
    thread.join(60)
    assert not thread.is_alive()
    pool.leave(0.0)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None


def test_a_pool_that_was_closed_begins_no_other_thread():
    """A resize in another thread may close it just before a task is given to it."""
    pool, thread = served_pool()
    pool.close()
    thread.join(60)
    before = set(threading.enumerate())
    ticket = pool.submit(TaskMessage(0, 0, []), Bell())
    assert set(threading.enumerate()) <= before
    assert str(ticket.error) == POOL_CLOSED


@pytest.mark.parametrize("executor", ["process", "thread", "foreign"])
def test_a_loader_without_batches_keeps_nothing_when_it_is_closed(executor, no_collector):
    """Its pool had no task, and so no thread."""
    dataset = Squares(3)
    with ThreadPoolExecutor(1) as threads:
        loader = Loader(
            dataset, [], executor=threads if executor == "foreign" else executor, num_workers=1
        )
        assert list(loader) == []
        loader.close()
        gone = weakref.ref(dataset)
        del loader, dataset
        gc.collect()
        assert gone() is None


def test_the_thread_goes_on_after_an_error(caplog):
    """Of what is due: there may have been no descriptors."""

    class Failing(served.ServedPool):
        errors = iter([OSError("planned")])

        def look(self) -> float | None:
            for error in self.errors:
                raise error
            return None

        def hand_over(self, ticket: Ticket, task: Any) -> None:
            ticket.finish(None)

    pool, bell = Failing(infos=[]), Bell()
    for _ in range(2):
        ticket = pool.submit(TaskMessage(0, 0, []), bell)
        assert eventually(lambda ticket=ticket: ticket.is_done)
    pool.close()
    assert caplog.text.count("OSError: planned") == 1


def test_a_bell_that_was_rung_does_not_wait():
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.wait()
    bell.wait(0.001)  # in vain
    ticket = Ticket(bell)
    ticket.finish(Reply(0, 0, False, []))
    bell.wait()
    assert ticket.is_done
