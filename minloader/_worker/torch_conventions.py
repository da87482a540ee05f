"""Follow torch's conventions without torch: what workers of ``minloader.torch.DataLoader`` run.

All of this runs in a worker process (with ``num_workers=0`` in the calling process). A worker
imports torch only if the dataset does. What is to be a tensor in a batch is a numpy array here,
made in the slot of the batch and marked by a :class:`~minloader._sampling.torch_collate.Leaf`; it
arrives in the parent as a tensor over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from minloader._errors import SKIP
from minloader._worker.import_hook import when_imported
from minloader._worker.messages import WorkerInfo
from minloader._worker.start import get_worker_info

# No repr: an error message may show one of these objects, and a dataset's may be endless.


@dataclass(repr=False, eq=False)
class Collated:
    """A ``collate_fn`` of torch's kind.

    Attributes:
        function: called with whatever ``__getitems__`` returned, or with the list of samples.
        takes_anything: tells who fetches the samples so.
    """

    function: Callable[[Any], Any]
    takes_anything = True

    def __call__(self, fetched: Any) -> Any:
        return self.function(fetched)


@dataclass(repr=False, eq=False)
class ExtendedCollate:
    """Collate with torch's own function, because the user has added functions to it.

    Attributes:
        added: collate functions by type, as in torch's ``default_collate_fn_map``.
    """

    added: dict[Any, Any]

    def __call__(self, samples: Sequence[Any]) -> Any:
        from torch.utils.data._utils.collate import collate, default_collate_fn_map

        return collate(samples, collate_fn_map=default_collate_fn_map | self.added)


@dataclass(repr=False, eq=False)
class Both:
    """Call two functions, one after the other, unless the first leaves the sample out."""

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        sample = self.first(sample)
        return SKIP if sample is SKIP else self.second(sample)


@dataclass(repr=False, eq=False)
class WorkerInit:
    """Prepare torch's ``get_worker_info`` and call a ``worker_init_fn`` of torch's kind.

    Attributes:
        dataset: the object that the worker reads from, not a copy.
        function: called with the number of the worker. None: nothing is called.
    """

    dataset: Any
    function: Callable[[int], Any] | None

    def __call__(self, info: WorkerInfo) -> None:
        _set_worker_info(info, self.dataset)
        if self.function is not None:
            self.function(info.id)


class PassesState:
    """Pass ``state_dict`` and ``load_state_dict`` on to another object, if that has them."""

    _stateful: Any

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            return getattr(self._stateful, name)
        raise AttributeError(name)


class Stream(PassesState):
    """An ``IterableDataset`` that is read as torch reads it: one shard in each worker.

    Args:
        dataset: the user's dataset.
        function: ``worker_init_fn``. It may change the dataset, and so is called once for each
            copy of it, with the number of the shard. None: nothing is called.
        read_once: whether each epoch needs a new copy of the dataset.
        in_workers: whether there are workers, so that torch's ``get_worker_info`` must answer.
    """

    def __init__(
        self,
        dataset: Any,
        function: Callable[[int], Any] | None,
        *,
        read_once: bool,
        in_workers: bool,
    ) -> None:
        self.dataset = self._stateful = dataset
        self.read_once = read_once
        self._function = function
        self._in_workers = in_workers

    def __iter__(self) -> StreamReader:
        info = get_worker_info() if self._in_workers else None
        if info is not None:
            _set_worker_info(info, self.dataset)
            function, self._function = self._function, None
            if function is not None:
                function(info.id)
        return StreamReader(iter(self.dataset), info, self.dataset)


class StreamReader(PassesState):
    """Iterator over one shard. The same worker may read other shards between two samples."""

    def __init__(self, iterator: Iterator[Any], info: WorkerInfo | None, dataset: Any) -> None:
        self._iterator = self._stateful = iterator
        self._info = info
        self._dataset = dataset

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> Any:
        if self._info is not None:
            _set_worker_info(self._info, self._dataset)
        return next(self._iterator)


_current: tuple[Any, Any] = (None, None)
"""What torch's ``get_worker_info`` shall answer: a :class:`WorkerInfo` and a dataset."""


def _set_worker_info(info: WorkerInfo, dataset: Any) -> None:
    """Make torch's ``get_worker_info`` answer here, also if torch is imported later."""
    global _current
    if _current[0] is not info or _current[1] is not dataset:  # a stream asks for each sample
        _current = info, dataset
        when_imported("torch.utils.data._utils.worker", _write_worker_info)


def _write_worker_info(module: ModuleType) -> None:
    torchs: Any = module
    info, dataset = _current
    torchs._worker_info = torchs.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=info.seed + info.id, dataset=dataset
    )
