"""Where batches are made: in the calling process, in threads, in processes of our own
(``spawned.py``), or in an executor that the user brings (``foreign.py``). All are driven alike,
through :class:`Pool`, from the parent.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Future,
    InvalidStateError,
)
from typing import Any, NamedTuple

from minloader import transport, worker
from minloader.slots import Slots
from minloader.tasks import Job, Reply, Task, WorkerInfo

__all__ = [
    "GRACE",
    "Fate",
    "Held",
    "InlinePool",
    "Pool",
    "Terms",
    "ThreadPool",
    "packed",
]

logger = logging.getLogger("minloader")

GRACE = 0.5
"""Seconds that workers get to finish and leave by themselves, with their exit handlers, before
they are killed. An idle worker needs about 0.05; a longer wait would delay Ctrl-C."""


class Terms(NamedTuple):
    """What the workers of a pool are told.

    Attributes:
        num_workers: how many there are.
        seed: the loader's.
        first_id: number of the first.
        all_workers: how many the loader has in all its pools.
    """

    num_workers: int
    seed: int
    first_id: int
    all_workers: int

    def info(self, index: int) -> WorkerInfo:
        """What the worker of this index in the pool is told in this process."""
        return WorkerInfo(self.first_id + index, self.all_workers, os.getpid(), self.seed)


class Pool(ABC):
    """Runs tasks somewhere.

    Attributes:
        terms: what the workers are told.
        pid: process the pool belongs to. A fork of it must make one of its own.
        slots: shared memory for the batches; None where they need or want none.
        replaces: whether lost workers are replaced, so that lost tasks can be sent again.
        fates: what became of the worker, for each lost task that was being run by it.
        replaced: how many workers were replaced so far.
        failed_starts: how workers ended that never got ready, since a batch was made last, or an
            epoch begun.
    """

    replaces = False

    def __init__(self, terms: Terms, slots: Slots | None = None) -> None:
        self.terms = terms
        self.pid = os.getpid()
        self.slots = slots
        self.task_ids = itertools.count(1)
        self.fates: dict[int, Fate] = {}
        self.replaced = 0
        self.failed_starts: list[str] = []

    @property
    def num_workers(self) -> int:
        """How many tasks can run at once; 0 if submitting runs the task."""
        return self.terms.num_workers

    def hold(self, item: Any) -> Any:
        """Takes an item as it is now; the sampler may change it when it is asked for the next."""
        return item

    def pack(self, task: Task) -> Task:
        """Makes a task fit to leave this process, where it has to."""
        return task

    @abstractmethod
    def submit(self, task: Task) -> Future[Reply]:
        """Hands one packed task over.

        Raises:
            BrokenExecutor: the workers are gone and cannot be replaced.
            RuntimeError: the pool is closed.
            OSError: the system allows no more processes or descriptors.
        """

    def start(self) -> None:
        """Starts all workers now rather than with their first task. Does not wait for them."""
        return

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Harmless when repeated, or in a fork."""
        deadline = time.monotonic() + GRACE
        if self.retire():
            self.end(deadline)

    def retire(self) -> bool:
        """Asks the workers to leave; first half of :meth:`close`. False: not ours to close."""
        return os.getpid() == self.pid

    def end(self, deadline: float) -> None:
        """Waits until ``deadline`` (monotonic clock), then kills; second half of :meth:`close`."""
        return

    def release(self) -> None:
        """Lets the workers leave when they have done what they were given. Others, by the terms
        as they are then, take what is submitted later."""
        return

    def watch(self) -> None:
        """Looks after workers that are stuck. Called now and then while somebody waits."""
        return

    def losses(self) -> int:
        """How often tasks have been lost so far. Those not done when this grows are to be sent
        again; their futures have an error by now."""
        return 0

    def is_death(self, error: BaseException) -> bool:
        """Whether the error of a future says no more than that workers died, and others live."""
        return False

    def renew(self, pid: int) -> None:
        """Replaces a worker that takes too much memory, when it has done what it was given."""
        return


class Fate(NamedTuple):
    """How a worker ended that was running a task.

    Attributes:
        place: which item of the task it was making.
        worker: its id.
        pid: its process.
        exitcode: of the process; None if it is not known, or lives.
        cause: the same in words.
        stack: Python stack if it was killed because the batch took too long; else None.
        final: whether there is no point in trying again.
    """

    place: int
    worker: int
    pid: int
    exitcode: int | None
    cause: str
    stack: str | None
    final: bool = False


