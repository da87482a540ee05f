"""The contract with all that is read: samplers, samplers within samplers, shards of streams.

::

    set_epoch, load_state_dict ---> iter ---> passed over ---> take, take, take ---> the end
       (as far as there are)                  one is compared                        (a state)

The number of the epoch is told, if it is wanted, and a state is put back, if there is one; then
comes ``iter``; then items are passed over up to where reading goes on. To begin is to go on from
nothing, so this is also how a run is resumed, and how reading goes on after an interrupt. There is
one tolerance: what was put back, and ends before it gave anything, is begun once more.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from types import GeneratorType
from typing import Any, ClassVar, Final, NamedTuple

from minloader._errors import breaks_in, not_the_end, without_frames
from minloader._formats import brief_repr
from minloader._protocols import has_epochs, is_read_once, is_stateful, state_of

logger = logging.getLogger("minloader")

BLOCK = 4_096
"""Items that are passed over in one step."""

MAX_PASSED_ERRORS = 1_000
"""Errors in a row that are passed over where items are read again: they had come before, too."""

DONE: Final = object()
"""Added to what was drawn in the same step of C: it tells that this was not interrupted."""

pass_numbers = itertools.count()
"""Each pass over a source has its own: a pass reads it for one epoch, from wherever it begins."""


class SourceState(NamedTuple):
    """A state of what an epoch is read from: of a sampler, or of a shard of a stream.

    Attributes:
        at: how many items of the epoch had been read before it. With 0 it may be a state from
            between the epochs: then the number of the epoch is told after it was put back.
        state: as the sampler gave it; of a stream, packed. None: there is none, and the epoch
            begins as the sampler or stream begins it.
    """

    at: int = 0
    state: Any = None


NO_SOURCE_STATE = SourceState()


class Check(NamedTuple):
    """What tells whether a sampler, or a stream, gives again what it gave before.

    Attributes:
        ordinal: of an item, or of a batch of a shard.
        digest: of the item; what the samples of the batch are recognized by. None of what cannot
            be recognized.
    """

    ordinal: int
    digest: Any


class Resettable:
    """A sampler of ours. Its state is true also before it was read. Others may be in another epoch.

    Attributes:
        _run: the iterator made last; None if a state was loaded since, or there is none.
        _epoch_start: where that began, or the state that was loaded.
    """

    _run: Any = None
    _epoch_start: Any = None

    def _checked(self, state: Any, allowed: Sequence[str]) -> list[Any]:
        """Refuse what is no state of such a sampler."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left."""
        raise NotImplementedError

    def inner_samplers(self) -> list[Any]:
        """Return the samplers that this one reads."""
        raise NotImplementedError


def used_up(name: str, iterator: Any) -> RuntimeError:
    """Return the error for an argument that cannot serve a second epoch."""
    return RuntimeError(
        f"{name} is an iterator, {brief_repr(iterator)}, which serves one epoch and has served it; "
        "pass a list, or an object whose __iter__ begins anew"
    )


