"""The thin iterator: tasks go down the lanes, and batches are handed to the consumer.

::

    threads --- next() ---> lock ---> lane whose turn it is ---> batch ---> claim ---> consumer
                              |            | none has any more                |
                              |            v                                  `-- Ctrl-C: it is
                              `-----> the next epoch, or the end                  given again

An epoch of a sampler has one lane, one of a stream a lane for each shard. The lanes take turns:
next is the one that has given the fewest batches.

Guarantees:

* Batches come in the order of the sampler, or with ``in_order=False`` as they get ready; those of
  an epoch come before any of the next one.
* At most ``prefetch_factor x num_workers`` tasks are under way, across the end of an epoch too.
* What the sampler or a batch raises is raised in its place, and the next ``next()`` goes on.
* Ctrl-C, at whatever instruction of ``next()`` it comes, loses and doubles nothing. The next call
  makes sure first: what has no future counts as unsent, and it is found out where a sampler is that
  was being read (``Feed.recover``).
* Several threads may take batches: each batch goes to one of them.

CPython runs the handlers of signals behind calls, at the beginning of functions, and at backward
jumps. So what must be done together is done without a call in between.
"""

from __future__ import annotations

import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, Self

from minloader._checks import B, counted, refuse_copies
from minloader._epochs import failures
from minloader._epochs.epoch import Claim, Claims, Epoch
from minloader._epochs.feed import Feed
from minloader._epochs.lane import Lane
from minloader._epochs.options import Shared
from minloader._epochs.shard_watch import ShardWatch
from minloader._epochs.stage import Stage, Work
from minloader._epochs.task import Arrivals, Task
from minloader._errors import SKIP, BatchError, not_the_end, without_frames
from minloader._insight.timeline import track_of
from minloader._pools.base import Pool
from minloader._worker import lifetimes
from minloader._worker.batch_maker import leave_out
from minloader._worker.messages import Failure

TURN = attrgetter("taken")
"""By which lanes take turns: the least comes first, and of equals the lowest number."""

BeginNext = Callable[["Batches[Any]", Epoch | None], Epoch | None]
"""Begins an epoch for an iterator: its first, or the one after another. None: there is none."""


