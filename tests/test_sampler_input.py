"""What samplers are given: arguments, lengths, sources and states, good and bad, in tables."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import pytest
from conftest import flat, outcomes, plain, require
from helpers import Lazily, SelfIterating, Stateful
from our_samplers import FEW, GIVEN

from minloader import (
    BatchSampler,
    Concatenated,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    PackedBatchSampler,
    shuffled,
    sliced,
)
from minloader._sampling import windows

PLANNED: dict[str, Callable[..., Any]] = {
    "dynamic": partial(DynamicBatchSampler, max_total=5),
    "packed": partial(PackedBatchSampler, capacity=5),
}
"""The samplers of lengths that have a budget."""


class Indexed:
    """It can be iterated by its indices, but has no ``__iter__``, as a map-style dataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return [7, 8, 9, 10][index]


every_kind = pytest.mark.parametrize("kind", GIVEN)
planned = pytest.mark.parametrize("kind", PLANNED)
lengths_as = pytest.mark.parametrize("wrap", [list, np.array, Lazily, iter])


def make(kind: str, **changed: Any) -> Any:
    """Return a sampler with some other arguments."""
    cls, arguments = GIVEN[kind]
    return cls(**arguments | changed)


# --- arguments


@pytest.mark.parametrize(
    ("kind", "changed", "error", "message"),
    [
        ("batch", {"n_or_sampler": -1}, ValueError, "n_or_sampler must be at least 0"),
        ("batch", {"n_or_sampler": 2**63}, ValueError, "n_or_sampler must be at most"),
        ("batch", {"n_or_sampler": 2.5}, TypeError, "n_or_sampler must be an int"),
        ("batch", {"n_or_sampler": None}, TypeError, "n_or_sampler must be an int"),
        ("batch", {"n_or_sampler": True}, TypeError, "n_or_sampler must be an int"),
        ("batch", {"n_or_sampler": np.array(2.5)}, TypeError, "n_or_sampler must be an int"),
        ("batch", {"n_or_sampler": Indexed()}, TypeError, "n_or_sampler must have __iter__, or be"),
        ("batch", {"n_or_sampler": "a.txt"}, TypeError, "n_or_sampler must be .* string 'a.txt'"),
        ("batch", {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ("batch", {"batch_size": 2.0}, TypeError, "batch_size must be an int"),
        ("batch", {"last_batch": "drop"}, ValueError, "last_batch must be .*'drop'"),
        *(
            ("batch", {"batch_size": None, "last_batch": last}, ValueError, "needs a batch_size")
            for last in ("discard", "rollover")
        ),
        ("dynamic", {"max_total": None}, ValueError, "either max_total or max_padded"),
        ("dynamic", {"max_padded": 1}, ValueError, "either max_total or max_padded"),
        *(
            ("dynamic", {"max_total": wrong}, ValueError, "max_total must be a number above 0")
            for wrong in (0, math.nan, True, "9")
        ),
        ("dynamic", {"max_total": None, "max_padded": -3}, ValueError, "max_padded must be a num"),
        ("dynamic", {"max_total": -(10**400)}, ValueError, "max_total must be a number above 0"),
        ("dynamic", {"max_batch": 0}, ValueError, "max_batch must be at least 1"),
        ("dynamic", {"max_batch": 1.5}, TypeError, "max_batch must be an int"),
        ("dynamic", {"buckets": 0}, ValueError, "buckets must be at least 1"),
        ("dynamic", {"cost": 2}, TypeError, "cost must be callable or None, got 2"),
        ("dynamic", {"long": "split"}, ValueError, "long must be 'refuse' or 'drop', got 'split'"),
        ("packed", {"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ("packed", {"capacity": 2**80}, ValueError, f"capacity must be at most {2**62}, got"),
        (
            "packed",
            {"lengths": [2**63 + 5], "capacity": 2**45, "long": "split"},
            ValueError,
            r"lengths\[0\] is .*, but must be at least 0 and at most 4\.61.*e\+18 with capacity",
        ),
        ("packed", {"capacity": 4.0}, TypeError, r"capacity must be an int, got 4\.0"),
        ("packed", {"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ("packed", {"rows": "4"}, TypeError, "rows must be an int, got '4'"),
        ("packed", {"long": "cut"}, ValueError, "long must be 'refuse', 'drop' or 'split', got"),
        ("packed", {"window": 0}, ValueError, "window must be at least 1, got 0"),
        ("packed", {"window": 0.5}, TypeError, "window must be an int"),
        *(
            ("bucket", {"shapes": wrong}, TypeError, "shapes must be a dict of lengths and numbers")
            for wrong in ({}, None, [(2, 3)], 4)
        ),
        ("bucket", {"shapes": {4: 2.5}}, TypeError, r"shapes\[4\] must be an int, got 2\.5"),
        ("bucket", {"shapes": {4: 0}}, ValueError, r"shapes\[4\] must be at least 1, got 0"),
        ("bucket", {"shapes": {0: 4}}, ValueError, "a length of shapes must be at least 1, got 0"),
        ("bucket", {"shapes": {9: 4, "a": 4}}, TypeError, "a length of shapes must be an int, got"),
        (
            "bucket",
            {"shapes": {3: 4}},
            ValueError,
            r"lengths\[3\] is 4, but must be at least 0 and at most max\(shapes\)=3; raise max",
        ),
        *(
            row
            for kind in ("bucket", *PLANNED)
            for row in (
                (kind, {"lengths": 5}, TypeError, "lengths must be an iterable of numbers, got 5"),
                (kind, {"lengths": np.array(5)}, TypeError, "lengths must be an iterable of num"),
                (kind, {"lengths": {1: 120}}, TypeError, "lengths is a mapping"),
                (kind, {"sampler": 3}, TypeError, "sampler must be iterable or None, got 3"),
                (kind, {"sampler": len}, TypeError, "sampler must be iterable or None, got <built"),
                (kind, {"lengths": iter([1]), "sampler": [0]}, TypeError, "must have __getitem__"),
                (kind, {"sampler": Indexed()}, TypeError, "sampler must have __iter__, or be a"),
            )
        ),
        ("mixture", {"parts": 3}, TypeError, "parts must be a list of parts, got 3"),
        ("mixture", {"parts": {0: 9, 1: 9}}, TypeError, "parts must be a list of parts, got {0: 9"),
        ("mixture", {"parts": []}, ValueError, "parts must be at least one, got none"),
        ("mixture", {"parts": [3, -1]}, ValueError, r"parts\[1\] must be at least 0, got -1"),
        ("mixture", {"parts": [3, 2.5]}, TypeError, r"parts\[1\] must be an int, got 2\.5"),
        ("mixture", {"parts": [3, len]}, TypeError, r"parts\[1\] must be an int, got <built-in"),
        ("mixture", {"parts": [3, None]}, TypeError, r"parts\[1\] must be an int, got None"),
        ("mixture", {"parts": [[1, 2], 3]}, TypeError, r"parts\[0\] is a list, which may be .* Ba"),
        ("mixture", {"parts": [3, np.arange(3)]}, TypeError, r"parts\[1\] is a ndarray, which may"),
        ("mixture", {"weights": [1]}, ValueError, r"weights must be 2 numbers, one for each part"),
        ("mixture", {"weights": [1, -0.5]}, ValueError, r"weights must be .* at least 0.* -0\.5\]"),
        ("mixture", {"weights": [1, math.nan]}, ValueError, r"weights must be finite.* \[1, nan\]"),
        ("mixture", {"weights": [1, math.inf]}, ValueError, r"weights must be finite.* \[1, inf\]"),
        ("mixture", {"weights": [0, 0.0]}, ValueError, r"not all of them 0, got \[0, 0\.0\]"),
        ("mixture", {"weights": [1, 10**400]}, ValueError, r"weights must be finite"),
        *(
            ("mixture", {"weights": wrong}, TypeError, "weights must be one number for each part")
            for wrong in (["1", 2], 1, None, {0: 0.9, 1: 0.1})
        ),
        ("mixture", {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ("mixture", {"stop": "all"}, ValueError, "stop must be 'first', 'last' or 'never', got"),
        ("mixture", {"lengths": 5}, TypeError, "lengths must have __getitem__ or be a function"),
    ],
)
def test_impossible_arguments(kind, changed, error, message):
    with pytest.raises(error, match=message):
        make(kind, **changed)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (-1, ValueError, "n_or_sampler must be at least 0, got -1"),
        ([5], TypeError, r"n_or_sampler must be an int, got \[5\]"),
    ],
)
def test_impossible_numbers_are_told_when_they_are_asked(number, error, message):
    sampler = BatchSampler(lambda: number, 3)
    for ask in len, iter:
        with pytest.raises(error, match=message):
            ask(sampler)
    with Loader(repr, sampler, num_workers=0) as loader, pytest.raises(error, match=message):
        list(loader.epochs(1))


@every_kind
def test_impossible_seeds_ranks_epochs_and_flags(kind):
    for changed, error, message in (
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": None}, TypeError, "seed must be an int"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"rank": -1, "world_size": 2}, ValueError, "rank must be at least 0, got -1"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"rank": 0.5, "world_size": 2}, TypeError, r"rank must be an int, got 0\.5"),
        ({"shuffle": "no"}, TypeError, "shuffle must be True or False"),
    ):
        with pytest.raises(error, match=message):
            make(kind, **changed)
    flag = {"shuffle": np.True_}
    assert make(kind, **flag).shuffle is True
    sampler = make(kind, rank=np.int64(1), world_size=np.uint8(3), seed=np.uint8(1))
    assert (sampler.rank, sampler.world_size) == (1, 3)
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        sampler.set_epoch(-1)
    with pytest.raises(TypeError, match="epoch must be an int"):
        sampler.set_epoch("1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sliced(5), "dataset must have __getitem__"),
        (lambda: shuffled(None, 5), "stream must be"),
        *(
            (partial(Loader, [1], in_order=value), "in_order must be True or False")
            for value in (None, 5, 0.5, [], [1], object(), np.arange(3))
        ),
        (partial(Loader, [1], on_error=ValueError), "on_error must be 'raise'"),
    ],
)
def test_arguments_that_mean_something_else_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# --- lengths


BUCKETS = partial(DynamicBatchSampler, max_padded=10, buckets=2)
SPLIT = partial(PackedBatchSampler, capacity=5, long="split")


def costing(value: Any) -> Any:
    """A sampler in which a sample of length 7 costs that, and each other its length."""
    return partial(DynamicBatchSampler, max_total=9, cost=lambda n: value if n == 7 else n)


@lengths_as
@pytest.mark.parametrize(
    ("sampler", "values", "error", "message"),
    [
        (BUCKETS, [1, 2, 3, 11, 2], ValueError, r"\[3\] is 11\b.* at most max_padded=10; raise"),
        (BUCKETS, [1, 99], ValueError, r"leave that sample out, or give long='drop'$"),
        (partial(SPLIT, long="refuse"), [9], ValueError, "or give long='drop' or long='split'$"),
        (BUCKETS, [1, -1], ValueError, r"at most max_padded=10; leave that sample out$"),
        (BUCKETS, [1, 2.5, math.nan], ValueError, r"lengths\[2\] is nan"),
        (BUCKETS, [1.0, math.inf], ValueError, r"lengths\[1\] is inf"),
        (BUCKETS, [1, -1], ValueError, r"lengths\[1\] is -1\b.*at least 0"),
        *(
            (BUCKETS, values, TypeError, "one number for each sample")
            for values in (
                ["1", "2"],
                [None],
                [[1, 2], [3, 4]],
                [True],
                [1j],
                [np.timedelta64(1, "s")],
            )
        ),
        (
            partial(SPLIT, long="refuse"),
            [1, 9],
            ValueError,
            r"\[1\] is 9, .* capacity=5; raise",
        ),
        (SPLIT, [1, 9, -3], ValueError, r"lengths\[2\] is -3, but must be at least 0 and at most"),
        *(
            (SPLIT, values, TypeError, "lengths must be one int for each sample, got")
            for values in ([1, 2.0], ["1"], [True], [[1, 2]])
        ),
        *(
            (costing(value), [3, 7, 5], ValueError, f"for the length 7 it gave {shown}")
            for value, shown in (
                (-1, "-1"),
                (math.nan, "nan"),
                (math.inf, "inf"),
                (10**400, "10000"),
                (None, "None"),
                (True, "True"),
                ("5", "'5'"),
                (np.ones(2), "array"),
            )
        ),
        (costing(-1), [7], ValueError, "cost must give a finite number of at least 0, but for"),
        (costing(50), [3, 7], ValueError, r"lengths\[1\] is 7 and costs 50, but .* max_total=9"),
        # cost is not asked about what is no length
        (
            partial(DynamicBatchSampler, max_total=9, cost=math.sqrt),
            [4, -4],
            ValueError,
            r"lengths\[1\] is -4, but must be at least 0",
        ),
    ],
)
def test_impossible_lengths(wrap, sampler, values, error, message):
    with pytest.raises(error, match=message):
        list(sampler(wrap(values)))


@planned
@lengths_as
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"world_size": 2}])
def test_no_lengths_and_a_single_one(kind, wrap, options):
    ranks = options.get("world_size", 1)
    nothing, alone = (PLANNED[kind](wrap(values), **options) for values in ([], [1]))
    assert (list(nothing), nothing.dropped) == ([], 0)
    assert len(list(alone)) == 2 - ranks
    assert alone.dropped == ranks - 1


@planned
@pytest.mark.parametrize("wrap", [list, Lazily])
def test_a_sample_of_no_length_counts_as_one(kind, wrap):
    assert max(map(len, PLANNED[kind](wrap([0] * 1000)))) == 5
    if kind == "packed":
        assert [len(batch) for batch in PLANNED[kind](wrap([0] * 12), rows=2)] == [10, 2]
        return
    for options in ({"max_padded": 10}, {"max_total": 10, "cost": lambda n: 0}):
        assert max(map(len, DynamicBatchSampler(wrap([0.0] * 40), **options))) == 10


@pytest.mark.parametrize("dtype", ["u1", "i2", "i8", "u8", "f2", "f4", "f8"])
def test_small_dtypes_do_not_overflow(dtype):
    lengths = np.full(1000, 100, dtype=dtype)
    assert [len(batch) for batch in DynamicBatchSampler(lengths, max_total=70_000)] == [700, 300]
    if dtype[0] != "f":
        assert [len(batch) for batch in PackedBatchSampler(lengths, 70_000)] == [700, 300]
        pieces = PackedBatchSampler(lengths[:1], 60, long="split")
        assert list(pieces) == [[(0, 0, 60)], [(0, 60, 100)]]


# --- sources


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("n_or_sampler", lambda: BatchSampler(iter(range(5)), 2)),
        ("lengths", lambda: DynamicBatchSampler(iter([2, 2, 2, 1]), max_total=4)),
        ("lengths", lambda: PackedBatchSampler(iter([2, 2, 2, 1]), 4)),
        ("sampler", lambda: DynamicBatchSampler([1, 2], max_total=4, sampler=iter([0, 1]))),
        ("sampler", lambda: PackedBatchSampler([1, 2], 4, sampler=iter([0, 1]))),
        (r"parts\[0\]", lambda: MixtureSampler([iter(range(2)), 9], [1, 1], 2)),
    ],
)
def test_an_iterator_serves_one_epoch(name, sampler):
    """An empty second epoch would be a silent loss of everything."""
    made = sampler()
    assert len(flat(made)) >= 2
    with pytest.raises(RuntimeError, match=f"{name} is an iterator.* has served it"):
        list(made)


