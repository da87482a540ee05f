"""The job file: how a dataset reaches any number of worker processes.

An object is serialized once, into a shared file, however many processes load it, now or later. The
file holds, in this order:

    | pickle of the object | its names in __main__ | large buffers | table |

Processes map the file copy-on-write: they share its pages until one of them writes to its own, and
what is large is not copied. The table says where in the file the buffers lie.

Forked processes need no file: they have the object from their parent (:class:`ForkedJob`).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from minloader._memory.files import ALIGN, LARGE, SharedFile, is_there, open_shared, unlink
from minloader._memory.inherited import check, is_shared, may_be_inherited, must_be_inherited
from minloader._memory.pickling import Pickler, order_in_memory, transpose_back, view_as
from minloader._memory.shared_arrays import (
    Mappings,
    address_of,
    check_mapped,
    memmap_of,
    reduce_shared,
    view_of,
)
from minloader._memory.tensors import (
    bytes_of,
    is_elsewhere,
    is_plain_tensor,
    load_storage,
    load_tensor,
    reduce_elsewhere,
    reduce_tensor,
    reduce_typed_storage,
    with_attributes,
)

GENERATORS = (
    ("random", "Random"),
    ("numpy.random._generator", "Generator"),
    ("numpy.random.mtrand", "RandomState"),
    ("torch._C", "Generator"),
)
"""The classes of random generators, by module and name, such that none need be imported."""


def _keep_large(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    view = buffer.raw()
    if view.nbytes < LARGE:
        return True  # stay in the stream
    buffers.append(view)
    return False


def _is_generator(kind: type) -> bool:
    return any((base.__module__, base.__name__) in GENERATORS for base in kind.__mro__)


class JobPickler(Pickler):
    """A pickler that keeps what is large out of the stream, and what must be inherited.

    Args:
        file: the stream.
        start_method: of the processes that will load it; None if this one does not start them.
        keep: keeps a large buffer in the list; returns whether it is to be in the stream.

    Attributes:
        buffers: large buffers, in the order in which the stream asks for them.
        inherited: objects that must be inherited, by their id; the stream has their numbers.
        modules: names of those that have the classes and functions which the stream refers to.
        copies: arrays of which views are copied, by their id, each with the bytes of these views.
        generators: random generators that are copied, which are those of no module.
    """

    def __init__(self, file: Any, start_method: str | None, keep: Any = _keep_large) -> None:
        self.buffers: list[memoryview] = []
        # A method would be a reference cycle: the pickler, and with it the buffers, would live
        # until the garbage collector finds it.
        super().__init__(file, down=True, buffer_callback=partial(keep, self.buffers))
        self.inherited: dict[int, tuple[int, Any]] = {}
        self._ordinary: set[type] = set()  # types of what stays in the stream, and is not noted
        self._start_method = start_method
        self.modules: set[str] = set()
        self.copies: dict[int, tuple[Any, int]] = {}
        self.generators: list[Any] = []
        self._storages: dict[tuple[int, int], Any] = {}
        self._mappings = Mappings()

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind in self._ordinary:
            return None
        if not may_be_inherited(kind) and not _is_generator(kind):
            self._ordinary.add(kind)
        if not must_be_inherited(obj):
            return None
        if id(obj) not in self.inherited:
            check(obj, self._start_method)
        return self.inherited.setdefault(id(obj), (len(self.inherited), obj))[0]

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "memmap"):
            return self.reduce_array(obj)
        if hasattr(kind, "__array_finalize__") and _is_pickled_by_numpy(kind):
            return view_as, (_plain(obj), kind)
        if kind.__module__ == "torch" and kind.__name__ == "Tensor":
            return self.reduce_tensor(obj)
        if kind.__module__ == "torch.storage":
            if kind.__name__ == "TypedStorage":
                return reduce_typed_storage(obj)
            if kind.__name__ == "UntypedStorage":
                return self.reduce_storage(obj)
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            self.modules.add(getattr(obj, "__module__", None) or "builtins")
        elif kind is types.ModuleType:
            self.modules.add(obj.__name__)
        if kind.__module__.startswith("polars.") and kind.__name__ == "DataFrame":
            return _reduce_frame(obj)
        reduced = super().reducer_override(obj)
        if kind not in self._ordinary and _is_generator(kind) and not isinstance(reduced, str):
            self.generators.append(obj)  # a string stands for the one of that name in a module
        return reduced

    def reduce_array(self, array: Any) -> Any:
        """Reduce an array, where numpy's own way would read a whole file or copy the data."""
        import numpy as np

        is_mapped = type(array).__name__ == "memmap" and array.filename is not None
        is_mapped = is_mapped and array.mode in ("r", "r+", "w+")
        has_gaps = not array.flags.forc and order_in_memory(array) is None
        is_same_machine = self._start_method is not None
        if has_gaps or not is_mapped:
            shared = reduce_shared(array, self._mappings, is_same_machine=is_same_machine)
            if shared is not None:
                return shared
        if array.dtype.kind in "mM":
            return view_as, (array.view(np.int64), array.dtype)
        if not array.flags.forc:
            # Only contiguous arrays leave the stream by themselves.
            if array.dtype.hasobject:
                return NotImplemented
            if type(array) is np.ndarray and array.nbytes >= LARGE:
                memory, offset = _span(array)
                if memory.nbytes < array.nbytes:  # it overlaps itself: sliding windows, broadcasts
                    view = array.dtype, array.shape, array.strides, array.flags.writeable
                    return view_of, (memory, offset, *view)
            if (axes := order_in_memory(array)) is not None:
                return transpose_back, (array.transpose(axes), axes)
            self._note_copy(array)
            if array.nbytes < LARGE:
                return NotImplemented
            block = np.array(array, order="C")  # a plain array: of a memmap, the copy is none
            block.flags.writeable = array.flags.writeable
            return block.__reduce_ex__(5)
        if is_mapped:
            return self._reduce_memmap(array)
        self._note_copy(array)
        if type(array) is not np.ndarray:  # of a memmap, numpy writes the data into the stream
            return view_as, (_plain(array), type(array))
        return NotImplemented

    def _reduce_memmap(self, array: Any) -> Any:
        """Reduce a contiguous ``numpy.memmap`` such that its file is mapped again."""
        import numpy as np

        check_mapped(array, array.filename, self._mappings)
        # A slice keeps the offset of what it is a slice of: find its own from the addresses.
        first = address_of(np.frombuffer(array._mmap, np.uint8))
        start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        offset = start + address_of(array) - first
        order = "C" if array.flags.c_contiguous else "F"
        mode = "r" if array.mode == "r" else "r+"
        file = self._mappings.file(
            os.fspath(array.filename),
            is_writable=mode == "r+",
            is_same_machine=self._start_method is not None,
        )
        place = array.dtype, offset, array.shape, order
        return memmap_of, (file, array.filename, mode, *place)

    def _note_copy(self, array: Any) -> None:
        base = array.base
        if type(base) is type(array):  # a view of another one
            _, size = self.copies.get(id(base), (base, 0))
            self.copies[id(base)] = base, size + array.nbytes

    def reduce_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor to a view of its memory, which is sent once for all views of it.

        Torch's own way would write a copy for each of them into the stream.
        """
        if tensor.requires_grad or not is_plain_tensor(tensor):
            return reduce_tensor(tensor)
        view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        memory = self._memory_of(tensor.untyped_storage())
        return with_attributes(tensor, (load_tensor, (memory, tensor.dtype, *view)))

    def reduce_storage(self, storage: Any) -> Any:
        """Reduce an untyped storage as those of tensors."""
        if is_elsewhere(storage):
            return reduce_elsewhere(storage)
        return load_storage, (self._memory_of(storage),)

    def _memory_of(self, storage: Any) -> Any:
        """Return the memory of a storage, as an array if it is not inherited.

        Once, however many have it.
        """
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            self._storages[key] = storage if is_shared(storage) else bytes_of(storage)
        return self._storages[key]


def _is_pickled_by_numpy(kind: type) -> bool:
    """Whether a class of arrays leaves to numpy how it is pickled, which would copy the data."""
    import numpy as np

    names = "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"
    return all(getattr(kind, name, None) is getattr(np.ndarray, name, None) for name in names)


def _plain(array: Any) -> Any:
    import numpy as np

    return array.view(np.ndarray)


def _reduce_frame(frame: Any) -> Any:
    """Reduce a polars frame to an Arrow table, whose columns are buffers that can be mapped.

    Polars' own way would write a copy into the stream. Without pyarrow, and for the few types of
    columns that would not come back as they are, it has to do.
    """
    polars = sys.modules["polars"]
    try:
        table = frame.to_arrow(compat_level=polars.CompatLevel.newest())
        comes_back = polars.from_arrow(table.slice(0, 0)).schema == frame.schema
    except Exception:  # no pyarrow, or a type that Arrow does not know
        return NotImplemented
    return (polars.from_arrow, (table,)) if comes_back else NotImplemented


def _span(array: Any) -> tuple[Any, int]:
    """Return the memory that an array spans, as one of bytes, and where its first element is."""
    import numpy as np

    steps = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    size = before + sum(step for step in steps if step > 0) + array.itemsize
    lowest = tuple(slice(-1, None) if step < 0 else slice(1) for step in steps)
    first = array[lowest].reshape(1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,)), before


class _JobUnpickler(pickle.Unpickler):
    def __init__(self, mapping: mmap.mmap, table_offset: int, inherited: Sequence[Any]) -> None:
        view = memoryview(mapping)
        spans = pickle.loads(view[table_offset:])
        super().__init__(mapping, buffers=[view[start:stop] for start, stop in spans])
        self._inherited = inherited

    def persistent_load(self, pid: int) -> Any:
        return self._inherited[pid]


@dataclass(frozen=True)
class JobAddress:
    """Where a job file is, for any process of this machine to load. Small, picklable.

    Attributes:
        path: of the file.
        mark: of the file.
        table_offset: bytes before the table that says where the buffers lie.
    """

    path: str
    mark: str
    table_offset: int

    def exists(self) -> bool:
        """Whether the job file is still there."""
        return is_there(self.path, self.mark)

    def remove(self) -> None:
        """Remove the name of the file, if it has one, in place of an owner that was killed."""
        unlink(self.path)

    def load(self, *, inherited: Sequence[Any] = ()) -> Any:
        """Map the job file and unpickle the object.

        Args:
            inherited: what this process has inherited of the job file's objects.

        Raises:
            OSError: the job file is gone, or the process is on another machine.
        """
        return self.unpickle(self.map(), inherited=inherited)

    def map(self) -> mmap.mmap:
        """Map the file copy-on-write.

        Raises:
            OSError: it is not here.
        """
        fd = open_shared(self.path, self.mark, os.O_RDONLY)
        try:
            return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def unpickle(self, mapping: mmap.mmap, *, inherited: Sequence[Any] = ()) -> Any:
        """Return the object in a private mapping of the file, or of a copy; see :meth:`load`."""
        unpickler = _JobUnpickler(mapping, self.table_offset, inherited)
        obj = unpickler.load()
        # Known under their names here too, these classes and functions go back by name, and
        # can be the target of a process that the worker itself starts.
        main = vars(sys.modules["__main__"])
        for name, value in unpickler.load().items():
            main.setdefault(name, value)
        return obj


class JobFile(SharedFile):
    """The file of an object that was serialized for other processes.

    Args:
        obj: what to serialize, once, here and now.
        start_method: how this process starts those that will load it; None if it does not.

    Attributes:
        size: bytes of the file.
        grown: bytes of the array whose views grew most on their way, and of these; (0, 0): none.
        inherited: those objects which each process that loads it must inherit.
        generators: random generators of which each process that loads it has a copy.
        modules: names of the modules that whoever loads the object needs.

    Raises:
        Exception: whatever pickling raised.
    """

    def __init__(self, obj: Any, start_method: str | None = None) -> None:
        super().__init__()
        try:
            with open(self.fd, "wb", closefd=False) as file:
                pickler = JobPickler(file, start_method)
                self.modules = pickler.modules
                self.generators = pickler.generators
                self._table_offset = _write(obj, pickler, file)
            self.size = os.fstat(self.fd).st_size
            sizes = [(base.nbytes, size) for base, size in pickler.copies.values()]
            self.grown = max(sizes, key=lambda each: each[1] - each[0], default=(0, 0))
            self.inherited = [each for _, each in pickler.inherited.values()]
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> JobAddress:
        """Its address, valid until :meth:`close`; in a forked child, through the child."""
        return JobAddress(self.path, self.mark, self._table_offset)

    def content(self) -> mmap.mmap:
        """Map the file, to be sent to where nobody can open it."""
        return mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ)


@dataclass(frozen=True, eq=False, repr=False)
class ForkedJob:
    """An object that forked processes have from their parent, as it is when they are forked.

    Nothing is pickled and nothing copied. It stands in for a :class:`JobFile` and for its address.

    Attributes:
        obj: the object itself.
        inherited: what must be handed on besides: nothing.
    """

    obj: Any
    inherited: ClassVar[list[Any]] = []

    @property
    def address(self) -> ForkedJob:
        """Itself: a fork has its arguments from its parent, too."""
        return self

    def load(self, *, inherited: Sequence[Any] = ()) -> Any:
        """Return the object, in a process that was forked."""
        return self.obj

    def remove(self) -> None:
        """Do nothing: there is no file."""

    def close(self) -> None:
        """Do nothing: there is no file."""


def _write(obj: Any, pickler: JobPickler, file: io.BufferedWriter) -> int:
    """Write streams, buffers and table; return where the table begins."""
    pickler.dump(obj)
    # A second load() of the same stream: what the object needs of __main__, by name.
    pickler.dump(pickler.main_globals)

    spans = []
    for view in pickler.buffers:
        file.write(bytes(-file.tell() % ALIGN))
        spans.append((file.tell(), file.tell() + view.nbytes))
        file.write(view)
    table_offset = file.tell()
    pickle.dump(spans, file, protocol=5)
    return table_offset
