"""What hangs on a worker process, and when it is called.

::

    the parent makes a Plugin ──> start(index) ──> the job is loaded ──> loaded()
    what is imported later, such as torch ──> before_batch ──> the user's code

A module that is for few is loaded by the plugin that it has, when that is unpickled, or by the
import that it waits for (``import_hook.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from minloader._worker.messages import WorkerInfo


class Plugin:
    """Hangs on a worker process. An error is that of its start."""

    def start(self, index: int) -> None:
        """Begin, before the job is loaded.

        Args:
            index: of the worker in its pool.
        """

    def loaded(self) -> None:
        """Go on when the job is loaded, before any of its functions is called."""


before_batch: list[Callable[[WorkerInfo], object]] = []
"""What is called in this worker process before each call of the user's code, with what that is told
about where it runs."""