@pytest.mark.parametrize("labels", [[2, 0, 1], [7, 8, 9], ["a", "b", "c"]])
def test_a_series_of_pandas_is_read_in_its_order(labels):
    """Its ``__getitem__`` takes labels."""
    series = require("pandas").Series([30, 10, 20], index=labels)
    assert flat(BatchSampler(series, 2)) == [30, 10, 20]
    assert flat(BatchSampler(series, 2, shuffle=True)) == flat(BatchSampler([30, 10, 20], 2, True))
    assert flat(DynamicBatchSampler(lambda item: 1, 2, sampler=series)) == [30, 10, 20]


@planned
def test_the_items_of_a_sampler(kind):
    """Their lengths may be in a sequence or a mapping, or be worked out."""
    names = {"a": 3, "bb": 1, "c": 2, "dd": 5, "e": 4}
    expected = {"dynamic": [["a", "bb"], ["c"], ["dd"], ["e"]]}
    expected["packed"] = [["a", "c"], ["bb", "e"], ["dd"]]
    for lengths in (names, names.get, names.__getitem__):
        sampler = PLANNED[kind](lengths, sampler=names)
        assert list(sampler) == expected[kind]
    with pytest.raises(TypeError, match="number of batches is not known"):
        len(sampler)
    sampler = PLANNED[kind](np.array([9, 3, 2]), sampler=[2, 1, 2])
    assert sorted(flat(sampler)) == [1, 2, 2]


