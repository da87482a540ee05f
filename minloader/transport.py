"""What crosses between parent and workers: the job shipped once, items down, batches back.

*Shipping*: an object is serialized once into a file without a name (Linux: ``memfd``), however
many processes load it, now or later. Its large buffers lie in that file outside the pickle
stream and are mapped copy-on-write: processes share the pages until one writes to its own.

*Packing*: a small message becomes bytes by plain pickle where that works and cloudpickle where
it does not. Classes and functions of ``__main__`` travel down by value, because workers never
import the parent's main module, and back by name, because the parent has the originals: so
``isinstance`` holds in both places and the parent's classes are never rebuilt.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

__all__ = ["Cargo", "Shipment", "find_culprit", "pack", "pack_error", "unpack"]

LARGE = 16 * 1024
"""Bytes from which a buffer is mapped rather than copied into each worker: four pages, where
sharing starts to outweigh a view object and the padding to a cache line."""

MOST_FAILURES = 200
"""How many parts that cannot be pickled are looked into for the one at fault. Each was pickled
with all that is below it: an object that makes its parts anew would have endlessly many."""

ALIGN = 64
"""Bytes; the alignment numpy gives its own arrays, a cache line."""

unpack = pickle.loads
"""Undoes :func:`pack`; what cloudpickle wrote needs plain pickle only to be read."""


def _is_main_global(obj: Any) -> bool:
    """Whether ``__main__`` holds this very class or function under its own name."""
    name = getattr(obj, "__qualname__", None)
    return (
        getattr(obj, "__module__", None) == "__main__"
        and name is not None
        and vars(sys.modules["__main__"]).get(name) is obj
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Cloudpickle that knows in which of the two directions it writes."""

    def __init__(
        self,
        file: Any,
        *,
        down: bool,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.down = down
        self.main_globals: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and _is_main_global(obj):
            if not self.down:
                return obj.__qualname__  # a string means: by name, from obj.__module__
            self.main_globals[obj.__qualname__] = obj
        return super().reducer_override(obj)


def pack(obj: Any, *, down: bool) -> bytes:
    """Serializes a message.

    Args:
        obj: the message.
        down: True from parent to worker, False on the way back.

    Raises:
        Exception: whatever pickling raised, when cloudpickle cannot do it either.
    """
    plain_error: Exception | None = None
    try:
        payload = pickle.dumps(obj, 5)
        # Plain pickle refers to __main__ by name, which only the way back may do. A mere
        # string "__main__" in the data costs the slower pickler, nothing else.
        if not down or b"__main__" not in payload:
            return payload
    except Exception as error:  # lambdas, local classes: cloudpickle's job
        plain_error = error
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, down=down).dump(obj)
    except Exception as error:
        raise error from plain_error
    return buffer.getvalue()


