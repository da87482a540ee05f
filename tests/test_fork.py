"""Forked workers have the job from their parent: nothing is pickled, and nothing copied."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
from conftest import lists, require, variants, workers
from helpers import Changing

from minloader import Loader, get_worker_info

torch = require("torch")

from torch.utils.data import IterableDataset  # noqa: E402

from minloader.torch import DataLoader  # noqa: E402

METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture
def server() -> Iterator[None]:
    """Ends a fork server that the test has started: it is the standard library's to keep."""
    yield
    forkserver._forkserver._stop()


# --- what is not pickled


class Wrapper:
    """Passes on whatever it is asked for: to unpickle it never ends."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


class Using:
    """Uses an object to read the numbers 0 to 3."""

    def __init__(self, it: Any, use: Callable[[Any], Any]) -> None:
        self.it, self.use = it, use

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.use(self.it)
        return index

    def __reduce__(self) -> Any:
        raise AssertionError("it is pickled")


class Tables:
    @functools.cached_property
    def table(self) -> list[int]:
        return [0]


def hold(lock: Any) -> None:
    with lock:
        pass


UNPICKLABLE: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "nothing": lambda: (None, bool),
    "a connection": lambda: (socket.socket(), lambda it: it.fileno()),
    "a lock": lambda: (threading.Lock(), hold),
    "a generator": lambda: ((n for n in ()), list),
    "a script module": lambda: (torch.jit.script(torch.nn.ReLU()), lambda it: it(torch.ones(2))),
    "a cached property": lambda: (Tables(), lambda it: it.table),
    "a module without a parent": lambda: (types.ModuleType("no_parent.child"), vars),
}


@pytest.mark.parametrize("kind", UNPICKLABLE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_pickled(kind):
    it, use = UNPICKLABLE[kind]()
    data = Using(it, use)
    options: dict[str, Any] = {"collate_fn": lambda samples: (use(it), list(samples))[1]}
    with Loader(data, batch_size=2, num_workers=2, mp_context="fork", **options) as loader:
        assert list(loader) == [[0, 1], [2, 3]]
    options |= {"worker_init_fn": lambda number: use(it), "multiprocessing_context": "fork"}
    with DataLoader(data, 2, num_workers=2, **options) as loader:
        for _ in range(2):
            assert list(loader) == [[0, 1], [2, 3]]
    if kind == "a connection":
        it.close()


def test_a_wrapper_that_passes_everything_on():
    wrapped = Wrapper([1, 2])
    with Loader(wrapped, num_workers=1, mp_context="fork") as loader:
        assert list(loader) == [1, 2]
    with DataLoader(wrapped, num_workers=1, multiprocessing_context="fork") as loader:
        assert lists(loader) == [[1], [2]]


def test_tensors_over_a_mapped_file_stay_there(tmp_path):
    path = tmp_path / "tensor"
    torch.save(torch.arange(1_000_000), path)
    data = torch.load(path, mmap=True)
    with DataLoader(Placed(data), num_workers=1, multiprocessing_context="fork") as loader:
        assert lists(loader) == [[data.data_ptr()]]
    with Loader(PlacedStream(data), num_workers=1, mp_context="fork") as loader:
        assert list(loader) == [data.data_ptr()]


class Placed:
    """Tells where the memory of a tensor is."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return int(self.data.data_ptr())


class PlacedStream(Placed):
    def __iter__(self) -> Iterator[int]:
        yield self[0]


# --- what each epoch of the drop-in sees


@pytest.mark.parametrize("persistent", [False, True])
@variants("method", METHODS)
def test_each_epoch_has_the_dataset_as_it_is(method, persistent, monkeypatch, server):
    """What only a fork has from its parent is not in what is pickled."""
    data = Changing()
    options = {"multiprocessing_context": method, "persistent_workers": persistent}
    with DataLoader(data, batch_size=None, num_workers=1, **options) as loader:
        for epoch in range(3):
            monkeypatch.setattr("helpers.NUMBER", epoch)
            monkeypatch.setattr(Changing, "count", epoch)
            monkeypatch.setenv("COUNT", str(epoch))
            data.labels[0] = epoch
            (seen,) = loader
            if persistent:
                assert seen == [0, 0, 0, 0, epoch + 1]
            else:
                assert seen[3:] == [epoch, 1]
                assert method != "fork" or seen[:3] == [epoch] * 3


