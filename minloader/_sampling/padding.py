"""Make one batch of samples whose sequences are padded to one length.

This runs where the batch is made, normally in a worker process, and writes the arrays of the batch
directly into the shared memory that it travels in (:func:`minloader.empty`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import checked_choice, checked_int
from minloader._formats import brief_repr
from minloader._memory.slot_writer import empty
from minloader._sampling.collate import common_dtype, join, refuse_samples, shapes

MOST_AXES = 64
"""Of an array of numpy's."""


class Padded(NamedTuple):
    """Sequences of different lengths as one array.

    Attributes:
        values: array of shape ``(n, longest, ...)``: one row for each sequence, padded. If another
            axis is padded, ``longest`` is the size of that one.
        lengths: array of shape ``(n,)``, int64: number of entries of each row that are no padding.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class pad_collate:  # noqa: N801  # used as a function, like collate
    """A ``collate_fn`` that pads sequences to the longest of the batch, along one axis.

    ``collate_fn=pad_collate()`` runs where the batch is made, normally in a worker process. Every
    array of at least one dimension, and every list of numbers, becomes a :class:`Padded` pair:
    ``values`` of shape ``(n, longest, ...)`` and ``lengths`` of shape ``(n,)``. All else is
    collated as by :func:`collate`.

    Each argument may be a dict, with the keys of samples that are dicts, or the places of those
    that are tuples. Parts that it does not name, and what is within them, have the default. ::

        pad_collate(value={"labels": -100}, axis={"features": 1})

    Args:
        value: what to pad with. The type of the arrays must be able to hold it.
        multiple_of: the padded length is rounded up to a multiple of this number of entries.
        side: where the padding is: "right", behind the sequence, or "left".
        axis: of each array that may differ in length, and is padded; from the end if negative.

    Raises:
        TypeError, ValueError: ``multiple_of`` or ``axis`` is not an int, ``multiple_of`` is below
            1, or ``side`` is neither. When called, also: a dict names a part that samples do not
            have; an array does not have the axis; the sequences differ in another one, or cannot
            hold ``value``; and whatever :func:`collate` raises.
    """

    value: Any = 0
    multiple_of: int | Mapping[Any, int] = 1
    side: str | Mapping[Any, str] = "right"
    axis: int | Mapping[Any, int] = 0

    def __post_init__(self) -> None:
        refuse_samples("pad_collate", self.value)
        self._check("value", lambda name, given: given)
        self._check("multiple_of", lambda name, given: checked_int(name, given, 1))
        self._check("side", lambda name, given: checked_choice(name, given, ("right", "left")))
        self._check("axis", lambda name, given: checked_int(name, given, -MOST_AXES, MOST_AXES - 1))

    def _check(self, name: str, checked: Callable[[str, Any], Any]) -> None:
        """Have an argument, or each value of a dict, be what its check returns of it."""
        given = getattr(self, name)
        if isinstance(given, Mapping):
            found: Any = {key: checked(f"{name}[{key!r}]", value) for key, value in given.items()}
        else:
            found = checked(name, given)
        object.__setattr__(self, name, found)

    def __call__(self, samples: Sequence[Any]) -> Any:
        if len(samples):
            self._refuse_other_parts(samples[0])
        return join(samples, self._pad)

    def _refuse_other_parts(self, sample: Any) -> None:
        """Refuse a dict of an argument that names what the first sample does not have."""
        parts: Any = ()
        if isinstance(sample, Mapping):
            parts = sample.keys()
        elif isinstance(sample, list | tuple):
            parts = range(len(sample))
        for field in fields(self):
            given = getattr(self, field.name)
            others = [key for key in given if key not in parts] if isinstance(given, dict) else []
            if others:
                raise ValueError(
                    f"pad_collate: {field.name} names {others[0]!r}, which is no part of a sample; "
                    f"it has {brief_repr(list(parts)) if parts else 'no parts'}"
                )

    def _of_part(self, name: str, path: str) -> Any:
        """Return what an argument says of the part of samples with that path."""
        given = getattr(self, name)
        if not isinstance(given, dict):
            return given
        for key, value in given.items():
            part = f"sample[{key!r}]"
            if path == part or path.startswith(f"{part}["):
                return value
        return getattr(type(self), name)

    def _padded_length(self, lengths: NDArray[np.int64], path: str) -> int:
        """Return how long all become, of sequences of these lengths."""
        multiple_of: int = self._of_part("multiple_of", path)
        return -(-int(lengths.max()) // multiple_of) * multiple_of

    def _pad(self, arrays: list[NDArray[Any]], path: str) -> Any:
        value = self._of_part("value", path)
        is_left = self._of_part("side", path) == "left"
        axis = self._of_part("axis", path)
        if axis or len({array.shape[1:] for array in arrays}) > 1:
            arrays = _with_first(axis, arrays, path)
        dtype = common_dtype("pad_collate", arrays, path, value)
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        longest = self._padded_length(lengths, path)
        shape = [len(arrays), longest, *arrays[0].shape[1:]]
        at = 1 + axis % arrays[0].ndim  # of the batch
        shape.insert(at, shape.pop(1))
        values = empty(tuple(shape), dtype)
        values[...] = value
        for row, array in zip(np.moveaxis(values, at, 1), arrays, strict=True):
            start = longest - len(array) if is_left else 0
            row[start : start + len(array)] = array
        return Padded(values, lengths)


def _with_first(axis: int, arrays: list[NDArray[Any]], path: str) -> list[NDArray[Any]]:
    """Return views of arrays whose first axis is another one of theirs.

    Raises:
        ValueError: they do not have it, or differ in another one.
    """
    there_are = f"pad_collate: axis={axis}, but {path} has shapes {shapes(arrays)}"
    if not all(-array.ndim <= axis < array.ndim for array in arrays):
        raise ValueError(
            f"{there_are}; give the axis of each part by a dict, such as axis={{'features': 1}}"
        )
    views = [np.moveaxis(array, axis, 0) for array in arrays]
    if len({view.shape[1:] for view in views}) > 1:
        raise ValueError(
            f"{there_are}, which differ in another axis; say by axis which one is padded, and "
            "bring others to one size in transform"
        )
    return views
