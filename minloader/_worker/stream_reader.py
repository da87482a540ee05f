"""Streams, where they are read: each shard by one worker at a time, from its beginning or from
where another worker, or another process long ago, left off.

::

    the pass before has ended here:   the same object                     iter, draw, draw, ...
    it has ended elsewhere:           a copy, its state from that end     iter, draw, draw, ...
    this pass was begun elsewhere:    a copy, its state from then, iter         draw, draw, ...

A :class:`ShardReader` reads one shard once. It draws the samples of a batch, and then makes the
batch of them. The two are apart so that batches which were delivered before can be passed over
without being made, with the same random numbers for the stream as when they were. A state is put
back before the generators are seeded for a batch, and taken when they are seeded for the next.
:class:`ShardReaders` are those of one worker; they hand out the copies of the dataset.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from minloader._checks import is_stateful, shown
from minloader._memory.pickling import pack, unpack
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.messages import END, Shard, WorkerInfo
from minloader._worker.seeds import Place

logger = logging.getLogger("minloader")


@dataclass(eq=False)
class ShardReader:
    """Reads one shard, once.

    Attributes:
        readers: those of the worker.
        info: what the stream is told about where it runs, and the stream. Nothing else reads that
            meanwhile.
        epoch: the epoch that it is read for.
        shard: where to begin.
        restored: whether the stream is as it must be, to begin with the shard.
        position: how many batches were drawn.
        ended: whether the stream has, with the batch drawn last or before it.
        reading: whether the stream's own code is running, or has just failed.
        iterator: of the stream, while it is read.
        released: whether another reader may have the stream.
        last_state: of the stream, at its end.
    """

    readers: ShardReaders
    info: WorkerInfo
    epoch: int
    shard: Shard
    restored: bool
    position: int
    ended: bool = False
    reading: bool = False
    iterator: Any = None
    released: bool = False
    last_state: bytes | None = None
    _is_own_iterator: bool = False  # of the stream
    _failed: bool = False  # the stream's own code has, before

    def begin(self, index: int | None = None) -> Place:
        """Prepare for a batch of the shard, by default the next, and return its place.

        At the end the next one is the first of the epoch to come.
        """
        if index is None:
            index = 0 if self.ended else self.position
        epoch, ordinal = self.epoch + self.ended, self.shard.ordinal(index)
        self.info._begin(epoch, ordinal)
        return self.info.seed, epoch, ordinal, self.info.rank

    def restore(self) -> None:
        """Put the stream's state back."""
        self.restored = self.ended = self.reading = True  # what cannot be begun is over
        if self.shard.state is None:
            self.readers.rewind(self.info)
        else:
            self.readers.note_first_state(self.info)
            state = unpack(self.shard.state)
            state = state if isinstance(state, dict) else dict([state])  # as of former versions
            if "dataset" in state:
                self.info.dataset.load_state_dict(state["dataset"])
            if self.shard.at:
                self._open()
            if "iterator" in state:
                self.iterator.load_state_dict(state["iterator"])
        self.ended = self.reading = False

    def draw(self) -> Any:
        """Return the samples of the next batch, a list, or END."""
        if self.ended:
            return END
        self._failed |= self.reading
        self.reading = True
        self.position += 1  # also by an error, which takes the place of a batch
        job = self.readers.maker.job
        size = job.batch_size or 1
        self.ended = self.iterator is None  # what cannot be begun is over
        samples = self._take_first(size) if self.ended else self._take(size)
        self.reading = False
        self.ended = len(samples) < size
        return samples if samples and (job.keep_last or not self.ended) else END

    def _take_first(self, size: int) -> list[Any]:
        self._open()
        self.ended = False
        if self.shard.state is None:
            self.readers.note_first_state(self.info)
        samples = self._take(size)
        # Some streams go on from a state when they are begun next, some each time. If it is from
        # their end, there is nothing.
        tries = 0 if self.shard.state is None or self._is_own_iterator else 2
        while tries and not samples:
            tries -= 1
            if not tries:
                self.readers.rewind(self.info)
            self._open()
            samples = self._take(size)
        return samples

    def _open(self) -> None:
        dataset = self.info.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.epoch)
        self.iterator = iter(dataset)
        if is_stateful(dataset) and is_stateful(self.iterator):
            # Not compared themselves: both may stand for the same object of the user's.
            self._is_own_iterator = self.iterator.state_dict == dataset.state_dict

    def _take(self, size: int) -> list[Any]:
        # Not by islice(), which calls iter(): a stream that is its own iterator would begin anew.
        return list(map(next, repeat(self.iterator, size)))

    def fetch(self) -> Any:
        """Return the next batch, or END."""
        samples = self.draw()
        if samples is END:
            return END
        # What the stream keeps as its generator must not depend on what is done with its samples.
        self.info._begin(self.epoch, self.shard.ordinal(self.position - 1), key=(1,))
        return self.readers.maker.combine(samples)

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by names: the shard, or at its end the next pass, goes on from that."""
        dataset, own = self.info.dataset, self._is_own_iterator
        parts = {"dataset": None if own else dataset, "iterator": self.iterator}
        if self.ended:
            whole = own or not (self._failed or self.reading)
            parts = {"dataset": dataset if whole and not _is_read_once(dataset) else None}
        return {name: part for name, part in parts.items() if is_stateful(part)}

    def state(self) -> bytes:
        """Return the state of the stream, packed."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        state = pack(states, down=False)
        if self.ended:
            self.last_state = state
        return state

    def leads_to(self, shard: Shard) -> bool:
        """Return whether a pass can begin with the stream as this one has left it."""
        if shard.at or not is_stateful(self.info.dataset):
            return not shard.at
        same = self.last_state is not None and self.last_state == shard.state
        if self._is_own_iterator:
            return same or shard.left
        return same and not self.shard.at  # it may begin each time where it was put


