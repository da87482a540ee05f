"""Samplers of a training run: ranks that share an epoch, costs, and states to continue from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from conftest import flat, require
from helpers import Lazily
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import every_rank

from minloader import BatchSampler, DynamicBatchSampler
from minloader._sampling import windows

invariant = settings(deadline=None, max_examples=150)  # a busy machine is no failure
world_sizes = st.integers(1, 5)


def steps_of(ranks: list[Any]) -> list[tuple[Any, ...]]:
    """What all ranks take at once; fails if they have different numbers of batches."""
    return list(zip(*ranks, strict=True))


# --- BatchSampler ------------------------------------------------------------------------------


def test_ranks_of_an_infinite_inner_sampler():
    def evens():
        number = 0
        while True:
            yield number
            number += 2

    ranks = [BatchSampler(evens(), 2, rank=rank, world_size=2) for rank in range(2)]
    assert [list(islice(sampler, 2)) for sampler in ranks] == [
        [[0, 2], [8, 10]],
        [[4, 6], [12, 14]],
    ]


# --- DynamicBatchSampler -----------------------------------------------------------------------


def cost_of(batch: list[int], costs: Any, budget_name: str) -> float:
    values = [costs[index] for index in batch]
    return sum(values) if budget_name == "max_total" else len(values) * max(values)


def spread(costs: Iterable[float]) -> float:
    costs = list(costs)
    return (max(costs) - min(costs)) / max(costs) if max(costs) else 0.0


@invariant
@given(
    lengths=st.lists(st.integers(0, 60), max_size=80),
    lazy=st.booleans(),
    budget_name=st.sampled_from(["max_total", "max_padded"]),
    cost=st.sampled_from([None, lambda n: n * n, lambda n: 1 + n // 7]),
    slack=st.integers(0, 5000),
    max_batch=st.none() | st.integers(1, 9),
    buckets=st.integers(1, 6),
    shuffle=st.booleans(),
    world_size=world_sizes,
    window=st.integers(6, 200),
)
def test_ranks_share_a_plan(
    lengths, lazy, budget_name, cost, slack, max_batch, buckets, shuffle, world_size, window
):
    costs = lengths if cost is None else [cost(n) for n in lengths]
    budget = max([*costs, 1]) + slack
    kind = partial(
        DynamicBatchSampler,
        Lazily(lengths) if lazy else lengths,
        max_batch=max_batch,
        buckets=buckets,
        shuffle=shuffle,
        cost=cost,
        **{budget_name: budget},
    )
    ranks = every_rank(kind, world_size, epoch=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW", window)
        steps = steps_of(ranks)
    taken = flat(flat(steps))
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(range(len(lengths)))
    assert {sampler.dropped for sampler in ranks} == {len(lengths) - len(taken)}
    if world_size == 1:
        assert len(taken) == len(lengths)
    elif not lazy:
        assert len(lengths) - len(taken) < world_size
    for batch in flat(steps):
        assert 1 <= len(batch) <= (max_batch or len(lengths))
        assert cost_of(batch, costs, budget_name) <= budget
    if not lazy:
        assert {len(sampler) for sampler in ranks} == {len(steps)}
        firsts = [min(flat(step)) for step in steps]
        assert shuffle or world_size == 1 or firsts == sorted(firsts)


@pytest.fixture(scope="module")
def corpus() -> np.ndarray:
    """Sizes like those of source files (the standard library's), in chunks of 16,384 bytes."""
    files = np.random.default_rng(0).lognormal(8.5, 1.9, 1800).astype(int)
    return np.array([min(16_384, size - at) for size in files for at in range(0, size, 16_384)])


@pytest.mark.parametrize("budget_name", ["max_total", "max_padded"])
@pytest.mark.parametrize("lazy", [False, True])
def test_no_rank_waits(corpus, budget_name, lazy):
    """At every step the ranks' costs are within 5 %, and next to nothing is dropped for it."""
    kind = partial(
        DynamicBatchSampler,
        Lazily(corpus) if lazy else corpus,
        buckets=16,
        shuffle=True,
        **{budget_name: 262_144},
    )
    for epoch in range(5):
        ranks = every_rank(kind, 4, epoch)
        steps = steps_of(ranks)
        costs = [[cost_of(batch, corpus, budget_name) for batch in step] for step in steps]
        assert max(map(spread, costs)) <= 0.05
        assert ranks[0].dropped == len(corpus) - len(flat(flat(steps))) < 4
        # Not at the price of smaller batches.
        alone = kind(seed=0)
        alone.set_epoch(epoch)
        assert len(steps) <= 1.05 * len(list(alone)) / 4 + 1


def test_padding_is_a_third_of_that_of_fixed_batches(corpus):
    def padding(batches):
        cells = sum(len(batch) * corpus[batch].max() for batch in batches)
        return 1 - sum(corpus[batch].sum() for batch in batches) / cells

    dynamic = list(DynamicBatchSampler(corpus, max_padded=262_144, buckets=16, shuffle=True))
    fixed = list(BatchSampler(len(corpus), round(len(corpus) / len(dynamic)), shuffle=True))
    assert padding(dynamic) <= padding(fixed) / 3


def test_batches_of_a_step_are_of_one_bucket_where_they_can_be():
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    kind = partial(DynamicBatchSampler, lengths, max_padded=20_000, buckets=10, shuffle=True)
    steps = steps_of(every_rank(kind, 4))
    alike = [spread(lengths[batch].mean() for batch in step) < 0.3 for step in steps]
    assert sum(alike) > 0.9 * len(steps)


def test_a_handful_of_samples_is_not_thrown_away():
    """They cannot be of like cost; that is no reason to leave most of them out."""
    first, second = every_rank(partial(DynamicBatchSampler, [1, 10, 100, 1000], max_total=1000), 2)
    assert (list(first), list(second)) == ([[1], [3]], [[0], [2]]) or first.dropped <= 2
    assert len(list(first)) == len(list(second)) >= 1
    nothing = every_rank(partial(DynamicBatchSampler, [1, 2], max_total=9), 3)
    assert [list(sampler) for sampler in nothing] == [[], [], []]
    assert nothing[0].dropped == 2


def test_infinite_lengths_with_ranks(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW", 500)

    def lengths():
        rng = np.random.default_rng(3)
        while True:
            yield int(rng.integers(1, 50))

    known = list(islice(lengths(), 5000))
    ranks = [
        DynamicBatchSampler(lengths(), max_total=200, rank=rank, world_size=3) for rank in range(3)
    ]
    steps = list(zip(*(islice(sampler, 100) for sampler in ranks), strict=True))
    taken = flat(flat(steps))
    assert len(taken) == len(set(taken))
    spreads = [spread(cost_of(b, known, "max_total") for b in step) for step in steps]
    assert np.mean(spreads) <= 0.05  # at the end of each window some are more
    late = max(taken) // 500 * 500  # all that was dealt out by then, save for the odd ones
    assert len(set(range(late)) - set(taken)) <= 0.02 * late


# --- cost --------------------------------------------------------------------------------------


def test_quadratic_cost():
    lengths = [1, 2, 3, 4, 1, 1, 1]

    def square(n: int) -> int:
        return n * n

    assert list(DynamicBatchSampler(lengths, max_total=16, cost=square)) == [
        [0, 1, 2],
        [3],
        [4, 5, 6],
    ]
    assert list(DynamicBatchSampler(lengths, max_padded=18, cost=square)) == [
        [0, 1],
        [2],
        [3],
        [4, 5, 6],
    ]


def test_cost_is_asked_for_once_a_length_and_as_a_number():
    asked = []

    def cost(length):
        asked.append(length)
        return 1 if length < 2.5 else 2  # would fail for an array

    lengths = np.array([1, 2, 3, 3, 2, 1] * 10, dtype=np.float32)
    assert len(DynamicBatchSampler(lengths, max_total=4, cost=cost)) == 20
    assert asked == [1.0, 2.0, 3.0]
    assert {type(length) for length in asked} == {float}


@pytest.mark.parametrize("kind", [list, np.array, Lazily, iter])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, r"cost must give a finite number of at least 0, but for the length 7 it gave -1"),
        (float("nan"), "for the length 7 it gave nan"),
        (float("inf"), "for the length 7 it gave inf"),
        (None, "for the length 7 it gave None"),
        (True, "for the length 7 it gave True"),
        ("5", "for the length 7 it gave '5'"),
        (np.ones(2), r"for the length 7 it gave array"),
        (50, r"lengths\[1\] is 7 and costs 50, but must be at least 0 and at most max_total=9"),
    ],
)
def test_impossible_costs(kind, value, message):
    sampler = partial(DynamicBatchSampler, max_total=9, cost=lambda n: value if n == 7 else n)
    with pytest.raises(ValueError, match=message):
        list(sampler(kind([3, 7, 5])))


