"""The thin iterator: tasks go down, replies come back, batches are handed to the consumer.

::

                      .--- sent again: its worker died, or its chunk was cut short ---.
                      v                                                               |
    ledger --draw--> pending [ task, future ][ task, future ] --done--> opened reply -'
                      |                                                    |
                      `--> pool.submit(task)                 batch, error or SKIP --> consumer

States of a task, all moved by :class:`Epoch` in the consumer's thread:

* *unsent*: what a task left undone when it was cut short. It waits for its turn to be submitted.
* *pending*: submitted. Its future is done by the pool, in a thread of the pool.
* *lost*: its future has the error of a pool whose workers died. It is submitted again, in its
  place.
* *opened*: its reply is here, and its batches are handed over one after another.

Guarantees:

* Batches come in the order of the sampler, or with ``in_order=False`` as they get ready; those of
  an epoch come before any of the next one.
* At most ``prefetch_factor x num_workers`` tasks are under way, across the end of an epoch too.
* What the sampler or a batch raises is raised in its place, and the next ``next()`` goes on.
* Ctrl-C while the consumer waits loses nothing: a task leaves the deque when it is done.
* Several threads may take batches: each batch goes to one of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from minloader._checks import shown
from minloader._epochs import failures
from minloader._epochs.iterator import CLOSED, TimedIterator
from minloader._epochs.state import Ledger
from minloader._errors import SKIP, WorkerDied
from minloader._memory import pickling
from minloader._memory.limits import remedy
from minloader._memory.slots import Slot, Slots
from minloader._pools.base import HeldItem, Pool
from minloader._worker.messages import Failure, Reply, Task
from minloader._worker.run import CHUNK_SECONDS

logger = logging.getLogger("minloader")

CHUNK_MOST = 1024
"""Most batches in a task: an executor's 0.8 ms are 0.8 µs a batch then, less than seeding."""

CHUNK_BYTES = 512 * 1024
"""Most bytes that the batches of a task of several should have: one of them that is kept keeps the
memory of all."""


class Pending(NamedTuple):
    """A task under way, as the sampler gave it; one without items is the sampler's own error."""

    task: Task
    future: Future[Reply] | None = None  # None: it is not sent yet
    slot: Slot | None = None
    alone: bool = False  # to be under way by itself: it, or what was there with it, breaks things

    @property
    def is_lost(self) -> bool:
        """Whether it ended without a reply: its executor broke."""
        return bool(self.task.items) and self.future is not None and _is_lost(self.future)


class _Opened(NamedTuple):
    """A reply whose batches are being delivered, and the memory that they may lie in."""

    task: Task
    reply: Reply
    memory: Any


