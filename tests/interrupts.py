"""What comes between two instructions: a signal where CPython looks for signals, or a thread."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import minloader

OURS = str(Path(minloader.__file__).parent)
"""Where the package lies: an interrupt comes there, and not in what it calls."""

Within = str | tuple[str, ...]
"""A folder, or files, of code."""

READER = f"{OURS}/_sampling/reader.py"
FEEDS = f"{OURS}/_epochs/feed.py", READER
SHARD_FEEDS = f"{OURS}/_epochs/shard_feed.py"
"""What draws from samplers, and what makes the tasks of streams."""

COLLECTIONS = os.path.dirname(collections.__file__)
"""What the package calls, too."""

THREADS = threading.__file__
"""What starts threads."""

ERRORS = f"{OURS}/_errors.py"
"""What is asked what an error is."""

TESTS = str(Path(__file__).parent)
"""What stands for the user's code. A generator in it that was interrupted cannot go on."""

MOST = 20_000
"""Batches that are taken at most while an interrupt is waited for."""

FINALIZERS = "__del__", "weakref_cb", "_remove", "gc_callback", "beginning.<locals>.<lambda>"
"""Ends of their names. What they raise CPython prints and drops, a KeyboardInterrupt too."""

CALLED_BY_WEAKREFS = "/weakref.py", "/multiprocessing/util.py"
"""Ends of the paths of modules whose finalizers have no name that tells."""


class TimeLimit(Exception):
    """What the handler of an alarm raises."""


class Deadline(BaseException):
    """Likewise, and no ``except Exception`` takes it."""


class Boom(BaseException):
    """What another thread sets."""


