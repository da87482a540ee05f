"""What a sampler reads its items from, and how far it has read.

A *place* in it is a list of plain values, ``[read, state, over]``: how many items of the epoch were
asked for, the one that was not there any more included; the state of what is read, if it has one;
and whether that is from an epoch's end: of this one, or if nothing was asked for, of the one
before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any, Protocol

from minloader._checks import check_int, is_stateful, shown
from minloader._sampling.seeding import Piece

CHUNK = 16_384
"""Indices that are computed, and exist as Python integers, at a time: 0.7 MB, within half a
millisecond. With fewer, numpy's overhead counts; more of them do not fit into the caches."""

BEGINNING: list[Any] = [0, None, False]


def used_up(name: str, iterator: Any) -> RuntimeError:
    """Return the error for an argument that cannot serve a second epoch."""
    return RuntimeError(
        f"{name} is an iterator, {shown(iterator)}, which serves one epoch and has served it; pass "
        "a list, or an object whose __iter__ begins anew"
    )


class Repeatable:
    """An iterable that is told its epochs, and refuses one that would be silently empty.

    Args:
        name: name of the argument that it was given as.
        items: the iterable.
    """

    def __init__(self, name: str, items: Any) -> None:
        self.name = name
        self.items: Any = items
        self.is_used_up = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the iterable the number of the epoch, if it wants to know."""
        if hasattr(self.items, "set_epoch"):
            self.items.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.items)
        # An iterator with epochs (lhotse's samplers) begins anew with each of them.
        if iterator is self.items and not hasattr(iterator, "set_epoch"):
            if self.is_used_up:
                raise used_up(self.name, iterator)
            self.is_used_up = True
        return iterator

    def state(self, iterator: Any = None) -> Any:
        """Return the state of the iterable, if it has one.

        Args:
            iterator: the one over it whose place is asked for. Others' samplers know that of the
                iterator made last only.
        """
        if not is_stateful(self.items):
            return None
        is_run = hasattr(self.items, "_forget") and hasattr(iterator, "state")  # of ours
        try:
            return copy.deepcopy(iterator.state() if is_run else self.items.state_dict())
        except NotImplementedError:  # inherited, but not meant
            return None

    def put(self, state: Any) -> None:
        """Put the iterable to a state.

        Raises:
            ValueError: it has ended before that.
        """
        try:
            self.items.load_state_dict(copy.deepcopy(state))  # some empty what they are given
        except StopIteration as error:
            raise ValueError(
                f"the state does not fit: the {self.name}, {shown(self.items)}, has ended before "
                "it was where the state was taken"
            ) from error


def plain(item: Any) -> Any:
    """Return an item as JSON keeps it: numpy's numbers and tuples it does not.

    A tuple of another kind, as a named one, stays as it is: JSON makes a tuple without names of it.
    """
    if type(item) in (tuple, list, Piece):
        parts = list(map(plain, item))
        name = "Piece" if isinstance(item, Piece) else "tuple"
        return parts if isinstance(item, list) else {name: parts}
    if isinstance(item, tuple):
        return {"tuple": item}
    return item.item() if hasattr(item, "item") and not getattr(item, "shape", True) else item


def unplain(item: Any) -> Any:
    """Undo :func:`plain`."""
    if isinstance(item, list):
        return list(map(unplain, item))
    for name, kind in ("tuple", tuple), ("Piece", Piece._make):
        if isinstance(item, dict) and item.keys() == {name}:
            parts = item[name]
            return parts if isinstance(parts, tuple) else kind(map(unplain, parts))
    return item


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
            f"lengths must have __getitem__ or be a function of an item, got {shown(lengths)}"
        )

    def noted(item: Any) -> Any:
        try:
            return length_of(item)
        except Exception as error:
            error.add_note(f"minloader: when the length of {shown(item)} was looked up")
            return error

    return noted


class Source(Repeatable):
    """A number of indices, a sequence or an iterable, which is read once in each epoch.

    Args:
        name: name of the argument that it was given as.
        items: what was given.
        order: returns what an epoch of a sequence is shuffled by. None: it comes as it is.

    Attributes:
        values: the items, if any of them can be had without those before it; else None.
    """

    def __init__(self, name: str, items: Any, order: Callable[[int], int] | None = None) -> None:
        super().__init__(name, items)
        is_array = hasattr(items, "__array__") and hasattr(items, "__len__")
        self.values: Any = items if is_array or isinstance(items, Sequence) else None
        if not hasattr(items, "__iter__"):
            self.values = range(check_int(name, items, 0))
        self._order = order
        self.stands: Any = None  # the state that it was put to, or has ended with
        self.was_put = False  # by a state, and not read since; others than ours
        self._is_fresh = True  # neither put nor read so far

    def __len__(self) -> int:
        return len(self.items if self.values is None else self.values)

    def state(self, iterator: Any = None) -> Any:
        return super().state(iterator) if self.values is None else None

    def beginning(self) -> list[Any]:
        """Return where an epoch begins if none before has left anything for it."""
        is_ours = hasattr(self.items, "_beginning")  # and may read one that cannot be told
        if not self._is_fresh or (hasattr(self.items, "set_epoch") and not is_ours):
            return BEGINNING
        self.stands = self.state()  # nobody can tell it the epoch again
        return BEGINNING if self.stands is None else [0, self.stands, True]

    def forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left."""
        self.stands = None
        if hasattr(self.items, "_forget"):
            self.items._forget()

    def restore(self, epoch: int, place: Sequence[Any]) -> None:
        """Put the iterable to a place.

        Raises:
            ValueError: it cannot be put there.
        """
        read, state, _ = place
        check_int(f"items read of {self.name}", read, 0)
        if state is None or state is self.stands:
            return
        if not is_stateful(self.items):
            raise ValueError(
                f"the state holds one of {self.name}, but {shown(self.items)} has no "
                "load_state_dict; make the sampler over one of the same kind"
            )
        self.set_epoch(epoch)
        self.put(state)
        self.stands, self._is_fresh = state, False
        self.was_put = not hasattr(self.items, "_forget")  # ours need not be begun to begin anew

    def prepare(self, epoch: int, place: Sequence[Any]) -> Sequence[Any]:
        """Put the iterable to where an epoch goes on; return that place, with its state."""
        self.restore(epoch, place)
        if place[1] is None or place[2]:
            self.set_epoch(epoch)
        if list(place) == BEGINNING:
            self.forget()  # ours would begin with what they still have, which no state tells of
            if self.was_put and iter(self.items) is not self.items:
                with suppress(Exception):  # it comes again, in its turn
                    next(iter(self.items), None)  # else it would go on where it was put
            if not hasattr(self.items, "set_epoch") and (state := self.state()) is not None:
                place = [0, state, True]  # nobody can tell it the epoch again
        self.stands, self._is_fresh = None, False
        return place

    def begin(self, epoch: int, at: int) -> Iterator[Any]:
        """Return an iterator over the items of a sequence, from one of them on."""
        n = len(self.values)
        places: Iterator[int] = iter(range(at, n))
        if self._order is not None:
            from minloader._sampling.permutation import Permutation  # which needs numpy

            order = Permutation(n, self._order(epoch))
            starts = range(at, n, CHUNK)
            places = chain.from_iterable(order[at : at + CHUNK].tolist() for at in starts)
        is_count = isinstance(self.values, range) and self.values == range(n)
        return places if is_count else map(self.values.__getitem__, places)


