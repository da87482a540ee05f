"""Make one batch of samples: :func:`collate` stacks them, :class:`pad_collate` pads them first.

Both run where the batch is made, normally in a worker process, and write the arrays of the batch
directly into the shared memory that it travels in (:func:`minloader.empty`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minloader._checks import check_int, refuse_none
from minloader._memory.slot_writer import empty
from minloader._sampling.walk import DEEPER, plain, walk


class Padded(NamedTuple):
    """Sequences of different lengths as one array.

    Attributes:
        values: array of shape ``(n, longest, ...)``: one row for each sequence, padded.
        lengths: array of shape ``(n,)``, int64: number of entries of each row that are no padding.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]


def collate(samples: Sequence[Any]) -> Any:
    """Make one batch of samples, with the structure of one sample.

    Runs where the batch is made, normally in a worker process. Arrays (and whatever converts to
    one by ``__array__``, such as CPU tensors) are stacked along a new first axis: ``n`` arrays of
    shape ``s`` become one of shape ``(n, *s)``, of a type that holds them all. Numbers become an
    array of shape ``(n,)``. Mappings become dicts; tuples, named tuples and lists are walked.
    Strings and bytes become lists, and so does a part that is None in all samples.

    Args:
        samples: at least one sample.

    Returns:
        The batch, which shares no memory with the samples.

    Raises:
        ValueError: the samples differ in shape, length or keys, or there are none.
        TypeError: a sample is of a type that cannot be stacked, or is None.
    """
    return join(samples)


@dataclass(frozen=True)
class pad_collate:  # noqa: N801  # used as a function, like collate
    """A ``collate_fn`` that pads sequences along their first axis to the longest of the batch.

    ``collate_fn=pad_collate()`` runs where the batch is made, normally in a worker process. Every
    array of at least one dimension, and every list of numbers, becomes a :class:`Padded` pair:
    ``values`` of shape ``(n, longest, ...)`` and ``lengths`` of shape ``(n,)``. All else is
    collated as by :func:`collate`.

    Args:
        value: what to pad with. The type of the arrays must be able to hold it.
        multiple_of: the padded length is rounded up to a multiple of this number of entries.

    Raises:
        TypeError, ValueError: ``multiple_of`` is not an int, or below 1. When called, also: the
            sequences differ in more than their first axis, or cannot hold ``value``; and whatever
            :func:`collate` raises.
    """

    value: Any = 0
    multiple_of: int = 1

    def __post_init__(self) -> None:
        refuse_samples("pad_collate", self.value)
        check_int("multiple_of", self.multiple_of, 1)

    def __call__(self, samples: Sequence[Any]) -> Any:
        return join(samples, self._pad)

    def _pad(self, arrays: list[NDArray[Any]], path: str) -> Any:
        dtype = common_dtype("pad_collate", arrays, path, self.value)
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        longest = -(-int(lengths.max()) // self.multiple_of) * self.multiple_of
        values = empty((len(arrays), longest, *arrays[0].shape[1:]), dtype)
        values[...] = self.value
        for row, array in zip(values, arrays, strict=True):
            row[: len(array)] = array
        return Padded(values, lengths)


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
        arrays: the sequences.
        path: which part of a sample they are, for messages.
        value: what to pad them with.

    Raises:
        ValueError: they differ in more than their first axis, or cannot hold ``value``.
    """
    if len({array.shape[1:] for array in arrays}) > 1:
        raise ValueError(
            f"{name}: {path} has shapes {_shapes(arrays)}, which differ in more than their first "
            "axis, the only one that may differ; bring the others to one size in transform"
        )
    dtype = np.result_type(*arrays)
    if not _fits(value, dtype):
        raise ValueError(
            f"{name}: value={value!r} cannot pad {path}, which has dtype {dtype}; give a value of "
            "that type, or convert the arrays in transform"
        )
    return dtype


def _fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array of this type can hold the value, exactly or as nearly as floats can."""
    try:
        kept = np.full((), value, dtype)
    except (OverflowError, TypeError, ValueError):
        return False
    # NaN differs from itself.
    return dtype.kind in "fcO" or bool(kept == value)


def numbers_as_array(sample: Any) -> Any:
    """Return the array of a list of numbers, which is a sequence to pad; all else as it is."""
    if isinstance(sample, list) and all(isinstance(value, Number) for value in sample):
        return np.asarray(sample) if sample else np.empty(0, dtype=np.int64)
    return sample


def join(
    samples: Sequence[Any], join_sequences: Callable[[list[NDArray[Any]], str], Any] | None = None
) -> Any:
    """Return one batch of samples that have the same structure.

    Args:
        samples: the samples.
        join_sequences: joins arrays of at least one dimension, which lists of numbers are then;
            it is given their path too. None: all arrays are stacked.
    """
    return walk(samples, partial(_joined, join_sequences or _stack, bool(join_sequences)), plain)


def _joined(join: Any, has_sequences: bool, samples: Sequence[Any], path: str) -> Any:
    """The policy of all three functions: returns the array of a part of the samples."""
    if has_sequences:
        samples = [numbers_as_array(sample) for sample in samples]
    if not len(samples):
        raise ValueError("collate: there are no samples; an item must name at least one index")
    first = samples[0]
    if first is None or isinstance(first, (str, bytes)):
        # A part may be missing in all samples, and a text in some. A sample may not.
        texts = all(sample is None or isinstance(sample, (str, bytes)) for sample in samples)
        if path == "sample" or not texts:
            refuse_none(samples, path)
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
            raise ValueError(
                f"collate: {path} is a sequence of {len(first)} in the first sample but not in "
                "all of them; make ragged data arrays and use collate_fn=pad_collate()"
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
    arrays = [np.asarray(sample) for sample in samples]
    if any(array.ndim == 0 for array in arrays):
        join = _stack
    return join(arrays, path)


def _is_array(sample: Any) -> bool:
    return hasattr(sample, "__array__") or isinstance(sample, Number)


def _shapes(arrays: list[NDArray[Any]]) -> str:
    shapes = list(dict.fromkeys(array.shape for array in arrays))
    return ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")


def _stack(arrays: list[NDArray[Any]], path: str) -> NDArray[Any]:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(
            f"collate: {path} has shapes {_shapes(arrays)}, which cannot be stacked; use "
            "collate_fn=pad_collate() to pad sequences to the longest"
        )
    dtype = np.result_type(*{array.dtype for array in arrays})
    batch = empty((len(arrays), *arrays[0].shape), dtype)
    # For small arrays the time is in the calls, of which stack makes fewest.
    return np.stack(arrays, out=batch)
