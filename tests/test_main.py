"""No guard, no main: datasets and batches of ``__main__``, however the program was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require

import minloader

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


@pytest.mark.parametrize("way", ["script", "-c", "-m", "stdin", "fork", "forkserver"])
def test_plain_programs(way, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text(PROGRAM)
    context = "num_workers=2, mp_context="
    arguments, given = {
        "script": (["package/module.py"], None),
        "-c": (["-c", PROGRAM], None),
        "-m": (["-m", "package.module"], None),
        "stdin": (["-"], PROGRAM),
        "fork": (["-c", PROGRAM.replace("num_workers=2", context + "'fork'")], None),
        "forkserver": (["-c", PROGRAM.replace("num_workers=2", context + "'forkserver'")], None),
    }[way]
    result = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=_environment(),
    )
    assert (result.stdout, result.stderr, result.returncode) == (EXPECTED, "", 0)


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
    result = subprocess.run(
        [sys.executable, "-c", EXECUTE, tmp_path / "notebook.ipynb"],
        capture_output=True,
        text=True,
        timeout=100,
        env=_environment(),
    )
    assert (result.stdout, result.returncode) == (EXPECTED + "[107]\n", 0), result.stderr


def _environment() -> dict[str, str]:
    root = str(Path(minloader.__file__).parents[1])
    return os.environ | {"PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
