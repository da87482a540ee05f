"""A task: some batches of a lane that are made together, and what has become of it.

::

    drawn             sent              arrived, in a thread of the pool
    first, items ----------> Shipment ---------------------------------> reply, or lost
                                                                            | Lane.receive()
                                                                            v
                                                                  reply.outcomes, handed over

What a task is for is in its first fields, and never changes. All else is a cache: it may be thrown
away at any instruction, and the task be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from minloader._epochs.position import Check, SourceState
from minloader._errors import BatchError, without_frames
from minloader._memory.pickling import PackedBatch, unpack, unpack_batch
from minloader._memory.slots import Slot, Slots
from minloader._pools.base import HeldItem
from minloader._worker.messages import Failure, JobMissing, Reply

Arrivals = SimpleQueue["Shipment"]
"""What has come back to an iterator, of all its lanes. Other threads put it there."""


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
        shipment: what was sent; None if it was not, or that was lost.
        reply: what has become of each item, made up where no worker has sent one; None before it
            was received.
        memory: that the reply's batches lie in.
        is_begun: whether the consumer has come to it.
    """

    first: int
    items: list[Any]
    source_state: SourceState
    check: Check | None = None
    tries: int = 0
    suspects: dict[int, BatchError] | None = None
    shipment: Shipment | None = None
    reply: Reply | None = None
    memory: Any = None
    is_begun: bool = False

    @property
    def stop(self) -> int:
        """Ordinal behind its last batch."""
        return self.first + len(self.items)

    @property
    def is_unsent(self) -> bool:
        """Whether it waits for being sent."""
        return self.shipment is None and self.reply is None

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
        # Without a call in between, and so without Ctrl-C.
        self.memory = memory
        self.reply = reply
        self.shipment = None

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
        """Return an outcome as it is handed over: a batch, SKIP, or a failure."""
        assert self.reply is not None
        outcome = self.reply.outcomes[n]
        kind = type(outcome)
        try:
            if kind is PackedBatch:
                return unpack_batch(outcome, self.memory)
            if kind is bytes and self.reply.packed:
                return unpack(outcome)
        except (Exception, SystemExit) as error:
            return Failure.of(error, packed=False, when="when the batch was unpickled")
        return outcome

    def forget(self) -> None:
        """Let go of what was sent and made: what is queued need not run."""
        shipment, self.shipment = self.shipment, None
        self.reply = self.memory = None
        if shipment is not None:
            shipment.cancel()


@dataclass(eq=False, slots=True, repr=False)
class Shipment:
    """A task that was sent to a pool, until its reply is here.

    Attributes:
        task: which.
        arrivals: where this is put when it is done.
        slots, slot: the memory that travels with it.
        id: of the task in its pool.
        future: of the pool; None while it is being sent.
        reply: of the worker.
        memory: that the reply's batches lie in.
        error: why there is no reply, where it was lost.
    """

    task: Task
    arrivals: Arrivals
    slots: Slots | None
    slot: Slot | None = None
    id: int = 0
    future: Future[Reply] | None = None
    reply: Reply | None = None
    memory: Any = None
    error: BaseException | None = None

    @property
    def is_unwanted(self) -> bool:
        """Whether its task was forgotten, or is sent again."""
        return self.task.shipment is not self

    @property
    def is_done(self) -> bool:
        """Whether it has come back, or was lost."""
        return self.reply is not None or self.error is not None

    def arrived(self, future: Future[Reply]) -> None:
        """Take the reply. Runs in a thread of the pool, where no Ctrl-C comes, if there is one."""
        try:
            error = future.exception()
            if error is None:
                reply: Reply | JobMissing = future.result()
                if isinstance(reply, JobMissing):
                    error = reply
                else:
                    self._settle(reply)
        except Exception as failure:  # cancelled; or no room for a batch in this process
            failure.__context__ = None  # who keeps an error, in a log, would keep this frame
            error = failure.with_traceback(None)
        if error is not None:
            self.lose(error)
        elif not self.is_unwanted:
            self.arrivals.put(self)

    def lose(self, error: BaseException) -> None:
        """Note that nothing comes back."""
        self._discard_slot()
        self.error = error
        if not self.is_unwanted:
            self.arrivals.put(self)

    def _settle(self, reply: Reply) -> None:
        slots = self.slots
        slot = self.slot
        if slots is not None and slot is not None:
            use = reply.slot
            slots.settle(slot, None if use is None else use.size, reply.figures.size)
            is_retired = use is not None and use.is_retired
            if any(type(outcome) is PackedBatch for outcome in reply.outcomes):
                self.memory = slots.lease(slot, retire=is_retired)
            else:
                slots.free(slot, retire=is_retired)
        self.reply = reply

    def _discard_slot(self) -> None:
        """Give up the memory that was lent to the task: somebody may still write to it."""
        if self.slots is not None and self.slot is not None:
            self.slots.free(self.slot, retire=True)

    def cancel(self) -> None:
        """Have it come to nothing, if no worker has begun with it; its task has let go of it."""
        self.memory = None
        future = self.future
        self.future = None  # it leads here, and would keep the memory
        if future is not None:
            future.cancel()
        elif not self.is_done:  # interrupted while it was sent: somebody may write to the slot
            self._discard_slot()
