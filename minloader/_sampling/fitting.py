"""Cut samples into pieces that are no longer than a row, and put pieces into rows.

Pieces are an array of shape ``(n, 3)``, int64: index, start and stop of each. A piece *costs* some
of a row: at least 1, at most the capacity of the row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from minloader._checks import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

OPEN = 64
"""Rows that first fit has open at a time. More of them get fuller, but samples wait longer for
their batch, and each is compared with more rows."""


def cut(lengths: Iterable[int], items: Sequence[Any], capacity: int, long: str) -> NDArray[Any]:
    """Return the pieces of samples, whose indices count from 0.

    Args:
        lengths: of the samples, which are checked.
        items: what messages call each sample.
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
            f"lengths[{items[index]!r}] is {values[index]}, but must be at least 0"
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
    return np.stack([indices, starts, stops], axis=1)


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


def arranged(
    rows: NDArray[Any], rng: np.random.Generator | None, ranks: int = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the places of pieces in their order, row after row, and where each row ends.

    Args:
        rows: number of the row of each piece.
        rng: what to shuffle the rows with. None: they come in the order of their first pieces.
        ranks: what the number of rows must be a multiple of. The rows of most pieces are halved
            for that. If there are too few pieces, the last rows have no end.
    """
    import numpy as np

    by_row = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.diff(rows[by_row], prepend=-1))
    while (short := -len(starts) % ranks) and len(starts) < len(rows):
        sizes = np.diff(starts, append=len(rows))
        most = np.argsort(-sizes, kind="stable")[:short]
        starts = np.union1d(starts, starts[most] + sizes[most] // 2)
    order = np.argsort(by_row[starts]) if rng is None else rng.permutation(len(starts))
    sizes = np.diff(starts, append=len(rows))[order]
    ends = np.cumsum(sizes)
    places = np.arange(len(rows)) + np.repeat(starts[order] - (ends - sizes), sizes)
    return by_row[places], ends[: len(ends) // ranks * ranks]


def lazy_rows(
    lengths: Iterator[int],
    size: int,
    capacity: int,
    long: str,
    best: bool,
    rng: np.random.Generator | None,
) -> Iterator[NDArray[Any]]:
    """Yield the pieces of each row: by first fit as rows become full, or by best fit.

    Args:
        lengths: of the samples, which are read as rows are asked for.
        size: number of samples to read, to shuffle, and to put into rows by best fit, at a time.
        capacity: of a row.
        long: as for :func:`cut`.
        best: whether it is best fit.
        rng: what to shuffle with.
    """
    import numpy as np

    chunks = _pieces(lengths, size, capacity, long, rng)
    if not best:  # then nothing is left of the chunks
        pairs = (zip(chunk, costs_of(chunk).tolist(), strict=True) for chunk in chunks)
        yield from map(np.array, first_fit(chain.from_iterable(pairs), capacity))
    for pieces in chunks:
        places, ends = arranged(best_fit(costs_of(pieces), capacity), rng)
        yield from np.split(pieces[places], ends[:-1])


def _pieces(
    lengths: Iterator[int], size: int, capacity: int, long: str, rng: np.random.Generator | None
) -> Iterator[NDArray[Any]]:
    seen = 0
    while chunk := list(islice(lengths, size)):
        end = seen + len(chunk)
        pieces = cut(chunk, range(seen, end), capacity, long)
        pieces[:, 0] += seen
        yield pieces if rng is None else pieces[rng.permutation(len(pieces))]
        seen = end
