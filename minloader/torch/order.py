"""The order of an epoch, as torch draws it."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from minloader._checks import is_stateful, shown


class _Start(NamedTuple):
    """What the order of an epoch depends on, just before the sampler is begun.

    Attributes:
        own: states of the generators of the loader and of the samplers.
        shared: state of torch's global one; None between epochs.
        seeded: whether the base seed is drawn after the sampler was begun.
        epoch: number that the epoch has for the loader.
    """

    own: list[torch.Tensor]
    shared: torch.Tensor | None
    seeded: bool
    epoch: int = -1

    @property
    def within(self) -> bool:
        """Whether the epoch has begun."""
        return self.shared is not None

    @classmethod
    def now(cls, generators: list[torch.Generator], *, seeded: bool) -> _Start:
        return cls([each.get_state() for each in generators], torch.get_rng_state(), seeded)

    def encoded(self) -> dict[str, Any]:
        shared = None if self.shared is None else _to_text(self.shared)
        return {
            "own": [_to_text(each) for each in self.own],
            "shared": shared,
            "seeded": self.seeded,
        }

    @classmethod
    def decode(cls, order: Any) -> _Start:
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


class _Order:
    """What torch's samplers give, as a sampler for the loader.

    The epochs of a sampler with ``set_epoch`` are the user's to set, as with torch, so the loader
    is not shown that.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._items: Iterator[Any] | None = None

    def begin(self) -> None:
        """Begins an epoch of the sampler, which may draw random numbers for it now."""
        self._items = iter(self._sampler)

    def settle(self, *, whole: bool) -> None:
        """Has the sampler draw its random numbers now: those for its first item, or for all."""
        assert self._items is not None
        first = list(self._items if whole else itertools.islice(self._items, 1))
        self._items = itertools.chain(first, self._items)

    def __iter__(self) -> Iterator[Any]:
        items, self._items = self._items, None
        return map(_as_item, iter(self._sampler) if items is None else items)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class _StatefulOrder(_Order):
    """A sampler that can tell where it is: it is put back by that rather than read again."""

    def begin(self) -> None:
        """Not yet: the loader may put it back first."""

    def settle(self, *, whole: bool) -> None: ...

    def state_dict(self) -> Any:
        return self._sampler.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self._sampler.load_state_dict(state)  # type: ignore[attr-defined]


def _order_of(sampler: Iterable[Any]) -> _Order:
    kind = _StatefulOrder if is_stateful(sampler) else _Order
    return kind(sampler)


def _as_item(indices: Any) -> Any:
    """A batch of indices that are lists themselves, which the loader would take for batches."""
    nested = type(indices) is list and indices and isinstance(indices[0], list)
    return tuple(indices) if nested else indices


class _NoOrder:
    """Stands for the sampler of an ``IterableDataset``, which has its own order."""

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)


def _default_sampler(dataset: Any, shuffle: bool, generator: Any) -> Iterable[Any]:
    if isinstance(dataset, IterableDataset):
        return _NoOrder()
    return RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
