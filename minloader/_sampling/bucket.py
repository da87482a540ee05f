"""Batches of fixed shapes: each bucket of lengths has its own number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minloader._arguments import checked_int
from minloader._formats import brief_repr
from minloader._sampling.lengths import LookUp
from minloader._sampling.padding import pad_collate
from minloader._sampling.windows import MOST, Plan, WindowSampler


class BucketBatchSampler(WindowSampler):
    """Batches of fixed shapes, for models that are compiled for each shape.

    Runs in the process that iterates it, normally the parent. A *bucket* holds the samples that are
    at most so long, and too long for the bucket before. A batch has as many samples as its bucket
    says, never fewer. With ranks, all batches of a step are of one bucket, and so of one shape.

    Samples that are too few for a step go into the next bucket, of longer ones. Those that are left
    in the last bucket are dropped: fewer than a step, and others in each epoch if it shuffles.

    Unshuffled, steps come in the order of their first samples.

    Lazy lengths, and the items of an inner ``sampler``, are planned 10,000 at a time, as an epoch
    each.

    Args:
        lengths: length of each sample, as for :class:`DynamicBatchSampler`. Of pairs, such as a
            source and a target, give the longer one: ``numpy.maximum(sources, targets)``.
        shapes: for each bucket, the length of its longest samples and how many a batch has:
            ``{128: 64, 256: 32, 512: 16}``.
        shuffle: whether each epoch has another order, of the samples and of the batches.
        seed: non-negative int. The order depends on it and on the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
        sampler: iterable of items, which batches then consist of, in place of the indices of
            ``lengths``. With ranks, it must give the same items in each of them.
        long: what to do with a sample that is longer than all buckets: "refuse" it, or "drop" it,
            which ``dropped`` counts.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value, or a sample is too long. (Lazy lengths and
            those of items raise both where they are read, once each; the sample is left out.)
    """

    _arguments = ("n", "lengths_digest", "shapes", "shuffle")

    def __init__(
        self,
        lengths: Iterable[float] | LookUp | Callable[[Any], float],
        shapes: Mapping[int, int],
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        sampler: Iterable[Any] | None = None,
        long: Literal["refuse", "drop"] = "refuse",
    ) -> None:
        if not isinstance(shapes, Mapping) or not shapes:
            raise TypeError(
                "shapes must be a dict of lengths and numbers of samples, such as "
                f"{{128: 64, 256: 32}}, got {brief_repr(shapes)}"
            )
        found = {checked_int("a length of shapes", each, 1, MOST): shapes[each] for each in shapes}
        # Lists, as they come back from JSON.
        self.shapes = [
            [length, checked_int(f"shapes[{length}]", found[length], 1)] for length in sorted(found)
        ]
        super().__init__(
            lengths, sampler, long, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
        )

    def _cost_limit(self, by: Any) -> tuple[str, float]:
        return "max(shapes)", by["shapes"][-1][0]

    def _plan(self, costs: NDArray[Any], rng: np.random.Generator, by: Any) -> Iterator[Plan]:
        ranks = by["world_size"]
        numbers = np.arange(len(costs))
        if self.shuffle:
            rng.shuffle(numbers)
        bucket = np.searchsorted([length for length, _ in self.shapes], costs[numbers])
        rest = numbers[:0]
        batches: list[NDArray[Any]] = []
        sizes: list[int] = []
        for n, (_, size) in enumerate(self.shapes):
            found = np.concatenate([rest, numbers[bucket == n]])
            steps = len(found) // (size * ranks)
            stop = steps * size * ranks
            batches.append(found[:stop])
            sizes += [size] * (steps * ranks)
            rest = found[stop:]
        numbers = np.concatenate(batches)
        stops = np.cumsum(sizes, dtype=np.int64).reshape(-1, ranks)
        starts = stops - np.array(sizes, np.int64).reshape(-1, ranks)
        order = np.argsort(numbers[starts[:, 0]])
        if self.shuffle:
            order = rng.permutation(order)
        yield numbers, starts[order].reshape(-1), stops[order].reshape(-1)

    def collate(
        self,
        value: Any = 0,
        side: str | Mapping[Any, str] = "right",
        axis: int | Mapping[Any, int] = 0,
    ) -> pad_collate:
        """Return the ``collate_fn`` that pads each sequence to the length of its bucket.

        Args:
            value, side, axis: see :class:`pad_collate`.
        """
        return _pad_to_bucket(value, side=side, axis=axis, shapes=self.shapes)


@dataclass(frozen=True)
class _pad_to_bucket(pad_collate):  # noqa: N801
    """The same, to the length of a bucket of ``shapes``."""

    shapes: Any = ()

    def _padded_length(self, lengths: NDArray[np.int64], path: str) -> int:
        """Return the length of the bucket, which the number of samples tells from others.

        All of its samples may be of a shorter one.
        """
        n = len(lengths)
        longest = int(lengths.max())
        fitting = [each for each in self.shapes if longest <= each[0] and n <= each[1]]
        if not fitting:
            raise ValueError(
                f"collate: {n} samples, of which {path} has up to {longest} entries, are no batch "
                f"of shapes={dict(self.shapes)}; give the sampler the lengths of that part, or cut "
                "it in transform"
            )
        length: int = min(fitting, key=lambda each: each[1] != n)[0]  # fewer: some were left out
        return length
