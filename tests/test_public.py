"""The public surface and the shape of the house."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import minloader

PACKAGE = Path(minloader.__file__).parent

# Which wing may import which: each only those before it, and itself.
ORDER = [
    *("_errors", "_checks", "_memory", "_sampling", "_worker", "_insight", "_pools", "_epochs"),
    *("_loader", "_inspect", "_prefetch", "torch", "jax", "testing", "doctor"),
]
ADAPTORS = ("jax", "torch")  # what is for a library, and imports it


def test_wings_import_one_way():
    rooms = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ORDER]
    assert {room.relative_to(PACKAGE).parts[0].removesuffix(".py") for room in rooms} == set(ORDER)
    for room in rooms:
        wing = room.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found = re.findall(r"from minloader\.(\w+)", room.read_text())
        assert set(found) <= set(ORDER[: ORDER.index(wing) + 1]), room


def test_only_numpy_and_cloudpickle_are_needed():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                needed = {"numpy", "cloudpickle", "minloader"} | sys.stdlib_module_names
                assert (
                    root in needed
                    or root in path.parts
                    or "torch" in path.name
                    or path.stem == root
                ), path


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
