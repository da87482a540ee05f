"""Torch's conventions without torch: what the workers of :class:`minloader.torch.DataLoader` run.

A worker imports this module and numpy; torch is there only if the dataset imported it. What is to
be a tensor is an array in the worker, born in the slot of its batch, and a :class:`Leaf` says so:
it arrives as a tensor over that memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from minloader._worker.messages import WorkerInfo
from minloader._worker.start import get_worker_info


class Collated:
    """Calls a ``collate_fn`` of torch's kind on what :class:`Samples` fetched.

    Args:
        function: given what ``__getitems__`` returned, whatever it is, or the list of samples.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, fetched: list[Any]) -> Any:
        return self.function(fetched[0])


class ExtendedCollate:
    """Torch's own collating, with functions that the user added for types of theirs.

    Args:
        extra: what was added to ``default_collate_fn_map``.
    """

    def __init__(self, extra: dict[Any, Any]) -> None:
        self.extra = extra

    def __call__(self, samples: Sequence[Any]) -> Any:
        from torch.utils.data._utils.collate import collate, default_collate_fn_map

        return collate(samples, collate_fn_map=default_collate_fn_map | self.extra)


class Samples:
    """A map-style dataset, fetched from as torch does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """One element: all that was fetched. Torch lets the dataset say what that is."""
        fetch = getattr(self.dataset, "__getitems__", None)
        return [fetch(indices) if fetch else [self.dataset[index] for index in indices]]


class WorkerInit:
    """Tells torch's ``get_worker_info`` where it is, and calls a ``worker_init_fn`` of its kind.

    Args:
        dataset: the very one that the worker has.
        function: given the number of the worker; None for nothing.
    """

    def __init__(self, dataset: Any, function: Callable[[int], Any] | None) -> None:
        self.dataset = dataset
        self.function = function

    def __call__(self, info: WorkerInfo) -> None:
        _announce(info, self.dataset)
        if self.function is not None:
            self.function(info.id)


class Stream:
    """An ``IterableDataset``, read as torch does: a shard by each worker.

    Its own state, or that of its iterator, is handed through where it has one.

    Args:
        dataset: the user's.
        function: ``worker_init_fn``, called once for each copy of the dataset, which it may change.
        read_once: whether each pass needs a new copy.
        apart: whether there are workers, so that torch is told of the shard.
    """

    def __init__(
        self, dataset: Any, function: Callable[[int], Any] | None, *, read_once: bool, apart: bool
    ) -> None:
        self.dataset = dataset
        self.read_once = read_once
        self._function = function
        self._apart = apart

    def __iter__(self) -> Reading:
        info = get_worker_info() if self._apart else None
        if info is not None:
            _announce(info, self.dataset)
            function, self._function = self._function, None
            if function is not None:
                function(info.id)
        return Reading(iter(self.dataset), info, self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            return getattr(self.dataset, name)
        raise AttributeError(name)


class Reading:
    """Iterator over a stream. Others may be read in between, by the same worker."""

    def __init__(self, iterator: Iterator[Any], info: WorkerInfo | None, dataset: Any) -> None:
        self._iterator = iterator
        self._info = info
        self._dataset = dataset

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        if self._info is not None:
            _announce(self._info, self._dataset)
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            return getattr(self._iterator, name)
        raise AttributeError(name)


class _Whereabouts(NamedTuple):
    info: WorkerInfo
    dataset: Any


_TELLER = "torch.utils.data._utils.worker"

"""Torch's module that keeps the answer."""


_whereabouts: _Whereabouts | None = None


def _announce(info: WorkerInfo, dataset: Any) -> None:
    """Has torch's ``get_worker_info`` answer, also if torch is imported later than this."""
    global _whereabouts
    if _whereabouts is not None and _whereabouts.info is info and _whereabouts.dataset is dataset:
        return
    _whereabouts = _Whereabouts(info, dataset)
    if _TELLER in sys.modules:
        _tell(sys.modules[_TELLER])
    elif not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival())


def _tell(teller: Any) -> None:
    assert _whereabouts is not None
    info, dataset = _whereabouts
    teller._worker_info = teller.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed + info.id, dataset=dataset
    )


class _Arrival(importlib.abc.MetaPathFinder):
    """Waits in the import path for torch: a dataset may be the first to import it, and ask."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TELLER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_tell(module: Any) -> None:
            execute(module)
            _tell(module)

        spec.loader.exec_module = exec_and_tell  # type: ignore[method-assign]
        return spec
