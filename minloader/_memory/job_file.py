"""The job shipped once: how a dataset reaches any number of workers.

An object is serialized once into a file without a name (Linux: ``memfd``), however many
processes load it, now or later. Its large buffers lie in that file outside the pickle stream
and are mapped copy-on-write: processes share the pages until one writes to its own.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import mmap
import os
import pickle
import secrets
import stat
import struct
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from minloader._memory.files import ALIGN, LARGE, open_anonymous
from minloader._memory.pickling import Pickler, is_plain_tensor


class _JobPickler(Pickler):
    """Keeps large buffers out of the stream."""

    def __init__(self, file: Any) -> None:
        self.buffers: list[memoryview] = []
        # No method: the pickler, and so what it keeps, would live until a cycle is found.
        super().__init__(file, down=True, buffer_callback=partial(_keep_large, self.buffers))
        self.blobs: list[bytes] = []
        self._blob_index: dict[int, int] = {}
        self._storages: dict[tuple[int, int], Any] = {}
        self.descriptors: list[int] = []  # of memory that is shared as it is

    # The C pickler asks this before it writes a bytes object in-band, and nothing else does.
    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not bytes or len(obj) < LARGE:
            return None
        if id(obj) not in self._blob_index:
            self._blob_index[id(obj)] = len(self.blobs)
            self.blobs.append(obj)
        return self._blob_index[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "numpy" and type(obj).__name__ in ("ndarray", "memmap"):
            return _reduce_array(obj)
        if _is_tensor(obj):
            return self._reduce_tensor(obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        """A tensor as a view of its memory, which is shipped once for all that are views of it.

        Torch's own way is a copy for each, and in the stream.
        """
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        if place not in self._storages:
            send = self._share if storage.is_shared() else _bytes
            self._storages[place] = send(storage)
        shape = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _load_tensor, (self._storages[place], tensor.dtype, *shape)

    def _share(self, storage: Any) -> SharedMemory:
        """Memory that somebody has shared on purpose: what one writes to it all others see."""
        strategy = sys.modules["torch"].multiprocessing.get_sharing_strategy()
        if strategy != "file_descriptor" or not os.path.exists("/proc/self/fd"):
            raise TypeError(
                f"a shared tensor cannot be sent with torch's strategy {strategy!r} here; "
                "set_sharing_strategy('file_descriptor') on Linux, or clone() it"
            )
        fd, size = storage._share_fd_cpu_()
        fd = os.dup(fd)  # that one is torch's
        self.descriptors.append(fd)
        return SharedMemory(f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino, size)


def _keep_large(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    view = buffer.raw()
    if view.nbytes < LARGE:
        return True  # stay in the stream
    buffers.append(view)
    return False


class SharedMemory(NamedTuple):
    """Memory of a tensor that processes share: a file to open, its inode and the bytes it has."""

    path: str
    inode: int
    size: int


def _bytes(storage: Any) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _is_tensor(obj: Any) -> bool:
    return (
        type(obj).__module__ == "torch" and type(obj).__name__ == "Tensor" and is_plain_tensor(obj)
    )


def _load_tensor(memory: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> Any:
    torch = importlib.import_module("torch")
    if isinstance(memory, SharedMemory):
        fd = _open(memory.path, memory.inode, os.O_RDWR)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, memory.size)
        finally:
            os.close(fd)
    else:
        storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _reduce_array(array: Any) -> Any:
    """How an array travels, where numpy's own way would read a whole file or copy the data."""
    import numpy as np

    if not array.flags.forc:
        # Only contiguous arrays leave the stream by themselves.
        if array.nbytes < LARGE or array.dtype.hasobject:
            return NotImplemented
        block = np.array(array)  # a plain array: of a memmap, the copy is none
        block.flags.writeable = array.flags.writeable
        return block.__reduce_ex__(5)
    if type(array).__name__ == "memmap" and array.filename and array.mode in ("r", "r+", "w+"):
        # A slice keeps the offset of what it is a slice of: find its own from the addresses.
        first = np.frombuffer(array._mmap, np.uint8).__array_interface__["data"][0]
        start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        offset = start + array.__array_interface__["data"][0] - first
        order = "C" if array.flags.c_contiguous else "F"
        mode = "r" if array.mode == "r" else "r+"
        return type(array), (array.filename, array.dtype, mode, offset, array.shape, order)
    return NotImplemented