@dataclass(eq=False, repr=False)
class Epoch(TimedIterator):
    """Iterator over the batches of one epoch, or of several without a gap.

    It goes on after an error.
    """

    def __post_init__(self) -> None:
        self._ledgers = self.progress.ledgers  # the consumer's, those begun ahead of it
        self._in_order = self.settings.in_order
        # Items a task. Those sent at first share what one may hold, so that all workers get some.
        depth = self.settings.depth
        self._chunk = max(1, self.settings.chunk // depth) if depth else 1
        self._pending: deque[Pending] = deque()
        self._unsent = False  # whether there may be tasks among them that are not sent yet
        self._opened: _Opened | None = None
        self._next = 0  # of its outcomes
        self._tries: dict[tuple[int, int], int] = {}  # by epoch and ordinal: workers that died
        self._look = 0.0  # when to look after the workers next
        self._adopt(self.where())

    def _adopt(self, pool: Pool) -> None:
        self._pool = pool
        self._losses = pool.end_broken()
        pool.failed_starts.clear()  # the machine may have recovered

    @property
    def pools(self) -> list[Pool]:
        """Where batches are made now."""
        return [self._pool]

    @property
    def in_flight(self) -> int:
        """Tasks under way."""
        return len(self._pending)

    @property
    def _depth(self) -> int:
        """Most tasks that may be under way now."""
        return self.settings.depth

    # --- epochs

    def begin(self) -> None:
        ledger = next(self.coming)
        ledger.open()
        self._ledgers.append(ledger)
        self.fill()

    def _begin_ahead(self) -> bool:
        """Begin the next epoch while the consumer is still in another; False if there is none."""
        last = self._ledgers[-1]
        if self.endless and not last.position and not last.fruitful:
            return False  # there could be endlessly many without an item: the consumer goes first
        ledger = next(self.coming, None)
        if ledger is None:
            return False
        self._ledgers.append(ledger)
        return True

    def _next_epoch(self) -> None:
        self._check_end()
        if len(self._ledgers) == 1 and not self._begin_ahead():
            self._ledgers[0].over = True
            raise StopIteration
        self._ledgers.popleft().over = True
        self.owner.epoch = self.epoch + 1
        self._pool.failed_starts.clear()

    @property
    def _is_drawn(self) -> bool:
        """Whether there are no more items in the epoch that is drawn from."""
        return self._ledgers[-1].ended

    def _take(self) -> Any:
        counters = self.settings.counters
        while True:
            if self.settings.closed:
                raise RuntimeError(CLOSED)
            if self._opened is None:
                begin = time.perf_counter()
                try:
                    self._fill(max(self._depth, 1))
                    if not self._pending or self._pending[0].task.epoch != self.epoch:
                        raise StopIteration
                    self._open(self._wait())
                    self.fill()  # before the consumer gets to work
                finally:
                    counters.opened(begin)
            if self._opened is not None:
                batch = self._result(self._opened)
                if batch is not SKIP:
                    counters.batches += 1
                    self._ledgers[0].fruitful = True
                    return batch
                counters.skipped += 1

    def __del__(self) -> None:
        if hasattr(self, "_pool"):  # else it was not made
            for ledger in self._ledgers:
                ledger.close()
            self._abandon(self._pending)

    def _abandon(self, tasks: deque[Pending]) -> None:
        """Forget tasks: what is queued need not run; what runs, runs to its end, unseen."""
        for pending in tasks:
            if pending.future is None:
                continue
            pending.future.cancel()
            if pending.slot is not None and self._pool.slots is not None:
                take_back = partial(_take_back, self._pool.slots, pending.slot)
                pending.future.add_done_callback(take_back)

    # --- down

    def fill(self) -> None:
        """Have as many tasks under way as may be."""
        self._fill(self._depth)

    def _fill(self, depth: int) -> None:
        """Draw items and submit them until ``depth`` tasks are under way."""
        if self._pending and self._pending[0].alone:
            depth = 1
        if self._unsent:
            self._send_rest(depth)
        if self.where() is not self._pool:
            if self._pending:
                return  # first they come from where they are
            self._adopt(self.where())
        while not self._unsent and len(self._pending) < depth:
            if not self._is_drawn:
                self._draw_task()
            elif not self._begin_ahead():
                break

    def _draw_task(self) -> None:
        """Draw the items of a task from the sampler, and submit it."""
        begin = time.perf_counter()
        ledger = self._ledgers[-1]
        items, error = self._draw(ledger, deadline=begin + CHUNK_SECONDS)
        self.settings.counters.drew(begin, len(items))
        if items:
            task = Task(ledger.position - len(items), ledger.epoch, items)
            self._pending.append(self._submit(task))
        if error is not None:
            # In its turn: the batches before it come first.
            failed: Future[Reply] = Future()
            failed.set_exception(error)
            self._pending.append(Pending(Task(ledger.position, ledger.epoch, []), failed))

    def _draw(self, ledger: Ledger, deadline: float) -> tuple[list[Any], Exception | None]:
        """Return items for a task, and the sampler's error if that is what it gave next.

        After the deadline no more are drawn: a slow sampler must not hold up those that are there.
        """
        items: list[Any] = []
        try:
            ledger.open()
            ledger.begin_task()
            while not items or (
                len(items) < self._chunk and time.perf_counter() < deadline and ledger.is_adjoining
            ):
                items.append(self._pool.hold(ledger.draw()))
        except StopIteration:
            return items, None
        except Exception as error:
            return items, error
        return items, None

    def _send_rest(self, depth: int) -> None:
        """Submit what a task left undone: the first in any case, the consumer waits for it."""
        under_way = sum(pending.future is not None for pending in self._pending)
        self._unsent = False
        for index, pending in enumerate(self._pending):
            if pending.future is None and (index == 0 or under_way < depth):
                if pending.alone:
                    wait_for([each.future for each in self._pending if each.future is not None])
                sent = self._submit(pending.task)
                self._pending[index] = sent._replace(alone=pending.alone)
                under_way += 1
            self._unsent |= self._pending[index].future is None

    def _address(self, task: Task) -> Task:
        """Complete a task just before it is sent."""
        return task._replace(id=next(self._pool.task_ids))

    def _submit(self, task: Task) -> Pending:
        """Send a task off. What goes wrong with that is found in the future, in its turn."""
        slots = self._pool.slots
        slot = None
        failed: Future[Reply] = Future()
        packed = None
        task = self._address(task)
        try:
            packed = self._pool.pack(task)
            if slots is not None:
                slot = slots.lend()
                packed = packed._replace(slot=slots.address(slot))
            return Pending(task, self._pool.submit(packed), slot)
        except BrokenExecutor as error:
            failed.set_exception(error)
        except Exception as error:
            if len(task.items) > 1:
                failed.set_result(_replied())  # one by one, then
            else:
                # An item that cannot be pickled is one batch lost; no workers to be had, all.
                stage, fatal = "when it was sent to a worker", packed is not None
                stage += remedy(error) if fatal else ""
                failed.set_result(_replied(error, stage=stage, fatal=fatal))
        if slots is not None and slot is not None:
            slots.discard(slot)
        return Pending(task, failed)

    # --- up

    def _wait(self) -> Pending:
        """Take the next finished task out, only then: Ctrl-C while waiting loses nothing."""
        waited = False
        while True:
            self._recover()
            waiting = [self._pending[0]]
            if not self._in_order:
                waiting = [each for each in self._pending if each.task.epoch == self.epoch]
            for index, pending in enumerate(waiting):
                if pending.future is not None and pending.future.done():
                    del self._pending[index]
                    return pending
            if not waited:
                self._grow()
                waited = True
            futures = [pending.future for pending in waiting if pending.future is not None]
            wait_for(futures, self.settings.patience, return_when=FIRST_COMPLETED)
            self._watch()

    def _grow(self) -> None:
        """Let the consumer, which is faster than the workers, wait for larger pieces."""
        if self._pool.num_workers:
            self._chunk = min(2 * self._chunk, CHUNK_MOST)

    def _watch(self) -> None:
        """Look after the workers, now and then."""
        if time.monotonic() > self._look:
            self._pool.watch()
            self._look = time.monotonic() + self.settings.patience

    def _open(self, pending: Pending) -> None:
        """Unfold the reply to a task; what it left undone is under way again."""
        task = pending.task
        assert pending.future is not None
        if not task.items:
            error = pending.future.exception()
            assert error is not None
            failures.add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")
            raise error
        memory, alone = None, pending.alone
        try:
            reply = pending.future.result()
            memory = self._settle(pending, reply)
        except (CancelledError, BrokenExecutor) as error:
            if self.settings.closed:
                raise RuntimeError(CLOSED) from None
            if self._pool.replaces:  # it broke just now
                self._pending.appendleft(pending)
                self._losses = -1  # look again, even if the loss was counted already
                return
            self._reclaim(pending)
            text = f"a worker of the executor died, which is broken since: {error}"
            reply = _replied(*(WorkerDied(text) for _ in task.items), fatal=True)
        except Exception as error:  # of an executor that the user brought; no room for a batch
            self._reclaim(pending)
            reply, alone = self._reply_lost(pending, error), True
        self._note(task, reply)
        done = len(reply.outcomes)
        self._opened = _Opened(task, reply, memory) if done else None
        self._next = 0
        # The rest goes back to where the task was; after a failure to send it, one by one.
        step = self._chunk if done else 1
        starts = range(done, len(task.items), step)
        rest = [Pending(_part(task, n, n + step), alone=alone) for n in starts]
        self._pending.extendleft(reversed(rest))
        self._unsent |= bool(rest)

    def _reply_lost(self, pending: Pending, error: Exception) -> Reply:
        """Return what stands for the reply to a task that came to nothing on its way."""
        task, ours = pending.task, self._pool.replaces
        if not pending.alone:
            # Another that was under way too may be why. Sent alone, it has nobody else to blame.
            who = "this process" if ours else "the executor"
            logger.warning("%s lost batch %d, again: %s", who, task.ordinal, error)
            self.settings.counters.retries += 1
            return _replied()
        if self._pool.is_death(error):
            what = f"batch {task.ordinal} of epoch {task.epoch}, item {shown(_item(task, 0))}"
            return _replied(
                WorkerDied(f"the workers of the executor died that made {what}: {error}")
            )
        stage = "when it came from a worker" if ours else "in the executor"
        return _replied(error, stage=stage, fatal=True)

    def _recover(self) -> None:
        """Send what was lost with its workers again, each task in its place."""
        while (losses := self._pool.end_broken()) != self._losses:
            self._losses = losses
            pending: deque[Pending] = deque()
            for each in self._pending:
                pending.extend(self._again(each) if each.is_lost else (each,))
            self._pending = pending

    def _again(self, lost: Pending) -> Iterator[Pending]:
        """Send a lost task again. Only what its own worker was making counts as a try."""
        self._reclaim(lost)
        task, counters = lost.task, self.settings.counters
        death = self._pool.deaths.pop(task.id, None)
        place: dict[str, Any] = {"batch": self._ordinal(task.ordinal), "epoch": task.epoch}
        now = time.perf_counter()
        counters.record("consumer", "again", now, 0.0, place | {"count": len(task.items)})
        if death is None:
            yield self._submit(task)
            return
        n = death.item
        ordinal = task.ordinal + n
        place |= {"batch": self._ordinal(ordinal), "cause": death.cause}
        counters.record(_track(death.worker, death.pid), "died", now, 0.0, place)
        if n > 0:
            yield self._submit(_part(task, 0, n))
        key = task.epoch, ordinal
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        item = _part(task, n, n + 1)
        if death.final or tries > self.settings.retries:
            failed: Future[Reply] = Future()
            name = self._ordinal(ordinal)
            error = failures.lethal(death, name, task.epoch, _item(task, n), tries)
            failed.set_result(_replied(error)._replace(worker=death.worker, pid=death.pid))
            yield Pending(item, failed)
        else:
            counters.retries += 1
            yield self._submit(item)
        if n + 1 < len(task.items):
            yield self._submit(_part(task, n + 1, len(task.items)))

    def _ordinal(self, ordinal: int) -> int:
        """Return what the user is told for a task's ordinal."""
        return ordinal

    def _settle(self, pending: Pending, reply: Reply) -> Any:
        """Return memory of the slot, if the reply's batches lie there."""
        slots, slot = self._pool.slots, pending.slot
        if slots is None or slot is None:
            return None
        slots.settle(slot, reply.slot_size, reply.size)
        if any(type(outcome) is pickling.PackedBatch for outcome in reply.outcomes):
            return slots.lease(slot, retire=reply.slot_retired)
        slots.free(slot, retire=reply.slot_retired)
        return None

    def _reclaim(self, pending: Pending) -> None:
        """Take back the slot of a task whose reply does not come."""
        if self._pool.slots is not None and pending.slot is not None:
            self._pool.slots.discard(pending.slot)

    def _note(self, task: Task, reply: Reply) -> None:
        """Learn from a reply how many batches the next task should hold, and how it goes."""
        made = len(reply.outcomes)
        if made:
            quick = CHUNK_SECONDS * made / (reply.seconds or 1e-9)
            small = CHUNK_BYTES * made / (reply.size or 1)
            # What was cut short was slow. Otherwise it may just have had no processor for a while.
            least = self._chunk // 2 if made == len(task.items) else 1
            fits = self.settings.chunk = int(min(quick, small, CHUNK_MOST))
            self._chunk = min(self._chunk, max(1, least, fits))
        counters, slots = self.settings.counters, self._pool.slots
        counters.chunk_size = self._chunk
        if made and reply.pid >= 0:
            place = {"batch": self._ordinal(task.ordinal), "count": made, "epoch": task.epoch}
            counters.made(_track(reply.worker, reply.pid), reply, place)
        if reply.overflowed and not counters.overflowed and slots is not None:
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower "
                "(%d slots have %d of %d bytes, and batches under way may take the rest); let go "
                "of batches sooner, or set shared_memory to more bytes; said once",
                *slots.used,
                slots.budget,
            )
        counters.overflowed += reply.overflowed
        limit = self.settings.memory_limit
        if limit is not None and reply.memory > limit:
            self._pool.renew(reply.pid)

    def _result(self, opened: _Opened) -> Any:
        """Return the next batch of a reply, what stands for it, or SKIP."""
        task, reply, n = opened.task, opened.reply, self._next
        outcome, reply.outcomes[n] = reply.outcomes[n], None  # the consumer's alone from here
        self._next += 1
        if self._next == len(reply.outcomes):
            self._opened = None
        self._ledgers[0].undelivered.pop(task.ordinal + n, None)
        try:
            if type(outcome) is bytes and reply.packed:
                return pickling.unpack(outcome)
            if type(outcome) is pickling.PackedBatch:
                return pickling.unpack_batch(outcome, opened.memory)
        except (Exception, SystemExit) as error:
            stage = "when the batch was unpickled"
            outcome = Failure.of(error, packed=False, stage=stage)
            reply = reply._replace(packed=False)
        return self._failed(task, n, reply, outcome) if type(outcome) is Failure else outcome

    def _failed(self, task: Task, n: int, reply: Reply, failure: Failure) -> Any:
        """Do with a failed batch what ``on_error`` says."""
        ordinal = self._ordinal(task.ordinal + n)
        where = _track(reply.worker, reply.pid) if reply.pid >= 0 else "consumer"
        told = {"batch": ordinal, "epoch": task.epoch, "error": failure.summary}
        self.settings.counters.record(where, "failed", time.perf_counter(), 0.0, told)
        item = _item(task, n)
        return failures.handle(failure, reply, ordinal, task.epoch, item, self.settings.on_error)


