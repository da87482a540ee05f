"""Draws from several samplers or datasets by weight.

A draw (``draws.py``) chooses a part, and takes its next item (``parts.py``). A step is as many
draws as all ranks take at once, cut into one piece for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from minloader._checks import check_int, shown
from minloader._sampling.base import Position, Sampler, check_has_state
from minloader._sampling.draws import Draws, Weights, check_weights
from minloader._sampling.parts import Part
from minloader._sampling.seeding import derive


class MixtureSampler(Sampler):
    """Draws from several samplers or datasets by weight.

    Runs in the process that iterates it, normally the parent. It yields ``(part, index)``, as
    :class:`Concatenated` takes it. A draw takes a few µs.

    With exact shares, after any number of draws each part was drawn within 1 of its share of them,
    if the weights stay the same: the parts take turns, and the one whose draw is due soonest comes
    first, as long as that does not put it ahead (R. Tijdeman, The chairman assignment problem,
    1980). If the weights change, what is due stays due. If a part ends and the others go on, their
    shares are counted from there.

    With ranks, all of them draw the same, and a step of ``world_size * batch_size`` draws is cut
    into one piece for each: neighbours, so that every batch has the shares. The pieces of an
    incomplete last step differ by at most one item. Where a rank would get nothing, it is dropped.

    A part that raises an error does so in its turn; the next draw goes on.

    Args:
        parts: at least one. Each is a number of samples; a dataset, which has ``__len__`` and
            ``__getitem__``; or a sampler, an iterable of indices. With ranks, a sampler must give
            the same in each of them. Lists and arrays are refused, since they may be either.
        weights: a number of at least 0 for each part; they need not add up to 1. Or a function
            ``weights(epoch, step)`` that returns them for each step, counted from 0 in each epoch.
            A part of weight 0 is not drawn from, and not waited for.
        batch_size: number of items in a batch. None: single items in place of lists.
        stop: when the epoch ends: when the "first" part that is drawn from has no more items; when
            the "last" has, while the others drop out, and every item comes once; or "never": each
            part that ends is begun anew, as in an epoch of its own.
        exact: whether shares are exact. Otherwise parts are drawn at random.
        offsets: ``offsets`` of the :class:`Concatenated`, to yield the indices ``offsets[part] +
            index`` in place of pairs.
        shuffle: whether parts that are numbers or datasets are shuffled. Each has an order of its
            own, and another in each epoch and pass.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value. (Iterating raises both errors for what
            ``weights`` returns, and ValueError for a part without items that is begun anew.)
    """

    _recorded = (*Sampler._recorded, "inner")

    def __init__(
        self,
        parts: Iterable[Any],
        weights: Weights,
        batch_size: int | None = None,
        stop: Literal["first", "last", "never"] = "first",
        exact: bool = True,
        offsets: Sequence[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        if not hasattr(parts, "__iter__"):
            raise TypeError(f"parts must be a list of parts, got {shown(parts)}")
        self._parts = [
            Part(f"parts[{number}]", part, shuffle, derive("part", self.seed, number))
            for number, part in enumerate(parts)
        ]
        if not self._parts:
            raise ValueError("parts must be at least one, got none")
        self._weights = weights
        if not callable(weights):
            self._weights = check_weights("weights", weights, len(self._parts))
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self._step = self.world_size * (self.batch_size or 1)  # draws
        if stop not in ("first", "last", "never"):
            raise ValueError(f"stop must be 'first', 'last' or 'never', got {stop!r}")
        self.stop = stop
        self.exact = bool(exact)
        self._offsets = None
        if offsets is not None:
            self._offsets = [check_int("offsets", offset, 0) for offset in offsets]
            if len(self._offsets) != len(self._parts):
                raise ValueError(
                    f"offsets must be {len(self._parts)} indices, one for each part, got "
                    f"{shown(self._offsets)}"
                )
        self.shuffle = bool(shuffle)

    @property
    def dropped(self) -> int:
        """Number of items that no rank got, of the last epoch that was iterated to its end."""
        return self._dropped

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self, self._begin())

    def _weights_at(self, epoch: int, step: int) -> Sequence[float]:
        """Return the weights of a step."""
        if not callable(self._weights):
            return self._weights
        weights = self._weights(epoch, step)
        return check_weights(f"weights({epoch}, {step})", weights, len(self._parts))

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "parts": [part.size for part in self._parts],
            "batch_size": self.batch_size,
            "stop": self.stop,
            "exact": self.exact,
            "offsets": self._offsets,
            "shuffle": self.shuffle,
        }

    def _record(self, position: Position) -> Position:
        inner = position.inner
        return replace(position, inner=inner.record() if isinstance(inner, Draws) else inner)

    def _accept(self, position: Position) -> None:
        known = position.inner
        if known is None:  # nothing was drawn yet, so that other weights do no harm
            return
        step, weights = known["step"], known["weights"]
        here = self._weights_at(position.epoch, step)
        if here != weights:
            raise ValueError(
                f"weights of step {step} are {here}, but the state is of weights {weights}; give "
                "those it had then, or a function that returns others from a later step on"
            )
        for part, (*_, state) in zip(self._parts, known["parts"], strict=True):
            if state is not None:
                check_has_state(part.name, part.sampler)


class _Batches(Iterator[Any]):
    """The batches of an epoch. It is no generator, so that it goes on after an error."""

    def __init__(self, mixture: MixtureSampler, position: Position) -> None:
        self._mixture = mixture
        self._position = position
        rng = None if mixture.exact else mixture._rng(position.epoch)
        self._draws = Draws(mixture._parts, mixture.stop, rng, position.epoch, position.inner)
        position.inner = self._draws

    def __next__(self) -> Any:
        mixture, position, draws = self._mixture, self._position, self._draws
        draws.weigh(position.yielded, mixture._weights_at(position.epoch, position.yielded))
        with suppress(StopIteration):
            while len(draws.left) < mixture._step:
                draws.left.append(draws.draw())
        step, ranks, offsets = draws.left, mixture.world_size, mixture._offsets
        if len(step) < ranks:
            mixture._dropped = len(step)
            raise StopIteration
        start, stop = (len(step) * rank // ranks for rank in (mixture.rank, mixture.rank + 1))
        items: list[Any] = step[start:stop]
        if offsets is not None:
            items = [offsets[part] + index for part, index in items]
        draws.left = []
        position.yielded += 1
        return items[0] if mixture.batch_size is None else items
