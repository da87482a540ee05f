"""The course of a loader: which epoch comes next, where it begins, and the one under way.

::

    a state that was loaded, skip, set_epoch --> Cursor --> Position --> Epoch --> iterator
                                                   ^                       |
                                                   `-----------------------` begun

To begin an epoch, to go on from a state, and to go on to the next epoch are one thing: an epoch is
made from a position. What the consumer was given is in the epoch begun last. Its iterator need not
tell, and may be gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any, NamedTuple

from minloader import _protocols as protocols
from minloader._epochs.epoch import Epoch
from minloader._epochs.feed import SamplerSource, check_length
from minloader._epochs.options import Shared
from minloader._epochs.position import (
    LanePosition,
    Position,
    State,
    from_state,
    to_state,
)
from minloader._errors import not_the_end
from minloader._memory.pickling import pack
from minloader._pools.interrupts import Interrupts, interrupts_held
from minloader._protocols import is_stateful
from minloader._sampling.base import Sampler
from minloader._sampling.ranks import dealer_of_process
from minloader._sampling.reader import SourceState


class Cursor(NamedTuple):
    """Where a loader is. It is never changed, but replaced whole.

    Attributes:
        epoch: begun last; None before any was, and once a state was loaded.
        start: where the next epoch begins, if the user has said that: by a state, or by ``skip``.
        number: of the next epoch, if the user has set it.
    """

    epoch: Epoch | None = None
    start: Position | None = None
    number: int | None = None


class Course:
    """The epochs of one loader, one after another.

    Args:
        shared: what they share.
        sampler: what they are drawn from; of no use for a stream.
        is_own: whether the loader has made it: with its seed, and for a length that may change.

    Attributes:
        source: the sampler.
        shards: how many the stream has; None where the dataset is no stream.
        cursor: where the loader is.
    """

    def __init__(self, shared: Shared, sampler: Any, *, is_own: bool) -> None:
        self.shared = shared
        self.source = SamplerSource(sampler)
        is_stream = shared.job.options.is_stream
        if is_stream:  # workers that are forked before the first epoch have it then
            import minloader._epochs.shard_feed  # noqa: F401

        self.shards = max(1, shared.group.num_workers) if is_stream else None
        self._is_own = is_own
        self._has_begun = False  # whether any epoch has
        start = _position_of_sampler(sampler) if isinstance(sampler, Sampler) else None
        self.cursor = Cursor(start=start)

    @property
    def _dataset(self) -> Any:
        return self.shared.job.dataset

    @property
    def number(self) -> int:
        """Number of the next epoch."""
        cursor = self.cursor
        if cursor.number is not None:
            return cursor.number
        if cursor.start is not None:
            return cursor.start.epoch
        return 0 if cursor.epoch is None else cursor.epoch.number + 1

    def set_number(self, number: int) -> None:
        """Set the number of the next epoch."""
        cursor = self.cursor
        start = cursor.start
        current = self._current
        if current is not None and current.number == number:
            from minloader._diagnosis.rarely_meant import report_again

            report_again(number)
        if start is not None:
            start = start.at_epoch(number)
            if start is None:
                self.source.forget()  # the epoch of that state was left, however far it was drawn
        self.cursor = cursor._replace(start=start, number=number)

    # --- where an epoch begins

    def next_position(self) -> Position:
        """Return where the next epoch begins, as far as a state can say."""
        cursor = self.cursor
        if cursor.start is not None:
            return cursor.start
        if cursor.epoch is None:
            position = self._first_position(self.number)
        else:
            position = cursor.epoch.following(self.number)
        if not self._is_own:
            position = replace(position, length=self.source.length_between())
        return position

    def _first_position(self, number: int) -> Position:
        if self._has_begun and not self.source.is_ours:
            # Where it was read to says nothing of another epoch.
            lanes = [LanePosition()] * (self.shards or 1)
            return Position(epoch=number, lanes=lanes, is_stream=self.shards is not None)
        if self.shards is None:
            lane = LanePosition(source_state=SourceState(0, self.source.state_before()))
            return Position(epoch=number, lanes=[lane])
        state = protocols.known_state(self._dataset)
        if state is not None:
            state = pack({"dataset": state}, down=True)
        lane = LanePosition(source_state=SourceState(0, state), beginning=state)
        return Position(epoch=number, lanes=[lane] * self.shards, is_stream=True)

    def _begins_at(self) -> Position:
        """Return where the next epoch begins, with the length that it must have."""
        start = self.cursor.start
        if start is None:
            if self.shards is not None and self.cursor.epoch is None:
                # Each copy of the stream begins as it is: it need not be asked for its state here.
                lanes = [LanePosition()] * self.shards
                return Position(epoch=self.number, lanes=lanes, is_stream=True)
            return replace(self.next_position(), length=None)
        if start.is_stream and not is_stateful(self._dataset):
            shards = [lane for lane in start.lanes if lane.source_state.state is None]
            again = [lane.given for lane in shards if not lane.is_ended]
            if any(again):
                from minloader._diagnosis.shard_watch import report_rereading

                report_rereading(again)
        return start

    @property
    def _current(self) -> Epoch | None:
        """The epoch that the consumer is in, and may ask for more of; None between epochs."""
        cursor = self.cursor
        if cursor.start is None and cursor.epoch is not None and cursor.epoch.is_under_way:
            return cursor.epoch
        return None

    def length(self) -> int:
        """Return the number of batches of the epoch under way, or else of the next.

        Raises:
            TypeError: it is not known.
        """
        current = self._current
        if current is None:
            return self.length_ahead()
        feed = current.lanes[0].feed
        if current.length is not None:
            return current.length
        if self.source.plans_late:
            # An iterator of the user's has none.
            counts = getattr(feed.iterator, "counts", None)
            return len(self.source.items) if counts is None else int(counts()[0])
        raise TypeError("it was not known when the epoch was begun")

    def length_ahead(self) -> int:
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

    def begin(self, interrupts: Interrupts) -> Cursor:
        """Begin the next epoch for an iterator.

        Returns:
            Where the loader is then. Who has the iterator is to note it, at once.
        """
        shared = self.shared
        shared.check_open()
        shared.group.tidy()
        if dealer_of_process().ranks > 1:
            from minloader._diagnosis.undealt import look_at_ranks

            look_at_ranks(self.source.items)
        former = self.cursor.epoch
        follows = [] if former is None else former.passes_to_follow()
        epoch = Epoch(shared, self.source, self._begins_at(), interrupts, follows)
        if not epoch.is_stream:
            feed = epoch.lanes[0].feed
            try:
                interrupts.let_through(feed.open)
            except Exception as error:
                feed.error = None  # it is raised now, and has frames that lead here
                if isinstance(error, StopIteration):
                    raise not_the_end(error, "the sampler") from error
                raise
        shared.group.epochs.add(epoch)
        self._has_begun = True
        return Cursor(epoch=epoch)

    # --- states

    def state_dict(self) -> State:
        """Return the state as of what the consumer of the iterator begun last was given."""
        while True:
            cursor = self.cursor
            epoch = cursor.epoch
            if cursor.start is None and epoch is not None and not epoch.is_over:
                position = epoch.position()
            else:
                position = self.next_position()
            if self.cursor is cursor:
                break  # else another thread has begun an epoch meanwhile
        errors = tuple(protocols.snapshot(self.shared.counters.last_errors))
        batch_size = self.shared.job.options.batch_size
        return to_state(replace(position, errors=errors), self.shared.group.seed, batch_size)

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
        from minloader._diagnosis.mistakes import check_sampler_state

        sampler = self.source.items
        check_sampler_state(sampler, position, allow)
        (lane,) = position.lanes
        if lane.source_state.state is None or not isinstance(sampler, Sampler):
            check_length(position.epoch, self.source.length_between(), position.length)
            return position
        seed_before = sampler.seed
        try:
            if self._is_own:
                sampler.seed = seed
            state = lane.source_state.state
            allowed = sampler._checked_allowed(allow)
            dealt_before = sampler._checked(state, allowed)  # an error says what does not fit
            if dealt_before:
                from minloader._sampling.dealt import dealt_anew  # few states need it

                given = lane.given
                known = lane.source_state
                known = dealt_anew(sampler, known, position.epoch, given, lane.ahead, allowed)
                # What comes next is another batch now.
                lane = LanePosition(given=given, source_state=known)
                return replace(position, lanes=[lane], length=None)
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
            if position.is_stream:
                self.shards = len(position.lanes)
            self.shared.counters.recall(position.errors)
            self.shared.generation += 1
            self.cursor = Cursor(start=position)

    def skip(self, n: int) -> None:
        """Leave out the next batches, of the epoch under way or else of the next."""
        current = self._current
        if current is not None:
            current.skip(n)
            return
        cursor = self.cursor
        position = self.next_position().skipped(n)
        if cursor.start is None:
            position = replace(position, length=None)  # no state says it: it may be another yet
        self.cursor = cursor._replace(start=position)


def _position_of_sampler(sampler: Sampler) -> Position | None:
    """Return where a sampler of ours stands, if the user has put it somewhere; else None."""
    if sampler._run is not None or sampler._epoch_start is None:
        return None
    epoch, run_state = sampler._epoch_start
    given = 0 if run_state["between"] else run_state["batches"]
    lane = LanePosition(given=given, source_state=SourceState(given, sampler.state_dict()))
    return Position(epoch=epoch, lanes=[lane])
