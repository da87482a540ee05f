"""Say in the log what a long start of a worker took, and which argument makes it shorter."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

from minloader._worker.messages import WorkerInfo
from minloader._worker.plugins import Plugin

logger = logging.getLogger("minloader")

LONG_START = 3.0
"""Seconds that the job may take to be loaded before the log says so."""


def _log(seconds: float, importing: float, before: set[str]) -> None:
    """Say it, but not if the worker waited for a processor, or a disk, for longer than it computed.

    Args:
        seconds: what it took to load the job.
        importing: of these, what imports took.
        before: names of the modules that were there before.
    """
    if seconds < LONG_START or time.process_time() < LONG_START / 2:
        return
    packages = Counter(name.partition(".")[0] for name in sys.modules.keys() - before)
    others = sys.stdlib_module_names | {"minloader"}
    found = [name for name, _ in packages.most_common() if name not in others]
    names = f" ({', '.join(found[:5])})" if found else ""  # the largest first
    if importing > seconds / 2:
        advice = (
            "mp_context='forkserver' (of minloader.torch.DataLoader: multiprocessing_context) "
            "imports once for all workers, and 'fork' not at all"
        )
    else:
        advice = (
            "keep long lists and dicts of Python objects in a minloader.SharedList, and what is "
            "large in arrays"
        )
    logger.warning(
        "a worker took %.1f s to load the dataset, as each one does: %.1f s for imports%s, and "
        "%.1f s to unpickle it; %s",
        seconds,
        importing,
        names,
        seconds - importing,
        advice,
    )


class LongStart(Plugin):
    """Looks at the start of the first worker."""

    def start(self, info: WorkerInfo) -> None:
        self._is_first = not info.id
        self._modules = set(sys.modules)
        self._clock = ImportClock()
        self._begin = time.perf_counter()
        self._clock.__enter__()

    def loaded(self) -> None:
        self._clock.__exit__()
        if self._is_first:
            _log(time.perf_counter() - self._begin, self._clock.seconds, self._modules)


class ImportClock:
    """A finder in ``sys.meta_path`` that finds nothing by itself, and measures, while it is there.

    Attributes:
        seconds: that modules took to be found and executed, with those that they import. Those
            that lie in files of their own are measured.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False  # an import, which counts as a whole

    def __enter__(self) -> ImportClock:
        # Now: where imports are lazy, to look these up later would be an import within an import.
        self._of_one_module = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.meta_path = [each for each in sys.meta_path if each is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if self._is_inside:
            return None
        begin = time.perf_counter()
        others = [each for each in sys.meta_path if each is not self]
        # Python passes over those that have no such method.
        methods = (finder.find_spec for finder in others if hasattr(finder, "find_spec"))
        specs = (find_spec(fullname, path, target) for find_spec in methods)
        spec = next((spec for spec in specs if spec is not None), None)
        # Others may be loaders of many modules, as that of a zip archive is, and no object of ours
        # to change. What is built in has a class for a loader, and takes no time.
        if spec is None or not isinstance(spec.loader, self._of_one_module):
            return spec
        execute = spec.loader.exec_module

        def execute_and_count(module: ModuleType) -> None:
            self._is_inside = True
            try:
                execute(module)
            finally:
                self._is_inside = False
                self.seconds += time.perf_counter() - begin

        spec.loader.exec_module = execute_and_count  # type: ignore[method-assign]
        return spec
