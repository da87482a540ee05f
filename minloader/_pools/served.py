"""Pools with a thread of their own, which alone enters executors and futures.

::

    consumer's thread ---- inbox ----> the pool's thread ----> executor ----> its own threads
            ^                                | what was lost                        |
            `-------- tickets, bell ---------+--------------------------------------'

Whatever breaks into the consumer's thread (Ctrl-C, or the handler of another signal that raises)
would leave a lock of an executor, or of a future, taken for ever. So that thread puts commands into
a queue, which is one call of C, and looks at tickets. What takes long is no concern of its: workers
are started, and dead ones buried, while it waits, and it may be interrupted at any time.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from minloader._errors import breaks_in
from minloader._pools.base import GRACE, POOL_CLOSED, UNCHANGEABLE, HeldItem, Pool
from minloader._pools.cpython import is_ours
from minloader._pools.interrupts import interrupts_held
from minloader._pools.ticket import Bell, Ticket
from minloader._worker.entry import refuse_avalanche
from minloader._worker.messages import Reply, TaskMessage, Unready

logger = logging.getLogger("minloader")

LONGEST_END = 4 * GRACE
"""Seconds that closing waits for the thread, after those that workers get."""


@dataclass(eq=False, repr=False, kw_only=True)
class ServedPool(Pool):
    """A pool with a thread of its own, from its first task until it is closed, or is gone.

    Its tasks leave this process, or may do so later: items are pickled.

    Attributes:
        executor: takes the next task; None if there is none yet. Of the thread.
        closed: whether it takes no more tasks.
        deadline: until when its workers may then leave by themselves (monotonic clock).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.executor: Any = None
        self.closed = False
        self.deadline = 0.0
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._serving = threading.Lock()  # the thread's, as long as it serves
        self._is_served = False
        weakref.finalize(self, self._inbox.put, int).atexit = False

    # --- in the consumer's thread

    def hold(self, item: Any) -> Any:
        if type(item) in UNCHANGEABLE or type(item) is HeldItem:
            return item
        return HeldItem(item)

    def submit(self, task: TaskMessage, bell: Bell) -> Ticket:
        ticket = Ticket(bell, task, self._inbox)
        try:
            if self.executor is None:
                self.prepare()
        except Exception as error:  # no threads
            if breaks_in(error):
                raise
            ticket.step = "sending"
            ticket.fail(error)
            return ticket
        self.ask(self._send, ticket)
        return ticket

    def ask(self, function: Callable[[Ticket], None], ticket: Ticket) -> None:
        """Have the thread call a function with a ticket, which it is to finish."""
        self._inbox.put(partial(function, ticket))
        if self.closed:  # and so the thread may have looked for the last time
            ticket.fail(RuntimeError(POOL_CLOSED))

    def prepare(self) -> None:
        """Have a thread, which will have an executor."""
        if self._is_served or self.closed:
            return
        refuse_avalanche()
        # What workers are told of the settings of libraries are those of the consumer.
        run = contextvars.copy_context().run
        args = _serve, weakref.ref(self), self._inbox, self._serving
        thread = threading.Thread(target=run, args=args, name="minloader-pool", daemon=True)
        with interrupts_held():
            thread.start()
            self._is_served = True

    def leave(self, deadline: float) -> None:
        self.deadline = deadline
        self.closed = True
        self._inbox.put(self.look)  # a method, which keeps the pool until the thread has ended it
        # Without a thread, or behind its last look, that would keep the pool for ever.
        while not self._is_served and not self._inbox.empty():
            with suppress(queue.Empty):
                self._inbox.get_nowait()

    def end(self, deadline: float) -> None:
        left = max(0.0, deadline + LONGEST_END - time.monotonic())
        # Not in a thread that the end may itself wait for: garbage is collected anywhere.
        if not is_ours(threading.current_thread()) and self._serving.acquire(timeout=left):
            self._serving.release()
        super().end(deadline)

    # --- in the pool's thread

    def _send(self, ticket: Ticket) -> None:
        """Send a task off, with a slot for its batches."""
        task = ticket.task
        if task is None or ticket.is_dropped:
            return
        try:
            ticket.step = "packing"
            items = [each.pack() if type(each) is HeldItem else each for each in task.items]
            ticket.step = "sending"
            address = None
            if self.slots is not None:
                ticket.slots = self.slots
                ticket.slot = self.slots.lend()
                address = self.slots.address(ticket.slot)
            number = next(self.task_ids)
            self.hand_over(ticket, task._replace(items=items, id=number, slot=address))
            ticket.step = ""
        except BaseException as error:  # an item may call sys.exit() as it is pickled
            ticket.fail(error)

    def hand_over(self, ticket: Ticket, task: TaskMessage) -> None:
        """Give a packed task to the executor, and follow what comes of it; see :class:`UnderWay`.

        Raises:
            BrokenExecutor: the workers are gone.
            RuntimeError: the pool is closed.
            OSError: the system allows no more processes or descriptors.
        """
        raise NotImplementedError

    def look(self) -> float | None:
        """Do what is due. Return after how many seconds to look again, if nothing is asked for."""
        return None

    def end_all(self) -> None:
        """End what is under way: the pool is closed."""


