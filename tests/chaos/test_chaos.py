"""A short run of the chaos, in a process of its own, which ends in any case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run import VARIANTS

import minloader

RUN = Path(__file__).with_name("run.py")
KILLS = 10
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_chaos(variant: str, *options: str) -> None:
    numbers = {"--kills": KILLS, "--batches": 300, "--seed": 1, "--workers": 2, "--deadline": 250}
    arguments = [text for name, value in numbers.items() for text in (name, str(value))]
    result = subprocess.run(
        [sys.executable, str(RUN), *arguments, "--variant", variant, *options],
        capture_output=True,
        text=True,
        timeout=260,
        env=os.environ | {"PYTHONPATH": str(Path(minloader.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr[-5000:]
    line = re.match(rf"{variant} +(\d+) kills, +(\d+) batches .* (\d+) workers", result.stdout)
    assert line is not None, result.stdout
    kills, batches, replaced = map(int, line.groups())
    assert KILLS <= kills <= KILLS + 1
    assert batches >= 300
    assert replaced >= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_workers_change_nothing(variant):
    run_chaos(variant)


@pytest.mark.parametrize("variant", ["spawn", "fork"])
def test_workers_killed_while_they_start_change_nothing(variant):
    run_chaos(variant, "--starting")
