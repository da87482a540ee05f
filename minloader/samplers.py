"""Samplers: what a batch is made of. They run in the parent and yield lists of indices.

The order of an epoch depends on ``seed`` and on the epoch set by ``set_epoch`` alone, which
:class:`minloader.Loader` calls at the start of each epoch. An iterator keeps the epoch it
began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from minloader.errors import check_int, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BatchSampler", "DynamicBatchSampler"]

WINDOW = 10_000
"""Lengths that a lazy DynamicBatchSampler reads ahead to sort or shuffle: more makes tighter
buckets and better shuffling, but the first batch waits for all of them."""

CHUNK = 65_536
"""Indices that are Python integers at a time, 2 MB: a larger share of them gains no speed."""


class Repeatable:
    """An iterable that refuses a second pass where it would be silently empty.

    Args:
        name: of the argument that it was given as.
        iterable: what to go through.
    """

    def __init__(self, name: str, iterable: Iterable[Any]) -> None:
        self._name = name
        self._iterable = iterable
        self._used_up = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._iterable)
        if iterator is self._iterable:
            if self._used_up:
                raise RuntimeError(
                    f"{self._name} is an iterator, {shown(iterator)}, which serves one epoch and "
                    "has served it; pass a list, or an object whose __iter__ begins anew"
                )
            self._used_up = True
        return iterator


class _Sampler:
    """What the samplers share: a seed and an epoch."""

    def __init__(self, seed: int) -> None:
        self.seed = check_int("seed", seed, 0)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next ``iter`` gives the order of."""
        self.epoch = check_int("epoch", epoch, 0)

    def _rng(self, epoch: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))


class BatchSampler(_Sampler):
    """Batches of a fixed number of indices.

    Args:
        n_or_sampler: number of samples, or an iterable of indices.
        batch_size: indices in a batch. None: single indices rather than lists.
        shuffle: another order each epoch. A sampler given is then read whole first.
        last_batch: what becomes of an incomplete last batch: "keep" it, "discard" it, or
            "rollover": the next epoch begins with it.
        seed: non-negative int that, with the epoch, decides the order.

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
    ) -> None:
        super().__init__(seed)
        self._inner: Iterable[Any] | None = None
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
        self._left: list[Any] = []  # of the inner sampler's last complete epoch, to roll over

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next ``iter`` gives the order of."""
        super().set_epoch(epoch)
        if self._inner is not None and hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches of the epoch.

        Raises:
            TypeError: the inner sampler has no length.
        """
        n = self._n if self._inner is None else len(self._inner)  # type: ignore[arg-type]
        if self.batch_size is None:
            return n
        if self.last_batch == "rollover":
            n += self._carry_size(self.epoch) if self._inner is None else len(self._left)
        return -(-n // self.batch_size) if self.last_batch == "keep" else n // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        if self.batch_size is None:
            return iter(self._order(epoch))
        carry = self._carry(epoch) if self.last_batch == "rollover" else []
        return self._batches(iter(self._order(epoch)), carry, self.batch_size)

    def _batches(self, order: Iterator[Any], carry: list[Any], size: int) -> Iterator[list[Any]]:
        batch = carry
        while True:
            batch = batch + list(islice(order, size - len(batch)))
            if len(batch) < size:
                break
            yield batch
            batch = []
        self._left = batch
        if batch and self.last_batch == "keep":
            yield batch

    def _order(self, epoch: int) -> Iterable[Any]:
        if not self.shuffle:
            return range(self._n) if self._inner is None else iter(self._items)
        if self._inner is None:
            order = self._rng(epoch).permutation(self._n)
            # Python integers, but not all of them at once: they take five times the memory.
            chunks = (order[i : i + CHUNK].tolist() for i in range(0, self._n, CHUNK))
            return chain.from_iterable(chunks)
        inner = list(self._items)
        return [inner[i] for i in self._rng(epoch).permutation(len(inner))]

    def _carry_size(self, epoch: int) -> int:
        assert self.batch_size is not None
        return epoch * self._n % self.batch_size

    def _carry(self, epoch: int) -> list[Any]:
        """What earlier epochs left over. Known from the epoch's number where the order is."""
        if self._inner is not None:
            return self._left
        carry: list[Any] = []
        missing = self._carry_size(epoch)
        while missing:
            epoch -= 1
            tail = list(self._order(epoch))[-missing:]
            carry = tail + carry
            missing -= len(tail)
        return carry


