"""Samples that are left out of their batches: the same ones, wherever batches are made."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import require
from helpers import once_in

from minloader import SKIP, BatchError, BatchSampler, Loader, get_worker_info

pytestmark = pytest.mark.usefixtures("quick_starts")

inline = pytest.mark.parametrize("make", ["inline"], indirect=True)
"""Where batches are made is no matter: figures of each executor are in other tests here."""


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
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (0, 4)


@inline
def test_a_batch_of_none_is_skipped(make):
    with make(Readings(), batch_size=3) as loader:
        assert lists(loader) == [[0, 1, 2], [6, 8], [9, 10, 11]]
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (1, 4)
    # Nothing has failed, so there may be an epoch of none.
    with make(Readings(), [[3, 4], [5, 7]], collate_fn=np.stack) as loader:
        assert lists(loader) == []
        assert (loader.stats.errors.skipped, loader.stats.errors.failed) == (2, 0)


@inline
def test_samples_that_transform_skips(make):
    with make(Readings(), batch_size=4, transform=skip_odd) as loader:
        assert lists(loader) == [[0, 2], [6], [8, 10]]
        assert loader.stats.errors.skipped_samples == 4 + 3


@pytest.mark.parametrize(
    ("options", "batches", "skipped"),
    [
        ({"batch_size": 3}, [[0, 2], [6, 8], [10]], 1),
        ({"sampler": range(12)}, [0, 2, 6, 8, 10], 7),
    ],
)
def test_samples_that_fail(make, caplog, options, batches, skipped):
    with make(Faulty(), transform=refuse_odd, on_sample_error="skip", **options) as loader:
        assert lists(loader) == batches
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (
            skipped,
            4 + 3,
        )
    assert caplog.text.count("left out sample 3: OSError: sample 3 is corrupt") == 1
    assert caplog.text.count("left out sample 9: ValueError: 9 is odd") == 1


def mend(failure: BatchError) -> Any:
    """An ``on_sample_error``: it leaves one out, refuses one, and puts others in their places."""
    assert failure.worker is not None
    if failure.sample == 5:
        assert failure.__cause__ is not None
        raise failure.__cause__
    return SKIP if failure.sample == 4 else np.int64(-failure.sample)


def mend_batch(failure: BatchError) -> Any:
    """An ``on_error``: it is asked for the batch whose sample was refused."""
    assert (failure.ordinal, failure.item, failure.sample) == (1, [3, 4, 5], 5)
    assert isinstance(failure.__cause__, OSError)
    return np.array([-100])


def test_a_callable_is_asked_about_samples(make):
    """In whatever executor, where the sample is made; what it returns takes the sample's place."""
    options = {"on_error": mend_batch, "on_sample_error": mend}
    with make(Faulty(), batch_size=3, transform=refuse_odd, **options) as loader:
        assert lists(loader) == [[0, -1, 2], [-100], [6, -7, 8], [-9, 10, -11]]
        errors = sorted((sample, error) for _, _, sample, error in loader.stats.errors.last)
        assert loader.stats.errors.skipped_samples == 0
    assert [sample for sample, _ in errors] == [1, 3, 4, 5, 7, 7, 9, 11]  # -7 is odd, too
    assert errors[1] == (3, "OSError: sample 3 is corrupt")


def mend_of_stream(failure: BatchError) -> Any:
    assert isinstance(failure.__cause__, ValueError)
    assert failure.sample is None  # samples of a stream have no index
    return SKIP if "11" in str(failure) else -1


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, {"executor": "thread"}])
def test_a_callable_is_asked_about_samples_of_a_stream(options):
    options = {
        "batch_size": 3,
        "transform": refuse_odd,
        "on_sample_error": mend_of_stream,
    } | options
    with Loader(Stream(), **options) as loader:
        assert lists(loader) == [[0, -1, 2], [6, 8], [-1, 10]]
        assert loader.stats.errors.failed == 3


@inline
def test_what_is_no_samples_fault_is_raised(make):
    def refuse(samples: list[Any]) -> Any:
        raise ArithmeticError("cannot stack")

    with make(Faulty(), batch_size=3, collate_fn=refuse, on_sample_error="skip") as loader:
        batches = iter(loader)
        with pytest.raises(ArithmeticError, match="cannot stack"):
            next(batches)


@inline
@pytest.mark.parametrize("options", [{"on_sample_error": "skip"}, {"on_error": "skip"}])
def test_of_many_failures_the_log_has_the_first(make, caplog, options):
    with make(fails, range(251), **options) as loader:
        assert list(loader) == [250]
        assert loader.stats.errors.failed == 250
    assert len(caplog.messages) == 9 + 2
    assert "; 100 have failed by now; the next line comes at ten times" in caplog.messages[-1]


def fails(item: int) -> int:
    if item < 250:
        raise ValueError(item)
    return item


@inline
def test_an_item_that_is_the_batch(make):
    with make(Readings(), range(12)) as loader:
        assert lists(loader) == [0, 1, 2, 6, 8, 9, 10, 11]
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (4, 4)
    with make(Readings(), [3, 4, 5]) as loader:
        assert lists(loader) == []
        assert loader.stats.errors.skipped == 3


