"""Collate samples as torch's ``default_collate`` does, without torch.

Runs where batches are made, normally in a worker process. What becomes a tensor in the parent is
an array here, so that torch is needed only if the dataset returns tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minloader._checks import refuse_none, shown
from minloader._memory.pickling import PLAIN_DTYPES
from minloader._memory.slot_writer import empty
from minloader._memory.tensors import as_tensor, numpy_like
from minloader._sampling.walk import DEEPER, alike, walk

TEXT = "SaUO"
"""Kinds of numpy's types that torch leaves as they are: strings, bytes and objects."""


@dataclass(slots=True, eq=False)
class Leaf:
    """An array that arrives as a tensor over the same memory.

    Attributes:
        array: of a type that torch has too.
        dtype: torch's type if numpy has none like it, and the array holds the bits. None: that
            of the array.
    """

    array: Any
    dtype: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return as_tensor, (self.array, self.dtype)


def collate(samples: Sequence[Any]) -> Any:
    """Make one batch of many samples, as torch's ``default_collate`` does.

    Numbers, arrays and tensors are stacked along a new first axis and arrive as tensors (Python
    floats as float64). Mappings, tuples (as lists), named tuples and other sequences are walked.
    Strings and bytes stay as they are.

    Args:
        samples: at least one, all of the same structure.

    Raises:
        TypeError: torch has no tensors of the type of a sample, or a sample is None.
        RuntimeError: the samples differ in shape, or in the length of a sequence.
        KeyError: the samples differ in their keys.
    """
    return walk(samples, _collated, alike)


def _collated(samples: Sequence[Any], path: str) -> Any:
    """The policy of :func:`collate`."""
    first = samples[0]
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(first, torch.Tensor):
            return _stack_tensors(torch, samples)
        if isinstance(first, np.ndarray):
            return _stack(samples)
        if isinstance(first, np.number | np.bool_ | float | int):
            return _stack_numbers(samples)
    except (TypeError, AttributeError):
        refuse_none(samples, path)
        raise
    if isinstance(first, str | bytes):
        return samples
    refuse_none(samples, path)
    if not isinstance(first, Mapping | Sequence):
        raise _cannot_collate(type(first))
    if not isinstance(first, Mapping) and any(len(sample) != len(first) for sample in samples):
        raise RuntimeError(
            "each element in list of batch should be of equal size, but the first has "
            f"{len(first)}; bring them to one size, or give a collate_fn of your own"
        )
    return DEEPER


def convert(sample: Any) -> Any:
    """Mark what arrives as a tensor in a single sample, as torch's ``default_convert`` does.

    Arrays and numpy's numbers arrive as tensors, wherever they are in containers. All else stays
    as it is.

    Raises:
        TypeError: torch has no tensors of the type of an array.
    """
    return walk([sample], _converted, alike)


def _converted(parts: Sequence[Any], path: str) -> Any:
    """The policy of :func:`convert`."""
    (value,) = parts
    kind = type(value)
    if kind.__module__ != "numpy" or not isinstance(value, np.ndarray | np.generic):
        return DEEPER
    if isinstance(value, np.str_) or (kind is np.ndarray and value.dtype.char in TEXT):
        return value
    array = np.asarray(value)
    return Leaf(array.astype(_native(array.dtype), copy=False))


def _cannot_collate(what: Any) -> TypeError:
    return TypeError(
        "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
        f"found {what}; return such, or give a collate_fn of your own"
    )


def _native(dtype: Any) -> Any:
    """Return a numpy type in this machine's byte order, if torch has that type."""
    if dtype.char not in PLAIN_DTYPES:
        raise TypeError(
            f"there are no tensors of numpy's {dtype}; convert it in the dataset, to one of "
            "bool, int8 to int64, uint8 to uint64, float16 to float64, complex64 or complex128"
        )
    return dtype.newbyteorder("=")


def _common(dtypes: set[Any]) -> Any:
    """Return the type of a mixture. As in torch, no integer widens a float, whatever its size."""
    for kinds in ("fc", "iu"):
        if of_kind := [dtype for dtype in dtypes if dtype.kind in kinds]:
            return np.result_type(*of_kind)
    return np.dtype(bool)


def _stack(arrays: Sequence[Any]) -> Leaf:
    first = arrays[0]
    if first.dtype.char in TEXT:
        raise _cannot_collate(first.dtype)
    dtype = _common({_native(each) for each in {array.dtype for array in arrays}})
    for n, array in enumerate(arrays):
        if array.shape != first.shape:
            raise RuntimeError(
                f"cannot stack arrays of different shapes: {first.shape} in sample 0, "
                f"{array.shape} in sample {n}; stack expects each tensor to be equal size"
            )
    batch = empty((len(arrays), *first.shape), dtype)
    # Of 0-d arrays the results are numbers rather than arrays, which stack needs.
    np.stack(arrays, out=batch, casting="unsafe")
    return Leaf(batch)


def _stack_numbers(numbers: Sequence[Any]) -> Leaf:
    if isinstance(numbers[0], np.generic):
        # A Python float among numpy's numbers counts as torch's default type.
        kinds = {np.dtype("f") if type(n) is float else np.asarray(n).dtype for n in numbers}
        return Leaf(np.array(numbers, _common(set(map(_native, kinds)))))
    if isinstance(numbers[0], float):
        refuse_none(numbers)  # numpy takes it for NaN
        return Leaf(np.array(numbers, np.float64))
    array = np.array(numbers)
    if array.dtype.kind == "f":  # whole numbers first, then others
        array = array.astype(np.float32)
    elif array.dtype.kind not in "bi":
        refuse_none(numbers, error=RuntimeError)
        large = all(isinstance(number, int) for number in numbers)
        raise (ValueError if large else RuntimeError)(
            f"cannot make a tensor of {shown(numbers)}: not all are numbers that int64 can hold"
        )
    return Leaf(array)


def _stack_tensors(torch: Any, tensors: Sequence[Any]) -> Any:
    """Stack tensors into the slot, without a copy between; what is more than numbers, anywhere."""
    first = tensors[0]
    if first.is_nested or first.layout != torch.strided:
        raise RuntimeError(
            f"cannot stack {'nested' if first.is_nested else 'sparse'} tensors by default; give a "
            "collate_fn of your own"
        )
    if type(first) is not torch.Tensor or first.device.type != "cpu" or first.is_quantized:
        return torch.stack(list(tensors))
    dtype, like = first.dtype, numpy_like(first.dtype)
    batch = empty((len(tensors), *first.shape), torch.empty(0, dtype=like).numpy().dtype)
    torch.stack(list(tensors), out=as_tensor(batch, dtype))
    return Leaf(batch, None if like is dtype else dtype)
