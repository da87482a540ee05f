"""The draws of a mixture: which part is next, by weight, and what becomes of those that end.

Shares are whole numbers, so that nothing is rounded while draws add up, and a state in JSON is
exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from numbers import Real
from typing import Any

from minloader._checks import shown
from minloader._sampling.parts import Part, Reading

UNIT = 2**53
"""What the shares of all parts add up to: one draw. As fine as the random numbers of numpy are."""

Weights = Sequence[float] | Callable[[int, int], Sequence[float]]


def check_weights(name: str, given: Any, parts: int) -> list[float]:
    """Return the weights of so many parts as floats.

    Raises:
        TypeError: they are not numbers.
        ValueError: they are impossible, or not one for each part.
    """
    values: list[Any] = list(given) if hasattr(given, "__iter__") else [None]
    if not all(isinstance(value, Real) for value in values):
        raise TypeError(f"{name} must be one number for each part, got {shown(given)}")
    if len(values) != parts:
        raise ValueError(f"{name} must be {parts} numbers, one for each part, got {shown(given)}")
    if not all(0 <= value < math.inf for value in values) or not any(values):
        raise ValueError(
            f"{name} must be finite numbers of at least 0, not all of them 0, got {shown(given)}"
        )
    return [float(value) for value in values]


class Shares:
    """Says which part is drawn from next.

    Args:
        parts: how many parts there are.
        rng: what to choose by at random; None: in turns.
        known: from ``record``, of an earlier run; None: at the beginning.
    """

    def __init__(self, parts: int, rng: Any, known: Sequence[Any] | None) -> None:
        self._rng = rng
        # The number of draws, and for turns how far each part is behind its share of them, in UNIT.
        self._draws: int = known[0] if known else 0
        self._due: list[int] = list(known[1]) if known else [0] * parts
        self._shares = [0] * parts
        if rng is not None:
            rng.bit_generator.advance(self._draws)

    def record(self) -> list[Any]:
        """Return what another run goes on from."""
        return [self._draws, list(self._due)]

    def begin_anew(self) -> None:
        """Forget what is due, since a part has ended that will not get its share."""
        self._due = [0] * len(self._due)

    def divide(self, weights: Sequence[float]) -> None:
        """Divide the next draws by weight."""
        largest = max(weights)
        if not largest:
            self._shares = [0] * len(weights)
            return
        ratios = [weight / largest for weight in weights]  # whose sum cannot be infinite
        total = sum(ratios)
        self._shares = [int(ratio / total * UNIT) for ratio in ratios]
        self._shares[ratios.index(1)] += UNIT - sum(self._shares)

    def __bool__(self) -> bool:
        """Return whether any part is to be drawn from."""
        return any(self._shares)

    def choose(self) -> int:
        """Return the number of the part of the next draw."""
        self._draws += 1
        if self._rng is not None:
            return bisect_right(list(accumulate(self._shares)), int(self._rng.random() * UNIT))
        return self._take_turn()

    def _take_turn(self) -> int:
        """Choose a part such that each has been drawn within 1 of its share of all draws.

        Of the parts that this draw does not put ahead of their share by a whole draw, it is the one
        that would first be behind by one (R. Tijdeman, The chairman assignment problem, 1980; known
        from operating systems as "earliest deadline first").
        """
        due = [behind + share for behind, share in zip(self._due, self._shares, strict=True)]
        turns = (
            (due[part] <= 0, -((due[part] - UNIT) // share), part)
            for part, share in enumerate(self._shares)
            if share
        )
        part = min(turns)[2]
        due[part] -= UNIT
        self._due = due
        return part


class Draws:
    """The draws of an epoch.

    Args:
        parts: what is drawn from.
        stop: when the epoch ends.
        rng: what to choose parts by at random; None: in turns.
        epoch: number of the epoch.
        known: from ``record``, of an earlier run; None: at the beginning.

    Attributes:
        left: number of the part and item of each draw that is in no step yet.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stop: str,
        rng: Any,
        epoch: int,
        known: dict[str, Any] | None,
    ) -> None:
        self._known = known
        known = known or {"parts": [None] * len(parts), "shares": None, "left": []}
        pairs = zip(parts, known["parts"], strict=True)
        self._readings = [Reading(part, epoch, place) for part, place in pairs]
        self._shares = Shares(len(parts), rng, known["shares"])
        self._stop = stop
        self._step = 0
        self._weights: Sequence[float] = ()
        self.left: list[tuple[int, Any]] = [(part, index) for part, index in known["left"]]

    def record(self) -> dict[str, Any] | None:
        """Return what another run goes on from; None: from the beginning."""
        if not self._weights:
            return self._known
        left = [[part, i.item() if hasattr(i, "item") else i] for part, i in self.left]
        return {
            "step": self._step,
            "weights": list(self._weights),
            "shares": self._shares.record(),
            "parts": [reading.record() for reading in self._readings],
            "left": left,  # without numpy, which is not for JSON
        }

    def weigh(self, step: int, weights: Sequence[float]) -> None:
        """Take the weights of a step."""
        self._step = step
        if weights != self._weights:
            self._weights = weights
            self._divide()

    def draw(self) -> tuple[int, Any]:
        """Return the number of a part, and its next item.

        Raises:
            StopIteration: the epoch has ended.
        """
        while self._shares:
            number = self._shares.choose()
            reading = self._readings[number]
            with suppress(StopIteration):
                return number, reading.take()
            if self._stop == "never":
                reading.begin_anew()
                with suppress(StopIteration):
                    return number, reading.take()
                raise ValueError(
                    f"{reading.part.name} has no items, so it cannot be begun anew; give it the "
                    "weight 0, or leave it out"
                )
            reading.ended = True
            self._shares.begin_anew()
            self._divide()
        raise StopIteration

    def _divide(self) -> None:
        """Divide the next draws between the parts that have not ended."""
        ended = [reading.ended for reading in self._readings]
        over = self._stop == "first" and any(ended)
        pairs = zip(self._weights, ended, strict=True)
        self._shares.divide([0.0 if over or out else weight for weight, out in pairs])