class Reading:
    """How far an epoch has read a source. It begins when an item is asked for.

    Args:
        source: what is read.
        epoch: its number.
        place: where it begins.

    Attributes:
        read: number of items that were asked for.
        ended: whether there are no more.
    """

    def __init__(self, source: Source, epoch: int, place: Sequence[Any]) -> None:
        self._source, self._epoch = source, epoch
        # Until it has given an item: a generator tells the truth about its place from then on.
        self._known: Sequence[Any] | None = place
        self.read: int = place[0]
        self.ended = bool(place[2] and self.read)
        self._pass_by = 0
        self._items: Any = None  # to begin at the next item

    def _begin(self) -> None:
        """Begin with the next item."""
        source = self._source
        if source.values is not None:
            self._items = source.begin(self._epoch, self.read)
            return
        try:
            self._known = source.prepare(self._epoch, self._known or BEGINNING)
            self._pass_by = self.read if self._known[1] is None else 0
            self._items = iter(source)
        except Exception:
            self.ended = True  # what cannot be begun is over
            raise

    def take(self, into: list[Any], most: int) -> None:
        """Add the next items to a list, fewer where the epoch ends.

        What an item raises is raised here, once: the items before it are in the list.
        """
        source, before, failed = self._source, len(into), False
        if self.ended:
            return
        if self._items is None:
            self._begin()
        while self._pass_by:
            self._pass_by -= 1
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
                self._known, source.was_put = None, False
        if moved == most:
            return
        if source.was_put and self._known and self._known[2]:
            # Some say once more that the epoch is over whose state they were put to.
            source.was_put, self._items = False, iter(source)
            self.take(into, most)
            return
        self.ended, self.read = True, self.read + 1
        source.stands = source.state(self._items)
        self._known = [self.read, source.stands, True]

    def place(self) -> Sequence[Any]:
        """Return where this stands."""
        return self._known or [self.read, self._source.state(self._items), False]

    def over(self) -> Sequence[Any]:
        """Return where another epoch begins, after this one has ended."""
        _, state, over = self.place()
        return [0, state, True] if over and state is not None else BEGINNING
