"""The pools of a loader: one, or for a stream one for each worker, so that a worker can be told
apart. Made when they are needed, resized, replaced in a fork, and closed together.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from concurrent.futures import Executor
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from minloader import depot, shipping, transport
from minloader.errors import shown
from minloader.foreign import ForeignPool, is_in_process, is_local
from minloader.pool import GRACE, InlinePool, Pool, Terms, ThreadPool
from minloader.processes import memory_limit
from minloader.slots import Slots
from minloader.spawned import ProcessPool
from minloader.tasks import Job

__all__ = ["Crew", "check_context", "check_executor"]

logger = logging.getLogger("minloader")


class _User(Protocol):
    """Somebody who has tasks under way: an epoch."""

    @property
    def pools(self) -> list[Pool]: ...
    @property
    def in_flight(self) -> int: ...


class Crew:
    """The workers of a loader. It knows nothing of the loader, which ends it when it goes.

    Args:
        job: what they work on; sent to them once.
        executor: where they are.
        context: how processes are started.
        num_workers: how many; 0 for this process itself.
        prefetch_factor: tasks under way for each.
        seed: the loader's.
        budget: most bytes of shared memory; None for a share of what is free, 0 for none.
        timeout: seconds that a batch may take.
        streams: whether each worker needs a pool of its own.

    Attributes:
        users: who has tasks under way.
    """

    def __init__(
        self,
        job: Job,
        executor: Any,
        context: BaseContext,
        num_workers: int,
        prefetch_factor: int,
        seed: int,
        budget: int | None,
        timeout: float | None,
        *,
        streams: bool,
    ) -> None:
        self._job = job
        self._executor = executor
        self._context = context
        self._prefetch_factor = prefetch_factor
        self._seed = seed
        self._budget = budget
        self._timeout = timeout
        self._streams = streams
        self._owner = os.getpid()
        self._shipment: shipping.Shipment | None = None
        self._depot: depot.Depot | None = None
        self._pools: list[Pool] = []  # those that take tasks
        self._former: list[Pool] = []  # those that may still have some, or belong to a fork
        self._replaced = 0  # of pools that are gone
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()
        self.num_workers = num_workers
        self._make()

    @property
    def depth(self) -> int:
        """Most tasks under way at once; 0 if submitting one runs it."""
        return self._prefetch_factor * self.num_workers

    @property
    def pools(self) -> list[Pool]:
        """Those that take tasks; in a fork of the process that made them, the fork's own."""
        if self._pools[0].pid != os.getpid():
            self._make()
        return self._pools

    def pool(self, shard: int = 0) -> Pool:
        """The one for tasks of a shard."""
        pools = self.pools
        return pools[shard % len(pools)]

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers. What is under way is finished by those who have it."""
        former, self.num_workers = self.num_workers, num_workers
        if not self._streams and former and num_workers:
            pool = self.pool()
            pool.terms = self._terms(0)
            if pool.slots is not None:
                pool.slots.in_flight = self.depth
            pool.release()
            return
        try:
            # Who has begun with a shard goes on with it, where that can be.
            self._make(keep=min(former, num_workers))
        except BaseException:
            self.num_workers = former
            raise

    def reseed(self, seed: int) -> None:
        """Changes the seed; who was told the former one leaves."""
        if seed != self._seed:
            self._seed = seed
            self._make()

    @property
    def kind(self) -> str:
        """Where tasks run: "inline", "process", "thread" or "foreign"."""
        if self.num_workers == 0:
            return "inline"
        if isinstance(self._executor, Executor):
            return "thread" if is_in_process(self._executor) else "foreign"
        return str(self._executor)

    @property
    def in_flight(self) -> int:
        """Tasks under way now. For any thread to ask."""
        while True:
            try:
                return sum(user.in_flight for user in list(self.users))
            except RuntimeError:  # an epoch was begun meanwhile, in another thread
                continue

    @property
    def replaced(self) -> int:
        """How many workers were replaced so far."""
        return self._replaced + sum(pool.replaced for pool in self._pools + self._former)

    def start(self) -> None:
        for pool in self.pools:
            pool.start()

    def tidy(self) -> None:
        """Closes pools that nobody uses any more."""
        used = {id(pool) for user in self.users for pool in user.pools}
        for pool in list(self._former):
            if id(pool) not in used and pool.pid == os.getpid():
                pool.close()
                self._replaced += pool.replaced
                self._former.remove(pool)

    def close(self) -> None:
        """Ends all workers, whatever they are doing, and lets the job go."""
        deadline = time.monotonic() + GRACE
        for pool in [pool for pool in self._former + self._pools if pool.retire()]:
            pool.end(deadline)
        if self._depot is not None:
            self._depot.close()
        if self._shipment is not None:
            self._shipment.close()

    # --- making pools

    def _make(self, keep: int = 0) -> None:
        kept, former = self._pools[:keep], self._pools[keep:]
        pools = kept + [self._make_pool(index) for index in range(len(kept), self._count())]
        for pool in former:
            if pool.pid == os.getpid():
                pool.release()
        self._former += former
        self._pools = pools

    def _count(self) -> int:
        return max(1, self.num_workers) if self._streams else 1

    def _terms(self, index: int) -> Terms:
        size = min(1, self.num_workers) if self._streams else self.num_workers
        return Terms(size, self._seed, index, self.num_workers)

    def _make_pool(self, index: int) -> Pool:
        terms, executor = self._terms(index), self._executor
        if self.num_workers == 0:
            return InlinePool(terms, self._job)
        if executor == "thread":
            return ThreadPool(terms, self._job, self._timeout)
        foreign = isinstance(executor, Executor)
        if foreign and is_in_process(executor):
            return ForeignPool(terms, self._job, None, executor, self._owner, None, None)
        here = not foreign or is_local(executor)
        if self._shipment is None:
            self._shipment = _ship(self._job)
            if here:
                _check_room(self._shipment, self._job, self.num_workers)
            else:
                self._depot = depot.Depot(self._shipment)
        slots = None
        if self._budget != 0 and here:
            slots = Slots(self._budget, self.depth // self._count(), share=self._count())
        if foreign:
            shipped = self._job, self._shipment
            return ForeignPool(terms, *shipped, executor, self._owner, slots, self._depot)
        return ProcessPool(terms, self._shipment, self._context, slots, self._timeout)


def check_executor(executor: Any, *, streams: bool) -> None:
    if executor not in ("process", "thread") and not isinstance(executor, Executor):
        raise ValueError(
            "executor must be 'process', 'thread' or a concurrent.futures.Executor (of a Dask "
            f"client: client.get_executor(pure=False)), got {shown(executor)}"
        )
    if streams and isinstance(executor, Executor):
        raise ValueError(
            "an executor of your own gives a task to any of its workers, but a stream (an iterable "
            "dataset) is read on by the worker that has begun it; use executor='process' or "
            "'thread'"
        )


def check_context(mp_context: BaseContext | str | None, executor: Any) -> BaseContext:
    """The context that was asked for."""
    if mp_context is not None and executor != "process":
        raise ValueError(
            f"mp_context={mp_context!r} is for executor='process' alone, but executor is "
            f"{shown(executor)}; drop mp_context"
        )
    if isinstance(mp_context, BaseContext):
        return mp_context
    if mp_context is not None and not isinstance(mp_context, str):
        raise TypeError(f"mp_context must be a multiprocessing context, got {shown(mp_context)}")
    try:
        return get_context(mp_context or "spawn")
    except ValueError as error:
        raise ValueError(f"mp_context: {error}, got {mp_context!r}") from error


WORKER_BYTES = 50 << 20
"""Bytes of memory that a worker takes which imports numpy and does little else."""


def _check_room(shipment: shipping.Shipment, job: Job, num_workers: int) -> None:
    """Warns if the workers can be expected to be killed for want of memory."""
    limit = memory_limit()
    needed = shipment.size + num_workers * (job.memory_limit or WORKER_BYTES)
    if needed > limit:
        logger.warning(
            "the dataset (%d bytes) and %d workers need some %d bytes of memory, but the control "
            "group of this process allows %d: the kernel may kill workers; use fewer, or a "
            "dataset that reads from files",
            *(shipment.size, num_workers, needed, limit),
        )


def _ship(job: Job) -> shipping.Shipment:
    try:
        return shipping.Shipment(job)
    except Exception as error:
        for name in ("dataset", "transform", "collate_fn", "worker_init_fn"):
            found = transport.find_culprit(getattr(job, name), name)
            if found is not None:
                path, part, cause = found
                raise TypeError(
                    f"{name} cannot be sent to worker processes: {path} is a "
                    f"{type(part).__qualname__} ({cause}); make it in worker_init_fn or when it "
                    "is first used, leave it out in __getstate__, or use executor='thread'"
                ) from error
        raise
