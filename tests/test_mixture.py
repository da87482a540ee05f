"""Mixtures: the shares held, nothing lost, every state goes on exactly, also under a budget."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from conftest import flat, outcomes
from helpers import Lazily, Stateful
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import Raising, every_rank

from minloader import (
    BatchSampler,
    Concatenated,
    Loader,
    concurrent,
)
from minloader import MixtureSampler as Mixture

invariant = settings(deadline=None, max_examples=25)  # a busy machine is no failure
STOPS = ["first", "last", "never"]


class Sized:
    """A dataset that must not be read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the parent reads no samples")


def first(n: int, batches: Iterable[Any]) -> list[Any]:
    return list(islice(batches, n))


def stored(state: Any) -> Any:
    """A state as it comes back from a file, which it does not fill."""
    text = json.dumps(state)
    assert len(text) < 2000
    return json.loads(text)


# --- shares --------------------------------------------------------------------------------------


def test_the_parts_take_turns():
    mixture = Mixture([100, 50, 10], [0.6, 0.3, 0.1])
    assert first(10, mixture) == [
        *((0, 0), (0, 1), (1, 0), (0, 2), (0, 3)),
        *((1, 1), (0, 4), (1, 2), (0, 5), (2, 0)),
    ]
    assert first(6, Mixture([9, 9], [1, 1], 2)) == [[(0, n), (1, n)] for n in range(6)]


numbers = st.one_of(
    st.integers(0, 20), st.floats(0, 1), st.sampled_from([1e-300, 1e-18, 1e18, 1e300])
)
weightings = st.lists(numbers, min_size=1, max_size=9).filter(any)


@invariant
@given(weights=weightings)
@example([1, 32, 22, 22, 5, 1, 1, 5])  # too much for always drawing what is furthest behind
def test_every_part_is_within_one_of_its_share(weights):
    """After any number of draws."""
    mixture = Mixture([10**9] * len(weights), weights)
    total = sum(map(Fraction, weights))
    drawn = [0] * len(weights)
    for draws, (part, index) in enumerate(islice(mixture, 100), 1):
        assert index == drawn[part]
        drawn[part] += 1
        for taken, weight in zip(drawn, weights, strict=True):
            # Not by more than what 100 weights of 53 bits are rounded by.
            assert abs(taken - draws * Fraction(weight) / total) < 1 + Fraction(1, 10**12)
            assert weight or not taken


@invariant
@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), size=st.integers(1, 9))
def test_every_rank_has_its_shares(weights, size):
    for mixture in every_rank(partial(Mixture, [10**9] * len(weights), weights, size), 4):
        drawn = Counter(part for part, _ in flat(islice(mixture, 12)))
        for part, weight in enumerate(weights):
            share = 12 * size * weight / sum(weights)
            assert abs(drawn[part] - share) < 2 * 12  # each batch is within 2


def test_only_ratios_of_weights_count():
    expected = first(50, Mixture([99, 99], [0.75, 0.25]))
    for weights in ([3, 1], (1.5, 0.5), np.float32([6, 2]), [Fraction(3), Fraction(1)]):
        assert first(50, Mixture([99, 99], weights)) == expected


def test_weights_by_a_schedule():
    """By the step, which is a batch of all ranks; and by the epoch."""

    def weights(epoch: int, step: int) -> list[float]:
        return [1, 0, epoch] if step < 3 else [0, 1, 0]

    drawn = [[part for part, _ in batch] for batch in islice(Mixture([99] * 3, weights, 2), 5)]
    assert drawn == [[0, 0]] * 3 + [[1, 1]] * 2
    for mixture in every_rank(partial(Mixture, [99] * 3, weights, 2), 2, epoch=1):
        drawn = [sorted(part for part, _ in batch) for batch in islice(mixture, 5)]
        assert drawn == [[0, 2]] * 3 + [[1, 1]] * 2


def test_what_is_due_stays_due_when_weights_change():
    mixture = Mixture([99, 99], lambda epoch, step: [9, 1] if step < 4 else [1, 1])
    drawn = [part for part, _ in islice(mixture, 20)]
    assert drawn[:4] == [0, 0, 0, 0]
    assert drawn.count(1) == round(4 * 0.1 + 16 * 0.5)


# --- the end, and beginning anew -----------------------------------------------------------------


