"""Functions that are sent by value, and make classes."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle


def with_names_of_classes(function: types.FunctionType) -> Any:
    """Have cloudpickle send the globals that bodies of classes within a function read, too.

    It looks at what functions read alone (cloudpickle #438).
    """
    find = getattr(cloudpickle.cloudpickle, "_extract_code_globals", None)
    if find is not None:
        find(function.__code__).update(dict.fromkeys(_read_by_classes(function.__code__)))
    return NotImplemented


def _read_by_classes(code: types.CodeType) -> Iterator[str]:
    """Yield the names that bodies of classes within some code read."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # as of functions
                for each in dis.get_instructions(inner):
                    if each.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                        yield each.argval
            yield from _read_by_classes(inner)
