"""No guard, no main: datasets and batches of ``__main__``, however the program was started."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from conftest import printed_by, python, require, variants

QUIETLY: Any = {"env": {"PYTHONWARNINGS": "ignore"}}

PROGRAM = """
import dataclasses, enum, multiprocessing, os
from minloader import Loader

print("main runs")

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Batch:
    value: int
    colour: Colour = Colour.RED
    pid: int = 0

class Refused(Exception):
    def __init__(self, a, b):
        super().__init__(a)

class Item:
    def __init__(self, index):
        self.index = index

OFFSET = 100

def helper(index):
    return index + OFFSET

def child_target(queue):
    queue.put(helper(1))

class Data:
    def __getitem__(self, item):
        if item.index == 3:
            raise Refused(1, 2)
        if item.index == 4:
            # A process of the worker's own, whose target is a function of this main module.
            queue = multiprocessing.get_context("fork").SimpleQueue()
            process = multiprocessing.get_context("fork").Process(
                target=child_target, args=(queue,)
            )
            process.start()
            process.join()
            return Batch(queue.get())
        return Batch(helper(item.index), pid=os.getpid())

module = type(Batch.__init__)
method = Batch.__eq__
loader = Loader(
    Data(), [Item(i) for i in range(6)], num_workers=2, transform=lambda batch: batch
)
values = []
batches = iter(loader)
while True:
    try:
        batch = next(batches)
    except StopIteration:
        break
    except Refused as error:
        values.append(repr(error))
        continue
    assert type(batch) is Batch and isinstance(batch, Batch)
    assert batch.colour is Colour.RED
    assert batch.pid != os.getpid()
    values.append(batch.value)
assert Batch.__eq__ is method, "the class of the main module was rebuilt by a batch"
print(values)
"""
EXPECTED = "main runs\n[100, 101, 102, 'Refused(1)', 101, 105]\n"


@variants("way", ["script", "-c", "-m", "stdin", "fork", "forkserver"])
def test_plain_programs(way, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text(PROGRAM)
    context = "num_workers=2, mp_context="
    arguments, given = {
        "script": ([tmp_path / "package" / "module.py"], None),
        "-c": (["-c", PROGRAM], None),
        "-m": (["-m", "package.module"], None),
        "stdin": (["-"], PROGRAM),
        "fork": (["-c", PROGRAM.replace("num_workers=2", context + "'fork'")], None),
        "forkserver": (["-c", PROGRAM.replace("num_workers=2", context + "'forkserver'")], None),
    }[way]
    assert printed_by(*arguments, input=given, cwd=tmp_path, **QUIETLY) == EXPECTED


LAZY_IMPORTS = """
import sys
from minloader import Loader
lazy import concurrent.futures
lazy import xml.dom
lazy import xml.dom.minidom as minidom
lazy import decimal as alias
lazy from colorsys import rgb_to_hls, hls_to_rgb as back
lazy from . import sibling
lazy from .sibling import VALUE as value
lazy import nowhere

class Data:
    def __getitem__(self, index):
        assert concurrent.futures.Future and xml.dom.Node and minidom.Document and alias.Decimal
        return back(*rgb_to_hls(1, 1, 1)), sibling.VALUE, value

assert next(iter(Loader(Data(), range(1), num_workers=1))) == ((1, 1, 1), 5, 5)
print("well")
"""


FILE_NAMES = """
import linecache, logging, traceback
from minloader import Loader

records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.pathname, record.lineno))
logging.basicConfig(handlers=[Keep()], level=logging.INFO)

class Data:
    def __getitem__(self, index):
        logging.getLogger("data").info("here")
        def inner():
            raise ValueError("planned")
        return (lambda: inner())()
def code(index):
    return lambda: index
try:
    list(Loader(Data(), range(1), num_workers=1))
except ValueError as error:
    printed = "".join(traceback.format_exception(error))
assert 'raise ValueError("planned")' in printed, printed
assert printed.count(__file__) >= 3, printed
assert "dynamic-code" not in printed
((path, line),) = records
assert path == __file__ and 'info("here")' in linecache.getline(path, line), records
(function,) = Loader(code, range(1), num_workers=1)
assert function.__code__.co_filename == __file__
print("well")
"""


DECORATED = """
import functools
from minloader import Loader

@functools.lru_cache
def times_ten(number):
    return 10 * number
times_ten.note = "kept"
at_least_two = functools.cache(functools.partial(max, 2))
@functools.cache
def sum_to(number):
    return number + sum_to(number - 1) if number else 0