def _serve(
    reference: weakref.ref[ServedPool], inbox: queue.SimpleQueue[Callable[[], object]], serving: Any
) -> None:
    """Serve a pool. While nothing is to be done for it, the thread does not keep it."""
    seconds: float | None = None
    with serving:
        while True:
            try:
                command: Callable[[], object] = inbox.get(timeout=seconds)
            except queue.Empty:
                command = int
            pool = reference()
            if pool is None:
                return
            try:
                command()
                seconds = pool.look()
            except Exception:  # no descriptors, say; what is due is tried again
                logger.exception("the thread of a pool goes on after an error")
                seconds = GRACE
            if pool.closed:
                pool.end_all()
                pool._is_served = False
                while not inbox.empty():
                    inbox.get()()  # whoever asks is told that it is closed
                return
            del command, pool


class UnderWay:
    """The tasks that an executor has.

    It knows neither executor nor pool: the futures lead here, and it would lead to a cycle. The
    collector, which would have to find that, may come while the system's semaphores are counted,
    which CPython 3.12 refuses.

    Attributes:
        unfinished: tickets of tasks under way, by the task's id.
        lost: the same of those that were under way when the executor broke, with the error.
        have_come: whether any task came back.

    Args:
        is_buried: whether somebody buries an executor that broke, and finishes what is lost then.
    """

    def __init__(self, *, is_buried: bool = True) -> None:
        self.unfinished: dict[int, Ticket] = {}
        self.lost: dict[int, tuple[Ticket, BaseException]] = {}
        self.have_come = False
        self._is_buried = is_buried

    def follow(self, future: Future[Any], ticket: Ticket, number: int) -> None:
        """Have the ticket of a task be finished when a future of the executor is done."""
        ticket.future = future
        self.unfinished[number] = ticket
        future.add_done_callback(partial(self._arrived, number))

    def _arrived(self, number: int, future: Future[Any]) -> None:
        """Take what has come of a task, in a thread of the executor's."""
        ticket = self.unfinished.pop(number, None)
        if ticket is None:
            return  # it was given up
        try:
            error = future.exception()
            if error is None:
                reply: Reply | Unready = future.result()
                if not isinstance(reply, Unready):
                    self.have_come = True
                    ticket.settle(reply)
                    return
                error = reply
        except Exception as failure:  # cancelled; or no room for a batch in this process
            error = failure
        if self._is_buried and isinstance(error, BrokenExecutor):
            self.lost[number] = ticket, error
        else:
            ticket.fail(error)

    def lose_all(self, error: BaseException) -> None:
        """Take what has not come for lost."""
        while self.unfinished:
            with suppress(KeyError):  # it was done just now
                number, ticket = self.unfinished.popitem()
                self.lost[number] = ticket, error
