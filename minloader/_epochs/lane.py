"""A lane: tasks go down to a pool, and their batches come back in the order of the tasks.

::

    draw() ---> tasks [ received | sent | sent | not sent ] ---> current, of which the consumer
                                    |         |                  has a part
                                    |         `-- lost: in pieces, in its place
                                    `-- cut short: the rest is sent, in its place

A sampler has one lane, a stream one for each shard. How many batches were delivered is the truth.
The tasks are a cache, in the order of their ordinals: a lane that may have been torn by something
that broke in is thrown away, and another one is made from its position.

Nothing here knows the iterator or the loader, so that these end when they are let go of.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

from minloader._epochs import lost
from minloader._epochs.feed import SamplerFeed
from minloader._epochs.options import Shared
from minloader._epochs.position import LanePosition, take_back
from minloader._epochs.task import Delivery, Task
from minloader._errors import SKIP
from minloader._pools.base import Pool
from minloader._pools.ticket import Bell, Ticket
from minloader._protocols import snapshot
from minloader._worker.messages import (
    CHUNK_SECONDS,
    Failure,
    Reply,
    Shard,
    TaskMessage,
)

logger = logging.getLogger("minloader")

MAX_CHUNK = 1024
"""Most batches in a task: an executor's 0.8 ms are 0.8 µs a batch then, less than seeding."""

MAX_AHEAD = 1000
"""Most batches that are delivered before their turn. No more are drawn before the one that they
have overtaken has come."""

CHUNK_BYTES = 512 * 1024
"""Most bytes that the batches of a task of several should have: one of them that is kept keeps the
memory of all."""

MISSING: Final = object()
"""In place of a batch: it is not at hand."""


class Coming(Enum):
    """What comes next in a lane."""

    BATCH = 0  # it is here, or SKIP, or what a batch has failed with
    ERROR = 1  # of the sampler
    END = 2
    LATER = 3  # nothing is here yet


NO_BATCH = (Failure, Delivery, type(SKIP))
"""Types of outcomes that are more work than to hand them over."""


