"""What is read once in each epoch: a loader's sampler, and what a sampler of ours reads itself.

This is the contract with all of them (its page is docs/contract.md): the number of the epoch is
told by ``set_epoch``, if there is one; a state, if there is one, is put back by
``load_state_dict``; then comes ``iter``; then items are passed over up to where reading goes on.
There is one tolerance: what was put back, and ends before it gave anything, is begun once more.

How far a sampler of ours has read it is a :data:`ReadPosition`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

from minloader._checks import (
    brief_repr,
    check_int,
    has_epochs,
    has_getitem,
    is_array_like,
    is_read_once,
    is_stateful,
    state_of,
)
from minloader._errors import not_the_end
from minloader._sampling.seeding import Piece

logger = logging.getLogger("minloader")

CHUNK = 16_384
"""Indices that are computed, and exist as Python integers, at a time: 0.7 MB, within half a
millisecond. With fewer, numpy's overhead counts; more of them do not fit into the caches."""

ReadPosition = Sequence[Any]
"""``[read, state, is_of_end]``, plain values: how many items of the epoch were asked for, the one
that was not there any more included; the state of what is read, if it has one, or of
:class:`Indices` how many this epoch has; and whether that is from an epoch's end: of this one, or
if nothing was asked for, of the one before."""

BEGINNING: list[Any] = [0, None, False]

pass_numbers = itertools.count()
"""Each pass over a source has its own: a pass reads it for one epoch, from wherever it begins."""


class Resettable:
    """A sampler of ours. Its state is true also before it was read. Others may be in another epoch.

    Attributes:
        _run: the iterator made last; None if a state was loaded since, or there is none.
        _begins_at: where that began, or the state that was loaded.
    """

    _run: Any = None
    _begins_at: Any = None

    def _check(self, state: Any, allowed: Sequence[str]) -> dict[str, Any]:
        """Refuse what is no state of such a sampler."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left."""
        raise NotImplementedError

    def inner_samplers(self) -> list[Any]:
        """Return the samplers that this one reads."""
        raise NotImplementedError


def used_up(name: str, iterator: Any) -> RuntimeError:
    """Return the error for an argument that cannot serve a second epoch."""
    return RuntimeError(
        f"{name} is an iterator, {brief_repr(iterator)}, which serves one epoch and has served it; "
        "pass a list, or an object whose __iter__ begins anew"
    )


