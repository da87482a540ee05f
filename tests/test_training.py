"""The training examples run as a reader would run them, and show what they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import require
from test_examples import assert_clean, run_example


@pytest.mark.slow
def test_torch_training_is_killed_and_goes_on(tmp_path: Path) -> None:
    require("torch")
    require("sklearn")
    done = run_example("torch_training.py", cwd=tmp_path)
    assert_clean(done)
    end = r"step 300, test accuracy ([\d.]+)%, weights ([0-9a-f]{16})"
    (whole,) = re.findall(rf"^uninterrupted: {end}$", done.stdout, re.M)
    (resumed,) = re.findall(rf"^resumed: +{end}$", done.stdout, re.M)
    assert whole == resumed
    assert float(whole[0]) >= 95
    (killed,) = re.findall(r"^killed: +at step (\d+)$", done.stdout, re.M)
    (saved,) = re.findall(r"^from checkpoint: step (\d+)$", done.stdout, re.M)
    assert 0 < int(saved) < int(killed) < 300
    assert done.stdout.endswith("the same weights, to the last bit\n")
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_jax_training_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    require("jax")
    require("sklearn")
    runs = []
    for workers in (0, 2):
        done = run_example("jax_training.py", "--workers", workers, cwd=tmp_path)
        assert_clean(done)
        losses = re.findall(r"^epoch +(\d+): loss ([\d.]+)$", done.stdout, re.M)
        assert [int(epoch) for epoch, _ in losses] == [4, 9, 14, 19]
        assert float(losses[-1][1]) < float(losses[0][1])
        assert "460 steps in" in done.stdout
        (accuracy,) = re.findall(r"^test accuracy: ([\d.]+)% of 297 images$", done.stdout, re.M)
        assert float(accuracy) >= 95
        runs.append((losses, accuracy))
    assert runs[0] == runs[1]