@planned
def test_items_whose_lengths_are_wrong(kind):
    iterator = iter(PLANNED[kind]({"a": 1, "b": 2}, sampler=[*"axb"]))
    with pytest.raises(KeyError) as caught:
        next(iterator)
    assert caught.value.__notes__ == ["minloader: when the length of 'x' was looked up"]
    assert list(iterator) == [["a", "b"]]
    for lengths, error, message in (
        ({"a": 1, "b": 9}, ValueError, r"lengths\['b'\] is 9, but must be at least 0 and at most"),
        ({"a": 1, "b": None}, TypeError, "lengths must be one .* got None for 'b'"),
        ({"a": 1, "b": [1, 2]}, TypeError, r"lengths must be one .* got \[1, 2\] for 'b'"),
    ):
        iterator = iter(PLANNED[kind](lengths, sampler=[*"ab"]))
        with pytest.raises(error, match=message):
            next(iterator)
        assert list(iterator) == [["a"]]


@planned
def test_lengths_of_mixed_types(kind):
    """As arrays they would be floats, or objects."""
    numbers = [np.uint64(2), np.int64(3), np.array(1)]
    assert sorted(flat(PLANNED[kind](numbers))) == [0, 1, 2]
    dropping = PLANNED[kind](iter([1, 2**70]), long="drop")
    assert (flat(dropping), dropping.dropped) == ([0], 1)


