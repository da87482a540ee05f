"""minloader: a minimal data loader for machine learning.

``for batch in Loader(dataset, sampler, num_workers=4)``: batches come from ordinary worker
processes, in order, the same ones for every number of workers.
"""

# Every worker process imports this package, so it must stay cheap: numpy (some 50 ms) is
# imported inside the functions that need it, never at the top of a module.

from minloader._errors import (
    SKIP,
    BatchError,
    BatchTimeout,
    MinloaderError,
    TransportError,
    WorkerDied,
)
from minloader._insight.counters import Stats
from minloader._loader import Loader
from minloader._memory.slot_writer import empty
from minloader._prefetch import prefetch
from minloader._sampling.batch import BatchSampler
from minloader._sampling.collate import Padded, collate, pad_collate
from minloader._sampling.dynamic import DynamicBatchSampler
from minloader._worker.messages import WorkerInfo
from minloader._worker.start import get_worker_info

__all__ = [
    "SKIP",
    "BatchError",
    "BatchSampler",
    "BatchTimeout",
    "DynamicBatchSampler",
    "Loader",
    "MinloaderError",
    "Padded",
    "Stats",
    "TransportError",
    "WorkerDied",
    "WorkerInfo",
    "collate",
    "empty",
    "get_worker_info",
    "pad_collate",
    "prefetch",
]

__version__ = "0.1.0"