def test_cost_is_not_asked_about_impossible_lengths():
    with pytest.raises(ValueError, match=r"lengths\[1\] is -4, but must be at least 0"):
        DynamicBatchSampler([4, -4], max_total=9, cost=lambda n: n**0.5)
    with pytest.raises(TypeError, match="cost must be callable or None, got 2"):
        DynamicBatchSampler([4], max_total=9, cost=2)


@pytest.mark.parametrize("number", [np.float32, np.int16, float])
def test_costs_may_be_of_any_kind_of_number(number):
    sampler = DynamicBatchSampler([1, 2, 3], max_total=6, cost=lambda n: number(2 * n))
    assert list(sampler) == [[0, 1], [2]]


# --- as in a training run ----------------------------------------------------------------------


def test_samplers_of_torch():
    torch = require("torch")
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    data = range(10)
    sequential = BatchSampler(SequentialSampler(data), 4)
    assert list(sequential) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(sequential) == 3
    ranks = every_rank(partial(BatchSampler, SequentialSampler(data), 4), 2)
    assert [list(sampler) for sampler in ranks] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]]

    def draw():
        return RandomSampler(data, generator=torch.Generator().manual_seed(1))

    expected = list(draw())
    lived = BatchSampler(draw(), 4)
    iterator = iter(lived)
    assert next(iterator) == expected[:4]
    resumed = BatchSampler(draw(), 4)
    resumed.load_state_dict(lived.state_dict())
    assert flat(resumed) == expected[4:] == flat(iterator)

    shares = [DistributedSampler(data, num_replicas=2, rank=rank) for rank in range(2)]
    first, second = (BatchSampler(share, 2) for share in shares)
    for sampler in (first, second):
        sampler.set_epoch(5)
    assert [share.epoch for share in shares] == [5, 5]
    assert sorted(flat(first) + flat(second)) == list(data)
    begun = iter(first)
    next(begun)
    resumed = BatchSampler(DistributedSampler(data, num_replicas=2, rank=0), 2)
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == list(begun)