class Batches(Iterator[B], Generic[B]):
    """Iterator over the batches of one epoch, or of several without a gap, see
    :meth:`Loader.epochs`. It goes on after an error.

    Args:
        begin_next: begins its first epoch, and gives what it shares with others; and those after
            that.
        state_dict: returns the state of the loader.
        is_of_several: whether there are several epochs, so that the number of its epoch comes with
            each batch.
        is_endless: whether there may be endlessly many epochs.

    Attributes:
        shared: what the loader's epochs share, from when the first was begun.
        arrivals: what has come back of the workers, and was not looked at.
        epochs: those that were begun, the consumer's first.
        claims: what is on its way to the consumer.
    """

    shared: Shared

    def __init__(
        self,
        begin_next: BeginNext,
        state_dict: Callable[[], dict[str, Any]],
        *,
        is_of_several: bool = False,
        is_endless: bool = False,
    ) -> None:
        self.arrivals: Arrivals = queue.SimpleQueue()
        self.epochs: deque[Epoch] = deque()
        self.claims = Claims()
        self.is_superseded = False
        self._begin_next = begin_next
        self._state_dict = state_dict
        self.is_of_several = is_of_several
        self._is_endless = is_endless
        self._shard_watch: ShardWatch | None = None
        self._is_over = False
        self._next_watch = 0.0  # when the pools are to look next whether a worker is stuck

    __reduce__ = refuse_copies

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        claims = self.claims
        if claims.process is not lifetimes.process:
            self._check_process()
        if claims.stage is not None:
            claims.stage.refuse_own_thread()
        thread = get_ident()
        with claims.lock:
            if thread not in claims.by_thread:
                self._take(thread)
            claim = claims.by_thread[thread]
        error = claim.error
        outcome = claim.outcome
        # No call behind this line, so no Ctrl-C: the batch is the consumer's.
        del claims.by_thread[thread]
        claim.error = None  # an error's frames hold the claim
        claim.outcome = None
        if error is None:
            return outcome  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    # Kept here: where an iterator outlives its module, the names of that are gone.
    _exits = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        epochs = vars(self).get("epochs")  # it may not have been made
        if epochs and not self._exits():
            stage = self.claims.stage
            if stage is not None:
                stage.close()
            for epoch in epochs:
                epoch.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`Loader.state_dict`."""
        return self._state_dict()

    # --- what the pools see of it

    @property
    def pools(self) -> list[Pool]:
        """Where batches are made now."""
        return [lane.pool for epoch in list(self.epochs) for lane in epoch.lanes]

    @property
    def in_flight(self) -> int:
        """Tasks under way."""
        return sum([lane.in_flight for epoch in list(self.epochs) for lane in epoch.lanes])

    def _check_process(self) -> None:
        if not self.epochs:  # it begins here
            self.claims.go_on_here()
            return
        if self.claims.stage is not None:
            raise RuntimeError("the thread of this prefetch is in another process; make one here")
        if self.shared.group.max_in_flight or self.in_flight:
            # The workers answer to the other process, and a thread there may hold the lock.
            raise RuntimeError(
                "this iterator was begun in the process of which this one is a fork, and its "
                "batches arrive there; call iter(loader) in this process, which starts workers "
                "of its own, or fork before you iterate"
            )
        self.claims.go_on_here()

    # --- the last hop

    def add_stage(self, stage: Stage) -> None:
        """Have a function be called on each batch, ahead of the consumer; see ``prefetch``.

        Raises:
            RuntimeError: there is another stage, which is closed, or in another process.
        """
        claims = self.claims
        if claims.process is not lifetimes.process:
            self._check_process()
        with claims.get_lock():
            former = claims.stage
            staged = claims.staged
            if former is not None:
                works = stage.take_over(former, [work for _, work in staged])
                staged = tuple([(each[0], work) for each, work in zip(staged, works, strict=True)])
            # Without a call in between, and so without Ctrl-C.
            claims.stage = stage
            claims.staged = staged

    def close(self) -> None:
        """End the thread of the stage, waiting for it for a moment, and drop what is ready.

        Harmless when repeated, and where there is none.
        """
        stage = self.claims.stage
        if stage is None:
            return
        stage.close()
        for _, work in self.claims.staged:
            work.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- batches

    def _take(self, thread: int) -> None:
        """Claim the next batch for a thread.

        Raises:
            StopIteration: there are no more batches.
            RuntimeError: what is called for a batch has called this.
        """
        claims = self.claims
        if claims.is_taking:
            raise RuntimeError(
                "the iterator is asked for another batch by what it calls itself while it takes "
                "one: the sampler, the dataset or another function, such as on_error; call next "
                "in the loop only"
            )
        claims.is_taking = True
        try:
            if not self.epochs:
                if self._is_over:  # there was none
                    raise StopIteration
                self.begin()  # with the first epoch, if that was not done when this was made
            counters = self.shared.counters
            begin = perf_counter()
            times = counters.time
            if counters.left_at:
                times.consumer += begin - counters.left_at
            try:
                if claims.is_unsure:
                    for epoch in self.epochs:
                        epoch.recover()
                claims.is_unsure = True
                if claims.stage is None:
                    self._commit_claim(self._next_claim(), thread)
                else:
                    self._claim_from_stage(thread, claims.stage)
                now = perf_counter()
                counters.left_at = now
                times.wait += now - begin
            except BaseException as error:
                claims.is_unsure = not isinstance(error, Exception)
                counters.leave(begin, working=not isinstance(error, StopIteration))
                raise
            claims.is_unsure = False
        finally:
            claims.is_taking = False

    def begin(self) -> None:
        """Begin with the first epoch; with workers, its first batches are under way on return.

        Raises:
            StopIteration: there is none.
        """
        with self.claims.get_lock():
            begin = perf_counter()
            self.claims.is_unsure = True
            try:
                epoch = self._begin_next(self, None)
            except StopIteration as error:
                raise not_the_end(error, "the sampler") from error
            if epoch is None:
                self._is_over = True
                raise StopIteration
            shared = self.shared
            shared.counters.note_epoch_start(begin)
            if epoch.is_stream:
                compares = not epoch.has_given
                self._shard_watch = ShardWatch(len(epoch.lanes), shared, compares=compares)
            self.fill()
            shared.counters.count_epoch_start(begin)
            self.claims.is_unsure = False

    def _check_may_go_on(self) -> None:
        """Raise what ends or forbids a call of ``next``.

        Raises:
            StopIteration: the epochs are over.
            RuntimeError: the loader is closed, or another state was loaded.
        """
        if self._is_over:
            raise StopIteration
        self.shared.check_open()
        if self.is_superseded:
            raise RuntimeError(
                "load_state_dict was called after this iterator was begun; call iter(loader) to "
                "continue from that state"
            )

    def _commit_claim(self, claim: Claim, thread: int, work: Work | None = None) -> None:
        """Note a claim as taken from its lane, and as on its way.

        Args:
            claim: a batch, or an error of the sampler.
            thread: to which it is on its way.
            work: on it, ahead of the consumer; None: there is no stage.
        """
        claims = self.claims
        lane = claim.lane
        task = claim.task
        staged = claims.staged if work is None else (*claims.staged, (claim, work))
        if task is None:
            feed = lane.feed
            assert isinstance(feed, Feed)  # what reading a shard raises has the place of a batch
            source_state = feed.state_behind_error()
            # Without a call in between, and so without Ctrl-C.
            if work is None:
                claims.by_thread[thread] = claim
            claims.staged = staged
            feed.source_state = source_state
            feed.error = None
            return
        taken, ahead = lane.taken_after(claim.ordinal)
        reply = task.reply
        assert reply is not None
        outcomes = reply.outcomes
        n = claim.ordinal - task.first
        is_last = n + 1 == len(outcomes)
        counters = self.shared.counters
        # Without a call in between, and so without Ctrl-C.
        if work is None:
            claims.by_thread[thread] = claim
            if claim.error is None:
                counters.batches += 1
        claims.staged = staged
        lane.ahead = ahead
        lane.taken = taken
        outcomes[n] = None
        if is_last:
            task.memory = None

    def _next_claim(self) -> Claim:
        """Return what comes next: a batch, or an error in its place. Nothing notes it yet."""
        shared = self.shared
        while True:
            if shared.is_closed or self._is_over or self.is_superseded:
                self._check_may_go_on()
            epoch, lane, task = self._next_lane()
            if task is None:
                return Claim(lane=lane, task=None, error=lane.feed.error)
            ordinal = lane.taken
            if task.first > ordinal:
                ordinal = lane.next_in(task)
            n = ordinal - task.first
            # By position: keywords take 0.3 µs with each batch.
            claim = Claim(lane, task, ordinal, task.unpack(n))
            samples: list[tuple[Any, str]] = []
            reply = task.reply
            assert reply is not None
            if reply.failed:
                samples = [(sample, text) for batch, sample, text in reply.failed if batch == n]
                for number, (sample, text) in enumerate(samples):
                    claim.error = self._count_failure(epoch, claim, sample, text, number)
                    if shared.job.options.on_sample_error is leave_out:
                        failures.report_left_out(sample, lane.ordinal_in_epoch(ordinal), text)
            has_failed = bool(samples)
            if type(claim.outcome) is Failure:
                has_failed = True
                self._handle(epoch, claim, len(samples))
            if claim.error is not None:
                claim.outcome = None
                return claim
            if claim.outcome is SKIP:
                taken, ahead = lane.taken_after(ordinal)
                lane.ahead = ahead
                lane.taken = taken
                reply.outcomes[n] = None
                shared.counters.errors.skipped += 1
                epoch.left_out += has_failed
                continue
            epoch.has_given = True
            if self._shard_watch is not None and not has_failed:
                self._shard_watch.compare(lane, claim.outcome)
            if self.is_of_several:
                claim.outcome = (epoch.number, claim.outcome)
            return claim

    def _handle(self, epoch: Epoch, claim: Claim, number: int) -> None:
        """Do with a failed batch what ``on_error`` says: it says what takes its place.

        Args:
            epoch: that it is of.
            claim: the batch.
            number: how many samples of it are known to have failed before.
        """
        shared = self.shared
        failure = claim.outcome
        task = claim.task
        assert task is not None
        ordinal = claim.lane.ordinal_in_epoch(claim.ordinal)
        reply = task.reply
        assert reply is not None
        where = track_of(reply.worker, reply.pid) if reply.pid >= 0 else "consumer"
        labels = {"batch": ordinal, "epoch": epoch.number, "error": failure.summary}
        shared.counters.record(where, "failed", perf_counter(), 0.0, labels)
        if not failure.fatal:
            sample = failure.sample
            claim.error = self._count_failure(epoch, claim, sample, failure.summary, number)
            if claim.error is not None:
                return
        try:
            claim.outcome, claim.error = failures.handle(
                failure,
                ordinal=ordinal,
                epoch=epoch.number,
                item=task.item(claim.ordinal - task.first),
                worker=reply.worker,
                pid=reply.pid,
                on_error=shared.options.on_error,
            )
        except Exception as error:  # of the user's function: it takes the place of the batch
            claim.error = error

    def _count_failure(
        self, epoch: Epoch, claim: Claim, sample: Any, text: str, number: int
    ) -> BatchError | None:
        """Count what has failed; return an error if that is too many.

        Args:
            epoch: that it is of.
            claim: the batch.
            sample: its index, in a tuple, maybe packed; or that is empty.
            text: the error.
            number: of the error among those of the batch.
        """
        index = (failures.unpacked(sample) or (None,))[0]
        ordinal = claim.lane.ordinal_in_epoch(claim.ordinal)
        self.shared.counters.fail(epoch.number, ordinal, index, text)
        epoch.losses.add(ordinal, index, number)
        most = self.shared.options.max_errors
        if most is None or epoch.losses.count <= most:
            return None
        text = failures.too_many(self.shared.counters, epoch.losses, epoch.number, most)
        return BatchError(text, ordinal=ordinal, epoch=epoch.number, sample=index)

    # --- which is next

    def _next_lane(self) -> tuple[Epoch, Lane, Task | None]:
        """Return the lane whose turn it is, and the task of which it gives a batch.

        Without a task it is an error of the sampler that comes next.

        Raises:
            StopIteration: there are no more batches.
            RuntimeError: the loader is closed, or another state was loaded.
        """
        epoch = self.epochs[0]
        lanes = epoch.lanes
        lane = lanes[0] if len(lanes) == 1 else min(lanes, key=TURN)
        if lane.tasks:
            task = lane.tasks[0]
            if task.is_begun and 0 <= lane.taken - task.first < len(task.items):
                return epoch, lane, task
        begin = perf_counter()
        try:
            return self._wait()
        finally:
            self.shared.counters.count_task_wait(begin)

    @property
    def _epoch_taken_from(self) -> Epoch:
        """The epoch that is taken from now: with a stage it may be ahead of the consumer's."""
        for epoch in self.epochs:
            if not epoch.is_taken:
                return epoch
        return self.epochs[-1]

    def _wait(self) -> tuple[Epoch, Lane, Task | None]:
        """Return what :meth:`_next_lane` does, as soon as it is here; send others meanwhile."""
        has_grown = False
        while True:
            self._check_may_go_on()
            epoch = self._enter_epoch()
            lanes = self._in_turn(epoch)
            for lane in self._may_be_next(lanes):
                task = lane.next_received()
                if task is not None:
                    if not task.is_begun:
                        task.is_begun = True
                        self.fill()  # before the consumer gets to work
                    return epoch, lane, task
                if lane.is_at_error:
                    return epoch, lane, None
            if self._receive() or self._send_next(lanes):
                continue
            if self._in_turn(epoch) != lanes or lanes[0].is_at_error:
                continue  # the sampler, just asked for more, has ended or failed
            if not has_grown:
                for lane in self._may_be_next(lanes):
                    lane.grow()
                has_grown = True
            patience = self.shared.patience
            self._receive(patience)
            if time.monotonic() > self._next_watch:
                for lane in epoch.lanes:
                    lane.pool.watch()
                self._next_watch = time.monotonic() + patience

    def _in_turn(self, epoch: Epoch) -> list[Lane]:
        """Return the lanes that have more of an epoch, the next one first."""
        busy = set(filter(None, (claim.task for claim in self.claims.all())))
        lanes = []
        for lane in epoch.lanes:
            lane.drop_given(busy)
            if not lane.is_taken:
                lanes.append(lane)
        if len(lanes) > 1:
            lanes.sort(key=TURN)
        return lanes

    def _may_be_next(self, lanes: list[Lane]) -> list[Lane]:
        """Return which may give the next batch, of lanes that are in the order of their turn."""
        return lanes[:1] if self.shared.options.in_order else lanes

    def _receive(self, seconds: float = 0.0) -> bool:
        """Look at what has come back; wait for so many seconds. Return whether there was any."""
        arrivals = self.arrivals
        try:
            shipment = arrivals.get(timeout=seconds) if seconds else arrivals.get_nowait()
        except queue.Empty:
            return False
        while True:
            lane = self._lane_of(shipment.task)
            if lane is not None:
                lane.receive(shipment)
            try:
                shipment = arrivals.get_nowait()
            except queue.Empty:
                return True

    def _lane_of(self, task: Task) -> Lane | None:
        for epoch in self.epochs:
            for lane in epoch.lanes:
                if task in lane.tasks:
                    return lane
        return None

    # --- down

    def _send_next(self, lanes: list[Lane]) -> bool:
        """Have the next batch under way, and others. Return whether any was sent, or has come back.

        The next one is sent even where :meth:`fill` has no room, since the consumer waits for it.
        With ``num_workers=0`` there never is room, and this is what makes a batch.
        """
        lane = lanes[0]
        head = lane.head
        is_sent = False
        if lane.feed.error is None and (head is None or head.is_unsent):
            is_sent = lane.send_more()
        return self.fill() or is_sent

    def fill(self) -> bool:
        """Have as many tasks under way as may be. Return whether any was sent, or has come back."""
        has_moved = self._receive()
        room = self.shared.group.max_in_flight - self.in_flight
        while room > 0 and self._send_one():
            has_moved = True
            room -= 1
        return has_moved

    def _send_one(self) -> bool:
        """Send a task: of the first epoch that has one. Return whether there was any."""
        if any(map(self._send_one_of, list(self.epochs))):
            return True
        while True:
            last = self.epochs[-1]
            if not last.is_drawn or (self._is_endless and last.drew_nothing):
                return False  # there could be endlessly many without an item: the consumer first
            following = self._begin_next(self, last)
            if following is None:
                return False
            if self._send_one_of(following):
                return True

    def _send_one_of(self, epoch: Epoch) -> bool:
        """Send a task of an epoch. Return whether there was any."""
        lanes = epoch.lanes
        if len(lanes) > 1:  # in the order in which they are taken from, if there is one
            key = attrgetter("in_flight", "taken")
            if self.shared.options.in_order:
                key = attrgetter("next_unsent")
            lanes = sorted(lanes, key=key)
        return any(lane.send_more() for lane in lanes)

    # --- epochs

    def _enter_epoch(self) -> Epoch:
        """Return the epoch that is taken from; let the consumer go on to it if it may.

        Raises:
            StopIteration: there is none, or none before the consumer was given what is staged.
            BatchError, ValueError: nothing is left of the one that has ended.
        """
        while True:
            for epoch in self.epochs:
                if not epoch.is_taken:
                    if not self.claims.staged:
                        self._leave_epochs_before(epoch)
                    return epoch
                if self.claims.staged and not epoch.has_given:
                    raise StopIteration  # an error of its end comes behind what is staged
                self._check_not_empty(epoch)
                if self._shard_watch is not None:
                    self._shard_watch.count_empty(epoch.lanes)
            last = self.epochs[-1]
            if self.claims.staged:
                raise StopIteration
            if self._begin_next(self, last) is None:
                self._leave_epochs_before(last)  # they may be there yet: it may have no batches
                last.is_over = True
                self._is_over = True
                raise StopIteration

    def _leave_epochs_before(self, epoch: Epoch) -> None:
        """Have the consumer go on to an epoch, if it is not in that."""
        if self.epochs[0] is epoch:
            return
        while self.epochs[0] is not epoch:
            self.epochs[0].is_over = True
            self.epochs.popleft()
        for lane in epoch.lanes:
            lane.pool.forgive_failed_starts()

    def _check_not_empty(self, epoch: Epoch) -> None:
        """Raise an error, once, if an epoch that has ended gave no batch, and should have."""
        if epoch.has_given:
            return
        if epoch.left_out:
            epoch.has_given = True
            raise BatchError(
                f"nothing is left of epoch {epoch.number}, of which "
                f"{counted(epoch.left_out, 'batch')} failed; look at the errors in "
                "the log, and at the storage that the dataset reads from",
                epoch=epoch.number,
            )
        if self._is_endless:
            self._leave_epochs_before(epoch)
            epoch.is_over = True
            self._is_over = True
            raise ValueError(
                f"epoch {epoch.number} has no batches, and epochs() without a number would go "
                "through such for ever; look at the sampler, or give a number"
            )

    # --- with a stage

    def _claim_from_stage(self, thread: int, stage: Stage) -> None:
        """Claim the next batch that the stage has made."""
        if not self._is_over:
            stage.check_open()
        while True:
            stage.send([work for _, work in self.claims.staged])
            if not self._may_take_ahead(stage):
                break
            try:
                self._take_ahead(thread, stage)
            except StopIteration:
                break
        staged = self.claims.staged
        if not staged:  # and so the iterator is over
            stage.close()
            raise StopIteration
        first, work = staged[0]
        outcome, error = stage.receive(work)
        stage.check_open()  # another thread may have closed it meanwhile
        claim = Claim(
            lane=first.lane, task=first.task, ordinal=first.ordinal, outcome=outcome, error=error
        )
        self._leave_epochs_before(next(epoch for epoch in self.epochs if first.lane in epoch.lanes))
        rest = staged[1:]
        counters = self.shared.counters
        # Without a call in between, and so without Ctrl-C.
        if claim.error is None:
            counters.batches += 1
        self.claims.by_thread[thread] = claim
        self.claims.staged = rest

    def _may_take_ahead(self, stage: Stage) -> bool:
        """Whether to take another batch now: one that has come, if others are on their way."""
        staged = self.claims.staged
        if self._is_over:
            return False
        if not staged:
            return True
        return len(staged) <= stage.depth and self._is_ready()

    def _is_ready(self) -> bool:
        """Return whether the next batch can be taken without waiting for a worker."""
        if self.shared.is_closed or not self.in_flight:
            return True  # an error; or it is made in this thread, or there are no more
        self._receive()
        lanes = self._in_turn(self._epoch_taken_from)
        may_be_next = self._may_be_next(lanes)
        return not lanes or any(lane.next_received() is not None for lane in may_be_next)

    def _take_ahead(self, thread: int, stage: Stage) -> None:
        """Take another batch for the stage, or an error in its place."""
        claim = self._next_claim()
        if claim.error is not None:
            without_frames(claim.error)
        work = stage.work(claim.outcome, claim.error)
        claim.outcome = None
        claim.error = None
        self._commit_claim(claim, thread, work)
