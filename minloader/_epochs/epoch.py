"""One epoch: tasks go down, replies come back, batches are handed to the consumer.

:class:`Epoch` owns the deque of pending tasks. It fills the deque from the sampler, waits for the
first of its futures (or, with ``in_order=False``, for any), refills it and turns the reply into
batches or errors. Where a worker was lost it sends its tasks again, each in its place. All of it
runs in the consumer's thread.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from minloader._checks import shown
from minloader._epochs.state import Bookmark, Mark, Note, Reader
from minloader._errors import SKIP, BatchError, BatchTimeout, WorkerDied, WorkerTraceback
from minloader._insight.counters import Counters
from minloader._memory.pickling import PackedBatch, unpack, unpack_batch
from minloader._memory.slots import Slot, Slots
from minloader._pools.base import Death, HeldItem, Pool
from minloader._worker.messages import Failure, Reply, Task
from minloader._worker.run import CHUNK_SECONDS

logger = logging.getLogger("minloader")

CHUNK_MOST = 128

"""Most batches in a task: an executor's 150 µs are some 1 µs a batch then, less than seeding."""


CHUNK_BYTES = 512 * 1024

"""Most bytes that the batches of a task of several should have: who keeps one of them keeps the
memory of all."""


CLOSED = "this Loader is closed; make a new one"

OnError = Literal["raise", "skip"] | Callable[[BatchError], Any]


@dataclass
class Settings:
    """What the epochs of a loader have in common.

    Attributes:
        depth: most tasks under way; 0 if submitting one runs it.
        in_order: whether batches come in the sampler's order.
        retries: how often a batch is tried again whose worker died.
        patience: seconds to wait before looking whether a worker is stuck.
        memory_limit: bytes that a worker may have for itself; None for any.
        on_error: what to do with a batch that failed.
        counters: what is counted.
        closed: whether the loader is.
    """

    depth: int
    in_order: bool
    retries: int
    patience: float
    memory_limit: int | None
    on_error: OnError
    counters: Counters
    closed: bool = False


class Pending(NamedTuple):
    """A task under way, as the sampler gave it; one without items is the sampler's own error."""

    task: Task
    mark: Mark | None  # of the sampler, before the task's items or further back
    future: Future[Reply] | None = None  # None: it is not sent yet
    slot: Slot | None = None
    alone: bool = False  # to be under way by itself: it, or what was there with it, breaks things

    @property
    def lost(self) -> bool:
        """Whether it ended without a reply: its executor broke."""
        return bool(self.task.items) and self.future is not None and _is_lost(self.future)


class _Opened(NamedTuple):
    """A reply whose batches are being delivered, and the memory that they may lie in."""

    task: Task
    mark: Mark | None
    reply: Reply
    memory: Any


class TimedIterator(ABC):
    """What ``iter(loader)`` returns: it counts the consumer's time."""

    _settings: Settings

    @abstractmethod
    def _take(self) -> Any:
        """The next batch."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Tasks under way."""

    def __next__(self) -> Any:
        # What counters.enter() and leave() do, in half the time: a tiny batch takes 15 µs in all.
        counters = self._settings.counters
        begin = time.perf_counter()
        if counters.left:
            counters.consumer += begin - counters.left
        try:
            batch = self._take()
        except BaseException as error:
            counters.leave(begin, working=not isinstance(error, StopIteration))
            raise
        counters.left = now = time.perf_counter()
        counters.wait += now - begin
        return batch


