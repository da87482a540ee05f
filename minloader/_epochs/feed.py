"""Reads a sampler for one epoch, from an ordinal and a state on, into tasks.

What is asked of the sampler, and in which order, is that of every :class:`Reader`. Runs in the
consumer's thread. Ctrl-C may come at any instruction: what was drawn is kept, in the task or in the
reader, which gives again what the task has not got (:meth:`Reader.give_again`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from minloader._epochs.position import LanePosition
from minloader._epochs.task import Task
from minloader._errors import add_note, breaks_in, not_the_end, without_frames
from minloader._formats import brief_repr, counted, differences
from minloader._pools.base import HeldItem
from minloader._protocols import is_stateful
from minloader._sampling.base import Run, Sampler
from minloader._sampling.digest import digest
from minloader._sampling.ranks import ranks_as_text, with_inner
from minloader._sampling.reader import Check, Reader, Source, SourceState

logger = logging.getLogger("minloader")

STATE_COST = 100
"""A sampler is asked for its state only if it last took less than this fraction of the time since
then. A run that goes on draws a few items more instead."""

RANGE = type(iter(range(0)))


class SamplerSource(Source):
    """The sampler of a loader, which several epochs may read at the same time."""

    def __init__(self, sampler: Any) -> None:
        super().__init__("sampler", sampler)

    def begin(self, epoch: int, pass_number: int) -> Any:
        iterator = super().begin(epoch, pass_number)
        if isinstance(iterator, Run):
            iterator.is_of_loader = True
        return iterator

    @property
    def state_begins_epoch(self) -> bool:
        items = self.items
        return self.is_ours or (is_of_drop_in(items) and isinstance(items.sampler, Sampler))

    @property
    def may_be_read_ahead(self) -> bool:
        """Whether it gives the same items however far ahead of the loop it is read."""
        return may_be_read_ahead(self.items)

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
            if breaks_in(error):
                raise
            logger.debug("the sampler has no length: %r", error)
            return None

    def length_between(self) -> int | None:
        """Return the number of batches of any epoch; None where the next decides it."""
        return None if self.has_epochs else self.length()


_BUILTIN = (list, tuple, range, dict, str, set, frozenset)


def may_be_read_ahead(sampler: Any) -> bool:
    """Return whether nothing that the loop does can change what it gives, as far as is known."""
    kinds = map(type, with_inner(sampler))  # a class that derives from one of these may look
    ours = "minloader", "numpy", "torch"
    return all(kind in _BUILTIN or kind.__module__.partition(".")[0] in ours for kind in kinds)


def is_of_drop_in(sampler: Any) -> bool:
    """Return whether it is what the drop-in reads the user's sampler by, without importing that."""
    return type(sampler).__module__ == "minloader.torch.order"


