"""Rows that samples share: nothing lost, no row too full, the same for every rank and after a
resume; and the arrays that are made of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import flat, require
from helpers import Lazily
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import every_rank
from numpy.testing import assert_array_equal

from minloader import (
    SKIP,
    Loader,
    Packed,
    PackedBatchSampler,
    pack_collate,
    sliced,
)
from minloader._sampling import packed

invariant = settings(deadline=None, max_examples=50)  # a busy machine is no failure
thorough = settings(deadline=None, max_examples=500)


def rows_of(lengths: Iterable[int], capacity: int) -> list[int]:
    """What is in each row if a row begins where the next sample does not fit."""
    rows: list[int] = []
    for length in lengths:
        if not rows or rows[-1] + length > capacity:
            rows.append(0)
        rows[-1] += length
    return rows


# --- the plan ------------------------------------------------------------------------------------


PLANS = given(
    lengths=st.lists(st.integers(0, 45), max_size=60),
    capacity=st.integers(1, 50),
    rows=st.none() | st.integers(1, 4),
    long=st.sampled_from(["refuse", "split"]),
    window=st.none() | st.integers(1, 30),
    source=st.sampled_from(["lengths", "lazy lengths", "sampler"]),
    shuffle=st.booleans(),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 2),
)


def check_plan(lengths, capacity, rows, long, window, source, shuffle, world_size, epoch):
    """Every sample is there once, but for those that are dropped, and the rows hold them."""
    if long == "refuse":
        capacity = max([capacity, *lengths])
    sampler = list(range(len(lengths)))[::-1] if source == "sampler" else None
    kind = partial(
        PackedBatchSampler,
        Lazily(lengths) if source == "lazy lengths" else lengths,
        capacity,
        rows=rows,
        long=long,
        window=window,
        shuffle=shuffle,
        sampler=sampler,
    )
    ranks = every_rank(kind, world_size, epoch)
    steps = list(zip(*ranks, strict=True))  # fails if one has more batches than others
    taken = flat(flat(steps))
    if long == "refuse":
        pieces = [(index, 0, length) for index, length in enumerate(lengths)]
        taken = [(index, 0, lengths[index]) for index in taken]
    else:
        pieces = [
            (index, start, min(start + capacity, length))
            for index, length in enumerate(lengths)
            for start in range(0, max(1, length), capacity)
        ]
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(pieces)
    assert all(type(part) is int for piece in taken for part in piece)
    assert {sampler.dropped for sampler in ranks} == {len(pieces) - len(taken)}
    assert len(pieces) - len(taken) < world_size
    if source == "lengths":
        assert {len(sampler) for sampler in ranks} == {len(steps)}
    for batch in flat(steps):
        sizes = [stop - start for _, start, stop in batch] if long != "refuse" else batch
        sizes = [lengths[index] for index in batch] if long == "refuse" else sizes
        assert max(sizes) <= capacity
        assert 1 <= len(rows_of(sizes, capacity)) <= (rows or 1)
        assert len(batch) <= capacity * (rows or 1)  # a bound for samples of no length too


test_every_sample_once_in_rows_that_hold_it = invariant(PLANS(check_plan))
test_so_it_is_for_many_more = pytest.mark.slow(thorough(PLANS(check_plan)))


def best_fit(lengths: Iterable[int], capacity: int) -> list[int]:
    """What is in each row, by the plainest program there is for it."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] + length <= capacity]
        if fitting:
            rows[max(fitting, key=rows.__getitem__)] += length
        else:
            rows.append(length)
    return sorted(rows)


@invariant
@given(
    lengths=st.lists(st.integers(1, 40) | st.sampled_from([3, 7]), max_size=80),
    shuffle=st.booleans(),
)
def test_best_fit_puts_the_longest_first_into_the_fullest_row(lengths, shuffle):
    batches = list(PackedBatchSampler(lengths, 40, shuffle=shuffle))
    assert sorted(sum(lengths[index] for index in b) for b in batches) == best_fit(lengths, 40)
    if not shuffle:
        assert all(batch == sorted(batch) for batch in batches)
        assert batches == sorted(batches)


