"""Batches of an inner sampler's items: read and planned window by window.

::

    inner sampler --items--> window --plan--> batches of places in the window --> batches of items

Nothing is carried over from one window to the next. So a state is that of the inner sampler where
the window begins, and a run that goes on reads no more than one window again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from minloader._checks import is_stateful, shown
from minloader._sampling.base import Position

Plan = Callable[[int, list[Any], list[Any]], tuple[list[list[int]], int]]


class Windows(Iterator[list[Any]]):
    """The batches of an epoch. It is no generator, so that it goes on after an error.

    Args:
        position: how far it has come. ``inner`` is None in the first window of an epoch, and then
            says where the window begins: how many batches and dropped samples come before it, and
            the state of the inner sampler. Without such a state it stays None.
        inner: the inner sampler.
        items: its iterator.
        length_of: returns the length of an item.
        plan: returns the batches of a window, as lists of places in it, and the number of samples
            that are in no rank's. It gets the number of batches before the window, its items and
            their lengths.
        size: number of items in a window.
        on_end: called with the number of dropped samples, when there are no more items.
    """

    def __init__(
        self,
        position: Position,
        inner: Any,
        items: Iterator[Any],
        length_of: Callable[[Any], Any],
        plan: Plan,
        size: int,
        on_end: Callable[[int], None],
    ) -> None:
        known = position.inner or {"batches": 0, "dropped": 0}
        self._position = position
        self._inner = inner
        self._items = items
        self._length_of = length_of
        self._plan = plan
        self._size = size
        self._on_end = on_end
        self._count: int = known["batches"]
        self._dropped: int = known["dropped"]
        self._window: list[Any] = []
        self._lengths: list[Any] = []  # of the window, until it is planned
        self._batches: Iterator[list[int]] = iter(())

    def __next__(self) -> list[Any]:
        position = self._position
        while True:
            for batch in self._batches:
                self._count += 1
                if self._count > position.yielded:  # by an earlier run, or now
                    position.yielded += 1
                    return [self._window[place] for place in batch]
            self._read()
            batches, dropped = self._plan(self._count, self._window, self._lengths)
            self._dropped += dropped
            self._batches, self._lengths = iter(batches), []

    def _read(self) -> None:
        """Read the next window, or the rest of it where an error has interrupted that.

        Raises:
            StopIteration: there are no more items.
        """
        if self._window and not self._lengths:
            self._window = []
            if is_stateful(self._inner):
                state = copy.deepcopy(self._inner.state_dict())
                known = {"batches": self._count, "dropped": self._dropped, "state": state}
                self._position.inner = known
        for item in islice(self._items, self._size - len(self._window)):
            try:
                length = self._length_of(item)
            except Exception as error:
                error.add_note(f"minloader: when the length of {shown(item)} was looked up")
                raise
            self._window.append(item)
            self._lengths.append(length)
        if not self._window:
            self._on_end(self._dropped)
            raise StopIteration
