"""Make one batch of samples: they are stacked, or share rows without padding.

Both run where the batch is made, normally in a worker process, and write the arrays of the batch
directly into the shared memory that it travels in (:func:`minloader.empty`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Number
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import checked_int
from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._memory.slot_writer import empty
from minloader._protocols import is_array_like
from minloader._sampling.walk import DEEPER, plain_container, walk


class Packed(NamedTuple):
    """Sequences one after another in one array, or in rows of fixed capacity.

    ``shape`` is ``(total,)``, or with a capacity ``(capacity,)`` or ``(rows, capacity)``.

    Attributes:
        values: array of shape ``(*shape, ...)``.
        segment_ids: array of ``shape``, int32: which sequence of its row an entry is of, from 1;
            0 in padding.
        positions: array of ``shape``, int32: place of an entry in its sequence, from 0; 0 in
            padding.
        cu_seqlens: array of shape ``(n + 1,)``, int32: where each of ``n`` segments begins in
            the values of all rows, and where the last one ends. The padding at the end of a row
            is a segment too. Kernels of variable-length attention take it so.
    """

    values: NDArray[Any]
    segment_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]


def collate(samples: Sequence[Any]) -> Any:
    """Make one batch of samples, with the structure of one sample.

    Runs where the batch is made, normally in a worker process. Arrays (and whatever converts to
    one by ``__array__``, such as CPU tensors) are stacked along a new first axis: ``n`` arrays of
    shape ``s`` become one of shape ``(n, *s)``, of a type that holds them all. Numbers become an
    array of shape ``(n,)``. Mappings become dicts; tuples, named tuples and lists are walked.
    Strings and bytes become lists, and so does a part that is None in all samples. Masked arrays
    stay masked. Quantities with a unit are stacked by their own library, which keeps it.

    Args:
        samples: at least one sample.

    Returns:
        The batch, which shares no memory with the samples.

    Raises:
        ValueError: the samples differ in shape, length or keys, or there are none; or no type of
            integers holds theirs.
        TypeError: a sample is of a type that cannot be stacked, or is None; or stacking would lose
            a unit, or join tables whose columns are not the same.
    """
    return join(samples)


@dataclass(frozen=True)
class pack_collate:  # noqa: N801  # used as a function, like collate
    """A ``collate_fn`` that lays sequences one after another, as rows of fixed capacity.

    ``collate_fn=pack_collate()`` runs where the batch is made, normally in a worker process. Every
    array of at least one dimension, and every list of numbers, becomes a :class:`Packed`. All else
    is collated as by :func:`collate`. Where sequences of a sample are of the same length, they
    share segment ids, positions and cumulative lengths.

    Samples come in the order of the batch. With a capacity, a row begins where the next sample
    does not fit into the one before. A batch of :class:`PackedBatchSampler` never needs more rows
    than the sampler has put into it.

    Args:
        capacity: number of entries in a row; the rest of a row is padding. None: one row, as long
            as all samples together, without padding.
        rows: number of rows of each batch; those without samples are padding. None: one row,
            without an axis for rows.
        value: what to pad with. The type of the arrays must be able to hold it.

    Raises:
        TypeError, ValueError: ``capacity`` or ``rows`` is not an int, or below 1, or ``rows`` is
            given without ``capacity``. When called, also: the samples do not fit into the rows;
            with ``capacity``, the sequences of a sample differ in length; sequences differ in more
            than their first axis, or cannot hold ``value``; and whatever :func:`collate` raises.
    """

    capacity: int | None = None
    rows: int | None = None
    value: Any = 0

    def __post_init__(self) -> None:
        refuse_samples("pack_collate", self.capacity)
        if self.capacity is not None:
            object.__setattr__(self, "capacity", checked_int("capacity", self.capacity, 1))
        if self.rows is not None:
            object.__setattr__(self, "rows", checked_int("rows", self.rows, 1))
            if self.capacity is None:
                raise ValueError(f"rows={self.rows} needs a capacity; give one, or drop rows")

    def __call__(self, samples: Sequence[Any]) -> Any:
        layouts: dict[tuple[int, ...], Any] = {}

        def pack(arrays: list[NDArray[Any]], path: str) -> Packed:
            dtype = common_dtype("pack_collate", arrays, path, self.value)
            lengths = tuple(map(len, arrays))
            if layouts and lengths not in layouts and self.capacity is not None:
                raise ValueError(
                    f"pack_collate: {path} is of another length than a sequence before it, so that "
                    "their rows would differ; bring them to one length in transform, or drop "
                    "capacity"
                )
            if lengths not in layouts:
                layouts[lengths] = self._lay_out(lengths, path)
            spans, *layout = layouts[lengths]
            values = empty((*layout[0].shape, *arrays[0].shape[1:]), dtype)
            flat = values.reshape(layout[0].size, *arrays[0].shape[1:])
            following = iter(arrays)
            for start, stop, number in spans:
                flat[start:stop] = next(following) if number else self.value
            return Packed(values, *layout)

        return join(samples, pack)

    def _lay_out(self, lengths: Sequence[int], path: str) -> tuple[Any, ...]:
        """Return where sequences of these lengths lie.

        That is start and stop of each segment, and its number in its row, 0 for padding; then what
        :class:`Packed` has beside the values.
        """
        capacity = sum(lengths) if self.capacity is None else self.capacity
        rows = self.rows or 1
        if max(lengths) > capacity:
            raise ValueError(
                f"pack_collate: {path} has {max(lengths)} entries in sample "
                f"{lengths.index(max(lengths))} of the batch, but capacity={capacity}; raise "
                "capacity, or give PackedBatchSampler long='split' or long='drop'"
            )
        spans: list[tuple[int, int, int]] = []
        at = 0
        row = 1
        number = 0
        for length in lengths:
            if at + length > row * capacity:
                spans.append((at, row * capacity, 0))
                at = row * capacity
                row += 1
                number = 0
            number += 1
            spans.append((at, at + length, number))
            at += length
        if row > rows:
            raise ValueError(
                f"pack_collate: {path} needs {row} rows of capacity={capacity} for the "
                f"{len(lengths)} samples of the batch, but rows={rows}; raise rows, or make the "
                f"batches with PackedBatchSampler(lengths, {capacity}, rows={rows})"
            )
        for end in range(row * capacity, rows * capacity + 1, max(1, capacity)):
            spans.append((at, end, 0))
            at = end
        spans = [span for span in spans if span[2] or span[0] < span[1]]
        segment_ids = empty(at, np.int32)
        positions = empty(at, np.int32)
        for start, stop, number in spans:
            segment_ids[start:stop] = number
            positions[start:stop] = np.arange(stop - start) if number else 0
        shape = (at,) if self.rows is None else (rows, capacity)
        cu_seqlens = np.array([0, *(stop for _, stop, _ in spans)], np.int32)
        return spans, segment_ids.reshape(shape), positions.reshape(shape), cu_seqlens


def refuse_samples(name: str, value: Any) -> None:
    """Refuse to make a ``collate_fn`` of samples, which are for the ``collate_fn`` to take."""
    if isinstance(value, list | tuple):
        raise TypeError(
            f"{name} was called with samples, but returns the function that takes them; write "
            f"collate_fn={name}(), with parentheses"
        )


def common_dtype(name: str, arrays: list[NDArray[Any]], path: str, value: Any) -> np.dtype[Any]:
    """Return a type that holds sequences and what to pad them with.

    Args:
        name: of the function that joins the sequences, for messages.
        arrays: the sequences, along their first axis.
        path: which part of a sample they are, for messages.
        value: what to pad them with.

    Raises:
        ValueError: they differ in another axis too, or cannot hold ``value``.
    """
    if len({array.shape[1:] for array in arrays}) > 1:
        raise ValueError(
            f"{name}: {path} has shapes {shapes(arrays)}, which differ in more than their first "
            "axis, the only one that may differ; bring the others to one size in transform"
        )
    dtype = _type_of_all(arrays, path)
    if not _fits(value, dtype):
        raise ValueError(
            f"{name}: value={value!r} cannot pad {path}, which has dtype {dtype}; give a value of "
            "that type, or convert the arrays in transform"
        )
    return dtype


def _fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array of this type can hold the value, exactly or as nearly as floats can."""
    try:
        with np.errstate(all="ignore"):
            kept = np.full((), value, dtype)
        if dtype.kind in "fc":
            return bool(np.isfinite(kept) or not np.isfinite(value))
    except (OverflowError, TypeError, ValueError):
        return False
    # NaN, and the date that is none, differ from themselves.
    return dtype.kind == "O" or bool(kept == value) or bool(kept != kept and value != value)


