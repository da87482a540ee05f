"""Batches of as many samples as a budget allows, of like cost in every rank.

A window (``windows.py``) is planned in this order:

1. Samples, shuffled or in order, fill one batch for each bucket at a time (``_fill``). With one
   rank and one bucket this is all.
2. With ranks, whole batches of like cost make a step (``_match``): ``world_size`` batches, one for
   each rank.
3. The samples of batches without a match, and of incomplete ones, are dealt out anew (``_deal``).

Every rank plans all steps from the same seed and takes its own batch of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from minloader._checks import check_int, shown
from minloader._sampling.source import LookUp
from minloader._sampling.windows import WindowSampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from minloader._sampling.windows import Plan

SPREAD = 0.05
"""How much the costs of a step's batches may differ, as a fraction of the highest: the share of its
time that a rank may wait for another. With less, the samples of more batches are dealt out anew."""

CHUNK = 1 << 16
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
            length that occurs.
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

    _arguments = ("n", "lengths", "max_total", "max_padded", "max_batch", "buckets", "shuffle")
    _dealt_by = ("world_size", "max_total", "max_padded", "max_batch")

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
        if isinstance(budget, bool) or not isinstance(budget, Real) or not float(budget) > 0:
            raise ValueError(f"{name} must be a number above 0, got {budget!r}")
        self.max_total = None if max_total is None else float(max_total)
        self.max_padded = None if max_padded is None else float(max_padded)
        self.max_batch = None if max_batch is None else check_int("max_batch", max_batch, 1)
        self.buckets = check_int("buckets", buckets, 1)
        if cost is not None and not callable(cost):
            raise TypeError(f"cost must be a callable or None, got {shown(cost)}")
        self.cost = cost
        limit = name, float(budget)
        super().__init__(lengths, sampler, limit, long, shuffle, (seed, rank, world_size))

    def _price(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Return the cost of each length. ``cost`` gets Python numbers: any callable will do."""
        import numpy as np

        if self.cost is None:
            if lengths.dtype.kind == "f":  # wide enough: small types would overflow
                return lengths.astype(np.float64)
            return lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
        distinct, where = np.unique(lengths, return_inverse=True)
        costs = [self.cost(length) for length in distinct.tolist()]
        for length, value in zip(distinct, costs, strict=True):
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(
                    f"cost must give a finite number of at least 0, but for the length {length} "
                    f"it gave {shown(value)}"
                )
        return np.array(costs, np.float64)[where]

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Plan:
        import numpy as np

        ranks, most = by["world_size"], by["max_batch"]
        padded = by["max_padded"] is not None
        budget = by["max_padded"] if padded else by["max_total"]
        numbers = np.arange(len(costs), dtype=np.min_scalar_type(-len(costs) - 1))
        if self.shuffle:
            rng.shuffle(numbers)
        borders = [0, len(costs)]
        if self.buckets > 1 and len(costs):
            edges = np.quantile(costs, np.linspace(0, 1, self.buckets + 1)[1:-1])
            bucket = np.searchsorted(edges, costs).astype(np.min_scalar_type(self.buckets))
            numbers = numbers[np.argsort(bucket[numbers], kind="stable")]
            counts = np.bincount(bucket, minlength=self.buckets)
            borders = [0, *np.cumsum(counts).tolist()]
        stops: list[int] = []
        sizes: list[float] = []
        last: list[int] = []  # batch of each bucket, which may be incomplete
        steps: list[list[int]] = []
        others: list[int] = []
        for start, stop in pairwise(borders):
            first = len(stops)
            _fill(costs, numbers, start, stop, (budget, padded, most), stops, sizes)
            batches = range(first, len(stops))
            if ranks > 1:  # within a bucket first, where the batches have a like shape as well
                others += _match(batches, sizes, ranks, steps)
            else:
                steps += [[batch] for batch in batches[: None if self.buckets == 1 else -1]]
                last += [] if self.buckets == 1 else batches[-1:]
        odd = _match(others, sizes, ranks, steps) if ranks > 1 else last
        starts = np.array([0, *stops[:-1]], np.int64)[: len(stops)]
        ends = np.array(stops, np.int64)
        spans = [numbers[starts[batch] : ends[batch]] for batch in odd]
        rest = np.sort(np.concatenate([numbers[:0], *spans]))
        dealt = _deal(rest, costs[rest], ranks, (budget, padded, most), rng)
        chosen = np.array(steps, np.int64).reshape(-1)
        added = np.cumsum([len(numbers), *map(len, dealt)])
        starts = np.concatenate([starts[chosen], added[:-1]])
        ends = np.concatenate([ends[chosen], added[1:]])
        numbers = np.concatenate([numbers, *dealt])
        count = len(starts) // ranks
        if self.shuffle:
            order = rng.permutation(count)
        else:
            firsts = [numbers[a:b].min() for a, b in zip(starts, ends, strict=True)]
            order = np.argsort(np.array(firsts, np.int64).reshape(count, ranks).min(axis=1))
        places = (order[:, None] * ranks + np.arange(ranks)).reshape(-1)
        return numbers, starts[places], ends[places]


