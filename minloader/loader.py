"""The loader: items from the sampler go down to workers, batches come back in order.

::

    |============= parent =============|              |======== worker (1 of N) ========|
     sampler -- item --> Task(ordinal, epoch, items, slot)
                           | submit                        for each item:
                           v                               seeds of its ordinal
       pending  [ f7 ][ f8 ][ f9 ] ----> call queue ---->  dataset[item], transform,
                  | popleft, wait                          collate_fn, born in the slot
                  v                                          | pack, into the slot
       Reply(batches or failures) <---- result queue <-------+
                  | unpack: views of the slot
                  v
       batch --> the consumer; when its last view dies the slot is free again

The *sampler* is read in the consumer's thread, as batches are taken, so that
``prefetch_factor x num_workers`` tasks are under way and no more. A task is one item, or a chunk
of several while batches are so quick that handing them over takes longer than making them.

The *epoch* (``epoch.py``, what ``iter(loader)`` returns) owns the deque of pending tasks. It
waits for the first (or, with ``in_order=False``, for any), refills, and turns the reply into
batches or errors. Several epochs may be under way at once: they share nothing but the pool.

The *slots* (``slots.py``) are shared memory that travels with the tasks, so that the parent never
copies a batch.

The *pool* (``pool.py``, ``spawned.py``) knows where tasks run, and replaces lost workers; the
*worker* (``worker.py``) what a task is. The job (dataset, transform, collate_fn) is shipped to
the workers once, when the loader is made (``shipping.py``).
"""

from __future__ import annotations

import logging
import os
import random
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any, Literal

from minloader import pool as pools
from minloader import shipping, transport
from minloader.collate import collate
from minloader.epoch import CLOSED, Epoch, OnError, Plan
from minloader.errors import check_int, shown
from minloader.processes import memory_limit
from minloader.samplers import BatchSampler, Repeatable
from minloader.slots import Slots
from minloader.spawned import ProcessPool
from minloader.stats import Stats
from minloader.tasks import Job, WorkerInfo

__all__ = ["Loader"]

logger = logging.getLogger("minloader")

PATIENCE = 0.5
"""Seconds that the consumer waits before it looks whether a worker is stuck."""


