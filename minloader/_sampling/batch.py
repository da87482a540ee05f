"""Batches of a fixed number of indices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from minloader._checks import check_int, shown
from minloader._sampling.base import Position, Repeatable, Sampler, state_entry

if TYPE_CHECKING:
    pass

CHUNK = 65_536

"""Indices that are Python integers at a time, 2 MB: a larger share of them gains no speed."""


class BatchSampler(Sampler):
    """Batches of a fixed number of indices.

    With ranks, the order is the same for all of them and its index ``i`` belongs to rank
    ``i % world_size``: a step takes the next ``world_size * batch_size`` indices. Of an incomplete
    last step, "keep" gives each rank its share, so that their batches differ by one index at
    most; only what is fewer than ``world_size`` is dropped, since a rank would get nothing. The
    steps, and so ``len()``, are the same for all ranks.

    Args:
        n_or_sampler: number of samples, or an iterable of indices. With ranks it must give the
            same indices in each, as each goes through all of them and takes its own.
        batch_size: indices in a batch. None: single indices rather than lists.
        shuffle: another order each epoch. A sampler given is then read whole first.
        last_batch: what becomes of an incomplete last batch, or step: "keep" it, "discard" it, or
            "rollover": the next epoch begins with it.
        seed: non-negative int that, with the epoch, decides the order.
        rank: which of the ranks this is, from 0.
        world_size: number of ranks.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or impossible.
    """

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
        self._inner: Any = None
        self._n = 0
        if hasattr(n_or_sampler, "__iter__"):
            self._inner = n_or_sampler
            self._items = Repeatable("n_or_sampler", n_or_sampler)
        else:
            self._n = check_int("n_or_sampler", n_or_sampler, 0)
        if last_batch not in ("keep", "discard", "rollover"):
            raise ValueError(
                f"last_batch must be 'keep', 'discard' or 'rollover', got {last_batch!r}"
            )
        if batch_size is None and last_batch != "keep":
            raise ValueError(f"last_batch={last_batch!r} needs a batch_size; give one, or drop it")
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self.shuffle = bool(shuffle)
        self.last_batch = last_batch
        self._step = self.world_size * (self.batch_size or 1)  # indices
        self._left: list[Any] = []  # of the inner sampler's last complete epoch, to roll over
        self._stateful = all(hasattr(self._inner, f"{do}state_dict") for do in ("", "load_"))

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next ``iter`` gives the order of.

        A loaded position is kept if it is in this epoch, and otherwise forgotten.
        """
        super().set_epoch(epoch)
        # What was loaded stands: a sampler of somebody else's might begin anew.
        if not self._loaded and hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the inner sampler has no length.
        """
        steps, rest = self._steps_and_rest()
        return steps + (self.last_batch == "keep" and rest >= self.world_size)

    @property
    def dropped(self) -> int:
        """Samples of the epoch that no rank gets.

        Where the inner sampler has no length, of the last epoch that was gone through.
        """
        if self._count() is None:
            return self._dropped
        rest = self._steps_and_rest()[1]
        if self.last_batch == "rollover" or (self.last_batch == "keep" and rest >= self.world_size):
            return 0
        return rest

    def __iter__(self) -> Iterator[Any]:
        place = self._begin()
        if self._inner is None and self.last_batch == "rollover":
            place.left = self._carry(place.epoch)
        pending, start = place.left, 0
        if place.ended:
            start = sys.maxsize  # nothing but what rolls over
        elif place.yielded:
            pending, start = [], place.yielded * self._step - len(place.left)
        if place.inner is not None:
            place.inner, start = None, 0  # the inner sampler has been restored where it stood
        return self._batches(chain(pending, self._order(place.epoch, start)), place)

    def _batches(self, indices: Iterator[Any], place: Position) -> Iterator[Any]:
        rank, world_size = self.rank, self.world_size
        while len(step := list(islice(indices, self._step))) == self._step:
            place.yielded += 1
            yield step[rank] if self.batch_size is None else step[rank::world_size]
        if self.last_batch == "keep" and len(step) >= world_size:
            place.yielded += 1
            yield step[rank::world_size]
            step = []
        place.ended = True
        if self.last_batch == "rollover":
            place.left = self._left = step
            step = []
        self._dropped = len(step)

    def _order(self, epoch: int, start: int) -> Iterator[Any]:
        """The indices of an epoch from a place on."""
        if not self.shuffle:
            if self._inner is None:
                return iter(range(start, self._n))
            indices = iter(self._items)
            next(islice(indices, start, start), None)  # goes there, and takes nothing
            return indices
        if self._inner is None:
            order = self._rng(epoch).permutation(self._n)[start:]
            # Python integers, but not all of them at once: they take five times the memory.
            chunks = (order[i : i + CHUNK].tolist() for i in range(0, len(order), CHUNK))
            return chain.from_iterable(chunks)
        inner = list(self._items)
        return iter([inner[i] for i in self._rng(epoch).permutation(len(inner))[start:]])

    def _count(self) -> int | None:
        """Number of samples, None if the inner sampler does not tell."""
        if self._inner is None:
            return self._n
        try:
            return len(self._inner)
        except TypeError:
            return None

    def _steps_and_rest(self) -> tuple[int, int]:
        """Full steps of the epoch, and samples beyond them; what was rolled over is included."""
        n = self._n if self._inner is None else len(self._inner)
        if self.last_batch == "rollover":
            n += self._carry_size(self.epoch) if self._inner is None else len(self._left)
        return divmod(n, self._step)

    def _carry_size(self, epoch: int) -> int:
        return epoch * self._n % self._step

    def _carry(self, epoch: int) -> list[int]:
        """What earlier epochs left over, known from the epoch's number as the order is."""
        carry: list[int] = []
        missing = self._carry_size(epoch)
        while missing:
            epoch -= 1
            tail = list(self._order(epoch, max(0, self._n - missing)))
            carry = tail + carry
            missing -= len(tail)
        return carry

    # --- state

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "n_or_sampler": "int" if self._inner is None else "sampler",
            "n": self._count(),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "last_batch": self.last_batch,
        }

    def _new_place(self) -> Position:
        return Position(self.epoch, left=self._left)

    def _rest_of_state(self, place: Position) -> dict[str, Any]:
        if self._inner is None:
            return {}
        inner = place.inner
        # Where it was not read yet, or whole to be shuffled, it is to begin the epoch again.
        if self._stateful and place.yielded and not self.shuffle and not self._loaded:
            inner = self._inner.state_dict()
        left = [i.item() if hasattr(i, "item") else i for i in place.left]  # no numpy in JSON
        return {"left": left, "ended": place.ended, "inner": inner}

    def _place_of(self, state: dict[str, Any]) -> Position:
        place = super()._place_of(state)
        if self._inner is None:
            return place
        place.left, place.ended = (
            list(state_entry(state, "left")),
            bool(state_entry(state, "ended")),
        )
        place.inner = state_entry(state, "inner")
        if place.inner is not None and not self._stateful:
            raise ValueError(
                f"the state holds one of the inner sampler, but {shown(self._inner)} has no "
                "load_state_dict; make the sampler over one of the same kind"
            )
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(place.epoch)
        if place.inner is not None:
            self._inner.load_state_dict(place.inner)
        self._left = place.left
        return place