@invariant
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    batch_size=st.none() | st.integers(1, 5),
    shuffle=st.booleans(),
    world_size=st.integers(1, 4),
)
def test_until_the_last_part_every_item_comes_once(sizes, weights, batch_size, shuffle, world_size):
    weights = weights[: len(sizes)]
    options = {"stop": "last", "shuffle": shuffle}
    ranks = every_rank(partial(Mixture, sizes, weights, batch_size, **options), world_size)
    steps = list(zip(*ranks, strict=True))
    if batch_size is not None:
        sizes_of = [[len(batch) for batch in step] for step in steps]
        assert all(step == [batch_size] * world_size for step in sizes_of[:-1])
        assert all(max(step) - min(step) <= 1 and min(step) for step in sizes_of)
        steps = [flat(step) for step in steps]
    items = flat(steps)
    (dropped,) = {mixture.dropped for mixture in ranks}
    assert dropped < world_size
    assert len(items) == len(set(items)) == sum(sizes) - dropped
    assert set(items) <= {(part, n) for part, size in enumerate(sizes) for n in range(size)}
    if not shuffle:  # each part in its order
        for part in range(len(sizes)):
            own = [index for number, index in items if number == part]
            assert own == list(range(len(own)))


def test_until_the_first_part():
    assert list(Mixture([3, 100], [1, 1])) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert list(Mixture([3, 100], [1, 1], 4)) == [
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [(0, 2), (1, 2)],
    ]
    iterator = iter(Mixture([1, 5], [1, 1]))
    assert [*iterator, *iterator] == [(0, 0), (1, 0)]  # over is over


def test_shares_of_those_that_go_on():
    drawn = [part for part, _ in islice(Mixture([2, 99, 99], [4, 2, 1], stop="last"), 40)]
    assert drawn[:3] == [0, 0, 1]
    # The next draw finds that part 0 has ended. From there the others count anew.
    assert drawn[3:] == [1 + part for part, _ in islice(Mixture([99, 99], [2, 1]), 37)]


def test_never_begins_parts_anew_in_another_order():
    mixture = Mixture([4, 7], [1, 1], stop="never", shuffle=True)
    drawn = first(140, mixture)
    own = [index for part, index in drawn if part == 0]
    passes = [tuple(own[n : n + 4]) for n in range(0, 68, 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in passes)
    assert len(set(passes)) > 5
    mixture.set_epoch(1)
    assert first(140, mixture) != drawn
    mixture.set_epoch(0)
    assert first(140, mixture) == drawn
    # Parts of the same length have different orders.
    pairs = first(20, Mixture([10, 10], [1, 1], shuffle=True))
    assert [index for part, index in pairs if part] != [n for part, n in pairs if not part]


def test_samplers_as_parts_are_told_their_epoch():
    """Another for each pass."""
    told = []

    class Told(Lazily):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    mixture = Mixture([Told("ab"), Told("cdefgh")], [1, 1], stop="never")
    mixture.set_epoch(3)
    assert first(6, mixture)[::2] == [(0, "a"), (0, "b"), (0, "a")]
    *before, again = told
    assert {*before} == {3} != {again}


def test_parts_of_every_kind():
    parts = [2, Sized(2), range(5, 7), Lazily([8, 9]), BatchSampler([3, 1], None), iter("xy")]
    parts += [np.int64(2), np.array(2)]
    drawn = list(Mixture(parts, [1] * 8, stop="last"))
    own = [[index for part, index in drawn if part == number] for number in range(8)]
    assert own == [[0, 1], [0, 1], [5, 6], [8, 9], [3, 1], ["x", "y"], [0, 1], [0, 1]]
    shuffled = [list(Mixture(sizes, [2, 1], shuffle=True)) for sizes in ([6, 3], np.array([6, 3]))]
    assert shuffled[0] == shuffled[1]


# --- parts that are unusual ----------------------------------------------------------------------


def test_weight_zero():
    """Such a part is neither read nor waited for, nor does its end matter."""
    for stop in STOPS:
        mixture = Mixture([3, Raising(0, ()), iter(())], [1, 0, 0], stop=stop)
        assert first(5, mixture)[:3] == [(0, 0), (0, 1), (0, 2)]
    limited = Mixture([3, 9], [1, 0], stop="last")
    assert len(limited) == 3
    assert list(limited) == [(0, 0), (0, 1), (0, 2)]
    assert list(Mixture([2, 1], [1, 1e-300], stop="last")) == [(0, 0), (0, 1), (1, 0)]


def test_empty_parts():
    assert list(Mixture([9, 0], [2, 1])) == [(0, 0), (0, 1)]
    assert list(Mixture([3, 0], [2, 1], stop="last")) == [(0, 0), (0, 1), (0, 2)]
    assert list(Mixture([0, Lazily(())], [2, 1], stop="last")) == []
    iterator = iter(Mixture([9, Lazily(())], [2, 1], stop="never"))
    assert first(2, iterator) == [(0, 0), (0, 1)]
    with pytest.raises(ValueError, match=r"parts\[1\] has no items, so it cannot be begun anew"):
        next(iterator)
    assert first(2, iterator) == [(0, 2), (0, 3)]


class Mounting:
    """It can be read from the third try on."""

    tries = 0

    def __iter__(self) -> Iterator[str]:
        self.tries += 1
        if self.tries < 3:
            raise OSError("not mounted")
        return iter("ab")


def test_a_part_that_cannot_be_begun_is_begun_at_its_next_turn():
    """Its error is the same each time, where it is to be drawn from without end."""
    iterator = iter(Mixture([9, Mounting()], [1, 1], stop="never"))
    found = list(map(str, outcomes(iterator, 8)))
    assert [each for each in found if not each.startswith("(0")] == [
        "not mounted",
        "not mounted",
        "(1, 'a')",
        "(1, 'b')",
    ]


def test_lazy_parts_of_unknown_length():
    """They are read no further than they are drawn from."""
    endless = (10 * n for n in count())
    assert first(4, Mixture([endless, Lazily([1, 2])], [1, 1], 1)) == [
        *([(0, 0)], [(1, 1)], [(0, 10)], [(1, 2)])
    ]
    assert next(endless) == 20
    assert len(list(Mixture([Lazily("abc"), Lazily("de")], [1, 1], stop="last"))) == 5


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([1], ValueError, r"weights\(0, 2\) must be 2 numbers, one for each part, got \[1\]"),
        ([1, -1], ValueError, r"weights\(0, 2\) must be finite numbers of at least 0"),
        ([0, 0], ValueError, r"weights\(0, 2\) must be .* not all of them 0"),
        (None, TypeError, r"weights\(0, 2\) must be one number for each part, got None"),
    ],
)
def test_a_schedule_of_impossible_weights(wrong, error, message):
    """It is an error each time. Nothing is drawn meanwhile."""
    given = {2: wrong}
    mixture = Mixture([9, 9], lambda epoch, step: given.get(step, [1, 1]))
    iterator = iter(mixture)
    assert first(2, iterator) == [(0, 0), (1, 0)]
    for _ in range(2):
        with pytest.raises(error, match=message):
            next(iterator)
    del given[2]
    assert first(2, iterator) == [(0, 1), (1, 1)]


