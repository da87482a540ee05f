"""Samples to batch: stacked, walked, padded, or refused with a word on what to do."""

import pickle
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
from conftest import require
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from minloader import Padded, collate, pack_collate, pad_collate

invariant = settings(deadline=None, max_examples=150)  # a busy machine is no failure

Sample = namedtuple("Sample", "tokens label")


def assert_array(batch, values, dtype):
    assert type(batch) is np.ndarray
    assert batch.dtype == dtype
    assert_array_equal(batch, np.array(values, dtype=dtype), strict=True)


def assert_padded(batch, values, lengths, dtype="i8"):
    assert type(batch) is Padded
    assert_array(batch.values, values, dtype)
    assert_array(batch.lengths, lengths, "i8")


# --- collate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [
        ([1, 2], np.int64),
        ([1.5, 2], np.float64),
        ([True, False], np.bool_),
        ([1j, 2], np.complex128),
        ([np.float32(1), np.float32(2)], np.float32),
        ([np.uint8(1), np.uint8(2)], np.uint8),
        ([np.array(1, "i2"), np.array(2, "i2")], np.int16),
        ([np.datetime64("2024-01-01"), np.datetime64("2024-01-02")], "M8[D]"),
        ([7], np.int64),
    ],
)
def test_scalars_become_a_vector(samples, dtype):
    assert_array(collate(samples), samples, dtype)


HASHES = [2**63 + 1, 5]  # of 64 bits


@pytest.mark.parametrize(
    ("collate_fn", "samples", "expected"),
    [
        (collate, HASHES, HASHES),
        (collate, [np.uint64(2**63 + 1), 5, True], [*HASHES, 1]),
        (pad_collate(), [HASHES, [1]], [HASHES, [1, 0]]),
        (pack_collate(), [np.array(HASHES[:1]), [5]], HASHES),
    ],
)
def test_large_integers_are_not_rounded(collate_fn, samples, expected):
    """Of types with a sign and without one numpy makes floats."""
    batch = collate_fn(samples)
    assert_array(getattr(batch, "values", batch), expected, np.uint64)
    with pytest.raises(
        (ValueError, OverflowError), match=r"sample has integers .* above|-1 out of"
    ):
        collate_fn([*samples, -1 if np.ndim(samples[0]) == 0 else [-1]])


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,), (2, 0, 1)])
@pytest.mark.parametrize("dtype", ["f4", "u1", "?"])
def test_arrays_are_stacked(shape, dtype):
    samples = [np.full(shape, i, dtype) for i in range(4)]
    batch = collate(samples)
    assert batch.shape == (4, *shape)
    assert batch.dtype == dtype
    for row, sample in zip(batch, samples, strict=True):
        assert_array_equal(row, sample, strict=True)


def test_a_batch_owns_its_data():
    sample = np.zeros(3)
    batch = collate([sample])
    batch[:] = 1
    assert not sample.any()


@pytest.mark.parametrize("samples", [["a", "bc"], [b"a", b"bc"], [np.str_("a"), "b"]])
def test_strings_and_bytes_stay_lists(samples):
    batch = collate(tuple(samples))
    assert type(batch) is list
    assert batch == samples


def test_containers_are_walked():
    batch = collate(
        [
            {"x": np.array([i, i]), "meta": (i, [f"name{i}", None]), "named": Sample(i, {"y": i})}
            for i in range(3)
        ]
    )
    assert list(batch) == ["x", "meta", "named"]
    assert_array(batch["x"], [[0, 0], [1, 1], [2, 2]], "i8")
    assert type(batch["meta"]) is tuple
    assert_array(batch["meta"][0], [0, 1, 2], "i8")
    assert type(batch["meta"][1]) is list
    assert batch["meta"][1] == [["name0", "name1", "name2"], [None, None, None]]
    assert type(batch["named"]) is Sample
    assert_array(batch["named"].tokens, [0, 1, 2], "i8")
    assert_array(batch["named"].label["y"], [0, 1, 2], "i8")


def test_lists_of_numbers_are_columns():
    batch = collate([[1, 2.5], [3, 4.5]])
    assert type(batch) is list
    assert_array(batch[0], [1, 3], "i8")
    assert_array(batch[1], [2.5, 4.5], "f8")


def test_any_mapping_and_any_order_of_keys():
    batch = collate([OrderedDict(a=1, b=2), MappingProxyType({"b": 4, "a": 3})])
    assert type(batch) is dict
    assert_array(batch["a"], [1, 3], "i8")
    assert_array(batch["b"], [2, 4], "i8")


