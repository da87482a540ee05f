"""``minloader.torch.DataLoader``: torch's signature, minloader's workers; and the way to a device.

A :class:`DataLoader` is a :class:`minloader.Loader`, made when it is first iterated, and what
torch would do around it: it draws from the generators what torch draws, in the same order, and so
shuffles as torch does. Its workers collate into arrays in shared memory (``torchlike.py``), which
arrive here as tensors over that memory. Workers import torch only if the dataset does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from minloader._checks import check_callable, check_context, check_int, check_iterable, shown
from minloader._insight.counters import Stats
from minloader._loader import Loader
from minloader._memory.job_file import fingerprint
from minloader._prefetch import prefetch
from minloader._sampling.torch_collate import collate, convert
from minloader._worker.torch_conventions import (
    Collated,
    ExtendedCollate,
    Samples,
    Stream,
    WorkerInit,
)
from minloader.torch.device import _pin
from minloader.torch.order import _default_sampler, _order_of, _Start

VERSION = 1

"""Of the states."""


T = TypeVar("T")

_FIXED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")

"""Attributes that cannot be set once a loader is made, as in torch."""


_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

"""Torch's samplers that have a generator. They are finite, and keep their order in a list."""


_SETTINGS = (
    *("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "collate_fn", "in_order"),
    *("_context", "_seed"),
)

"""Attributes that the workers are made with. They may be set: the next epoch has new workers."""


class DataLoader(Generic[T]):
    """Torch's ``DataLoader`` on minloader's workers: the same arguments, attributes and batches.

    With the same ``torch.manual_seed``, or ``generator``, it shuffles as torch's does. Tensors in
    a batch are views of shared memory, writable and the consumer's own.

    What differs: ``random``, ``numpy.random`` and torch are seeded for each batch, from the seed
    that is drawn when the first epoch begins, the number of the epoch and that of the batch, so
    that every number of workers gives the same batches. Workers are spawned, stay between epochs,
    and are replaced when they die. With ``persistent_workers=False`` they are made anew only if
    the dataset, or a function, has changed (changes inside large arrays are not noticed).

    Args:
        dataset: map-style (``__getitem__``), or a ``torch.utils.data.IterableDataset``.
        batch_size: samples in a batch; None: the samples themselves.
        shuffle: visit the dataset in another order each epoch.
        sampler: iterable of indices, in place of ``shuffle``.
        batch_sampler: iterable of lists of indices, in place of all of these and ``drop_last``.
        num_workers: how many worker processes; 0 loads in this one.
        collate_fn: makes a batch of a list of samples, in the worker; of a sample, without
            batches. None: as torch's ``default_collate``, or ``default_convert``.
        pin_memory: copy tensors into pinned memory, in a thread; where there is no accelerator,
            there is a warning instead.
        drop_last: leave out an incomplete last batch.
        timeout: seconds that a batch may run, then it is tried once more, and fails with
            :class:`minloader.BatchTimeout`; 0: no limit.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started: a context, or the name of one. None:
            "spawn".
        generator: what shuffling and the seed are drawn from. None: torch's global one.
        prefetch_factor: batches under way for each worker. None: 2.
        persistent_workers: keep the workers' dataset even if the one here has changed.
        pin_memory_device: the accelerator that is in use, or "".
        in_order: False: batches as they get ready.

    Raises:
        ValueError: an argument is impossible, or excludes another.
        TypeError: an argument is of the wrong kind.
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
    ) -> None:
        _check_numbers(num_workers, timeout, prefetch_factor, persistent_workers)
        check_callable("collate_fn", collate_fn)
        check_callable("worker_init_fn", worker_init_fn)
        check_iterable("sampler", sampler)
        check_iterable("batch_sampler", batch_sampler)
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator or None, got {shown(generator)}")
        _check_dataset(dataset, shuffle, sampler, batch_sampler)
        if sampler is not None and shuffle:
            raise ValueError("sampler decides the order: drop shuffle, or drop sampler")
        if batch_sampler is not None:
            if batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError(
                    "batch_sampler decides what a batch is: drop batch_size, shuffle, sampler and "
                    "drop_last, or drop batch_sampler"
                )
            batch_size = None
        elif batch_size is None and drop_last:
            raise ValueError("drop_last is for batches: give a batch_size, or drop drop_last")
        if pin_memory:
            _check_pinning(pin_memory_device)
        self._given = [sampler, batch_sampler]
        if sampler is None:
            sampler = _default_sampler(dataset, bool(shuffle), generator)
        if batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)

        self.dataset = dataset
        self.batch_size = batch_size
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        if num_workers > 0 and prefetch_factor is None:
            prefetch_factor = 2
        self.prefetch_factor = prefetch_factor
        if collate_fn is None:
            collate_fn = default_convert if batch_sampler is None else default_collate
        self.collate_fn: Callable[[Any], Any] = collate_fn
        self.pin_memory = pin_memory
        self.pin_memory_device = pin_memory_device
        self.drop_last = drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.generator = generator
        self.persistent_workers = persistent_workers
        self.in_order = in_order

        index_sampler = sampler if batch_sampler is None else batch_sampler
        self._order = _order_of(index_sampler)
        self._loader: Loader | None = None
        self._settings: list[Any] = []  # what the loader was made with
        self._fingerprint: tuple[bytes, list[Any]] | None = None
        self._seed: int | None = None
        self._begun = False
        self._start: _Start | None = None  # of the epoch begun last
        self._resume: dict[str, Any] | None = None
        self._delivered: Callable[[], Any] | None = None
        self._reported: int | None = None  # length of an IterableDataset
        self._closed = False
        self._initialized = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "_initialized" in vars(self):
            raise ValueError(f"{name} cannot be set once the DataLoader is made; make another one")
        super().__setattr__(name, value)

    @property
    def multiprocessing_context(self) -> BaseContext | None:
        """How workers are started; None: "spawn". May be set, for the next epoch."""
        return self._context

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: BaseContext | str | None) -> None:
        if context is not None and not self.num_workers:
            raise ValueError(
                f"multiprocessing_context={context!r} is for workers, but num_workers is 0; drop it"
            )
        self._context = None if context is None else check_context(context, "process")

    @property
    def stats(self) -> Stats:
        """How it went so far; see :class:`minloader.Stats`."""
        return Stats() if self._loader is None else self._loader.stats

    def __len__(self) -> int:
        """Number of batches; of an ``IterableDataset``, what its own length comes to.

        Raises:
            TypeError: the dataset, or the sampler, has no length.
        """
        if not isinstance(self.dataset, IterableDataset):
            return len(self._order)
        length = self._reported = len(self.dataset)  # type: ignore[arg-type]
        if self.batch_size is None:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    # --- an epoch

    def __iter__(self) -> Batches[T]:
        """Begins an epoch; with workers, its first batches are under way on return.

        Raises:
            RuntimeError: the loader is closed, or a sampler is an iterator and used up.
            TypeError: what the workers need cannot be sent to them.
            ValueError: an attribute was set to what does not go with the others.
        """
        if self._closed:
            raise RuntimeError("this DataLoader is closed; make a new one")
        resume, self._delivered = self._resume, None
        start = _Start.decode(resume["order"]) if resume else None
        if start is not None and start.within:
            batches = self._go_on(start)
        else:
            if start is not None:
                self._restore(start)
            self._check_used_up()
            start = self._draw()
            batches = self._iterate(start)
        self._resume, self._begun = None, True
        return batches

    def _check_used_up(self) -> None:
        for name, given in zip(("sampler", "batch_sampler"), self._given, strict=True):
            if self._begun and hasattr(type(given), "__next__") and not hasattr(given, "set_epoch"):
                raise RuntimeError(
                    f"{name} is an iterator, {shown(given)}, which serves one epoch and has served "
                    "it; pass a list, or an object whose __iter__ begins anew"
                )

    def _draw(self) -> _Start:
        """Draws what torch draws when an epoch begins, in its order."""
        start = _Start.now(self._generators(), seeded=True)
        self._order.begin()
        if self.persistent_workers and self._begun:
            start = start._replace(seeded=False)
        else:
            seed = self._draw_seed()
            if self._seed is None:
                self._seed = seed
            if self.num_workers:  # torch's iterator resets itself as soon as it is made
                start = _Start.now(self._generators(), seeded=False)
                self._order.begin()
        if self._draws_on():
            self._order.settle(whole=True)
        return start

    def _draws_on(self) -> bool:
        """Whether the sampler goes on drawing from a generator that later epochs draw from too.

        What they get must not depend on how far it was read ahead in an epoch that was left early.
        """
        inner = self.batch_sampler.sampler if type(self.batch_sampler) is BatchSampler else None
        return any(
            type(sampler) in _RANDOM and getattr(sampler, "generator", None) is not None
            for sampler in (self.sampler, inner)
        )

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def _generators(self) -> list[torch.Generator]:
        """Those that the order of an epoch may depend on, but for torch's global one."""
        owners = (
            self,
            self.sampler,
            self.batch_sampler,
            getattr(self.batch_sampler, "sampler", None),
        )
        found = [getattr(owner, "generator", None) for owner in owners]
        own = {id(each): each for each in found if isinstance(each, torch.Generator)}
        own.pop(id(torch.default_generator), None)
        return list(own.values())

    def _restore(self, start: _Start) -> None:
        generators = self._generators()
        if len(generators) != len(start.own):
            raise ValueError(
                f"the state has {len(start.own)} generators of the loader and its samplers, but "
                f"here are {len(generators)}; make them as they were when the state was taken"
            )
        for generator, state in zip(generators, start.own, strict=True):
            generator.set_state(state)

    def _go_on(self, start: _Start) -> Batches[T]:
        """The rest of an epoch, in the order that it had; the global generator stays as it is."""
        assert start.shared is not None
        self._restore(start)
        now = torch.get_rng_state()
        torch.set_rng_state(start.shared)
        try:
            self._order.begin()
            if start.seeded:
                self._draw_seed()
            self._order.settle(whole=self._draws_on())
            return self._iterate(start)
        finally:
            torch.set_rng_state(now)

    def _iterate(self, start: _Start) -> Batches[T]:
        loader = self._ready()
        if self._resume is not None:
            loader.load_state_dict(self._resume["loader"])
        self._start = start._replace(epoch=loader.epoch)
        pinned = self.pin_memory and _can_pin()
        if pinned and self.num_workers:
            return Batches(self, prefetch(loader, _pin))
        return Batches(self, map(_pin, loader) if pinned else iter(loader))

    def _ready(self) -> Loader:
        """The loader, a new one if what it was made of is no longer what there is."""
        settings = [getattr(self, name) for name in _SETTINGS]
        former = self._loader
        if former is None or settings != self._settings or self._has_changed():
            self._loader = self._make()
            self._settings = settings
            self._fingerprint = self._take_fingerprint()
            if former is not None:
                self._loader.set_epoch(former.epoch)
        assert self._loader is not None
        return self._loader

    def _has_changed(self) -> bool:
        """Whether what the workers have is not what there is here, where that matters."""
        before, now = self._fingerprint, self._take_fingerprint()
        return before is not None and now is not None and before[0] != now[0]

    def _take_fingerprint(self) -> tuple[bytes, list[Any]] | None:
        if self.persistent_workers or not self.num_workers:
            return None
        return fingerprint((self.dataset, self.collate_fn, self.worker_init_fn))

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
            "timeout": self.timeout or None,
            "mp_context": self._context,
            "in_order": self.in_order,
            "seed": self._seed,
        }
        if not isinstance(self.dataset, IterableDataset):
            if workers:
                options["worker_init_fn"] = WorkerInit(self.dataset, self.worker_init_fn)
            if self.batch_sampler is None:
                options["transform"] = collate_fn
            else:
                options["collate_fn"] = Collated(collate_fn)
            return Loader(Samples(self.dataset), self._order, **options)
        stream = Stream(
            self.dataset,
            self.worker_init_fn if workers else None,
            read_once=workers > 0 and not self.persistent_workers,
            in_workers=workers > 0,
        )
        if self.batch_size is None:
            options["transform"] = collate_fn
        else:
            last_batch = "discard" if self.drop_last else "keep"
            options |= {"batch_size": self.batch_size, "last_batch": last_batch}
            options["collate_fn"] = collate_fn
        return Loader(stream, **options)

    def _workers_collate(self) -> Callable[[Any], Any]:
        """What makes batches where they are made."""
        if not self.num_workers:
            return self.collate_fn
        if self.collate_fn is default_convert:
            return convert
        if self.collate_fn is not default_collate:
            return self.collate_fn
        home = default_collate.__module__
        added = {k: f for k, f in default_collate_fn_map.items() if f.__module__ != home}
        return ExtendedCollate(added) if added else collate

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is, exactly, whatever was read ahead; see :class:`minloader.Loader`.

        It holds the generators as they were when the epoch began, so that a shuffled one can be
        gone on with. A few kilobytes, fit for JSON. Torch's global generator is not put back by
        it: a script that is to repeat a run saves that itself, with the model.
        """
        state: dict[str, Any] = (self._delivered or self._note_state())()
        return state

    def _note_state(self) -> Callable[[], dict[str, Any]]:
        """The state as of now, for whoever reads batches ahead; see :func:`minloader.prefetch`."""
        if self._resume is not None:
            return partial(copy.deepcopy, self._resume)
        now = _Start.now(self._generators(), seeded=False)._replace(shared=None)
        if self._loader is None:
            return partial(_state, None, now, now)
        note = self._loader._delivered or self._loader._note_state()
        return partial(_state, note, self._start or now, now)

    def _deliver(self, note: Callable[[], Any] | None) -> None:
        self._delivered = note

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next ``iter`` go on where :meth:`state_dict` was called, with the next batch.

        The dataset and the samplers must be as they were; the number of workers may be another.
        A sampler with ``set_epoch`` must be told the epoch that the state is of.

        Raises:
            TypeError, ValueError: it is no state, or not of a loader like this one.
        """
        if not isinstance(state, Mapping) or not {"version", "order", "loader"} <= state.keys():
            raise TypeError(f"state must be what state_dict() gave, got {shown(state)}")
        if state["version"] != VERSION:
            raise ValueError(
                f"the state is of version {state['version']!r}, but this minloader reads version "
                f"{VERSION}; load it with the minloader that saved it"
            )
        start = _Start.decode(state["order"])
        self._delivered = None
        if state["loader"] is None:  # nothing had been iterated
            self._restore(start)
            self._loader = self._seed = self._start = self._resume = None
            self._begun = False
            return
        self._seed = state["loader"]["seed"]
        self._ready().load_state_dict(state["loader"])
        self._resume = copy.deepcopy(dict(state))
        self._begun = start.within or state["loader"]["epoch"] > 0

    # --- the end

    def close(self) -> None:
        """Ends the workers at once. Runs by itself when the loader is garbage-collected."""
        self._closed = True
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> DataLoader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Batches(Generic[T]):
    """Iterator over the batches of one epoch. Goes on after an error.

    Args:
        owner: the loader, which must live as long as this.
        batches: of the epoch.
    """

    def __init__(self, owner: DataLoader[T], batches: Iterator[Any]) -> None:
        self._owner = owner
        self._batches = batches
        self._given = 0
        streams = isinstance(owner.dataset, IterableDataset)
        self._most = owner._reported if streams else None

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        batch: T = next(self._batches)
        self._given += 1
        if self._most is not None and self._given > self._most:
            warnings.warn(
                f"Length of IterableDataset {self._owner.dataset} was reported to be {self._most} "
                f"(when len(dataloader) was asked for), but {self._given} batches have been "
                "fetched; have each worker read its own part (torch.utils.data.get_worker_info)",
                stacklevel=2,
            )
        return batch

    def __len__(self) -> int:
        return len(self._owner._order)


