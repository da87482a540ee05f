"""The thin iterator: batches are handed to the consumer, and what they leave behind is noted.

::

    next() ---> at hand? --------------------------------------> commit ---> the consumer
                   | no                                             ^
                   `--> Ctrl-C is held: Epoch.take() ---> Delivery -'

Guarantees:

* Ctrl-C, at whatever instruction of ``next()`` it comes, loses and doubles nothing. It is held
  while an epoch works (:class:`Interrupts`), and to commit is to store a few attributes, without a
  call.
* After any other exception that breaks in the lanes are made again from the position.
* One thread at a time takes from it.

CPython runs the handlers of signals behind calls, at the beginning of functions, and at backward
jumps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat
from time import perf_counter
from typing import Any, Generic, Self

from minloader._arguments import refuse_copies
from minloader._epochs.course import Course, Cursor
from minloader._epochs.epoch import AT_HAND, Commit, Epoch
from minloader._epochs.lane import MISSING
from minloader._memory import forks
from minloader._pools.interrupts import Interrupts
from minloader._protocols import B

EXECUTING = (
    "the iterator is asked for a batch while it takes one: by another thread, or by what it calls "
    "itself, such as the sampler, the dataset or on_error; take from it in one place, or with a "
    "lock"
)


class Batches(Iterator[B], Generic[B]):
    """Iterator over the batches of one epoch, which begins with the first ``next`` at the latest.
    It goes on after an error.

    Args:
        course: where the loader is; None if that is known when the epoch begins.

    Attributes:
        course: likewise.
        epoch: that it is in; None before that was begun.
        interrupts: hold Ctrl-C while it works.
        is_plain: whether nothing is done with a batch but to hand it over.
        holds: whether somebody takes batches ahead of the consumer: then they are in ``held`` of
            the epoch, until the consumer has them.
    """

    def __init__(self, course: Course | None) -> None:
        self.course = course
        self.epoch: Epoch | None = None
        self.interrupts = Interrupts()
        self.is_plain = True
        self.holds = False
        self._process = forks.process

    __reduce__ = refuse_copies

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        interrupts = self.interrupts
        if interrupts.is_on and self._process is forks.process:
            raise ValueError(EXECUTING)
        interrupts.is_on = True  # no call since the question: no thread has come in between
        begin = 0.0
        error: BaseException | None = None
        try:
            while True:
                epoch = self.epoch
                if self.is_plain and epoch is not None and not interrupts.is_unsure:
                    lane, outcome = epoch.at_hand(self._process)
                    if outcome is not MISSING:
                        counters = epoch.shared.counters
                        task: Any = lane.current
                        n = lane.delivered - task.first
                        outcomes = task.reply.outcomes
                        memory = None if n + 1 == len(outcomes) else task.memory
                        if begin:
                            counters.leave(begin, working=True)
                        # Nothing was changed so far. No call behind this line, so no Ctrl-C: the
                        # batch is the consumer's.
                        lane.delivered += 1
                        epoch.has_given = True
                        counters.batches += 1
                        outcomes[n] = None
                        task.memory = memory
                        return outcome  # type: ignore[no-any-return]
                begin = begin or perf_counter()
                with interrupts:
                    commit = self._take(begin)
                if commit is None:
                    if self.epoch is not None and not self.holds:
                        self.epoch.is_over = True
                    raise StopIteration
                if commit is not AT_HAND:
                    break
            epoch = self.epoch
            assert epoch is not None
            delivery = commit.delivery
            outcome = delivery.outcome
            error = delivery.error
            counters = epoch.shared.counters
            # Ctrl-C has come by here. No call behind this line: the batch is the consumer's.
            epoch.held = commit.held  # first: another thread may read a position
            lane = commit.lane
            lane.delivered = commit.delivered
            lane.ahead = commit.ahead
            lane.feed.known = commit.source_state
            lane.feed.error = commit.next_error
            epoch.has_given = commit.has_given
            counters.batches += error is None and not self.holds
            commit.outcomes[commit.n] = None
            if not self.holds:  # the frames of an error lead to it
                delivery.outcome = None
                delivery.error = None
            if error is None:
                return outcome  # type: ignore[no-any-return]
            raise error
        finally:
            interrupts.is_on = False
            del error  # its frames lead here

    # Kept here: where an iterator outlives its module, the names of that are gone.
    _exits = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        epoch = vars(self).get("epoch")  # it may not have been made
        if epoch is not None and not self._exits():
            epoch.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`Loader.state_dict`."""
        assert self.course is not None
        return self.course.state_dict()

    def hold(self) -> None:
        """Have what is delivered from now on stand in ``held`` of the epoch."""
        self.holds = True
        self.is_plain = False

    def is_ready(self) -> bool:
        """Return whether the next batch can be taken without waiting for a worker."""
        return self.epoch is None or self.epoch.is_ready

    def as_given(self, outcome: Any) -> Any:
        """Return a batch of the epoch as the consumer is to have it."""
        return outcome

    def giving(self, held: tuple[Any, ...]) -> None:
        """Take note that the consumer is about to have a batch; ``held`` is what is held then."""
        assert self.epoch is not None
        self.epoch.shared.counters.batches += 1

    # --- to begin

    def begin(self, *, sends: bool) -> Cursor:
        """Begin with the epoch.

        Args:
            sends: whether its first batches are to be under way on return. If Ctrl-C comes while
                they are drawn, the epoch is lost, and what the sampler has given for it.

        Returns:
            Where the loader is then, which has the epoch. The caller notes both, at once.
        """
        begin = perf_counter()
        self.interrupts.is_on = True
        try:
            with self.interrupts:
                cursor = self._begin()
                assert cursor is not None
                assert cursor.epoch is not None
                if sends:
                    cursor.epoch.fill()
                cursor.epoch.shared.counters.count_epoch_start(begin)
        finally:
            self.interrupts.is_on = False
        return cursor

    def _begin(self) -> Cursor | None:
        """Begin the epoch; return None if there is none."""
        assert self.course is not None
        return self.course.begin(self.interrupts)

    # --- to take

    def _take(self, begin: float) -> Commit | None:
        """Return what is to be stored when the next batch is delivered; None at the end.

        Args:
            begin: when the consumer came for it.
        """
        if self.epoch is None:
            cursor = self._begin()
            if cursor is None:
                return None
            assert self.course is not None
            # Without a call in between.
            self.epoch = cursor.epoch
            self.course.cursor = cursor
            self._process = forks.process
        epoch = self.epoch
        assert epoch is not None
        if self._process is not forks.process:
            self._check_process(epoch)
        counters = epoch.shared.counters
        counters.come(begin)
        epoch.is_held = self.holds
        commit = epoch.take(is_plain=self.is_plain)
        if commit is not AT_HAND:
            counters.leave(begin, working=commit is not None)
        return commit

    def _check_process(self, epoch: Epoch) -> None:
        if self.holds or epoch.shared.group.max_in_flight or epoch.in_flight:
            raise RuntimeError(
                "this iterator was begun in the process of which this one is a fork, and its "
                "batches arrive there; call iter(loader) in this process, which starts workers "
                "of its own, or fork before you iterate"
            )
        self._process = forks.process
        self.interrupts.is_unsure = True  # a thread may have been at work that is not here


