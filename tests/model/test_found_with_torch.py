"""The programs of ``drop_in.py``, for torch's loader."""

from __future__ import annotations

import pytest
from conftest import require, variants

require("torch")

from .drop_in import FOUND, KINDS, PRESSED, press, run  # noqa: E402

QUICK = ["shuffle", "own generator", "told with state", "rolling", "stream with state"]
"""Kinds of samplers and streams that are interrupted in any case."""


@variants("num_workers", [0, 1])
@pytest.mark.parametrize("name", FOUND)
def test_found(name, num_workers):
    for kind in KINDS:
        run(kind, num_workers, FOUND[name]).close()


@pytest.mark.parametrize("name", PRESSED)
@variants(
    ("kinds", "num_workers", "stride"),
    [(QUICK, 0, 61), (list(KINDS), 0, 23), (QUICK, 1, 71)],
    ids=["some", "all", "with a worker"],
)
def test_an_interrupt_at_each_place_of_next(name, kinds, num_workers, stride):
    assert max(press(kind, num_workers, PRESSED[name], stride) for kind in kinds) > 0