def local():
    @functools.lru_cache(maxsize=3, typed=True)
    def inner(number):
        return number
    return inner
inner = local()
@functools.singledispatch
def kind(value):
    return "any"
@kind.register
def of_int(value: int):
    return "int"
@kind.register(list)
def of_list(value):
    return [kind(each) for each in value]
class Data:
    @functools.cached_property
    def table(self):
        return [0, 10, 20]
    @functools.lru_cache
    def method(self, number):
        return self.table[number]
    @functools.singledispatchmethod
    def kind(self, value):
        return "any"
    @kind.register
    def of_int(self, value: int):
        return "int"
    def __getitem__(self, index):
        assert inner.cache_parameters() == {"maxsize": 3, "typed": True}
        assert times_ten(index) == self.table[index] == self.method(index)
        assert times_ten.note == "kept" and at_least_two(index) == 2
        assert sum_to(3) == 6 and sum_to.cache_info().misses >= 4
        assert kind("") == "any" and kind([1, ""]) == ["int", "any"]
        assert self.kind("") == "any" and self.kind(1) == "int"
        return inner(index), times_ten, kind
for index, batch in enumerate(Loader(Data(), range(3), num_workers=1)):
    assert batch == (index, times_ten, kind)
assert list(Loader(times_ten, range(2), num_workers=1)) == [0, 10]
print("well")
"""

OF_OTHER_PACKAGES = """
import cachetools, msgspec
from minloader import Loader

@cachetools.cached({})
def times_ten(number):
    return 10 * number
class Base(msgspec.Struct):
    first: int
class Record(Base, frozen=True, kw_only=True, tag=True, rename="camel"):
    the_second: int | None
    third: list = []
    def total(self):
        return self.first + self.the_second
def record(number):
    made = Record(first=times_ten(number), the_second=1)
    assert made.total() == 10 * number + 1
    return made, msgspec.json.encode(made)
for number, (made, text) in enumerate(Loader(record, range(3), num_workers=1)):
    assert made == Record(first=10 * number, the_second=1)
    assert text == msgspec.json.encode(made)
print("well")
"""

OF_PYDANTIC = """
from typing import Generic, TypeVar
from pydantic import BaseModel
from minloader import Loader

T = TypeVar("T")
class Box(BaseModel, Generic[T]):
    content: T
class Named(Box[str]):
    name: str
full = Box[int](content=2)
named = Named(name="a", content="b")
def box(number):
    assert isinstance(full, Box[int]) and isinstance(full, Box)
    assert isinstance(named, Named) and isinstance(named, Box[str])
    return Box[int](content=number), named
for number, (batch, same) in enumerate(Loader(box, range(3), num_workers=1)):
    assert isinstance(batch, Box[int]) and type(batch) is Box[int]
    assert batch == Box[int](content=number)
    assert isinstance(same, Named) and same == named
print("well")
"""

REGISTERED = """
import sys
import MODULE as trees
from minloader import Loader

class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right
class Unregistered(Pair):
    pass
class Empty:
    pass
def parts(pair):
    return [pair.left, pair.right], "aux"
def made(children, aux):
    return Pair(*children)
trees.register_pytree_node(Pair, parts, FROM_PARTS)
trees.register_pytree_node(Empty, lambda empty: ([], "aux"), lambda *parts: Empty())
def mapped(number):
    pair = trees.tree_map(lambda leaf: leaf + number, Pair(1, 2))
    assert isinstance(trees.tree_leaves(Unregistered(1, 2))[0], Unregistered)
    return pair.left, pair.right
def without_the_library(number):
    return Empty(), "ROOT" in sys.modules
with Loader(mapped, range(3), num_workers=1) as loader:
    assert list(loader) == [(1 + number, 2 + number) for number in range(3)]
with Loader(without_the_library, range(1), num_workers=1) as loader:
    ((_, is_imported),) = loader
assert is_imported is False
print("well")
"""

BY_NAME_ONLY = """
from minloader import Loader

class Named(str):
    def __new__(cls, name):
        return super().__new__(cls, name)
    def __reduce__(self):
        return str(self)
SINGLE = Named("SINGLE")
def use(item):
    return SINGLE
try:
    Loader(use, range(1), num_workers=1)
except TypeError as error:
    assert "dataset (global variable 'SINGLE') is a Named" in str(error), error
    assert "SINGLE of the main module can be sent by its name only" in str(error), error
    print("well")