def test_empty_containers_stay():
    assert collate([{}, {}]) == {}
    assert collate([(), ()]) == ()
    assert collate([[], []]) == []


@pytest.mark.parametrize("collate_fn", [collate, pad_collate()])
@pytest.mark.parametrize("samples", [[], (), np.empty((0, 3))])
def test_no_samples(collate_fn, samples):
    with pytest.raises(ValueError, match="no samples"):
        collate_fn(samples)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([np.zeros(3), np.zeros(4)], r"sample has shapes \(3,\), \(4,\).*pad_collate"),
        ([{"x": (1, np.zeros(n))} for n in range(9)], r"sample\['x'\]\[1\].*, \.\.\..*pad_collate"),
        ([[1, 2], [3]], "sample is a sequence of 2 in the first.*pad_collate"),
        ([(1, 2), 3], "sample is a sequence of 2 in the first"),
        ([{"t": "ab"}, {"t": "ab", "u": 1}], r"sample has keys \['t'\].*same keys"),
        ([{"t": {1: 2}}, {"t": {2: 2}}], r"sample\['t'\] has keys \['1'\]"),
        ([{"t": 1}, 3], "sample has keys"),
        ([1, np.zeros(2)], r"sample has shapes \(\), \(2,\)"),
    ],
)
def test_what_differs_cannot_be_stacked(samples, message):
    with pytest.raises(ValueError, match=message):
        collate(samples)


@pytest.mark.parametrize("collate_fn", [collate, pad_collate()])
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([object(), object()], "sample is a object, which cannot be stacked"),
        ([({"a": {1}},), ({"a": {1}},)], r"sample\[0\]\['a'\] is a set"),
        ([1, None], "sample is None in sample 1 of the 2"),
        ([{"y": 1.5}, {"y": object()}], r"sample\['y'\] is a number in some"),
        ([1, "a"], "a number in some samples and not in others"),
        ([{"y": "a"}, {"y": 1}], r"sample\['y'\] is a text in some samples and not in others"),
        (["a", np.zeros(2)], "sample is a text in some samples and not in others"),
    ],
)
def test_what_has_no_array_is_refused(collate_fn, samples, message):
    with pytest.raises(TypeError, match=message):
        collate_fn(samples)


@pytest.mark.parametrize("join", [collate, pad_collate(), pack_collate()])
def test_a_tensor_that_numpy_cannot_hold_is_named(join):
    torch = require("torch")
    others = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)
    for other in (*others, torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match=r"sample\['x'\] is a Tensor that numpy cannot hold"):
            join([{"x": other}] * 2)


def test_advice_is_not_what_was_done():
    ragged = [{"words": ["a", "b"]}, {"words": ["c"]}]
    with pytest.raises(ValueError, match="arrays and use collate_fn=pad_collate"):
        collate(ragged)
    with pytest.raises(ValueError, match="arrays, or give a collate_fn of your own") as error:
        pad_collate()(ragged)
    assert "pad_collate" not in str(error.value)


def test_torch_tensors():
    torch = require("torch")
    batch = collate([(torch.ones(2, 3) * i, torch.tensor(i)) for i in range(4)])
    assert_array(batch[0], np.ones((4, 2, 3)) * np.arange(4)[:, None, None], "f4")
    assert_array(batch[1], [0, 1, 2, 3], "i8")
    padded = pad_collate()([torch.arange(2), torch.arange(3)])
    assert_padded(padded, [[0, 1, 0], [0, 1, 2]], [2, 3])


# --- what numpy would drop in silence


class Quantity:
    """An array with a unit, as of pint: numpy's functions work on it, and keep the unit."""

    def __init__(self, values, units):
        self.magnitude = np.asarray(values)
        self.units = units

    def __array__(self, dtype=None, copy=None):
        return self.magnitude

    def __array_function__(self, function, types, args, kwargs):
        if function is not np.stack:
            return function(self.magnitude)
        units = {each.units for each in args[0]}
        if len(units) > 1:
            raise ValueError(f"cannot convert {units}")
        return Quantity(function([each.magnitude for each in args[0]]), *units)


class Unit:
    pass


class Bare(Quantity):
    """The same, but numpy's functions lose the unit."""

    def __array_function__(self, function, types, args, kwargs):
        return function([each.magnitude for each in args[0]])


