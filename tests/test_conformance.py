"""One set of rules for every executor: in-process, threads, processes, and foreign ones."""

from __future__ import annotations

import itertools
import os
import random
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import require
from helpers import (
    Echo,
    Faulty,
    Gate,
    GlobalNoise,
    Many,
    Noise,
    Squares,
    TorchNoise,
    Whereabouts,
)
from kinds import PASS, Failing, Told

import minloader
from minloader import SKIP, BatchError, Loader, get_worker_info
from minloader._sampling.seeding import generator

# --- order and content -----------------------------------------------------------------------


def test_batches_are_the_items_in_order(make):
    dataset = Squares(40, delay=0.01)
    sampler = random.Random(5).sample(range(40), 40)
    assert list(make(dataset, sampler)) == [dataset[i] for i in sampler]


GIVEN: dict[str, tuple[Any, Any, dict[str, Any], list[Any]]] = {
    "the range by default": (Squares(7), None, {}, [n * n for n in range(7)]),
    "an empty sampler": (Squares(), [], {}, []),
    "a function": (str.upper, ["a", "b"], {}, ["A", "B"]),
    "a class": (complex, ["1j", "2"], {}, [1j, 2 + 0j]),  # list[...] too has __getitem__
    "transform sees samples": (
        *(Squares(), [[1, 2], (3,), []], {"collate_fn": tuple, "transform": str}),
        [("1", "4"), ("9",), ()],
    ),
    "transform sees the batch": (Echo(), [[1, 2]], {"transform": sum}, [3]),
    "__getitems__, once": (Many(), [[1, 2]], {"collate_fn": tuple}, [(("many", 1), ("many", 2))]),
    "several shards": (
        *(Squares(), [[[1, 2], [3]], [[4], []]], {"collate_fn": sum}),
        [[5, 9], [16, 0]],
    ),
}
"""Datasets, samplers and options, and the batches that come of them."""


@pytest.mark.parametrize("case", GIVEN)
def test_what_is_given(make, case):
    dataset, sampler, options, expected = GIVEN[case]
    loader = make(dataset, sampler, **options)
    loader.start()
    assert list(loader) == expected


def test_items_reach_the_dataset_as_they_are(make):
    items: Any = ["a", (1, 2), [3, [4]], {"k": {5}}, None, slice(1, 2), np.arange(3), b"\0", 2**80]
    for got, sent in zip(make(Echo(), items), items, strict=True):
        assert type(got) is type(sent)
        assert np.array_equal(got, sent) if isinstance(sent, np.ndarray) else got == sent


class Listed(list):  # type: ignore[type-arg]
    """A list of the user's own kind."""


class Refills:
    """Gives each of some objects three times, with another number in it."""

    def __iter__(self) -> Iterator[Any]:
        kinds = [[0], {}, bytearray(1), np.zeros(1), array("q", [0]), deque([0]), Listed([0])]
        for item in kinds:
            for n in range(3):
                item[0] = n  # type: ignore[index]
                yield item


def test_a_sampler_may_fill_one_object_again(make):
    """Items are as they were when they were drawn; a state is not refused for what they are now."""
    loader = make(Echo(), Refills(), chunks=True)
    expected = 7 * [0, 1, 2]
    for taken in range(0, 21, 2):
        loader.set_epoch(0)
        batches = iter(loader)
        assert [next(batches)[0] for _ in range(taken)] == expected[:taken]
        loader.load_state_dict(loader.state_dict())
        assert [item[0] for item in loader] == expected[taken:]


def test_arrays_are_writable(make):
    for batch in make(np.zeros, [3, (2, 5)]):
        batch += 1
        assert (batch == 1).all()


