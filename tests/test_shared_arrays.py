"""Arrays over memory that processes share stay shared, or are refused; never copied in silence."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import forkserver, get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import require, variants

from minloader import Loader
from minloader._memory.job_file import JobFile
from minloader._memory.shared_arrays import Mappings, address_of

METHODS = ["fork", "spawn", "forkserver"]
METHOD = variants("method", METHODS, quick=2)


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()


class Memory:
    """Makes arrays over shared memory of all kinds.

    Args:
        method: how workers are started.
        folder: for files.
    """

    def __init__(self, method: str, folder: Path) -> None:
        self.context: Any = get_context(method)
        self.paths = (folder / f"numbers {n}" for n in itertools.count())
        self.named: SharedMemory | None = None

    def array(self) -> Any:
        return np.ctypeslib.as_array(self.context.Array(ctypes.c_double, 100).get_obj())

    def raw_array(self) -> Any:
        return np.frombuffer(self.context.RawArray("d", 100))

    def value(self) -> Any:
        return np.frombuffer(self.context.RawArray("d", 1))

    def named_memory(self) -> Any:
        self.named = SharedMemory(create=True, size=800)
        return np.ndarray((100,), np.float64, buffer=self.named.buf)

    def memmap(self) -> Any:
        path = next(self.paths)
        np.zeros(100).tofile(path)
        return np.memmap(path, np.float64, "r+")

    def view_of_a_memmap(self) -> Any:
        return np.asarray(self.memmap())

    def tensor(self) -> Any:
        torch = require("torch")
        return torch.zeros(100, dtype=torch.float64).share_memory_().numpy()

    def without_a_name(self) -> Any:
        return np.frombuffer(mmap.mmap(-1, 800))

    def close(self) -> None:
        if self.named is not None:
            self.named.close()
            self.named.unlink()


class Own(np.ndarray[Any, Any]):
    pass


MAKERS: dict[str, list[Callable[[Memory], Any]]] = {
    "standard library": [Memory.array, Memory.raw_array, Memory.value, Memory.named_memory],
    "files": [Memory.memmap, Memory.view_of_a_memmap],
    "torch": [Memory.tensor],
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda array: array,
    "a part": lambda array: array[len(array) // 2 :],
    "every third": lambda array: array[::3],
    "backwards": lambda array: array[::-1],
    "strided": lambda array: np.lib.stride_tricks.as_strided(array, (1,), (8,)),
    "of a class of the user's": lambda array: array.view(Own),
}


class Writes:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> float:
        self.array[0] += 1
        return float(self.array[0])


class Overwrites(Writes):
    def __getitem__(self, index: Any) -> float:
        before = float(self.array[index][0])
        self.array[index][0] = 7
        return before


@METHOD
@pytest.mark.parametrize("of", MAKERS)
def test_they_stay_shared(of, method, tmp_path):
    memory = Memory(method, tmp_path)
    views: dict[Any, Any] = {}
    for make in MAKERS[of]:
        array = make(memory)
        views |= {(make.__name__, name): view(array) for name, view in VIEWS.items()}
    with Loader(Overwrites(views), list(views), num_workers=1, mp_context=method) as loader:
        for each in views.values():
            each[0] = 6
        assert set(loader) <= {6, 7}  # some begin alike
    assert {name: each[0] for name, each in views.items()} == dict.fromkeys(views, 7)
    views.clear()
    del array, each
    memory.close()


@METHOD
def test_what_has_no_name_is_refused(method, tmp_path):
    array = Memory(method, tmp_path).without_a_name()
    if method == "fork":
        with Loader(Writes(array), [0], num_workers=1, mp_context=method) as loader:
            assert list(loader) == [1]
            assert array[0] == 1
        return
    with pytest.raises(TypeError) as told:
        Loader({"it": [array]}, ["it"], num_workers=1, mp_context=method)
    assert "dataset['it'][0] is a ndarray (an array over memory that proc" in str(told.value)
    assert "or a copy of the array; or start the workers by 'fork'" in str(told.value)


def as_tensor(array: Any) -> Any:
    torch = require("torch")
    with warnings.catch_warnings(action="ignore"):  # it may not be written
        return torch.from_numpy(array)


READ: dict[str, Callable[[Any], Any]] = {
    "a view": np.asarray,
    "a part": lambda array: np.asarray(array)[10:],
    "every third": lambda array: array[::3],
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 10),
    "a tensor": as_tensor,
    "a buffer": lambda array: np.frombuffer(array._mmap, np.uint8),
}


class Whereabouts:
    """Says which file an array is a mapping of, and what it begins with."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def __getitem__(self, name: str) -> tuple[str | None, list[Any]]:
        array = np.asarray(self.arrays[name])
        mapping = Mappings().at(address_of(array))
        return mapping and mapping.path, array[:2].tolist()


@METHOD
def test_a_large_file_that_is_mapped_to_be_read_is_not_copied(method, tmp_path):
    path = tmp_path / "tokens"
    np.arange(20_000).tofile(path)
    tokens = np.memmap(path, np.int64, "r")
    path.chmod(0o400)
    arrays = {name: view(tokens) for name, view in READ.items()}
    with Loader(Whereabouts(arrays), list(READ), num_workers=1, mp_context=method) as loader:
        found = dict(zip(READ, loader, strict=True))
    assert found == {name: (str(path), each[:2].tolist()) for name, each in arrays.items()}


