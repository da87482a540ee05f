"""Trainers train with minloader.torch.DataLoader, and resume exactly: each client is a program.

``tests/trainers/client.py`` says what such a program does. ``tests/trainers/table.py`` compares the
loaders of others with the same programs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually, lacking

sys.path.append(str(Path(__file__).parent / "trainers"))

import programs

pytestmark = pytest.mark.timeout(400)

BY_HAND = {"last 1": "no", "boundary 1": "no"}
"""Lightning resumes at the end of an epoch without the loader's state, which a recipe gives."""


def need(name: str) -> None:
    """As ``require``, without an import: the client is a program of its own."""
    if importlib.util.find_spec(name) is None:
        lacking(name)


def assert_nothing_left(folder: Path) -> None:
    """After a process was killed its workers end by themselves."""
    eventually(lambda: not programs.left(folder), 30)
    assert programs.left(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loader", "ranks", "unlike"),
    [
        ("lightning", "minloader", 1, BY_HAND),
        ("lightning", "recipe", 1, {}),
        ("lightning", "recipe", 2, {}),
        ("accelerate", "recipe", 1, {}),
        ("accelerate", "recipe", 2, {}),
        ("transformers", "recipe", 1, {}),
        ("transformers", "recipe", 2, {}),
        ("dcp", "minloader", 2, {}),
    ],
)
def test_a_client(name: str, loader: str, ranks: int, unlike: Any, tmp_path: Path) -> None:
    """It gets torch's samples, is killed, and goes on with the same losses to the last bit."""
    need("torch" if name == "dcp" else name)
    cells = programs.run_client(f"with_{name}", loader, ranks, tmp_path)
    expected = dict.fromkeys(cells, "yes") | unlike
    assert cells == expected, (tmp_path / "log-0.txt").read_text()[-5000:]
    assert {"runs", "shards", "last 1", "boundary 1", "mid 1", "mid 0", "mid 2"} <= set(cells)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """Two ranks on gloo with two workers each: torch's losses, though a worker dies."""
    need("torch")
    runs = []
    for arguments in ["torch", "--workers=0"], ["minloader", "--kill=worker"]:
        code, steps = programs.run_torchrun(arguments[0], tmp_path, *arguments[1:])
        assert code == 0, (tmp_path / "log-0.txt").read_text()
        assert len(steps) == 2
        runs.append(steps)
        assert_nothing_left(tmp_path)
        for noted in tmp_path.glob("?.json"):
            noted.unlink()
    assert runs[0] == runs[1]


def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    need("torch")
    code, steps = programs.run_torchrun("minloader", tmp_path, "--kill=rank")
    assert code != 0
    assert "SIGKILL" in (tmp_path / "log-0.txt").read_text()
    assert steps == []
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("accelerate", "opt_in"),
        ("transformers", "other_folder"),
        pytest.param("transformers", "transformers_states", marks=pytest.mark.slow),
        pytest.param("lightning", "lightning_resumes", marks=pytest.mark.slow),
        pytest.param("lightning", "lightning_states", marks=pytest.mark.slow),
    ],
)
def test_a_program_of(package: str, name: str, tmp_path: Path) -> None:
    """Each says at its beginning what it shows."""
    need(package)
    program = str(Path(programs.__file__).with_name(f"{name}.py"))
    code = programs.run(program, str(tmp_path), folder=tmp_path, seconds=300)
    assert code == 0, (tmp_path / "log-0.txt").read_text()
