"""minloader: a minimal data loader for machine learning.

``for batch in Loader(dataset, sampler, num_workers=4)``: batches come from ordinary worker
processes, in order, the same ones for every number of workers.
"""

# Every worker process imports this package, so it must stay cheap: numpy (some 50 ms) is
# imported inside the functions that need it, never at the top of a module.

from minloader.collate import Padded, collate, pad_collate
from minloader.device import prefetch
from minloader.dynamic import DynamicBatchSampler
from minloader.errors import (
    SKIP,
    BatchError,
    BatchTimeout,
    MinloaderError,
    TransportError,
    WorkerDied,
)
from minloader.loader import Loader
from minloader.samplers import BatchSampler
from minloader.slots import empty
from minloader.stats import Stats
from minloader.tasks import WorkerInfo
from minloader.worker import get_worker_info

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