class DynamicBatchSampler(_Sampler):
    """Batches of as many samples as a budget allows: few long ones or many short ones.

    Args:
        lengths: length of each sample (tokens, seconds, ...), a sequence or array; or any
            iterable, which is read lazily, at most 10,000 ahead.
        max_total: most that the lengths of a batch may add up to. Either this or
        max_padded: most that ``len(batch) * longest`` may come to.
        max_batch: most samples in a batch.
        buckets: how many groups of like length to keep apart, so that little is padded.
        shuffle: another order each epoch, of samples and batches. Lazy lengths are shuffled
            within what is read ahead.
        seed: non-negative int that, with the epoch, decides the order.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or a single sample exceeds the
            budget.
    """

    def __init__(
        self,
        lengths: Iterable[float],
        max_total: float | None = None,
        max_padded: float | None = None,
        max_batch: int | None = None,
        buckets: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
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
        self.shuffle = bool(shuffle)
        if not hasattr(lengths, "__iter__"):
            raise TypeError(f"lengths must be an iterable of numbers, got {lengths!r}")
        self._lazy = Repeatable("lengths", lengths)
        self._lengths = self._checked(lengths, 0) if hasattr(lengths, "__len__") else None
        self._plan: tuple[int, list[list[int]]] | None = None  # epoch and its batches

    def __len__(self) -> int:
        """Number of batches of the epoch.

        Raises:
            TypeError: the lengths are lazy.
        """
        if self._lengths is None:
            raise TypeError("lengths are read lazily, so the number of batches is not known")
        return len(self._planned(self._lengths, self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        if self._lengths is not None:
            # Copies: the plan serves again, for len() and for the same epoch.
            return map(list, self._planned(self._lengths, self.epoch))
        return self._fill(self._read_ahead(iter(self._lazy), self.epoch))

    def _planned(self, lengths: NDArray[Any], epoch: int) -> list[list[int]]:
        if self._plan is None or self._plan[0] != epoch:
            rng = self._rng(epoch)
            batches = list(self._fill(self._samples(lengths, 0, self._edges(lengths), rng)))
            if self.shuffle:
                batches = [batches[i] for i in rng.permutation(len(batches))]
            self._plan = epoch, batches
        return self._plan[1]

    def _read_ahead(self, lengths: Iterator[float], epoch: int) -> Iterator[tuple[int, float, int]]:
        """Goes through lazy lengths window by window. The first decides the buckets."""
        rng = self._rng(epoch)
        window = WINDOW if self.shuffle or self._buckets > 1 else 1
        edges, seen = None, 0
        while chunk := list(islice(lengths, window)):
            values = self._checked(chunk, seen)
            edges = self._edges(values) if edges is None else edges
            yield from self._samples(values, seen, edges, rng)
            seen += len(chunk)

    def _edges(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Longest length of each bucket but the last, such that all are equally full."""
        import numpy as np

        if self._buckets == 1 or not len(lengths):
            return np.empty(0)
        edges: NDArray[Any] = np.quantile(lengths, np.linspace(0, 1, self._buckets + 1)[1:-1])
        return edges

    def _samples(
        self, lengths: NDArray[Any], first: int, edges: NDArray[Any], rng: np.random.Generator
    ) -> Iterator[tuple[int, float, int]]:
        """Index, length and bucket of each sample, in the order in which to take them."""
        import numpy as np

        buckets = np.searchsorted(edges, lengths)
        indices = np.arange(first, first + len(lengths))
        if self.shuffle:
            order = rng.permutation(len(lengths))
            indices, lengths, buckets = indices[order], lengths[order], buckets[order]
        return zip(indices.tolist(), lengths.tolist(), buckets.tolist(), strict=True)

    def _fill(self, samples: Iterable[tuple[int, float, int]]) -> Iterator[list[int]]:
        """Fills one batch per bucket, and yields each when the next sample would not fit."""
        budget, padded, most = self._budget, self._padded, self._max_batch
        batches: list[list[int]] = [[] for _ in range(self._buckets)]
        sizes = [0.0] * self._buckets  # sum of the lengths, or the longest
        for index, length, bucket in samples:
            batch, size = batches[bucket], sizes[bucket]
            if padded:
                size = max(size, length)
                over = size * (len(batch) + 1) > budget
            else:
                size += length
                over = size > budget
            if batch and (over or len(batch) == most):
                yield batch
                batch = batches[bucket] = []
                size = length
            batch.append(index)
            sizes[bucket] = size
        yield from filter(None, batches)

    def _checked(self, lengths: Iterable[float], first: int) -> NDArray[Any]:
        """The lengths as an array, each usable and within the budget."""
        import numpy as np

        values = np.asarray(lengths if hasattr(lengths, "__array__") else list(lengths))
        if values.ndim != 1 or (values.size and values.dtype.kind not in "uif"):
            raise TypeError(f"lengths must be one number for each sample, got {shown(lengths)}")
        # Wide enough to add up in: a sum of float16 or uint8 would overflow.
        values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
        wrong = ~((values >= 0) & (values <= self._budget))  # NaN is neither
        if wrong.any():
            index = int(np.argmax(wrong))
            raise ValueError(
                f"lengths[{first + index}] is {values[index]}, but must be at least 0 and at most "
                f"{self._budget_name}={self._budget:g}; raise {self._budget_name}, or leave that "
                "sample out"
            )
        return values