# --- states --------------------------------------------------------------------------------------


def by_epoch(epoch: int, step: int) -> list[float]:
    return [5, 3 + epoch, 1 + step % 2]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (3, 4)])
def test_a_mixture_without_an_end_goes_on_at_every_batch(rank, world_size):
    """By a schedule; parts with a state and without any are begun anew."""

    def make() -> Any:
        parts = [30, Stateful(range(25)), Lazily(range(20))]
        ranks = {"rank": rank, "world_size": world_size}
        mixture = Mixture(parts, by_epoch, 3, stop="never", shuffle=True, **ranks)
        mixture.set_epoch(1)
        return mixture

    lived = make()
    states, given = [stored(lived.state_dict())], []
    for batch in islice(lived, 60):
        given.append(batch)
        states.append(stored(lived.state_dict()))
    for k, state in enumerate(states[:-1]):
        resumed = make()
        resumed.load_state_dict(state)
        assert first(20, resumed)[: 60 - k] == given[k : k + 20]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float16", "float32"])
def test_lengths_of_any_type_are_shares(dtype):
    lengths = [np.full(100, 120, dtype), np.full(100, 30, dtype)]
    mixture = Mixture([100, 100], [1, 1], stop="never", lengths=Concatenated(lengths))
    parts = Counter(part for part, _ in first(200, iter(mixture)))
    assert parts == {0: 40, 1: 160}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("a", TypeError, r"lengths must be one number for each item, got 'a' for \(0, 0\)"),
        (None, TypeError, r"got None for \(0, 0\)"),
        (np.ones(2), TypeError, r"got array\(\[1\., 1\.\]\) for \(0, 0\)"),
        (-1, ValueError, r"lengths\[\(0, 0\)\] is -1, but must be at least 0 and at most 1e\+200"),
        (float("inf"), ValueError, r"lengths\[\(0, 0\)\] is inf, but must be at least 0 and at"),
        (10**400, ValueError, "is inf, but must be at least 0"),
        (1e308, ValueError, r"lengths\[\(0, 0\)\] is 1e\+308, but must be at least 0"),
    ],
)
def test_impossible_lengths(wrong, error, message):
    """Of one item, which is left out."""
    lengths = {(0, 0): wrong, (0, 1): np.array(2.5), (0, 2): 1}
    iterator = iter(Mixture([3], [1], lengths=lengths))
    with pytest.raises(error, match=message):
        next(iterator)
    assert list(iterator) == [(0, 1), (0, 2)]


def test_lengths_may_be_tiny():
    mixture = Mixture([100, 100], [1, 1], stop="never", lengths=lambda item: 1e-9)
    assert Counter(part for part, _ in first(50, iter(mixture))) == {0: 25, 1: 25}