HUGE: dict[str, Any] = {
    "dynamic": partial(DynamicBatchSampler, max_total=9),
    "dynamic drop": partial(DynamicBatchSampler, max_total=9, long="drop"),
    "packed": partial(PackedBatchSampler, capacity=9),
    "packed drop": partial(PackedBatchSampler, capacity=9, long="drop"),
    "packed split": partial(PackedBatchSampler, capacity=9, long="split"),
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize(
    "length", [10**9, 2**63, 10**30, 10**400], ids=["1e9", "2**63", "1e30", "1e400"]
)
@pytest.mark.parametrize("wrap", [Lazily, list])
def test_a_huge_length_is_the_error_of_its_sample_alone(kind, length, wrap):
    lengths = [1, 2, length, 3]
    if wrap is list and "drop" not in kind:
        with pytest.raises(ValueError, match=r"lengths\[2\] is .*, but must be at least 0"):
            HUGE[kind](lengths)
        return
    sampler = HUGE[kind](wrap(lengths))
    found = outcomes(iter(sampler))
    if "drop" not in kind:
        error = found.pop(0)
        assert isinstance(error, ValueError)
        assert str(error).startswith("lengths[2] is ")
    (batch,) = found
    assert [getattr(item, "sample", item) for item in batch] == [0, 1, 3]
    assert sampler.dropped == ("drop" in kind)


def test_lengths_that_no_integer_of_numpy_holds():
    assert list(DynamicBatchSampler([10**30] * 5, 2.5e30)) == [[0, 1], [2, 3], [4]]
    assert list(DynamicBatchSampler([10**30] * 5, 10**400)) == [[0, 1, 2, 3, 4]]


@planned
def test_a_window_is_planned_by_itself(monkeypatch, kind):
    monkeypatch.setattr(windows, "WINDOW", 20)
    sampler = PLANNED[kind](lambda n: 1, sampler=range(40), shuffle=True, world_size=2)
    batches = list(sampler)
    half = len(batches) // 2
    assert [[n + 20 for n in batch] for batch in batches[:half]] != batches[half:]
    assert max(flat(batches[:half])) < 20 <= min(flat(batches[half:]))

    # It would begin anew if it were asked for an iterator at each window.
    own = PLANNED[kind](lambda n: 1, sampler=SelfIterating(range(60)))
    assert flat(islice(own, 12)) == list(range(60))


OVER: dict[str, Callable[[Any], Any]] = {
    "batch": lambda inner: BatchSampler(inner, 3),
    "dynamic": lambda inner: DynamicBatchSampler(lambda n: 1, max_total=3, sampler=inner),
    "packed": lambda inner: PackedBatchSampler(lambda n: 1, 3, sampler=inner),
    "mixture": lambda inner: MixtureSampler([inner, 10**9], [1, 1], 3),
}
"""Each kind of sampler over another one."""

over_another = pytest.mark.parametrize("kind", OVER)


def of_inner(kind: str, batches: Any) -> list[Any]:
    """The items that come from the sampler below."""
    return [item for item in flat(batches) if kind != "mixture" or item[0] == 0]


@over_another
def test_what_has_a_state_is_not_read_again(monkeypatch, kind):
    monkeypatch.setattr(windows, "WINDOW", 20)
    lived = OVER[kind](Stateful(range(1000)))
    iterator = iter(lived)
    deque(islice(iterator, 101), 0)
    state = plain(lived.state_dict())
    rest = list(iterator)
    needed = of_inner(kind, rest)
    assert len(needed) > 600
    for _ in range(2):  # the state serves again
        inner = Stateful(range(1000))
        resumed = OVER[kind](inner)
        resumed.load_state_dict(state)
        assert list(resumed) == rest
        assert inner.drawn - len(needed) < 20  # of the window


class Mounted:
    """Its items can be read only where it is mounted."""

    def __init__(self, mounted: bool) -> None:
        self.mounted = mounted

    def __iter__(self) -> Iterator[int]:
        if not self.mounted:
            raise OSError("not mounted")
        return iter(range(20))


@over_another
def test_what_cannot_be_begun_is_not_over_after_a_resume(kind):
    lived = OVER[kind](Mounted(False))
    with pytest.raises(OSError, match="not mounted"):
        next(iter(lived))
    state = plain(lived.state_dict())
    there, elsewhere = OVER[kind](Mounted(True)), OVER[kind](Mounted(False))
    for fresh in (there, elsewhere):
        fresh.load_state_dict(state)
    assert of_inner(kind, there) == of_inner(kind, OVER[kind](Mounted(True)))
    with pytest.raises(OSError, match="not mounted"):
        list(elsewhere)


class Empty(Iterator[Any]):
    """A function's StopIteration is an error of its own, and no end of the epoch."""

    def __next__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: DynamicBatchSampler(lambda item: next(Empty()), max_total=5, sampler=[0, 1]),
        lambda: PackedBatchSampler(lambda item: next(Empty()), 5, sampler=[0, 1]),
        lambda: DynamicBatchSampler(iter([1, 2]), max_total=5, cost=lambda n: next(Empty())),
        lambda: MixtureSampler([9], [1], 2, lengths=lambda item: next(Empty())),
        lambda: MixtureSampler([9], lambda epoch, step: next(Empty()), 2),
    ],
)
def test_no_function_ends_an_epoch_by_stop_iteration(sampler):
    iterator = iter(sampler())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(iterator)


