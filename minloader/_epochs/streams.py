"""One epoch of a stream: an epoch for each of its shards, taken in turns.

A shard's epoch is an ordinary one whose sampler counts its batches, and whose pool is always the
same worker, which reads on where it is. What the stream says of itself comes back with every
task, so that another worker, or another run, can go on from there; else that passes over the
batches which were delivered. Shards are numbered when the loader is made, not by its workers,
whose number may change.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

from minloader._epochs.epoch import Epoch, Pending, Settings, TimedIterator
from minloader._epochs.state import Bookmark, Note, Place, Reader
from minloader._errors import BatchTimeout, WorkerDied
from minloader._memory.pickling import pack, unpack
from minloader._pools.base import Pool
from minloader._worker.messages import END, Failure, Reply, Shard, Task
from minloader._worker.run import READING

logger = logging.getLogger("minloader")


class ShardEpoch(Epoch):
    """Iterator over the batches of one shard.

    Args:
        settings: what the loader's epochs have in common.
        where: gives the pool of one worker that reads the shard.
        epoch: its number.
        owner: the loader.
        shard: which, of which pass over the stream.
        oldest: gives the oldest pass that somebody still makes.
        place: where to begin.
        before: the shard in the epoch before, if that is not over.
    """

    def __init__(
        self,
        settings: Settings,
        where: Callable[[], Pool],
        epoch: int,
        owner: object,
        shard: Shard,
        oldest: Callable[[], int],
        place: Place | None,
        before: Epoch | None,
    ) -> None:
        self.shard = shard
        self._oldest = oldest
        place = place or {"batches": 0, "ended": False, "at": 0, "state": None}
        state = None if place["state"] is None else pack(place["state"], down=True)
        # What the stream said last, and before the task that is being delivered.
        self._ahead = self._behind = place["at"], state
        self._end = place["batches"]  # how many there are, when that is known
        self._failed_reading = False
        self._given_up = -2  # the last batch that no worker survived
        items = ((shard.id, index) for index in itertools.count(place["batches"]))
        reader = Reader(items, position=place["batches"])
        reader.ended = place["ended"]
        super().__init__(settings, where, epoch, reader, owner, before)
        self._in_order = True

    @property
    def _depth(self) -> int:
        return -(-self._settings.depth // self.shard.total) - self._busy_before()

    def _address(self, task: Task) -> Task:
        at, state = self._ahead
        shard = self.shard._replace(oldest=self._oldest(), at=at, state=state)
        return super()._address(task)._replace(shard=shard)

    def _ordinal(self, ordinal: int) -> int:
        return self.shard.ordinal(ordinal)

    def _open(self, pending: Pending) -> None:
        self._behind = self._ahead
        super()._open(pending)
        if self.drawn:
            self._abandon_pending()  # what was asked for beyond the end

    def _note(self, task: Task, reply: Reply) -> None:
        if reply.outcomes and reply.outcomes[-1] is END:
            reply.outcomes.pop()
            self._finish(task.ordinal + len(reply.outcomes))
        if reply.state is not None:
            self._ahead = task.ordinal + len(reply.outcomes), reply.state
        super()._note(task, reply)

    def _finish(self, end: int) -> None:
        self._reader.ended = True
        self._end = end

    def _failed(self, task: Task, reply: Reply, failure: Failure) -> Any:
        self._failed_reading = failure.stage == READING
        if isinstance(failure.error, (WorkerDied, BatchTimeout)):
            index = task.items[0][1]
            if index == self._given_up + 1:
                logger.warning(
                    "shard %d of the stream ends: no worker gets past its batch %d",
                    *(self.shard.id, self._given_up),
                )
                self._finish(index + 1)
                self._abandon_pending()
            self._given_up = index
        return super()._failed(task, reply, failure)

    def _take(self) -> Any:
        try:
            return super()._take()
        except StopIteration:
            if self._failed_reading:
                logger.warning(
                    "shard %d of the stream ended with the error in its batch %d: an iterator that "
                    "raised, as a generator does, cannot go on",
                    *(self.shard.id, self._end - 1),
                )
                self._failed_reading = False
            raise

    def peek(self) -> bool:
        """Whether the shard is known to have no more than what is under way."""
        return self.drawn or any(_has_end(pending.future) for pending in self._pending)

    def ready(self) -> bool:
        """Whether the next batch, or the end, can be had without waiting."""
        self._recover()
        if self._opened is not None or not self._pending:
            return True
        future = self._pending[0].future
        return future is None or future.done()

    def waits_for(self) -> list[Future[Reply]]:
        """What must be done for it to be ready. Asked for when it was not."""
        self._grow()
        self._watch()
        return [pending.future for pending in self._pending if pending.future is not None][:1]

    def note(self) -> Note:
        left = self._undone()
        end = self._end if self.drawn else self._reader.position
        batches = min((task.ordinal for task, _ in left), default=end)
        at, state = self._ahead if self._ahead[0] <= batches else self._behind
        return partial(_place, batches, self.drawn and not left, at, state)


def _place(batches: int, ended: bool, at: int, state: bytes | None) -> Place:
    state = state and unpack(state)
    return {"batches": batches, "ended": ended, "at": at, "state": state}


def _has_end(future: Future[Reply] | None) -> bool:
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return False
    outcomes = future.result().outcomes
    return bool(outcomes) and outcomes[-1] is END


class StreamEpoch(TimedIterator):
    """Iterator over the batches of one epoch of a stream, of each shard one in turn.

    Args:
        settings: what the loader's epochs have in common.
        epoch: its number.
        run: which pass over the stream it is.
        shards: of the stream.
        turn: id of the shard to begin with.
    """

    def __init__(
        self, settings: Settings, epoch: int, run: int, shards: list[ShardEpoch], turn: int
    ) -> None:
        self._settings = settings
        self.epoch = epoch
        self.run = run
        self.shards = shards
        self.bookmark = Bookmark(self)
        # Those that have not ended, the next one first.
        self._round = shards[turn:] + shards[:turn]
        self._over = False

    @property
    def drawn(self) -> bool:
        """Whether a shard has no more than what is under way, so that workers may run idle."""
        return any(shard.peek() for shard in self.shards)

    @property
    def under_way(self) -> bool:
        """Whether there may be batches to come."""
        return not self._over

    @property
    def pools(self) -> list[Pool]:
        """Where its batches are made now."""
        return [pool for shard in self.shards for pool in shard.pools]

    def fill(self) -> None:
        """Has as many tasks under way as may be."""
        for shard in self._round:
            shard.fill()

    def __iter__(self) -> StreamEpoch:
        return self

    @property
    def in_flight(self) -> int:
        return sum(shard.in_flight for shard in self.shards)

    def _take(self) -> Any:
        while self._round:
            index = 0 if self._settings.in_order else self._first_ready()
            shard = self._round[index]
            try:
                batch = shard._take()
            except StopIteration:
                del self._round[index]
            except Exception:
                self._pass_on(index)
                raise
            else:
                self._pass_on(index)
                return batch
        self._over = True
        raise StopIteration

    def _pass_on(self, index: int) -> None:
        """The shard has had its turn."""
        self._round.append(self._round.pop(index))

    def _first_ready(self) -> int:
        begin = time.perf_counter()
        try:
            while True:
                for index, shard in enumerate(self._round):
                    if shard.ready():
                        return index
                futures = [future for shard in self._round for future in shard.waits_for()]
                wait_for(futures, self._settings.patience, return_when=FIRST_COMPLETED)
        finally:
            self._settings.counters.opened(begin)

    def note(self) -> Note | None:
        """What has been delivered so far; None when the epoch is over."""
        if self._over:
            return None
        turn = self._round[0].shard.id if self._round else 0
        return partial(_place_of_all, turn, [shard.note() for shard in self.shards])

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self.bookmark.last = self.note()


def _place_of_all(turn: int, shards: list[Note]) -> Place:
    return {"stream": {"turn": turn, "shards": [note() for note in shards]}}