def test_other_weights_begin_with_an_epoch_or_by_a_schedule():
    lived = Mixture([9, 9], [1, 1])
    lived.set_epoch(5)
    beginning = lived.state_dict()
    first(4, lived)
    other = Mixture([9, 9], [3, 1])
    other.load_state_dict(beginning)
    assert other.epoch == 5
    assert [part for part, _ in islice(other, 4)].count(0) == 3
    later = Mixture([9, 9], lambda epoch, step: [1, 1] if (epoch, step) < (5, 4) else [0, 1])
    later.load_state_dict(lived.state_dict())
    assert first(3, later) == [(1, 2), (1, 3), (1, 4)]


# --- under a budget ------------------------------------------------------------------------------


def test_a_mixture_in_batches_of_its_own_kind():
    """Other samplers over a mixture, and mixtures of mixtures."""
    over = BatchSampler(Mixture([5, 5], [1, 1]), 4, last_batch="discard")
    assert list(over) == [[(n, k) for k in pair for n in (0, 1)] for pair in [(0, 1), (2, 3)]]
    inner = Mixture([2, 2], [1, 1])
    dataset = Concatenated([Concatenated(["ab", "cd"]), "ef"])
    assert "".join(dataset[item] for item in Mixture([inner, 2], [1, 1])) == "aecfb"
    assert "".join(dataset[item] for item in Mixture([inner, 2], [2, 1], stop="last")) == "acebdf"


# --- the dataset ---------------------------------------------------------------------------------


class Many:
    """Fetches many samples at once, and says how many."""

    def __getitem__(self, index: int) -> str:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[str]:
        return [f"{index} of {len(indices)}" for index in indices]


class Fewer(Many):
    """Loses a sample."""

    def __getitems__(self, indices: list[int]) -> list[str]:
        return super().__getitems__(indices[1:])


def test_several_datasets_as_one():
    dataset = Concatenated(["abc", {"x": "X"}, np.array(["d", "e"])])
    assert [dataset[0, 2], dataset[1, "x"], dataset[[2, 1]]] == ["c", "X", "e"]
    assert len(dataset) == 6
    letters = Concatenated(["abc", "", "de"])
    assert [letters[n] for n in range(-5, 5)] == list("abcdeabcde")
    assert letters[np.int64(3)] == "d"
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"index {index} is beyond the 5 samples of all"):
            letters[index]
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        letters["a"]
    batches = [[(0, 1), (2, 0), (2, 1)]]
    message = r"an item must be \(part, index\), or .*, got \[\(0, 1"
    with Loader(letters, batches, num_workers=0) as loader, pytest.raises(TypeError, match=message):
        list(loader)  # without a collate_fn
    for n in range(5):
        part = 0 if n < 3 else 2
        assert letters[n] == letters[part, n - (0, 3)[part // 2]]
    assert [letters[i] for i in Mixture([3, 0, 2], [1, 0, 1])] == [*"adbec"]


def test_datasets_without_a_length():
    dataset = Concatenated([Many(), "ab"])
    assert dataset[1, 0] == "a"
    for ask in (len, lambda dataset: dataset[3]):
        with pytest.raises(TypeError, match=r"'Many' has no len\(\)"):
            ask(dataset)


def test_samples_of_a_batch_are_fetched_at_once_where_that_can_be():
    items = [(0, 3), (1, 1), (0, 2), (1, 0)]
    with Loader(Concatenated([Many(), "ab"]), [items], num_workers=0, collate_fn=list) as loader:
        assert list(loader) == [["3 of 2", "b", "2 of 2", "a"]]
    fetch = Concatenated([Fewer(), "ab"]).__getitems__
    with pytest.raises(ValueError, match=r"__getitems__ must return .* returned 1 for 2 indices"):
        fetch([(0, 1), (1, 0), (0, 2)])
    # One by one where it cannot, so that the sample of an error is known.
    assert not hasattr(Concatenated(["ab", "c"]), "__getitems__")
    options = {"num_workers": 0, "collate_fn": list}
    with Loader(Concatenated(["ab", "c"]), [[(0, 1), (1, 5)]], **options) as loader:
        with pytest.raises(IndexError) as caught:
            list(loader)
        assert "(1, 5)" in str(caught.value.__notes__)


def test_impossible_datasets():
    with pytest.raises(ValueError, match="datasets must hold at least one dataset, got none"):
        Concatenated([])
    for named in ({"web": [1, 2], "code": [3]}, "web"):
        with pytest.raises(TypeError, match=r"datasets must be a list of datasets, got "):
            Concatenated(named)
    with pytest.raises(TypeError, match=r"datasets\[1\] must have __getitem__, got 3"):
        Concatenated(["ab", 3])
    with pytest.raises(TypeError, match=r"datasets\[0\] is concurrent; write concurrent\(Conc"):
        Concatenated([concurrent([1, 2])])