Breaking = type[KeyboardInterrupt | TimeLimit | Deadline | Boom]


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        left: how many places were left to pass at its end; -1: it has come.
        interrupted: whether it came out of the call.
        value: what the call returned, if it did.
        in_tests: whether it came in what code of the tests called, such as a stream's.
        where: it came, for messages.
    """

    left: int
    interrupted: bool
    value: Any
    in_tests: bool
    where: str

    @property
    def reached(self) -> bool:
        """Whether there were so many places."""
        return self.left < 0


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """The instructions before which CPython runs the handlers of signals.

    It looks behind a call, where a function begins or goes on, and before a loop's next round. What
    is raised behind a call is handled as if the call had raised it: so not where the next
    instruction is handled elsewhere, as with a ``return`` within ``with``.
    """
    found, before, former = set(), "", None
    bytecode = dis.Bytecode(code)
    for instruction in bytecode:
        spans = bytecode.exception_entries
        handler = next((s.target for s in spans if s.start <= instruction.offset < s.end), None)
        is_behind = before.startswith("CALL") and handler == former
        if is_behind or before.startswith("RESUME") or instruction.opname == "JUMP_BACKWARD":
            found.add(instruction.offset)
        before = instruction.opname.replace("CALL_INTRINSIC", "INTRINSIC")  # after that it does not
        former = handler
    return frozenset(found)


@functools.cache
def calls(code: CodeType) -> frozenset[int]:
    """The instructions before which an exception can come that is set from outside: each call."""
    made = {each.offset for each in dis.Bytecode(code) if each.opname.startswith("CALL")}
    return frozenset(made) | places(code)


def interrupted(
    call: Callable[[], Any], step: int, within: Within = OURS, raises: Breaking = KeyboardInterrupt
) -> Outcome:
    """Makes a call, in which something comes.

    Args:
        call: what is called, in this thread.
        step: how many places are passed before.
        within: folder of the code in which places are counted; "" for all code but the tests'.
        raises: what comes. KeyboardInterrupt: the signal, for whatever handler there is. Others are
            raised there by what is the handler of SIGALRM then.
    """
    left, in_tests, came_at = step, False, ""
    where = calls if raises is Boom else places

    def count(frame: Any, event: Any, arg: Any = None) -> Any:
        nonlocal left, in_tests, came_at
        if frame == signal.SIGALRM:  # it was held, and is let through
            raise raises
        if event == "opcode" and left >= 0 and frame.f_lasti in where(frame.f_code):
            if left > 0:
                left -= 1
            elif not drops_errors(frame):
                left = -1
                in_tests = _is_in_tests(frame)
                came_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                if raises is KeyboardInterrupt:
                    signal.raise_signal(signal.SIGINT)  # which code may hold off, for a while
                elif raises is not Boom and signal.getsignal(signal.SIGALRM) is not count:
                    signal.raise_signal(signal.SIGALRM)  # which is held off just now
                else:
                    raise raises
        return count

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if path.startswith(TESTS) or not path.startswith(within or "/"):
            return None
        frame.f_trace = count  # CPython 3.12 and newer want it before the opcodes are asked for
        frame.f_trace_opcodes = True
        return count

    was_interrupted, value = False, None
    before = signal.signal(signal.SIGALRM, count)  # called from there it is in the traceback
    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether any frame wants to be told
    with warnings.catch_warnings():
        # Between open() and the block of its ``with``: reference counts close the file.
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        sys.settrace(begin)
        try:
            value = call()
        except raises:
            was_interrupted = True
        finally:
            sys.settrace(former)
            signal.signal(signal.SIGALRM, before)
            passed, left = left, -1  # 3.15 asks the same function where a generator goes on
    return Outcome(passed, was_interrupted, value, in_tests, came_at)


def each_place(
    stride: int, within: Within = OURS, least: int = 20
) -> Iterator[tuple[int, Callable[[Callable[[], Any]], Outcome]]]:
    """Gives places, and functions that make a call with Ctrl-C there, up to the end of the call.

    Args:
        stride: how far apart the places are.
        within: as in :func:`interrupted`.
        least: how many places there must be.
    """
    outcomes: list[Outcome] = []
    for place in itertools.count(0, stride):

        def press(call: Callable[[], Any], place: int = place) -> Outcome:
            outcomes.append(interrupted(call, place, within))
            return outcomes[-1]

        yield place, press
        if not outcomes.pop().reached:
            assert place > least, "it has hardly any places"
            return


def taken_through(batches: Iterator[Any], steps: Iterable[int], within: Within = OURS) -> list[Any]:
    """Takes batches, and is interrupted again and again.

    Args:
        batches: endless, or longer than it takes.
        steps: how many places to pass, in as many batches as that takes, before each interrupt.
        within: as in :func:`interrupted`.

    Returns:
        All that came. After each interrupt one batch is taken in peace.
    """
    given: list[Any] = []
    for step in steps:
        most = len(given) + MOST

        def take(most: int = most) -> None:
            while len(given) < most:
                given.append(next(batches))

        outcome = interrupted(take, step, within)
        assert outcome.reached, f"{MOST} batches have not so many places"
        assert outcome.interrupted, "Ctrl-C was swallowed"
        given.append(next(batches))
    return given


def at_each_step(
    where: Callable[..., object] | str,
    call: Callable[[], object],
    meanwhile: Callable[[], object],
    prepare: Callable[[], object] = int,
    stride: int = 1,
) -> int:
    """Makes a call again and again, with something else before another instruction of it.

    Args:
        where: function, or class with methods, whose instructions are counted, when the call
            comes to them. Those of what it calls are not: there may be very many. A folder: those
            of all code in it.
        call: what is called; the first time, the first instruction is waited for, and so on.
        meanwhile: what happens then, once in each call.
        prepare: what comes before each call.
        stride: how far apart the instructions are.

    Returns:
        How many instructions there were.
    """
    functions = vars(where).values() if isinstance(where, type) else [where]
    places = {each.__code__ for each in functions if hasattr(each, "__code__")}

    def counts(code: CodeType) -> bool:
        return code in places or (isinstance(where, str) and code.co_filename.startswith(where))

    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether any frame wants to be told
    for step in itertools.count(0, stride):
        left = step

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if not counts(frame.f_code):
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left >= 0:
                return trace
            sys.settrace(None)
            meanwhile()
            return None

        prepare()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(former)
        if left >= 0:
            return step
    raise AssertionError


def some_steps(seed: int, count: int, most: int) -> Iterator[int]:
    """Each place near the beginning, and then some at random."""
    rng = random.Random(seed)
    for step in range(count):
        yield step if step < count // 3 else rng.randrange(most)


def drops_errors(frame: FrameType | None) -> bool:
    """Whether what is raised here would come to nobody, or break a module that is imported."""
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if code.co_qualname.endswith(FINALIZERS) or path.endswith(CALLED_BY_WEAKREFS):
            return True
        if "importlib" in path:
            return True
        frame = frame.f_back
    return False


def _is_in_tests(frame: FrameType) -> bool:
    """Whether code of the tests has called this, within the call that is interrupted."""
    while frame.f_back is not None and frame.f_back.f_code is not interrupted.__code__:
        if frame.f_code.co_filename.startswith(TESTS):
            return True
        frame = frame.f_back
    return False
