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

Who does what:

* The *sampler* is read in the consumer's thread, as batches are taken, so that
  ``prefetch_factor x num_workers`` tasks are under way and no more. A task is one item, or a
  chunk of several while batches are so quick that handing them over takes longer than making them.
* The *iterator* (``_epochs/iterator.py``, what ``iter(loader)`` returns) takes batches from its
  *lanes* and hands them over. Several may be under way at once: they share nothing but the workers.
* A *lane* (``_epochs/lane.py``) owns the deque of pending tasks, which is the account of what was
  drawn and not handed over: a state follows from it. It refills, sends again what was lost, and
  turns replies into batches or errors. A sampler has one lane (``_epochs/sampled.py``), a stream
  one for each of its shards, with a pool for each worker, so that a shard stays where it is being
  read (``_epochs/streams.py``, ``_worker/stream_reader.py``).
* The *slots* (``_memory/slots.py``) are shared memory that travels with the tasks, so that the
  parent never copies a batch.
* The *pool* (``_pools/``) knows where tasks run, and replaces lost workers; the *pool group* knows
  which pools there are now; the *worker* (``_worker/run.py``) makes the batches of a task.
* The *job* (dataset, transform, collate_fn) is written once, when the first pool of processes is
  made, to a file that workers map (``_memory/job_file.py``).
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, Literal, Self

from minloader import _checks as checks
from minloader._checks import B, check_int, shown
from minloader._epochs.failures import OnError
from minloader._epochs.iterator import Account, Batches
from minloader._epochs.pending import Bell, SamplerState
from minloader._epochs.sampled import SamplerLane, Source, Told, source_after
from minloader._epochs.settings import CLOSED, Settings
from minloader._epochs.state import (
    Note,
    begun_anew,
    check_sampler,
    check_state,
    has_begun,
    in_one_shape,
    sampler_place,
    sampler_state,
    skipped,
    stream_state,
)
from minloader._epochs.streams import FIRST, ShardPass, StreamLane, packed
from minloader._insight.counters import Counters, Stats
from minloader._insight.trace import Trace
from minloader._memory.files import interrupts_held
from minloader._pools.group import PoolGroup
from minloader._sampling.base import Sampler, rank_of, rank_of_stream
from minloader._sampling.batch import BatchSampler
from minloader._worker.batch_maker import asked_per_sample
from minloader._worker.messages import Job, WorkerInfo

logger = logging.getLogger("minloader")

PATIENCE = 0.5
"""Seconds that the consumer waits before it looks whether a worker is stuck."""


