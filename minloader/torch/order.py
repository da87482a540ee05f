"""The order of an epoch, as torch draws it.

Runs in the parent. Torch's samplers draw random numbers from torch's global generator, or from
generators of their own, when an epoch begins. Whoever restores these generators and begins the
samplers again gets the same order.
"""

from __future__ import annotations

import base64
import itertools
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minloader._checks import is_stateful, shown
from minloader._epochs.failures import Raised
from minloader._worker.torch_conventions import PassesState

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that have a generator. They are finite, and keep their order in a list."""


class EpochStart(NamedTuple):
    """All that the order of an epoch depends on, just before its sampler is begun.

    Attributes:
        own: states of the generators of the loader and of its samplers.
        shared: state of torch's global generator; None between epochs.
        seeded: whether the loader draws its seed after it has begun the sampler.
        told: the epoch that the sampler was set to, if it has any.
        after: the same, after the order was drawn: some samplers count on while they are read.
    """

    own: list[torch.Tensor]
    shared: torch.Tensor | None
    seeded: bool
    told: int | None = None
    after: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the epoch has begun."""
        return self.shared is not None

    @classmethod
    def now(cls, generators: list[torch.Generator], told: int | None, seeded: bool) -> EpochStart:
        """Record the generators as they are."""
        return cls([each.get_state() for each in generators], torch.get_rng_state(), seeded, told)

    def encode(self) -> dict[str, Any]:
        """Return a part of a state, fit for JSON."""
        shared = None if self.shared is None else _to_text(self.shared)
        own = [_to_text(each) for each in self.own]
        return {"own": own, "shared": shared, "seeded": self.seeded}

    @classmethod
    def decode(cls, order: Any, told: int | None) -> EpochStart:
        """Undo :meth:`encode`.

        Raises:
            ValueError: the state is damaged.
        """
        try:
            shared = None if order["shared"] is None else _from_text(order["shared"])
            own = [_from_text(text) for text in order["own"]]
            return cls(own, shared, bool(order["seeded"]), told)
        except (LookupError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"the state is damaged: {error!r}, in {shown(order)}") from error


def _to_text(state: torch.Tensor) -> str:
    return base64.b85encode(zlib.compress(state.numpy().tobytes())).decode()


def _from_text(text: str) -> torch.Tensor:
    data = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(data, dtype=torch.uint8)


class Order(PassesState):
    """What a sampler of torch's kind yields, as a sampler for :class:`minloader.Loader`.

    The loader does not see ``set_epoch``: as with torch, the user calls it. A sampler with
    ``state_dict`` and ``load_state_dict`` is put back by these, also where torch makes batches of
    it, and any other is read again.
    """

    puts_generators_back = True

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        # Torch's reads just what a batch needs.
        self._stateful = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._items: Items | None = None  # of an epoch that is begun, and not read
        self._last: Items | None = None
        self._start: tuple[EpochStart, list[torch.Generator], torch.Generator | None] | None = None

    def begin(self) -> None:
        """Begin an epoch of the sampler, which may draw random numbers for it now."""
        if not is_stateful(self):  # such a one may be put back by the loader first
            self._items = Items(iter(self.sampler))

    def note(
        self, start: EpochStart, generators: list[torch.Generator], owner: torch.Generator | None
    ) -> None:
        """Note how the epoch began, to begin it again if an interrupt ends the sampler's iterator.

        Args:
            start: of the epoch.
            generators: whose states ``start`` has.
            owner: the loader's own generator.

        Raises:
            ValueError: there were others when the state was taken.
        """
        if len(generators) != len(start.own):
            raise ValueError(
                f"the state has {len(start.own)} generators of the loader and its samplers, but "
                f"here are {len(generators)}; make them as they were when the state was taken"
            )
        self._start = start, generators, owner

    def put_back(self, start: EpochStart, generators: list[torch.Generator]) -> None:
        """Have generators be as they were, and nothing begun. Torch's global one stays as it is."""
        self._items = self._last = None
        for generator, state in zip(generators, start.own, strict=True):
            generator.set_state(state)

    def redraw(self) -> None:
        """Begin the epoch again as it began. Torch's global generator stays as it is."""
        assert self._start is not None
        start, generators, owner = self._start
        self.put_back(start, generators)
        if start.shared is None:
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(start.shared)
            self.begin()
            if start.seeded:
                draw_seed(owner)
            self.draw_first()

    def draw_first(self) -> None:
        """Read the first item now: most samplers draw a seed, or all they need, with it."""
        if self._items is not None:
            self._items.draw(1)

    def __iter__(self) -> Iterator[Any]:
        if self._items is None and self._start is not None and not is_stateful(self):
            self.redraw()
        self._last, self._items = self._items or Items(iter(self.sampler)), None
        return self._last

    def finish(self) -> None:
        """Draw the rest of the last epoch, if it was left early; whoever reads it still gets it.

        A sampler may draw from a generator while it is read, which later epochs draw from too.
        Their order must not depend on how far it was read.
        """
        sampler, last = self._stateful, self._items or self._last
        is_known = type(sampler) in _RANDOM and getattr(sampler, "generator", None) is not None
        if is_known and last is not None:
            last.draw()

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class Items(Iterator[Any]):
    """Iterator over the items of an epoch, of which some may be drawn before it is their turn.

    Args:
        items: as the sampler gives them.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._drawn: deque[Any] = deque()
        self._lock = threading.Lock()  # another thread may be reading

    def __next__(self) -> Any:
        with self._lock:
            item = self._drawn.popleft() if self._drawn else next(self._items)
        if type(item) is Raised:
            raise item.error
        return _as_item(item)

    def draw(self, *most: int) -> None:
        """Draw some items, or all that are left. What the sampler raises comes in its turn."""
        with self._lock:
            try:
                # Not by islice(), which calls iter(): a sampler that is its own iterator would
                # begin anew.
                self._drawn.extend(map(next, itertools.repeat(self._items, *most)))
            except Exception as error:
                self._drawn.append(Raised(error))


class EpochOrder(Order):
    """The order of a sampler of torch's kind, which follows from the number of the epoch alone.

    Args:
        sampler: torch's.
        generators: those that it draws from, besides torch's global one.
    """

    def __init__(self, sampler: Iterable[Any], generators: list[torch.Generator]) -> None:
        super().__init__(sampler)
        self._generators, self._epoch = generators, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            for generator in (torch.default_generator, *self._generators):
                generator.manual_seed(self._epoch)
            start = EpochStart.now(self._generators, None, seeded=False)
        self.note(start, self._generators, None)
        return super().__iter__()


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw what torch's loader draws as its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _as_item(indices: Any) -> Any:
    """Return a batch of indices as an item for the loader.

    Where each index is itself a list, it becomes a tuple: the loader would take a list of lists
    for several batches.
    """
    nested = type(indices) is list and indices and isinstance(indices[0], list)
    return tuple(indices) if nested else indices
