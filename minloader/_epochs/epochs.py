"""The epochs of a loader: which comes next, where it begins, and the one under way.

::

    a state that was loaded --.
    the end of an epoch ------+--> Position --> Epoch, of lanes --> iterator
    an epoch that was left ---'       ^                                |
                                      `------ what was handed over ----'

To begin an epoch, to go on from a state, and to go on to the next epoch are one thing: an epoch is
made from a position. What the consumer was given is in the epoch under way. Its iterator need not
tell, and may be gone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from minloader import _checks as checks
from minloader._checks import brief_repr, has_epochs, is_stateful
from minloader._epochs.epoch import Epoch
from minloader._epochs.failures import Losses
from minloader._epochs.feed import Feed, SamplerSource, check_length
from minloader._epochs.iterator import Batches
from minloader._epochs.lane import Lane
from minloader._epochs.options import Shared
from minloader._epochs.position import (
    LanePosition,
    Position,
    SourceState,
    State,
    from_state,
    to_state,
)
from minloader._epochs.shard_feed import ShardFeed
from minloader._memory.files import interrupts_held
from minloader._memory.pickling import pack
from minloader._sampling.base import Sampler
from minloader._sampling.ranks import with_inner
from minloader._worker import lifetimes

logger = logging.getLogger("minloader")


class Epochs:
    """The epochs of one loader.

    Args:
        shared: what they share.
        sampler: what they are drawn from; of no use for a stream.
        is_own: whether the loader has made it: with its seed, and for a length that may change.

    Attributes:
        source: the sampler.
        shards: how many the stream has; None where the dataset is no stream.
        resume: where the next epoch begins, if a state was loaded, or batches were left out ahead.
        begun: the epochs of the iterator begun last, that of the consumer first, be it over or not;
            before an iterator was begun, and when a state was loaded, there are none.
    """

    def __init__(self, shared: Shared, sampler: Any, *, is_own: bool) -> None:
        self.shared = shared
        self.source = SamplerSource(sampler)
        is_stream = shared.job.options.is_stream
        self.shards = max(1, shared.group.num_workers) if is_stream else None
        self.resume: Position | None = None
        self.begun: deque[Epoch] = deque()
        self._is_own = is_own
        self._number: int | None = None  # of the next epoch, if the user has set it
        if isinstance(sampler, Sampler):
            self.resume = _position_of_sampler(sampler)

    @property
    def _dataset(self) -> Any:
        return self.shared.job.dataset

    # --- numbers

    @property
    def number(self) -> int:
        """Number of the next epoch."""
        if self._number is not None:
            return self._number
        if self.resume is not None:
            return self.resume.epoch
        return self.begun[0].number + 1 if self.begun else 0

    @property
    def would_abandon(self) -> bool:
        """Whether the consumer leaves an epoch if the next one begins now."""
        return bool(self.begun) and not self.begun[0].is_over

    def set_number(self, number: int) -> None:
        """Set the number of the next epoch.

        Raises:
            RuntimeError: it is one of several that an iterator goes through.
        """
        current = self.begun[0] if self.begun else None
        if current is not None and current.is_in_loop:
            raise RuntimeError(
                "the number of an epoch cannot be set while epochs() goes through them: call "
                "set_epoch before such a loop, or iterate each epoch by itself; a loop that "
                "was left goes with its iterator, or by "
                "loader.load_state_dict(loader.state_dict())"
            )
        resume = self.resume
        if resume is not None:
            resume = resume.at_epoch(number)
            if resume is None:
                self.source.forget()  # the epoch of that state was left, however far it was drawn
        self.resume = resume
        self._number = number

    # --- where an epoch begins

    def next_position(self) -> Position:
        """Return where the next epoch begins, as far as a state can say."""
        position = self._next_position()
        if self.resume is None and not self._is_own:
            position = replace(position, length=self.source.length_between())
        return position

    def _next_position(self) -> Position:
        if self.resume is not None:
            return self.resume
        if self.begun:
            former = self.begun[0]
            return self._position_after(former, self.number, is_abandoned=self.would_abandon)
        return self._first_position(self.number)

    def _first_position(self, number: int) -> Position:
        if self.shards is None:
            lane = LanePosition(source_state=SourceState(0, self.source.state_before()))
            return Position(epoch=number, lanes=[lane])
        state = checks.known_state(self._dataset)
        if state is not None:
            state = pack({"dataset": state}, down=True)
        lane = LanePosition(source_state=SourceState(0, state), beginning=state)
        return Position(epoch=number, lanes=[lane] * self.shards, is_stream=True)

    @property
    def _current(self) -> Epoch | None:
        """The epoch that the consumer is in, and may ask for more of; None between epochs."""
        if self.resume is None and self.begun and self.begun[0].is_under_way:
            return self.begun[0]
        return None

    def length(self) -> int:
        """Return the number of batches of the epoch under way, or else of the next.

        Raises:
            TypeError: it is not known.
        """
        current = self._current
        if current is None:
            return self._length_ahead()
        feed = current.lanes[0].feed
        if current.length is not None:
            return current.length
        if self.source.plans_late and isinstance(feed, Feed):
            # An iterator of the user's has none.
            length = getattr(feed.sampler_iterator, "length", None)
            return len(self.source.items) if length is None else int(length())
        raise TypeError("it was not known when the epoch was begun")

    def _length_ahead(self) -> int:
        """Return the number of batches of the next epoch; raise TypeError if it is not known."""
        source = self.source
        sampler = source.items
        if source.is_ours:
            position = self.next_position()
            source_state = position.lanes[0].source_state
            source.prepare(position.epoch, at=source_state.at, state=source_state.state)
        elif isinstance(sampler, Sized):
            source.set_epoch(self.number)
        return len(sampler)

    # --- to begin

    def begin(self, batches: Batches[Any], former: Epoch | None) -> Epoch:
        """Begin an epoch for an iterator: its first, or the one after another of its epochs.

        Args:
            batches: the iterator.
            former: the one before, if it has one.
        """
        shared = self.shared
        shared.check_open()
        shared.group.tidy()
        if former is not None:
            position = self._position_after(former, former.number + 1, is_abandoned=False)
            epoch = self._make(batches, position, former)
            batches.epochs.append(epoch)
            return epoch
        former = self.begun[0] if self.begun and not self.would_abandon else None
        epoch = self._make(batches, self._begins_at(), former)
        for lane in epoch.lanes:
            if isinstance(lane.feed, Feed):
                lane.feed.open()
        shared.group.iterators.add(batches)
        batches.shared = shared
        begun = deque([epoch])
        # Without a call in between, and so without Ctrl-C. Not before: a state that was refused is
        # not forgotten. Not after: nothing is drawn for an iterator that the loader does not know.
        batches.epochs = begun
        self.begun = begun
        self.resume = None
        self._number = None
        return epoch

    def begin_again(self, batches: Batches[Any]) -> None:
        """Have the next epoch be one whose iterator an interrupt has kept from the user."""
        if self.begun and self.begun is batches.epochs:
            position = self.begun[0].position()
            if not position.has_begun and not position.is_stream:
                position = position.without_check()  # nobody has seen its order, which may change
            self.resume = position
            self.begun = deque()

    def _begins_at(self) -> Position:
        """Return where the next epoch begins, with the length that it must have."""
        if self.resume is not None:
            position = self.next_position()
            if position.is_stream and not is_stateful(self._dataset):
                shards = [lane for lane in position.lanes if lane.source_state.state is None]
                checks.warn_rereading([lane.given for lane in shards if not lane.is_ended])
            return position
        if self.shards is not None and not self.begun:
            # Each copy of the stream begins as it is: it need not be asked for its state here.
            return Position(epoch=self.number, lanes=[LanePosition()] * self.shards, is_stream=True)
        return self._next_position()

    def _position_after(self, former: Epoch, number: int, *, is_abandoned: bool) -> Position:
        """Return where an epoch begins after another one.

        Args:
            former: the other.
            number: of the epoch.
            is_abandoned: whether the consumer has left the other: it has nothing for this one then.
        """
        lanes = [lane.feed.following(is_abandoned=is_abandoned) for lane in former.lanes]
        return Position(epoch=number, lanes=lanes, is_stream=former.is_stream)

    def _feeds(self, position: Position, former: Epoch | None) -> list[Feed | ShardFeed]:
        """Return what an epoch is drawn from; for the arguments see :meth:`_make`."""
        number = position.epoch
        if not position.is_stream:
            (lane,) = position.lanes
            return [Feed(self.source, number, lane, length=position.length)]
        return [
            ShardFeed(
                shard=shard,
                total=len(position.lanes),
                epoch=number,
                position=lane,
                follows=None if former is None else former.lanes[shard].feed.pass_to_follow,
            )
            for shard, lane in enumerate(position.lanes)
        ]

    def _make(self, batches: Batches[Any], position: Position, former: Epoch | None) -> Epoch:
        """Make an epoch.

        Args:
            batches: the iterator that it is for.
            position: where it begins; its length is one that it must have.
            former: the epoch that was read to its end just before it; None: there is none.
        """
        shared = self.shared
        feeds = self._feeds(position, former)
        lanes = [
            Lane(shared, feed, ahead=lane.ahead, arrivals=batches.arrivals)
            for feed, lane in zip(feeds, position.lanes, strict=True)
        ]
        losses = Losses(position.failed)
        if position.failed:
            # A state has those that were before it; here there may be others since.
            errors = position.errors or shared.counters.last_errors
            losses.recall(each for each in errors if each[0] == position.epoch)
        return Epoch(
            lanes=lanes,
            has_given=position.has_begun,
            is_one_of_several=batches.is_of_several,
            claims=batches.claims,
            losses=losses,
        )

    # --- states

    def state_dict(self) -> State:
        """Return the state as of what the consumer of the iterator begun last was given."""
        while True:
            begun = self.begun
            resume = self.resume
            with begun[0].claims.get_lock() if begun else nullcontext():
                if resume is None and begun and not begun[0].is_over:
                    position = begun[0].position()
                else:
                    position = self.next_position()
            if self.begun is begun and self.resume is resume:
                errors = tuple(checks.snapshot(self.shared.counters.last_errors))
                position = replace(position, errors=errors)
                batch_size = self.shared.job.options.batch_size
                return to_state(position, self.shared.group.seed, batch_size)
            # Another thread has begun an epoch meanwhile.

    def read_state(self, state: Mapping[str, Any], seed: int | None) -> tuple[Position, int]:
        """Return the position that a state is of, and its seed.

        Raises:
            TypeError, ValueError: it is no state, or not of a loader like this one.
        """
        batch_size = self.shared.job.options.batch_size
        return from_state(state, seed, is_stream=self.shards is not None, batch_size=batch_size)

    def adapt(self, position: Position, seed: int, allow: str | Iterable[str]) -> Position:
        """Return a position that was loaded, adapted to the sampler here; refuse what does not fit.

        Args:
            position: as the state says.
            seed: that of the state.
            allow: names of its arguments that may be others, if it is of ours.

        Raises:
            ValueError: the sampler was another one, as far as that can be told.
        """
        sampler = self.source.items
        if allow and not isinstance(sampler, Sampler):
            raise ValueError(
                "allow is for a sampler of minloader's, but this loader has "
                f"{brief_repr(sampler)}; drop it"
            )
        (lane,) = position.lanes
        if position.epoch:
            _refuse_own_generator(sampler, is_put_back=lane.source_state.state is not None)
        if lane.source_state.state is not None and not is_stateful(sampler):
            raise ValueError(
                f"the state has one of its sampler, but the sampler here, {brief_repr(sampler)}, "
                "has no load_state_dict; give the loader the sampler that the state was taken with"
            )
        if lane.source_state.state is None or not isinstance(sampler, Sampler):
            check_length(position.epoch, self.source.length_between(), position.length)
            return position
        seed_before = sampler.seed
        try:
            if self._is_own:
                sampler.seed = seed
            state = lane.source_state.state
            allowed = sampler._check_allowed(allow)
            dealt_before = sampler._check(state, allowed)  # an error says what does not fit
            if dealt_before:
                return _dealt_anew(position, sampler, allowed)
        finally:
            sampler.seed = seed_before
        return position

    def load(self, position: Position, seed: int) -> None:
        """Have the next epoch go on from a position.

        Args:
            position: checked.
            seed: of the state.
        """
        with interrupts_held():  # or one of these would have a seed of its own
            self.shared.group.reseed(seed)
            if self._is_own and self.source.is_ours:
                self.source.items.seed = seed
            self.supersede()
            if position.is_stream:
                self.shards = len(position.lanes)
            self.shared.counters.recall(position.errors)
            self.resume = position
            self._number = None
            self.begun = deque()

    def supersede(self) -> None:
        """Have the iterators that were begun raise an error: a state was loaded."""
        for batches in checks.snapshot(self.shared.group.iterators):
            batches.is_superseded = True

    def skip(self, n: int) -> None:
        """Leave out the next batches, of the epoch under way or else of the next."""
        current = self._current
        if current is not None:
            with current.claims.get_lock():
                is_here = current.claims.process is lifetimes.process
                if current.claims.is_taking and is_here:
                    raise RuntimeError(
                        "skip is refused while a batch is taken, whose place is still open: "
                        "on_error may return minloader.SKIP for it; skip others in the loop"
                    )
                if current.claims.stage is not None:
                    raise RuntimeError(
                        "skip is refused while prefetch, or pin_memory, takes batches ahead of "
                        "you: call it before that begins, or after "
                        "loader.load_state_dict(loader.state_dict()), and then begin another"
                    )
                current.skip(n)
                return
        position = self.next_position().skipped(n)
        if self.resume is None:
            position = replace(position, length=None)  # no state says it: it may be another yet
        self.resume = position


class Course:
    """The epochs that one iterator goes through.

    Args:
        epochs: the loader's.
        n: how many; None: endlessly many.
        until: the epoch before which to end, in place of ``n``.
    """

    def __init__(self, epochs: Epochs, n: int | None, until: int | None = None) -> None:
        self._epochs = epochs
        self._n = n
        self._last: int | None = None if until is None else until - 1

    def begin(self, batches: Batches[Any], former: Epoch | None) -> Epoch | None:
        """Begin the first of them, or the one after another; return None if there is none."""
        if former is None and self._n is not None:
            self._last = self._epochs.number + self._n - 1
        number = self._epochs.number if former is None else former.number + 1
        if self._last is not None and number > self._last:
            return None
        return self._epochs.begin(batches, former)


def _position_of_sampler(sampler: Sampler) -> Position | None:
    """Return where a sampler of ours stands, if the user has put it somewhere; else None."""
    if sampler._run is not None or sampler._begins_at is None:
        return None
    epoch, run_state = sampler._begins_at
    given = 0 if run_state["between"] else run_state["batches"]
    lane = LanePosition(given=given, source_state=SourceState(given, sampler.state_dict()))
    return Position(epoch=epoch, lanes=[lane])


def _refuse_own_generator(sampler: Any, *, is_put_back: bool) -> None:
    """Refuse a sampler whose order follows from a generator of its own, which nothing puts back.

    Args:
        sampler: one of ours, which is judged by those that it reads; or another.
        is_put_back: whether the state has one of it.
    """
    if isinstance(sampler, Sampler):
        for each in sampler.inner_samplers():
            _refuse_own_generator(each, is_put_back=is_stateful(each))
        return
    if is_put_back:
        return
    others = [each for each in with_inner(sampler) if not isinstance(each, Sampler)]
    if any(map(has_epochs, others)):
        return  # it is told what its order follows from
    for each in others:
        for name, value in getattr(each, "__dict__", {}).items():
            if type(value).__name__ in ("Random", "Generator", "RandomState"):
                raise ValueError(
                    f"the sampler, {brief_repr(sampler)}, draws its order from a generator, "
                    f"{name}, which the state does not have: in a new process it would repeat the "
                    "order of the first epoch; give it set_epoch, or state_dict and load_state_dict"
                )


def _dealt_anew(position: Position, sampler: Sampler, allowed: Sequence[str]) -> Position:
    """Return a position whose steps were dealt out otherwise as one of the sampler's."""
    (lane,) = position.lanes
    source_state = lane.source_state
    if lane.ahead:
        raise ValueError(
            "what is left is to be dealt out anew, since world_size or what limits a batch is "
            "another, but the state has batches that were delivered before their turn "
            "(in_order=False), which are others in each rank; end the epoch with the sampler that "
            "it had, or take a state from between epochs"
        )
    sampler._load(source_state.state, position.epoch, lane.given - source_state.at, allowed)
    # What comes next is another batch now.
    lane = LanePosition(
        given=lane.given, source_state=SourceState(lane.given, sampler.state_dict())
    )
    return replace(position, lanes=[lane], length=None)