class Source:
    """An iterable that is read once in each epoch. Several epochs may read it at the same time.

    Args:
        name: name of the argument that it was given as.
        items: the iterable.

    Attributes:
        last_pass: number of the pass that was begun last; -1: none was.
        has_given: whether any pass was given an item.
    """

    def __init__(self, name: str, items: Any) -> None:
        self.name = name
        self.items: Any = items
        self.last_pass = -1
        self.has_given = False
        # The state that it is in, if that is known, and its last change by then: after another one
        # it is in another state.
        self._known_state: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is put where it goes on. The iterator that has ended, which is there for comparing,
        # may not be pickled: from Python 3.14 on nothing of itertools can be.
        return vars(self) | {"_known_state": (None, None)}

    @property
    def is_ours(self) -> bool:
        """Whether it is a sampler of ours."""
        return isinstance(self.items, Resettable)

    @property
    def has_epochs(self) -> bool:
        """Whether it is told the number of the epoch."""
        return has_epochs(self.items)

    @property
    def is_used_up(self) -> bool:
        """Whether it is an iterator that has served its one epoch."""
        # One with epochs (lhotse's samplers) begins anew with each of them.
        return self.last_pass >= 0 and is_read_once(self.items) and not self.has_epochs

    def set_epoch(self, epoch: int) -> None:
        """Tell it the number of the epoch, if it wants to know."""
        if self.has_epochs:
            self.items.set_epoch(epoch)

    def prepare(self, epoch: int, *, at: int, state: Any) -> bool:
        """Have it go on at a state, or begin an epoch. Return whether it was put back for that.

        Args:
            epoch: number of the epoch.
            at: how many items of the epoch were before the state.
            state: None to begin as it begins an epoch.
        """
        is_put = state is not None and not self._is_at(state)
        self._known_state = (None, None)
        if state is None:
            self.forget()  # the epoch before was left, however far it was read
        if at or not is_put:
            self.set_epoch(epoch)
        if is_put:
            self.put(state)
            if not at:
                self.set_epoch(epoch)
        return is_put

    def forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left, if it is ours."""
        if self.is_ours:
            self.items._forget()

    def begin(self, pass_number: int) -> Iterator[Any]:
        """Return an iterator over it, for the pass of a number.

        Raises:
            RuntimeError: it can be read once, and was.
        """
        items = self.items
        iterator: Iterator[Any] = iter(items)
        if iterator is items and self.is_used_up and self.last_pass != pass_number:
            raise used_up(self.name, items)
        self.last_pass = pass_number
        return iterator

    def end(self, iterator: Any, read: int, state: Any) -> None:
        """Note the state that it has ended with.

        Raises:
            RuntimeError: it gave nothing, but it has given something in an earlier epoch.
        """
        self._known_state = (state, iterator if self.is_ours else None)
        is_own = iterator is self.items and not self.has_epochs
        if not read and self.has_given and is_own:
            raise used_up(self.name, self.items)

    def state(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        """Return its state; None if it has none, or knows that of a later pass only.

        Args:
            iterator: the one over it whose state is asked for.
            pass_number: of the pass that has this iterator; None: whichever is the last. Others'
                samplers know the state of that one only.
        """
        if self.is_ours and hasattr(iterator, "state"):
            return copy.deepcopy(iterator.state())
        if pass_number not in (None, self.last_pass):
            return None
        try:
            return copy.deepcopy(state_of(self.items))
        except StopIteration as error:
            raise not_the_end(error, f"state_dict of the {self.name}") from error

    def state_between(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        """The same between two epochs, where others' samplers may have none."""
        try:
            return self.state(iterator, pass_number)
        except Exception as error:  # many have none before their first item, or behind their last
            if self.is_ours:
                raise
            logger.debug("%s has no state between epochs: %r", brief_repr(self.items), error)
            return None

    def state_before(self) -> Any:
        """Return its state before it was ever read here; None if it has none, or none yet."""
        run = self.items._run if self.is_ours else None
        if run is not None and not run.ended:
            self.forget()  # somebody has looked: the next epoch begins anew all the same
        state = self.state_between()
        if state is not None:
            self.note_is_at(state)
        return state

    def put(self, state: Any) -> None:
        """Put it back to a state.

        Raises:
            ValueError: it has ended before that.
        """
        try:
            self.items.load_state_dict(copy.deepcopy(state))  # some empty what they are given
        except StopIteration as error:
            raise ValueError(
                f"the state does not fit: the {self.name}, {brief_repr(self.items)}, has ended "
                "before it was where the state was taken"
            ) from error

    def note_is_at(self, state: Any) -> None:
        """Note the state that it is in now, so that it need not be put there."""
        self._known_state = (state, self._last_change)

    def _is_at(self, state: Any) -> bool:
        known, last_change = self._known_state
        return known is state and last_change is self._last_change

    @property
    def _last_change(self) -> Any:
        """Of a sampler of ours the iterator made last, or else what was loaded last."""
        if not self.is_ours:
            return None
        return self.items._begins_at if self.items._run is None else self.items._run


def to_json(item: Any) -> Any:
    """Return an item as JSON keeps it: numpy's numbers and tuples it does not.

    A tuple of another kind, as a named one, stays as it is: JSON makes a tuple without names of it.
    """
    if type(item) in (tuple, list, Piece):
        parts = list(map(to_json, item))
        name = "Piece" if isinstance(item, Piece) else "tuple"
        return parts if isinstance(item, list) else {name: parts}
    if isinstance(item, tuple):
        return {"tuple": item}
    if isinstance(item, dict):  # which may look like those that are made here
        return {"item": item}
    return item.item() if hasattr(item, "item") and not getattr(item, "shape", True) else item


def from_json(item: Any) -> Any:
    """Undo :func:`to_json`."""
    if isinstance(item, list):
        return list(map(from_json, item))
    if not isinstance(item, dict):
        return item
    if "tuple" in item:
        parts = item["tuple"]
        return parts if isinstance(parts, tuple) else tuple(map(from_json, parts))
    if "Piece" in item:
        return Piece._make(map(from_json, item["Piece"]))
    return item.get("item", item)


class LookUp(Protocol):
    """A sequence, a mapping, or what else returns something for an item."""

    def __getitem__(self, item: Any, /) -> Any: ...


