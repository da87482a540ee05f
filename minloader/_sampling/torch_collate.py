"""Samples to batch as torch's default_collate does, without torch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np

from minloader._checks import shown
from minloader._memory.pickling import PLAIN_DTYPES, _tensor
from minloader._memory.slot_writer import empty


class Leaf:
    """An array that arrives as a tensor.

    Args:
        array: of a type that torch has too.
        dtype: torch's type, where numpy has none like it and the array holds its bits.
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: Any, dtype: Any = None) -> None:
        self.array = array
        self.dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor, (self.array, self.dtype)


_TEXT = frozenset("SaUO")


def _refuse(what: Any) -> TypeError:
    return TypeError(
        "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
        f"found {what}; return such, or give a collate_fn of your own"
    )


def collate(samples: Sequence[Any]) -> Any:
    """Makes one batch of many samples, as torch's ``default_collate`` does.

    Numbers, arrays and tensors are stacked along a new first axis and arrive as tensors (Python
    floats as float64); mappings, tuples (as lists), named tuples and other sequences are walked;
    strings and bytes stay as they are.

    Args:
        samples: at least one, all of the same structure.

    Raises:
        TypeError: there is a sample of a type that torch has no tensors of, or None.
        RuntimeError: the samples differ in shape, or in the length of a sequence.
        KeyError: they differ in their keys.
    """
    first = samples[0]
    if _is_tensor(first):
        return _stack_tensors(samples)
    if isinstance(first, np.ndarray):
        return _stack(samples)
    if isinstance(first, np.number | np.bool_ | float | int):
        return _stack_numbers(samples)
    if isinstance(first, str | bytes):
        return samples
    if isinstance(first, Mapping):
        return mapping_like(first, {key: collate([s[key] for s in samples]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(collate, zip(*samples, strict=False)))
    if isinstance(first, Sequence):
        if any(len(sample) != len(first) for sample in samples):
            raise RuntimeError(
                "each element in list of batch should be of equal size, but the first has "
                f"{len(first)}; bring them to one size, or give a collate_fn of your own"
            )
        return sequence_like(first, [collate(column) for column in zip(*samples, strict=True)])
    raise _refuse(type(first))


def convert(sample: Any) -> Any:
    """Lets arrays and numpy's numbers in a sample arrive as tensors, as ``default_convert`` does.

    Raises:
        TypeError: there is an array of a type that torch has no tensors of.
    """
    kind = type(sample)
    if kind.__module__ == "numpy" and isinstance(sample, np.ndarray | np.generic):
        if isinstance(sample, np.str_) or (kind is np.ndarray and sample.dtype.char in _TEXT):
            return sample
        return Leaf(_native(np.asarray(sample)))
    if isinstance(sample, Mapping):
        return mapping_like(sample, {key: convert(sample[key]) for key in sample})
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return kind(*map(convert, sample))
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return sequence_like(sample, list(map(convert, sample)))
    return sample


def mapping_like(like: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same type, with what else it may hold; a dict where that cannot be made."""
    if type(like) is dict:
        return values
    try:
        if not isinstance(like, MutableMapping):
            return type(like)(values)
        made = copy.copy(like)
        made.update(values)
        return made
    except TypeError:
        return values


def sequence_like(like: Any, values: list[Any]) -> Any:
    """A sequence of the same type, but tuples become lists, and so does what cannot be made."""
    if isinstance(like, tuple) or type(like) is list:
        return values
    try:
        if not isinstance(like, MutableSequence):
            return type(like)(values)
        made = copy.copy(like)
        for index, value in enumerate(values):
            made[index] = value
        return made
    except TypeError:
        return values


def _native(array: Any) -> Any:
    """The array in this machine's byte order, if torch has its type."""
    if array.dtype.char not in PLAIN_DTYPES:
        raise TypeError(
            f"there are no tensors of numpy's {array.dtype}; convert it in the dataset, to one of "
            "bool, int8 to int64, uint8 to uint64, float16 to float64, complex64 or complex128"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _stack(arrays: Sequence[Any]) -> Leaf:
    first = arrays[0]
    if first.dtype.char in _TEXT:
        raise _refuse(first.dtype)
    if any(array.dtype != first.dtype for array in arrays) or not first.dtype.isnative:
        dtype = _common({_native(array).dtype for array in arrays})
    else:
        dtype = _native(first).dtype
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


def _common(dtypes: set[Any]) -> Any:
    """The type of a mixture. Whatever its size, an integer does not widen a float, as in torch."""
    for kinds in ("fc", "iu"):
        if of_kind := [dtype for dtype in dtypes if dtype.kind in kinds]:
            return np.result_type(*of_kind)
    return np.dtype(bool)


def _stack_numbers(numbers: Sequence[Any]) -> Leaf:
    first = numbers[0]
    if isinstance(first, np.generic):
        dtypes = {
            np.dtype("f") if type(n) is float else _native(np.asarray(n)).dtype for n in numbers
        }
        return Leaf(np.array(numbers, _common(dtypes)))
    if isinstance(first, float):
        return Leaf(np.array(numbers, np.float64))
    array = np.array(numbers)
    if array.dtype.kind == "f":  # whole numbers first, then others
        array = array.astype(np.float32)
    elif array.dtype.kind not in "bi":
        large = all(isinstance(number, int) for number in numbers)
        raise (ValueError if large else RuntimeError)(
            f"cannot make a tensor of {shown(numbers)}: not all are numbers that int64 can hold"
        )
    return Leaf(array)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _stack_tensors(tensors: Sequence[Any]) -> Any:
    """Stacks into the slot, without a copy between."""
    torch: Any = sys.modules["torch"]
    first = tensors[0]
    if first.is_nested or first.layout != torch.strided:
        raise RuntimeError(
            f"cannot stack {'nested' if first.is_nested else 'sparse'} tensors by default; give a "
            "collate_fn of your own"
        )
    dtype = _numpy_type(torch, first.dtype)
    if dtype is None or type(first) is not torch.Tensor or first.device.type != "cpu":
        return torch.stack(list(tensors))
    batch = empty((len(tensors), *first.shape), dtype)
    out = torch.from_numpy(batch)
    bits = first.dtype is torch.bfloat16
    torch.stack(list(tensors), out=out.view(first.dtype) if bits else out)
    return Leaf(batch, first.dtype if bits else None)


_numpy_types: dict[Any, Any] = {}


def _numpy_type(torch: Any, dtype: Any) -> Any:
    """Numpy's type that a tensor's numbers, or their bits, are written as; None: there is none."""
    if dtype not in _numpy_types:
        if dtype is torch.bfloat16:
            _numpy_types[dtype] = np.dtype(np.int16)
        else:
            try:
                _numpy_types[dtype] = torch.empty(0, dtype=dtype).numpy().dtype
            except TypeError:
                _numpy_types[dtype] = None
    return _numpy_types[dtype]