class Lane:
    """The tasks of a sampler, or of a shard of a stream.

    Args:
        number: of the lane in its epoch.
        shared: what all epochs of the loader share.
        feed: what tasks are made of.
        start: where it begins.
        bell: rung when a task is done.
        call: calls a function that runs the user's code; see :meth:`Interrupts.let_through`.

    Attributes:
        delivered: how many batches were, without a gap.
        ahead: ordinals of those that were delivered before their turn.
        current: the task that is being delivered, or was last.
        tasks: those that the consumer has not come to, oldest first, also if they have come back.
        pool: where the tasks are.
    """

    def __init__(
        self,
        number: int,
        shared: Shared,
        feed: Any,
        start: LanePosition,
        bell: Bell,
        call: Callable[..., Any],
    ) -> None:
        self.number = number
        self.shared = shared
        self.feed = feed
        self.delivered = start.given
        self.ahead = start.ahead
        self.current: Task | None = None
        self.tasks: deque[Task] = deque()
        self._drawn: Task | None = None  # whose items are being drawn, or were just drawn
        # Shards may overtake each other, but the batches of one may not.
        self._may_overtake = feed.may_overtake and not shared.options.in_order
        self._bell = bell
        self._call = call
        self._max_chunk = self._find_max_chunk()
        self._chunk = min(self._first_chunk(), self._max_chunk)  # how many the next task is to have
        self._adopt()

    def _first_chunk(self) -> int:
        """Return how many batches the first tasks are to have.

        They share what one may hold, so that all workers get some.
        """
        most = self.shared.group.max_in_flight
        return max(1, self.shared.chunk // most) if most else 1

    def _find_pool(self) -> Pool:
        """Return the pool that there is now."""
        return self.shared.group.pool()

    def _find_max_chunk(self) -> int:
        if self.shared.job.options.memory_limit is not None:
            return 1  # a worker looks at its memory behind each task
        options = self.shared.options
        if options.concurrency and not options.retries:
            return 1  # what is read beside the batch that kills its worker would be blamed
        may_chunk = options.chunks or self.feed.source.may_be_read_ahead
        return MAX_CHUNK if may_chunk else 1

    def _adopt(self) -> None:
        """Send tasks to the pool that there is now."""
        self.pool = self._find_pool()
        self.pool.forgive_failed_starts()

    @property
    def is_over(self) -> bool:
        """Whether all that there is was delivered."""
        feed = self.feed
        has_more = self._has_tasks or self._is_within_task
        return feed.is_ended and feed.error is None and not has_more

    @property
    def _has_tasks(self) -> bool:
        """Whether there are tasks to come, or the items of one were drawn, and Ctrl-C came."""
        return bool(self.tasks) or self._drawn is not None

    @property
    def _is_within_task(self) -> bool:
        """Whether the current task has more to deliver."""
        current = self.current
        return current is not None and self.next_in(current) < current.stop

    def position(self, held: Sequence[tuple[Task, int]] = ()) -> LanePosition:
        """Return how far batches were delivered.

        Args:
            held: those that were, but not to the consumer: the task of each, and its ordinal.
        """
        feed = self.feed
        ordinals = [ordinal for _, ordinal in held if ordinal >= 0]
        delivered, ahead = take_back(self.delivered, self.ahead, ordinals)
        known = [task for task, _ in held]
        # In the order in which a task goes on, or another thread might see it nowhere.
        drawn = self._drawn
        known += snapshot(self.tasks)
        known += [task for task in (drawn, self.current) if task is not None and task.items]
        # What is held and has no items has the place of an error.
        left = [task for task in known if task.stop > delivered or not task.items]
        head = min(left, key=_first, default=None)
        if head is not None and head.first > delivered:
            head = None  # what is held was ahead, and a lane that was made anew has drawn nothing
        check = feed.check_at(delivered, head) if head is None or head.items else head.check
        is_ended = head is None and self.shared.job.options.is_stream and feed.is_ended
        return LanePosition(
            given=delivered,
            ahead=ahead,
            source_state=feed.known if head is None else head.source_state,
            check=check,
            beginning=feed.beginning,
            is_ended=is_ended,
        )

    # --- down

    def send_more(self) -> bool:
        """Send a task that waits for it, or else draw another. Return whether there was any."""
        if self._find_pool() is not self.pool:
            if any(task.ticket is not None for task in self.tasks):
                return False  # first they come from where they are
            self._adopt()
        task = self._unsent() or self._draw()
        if task is None:
            return False
        is_retried = task.tries > 0 or task.suspects is not None
        message = TaskMessage(
            ordinal=task.first,
            epoch=self.feed.epoch,
            items=task.items,
            shard=self._shard_of(task),
            alone=is_retried or not self.shared.options.retries,
            suspects=task.suspects,
        )
        task.ticket = self.pool.submit(message, self._bell)  # what goes wrong comes in its turn
        if self.pool.is_inline:
            try:
                self._call(self.pool.wait, task.ticket, self._bell)  # which makes the batch
            except BaseException:
                task.forget()  # it is made once more
                raise
        return True

    def _shard_of(self, task: Task) -> Shard | None:
        """Return which shard of a stream a task is for: of a sampler none."""
        return None

    @property
    def next_unsent(self) -> int:
        """Ordinal of the first batch that was not sent."""
        unsent = self._unsent()
        return self.feed.next if unsent is None else unsent.first

    def _unsent(self) -> Task | None:
        """Return the first task that waits for being sent."""
        for task in self.tasks:  # no generator: there may be hundreds
            if task.ticket is None and task.reply is None:
                return task
        return None

    def _draw(self) -> Task | None:
        """Draw a task; return None if there is none: at the end, or at an error."""
        feed = self.feed
        while len(self.ahead) < MAX_AHEAD or not self.tasks:
            begin = time.perf_counter()
            self._call(self._draw_items, feed, begin)
            drawn = self._drawn
            if drawn is None or not drawn.items:
                self._drawn = None
                return None
            self.shared.counters.drew(begin, len(drawn.items))
            first = self.next_in(drawn)
            task = drawn
            if first > drawn.first:  # some were delivered before, or left out
                task = drawn.part(first - drawn.first, len(drawn.items))
            if task.items:
                self.tasks.append(task)
            self._drawn = None
            if task.items:
                return task
        return None

    def _draw_items(self, feed: SamplerFeed, begin: float) -> None:
        """Draw the items of a task. After Ctrl-C, at any instruction, this is called again."""
        task = self._drawn
        if task is not None:
            feed.give_again(task.stop)
        if task is not None and task.items:
            feed.finish(task)
            return
        self._drawn = None
        feed.open_or_fail()
        if feed.is_ended or feed.error is not None:
            return
        state_error = feed.note_state()
        task = Task(first=feed.next, items=[], source_state=feed.known)
        self._drawn = task
        ahead = [ordinal for ordinal in self.ahead if ordinal > task.first]
        limit = min(ahead, default=task.first + MAX_CHUNK) - task.first
        reads = self.shared.options.concurrency if self.shared.group.max_in_flight else 0
        until = begin + CHUNK_SECONDS  # a slow sampler must not hold up those that are there
        most = min(self._chunk, limit)
        while most and not feed.is_ended and feed.error is None:
            feed.draw(task, self.pool.hold, most, until)
            wants_more = bool(reads) and self._max_chunk > 1 and _samples(task) < reads
            wants_more = wants_more and time.perf_counter() < until
            most = 1 if wants_more and len(task.items) < limit else 0
        if state_error is not None and task.items and feed.error is None:
            feed.fail(state_error)
        feed.finish(task)

    # --- up

    def next_in(self, task: Task) -> int:
        """Return the ordinal of the next batch of a task to deliver; its end if there is none."""
        ordinal = max(task.first, self.delivered)
        while ordinal in self.ahead:
            ordinal += 1
        return min(ordinal, task.stop)

    def ordinal_in_epoch(self, ordinal: int) -> int:
        """Return the ordinal of a batch in its epoch, as messages give it."""
        return ordinal

    def is_at_hand(self) -> bool:
        """Return whether the current task has the next batch, and that need only be handed over."""
        task = self.current
        if task is None or self.ahead:
            return False
        n = self.delivered - task.first
        if not 0 <= n < len(task.items):
            return False
        reply = task.reply
        assert reply is not None
        return not reply.failed and type(reply.outcomes[n]) not in NO_BATCH

    def at_hand(self) -> Any:
        """Return the next batch if it is at hand, or else MISSING. Nothing notes that it was."""
        if not self.is_at_hand():
            return MISSING
        task = self.current
        assert task is not None
        assert task.reply is not None
        n = self.delivered - task.first
        outcome = task.unpack(n)
        if type(outcome) in NO_BATCH:
            task.reply.outcomes[n] = outcome
            return MISSING
        return outcome

    @property
    def has_come(self) -> bool:
        """Whether there seems to be something to deliver. It changes nothing."""
        if self._is_within_task:
            return True
        tasks = snapshot(self.tasks)
        return any(
            task.reply is not None or (task.ticket is not None and task.ticket.is_done)
            for task in (tasks if self._may_overtake else tasks[:1])
        )

    def look(self) -> Coming:
        """Return what comes next. If it is a batch, the current task has it."""
        if self._is_within_task or self._next_task():
            return Coming.BATCH
        if self._has_tasks:
            return Coming.LATER
        if self.feed.error is not None:
            return Coming.ERROR
        return Coming.END if self.feed.is_ended else Coming.LATER

    def _next_task(self) -> bool:
        """Have a task be the current one that has something to deliver, if one is here."""
        if self._may_overtake:
            self.receive_all()
            for task in [each for each in self.tasks if each.reply is not None]:
                if self._begin_with(task):
                    return True
            return False
        while self.tasks:
            task = self.tasks[0]
            ticket = task.ticket
            if ticket is not None and ticket.is_done:
                self._receive(task, ticket)  # others may take its place
            elif task.reply is None:
                return False
            elif self._begin_with(task):
                return True
        return False

    def _begin_with(self, task: Task) -> bool:
        """Have a task that has come back be the current one, unless it has nothing to deliver."""
        has_more = self.next_in(task) < task.stop
        if has_more:
            self.current = task  # first: another thread may read a position
        self.tasks.remove(task)
        return has_more

    def receive_all(self) -> None:
        """Look at what has come back."""
        for task in list(self.tasks):
            ticket = task.ticket
            if ticket is not None and ticket.is_done:
                self._receive(task, ticket)

    def _receive(self, task: Task, ticket: Ticket) -> None:
        """Make available what has come back, in its place; or prepare to send it again."""
        reply = ticket.reply
        if reply is None:
            self._replace(task, lost.replacements(self, task, ticket))
            task.ticket = None
            return
        made = len(reply.outcomes)
        if made:
            self._learn(task, reply)
        if made == len(task.items):
            task.settle(reply, ticket.memory)
            return
        starts = range(made, len(task.items), self._chunk)
        pieces = [task.part(n, n + self._chunk) for n in starts]
        if made:
            made_part = task.part(0, made)
            made_part.settle(reply, ticket.memory)
            pieces.insert(0, made_part)
        self._replace(task, pieces)
        task.ticket = None

    def _learn(self, task: Task, reply: Reply) -> None:
        """Learn from a reply how many batches a task should hold; count and log what it says."""
        made = len(reply.outcomes)
        slots = self.pool.slots
        shared = self.shared
        counters = shared.counters
        figures = reply.figures
        most_by_time = CHUNK_SECONDS * made / (figures.timings.seconds or 1e-9)
        most_by_size = CHUNK_BYTES * made / (figures.size or 1)
        # What was cut short was slow. Otherwise it may just have had no processor for a while.
        least = self._chunk // 2 if made == len(task.items) else 1
        shared.chunk = int(min(most_by_time, most_by_size, MAX_CHUNK))
        self._chunk = min(self._chunk, max(1, least, shared.chunk))
        counters.chunk_size = self._chunk
        if figures.overflowed and slots is not None:
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower; "
                "%s; said once",
                slots.advice,
            )
        first = self.ordinal_in_epoch(task.first)
        counters.made(reply, {"batch": first, "count": made, "epoch": self.feed.epoch})
        memory = figures.usage.memory
        if not memory:
            return
        last = self.ordinal_in_epoch(task.first + made - 1)
        counters.note_memory(reply, self.feed.epoch, last, task.item(made - 1))
        limit = shared.job.options.memory_limit
        if limit is not None and memory > limit:
            from minloader._diagnosis.memory_limit import too_large  # of few workers

            where = f"batch {last} of epoch {self.feed.epoch}"
            self.pool.renew(reply.pid, too_large(reply, limit, where))

    def grow(self) -> None:
        """Have tasks hold more batches: the consumer waits, and larger tasks are quicker."""
        if not self.pool.is_inline:
            self._chunk = min(2 * self._chunk, self._max_chunk)

    # --- what was lost

    def _replace(self, task: Task, pieces: list[Task]) -> None:
        """Put tasks in the place of one."""
        parts = [pieces if each is task else [each] for each in self.tasks]
        self.tasks = deque(itertools.chain.from_iterable(parts))

    def drop_behind(self, task: Task) -> None:
        """Forget the tasks behind one."""
        for each in self.tasks:
            if each.first > task.first:
                each.forget()
        self.tasks = deque(each for each in self.tasks if each.first <= task.first)

    # --- what is not wanted

    def forget_delivered(self) -> None:
        """Forget tasks of which there is nothing left to deliver: it was left out."""
        for task in self.tasks:
            if self.next_in(task) >= task.stop:
                task.forget()
        self.tasks = deque(task for task in self.tasks if self.next_in(task) < task.stop)

    def leave(self) -> None:
        """Forget what is under way, and keep what a position follows from."""
        for task in snapshot(self.tasks):
            task.forget()
        if self.current is not None:
            self.current.memory = None


def _first(task: Task) -> int:
    return task.first


def _samples(task: Task) -> int:
    """Return how many samples there are in the items of a task, as far as that can be seen."""
    items = map(task.item, range(len(task.items)))
    return sum(len(item) if isinstance(item, list) else 1 for item in items)
