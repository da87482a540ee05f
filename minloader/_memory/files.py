"""Files that processes share, and mappings of them.

On Linux a shared file has no name: it is a ``memfd``, which other processes of the machine open
through ``/proc/<pid>/fd/<n>``. Nothing is left to clean up after SIGKILL, and the size of
``/dev/shm`` does not bound it. Where the system has no such files, or a sandbox refuses them, a
shared file has a name, and batches go through the pipe.

A path alone does not say which file it leads to: the number of a descriptor is used again, and on
another machine it is anybody's. So each shared file has a *mark*, which no other has, and which the
system tells with the path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from minloader._memory import forks

LARGE = 16 * 1024
"""Bytes from which a buffer lies in shared memory of its own rather than in the message: four
pages, where a copy through a pipe starts to cost more than a view object."""

ALIGN = 64
"""Bytes; the alignment numpy gives its own arrays, a cache line."""


MARK = "minloader-"
"""What the names of our files begin with."""


class SharedFile:
    """A file that this process owns and that others can open by its path.

    Attributes:
        fd: descriptor of the file; -1 when it is closed.
        name: path of a file with a name, among temporary files; None for one without.
        mark: by which other processes know the file, for :func:`open_shared`.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.mark = f"{MARK}{secrets.token_hex(8)}"
        self.fd = _create_nameless(self.mark)
        if self.fd < 0:
            self.fd, self.name = tempfile.mkstemp(prefix=self.mark)
        # Also where it is let go of: an error may come before anybody can close it.
        self._end = weakref.finalize(self, _end_file, self.fd, self.name, forks.process)
        self._end.atexit = False

    @property
    def path(self) -> str:
        """Path for any process to open, until :meth:`close`; in a fork, through the fork."""
        return path_of(self.fd, self.name)

    def text(self, begin: int = 0) -> str:
        """Return the text in the file, from a place on."""
        with open(self.fd, "rb", closefd=False) as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Close the file and remove its name. Mappings of it stay. Harmless when repeated."""
        self.fd = -1
        self._end()


def _end_file(fd: int, name: str | None, process: object) -> None:
    """Close a file, and remove its name in the process that made it; a fork has it from there."""
    os.close(fd)
    if name is not None and forks.process is process:
        unlink(name)


def path_of(fd: int, name: str | None) -> str:
    """Return a path for any process to open a file, for as long as this one has it open.

    Args:
        fd: descriptor of the file.
        name: its path among temporary files; None if it has no name.
    """
    return name or f"/proc/{pid_in_proc()}/fd/{fd}"


def pid_in_proc() -> str:
    """Return the number of this process in ``/proc``; "" if it has none there.

    It is another than the pid where that is of a namespace whose ``/proc`` is not mounted.
    """
    try:
        return os.readlink("/proc/self")
    except OSError:
        return ""


def _create_nameless(mark: str) -> int:
    """Return the descriptor of a new file without a name; -1 where there are no such files.

    Raises:
        OSError: there are no descriptors, or no memory.
    """
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return -1
    try:
        return os.memfd_create(mark)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):  # a sandbox refuses it
            return -1
        raise


def can_be_nameless() -> bool:
    """Whether a shared file needs no name here."""
    try:
        fd = _create_nameless("minloader")
    except OSError:  # there are such files, but nothing to make one of
        return True
    if fd < 0:
        return False
    os.close(fd)
    return True


def unlink(path: str) -> None:
    """Remove the name of a shared file, if it has one.

    Parent and workers race to it when all of them end at once.
    """
    if not path.startswith("/proc/"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def is_there(path: str, mark: str) -> bool:
    """Whether a path still leads to the shared file that it was given for."""
    try:
        return mark in os.readlink(path)  # /memfd:minloader-... (deleted)
    except OSError as error:
        return error.errno == errno.EINVAL  # no link: the mark is in the path


def check_access(path: str) -> None:
    """Look whether the system lets this process open files of the loader's.

    Raises:
        PermissionError: it does not.
    """
    if path.startswith("/proc/"):
        try:
            os.stat(path)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise PermissionError(
                f"{path} may not be opened: the loader's process has changed its user, or may not "
                "be looked into (prctl PR_SET_DUMPABLE); make the Loader in a process that has had "
                "its user from the start, or without worker processes"
            ) from error


def open_shared(path: str, mark: str, flags: int) -> int:
    """Open a shared file of any process and return a descriptor.

    Raises:
        OSError: it is closed, or belongs to another machine, or to a process that may not be looked
            into.
    """
    check_access(path)
    if is_there(path, mark):  # else not to be opened: a pipe would block us
        fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
        if is_there(path, mark):
            return fd
        os.close(fd)  # its owner closed it just now, and may have opened another file
    raise FileNotFoundError(f"{path} is gone, or now holds something else")


# The mmap module keeps a descriptor for each mapping, which would be one for each slot.
libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if libc is not None:
    _SIZE, _FLAG = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, _SIZE, _FLAG, _FLAG, _FLAG, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, _SIZE)


class _Anchor:
    __slots__ = ("__weakref__",)


def on_finalize(owner: Any, function: Callable[..., object], *args: Any) -> None:
    """Call a function when an object is gone, and every finalizer that could reach it has run.

    The collector calls the weak references of a cycle before the finalizers in it, which may still
    look at a batch. So the reference is to an object of which the collector does not know: it goes
    when its owner is taken apart.
    """
    owner.anchor = anchor = _Anchor()
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(anchor))
    weakref.finalize(anchor, function, *args).atexit = False


class SharedMapping:
    """A file mapped into this process, from its first byte, for as long as anything uses it."""

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
        on_finalize(self, libc.munmap, address, size)

    def lease(self) -> Any:
        """Return a new object over the memory that lives as long as any view made of it.

        It is a ctypes array. A memoryview would die before the arrays that were made from it.
        """
        owner: Any = self._type.from_address(self.address)
        owner.mapping = self
        return owner


class SlotAddress(NamedTuple):
    """What a task says about the slot that was lent to it.

    Attributes:
        path: of the slot's file.
        mark: of that file.
        size: bytes that the file has.
        limit: bytes that it may grow to.
        closed: how many slots the parent has closed so far, for the worker to notice.
    """

    path: str
    mark: str
    size: int
    limit: int
    closed: int
