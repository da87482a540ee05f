"""An epoch: whose turn it is, and what comes next. A position is the truth, the rest is a cache.

::

    fill: lane.draw ---> pool ---> wait ---> lane.ready ---> Delivery ---> the iterator's commit

An epoch of a sampler has one lane, one of a stream a lane for each shard. The lanes take turns:
next is the one that has delivered the fewest batches.

Guarantees:

* Batches come in the order of the sampler, or with ``in_order=False`` as they get ready.
* At most ``prefetch_factor x num_workers`` tasks are under way.
* What the sampler or a batch raises has a place among the batches, and what is behind it comes.
* After anything that broke in, and may have torn a lane, the lanes are made again from the
  position, as for a state that was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minloader._epochs.failures import Failures
from minloader._epochs.feed import SamplerFeed, SamplerSource
from minloader._epochs.lane import MISSING, Coming, Lane
from minloader._epochs.options import Shared
from minloader._epochs.position import Ordinals, Position, deliver
from minloader._epochs.task import Delivery, Task
from minloader._errors import SKIP, BatchError
from minloader._formats import counted
from minloader._memory import forks
from minloader._pools.base import Pool
from minloader._pools.interrupts import Interrupts
from minloader._pools.ticket import Bell
from minloader._sampling.reader import SourceState
from minloader._worker.messages import Failure

if TYPE_CHECKING:
    from minloader._diagnosis.shard_watch import ShardWatch

TURN = attrgetter("delivered")
"""By which lanes take turns: the least comes first, and of equals the lowest number."""

NEXT_UNSENT = attrgetter("next_unsent")


@dataclass(eq=False, slots=True, repr=False)
class Commit:
    """What is stored when something is delivered, and what that is."""

    lane: Lane
    delivered: int
    ahead: Ordinals
    source_state: SourceState
    next_error: Exception | None
    held: tuple[Delivery, ...]
    has_given: bool
    outcomes: list[Any]
    n: int
    delivery: Delivery


AT_HAND: Any = object()
"""In place of a commit: the batch is at hand."""


class Epoch:
    """What of an epoch was delivered, and what is under way. It outlives the iterator.

    Args:
        shared: what all epochs of the loader share.
        source: the sampler; of no use for a stream.
        start: where it begins; its length is one that it must have.
        interrupts: of the iterator.
        follows: the numbers of the passes that were read to their end just before it, shard by
            shard; empty: there are none.

    Attributes:
        number: of the epoch.
        is_stream: whether it is of a stream.
        lanes: one of a sampler, or one for each shard.
        is_held: whether somebody takes batches ahead of the consumer.
        held: what was delivered to a wrapper, such as ``prefetch``, and not yet to the consumer.
        has_given: whether it has given a batch, or begins behind one; also once an error has said
            that it gave none.
        left_out: how many of its batches failed and were left out.
        is_over: whether the consumer was told that there is no more.
        is_abandoned: whether the iterator is gone.
    """

    def __init__(
        self,
        shared: Shared,
        source: SamplerSource,
        start: Position,
        interrupts: Interrupts,
        follows: list[int | None],
    ) -> None:
        self.shared = shared
        self.number = start.epoch
        self.is_stream = start.is_stream
        self.has_given = start.has_begun
        self.left_out = 0
        self.is_over = False
        self.is_abandoned = False
        self._generation = shared.generation
        self._source = source
        self._interrupts = interrupts
        self._bell = Bell()
        self._shard_watch: ShardWatch | None = None
        self.is_held = False
        self._compares = False  # whether batches of shards are to be compared yet
        self._failures = Failures(shared, start)
        self.lanes: list[Lane] = []
        self.begin_at(start, (), follows)
        if self.is_stream and len(self.lanes) > 1:
            from minloader._diagnosis.shard_watch import ShardWatch  # other epochs have none

            compares = not self.has_given
            self._shard_watch = ShardWatch(len(self.lanes), shared, compares=compares)
            self._compares = not self._shard_watch.is_done

    def begin_at(
        self, position: Position, held: tuple[Delivery, ...], follows: list[int | None]
    ) -> None:
        """Begin at a position, whatever is under way."""
        shared = self.shared
        bell = self._bell
        call = self._interrupts.let_through
        if self.is_stream:
            from minloader._epochs.shard_feed import shard_lanes  # loaders of samplers have none

            # A copy of the stream that is begun again must know that it is in the same pass.
            passes = [lane.feed.pass_number for lane in self.lanes]
            lanes = shard_lanes(position, shared, passes, follows, bell, call)
        else:
            (start,) = position.lanes
            feed = SamplerFeed(self._source, self.number, start, length=position.length)
            lanes = [Lane(0, shared, feed, start, bell, call)]
        # Without a call in between.
        self.lanes = lanes
        self._open = lanes  # those that are not known to be over
        self.held = held

    def _begin_again(self) -> None:
        """Make the lanes again: something that broke in may have torn them."""
        position = self._position(())
        self._leave_lanes()
        self.begin_at(position, self.held, [])

    # --- where it is

    @property
    def is_under_way(self) -> bool:
        """Whether the consumer has the iterator, and may ask it for more."""
        return not (self.is_abandoned or self.is_over)

    @property
    def length(self) -> int | None:
        """Number of batches of the epoch; None if it is not known."""
        return self.lanes[0].feed.length  # type: ignore[no-any-return]

    @property
    def pools(self) -> list[Pool]:
        """Where its batches are made now."""
        return [lane.pool for lane in self.lanes] if self.is_under_way else []

    @property
    def passes(self) -> list[int]:
        """Numbers of its passes over shards, or over a sampler, that may still be read on."""
        return [lane.feed.pass_number for lane in self.lanes] if self.is_under_way else []

    @property
    def in_flight(self) -> int:
        """Tasks under way."""
        return 0 if self.is_abandoned else sum([len(lane.tasks) for lane in self.lanes])

    def position(self) -> Position:
        """Return what the consumer was given. Any thread may ask, whatever is done meanwhile."""
        while True:
            lanes = self.lanes
            held = self.held
            delivered = [(lane.delivered, lane.ahead) for lane in lanes]
            position = self._position(held)
            is_same = lanes is self.lanes and held is self.held
            if is_same and delivered == [(lane.delivered, lane.ahead) for lane in lanes]:
                return position

    def _position(self, held: tuple[Delivery, ...]) -> Position:
        lanes = []
        for lane in self.lanes:
            mine = [(each.task, each.ordinal) for each in held if each.lane == lane.number]
            lanes.append(lane.position(mine))
        return Position(
            epoch=self.number,
            lanes=lanes,
            is_stream=self.is_stream,
            length=self.length,
            failed=self._failures.count,
        )

    def following(self, number: int) -> Position:
        """Return where an epoch begins behind this one, be it over or left."""
        lanes = [lane.feed.following(is_abandoned=not self.is_over) for lane in self.lanes]
        return Position(epoch=number, lanes=lanes, is_stream=self.is_stream)

    def passes_to_follow(self) -> list[int | None]:
        """Return the passes that the next epoch's may go on from with the same copies."""
        if not self.is_stream or not self.is_over:
            return []
        return [lane.feed.pass_to_follow for lane in self.lanes]

    def skip(self, n: int) -> None:
        """Leave out the next batches.

        Raises:
            RuntimeError: somebody takes batches ahead of the consumer, or takes one now.
        """
        if self._interrupts.is_on:
            raise RuntimeError(
                "skip is refused while a batch is taken, whose place is still open: "
                "on_error may return minloader.SKIP for it; skip others in the loop"
            )
        if self.is_held:
            raise RuntimeError(
                "skip is refused while prefetch, or pin_memory, takes batches ahead of "
                "you: call it before that begins, or after "
                "loader.load_state_dict(loader.state_dict()), and then begin another"
            )
        (lane,) = self.lanes
        position = self.position().skipped(n).lanes[0]
        # Without a call in between.
        lane.delivered = position.given
        lane.ahead = position.ahead
        lane.forget_delivered()

    def leave(self) -> None:
        """Forget what is under way: the iterator is gone."""
        self.is_abandoned = True
        self._leave_lanes()
        for each in self.held:
            each.drop()

    def _leave_lanes(self) -> None:
        for lane in self.lanes:
            lane.leave()

    # --- what comes next

    @property
    def is_ready(self) -> bool:
        """Whether what comes next can be taken without waiting for a worker."""
        if self.shared.is_closed or not self.in_flight:
            return True  # an error; or it is made in this thread, or there is no more
        lanes = [lane for lane in self.lanes if not lane.is_over]
        lanes.sort(key=TURN)
        may_be_next = lanes[:1] if self.shared.options.in_order else lanes
        return not lanes or any(lane.has_come for lane in may_be_next)

    def at_hand(self, process: object) -> tuple[Lane, Any]:
        """Return the lane whose turn it is, and its next batch; MISSING if there is more to do.

        Args:
            process: in which the iterator was begun.
        """
        lanes = self._open
        if (
            not lanes
            or self._compares
            or self._generation != self.shared.generation
            or process is not forks.process
        ):
            return self.lanes[0], MISSING
        lane = lanes[0] if len(lanes) == 1 else min(lanes, key=TURN)
        return lane, lane.at_hand()

    def take(self, *, is_plain: bool) -> Commit | None:
        """Return what is to be stored when the next batch is delivered; None at the end.

        Args:
            is_plain: whether nothing is done with it but to hand it over. If it is at hand then,
                that is all that is returned.

        Raises:
            RuntimeError: the loader is closed, or another state was loaded.
        """
        if self._generation != self.shared.generation:
            self.shared.check_open()
            raise RuntimeError(
                "load_state_dict was called after this iterator was begun; call iter(loader) to "
                "continue from that state"
            )
        if self._interrupts.is_unsure:
            self._begin_again()
        self._interrupts.is_unsure = True
        while True:
            lane, coming = self._next()
            if coming is Coming.END:
                delivery = self._last_error()
                if delivery is None:
                    return None
                return self._commit(lane, delivery, is_last=True)
            if coming is Coming.ERROR:
                delivery = self._no_batch(lane, lane.feed.error)
                return self._commit(lane, delivery)
            may_be_at_hand = is_plain and not self._compares
            if may_be_at_hand and lane is min(self._open, key=TURN) and lane.is_at_hand():
                return AT_HAND  # type: ignore[no-any-return]
            delivery = self._delivery(lane)
            if delivery.error is not None or delivery.outcome is not SKIP:
                return self._commit(lane, delivery)
            delivered, ahead = deliver(lane.delivered, lane.ahead, delivery.ordinal)
            self.shared.counters.skipped += 1
            self.left_out += delivery.has_failed
            # Without a call in between.
            lane.delivered = delivered
            lane.ahead = ahead

    def _no_batch(self, lane: Lane, error: BaseException | None) -> Delivery:
        """Return an error that has a place between two batches."""
        feed = lane.feed
        check = feed.check_at(lane.delivered, None)
        place = Task(lane.delivered, [], feed.known, check)
        return Delivery(lane.number, place, -1, error=error)

    def _last_error(self) -> Delivery | None:
        """Return an error, once, if the epoch has ended and gave no batch since all failed."""
        if self.has_given or not self.left_out:
            return None
        text = (
            f"nothing is left of epoch {self.number}, of which "
            f"{counted(self.left_out, 'batch')} failed; look at the errors in "
            "the log, and at the storage that the dataset reads from"
        )
        return self._no_batch(self.lanes[0], BatchError(text, epoch=self.number))

    def _commit(self, lane: Lane, delivery: Delivery, *, is_last: bool = False) -> Commit:
        feed = lane.feed
        reply = delivery.task.reply
        is_batch = delivery.ordinal >= 0
        delivered = lane.delivered
        ahead = lane.ahead
        source_state = feed.known
        if is_batch:
            delivered, ahead = deliver(delivered, ahead, delivery.ordinal)
        elif not self.is_stream:
            source_state = feed.state_behind_error()
        return Commit(
            lane=lane,
            delivered=delivered,
            ahead=ahead,
            source_state=source_state,
            next_error=feed.error if is_batch else None,
            held=(*self.held, delivery) if self.is_held else self.held,
            has_given=self.has_given or is_last or delivery.error is None,
            outcomes=reply.outcomes if is_batch and reply is not None else [None],
            n=delivery.ordinal - delivery.task.first if is_batch else 0,
            delivery=delivery,
        )

    def _delivery(self, lane: Lane) -> Delivery:
        task = lane.current
        assert task is not None
        reply = task.reply
        assert reply is not None
        ordinal = lane.next_in(task)
        n = ordinal - task.first
        known = reply.outcomes[n]
        if type(known) is Delivery:
            return known  # its failures were counted, and on_error was asked
        delivery = Delivery(lane.number, task, ordinal, task.unpack(n))
        batch = lane.ordinal_in_epoch(ordinal)
        samples = [(sample, text) for each, sample, text in reply.failed if each == n]
        if samples or type(delivery.outcome) is Failure:
            self._failures.settle(delivery, batch, samples, self._interrupts.let_through)
            reply.outcomes[n] = delivery
        elif self._compares and delivery.outcome is not SKIP:
            assert self._shard_watch is not None
            self._shard_watch.compare(lane, delivery.outcome)
            self._compares = not self._shard_watch.is_done
        return delivery

    # --- whose turn it is

    def _next(self) -> tuple[Lane, Coming]:
        """Return the lane that has what comes next, and what that is, as soon as it is here."""
        begin = perf_counter()
        has_grown = False
        while self._open:
            if self.shared.is_closed:
                self.shared.check_open()
            lanes = sorted(self._open, key=TURN)
            first = lanes[0]
            may_be_next = lanes[:1] if self.shared.options.in_order else lanes
            for lane in may_be_next:
                former = lane.current
                coming = lane.look()
                if coming is Coming.BATCH:
                    if lane.current is former:
                        return lane, coming
                    self.fill()  # before the consumer gets to work
                if coming is Coming.BATCH or coming is Coming.ERROR:
                    self.shared.counters.count_task_wait(begin)
                    return lane, coming
            if any(lane.is_over for lane in may_be_next):
                self._open = [lane for lane in self._open if not lane.is_over]
                continue
            # It is sent even where there is no room, since the consumer waits for it. With
            # ``num_workers=0`` there never is, and this is what makes a batch.
            is_next_unsent = not first.tasks or first.tasks[0].is_unsent
            is_sent = is_next_unsent and first.send_more()
            if self.fill() or is_sent or not first.tasks:
                continue  # without a task, the sampler has ended or failed just now
            if not has_grown:
                for lane in may_be_next:
                    lane.grow()
                has_grown = True
            self._interrupts.let_through(self._bell.wait)
            for lane in self.lanes:
                lane.receive_all()
        self.shared.counters.count_task_wait(begin)
        if self._shard_watch is not None:
            self._shard_watch.count_empty(self.lanes)
        return self.lanes[0], Coming.END

    def fill(self) -> bool:
        """Have as many tasks under way as may be. Return whether any was sent."""
        room = self.shared.group.max_in_flight - self.in_flight
        has_sent = False
        while room > 0:
            lanes = self.lanes
            if len(lanes) > 1:  # in the order in which they are taken from, if there is one
                key: Any = NEXT_UNSENT if self.shared.options.in_order else _by_work
                lanes = sorted(lanes, key=key)
            if not any(lane.send_more() for lane in lanes):
                break
            has_sent = True
            room -= 1
        return has_sent


def _by_work(lane: Lane) -> tuple[int, int]:
    return len(lane.tasks), lane.delivered
