"""The loader: items from the sampler go down to workers, batches come back in order.

docs/architecture.md draws that, and follows a batch and a state through the modules. Here are the
arguments, which are checked and handed on, and what users call. What the consumer was given is a
*position* (``_epochs/position.py``); all else is a cache.
"""

from __future__ import annotations

import logging
import os
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

from minloader import _arguments as arguments
from minloader import _protocols as protocols
from minloader._arguments import checked_int
from minloader._epochs.course import Course
from minloader._epochs.iterator import Batches, SeveralEpochs
from minloader._epochs.options import OnError, Options, Shared
from minloader._formats import brief_repr
from minloader._pools.group import PoolGroup
from minloader._protocols import B
from minloader._sampling.batch import BatchSampler
from minloader._sampling.ranks import dealer_of, rank_of_stream
from minloader._sampling.source import Indices
from minloader._worker.messages import (
    Job,
    JobOptions,
    OnSampleError,
    WorkerInfo,
    sample_error_handler,
)

if TYPE_CHECKING:
    from minloader._diagnosis.stats import Stats

logger = logging.getLogger("minloader")


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
            fails with :class:`BatchTimeout`. For ``executor="process"`` alone: a thread cannot
            be killed. With ``num_workers=0`` nobody is there to look.
        retries: how often a batch is tried again whose worker process died while making it,
            before it fails with :class:`WorkerDied`; or that an executor of yours lost.
        on_error: what an exception that makes a batch fail does: "raise" it from ``next``
            (the one after gives the next batch), "skip" the batch with a warning in the
            log, or a callable that is given a :class:`BatchError` here and returns a batch in its
            place, or :data:`SKIP`, or raises. Whatever it is, a sample that is :data:`SKIP` is left
            out, and an epoch that gives no batch since its batches failed ends in a
            :class:`BatchError`.
        on_sample_error: what becomes of a sample on which the dataset or ``transform`` fails, or
            past ``retries`` hangs or takes its worker along: "raise" has its batch fail, "skip"
            leaves it out of its batch, with a warning in the log, and a callable returns a sample
            in its place, or :data:`SKIP`, or raises, so that the batch fails. The callable is given
            a :class:`BatchError` with the sample, where that is made: in the worker.
        max_errors: how many samples of an epoch may fail, and batches of which it is not known by
            which sample; the same sample counts once. One more that fails ends the loop with a
            :class:`BatchError` in its place, which shows the first ones, whatever ``on_error`` is.
            States keep the count. None: any number.
        chunks: whether tiny batches may travel several to a task, whatever the sampler is. They do
            where it cannot look at the loop: lists, ranges, samplers of minloader and of torch. Any
            other is never read further ahead than ``prefetch_factor * num_workers`` batches, so
            that it may follow the loop.
        shared_memory: whether batches travel in shared memory; an int: the most bytes to hold
            there. True: half of what is free. Past that, batches come through a pipe, slower.
        worker_memory_limit: bytes of memory of its own past which a worker process is replaced,
            between batches (all workers are, together). Tiny batches then travel one by one. None:
            no limit.

    Raises:
        TypeError: an argument is of the wrong kind, or cannot be sent to the workers.
        ValueError: an argument has an impossible value, or excludes another.
    """

    _arguments: tuple[dict[str, Any], dict[str, Any]]  # those given, and the defaults
    _without_processes = "use executor='thread'"  # what errors advise

    __reduce__ = arguments.refuse_copies

    @arguments.explain_arguments
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
        on_sample_error: OnSampleError = "raise",
        max_errors: int | None = None,
        chunks: bool = False,
        shared_memory: bool | int = True,
        worker_memory_limit: int | None = None,
    ) -> None:
        num_workers = arguments.checked_num_workers(num_workers)
        prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1)
        self._any_seed = seed is None
        seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        seed = checked_int("seed", seed, 0)
        in_order = arguments.checked_bool("in_order", in_order)
        make_group = _group_for(executor)
        timeout = arguments.checked_timeout(timeout, executor)
        retries = checked_int("retries", retries, 0)
        arguments.check_memory_limit(worker_memory_limit, executor)
        budget = arguments.checked_shared_memory(shared_memory)
        arguments.check_on_error("on_error", on_error)
        arguments.check_on_error("on_sample_error", on_sample_error)
        max_errors = arguments.checked_max_errors(max_errors)
        arguments.check_callable("transform", transform)
        arguments.check_callable("collate_fn", collate_fn)
        arguments.check_callable("worker_init_fn", worker_init_fn)
        chunks = arguments.checked_bool("chunks", chunks)

        self.dataset = dataset
        self.sampler: Iterable[Any] = ()  # as given, or made here; of a stream, none
        is_stream = protocols.is_stream(dataset, sampler)
        if is_stream:
            batch_size = arguments.checked_stream(batch_size, shuffle, last_batch, collate_fn)
            from minloader._diagnosis.rarely_meant import look_at_bound

            look_at_bound(dataset, (transform, collate_fn, worker_init_fn))
        else:
            arguments.check_dataset(dataset, awaits=transform is not None or collate_fn is not None)
            is_here = not num_workers or executor == "thread"
            self.sampler = _make_sampler(
                dataset, sampler, batch_size, shuffle, last_batch, seed, is_here=is_here
            )
        collates: Callable[[list[Any]], Any] | None = collate_fn
        if batch_size is not None and collate_fn is None:
            from minloader._sampling.collate import collate  # which needs numpy

            collates = collate
        job = Job(
            dataset=dataset,
            transform=transform,
            collate_fn=collates,
            worker_init_fn=worker_init_fn,
            options=JobOptions(
                memory_limit=worker_memory_limit,
                batch_size=batch_size if is_stream else None,
                keep_last=last_batch == "keep",
                on_sample_error=sample_error_handler(on_sample_error),
                is_stream=is_stream,
                rank=rank_of_stream(dataset) if is_stream else dealer_of(self.sampler).rank,
                seed_generators=arguments.checked_bool("seed_generators", seed_generators),
                without_processes=self._without_processes,
            ),
        )
        if job.options.seed_generators:
            from minloader._worker.own_generators import check_can_be_seeded  # of few

            check_can_be_seeded(job, executor)
        group = make_group(
            job=job,
            executor=executor,
            context=arguments.checked_context(mp_context, executor),
            budget=budget,
            timeout=timeout,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            seed=seed,
        )
        options = Options(
            in_order=in_order,
            retries=retries,
            on_error=on_error,
            max_errors=max_errors,
            concurrency=protocols.reads_at_once(dataset),
            chunks=chunks,
        )
        self._shared = Shared(options, group)
        self._course = Course(self._shared, self.sampler, is_own=sampler is None)
        # The iterators have it, too: the workers live as long as any of these.
        self._end = weakref.finalize(self._shared, group.close)

    def __setattr__(self, name: str, value: Any) -> None:
        is_made, public = "_end" in vars(self), name[0] != "_"
        own = type(self) is Loader or name in vars(self)  # not an attribute of a subclass
        if is_made and public and own and name not in ("epoch", "num_workers"):
            from minloader._diagnosis.mistakes import check_attribute

            check_attribute(self, name, self._arguments[1])
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        given = self._arguments[0] | {"num_workers": self.num_workers}
        values = [f"{name}={brief_repr(value)}" for name, value in given.items()]
        return f"<{'closed ' * self._shared.is_closed}Loader({', '.join(values)})>"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._shared.group.seed

    @property
    def num_workers(self) -> int:
        """Number of workers. Setting it adds or removes some, also in the middle of an epoch: the
        batches stay the same, and what is under way is not lost.

        Raises:
            TypeError, ValueError: it is no number of workers; or there were none, and the dataset
                cannot be sent to any.
            RuntimeError: the loader is closed.
        """
        return self._shared.group.num_workers

    @num_workers.setter
    def num_workers(self, num_workers: int) -> None:
        self._shared.check_open()
        num_workers = arguments.checked_num_workers(num_workers)
        group = self._shared.group
        if num_workers != group.num_workers:
            group.tidy()
            self._shared.counters.former = self._shared.stats.without_events()
            group.resize(num_workers)
            if self._course.shards is not None:
                _look_at_shards(num_workers, self._course.shards)

    @property
    def stats(self) -> Stats:
        """A copy of what was counted so far; see :class:`Stats`."""
        return self._shared.stats

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
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
        from minloader._diagnosis.trace import Traced  # few write one

        return Traced(self._shared, path)

    def __len__(self) -> int:
        """Number of batches of the epoch under way, or else of the next.

        Raises:
            TypeError: the sampler has no length, or there is none.
        """
        if self._course.shards is not None:
            raise TypeError("this loader has no length, since its dataset is a stream")
        try:
            return self._course.length()
        except TypeError as error:
            raise TypeError(
                f"this loader has no length, since its sampler, {brief_repr(self.sampler)}, has "
                f"none: {error}"
            ) from error

    # --- epochs

    def __iter__(self) -> Iterator[B]:
        """Begin a new epoch; with workers, its first batches are under way on return.

        After :meth:`load_state_dict`: the rest of that state's epoch.

        Raises:
            RuntimeError: the loader is closed, or its sampler is an iterator and used up.
            ValueError: the sampler does not give what it gave when the state was taken.
        """
        batches: Batches[B] = Batches(self._course)
        cursor = batches.begin(sends=True)
        # No call behind this line, so no Ctrl-C: an epoch that was begun is the consumer's.
        batches.epoch = cursor.epoch
        self._course.cursor = cursor
        return batches

    def epochs(self, n: int | None = None, *, until: int | None = None) -> Iterator[tuple[int, B]]:
        """Go through the next epochs, as if each were iterated by itself: order, errors, state.

        An epoch begins when the one before is over. Who needs no gap there gives the loader a
        sampler without an end.

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
        n = None if n is None else checked_int("n", n, 0)
        until = None if until is None else checked_int("until", until, 0)
        if until is not None:
            from minloader._diagnosis.rarely_meant import look_at_left

            look_at_left(self._course.cursor, until)
        return SeveralEpochs(self._course, n, until)

    @property
    def epoch(self) -> int:
        """Number that the next ``iter(loader)`` will have. To set it is to call
        :meth:`set_epoch`."""
        return self._course.number

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which decides its order and its seeds.

        After :meth:`load_state_dict` or :meth:`skip`, a number other than that of the next epoch
        begins that epoch anew, with all its batches.

        Raises:
            TypeError, ValueError: it is no number of an epoch.
        """
        self._course.set_number(checked_int("epoch", epoch, 0))

    def skip(self, n: int) -> None:
        """Leave out the next ``n`` batches without making them, as after a spike of the loss.

        They count as handed over, for a state too. All other batches stay as they are. In the
        middle of an epoch, whose iterator somebody has, the next batches in the order of the
        sampler are left out, up to the end of the epoch. What the sampler raises among them comes
        from the next ``next``. Otherwise it is the first ones of the next ``iter``, also after
        :meth:`load_state_dict` and :meth:`set_epoch`. (After Ctrl-C, a traceback that is kept has
        the iterator, too: call ``iter`` first, and then this.)

        Args:
            n: how many batches, as the sampler gives them.

        Raises:
            TypeError, ValueError: ``n`` is no number of batches; or the dataset is a stream, which
                can only be read on: take its batches, and drop them.
            RuntimeError: the loader is closed; or :func:`minloader.prefetch` takes batches ahead of
                the consumer; or the sampler, the dataset or ``on_error`` calls this.
        """
        n = checked_int("n", n, 0)
        self._shared.check_open()
        if self._course.shards is not None:
            raise TypeError(
                "skip is for loaders with a sampler, but the dataset is a stream, which can only "
                "be read on; take the batches from the iterator, and drop them"
            )
        self._course.skip(n)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is: what was delivered, whatever was read ahead.

        The state is of the epoch that was begun last, also when its iterator is gone. Between
        epochs it is the beginning of the next one. It is small, and fits into JSON if the state of
        the sampler, or of the stream, does. Any thread may call it at any time.

        Raises:
            Exception: what the sampler's ``state_dict`` raises.
        """
        return self._course.state_dict()

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
        self._shared.check_open()
        course = self._course
        position, seed = course.read_state(state, None if self._any_seed else self.seed)
        if position.is_stream:
            from minloader._diagnosis.mistakes import check_stream_state

            check_stream_state(self.dataset, position, allow)
            _look_at_shards(self.num_workers, len(position.lanes))
        else:
            position = course.adapt(position, seed, allow)
        # Only now: the epoch under way goes on after a state that was refused.
        course.load(position, seed)

    # --- workers

    def start(self) -> None:
        """Start all workers now, without waiting for them, so that the first batch comes sooner.

        Raises:
            RuntimeError: the loader is closed.
        """
        self._shared.check_open()
        self._shared.counters.started_early = True
        self._shared.group.start()

    def close(self) -> None:
        """End the workers and all they started, at once, and let the dataset's copy go.

        Runs by itself when the loader is garbage-collected and when the interpreter exits. An
        iterator still in use raises RuntimeError from then on.
        """
        self._shared.is_closed = True
        self._shared.generation += 1
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _look_at_shards(num_workers: int, shards: int) -> None:
    """Say in the log if a stream has fewer shards than there are workers."""
    if num_workers > shards:
        from minloader._diagnosis.shard_watch import report_idle_workers

        report_idle_workers(num_workers, shards)


