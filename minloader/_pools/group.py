"""The pools of a loader: one, or for a stream one for each worker, so that a worker can be told
apart. Made when they are needed, resized, replaced in a fork, and closed together.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from concurrent.futures import Executor
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from minloader._memory.culprit import find_culprit
from minloader._memory.job_file import JobFile
from minloader._memory.limits import memory_limit
from minloader._memory.slots import Slots
from minloader._pools.base import GRACE, InlinePool, Pool, Terms
from minloader._pools.foreign import ForeignPool, is_in_process, is_local
from minloader._pools.job_server import JobServer
from minloader._pools.processes import ProcessPool
from minloader._pools.threads import ThreadPool
from minloader._worker.messages import Job

logger = logging.getLogger("minloader")


class _User(Protocol):
    """Somebody who has tasks under way: an epoch."""

    @property
    def pools(self) -> list[Pool]: ...
    @property
    def in_flight(self) -> int: ...


class PoolGroup:
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
        self._job_file: JobFile | None = None
        self._job_server: JobServer | None = None
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
        if self._job_server is not None:
            self._job_server.close()
        if self._job_file is not None:
            self._job_file.close()

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
        if self._job_file is None:
            self._job_file = _ship(self._job)
            if here:
                _check_room(self._job_file, self._job, self.num_workers)
            else:
                self._job_server = JobServer(self._job_file)
        slots = None
        if self._budget != 0 and here:
            slots = Slots(self._budget, self.depth // self._count(), share=self._count())
        if foreign:
            shipped = self._job, self._job_file
            return ForeignPool(terms, *shipped, executor, self._owner, slots, self._job_server)
        return ProcessPool(terms, self._job_file, self._context, slots, self._timeout)


WORKER_BYTES = 50 << 20

"""Bytes of memory that a worker takes which imports numpy and does little else."""


def _check_room(job_file: JobFile, job: Job, num_workers: int) -> None:
    """Warns if the workers can be expected to be killed for want of memory."""
    limit = memory_limit()
    needed = job_file.size + num_workers * (job.memory_limit or WORKER_BYTES)
    if needed > limit:
        logger.warning(
            "the dataset (%d bytes) and %d workers need some %d bytes of memory, but the control "
            "group of this process allows %d: the kernel may kill workers; use fewer, or a "
            "dataset that reads from files",
            *(job_file.size, num_workers, needed, limit),
        )


def _ship(job: Job) -> JobFile:
    try:
        return JobFile(job)
    except Exception as error:
        for name in ("dataset", "transform", "collate_fn", "worker_init_fn"):
            found = find_culprit(getattr(job, name), name)
            if found is not None:
                path, part, cause = found
                raise TypeError(
                    f"{name} cannot be sent to worker processes: {path} is a "
                    f"{type(part).__qualname__} ({cause}); make it in worker_init_fn or when it "
                    "is first used, leave it out in __getstate__, or use executor='thread'"
                ) from error
        raise
