"""Rows of fixed capacity, which whole samples share.

Planned in the parent, in this order:

1. Samples become pieces: those that are longer than a row are cut or split (``cut``).
2. Pieces are put into rows: by best fit, or by first fit as they come.
3. Rows are put in order (``arranged``), and row ``i`` of it belongs to rank ``i % world_size``.

Every rank plans all rows from the same seed and takes its own.

The items of an inner sampler are planned window by window (``windows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any, Literal

from minloader._checks import check_int, shown
from minloader._sampling.base import Position, Repeatable
from minloader._sampling.fitting import OPEN, arranged, best_fit, costs_of, cut, lazy_rows
from minloader._sampling.seeding import Piece
from minloader._sampling.windows import LookUp, WindowSampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WINDOW = 10_000
"""Number of lazy lengths that are read ahead to be shuffled, or of an inner sampler's items to be
planned. More of them are shuffled better and fill rows better, but the first batch waits for all
of them."""


class PackedBatchSampler(WindowSampler):
    """Batches of rows of fixed capacity, each shared by as many whole samples as it takes.

    Runs in the process that iterates it, normally the parent. A batch is a list of indices, those
    of its first row first. :class:`pack_collate` lays the samples out in this order, and begins a
    row where the next sample does not fit: so they never need more rows than were planned.

    Samples are put into rows by best fit: the longest first, each into the fullest row that takes
    it. A million lengths in an array are planned in about half a second. Lazy lengths are put into
    rows by first fit as they are read: each into the oldest row that takes it, of the 64 rows that
    are open at a time.

    Unshuffled, rows come in the order of their first samples (lazy: in which they become full).
    Shuffled, the samples of one length change places, and so do the rows. Over a whole epoch,
    best fit puts the same lengths together each time. With a ``window`` it does not.

    With ranks, all of them have equally many rows at each step. For that up to ``world_size - 1``
    rows are divided. Samples are dropped only if there are too few for that: then each has a row
    of its own, and fewer than ``world_size`` are left over.

    The items of an inner ``sampler`` are planned ``window``, or 10,000, at a time, as an epoch
    each: so the last batch of each may have fewer rows. A state then has that of the inner sampler,
    if it has one, and no more than one window is read again.

    Args:
        lengths: length of each sample, an int, as a sequence or an array of shape ``(n,)``; or as
            any iterable, which is read lazily. All ranks must be given the same lengths. A sample
            of length 0 counts as one of length 1, so that rows do not grow without end. With a
            ``sampler``: what its items' lengths are looked up in (``lengths[item]``), or a function
            of an item.
        capacity: the most that the lengths in a row may add up to.
        rows: number of rows in a batch; the last batch may have fewer. None: one.
        long: what to do with samples that are longer than a row: "refuse" them, "cut" them, or
            "split" them into several. With "cut" and "split" batches are lists of tuples
            ``(index, start, stop)``, or with a ``sampler`` ``(item, start, stop)``, which
            :class:`sliced` makes samples of.
        window: number of samples, in the order of the epoch, to put into rows by best fit at a
            time. None: all; if they are lazy, by first fit.
        shuffle: whether each epoch has another order. Lazy lengths are shuffled among those that
            are read ahead: ``window``, or 10,000.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        sampler: iterable of items, which batches then consist of, in place of the indices of
            ``lengths``. With ranks, it must give the same items in each of them.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a sample is longer than a row. (Lazy
            lengths and those of items raise it when they are read.)
    """

    def __init__(
        self,
        lengths: Iterable[int] | LookUp | Callable[[Any], int],
        capacity: int,
        rows: int | None = None,
        long: Literal["refuse", "cut", "split"] = "refuse",
        window: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        sampler: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.capacity = check_int("capacity", capacity, 1)
        self.rows = 1 if rows is None else check_int("rows", rows, 1)
        if long not in ("refuse", "cut", "split"):
            raise ValueError(f"long must be 'refuse', 'cut' or 'split', got {shown(long)}")
        self.long = long
        self._whole = long == "refuse"  # items, not pieces of them
        self.window = None if window is None else check_int("window", window, 1)
        self.shuffle = bool(shuffle)
        self._step = self.rows * self.world_size  # rows
        self._pieces: NDArray[Any] | None = None  # None: they are not known beforehand
        if sampler is not None:
            self._read_items(sampler, lengths)
        elif not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be an iterable of ints, got {shown(lengths)}")
        else:
            self._lazy = Repeatable("lengths", lengths)
            if isinstance(lengths, Sized):
                self._pieces = cut(lengths, range(len(lengths)), self.capacity, long)
        self._plan: tuple[int, NDArray[Any], NDArray[Any]] | None = None  # epoch, numbers, ends

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the lengths are lazy.
        """
        if self._pieces is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        return -(-len(self._planned(self._pieces, self.epoch)[1]) // self._step)

    @property
    def dropped(self) -> int:
        """Number of samples of the epoch that no rank gets; with ``long="split"``, of pieces.

        With lazy lengths: of the last epoch that was iterated to its end.
        """
        if self._pieces is None:
            return self._dropped
        return len(self._pieces) - int(self._planned(self._pieces, self.epoch)[1][-1:].sum())

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._begin()
        if self._inner is not None:
            return self._by_window(position, self.window or WINDOW)
        batches: Iterator[NDArray[Any]]
        if self._pieces is None:
            batches = self._lazily(iter(self._lazy), position.epoch)
            batches = islice(batches, position.yielded, None)
        else:
            plan = self._planned(self._pieces, position.epoch)
            batches = map(self._pieces.__getitem__, self._batches(*plan, position.yielded))
        return self._counted(batches, position)

    def _counted(self, batches: Iterator[NDArray[Any]], position: Position) -> Iterator[list[Any]]:
        for batch in batches:
            position.yielded += 1
            yield batch[:, 0].tolist() if self._whole else list(starmap(Piece, batch.tolist()))

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "n": None if self._pieces is None else len(self._pieces),
            "lengths": self._fingerprint(self._pieces, "<i8"),
            "capacity": self.capacity,
            "rows": self.rows,
            "long": self.long,
            "window": self.window,
            "shuffle": self.shuffle,
        }

    def _planned(self, pieces: NDArray[Any], epoch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the plan of an epoch, which is kept."""
        key = epoch if self.shuffle else 0
        if self._plan is None or self._plan[0] != key:
            size = self.window or max(1, len(pieces))
            self._plan = key, *self._plan_all(pieces, self._shuffler(epoch), size)
        return self._plan[1:]

    def _plan_window(
        self, epoch: int, before: int, items: list[Any], lengths: list[Any]
    ) -> tuple[list[list[Any]], int]:
        pieces = cut(lengths, items, self.capacity, self.long)
        plan = self._plan_all(pieces, self._shuffler(epoch, before), len(pieces))
        batches = (pieces[numbers].tolist() for numbers in self._batches(*plan))
        named = [
            [
                items[at] if self._whole else Piece(items[at], start, stop)
                for at, start, stop in batch
            ]
            for batch in batches
        ]
        return named, len(pieces) - int(plan[1][-1:].sum())

    def _plan_all(
        self, pieces: NDArray[Any], rng: np.random.Generator | None, size: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of all pieces, row after row, and where each row ends.

        Args:
            pieces: the pieces.
            rng: what to shuffle with.
            size: number of pieces to put into rows at a time.
        """
        import numpy as np

        order = np.arange(len(pieces))
        if rng is not None:
            rng.shuffle(order)
        costs = costs_of(pieces)[order]
        rows, count = np.empty_like(order), 0
        for start in range(0, len(pieces), size):
            window = slice(start, start + size)
            rows[window] = count + best_fit(costs[window], self.capacity)
            count = int(rows[window].max()) + 1
        places, ends = arranged(rows, rng, self.world_size)
        return order[places], ends

    def _batches(self, numbers: NDArray[Any], ends: NDArray[Any], at: int = 0) -> Iterator[Any]:
        """Yield the numbers of the pieces in each batch of this rank, from one batch on."""
        import numpy as np

        starts = np.append(0, ends)
        for first in range(at * self._step, len(ends), self._step):
            rows = range(first + self.rank, min(first + self._step, len(ends)), self.world_size)
            yield np.concatenate([numbers[starts[row] : ends[row]] for row in rows])

    def _lazily(self, lengths: Iterator[int], epoch: int) -> Iterator[NDArray[Any]]:
        """Yield the batches of this rank as the lengths are read."""
        import numpy as np

        rng = self._shuffler(epoch)
        size = self.window or (WINDOW if self.shuffle else OPEN)
        best = self.window is not None
        rows = lazy_rows(lengths, size, self.capacity, self.long, best, rng)
        while len(step := list(islice(rows, self._step))) == self._step:
            yield np.concatenate(step[self.rank :: self.world_size])
        dropped = 0
        if step:
            pieces = np.concatenate(step)
            rows_of = np.repeat(np.arange(len(step)), list(map(len, step)))
            places, ends = arranged(rows_of, rng, self.world_size)
            dropped = len(pieces) - int(ends[-1:].sum())
            yield from map(pieces.__getitem__, self._batches(places, ends))
        self._dropped = dropped

    def _shuffler(self, *numbers: int) -> np.random.Generator | None:
        return self._rng(*numbers) if self.shuffle else None