def masked(*values):
    return np.ma.masked_greater(np.array(values), 5)


def test_masks_are_kept():
    batch = collate([{"x": masked(1, 9)}, {"x": np.array([8, 2])}, {"x": masked(7, 3)}])["x"]
    assert isinstance(batch, np.ma.MaskedArray)
    assert batch.tolist() == [[1, None], [8, 2], [None, 3]]
    assert collate([masked(9)[0], masked(1)[0]]).tolist() == [None, 1]


def test_units_are_kept():
    metre = Unit()
    batch = collate([Quantity([1, 2], metre), Quantity([3, 4], metre)])
    assert batch.units is metre
    assert batch.magnitude.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="cannot convert"):
        collate([Quantity([1], metre), Quantity([2], Unit())])


@pytest.mark.parametrize("sample", [masked(1, 9), Quantity([1, 2], Unit())])
@pytest.mark.parametrize("collate_fn", [pad_collate(), pack_collate()])
def test_what_padding_and_packing_would_lose_is_refused(collate_fn, sample):
    with pytest.raises(TypeError, match=r"sample\['x'\] is a .*, whose (mask|unit) .*; give .*x\."):
        collate_fn([{"x": sample}, {"x": sample}])
    number = sample[0] if isinstance(sample, np.ma.MaskedArray) else Quantity(1, sample.units)
    collate_fn([number, number])  # numbers are only stacked


def test_a_unit_that_numpy_loses_is_refused():
    with pytest.raises(TypeError, match=r"sample is a Bare, whose unit .* x\.to_value\(unit\)"):
        collate([Bare([1], Unit()), Bare([2], Unit())])


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_tables_are_stacked_if_their_columns_are_in_one_order(library):
    frame = getattr(require(library), "table" if library == "pyarrow" else "DataFrame")
    batch = collate([frame({"a": [1], "unit": [2]}), frame({"a": [3], "unit": [4]})])
    assert_array(batch, [[[1, 2]], [[3, 4]]], "i8")
    for other in ({"unit": [4], "a": [3]}, {"a": [3], "b": [4]}):
        with pytest.raises(TypeError, match=r"\['a', 'unit'\] in the first.* but \['.* one order"):
            collate([frame({"a": [1], "unit": [2]}), frame(other)])


def test_rows_of_a_table():
    pandas = require("pandas")
    table = pandas.DataFrame({"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]})
    assert_array(collate([table.iloc[0], table.iloc[1]]), [[1, 5], [2, 6]], "i8")
    assert_array(collate([table["a"][:2], table["a"][2:]]), [[1, 2], [3, 4]], "i8")
    with pytest.raises(TypeError, match=r"has index \['a', 'b'\] in the first sample, but \['b',"):
        collate([table.iloc[0], table[["b", "a"]].iloc[1]])


# --- pad_collate -------------------------------------------------------------------------------

sequences = st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=9), min_size=1, max_size=8)


@invariant
@given(
    samples=sequences, multiple_of=st.integers(1, 7), value=st.integers(-9, 9), arrays=st.booleans()
)
def test_padding_round_trip(samples, multiple_of, value, arrays):
    given_samples = [np.array(s, dtype=np.int64) for s in samples] if arrays else samples
    values, lengths = pad_collate(value=value, multiple_of=multiple_of)(given_samples)
    longest = max(map(len, samples))
    assert values.shape[0] == len(samples)
    assert longest <= values.shape[1] < longest + multiple_of
    assert values.shape[1] % multiple_of == 0
    assert values.dtype == lengths.dtype == np.int64
    for row, length, sample in zip(values, lengths, samples, strict=True):
        assert row[:length].tolist() == sample
        assert set(row[length:].tolist()) <= {value}


@invariant
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    trailing=st.lists(st.integers(0, 3), max_size=2),
)
def test_only_the_first_axis_is_padded(lengths, trailing):
    samples = [np.random.default_rng(n).random((n, *trailing)) for n in lengths]
    batch = pad_collate(value=np.nan)(samples)
    assert batch.values.shape == (len(lengths), max(lengths), *trailing)
    assert batch.lengths.tolist() == lengths
    for row, sample in zip(batch.values, samples, strict=True):
        assert_array_equal(row[: len(sample)], sample, strict=True)
        assert np.isnan(row[len(sample) :]).all()


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [(["u1", "u1"], "u1"), (["f4", "f4"], "f4"), (["i4", "f4"], "f8"), (["u1", "i2"], "i2")],
)
def test_padding_promotes_dtypes(dtypes, expected):
    samples = [np.ones(1 + i, dtype) for i, dtype in enumerate(dtypes)]
    assert_padded(pad_collate()(samples), [[1, 0], [1, 1]], [1, 2], expected)