def test_by_example():
    assert list(PackedBatchSampler([3, 1, 2, 5, 4], 5)) == [[0, 2], [1, 4], [3]]
    assert list(PackedBatchSampler([3, 1, 2, 5, 4], 5, rows=2)) == [[0, 2, 1, 4], [3]]
    assert list(PackedBatchSampler([3, 9], 4, long="split")) == [
        [(0, 0, 3), (1, 8, 9)],
        [(1, 0, 4)],
        [(1, 4, 8)],
    ]
    two = every_rank(partial(PackedBatchSampler, [3, 1, 2, 5, 4], 5), 2)
    assert [list(sampler) for sampler in two] == [[[0, 2], [3]], [[1], [4]]]
    assert two[0].dropped == 0


def test_rows_of_one_and_without_end():
    assert list(PackedBatchSampler([5, 0, 7] * 2, 2**60)) == [[0, 1, 2, 3, 4, 5]]
    assert list(PackedBatchSampler([1, 0, 1], 1)) == [[0], [1], [2]]
    assert list(PackedBatchSampler([2, 1], 1, rows=None, long="split")) == [
        [(0, 0, 1)],
        [(0, 1, 2)],
        [(1, 0, 1)],
    ]


@pytest.mark.parametrize("kind", [list, Lazily])
def test_a_window_is_packed_by_itself(kind):
    lengths = np.random.default_rng(0).integers(1, 30, 1000).tolist()
    batches = list(PackedBatchSampler(kind(lengths), 64, window=100))
    assert {index // 100 for batch in batches for index in batch} == set(range(10))
    assert all(len({index // 100 for index in batch}) == 1 for batch in batches)
    for window in range(10):
        sums = [sum(lengths[i] for i in b) for b in batches if b[0] // 100 == window]
        assert sorted(sums) == best_fit(lengths[100 * window : 100 * window + 100], 64)


@pytest.fixture
def fits(monkeypatch) -> list[int]:
    """How many pieces were put into rows, each time."""
    sizes: list[int] = []
    best_fit = packed._best_fit

    def noted(costs: Any, capacity: int) -> Any:
        sizes.append(len(costs))
        return best_fit(costs, capacity)

    monkeypatch.setattr(packed, "_best_fit", noted)
    return sizes


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("way", ["sampler", "loader", "ranks"])
def test_windows_are_planned_as_they_are_needed(fits, way, shuffle):
    ranks = {"rank": 1, "world_size": 2} if way == "ranks" else {}
    lengths = np.random.default_rng(0).integers(1, 30, 2_000)
    sampler = PackedBatchSampler(lengths, 64, 2, window=100, shuffle=shuffle, **ranks)
    batches = iter(Loader(len, sampler, num_workers=0) if way == "loader" else sampler)
    next(batches)
    assert fits == [100]
    for _ in range(20):
        next(batches)
    assert len(fits) <= 4
    assert sum(1 for _ in batches) + 21 == len(sampler)
    assert fits == [100] * 20


class Sorted(PackedBatchSampler):
    """Changes the batches."""

    def __iter__(self) -> Any:
        return map(sorted, super().__iter__())


@pytest.mark.parametrize("kind", [PackedBatchSampler, Sorted])
def test_the_length_of_a_loader_is_there_all_the_same(kind):
    with Loader(len, kind([1, 2, 3] * 50, 6, window=10), num_workers=0) as loader:
        before = len(loader)
        assert [len(loader) for _ in loader] == [before] * before


def test_an_interrupt_while_a_window_is_planned_loses_nothing(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 30, 300)
    sampler = PackedBatchSampler(lengths, 64, window=20, shuffle=True)
    expected, best_fit, calls = list(sampler), packed._best_fit, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return best_fit(*args)

    monkeypatch.setattr(packed, "_best_fit", interrupted)
    sampler = PackedBatchSampler(lengths, 64, window=20, shuffle=True)
    batches, found = iter(sampler), []
    while len(found) < len(expected):
        try:
            found.append(next(batches))
        except KeyboardInterrupt:
            found += []
    assert found == expected
    assert list(batches) == []


def test_a_window_puts_other_lengths_together_each_epoch():
    lengths = np.random.default_rng(0).integers(1, 30, 300)

    def companies(sampler, epoch):
        sampler.set_epoch(epoch)
        return sorted(sorted(lengths[batch].tolist()) for batch in sampler)

    whole = PackedBatchSampler(lengths, 64, shuffle=True)
    assert companies(whole, 0) == companies(whole, 1)
    window = PackedBatchSampler(lengths, 64, window=100, shuffle=True)
    assert companies(window, 0) != companies(window, 1)


def test_rows_are_shuffled_too():
    """By their first samples, rows of many samples would come before those of few."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 3000).clip(1, 4096).astype(int)
    for seed in range(3):
        sizes = list(map(len, PackedBatchSampler(lengths, 4096, shuffle=True, seed=seed)))
        assert abs(np.corrcoef(sizes, range(len(sizes)))[0, 1]) < 0.2
    # Not as a sampler of its kind would shuffle them that it reads: both may be shuffled.
    inner = PackedBatchSampler([1] * 50, 1)
    outer = PackedBatchSampler(len, 1, sampler=inner, shuffle=True)
    assert [row for (row,) in outer] != list(PackedBatchSampler([1] * 50, 1, shuffle=True))


@pytest.fixture(scope="module")
def corpus() -> np.ndarray:
    """Lengths like those of source files in tokens."""
    return np.random.default_rng(0).lognormal(7.1, 1.6, 2000).astype(int)


@pytest.mark.parametrize(
    ("options", "least"),
    [({}, 0.99), ({"window": 1000}, 0.99), ({"lazy": True}, 0.98), ({"world_size": 4}, 0.99)],
)
def test_rows_are_full(corpus, options, least):
    lengths = Lazily(corpus.tolist()) if options.pop("lazy", False) else corpus
    kind = partial(PackedBatchSampler, lengths, 4096, long="split", shuffle=True, **options)
    ranks = [kind(rank=rank) for rank in range(options.get("world_size", 1))]
    rows = sum(len(list(sampler)) for sampler in ranks)
    assert corpus.sum() / (4096 * rows) >= least


# --- pack_collate --------------------------------------------------------------------------------


class Sample(NamedTuple):
    tokens: Any
    label: int


def segments(batch: Packed) -> list[tuple[int, list[Any]]]:
    """The number in its row, and the values, of each segment; fails if anything contradicts."""
    shape = batch.segment_ids.shape
    assert batch.values.shape[: len(shape)] == batch.positions.shape == shape
    assert {part.dtype for part in batch[1:]} == {np.dtype("i4")}
    values = batch.values.reshape(-1, *batch.values.shape[len(shape) :])
    ids, positions = batch.segment_ids.ravel(), batch.positions.ravel()
    bounds = batch.cu_seqlens.tolist()
    assert (bounds[0], bounds[-1]) == (0, ids.size)
    found, last = [], 0
    for start, stop in pairwise(bounds):
        number = int(ids[start]) if start < stop else last + 1
        assert set(ids[start:stop].tolist()) <= {number}
        length = stop - start
        assert positions[start:stop].tolist() == (list(range(length)) if number else [0] * length)
        assert length == 0 or start // shape[-1] == (stop - 1) // shape[-1]  # within one row
        found.append((number, values[start:stop].tolist()))
        last = number
    return found


@invariant
@given(
    samples=st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=12),
    capacity=st.none() | st.integers(9, 20),
    spare=st.none() | st.integers(0, 2),
    width=st.integers(1, 2),
    arrays=st.booleans(),
)
def test_packing_round_trip(samples, capacity, spare, width, arrays):
    """All samples are there, in their order; a row begins where the next one does not fit."""
    used = len(rows_of(map(len, samples), capacity or 10**9))
    rows = None if capacity is None or (spare is None and used == 1) else used + (spare or 0)
    if arrays:
        samples = [np.repeat(np.array(s, "i4")[:, None], width, axis=1) for s in samples]
    batch = pack_collate(capacity, rows, -1)(samples)
    total = sum(map(len, samples))
    assert batch.segment_ids.shape == (
        (total,) if capacity is None else (capacity,) if rows is None else (rows, capacity)
    )
    found = segments(batch)
    assert [values for number, values in found if number] == [
        s.tolist() if arrays else s for s in samples
    ]
    expected: list[int] = []
    filled = number = 0
    for length in map(len, samples):
        fits = capacity is None or filled + length <= capacity
        filled, number = (filled + length, number + 1) if fits else (length, 1)
        expected.append(number)
    assert [number for number, _ in found if number] == expected
    padding = [values for number, values in found if not number]
    assert all(set(flat(values) if arrays else values) <= {-1} for values in padding)
    assert sum(map(len, padding)) == batch.segment_ids.size - total


def test_packing_by_example():
    values, segment_ids, positions, cu_seqlens = pack_collate()([[1, 2], [], [3, 4, 5]])
    assert values.tolist() == [1, 2, 3, 4, 5]
    assert segment_ids.tolist() == [1, 1, 3, 3, 3]
    assert positions.tolist() == [0, 1, 0, 1, 2]
    assert cu_seqlens.tolist() == [0, 2, 2, 5]
    values, segment_ids, positions, cu_seqlens = pack_collate(4, 3, -1)([[1, 2], [3], [4, 5, 6]])
    assert values.tolist() == [[1, 2, 3, -1], [4, 5, 6, -1], [-1] * 4]
    assert segment_ids.tolist() == [[1, 1, 2, 0], [1, 1, 1, 0], [0] * 4]
    assert positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0] * 4]
    assert cu_seqlens.tolist() == [0, 2, 3, 4, 7, 8, 12]
    assert pack_collate(4)([[1]]).values.tolist() == [1, 0, 0, 0]


def test_packing_inside_structures():
    batch = pack_collate()(
        [
            {"in": Sample(np.arange(n, dtype="u2"), n), "mask": [True] * n, "name": f"n{n}"}
            for n in (2, 3)
        ]
    )
    assert list(batch) == ["in", "mask", "name"]
    assert type(batch["in"]) is Sample
    assert batch["in"].tokens.values.dtype == np.uint16
    assert batch["in"].tokens.values.tolist() == [0, 1, 0, 1, 2]
    assert batch["in"].label.tolist() == [2, 3]
    assert batch["mask"].values.tolist() == [True] * 5
    assert batch["name"] == ["n2", "n3"]
    # What is the same for both is there once.
    for ours, theirs in zip(batch["in"].tokens[1:], batch["mask"][1:], strict=True):
        assert ours is theirs
    other = pack_collate()([{"text": [1, 2], "image": np.ones((5, 3))}])
    assert (other["text"].cu_seqlens.tolist(), other["image"].cu_seqlens.tolist()) == (
        [0, 2],
        [0, 5],
    )


def test_packing_tensors():
    torch = require("torch")
    batch = pack_collate(8)([torch.arange(2), torch.arange(3)])
    assert type(batch.values) is np.ndarray
    assert batch.values.tolist() == [0, 1, 0, 1, 2, 0, 0, 0]


def test_pack_collate_travels():
    pack = pickle.loads(pickle.dumps(pack_collate(8, 2, value=7)))
    assert pack == pack_collate(8, 2, 7)


@pytest.mark.parametrize(
    ("collate_fn", "samples", "message"),
    [
        (pack_collate(3), [[1], [1, 2, 3, 4]], "sample has 4 entries in sample 1 .* capacity=3; r"),
        (pack_collate(3), [[1, 2], [3, 4]], "needs 2 rows of capacity=3 .* 2 samples .* rows=1"),
        (
            pack_collate(3, 2),
            [[1, 2]] * 4,
            r"needs 4 rows .*PackedBatchSampler\(lengths, 3, rows=2",
        ),
        (pack_collate(9), [{"a": [1, 2], "b": [1]}], r"sample\['b'\] is of another length"),
        (pack_collate(), [np.ones((2, 3)), np.ones((2, 4))], r"pack_collate: .* first axis"),
        (pack_collate(9, value=0.5), [[1]], "value=0.5 cannot pad sample"),
        (pack_collate(), [[1], 2], r"sample has shapes \(1,\), \(\)"),
        (pack_collate(), [], "no samples"),
        (
            pack_collate(),
            [{"a": [2**63, -1]}],
            r"^sample\['a'\] has integers below 0 and of type ui",
        ),
        (pack_collate(), [[np.uint64(1), np.int64(-1)]], "sample has integers below 0 and"),
    ],
)
def test_what_cannot_be_packed(collate_fn, samples, message):
    with pytest.raises(ValueError, match=message):
        collate_fn(samples)


def test_impossible_capacities():
    with pytest.raises(TypeError, match="write collate_fn=pack_collate"):
        pack_collate([[1, 2]])
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        pack_collate(0)
    with pytest.raises(TypeError, match="rows must be an int"):
        pack_collate(5, 1.5)
    with pytest.raises(ValueError, match="rows=2 needs a capacity"):
        pack_collate(rows=2)


# --- sliced, and all of it together --------------------------------------------------------------


def test_every_sequence_of_a_sample_is_sliced():
    dataset = [{"x": np.arange(9), "y": Sample([1, 2, 3, 4], 7), "z": ("text", [np.eye(4), None])}]
    found = sliced(dataset)[0, 1, 3]
    assert found["x"].tolist() == [1, 2]
    assert type(found["y"]) is Sample
    assert (found["y"].tokens.tolist(), found["y"].label) == ([2, 3], 7)
    assert found["z"][0] == "text"
    assert found["z"][1][0].tolist() == np.eye(4)[1:3].tolist()
    assert found["z"][1][1] is None
    assert (type(found["z"]), type(found["z"][1])) == (tuple, list)
    assert sliced(lambda index: np.arange(index))[8, 5, 8].tolist() == [5, 6, 7]


def test_slices_that_are_not_there():
    with pytest.raises(
        ValueError, match=r"sample\['x'\] has 3 entries, but the item is \(0, 0, 4\)"
    ):
        sliced([{"x": [1, 2, 3]}])[0, 0, 4]
    with pytest.raises(TypeError, match=r"must be a tuple \(index, start, stop\), got 0"):
        sliced([[1, 2]])[0]


LENGTHS = np.random.default_rng(1).integers(0, 30, 370)


class Fetching:
    """Fetches several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [np.full(LENGTHS[index], index) for index in indices]


@pytest.mark.parametrize("dataset", [Fetching(), lambda index: np.full(LENGTHS[index], index)])
def test_pieces_are_all_there_through_a_loader(dataset):
    assert sliced(dataset)[4, 0, 1].tolist() == [4]
    sampler = PackedBatchSampler(LENGTHS, 20, 3, long="split", shuffle=True)
    seen = np.zeros_like(LENGTHS)
    with Loader(
        sliced(dataset), sampler, collate_fn=pack_collate(20, 3, value=-1), num_workers=0
    ) as loader:
        for values, segment_ids, _, _ in loader:
            assert_array_equal(values == -1, segment_ids == 0)
            seen += np.bincount(values[values >= 0], minlength=len(seen))
    assert_array_equal(seen, LENGTHS)


def test_samples_that_are_left_out_do_not_change_the_shape():
    sampler = PackedBatchSampler(LENGTHS, 64, 2)
    kept = 0
    with Loader(
        lambda index: SKIP if index % 3 == 0 else np.full(LENGTHS[index], index),
        sampler,
        collate_fn=pack_collate(64, 2),
        num_workers=0,
    ) as loader:
        for batch in loader:
            assert batch.values.shape == (2, 64)
            kept += int((batch.segment_ids > 0).sum())
    assert kept == sum(LENGTHS) - sum(LENGTHS[::3])