class SeveralEpochs(Iterator[tuple[int, B]], Generic[B]):
    """Iterator over the batches of several epochs, one after another, with the number of each.

    No generator: that would be over after the first error.

    Args:
        course: where the loader is.
        left: how many epochs; None: as many as come before ``until``.
        until: the epoch before which to end; None: none.

    Attributes:
        epoch: that it is in; None before the first was begun.
    """

    def __init__(self, course: Course, left: int | None, until: int | None) -> None:
        self.epoch: Epoch | None = None
        self._course = course
        self._left = left
        self._until = until
        self._holds = False
        self._batches: Batches[Any] | None = None
        self._pairs: Iterator[Any] = iter(())

    __reduce__ = refuse_copies

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        """Number of batches of the epochs that are to begin, as for a progress bar.

        Raises:
            TypeError: it is not known.
        """
        from minloader._epochs.total import total_length  # few ask

        return total_length(self._course, self._left, self._until)

    def __next__(self) -> tuple[int, B]:
        while True:
            # No call between a batch and the consumer: a loop over an iterator makes none.
            for pair in self._pairs:
                return pair  # type: ignore[no-any-return]
            if not self._begin():
                raise StopIteration

    def _begin(self) -> bool:
        """Begin the next epoch. Return whether there is one, and the one before is over."""
        course = self._course
        number = course.number
        former = self.epoch
        if self._left == 0 or (self._until is not None and number >= self._until):
            return False
        if former is not None and former.held:
            return False
        if self._left is self._until is None and former is not None and not former.has_given:
            self._left = 0
            raise ValueError(
                f"epoch {former.number} has no batches, and epochs() without a number would go "
                "through such for ever; look at the sampler, or give a number"
            )
        if former is not None:
            former.is_over = True
        batches: Batches[Any] = Batches(course)
        if self._holds:
            batches.hold()
        pairs = zip(repeat(number), batches, strict=False)
        cursor = batches.begin(sends=False)
        left = None if self._left is None else self._left - 1
        # Without a call in between.
        batches.epoch = cursor.epoch
        course.cursor = cursor
        self.epoch = cursor.epoch
        self._batches = batches
        self._pairs = pairs
        self._left = left
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's, see :meth:`Loader.state_dict`."""
        return self._course.state_dict()

    # --- for who takes batches ahead of the consumer

    def hold(self) -> None:
        """Have what is delivered from now on stand in ``held`` of the epoch."""
        self._holds = True
        if self._batches is not None:
            self._batches.hold()

    def is_ready(self) -> bool:
        """Return whether the next batch can be taken without waiting for a worker."""
        return self._batches is None or self._batches.is_ready()

    def as_given(self, outcome: Any) -> Any:
        """Return a batch of the epoch as the consumer is to have it."""
        assert self.epoch is not None
        return self.epoch.number, outcome

    def giving(self, held: tuple[Any, ...]) -> None:
        """Take note that the consumer is about to have a batch; ``held`` is what is held then."""
        if self._batches is not None:
            self._batches.giving(held)