def _group_for(executor: Any) -> type[PoolGroup]:
    """Return the class of the pools, by ``executor``."""
    if executor in ("process", "thread"):
        return PoolGroup
    if not isinstance(executor, Executor):
        raise ValueError(
            "executor must be 'process', 'thread' or a concurrent.futures.Executor (of a Dask "
            f"client: client.get_executor(pure=False)), got {brief_repr(executor)}"
        )
    from minloader._foreign.pool import ForeignPoolGroup  # few bring one

    return ForeignPoolGroup


def _make_sampler(
    dataset: Any,
    sampler: Iterable[Any] | None,
    batch_size: int | None,
    shuffle: bool,
    last_batch: Any,
    seed: int,
    *,
    is_here: bool,
) -> Iterable[Any]:
    """Return the sampler itself, or one for the dataset's length.

    Where batches are made of the dataset here, its length is asked in each epoch. Worker processes
    have it as it was when they were started.
    """
    if sampler is not None:
        arguments.check_sampler_alone(batch_size, shuffle, last_batch)
        arguments.check_iterable("sampler", sampler)
        if protocols.is_array_like(dataset) or hasattr(sampler, "lengths_digest"):
            from minloader._diagnosis.mistakes import check_fit

            check_fit(dataset, sampler)
        return sampler
    size = arguments.dataset_length(dataset)
    if not size:
        logger.warning("the dataset, %s, has no samples", brief_repr(dataset))
    count = _length_of(dataset) if is_here else (lambda: size)
    if batch_size is None and not shuffle and last_batch == "keep":
        return Indices(count)
    return BatchSampler(count, batch_size, shuffle=shuffle, last_batch=last_batch, seed=seed)


def _length_of(dataset: Any) -> Callable[[], int]:
    """Return a function that asks a dataset for its length, and does not keep it.

    A sampler and its iterator have each other: what they keep stays until the cyclic collection.
    """
    try:
        held: Callable[[], Any] = weakref.ref(dataset)
    except TypeError:  # a list's memory can wait
        return dataset.__len__  # type: ignore[no-any-return]
    return lambda: len(held())
