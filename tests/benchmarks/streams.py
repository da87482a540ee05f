"""Streams of other packages and a whole fit, with one import changed: torch's loader and ours.

figures.py has these cases among its own. Each child has one of them alone, and imports torch here.
"""

from __future__ import annotations

import io
import random
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from peers import spend
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from minloader.torch import DataLoader as OurLoader

LOADERS: dict[str, Any] = {"minloader.torch": OurLoader, "torch": TorchLoader}
SHARDS = 8
SECONDS = 0.0002
"""Of processor time, which a sample takes to be decoded."""


def decode(sample: Any) -> Any:
    spend(SECONDS)
    return sample


def decode_all(samples: dict[str, list[Any]]) -> Any:
    """Decode what a map-style dataset gives at once."""
    return {name: list(map(decode, column)) for name, column in samples.items()}


def number_in(sample: dict[str, bytes]) -> int:
    return int(decode(sample)["txt"])


class Plain(IterableDataset):  # type: ignore[type-arg]
    """Numbers, of which each worker has its part."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        part = range(info.id, self.samples, info.num_workers) if info else range(self.samples)
        return map(decode, part)


def plain(samples: int, folder: Path) -> Any:
    return Plain(samples)


def webdataset(samples: int, folder: Path) -> Any:
    """Return a stream of tar files, in an order that is never alike."""
    import webdataset

    paths = [folder / f"{shard}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        if path.exists():
            continue
        with tarfile.open(path, "w") as tar:
            for number in range(shard, samples, SHARDS):
                entry = tarfile.TarInfo(f"{number:06}.txt")
                entry.size = len(text := str(number).encode())
                tar.addfile(entry, io.BytesIO(text))
    data = webdataset.WebDataset([str(path) for path in paths], shardshuffle=SHARDS)
    return data.shuffle(50, rng=random.Random(time.time_ns())).map(number_in)


def hugging_face(samples: int, folder: Path, kind: str) -> Any:
    import datasets

    columns = {"n": list(range(samples))}
    data = datasets.Dataset.from_dict(columns)
    if kind == "map":
        return data.with_transform(decode_all)
    stream = data.to_iterable_dataset(num_shards=SHARDS).map(decode)
    return stream.shuffle(seed=3, buffer_size=50) if kind == "shuffle" else stream


STREAMS: dict[str, Callable[[int, Path], Any]] = {
    "plain": plain,
    "webdataset, shuffled": webdataset,
    "datasets, map": partial(hugging_face, kind="map"),
    "datasets, streaming": partial(hugging_face, kind="stream"),
    "datasets, shuffle()": partial(hugging_face, kind="shuffle"),
}
"""What makes each, of so many samples and a folder."""


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch["n"] if isinstance(batch, dict) else batch).tolist()
    return found


def epochs(stream: str, loader: str, samples: int, folder: Path) -> dict[str, float]:
    """Seconds of the first of three epochs and a mean of the others, each with every sample."""
    warnings.simplefilter("ignore")
    data = STREAMS[stream](samples, folder)
    batches, times = LOADERS[loader](data, 16, num_workers=2), []
    for _ in range(3):
        begin = time.perf_counter()
        found = list(map(numbers, batches))
        times.append(time.perf_counter() - begin)
        if sorted(chain.from_iterable(found)) != list(range(samples)):
            raise ValueError("not every sample came once")
    return {"first": times[0], "value": sum(times[1:]) / 2}


def fit(loader: str, batches: int) -> dict[str, float]:
    """Seconds from the start of the program to the end of a short fit with Lightning."""
    warnings.simplefilter("ignore")
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = TensorDataset(torch.randn(16 * batches, 32))
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(Model(), LOADERS[loader](data, 16, num_workers=2))
    if trainer.global_step != batches:
        raise ValueError("not every batch came")
    return {"value": time.time() - psutil.Process().create_time()}
