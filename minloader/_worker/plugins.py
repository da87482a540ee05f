"""What hangs on a worker process, and when it is called.

::

    the parent makes a Plugin ──> start ── the job ──> loaded ── worker_init_fn ──> ready
    what they add, or an import such as torch's: ── before_batch ──> a batch ──> after_batch

A module that is for few is loaded by the plugin that it has, when that is unpickled, or by the
import that it waits for (``import_hook.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minloader._worker.messages import WorkerInfo


class Plugin:
    """Hangs on a worker process. An error is that of its start."""

    def start(self, info: WorkerInfo) -> None:
        """Begin, before the job is loaded.

        Args:
            info: what the user's code will be told of the worker.
        """

    def loaded(self) -> None:
        """Go on when the job is loaded, before any of its functions is called."""

    def ready(self) -> None:
        """Go on before the first batch, behind ``worker_init_fn``."""


before_batch: list[Callable[[WorkerInfo], object]] = []
"""What is called in this worker process before each call of the user's code, with what that is told
about where it runs."""

after_batch: list[Callable[[float], Any]] = []
"""What is called now and then when a task is done, with the seconds that tasks took since then. It
returns how these were spent, or None, see ``Usage.processor``."""
