"""Threads of the calling process that make batches."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from minloader._checks import snapshot
from minloader._memory.files import interrupts_held
from minloader._pools.base import Pool, finish
from minloader._worker.environment import Environment
from minloader._worker.messages import Job, Reply, TaskMessage, WorkerInfo
from minloader._worker.run import Worker


@dataclass(eq=False, repr=False, kw_only=True)
class ThreadPool(Pool):
    """Makes batches in daemon threads of the calling process.

    Not the standard library's executor: the interpreter would wait at exit for its threads,
    however long their batches take.

    Args:
        job: what the threads make batches from.
    """

    job: Job
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads: list[threading.Thread] = []
        self._leaving: list[threading.Thread] = []  # with a queue of their own, which has an end
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Not a WeakSet: a future that the consumer lets go of would run Python in its thread, and
        # CPython drops a Ctrl-C that comes there.
        self.unfinished: set[Future[Reply]] = set()
        self._lock = threading.RLock()  # who closes the loader may not be who draws from it
        self._closed = False

    def start(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            missing = self.infos[len(self._threads) :]
            with interrupts_held() if missing else nullcontext():  # one would be known to nobody
                for info in missing:
                    self._threads.append(_start_thread(self.job, replace(info), self._tasks))

    def submit(self, task: TaskMessage) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self.start()
            self.unfinished.add(future)
            future.add_done_callback(self.unfinished.discard)
            self._tasks.put((future, task))
        return future

    def replace_workers(self) -> None:
        # A Ctrl-C in the middle would leave threads that were told to go, and are taken for there.
        with self._lock, interrupts_held():
            for _ in self._threads:
                self._tasks.put(None)
            self._leaving = [each for each in self._leaving if each.is_alive()] + self._threads
            self._threads = []
            self._tasks = queue.SimpleQueue()

    def leave(self) -> None:
        with self._lock:
            self._closed = True
        for future in snapshot(self.unfinished):
            if not future.cancel():
                # A thread cannot be stopped, but whoever waits for it can be told.
                finish(future, CancelledError())
        self.replace_workers()

    def end(self, deadline: float) -> None:
        for thread in self._leaving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._leaving = []


def _start_thread(job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any]) -> threading.Thread:
    """Start a worker thread. It knows the queue, not the pool, which may be collected."""
    thread = threading.Thread(
        # numpy.errstate and decimal's precision are context variables: a batch has those of its
        # consumer, as in a process. Python gives them to a thread where it was told to (from 3.14).
        target=contextvars.copy_context().run,
        args=(_make_batches, job, info, tasks),
        name=f"minloader-{info.id}",
        daemon=True,
    )
    thread.start()
    return thread


def _make_batches(job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any]) -> None:
    """Make the batches of tasks until there is None."""
    worker: Worker | None = None
    while (entry := tasks.get()) is not None:
        future, task = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if worker is None:
                worker = Worker(job, info, Environment())
            finish(future, worker.run(task))
        except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
            finish(future, error)
        del entry, future, task  # while it waits, it must not keep the last batch alive
