"""The lane of a shard of a stream, which one worker reads.

::

    reading 1: [ how many at most | start ] [ how many ] [ how many ] ...   one worker reads on
                                                  |
                                                  `-- its worker is gone, or another one got it
    reading 2: [ how many at most | start ] [ how many ] ...                it is read again

A task says how many batches at most, never which: the worker goes on where it stands, and the reply
says how many it has made. So the place of a batch is known when the reply is opened, and each reply
begins where the one before has ended. The first task of a *reading* says where to begin: at the
last state of the stream that came back, past the batches that came after it. Another reading begins
only where the worker is gone, after a resize, or in another process. A worker that is given a later
task of a reading that it does not know says so, and makes nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minloader._epochs import failures
from minloader._epochs.lane import Lane
from minloader._epochs.pending import Bell, Pending, replied
from minloader._epochs.settings import Settings
from minloader._epochs.state import Note, State
from minloader._insight.leaves import Leaves, first_leaves
from minloader._memory import pickling
from minloader._pools.base import Death, Pool
from minloader._worker.messages import END, LEFT_OUT, Failure, Reached, Reply, Shard, Task
from minloader._worker.run import READING

logger = logging.getLogger("minloader")


FIRST = Reached()
"""The beginning of a shard."""


def packed(state: Any) -> bytes | None:
    """Return a state of the stream, packed; None where there is none."""
    return None if state is None else pickling.pack(state, down=True)


def _unpacked(state: bytes | None) -> Any:
    return None if state is None else pickling.unpack(state)


@dataclass(eq=False)
class ShardPass:
    """One pass over a shard.

    Attributes:
        index: place of the epoch among those of the iterator.
        epoch: number of the epoch.
        run: number of the pass over the stream, counted by the loader.
        reached: up to where replies were opened.
        first: the state that the stream had at the end of the pass before, packed.
        follows: number of the pass before, if it was read to its end.
        last: the state that the stream has at the end of this pass, packed.
        is_ended: whether the end was seen.
        lethal: what to say of batches that no worker survived, by their place.
        unreadable: the place of one that cannot be passed over either: the shard ends with it.
        suspect: the place of the batch with which a worker died last, and how often.
    """

    index: int
    epoch: int
    run: int
    reached: Reached
    first: bytes | None = None
    follows: int | None = None
    last: bytes | None = None
    is_ended: bool = False
    lethal: dict[int, Reply] = field(default_factory=dict)
    unreadable: int | None = None
    suspect: tuple[int, int] = -1, 0

    @classmethod
    def of(cls, epoch: int, run: int, place: State) -> ShardPass:
        """Return the pass that goes on from a part of a state."""
        state, first = packed(place["state"]), packed(place["first"])
        known = place["batches"], place["at"], state, tuple(place["failed"]), place["last"]
        ended, last = place["ended"], packed(place["next"])
        return cls(0, epoch, run, Reached(*known), first, last=last, is_ended=ended)

    @classmethod
    def anew(cls, epoch: int, run: int, place: State) -> ShardPass:
        """Return a pass that begins as that one did which a part of a state is of."""
        return cls(0, epoch, run, FIRST, packed(place["first"]))

    def note(self) -> Note:
        """Note the beginning of this pass."""
        return partial(_place, self, self.reached, ended=False)

    @property
    def next(self) -> bytes | None:
        """The state that the next pass begins from: one that is left early leaves nothing."""
        return self.last if self.is_ended and self.last is not None else self.first


class StreamLane(Lane):
    """The tasks of a shard of a stream.

    Args:
        shard: number of the shard.
        total: number of shards.
        oldest: gives the oldest pass over the stream that somebody still makes.
        first: the first pass over the shard.
    """

    def __init__(
        self,
        settings: Settings,
        where: Callable[[], Pool],
        bell: Bell,
        shard: int,
        total: int,
        oldest: Callable[[], int],
        first: ShardPass,
    ) -> None:
        self.shard, self.total = shard, total
        self._oldest = oldest
        self._readings = itertools.count(1)
        self._reading = 0
        self._is_begun = False  # whether a task of the reading was sent
        super().__init__(settings, where, bell, total)
        self._begin(first)

    def adopt(self) -> None:
        super().adopt()
        self._restart()

    def _restart(self) -> None:
        """Have the shard read again from where the last reply that was opened has ended."""
        former = self.pending
        again = [each for each in former if each.outcomes is None and not each.ends]
        new = {id(each): each.part(0, len(each.items)) for each in again}
        self._reading, self._is_begun = next(self._readings), False
        self.pending = deque(new.get(id(each), each) for each in former)
        for each in again:
            each.forget()

    def _begin(self, each: ShardPass) -> None:
        if each.is_ended:
            self.pending.append(self._end_of(each))
        self._reading, self._is_begun = next(self._readings), False
        self.sources.append(each)

    def begin_after(self, index: int, epoch: int, run: int) -> None:
        before = self.sources[-1]
        self._begin(ShardPass(index, epoch, run, FIRST, before.next, before.run))

    def drop_ahead(self) -> None:
        super().drop_ahead()
        self._restart()

    def _end_of(self, each: ShardPass) -> Pending:
        return Pending(each, each.reached.batches, [], each.reached, ends=True)

    @property
    def is_drawn(self) -> bool:
        return bool(self.sources[-1].is_ended)

    @property
    def drew_nothing(self) -> bool:
        return not self.sources[-1].reached.batches and self.is_drawn

    @property
    def position(self) -> int:
        head = self.head
        if head is not None and (head.outcomes is not None or head.ends):
            return head.ordinal + head.given
        batches: int = self.sources[0].reached.batches
        return batches

    def ordinal(self, ordinal: int) -> int:
        return ordinal * self.total + self.shard

    def item(self, pending: Pending, n: int) -> Any:
        return self.shard, pending.ordinal + n

    # --- down

    def _draw(self) -> None:
        items = [self.shard] * self._chunk
        self.pending.append(Pending(self.sources[-1], -1, items, None))

    def _renewed(self, pending: Pending) -> Pending:
        self._restart()  # if it is under way, the shard is read on without us
        first = self._unsent  # those before it are to be sent again too
        return pending if first is None else first

    def _send(self, pending: Pending) -> None:
        super()._send(pending)
        self._is_begun = True

    def _address(self, pending: Pending) -> Task:
        each, start = pending.source, None
        if not self._is_begun:
            start = each.reached._replace(left_out=tuple(each.lethal), end=each.unreadable)
            if not start.at:
                start = start._replace(state=each.first, follows=each.follows)
        place = each.run, self._oldest(), self.shard, self.total, self._reading
        return Task(-1, each.epoch, pending.items, shard=Shard(*place, start))

    # --- up

    def _open(self, pending: Pending) -> None:
        reply, each = pending.reply, pending.source
        assert reply is not None
        pending.future = None  # it leads here, and would keep the memory
        if not reply.outcomes:  # its worker has not read what came before
            self._restart()
            return
        if pending.before is None:
            pending.before, pending.ordinal = each.reached, each.reached.batches
        outcomes = [outcome for outcome in reply.outcomes if outcome is not END]
        made, reached = len(outcomes), pending.before
        for n, outcome in enumerate(outcomes):
            if outcome is LEFT_OUT:
                (outcomes[n],) = each.lethal[reached.batches + n].outcomes
        failed = [n for n, outcome in enumerate(outcomes) if _failed_reading(outcome)]
        pending.marks = reply.lasts, failed
        reached = reached.after(made, *pending.marks)
        if reply.state is not None and made == len(reply.outcomes):
            reached = reached._replace(at=reached.batches, state=reply.state)
        self._learn(pending, reply)
        pending.items = pending.items[:made]
        each.reached = reached
        pending.outcomes = outcomes
        if made < len(reply.outcomes):
            each.last = reply.state
            self._finish(each)
        reply.outcomes.clear()  # an error's frames lead there, and it must not lead to itself

    def _finish(self, each: ShardPass) -> None:
        """Note that a shard has no more batches, and forget what was asked for beyond them."""
        if each.reached.batches - 1 in each.reached.failed[-1:]:
            logger.warning(
                "shard %d of the stream ended with the error in its batch %d: an iterator that "
                "raised, as a generator does, cannot continue",
                *(self.shard, each.reached.batches - 1),
            )
        former = self.pending
        kept = [known for known in former if known.outcomes is not None or known.ends]
        self.pending = deque([*kept, self._end_of(each)])
        each.is_ended = True
        for known in former:
            if known not in kept:
                known.forget()

    def _redo(self, lost: Pending, death: Death | None) -> None:
        # What has arrived before it was opened first: the shard is read on from there.
        if death is not None or not isinstance(lost.lost, BrokenExecutor | CancelledError):
            self._blame(lost, death)
        place = {"batch": self.ordinal(lost.source.reached.batches), "epoch": lost.source.epoch}
        self.settings.counters.record("consumer", "again", time.perf_counter(), 0.0, place)
        self._restart()

    def _blame(self, lost: Pending, death: Death | None) -> None:
        """Count a try of the batch that a worker died with, or that came to nothing here."""
        counters, each = self.settings.counters, lost.source
        index = each.reached.batches + (0 if death is None else death.item)
        ordinal = self.ordinal(index)
        tries = each.suspect[1] + 1 if each.suspect[0] == index else 1
        each.suspect = index, tries
        if death is not None:
            self._tell_death(death, ordinal, lost.source.epoch, (self.shard, index))
        if tries <= self.settings.retries and not (death is not None and death.final):
            counters.retries += 1
        elif index in each.lethal:
            each.unreadable = index
            logger.warning(
                "shard %d of the stream ends: no worker gets past its batch %d", self.shard, index
            )
        elif death is not None:
            known = ordinal, lost.source.epoch, (self.shard, index), tries
            reply = replied(failures.lethal(death, *known))
            each.lethal[index] = reply._replace(worker=death.worker, pid=death.pid)
        else:
            assert isinstance(lost.lost, Exception)
            each.lethal[index] = replied(lost.lost, stage="when it came from a worker", fatal=True)

    # --- state

    def note(self) -> Note:
        """Note what of the consumer's epoch was handed over."""
        each = self.sources[0]
        head, reached = self.head, each.reached
        if head is not None and head.outcomes is not None and head.before is not None:
            given = head.ordinal + head.given - head.before.batches
            reached = head.before.after(given, *head.marks)
        ended = head is not None and head.ends
        return partial(_place, each, reached, ended=ended)

    def next_pass(self, epoch: int, run: int, *, left: bool) -> ShardPass:
        """Return the first pass of another iterator, which comes after the consumer's here.

        Args:
            epoch: its number.
            run: number of the pass over the stream.
            left: whether the consumer has left its epoch: then no shard of it counts as read.
        """
        before = self.sources[0]
        if not left:
            return ShardPass(0, epoch, run, FIRST, before.next, before.run)
        return ShardPass(0, epoch, run, FIRST, before.first)


