"""The samplers of minloader in tables, of which every test of all samplers is made.

A kind is a function of the rank and the world size. CONTRIBUTING.md says what else a new one needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from helpers import Lazily

from minloader import (
    BatchSampler,
    BucketBatchSampler,
    DynamicBatchSampler,
    MixtureSampler,
    PackedBatchSampler,
)

N = 61
LENGTHS = [1 + 7 * n % 13 + (30 if n == 17 else 0) for n in range(N)]
PARTS = [20, 30, 11]


class Foreign:
    """A sampler of somebody else's: a generator, with a state."""

    def __init__(self, n: int | None = None) -> None:
        self.n, self.epoch, self.at, self.begin = N if n is None else n, 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state.pop("at")

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.Random(self.epoch).shuffle(order)
        self.at, self.begin = self.begin, 0
        while self.at < self.n:
            self.at += 1
            yield order[self.at - 1]


class Told(Foreign):
    """It is told its epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Counting(Foreign):
    """It counts its epochs itself, and is at the next when one ends."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.epoch = self.at, self.epoch = state.pop("at"), state.pop("epoch")

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.at, self.epoch = 0, self.epoch + 1


def lengths_of(item: Any) -> int:
    return LENGTHS[item[1] if isinstance(item, tuple) else item]


def mixture(**options: Any) -> MixtureSampler:
    return MixtureSampler(PARTS, [0.5, 0.3, 0.2], **{"stop": "last", "shuffle": True, **options})


def twice(part: Any, **options: Any) -> MixtureSampler:
    """Each part stands where it is, though both are the same object."""
    return MixtureSampler([part, part], [2, 1], 3, "last", **options)


class Limited(BatchSampler):
    """A part that ends, beside one that is begun anew."""

    def __init__(self) -> None:
        super().__init__(MixtureSampler([5, 9], [1, 1], stop="last", shuffle=True), None)


BUDGET = {"max_total": 60, "shuffle": True}
SHAPES = {6: 3, 15: 2, 60: 1}
ITEMS = dict(enumerate(LENGTHS))

KINDS: dict[str, Callable[..., Any]] = {
    "batch": lambda **w: BatchSampler(N, 3, **w),
    "batch shuffled": lambda **w: BatchSampler(N, 3, shuffle=True, **w),
    "batch discard": lambda **w: BatchSampler(N, 4, True, "discard", **w),
    "batch rollover": lambda **w: BatchSampler(N, 4, True, "rollover", **w),
    "batch singles": lambda **w: BatchSampler(N, None, shuffle=True, **w),
    "batch asked": lambda **w: BatchSampler(partial(int, N), 3, shuffle=True, **w),
    "batch asked rollover": lambda **w: BatchSampler(partial(int, N), 4, True, "rollover", **w),
    "batch list": lambda **w: BatchSampler(list(range(N)), 3, shuffle=True, **w),
    "batch lazy": lambda **w: BatchSampler(Lazily(range(N)), 3, **w),
    "batch told": lambda **w: BatchSampler(Told(), 3, **w),
    "batch told rollover": lambda **w: BatchSampler(Told(), 4, last_batch="rollover", **w),
    "batch counting": lambda **w: BatchSampler(Counting(), 3, **w),
    "batch ours": lambda **w: BatchSampler(BatchSampler(N, None, shuffle=True), 3, **w),
    "batch mixture": lambda **w: BatchSampler(mixture(), 3, **w),
    "dynamic": lambda **w: DynamicBatchSampler(LENGTHS, max_total=60, **w),
    "dynamic shuffled": lambda **w: DynamicBatchSampler(LENGTHS, **BUDGET, **w),
    "dynamic padded": lambda **w: DynamicBatchSampler(
        LENGTHS, max_padded=80, max_batch=5, buckets=3, shuffle=True, **w
    ),
    "dynamic drop": lambda **w: DynamicBatchSampler(
        LENGTHS, max_total=25, long="drop", shuffle=True, **w
    ),
    "dynamic lazy": lambda **w: DynamicBatchSampler(Lazily(LENGTHS), max_total=60, **w),
    "dynamic lazy buckets": lambda **w: DynamicBatchSampler(
        Lazily(LENGTHS), max_padded=80, buckets=2, shuffle=True, **w
    ),
    "dynamic told": lambda **w: DynamicBatchSampler(LENGTHS, **BUDGET, sampler=Told(), **w),
    "dynamic counting": lambda **w: DynamicBatchSampler(ITEMS, **BUDGET, sampler=Counting(), **w),
    "dynamic mixture": lambda **w: DynamicBatchSampler(
        lengths_of, **BUDGET, sampler=mixture(), **w
    ),
    "dynamic singles": lambda **w: DynamicBatchSampler(
        LENGTHS, **BUDGET, sampler=BatchSampler(BatchSampler(N, None, True), None), **w
    ),
    "bucket": lambda **w: BucketBatchSampler(LENGTHS, SHAPES, **w),
    "bucket shuffled": lambda **w: BucketBatchSampler(LENGTHS, SHAPES, shuffle=True, **w),
    "bucket drop": lambda **w: BucketBatchSampler(
        LENGTHS, {6: 3, 15: 1}, shuffle=True, long="drop", **w
    ),
    "bucket lazy": lambda **w: BucketBatchSampler(Lazily(LENGTHS), SHAPES, shuffle=True, **w),
    "bucket told": lambda **w: BucketBatchSampler(LENGTHS, SHAPES, sampler=Told(), **w),
    "packed": lambda **w: PackedBatchSampler(LENGTHS, 45, 2, **w),
    "packed shuffled": lambda **w: PackedBatchSampler(LENGTHS, 45, 2, shuffle=True, **w),
    "packed window": lambda **w: PackedBatchSampler(LENGTHS, 45, window=10, shuffle=True, **w),
    "packed drop": lambda **w: PackedBatchSampler(LENGTHS, 30, 2, "drop", shuffle=True, **w),
    "packed split": lambda **w: PackedBatchSampler(LENGTHS, 9, 2, "split", shuffle=True, **w),
    "packed lazy": lambda **w: PackedBatchSampler(Lazily(LENGTHS), 45, 2, shuffle=True, **w),
    "packed told": lambda **w: PackedBatchSampler(LENGTHS, 45, sampler=Told(), **w),
    "packed mixture": lambda **w: PackedBatchSampler(
        lengths_of, 9, 2, "split", shuffle=True, sampler=mixture(), **w
    ),
    "mixture": lambda **w: mixture(batch_size=3, **w),
    "mixture singles": lambda **w: mixture(stop="first", shuffle=False, **w),
    "mixture by length": lambda **w: mixture(batch_size=3, lengths=lengths_of, **w),
    "mixture told": lambda **w: MixtureSampler(
        [Told(30), BatchSampler(20, None, True), 11], [3, 2, 1], 3, "last", **w
    ),
    "mixture of one twice": lambda **w: twice(BatchSampler(9, None, shuffle=True), **w),
    "mixture rollover": lambda **w: MixtureSampler(
        [BatchSampler(20, 3, last_batch="rollover"), 10], [2, 1], 2, "last", **w
    ),
    "mixture never": lambda **w: MixtureSampler(
        [Limited(), Told(7)], [2, 1], 3, "first", shuffle=True, **w
    ),
}
"""Each with the arguments that change its order, or how it is read."""

