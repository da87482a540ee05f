"""loader.skip(n): the next batches are left out, and not made; all others stay as they are.

How it goes with epochs, states and what was left is said by the programs of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import making
from helpers import Numbers, SelfIterating, Stateful

from minloader import (
    SKIP,
    BatchError,
    BatchSampler,
    DynamicBatchSampler,
    Loader,
    prefetch,
)


@pytest.fixture(params=["inline", "thread"])
def make(request):
    """Batches are left out in this process, wherever they are made."""
    with making(request) as factory:
        yield factory


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


def echo(item: Any) -> Any:
    return item


def fail_at_two_and_five(item: int) -> int:
    if item in (2, 5):
        raise ValueError(f"item {item} is bad")
    return item


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


def test_another_epoch_has_all_its_batches():
    with Loader(echo, range(4), num_workers=0) as loader:
        loader.skip(3)
        loader.set_epoch(0)  # it is the next
        assert list(loader) == [3]
        loader.skip(3)
        loader.set_epoch(5)
        assert list(loader) == [0, 1, 2, 3]
        loader.set_epoch(7)
        loader.skip(3)
        assert list(loader) == [3]


def test_a_part_of_a_task_is_left_out():
    """Tiny batches are sent many at a time."""
    with Loader(echo, range(5000), num_workers=1, executor="thread") as loader:
        list(loader)
        batches = iter(loader)
        given = []
        for _ in range(60):
            given.append(next(batches))
            loader.skip(7)
        given += list(batches)
    assert given == [*range(0, 480, 8), *range(480, 5000)]


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


def test_skip_is_refused_while_on_error_is_asked(make):
    """The place of its batch is still open, so that nobody knows which ones are next."""

    def refused(failure: BatchError) -> Any:
        with pytest.raises(RuntimeError, match="skip is refused while a batch is taken"):
            loader.skip(2)
        return -1 if failure.ordinal == 2 else SKIP

    with make(fail_at_two_and_five, range(8), on_error=refused) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, -1]
        loader.skip(1)
        assert list(batches) == [4, 6, 7]


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


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_that_there_is_is_left_out_at_once(name):
    with Loader(echo, SAMPLERS[name](), num_workers=0) as loader:
        loader.skip(10**15)
        assert list(loader) == []
        assert len(list(loader)) > 5  # the epoch after that


def test_a_list_that_grows_after_a_skip():
    items = [0, 1, 2]
    with Loader(echo, items, num_workers=0) as loader:
        loader.skip(1)
        items.append(3)
        assert list(loader) == [1, 2, 3]


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
