"""None of the bugs that others have had is here."""

from __future__ import annotations

import pytest
from conftest import require

require("torch")

from tests.zoo.__main__ import outcome  # noqa: E402
from tests.zoo.bugs import BUGS  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_others(bug):
    assert outcome(bug, "minloader.torch") == "no"
