"""Random programs, some of the hour that ``python -m tests.model`` runs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import Programs, ProgramsInProcesses
from .programs import KINDS

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_programs(kind):
    class OfKind(Programs):
        kinds = (kind,)

    run_state_machine_as_test(
        OfKind, settings=settings(SETTINGS, max_examples=25, stateful_step_count=25)
    )


@pytest.mark.timeout(600)
def test_programs_with_worker_processes():
    run_state_machine_as_test(
        ProgramsInProcesses, settings=settings(SETTINGS, max_examples=12, stateful_step_count=20)
    )