class Epoch(TimedIterator):
    """Iterator over the batches of one epoch. Goes on after an error.

    Args:
        settings: what the loader's epochs have in common.
        where: gives the pool that makes the batches, which may become another one.
        epoch: its number.
        reader: of the sampler.
        owner: the loader, which must live as long as this.
        before: an epoch that is not over yet, whose tasks leave fewer for this one.
    """

    def __init__(
        self,
        settings: Settings,
        where: Callable[[], Pool],
        epoch: int,
        reader: Reader,
        owner: object,
        before: Epoch | None = None,
    ) -> None:
        self._settings = settings
        self._where = where
        self._owner = owner
        self._before = before
        self.epoch = epoch
        self.bookmark = Bookmark(self)
        self._reader = reader
        self._in_order = settings.in_order
        self._chunk = 1  # items a task
        self._pending: deque[Pending] = deque()
        self._unsent = False  # whether there may be tasks among them that are not sent yet
        self._opened: _Opened | None = None
        self._next = 0  # of its outcomes
        self._tries: dict[int, int] = {}  # by ordinal: workers that died making it
        self._look = 0.0  # when to look after the workers next
        self._over = False
        self._adopt(where())
        self.fill()

    def _adopt(self, pool: Pool) -> None:
        self._pool = pool
        self._losses = pool.losses()
        pool.failed_starts.clear()  # the machine may have recovered

    @property
    def pools(self) -> list[Pool]:
        """Where its batches are made now."""
        return [self._pool]

    @property
    def drawn(self) -> bool:
        """Whether the sampler has no more items for it."""
        return self._reader.ended

    @property
    def under_way(self) -> bool:
        """Whether there may be batches to come."""
        return not self.drawn or bool(self._pending or self._opened)

    @property
    def _depth(self) -> int:
        """Most tasks that may be under way now."""
        return self._settings.depth - self._busy_before()

    def _busy_before(self) -> int:
        """Tasks that the epoch before has under way."""
        if self._before is not None and not self._before.under_way:
            self._before = None  # else an endless run would keep all its epochs
        return len(self._before._pending) if self._before is not None else 0

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Epoch:
        return self

    def _take(self) -> Any:
        counters = self._settings.counters
        while True:
            if self._settings.closed:
                raise RuntimeError(CLOSED)
            if self._opened is None:
                begin = time.perf_counter()
                try:
                    self._fill(max(self._depth, 1))
                    if not self._pending:
                        self._over = True
                        raise StopIteration
                    self._open(self._wait())
                    self.fill()  # before the consumer gets to work
                finally:
                    counters.opened(begin)
            if self._opened is not None:
                batch = self._result(self._opened)
                if batch is not SKIP:
                    counters.batches += 1
                    return batch
                counters.skipped += 1

    def __del__(self) -> None:
        if hasattr(self, "_over"):  # else it failed to begin
            self.bookmark.last = self.note()
            self._abandon_pending()

    def _abandon_pending(self) -> None:
        """What is queued need not run. What runs, runs to its end, unseen."""
        for pending in self._pending:
            if pending.future is None:
                continue
            pending.future.cancel()
            if pending.slot is not None and self._pool.slots is not None:
                pending.future.add_done_callback(partial(_abandon, self._pool.slots, pending.slot))
        self._pending.clear()

    def note(self) -> Note | None:
        """What has been delivered so far; None when the epoch is over."""
        if self._over:
            return None
        undone = self._undone()
        if not undone:
            return self._reader.note()
        first, mark = min(undone, key=lambda each: each[0].ordinal)
        spans = [(task.ordinal, task.ordinal + len(task.items)) for task, _ in undone]
        check = first.ordinal, _item(first, 0)
        return self._reader.note_before(first.ordinal, mark, spans, check)

    def _undone(self) -> list[tuple[Task, Mark | None]]:
        """What was drawn and not delivered yet."""
        undone = [(each.task, each.mark) for each in list(self._pending) if each.task.items]
        if self._opened is not None:
            task = self._opened.task
            left = _part(task, self._next, len(self._opened.reply.outcomes))
            undone.append((left, self._opened.mark))
        return undone

    # --- down

    def fill(self) -> None:
        """Has as many tasks under way as may be."""
        self._fill(self._depth)

    def _fill(self, depth: int) -> None:
        """Draws items and submits them until ``depth`` tasks are under way."""
        if self._pending and self._pending[0].alone:
            depth = 1
        if self._unsent:
            self._send_rest(depth)
        if self._where() is not self._pool:
            if self._pending:
                return  # first they come from where they are
            self._adopt(self._where())
        while not self.drawn and not self._unsent and len(self._pending) < depth:
            begin = time.perf_counter()
            items, mark, error = self._draw(self._reader)
            self._settings.counters.drew(begin, len(items))
            if items:
                task = Task(self._reader.position - len(items), self.epoch, items)
                self._pending.append(self._submit(task, mark))
            if error is not None:
                # In its turn: the batches before it come first.
                failed: Future[Reply] = Future()
                failed.set_exception(error)
                task = Task(self._reader.position, self.epoch, [])
                self._pending.append(Pending(task, mark, failed))

    def _send_rest(self, depth: int) -> None:
        """Submits what a task left undone: the first in any case, somebody waits for it."""
        under_way = sum(pending.future is not None for pending in self._pending)
        self._unsent = False
        for index, pending in enumerate(self._pending):
            if pending.future is None and (index == 0 or under_way < depth):
                if pending.alone:
                    wait_for([each.future for each in self._pending if each.future is not None])
                sent = self._submit(pending.task, pending.mark)
                self._pending[index] = sent._replace(alone=pending.alone)
                under_way += 1
            self._unsent |= self._pending[index].future is None

    def _draw(self, reader: Reader) -> tuple[list[Any], Mark | None, Exception | None]:
        """Items for a task, and the sampler's error if that is what it gave next."""
        items: list[Any] = []
        mark = None
        deadline = time.perf_counter() + CHUNK_SECONDS  # a slow sampler must not hold them up
        try:
            mark = reader.mark()
            while not items or (
                len(items) < self._chunk and time.perf_counter() < deadline and reader.adjoins
            ):
                items.append(self._pool.hold(reader.draw()))
        except StopIteration:
            return items, mark, None
        except Exception as error:
            return items, mark, error
        return items, mark, None

    def _address(self, task: Task) -> Task:
        """Completes a task just before it is sent."""
        return task._replace(id=next(self._pool.task_ids))

    def _submit(self, task: Task, mark: Mark | None) -> Pending:
        """Sends a task off. What goes wrong with that is found in the future, in its turn."""
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
            return Pending(task, mark, self._pool.submit(packed), slot)
        except BrokenExecutor as error:
            failed.set_exception(error)
        except Exception as error:
            if len(task.items) > 1:
                failed.set_result(Reply(-1, -1, False, []))  # one by one, then
            else:
                # An item that cannot be pickled is one batch lost; no workers to be had, all.
                stage, fatal = "when it was sent to a worker", packed is not None
                failure = Failure.of(error, packed=False, stage=stage, fatal=fatal)
                failed.set_result(Reply(-1, -1, False, [failure]))
        if slots is not None and slot is not None:
            slots.discard(slot)
        return Pending(task, mark, failed)

    # --- up

    def _wait(self) -> Pending:
        """Takes the next finished task out, only then: Ctrl-C while waiting loses nothing."""
        waited = False
        while True:
            self._recover()
            waiting = [self._pending[0]] if self._in_order else list(self._pending)
            for index, pending in enumerate(waiting):
                if pending.future is not None and pending.future.done():
                    del self._pending[index]
                    return pending
            if not waited:
                self._grow()
                waited = True
            futures = [pending.future for pending in waiting if pending.future is not None]
            wait_for(futures, self._settings.patience, return_when=FIRST_COMPLETED)
            self._watch()

    def _grow(self) -> None:
        """The consumer is faster than we are: lets it wait for larger pieces."""
        if self._pool.num_workers:
            self._chunk = min(2 * self._chunk, CHUNK_MOST)

    def _watch(self) -> None:
        """Looks after the workers, now and then."""
        if time.monotonic() > self._look:
            self._pool.watch()
            self._look = time.monotonic() + self._settings.patience

    def _open(self, pending: Pending) -> None:
        """Unfolds the reply to a task; what it left undone is under way again."""
        task = pending.task
        assert pending.future is not None
        if not task.items:
            error = pending.future.exception()
            assert error is not None
            _add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")
            raise error
        memory, alone = None, pending.alone
        try:
            reply = pending.future.result()
            memory = self._settle(pending, reply)
        except (CancelledError, BrokenExecutor) as error:
            if self._settings.closed:
                raise RuntimeError(CLOSED) from None
            if self._pool.replaces:  # it broke just now
                self._pending.appendleft(pending)
                self._losses = -1  # look again, even if the loss was counted already
                return
            self._reclaim(pending)
            text = f"a worker of the executor died, which is broken since: {error}"
            failures = [Failure.of(WorkerDied(text), packed=False, fatal=True) for _ in task.items]
            reply = Reply(-1, -1, False, failures)
        except Exception as error:  # of an executor that the user brought
            self._reclaim(pending)
            reply, alone = self._excuse(pending, error), True
        self._note(task, reply)
        done = len(reply.outcomes)
        self._opened = _Opened(task, pending.mark, reply, memory) if done else None
        self._next = 0
        # The rest goes back to where the task was; after a failure to send it, one by one.
        step = self._chunk if done else 1
        starts = range(done, len(task.items), step)
        rest = [Pending(_part(task, n, n + step), pending.mark, alone=alone) for n in starts]
        self._pending.extendleft(reversed(rest))
        self._unsent |= bool(rest)

    def _excuse(self, pending: Pending, error: Exception) -> Reply:
        """What stands for the reply to a task that its executor gave up."""
        task = pending.task
        if not pending.alone:
            # Another that was under way too may be why. Sent alone, it has nobody else to blame.
            logger.warning("the executor lost batch %d, again: %s", task.ordinal, error)
            self._settings.counters.retries += 1
            return Reply(-1, -1, False, [])
        if self._pool.is_death(error):
            what = f"batch {task.ordinal} of epoch {task.epoch}, item {shown(_item(task, 0))}"
            death = WorkerDied(f"the workers of the executor died that made {what}: {error}")
            return Reply(-1, -1, False, [Failure.of(death, packed=False)])
        failure = Failure.of(error, packed=False, stage="in the executor", fatal=True)
        return Reply(-1, -1, False, [failure])

    def _recover(self) -> None:
        """Sends what was lost with its workers again, each task in its place."""
        while (losses := self._pool.losses()) != self._losses:
            self._losses = losses
            pending: deque[Pending] = deque()
            for each in self._pending:
                pending.extend(self._again(each) if each.lost else (each,))
            self._pending = pending

    def _again(self, lost: Pending) -> Iterator[Pending]:
        """Sends a lost task again. Only what its own worker was making counts as a try."""
        self._reclaim(lost)
        task, mark = lost.task, lost.mark
        death = self._pool.deaths.pop(task.id, None)
        place = {"batch": self._ordinal(task.ordinal), "epoch": task.epoch}
        again = place | {"count": len(task.items)}
        now = time.perf_counter()
        self._settings.counters.record("consumer", "again", now, 0.0, again)
        if death is None:
            yield self._submit(task, mark)
            return
        n = death.item
        ordinal = task.ordinal + n
        died = place | {"batch": self._ordinal(ordinal), "cause": death.cause}
        self._settings.counters.record(_track(death.worker, death.pid), "died", now, 0.0, died)
        if n > 0:
            yield self._submit(_part(task, 0, n), mark)
        tries = self._tries[ordinal] = self._tries.get(ordinal, 0) + 1
        if death.final or tries > self._settings.retries:
            failed: Future[Reply] = Future()
            name = self._ordinal(ordinal)
            error = _fatal_error(death, name, task.epoch, _item(task, n), tries)
            failure = Failure.of(error, packed=False)
            failed.set_result(Reply(death.worker, death.pid, False, [failure]))
            yield Pending(_part(task, n, n + 1), mark, failed)
        else:
            self._settings.counters.retries += 1
            yield self._submit(_part(task, n, n + 1), mark)
        if n + 1 < len(task.items):
            yield self._submit(_part(task, n + 1, len(task.items)), mark)

    def _ordinal(self, ordinal: int) -> int:
        """What the user is told for a task's ordinal."""
        return ordinal

    def _settle(self, pending: Pending, reply: Reply) -> Any:
        """Memory of the slot, if the reply's batches lie there."""
        slots, slot = self._pool.slots, pending.slot
        if slots is None or slot is None:
            return None
        slots.settle(slot, reply.slot_size, reply.size)
        if any(type(outcome) is PackedBatch for outcome in reply.outcomes):
            return slots.lease(slot, retire=reply.slot_retired)
        slots.free(slot, retire=reply.slot_retired)
        return None

    def _reclaim(self, pending: Pending) -> None:
        """Takes back the slot of a task whose reply does not come."""
        if self._pool.slots is not None and pending.slot is not None:
            self._pool.slots.discard(pending.slot)

    def _note(self, task: Task, reply: Reply) -> None:
        """Learns from a reply how many batches the next task should hold, and how it goes."""
        made = len(reply.outcomes)
        if made:
            quick = CHUNK_SECONDS * made / (reply.seconds or 1e-9)
            small = CHUNK_BYTES * made / (reply.size or 1)
            # What was cut short was slow. Otherwise it may just have had no processor for a while.
            least = self._chunk // 2 if made == len(task.items) else 1
            self._chunk = min(self._chunk, max(1, least, int(min(quick, small))))
        counters, slots = self._settings.counters, self._pool.slots
        counters.chunk_size = self._chunk
        if made and reply.pid >= 0:
            place = {"batch": self._ordinal(task.ordinal), "count": made, "epoch": task.epoch}
            counters.made(_track(reply.worker, reply.pid), reply, place)
        if reply.overflowed and not counters.overflowed and slots is not None:
            count, total = slots.used
            logger.warning(
                "no room in shared memory for a batch: it comes through a pipe, which is slower "
                "(%d slots hold or may take %d of %d bytes); let go of batches sooner, or set "
                "shared_memory to more bytes; said once",
                *(count, total, slots.budget),
            )
        counters.overflowed += reply.overflowed
        if self._settings.memory_limit is not None and reply.memory > self._settings.memory_limit:
            self._pool.renew(reply.pid)

    def _result(self, opened: _Opened) -> Any:
        """The next batch of a reply, what stands for it, or SKIP."""
        reply, n = opened.reply, self._next
        outcome, reply.outcomes[n] = reply.outcomes[n], None  # the consumer's alone from here
        self._next += 1
        if self._next == len(reply.outcomes):
            self._opened = None
        try:
            if type(outcome) is bytes and reply.packed:
                return unpack(outcome)
            if type(outcome) is PackedBatch:
                return unpack_batch(outcome, opened.memory)
        except Exception as error:
            stage = "when the batch was unpickled"
            outcome = Failure.of(error, packed=False, stage=stage)
            reply = reply._replace(packed=False)
        if type(outcome) is Failure:
            task = opened.task
            place = Task(self._ordinal(task.ordinal + n), task.epoch, [_item(task, n)])
            return self._failed(place, reply, outcome)
        return outcome

    def _failed(self, task: Task, reply: Reply, failure: Failure) -> Any:
        """Does with a failed batch what ``on_error`` says."""
        pid = reply.pid if reply.pid >= 0 else None
        worker = reply.worker if reply.worker >= 0 else None
        who = "a worker" if worker is None else f"worker {worker}"
        where = "in the parent" if pid is None else f"{who} (pid {pid})"
        what = f"batch {task.ordinal} of epoch {task.epoch}, item {shown(task.items[0])}, {where}"
        what += failure.stage and f", {failure.stage}"
        place = {"ordinal": task.ordinal, "epoch": task.epoch, "item": task.items[0]}
        place |= {"worker": worker, "pid": pid}
        remote = WorkerTraceback(failure.traceback) if failure.traceback else None

        error = _load_error(failure, packed=reply.packed)
        if isinstance(error, BatchError):  # our own, which does not know its place yet
            vars(error).update(place)
            report: BatchError = error
        else:
            report = BatchError(f"{what}: {failure.summary}", **place)
            report.__cause__ = error or remote
        where_made = _track(reply.worker, reply.pid) if pid is not None else "consumer"
        told = {"batch": task.ordinal, "epoch": task.epoch, "error": failure.summary}
        self._settings.counters.record(where_made, "failed", time.perf_counter(), 0.0, told)

        skippable = isinstance(error, Exception | None) and not failure.fatal
        if self._settings.on_error == "raise" or not skippable:
            try:
                if error is None or isinstance(error, StopIteration):
                    # It cannot be carried; or it would end the loop as if the epoch were over.
                    raise report
                _add_note(error, f"minloader: {what}")
                if remote is None:
                    raise error
                raise error from remote
            finally:
                # Its traceback holds this frame: let that not hold the error, or the loader would
                # live until the cycle is found.
                del error, report
        if self._settings.on_error == "skip":
            logger.warning("skipped %s: %s", what, failure.summary)
            return SKIP
        assert callable(self._settings.on_error)
        return self._settings.on_error(report)