@inline
def test_batches_of_several_shards_stay_whole(make):
    items = [[[0, 1], [2, 6]], [[1, 3], [6, 7]], [[3, 4], [6, 8]]]
    with make(Readings(), items, collate_fn=list) as loader:
        assert list(loader) == [[[0, 1], [2, 6]], [[1], [6]]]
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (1, 4)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, {"executor": "thread"}])
def test_streams(options):
    with Loader(Stream(), batch_size=3, transform=skip_odd, **options) as loader:
        assert lists(loader) == [[0, 2], [6, 8], [10]]
        assert (loader.stats.errors.skipped, loader.stats.errors.skipped_samples) == (1, 7)
    with Loader(Stream(), **options) as loader:
        assert lists(loader) == [0, 1, 2, 6, 8, 9, 10, 11]


def test_the_same_after_a_kill(tmp_path):
    with Loader(Deadly(tmp_path), batch_size=4, num_workers=2) as loader:
        assert lists(loader) == [[0, 1, 2], [6], [8, 9, 10, 11]]
        assert (loader.stats.errors.replaced, loader.stats.errors.skipped_samples) == (1, 4)


@inline
@pytest.mark.parametrize("k", range(4))
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


# --- what has failed is a list


def test_what_failed_is_a_list(make):
    with make(Faulty(), batch_size=3, transform=refuse_odd, on_sample_error="skip") as loader:
        for _ in range(2):
            list(loader)
        stats = loader.stats
    assert stats.errors.failed == 14
    assert sorted(stats.errors.last) == [
        (epoch, sample // 3, sample, error)
        for epoch in (0, 1)
        for sample, error in [
            (1, "ValueError: 1 is odd"),
            *((n, f"OSError: sample {n} is corrupt") for n in (3, 4, 5, 7)),
            *((n, f"ValueError: {n} is odd") for n in (9, 11)),
        ]
    ]


@pytest.mark.parametrize("make", ["inline", "process-2"], indirect=True)
@pytest.mark.parametrize("on_error", ["skip", "raise", lambda error: -1])
def test_batches_that_failed_are_in_the_list(make, on_error):
    with make(Faulty(), batch_size=2, on_error=on_error) as loader:
        batches = iter(loader)
        for _ in range(12):
            try:
                next(batches)
            except OSError:
                continue
            except StopIteration:
                break
        stats = loader.stats
    assert stats.errors.failed == 3
    assert [(batch, sample) for _, batch, sample, _ in stats.errors.last] == [
        (1, 3),
        (2, 4),
        (3, 7),
    ]


def test_of_many_errors_the_last_are_kept():
    options = {"num_workers": 0, "on_error": "skip", "max_errors": 1500}
    with Loader(Faulty(), [3] * 1500 + [0], **options) as loader:
        assert list(loader) == [0]
        assert (loader.stats.errors.failed, len(loader.stats.errors.last)) == (1500, 1000)
        assert loader.stats.errors.last[0][1] == 500


@pytest.mark.parametrize("make", ["inline", "thread"], indirect=True)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"on_error": "skip"}, [0, 1, 2]),
        ({"on_sample_error": "skip"}, [0, 1, 2]),
        ({"on_error": lambda _: 0}, None),
    ],
)
def test_too_many_errors_end_the_run(make, options, given):
    """Whatever on_error says; the first are shown. What is around comes, to whoever goes on."""
    before = [] if given is None else given
    with make(Faulty(), batch_size=1, max_errors=2, **options) as loader:
        found = []
        batches = iter(loader)
        with pytest.raises(BatchError) as caught:
            found.extend(np.asarray(batch).tolist() for batch in batches)
        assert loader.stats.errors.failed >= 3
        rest = [np.asarray(batch).tolist() for batch in _going_on(batches)]
    if given is not None:
        assert [each for (each,) in found] == before
        assert [each for (each,) in rest] == [6, 8, 9, 10, 11]
    error = caught.value
    assert (error.ordinal, error.sample) == (5, 5)
    text = str(error)
    assert (
        "3 of the batches and samples of epoch 0 failed, more than max_errors=2 allows; the first "
        "of these:\n"
    ) in text
    assert "  batch 3, sample 3: OSError: sample 3 is corrupt\n  batch 4, sample 4" in text


@pytest.mark.parametrize("argument", ["on_error", "on_sample_error"])
def test_samples_whose_indices_look_alike_are_several(argument):
    paths = [Path(f"/data/train/kind-{n}/images/000001.jpeg") for n in range(8)]
    options = {"num_workers": 0, "collate_fn": list, "max_errors": 3, argument: "skip"}
    loader = Loader(Path.read_bytes, [[path] for path in paths], **options)
    with pytest.raises(BatchError, match="4 of the batches and samples of epoch 0 failed"):
        list(loader)


def _going_on(batches: Iterator[Any]) -> Iterator[Any]:
    for _ in range(20):
        try:
            yield next(batches)
        except BatchError:
            continue
        except StopIteration:
            return


@pytest.mark.parametrize("argument", ["on_error", "on_sample_error"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_log_that_is_kept_keeps_no_dataset(argument, num_workers, caplog):
    options: Any = {argument: "skip", "num_workers": num_workers, "executor": "thread"}
    dataset = Faulty()
    with Loader(dataset, range(12), **options) as loader:
        assert len(list(loader)) == 8
    kept = weakref.ref(dataset)
    del dataset, loader
    gc.collect()
    assert [kept(), len(caplog.records)] == [None, 4]
