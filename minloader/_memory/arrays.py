"""Numpy's arrays on their way between processes: small ones in the stream, large ones beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from minloader._memory.files import LARGE
from minloader._memory.reducers import as_it_is
from minloader._memory.slot_writer import NoSlot


def reduce_in_batch(writer: NoSlot, array: Any) -> Any:
    """Reduce an array of a batch such that its data is one writable buffer, for the user to change.

    numpy itself leaves only contiguous arrays out of the stream, and never a memmap; and what
    it writes of a type takes longer than small arrays do. The axes keep their order in memory.
    """
    dtype = array.dtype
    flags = array.flags
    is_small = array.nbytes < LARGE and dtype.isnative and is_plain(dtype)
    is_small = is_small and dtype.metadata is None  # such as the names of h5py's enumerations
    axes = None if flags.c_contiguous else order_in_memory(array)
    if is_small and axes is None:
        return np.ndarray, (array.shape, dtype.char, bytearray(array.tobytes()))
    whole = flags.forc and flags.writeable and type(array).__name__ == "ndarray"
    if dtype.kind in "mM":  # numpy writes datetime64 and timedelta64 into the stream
        return view_as, (array.view("i8"), dtype)
    if dtype.hasobject or (whole and not is_small):
        return as_it_is(array)
    if axes is not None:
        return transpose_back, (array.transpose(axes), axes)
    block = writer.empty(array.shape, dtype)
    block[...] = array
    return as_it_is(block)


def reduce_subclass(place: Any, array: Any) -> Any:
    """Reduce an array of a class that leaves to numpy how it is pickled: numpy copies the data."""
    kind = type(array)
    names = "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"
    if all(getattr(kind, name, None) is getattr(np.ndarray, name, None) for name in names):
        return view_as, (array.view(np.ndarray), kind)
    return as_it_is(array)


def owner_of(array: Any) -> Any:
    """Return what has the memory that an array is a view of."""
    owner: Any = array
    while True:
        if isinstance(owner, memoryview):
            base = owner.obj
        elif isinstance(owner, np.ndarray) or type(owner).__module__.startswith("numpy."):
            base = owner.base  # numpy's as_strided has a class of its own in between
        else:
            return owner
        if base is None:
            return owner
        owner = base


def address_of(array: Any) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


_PLAIN = frozenset("?bBhHiIlLqQefdFD")


def is_plain(dtype: Any) -> bool:
    """Whether numpy's one-letter code is enough to describe a type, and torch has tensors of it."""
    return bool(dtype.char in _PLAIN and dtype.isbuiltin < 2)  # 2: of ml_dtypes


def order_in_memory(array: Any) -> tuple[int, ...] | None:
    """Return the axes of an array, that of the longest steps first; None if they are in order.

    Those of a broadcast array are, since they share their steps.
    """
    steps = [abs(step) for step in array.strides]
    axes = sorted(range(array.ndim), key=steps.__getitem__, reverse=True)
    return None if 0 in steps or axes == list(range(array.ndim)) else tuple(axes)


def view_of(
    owner: Any, offset: int, dtype: Any, shape: Any, strides: Any, is_writable: bool
) -> Any:
    """Return an array over the memory that an object has."""
    array: Any = np.ndarray(shape, dtype, buffer=owner, offset=offset, strides=strides)
    array.flags.writeable = is_writable and array.flags.writeable
    return array


def view_as(array: Any, kind: Any) -> Any:
    """Return a view of an array, of another dtype or class."""
    return array.view(kind)


def transpose_back(array: Any, axes: tuple[int, ...]) -> Any:
    """Undo ``array.transpose(axes)``."""
    return array.transpose(sorted(range(len(axes)), key=axes.__getitem__))