class Held:
    """An item, and what it was when the sampler gave it."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self._packed: bytes | None = None
        try:
            self._packed = transport.pack(item, down=True)
        except Exception:  # raised again where it can be reported, below
            return

    def pack(self) -> bytes:
        return transport.pack(self.item, down=True) if self._packed is None else self._packed


def packed(task: Task) -> Task:
    return task._replace(items=[held.pack() for held in task.items])


class InlinePool(Pool):
    """Makes each batch in the calling process, when it is submitted."""

    def __init__(self, terms: Terms, job: Job) -> None:
        super().__init__(terms)
        self._job = job
        self._worker: worker.Worker | None = None

    def submit(self, task: Task) -> Future[Reply]:
        if self._worker is None:
            info = self.terms.info(0)
            self._worker = worker.Worker(self._job, info, remote=False, borrow=True)
        future: Future[Reply] = Future()
        future.set_result(self._worker.run(task))
        return future


class ThreadPool(Pool):
    """Makes batches in daemon threads of the calling process.

    Not the standard library's executor: the interpreter would wait at exit for its threads,
    however long their batches take.
    """

    replaces = True

    def __init__(self, terms: Terms, job: Job, timeout: float | None) -> None:
        super().__init__(terms)
        self._job = job
        self._timeout = timeout
        self._tasks: queue.SimpleQueue[tuple[Future[Reply], Task] | None] = queue.SimpleQueue()
        self._threads: list[_Thread] = []
        self._leaving: list[_Thread] = []  # with a queue of their own, which has an end
        self._futures: weakref.WeakSet[Future[Reply]] = weakref.WeakSet()
        self._lock = threading.Lock()  # who closes the loader may not be who draws from it
        self._closed = False

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the pool is closed")
        for index in range(len(self._threads), self.num_workers):
            self._threads.append(_Thread(self._job, self.terms.info(index), self._tasks))
            self._threads[-1].start()

    def submit(self, task: Task) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self._start()
            self._futures.add(future)
            self._tasks.put((future, task))
        return future

    def watch(self) -> None:
        with self._lock:
            self._replace_late(self._threads)
            self._replace_late(self._leaving)

    def _replace_late(self, threads: list[_Thread]) -> None:
        for n, thread in enumerate(threads):
            entry, index, began = thread.entry, thread.index, thread.began
            late = self._timeout is not None and time.perf_counter() - began > self._timeout
            if entry is None or not late or thread.ident is None:
                continue
            stack = "".join(traceback.format_stack(sys._current_frames().get(thread.ident)))
            if thread.entry is not entry or thread.index != index:
                continue  # it has just finished
            # It cannot be ended: it is left alone, and ends when its batch does.
            thread.abandoned = True
            future, task = entry
            cause = f"thread {thread.name} took too long"
            fate = Fate(index, thread.info.id, os.getpid(), None, cause, stack, final=True)
            self.fates[task.id] = fate
            self.replaced += 1
            _settle(future, error=BrokenExecutor(cause))
            logger.warning("%s with batch %d; another takes its place", cause, task.ordinal)
            info = WorkerInfo(thread.info.id, thread.info.num_workers, self.pid, self.terms.seed)
            threads[n] = _Thread(self._job, info, thread.tasks)
            threads[n].start()

    def losses(self) -> int:
        return self.replaced

    def release(self) -> None:
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)
            self._leaving = [each for each in self._leaving if each.is_alive()] + self._threads
            self._threads, self._tasks = [], queue.SimpleQueue()

    def retire(self) -> bool:
        if not super().retire():
            return False
        with self._lock:
            self._closed = True
        for future in list(self._futures):
            if not future.cancel():
                # A thread cannot be stopped, but whoever waits for it can be told.
                _settle(future, error=CancelledError())
        self.release()
        return True

    def end(self, deadline: float) -> None:
        for thread in self._leaving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._leaving = []


class _Thread(threading.Thread):
    """A worker thread. It knows the queue, not the pool, which may be collected.

    Attributes:
        info: where its code is told that it runs.
        tasks: where its tasks come from, until there is None.
        entry: what it is working on.
        index: which item of that.
        began: when it began with that, by ``time.perf_counter``.
        abandoned: whether it was given up.
    """

    def __init__(self, job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"minloader-{info.id}", daemon=True)
        self._job = job
        self.info = info
        self.tasks = tasks
        self.entry: tuple[Future[Reply], Task] | None = None
        self.index = 0
        self.began = 0.0
        self.abandoned = False

    def _mark(self, task: int, index: int, now: float) -> None:
        self.index, self.began = index, now

    def run(self) -> None:
        maker: worker.Worker | None = None
        while not self.abandoned and (entry := self.tasks.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            self._mark(task.id, 0, time.perf_counter())
            self.entry = entry
            try:
                if maker is None:
                    maker = worker.Worker(self._job, self.info, remote=False, mark=self._mark)
                _settle(future, reply=maker.run(task))
            except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
                _settle(future, error=error)
            self.entry = None
            del entry, future, task  # while it waits, it must not keep the last batch alive


def _settle(
    future: Future[Reply], *, reply: Reply | None = None, error: BaseException | None = None
) -> None:
    try:
        if reply is not None:
            future.set_result(reply)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return  # the other side was first: the thread with its batch, close() or watch()
