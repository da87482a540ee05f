"""A lane: tasks go down to a pool, and their batches come back in the order of the tasks.

::

    draw() ---> tasks [ given, given, to give | received | sent | sent | not sent ]
                            |                     |         |
                            |                     |         `-- lost: in pieces, in its place
                            |                     `-- cut short: the rest is sent, in its place
                            `--> the consumer

A sampler has one lane, a stream one for each shard. How many batches were handed over is the truth.
The tasks are a cache, and in the order of their ordinals. Where tasks change places, another deque
takes the place of this one, in one assignment.

Nothing here knows the iterator or the loader, so that these end when they are let go of.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext

from minloader._checks import snapshot
from minloader._epochs import lost
from minloader._epochs.feed import Feed
from minloader._epochs.options import Shared
from minloader._epochs.position import LanePosition, Range
from minloader._epochs.shard_feed import ShardFeed
from minloader._epochs.task import Arrivals, Shipment, Task
from minloader._insight.workers import too_large
from minloader._memory.files import interrupts_held
from minloader._memory.limits import remedy
from minloader._memory.pickling import pack
from minloader._pools.base import Pool
from minloader._worker.messages import Reply, TaskMessage, ordinal_in_epoch
from minloader._worker.run import CHUNK_SECONDS

logger = logging.getLogger("minloader")

MAX_CHUNK = 1024
"""Most batches in a task: an executor's 0.8 ms are 0.8 µs a batch then, less than seeding."""

MAX_SHARD_CHUNK = 64
"""Most batches in a task of a shard, which is not cut short where they turn out to be slow."""

CHUNK_BYTES = 512 * 1024
"""Most bytes that the batches of a task of several should have: one of them that is kept keeps the
memory of all."""


