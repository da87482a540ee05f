"""Batches of a fixed number of indices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

from minloader._checks import check_bool, check_int, is_stateful, shown
from minloader._sampling.base import Position, Repeatable, Sampler
from minloader._sampling.permutation import Permutation

CHUNK = 16_384
"""Indices that are computed, and exist as Python integers, at a time: 0.7 MB, within half a
millisecond. With fewer, numpy's overhead counts; more of them do not fit into the caches."""


class BatchSampler(Sampler):
    """Batches of a fixed number of indices.

    Runs in the process that iterates it, normally the parent. Any number of samples takes the same
    memory, a megabyte, and the same time to begin or go on, a millisecond: a shuffled order is
    computed as it is needed. An inner sampler takes what it holds.

    With ranks, all of them have the same order, and index ``i`` of it belongs to rank
    ``i % world_size``: a step takes the next ``world_size * batch_size`` indices. If the last step
    is incomplete, "keep" gives each rank its share, so that their batches differ by at most one
    index, and drops only fewer than ``world_size`` indices, where a rank would get nothing. The
    number of batches, ``len()``, is the same for all ranks.

    Args:
        n_or_sampler: number of samples, or an iterable of indices. With ranks, the iterable must
            give the same indices in each of them: each reads all indices and takes its own.
        batch_size: number of indices in a batch. None: single indices in place of lists.
        shuffle: whether each epoch has another order. An inner sampler is then read to its end
            first.
        last_batch: what to do with an incomplete last batch, or step: "keep" it, "discard" it, or
            "rollover", which lets the next epoch begin with it.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value.
    """

    _added: Mapping[str, Any] = {**Sampler._added, "order": "stored"}
    _dealt_by = ("world_size", "batch_size")

    def __init__(
        self,
        n_or_sampler: int | Iterable[Any],
        batch_size: int | None,
        shuffle: bool = False,
        last_batch: Literal["keep", "discard", "rollover"] = "keep",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self._inner: Any = n_or_sampler
        self._counted = not hasattr(n_or_sampler, "__iter__")  # rather than an inner sampler
        self._recorded += ("order",)
        if self._counted:
            self._inner = range(check_int("n_or_sampler", n_or_sampler, 0))
        else:
            self._recorded += ("left", "ended", "inner")
        self._items = Repeatable("n_or_sampler", self._inner)
        if last_batch not in ("keep", "discard", "rollover"):
            raise ValueError(
                f"last_batch must be 'keep', 'discard' or 'rollover', got {last_batch!r}"
            )
        if batch_size is None and last_batch != "keep":
            raise ValueError(f"last_batch={last_batch!r} needs a batch_size; give one, or drop it")
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self.shuffle = check_bool("shuffle", shuffle)
        self.last_batch = last_batch
        self._step = self.world_size * (self.batch_size or 1)  # indices

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the inner sampler has no length.
        """
        return self._divide(len(self._inner))[0]

    @property
    def dropped(self) -> int:
        """Number of samples of the epoch that no rank gets.

        If the inner sampler has no length: of the last epoch that was iterated to its end.
        """
        n = self._count()
        return self._dropped if n is None else self._divide(n)[1]

    def _divide(self, n: int) -> tuple[int, int]:
        """Return how many batches a rank gets of ``n`` samples, and how many are dropped."""
        n += self._carried(self.epoch) if self._counted else len(self._left)
        dealt = self._dealt
        begun = dealt[-1][-1] if dealt else 0
        batches, rest = divmod(max(0, n - self._given(dealt, begun)), self._step)
        batches += begun
        if self.last_batch == "keep" and rest >= self.world_size:
            return batches + 1, 0
        return batches, 0 if self.last_batch == "rollover" else rest

    def __iter__(self) -> Iterator[Any]:
        position = self._begin()
        left = self._carry(position.epoch) if self._counted else position.left
        if position.ended:
            start = sys.maxsize  # nothing comes after what the next epoch begins with
        else:
            given = self._given(position.dealt, position.yielded)
            left, start = left[given:], max(0, given - len(left))
        if position.inner is not None:
            start = 0  # the inner sampler was put back there itself
        return self._batches(chain(left, self._order(position.epoch, start)), position)

    def _batches(self, indices: Iterator[Any], position: Position) -> Iterator[Any]:
        step: list[Any] = []
        for world_size, batch_size, until in self._parts(position.dealt):
            rank, whole = self.rank % world_size, world_size * (batch_size or 1)
            least = world_size if self.last_batch == "keep" else whole
            while position.yielded < until and len(step := list(islice(indices, whole))) >= least:
                position.yielded += 1
                position.inner = None  # not before: a generator tells the truth once it has begun
                yield step[rank] if batch_size is None else step[rank::world_size]
        position.ended, position.inner = True, None
        if self.last_batch == "rollover":
            position.left = self._left = step
            step = []
        self._dropped = len(step)

    def _parts(self, dealt: list[list[Any]]) -> list[list[Any]]:
        """Return world size, batch size and last batch of each part of an epoch."""
        return [*dealt, [self.world_size, self.batch_size, sys.maxsize]]

    def _given(self, dealt: list[list[Any]], batches: int) -> int:
        """Return how many indices all ranks together were given in so many batches each."""
        given = begun = 0
        for world_size, batch_size, until in self._parts(dealt):
            end = max(begun, min(until, batches))
            given += (end - begun) * world_size * (batch_size or 1)
            begun = end
        return given

    def _order(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the indices of an epoch from a place on."""
        if self.shuffle:
            values = self._inner if self._counted else list(self._items)
            n = len(values)
            order: Any = Permutation(n, self._entropy(epoch))
            chunks = (order[i : i + CHUNK].tolist() for i in range(start, n, CHUNK))
            places = chain.from_iterable(chunks)
            return places if self._counted else map(values.__getitem__, places)
        if self._counted:
            return iter(self._inner[start:])
        indices = iter(self._items)
        next(islice(indices, start, start), None)  # goes there, and takes nothing
        return indices

    def _count(self) -> int | None:
        """Return the number of samples; None if the inner sampler does not tell."""
        try:
            return len(self._inner)
        except TypeError:
            return None

    def _carried(self, epoch: int) -> int:
        """Return how many of ``n`` samples in each epoch earlier epochs leave for this one."""
        return epoch * len(self._inner) % self._step if self.last_batch == "rollover" else 0

    def _carry(self, epoch: int) -> list[int]:
        """Return these samples, which follow from the number of the epoch as the order does."""
        carry: list[int] = []
        missing = self._carried(epoch)
        while missing:
            epoch -= 1
            tail = list(self._order(epoch, max(0, len(self._inner) - missing)))
            carry = tail + carry
            missing -= len(tail)
        return carry

    # --- state

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "n_or_sampler": "int" if self._counted else "sampler",
            "n": self._count(),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "last_batch": self.last_batch,
        }

    def _check_former(self, **former: Any) -> None:
        super()._check_former(**former)
        step = former["world_size"] * (former["batch_size"] or 1)
        if self._counted and self.last_batch == "rollover" and step != self._step:
            raise ValueError(
                f"world_size * batch_size is {self._step}, but the state is of {step}, and what "
                "epochs leave to each other with last_batch='rollover' follows from that; choose "
                "the batch_size that gives the same"
            )

    def _record(self, position: Position) -> Position:
        if self._counted:
            return position
        inner = position.inner
        # An inner sampler that was not read yet, or read to its end to be shuffled, begins anew.
        at_work = position.yielded and not self.shuffle and not self._loaded
        if at_work and inner is None and is_stateful(self._inner):
            inner = self._inner.state_dict()
        left = [i.item() if hasattr(i, "item") else i for i in position.left]  # no numpy in JSON
        return replace(position, left=left, inner=inner)

    def _accept(self, position: Position) -> None:
        if position.order not in ("computed", "stored"):
            raise ValueError(f"order must be 'computed' or 'stored', got {shown(position.order)}")
        self._restore_inner(position.epoch, position.inner)
        position.left = self._left = list(position.left)
        self._order_kind = position.order