_Budget = tuple[float, bool, int | None]
"""How much a batch may cost, whether that is padded, and how many samples it may have."""


def _fill(
    costs: NDArray[Any],
    numbers: NDArray[Any],
    start: int,
    stop: int,
    limits: _Budget,
    stops: list[int],
    sizes: list[float],
) -> None:
    """Fill batches with samples as they come; note where each ends, and what it costs."""
    budget, padded, most = limits
    count, size = 0, 0.0
    limit = most or stop + 1
    for first in range(start, stop, CHUNK):
        chunk = costs[numbers[first : min(first + CHUNK, stop)]].tolist()
        for place, cost in enumerate(chunk, first):
            if padded:
                grown = cost if cost > size else size
                fits = grown * (count + 1) <= budget
            else:
                grown = size + cost
                fits = grown <= budget
            if count and (not fits or count == limit):
                stops.append(place)
                sizes.append(size * count if padded else size)
                count, grown = 0, cost
            size = grown
            count += 1
    if count:
        stops.append(stop)
        sizes.append(size * count if padded else size)


def _match(
    batches: Iterable[int], sizes: list[float], ranks: int, steps: list[list[int]]
) -> list[int]:
    """Add steps of batches of like cost. Return the batches that match no others."""
    batches = sorted(batches, key=sizes.__getitem__, reverse=True)
    odd, at = [], 0
    while at < len(batches):
        step = batches[at : at + ranks]
        if len(step) == ranks and sizes[step[-1]] >= (1 - SPREAD) * sizes[step[0]]:
            steps.append(step)
            at += ranks
        else:
            odd.append(batches[at])
            at += 1
    return odd


def _deal(
    numbers: NDArray[Any],
    costs: NDArray[Any],
    ranks: int,
    limits: _Budget,
    rng: np.random.Generator,
) -> list[NDArray[Any]]:
    """Deal samples out, the costliest first, each to the rank whose batch costs least so far.

    A step ends where that batch is full, or earlier, where all its batches were last of like cost.

    Args:
        numbers: of the samples to deal.
        costs: what they cost.
        ranks: number of ranks.
        limits: of a batch.
        rng: what to draw from. If fewer samples than ranks are left over, chance says which.

    Returns:
        The batches, step after step.
    """
    import numpy as np

    budget, padded, most = limits
    order = np.argsort(-costs.astype(np.float64), kind="stable")
    values = costs[order].tolist()
    steps: list[list[list[int]]] = []
    at = first = 0
    while len(values) - at >= ranks:
        hands: list[list[int]] = [[] for _ in range(ranks)]
        heap = [(0, rank) for rank in range(ranks)]
        first, alike, highest = at, 0, 0
        for stop in range(at, len(values)):
            size, rank = heap[0]
            hand = hands[rank]
            grown = values[hand[0]] * (len(hand) + 1) if padded and hand else size + values[stop]
            if hand and (grown > budget or len(hand) == most):
                break
            hand.append(stop)
            heapq.heapreplace(heap, (grown, rank))
            highest = max(highest, grown)
            if heap[0][0] >= (1 - SPREAD) * highest:
                alike = stop + 1
        at = alike or sum(map(len, hands)) + first
        steps.append([[place for place in hand if place < at] for hand in hands])
    if steps and at < len(values):
        some = rng.choice(np.arange(first, at), len(values) - at, replace=False)
        order[some], order[at:] = order[at:], order[some]
    return [numbers[order[hand]] for step in steps for hand in step]
