"""The audit passes what is reproducible, and names where the rest differs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pickle
import random
import re
import tempfile
import threading
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import eventually, has_worked, losses, require, variants
from helpers import (
    AllNoise,
    Faulty,
    Guarded,
    Noise,
    Numbers,
    Scripted,
    SelfIterating,
    Squares,
    Stateful,
    StatefulIterator,
    StatefulNumbers,
    numbered,
    once_in,
)

from minloader import (
    SKIP,
    BatchSampler,
    BatchTimeout,
    Loader,
    get_worker_info,
)
from minloader._diagnosis.inspect import inspect, with_arguments
from minloader._diagnosis.leaves import MOST_LEAVES, leaves
from minloader.doctor import examine
from minloader.testing import IrreproducibleError, as_in_worker, check_reproducible

pytestmark = pytest.mark.usefixtures("quick_starts")

QUICK = {"workers": (0, 1), "batches": 8}


def failure(make_loader: Any, **options: Any) -> IrreproducibleError:
    with pytest.raises(IrreproducibleError) as caught:
        check_reproducible(make_loader, **(QUICK | options))
    return caught.value


# --- what passes ---------------------------------------------------------------------------------


THREADS = {"executor": "thread", "num_workers": 3}

GOOD: dict[str, Any] = {
    "noise": lambda: Loader(AllNoise()),
    "shared memory": lambda: Loader(numbered, range(9), in_order=False),
    "stream": lambda: Loader(Numbers(20), num_workers=2, batch_size=2),
    "stateful stream": lambda: Loader(StatefulNumbers(20), num_workers=1),
    "list": lambda: Loader(Squares(), list(range(7)), **THREADS),
    "batches": lambda: Loader(Noise(), batch_size=2, shuffle=True, **THREADS),
    "samplers": lambda: Loader(Guarded(), BatchSampler(40, None, shuffle=True, seed=3), **THREADS),
    "stateful sampler": lambda: Loader(Guarded(), Stateful(range(9)), **THREADS),
    "own iterator": lambda: Loader(Guarded(), SelfIterating(range(9)), **THREADS),
    "endless": lambda: Loader(Noise(), Endless(), **THREADS),
    "unordered": lambda: Loader(Squares(delay=0.01), range(20), in_order=False, **THREADS),
    "skipped": lambda: Loader(Faulty(9, {3: ValueError}), on_error="skip", **THREADS),
    "replaced": lambda: Loader(Faulty(9, {3: ValueError}), on_error=item_of, **THREADS),
    "dropped": lambda: Loader(Faulty(9, {3: ValueError}), on_error=lambda _: SKIP, **THREADS),
    "one batch": lambda: Loader(Squares(1), **THREADS),
    "stateful iterator": lambda: Loader(StatefulIterator(20), batch_size=3, **THREADS),
    "noisy stream": lambda: Loader(Scripted(20, noise="kept", epochs=True), **THREADS),
    "endless stream": lambda: Loader(Numbers(None), in_order=False, **THREADS),
    "inline": lambda: Loader(AllNoise(), num_workers=0),
}


def item_of(error: Any) -> Any:
    return error.item


class Endless:
    def __iter__(self) -> Any:
        return itertools.count()


@variants("name", GOOD)
def test_passes(name):
    report = check_reproducible(GOOD[name], workers=(0,), batches=8)
    assert len(report.batches) == 2
    assert report.batches[0] == report.batches[1] > 0
    assert report.runs[:2] == ["num_workers=0", "num_workers=0 again"]


def test_report():
    report = check_reproducible(lambda: Loader(Squares(5)), workers=(2, 0))
    assert report.batches == [5, 5]
    assert report.runs == [
        "num_workers=0",
        "num_workers=0 again",
        "num_workers=1",
        "num_workers=2",
        "an epoch left after 2 of its batches, num_workers=2",
        "a resume after 0 batches, num_workers=0",
        "a resume after 1 batches, num_workers=1",
        "a resume after 2 batches, num_workers=2",
        "a resume after 5 batches, num_workers=0",
        "a worker killed, num_workers=2",
    ]
    assert str(report).startswith("reproducible: 5 + 5 batches are the same with num_workers=0; ")


def test_executors_of_ones_own():
    with ThreadPoolExecutor(2) as threads:
        check_reproducible(lambda: Loader(Noise(), executor=threads), workers=(0, 2))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        report = check_reproducible(lambda: Loader(Noise(), executor=processes), **QUICK)
    assert not any("killed" in run for run in report.runs)


def test_a_sampler_that_is_an_iterator():
    def make() -> Loader:
        return Loader(Squares(), iter(range(9)), num_workers=0)

    assert check_reproducible(make, epochs=1, workers=()).batches == [9]
    with pytest.raises(RuntimeError, match="is an iterator"):
        check_reproducible(make, workers=())


def test_a_worker_is_killed(caplog):
    """And replaced, though the loader has no retries."""
    check_reproducible(lambda: Loader(Squares(10, delay=0.01), retries=0), workers=(1,))
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert re.match(r"check_reproducible kills a worker \(pid \d+\)", said[0])
    assert "killed by signal 9" in caplog.text


def test_global_generators_are_left_alone():
    random.seed(5)
    before = random.getstate()
    check_reproducible(lambda: Loader(AllNoise()), workers=(0,), batches=3)
    assert random.getstate() == before


def test_all_workers_are_there_before_the_first_batch(tmp_path):
    """Otherwise one that starts first could make them all, and nothing would be seen of others."""

    def loader() -> Loader:
        started = Path(tempfile.mkdtemp(dir=tmp_path))
        return Loader(
            lambda item: len(os.listdir(started)) == get_worker_info().num_workers,
            range(20),
            worker_init_fn=lambda info: (started / str(info.id)).touch(),
        )

    check_reproducible(loader, workers=(1, 3), batches=2)


# --- planted faults ------------------------------------------------------------------------------


class Counting:
    """Counts its batches."""

    count = 0

    def __getitem__(self, item: int) -> Any:
        self.count += 1
        threading.Event().wait(0.005)
        return {"item": item, "counts": [("x", self.count)]}


class CountingAll(Counting):
    """Counts those of all datasets."""

    def __getitem__(self, item: int) -> Any:
        CountingAll.count += 1
        return super().__getitem__(item)


def test_a_global_counter():
    error = failure(lambda: Loader(CountingAll(), range(20), num_workers=0))
    assert (error.run, error.epoch, error.ordinal) == ("num_workers=0 again", 0, 0)
    assert error.leaf == "batch['counts'][0][1]"


def test_a_counter_that_needs_several_workers():
    """Each of them has one of its own."""
    error = failure(lambda: Loader(Counting(), range(20)), workers=(0, 1, 3), batches=50)
    assert (error.run, error.epoch, error.leaf) == ("num_workers=3", 0, "batch['counts'][0][1]")
    assert 0 < error.ordinal < 6
    assert f"batch {error.ordinal} of epoch 0 is not the same with num_workers=3" in str(error)
    assert f"\n  num_workers=0  {error.ordinal + 1}\n  num_workers=3  " in str(error)


@pytest.mark.slow
def test_a_counter_in_the_only_worker():
    error = failure(lambda: Loader(Counting(), range(20)), workers=(1,), batches=50)
    assert error.run == "an epoch left after 10 of its batches, num_workers=1"


@pytest.mark.slow
def test_a_counter_and_resuming():
    error = failure(lambda: Loader(Counting(), range(20)), workers=(1,), epochs=1)
    assert (error.run, error.ordinal) == ("a resume after 1 batches, num_workers=1", 1)


def default_rng(item: int) -> Any:
    noise = np.random.default_rng().random(2) if item > 1 else np.zeros(2)
    return item, {"noise": noise}


def system_random(item: int) -> Any:
    return item, {"noise": random.SystemRandom().random() if item > 1 else 0}


@pytest.mark.parametrize("dataset", [default_rng, system_random])
def test_unseeded_randomness(dataset):
    error = failure(lambda: Loader(dataset, range(20)))
    assert (error.run, error.ordinal) == ("num_workers=0 again", 2)
    assert error.leaf == "batch[1]['noise']"


def test_global_randomness_in_threads():
    def noise(item: int) -> float:
        return random.random()

    error = failure(lambda: Loader(noise, range(20), executor="thread"), workers=(0, 1))
    assert error.run == "num_workers=1"


def test_no_seed():
    error = failure(lambda: Loader(Noise(), seed=None))
    assert error.run == "num_workers=0 again"


def test_the_id_of_the_worker():
    def which(item: int) -> Any:
        threading.Event().wait(0.005)
        return [item, get_worker_info().id]

    error = failure(lambda: Loader(which, range(20)), workers=(1, 2))
    assert (error.run, error.leaf) == ("num_workers=2", "batch[1]")
    assert str(error).endswith("\n  num_workers=1  0\n  num_workers=2  1")


@pytest.mark.parametrize("workers", [(0, 1), (1,)])
def test_the_pid_of_the_worker(workers):
    error = failure(lambda: Loader(lambda item: os.getpid(), range(9)), workers=workers)
    assert error.run == ("num_workers=1" if 0 in workers else "num_workers=1 again")
    assert (error.ordinal, error.leaf) == (0, "batch")
    assert f"num_workers=0  {os.getpid()}\n" in str(error) or 0 not in workers


def test_the_order_of_a_set_of_strings():
    """It is another one in each process."""
    words = [f"word {n}" for n in range(50)]
    error = failure(lambda: Loader(lambda item: list(set(words)), range(3)))
    assert error.run == "num_workers=1"
    check_reproducible(lambda: Loader(lambda item: set(words), range(3)), workers=(0,), epochs=1)


def test_an_unseeded_sampler():
    def make() -> Loader:
        return Loader(Squares(40), np.random.default_rng().permutation(40).tolist())

    error = failure(make, batches=40)
    assert error.run == "num_workers=0 again"


class GloballyShuffled:
    """Its order depends on how often anybody asked."""

    def __iter__(self) -> Any:
        order = list(range(40))
        random.shuffle(order)
        return iter(order)


def test_a_sampler_with_global_randomness():
    assert failure(lambda: Loader(Squares(40), GloballyShuffled())).run == "num_workers=0 again"

    def seeded() -> Loader:
        random.seed(1)
        return Loader(Squares(40), GloballyShuffled())

    error = failure(seeded)
    assert error.run == "an epoch left after 4 of its batches, num_workers=1"


class Forgetful(Stateful):
    """Goes on one item too late."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.start += self.start > 0


