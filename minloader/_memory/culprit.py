"""Find the part of an object that cannot be pickled, for an error message that names it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from time import monotonic
from types import SimpleNamespace
from typing import Any

from minloader._memory.by_value import MAIN
from minloader._memory.inherited import check, must_be_inherited
from minloader._memory.pickling import Pickler

MOST_FAILURES = 200
"""How many parts that cannot be pickled are looked into for the one at fault. Each was pickled
with all that is below it: an object that makes its parts anew would have endlessly many."""

MOST_SECONDS = 2.0
"""How long the search may take, but for the attempt under way. From CPython 3.14, an attempt with
an object that makes its parts anew ends where the C stack does, after some 60,000 objects."""


class _Probe(Pickler):
    """A pickler of which nothing is kept."""

    def __init__(self, start_method: str | None) -> None:
        # Neither the stream nor large buffers are kept: trying 400 MB must not take 400 MB.
        nowhere = SimpleNamespace(write=len)
        super().__init__(nowhere, down=True, buffer_callback=lambda buffer: None)
        self._start_method = start_method

    def persistent_id(self, obj: Any) -> int | None:
        if not must_be_inherited(obj):
            return None
        check(obj, self._start_method)
        return 0


def _pickling_error(obj: Any, start_method: str | None) -> str | None:
    try:
        _Probe(start_method).dump(obj)
    except Exception as error:
        return str(error)  # its traceback would keep the pickler, and all that it has seen
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts an object is pickled from, each with how one would write it in code."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, types.MethodType | types.BuiltinMethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield f" (closure variable {name!r})", cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
        arguments = reversed(obj.__code__.co_varnames[: obj.__code__.co_argcount])
        defaults = dict(zip(arguments, reversed(obj.__defaults__ or ()), strict=False))
        for name, value in (defaults | (obj.__kwdefaults__ or {})).items():
            yield f" (default of {name!r})", value
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f" (global variable {name!r})", obj.__globals__[name]
    elif isinstance(obj, type):
        yield from (("", base) for base in obj.__bases__)
        for name, value in vars(obj).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, types.FunctionType) or not name.startswith("_"):
                yield f".{name}", value
    else:
        if type(obj).__module__ in MAIN:  # it is sent with all that its methods use
            yield "", type(obj)
        try:
            state = obj.__reduce_ex__(5)[2]
        except Exception:  # it cannot be taken apart: it is itself the part at fault
            return
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                yield from ((f".{name}", value) for name, value in part.items())


def _failing_parts(
    obj: Any, start_method: str | None, deadline: float
) -> Iterator[tuple[str, Any, str]]:
    for suffix, part in takewhile(lambda _: monotonic() < deadline, _parts(obj)):
        error = _pickling_error(part, start_method)
        if error is not None:
            yield suffix, part, error


def find_culprit(
    obj: Any, path: str, start_method: str | None = None
) -> tuple[str, Any, str] | None:
    """Find a part of an object that cannot be pickled though all its own parts can.

    Args:
        obj: what to look into.
        path: how the object is called, "dataset".
        start_method: of the processes that may inherit parts of it; None if none do.

    Returns:
        The part's path ("dataset.files[3].lock"), the part and the text of its error, the nearest
        such part if there are several; the object itself if the search took too long; None if
        all is well.
    """
    error = _pickling_error(obj, start_method)
    if error is None:
        return None
    found = [(path, obj, error)]  # breadth first; all kept alive, so that no id is used again
    seen = {id(obj)}
    left, deadline = MOST_FAILURES, monotonic() + MOST_SECONDS
    for path, obj, error in found:  # grows while we walk
        failing = list(islice(_failing_parts(obj, start_method, deadline), left))
        left = left - len(failing) if monotonic() < deadline else 0
        if not failing and (left or not any(True for _ in _parts(obj))):
            return path, obj, error
        for suffix, part, part_error in failing:
            if id(part) not in seen:
                seen.add(id(part))
                found.append((path + suffix, part, part_error))
    return found[0]
