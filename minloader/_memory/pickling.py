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

import io
import pickle
import sys
import types
from typing import Any, NamedTuple

import cloudpickle

from minloader._errors import breaks_in
from minloader._memory.reducers import (
    LRU_CACHE,
    MAIN,
    Reducers,
    as_it_is,
    imported,
    is_told,
    reducer_by_value,
    reducer_down,
    registered,
    registrations,
)

unpack = pickle.loads
"""Undo :func:`pack`. What cloudpickle wrote can be read by plain pickle."""

MOST_NOTES = 20
"""How many notes an error of pickling keeps, half of them of the innermost levels."""


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

    Args:
        file: the stream.
        down: True from parent to worker, False on the way back.
        reducers: those of the place that it writes for.

    Attributes:
        main_globals: classes and functions of ``__main__`` that were sent, by their names.
    """

    def __init__(
        self, file: Any, *, down: bool, reducers: Reducers | None = None, **options: Any
    ) -> None:
        super().__init__(file, 5, **options)
        main = sys.modules["__main__"]
        if main.__name__ in MAIN:  # cloudpickle takes the second name for a module to import
            cloudpickle.register_pickle_by_value(main)
        self.down = down
        self.reducers = Reducers({}) if reducers is None else reducers
        self.main_globals: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, (type, types.FunctionType, LRU_CACHE)) and not is_told(kind):
            return self._reduce_definition(obj)
        reduce: Any = self.reducers[kind]
        if reduce is as_it_is and self.down and kind not in self.dispatch_table:
            reduce = reducer_down(obj)
        # cloudpickle's own method leaves all other objects to its table; asking it takes longer.
        return NotImplemented if reduce is as_it_is else reduce(obj)

    def _reduce_definition(self, obj: Any) -> Any:
        """Reduce a class or a function: by its name, or by value, with what was made of it."""
        if _is_main_global(obj):
            self.main_globals[obj.__qualname__] = obj
            if not self.down:
                return obj.__qualname__  # a string means: by name, from obj.__module__
        is_by_value = isinstance(obj, LRU_CACHE) or _is_by_value(obj)
        reduce = reducer_by_value(obj) if is_by_value else None
        reduced = NotImplemented if reduce is None else reduce(obj)
        if reduced is not NotImplemented:
            return reduced
        reduced = super().reducer_override(obj)
        if self.down and is_by_value and isinstance(obj, type) and (known := registrations(obj)):
            return imported("registered:with_registrations")(reduced, known)
        return reduced

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
        if not registered:
            payload = pickle.dumps(obj, 5)  # which knows nothing of our reducers, but is quicker
            # It also refers to __main__ by name, which only the way back may do. A mere string of
            # such a name costs the slower pickler, nothing else.
            special = [b"multiprocessing.connection", b"torch._utils"]
            special += [b"main__", b"random"] if down else []
            if not any(name in payload for name in special):
                return payload
    except Exception as error:  # lambdas, local classes: cloudpickle's job
        if breaks_in(error):
            raise
        shorten_notes(error)
        plain_error = error
    buffer = io.BytesIO()
    try:
        Pickler(buffer, down=down).dump(obj)
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


def unpack_batch(packed: PackedBatch, memory: Any) -> Any:
    """Undo :meth:`BatchPacker.pack` (``batch_packer.py``), without copying what lies in the slot.

    Args:
        packed: the packed batch.
        memory: the leased memory of its slot; None if it had none.
    """
    view = memoryview(b"" if memory is None else memory).cast("B")
    buffers = [view[slice(*data)] if type(data) is tuple else data for data in packed.buffers]
    stream = packed.stream or buffers.pop()
    return pickle.loads(stream, buffers=buffers)


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
