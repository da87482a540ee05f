"""What batches are made of, in one rank and in several: nothing lost, nothing repeated."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import pytest
from conftest import flat, require
from helpers import Lazily
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import every_rank

from minloader import (
    BatchSampler,
    BucketBatchSampler,
    DynamicBatchSampler,
    MixtureSampler,
    PackedBatchSampler,
)
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


def steps_of(ranks: list[Any]) -> list[tuple[Any, ...]]:
    """What all ranks take at once; fails if they have different numbers of batches."""
    return list(zip(*ranks, strict=True))


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


# --- DynamicBatchSampler -----------------------------------------------------------------------


def cost_of(batch: list[int], costs: Any, budget_name: str) -> float:
    values = [costs[index] or 1 for index in batch]  # what costs nothing counts as 1
    return sum(values) if budget_name == "max_total" else len(values) * max(values)


# Quarters add up exactly, so the budget can be compared without a tolerance.
some_lengths = st.one_of(
    st.lists(st.integers(0, 60), max_size=80),
    st.lists(st.integers(0, 240).map(lambda quarters: quarters / 4), max_size=80),
)
budgets = st.sampled_from(["max_total", "max_padded"])


@invariant
@given(
    lengths=some_lengths,
    kind=st.sampled_from([list, np.array, Lazily, iter]),
    budget_name=budgets,
    cost=st.sampled_from([None, lambda n: n * n, lambda n: 1 + n // 7]),
    slack=st.integers(0, 200) | st.integers(0, 5000),
    max_batch=st.none() | st.integers(1, 9),
    buckets=st.integers(1, 6),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    world_size=st.integers(1, 5),
    window=st.integers(6, 200),
)
def test_ranks_share_every_index_within_the_budget(
    lengths, kind, budget_name, cost, slack, max_batch, buckets, shuffle, epoch, world_size, window
):
    costs = lengths if cost is None else [cost(n) for n in lengths]
    budget = max([*costs, 1]) + slack
    options = {"max_batch": max_batch, "buckets": buckets, "shuffle": shuffle, "cost": cost}

    def make(**rank: int) -> DynamicBatchSampler:
        return DynamicBatchSampler(kind(lengths), **{budget_name: budget}, **options, **rank)

    ranks = every_rank(make, world_size, epoch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW", window)
        steps = steps_of(ranks)
    taken = flat(flat(steps))
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(range(len(lengths)))
    assert all(type(index) is int for index in taken)
    dropped = len(lengths) - len(taken)
    assert {sampler.dropped for sampler in ranks} == {dropped}
    for batch in flat(steps):
        assert 1 <= len(batch) <= (max_batch or len(lengths))
        assert cost_of(batch, costs, budget_name) <= budget
    if world_size == 1:
        assert dropped == 0
    if kind in (list, np.array):
        assert dropped < world_size
        assert {len(sampler) for sampler in ranks} == {len(steps)}
        firsts = [min(flat(step)) for step in steps]
        assert shuffle or world_size == 1 or firsts == sorted(firsts)


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
        assert cost_of(longer, lengths, budget_name) > budget or len(batch) == max_batch


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


def test_padding_is_a_third_of_that_of_fixed_batches():
    lengths = np.random.default_rng(0).lognormal(3, 1, 3000).astype(int) + 1

    def padding(batches: list[list[int]]) -> float:
        cells = sum(len(batch) * lengths[batch].max() for batch in batches)
        return 1 - float(lengths.sum() / cells)

    most = 8 * int(lengths.max())
    dynamic = list(DynamicBatchSampler(lengths, max_padded=most, buckets=16, shuffle=True))
    fixed = list(BatchSampler(3000, 3000 // len(dynamic), shuffle=True))
    assert padding(dynamic) <= padding(fixed) / 3


def test_buckets_leave_few_incomplete_batches_in_a_window(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW", 400)
    lengths = np.random.default_rng(0).integers(1, 50, 2000).tolist()
    for buckets in (1, 16):
        sampler = DynamicBatchSampler(
            lengths, max_total=250, buckets=buckets, sampler=range(2000), shuffle=True
        )
        assert len(list(sampler)) < 1.15 * sum(lengths) / 250


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


@pytest.mark.parametrize("number", [np.int64, np.float32, np.uint16, float])
def test_budgets_and_costs_may_be_of_any_kind_of_number(number):
    """``max_padded=8 * lengths.max()`` is how one writes it."""
    sampler = DynamicBatchSampler([1, 2, 3], max_total=number(6), cost=lambda n: number(2 * n))
    assert list(sampler) == [[0, 1], [2]]


def test_lengths_that_are_sized_but_no_sequence():
    lengths = {"a.wav": 2, "b.wav": 2, "c.wav": 2}
    assert list(DynamicBatchSampler(lengths.values(), max_total=4)) == [[0, 1], [2]]


# --- costs, and ranks whose batches cost alike ------------------------------------------------


def spread(costs: Iterable[float]) -> float:
    costs = list(costs)
    return (max(costs) - min(costs)) / max(costs) if max(costs) else 0.0


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


def test_batches_of_a_step_are_of_one_bucket_where_they_can_be():
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    kind = partial(DynamicBatchSampler, lengths, max_padded=20_000, buckets=10, shuffle=True)
    steps = steps_of(every_rank(kind, 4))
    alike = [spread(lengths[batch].mean() for batch in step) < 0.3 for step in steps]
    assert sum(alike) > 0.9 * len(steps)


SHAPES = {16: 8, 64: 4, 100: 1}


@invariant
@given(
    lengths=st.lists(st.integers(1, 100), max_size=120),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    lazy=st.booleans(),
)
def test_batches_of_a_bucket_and_of_a_step_have_one_shape(lengths, world_size, shuffle, lazy):
    def make(**ranks: int) -> Any:
        given = Lazily(lengths) if lazy else lengths
        return BucketBatchSampler(given, SHAPES, shuffle=shuffle, **ranks)

    samplers = every_rank(make, world_size)
    collate = samplers[0].collate(value=-1)
    got: list[int] = []
    for step in steps_of([epoch_of(sampler, 1) for sampler in samplers]):
        found = {collate([np.ones(lengths[n]) for n in batch]).values.shape for batch in step}
        (shape,) = found
        assert shape in {(size, length) for length, size in SHAPES.items()}
        got += [n for batch in step for n in batch]
    assert len(got) == len(set(got))
    assert len(lengths) - len(got) == samplers[0].dropped < world_size


def test_a_batch_of_no_bucket_is_told():
    collate = BucketBatchSampler([3, 3], {4: 3, 9: 1}).collate()
    message = "2 samples, of which sample has up to 5 entries, are no batch of shapes={4: 3, 9: 1}"
    with pytest.raises(ValueError, match=message):
        collate([np.ones(5), np.ones(3)])
    assert collate([np.ones(1)] * 2).values.shape == (2, 4)  # a sample was left out
    assert collate([np.ones(1)]).values.shape == (1, 9)


@pytest.mark.parametrize("budget", [{"max_padded": 90}, {"max_total": 90}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_largest_batches_come_before_the_epoch_and_again_in_it(budget, world_size):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200)

    def padded(batch: list[int]) -> int:
        return len(batch) * int(lengths[batch].max())

    samplers = every_rank(
        partial(DynamicBatchSampler, lengths, **budget, buckets=3, shuffle=True), world_size
    )
    for sampler in samplers:
        sampler.set_epoch(3)
        state = sampler.state_dict()
        found = sampler.largest(4)
        assert sampler.state_dict() == state
        assert [*map(padded, found)] == sorted(map(padded, sampler), reverse=True)[:4]
    assert samplers[0].largest() == samplers[0].largest(4)[:1]


def test_the_largest_batches_of_lengths_that_are_not_known_are_refused():
    sampler = DynamicBatchSampler(Lazily([3, 4]), 9)
    with pytest.raises(TypeError, match="largest is for lengths that are all known"):
        sampler.largest()
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        DynamicBatchSampler([3, 4], 9).largest(0)


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


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (BatchSampler(10, 2), ("BatchSampler(", "n=10,", "batch_size=2,", "last_batch='keep'")),
        (BatchSampler(list(range(9_999)), 2), ("sampler=[0, 1, 2, 3, 4, 5, ...], n=9999",)),
        (BatchSampler(iter([[1]]), 2, world_size=4), ("sampler=<list_iter", "world_size=4")),
        (BatchSampler(BatchSampler(9, 3), 2), ("sampler=<BatchSampler",)),
        (DynamicBatchSampler([1] * 9_999, 100), ("DynamicBatchSampler(max_total=100", "n=9999")),
        (PackedBatchSampler([1] * 9_999, 100, 2), ("PackedBatchSampler(capacity=100, rows=2",)),
        (
            MixtureSampler([4] * 99, [1] * 99, 2),
            ("MixtureSampler(", "parts=[4, 4, 4, 4, 4, 4, ...]"),
        ),
    ],
)
def test_a_sampler_says_briefly_how_it_was_made(sampler, said):
    text = repr(sampler)
    assert all(part in text for part in said)
    assert text.startswith("<")
    assert len(text) < 250
