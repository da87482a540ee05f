"""The public surface and the shape of the package."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import printed_by, python, require

import minloader
from minloader._memory import reducers

PACKAGE = Path(minloader.__file__).parent

# Which package may import which: each only those before it, and itself.
ORDER = [
    *("_errors", "_formats", "_protocols", "_arguments", "_memory", "_sampling", "_worker"),
    *("_pools", "_foreign", "_epochs"),
    *("_loader", "_prefetch", "torch", "jax", "_diagnosis", "testing", "doctor"),
]
DIAGNOSIS = "_diagnosis"  # what is before it imports it late: when it is called for, or for types
ADAPTORS = ("jax", "torch")  # what is for a library, and imports it


class Import(NamedTuple):
    """One module of the package imports another.

    Attributes:
        is_late: whether it does so within a function, or for type checkers alone.
    """

    importer: str
    imported: str
    is_late: bool

    @property
    def is_diagnosis_when_called_for(self) -> bool:
        """Whether it is allowed though it goes the other way."""
        return self.is_late and package_of(self.imported) == DIAGNOSIS


def package_of(module: str) -> str:
    """The folder of a module, or its own name where it lies at the root."""
    return module.split(".")[1]


def modules() -> dict[str, Path]:
    """All modules but the root, by name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    del found["minloader"]
    return found


def imports() -> list[Import]:
    """All imports of modules by others, also those for type checkers alone."""
    found = []
    paths = modules()

    def visit(node: ast.AST, importer: str, is_late: bool) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minloader":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(Import(importer, name if name in paths else node.module, is_late))
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            visit(child, importer, is_late or is_function or is_for_types)

    for importer, path in paths.items():
        visit(ast.parse(path.read_text()), importer, False)
    return [each for each in found if each.imported in paths]


def test_packages_import_one_way():
    assert {package_of(name) for name in modules()} == set(ORDER)
    for each in imports():
        if not each.is_diagnosis_when_called_for:
            importer, imported = package_of(each.importer), package_of(each.imported)
            assert ORDER.index(imported) <= ORDER.index(importer), each


def test_no_modules_import_each_other():
    """Neither at their head nor within functions, but for what diagnoses."""
    needs: dict[str, set[str]] = {name: set() for name in modules()}
    for each in imports():
        if not each.is_diagnosis_when_called_for and each.imported != each.importer:
            needs[each.importer].add(each.imported)
    tuple(TopologicalSorter(needs).static_order())  # CycleError names them


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


def test_type_checkers_are_told_of_the_same_names():
    told: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minloader."):
            names = told.setdefault(node.module.removeprefix("minloader."), [])
            names += [alias.asname for alias in node.names]
    listed = {module: names.split() for module, names in minloader._MODULES.items()}
    assert told == listed


def test_every_public_object_has_a_docstring():
    for name in minloader.__all__:
        if name != "SKIP":
            assert getattr(minloader, name).__doc__, name