class Loader(Generic[B]):
    """An iterable over batches that workers make.

    ``Loader[B]`` yields batches of type ``B``, which type checkers take from ``collate_fn``.

    Each ``iter(loader)`` is a new epoch, on the same workers. An epoch left early leaves nothing
    behind. All arguments but the first two go by name. The sampler is read, and ``on_error`` is
    called, in the process that iterates; the dataset, ``transform``, ``collate_fn`` and
    ``worker_init_fn`` run in the workers.

    Args:
        dataset: an object with ``__getitem__``: batch = ``dataset[item]``; or else, without a
            sampler, one with ``__iter__``: a stream, of which each worker reads a shard, by
            :func:`get_worker_info`, and the batches come in turns; or else a callable: batch =
            ``dataset(item)``.
        sampler: iterable of items, read lazily in this process. None: ``range(len(dataset))``,
            grouped by ``batch_size`` if that is given.
        num_workers: how many workers; 0 makes every batch in the calling process, in ``next``.
        prefetch_factor: tasks under way per worker.
        batch_size: make a :class:`BatchSampler` of this size, in place of a sampler; of a stream,
            samples in a batch (None: its elements are the batches).
        shuffle: visit the dataset in another order each epoch, in place of a sampler.
        last_batch: what to do with an incomplete last batch of ``batch_size``: "keep",
            "discard", or "rollover" into the next epoch (not of a stream).
        transform: called in the worker with each sample, or with the batch where nothing is
            collated.
        collate_fn: called in the worker with the list of samples ``[dataset[i] for i in
            item]`` (or ``dataset.__getitems__(item)``). An item that is a list of lists gives
            the list of one batch for each. None: :func:`collate` with ``batch_size``, nothing
            otherwise.
        executor: "process", "thread", or a ``concurrent.futures.Executor`` (of Dask:
            ``client.get_executor(pure=False)``), which stays the caller's to shut down. Each of
            its processes, on whatever machine, loads the dataset once; ``num_workers`` is how
            many tasks it runs at once.
        mp_context: how "process" starts its workers, a ``multiprocessing`` context or the name
            of one. None: "spawn". "forkserver" where imports take long, "fork" where no thread of
            this process can hold a lock that the dataset needs.
        worker_init_fn: called once in each worker with its :class:`WorkerInfo`; of a stream, for
            each fresh copy of the dataset, with that of the shard.
        seed: non-negative int that all randomness derives from, together with epoch and
            ordinal of a batch. None: draw one, kept in ``loader.seed``.
        seed_generators: whether random generators that the dataset, ``transform`` and
            ``collate_fn`` have of their own are seeded for each batch, as the global ones are.
        in_order: yield batches in the sampler's order; False: as they get ready.
        timeout: seconds that a batch may run, from when a worker begins with it. Then its worker
            is killed with all it started, and the batch is tried again; past ``retries`` it
            fails with :class:`BatchTimeout`. A thread cannot be killed: the batch fails at
            once, and the thread is left alone. With ``num_workers=0`` nobody is there to look.
        retries: how often a batch is tried again whose worker process died while making it,
            before it fails with :class:`WorkerDied`; or that an executor of yours lost.
        on_error: what an exception that makes a batch fail does: "raise" it from ``next``
            (the one after gives the next batch), "skip" the batch with a warning in the
            log, or a callable that is given a :class:`BatchError` here and returns a batch in its
            place, or :data:`SKIP`, or raises. "skip_sample" leaves out of its batch a sample on
            which the dataset or ``transform`` fails, with a warning in the log, and raises all
            else. A callable with a method ``for_sample`` is asked for each such sample: that is
            called in the worker, with a :class:`BatchError`, and returns a sample in its place, or
            :data:`SKIP`, or raises, so that the batch fails. Whatever ``on_error`` is, a sample
            that is :data:`SKIP` is left out, and an epoch that gives no batch since its batches
            failed ends in a :class:`BatchError`.
        max_errors: how many batches and samples may fail in the life of the loader. The next one
            that fails ends the loop with a :class:`BatchError` in its place, which shows the first
            ones, whatever ``on_error`` is. None: any number.
        shared_memory: whether batches travel in shared memory; an int: the most bytes to hold
            there. True: half of what is free. Past that, batches come through a pipe, slower.
        worker_memory_limit: bytes of memory of its own past which a worker process is replaced,
            between batches (all workers are, together). None: no limit.
        trace: file to write a timeline to while the loader lives, see :meth:`trace`.

    Attributes:
        seed: the seed in use.

    Raises:
        TypeError: an argument is of the wrong kind, or cannot be sent to the workers.
        ValueError: an argument has an impossible value, or excludes another.
        OSError: the file for ``trace`` cannot be written.
    """

    _arguments: tuple[dict[str, Any], dict[str, Any]]  # those given, and the defaults

    __reduce__ = checks.refuse_copies

    @checks.explain_arguments
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
        collate_fn: Callable[[list[Any]], B] | None = None,
        executor: Literal["process", "thread"] | Executor = "process",
        mp_context: BaseContext | str | None = None,
        worker_init_fn: Callable[[WorkerInfo], Any] | None = None,
        seed: int | None = 0,
        seed_generators: bool = False,
        in_order: bool = True,
        timeout: float | None = None,
        retries: int = 1,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        shared_memory: bool | int = True,
        worker_memory_limit: int | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        num_workers = check_int("num_workers", num_workers, 0)
        check_int("prefetch_factor", prefetch_factor, 1)
        self._any_seed = seed is None
        seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.seed = check_int("seed", seed, 0)
        in_order = checks.check_bool("in_order", in_order)
        timeout = checks.check_timeout(timeout, executor)
        retries = check_int("retries", retries, 0)
        checks.check_memory_limit(worker_memory_limit, executor)
        budget = checks.check_shared_memory(shared_memory)
        checks.check_on_error(on_error, max_errors)
        checks.check_callable("transform", transform)
        checks.check_callable("collate_fn", collate_fn)
        checks.check_callable("worker_init_fn", worker_init_fn)

        self.dataset = dataset
        self._shards: int | None = None
        self._batch_size = None
        if checks.is_stream(dataset, sampler):
            checks.check_stream(batch_size, shuffle, last_batch, collate_fn)
            self._shards = max(1, num_workers)
            self._batch_size = batch_size
            self.sampler: Iterable[Any] = ()
        else:
            checks.check_dataset(dataset, awaits=transform is not None or collate_fn is not None)
            made = _make_sampler(dataset, sampler, batch_size, shuffle, last_batch, self.seed)
            self.sampler = made
        self._own_sampler = self.sampler is not sampler
        self._told = Told(self.sampler)
        collates: Callable[[list[Any]], Any] | None = collate_fn
        if batch_size is not None and collate_fn is None:
            from minloader._sampling.collate import collate  # which needs numpy

            collates = collate
        job = Job(
            *(dataset, transform, collates, worker_init_fn, worker_memory_limit),
            batch_size=self._batch_size,
            keep_last=last_batch == "keep",
            on_sample=asked_per_sample(on_error),
            is_stream=self._shards is not None,
            rank=rank_of(self.sampler) if self._shards is None else rank_of_stream(dataset),
            seed_generators=checks.check_seed_generators(seed_generators, executor, dataset),
        )
        self._epoch = 0
        self._runs = itertools.count()
        self._account: Account | None = None  # of the iterator begun last
        self._resume: dict[str, Any] | None = None  # state that the next epoch begins from
        streams = self._shards is not None
        checks.check_executor(executor, streams=streams)
        context = checks.check_context(mp_context, executor)
        self._group = PoolGroup(
            *(job, executor, context, num_workers, prefetch_factor, self.seed, budget, timeout),
            streams=streams,
        )
        self._settings = Settings(
            depth=self._group.depth,
            in_order=in_order,
            retries=retries,
            patience=PATIENCE if timeout is None else min(PATIENCE, timeout / 2),
            memory_limit=worker_memory_limit,
            on_error=on_error,
            max_errors=max_errors,
            reads=checks.reads_at_once(dataset),
            counters=Counters(),
        )
        self._end = weakref.finalize(self, _finish, self._group, self._settings.counters)
        if trace is not None:
            try:
                self._settings.counters.trace = Trace(trace)
            except BaseException:
                self.close()
                raise

    def __setattr__(self, name: str, value: Any) -> None:
        is_made, public = "_end" in vars(self), name[0] != "_"
        own = type(self) is Loader or name in vars(self)  # not an attribute of a subclass
        if is_made and public and own and name not in ("epoch", "num_workers"):
            checks.check_attribute(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        given = self._arguments[0] | {"num_workers": self.num_workers}
        values = [f"{name}={shown(value)}" for name, value in given.items()]
        return f"<{'closed ' * self._settings.closed}Loader({', '.join(values)})>"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    @property
    def num_workers(self) -> int:
        """Number of workers. Setting it adds or removes some, also in the middle of an epoch: the
        batches stay the same, and what is under way is not lost.

        Raises:
            TypeError, ValueError: it is no number of workers; or there were none, and the dataset
                cannot be sent to any.
            RuntimeError: the loader is closed.
        """
        return self._group.num_workers

    @num_workers.setter
    def num_workers(self, num_workers: int) -> None:
        self._check_open()
        num_workers = check_int("num_workers", num_workers, 0)
        if num_workers != self._group.num_workers:
            self._group.tidy()
            self._settings.counters.begin_anew(self.stats)
            self._group.resize(num_workers)
            self._settings.depth = self._group.depth
            if self._shards is not None:
                checks.tell_idle_workers(num_workers, self._shards)

    @property
    def stats(self) -> Stats:
        """A copy of what was counted so far; see :class:`Stats`."""
        group = self._group
        slots = [pool.slots for pool in group.pools if pool.slots is not None]
        used = [each.used for each in slots]
        return self._settings.counters.snapshot(
            executor=group.kind,
            num_workers=group.num_workers,
            reads=self._settings.reads,
            in_flight=group.in_flight,
            slots=sum(count for count, _ in used),
            slot_bytes=sum(size for _, size in used),
            slot_limit=sum(each.budget for each in slots),
            replaced=group.replaced,
        )

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write a timeline to a file while the ``with`` lasts, in the format of Chrome's tracing.

        Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open it. The consumer, the sampler and
        each worker have a track, which shows when they did what, deaths, and tasks that were sent
        again. The parts of a task of several quick batches are added up.

        Args:
            path: file to write; overwritten.

        Raises:
            OSError: it cannot be.
            TypeError: it is not a path.
            RuntimeError: a trace is being written already, or the loader is closed.
        """
        self._check_open()
        counters = self._settings.counters
        if counters.trace is not None:
            raise RuntimeError(
                f"a trace is being written to {counters.trace.path} already; end that first"
            )
        counters.trace = Trace(path)
        try:
            yield
        finally:
            counters.end_trace()

    def __len__(self) -> int:
        """Number of batches of the epoch under way, or else of the next.

        Raises:
            TypeError: the sampler has no length, or there is none.
        """
        if self._shards is not None:
            raise TypeError("this loader has no length, since its dataset is a stream")
        account, resume = self._account, self._resume
        try:
            if resume is not None or account is None or not account.is_under_way:
                return self._source(resume).length_ahead()
            length = account.source.length
            if length is None and self._told.plans_late:
                length = account.source.run.length()
            if length is None:
                raise TypeError("it was not known when the epoch was begun")
            return int(length)
        except TypeError as error:
            raise TypeError(
                f"this loader has no length, since its sampler, {shown(self.sampler)}, has none"
            ) from error

    # --- epochs

    def __iter__(self) -> Iterator[B]:
        """Begin a new epoch; with workers, its first batches are under way on return.

        After :meth:`load_state_dict`: the rest of that state's epoch.

        Raises:
            RuntimeError: the loader is closed, or its sampler is an iterator and used up.
            ValueError: the sampler does not give what it gave when the state was taken.
        """
        batches = Batches(self, self._settings, 1, numbered=False)
        try:
            self._begin(batches)
            return batches
        except BaseException:
            self._begin_again(batches.account)
            raise

    def epochs(self, n: int | None = None, *, until: int | None = None) -> Iterator[tuple[int, B]]:
        """Go through the next epochs without a gap between them.

        While the last batches of an epoch are made, workers that would be idle begin with the
        next, all within ``prefetch_factor * num_workers`` tasks. Otherwise it is as if each epoch
        were iterated by itself: order, errors, state.

        Args:
            n: how many more, the rest of a loaded one counted; None: for ever.
            until: how many in all, counted from epoch 0, with those that went before
                :meth:`load_state_dict`: epochs up to ``until - 1``. Instead of ``n``.

        Yields:
            The number of the epoch and a batch.

        Raises:
            ValueError: for ever was asked, but an epoch has no batches; or ``n`` and ``until``
                are both given.
        """
        if n is not None and until is not None:
            raise ValueError(f"epochs takes n={n} more, or all until={until}; drop one of them")
        for name, value in ("n", n), ("until", until):
            if value is not None:
                check_int(name, value, 0)
        return Batches(self, self._settings, n, until, numbered=True)

    def _begin(self, batches: Batches) -> Account:
        """Begin the next epoch, for an iterator. States are of that from now on."""
        self._check_open()
        begin = self._settings.counters.begin_epoch()
        self._group.tidy()
        resume, where = self._resume, self._group.pool
        lanes: list[Any]
        if self._shards is None:
            lanes = [SamplerLane(self._settings, where, batches.bell, self._source(resume))]
        else:
            lanes = self._shard_lanes(batches.bell, resume)
        account = batches.begin(lanes, fruitful=resume is not None and has_begun(resume))
        self._group.users.add(batches)
        # One step, which nothing can interrupt. Not before: a state that was refused is not
        # forgotten. Not after: nothing is drawn for an iterator that the loader does not know.
        own, epoch = vars(self), self._epoch + 1
        batches.account = account
        with account.lock:  # no other thread notes a state while the first batches are drawn
            own.update(_account=account, _resume=None, _epoch=epoch)
            batches.fill()
        self._settings.counters.began_epoch(begin)
        return account

    def _begin_again(self, account: Account | None) -> None:
        """Have the next epoch be one whose iterator an interrupt has kept from the user."""
        if account is not None and account is self._account:
            state = self._note_of(account, self.epoch)()
            known = check_state(state, None, stream=self._shards is not None)
            if self._shards is None and not has_begun(known):
                known["check"] = None  # another order may be drawn: nobody has seen this one
            vars(self).update(_epoch=known["epoch"], _resume=known, _account=None)

    def _source(self, resume: dict[str, Any] | None) -> Source:
        """Return what the sampler's items are drawn from in the next epoch."""
        if resume is None:
            if self._account is not None:
                return source_after(self._account, self.epoch)
            return Source(self._told, 0, self.epoch, self._beginning(), put_back=False)
        known = resume["sampler"] and SamplerState(**resume["sampler"])
        return Source(self._told, 0, resume["epoch"], known, put_back=True, place=resume)

    def _beginning(self) -> SamplerState | None:
        """Return where the sampler is before its first epoch; None where that is not known."""
        state = _state_before(self.sampler)
        return None if state is None else SamplerState(0, state)

    def _shard_lanes(self, bell: Bell, resume: dict[str, Any] | None) -> list[StreamLane]:
        """Return a lane for each shard of the stream, for the next epoch."""
        assert self._shards is not None
        run, group, former = self._new_run(), self._group, self._account
        if resume is not None:
            places = resume["stream"]["shards"]
            if not checks.is_stateful(self.dataset):
                checks.tell_rereading(places)
            firsts = [ShardPass.of(self.epoch, run, place) for place in places]
        elif former is not None and former.behind is not None:  # its lanes are ahead of it
            places = check_state(former.behind(), None, stream=True)["stream"]["shards"]
            firsts = [ShardPass.anew(self.epoch, run, place) for place in places]
        elif former is not None:
            # Not whether the shards are over: that is known earlier or later, as workers go.
            left = not former.is_over
            firsts = [lane.next_pass(self.epoch, run, left=left) for lane in former.lanes]
        else:
            firsts = [ShardPass(0, self.epoch, run, FIRST) for _ in range(self._shards)]
        oldest = partial(_oldest_run, group, run)
        return [
            StreamLane(self._settings, partial(group.pool, n), bell, n, self._shards, oldest, first)
            for n, first in enumerate(firsts)
        ]

    def _new_run(self) -> int:
        """Return the number of another pass over the stream, and let go of pools that are done."""
        self._group.tidy()
        return next(self._runs)

    def _entered(self, account: Account) -> None:
        """Note which epoch an iterator is in, if it is the one begun last."""
        if account is self._account:
            self._epoch = account.source.epoch + 1

    def _left_behind(self, account: Account) -> None:
        """Have the next epoch be the one after that of a consumer whom another has served."""
        if account is self._account and account.behind is not None and account.next_epoch is None:
            state = check_state(account.behind(), None, stream=self._shards is not None)
            self._epoch = state["epoch"] + has_begun(state)

    @property
    def epoch(self) -> int:
        """Number that the next ``iter(loader)`` will have. To set it is to call
        :meth:`set_epoch`."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which decides its order and its seeds.

        Within :meth:`epochs` it is for the next epoch of that loop. After :meth:`load_state_dict`,
        a number other than the state's begins that epoch anew.

        Raises:
            RuntimeError: :func:`minloader.prefetch` takes batches of :meth:`epochs` ahead.
        """
        epoch = check_int("epoch", epoch, 0)
        own, account, resume = vars(self), self._account, self._resume
        if resume is not None and resume["epoch"] != epoch:
            sampler = self.sampler if account is None else None
            resume = begun_anew(resume, epoch, sampler) if isinstance(sampler, Sampler) else None
        if account is not None:
            account.set_next_epoch(epoch)
        own.update(_epoch=epoch, _resume=resume)

    def skip(self, n: int) -> None:
        """Leave out the next ``n`` batches without making them, as after a spike of the loss.

        They count as handed over, for a state too. All other batches stay as they are. In the
        middle of an epoch, the next batches in the order of the sampler are left out, up to the end
        of the epoch, or to an error of the sampler, which the next ``next`` raises. Otherwise it is
        the first ones of the next ``iter``, also after :meth:`load_state_dict`. While another
        thread waits for a batch, this waits too. After Ctrl-C in it, some of the batches are left
        out, and :meth:`state_dict` says where the consumer is.

        Args:
            n: how many batches, as the sampler gives them.

        Raises:
            TypeError, ValueError: ``n`` is no number of batches; or the dataset is a stream, which
                can only be read on: take its batches, and drop them.
            RuntimeError: the loader is closed; or :func:`minloader.prefetch` takes batches ahead of
                the consumer.
        """
        n = check_int("n", n, 0)
        self._check_open()
        if self._shards is not None:
            raise TypeError(
                "skip is for loaders with a sampler, but the dataset is a stream, which can only "
                "be read on; take the batches from the iterator, and drop them"
            )
        account, resume = self._account, self._resume
        if account is not None:
            with account.lock:
                if resume is None:
                    account.check_not_ahead("skip")
                if resume is None and account.is_under_way:
                    account.lanes[0].skip(n)
                    return
        if resume is None:
            state = self._note(self.epoch, self._note_between(account))()
            resume = check_state(state, None, stream=False)
        self._resume = skipped(resume, n)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is: what was delivered, whatever was read ahead.

        The state is of the epoch that was begun last, also when its iterator is gone. Between
        epochs it is the beginning of the next one. It is small, and fits into JSON if the state of
        the sampler, or of the stream, does. While another thread waits for a batch, this waits too.

        Raises:
            Exception: what the sampler's ``state_dict`` raises.
        """
        return self._note_state()()

    def _note_state(self) -> Note:
        """Note the state as of what the consumer was given."""
        while True:
            account = self._account
            with nullcontext() if account is None else account.lock:
                known = vars(self).copy()  # one step: another thread may begin the next epoch
                if known["_account"] is account:
                    return self._note_now(account, known["_resume"], known["_epoch"])

    def _note_now(self, account: Account | None, resume: Any, epoch: int) -> Note:
        if resume is not None:
            return lambda: in_one_shape(copy.deepcopy(resume))
        return (account and account.behind) or self._note_of(account, epoch)

    def _note_of(self, account: Account | None, epoch: int) -> Note:
        """Note the state as of what an iterator has handed over, to whomever.

        Args:
            account: of the iterator; None: there was none.
            epoch: the loader's, which is the next one where the iterator has ended.
        """
        if account is None or account.is_over:
            return self._note(epoch, self._note_between(account))
        source = account.source
        return self._note(source.epoch, [lane.note() for lane in account.lanes], source)

    def _note_between(self, account: Account | None) -> list[Note]:
        if self._shards is None:
            state = self._beginning() if account is None else source_after(account, 0).state
            return [partial(sampler_place, [], 0, False, state, None)]
        if account is None:
            state = _state_before(self.dataset)
            known = None if state is None else {"dataset": state}
            return [ShardPass(0, 0, 0, FIRST, packed(known)).note()] * self._shards
        return [lane.next_pass(0, 0, left=False).note() for lane in account.lanes]

    def _note(self, epoch: int, notes: list[Note], source: Any = None) -> Note:
        if self._shards is not None:
            return partial(stream_state, self.seed, epoch, notes, self._batch_size)
        length = self._told.length_between() if source is None else source.length
        return partial(sampler_state, self.seed, epoch, notes[0], length)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: str | Iterable[str] = ()) -> None:
        """Make the next ``iter`` continue where :meth:`state_dict` was called.

        Iterators that were begun before raise an error. Nothing that was delivered is loaded
        again, but for streams without a state. Number of workers, executor and the like may be
        others; the dataset, the sampler and what makes batches of samples must not. Of our samplers
        the world size may be another, and what ``allow`` names: what no rank was given is dealt out
        anew.

        Args:
            state: from a loader of this process or another.
            allow: names of arguments of our sampler that may be others than they were: what limits
                a batch, such as "max_total" or "batch_size".

        Raises:
            TypeError, ValueError: it is no state, or not of a loader like this one; both values
                are named.
            RuntimeError: the loader is closed.
        """
        self._check_open()
        seed = None if self._any_seed else self.seed
        known = check_state(state, seed, stream=self._shards is not None)
        own, epoch = vars(self), known["epoch"]
        if self._shards is not None:
            theirs = known["stream"]["batch_size"]
            if theirs != self._batch_size:
                raise ValueError(
                    f"batch_size is {self._batch_size}, but the state is of a stream with "
                    f"batch_size={theirs}; make the loader with that"
                )
            self._shards = len(known["stream"]["shards"])
            checks.tell_idle_workers(self.num_workers, self._shards)
        else:
            is_under_way = self._account is not None and self._account.is_under_way
            if not is_under_way:
                self._told.set_epoch(epoch)
            # To tell it would disturb the epoch under way: the length is compared when it is told.
            length = self._told.length_between() if is_under_way else self._told.length()
            own_seed = self._own_sampler
            check_sampler(known, self.sampler, length, takes_seed=own_seed, allow=allow)
        # Only now: the epoch under way goes on after a state that was refused.
        with interrupts_held():  # or one of these would have a seed of its own
            self._group.reseed(known["seed"])
            if self._own_sampler and isinstance(self.sampler, Sampler):
                self.sampler.seed = known["seed"]
            self._settings.loaded += 1
            own.update(seed=known["seed"], _epoch=epoch, _resume=known, _account=None)

    # --- workers

    def _check_open(self) -> None:
        if self._settings.closed:
            raise RuntimeError(CLOSED)

    def start(self) -> None:
        """Start all workers now, without waiting for them, so that the first batch comes sooner.

        Raises:
            RuntimeError: the loader is closed.
        """
        self._check_open()
        self._settings.counters._began_early = True
        self._group.start()

    def close(self) -> None:
        """End the workers and all they started, at once, and let the dataset's copy go.

        Runs by itself when the loader is garbage-collected and when the interpreter exits. An
        iterator still in use raises RuntimeError from then on.
        """
        self._settings.closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _state_before(source: Any) -> Any:
    """Return the state of a sampler, or stream, before it was ever read; None if it has none."""
    if isinstance(source, Sampler) and source._run is not None and not source._run.ended:
        source._forget()  # somebody has looked: the next epoch begins anew all the same
    try:
        return copy.deepcopy(source.state_dict()) if checks.is_stateful(source) else None
    except Exception as error:  # many have none before their first item
        if isinstance(source, Sampler):
            raise
        logger.debug("%s has no state before it is read: %r", shown(source), error)
        return None


def _oldest_run(group: PoolGroup, run: int) -> int:
    """Return the oldest pass over a stream that somebody still makes; at most ``run``."""
    accounts = [batches.account for batches in checks.copied(group.users)]
    runs: list[int] = [each.lanes[0].sources[0].run for each in accounts if each is not None]
    return min([run, *runs])


def _finish(group: PoolGroup, counters: Counters) -> None:
    if group.needs(threading.current_thread()):  # it would wait for itself: the collector came here
        _finish_later(group, counters)
        return
    try:
        group.close()
        counters.end_trace()
    except Exception:
        raise
    except BaseException:  # Ctrl-C: nobody asks again, and the exit would wait for the batches
        _finish_later(group, counters)
        raise


def _finish_later(group: PoolGroup, counters: Counters) -> None:
    """Close a loader in a thread of its own.

    Where the system has no more threads, the workers leave when CPython ends their executor.
    """
    closing = threading.Thread(target=_finish, args=(group, counters), daemon=True)
    closing.name = "minloader-close"
    with suppress(RuntimeError):
        closing.start()


def _make_sampler(
    dataset: Any,
    sampler: Iterable[Any] | None,
    batch_size: int | None,
    shuffle: bool,
    last_batch: Any,
    seed: int,
) -> Iterable[Any]:
    """Return the sampler itself, or one for the dataset's length."""
    if sampler is not None:
        checks.check_sampler_alone(batch_size, shuffle, last_batch)
        checks.check_iterable("sampler", sampler)
        return sampler
    size = checks.dataset_length(dataset)
    if batch_size is None and not shuffle and last_batch == "keep":
        return range(size)
    return BatchSampler(size, batch_size, shuffle=shuffle, last_batch=last_batch, seed=seed)