@METHOD
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_parts_of_a_file_take_one_mapping(mode, method, tmp_path):
    """Each mapping takes a descriptor, and a file of tokens has many documents."""
    path = tmp_path / "tokens"
    np.arange(20_000).tofile(path)
    tokens = np.memmap(path, np.int64, mode)
    parts = [tokens[n : n + 10] for n in range(1_000)]
    parts += [np.asarray(tokens)[n : n + 5_000] for n in range(1_000)]

    def look(index: int) -> tuple[int, int]:
        with open("/proc/self/maps") as file:
            return int(parts[index][0]), sum(line.endswith(f" {path}\n") for line in file)

    with Loader(look, range(0, 2_000, 500), num_workers=1, mp_context=method) as loader:
        assert list(loader) == [(0, 1), (500, 1), (0, 1), (500, 1)]


@METHOD
def test_memory_of_one_process_is_its_own(method):
    """A view of it is copied, and what one worker writes is not seen here."""
    with Loader(lambda index: np.zeros(9_000), [0], num_workers=1) as loader:
        (batch,) = loader
    own = [np.zeros(9_000)[3:], np.frombuffer(bytearray(80_000)), batch, batch[5:]]
    with Loader(list(map(Writes, own)), range(4), num_workers=1, mp_context=method) as loader:
        assert len(list(loader)) == 4
    for array in own:
        assert array[0] == 0


def test_batches_of_tensors_are_a_dataset():
    """They have memory of a slot, which is sent as any array is."""
    torch = require("torch")
    rows = torch.ones(2, 9_000)
    with Loader(rows, [0, 1], num_workers=1, mp_context="fork") as loader:
        data = list(loader)
    with closing(JobFile([*data, data[0][5:], data[0].numpy()], "spawn")) as job:
        sent = job.address.load()
    assert [batch.sum() for batch in sent] == [9_000, 9_000, 8_995, 9_000]


@variants("method", ["spawn", "forkserver"])
def test_views_that_grow_on_their_way_are_told(method, monkeypatch, caplog):
    monkeypatch.setattr("minloader._pools.group.MOST_GROWTH", 1_000_000)
    series = np.arange(10_000.0)
    halves = [series[:5_000], series[5_000:]]
    windows = [series[n : n + 5_000] for n in range(0, 5_000, 50)]
    for views, told in (halves, 0), (windows, 1):
        with Loader(views, num_workers=1, mp_context=method) as loader:
            assert list(map(sum, loader)) == list(map(sum, views))
        messages = [each for each in caplog.messages if "the dataset grew" in each]
        assert len(messages) == told
    assert "views of an array of 80 kB, each sent by itself, take 4 MB" in messages[0]


# --- files that are replaced


def replace(path: Path) -> None:
    other = path.with_name("other")
    np.zeros(10_000, np.int64).tofile(other)
    os.replace(other, path)


@METHOD
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("how", ["replaced", "removed", "moved"])
def test_a_file_that_is_another_one(how, mode, method, tmp_path):
    path = tmp_path / "tokens"
    np.arange(10_000).tofile(path)
    tokens = np.memmap(path, np.int64, mode)
    if how == "replaced":
        replace(path)
    elif how == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "moved")
        np.zeros(10_000, np.int64).tofile(path)
    options: dict[str, Any] = {"num_workers": 1, "mp_context": method}
    if method == "fork":
        with Loader(lambda index: int(tokens[index]), [1, 2], **options) as loader:
            assert list(loader) == [1, 2]
        return
    with pytest.raises(TypeError, match=r"tokens.*replaced or removed since.*; open it anew, or"):
        Loader(lambda index: int(tokens[index]), [1, 2], **options)


@METHOD
def test_a_file_that_is_replaced_before_a_worker_opens_it(method, tmp_path):
    path = tmp_path / "tokens"
    np.arange(10_000).tofile(path)
    tokens = np.memmap(path, np.int64, "r")
    with Loader(tokens, [1, 2], num_workers=1, mp_context=method) as loader:
        replace(path)
        if method == "fork":
            assert list(loader) == [1, 2]
        else:
            with pytest.raises(FileNotFoundError, match="was replaced or removed since"):
                list(loader)


@pytest.mark.parametrize("view", [np.asarray, lambda tokens: tokens])
def test_a_file_that_is_another_one_on_another_machine(view, tmp_path):
    """Workers of the user's executor may be there."""
    path = tmp_path / "tokens"
    np.arange(1, 10_001).tofile(path)
    with closing(JobFile(view(np.memmap(path, np.int64, "r+")))) as job:
        replace(path)
        assert job.address.load()[0] == 0


def test_a_file_by_another_path(tmp_path):
    path, link = tmp_path / "tokens", tmp_path / "link"
    np.arange(10_000).tofile(path)
    link.symlink_to(path)
    tokens = np.memmap(link, np.int64, "r")
    with Loader(tokens, [1, 2], num_workers=1) as loader:
        assert list(loader) == [1, 2]
