"""What a cached dataset keeps: every sample once, for all who read it, never a torn one."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import re
import signal
import threading
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import eventually, plain, require
from helpers import SHARED, Echo, Many, Squares, cook
from trouble import Noted, die_writing

from minloader import SKIP, Loader, cached, concurrent
from minloader._memory import cache

pytestmark = pytest.mark.usefixtures("quick_starts")

MEGABYTE = 1 << 20


def test_a_sample_is_made_once_for_all_who_read_it(make, tmp_path):
    dataset = Noted(tmp_path / "calls")
    shared = cached(dataset, bytes=MEGABYTE)
    options = {"batch_size": 3, "shuffle": True}
    with Loader(dataset, num_workers=0, **options) as loader:
        expected = [plain(list(loader)) for _ in range(2)]
    os.unlink(dataset.path)
    loader = make(shared, **options)
    assert [plain(list(loader)) for _ in range(2)] == expected
    assert plain(list(make(shared, **options))) == expected[0]
    assert dataset.calls() == list(range(12))
    assert shared.kept[0] == 12
    assert len(shared) == 12


SAMPLES: list[Any] = [
    *(("array", kind, (5000,), layout, 3) for kind in ("f4", "?") for layout in ("frozen", "born")),
    ("array", "f8", (60, 80), "strided", 1),
    ("array", "i2", (200, 300), "fortran", 1),
    ("array", [("a", "i4"), ("b", "f8", (2,))], (3000,), "", 0),
    ("array", "i4", (0, 3), "", 0),
    ("objects", 3),
    ("value", b"jpeg", 10_000),
    ("value", "text", 10_000),
    ("value", None, 1),
    ("record", [("array", "u1", (40_000,), "", 5), ("value", 1.5, 1)]),
]


@pytest.mark.parametrize("recipe", SAMPLES, ids=lambda recipe: "-".join(map(str, recipe[:2])))
def test_a_sample_comes_as_it_was_made_and_may_be_changed(recipe):
    shared = cached([cook(recipe)], bytes=MEGABYTE)
    expected = pickle.dumps(cook(recipe))
    first, second = shared[0], shared[0]
    assert shared.kept[0] == 1
    assert type(second) is type(first)
    if isinstance(second, np.ndarray):
        np.testing.assert_array_equal(second, cook(recipe))
        assert (second.dtype, second.shape) == (first.dtype, first.shape)
        second[:] = second[:1]
        np.testing.assert_array_equal(shared[0], cook(recipe))
    else:
        assert pickle.dumps(second) == expected


def test_arrays_are_aligned():
    shared = cached([[np.zeros(40_001, "u1"), np.zeros(5000, "f8")]], bytes=MEGABYTE)
    assert all(array.flags.aligned for array in shared[0] + shared[0])


def test_tensors_come_as_tensors():
    torch = require("torch")
    tensors = [torch.arange(10_000.0), torch.arange(9_000).reshape(90, 100).T.bfloat16()]
    shared = cached([tensors], bytes=MEGABYTE)
    assert shared[0] is tensors
    for tensor, copy in zip(tensors, shared[0], strict=True):
        assert torch.equal(tensor, copy)
        copy[:] = 0
    assert shared[0][0].sum() == tensors[0].sum()


def test_errors_and_skipped_samples_are_not_kept():
    class Moody:
        def __init__(self) -> None:
            self.answers: list[Any] = [ValueError("not now"), SKIP, None]

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    shared = cached(Moody(), bytes=MEGABYTE)
    with pytest.raises(ValueError, match="not now"):
        shared[0]
    assert shared[0] is SKIP
    assert shared.kept[0] == 0
    assert [shared[0], shared[0]] == [None, None]


class Several(Many):
    """Notes what it is asked for."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return super().__getitems__(indices)


class OnlySeveral:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [-index for index in indices]


def test_several_samples_at_once():
    dataset = Several(6)
    shared = cached(dataset, bytes=MEGABYTE)
    with Loader(shared, [[1, 2], [2, 3, 1, 4], [4, 3]], num_workers=0, collate_fn=list) as loader:
        assert [[index for _, index in batch] for batch in loader] == [[1, 2], [2, 3, 1, 4], [4, 3]]
    assert dataset.asked == [[1, 2], [3, 4]]
    assert shared[5] == 25  # by __getitem__
    assert not hasattr(cached(Squares(3), bytes=MEGABYTE), "__getitems__")

    alone = cached(OnlySeveral(3), bytes=MEGABYTE)
    assert [alone[1], alone[1], *alone.__getitems__([1, 2])] == [-1, -1, -1, -2]
    assert alone.kept[0] == 2


