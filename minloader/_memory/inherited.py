"""What a process can only inherit: locks, values, queues, pipes, and shared memory of torch's.

The standard library pickles them only while it starts a process, which is given their descriptors
then. So a job's pickler takes them out, and each worker gets them with its start, also one that
replaces another::

    job ── JobFile ──> the file, with a number for each object ─────────────────────> its job
              └──> the objects ── Inheritance ── Process.start() ──> their copies ──────┘

With "fork" the copies are there already. Else they are pickled into a file of which the worker gets
a descriptor, since the pipe that starts a process takes 64 KiB before somebody must read it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
import weakref
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from typing import Any, cast

from minloader._memory.files import SharedFile
from minloader._memory.pickling import Pickler
from minloader._memory.reducers import may_be_inherited
from minloader._memory.tensors import is_shared

_CTYPE: Any = ctypes.Structure.__base__  # the base of all types of ctypes


def must_be_inherited(obj: Any) -> bool:
    """Whether an object must be inherited. One of ctypes or torch must if its memory is shared."""
    if not isinstance(obj, _CTYPE):
        is_one = may_be_inherited(type(obj))
        return is_one and (not hasattr(obj, "is_shared") or is_shared(obj))
    attributes = getattr(obj, "__dict__", {}).values()
    return any(type(each).__module__ == "multiprocessing.heap" for each in attributes)


class _NoChild:
    """Stands for a process that is being started, where none is."""

    duplicate_for_child = DupFd = staticmethod(int)


def check(obj: Any, start_method: str | None) -> None:
    """Raise now what the start of a process with this object would raise.

    Args:
        obj: an object that must be inherited.
        start_method: how the process will be started. None: not by this process.

    Raises:
        Exception: it cannot be inherited.
    """
    if start_method is None:
        kind = type(obj).__qualname__
        raise TypeError(f"a process can be given a {kind} only by the one that starts it")
    if start_method != "fork":
        set_spawning_popen(cast(Any, _NoChild))
        try:
            _pickler(io.BytesIO()).dump(obj)
        finally:
            set_spawning_popen(None)


def _pickler(file: Any) -> Pickler:
    pickler = Pickler(file, down=True)
    pickler.reducers.update(reduction.ForkingPickler(file).dispatch_table)
    return pickler


class Inheritance:
    """The objects that one process inherits: an argument of it.

    Args:
        objects: the objects, of this process.
    """

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects

    def load(self) -> list[Any]:
        """Return the objects, in the process that was started with them."""
        return self._objects

    def __reduce__(self) -> tuple[Any, ...]:
        if sys.platform == "win32":  # without DupFd
            return Inheritance, (self._objects,)
        file = SharedFile()
        weakref.finalize(self, file.close)  # a process lets go of its arguments when it is started
        try:
            with open(file.fd, "wb", closefd=False) as stream:
                _pickler(stream).dump(self._objects)
        except Exception as error:
            raise RuntimeError(
                "a worker cannot be started: what the dataset or a function shares with it by "
                f"multiprocessing cannot be given to it ({type(error).__name__}: {error})"
            ) from error
        return _InFile, (reduction.DupFd(file.fd),)


class _InFile(Inheritance):
    """The same in a process that was spawned: they are in a file."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def load(self) -> list[Any]:
        with open(self._descriptor.detach(), "rb") as stream:
            stream.seek(0)  # where the parent has written
            objects: list[Any] = pickle.load(stream)
        return objects