# A bytes object keeps its data behind its own header, so it can only be mapped together with
# one. The layout is CPython's with a global lock; elsewhere, known by the size, bytes are copied.
_BYTES_HEADER = struct.Struct("nPnn")  # reference count, type, length, hash

_CAN_MAP_BYTES = (
    sys.implementation.name == "cpython" and bytes.__basicsize__ == _BYTES_HEADER.size + 1
)

_ENDLESS = 1 << 30

"""Reference count of a mapped bytes object: it is never freed, since no allocator owns it."""


def _map_bytes(mapping: mmap.mmap, start: int, size: int) -> bytes:
    """Makes the data at ``start`` a bytes object in place. The mapping must never go away."""
    import ctypes

    header = start - _BYTES_HEADER.size
    _BYTES_HEADER.pack_into(mapping, header, _ENDLESS, id(bytes), size, -1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, header))
    blob: bytes = ctypes.cast(address, ctypes.py_object).value
    return blob


class _JobUnpickler(pickle.Unpickler):
    def __init__(self, mapping: mmap.mmap, address: JobAddress, *, forever: bool) -> None:
        spans, blobs = pickle.loads(memoryview(mapping)[address.index :])
        view = memoryview(mapping)
        super().__init__(mapping, buffers=[view[start:stop] for start, stop in spans])
        if forever and blobs and _CAN_MAP_BYTES:
            import ctypes

            # Mapped bytes may outlive every other object, even at interpreter exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
            self._blobs = [_map_bytes(mapping, start, stop - start) for start, stop in blobs]
        else:
            self._blobs = [bytes(view[start:stop]) for start, stop in blobs]

    def persistent_load(self, pid: int) -> bytes:
        return self._blobs[pid]


def _open(path: str, inode: int, flags: int) -> int:
    fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise FileNotFoundError(f"{path} now holds something else")
    return fd


@dataclass(frozen=True)
class JobAddress:
    """Where a shipped object lies, for any process of this machine to load. Small, picklable.

    Attributes:
        path: file to map. Without a name of its own, it is ``/proc/<pid>/fd/<n>``.
        inode: of that file: paths under ``/proc`` are used again for other files.
        index: offset in bytes of the table that says where the buffers lie.
        named: whether the file has a name, which somebody must unlink.
        size: bytes of the file.
        token: what it ends with, and nobody can guess: the proof that a file is this one, and
            that whoever asks for it elsewhere (``job_server.py``) was sent by its owner.
    """

    path: str
    inode: int
    index: int
    named: bool
    size: int
    token: bytes

    def exists(self) -> bool:
        """Whether the job_file is still there."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return status.st_ino == self.inode and stat.S_ISREG(status.st_mode)

    def load(self, *, forever: bool) -> Any:
        """Maps and unpickles the object.

        Args:
            forever: True if this process will need the object as long as it lives. Only then
                can bytes objects be mapped rather than copied.

        Raises:
            OSError: the job_file is gone, or the process is on another machine.
        """
        return self.unpickle(self.map(), forever=forever)

    def map(self) -> mmap.mmap:
        """Its file, copy-on-write. On another machine the path may be that of any other file.

        Raises:
            OSError: it is not here.
        """
        if not self.exists():  # not to be opened then: it may be a pipe, or a device
            raise FileNotFoundError(f"{self.path} is gone, or now holds something else")
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            mapping = mmap.mmap(fd, self.size, access=mmap.ACCESS_COPY)
        except ValueError as error:  # it is smaller
            raise FileNotFoundError(f"{self.path} now holds something else") from error
        finally:
            os.close(fd)
        if mapping[-len(self.token) :] != self.token:
            raise FileNotFoundError(f"{self.path} now holds something else")
        return mapping

    def unpickle(self, mapping: mmap.mmap, *, forever: bool) -> Any:
        """The object in a private mapping of the file, or of a copy; see :meth:`load`."""
        unpickler = _JobUnpickler(mapping, self, forever=forever)
        obj = unpickler.load()
        # Known under their names here too, these classes and functions go back by name, and
        # can be the target of a process that the worker itself starts.
        main = vars(sys.modules["__main__"])
        for name, value in unpickler.load().items():
            main.setdefault(name, value)
        return obj

    def unlink(self) -> None:
        """Removes the file's name, if it has one."""
        if self.named:
            _unlink(self.path)


