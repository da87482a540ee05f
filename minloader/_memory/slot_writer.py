"""The worker's side of a slot: arrays are made in it, and buffers are copied into it.

Within one task batches follow each other in the slot:

    | batch 0: array, array, stream | batch 1: array | batch 2 ...        | room to grow |
    0                               start of a batch        used      size           limit

An array that is made by :func:`empty` for the present batch lies in the slot from the beginning,
so that it need not be copied to get there.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from minloader._memory import forks
from minloader._memory.files import (
    ALIGN,
    LARGE,
    SharedMapping,
    SlotAddress,
    is_there,
    open_shared,
)
from minloader._protocols import snapshot

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Shape = SupportsIndex | Sequence[SupportsIndex]

GRAIN = 256 * 1024
"""Bytes; slots grow in multiples of this, and by a quarter at least, so that batches of
increasing size do not make one grow each time."""


class NoSlot:
    """Stands for the slot of a task that has none: all of a batch stays in the reply.

    Attributes:
        size: bytes the slot has now; None if there is none.
        used: bytes of it that are taken.
        retired: whether the worker kept an array that was made in the slot.
        overflowed: whether there was no room for something of the present batch.
    """

    size: int | None = None
    used = 0
    retired = False
    overflowed = False

    def begin(self) -> None:
        """Begin with a batch: what it finds in the slot is not its own."""

    def empty(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Make an array, in the slot if it is large and there is room."""
        import numpy as np

        return np.empty(shape, dtype)

    def put(self, data: memoryview) -> Any:
        """Return what stands for a buffer in the reply; None if the buffer is to be in it."""
        return None

    def end(self, buffers: list[Any]) -> list[Any]:
        """End the present batch, and return what stands for its buffers from now on."""
        return buffers

    def close(self) -> None:
        """End the task: no array is made in its slot any more."""


