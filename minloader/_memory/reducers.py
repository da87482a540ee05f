"""The table of reducers: how objects travel that pickle, or cloudpickle, does not send well.

A reducer takes an object, and returns what ``__reduce__`` of it would. Some are for one place, and
take that first: the slot that a batch is packed for, or what the objects of a job have in common::

    items, jobs, batches     EVERYWHERE     reduce(obj)
    batches                  IN_BATCHES     reduce(writer, obj)
    jobs                     IN_JOBS        reduce(memory, obj)
    classes and functions    DEFINITIONS    reduce(obj)

A type is known by its name, so that nobody need import its library. The module of a reducer is
imported when an object of the type is met. What the user has registered comes first: here, then
with ``copyreg``. Then comes the table, and last what cloudpickle and pickle do by themselves.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from minloader._formats import brief_repr

T = TypeVar("T")
Reduce = Callable[[Any], Any]

ARRAYS = "numpy.ndarray, a subclass"

EVERYWHERE = {
    "_io.TextIOWrapper": "standard:refuse_open_file",
    "builtins.code": "standard:reduce_code",
    "functools.cached_property": "decorated:reduce_cached_property",
    "functools.singledispatchmethod": "decorated:reduce_dispatching_method",
    "multiprocessing.connection.Connection": "standard:refuse_connection",
    "numpy.random.mtrand.RandomState": "standard:refer_to_generator",
    "random.Random": "standard:refer_to_generator",
    "torch.Tensor": "tensors:reduce_tensor",
    "torch.storage.TypedStorage": "tensors:reduce_typed_storage",
    "torch.storage.UntypedStorage": "tensors:reduce_storage",
}
if sys.version_info >= (3, 15):
    _LAZY = types.LazyImportType
    EVERYWHERE[f"{_LAZY.__module__}.{_LAZY.__qualname__}"] = "standard:reduce_lazy_import"

IN_BATCHES = {
    ARRAYS: "arrays:reduce_subclass",
    "numpy.memmap": "arrays:reduce_in_batch",
    "numpy.ndarray": "arrays:reduce_in_batch",
}

IN_JOBS = {
    ARRAYS: "arrays:reduce_subclass",
    "numpy.memmap": "job_arrays:reduce_in_job",
    "numpy.ndarray": "job_arrays:reduce_in_job",
    "polars.dataframe.frame.DataFrame": "frames:reduce_frame",
    "torch.Tensor": "tensors:reduce_in_job",
    "torch.storage.UntypedStorage": "tensors:reduce_storage_in_job",
}

DEFINITIONS = {
    "builtins.function": "class_bodies:with_names_of_classes",
    "functools._lru_cache_wrapper": "decorated:reduce_cached",
    "functools.singledispatch.<locals>.wrapper": "decorated:reduce_dispatching",
    "msgspec._core.StructMeta": "decorated:reduce_struct",
    "pydantic._internal._model_construction.ModelMetaclass": "decorated:reduce_generic",
}
"""Of classes and functions that are sent by value, by the name of their type, or of their code."""

INHERITED = {
    "_ctypes._CData",  # RawValue and RawArray are of the types of ctypes
    "multiprocessing.connection.Connection",
    "multiprocessing.connection.PipeConnection",
    "multiprocessing.queues.Queue",
    "multiprocessing.queues.SimpleQueue",
    "multiprocessing.sharedctypes.SynchronizedBase",
    "multiprocessing.synchronize.Barrier",
    "multiprocessing.synchronize.Condition",
    "multiprocessing.synchronize.Event",
    "multiprocessing.synchronize.SemLock",
    "torch.storage.UntypedStorage",
}
"""The classes from which that derives which processes may have to inherit, see inherited.py."""

REGISTRIES = {"torch.utils._pytree": "SUPPORTED_NODES", "jax._src.tree_util": "_registry"}
"""Libraries of trees, and what has the classes that were registered there: nothing public tells."""

arrived: dict[tuple[str, type], Callable[[types.ModuleType], None]] = {}
"""By the name of a library, and a class that has come by value: what is to be called with the
library once it is imported. The worker sees to that, and does not import the library for it."""

MAIN = ("__main__", "__mp_main__")
"""Names of the main module: in a process that multiprocessing has spawned it is the second."""

LRU_CACHE = type(functools.cache(len))

registered: dict[type, Reduce] = {}
"""By type, what the user has registered."""

as_it_is = methodcaller("__reduce_ex__", 5)
"""What pickle does by itself."""


def register_reducer(type: type[T], function: Callable[[T], Any]) -> None:
    """Set how objects of a type travel between processes: in datasets, items and batches.

    Call it in the module that defines the type, so that each process which imports that knows it,
    or a second time in ``worker_init_fn``: a worker that is not forked knows only what its own
    modules have registered. Other pickling, and ``copy``, go on as before; ``copyreg.pickle`` is
    for all of it.

    Args:
        type: the class. Of subclasses nothing is changed.
        function: called with an object; returns what its ``__reduce__`` would return: mostly a
            function, and its arguments. Large arrays among these are shared as others are.

    Raises:
        TypeError: ``function`` is none.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {brief_repr(function)}")
    registered[type] = function


