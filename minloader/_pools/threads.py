"""Threads of the calling process that make batches."""

from __future__ import annotations

import contextvars
import faulthandler
import logging
import os
import queue
import re
import threading
import time
import weakref
from concurrent.futures import BrokenExecutor, CancelledError, Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from minloader._checks import copied
from minloader._memory.files import SharedFile, interrupts_held
from minloader._pools.base import Death, Pool, finish
from minloader._worker.environment import Environment
from minloader._worker.heartbeat import shortened
from minloader._worker.messages import Job, Reply, TaskMessage, WorkerInfo
from minloader._worker.run import Worker

logger = logging.getLogger("minloader")


@dataclass(eq=False, repr=False)
class ThreadPool(Pool):
    """Makes batches in daemon threads of the calling process.

    Not the standard library's executor: the interpreter would wait at exit for its threads,
    however long their batches take.

    Args:
        job: what the threads make batches from.
        timeout: seconds that a batch may take.
    """

    job: Job
    timeout: float | None
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads: list[_Thread] = []
        self._leaving: list[_Thread] = []  # with a queue of their own, which has an end
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.futures: weakref.WeakSet[Future[Reply]] = weakref.WeakSet()
        self._lock = threading.RLock()  # who closes the loader may not be who draws from it
        self._closed = False

    def start(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            missing = range(len(self._threads), self.num_workers)
            with interrupts_held() if missing else nullcontext():  # one would be known to nobody
                for index in missing:
                    self._threads.append(_Thread(self.job, self.settings.info(index), self._tasks))

    def submit(self, task: TaskMessage) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self.start()
            self.futures.add(future)
            self._tasks.put((future, task))
        return future

    def watch(self) -> None:
        if self.timeout is None:
            return
        with self._lock, interrupts_held():
            for threads in (self._threads, self._leaving):
                threads[:] = [self._replace_if_late(thread, self.timeout) for thread in threads]

    def _replace_if_late(self, thread: _Thread, timeout: float) -> _Thread:
        work = thread.work
        if work is None or time.perf_counter() - work[3] <= timeout:
            return thread
        future, task, item, _ = work
        stack = _stack(thread)
        if thread.work is not work:
            return thread  # it has just finished
        cause = f"thread {thread.name} took too long"
        death = Death(
            item=item,
            worker=thread.info.id,
            pid=os.getpid(),
            exitcode=None,
            cause=cause,
            stack=stack,
            final=True,
            place=thread.place[0],
        )
        self.deaths[task.id] = death  # before whoever waits for the future looks for it
        if not finish(future, BrokenExecutor(cause)):
            del self.deaths[task.id]
            return thread  # it has finished since
        # It cannot be ended: it is left alone, and ends when its batch does.
        thread.abandoned = True
        self.replaced += 1
        logger.warning("%s with batch %d; another takes its place", cause, task.ordinal)
        info = WorkerInfo(thread.info.id, thread.info.num_workers, self.pid, self.settings.seed)
        return _Thread(self.job, info, thread.tasks)

    def replace_workers(self) -> None:
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)
            self._leaving = [each for each in self._leaving if each.is_alive()] + self._threads
            self._threads, self._tasks = [], queue.SimpleQueue()

    def leave(self) -> None:
        with self._lock:
            self._closed = True
        for future in copied(self.futures):
            if not future.cancel():
                # A thread cannot be stopped, but whoever waits for it can be told.
                finish(future, CancelledError())
        self.replace_workers()

    def end(self, deadline: float) -> None:
        for thread in self._leaving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._leaving = []


class _Thread(threading.Thread):
    """A worker thread, which runs from when it is made.

    It knows the queue, not the pool, which may be collected.

    Attributes:
        info: where its code is told that it runs.
        tasks: where its tasks come from, until there is None.
        work: a future, its task, index of the item in it, and when the thread began with that (by
            ``time.perf_counter``). Replaced as a whole: another thread never sees a part of it.
        abandoned: whether another has taken its place.
    """

    def __init__(self, job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"minloader-{info.id}", daemon=True)
        self._job = job
        self.info = info
        self.tasks = tasks
        self.work: tuple[Future[Reply], TaskMessage, int, float] | None = None
        self.abandoned = False
        self.place = [-1]  # of the sample in its item
        self._consumers_context = contextvars.copy_context()  # of the thread that starts it
        self.start()

    def beat(self, task: int, item: int, now: float) -> None:
        work = self.work
        assert work is not None
        self.work, self.place[0] = (work[0], work[1], item, now), -1

    def run(self) -> None:
        # numpy.errstate and decimal's precision are context variables: a batch has those of its
        # consumer, as in a process. Python gives them to a thread where it was told to (from 3.14).
        self._consumers_context.run(self._make_batches)

    def _make_batches(self) -> None:
        worker: Worker | None = None
        while not self.abandoned and (entry := self.tasks.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            self.work = future, task, 0, time.perf_counter()
            try:
                if worker is None:
                    environment = Environment(self.beat, sample_place=self.place)
                    worker = Worker(self._job, self.info, environment)
                finish(future, worker.run(task))
            except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
                finish(future, error)
            self.work = None
            del entry, future, task  # while it waits, it must not keep the last batch alive


def _stack(thread: threading.Thread) -> str:
    """Return the Python stack of a running thread; "" if it could not be had.

    In one call of C: without a global lock nobody may touch the frames of a running thread, and
    this stops all threads meanwhile (cpython #118680, #128400).
    """
    try:
        file = SharedFile()
    except OSError:  # no descriptors
        return ""
    faulthandler.dump_traceback(file.fd, all_threads=True)
    found = re.search(rf"^Thread 0x0*{thread.ident:x} .*\n(?: .*\n)+", file.text(), re.MULTILINE)
    file.close()
    return shortened(found[0]) if found else ""
