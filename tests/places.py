"""A consumer is interrupted at each place of the package in turn, and must get all the same.

For one place: a loader is made, two epochs are taken, and where the place is reached Ctrl-C comes,
once or twice, or another exception. What was given by then is asked for as a state, with which
another loader must give the rest; and the same loader must give it too. It goes by public names
alone, whatever the package is made of.
"""

from __future__ import annotations

import dis
import functools
import itertools
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from interrupts import OURS, drops_errors, places

from minloader import Loader, prefetch


class Boom(BaseException):
    """Breaks in from outside, as what another thread sets."""


class TimeLimit(Exception):
    """What the handler of an alarm raises."""


BREAKING_IN = KeyboardInterrupt, Boom, TimeLimit


@functools.cache
def calls(code: CodeType) -> frozenset[int]:
    """The instructions before which an exception can come that is set from outside: each call."""
    made = {each.offset for each in dis.Bytecode(code) if each.opname.startswith("CALL")}
    return frozenset(made) | places(code)


def broken_into(call: Callable[[], object], step: int, raises: type[BaseException]) -> int:
    """Makes a call, in which something comes. Gives how many places were left; -1: it has come.

    Args:
        call: what is called, in this thread.
        step: how many places of the package are passed before.
        raises: KeyboardInterrupt: the signal comes, for whatever handler there is. Another class
            is raised there; TimeLimit by what is the handler of SIGALRM then.
    """
    left = step
    where = calls if raises is Boom else places

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "opcode" and left >= 0 and frame.f_lasti in where(frame.f_code):
            if left > 0:
                left -= 1
            elif not drops_errors(frame):
                left = -1
                sys.settrace(None)
                if raises is not KeyboardInterrupt:
                    raise raises
                signal.raise_signal(signal.SIGINT)
        return count

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace = count  # CPython 3.12 and newer want it before the opcodes are asked for
        frame.f_trace_opcodes = True
        return count

    rings = signal.signal(signal.SIGALRM, count)  # called from here it would be in the traceback
    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether any frame wants to be told
    sys.settrace(begin)
    try:
        call()
    finally:
        sys.settrace(former)
        signal.signal(signal.SIGALRM, rings)
        broke_in, left = left, -1  # 3.15 asks the same function again where a generator goes on
    return broke_in


# --- a consumer ----------------------------------------------------------------------------------


def _iterate(loader: Loader) -> Iterator[Any]:
    return iter(loader)


def _prefetch(loader: Loader) -> Iterator[Any]:
    return prefetch(loader, _as_it_is, 2)


def _as_it_is(batch: Any) -> Any:
    return batch


def _epochs(loader: Loader) -> Iterator[Any]:
    return loader.epochs(2)


BEGINNINGS: dict[str, tuple[Callable[[Loader], Iterator[Any]], int]] = {
    "iter": (_iterate, 2),
    "prefetch": (_prefetch, 2),
    "epochs": (_epochs, 1),
}
"""How a consumer begins, and how often."""


@dataclass
class Consumer:
    """Takes all that a loader gives in two epochs.

    Attributes:
        loader: from a position on.
        how: one of :data:`BEGINNINGS`.
        given: the batches, and the texts of errors in their places.
        begun: how many iterators there were.
    """

    loader: Loader
    how: str
    given: list[Any] = field(default_factory=list)
    begun: int = 0
    _batches: Iterator[Any] | None = None

    def __post_init__(self) -> None:
        self._begin, self.most = BEGINNINGS[self.how]

    def take(self) -> bool:
        """Take one batch, or the end of an epoch. Gives whether there is more."""
        if self._batches is None:
            if self.begun == self.most:
                return False
            self._batches = self._begin(self.loader)
            self.begun += 1
        try:
            self.given.append(next(self._batches))
        except StopIteration:
            self._batches = None
        except TimeLimit:
            raise
        except Exception as error:
            self.given.append(f"{type(error).__name__}: {error}".splitlines()[0])
        return True

    def take_all(self) -> list[Any]:
        while self.take():
            assert len(self.given) < 200, "there is no end"
        return self.given


