"""The arrays of a job: large ones lie in its file, or stay in the file or memory where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from minloader._memory.arrays import order_in_memory, owner_of, transpose_back, view_as, view_of
from minloader._memory.files import LARGE
from minloader._memory.reducers import JobMemory, as_it_is


def reduce_in_job(memory: JobMemory, array: Any) -> Any:
    """Reduce an array of a job, where numpy's own way would read a whole file or copy the data."""
    is_mapped = type(array).__name__ == "memmap" and array.filename is not None
    is_mapped = is_mapped and array.mode in ("r", "r+", "w+")
    has_gaps = not array.flags.forc and order_in_memory(array) is None
    if (has_gaps or not is_mapped) and _may_be_shared(array):
        from minloader._memory.shared_arrays import reduce_shared  # of few jobs

        shared = reduce_shared(memory, array)
        if shared is not None:
            return shared
    if array.dtype.kind in "mM":
        return view_as, (array.view(np.int64), array.dtype)
    if not array.flags.forc:
        # Only contiguous arrays leave the stream by themselves.
        if array.dtype.hasobject:
            return as_it_is(array)
        if type(array) is np.ndarray and array.nbytes >= LARGE:
            spanned, offset = _span(array)
            if spanned.nbytes < array.nbytes:  # it overlaps itself: sliding windows, broadcasts
                view = array.dtype, array.shape, array.strides, array.flags.writeable
                return view_of, (spanned, offset, *view)
        if (axes := order_in_memory(array)) is not None:
            return transpose_back, (array.transpose(axes), axes)
        _note_copy(memory, array)
        if array.nbytes < LARGE:
            return as_it_is(array)
        block = np.array(array, order="C")  # a plain array: of a memmap, the copy is none
        block.flags.writeable = array.flags.writeable
        return as_it_is(block)
    if is_mapped:
        from minloader._memory.shared_arrays import reduce_memmap

        return reduce_memmap(memory, array)
    _note_copy(memory, array)
    if type(array) is not np.ndarray:  # of a memmap, numpy writes the data into the stream
        return view_as, (array.view(np.ndarray), type(array))
    return as_it_is(array)


def _note_copy(memory: JobMemory, array: Any) -> None:
    base = array.base
    if type(base) is type(array):  # a view of another one
        _, size = memory.copies.get(id(base), (base, 0))
        memory.copies[id(base)] = base, size + array.nbytes


def _span(array: Any) -> tuple[Any, int]:
    """Return the memory that an array spans, as one of bytes, and where its first element is."""
    steps = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    size = before + sum(step for step in steps if step > 0) + array.itemsize
    lowest = tuple(slice(-1, None) if step < 0 else slice(1) for step in steps)
    first = array[lowest].reshape(1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,)), before


def _may_be_shared(array: Any) -> bool:
    """Whether an array may be over memory that others have too: neither numpy's own nor bytes."""
    owner = owner_of(array)
    if isinstance(owner, np.ndarray):
        return not owner.flags.owndata
    return not isinstance(owner, bytes | bytearray)
