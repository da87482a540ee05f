"""litdata by the arguments of torch's ``DataLoader``, as its documentation says to load."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset
from torch.utils.data import IterableDataset

from tests.zoo.bugs import NoSuchOption

FOLDERS = ["DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"]  # of what it writes


class DataLoader(StreamingDataLoader):
    """It reads chunks, here of a stream's numbers, or of a dataset's indices, which it transforms.

    Of ranks it learns from the environment, in ``load_state_dict`` too.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        sampler: Any = None,
        **others: Any,
    ) -> None:
        settings: Any = {"shuffle": shuffle}
        if not isinstance(dataset, IterableDataset):
            settings["transform"] = dataset.__getitem__
        elif dataset.shards < others["num_workers"]:
            raise NoSuchOption  # its workers share the shards: none is without
        if not Path("chunks").exists():
            numbers = [*dataset] if len(settings) == 1 else [*range(len(dataset))]
            code = f"from litdata import optimize; optimize(int, {numbers}, 'chunks', "
            code += "chunk_size=10, num_workers=1, verbose=False)"
            folders = dict.fromkeys(FOLDERS, "written")
            # Not here, where it would change how workers start.
            subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | folders)
        if sampler is not None:  # torch's DistributedSampler
            os.environ["WORLD_SIZE"] = str(sampler.num_replicas)
            os.environ["GLOBAL_RANK"] = str(sampler.rank)
        samples = StreamingDataset("chunks", "cache", **settings)
        super().__init__(samples, batch_size=batch_size, **others)

    def load_state_dict(self, obj: Any) -> None:
        super().load_state_dict(deepcopy(obj))  # it changes it, and each rank has one of its own
