"""The README says what is true."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minloader import BatchSampler, DynamicBatchSampler, Loader, pad_collate

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_quickstart_runs_as_a_plain_script(tmp_path):
    script = tmp_path / "quickstart.py"
    script.write_text(BLOCKS[0])
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    assert len({line.split()[-2] for line in lines}) == 1  # both epochs have all the tokens


def test_the_signature_is_the_loaders():
    shown = re.sub(r"\s+", " ", BLOCKS[1].strip())
    parameters = [
        f"{p.name}={p.default!r}".replace("'", '"') if p.default is not p.empty else p.name
        for p in inspect.signature(Loader).parameters.values()
    ]
    parameters.insert(2, "*")
    assert shown == f"Loader({', '.join(parameters)})"


@pytest.mark.parametrize("thing", [BatchSampler, DynamicBatchSampler, pad_collate])
def test_other_signatures_name_every_parameter(thing):
    text = re.sub(r"\s+", " ", README.read_text())
    shown = re.search(rf"`{thing.__name__}\((.*?)\)`", text).group(1)
    names = [re.match(r"\w+", part.strip())[0] for part in re.split(r"[,|]", shown)]
    assert names == list(inspect.signature(thing).parameters)


def test_the_rooms_are_all_there():
    rooms = re.findall(r"^\| `(\w+\.py)` \|", README.read_text(), re.MULTILINE)
    package = Path(inspect.getfile(Loader)).parent
    assert set(rooms) == {path.name for path in package.glob("*.py")} - {"__init__.py"}