class Loader:
    """Iterates over batches that workers make.

    Each ``iter(loader)`` is a new epoch, on the same workers; an epoch left early leaves
    nothing behind. All arguments but the first two go by name.

    Args:
        dataset: an object with ``__getitem__``: batch = ``dataset[item]``; or else a callable:
            batch = ``dataset(item)``.
        sampler: iterable of items, read lazily in this process. None: ``range(len(dataset))``,
            grouped by ``batch_size`` if that is given.
        num_workers: how many workers; 0 makes every batch in the calling process, in ``next``.
        prefetch_factor: tasks under way per worker.
        batch_size: make a :class:`BatchSampler` of this size, in place of a sampler.
        shuffle: visit the dataset in another order each epoch, in place of a sampler.
        last_batch: what to do with an incomplete last batch of ``batch_size``: "keep",
            "discard", or "rollover" into the next epoch.
        transform: called in the worker with each sample, or with the batch where nothing is
            collated.
        collate_fn: called in the worker with the list of samples ``[dataset[i] for i in
            item]`` (or ``dataset.__getitems__(item)``). An item that is a list of lists gives
            the list of one batch for each. None: :func:`collate` with ``batch_size``, nothing
            otherwise.
        executor: "process", "thread", or a ``concurrent.futures.Executor``, which stays the
            caller's to shut down.
        mp_context: how "process" starts its workers, a ``multiprocessing`` context or the name
            of one. None: "spawn".
        worker_init_fn: called once in each worker with its :class:`WorkerInfo`.
        seed: non-negative int that all randomness derives from, together with epoch and
            ordinal of a batch. None: draw one, kept in ``loader.seed``.
        in_order: yield batches in the sampler's order; False: as they get ready.
        timeout: seconds that a batch may run, from when a worker begins with it. Then its worker
            is killed with all it started, and the batch is tried again; past ``retries`` it
            fails with :class:`BatchTimeout`. A thread cannot be killed: the batch fails at
            once, and the thread is left alone. With ``num_workers=0`` nobody is there to look.
        retries: how often a batch is tried again whose worker process died while making it,
            before it fails with :class:`WorkerDied`.
        on_error: what an exception that makes a batch fail does: "raise" it from ``next``
            (the one after goes on with the next batch), "skip" the batch with a warning in the
            log, or a callable that is given a :class:`BatchError` here and returns a batch in its
            place, or :data:`SKIP`, or raises.
        shared_memory: whether batches travel in shared memory; an int: the most bytes to hold
            there. True: half of what is free. Past that, batches come through a pipe, slower.
        worker_memory_limit: bytes of memory of its own past which a worker process is replaced,
            between batches (all workers are, together). None: no limit.

    Attributes:
        epoch: number that the next ``iter(loader)`` will have.
        seed: the seed in use.

    Raises:
        TypeError: an argument is of the wrong kind, or cannot be sent to the workers.
        ValueError: an argument has an impossible value, or excludes another.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Iterable[Any] | None = None,
        *,
        num_workers: int = 1,
        prefetch_factor: int = 2,
        batch_size: int | None = None,
        shuffle: bool = False,
        last_batch: Literal["keep", "discard", "rollover"] = "keep",
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        executor: Literal["process", "thread"] | Executor = "process",
        mp_context: BaseContext | str | None = None,
        worker_init_fn: Callable[[WorkerInfo], Any] | None = None,
        seed: int | None = 0,
        in_order: bool = True,
        timeout: float | None = None,
        retries: int = 1,
        on_error: OnError = "raise",
        shared_memory: bool | int = True,
        worker_memory_limit: int | None = None,
    ) -> None:
        num_workers = check_int("num_workers", num_workers, 0)
        depth = check_int("prefetch_factor", prefetch_factor, 1) * num_workers
        seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.seed = check_int("seed", seed, 0)
        timeout = _check_timeout(timeout, executor)
        retries = check_int("retries", retries, 0)
        if worker_memory_limit is not None:
            check_int("worker_memory_limit", worker_memory_limit, 1)
            if executor != "process":
                raise ValueError(
                    "worker_memory_limit is for executor='process' alone, but executor is "
                    f"{shown(executor)}; drop worker_memory_limit"
                )
        budget = None
        if not isinstance(shared_memory, bool):
            budget = check_int("shared_memory", shared_memory, 0)
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ValueError(f"on_error must be 'raise', 'skip' or a callable, got {on_error!r}")
        for name, function in (
            ("transform", transform),
            ("collate_fn", collate_fn),
            ("worker_init_fn", worker_init_fn),
        ):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable or None, got {shown(function)}")
        if not hasattr(type(dataset), "__getitem__") and not callable(dataset):
            raise TypeError(
                f"dataset must have __getitem__ or be callable, got {shown(dataset)}; give it "
                "a __getitem__, or pass a function of one item"
            )

        self.dataset = dataset
        self.sampler = _make_sampler(dataset, sampler, batch_size, shuffle, last_batch, self.seed)
        self._items = Repeatable("sampler", self.sampler)
        if batch_size is not None and collate_fn is None:
            collate_fn = collate
        job = Job(
            *(dataset, transform, collate_fn, worker_init_fn, self.seed, num_workers),
            memory_limit=worker_memory_limit,
        )
        self.epoch = 0
        self._latest: Callable[[], Epoch | None] = lambda: None  # a weak reference
        self._plan = Plan(
            depth=depth,
            in_order=bool(in_order),
            retries=retries,
            patience=PATIENCE if timeout is None else min(PATIENCE, timeout / 2),
            memory_limit=worker_memory_limit,
            on_error=on_error,
            stats=Stats(),
        )

        def make_slots() -> Slots | None:  # it must not know self, or nobody would end the loader
            return Slots(budget, depth) if shared_memory else None

        self._make_pool, shipment = _plan_pool(job, executor, mp_context, make_slots, timeout)
        self._pools = [self._make_pool()]  # more than one only in a fork
        self._end = weakref.finalize(self, _end, self._pools, shipment)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._pools[-1].num_workers

    @property
    def stats(self) -> Stats:
        """How it went so far; see :class:`Stats`. A copy, as of now."""
        slots = self._pools[-1].slots
        count, size = slots.used if slots is not None else (0, 0)
        replaced = self._pools[-1].replaced
        return replace(self._plan.stats, slots=count, slot_bytes=size, replaced=replaced)

    def __len__(self) -> int:
        """Number of batches of the epoch under way, or else of the next.

        Raises:
            TypeError: the sampler has no length.
        """
        current = self._latest()
        self._tell_epoch(current.epoch if current and current.under_way else self.epoch)
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"this loader has no length, since its sampler, {shown(self.sampler)}, has none"
            ) from error

    def __iter__(self) -> Epoch:
        """Begins a new epoch; with workers, its first batches are under way on return.

        Raises:
            RuntimeError: the loader is closed, or its sampler is an iterator and used up.
        """
        if self._plan.closed:
            raise RuntimeError(CLOSED)
        self._tell_epoch(self.epoch)
        epoch = Epoch(self._plan, self._live_pool(), self.epoch, iter(self._items), self)
        self.epoch += 1
        self._latest = weakref.ref(epoch)
        return epoch

    def _tell_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, which decides its order and its seeds."""
        self.epoch = check_int("epoch", epoch, 0)

    def start(self) -> None:
        """Starts all workers now, without waiting for them, so that the first batch comes sooner.

        Raises:
            RuntimeError: the loader is closed.
        """
        if self._plan.closed:
            raise RuntimeError(CLOSED)
        self._live_pool().start()

    def close(self) -> None:
        """Ends the workers and all they started, at once, and lets the dataset's copy go.

        Runs by itself when the loader is garbage-collected and when the interpreter exits. An
        iterator still in use raises RuntimeError from then on.
        """
        self._plan.closed = True
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _live_pool(self) -> pools.Pool:
        """The pool; in a fork of the process that made the loader, one of the fork's own."""
        if self._pools[-1].pid != os.getpid():
            self._pools.append(self._make_pool())
        return self._pools[-1]


