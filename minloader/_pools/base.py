"""The protocol of all pools, and the one that makes batches in the calling process.

A pool runs tasks: here, in threads (``threads.py``), in worker processes of our own
(``processes.py``), or in an executor that the user brings (``foreign.py``). An epoch drives all of
them alike, through :class:`Pool`, from the parent.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from minloader._checks import snapshot
from minloader._memory.pickling import pack
from minloader._memory.slots import Slots
from minloader._worker.environment import InlineEnvironment
from minloader._worker.messages import Job, Reply, TaskMessage, WorkerInfo
from minloader._worker.run import Worker
from minloader._worker.seeds import in_turn

logger = logging.getLogger("minloader")

GRACE = 0.5
"""Seconds that workers get to finish and leave by themselves, with their exit handlers, before
they are killed. An idle worker needs about 0.05; a longer wait would delay Ctrl-C."""


class Death(NamedTuple):
    """How a worker ended that was running a task.

    Attributes:
        item: index of the item of the task that it was making; -1: it was on its way to the
            first, making a stream ready or reading it again.
        worker: its id.
        pid: its process.
        exitcode: of the process; None if it is not known, or lives.
        cause: the same in words.
        stack: Python stack if we killed it, for taking too long or standing still; None: it died
            by itself.
        sample_number: of the sample in the item; -1 if it is not known.
        crash: Python stack from the moment of a segmentation fault or the like; "" without one.
    """

    item: int
    worker: int
    pid: int
    exitcode: int | None
    cause: str
    stack: str | None
    sample_number: int = -1
    crash: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class Pool:
    """Runs tasks somewhere.

    Attributes:
        infos: what each worker is told about where it runs, by its index in the pool; new ones are
            for :meth:`replace_workers` to bring in.
        slots: shared memory for the batches; None where they need or want none.
        pid: process the pool belongs to. A fork of it must make one of its own.
        replaces: whether lost workers are replaced, so that lost tasks can be sent again.
        task_ids: gives the next task its id.
        replaced: how many workers were replaced so far.
    """

    infos: list[WorkerInfo]
    slots: Slots | None = None
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.pid = os.getpid()
        self.task_ids = itertools.count(1)
        self.replaced = 0

    @property
    def num_workers(self) -> int:
        """How many tasks can run at once; 0 if submitting runs the task."""
        return len(self.infos)

    def hold(self, item: Any) -> Any:
        """Keep an item as it is now; the sampler may change it when it is asked for the next."""
        return item if type(item) in UNCHANGEABLE else _copied(item)

    def pack(self, task: TaskMessage) -> TaskMessage:
        """Make a task fit for where it goes; items may have been held for workers elsewhere.

        The dataset may change what it is given, and the task be sent again.
        """
        if task.shard is not None or UNCHANGEABLE.issuperset(map(type, task.items)):
            return task
        items = [each.item if type(each) is HeldItem else each for each in task.items]
        return task._replace(items=[_copied(each) for each in items])

    def submit(self, task: TaskMessage) -> Future[Reply]:
        """Hand one packed task over.

        Raises:
            BrokenExecutor: the workers are gone and cannot be replaced.
            RuntimeError: the pool is closed.
            OSError: the system allows no more processes or descriptors.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start all workers now rather than with their first task. Does not wait for them."""

    def watch(self) -> None:
        """Look for workers that are stuck. Called now and then while somebody waits."""

    def end_broken(self) -> None:
        """End what has broken or left, for up to two seconds; lost tasks' futures have an error."""

    def take_death(self, task_id: int) -> Death | None:
        """Return how the worker ended that was running a lost task, once; None if none was."""
        return None

    def forgive_failed_starts(self) -> None:
        """Try again to start workers, however often that has failed.

        The machine may have recovered: an epoch begins, or a batch was made.
        """

    def is_death(self, error: BaseException) -> bool:
        """Whether the error of a future says no more than that workers died, and others live."""
        return False

    def renew(self, pid: int, why: str) -> None:
        """Replace a worker that takes too much memory, when it has done what it was given.

        Args:
            pid: its process.
            why: said to the user.
        """

    def replace_workers(self) -> None:
        """Let the workers leave when they have done what they were given.

        Tasks that are submitted later go to others, which are told what ``infos`` has then.
        """

    def needs(self, thread: threading.Thread) -> bool:
        """Whether a thread serves the workers, and must not itself wait for their end."""
        return False

    def leave(self) -> None:
        """Ask the workers to leave; the first half of closing. Does not wait."""

    def end(self, deadline: float) -> None:
        """Wait for them until ``deadline`` (monotonic clock), then kill; the second half."""
        if self.slots is not None:
            self.slots.close()

    def close(self) -> None:
        """End the workers, whatever they are doing. Harmless when repeated, or in a fork."""
        close_pools([self])


