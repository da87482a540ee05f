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

The *epoch* (:class:`_Epoch`, what ``iter(loader)`` returns) owns the deque of pending tasks. It
waits for the first (or, with ``in_order=False``, for any), refills, and turns the reply into
batches or errors. Several epochs may be under way at once: they share nothing but the pool.

The *slots* (``slots.py``) are shared memory that travels with the tasks, so that the parent never
copies a batch.

The *pool* (``pool.py``) knows where tasks run; the *worker* (``worker.py``) what a task is. The
job (dataset, transform, collate_fn) is shipped to the workers once, when the loader is made
(``shipping.py``).
"""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple

from minloader import pool as pools
from minloader import shipping, transport
from minloader.collate import collate
from minloader.errors import (
    SKIP,
    BatchError,
    BatchTimeout,
    WorkerDied,
    WorkerTraceback,
    check_int,
    shown,
)
from minloader.processes import memory_limit
from minloader.samplers import BatchSampler, Repeatable
from minloader.slots import Slot, Slots
from minloader.stats import Stats
from minloader.worker import CHUNK_SECONDS, Failure, Job, Reply, Task, WorkerInfo

__all__ = ["Loader"]

logger = logging.getLogger("minloader")

PATIENCE = 0.5
"""Seconds that the consumer waits before it looks whether a worker is stuck."""

CHUNK_MOST = 128
"""Most batches in a task: an executor's 150 µs are some 1 µs a batch then, less than seeding."""

CHUNK_BYTES = 512 * 1024
"""Most bytes that the batches of a task of several should have: who keeps one of them keeps the
memory of all."""

CLOSED = "this Loader is closed; make a new one"

OnError = Literal["raise", "skip"] | Callable[[BatchError], Any]


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
        depth = self._depth = check_int("prefetch_factor", prefetch_factor, 1) * num_workers
        seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.seed = check_int("seed", seed, 0)
        timeout = _check_timeout(timeout, executor)
        self._retries = check_int("retries", retries, 0)
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
        self._in_order = bool(in_order)
        self._on_error = on_error
        self._latest: Callable[[], _Epoch | None] = lambda: None  # a weak reference
        self._closed = False
        self._stats = Stats()

        def make_slots() -> Slots | None:  # it must not know self, or nobody would end the loader
            return Slots(budget, depth) if shared_memory else None

        self._memory_limit = worker_memory_limit
        self._patience = PATIENCE if timeout is None else min(PATIENCE, timeout / 2)
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
        return replace(self._stats, slots=count, slot_bytes=size, replaced=replaced)

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

    def __iter__(self) -> _Epoch:
        """Begins a new epoch; with workers, its first batches are under way on return.

        Raises:
            RuntimeError: the loader is closed, or its sampler is an iterator and used up.
        """
        if self._closed:
            raise RuntimeError(CLOSED)
        self._tell_epoch(self.epoch)
        epoch = _Epoch(self, self.epoch, iter(self._items))
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
        if self._closed:
            raise RuntimeError(CLOSED)
        self._live_pool().start()

    def close(self) -> None:
        """Ends the workers and all they started, at once, and lets the dataset's copy go.

        Runs by itself when the loader is garbage-collected and when the interpreter exits. An
        iterator still in use raises RuntimeError from then on.
        """
        self._closed = True
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


class _Pending(NamedTuple):
    """A task under way, as the sampler gave it; one without items is the sampler's own error."""

    task: Task
    future: Future[Reply]
    slot: Slot | None = None


class _Opened(NamedTuple):
    """A reply whose batches are being delivered, and the memory that they may lie in."""

    task: Task
    reply: Reply
    memory: Any