def test_importing_is_cheap():
    """Every worker imports the package: numpy must wait until somebody needs it."""
    code = (
        "import sys, minloader._worker.start\n"
        "heavy = 'numpy', 'torch', 'jax'\n"
        "ours = '_loader', '_epochs', '_diagnosis'\n"
        "unwanted = [*heavy, *('minloader.' + name for name in ours)]\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    assert printed_by(code) == "[]\n"


def test_a_loader_that_nobody_asks_imports_nothing_that_diagnoses():
    code = (
        "import sys, minloader\n"
        "assert list(minloader.Loader(range(3), num_workers=1, executor='thread')) == [0, 1, 2]\n"
        "print([name for name in sys.modules if name.startswith('minloader._diagnosis')])"
    )
    assert printed_by(code) == "[]\n"


CORE_TOKENS = 52_770
"""Most tokens of the modules that a loader loads: what a reader must hold in the head. Lower it
with each change that makes the core smaller."""

LOADED = """
import sys
import numpy as np
from minloader import Loader


def loaded():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "minloader")


class Rows:
    def __init__(self):
        self.rows = np.arange(60_000).reshape(3, -1)
        self.first = np.frombuffer(b"1234", "u1")[::2]
        self.kind = self.rows.dtype

    def __getitem__(self, index):
        return self.rows[index], self.rows[:, index], np.float32(index), loaded()


print(*loaded())
with Loader(Rows(), range(3), num_workers=1) as loader:
    print(*list(loader)[-1][-1])
print(*loaded())
"""


HANGING = {
    "_foreign": "Loader(loaded, [0], executor=ThreadPoolExecutor(1))",
    "_worker.torch_conventions": "Loader(with_torch, [0])",
    "_epochs.shard_feed": "Loader(Stream())",
    "_worker.fingerprint": "Loader(Stream())",
    "_worker.early_reads": "Loader(concurrent(Rows()), [0])",
    "_worker.global_states": "Loader(loaded, [0], seed_generators=True)",
    "_diagnosis.shard_watch": "Loader(Stream(), num_workers=2)",
    "_worker.processor_time": "examined()",
    "_worker.long_start": "examined()",
    "_worker.own_generators": "Loader(loaded, [0], seed_generators=True)",
    "_memory.parts": "Loader(loaded, [0], seed_generators=True)",
    "_diagnosis.leaves": "Loader(Stream(), num_workers=2)",
    "_diagnosis.trace": "traced()",
}
"""What is not of the core, and a loader that has it loaded, here or in the worker."""

WITHOUT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from minloader import Loader, concurrent, get_worker_info


def loaded(item):
    return [name for name in sys.modules if name.startswith("minloader.")]


def with_torch(item):
    import torch
    return loaded(item)


def examined():
    from minloader._diagnosis.trials import run
    with Loader(loaded, [0] * 9) as loader:
        run(loader, 0.01, 0.0)
        return list(loader)


def traced():
    with Loader(loaded, [0]) as loader, loader.trace("trace.json"):
        return list(loader)


class Rows:
    def __getitem__(self, index):
        return loaded(index)


class Stream:
    def __iter__(self):
        yield get_worker_info().id
        yield loaded(0)


if __name__ == "__main__":
    print(*loaded(None))
    for options in dict(num_workers=0), dict(executor="thread"), dict():
        with Loader(loaded, range(3), **options) as loader:
            print(*loaded(None), *list(loader)[-1])
"""


@pytest.mark.parametrize("name", HANGING)
def test_what_hangs_on_the_core_is_loaded_when_it_is_asked_for(name, tmp_path):
    if "torch" in name:
        require("torch")
    asked = f"    print(*list({HANGING[name]})[-1], *loaded(None))"
    *without, last = printed_by(WITHOUT + asked, cwd=tmp_path).splitlines()
    assert len(without) == 4
    assert not [line for line in without if f"minloader.{name}" in line]
    assert f"minloader.{name}" in last


def tokens_of(path: Path) -> int:
    """Names, operators, numbers and strings of a module, without its docstrings."""
    source = path.read_text()
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docstrings = sum(
        isinstance(text, ast.Constant) and isinstance(text.value, str) for text in texts
    )
    return sum(token.type in kinds for token in found) - docstrings


def test_the_core_only_shrinks():
    """What ``from minloader import Loader`` loads; and a plain worker loads far less."""
    core, in_worker, later = (line.split() for line in printed_by(LOADED).splitlines())
    paths = modules() | {"minloader": PACKAGE / "__init__.py"}
    paths |= {name.removesuffix(".__init__"): path for name, path in paths.items()}
    sizes = {name: tokens_of(paths[name]) for name in core if name in paths}
    if sys.version_info < (3, 12):  # later ones count what is within f-strings, too
        assert CORE_TOKENS - 1_000 < sum(sizes.values()) <= CORE_TOKENS, sizes
    hanging_on = ("_diagnosis", "_prefetch", "torch", "jax", "testing", "doctor")
    assert [name for name in core if name.split(".")[1:2] in [[each] for each in hanging_on]] == []
    not_in_workers = ("_loader", "_epochs", "_pools", *hanging_on)
    assert [
        name for name in in_worker if name.split(".")[1:2] in [[x] for x in not_in_workers]
    ] == []
    of_streams = {"minloader._worker.stream_worker", "minloader._worker.stream_reader"}
    assert not of_streams & {*in_worker}
    # Where workers make the batches, the calling process does not load what makes them.
    makes = {f"minloader._worker.{name}" for name in ("start", "run", "batch_maker", "seeds")}
    makes.add("minloader._memory.batch_packer")
    assert makes <= {*in_worker} - {*later}
    assert not {"minloader._pools.inline", "minloader._pools.threads"} & {*later}
    by_first_worker = {f"minloader._pools.{name}" for name in ("worker_plugins", "log_reader")}
    by_first_worker |= {f"minloader._worker.{name}" for name in ("logs", "library_settings")}
    assert by_first_worker <= {*later} - {*core}
    # What the table of reducers loads when it is met: none of this is in a loader of arrays.
    when_met = ("decorated", "frames", "inherited", "registered", "shared_arrays", "tensors")
    when_met = {f"minloader._memory.{name}" for name in (*when_met, "parts", "unpicklable")}
    assert when_met <= set(sizes) | set(paths)
    assert when_met & {*core, *in_worker, *later} == set()


def test_the_table_of_reducers_names_what_there_is():
    tables = (reducers.EVERYWHERE, reducers.IN_BATCHES, reducers.IN_JOBS, reducers.DEFINITIONS)
    assert all(callable(reducers.imported(name)) for table in tables for name in table.values())


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
