"""Cut samples into pieces that are no longer than a row, and put pieces into rows.

Pieces are an array of shape ``(n, 3)``, int64: index, start and stop of each. A piece *costs* some
of a row: at least 1, at most the capacity of the row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from minloader._checks import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

OPEN = 64
"""Rows that first fit has open at a time. More of them get fuller, but samples wait longer for
their batch, and each is compared with more rows."""


def cut(lengths: Iterable[int], first: int, capacity: int, long: str) -> NDArray[Any]:
    """Return the pieces of samples.

    Args:
        lengths: of the samples, which are checked.
        first: index of the first of them.
        capacity: the most that a piece may have.
        long: what to do with longer samples: "refuse", "cut" or "split".

    Raises:
        TypeError: a length is no int.
        ValueError: a length is negative, or refused.
    """
    import numpy as np

    values = np.asarray(lengths if hasattr(lengths, "__array__") else list(lengths))
    if values.ndim != 1 or (values.size and values.dtype.kind not in "ui"):
        raise TypeError(f"lengths must be one int for each sample, got {shown(lengths)}")
    too_long = values > capacity if long == "refuse" else values < 0
    wrong = too_long | (values < 0)
    if wrong.any():
        index = int(np.argmax(wrong))
        limit = (
            f" and at most capacity={capacity}; raise capacity, leave that sample out, or give "
            "long='cut' or long='split'"
        )
        raise ValueError(
            f"lengths[{first + index}] is {values[index]}, but must be at least 0"
            + limit * (long == "refuse")
        )
    stops = values.astype(np.int64)
    if long == "cut":
        stops = np.minimum(stops, capacity)
    counts = np.maximum(1, -(-stops // capacity))
    indices = np.repeat(np.arange(len(stops)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(indices)) - firsts[indices]) * capacity
    stops = np.minimum(starts + capacity, stops[indices])
    return np.stack([first + indices, starts, stops], axis=1)


def costs_of(pieces: NDArray[Any]) -> NDArray[Any]:
    """Return how much of a row each piece takes."""
    import numpy as np

    costs: NDArray[Any] = np.maximum(1, pieces[:, 2] - pieces[:, 1])
    return costs


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
    import numpy as np

    # Integers of 16 bits, where the capacity allows them, are sorted ten times faster.
    order = np.argsort((capacity - costs).astype(np.min_scalar_type(capacity)), kind="stable")
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


def first_fit(pieces: Iterable[tuple[T, int]], capacity: int) -> Iterator[list[T]]:
    """Put pieces, as they come, each into the oldest row that takes it.

    Args:
        pieces: pairs of a piece and its cost. They are read as rows are asked for.
        capacity: of a row.

    Yields:
        The pieces of a row, when it is full, or is the oldest of :data:`OPEN` and another must be
        opened.
    """
    rows: list[list[T]] = []  # those that are open, the oldest first
    rooms: list[int] = []
    for piece, cost in pieces:
        at = next((n for n, room in enumerate(rooms) if room >= cost), len(rooms))
        if at == OPEN:
            yield rows.pop(0)
            del rooms[0]
            at -= 1
        if at == len(rows):
            rows.append([])
            rooms.append(capacity)
        rows[at].append(piece)
        rooms[at] -= cost
        if not rooms[at]:
            yield rows.pop(at)
            del rooms[at]
    yield from rows