def numbers_as_array(sample: Any, path: str) -> Any:
    """Return the array of a list of numbers, which is a sequence to pad; all else as it is.

    Args:
        sample: the list, or all else.
        path: which part of a sample it is, for messages.

    Raises:
        ValueError: no integers hold these.
    """
    if not isinstance(sample, list) or not all(isinstance(value, Number) for value in sample):
        return sample
    if not sample:
        return np.empty(0, dtype=np.int64)
    array = np.asarray(sample)
    if array.dtype.kind == "f" and all(isinstance(value, Integral) for value in sample):
        if min(sample) < 0:
            raise _no_integers_hold(path)
        return np.array(sample, np.uint64)  # some need all bits: floats round them
    return array


def join(
    samples: Sequence[Any], join_sequences: Callable[[list[NDArray[Any]], str], Any] | None = None
) -> Any:
    """Return one batch of samples that have the same structure.

    Args:
        samples: the samples.
        join_sequences: joins arrays of at least one dimension, which lists of numbers are then;
            it is given their path too. None: all arrays are stacked.
    """
    return walk(samples, partial(_joined, join_sequences), plain_container)


def _joined(join_sequences: Any, samples: Sequence[Any], path: str) -> Any:
    """The policy of all three functions: returns the array of a part of the samples."""
    if join_sequences is not None:
        samples = [numbers_as_array(sample, path) for sample in samples]
    if not len(samples):
        raise ValueError("collate: there are no samples; an item must name at least one index")
    first = samples[0]
    if first is None or isinstance(first, (str, bytes)):
        # A part may be missing in all samples, and a text in some. A sample may not.
        texts = all(sample is None or isinstance(sample, (str, bytes)) for sample in samples)
        if path == "sample" or not texts:
            refuse_none(samples, path)
        if not texts:
            raise TypeError(f"collate: {path} is a text in some samples and not in others")
        return list(samples)
    if isinstance(first, Mapping):
        if any(not isinstance(s, Mapping) or s.keys() != first.keys() for s in samples):
            refuse_none(samples, path)
            raise ValueError(
                f"collate: {path} has keys {sorted(map(str, first))} in the first sample but not "
                "in all of them; give every sample the same keys, or a collate_fn of your own"
            )
        return DEEPER
    if isinstance(first, (list, tuple)):
        if any(not isinstance(s, (list, tuple)) or len(s) != len(first) for s in samples):
            refuse_none(samples, path)
            pads = " and use collate_fn=pad_collate()" if join_sequences is None else ""
            raise ValueError(
                f"collate: {path} is a sequence of {len(first)} in the first sample but not in "
                f"all of them; make ragged data arrays{pads}, or give a collate_fn of your own"
            )
        return DEEPER
    if not _is_array(first):
        raise TypeError(
            f"collate: {path} is a {type(first).__name__}, which cannot be stacked; return arrays, "
            "numbers, strings or containers of them, or give a collate_fn of your own"
        )
    if not all(map(_is_array, samples)):
        refuse_none(samples, path)
        raise TypeError(f"collate: {path} is a number in some samples and not in others")
    if any(kind.__module__ not in BARE for kind in set(map(type, samples))):
        _refuse_other_labels(samples, path)
        lost = next(filter(None, map(what_numpy_drops, samples)), "")
        if lost:
            sequences = join_sequences is not None and all(map(np.ndim, samples))
            return _stack_with(lost, samples, path, sequences)
    try:
        arrays = [np.asarray(sample) for sample in samples]
    except Exception as error:  # of a tensor: in bfloat16, sparse, with a gradient, on a device
        if breaks_in(error):
            raise
        raise TypeError(
            f"collate: {path} is a {type(first).__name__} that numpy cannot hold ({error}); "
            "convert it in transform, for example by .detach().float(), or give a collate_fn of "
            "your own"
        ) from error
    if join_sequences is None or any(array.ndim == 0 for array in arrays):
        return _stack(arrays, path)
    return join_sequences(arrays, path)


