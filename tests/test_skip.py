"""Samples that are left out of their batches: the same ones, wherever batches are made."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import require, variants
from helpers import once_in

from minloader import SKIP, BatchSampler, Loader, get_worker_info


class Readings:
    """Samples 3, 4, 5 and 7 cannot be read; those from 8 on are read in another way."""

    bad = (3, 4, 5, 7)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return SKIP if index in self.bad else np.int64(index)


class ManyReadings(Readings):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Faulty(Readings):
    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"sample {index} is corrupt")
        return np.int64(index)


class Deadly(Readings):
    """Kills its worker once, in the middle of the batch that has lost a sample."""

    def __init__(self, folder: Any) -> None:
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 6 and once_in(self.folder, 6):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stream:
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, 12, max(1, info.num_workers if info else 1)):
            yield Readings()[index]


def skip_odd(sample: Any) -> Any:
    return SKIP if sample % 2 else sample


def refuse_odd(sample: Any) -> Any:
    if sample % 2:
        raise ValueError(f"{sample} is odd")
    return sample


def lists(loader: Loader) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in loader]


@pytest.mark.parametrize("dataset", [Readings(), ManyReadings()], ids=["one", "many"])
def test_samples_that_the_dataset_skips(make, dataset):
    with make(dataset, BatchSampler(12, 4), collate_fn=np.stack) as loader:
        assert lists(loader) == [[0, 1, 2], [6], [8, 9, 10, 11]]
        assert (loader.stats.skipped, loader.stats.skipped_samples) == (0, 4)


def test_a_batch_of_none_is_skipped(make):
    with make(Readings(), batch_size=3) as loader:
        assert lists(loader) == [[0, 1, 2], [6, 8], [9, 10, 11]]
        assert (loader.stats.skipped, loader.stats.skipped_samples) == (1, 4)


def test_samples_that_transform_skips(make):
    with make(Readings(), batch_size=4, transform=skip_odd) as loader:
        assert lists(loader) == [[0, 2], [6], [8, 10]]
        assert loader.stats.skipped_samples == 4 + 3


@pytest.mark.parametrize(
    ("options", "batches", "skipped"),
    [
        ({"batch_size": 3}, [[0, 2], [6, 8], [10]], 1),
        ({"sampler": range(12)}, [0, 2, 6, 8, 10], 7),
    ],
)
def test_samples_that_fail(make, caplog, options, batches, skipped):
    with make(Faulty(), transform=refuse_odd, on_error="skip_sample", **options) as loader:
        assert lists(loader) == batches
        assert (loader.stats.skipped, loader.stats.skipped_samples) == (skipped, 4 + 3)
    if make.name in ("inline", "thread"):
        assert "left out sample 3: OSError('sample 3 is corrupt')" in caplog.text
        assert "left out sample 9: ValueError('9 is odd')" in caplog.text


def test_what_is_no_samples_fault_is_raised(make):
    def refuse(samples: list[Any]) -> Any:
        raise ArithmeticError("cannot stack")

    with make(Faulty(), batch_size=3, collate_fn=refuse, on_error="skip_sample") as loader:
        batches = iter(loader)
        with pytest.raises(ArithmeticError, match="cannot stack"):
            next(batches)


def test_an_item_that_is_the_batch(make):
    with make(Readings(), range(12)) as loader:
        assert lists(loader) == [0, 1, 2, 6, 8, 9, 10, 11]
        assert loader.stats.skipped == 4


def test_batches_of_several_shards_stay_whole(make):
    items = [[[0, 1], [2, 6]], [[1, 3], [6, 7]], [[3, 4], [6, 8]]]
    with make(Readings(), items, collate_fn=list) as loader:
        assert list(loader) == [[[0, 1], [2, 6]], [[1], [6]]]
        assert (loader.stats.skipped, loader.stats.skipped_samples) == (1, 4)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, {"executor": "thread"}])
def test_streams(options):
    with Loader(Stream(), batch_size=3, transform=skip_odd, **options) as loader:
        assert lists(loader) == [[0, 2], [6, 8], [10]]
        assert (loader.stats.skipped, loader.stats.skipped_samples) == (1, 7)
    with Loader(Stream(), **options) as loader:
        assert lists(loader) == [0, 1, 2, 6, 8, 9, 10, 11]


def test_the_same_after_a_kill(tmp_path):
    with Loader(Deadly(tmp_path), batch_size=4, num_workers=2) as loader:
        assert lists(loader) == [[0, 1, 2], [6], [8, 9, 10, 11]]
        assert (loader.stats.replaced, loader.stats.skipped_samples) == (1, 4)


@variants("k", range(4))
def test_the_same_after_a_resume(make, k):
    with make(Readings(), batch_size=3) as loader:
        whole = lists(loader)
    with make(Readings(), batch_size=3) as loader:
        batches = iter(loader)
        for _ in range(k):
            next(batches)
        state = loader.state_dict()
        del batches
    with make(Readings(), batch_size=3, seed=loader.seed) as loader:
        loader.load_state_dict(state)
        assert lists(loader) == whole[k:]


def test_with_torch():
    require("torch")
    from minloader.torch import DataLoader

    for num_workers in (0, 2):
        with DataLoader(ManyReadings(), batch_size=4, num_workers=num_workers) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2], [6], [8, 9, 10, 11]]
