"""The public surface and the shape of the package."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import printed_by, python, require

import minloader

PACKAGE = Path(minloader.__file__).parent

# Which package may import which: each only those before it, and itself.
ORDER = [
    *("_errors", "_checks", "_memory", "_sampling", "_worker", "_insight", "_pools", "_epochs"),
    *("_loader", "_inspect", "_prefetch", "torch", "jax", "testing", "doctor"),
]
ADAPTORS = ("jax", "torch")  # what is for a library, and imports it


def test_packages_import_one_way():
    paths = PACKAGE.rglob("*.py")
    modules = [path for path in paths if path.parent != PACKAGE or path.stem in ORDER]
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules}
    assert names == set(ORDER)
    for module in modules:
        package = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found = re.findall(r"from minloader\.(\w+)", module.read_text())
        assert set(found) <= set(ORDER[: ORDER.index(package) + 1]), module


MOST_ROOT_MODULES = 10


def test_few_modules_lie_at_the_root():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES


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
                needed |= {"typing_extensions"}  # for type checkers only
                assert (
                    root in needed
                    or root in path.parts
                    or "torch" in path.name
                    or path.stem == root
                ), path


def test_all_names_what_is_public():
    assert dir(minloader) == sorted(["__version__", *minloader.__all__])
    kinds = {type(getattr(minloader, name)).__name__ for name in minloader.__all__}
    assert "module" not in kinds
    assert not hasattr(minloader, "no_such_name")
    assert callable(minloader.collate)  # not the module of that name


def test_every_public_object_has_a_docstring():
    for name in minloader.__all__:
        if name != "SKIP":
            assert getattr(minloader, name).__doc__, name


def test_importing_is_cheap():
    """Every worker imports the package: numpy must wait until somebody needs it."""
    code = (
        "import sys, minloader._worker.start\n"
        "heavy = 'numpy', 'torch', 'jax', 'minloader._loader', 'minloader._epochs'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert printed_by(code) == "[]\n"


TYPED = """
from typing import Any, assert_type

from minloader import Loader, prefetch


def add(samples: list[Any]) -> int:
    return sum(samples)


with Loader(range(9), batch_size=3, collate_fn=add) as loader:
    assert_type(loader, Loader[int])
    for batch in loader:
        assert_type(batch, int)
    for epoch, batch in loader.epochs(2):
        assert_type(batch, int)
    for text in prefetch(loader, str):
        assert_type(text, str)
with Loader(range(9), batch_size=3) as plain:  # what collate gives
    for each in plain:
        assert_type(each, Any)


def train(loader: Loader) -> None: ...


train(loader)
train(Loader[str](range(9)))
"""


@pytest.mark.slow
def test_type_checkers_know_what_a_loader_gives(tmp_path):
    require("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    done = python("-m", "mypy", "--strict", tmp_path / "typed.py", cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stdout
