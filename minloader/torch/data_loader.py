"""Torch's ``DataLoader`` on minloader's workers.

A :class:`DataLoader` is one of torch's, whose iterator is another. With the first batch of an epoch
it makes a :class:`minloader.Loader`, and does around it what torch's loader does in the parent: it
draws the same random numbers from the same generators, and so shuffles as torch does. Workers
collate into arrays in shared memory (``_sampling/torch_collate.py``), which arrive here as tensors
over that memory. They import torch only if the dataset does, or for samples that are not alike.
"""

from __future__ import annotations

import copy
import inspect
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from numbers import Real
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from minloader import _checks as checks
from minloader._checks import check_int, part_meant, shown
from minloader._epochs.failures import OnError
from minloader._epochs.iterator import Batches as Epoch
from minloader._epochs.pending import Handover
from minloader._epochs.state import Note, check_version
from minloader._insight.counters import Stats
from minloader._loader import Loader
from minloader._prefetch import prefetch
from minloader._sampling.base import ranks_of, with_inner
from minloader._sampling.source import used_up
from minloader._sampling.torch_collate import collate, convert
from minloader._worker import torch_conventions as conventions
from minloader.torch.accelerate import notice
from minloader.torch.device import can_pin, check_pinning, pin
from minloader.torch.order import EpochOrder, EpochStart, Order, draw_seed

logger = logging.getLogger("minloader")

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