class Source:
    """An iterable that is read once in each epoch. Several epochs may read it at the same time.

    Args:
        name: name of the argument that it was given as.
        items: the iterable.

    Attributes:
        is_ours: whether it is a sampler of ours.
        last_pass: number of the pass that was begun last; -1: none was.
        has_given: whether any pass was given an item.
    """

    def __init__(self, name: str, items: Any) -> None:
        self.name = name
        self.items: Any = items
        self.is_ours = isinstance(items, Resettable)
        self.last_pass = -1
        self.has_given = False
        # The state that it is in, if that is known, and its last change by then: after another one
        # it is in another state.
        self._known_state: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is put where it goes on. The iterator that has ended, which is there for comparing,
        # may not be pickled: from Python 3.14 on nothing of itertools can be.
        return vars(self) | {"_known_state": (None, None)}

    @property
    def state_begins_epoch(self) -> bool:
        """Whether a state from between two epochs always puts it at the beginning of one.

        Those of ours do. Another's may put it at the end of the one before.
        """
        return self.is_ours

    @property
    def has_epochs(self) -> bool:
        """Whether it is told the number of the epoch."""
        return has_epochs(self.items)

    @property
    def is_used_up(self) -> bool:
        """Whether it is an iterator that has served its one epoch."""
        # One with epochs (lhotse's samplers) begins anew with each of them.
        return self.last_pass >= 0 and is_read_once(self.items) and not self.has_epochs

    def set_epoch(self, epoch: int) -> None:
        """Tell it the number of the epoch, if it wants to know."""
        if self.has_epochs:
            self.items.set_epoch(epoch)

    def prepare(self, epoch: int, *, at: int, state: Any) -> bool:
        """Have it go on at a state, or begin an epoch. Return whether it was put back for that.

        Args:
            epoch: number of the epoch.
            at: how many items of the epoch were before the state.
            state: None to begin as it begins an epoch.
        """
        is_put = state is not None and not self._is_at(state)
        self._known_state = (None, None)
        if state is None:
            self.forget()  # the epoch before was left, however far it was read
        if at or not is_put:
            self.set_epoch(epoch)
        if is_put:
            self.put(state)
            if not at:
                self.set_epoch(epoch)
        return is_put

    def forget(self) -> None:
        """Have the next epoch begin with nothing that the one before has left, if it is ours."""
        if self.is_ours:
            self.items._forget()

    @property
    def can_begin_again(self) -> bool:
        """Whether reading can go on where an interrupt came into its own code."""
        items = self.items
        return not isinstance(items, Iterator) or is_stateful(items) or self.has_epochs

    def iterate(self, epoch: int) -> Any:
        """Return an iterator over it, which was told the epoch."""
        return iter(self.items)

    def begin(self, epoch: int, pass_number: int) -> Any:
        """Return an iterator over it, for the pass of a number.

        Raises:
            RuntimeError: it can be read once, and was.
        """
        iterator = self.iterate(epoch)
        if iterator is self.items and self.is_used_up and self.last_pass != pass_number:
            raise used_up(self.name, self.items)
        self.last_pass = pass_number
        return iterator

    def end(self, iterator: Any, read: int, state: Any) -> None:
        """Note the state that it has ended with.

        Raises:
            RuntimeError: it gave nothing, but it has given something in an earlier epoch.
        """
        self._known_state = (state, iterator if self.is_ours else None)
        is_own = iterator is self.items and not self.has_epochs
        if not read and self.has_given and is_own:
            raise used_up(self.name, self.items)

    def state(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        """Return its state; None if it has none, or knows that of a later pass only.

        Args:
            iterator: the one over it whose state is asked for.
            pass_number: of the pass that has this iterator; None: whichever is the last. Others'
                samplers know the state of that one only.
        """
        if self.is_ours and hasattr(iterator, "state"):
            return copy.deepcopy(iterator.state())
        if pass_number not in (None, self.last_pass):
            return None
        try:
            return copy.deepcopy(state_of(self.items))
        except StopIteration as error:
            raise not_the_end(error, f"state_dict of the {self.name}") from error

    def state_between(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        """The same between two epochs, where others' samplers may have none."""
        try:
            return self.state(iterator, pass_number)
        except Exception as error:  # many have none before their first item, or behind their last
            if self.is_ours or breaks_in(error):
                raise
            logger.debug("%s has no state between epochs: %r", brief_repr(self.items), error)
            return None

    def state_before(self) -> Any:
        """Return its state before it was ever read here; None if it has none, or none yet."""
        run = self.items._run if self.is_ours else None
        if run is not None and not run.ended:
            self.forget()  # somebody has looked: the next epoch begins anew all the same
        state = self.state_between()
        if state is not None:
            self.note_is_at(state)
        return state

    def put(self, state: Any) -> None:
        """Put it back to a state.

        Raises:
            ValueError: it has ended before that, or lacks something in it.
        """
        try:
            self.items.load_state_dict(copy.deepcopy(state))  # some empty what they are given
        except (StopIteration, LookupError) as error:
            raise ValueError(
                f"the state does not fit the {self.name}, {brief_repr(self.items)}, which cannot "
                f"be put back to it: {error!r}; it ends before that, or the state went through "
                "JSON, which makes text of the keys of a dict: save it by pickle or torch.save"
            ) from error

    def note_is_at(self, state: Any) -> None:
        """Note the state that it is in now, so that it need not be put there."""
        self._known_state = (state, self._last_change)

    def _is_at(self, state: Any) -> bool:
        known, last_change = self._known_state
        return known is state and last_change is self._last_change

    @property
    def _last_change(self) -> Any:
        """Of a sampler of ours the iterator made last, or else what was loaded last."""
        if not self.is_ours:
            return None
        return self.items._epoch_start if self.items._run is None else self.items._run


class Reader:
    """Reads a source for one epoch, from a position on.

    An interrupt may come at any instruction. What the source has given is kept, unless its own code
    was interrupted: then the next call begins anew, from the last known state.

    Args:
        source: what is read.
        epoch: number of the epoch.
        known: a state from where it begins, or before.
        first: ordinal of the first item that is wanted.
        check: of an item from that state on, for when it comes again; None: there is none.
        pass_number: of this pass over the source; None: the next one.

    Attributes:
        next: ordinal of the next item.
        iterator: what ``iter`` of the source gave; None before it is opened.
        is_ended: whether there are no more items.
        end_state: the state of the source at its end; None if it has none, or is not there.
    """

    error_size: ClassVar[int] = 1
    """How many items an error stands for."""

    chances: ClassVar[int] = 1
    """How often what was put back, and gives nothing, is begun once more."""

    keeps_last: bool = False
    """Whether what was drawn last may be wanted again."""

    def __init__(
        self,
        source: Source,
        epoch: int,
        known: SourceState = NO_SOURCE_STATE,
        *,
        first: int = 0,
        check: Check | None = None,
        pass_number: int | None = None,
    ) -> None:
        self.source: Any = source
        self.epoch = epoch
        self.known = known
        self.next = first
        self.check = check
        self.pass_number = next(pass_numbers) if pass_number is None else pass_number
        self.iterator: Any = None
        self.is_ended = False
        self.end_state: Any = None
        self._here = known.at  # ordinal of what comes out of the iterator next, or is in ``_drawn``
        self._drawn: list[Any] = []  # how many were asked for, the items, DONE
        self._last: list[Any] = []  # the same of the call before
        self._error: BaseException | None = None  # behind what was drawn
        self._chances = 0  # that are left
        self._may_be_untold = False  # whether it looks at the epoch only with its first item

    # --- to begin

    @property
    def is_torn(self) -> bool:
        """Whether an interrupt has come while the source's own code ran."""
        return bool(self._drawn) and self._drawn[-1] is not DONE

    def open(self) -> None:
        """Begin to read, or begin anew after an interrupt, and pass over what is not wanted.

        Raises:
            Exception: what that raises. What cannot be begun is over.
        """
        if self.iterator is None or self.is_torn:
            self._open()
        failed = 0
        failure: BaseException | None = None
        while self._here < self.next and not self.is_ended:
            try:
                self._draw(self._most_to_pass())
                failed = 0
            except BaseException as error:
                if self._ends_program(error):
                    raise
                failed += 1
                if self.is_ended and failure is not None:
                    raise error from failure
                if self.is_ended or failed == MAX_PASSED_ERRORS:
                    raise
                without_frames(error)
                failure = error

    def _most_to_pass(self) -> int:
        """Return how many items to pass over in one step: the one to be compared is the last, for
        a sampler may fill the same list again."""
        most = min(BLOCK, self.next - self._here)
        if self.check is not None and self._here <= self.check.ordinal:
            most = min(most, self.check.ordinal + 1 - self._here)
        return most

    def _open(self) -> None:
        if self.is_ended:
            return
        if self.is_torn and not self.source.can_begin_again:
            self.is_ended = True
            raise RuntimeError(
                f"{self.source.name}, {brief_repr(self.source.items)}, is an iterator that can be "
                "read once, and Ctrl-C came while its own code ran: what it gives from now on may "
                "lack an item; give an object whose __iter__ begins anew, or one with state_dict "
                "and load_state_dict"
            )
        self._or_over(self._begin)

    def _begin(self) -> None:
        self.prepare()
        self._iterate()

    def prepare(self) -> None:
        """Tell the source the epoch, and put back its state."""
        known = self.known
        is_put = self.source.prepare(self.epoch, at=known.at, state=known.state)
        begins_anew = is_put and not known.at and not self.source.state_begins_epoch
        self._chances = self.chances if begins_anew else 0

    def _iterate(self) -> None:
        iterator = self.source.begin(self.epoch, self.pass_number)
        self._may_be_untold = self.source.has_epochs and isinstance(iterator, GeneratorType)
        # Without a call in between, and so without Ctrl-C.
        self.iterator = iterator
        self._here = self.known.at
        self._drawn = []
        self._error = None

    def _begin_once_more(self) -> None:
        iterator = self.source.iterate(self.epoch)
        # Without a call in between, and so without Ctrl-C.
        self._chances -= 1
        self.iterator = iterator
        self._drawn = []

    def _or_over(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call what must not fail: there is nothing behind an error of it."""
        try:
            return function(*args)
        except BaseException as error:
            self.is_ended = not self._ends_program(error)
            raise

    def _ends_program(self, error: BaseException) -> bool:
        """Whether an error is none of the source's, as Ctrl-C."""
        return breaks_in(error)

    # --- to read

    def take(self, most: int) -> list[Any]:
        """Return the next items: so many, or fewer before an error or the end; [] at the end.

        Raises:
            Exception: what the source raises, in the place of an item. More may come behind it.
        """
        if self.iterator is None or self._here < self.next or self._drawn:
            self.open()
        try:
            return [] if self.is_ended else self._draw(most)
        finally:
            self.next = self._here

    def _draw(self, most: int) -> list[Any]:
        drawn = self._drawn
        if not drawn and self._error is None:
            try:
                if self._may_be_untold:
                    self._tell_again()
                drawn.extend(chain((most,), self._coming(most), (DONE,)))
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                self._error = raised  # behind the items; first: it may not come again
                drawn.append(DONE)
                if self._ends_program(raised):
                    self._error = None
                    drawn.pop()
                    raise
        error = self._error
        if error is not None and len(drawn) <= 2:
            # Without a call in between, and so without Ctrl-C.
            self._here += self.error_size
            self._drawn = []
            self._last = []
            self._error = None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        items, is_end = self._sorted(drawn)
        is_end = is_end and error is None
        if len(drawn) > 2:
            self._chances = 0
            self.source.has_given = True
        elif is_end and self._chances:
            self._or_over(self._begin_once_more)
            return self._draw(most)
        if self.check is not None:
            self._or_over(self._compare, self.check, items)
        stop = self._here + len(items)
        if is_end:
            self._or_over(self._end, stop, self._here + len(drawn) - 2)
        # Without a call in between, and so without Ctrl-C.
        self.is_ended = is_end
        self._here = stop
        self._last = drawn if self.keeps_last else []
        self._drawn = []
        return items

    def _tell_again(self) -> None:
        """Tell the source the epoch, if another pass, or loader, has told it another one since."""
        source = self.source
        is_latest = source.last_pass == self.pass_number
        if not is_latest or getattr(source.items, "epoch", self.epoch) != self.epoch:
            source.set_epoch(self.epoch)
            source.last_pass = self.pass_number
        self._may_be_untold = False

    def _coming(self, most: int) -> Iterator[Any]:
        """Return an iterator over the next items, all in C."""
        # Not by islice(), which calls iter(), with which some begin anew.
        return map(next, repeat(self.iterator, min(most, sys.maxsize)))

    def _sorted(self, drawn: list[Any]) -> tuple[list[Any], bool]:
        """Return the items of what was drawn, and whether there are no more."""
        return drawn[1:-1], len(drawn) - 2 < drawn[0]

    def _end(self, stop: int, read: int) -> None:
        """Note what the source says at its end.

        Args:
            stop: how many items the epoch has.
            read: how many were read; one more if the last was incomplete, and is none.
        """
        if self.check is not None and self.check.ordinal >= stop:
            raise self._misfit(stop)
        source = self.source
        self.end_state = source.state_between(self.iterator, self.pass_number)
        if source.last_pass == self.pass_number:
            source.end(self.iterator, read, self.end_state)

    # --- what was there before

    def give_again(self, ordinal: int) -> None:
        """Give again what was given last, if that was from an ordinal on.

        For whoever has asked for it, and was interrupted before it was kept.
        """
        if self._last and self._here > ordinal:
            # Without a call in between, and so without Ctrl-C.
            self._drawn = self._last
            self._last = []
            self._here = ordinal
            self.next = ordinal
            self.is_ended = False

    def _compare(self, check: Check, items: list[Any]) -> None:
        """Refuse items if the one to be compared is another one than before."""
        if not 0 <= check.ordinal - self._here < len(items):
            return
        item = items[check.ordinal - self._here]
        if check.digest not in (None, self.digest(check.ordinal, item)):
            raise self._misfit(check.ordinal, item)

    def digest(self, ordinal: int, item: Any) -> Any:
        """Return what an item is recognized by; None if it cannot be."""
        raise NotImplementedError

    def _misfit(self, ordinal: int, *item: Any) -> Exception:
        """Return the error for another item than before, or for an early end.

        Args:
            ordinal: of the item, or of the end.
            item: which; of an end, none.
        """
        raise NotImplementedError