def _replied(*errors: Exception, stage: str = "", fatal: bool = False) -> Reply:
    """Return a reply that no worker gave: failures, or nothing, so that the rest is sent again."""
    outcomes = [Failure.of(each, packed=False, stage=stage, fatal=fatal) for each in errors]
    return Reply(-1, -1, False, outcomes)


def _track(worker: int, pid: int) -> str:
    """Return a worker's name in the timeline; those of an executor of the user's have no number."""
    if worker >= 0:
        return f"worker {worker}"
    return f"process {pid}" if worker == -1 else f"process {pid}, thread {-worker}"


def _item(task: Task, n: int) -> Any:
    """Return what the sampler gave."""
    item = task.items[n]
    return item.item if isinstance(item, HeldItem) else item


def _part(task: Task, start: int, stop: int) -> Task:
    """Return a task for some of the items."""
    return Task(task.ordinal + start, task.epoch, task.items[start:stop])


def _take_back(slots: Slots, slot: Slot, future: Future[Reply]) -> None:
    """Take back the slot of a task that ended when nobody wanted it any more."""
    if _is_lost(future):
        slots.discard(slot)
    else:
        reply = future.result()
        slots.settle(slot, reply.slot_size, reply.size)
        slots.free(slot, retire=reply.slot_retired)


def _is_lost(future: Future[Reply]) -> bool:
    """Return whether a future ended without a reply: its executor broke."""
    return future.cancelled() or (future.done() and future.exception() is not None)
