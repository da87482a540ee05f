"""How messages become bytes: items on their way down to a worker, batches and errors back up.

*Items and errors* are pickled by plain pickle where that works and by cloudpickle where it does
not. Classes and functions of ``__main__`` are sent down by value, because workers never import the
parent's main module, and up by name, because the parent has the originals. So ``isinstance``
holds in both places, and the parent's classes are never made a second time.

*Batches* are pickled in the same way, but for their large buffers:

    batch ── BatchPacker.pack ──> PackedBatch(stream, buffers)
                                                    └─ (start, stop) in the slot, or the data
    PackedBatch, memory of the slot ── unpack_batch ──> batch, its arrays views of that memory
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import random
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from minloader._memory.decorated import (
    LRU_CACHE,
    MAIN,
    reduce_cached,
    reduce_cached_property,
    reduce_dispatching_method,
    reducer_by_value,
    reducer_of,
)
from minloader._memory.files import LARGE, SlotAddress
from minloader._memory.registered import with_registrations
from minloader._memory.slot_writer import NO_SLOT, NoSlot, SlotWriter, use
from minloader._memory.tensors import reduce_storage, reduce_tensor, reduce_typed_storage

unpack = pickle.loads
"""Undo :func:`pack`. What cloudpickle wrote can be read by plain pickle."""

OTHER_REDUCERS: dict[type, Callable[[Any], Any]] = {}
"""How objects of types are reduced whose own way, or cloudpickle's, does not do."""

MOST_NOTES = 20
"""How many notes an error of pickling keeps, half of them of the innermost levels."""


def _refuse_open_file(file: io.TextIOWrapper) -> Any:
    """Refuse what cloudpickle would send all the text of. Pickle refuses binary files."""
    if file in (sys.stdout, sys.stderr):
        return NotImplemented
    raise TypeError("cannot pickle '_io.TextIOWrapper' object: it is an open file")


OTHER_REDUCERS[io.TextIOWrapper] = _refuse_open_file


def _refuse_connection(connection: Connection) -> Any:
    """Refuse what plain pickle would send the mere number of the descriptor of."""
    raise TypeError("cannot pickle a connection: only a process that is started can be given it")


def _refer_to_generator(generator: Any) -> Any:
    """Refer to the generator of a module's functions by name; copy any other.

    ``from random import shuffle`` binds a method of it. A copy would not be seeded for each batch,
    and each worker would have the same one.
    """
    module = sys.modules[type(generator).__module__]
    names = [name for name, value in vars(module).items() if value is generator]
    return names[0] if names else NotImplemented


OTHER_REDUCERS[random.Random] = _refer_to_generator


def _code_of_file(filename: str, arguments: tuple[Any, ...]) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def _reduce_code(code: types.CodeType) -> Any:
    """Reduce code with the name of its file, which tracebacks, logs and stacks show.

    cloudpickle, from 3.1.3, writes ``<dynamic-code>`` in its place.
    """
    _, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code_of_file, (code.co_filename, arguments)


OTHER_REDUCERS[types.CodeType] = _reduce_code


def _reduce_lazy_import(lazy: Any) -> Any:
    """Reduce the object that a ``lazy import`` has bound a name to, until that is used.

    It is what it stands for: the module is imported here.
    """
    return _return, (lazy.resolve(),)


def _return(obj: Any) -> Any:
    return obj


if sys.version_info >= (3, 15):
    OTHER_REDUCERS[types.LazyImportType] = _reduce_lazy_import

OTHER_REDUCERS[functools.cached_property] = reduce_cached_property
OTHER_REDUCERS[functools.singledispatchmethod] = reduce_dispatching_method


def _is_by_value(obj: Any) -> bool:
    """Whether a class or function cannot be imported by its name."""
    return obj.__module__ in MAIN or "<locals>" in obj.__qualname__


