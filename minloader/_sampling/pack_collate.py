"""Make one batch of samples that share rows, without padding between them.

Runs where the batch is made, normally in a worker process, and writes the arrays of the batch
directly into the shared memory that it travels in (:func:`minloader.empty`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minloader._checks import check_int
from minloader._memory.slot_writer import empty
from minloader._sampling.collate import common_dtype, join, refuse_samples


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
            check_int("capacity", self.capacity, 1)
        if self.rows is not None:
            check_int("rows", self.rows, 1)
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
        at, row, number = 0, 1, 0
        for length in lengths:
            if at + length > row * capacity:
                spans.append((at, row * capacity, 0))
                at, row, number = row * capacity, row + 1, 0
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
        segment_ids, positions = empty(at, np.int32), empty(at, np.int32)
        for start, stop, number in spans:
            segment_ids[start:stop] = number
            positions[start:stop] = np.arange(stop - start) if number else 0
        shape = (at,) if self.rows is None else (rows, capacity)
        cu_seqlens = np.array([0, *(stop for _, stop, _ in spans)], np.int32)
        return spans, segment_ids.reshape(shape), positions.reshape(shape), cu_seqlens
