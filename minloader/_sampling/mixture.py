"""Draws from several samplers or datasets by weight.

A *draw* chooses a part by weight, and takes its next item. A step is as many draws as all ranks
take at once, cut into one piece for each. Shares are whole numbers, so that nothing is rounded
while draws add up, and a state in JSON is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any, Literal

from minloader._arguments import as_float, checked_choice, checked_int
from minloader._formats import brief_repr
from minloader._protocols import has_getitem, is_array_like
from minloader._sampling.base import Sampler
from minloader._sampling.batch import StepRun
from minloader._sampling.lengths import LookUp, look_up
from minloader._sampling.seeding import derive
from minloader._sampling.source import (
    ItemReader,
    ItemSource,
    ReadPosition,
    as_count,
    encoded,
)

UNIT = 2**53
"""What the shares of all parts add up to. As fine as the random numbers of numpy are."""

GRAIN = 2**20
"""Parts of a length of 1 that are counted: lengths may be seconds."""

MOST_LENGTH = 1e200
"""Of an item: shares of more than that are no numbers that a float can hold."""

PASS = 1_000_000
"""What each pass of a part that is begun anew adds to the epoch that it is told. More than a run
has epochs, and small enough for samplers that seed 32-bit generators with it."""

Weights = Sequence[float] | Callable[[int, int], Sequence[float]]


def checked_weights(name: str, given: Any, parts: int) -> list[float]:
    """Return the weights of so many parts as floats.

    Raises:
        TypeError: they are not numbers.
        ValueError: they are impossible, or not one for each part.
    """
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)
    values: list[Any] = list(given) if is_list else [None]
    if not all(isinstance(value, Real) for value in values):
        raise TypeError(f"{name} must be one number for each part, got {brief_repr(given)}")
    if len(values) != parts:
        raise ValueError(
            f"{name} must be {parts} numbers, one for each part, got {brief_repr(given)}"
        )
    weights = [as_float(value) for value in values]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(
            f"{name} must be finite numbers of at least 0, not all of them 0, got "
            f"{brief_repr(given)}"
        )
    return weights


def source_of(number: int, part: Any, order: Callable[[int], int] | None) -> ItemSource:
    """Return what the items of a part are read from.

    Args:
        number: of the part.
        part: a number of samples, a dataset or a sampler.
        order: returns what an epoch of the former two is shuffled by. None: they are not.

    Raises:
        TypeError: the part is none of these, or could be two of them.
        ValueError: the number is below 0.
    """
    name = f"parts[{number}]"
    part = as_count(name, part)
    if isinstance(part, (list, tuple, str, bytes)) or is_array_like(part):
        raise TypeError(
            f"{name} is a {type(part).__name__}, which may be a dataset or a list of indices; "
            "give its len(), or BatchSampler(indices, None)"
        )
    if isinstance(part, Sized) and has_getitem(part) and type(part) is not range:
        part = len(part)
    return ItemSource(name, part, None if isinstance(part, Iterable) else order)


class Draws:
    """The draws of an epoch.

    What is *due* to a part is what its share of all draws is more than what it was given.

    Args:
        epoch: its number.
        parts: what is drawn from.
        stop: when the epoch ends, as of the mixture.
        length_of: returns the length of an item; None: each is as long as any other.
        start: from :meth:`position` of an earlier run. Of each part it has the number of its pass,
            and where in that it is.
    """

    def __init__(
        self,
        epoch: int,
        *,
        parts: Sequence[ItemSource],
        stop: str,
        length_of: Callable[[Any], Any] | None,
        start: dict[str, Any],
    ) -> None:
        self._parts = parts
        self._epoch = epoch
        self._stop = stop
        self._length_of = length_of
        self._step = 0
        self._weights: list[float] = []
        self._due: list[int] = list(start["due"])
        self._longest: int = start["longest"]
        self._passes: list[int] = [number for number, _ in start["parts"]]
        self.readings = [self._read(n, position) for n, (_, position) in enumerate(start["parts"])]

    def _read(self, part: int, position: ReadPosition) -> ItemReader:
        return self._parts[part].reader(self._epoch + self._passes[part] * PASS, position)

    @staticmethod
    def beginning(positions: Sequence[ReadPosition]) -> dict[str, Any]:
        """Return what the first draw of an epoch goes on from; its parts from these positions."""
        parts = [[0, position] for position in positions]
        return {"step": 0, "weights": [], "due": [0] * len(parts), "longest": 1, "parts": parts}

    def position(self) -> dict[str, Any]:
        """Return what another run goes on from."""
        positions = [reading.position() for reading in self.readings]
        return {
            "step": self._step,
            "weights": list(self._weights),
            "due": list(self._due),
            "longest": self._longest,
            "parts": [list(pair) for pair in zip(self._passes, positions, strict=True)],
        }

    def following(self) -> dict[str, Any]:
        """Return what another epoch goes on from, after this one has ended."""
        return self.beginning([reading.following() for reading in self.readings])

    def weigh(self, step: int, weights: Sequence[float]) -> None:
        """Have the next draws follow the weights of a step."""
        self._step = step
        if weights != self._weights:
            self._weights = list(weights)
            self._compute_shares()

    def add_to(self, into: list[Any], most: int) -> None:
        """Add draws to a list, each the number of a part and its next item; fewer at the end."""
        most += len(into)
        while len(into) < most and any(self._shares):
            part = self._choose()
            try:
                items = self._next(part)
                draws = [(part, item) for item in items]
                # No map(): it would take a StopIteration of the user's function for its end.
                length = max([self._length(draw) for draw in draws], default=0)
            except Exception:  # the part had its turn
                self._count_draw(part, self._longest)
                raise
            if draws:
                self._count_draw(part, length)
                into += draws
            else:
                self._due = [0] * len(self._due)  # what is due to the part cannot be given
                self._compute_shares()

    def _next(self, part: int) -> list[Any]:
        """Return the next item of a part, in a list, or an empty one if it has ended."""
        items: list[Any] = []
        while not items:
            reading = self.readings[part]
            reading.add_to(items, 1)
            if items or self._stop != "never":
                break
            position = reading.position()
            read, _, is_of_end = position
            if is_of_end and read == 1:  # the first was not there
                raise ValueError(
                    f"{self._parts[part].name} has no items, so it cannot be begun anew; give it "
                    "the weight 0, or leave it out"
                )
            if is_of_end and read:  # else it could not be begun, and is to be now
                self._passes[part] += 1
                position = reading.following()
            self.readings[part] = self._read(part, position)
        return items

    def _length(self, draw: tuple[int, Any]) -> int:
        """Return the length of an item, in GRAIN."""
        if self._length_of is None:
            return 1
        length = encoded(self._length_of(draw))  # of numpy's numbers, Python's
        if isinstance(length, Exception):
            raise length
        if not isinstance(length, Real):
            raise TypeError(
                f"lengths must be one number for each item, got {brief_repr(length)} for {draw!r}"
            )
        value = as_float(length)
        if not 0 <= value <= MOST_LENGTH:
            raise ValueError(
                f"lengths[{draw!r}] is {value:g}, but must be at least 0 and at most "
                f"{MOST_LENGTH:g}; leave that item out"
            )
        return max(1, round((value or 1) * GRAIN))

    def _choose(self) -> int:
        """Choose a part such that each has been given its share to within the longest item.

        Of the parts that are not ahead of their share, it is the one that would first be behind by
        the longest item (R. Tijdeman, The chairman assignment problem, 1980; known from operating
        systems as "earliest deadline first").
        """
        exact = self._length_of is None  # then this draw's length is known, and counts already
        turns = []
        for part, (due, share) in enumerate(zip(self._due, self._shares, strict=True)):
            if share:
                is_ahead = due + (share if exact else 1) <= 0
                behind_in = (self._longest * UNIT - due) / share  # of what all parts are given
                turns.append((is_ahead, behind_in, part))
        return min(turns)[2]

    def _count_draw(self, part: int, length: int) -> None:
        """Count a draw of a part."""
        self._longest = max(self._longest, length)
        pairs = zip(self._due, self._shares, strict=True)
        self._due = [due + share * length for due, share in pairs]
        self._due[part] -= UNIT * length

    def _compute_shares(self) -> None:
        """Divide the next draws by weight between the parts that have not ended."""
        ended = [reading.is_ended for reading in self.readings]
        is_at_end = self._stop == "first" and any(ended)
        pairs = zip(self._weights, ended, strict=True)
        weights = [Fraction(0 if is_at_end or is_out else weight) for weight, is_out in pairs]
        total = sum(weights)
        self._shares = [int(weight * UNIT / total) if total else 0 for weight in weights]
        if total:  # what was rounded off
            self._shares[weights.index(max(weights))] += UNIT - sum(self._shares)


class Parts:
    """What a mixture reads: several sources, as if they were one.

    Args:
        mixture: the sampler, which says how much of each is drawn.
        sources: of the parts.
    """

    def __init__(self, mixture: MixtureSampler, sources: Sequence[ItemSource]) -> None:
        self._mixture = mixture
        self.sources = sources

    def set_epoch(self, epoch: int) -> None:
        for source in self.sources:
            source.set_epoch(epoch)

    def forget(self) -> None:
        for source in self.sources:
            source.forget()

    def samplers(self) -> list[Any]:
        return [sampler for source in self.sources for sampler in source.samplers()]

    def beginning(self) -> dict[str, Any]:
        return Draws.beginning([source.beginning() for source in self.sources])

    def reader(self, epoch: int, position: dict[str, Any]) -> Draws:
        mixture = self._mixture
        return Draws(
            epoch,
            parts=self.sources,
            stop=mixture.stop,
            length_of=mixture._length_of,
            start=position,
        )

    def check(self, position: Any, epoch: int) -> None:
        parts = position.get("parts") if isinstance(position, dict) else None
        if (
            not isinstance(parts, list | tuple)
            or len(parts) != len(self.sources)
            or any(not isinstance(part, list | tuple) or len(part) != 2 for part in parts)
        ):
            raise ValueError(f"source must be draws from all parts, got {brief_repr(position)}")
        due = position["due"]
        if not isinstance(due, list | tuple) or [type(each) for each in due] != [int] * len(parts):
            raise ValueError(f"due must be an int for each part, got {brief_repr(due)}")
        checked_int("longest", position["longest"], 1)
        step = position["step"]
        weights = position["weights"]
        now = self._mixture.weights_at(epoch, step) if weights else weights
        if now != weights:
            raise ValueError(
                f"weights of step {step} are {now}, but the state is of weights {weights}; give "
                "those it had then, or a function that returns others from a later step on"
            )
        for source, (passes, at) in zip(self.sources, parts, strict=True):
            checked_int(f"passes of {source.name}", passes, 0)
            source.check(at)

    def restore(self, position: dict[str, Any], epoch: int) -> None:
        for source, (passes, at) in zip(self.sources, position["parts"], strict=True):
            source.restore(at, epoch + passes * PASS)


class _MixtureRun(StepRun):
    def _num_unread(self) -> int:
        weights = self.sampler.weights
        if self.sampler.stop != "last" or callable(weights):
            raise TypeError(
                "the number of draws is not known beforehand; it is with stop='last', and weights "
                "that are no function"
            )
        weighted = zip(self._reading.readings, weights, strict=True)
        return sum(reading.num_unread() for reading, weight in weighted if weight)

    def _step(self, ranks: int, size: int | None) -> list[Any]:
        self._reading.weigh(self._begun, self.sampler.weights_at(self.epoch, self._begun))
        return super()._step(ranks, size)


class MixtureSampler(Sampler):
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
    _dealt_by = ("world_size", "batch_size")
    _begin = _MixtureRun
    last_batch = "keep"

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
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        self.batch_size = None if batch_size is None else checked_int("batch_size", batch_size, 1)
        if not isinstance(parts, Iterable) or isinstance(parts, Mapping):
            raise TypeError(f"parts must be a list of parts, got {brief_repr(parts)}")
        sources = [
            source_of(n, part, partial(self._order_of, n) if self.shuffle else None)
            for n, part in enumerate(parts)
        ]
        if not sources:
            raise ValueError("parts must be at least one, got none")
        self._source = Parts(self, sources)
        self.parts = [None if isinstance(p.items, Iterable) else len(p) for p in sources]
        self.weights = weights
        if not callable(weights):
            self.weights = checked_weights("weights", weights, len(sources))
        self.stop = checked_choice("stop", stop, ("first", "last", "never"))
        self.by_length = lengths is not None
        self._length_of = None if lengths is None else look_up(lengths)

    def _order_of(self, part: int, epoch: int) -> int:
        """Return what an epoch of a part is shuffled by."""
        return derive("part", self.seed, part, epoch)

    def weights_at(self, epoch: int, step: int) -> Sequence[float]:
        """Return the weights of a step."""
        if not callable(self.weights):
            return self.weights
        weights = self.weights(epoch, step)
        return checked_weights(f"weights({epoch}, {step})", weights, len(self.parts))