def test_lists_of_numbers_are_sequences():
    assert_padded(pad_collate()([[1, 2], [3]]), [[1, 2], [3, 0]], [2, 1])
    assert_padded(pad_collate()([[0.5], []]), [[0.5], [0]], [1, 0], "f8")
    assert_padded(pad_collate(-1)([[1], [True, 2]]), [[1, -1], [1, 2]], [1, 2])
    assert_padded(pad_collate()([[], []]), np.empty((2, 0)), [0, 0])


def test_padding_inside_structures():
    pad = pad_collate(value=-1, multiple_of=4)
    tokens, label = pad([([1, 2], 0), ([3], 1)])
    assert_padded(tokens, [[1, 2, -1, -1], [3, -1, -1, -1]], [2, 1])
    assert_array(label, [0, 1], "i8")
    batch = pad(
        [
            {"in": Sample(np.arange(n, dtype="i2"), n / 2), "name": f"n{n}", "none": None}
            for n in (1, 5)
        ]
    )
    assert list(batch) == ["in", "name", "none"]
    assert type(batch["in"]) is Sample
    rows = [[0, *[-1] * 7], [0, 1, 2, 3, 4, -1, -1, -1]]
    assert_padded(batch["in"].tokens, rows, [1, 5], "i2")
    assert_array(batch["in"].label, [0.5, 2.5], "f8")
    assert batch["name"] == ["n1", "n5"]
    assert batch["none"] == [None, None]


def test_padding_leaves_scalars_alone():
    assert_array(pad_collate()([1, 2]), [1, 2], "i8")
    assert_array(pad_collate()([np.array(1.5), np.array(2.5)]), [1.5, 2.5], "f8")


def test_padding_walks_lists_of_arrays():
    first, second = pad_collate()([[np.ones(1), np.ones(2)], [np.ones(2), np.ones(1)]])
    assert_padded(first, [[1, 0], [1, 1]], [1, 2], "f8")
    assert_padded(second, [[1, 1], [1, 0]], [2, 1], "f8")


def test_padding_does_not_change_the_samples():
    sample = {"x": [1, 2]}
    pad_collate()([sample, {"x": [3]}])
    assert sample == {"x": [1, 2]}


def test_pad_collate_travels():
    for pad in (pad_collate(value=7, multiple_of=3), pad_collate({0: 7}, multiple_of={0: 3})):
        copy = pickle.loads(pickle.dumps(pad))
        assert copy == pad
        assert_padded(copy([([1],)])[0], [[1, 7, 7]], [1])


LABELLED = [
    {"ids": [1, 2], "labels": {"a": [3]}, "k": 0},
    {"ids": [4], "labels": {"a": []}, "k": 1},
]


@pytest.mark.parametrize(
    ("pad", "ids", "labels"),
    [
        (pad_collate(), [[1, 2], [4, 0]], [[3], [0]]),
        (pad_collate({"labels": -100}), [[1, 2], [4, 0]], [[3], [-100]]),
        (pad_collate(MappingProxyType({"ids": 9})), [[1, 2], [4, 9]], [[3], [0]]),
        (pad_collate({"ids": 9}, 2, "left"), [[1, 2], [9, 4]], [[0, 3], [0, 0]]),
        (pad_collate(-1, {"labels": 2}, {"ids": "left"}), [[1, 2], [-1, 4]], [[3, -1], [-1, -1]]),
        (pad_collate(5, axis={"ids": -1}), [[1, 2], [4, 5]], [[3], [5]]),
    ],
)  # fmt: skip
def test_parts_are_padded_as_they_are_named(pad, ids, labels):
    batch = pad(LABELLED)
    assert_padded(batch["ids"], ids, [2, 1])
    assert_padded(batch["labels"]["a"], labels, [1, 0])
    assert_array(batch["k"], [0, 1], "i8")