def test_a_sampler_with_a_wrong_state():
    error = failure(lambda: Loader(Squares(40), Forgetful(range(40))))
    assert error.run.startswith("a resume after")


@pytest.mark.parametrize(
    ("lengths", "first", "again"),
    [([5, 5, 6], "is not there: the epoch has ended", 25), ([5, 5, 4], 16, "is not there: the ")],
)
def test_numbers_of_batches(lengths, first, again):
    given = iter(lengths)

    class Sampler:
        def __iter__(self) -> Any:
            return iter(range(next(given)))

    error = failure(lambda: Loader(Squares(), Sampler()))
    assert f"\n  num_workers=0        {first}\n  num_workers=0 again  {again}" in str(error)
    assert (error.run, error.epoch, error.leaf) == ("num_workers=0 again", 0, "batch")
    assert error.ordinal == min(lengths[0], lengths[2])


class Reloaded:
    """Another one when it is loaded a second time for the same loader.

    Args:
        folder: where it is noted.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.first = True

    def __setstate__(self, state: Any) -> None:
        self.folder = state["folder"]
        self.first = once_in(self.folder, 0)

    def __getitem__(self, item: int) -> Any:
        return {"item": item, "first": self.first}


@pytest.mark.slow
def test_what_a_killed_worker_takes_along(tmp_path):
    folders = itertools.count()

    def make() -> Loader:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        return Loader(Reloaded(str(folder)), range(60))

    error = failure(make, workers=(1,), batches=60)
    assert error.run == "a worker killed, num_workers=1"
    assert error.leaf == "batch['first']"
    assert error.epoch == 1 or error.ordinal >= 30
    assert "num_workers=1                   True\n" in str(error)


class Locked:
    """The first worker that makes a sample takes a lock, and keeps it."""

    def __init__(self) -> None:
        self.lock = get_context("spawn").Lock()
        self.is_mine = False

    def __getitem__(self, item: int) -> int:
        if not self.is_mine:
            self.is_mine = self.lock.acquire()
        threading.Event().wait(0.02)  # quick batches are made by the hundred, ahead of the kill
        return item


@pytest.mark.slow
def test_a_lock_that_a_killed_worker_keeps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minloader._diagnosis.audit.PATIENCE", 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minloader._arguments.get_context", get_context)  # the lock's own
        # More batches than a worker makes ahead, so that some are to be made behind its death.
        options = {"workers": (), "batches": 24, "epochs": 1}
        error = failure(lambda: Loader(Locked(), range(24), num_workers=1), **options)
    assert error.run == "a worker killed, num_workers=1"
    assert isinstance(error.__cause__, BatchTimeout)
    assert "fcntl.flock" in str(error)


def test_an_error_in_one_run_only():
    here = os.getpid()

    def works_here(item: int) -> int:
        if os.getpid() != here and item == 4:
            raise KeyError("no such sample")
        return item

    error = failure(lambda: Loader(works_here, range(9)))
    assert (error.run, error.ordinal) == ("num_workers=1", 4)
    assert "\n  num_workers=0  4\n  num_workers=1  raised KeyError: 'no such sample'" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_an_error_in_all_runs_is_the_loaders():
    with pytest.raises(ValueError, match="item 3 is bad"):
        check_reproducible(lambda: Loader(Faulty(9, {3: ValueError})), **QUICK)


def test_the_second_epoch():
    def make() -> Loader:
        return Loader(lambda item: (item, time.time_ns() * get_worker_info().epoch), range(4))

    error = failure(make)
    assert (error.epoch, error.ordinal, error.leaf) == (1, 0, "batch[1]")


def test_the_error_survives_pickling():
    error = failure(lambda: Loader(default_rng, range(20)))
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), vars(other)) == (str(error), vars(error))
    assert isinstance(error, AssertionError)


# --- arguments -----------------------------------------------------------------------------------


def run_the_doctor(make_loader: Any, **options: Any) -> None:
    examine(make_loader, **({"workers": [0, 1], "prefetch": [2], "seconds": 0.1} | options))


@pytest.mark.parametrize("check", [check_reproducible, run_the_doctor])
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (5, {}, "make_loader must be a function that makes a Loader, got 5"),
        (lambda: [1], {}, r"must return a minloader.Loader, .*, got \[1\]"),
        (lambda: Loader(Squares(), []), {}, "no batches in epoch 0"),
        (lambda: Loader(Squares()), {"workers": [-1]}, "workers must be at least 0, got -1"),
    ],
)
def test_what_makes_no_loader(make, options, message, check):
    with pytest.raises((TypeError, ValueError), match=message):
        check(make, **options)


@pytest.mark.parametrize("check", [check_reproducible, run_the_doctor])
def test_the_same_loader_twice(check):
    with Loader(Squares(9)) as loader, pytest.raises(ValueError, match="a new one each time"):
        check(lambda: loader)


@pytest.mark.parametrize("name", ["batches", "epochs"])
def test_arguments(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        check_reproducible(lambda: Loader(Squares()), **{name: 0})


# --- leaves --------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    name: str
    data: Any


class Plain:
    def __init__(self, data: Any) -> None:
        self.data = data


def parts() -> list[Any]:
    """One batch of each kind."""
    fields = np.zeros(3, [("a", "i1"), ("b", "f8")])
    return [
        *(None, True, 3, 2.5, 1j, "text", b"bytes", bytearray(b"x"), float("nan"), int, len),
        *({"b": 1, "a": [1, 2]}, Pair(1, [2]), Slotted("n", {1: 2}), Plain({"x": (1,)})),
        *({1, "two", (3,)}, frozenset({1}), OrderedDict(a=1), defaultdict(list, a=[1])),
        *(Counter("aab"), Path("/x"), range(3), np.float32(1.5), np.array(3), np.zeros((2, 0))),
        *(np.arange(12.0).reshape(3, 4), np.arange(200), np.array(["a", None], object), fields),
        *(np.ma.array([1, 2], mask=[0, 1]), np.array(["2020-01-01"], "datetime64[D]")),
        [[float("nan")], np.array([np.nan, 1])],
    ]


def digests(batch: Any) -> dict[str, bytes]:
    return {path: leaf.digest for path, leaf in leaves(batch).items()}


def test_leaves_tell_everything_apart():
    """And nothing more: copies are the same, also after a way through a pipe."""
    for batch, twin in zip(parts(), parts(), strict=True):
        assert digests(batch) == digests(twin) == digests(copy.deepcopy(batch))
        assert digests(batch) == digests(pickle.loads(pickle.dumps(batch)))
    found = [tuple(sorted(digests(batch).items())) for batch in parts()]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("ours", "theirs", "path"),
    [
        ([1, 2], [1, 3], "batch[1]"),
        ([1, 2], (1, 2), "batch"),
        ([1], [1, 2], "batch"),
        (1, 1.0, "batch"),
        (0.0, -0.0, "batch"),
        ({"a": {"b": [0, {"c": 1}]}}, {"a": {"b": [0, {"c": 2}]}}, "batch['a']['b'][1]['c']"),
        (Pair(1, [Plain([1])]), Pair(1, [Plain([2])]), "batch.right[0]"),
        (Slotted("a", 1), Slotted("b", 1), "batch.name"),
        (UserDict(a=[1]), UserDict(a=[2]), "batch['a'][0]"),
        ({"a": 1}, {"b": 1}, "batch['a']"),
        (np.zeros(3, "f4"), np.zeros(3, "f8"), "batch"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "batch"),
        ([np.arange(3)], [np.array([0, 5, 2])], "batch[0]"),
        (np.float64(1), 1.0, "batch"),
        (np.array([{"a": 1}]), np.array([{"a": 2}]), "batch"),
        ({1, 2}, {1, 3}, "batch"),
        (Path("/x/a"), Path("/x/b"), None),
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 0]), None),
    ],
)
def test_the_first_leaf_that_differs(ours, theirs, path):
    batches = itertools.chain([ours], itertools.repeat(theirs))
    error = failure(lambda: Loader(lambda item: next(batches), [0], num_workers=0), workers=())
    assert path is None or error.leaf == path


def test_dtype_is_named():
    kinds = itertools.chain(["f4"], itertools.repeat("f8"))
    error = failure(lambda: Loader(lambda item: {"x": np.ones(2, next(kinds))}, [0], num_workers=0))
    assert "num_workers=0        array of float32, shape (2,): 1.0, 1.0\n" in str(error)
    assert str(error).endswith("num_workers=0 again  array of float64, shape (2,): 1.0, 1.0")
    values = itertools.count(5)
    error = failure(
        lambda: Loader(lambda item: np.array([1, 2, 3, 4, next(values)]), [0], num_workers=0)
    )
    assert "shape (5,): 1, 2, 3, 4, 5\n" in str(error)


def test_order_of_keys_is_no_difference():
    assert digests({"a": 1, "b": 2}) == digests({"b": 2, "a": 1})


def test_views_are_what_they_show():
    array = np.arange(24).reshape(4, 6)
    assert digests(array[:, ::2]) == digests(array[:, ::2].copy())
    assert digests(np.asfortranarray(array)) == digests(array)


def test_large_batches_take_little_memory():
    found = leaves(list(range(5000)))
    assert len(found) == MOST_LEAVES + 1
    other = leaves([*range(4999), -1])
    assert [path for path in found if found[path] != other[path]] == [
        "what comes after the first 1,000 parts of it"
    ]


def test_a_batch_that_contains_itself():
    batch: list[Any] = [1]
    batch.append(batch)
    assert digests(batch) == digests(pickle.loads(pickle.dumps(batch)))
    assert digests(batch) != digests([1, [1]])


def test_deep_below():
    def nest(value: Any) -> Any:
        for _ in range(100):
            value = [value]
        return value

    assert digests(nest(1)) == digests(nest(1)) != digests(nest(2))


def test_what_cannot_be_looked_into():
    assert digests(threading.Lock()) == digests(threading.Lock())


def test_tensors():
    torch = require("torch")
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digests(tensor.T) == digests(tensor.T.clone()) != digests(tensor)
    assert digests(tensor) != digests(tensor.to(torch.float64))
    assert digests(tensor) != digests(tensor.numpy())
    assert digests(tensor.requires_grad_().bfloat16()) == digests(tensor.bfloat16())
    assert digests(tensor.detach().to_sparse()) == digests(tensor.detach().to_sparse())
    assert digests(tensor.detach().to_sparse()) != digests((tensor.detach() * 2).to_sparse())
    assert digests([torch.tensor(2), torch.zeros(0, 3)]) != digests([torch.tensor(3)])
    check_reproducible(
        lambda: Loader(lambda item: {"x": torch.rand(3)}, range(4), num_workers=0), workers=()
    )


# --- the inspection ------------------------------------------------------------------------------


def test_workers_are_seen():
    with Loader(Squares(), range(6), num_workers=2) as loader:
        view = inspect(loader)
        assert view.workers == []
        loader.start()
        assert eventually(lambda: all(worker.is_ready for worker in view.workers))
        assert [worker.number for worker in view.workers] == [0, 1]
        assert all(worker.process.pid == worker.pid for worker in view.workers)
        assert not has_worked(loader)
        assert list(loader) == [n * n for n in range(6)]
        assert has_worked(loader)
        assert losses(loader) == 0


class Squared(Loader):
    """A loader with arguments of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(Squares(), range(count), retries=2)
        self.name = "squares"