def test_a_mixture_has_no_length_where_it_is_not_known_what_comes():
    for unknown in (
        MixtureSampler([9, 9], [1, 1]),
        MixtureSampler([9, 9], [1, 1], stop="never"),
        MixtureSampler([9, 9], lambda epoch, step: [1, 1], stop="last"),
        MixtureSampler([9, Lazily("ab")], [1, 1], stop="last"),
    ):
        with pytest.raises(TypeError):
            len(unknown)
        assert unknown  # or `sampler or another` would raise, too


# --- states


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("batch", {"n_or_sampler": 21}, "is 21, but the state is of n 20; give the dataset and"),
        ("batch", {"batch_size": 4}, "batch_size is 4, but the state is of batch_size 3"),
        ("batch", {"last_batch": "discard"}, "last_batch is 'discard', but the state is of last"),
        ("dynamic", {"lengths": FEW[::-1]}, "the lengths, or their costs, are not those"),
        ("dynamic", {"cost": lambda n: n + 1}, "the lengths, or their costs, are not those"),
        ("dynamic", {"lengths": Lazily(FEW)}, "is None, but the state is of n 20"),
        ("dynamic", {"sampler": range(20)}, "is None, but the state is of n 20"),
        (
            "dynamic",
            {"max_total": None, "max_padded": 7},
            "max_total is None and max_padded is 7.0, but the state is of max_total 7.0 and max_",
        ),
        ("dynamic", {"buckets": 2}, "buckets is 2, but the state is of buckets 1"),
        ("dynamic", {"max_batch": 2}, "max_batch is 2, but the state is of max_batch None"),
        ("packed", {"capacity": 5}, "capacity is 5, but the state is of capacity 4"),
        ("packed", {"rows": None}, "rows is None, but the state is of rows 2"),
        ("packed", {"long": "drop"}, "long is 'drop', but the state is of long 'refuse'"),
        ("packed", {"window": 9}, "window is 9, but the state is of window None"),
        ("mixture", {"parts": [9, 8]}, r"parts is \[9, 8\], but the state is of parts \[9, 9\]"),
        ("mixture", {"parts": [9, Lazily("ab")]}, r"parts is \[9, None\], but the state is of par"),
        ("mixture", {"batch_size": 2}, "batch_size is 2, but the state is of batch_size None"),
        ("mixture", {"stop": "last"}, "stop is 'last', but the state is of stop 'first'"),
        ("mixture", {"weights": [1, 3]}, r"weights of step 0 are \[1\.0, 3\.0\], but the state is"),
        *((kind, {"seed": 1}, "seed is 1, but the state is of seed 0") for kind in GIVEN),
        *((kind, {"shuffle": True}, "shuffle is True, but the state is") for kind in GIVEN),
    ],
)
def test_a_state_that_does_not_fit_is_refused(kind, changed, message):
    lived = make(kind)
    next(iter(lived))
    sampler = make(kind, **changed)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(plain(lived.state_dict()))
    assert sampler.state_dict() == before
    assert list(islice(sampler, 5)) == list(islice(make(kind, **changed), 5))