def _state(note: Callable[[], Any] | None, start: _Start, now: _Start) -> dict[str, Any]:
    """The state.

    Args:
        note: of the loader; None if there is none yet.
        start: of the epoch begun last.
        now: what the next one would begin from.
    """
    state = None if note is None else note()
    within = state is not None and state["epoch"] == start.epoch
    return {"version": VERSION, "loader": state, "order": (start if within else now).encoded()}


def _check_numbers(
    num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool
) -> None:
    check_int("num_workers", num_workers, 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {shown(timeout)}")
    if timeout < 0:
        raise ValueError(f"timeout must be 0 (no limit) or more seconds, got {timeout}")
    if num_workers == 0 and prefetch_factor is not None:
        raise ValueError(
            f"prefetch_factor={prefetch_factor} is for workers, but num_workers is 0; drop it"
        )
    if prefetch_factor is not None:
        check_int("prefetch_factor", prefetch_factor, 1)
    if persistent_workers and num_workers == 0:
        raise ValueError("persistent_workers needs workers, but num_workers is 0; drop it")


def _check_dataset(dataset: Any, shuffle: Any, sampler: Any, batch_sampler: Any) -> None:
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise NotImplementedError(
            f"dataset is a DataPipe, {type(dataset).__name__}, whose shuffling and sharding are "
            "steered by torch's own loader; use that one, or an IterableDataset that shards itself "
            "by torch.utils.data.get_worker_info()"
        )
    if not isinstance(dataset, IterableDataset):
        return
    given = {"shuffle": shuffle or None, "sampler": sampler, "batch_sampler": batch_sampler}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"an IterableDataset decides its order itself, but {name} is {shown(value)}; drop "
                f"{name}"
            )


def _check_pinning(device: str) -> None:
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
    if device and accelerator is not None and torch.device(device).type != accelerator.type:
        raise ValueError(
            f"pin_memory_device={device!r}, but memory is pinned for the accelerator that is in "
            f"use, {accelerator}; drop pin_memory_device"
        )


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())


def _can_pin() -> bool:
    if not _has_accelerator():
        warnings.warn(
            "pin_memory=True, but no accelerator is found: memory is not pinned", stacklevel=4
        )
        return False
    if str(torch.accelerator.current_accelerator()) == "mps":
        warnings.warn("pin_memory=True, but MPS cannot: memory is not pinned", stacklevel=4)
        return False
    return True