def _is_main_global(obj: Any) -> bool:
    """Whether ``__main__`` holds this very class or function under its own name."""
    name = getattr(obj, "__qualname__", None)
    return (
        getattr(obj, "__module__", None) in MAIN
        and name is not None
        and vars(sys.modules["__main__"]).get(name) is obj
    )


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that knows in which of the two directions it writes.

    Attributes:
        main_globals: classes and functions of ``__main__`` that were sent, by their names.
    """

    def __init__(
        self, file: Any, protocol: int = 5, *, down: bool, table: Any = None, **options: Any
    ) -> None:
        if table is not None:
            self.dispatch_table = table  # now: it is read once, in the next line
        super().__init__(file, protocol, **options)
        numpy_random: Any = sys.modules.get("numpy.random")
        if hasattr(numpy_random, "RandomState"):  # else it is just being imported
            OTHER_REDUCERS[numpy_random.RandomState] = _refer_to_generator
        main = sys.modules["__main__"]
        if main.__name__ in MAIN:  # cloudpickle takes the second name for a module to import
            cloudpickle.register_pickle_by_value(main)
        self.down = down
        self.main_globals: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType, LRU_CACHE)):
            if _is_main_global(obj):
                self.main_globals[obj.__qualname__] = obj
                if not self.down:
                    return obj.__qualname__  # a string means: by name, from obj.__module__
            if isinstance(obj, LRU_CACHE):
                return reduce_cached(obj)
            reduce = reducer_by_value(obj)
            if reduce is not None and _is_by_value(obj):
                return reduce(obj)
            reduced = super().reducer_override(obj)
            if self.down and isinstance(obj, type) and _is_by_value(obj):
                return with_registrations(obj, reduced)
            return reduced
        # cloudpickle's own method leaves all other objects to its table; asking it takes longer.
        kind = type(obj)
        reducer = OTHER_REDUCERS.get(kind)
        if reducer is not None:
            return reducer(obj)
        reduce = reducer_of(kind) if self.down else None
        if reduce is None or kind in self.dispatch_table:
            return NotImplemented
        return reduce(obj)

    def dump(self, obj: Any) -> None:
        try:
            super().dump(obj)
        except Exception as error:
            shorten_notes(error)
            raise


def shorten_notes(error: BaseException) -> None:
    """Leave out most notes of an error of pickling, and of the one that it comes from.

    From CPython 3.14, each level of nesting adds a note, "when serializing …" (cpython #122213):
    60,000 lines if an object has no end.
    """
    for each in (error, error.__cause__):
        notes = getattr(each, "__notes__", None)
        if isinstance(notes, list) and len(notes) > MOST_NOTES:
            middle = MOST_NOTES // 2
            left_out = len(notes) - MOST_NOTES
            notes[middle:-middle] = [f"… {left_out} more levels …"]


_REDUCERS = ChainMap({Connection: _refuse_connection}, cloudpickle.Pickler.dispatch_table)


def pack(obj: Any, *, down: bool) -> bytes:
    """Serialize a message.

    Args:
        obj: the message.
        down: True from parent to worker, False on the way back.

    Raises:
        Exception: whatever pickling raised, when cloudpickle cannot do it either.
    """
    plain_error: Exception | None = None
    try:
        payload = pickle.dumps(obj, 5)
        # Plain pickle refers to __main__ by name, which only the way back may do, copies the
        # generators of modules, and refuses no connection. A mere string of such a name costs the
        # slower pickler, nothing else.
        special = [b"multiprocessing.connection", *([b"main__", b"random"] if down else [])]
        if not any(name in payload for name in special):
            return payload
    except Exception as error:  # lambdas, local classes: cloudpickle's job
        shorten_notes(error)
        plain_error = error
    buffer = io.BytesIO()
    try:
        Pickler(buffer, down=down, table=_REDUCERS).dump(obj)
    except Exception as error:
        raise error from plain_error
    finally:
        plain_error = None  # its traceback leads here: both would stay, and whatever called
    return buffer.getvalue()


class PackedBatch(NamedTuple):
    """A packed batch.

    Attributes:
        stream: the pickle of the batch; empty if that is the last buffer.
        buffers: of its large arrays: start and stop in the slot, or the data itself.
    """

    stream: bytes
    buffers: list[Any]


_PackOne = Callable[[Any], bytes | PackedBatch]


class BatchPacker:
    """Packs the batches of one worker, one at a time.

    Args:
        without_slot: takes the large buffers of a task that has no slot.
    """

    def __init__(self, without_slot: NoSlot = NO_SLOT) -> None:
        self._without_slot = without_slot
        self._writer = without_slot  # of the present task
        self._reducers: dict[type, Any] = {}
        self._basis: Any = None  # what the reducers were made from
        self._arrays: list[type] = []  # numpy's types, if it is imported
        self._pack_batch: _PackOne | None = None  # for the next batch of the present task

    def open(self, address: SlotAddress | None) -> NoSlot:
        """Begin with a task; return what takes its large buffers, and arrays made by ``empty``."""
        if address is not None:
            writer = self._writer = SlotWriter(address)
            use(writer)
        return self._writer

    def close(self) -> None:
        """End the task, and let its slot go."""
        self._writer.close()
        self._writer = self._without_slot
        self._pack_batch = None

    def pack(self, batch: Any) -> bytes | PackedBatch:
        """Serialize a batch; return bytes if all of it is in the stream.

        Raises:
            Exception: whatever pickling raised, when cloudpickle cannot do it either.
        """
        self._renew_reducers()
        pack_batch = self._pack_batch
        self._pack_batch = None  # an error may leave it in the middle
        try:
            if pack_batch is None:
                pack_batch = _batch_packer(pickle.Pickler, self._table(), self._writer)
            packed = pack_batch(batch)
            self._pack_batch = pack_batch
            return packed
        except Exception as plain_error:
            shorten_notes(plain_error)
            # Buffers that were put into the slot already are lost room, until the task ends.
            table = ChainMap(self._table(), cloudpickle.Pickler.dispatch_table)
            make_pickler = partial(Pickler, down=False, table=table)
            try:
                return _batch_packer(make_pickler, table, self._writer)(batch)
            except Exception as error:
                raise error from plain_error

    def _table(self) -> dict[type, Any]:
        """Return the reducers, those of arrays for the present task.

        Kept here, they would make a cycle: its buffers would wait for the garbage collector.
        """
        return self._reducers | dict.fromkeys(self._arrays, partial(_reduce_array, self._writer))

    def _renew_reducers(self) -> None:
        """Have objects reduced as registered, but tensors as is best for slots.

        The table is made anew when somebody registers more, or imports more. A plain dict is what
        the pickler looks up fastest.
        """
        numpy: Any = sys.modules.get("numpy")
        torch: Any = sys.modules.get("torch")
        basis: Any = len(copyreg.dispatch_table), numpy, torch
        if self._basis != basis:
            table = {**copyreg.dispatch_table, Connection: _refuse_connection}
            if hasattr(numpy, "ndarray"):
                self._arrays = [numpy.ndarray, numpy.memmap]
            if hasattr(torch, "UntypedStorage"):  # which it gets after its Tensor
                table[torch.Tensor] = reduce_tensor
                table[torch.UntypedStorage] = reduce_storage
                table[torch.TypedStorage] = reduce_typed_storage
            elif torch is not None:  # it is just being imported
                basis = None
            self._basis = basis
            self._reducers = table
            self._pack_batch = None


def _reduce_array(writer: NoSlot, array: Any) -> Any:
    """Reduce an array such that its data is one writable buffer, for the user to change.

    numpy itself leaves only contiguous arrays out of the stream, and never a memmap; and what
    it writes of a type takes longer than small arrays do. The axes keep their order in memory.
    """
    dtype = array.dtype
    flags = array.flags
    is_small = array.nbytes < LARGE and dtype.isnative and is_plain(dtype)
    is_small = is_small and dtype.metadata is None  # such as the names of h5py's enumerations
    axes = None if flags.c_contiguous else order_in_memory(array)
    if is_small and axes is None:
        return sys.modules["numpy"].ndarray, (array.shape, dtype.char, bytearray(array.tobytes()))
    whole = flags.forc and flags.writeable and type(array).__name__ == "ndarray"
    if dtype.kind in "mM":  # numpy writes datetime64 and timedelta64 into the stream
        return view_as, (array.view("i8"), dtype)
    if dtype.hasobject or (whole and not is_small):
        return array.__reduce_ex__(5)
    if axes is not None:
        return transpose_back, (array.transpose(axes), axes)
    block = writer.empty(array.shape, dtype)
    block[...] = array
    return block.__reduce_ex__(5)


def _batch_packer(make_pickler: Any, table: Any, writer: NoSlot) -> _PackOne:
    """Return what packs batches, one after another: with one pickler, which is slow to make."""
    written: list[bytes] = []
    buffers: list[Any] = []

    def put(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        place = writer.put(data) if data.nbytes >= LARGE else None
        if place is not None:
            buffers.append(place)
        return place is None  # whether it stays in the stream

    file = types.SimpleNamespace(write=written.append)  # quicker than a BytesIO to begin anew
    pickler = make_pickler(file, 5, buffer_callback=put)
    pickler.dispatch_table = table

    def pack_batch(batch: Any) -> bytes | PackedBatch:
        try:
            pickler.dump(batch)
            stream = written[0] if len(written) == 1 else b"".join(written)
            if len(stream) >= LARGE:  # many strings, say
                place = writer.put(memoryview(stream))
                if place is not None:
                    return PackedBatch(b"", [*buffers, place])
            return PackedBatch(stream, buffers.copy()) if buffers else stream
        finally:
            pickler.clear_memo()  # which has all parts of the batch
            buffers.clear()
            written.clear()

    return pack_batch


def size_in_band(outcome: Any) -> int:
    """Return how many bytes of a packed batch are not in its slot; 0 of anything else."""
    if isinstance(outcome, bytes):
        return len(outcome)
    if not isinstance(outcome, PackedBatch):
        return 0
    return len(outcome.stream) + sum(
        len(each) for each in outcome.buffers if type(each) is not tuple
    )


def unpack_batch(packed: PackedBatch, memory: Any) -> Any:
    """Undo :meth:`BatchPacker.pack`, without copying what lies in the slot.

    Args:
        packed: the packed batch.
        memory: the leased memory of its slot; None if it had none.
    """
    view = memoryview(b"" if memory is None else memory).cast("B")
    buffers = [view[slice(*data)] if type(data) is tuple else data for data in packed.buffers]
    stream = packed.stream or buffers.pop()
    return pickle.loads(stream, buffers=buffers)


_PLAIN = frozenset("?bBhHiIlLqQefdFD")


def is_plain(dtype: Any) -> bool:
    """Whether numpy's one-letter code is enough to describe a type, and torch has tensors of it."""
    return bool(dtype.char in _PLAIN and dtype.isbuiltin < 2)  # 2: of ml_dtypes


def order_in_memory(array: Any) -> tuple[int, ...] | None:
    """Return the axes of an array, that of the longest steps first; None if they are in order.

    Those of a broadcast array are, since they share their steps.
    """
    steps = [abs(step) for step in array.strides]
    axes = sorted(range(array.ndim), key=steps.__getitem__, reverse=True)
    return None if 0 in steps or axes == list(range(array.ndim)) else tuple(axes)


def view_as(array: Any, kind: Any) -> Any:
    """Return a view of an array, of another dtype or class."""
    return array.view(kind)


def transpose_back(array: Any, axes: tuple[int, ...]) -> Any:
    """Undo ``array.transpose(axes)``."""
    return array.transpose(sorted(range(len(axes)), key=axes.__getitem__))


def _bare_error(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    # Past the class's own __init__, and past a __setattr__ that refuses (frozen dataclasses).
    _builtin_base(cls).__init__(error, *args)
    error.__dict__.update(state)
    return error


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


class _Bare:
    """A form of an exception that is rebuilt without calling its ``__init__``."""

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
    """Serialize an exception such that it can be loaded again, or return None.

    An exception whose ``__init__`` needs other arguments than it passed on fails to unpickle
    (cpython #120810); such a one is rebuilt without ``__init__``. Attributes that cannot be
    pickled are left out. Each form is tried out here, in the worker.
    """
    return _pack_as(error, type(error)) or _pack_as(_Bare(error), type(error))


def _pack_as(form: Any, cls: type) -> bytes | None:
    """Return the packed form, if what it unpacks to is of the class."""
    try:
        payload = pack(form, down=False)
        return payload if type(unpack(payload)) is cls else None
    except BaseException:  # user code of any kind ran; not being able to is an answer
        return None
