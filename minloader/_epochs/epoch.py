"""An epoch: how far it was handed over, in lanes; and what is on its way to the consumer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from minloader._epochs.failures import Losses
from minloader._epochs.feed import Feed
from minloader._epochs.lane import Lane
from minloader._epochs.position import Position
from minloader._epochs.shard_feed import ShardFeed
from minloader._epochs.stage import Stage, Work
from minloader._epochs.task import Task
from minloader._worker import lifetimes


@dataclass(eq=False, slots=True, repr=False)
class Claim:
    """A batch, or an error in its place, that an iterator has taken for a consumer.

    Attributes:
        lane: where it was taken from.
        task: that it is of; None of an error of the sampler.
        ordinal: its place in the lane; -1 likewise.
        outcome: the batch.
        error: to be raised in its place; None: there is none.
    """

    lane: Lane
    task: Task | None
    ordinal: int = -1
    outcome: Any = None
    error: BaseException | None = None


@dataclass(eq=False, slots=True, repr=False)
class Claims:
    """What was taken and has not reached a consumer, as far as is known.

    Attributes:
        lock: held while a batch is taken, and while a position is read. Reentrant: another
            loader's ``next`` may come in between.
        process: where the lock is of use: in a fork a thread that is not there may hold it.
        by_thread: on its way to a thread, by the thread's identity. If Ctrl-C comes meanwhile, the
            thread is given it again.
        staged: taken ahead of the consumer, each with the work on it in the stage, which then has
            the batch or the error; in order.
        stage: that batches are taken ahead for; None: there is none.
        is_taking: whether a batch is being taken, so that code of the user's may run.
        is_unsure: whether the last call was interrupted, so that what is under way must be made
            sure of.
    """

    lock: Any = field(default_factory=threading.RLock)
    process: object = field(default_factory=lambda: lifetimes.process)
    by_thread: dict[int, Claim] = field(default_factory=dict)
    staged: tuple[tuple[Claim, Work], ...] = ()
    stage: Stage | None = None
    is_taking: bool = False
    is_unsure: bool = False

    def get_lock(self) -> Any:
        """Return the lock; in a fork one that nobody has.

        Raises:
            RuntimeError: this is the thread of the stage, and who waits for that may hold it.
        """
        if self.stage is not None:
            self.stage.refuse_own_thread()
        return self.lock if self.process is lifetimes.process else threading.RLock()

    def go_on_here(self) -> None:
        """Have a lock for this process, a fork, in which batches are taken from now on."""
        self.is_taking = False
        self.lock = threading.RLock()
        self.process = lifetimes.process

    def all(self) -> list[Claim]:
        """Return all of them."""
        claims = list(self.by_thread.values())
        for claim, _ in self.staged:  # no generator: it takes its time with each batch
            claims.append(claim)
        return claims

    def drop(self) -> None:
        """Let go of the batches: nobody will take them. Their places remain, for the position."""
        for claim in self.by_thread.values():
            claim.outcome = None
            claim.error = None
        for _, work in self.staged:
            work.drop()


@dataclass(eq=False, repr=False)
class Epoch:
    """What of an epoch was handed over. It outlives the iterator.

    Attributes:
        lanes: one of a sampler, or one for each shard of a stream.
        has_given: whether it has given a batch, or begins behind one; also once an error has said
            that it gave none.
        is_one_of_several: whether the iterator goes through several epochs.
        claims: of the iterator.
        losses: what has failed in it.
        left_out: how many of its batches failed and were left out.
        is_over: whether the consumer was told that there are no more batches.
        is_abandoned: whether the iterator is gone.
    """

    lanes: list[Lane]
    has_given: bool
    is_one_of_several: bool
    claims: Claims
    losses: Losses
    left_out: int = 0
    is_over: bool = False
    is_abandoned: bool = False

    @property
    def number(self) -> int:
        """Number of the epoch."""
        return self.lanes[0].feed.epoch

    @property
    def is_stream(self) -> bool:
        """Whether it is of a stream."""
        return isinstance(self.lanes[0].feed, ShardFeed)

    @property
    def is_under_way(self) -> bool:
        """Whether the consumer has the iterator, and may ask it for more."""
        return not (self.is_abandoned or self.is_over)

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop goes through this epoch and others, as far as Ctrl-C has not ended it."""
        return self.is_one_of_several and self.is_under_way and not self.claims.is_unsure

    @property
    def is_taken(self) -> bool:
        """Whether the iterator has taken all that there is."""
        return all(lane.is_taken for lane in self.lanes)

    @property
    def is_drawn(self) -> bool:
        """Whether all that there is was drawn."""
        return all(lane.feed.is_ended and lane.feed.error is None for lane in self.lanes)

    @property
    def drew_nothing(self) -> bool:
        """Whether nothing was drawn so far."""
        return not any(lane.feed.next_ordinal for lane in self.lanes)

    @property
    def length(self) -> int | None:
        """Number of batches of the epoch; None if it is not known."""
        feed = self.lanes[0].feed
        return feed.length if isinstance(feed, Feed) else None

    def position(self) -> Position:
        """Return what of the epoch was handed over."""
        on_the_way = self.claims.all()
        lanes = []
        for lane in self.lanes:
            ordinals = [
                claim.ordinal
                for claim in on_the_way
                if claim.lane is lane and claim.task is not None  # not of another epoch, no error
            ]
            lanes.append(lane.position(tuple(ordinals)))
        return Position(
            epoch=self.number,
            lanes=lanes,
            is_stream=self.is_stream,
            length=self.length,
            failed=self.losses.count,
        )

    def skip(self, n: int) -> None:
        """Leave out the next batches, up to the end, or to an error of the sampler."""
        self.recover()
        self.claims.is_unsure = True
        self.lanes[0].skip(n)
        self.claims.is_unsure = False

    def recover(self) -> None:
        """Do again what the last call has left undone, if an interrupt has ended that."""
        if self.claims.is_unsure:
            for lane in self.lanes:
                lane.recover()

    def leave(self) -> None:
        """Forget what is under way: the iterator is gone."""
        self.is_abandoned = True
        for lane in self.lanes:
            lane.leave()
        self.claims.drop()