"""

WITH_GETATTR = """
from minloader import Loader

class Wrapper:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def __getitem__(self, index):
        return self.inner[index]
class Slotted:
    __slots__ = ("inner", "empty")
    def __init__(self, inner):
        self.inner = inner
    __getattr__ = Wrapper.__getattr__
    __getitem__ = Wrapper.__getitem__
class Rows(list):
    def __init__(self, rows, inner):
        super().__init__(rows)
        self.inner = inner
    __getattr__ = Wrapper.__getattr__
class WithState(Wrapper):
    def __setstate__(self, state):
        self.__dict__.update(state, restored=True)
for wrapper in (Wrapper([1, 2]), Slotted([1, 2]), Rows([1, 2], []), Wrapper(Wrapper([1, 2]))):
    assert list(Loader(wrapper, range(2), num_workers=1)) == [1, 2]
def restored(item, wrapper=WithState([])):
    return wrapper.restored
assert list(Loader(restored, range(1), num_workers=1)) == [True]
print("well")
"""


CLASS_BODIES = """
from minloader import Loader


def numbers(n):
    return list(range(n))


class Base: pass


SIZE = 3


def load(index):
    class Item(Base):
        values = numbers(SIZE)

        class Inner:
            size = SIZE

    return index, Item.values, Item.Inner.size


def nested(index):
    return (lambda: load_inner(index))()


def load_inner(index):
    def make():
        class Item:
            values = numbers(2)

        return Item

    return make().values


if __name__ == "__main__":
    for way in "spawn", "fork":
        with Loader(load, range(2), mp_context=way) as loader:
            assert list(loader) == [(0, [0, 1, 2], 3), (1, [0, 1, 2], 3)], way
        with Loader(nested, range(1), mp_context=way) as loader:
            assert list(loader) == [[0, 1]], way
    print("well")
"""
"""Functions in which bodies of classes read globals: cloudpickle #438."""


def run(program, folder, *options):
    """Runs a program as a module of a package, in a process of its own."""
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "sibling.py").write_text("VALUE = 5")
    (folder / "package" / "program.py").write_text(program)
    done = printed_by("-m", "package.program", options=options, cwd=folder, **QUIETLY)
    assert done == "well\n"


older = pytest.mark.skipif(sys.version_info < (3, 15), reason="no lazy imports")


@pytest.mark.parametrize(
    ("program", "options", "packages"),
    [
        # From cloudpickle 3.1.3, code is without them.
        pytest.param(FILE_NAMES, [], [], id="names of files"),
        pytest.param(DECORATED, [], [], id="decorated functions"),
        pytest.param(BY_NAME_ONLY, [], [], id="by name only"),
        pytest.param(CLASS_BODIES, [], [], id="bodies of classes"),
        pytest.param(WITH_GETATTR, [], [], id="__getattr__"),
        pytest.param(OF_OTHER_PACKAGES, [], ["cachetools", "msgspec"], id="other packages"),
        pytest.param(OF_PYDANTIC, [], ["pydantic"], id="generic models"),
        pytest.param(LAZY_IMPORTS, [], [], id="lazy import", marks=older),
        pytest.param(
            *(LAZY_IMPORTS.replace("\nlazy ", "\n"), ["-X", "lazy_imports=all"], []),
            id="lazy_imports=all",
            marks=older,
        ),
    ],
)
def test_what_a_main_module_defines_arrives(program, options, packages, tmp_path):
    for package in packages:
        require(package)
    run(program, tmp_path, *options)


@pytest.mark.parametrize(
    ("module", "from_parts"),
    [
        ("torch.utils._pytree", "made"),
        ("jax.tree_util", "lambda aux, children: made(children, aux)"),
    ],
)
def test_what_a_class_is_registered_as_arrives(module, from_parts, tmp_path):
    """A library of trees would take what it does not know for a leaf, in silence."""
    root = module.partition(".")[0]
    require(root)
    script = REGISTERED.replace("MODULE", module).replace("FROM_PARTS", from_parts)
    run(script.replace("ROOT", root), tmp_path)


PLUGIN = """
import cloudpickle, importlib.util, sys
from minloader import Loader
spec = importlib.util.spec_from_file_location("the_plugin", sys.argv[1])
plugin = sys.modules["the_plugin"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
try:
    list(Loader(plugin.double, range(2)))
except ModuleNotFoundError as error:
    print(error.__notes__[0])
cloudpickle.register_pickle_by_value(plugin)
print(list(Loader(plugin.double, range(2))))
"""