def test_indices():
    shared = cached([10, 11, 12], bytes=MEGABYTE)
    assert [shared[np.int32(1)], shared[True]] == [11, 11]
    assert shared.kept[0] == 1
    squares = cached(Squares(3), bytes=MEGABYTE)
    assert [squares[2], squares[-1], squares[5]] == [4, 1, 25]  # as the dataset says
    assert squares.kept[0] == 1
    with pytest.raises(IndexError, match="list index out of range"):
        shared[3]
    assert list(shared) == [10, 11, 12]
    assert repr(shared).startswith("<cached [10, 11, 12]: 3 of 3 samples, ")
    with pytest.raises(TypeError, match=r"takes ints, got \(0, 1\); put cached\(\) around"):
        shared[0, 1]


class Awaited(Squares):
    def __init__(self) -> None:
        super().__init__(3)

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


def test_mistakes(caplog, monkeypatch):
    for dataset in (Echo(), len, {1, 2}, iter([])):
        with pytest.raises(TypeError, match="must have __len__ and __getitem__ to be cached"):
            cached(dataset, bytes=MEGABYTE)
    with pytest.raises(ValueError, match="bytes must be at least 800, got 100"):
        cached(range(100), bytes=100)
    with pytest.raises(TypeError, match="bytes must be an int, got 1000000"):
        cached(range(100), bytes=1e9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is a coroutine, .*; write cached\(concurrent\(dataset\)"):
        cached(Awaited(), bytes=MEGABYTE)
    kept = cached(concurrent(Awaited()), bytes=MEGABYTE)
    with Loader(kept, [[2, 1]], collate_fn=list, num_workers=0) as loader:
        assert list(loader) == [[4, 1]]
    shared = cached([{"lock": threading.Lock()}], bytes=MEGABYTE)
    with pytest.raises(TypeError, match=r"dataset\[0\] cannot be cached: sample\['lock'\] is a lo"):
        shared[0]
    assert caplog.text == ""
    cached([], bytes=1 << 60)
    assert "cached() may take 1,152,921,505 GB, but " in caplog.text
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(OSError, match="this system cannot share a cache"):
        cached([1], bytes=MEGABYTE)


def test_what_is_not_the_fault_of_the_sample_is_raised_as_it_is():
    class Hungry:
        failures = 2  # with pickle, and with cloudpickle

        def __reduce__(self) -> Any:
            Hungry.failures -= 1
            if Hungry.failures >= 0:
                raise MemoryError("not now")
            return Hungry, ()

    with pytest.raises(MemoryError, match="not now"):
        cached([Hungry()], bytes=MEGABYTE)[0]


def test_a_stream_is_no_dataset_to_cache():
    torch_data = require("torch.utils.data")

    class Stream(torch_data.IterableDataset):
        def __iter__(self):
            yield 1

        def __len__(self) -> int:
            return 1

    with pytest.raises(TypeError, match="must have __len__ and __getitem__ to be cached"):
        cached(Stream(), bytes=MEGABYTE)


# --- the bound


@pytest.mark.parametrize("kind", [bytes, partial(array, "b")])
def test_what_finds_no_room_is_made_each_time(kind):
    """Whether its size is known before it is packed, or not."""
    dataset = [kind(b"x" * size) for size in (60_000, 60_000, 20_000, 1000)]
    shared = cached(dataset, bytes=100_000)
    for _ in range(2):
        assert list(shared) == dataset
        samples, size = shared.kept
        assert samples == 3  # all but the second
        assert 81_000 < size <= 100_000


@pytest.mark.parametrize("kind", [np.zeros, bytes, bytearray])
def test_what_finds_no_room_is_not_packed(kind, monkeypatch):
    """That takes long, each time."""
    packed = []
    pack = cache.pack_entry
    monkeypatch.setattr(cache, "pack_entry", lambda *args: (packed.append(args[1]), pack(*args))[1])
    shared = cached([(1, {"data": kind(50_000)}), kind(1_000)], bytes=50_000)
    assert [len(shared[n]) for n in (0, 1, 0)] == [2, 1_000, 2]
    assert packed == [1]


def test_what_is_packed_smaller_than_it_looks_is_kept():
    array = np.zeros(50_000, np.uint8)
    text = b"x" * 50_000
    shared = cached([[array] * 3, [text] * 3, np.full(20_000, None)], bytes=150_000)
    assert [len(sample) for sample in shared] == [3, 3, 20_000]
    assert shared.kept[0] == 3


def test_tensors_that_are_packed_smaller_than_they_look_are_kept():
    torch = require("torch")
    expanded = torch.zeros(1).expand(1_000_000)
    whole = torch.zeros(10_000)
    shared = cached([expanded, [whole, whole[:9_000], whole[1:]]], bytes=150_000)
    assert [len(sample) for sample in shared] == [1_000_000, 3]
    assert shared.kept[0] == 2


def test_where_the_system_has_no_room(monkeypatch):
    shared = cached([b"x" * 60_000, b"y" * 60_000], bytes=MEGABYTE)
    before, pwrite = shared.kept, os.pwrite

    def write_half(fd: int, data: Any, at: int) -> int:
        return pwrite(fd, data[: len(data) // 2], at)

    def refuse(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    for way in write_half, refuse:
        monkeypatch.setattr(os, "pwrite", way)
        assert shared[0] == b"x" * 60_000
        assert shared.kept == before
    monkeypatch.undo()
    assert list(shared) + list(shared) == [b"x" * 60_000, b"y" * 60_000] * 2
    assert shared.kept[0] == 2


# --- several at once, and deaths


def test_two_who_keep_samples_take_turns(monkeypatch):
    dataset = [b"x" * 60_000, b"y" * 60_000]
    shared, pwrite = cached(dataset, bytes=MEGABYTE), os.pwrite
    other = threading.Thread(target=lambda: shared[1])

    def write(fd: int, data: Any, at: int) -> int:
        """Writes when the other thread waits for the lock; without one, when it is done."""
        monkeypatch.undo()
        other.start()
        waits = f":{os.fstat(fd).st_ino} "

        def blocked() -> bool:
            lines = Path("/proc/locks").read_text().splitlines()
            return any("->" in line and waits in line for line in lines)

        assert eventually(lambda: blocked() or not other.is_alive())
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    assert shared[0] == dataset[0]
    other.join()
    assert shared.kept[0] == 2
    assert list(shared) == dataset


def test_a_sample_that_two_make_at_once_is_kept_once():
    class Nested:
        """Has the other one make its sample meanwhile."""

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> bytes:
            if once_more:
                once_more.pop()
                assert shared[0] == b"x" * 60_000
            return b"x" * 60_000

    once_more = [True]
    shared = cached(Nested(), bytes=MEGABYTE)
    assert shared[0] == shared[0] == b"x" * 60_000
    assert shared.kept[1] < 120_000


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["before", "within", "after"])
def test_who_is_killed_while_it_writes_leaves_nothing_torn(share):
    """The child of a fork, which shares the cache as well, and dies with the lock."""
    dataset = [bytes([n]) * 60_000 for n in range(3)]
    shared = cached(dataset, bytes=MEGABYTE)
    assert shared[0] == dataset[0]
    pid = os.fork()
    if pid == 0:
        die_writing(share)
        try:
            shared[1]
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert shared.kept[0] == 1
    assert list(shared) + list(shared) == dataset + dataset
    assert shared.kept[0] == 3


def test_a_fork_that_another_thread_makes_does_not_keep_the_lock(monkeypatch):
    shared, pwrite = cached(["a", "b"], bytes=MEGABYTE), os.pwrite
    children = []

    def write(fd: int, data: Any, at: int) -> int:
        monkeypatch.undo()
        children.append(os.fork())
        if children[0] == 0:
            signal.pause()
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    assert shared[0] == "a"
    other = threading.Thread(target=lambda: shared[1])
    other.start()
    try:
        assert eventually(lambda: shared.kept[0] == 2)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        other.join()


def test_a_worker_is_killed_while_it_keeps_a_sample(tmp_path):
    dataset = Noted(tmp_path / "calls", 40, deadly=11)
    shared = cached(dataset, bytes=4 * MEGABYTE)
    with Loader(shared, batch_size=4, num_workers=2) as loader:
        for _ in range(2):
            numbers = [batch["number"] for batch in loader if (batch["image"][:, 0] >= 0).all()]
            assert np.concatenate(numbers).tolist() == list(range(40))
        assert loader.stats.errors.replaced
    assert shared.kept[0] == 40
    calls = dataset.calls()
    assert calls.count(11) == 2
    assert set(calls) == set(range(40))
    assert len(calls) <= 42  # the other worker may have been ended with a sample under way, too


# --- lifetimes


def shared_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = os.listdir("/proc/self/fd")
    descriptors = [f"{name} {os.path.realpath(f'/proc/self/fd/{name}')}" for name in names]
    return {text for text in lines + descriptors if SHARED.search(text)}


def test_it_goes_with_its_last_user():
    before = shared_files()
    shared = cached([np.arange(10_000)], bytes=MEGABYTE)
    with Loader(shared, batch_size=1, num_workers=0) as loader:
        samples = [shared[0], shared[0]]
        assert next(iter(loader)).shape == (1, 10_000)
    copy = pickle.loads(pickle.dumps(shared))
    assert copy.kept[0] == 1
    assert shared_files() - before
    del shared, loader, copy
    assert not shared_files() - before
    assert (samples[0] == samples[1]).all()


def test_a_copy_shares_the_cache_while_its_owner_lives():
    shared = cached(["a", "b"], bytes=MEGABYTE)
    packed = pickle.dumps(shared)
    copy = pickle.loads(packed)
    assert pickle.loads(pickle.dumps(copy))[0] == "a"
    assert shared.kept == copy.kept
    assert shared.kept[0] == 1
    del shared, copy
    alone = pickle.loads(packed)
    assert list(alone) == ["a", "b"]
    assert alone.kept == (0, 0)
    assert list(pickle.loads(pickle.dumps(alone))) == ["a", "b"]


def test_a_file_of_another_machine_is_let_alone():
    """There the path may lead to anything, to another's cache too."""
    shared = cached(["a", "b"], bytes=MEGABYTE)
    packed = pickle.dumps(shared)
    other = pickle.loads(re.sub(rb"minloader-\w{16}", b"minloader-0123456789abcdef", packed))
    assert list(other) == ["a", "b"]
    assert other.kept == (0, 0)
    assert shared.kept[0] == 0


def test_keeping_a_sample_leaves_nothing_to_the_garbage_collector(no_collector):
    shared = cached([np.zeros(100_000), np.ones(100_000)], bytes=10 * MEGABYTE)
    assert shared[0][0] == 0  # imports what it needs
    gc.collect()
    assert shared[1][0] == 1
    assert gc.collect() == 0
    assert shared.kept[0] == 2


class LargeSamples(Noted):
    """Samples of a megabyte."""

    def __getitem__(self, index: int) -> Any:
        return np.full(250_000, index, "i4")


def own_memory(sample: Any) -> Any:
    """Tells how much memory the process has that no other could share."""
    memory = psutil.Process().memory_info()
    return sample[0], memory.rss - memory.shared


def test_workers_share_it():
    shared = cached(LargeSamples("", 150), bytes=200 * MEGABYTE)
    with Loader(shared, range(150), num_workers=2, transform=own_memory) as loader:
        for _ in range(2):
            numbers, memory = zip(*loader, strict=True)
            assert numbers == tuple(range(150))
    assert shared.kept[0] == 150
    assert max(memory) < 80e6


def test_workers_of_torchs_loader_stay_while_it_fills(tmp_path):
    require("torch")
    from minloader.torch import DataLoader

    dataset = Noted(tmp_path / "calls")
    loader = DataLoader(
        cached(dataset, bytes=MEGABYTE),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        transform=tell_process,
    )
    epochs = [list(loader) for _ in range(2)]
    loader.close()
    assert len({int(pid) for batches in epochs for _, pids in batches for pid in pids}) <= 2
    numbers = [sample for samples, _ in epochs[1] for sample in samples["number"]]
    assert numbers == list(range(12))
    assert dataset.calls() == list(range(12))


def tell_process(sample: Any) -> Any:
    return sample, os.getpid()