class Lane:
    """The tasks of a sampler, or of a shard of a stream.

    Args:
        shared: what all epochs of the loader share.
        feed: what tasks are made of, from the ordinal on where the epoch begins.
        ahead: what was handed over before its turn.
        arrivals: where tasks are put that have come back.

    Attributes:
        taken: how many batches the iterator has taken, without a gap: each was handed over, or is
            on its way to the consumer.
        ahead: those after these that it has taken before their turn.
        tasks: what is not handed over, as far as it was drawn.
        pool: where the tasks are.
    """

    def __init__(
        self,
        shared: Shared,
        feed: Feed | ShardFeed,
        *,
        ahead: tuple[Range, ...],
        arrivals: Arrivals,
    ) -> None:
        self.shared = shared
        self.feed = feed
        self.taken = feed.next_ordinal
        self.ahead = ahead
        self.tasks: deque[Task] = deque()
        self._arrivals = arrivals
        self._max_chunk = self._find_max_chunk()
        self._chunk = 1  # how many batches the next task is to have
        max_in_flight = -(-shared.group.max_in_flight // feed.total)
        if max_in_flight:
            # The first tasks share what one may hold, so that all workers get some.
            self._chunk = min(max(1, shared.chunk // max_in_flight), self._max_chunk)
        self._adopt()

    def _find_max_chunk(self) -> int:
        if isinstance(self.feed, ShardFeed):
            return MAX_SHARD_CHUNK
        options = self.shared.options
        if options.concurrency and not options.retries:
            return 1  # what is read beside the batch that kills its worker would be blamed
        may_chunk = options.chunks or self.feed.source.may_be_read_ahead
        return MAX_CHUNK if may_chunk else 1

    def _newest_pool(self) -> Pool:
        """Return the pool that makes the batches now."""
        return self.shared.group.pool(self.feed.shard)

    def _adopt(self) -> None:
        """Send tasks to the pool that there is now."""
        self.pool = self._newest_pool()
        self.pool.forgive_failed_starts()

    @property
    def in_flight(self) -> int:
        """How many tasks were drawn that the consumer has not come to, also those received."""
        return sum([not task.is_begun for task in snapshot(self.tasks)])

    @property
    def is_taken(self) -> bool:
        """Whether the iterator has taken all that there is."""
        feed = self.feed
        return feed.is_ended and feed.error is None and self.head is None

    @property
    def is_at_error(self) -> bool:
        """Whether an error of the sampler comes next."""
        return self.feed.error is not None and self.head is None

    def position(self, on_the_way: tuple[int, ...] = ()) -> LanePosition:
        """Return how far batches were handed over.

        Args:
            on_the_way: ordinals of those that were taken, and have not reached the consumer.
        """
        feed = self.feed
        handed_over = LanePosition(given=self.taken, ahead=self.ahead).without(on_the_way)
        given = handed_over.given
        head = next((task for task in self.tasks if task.stop > given), None)
        source_state = feed.source_state if head is None else head.source_state
        check = feed.check_at(given, head)
        is_ended = head is None and isinstance(feed, ShardFeed) and feed.is_ended
        return LanePosition(
            given=given,
            ahead=handed_over.ahead,
            source_state=source_state,
            check=check,
            beginning=feed.beginning,
            is_ended=is_ended,
            has_failed=feed.has_failed,
        )

    # --- down

    def send_more(self) -> bool:
        """Send a task that waits for it, or else draw another. Return whether there was any."""
        if self._newest_pool() is not self.pool:
            if any(task.shipment is not None for task in self.tasks):
                return False  # first they come from where they are
            self._adopt()
        unsent = self._unsent
        if unsent is None:
            unsent = self._draw()
        if unsent is None:
            return False
        self._send(unsent)
        return True

    @property
    def next_unsent(self) -> int:
        """Ordinal of the first batch that was not sent."""
        unsent = self._unsent
        return self.feed.next_ordinal if unsent is None else unsent.first

    @property
    def _unsent(self) -> Task | None:
        """The first task that waits for being sent."""
        for task in self.tasks:  # no generator: there may be hundreds
            if task.is_unsent and not self._is_taken(task):
                return task
        return None

    def _draw(self) -> Task | None:
        """Draw a task; return None if there is none: at the end, or at an error."""
        feed = self.feed
        if feed.is_ended or feed.error is not None:
            return None
        if isinstance(feed, ShardFeed):
            shard_task = feed.draw(self._chunk)
            self.tasks.append(shard_task)
            feed.next_ordinal = shard_task.stop
            return shard_task
        begin = time.perf_counter()
        task = self._draw_items(feed, begin)
        self.shared.counters.drew(begin, 0 if task is None else len(task.items))
        return task

    def _draw_items(self, feed: Feed, begin: float) -> Task | None:
        feed.open_or_fail()
        if not feed.is_ended:
            self._pass_early(feed)
        if feed.is_ended or feed.error is not None:
            return None
        state_error = feed.note_state()
        task = feed.begin_task()
        self.tasks.append(task)
        limit = self._most_at_once(feed.next_ordinal)
        reads = self.shared.options.concurrency if self.shared.group.max_in_flight else 0
        until = begin + CHUNK_SECONDS  # a slow sampler must not hold up those that are there
        most = min(self._chunk, limit)
        while most and not feed.is_ended and feed.error is None:
            feed.draw(task, self.pool.hold, most, until)
            wants_more = bool(reads) and self._max_chunk > 1 and _samples(task) < reads
            wants_more = wants_more and time.perf_counter() < until
            most = 1 if wants_more and len(task.items) < limit else 0
        feed.finish(task)
        if not task.items:
            self.tasks.pop()
            return None
        if state_error is not None and feed.error is None:
            feed.fail(state_error)
        return task

    def _pass_early(self, feed: Feed) -> None:
        """Draw what was handed over before its turn, and drop it."""
        for start, stop in [(0, self.taken), *self.ahead]:
            if start <= feed.next_ordinal < stop and feed.error is None:
                task = feed.begin_task()
                feed.draw(task, lambda item: item, stop - task.first, math.inf)
                feed.finish(task)

    def _most_at_once(self, first: int) -> int:
        """Return how many items there are from an ordinal up to one that came before its turn."""
        return next((start - first for start, _ in self.ahead if start > first), MAX_CHUNK)

    def _send(self, task: Task) -> None:
        """Send a task off. What goes wrong with that is its reply, and comes in its turn."""
        pool = self.pool
        shipment = Shipment(task, self._arrivals, pool.slots)
        task.shipment = shipment
        shipment.id = next(pool.task_ids)
        is_packed = False
        try:
            address = None
            if pool.slots is not None:
                shipment.slot = pool.slots.lend()
                address = pool.slots.address(shipment.slot)
            is_retried = task.tries > 0 or task.suspects is not None
            alone = is_retried or not self.shared.options.retries
            message = TaskMessage(
                ordinal=task.first,
                epoch=self.feed.epoch,
                items=task.items,
                slot=address,
                id=shipment.id,
                shard=self.feed.shard_of(task),
                alone=alone,
                # A copy each time: what is raised has frames, which would stay with the task.
                suspects=None if task.suspects is None else pack(task.suspects, down=True),
            )
            packed = pool.pack(message)
            is_packed = True
            # Within one of Python's own locks Ctrl-C would leave it taken, for ever.
            with interrupts_held() if pool.num_workers else nullcontext():
                future = pool.submit(packed)
                future.add_done_callback(shipment.arrived)
                shipment.future = future
        except BrokenExecutor as error:
            shipment.lose(error.with_traceback(None))
        except Exception as error:
            task.forget()
            pieces = [task.part(n, n + 1) for n in range(len(task.items))]
            if len(pieces) == 1 or isinstance(self.feed, ShardFeed):
                # An item that cannot be pickled is one batch lost; no workers to be had, all.
                when = "when it was sent to a worker"
                when += remedy(error) if is_packed else ""
                errors = [error] * len(task.items)
                task.failed(errors, when=when, fatal=is_packed)
            else:
                self._replace(task, pieces)  # one by one, then

    # --- up

    def next_in(self, task: Task) -> int:
        """Return the ordinal of the next batch of a task to hand over; its end if there is none."""
        first = task.first
        if first <= self.taken:
            return self.taken  # also if that is behind its end
        for start, stop in self.ahead:
            if start <= first < stop:
                return stop
        return first

    def _is_taken(self, task: Task) -> bool:
        return self.next_in(task) >= task.stop

    def taken_after(self, ordinal: int) -> tuple[int, tuple[Range, ...]]:
        """Return what ``taken`` and ``ahead`` are once another batch was taken."""
        if ordinal == self.taken and not self.ahead:
            return ordinal + 1, ()
        ranges = sorted([*self.ahead, (ordinal, ordinal + 1)])
        joined: list[Range] = []
        for start, stop in [(0, self.taken), *ranges]:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return joined[0][1], tuple(joined[1:])

    def ordinal_in_epoch(self, ordinal: int) -> int:
        """Return the ordinal of a batch in its epoch, as messages give it."""
        return ordinal_in_epoch(ordinal, shard=self.feed.shard, total=self.feed.total)

    def next_received(self) -> Task | None:
        """Return a task that has something to hand over, if one is here.

        It is the first one, or with ``in_order=False`` any, unless the feed is one of a shard:
        shards may overtake each other, the batches of one may not.
        """
        if self.shared.options.in_order or not self.feed.may_overtake:
            task = self.head
            return None if task is None or task.reply is None else task
        received = (task for task in self.tasks if task.reply is not None)
        return next((task for task in received if not self._is_taken(task)), None)

    @property
    def head(self) -> Task | None:
        """The first task that has something to hand over, made or not."""
        for task in self.tasks:  # no generator: it is asked for several times a batch
            if not self._is_taken(task):
                return task
        return None

    def drop_given(self, on_the_way: set[Task]) -> None:
        """Forget tasks of which all was handed over."""
        tasks = self.tasks
        while tasks and self._is_taken(tasks[0]) and tasks[0] not in on_the_way:
            tasks.popleft()
        if self.ahead:
            given = {task for task in tasks if self._is_taken(task)} - on_the_way
            if given:
                self.tasks = deque(task for task in tasks if task not in given)

    def receive(self, shipment: Shipment) -> None:
        """Make available what has come back, in its place; or prepare to send it again."""
        task = shipment.task
        if shipment.is_unwanted:
            return
        shipment.future = None  # it leads here, and would keep the memory
        if shipment.reply is None:
            self._replace(task, lost.replacements(self, task, shipment))
            task.shipment = None
            return
        reply = shipment.reply
        made = len(reply.outcomes)
        if made:
            self._learn(task, reply)
        if isinstance(self.feed, ShardFeed):
            self.feed.receive(task, reply, self)
            return
        if made == len(task.items):
            task.settle(reply, shipment.memory)
            return
        pieces = []
        if made:
            made_part = task.part(0, made)
            made_part.settle(reply, shipment.memory)
            pieces.append(made_part)
        for n in range(made, len(task.items), self._chunk):
            pieces.append(task.part(n, n + self._chunk))
        self._replace(task, pieces)
        task.shipment = None

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
        counters.workers.chunk_size = self._chunk
        self.pool.forgive_failed_starts()
        if figures.overflowed and slots is not None:
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower; "
                "%s; said once",
                slots.advice,
            )
        ordinal = self.ordinal_in_epoch(task.first)
        labels = {"batch": ordinal, "count": made, "epoch": self.feed.epoch}
        counters.made(reply, labels, task.item(made - 1))
        limit = shared.job.options.memory_limit
        if limit is not None and figures.usage.memory > limit:
            last = self.ordinal_in_epoch(task.first + made - 1)
            where = f"batch {last} of epoch {self.feed.epoch}"
            self.pool.renew(reply.pid, too_large(reply, limit, where))

    def grow(self) -> None:
        """Have tasks hold more batches: the consumer waits, and larger tasks are quicker."""
        if self.pool.num_workers:
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

    # --- what was left undone

    def recover(self) -> None:
        """Make sure again, after an interrupt: what may have been sent is sent, and so on."""
        if isinstance(self.feed, Feed):
            self.tasks = deque(self.feed.recover(list(self.tasks), self.pool.hold))
        elif self.tasks:
            self.feed.next_ordinal = max(self.feed.next_ordinal, self.tasks[-1].stop)
        for task in self.tasks:
            shipment = task.shipment
            if shipment is None:
                continue
            if shipment.is_done:
                self._arrivals.put(shipment)  # it may have been taken from there
            elif shipment.future is None:
                task.forget()

    def skip(self, n: int) -> None:
        """Leave out the next items, up to the end, or to an error.

        What is under way need not be made. What the sampler raises comes with the next batch: some
        raise it for ever.
        """
        while n:
            head = self.head
            if head is None:
                if self._draw() is None:
                    break
                continue
            count = min(n, head.stop - self.taken)
            n -= count
            start = self.taken + count - head.first
            after = LanePosition(given=self.taken, ahead=self.ahead).skipped(count, None)
            # First, and without a call in between: Ctrl-C behind it leaves work that need not be.
            self.ahead = after.ahead
            self.taken = after.given
            if head.reply is None:
                rest = [head.part(start, len(head.items))] if start < len(head.items) else []
                self._replace(head, rest)
                head.forget()

    def leave(self) -> None:
        """Forget what is under way, and keep what a position follows from."""
        for task in snapshot(self.tasks):
            task.forget()


def _samples(task: Task) -> int:
    """Return how many samples there are in the items of a task, as far as that can be seen."""
    items = map(task.item, range(len(task.items)))
    return sum(len(item) if isinstance(item, list) else 1 for item in items)
