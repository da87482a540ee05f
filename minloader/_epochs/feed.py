"""Reads a sampler for one epoch, from an ordinal and a state on: to begin is to go on from 0.

::

    told its epoch, or put back ---> iter ---> passed over ---> drawn, task by task ---> its end
         (a state)                             up to the ordinal       |                  (a state)
                                                                       `-- asked for its state

This is the contract with every sampler: the number of the epoch is told by ``set_epoch``, if there
is one; a state, if there is one, is put back by ``load_state_dict``; then comes ``iter``; then
items are passed over up to the ordinal. Item k after that is item k: one of them is compared. There
is one tolerance: what was put back, and ends before it gave anything, is begun once more.

Runs in the consumer's thread. Ctrl-C may come at any instruction. Then :meth:`Feed.recover` makes
sure that it is known again where the sampler is: what it gave is kept, unless it has a state or its
own code was interrupted. Then it is read anew.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from minloader._checks import brief_repr, counted, differences, is_stateful
from minloader._epochs import failures
from minloader._epochs.position import Check, LanePosition, SourceState
from minloader._epochs.task import Task
from minloader._errors import not_the_end, without_frames
from minloader._memory.pickling import unpack
from minloader._pools.base import HeldItem
from minloader._sampling.base import Sampler
from minloader._sampling.digest import digest
from minloader._sampling.ranks import is_of_ranks, ranks_as_text, with_inner
from minloader._sampling.source import Source, pass_numbers
from minloader._worker.messages import Shard

logger = logging.getLogger("minloader")

STATE_COST = 100
"""A sampler is asked for its state only if it last took less than this fraction of the time since
then. A run that goes on draws a few items more instead."""

MAX_PASSED_ERRORS = 1_000
"""Errors in a row that are passed over where items are drawn again: they had come before, too."""

BLOCK = 4_096
"""Items that are passed over in one step."""

DONE: Final = object()
"""Added to what was drawn in the same step of C: it tells that this was not interrupted."""

RANGE = type(iter(range(0)))


class SamplerSource(Source):
    """The sampler of a loader, which several epochs may read at the same time."""

    def __init__(self, sampler: Any) -> None:
        super().__init__("sampler", sampler)

    @property
    def state_begins_epoch(self) -> bool:
        """Whether a state from between two epochs always puts it at the beginning of one.

        Those of ours do. Another's may put it at the end of the one before.
        """
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


class Feed:
    """What the tasks of one epoch are made of.

    Args:
        source: the sampler.
        epoch: number of the epoch.
        position: where it begins.
        length: number of batches that the epoch must have; None for any.

    Attributes:
        pass_number: of this pass over the sampler, which tells it from others in the same epoch.
        next_ordinal: of the next item to draw.
        source_state: a state of the sampler, from there or before.
        check: of an item that was given before, for when it comes again; None: there is none.
        end_state: its state at the end of the epoch; None if it has none, or that is not known.
        is_ended: whether there are no more items.
        error: raised by the sampler, and to be raised in the place of the next item.
        length: number of batches of the epoch; None if not known when it was begun.
        last: ordinal and item of the one drawn last.
        drawing: the task whose items are being drawn.
    """

    may_overtake = True
    # What only shards have.
    shard = 0
    total = 1
    beginning = None
    has_failed = False
    pass_to_follow = None

    def __init__(
        self,
        source: SamplerSource,
        epoch: int,
        position: LanePosition,
        *,
        length: int | None = None,
    ) -> None:
        self.source = source
        self.pass_number = next(pass_numbers)
        self.epoch = epoch
        self.next_ordinal = position.given
        self.source_state = position.source_state
        self.check = position.check
        self.length = length
        self.end_state: Any = None
        self.is_ended = False
        self.error: Exception | None = None
        self.last: tuple[int, Any] | None = None
        self.drawing: Task | None = None
        self.sampler_iterator: Any = None  # what ``iter`` of the sampler gave
        # What items are drawn from: that iterator; None before it is opened, and where it is to be
        # opened again; at the end one that gives nothing.
        self._iterator: Any = None
        self._may_begin_again = False
        self._is_inside = False  # whether the sampler's own code runs
        self._state_due = 0.0  # when to ask for its state next

    def following(self, *, is_abandoned: bool) -> LanePosition:
        """Return where another epoch begins, after this one.

        Args:
            is_abandoned: whether the consumer has left this one: then it has nothing for the next.
        """
        if is_abandoned or self.end_state is None:
            return LanePosition()
        return LanePosition(source_state=SourceState(0, self.end_state))

    # --- to begin, and to go on

    def open(self) -> None:
        """Begin to read, or go on to where it was. Harmless when repeated.

        Raises:
            RuntimeError: the sampler is an iterator that is used up.
            ValueError: the sampler does not give what it gave before.
        """
        if self._iterator is not None or self.is_ended:
            return
        source = self.source
        source_state = self.source_state
        is_put = source.prepare(self.epoch, at=source_state.at, state=source_state.state)
        # The drop-in puts its sampler back as a state is loaded.
        is_put = is_put or getattr(source.items, "is_put_back", False)
        length = source.length()
        if not source.is_ours:
            check_length(self.epoch, length, self.length)
        self.length = length
        if self.last is not None and (self.check is None or self.check.ordinal < self.last[0]):
            # It is read anew: the item before, which others have by now, must be the same.
            ordinal, item = self.last
            self.check = Check(ordinal, self.digest(ordinal, item))
        iterator = source.begin(self.pass_number)
        if is_put and source_state.at and iterator is source.items:
            _check_put_back(source.items, source_state)
        self.sampler_iterator = iterator
        self._may_begin_again = is_put and not source_state.at and not source.state_begins_epoch
        iterator = self._pass_over(iterator, source_state.at)
        if not self.is_ended:
            self._iterator = iterator

    def open_or_fail(self) -> None:
        """Open; an error of that comes in the place of the next item, and ends the epoch."""
        try:
            self.open()
        except Exception as error:
            self.fail(error)
            self.is_ended = True

    def _pass_over(self, iterator: Any, here: int) -> Any:
        """Draw up to the next ordinal, and check that the items are still the same.

        Args:
            iterator: over the sampler.
            here: ordinal that it is at.

        Returns:
            The iterator to draw from.
        """
        check = self.check or Check(-1, None)
        failed = 0  # errors in a row
        failure: Exception | None = None
        item: Any = None
        first = here
        while here < self.next_ordinal:
            step = min(BLOCK, self.next_ordinal - here)
            if here <= check.ordinal:
                step = min(step, check.ordinal + 1 - here)
            block: list[Any] = []
            raised: Exception | None = None
            try:
                block.extend(map(next, itertools.repeat(iterator, step)))
            except Exception as error:
                without_frames(error)
                raised = error
            here += len(block)
            if block:
                item = block[-1]
                failed = 0
                self._may_begin_again = False
            if raised is not None:
                failure = raised
                failed += 1
                if failed == MAX_PASSED_ERRORS:
                    raise raised
                continue
            if len(block) == step:
                if here - 1 == check.ordinal and self._is_other(item):
                    raise self._misfit(item)
                continue
            if self._may_begin_again:
                self._may_begin_again = False
                iterator = iter(self.source.items)
                self.sampler_iterator = iterator
            elif check.ordinal < here:  # no more is known to have been there: the rest was skipped
                self._iterator = iterator
                self._end(here)
                return iterator
            else:
                raise ValueError(
                    f"the state does not fit: it is at batch {self.next_ordinal}, but the sampler "
                    f"has ended after {here}"
                ) from failure
        if here > first:
            self.last = (here - 1, item)
        return iterator

    def _compare(self, task: Task) -> None:
        """End with an error if the item that a task was given last is another one than before."""
        ordinal = task.stop - 1
        if self.check is None or self.check.ordinal != ordinal:
            return
        item = task.item(ordinal - task.first)
        if not self._is_other(item):
            return
        error = self._misfit(item)
        # Without a call in between, and so without Ctrl-C.
        self.error = error
        self.is_ended = True  # what is behind it is not to come either
        del task.items[-1]
        self.fail(error)

    def _is_other(self, item: Any) -> bool:
        """Return whether an item is not the one that was at its place before."""
        assert self.check is not None
        return self.check.digest not in (None, self.digest(self.check.ordinal, item))

    def _misfit(self, item: Any) -> ValueError:
        """Return the error for such an item."""
        assert self.check is not None
        former = str(self.check.digest)
        ranks = ranks_as_text(self.source.items)
        if ranks is not None or is_of_ranks(former):
            return ValueError(
                f"the state does not fit: the sampler deals the epoch out to {ranks or '1 rank'}, "
                f"but the state was taken with {former if is_of_ranks(former) else '1 rank'}; have "
                "as many ranks, and the seed, that there were then, or begin the epoch anew"
            )
        return ValueError(
            f"the state does not fit: item {self.check.ordinal} of the sampler is "
            f"{brief_repr(item)}, but it was another one when the state was taken; the order must "
            "follow from the sampler's arguments and set_epoch alone, and these be as they "
            "were (also seed and number of ranks), or the sampler must have state_dict "
            "and load_state_dict"
        )

    def digest(self, ordinal: int, item: Any) -> str | None:
        """Return what an item is recognized by; the number of ranks, where it is one rank's."""
        # Each rank has other items, and the state of one serves all.
        ranks = ranks_as_text(self.source.items)
        if ranks is not None:
            return ranks
        if hasattr(self.sampler_iterator, "digest_at"):  # the drop-in's is of all items so far
            known: str | None = self.sampler_iterator.digest_at(ordinal)
            return known
        if isinstance(item, HeldItem):
            try:
                item = unpack(item.pack())  # as it was when the sampler gave it
            except Exception as error:
                logger.debug("an item has no digest, since it cannot be pickled: %r", error)
                return None
        return digest(item)

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
        if not self.next_ordinal and not self.source.is_ours:
            return None
        if now < self._state_due or self.next_ordinal == self.length:
            return None
        try:
            self.source_state = self._current_state()
        except Exception as error:
            return error
        self._state_due = now + STATE_COST * (time.perf_counter() - now)
        return None

    def _current_state(self) -> SourceState:
        """Return the sampler's state at the next item; the last one if it has none."""
        state = self.source.state(self._iterator, self.pass_number)
        return self.source_state if state is None else SourceState(self.next_ordinal, state)

    def state_behind_error(self) -> SourceState:
        """Return a state such that a run that goes on does not meet the error again."""
        if self.source.is_ours:
            with suppress(Exception):  # else it is drawn up to there, and what fails is passed over
                return self._current_state()
        return self.source_state

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

    # --- of tasks

    def shard_of(self, task: Task) -> Shard | None:
        """Return which shard of a stream a task is for: none."""
        return None

    # --- to draw

    def begin_task(self) -> Task:
        """Return a task for the next items, which are still to be drawn."""
        task = Task(first=self.next_ordinal, items=[], source_state=self.source_state)
        self.drawing = task
        return task

    def draw(self, task: Task, hold: Callable[[Any], Any], most: int, until: float) -> None:
        """Add the next items to a task: so many, or fewer if that takes until later; or end.

        Each goes from the sampler into the task in one step of C, which nothing can interrupt. What
        the sampler raises is in ``error`` then.
        """
        items = task.items
        # A range need not be asked one by one, unless one of its numbers is to be compared: it is
        # never late, and gives no lists, which must be held.
        is_compared = self.check is not None and self.check.ordinal >= task.first
        step = most if type(self._iterator) is RANGE and not is_compared else 1
        most += len(items)
        try:
            while len(items) < most and not self.is_ended:
                before = len(items)
                added = itertools.chain(map(next, itertools.repeat(self._iterator, step)), (DONE,))
                self._is_inside = True
                items.extend(added)
                self._is_inside = False
                del items[-1]
                if len(items) == before:
                    if not self._begin_again():
                        self._end(task.first + before)
                    continue
                self._may_begin_again = False
                items[-1] = hold(items[-1])
                if self.check is not None:
                    self._compare(task)
                if time.perf_counter() > until:
                    return
        except Exception as error:
            self.error = error  # first: it may not come again
            self._is_inside = False
            if items and items[-1] is DONE:
                del items[-1]
            self.fail(error)

    def finish(self, task: Task) -> None:
        """Note that all items of a task were drawn."""
        if not task.items:
            self.drawing = None
            return
        stop = task.stop
        last = (stop - 1, task.items[-1])
        # Without a call in between, and so without Ctrl-C.
        self.source.has_given = True
        self.next_ordinal = stop
        self.last = last
        self.drawing = None
        has_none = self.source_state.state is None and not self.source.is_ours
        may_be_asked = not self.is_ended and self.error is None
        if not task.first and has_none and may_be_asked:
            # Where the epoch before was left, no state could say how this one begins. An error of
            # this counts only if there is another item: then it comes again.
            self.note_state()

    def fail(self, error: Exception) -> None:
        """Have an error of the sampler raised in the place of the next item."""
        error = not_the_end(error, "the sampler")
        self.error = error
        without_frames(error)
        failures.add_note(error, f"minloader: raised by the sampler, epoch {self.epoch}")

    def _begin_again(self) -> bool:
        """Begin once more with what was put back and gave nothing."""
        if not self._may_begin_again:
            return False
        self._may_begin_again = False
        iterator = iter(self.source.items)
        self.sampler_iterator = iterator
        self._iterator = iterator
        return True

    def _end(self, ordinal: int) -> None:
        """Note the state of the epoch's end, which the sampler has just come to, at an ordinal.

        It is asked once, and nothing is drawn afterwards: what it says of its place then may be
        where another pass begins.

        Raises:
            RuntimeError: it gave nothing, but it has given something in an earlier pass.
        """
        end_state = self.source.state_between(self._iterator, self.pass_number)
        nothing: Iterator[Any] = iter(())
        # Without a call in between, and so without Ctrl-C.
        self._iterator = nothing
        self.end_state = end_state
        self.is_ended = True
        if self.source.last_pass == self.pass_number:
            self.source.end(self.sampler_iterator, ordinal, end_state)

    def recover(self, tasks: list[Task], hold: Callable[[Any], Any]) -> list[Task]:
        """Make sure, after an interrupt, that it is known where the sampler is.

        Args:
            tasks: those drawn so far, in order.
            hold: keeps an item as it is now.

        Returns:
            The tasks that are left.
        """
        task = self.drawing
        was_inside = self._is_inside
        self.drawing = None
        self._is_inside = False
        if task is None:
            return tasks
        before = [each for each in tasks if each is not task]
        items = self.source.items
        if task.items and task.items[-1] is DONE:
            was_inside = False
            del task.items[-1]
        is_kept = not was_inside and (self.error is not None or not is_stateful(items))
        is_read_once = (
            self.sampler_iterator is items and not is_stateful(items) and not self.source.has_epochs
        )
        if self._iterator is not None and (is_kept or is_read_once):
            if was_inside:
                self.fail(
                    RuntimeError(
                        f"the sampler, {brief_repr(items)}, is an iterator that can be read "
                        "once, and Ctrl-C came while its own code ran: what it gives from now on "
                        "may lack an item; give a list, or an object whose __iter__ begins anew"
                    )
                )
                self.is_ended = True
            task.items[-1:] = map(hold, task.items[-1:])
            if task.items:
                self._compare(task)
            self.finish(task)
            return [*before, task] if task.items else before
        # The sampler is read anew.
        self.source_state = task.source_state
        self.next_ordinal = task.first
        self._iterator = None
        self.is_ended = False
        self.error = None
        return before


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
