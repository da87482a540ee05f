"""Batches of an inner sampler's items: read and planned window by window.

::

    inner sampler --items--> window --plan--> batches of items

Nothing is carried over from one window to the next. So a state is that of the inner sampler where
the window begins, and a run that goes on reads no more than one window again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from minloader._checks import check_iterable, is_stateful, shown
from minloader._sampling.base import Position, Repeatable, Sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = object()
Plan = Callable[[int, list[Any], list[Any]], tuple[list[list[Any]], int]]


class LookUp(Protocol):
    """A sequence, a mapping, or what else returns something for an item."""

    def __getitem__(self, item: Any, /) -> Any: ...


class WindowSampler(Sampler):
    """A sampler that plans by lengths, and may plan the items of an inner sampler by theirs."""

    _digest: str | None = None  # of the lengths
    _lazy: Repeatable
    _length_of: Any

    def _read_items(self, sampler: Iterable[Any], lengths: Any) -> None:
        """Have this sampler read another, whose items have their lengths looked up.

        Raises:
            TypeError: the sampler is not iterable, or lengths cannot be looked up.
        """
        check_iterable("sampler", sampler)
        self._inner = sampler
        self._lazy = Repeatable("sampler", sampler)
        self._length_of = getattr(lengths, "__getitem__", lengths)
        if not callable(self._length_of):
            raise TypeError(
                "lengths must have __getitem__ or be a function of an item, where there is a "
                f"sampler, got {shown(lengths)}"
            )
        self._digest = "of a sampler"
        self._recorded += ("inner",)
        self._dealt_by = ()  # where an epoch was dealt out otherwise is not worked out by windows

    def _by_window(self, position: Position, size: int) -> Windows:
        """Return the batches of an epoch of the inner sampler."""
        items = self._inner, iter(self._lazy), self._length_of
        plan = partial(self._plan_window, position.epoch)
        return Windows(position, *items, plan, size, partial(setattr, self, "_dropped"))

    def _plan_window(
        self, epoch: int, before: int, items: list[Any], lengths: list[Any]
    ) -> tuple[list[list[Any]], int]:
        """Plan a window of the inner sampler's items, as if it were an epoch.

        Args:
            epoch: number of the epoch.
            before: number of batches of the epoch before this window.
            items: the items of the window.
            lengths: their lengths.

        Returns:
            The batches of this rank, and the number of samples that no rank gets.
        """
        raise NotImplementedError

    def _fingerprint(self, lengths: NDArray[Any] | None, dtype: str) -> str | None:
        """Return what tells these lengths from others; None if they are not known beforehand."""
        if self._digest is None and lengths is not None:
            from hashlib import blake2b

            self._digest = blake2b(lengths.astype(dtype).tobytes(), digest_size=16).hexdigest()
        return self._digest

    def _accept(self, position: Position) -> None:
        known = position.inner
        self._restore_inner(position.epoch, known and known["state"])


class Windows(Iterator[list[Any]]):
    """The batches of an epoch. It is no generator, so that it goes on after an error.

    Args:
        position: how far it has come. ``inner`` is None in the first window of an epoch, and then
            says where the window begins: how many batches and dropped samples come before it, and
            the state of the inner sampler. Without such a state it stays None.
        inner: the inner sampler.
        items: its iterator.
        length_of: returns the length of an item.
        plan: returns the batches of a window, and the number of samples that are in no rank's. It
            gets the number of batches before the window, its items and their lengths.
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
        self._batches: Iterator[list[Any]] = iter(())

    def __next__(self) -> list[Any]:
        position = self._position
        while True:
            for batch in self._batches:
                self._count += 1
                if self._count > position.yielded:  # by an earlier run, or now
                    position.yielded += 1
                    return batch
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
        while len(self._window) < self._size:
            # Not by iter(), with which some iterators begin anew.
            if (item := next(self._items, END)) is END:
                break
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
