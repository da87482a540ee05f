"""How the user's functions make a batch of an item of the sampler, or of samples of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from minloader._worker.messages import Job


@dataclass
class BatchMaker:
    """Makes batches in one worker, one at a time.

    Attributes:
        job: what to make them from.
        transform_seconds: spent in the loader's ``transform``, since they were set to 0.
        collate_seconds: spent in its ``collate_fn``. Most of the rest is the dataset's.
    """

    job: Job
    transform_seconds: float = 0.0
    collate_seconds: float = 0.0

    def fetch(self, item: Any) -> Any:
        """Return the batch of one item."""
        if self.job.collate_fn is None:
            batch = self._get(item)
            return batch if self.job.transform is None else self.combine([batch])
        if isinstance(item, list) and item and all(isinstance(shard, list) for shard in item):
            return [self._gather(shard) for shard in item]
        return self._gather(item)

    def combine(self, samples: list[Any]) -> Any:
        """Return the batch of some samples; of a single one, if nothing is collated."""
        transform, collate_fn = self.job.transform, self.job.collate_fn
        if transform is not None:
            begin = time.perf_counter()
            samples = [transform(each) for each in samples]
            self.transform_seconds += time.perf_counter() - begin
        if collate_fn is None:
            return samples[0]
        begin = time.perf_counter()
        batch = collate_fn(samples)
        self.collate_seconds += time.perf_counter() - begin
        return batch

    def _get(self, item: Any) -> Any:
        dataset = self.job.dataset
        # Looked up on the type, as Python itself does: a class can be a callable dataset.
        return dataset[item] if hasattr(type(dataset), "__getitem__") else dataset(item)

    def _gather(self, indices: Any) -> Any:
        try:
            indices = list(indices)
        except TypeError as error:
            raise TypeError(
                f"the sampler yielded {indices!r}, but with collate_fn each item must be a list "
                "of indices; use a batch sampler or batch_size, or drop collate_fn"
            ) from error
        if hasattr(self.job.dataset, "__getitems__"):
            return self.combine(list(self.job.dataset.__getitems__(indices)))
        return self.combine([self._get(index) for index in indices])