def test_out_of_order_loses_nothing(make):
    loader = make(Squares(30, delay=0.01), in_order=False)
    assert sorted(loader) == [i * i for i in range(30)]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_out_of_order_overtakes(executor, tmp_path):
    gate = tmp_path / "open"
    with Loader(
        Gate(str(gate)), range(12), num_workers=2, executor=executor, in_order=False
    ) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(11)]
        gate.touch()
        assert first == list(range(1, 12))
        assert list(batches) == [0]


# --- the sampler is read lazily --------------------------------------------------------------


def test_never_further_ahead_than_the_deque(make):
    """However quick the batches are: what gives the items may go by what the loop has done."""
    drawn: list[int] = []
    items = (drawn.append(n) or n for n in itertools.count())
    loader = make(Squares(99), items, prefetch_factor=3)
    batches = iter(loader)
    depth = 3 * loader.num_workers
    assert len(drawn) == depth
    for taken in range(1, 15):
        next(batches)
        assert len(drawn) == taken + depth


def test_one_shot_sampler_serves_one_epoch(make):
    loader = make(Squares(), iter([1, 2, 3]))
    assert list(loader) == [1, 4, 9]
    with pytest.raises(RuntimeError, match=r"sampler is an iterator.*serves one epoch"):
        iter(loader)


def test_length_is_the_samplers(make):
    assert len(make(Squares(), [1, 2])) == 2
    with pytest.raises(TypeError, match=r"no length.*generator"):
        len(make(Squares(), (i for i in range(3))))


# --- collating -------------------------------------------------------------------------------


def test_collating_an_item_that_is_no_list(make):
    with pytest.raises(TypeError, match="yielded 3, but with collate_fn each item must be a list"):
        next(iter(make(Squares(), [3], collate_fn=tuple)))


@pytest.mark.parametrize(
    ("last_batch", "epochs"),
    [
        ("keep", [[[0, 1, 4, 9], [16, 25]]] * 3),
        ("discard", [[[0, 1, 4, 9]]] * 3),
        (
            "rollover",
            [[[0, 1, 4, 9]], [[16, 25, 0, 1], [4, 9, 16, 25]], [[0, 1, 4, 9]]],
        ),
    ],
)
def test_batch_size(make, last_batch, epochs):
    loader = make(Squares(6), batch_size=4, last_batch=last_batch)
    for expected in epochs:
        assert len(loader) == len(expected)
        batches = list(loader)
        assert all(isinstance(batch, np.ndarray) for batch in batches)
        assert [batch.tolist() for batch in batches] == expected


def test_shuffle_differs_between_epochs_and_repeats(make):
    loader, again = make(Squares(50), shuffle=True, seed=3), make(Squares(50), shuffle=True, seed=3)
    first, second = list(loader), list(loader)
    assert sorted(first) == sorted(second) == [i * i for i in range(50)]
    assert first != second
    assert [first, second] == [list(again), list(again)]


# --- epochs ----------------------------------------------------------------------------------


def test_break_then_a_clean_epoch_on_the_same_workers(make):
    loader = make(Whereabouts(), range(30))
    pids = set()
    for batch in loader:
        pids.add(batch["pid"])
        if batch["item"] == 3:
            break
    again = list(loader)
    assert [batch["item"] for batch in again] == list(range(30))
    assert {batch["epoch"] for batch in again} == {1}
    assert len(pids | {batch["pid"] for batch in again}) <= max(loader.num_workers, 1)


def test_iterators_are_independent(make):
    loader = make(Whereabouts(), range(6))
    one, two = iter(loader), iter(loader)
    pairs = list(zip(one, two, strict=True))
    assert [(a["item"], b["item"]) for a, b in pairs] == [(i, i) for i in range(6)]
    assert {(a["epoch"], b["epoch"]) for a, b in pairs} == {(0, 1)}
    assert next(one, "over") == next(one, "over") == "over"


