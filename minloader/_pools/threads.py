"""Threads of the calling process that make batches."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import BrokenExecutor, CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, ClassVar

from minloader._pools.base import Death, Pool
from minloader._worker.messages import Job, Reply, Task, WorkerInfo
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
            self._threads.append(_Thread(self.job, self.settings.info(index), self._tasks))

    def submit(self, task: Task) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self._start()
            self._futures.add(future)
            self._tasks.put((future, task))
        return future

    def watch(self) -> None:
        if self.timeout is None:
            return
        with self._lock:
            for threads in (self._threads, self._leaving):
                threads[:] = [self._replace_if_late(thread, self.timeout) for thread in threads]

    def _replace_if_late(self, thread: _Thread, timeout: float) -> _Thread:
        entry, item, began = thread.entry, thread.item, thread.began
        if entry is None or time.perf_counter() - began <= timeout:
            return thread
        stack = "".join(traceback.format_stack(sys._current_frames().get(thread.ident or 0)))
        if thread.entry is not entry or thread.item != item:
            return thread  # it has just finished
        # It cannot be ended: it is left alone, and ends when its batch does.
        thread.abandoned = True
        future, task = entry
        cause = f"thread {thread.name} took too long"
        death = Death(item, thread.info.id, os.getpid(), None, cause, stack, final=True)
        self.deaths[task.id] = death
        self.replaced += 1
        _finish(future, BrokenExecutor(cause))
        logger.warning("%s with batch %d; another takes its place", cause, task.ordinal)
        info = WorkerInfo(thread.info.id, thread.info.num_workers, self.pid, self.settings.seed)
        return _Thread(self.job, info, thread.tasks)

    def losses(self) -> int:
        return self.replaced

    def replace_workers(self) -> None:
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)
            self._leaving = [each for each in self._leaving if each.is_alive()] + self._threads
            self._threads, self._tasks = [], queue.SimpleQueue()

    def leave(self) -> None:
        with self._lock:
            self._closed = True
        for future in list(self._futures):
            if not future.cancel():
                # A thread cannot be stopped, but whoever waits for it can be told.
                _finish(future, CancelledError())
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
        entry: the task that it is working on, with its future.
        item: index of the item of it that it is making.
        began: when it began with that, by ``time.perf_counter``.
        abandoned: whether another has taken its place.
    """

    def __init__(self, job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"minloader-{info.id}", daemon=True)
        self._job = job
        self.info = info
        self.tasks = tasks
        self.entry: tuple[Future[Reply], Task] | None = None
        self.item = 0
        self.began = 0.0
        self.abandoned = False
        self.start()

    def _beat(self, task: int, item: int, now: float) -> None:
        self.item, self.began = item, now

    def run(self) -> None:
        worker: Worker | None = None
        while not self.abandoned and (entry := self.tasks.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            self._beat(task.id, 0, time.perf_counter())
            self.entry = entry
            try:
                if worker is None:
                    worker = Worker(self._job, self.info, beat=self._beat)
                _finish(future, worker.run(task))
            except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
                _finish(future, error)
            self.entry = None
            del entry, future, task  # while it waits, it must not keep the last batch alive


def _finish(future: Future[Reply], outcome: Reply | BaseException) -> None:
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return  # the other side was first: the thread with its batch, leave() or watch()
