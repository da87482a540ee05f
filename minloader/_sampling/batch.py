"""Batches of a fixed number of indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from minloader._checks import check_bool, check_int, shown
from minloader._sampling.base import Place, Run, Sampler
from minloader._sampling.source import BEGINNING, Indexed, Source, is_sequence, plain, unplain


class BatchSampler(Sampler):
    """Batches of a fixed number of indices.

    Runs in the process that iterates it, normally the parent. Any number of samples takes the same
    memory, a megabyte, and the same time to begin or go on, a millisecond: a shuffled order is
    computed as it is needed. An inner sampler takes what it holds.

    With ranks, all of them have the same order. A step takes the next ``world_size * batch_size``
    indices, and is cut into one piece for each rank: neighbours. If the last step is incomplete,
    "keep" gives each rank its share, so that their batches differ by at most one index, and drops
    only fewer than ``world_size`` indices, where a rank would get nothing. The number of batches,
    ``len()``, is the same for all ranks.

    Args:
        n_or_sampler: number of samples, or an iterable of indices. With ranks, the iterable must
            give the same indices in each of them: each reads all indices and takes its own.
        batch_size: number of indices in a batch. None: single indices in place of lists.
        shuffle: whether each epoch has another order. An inner sampler that is no sequence is then
            read to its end first.
        last_batch: what to do with an incomplete last batch, or step: "keep" it, "discard" it, or
            "rollover", which lets the next epoch begin with it.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value.
    """

    _arguments = ("n", "batch_size", "shuffle", "last_batch")
    _dealt_by = ("world_size", "batch_size")

    def __init__(
        self,
        n_or_sampler: int | Iterable[Any],
        batch_size: int | None,
        shuffle: bool = False,
        last_batch: Literal["keep", "discard", "rollover"] = "keep",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self._values: Any = None  # of a sequence, which needs not be read to be skipped
        if not hasattr(n_or_sampler, "__iter__"):
            self._values = range(check_int("n_or_sampler", n_or_sampler, 0))
        elif is_sequence(n_or_sampler):
            self.sampler = self._values = n_or_sampler
        else:
            self.sampler = n_or_sampler
            self._source = Source("n_or_sampler", n_or_sampler)
        self.n = None if self._values is None else len(self._values)
        if last_batch not in ("keep", "discard", "rollover"):
            raise ValueError(
                f"last_batch must be 'keep', 'discard' or 'rollover', got {shown(last_batch)}"
            )
        if batch_size is None and last_batch != "keep":
            raise ValueError(f"last_batch={last_batch!r} needs a batch_size; give one, or drop it")
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self.shuffle = check_bool("shuffle", shuffle)
        self.last_batch = last_batch

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the inner sampler has no length.
        """
        return self._divide()[0]

    @property
    def _step(self) -> int:
        """How many indices all ranks take at once."""
        return self.world_size * (self.batch_size or 1)

    def _to_drop(self) -> int:
        return self._divide()[1]

    def _divide(self) -> tuple[int, int]:
        """Return how many batches a rank gets of the epoch, and how many samples none gets."""
        between, place = self._position()
        if between and place["batches"]:  # the epoch has ended
            return place["batches"], self._dropped
        n = len(self.sampler) if self.n is None else self.n
        n += len(place["left"]) - place["source"][0]
        batches, rest = divmod(max(0, n), self._step)
        batches += place["batches"]
        if self.last_batch == "keep" and rest >= self.world_size:
            return batches + 1, 0
        return batches, 0 if self.last_batch == "rollover" else rest

    # --- epochs and states

    def _beginning(self) -> Place:
        return {"batches": 0, "left": [], "source": BEGINNING}

    def _begin(self, epoch: int, place: Place) -> Run:
        return _Batches(self, epoch, place)

    def _restore(self, epoch: int, place: Place) -> None:
        check_int("source", place["source"][0], 0)
        if self._source is not None:
            self._source.restore(epoch, place["source"])


class _Batches(Run):
    """The batches of an epoch: of what is left, and of what is read."""

    def __init__(self, sampler: BatchSampler, epoch: int, place: Place) -> None:
        super().__init__(epoch, place)
        self._sampler = sampler
        self._left: list[Any] = list(map(unplain, place["left"]))  # comes before what is read
        source, known = sampler._source, place["source"]
        values: Any = sampler._values
        if source is not None:
            values = source.read(epoch, [0, *known[1:]] if sampler.shuffle else known)
        if source is None or sampler.shuffle:
            seed = sampler._derive(epoch) if sampler.shuffle else None
            values = Indexed(values, seed, known)
        self._reading = values

    def place(self) -> Place:
        left = [plain(item) for item in self._left]
        place = self._reading.over() if self.ended else self._reading.place()
        return {"batches": self.batches, "left": left, "source": place}

    def __next__(self) -> Any:
        self.touched = True
        if self.ended:
            raise StopIteration
        sampler, left = self._sampler, self._left
        ranks, size, whole = sampler.world_size, sampler.batch_size, sampler._step
        if len(left) < whole:
            self._reading.take(left, whole - len(left))
        if len(left) < (ranks if sampler.last_batch == "keep" else whole):
            if sampler.last_batch != "rollover":
                self._left = []
            sampler._dropped, self.ended = len(left) - len(self._left), True
            raise StopIteration
        step, self._left = left[:whole], left[whole:]
        self.batches += 1
        if size is None:
            return step[sampler.rank]
        if ranks == 1:
            return step
        start, stop = (len(step) * rank // ranks for rank in (sampler.rank, sampler.rank + 1))
        return step[start:stop]