class SamplerFeed(Reader):
    """What the tasks of one epoch are made of.

    An error of the sampler takes no ordinal: it comes in the place of the next item.

    Args:
        source: the sampler.
        epoch: number of the epoch.
        position: where it begins.
        length: number of batches that the epoch must have; None for any.

    Attributes:
        error: raised by the sampler, and to be raised in the place of the next item.
        length: number of batches of the epoch; None if not known when it was begun.
        beginning: the state that the epoch began with, of one that keeps its place in itself.
        last: ordinal and item of the one drawn last.
    """

    error_size = 0
    keeps_last = True
    may_overtake = True

    def __init__(
        self,
        source: SamplerSource,
        epoch: int,
        position: LanePosition,
        *,
        length: int | None = None,
    ) -> None:
        known = position.source_state
        super().__init__(source, epoch, known, first=position.given, check=position.check)
        self.length = length
        self.beginning = position.beginning
        if source.state_begins_epoch or is_of_drop_in(source.items):
            self.beginning = None  # these know how to begin the next epoch, however far it was read
        elif not known.at:
            self.beginning = known.state
        self.error: Exception | None = None
        self.last: tuple[int, Any] | None = None
        self._state_due = 0.0  # when to ask for its state next

    def following(self, *, is_abandoned: bool) -> LanePosition:
        """Return where another epoch begins, after this one.

        Args:
            is_abandoned: whether the consumer has left this one: that one begins as it did then.
        """
        state = self.beginning if is_abandoned else self.end_state
        return LanePosition(source_state=SourceState(0, state))

    # --- to begin

    def open(self) -> None:
        """Begin to read, or go on to where it was. Harmless when repeated.

        Raises:
            RuntimeError: the sampler is an iterator that is used up.
            ValueError: the sampler does not give what it gave before.
        """
        is_behind = self._here < self.next
        super().open()
        if is_behind and len(self._last) > 2:  # it has given an item
            self.last = (self._here - 1, self._last[-2])

    def open_or_fail(self) -> None:
        """Open; an error of that comes in the place of the next item, and ends the epoch."""
        if self.iterator is not None and self._here >= self.next and not self._drawn:
            return  # as for nearly all items
        if self.error is not None:
            return  # Ctrl-C, or an alarm, came as that was noted, and it must not be lost
        try:
            self.open()
        except Exception as error:
            if self._note_error(error):
                raise
            self.is_ended = True

    def _or_over(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return super()._or_over(function, *args)
        except Exception as error:
            # Without a call in between: after Ctrl-C the end alone would be known.
            if self.is_ended:
                self.error = error
            raise

    def prepare(self) -> None:
        super().prepare()
        source = self.source
        if getattr(source.items, "is_put_back", False) and not self.known.at:
            # The drop-in puts its sampler back as a state is loaded.
            self._chances = 0 if source.state_begins_epoch else self.chances
        if self.iterator is None:  # one that was interrupted may count what it has lost
            length = source.length()
            if not source.is_ours:
                check_length(self.epoch, length, self.length)
            self.length = length
        if self.last is not None and (self.check is None or self.check.ordinal < self.last[0]):
            # It is read anew: the item before, which others have by now, must be the same.
            ordinal, item = self.last
            self.check = Check(ordinal, self.digest(ordinal, item))

    def _iterate(self) -> None:
        super()._iterate()
        items = self.source.items
        if self.known.at and self.known.state is not None and self.iterator is items:
            _check_put_back(items, self.known)

    def digest(self, ordinal: int, item: Any) -> str | None:
        """Return what an item is recognized by; the number of ranks, where it is one rank's."""
        # Each rank has other items, and the state of one serves all.
        ranks = ranks_as_text(self.source.items)
        if ranks is not None:
            return ranks
        if hasattr(self.iterator, "digest_at"):  # the drop-in's is of all items so far
            known: str | None = self.iterator.digest_at(ordinal)
            return known
        if isinstance(item, HeldItem):
            item = item.item
        return digest(item)

    def _misfit(self, ordinal: int, *item: Any) -> ValueError:
        from minloader._diagnosis.mistakes import other_sampler  # which only an error needs

        assert self.check is not None
        former = str(self.check.digest)
        return other_sampler(self.source.items, former, self.next, ordinal, *item)

    # --- states

    def note_state(self) -> Exception | None:
        """Ask the sampler for its state, unless that was done not long ago.

        It is not asked behind an item that is known to be the last: it may be in the next epoch.

        Returns:
            The error of that. It counts only if there is another item: many have no state behind
            the last.
        """
        now = time.perf_counter()
        # A state at 0 must be from before the epoch, and another's sampler has begun that by now.
        if not self.next and not self.source.is_ours:
            return None
        if now < self._state_due or self.next == self.length:
            return None
        try:
            self.known = self._current_state()
        except Exception as error:
            if breaks_in(error):
                raise
            return error
        self._state_due = now + STATE_COST * (time.perf_counter() - now)
        return None

    def _current_state(self) -> SourceState:
        """Return the sampler's state at the next item; the last one if it has none."""
        if self._drawn:
            return self.known  # it is farther on: that was drawn, and Ctrl-C came
        state = self.source.state(self.iterator, self.pass_number)
        return self.known if state is None else SourceState(self.next, state)

    def state_behind_error(self) -> SourceState:
        """Return a state such that a run that goes on does not meet the error again."""
        if self.source.is_ours:
            try:
                return self._current_state()
            except Exception as error:  # it is drawn up to there, and what fails is passed over
                if breaks_in(error):
                    raise
        return self.known

    def check_at(self, given: int, head: Task | None) -> Check | None:
        """Return what tells whether the sampler gives again what it has given.

        Args:
            given: how many items were handed over.
            head: the first task of which something was not.
        """
        if head is not None and given >= head.first:
            return Check(given, self.digest(given, head.items[given - head.first]))
        if self.last is not None:
            ordinal, item = self.last
            return Check(ordinal, self.digest(ordinal, item))
        return self.check

    # --- to draw

    def draw(self, task: Task, hold: Callable[[Any], Any], most: int, until: float) -> None:
        """Add the next items to a task: so many, or fewer if that takes until later; or end.

        What the sampler raises is in ``error`` then.
        """
        items = task.items
        # A range need not be asked one by one: it is never late, and gives no lists, which must be
        # held.
        is_range = type(self.iterator) is RANGE
        most += len(items)
        try:
            while len(items) < most and not self.is_ended:
                drawn = self.take(most - len(items) if is_range else 1)
                items += drawn if is_range else map(hold, drawn)
                if time.perf_counter() > until:
                    return
        except Exception as error:
            if self._note_error(error):
                raise

    def finish(self, task: Task) -> None:
        """Note that all items of a task were drawn. Harmless when repeated."""
        if task.items:
            self.last = (task.stop - 1, task.items[-1])
        has_none = self.known.state is None and not self.source.is_ours
        may_be_asked = not self.is_ended and self.error is None
        if task.items and not task.first and has_none and may_be_asked:
            # Where the epoch before was left, no state could say how this one begins. An error of
            # this counts only if there is another item: then it comes again.
            self.note_state()

    def _note_error(self, error: Exception) -> bool:
        """Have an error raised in its turn. Return whether it breaks in: that is raised now."""
        noted = self.error
        if noted is None:
            self.error = error  # first: it may not come again
        if breaks_in(error):
            self.error = noted
            return True
        self.fail(error)
        return False

    def fail(self, error: Exception) -> None:
        """Have an error of the sampler raised in the place of the next item."""
        error = not_the_end(error, "the sampler")
        self.error = error
        without_frames(error)
        add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")


def check_length(epoch: int, length: int | None, wanted: int | None) -> None:
    """Refuse a sampler if its epoch has another number of batches, as far as these are known."""
    if length is not None and wanted is not None and length != wanted:
        raise ValueError(
            f"the sampler has {counted(length, 'batch')} in epoch {epoch}, but the state is of one "
            f"with {wanted}; give the loader the sampler that the state was taken with"
        )


def _check_put_back(sampler: Any, source_state: SourceState) -> None:
    """Check that a sampler that is its own iterator says again what it said then."""
    changes = differences(sampler.state_dict(), source_state.state) if is_stateful(sampler) else []
    if changes:
        raise ValueError(
            f"the sampler, {brief_repr(sampler)}, does not return to the state that it gave: "
            f"{'; '.join(changes)}; its load_state_dict is at fault (lhotse's does so after "
            "filter() of a sampler: filter the cuts instead)"
        )
