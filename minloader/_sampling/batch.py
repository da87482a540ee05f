"""Steps of equally many items, cut into a batch for each rank.

::

    source  ──>  what is left, and what is read  ──>  step  ──>  a piece for each rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from minloader._arguments import checked_choice, checked_int
from minloader._formats import brief_repr
from minloader._protocols import is_iterable
from minloader._sampling.base import Run, RunState, Sampler
from minloader._sampling.source import Indices, ItemSource, as_count, decoded, encoded


class StepRun(Run):
    """The batches of an epoch, which are pieces of steps.

    A step takes ``batch_size`` items for each rank, first of what is left and then of what is read.
    """

    def __init__(self, sampler: Any, epoch: int, start: RunState) -> None:
        super().__init__(sampler, epoch, start)
        self._history = sampler._history(start)  # to be passed over
        self._begun = start["begun"]
        self._left: list[Any] = list(map(decoded, start["left"]))  # comes before what is read

    def run_state(self) -> RunState:
        run_state: RunState = self.sampler._beginning() | {"left": list(map(encoded, self._left))}
        run_state |= {"batches": self.batches, "dropped": self.dropped}
        if self.ended:
            return run_state | {"source": self._reading.following()}
        numbers = {"begun": self._begun, "world_size_history": self._history[:-1]}
        return run_state | numbers | {"between": False, "source": self._reading.position()}

    def counts(self) -> tuple[int, int]:
        sampler = self.sampler
        items = len(self._left) + self._num_unread()
        batches = self._begun
        for ranks, size, until in self._history:
            items -= (until - batches) * ranks * (size or 1)
            batches = until
        more, rest = divmod(max(0, items), sampler.world_size * (sampler.batch_size or 1))
        if sampler.last_batch == "keep" and rest >= sampler.world_size:
            return batches + more + 1, 0
        return batches + more, 0 if sampler.last_batch == "rollover" else rest

    def _num_unread(self) -> int:
        """Return how many items are to be read.

        Raises:
            TypeError: that is not known.
        """
        unread: int = self._reading.num_unread()
        return unread

    def _next(self) -> Any:
        sampler = self.sampler
        rank = sampler.rank
        ranks = sampler.world_size
        while self._history:  # what was given is read again, and passed over
            former_ranks, former_size, until = self._history[0]
            if self._begun < until:
                self._step(former_ranks, former_size)
            else:
                del self._history[0]
        step = self._step(ranks, sampler.batch_size)
        if sampler.batch_size is None:
            return step[rank]
        return step[len(step) * rank // ranks : len(step) * (rank + 1) // ranks]

    def _step(self, ranks: int, size: int | None) -> list[Any]:
        """Return the items that all ranks take at once, or end."""
        whole = ranks * (size or 1)
        last_batch = self.sampler.last_batch
        if len(self._left) < whole:
            self._reading.add_to(self._left, whole - len(self._left))
        if len(self._left) < (ranks if last_batch == "keep" else whole):
            if last_batch != "rollover":
                self.dropped = len(self._left)
                self._left = []
            self.ended = True
            raise StopIteration
        step = self._left[:whole]
        self._left = self._left[whole:]
        self._begun += 1
        return step


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
        n_or_sampler: number of samples; or a function that returns it, which is asked when an epoch
            begins; or an iterable of indices. With ranks, these must give the same in each of them:
            each reads all indices and takes its own.
        batch_size: number of indices in a batch. None: single indices in place of lists.
        shuffle: whether each epoch has another order, of a number of samples or of a sequence.
        last_batch: what to do with an incomplete last batch, or step: "keep" it, "discard" it, or
            "rollover", which lets the next epoch begin with it. Over a sampler that has ranks of
            its own, what is left is this rank's, and so is the state at the end of an epoch.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value.
    """

    _arguments = ("n", "batch_size", "shuffle", "last_batch")
    _dealt_by = ("world_size", "batch_size")
    _begin = StepRun

    def __init__(
        self,
        n_or_sampler: int | Callable[[], int] | Iterable[Any],
        batch_size: int | None,
        shuffle: bool = False,
        last_batch: Literal["keep", "discard", "rollover"] = "keep",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        self.batch_size = None if batch_size is None else checked_int("batch_size", batch_size, 1)
        if isinstance(n_or_sampler, str):
            raise TypeError(
                "n_or_sampler must be a number of samples or an iterable of indices, got the "
                f"string {brief_repr(n_or_sampler)}"
            )
        n_or_sampler = as_count("n_or_sampler", n_or_sampler)
        self.sampler = n_or_sampler if isinstance(n_or_sampler, Iterable) else None
        if callable(n_or_sampler) and not is_iterable(n_or_sampler):
            n_or_sampler = Indices(n_or_sampler)
        order = self._derive if self.shuffle else None
        self._source = ItemSource("n_or_sampler", n_or_sampler, order)
        values = self._source.values
        self.n = None if isinstance(values, Indices | None) else len(self._source)
        self.last_batch = checked_choice("last_batch", last_batch, ("keep", "discard", "rollover"))
        if batch_size is None and last_batch != "keep":
            raise ValueError(f"last_batch={last_batch!r} needs a batch_size; give one, or drop it")
        if self.shuffle and values is None:
            raise TypeError(
                "shuffle=True needs a number of samples or a sequence, got "
                f"{brief_repr(n_or_sampler)}; shuffle in that sampler, or give list(sampler)"
            )
