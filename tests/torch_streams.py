"""Real packages of streams: each sample once, torch's batches, and the rest after a resume.

A program, since the packages leave threads and files of their own: the name of one, and a folder.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from minloader.torch import DataLoader

ROWS = 160
PARTS = [range(20 * n, 20 * n + 20) for n in range(8)]
EVERY = list(range(ROWS))


def webdataset(folder: Path, shuffled: bool) -> Any:
    """Return a stream of eight tar files; if shuffled, by the time, and so never alike."""
    import webdataset

    paths = [folder / f"{n}.tar" for n in range(len(PARTS))]
    for path, part in zip(paths, PARTS, strict=True):
        with tarfile.open(path, "w") as tar:
            for row in part:
                entry = tarfile.TarInfo(f"{row:04}.txt")
                entry.size = len(str(row))
                tar.addfile(entry, io.BytesIO(str(row).encode()))
    data = webdataset.WebDataset([str(path) for path in paths], shardshuffle=8 * shuffled)
    if shuffled:
        data = data.shuffle(50, rng=random.Random(time.time_ns()))
    return data.map(lambda sample: {"n": int(sample["txt"])})


def datasets(folder: Path, kind: str) -> Any:
    """Return a dataset of eight files of Parquet."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    datasets.disable_progress_bars()
    paths = [str(folder / f"{n}.parquet") for n in range(len(PARTS))]
    for path, part in zip(paths, PARTS, strict=True):
        parquet.write_table(pyarrow.table({"n": part}), path)
    if kind == "map":
        return datasets.Dataset.from_parquet(paths, cache_dir=str(folder))
    data = datasets.IterableDataset.from_parquet(paths)
    return data.shuffle(seed=3, buffer_size=50) if kind == "shuffled" else data


def rows(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def check_rest(make: Any) -> None:
    """Each batch is torch's, and after a resume come those that were not delivered."""
    whole = rows(TorchLoader(make(), 8, num_workers=2))
    with DataLoader(make(), 8, num_workers=2) as loader:
        batches, states = iter(loader), []
        for batch in whole:
            assert next(batches)["n"].tolist() == batch
            states.append(json.loads(json.dumps(loader.state_dict())))
    for taken in (1, 6, len(whole) - 1):
        with DataLoader(make(), 8, num_workers=2) as other:
            other.load_state_dict(states[taken - 1])
            assert rows(other) == whole[taken:], taken


def check_webdataset(folder: Path) -> None:
    for workers, persistent in [(2, False), (2, True), (3, False)]:
        options = {"num_workers": workers, "persistent_workers": persistent}
        with DataLoader(webdataset(folder, True), 8, **options) as loader:
            for _ in range(5):
                assert sorted(chain.from_iterable(rows(loader))) == EVERY, options
            assert loader.stats.errors.reread == 0
    check_rest(lambda: webdataset(folder, False))


def check_datasets(folder: Path) -> None:
    for kind in ("map", "shuffled"):
        epochs = []
        for make in (TorchLoader, DataLoader):
            torch.manual_seed(1)
            data = datasets(folder, kind)
            loader = make(data, 8, shuffle=kind == "map" or None, num_workers=2)
            epochs.append([])
            for epoch in range(2):
                data.set_epoch(epoch) if kind != "map" else None
                epochs[-1].append(rows(loader))
                assert sorted(chain.from_iterable(epochs[-1][-1])) == EVERY, (kind, epoch)
        loader.close()
        assert epochs[0] == epochs[1], kind
    check_rest(lambda: datasets(folder, "streaming"))


if __name__ == "__main__":
    checks = {"webdataset": check_webdataset, "datasets": check_datasets}
    checks[sys.argv[1]](Path(sys.argv[2]))
