"""Find the part of an object that cannot be pickled, for an error message that names it."""

from __future__ import annotations

import errno
import re
import types
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from minloader._formats import format_bytes
from minloader._memory.inherited import must_be_inherited
from minloader._memory.job_file import JobPickler
from minloader._memory.limits import largest_file
from minloader._memory.parts import Part, globals_of, parts
from minloader._memory.reducers import MAIN

MOST_PARTS = 100_000
"""How many parts are looked at for the one at fault, a second's work. A dataset may be of millions,
or make new ones each time."""


LONGEST_PATH = 80
"""Characters of a path that is told whole. A longer one leads through the insides of a library."""

_TAKEN_APART = (
    *(dict, list, tuple, partial),
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType),
)


class _Probe(JobPickler):
    """A pickler of which nothing is kept but the last object that it began with."""

    last: Any = None

    def __init__(self, start_method: str | None) -> None:
        # Neither the stream nor large buffers are kept: trying 400 MB must not take 400 MB.
        nowhere = SimpleNamespace(write=len)
        super().__init__(nowhere, start_method, keep=lambda buffers, buffer: None)

    def persistent_id(self, obj: Any) -> int | None:
        self.last = obj
        return super().persistent_id(obj)


def _parts(obj: Any) -> Iterator[Part]:
    """Yield the parts an object is pickled from."""
    if isinstance(obj, type):
        yield from (("", base) for base in obj.__bases__)
        for name, value in vars(obj).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, types.FunctionType) or not name.startswith("_"):
                yield f".{name}", value
    elif isinstance(obj, _TAKEN_APART):
        yield from (*parts(obj), *globals_of(obj))
    elif not isinstance(obj, str | bytes | int | float | None):
        if type(obj).__module__ in MAIN:  # it is sent with all that its methods use
            yield "", type(obj)
        try:
            reduced: Any = obj.__reduce_ex__(5)
        except Exception:  # it cannot be taken apart: it is itself the part at fault
            return
        if isinstance(reduced, str):
            return
        arguments, state = (*reduced, None)[1:3]
        yield from (("", each) for each in arguments if not isinstance(each, type))
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                yield from ((f".{name}", value) for name, value in part.items())
            else:
                yield "", part


def find_unpicklable(
    obj: Any, path: str, start_method: str | None = None
) -> tuple[str, Any, str] | None:
    """Find the part of an object that cannot be pickled.

    Args:
        obj: what to look into.
        path: how the object is called, "dataset".
        start_method: of the processes that may inherit parts of it; None if none do.

    Returns:
        The shortest path to the part ("dataset.files[3].lock"), the part and the text of its error;
        the object itself if the part is made anew each time, or is too deep; None if all is well.
    """
    probe = _Probe(start_method)
    try:
        probe.dump(obj)
        return None
    except Exception as failure:
        error = str(failure)
        too_deep = RecursionError in (type(failure), type(failure.__cause__))
    found = [(path, obj)]  # breadth first; all kept alive, so that no id is used again
    seen = {id(obj)}
    for place, part in [] if too_deep else found:  # grows while we walk
        if part is probe.last:
            return place, part, error
        for suffix, each in islice(_parts(part), MOST_PARTS - len(found)):
            if id(each) not in seen:
                seen.add(id(each))
                found.append((place + suffix, each))
    return path, obj, error


def _readable(path: str, obj: Any) -> str:
    """Return how a part is told: of a long path the first step, the user's own, and the end.

    Args:
        path: of the part.
        obj: that the path begins with.
    """
    if len(path) <= LONGEST_PATH:
        return path
    first = re.match(r"\w+(?:\.(\w+))?", path)
    assert first is not None
    own = getattr(obj, first[1] or "", obj)
    end = path[-LONGEST_PATH // 2 :]
    return f"what {first[0]} (a {type(own).__qualname__}) has deep inside, at ...{end},"


def refusal(job: Any, start_method: str | None, error: Exception) -> Exception | None:
    """Return the error that names what of a job cannot be sent to worker processes.

    Args:
        job: which.
        start_method: of the processes; None if this one does not start them.
        error: what sending it has raised.
    """
    otherwise = job.options.without_processes
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return OSError(
            errno.EFBIG,
            "the dataset, which is written to a file for the workers, is larger than a file may "
            f"be, {format_bytes(largest_file())}: raise the limit (ulimit -f), or use "
            f"mp_context='fork', or {otherwise}",
        )
    parts = {
        "dataset": job.dataset,
        "transform": job.transform,
        "collate_fn": job.collate_fn,
        "worker_init_fn": job.worker_init_fn,
        "on_sample_error": job.options.on_sample_error,
    }
    for name, value in parts.items():
        found = find_unpicklable(value, name, start_method)
        if found is not None:
            path, part, cause = found
            return TypeError(
                f"{name} cannot be sent to worker processes: {_readable(path, value)} is a "
                f"{type(part).__qualname__} ({cause}); "
                f"{_advice(part, cause, start_method, otherwise)}"
            )
    return None


def _advice(part: Any, cause: str, start_method: str | None, otherwise: str) -> str:
    """Return what to do about a part that cannot be sent to worker processes."""
    if isinstance(part, types.GeneratorType):
        return (
            "it can be read once, in one place: give an object whose __iter__ begins anew, such as "
            "a class with the generator function as its __iter__"
        )
    if start_method is None and must_be_inherited(part):
        return "use executor='process', whose workers are started by this process"
    if "fork context" in cause:
        return (
            f"make it with multiprocessing.get_context({start_method!r}), or start the workers "
            "by 'fork' too"
        )
    if "memory that processes share" in cause:
        return (
            "give the dataset what it is a view of (a multiprocessing Array, a SharedMemory, a "
            "shared tensor), or a copy of the array; or start the workers by 'fork'"
        )
    if "since it was mapped" in cause:
        return "open it anew, or start the workers by 'fork'"
    if "CField" in cause:
        return "define its ctypes class in a module, which workers import"
    return (
        "make it in worker_init_fn or when it is first used, leave it out in __getstate__, or "
        + otherwise
    )
