"""Arrays over memory that processes share: workers get the same memory, or the job is refused.

A copy would be another memory: what one process writes there, the others do not see. ::

    over a ctypes object of multiprocessing, or a shared tensor    that is inherited, and viewed
    over a file that was mapped to be written, /dev/shm counted    the file is mapped again
    over any other mapping that is shared and writable             refused
    over a file that was mapped to be read, where that is large    the file is mapped again

What is mapped, and from which file, ``/proc/self/maps`` says. Where there is none, only the first
kind is known.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from minloader._memory.arrays import address_of, owner_of, view_of
from minloader._memory.files import LARGE, MARK
from minloader._memory.inherited import must_be_inherited
from minloader._memory.reducers import JobMemory
from minloader._memory.tensors import bytes_of, is_shared

_DELETED = " (deleted)"


class Mapping(NamedTuple):
    """A piece of this process's memory.

    Attributes:
        start: its first address.
        stop: the address behind it.
        is_writable: whether this process may write there.
        is_shared: whether it is the file itself, or memory of several processes, and no copy.
        offset: its place in its file.
        path: of the file, or what else the system calls it.
    """

    start: int
    stop: int
    is_writable: bool
    is_shared: bool
    offset: int
    path: str

    @property
    def has_file(self) -> bool:
        """Whether its file can be opened by the path."""
        return not self.path.endswith(_DELETED) and os.path.isfile(self.path)


class Mappings:
    """What was mapped when it was first asked for.

    Args:
        is_same_machine: whether workers surely have the files that this process has.
    """

    def __init__(self, *, is_same_machine: bool = True) -> None:
        self._is_same_machine = is_same_machine
        self._known: list[Mapping] | None = None
        self._files: dict[tuple[str, bool], MappedFile] = {}

    def at(self, address: int) -> Mapping | None:
        """Return the mapping of an address; None if it is not known."""
        if self._known is None:
            self._known = _read_mappings()
        place = bisect.bisect_right(self._known, address, key=attrgetter("start")) - 1
        if place < 0 or address >= self._known[place].stop:
            return None
        return self._known[place]

    def file(self, path: str, *, is_writable: bool) -> MappedFile:
        """Return a file that was mapped: one object for all arrays over it."""
        key = path, is_writable
        if key not in self._files:
            # Workers of an executor may be on another machine, whose file it is then.
            known = identity(path) if self._is_same_machine else None
            self._files[key] = MappedFile(path, is_writable, known)
        return self._files[key]


def mappings_of(memory: JobMemory) -> Mappings:
    """Return the mappings of this process, as a job has seen them first."""
    if memory.mappings is None:
        memory.mappings = Mappings(is_same_machine=memory.is_same_machine)
    return memory.mappings  # type: ignore[no-any-return]


class MappedFile(NamedTuple):
    """A file that each process which loads a job maps once: a mapping takes a descriptor.

    Attributes:
        path: of the file.
        is_writable: whether it is mapped to be written.
        known: its :func:`identity`; None: it may be that of another machine.
    """

    path: str
    is_writable: bool
    known: tuple[int, int] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _map_again, tuple(self)


def _read_mappings() -> list[Mapping]:
    found = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                addresses, flags, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                start, stop = (int(each, 16) for each in addresses.split("-"))
                mapping = Mapping(
                    start=start,
                    stop=stop,
                    is_writable=flags[1] == "w",
                    is_shared=flags[3] == "s",
                    offset=int(offset, 16),
                    path=path[0] if path else "",
                )
                found.append(mapping)
    except OSError:  # another system
        return []
    return found


def reduce_shared(memory: JobMemory, array: Any) -> Any:
    """Reduce an array over shared memory, such that it is over the same memory in a worker.

    Args:
        memory: of the job.
        array: of numpy, not over its own memory.

    Returns:
        How it is made there; None if the array has memory of this process alone.

    Raises:
        TypeError: nobody else can have the memory.
    """
    owner, address = owner_of(array), address_of(array)
    view = array.dtype, array.shape, array.strides, array.flags.writeable
    if must_be_inherited(owner):
        return view_of, (owner, address - ctypes.addressof(owner), *view)
    is_tensor = type(owner).__module__ == "torch"
    if is_tensor and is_shared(owner.untyped_storage()):
        storage = owner.untyped_storage()
        return view_of_storage, (storage, address - storage.data_ptr(), *view)
    mappings = mappings_of(memory)
    mapping = mappings.at(address)
    if mapping is None or not mapping.is_shared or _is_device(mapping.path):
        return None
    is_ours = mapping.path.startswith(f"/memfd:{MARK}")
    if is_ours or (is_tensor and owner.is_pinned()):
        return None  # a batch is nobody else's, nor what a GPU reads
    if not mapping.is_writable and (
        not memory.is_same_machine or array.nbytes < LARGE or not mapping.has_file
    ):
        return None  # a copy does
    if not mapping.has_file:
        raise TypeError("an array over memory that processes share, which has no name")
    place = address - mapping.start + mapping.offset
    file = mappings.file(mapping.path, is_writable=mapping.is_writable)
    return view_of, (file, place, *view)


def reduce_memmap(memory: JobMemory, array: Any) -> Any:
    """Reduce a contiguous ``numpy.memmap`` such that its file is mapped again."""
    mappings = mappings_of(memory)
    _check_mapped(array, array.filename, mappings)
    # A slice keeps the offset of what it is a slice of: find its own from the addresses.
    first = address_of(np.frombuffer(array._mmap, np.uint8))
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + address_of(array) - first
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r" if array.mode == "r" else "r+"
    file = mappings.file(os.fspath(array.filename), is_writable=mode == "r+")
    return _memmap_of, (file, array.filename, mode, array.dtype, offset, array.shape, order)


def _is_device(path: str) -> bool:
    """Whether a path is that of a device, such as a GPU with its pinned memory."""
    return path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero"))


def view_of_storage(storage: Any, *view: Any) -> Any:
    """Return an array over the memory of a storage of torch's."""
    return view_of(bytes_of(storage), *view)


