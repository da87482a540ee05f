"""The worker's side of a slot: arrays are born in it."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

from typing import Any, SupportsIndex

from minloader._memory.files import (
    ALIGN,
    LARGE,
    SharedMapping,
    SlotAddress,
    is_shared_file,
    open_shared,
)

GRAIN = 256 * 1024

"""Bytes; slots grow in multiples of this, and by a quarter at least, so that batches of
increasing size do not make one grow each time."""


class SlotWriter:
    """The slot of one task, in the worker that runs it.

    Batches are made one after another: :meth:`begin`, any number of reservations, :meth:`end`.

    Attributes:
        size: bytes the slot has now.
        used: bytes of it that are taken.
        retired: whether the worker kept an array that was born in it.
        overflowed: whether there was no room for something of the present batch.
    """

    def __init__(self, address: SlotAddress) -> None:
        # A dataset may decode in threads of its own, and anything may run in a finalizer.
        self._lock = threading.RLock()
        self._address = address
        self.size = address.size
        self._limit = max(address.size, address.limit)
        _forget_closed(address.closed)
        self._mapping = _mappings.get(address[:2])
        self._owners: list[Any] = []  # one for each mapping that the batch has arrays in
        self.used = 0
        self.retired = False
        self.begin()

    def begin(self) -> None:
        """A new batch: what it finds in the slot is not its own."""
        self._mark = self.used
        self._shared = False
        self.overflowed = False

    def share(self) -> None:
        """A fork of the worker keeps what was born for the present batch so far."""
        self._shared = self._shared or bool(self._owners)

    def reserve(self, size: int) -> tuple[Any, int] | None:
        """Room for ``size`` bytes: the memory and an offset in it; None if there is none."""
        with self._lock:
            start = -(-self.used // ALIGN) * ALIGN
            if not self._make_room(start + size):
                self.overflowed = True
                return None
            assert self._mapping is not None
            if not self._owners or self._owners[-1].mapping is not self._mapping:
                self._owners.append(self._mapping.lease())
            self.used = start + size
            return self._owners[-1], start

    def _make_room(self, size: int) -> bool:
        """Makes the slot at least so large, and maps it."""
        if size > self._limit:
            return False
        if self._mapping is not None and size <= self._mapping.size:
            return True
        try:
            fd = open_shared(*self._address[:2], os.O_RDWR)
        except OSError:  # the loader is closed, or is on another machine
            self._limit = 0
            return False
        try:
            if size > self.size:
                wanted = -(-max(size, self.size + self.size // 4) // GRAIN) * GRAIN
                wanted = max(size, min(wanted, self._limit))
                _reserve(fd, self.size, wanted)
                self.size = wanted
            self._mapping = SharedMapping(fd, self.size, populate=True)
        except OSError:  # no memory, or no address space
            self.size = os.fstat(fd).st_size
            return False
        finally:
            os.close(fd)
        _mappings[self._address[:2]] = self._mapping
        return True

    def put(self, data: memoryview) -> tuple[int, int] | None:
        """Where a buffer lies in the slot, as start and stop; None if there is no room.

        It is copied there unless it was born there for this very batch.
        """
        if not data.readonly and self._owners:
            address = ctypes.addressof(ctypes.c_char.from_buffer(data))
            for owner in self._owners:
                start = address - owner.mapping.address
                # A slot that has grown ends later than its former mapping: there lie others.
                end = min(self.used, owner.mapping.size)
                if self._mark <= start and start + data.nbytes <= end:
                    return start, start + data.nbytes
        place = self.reserve(data.nbytes)
        if place is None:
            return None
        owner, start = place
        memoryview(owner).cast("B")[start : start + data.nbytes] = data
        return start, start + data.nbytes

    def end(self, spans: list[tuple[int, int]]) -> list[tuple[int, int] | bytearray]:
        """Ends a batch that the worker has let go of.

        Args:
            spans: where its buffers lie.

        Returns:
            Where they lie now. If the worker kept an array that was born in the slot, they are
            copied, since it may write there at any time; where there is no room, to the result.
        """
        if not self._owners:
            return list(spans)
        with self._lock:
            watches = [weakref.ref(owner) for owner in self._owners]
            self._owners = []
        if not self._shared and all(watch() is None for watch in watches):
            return list(spans)
        self.retired = True
        _mappings.pop(self._address[:2], None)  # the kept array holds the mapping
        return [self._copied(span) for span in spans]

    def close(self) -> None:
        """Ends the task: no array is born here any more."""
        with self._lock:
            self._limit = 0
            self.end([])

    def _copied(self, span: tuple[int, int]) -> tuple[int, int] | bytearray:
        assert self._mapping is not None
        data = memoryview(self._mapping.lease()).cast("B")[span[0] : span[1]].toreadonly()
        return self.put(data) or bytearray(data)


_mappings: dict[tuple[str, int], SharedMapping] = {}

"""Slots of this worker that are mapped, by path and inode."""


_closed = 0


def _forget_closed(closed: int) -> None:
    """Lets go of slots that the parent has closed, when it has closed any since."""
    global _closed
    if closed == _closed:
        return
    _closed = closed
    for place in list(_mappings):
        if not is_shared_file(*place):
            del _mappings[place]


def _reserve(fd: int, start: int, stop: int) -> None:
    """Makes a file larger with space that is really there.

    Raises:
        OSError: there is not so much.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, stop - start)
        return
    zeros = bytes(1 << 20)
    while start < stop:
        start += os.pwrite(fd, zeros[: stop - start], start)


_current: SlotWriter | None = None


def share_current() -> None:
    """Called before a fork: the child keeps what was born for the present batch so far."""
    if _current is not None:
        _current.share()


def use(writer: SlotWriter | None) -> None:
    """Makes a slot the one that arrays are born in, in this process; None for none."""
    global _current
    _current = writer


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = float) -> NDArray[Any]:
    """An array to be filled, as ``numpy.empty``; in a worker process born where its batch travels.

    A batch, or part of one, that is made in such an array reaches the parent without being
    copied once more. It is an ordinary array otherwise: views of it may be returned, and it may
    be kept (at the price of the copy). Outside a worker process it is ``numpy.empty``.

    Args:
        shape: of the array.
        dtype: of its elements.
    """
    import numpy as np

    if _current is not None:
        kind = np.dtype(dtype)
        lengths = shape if isinstance(shape, Sequence) else (shape,)
        size = math.prod(operator.index(length) for length in lengths) * kind.itemsize
        if size >= LARGE and not kind.hasobject:
            place = _current.reserve(size)
            if place is not None:
                return np.ndarray(shape, kind, *place)
    return np.empty(shape, dtype)
