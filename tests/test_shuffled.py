"""minloader.shuffled: another order of the same samples, with a state that has no samples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import WAYS, outcomes, plain, variants
from helpers import Deadly, Refuses
from kinds import (
    Counting,
    Numbered,
    OwnIterator,
    Raising,
    Resuming,
    Separate,
    Steady,
    Sticky,
)

from minloader import Loader, get_worker_info, shuffled

pytestmark = pytest.mark.usefixtures("quick_starts")

STREAMS = [Counting, OwnIterator, Resuming, Separate, Numbered]


class Placed:
    """One whose iterator has a state, and that is not begun anew by it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return PlacedReading(self.n)


class Refilled:
    """Fills one object again and again, as decoders with ``out=`` do."""

    def __init__(self, n: int, wrap: Any) -> None:
        self.n, self.wrap = n, wrap

    def __iter__(self) -> Iterator[Any]:
        buffer = np.empty(3)
        for number in range(self.n):
            buffer[:] = number
            yield self.wrap(buffer)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: {"audio": array[1:]}])
def test_an_object_that_is_filled_again_is_refused(wrap, workers):
    """Also inside of another; as a copy it is welcome, and so is one that does not change."""
    options: Any = {"num_workers": workers, "executor": "thread"}
    loader = Loader(shuffled(Refilled(12, wrap), 4), **options)
    with loader, pytest.raises(RuntimeError, match="yield a new object each time"):
        next(iter(loader))
    with Loader(shuffled(Refilled(12, np.copy), 4), **options) as loader:
        assert sorted(int(batch[0]) for batch in loader) == list(range(12))
    same = np.zeros(3)
    with Loader(shuffled(Refilled(12, lambda array: same), 4), **options) as loader:
        assert len(list(loader)) == 12


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("wrap", "is_told"), [(lambda array: array, True), (np.copy, False), (np.sum, False)]
)
def test_an_object_that_is_filled_again_is_told_in_a_batch(wrap, is_told, workers, caplog):
    """In the log alone: a stream may give one object several times, and not change it."""
    options: Any = {"num_workers": workers, "executor": "thread"}
    with Loader(Refilled(12, wrap), batch_size=4, **options) as loader:
        list(loader)
    assert ("return a new object each time" in caplog.text) == is_told


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("wrap", "sampler", "is_told"),
    [
        (lambda array: array, [[0, 1, 2]], True),
        (lambda array: array, [[1, 0, 1]], False),  # which asks for one twice
        (np.copy, [[0, 1, 2]], False),
        (lambda array: None, [[0, 1, 2]], False),
    ],
)
def test_so_it_is_in_a_batch_of_samples(wrap, sampler, is_told, workers, caplog):
    array = np.zeros(2)

    def fill(index: int) -> Any:
        array[:] = index
        return wrap(array)

    options: Any = {"num_workers": workers, "executor": "thread", "collate_fn": list}
    with Loader(fill, sampler, **options) as loader:
        list(loader)
    assert ("return a new object each time" in caplog.text) == is_told


class PlacedReading(Iterator[int]):
    read = 0  # by all of them

    def __init__(self, n: int) -> None:
        self.n, self.i = n, 0

    def __next__(self) -> int:
        if self.i == self.n:
            raise StopIteration
        self.i += 1
        type(self).read += 1
        return self.i - 1

    def state_dict(self) -> int:
        return self.i

    def load_state_dict(self, state: int) -> None:
        self.i = state


@pytest.mark.parametrize("size", [4, 7, 10, 64, 1000])
def test_all_samples_in_another_order(size):
    stream = shuffled(Raising(200, ()), size)
    order = list(stream)
    assert sorted(order) == list(range(200))
    assert list(stream) == order
    assert list(shuffled(Raising(200, ()), size, seed=1)) != order
    moved = np.abs(np.array(order) - np.arange(200))
    assert moved.max() < size
    assert list(shuffled(Raising(0, ()), size)) == []


def test_reading_is_steady():
    read = []
    samples = iter(shuffled(map(lambda n: read.append(n) or n, range(100)), 20))
    lengths = [len(read) for _ in itertools.islice(samples, 85)]
    assert lengths[0] == 10
    assert np.diff(lengths).max() == 1


def test_every_order_is_as_frequent():
    """Of a half of the buffer, over many seeds."""
    counts = np.zeros((4, 4))
    for seed in range(2000):
        for place, number in enumerate(shuffled(Raising(4, ()), 8, seed)):
            counts[place, number] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 40  # chi-square with 9 degrees: 1 in 100,000


@pytest.mark.parametrize("k", range(0, 45, 3))
def test_going_on_reads_no_more_than_the_buffer_again(k):
    whole = list(shuffled(Placed(40), 8))
    samples: Any = iter(shuffled(Placed(40), 8))
    head = list(itertools.islice(samples, k))
    state = plain(samples.state_dict())
    assert len(json.dumps(state)) < 120
    other: Any = iter(shuffled(Placed(40), 8))
    PlacedReading.read = 0
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert head + list(other) == whole
    assert PlacedReading.read <= 40 - k + 8


