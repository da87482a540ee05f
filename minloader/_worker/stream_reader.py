"""Streams, where they are read: each shard by one worker at a time, from its beginning or from
where another worker, or another process long ago, left off.

A :class:`ShardReader` reads one shard once. It draws the samples of a batch, and then makes the
batch of them. The two are apart so that batches which were delivered before can be passed over
without being made, with the same random numbers for the stream as when they were.
:class:`ShardReaders` are those of one worker; they hand out the copies of the dataset.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from minloader._checks import is_stateful, shown
from minloader._memory.pickling import pack, unpack
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.messages import END, Shard, WorkerInfo

logger = logging.getLogger("minloader")


@dataclass(eq=False)
class ShardReader:
    """Reads one shard, once.

    Attributes:
        maker: makes batches of the samples.
        dataset: the stream, which nothing else reads meanwhile.
        info: what the stream is told about where it runs.
        epoch: the epoch that it is read for.
        shard: where to begin.
        position: how many batches were drawn.
        ended: whether the stream has, with the batch drawn last or before it.
        reading: whether the stream's own code is running, or has just failed.
    """

    maker: BatchMaker
    dataset: Any
    info: WorkerInfo
    epoch: int
    shard: Shard
    position: int = 0
    ended: bool = False
    reading: bool = False
    _iterator: Iterator[Any] | None = None

    def __post_init__(self) -> None:
        if self.shard.state is not None:
            self.position = self.shard.at

    def begin(self) -> int:
        """Prepare for the next batch, and return its ordinal."""
        ordinal = self.shard.ordinal(self.position)
        self.info._begin(self.epoch, ordinal)
        return ordinal

    def draw(self) -> Any:
        """Return the samples of the next batch, a list, or END."""
        if self.ended:
            return END
        self.reading = True
        self.position += 1  # also by an error, which takes the place of a batch
        if self._iterator is None:
            self.ended = True  # what cannot be begun is over
            self._iterator = self._open()
        size = self.maker.job.batch_size or 1
        samples = list(islice(self._iterator, size))
        self.reading = False
        self.ended = len(samples) < size
        return samples if samples and (self.maker.job.keep_last or not self.ended) else END

    def fetch(self) -> Any:
        """Return the next batch, or END."""
        samples = self.draw()
        if samples is END:
            return END
        # What the stream keeps as its generator must not depend on what is done with its samples.
        self.info._begin(self.epoch, self.shard.ordinal(self.position - 1), key=(1,))
        return self.maker.combine(samples)

    def _open(self) -> Any:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        owner, state = (None, None) if self.shard.state is None else unpack(self.shard.state)
        if owner == "dataset":
            self.dataset.load_state_dict(state)
        iterator = iter(self.dataset)
        if owner == "iterator":
            iterator.load_state_dict(state)
        return iterator

    def state(self) -> bytes | None:
        """Return the state of the stream's iterator, or of the stream, if either has one."""
        for owner, thing in ("iterator", self._iterator), ("dataset", self.dataset):
            if is_stateful(thing):
                return pack((owner, thing.state_dict()), down=False)
        return None


@dataclass(eq=False)
class ShardReaders:
    """The readers of one worker.

    Attributes:
        maker: makes batches of what is read.
        seed: the loader's.
        reload: gives another copy of the dataset. None: there is only this process's.
        shared: whether other threads read the same dataset.
    """

    maker: BatchMaker
    seed: int
    reload: Callable[[], Any] | None
    shared: bool
    _taken: bool = False  # whether the job's own dataset was given to a reader
    _first_state: bytes | None = None  # of the dataset before that, if it has states
    _unused: list[Any] = field(default_factory=list)  # datasets as good as new
    _readers: dict[tuple[int, int], ShardReader] = field(default_factory=dict)

    def find(self, shard: Shard, epoch: int, index: int, pid: int) -> ShardReader:
        """Return the reader that is, or can get, at a batch of a shard."""
        for key in [key for key in self._readers if key[0] < shard.oldest]:
            self._drop(key)
        key = shard.run, shard.id
        if key in self._readers and self._readers[key].position > index:
            self._drop(key)  # a batch is wanted again
        if key not in self._readers:
            dataset = self._take_dataset(shard)
            info = WorkerInfo(shard.id, shard.total, pid, self.seed, dataset=dataset)
            self._readers[key] = ShardReader(self.maker, dataset, info, epoch, shard)
        return self._readers[key]

    def current(self, shard: Shard) -> ShardReader | None:
        """Return the reader of a shard, if there is one."""
        return self._readers.get((shard.run, shard.id))

    def _drop(self, key: tuple[int, int]) -> None:
        """Forget a reader. Another one may have its dataset, if that can be read twice."""
        dataset = self._readers.pop(key).dataset
        once = is_stateful(dataset) or getattr(dataset, "read_once", False)
        if not _is_iterator(dataset) and not (once and self.reload is not None):
            self._unused.append(self._rewound(dataset))

    def _rewound(self, dataset: Any) -> Any:
        """Return a dataset that was read before, at its beginning again if it has states."""
        if is_stateful(dataset) and self._first_state is not None:
            dataset.load_state_dict(unpack(self._first_state))
        return dataset

    def _take_dataset(self, shard: Shard) -> Any:
        """Return a dataset to read. Each reader has its own: one must not move the other."""
        if self._unused:
            return self._unused.pop()
        dataset = self.maker.job.dataset
        if self._first_state is None and is_stateful(dataset):
            self._first_state = pack(dataset.state_dict(), down=False)
        if not self._taken and not (self.shared and shard.total > 1):
            self._taken = True
            return dataset
        if self.reload is not None:
            return self.reload()
        if not (self._taken and _is_iterator(dataset)):
            try:
                return self._rewound(copy.deepcopy(dataset))
            except Exception as error:
                logger.debug("the dataset cannot be copied (%s): its shards share it", error)
        if _is_iterator(dataset):
            raise RuntimeError(
                f"dataset is an iterator, {shown(dataset)}, which can be read once, by one worker; "
                "pass an object whose __iter__ begins anew"
            )
        return dataset


def _is_iterator(dataset: Any) -> bool:
    return hasattr(type(dataset), "__next__")
