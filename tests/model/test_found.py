"""The programs of ``found.py``, and Ctrl-C at each place of the calls that are in it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from conftest import variants
from interrupts import COLLECTIONS, ERRORS, FEEDS, OURS, SHARD_FEEDS, THREADS

from .found import (
    COMES,
    FATES,
    FOUND,
    FOUND_IN_PROCESSES,
    LOOPS,
    PRESSES,
    Press,
    possible,
    press,
    run,
)
from .programs import KINDS

QUICK = ["own shuffled", "rolling", "batches of told", "told with state", "counted iterator"]
QUICK += ["failing", "opened counting", "own iterator"]
"""Kinds of samplers and streams with which programs are run in any case, in one of two ways."""

QUICKEST = ["own shuffled", "told with state", "failing", "counting"]
"""Those that are interrupted in any case, most in one of the two ways."""

SHORT = ["discarding", "over rolling"]
"""Those of which nothing is left behind what is skipped."""

OTHERS = [kind for kind in KINDS if kind not in QUICKEST + SHORT][::3]
"""Some others, at fewer places: it takes long."""


def in_turns(kinds: list[str], programs: Iterable[str], name: str, way: str) -> list[str]:
    """Every second kind: each is run with each program, in one of the two ways in turns."""
    turn = list(programs).index(name) + (way == "threads")
    return [kind for n, kind in enumerate(kinds) if KINDS[kind].opened or (n + turn) % 2]


@pytest.mark.parametrize("way", ["here", "threads"])
@pytest.mark.parametrize("name", FOUND)
@variants("some", [True, False], ids=["some", "others"])
def test_found(name, way, some, monkeypatch):
    if way == "here":
        monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # it is asked each time
    quick = in_turns(QUICK, FOUND, name, way)
    others = [kind for kind in QUICK if kind not in quick]
    others += in_turns([kind for kind in KINDS if kind not in QUICK], FOUND, name, way)
    kinds = quick if some else others
    for kind in possible(FOUND[name], way, kinds):
        run(kind, way, FOUND[name]).end()


@pytest.mark.parametrize("name", FOUND_IN_PROCESSES)
@variants("kind", ["shuffled", "counting", "rolling", "told with state", "own iterator"], 2)
def test_found_in_processes(name, kind):
    for each in possible(FOUND_IN_PROCESSES[name], "processes", [kind]):
        run(each, "processes", FOUND_IN_PROCESSES[name]).end()


@pytest.mark.parametrize("way", ["here", "threads"])
@pytest.mark.parametrize("name", PRESSES)
@variants("some", [True, False], ids=["some", "others"])
def test_an_interrupt_at_each_place(name, way, some, monkeypatch):
    if way == "here":
        monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # it is asked each time
    pressed = PRESSES[name]
    if (pressed.within, way) == (THREADS, "here"):
        pytest.skip("no thread is started")
    quickest = QUICKEST
    if pressed.within not in (SHARD_FEEDS, ERRORS, COLLECTIONS):  # which one of these has
        quickest = in_turns(QUICKEST, PRESSES, name, way)
    slow = [kind for kind in QUICKEST if kind not in quickest]
    kinds = quickest if some else slow + in_turns(OTHERS, PRESSES, name, way)
    those = possible(f"{pressed.before}; press {pressed.call}", way, kinds)
    pressed = pressed._replace(stride=pressed.stride * (1 if some else 7))
    most = max([press(kind, way, pressed) for kind in those], default=1)
    # Of others not each has such a place; and a feed may have been read by then, for threads.
    if some and not (
        way == "threads" and pressed.within in (FEEDS, SHARD_FEEDS, ERRORS, COLLECTIONS)
    ):
        assert most > 0


@pytest.mark.parametrize(
    ("comes", "way"),
    [
        *((comes, "threads") for comes in COMES),
        # What comes just as the turn to make a batch is taken keeps it.
        *((comes, "here") for comes in COMES if comes != "another thread's"),
    ],
)
@pytest.mark.parametrize("name", LOOPS)
@variants(
    ("fate", "stride", "kinds"),
    [
        ("as it is", 1499, QUICKEST),
        ("as it is", 3001, OTHERS),
        *((each, 997, QUICK) for each in FATES),
    ],
    ids=["some", "others", *FATES],
)
def test_what_comes_at_each_place_of_a_loop(name, comes, way, fate, stride, kinds):
    steps, epochs = LOOPS[name]
    needs = "iter" if comes.startswith("Ctrl-C") else "note"  # the sampler is read again
    for kind in possible(f"{steps}; {needs}", way, in_turns(kinds, LOOPS, name, way)):
        # More epochs are not worth the square of the time.
        press(kind, way, Press(steps, "loop", OURS, epochs * stride, comes), **FATES[fate])
