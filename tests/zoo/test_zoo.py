"""None of the bugs that others have had is here, but what each fork brings with it."""

from __future__ import annotations

import sys

import pytest
from conftest import lacking, require

require("torch")

from tests.zoo.__main__ import outcomes  # noqa: E402
from tests.zoo.bugs import BUGS  # noqa: E402

FORKED = {"threads", "handles"} if sys.version_info < (3, 14) else set()
"""Up to Python 3.13 workers are forked, as torch's are, without the threads of other libraries, and
with the place in each open file."""


@pytest.mark.slow
def test_bugs_of_others():
    found = outcomes("minloader.torch")
    if "not installed" in found.values():
        lacking("lightning")
    assert found == {bug: "has it" if bug in FORKED else "no" for bug in BUGS}