class SlotWriter(NoSlot):
    """The slot of one task, in the worker process that runs it.

    For each batch there is one :meth:`begin`, then any number of arrays and buffers, one
    :meth:`end`. Any thread of the worker may make arrays.
    """

    def __init__(self, address: SlotAddress) -> None:
        # A dataset may decode in threads of its own, and anything may run in a finalizer.
        self._lock = threading.RLock()
        self._file = address.path, address.mark
        self.size: int = address.size
        self._limit = max(address.size, address.limit)
        _forget_closed(address.closed)
        self._mapping = mappings.get(self._file)
        self._leases: list[Any] = []  # one for each mapping that has arrays of the present batch
        self.begin()

    def begin(self) -> None:
        self._start = self.used
        self._forked = False
        self.overflowed = False

    def before_fork(self) -> None:
        """Treat arrays of the present batch as kept: the fork has them for good."""
        self._forked = self._forked or bool(self._leases)

    def empty(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        import numpy as np

        kind = np.dtype(dtype)
        lengths: Any = shape if np.ndim(cast(Any, shape)) else (shape,)
        size = math.prod(operator.index(length) for length in lengths) * kind.itemsize
        place = self.reserve(size) if size >= LARGE and not kind.hasobject else None
        return np.empty(shape, dtype) if place is None else np.ndarray(shape, kind, *place)

    def reserve(self, size: int) -> tuple[Any, int] | None:
        """Reserve ``size`` bytes; return the memory and an offset in it, None if it is full."""
        with self._lock:
            start = -(-self.used // ALIGN) * ALIGN
            if not self._make_room(start + size):
                self.overflowed = True
                return None
            assert self._mapping is not None
            if not self._leases or self._leases[-1].mapping is not self._mapping:
                self._leases.append(self._mapping.lease())
            self.used = start + size
            return self._leases[-1], start

    def _make_room(self, size: int) -> bool:
        """Make the slot at least so large, and map it."""
        if size > self._limit:
            return False
        if self._mapping is not None and size <= self._mapping.size:
            return True
        path, mark = self._file
        # No descriptor is kept: a worker maps as many slots as tasks are under way.
        try:
            fd = open_shared(path, mark, os.O_RDWR)
        except OSError:  # the loader is closed, or is on another machine
            self._limit = 0
            return False
        try:
            if size > self.size:
                wanted = -(-max(size, self.size + self.size // 4) // GRAIN) * GRAIN
                wanted = max(size, min(wanted, self._limit))
                # A write past what there is would be SIGBUS, which nobody could handle.
                os.posix_fallocate(fd, self.size, wanted - self.size)
                self.size = wanted
            self._mapping = SharedMapping(fd, self.size, populate=True)
        except OSError:  # no memory, or no address space
            self.size = os.fstat(fd).st_size
            return False
        finally:
            os.close(fd)
        mappings[self._file] = self._mapping
        return True

    def put(self, data: memoryview) -> tuple[int, int] | None:
        """Return where a buffer lies in the slot, as start and stop; None if there is no room.

        The buffer is copied there unless it was made there for this very batch.
        """
        # What is read-only was not made here, and ctypes cannot tell where it lies.
        if not data.readonly and self._leases:
            address = ctypes.addressof(ctypes.c_char.from_buffer(data))
            for lease in self._leases:
                start = address - lease.mapping.address
                # A slot that has grown ends later than its former mapping: there lie others.
                end = min(self.used, lease.mapping.size)
                if self._start <= start and start + data.nbytes <= end:
                    return start, start + data.nbytes
        place = self.reserve(data.nbytes)
        if place is None:
            return None
        lease, start = place
        memoryview(lease).cast("B")[start : start + data.nbytes] = data
        return start, start + data.nbytes

    def end(self, buffers: list[tuple[int, int]]) -> list[tuple[int, int] | bytearray]:
        """End a batch that the worker has let go of.

        Args:
            buffers: where they lie.

        Returns:
            Where they lie now. If the worker kept an array that was made in the slot, they are
            copied, since it may write there at any time; where there is no room, to the result.
        """
        if not self._leases:
            return list(buffers)
        with self._lock:
            watches = [weakref.ref(lease) for lease in self._leases]
            self._leases = []
        # A lease that is alive without us has an array over it.
        if not self._forked and all(watch() is None for watch in watches):
            return list(buffers)
        # The parent will never lend this slot again; here it must not be found for the next task.
        self.retired = True
        mappings.pop(self._file, None)  # the kept array holds the mapping
        return [self._copied(*span) for span in buffers]

    def _copied(self, start: int, stop: int) -> tuple[int, int] | bytearray:
        assert self._mapping is not None
        data = memoryview(self._mapping.lease()).cast("B")[start:stop].toreadonly()
        return self.put(data) or bytearray(data)

    def close(self) -> None:
        if _current is self:
            use(None)
        with self._lock:
            self._limit = 0
            self.end([])


mappings: dict[tuple[str, str], SharedMapping] = {}
"""The slots that this worker has mapped, by path and mark. They stay mapped between tasks."""

_closed = 0


def _forget_closed(closed: int) -> None:
    """Unmap slots that the parent has closed, if it has closed any since the last task."""
    global _closed
    if closed != _closed:
        _closed = closed
        unmap_closed()


def unmap_closed() -> None:
    """Unmap slots that are closed, from any thread."""
    for path, mark in snapshot(mappings):
        if not is_there(path, mark):
            mappings.pop((path, mark), None)


_current: SlotWriter | None = None


def use(writer: SlotWriter | None) -> None:
    """Make a slot the one that :func:`empty` makes arrays in, in this process; None for none."""
    global _current
    _current = writer


def before_fork() -> None:
    writer = _current  # once: another thread may end the task
    if writer is not None:
        writer.before_fork()


forks.before.append(before_fork)
forks.in_child.append(partial(use, None))  # it is the worker's


def empty(shape: Shape, dtype: DTypeLike = float) -> NDArray[Any]:
    """An array to be filled, as ``numpy.empty``; in a worker process, in the memory of its batch.

    A batch, or part of one, that is made in such an array reaches the parent without being
    copied once more. It is an ordinary array otherwise: views of it may be returned, and it may
    be kept (at the price of the copy). Outside a worker process it is ``numpy.empty``.

    Args:
        shape: of the array.
        dtype: of its elements.
    """
    writer = _current  # once: the task may end while a thread of the dataset's is here
    return (NO_SLOT if writer is None else writer).empty(shape, dtype)


NO_SLOT = NoSlot()