_SETTINGS = (
    *("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "collate_fn", "in_order"),
    *("multiprocessing_context", "transform", "on_error", "retries", "worker_memory_limit"),
    *("seed_generators", "_order", "_seed"),
)
"""Attributes that the workers are made with. They may be set: the next epoch has new workers."""


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
        dataset: map-style (it has ``__getitem__``), or a ``torch.utils.data.IterableDataset``. The
            workers read it.
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
            they were started. False: each epoch's workers get it as it is when the epoch begins.
        pin_memory_device: type of the accelerator in use, or "".
        in_order: False: batches come as they get ready.
        transform: minloader's own, as are those that follow: called in the worker with each sample.
        on_error: what an error that makes a batch fail does; see :class:`minloader.Loader`.
        retries: how often a batch is tried again whose worker process died while making it.
        worker_memory_limit: bytes of memory of its own past which a worker process is replaced.
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
        transform: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        retries: int = 1,
        worker_memory_limit: int | None = None,
        seed_generators: bool = False,
    ) -> None:
        if isinstance(dataset, _PIPES):
            raise NotImplementedError(
                f"dataset is a DataPipe, {type(dataset).__name__}, whose shuffling and "
                "sharding are steered by torch's own loader; use that one, or an IterableDataset "
                "that shards itself by torch.utils.data.get_worker_info()"
            )
        num_workers = check_int("num_workers", num_workers, 0)
        if prefetch_factor is not None:
            prefetch_factor = check_int("prefetch_factor", prefetch_factor, 1)
        if isinstance(timeout, bool) or not isinstance(timeout, Real):
            raise TypeError(f"timeout must be a number of seconds, got {shown(timeout)}")
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator or None, got {shown(generator)}")
        functions = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
        for name, value in (functions | {"transform": transform}).items():
            checks.check_callable(name, value)
        self._given: dict[str, Any] = {"sampler": sampler, "batch_sampler": batch_sampler}
        for name, value in self._given.items():
            checks.check_iterable(name, value)
        checks.check_on_error(on_error)
        checks.check_memory_limit(worker_memory_limit, "process")
        if pin_memory:
            check_pinning(pin_memory_device)
        self.transform: Callable[[Any], Any] | None = transform
        self.on_error: OnError = on_error
        self.retries: int = check_int("retries", retries, 0)
        self.worker_memory_limit: int | None = worker_memory_limit
        self.seed_generators: bool = checks.check_bool("seed_generators", seed_generators)
        self._forget()
        self.in_order: bool = in_order
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn),
            *(pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _HAS_ORDER else {}),
        )

    def _forget(self) -> None:
        """Be as if no epoch had begun."""
        self._order: Order | None = None
        self._loader: Loader | None = None
        self._made_with: list[Any] = []  # settings of the loader
        self._init: conventions.WorkerInit | None = None  # what its workers begin with
        self._seed: int | None = None
        self._begun = False
        # Of the last two epochs that were drawn, by their numbers in the loader. It may not have
        # begun the latter yet.
        self._starts: dict[int, EpochStart | None] = {}
        self._resume: dict[str, Any] | None = None
        self._behind: Note | None = None  # the state as of the consumer of a prefetch
        self._loads = 0  # how many states were loaded
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: one that has not begun any epoch."""
        blank = type(self).__new__(type(self))
        blank._forget()
        return vars(self) | vars(blank)

    @property
    def multiprocessing_context(self) -> Any:
        """How workers are started: a ``multiprocessing`` context. None: as by default."""
        notice(self, sys._getframe(1))
        return super().multiprocessing_context

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        torchs: Any = TorchLoader.multiprocessing_context  # a property
        torchs.__set__(self, context)

    @property
    def stats(self) -> Stats:
        """What took how long so far; see :class:`minloader.Stats`. A copy, as of now."""
        return Stats() if self._loader is None else self._loader.stats

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in the batches of all ranks; None if the loader does not batch."""
        size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        ranks = (ranks_of(self._index_sampler) or {"ranks": 1})["ranks"]
        return None if size is None else size * ranks

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers, and the dataset, the number of the epoch, as far as they want it."""
        for each in (*with_inner(self._index_sampler), self.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    # --- an epoch

    def __iter__(self) -> Batches[T]:
        """Return an iterator over the next epoch, which begins with its first ``next``.

        Raises:
            RuntimeError: the loader is closed.
        """
        return self._get_iterator()

    def _get_iterator(self) -> Batches[T]:
        # Subclasses call it, as they do torch's.
        self._check_open()
        return Batches(self)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this DataLoader is closed; make a new one")

    def _begin(self, batches: Batches[T]) -> None:
        """Begin an epoch, the rest of one if a state was loaded, for an iterator.

        An interrupt leaves all as it was, or what was drawn for the next try.

        Raises:
            RuntimeError: the loader is closed; or a sampler is an iterator, and used up.
            TypeError: what the workers need cannot be sent to them.
            ValueError: an attribute was set to a value that does not go with the others.
        """
        self._check_open()
        order, resume, start = self._sync_order(), self._resume, self._coming()
        if resume is not None and not start.begun:
            start = EpochStart.decode(resume["order"], resume["epoch"])
            if start.begun and self._is_left_behind():
                start = start._replace(shared=None)
            order.note(start, self._generators(), self.generator)
            order.redraw()
            self._note_start(start)
        if not start.begun:
            for name, given in self._given.items():
                once = hasattr(type(given), "__next__") and not hasattr(given, "set_epoch")
                if self._begun and once:
                    raise used_up(name, given)
            start = self._prepare(order)
        order.note(start, self._generators(), self.generator)
        loader = self._ready()
        if self._resume is not None:
            loader.load_state_dict(self._resume["loader"])
        if isinstance(self.dataset, IterableDataset) and not self.num_workers:
            loader.dataset.told = None if resume else getattr(self.dataset, "epoch", None)
        pinned = self.pin_memory and can_pin()
        # Its first batch begins it, in place of iter(): an interrupt here finds nothing begun.
        made: Any = Epoch(loader, loader._settings, 1, numbered=False)
        batches.pins = pinned and not self.num_workers
        self._begun, self._behind, self._resume = True, None, None
        batches.source = prefetch(made, pin) if pinned and self.num_workers else made

    def _is_left_behind(self) -> bool:
        """Tell whether the sampler was set to another epoch than that of the state; then go there.

        Lightning does so if all batches of the epoch were delivered.
        """
        assert self._resume is not None
        former, epoch = self._resume["epoch"], self._sampler_epoch()
        if self._loader is None or former is None or epoch is None or epoch == former:
            return False
        if epoch < former:
            warnings.warn(
                f"a state of epoch {former} was loaded, but then the sampler was set to epoch "
                f"{epoch}, which begins anew; call set_epoch({former}) to resume",
                stacklevel=6,
            )
        number = self._loader.epoch + epoch - former
        self._loader.set_epoch(number if number >= 0 else self._loader.epoch + 1)
        self._resume = None
        return True

    def _sync_order(self) -> Order:
        """Return the order of the loader's sampler, which a subclass may have replaced."""
        if self._order is None or self._order.sampler is not self._index_sampler:
            self._order = Order(self._index_sampler)
        return self._order

    def _prepare(self, order: Order) -> EpochStart:
        """Draw what torch draws when an epoch begins, in its order, and begin the sampler.

        What was drawn is kept until the epoch has begun. An interrupt leaves nothing drawn.
        """
        order.finish()
        starts, shared = self._starts, torch.get_rng_state()
        draws_seed = not (self.persistent_workers and self._begun)
        before = start = self._now(seeded=draws_seed)
        try:
            order.begin()
            if draws_seed:
                seed = draw_seed(self.generator)
                if self._seed is None:
                    self._seed = seed
                if self.num_workers:  # torch's iterator resets itself as soon as it is made
                    start = self._now(seeded=False)
                    order.begin()
            order.draw_first()
            self._note_start(start)
            return start
        except BaseException:
            order.put_back(before, self._generators())
            torch.set_rng_state(shared)
            self._starts = starts
            raise

    def _now(self, *, seeded: bool) -> EpochStart:
        return EpochStart.now(self._generators(), self._sampler_epoch(), seeded)

    def _note_start(self, start: EpochStart) -> None:
        """Note how the next epoch begins, which is drawn now."""
        number, drawn = self._number, start._replace(after=self._sampler_epoch())
        self._starts = {number - 1: self._starts.get(number - 1), number: drawn}

    def _coming(self) -> EpochStart:
        """Return how the next epoch begins: as it was drawn, if the sampler is still set to it."""
        start = self._starts.get(self._number)
        if start is None or start.after != self._sampler_epoch():
            start = self._now(seeded=False)._replace(shared=None)
        return start

    @property
    def _number(self) -> int:
        """That of the next epoch in the loader."""
        return 0 if self._loader is None else self._loader.epoch

    def _generators(self) -> list[torch.Generator]:
        """Return those that an epoch's order may depend on, without torch's global one.

        Samplers that are told the epoch seed theirs from it, and some make it only then.
        """
        samplers = self.sampler, *with_inner(self._index_sampler)
        owners = self, *(each for each in samplers if not hasattr(each, "set_epoch"))
        found = [getattr(owner, "generator", None) for owner in owners]
        known = dict.fromkeys(each for each in found if isinstance(each, torch.Generator))
        return [each for each in known if each is not torch.default_generator]

    def _ready(self) -> Loader:
        """Return the loader, for an epoch to begin: a new one if an attribute has changed.

        Without ``persistent_workers`` it has new workers, which get the dataset as it is now. Those
        of an epoch that is under way belong to that: then it is a new loader, too.
        """
        self._sync_order()
        former = self._loader
        settings = [getattr(self, name) for name in _SETTINGS]
        if former is not None and settings == self._made_with:
            if self.persistent_workers or not self.num_workers:
                return former
            if not former._group.in_flight:
                if self._init is not None:
                    self._init.tells = False
                former._group.begin_anew()
                return former
        self._loader = self._make()
        self._made_with = settings
        if former is not None:
            self._loader.set_epoch(former.epoch)
        return self._loader

    def _make(self) -> Loader:
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
            "seed": self._seed,
            "transform": self.transform,
            "on_error": self.on_error,
            "retries": self.retries,
            "worker_memory_limit": self.worker_memory_limit,
            "seed_generators": self.seed_generators,
        }
        stream = isinstance(self.dataset, IterableDataset)
        if self.batch_sampler is None:
            first = self.transform
            options["transform"] = conventions.Both(first, collate_fn) if first else collate_fn
        else:
            options["collate_fn"] = collate_fn if stream else conventions.Collated(collate_fn)
        if workers and self.worker_init_fn is not None:
            self._init = options["worker_init_fn"] = conventions.WorkerInit(self.worker_init_fn)
        if not stream:
            return Loader(self.dataset, self._order, **options)
        if self.batch_size is not None:
            last_batch = "discard" if self.drop_last else "keep"
            options |= {"batch_size": self.batch_size, "last_batch": last_batch}
        read_once = workers > 0 and not self.persistent_workers
        return Loader(conventions.Stream(self.dataset, read_once=read_once), **options)

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

    def _as_loader(self, **settings: int) -> Loader:
        """Return a Loader of the same batches, for the doctor and the audit. Use it instead.

        Its seed is 0, and its order follows from the number of the epoch, so that runs can be
        compared.

        Args:
            settings: attributes to set before: ``num_workers``, ``prefetch_factor``. Without any,
                it has one worker at least.
        """
        for name, value in (settings or {"num_workers": self.num_workers or 1}).items():
            setattr(self, name, value)
        if not self.num_workers:
            self.timeout = 0
        self._order, self._seed = EpochOrder(self._index_sampler, self._generators()), 0
        return self._make()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return which batches were delivered, as a dict of a few kilobytes that is fit for JSON.

        Batches that were only read ahead do not count; see :meth:`minloader.Loader.state_dict`.
        The state holds the generators as they were when the epoch began, so that a shuffled epoch
        can be continued, and the epoch that the sampler was set to. It does not restore torch's
        global generator: a script that must repeat a run saves that itself, with the model.

        With a sampler that deals the epoch out to ranks, the state of one rank serves all of them.
        Otherwise, under ``torch.distributed``, its key is that of the rank.
        """
        return (self._behind or self._note_state())()

    def _note_state(self) -> Note:
        """Note the state as of what the iterator that was begun last has handed over."""
        key = self._state_key()
        if self._resume is not None:
            return partial(_keyed, key, partial(copy.deepcopy, self._resume))
        if self._loader is None:
            # The first epoch's order is drawn now, and kept: the state fixes it.
            if not self._coming().begun:
                self._prepare(self._sync_order())
            self._ready()
        assert self._loader is not None
        note, coming = self._loader._note_state(), self._coming()
        starts = self._starts | {self._number: coming}
        return partial(_keyed, key, partial(_state, note, starts, coming))

    def _state_key(self) -> str:
        """Return the key of the state: that of the rank if other ranks have other states."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return "state"
        stream = isinstance(self.dataset, IterableDataset)
        if distributed.get_world_size() == 1 or (not stream and ranks_of(self._index_sampler)):
            return "state"
        return f"rank{distributed.get_rank()}"

    def _sampler_epoch(self) -> int | None:
        """Return the epoch that the sampler was set to, if it has any."""
        for each in with_inner(self._index_sampler):
            epoch = getattr(each, "epoch", None)
            if hasattr(each, "set_epoch") and isinstance(epoch, int):
                return epoch
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch continue with the batch after those that a state has delivered.

        Iterators that were begun before raise an error.

        The dataset and the samplers must be as they were. The number of workers may be another. A
        sampler that has ``set_epoch`` is told the epoch that it had.

        Args:
            state: from :meth:`state_dict`, here or in another process.

        Raises:
            TypeError, ValueError: that is no state, or that of a loader unlike this one. (Some of
                it is noticed only by the first ``next``.)
        """
        known = self._read_state(state)
        start = EpochStart.decode(known["order"], known["epoch"])
        self._behind = None
        if known["epoch"] is not None:
            self.set_epoch(known["epoch"])
        self._starts = {}
        self._loads += 1
        self._seed = known["loader"]["seed"]
        self._ready().load_state_dict(known["loader"])
        self._resume = known
        self._begun = start.begun or known["loader"]["epoch"] > 0

    def _read_state(self, state: Any) -> dict[str, Any]:
        """Return a copy of the part of a state that is for this loader, or refuse it."""
        key = self._state_key()
        if not isinstance(state, Mapping) or "version" not in state:
            part = part_meant(state, {"version", key}) if isinstance(state, Mapping) else ""
            raise TypeError(f"state must be what state_dict() gave, got {shown(state)}{part}")
        check_version(state, VERSION)
        if key not in state:
            raise ValueError(
                f"the state has {shown(sorted(state.keys() - {'version'}))}, but none for {key!r}; "
                "save the state of each rank, unless a sampler deals the epoch out to the ranks"
            )
        return copy.deepcopy(dict(state[key][0]))

    # --- the end

    def close(self) -> None:
        """End the workers at once, as happens when the loader is garbage-collected."""
        self._closed = True
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> DataLoader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Batches(Handover[T], _TorchIterator):  # type: ignore[misc]
    """Iterator over the batches of one epoch, which begins with the first ``next``.

    After an error, ``next`` gives the next batch, and after an interrupt the one that it would have
    given. Several threads may take batches. It is one of torch's for Lightning, which leaves those
    out of copies.

    Args:
        owner: the loader. The iterator keeps it alive, since its workers end with it.

    Attributes:
        source: what the batches are taken from; None before the epoch has begun.
        pins: whether they are pinned here.
    """

    def __init__(self, owner: DataLoader[T]) -> None:
        super().__init__()
        self._owner = owner
        self.source: Any = None
        self.pins = False
        self._given = 0
        self._most = owner._IterableDataset_len_called  # list() asks for the length after this

    def _check_process(self) -> None:
        """Leave that to the source: an epoch may begin in a fork."""

    def _next(self, taken: list[Any]) -> T:
        if self.source is None:
            self._loads = self._owner._loads
            self._owner._begin(self)
        if self._loads != self._owner._loads:
            raise RuntimeError("a state was loaded since this iterator was begun; call iter again")
        batch: T = self.source.take(taken)
        if self.pins:
            batch = pin(batch)
        self._given += 1
        if self._most is not None and self._given > self._most:
            warnings.warn(
                f"Length of IterableDataset {self._owner.dataset} was reported to be {self._most} "
                f"(when len(dataloader) was asked for), but {self._given} batches have been "
                "fetched; have each worker read its own part (torch.utils.data.get_worker_info)",
                stacklevel=4,
            )
        return batch

    def _put_back(self, taken: list[Any]) -> None:
        self.source.put_back(taken)

    def __len__(self) -> int:
        return len(self._owner._index_sampler)

    def is_ready(self) -> bool:
        """Return whether ``next`` need not wait for a worker."""
        return self.source is None or bool(self.source.is_ready())

    def note_handed_over(self) -> Note:
        """Note the state as of what was handed over, to whomever."""
        return self._owner._note_state()

    def set_behind(self, note: Note | None) -> None:
        """Have the loader's state be that of a consumer that :func:`minloader.prefetch` serves."""
        self._owner._behind = note


def _state(
    note: Note, starts: Mapping[int, EpochStart | None], coming: EpochStart
) -> dict[str, Any]:
    """Return what a state of a ``DataLoader`` says.

    Args:
        note: returns the state of its :class:`minloader.Loader`.
        starts: how epochs have begun, by their numbers.
        coming: how the next one begins.
    """
    state = note()
    begin = starts.get(state["epoch"]) or coming
    return {"loader": state, "order": begin.encode(), "epoch": begin.told}


def _keyed(key: str, note: Callable[[], Any]) -> dict[str, Any]:
    # In a tuple, which is one leaf to torch's distributed checkpoints; see in_one_shape.
    return {"version": VERSION, key: (note(),)}


def _start_method() -> str:
    """Return how torch's loader would start workers now. It stays the program's to set."""
    methods = multiprocessing.get_all_start_methods()  # the default is the first
    return multiprocessing.get_start_method(allow_none=True) or methods[0]