def test_other_arguments_take_the_place_of_those_that_it_was_made_with():
    made = Squared(6)
    made.num_workers = 2
    made.epoch = 3
    made.start()
    workers = [each.process for each in inspect(made).workers]
    with with_arguments(made, prefetch_factor=3, in_order=False) as loader:
        assert loader is made
        assert not any(each.is_alive() for each in workers)
        assert inspect(loader).group.max_in_flight == 6
        assert "retries=2, num_workers=2, prefetch_factor=3, in_order=False" in repr(loader)
        assert (loader.epoch, loader.name) == (3, "squares")
        assert sorted(loader) == [n * n for n in range(6)]


def test_where_there_is_no_loader():
    with pytest.raises(TypeError, match="there is no Loader in 5"):
        inspect(5)
    require("torch")
    from minloader.torch import DataLoader

    loader = DataLoader(range(3))
    with pytest.raises(TypeError, match="there is no Loader in"):
        inspect(loader)
    list(loader)
    assert inspect(loader).executor == "process"


class Node:
    def __init__(self, value: int) -> None:
        self.value, self.owner = value, [self]


def test_objects_that_lead_back_to_themselves_are_compared():
    numbers = itertools.count()
    assert check_reproducible(lambda: Loader(Node, range(6), num_workers=0), workers=(0, 1))
    with pytest.raises(IrreproducibleError):
        check_reproducible(
            lambda: Loader(lambda item: Node(next(numbers)), range(6), num_workers=0), workers=(0,)
        )


# --- a dataset that is called by hand --------------------------------------------------------


class Drawing:
    """A dataset written as the docs' are."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.epoch, info.rng.random(), info.sample_rng.random()


def test_a_dataset_called_by_hand_draws_as_in_a_worker():
    dataset = Drawing()
    assert get_worker_info() is None
    with Loader(dataset, [[3], [5, 7]], collate_fn=list, num_workers=0, seed=4) as loader:
        loader.set_epoch(2)
        (first,), second = loader
    with as_in_worker(3, epoch=2, seed=4):
        assert dataset[3] == first
    with as_in_worker(5, batch=1, epoch=2, seed=4) as info:
        assert get_worker_info() is info
        assert dataset[5] == second[0]
    assert get_worker_info() is None


def test_by_hand_a_batch_goes_on_drawing_and_an_error_ends_it():
    with as_in_worker() as info:
        rng = info.rng
        assert info.rng is rng
        with as_in_worker(), pytest.raises(RuntimeError, match="sample_rng is for code that makes"):
            _ = get_worker_info().sample_rng  # type: ignore[union-attr]
        assert get_worker_info() is info
    with pytest.raises(KeyError), as_in_worker():
        raise KeyError
    assert get_worker_info() is None