class JobFile:
    """Owns the file of an object that was serialized for other processes.

    Args:
        obj: what to serialize, once, here and now.

    Attributes:
        size: bytes it takes.

    Raises:
        Exception: whatever pickling raised.
    """

    def __init__(self, obj: Any) -> None:
        self._pid = os.getpid()
        self._token = secrets.token_bytes(32)
        self._descriptors: list[int] = []
        self._fd, self._name = open_anonymous()
        try:
            with open(self._fd, "wb", closefd=False) as file:
                pickler = _JobPickler(file)
                self._descriptors = pickler.descriptors
                self._index = _write(obj, pickler, file)
                file.write(self._token)
            self._inode, self.size = os.fstat(self._fd).st_ino, os.fstat(self._fd).st_size
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> JobAddress:
        """Its address, valid until :meth:`close`; in a forked child, through the child."""
        path = self._name or f"/proc/{os.getpid()}/fd/{self._fd}"
        named = self._name is not None
        return JobAddress(path, self._inode, self._index, named, self.size, self._token)

    def duplicate(self) -> int:
        """Another descriptor of the file, for the caller to close."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Lets the file go. What is mapped already stays usable."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        for each in self._descriptors:
            os.close(each)
        if self._name is not None and os.getpid() == self._pid:
            _unlink(self._name)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # parent and workers race to it when all end at once


def _write(obj: Any, pickler: _JobPickler, file: io.BufferedWriter) -> int:
    """Writes stream, buffers and table, and returns where the table begins."""
    pickler.dump(obj)
    # A second load() of the same stream: what the object needs of __main__, by name.
    pickler.dump(pickler.main_globals)

    def place(data: memoryview | bytes, room_before: int, end: bytes) -> tuple[int, int]:
        file.write(bytes(-(file.tell() + room_before) % ALIGN + room_before))
        start = file.tell()
        file.write(data)
        file.write(end)
        return start, start + len(data)

    spans = [place(view.cast("B"), 0, b"") for view in pickler.buffers]
    blobs = [place(blob, _BYTES_HEADER.size, b"\0") for blob in pickler.blobs]
    index = file.tell()
    pickle.dump((spans, blobs), file, protocol=5)
    return index


class _HashFile:
    """A file of which the hash is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


def _write_place(file: _HashFile, kept: list[Any], buffer: pickle.PickleBuffer) -> bool:
    import numpy as np

    view = buffer.raw()
    if view.nbytes < LARGE:
        return True
    array = np.frombuffer(view, np.uint8)
    kept.append(buffer)
    file.write(b"%d %d" % (array.__array_interface__["data"][0], array.nbytes))
    return False


class _Fingerprinter(Pickler):
    """Hashes what shipping would write, but of what is large only where it is."""

    def __init__(self, file: _HashFile) -> None:
        self.kept: list[Any] = []  # such that no other thing can be in its place
        place = partial(_write_place, file, self.kept)  # no method, as above
        super().__init__(file, down=True, buffer_callback=place)

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not bytes or len(obj) < LARGE:
            return None
        self.kept.append(obj)
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "numpy" and type(obj).__name__ in ("ndarray", "memmap"):
            if obj.nbytes < LARGE or obj.dtype.hasobject:
                return NotImplemented
            address = obj.__array_interface__["data"][0]
            return self._place(obj, address, obj.shape, obj.strides, obj.dtype.str)
        if _is_tensor(obj):
            # Torch counts the changes in place; those of shared memory are seen anyway.
            version = None if obj.is_inference() or obj.is_shared() else obj._version
            return self._place(obj, obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, version)
        return super().reducer_override(obj)

    def _place(self, obj: Any, *place: Any) -> Any:
        self.kept.append(obj)
        return str, (repr(place),)


def fingerprint(obj: Any) -> tuple[bytes, list[Any]]:
    """What changes when an object does, but for the contents of large arrays that stay where they
    are; it takes as long as to pickle all else.

    Returns:
        The fingerprint, and what must be kept alive for as long as it is to be compared.

    Raises:
        Exception: whatever pickling raised.
    """
    file = _HashFile()
    pickler = _Fingerprinter(file)
    pickler.dump(obj)
    return file.hash.digest(), pickler.kept
