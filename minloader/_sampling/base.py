"""Samplers: what a batch is made of. They run in the parent and yield lists of indices.

The order of an epoch depends on ``seed`` and on the epoch set by ``set_epoch`` alone, which
:class:`minloader.Loader` calls at the start of each epoch. An iterator keeps the epoch it
began with.

With ``world_size`` ranks, each in a process of its own, every rank plans the epoch of all of them
and yields its own part, so that no rank has to hear from another. A *step* is what all ranks take
at once: one batch each, of a like size, so that no rank waits for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minloader._checks import check_int, shown

VERSION = 1

"""Of the states. To raise whenever the same arguments come to another order."""


class Repeatable:
    """An iterable that refuses a second pass where it would be silently empty.

    Args:
        name: of the argument that it was given as.
        iterable: what to go through.
    """

    def __init__(self, name: str, iterable: Iterable[Any]) -> None:
        self._name = name
        self._iterable = iterable
        self._used_up = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._iterable)
        # One that has epochs begins anew with each, though it is its own iterator (lhotse's).
        if iterator is self._iterable and not hasattr(iterator, "set_epoch"):
            if self._used_up:
                raise used_up(self._name, iterator)
            self._used_up = True
        return iterator


def used_up(name: str, iterator: Any) -> RuntimeError:
    """Return the error of an argument that cannot serve a second epoch."""
    return RuntimeError(
        f"{name} is an iterator, {shown(iterator)}, which serves one epoch and has served it; pass "
        "a list, or an object whose __iter__ begins anew"
    )


@dataclass
class Position:
    """Where an iterator stands.

    Attributes:
        epoch: that it goes through.
        yielded: batches so far.
        left: what earlier epochs rolled over into this one; at its end, what this one does.
        ended: whether it has come to its end.
        inner: state that an inner sampler has been restored from, until it is read again.
    """

    epoch: int
    yielded: int = 0
    left: list[Any] = field(default_factory=list)
    ended: bool = False
    inner: Any = None


class Sampler:
    """What the samplers share: a seed, an epoch, a rank, and the place where they stand."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed = check_int("seed", seed, 0)
        self.world_size = check_int("world_size", world_size, 1)
        self.rank = check_int("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, got {self.rank}")
        self.epoch = 0
        self._place: Position | None = None  # of the iterator made last, or loaded
        self._loaded = False  # if loaded: the next iterator continues there
        self._dropped = 0  # in the last epoch that was gone through

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next ``iter`` gives the order of.

        A loaded position is kept if it is in this epoch, and otherwise forgotten.
        """
        self.epoch = check_int("epoch", epoch, 0)
        if self._loaded and self._place is not None and self._place.epoch != self.epoch:
            self._place, self._loaded = None, False

    def state_dict(self, *, begin: bool = False) -> dict[str, Any]:
        """Where the iterator made last stands: a small dict that can be written as JSON.

        Until an iterator is made, that is the start of ``epoch``.

        It says how many batches were yielded, and holds whatever decides the order, so that
        ``load_state_dict`` can refuse what does not fit. It is the same in every rank.

        Args:
            begin: tell where the next iterator will begin instead, if nothing was loaded.
        """
        place = self._new_place() if begin else self._place or self._new_place()
        where = {"epoch": place.epoch, "yielded": place.yielded}
        return {**self._identity(), **where, **self._rest_of_state(place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next ``iter`` continue where another sampler stood; later ones begin anew.

        Args:
            state: from ``state_dict`` of a sampler made with the same arguments, of any rank.

        Raises:
            TypeError, ValueError: that is no state, or of a sampler of another order. This
                sampler is then as it was.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict from state_dict(), got {shown(state)}")
        for name, value in self._identity().items():
            if (other := state_entry(state, name)) != value:
                raise ValueError(
                    f"{name} is {value!r}, but the state is of {name} {other!r}; make the sampler "
                    "with the arguments it had then, or start anew without the state"
                )
        place = self._place_of(state)
        self.epoch, self._place, self._loaded = place.epoch, place, True

    def _identity(self) -> dict[str, Any]:
        """All that decides the order of an epoch, as far as it is known."""
        return {
            "sampler": type(self).__name__,
            "version": VERSION,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    def _rest_of_state(self, place: Position) -> dict[str, Any]:
        return {}

    def _place_of(self, state: dict[str, Any]) -> Position:
        epoch, yielded = (state_entry(state, name) for name in ("epoch", "yielded"))
        return Position(check_int("epoch", epoch, 0), check_int("yielded", yielded, 0))

    def _new_place(self) -> Position:
        return Position(self.epoch)

    def _begin(self) -> Position:
        """The place of an iterator that is being made: the loaded one, or a new one."""
        if not self._loaded or self._place is None:
            self._place = self._new_place()
        self._loaded = False
        return self._place

    def _rng(self, epoch: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))


def state_entry(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise ValueError(f"the state has no {name!r}, so it is not from this kind of sampler")
    return state[name]
