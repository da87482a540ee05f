"""Streams, where they are read: each shard by one worker at a time, from its beginning or from
where another worker, or another process long ago, left off.

A *cursor* is one pass over one shard. It draws the samples of a batch and then makes the batch of
them; the two are apart so that batches which were delivered before can be passed over without
being made, with the same random numbers for the stream as when they were.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from minloader._checks import is_stateful, shown
from minloader._memory.pickling import pack, unpack
from minloader._worker.messages import END, Job, Shard, Timings, WorkerInfo

logger = logging.getLogger("minloader")


class Cursor:
    """One pass over one shard.

    Args:
        job: what to make of the samples.
        dataset: the stream, which nobody else reads meanwhile.
        info: what the stream is told about where it runs.
        epoch: the epoch it is read for.
        shard: where to begin.

    Attributes:
        position: how many batches were drawn.
        ended: whether the stream has, with the batch drawn last or before it.
        reading: whether the stream's own code is running, or has just failed.
    """

    def __init__(self, job: Job, dataset: Any, info: WorkerInfo, epoch: int, shard: Shard) -> None:
        self.dataset = dataset
        self.info = info
        self.ended = False
        self.reading = False
        self._job = job
        self._epoch = epoch
        self._shard = shard
        self._state = shard.state
        self.position = shard.at if shard.state is not None else 0
        self._iterator: Iterator[Any] | None = None

    def begin(self) -> int:
        """Makes ready for the next batch, and gives its ordinal."""
        ordinal = self._shard.ordinal(self.position)
        self.info._begin(self._epoch, ordinal)
        return ordinal

    def draw(self, _: Any = None) -> Any:
        """The samples of the next batch, a list, or END."""
        if self.ended:
            return END
        self.reading = True
        self.position += 1  # also by an error, which takes the place of a batch
        if self._iterator is None:
            self.ended = True  # what cannot be begun is over
            self._iterator = self._open()
        size = self._job.batch_size
        samples = list(islice(self._iterator, size or 1))
        self.reading = False
        self.ended = len(samples) < (size or 1)
        return samples if samples and (self._job.keep_last or not self.ended) else END

    def fetch(self, timings: Timings) -> Any:
        """The next batch, or END."""
        samples = self.draw()
        if samples is END:
            return END
        # What the stream keeps as its generator must not depend on what is done with its samples.
        self.info._begin(self._epoch, self._shard.ordinal(self.position - 1), key=(1,))
        samples = self._job.transformed(samples, timings)
        return samples[0] if self._job.collate_fn is None else self._job.collated(samples, timings)

    def _open(self) -> Any:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        owner, state = (None, None) if self._state is None else unpack(self._state)
        if owner == "dataset":
            self.dataset.load_state_dict(state)
        iterator = iter(self.dataset)
        if owner == "iterator":
            iterator.load_state_dict(state)
        return iterator

    def state(self) -> bytes | None:
        """How to get here again: the state of the stream, or of its iterator, if either has one."""
        for owner, thing in ("iterator", self._iterator), ("dataset", self.dataset):
            if is_stateful(thing):
                return pack((owner, thing.state_dict()), down=False)
        return None


class Cursors:
    """The passes that a worker is making.

    Args:
        job: what is read.
        seed: the loader's.
        reload: gives another copy of the dataset. None: there is only this process's.
        shared: whether other threads read the same dataset.
    """

    def __init__(
        self, job: Job, seed: int, reload: Callable[[], Any] | None, *, shared: bool
    ) -> None:
        self._job = job
        self._seed = seed
        self._reload = reload
        self._shared = shared
        self._touched = False  # whether the job's own dataset was given to a cursor
        self._beginning: bytes | None = None  # its state before that, if it can tell
        self._idle: list[Any] = []  # datasets that no cursor reads, as good as new
        self._cursors: dict[tuple[int, int], Cursor] = {}

    def find(self, shard: Shard, epoch: int, index: int, pid: int) -> Cursor:
        """The cursor that is, or can get, at a batch of a shard."""
        for key in [key for key in self._cursors if key[0] < shard.oldest]:
            self._drop(key)
        key = shard.run, shard.id
        if key in self._cursors and self._cursors[key].position > index:
            self._drop(key)  # a batch is wanted again
        if key not in self._cursors:
            info = WorkerInfo(shard.id, shard.total, pid, self._seed)
            self._cursors[key] = Cursor(self._job, self._take(shard), info, epoch, shard)
        return self._cursors[key]

    def current(self, shard: Shard) -> Cursor | None:
        """The cursor of a shard, if there is one."""
        return self._cursors.get((shard.run, shard.id))

    def _drop(self, key: tuple[int, int]) -> None:
        """Forgets a cursor; its dataset is read by another one, if that can be."""
        dataset = self._cursors.pop(key).dataset
        once = is_stateful(dataset) or getattr(dataset, "read_once", False)
        if _is_iterator(dataset) or (once and self._reload is not None):
            return
        self._idle.append(self._put_back(dataset))

    def _put_back(self, dataset: Any) -> Any:
        """A dataset that was read before, at its beginning again if it knows where it is."""
        if is_stateful(dataset) and self._beginning is not None:
            dataset.load_state_dict(unpack(self._beginning))
        return dataset

    def _take(self, shard: Shard) -> Any:
        """A dataset to read: every pass has its own, lest one moves the other's position."""
        if self._idle:
            return self._idle.pop()
        dataset = self._job.dataset
        if self._beginning is None and is_stateful(dataset):
            self._beginning = pack(dataset.state_dict(), down=False)
        if not self._touched and not (self._shared and shard.total > 1):
            self._touched = True
            return dataset
        if self._reload is not None:
            return self._reload()
        if not (self._touched and _is_iterator(dataset)):
            try:
                return self._put_back(copy.deepcopy(dataset))
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
