"""The lane of a sampler: its items are drawn into tasks, and a state says how to draw the rest.

::

    epoch e:   open ---- state? item item | state? item item | StopIteration: state
                |          before a task     before a task        |    end of the epoch
                |                                                 v
    epoch e+1: told its number <----------------------------- between the epochs

A sampler is asked for its state before the items of a task are drawn, and once when it has ended:
that is the state of the end of the epoch, and of the time until the next. Nothing is asked for
later, when a state of the run is wanted. How often it is asked depends on how long it takes: then a
task has an earlier state, and items are drawn again from there.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from minloader._checks import differences, shown
from minloader._epochs import failures
from minloader._epochs.lane import Lane
from minloader._epochs.pending import Bell, Pending, SamplerState
from minloader._epochs.settings import Settings
from minloader._epochs.state import (
    Note,
    State,
    check_length,
    check_state,
    digest,
    has_begun,
    sampler_place,
)
from minloader._errors import without_frames
from minloader._memory.files import interrupts_held
from minloader._pools.base import HeldItem, Pool
from minloader._sampling.base import Sampler, ranks_of
from minloader._sampling.source import Repeatable
from minloader._worker.messages import Task
from minloader._worker.run import CHUNK_SECONDS

logger = logging.getLogger("minloader")

STATE_COST = 100
"""A sampler is asked for its state only if it last took less than this fraction of the time since
then. A run that goes on draws a few items more instead."""

ERRORS = 1_000
"""Where items are drawn again, so many errors in a row are passed over, which had come before."""


class Told(Repeatable):
    """The sampler, which is told the numbers of its epochs.

    Attributes:
        readings: how often reading it was begun. It tells where the last of them is.
    """

    def __init__(self, sampler: Any) -> None:
        super().__init__("sampler", sampler)
        self.readings = 0

    @property
    def plans_late(self) -> bool:
        """Whether to find the number of its batches takes as long as to plan all of them."""
        return bool(getattr(self.items, "plans_late", False))

    def length(self) -> int | None:
        """Return the number of batches of the epoch it was told; None where it is not known."""
        if self.plans_late:
            return None  # or the first batch would wait for it
        try:
            return len(self.items)
        except Exception as error:
            logger.debug("the sampler has no length: %r", error)
            return None

    def length_between(self) -> int | None:
        """Return the number of batches of any epoch; None where the next decides it."""
        return None if hasattr(self.items, "set_epoch") else self.length()


class Source:
    """Reads the sampler for one epoch.

    Args:
        told: the sampler.
        index: place of the epoch among those of the iterator.
        epoch: number of the epoch.
        state: where the sampler is; None where that is not known.
        put_back: whether it must be put there first.
        place: of a state of the run that is gone on from; None: the epoch begins.

    Attributes:
        position: ordinal of the next item.
        state: a state of the sampler, from there or before.
        inside: when our sampler has ended: a state of it from before that.
        last: ordinal and item of the one drawn last.
        run: what ``iter`` of the sampler gave; None if it was not read.
        is_ended: whether there are no more items.
        error: raised by the sampler, and not yet on the account. It comes again until it is.
        is_inside: whether the sampler's own code runs, or what it says at its end is noted.
        length: number of batches of the epoch; None if not known when it was begun.
    """

    def __init__(
        self,
        told: Told,
        index: int,
        epoch: int,
        state: SamplerState | None,
        *,
        put_back: bool,
        place: State | None = None,
    ) -> None:
        self.told = told
        self.index, self.epoch = index, epoch
        self.state = state
        self.position = place["batches"] if place else 0
        self.ranks = ranks_of(told.items)  # each has other items, and the state of one serves all
        self.is_ended = bool(place and place["ended"])
        self.inside: SamplerState | None = None
        self.last: tuple[int, Any] | None = None
        self.check = (place["check"] if place else None) or (-1, None)
        self._place = place
        self._early = place["beyond"] if place else []  # from, to: delivered before their turn
        # Our samplers tell the truth before their first item, too. Others may be in another epoch.
        self._is_exact = isinstance(told.items, Sampler)
        self._put_back = put_back
        self.run: Any = None
        self._iterator: Any = None
        self._reading = -1
        self.error: Exception | None = None
        self.is_inside = False
        self.length: int | None = None
        self._due = 0.0  # when to ask for its state next

    @property
    def is_last(self) -> bool:
        """Whether the sampler is where this has left it: nobody has begun to read it since."""
        return self._reading == self.told.readings

    @property
    def is_open(self) -> bool:
        """Whether it has begun to read."""
        return self._iterator is not None

    def open(self, lane: Lane) -> None:
        """Begin to read, or go on to where it was. Harmless when repeated.

        Args:
            lane: to its account is added what is drawn on the way, and still to be given.

        Raises:
            RuntimeError: the sampler is an iterator that is used up.
            ValueError: the sampler does not give what it gave before.
        """
        if self._iterator is not None or (self.is_ended and not self._put_back):
            return
        told, sampler = self.told, self.told.items
        known = self._put()
        self.length = told.length()
        if self._place is not None and not self._is_exact:
            check_length(self._place, sampler, self.length)
        if self.is_ended:
            self._put_back = False
            return
        told.readings = self._reading = told.readings + 1
        iterator = self.run = iter(told)  # once: some samplers begin anew with each
        if known is not None and known.at:
            _check_put_back(sampler, iterator, known)
        at = known.at if known is not None else 0
        self._go_on(lane, iterator, at, foreign=known is not None and not self._is_exact)

    def _put(self) -> SamplerState | None:
        """Put the sampler to where it is read from; return the state that this took."""
        told, known = self.told, self.state if self._put_back else None
        if self.state is None and isinstance(told.items, Sampler):
            told.items._forget()  # the epoch before was left, however far it was drawn
        if known is None or known.at:
            told.set_epoch(self.epoch)
        if known is not None:
            told.put(known.state)
            if not known.at:
                told.set_epoch(self.epoch)
        return known

    def length_ahead(self) -> int:
        """Return the number of batches of the epoch, which has not begun.

        Raises:
            TypeError: it is not known.
        """
        sampler = self.told.items
        if self._is_exact:
            self._put()
        elif hasattr(type(sampler), "__len__"):
            self.told.set_epoch(self.epoch)
        return len(sampler)

    def _go_on(self, lane: Lane, iterator: Any, at: int, *, foreign: bool) -> None:
        """Draw up to the position, and check that the items are still the same.

        Args:
            lane: to its account is added what is still to be given.
            iterator: of the sampler.
            at: where it was, before the first item.
            foreign: whether another's sampler was put there. Then the next item is drawn, too: the
                generator of one must begin, or what was put back would hold for the next.
        """
        ordinal, expected = self.check
        early = [range(*each) for each in self._early]
        end = early[-1].stop if early else self.position  # nothing after it was delivered
        here, last, failed, is_over = at, self.last, 0, False
        drawn: list[Pending] = []
        task: Pending | None = None  # the last of them, if the next item belongs to it
        # What it says between epochs may stand for the end of one: there is nothing then.
        is_first = foreign and not at and not self.told.is_used_up
        while here < max(end, ordinal + 1, self.position + foreign):
            may_be_over, is_first = is_first, False
            try:
                found = list(itertools.islice(_taken(iterator), 1))
            except Exception as error:
                if here >= self.position:  # it comes in its turn
                    drawn.append(self.raised(error, here))
                    task = None
                if here >= end:
                    break
                failed += 1
                if failed == ERRORS:
                    raise
                continue
            if not found and may_be_over:
                iterator = iter(self.told)
                continue
            if not found:
                if here > ordinal:  # no more is known to have been there: the rest was skipped
                    is_over = True
                    break
                raise ValueError(
                    f"the state does not fit: it is at batch {self.position}, but the sampler has "
                    f"ended after {here}"
                )
            (item,) = found
            if here == ordinal and expected not in (None, self.digest(item)):
                raise ValueError(
                    f"the state does not fit: item {here} of the sampler is {shown(item)}, "
                    "but it was another one when the state was taken; the order must follow "
                    "from the sampler's arguments and set_epoch alone, and these be as they "
                    "were (also seed and number of ranks), or the sampler must have state_dict "
                    "and load_state_dict"
                )
            if here < self.position or any(here in each for each in early):
                task = None
            else:
                if task is None:
                    task = Pending(self, here, [], self.state)
                    drawn.append(task)
                task.items.append(lane.pool.hold(item))
            last, failed, here = (here, item), 0, here + 1
        with interrupts_held():
            lane.pending += drawn
            self._iterator, self._put_back, self._early = iterator, False, []
            self.position, self.last = here, last and (last[0], lane.pool.hold(last[1]))
            if is_over:
                self._end()

    def digest(self, item: Any) -> str | None:
        """Return what an item is recognized by; the number of ranks, where it is one rank's."""
        bare = item.item if isinstance(item, HeldItem) else item
        return digest(bare if self.ranks is None else self.ranks)

    def ask(self) -> None:
        """Ask the sampler for its state, unless that was done not long ago.

        After the last item it may be in the next epoch already.
        """
        now = time.perf_counter()
        first = not self.position and (self.state is not None or not self._is_exact)
        if first or now < self._due or self.position == self.length:
            return
        self.state = self._state_now()
        self._due = now + STATE_COST * (time.perf_counter() - now)

    def _state_now(self) -> SamplerState | None:
        state = self.told.state(self._iterator) if self.is_last else None
        return self.state if state is None else SamplerState(self.position, state)

    def draw(self, items: list[Any], hold: Callable[[Any], Any], most: int, until: float) -> None:
        """Add the next items to a list: so many, or fewer if that takes until later; or end.

        Each goes from the sampler into the list in one step of C, which nothing can interrupt. The
        end is known in one step too: what a sampler that has ended says of its place may be where
        another pass begins, so that nothing is drawn after it.
        """
        if self.error is not None:
            raise self.error
        taken, end = _taken(self._iterator), len(items) + most
        # A range need not be asked one by one: it gives numbers, and is never late.
        step = most if type(self._iterator) is RANGE else 1
        while (count := len(items)) < end:
            some = itertools.islice(taken, step)
            self.is_inside = True
            try:
                items.extend(some)
            except Exception as error:
                self.error, self.is_inside = error, False
                raise
            if len(items) == count:
                self._end()
                return
            self.is_inside = False
            items[-1] = item = hold(items[-1])
            self.position += len(items) - count
            self.last = self.position - 1, item
            if time.perf_counter() > until:
                return

    def _end(self) -> None:
        """Note the state of the epoch's end, which the sampler has just come to."""
        if self._is_exact and self.position:
            self.inside = self.state
        state, nothing = self._state_now(), iter(())
        self.state, self._iterator, self.is_ended, self.is_inside = state, nothing, True, False

    def raised(self, error: Exception, ordinal: int) -> Pending:
        """Return what stands for an error of the sampler in the account."""
        without_frames(error)
        failures.add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")
        return Pending(self, ordinal, [], self.state, outcomes=[failures.Raised(error)])

    def interrupted(self, task: Pending, hold: Callable[[Any], Any]) -> None:
        """Prepare to go on after an interrupt while the items of a task were drawn.

        They are drawn again if the sampler may have lost its place, as a generator has that was
        interrupted.
        """
        items = task.items
        inside = self.is_inside and task.ordinal + len(items) <= self.position
        self.is_inside = False
        if inside and not self.told.is_used_up:
            if self.last is not None and task.ordinal:  # what was before it, others have seen
                self.check = self.last[0], self.digest(self.last[1])
            self.state, self._put_back, self._iterator = task.before, True, None
            self.position, self.last = task.ordinal, None
            items.clear()
        items[-1:] = map(hold, items[-1:])
        if items:
            self.position = task.ordinal + len(items)


