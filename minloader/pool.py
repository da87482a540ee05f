"""Where batches are made: in the calling process, in threads, in an executor that the user
brings, or in processes of our own (``spawned.py``). All are driven alike, through :class:`Pool`,
from the parent.
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
    Executor,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
)
from typing import Any, NamedTuple

from minloader import shipping, transport, worker
from minloader.slots import Slots
from minloader.tasks import Job, Reply, Task

__all__ = ["GRACE", "Fate", "ForeignPool", "Held", "InlinePool", "Pool", "ThreadPool", "packed"]

logger = logging.getLogger("minloader")

GRACE = 0.5
"""Seconds that workers get to finish and leave by themselves, with their exit handlers, before
they are killed. An idle worker needs about 0.05; a longer wait would delay Ctrl-C."""


class Pool(ABC):
    """Runs tasks somewhere.

    Attributes:
        num_workers: how many tasks can run at once; 0 if submitting runs the task.
        pid: process the pool belongs to. A fork of it must make one of its own.
        slots: shared memory for the batches; None where they need or want none.
        replaces: whether lost workers are replaced, so that lost tasks can be sent again.
        fates: what became of the worker, for each lost task that was being run by it.
        replaced: how many workers were replaced so far.
        failed_starts: how workers ended that never got ready, since a batch was made last, or an
            epoch begun.
    """

    replaces = False

    def __init__(self, num_workers: int, slots: Slots | None = None) -> None:
        self.num_workers = num_workers
        self.pid = os.getpid()
        self.slots = slots
        self.task_ids = itertools.count(1)
        self.fates: dict[int, Fate] = {}
        self.replaced = 0
        self.failed_starts: list[str] = []

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
        return

    def watch(self) -> None:
        """Looks after workers that are stuck. Called now and then while somebody waits."""
        return

    def losses(self) -> int:
        """How often tasks have been lost so far. Those not done when this grows are to be sent
        again; their futures have an error by now."""
        return 0

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

    def __init__(self, job: Job) -> None:
        super().__init__(0)
        self._job = job
        self._worker: worker.Worker | None = None

    def submit(self, task: Task) -> Future[Reply]:
        if self._worker is None:
            self._worker = worker.Worker(self._job, 0, remote=False, borrow=True)
        future: Future[Reply] = Future()
        future.set_result(self._worker.run(task))
        return future


class ThreadPool(Pool):
    """Makes batches in daemon threads of the calling process.

    Not the standard library's executor: the interpreter would wait at exit for its threads,
    however long their batches take.
    """

    replaces = True

    def __init__(self, job: Job, num_workers: int, timeout: float | None) -> None:
        super().__init__(num_workers)
        self._job = job
        self._timeout = timeout
        self._tasks: queue.SimpleQueue[tuple[Future[Reply], Task] | None] = queue.SimpleQueue()
        self._threads: list[_Thread] = []
        self._futures: weakref.WeakSet[Future[Reply]] = weakref.WeakSet()
        self._lock = threading.Lock()

    def start(self) -> None:
        for worker_id in range(len(self._threads), self.num_workers):
            self._threads.append(_Thread(self._job, worker_id, self._tasks))
            self._threads[-1].start()

    def submit(self, task: Task) -> Future[Reply]:
        self.start()
        future: Future[Reply] = Future()
        self._futures.add(future)
        self._tasks.put((future, task))
        return future

    def watch(self) -> None:
        with self._lock:
            for n, thread in enumerate(self._threads):
                entry, index, began = thread.entry, thread.index, thread.began
                late = self._timeout is not None and time.monotonic() - began > self._timeout
                if entry is None or not late or thread.ident is None:
                    continue
                stack = "".join(traceback.format_stack(sys._current_frames().get(thread.ident)))
                if thread.entry is not entry or thread.index != index:
                    continue  # it has just finished
                # It cannot be ended: it is left alone, and ends when its batch does.
                thread.abandoned = True
                future, task = entry
                cause = f"thread {thread.name} took too long"
                self.fates[task.id] = Fate(index, n, os.getpid(), None, cause, stack, final=True)
                self.replaced += 1
                _settle(future, error=BrokenExecutor(cause))
                logger.warning("%s with batch %d; another takes its place", cause, task.ordinal)
                self._threads[n] = _Thread(self._job, n, self._tasks)
                self._threads[n].start()

    def losses(self) -> int:
        return self.replaced

    def close(self) -> None:
        if os.getpid() != self.pid:
            return
        for future in list(self._futures):
            if not future.cancel():
                # A thread cannot be stopped, but whoever waits for it can be told.
                _settle(future, error=CancelledError())
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + GRACE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []


class _Thread(threading.Thread):
    """A worker thread. It knows the queue, not the pool, which may be collected.

    Attributes:
        entry: what it is working on.
        index: which item of that.
        began: when it began with that, in seconds of the monotonic clock.
        abandoned: whether it was given up.
    """

    def __init__(self, job: Job, worker_id: int, tasks: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"minloader-{worker_id}", daemon=True)
        self._job = job
        self._worker_id = worker_id
        self._tasks = tasks
        self.entry: tuple[Future[Reply], Task] | None = None
        self.index = 0
        self.began = 0.0
        self.abandoned = False

    def _mark(self, task: int, index: int) -> None:
        self.index, self.began = index, time.monotonic()

    def run(self) -> None:
        maker: worker.Worker | None = None
        while not self.abandoned and (entry := self._tasks.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            self._mark(task.id, 0)
            self.entry = entry
            try:
                if maker is None:
                    maker = worker.Worker(self._job, self._worker_id, remote=False, mark=self._mark)
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


class ForeignPool(Pool):
    """Makes batches in an executor that the user brought, and will shut down.

    Args:
        job: what workers in this process use as it is.
        shipment: what others load; None if the executor has no others.
        executor: runs the tasks.
        owner: process that made the executor; in a fork of it nothing would ever run.
        slots: shared memory for batches of workers on this machine.
    """

    def __init__(
        self,
        job: Job,
        shipment: shipping.Shipment | None,
        executor: Executor,
        owner: int,
        slots: Slots | None,
    ) -> None:
        super().__init__(job.num_workers, slots)
        self._owner = owner
        self._attachment = worker.Attachment(job, shipment)
        self._executor = executor

    def hold(self, item: Any) -> Held:
        return Held(item)

    def pack(self, task: Task) -> Task:
        return packed(task)

    def submit(self, task: Task) -> Future[Reply]:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"executor belongs to process {self._owner}, of which this one is a fork; make "
                "the Loader and its executor here"
            )
        return self._executor.submit(worker.run_attached, self._attachment, task)

    def close(self) -> None:
        if self.slots is not None and os.getpid() == self.pid:
            self.slots.close()


def is_in_process(executor: Executor) -> bool:
    """Whether an executor is known to run its tasks in this process."""
    return isinstance(executor, ThreadPoolExecutor)
