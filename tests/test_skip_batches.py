"""loader.skip(n): the next batches are left out, and not made; all others stay as they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers import Noise, Numbers, SelfIterating, Stateful

from minloader import BatchSampler, DynamicBatchSampler, Loader, prefetch

pytestmark = pytest.mark.usefixtures("quick_starts")


N = 24

SAMPLERS: dict[str, Any] = {
    "range": lambda: range(N),
    "list": lambda: list(range(N)),
    "shuffled": lambda: BatchSampler(N, None, shuffle=True),
    "batches": lambda: BatchSampler(N, 2, shuffle=True),
    "dynamic": lambda: DynamicBatchSampler([1 + n % 3 for n in range(N)], max_total=4),
    "stateful": lambda: Stateful(range(N)),
    "own iterator": lambda: SelfIterating(range(N)),
    "no length": lambda: Endless(),
}


class Endless:
    """For as long as anybody asks."""

    def __iter__(self) -> Any:
        return iter(range(N))


def whole(name: str) -> list[Any]:
    with Loader(echo, SAMPLERS[name](), num_workers=0) as loader:
        return [list(loader) for _ in range(2)]


def echo(item: Any) -> Any:
    return item


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_are_left_out_in_the_middle(make, name):
    first, second = whole(name)
    with make(echo, SAMPLERS[name]()) as loader:
        batches = iter(loader)
        given = list(itertools.islice(batches, 3))
        loader.skip(4)
        loader.skip(1)
        state = loader.state_dict()
        given += list(itertools.islice(batches, 1))
        loader.skip(0)
        given += list(batches)
        assert given == first[:3] + first[8:]
        assert list(loader) == second
    with make(echo, SAMPLERS[name]()) as loader:
        loader.load_state_dict(state)
        assert list(loader) == first[8:]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "own iterator"])
def test_batches_are_left_out_at_the_beginning(make, name):
    first, second = whole(name)
    with make(echo, SAMPLERS[name]()) as loader:
        loader.skip(2)
        loader.skip(3)
        state = loader.state_dict()
        assert list(loader) == first[5:]
        loader.skip(1)
        assert loader.epoch == 1
        assert list(loader) == second[1:]
        loader.load_state_dict(state)
        loader.skip(1)
        assert list(loader) == first[6:]


@pytest.mark.parametrize("name", ["range", "batches", "no length"])
def test_no_more_than_an_epoch_is_left_out(make, name):
    first, _ = whole(name)
    with make(echo, SAMPLERS[name]()) as loader:
        batches = iter(loader)
        assert next(batches) == first[0]
        loader.skip(1000)
        assert list(batches) == []
        loader.skip(1000)
        assert list(loader) == []
        assert loader.epoch == 2


def test_an_epoch_ends_there_within_epochs(make):
    with make(echo, range(9)) as loader:
        given = []
        for epoch, batch in loader.epochs(2):
            given.append((epoch, batch))
            loader.skip(1000 if batch == 1 else 0)
        assert given == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_is_left_out_is_not_made():
    made: list[int] = []

    def note(index: int) -> int:
        made.append(index)
        return index

    with Loader(note, range(9), num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        loader.skip(5)
        assert list(batches) == [6, 7, 8]
        loader.skip(7)
        assert list(loader) == [7, 8]
    assert made == [0, 6, 7, 8, 7, 8]


def test_a_part_of_a_task_is_left_out():
    """Tiny batches are sent many at a time."""
    with Loader(echo, range(5000), num_workers=1) as loader:
        list(loader)
        batches = iter(loader)
        given = []
        for _ in range(60):
            given.append(next(batches))
            loader.skip(7)
        given += list(batches)
    assert given == [*range(0, 480, 8), *range(480, 5000)]


def test_draws_stay_as_they_are(make):
    with make(Noise(), BatchSampler(12, 2)) as loader:
        first = [batch for batch in loader]
    with make(Noise(), BatchSampler(12, 2)) as loader:
        loader.skip(2)
        batches = iter(loader)
        found = [next(batches)]
        loader.skip(1)
        found += list(batches)
    expected = [first[2], *first[4:]]
    assert repr(found) == repr(expected)


def test_after_an_epoch_that_was_left_the_next_one_is_meant(make):
    with make(echo, range(9)) as loader:
        for _ in loader:
            break
        loader.skip(7)
        assert list(loader) == [7, 8]
        assert loader.epoch == 2


@pytest.mark.parametrize("n", [9, 3])
def test_skip_is_refused_while_prefetch_takes_batches_ahead(make, n):
    """Which ones it has taken depends on the workers; here it may be all of them."""
    with make(echo, range(n)) as loader:
        batches = prefetch(loader, echo, 4)
        assert next(batches) == 0
        with pytest.raises(RuntimeError, match="skip is refused while prefetch"):
            loader.skip(3)
        assert next(batches) == 1
        loader.load_state_dict(loader.state_dict())
        loader.skip(3)
        assert list(prefetch(loader, echo, 4)) == [*range(5, n)]
        loader.skip(1)
        assert list(prefetch(loader, echo, 4)) == [*range(1, n)]


def test_set_epoch_is_refused_while_prefetch_takes_epochs_ahead(make):
    with make(echo, range(3)) as loader:
        batches = prefetch(loader.epochs(3), echo, 4)
        assert next(batches) == (0, 0)
        with pytest.raises(RuntimeError, match="while epochs"):
            loader.epoch = 7
        assert list(batches) == [(0, 1), (0, 2), *((e, n) for e in (1, 2) for n in range(3))]
        batches = prefetch(loader, echo, 4)
        next(batches)
        loader.epoch = 7  # as after each other epoch
        assert list(batches) == [1, 2]
        assert loader.epoch == 7


class Unreachable:
    """Gives three items, and raises from then on."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Unreachable:
        return self

    def __next__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError("the store is gone")
        return self.left


def test_a_sampler_that_goes_on_raising_is_not_asked_for_ever(make):
    """What it raises comes with the next batch, also if it was read ahead."""
    with make(echo, Unreachable()) as loader:
        batches = iter(loader)
        assert next(batches) == 2
        for _ in range(3):
            loader.skip(5)
            with pytest.raises(OSError, match="the store is gone"):
                next(batches)


def test_a_stream_refuses():
    with (
        Loader(Numbers(9), num_workers=0) as loader,
        pytest.raises(TypeError, match="a stream, which can only be read on"),
    ):
        loader.skip(2)


def test_wrong_arguments():
    with Loader(echo, range(3), num_workers=0) as loader:
        with pytest.raises(ValueError, match="n must be at least 0, got -1"):
            loader.skip(-1)
        with pytest.raises(TypeError, match="n must be an int"):
            loader.skip(1.5)
    with pytest.raises(RuntimeError, match="closed"):
        loader.skip(1)
