"""Ctrl-C is held while an iterator works, and let through where that is safe.

Within the start of a thread, or of a process, other signals are held, too.

That one module does all of this is trio's idea.
"""

from __future__ import annotations

# The functions of signal make enums of what they get, which takes longer than they.
import _signal  # type: ignore[import-not-found]
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident, main_thread
from typing import Any

from minloader._memory import forks
from minloader._worker.signals import handled_signals


class Interrupts:
    """Holds Ctrl-C within a block: it comes at the block's end, or where that lets it through.

    ::

        is_on = True ---> with: held ---> let_through() ---> held ---> end ---> commit, no call
                                          Ctrl-C comes here     and here

    An exception that has passed :meth:`let_through` leaves everything in order. Any other one that
    leaves the block (a handler of SIGALRM that raises, an exception that another thread has set)
    makes it unsure: what follows from the position is then to be made again.

    To block the signal does not do: another thread may take it, and Python raises in the main
    thread all the same.

    Args:
        number: of the signal that is held.

    Attributes:
        is_on: whether the function with the block runs. That function sets it, without a call.
        is_unsure: whether what follows from the position is to be made again.
    """

    def __init__(self, number: int = int(_signal.SIGINT)) -> None:
        self._number = number
        self.is_on = False
        self.is_unsure = False
        self._former: Any = None  # the handler whose place this has taken
        self._has_come = False  # while it was held
        self._passed: BaseException | None = None

    def __enter__(self) -> None:
        former = _signal.getsignal(self._number)
        holder = getattr(former, "__self__", None)
        if isinstance(holder, Interrupts):
            if holder.is_on:
                return  # it is held, by this or by a block around this
            former = holder._former  # an exception has come there before the handler was put back
        if callable(former) and get_ident() == main_thread().ident:
            self._former = former
            _signal.signal(self._number, self._note)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_unsure = error is not None and error is not self._passed
        self._passed = None  # its frames lead here
        self._release()

    def let_through(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, at any instruction of which Ctrl-C may come.

        It may come behind it too, and what was returned is lost then: the function must have noted
        what it has done.
        """
        try:
            try:
                self._release()
                return function(*args)
            finally:
                self.__enter__()
        except BaseException as error:
            self._passed = error
            raise

    def _release(self) -> None:
        former = self._former
        # In another thread it is what an alarm has left here: the main thread puts it back.
        if former is None or get_ident() != main_thread().ident:
            return
        # Else the user has set another one meanwhile.
        if _signal.getsignal(self._number) == self._note:
            _signal.signal(self._number, former)
        # Only now: the line above calls handlers that are due, before it sets the other one.
        self._former = None
        if self._has_come:
            self._has_come = False
            # The frame where it came would be part of a cycle, if it were kept.
            former(self._number, sys._getframe())

    def _note(self, *args: Any) -> None:
        former = self._former
        if self.is_on:
            self._has_come = True
            return
        # The block was left by an exception that came before the handler was put back.
        if former is not None:
            _signal.signal(self._number, former)
            self._former = None
            former(*args)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C until the block is over, and each other signal with a handler in Python.

    In the middle of a start one of them would leave a child that nobody knows, or a descriptor; in
    that of a thread, a lock of the standard library's, for which the thread would wait for ever.
    """
    held = list(map(Interrupts, handled_signals()))
    try:
        with ExitStack() as stack:
            for each in held:
                each.is_on = True
                stack.enter_context(each)
            yield
    finally:
        for each in held:
            each.is_on = False


def _let_interrupts_through() -> None:
    """Give a fork the handlers that its parent has outside of blocks, whose end it never sees."""
    for number in handled_signals():
        former = handler = _signal.getsignal(number)
        while isinstance(getattr(former, "__self__", None), Interrupts):
            former = former.__self__._former  # one block may be within another
        if former is not handler:
            _signal.signal(number, former)


forks.in_child.append(_let_interrupts_through)