class _Epoch:
    """Iterator over the batches of one epoch. Goes on after an error."""

    def __init__(self, loader: Loader, epoch: int, items: Iterator[Any]) -> None:
        self._loader = loader
        self._pool = loader._live_pool()
        self.epoch = epoch
        self._items: Iterator[Any] | None = items
        self._ordinal = 0
        self._chunk = 1  # items a task
        self._pending: deque[_Pending] = deque()
        self._opened: _Opened | None = None
        self._next = 0  # of its outcomes
        self._tries: dict[int, int] = {}  # by ordinal: workers that died making it
        self._losses = self._pool.losses()
        self._pool.failed_starts.clear()  # the machine may have recovered
        self._look = 0.0  # when to look after the workers next
        self._fill(loader._depth)

    @property
    def under_way(self) -> bool:
        """Whether there may be batches to come."""
        return self._items is not None or bool(self._pending or self._opened)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        depth = self._loader._depth
        while True:
            if self._loader._closed:
                raise RuntimeError(CLOSED)
            if self._opened is None:
                self._fill(max(depth, 1))
                if not self._pending:
                    raise StopIteration
                self._open(self._wait())
                self._fill(depth)  # before the consumer gets to work
            if self._opened is not None:
                batch = self._result(self._opened)
                if batch is not SKIP:
                    self._loader._stats.batches += 1
                    return batch

    def __del__(self) -> None:
        # Left early: what is queued need not run. What runs, runs to its end, unseen.
        for pending in getattr(self, "_pending", ()):
            pending.future.cancel()
            if pending.slot is not None and self._pool.slots is not None:
                pending.future.add_done_callback(partial(_abandon, self._pool.slots, pending.slot))

    # --- down

    def _fill(self, depth: int) -> None:
        """Draws items and submits them until ``depth`` tasks are under way."""
        while self._items is not None and len(self._pending) < depth:
            items, error = self._draw(self._items)
            if items:
                task = Task(self._ordinal, self.epoch, items)
                self._ordinal += len(items)
                self._pending.append(self._submit(task))
            if error is not None:
                # In its turn: the batches before it come first.
                failed: Future[Reply] = Future()
                failed.set_exception(error)
                self._pending.append(_Pending(Task(self._ordinal, self.epoch, []), failed))

    def _draw(self, source: Iterator[Any]) -> tuple[list[Any], Exception | None]:
        """Items for a task, and the sampler's error if that is what it gave next."""
        items: list[Any] = []
        deadline = time.perf_counter() + CHUNK_SECONDS  # a slow sampler must not hold them up
        try:
            while not items or (len(items) < self._chunk and time.perf_counter() < deadline):
                items.append(next(source))
        except StopIteration:
            self._items = None
        except Exception as error:
            return items, error
        return items, None

    def _submit(self, task: Task) -> _Pending:
        """Sends a task off. What goes wrong with that is found in the future, in its turn."""
        slots = self._pool.slots
        slot = None
        failed: Future[Reply] = Future()
        packed = None
        task = task._replace(id=next(self._pool.task_ids))
        try:
            packed = self._pool.pack(task)
            if slots is not None:
                slot = slots.lend()
                packed = packed._replace(slot=slots.address(slot))
            return _Pending(task, self._pool.submit(packed), slot)
        except BrokenExecutor as error:
            failed.set_exception(error)
        except Exception as error:
            if len(task.items) > 1:
                failed.set_result(Reply(-1, -1, False, []))  # one by one, then
            else:
                # An item that cannot be pickled is one batch lost; no workers to be had, all.
                stage, fatal = "when it was sent to a worker", packed is not None
                failure = Failure.of(error, packed=False, stage=stage, fatal=fatal)
                failed.set_result(Reply(-1, -1, False, [failure]))
        if slots is not None and slot is not None:
            slots.discard(slot)
        return _Pending(task, failed)

    # --- up

    def _wait(self) -> _Pending:
        """Takes the next finished task out, only then: Ctrl-C while waiting loses nothing."""
        waited = False
        while True:
            self._recover()
            waiting = [self._pending[0]] if self._loader._in_order else list(self._pending)
            for index, pending in enumerate(waiting):
                if pending.future.done():
                    del self._pending[index]
                    return pending
            if not waited and self._pool.num_workers:
                # The consumer is faster than we are: let it wait for larger pieces.
                self._chunk = min(2 * self._chunk, CHUNK_MOST)
                waited = True
            futures = [pending.future for pending in waiting]
            wait_for(futures, self._loader._patience, return_when=FIRST_COMPLETED)
            if time.monotonic() > self._look:
                self._pool.watch()
                self._look = time.monotonic() + self._loader._patience

    def _open(self, pending: _Pending) -> None:
        """Unfolds the reply to a task; what it left undone is under way again."""
        task = pending.task
        if not task.items:
            error = pending.future.exception()
            assert error is not None
            _add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")
            raise error
        memory = None
        try:
            reply = pending.future.result()
            memory = self._settle(pending, reply)
        except (CancelledError, BrokenExecutor) as error:
            if self._loader._closed:
                raise RuntimeError(CLOSED) from None
            if self._pool.replaces:  # it broke just now
                self._pending.appendleft(pending)
                return
            self._reclaim(pending)
            died = WorkerDied(f"a worker of the executor died, which is broken since: {error}")
            failure = Failure.of(died, packed=False, fatal=True)
            reply = Reply(-1, -1, False, [failure] * len(task.items))
        except Exception as error:  # of an executor that the user brought
            self._reclaim(pending)
            failure = Failure.of(error, packed=False, stage="in the executor", fatal=True)
            reply = Reply(-1, -1, False, [failure] * len(task.items))
        self._note(task, reply)
        done = len(reply.outcomes)
        self._opened = _Opened(task, reply, memory) if done else None
        self._next = 0
        # The rest goes back to where the task was; after a failure to send it, one by one.
        step = self._chunk if done else 1
        starts = range(done, len(task.items), step)
        rest = [self._submit(_part(task, n, n + step)) for n in starts]
        self._pending.extendleft(reversed(rest))

    def _recover(self) -> None:
        """Sends what was lost with its workers again, each task in its place."""
        while (losses := self._pool.losses()) != self._losses:
            self._losses = losses
            pending: deque[_Pending] = deque()
            for each in self._pending:
                lost = each.task.items and _is_lost(each.future)
                pending.extend(self._again(each) if lost else (each,))
            self._pending = pending

    def _again(self, lost: _Pending) -> Iterator[_Pending]:
        """Sends a lost task again. Only what its own worker was making counts as a try."""
        self._reclaim(lost)
        task = lost.task
        fate = self._pool.fates.pop(task.id, None)
        if fate is None:
            yield self._submit(task)
            return
        n = fate.place
        ordinal = task.ordinal + n
        if n > 0:
            yield self._submit(_part(task, 0, n))
        tries = self._tries[ordinal] = self._tries.get(ordinal, 0) + 1
        if fate.final or tries > self._loader._retries:
            failed: Future[Reply] = Future()
            error = _fatal_error(fate, ordinal, task.epoch, task.items[n], tries)
            failure = Failure.of(error, packed=False)
            failed.set_result(Reply(fate.worker, fate.pid, False, [failure]))
            yield _Pending(_part(task, n, n + 1), failed)
        else:
            self._loader._stats.retries += 1
            yield self._submit(_part(task, n, n + 1))
        if n + 1 < len(task.items):
            yield self._submit(_part(task, n + 1, len(task.items)))

    def _settle(self, pending: _Pending, reply: Reply) -> Any:
        """Memory of the slot, if the reply's batches lie there."""
        slots, slot = self._pool.slots, pending.slot
        if slots is None or slot is None:
            return None
        slots.settle(slot, reply.slot_size, reply.size)
        if any(type(outcome) is transport.Parcel for outcome in reply.outcomes):
            return slots.lease(slot, retire=reply.slot_retired)
        slots.free(slot, retire=reply.slot_retired)
        return None

    def _reclaim(self, pending: _Pending) -> None:
        """Takes back the slot of a task whose reply does not come."""
        if self._pool.slots is not None and pending.slot is not None:
            self._pool.slots.discard(pending.slot)

    def _note(self, task: Task, reply: Reply) -> None:
        """Learns from a reply how many batches the next task should hold, and how it goes."""
        made = len(reply.outcomes)
        if made:
            quick = CHUNK_SECONDS * made / (reply.seconds or 1e-9)
            small = CHUNK_BYTES * made / (reply.size or 1)
            # What was cut short was slow. Otherwise it may just have had no processor for a while.
            least = self._chunk // 2 if made == len(task.items) else 1
            self._chunk = min(self._chunk, max(1, least, int(min(quick, small))))
        stats, slots = self._loader._stats, self._pool.slots
        stats.chunk_size = self._chunk
        if reply.overflowed and not stats.overflowed and slots is not None:
            count, total = slots.used
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower "
                "(%d slots hold or may take %d of %d bytes); let go of batches sooner, or set "
                "shared_memory to more bytes; said once",
                *(count, total, slots.budget),
            )
        stats.overflowed += reply.overflowed
        if self._loader._memory_limit is not None and reply.memory > self._loader._memory_limit:
            self._pool.renew(reply.pid)

    def _result(self, opened: _Opened) -> Any:
        """The next batch of a reply, what stands for it, or SKIP."""
        reply, n = opened.reply, self._next
        outcome, reply.outcomes[n] = reply.outcomes[n], None  # the consumer's alone from here
        self._next += 1
        if self._next == len(reply.outcomes):
            self._opened = None
        try:
            if type(outcome) is bytes and reply.packed:
                return transport.unpack(outcome)
            if type(outcome) is transport.Parcel:
                return transport.unpack_batch(outcome, opened.memory)
        except Exception as error:
            stage = "when the batch was unpickled"
            outcome = Failure.of(error, packed=False, stage=stage)
            reply = reply._replace(packed=False)
        if type(outcome) is Failure:
            task = opened.task
            place = Task(task.ordinal + n, task.epoch, [task.items[n]])
            return self._failed(place, reply, outcome)
        return outcome

    def _failed(self, task: Task, reply: Reply, failure: Failure) -> Any:
        """Does with a failed batch what ``on_error`` says."""
        pid = reply.pid if reply.pid >= 0 else None
        worker = reply.worker if reply.worker >= 0 else None
        who = "a worker" if worker is None else f"worker {worker}"
        where = "in the parent" if pid is None else f"{who} (pid {pid})"
        what = f"batch {task.ordinal} of epoch {task.epoch}, item {shown(task.items[0])}, {where}"
        what += failure.stage and f", {failure.stage}"
        place = {"ordinal": task.ordinal, "epoch": task.epoch, "item": task.items[0]}
        place |= {"worker": worker, "pid": pid}
        remote = WorkerTraceback(failure.traceback) if failure.traceback else None

        error = _load_error(failure, packed=reply.packed)
        if isinstance(error, BatchError):  # our own, which does not know its place yet
            vars(error).update(place)
            report: BatchError = error
        else:
            report = BatchError(f"{what}: {failure.summary}", **place)
            report.__cause__ = error or remote

        skippable = isinstance(error, Exception | None) and not failure.fatal
        if self._loader._on_error == "raise" or not skippable:
            try:
                if error is None or isinstance(error, StopIteration):
                    # It cannot be carried; or it would end the loop as if the epoch were over.
                    raise report
                _add_note(error, f"minloader: {what}")
                if remote is None:
                    raise error
                raise error from remote
            finally:
                # Its traceback holds this frame: let that not hold the error, or the loader would
                # live until the cycle is found.
                del error, report
        if self._loader._on_error == "skip":
            logger.warning("skipped %s: %s", what, failure.summary)
            return SKIP
        assert callable(self._loader._on_error)
        return self._loader._on_error(report)