def test_a_module_that_cannot_be_imported_by_its_name(tmp_path):
    """As plugins are loaded, and pytest's tests with --import-mode=importlib."""
    plugin = tmp_path / "elsewhere.py"
    plugin.write_text("def double(number):\n    return 2 * number\n")
    told, batches = printed_by(PLUGIN, plugin).splitlines()
    assert "no module 'the_plugin'" in told
    assert "cloudpickle.register_pickle_by_value" in told
    assert batches == "[0, 2]"


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text", output), end="")
"""


def test_notebook(tmp_path):
    nbformat = require("nbformat")
    require("nbclient")
    require("ipykernel")
    half = PROGRAM.index("loader = Loader(")
    again = "print([batch.value for batch in Loader(Data(), [Item(7)])])"
    cells = [PROGRAM[:half], PROGRAM[half:], again]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    # A process of its own: the client's event loop leaves threads and sockets to the exit.
    done = python(EXECUTE, tmp_path / "notebook.ipynb", **QUIETLY)
    assert (done.stdout, done.returncode) == (EXPECTED + "[107]\n", 0), done.stderr


LAUNCHED = """
import dataclasses, multiprocessing, sys
from minloader import Loader

@dataclasses.dataclass
class Square:
    value: int

class Squares:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return Square(index.value**2)

def train(rank):
    for method in "spawn", "forkserver", "fork":
        options = {"transform": negative, "num_workers": 1, "mp_context": method}
        with Loader(Squares(), map(Square, range(6)), **options) as loader:
            batches = list(loader)
        assert all(type(each) is Square for each in batches)
        print(method, [each.value for each in batches], flush=True)

def negative(square):
    if square.value == 25:  # a worker that has a worker of its own
        with Loader(Squares(), [Square(5)]) as inner:
            assert list(inner) == [square]
    return Square(-square.value)

if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch.multiprocessing
        torch.multiprocessing.spawn(train, nprocs=1)
    else:
        process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(0,))
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@variants("launcher", ["spawn", "forkserver", "torch"])
def test_a_script_whose_ranks_are_started_by_multiprocessing(tmp_path, launcher):
    """There the main module is ``__mp_main__``."""
    if launcher == "torch":
        require("torch")
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    told = printed_by(script, launcher, options=["-W", "ignore"]).splitlines()
    assert told == [f"{way} [0, -1, -4, -9, -16, -25]" for way in ("spawn", "forkserver", "fork")]


# --- a main module that runs again ---------------------------------------------------------------

BATCHES_AT_IMPORT = """
import os
pid = str(os.getpid())
parent, depth = os.environ.get("DEPTH", pid + " 0").split()
depth = int(depth) + (parent != pid)
os.environ["DEPTH"] = pid + " " + str(depth)
print("imported at depth " + str(depth) + "\\n", end="", flush=True)  # written at once
if depth > 2:
    os._exit(1)
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from minloader import Loader
{how}
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index
print(list(Loader({dataset}(), batch_size=2, {options})))
"""

IMPORTED_LATE = """
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        import program
        return index
"""

SPAWN = "num_workers=2, mp_context='spawn'"


@variants(
    ("dataset", "options", "depth"),
    [
        ("Data", SPAWN, 1),
        ("Data", SPAWN.replace("spawn", "forkserver"), 2),  # the server, and its children
        ("Data", "executor=ProcessPoolExecutor(1, get_context('spawn'))", 1),
        # Where the module is not needed to load the dataset: a worker imports it for a batch.
        ("late.Data", SPAWN, 1),
    ],
    quick=2,
)
def test_a_module_that_reads_a_loader_while_it_is_imported(dataset, options, depth, tmp_path):
    """It is imported by each worker, each of which would start workers of its own."""
    how = "import late" if "." in dataset else ""
    program = BATCHES_AT_IMPORT.format(how=how, dataset=dataset, options=options)
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "late.py").write_text(IMPORTED_LATE)
    done = python("import program", cwd=tmp_path, **QUIETLY)
    assert done.returncode == 1
    assert {*done.stdout.splitlines()} == {f"imported at depth {n}" for n in range(depth + 1)}
    assert "RuntimeError: the module 'program' reads a Loader while it is imported" in done.stderr


