"""The public surface and the shape of the house."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import minloader

PACKAGE = Path(minloader.__file__).parent

# Who may import whom: each room only those above it.
ORDER = [
    "errors",
    "seeds",
    "processes",
    "slots",
    "transport",
    "shipping",
    "depot",
    "collate",
    "board",
    "progress",
    "tasks",
    "shards",
    "worker",
    "pool",
    "spawned",
    "foreign",
    "crew",
    "samplers",
    "dynamic",
    "report",
    "stats",
    "epoch",
    "streams",
    "loader",
    "device",
    "jax",
    "torchlike",
    "torch",
    "testing",
    "doctor",
]

# What is for a library, and imports it; torchlike only where somebody else has done so.
ADAPTORS = {("jax", "jax"), ("torch", "torch"), ("torchlike", "torch")}


def imports_of(path: Path) -> set[str]:
    """The rooms a module imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "minloader":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minloader."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2] or alias.name
                for alias in node.names
                if alias.name.split(".")[0] == "minloader"
            }
    return found


def test_nothing_imports_upward():
    rooms = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms == set(ORDER)
    for room in rooms:
        allowed = set(ORDER[: ORDER.index(room)])
        assert imports_of(PACKAGE / f"{room}.py") <= allowed, room


def test_only_numpy_and_cloudpickle_are_needed():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                needed = {"numpy", "cloudpickle", "minloader"} | sys.stdlib_module_names
                assert root in needed or (path.stem, root) in ADAPTORS


def test_all_names_what_is_public():
    public = {
        name
        for name, value in vars(minloader).items()
        if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert public == set(minloader.__all__)
    assert callable(minloader.collate)  # not the module of that name


def test_every_public_object_has_a_docstring():
    for name in minloader.__all__:
        if name != "SKIP":
            assert getattr(minloader, name).__doc__, name


def test_importing_is_cheap():
    """Every worker imports the package: numpy must wait until somebody needs it."""
    code = (
        "import sys, minloader; print([m for m in ('numpy', 'torch', 'jax') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
