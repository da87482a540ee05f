"""The programs of ``found.py``, and Ctrl-C at each place of the calls that are in it."""

from __future__ import annotations

import pytest
from conftest import variants

from .found import FOUND, FOUND_IN_PROCESSES, PRESSES, possible, press, run
from .programs import KINDS

QUICK = ["own shuffled", "rolling", "batches of told", "told with state", "counted iterator"]
QUICK += ["failing", "opened counting", "own iterator"]
"""Kinds of samplers and streams with which programs are run in any case."""

QUICKEST = ["own shuffled", "told with state", "failing", "counting"]
"""Those that are interrupted in any case."""

SHORT = ["discarding", "over rolling"]
"""Those of which nothing is left behind what is skipped."""

OTHERS = [[kind] for kind in KINDS if kind not in QUICKEST + SHORT][::3]
"""Some others, one by one and at fewer places: it takes long."""

some_kinds = variants(
    "kinds", [QUICK, [kind for kind in KINDS if kind not in QUICK]], ids=["some", "others"]
)


@pytest.mark.parametrize("way", ["here", "threads"])
@pytest.mark.parametrize("name", FOUND)
@some_kinds
def test_found(name, way, kinds, monkeypatch):
    if way == "here":
        monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # it is asked each time
    for kind in possible(FOUND[name], way, kinds):
        run(kind, way, FOUND[name]).end()


@pytest.mark.parametrize("name", FOUND_IN_PROCESSES)
@variants("kind", ["shuffled", "counting", "rolling", "told with state", "own iterator"], 2)
def test_found_in_processes(name, kind):
    for each in possible(FOUND_IN_PROCESSES[name], "processes", [kind]):
        run(each, "processes", FOUND_IN_PROCESSES[name]).end()


@pytest.mark.parametrize("way", ["here", "threads"])
@pytest.mark.parametrize("name", PRESSES)
@variants("kinds", [QUICKEST, *OTHERS], ids=str)
def test_an_interrupt_at_each_place(name, way, kinds):
    pressed = PRESSES[name]
    those = possible(f"{pressed.before}; press {pressed.call}", way, kinds)
    stride = pressed.stride * (1 if kinds is QUICKEST else 3)
    most = max([press(kind, way, pressed, stride) for kind in those], default=1)
    # Of others not each has such a place.
    if kinds is QUICKEST:
        assert most > 0 or name == "the end"  # which threads have seen before
