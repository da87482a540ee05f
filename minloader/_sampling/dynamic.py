"""Batches of as many samples as a budget allows, of like cost in every rank.

A window (``windows.py``) is planned in this order:

1. Samples, shuffled or in order, fill one batch for each bucket at a time (``_filled``).
2. Whole batches of like cost make a step (``_match``): ``world_size`` batches, one for each rank.
3. The samples of batches without a match, and of incomplete ones, are dealt out anew (``_deal``).

Every rank plans all steps from the same seed and takes its own batch of each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import as_float, check_callable, checked_int
from minloader._sampling.lengths import LookUp
from minloader._sampling.windows import Plan, WindowSampler

SPREAD = 0.05
"""How much the costs of a step's batches may differ, as a fraction of the highest: the share of its
time that a rank may wait for another. With less, the samples of more batches are dealt out anew."""

BLOCK = 1 << 16
"""Costs that exist as Python numbers at a time."""


class DynamicBatchSampler(WindowSampler):
    """Batches of as many samples as a budget allows: few long ones or many short ones.

    Runs in the process that iterates it, normally the parent. A million lengths in an array are
    planned in less than half a second.

    Unshuffled, steps come in the order of their first samples.

    With one rank, no sample is ever dropped, save those that ``long`` says. With ranks, batches are
    made as for one rank, and those of like cost form a step, from the same bucket if it has enough
    of them. The samples of batches without a match, and of incomplete batches, are dealt out to the
    ranks anew, the costliest first, each to the rank that has the least. The costs in a step differ
    by at most 5 % of the highest, save where there are too few samples for that. At the end, fewer
    than ``world_size`` samples may be left over, which are dropped: others in each epoch.

    Lazy lengths, and the items of an inner ``sampler``, are planned 10,000 at a time, as an epoch
    each. A state then has that of the inner sampler, if it has one, and no more than 10,000 items
    are read again.

    Args:
        lengths: length of each sample (tokens, seconds, ...), as a sequence or an array of shape
            ``(n,)``; or as any iterable, which is read lazily. All ranks must be given the same
            lengths. A sample that costs nothing counts as one that costs 1, so that batches do not
            grow without end. With a ``sampler``: what its items' lengths are looked up in
            (``lengths[item]``), or a function of an item.
        max_total: largest sum of the lengths in a batch. Give either this or ``max_padded``.
        max_padded: largest value of ``len(batch) * longest``, the size of the padded batch.
        max_batch: largest number of samples in a batch. None: no limit.
        buckets: number of groups of like length to batch separately, so that little is padded.
        shuffle: whether each epoch has another order, of the samples and of the batches. Lazy
            lengths are shuffled, and matched for ranks, among those that are planned together.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        cost: returns the cost of a sample, a non-negative number, for its length, where the cost
            is not the length: ``cost=lambda n: n * n``. The budget is then one of costs, and with
            ``max_padded`` it limits ``len(batch)`` times the highest cost. Called once for each
            length that occurs; with lengths that are read as they are needed, once in a window.
        sampler: iterable of items, which batches then consist of, in place of the indices of
            ``lengths``. With ranks, it must give the same items in each of them.
        long: what to do with a sample that exceeds the budget alone: "refuse" it, or "drop" it,
            which ``dropped`` counts.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a single sample exceeds the budget.
            (Lazy lengths and those of items raise both where they are read, once each; the sample
            is left out.)
    """

    _arguments = (
        "n",
        "lengths_digest",
        "max_total",
        "max_padded",
        "max_batch",
        "buckets",
        "shuffle",
    )
    _dealt_by = ("world_size", "max_total", "max_padded", "max_batch")
    _cost_limits = ("max_padded", "max_total")

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
        long: Literal["refuse", "drop"] = "refuse",
    ) -> None:
        if (max_total is None) == (max_padded is None):
            raise ValueError(
                f"give either max_total or max_padded, got {max_total!r} and {max_padded!r}"
            )
        name = "max_total" if max_padded is None else "max_padded"
        budget: Any = max_total if max_padded is None else max_padded  # numpy numbers too
        if isinstance(budget, bool) or not isinstance(budget, Real) or not as_float(budget) > 0:
            raise ValueError(f"{name} must be a number above 0, got {budget!r}")
        self.max_total = None if max_total is None else as_float(max_total)
        self.max_padded = None if max_padded is None else as_float(max_padded)
        self.max_batch = None if max_batch is None else checked_int("max_batch", max_batch, 1)
        self.buckets = checked_int("buckets", buckets, 1)
        check_callable("cost", cost)
        self.cost = cost
        super().__init__(
            lengths, sampler, long, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
        )

    def largest(self, n: int = 1) -> list[list[int]]:
        """Return the largest batches that the next epoch has for this rank, the largest first.

        Padded, they take the most memory. A loader that is given them as its sampler shows in the
        first minute whether they fit. Nothing is taken from the epoch.

        Args:
            n: how many.

        Raises:
            TypeError: the lengths are not all known, or ``n`` is not an int.
            ValueError: ``n`` is below 1.
        """
        n = checked_int("n", n, 1)
        window = self._all
        if window is None:
            raise TypeError(
                "largest is for lengths that are all known; these are read as they are needed: "
                "give a list or an array of lengths, without sampler"
            )
        costs = np.zeros(self.n or 0)
        costs[slice(None) if window.samples is None else window.samples] = window.costs
        batches = list(self._begin(self, self.epoch, self._beginning()))
        batches.sort(key=lambda batch: len(batch) * costs[batch].max(), reverse=True)
        return batches[:n]

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Iterator[Plan]:
        ranks = by["world_size"]
        budget = Budget(
            most=self._cost_limit(by)[1],
            is_padded=by["max_padded"] is not None,
            max_batch=by["max_batch"],
        )
        numbers = np.arange(len(costs), dtype=np.min_scalar_type(-len(costs) - 1))
        if self.shuffle:
            rng.shuffle(numbers)
        numbers, borders = self._into_buckets(numbers, costs)
        # Where each batch ends, and what it costs; behind an empty one.
        ends = [0]
        sizes = [0.0]
        steps: list[list[int]] = []
        unmatched: list[int] = []
        others: list[int] = []
        for start, stop in pairwise(borders):
            first = len(ends)
            for end, size in _filled(costs[numbers[start:stop]], budget):
                ends.append(start + end)
                sizes.append(size)
            unmatched += range(first, len(ends))[-1:]  # it may be incomplete
            # Within a bucket first, where the batches have a like shape as well.
            others += _match(range(first, len(ends) - 1), sizes, ranks, steps)
        unmatched += _match(others, sizes, ranks, steps)
        spans = [numbers[ends[batch - 1] : ends[batch]] for batch in unmatched]
        rest = np.sort(np.concatenate([numbers[:0], *spans]))
        dealt = _deal(rest, costs[rest], ranks, budget, rng)
        bounds = np.array(ends, np.int64)
        chosen = np.array(steps, np.int64).reshape(-1)
        added = np.cumsum([len(numbers), *map(len, dealt)])
        starts = np.concatenate([bounds[chosen - 1], added[:-1]])
        stops = np.concatenate([bounds[chosen], added[1:]])
        numbers = np.concatenate([numbers, *dealt])
        count = len(starts) // ranks
        if self.shuffle:
            order = rng.permutation(count)
        else:
            firsts = [numbers[a:b].min() for a, b in zip(starts, stops, strict=True)]
            order = np.argsort(np.array(firsts, np.int64).reshape(count, ranks).min(axis=1))
        places = (order[:, None] * ranks + np.arange(ranks)).reshape(-1)
        yield numbers, starts[places], stops[places]

    def _into_buckets(
        self, numbers: NDArray[Any], costs: NDArray[Any]
    ) -> tuple[NDArray[Any], list[int]]:
        """Return numbers of samples, bucket after bucket; and where each bucket begins and ends."""
        if self.buckets == 1 or not len(costs):
            return numbers, [0, len(costs)]
        edges = np.quantile(costs, np.linspace(0, 1, self.buckets + 1)[1:-1])
        bucket = np.searchsorted(edges, costs).astype(np.min_scalar_type(self.buckets))
        numbers = numbers[np.argsort(bucket[numbers], kind="stable")]
        return numbers, [0, *np.cumsum(np.bincount(bucket, minlength=self.buckets)).tolist()]


class Budget(NamedTuple):
    """What a batch may have.

    Attributes:
        most: what it may cost.
        is_padded: whether that is its size when it is padded, or else what its samples cost.
        max_batch: number of samples that it may have; None for any.
    """

    most: float
    is_padded: bool
    max_batch: int | None


def _filled(costs: NDArray[Any], budget: Budget) -> Iterator[tuple[int, float]]:
    """Fill batches with samples as they come; yield where each ends, and what it costs."""
    most, padded, max_batch = budget
    count = 0
    size = 0.0
    chunks = (costs[at : at + BLOCK].tolist() for at in range(0, len(costs), BLOCK))
    for index, cost in enumerate(chain.from_iterable(chunks)):
        if padded:
            grown = cost if cost > size else size
            full = grown * (count + 1) > most
        else:
            grown = size + cost
            full = grown > most
        if count and (full or count == max_batch):
            yield index, size * count if padded else size
            count = 0
            grown = cost
        size = grown
        count += 1
    if count:
        yield len(costs), size * count if padded else size


def _match(
    batches: Iterable[int], sizes: list[float], ranks: int, steps: list[list[int]]
) -> list[int]:
    """Add steps of batches of like cost. Return the batches that match no others."""
    batches = sorted(batches, key=sizes.__getitem__, reverse=True)
    unmatched: list[int] = []
    at = 0
    while at < len(batches):
        step = batches[at : at + ranks]
        if len(step) == ranks and sizes[step[-1]] >= (1 - SPREAD) * sizes[step[0]]:
            steps.append(step)
            at += ranks
        else:
            unmatched.append(batches[at])
            at += 1
    return unmatched


def _deal(
    numbers: NDArray[Any],
    costs: NDArray[Any],
    ranks: int,
    budget: Budget,
    rng: np.random.Generator,
) -> list[NDArray[Any]]:
    """Deal samples out, the costliest first, each to the rank whose batch costs least so far.

    A step ends where that batch is full, or earlier, where all its batches were last of like cost.

    Args:
        numbers: of the samples to deal.
        costs: what they cost.
        ranks: number of ranks.
        budget: of a batch.
        rng: what to draw from. If fewer samples than ranks are left over, chance says which.

    Returns:
        The batches, step after step.
    """
    order = np.argsort(-costs.astype(np.float64), kind="stable")
    values = costs[order].tolist()
    steps: list[list[list[int]]] = []
    at = 0
    first = 0
    while len(values) - at >= ranks:
        bins: list[list[int]] = [[] for _ in range(ranks)]  # one for the batch of each rank
        heap = [(0, rank) for rank in range(ranks)]
        first = at
        level = 0  # behind the last sample after which all batches were of like cost
        highest = 0
        for stop in range(at, len(values)):
            size, rank = heap[0]
            chosen = bins[rank]
            grown = size + values[stop]
            if budget.is_padded and chosen:
                grown = values[chosen[0]] * (len(chosen) + 1)
            if chosen and (grown > budget.most or len(chosen) == budget.max_batch):
                break
            chosen.append(stop)
            heapq.heapreplace(heap, (grown, rank))
            highest = max(highest, grown)
            if heap[0][0] >= (1 - SPREAD) * highest:
                level = stop + 1
        at = level or sum(map(len, bins)) + first
        steps.append([[index for index in chosen if index < at] for chosen in bins])
    if steps and at < len(values):
        some = rng.choice(np.arange(first, at), len(values) - at, replace=False)
        left_over = order[at:].copy()
        order[at:] = order[some]
        order[some] = left_over
    return [numbers[np.sort(order[chosen])] for step in steps for chosen in step]
