"""What a loader must give: a list of epochs, each a list of batches with their draws."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Chain = tuple[int, ...]
"""Epochs that came to their end before an epoch, without another that was left."""

Plan = Callable[[int, int, Chain], list[tuple[Any, str]]]
"""Gives the items of an epoch, by its number, by how many passes there were before, and by its
chain, each with what becomes of its batch: "given", "replaced", "fails" or "left out"."""


@dataclass
class Place:
    """Where a consumer is: what of an epoch is still to come, by ordinal."""

    epoch: int
    passes: int
    rest: dict[int, tuple[Any, str]]
    chain: Chain
    over: bool = False  # the consumer was told so
    begun: bool = False  # whether any of it was given or left out
    order: int = 0  # which of the orders that an unknown one has been

    @property
    def coming(self) -> list[int]:
        return [ordinal for ordinal, (_, fate) in self.rest.items() if fate != "left out"]


@dataclass
class Run:
    """An iteration: the epoch that it is in, and how many follow."""

    place: Place
    more: int = 0


@dataclass
class Model:
    plan: Plan
    ordered: bool  # whether batches come in the order of their ordinals
    one_order: bool = False  # whether an epoch has an unknown one, but the same whenever it comes
    epoch: int = 0  # number of the next epoch
    passes: int = 0
    latest: Place | None = None  # of the iteration that was begun last
    loaded: Place | None = None  # where the next one begins
    chain: Chain = ()  # of the next epoch, before the first
    draws: dict[Any, Any] = field(default_factory=dict)  # those seen: they never change
    orders: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    order: int = 0

    def begin(self, epochs: int = 1) -> Run:
        return Run(self.enter(), epochs - 1)

    def enter(self) -> Place:
        self.latest, self.loaded = self.loaded or self.beginning(), None
        self.epoch = self.latest.epoch + 1
        return self.latest

    def beginning(self) -> Place:
        chain = self.chain
        if self.latest is not None:
            chain = (*self.latest.chain, self.latest.epoch) if self.latest.over else ()
        plan = self.plan(self.epoch, self.passes, chain)
        return Place(self.epoch, self.passes, dict(enumerate(plan)), chain, order=self.order)

    def advance(self, run: Run) -> None:
        while not run.place.coming and run.more:
            self.end(run.place)
            run.place, run.more = self.enter(), run.more - 1

    def give(self, run: Run, epoch: int | None, item: Any, fate: str, draw: Any) -> None:
        self.advance(run)
        place = run.place
        assert epoch in (None, place.epoch), f"epoch {epoch}, not {place.epoch}"
        fits = [k for k in place.coming[: 1 if self.ordered else None] if place.rest[k][0] == item]
        assert fits, f"{fate} {item}, but {[place.rest[k] for k in place.coming[:5]]} are to come"
        assert fate == place.rest[fits[0]][1], f"{item}: {fate}, not {place.rest[fits[0]][1]}"
        if self.one_order:
            of_order = place.epoch, len(place.rest), ("order", place.order)
            known = self.draws.setdefault(of_order, item)
            assert known == item, f"{item} is where {known} was"
        place.begun = True
        for ordinal in [k for k in place.rest if k <= fits[0]] if self.ordered else fits[:1]:
            del place.rest[ordinal]
        # Of what stands for a bad sample nobody sees which batch it was of: that follows from the
        # epochs before, where batches go over from one to the next.
        before = place.chain if item == "mended" else ()
        known = self.draws.setdefault((place.epoch, before, fits[0], item), draw)
        assert known == draw, f"{item} has drawn {draw}, but before {known}"

    def stop(self, run: Run) -> None:
        self.advance(run)  # past epochs that have nothing
        assert not run.place.coming, f"the end, but {run.place.rest} are to come"
        self.end(run.place)

    def end(self, place: Place) -> None:
        if not place.over:
            place.over, self.passes = True, place.passes + 1

    def state(self) -> Place:
        here = self.latest if self.latest and not self.latest.over else None
        return copy.deepcopy(self.loaded or here or self.beginning())

    def load(self, place: Place) -> None:
        self.loaded, self.latest = copy.deepcopy(place), None
        self.chain = () if place.begun else place.chain
        self.epoch, self.passes = place.epoch, place.passes
        self.order = next(self.orders)  # an unknown one must come again where it was seen, only
        if not place.begun:
            self.loaded.order = self.order

    def skip(self, n: int, *, live: bool) -> None:
        """Leave out the next batches: of the iteration begun last, if it lives, or of the next."""
        place = self.loaded
        if place is None and live and self.latest and not self.latest.over:
            place = self.latest
        if place is None:
            place = self.loaded = self.beginning()
        if place is self.latest:  # to leave batches out ahead of an epoch begins none
            place.begun |= n > 0
        for ordinal in list(place.rest)[:n]:
            del place.rest[ordinal]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self.loaded and self.loaded.epoch != epoch:
            self.loaded = None
            if self.latest and not self.latest.over:  # nor is it where an epoch was left
                self.latest = None