@dataclass(eq=False)
class ShardReaders:
    """The readers of one worker.

    Attributes:
        maker: makes batches of what is read.
        seed: the loader's.
        reload: gives another copy of the dataset. None: there is only this process's.
    """

    maker: BatchMaker
    seed: int
    reload: Callable[[], Any] | None
    _taken: bool = False  # whether the job's own dataset was given to a reader
    _first_states: dict[int, bytes] = field(default_factory=dict)  # by shard, before it was read
    _readers: dict[tuple[int, int], ShardReader] = field(default_factory=dict)
    _former: dict[int, ShardReader] = field(default_factory=dict)  # the last of each shard

    def find(self, shard: Shard, epoch: int, index: int, pid: int) -> ShardReader:
        """Return the reader that is, or can get, at a batch of a shard."""
        for key in [key for key in self._readers if key[0] < shard.oldest]:
            self.release(self._readers.pop(key))
        key = shard.run, shard.id
        if key in self._readers and self._readers[key].position > index:
            self.release(self._readers.pop(key))  # a batch is wanted again
        if key not in self._readers:
            dataset, restored = self._take_dataset(shard)
            info = WorkerInfo(shard.id, shard.total, pid, self.seed, dataset=dataset)
            info.rank = self.maker.job.rank
            self._readers[key] = ShardReader(self, info, epoch, shard, restored, shard.at)
        return self._readers[key]

    def current(self, shard: Shard) -> ShardReader | None:
        """Return the reader of a shard, if there is one."""
        return self._readers.get((shard.run, shard.id))

    def release(self, reader: ShardReader) -> None:
        """Let another reader have the dataset. Harmless when repeated."""
        if not reader.released:
            reader.released, reader.iterator = True, None
            self._former[reader.shard.id] = reader

    def _take_dataset(self, shard: Shard) -> tuple[Any, bool]:
        """Return a dataset to read, and whether it can be read as it is.

        Each reader has its own: one must not move the other.
        """
        dataset, is_new = self.maker.job.dataset, shard.state is None
        former = self._former.pop(shard.id, None)
        if former is not None and not _is_read_once(dataset):
            as_it_is = former.leads_to(shard)
            if as_it_is or (self.reload is None and self._taken):
                return former.info.dataset, as_it_is
        if not self._taken and (self.reload is not None or shard.total == 1):
            self._taken = True
            return dataset, is_new
        if self.reload is not None:
            return self.reload(), is_new
        if _is_read_once(dataset):
            raise RuntimeError(
                f"dataset is an iterator, {shown(dataset)}, which can be read once, by one worker; "
                "pass an object whose __iter__ begins anew"
            )
        try:
            return copy.deepcopy(dataset), is_new and not self._taken
        except Exception as error:
            logger.debug("the dataset cannot be copied (%s): its shards share it", error)
            return dataset, False

    def note_first_state(self, info: WorkerInfo) -> None:
        """Note the state of a dataset before it is read."""
        if info.id not in self._first_states and is_stateful(info.dataset):
            try:
                self._first_states[info.id] = pack(info.dataset.state_dict(), down=False)
            except Exception as error:
                logger.debug("the stream has no state before its first sample: %r", error)

    def rewind(self, info: WorkerInfo) -> None:
        """Put a dataset back to where it was before it was read, as far as that is known."""
        if info.id in self._first_states:
            info.dataset.load_state_dict(unpack(self._first_states[info.id]))


def _is_read_once(dataset: Any) -> bool:
    """Return whether each pass needs another copy."""
    is_iterator = hasattr(type(dataset), "__next__") and not is_stateful(dataset)
    return is_iterator or getattr(dataset, "read_once", False)
