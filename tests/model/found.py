"""What the model has found: programs of a few steps, run as the random ones are.

Each of them was wrong once. The steps of a program are divided by semicolons. ``here`` and in
``threads`` it is run with every kind of sampler and stream for which all of them are possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from interrupts import (
    COLLECTIONS,
    ERRORS,
    FEEDS,
    OURS,
    SHARD_FEEDS,
    THREADS,
    Boom,
    Breaking,
    TimeLimit,
    Within,
)

from .programs import KINDS, Break, Kind, Program

STEPS: dict[str, Callable[..., Any]] = {
    "iter": lambda program: program.begin("iter"),
    "epochs": lambda program, epochs: program.begin("epochs", epochs),
    "prefetch": lambda program, epochs, depth: program.begin("prefetched", epochs, depth),
    "take": lambda program, count, which=-1: take(program, count, which),
    "finish": lambda program, which=-1: program.runs and program.finish(which),
    "take all": lambda program: take(program, left(program)),
    "take all but one": lambda program: take(program, left(program) - 1),
    "take each": lambda program: take_each(program),
    "look and take each": lambda program: take_each(program, looks=True),
    "leave": lambda program: program.runs and program.leave(-1),
    "note": lambda program: program.note(),
    "load": lambda program, which: program.load(which, None),
    "move": lambda program, which: program.move(which, "threads", prefetch_factor=1),
    "refuse": lambda program, which: program.refuse(which),
    "former": lambda program: program.former and program.use_former(),
    "verify": lambda program: verify(program),
    "skip": lambda program, n: program.skip(n),
    "set epoch": lambda program, epoch: program.set_epoch(epoch, "set_epoch"),
    "resize": lambda program, workers: program.resize(workers),
    "kill": lambda program: program.kill(0),
    "fork": lambda program: program.fork(),
    "look": lambda program: program.look_at_sampler(),
}
"""What may be done, and how; numbers behind a name are its arguments."""

PRESSED: dict[str, Callable[[Program, list[Break]], Any]] = {
    "iter": lambda program, breaks: program.begin("iter", breaks=breaks[0]),
    "epochs": lambda program, breaks: program.begin("epochs", 2, breaks=breaks[0]),
    "prefetch": lambda program, breaks: program.begin("prefetched", breaks=breaks[0]),
    "next": lambda program, breaks: program.interrupt(-1, breaks, noted=True),
    "next of the former": lambda program, breaks: program.interrupt(0, breaks),
    "next of both": lambda program, breaks: [
        program.runs[which:] and program.interrupt(which, breaks) for which in (0, 1, 0)
    ],
    "load": lambda program, breaks: program.load(0, breaks[0]),
    "skip": lambda program, breaks: program.skip(2, breaks[0]),
    "resize": lambda program, breaks: program.resize(1, breaks[0]),
    "loop": lambda program, breaks: loop(program, breaks),
}
"""What something may break into."""

COMES: dict[str, tuple[Breaking, int]] = {
    "Ctrl-C": (KeyboardInterrupt, 1),
    "Ctrl-C twice": (KeyboardInterrupt, 2),
    "an alarm": (TimeLimit, 1),
    "another thread's": (Boom, 1),
}
"""What breaks in, and how often."""

LOOPS: dict[str, tuple[str, int]] = {
    "iter": ("iter", 1),
    "a second one": ("iter; finish; iter", 1),
    "epochs": ("epochs 2", 2),
    "prefetch": ("prefetch 1 2", 1),
    "prefetched epochs": ("prefetch 2 2", 2),
}
"""Loops into which it does, at any place of all their calls, and how many epochs these are of."""

FATES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "failing": {"bad": frozenset({4})},
    "left out": {"bad": frozenset({4}), "fate": "left out"},
    "in any order": {"options": {"seed": 7, "in_order": False}},
}
"""Arguments of a program."""

FOUND: dict[str, str] = {
    "the loop": "iter; finish; iter; finish; iter; finish",
    "epochs without a gap": "epochs 3; finish; iter; finish; epochs 2; finish",
    "prefetched epochs": "prefetch 2 2; finish; iter; finish; prefetch 3 40; finish; iter; finish",
    "states of the loop": "note; iter; take each; iter; take each; verify",
    "states of epochs": "note; epochs 3; take each; verify",
    "states of prefetch": "note; prefetch 3 4; take each; verify",
    "resumed, and resumed again": "iter; take 2; note; load 0; iter; take each; load 1; verify",
    "resumed elsewhere": "iter; take 2; note; move 0; iter; take 1; note; move 1; iter; finish",
    "resumed in the next epoch": "epochs 2; take all; take 2; note; load 0; epochs 2; finish",
    "back to before anything": "note; iter; take 3; load 0; iter; finish; load 0; iter; finish",
    "back to before an epoch": "iter; finish; note; iter; take 2; load 0; iter; finish; verify",
    "a state that was loaded": "iter; take 2; note; load 0; note; iter; note; verify",
    "an iterator from before a state": "iter; take 3; note; load 0; former; iter; finish",
    "a state that is refused": "iter; take 2; note; refuse 0; take 2; note; finish; verify",
    "left": "iter; take 3; leave; iter; take 1; leave; iter; finish; iter; finish",
    "left at its last batch": "iter; take all; leave; iter; finish; iter; finish",
    "left in epochs": "epochs 3; take all; take 2; leave; iter; finish; iter; finish",
    "left in prefetch": "prefetch 3 3; take 2; leave; iter; finish; prefetch 2 3; take 1; leave; "
    "iter; finish",
    "left, of which a state was loaded": "iter; take 3; note; leave; load 0; iter; take 1; leave; "
    "iter; finish; verify",
    "left where there are no workers": "iter; take 3; leave; resize 1; iter; finish; iter; finish; "
    "resize 0; iter; finish",
    "left before a fork": "iter; take 3; leave; fork; iter; finish",
    "a fork between epochs": "iter; finish; fork; iter; finish",
    "another epoch": "iter; finish; set epoch 3; iter; finish; set epoch 1; note; iter; finish; "
    "verify",
    "another epoch than that of a state": "iter; take 2; note; load 0; set epoch 5; iter; finish",
    "another epoch than that which was left": "iter; take 1; leave; iter; leave; note; load 0; "
    "set epoch 5; iter; finish",
    "another epoch after a state between epochs": "iter; finish; note; load 0; set epoch 5; iter; "
    "finish",
    "somebody looks at the sampler": "look; note; iter; look and take each; look; epochs 2; "
    "look and take each; look; iter; look and take each; verify",
    "somebody looks before another epoch": "iter; take 1; note; finish; note; look; load 1; look; "
    "set epoch 5; iter; finish; load 0; look; set epoch 5; iter; finish; verify",
    "skipped after one that was left, before it again": "iter; take 1; leave; skip 0; set epoch 0; "
    "note; verify; skip 1; set epoch 1; note; verify",
    "skipped, before another epoch": "iter; finish; note; skip 2; set epoch 5; iter; finish; "
    "load 0; skip 2; note; load 1; set epoch 5; iter; finish",
    "skipped in an epoch that may be empty": "iter; finish; skip 1; iter; note; finish; verify",
    "skipped before": "skip 2; note; iter; take 1; skip 1; note; finish; iter; finish; verify",
    "all of it skipped": "skip 99; note; iter; finish; iter; finish; verify",
    "all of the rest skipped": "iter; take 1; skip 99; note; finish; note; iter; finish; verify",
    "skipped after one that was left": "iter; take 1; leave; skip 2; note; iter; finish; iter; "
    "finish; verify",
    "skipped in epochs": "epochs 3; skip 99; take 1; skip 2; take 1; finish; iter; finish",
    "resized": "iter; take 2; resize 3; take 2; resize 1; take 2; resize 2; finish; iter; take 1; "
    "resize 1; finish",
    "resized to none": "iter; take 2; resize 1; take 1; resize 0; take 1; resize 2; finish; "
    "resize 0; iter; finish",
    "resized as it begins": "iter; resize 1; finish; iter; take each; verify",
    "two at once": "iter; iter; take 2 0; take 1 1; take 2 0; finish 0; finish",
    "a former one, behind a later": "iter; take 1; iter; take 3; take 2 0; note; finish 0; finish; "
    "verify",
}

FOUND_IN_PROCESSES: dict[str, str] = {
    "states": "note; epochs 2; take each; verify",
    "killed": "iter; take 2; kill; take 3; kill; finish; iter; take 1; kill; take each; verify",
    "killed, two at once": "iter; iter; take 1 0; take 1 1; kill; take 2 0; kill; take 1 1; "
    "finish 0; finish",
    "resized": "iter; take 2; resize 1; take 2; resize 2; finish; iter; resize 1; finish",
    "left": "iter; take 3; leave; iter; finish; iter; finish",
    "from none": "iter; take 1; resize 0; take 1; resize 2; take 1; kill; finish; iter; finish",
}


class Press(NamedTuple):
    """Ctrl-C at each place of a call.

    Attributes:
        before: the steps of the program before it.
        call: one of ``PRESSED``.
        within: folder of the code in which places are counted.
        stride: how far apart they are.
        comes: one of ``COMES``.
    """

    before: str
    call: str
    within: Within = OURS
    stride: int = 1
    comes: str = "Ctrl-C"


PRESSES: dict[str, Press] = {
    "iter": Press("", "iter", stride=67),
    "iter after an epoch": Press("iter; finish", "iter", stride=67),
    "iter after one that was left": Press("iter; take 2; leave", "iter", stride=67),
    "the first next": Press("iter", "next", stride=397),
    "the first next of a feed": Press("iter", "next", FEEDS, 7),
    "the first next of a shard": Press("iter", "next", SHARD_FEEDS, 5),
    "the first next after a state": Press("iter; take 2; note; load 0; iter", "next", stride=397),
    "the first next of epochs": Press("", "epochs", stride=397),
    "the last next": Press("iter; take all but one", "next", FEEDS, 5),
    "the end": Press("iter; take all", "next", FEEDS, 5),
    "the next epoch": Press("epochs 2; take all but one", "next", f"{OURS}/_epochs", 61),
    "the first of the next epoch": Press("epochs 2; take all", "next", f"{OURS}/_epochs", 61),
    "a task of the next epoch": Press("epochs 2; take all", "next", f"{OURS}/_epochs/lane.py", 3),
    "behind a later one": Press("iter; iter; take 1 0; take 4", "next of the former", stride=41),
    "load": Press("iter; take 2; note; finish", "load", stride=79),
    "load within an epoch": Press("iter; take 2; note; take 1", "load", stride=79),
    "skip": Press("iter; take 1", "skip", stride=19),
    "resize": Press("iter; take 1", "resize", stride=19),
    "prefetch": Press("prefetch 2 2", "next", f"{OURS}/_prefetch.py", 11),
    "what is read again": Press("iter; take 2; resize 3", "next", SHARD_FEEDS, 7),
    "an error of the sampler": Press("iter; take 3", "next", ERRORS),
    "an error of the sampler, as epochs begin": Press("", "epochs", ERRORS),
    "an error of the sampler, as prefetch begins": Press("", "prefetch", ERRORS),
    "alarms, in what the package calls": Press("iter", "next", COLLECTIONS, 1, "an alarm"),
    "alarms, load": Press("iter; take 2; note; finish", "load", stride=79, comes="an alarm"),
    "alarms, as an error is printed": Press("prefetch 1 2", "loop", ERRORS, 1, "an alarm"),
    "alarms, as threads are started": Press("", "epochs", THREADS, 1, "an alarm"),
    "alarms, where Ctrl-C is held": Press(
        "iter; iter; take 1 0; take 1 1",
        "next of both",
        f"{OURS}/_pools/interrupts.py",
        1,
        "an alarm",
    ),
}

NEEDS: dict[str, Callable[[Kind], Any]] = {
    "leave": lambda what: not what.alone,
    "note": lambda what: what.has_state,
    "take each": lambda what: what.has_state,
    "look": lambda what: what.may_be_looked_at,
    "set epoch": lambda what: not what.sequential,
    "skip": lambda what: not what.stream and what.bad is None,
    "refuse": lambda what: what.has_state,
    "iter; iter": lambda what: not (what.alone or what.stream),
    "iter; take 1; iter": lambda what: not (what.alone or what.stream),
    "resize 0": lambda what: not what.opened,
    "press iter": lambda what: what.has_state,  # what it raised then, it does not raise again
    "press skip": lambda what: not what.stream and what.bad is None,
    "press load": lambda what: what.has_state,
}
"""What a step, or several of them, need of a kind."""


def possible(steps: str, way: str, kinds: Iterable[str]) -> list[str]:
    """Those of some kinds with which a program can be run."""
    needed = [need for words, need in NEEDS.items() if words in steps]
    found = []
    for name in kinds:
        what = KINDS[name]
        is_possible = what.repeatable and not (what.opened and way == "here")
        if is_possible and all(need(what) for need in needed):
            found.append(name)
    return found


def run(kind: str, way: str, steps: str, **arguments: Any) -> Program:
    """Runs a program of so many steps; it is to be ended."""
    what = KINDS[kind]
    in_pairs = what.stream and way == "threads"
    options = {"seed": 7, "batch_size": 2} if in_pairs else {"seed": 7}
    collated = in_pairs or bool(what.options)
    given: dict[str, Any] = {"collated": collated} | arguments
    given["options"] = options | arguments.get("options", {})
    program = Program(kind, way, 13, **given)
    try:
        do(program, steps)
    except BaseException as error:
        error.add_note("\n".join(["the program:", *program.steps]))
        program.end()
        raise
    return program


def do(program: Program, steps: str) -> None:
    for step in filter(None, steps.split("; ")):
        words = step.split()
        numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
        STEPS[" ".join(word for word in words if not word.lstrip("-").isdigit())](program, *numbers)


def press(kind: str, way: str, pressed: Press, **arguments: Any) -> int:
    """It comes at each so many-th place of a call; says how many places there are."""
    raises, times = COMES[pressed.comes]
    behind = itertools.cycle(range(0, 60, 7))
    for place in itertools.count(0, pressed.stride):
        program = run(kind, way, pressed.before, **arguments)
        places = [place, next(behind)][:times]
        try:
            breaks = [Break(each, raises, pressed.within) for each in places]
            PRESSED[pressed.call](program, breaks)
            reached = program.left < 0
            if program.what.has_state:
                program.note()
            do(program, "finish 0; finish; iter; finish")
            if program.what.has_state:
                verify(program)
        except BaseException as error:
            error.add_note("\n".join(["the program:", *program.steps]))
            raise
        finally:
            program.end()
        if not reached:
            return place
    raise AssertionError


def loop(program: Program, breaks: list[Break]) -> None:
    """Takes all that there is; what has too few places in one call comes in the next."""
    program.left = breaks[0].place
    while program.runs and program.left >= 0:
        program.interrupt(-1, [breaks[0]._replace(place=program.left), *breaks[1:]])


def take(program: Program, count: int, which: int = -1) -> None:
    with program.step(f"take {count}"):
        if program.runs:
            program.take(which, count)


def take_each(program: Program, looks: bool = False) -> None:
    """Takes the rest, and notes each state."""
    while program.runs:
        if looks:
            program.look_at_sampler()
        take(program, 1)
        program.note()


def left(program: Program) -> int:
    """How many batches of the epoch are to come."""
    return len(program.runs[-1][1].place.coming)


def verify(program: Program) -> None:
    """Goes on from the states; of many from some."""
    states = len(program.states)
    for which in range(0, states, 1 + states // 8):
        program.verify(which, "threads" if program.what.opened else "here")
