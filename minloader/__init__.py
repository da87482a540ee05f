"""minloader: a minimal data loader for machine learning.

``for batch in Loader(dataset, sampler, num_workers=4)``: batches come from ordinary worker
processes, in order, the same ones for every number of workers.
"""

# Every worker process imports this package, so it must stay cheap. A public name is imported from
# its module when it is first asked for (PEP 562): a worker, which needs no Loader, starts some
# 60 ms sooner. For the same reason numpy is imported inside the functions that need it.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minloader._errors import (
        SKIP,
        BatchError,
        BatchTimeout,
        MinloaderError,
        TransportError,
        WorkerDied,
    )
    from minloader._insight.stats import Stats
    from minloader._loader import Loader
    from minloader._memory.cache import cached
    from minloader._memory.shared_list import SharedList
    from minloader._memory.slot_writer import empty
    from minloader._prefetch import prefetch
    from minloader._sampling.batch import BatchSampler
    from minloader._sampling.collate import Packed, Padded, collate, pack_collate, pad_collate
    from minloader._sampling.concatenated import Concatenated
    from minloader._sampling.dynamic import DynamicBatchSampler
    from minloader._sampling.mixture import MixtureSampler
    from minloader._sampling.packed import PackedBatchSampler
    from minloader._sampling.sliced import sliced
    from minloader._worker.concurrent import concurrent
    from minloader._worker.current import get_worker_info
    from minloader._worker.messages import WorkerInfo
    from minloader._worker.shuffled import shuffled

__all__ = [
    "SKIP",
    "BatchError",
    "BatchSampler",
    "BatchTimeout",
    "Concatenated",
    "DynamicBatchSampler",
    "Loader",
    "MinloaderError",
    "MixtureSampler",
    "Packed",
    "PackedBatchSampler",
    "Padded",
    "SharedList",
    "Stats",
    "TransportError",
    "WorkerDied",
    "WorkerInfo",
    "cached",
    "collate",
    "concurrent",
    "empty",
    "get_worker_info",
    "pack_collate",
    "pad_collate",
    "prefetch",
    "shuffled",
    "sliced",
]

__version__ = "0.1.0"

_MODULES = {
    "_errors": "SKIP BatchError BatchTimeout MinloaderError TransportError WorkerDied",
    "_insight.stats": "Stats",
    "_loader": "Loader",
    "_memory.cache": "cached",
    "_memory.shared_list": "SharedList",
    "_memory.slot_writer": "empty",
    "_prefetch": "prefetch",
    "_sampling.batch": "BatchSampler",
    "_sampling.collate": "Packed Padded collate pack_collate pad_collate",
    "_sampling.concatenated": "Concatenated",
    "_sampling.dynamic": "DynamicBatchSampler",
    "_sampling.mixture": "MixtureSampler",
    "_sampling.packed": "PackedBatchSampler",
    "_sampling.sliced": "sliced",
    "_worker.concurrent": "concurrent",
    "_worker.current": "get_worker_info",
    "_worker.messages": "WorkerInfo",
    "_worker.shuffled": "shuffled",
}

if not TYPE_CHECKING:  # for whom every name would exist

    def __getattr__(name: str) -> Any:
        for module_name, names in _MODULES.items():
            if name in names.split():
                module = importlib.import_module(f"minloader.{module_name}")
                value = globals()[name] = getattr(module, name)
                return value
        raise AttributeError(f"module 'minloader' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return ["__version__", *__all__]
