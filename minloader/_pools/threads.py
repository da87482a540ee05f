"""Threads of the calling process that make batches."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from minloader._errors import breaks_in
from minloader._pools.base import POOL_CLOSED, Pool
from minloader._pools.interrupts import interrupts_held
from minloader._pools.ticket import Bell, Ticket
from minloader._protocols import snapshot
from minloader._worker.environment import Environment
from minloader._worker.make import make_worker
from minloader._worker.messages import Job, TaskMessage, WorkerInfo
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
        # Not a WeakSet: a ticket that the consumer lets go of would run Python in its thread, and
        # CPython drops a Ctrl-C that comes there.
        self.unfinished: set[Ticket] = set()
        self._lock = threading.RLock()  # who closes the loader may not be who draws from it
        self._closed = False

    def start(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(POOL_CLOSED)
            missing = self.infos[len(self._threads) :]
            with interrupts_held() if missing else nullcontext():  # one would be known to nobody
                for info in missing:
                    args = self.job, replace(info), self._tasks, self.unfinished
                    self._threads.append(_start_thread(*args))

    def submit(self, task: TaskMessage, bell: Bell) -> Ticket:
        ticket = Ticket(bell, task)
        try:
            with self._lock:
                ticket.task = self.pack(task)
                self.start()
                self.unfinished.add(ticket)
                self._tasks.put(ticket)
        except Exception as error:  # no threads
            if breaks_in(error):
                raise
            ticket.step = "sending"
            ticket.fail(error)
        return ticket

    def replace_workers(self) -> None:
        # A Ctrl-C in the middle would leave threads that were told to go, and are taken for there.
        with self._lock, interrupts_held():
            for _ in self._threads:
                self._tasks.put(None)
            self._leaving = [each for each in self._leaving if each.is_alive()] + self._threads
            self._threads = []
            self._tasks = queue.SimpleQueue()

    def leave(self, deadline: float) -> None:
        with self._lock:
            self._closed = True
        for ticket in snapshot(self.unfinished):
            # A thread cannot be stopped, but whoever waits for it can be told.
            ticket.fail(CancelledError())
        self.replace_workers()

    def end(self, deadline: float) -> None:
        for thread in self._leaving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._leaving = []


def _start_thread(
    job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any], unfinished: set[Ticket]
) -> threading.Thread:
    """Start a worker thread. It knows the queue, not the pool, which may be collected."""
    thread = threading.Thread(
        # numpy.errstate and decimal's precision are context variables: a batch has those of its
        # consumer, as in a process. Python gives them to a thread where it was told to (from 3.14).
        target=contextvars.copy_context().run,
        args=(_make_batches, job, info, tasks, unfinished),
        name=f"minloader-{info.id}",
        daemon=True,
    )
    thread.start()
    return thread


def _make_batches(
    job: Job, info: WorkerInfo, tasks: queue.SimpleQueue[Any], unfinished: set[Ticket]
) -> None:
    """Make the batches of tasks until there is None."""
    worker: Worker | None = None
    while (ticket := tasks.get()) is not None:
        try:
            if ticket.is_dropped or ticket.is_done:
                continue
            if worker is None:
                worker = make_worker(job, info, Environment())
            ticket.finish(worker.run(ticket.task))
        except BaseException as error:  # sys.exit() in a dataset: the consumer's to see
            ticket.fail(error)
        finally:
            unfinished.discard(ticket)
            del ticket  # while it waits, it must not keep the last batch alive