def test_a_module_may_read_a_loader_without_workers_while_it_is_imported(tmp_path):
    options = "num_workers=0 if depth else 1"
    program = BATCHES_AT_IMPORT.format(how="", dataset="Data", options=options)
    (tmp_path / "program.py").write_text(program)
    batches = "[array([0, 1]), array([2, 3])]"
    printed = ["imported at depth 0", "imported at depth 1", batches, batches]
    assert printed_by("import program", cwd=tmp_path, **QUIETLY).splitlines() == printed


FROZEN = """
import multiprocessing, os, sys
if len(sys.argv) > 1:
    with open(os.environ["RUNS"], "a") as file:
        print("again", file=file)
sys.frozen = True
multiprocessing.set_executable(os.path.join(os.path.dirname(__file__), "frozen"))
from minloader import Loader
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self, index
batches = list(Loader(Data(), num_workers=2))
assert type(batches[0][0]) is Data
print([index for _, index in batches])
"""


def test_a_frozen_program(tmp_path):
    """As PyInstaller makes it: each child of "spawn" is the program once more."""
    (tmp_path / "script.py").write_text(FROZEN)
    program = tmp_path / "frozen"
    # What a frozen program's runtime does with the code of the standard library's own processes.
    program.write_text(f"""#!/bin/sh
for argument; do
    case $argument in
        -P) echo "PyInstaller takes the tracker for the program then" >&2;;
        *resource_tracker*) exec {sys.executable} "$@";;
    esac
done
exec {sys.executable} {tmp_path}/script.py "$@"
""")
    program.chmod(0o755)
    runs = tmp_path / "runs"
    assert printed_by(tmp_path / "script.py", env={"RUNS": str(runs)}) == "[0, 1, 2, 3]\n"
    assert runs.read_text() == "again\n" * 2


POOLS = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from minloader import Loader
print("main runs")
OFFSET = 100
opened = None
class Square:
    def __init__(self, number):
        self.number = number
def square(square):
    assert type(square) is Square
    return Square(helper(square.number))
def helper(number):
    return number * number + OFFSET
def read():
    global opened
    opened = open(os.devnull, "rb")  # what cannot be sent on
    return os.getpid()
def put(queue, number):
    queue.put(square(Square(number)))
def item(way):
    assert os.getpid() == read()
    context = multiprocessing.get_context(None if way == "process" else way.split()[-1])
    numbers = map(Square, range(3))
    if way == "process":
        queue = context.SimpleQueue()
        process = context.Process(target=put, args=(queue, 3))
        process.start()
        squares = [queue.get()]
        process.join()
    elif "executor" in way:
        with ProcessPoolExecutor(1, context) as executor:
            squares = list(executor.map(square, numbers))
    else:
        with context.Pool(1) as pool:
            squares = pool.map(square, numbers)
    assert {type(each) for each in squares} == {Square}
    return [each.number for each in squares]
def main():
    method, *ways = sys.argv[1:]
    with Loader(item, ways, num_workers=1, mp_context=method, timeout=60) as loader:
        print(list(loader))
"""


@variants("method", ["spawn", "forkserver", "fork"])
def test_a_pool_in_a_worker_knows_functions_of_the_main_module(method, tmp_path):
    """What a forked worker spawns imports the main module: that needs the guard then."""
    script = tmp_path / "script.py"
    guard = 'if __name__ == "__main__": ' if method == "fork" else ""
    script.write_text(f"{POOLS}\n{guard}main()")
    pools = ["fork", "spawn", "executor spawn", "process", "forkserver"]
    told = printed_by(script, method, *pools, options=["-W", "ignore"]).splitlines()
    expected = [[109] if each == "process" else [100, 101, 104] for each in pools]
    assert told[-1] == str(expected)
    assert set(told[:-1]) == {"main runs"}
    assert len(told) == 2 or method == "fork"


KEEPS_A_POOL = """
import multiprocessing, os, select, sys
from multiprocessing import resource_tracker, util
from minloader import Loader
def square(n): return n * n
def wait_for_a_tracker_that_is_killed():
    pid = resource_tracker._resource_tracker._pid
    if pid is not None: select.select([os.pidfd_open(pid)], [], [], 0.2)
class Pooled:
    pool = None
    def __len__(self): return 6
    def __getitem__(self, n):
        if self.pool is None:
            self.pool = multiprocessing.get_context("spawn").Pool(2)
            util.Finalize(None, wait_for_a_tracker_that_is_killed, exitpriority=0)
        return self.pool.map(square, [n])
