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
* The *epoch* (``_epochs/epoch.py``, what ``iter(loader)`` returns) owns the deque of pending
  tasks. It waits for the first (or, with ``in_order=False``, for any), refills, and turns the reply
  into batches or errors. Several may be under way at once: they share nothing but the workers.
* The *ledger* (``_epochs/state.py``) knows what of an epoch was delivered: a state follows from it.
* A *stream* has an epoch for each of its shards, taken in turns (``_epochs/streams.py``), and a
  pool for each worker, so that a shard stays where it is being read (``_worker/stream_reader.py``).
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
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Literal

from minloader import _checks as checks
from minloader._checks import check_int, shown
from minloader._epochs.epoch import Epoch
from minloader._epochs.failures import OnError
from minloader._epochs.iterator import CLOSED, Settings
from minloader._epochs.state import (
    VERSION,
    Ledger,
    Note,
    Progress,
    beginning,
    check_sampler,
    check_state,
    has_begun,
    in_one_shape,
    latest_note,
)
from minloader._epochs.streams import StreamEpoch, StreamLedger
from minloader._insight.counters import Counters, Stats
from minloader._insight.trace import Trace
from minloader._pools.group import PoolGroup
from minloader._sampling.base import Sampler, rank_of
from minloader._sampling.batch import BatchSampler
from minloader._sampling.collate import collate
from minloader._sampling.source import Repeatable
from minloader._worker.messages import Job, WorkerInfo

PATIENCE = 0.5
"""Seconds that the consumer waits before it looks whether a worker is stuck."""


