"""What samplers share: an order that can be repeated, ranks, and a state.

Samplers decide what a batch is. They run in the parent and yield lists of indices.

The order of an epoch depends only on ``seed`` and on the epoch set by ``set_epoch``, which
:class:`minloader.Loader` calls at the start of each epoch. An iterator keeps the epoch it
began with.

With ``world_size`` ranks, each in a process of its own, every rank plans the epoch of all of them
and yields its own share, so that ranks need not communicate. A *step* is one batch for each rank,
of a like size, so that no rank waits for another. All ranks have been given equally many batches,
so each knows what all were given. A state that is loaded with another world size begins another
*part* of the epoch: what the former parts have left is dealt out to the ranks there are now.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minloader._checks import check_int, is_stateful, shown
from minloader._sampling.seeding import derive

if TYPE_CHECKING:
    import numpy as np

VERSION = 2
"""Version of the states. To be raised whenever the same arguments lead to another order, or a
state gets another entry. States of all versions are read."""


def used_up(name: str, iterator: Any) -> RuntimeError:
    """Return the error for an argument that cannot serve a second epoch."""
    return RuntimeError(
        f"{name} is an iterator, {shown(iterator)}, which serves one epoch and has served it; pass "
        "a list, or an object whose __iter__ begins anew"
    )


def with_inner(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and the samplers that it reads, as far as it shows them."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is each for each in seen):
        seen.append(sampler)
        yield sampler
        # As torch, Accelerate and minloader name it.
        inner = getattr(sampler, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None) if inner is None else inner
        sampler = getattr(sampler, "_inner", None) if inner is None else inner


def ranks_of(sampler: Any) -> dict[str, Any] | None:
    """Return what tells samplers apart that deal an epoch out to ranks; None of any other."""
    for each in with_inner(sampler):
        # As torch, Accelerate and minloader name it.
        for name in ("num_replicas", "num_processes", "world_size"):
            ranks = getattr(each, name, None)
            if isinstance(ranks, int) and ranks > 1:
                return {"ranks": ranks, "seed": getattr(each, "seed", None)}
    return None


def rank_of(sampler: Any) -> int:
    """Return the rank that a sampler deals an epoch out to; 0 if it deals to none."""
    for each in with_inner(sampler):
        for ranks, rank in (
            ("num_replicas", "rank"),
            ("num_processes", "process_index"),
            ("world_size", "rank"),
        ):
            count, found = getattr(each, ranks, None), getattr(each, rank, None)
            if isinstance(count, int) and isinstance(found, int) and count > 1:
                return found
    return 0


def check_has_state(name: str, sampler: Any) -> None:
    """Refuse a sampler that has no state, where a state was saved."""
    if not is_stateful(sampler):
        raise ValueError(
            f"the state holds one of {name}, but {shown(sampler)} has no load_state_dict; make the "
            "sampler over one of the same kind"
        )


class Repeatable:
    """An iterable that refuses a second epoch if it would be silently empty.

    Args:
        name: name of the argument that the iterable was given as.
        iterable: what to iterate over.
    """

    def __init__(self, name: str, iterable: Iterable[Any]) -> None:
        self._name = name
        self._iterable = iterable
        self._used_up = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._iterable)
        # An iterator with epochs (lhotse's samplers) begins anew with each of them.
        if iterator is self._iterable and not hasattr(iterator, "set_epoch"):
            if self._used_up:
                raise used_up(self._name, iterator)
            self._used_up = True
        return iterator


@dataclass
class Position:
    """How far an iterator has come.

    Attributes:
        epoch: number of its epoch.
        yielded: number of batches of the epoch that its rank was given.
        dealt: how the epoch was dealt out before the world size changed, the earliest part first:
            for each part what was other then, and the number of batches until its end.
        left: indices that earlier epochs have left for this one. When it has ended: those that
            this epoch leaves for the next. Of a mixture: what was drawn for a batch that an error
            has interrupted.
        ended: whether it has ended.
        inner: where inner samplers stand: the state that they were restored from, until they are
            iterated.
        order: how indices are shuffled, if they are: "computed", or "stored" as in version 1.
    """

    epoch: int
    yielded: int = 0
    dealt: list[list[Any]] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    ended: bool = False
    inner: Any = None
    order: str = "computed"


class Sampler:
    """The seed, epoch, rank and state of a sampler."""

    # Attributes of Position that a state has, and those that states of version 1 lack.
    _recorded: tuple[str, ...] = ("epoch", "yielded", "dealt")
    _added: Mapping[str, Any] = {"dealt": []}
    # What a part of an epoch is dealt out by: with another world size these may be others.
    _dealt_by: tuple[str, ...] = ()
    _inner: Any = None  # what this one reads its items from

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed = check_int("seed", seed, 0)
        self.world_size = check_int("world_size", world_size, 1)
        self.rank = check_int("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, got {self.rank}")
        self.epoch = 0
        self._position: Position | None = None  # of the iterator made last, or loaded
        self._loaded = False  # whether the next iterator continues at that position
        self._dropped = 0  # samples of the last epoch that was iterated to its end
        self._left: list[Any] = []  # indices that it has left for the next
        self._order_kind = "computed"  # of the run that this sampler goes on with

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator goes through, also in an inner sampler.

        A loaded position is kept if it is in this epoch, and forgotten otherwise.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            TypeError, ValueError: ``epoch`` is not an int, or below 0.
        """
        self.epoch = check_int("epoch", epoch, 0)
        if self._loaded and self._position is not None and self._position.epoch != self.epoch:
            self._position, self._loaded = None, False
        # Not where a position was loaded: an inner sampler that was put back might begin anew.
        if not self._loaded and hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def state_dict(self, *, begin: bool = False) -> dict[str, Any]:
        """Return the position of the iterator made last, as a small dict that is fit for JSON.

        Until an iterator is made, that is the beginning of ``epoch``.

        The dict has the number of batches yielded, and all that decides the order, so that
        ``load_state_dict`` can refuse a state that does not fit. Every rank has the same one.

        Args:
            begin: whether to return where the next iterator will begin, if nothing was loaded.
        """
        position = self._beginning() if begin else self._position or self._beginning()
        values = vars(self._record(position))
        return self._identity() | {name: values[name] for name in self._recorded}

    def load_state_dict(self, state: dict[str, Any], *, delivered: int = 0) -> None:
        """Make the next iterator continue from a state. Later ones begin anew.

        With another ``world_size``, what no rank was given is dealt out anew.

        Args:
            state: from ``state_dict`` of a sampler made with the same arguments, of any rank.
            delivered: number of batches of the epoch that each rank was given, if it is more than
                the state says. It counts where the world size is another.

        Raises:
            TypeError, ValueError: that is no state, or that of a sampler with another order. This
                sampler then stays as it was.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict from state_dict(), got {shown(state)}")
        if state.get("version") == 1:
            state = {**self._added, **state, "version": VERSION}
        identity = self._identity()
        former: dict[str, Any] = {}
        if state.get("world_size", self.world_size) != self.world_size:
            former = {name: state.get(name) for name in self._dealt_by}
        for name in (*identity, *self._recorded):
            if name not in state:
                raise ValueError(
                    f"the state has no {name!r}, so it is not from this kind of sampler"
                )
            may_differ = name in former and type(state[name]) is type(identity.get(name))
            if name in identity and state[name] != identity[name] and not may_differ:
                raise ValueError(
                    f"{name} is {identity[name]!r}, but the state is of {name} {state[name]!r}; "
                    "make the sampler with the arguments it had then, or start anew without the "
                    "state"
                )
        for name in ("epoch", "yielded"):
            check_int(name, state[name], 0)
        position = Position(**{name: state[name] for name in self._recorded})
        parts, width = position.dealt, len(self._dealt_by) + 1
        if not isinstance(parts, list) or any(len(part) != width for part in parts):
            raise ValueError(f"dealt must be a list of lists of {width}, got {shown(parts)}")
        if former:
            self._check_former(**former)
            delivered = max(delivered, position.yielded)
            if delivered > (parts[-1][-1] if parts else 0):
                position.dealt = [*parts, [*former.values(), delivered]]
        self._accept(position)
        self.epoch, self._position, self._loaded = position.epoch, position, True

    def _identity(self) -> dict[str, Any]:
        """Return all that decides the order of an epoch, as far as it is known."""
        return {
            "sampler": type(self).__name__,
            "version": VERSION,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    def _check_former(self, **former: Any) -> None:
        """Raise an error if an epoch cannot go on that was dealt out by these arguments."""
        for name, value in former.items():
            if isinstance(value, int):
                check_int(name, value, 1)

    @property
    def _dealt(self) -> list[list[Any]]:
        """The former parts of the epoch that this sampler is in."""
        position = self._position
        return position.dealt if position is not None and position.epoch == self.epoch else []

    def _record(self, position: Position) -> Position:
        """Return a position as a state shall have it."""
        return position

    def _accept(self, position: Position) -> None:
        """Prepare to continue from a loaded position, or raise an error and change nothing."""

    def _restore_inner(self, epoch: int, state: Any) -> None:
        """Put the inner sampler back, or have it begin an epoch if there is no state of it."""
        if state is not None:
            check_has_state("the inner sampler", self._inner)
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)
        if state is not None:
            self._inner.load_state_dict(copy.deepcopy(state))  # some empty what they are given

    def _beginning(self) -> Position:
        return Position(self.epoch, left=self._left, order=self._order_kind)

    def _begin(self) -> Position:
        """Return the position of an iterator that is being made: the loaded one, or a new one."""
        if not self._loaded or self._position is None:
            self._position = self._beginning()
        self._loaded = False
        return self._position

    def _entropy(self, *case: int) -> int:
        """Return what an epoch, or a part of it, is shuffled from: the numbers say which."""
        return derive("order", type(self).__name__, self.seed, *case)

    def _rng(self, *case: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng(self._entropy(*case))
