"""The README: short, and its first program runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_quickstart_runs_as_a_plain_script(tmp_path):
    script = tmp_path / "quickstart.py"
    script.write_text(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1))
    result = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    assert len({line.split()[-2] for line in lines}) == 1  # both epochs have all the tokens


def test_it_is_one_page():
    assert len(README.read_text().splitlines()) <= 130


def test_the_two_commands_are_where_the_whole_run_reads_them():
    lines = README.read_text().splitlines()
    for name in ("quickstart", "test"):
        marker = lines.index(f"<!-- command: {name} -->")
        assert lines[marker + 1] == "```sh"
        assert lines[marker + 2].startswith("python3 -m venv .venv && ")
        assert lines[marker + 3] == "```"