class Loader:
    """An iterable over batches that workers make.

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
            place, or :data:`SKIP`, or raises. "skip_sample" leaves out of its batch a sample on
            which the dataset or ``transform`` fails, with a warning in the log, and raises all
            else. Whatever it is, a sample that is :data:`SKIP` is left out.
        shared_memory: whether batches travel in shared memory; an int: the most bytes to hold
            there. True: half of what is free. Past that, batches come through a pipe, slower.
        worker_memory_limit: bytes of memory of its own past which a worker process is replaced,
            between batches (all workers are, together). None: no limit.
        trace: file to write a timeline to while the loader lives, see :meth:`trace`.

    Attributes:
        epoch: number that the next ``iter(loader)`` will have.
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
        checks.check_on_error(on_error)
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
            checks.check_dataset(dataset)
            made = _make_sampler(dataset, sampler, batch_size, shuffle, last_batch, self.seed)
            self.sampler = made
        self._own_sampler = self.sampler is not sampler
        self._items = Repeatable("sampler", self.sampler)
        if batch_size is not None and collate_fn is None:
            collate_fn = collate
        job = Job(
            *(dataset, transform, collate_fn, worker_init_fn, worker_memory_limit),
            batch_size=self._batch_size,
            keep_last=last_batch == "keep",
            skip_samples=on_error == "skip_sample",
            rank=rank_of(self.sampler if self._shards is None else dataset),
        )
        self.epoch = 0
        self._told: int | None = None  # epoch that the sampler was told last
        self._runs = itertools.count()
        self._progress: Progress | None = None  # of the consumer
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
        if name == "epoch":
            value = check_int(name, value, 0)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        given = self._arguments[0] | {"num_workers": self.num_workers}
        values = [f"{name}={shown(value)}" for name, value in given.items()]
        return f"<{'closed ' * self._settings.closed}Loader({', '.join(values)})>"

    def _repr_html_(self) -> str:
        from minloader._insight import notebook

        return notebook.show(self)

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
        ledger, told = self._ledger, self._told
        epoch = ledger.epoch if ledger is not None and ledger.under_way else self.epoch
        try:
            if not hasattr(type(self.sampler), "__len__") or epoch == told:
                return len(self.sampler)  # type: ignore[arg-type]
            self._tell_epoch(epoch)
            length = len(self.sampler)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"this loader has no length, since its sampler, {shown(self.sampler)}, has none"
            ) from error
        if told is not None:
            self._tell_epoch(told)
        return length

    # --- epochs

    def __iter__(self) -> Iterator[Any]:
        """Begin a new epoch; with workers, its first batches are under way on return.

        After :meth:`load_state_dict`: the rest of that state's epoch.

        Raises:
            RuntimeError: the loader is closed, or its sampler is an iterator and used up.
            ValueError: the sampler does not give what it gave when the state was taken.
        """
        return self._begin(1, Progress())

    def epochs(
        self, n: int | None = None, *, until: int | None = None
    ) -> Iterator[tuple[int, Any]]:
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
        return Epochs(self, n, until)

    def _begin(self, n: int | None, progress: Progress) -> Epoch | StreamEpoch:
        """Begin the next ``n`` epochs, or endlessly many. States are of these from now on."""
        self._check_open()
        begin = time.perf_counter()
        common = self._settings, self._group.pool, self._next_ledgers(n), progress, self
        run: Epoch | StreamEpoch
        if self._shards is None:
            run = Epoch(*common, endless=n is None)
        else:
            run = StreamEpoch(*common, self._shards, self._oldest_run, endless=n is None)
        self._group.users.add(run)
        run.begin()
        self._resume = None  # not before: a state that was refused is not forgotten
        self._progress = progress
        self.epoch += 1
        self._settings.counters.began_epoch(begin)
        return run

    def _next_ledgers(self, n: int | None) -> Iterator[Any]:
        """Yield a ledger for each of the next epochs, when it begins."""
        resume, numbers = self._resume, itertools.count(self.epoch)
        before: Any = self._ledger
        for epoch in numbers if n is None else itertools.islice(numbers, n):
            self._group.tidy()
            if self._shards is None:
                yield Ledger(epoch, self.sampler, self._items, self._tell_epoch, resume)
            else:
                state = resume["stream"] if resume else None
                checks.tell_rereading(state["shards"] if state else [])
                before = StreamLedger(epoch, next(self._runs), self._shards, state, before)
                yield before
            resume = None

    def _oldest_run(self) -> int:
        """Return the oldest pass over a stream that somebody still makes."""
        streams = (
            user for user in checks.copied(self._group.users) if isinstance(user, StreamEpoch)
        )
        return min(stream.run for stream in streams if stream.progress.ledgers)

    def _tell_epoch(self, epoch: int) -> None:
        self._told = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which decides its order and its seeds.

        After :meth:`load_state_dict`, a number other than the state's begins that epoch anew.
        """
        self.epoch = check_int("epoch", epoch, 0)
        if self._resume is not None and self._resume["epoch"] != self.epoch:
            self._resume = None

    # --- state

    @property
    def _ledger(self) -> Ledger | None:
        """The ledger of the epoch that the consumer is in, also when its iterator is gone."""
        return self._progress.ledgers[0] if self._progress is not None else None

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is: what was delivered, whatever was read ahead.

        The state is of the epoch that was begun last, also when its iterator is gone. Between
        epochs it is the beginning of the next one. It is small, and fits into JSON if the state of
        the sampler, or of the stream, does.

        Raises:
            Exception: what the sampler's ``state_dict`` raises.
        """
        return latest_note(self._progress, self._note_state)()

    def _note_state(self) -> Note:
        """Note the state as of what the iterator begun last has handed over, to whomever."""
        resume = self._resume
        if resume is not None:
            return lambda: in_one_shape(copy.deepcopy(resume))
        ledger = self._ledger
        if ledger is not None and not ledger.over:
            epoch, note = ledger.epoch, ledger.note()
        elif self._shards is not None:
            before: Any = ledger
            epoch = self.epoch
            note = StreamLedger(epoch, 0, self._shards, None, before).note()
        else:
            epoch = self.epoch
            if isinstance(self.sampler, Sampler):
                self._tell_epoch(epoch)
            note = beginning(self.sampler)
        if self._shards is not None:
            return partial(_state, self.seed, epoch, note, "batch_size", self._batch_size)
        return partial(_state, self.seed, epoch, note, "length", self._length(epoch))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter`` go on where :meth:`state_dict` was called.

        Nothing that was delivered is loaded again. Number of workers, executor and the like may
        be others; the dataset, the sampler and what makes batches of samples must not. Of our
        samplers the world size may be another: what no rank was given is dealt out anew.

        Args:
            state: from a loader of this process or another.

        Raises:
            TypeError, ValueError: it is no state, or not of a loader like this one; both values
                are named.
            RuntimeError: the loader is closed.
        """
        self._check_open()
        seed = None if self._any_seed else self.seed
        known = check_state(state, seed, stream=self._shards is not None)
        if self._any_seed:
            vars(self)["seed"] = known["seed"]
            self._group.reseed(self.seed)
            if self._own_sampler and isinstance(self.sampler, Sampler):
                self.sampler.seed = self.seed
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
            self._tell_epoch(known["epoch"])
            check_sampler(known, self.sampler, self._length(known["epoch"]))
        self.epoch = known["epoch"]
        self._resume = known
        self._progress = None

    def _length(self, epoch: int) -> int | None:
        """Return the number of batches of an epoch; None where it is not known now."""
        if self._told != epoch and hasattr(self.sampler, "set_epoch"):
            return None  # to tell the sampler might disturb the epoch that it is in
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

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
        self._group.start()

    def close(self) -> None:
        """End the workers and all they started, at once, and let the dataset's copy go.

        Runs by itself when the loader is garbage-collected and when the interpreter exits. An
        iterator still in use raises RuntimeError from then on.
        """
        self._settings.closed = True
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Epochs:
    """Iterator over the batches of several epochs, see :meth:`Loader.epochs`. Goes on after an
    error.

    Args:
        loader: whose.
        n: how many epochs; None: endlessly many.
        until: the epoch before which to end, in place of ``n``.
    """

    def __init__(self, loader: Loader, n: int | None, until: int | None = None) -> None:
        self._loader = loader
        self._n = n
        self._until = until
        self._run: Epoch | StreamEpoch | None = None
        self._begins = threading.Lock()  # several threads may take batches
        self.progress = Progress()

    __reduce__ = checks.refuse_copies

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._begins:
            if self._run is None:
                if self._until is not None:
                    self._n = max(0, self._until - self._loader.epoch)
                self._run = self._loader._begin(self._n, self.progress)
        with self._run.exclusive():
            batch = next(self._run)
            return self._run.epoch, batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`Loader.state_dict`."""
        return self._loader.state_dict()

    def _note_state(self) -> Note:
        return self._loader._note_state()

    def __del__(self) -> None:
        # What a thread has read ahead nobody has seen: the next iteration begins there.
        if self.progress.nearest is not None and self._loader._progress is self.progress:
            state = self._loader.state_dict()
            self._loader.epoch = state["epoch"] + has_begun(state)


def _state(seed: int, epoch: int, note: Note, name: str, value: int | None) -> dict[str, Any]:
    place = note()
    place.get("stream", place)[name] = value
    return in_one_shape({"version": VERSION, "seed": seed, "epoch": epoch} | place)


def _finish(group: PoolGroup, counters: Counters) -> None:
    if group.needs(threading.current_thread()):
        # The garbage collector has come here in a thread that would wait for itself. Where the
        # system has no more threads, the workers leave when CPython ends their executor.
        closing = threading.Thread(target=_finish, args=(group, counters), daemon=True)
        closing.name = "minloader-close"
        with suppress(RuntimeError):
            closing.start()
        return
    group.close()
    counters.end_trace()


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
