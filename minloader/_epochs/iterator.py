"""The thin iterator: tasks go down the lanes, and batches are handed to the consumer.

::

    threads --- next() ---> lock ---> lane whose turn it is ---> its first batch ---> consumer
                              |            | none has any more                  |
                              |            v                                    `-- interrupted on
                              `-----> the next epoch, or the end                    its way: it is
                                                                                    put back
An epoch of a sampler has one lane, one of a stream a lane for each shard. The lanes take turns:
next is the one that has given the fewest batches.

Guarantees:

* Batches come in the order of the sampler, or with ``in_order=False`` as they get ready; those of
  an epoch come before any of the next one.
* At most ``prefetch_factor x num_workers`` tasks are under way, across the end of an epoch too.
* What the sampler or a batch raises is raised in its place, and the next ``next()`` goes on.
* Ctrl-C, at whatever instruction of ``next()`` it comes, loses nothing: the next ``next()`` gives
  what this one would have given.
* Several threads may take batches: each batch goes to one of them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import Any

from minloader._checks import refuse_copies
from minloader._epochs import failures
from minloader._epochs.failures import Raised
from minloader._epochs.lane import Lane, track
from minloader._epochs.pending import Bell, Handover, Pending
from minloader._epochs.settings import CLOSED, Settings
from minloader._epochs.state import Note
from minloader._epochs.streams import ShardWatch
from minloader._errors import SKIP, BatchError
from minloader._pools.base import Pool
from minloader._worker.messages import Failure


@dataclass(eq=False, repr=False)
class Account:
    """What of an iterator's epochs was handed over. It outlives the iterator.

    Attributes:
        lanes: of the iterator.
        several: whether the iterator is one of :meth:`Loader.epochs`.
        lock: held while a batch is taken. Reentrant: ``on_error`` may take another batch.
        loaded: how many states had been loaded when it began.
        behind: notes the state as of what the consumer was given, where
            :func:`minloader.prefetch` takes batches ahead of the consumer.
        fruitful: index of the last epoch of which a batch was handed over; -1: there is none.
        is_over: whether the consumer was told that there are no more batches.
        is_left: whether the iterator is gone.
        next_epoch: the number that the user has set for the next epoch; None: the one that follows.
    """

    lanes: list[Any]
    several: bool
    lock: Any
    loaded: int
    behind: Note | None
    fruitful: int
    is_over: bool = False
    is_left: bool = False
    next_epoch: int | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the consumer has the iterator, and may ask it for more."""
        return not (self.is_left or self.is_over)

    def check_not_ahead(self, call: str) -> None:
        """Refuse a call about the consumer's next batches while others were taken ahead of it.

        Where it would take effect depends on how far that is.
        """
        if self.behind is not None and not self.is_left:
            raise RuntimeError(
                f"{call} is refused while prefetch takes batches ahead of you: call it before "
                "prefetch begins, or after loader.load_state_dict(loader.state_dict()), and then "
                "begin another prefetch"
            )

    def set_next_epoch(self, epoch: int) -> None:
        """Have the epoch after the consumer's be of a number, if it is the iterator's."""
        if self.several:
            self.check_not_ahead("set_epoch within epochs()")
        if self.is_under_way:
            self.next_epoch = epoch

    @property
    def source(self) -> Any:
        """What the epoch that the consumer is in is read from, in the lane that has come least far.

        It has the ``epoch``, its number, and the ``index`` of that among those of the iterator.
        """
        return min((lane.sources[0] for lane in self.lanes), key=attrgetter("index"))


