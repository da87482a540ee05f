"""Torch's ``DataLoader`` on minloader's workers.

A :class:`DataLoader` is one of torch's, whose iterator is another. With the first batch of an epoch
it makes a :class:`minloader.Loader`, and does around it what torch's loader does in the parent: it
draws the same random numbers from the same generators, and so shuffles as torch does. Workers
collate into arrays in shared memory (``_sampling/torch_collate.py``), which arrive here as tensors
over that memory. They import torch only if the dataset does, or for samples that are not alike.
"""

from __future__ import annotations

import copy
import functools
import inspect
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from minloader import _arguments as arguments
from minloader import _protocols as protocols
from minloader._arguments import checked_int
from minloader._epochs.course import Cursor
from minloader._epochs.epoch import AT_HAND, Commit
from minloader._epochs.iterator import Batches
from minloader._epochs.options import OnError
from minloader._epochs.position import check_version
from minloader._epochs.task import Delivery
from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._loader import Loader
from minloader._pools.processes import ProcessPool
from minloader._prefetch import Prefetch
from minloader._protocols import has_epochs, is_read_once
from minloader._sampling.ranks import dealer_of, with_inner
from minloader._sampling.reader import used_up
from minloader._sampling.torch_collate import collate, convert
from minloader._worker import torch_conventions as conventions
from minloader._worker import torch_stream
from minloader._worker.messages import OnSampleError
from minloader._worker.seeds import in_turn
from minloader._worker.shuffled import shuffled
from minloader._worker.stream_reader import put_back
from minloader.torch.device import can_pin, check_pinning, pin
from minloader.torch.generators import states_of
from minloader.torch.order import EpochOrder, Items, Order, Start, draw_seed

if TYPE_CHECKING:
    from minloader._diagnosis.stats import Stats

VERSION = 1
"""Version of the states."""

T = TypeVar("T")

# What not every version of torch has from 2.2 on, or may have later; torch's loader may get more
# type parameters.
_TorchLoader: Any = TorchLoader
_TorchIterator: Any = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", Iterator)
_NAMES = ("IterDataPipe", "MapDataPipe")
_PIPES = tuple(vars(torch.utils.data)[name] for name in _NAMES if name in vars(torch.utils.data))
_HAS_ORDER = "in_order" in inspect.signature(TorchLoader.__init__).parameters

IterableDataset.register(shuffled)  # also where torch asks

OWN_ARGUMENTS = (
    *("transform", "on_error", "on_sample_error", "max_errors", "retries", "shared_memory"),
    *("worker_memory_limit", "seed_generators"),
)
"""Arguments that torch's loader has not."""

