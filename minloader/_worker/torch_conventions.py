"""Follow torch's conventions without torch: what workers of ``minloader.torch.DataLoader`` run.

All of this runs in a worker process (with ``num_workers=0`` in the calling process), where it is
loaded with a job of such a loader, or as soon as something imports torch (``start.py``). A worker
imports torch only if the dataset does. What is to be a tensor in a batch is a numpy array here,
made in the slot of the batch and marked by a ``CollatedLeaf`` (``_sampling/torch_collate.py``); it
arrives in the parent as a tensor over the same memory.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from minloader._errors import SKIP
from minloader._protocols import has_epochs
from minloader._sampling.seeding import derive
from minloader._worker.global_states import drawn_from
from minloader._worker.import_hook import forget, when_imported
from minloader._worker.messages import WorkerInfo
from minloader._worker.seeds import save_globals

logger = logging.getLogger("minloader")

# No repr: an error message may show one of these objects, and a dataset's may be endless.


@dataclass(repr=False, eq=False)
class Collated:
    """A ``collate_fn`` of torch's kind.

    Attributes:
        collate_fn: called with whatever ``__getitems__`` returned, or with the list of samples.
        takes_anything: tells who fetches the samples so.
    """

    collate_fn: Callable[[Any], Any]
    takes_anything = True

    def __call__(self, fetched: Any) -> Any:
        return self.collate_fn(fetched)


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

    transform: Callable[[Any], Any]
    collate_fn: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        sample = self.transform(sample)
        return SKIP if sample is SKIP else self.collate_fn(sample)


@dataclass(repr=False, eq=False)
class WorkerInit:
    """Call a ``worker_init_fn`` of torch's kind.

    Attributes:
        function: called with the number of the worker; of a stream, for each fresh copy of the
            dataset, with that of the shard.
    """

    function: Callable[[int], Any]

    def __call__(self, info: WorkerInfo) -> None:
        self.function(info.id)
        drawn = drawn_from()
        if drawn:
            logger.warning(
                "worker_init_fn has seeded %s, or drawn from it: that has no effect, since the "
                "global generators are seeded anew for each batch, from the loader's seed; call "
                "torch.manual_seed in the script, or give the loader a generator (said once)",
                " and ".join(drawn),
            )


def number_of(told: Any) -> int | None:
    """Return the number of its epoch that a sampler, or a stream, shows; None: it shows none."""
    if not has_epochs(told):
        return None
    for name in ("epoch", "_epoch"):
        value: Any = getattr(told, name, None)
        with suppress(TypeError, ValueError, OverflowError):
            if int(value) == value:
                return int(value)
    return None


_torch_info: WorkerInfo | None = None
"""What torch's ``get_worker_info`` is to answer; None if that is left to torch."""

_MODULE = "torch.utils.data._utils.worker"


def set_torch_info(info: WorkerInfo) -> None:
    """Make torch's ``get_worker_info`` answer in this process, also if torch is imported later."""
    global _torch_info
    if info is not _torch_info:
        _torch_info = info
        when_imported(_MODULE, _write_worker_info)


def save_with_torch() -> Callable[[], None]:
    """Note the global generators, and what torch's ``get_worker_info`` answers."""
    former = _torch_info
    answer = getattr(sys.modules.get(_MODULE), "_worker_info", None)
    restore_globals = save_globals()

    def restore() -> None:
        global _torch_info
        if _torch_info is not former:
            if former is None:
                forget(_MODULE, _write_worker_info)
            if _MODULE in sys.modules:
                vars(sys.modules[_MODULE])["_worker_info"] = answer
            _torch_info = former  # last: if Ctrl-C comes, all of this is done again
        restore_globals()

    return restore


def _write_worker_info(module: ModuleType) -> None:
    torchs: Any = module
    info = _torch_info
    assert info is not None
    dataset = info.dataset
    seed = info.seed
    if getattr(type(dataset), "of_drop_in", False):
        if dataset.read_once and info.epoch:
            # Torch draws another for each epoch, which datasets shuffle by. This one follows from
            # the epoch, for resumed runs.
            seed = derive("epoch", seed, info.epoch) >> 66  # with the id it is below 2**63
        dataset = dataset.dataset
    torchs._worker_info = torchs.WorkerInfo(
        id=info.id, num_workers=info.num_workers, seed=seed + info.id, dataset=dataset
    )


def collate_in_private_memory(storage: Any) -> None:
    """Have torch's own ``default_collate``, and PyG's, use ordinary memory in this worker process.

    In a worker it puts batches where torch's loader would share them, in ``/dev/shm``: one that is
    small, as in a container, ends the worker with a bus error. From here they go by a slot.

    Args:
        storage: the module ``torch.storage``.
    """

    # Those with a type are made of it.
    def new_private(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        return cls(size, device=device)

    storage.UntypedStorage._new_shared = classmethod(new_private)
