"""The shuffled order of a ``BatchSampler``: as good as numpy's, of any length, at any place."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from itertools import islice, permutations
from typing import Any

import numpy as np
import pytest
from conftest import variants

from minloader import BatchSampler

HUGE = 10**10


def order_of(n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return the order of an epoch; of a huge one a part of it."""
    sampler = BatchSampler(n, None, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    if n < HUGE:
        return np.fromiter(sampler, np.int64, n)
    sampler.load_state_dict(
        sampler.state_dict() | {"source": [n // 3, None, False], "between": False}
    )
    return np.argsort(np.argsort(list(islice(sampler, 10_000))))  # as an order of so many


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 63, 64, 65, 999, 1000, 1001, 4095, 4097, 16_384, 16_385, 40_000, 65_537]
)
def test_every_index_comes_once(n):
    for seed in range(3):
        assert np.array_equal(np.sort(order_of(n, seed)), np.arange(n))


def test_ten_billion_take_no_memory():
    def make() -> BatchSampler:
        return BatchSampler(HUGE, 32, shuffle=True, rank=3, world_size=8)

    def at(steps: int) -> dict[str, Any]:
        numbers = {"batches": steps, "begun": steps}
        return {"source": [steps * 256, None, False], "between": False, **numbers}

    tracemalloc.start()
    try:
        lived = make()
        first = next(iter(lived))
        state = lived.state_dict() | at(len(lived) // 2)
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        middle = list(islice(resumed, 600))  # the chunks of 600 steps, each of 256 indices
        resumed.load_state_dict(state | at(len(lived) - 2))
        last = list(iter(resumed))  # list(resumed) makes room for all of len()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6
    assert [len(batch) for batch in last] == [32, 32]
    taken = [*first, *(index for batch in middle + last for index in batch)]
    assert len(set(taken)) == len(taken) == 32 * 603
    assert 0 <= min(taken) < HUGE / 1000
    assert HUGE * 0.999 < max(taken) < HUGE
    again = make()
    again.load_state_dict(state | at(len(lived) // 2 + 599))
    assert next(iter(again)) == middle[-1]


def scores(order: np.ndarray) -> dict[str, float]:
    """Return how many standard deviations each statistic is from its mean over all orders."""
    n, place = len(order), np.arange(len(order))
    found = {"position and value": np.corrcoef(place, order)[0, 1] * math.sqrt(n - 1)}
    side = math.isqrt(n - 1) + 1  # the network has so many rows: its weak spot, if it had one
    for lag in {1, 2, side - 1, side, side + 1, 2 * side}:
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        found[f"lag {lag}"] = correlation * math.sqrt(n - lag)
    rises = np.diff(order) > 0
    runs = 1 + np.count_nonzero(rises[1:] != rises[:-1])
    found["runs"] = (runs - (2 * n - 1) / 3) / math.sqrt((16 * n - 29) / 90)
    parts = 8
    eighth = order * parts // n
    pairs = {
        "position in eighths": (place * parts // n, eighth, (parts - 1) ** 2),
        "neighbours in eighths": (eighth[:-1], eighth[1:], parts**2 - 1),
        "differences": (np.diff(order) % n * 16 // n, np.zeros(n - 1, int), 15),
    }
    for name, (one, other, freedom) in pairs.items():
        counts = np.unique(one * parts + other, return_counts=True)[1]
        expected = len(one) / (64 if freedom > 15 else 16)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        found[name] = (chi_square - freedom) / math.sqrt(2 * freedom)
    steps = np.abs(np.diff(order))
    found["neighbours that follow"] = (np.count_nonzero(steps == 1) - 2) / math.sqrt(2)
    found["left where it was"] = np.count_nonzero(order == place) - 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "orders"), [(1500, 100), (100, 2000), (1024, 2000), (10_007, 300), (HUGE, 300)]
)
def test_the_order_is_as_random_as_that_of_numpy(n, orders):
    """Means and spreads of all statistics, over many seeds: nothing tells the two apart."""
    ours = [scores(order_of(n, seed=0, epoch=epoch)) for epoch in range(orders)]
    n = 10_000 if n == HUGE else n
    numpys = [scores(np.random.default_rng(seed).permutation(n)) for seed in range(orders)]
    for name in ours[0]:
        one, other = (np.array([found[name] for found in them]) for them in (ours, numpys))
        deviation = (one.mean() - other.mean()) / math.sqrt((one.var() + other.var()) / orders)
        assert abs(deviation) < 4, name
        assert 1 - 5 / math.sqrt(orders) < one.std() / other.std() < 1 + 5 / math.sqrt(orders), name


def deviation(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Return how many standard deviations chi-square is from its mean."""
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@variants(("n", "each"), [(2, 400), (3, 200), (4, 50), (5, 20), (6, 20)], quick=3)
def test_all_orders_of_a_few_are_equally_frequent(n, each):
    every = list(permutations(range(n)))
    seeds = range(each * len(every))
    counts = Counter(tuple(order_of(n, seed % 7, seed // 7).tolist()) for seed in seeds)
    found = np.array([counts[order] for order in every])
    assert abs(deviation(found, each, len(every) - 1)) < 4.5


def is_odd(order: list[int]) -> bool:
    """Return whether it takes an odd number of exchanges."""
    seen, cycles = [False] * len(order), 0
    for place in range(len(order)):
        cycles += not seen[place]
        while not seen[place]:
            seen[place] = True
            place = order[place]
    return (len(order) - cycles) % 2 == 1


SIZES = [2, 3, 4, 8, 9, 25, 49, 64, 81, 121, 1000, 1023, 1089, 1225]
"""Some of any kind: small ones, odd squares, and what fills its square or not."""


@variants("n", [*SIZES, *sorted({*range(2, 131)} - {*SIZES})], quick=len(SIZES))
def test_as_many_orders_are_odd_as_even(n):
    orders = 200 if n < 131 else 120
    odd = sum(is_odd(order_of(n, seed).tolist()) for seed in range(orders))
    assert abs(odd - orders / 2) < 4.5 * math.sqrt(orders) / 2


@variants("n", [8, 9, 25, 48, 121], quick=4)
def test_every_index_is_as_often_at_every_place_and_before_every_other(n):
    orders = np.array([order_of(n, seed) for seed in range(20 * n)])
    places = np.zeros((n, n))
    np.add.at(places, (np.arange(n), orders), 1)
    assert abs(deviation(places, 20, (n - 1) ** 2)) < 4.5
    pairs = np.zeros((n, n))
    np.add.at(pairs, (orders[:, :-1], orders[:, 1:]), 1)
    found = pairs[~np.eye(n, dtype=bool)]
    assert abs(deviation(found, 20 * (n - 1) / (n - 1), n * (n - 1) - 1)) < 6


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order_of(2000, seed, epoch) for seed in range(5) for epoch in range(5)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(2000)
