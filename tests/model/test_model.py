"""Random programs, as many as a minute has room for: ``python -m tests.model`` runs an hour."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import require
from hypothesis import HealthCheck, Phase, settings

from .machine import Programs, ProgramsInProcesses, counts, run_programs

SETTINGS = settings(
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # the command makes what fails short
)


def run(machine: Any, programs: int, steps: int) -> Counter[str]:
    """Runs programs, and says how often each rule was used."""
    before = counts.copy()
    options = settings(SETTINGS, max_examples=programs, stateful_step_count=steps)
    run_programs(machine, 1, options)
    return counts - before


@pytest.mark.timeout(600)
def test_programs():
    used = run(Programs, 80, 20)
    assert used["programs"] >= 60
    rules = ["iter", "epochs", "prefetch", "leave", "num_workers", "next in threads", "state_dict"]
    rules += ["load_state_dict", "load_state_dict elsewhere", "Ctrl-C in next"]
    assert [rule for rule in rules if not used[rule]] == []


class UninterruptedInProcesses(ProgramsInProcesses):
    """Without Ctrl-C: CPython loses a descriptor that a call has made and nobody has yet."""

    interrupt = None


@pytest.mark.timeout(600)
def test_programs_with_worker_processes():
    used = run(UninterruptedInProcesses, 12, 12)
    assert used["programs"] >= 12


@pytest.mark.timeout(600)
def test_programs_with_torchs_loader():
    require("torch")
    from .drop_in import TorchPrograms

    used = run(TorchPrograms, 80, 20)
    rules = ["begin", "next", "next to the end", "leave", "state_dict", "load_state_dict"]
    assert [rule for rule in rules if not used[f"torch: {rule}"]] == []


@pytest.mark.timeout(600)
def test_programs_with_torchs_loader_and_worker_processes():
    require("torch")
    from .drop_in import TorchProgramsInProcesses

    assert run(TorchProgramsInProcesses, 12, 12)["programs"] >= 12