def look_up(lengths: LookUp | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives the length of an item, or the error of looking it up.

    Raises:
        TypeError: nothing can be looked up there.
    """
    length_of: Any = getattr(lengths, "__getitem__", lengths)
    if not callable(length_of):
        raise TypeError(
            f"lengths must have __getitem__ or be a function of an item, got {brief_repr(lengths)}"
        )

    return partial(_length_or_error, length_of)  # which can be pickled, as a sampler may be


def _length_or_error(length_of: Callable[[Any], Any], item: Any) -> Any:
    try:
        return length_of(item)
    except Exception as error:
        error.add_note(f"minloader: when the length of {brief_repr(item)} was looked up")
        return error


def as_count(name: str, items: Any) -> Any:
    """Return a number of numpy's or torch's, which seems to be an array, as an int.

    All else stays as it is.

    Raises:
        TypeError, ValueError: it is no number of items.
    """
    return check_int(name, items, 0) if getattr(items, "ndim", None) == 0 else items


class Indices:
    """The indices of samples whose number is asked when an epoch begins.

    Args:
        count: returns how many there are now.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def __len__(self) -> int:
        return check_int("n_or_sampler", self._count(), 0)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class ItemSource(Source):
    """A number of indices, a sequence or an iterable, which a sampler of ours reads.

    Args:
        name: name of the argument that it was given as.
        items: what was given.
        order: returns what an epoch of a sequence is shuffled by. None: it comes as it is.

    Attributes:
        values: the items, if any of them can be had without those before it; else None.
        size: how many, if :class:`Indices` were asked; else None.
    """

    size: int | None = None

    def __init__(self, name: str, items: Any, order: Callable[[int], int] | None = None) -> None:
        super().__init__(name, items)
        is_array = is_array_like(items) and isinstance(items, Sized)
        self.values: Any = items if is_array or isinstance(items, Sequence | Indices) else None
        if type(items).__name__ == "Series" and hasattr(items, "iloc"):
            self.values = items.to_numpy()  # pandas' own would be read by their labels
        if not isinstance(items, Iterable):
            if has_getitem(items):
                raise TypeError(
                    f"{name} must have __iter__, or be a number of samples, got "
                    f"{brief_repr(items)}; for its samples, give its len()"
                )
            count = check_int(name, items, 0)
            if count > sys.maxsize:
                raise ValueError(f"{name} must be at most {sys.maxsize}, got {count}")
            self.values = range(count)
        self._order = order

    def __len__(self) -> int:
        return len(self.items if self.values is None else self.values)

    def state(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        return super().state(iterator, pass_number) if self.values is None else self.size

    def of_epoch(self, position: ReadPosition) -> ItemSource:
        """Return what an epoch reads that is at a position: one that keeps its size."""
        if not isinstance(self.items, Indices):
            return self
        size = len(self) if position[1] is None else position[1]
        source = ItemSource(self.name, size, self._order)
        source.size = size
        return source

    def begun(self, position: ReadPosition) -> ReadPosition:
        """Return a position where an epoch begins, or goes on, with the size that it keeps."""
        size = self.of_epoch(position).size
        return position if size is None else [position[0], size, position[2]]

    def beginning(self) -> list[Any]:
        """Return where an epoch begins if none before has left anything for it."""
        if self.last_pass >= 0 or (self.has_epochs and not self.is_ours):
            return BEGINNING
        state = self.state_before()  # nobody can tell it the epoch; and ours may read such a one
        return BEGINNING if state is None else [0, state, True]

    def check(self, position: ReadPosition) -> None:
        """Refuse a position that was loaded and does not fit; a sampler of ours says what differs.

        Raises:
            ValueError: it cannot be put there.
        """
        if not isinstance(position, list | tuple) or len(position) != 3:
            raise ValueError(
                f"what was read of {self.name} must be 3 values, got {brief_repr(position)}"
            )
        read, state, _ = position
        check_int(f"items read of {self.name}", read, 0)
        if state is None:
            return
        if isinstance(self.items, Indices):
            if check_int(self.name, state, 0) > len(self):
                raise ValueError(
                    f"n, the number of samples, is {len(self)}, but the state is of an epoch with "
                    f"n {state}; give the dataset that there was then, or start anew without the "
                    "state"
                )
        elif self.is_ours:
            self.items._check(state, ())
        elif not is_stateful(self.items):
            raise ValueError(
                f"the state holds one of {self.name}, but {brief_repr(self.items)} has no "
                "load_state_dict; make the sampler over one of the same kind"
            )

    def restore(self, position: ReadPosition, epoch: int) -> None:
        """Put a sampler of ours at a position that was checked.

        Args:
            position: where it was read.
            epoch: that it is read for.
        """
        read, state, _ = position
        if self.is_ours and state is not None:
            self.put(state)
            if not read:  # the state may be of the epoch before, and its length another
                self.set_epoch(epoch)
            self.note_is_at(state)
            self.last_pass = next(pass_numbers)  # it is not at its beginning any more

    def values_from(self, epoch: int, at: int) -> Iterator[Any]:
        """Return an iterator over the items of a sequence, from one of them on."""
        n = len(self.values)
        indices: Iterator[int] = iter(range(at, n))
        if self._order is not None:
            from minloader._sampling.permutation import Permutation  # which needs numpy

            order = Permutation(n, self._order(epoch))
            starts = range(at, n, CHUNK)
            indices = chain.from_iterable(order[at : at + CHUNK].tolist() for at in starts)
        is_count = isinstance(self.values, range) and self.values == range(n)
        return indices if is_count else map(self.values.__getitem__, indices)


class Reading:
    """How far an epoch has read a source. It begins when an item is asked for.

    Args:
        source: what is read.
        epoch: its number.
        position: where it begins.

    Attributes:
        read: number of items that were asked for.
        ended: whether there are no more.
    """

    def __init__(self, source: ItemSource, epoch: int, position: ReadPosition) -> None:
        self._source = source
        self._pass_number = next(pass_numbers)
        self._epoch = epoch
        # Until it has given an item: a generator says where it is only from then on.
        self._known_position: ReadPosition | None = position
        self.read: int = position[0]
        self.ended = bool(position[2] and self.read)
        self._num_to_pass = 0  # items of the epoch that come before that position
        self._may_begin_again = False
        self._items: Any = None  # to begin at the next item

    def _begin(self) -> None:
        """Begin with the next item."""
        source = self._source
        if source.values is not None:
            self._items = source.values_from(self._epoch, self.read)
            return
        read, state, is_of_end = self._known_position or BEGINNING
        try:
            is_put = source.prepare(self._epoch, at=0 if is_of_end else read, state=state)
            if state is None and not source.has_epochs and not read:
                state = source.state_before()  # nobody can tell it the epoch again
                self._known_position = [0, state, state is not None]
            self._num_to_pass = read if state is None else 0
            self._may_begin_again = is_put and is_of_end and not source.is_ours
            self._items = source.begin(self._pass_number)
        except Exception:
            self.ended = True  # what cannot be begun is over
            raise

    def take(self, into: list[Any], most: int) -> None:
        """Add the next items to a list, fewer where the epoch ends.

        What an item raises is raised here, once: the items before it are in the list.
        """
        source = self._source
        before = len(into)
        failed = False
        if self.ended:
            return
        if self._items is None:
            self._begin()
        while self._num_to_pass:
            self._num_to_pass -= 1
            with suppress(Exception):  # it was raised when the item was asked for first
                next(self._items)
        try:
            # islice would call iter, with which some samplers begin anew.
            into.extend(map(next, repeat(self._items, most)))
        except BaseException as error:
            failed = isinstance(error, Exception)  # which stands for an item
            if source.values is not None:
                self._items = None
            raise
        finally:
            moved = len(into) - before + failed
            self.read += moved
            if moved:
                self._known_position = None
                self._may_begin_again = False
                source.has_given = True
        if moved == most:
            return
        if self._may_begin_again:
            self._may_begin_again = False
            self._items = iter(source.items)
            self.take(into, most)
            return
        self._end()

    def _end(self) -> None:
        """Note the state that the source has ended with."""
        source = self._source
        read = self.read
        state = source.state_between(self._items, self._pass_number)
        self.ended = True
        self.read += 1
        self._known_position = [self.read, state, True]
        source.end(self._items, read, state)

    def position(self) -> ReadPosition:
        """Return where this is."""
        if self._known_position is not None:
            return self._known_position
        return [self.read, self._source.state(self._items, self._pass_number), False]

    def following(self) -> ReadPosition:
        """Return where another epoch begins, after this one has ended."""
        _, state, is_of_end = self.position()
        has_state = state is not None and self._source.size is None
        return [0, state, True] if is_of_end and has_state else BEGINNING