def test_the_epoch_travels(make):
    loader = make(Whereabouts(), Told(2), seed=9)
    assert loader.epoch == 0
    assert [(b["item"] // PASS, b["epoch"]) for b in loader] == [(0, 0)] * 2
    assert loader.epoch == 1
    loader.set_epoch(7)
    assert [(b["item"] // PASS, b["epoch"], b["seed"]) for b in loader] == [(7, 7, 9)] * 2
    assert loader.epoch == 8


# --- seeds -----------------------------------------------------------------------------------


def test_the_batchs_generator_depends_on_its_place_alone(make):
    loader = make(Noise(), seed=11)
    for epoch in range(2):
        for ordinal, batch in enumerate(loader):
            expected = generator("batch", 11, epoch, ordinal, 0)
            assert np.array_equal(batch, expected.random(4))


@pytest.mark.parametrize("dataset", [GlobalNoise, TorchNoise])
def test_global_generators_are_seeded_alike(dataset):
    if dataset is TorchNoise:
        require("torch")
    runs = []
    counts = (0, 1) if dataset is TorchNoise else (0, 1, 3)
    for num_workers in counts:
        with Loader(dataset(), num_workers=num_workers, seed=4) as loader:
            runs.append([list(loader), list(loader)])
    assert runs.count(runs[0]) == len(counts)
    first, second = runs[0]
    assert len({str(batch) for batch in first + second}) == 24


def test_inline_gives_the_callers_generators_back():
    torch = require("torch")
    for set_seed, draw in (
        (random.seed, random.random),
        (np.random.seed, np.random.random),
        (torch.manual_seed, lambda: torch.rand(1).item()),
    ):
        set_seed(1)
        expected = draw(), draw()
        set_seed(1)
        values = [draw()]
        list(Loader(GlobalNoise(), num_workers=0))
        assert (*values, draw()) == expected


@pytest.mark.parametrize("make", ["thread", "foreign-thread"], indirect=True)
def test_threads_leave_the_global_generators_alone(make):
    random.seed(1)
    before = random.getstate()
    list(make(Squares()))
    assert random.getstate() == before


def test_seed_none_draws_one_that_repeats():
    first = Loader(Noise(), num_workers=0, seed=None)
    other = Loader(Noise(), num_workers=0, seed=None)
    again = Loader(Noise(), num_workers=0, seed=first.seed)
    assert first.seed != other.seed
    assert np.array_equal(list(first), list(again))


# --- workers ---------------------------------------------------------------------------------


def test_worker_info(make):
    assert get_worker_info() is None
    loader = make(Whereabouts())
    for batch in loader:
        assert batch["info_pid"] == batch["pid"]
        assert batch["num_workers"] == loader.num_workers
        foreign = make.name.startswith("foreign")
        assert batch["id"] in ([-1] if foreign else range(max(loader.num_workers, 1)))
        assert (batch["pid"] == os.getpid()) == ("process" not in make.name)
    assert get_worker_info() is None


def test_worker_init_fn_runs_once_in_each_worker(make, tmp_path):
    def init(info: minloader.WorkerInfo) -> None:
        with open(tmp_path / "calls", "a") as file:
            file.write(f"{info.id} {info.pid} {info.rng.random()}\n")

    loader = make(Squares(30, delay=0.005), worker_init_fn=init)
    list(loader)
    list(loader)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert 1 <= len(calls) <= max(loader.num_workers, 1)
    if not make.name.startswith("foreign"):
        assert len(set(calls)) == len({call.split()[0] for call in calls}) == len(calls)


def test_a_failing_worker_init_fn_is_the_error_of_every_batch(make):
    def init(info: minloader.WorkerInfo) -> None:
        raise LookupError("no such device")

    batches = iter(make(Squares(), worker_init_fn=init, on_error="skip"))
    for _ in range(3):
        with pytest.raises(LookupError, match="no such device") as caught:
            next(batches)
        assert "in worker_init_fn" in caught.value.__notes__[0]


def test_close(make):
    loader = make(Squares())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        iter(loader)
    with pytest.raises(RuntimeError, match="closed"):
        loader.start()
    with pytest.raises(RuntimeError, match="closed"):
        loader.load_state_dict(state)


# --- errors ----------------------------------------------------------------------------------


def test_an_error_comes_in_its_place_and_the_next_batch_after_it(make):
    loader = make(Faulty(6, {2: ValueError, 4: KeyError}))
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="item 2 is bad") as caught:
        next(batches)
    note = caught.value.__notes__[0]
    assert "batch 2 of epoch 0" in note
    assert "item 2" in note
    assert "worker" in note
    assert next(batches) == 9
    with pytest.raises(KeyError):
        next(batches)
    assert list(batches) == [25]
    assert next(iter(loader)) == 0


def test_stop_iteration_does_not_end_the_epoch(make):
    batches = iter(make(Faulty(3, {1: StopIteration})))
    assert next(batches) == 0
    with pytest.raises(BatchError, match="StopIteration: item 1 is bad"):
        next(batches)
    assert list(batches) == [4]


def refuse_three(value: Any) -> Any:
    if value in (3, [3]):
        raise ArithmeticError("three")
    return value


@pytest.mark.parametrize(
    ("stage", "items"), [("transform", [1, 3, 4]), ("collate_fn", [[1], [3], [4]])]
)
def test_errors_of_transform_and_collate(make, stage, items):
    batches = iter(make(Echo() if stage == "transform" else int, items, **{stage: refuse_three}))
    assert next(batches) == items[0]
    with pytest.raises(ArithmeticError, match="three"):
        next(batches)
    assert next(batches) == items[2]


def test_a_sampler_error_comes_after_the_batches_before_it(make):
    batches = iter(make(Squares(), Failing(4, 2), on_error="skip"))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="is bad") as caught:
        next(batches)
    assert "raised by the sampler" in caught.value.__notes__[0]
    assert list(batches) == [4, 9]


def test_skip(make, caplog):
    loader = make(Faulty(6, {2: ValueError, 5: KeyError}), on_error="skip")
    assert list(loader) == [0, 1, 9, 16]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "skipped batch 2 of epoch 0, item 2" in caplog.text
    assert "ValueError: item 2 is bad" in caplog.text


def test_on_error_decides(make):
    seen = []

    def decide(error: BatchError) -> Any:
        seen.append(error)
        if error.item == 1:
            return "substitute"
        if error.item == 2:
            return SKIP
        raise error

    batches = iter(make(Faulty(5, dict.fromkeys([1, 2, 3], ValueError)), on_error=decide))
    assert [next(batches), next(batches)] == [0, "substitute"]
    with pytest.raises(BatchError, match=r"batch 3 of epoch 0, item 3.*ValueError: item 3 is bad"):
        next(batches)
    assert list(batches) == [16]
    assert [(e.ordinal, e.epoch, e.item) for e in seen] == [(i, 0, i) for i in (1, 2, 3)]
    assert all(isinstance(e.__cause__, ValueError) for e in seen)
    assert all(e.pid is not None for e in seen)


class Opened(Squares):
    """Is opened once in each worker."""

    connection: Any = None

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.connection, info


def open_dataset(info: Any) -> None:
    info.dataset.connection = "open"


class OpenedStream:
    def __iter__(self) -> Iterator[bool]:
        info = get_worker_info()
        assert info is not None
        yield info.dataset is self


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_shard_can_reach_its_own_copy_of_a_stream(num_workers):
    with Loader(OpenedStream(), num_workers=num_workers) as loader:
        for _ in range(2):
            assert list(loader) == [True] * max(1, num_workers)


def test_worker_init_fn_can_reach_the_dataset(make):
    with make(Opened(), range(4), worker_init_fn=open_dataset) as loader:
        for connection, info in loader:
            assert connection == "open"
            # What comes from another process brings no copy of the dataset along.
            assert (info.dataset is None) == ("process" in make.name)