def _part(task: Task, start: int, stop: int) -> Task:
    """A task for some of the items."""
    return Task(task.ordinal + start, task.epoch, task.items[start:stop])


def _fatal_error(fate: pools.Fate, ordinal: int, epoch: int, item: Any, tries: int) -> BatchError:
    """The error for a batch that no worker survives."""
    what = f"batch {ordinal} of epoch {epoch}, item {shown(item)}"
    times = f" (tried {tries} times)" if tries > 1 else ""
    if fate.stack is None:
        return WorkerDied(
            f"a worker (pid {fate.pid}) died while it made {what}: {fate.cause}{times}",
            exitcode=fate.exitcode,
        )
    stack = fate.stack or "(the worker did not answer)\n"
    return BatchTimeout(
        f"{what}, took longer than timeout allows{times}; worker {fate.worker} (pid {fate.pid}) "
        f"was at\n{stack}",
        stack=fate.stack,
    )


def _abandon(slots: Slots, slot: Slot, future: Future[Reply]) -> None:
    """Takes back the slot of a task that ended when nobody wanted it any more."""
    if _is_lost(future):
        slots.discard(slot)
    else:
        reply = future.result()
        slots.settle(slot, reply.slot_size, reply.size)
        slots.free(slot, retire=reply.slot_retired)


def _is_lost(future: Future[Reply]) -> bool:
    """Whether a future ended without a reply: its executor broke."""
    return future.cancelled() or (future.done() and future.exception() is not None)


def _add_note(error: BaseException, note: str) -> None:
    try:
        error.add_note(note)
    except Exception as refusal:  # a frozen dataclass, say: the error matters more than the note
        logger.debug("%s; the error takes no notes (%s)", note, refusal)


def _load_error(failure: Failure, *, packed: bool) -> BaseException | None:
    if not packed or failure.error is None:
        error: BaseException | None = failure.error
        return error
    try:
        error = transport.unpack(failure.error)
    except Exception:  # its class exists in the worker only: the text must do
        return None
    return error


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
        lambda: pools.ProcessPool(shipment, job.num_workers, context, make_slots(), timeout)
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