def finish(future: Future[Reply], outcome: Reply | BaseException) -> bool:
    """Give a future its outcome. Return whether it had none yet: who closes may be first."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return False
    return True


def close_pools(pools: Iterable[Pool]) -> None:
    """Close those pools that belong to this process, all within one GRACE."""
    deadline = time.monotonic() + GRACE
    ours = [pool for pool in snapshot(pools) if pool.pid == os.getpid()]
    for pool in ours:
        pool.leave()
    for pool in ours:
        pool.end(deadline)


UNCHANGEABLE = frozenset({int, float, str, bool, type(None)})
"""Types of items that need not be pickled by themselves: nobody can change them."""


def _as_is(item: Any) -> Any:
    return item


def _deeply(item: Any) -> Any:
    """Return a copy of any item, or the item if it cannot be copied, or is a function."""
    if callable(item):  # the copy of a method would be of a copied object
        return item
    try:
        return copy.deepcopy(item)
    except Exception as error:
        logger.debug("an item cannot be copied: %r", error)
        return item


def _copied(item: Any, other: Callable[[Any], Any] = _deeply) -> Any:
    """Return a copy of an item, which a sampler may fill again, and a dataset may change.

    Args:
        item: an item, or a part of one.
        other: copies what is none of the usual containers.
    """
    kind = type(item)
    if kind in UNCHANGEABLE:
        return item
    if kind is list:
        plain = UNCHANGEABLE.issuperset(map(type, item))
        return item[:] if plain else [_copied(each, other) for each in item]
    if kind is tuple:
        plain = UNCHANGEABLE.issuperset(map(type, item))
        return item if plain else tuple([_copied(each, other) for each in item])
    if kind is dict:
        return {key: _copied(value, other) for key, value in item.items()}
    if kind is bytearray or kind is set or (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return item.copy()
    return other(item)


class HeldItem:
    """An item, and its pickle from when the sampler gave it.

    Attributes:
        item: a copy of it; of an object that is none of the usual containers, itself, which the
            sampler may fill again.
    """

    def __init__(self, item: Any) -> None:
        self.item = _copied(item, _as_is)
        self._packed: bytes | None = None
        try:
            self._packed = pack(self.item, down=True)
        except Exception:  # raised again where it can be reported, below
            return

    def pack(self) -> bytes:
        return pack(self.item, down=True) if self._packed is None else self._packed


class RemotePool(Pool):
    """A pool whose tasks leave this process, or may do so later: items are pickled."""

    def hold(self, item: Any) -> Any:
        if type(item) in UNCHANGEABLE or type(item) is HeldItem:
            return item
        return HeldItem(item)

    def pack(self, task: TaskMessage) -> TaskMessage:
        items = [each.pack() if type(each) is HeldItem else each for each in task.items]
        return task._replace(items=items)


@dataclass(eq=False, repr=False, kw_only=True)
class InlinePool(Pool):
    """Makes each batch in the calling process, when it is submitted.

    Args:
        job: what to make batches from.
    """

    job: Job
    _worker: Worker | None = None

    @property
    def num_workers(self) -> int:
        return 0

    def submit(self, task: TaskMessage) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(in_turn(self._run, task))
        return future

    def _run(self, task: TaskMessage) -> Reply:
        if self._worker is None:
            self._worker = Worker(self.job, replace(self.infos[0]), InlineEnvironment())
        return self._worker.run(task)

    def replace_workers(self) -> None:
        if self._worker is not None:
            in_turn(self._worker.readers.rewind)  # those that come are sent the user's own object

    def end(self, deadline: float) -> None:
        super().end(deadline)
        self._worker = None  # a stream that was left has files open, or programs
