"""Rows of fixed capacity, which whole samples share.

A window (``windows.py``) is planned in this order:

1. Samples become pieces: those that are longer than a row are split, if so asked (``cut``).
2. Pieces are put into rows by best fit (``best_fit``).
3. Rows are put in order, and cut into a batch for each rank (``arranged``).

Every rank plans all rows from the same seed and takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minloader._checks import check_int
from minloader._sampling.fitting import arranged, best_fit
from minloader._sampling.pack_collate import pack_collate
from minloader._sampling.source import LookUp
from minloader._sampling.windows import Plan, WindowSampler


class PackedBatchSampler(WindowSampler):
    """Batches of rows of fixed capacity, each shared by as many whole samples as it takes.

    Runs in the process that iterates it, normally the parent. A batch is a list of indices, those
    of its first row first. :class:`pack_collate` lays the samples out in this order, and begins a
    row where the next sample does not fit: so they never need more rows than were planned.

    Samples are put into rows by best fit: the longest first, each into the fullest row that takes
    it. A million lengths in an array are planned in less than a second.

    Unshuffled, rows come in the order of their first samples. Shuffled, the samples of one length
    change places, and so do the rows. Over a whole epoch, best fit puts the same lengths together
    each time. With a ``window`` it does not.

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

    _kind = "ui", Integral, "int"
    _ways = "refuse", "drop", "split"
    _arguments = ("n", "lengths", "capacity", "rows", "long", "window", "shuffle")
    _dealt_by = ("world_size", "rows")
    _limits = ("capacity",)

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
        self.capacity = check_int("capacity", capacity, 1)
        self.rows = None if rows is None else check_int("rows", rows, 1)
        self.window = None if window is None else check_int("window", window, 1)
        super().__init__(lengths, sampler, long, shuffle, seed, rank, world_size)

    def collate(self, value: Any = 0) -> pack_collate:
        """Return the ``collate_fn`` that lays the batches of this sampler out in its rows.

        Args:
            value: what to pad with.
        """
        return pack_collate(self.capacity, self.rows, value)

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Plan:
        order = np.arange(len(costs))
        if self.shuffle:
            rng.shuffle(order)
        costs = costs[order]
        rows, count, size = np.empty_like(order), 0, self.window or max(1, len(costs))
        for start in range(0, len(costs), size):
            window = slice(start, start + size)
            rows[window] = count + best_fit(costs[window], self.capacity)
            count = int(rows[window].max()) + 1
        each = by["rows"] or 1
        places, starts, stops = arranged(rows, self.shuffle, rng, by["world_size"], each)
        return order[places], starts, stops
