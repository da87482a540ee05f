"""The order of an epoch, as torch draws it.

Runs in the parent. Torch's samplers draw random numbers from torch's global generator, or from
generators of their own, when an epoch begins. Whoever restores these generators and begins the
samplers again gets the same order.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from minloader._checks import is_stateful, shown
from minloader._worker.torch_conventions import PassesState


class EpochStart(NamedTuple):
    """All that the order of an epoch depends on, just before its sampler is begun.

    Attributes:
        own: states of the generators of the loader and of its samplers.
        shared: state of torch's global generator; None between epochs.
        seeded: whether the loader draws its seed after it has begun the sampler.
        epoch: number of the epoch in the :class:`minloader.Loader`.
        told: the epoch that the sampler was set to, if it has any.
    """

    own: list[torch.Tensor]
    shared: torch.Tensor | None
    seeded: bool
    epoch: int = -1
    told: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the epoch has begun."""
        return self.shared is not None

    @classmethod
    def now(cls, generators: list[torch.Generator], *, seeded: bool) -> EpochStart:
        """Record the generators as they are."""
        return cls([each.get_state() for each in generators], torch.get_rng_state(), seeded)

    def encode(self) -> dict[str, Any]:
        """Return a part of a state, fit for JSON."""
        shared = None if self.shared is None else _to_text(self.shared)
        own = [_to_text(each) for each in self.own]
        return {"own": own, "shared": shared, "seeded": self.seeded}

    @classmethod
    def decode(cls, order: Any) -> EpochStart:
        """Undo :meth:`encode`.

        Raises:
            ValueError: the state is damaged.
        """
        try:
            shared = None if order["shared"] is None else _from_text(order["shared"])
            return cls([_from_text(text) for text in order["own"]], shared, bool(order["seeded"]))
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
    ``state_dict`` and ``load_state_dict`` is put back by these, and any other is read again.
    """

    puts_generators_back = True

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = self._stateful = sampler
        self._items: Iterator[Any] | None = None

    def begin(self) -> None:
        """Begin an epoch of the sampler, which may draw random numbers for it now."""
        if not is_stateful(self.sampler):  # such a one may be put back by the loader first
            self._items = iter(self.sampler)

    def draw(self, *, whole: bool) -> None:
        """Make the sampler draw its random numbers now, for its first item or for all."""
        if self._items is not None:
            first = list(self._items if whole else itertools.islice(self._items, 1))
            self._items = itertools.chain(first, self._items)

    def __iter__(self) -> Iterator[Any]:
        items, self._items = self._items, None
        return map(_as_item, iter(self.sampler) if items is None else items)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class EpochOrder(Order):
    """The order of a sampler of torch's kind, which follows from the number of the epoch alone.

    Args:
        sampler: torch's.
        generators: those that it draws from, besides torch's global one.
        whole: whether it draws from them while it is read.
    """

    def __init__(
        self, sampler: Iterable[Any], generators: list[torch.Generator], *, whole: bool
    ) -> None:
        super().__init__(sampler)
        self._generators, self._whole, self._epoch = generators, whole, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            for generator in (torch.default_generator, *self._generators):
                generator.manual_seed(self._epoch)
            self.begin()
            self.draw(whole=self._whole)
        return super().__iter__()


def _as_item(indices: Any) -> Any:
    """Return a batch of indices as an item for the loader.

    Where each index is itself a list, it becomes a tuple: the loader would take a list of lists
    for several batches.
    """
    nested = type(indices) is list and indices and isinstance(indices[0], list)
    return tuple(indices) if nested else indices
