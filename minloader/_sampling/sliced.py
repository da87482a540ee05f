"""A dataset of parts of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minloader._arguments import check_dataset
from minloader._formats import brief_repr
from minloader._protocols import checked_samples, has_getitems, reader_of
from minloader._sampling.collate import numbers_as_array
from minloader._sampling.walk import DEEPER, plain_container, walk


@dataclass
class sliced:  # noqa: N801  # used as a function: Loader(sliced(dataset), ...)
    """A dataset whose items are ``(index, start, stop)``: those entries of a sample.

    For a :class:`PackedBatchSampler` that splits long samples. Runs where the dataset does,
    normally in a worker process. Every array of at least one dimension in the sample, and every
    list of numbers, is sliced along its first axis. All else stays as it is. Each item makes the
    whole sample: where a part is quicker to read, have your dataset take such items itself.

    Args:
        dataset: what :class:`Loader` takes with a sampler, for an index.

    Raises:
        TypeError: the dataset is none; or when asked for a sample, the item is no such tuple.
        ValueError: when asked for a sample, if that is shorter than ``stop``.
    """

    dataset: Any

    def __post_init__(self) -> None:
        check_dataset(self.dataset)

    def __getitem__(self, item: tuple[Any, int, int]) -> Any:
        return _slice(reader_of(self.dataset)(_index(item)), item)

    @property
    def __getitems__(self) -> Callable[[list[tuple[Any, int, int]]], list[Any]]:
        """Fetches several at a time; there if the dataset can do so."""
        if not has_getitems(self.dataset):
            raise AttributeError("the dataset has no __getitems__")
        fetch = self.dataset.__getitems__

        def fetch_slices(items: list[tuple[Any, int, int]]) -> list[Any]:
            samples = checked_samples(fetch(list(map(_index, items))), items)
            return [_slice(sample, item) for sample, item in zip(samples, items, strict=True)]

        return fetch_slices


def _index(item: Any) -> Any:
    if not isinstance(item, tuple) or len(item) != 3:
        raise TypeError(
            "an item of a sliced dataset must be a tuple (index, start, stop), got "
            f"{brief_repr(item)}; give PackedBatchSampler long='split', or drop sliced"
        )
    return item[0]


def _slice(sample: Any, item: tuple[Any, int, int]) -> Any:
    """Return a sample with its sequences sliced."""
    _, start, stop = item

    def piece(parts: Sequence[Any], path: str) -> Any:
        value = numbers_as_array(parts[0], path)
        if isinstance(value, Mapping | list | tuple):
            return DEEPER
        if not getattr(value, "ndim", 0):  # arrays and tensors have it
            return value
        if len(value) < stop:
            raise ValueError(
                f"{path} has {len(value)} entries, but the item is {item!r}; give the sampler the "
                "lengths that the samples have, or slice in the dataset itself"
            )
        return value[start:stop]

    return walk([sample], piece, plain_container)