LIMITED: list[tuple[str, Any]] = [
    (
        "max_batch",
        lambda most, **w: DynamicBatchSampler(
            LENGTHS, 60, max_batch=3 if most else None, shuffle=True, **w
        ),
    ),
    (
        "max_total",
        lambda most, **w: DynamicBatchSampler(LENGTHS, 45 if most else 60, shuffle=True, **w),
    ),
    (
        "max_padded",
        lambda most, **w: DynamicBatchSampler(
            Lazily(LENGTHS), max_padded=45 if most else 60, buckets=2, **w
        ),
    ),
    ("rows", lambda most, **w: PackedBatchSampler(LENGTHS, 45, 3 if most else None, **w)),
    (
        "capacity",
        lambda most, **w: PackedBatchSampler(
            LENGTHS, 45 if most else 60, window=20, shuffle=True, **w
        ),
    ),
    ("batch_size", lambda most, **w: BatchSampler(N, 6 if most else 2, True, **w)),
]
"""Samplers with another limit on a batch, and the name of that argument."""

FEW = [1, 2, 3, 4] * 5

GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch": (BatchSampler, {"n_or_sampler": 20, "batch_size": 3}),
    "dynamic": (DynamicBatchSampler, {"lengths": FEW, "max_total": 7}),
    "bucket": (BucketBatchSampler, {"lengths": FEW, "shapes": {2: 3, 4: 2}}),
    "packed": (PackedBatchSampler, {"lengths": FEW, "capacity": 4, "rows": 2}),
    "mixture": (MixtureSampler, {"parts": [9, 9], "weights": [1, 1]}),
}
"""Each kind of sampler, and arguments for it."""

OF_SIZE: dict[str, tuple[Callable[[int], Any], dict[str, bool]]] = {
    "shuffled": (lambda n: BatchSampler(n, 2, shuffle=True), {}),
    "discarding": (
        lambda n: BatchSampler(n, 2, True, "discard", rank=1, world_size=2),
        {},
    ),
    "dynamic": (
        lambda n: DynamicBatchSampler([1 + k % 3 for k in range(n)], max_total=4, shuffle=True),
        {},
    ),
    "bucket": (
        lambda n: BucketBatchSampler([1 + k % 3 for k in range(n)], {2: 2, 3: 1}, shuffle=True),
        {},
    ),
    "packed": (
        lambda n: PackedBatchSampler([1 + k % 3 for k in range(n)], 4, shuffle=True),
        {"lists": False, "numbers": False},
    ),
    "mixture": (
        lambda n: MixtureSampler(
            [BatchSampler(n, None, shuffle=True), 1 + n // 2], [2, 1], 2, stop="last"
        ),
        {"numbers": False},
    ),
}
"""Those of the model, by how many samples there are; and what of a ``Kind`` is otherwise."""