if __name__ == "__main__":
    with Loader(Pooled(), num_workers=2, mp_context=sys.argv[1]) as loader: print(list(loader))
"""


@variants("method", ["forkserver", "spawn", "fork"])
def test_a_pool_that_a_worker_keeps_leaves_no_semaphores(method, tmp_path):
    """It is ended before its processes are killed: with one of its locks it would never end.

    Then its semaphores are unlinked, of which the tracker is told, which a forked worker starts.
    """
    script = tmp_path / "script.py"
    script.write_text(KEEPS_A_POOL)
    quietly = ["-W", "ignore::DeprecationWarning"]  # of forks beside threads
    assert printed_by(script, method, options=quietly) == f"{[[n * n] for n in range(6)]}\n"


def test_a_script_in_a_debugger(tmp_path):
    """pdb runs it in a main module without ``__spec__``."""
    script = tmp_path / "script.py"
    script.write_text("from minloader import Loader\nprint(list(Loader([1, 2])))")
    told = printed_by("-m", "pdb", "-c", "c", "-c", "q", script)
    assert "[1, 2]" in told
    assert "Error" not in told


# --- where and how a worker is started -----------------------------------------------------------

FOLDER_IS_GONE = """
import os, sys
from minloader import Loader
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
try:
    print(list(Loader([1, 2], mp_context=sys.argv[2])))
except FileNotFoundError as error:
    print(error.__notes__)
"""


@variants("method", ["spawn", "forkserver", "fork"])
def test_the_current_folder_is_gone(method, tmp_path):
    (tmp_path / "folder").mkdir()
    told = printed_by(FOLDER_IS_GONE, tmp_path / "folder", method, options=["-W", "ignore"])
    if method == "fork":
        assert told == "[1, 2]\n"
        return
    assert "current folder, which is gone" in told
    assert "/dev/shm" not in told
    assert "TMPDIR" not in told


@pytest.mark.parametrize(
    ("executable", "error"),
    [
        ("None", "RuntimeError workers cannot be started: sys.executable is empty"),
        ("''", "RuntimeError workers cannot be started: sys.executable is empty"),
        ("'/bin/false'", "/bin/false was started, which may be no Python"),
    ],
)
def test_no_python_is_known(executable, error):
    """As in programs that have Python built in."""
    done = python(f"""
import multiprocessing.spawn, sys
sys.executable = {executable}
multiprocessing.set_executable({executable})
from minloader import Loader
try:
    print(list(Loader([1, 2])))
except Exception as error:
    print(type(error).__name__, error)
""")
    assert error in done.stdout, done.stderr
    assert "set_executable" in done.stdout


HASHES = """
import os, sys
from minloader import Loader
def hashes(item):
    if item == 5 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "x").close()
        os.kill(os.getpid(), 9)
    return hash("a string"), "".join({"a", "b", "c", "d", "e"})
def all_of(**options):
    with Loader(hashes, range(8), **options) as loader:
        (found,) = set(loader)
    return found
"""


@variants("method", ["spawn", "forkserver", "fork"])
def test_all_workers_hash_alike(method, tmp_path):
    """Also those that replace others, and those of the next run."""
    program = f"""{HASHES}
if {method != "fork"}:
    os.environ.pop("PYTHONHASHSEED", None)  # of whoever runs the tests
before = dict(os.environ)
options = {{"mp_context": {method!r}, "seed": 3}}
found = all_of(num_workers=2, **options)
assert found == all_of(num_workers=1, **options)
if options["mp_context"] == "spawn":
    assert found != all_of(mp_context="spawn", seed=4)
assert dict(os.environ) == before
print(found)
"""
    quietly = {"options": ["-W", "ignore"], "env": {"PYTHONHASHSEED": "random"}}
    if method != "fork":
        quietly["env"] = {}
    told = [python(program, tmp_path / str(n), **quietly) for n in range(2)]
    assert [each.returncode for each in told] == [0, 0], told[0].stderr
    assert (told[0].stdout == told[1].stdout) == (method != "fork")  # a fork has its parent's


@variants("method", ["spawn", "forkserver"])
def test_a_hash_seed_that_is_set_is_kept(method, tmp_path):
    program = f"""{HASHES}
assert all_of(num_workers=0) == all_of(num_workers=1, mp_context={method!r})
"""
    (tmp_path / "died").touch()
    printed_by(program, tmp_path / "died", env={"PYTHONHASHSEED": "5"})