BARE = frozenset({"builtins", "numpy", "torch"})
"""Modules whose numbers, arrays and tensors have neither masks nor units nor names of columns."""


def what_numpy_drops(array: Any) -> str:
    """Return the name of what ``np.asarray`` would drop of an array; "" if that is nothing.

    That is the mask of a masked array, or the unit of a quantity (astropy, pint, unyt).
    """
    if isinstance(array, np.ndarray) and hasattr(array, "mask"):
        return "mask"
    if type(array).__module__ in BARE or labels(array):
        return ""
    units = [getattr(array, name, None) for name in ("unit", "units")]
    # A text is no unit: it is how pandas says the resolution of dates.
    return "unit" if any(unit is not None and not isinstance(unit, str) for unit in units) else ""


def labels(array: Any) -> dict[str, Any]:
    """Return the names of what an axis of an array counts, by the attribute that has them.

    Those are the columns of a data frame (pandas, polars, Arrow), the index of a series of pandas
    and the axes of an array of xarray.
    """
    if isinstance(array, np.ndarray) or type(array).__module__ in BARE:
        return {}
    names = ["column_names", "columns", "dims", "index"]
    found = {name: getattr(array, name, None) for name in names}
    if not isinstance(found["dims"], tuple):
        del found["dims"]  # h5py's data sets have scales of that name, which are none
    for name, value in found.items():
        if isinstance(value, Iterable):
            return {name: value}
    return {}


