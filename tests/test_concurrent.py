"""minloader.concurrent reads the samples of a batch at the same time; they are what they were."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from typing import Any

import pytest
from conftest import eventually, in_a_fork, require, variants

from minloader import SKIP, BatchError, BatchTimeout, Loader, concurrent, get_worker_info


class Meeting:
    """Each sample waits for so many others of its batch, so that they must be read at once."""

    def __init__(self, together: int = 4, size: int = 24) -> None:
        self.together, self.size = together, size
        self.barrier: Any = threading.Barrier(together)

    def __reduce__(self) -> Any:
        return type(self), (self.together, self.size)

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Any:
        if index == 5:
            return SKIP
        info = get_worker_info()
        assert info is not None
        assert info.dataset.dataset is self
        return index, int(info.rng.integers(1 << 40))

    def __getitem__(self, index: int) -> Any:
        self.barrier.wait(60)
        return self.sample(index)


class Awaited(Meeting):
    """The same, by coroutines."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        if not isinstance(self.barrier, asyncio.Barrier):
            self.barrier = asyncio.Barrier(self.together)
        await asyncio.wait_for(self.barrier.wait(), 60)
        return self.sample(index)


WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1, "executor": "thread"},
    {"num_workers": 2},
]


def batches(dataset: Any, **options: Any) -> list[Any]:
    with Loader(dataset, batch_size=4, **options) as loader:
        return [[field.tolist() for field in batch] for batch in loader]


def readers() -> int:
    return sum(thread.name == "minloader-read" for thread in threading.enumerate())


@variants("kind", [Meeting, Awaited])
def test_the_same_batches_for_any_number_of_workers(kind):
    """In the order of their indices; each sample has a generator of its own."""
    first, *others = (batches(concurrent(kind(), threads=4), **options) for options in WAYS)
    assert all(other == first for other in others)
    indices = [index for batch in first for index in batch[0]]
    assert indices == [n for n in range(24) if n != 5]
    assert len({number for batch in first for number in batch[1]}) == 23
    gc.collect()
    assert eventually(lambda: readers() == 0)  # they go with the dataset


class Failing:
    """Fails at some indices; the error of index 7 is there last."""

    def __init__(self) -> None:
        self.later = threading.Event()

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.later = threading.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            self.later.wait(20)
            raise LookupError("seven")
        if index == 6:
            return index
        if index == 10:
            self.later.set()
            raise SystemExit(3)
        if index in (8, 9):
            self.later.set()
            raise ValueError(f"no {index}")
        return index


@pytest.mark.parametrize("options", WAYS[::2], ids=str)
def test_errors_are_those_of_their_samples(options, caplog):
    """Of several, the first in the order of the batch is told."""
    dataset = concurrent(Failing(), threads=3)
    with Loader(dataset, [[0, 7, 8], [6, 10], [1, 2]], collate_fn=list, **options) as loader:
        taken = iter(loader)
        with pytest.raises(LookupError, match="seven") as caught:
            next(taken)
        assert "sample 7" in "".join(caught.value.__notes__)
        del caught
        with pytest.raises(Exception, match="SystemExit"):
            next(taken)
        assert next(taken) == [1, 2]
    with Loader(dataset, [[8, 0, 9]], collate_fn=list, on_error="skip_sample", **options) as loader:
        assert list(loader) == [[0]]
        assert loader.stats.skipped_samples == 2
    assert "left out sample 9" in caplog.text
    caplog.clear()  # with the errors, which hold the dataset, which holds the threads


def test_without_a_loader():
    dataset = concurrent(Meeting(2), threads=2)
    assert get_worker_info() is None
    plain = concurrent([10, 20, 30])
    assert (len(plain), plain[1], plain.__getitems__([2, 0])) == (3, 20, [30, 10])
    assert pickle.loads(pickle.dumps(plain)).__getitems__([1]) == [20]
    assert len(dataset) == 24


def test_within_a_running_event_loop():
    """As in a notebook."""

    async def run() -> list[Any]:
        return batches(concurrent(Awaited(), threads=4), num_workers=0)

    assert len(asyncio.run(run())) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_in_a_fork():
    """Its threads are not there, and are begun anew."""
    dataset = concurrent([1, 2, 3], threads=2)
    assert dataset[0] == 1
    assert in_a_fork(lambda: dataset[1]) == "2"


def test_where_threads_are_few(monkeypatch):
    """Some serve all; where there are none, the error says so, and the next batch tries again."""
    begin, left = threading.Thread.start, [0]

    def start(thread: threading.Thread) -> None:
        if thread.name == "minloader-read":
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    dataset = concurrent(list(range(8)), threads=4)
    with pytest.raises(RuntimeError, match="new thread"):
        dataset[0]
    left[0] = 2
    assert dataset.__getitems__(range(8)) == list(range(8))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="dataset must have __getitem__, got"):
        concurrent(iter([1]))
    with pytest.raises(ValueError, match="threads must be"):
        concurrent([1], threads=0)


def test_torchs_kind_of_loader():
    require("torch")
    from minloader.torch import DataLoader

    with DataLoader(concurrent(Meeting(), threads=4), batch_size=4, num_workers=1) as loader:
        assert [len(batch[0]) for batch in loader] == [4, 3, 4, 4, 4, 4]


def test_a_batch_that_is_never_read():
    """The worker is killed, and its threads with it."""
    dataset = concurrent(Meeting(together=5), threads=5)
    with (
        Loader(dataset, batch_size=4, num_workers=1, timeout=0.5) as loader,
        pytest.raises(BatchTimeout, match="took longer than timeout"),
    ):
        next(iter(loader))


class Exits:
    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise SystemExit(3)
        return index


class AwaitedExits:
    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return Exits()[index]


@pytest.mark.parametrize("kind", [Exits, AwaitedExits])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_exits_in_a_read(kind, num_workers):
    """asyncio would end the loop, for which all reads wait."""
    sampler = [[0, 1], [2, 3], [4, 5]]
    with Loader(concurrent(kind()), sampler, num_workers=num_workers, collate_fn=list) as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1]
        with pytest.raises(BatchError, match="SystemExit: 3"):
            next(batches)
        assert next(batches) == [4, 5]


class Wrapper:
    """Has samples of its own, and hands on what else it is asked for."""

    def __init__(self, dataset: Any) -> None:
        self.inner = dataset

    def __getitem__(self, index: int) -> Any:
        return -self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith("__get"):
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


def test_a_wrapper_is_not_passed_by():
    loader = Loader(Wrapper(concurrent(range(9))), [[1, 2]], num_workers=0, collate_fn=list)
    assert list(loader) == [[-1, -2]]
