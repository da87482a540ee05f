"""grain by the arguments of torch's ``DataLoader``, as its documentation says to load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from absl.flags import FLAGS
from grain import MapDataset, MultiprocessingOptions
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions
from torch.utils.data import IterableDataset

from tests.zoo.bugs import NoSuchOption

FLAGS.mark_as_parsed()  # as absl's app.run() would, without which its workers do not start


class DataLoader:
    """The state is that of the iterator which was begun last.

    Each way to start workers but a fork asks of a dataset what grain's does, which is to spawn.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        sampler: Any = None,
        num_workers: int = 0,
        multiprocessing_context: str = "spawn",
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or multiprocessing_context == "fork":
            raise NoSuchOption  # its own streams have states
        samples = MapDataset.source(dataset).seed(0)
        samples = samples.shuffle() if shuffle else samples
        options = MultiprocessingOptions(num_workers=num_workers)
        if sampler is None:
            self.batches = samples.batch(batch_size).to_iter_dataset().mp_prefetch(options)
        else:  # torch's DistributedSampler; what can resume with other ranks deals out by itself
            size, rank = sampler.num_replicas, ShardOptions(sampler.rank, sampler.num_replicas)
            settings: Any = {"multiprocessing_options": options}
            self.batches = ElasticIterator(samples, batch_size * size, rank, **settings)
        self.begun: Any = None
        self.resumes = False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.begun = iter(self.batches)
        self.resumes = False
        return self.begun  # type: ignore[no-any-return]

    def state_dict(self) -> Any:
        return self.begun.get_state()

    def load_state_dict(self, state: Any) -> None:
        if self.begun is None:
            self.begun, self.resumes = iter(self.batches), True
        self.begun.set_state(state)
