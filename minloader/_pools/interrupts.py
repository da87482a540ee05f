"""Ctrl-C is held while an iterator works, and let through where that is safe.

That one module does all of this is trio's idea.
"""

from __future__ import annotations

# The functions of signal make enums of what they get, which takes longer than they.
import _signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Any

from minloader._memory import forks

_SIGINT = int(_signal.SIGINT)


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

    Attributes:
        is_on: whether the function with the block runs. That function sets it, without a call.
        is_unsure: whether what follows from the position is to be made again.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_unsure = False
        self._former: Any = None  # the handler whose place this has taken
        self._held: Any = None
        self._passed: BaseException | None = None

    def __enter__(self) -> None:
        former = _signal.getsignal(_SIGINT)
        holder = getattr(former, "__self__", None)
        if isinstance(holder, Interrupts):
            if holder.is_on:
                return  # it is held, by this or by a block around this
            former = holder._former  # an exception has come there before the handler was put back
        if callable(former) and get_ident() == main_thread().ident:
            self._former = former
            _signal.signal(_SIGINT, self._note)

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
        if former is None:
            return
        if _signal.getsignal(_SIGINT) == self._note:  # else the user has set another one meanwhile
            _signal.signal(_SIGINT, former)
        # Only now: the line above calls handlers that are due, before it sets the other one.
        held = self._held
        self._former = None
        self._held = None
        if held is not None:
            former(*held)

    def _note(self, *args: Any) -> None:
        former = self._former
        if self.is_on:
            self._held = args
            return
        # The block was left by an exception that came before the handler was put back.
        if former is not None:
            _signal.signal(_SIGINT, former)
            self._former = None
            former(*args)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C until the block is over.

    In the middle of a start it would leave a child that nobody knows, or a descriptor.
    """
    interrupts = Interrupts()
    interrupts.is_on = True
    try:
        with interrupts:
            yield
    finally:
        interrupts.is_on = False


def _let_interrupts_through() -> None:
    """Give a fork the handler that its parent has outside of the block, of which it sees no end."""
    former = handler = _signal.getsignal(_SIGINT)
    while isinstance(getattr(former, "__self__", None), Interrupts):
        former = former.__self__._former  # one block may be within another
    if former is not handler:
        _signal.signal(_SIGINT, former)


forks.in_child.append(_let_interrupts_through)
