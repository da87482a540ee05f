"""A worker that reads a stream: batches of its shards, in place of those of a sampler's items."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from minloader._worker.environment import Environment
from minloader._worker.messages import (
    DRAWN,
    NOTHING_READ,
    Failure,
    Job,
    ShardReply,
    WorkerInfo,
    begin_batch,
    current_batch,
    ordinal_in_epoch,
)
from minloader._worker.run import Attempt, Worker
from minloader._worker.stream_reader import END, NOT_LEADING, ShardReader, ShardReaders

logger = logging.getLogger("minloader")

READING = "when the stream was read"
"""``Failure.when`` of one after which a stream may have ended: a generator cannot go on."""

READING_ON = (
    "when the stream was read on from a state of its own: unless it fails there anyway, that "
    f"state does not lead there ({NOT_LEADING})"
)
"""The same, where nothing was read yet since the state was put back."""


class StreamWorker(Worker):
    """Makes batches of the shards of a stream.

    Attributes:
        readers: those of the shards.
    """

    def __init__(self, job: Job, info: WorkerInfo, environment: Environment) -> None:
        super().__init__(job, info, environment)
        self.readers = ShardReaders(job=job, info=info, environment=environment)

    def close(self) -> None:
        self.readers.close()

    def rewind(self) -> None:
        self.readers.rewind()

    def _prepare(self, info: WorkerInfo) -> None:
        """Call ``worker_init_fn`` for a copy of the stream, which a shard is read in."""
        self.info = info
        if self.job.worker_init_fn is not None:
            key = info.seed, -1 - info.epoch, info.id, info.rank
            self.call(key, self.job.worker_init_fn, info)

    def _make(self, attempt: Attempt) -> ShardReply:
        """Read the batches of a task of a shard, to its end."""
        task = attempt.task
        maker = attempt.maker
        assert task.shard is not None
        # What makes the stream ready may end this process, too.
        self.environment.beat(task.id, -1 if task.shard.first else 0, attempt.began)
        try:
            reader = self.readers.find(task.shard, task.epoch, self._prepare)
        except BaseException as error:
            when = "when the stream was made ready, by worker_init_fn if there is one"
            attempt.outcomes.append(self.failure(error, when, fatal=True))
            return NOTHING_READ
        fingerprints = []
        for n in range(len(task.items)):
            maker.item = n
            self.environment.beat(task.id, n, attempt.done_at)
            attempt.writer.begin()
            try:
                made = [self._read_next(attempt, reader)]
            except BaseException as error:
                when = ""
                if reader.is_at_work:
                    when = READING_ON if reader.was_just_put_back else READING
                # Whoever leaves out what fails must not leave out that a stream is another one.
                fatal = reader.is_other
                attempt.add(self.failure(error, when, maker.failing, fatal=fatal))
                maker.failing = ()
            else:
                if made[0] is END:
                    break
                attempt.add(self.pack(made, attempt))
            fingerprints.append(reader.last_fingerprint)
        return ShardReply(
            ended=reader.is_ended,
            state=self._state(reader, attempt.outcomes),
            fingerprints=fingerprints,
            reread=reader.reread,
        )

    def _read_next(self, attempt: Attempt, reader: ShardReader) -> Any:
        """Return the next batch of a shard; or END."""
        self.info = reader.info
        batch = current_batch(self.info)
        batch.is_of_stream = True
        batch.seeds_globals = self.environment.seeds_globals
        reader.is_at_work = True
        if reader.iterator is None and not reader.is_ended:
            self.call(reader.begin(), reader.prepare)
        return self.call(reader.begin(), self._make_next, attempt, reader)

    def _make_next(self, attempt: Attempt, reader: ShardReader) -> Any:
        """The same, seeded: past batches that were delivered before, which are not made again."""
        if reader.is_behind:
            reader.pass_over(partial(self._begin_next, reader, attempt.task.id))
        info = reader.info
        ordinal = ordinal_in_epoch(reader.next, shard=info.id, total=info.num_workers)
        samples = reader.draw()
        reader.is_at_work = False
        if samples is END:
            return END
        begin_batch(info, reader.epoch, ordinal, key=DRAWN)
        return attempt.maker.combine(samples)

    def _begin_next(self, reader: ShardReader, task_id: int, item: int) -> None:
        """Begin with the next batch: its time, and its numbers.

        Args:
            reader: of the shard.
            task_id: of the task that it is read for.
            item: the first; or -1 of one that is passed over. Who finds this worker dead knows.
        """
        self.environment.beat(task_id, item, time.perf_counter())
        if reader.here:  # the first of an epoch goes on with the numbers of ``iter``
            self.seed(reader.begin())

    def _state(self, reader: ShardReader, outcomes: list[Any]) -> bytes | None:
        """Return the state of the stream behind the outcomes."""
        try:
            if reader.parts and reader.iterator is not None:
                # Seeded for the next batch: a generator in the state is as that will find it.
                state: bytes | None = self.call(reader.begin(), reader.state)
                return state
        except BaseException as error:
            failure = self.failure(error, "when the stream was asked for its state")
            if outcomes and type(outcomes[-1]) is not Failure and not reader.is_ended:
                outcomes[-1] = failure
            else:  # all batches are here, or there is an error in the place of the last
                where = "at its end" if reader.is_ended else "behind an error"
                logger.warning("the state of a stream %s is not known: %s", where, failure.summary)
        return None