def _track(worker: int, pid: int) -> str:
    """A worker's name in the timeline; those of an executor of the user's have no number."""
    if worker >= 0:
        return f"worker {worker}"
    return f"process {pid}" if worker == -1 else f"process {pid}, thread {-worker}"


def _item(task: Task, n: int) -> Any:
    """What the sampler gave."""
    item = task.items[n]
    return item.item if isinstance(item, HeldItem) else item


def _part(task: Task, start: int, stop: int) -> Task:
    """A task for some of the items."""
    return Task(task.ordinal + start, task.epoch, task.items[start:stop])


def _fatal_error(death: Death, ordinal: int, epoch: int, item: Any, tries: int) -> BatchError:
    """The error for a batch that no worker survives."""
    what = f"batch {ordinal} of epoch {epoch}, item {shown(item)}"
    times = f" (tried {tries} times)" if tries > 1 else ""
    if death.stack is None:
        return WorkerDied(
            f"a worker (pid {death.pid}) died while it made {what}: {death.cause}{times}",
            exitcode=death.exitcode,
        )
    stack = death.stack or "(the worker did not answer)\n"
    return BatchTimeout(
        f"{what}, took longer than timeout allows{times}; worker {death.worker} (pid {death.pid}) "
        f"was at\n{stack}",
        stack=death.stack,
    )


def _abandon(slots: Slots, slot: Slot, future: Future[Reply]) -> None:
    """Takes back the slot of a task that ended when nobody wanted it any more."""
    if _is_lost(future):
        slots.discard(slot)
    else:
        reply = future.result()
        slots.settle(slot, reply.slot_size, reply.size)
        slots.free(slot, retire=reply.slot_retired)


def _is_lost(future: Future[Reply]) -> bool:
    """Whether a future ended without a reply: its executor broke."""
    return future.cancelled() or (future.done() and future.exception() is not None)


def _add_note(error: BaseException, note: str) -> None:
    try:
        error.add_note(note)
    except Exception as refusal:  # a frozen dataclass, say: the error matters more than the note
        logger.debug("%s; the error takes no notes (%s)", note, refusal)


def _load_error(failure: Failure, *, packed: bool) -> BaseException | None:
    if not packed or failure.error is None:
        error: BaseException | None = failure.error
        return error
    try:
        error = unpack(failure.error)
    except Exception:  # its class exists in the worker only: the text must do
        return None
    return error