def _bare_error(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    # Past the class's own __init__, and past a __setattr__ that refuses (frozen dataclasses).
    _builtin_base(cls).__init__(error, *args)
    error.__dict__.update(state)
    return error


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


class _Bare:
    """Pickles to an exception that is rebuilt without calling its ``__init__``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        def portable(value: Any) -> bool:
            return _pack_as(value, type(value)) is not None

        error = self.error
        # Not error.args: those of an OSError lack its filename.
        args: Any = _builtin_base(type(error)).__reduce__(error)[1]
        args = tuple(arg if portable(arg) else repr(arg) for arg in args)
        state = {name: value for name, value in vars(error).items() if portable(value)}
        return _bare_error, (type(error), args, state)


def pack_error(error: BaseException) -> bytes | None:
    """Serializes an exception such that it can be loaded again, or returns None.

    An exception whose ``__init__`` needs other arguments than it passed on fails to unpickle
    (cpython #120810); such a one is rebuilt without ``__init__``. Attributes that cannot be
    pickled are left out. Each form is tried out here, in the worker.
    """
    return _pack_as(error, type(error)) or _pack_as(_Bare(error), type(error))


def _pack_as(form: Any, cls: type) -> bytes | None:
    """The packed form, if what it unpacks to is of the class."""
    try:
        payload = pack(form, down=False)
        return payload if type(unpack(payload)) is cls else None
    except Exception:  # user code of any kind ran; not being able to is an answer
        return None


class _Nowhere(io.RawIOBase):
    """A file that forgets: pickling into it tells whether pickling works."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def _pickling_error(obj: Any) -> Exception | None:
    try:
        # Out-of-band buffers are dropped: trying 400 MB must not take 400 MB.
        _Pickler(_Nowhere(), down=True, buffer_callback=lambda buffer: None).dump(obj)
    except Exception as error:
        return error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The pieces an object is pickled from, each with how one would write it in code."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield f" (closure variable {name!r})", cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f" (global variable {name!r})", obj.__globals__[name]
    else:
        try:
            state = obj.__reduce_ex__(5)[2]
        except Exception:  # it cannot be taken apart: it is itself the piece at fault
            return
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                yield from ((f".{name}", value) for name, value in part.items())


def find_culprit(obj: Any, path: str) -> tuple[str, Any, Exception] | None:
    """Finds a part of an object that cannot be pickled though all its own parts can.

    Args:
        obj: what to look into.
        path: how the object is called, "dataset".

    Returns:
        The part's path ("dataset.files[3].lock"), the part and its error, the nearest such part
        if there are several; None if all is well.
    """
    error = _pickling_error(obj)
    if error is None:
        return None
    found = [(path, obj, error)]  # breadth first; all kept alive, so that no id is used again
    seen = {id(obj)}
    failures = 0
    for path, obj, error in found:
        innermost = True
        for suffix, part in _parts(obj):
            if failures == MOST_FAILURES:
                innermost = False  # for all we know
                break
            part_error = _pickling_error(part)
            if part_error is None:
                continue
            innermost = False
            failures += 1
            if id(part) not in seen:
                seen.add(id(part))
                found.append((path + suffix, part, part_error))
        if innermost:
            return path, obj, error
    return found[0]


class _ShipPickler(_Pickler):
    """Keeps large buffers out of the stream."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, down=True, buffer_callback=self._keep)
        self.buffers: list[memoryview] = []
        self.blobs: list[bytes] = []
        self._blob_index: dict[int, int] = {}

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True  # stay in the stream
        self.buffers.append(view)
        return False

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
        return super().reducer_override(obj)


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


class _ShipUnpickler(pickle.Unpickler):
    def __init__(self, mapping: mmap.mmap, cargo: Cargo, *, forever: bool) -> None:
        spans, blobs = pickle.loads(memoryview(mapping)[cargo.index :])
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


@dataclass(frozen=True)
class Cargo:
    """Where a shipped object lies, for any process of this machine to load. Small, picklable.

    Attributes:
        path: file to map. Without a name of its own, it is ``/proc/<pid>/fd/<n>``.
        inode: of that file: paths under ``/proc`` are used again for other files.
        index: offset in bytes of the table that says where the buffers lie.
        named: whether the file has a name, which somebody must unlink.
    """

    path: str
    inode: int
    index: int
    named: bool

    def exists(self) -> bool:
        """Whether the shipment is still there."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False

    def load(self, *, forever: bool) -> Any:
        """Maps and unpickles the object.

        Args:
            forever: True if this process will need the object as long as it lives. Only then
                can bytes objects be mapped rather than copied.

        Raises:
            FileNotFoundError: the shipment is gone, or the process is on another machine.
        """
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            if os.fstat(fd).st_ino != self.inode:
                raise FileNotFoundError(f"{self.path} now holds something else")
            mapping = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        unpickler = _ShipUnpickler(mapping, self, forever=forever)
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


class Shipment:
    """Owns the file of an object that was serialized for other processes.

    Args:
        obj: what to serialize, once, here and now.

    Raises:
        Exception: whatever pickling raised.
    """

    def __init__(self, obj: Any) -> None:
        self._pid = os.getpid()
        self._fd, self._name = _open_anonymous()
        try:
            with open(self._fd, "wb", closefd=False) as file:
                self._index = _write(obj, file)
            self._inode = os.fstat(self._fd).st_ino
        except BaseException:
            self.close()
            raise

    @property
    def cargo(self) -> Cargo:
        """Its address, valid until :meth:`close`; in a forked child, through the child."""
        path = self._name or f"/proc/{os.getpid()}/fd/{self._fd}"
        return Cargo(path, self._inode, self._index, self._name is not None)

    def close(self) -> None:
        """Lets the file go. What is mapped already stays usable."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        if self._name is not None and os.getpid() == self._pid:
            _unlink(self._name)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # parent and workers race to it when all end at once


def _open_anonymous() -> tuple[int, str | None]:
    """A new file to map: a descriptor, and a name where there are no files without one."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minloader")
        if os.path.exists(f"/proc/self/fd/{fd}"):
            return fd, None
        os.close(fd)  # /proc is not mounted: nobody could open it
    return tempfile.mkstemp(prefix="minloader-")


def _write(obj: Any, file: io.BufferedWriter) -> int:
    """Writes stream, buffers and table, and returns where the table begins."""
    pickler = _ShipPickler(file)
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