@every_kind
def test_what_is_no_state_is_refused(kind):
    sampler = make(kind)
    state = sampler.state_dict()
    other = make("packed" if kind == "batch" else "batch").state_dict()
    with pytest.raises(ValueError, match=r"the state is of a|but the state is of sampler"):
        sampler.load_state_dict(other)
    of_loader = Loader(range(4), sampler, num_workers=0).state_dict()
    with pytest.raises(ValueError, match=r"state of a Loader, not of a \w+Sampler; give it to"):
        sampler.load_state_dict(of_loader)
    for nonsense in (None, [1], "state", 3):
        with pytest.raises(TypeError, match="state must be a dict from state_dict"):
            sampler.load_state_dict(nonsense)
    for name in state:
        with pytest.raises(ValueError, match=f"no state of a .*: it has no '{name}'"):
            sampler.load_state_dict({key: state[key] for key in state if key != name})
    with pytest.raises(ValueError, match="version is 1, but the state is of version 3"):
        sampler.load_state_dict(state | {"version": 3})
    with pytest.raises(ValueError, match="batches must be at least 0"):
        sampler.load_state_dict(state | {"batches": -1})
    with pytest.raises(TypeError, match="epoch must be an int"):
        sampler.load_state_dict(state | {"epoch": "first"})
    for name in "world_size_history", "left", "source":
        for nonsense in (None, 5, "x", {"parts": [5]} if name == "left" else [5]):
            with pytest.raises(ValueError, match=rf"{name} must be|what was read of .* must be 3"):
                sampler.load_state_dict(state | {name: nonsense})
    history = [["x"] * len(sampler._dealt_by) + [1]]
    with pytest.raises(TypeError, match="world_size must be an int, got 'x'"):
        sampler.load_state_dict(state | {"world_size_history": history})
    with pytest.raises(TypeError, match="allow must be names of arguments, got 5"):
        sampler.load_state_dict(state, allow=5)
    assert sampler.state_dict() == state


