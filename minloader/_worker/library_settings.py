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
from typing import Any, NamedTuple

from minloader._worker.import_hook import when_imported


class LibrarySettings(NamedTuple):
    """Settings of the thread that starts workers; None of a library that was not imported.

    Attributes:
        recursion_limit: most frames on the interpreter's stack.
        decimal: all of the context but its flags, by name.
        numpy: what numpy does on each error of floating point. It warns where the calling process
            has it call a function (``numpy.seterrcall``), which stays there.
        torch_dtype: name of torch's default type.
    """

    recursion_limit: int
    decimal: dict[str, Any] | None
    numpy: dict[str, str] | None
    torch_dtype: str | None

    @classmethod
    def of_this_thread(cls) -> LibrarySettings:
        """Return those of now."""
        return cls(
            recursion_limit=sys.getrecursionlimit(),
            decimal=_ask("decimal", "getcontext", _decimal_settings),
            numpy=_ask("numpy", "geterr", _without_handler),
            torch_dtype=_ask("torch", "get_default_dtype", _name_of_dtype),
        )

    def apply(self) -> None:
        """Set them in a worker process; those of a library when it is there."""
        sys.setrecursionlimit(self.recursion_limit)
        if self.decimal is not None:
            when_imported("decimal", self._set_decimal)
        if self.numpy is not None:
            when_imported("numpy", self._set_numpy)
        if self.torch_dtype is not None:
            when_imported("torch", self._set_torch)

    def _set_decimal(self, decimal: Any) -> None:
        assert self.decimal is not None
        decimal.setcontext(decimal.Context(**self.decimal))

    def _set_numpy(self, numpy: Any) -> None:
        assert self.numpy is not None
        numpy.seterr(**self.numpy)

    def _set_torch(self, torch: Any) -> None:
        assert self.torch_dtype is not None
        torch.set_default_dtype(getattr(torch, self.torch_dtype))


def _ask(module: str, function: str, form: Any) -> Any:
    """Ask a library, if it is imported; another thread may be just importing it."""
    asked = getattr(sys.modules.get(module), function, None)
    return None if asked is None else form(asked())


def _without_handler(actions: dict[str, str]) -> dict[str, str]:
    return {kind: "warn" if how in ("call", "log") else how for kind, how in actions.items()}


def _decimal_settings(context: Any) -> dict[str, Any]:
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    settings = {name: getattr(context, name) for name in names}
    return {**settings, "traps": [signal for signal, is_set in context.traps.items() if is_set]}


def _name_of_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
