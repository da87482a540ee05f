"""Random programs, as many as a minute has room for: ``python -m tests.model`` runs an hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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


def run(machine: Any, programs: int, steps: int, rules: Iterable[str] = ()) -> Counter[str]:
    """Runs programs, says how often each rule was used, and checks that some of them were.

    Hypothesis draws by what the process has imported, too, and may leave a rule out: then others
    are run besides.
    """
    before = counts.copy()
    options = settings(SETTINGS, max_examples=programs, stateful_step_count=steps)
    for number in range(1, 5):
        run_programs(machine, number, options)
        used = counts - before
        if all(used[rule] for rule in rules):
            break
    assert [rule for rule in rules if not used[rule]] == []
    return used


@pytest.mark.timeout(600)
def test_programs():
    rules = ["iter", "epochs", "prefetch", "leave", "num_workers", "next in threads", "state_dict"]
    rules += ["load_state_dict", "load_state_dict elsewhere"]
    rules += ["Ctrl-C once in next", "Ctrl-C twice in next", "an alarm once in next"]
    used = run(Programs, 80, 20, rules)
    assert used["programs"] >= 60


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

    rules = ["begin", "next", "next to the end", "leave", "state_dict", "load_state_dict"]
    run(TorchPrograms, 80, 20, [f"torch: {rule}" for rule in rules])


@pytest.mark.timeout(600)
def test_programs_with_torchs_loader_and_worker_processes():
    require("torch")
    from .drop_in import TorchProgramsInProcesses

    assert run(TorchProgramsInProcesses, 12, 12)["programs"] >= 12