# --- arguments


def _make_sampler(
    dataset: Any,
    sampler: Iterable[Any] | None,
    batch_size: int | None,
    shuffle: bool,
    last_batch: Any,
    seed: int,
) -> Iterable[Any]:
    """The sampler itself, or one for the dataset's length."""
    if sampler is not None:
        for name, value, default in (
            ("batch_size", batch_size, None),
            ("shuffle", shuffle, False),
            ("last_batch", last_batch, "keep"),
        ):
            if value != default:
                raise ValueError(
                    f"{name}={value!r} cannot be combined with a sampler, which decides what a "
                    f"batch is; drop {name}, or drop the sampler"
                )
        if not hasattr(type(sampler), "__iter__") and not hasattr(type(sampler), "__getitem__"):
            raise TypeError(f"sampler must be iterable or None, got {shown(sampler)}")
        return sampler
    try:
        size = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"sampler is needed: the dataset, {shown(dataset)}, has no len() to make one from"
        ) from error
    if batch_size is None and not shuffle and last_batch == "keep":
        return range(size)
    return BatchSampler(size, batch_size, shuffle=shuffle, last_batch=last_batch, seed=seed)


def _plan_pool(
    job: Job,
    executor: Any,
    mp_context: BaseContext | str | None,
    make_slots: Callable[[], Slots | None],
    timeout: float | None,
) -> tuple[Callable[[], pools.Pool], shipping.Shipment | None]:
    """How to make the pool, and the job shipped, if it must leave this process."""
    if executor not in ("process", "thread") and not isinstance(executor, Executor):
        raise ValueError(
            "executor must be 'process', 'thread' or a concurrent.futures.Executor, got "
            f"{shown(executor)}"
        )
    if mp_context is not None and executor != "process":
        raise ValueError(
            f"mp_context={mp_context!r} is for executor='process' alone, but executor is "
            f"{shown(executor)}; drop mp_context"
        )
    if mp_context is None or isinstance(mp_context, str):
        try:
            context: BaseContext = get_context(mp_context or "spawn")
        except ValueError as error:
            raise ValueError(f"mp_context: {error}, got {mp_context!r}") from error
    elif isinstance(mp_context, BaseContext):
        context = mp_context
    else:
        raise TypeError(f"mp_context must be a multiprocessing context, got {shown(mp_context)}")

    owner = os.getpid()
    if job.num_workers == 0:
        return (lambda: pools.InlinePool(job)), None
    if executor == "thread":
        return (lambda: pools.ThreadPool(job, job.num_workers, timeout)), None
    if isinstance(executor, Executor) and pools.is_in_process(executor):
        return (lambda: pools.ForeignPool(job, None, executor, owner, None)), None
    shipment = _ship(job)
    _check_room(shipment, job)
    if isinstance(executor, Executor):
        return (lambda: pools.ForeignPool(job, shipment, executor, owner, make_slots())), shipment
    return (
        lambda: ProcessPool(shipment, job.num_workers, context, make_slots(), timeout)
    ), shipment


def _check_timeout(timeout: Any, executor: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, got {shown(timeout)}")
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}; None for no limit")
    if isinstance(executor, Executor):
        raise ValueError(
            "timeout needs workers that can be watched, but those of an executor of your own "
            "cannot; drop timeout, or use executor='process' or 'thread'"
        )
    return float(timeout)


WORKER_BYTES = 50 << 20
"""Bytes of memory that a worker takes which imports numpy and does little else."""


def _check_room(shipment: shipping.Shipment, job: Job) -> None:
    """Warns if the workers can be expected to be killed for want of memory."""
    limit = memory_limit()
    needed = shipment.size + job.num_workers * (job.memory_limit or WORKER_BYTES)
    if needed > limit:
        logger.warning(
            "the dataset (%d bytes) and %d workers need some %d bytes of memory, but the control "
            "group of this process allows %d: the kernel may kill workers; use fewer, or a "
            "dataset that reads from files",
            *(shipment.size, job.num_workers, needed, limit),
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


def _end(live: list[pools.Pool], shipment: shipping.Shipment | None) -> None:
    """What is left to do when a loader goes, by close(), garbage collection or exit."""
    for pool in live:
        pool.close()
    if shipment is not None:
        shipment.close()