RANGE = type(iter(range(0)))


def _taken(iterator: Any) -> Iterator[Any]:
    """Return an iterator over the same items, for islice(), which would call ``iter``."""
    return map(next, itertools.repeat(iterator))


class SamplerLane(Lane):
    """The tasks of a sampler.

    Args:
        source: of the first epoch.
    """

    may_overtake = True

    def __init__(
        self, settings: Settings, where: Callable[[], Pool], bell: Bell, source: Source
    ) -> None:
        super().__init__(settings, where, bell)
        source.open(self)
        self._begin(source)

    def _begin(self, source: Source) -> None:
        if source.is_ended:
            end = Pending(source, source.position, [], source.state, ends=True)
            self.pending.append(end)
        self.sources.append(source)

    def begin_after(self, index: int, epoch: int, run: int) -> None:
        self._begin(self.next_source(index, epoch))

    def next_source(self, index: int, epoch: int, *, left: bool = False) -> Source:
        """Return what the items of an epoch after the one that was drawn last are drawn from.

        Args:
            index: place of the epoch among those of the iterator.
            epoch: its number.
            left: whether the consumer has left the one before, which may have been drawn to its
                end nevertheless.
        """
        before, state = self.sources[-1], None
        is_read_ahead = left and before.last is not None  # a state may have been of its end
        if before.is_ended and before.state is not None and not is_read_ahead:
            state = SamplerState(0, before.state.state)
        sampler = before.told.items  # which somebody else may have iterated: of ours that is known
        is_there = not isinstance(sampler, Sampler) or sampler._run is before.run
        return Source(before.told, index, epoch, state, put_back=not (before.is_last and is_there))

    @property
    def is_drawn(self) -> bool:
        last = self.pending[-1] if self.pending else None
        return last is not None and last.ends and last.source is self.sources[-1]

    @property
    def drew_nothing(self) -> bool:
        return not self.sources[-1].position

    def _address(self, pending: Pending) -> Task:
        alone = pending.tries > 0 or not self.settings.retries
        return Task(pending.ordinal, pending.source.epoch, pending.items, alone=alone)

    def _draw(self) -> None:
        source, begin = self.sources[-1], time.perf_counter()
        reads = self.settings.reads if self.settings.depth else 0  # here: batch by batch
        task: Pending | None = None
        try:
            source.open(self)
            if self._unsent is None and not source.is_ended:
                source.ask()
                task = Pending(source, source.position, [], source.state)
                self.pending.append(task)
                most, until = self._chunk, begin + CHUNK_SECONDS
                while most and not source.is_ended:
                    # A slow sampler must not hold up those that are there.
                    source.draw(task.items, self.pool.hold, most, until)
                    more = reads and _samples(task.items) < reads
                    most = int(more and time.perf_counter() < until)
            if source.is_ended:
                end = Pending(source, source.position, [], source.state, ends=True)
                self._follow(task, end)
        except Exception as error:
            with interrupts_held():
                source.error, source.is_inside = None, False
                added = [source.raised(error, source.position)]
                if not source.is_open:  # what cannot be begun is over
                    source.is_ended = True
                    added.append(Pending(source, source.position, [], source.state, ends=True))
                self._follow(task, *added)
                if source._is_exact:  # a run that goes on from here does not meet it again
                    source.state = source._state_now()
        except BaseException:
            if task is not None:
                with interrupts_held():
                    source.interrupted(task, self.pool.hold)
                    self._follow(task)
            raise
        self.settings.counters.drew(begin, 0 if task is None else len(task.items))

    def _follow(self, pending: Pending | None, *added: Pending) -> None:
        """Add what is no task, after the task that was drawn last if that has items."""
        if pending is None:
            self.pending.extend(added)
        else:
            self._replace(pending, [pending, *added] if pending.items else [*added])

    def skip(self, n: int) -> None:
        """Leave out the next items of the consumer's epoch, up to its end, or to an error.

        What was drawn leaves the account as if it had been handed over. What is under way need not
        be made, and what was cut off from a task is sent again. What the sampler raises comes with
        the next batch: some raise it for ever.
        """
        while n:
            mine = (each for each in self.pending if each.source is self.sources[0])
            here = next((each for each in mine if each.ends or each.is_left), None)
            if here is None:
                self._draw()
                continue
            if not here.items:
                return
            count = min(n, len(here.items) - here.given)
            n -= count
            if here.outcomes is None:
                rest = [here.part(count, len(here.items))] if count < len(here.items) else []
                self._replace(here, rest)
                here.forget()
                continue
            for k in range(here.given, here.given + count):
                here.lets_go(k)
            here.given += count

    # --- state

    def note(self) -> Note:
        """Note what of the consumer's epoch was handed over."""
        source = self.sources[0]
        mine = [each for each in self.pending if each.source is source]
        left = [each for each in mine if each.given < len(each.items)]
        left.sort(key=lambda each: each.ordinal + each.given)
        ranges = [(each.ordinal + each.given, each.ordinal + len(each.items)) for each in left]
        check, state = source.last, source.state
        if left:
            check, state = (ranges[0][0], left[0].item(left[0].given)), left[0].before
        raised = next((each for each in mine if each.is_open and not each.items), None)
        if raised is not None and (not left or raised.ordinal <= ranges[0][0]):
            state = raised.before  # it is still to come
        known: tuple[int, Any] | None = source.check if source.check[0] >= 0 else None
        if check is not None:
            known = check[0], partial(source.digest, check[1])
        # Not whether the end is there: Ctrl-C may have come before it was added.
        ended = source.is_ended and not ranges and raised is None
        if ended and source.inside is not None:
            # Another world deals out what is left, which the state of the end does not have. And
            # without workers the end is not read ahead.
            state, ended = source.inside, False
        return partial(sampler_place, ranges, source.position, ended, state, known)


