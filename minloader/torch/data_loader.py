"""Torch's ``DataLoader`` on minloader's workers.

A :class:`DataLoader` makes a :class:`minloader.Loader` when it is first iterated, and does around
it what torch's loader does in the parent: it draws the same random numbers from the same
generators, and so shuffles as torch does. Workers collate into arrays in shared memory
(``_sampling/torch_collate.py``), which arrive here as tensors over that memory. They import torch
only if the dataset does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
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

from minloader._checks import (
    check_callable,
    check_context,
    check_int,
    check_iterable,
    part_meant,
    shown,
)
from minloader._epochs.state import Note, Progress, latest_note
from minloader._insight.counters import Stats
from minloader._loader import Loader
from minloader._memory.job_file import fingerprint
from minloader._prefetch import prefetch
from minloader._sampling.base import used_up
from minloader._sampling.torch_collate import collate, convert
from minloader._worker import torch_conventions as conventions
from minloader.torch.device import pin
from minloader.torch.order import EpochOrder, EpochStart, Order, default_sampler

VERSION = 1
"""Version of the states."""

T = TypeVar("T")

_FIXED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
"""Attributes that cannot be set once a loader is made, as in torch."""

_BATCH_SAMPLER_ALONE = (
    "batch_sampler decides what a batch is: drop batch_size, shuffle, sampler and drop_last, or "
    "drop batch_sampler"
)

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that have a generator. They are finite, and keep their order in a list."""

