"""The pools of a loader: one, or for a stream one for each worker, so that a worker can be told
apart. They are made when they are needed, resized, replaced in a fork, and closed together.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from minloader._formats import format_bytes
from minloader._memory import forks
from minloader._memory.files import can_be_nameless
from minloader._memory.job_file import ForkedJob, JobFile
from minloader._memory.limits import memory_limit
from minloader._memory.slots import Slots
from minloader._pools.base import Pool, close_pools, leave_pools
from minloader._pools.processes import ProcessPool
from minloader._protocols import snapshot
from minloader._worker.messages import Job, WorkerInfo
from minloader._worker.plugins import Plugin

logger = logging.getLogger("minloader")

WORKER_BYTES = 50 << 20
"""Bytes of memory that a worker takes which imports numpy and does little else."""

MOST_GROWTH = 50 << 20
"""Bytes by which views of an array may grow on their way to the workers before the log says so."""


class EpochUnderWay(Protocol):
    """An epoch, as a pool group sees it: it has tasks under way in some pools."""

    @property
    def pools(self) -> list[Pool]: ...
    @property
    def passes(self) -> list[int]: ...
    @property
    def in_flight(self) -> int: ...


@dataclass(eq=False, repr=False, kw_only=True)
class PoolGroup:
    """The workers of a loader. It knows nothing of the loader, which ends it when it goes. For an
    executor of the user's there is another, in ``_foreign/pool.py``.

    Attributes:
        job: what the workers work on; sent to them once, or had by fork.
        executor: where they are.
        context: how processes are started.
        budget: most bytes of shared memory; None for a share of what is free, 0 for none.
        timeout: seconds that a batch may take.
        num_workers: how many; 0 for this process itself.
        prefetch_factor: tasks under way for each.
        seed: the loader's.
        sent: the job, as workers get it; None before any needs it.
        plugins: what hangs on the worker processes that are started from now on.
        epochs: of the loader, which may have tasks under way.
        max_in_flight: most tasks under way at once; 0 if submitting one runs it.
    """

    job: Job
    executor: Any
    context: BaseContext
    budget: int | None
    timeout: float | None
    num_workers: int
    prefetch_factor: int
    seed: int
    sent: JobFile | ForkedJob | None = None
    plugins: list[Plugin] = field(default_factory=list)
    epochs: weakref.WeakSet[EpochUnderWay] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self._pools: list[Pool] = []  # those that take tasks; none in a fork, at first
        self._former: list[Pool] = []  # those that may still have some
        self._replaced = 0  # workers of pools that are closed
        self._count_workers(self.num_workers)
        self._make_pools()
        forks.told.add(self)

    def _count_workers(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.max_in_flight = self.prefetch_factor * num_workers

    @property
    def pools(self) -> list[Pool]:
        """The pools that take tasks; in a fork of the process that made them, the fork's own."""
        if not self._pools:
            self._make_pools()
        return self._pools

    def pool(self, shard: int = 0) -> Pool:
        """Return the pool for tasks of a shard."""
        pools = self._pools or self.pools
        return pools[shard % len(pools)]

    def resize(self, num_workers: int) -> None:
        """Change the number of workers. What is under way is finished by those who have it."""
        former = self.num_workers
        self._count_workers(num_workers)
        if not self._is_stream and former and num_workers:
            # The same pool goes on, so that an epoch need not wait for its tasks to be done.
            pool = self.pool()
            pool.infos = self._infos(0)
            if pool.slots is not None:
                pool.slots.max_in_flight = self.max_in_flight
            pool.replace_workers()
            return
        try:
            # A worker that has begun with a shard goes on with it, where that can be.
            self._make_pools(keep=min(former, num_workers))
        except BaseException:
            self._count_workers(former)
            raise

    def reseed(self, seed: int) -> None:
        """Change the seed; workers that were told the former one leave."""
        former = self.seed
        self.seed = seed
        try:
            if seed != former:
                self._make_pools()
        except BaseException:
            self.seed = former
            raise

    @property
    def kind(self) -> str:
        """Where tasks run: "inline", "process", "thread" or "foreign"."""
        return str(self.executor) if self.num_workers else "inline"

    @property
    def in_flight(self) -> int:
        """Tasks under way now. For any thread to ask."""
        return sum(each.in_flight for each in snapshot(self.epochs))

    def passes(self) -> list[int]:
        """Return the numbers of the passes over shards that may still be read on."""
        return [number for each in snapshot(self.epochs) for number in each.passes]

    @property
    def replaced(self) -> int:
        """How many workers were replaced so far."""
        return self._replaced + sum(pool.replaced for pool in self._pools + self._former)

    def start(self) -> None:
        """Start all workers now, without waiting for them."""
        for pool in self.pools:
            pool.start()

    def tidy(self) -> None:
        """Close pools that nobody uses any more."""
        used = {id(pool) for each in snapshot(self.epochs) for pool in each.pools}
        for pool in list(self._former):
            if id(pool) not in used:
                pool.close()
                with suppress(ValueError):  # another thread was first
                    self._former.remove(pool)
                    self._replaced += pool.replaced

    def close(self) -> None:
        """End all workers, whatever they are doing, and let the job go."""
        try:
            close_pools(self._former + self._pools)
        except BaseException:  # Ctrl-C: nobody asks again, and they end by themselves
            leave_pools(self._former + self._pools, 0.0)
            raise
        finally:
            if self.sent is not None:
                self.sent.close()

    @property
    def _count(self) -> int:
        return max(1, self.num_workers) if self._is_stream else 1

    @property
    def _is_stream(self) -> bool:
        return self.job.options.is_stream

    def _make_pools(self, keep: int = 0) -> None:
        kept = self._pools[:keep]
        former = self._pools[keep:]
        pools = kept + [self._make_pool(index) for index in range(len(kept), self._count)]
        for pool in former:
            pool.replace_workers()
        for pool in kept:
            if pool.slots is not None:
                pool.slots.divide(self._count)
        self._former += former
        self._pools = pools

    def _infos(self, index: int) -> list[WorkerInfo]:
        """Return what the workers of a pool are told."""
        # Of a stream, each worker has a pool of its own.
        numbers = [index] if self._is_stream else [*range(max(1, self.num_workers))]
        return [
            WorkerInfo(id=n, num_workers=self.num_workers, pid=os.getpid(), seed=self.seed)
            for n in numbers
        ]

    def _make_pool(self, index: int) -> Pool:
        infos = self._infos(index)
        if not self.num_workers:
            from minloader._pools.inline import InlinePool  # it loads what makes batches

            return InlinePool(infos=infos, job=self.job)
        slots = None
        if self.kind != "thread":
            if self.sent is None:
                self.send_job()
            if self.budget != 0 and self.is_local and can_be_nameless():
                count = self._count
                slots = Slots(self.budget, self.max_in_flight // count, share=count)
        return self.new_pool(infos, slots)

    def new_pool(self, infos: list[WorkerInfo], slots: Slots | None) -> Pool:
        """Make the pool of some workers."""
        if self.sent is None:
            from minloader._pools.threads import ThreadPool  # other loaders have none

            return ThreadPool(infos=infos, job=self.job)
        return ProcessPool(
            infos=infos,
            slots=slots,
            job=self.sent,
            context=self.context,
            timeout=self.timeout,
            plugins=self.plugins,
        )

    @property
    def is_local(self) -> bool:
        """Whether processes are known to be on this machine, and each task to run once."""
        return True

    @property
    def start_method(self) -> str | None:
        """How processes are started; None if that is not for us to do."""
        return self.context.get_start_method()

    def send_job(self) -> JobFile | ForkedJob:
        """Serialize the job, unless workers are forked; look whether they have room here."""
        start_method = self.start_method
        if start_method == "fork":
            if self.sent is None:  # it is said once
                self._look_for_room(0)
            import minloader._worker.start  # noqa: F401  # which those that are forked have then

            self.sent = ForkedJob(self.job)
            return self.sent
        sent = _serialize(self.job, start_method)
        if start_method == "forkserver":
            from minloader._pools.fork_server import start_fork_server  # not on Windows

            start_fork_server(self.context, sent.modules, self.seed)
        if self.sent is None:  # it is said once
            _look_for_growth(sent)
            if sent.generators and not self.job.options.seed_generators:
                from minloader._worker.own_generators import tell_sent  # of few

                tell_sent(self.job, sent.generators)
            if self.is_local:
                self._look_for_room(sent.size)
        self.sent = sent
        return sent

    def _look_for_room(self, size: int) -> None:
        """Warn if workers of this machine may not have room, beside a job of so many bytes.

        Forked ones share the job with their parent, where it has its room already.
        """
        limit = memory_limit()
        needed = size + self.num_workers * (self.job.options.memory_limit or WORKER_BYTES)
        if needed > limit:
            logger.warning(
                "the dataset (%d bytes) and %d workers need some %d bytes of memory, but the "
                "control group of this process allows %d: the kernel may kill workers; use fewer, "
                "or a dataset that reads from files",
                size,
                self.num_workers,
                needed,
                limit,
            )

    def begin_fork(self) -> None:
        """Have none of the parent's, in a fork; what is in this process is here, too."""
        self._pools = [each for each in self._pools if each.is_inline]
        self._former = []


def _look_for_growth(sent: JobFile) -> None:
    """Warn if views of an array became much more than it is: each is sent by itself."""
    before, after = sent.grown
    if after - before > MOST_GROWTH:
        logger.warning(
            "the dataset grew on its way to the workers: views of an array of %s, each sent by "
            "itself, take %s; let the dataset keep the array, and make a view of it when it is "
            "asked for a sample",
            format_bytes(before),
            format_bytes(after),
        )


def _serialize(job: Job, start_method: str | None) -> JobFile:
    try:
        return JobFile(job, start_method)
    except Exception as error:
        from minloader._memory.unpicklable import refusal  # only to tell of an error

        refused = refusal(job, start_method, error)
        if refused is None:
            raise
        raise refused from error
