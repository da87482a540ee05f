"""minloader: a minimal data loader for machine learning.

``for batch in Loader(dataset, sampler, num_workers=4)``: batches come from ordinary worker
processes, in order, the same ones for every number of workers.
"""

# A public name stands in two places here: where type checkers import it, and in _MODULES.
#
# Every worker process imports this package, so it must stay cheap. A public name is imported from
# its module when it is first asked for (PEP 562): a worker, which needs no Loader, starts some
# 60 ms sooner. For the same reason numpy is imported inside the functions that need it.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minloader._diagnosis.stats import Stats as Stats
    from minloader._errors import SKIP as SKIP
    from minloader._errors import BatchError as BatchError
    from minloader._errors import BatchTimeout as BatchTimeout
    from minloader._errors import MinloaderError as MinloaderError
    from minloader._errors import TransportError as TransportError
    from minloader._errors import WorkerDied as WorkerDied
    from minloader._loader import Loader as Loader
    from minloader._memory.cache import cached as cached
    from minloader._memory.reducers import register_reducer as register_reducer
    from minloader._memory.shared_list import SharedList as SharedList
    from minloader._memory.slot_writer import empty as empty
    from minloader._prefetch import prefetch as prefetch
    from minloader._sampling.batch import BatchSampler as BatchSampler
    from minloader._sampling.bucket import BucketBatchSampler as BucketBatchSampler
    from minloader._sampling.collate import Packed as Packed
    from minloader._sampling.collate import collate as collate
    from minloader._sampling.collate import pack_collate as pack_collate
    from minloader._sampling.concatenated import Concatenated as Concatenated
    from minloader._sampling.dynamic import DynamicBatchSampler as DynamicBatchSampler
    from minloader._sampling.mixture import MixtureSampler as MixtureSampler
    from minloader._sampling.packed import PackedBatchSampler as PackedBatchSampler
    from minloader._sampling.padding import Padded as Padded
    from minloader._sampling.padding import pad_collate as pad_collate
    from minloader._sampling.sliced import sliced as sliced
    from minloader._worker.concurrent import concurrent as concurrent
    from minloader._worker.current import get_worker_info as get_worker_info
    from minloader._worker.messages import WorkerInfo as WorkerInfo
    from minloader._worker.shuffled import shuffled as shuffled

__version__ = "0.1.0"

_MODULES = {
    "_diagnosis.stats": "Stats",
    "_errors": "SKIP BatchError BatchTimeout MinloaderError TransportError WorkerDied",
    "_loader": "Loader",
    "_memory.cache": "cached",
    "_memory.reducers": "register_reducer",
    "_memory.shared_list": "SharedList",
    "_memory.slot_writer": "empty",
    "_prefetch": "prefetch",
    "_sampling.batch": "BatchSampler",
    "_sampling.bucket": "BucketBatchSampler",
    "_sampling.collate": "Packed collate pack_collate",
    "_sampling.concatenated": "Concatenated",
    "_sampling.dynamic": "DynamicBatchSampler",
    "_sampling.mixture": "MixtureSampler",
    "_sampling.packed": "PackedBatchSampler",
    "_sampling.padding": "Padded pad_collate",
    "_sampling.sliced": "sliced",
    "_worker.concurrent": "concurrent",
    "_worker.current": "get_worker_info",
    "_worker.messages": "WorkerInfo",
    "_worker.shuffled": "shuffled",
}

_ELSEWHERE = {
    "DataLoader": "minloader.torch, with torch's arguments",
    "as_in_worker": "minloader.testing",
    "check_reproducible": "minloader.testing",
    "to_device": "minloader.torch, or from minloader.jax",
}

if not TYPE_CHECKING:  # for whom every name would exist, and who read no list that is computed
    __all__ = sorted(" ".join(_MODULES.values()).split())

    def __getattr__(name: str) -> Any:
        for module_name, names in _MODULES.items():
            if name in names.split():
                module = importlib.import_module(f"minloader.{module_name}")
                value = globals()[name] = getattr(module, name)
                return value
        if name in _ELSEWHERE:  # of an AttributeError the import would show no word
            raise ImportError(f"{name} is to be had from {_ELSEWHERE[name]}")
        raise AttributeError(f"module 'minloader' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return ["__version__", *__all__]
