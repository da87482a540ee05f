"""Forks of this process: the one hook of the package, and what is done at each of them.

A child has all that its parent had, but no other thread: what another one held, nobody lets go of.
It has no pools: it makes its own when it iterates. Each module says once, when it is imported, what
it has to forget, so that what is lower comes first.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from minloader._protocols import snapshot

process = object()
"""Stands for this process: a fork of it has another one. Quicker to ask for than the pid."""

Functions = list[Callable[[], object]]

before: Functions = []
in_parent: Functions = []
in_child: Functions = []

told: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose ``begin_fork`` is called in a child, before those functions."""

_locks: list[Any] = []


def new_lock() -> Any:
    """Return a reentrant lock of a module, which is free in a child, whichever thread had it."""
    _locks.append(threading.RLock())
    return _locks[-1]


def _begin_child() -> None:
    global process
    process = object()
    for lock in _locks:
        if lock.acquire(blocking=False):  # what the thread has that forks, it will let go of
            lock.release()
        else:
            lock._at_fork_reinit()
    for each in snapshot(told):
        each.begin_fork()
    _call(in_child)


def _call(functions: Functions) -> None:
    for function in functions:
        function()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=partial(_call, before),
        after_in_parent=partial(_call, in_parent),
        after_in_child=_begin_child,
    )
