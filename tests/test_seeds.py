"""However a worker's code gets at the generator of ``random``, it is seeded for each batch."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import variants

from minloader import Loader
from minloader._worker import seeds
from minloader._worker.import_hook import forget, when_imported
from minloader._worker.seeds import batch_seed

WAYS = {
    "by the module": "import random\ndef draw(item):\n    return random.random()",
    "by the instance": "import random\ndef draw(item):\n    return vars(random)['_inst'].random()",
    "in the batch": "def draw(item):\n    from random import random\n    return random()",
    "from the fifth batch on": """
def draw(item):
    if item >= 4:
        import random
        return random.random()""",
    "in a thread": """
import random
from concurrent.futures import ThreadPoolExecutor
def draw(item):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: random.random()).result()""",
    "function held": "from random import random\ndef draw(item):\n    return random()",
    "all held": "from random import *\ndef draw(item):\n    return random()",
    "generator held": """
import random
generator = random.seed.__self__
def draw(item):
    return generator.random()""",
    "method held in a default": """
import random
def draw(item, uniform=random.uniform):
    return uniform(0, 1)""",
}

METHODS = ["spawn", pytest.param("fork", marks=pytest.mark.slow)]


@pytest.fixture
def draw(request, tmp_path, monkeypatch) -> Iterator[Callable[[int], Any]]:
    """A function of a module that workers import."""
    (tmp_path / "drawing.py").write_text(WAYS[request.param])
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("drawing").draw
    del sys.modules["drawing"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draw", WAYS, indirect=True)
def test_the_generator_of_random_is_seeded(draw, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    expected = [random.Random(batch_seed(0, 0, n, 0)).random() for n in range(8)]
    with Loader(draw, range(8), num_workers=1, mp_context=method) as loader:
        drawn = list(loader)
    assert [number for number in drawn if number is not None] == expected[drawn.count(None) :]


class Holder:
    """Has a function of a module as an attribute, as the globals of a script's functions have."""

    def __init__(self, function: Callable[[], float]) -> None:
        self.function = function

    def __call__(self, item: Any) -> float:
        return item() if callable(item) else self.function()


@variants("module", ["random", "numpy.random"])
def test_a_function_that_is_sent_draws_from_the_workers_generator(module):
    """With the dataset, or as an item."""
    function = importlib.import_module(module).random
    drawn = []
    for num_workers in (0, 1):
        with Loader(Holder(function), [function, 1] * 4, num_workers=num_workers) as loader:
            drawn.append(list(loader))
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 8


def draw_from_numpy(item: int) -> list[float]:
    import numpy as np

    return np.random.random(4).tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_two_batches_draw_alike_from_numpy(num_workers):
    """By 32 bits of their seeds these two would, and eight pairs of 300,000 batches."""
    first, second = 24460, 126115
    assert batch_seed(0, 0, first, 0) & 0xFFFF_FFFF == batch_seed(0, 0, second, 0) & 0xFFFF_FFFF
    drawn = []
    with Loader(draw_from_numpy, range(200_000), num_workers=num_workers, seed=0) as loader:
        for ordinal in (first, second):
            loader.set_epoch(0)
            loader.skip(ordinal)
            drawn.append(next(iter(loader)))
    assert drawn[0] != drawn[1]


def a_normal_number(item: int) -> float:
    """Draws two, and keeps one for the next call."""
    import numpy as np

    return np.random.randn()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_another_global_generator_of_numpy():
    """What a batch draws is of the batch, and the user's state is what it was."""
    import numpy as np

    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        with Loader(a_normal_number, range(4), num_workers=0) as loader:
            drawn = list(loader)
            loader.set_epoch(0)
            assert [loader.skip(3), *loader][1:] == drawn[3:]
        assert np.random.random() == np.random.default_rng(5).random()
    finally:
        np.random.set_bit_generator(former)


def test_a_generator_of_the_datasets_own_is_copied():
    own = random.Random(5)
    with Loader(Holder(own.random), range(1), num_workers=1) as loader:
        assert list(loader) == [random.Random(5).random()]


def is_plain(item: int) -> bool:
    """Whether something in this worker has asked the module for anything."""
    if item == 4:
        getattr(random, "random")  # noqa: B009
    return type(random) is types.ModuleType


def test_it_is_not_seeded_before_anything_has_asked_for_it():
    with Loader(is_plain, range(8), num_workers=1) as loader:
        assert list(loader) == [False] * 4 + [True] * 4
    assert type(random) is types.ModuleType  # here


def draw_in_fork(item: int) -> float:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, repr(random.random()).encode())
        os._exit(0)
    os.wait()
    os.close(writer)
    with open(reader) as file:
        return float(file.read())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_draws_numbers_of_its_own():
    """As ever: Python seeds its generator."""
    with Loader(draw_in_fork, [0] * 4, num_workers=1) as loader:
        numbers = list(loader)
    assert len(set(numbers)) == 4
    assert not {*numbers} & {random.Random(batch_seed(0, 0, n, 0)).random() for n in range(4)}


def test_a_failed_import_is_not_an_import(tmp_path, monkeypatch):
    """A module whose generators are to be seeded may come at the next attempt."""
    path = tmp_path / "comes_late.py"
    path.write_text("raise ImportError('not yet')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    seen: list[types.ModuleType] = []
    for _ in range(2):  # once is enough
        when_imported("comes_late", seen.append)
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("comes_late")
    assert seen == []
    path.write_text("ready = 'at last, and in a file of another size'\n")
    importlib.invalidate_caches()
    assert [importlib.import_module("comes_late")] == seen
    assert hasattr(seen[0], "ready")  # after its code was run
    forget("comes_late", seen.append)
    assert sys.meta_path == before
    del sys.modules["comes_late"]


def test_batches_made_here_leave_the_import_path_as_it_was():
    before = list(sys.meta_path)
    with Loader(abs, range(3), num_workers=0) as loader:
        assert list(loader) == [0, 1, 2]
    assert sys.meta_path == before


def test_two_threads_that_ask_at_once_seed_it_once(monkeypatch):
    """Else one of them could begin the numbers anew that the other has drawn."""
    module: Any = seeds._UnusedRandom("random")
    module.something = 1
    other = threading.Thread(target=lambda: module.something)
    seeded: list[int] = []

    def seed(module: Any, value: int) -> None:
        seeded.append(value)
        if len(seeded) == 1:
            other.start()
            other.join(0.1)  # as long as it waits for this thread

    monkeypatch.setattr(seeds, "_key", (0, 0, 0, 0))
    monkeypatch.setattr(seeds, "_seed_random", seed)
    assert module.something == 1
    other.join()
    assert seeded == [batch_seed(0, 0, 0, 0)]