@variants("options", WAYS.values())
@pytest.mark.parametrize("kind", STREAMS)
def test_loaders_go_on_at_every_batch(kind, options):
    """Of two epochs, whatever way the stream has its state in."""

    def make() -> Loader:
        return Loader(shuffled(kind(), 4), batch_size=3, **options)

    with make() as loader, make() as other:
        batches, states = [], [loader.state_dict()]
        for _, batch in loader.epochs(2):
            batches.append(batch.tolist())
            states.append(plain(loader.state_dict()))
        assert sorted(np.concatenate(batches)) == [*range(14), *range(100, 114)]
        for k, state in enumerate(states):
            other.load_state_dict(state)
            assert [batch.tolist() for _, batch in other.epochs(until=2)] == batches[k:], k


@pytest.mark.parametrize("kind", [*STREAMS, Sticky])
def test_loaders_go_on_in_the_first_half_of_a_later_epoch(kind, caplog):
    """What comes before it may be the state of an end, which gives nothing."""
    with (
        Loader(shuffled(kind(), 8), num_workers=0) as loader,
        Loader(shuffled(kind(), 8), num_workers=0) as other,
    ):
        list(loader)
        states, given = [], []
        for batch in loader:
            given.append(batch)
            states.append(plain(loader.state_dict()))
        assert len(given) == 14
        for k, state in enumerate(states, 1):
            other.load_state_dict(state)
            assert list(other) == given[k:], k
    assert "has no state" not in caplog.text


def test_a_death_in_the_first_half_of_a_later_epoch_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("minloader._epochs.shard_feed.MAX_SHARD_CHUNK", 1)
    stream = shuffled(Resuming(14), 16)
    deadly = Deadly({102, 105}, str(tmp_path))
    with Loader(stream, transform=deadly, num_workers=1) as loader:
        for epoch in range(2):
            assert sorted(loader) == list(range(100 * epoch, 100 * epoch + 14))
        assert loader.stats.errors.retries == 2


@pytest.mark.parametrize("options", list(WAYS.values())[:2])
def test_errors_lose_nothing(options):
    stream = shuffled(Raising(30, {0, 4, 5, 17, 29}), 8)
    with Loader(stream, on_error="skip", **options) as loader:
        shards = loader.num_workers or 1
        given = sorted(loader)
    assert given == sorted(shards * [n for n in range(30) if n not in (0, 4, 5, 17, 29)])


class Faulty(Placed):
    def __iter__(self) -> Any:
        return FaultyReading(self.n)


class FaultyReading(PlacedReading):
    def __next__(self) -> int:
        number = super().__next__()
        if number % 5 == 4:
            raise LookupError(f"no {number}")
        return number


@pytest.mark.parametrize("size", [8, 11, 14])
def test_errors_are_raised_once(size):
    """Also where a run goes on, which reads past them again."""

    def make() -> Loader:
        return Loader(shuffled(Faulty(30), size), num_workers=0)

    lived, states = make(), []
    batches, found = iter(lived), []
    while more := outcomes(batches, 1):
        found += map(str, more)
        states.append(plain(lived.state_dict()))
    assert sorted(found) == sorted(
        [*(str(n) for n in range(30) if n % 5 < 4)] + [f"no {n}" for n in range(4, 30, 5)]
    )
    for k, state in enumerate(states, 1):
        loader = make()
        loader.load_state_dict(state)
        assert list(map(str, outcomes(iter(loader)))) == found[k:], k


@pytest.mark.parametrize("way", ["thread", "process"])
def test_an_end_by_an_error_is_told(way, caplog):
    """Samples that are in the buffer come after it, and then no more."""
    stream = shuffled(Steady(40, Refuses(20)), 10)
    with Loader(stream, num_workers=1, executor=way, on_error="skip") as loader:
        assert sorted(loader) == list(range(20))
    assert [record.message for record in caplog.records].count(
        "a shuffled stream ended with its error, as a generator does"
    ) == 1


def test_epochs_and_shards_have_orders_of_their_own():
    with Loader(shuffled(Raising(50, ()), 50), num_workers=2, executor="thread") as loader:
        orders = [list(loader)[shard::2] for _ in range(2) for shard in range(2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def lines_of(number: int, is_shuffled: bool = True) -> tuple[list[int], float]:
    """The lines of a file, and what is drawn behind them."""
    info = get_worker_info()
    assert info is not None
    lines = list(shuffled(range(8), 8)) if is_shuffled else []
    return lines, info.rng.random()


@pytest.mark.parametrize("is_stream", [False, True])
def test_in_a_sample_the_numbers_of_its_batch_are_left_alone(is_stream):
    """Of a dataset of items the order follows from the batch, whoever makes it."""

    def make(function: Any, num_workers: int) -> Any:
        options: dict[str, Any] = {"num_workers": num_workers, "executor": "thread"}
        if is_stream:
            return Loader(Raising(6, ()), transform=function, **options)
        return Loader(function, range(6), **options)

    with make(partial(lines_of, is_shuffled=False), 0) as loader:
        numbers = [number for _, number in loader]
    with make(lines_of, 0) as loader:
        orders = [lines for lines, _ in loader]
        assert [number for _, number in loader] != numbers  # of the next epoch
    assert is_stream or len({tuple(lines) for lines in orders}) == 6
    for num_workers in (0, 1 if is_stream else 3):
        with make(lines_of, num_workers) as loader:
            assert list(loader) == list(zip(orders, numbers, strict=True))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="stream must be iterable"):
        shuffled(5, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer_size must be"):
        shuffled([1], 3)
    with pytest.raises(ValueError, match="seed must be"):
        shuffled([1], 5, seed=-1)
    assert not hasattr(shuffled([1], 5), "state_dict")
