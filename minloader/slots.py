"""Slots: shared memory in which batches travel from a worker to the parent, copied once at most.

A slot is a file without a name that belongs to the parent. Its life has paired verbs:

* The parent **lends** it to a task, and **settles** it when the reply is there. Meanwhile the
  worker opens it, lets the arrays of a batch be born in it (:func:`empty`), copies there what
  was born elsewhere, and makes it grow as needed. Space is reserved before it is written, so
  that a full machine is an error to be handled rather than a bus error.
* The parent **leases** its memory to the batches of the reply: their arrays are views of it.
  When the last view has died, whatever its kind, the slot is **freed**, for the next task. Its
  pages are still there then, which is most of the speed.

A worker that keeps an array born in a slot keeps that memory: the slot is *retired*, never lent
again, and what the batch needs of it is copied to where nobody else writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from minloader.processes import free_memory, most_files

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = [
    "ALIGN",
    "LARGE",
    "Address",
    "Slot",
    "SlotWriter",
    "Slots",
    "empty",
    "is_leased",
    "open_anonymous",
]

LARGE = 16 * 1024
"""Bytes from which a buffer lies in shared memory of its own rather than in the message: four
pages, where a copy through a pipe starts to cost more than a view object."""

ALIGN = 64
"""Bytes; the alignment numpy gives its own arrays, a cache line."""

GRAIN = 256 * 1024
"""Bytes; slots grow in multiples of this, and by a quarter at least, so that batches of
increasing size do not make one grow each time."""


class _LibC:
    """The two calls that the mmap module makes only with a descriptor kept for each mapping."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.mmap, self.munmap = libc.mmap, libc.munmap
        size, flag = ctypes.c_size_t, ctypes.c_int
        self.mmap.restype = ctypes.c_void_p
        self.mmap.argtypes = (ctypes.c_void_p, size, flag, flag, flag, ctypes.c_long)
        self.munmap.argtypes = (ctypes.c_void_p, size)


_libc = _LibC() if os.name == "posix" else None  # elsewhere batches go through the pipe


class _Mapping:
    """A file mapped into this process, from its first byte, until nobody looks at it."""

    def __init__(self, fd: int, size: int, *, populate: bool = False) -> None:
        assert _libc is not None
        # Pages that exist already are cheaper to map at once than one by one when touched.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot map {size} bytes: {os.strerror(error)}")
        self.address: int = address
        self.size = size
        self._type = ctypes.c_char * size
        weakref.finalize(self, _libc.munmap, address, size).atexit = False

    def lease(self) -> Any:
        """A new object over the memory that lives as long as any view made of it.

        A ctypes array, because a memoryview dies before the arrays that were made from it.
        """
        owner: Any = self._type.from_address(self.address)
        owner.mapping = self
        return owner


def is_leased(array: NDArray[Any]) -> bool:
    """Whether an array lies in leased memory: it is its batch's alone, for as long as it lives."""
    base: Any = array
    while not isinstance(base, ctypes.Array) and base is not None:
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return isinstance(getattr(base, "mapping", None), _Mapping)


# --- the parent's side


class Address(NamedTuple):
    """What of a slot travels with a task.

    Attributes:
        path: file to open; without a name of its own, ``/proc/<pid>/fd/<n>``.
        inode: of that file: such paths are used again for other files.
        size: bytes the file has.
        limit: bytes it may grow to.
        closed: how many slots the parent has closed so far, for the worker to notice.
    """

    path: str
    inode: int
    size: int
    limit: int
    closed: int


class Slot:
    """One slot, in the parent. Its owner is :class:`Slots`."""

    def __init__(self, folder: str | None) -> None:
        self.fd, self.name = open_anonymous(folder)
        self.inode = os.fstat(self.fd).st_ino
        self.size = 0
        self.limit = 0
        self.mapping: _Mapping | None = None

    def retire(self) -> None:
        """Gives up the file, which can no longer be lent. Views of it stay."""
        fd, self.fd = self.fd, -1  # first: the last view may be collected anywhere below
        self.mapping = None
        if fd >= 0:
            os.close(fd)
            if self.name is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.name)


