"""Cut samples into pieces that are no longer than a row, and put pieces into rows.

A piece *costs* some of a row: at least 1, at most the capacity of the row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNITS = 16_384
"""Rows have at most so many units of room. Of a larger capacity a unit is several entries, and a
piece counts as the units that it touches: a row may then lack some 0.01 % for each of its pieces.
It is the number of different costs that takes time."""


def cut(lengths: NDArray[Any], capacity: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sample of each piece, shape ``(n,)``, and its start and stop, shape ``(n, 2)``."""
    stops = lengths.astype(np.int64)
    counts = np.maximum(1, -(-stops // capacity))
    samples = np.repeat(np.arange(len(stops)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(samples)) - firsts[samples]) * capacity
    return samples, np.stack([starts, np.minimum(starts + capacity, stops[samples])], axis=1)


def best_fit(costs: NDArray[Any], capacity: int) -> NDArray[Any]:
    """Put the costliest piece first, each into the fullest row that takes it.

    Pieces of the same cost are put into rows with the same room at once. So it is the number of
    different costs that takes time, more than the number of pieces.

    Args:
        costs: cost of each piece, ints of shape ``(n,)``.
        capacity: of a row.

    Returns:
        Number of the row of each piece, from 0, of shape ``(n,)``.
    """
    if capacity > UNITS:
        unit = -(-capacity // UNITS)
        costs, capacity = -(-costs.astype(np.int64) // unit), capacity // unit
        costs = np.minimum(costs, capacity)  # a piece that touches all units is alone in its row
    # Integers of 16 bits, where the capacity allows them, are sorted ten times faster.
    order = np.argsort(
        (capacity - costs.astype(np.int64)).astype(np.min_scalar_type(capacity)), kind="stable"
    )
    values = costs[order]
    firsts = np.flatnonzero(np.diff(values, prepend=0))  # of each cost, the highest first
    found = np.empty(len(costs), np.int64)
    rows_with: dict[int, NDArray[Any]] = {}  # rows, by the room that is left in them
    rooms: list[int] = []  # the keys, ascending
    opened = placed = 0
    counts = np.diff(firsts, append=len(costs))
    for cost, count in zip(values[firsts].tolist(), counts.tolist(), strict=True):
        while count:
            at = bisect_left(rooms, cost)
            if at < len(rooms):
                room = rooms.pop(at)
                rows = rows_with.pop(room)
            else:
                room = capacity
                rows = opened + np.arange(-(-count // (capacity // cost)))
                opened += len(rows)
            each = min(room // cost, count)
            places = np.repeat(rows[: -(-count // each)], each)[:count]
            found[order[placed : placed + len(places)]] = places
            placed += len(places)
            count -= len(places)
            full, more = divmod(len(places), each)  # how many rows take all that they can
            for some, left in (
                (rows[:full], room - each * cost),
                (rows[full : full + 1], room - more * cost),
                (rows[full + 1 :], room),
            ):
                if not len(some) or not left:
                    continue
                if left in rows_with:
                    rows_with[left] = np.append(rows_with[left], some)
                else:
                    rows_with[left] = some
                    insort(rooms, left)
    return found


def arranged(
    rows: NDArray[Any], shuffle: bool, rng: np.random.Generator, ranks: int, each: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the places of pieces batch after batch, and where each batch begins and ends.

    Args:
        rows: number of the row of each piece.
        shuffle: whether rows are shuffled; otherwise they come in the order of their first pieces.
        rng: what to draw from.
        ranks: what the number of rows must be a multiple of. The rows of most pieces are halved
            for that. If there are too few pieces, some rows are dropped, by chance.
        each: number of rows in the batch of a rank.
    """
    by_row = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.diff(rows[by_row], prepend=-1))
    while (short := -len(starts) % ranks) and len(starts) < len(rows):
        sizes = np.diff(starts, append=len(rows))
        most = np.argsort(-sizes, kind="stable")[:short]
        starts = np.union1d(starts, starts[most] + sizes[most] // 2)
    stops = np.append(starts[1:], len(rows))
    order = rng.permutation(len(starts))[len(starts) % ranks :]
    if not shuffle:
        order = order[np.argsort(by_row[starts[order]])]
    step = np.arange(len(order)) // (each * ranks)
    count = np.bincount(step)[step] // ranks  # rows in each batch of the step
    batch = step * ranks + np.arange(len(order)) % (each * ranks) // np.maximum(count, 1)
    sizes = (stops - starts)[order]
    ends = np.cumsum(sizes)
    places = np.arange(int(sizes.sum())) + np.repeat(starts[order] - (ends - sizes), sizes)
    last = np.flatnonzero(np.diff(batch, append=-1))
    return by_row[places], np.append(0, ends[last])[:-1], ends[last]
