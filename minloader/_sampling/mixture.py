"""Draws from several samplers or datasets by weight.

A draw (``draws.py``) chooses a part, and takes its next item. A step is as many draws as all ranks
take at once, cut into one piece for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from minloader._checks import check_choice, shown
from minloader._sampling.base import Place
from minloader._sampling.batch import StepRun, StepSampler
from minloader._sampling.draws import PASS, Draws, Weights, check_weights, source_of
from minloader._sampling.source import LookUp, Source, look_up


class _Run(StepRun):
    def _step(self, ranks: int, size: int | None) -> list[Any]:
        self._reading.weigh(self._begun, self.sampler._weights_at(self.epoch, self._begun))
        return super()._step(ranks, size)


class MixtureSampler(StepSampler):
    """Draws from several samplers or datasets by weight.

    Runs in the process that iterates it, normally the parent. It yields ``(part, index)``, as
    :class:`Concatenated` takes it. A draw takes a few µs.

    Shares are exact: after any number of draws each part was drawn within 1 of its share of them,
    if the weights stay the same. The parts take turns, and the one whose draw is due soonest comes
    first, as long as that does not put it ahead (R. Tijdeman, The chairman assignment problem,
    1980). With ``lengths`` the shares are of what the items' lengths add up to: then each part is
    within one longest item of its share, or two while longer ones still turn up. If the weights
    change, what is due stays due. If a part ends and the others go on, their shares are counted
    from there.

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
        shuffle: whether parts that are numbers or datasets are shuffled. Each has an order of its
            own, and another in each epoch and pass.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        lengths: what the lengths of items ``(part, index)`` are looked up in, such as
            ``Concatenated([lengths_a, lengths_b])``, or a function of such an item. Weights are
            then shares of tokens, seconds or whatever, and not of items. None: of items.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value. (Iterating raises both errors for what
            ``weights`` returns, and ValueError for a part without items that is begun anew.)
    """

    _arguments = ("parts", "batch_size", "stop", "shuffle", "by_length")
    _begin = _Run

    def __init__(
        self,
        parts: Iterable[Any],
        weights: Weights,
        batch_size: int | None = None,
        stop: Literal["first", "last", "never"] = "first",
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        lengths: LookUp | Callable[[Any], float] | None = None,
    ) -> None:
        super().__init__(batch_size, shuffle, seed, rank, world_size)
        if not hasattr(parts, "__iter__"):
            raise TypeError(f"parts must be a list of parts, got {shown(parts)}")
        self._parts = [source_of(n, part, self.shuffle, self.seed) for n, part in enumerate(parts)]
        if not self._parts:
            raise ValueError("parts must be at least one, got none")
        self.parts = [len(p) if not hasattr(p.items, "__iter__") else None for p in self._parts]
        self.weights = weights
        if not callable(weights):
            self.weights = check_weights("weights", weights, len(self._parts))
        self.stop = check_choice("stop", stop, ("first", "last", "never"))
        self.by_length = lengths is not None
        self._length_of = None if lengths is None else look_up(lengths)

    def _weights_at(self, epoch: int, step: int) -> Sequence[float]:
        """Return the weights of a step."""
        if not callable(self.weights):
            return self.weights
        weights = self.weights(epoch, step)
        return check_weights(f"weights({epoch}, {step})", weights, len(self._parts))

    def _sources(self) -> Sequence[Source]:
        return self._parts

    def _beginning(self) -> Place:
        places = [part.beginning() for part in self._parts]
        return super()._beginning() | {"source": Draws.beginning(places)}

    def _read(self, epoch: int, place: dict[str, Any]) -> Draws:
        return Draws(self, epoch, place)

    def _ahead(self, place: dict[str, Any]) -> int:
        if self.stop != "last" or callable(self.weights):
            raise TypeError(
                "the number of draws is not known beforehand; it is with stop='last', and weights "
                "that are no function"
            )
        weighted = zip(self._parts, self.weights, place["parts"], strict=True)
        return sum(max(0, len(part) - at[0]) for part, weight, (_, at) in weighted if weight)

    def _restore(self, epoch: int, place: Place) -> None:
        known = place["source"]
        step, weights = known["step"], known["weights"]
        if weights and (here := self._weights_at(epoch, step)) != weights:
            raise ValueError(
                f"weights of step {step} are {here}, but the state is of weights {weights}; give "
                "those it had then, or a function that returns others from a later step on"
            )
        for part, (number, at) in zip(self._parts, known["parts"], strict=True):
            part.restore(epoch + number * PASS, at)
