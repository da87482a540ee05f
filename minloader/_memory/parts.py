"""What an object of Python's own kinds is made of, each part with how one would write it in code.

By this a user's object is looked into: for what cannot be pickled, and for random generators. None
of its own code is run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any

Part = tuple[str, Any]
"""What leads to a part from the whole, such as "[3]" or ".func"; and the part."""


def parts(obj: Any, most: int | None = None) -> Iterator[Part]:
    """Yield what is in a container, behind a method or ``partial``, and what a function keeps.

    Args:
        obj: what is looked into; of any other object there are no parts.
        most: elements of a container that are given, the first ones; None: all of them.
    """
    kind = type(obj)  # isinstance() would ask a proxy for its class
    if issubclass(kind, dict):
        for n, (key, part) in enumerate(islice(dict.items(obj), most)):
            yield _key_step(key, n), part
    for sequence in (list, tuple, deque):
        if issubclass(kind, sequence):
            elements: Any = sequence.__iter__(obj)
            for n, part in enumerate(islice(elements, most)):
                yield f"[{n}]", part
    if issubclass(kind, FunctionType):
        yield from _kept_by_function(obj)
    elif issubclass(kind, MethodType):
        yield from ((".__self__", obj.__self__), (".__func__", obj.__func__))
    elif issubclass(kind, BuiltinMethodType):
        yield ".__self__", obj.__self__
    elif issubclass(kind, partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))


def _key_step(key: Any, n: int) -> str:
    """Return what leads to the value of a key. Only of plain ones: ``repr`` may run code."""
    plain = key if type(key) is tuple else (key,)
    return f"[{key!r}]" if all(type(each) in (str, int) for each in plain) else f"[key {n}]"


def _kept_by_function(function: Any) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" (closure variable {name!r})", cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    arguments = reversed(code.co_varnames[: code.co_argcount])
    defaults = dict(zip(arguments, reversed(function.__defaults__ or ()), strict=False))
    for name, value in (defaults | (function.__kwdefaults__ or {})).items():
        yield f" (default of {name!r})", value


def globals_of(obj: Any) -> Iterator[Part]:
    """Yield what a function finds among the globals of its module; nothing of any other object."""
    if issubclass(type(obj), FunctionType):
        names = obj.__globals__
        for name in _names(obj.__code__):
            if name in names:
                yield f" (global variable {name!r})", names[name]


def _names(code: CodeType) -> Iterable[str]:
    """Return the names that code may look up among the globals, also in functions within it."""
    inner = (_names(each) for each in code.co_consts if type(each) is CodeType)
    return dict.fromkeys((*code.co_names, *(name for names in inner for name in names)))
