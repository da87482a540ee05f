"""Collate samples as torch's ``default_collate`` does, where they are alike without torch.

Runs where batches are made, normally in a worker process. What becomes a tensor in the parent is
an array here. So torch is needed only for tensors, and for samples that are not alike.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from minloader._memory.arrays import is_plain
from minloader._memory.slot_writer import empty
from minloader._memory.tensors import as_tensor, is_plain_tensor, numpy_like
from minloader._sampling.collate import refuse_loss, refuse_none, what_numpy_drops
from minloader._sampling.walk import DEEPER, same_container, walk


@dataclass(slots=True, eq=False)
class CollatedLeaf:
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
    Strings and bytes stay as they are. What is not alike in all samples is left to torch itself.

    Args:
        samples: at least one, all of the same structure.

    Raises:
        TypeError: torch has no tensors of the type of a sample, or a sample is None, or a tensor
            would lose its mask or its unit.
        RuntimeError: the samples differ in shape, or in the length of a sequence.
        KeyError: the samples differ in their keys.
    """
    return walk(samples, _collated, _alike)


_PLAIN = frozenset({list, tuple, range, dict, OrderedDict, defaultdict, deque, UserDict, UserList})


def _has_code(value: Any) -> bool:
    """Whether a container's type may look at what is put into it."""
    kind = type(value)
    return kind not in _PLAIN and kind.__bases__ != (tuple,)  # those of a named tuple


def _alike(like: Any, values: Any) -> Any:
    """Return a container like another. One with code of its own sees tensors, as with torch."""
    return same_container(
        like, walk([values], _arrived, same_container) if _has_code(like) else values
    )


def _arrived(parts: Sequence[Any], path: str) -> Any:
    """A policy: tensors in the place of what arrives as one. Containers with code have them."""
    (part,) = parts
    if type(part) is CollatedLeaf:
        return as_tensor(part.array, part.dtype)
    return part if _has_code(part) else DEEPER


def _collated(samples: Sequence[Any], path: str) -> Any:
    """The policy of :func:`collate`."""
    first = samples[0]
    if isinstance(first, str | bytes):
        return samples
    if isinstance(first, np.ndarray) and what_numpy_drops(first):
        refuse_loss(first, path)
    made = _stacked(samples) if len(set(map(type, samples))) == 1 else None
    if made is not None:
        return made
    refuse_none(samples, path)
    if isinstance(first, Mapping):
        return DEEPER
    if isinstance(first, Sequence) and len(set(map(len, samples))) == 1:
        return DEEPER
    torch: Any = importlib.import_module("torch")
    # Of these torch would, in a worker, make the type of the first.
    plain = set(map(type, samples)) == {torch.Tensor} and all(map(is_plain_tensor, samples))
    if plain or isinstance(first, np.ndarray):
        return torch.stack(list(map(torch.as_tensor, samples)))
    return torch.utils.data.default_collate(samples)


def _stacked(samples: Sequence[Any]) -> CollatedLeaf | None:
    """Return samples of one type as one array; None where they are no numbers, or not alike."""
    first = samples[0]
    torch = sys.modules.get("torch")
    if isinstance(first, np.ndarray):
        if is_plain(first.dtype) and len({(array.dtype, array.shape) for array in samples}) == 1:
            batch = empty((len(samples), *first.shape), first.dtype.newbyteorder("="))
            return CollatedLeaf(np.stack(samples, out=batch))
    elif isinstance(first, np.generic | float | int):
        numbers = np.array(samples)
        # Python's ints that are too large for torch: numpy has unsigned ones, or makes floats.
        refused = isinstance(first, int) and numbers.dtype.kind in "uf"
        if is_plain(numbers.dtype) and not refused:
            return CollatedLeaf(numbers)
    elif torch is not None and type(first) is torch.Tensor and is_plain_tensor(first):
        dtype = first.dtype
        like = numpy_like(dtype)
        if len({each.dtype for each in samples}) > 1:
            return None  # torch.stack would cast them, and large numbers wrap
        batch = empty(
            (len(samples), *first.shape), torch.empty(0, dtype=like, device="cpu").numpy().dtype
        )
        with suppress(RuntimeError):  # they differ, or one requires a gradient
            torch.stack(list(samples), out=as_tensor(batch, dtype))
            return CollatedLeaf(batch, None if like is dtype else dtype)
    return None


def convert(sample: Any) -> Any:
    """Mark what arrives as a tensor in a single sample, as torch's ``default_convert`` does.

    Arrays and numpy's numbers arrive as tensors, wherever they are in containers. All else stays
    as it is.

    Raises:
        TypeError: torch has no tensors of the type of an array.
    """
    return walk([sample], _converted, _alike)


def _converted(parts: Sequence[Any], path: str) -> Any:
    """The policy of :func:`convert`."""
    (value,) = parts
    kind = type(value)
    if kind.__module__ != "numpy" or not isinstance(value, np.ndarray | np.generic):
        return DEEPER
    array = np.asarray(value)
    if is_plain(array.dtype):
        return CollatedLeaf(array.astype(array.dtype.newbyteorder("="), copy=False))
    return importlib.import_module("torch.utils.data").default_convert(value)
