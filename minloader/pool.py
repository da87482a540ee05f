"""Where batches are made: in spawned processes, in threads, in the calling process, or in an
executor that the user brings. All are driven alike, through :class:`Pool`, from the parent.

A pool of processes keeps two promises of its own. The parent's main module is never imported
in a worker, so scripts need no ``__main__`` guard. And nothing outlives the pool: workers are
asked to leave, then killed together with all they started.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import queue
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
)
from concurrent.futures import ProcessPoolExecutor as _ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor as _ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, cast

from minloader import shipping, transport, worker
from minloader.processes import kill_group, kill_trees
from minloader.slots import Slots
from minloader.worker import Job, Reply, Task

__all__ = ["ForeignPool", "InlinePool", "Pool", "ProcessPool", "ThreadPool"]

GRACE = 0.5
"""Seconds that workers get to finish and leave by themselves, with their exit handlers, before
they are killed. An idle worker needs about 0.05; a longer wait would delay Ctrl-C."""


class Pool(ABC):
    """Runs tasks somewhere.

    Attributes:
        num_workers: how many tasks can run at once; 0 if submitting runs the task.
        pid: process the pool belongs to. A fork of it must make one of its own.
        slots: shared memory for the batches; None where they need or want none.
    """

    def __init__(self, num_workers: int, slots: Slots | None = None) -> None:
        self.num_workers = num_workers
        self.pid = os.getpid()
        self.slots = slots

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

    def obituary(self) -> tuple[int | None, int | None]:
        """Pid and exit code of the worker that broke the pool, as far as known."""
        return None, None


def _packed(task: Task) -> Task:
    return task._replace(items=[transport.pack(item, down=True) for item in task.items])


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

    def __init__(self, job: Job, num_workers: int) -> None:
        super().__init__(num_workers)
        self._job = job
        self._tasks: queue.SimpleQueue[tuple[Future[Reply], Task] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._futures: weakref.WeakSet[Future[Reply]] = weakref.WeakSet()

    def start(self) -> None:
        for worker_id in range(len(self._threads), self.num_workers):
            thread = threading.Thread(
                target=_serve,
                args=(self._job, worker_id, self._tasks),
                name=f"minloader-{worker_id}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, task: Task) -> Future[Reply]:
        self.start()
        future: Future[Reply] = Future()
        self._futures.add(future)
        self._tasks.put((future, task))
        return future

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


def _serve(job: Job, worker_id: int, tasks: queue.SimpleQueue[Any]) -> None:
    """Life of a worker thread. It knows the queue, not the pool, which may be collected."""
    maker: worker.Worker | None = None
    while (entry := tasks.get()) is not None:
        future, task = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if maker is None:
                maker = worker.Worker(job, worker_id, remote=False)
            _settle(future, reply=maker.run(task))
        except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
            _settle(future, error=error)
        del entry, future, task  # while it waits, a thread must not keep the last batch alive


def _settle(
    future: Future[Reply], *, reply: Reply | None = None, error: BaseException | None = None
) -> None:
    try:
        if reply is not None:
            future.set_result(reply)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return  # the other side was first: the thread with its batch, or close()


# --- processes

_starting = threading.local()  # .ours: this thread is just starting one of our workers
_stdlib_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """What a child is told at its start, less the main module if it is a worker of ours.

    Without it the child does not import the parent's script again, which would need a guard,
    may hang (cpython #118981) and costs time. Set once and for all rather than around each
    start, so that other threads may start processes meanwhile.
    """
    data = _stdlib_preparation_data(name)
    if getattr(_starting, "ours", False):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


multiprocessing.spawn.get_preparation_data = _preparation_data


@contextmanager
def _worker_start() -> Iterator[None]:
    """Leaves the main module out, and holds Ctrl-C off the child until it can ignore it.

    The child inherits the blocked SIGINT and unblocks it when it has its handler. In the
    parent the signal is not lost, only late.
    """
    _starting.ours = True
    masking = hasattr(signal, "pthread_sigmask")
    if masking:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        if masking:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _starting.ours = False


class _CancellableFuture(Future[Any]):
    """A future that may be cancelled while its executor breaks.

    CPython 3.11 sets the error of a broken pool on cancelled futures too; the InvalidStateError
    ended its manager thread, and with it every other future would wait for ever.
    """

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            super().set_exception(exception)
        except InvalidStateError:
            if not self.cancelled():
                raise


class _Executor(_ProcessPoolExecutor):
    """A ProcessPoolExecutor whose workers have numbers and start as we need it."""

    def __init__(
        self,
        cargo: shipping.Cargo,
        num_workers: int,
        context: BaseContext,
        folder: str | None,
    ) -> None:
        # Its arguments are set for each worker, when it is spawned.
        super().__init__(num_workers, mp_context=context)
        self._initializer = worker.start
        self._start = cargo, folder
        self.workers: list[Any] = []  # the processes, kept when the executor forgets them
        self.manager: threading.Thread | None = None  # likewise
        self.ended: set[int] = set()  # pids that were ended because another had died

    def _spawn_process(self) -> None:
        self._initargs = (*self._start, len(self._processes))
        with _worker_start():
            super()._spawn_process()  # type: ignore[misc]  # not public
        self.workers = list(self._processes.values())
        process = self.workers[-1]
        process.terminate = partial(_end_survivor, process.pid, process.sentinel, self.ended)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.__class__ = _CancellableFuture
        return future


def _end_survivor(pid: int, sentinel: Any, ended: set[int]) -> None:
    """What the executor does to every worker when one has died, in place of ``terminate()``.

    SIGTERM would leave alive what the worker started, and a worker that ignores it too: the
    executor would wait for that, from CPython 3.12 with the lock that ``shutdown()`` needs.
    """
    if not multiprocessing.connection.wait([sentinel], 0):
        ended.add(pid)
        kill_trees([pid])


class ProcessPool(Pool):
    """Makes batches in worker processes, started when there is work for them.

    Args:
        shipment: the job, serialized once for all workers there will ever be.
        num_workers: how many processes, at most.
        context: how to start them.
        slots: shared memory for their batches.
    """

    def __init__(
        self,
        shipment: shipping.Shipment,
        num_workers: int,
        context: BaseContext,
        slots: Slots | None,
    ) -> None:
        super().__init__(num_workers, slots)
        self._shipment = shipment
        self._context = context
        self._executor: _Executor | None = None
        self._last: _Executor | None = None  # the one that broke
        self._closed = False
        _pools.add(self)

    def _live(self) -> _Executor:
        if self._closed:
            raise RuntimeError("the pool is closed")
        self._bury_broken()
        if self._executor is None:
            folder = self.slots.folder if self.slots is not None else None
            cargo = self._shipment.cargo
            self._executor = _Executor(cargo, self.num_workers, self._context, folder)
        return self._executor

    def _bury_broken(self) -> None:
        """Puts a broken executor aside, when all its processes are gone."""
        if self._executor is not None and self._executor._broken:
            broken = self._executor
            _retire(broken)
            _end(broken, time.monotonic() + GRACE)
            self._last, self._executor = broken, None

    def pack(self, task: Task) -> Task:
        return _packed(task)

    def submit(self, task: Task) -> Future[Reply]:
        try:
            return self._live().submit(worker.run, task)
        except BrokenExecutor:  # just now: the task was not under way, so it is not lost
            return self._live().submit(worker.run, task)

    def start(self) -> None:
        executor = self._live()
        # An executor starts a process with a task for which none is idle.
        for _ in range(self.num_workers - len(executor.workers)):
            executor.submit(worker.warm_up)

    def obituary(self) -> tuple[int | None, int | None]:
        self._bury_broken()
        if self._last is None:
            return None, None
        for process in self._last.workers:
            if process.pid not in self._last.ended:
                return process.pid, process.exitcode
        return None, None

    def close(self) -> None:
        deadline = time.monotonic() + GRACE
        if self.retire():
            self.end(deadline)

    def retire(self) -> bool:
        """Asks the workers to leave; first half of :meth:`close`. False: not ours to close."""
        if os.getpid() != self.pid:
            return False
        self._closed = True
        if self._executor is not None:
            _retire(self._executor)
        return True

    def end(self, deadline: float) -> None:
        """Waits until ``deadline`` (monotonic clock), then kills; second half."""
        if self._executor is not None:
            _end(self._executor, deadline)
            self._executor = None  # only now: Ctrl-C meanwhile leaves the rest to the exit
        if self.slots is not None:
            self.slots.close()


def _retire(executor: _Executor) -> None:
    manager = cast(threading.Thread | None, executor._executor_manager_thread)
    executor.manager = manager or executor.manager
    executor.shutdown(wait=False, cancel_futures=True)


def _end(executor: _Executor, deadline: float) -> None:
    alive = {process.sentinel: process for process in executor.workers}
    while alive and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(alive), left):
            del alive[sentinel]
    kill_trees(process.pid for process in alive.values())
    for process in executor.workers:
        # One that left by itself may have left others. Its pid may be taken again by now, but
        # not as a group while there is anybody in its own.
        kill_group(process.pid)
    # It reaps the processes and closes the pipes; it ends at once now, unless it is this thread
    # itself, come here by garbage collection.
    if executor.manager is not None and executor.manager is not threading.current_thread():
        executor.manager.join(GRACE)


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    """Ends every worker when the interpreter exits, all of them within one GRACE.

    It must come before the executors' own hook, which first drains what is queued, and before
    the interpreter waits for their threads: atexit would be too late for both.
    """
    deadline = time.monotonic() + GRACE
    for pool in [pool for pool in _pools if pool.retire()]:
        pool.end(deadline)


threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # as concurrent.futures does


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

    def pack(self, task: Task) -> Task:
        return _packed(task)

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
    return isinstance(executor, _ThreadPoolExecutor)
