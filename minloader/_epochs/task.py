"""A task: some batches of a lane that are made together, and what has become of it.

::

    drawn             sent            done, in a thread of the pool
    first, items ----------> Ticket --------------------------------> reply, or lost
                                                                            | Lane.receive()
                                                                            v
                                                                  reply.outcomes, handed over

What a task is for is in its first fields, and never changes. All else is a cache: it may be thrown
away at any instruction, and the task be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minloader._errors import BatchError, is_own, without_frames
from minloader._memory.pickling import PackedBatch, unpack, unpack_batch
from minloader._pools.base import HeldItem
from minloader._pools.ticket import Ticket
from minloader._sampling.reader import Check, SourceState
from minloader._worker.messages import Failure, Reply


@dataclass(eq=False, slots=True, repr=False)
class Task:
    """Batches that are made together, mostly one.

    Attributes:
        first: ordinal of the first of them in its lane.
        items: what the sampler gave for each; of a shard, its number, and the ordinal there.
        source_state: a state of the sampler, or of the shard, from the first of them or before.
        check: of a shard, what a batch before the first is recognized by.
        tries: how often it was lost and may be to blame: a worker died with it, or its reply did
            not get here. Not when another worker of its executor died.
        suspects: samples of its one batch that took a worker along, by their numbers, each with
            the error that stands for it: they are not made again, and the others one by one. Empty:
            it is not known yet which do. None: it is made as ever.
        ticket: of what was sent; None if it was not, or that was lost.
        reply: what has become of each item, made up where no worker has sent one; None before it
            was received.
        memory: that the reply's batches lie in.
    """

    first: int
    items: list[Any]
    source_state: SourceState
    check: Check | None = None
    tries: int = 0
    suspects: dict[int, BatchError] | None = None
    ticket: Ticket | None = None
    reply: Reply | None = None
    memory: Any = None

    @property
    def stop(self) -> int:
        """Ordinal behind its last batch."""
        return self.first + len(self.items)

    @property
    def is_unsent(self) -> bool:
        """Whether it waits for being sent."""
        return self.ticket is None and self.reply is None

    def part(self, start: int, stop: int, *, tries: int | None = None) -> Task:
        """Return a task for some of the items, by their places in it, which is not sent."""
        return Task(
            first=self.first + start,
            items=self.items[start:stop],
            source_state=self.source_state,
            check=self.check,
            tries=self.tries if tries is None else tries,
            suspects=self.suspects,
        )

    def settle(self, reply: Reply, memory: Any = None) -> None:
        """Have a reply, whose batches lie in some memory, say what has become of it."""
        self.memory = memory
        self.reply = reply
        self.ticket = None

    def failed(
        self, errors: Sequence[BaseException], *, when: str = "", fatal: bool = False
    ) -> Task:
        """Have it come to errors, one for each item, which no worker has sent. Return it."""
        for each in errors:
            without_frames(each)
        outcomes = [Failure.of(each, packed=False, when=when, fatal=fatal) for each in errors]
        self.settle(Reply(worker=-1, pid=-1, packed=False, outcomes=outcomes))
        return self

    def item(self, n: int) -> Any:
        """Return what the sampler gave for a batch."""
        item = self.items[n]
        return item.item if isinstance(item, HeldItem) else item

    def unpack(self, n: int) -> Any:
        """Return an outcome as it is delivered: a batch, SKIP, or a failure."""
        assert self.reply is not None
        outcome = self.reply.outcomes[n]
        kind = type(outcome)
        try:
            if kind is PackedBatch:
                return unpack_batch(outcome, self.memory)
            if kind is bytes and self.reply.packed:
                return unpack(outcome)
        except (Exception, SystemExit) as error:
            if not is_own(error):
                raise
            return Failure.of(error, packed=False, when="when the batch was unpickled")
        return outcome

    def forget(self) -> None:
        """Let go of what was sent and made: what is queued need not run."""
        ticket, self.ticket = self.ticket, None
        self.reply = self.memory = None
        if ticket is not None:
            ticket.drop()


@dataclass(eq=False, slots=True, repr=False)
class Delivery:
    """A batch, or an error in its place, on its way to the consumer.

    Attributes:
        lane: number of the lane, which itself may be made again.
        task: that it is of; of an error of the sampler one without items, which has its place.
        ordinal: its place in the lane; -1 of an error of the sampler.
        outcome: the batch, or SKIP.
        error: to be raised in its place; None: there is none.
        has_failed: whether it failed, or a sample of it.
        work: what is done with it ahead of the consumer.
    """

    lane: int
    task: Task
    ordinal: int
    outcome: Any = None
    error: BaseException | None = None
    has_failed: bool = False
    work: Any = None

    def drop(self) -> None:
        """Let go of the batch: nobody will take it. Its place remains, for the position."""
        self.outcome = None
        if self.work is not None:
            self.work.drop()