def emptied(value: Any) -> None:
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            emptied(each)
    value.clear()


@every_kind
def test_a_state_is_the_callers_own(kind):
    """torch's distributed checkpoints read another state into that of a new sampler."""
    expected = json.dumps(make(kind).state_dict()), list(make(kind))
    sampler = make(kind)
    emptied(sampler.state_dict())
    assert (json.dumps(make(kind).state_dict()), list(make(kind))) == expected
    iterator = iter(sampler)
    first = next(iterator)
    emptied(sampler.state_dict())
    assert [first, *iterator] == expected[1]


@every_kind
def test_a_damaged_place_of_what_is_read_is_refused(kind):
    sampler = make(kind)
    state = sampler.state_dict()
    source = state["source"]
    place = source["parts"][1][1] if kind == "mixture" else source
    for wrong, error in ((-1, ValueError), ("first", TypeError)):
        place[:] = [wrong, None, False]
        with pytest.raises(error, match=r"items read of .* must be"):
            sampler.load_state_dict(state)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dict and list within a state, with each of its keys."""
    for key in list(value if isinstance(value, dict) else range(len(value))):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


TOO_LARGE = 2**31, 2**62, 2**63, 10**30
WRONG = (None, "x", -1, 1.5, [], [0], {}, True, math.nan, math.inf, -(2**63), *TOO_LARGE, [None])
"""What stands in a state that is damaged."""


def histories(width: int) -> Iterator[Any]:
    """What stands there in place of a ``world_size_history``."""
    for at, wrong in product(range(width), WRONG):
        for ranks in (1, 8):
            part = [ranks] + [1] * (width - 1)
            part[at] = wrong
            yield [part]
            yield [[1] * width, part]


def distorted(right: Any) -> list[Any]:
    """The same, a little longer or shorter, or with other parts."""
    if isinstance(right, list):
        parts = [[part] * len(right) for part in (None, math.nan, 2**63)]
        return [right + right, right[:-1], [*right, None], *parts]
    if isinstance(right, int):
        return [right + 1, right + 1000, float(right)]
    return []


@every_kind
@pytest.mark.timeout(60)
@pytest.mark.parametrize("taken", [0, 2, 99])
def test_a_damaged_state_is_refused_at_once_or_can_be_gone_on_from(kind, taken):
    lived = make(kind)
    deque(islice(lived, taken), 0)
    state = json.loads(json.dumps(lived.state_dict()))
    sampler = make(kind)
    refused = 0
    for within, key in list(places(state)):
        right = within[key]
        more = histories(len(sampler._dealt_by) + 1) if key == "world_size_history" else ()
        for wrong in (*WRONG, *distorted(right), *more):
            within[key] = wrong
            before = sampler.state_dict()
            try:
                sampler.load_state_dict(state)
            except (TypeError, ValueError):
                assert sampler.state_dict() == before
                refused += 1
            else:
                deque(islice(sampler, 1000), 0)
                with suppress(TypeError):  # not known beforehand
                    len(sampler)
                sampler = make(kind)
        within[key] = right
        if isinstance(within, dict):
            del within[key]
            with pytest.raises((TypeError, ValueError)):
                sampler.load_state_dict(state)
            within[key] = right
    assert refused > 60


@over_another
@pytest.mark.timeout(60)
def test_a_state_from_behind_the_end_of_what_is_read_is_refused(kind):
    sampler = OVER[kind](Lazily(range(20)))
    deque(islice(sampler, 2), 0)
    state = plain(sampler.state_dict())
    read = state["source"]["parts"][0][1] if kind == "mixture" else state["source"]
    read[0] = 2**62
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="does not fit: it is behind 4611686018427387904 items"):
        next(iter(sampler))


@every_kind
def test_a_state_is_of_the_iterator_made_last(kind):
    sampler = make(kind)
    first, second = iter(sampler), iter(sampler)
    next(first), next(first), next(second)
    assert sampler.state_dict()["batches"] == 1
    next(first)
    assert sampler.state_dict()["batches"] == 1


@over_another
def test_an_inner_sampler_may_gain_a_state_but_not_lose_it(monkeypatch, kind):
    monkeypatch.setattr(windows, "WINDOW", 9)
    lists, states = (OVER[kind](inner(range(20))) for inner in (Lazily, Stateful))
    whole = list(lists)
    for sampler in (lists, states):
        assert list(islice(sampler, 4)) == whole[:4]
    gained, lost = (OVER[kind](inner(range(20))) for inner in (Stateful, Lazily))
    gained.load_state_dict(lists.state_dict())
    assert list(gained) == whole[4:]
    with pytest.raises(ValueError, match=r"holds one of .* has no load_state_dict"):
        lost.load_state_dict(states.state_dict())
    assert list(lost) == whole


@over_another
def test_a_state_that_does_not_fit_an_inner_sampler_is_refused(kind):
    lived, other = (OVER[kind](BatchSampler(6, None, True, seed=seed)) for seed in (0, 1))
    next(iter(lived))
    with pytest.raises(ValueError, match="seed is 1, but the state is of seed 0"):
        other.load_state_dict(lived.state_dict())


class Late(Stateful):
    """It has no state before its first item."""

    def state_dict(self) -> Any:
        if not self.yielded:
            raise RuntimeError("not begun")
        return super().state_dict()


def looked_at() -> BatchSampler:
    """Return a sampler that somebody has an iterator of."""
    sampler = BatchSampler(20, None, shuffle=True)
    next(iter(sampler))
    return sampler


@over_another
@pytest.mark.parametrize(
    ("inner", "alike"),
    [
        (lambda: Late(range(20)), lambda: Lazily(range(20))),
        (looked_at, lambda: BatchSampler(20, None, shuffle=True)),
    ],
    ids=["none yet", "looked at"],
)
@pytest.mark.parametrize("loader", [False, True])
def test_a_state_from_before_the_first_batch_is_of_a_beginning(kind, inner, alike, loader):
    """Also where the inner sampler has none yet, or somebody has looked at it."""

    def made(inner: Any) -> Any:
        over = OVER[kind](inner)
        return Loader(list, over, num_workers=0) if loader else over

    whole = list(made(alike()))
    lived, resumed = made(inner()), made(inner())
    state = lived.state_dict()
    assert list(lived) == whole
    resumed.load_state_dict(state)
    assert list(resumed) == whole


def test_states_are_small():
    lengths = np.arange(100_000) % 50
    for sampler in (
        BatchSampler(100_000, 512, True, "rollover"),
        DynamicBatchSampler(lengths, max_total=1000, shuffle=True),
        PackedBatchSampler(lengths, 4096, long="split", shuffle=True),
        PackedBatchSampler(Lazily(cycle(range(40))), 9, long="split"),
        MixtureSampler([10**15] * 20, [1 / (part + 1) for part in range(20)], 8),
    ):
        for _ in islice(sampler, 100):
            pass
        most = 2000 if isinstance(sampler, MixtureSampler) else 500
        assert len(json.dumps(sampler.state_dict())) < most


def test_concatenated_lengths_are_looked_up():
    lengths = Concatenated([[5, 1], [2]])
    mixture = MixtureSampler([2, 1], [1, 1], stop="last")
    assert list(PackedBatchSampler(lengths, 5, sampler=mixture)) == [[(0, 0)], [(1, 0), (0, 1)]]