# --- what is tried -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of loader.

    Attributes:
        make: makes one, each time alike, with the options of where batches are made.
        in_order: whether the batches have an order.
        errors_again: whether the sampler is read again, whose errors then come once more, by
            another loader that goes on, and by this one after an exception that is not Ctrl-C.
    """

    make: Callable[..., Loader]
    in_order: bool = True
    errors_again: bool = False

    def difference(self, who: str, came: list[Any], wanted: list[Any]) -> str:
        """What is wrong with what came; "" for nothing."""
        if self.errors_again:
            came, wanted = (
                [each for each in some if not isinstance(each, str)] for some in (came, wanted)
            )
        given, all_of_it = Counter(map(str, came)), Counter(map(str, wanted))
        kinds = []
        if lost := all_of_it - given:
            kinds.append(f"lost {[*lost.elements()][:4]}")
        if more := given - all_of_it:
            kinds.append(f"doubled, or strange {[*more.elements()][:4]}")
        if self.in_order and not kinds and came != wanted:
            kinds.append("not in order")
        return f"{who}: {', '.join(kinds)}" if kinds else ""


@dataclass(frozen=True)
class Trial:
    """What one place was, and what was wrong there.

    Attributes:
        steps: how many places were passed before each interrupt.
        wrong: what; "" for nothing.
    """

    steps: tuple[int, ...]
    wrong: str


def tried(
    kind: Kind,
    way: dict[str, Any],
    how: str,
    steps: tuple[int, ...],
    raises: type[BaseException],
    wanted: list[Any],
) -> Trial | None:
    """Breaks in at one place, and again so many places later; None where there is no such place.

    Args:
        kind: of loader.
        way: where its batches are made.
        how: one of :data:`BEGINNINGS`.
        steps: how many places are passed before each of them.
        raises: what comes.
        wanted: all that must be given.
    """
    handler = signal.getsignal(signal.SIGINT)
    with kind.make(**way) as loader:
        consumer = Consumer(loader, how)
        consumer.take()  # to begin is not looked at: who is interrupted there begins once more
        for n, step in enumerate(steps):
            has_come, more = False, True
            while more and not has_come:
                left = step

                def take() -> None:
                    nonlocal more
                    more = consumer.take()

                try:
                    left = broken_into(take, step, raises)
                except BREAKING_IN:
                    left = -1
                except BaseException as error:
                    return Trial(steps, f"another error came out: {error!r}")
                has_come, step = left < 0, left
            if not has_come:
                return None if n == 0 else Trial(steps, "")
        now = signal.getsignal(signal.SIGINT)
        if now is not handler:
            signal.signal(signal.SIGINT, handler)
            if raises is KeyboardInterrupt:
                return Trial(steps, f"the handler was not put back: {now}")
        try:
            state = loader.state_dict()
            known, begun = list(consumer.given), consumer.begun
            wrong = kind.difference("gone on", consumer.take_all(), wanted)
            with kind.make(**way) as other:
                other.load_state_dict(state)
                rest = Consumer(other, how)
                # An iterator that stands at its end was not told so; its epoch is over in a state.
                over = bool(known) and how != "epochs" and state["epoch"] == begun
                rest.begun = begun if over else max(0, begun - 1)
                if how == "epochs":
                    rest._batches = other.epochs(2 - state["epoch"])
                    rest.begun = 1
                came = known + rest.take_all()
                wrong = wrong or kind.difference("resumed", came, wanted)
        except Exception as error:
            wrong = f"then: {error!r}"
    return Trial(steps, wrong)


def all_tried(
    kind: Kind,
    way: dict[str, Any],
    how: str,
    steps: Iterable[tuple[int, ...]],
    raises: type[BaseException],
) -> Iterator[Trial]:
    """Gives what was wrong at each place, up to the last that there is; as :func:`tried`."""
    with kind.make(**way) as loader:
        wanted = Consumer(loader, how).take_all()
    with warnings.catch_warnings():
        # Between open() and the block of its ``with``: reference counts close the file.
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        for each in steps:
            trial = tried(kind, way, how, each, raises, wanted)
            if trial is None:
                return
            yield trial


def once(stride: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    return ((step,) for step in itertools.count(first, stride))


def twice(stride: int, second: int = 60) -> Iterator[tuple[int, ...]]:
    """Each place so far apart, and behind each another one, one after another."""
    near = itertools.cycle(range(0, second, 7))
    return ((step, next(near)) for step in itertools.count(0, stride))
