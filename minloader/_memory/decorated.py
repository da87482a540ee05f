"""Functions and classes of the main module that decorators have made into something else.

Workers do not import the main module, so what it defines is sent by value. Pickle refers to some
of it by its name only, and some of it holds what cannot be sent. Here each kind is taken apart into
what it was made of, and made again where it arrives: a cache is empty there.
"""

from __future__ import annotations

import functools
import inspect
import operator
import pickle
import sys
from typing import Any

from minloader._memory.reducers import MAIN


def reduce_cached(cached: Any) -> Any:
    """Reduce a function with ``lru_cache``, unless it can be imported by its name."""
    found: Any = sys.modules.get(cached.__module__)
    qualname = getattr(cached, "__qualname__", "")  # of a partial, or another object, it has none
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is cached and cached.__module__ not in MAIN:
        return NotImplemented
    made = ("__wrapped__", *functools.WRAPPER_ASSIGNMENTS)  # by lru_cache itself
    attributes = {name: value for name, value in vars(cached).items() if name not in made}
    return _cache_again, (cached.__wrapped__, cached.cache_parameters()), attributes


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def reduce_cached_property(cached: Any) -> Any:
    """Reduce a ``cached_property`` without its lock, which it has until CPython 3.11."""
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return functools.cached_property, (cached.func,), state


def reduce_dispatching_method(method: Any) -> Any:
    """Reduce a ``singledispatchmethod``, which has a weak cache from CPython 3.13 on."""
    implementations = list(method.dispatcher.registry.items())
    return _dispatch_again, (functools.singledispatchmethod, method.func, implementations)


def reduce_generic(model: Any) -> Any:
    """Reduce a generic model of pydantic with its types given: pydantic makes it of these."""
    generic = model.__pydantic_generic_metadata__
    if generic["origin"] is None:
        return NotImplemented
    return operator.getitem, (generic["origin"], generic["args"])


def reduce_dispatching(function: Any) -> Any:
    """Reduce a function with ``singledispatch``, which holds weak references to types."""
    implementations = list(function.registry.items())
    return _dispatch_again, (functools.singledispatch, function.__wrapped__, implementations)


def _dispatch_again(decorator: Any, function: Any, implementations: list[tuple[type, Any]]) -> Any:
    dispatching = decorator(function)
    for kind, implementation in implementations:
        dispatching.register(kind, implementation)
    return dispatching


def reduce_struct(struct: Any) -> Any:
    """Reduce a Struct of msgspec, which is made by its fields."""
    if type(struct).__module__ != "msgspec._core":
        return NotImplemented  # of another metaclass, which would be lost
    structs = sys.modules["msgspec.structs"]
    own = inspect.get_annotations(struct)
    fields = [each for each in structs.fields(struct) if each.name in own]
    described = [
        (each.name, own[each.name], each.encode_name, each.default, each.default_factory)
        for each in fields
    ]
    config = struct.__struct_config__
    names = [name for name in dir(config) if not name.startswith("_")]
    options = {name: getattr(config, name) for name in names}
    options["kw_only"] = any(each.name not in struct.__match_args__ for each in fields)
    made = ("__slots__", "__weakref__", "__dict__", "__match_args__", "__struct_", "__annot")
    namespace = {
        name: value
        for name, value in vars(struct).items()
        if name not in own and not name.startswith(made)
    }
    return _define_struct, (struct.__name__, described, struct.__bases__, namespace, options)


def _define_struct(
    name: str,
    described: list[tuple[Any, ...]],
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    msgspec: Any = __import__("msgspec")
    fields = []
    for field, kind, encoded, default, factory in described:
        described_by = {"name": encoded}
        if default is not msgspec.NODEFAULT:
            described_by["default"] = default
        if factory is not msgspec.NODEFAULT:
            described_by["default_factory"] = factory
        fields.append((field, kind, msgspec.field(**described_by)))
    return msgspec.defstruct(name, fields, bases=bases, namespace=namespace, **options)


def reduce_without_name(obj: Any) -> Any:
    """Reduce an object of the main module in its own way, unless that is its name there.

    Raises:
        PicklingError: it is, and it is not known what the object is made of.
    """
    reduced = obj.__reduce_ex__(5)
    if not isinstance(reduced, str):
        return reduced
    kind: Any = type(obj)
    if kind.__new__ is object.__new__:  # as of cachetools' wrappers: it is its attributes
        return kind.__new__, (kind,), dict(vars(obj)), None, None, _set_state
    raise pickle.PicklingError(
        f"{reduced} of the main module can be sent by its name only, and workers do not import "
        "that module: define it in another one"
    )


def reduce_with_getattr(obj: Any) -> Any:
    """Reduce an object whose class has a ``__getattr__``, such that nobody asks it while empty.

    Pickle would ask for ``__setstate__``, and a wrapper that has nothing of that name would look
    for it in what it wraps, for which it would look in the same way, for ever.
    """
    reduced = obj.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) not in (3, 4, 5) or reduced[2] is None:
        return reduced
    made, arguments, state, items, pairs = (*reduced, None, None)[:5]
    return made, arguments, state, items, pairs, _set_state


def _set_state(obj: Any, state: Any) -> None:
    """Do what pickle does where there is no ``__setstate__``."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(obj).update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)