def is_told(kind: type) -> bool:
    """Whether the user has said how objects of a type are reduced."""
    return kind in registered or kind in copyreg.dispatch_table


@functools.cache
def imported(name: str) -> Callable[..., Any]:
    """Return the function of this package that a name "module:function" stands for."""
    module, _, function = name.partition(":")
    reduce: Callable[..., Any] = getattr(
        importlib.import_module(f"minloader._memory.{module}"), function
    )
    return reduce


class Reducers(dict[type, Reduce]):
    """The reducers of one pickler, by type: found when an object of the type is met.

    As a ``dispatch_table``, pickle looks a type up in it as fast as in a plain dict. Nothing is
    kept for longer than the pickler: a type may be made in a function.

    Args:
        names: of the reducers of one place.
        place: their first argument.
    """

    def __init__(self, names: dict[str, str], place: Any = None) -> None:
        super().__init__(copyreg.dispatch_table | registered)
        self._names = names
        self._place = place

    def __missing__(self, kind: type) -> Reduce:
        if issubclass(kind, type):
            raise KeyError(kind)  # a class goes by its name
        name = f"{kind.__module__}.{kind.__qualname__}"
        reduce: Reduce = as_it_is
        if name not in self._names and hasattr(kind, "__array_finalize__"):
            name = ARRAYS
        if name in self._names:
            reduce = partial(imported(self._names[name]), self._place)
        elif name in EVERYWHERE:
            reduce = imported(EVERYWHERE[name])
        self[kind] = reduce
        return reduce


@dataclass
class JobMemory:
    """What the arrays and tensors of a job have in common.

    Attributes:
        is_same_machine: whether workers surely have the files that this process has.
        copies: arrays of which views are copied, by their id, each with the bytes of these views.
        storages: the memory of torch's storages, each once.
        mappings: of this process, once they were needed.
    """

    is_same_machine: bool
    copies: dict[int, tuple[Any, int]] = field(default_factory=dict)
    storages: dict[tuple[int, int], Any] = field(default_factory=dict)
    mappings: Any = None


def reducer_down(obj: Any) -> Reduce:
    """Return how an object is sent to workers, if what it does by itself may not do there."""
    kind = type(obj)
    methods: Any = kind.__reduce__, kind.__reduce_ex__
    if methods != (object.__reduce__, object.__reduce_ex__):
        if getattr(obj, "__module__", None) in MAIN:
            return imported("decorated:reduce_without_name")
    elif hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__"):
        return imported("decorated:reduce_with_getattr")
    return as_it_is


def reducer_by_value(obj: Any) -> Reduce | None:
    """Return how a class or function is sent by value; None: as cloudpickle does it."""
    names = [f"{each.__module__}.{each.__qualname__}" for each in type(obj).__mro__]
    if isinstance(obj, types.FunctionType):
        names.insert(0, f"{obj.__globals__.get('__name__')}.{obj.__code__.co_qualname}")
    found = [DEFINITIONS[name] for name in names if name in DEFINITIONS]
    return imported(found[0]) if found else None


def registrations(cls: type) -> list[Any]:
    """Return what libraries of trees know a class as."""
    registries = (getattr(sys.modules.get(name), REGISTRIES[name], {}) for name in REGISTRIES)
    return [registry[cls] for registry in registries if cls in registry]


def may_be_inherited(kind: type) -> bool:
    """Whether objects of a type may be such that they must be inherited."""
    if kind.__module__ == "builtins":  # as of most objects
        return False
    return any(f"{base.__module__}.{base.__qualname__}" in INHERITED for base in kind.__mro__)