def _failed_reading(outcome: Any) -> bool:
    return type(outcome) is Failure and outcome.stage == READING


def _place(each: ShardPass, reached: Reached, *, ended: bool) -> State:
    """Work out the part of a state that says where in a shard a pass is."""
    states = None if ended else reached.state, each.first, each.last if ended else None
    known = dict(zip(("state", "first", "next"), map(_unpacked, states), strict=True))
    known |= {"batches": reached.batches, "at": reached.at, "ended": ended}
    return known | {"failed": list(reached.failed), "last": reached.last}


# --- what the log says of all shards


class ShardWatch:
    """Says in the log, once, what looks wrong with the shards of a stream.

    Args:
        settings: what the loader's epochs have in common.
        total: number of shards.
        compares: whether each shard begins, so that their first batches can be compared.
    """

    def __init__(self, settings: Settings, total: int, *, compares: bool) -> None:
        self._settings = settings
        settings.compared |= not compares
        self._total = total
        self._first: tuple[int, Leaves] | None = None  # shard and beginning of the first batch

    def compare(self, lane: Any, batch: Any) -> None:
        """Compare the first batches of two shards: alike, each shard is all of the data."""
        if self._settings.compared:
            return
        try:
            found = lane.shard, first_leaves(batch)
        except Exception as error:  # of the user's own objects; the batch matters more
            logger.debug("a batch cannot be compared: %r", error)
            found = lane.shard, {}
        first, self._first = self._first, found
        if first is None:
            return
        self._settings.compared = True
        if found[0] != first[0] and found[1] == first[1] != {}:
            logger.warning(
                "shards %d and %d of the stream begin with the same batch: unless that is chance, "
                "each of the %d workers reads all of the data, and all of it comes %d times; have "
                "__iter__ read a part, by the id and the num_workers of get_worker_info()",
                *(first[0], found[0], self._total, self._total),
            )

    def count_empty(self, lanes: list[Any]) -> None:
        """Count the shards that gave nothing in the consumer's epoch."""
        if self._total == 1:
            return
        empty = sum(not lane.sources[0].reached.batches for lane in lanes)
        if 0 < empty < self._total and not self._settings.told_empty:
            self._settings.told_empty = True
            logger.warning(
                "%d of the %d shards of the stream gave no batch, and their workers did nothing: "
                "share the data out evenly, by get_worker_info(), or set num_workers=%d",
                *(empty, self._total, self._total - empty),
            )
