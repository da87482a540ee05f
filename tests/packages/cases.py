"""A small dataset of each package, in the current folder: it is made there once, and then read.

Workers import this module.
"""

from __future__ import annotations

import functools
import io
import os
import tarfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minloader import collate

N = 24
Case = tuple[Any, dict[str, Any]]
BATCHED: dict[str, Any] = {"batch_size": 4, "collate_fn": collate}
SEEDED = BATCHED | {"seed_generators": True}


class Rows:
    """Samples of what is opened by a function, where they are read first."""

    def __init__(self, opens: Callable[[], Any], read: Callable[[Any, int], Any]) -> None:
        self.opens = opens
        self.read = read
        self.opened: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            self.opened = self.opens()
        return np.asarray(self.read(self.opened, index))


def of_lmdb() -> Case:
    import lmdb

    if not os.path.exists("lmdb"):
        with lmdb.open("lmdb") as database, database.begin(write=True) as writing:
            for n in range(N):
                writing.put(b"%d" % n, b"%d" % (n * n))

    def read(database: Any, n: int) -> int:
        with database.begin() as reading:
            return int(reading.get(b"%d" % n))

    return Rows(_open_lmdb, read), BATCHED


@functools.cache  # a process may open it once
def _open_lmdb() -> Any:
    import lmdb

    return lmdb.open("lmdb", readonly=True, lock=False)


def of_zarr() -> Case:
    import zarr

    if not os.path.exists("z.zarr"):
        zarr.save("z.zarr", np.arange(N * 3).reshape(N, 3))
    return Rows(lambda: zarr.open("z.zarr", mode="r"), lambda array, n: array[n]), BATCHED


def of_obstore() -> Case:
    import obstore
    from obstore.store import LocalStore

    if not os.path.exists("objects"):
        os.makedirs("objects")
        for n in range(N):
            obstore.put(LocalStore("objects"), f"{n}", b"%d" % n)

    def read(store: Any, n: int) -> int:
        return int(obstore.get(store, f"{n}").bytes().to_bytes())

    return Rows(lambda: LocalStore("objects"), read), BATCHED


def of_lance() -> Case:
    import lance
    import pyarrow

    if not os.path.exists("rows.lance"):
        lance.write_dataset(pyarrow.table({"x": list(range(N))}), "rows.lance")

    def read(rows: Any, n: int) -> int:
        return int(rows.take([n])["x"][0].as_py())

    return Rows(lambda: lance.dataset("rows.lance"), read), BATCHED


def of_datasets() -> Case:
    import datasets

    return datasets.Dataset.from_dict({"x": list(range(N))}).with_format("numpy"), BATCHED


def of_datasets_stream() -> Case:
    import datasets

    made = datasets.Dataset.from_dict({"x": list(range(N))}).to_iterable_dataset(num_shards=4)
    return made, BATCHED


def of_datasets_shuffled() -> Case:
    stream, options = of_datasets_stream()
    return stream.shuffle(seed=0, buffer_size=8), options


def of_webdataset() -> Case:
    import webdataset

    if not os.path.exists("shard-3.tar"):
        for shard in range(4):
            with tarfile.open(f"shard-{shard}.tar", "w") as tar:
                for n in range(shard, N, 4):
                    data = b"%d" % n
                    member = tarfile.TarInfo(f"{n:04}.cls")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    stream = webdataset.WebDataset("shard-{0..3}.tar", shardshuffle=False, empty_check=False)
    return stream.decode().to_tuple("cls"), BATCHED


class Augmented:
    """An image for each index, as a random transform makes it."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        image = np.random.default_rng(index).integers(0, 255, (16, 16, 3), np.uint8)
        return np.asarray(self.transform(image=image)["image"])


def of_albumentations() -> Case:
    import albumentations

    return Augmented(
        albumentations.Compose(
            [albumentations.RandomCrop(4, 4), albumentations.RandomBrightnessContrast()]
        )
    ), SEEDED


def of_monai() -> Case:
    import monai

    images = [np.full((1, 8, 8), n, np.float32) for n in range(N)]
    return monai.data.Dataset(images, monai.transforms.RandGaussianNoise(prob=1.0)), SEEDED


def of_torch_geometric() -> Case:
    import torch
    from torch_geometric.data import Batch, Data

    graphs = [
        Data(x=torch.full((n % 3 + 1, 2), n), edge_index=torch.zeros(2, 1, dtype=torch.long))
        for n in range(N)
    ]
    return graphs, {"batch_size": 4, "collate_fn": Batch.from_data_list}


def of_streaming() -> Case:
    import streaming

    if not os.path.exists("mds"):
        with streaming.MDSWriter(out="mds", columns={"x": "int"}) as writer:
            for n in range(N):
                writer.write({"x": n})
    return streaming.StreamingDataset(local="mds", batch_size=4), BATCHED


def of_litdata() -> Case:
    import litdata

    if not os.path.exists("chunks"):
        litdata.optimize(int, list(range(N)), "chunks", chunk_size=6, num_workers=1, verbose=False)
    return litdata.StreamingDataset("chunks"), BATCHED


class Package(NamedTuple):
    """A package that is tried.

    Attributes:
        distribution: its name on PyPI.
        make: returns a dataset, and the options of a loader for it.
    """

    distribution: str
    make: Callable[[], Case]


CASES = {
    "lmdb": Package("lmdb", of_lmdb),
    "zarr": Package("zarr", of_zarr),
    "obstore": Package("obstore", of_obstore),
    "lance": Package("pylance", of_lance),
    "HF datasets, map-style": Package("datasets", of_datasets),
    "HF datasets, a stream": Package("datasets", of_datasets_stream),
    "HF datasets, a shuffled stream": Package("datasets", of_datasets_shuffled),
    "webdataset": Package("webdataset", of_webdataset),
    "albumentations": Package("albumentations", of_albumentations),
    "MONAI": Package("monai", of_monai),
    "torch_geometric": Package("torch-geometric", of_torch_geometric),
    "MosaicML streaming": Package("mosaicml-streaming", of_streaming),
    "litData": Package("litdata", of_litdata),
}
