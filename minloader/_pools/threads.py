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
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Future,
    InvalidStateError,
)
from typing import Any

from minloader._pools.base import Death, Pool, Terms
from minloader._worker.messages import Job, Reply, Task, WorkerInfo
from minloader._worker.run import Worker

logger = logging.getLogger("minloader")


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
            death = Death(index, thread.info.id, os.getpid(), None, cause, stack, final=True)
            self.deaths[task.id] = death
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
        maker: Worker | None = None
        while not self.abandoned and (entry := self.tasks.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            self._mark(task.id, 0, time.perf_counter())
            self.entry = entry
            try:
                if maker is None:
                    maker = Worker(self._job, self.info, beat=self._mark)
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
