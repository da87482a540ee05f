"""Rows of fixed capacity, which whole samples share.

A window (``windows.py``) is planned in this order:

1. Samples become pieces: those that are longer than a row are split, if so asked. A piece *costs*
   some of a row: at least 1, at most its capacity.
2. Pieces are put into rows by best fit (``_best_fit``).
3. Rows are put in order, and cut into a batch for each rank (``_arranged``). With ``window=`` that
   is done for so many pieces at a time.

Every rank plans all rows from the same seed and takes its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import checked_int
from minloader._sampling.collate import pack_collate
from minloader._sampling.lengths import LookUp
from minloader._sampling.windows import MOST, Plan, WindowSampler

UNITS = 16_384
"""Rows have at most so many units of room. Of a larger capacity a unit is several entries, and a
piece counts as the units that it touches: a row may then lack some 0.01 % for each of its pieces.
It is the number of different costs that takes time."""


class PackedBatchSampler(WindowSampler):
    """Batches of rows of fixed capacity, each shared by as many whole samples as it takes.

    Runs in the process that iterates it, normally the parent. A batch is a list of indices, those
    of its first row first. :class:`pack_collate` lays the samples out in this order, and begins a
    row where the next sample does not fit: so they never need more rows than were planned.

    Samples are put into rows by best fit: the longest first, each into the fullest row that takes
    it. A million lengths in an array are planned in less than a second.

    Unshuffled, rows come in the order of their first samples. Shuffled, the samples of one length
    change places, and so do the rows. Over a whole epoch, best fit puts the same lengths together
    each time. With a ``window`` it does not: windows are packed one after another, as batches are
    asked for. Rows that make no whole step go into those of the next window.

    With ranks, all of them have equally many rows at each step. For that up to ``world_size - 1``
    rows are divided. Samples are dropped only if there are too few for that: then each has a row
    of its own, and fewer than ``world_size`` are left over, others in each epoch.

    Lazy lengths, and the items of an inner ``sampler``, are planned 10,000 at a time, as an epoch
    each: so the last batch of each may have fewer rows. A state then has that of the inner sampler,
    if it has one, and no more than 10,000 items are read again.

    Args:
        lengths: length of each sample, an int, as a sequence or an array of shape ``(n,)``; or as
            any iterable, which is read lazily. All ranks must be given the same lengths. A sample
            of length 0 counts as one of length 1, so that rows do not grow without end. With a
            ``sampler``: what its items' lengths are looked up in (``lengths[item]``), or a function
            of an item.
        capacity: the most that the lengths in a row may add up to.
        rows: number of rows in a batch; the last batch may have fewer. None: one.
        long: what to do with samples that are longer than a row: "refuse" them, "drop" them, which
            ``dropped`` counts, or "split" them into several. With "split" batches are lists of
            named tuples ``(sample, start, stop)``, which :class:`sliced` makes samples of.
        window: number of samples, in the order of the epoch, to put into rows by best fit at a
            time. None: all that are planned together.
        shuffle: whether each epoch has another order. Lazy lengths are shuffled among those that
            are planned together.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        sampler: iterable of items, which batches then consist of, in place of the indices of
            ``lengths``. With ranks, it must give the same items in each of them.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a sample is longer than a row. (Lazy
            lengths and those of items raise both where they are read, once each; the sample is
            left out.)
    """

    _length_type = Integral
    _long_choices = ("refuse", "drop", "split")
    _arguments = ("n", "capacity", "rows", "long", "window", "shuffle", "lengths_digest")
    _dealt_by: tuple[str, ...] = ("world_size", "rows", "capacity")
    _cost_limits = ("capacity",)

    def __init__(
        self,
        lengths: Iterable[int] | LookUp | Callable[[Any], int],
        capacity: int,
        rows: int | None = None,
        long: Literal["refuse", "drop", "split"] = "refuse",
        window: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        sampler: Iterable[Any] | None = None,
    ) -> None:
        self.capacity = checked_int("capacity", capacity, 1, MOST)
        self.rows = None if rows is None else checked_int("rows", rows, 1)
        self.window = None if window is None else checked_int("window", window, 1)
        super().__init__(
            lengths, sampler, long, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
        )
        if self.long == "split":  # with another capacity the pieces are others
            self._dealt_by = ("world_size", "rows")

    def collate(self, value: Any = 0) -> pack_collate:
        """Return the ``collate_fn`` that lays the batches of this sampler out in its rows.

        Args:
            value: what to pad with.
        """
        return pack_collate(self.capacity, self.rows, value)

    @property
    def plans_late(self) -> bool:
        """Whether the number of batches takes long: it is known when all windows are packed."""
        return self.window is not None and self._all is not None

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Iterator[Plan]:
        order = np.arange(len(costs))
        if self.shuffle:
            rng.shuffle(order)
        size = self.window or max(1, len(costs))
        # Those that are packed, and in no step yet.
        pieces = order[:0]
        rows = order[:0]
        for start in range(0, len(costs), size):
            added = order[start : start + size]
            packed = _best_fit(costs[added], int(self._cost_limit(by)[1]))
            pieces = np.append(pieces, added)
            rows = np.append(rows, packed + (rows.max() + 1 if len(rows) else 0))
            is_last = start + size >= len(costs)
            plan, rest = _arranged(rows, self.shuffle, rng, by, is_last=is_last)
            places, starts, stops = plan
            yield pieces[places], starts, stops
            pieces = pieces[rest]
            rows = rows[rest]


def _best_fit(costs: NDArray[Any], capacity: int) -> NDArray[Any]:
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
        costs = -(-costs.astype(np.int64) // unit)
        capacity = capacity // unit
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
    opened = 0
    placed = 0
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


def _arranged(
    rows: NDArray[Any], shuffle: bool, rng: np.random.Generator, by: Any, *, is_last: bool
) -> tuple[Plan, NDArray[Any]]:
    """Cut rows into the batches of steps.

    Args:
        rows: number of the row of each piece.
        shuffle: whether rows are shuffled; otherwise they come in the order of their first pieces.
        rng: what to draw from.
        by: the world size, and how many rows are in the batch of a rank.
        is_last: whether no more rows come. Then their number is made a multiple of the world size:
            the rows of most pieces are halved for that, and if there are too few pieces, some rows
            are dropped, by chance. Otherwise the last step and a half or so are left for later.

    Returns:
        The places of pieces batch after batch, and where each batch begins and ends; and the places
        of the pieces that are left, ascending.
    """
    ranks: int = by["world_size"]
    each: int = min(by["rows"] or 1, len(rows))
    by_row = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.diff(rows[by_row], prepend=-1))
    while is_last and (short := -len(starts) % ranks) and len(starts) < len(rows):
        sizes = np.diff(starts, append=len(rows))
        most = np.argsort(-sizes, kind="stable")[:short]
        starts = np.union1d(starts, starts[most] + sizes[most] // 2)
    stops = np.append(starts[1:], len(rows))
    order = rng.permutation(len(starts))
    if is_last:
        order = order[len(starts) % ranks :]
    if not shuffle:
        order = order[np.argsort(by_row[starts[order]])]
    rest = by_row[:0]
    if not is_last:
        # A whole step at least, so that there are pieces to halve rows of at the end.
        whole = max(0, len(order) // (each * ranks) - 1) * each * ranks
        later = [by_row[starts[row] : stops[row]] for row in order[whole:].tolist()]
        rest = np.sort(np.concatenate([rest, *later]))
        order = order[:whole]
    step = np.arange(len(order)) // (each * ranks)
    count = np.bincount(step)[step] // ranks  # rows in each batch of the step
    batch = step * ranks + np.arange(len(order)) % (each * ranks) // np.maximum(count, 1)
    sizes = (stops - starts)[order]
    ends = np.cumsum(sizes)
    places = np.arange(int(sizes.sum())) + np.repeat(starts[order] - (ends - sizes), sizes)
    last = np.flatnonzero(np.diff(batch, append=-1))
    return (by_row[places], np.append(0, ends[last])[:-1], ends[last]), rest
