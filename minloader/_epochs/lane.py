"""A lane: tasks go down to a pool, and replies come back in the order of the tasks.

::

    draw() ---> pending [ given, given, to give | arrived | sent | sent | not sent ]
                            |                      |         |
                            |                      |         `-- lost: again(), in its place
                            |                      `-- cut short: the rest is sent, in its place
                            `--> the consumer

The deque is the account. What was drawn and not handed over is in it, and nowhere else: an item
before anything can interrupt, a batch until it is in the consumer's hands. A state of the run, what
is made again after a death, and what comes after Ctrl-C follow from it. Where tasks change places,
another deque takes the place of this one, in one assignment.

Guarantees:

* Tasks are opened in their order (a sampler's with ``in_order=False`` as they arrive).
* A task that was lost with a worker, and what a task left undone when it was cut short, is sent
  again in its place.
* Nothing here knows the iterator or the loader, so that these end when they are let go of.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import nullcontext
from typing import Any, ClassVar

from minloader._checks import copied, shown
from minloader._epochs import failures
from minloader._epochs.pending import Bell, Pending, replied
from minloader._epochs.settings import CLOSED, Settings
from minloader._epochs.state import Note
from minloader._errors import WorkerDied
from minloader._insight.memory import too_large
from minloader._memory.files import interrupts_held
from minloader._memory.limits import remedy
from minloader._pools.base import Death, Pool
from minloader._worker.messages import Reply, Task
from minloader._worker.run import CHUNK_SECONDS

logger = logging.getLogger("minloader")

CHUNK_MOST = 1024
"""Most batches in a task: an executor's 0.8 ms are 0.8 µs a batch then, less than seeding."""

CHUNK_BYTES = 512 * 1024
"""Most bytes that the batches of a task of several should have: one of them that is kept keeps the
memory of all."""


