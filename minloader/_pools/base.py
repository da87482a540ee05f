"""Where batches are made: in the calling process, in threads, in processes of our own
(``spawned.py``), or in an executor that the user brings (``foreign.py``). All are driven alike,
through :class:`Pool`, from the parent.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from concurrent.futures import (
    Future,
)
from typing import Any, NamedTuple

from minloader._memory.pickling import pack
from minloader._memory.slots import Slots
from minloader._worker.messages import Job, Reply, Task, WorkerInfo
from minloader._worker.run import Worker
from minloader._worker.seeds import borrow_globals

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
        deaths: what became of the worker, for each lost task that was being run by it.
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
        self.deaths: dict[int, Death] = {}
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


class Death(NamedTuple):
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
            self._packed = pack(item, down=True)
        except Exception:  # raised again where it can be reported, below
            return

    def pack(self) -> bytes:
        return pack(self.item, down=True) if self._packed is None else self._packed


def packed(task: Task) -> Task:
    return task._replace(items=[held.pack() for held in task.items], packed=True)


class InlinePool(Pool):
    """Makes each batch in the calling process, when it is submitted."""

    def __init__(self, terms: Terms, job: Job) -> None:
        super().__init__(terms)
        self._job = job
        self._worker: Worker | None = None

    def submit(self, task: Task) -> Future[Reply]:
        if self._worker is None:
            info = self.terms.info(0)
            self._worker = Worker(self._job, info, seed=borrow_globals)
        future: Future[Reply] = Future()
        future.set_result(self._worker.run(task))
        return future
