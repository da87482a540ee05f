"""Files without a name that processes share, and mappings of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE = 16 * 1024

"""Bytes from which a buffer lies in shared memory of its own rather than in the message: four
pages, where a copy through a pipe starts to cost more than a view object."""


ALIGN = 64

"""Bytes; the alignment numpy gives its own arrays, a cache line."""


class _LibC:
    """The two calls that the mmap module makes only with a descriptor kept for each mapping."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.mmap, self.munmap = libc.mmap, libc.munmap
        size, flag = ctypes.c_size_t, ctypes.c_int
        self.mmap.restype = ctypes.c_void_p
        self.mmap.argtypes = (ctypes.c_void_p, size, flag, flag, flag, ctypes.c_long)
        self.munmap.argtypes = (ctypes.c_void_p, size)


libc = _LibC() if os.name == "posix" else None  # elsewhere batches go through the pipe


class SharedMapping:
    """A file mapped into this process, from its first byte, until nobody looks at it."""

    def __init__(self, fd: int, size: int, *, populate: bool = False) -> None:
        assert libc is not None
        # Pages that exist already are cheaper to map at once than one by one when touched.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot map {size} bytes: {os.strerror(error)}")
        self.address: int = address
        self.size = size
        self._type = ctypes.c_char * size
        weakref.finalize(self, libc.munmap, address, size).atexit = False

    def lease(self) -> Any:
        """A new object over the memory that lives as long as any view made of it.

        A ctypes array, because a memoryview dies before the arrays that were made from it.
        """
        owner: Any = self._type.from_address(self.address)
        owner.mapping = self
        return owner


def _can_be_nameless() -> bool:
    """Whether other processes can open a file of this one that has no name."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


def open_anonymous(folder: str | None = None) -> tuple[int, str | None]:
    """A new file to map: a descriptor, and a name where there are no files without one."""
    if _can_be_nameless():
        return os.memfd_create("minloader"), None
    return tempfile.mkstemp(prefix="minloader-", dir=folder)


def make_folder() -> str | None:
    """A folder for slots with names; None where they have none."""
    if _can_be_nameless() or libc is None:
        return None
    for parent in ("/dev/shm", None):  # in memory, if there is such a place
        try:
            return tempfile.mkdtemp(prefix="minloader-", dir=parent)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="minloader-")


def is_leased(array: NDArray[Any]) -> bool:
    """Whether an array lies in leased memory: it is its batch's alone, for as long as it lives."""
    base: Any = array
    while not isinstance(base, ctypes.Array) and base is not None:
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return isinstance(getattr(base, "mapping", None), SharedMapping)


class SlotAddress(NamedTuple):
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
