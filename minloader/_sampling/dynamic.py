"""Batches of as many samples as a budget allows, of like cost in every rank.

Planned in the parent, in this order:

1. The cost of each sample is worked out and checked (``_checked``).
2. Samples, shuffled or in order, fill one batch for each bucket at a time (``_fill``). With one
   rank this is all.
3. With ranks, whole batches of like cost make a step (``_match``): ``world_size`` batches, one for
   each rank. The samples of the other batches are dealt out anew (``_deal``).

Every rank plans all steps from the same seed and takes its own batch of each.

The items of an inner sampler are planned window by window (``windows.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy
from itertools import chain, compress, count, islice, tee
from numbers import Real
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from minloader._checks import check_bool, check_int, shown
from minloader._sampling.base import Position, Repeatable
from minloader._sampling.windows import LookUp, WindowSampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Window = tuple[NDArray[Any], NDArray[Any]]  # indices of some samples, and their costs
    _Costly = tuple[float, list[int]]  # the cost of a batch, and the batch
    _Step = list[list[int]]  # a batch for each rank

WINDOW = 10_000
"""Number of lazy lengths, or of an inner sampler's items, that are read ahead to be sorted or
shuffled. More of them make tighter buckets and better shuffling, but the first batch waits for all
of them."""

SPREAD = 0.05
"""How much the costs of a step's batches may differ, as a fraction of the highest: the share of its
time that a rank may wait for another. With less, the samples of more batches are dealt out anew."""

SPARE = 100
"""One in so many samples may be dropped where the costs of a step would differ by more than
:data:`SPREAD`. With fewer, the outliers of an epoch make ranks wait."""


class DynamicBatchSampler(WindowSampler):
    """Batches of as many samples as a budget allows: few long ones or many short ones.

    Runs in the process that iterates it, normally the parent. A million lengths in an array are
    planned in about half a second.

    Unshuffled, batches come in the order in which they become full; with ranks, steps come in the
    order of their first samples.

    With one rank, no sample is ever dropped. With ranks, batches are made as for one rank, and
    those of like cost form a step, from the same bucket if it has enough of them. The samples of
    batches without a match, and of incomplete batches, are sorted by cost and dealt out to the
    ranks anew. The costs in a step then differ by at most 5 % of the highest. Outliers are dropped
    for that if need be, but no more than 1 % of the samples, or ``world_size - 1``. If this is not
    enough, as with few samples for many ranks, the costs of some steps differ by more. At the end,
    fewer than ``world_size`` samples may be left over, which are dropped too.

    The items of an inner ``sampler`` are planned 10,000 at a time, as an epoch each. A state then
    has that of the inner sampler, if it has one, and no more than 10,000 items are read again.

    Args:
        lengths: length of each sample (tokens, seconds, ...), as a sequence or an array of shape
            ``(n,)``; or as any iterable, which is read lazily, at most 10,000 lengths ahead. All
            ranks must be given the same lengths. With a ``sampler``: what its items' lengths are
            looked up in (``lengths[item]``), or a function of an item.
        max_total: largest sum of the lengths in a batch. Give either this or ``max_padded``.
        max_padded: largest value of ``len(batch) * longest``, the size of the padded batch.
        max_batch: largest number of samples in a batch. None: no limit.
        buckets: number of groups of like length to batch separately, so that little is padded.
        shuffle: whether each epoch has another order, of the samples and of the batches. Lazy
            lengths are shuffled, and matched for ranks, among those that are read ahead.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        cost: returns the cost of a sample, a non-negative number, for its length, where the cost
            is not the length: ``cost=lambda n: n * n``. The budget is then one of costs, and with
            ``max_padded`` it limits ``len(batch)`` times the highest cost. Called once for each
            length that occurs.
        sampler: iterable of items, which batches then consist of, in place of the indices of
            ``lengths``. With ranks, it must give the same items in each of them.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a single sample exceeds the budget.
            (Lazy lengths and those of items raise it when they are read.)
    """

    _dealt_by: tuple[str, ...] = ("world_size", "budget", "max_batch")

    def __init__(
        self,
        lengths: Iterable[float] | LookUp | Callable[[Any], float],
        max_total: float | None = None,
        max_padded: float | None = None,
        max_batch: int | None = None,
        buckets: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cost: Callable[[Any], float] | None = None,
        sampler: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(seed, rank, world_size)
        if (max_total is None) == (max_padded is None):
            raise ValueError(
                f"give either max_total or max_padded, got {max_total!r} and {max_padded!r}"
            )
        self._padded = max_padded is not None
        self._budget_name = "max_padded" if self._padded else "max_total"
        budget: Any = max_padded if self._padded else max_total  # numpy numbers too
        if isinstance(budget, bool) or not isinstance(budget, Real) or not float(budget) > 0:
            raise ValueError(f"{self._budget_name} must be a number above 0, got {budget!r}")
        self._budget = float(budget)
        self._max_batch = None if max_batch is None else check_int("max_batch", max_batch, 1)
        self._buckets = check_int("buckets", buckets, 1)
        self.shuffle = check_bool("shuffle", shuffle)
        if cost is not None and not callable(cost):
            raise TypeError(f"cost must be a callable or None, got {shown(cost)}")
        self._cost = cost
        self._costs: NDArray[Any] | None = None  # None: they are not known beforehand
        if sampler is not None:
            self._read_items(sampler, lengths)
        elif not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be an iterable of numbers, got {lengths!r}")
        else:
            self._lazy = Repeatable("lengths", lengths)
            if isinstance(lengths, Sized):
                self._costs = self._checked(lengths, range(len(lengths)))
        self._plan: tuple[Any, list[list[int]]] | None = None  # epoch and parts, batches

    def __len__(self) -> int:
        """Return the number of batches of the epoch, the same for every rank.

        Raises:
            TypeError: the lengths are lazy.
        """
        if self._costs is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        return len(self._planned(self._costs, self.epoch, self._dealt))

    @property
    def dropped(self) -> int:
        """Number of samples of the epoch that no rank gets.

        With lazy lengths: of the last epoch that was iterated to its end.
        """
        if self._costs is not None:
            self._planned(self._costs, self.epoch, self._dealt)
        return self._dropped

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._begin()
        if self._inner is not None:
            return self._by_window(position, WINDOW)
        batches: Iterable[list[int]]
        if self._costs is None:
            # One for each part of the epoch; taken out, so that what is read is not kept.
            lengths = [*tee(self._lazy, 1 + len(position.dealt))]
            batches = self._deal_out(
                position.dealt,
                lambda sampler, given: sampler._lazily(lengths.pop(), position.epoch, given),
            )
        else:
            batches = self._planned(self._costs, position.epoch, position.dealt)
        return self._counted(islice(batches, position.yielded, None), position)

    def _counted(self, batches: Iterator[list[int]], position: Position) -> Iterator[list[int]]:
        for batch in batches:
            position.yielded += 1
            yield list(batch)  # a copy: the plan serves again, for len() and for the same epoch

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "n": None if self._costs is None else len(self._costs),
            "lengths": self._fingerprint(self._costs, "<f8"),  # or rather of their costs
            "budget": [self._budget_name, self._budget],
            "max_batch": self._max_batch,
            "buckets": self._buckets,
            "shuffle": self.shuffle,
        }

    # --- steps, which every rank plans alike

    def _deal_out(
        self,
        dealt: list[list[Any]],
        plan: Callable[[DynamicBatchSampler, set[int]], Iterable[_Step]],
    ) -> Iterator[list[int]]:
        """Yield the batches of this rank, of all parts of an epoch.

        Args:
            dealt: how the former parts were dealt out. Who had their batches does not matter.
            plan: returns the steps that a sampler makes of the samples that are not in a set.
        """
        given: set[int] = set()
        begun = 0
        for world_size, (name, budget), max_batch, until in dealt:
            former = copy(self)
            former.world_size, former._max_batch = world_size, max_batch
            former._budget_name, former._budget, former._padded = name, budget, name == "max_padded"
            steps = list(islice(plan(former, given), until - begun))
            given.update(chain.from_iterable(chain.from_iterable(steps)))
            yield from map(itemgetter(0), steps)
            begun = until
        yield from map(itemgetter(self.rank), plan(self, given))

    def _planned(self, costs: NDArray[Any], epoch: int, dealt: list[list[Any]]) -> list[list[int]]:
        """Return the batches of this rank."""

        def plan(sampler: DynamicBatchSampler, given: set[int]) -> list[_Step]:
            steps, sampler._dropped = sampler._at_once(costs, given, self._rng(epoch))
            return steps

        key = epoch if self.shuffle else 0, dealt
        if self._plan is None or self._plan[0] != key:
            self._plan = key, list(self._deal_out(dealt, plan))
        return self._plan[1]

    def _plan_window(
        self, epoch: int, before: int, items: list[Any], lengths: list[Any]
    ) -> tuple[list[list[Any]], int]:
        costs = self._checked(lengths, items)
        steps, dropped = self._at_once(costs, set(), self._rng(epoch, before))
        return [[items[place] for place in step[self.rank]] for step in steps], dropped

    def _at_once(
        self, costs: NDArray[Any], given: set[int], rng: np.random.Generator
    ) -> tuple[list[_Step], int]:
        """Return all steps, of all samples that were not given yet, and how many are dropped."""
        import numpy as np

        indices = np.delete(np.arange(len(costs)), list(given))
        costs = costs[indices]
        edges, spare = self._edges(costs), self._spare(len(costs))
        steps, dropped = self._steps((indices, costs), edges, rng, spare)
        return steps, len(dropped)

    def _lazily(self, lengths: Iterator[float], epoch: int, given: set[int]) -> Iterator[_Step]:
        """Yield the steps, window by window. The first decides the buckets."""
        import numpy as np

        rng = self._rng(epoch)
        windows = self._windows(lengths, given)
        first = next(windows, (np.empty(0, np.int64), np.empty(0, np.int64)))
        edges = self._edges(first[1])
        windows = chain([first], windows)
        if self.world_size == 1:
            samples = (self._samples(window, edges, rng) for window in windows)
            yield from ([batch] for _, _, batch in self._fill(chain.from_iterable(samples)))
            return
        seen, rest = 0, (first[0][:0], first[1][:0])
        for window in chain(windows, [rest]):
            indices, costs = map(np.concatenate, zip(rest, window, strict=True))
            seen += len(window[0])
            # Samples without a match have another chance in the next window, if they are no more
            # than half of this one. Those at the end, after the last window, have none.
            spare = len(indices) // 2 if len(window[0]) else self._spare(seen)
            steps, dropped = self._steps((indices, costs), edges, rng, spare)
            yield from steps
            at = np.searchsorted(indices, np.sort(np.array(dropped, np.int64)))
            rest = indices[at], costs[at]
        self._dropped = len(rest[0])

    def _windows(self, lengths: Iterator[float], given: set[int]) -> Iterator[_Window]:
        """Yield as many samples at a time as sorting, shuffling and matching need."""
        import numpy as np

        ahead = self.shuffle or self._buckets > 1 or self.world_size > 1
        end = 1 + max(given, default=-1)
        left = [index not in given for index in range(end)]
        numbers = chain(compress(range(end), left), count(end))
        lengths = chain(compress(islice(lengths, end), left), lengths)
        while chunk := list(islice(lengths, WINDOW if ahead else 1)):
            indices = np.fromiter(numbers, np.int64, len(chunk))
            yield indices, self._checked(chunk, indices.tolist())

    def _steps(
        self, window: _Window, edges: NDArray[Any], rng: np.random.Generator, spare: int
    ) -> tuple[list[_Step], list[int]]:
        """Return steps, and the samples that are in none of them.

        Args:
            window: its indices must ascend.
            edges: of the buckets.
            rng: what to shuffle with.
            spare: how many samples may be left out so that steps are of like cost.
        """
        import numpy as np

        steps: list[_Step] = []
        odd: list[list[int]] = []  # batches in no step
        filled = list(self._fill(self._samples(window, edges, rng)))
        if self.world_size > 1:
            buckets: list[list[_Costly]] = [[] for _ in range(self._buckets)]
            for bucket, size, batch in filled:
                buckets[bucket].append((size * len(batch) if self._padded else size, batch))
            # First within each bucket, where the batches of a step have a like shape as well.
            others = [other for batches in buckets for other in self._match(batches, steps)]
            odd = [batch for _, batch in self._match(others, steps)]
        else:
            steps = [[batch] for _, _, batch in filled]
            if self._inner is not None and self._buckets > 1:
                # The last batch of each bucket is incomplete: too many of them for a window.
                last = len(steps) - len({bucket for bucket, _, _ in filled})
                steps, odd = steps[:last], [batch for (batch,) in steps[last:]]
        rest = np.array(list(chain.from_iterable(odd)), np.int64)
        indices, costs = window
        dropped = self._deal((rest, costs[np.searchsorted(indices, rest)]), spare, steps)
        if self.shuffle:
            steps = [steps[i] for i in rng.permutation(len(steps))]
        elif self.world_size > 1:
            steps.sort(key=lambda step: min(map(min, step)))
        return steps, dropped

    def _spare(self, samples: int) -> int:
        return max(self.world_size - 1, samples // SPARE)

    def _match(self, batches: list[_Costly], steps: list[_Step]) -> list[_Costly]:
        """Add steps of batches of like cost. Return the batches that match no others."""
        batches = sorted(batches, key=itemgetter(0), reverse=True)
        odd, at = [], 0
        while at < len(batches):
            step = batches[at : at + self.world_size]
            if len(step) == self.world_size and step[-1][0] >= (1 - SPREAD) * step[0][0]:
                steps.append([batch for _, batch in step])
                at += self.world_size
            else:
                odd.append(batches[at])
                at += 1
        return odd

    def _deal(self, samples: _Window, spare: int, steps: list[_Step]) -> list[int]:
        """Deal samples out like cards, the costliest first, in rows of one for each rank.

        A step takes as many rows as the budget allows while the ranks' costs are alike. The costs
        of its first row must be alike: samples before it are dropped for that.

        Args:
            samples: the samples to deal.
            spare: how many of them may be dropped.
            steps: what to add the steps to.

        Returns:
            The samples that are in none of the steps.
        """
        import numpy as np

        ranks = self.world_size
        order = np.argsort(-samples[1], kind="stable")
        indices, costs = samples[0][order], samples[1][order]
        dropped: list[int] = []
        while len(indices) >= ranks:
            skip, spread = _alike(costs, ranks, spare)
            if spread > SPREAD and len(indices) <= spare:
                break
            spare -= skip
            dropped += indices[:skip].tolist()
            rows = min((len(indices) - skip) // ranks, self._max_batch or len(indices))
            end = skip + rows * ranks
            cards, names = (a[skip:end].reshape(rows, ranks).copy() for a in (costs, indices))
            for dealt in (cards, names):
                dealt[1::2] = dealt[1::2, ::-1]  # back and forth, or the first would get the most
            if self._padded:
                sizes = np.arange(1, rows + 1)[:, None] * cards[0]
            else:
                sizes = np.cumsum(cards, axis=0)
            most, least = sizes.max(axis=1), sizes.min(axis=1)
            fits = (most <= self._budget) & (least >= (1 - max(spread, SPREAD)) * most)
            fits[:1] = True  # even if rounding has it that it does not
            rows = 1 + int(np.flatnonzero(fits)[-1])
            steps.append(names[:rows].T.tolist())
            indices, costs = indices[skip + rows * ranks :], costs[skip + rows * ranks :]
        dropped += indices.tolist()
        return dropped

    # --- batches, as one rank alone would get them

    def _edges(self, costs: NDArray[Any]) -> NDArray[Any]:
        """Return the highest cost in each bucket but the last, such that all are equally full."""
        import numpy as np

        if self._buckets == 1 or not len(costs):
            return np.empty(0)
        edges: NDArray[Any] = np.quantile(costs, np.linspace(0, 1, self._buckets + 1)[1:-1])
        return edges

    def _samples(
        self, window: _Window, edges: NDArray[Any], rng: np.random.Generator
    ) -> Iterator[tuple[int, float, int]]:
        """Return index, cost and bucket of each sample, in the order in which to take them."""
        import numpy as np

        columns: list[NDArray[Any]] = [*window, np.searchsorted(edges, window[1])]
        if self.shuffle:
            order = rng.permutation(len(window[0]))
            columns = [column[order] for column in columns]
        return zip(*(column.tolist() for column in columns), strict=True)

    def _fill(
        self, samples: Iterable[tuple[int, float, int]]
    ) -> Iterator[tuple[int, float, list[int]]]:
        """Fill one batch for each bucket, and yield each when the next sample does not fit.

        Yields:
            The number of the bucket, the sum of the costs (for ``max_padded`` the highest), and
            the batch.
        """
        budget, padded, most = self._budget, self._padded, self._max_batch
        batches: list[list[int]] = [[] for _ in range(self._buckets)]
        sizes = [0.0] * self._buckets
        for index, cost, bucket in samples:
            batch, size = batches[bucket], sizes[bucket]
            grown = max(size, cost) if padded else size + cost
            total = grown * (len(batch) + 1) if padded else grown
            if batch and (total > budget or len(batch) == most):
                yield bucket, size, batch
                batch = batches[bucket] = []
                grown = cost
            batch.append(index)
            sizes[bucket] = grown
        yield from (
            last for last in zip(range(self._buckets), sizes, batches, strict=True) if last[2]
        )

    # --- lengths and costs

    def _checked(self, lengths: Any, items: Sequence[Any]) -> NDArray[Any]:
        """Return the cost of each sample as an array.

        Args:
            lengths: the lengths, which are checked.
            items: what messages call each sample.

        Raises:
            TypeError: a length is no number.
            ValueError: a length, or a cost, is impossible or exceeds the budget.
        """
        import numpy as np

        values = np.asarray(lengths if hasattr(lengths, "__array__") else list(lengths))
        if values.ndim != 1 or (values.size and values.dtype.kind not in "uif"):
            raise TypeError(f"lengths must be one number for each sample, got {shown(lengths)}")
        # Wide enough to add up in: a sum of float16 or uint8 would overflow.
        values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
        costs, wrong = values, ~(values >= 0)  # NaN is wrong too
        if self._cost is not None and not wrong.any():
            costs = self._costs_of(values, self._cost)
        wrong |= ~(costs <= self._budget)
        if wrong.any():
            index = int(np.argmax(wrong))
            price = "" if costs is values else f" and costs {costs[index]:g}"
            raise ValueError(
                f"lengths[{items[index]!r}] is {values[index]}{price}, but must be at least 0 and "
                f"at most {self._budget_name}={self._budget:g}; raise {self._budget_name}, or "
                "leave that sample out"
            )
        return costs

    def _costs_of(self, lengths: NDArray[Any], cost: Callable[[Any], float]) -> NDArray[Any]:
        """Return the cost of each length. ``cost`` gets Python numbers: any callable will do."""
        import numpy as np

        distinct, where = np.unique(lengths, return_inverse=True)
        costs = [cost(length) for length in distinct.tolist()]
        numbers: set[Any] = {
            kind for kind in map(type, costs) if kind is not bool and issubclass(kind, Real)
        }
        for length, value in zip(distinct, costs, strict=True):
            if type(value) not in numbers or not 0 <= value < math.inf:
                raise ValueError(
                    f"cost must give a finite number of at least 0, but for the length {length} "
                    f"it gave {shown(value)}"
                )
        return np.array(costs, np.float64)[where]


def _alike(costs: NDArray[Any], ranks: int, spare: int) -> tuple[int, float]:
    """Find the first ``ranks`` neighbours, in descending costs, whose costs are alike.

    Returns:
        How many samples come before them, at most ``spare``, and how much less the last of them
        costs than the first, as a fraction. If there are none, these are the first ``ranks``.
    """
    import numpy as np

    places = min(len(costs) - ranks, spare) + 1
    high, low = costs[:places], costs[ranks - 1 : ranks - 1 + places]
    spread = (high - low) / np.where(high > 0, high, 1)
    skip = int(np.argmax(spread <= SPREAD))  # 0 if there are none
    return skip, float(spread[skip])
