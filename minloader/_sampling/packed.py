"""Rows of fixed capacity, which whole samples share.

Planned in the parent, in this order:

1. Samples become pieces: those that are longer than a row are cut or split (``cut``).
2. Pieces are put into rows: by best fit, or by first fit as they come.
3. Rows are put in order (``_arranged``), and row ``i`` of it belongs to rank ``i % world_size``.

Every rank plans all rows from the same seed and takes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from minloader._checks import check_int, shown
from minloader._sampling.base import Position, Repeatable, Sampler
from minloader._sampling.fitting import OPEN, best_fit, costs_of, cut, first_fit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WINDOW = 10_000
"""Number of lazy lengths that are read ahead to be shuffled. More of them are shuffled better, but
the first batch waits for all of them."""


class PackedBatchSampler(Sampler):
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

    Args:
        lengths: length of each sample, an int, as a sequence or an array of shape ``(n,)``; or as
            any iterable, which is read lazily. All ranks must be given the same lengths. A sample
            of length 0 counts as one of length 1, so that rows do not grow without end.
        capacity: the most that the lengths in a row may add up to.
        rows: number of rows in a batch; the last batch may have fewer. None: one.
        long: what to do with samples that are longer than a row: "refuse" them, "cut" them, or
            "split" them into several. With "cut" and "split" batches are lists of tuples
            ``(index, start, stop)``, which :class:`sliced` makes samples of.
        window: number of samples, in the order of the epoch, to put into rows by best fit at a
            time. None: all; if they are lazy, by first fit.
        shuffle: whether each epoch has another order. Lazy lengths are shuffled among those that
            are read ahead: ``window``, or 10,000.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a sample is longer than a row. (Lazy
            lengths raise it when they are read.)
    """

    def __init__(
        self,
        lengths: Iterable[int],
        capacity: int,
        rows: int | None = None,
        long: Literal["refuse", "cut", "split"] = "refuse",
        window: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.capacity = check_int("capacity", capacity, 1)
        self.rows = 1 if rows is None else check_int("rows", rows, 1)
        if long not in ("refuse", "cut", "split"):
            raise ValueError(f"long must be 'refuse', 'cut' or 'split', got {shown(long)}")
        self.long = long
        self.window = None if window is None else check_int("window", window, 1)
        self.shuffle = bool(shuffle)
        if not hasattr(lengths, "__iter__"):
            raise TypeError(f"lengths must be an iterable of ints, got {shown(lengths)}")
        self._lazy = Repeatable("lengths", lengths)
        self._pieces = cut(lengths, 0, self.capacity, long) if hasattr(lengths, "__len__") else None
        self._step = self.rows * self.world_size  # rows
        self._digest: str | None = None
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
        return len(self._pieces) - _total(self._planned(self._pieces, self.epoch)[1])

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._begin()
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
            whole = self.long == "refuse"
            yield batch[:, 0].tolist() if whole else list(map(tuple, batch.tolist()))

    def _identity(self) -> dict[str, Any]:
        pieces = self._pieces
        if self._digest is None and pieces is not None:
            from hashlib import blake2b

            self._digest = blake2b(pieces.astype("<i8").tobytes(), digest_size=16).hexdigest()
        return {
            **super()._identity(),
            "n": None if pieces is None else len(pieces),
            "lengths": self._digest,
            "capacity": self.capacity,
            "rows": self.rows,
            "long": self.long,
            "window": self.window,
            "shuffle": self.shuffle,
        }

    def _planned(self, pieces: NDArray[Any], epoch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of all pieces, row after row, and where each row ends."""
        import numpy as np

        key = epoch if self.shuffle else 0
        if self._plan is None or self._plan[0] != key:
            rng = self._rng(epoch)
            order = np.arange(len(pieces))
            if self.shuffle:
                rng.shuffle(order)
            costs = costs_of(pieces)[order]
            size = self.window or max(1, len(pieces))
            rows, count = np.empty_like(order), 0
            for start in range(0, len(pieces), size):
                window = slice(start, start + size)
                rows[window] = count + best_fit(costs[window], self.capacity)
                count = int(rows[window].max()) + 1
            places, ends = self._arranged(rows, rng, self.world_size)
            self._plan = key, order[places], ends
        return self._plan[1:]

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

        rng = self._rng(epoch)
        rows = self._lazy_rows(self._chunks(lengths, rng), rng)
        while len(step := list(islice(rows, self._step))) == self._step:
            yield np.concatenate(step[self.rank :: self.world_size])
        dropped = 0
        if step:
            pieces = np.concatenate(step)
            rows_of = np.repeat(np.arange(len(step)), list(map(len, step)))
            places, ends = self._arranged(rows_of, rng, self.world_size)
            dropped = len(pieces) - _total(ends)
            yield from map(pieces.__getitem__, self._batches(places, ends))
        self._dropped = dropped

    def _chunks(self, lengths: Iterator[int], rng: np.random.Generator) -> Iterator[NDArray[Any]]:
        """Yield as many pieces at a time as best fit and shuffling need."""
        seen = 0
        size = self.window or (WINDOW if self.shuffle else OPEN)
        while chunk := list(islice(lengths, size)):
            pieces = cut(chunk, seen, self.capacity, self.long)
            yield pieces[rng.permutation(len(pieces))] if self.shuffle else pieces
            seen += len(chunk)

    def _lazy_rows(
        self, chunks: Iterator[NDArray[Any]], rng: np.random.Generator
    ) -> Iterator[NDArray[Any]]:
        """Yield rows: by first fit as they become full, or all of one window after another."""
        import numpy as np

        if self.window is None:  # then nothing is left of the chunks
            samples = (zip(chunk, costs_of(chunk).tolist(), strict=True) for chunk in chunks)
            yield from map(np.array, first_fit(chain.from_iterable(samples), self.capacity))
        for pieces in chunks:
            places, ends = self._arranged(best_fit(costs_of(pieces), self.capacity), rng)
            yield from np.split(pieces[places], ends[:-1])

    def _arranged(
        self, rows: NDArray[Any], rng: np.random.Generator, ranks: int = 1
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the places of pieces in their order, row after row, and where each row ends.

        Args:
            rows: number of the row of each piece.
            rng: what to shuffle the rows with.
            ranks: what the number of rows must be a multiple of. The rows of most pieces are
                halved for that. If there are too few pieces, the last rows have no end.
        """
        import numpy as np

        by_row = np.argsort(rows, kind="stable")
        starts = np.flatnonzero(np.diff(rows[by_row], prepend=-1))
        while (short := -len(starts) % ranks) and len(starts) < len(rows):
            sizes = np.diff(starts, append=len(rows))
            most = np.argsort(-sizes, kind="stable")[:short]
            starts = np.union1d(starts, starts[most] + sizes[most] // 2)
        order = rng.permutation(len(starts)) if self.shuffle else np.argsort(by_row[starts])
        sizes = np.diff(starts, append=len(rows))[order]
        ends = np.cumsum(sizes)
        places = np.arange(len(rows)) + np.repeat(starts[order] - (ends - sizes), sizes)
        return by_row[places], ends[: len(ends) // ranks * ranks]


def _total(ends: NDArray[Any]) -> int:
    """Return how many pieces there are in rows."""
    return int(ends[-1]) if len(ends) else 0