_SETTINGS = (
    *("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "collate_fn", "in_order"),
    *("multiprocessing_context", "_order", *OWN_ARGUMENTS),
)
"""Attributes that the workers are made with. They may be set: the next epoch has new workers."""


class _Loader(Loader[Any]):
    """The loader under one of torch's kind, whose errors speak of that one's arguments."""

    _without_processes = "set num_workers=0"

    @property
    def would_abandon(self) -> bool:
        """Whether the consumer leaves an epoch if the next one begins now."""
        epoch = self._course.cursor.epoch
        return epoch is not None and not epoch.is_over

    @property
    def is_resumed(self) -> bool:
        """Whether a state was loaded, or batches were left out, of an epoch that has not begun."""
        return self._course.cursor.start is not None

    @property
    def is_within(self) -> bool:
        """Whether the consumer is between the first batch of an epoch and the end of it."""
        start = self._course.cursor.start
        return self.would_abandon if start is None else start.has_begun

    @property
    def is_in_use(self) -> bool:
        """Whether there is an iterator over its batches."""
        return any(not each.is_abandoned for each in self._begun)

    @property
    def under_way(self) -> set[int]:
        """Numbers of the epochs that its iterators are in."""
        return {each.number for each in self._begun if each.is_under_way}

    @property
    def _begun(self) -> list[Any]:
        return protocols.snapshot(self._shared.group.epochs)

    @property
    def is_idle(self) -> bool:
        """Whether no task is under way."""
        return not self._shared.group.in_flight

    def serve_drop_in(self) -> None:
        """Take the seed of whatever state is loaded, and have no start() advised: it is hidden."""
        self._any_seed = True
        self._shared.counters.started_early = True

    def refuse(self, state: Any) -> None:
        """Raise what loading a state would."""
        position, seed = self._course.read_state(state, None)
        if not position.is_stream:
            self._course.adapt(position, seed, ())

    def begin(self, batches: Batches[Any]) -> Cursor:
        """Begin an epoch, the rest of one if a state was loaded, for an iterator."""
        batches.course = self._course
        return self._course.begin(batches.interrupts)

    def count_on(self, former: _Loader) -> None:
        """Count where a former loader does, whose iterators may be in use."""
        counters = former._shared.counters
        if former.num_workers != self.num_workers:
            counters.former = former.stats.without_events()
        self._shared.counters = counters

    def supersede(self) -> None:
        """Have the iterators that were begun raise an error: a state was loaded."""
        self._shared.generation += 1

    def renew_workers(self) -> None:
        """Have the next tasks go to new workers, which get the dataset as it is now.

        Forked ones get it as it is when they are forked. Only while it is idle.

        Raises:
            TypeError: what the workers need cannot be sent to them; they are the former ones then.
        """
        group = self._shared.group
        former = group.sent
        sent = group.send_job()
        for pool in group.pools:
            assert isinstance(pool, ProcessPool)
            pool.job = sent
            pool.replace_workers()
        if former is not None:
            former.close()


class DataLoader(_TorchLoader, Generic[T]):  # type: ignore[misc]
    """Torch's ``DataLoader`` on minloader's workers: the same arguments, attributes and batches.

    ``for batch in loader`` is one epoch. With the same ``torch.manual_seed``, or ``generator``, it
    has the order that torch's loader would give it. An epoch begins with the first ``next``:
    ``iter`` draws no random number and reads no sampler. Tensors in a batch are views of shared
    memory. They are writable, nobody else uses them, and one of them keeps its whole batch in
    memory.

    What differs from torch's loader: ``random``, ``numpy.random`` and torch are seeded for each
    batch, from the loader's seed, the number of the epoch and the number of the batch, so that the
    batches are the same for every number of workers. The loader's seed is drawn when the first
    epoch begins. Workers are replaced when they die. With ``persistent_workers=False`` each epoch
    starts workers of its own, as with torch; those of an epoch stay until the next one begins.

    Args:
        dataset: map-style (it has ``__getitem__``), or a ``torch.utils.data.IterableDataset``, also
            one that is :class:`minloader.shuffled`. The workers read it.
        batch_size: number of samples in a batch. None: each sample is a batch by itself.
        shuffle: whether each epoch visits the dataset in another order.
        sampler: iterable of indices, in place of ``shuffle``; read in this process.
        batch_sampler: iterable of lists of indices, in place of ``batch_size``, ``shuffle``,
            ``sampler`` and ``drop_last``; read in this process.
        num_workers: number of worker processes. 0: batches are made in this process.
        collate_fn: called in the worker with the list of samples, to make a batch of them; without
            batches, with each sample. None: as torch's ``default_collate``, or
            ``default_convert``.
        pin_memory: whether to copy tensors into pinned memory, in a thread of this process.
            Without an accelerator there is a warning instead.
        drop_last: whether to leave out an incomplete last batch.
        timeout: seconds that the making of a batch may take. The batch is then tried once more,
            and after that fails with :class:`minloader.BatchTimeout`. 0: no limit.
        worker_init_fn: called once in each worker, with the number of the worker.
        multiprocessing_context: how workers are started: a ``multiprocessing`` context, or the
            name of one. None: as ``multiprocessing`` does by default, and so torch: "fork" on
            Linux up to Python 3.13, "forkserver" from 3.14, elsewhere "spawn".
        generator: the generator that the order and the loader's seed are drawn from. None: torch's
            global one.
        prefetch_factor: number of batches under way for each worker. None: 2.
        persistent_workers: whether workers stay between epochs, with the dataset as it was when
            they were started. False: each epoch's workers get it as it is when the epoch begins. So
            do those of a stream of which ``set_epoch`` was called since.
        pin_memory_device: type of the accelerator in use, or "".
        in_order: False: batches come as they get ready.
        snapshot_every_n_steps: that of torchdata's ``StatefulDataLoader``; without effect, since
            each state is of the last batch.
        transform: minloader's own, as are those that follow: called in the worker with each sample.
        on_error: what an error that makes a batch fail does; see :class:`minloader.Loader`.
        on_sample_error: what an error of one sample does, also if it hangs or kills its worker; see
            :class:`minloader.Loader`.
        max_errors: how many samples of an epoch may fail; see :class:`minloader.Loader`.
        retries: how often a batch is tried again whose worker process died while making it.
        shared_memory: whether batches travel in shared memory; an int: the most bytes to hold
            there.
        worker_memory_limit: most memory, in bytes, that a worker process may have for itself; one
            that has more is replaced.
        seed_generators: whether random generators that the dataset, ``transform`` and
            ``collate_fn`` have of their own are seeded for each batch, as the global ones are.

    Raises:
        ValueError: an argument has an impossible value, or excludes another.
        TypeError: an argument is of the wrong type.
        NotImplementedError: the dataset is a ``DataPipe``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        transform: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        on_sample_error: OnSampleError = "raise",
        max_errors: int | None = None,
        retries: int = 1,
        shared_memory: bool | int = True,
        worker_memory_limit: int | None = None,
        seed_generators: bool = False,
    ) -> None:
        if isinstance(dataset, _PIPES):
            raise NotImplementedError(
                f"dataset is a DataPipe, {type(dataset).__name__}, whose shuffling and "
                "sharding are steered by torch's own loader; use that one, or an IterableDataset "
                "that shards itself by torch.utils.data.get_worker_info()"
            )
        if _is_iterable_alone(dataset):
            raise TypeError(
                f"dataset has __iter__, but no __getitem__, got {brief_repr(dataset)}; derive its "
                "class from torch.utils.data.IterableDataset, or use minloader.Loader, which takes "
                "it"
            )
        num_workers = arguments.checked_num_workers(num_workers)
        if prefetch_factor is not None:
            prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1)
        _check_timeout(timeout)
        _check_generator(generator)
        arguments.check_callable("collate_fn", collate_fn)
        arguments.check_callable("worker_init_fn", worker_init_fn)
        arguments.check_callable("transform", transform)
        arguments.check_on_error("on_error", on_error)
        arguments.check_on_error("on_sample_error", on_sample_error)
        arguments.checked_shared_memory(shared_memory)
        arguments.check_memory_limit(worker_memory_limit, "process")
        if pin_memory:
            check_pinning(pin_memory_device)
        self.transform: Callable[[Any], Any] | None = transform
        self.on_error: OnError = on_error
        self.on_sample_error: OnSampleError = on_sample_error
        self.max_errors: int | None = arguments.checked_max_errors(max_errors)
        self.retries: int = checked_int("retries", retries, 0)
        self.shared_memory: bool | int = shared_memory
        self.worker_memory_limit: int | None = worker_memory_limit
        self.seed_generators: bool = arguments.checked_bool("seed_generators", seed_generators)
        self._forget()
        self.in_order: bool = arguments.checked_bool("in_order", in_order)
        self.snapshot_every_n_steps: int | None = snapshot_every_n_steps
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn),
            *(pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _HAS_ORDER else {}),
        )
        # After torch has refused what excludes each other.
        arguments.check_iterable("sampler", sampler)
        arguments.check_iterable("batch_sampler", batch_sampler)

    def _forget(self) -> None:
        """Be as if no epoch had begun."""
        self._order: Order | None = None
        self._loader: _Loader | None = None
        self._former: list[_Loader] = []  # of iterators that were begun before, and are in use
        self._made_with: list[Any] = []  # settings of the loader
        # By the loader's number of an epoch: those that samplers and stream showed as a state from
        # within it was loaded.
        self._numbers_loaded: dict[int, list[int | None]] = {}
        self._left_out = 0  # batches, by skip, before there was a loader
        self._closed = False
        self._rests = False  # whether iterators that begin give nothing

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: one that has not begun any epoch."""
        blank = type(self).__new__(type(self))
        blank._forget()
        return vars(self) | vars(blank)

    @property
    def stats(self) -> Stats:
        """What took how long so far; see :class:`minloader.Stats`. A copy, as of now."""
        from minloader._diagnosis.stats import Stats

        return Stats() if self._loader is None else self._loader.stats

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in the batches of all ranks; None if the loader does not batch."""
        size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        return None if size is None else size * dealer_of(self._index_sampler).ranks

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers, and the dataset, the number of the epoch, as far as they want it."""
        for each in (*with_inner(self._index_sampler), self.dataset):
            if has_epochs(each):
                each.set_epoch(epoch)

    def skip(self, n: int) -> None:
        """Leave out the next ``n`` batches without making them, as for a run that has a count.

        They count as handed over, for a state too. In the middle of an epoch they are its next
        ones, otherwise the first ones of the epoch that begins next, or of what a state has left of
        it. See :meth:`minloader.Loader.skip`, also for what is refused.
        """
        self._check_open()
        if self._loader is not None:
            self._loader.skip(n)
        else:
            # It is made, and its seed drawn, when the first epoch begins; this one only refuses.
            self._sync_order()
            self._make(0).skip(n)
            self._left_out += n

    # --- an epoch

    def __iter__(self) -> EpochBatches[T] | PinnedBatches[T]:
        """Return an iterator over the next epoch, which begins with its first ``next``.

        Raises:
            RuntimeError: the loader is closed.
        """
        return self._get_iterator()

    def _get_iterator(self) -> EpochBatches[T] | PinnedBatches[T]:
        # Subclasses call it, as they do torch's.
        self._check_open()
        batches: EpochBatches[T] = EpochBatches(_Held(self))
        if self.pin_memory and self.num_workers and can_pin():
            return PinnedBatches(batches)
        return batches

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this DataLoader is closed; make a new one")

    def _begin(self, batches: EpochBatches[T]) -> Cursor:
        """Begin the one epoch of an iterator, or the rest of one if a state was loaded.

        An interrupt leaves all as it was, or what was drawn for the next try. Several threads may
        begin epochs, of any loaders: one after the other, since they draw from the same generators.

        Raises:
            RuntimeError: the loader is closed; or a sampler is an iterator, and used up.
            TypeError: what the workers need cannot be sent to them.
            ValueError: an attribute was set to a value that does not go with the others.
        """
        self._check_open()
        _check_timeout(self.timeout)  # as all attributes, these may have been set
        _check_generator(self.generator)
        self._leave_behind()
        order = self._sync_order()
        start = self._start_of(self._number)
        if not self._is_resumed:
            for name in "sampler", "batch_sampler":
                given = getattr(self, name)
                if self._number and is_read_once(given) and not has_epochs(given):
                    raise used_up(name, given)
        order.check(start)
        loader = self._ready()
        if isinstance(self.dataset, IterableDataset):
            # It is not read, but generators are drawn from.
            order.set_epoch(self._number)
            iter(order)
        batches.held.renew(self)
        return loader.begin(batches)

    def _leave(self) -> None:
        """Begin the next epoch, or the rest of one if a state was loaded, and leave it unread."""
        batches: EpochBatches[T] = EpochBatches(_Held(self))
        cursor = in_turn(self._begin, batches)
        assert batches.course is not None
        batches.course.cursor = cursor
        if cursor.epoch is not None:
            cursor.epoch.leave()

    def _leave_behind(self) -> None:
        """Go on to another epoch, if a state was loaded, and a sampler was set to that since.

        Trainers do so if all batches of the state's epoch were delivered.
        """
        if self._loader is None or not self._is_resumed:
            return
        numbers_loaded = self._numbers_loaded.get(self._number, [])
        for epoch, loaded in zip(self._numbers, numbers_loaded, strict=False):
            if epoch is None or loaded is None or epoch == loaded:
                continue
            if epoch < loaded:
                warnings.warn(
                    f"a state of epoch {loaded} was loaded, but then the sampler was set to epoch "
                    f"{epoch}, which begins anew; call set_epoch({loaded}) to resume",
                    stacklevel=9,
                )
            number = self._number + epoch - loaded
            self._loader.set_epoch(number if number >= 0 else self._number + 1)
            self._sync_order().leave()
            return

    @property
    def _numbers(self) -> list[int | None]:
        """The numbers of their epochs that the samplers, or the stream, show; None of another."""
        return [said and said["epoch"] for said in self._sync_order().said()]

    def _sync_order(self) -> Order:
        """Return the order of the loader's sampler, which a subclass may have replaced."""
        if self._order is None or self._order.sampler is not self._index_sampler:
            stream = self.dataset if isinstance(self.dataset, IterableDataset) else None
            self._order = Order(self._index_sampler, self.generator, stream)
        return self._order

    def _start_of(self, number: int) -> Start:
        """Return how an epoch starts: as was noted, or else as things are now, which is noted."""
        order = self._sync_order()
        start = order.starts.get(number)
        is_next = number == self._number
        if is_next and self._loader is not None and self._loader.would_abandon:
            order.leave()
        if start is None or (is_next and not start.begun and order.is_reseeded(start)):
            stays = self.persistent_workers and self._number > 0  # torch's iterator, and its seed
            twice = self.num_workers > 0 and not stays
            start = order.start_now(seeded=not stays, twice=twice)
            # After Ctrl-C epochs that there are iterators of are begun again.
            kept = {number - 1}.union(*(each.under_way for each in self._loaders))
            order.starts = {each: order.starts[each] for each in kept & order.starts.keys()}
        elif is_next and not start.begun:  # samplers may have been told another epoch since
            start = start._replace(said=order.said())
        order.starts[number] = start
        return start

    @property
    def _loaders(self) -> list[_Loader]:
        """The loader, and those of iterators that were begun before and are in use."""
        return [each for each in (*self._former, self._loader) if each is not None]

    @property
    def _number(self) -> int:
        """That of the next epoch in the loader."""
        return 0 if self._loader is None else self._loader.epoch

    @property
    def _is_within(self) -> bool:
        """Whether the consumer is between the first batch of an epoch and the end of it."""
        return self._loader is not None and self._loader.is_within

    @property
    def _is_resumed(self) -> bool:
        """Whether a state was loaded, and its epoch has not begun since."""
        return self._loader is not None and self._loader.is_resumed

    def _ready(self) -> _Loader:
        """Return the loader, for an epoch to begin: a new one if an attribute has changed.

        Without ``persistent_workers`` it has new workers, which get the dataset as it is now. Those
        of an epoch that is under way belong to that: then it is a new loader, too.
        """
        self._sync_order()
        former = self._loader
        settings = [getattr(self, name) for name in _SETTINGS]
        keeps_stream = self.persistent_workers and isinstance(self.dataset, IterableDataset)
        if keeps_stream:
            settings.append(self._numbers)  # nobody tells the workers' copies of another epoch
        if former is not None and settings == self._made_with:
            if self.persistent_workers or not self.num_workers:
                return former
            if former.is_idle:
                former.renew_workers()
                return former
        in_use = [each for each in self._loaders if each.is_in_use]
        if former is None:
            made = self._make(self._next_seed())
            if self._left_out:
                made.skip(self._left_out)
        else:
            made = self._make(former.seed)
            if former.is_resumed:
                made.load_state_dict(former.state_dict())
            else:
                made.set_epoch(former.epoch)
            made.count_on(former)
        # Without a call in between, and so without Ctrl-C.
        self._made_with = settings
        self._loader = made
        self._former = in_use
        return made

    def _next_seed(self) -> int:
        """Return the seed that torch's loader draws, which is drawn as the epoch begins."""
        generator = self.generator or torch.default_generator
        copied = torch.Generator(generator.device)  # Ctrl-C must leave the other as it is
        copied.set_state(generator.get_state())
        return draw_seed(copied)

    def _make(self, seed: int) -> _Loader:
        workers = self.num_workers
        if self.timeout and not workers:
            raise ValueError(
                f"timeout={self.timeout} is for workers, but num_workers is 0, and nobody is there "
                "to look; drop timeout"
            )
        collate_fn = self._workers_collate()
        options: dict[str, Any] = {
            "num_workers": workers,
            "prefetch_factor": 2 if self.prefetch_factor is None else self.prefetch_factor,
            "timeout": float(self.timeout) or None,
            "mp_context": self.multiprocessing_context or _start_method(),
            "in_order": self.in_order,
            "seed": seed,
        }
        options |= {name: getattr(self, name) for name in OWN_ARGUMENTS}
        stream = isinstance(self.dataset, IterableDataset)
        if self.batch_sampler is None:
            first = self.transform
            options["transform"] = conventions.Both(first, collate_fn) if first else collate_fn
        else:
            options["collate_fn"] = collate_fn if stream else conventions.Collated(collate_fn)
        if workers and self.worker_init_fn is not None:
            options["worker_init_fn"] = conventions.WorkerInit(self.worker_init_fn)
        dataset = self.dataset
        if stream:
            read_once = workers > 0 and not self.persistent_workers
            dataset = torch_stream.Stream(dataset, read_once=read_once)
            if self.batch_size is not None:
                last_batch = "discard" if self.drop_last else "keep"
                options |= {"batch_size": self.batch_size, "last_batch": last_batch}
        else:
            from minloader._diagnosis.rarely_meant import look_at_lengths

            look_at_lengths(dataset, self._order)
        made = _Loader(dataset, None if stream else self._order, **options)
        made.serve_drop_in()
        return made

    def _workers_collate(self) -> Callable[[Any], Any]:
        """Return the function that makes batches where they are made."""
        function: Callable[[Any], Any] = self.collate_fn
        if not self.num_workers or function not in (default_convert, default_collate):
            return function
        if function is default_convert:
            return convert
        home = default_collate.__module__
        added = {k: f for k, f in default_collate_fn_map.items() if f.__module__ != home}
        return conventions.ExtendedCollate(added) if added else collate

    def _as_loader(self, **settings: Any) -> Loader:
        """Return a Loader of the same batches, for the doctor and the audit. Use it instead.

        Its seed is 0, and its order follows from the number of the epoch, so that runs can be
        compared.

        Args:
            settings: attributes to set before. Without ``num_workers`` among these it has one
                worker at least.
        """
        for name, value in ({"num_workers": self.num_workers or 1} | settings).items():
            setattr(self, name, value)
        if not self.num_workers:
            self.timeout = 0
        self._order = EpochOrder(self._index_sampler, self.generator)
        return self._make(0)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return which batches were delivered, as a dict of a few kilobytes that is fit for JSON.

        Batches that were only read ahead do not count; see :meth:`minloader.Loader.state_dict`.
        The state holds the generators as they were when the epoch began, so that a shuffled epoch
        can be continued, and what each sampler said of itself then: its state, or its number of
        the epoch. It does not restore global generators: a script that must repeat a run saves
        them itself, with the model.

        With a sampler that deals the epoch out to ranks, the state of one rank serves all of them.
        Otherwise, under ``torch.distributed``, its key is that of the rank.
        """
        if self._loader is None:
            self._start_of(self._number)
            self._ready()
        assert self._loader is not None
        state = self._loader.state_dict()
        start = self._start_of(state["epoch"])
        start = start._replace(begun=start.begun or state["epoch"] != self._number)
        if self._is_resumed and not start.begun:
            start = start._replace(noted=states_of(start.shared))
        known = {"loader": state, "start": start.encode()}
        # In a tuple, which is one leaf to torch's distributed checkpoints; see to_state.
        return {"version": VERSION, self._state_key(): (known,)}

    def _state_key(self) -> str:
        """Return the key of the state: that of the rank if other ranks have other states."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return "state"
        if distributed.get_world_size() == 1 or dealer_of(self._index_sampler).ranks > 1:
            return "state"
        return f"rank{distributed.get_rank()}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch continue with the batch after those that a state has delivered.

        Iterators that were begun before raise an error.

        The dataset and the samplers must be as they were. The number of workers may be another.
        Each sampler is put back here to what it said when the epoch began, by ``load_state_dict``
        or ``set_epoch``, and so is the number of a stream. What you tell them after that counts.

        Args:
            state: from :meth:`state_dict`, here or in another process.

        Raises:
            TypeError, ValueError: that is no state, or that of a loader unlike this one. (Some of
                it is noticed only by the first ``next``.)
            RuntimeError: the loader is closed.
        """
        self._check_open()
        known = self._read_state(state)
        start = Start.decode(known["start"])
        former = self._loader
        try:
            loader = self._ready() if former is None else former
            loader.refuse(known["loader"])
            order = self._sync_order()
            if not self.num_workers:
                self._put_stream_back(known["loader"])  # and then it is told its number
            (sampler,) = known["loader"].get("sampler") or (None,)
            order.put_back(start, sampler and sampler["state"])
            loader.load_state_dict(known["loader"])
        except BaseException:  # refused: the epoch under way goes on
            if former is None and self._loader is not None:
                self._loader.close()
            self._loader = former
            raise
        for each in self._former:
            each.supersede()
        order.starts = {loader.epoch: start}
        self._numbers_loaded = {loader.epoch: self._numbers} if start.begun else {}

    def _put_stream_back(self, state: Mapping[str, Any]) -> None:
        """Put a stream that is told its epochs, and read here, to a state from between two."""
        for stream in state.get("stream", ()):
            match stream["shards"]:
                case [{"at": 0, "state": {"dataset": known}}] if has_epochs(self.dataset):
                    put_back(self.dataset, known)

    def _read_state(self, state: Any) -> dict[str, Any]:
        """Return a copy of the part of a state that is for this loader, or refuse it."""
        key = self._state_key()
        if not isinstance(state, Mapping) or "version" not in state:
            from minloader._diagnosis.mistakes import part_meant  # which only an error needs

            part = part_meant(state, {"version", key}) if isinstance(state, Mapping) else ""
            raise TypeError(f"state must be what state_dict() gave, got {brief_repr(state)}{part}")
        check_version(state, VERSION)
        if isinstance(state.get("sampler"), str):
            raise ValueError(
                f"this is the state of a {state['sampler']}, not of a DataLoader; give what the "
                "loader's state_dict() returned, which has it inside"
            )
        if "seed" in state:
            raise ValueError(
                "the state is of a minloader.Loader, but this is a minloader.torch.DataLoader, "
                "whose epochs start from torch's generators; give it what its own state_dict() "
                "returned"
            )
        if key not in state:
            raise ValueError(
                f"the state has {brief_repr(sorted(state.keys() - {'version'}))}, but none for "
                f"{key!r}; save the state of each rank, unless a sampler deals the epoch out to "
                "the ranks"
            )
        match state[key]:
            case [{"loader": Mapping(), "start": Mapping(), **others} as known] if not others:
                return copy.deepcopy(dict(known))
        raise ValueError(f"the state is damaged: {brief_repr(state[key])}")

    # --- the end

    def close(self) -> None:
        """End the workers at once, as happens when the loader is garbage-collected."""
        self._closed = True
        for each in self._loaders:
            each.close()

    def __enter__(self) -> DataLoader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Held(Generic[T]):
    """The loader, as its iterator holds it: weakly, since a subclass may hold its iterator.

    So its workers, which end with the ``_Loader``, need no cyclic collection. What an iterator
    needs when nobody has the loader any more is in a plain one.

    Args:
        loader: as it is now.
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        self._loader = weakref.ref(loader)
        self.renew(loader)

    def renew(self, loader: DataLoader[T]) -> None:
        """Hold what the loader has now."""
        plain: DataLoader[T] = DataLoader.__new__(DataLoader)
        plain.__dict__.update(
            (name, each) for name, each in vars(loader).items() if name in _own_names()
        )
        self._plain = plain

    @property
    def loader(self) -> DataLoader[T]:
        """The loader, or what is left of it."""
        loader = self._loader()
        return self._plain if loader is None else loader

    def begin(self, batches: EpochBatches[T]) -> Cursor | None:
        """Begin the one epoch of the iterator; return None if the loader rests."""
        if self.loader._rests:
            return None
        cursor: Cursor = in_turn(self.loader._begin, batches)
        return cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader."""
        return self.loader.state_dict()


class EpochBatches(Batches[T], _TorchIterator):  # type: ignore[misc]
    """Iterator over the batches of one epoch, which begins with the first ``next``.

    It is one of torch's for Lightning, which leaves those out of copies.

    Args:
        held: the loader.
    """

    def __init__(self, held: _Held[T]) -> None:
        self.held = held
        owner = held.loader
        super().__init__(None)
        self._given = 0
        self._most = owner._IterableDataset_len_called  # list() asks for the length after this
        self._pins = owner.pin_memory and not owner.num_workers and can_pin()

    def __reduce__(self) -> NoReturn:
        _refuse_copies(self)

    def _begin(self) -> Cursor | None:
        return self.held.begin(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`DataLoader.state_dict`."""
        return self.held.state_dict()

    def _take(self, begin: float) -> Commit | None:
        commit = super()._take(begin)
        items = self._items
        looks = self._pins or self._most is not None or (items is not None and bool(items.own))
        self.is_plain = not (self.holds or looks)
        if commit is None or commit is AT_HAND:
            return commit
        delivery = commit.delivery
        if delivery.error is None:
            try:
                delivery.outcome = self._look_at(delivery.outcome)
            except Exception as error:  # it takes the place of the batch
                if breaks_in(error):
                    raise
                delivery.outcome = None
                delivery.error = error
        if items is not None and not self.holds:
            items.follow(commit.delivered)
        return commit

    @property
    def _items(self) -> Items | None:
        """What the sampler gives; None of a stream."""
        if self.epoch is None:
            return None
        items = getattr(self.epoch.lanes[0].feed, "iterator", None)  # a shard has none
        return items if type(items) is Items else None

    def _look_at(self, batch: Any) -> Any:
        self._given += 1
        if self._most is not None and self._given > self._most:
            warnings.warn(
                f"Length of IterableDataset {self.held.loader.dataset} was reported to be "
                f"{self._most} (when len(dataloader) was asked for), but {self._given} batches "
                "have been fetched; have each worker read its own part "
                "(torch.utils.data.get_worker_info)",
                stacklevel=4,
            )
        return pin(batch) if self._pins else batch

    def giving(self, held: tuple[Delivery, ...]) -> None:
        super().giving(held)
        if self._items is not None and self.epoch is not None:
            mine = [(each.task, each.ordinal) for each in held]
            self._items.follow(self.epoch.lanes[0].position(mine).given)

    def __len__(self) -> int:
        return len(self.held.loader._index_sampler)


class PinnedBatches(Prefetch[T], _TorchIterator):  # type: ignore[misc]
    """The same, over batches that a thread moves to pinned memory, ahead of the consumer."""

    def __init__(self, batches: EpochBatches[T]) -> None:
        super().__init__(batches, pin, 1)
        self._batches = batches

    def __reduce__(self) -> NoReturn:
        _refuse_copies(self)

    def __len__(self) -> int:
        return len(self._batches)


def _refuse_copies(iterator: Any) -> NoReturn:
    raise NotImplementedError(  # torch's class
        f"{type(iterator).__name__} cannot be pickled or copied, since the workers are its loader's"
    )


def _check_timeout(timeout: Any) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, got {brief_repr(timeout)}")
    if timeout < 0:
        raise ValueError(f"timeout must be at least 0 seconds, got {timeout}; 0 for no limit")


def _check_generator(generator: Any) -> None:
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, got {brief_repr(generator)}")


def _is_iterable_alone(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset) or callable(dataset):
        return False
    return isinstance(dataset, Iterable) and not protocols.has_samples(dataset)


def _start_method() -> str:
    """Return how torch's loader would start workers now. It stays the program's to set.

    Within joblib that is loky's way, which is for its own processes.
    """
    methods = multiprocessing.get_all_start_methods()  # the default is the first
    method = multiprocessing.get_start_method(allow_none=True)
    return method if method in methods else methods[0]


@functools.cache  # and not at import: documentation is made without torch
def _own_names() -> frozenset[str]:
    """Return the attributes of a loader without subclass, but for torch's place of an iterator."""
    return frozenset(vars(DataLoader(())).keys() - {"_iterator"})
