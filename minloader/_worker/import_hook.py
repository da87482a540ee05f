"""Call a function as soon as a module has been imported.

A dataset may be the first to import torch, in the middle of a batch. What concerns torch, such as
its seed for this batch, must then be done before the dataset goes on. Importing torch for this
purpose would cost every worker seconds and hundreds of megabytes, so we wait for it instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Call a function with a module, now if it is imported, else when it has been.

    Asking twice for the same action is asking once. If an import fails, the action waits for
    the next one. If another thread imports the module just now, it may be called twice.

    Args:
        name: of the module, as in ``sys.modules``.
        action: called with the module, in the thread that imports it, before the import returns.
    """
    if name not in sys.modules:
        actions = _waiting.setdefault(name, [])
        if action not in actions:
            actions.append(action)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if name not in sys.modules:
            return
        forget(name, action)  # another thread has imported it, perhaps without seeing the action
    action(sys.modules[name])


def forget(name: str, action: Action) -> None:
    """Take back :func:`when_imported`. Harmless if the action was called meanwhile."""
    actions = _waiting.get(name, [])  # once: another thread may have imported it just now
    if action in actions:
        actions.remove(action)
    if not any(list(_waiting.values())) and _finder in sys.meta_path:
        # Another thread may be walking the list: one taken out of it would let it skip the next.
        sys.meta_path = [each for each in sys.meta_path if each is not _finder]


_waiting: dict[str, list[Action]] = {}
"""Actions by the name of the module that they wait for."""


class _Finder:
    """A finder in ``sys.meta_path`` that finds only the modules that are waited for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if not _waiting.get(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for action in tuple(_waiting.pop(fullname, ())):
                action(module)

        # The loader was made for this one import: nobody else sees that it is changed.
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


_finder = _Finder()