@invariant
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    others=st.lists(st.integers(0, 3), max_size=2),
    side=st.sampled_from(["left", "right"]),
    data=st.data(),
)
def test_any_axis_is_padded_on_either_side(lengths, others, side, data):
    axis = data.draw(st.integers(-len(others) - 1, len(others)))
    at = axis % (len(others) + 1)
    rng = np.random.default_rng(0)
    samples = [rng.random((*others[:at], length, *others[at:])) for length in lengths]
    batch = pad_collate(-1, multiple_of=2, side=side, axis=axis)(samples)
    longest = max(lengths) + max(lengths) % 2
    assert batch.values.shape == (len(lengths), *others[:at], longest, *others[at:])
    assert batch.lengths.tolist() == lengths
    for row, sample in zip(batch.values, samples, strict=True):
        if side == "left":
            row, sample = np.flip(row, at), np.flip(sample, at)
        length = sample.shape[at]
        assert_array_equal(row.take(range(length), at), sample, strict=True)
        assert (row.take(range(length, longest), at) == -1).all()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            r"sample has shapes \(2, 3\), \(2, 4\).*another axis; say by axis",
        ),
        ([{"x": np.zeros(2)}, {"x": np.zeros((2, 1))}], r"sample\['x'\].*another axis"),
        ([np.zeros(2), np.float64(1)], r"sample has shapes \(2,\), \(\)"),
        ([{"x": [1]}, {"y": [1]}], "same keys"),
    ],
)
def test_what_cannot_be_padded(samples, message):
    with pytest.raises(ValueError, match=message):
        pad_collate()(samples)


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        ({"value": {"label": -100}}, LABELLED, "value names 'label', which is no part .*'labels'"),
        ({"side": {2: "left"}}, [([1], 0)], r"side names 2, which is no part .*\[0, 1\]"),
        ({"value": {"x": 1}}, [[[1], 2]], r"value names 'x'.*\[0, 1\]"),
        ({"value": {"x": 1}}, [np.ones(2)], "value names 'x'.* no parts"),
        ({"axis": 1}, [{"x": np.ones((2, 3)), "y": np.ones(2)}], r"axis=1, .*'y'.*axis=\{"),
        ({"axis": 1}, [np.ones((2, 3)), np.ones((3, 3))], r"\(2, 3\), \(3, 3\).*another axis"),
        ({"axis": -1}, [np.ones((2, 3)), np.ones(3)], r"\(2, 3\), \(3,\).*another axis"),
        ({"value": {"ids": 0.5}}, LABELLED, r"value=0.5 cannot pad sample\['ids'\]"),
    ],
)
def test_what_cannot_be_padded_so(options, samples, message):
    with pytest.raises(ValueError, match=message):
        pad_collate(**options)(samples)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"side": "both"}, ValueError, "side must be .*'right'.*'both'"),
        ({"side": {"x": None}}, (TypeError, ValueError), r"side\['x'\] must be"),
        ({"axis": 1.5}, TypeError, "axis must be an int"),
        ({"axis": {"x": "1"}}, TypeError, r"axis\['x'\] must be an int"),
        ({"axis": 99}, ValueError, "axis must be at most"),
        ({"multiple_of": {"x": 0}}, ValueError, r"multiple_of\['x'\] must be at least 1"),
    ],
)
def test_impossible_paddings(options, error, message):
    with pytest.raises(error, match=message):
        pad_collate(**options)


@pytest.mark.parametrize(
    ("multiple_of", "error"),
    [(0, ValueError), (-8, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)],
)
def test_impossible_multiples(multiple_of, error):
    with pytest.raises(error, match="multiple_of must be"):
        pad_collate(multiple_of=multiple_of)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, np.int64),
        (-1, np.uint8),
        (300, np.uint8),
        (np.nan, np.int8),
        (-1e9, np.float16),
        (0, "U3"),
        ("x", float),
    ],
)
def test_a_value_that_the_arrays_cannot_hold(value, dtype):
    """Casting it silently would pad with something else."""
    with pytest.raises(ValueError, match=r"value=.* cannot pad sample\['x'\]"):
        pad_collate(value=value)([{"x": np.zeros(2, dtype)}, {"x": np.zeros(1, dtype)}])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.nan, np.float32), (-100, np.int8), ("", "U3"), (np.datetime64("NaT", "s"), "M8[s]")],
)
def test_a_value_that_they_can(value, dtype):
    values, _ = pad_collate(value=value)([np.zeros(2, dtype), np.zeros(1, dtype)])
    assert values.dtype == dtype
    assert_array_equal(values[1, 1], np.array(value, dtype))
