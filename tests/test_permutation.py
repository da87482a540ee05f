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

from minloader import BatchSampler, Loader

HUGE = 10**10


def order_of(n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return the order of an epoch; of a huge one a part of it."""
    sampler = BatchSampler(n, None, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    if n < HUGE:
        return np.fromiter(sampler, np.int64, n)
    sampler.load_state_dict(sampler.state_dict() | {"yielded": n // 3})
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

    tracemalloc.start()
    try:
        lived = make()
        first = next(iter(lived))
        state = lived.state_dict() | {"yielded": len(lived) // 2}
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        middle = list(islice(resumed, 600))  # the chunks of 600 steps, each of 256 indices
        resumed.load_state_dict(state | {"yielded": len(lived) - 2})
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
    again.load_state_dict(state | {"yielded": len(lived) // 2 + 599})
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
    ("n", "orders"),
    [
        (1500, 100),
        pytest.param(100, 2000, marks=pytest.mark.slow),
        pytest.param(1024, 2000, marks=pytest.mark.slow),
        pytest.param(10_007, 300, marks=pytest.mark.slow),
        pytest.param(HUGE, 300, marks=pytest.mark.slow),
    ],
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


@pytest.mark.parametrize(
    ("n", "each"), [(3, 40), *[pytest.param(n, 50, marks=pytest.mark.slow) for n in (4, 5)]]
)
def test_all_orders_of_a_few_are_equally_frequent(n, each):
    every = list(permutations(range(n)))
    seeds = range(each * len(every))
    counts = Counter(tuple(order_of(n, seed % 7, seed // 7).tolist()) for seed in seeds)
    chi_square = sum((counts[order] - each) ** 2 / each for order in every)
    freedom = len(every) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order_of(2000, seed, epoch) for seed in range(5) for epoch in range(5)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(2000)


# --- states of version 1 had another order -------------------------------------------------------


def former_order(n: int, seed: int, epoch: int) -> list[int]:
    """Return the order as the version before computed it, and kept it in memory."""
    entropy = np.random.SeedSequence([seed, epoch])
    return np.random.default_rng(entropy).permutation(n).tolist()  # type: ignore[no-any-return]


SAVED: dict[str, Any] = {  # by that version
    "sampler": "BatchSampler",
    "version": 1,
    "world_size": 2,
    "seed": 5,
    "n_or_sampler": "int",
    "n": 50,
    "batch_size": 4,
    "shuffle": True,
    "last_batch": "rollover",
    "epoch": 3,
    "yielded": 2,
}


def test_a_run_that_began_with_the_former_order_keeps_it():
    orders = [index for epoch in range(7) for index in former_order(50, 5, epoch)]
    steps = [orders[i : i + 8] for i in range(0, len(orders), 8)]  # rollover: epochs end to end
    first = 3 * 50 // 8  # steps of the epochs before
    state, given = SAVED, []
    for _ in range(20):  # saved again after each step
        sampler = BatchSampler(50, 4, True, "rollover", seed=5, rank=1, world_size=2)
        sampler.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(sampler)
        batch = next(batches, None)
        if batch is None:
            sampler.set_epoch(sampler.epoch + 1)
            batch = next(iter(sampler))
        given.append(batch)
        state = sampler.state_dict()
        assert (state["version"], state["order"]) == (2, "stored")
    assert given == [step[1::2] for step in steps[first + 2 : first + 22]]


def test_former_states_of_an_inner_sampler_and_in_order():
    letters = [chr(number) for number in range(65, 115)]
    nested = SAVED | {"n_or_sampler": "sampler", "last_batch": "keep", "world_size": 1}
    nested |= {"left": [], "ended": False, "inner": None}
    sampler = BatchSampler(letters, 4, True, seed=5)
    sampler.load_state_dict(nested)
    expected = [letters[place] for place in former_order(50, 5, 3)]
    assert [letter for batch in sampler for letter in batch] == expected[8:]
    in_order = SAVED | {"shuffle": False, "last_batch": "keep", "world_size": 1}
    sampler = BatchSampler(50, 4, seed=5)
    sampler.load_state_dict(in_order)
    assert next(iter(sampler)) == [8, 9, 10, 11]


def test_a_loader_goes_on_in_the_former_order():
    def make() -> Loader:
        return Loader(range(50), batch_size=4, shuffle=True, seed=5, num_workers=0)

    inner = SAVED | {"last_batch": "keep", "world_size": 1, "yielded": 0}
    with make() as loader:
        state = loader.state_dict() | {"version": 1, "epoch": 3, "batches": 2, "check": None}
        state["sampler"] = {"at": 0, "state": inner}
        loader.load_state_dict(json.loads(json.dumps(state)))
        expected = former_order(50, 5, 3)
        assert np.concatenate(list(loader)).tolist() == expected[8:]
        following = loader.state_dict()
        assert np.concatenate(list(loader)).tolist() == former_order(50, 5, 4)
    with make() as loader:
        loader.load_state_dict(following)
        assert np.concatenate(list(loader)).tolist() == former_order(50, 5, 4)


def test_an_order_of_a_later_version_is_refused():
    sampler = BatchSampler(50, 4, shuffle=True)
    with pytest.raises(ValueError, match="order must be 'computed' or 'stored', got 'dreamt'"):
        sampler.load_state_dict(sampler.state_dict() | {"order": "dreamt"})
    assert sampler.state_dict()["order"] == "computed"
