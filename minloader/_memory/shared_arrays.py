"""Arrays over memory that processes share: workers get the same memory, or the job is refused.

A copy would be another memory: what one process writes there, the others do not see. ::

    over a ctypes object of multiprocessing, or a shared tensor    that is inherited, and viewed
    over a file that was mapped to be written, /dev/shm counted    the file is mapped again
    over any other mapping that is shared and writable             refused

What is mapped, and from which file, ``/proc/self/maps`` says. Where there is none, only the first
kind is known.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from typing import Any, NamedTuple

from minloader._memory.files import is_leased
from minloader._memory.inherited import is_shared, must_be_inherited
from minloader._memory.tensors import bytes_of

_DELETED = " (deleted)"


class Mapping(NamedTuple):
    """A piece of this process's memory.

    Attributes:
        start: its first address.
        stop: the address behind it.
        is_shared: whether other processes may see what is written there.
        offset: its place in its file.
        path: of the file, or what else the system calls it.
    """

    start: int
    stop: int
    is_shared: bool
    offset: int
    path: str

    @property
    def has_file(self) -> bool:
        """Whether its file can be opened by the path."""
        return not self.path.endswith(_DELETED) and os.path.isfile(self.path)


class Mappings:
    """What was mapped when it was first asked for."""

    def __init__(self) -> None:
        self._known: list[Mapping] | None = None

    def at(self, address: int) -> Mapping | None:
        """Return the mapping of an address; None if it is not known."""
        if self._known is None:
            self._known = _read_mappings()
        place = bisect.bisect_right(self._known, address, key=_start) - 1
        if place < 0 or address >= self._known[place].stop:
            return None
        return self._known[place]


def _start(mapping: Mapping) -> int:
    return mapping.start


def _read_mappings() -> list[Mapping]:
    found = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                addresses, flags, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                start, stop = (int(each, 16) for each in addresses.split("-"))
                name = path[0] if path else ""
                found.append(Mapping(start, stop, flags[1::2] == "ws", int(offset, 16), name))
    except OSError:  # another system
        return []
    return found


def address_of(array: Any) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _owner_of(array: Any) -> Any:
    """Return what has the memory that an array is a view of."""
    import numpy as np

    owner: Any = array
    while True:
        if isinstance(owner, memoryview):
            base = owner.obj
        elif isinstance(owner, np.ndarray) or type(owner).__module__.startswith("numpy."):
            base = owner.base  # numpy's as_strided has a class of its own in between
        else:
            return owner
        if base is None:
            return owner
        owner = base


def reduce_shared(array: Any, mappings: Mappings) -> Any:
    """Reduce an array over shared memory, such that it is over the same memory in a worker.

    Returns:
        How it is made there; None if the array has memory of this process alone.

    Raises:
        TypeError: nobody else can have the memory.
    """
    if array.flags.owndata:
        return None
    owner, address = _owner_of(array), address_of(array)
    view = array.dtype, array.shape, array.strides, array.flags.writeable
    if must_be_inherited(owner):
        return view_of, (owner, address - ctypes.addressof(owner), *view)
    is_tensor = type(owner).__module__ == "torch"
    if is_tensor and is_shared(owner.untyped_storage()):
        storage = owner.untyped_storage()
        return view_of, (storage, address - storage.data_ptr(), *view)
    mapping = mappings.at(address)
    if mapping is None or not mapping.is_shared or _is_device(mapping.path):
        return None
    if is_leased(array) or (is_tensor and owner.is_pinned()):
        return None  # a batch is nobody else's, nor what a GPU reads
    if not mapping.has_file:
        raise TypeError("an array over memory that processes share, which has no name")
    place = address - mapping.start + mapping.offset
    return _map_again, (mapping.path, identity(mapping.path), place, *view)


def _is_device(path: str) -> bool:
    """Whether a path is that of a device, such as a GPU with its pinned memory."""
    return path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero"))


def view_of(
    owner: Any, offset: int, dtype: Any, shape: Any, strides: Any, is_writable: bool
) -> Any:
    """Return an array over the memory that an object has."""
    import numpy as np

    memory = bytes_of(owner) if type(owner).__module__ == "torch.storage" else owner
    array: Any = np.ndarray(shape, dtype, buffer=memory, offset=offset, strides=strides)
    array.flags.writeable = is_writable and array.flags.writeable
    return array


def _map_again(
    path: str, known: Any, offset: int, dtype: Any, shape: Any, strides: Any, is_writable: bool
) -> Any:
    """Return an array over a file that another process has mapped."""
    with open(path, "r+b") as file:
        check_identity(path, known)
        memory = mmap.mmap(file.fileno(), 0)
    return view_of(memory, offset, dtype, shape, strides, is_writable)


# --- files that are opened once more


def identity(path: str) -> tuple[int, int]:
    """Return what no two files of this machine have in common."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def check_identity(path: str, known: tuple[int, int] | None) -> None:
    """Look whether a path still leads to the file that it has led to.

    Args:
        path: of the file.
        known: the file's :func:`identity`; None: it may be that of another machine.

    Raises:
        FileNotFoundError: it leads to another one, or to none.
    """
    if known is not None and (not os.path.exists(path) or identity(path) != known):
        raise _replaced(path)


def _replaced(path: str) -> FileNotFoundError:
    return FileNotFoundError(f"the file {path} was replaced or removed since it was mapped")


def check_mapped(array: Any, path: str, mappings: Mappings) -> None:
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


def open_memmap(
    kind: Any, path: str, known: Any, dtype: Any, mode: str, offset: int, shape: Any, order: str
) -> Any:
    """Return a ``numpy.memmap`` over the file that another process has opened.

    Args:
        kind: class of the array.
        path: of the file.
        known: what :func:`check_identity` compares.
        dtype: as numpy takes it, and all that follow.
    """
    array = kind(path, dtype, mode, offset, shape, order)
    check_identity(path, known)  # behind it: the file may be replaced at any time
    return array