def _refuse_other_labels(samples: Sequence[Any], path: str) -> None:
    """Refuse to stack tables whose columns, or the like, are not the same in the same order."""
    first = labels(samples[0])
    for sample in samples[1:] if first else ():
        found = labels(sample)
        for name in first.keys() | found.keys():
            expected = np.asarray(first.get(name, ()), object)
            there_are = np.asarray(found.get(name, ()), object)
            if np.array_equal(expected, there_are):
                continue
            # Rows may be any; the same rows in another order are a mistake.
            if name != "index" or set(expected.tolist()) == set(there_are.tolist()):
                raise TypeError(
                    f"collate: {path} has {name} {brief_repr(expected.tolist())} in the first "
                    f"sample, but {brief_repr(there_are.tolist())} in another; bring them to one "
                    "order, or return arrays"
                )


def _stack_with(lost: str, samples: Sequence[Any], path: str, sequences: bool) -> Any:
    """Return arrays that have a mask or a unit as one that has it too.

    Args:
        lost: "mask" or "unit".
        samples: the arrays.
        path: which part of a sample they are, for messages.
        sequences: whether they are to be padded or packed, rather than stacked.
    """
    if sequences:
        refuse_loss(next(filter(what_numpy_drops, samples)), path)
    if lost == "mask":
        data = _stack([np.ma.getdata(sample) for sample in samples], path)
        mask = _stack([np.ma.getmaskarray(sample) for sample in samples], path)
        return np.ma.MaskedArray(data, mask)
    batch = np.stack(samples)
    if not what_numpy_drops(batch):
        refuse_loss(samples[0], path)
    return batch


def refuse_loss(array: Any, path: str) -> NoReturn:
    """Refuse an array that would lose its mask or its unit."""
    lost = what_numpy_drops(array)
    instead = {
        "mask": "x.filled(value), or x.data and np.ma.getmaskarray(x) apart",
        "unit": "plain numbers of one unit: x.to_value(unit), or x.to(unit).magnitude",
    }
    raise TypeError(
        f"{path} is a {type(array).__name__}, whose {lost} would be lost here; give {instead[lost]}"
    )


def _is_array(sample: Any) -> bool:
    return is_array_like(sample) or isinstance(sample, Number)


def shapes(arrays: list[NDArray[Any]]) -> str:
    """Return the shapes that some arrays have, the first four of them, for messages."""
    found = list(dict.fromkeys(array.shape for array in arrays))
    return ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")


def _stack(arrays: list[NDArray[Any]], path: str) -> NDArray[Any]:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(
            f"collate: {path} has shapes {shapes(arrays)}, which cannot be stacked; use "
            "collate_fn=pad_collate() to pad sequences to the longest"
        )
    batch = empty((len(arrays), *arrays[0].shape), _type_of_all(arrays, path))
    # For small arrays the time is in the calls, of which stack makes fewest.
    return np.stack(arrays, out=batch, casting="unsafe")


def _type_of_all(arrays: list[NDArray[Any]], path: str) -> np.dtype[Any]:
    """Return a type that holds some arrays.

    Of integers with a sign and without one numpy would make floats, which round large ones.

    Raises:
        ValueError: no integers hold them.
    """
    dtype = np.result_type(*{array.dtype for array in arrays})
    if dtype.kind != "f" or not all(array.dtype.kind in "bui" for array in arrays):
        return dtype
    if any((array < 0).any() for array in arrays):
        raise _no_integers_hold(path)
    return np.dtype(np.uint64)


def _no_integers_hold(path: str) -> ValueError:
    """Return the error for integers with a sign and large ones without."""
    return ValueError(
        f"{path} has integers below 0 and of type uint64, perhaps above {2**63 - 1}, which no "
        "type of integers holds together; convert them to one type in transform"
    )


def refuse_none(samples: Sequence[Any], path: str) -> None:
    """Refuse samples, or the same part of each, of which some are None."""
    found = [n for n, sample in enumerate(samples) if sample is None]
    if found:
        more = f", and in {len(found) - 1} more of them" if len(found) > 1 else ""
        raise TypeError(
            f"collate: {path} is None in sample {found[0]} of the {len(samples)} of a batch{more}; "
            "have the dataset and transform return something for every index, or minloader.SKIP "
            "for a sample to leave out"
        )
