"""The parts of a mixture: what they are, how far they were read, and how they go on.

The place of a part is a number of items, or the state that the part itself gives. Nothing is read
again where there is a state, nor where the part was given as a number of samples or as a dataset.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from minloader._checks import check_int, is_stateful
from minloader._sampling.base import Repeatable
from minloader._sampling.batch import BatchSampler

PASS = 1_000_000
"""What each pass of a part that is begun anew adds to the epoch that it is told. More than a run
has epochs, and small enough for samplers that seed 32-bit generators with it."""


class Part:
    """A part as it was given.

    Args:
        name: what errors call it.
        part: a number of samples, a dataset or a sampler.
        shuffle: whether to shuffle the indices of the former two.
        seed: to shuffle them with.

    Attributes:
        name: what errors call it.
        size: number of its samples; None if it was given as a sampler.
        sampler: what gives its indices.
        items: the same, made to refuse a second pass where that would be empty.

    Raises:
        TypeError: it is none of these, or could be two of them.
        ValueError: the number is below 0.
    """

    def __init__(self, name: str, part: Any, shuffle: bool, seed: int) -> None:
        if isinstance(part, (list, tuple, str, bytes)) or hasattr(part, "__array__"):
            raise TypeError(
                f"{name} is a {type(part).__name__}, which may be a dataset or a list of indices; "
                "give its len(), or BatchSampler(indices, None)"
            )
        kind = type(part)
        if hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and kind is not range:
            part = len(part)
        self.name = name
        self.size = None if hasattr(part, "__iter__") else check_int(name, part, 0)
        self.sampler = part
        if self.size is not None:
            self.sampler = BatchSampler(self.size, None, shuffle, seed=seed)
        self.items = Repeatable(name, self.sampler)


class Reading:
    """How far an epoch has read a part.

    Args:
        part: what is read.
        epoch: number of the epoch.
        known: from ``record``, of an earlier run; None: at the beginning.

    Attributes:
        part: what is read.
        ended: whether it has no more items.
    """

    def __init__(self, part: Part, epoch: int, known: Sequence[Any] | None) -> None:
        self.part = part
        self._epoch = epoch
        # How often it was begun anew, how many items it was asked for since, and where its sampler
        # is to be put.
        place: Any = known or (0, 0, False, None)
        self._passes, self._asked, self.ended, self._state = place
        self._iterator: Iterator[Any] | None = None

    def take(self) -> Any:
        """Return the next item.

        Raises:
            StopIteration: there are no more.
        """
        if self._iterator is None:
            self._iterator = self._open()
        self._asked += 1
        return next(self._iterator)

    def begin_anew(self) -> None:
        """Have the next item be the first of another pass, in another order."""
        self._passes, self._asked, self._state, self._iterator = self._passes + 1, 0, None, None

    def record(self) -> list[Any]:
        """Return what another run goes on from."""
        state = self._state
        if self._iterator is not None and self.part.size is None and is_stateful(self.part.sampler):
            state = self.part.sampler.state_dict()
        return [self._passes, self._asked, self.ended, state]

    def _open(self) -> Iterator[Any]:
        sampler = self.part.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch + self._passes * PASS)
        if self.part.size is not None:
            sampler.load_state_dict(sampler.state_dict(begin=True) | {"yielded": self._asked})
        elif self._state is not None:
            sampler.load_state_dict(copy.deepcopy(self._state))  # some empty what they are given
        iterator = iter(self.part.items)
        if self.part.size is None and self._state is None:
            for _ in range(self._asked):
                with suppress(Exception):  # that was raised when the item was asked for first
                    next(iterator)
        return iterator