class Batches(Handover[Any]):
    """Iterator over the batches of one epoch, or of several without a gap, see
    :meth:`Loader.epochs`. It goes on after an error.

    Args:
        owner: the loader, which must live as long as this.
        settings: what the loader's epochs have in common.
        count: how many epochs; None: endlessly many.
        until: the epoch before which to end, in place of ``count``.
        numbered: whether the number of the epoch comes with each batch.

    Attributes:
        account: of the epochs; None until the first one was begun.
        bell: rung when a task has arrived.
    """

    def __init__(
        self,
        owner: Any,
        settings: Settings,
        count: int | None,
        until: int | None = None,
        *,
        numbered: bool,
    ) -> None:
        super().__init__()
        self.owner = owner
        self.settings = settings
        self.account: Account | None = None
        self.bell = Bell()
        self._lanes: list[Lane] = []
        self._count = count
        self._until = until
        self._numbered = numbered
        self._behind: Note | None = None
        self._watch: Any = None
        self._coming: dict[int, tuple[int, int]] = {}  # of epochs that began ahead, by index
        self._current: tuple[Lane, Pending] | None = None
        self._entered = 0  # index of the last epoch that the loader was told of
        self._failed = -1, 0  # index of an epoch, and how many of its batches were left out
        self._look = 0.0  # when to look after the workers next

    def begin(self, lanes: list[Any], *, fruitful: bool) -> Account:
        """Take the lanes, which have begun the first epoch. Return the account of it."""
        self._watch = ShardWatch(self.settings, len(lanes), compares=not fruitful)
        self._lanes, loaded = lanes, self.settings.loaded
        index = 0 if fruitful else -1
        return Account(lanes, self._numbered, self._lock, loaded, self._behind, index)

    __reduce__ = refuse_copies

    @property
    def pools(self) -> list[Pool]:
        """Where batches are made now."""
        return [lane.pool for lane in self._lanes]

    @property
    def in_flight(self) -> int:
        """Tasks under way."""
        return sum(lane.under_way for lane in self._lanes)

    # Kept here: where an iterator outlives its module, the names of that are gone.
    _exits = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        account = vars(self).get("account")  # it may not have been made
        if account is not None and not self._exits():
            if account.behind is not None and self._numbered:
                # What was taken ahead nobody has seen: the next iteration begins there.
                self.owner._left_behind(account)
            account.is_left = True
            for lane in self._lanes:
                lane.leave()

    def is_ready(self) -> bool:
        """Return whether ``next`` need not wait for a worker."""
        with self._lock:
            account = self.account
            if account is None or account.is_over or self.settings.closed or not self.in_flight:
                return True
            lanes = self._in_turn(account)
            return not lanes or lanes[0].look() is not None

    def note_handed_over(self) -> Note:
        """Note the state as of what was handed over, to whomever."""
        with self._lock:
            account, owner = self.account, self.owner
            note: Note = (
                owner._note_state() if account is None else owner._note_of(account, owner.epoch)
            )
            return note

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`Loader.state_dict`."""
        state: dict[str, Any] = self.owner.state_dict()
        return state

    def set_behind(self, note: Note | None) -> None:
        """Have the loader's state be that of a consumer that :func:`minloader.prefetch` serves."""
        self._behind = note
        if self.account is not None:
            self.account.behind = note

    # --- batches

    def _check_process(self) -> None:
        if self.settings.depth or self.in_flight:
            # The workers answer to the other process, and a thread there may hold the lock.
            raise RuntimeError(
                "this iterator was begun in the process of which this one is a fork, and its "
                "batches arrive there; call iter(loader) in this process, which starts workers "
                "of its own, or fork before you iterate"
            )

    def _next(self, taken: list[Any]) -> Any:
        # Counted here rather than by calls: a tiny batch takes some 10 µs in all.
        settings = self.settings
        counters = settings.counters
        begin = perf_counter()
        if counters.left:
            counters.consumer += begin - counters.left
        try:
            account = self.account
            if account is None:
                account = self._begin()
                begin = perf_counter()  # what went before was counted
            while True:
                current = self._current
                stale = settings.closed or account.loaded != settings.loaded
                if stale or current is None or not current[1].is_open:
                    current = self._find(account)
                lane, pending = current
                n, source = pending.given, pending.source
                outcome = pending.unpack(n)
                taken.extend((lane, pending, n, outcome))
                pending.given = n + 1
                if pending.failed:
                    for sample, error in pending.failed.get(n, ()):
                        self._fail(lane, pending, n, sample, error)
                kind = type(outcome)
                if kind is Failure:
                    taken[3:] = outcome, self._handle(lane, pending, n, outcome)
                    outcome = None if type(taken[4]) is Raised else taken[4]
                pending.lets_go(n)
                if kind in NO_BATCH:
                    if type(taken[-1]) is Raised:
                        outcome = None
                        raise taken[-1].error
                    if outcome is SKIP:
                        counters.skipped += 1
                        self._count_failed(pending, n, is_failure=len(taken) > 4)
                        taken.clear()
                        continue
                account.fruitful = source.index
                if len(self._lanes) > 1:
                    self._watch.compare(lane, outcome)
                counters.batches += 1
                counters.left = now = perf_counter()
                counters.wait += now - begin
                return (source.epoch, outcome) if self._numbered else outcome
        except BaseException as error:
            counters.leave(begin, working=not isinstance(error, StopIteration))
            raise

    def _put_back(self, taken: list[Any]) -> None:
        lane, pending, n, outcome, *_ = taken
        if pending.given > n:
            lane.put_back(pending, n, outcome)
            self._current = None

    def _handle(self, lane: Lane, pending: Pending, n: int, failure: Failure) -> Any:
        """Do with a failed batch what ``on_error`` says; return what takes its place."""
        ordinal, reply = lane.ordinal(pending.ordinal + n), pending.reply
        worker, pid = (-1, -1) if reply is None else (reply.worker, reply.pid)
        where = track(worker, pid) if pid >= 0 else "consumer"
        told = {"batch": ordinal, "epoch": pending.source.epoch, "error": failure.summary}
        counters = self.settings.counters
        counters.record(where, "failed", perf_counter(), 0.0, told)
        if not failure.fatal:
            self._fail(lane, pending, n, failure.sample, failure.summary)
        place = ordinal, pending.source.epoch, lane.item(pending, n), worker, pid
        return failures.handle(failure, *place, self.settings.on_error)

    def _fail(self, lane: Lane, pending: Pending, n: int, sample: Any, error: str) -> None:
        """Count what has failed; raise an error if that is too many."""
        counters, most = self.settings.counters, self.settings.max_errors
        index = (failures.load(sample) or (None,))[0]
        ordinal, epoch = lane.ordinal(pending.ordinal + n), pending.source.epoch
        counters.fail(epoch, ordinal, index, error)
        if most is not None and counters.failed > most:
            known = {"ordinal": ordinal, "epoch": epoch, "sample": index}
            raise BatchError(failures.too_many(counters, most), **known)

    def _count_failed(self, pending: Pending, n: int, *, is_failure: bool) -> None:
        """Count a batch that was left out, if an error is why."""
        index, (before, count) = pending.source.index, self._failed
        if is_failure or n in pending.failed:
            self._failed = index, count * (before == index) + 1

    # --- which is next

    def _begin(self) -> Account:
        """Begin with the first epoch, if that was not done when this was made."""
        if self._until is not None:
            self._count = max(0, self._until - self.owner.epoch)
        if self._count == 0:
            raise StopIteration
        account: Account = self.owner._begin(self)
        return account

    def _find(self, account: Account) -> tuple[Lane, Pending]:
        """Return the lane whose turn it is, and the task of which it gives a batch, or an error.

        Raises:
            StopIteration: there are no more batches.
            RuntimeError: the loader is closed, or another state was loaded.
        """
        begin = perf_counter()
        try:
            return self._wait(account)
        finally:
            self.settings.counters.opened(begin)

    def _check(self, account: Account) -> None:
        if self.settings.closed:
            raise RuntimeError(CLOSED)
        if account.loaded != self.settings.loaded and not account.is_over:
            raise RuntimeError(
                "load_state_dict was called after this iterator was begun; call iter(loader) to "
                "continue from that state"
            )

    def _wait(self, account: Account) -> tuple[Lane, Pending]:
        has_grown = False
        while True:
            self._check(account)
            if account.is_over:
                raise StopIteration
            if self._entered != account.source.index:  # interrupted before it was told
                self.owner._entered(account)
                self._entered = account.source.index
            lanes = self._in_turn(account)
            if not lanes:
                self._next_epoch(account)
                continue
            awaited = lanes[:1] if self.settings.in_order else lanes
            for lane in awaited:
                pending = lane.look()
                if pending is not None:
                    if not pending.begun:
                        pending.begun = True
                        self.fill()  # before the consumer gets to work
                    found = lane, pending
                    self._current = found if len(self._lanes) == 1 else None
                    return found
            if self._in_turn(account) != lanes or self._send(lanes):
                continue
            if not has_grown:
                for lane in awaited:
                    lane.grow()
                has_grown = True
            self.bell.wait(self.settings.patience)
            if time.monotonic() > self._look:
                for lane in self._lanes:
                    lane.pool.watch()
                self._look = time.monotonic() + self.settings.patience

    def _in_turn(self, account: Account) -> list[Lane]:
        """Return the lanes that have more of the consumer's epoch, the next one first."""
        index = account.source.index
        lanes = [
            lane for lane in self._lanes if lane.sources[0].index == index and not lane.is_over
        ]
        if len(lanes) > 1:
            lanes.sort(key=POSITION)  # stable: of equals the one with the lowest number
        return lanes

    def _send(self, lanes: list[Lane]) -> bool:
        """Have the first lane's next batch under way, and others. Return whether any was sent."""
        head = lanes[0].head
        sent = (head is None or not head.is_sent) and self._send_more(lanes[0])
        return self.fill() or sent

    # --- down

    def fill(self) -> bool:
        """Have as many tasks under way as may be. Return whether any was sent."""
        sent = False
        lanes = list(self._lanes)
        while lanes and self.in_flight < self.settings.depth:
            lane = min(lanes, key=NEED) if len(lanes) > 1 else lanes[0]
            if self._send_more(lane):
                sent = True
            else:
                lanes.remove(lane)
        return sent

    def _send_more(self, lane: Lane) -> bool:
        """Have a lane send a task, of the next epoch if the one that it is in has no more."""
        lane.open_arrived()
        while not lane.send_more():
            if not lane.is_drawn or not self._begin_ahead(lane):
                return False
        return True

    # --- epochs

    def _begin_ahead(self, lane: Lane) -> bool:
        """Begin the next epoch in a lane. Return False if there is none, or not yet."""
        before = lane.sources[-1]
        index = before.index + 1
        if index not in self._coming:
            endless = self._count is None
            if not endless and index >= (self._count or 0):
                return False
            if endless and all(each.drew_nothing for each in self._lanes):
                return False  # there could be endlessly many without an item: the consumer first
            self._coming[index] = before.epoch + 1, self.owner._new_run()
        lane.begin_after(index, *self._coming[index])
        return True

    def _next_epoch(self, account: Account) -> None:
        """Let the consumer go on to the next epoch.

        Raises:
            StopIteration: there is none.
            BatchError, ValueError: nothing is left of the one that has ended.
        """
        index = account.source.index
        self._check_fruit(account, index)
        self._watch.count_empty(self._lanes)
        if self._until is not None and account.next_epoch is not None:
            self._count = index + 1 + max(0, self._until - account.next_epoch)
        if self._count is not None and index + 1 >= self._count:
            account.is_over = True
            raise StopIteration
        if account.next_epoch is not None:
            for lane in self._lanes:
                lane.drop_ahead()
            self._coming = {index + 1: (account.next_epoch, self.owner._new_run())}
            account.next_epoch = None
        for lane in self._lanes:
            if lane.sources[0].index == index:
                if len(lane.sources) == 1:
                    self._begin_ahead(lane)
                lane.begin_next()
        self._coming.pop(index, None)

    def _check_fruit(self, account: Account, index: int) -> None:
        """Raise an error, once, if an epoch that has ended gave no batch, and should have."""
        if account.fruitful == index:
            return
        epoch, (left_out, count) = account.source.epoch, self._failed
        if left_out == index and count:
            account.fruitful = index
            raise BatchError(
                f"nothing is left of epoch {epoch}, of which {count} batches failed; look "
                "at the errors in the log, and at the storage that the dataset reads from",
                epoch=epoch,
            )
        if self._count is None:
            account.is_over = True
            raise ValueError(
                f"epoch {epoch} has no batches, and epochs() without a number would go "
                "through such for ever; look at the sampler, or give a number"
            )


NO_BATCH = frozenset({Failure, Raised, type(SKIP)})
"""Types of outcomes that are no batch."""

POSITION = attrgetter("position")

NEED = attrgetter("under_way", "position")
"""Orders lanes by how soon they need another task."""