def source_after(account: Any, epoch: int) -> Source:
    """Return what an epoch is drawn from after that which the consumer of an iterator is in.

    Args:
        account: of the iterator.
        epoch: number of the epoch.
    """
    lane: SamplerLane = account.lanes[0]
    if account.behind is None:
        return lane.next_source(0, epoch, left=not account.is_over)
    state = check_state(account.behind(), None, stream=False)
    known = state["sampler"] and SamplerState(**state["sampler"])
    known = None if has_begun(state) else known
    return Source(lane.sources[0].told, 0, epoch, known, put_back=True)


def _samples(items: list[Any]) -> int:
    """Return how many samples there are in some items, as far as that can be seen."""
    known = (item.item if isinstance(item, HeldItem) else item for item in items)
    return sum(len(item) if isinstance(item, list) else 1 for item in known)


# --- a state that is put back


def _check_put_back(sampler: Any, items: Any, known: SamplerState) -> None:
    """Check that a sampler that is its own iterator says again what it said then."""
    found = differences(sampler.state_dict(), known.state) if items is sampler else []
    if found:
        raise ValueError(
            f"the sampler, {shown(sampler)}, does not return to the state that it gave: "
            f"{'; '.join(found)}; its load_state_dict is at fault (lhotse's does so after filter() "
            "of a sampler: filter the cuts instead)"
        )
