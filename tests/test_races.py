"""Threads that come between any two instructions of another, as they may without a global lock."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minloader._memory import slot_writer
from minloader._memory.slot_writer import NoSlot


def at_each_step(function: Any, call: Callable[[], object], meanwhile: Callable[[], object]) -> int:
    """Makes a call again and again, with something else before another instruction of a function.

    Args:
        function: whose instructions are counted, when the call runs it.
        call: what is called; the first time, the first instruction is waited for, and so on.
        meanwhile: what happens then, once in each call.

    Returns:
        How many instructions there were.
    """
    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether any frame wants to be told
    for step in itertools.count():
        left = step

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code is not function.__code__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left >= 0:
                return trace
            sys.settrace(None)
            meanwhile()
            return None

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(former)
        if left >= 0:
            return step
    raise AssertionError


class Writer(NoSlot):
    def before_fork(self) -> None:
        pass


@pytest.mark.parametrize("function", [slot_writer.empty, slot_writer._before_fork])
def test_a_task_ends_while_a_thread_of_the_dataset_uses_its_slot(function):
    def call() -> None:
        slot_writer.use(Writer())
        function(*[3] * (function is slot_writer.empty))

    try:
        assert at_each_step(function, call, lambda: slot_writer.use(None)) > 5
    finally:
        slot_writer.use(None)
