"""A task, from before its first item is drawn until its last batch is handed over.

::

    drawn          send()            arrived(), in a thread of the pool
    items, before ---------> future --------------------------------> reply, memory    or lost
                                                                        | look(): Lane
                                                                        v
                                                    outcomes, of which so many were given

The pending tasks of a lane are its account: what was drawn and not handed over stands there and
nowhere else. So each step either has happened or has not, at whatever instruction Ctrl-C comes:
it is one assignment.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self

from minloader._checks import B
from minloader._errors import SKIP, without_frames
from minloader._memory.pickling import PackedBatch, unpack, unpack_batch
from minloader._memory.slots import Slot, Slots
from minloader._pools.base import HeldItem
from minloader._worker import lifetimes
from minloader._worker.messages import Failure, Reply, Task


class SamplerState(NamedTuple):
    """A state of a sampler.

    Attributes:
        at: how many items of the epoch had been drawn. With 0 it is what the sampler was between
            the epochs: it is told the epoch after the state was put back.
        state: as the sampler gave it.
    """

    at: int
    state: Any


class Bell:
    """Wakes the consumer up when a task has arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the consumer up, or keep it from going to sleep. From any thread."""
        with suppress(RuntimeError):  # it has not heard the last time yet
            self._lock.release()

    def wait(self, seconds: float) -> None:
        """Return when it rings, or after ``seconds``; also when it has rung since the last time.

        With -1, only then.
        """
        self._lock.acquire(timeout=seconds)


class Handover(ABC, Generic[B]):
    """An iterator that Ctrl-C, at whatever instruction of ``next`` it comes, takes nothing from.

    Several threads may take from it. In a fork of the process that has made it, it may refuse.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = lifetimes.process

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        taken: list[Any] = []  # what is on its way to the consumer, and where it is from
        try:
            batch = self.take(taken)
            del taken[:]  # see take(): the batch may have replaced one that has failed
            return batch
        except Exception:
            raise
        except BaseException:
            self.put_back(taken)
            raise

    def take(self, taken: list[Any]) -> B:
        """Return the next one, which is noted in ``taken`` until the consumer has it."""
        if self._process is not lifetimes.process:
            self._check_process()
        with self._lock:
            try:
                return self._next(taken)
            except Exception:
                del taken[:]  # the error's traceback leads here. Ctrl-C comes after calls only.
                raise
            except BaseException:
                self.put_back(taken)
                raise

    def put_back(self, taken: list[Any]) -> None:
        """Undo :meth:`take`, if an interrupt has kept the batch from the consumer."""
        with self._lock:
            if taken:
                self._put_back(taken)
                taken.clear()

    @abstractmethod
    def _check_process(self) -> None:
        """Refuse to go on in a fork of the process that began, if that cannot be."""

    @abstractmethod
    def _next(self, taken: list[Any]) -> B:
        """Return the next one, which is noted in ``taken`` before it leaves the account."""

    @abstractmethod
    def _put_back(self, taken: list[Any]) -> None:
        """Give the account what an interrupt has kept from the consumer."""


