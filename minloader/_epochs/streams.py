"""One epoch of a stream, or several: an iterator for each of its shards, taken in turns.

::

    round:  shard 0, shard 1, shard 2, shard 0, ...     a shard that has ended leaves the round
               |        |        |                      the epoch ends when the round is empty
             Epoch    Epoch    Epoch                    each with the pool of one worker

A shard's iterator is an ordinary :class:`Epoch` whose ledger counts the batches of the shard, and
whose pool is always the same worker, which reads on where it is. The state of the stream comes
back with every task, so that another worker, or another run, can go on from there; that of its end
is where the next pass begins. A stream without a state is read again past the batches that were
delivered. Shards are numbered when the loader is made, not by its workers, whose number may change.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

from minloader._epochs.epoch import Epoch, Pending
from minloader._epochs.iterator import TimedIterator
from minloader._epochs.state import Ledger, Note, Progress, State
from minloader._errors import BatchTimeout, WorkerDied
from minloader._insight.leaves import Leaves, first_leaves
from minloader._memory import pickling
from minloader._pools.base import Pool
from minloader._worker.messages import END, Failure, Reply, Shard, Task
from minloader._worker.run import READING

logger = logging.getLogger("minloader")

BEGINNING: State = {"batches": 0, "ended": False, "at": 0, "state": None, "next": None}
"""The part of a state that says where in a shard it is, at its beginning."""


class ShardLedger(Ledger):
    """Counts the batches of one shard, for one epoch.

    Args:
        epoch: number of the epoch.
        run: number of the pass over the stream, counted by the loader.
        shard: number of the shard.
        state: where to begin, if not at the beginning.

    Attributes:
        end: how many batches there are, once the shard has ended.
        ahead: the state of the stream that came back last, packed, and how many batches had been
            read by then.
        behind: the same, before the task that is being delivered.
        first: the state that the stream had at the end of the pass before, packed.
        last: the one that it has at the end of this pass.
        follows_left: whether the pass before was left early.
        failed_reading: whether the stream's own code raised the last error.
        lethal: the last batch that no worker survived.
    """

    def __init__(self, epoch: int, run: int, shard: int, state: State | None) -> None:
        state = state or BEGINNING
        indices = itertools.count(state["batches"])
        super().__init__(epoch, None, zip(itertools.repeat(shard), indices))
        self.run = run
        self.follows_left = False
        self.position = self.end = state["batches"]
        self.ended = state["ended"]
        self.last: bytes | None = None
        self.ahead: tuple[int, bytes | None]
        self.begin_from(_packed(state.get("next")))
        if state["state"] is not None:
            self.ahead = self.behind = state["at"], _packed(state["state"])
        self.failed_reading = False
        self.lethal = -2

    def begin_from(self, state: bytes | None) -> None:
        """Begin with what the stream was at the end of the pass before, packed."""
        self.first = state
        self.ahead = self.behind = 0, state

    @property
    def delivered(self) -> bool:
        """Whether all batches were delivered."""
        return self.ended and not self.undelivered

    @property
    def next(self) -> bytes | None:
        """The state that the next pass begins from: one that is left early leaves nothing."""
        return (self.delivered and self.last) or self.first

    def finish(self, end: int) -> None:
        """Note that the shard has only so many batches."""
        self.ended, self.end = True, end
        for index in [index for index in self.undelivered if index >= end]:
            del self.undelivered[index]

    def note(self) -> Note:
        undelivered = self.undelivered.copy()
        batches = min(undelivered, default=self.end if self.ended else self.position)
        at, state = self.ahead if self.ahead[0] <= batches else self.behind
        ended = self.ended and not undelivered
        return partial(_shard_state, batches, ended, at, state if at else None, self.next)


def _shard_state(
    batches: int, ended: bool, at: int, state: bytes | None, coming: bytes | None
) -> State:
    known = {"state": state and pickling.unpack(state), "next": coming and pickling.unpack(coming)}
    return {"batches": batches, "ended": ended, "at": at, **known}


def _packed(state: Any) -> bytes | None:
    return None if state is None else pickling.pack(state, down=True)


class StreamLedger(Ledger):
    """The ledgers of all shards of a stream, for one epoch.

    Args:
        epoch: number of the epoch.
        run: number of the pass over the stream.
        total: number of shards.
        state: where to begin; None: at the beginning.
        before: the ledger of the pass before, if there was one.

    Attributes:
        turn: number of the shard whose batch comes next.
    """

    def __init__(
        self, epoch: int, run: int, total: int, state: State | None, before: StreamLedger | None
    ) -> None:
        super().__init__(epoch, None, ())
        shards = state["shards"] if state else [None] * total
        self.fruitful = state is not None
        self.run = run
        self.shards = [ShardLedger(epoch, run, n, shard) for n, shard in enumerate(shards)]
        self.turn = state["turn"] if state else 0
        if before is not None:
            for own, theirs in zip(self.shards, before.shards, strict=True):
                own.begin_from(theirs.next)
                own.follows_left = not theirs.delivered

    def note(self) -> Note:
        return partial(_stream_state, self.turn, [shard.note() for shard in self.shards])


def _stream_state(turn: int, shards: list[Note]) -> State:
    return {"stream": {"turn": turn, "shards": [note() for note in shards]}}


def _shard_ledger(shard: int, ledger: StreamLedger) -> ShardLedger:
    return ledger.shards[shard]


@dataclass(eq=False, repr=False)
class ShardEpoch(Epoch):
    """Iterator over the batches of one shard, with the pool of one worker that reads the shard.

    Args:
        shard: number of the shard.
        total: number of shards.
        oldest: gives the oldest pass over the stream that somebody still makes.
    """

    shard: int
    total: int
    oldest: Callable[[], int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ledgers: deque[ShardLedger]  # type: ignore[assignment]
        self._in_order = True

    @property
    def _depth(self) -> int:
        return -(-self.settings.depth // self.total)

    def _address(self, task: Task) -> Task:
        ledger = next(each for each in self._ledgers if each.epoch == task.epoch)
        place = ledger.run, self.oldest(), self.shard, self.total
        shard = Shard(*place, *ledger.ahead, ledger.follows_left)
        return super()._address(task)._replace(shard=shard)

    def _ordinal(self, ordinal: int) -> int:
        return ordinal * self.total + self.shard

    @property
    def _is_drawn(self) -> bool:
        ledger = self._ledgers[-1]
        for each in self._pending:
            if each.task.epoch == ledger.epoch and each.future and _has_end(each.future):
                ledger.last = each.future.result().state  # the next epoch's tasks may go ahead
                return True
        return ledger.ended

    def _begin_ahead(self) -> bool:
        before = self._ledgers[-1]
        begun = super()._begin_ahead()
        if begun:
            self._ledgers[-1].begin_from(before.last or before.first)
        return begun

    def enter_next(self) -> None:
        """Let the consumer go on to the next epoch, if there is one."""
        if len(self._ledgers) > 1 or self._begin_ahead():
            self._ledgers.popleft()
        self._pool.failed_starts.clear()

    def _open(self, pending: Pending) -> None:
        ledger = self._ledgers[0]
        ledger.behind = ledger.ahead
        super()._open(pending)
        if ledger.ended:
            self._abandon_rest()

    def _abandon_rest(self) -> None:
        """Forget what was asked for beyond the end of the shard."""
        ended = [each for each in self._pending if each.task.epoch == self.epoch]
        self._abandon(deque(ended))
        self._pending = deque(each for each in self._pending if each.task.epoch != self.epoch)

    def _note(self, task: Task, reply: Reply) -> None:
        ledger = self._ledgers[0]
        if reply.outcomes and reply.outcomes[-1] is END:
            reply.outcomes.pop()
            ledger.finish(task.ordinal + len(reply.outcomes))
            ledger.last = reply.state
        elif reply.state is not None:
            ledger.ahead = task.ordinal + len(reply.outcomes), reply.state
        super()._note(task, reply)

    def _failed(self, task: Task, n: int, reply: Reply, failure: Failure) -> Any:
        ledger = self._ledgers[0]
        ledger.failed_reading = failure.stage == READING
        if isinstance(failure.error, (WorkerDied, BatchTimeout)):
            index = task.ordinal + n
            if index == ledger.lethal + 1:
                logger.warning(
                    "shard %d of the stream ends: no worker gets past its batch %d",
                    *(self.shard, ledger.lethal),
                )
                ledger.finish(index + 1)
                self._abandon_rest()
            ledger.lethal = index
        return super()._failed(task, n, reply, failure)

    def _take(self) -> Any:
        try:
            return super()._take()
        except StopIteration:
            ledger = self._ledgers[0]
            if ledger.failed_reading:
                logger.warning(
                    "shard %d of the stream ended with the error in its batch %d: an iterator that "
                    "raised, as a generator does, cannot go on",
                    *(self.shard, ledger.end - 1),
                )
                ledger.failed_reading = False
            raise

    def is_ready(self) -> bool:
        """Return whether the next batch, or the end, can be had without waiting."""
        self._recover()
        if self._opened is not None or not self._pending:
            return True
        first = self._pending[0]
        return first.task.epoch != self.epoch or first.future is None or first.future.done()

    def waits_for(self) -> list[Future[Reply]]:
        """Return what must be done for it to be ready. Asked for when it was not."""
        self._grow()
        self._watch()
        return [pending.future for pending in self._pending if pending.future is not None][:1]


def _has_end(future: Future[Reply]) -> bool:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return False
    outcomes = future.result().outcomes
    return bool(outcomes) and outcomes[-1] is END


@dataclass(eq=False, repr=False)
class StreamEpoch(TimedIterator):
    """Iterator over the batches of an epoch of a stream, or several, of each shard one in turn.

    ``where`` gives the pool of the worker that reads a shard, by the shard's number.

    Args:
        total: number of shards.
        oldest: gives the oldest pass over the stream that somebody still makes.
    """

    total: int
    oldest: Callable[[], int]

    def __post_init__(self) -> None:
        self._ledgers: deque[Any] = self.progress.ledgers
        # A shard may begin with an epoch before the others, which then find the same ledgers.
        self.coming, *each = itertools.tee(self.coming, self.total + 1)
        self._shards = []
        for shard, ledgers in enumerate(each):
            own = map(partial(_shard_ledger, shard), ledgers)
            common = self.settings, partial(self.where, shard), own, Progress(), self.owner
            self._shards.append(ShardEpoch(*common, shard, self.total, self.oldest))
        self._round: list[ShardEpoch] = []  # those that have not ended, the next one first
        self._first: tuple[int, Leaves] | None = None  # batch, and the number of its shard

    @property
    def run(self) -> int:
        """Number of the pass over the stream, counted by the loader."""
        run: int = self._ledgers[0].run
        return run

    @property
    def pools(self) -> list[Pool]:
        return [pool for shard in self._shards for pool in shard.pools]

    @property
    def in_flight(self) -> int:
        return sum(shard.in_flight for shard in self._shards)

    def begin(self) -> None:
        self._ledgers.append(next(self.coming))
        # What is resumed does not begin at the beginning: it is fruitful before its first batch.
        self.settings.compared |= self.total == 1 or self._ledgers[0].fruitful
        self._begin_round()
        for shard in self._round:
            shard.begin()

    def _begin_round(self) -> None:
        turn = self._ledgers[0].turn
        self._round = self._shards[turn:] + self._shards[:turn]

    def _take(self) -> Any:
        while self._round:
            index = 0 if self.settings.in_order else self._first_ready()
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
                if not self.settings.compared:
                    self._compare(shard.shard, batch)
                self._ledgers[0].fruitful = True
                return batch
        raise StopIteration

    def _pass_on(self, index: int) -> None:
        """Give the next shard its turn."""
        self._round.append(self._round.pop(index))
        self._ledgers[0].turn = self._round[0].shard

    def _compare(self, shard: int, batch: Any) -> None:
        """Say in the log, once, if shards begin alike: then each of them is all of the data."""
        try:
            found = shard, first_leaves(batch)
        except Exception as error:  # of the user's own objects; the batch matters more
            logger.debug("a batch cannot be compared: %r", error)
            found = shard, {}
        first, self._first = self._first, found
        if first is None:
            return
        self.settings.compared = True
        if shard != first[0] and found[1] == first[1] != {}:
            logger.warning(
                "shards %d and %d of the stream begin with the same batch: unless that is chance, "
                "each of the %d workers reads all of the data, and all of it comes %d times; have "
                "__iter__ read a part, by the id and the num_workers of get_worker_info()",
                *(first[0], shard, self.total, self.total),
            )

    def _next_epoch(self) -> None:
        self._check_end()
        self._ledgers[0].over = True
        self._tell_empty_shards()
        self._ledgers.append(next(self.coming))
        self._ledgers.popleft()
        self.owner.epoch = self.epoch + 1
        for shard in self._shards:
            shard.enter_next()
        self._begin_round()

    def _tell_empty_shards(self) -> None:
        """Say in the log, once, that some workers had nothing to read."""
        empty = sum(shard.ended and not shard.end for shard in self._ledgers[0].shards)
        if 0 < empty < self.total and not self.settings.told_empty:
            self.settings.told_empty = True
            logger.warning(
                "%d of the %d shards of the stream gave no batch, and their workers did nothing: "
                "share the data out evenly, by get_worker_info(), or set num_workers=%d",
                *(empty, self.total, self.total - empty),
            )

    def _first_ready(self) -> int:
        begin = time.perf_counter()
        try:
            while True:
                for index, shard in enumerate(self._round):
                    if shard.is_ready():
                        return index
                futures = [future for shard in self._round for future in shard.waits_for()]
                wait_for(futures, self.settings.patience, return_when=FIRST_COMPLETED)
        finally:
            self.settings.counters.opened(begin)

    def __del__(self) -> None:
        if hasattr(self, "_round"):  # else it was not made
            for ledger in self._ledgers:
                ledger.close()