class Slots:
    """All slots of a pool. Every method may be called from any thread, and from finalizers.

    Args:
        budget: most bytes to hold in slots; None for half of the memory that is free.
        in_flight: most tasks that will be under way at once.
        share: of how many like this the memory and the descriptors are for.
    """

    def __init__(self, budget: int | None, in_flight: int, share: int = 1) -> None:
        self._lock = threading.RLock()  # reentrant: a lease may be collected while it is held
        self.in_flight = in_flight
        self._free: list[Slot] = []  # the last one freed is the first one lent: its pages are warm
        self._leased: set[Slot] = set()
        self._all: set[Slot] = set()
        self._largest = 0  # bytes that the batches of a task were seen to have
        self._open = 0  # slots that have their file
        self._closed = 0
        self._ended = False
        self._pid = os.getpid()
        self.folder = _make_folder()
        self._committed = 0  # bytes that the slots have, or may grow to while they are lent
        self.budget = (_free_space(self.folder) // 2 if budget is None else budget) // share
        self._most_open = most_files() // 4 // share
        _all_slots.add(self)

    @property
    def used(self) -> tuple[int, int]:
        """Number of slots, and bytes committed to them."""
        return len(self._all), self._committed

    def lend(self) -> Slot | None:
        """A slot for a task; None where there can be no more: the batch must use the pipe."""
        with self._lock:
            if self._ended or _libc is None:
                return None
            if self._free:
                slot = self._free.pop()
            elif self._open >= self._most_open or self._committed >= self.budget:
                return None
            else:
                try:
                    slot = Slot(self.folder)
                except OSError:  # no descriptors, no space
                    return None
                self._all.add(slot)
                self._open += 1
            # What it may grow to: what a batch was seen to need, or a share of what is left, such
            # that together they stay within the budget whatever each of them does.
            left = max(0, self.budget - self._committed)
            growth = max(self._largest * 5 // 4 - slot.size, left // (2 * self.in_flight))
            slot.limit = slot.size + min(growth, left)
            self._committed += slot.limit - slot.size
            return slot

    def address(self, slot: Slot | None) -> Address:
        """Where a worker finds a slot that was lent to it."""
        if slot is None:
            return Address("", 0, 0, 0, self._closed)
        path = slot.name or f"/proc/{self._pid}/fd/{slot.fd}"
        return Address(path, slot.inode, slot.size, slot.limit, self._closed)

    def settle(self, slot: Slot, size: int | None, needed: int) -> None:
        """Takes note of the size that the worker made the slot, and of the size it needed."""
        with self._lock:
            self._largest = max(self._largest, needed)
            size = max(size or 0, slot.size)
            self._committed -= slot.limit - size
            if size != slot.size:
                slot.mapping = None  # of the former size; nobody looks at it
            slot.size = slot.limit = size

    def lease(self, slot: Slot, *, retire: bool) -> Any:
        """Memory of a settled slot; when nobody looks at it any longer, the slot is freed.

        Args:
            slot: the slot.
            retire: never lend it again.
        """
        with self._lock:
            try:
                if slot.mapping is None:
                    slot.mapping = _Mapping(slot.fd, slot.size)
                owner = slot.mapping.lease()
            except OSError:  # no address space: a private copy is dear, but always works
                owner = (ctypes.c_char * slot.size)()
                view, done = memoryview(owner).cast("B"), 0
                while done < slot.size:  # 2 GB at most in one call
                    done += os.preadv(slot.fd, [view[done:]], done)
                self._discard(slot)
                return owner
            self._leased.add(slot)
            # The memory of a hoarder's batches is theirs to hold; descriptors are scarcer.
            if retire or 2 * self._open > self._most_open or self._ended:
                self._retire(slot)
            weakref.finalize(owner, self._end_lease, slot).atexit = False
            return owner

    def _end_lease(self, slot: Slot) -> None:
        with self._lock:
            self._leased.discard(slot)
            self.free(slot)

    def free(self, slot: Slot, *, retire: bool = False) -> None:
        """Takes back a settled slot that nobody looks at."""
        with self._lock:
            if retire or self._ended or slot.fd < 0 or len(self._free) > self.in_flight:
                self._discard(slot)
            else:
                self._free.append(slot)

    def discard(self, slot: Slot) -> None:
        """Ends a slot that was lent and does not come back."""
        with self._lock:
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        self._retire(slot)
        self._all.discard(slot)
        self._committed -= slot.limit

    def _retire(self, slot: Slot) -> None:
        if slot.fd >= 0:
            slot.retire()
            self._open -= 1
            self._closed += 1

    def retire_leased(self) -> None:
        """Lets no slot that somebody looks at be written again: a fork looks at it too."""
        with self._lock:
            for slot in list(self._leased):
                if slot in self._leased:  # collecting garbage may have ended it meanwhile
                    self._retire(slot)

    def close(self) -> None:
        """Ends all slots; batches that are still in use keep their memory."""
        with self._lock:
            self._ended = True
            while self._free:
                self._discard(self._free.pop())
            for slot in list(self._all):  # which a finalizer may change meanwhile
                self._retire(slot)
            if self.folder is not None and os.getpid() == self._pid:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _leave_to_parent(self) -> None:
        """In a fork: these slots are the parent's."""
        self._lock = threading.RLock()  # a thread that is not here may have held it
        self._ended = True
        for slot in list(self._all):
            slot.name = None
            slot.retire()


_all_slots: weakref.WeakSet[Slots] = weakref.WeakSet()


def _before_fork() -> None:
    for slots in list(_all_slots):
        slots.retire_leased()
    if _current is not None:
        _current.share()


def _after_fork_in_child() -> None:
    use(None)  # the slot is the worker's
    for slots in list(_all_slots):
        slots._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _free_space(folder: str | None) -> int:
    """Bytes of memory, or of the file system that stands in for it, that are free."""
    free = free_memory()
    if folder is not None:
        free = min(free, shutil.disk_usage(folder).free)
    return free


def _can_be_nameless() -> bool:
    """Whether other processes can open a file of this one that has no name."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


def open_anonymous(folder: str | None = None) -> tuple[int, str | None]:
    """A new file to map: a descriptor, and a name where there are no files without one."""
    if _can_be_nameless():
        return os.memfd_create("minloader"), None
    return tempfile.mkstemp(prefix="minloader-", dir=folder)


def _make_folder() -> str | None:
    """A folder for slots with names; None where they have none."""
    if _can_be_nameless() or _libc is None:
        return None
    for parent in ("/dev/shm", None):  # in memory, if there is such a place
        try:
            return tempfile.mkdtemp(prefix="minloader-", dir=parent)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="minloader-")


# --- the worker's side


class SlotWriter:
    """The slot of one task, in the worker that runs it.

    Batches are made one after another: :meth:`begin`, any number of reservations, :meth:`end`.

    Attributes:
        size: bytes the slot has now.
        used: bytes of it that are taken.
        retired: whether the worker kept an array that was born in it.
        overflowed: whether there was no room for something of the present batch.
    """

    def __init__(self, address: Address) -> None:
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
            fd = _open(self._address)
        except OSError:  # the loader is closed, or is on another machine
            self._limit = 0
            return False
        try:
            if size > self.size:
                wanted = -(-max(size, self.size + self.size // 4) // GRAIN) * GRAIN
                wanted = max(size, min(wanted, self._limit))
                _reserve(fd, self.size, wanted)
                self.size = wanted
            self._mapping = _Mapping(fd, self.size, populate=True)
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


_mappings: dict[tuple[Any, ...], _Mapping] = {}
"""Slots of this worker that are mapped, by path and inode."""

_closed = 0


def _forget_closed(closed: int) -> None:
    """Lets go of slots that the parent has closed, when it has closed any since."""
    global _closed
    if closed == _closed:
        return
    _closed = closed
    for path, inode in list(_mappings):
        try:
            gone = os.stat(path).st_ino != inode
        except OSError:
            gone = True
        if gone:
            del _mappings[path, inode]


def _open(address: Address) -> int:
    fd = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != address.inode:
        os.close(fd)
        raise FileNotFoundError(f"{address.path} now holds something else")
    return fd


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
