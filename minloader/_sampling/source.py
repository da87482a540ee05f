"""What a sampler of ours reads, and how far: a :data:`ReadPosition`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain
from typing import Any

from minloader._arguments import checked_int
from minloader._formats import brief_repr
from minloader._protocols import has_getitem, is_array_like, is_stateful
from minloader._sampling.reader import Reader, Source, SourceState, pass_numbers
from minloader._sampling.seeding import Piece

BLOCK = 16_384
"""Indices that are computed, and exist as Python integers, at a time: 0.7 MB, within half a
millisecond. With fewer, numpy's overhead counts; more of them do not fit into the caches."""

ReadPosition = Sequence[Any]
"""``[read, state, is_of_end]``, plain values: how many items of the epoch were asked for, the one
that was not there any more included; the state of what is read, if it has one, or of
:class:`Indices` how many this epoch has; and whether that is from an epoch's end: of this one, or
if nothing was asked for, of the one before."""

BEGINNING: list[Any] = [0, None, False]


def encoded(item: Any) -> Any:
    """Return an item as JSON keeps it: numpy's numbers and tuples it does not.

    A tuple of another kind, as a named one, stays as it is: JSON makes a tuple without names of it.
    """
    if type(item) in (tuple, list, Piece):
        parts = list(map(encoded, item))
        name = "Piece" if isinstance(item, Piece) else "tuple"
        return parts if isinstance(item, list) else {name: parts}
    if isinstance(item, tuple):
        return {"tuple": item}
    if isinstance(item, dict):  # which may look like those that are made here
        return {"item": item}
    return item.item() if hasattr(item, "item") and not getattr(item, "shape", True) else item


def decoded(item: Any) -> Any:
    """Undo :func:`encoded`."""
    if isinstance(item, list):
        return list(map(decoded, item))
    if not isinstance(item, dict):
        return item
    if "tuple" in item:
        parts = item["tuple"]
        return parts if isinstance(parts, tuple) else tuple(map(decoded, parts))
    if "Piece" in item:
        return Piece._make(map(decoded, item["Piece"]))
    return item.get("item", item)


def as_count(name: str, items: Any) -> Any:
    """Return a number of numpy's or torch's, which seems to be an array, as an int.

    All else stays as it is.

    Raises:
        TypeError, ValueError: it is no number of items.
    """
    return checked_int(name, items, 0) if getattr(items, "ndim", None) == 0 else items


class Indices:
    """The indices of samples whose number is asked when an epoch begins.

    Args:
        count: returns how many there are now.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def __len__(self) -> int:
        return checked_int("n_or_sampler", self._count(), 0)

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
            self.values = range(checked_int(name, items, 0, sys.maxsize))
        self._order = order

    def __len__(self) -> int:
        return len(self.items if self.values is None else self.values)

    def state(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        return super().state(iterator, pass_number) if self.values is None else self.size

    def samplers(self) -> list[Any]:
        """Return the sampler that is read, in a list, if it is one."""
        return [self.items] if self.values is None else []

    def reader(self, epoch: int, position: ReadPosition) -> ItemReader:
        """Return what reads the items of an epoch from a position on."""
        if not isinstance(self.items, Indices):
            return ItemReader(self, epoch, position)
        read, known, is_of_end = position
        size = len(self) if known is None else known  # an epoch keeps the number it began with
        source = ItemSource(self.name, size, self._order)
        source.size = size
        return ItemReader(source, epoch, [read, size, is_of_end])

    def beginning(self) -> list[Any]:
        """Return where an epoch begins if none before has left anything for it."""
        if self.last_pass >= 0 or (self.has_epochs and not self.is_ours):
            return BEGINNING
        state = self.state_before()  # nobody can tell it the epoch; and ours may read such a one
        return BEGINNING if state is None else [0, state, True]

    def check(self, position: ReadPosition, epoch: int = 0) -> None:
        """Refuse a position that was loaded and does not fit; a sampler of ours says what differs.

        Args:
            position: where it was read.
            epoch: that it was read for, by which a mixture weighs its parts.

        Raises:
            ValueError: it cannot be put there.
        """
        if not isinstance(position, list | tuple) or len(position) != 3:
            raise ValueError(
                f"what was read of {self.name} must be 3 values, got {brief_repr(position)}"
            )
        read, state, _ = position
        checked_int(f"items read of {self.name}", read, 0, sys.maxsize)
        if state is None:
            return
        if isinstance(self.items, Indices):
            from minloader._diagnosis.mistakes import check_size

            check_size(checked_int(self.name, state, 0), len(self))
        elif self.is_ours:
            self.items._checked(state, ())
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
            starts = range(at, n, BLOCK)
            indices = chain.from_iterable(order[at : at + BLOCK].tolist() for at in starts)
        is_count = isinstance(self.values, range) and self.values == range(n)
        return indices if is_count else map(self.values.__getitem__, indices)


class ItemReader(Reader):
    """Reads a source for an epoch of a sampler of ours. It begins when an item is asked for.

    Args:
        source: what is read.
        epoch: its number.
        position: where it begins.
    """

    def __init__(self, source: ItemSource, epoch: int, position: ReadPosition) -> None:
        read, state, is_of_end = position
        at = 0 if is_of_end or state is None else read
        super().__init__(source, epoch, SourceState(at, state), first=read)
        # Until it has given an item: a generator says where it is only from then on.
        self._known_position: ReadPosition | None = position
        self.is_ended = bool(is_of_end and read)

    def _begin(self) -> None:
        if self.source.values is None:
            super()._begin()
            return
        self.iterator = self.source.values_from(self.epoch, self.next)
        self._here = self.next
        self._drawn = []

    def prepare(self) -> None:
        super().prepare()
        source = self.source
        if self.known.state is None and not source.has_epochs and not self.next:
            state = source.state_before()  # nobody can tell it the epoch again
            self.known = SourceState(0, state)
            self._known_position = [0, state, state is not None]

    def num_unread(self) -> int:
        """Return how many items are to be read.

        Raises:
            TypeError: that is not known.
        """
        return max(0, len(self.source) - self.next)

    def add_to(self, into: list[Any], most: int) -> None:
        """Add the next items to a list, fewer where the epoch ends.

        What an item raises is raised here, once: the items before it are in the list.
        """
        most += len(into)
        before = self.next
        try:
            while len(into) < most and (items := self.take(most - len(into))):
                into += items
        finally:
            if self.next > before and not self.is_ended:
                self._known_position = None

    def _end(self, stop: int, read: int) -> None:
        if stop < self.next:
            raise ValueError(
                f"the state does not fit: it is behind {self.next} items of the "
                f"{self.source.name}, which has ended after {stop}"
            )
        try:
            super()._end(stop, read)
        finally:
            self._known_position = [stop + 1, self.end_state, True]

    def position(self) -> ReadPosition:
        """Return where this is."""
        if self._known_position is not None:
            return self._known_position
        return [self.next, self.source.state(self.iterator, self.pass_number), False]

    def following(self) -> ReadPosition:
        """Return where another epoch begins, after this one has ended."""
        _, state, is_of_end = self.position()
        has_state = state is not None and self.source.size is None
        return [0, state, True] if is_of_end and has_state else BEGINNING
