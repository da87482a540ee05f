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
from minloader._memory.pickling import Pickler
from minloader._memory.reducers import IN_JOBS, JobMemory, Reducers, is_told, may_be_inherited

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
        memory: what its arrays and tensors have in common.
        generators: random generators that are copied, which are those of no module.
    """

    def __init__(self, file: Any, start_method: str | None, keep: Any = _keep_large) -> None:
        self.buffers: list[memoryview] = []
        # A method would be a reference cycle: the pickler, and with it the buffers, would live
        # until the garbage collector finds it.
        keep = partial(keep, self.buffers)
        self.memory = JobMemory(is_same_machine=start_method is not None)
        reducers = Reducers(IN_JOBS, self.memory)
        super().__init__(file, down=True, reducers=reducers, buffer_callback=keep)
        self.inherited: dict[int, tuple[int, Any]] = {}
        self._ordinary: set[type] = set()  # types of what stays in the stream, and is not noted
        self._start_method = start_method
        self.modules: set[str] = set()
        self.generators: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind in self._ordinary:
            return None
        may_be_one = may_be_inherited(kind) and not is_told(kind)
        if not may_be_one and not _is_generator(kind):
            self._ordinary.add(kind)
        if not may_be_one:
            return None
        from minloader._memory.inherited import check, must_be_inherited  # in few jobs

        if not must_be_inherited(obj):
            return None
        if id(obj) not in self.inherited:
            check(obj, self._start_method)
        return self.inherited.setdefault(id(obj), (len(self.inherited), obj))[0]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            self.modules.add(getattr(obj, "__module__", None) or "builtins")
        elif isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        reduced = super().reducer_override(obj)
        kind = type(obj)
        if kind not in self._ordinary and _is_generator(kind) and not isinstance(reduced, str):
            self.generators.append(obj)  # a string stands for the one of that name in a module
        return reduced


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
            sizes = [(base.nbytes, size) for base, size in pickler.memory.copies.values()]
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