_SETTINGS = (
    *("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "collate_fn", "in_order"),
    *("multiprocessing_context", "_seed"),
)
"""Attributes that the workers are made with. They may be set: the next epoch has new workers."""


@dataclass(repr=False, eq=False)
class DataLoader(Generic[T]):
    """Torch's ``DataLoader`` on minloader's workers: the same arguments, attributes and batches.

    ``for batch in loader`` is one epoch. With the same ``torch.manual_seed``, or ``generator``, it
    has the order that torch's loader would give it. Tensors in a batch are views of shared memory.
    They are writable, nobody else uses them, and one of them keeps its whole batch in memory.

    What differs from torch's loader: ``random``, ``numpy.random`` and torch are seeded for each
    batch, from the loader's seed, the number of the epoch and the number of the batch, so that the
    batches are the same for every number of workers. The loader's seed is drawn when the first
    epoch begins. Workers are spawned, stay between epochs, and are replaced when they die. With
    ``persistent_workers=False`` they are started anew for an epoch only if the dataset,
    ``collate_fn`` or ``worker_init_fn`` has changed. (A change inside a large array is not
    noticed.)

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
            name of one. None: "spawn".
        generator: the generator that the order and the loader's seed are drawn from. None: torch's
            global one.
        prefetch_factor: number of batches under way for each worker. None: 2.
        persistent_workers: whether workers keep the dataset as it was when they were started.
        pin_memory_device: type of the accelerator in use, or "".
        in_order: False: batches come as they get ready.

    Raises:
        ValueError: an argument has an impossible value, or excludes another.
        TypeError: an argument is of the wrong type.
        NotImplementedError: the dataset is a ``DataPipe``.
    """

    dataset: Any
    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: BaseContext | str | None = None
    generator: torch.Generator | None = None
    _: KW_ONLY
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True

    def __post_init__(self) -> None:
        self._given = {"sampler": self.sampler, "batch_sampler": self.batch_sampler}
        self._check_types()
        self._check_combinations()
        if self.pin_memory:
            _check_pinning(self.pin_memory_device)
        if self.batch_sampler is not None:
            self.batch_size = None
        if self.sampler is None:
            self.sampler = default_sampler(self.dataset, bool(self.shuffle), self.generator)
        if self.batch_size is not None:
            self.batch_sampler = BatchSampler(self.sampler, self.batch_size, self.drop_last)
        if self.num_workers > 0 and self.prefetch_factor is None:
            self.prefetch_factor = 2
        if self.collate_fn is None:
            self.collate_fn = default_convert if self.batch_sampler is None else default_collate

        self._order = Order(self.sampler if self.batch_sampler is None else self.batch_sampler)
        self._loader: Loader | None = None
        self._settings: list[Any] = []  # what the loader was made with
        self._fingerprint: tuple[bytes, list[Any]] = (b"", [])
        self._seed: int | None = None
        self._begun = False
        self._start: EpochStart | None = None  # of the epoch begun last
        self._resume: dict[str, Any] | None = None
        self._progress: Progress | None = None  # of the consumer
        self._reported: int | None = None  # length of an IterableDataset
        self._closed = False
        self._initialized = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "_initialized" in vars(self):
            raise ValueError(f"{name} cannot be set once the DataLoader is made; make another one")
        if name == "multiprocessing_context" and value is not None:
            if not self.num_workers:
                raise ValueError(f"{name}={value!r} is for workers, but num_workers is 0; drop it")
            value = check_context(value, "process")
        super().__setattr__(name, value)

    def _check_types(self) -> None:
        check_int("num_workers", self.num_workers, 0)
        if self.prefetch_factor is not None:
            check_int("prefetch_factor", self.prefetch_factor, 1)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, got {shown(self.timeout)}")
        for name in ("collate_fn", "worker_init_fn"):
            check_callable(name, getattr(self, name))
        for name, value in self._given.items():
            check_iterable(name, value)
        if not isinstance(self.generator, torch.Generator | None):
            raise TypeError(
                f"generator must be a torch.Generator or None, got {shown(self.generator)}"
            )
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            raise NotImplementedError(
                f"dataset is a DataPipe, {type(self.dataset).__name__}, whose shuffling and "
                "sharding are steered by torch's own loader; use that one, or an IterableDataset "
                "that shards itself by torch.utils.data.get_worker_info()"
            )

    def _check_combinations(self) -> None:
        sampled, batched = self.sampler is not None, self.batch_sampler is not None
        other = self.batch_size != 1 or self.shuffle or sampled or self.drop_last
        incomplete = self.drop_last and self.batch_size is None
        rules = [
            (self.timeout < 0, f"timeout must be 0 (no limit) or more seconds, got {self.timeout}"),
            (sampled and self.shuffle, "sampler decides the order: drop shuffle, or drop sampler"),
            (batched and other, _BATCH_SAMPLER_ALONE),
            (incomplete, "drop_last is for batches: give a batch_size, or drop drop_last"),
        ]
        if not self.num_workers:
            why = "{0}={1} is for workers, but num_workers is 0; drop {0}"
            factor, persistent = self.prefetch_factor, self.persistent_workers or None
            given: dict[str, Any] = {"prefetch_factor": factor, "persistent_workers": persistent}
            rules += [(v is not None, why.format(name, v)) for name, v in given.items()]
        if isinstance(self.dataset, IterableDataset):
            why = "an IterableDataset decides its order itself, but {0} is {1}; drop {0}"
            given = {"shuffle": self.shuffle or None, **self._given}
            rules += [(v is not None, why.format(name, shown(v))) for name, v in given.items()]
        for is_broken, why in rules:
            if is_broken:
                raise ValueError(why)

    @property
    def stats(self) -> Stats:
        """What took how long so far; see :class:`minloader.Stats`. A copy, as of now."""
        return Stats() if self._loader is None else self._loader.stats

    def __len__(self) -> int:
        """Return the number of batches; for an ``IterableDataset``, as its own length has it.

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
        """Begin an epoch. With workers, its first batches are under way on return.

        Raises:
            RuntimeError: the loader is closed; or a sampler is an iterator, and used up.
            TypeError: what the workers need cannot be sent to them.
            ValueError: an attribute was set to a value that does not go with the others.
        """
        if self._closed:
            raise RuntimeError("this DataLoader is closed; make a new one")
        resume = self._resume
        start = EpochStart.decode(resume["order"]) if resume else None
        if start is not None and start.begun:
            batches = self._continue_epoch(start)
        else:
            if start is not None:
                self._restore_generators(start)
            for name, given in self._given.items():
                once = hasattr(type(given), "__next__") and not hasattr(given, "set_epoch")
                if self._begun and once:
                    raise used_up(name, given)
            batches = self._iterate(self._begin_order())
        self._resume, self._begun, self._progress = None, True, batches.progress
        return batches

    def _begin_order(self) -> EpochStart:
        """Draw what torch draws when an epoch begins, in its order, and begin the sampler."""
        start = EpochStart.now(self._generators(), seeded=True)
        self._order.begin()
        if self.persistent_workers and self._begun:
            start = start._replace(seeded=False)
        else:
            seed = self._draw_seed()
            if self._seed is None:
                self._seed = seed
            if self.num_workers:  # torch's iterator resets itself as soon as it is made
                start = EpochStart.now(self._generators(), seeded=False)
                self._order.begin()
        if self._draws_while_read():
            self._order.draw(whole=True)
        return start

    def _draws_while_read(self) -> bool:
        """Whether the sampler goes on drawing from a generator that later epochs draw from too.

        Their order must not depend on how far the sampler was read in an epoch that was left early.
        """
        inner = self.batch_sampler.sampler if type(self.batch_sampler) is BatchSampler else None
        return any(
            type(sampler) in _RANDOM and getattr(sampler, "generator", None) is not None
            for sampler in (self.sampler, inner)
        )

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def _generators(self) -> list[torch.Generator]:
        """Return those that an epoch's order may depend on, without torch's global one."""
        inner = getattr(self.batch_sampler, "sampler", None)
        owners = (self, self.sampler, self.batch_sampler, inner)
        found = [getattr(owner, "generator", None) for owner in owners]
        known = dict.fromkeys(each for each in found if isinstance(each, torch.Generator))
        return [each for each in known if each is not torch.default_generator]

    def _restore_generators(self, start: EpochStart) -> None:
        generators = self._generators()
        if len(generators) != len(start.own):
            raise ValueError(
                f"the state has {len(start.own)} generators of the loader and its samplers, but "
                f"here are {len(generators)}; make them as they were when the state was taken"
            )
        for generator, state in zip(generators, start.own, strict=True):
            generator.set_state(state)

    def _continue_epoch(self, start: EpochStart) -> Batches[T]:
        """Begin the rest of an epoch in the order it had. Torch's global generator stays as is."""
        assert start.shared is not None
        self._restore_generators(start)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(start.shared)
            self._order.begin()
            if start.seeded:
                self._draw_seed()
            self._order.draw(whole=self._draws_while_read())
            return self._iterate(start)

    def _iterate(self, start: EpochStart) -> Batches[T]:
        loader = self._ready()
        if self._resume is not None:
            loader.load_state_dict(self._resume["loader"])
        self._start = start._replace(epoch=loader.epoch)
        pinned = self.pin_memory and _can_pin()
        if pinned and self.num_workers:
            return Batches(self, prefetch(loader, pin))
        return Batches(self, map(pin, loader) if pinned else iter(loader))

    def _ready(self) -> Loader:
        """Return the loader: a new one if an attribute, or what the workers have, has changed."""
        former, settings = self._loader, [getattr(self, name) for name in _SETTINGS]
        same = settings == self._settings
        if former is not None and same and self._take_fingerprint()[0] == self._fingerprint[0]:
            return former
        self._loader = self._make()
        self._settings, self._fingerprint = settings, self._take_fingerprint()
        if former is not None:
            self._loader.set_epoch(former.epoch)
        return self._loader

    def _take_fingerprint(self) -> tuple[bytes, list[Any]]:
        """Identify what the workers have: a digest, and the objects that must live to compare it.

        The digest is empty where a change does not matter.
        """
        if self.persistent_workers or not self.num_workers:
            return b"", []
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
            "mp_context": self.multiprocessing_context,
            "in_order": self.in_order,
            "seed": self._seed,
        }
        stream = isinstance(self.dataset, IterableDataset)
        if self.batch_sampler is None:
            options["transform"] = collate_fn
        else:
            options["collate_fn"] = collate_fn if stream else conventions.Collated(collate_fn)
        if not stream:
            if workers:
                init = conventions.WorkerInit(self.dataset, self.worker_init_fn)
                options["worker_init_fn"] = init
            return Loader(self.dataset, self._order, **options)
        if self.batch_size is not None:
            last_batch = "discard" if self.drop_last else "keep"
            options |= {"batch_size": self.batch_size, "last_batch": last_batch}
        shard = conventions.Stream(
            self.dataset,
            self.worker_init_fn if workers else None,
            read_once=workers > 0 and not self.persistent_workers,
            in_workers=workers > 0,
        )
        return Loader(shard, **options)

    def _workers_collate(self) -> Callable[[Any], Any]:
        """Return the function that makes batches where they are made."""
        assert self.collate_fn is not None
        if not self.num_workers:
            return self.collate_fn
        if self.collate_fn is default_convert:
            return convert
        if self.collate_fn is not default_collate:
            return self.collate_fn
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
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        assert sampler is not None
        whole = self._draws_while_read()
        self._order, self._seed = EpochOrder(sampler, self._generators(), whole=whole), 0
        return self._make()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return which batches were delivered, as a dict of a few kilobytes that is fit for JSON.

        Batches that were only read ahead do not count; see :meth:`minloader.Loader.state_dict`.
        The state holds the generators as they were when the epoch began, so that a shuffled epoch
        can be continued. It does not restore torch's global generator: a script that must repeat a
        run saves that itself, with the model.
        """
        return latest_note(self._progress, self._note_state)()

    def _note_state(self) -> Note:
        """Return a function for the state as of now; see :func:`minloader.prefetch`."""
        if self._resume is not None:
            return partial(copy.deepcopy, self._resume)
        now = EpochStart.now(self._generators(), seeded=False)._replace(shared=None)
        if self._loader is None:
            return partial(_state, None, now, now)
        note = latest_note(self._loader._progress, self._loader._note_state)
        return partial(_state, note, self._start or now, now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter`` continue with the batch after those that a state has delivered.

        The dataset and the samplers must be as they were. The number of workers may be another. If
        the sampler has ``set_epoch``, call it with the epoch that the state was taken in.

        Args:
            state: from :meth:`state_dict`, here or in another process.

        Raises:
            TypeError, ValueError: that is no state, or that of a loader unlike this one. (Some of
                it is noticed only by ``iter``.)
        """
        names = {"version", "order", "loader"}
        if not isinstance(state, Mapping) or not names <= state.keys():
            part = part_meant(state, names) if isinstance(state, Mapping) else ""
            raise TypeError(f"state must be what state_dict() gave, got {shown(state)}{part}")
        if state["version"] != VERSION:
            raise ValueError(
                f"the state is of version {state['version']!r}, but this minloader reads version "
                f"{VERSION}; load it with the minloader that saved it"
            )
        start = EpochStart.decode(state["order"])
        self._progress = None
        if state["loader"] is None:  # nothing had been iterated
            self._restore_generators(start)
            self._loader = self._seed = self._start = self._resume = None
            self._begun = False
            return
        self._seed = state["loader"]["seed"]
        self._ready().load_state_dict(state["loader"])
        self._resume = copy.deepcopy(dict(state))
        self._begun = start.begun or state["loader"]["epoch"] > 0

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


