"""The plugins of every worker process: what it logs comes out here, and libraries are set as here.

The first pool of processes loads this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from minloader._pools.log_reader import LogReader
from minloader._worker.library_settings import LibrarySettings
from minloader._worker.logs import WorkerLogs
from minloader._worker.plugins import Plugin

MODULES = WorkerLogs.__module__, LibrarySettings.__module__
"""Those that a worker process needs for them."""


class WorkerPlugins:
    """What hangs on the workers of an executor, seen from the calling process.

    Args:
        settings: of libraries.
        others: plugins of the loader.

    Attributes:
        sent: the plugins, for the workers.
    """

    def __init__(self, settings: LibrarySettings, others: Iterable[Plugin]) -> None:
        self._logs = LogReader()
        self.sent: list[Plugin] = [WorkerLogs.to(self._logs.sender), settings, *others]

    def close(self, seconds: float) -> None:
        """Have out what was logged, within so many seconds. The workers have ended."""
        self._logs.close(seconds)


def plugins_of_this_thread(others: Iterable[Plugin]) -> Callable[[], WorkerPlugins]:
    """Note the settings of this thread. Return what makes the plugins of an executor's workers.

    Args:
        others: plugins of the loader; those that it has when a function makes them.
    """
    return partial(WorkerPlugins, LibrarySettings.of_this_thread(), others)