@dataclass(eq=False, slots=True, repr=False)
class Pending:
    """A task, or what stands in the place of one: an error of the sampler, the end of an epoch.

    Attributes:
        source: of its epoch: has the ``epoch``, and the ``index`` of that in the iterator.
        ordinal: place of its first batch in the epoch, or in the shard of a stream.
        items: what the sampler gave for each batch; of a stream, how many batches at most.
        before: where the sampler, or the stream, was before the first of them, or a little
            earlier; of an end, where it is then.
        tries: how often a worker has died with it.
        ends: whether it stands for the end of its epoch.
        bell: rung when the reply is here.
        task: as it was sent; None if it was not.
        slots, slot: the memory that travels with it.
        future: of the executor; None once the reply was looked at.
        reply: of the worker.
        memory: that the reply's batches lie in.
        lost: why there is no reply.
        outcomes: what the reply has for each item; None before it was looked at.
        given: how many of them were handed over, or left out.
        begun: whether the consumer has come to it.
        failed: by outcome, samples that were left out of it since they failed: the index of each,
            and its error, see :class:`Reply`.
        marks: of a stream, what each batch is recognized by, and which the stream failed to give.
    """

    source: Any
    ordinal: int
    items: list[Any]
    before: Any
    tries: int = 0
    ends: bool = False
    bell: Bell | None = None
    task: Task | None = None
    slots: Slots | None = None
    slot: Slot | None = None
    future: Future[Reply] | None = None
    reply: Reply | None = None
    memory: Any = None
    lost: BaseException | None = None
    outcomes: list[Any] | None = None
    given: int = 0
    begun: bool = False
    marks: Any = ()
    failed: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def is_sent(self) -> bool:
        """Whether a reply is here or to come. Interrupted while it was sent, it is not."""
        return (self.future or self.reply or self.lost or self.outcomes) is not None

    @property
    def is_open(self) -> bool:
        """Whether there are outcomes to hand over."""
        return self.outcomes is not None and self.given < len(self.outcomes)

    @property
    def is_left(self) -> bool:
        """Whether there is more to hand over: a batch, made or not, or an error of the sampler."""
        return self.given < len(self.outcomes or self.items)

    @property
    def is_over(self) -> bool:
        """Whether all that it stands for was handed over."""
        return self.outcomes is not None and self.given >= len(self.outcomes) >= len(self.items)

    def part(self, start: int, stop: int, **values: Any) -> Pending:
        """Return a task for some of the items, which is not sent."""
        common = self.source, self.ordinal + start, self.items[start:stop], self.before
        return Pending(*common, **{"tries": self.tries, "marks": self.marks} | values)

    def arrived(self, future: Future[Reply]) -> None:
        """Take the reply. Runs in a thread of the pool, where no Ctrl-C comes, if there is one."""
        try:
            error = future.exception()
            if error is None:
                self._settle(future.result())
        except Exception as failure:  # cancelled; or no room for a batch in this process
            failure.__context__ = None  # who keeps an error, in a log, would keep this frame
            error = failure.with_traceback(None)
        if error is not None:
            self.discard_slot()
            self.lost = error
        bell, self.bell = self.bell, None
        if bell is not None:
            bell.ring()

    def _settle(self, reply: Reply) -> None:
        slots, slot = self.slots, self.slot
        if slots is not None and slot is not None:
            slots.settle(slot, reply.slot_size, reply.size)
            if any(type(outcome) is PackedBatch for outcome in reply.outcomes):
                self.memory = slots.lease(slot, retire=reply.slot_retired)
            else:
                slots.free(slot, retire=reply.slot_retired)
        self.reply = reply

    def discard_slot(self) -> None:
        """Give up the memory that was lent to the task: somebody may still write to it."""
        if self.slots is not None and self.slot is not None:
            self.slots.free(self.slot, retire=True)

    def forget(self) -> Pending:
        """Let go of the task: if it is queued, it need not run. Return what to know of it."""
        if self.task is not None and not self.is_sent:
            self.discard_slot()  # interrupted while it was sent: somebody may write to it
            self.slot = None
        future, self.future = self.future, None
        if future is not None:
            future.cancel()
        left = None if self.outcomes is None else [SKIP for _ in self.outcomes]
        known = {"outcomes": left, "given": self.given, "ends": self.ends, "marks": self.marks}
        return Pending(self.source, self.ordinal, self.items, self.before, **known)

    def unpack(self, n: int) -> Any:
        """Return an outcome as it is handed over: a batch, SKIP, a failure, a sampler's error."""
        assert self.outcomes is not None
        outcome, reply = self.outcomes[n], self.reply
        try:
            if type(outcome) is bytes and reply is not None and reply.packed:
                return unpack(outcome)
            if type(outcome) is PackedBatch:
                return unpack_batch(outcome, self.memory)
        except (Exception, SystemExit) as error:
            return Failure.of(error, packed=False, stage="when the batch was unpickled")
        return outcome

    def item(self, n: int) -> Any:
        """Return what the sampler gave for a batch."""
        item = self.items[n]
        return item.item if isinstance(item, HeldItem) else item

    def lets_go(self, n: int) -> None:
        """Keep nothing of an outcome that was handed over: it is the consumer's alone."""
        assert self.outcomes is not None
        self.outcomes[n] = SKIP
        if n + 1 == len(self.outcomes):
            self.memory = self.reply = None


def replied(*errors: Exception, stage: str = "", fatal: bool = False, sample: Any = ()) -> Reply:
    """Return a reply that no worker gave: failures."""
    for each in errors:
        without_frames(each)
    made = (Failure.of(each, packed=False, stage=stage, fatal=fatal) for each in errors)
    return Reply(-1, -1, False, [each._replace(sample=sample) for each in made])
