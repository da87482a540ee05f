"""What batches are made of: nothing lost, nothing repeated, the budget held, the epoch obeyed."""

from collections.abc import Iterable, Iterator
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import pytest
from conftest import flat
from helpers import Lazily
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minloader import BatchSampler, DynamicBatchSampler
from minloader._sampling import windows

invariant = settings(deadline=None, max_examples=150)  # a busy machine is no failure


class Counted:
    """An iterator that counts how far it was read."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = iter(values)
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        value = next(self._values)
        self.read += 1
        return value


def epoch_of(sampler: Any, epoch: int) -> list[Any]:
    sampler.set_epoch(epoch)
    return list(sampler)


# --- BatchSampler ------------------------------------------------------------------------------


@invariant
@given(
    n=st.integers(0, 40),
    kind=st.sampled_from([int, range, lambda n: list(range(n))]),
    size=st.integers(1, 12),
    shuffle=st.booleans(),
    last_batch=st.sampled_from(["keep", "discard", "rollover"]),
    seed=st.integers(0, 2**40),
    epochs=st.integers(1, 6),
)
@example(  # a batch of 4 epochs
    n=2, kind=int, size=7, shuffle=True, last_batch="rollover", seed=0, epochs=12
)
def test_epochs_of_a_number_and_of_a_sequence(n, kind, size, shuffle, last_batch, seed, epochs):
    sampler = BatchSampler(kind(n), size, shuffle, last_batch, seed)
    singles = BatchSampler(kind(n), None, shuffle, seed=seed)
    everything, orders = [], []
    for epoch in range(epochs):
        order = epoch_of(singles, epoch)
        assert sorted(order) == list(range(n))
        assert len(singles) == n
        sampler.set_epoch(epoch)
        expected = len(sampler), sampler.dropped
        batches = list(sampler)
        assert (len(batches), sampler.dropped) == expected
        assert sampler.dropped == (n % size if last_batch == "discard" else 0)
        assert all(type(batch) is list for batch in batches)
        full = batches[:-1] if last_batch == "keep" else batches
        assert all(len(batch) == size for batch in full)
        if last_batch == "keep":
            assert flat(batches) == order
            assert all(batches)
        elif last_batch == "discard":
            assert flat(batches) == order[: n // size * size]
        everything += flat(batches)
        orders += order
    if last_batch == "rollover":  # the epochs end to end, short only of the last incomplete batch
        assert everything == orders[: n * epochs // size * size]


@pytest.mark.parametrize("kind", [list, np.array, Lazily, iter])
def test_inner_samplers(kind):
    assert list(BatchSampler(kind(list("abcdefg")), 3)) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]


def test_inner_sampler_without_batches_and_shuffled():
    assert list(BatchSampler(["x", "y"], None)) == ["x", "y"]
    letters = list("abcdefghijklmnopqrst")
    shuffled = BatchSampler(letters, 6, shuffle=True, last_batch="discard")
    first, second = flat(epoch_of(shuffled, 0)), flat(epoch_of(shuffled, 1))
    assert len(first) == len(set(first)) == 18
    assert set(first) < set(letters)
    assert first != second
    with pytest.raises(TypeError, match="shuffle=True needs a number of samples or a sequence"):
        BatchSampler(Lazily(letters), 6, shuffle=True)


def test_length_of_a_lazy_inner_sampler_is_unknown():
    with pytest.raises(TypeError):
        len(BatchSampler(Lazily([1, 2]), 2))


def test_infinite_inner_is_read_no_further_than_its_batches():
    inner = Counted(count())
    batches = iter(BatchSampler(inner, 3, last_batch="discard"))
    assert inner.read == 0
    assert list(islice(batches, 2)) == [[0, 1, 2], [3, 4, 5]]
    assert inner.read == 6
    singles = Counted(count())
    assert list(islice(BatchSampler(singles, None), 2)) == [0, 1]
    assert singles.read == 2


def test_numpy_integers_are_integers():
    sampler = BatchSampler(np.int64(5), np.int32(2), seed=np.uint8(1))
    sampler.set_epoch(np.int64(1))
    assert list(sampler) == [[0, 1], [2, 3], [4]]
    orders = [list(BatchSampler(n, 2, shuffle=True)) for n in (9, np.int64(9), np.array(9))]
    assert orders[0] == orders[1] == orders[2]


# --- DynamicBatchSampler -----------------------------------------------------------------------


def cost(batch: list[int], lengths: Any, budget_name: str) -> float:
    values = [lengths[index] or 1 for index in batch]  # what costs nothing counts as 1
    return sum(values) if budget_name == "max_total" else len(values) * max(values)


# Quarters add up exactly, so the budget can be compared without a tolerance.
some_lengths = st.one_of(
    st.lists(st.integers(0, 60), max_size=60),
    st.lists(st.integers(0, 240).map(lambda quarters: quarters / 4), max_size=60),
)
budgets = st.sampled_from(["max_total", "max_padded"])


@invariant
@given(
    lengths=some_lengths,
    kind=st.sampled_from([list, np.array, Lazily, iter]),
    budget_name=budgets,
    slack=st.integers(0, 200),
    max_batch=st.none() | st.integers(1, 9),
    buckets=st.integers(1, 6),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_index_once_within_the_budget(
    lengths, kind, budget_name, slack, max_batch, buckets, shuffle, epoch
):
    budget = max([*lengths, 1]) + slack
    sampler = DynamicBatchSampler(
        kind(lengths),
        max_batch=max_batch,
        buckets=buckets,
        shuffle=shuffle,
        **{budget_name: budget},
    )
    batches = epoch_of(sampler, epoch)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(type(index) is int for index in flat(batches))
    for batch in batches:
        assert 1 <= len(batch) <= (max_batch or len(lengths))
        assert cost(batch, lengths, budget_name) <= budget
    if kind in (list, np.array):
        assert len(sampler) == len(batches)


@invariant
@given(
    lengths=some_lengths,
    lazy=st.booleans(),
    budget_name=budgets,
    max_batch=st.none() | st.integers(1, 9),
)
def test_in_order_and_as_full_as_can_be(lengths, lazy, budget_name, max_batch):
    """With one bucket, unshuffled: each batch ends only where the next sample would not fit."""
    budget = max([*lengths, 100])
    given_lengths = Lazily(lengths) if lazy else lengths
    batches = list(DynamicBatchSampler(given_lengths, max_batch=max_batch, **{budget_name: budget}))
    assert flat(batches) == list(range(len(lengths)))
    for batch, following in pairwise(batches):
        longer = [*batch, following[0]]
        assert cost(longer, lengths, budget_name) > budget or len(batch) == max_batch


def test_budgets_by_example():
    assert list(DynamicBatchSampler([3, 3, 4, 1, 9], max_total=10)) == [[0, 1, 2], [3, 4]]
    assert list(DynamicBatchSampler([3, 3, 4, 1, 9], max_padded=10)) == [[0, 1], [2, 3], [4]]
    assert list(DynamicBatchSampler([0.5, 0.75, 1.5], max_total=1.5)) == [[0, 1], [2]]
    assert list(DynamicBatchSampler([0, 0, 0, 5], max_padded=5, max_batch=2)) == [[0, 1], [2], [3]]
    assert list(DynamicBatchSampler([1, 1], max_total=float("inf"))) == [[0, 1]]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_buckets_pad_less(lazy, shuffle):
    lengths = np.random.default_rng(0).lognormal(3, 1, 3000).astype(int) + 1

    def padding(buckets):
        batches = DynamicBatchSampler(
            Lazily(lengths) if lazy else lengths,
            max_padded=8 * int(lengths.max()),
            buckets=buckets,
            shuffle=shuffle,
        )
        return sum(len(b) * lengths[b].max() - lengths[b].sum() for b in batches)

    assert padding(8) < 0.5 * padding(1)


def test_buckets_are_equally_full():
    lengths = np.arange(100) ** 2
    batches = list(DynamicBatchSampler(lengths, max_total=10**6, max_batch=25, buckets=4))
    assert [len(batch) for batch in batches] == [25, 25, 25, 25]
    assert [sorted(batch) for batch in batches] == [list(range(n, n + 25)) for n in (0, 25, 50, 75)]


def test_dynamic_shuffle_moves_the_incomplete_batch_too():
    """Batches are shuffled as well: else the remainders of the buckets would always come last."""
    sampler = DynamicBatchSampler([1] * 41, max_total=4, shuffle=True)
    places = [[len(batch) for batch in epoch_of(sampler, epoch)].index(1) for epoch in range(30)]
    assert len(set(places)) > 5


@pytest.mark.parametrize("buckets", [1, 4])
def test_infinite_lengths_are_read_a_window_ahead(monkeypatch, buckets):
    monkeypatch.setattr(windows, "WINDOW", 50)
    lengths = Counted(1 + i % 5 for i in count())
    sampler = DynamicBatchSampler(
        lengths, max_total=10, max_batch=6, buckets=buckets, shuffle=buckets == 1
    )
    taken: dict[int, None] = {}
    for batch in islice(sampler, 60):
        taken |= dict.fromkeys(batch)
        waiting = 6 * (buckets - 1) + 1  # in the other buckets, and the one that did not fit
        assert lengths.read - len(taken) < 50 + waiting
    assert len(taken) > 150
    if buckets == 1:  # window by window, each one whole, and in an order of its own
        assert set(range(len(taken) // 50 * 50)) <= taken.keys()
        order = list(taken)
        assert order[:50] != [number - 50 for number in order[50:100]]


def test_the_window_is_as_documented():
    lengths = Counted(1 for _ in count())
    batch = next(iter(DynamicBatchSampler(lengths, max_total=5, shuffle=True)))
    assert lengths.read == windows.WINDOW == 10_000
    assert max(batch) > 100


@pytest.mark.parametrize("number", [np.int64, np.float32, np.uint16])
def test_numpy_budgets_are_numbers(number):
    """``max_padded=8 * lengths.max()`` is how one writes it."""
    assert list(DynamicBatchSampler([2, 2, 2], max_total=number(4))) == [[0, 1], [2]]


def test_lengths_that_are_sized_but_no_sequence():
    lengths = {"a.wav": 2, "b.wav": 2, "c.wav": 2}
    assert list(DynamicBatchSampler(lengths.values(), max_total=4)) == [[0, 1], [2]]
