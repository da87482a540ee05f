"""The lanes of a stream, one for each shard, and what their tasks are made of.

A task says which batches it is for, and how whoever reads it gets there: a state of the shard from
there or before. A worker that stands there goes on; any other opens a copy of the dataset, puts the
state back, and passes over what lies between. So who had the task before matters for speed alone.

How many batches there are is known when a reply has fewer than were asked for: that is the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from minloader._epochs.lane import Lane
from minloader._epochs.options import Shared
from minloader._epochs.position import LanePosition, Position
from minloader._epochs.task import Task
from minloader._pools.base import Pool
from minloader._pools.ticket import Bell, Ticket
from minloader._sampling.reader import Check, SourceState, pass_numbers
from minloader._worker.messages import Failure, Reply, Shard, ordinal_in_epoch
from minloader._worker.stream_worker import READING, READING_ON

logger = logging.getLogger("minloader")


MAX_SHARD_CHUNK = 64
"""Most batches in a task of a shard, which is not cut short where they turn out to be slow."""


class ShardLane(Lane):
    """The lane of a shard."""

    feed: ShardFeed

    def position(self, held: Sequence[tuple[Task, int]] = ()) -> LanePosition:
        return replace(super().position(held), has_failed=self.feed.has_failed)

    def ordinal_in_epoch(self, ordinal: int) -> int:
        return ordinal_in_epoch(ordinal, shard=self.feed.shard, total=self.feed.total)

    def _first_chunk(self) -> int:
        # Those that an epoch has ended with may come from a buffer, and say nothing of the next.
        return 1

    def _find_pool(self) -> Pool:
        return self.shared.group.pool(self.feed.shard)

    def _shard_of(self, task: Task) -> Shard:
        return self.feed.shard_of(task)

    def _find_max_chunk(self) -> int:
        return 1 if self.shared.job.options.memory_limit is not None else MAX_SHARD_CHUNK

    def _draw(self) -> Task | None:
        feed = self.feed
        if feed.is_ended:
            return None
        task = feed.draw(self._chunk)
        self.tasks.append(task)
        feed.next = task.stop
        return task

    def _receive(self, task: Task, ticket: Ticket) -> None:
        reply = ticket.reply
        if reply is None:
            super()._receive(task, ticket)
            return
        if reply.outcomes:
            self._learn(task, reply)
        self.feed.receive(task, reply, self)


class ShardFeed:
    """What the tasks of one epoch of a shard are made of.

    Args:
        shard: number of the shard.
        total: number of shards.
        epoch: number of the epoch.
        position: where it begins.
        pass_number: of this pass over the shard, which tells it from others in the same epoch.
        follows: that of the pass that was read to its end before, so that whoever has done that
            goes on with the same copy of the stream. None: there is none.
        passes: returns the numbers of those of the loader that may still be read on.

    Attributes:
        pass_number: likewise.
        next: ordinal of the next batch to ask for.
        known: the newest state of the shard that came back; at its end, from there.
        check: what the batch before that state is recognized by.
        beginning: the state that the epoch began with; None if it had none.
        is_ended: whether the end was seen.
        has_failed: whether reading has failed in this epoch: then the next one begins as this one
            did.
        error: always None: what reading raises has the place of a batch.
    """

    may_overtake = False
    error = None
    length = None

    def __init__(
        self,
        shard: int,
        total: int,
        epoch: int,
        position: LanePosition,
        pass_number: int,
        follows: int | None,
        passes: Callable[[], Iterable[int]] = list,
    ) -> None:
        self.pass_number = pass_number
        self.shard = shard
        self.total = total
        self.epoch = epoch
        self.next = position.given
        self.known = position.source_state
        self.check = position.check
        self.beginning = position.beginning
        self.is_ended = position.is_ended
        self.has_failed = position.has_failed
        self._has_just_failed = False  # with the last batch that came
        self._follows = follows
        self._passes = passes

    def following(self, *, is_abandoned: bool) -> LanePosition:
        """Return where another epoch begins, after this one.

        Args:
            is_abandoned: whether the consumer has left this one: that one begins as it did then.
        """
        beginning = self.beginning
        begins_anew = is_abandoned or self.has_failed
        if not begins_anew and self.is_ended and self.known.state is not None:
            beginning = self.known.state
        return LanePosition(source_state=SourceState(0, beginning), beginning=beginning)

    @property
    def pass_to_follow(self) -> int | None:
        """Number of the pass, for the epoch that follows it; None: that one begins anew."""
        return None if self.has_failed else self.pass_number

    def draw(self, most: int) -> Task:
        """Return a task for the next batches, so many at most."""
        first = self.next
        return Task(
            first=first,
            items=[(self.shard, ordinal) for ordinal in range(first, first + most)],
            source_state=self.known,
            check=self.check,
        )

    def shard_of(self, task: Task) -> Shard:
        """Return which batches of the shard a task is for, and how to get there."""
        return Shard(
            id=self.shard,
            total=self.total,
            first=task.first,
            at=task.source_state.at,
            state=task.source_state.state,
            check=task.check,
            pass_number=self.pass_number,
            follows=self._follows,
            others=tuple(self._passes()),
        )

    def check_at(self, given: int, head: Task | None) -> Check | None:
        """Return what tells whether the shard gives again what it has given.

        Args:
            given: how many batches were handed over.
            head: the first task of which something was not.
        """
        if head is None:
            return self.check
        n = given - head.first
        read = None if head.reply is None else head.reply.shard
        if n > 0 and read is not None and n <= len(read.fingerprints):
            return Check(given - 1, read.fingerprints[n - 1])
        return head.check

    def receive(self, task: Task, reply: Reply, lane: Lane) -> None:
        """Make available what has come back of a task.

        Args:
            task: which.
            reply: to it.
            lane: that has it.
        """
        made = len(reply.outcomes)
        ticket = task.ticket
        assert ticket is not None
        read = reply.shard
        assert read is not None
        is_end = read.ended
        source_state = task.source_state
        check = task.check
        if made and read.fingerprints:
            check = Check(task.first + made - 1, read.fingerprints[-1])
        if read.state is not None and not is_end:
            source_state = SourceState(task.first + made, read.state)
        # All that is behind it goes on from here. What was farther on may have come before.
        behind = [each for each in lane.tasks if each.first > task.first]
        for each in behind:
            each.source_state = _later(each.source_state, source_state)
            each.check = _later(each.check, check)
        self.known = _later(self.known, source_state)
        self.check = _later(self.check, check)
        if made:
            self.has_failed |= any(map(_failed_reading, reply.outcomes))
            self._has_just_failed = _failed_reading(reply.outcomes[-1])
        stop = task.first + made
        # A task behind this one may have come first, and have told of an end that is farther on.
        if is_end and (not self.is_ended or stop < self.next):
            if self._has_just_failed:
                logger.warning(
                    "shard %d of the stream ended with the error in its batch %d: an iterator that "
                    "raised, as a generator does, cannot continue",
                    self.shard,
                    stop - 1,
                )
            self._end(task, SourceState(stop, read.state), lane)
        # Only now: after Ctrl-C in _end the reply is received again, and tells of the end again.
        if is_end:
            task.items = task.items[:made]
        task.settle(reply, ticket.memory)

    def _end(self, task: Task, end_state: SourceState, lane: Lane) -> None:
        """Note that a shard ends within a task, and forget what was asked for behind it."""
        lane.drop_behind(task)
        self.known = end_state
        self.is_ended = True
        self.next = end_state.at

    def end_before(self, task: Task, lane: Lane) -> None:
        """End the shard before a task: no worker gets there."""
        logger.warning(
            "shard %d of the stream ends: no worker gets past its batch %d",
            self.shard,
            task.first - 1,
        )
        self._end(task, SourceState(task.first, None), lane)
        task.items = []
        task.settle(Reply(worker=-1, pid=-1, packed=False, outcomes=[]))


def _later(former: Any, new: Any) -> Any:
    """Return the one of two states, or checks, that is farther on; the former of equals."""
    return new if former is None or (new is not None and former[0] < new[0]) else former


def _failed_reading(outcome: Any) -> bool:
    return type(outcome) is Failure and outcome.when in (READING, READING_ON)


def shard_lanes(
    position: Position,
    shared: Shared,
    passes: list[int],
    follows: list[int | None],
    bell: Bell,
    call: Callable[..., Any],
) -> list[Lane]:
    """Return a lane for each shard of a stream.

    Args:
        position: where they begin.
        shared: what all epochs of the loader share.
        passes: numbers of the passes that these go on with; empty: each is another one.
        follows: those of the passes that were read to their end just before; empty: there are none.
        bell, call: see :class:`Lane`.
    """
    lanes: list[Lane] = []
    for number, start in enumerate(position.lanes):
        feed = ShardFeed(
            number,
            len(position.lanes),
            position.epoch,
            start,
            passes[number] if passes else next(pass_numbers),
            follows[number] if follows else None,
            shared.group.passes,
        )
        lanes.append(ShardLane(number, shared, feed, start, bell, call))
    return lanes