def test_an_epoch_that_is_under_way_keeps_its_workers():
    data = Changing()
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
    with DataLoader(data, sampler=[0] * 20, **options) as loader:
        former = iter(loader)
        first = next(former)
        data.labels[0] = 1
        others = list(loader)
        assert [first[3], *(each[3] for each in former)] == [0] * 20
        assert [each[3] for each in others] == [1] * 20


def test_workers_that_replace_others_have_what_the_parent_has_then():
    data = Changing()
    with Loader(data, [0] * 9, num_workers=1, mp_context="fork", prefetch_factor=1) as loader:
        batches = iter(loader)
        assert next(batches)[3] == 0
        data.labels[0] = 1
        os.kill(workers(loader)[0].pid, signal.SIGKILL)
        assert [each[3] for each in batches][-1] == 1


# --- streams


class Counting:
    """Counts in itself how often it is read, and cannot be read on by another."""

    def __init__(self, kept: Any = None) -> None:
        self.times = 0
        self.kept = kept

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        self.reading = (n for n in range(6))  # cannot be pickled
        info = get_worker_info()
        assert info is not None
        for n in self.reading:
            yield 100 * self.times + n


def test_a_stream_that_was_left_begins_anew():
    options: dict[str, Any] = {"num_workers": 1, "mp_context": "fork"}
    with Loader(Counting(), **options) as loader:
        assert next(iter(loader)) == 100
        assert list(loader) == [100 + n for n in range(6)]
        assert list(loader) == [200 + n for n in range(6)]  # the copy that has come to its end


def test_two_passes_over_a_stream_at_once():
    with Loader(Counting(), num_workers=1, mp_context="fork") as loader:
        assert [*zip(loader, loader, strict=True)] == [(100 + n, 100 + n) for n in range(6)]


def test_a_stream_that_cannot_be_copied():
    with (
        open(os.devnull) as file,
        Loader(Counting(file), num_workers=1, mp_context="fork") as loader,
    ):
        assert list(loader) == [100 + n for n in range(6)]
        batches = iter(loader)
        assert next(batches) == 200
        del batches
        assert list(loader) == [300 + n for n in range(6)]
        with pytest.raises(TypeError, match=r"has one copy of the dataset.*read each epoch to its"):
            list(zip(loader, loader, strict=True))


@pytest.mark.parametrize("persistent", [False, True])
def test_streams_of_the_drop_in(persistent):
    class Stream(Counting, IterableDataset):  # type: ignore[misc]
        pass

    options: dict[str, Any] = {"batch_size": None, "multiprocessing_context": "fork"}
    with DataLoader(Stream(), num_workers=1, persistent_workers=persistent, **options) as loader:
        epochs = [list(loader), list(loader)]
        assert next(iter(loader)) == (300 if persistent else 100)
        epochs.append(list(loader))
    times = [1, 2, 1] if persistent else [1, 1, 1]
    assert epochs == [[100 * each + n for n in range(6)] for each in times]


# --- signals


def signals_of(index: int) -> tuple[list[int], bool, set[int]]:
    """The signals with a handler in Python, whether one wakes a descriptor, and those blocked."""
    handled = [each for each in signal.valid_signals() if callable(signal.getsignal(each))]
    wakes: list[bool] = []
    if threading.current_thread() is threading.main_thread():
        wakes.append(signal.set_wakeup_fd(-1) != -1)
    return handled, any(wakes), set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no such signals here")
@variants("method", METHODS)
def test_workers_have_none_of_the_scripts_handlers(method, server):
    """They have their own for SIGINT, and for SIGHUP unless it is ignored, as by nohup."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT]
    own = [signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        own.insert(0, signal.SIGHUP)
    former = {number: signal.signal(number, lambda *args: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer)
    try:
        with Loader(signals_of, [0], num_workers=1, mp_context=method) as loader:
            assert list(loader) == [(own, False, set())]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
