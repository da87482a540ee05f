"""What the calling process has set in libraries, and workers are to hold to.

A worker that was forked has all of it. One that was spawned begins with each library's own
settings::

    calling process: torch.set_default_dtype(torch.float64) ──> LibrarySettings ──> worker

A worker gets them before it loads the job, and again after that, since a module of the job may set
others; those of a library that it has not imported, when it does. Nothing is imported for it, on
either side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from minloader._memory.pickling import pack, unpack
from minloader._worker.import_hook import when_imported
from minloader._worker.messages import WorkerInfo
from minloader._worker.plugins import Plugin


@dataclass
class LibrarySettings(Plugin):
    """Settings of the thread that starts workers, of the libraries that it has imported.

    Attributes:
        calls: what sets them: the module, the name of its function, and the arguments, packed. To
            unpack these may import the library.
    """

    calls: list[tuple[str, str, bytes]]

    @classmethod
    def of_this_thread(cls) -> LibrarySettings:
        """Return those of now."""
        calls = []
        for name, asked, function, form in (
            ("sys", "getrecursionlimit", "setrecursionlimit", _as_is),
            ("decimal", "getcontext", "setcontext", _without_flags),
            ("numpy", "geterr", "seterr", _without_handler),
            ("torch", "get_default_dtype", "set_default_dtype", _as_is),
        ):
            # Another thread may be just importing it.
            ask: Any = getattr(sys.modules.get(name), asked, None)
            if ask is not None:
                calls.append((name, function, pack(form(ask()), down=True)))
        return cls(calls)

    def start(self, info: WorkerInfo) -> None:
        self.loaded()

    def loaded(self) -> None:
        for name, function, args in self.calls:
            when_imported(name, partial(_call, function, args))


def _call(function: str, args: bytes, module: Any) -> None:
    getattr(module, function)(*unpack(args))


def _as_is(value: Any) -> list[Any]:
    return [value]


def _without_flags(context: Any) -> list[Any]:
    context = context.copy()
    context.clear_flags()
    return [context]


def _without_handler(actions: dict[str, str]) -> list[Any]:
    """Have numpy warn where it calls a function (``numpy.seterrcall``), which stays here."""
    each = [actions[name] for name in ("divide", "over", "under", "invalid")]
    return [None, *("warn" if how in ("call", "log") else how for how in each)]