class Lane(ABC):
    """The tasks of a sampler, or of a shard of a stream, in one pool at a time.

    Args:
        settings: what the loader's epochs have in common.
        where: gives the pool that makes the batches, which may become another one.
        share: of how many lanes the tasks under way are for.

    Attributes:
        pool: where the tasks are.
        pending: the account.
        sources: what is read in the epochs that were begun, the consumer's first. Each has an
            ``epoch``, its number, and an ``index``, its place among those of the iterator.
        may_overtake: whether a batch may come before one that was drawn earlier, as the reader of a
            shard cannot give it.
    """

    may_overtake: ClassVar[bool] = False

    def __init__(self, settings: Settings, where: Callable[[], Pool], bell: Bell, share: int = 1):
        self.settings = settings
        self.where = where
        self._bell = bell
        self.pending: deque[Pending] = deque()
        self.sources: deque[Any] = deque()
        # Items a task. Those sent at first share what one may hold, so that all workers get some.
        depth = -(-settings.depth // share)
        self._chunk = max(1, settings.chunk // depth) if depth else 1
        self.adopt()

    def adopt(self) -> None:
        """Send tasks to the pool that there is now."""
        self.pool = self.where()
        self.pool.failed_starts.clear()  # the machine may have recovered

    @property
    def under_way(self) -> int:
        """How many tasks were sent that the consumer has not come to."""
        # Of hundreds most have a future, and nothing else need be asked of these.
        pending = copied(self.pending)
        return sum([x.future is not None or (x.is_sent and not x.begun) for x in pending])

    @property
    def position(self) -> int:
        """Place of the batch that the consumer gets next, where lanes take turns."""
        return 0

    @property
    @abstractmethod
    def is_drawn(self) -> bool:
        """Whether there are no more items in the epoch that is drawn from."""

    @property
    @abstractmethod
    def drew_nothing(self) -> bool:
        """Whether the epoch that is drawn from has given no item so far."""

    @abstractmethod
    def begin_after(self, index: int, epoch: int, run: int) -> None:
        """Begin with another epoch, after the one that is drawn from.

        Args:
            index: its place among those of the iterator.
            epoch: its number.
            run: number of the pass over the dataset.
        """

    @abstractmethod
    def note(self) -> Note:
        """Note what of the consumer's epoch was handed over."""

    @abstractmethod
    def _draw(self) -> None:
        """Add a task to the account, and draw its items."""

    @abstractmethod
    def _address(self, pending: Pending) -> Task:
        """Return what is sent for a task."""

    def ordinal(self, ordinal: int) -> int:
        """Return what the user is told for the place of a batch in this lane."""
        return ordinal

    def item(self, pending: Pending, n: int) -> Any:
        """Return what the user is told that a batch was made from."""
        return pending.item(n)

    # --- down

    def send_more(self) -> bool:
        """Send a task that waits for it, or else draw another. Return whether there was any."""
        if self.where() is not self.pool:
            if any(each.is_sent and each.outcomes is None for each in self.pending):
                return False  # first they come from where they are
            self.adopt()
        unsent = self._unsent
        if unsent is None:
            if self.is_drawn:
                return False
            self._draw()
            unsent = self._unsent
        if unsent is not None:
            self._send(unsent if unsent.task is None else self._renewed(unsent))
        return True

    def _renewed(self, pending: Pending) -> Pending:
        """Return a task in place of one of which an interrupt hides whether it is under way."""
        new = pending.part(0, len(pending.items))
        self._replace(pending, [new])
        pending.forget()
        return new

    @property
    def _unsent(self) -> Pending | None:
        """The first task that waits for being sent."""
        unsent = (each for each in self.pending if each.future is None and not each.is_sent)
        return next((each for each in unsent if not each.ends), None)

    def _send(self, pending: Pending) -> None:
        """Send a task off. What goes wrong with that is its reply, and comes in its turn."""
        pool = self.pool
        pending.bell, pending.slots, pending.slot = self._bell, pool.slots, None
        task = pending.task = self._address(pending)._replace(id=next(pool.task_ids))
        packed = None
        try:
            packed = pool.pack(task)
            if pool.slots is not None:
                pending.slot = pool.slots.lend()
                packed = packed._replace(slot=pool.slots.address(pending.slot))
            # Within one of Python's own locks Ctrl-C would leave it taken, for ever.
            with interrupts_held() if pool.num_workers else nullcontext():
                future = pool.submit(packed)
                future.add_done_callback(pending.arrived)
                pending.future = future
        except BrokenExecutor as error:
            pending.discard_slot()
            pending.lost = error.with_traceback(None)
        except Exception as error:
            pending.discard_slot()
            pieces = [pending.part(n, n + 1) for n in range(len(pending.items))]
            if len(pieces) == 1:
                # An item that cannot be pickled is one batch lost; no workers to be had, all.
                stage, fatal = "when it was sent to a worker", packed is not None
                stage += remedy(error) if fatal else ""
                pending.reply = replied(error, stage=stage, fatal=fatal)
            else:
                self._replace(pending, pieces)  # one by one, then

    # --- up

    def look(self) -> Pending | None:
        """Return a task of the consumer's epoch that has something to hand over, if one is here.

        It is the first one, or with ``in_order=False`` any.

        Raises:
            RuntimeError: the loader is closed.
        """
        self.open_arrived()
        while self.pending and self._is_past(self.pending[0]):
            self.pending.popleft()
        here: Iterator[Pending] = itertools.takewhile(lambda each: not each.ends, self.pending)
        if self.settings.in_order or not self.may_overtake:
            here = itertools.islice(here, 1)
        return next((each for each in here if each.is_open), None)

    @property
    def head(self) -> Pending | None:
        """The first task that was not handed over, or the end of the consumer's epoch."""
        return next((each for each in self.pending if not self._is_past(each)), None)

    def _is_past(self, pending: Pending) -> bool:
        return pending.is_over or (pending.ends and pending.source is not self.sources[0])

    @property
    def is_over(self) -> bool:
        """Whether the consumer was given all of its epoch here."""
        head = self.head
        return head is not None and head.ends

    def open_arrived(self) -> None:
        """Make what has arrived available, in the order of the tasks, and recover what was lost."""
        while (arrived := self._arrived) is not None:
            if arrived.lost is None:
                self._open(arrived)
            else:
                self._recover(arrived)

    @property
    def _arrived(self) -> Pending | None:
        """The first task that is back, or lost; where none may overtake, only the first of all."""
        may_overtake = self.may_overtake
        for each in self.pending:  # of which there may be hundreds
            if each.outcomes is None:
                if each.reply is not None or each.lost is not None:
                    return each
                if not (may_overtake or each.ends):
                    break
        return None

    def begin_next(self) -> None:
        """Let the consumer go on to the next epoch, which has begun here."""
        self.sources.popleft()
        self.pool.failed_starts.clear()

    def drop_ahead(self) -> None:
        """Forget epochs that were begun ahead of the consumer."""
        former, here = self.pending, self.sources[0]
        self.pending = deque(each for each in former if each.source is here)
        self.sources = deque([here])
        for each in former:
            if each.source is not here:
                each.forget()

    def put_back(self, pending: Pending, n: int, outcome: Any) -> None:
        """Have an outcome handed over once more, which did not reach the consumer."""
        reply = (pending.reply or replied())._replace(packed=False)  # it was unpacked
        piece = pending.part(n, n + 1, outcomes=[outcome], reply=reply, begun=True)
        self.pending.appendleft(piece)

    def _open(self, pending: Pending) -> None:
        """Make the outcomes of a reply available; what it left undone is sent again."""
        reply = pending.reply
        assert reply is not None
        pending.future = None  # it leads here, and would keep the memory
        made = len(reply.outcomes)
        if made:  # else the worker has no job yet
            self._learn(pending, reply)
        if made == len(pending.items):
            pending.outcomes = reply.outcomes
            return
        kept = {name: getattr(pending, name) for name in ("failed", "task", "reply", "memory")}
        pieces = [pending.part(0, made, outcomes=reply.outcomes, **kept)] if made else []
        rest = range(made, len(pending.items), self._chunk)
        self._replace(pending, pieces + [pending.part(n, n + self._chunk) for n in rest])

    def _learn(self, pending: Pending, reply: Reply) -> None:
        """Learn from a reply how many batches the next task should hold, and how it goes."""
        made, slots = len(reply.outcomes), self.pool.slots
        counters, settings = self.settings.counters, self.settings
        quick = CHUNK_SECONDS * made / (reply.seconds or 1e-9)
        small = CHUNK_BYTES * made / (reply.size or 1)
        # What was cut short was slow. Otherwise it may just have had no processor for a while.
        least = self._chunk // 2 if made == len(pending.items) else 1
        fits = settings.chunk = int(min(quick, small, CHUNK_MOST))
        self._chunk = min(self._chunk, max(1, least, fits))
        counters.chunk_size = self._chunk
        if reply.pid >= 0:
            self.pool.failed_starts.clear()
            ordinal = self.ordinal(pending.ordinal)
            place = {"batch": ordinal, "count": made, "epoch": pending.source.epoch}
            item = self.item(pending, made - 1) if made else None
            counters.made(track(reply.worker, reply.pid), reply, place, item)
        if reply.overflowed and not counters.overflowed and slots is not None:
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower; "
                "%s; said once",
                slots.advice,
            )
        counters.overflowed += reply.overflowed
        for n, *failed in reply.failed:
            pending.failed.setdefault(n, []).append(failed)
        limit = settings.memory_limit
        if limit is not None and reply.memory > limit:
            last = self.ordinal(pending.ordinal) + made - 1
            where = f"batch {last} of epoch {pending.source.epoch}"
            self.pool.renew(reply.pid, too_large(reply, limit, where))

    def grow(self) -> None:
        """Let the consumer, which is faster than the workers, wait for larger pieces."""
        if self.pool.num_workers:
            self._chunk = min(2 * self._chunk, CHUNK_MOST)

    # --- what was lost

    def _recover(self, lost: Pending) -> None:
        """Put what is to be sent again in the place of a task that was lost."""
        if self.settings.closed:
            raise RuntimeError(CLOSED)
        self.pool.end_broken()  # finds out how its workers ended
        assert lost.task is not None
        self._redo(lost, self.pool.deaths.pop(lost.task.id, None))

    def _replace(self, pending: Pending, pieces: list[Pending]) -> None:
        """Put tasks in the place of one."""
        parts = [pieces if each is pending else [each] for each in self.pending]
        self.pending = deque(itertools.chain.from_iterable(parts))

    def _redo(self, lost: Pending, death: Death | None) -> None:
        """Put what is to be sent again in the place of a lost task."""
        self._replace(lost, self._again(lost, death))

    def _again(self, lost: Pending, death: Death | None) -> list[Pending]:
        """Return what to do in place of a lost task. What its own worker was making is a try."""
        pool, counters, error = self.pool, self.settings.counters, lost.lost
        assert error is not None
        if death is not None and self.settings.reads and death.stack is None:
            death = death._replace(place=-1)  # any of those that were read may be to blame
        place = {
            "batch": self.ordinal(lost.ordinal),
            "epoch": lost.source.epoch,
            "count": len(lost.items),
        }
        counters.record("consumer", "again", time.perf_counter(), 0.0, place)
        if death is not None:
            n = death.item
            victim = lost.part(n, n + 1, tries=lost.tries + 1)
            known = self.ordinal(lost.ordinal + n), lost.source.epoch, self.item(lost, n)
            self._tell_death(death, *known)
            if death.final or victim.tries > self.settings.retries:
                sample = failures.sample_at(known[2], death.place)
                failure = replied(failures.lethal(death, *known, victim.tries), sample=sample)
                victim.reply = failure._replace(worker=death.worker, pid=death.pid)
            counters.retries += victim.reply is None
            pieces = [lost.part(0, n), victim, lost.part(n + 1, len(lost.items))]
            return [each for each in pieces if each.items]
        if isinstance(error, BrokenExecutor | CancelledError):
            if pool.replaces:
                return [lost.part(0, len(lost.items))]  # another's worker died
            text = f"a worker of the executor died, which is broken since: {error}"
            dead = [WorkerDied(text) for _ in lost.items]
            return [lost.part(0, len(lost.items), reply=replied(*dead, fatal=True))]
        # An error of the user's executor, or no room here. Which batch is at fault shows one by
        # one: so each has been tried.
        who = "this process" if pool.replaces else "the executor"
        if len(lost.items) > 1 or lost.tries < self.settings.retries:
            logger.warning("%s lost batch %d, again: %s", who, place["batch"], error)
            counters.retries += 1
            return [lost.part(n, n + 1, tries=lost.tries + 1) for n in range(len(lost.items))]
        return [lost.part(0, 1, reply=self._reply_lost(lost, error))]

    def _tell_death(self, death: Death, ordinal: int, epoch: int, item: Any) -> None:
        """Say in the timeline, and in the log, which batch a worker has died with."""
        place = {"batch": ordinal, "epoch": epoch, "cause": death.cause}
        where = track(death.worker, death.pid)
        self.settings.counters.record(where, "died", time.perf_counter(), 0.0, place)
        if not death.final:
            failures.tell_death(death, ordinal, epoch, item)

    def _reply_lost(self, lost: Pending, error: BaseException) -> Reply:
        """Return what stands for the reply to a batch that came to nothing on its way."""
        if self.pool.is_death(error):
            what = f"batch {lost.ordinal} of epoch {lost.source.epoch}, item {shown(lost.item(0))}"
            died = WorkerDied(f"the workers of the executor died that made {what}: {error}")
            return replied(died)
        assert isinstance(error, Exception)
        stage = "when it came from a worker" if self.pool.replaces else "in the executor"
        return replied(error, stage=stage, fatal=True)

    # --- the end

    def leave(self) -> None:
        """Forget what is under way, and keep what a state follows from."""
        self.pending = deque(each.forget() for each in self.pending)


def track(worker: int, pid: int) -> str:
    """Return a worker's name in the timeline; those of an executor of the user's have no number."""
    if worker >= 0:
        return f"worker {worker}"
    return f"process {pid}" if worker == -1 else f"process {pid}, thread {-worker}"
