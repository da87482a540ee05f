"""Several datasets as one, so that a sampler can draw from all of them."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

from minloader._formats import brief_repr
from minloader._protocols import checked_samples, has_getitem, has_getitems


class Concatenated:
    """Several datasets as one.

    Sample ``(part, index)`` is sample ``index`` of dataset ``part``: what :class:`MixtureSampler`
    yields. If all datasets have a length, a number counts the samples of all of them, by the
    lengths that they have when these are first asked for. Samples are fetched where batches are
    made.

    It also serves to look up lengths: ``Concatenated([lengths_a, lengths_b])``.

    Put :class:`concurrent` around it: reads within it would know the index in one dataset alone.

    Args:
        datasets: at least one. Each has ``__getitem__``, for indices from 0 or other keys. If one
            has ``__getitems__``, its samples of a batch are fetched at once.

    Attributes:
        datasets: these datasets, in a list.

    Raises:
        TypeError: one of them is no dataset, or is concurrent.
        ValueError: there are none.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        if isinstance(datasets, Mapping | str):  # whose keys, or letters, would be datasets too
            raise TypeError(f"datasets must be a list of datasets, got {brief_repr(datasets)}")
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError("datasets must hold at least one dataset, got none")
        for part, dataset in enumerate(self.datasets):
            if not has_getitem(dataset):
                raise TypeError(
                    f"datasets[{part}] must have __getitem__, got {brief_repr(dataset)}"
                )
            if hasattr(dataset, "__getfutures__"):  # samples of two datasets would draw alike
                raise TypeError(
                    f"datasets[{part}] is concurrent; write concurrent(Concatenated([...])) instead"
                )

    def __len__(self) -> int:
        """Return the number of samples of all datasets.

        Raises:
            TypeError: a dataset has no length.
        """
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.datasets)))

    def __getitem__(self, item: Any) -> Any:
        """Return a sample.

        Args:
            item: ``(part, index)``, also as a list; or an index over all datasets.

        Raises:
            IndexError: there is no such sample.
            TypeError: the item is neither.
        """
        part, index = self._place(item)
        return self.datasets[part][index]

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """Fetch the samples of a batch; only where a dataset can do so.

        Otherwise they are fetched one by one, so that an error names its sample.
        """
        if not any(map(has_getitems, self.datasets)):
            raise AttributeError("none of the datasets has __getitems__")
        return self._fetch

    def _fetch(self, items: list[Any]) -> list[Any]:
        places = [self._place(item) for item in items]
        asked: dict[int, list[Any]] = {}
        for part, index in places:
            asked.setdefault(part, []).append(index)
        fetched = {part: iter(self._samples(part, asked[part])) for part in asked}
        return [next(fetched[part]) for part, _ in places]

    def _samples(self, part: int, indices: list[Any]) -> list[Any]:
        dataset = self.datasets[part]
        if not has_getitems(dataset):
            return [dataset[index] for index in indices]
        return checked_samples(dataset.__getitems__(indices), indices)

    def _place(self, item: Any) -> tuple[int, Any]:
        """Return the number of a dataset, and an index in it."""
        if isinstance(item, (tuple, list)):
            if len(item) != 2:
                raise TypeError(
                    "an item must be (part, index), or an index over all datasets, got "
                    f"{brief_repr(item)}"
                )
            part, index = item
            return part, index
        index = operator.index(item)
        total = len(self)
        if not -total <= index < total:
            raise IndexError(f"index {index} is beyond the {total} samples of all datasets")
        index %= total
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