# --- files that are opened once more


def identity(file: str | int) -> tuple[int, int]:
    """Return what no two files of this machine have in common, of a path or a descriptor."""
    found = os.stat(file)
    return found.st_dev, found.st_ino


def _map_again(path: str, is_writable: bool, known: tuple[int, int] | None) -> mmap.mmap:
    """Map a file that another process has mapped.

    Raises:
        FileNotFoundError: its path leads to another file, or to none.
    """
    with open(path, "r+b" if is_writable else "rb") as file:
        if known not in (None, identity(file.fileno())):
            raise _replaced(path)
        access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        return mmap.mmap(file.fileno(), 0, access=access)


def _replaced(path: str) -> FileNotFoundError:
    return FileNotFoundError(f"the file {path} was replaced or removed since it was mapped")


def _check_mapped(array: Any, path: str, mappings: Mappings) -> None:
    """Look whether a path leads to the file that an array is mapped from.

    Raises:
        FileNotFoundError: it leads to another one, or to none.
    """
    mapping = mappings.at(address_of(array))
    if mapping is None:
        return
    is_gone = mapping.path.endswith(_DELETED) and not os.path.exists(mapping.path)
    if is_gone or (mapping.has_file and not _is_same(mapping.path, path)):
        raise _replaced(path)


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _memmap_of(
    memory: mmap.mmap, path: str, mode: str, dtype: Any, offset: int, shape: Any, order: Any
) -> Any:
    """Return a ``numpy.memmap`` over a file that is mapped, as numpy makes it when it maps one.

    Args:
        memory: the whole file.
        path: of the file.
        mode: as numpy takes it, and all that follow.
    """
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, memory, offset, order=order)
    array._mmap = memory
    array.filename = path
    array.mode = mode
    array.offset = offset
    return array