class Batches(Generic[T]):
    """Iterator over the batches of one epoch. After an error, ``next`` goes on with the next batch.

    Args:
        owner: the loader. The iterator keeps it alive, since its workers end with it.
        batches: the batches of the epoch.
    """

    def __init__(self, owner: DataLoader[T], batches: Iterator[Any]) -> None:
        self.progress = Progress()
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


def _state(note: Callable[[], Any] | None, start: EpochStart, now: EpochStart) -> dict[str, Any]:
    """Return the state of a ``DataLoader``.

    Args:
        note: returns the state of its :class:`minloader.Loader`; None if there is none yet.
        start: start of the epoch that was begun last.
        now: what the next epoch would start from.
    """
    state = None if note is None else note()
    within = state is not None and state["epoch"] == start.epoch
    return {"version": VERSION, "loader": state, "order": (start if within else now).encode()}


def _check_pinning(device: str) -> None:
    accelerator = _accelerator()
    if device and accelerator is not None and torch.device(device).type != accelerator.type:
        raise ValueError(
            f"pin_memory_device={device!r}, but memory is pinned for the accelerator that is in "
            f"use, {accelerator}; drop pin_memory_device"
        )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _can_pin() -> bool:
    accelerator = _accelerator()
    if accelerator is not None and accelerator.type != "mps":
        return True
    why = "no accelerator is found" if accelerator is None else "MPS cannot"
    warnings.warn(f"pin_memory=True, but {why}: memory is not pinned", stacklevel=4)
    return False
