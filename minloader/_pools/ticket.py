"""What becomes of a task, as the consumer's thread may look at it: without a lock of Python's.

The methods of ``Future`` and ``Condition`` are Python. Where Ctrl-C, or the handler of another
signal, raises within them, a lock stays taken for ever. So a ticket is plain attributes, of which
the flag is stored last, and a bell is one lock of C.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

from minloader._memory.pickling import PackedBatch
from minloader._memory.slots import Slot, Slots
from minloader._worker.messages import Reply, TaskMessage


class Death(NamedTuple):
    """How a worker ended that was running a task.

    Attributes:
        item: index of the item of the task that it was making; -1: it was on its way to the
            first, making a stream ready or reading it again.
        worker: its id.
        pid: its process.
        exitcode: of the process; None if it is not known, or lives.
        cause: the same in words.
        stack: Python stack if we killed it, for taking too long or standing still; None: it died
            by itself.
        sample_number: of the sample in the item; -1 if it is not known.
        crash: Python stack from the moment of a segmentation fault or the like; "" without one.
    """

    item: int
    worker: int
    pid: int
    exitcode: int | None
    cause: str
    stack: str | None
    sample_number: int = -1
    crash: str = ""


class Bell:
    """Wakes who waits for tickets. It is a hint: look at these first, and then wait.

    So an exception that comes just behind the wait does no harm.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def ring(self) -> None:
        """Wake who waits, or else who waits next. For any thread."""
        with suppress(RuntimeError):  # it was rung before
            self._lock.release()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has been rung since this was called last."""
        self._lock.acquire(timeout=-1 if seconds is None else seconds)


@dataclass(eq=False, repr=False, slots=True)
class Ticket:
    """What becomes of a task that a pool was given.

    Attributes:
        bell: rung when it is done.
        task: which; None of anything else that a pool is asked for.
        inbox: of the thread that sends it, if there is one.
        is_done: whether there is nothing more to come. Stored last.
        is_dropped: whether nobody wants it any more.
        reply: of the worker.
        memory: that the reply's batches lie in.
        error: why there is no reply.
        death: with an error, how the worker ended that was making it, if it is to blame.
        step: with an error, what was being done: "packing" its items, "sending" it; "" later.
        future: of the executor that has it; None before and after that.
        slots, slot: the memory that travels with it.
    """

    bell: Bell
    task: TaskMessage | None = None
    inbox: SimpleQueue[Any] | None = None
    is_done: bool = False
    is_dropped: bool = False
    reply: Reply | None = None
    memory: Any = None
    error: BaseException | None = None
    death: Death | None = None
    step: str = ""
    future: Future[Any] | None = None
    slots: Slots | None = None
    slot: Slot | None = None

    def drop(self) -> None:
        """Have it come to nothing, if no worker has begun with it. For any thread, at any time."""
        self.is_dropped = True
        self.memory = None
        if self.inbox is not None and not self.is_done:
            self.inbox.put(self.cancel)

    # --- in a thread of the pool

    def cancel(self) -> None:
        """Have no worker begin with it."""
        if self.future is not None:
            self.future.cancel()

    def settle(self, reply: Reply) -> None:
        """Take the reply of a worker.

        Raises:
            MemoryError: this process has no room for its batches.
        """
        slots = self.slots
        slot = self.slot
        if slots is not None and slot is not None:
            use = reply.slot
            slots.settle(slot, None if use is None else use.size, reply.figures.size)
            is_retired = use is not None and use.is_retired
            in_slot = any([type(outcome) is PackedBatch for outcome in reply.outcomes])
            if in_slot and not self.is_dropped:
                self.memory = slots.lease(slot, retire=is_retired)
            else:
                slots.free(slot, retire=is_retired)
        self.finish(reply)

    def fail(self, error: BaseException) -> None:
        """Note that there is no reply."""
        if self.slots is not None and self.slot is not None:
            self.slots.free(self.slot, retire=True)  # somebody may still write to it
        error.__context__ = None  # who keeps an error, in a log, would keep this frame
        self.error = error.with_traceback(None)
        self.finish(None)

    def finish(self, reply: Reply | None) -> None:
        """Have it be done."""
        self.future = None  # it leads here, and would keep the memory
        self.reply = reply
        self.is_done = True
        self.bell.ring()
