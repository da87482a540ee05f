"""minloader.torch.DataLoader beside torch's own, which says what is right wherever it can."""

from __future__ import annotations

import base64
import copy
import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
import zlib
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from multiprocessing import Lock
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import samples as zoo
from conftest import (
    belongings,
    eventually,
    in_a_fork,
    in_threads,
    lacking,
    lists,
    plain,
    printed_by,
    python,
    require,
    variants,
)
from helpers import SHARED, Gate, Reshuffling
from interrupts import interrupted
from kinds import IDIOMS, BeginsAnew, Counted, Numbered, ServesOnce
from samples import KINDS, Bad, Kinds, Numbers, Whereabouts

from minloader import BatchError, Loader, TransportError, concurrent, prefetch, shuffled
from minloader import BatchSampler as OurBatchSampler

torch = require("torch")

import torch_helpers  # noqa: E402
from model.drop_in import press  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data import DataLoader as TorchLoader  # noqa: E402
from torch.utils.data.datapipes.iter import IterableWrapper  # noqa: E402
from torch_helpers import (  # noqa: E402
    DrawingStream,
    Eager,
    EagerBatches,
    Placed,
    Sharded,
    Shuffled,
    Tensors,
)

from minloader._sampling import torch_collate  # noqa: E402
from minloader.torch import DataLoader, to_device  # noqa: E402


def assert_same(ours: Any, theirs: Any) -> None:
    """The same types, and the same values to the bit."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, np.ndarray):
        assert ours.tolist() == theirs.tolist()
    elif hasattr(theirs, "keys"):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
        assert getattr(ours, "tag", None) == getattr(theirs, "tag", None)
    elif isinstance(theirs, str | bytes) or not hasattr(theirs, "__len__"):
        assert ours == theirs
    else:
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)


def outcomes(loader: Any) -> Iterator[Any]:
    """Batches, and the types of errors in the place of others. It must be map-style."""
    batches = iter(loader)
    for _ in range(len(loader)):
        try:
            yield next(batches)
        except Exception as error:
            yield type(error)


def numbers(batches: Any) -> list[Any]:
    """The first field of each batch."""
    return [batch[0].flatten().tolist() for batch in batches]


# --- collating


@pytest.mark.parametrize("make", [default_collate, default_convert])
def test_every_kind_of_sample(make):
    """In the workers, of which one runs all kinds; an error takes one batch's place."""
    with warnings.catch_warnings():  # torch warns of arrays that it does not own
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"batch_size": 3 if make is default_collate else None}
        theirs = list(outcomes(TorchLoader(Kinds(list(KINDS)), **options)))
    with DataLoader(Kinds(list(KINDS)), num_workers=1, **options) as loader:
        assert loader.collate_fn is make
        for n, (mine, other) in enumerate(zip(outcomes(loader), theirs, strict=True)):
            kind = list(KINDS)[n if make is default_collate else n // 3]
            if kind == "object" and make is default_convert:
                assert type(mine) is type(other) is object
            elif kind == "None last" and make is default_collate:
                assert mine is TypeError  # as where all are None, in place of RuntimeError
            elif isinstance(other, type):
                assert issubclass(mine, other), kind
            else:
                assert_same(mine, other)


def test_more_lenient_than_torch():
    """What torch takes by itself and not in a batch, or not at all, for no good reason."""

    def arrived(samples: list[Any]) -> Any:
        return pickle.loads(pickle.dumps(torch_collate.collate(samples)))

    big = np.arange(3, dtype=">f4")
    assert_same(arrived([big, big]), torch.arange(3.0).expand(2, 3))
    assert_same(arrived([np.uint64(2**63)]), torch.tensor([2**63], dtype=torch.uint64))
    assert_same(arrived([np.arange(3)[::-1]]), torch.tensor([[2, 1, 0]]))


TENSORS = [
    *(torch.ones(2, dtype=torch.int32), torch.tensor([2**40, -1])),
    *(torch.ones(2, dtype=torch.bool), torch.tensor([2, 3])),
    *(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0.1, 1e300]).double()),
]
"""Two of each batch are of types of which one has the values of both, whichever is first."""

LISTS: list[Any] = [[[0, 1], [2, 3]], [[4, 5]]]  # an index may be a list
TUPLES: list[Any] = [([0, 1], [2, 3]), ([4, 5],)]
ITEMS = [slice(2), (1, 2), torch.tensor([3, 1]), range(2), np.arange(2), *LISTS, *TUPLES, []]
TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]

FETCHED: dict[str, dict[str, Any]] = {
    "tensors": {"dataset": Tensors(TYPES), "batch_size": 4},  # stacked where they travel
    "tensors of several types": {"dataset": TENSORS, "batch_size": 2},
    "whole": {"dataset": zoo.Whole(5), "batch_size": 2, "collate_fn": zoo.same},
    "any items": {"dataset": zoo.Whole(5), "batch_sampler": ITEMS, "collate_fn": zoo.same},
    "lists": {"dataset": zoo.Slices(6), "batch_sampler": LISTS + TUPLES},
    "one by one": {"dataset": zoo.OneByOne(5), "batch_size": 2},
    "single": {"dataset": Bad(6), "batch_size": None, "sampler": LISTS + TUPLES},
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", FETCHED)
def test_batches_are_torchs(kind, num_workers):
    theirs = list(TorchLoader(**FETCHED[kind]))
    with DataLoader(**FETCHED[kind], num_workers=num_workers) as loader:
        assert_same(list(loader), theirs)


def test_indices_that_are_lists_are_read_at_the_same_time():
    theirs = list(TorchLoader(zoo.Slices(6), batch_sampler=LISTS))
    data = concurrent(zoo.Slices(6), 2)
    with DataLoader(data, batch_sampler=LISTS, num_workers=1) as loader:
        assert_same(list(loader), theirs)


class Prefixed(dict[str, int]):
    def update(self, others: Any) -> None:  # type: ignore[override]
        for key, value in others.items():
            self[f"_{key}"] = value


@pytest.mark.parametrize("kind", [Counter, Prefixed])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dict_is_filled_by_its_own_update(kind, num_workers):
    samples = [kind({"a": 2, "b": 1}), kind({"a": 3, "b": 4})]
    theirs = list(TorchLoader(samples, 2))
    with DataLoader(samples, 2, num_workers=num_workers) as loader:
        assert_same(list(loader), theirs)


@pytest.mark.slow
def test_what_was_added_to_torchs_collating(monkeypatch):
    table = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(table, torch_helpers.Special, torch_helpers.collate_special)
    theirs = list(TorchLoader(torch_helpers.Specials(), batch_size=2))
    with DataLoader(torch_helpers.Specials(), batch_size=2, num_workers=1) as loader:
        assert_same(list(loader), theirs)


# --- order


def samplers(n: int, generator: Any) -> dict[str, Any]:
    return {
        "shuffle": {"shuffle": True, "batch_size": 4},
        "shuffle one by one": {"shuffle": True, "batch_size": None},
        "drop last": {"shuffle": True, "batch_size": 6, "drop_last": True},
        "list": {"sampler": [3, 1, 4, 1, 5], "batch_size": 2},
        "replacement": {"sampler": RandomSampler(range(n), replacement=True, num_samples=40)},
        "own generator": {"sampler": RandomSampler(range(n), generator=generator)},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * n, 9), "batch_size": 4},
        "subset": {"sampler": SubsetRandomSampler(range(3, 15))},
        "eager": {"sampler": Eager(n), "batch_size": 3},
        "eager batches": {"batch_sampler": EagerBatches(n)},
        "batches": {"batch_sampler": BatchSampler(SequentialSampler(range(n)), 7, True)},
        "random batches": {"batch_sampler": BatchSampler(RandomSampler(range(n)), 3, False)},
        "distributed": {"sampler": DistributedSampler(range(n), 2, 1), "batch_size": 4},
    }


def run(loader_class: Any, name: str, num_workers: int, own: bool, **options: Any) -> list[Any]:
    """Three epochs, of which one may be left early, and what comes next from the generators."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    given: Any = samplers(20, generator)[name]
    loader = loader_class(
        Numbers(), generator=generator if own else None, num_workers=num_workers, **given, **options
    )
    seen = []
    for epoch in range(3):
        if name == "distributed":
            given["sampler"].set_epoch(epoch)
        batches = iter(loader)
        early = epoch == 1 and not own and name != "own generator"
        taken = list(islice(batches, 1)) if early else list(batches)
        seen += [numbers([batch] if torch.is_tensor(batch) else batch for batch in taken)]
        seen += [len(loader), torch.rand(1).item(), torch.rand(1, generator=generator).item()]
    if loader_class is DataLoader:
        loader.close()
    return seen


@pytest.mark.parametrize("name", samplers(20, None))
def test_the_order_is_torchs(name):
    for own in (False, True):
        assert run(DataLoader, name, 0, own) == run(TorchLoader, name, 0, own)


@variants(
    ("name", "own"),
    [("eager batches", False), ("eager batches", True), ("shuffle", False), ("shuffle", True)],
)
def test_persistent_workers_draw_as_torchs(name, own):
    both = [
        run(loader, name, 1, own, persistent_workers=True) for loader in (DataLoader, TorchLoader)
    ]
    assert both[0] == both[1]


def test_a_sampler_draws_while_it_is_read():
    """Not all of an epoch before the first batch."""
    generator, other = (torch.Generator().manual_seed(4) for _ in range(2))
    sampler = RandomSampler(range(20), replacement=True, num_samples=10**9, generator=generator)
    next(iter(DataLoader(Numbers(), sampler=sampler)))
    torch.randint(20, (32,), generator=other)  # torch's sampler draws so many at a time
    assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("items", "given"),
    [
        ([[0, 1], [2, 3], [4]], lambda sampler: {"batch_sampler": sampler}),
        ([0, 1, 2, 3, 4], lambda sampler: {"sampler": sampler, "batch_size": None}),
    ],
)
def test_a_sampler_that_is_its_own_iterator(items, given, num_workers):
    """Lightning predicts with such a one."""
    own, once = BeginsAnew(items), ServesOnce(items)
    with DataLoader(range(5), **given(own), num_workers=num_workers) as loader:
        if items[0] == 0:
            loader.state_dict()
        assert lists(map(torch.as_tensor, loader)) == items
        assert own.begun == 1 + (num_workers > 0)  # torch begins it once more with workers
        next(iter(loader))  # and is left early
        assert lists(map(torch.as_tensor, loader)) == items
    with DataLoader(range(5), **given(once), num_workers=num_workers) as loader:
        assert lists(map(torch.as_tensor, loader)) == items
        for _ in range(2):
            batches = iter(loader)
            with pytest.raises(RuntimeError, match=r"sampler is an iterator.* serves one epoch"):
                next(batches)


@pytest.mark.parametrize("steps", ["begin 0", "begin 0; take 1; torch.rand"])
def test_an_interrupt_in_a_sampler_loses_nothing(steps):
    """The epoch is begun again with the same generators, up to where it was."""
    code = torch.utils.data.sampler.__file__
    kinds = "shuffle", "ours over ours over torch's"
    assert max(press(kind, 0, steps, 1, within=code) for kind in kinds) > 0


def test_an_interrupt_in_the_sampler_of_an_epoch_before_others_loses_nothing():
    torch.manual_seed(3)
    expected = [lists(DataLoader(range(9), 1, sampler=Eager(9))) for _ in range(3)]
    torch.manual_seed(3)
    sampler = torch_helpers.Interrupting(9)
    loader = DataLoader(range(9), 1, sampler=sampler)
    iterators = [iter(loader) for _ in range(3)]
    taken = [lists(islice(batches, 1)) for batches in iterators]
    sampler.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        next(iterators[0])
    assert [first + lists(iterators[n]) for n, first in enumerate(taken)] == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_may_begin_in_a_fork(num_workers):
    loader = DataLoader(range(5), 2, num_workers=num_workers)
    batches = iter(loader)

    def go() -> list[Any]:
        with loader:
            return lists(batches)

    assert in_a_fork(go) == "[[0, 1], [2, 3], [4]]"


def test_several_threads_begin_epochs_of_their_own():
    """At the same time, over and over: each is a whole one."""
    loader = DataLoader(range(9), 3, shuffle=True)
    together = threading.Barrier(4, timeout=60)

    def take() -> list[Any]:
        taken = []
        for _ in range(30):
            together.wait()
            taken.append(sorted(chain(*lists(loader))))
        return taken

    assert in_threads(*[take] * 4) == [[[*range(9)]] * 30] * 4


def test_out_of_order(tmp_path):
    data, gate = Gate(str(tmp_path / "open")), tmp_path / "open"
    with DataLoader(data, sampler=range(6), num_workers=2, in_order=False) as loader:
        batches = iter(loader)
        first = [next(batches).item() for _ in range(5)]
        gate.touch()
        assert first == [1, 2, 3, 4, 5]
        assert next(batches).item() == 0


MANY = range(9_999)
"""A dataset for all indices of :class:`Counted`."""


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_sampler_with_a_state_that_torchs_batches_hide(is_used, number, batched):
    def make(loader_class: Any) -> Any:
        if batched:
            return loader_class(MANY, batch_sampler=BatchSampler(Counted(9), 2, False))
        return loader_class(MANY, 2, sampler=Counted(9))

    theirs, loader, resumed = map(make, (TorchLoader, DataLoader, DataLoader))
    epochs = [lists(theirs) for _ in range(3)]
    assert [lists(loader) for _ in range(number)] == epochs[:number]
    batches = iter(loader)
    assert [batch.tolist() for batch in islice(batches, 2)] == epochs[number][:2]
    if is_used:
        lists(resumed)
        next(iter(resumed))
    resumed.load_state_dict(plain(loader.state_dict()))
    assert lists(resumed) == epochs[number][2:]
    assert lists(resumed) == epochs[number + 1]


def test_an_interrupt_at_the_end_of_an_epoch_that_the_sampler_has_counted():
    """Torch's batches come to its end with the last one, if that is incomplete."""
    whole = DataLoader(MANY, 2, sampler=Counted(9))
    first, second = lists(whole), lists(whole)
    for place in count():
        loader = DataLoader(MANY, 2, sampler=Counted(9))
        batches = iter(loader)
        found = [batch.tolist() for batch in islice(batches, 5)]
        if not interrupted(lambda: next(batches, None), place).interrupted:  # noqa: B023
            break
        assert (found, list(batches), lists(loader)) == (first, [], second)


# --- workers


@pytest.mark.slow
def test_what_workers_know():
    options: dict[str, Any] = {"batch_size": None, "worker_init_fn": zoo.mark_dataset}
    both = []
    for loader_class in (DataLoader, TorchLoader):
        torch.manual_seed(5)
        loader = loader_class(Whereabouts(8), num_workers=2, **options)
        both.append([each[:5] for each in loader])
    ours, theirs = both
    assert all(each in theirs for each in ours)  # who made which depends on luck
    assert all(each[3:] == [True, 10 + each[0]] for each in ours)
    assert torch.utils.data.get_worker_info() is None


@pytest.mark.slow
def test_a_dataset_that_is_the_first_to_import_torch():
    context = {"multiprocessing_context": "spawn"}
    with DataLoader(Whereabouts(2), batch_size=None, num_workers=1, **context) as loader:
        first, second = loader
        assert first[:2] == [0, 1]
        assert (first[5], second[5]) == (False, True)


@variants("method", [None, "loky", "spawn"], quick=2)
def test_workers_start_as_torchs(method, monkeypatch):
    """By fork, where that is the default: then they have what this process has imported.

    Also within joblib, where it is what makes joblib's own processes.
    """
    monkeypatch.setitem(sys.modules, "only_here", sys)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: method)
    forks = method != "spawn" and multiprocessing.get_all_start_methods()[0] == "fork"
    with DataLoader(zoo.Imported("only_here"), num_workers=1) as loader:
        assert [batch.item() for batch in loader] == [forks]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_script():
    """A fork does not wait for threads of its parent; an iterator that is kept ends quietly.

    The threads are those of OpenMP, which a tensor that is large enough asks for. With torch a
    script's names may live longer than the modules that they were made in.
    """
    script = """
    import torch
    import minloader
    from minloader.torch import DataLoader

    class Sums:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (torch.ones(1_000_000) + index).sum()

    torch.set_num_threads(4)
    Sums()[0]
    loader = DataLoader(Sums(), num_workers=1, multiprocessing_context="fork")
    print([batch.item() for batch in loader])
    batches = iter(DataLoader(range(9), 2))
    print(next(batches).tolist())
    """
    assert printed_by(script) == "[1000000.0, 2000000.0]\n[0, 1]\n"


OTHER_TORCH = """
import sys
from typing import Generic, TypeVar

import torch
import torch.utils.data
from torch.utils.data import DataLoader as Theirs

A, B = TypeVar("A"), TypeVar("B")

class Older(Theirs):  # of 2.2
    def __init__(
        self, dataset, batch_size=1, shuffle=None, sampler=None, batch_sampler=None, num_workers=0,
        collate_fn=None, pin_memory=False, drop_last=False, timeout=0, worker_init_fn=None,
        multiprocessing_context=None, generator=None, *, prefetch_factor=None,
        persistent_workers=False, pin_memory_device="",
    ):
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

class Later(Theirs, Generic[A, B]):
    pass

def look(theirs):
    for name in [name for name in sys.modules if name.startswith("minloader.torch")]:
        del sys.modules[name]
    torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = theirs
    from minloader.torch import DataLoader

    torch.accelerator = accelerator  # which the other parts of this torch need
    assert issubclass(DataLoader, theirs)
    loader = DataLoader[torch.Tensor](range(6), 2, num_workers=1, pin_memory=theirs is Later)
    batches = iter(loader)
    print(next(batches).tolist(), end=" ")
    state = loader.state_dict()
    loader.load_state_dict(state)
    print(*(batch.tolist() for batch in loader))
    loader.close()

accelerator = torch.accelerator
look(Later)
del torch.accelerator, torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe
del torch.utils.data.dataloader._BaseDataLoaderIter
look(Older)
"""


def test_an_older_torch_and_a_later_one():
    """What not every version has is not needed; a loader with more type parameters is no harm."""
    said = printed_by(OTHER_TORCH, options=["-W", "ignore"])
    assert said == 2 * "[0, 1] [2, 3] [4, 5]\n"


def test_worker_init_fn_is_called_in_workers_alone():
    """What it raises there is raised here."""
    with DataLoader(Whereabouts(2), batch_size=None, worker_init_fn=zoo.fail_to_begin) as loader:
        assert [each[0] for each in loader] == [None, None]
        loader.num_workers = 1
        with pytest.raises(KeyError, match="no worker 0"):
            next(iter(loader))


def test_workers_do_not_import_torch():
    context = {"multiprocessing_context": "spawn"}
    with DataLoader(Numbers(40, 5000), batch_size=4, num_workers=2, **context) as loader:
        for batch, has_torch in loader:
            assert not has_torch.any()
            assert lies_in_slot(batch)
            batch += 1  # it is ours
        del batch
        assert loader.stats.memory.slots <= 8
        assert loader.stats.memory.overflowed == 0


def lies_in_slot(tensor: Any) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return bool(SHARED.search(line))
    return False


@pytest.mark.parametrize("persistent", [False, True])
@variants("method", ["fork", "spawn", "forkserver"])
def test_seeds_of_a_worker_init_fn_are_told_to_have_no_effect(method, persistent, caplog):
    """Once in the program, by whichever worker of whichever loader."""
    options = {"multiprocessing_context": method, "persistent_workers": persistent}
    for data in Numbers(4), Sharded(4):
        with DataLoader(data, num_workers=2, worker_init_fn=zoo.seed_all, **options) as loader:
            assert len(list(loader)) == len(list(loader)) == 4
    (said,) = [line for line in caplog.messages if "worker_init_fn" in line]
    assert said.startswith("worker_init_fn has seeded random and numpy.random, or drawn from")


IMPORTING = """
import sys
from minloader import Loader
from minloader._worker.torch_conventions import WorkerInit

def init(worker):
    assert {module!r} not in sys.modules or {module!r} == "random"
    {statement}

list(Loader(range(2), num_workers=1, worker_init_fn=WorkerInit(init)))
"""


@pytest.mark.parametrize(
    ("module", "statement", "is_told"),
    [
        ("random", "import random; random.seed(worker)", True),
        ("random", "import random; random.Random(worker).random()", False),
        ("numpy.random", "import numpy; numpy.random.seed(worker)", True),
        ("numpy.random", "import numpy.random; numpy.random.rand()", True),
        ("numpy.random", "import numpy.random; numpy.random.default_rng(worker)", False),
        ("torch", "import torch; torch.manual_seed(worker)", True),
        ("torch", "import torch; torch.Generator().manual_seed(worker)", False),
    ],
)
def test_what_a_worker_init_fn_imports_first_is_told_if_it_is_seeded(module, statement, is_told):
    said = python(IMPORTING.format(module=module, statement=statement)).stderr
    assert said.startswith(f"worker_init_fn has seeded {module}, or" if is_told else "")
    assert bool(said) == is_told


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_worker_init_fn_beside_another_global_generator_of_numpy():
    import numpy as np

    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        with DataLoader(
            Numbers(4), num_workers=1, worker_init_fn=zoo.seed_all, multiprocessing_context="fork"
        ) as loader:
            assert len(list(loader)) == 4
    finally:
        np.random.set_bit_generator(former)


def test_torchs_worker_info_in_workers_of_a_loader():
    """An IterableDataset shards itself by that. Torch's answer has the shard's own dataset."""
    with Loader(Sharded(11), num_workers=2, mp_context="fork") as loader:
        for _ in range(2):
            assert sorted(int(each[0]) for each in loader) == list(range(11))
    with Loader(Whereabouts(8), range(8), num_workers=1, mp_context="fork") as loader:
        assert all(each[:2] == (0, 1) and each[3] for each in loader)
    # The batch that imports torch is told, too.
    with Loader(Whereabouts(3), range(3), num_workers=1) as loader:
        assert [(*each[:2], *each[3:6]) for each in loader] == [
            (0, 1, True, -1, imported) for imported in (False, True, True)
        ]


# --- streams


@pytest.mark.parametrize("kind", [Sharded, Placed])
def test_the_calling_process_reads_each_shard(kind):
    """Of a state of two workers, whose shards are known by torch's ``get_worker_info``."""
    with Loader(kind(11), batch_size=2, num_workers=2) as loader:
        state = loader.state_dict()  # from before they are started
    given, states = [], []
    with Loader(kind(11), batch_size=2, num_workers=0) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            given.append(batch[:, 0].tolist())
            states.append(loader.state_dict())
            assert torch.utils.data.get_worker_info() is None
        assert given == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9]]
        for k, state in enumerate(states, 1):
            loader.load_state_dict(state)
            assert [batch[:, 0].tolist() for batch in loader] == given[k:]


@pytest.mark.parametrize("idiom", IDIOMS)
def test_streams_count_their_epochs_as_with_torch(idiom):
    kind = type(idiom.__name__, (idiom, IterableDataset), {})
    ours, theirs = DataLoader(kind(), 2), TorchLoader(kind(), 2)
    epochs = [lists(theirs) for _ in range(4)]
    assert epochs[2][0] == [200, 201]
    assert [lists(ours) for _ in range(4)] == epochs
    loader = DataLoader(kind(), 2)
    lists(loader)
    batches = iter(loader)
    for k in range(1, len(epochs[1]) + 1):
        next(batches)
        other = DataLoader(kind(), 2)
        other.load_state_dict(plain(loader.state_dict()))
        assert lists(other) == epochs[1][k:]
        assert lists(other) == epochs[2]


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("num_workers", [1, 0])
def test_fewer_workers_than_a_state_has_shards(num_workers, stateful):
    """Each epoch has all samples, of the epoch that was set: also those after the state's."""

    def epoch_of(loader: DataLoader[Any], epoch: int) -> list[int]:
        loader.set_epoch(epoch)
        return [number - 1000 * epoch for batch in loader for number, _ in batch]

    options = {"batch_size": 2, "collate_fn": list, "multiprocessing_context": "fork"}
    with DataLoader(DrawingStream(13, stateful), num_workers=2, **options) as loader:
        assert sorted(epoch_of(loader, 0)) == [*range(13)]
        loader.set_epoch(1)
        given = [number - 1000 for number, _ in next(iter(loader))]
        state = loader.state_dict()
    options["multiprocessing_context"] = "fork" if num_workers else None
    with DataLoader(DrawingStream(13, stateful), num_workers=num_workers, **options) as loader:
        loader.load_state_dict(state)
        assert sorted(given + epoch_of(loader, 1)) == [*range(13)]
        for epoch in 2, 3:
            assert sorted(epoch_of(loader, epoch)) == [*range(13)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_stream(num_workers):
    torch.manual_seed(1)  # one of 32 orders is that of the stream
    with DataLoader(shuffled(Sharded(11), 4), 2, num_workers=num_workers) as loader:
        batches = iter(loader)
        first = next(batches).tolist()
        state = plain(loader.state_dict())
        rest = lists(batches)
        found = [pair[0] for pair in chain(first, *rest)]
        assert sorted(found) == list(range(11)) != found
        loader.load_state_dict(state)
        assert lists(loader) == rest


@pytest.mark.parametrize("at", [0, 1, 4, 7, 9])
def test_the_epoch_that_a_shuffled_stream_is_told_counts(at):
    """Not that of the state which it is put back to."""

    def run(loader: DataLoader[Any], state: Any = None) -> Iterator[tuple[list[int], Any]]:
        if state is not None:
            loader.load_state_dict(state)
        for epoch in range(0 if state is None else at // 7, 2):
            loader.set_epoch(epoch)
            for batch in loader:
                yield batch.tolist(), plain(loader.state_dict())

    batches, states = zip(*run(DataLoader(shuffled(Numbered(), 4), 2)), strict=True)
    rest = run(DataLoader(shuffled(Numbered(), 4), 2), states[at])
    assert [batch for batch, _ in rest] == [*batches[at + 1 :]]


@pytest.mark.parametrize("stateful", [False, True])
def test_workers_that_stay_read_a_stream_for_the_epoch_that_was_set(stateful):
    """With torch they have it as it was when they started. Resumed runs go on alike."""

    def make() -> DataLoader[Any]:
        options = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(DrawingStream(4, stateful), 2, collate_fn=list, **options)

    def run(loader: DataLoader[Any], first: int) -> Iterator[tuple[list[int], Any]]:
        for epoch in range(first, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                yield [number for number, _ in batch], plain(loader.state_dict())
            yield [], plain(loader.state_dict())  # between two epochs

    with make() as loader:
        events = list(run(loader, 0))
        batches = [batch for batch, _ in events]
        assert batches[3:] == [[1000, 1001], [1002, 1003], [], [2000, 2001], [2002, 2003], []]
        for n in (0, 1, 2, 3, 5):
            rest = [batch for batch in batches[n + 1 :] if batch]
            with make() as other:
                for each in other, loader:
                    each.load_state_dict(events[n][1])
                    given = [batch for batch, _ in run(each, first=(n + 2) // 3)]
                    assert [batch for batch in given if batch] == rest, n


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_after_one_that_was_left_goes_on_from_its_first_batch(num_workers):
    def make() -> DataLoader[Any]:
        sampler: Any = Reshuffling(9)
        return DataLoader(range(9), None, sampler=sampler, num_workers=num_workers)

    for taken in (1, 2):
        with make() as loader, make() as other:
            next(iter(loader))
            batches = iter(loader)
            given = list(islice(batches, taken))
            other.load_state_dict(plain(loader.state_dict()))
            rest = list(batches)
            assert sorted(given + rest) == list(range(9))
            assert list(other) == rest


@pytest.mark.parametrize("init", [None, torch_helpers.keep_seed])
@variants("persistent", [False, True])
def test_the_seed_that_torch_offers_is_of_the_epoch(init, persistent):
    """Unless workers persist, as with torch; and a resumed run has that of its epoch."""
    options: dict[str, Any] = {"worker_init_fn": init, "persistent_workers": persistent}

    def make(loader_class: Any) -> Any:
        torch.manual_seed(3)
        return loader_class(Shuffled(), 4, num_workers=2, **options)

    theirs = make(TorchLoader)
    distinct = {str(lists(theirs)) for _ in range(3)}
    with make(DataLoader) as loader, make(DataLoader) as other:
        epochs = [lists(loader) for _ in range(2)]
        batches = iter(loader)
        third = lists(islice(batches, 3))
        other.load_state_dict(plain(loader.state_dict()))
        rest = lists(batches)
        assert lists(other) == rest
        assert len({str(each) for each in (*epochs, third + rest)}) == len(distinct)
        assert lists(other) == lists(loader)


def test_the_length_of_a_stream():
    data = Sharded(5, length=4)
    loader = DataLoader(data, batch_size=2)
    assert len(loader) == len(TorchLoader(data, batch_size=2)) == 2
    assert len(DataLoader(data, batch_size=3, drop_last=True)) == 1
    alone = DataLoader(data, batch_size=None)
    assert len(alone) == 4
    with pytest.warns(UserWarning, match="was reported to be 4.*but 5 batches") as caught:
        list(alone)
    assert caught[0].filename == __file__  # who iterates
    with pytest.raises(TypeError):
        len(DataLoader(Sharded(5)))
    list(DataLoader(data, batch_size=None))  # nobody asked


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_warning_that_is_an_error_takes_the_place_of_one_batch(num_workers):
    loader = DataLoader(Sharded(5, length=2), batch_size=None, num_workers=num_workers)
    assert len(loader) == 2
    with loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = iter(loader)
        assert lists(islice(batches, 2)) == [[0, 0], [1, 1]]
        for _ in range(3):
            with pytest.raises(UserWarning, match="was reported to be 2"):
                next(batches)
        assert list(batches) == []


SUITE = """
import torch.utils.data


def test_batches():
    loader = torch.utils.data.DataLoader(range(3), 2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


def test_partial_workers():
    assert len(iter(torch.utils.data.DataLoader([1], num_workers=1))._workers) == 1
"""


@pytest.mark.slow
def test_the_score_of_a_suite(tmp_path):
    """The table of docs/torch.md is made so."""
    suite = tmp_path / "test" / "test_dataloader.py"
    suite.parent.mkdir()
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "tests.torch_score", str(tmp_path)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=380)
    *_, row = done.stdout.splitlines()
    assert row.split(" | ")[1:4] == ["2", "2", "1"], done.stderr
    assert "`test_partial_workers`: they look at" in row
    assert "Accelerate: give a checkout" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["webdataset", "datasets"])
def test_streams_of_other_packages(package, tmp_path):
    """The program says what is checked."""
    if importlib.util.find_spec(package) is None:
        lacking(package)
    program = Path(torch_helpers.__file__).with_name("torch_streams.py")
    done = python(program, package, tmp_path, options=["-W", "ignore"], timeout=380)
    assert done.returncode == 0, done.stderr


# --- arguments

BAD_ARGUMENTS = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"persistent_workers": True},
    {"sampler": [0], "shuffle": True},
    {"batch_sampler": [[0]], "batch_size": 2},
    {"batch_sampler": [[0]], "shuffle": True},
    {"batch_sampler": [[0]], "sampler": [0]},
    {"batch_sampler": [[0]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": 1.5},
    {"drop_last": 1},
    {"multiprocessing_context": "spawn"},
    {"multiprocessing_context": "bad", "num_workers": 1},
    {"multiprocessing_context": 5, "num_workers": 1},
    {"dataset": [], "shuffle": True},
    {"dataset": Sharded(3), "shuffle": True},
    {"dataset": Sharded(3), "sampler": [0]},
    {"dataset": Sharded(3), "sampler": 3},
    {"dataset": Sharded(3), "batch_sampler": [[0]]},
    {"dataset": Sharded(3), "batch_sampler": 3},
    {"sampler": 3, "shuffle": True},
    {"batch_sampler": 3, "sampler": 3},
]


@pytest.mark.parametrize("options", BAD_ARGUMENTS, ids=lambda options: " ".join(options))
def test_arguments_are_refused_as_by_torch(options):
    options = {"dataset": Numbers()} | options
    with pytest.raises((ValueError, TypeError)) as theirs:
        TorchLoader(**options)
    with pytest.raises(theirs.type):
        DataLoader(**options)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("made_into", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_iterator_is_neither_pickled_nor_copied_as_that_of_torch(made_into, num_workers):
    for kind in TorchLoader, DataLoader:
        batches = iter(kind(Numbers(), num_workers=num_workers))
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            made_into(batches)


@pytest.mark.parametrize("steps", [None, 0, 3])
def test_the_argument_that_torchdatas_loader_has_more(steps):
    """Each state is of the last batch, whatever it is."""
    loader = DataLoader(range(8), 2, snapshot_every_n_steps=steps)
    assert loader.snapshot_every_n_steps == steps
    next(iter(loader))
    state = loader.state_dict()
    loader = DataLoader(range(8), 2, snapshot_every_n_steps=steps)
    loader.load_state_dict(state)
    assert lists(loader) == [[2, 3], [4, 5], [6, 7]]


def test_attributes():
    options: dict[str, Any] = {"batch_size": 3, "drop_last": True, "shuffle": True}
    ours, theirs = DataLoader(Numbers(), **options), TorchLoader(Numbers(), **options)
    for name in vars(theirs):
        if not name.startswith("_") and name not in ("dataset", "sampler", "batch_sampler"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours.sampler) is type(theirs.sampler)
    assert type(ours.batch_sampler) is type(theirs.batch_sampler)
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(ours, name, None)
    assert len(ours) == len(iter(ours)) == 6
    assert DataLoader(Numbers(), num_workers=1).prefetch_factor == 2
    assert DataLoader[int](Numbers()).stats.batches == 0


def test_stats_do_not_advise_a_method_that_this_loader_has_not():
    with DataLoader(Numbers(), num_workers=1) as loader:
        next(iter(loader))
        stats = loader.stats
    stats.time.wait = stats.time.startup = 9.0
    assert "look again after more batches" in stats.verdict
    assert "start()" not in stats.verdict


class ReadOnce:
    """An iterator of Python's own kind, which nothing begins anew."""

    def __init__(self) -> None:
        self.left = [2, 1]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Unmarked:
    """A stream that torch does not know to be one."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


@pytest.mark.parametrize("sampler", [lambda: iter([1, 2]), ReadOnce])
def test_a_sampler_that_can_be_read_once(sampler):
    loader = DataLoader(Numbers(), sampler=sampler())
    assert numbers(loader) == [[1], [2]]
    with pytest.raises(RuntimeError, match="sampler is an iterator"):
        next(iter(loader))


def test_leaving_out_does_not_hide_that_a_sampler_is_used_up():
    loader = DataLoader(Numbers(), sampler=iter([1, 2, 3]))
    loader.skip(1)
    assert numbers(loader) == [[2], [3]]
    loader.skip(1)
    with pytest.raises(RuntimeError, match="sampler is an iterator"):
        next(iter(loader))
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.skip(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_left_out_also_where_an_attribute_is_set_since(num_workers):
    """What is left out is not made, and nothing is drawn for it."""
    loader = DataLoader(Bad(8, fails=1), 2, num_workers=num_workers)
    for n in 1, 2, 3:
        loader.skip(n)
        loader.retries += 1
        assert numbers(loader) == [[2], [4], [6]][n - 1 :]
    with pytest.raises(ValueError, match="n must be at least 0"):
        copy.copy(loader).skip(-1)
    loader.close()
    of_a_function = DataLoader(Unsized(), sampler=range(3), batch_size=None)
    of_a_function.skip(2)
    assert list(of_a_function) == [2]


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


def begin(dataset: Any = None, **options: Any) -> None:
    with DataLoader(Numbers() if dataset is None else dataset, **options) as loader:
        next(iter(loader))


def begin_with(name: str, value: Any) -> None:
    with DataLoader(Numbers()) as loader:
        setattr(loader, name, value)
        next(iter(loader))


class Holds(Numbers):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared


WRONG_TYPES = {"num_workers": "2", "timeout": "x", "collate_fn": 3, "worker_init_fn": 3}
WRONG_TYPES |= {"sampler": 5, "batch_sampler": 5, "generator": 5, "in_order": 5}
WRONG = {"on_error": 3, "transform": 3, "retries": -1, "worker_memory_limit": 0}
WRONG |= {"max_errors": -1, "shared_memory": -1}
SPAWNED: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
LOCKS: dict[str, Any] = {"transform": lambda _: threading.Lock(), "collate_fn": list}
MASKED = np.ma.masked_equal([1, 2], 2)
NONE = "is None in sample 2 of the 4 of a batch, and in 1 more"
of_numbers = partial(DataLoader, Numbers())
collate = torch_collate.collate

MESSAGES: list[tuple[Callable[[], Any], Any, str | None]] = [
    # Some of these torch would only stumble over later, or not name.
    *(
        (partial(of_numbers, **{name: value}), TypeError, f"{name} must be .*, got")
        for name, value in WRONG_TYPES.items()
    ),
    *(
        (partial(of_numbers, **{name: value}), (TypeError, ValueError), f"{name} must be")
        for name, value in WRONG.items()
    ),
    (
        partial(of_numbers, num_workers=1, prefetch_factor=1.5),
        TypeError,
        r"prefetch_factor must be an int, got 1\.5",
    ),
    (partial(begin, timeout=1), ValueError, "timeout=1 is for workers"),
    (partial(of_numbers, timeout=-1), ValueError, "timeout must be at least 0 seconds, got -1"),
    *(
        (partial(begin_with, name, "x"), TypeError, f"{name} must be .*, got 'x'")
        for name in ("timeout", "generator")
    ),
    (
        partial(begin, batch_sampler=[1, 2]),
        TypeError,
        "yielded 1, but .* takes one index at a time as sampler",
    ),
    (
        lambda: DataLoader(IterableWrapper([1])),
        NotImplementedError,
        "DataPipe, IterableWrapperIterDataPipe",
    ),
    (
        partial(DataLoader, Unmarked()),
        TypeError,
        r"from torch\.utils\.data\.IterableDataset, or use",
    ),
    (lambda: begin(Holds(Lock()), **SPAWNED), TypeError, r"dataset\.shared.* is a Lock"),
    (
        lambda: begin(Holds(threading.Lock()), **SPAWNED),
        TypeError,
        r"in __getstate__, or set num_workers=0",
    ),
    (partial(begin, **LOCKS, **SPAWNED), TransportError, r"of them, or set num_workers=0"),
    (partial(to_device, [], "cpu", convert="cuda"), TypeError, "convert must be"),
    (partial(collate, []), IndexError, None),
    (
        partial(collate, [np.zeros(1), np.zeros(2)]),
        RuntimeError,
        r"\[1\] at entry 0 and \[2\] at entry 1",
    ),
    (
        partial(collate, [np.zeros(1, "M8[s]")]),
        TypeError,
        r"numpy.datetime64\. The only supported types are",
    ),
    (  # torch loses it in silence
        partial(collate, [{"x": MASKED}]),
        TypeError,
        r"sample\['x'\] is a MaskedArray, whose mask .*x\.filled",
    ),
    (partial(collate, [{"a": None}]), TypeError, r"None in sample 0.*minloader.SKIP"),
    *(
        (partial(collate, [sample, sample, None, None]), TypeError, NONE)
        for sample in (1, 1.5, np.ones(2), {"x": 1}, (1, 2))
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), MESSAGES)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- state


def test_the_states_of_a_resumed_run_are_those_of_the_undisturbed_one():
    """Who compares checkpoints sees no difference."""

    def states(loader: DataLoader[Any], batches: Any) -> list[Any]:
        return [plain(loader.state_dict()) for _ in batches]

    lived, resumed = (DataLoader(Numbers(), 4, True) for _ in range(2))
    list(lived)
    batches = iter(lived)
    next(batches)
    state = plain(lived.state_dict())
    resumed.load_state_dict(state)
    assert plain(resumed.state_dict()) == state
    assert states(resumed, resumed) == states(lived, batches)


def test_an_epoch_of_ours_without_a_batch_is_begun_once_after_a_resume():
    def make() -> DataLoader[Any]:
        return DataLoader(range(1), batch_sampler=OurBatchSampler(1, 2, last_batch="rollover"))

    lived, resumed = make(), make()
    resumed.load_state_dict(plain(lived.state_dict()))
    for loader in (lived, resumed):
        epochs = []
        for epoch in range(4):
            loader.set_epoch(epoch)
            epochs.append(lists(loader))
        assert epochs == [[], [[0, 0]]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_one_rank_serves_all(rank):
    """With the epoch that the sampler was set to."""

    def make(rank: int, **options: Any) -> DataLoader[Any]:
        dealt = DistributedSampler(range(20), 2, rank, **options)
        return DataLoader(Numbers(), 2, sampler=dealt)

    loader = make(0)
    loader.set_epoch(3)
    next(iter(loader))
    state = plain(loader.state_dict())
    uninterrupted, other = make(rank), make(rank)
    uninterrupted.set_epoch(3)
    other.load_state_dict(state)
    other.set_epoch(3)  # as trainers do all the same
    assert numbers(other) == numbers(uninterrupted)[1:]
    for different in (make(0, seed=1), DataLoader(Numbers(), 2, sampler=list(range(10)))):
        different.load_state_dict(state)
        with pytest.raises(ValueError, match="the state does not fit"):
            next(iter(different))


@pytest.mark.parametrize(
    ("former", "ranks", "message"),
    [
        (2, 3, "out to 3 ranks, seed 4, but the state was taken with 2 ranks, seed 4"),
        (2, 1, "out to 1 rank, but the state was taken with 2 ranks, seed 4"),
        (1, 2, "out to 2 ranks, seed 4, but the state was taken with 1 rank;"),
    ],
)
def test_another_number_of_ranks_is_said(former, ranks, message):
    def make(ranks: int) -> DataLoader[Any]:
        sampler = OurBatchSampler(20, 2, rank=0, world_size=ranks, seed=4)
        return DataLoader(Numbers(), batch_sampler=sampler)

    loader = make(former)
    next(iter(loader))
    other = make(ranks)
    other.load_state_dict(plain(loader.state_dict()))
    with pytest.raises(ValueError, match=message):
        list(other)


def test_another_batch_size_is_said_with_what_can_be_done():
    loader = DataLoader(Numbers(), batch_sampler=OurBatchSampler(20, 2))
    next(iter(loader))
    other = DataLoader(Numbers(), batch_sampler=OurBatchSampler(20, 4))
    with pytest.raises(ValueError, match=r"sampler with that; if the state is of a minloader"):
        other.load_state_dict(plain(loader.state_dict()))
    assert numbers(other) == [[0, 1, 2, 3], *numbers(other)[1:]]


def test_a_sampler_that_counts_its_epochs_while_it_is_read():
    """As Accelerate's does: at the end of the sampler it is ahead of the consumer.

    It makes its generator then, too.
    """

    class Counting(DistributedSampler):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            self.generator = torch.Generator()
            yield from super().__iter__()
            self.set_epoch(self.epoch + 1)

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 2, sampler=Counting(range(8), 2, 0), num_workers=1)

    with make() as loader, make() as other:
        loader.set_epoch(3)
        batches = iter(loader)
        next(batches)
        assert loader.sampler.epoch == 4
        state, rest = loader.state_dict(), numbers(batches)
        other.load_state_dict(state)
        other.set_epoch(3)
        assert numbers(other) == rest
        other.load_state_dict(state)
        other.set_epoch(1)
        with pytest.warns(UserWarning, match="of epoch 3 .* set to epoch 1") as caught:
            assert len(list(other)) == 2
        assert caught[0].filename == __file__  # who iterates


def test_state_before_a_sampler_that_counts_as_it_begins():
    class Counting(DistributedSampler):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            self.set_epoch(self.epoch + 1)
            yield from super().__iter__()

    ours, other, theirs = (
        loader_class(Numbers(), 2, sampler=Counting(range(20), 2, 0))
        for loader_class in (DataLoader, DataLoader, TorchLoader)
    )
    state = plain(ours.state_dict())
    expected = numbers(theirs)
    assert numbers(ours) == expected
    other.load_state_dict(state)
    assert numbers(other) == expected


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_iterators_at_the_same_time_end_together(num_workers, persistent):
    """Each has workers of its own, if these do not stay."""
    options = {"num_workers": num_workers, "persistent_workers": persistent}
    with DataLoader(range(20), 2, **options) as loader:
        first, second, unbegun = iter(loader), iter(loader), iter(loader)
        for batches in first, second:
            assert next(batches).tolist() == [0, 1]
        loader.load_state_dict(loader.state_dict())
        for batches in first, second:
            with pytest.raises(RuntimeError, match="load_state_dict was called after"):
                next(batches)
        assert next(unbegun).tolist() == [2, 3]  # Lightning has made one by then
        second = iter(loader)
        assert next(second).tolist() == [0, 1]
        assert bool(belongings()["children"]) == (num_workers > 0)
    for batches in unbegun, second:
        with pytest.raises(RuntimeError, match="closed"):
            next(batches)
    with pytest.raises(RuntimeError, match="closed"):
        loader.load_state_dict(loader.state_dict())
    assert eventually(lambda: not belongings()["children"])


def test_a_state_that_is_refused_changes_nothing():
    """Not the seed either, which the first epoch draws."""
    state = plain(DataLoader(range(6), 2).state_dict())
    state["state"][0]["loader"]["batches"] = -1
    found = []
    for is_refused in False, True:
        torch.manual_seed(1)
        with DataLoader(torch_helpers.Drawing(6), 2, collate_fn=list) as loader:
            if is_refused:
                with pytest.raises(ValueError, match="the state is damaged"):
                    loader.load_state_dict(state)
            found.append(list(loader))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "number", [np.int64(2), 2.0, torch.tensor(2)], ids=["numpy", "float", "torch"]
)
def test_a_state_of_an_epoch_whose_number_is_of_another_kind(number):
    class Told:
        epoch: Any = 0

        def __iter__(self) -> Any:
            return iter(range(6))

        def set_epoch(self, epoch: Any) -> None:
            self.epoch = epoch

    loader, fresh = (DataLoader(Numbers(), 2, sampler=Told()) for _ in range(2))
    loader.set_epoch(number)
    batches = iter(loader)
    next(batches)
    fresh.load_state_dict(loader.state_dict())
    assert plain(list(fresh)) == plain(list(batches)) != []
    assert fresh.sampler.epoch == number


def test_all_items_so_far_are_compared():
    """Not one of them, which may be the same by chance."""
    loader, other = (
        DataLoader(range(6), None, sampler=order)
        for order in ([0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5])
    )
    list(islice(loader, 3))
    other.load_state_dict(plain(loader.state_dict()))
    with pytest.raises(ValueError, match="the state does not fit"):
        list(other)


def test_states_that_do_not_fit():
    loader = DataLoader(Numbers(), 4, True)
    next(iter(loader))
    state = loader.state_dict()
    known = state["state"][0]
    with pytest.raises(TypeError, match="what state_dict"):
        loader.load_state_dict({})
    with pytest.raises(TypeError, match=r"state_dict\(\) gave, got .* with the key 'data'"):
        loader.load_state_dict({"step": 3, "data": state})
    with pytest.raises(ValueError, match="version 9"):
        loader.load_state_dict(state | {"version": 9})
    start = known["start"]
    short = base64.b85encode(zlib.compress(b"abc")).decode()
    wrong: list[Any] = [
        {"shared": "?"},
        {"shared": short},
        {"own": 5},
        {"said": "x"},
        {"said": [{}]},
    ]
    starts = [None, {}, *(start | each for each in wrong)]
    parts: list[Any] = [known | {"start": each} for each in starts]
    parts += [{"loader": known["loader"]}, known | {"loader": None}, None]
    for damaged in (None, (known, known), *((each,) for each in parts)):
        with pytest.raises(ValueError, match="the state is damaged"):
            loader.load_state_dict(state | {"state": damaged})
    core = Loader(Numbers(), num_workers=0)
    with pytest.raises(ValueError, match=r"of a minloader\.Loader, but this is"):
        loader.load_state_dict(core.state_dict())
    with pytest.raises(ValueError, match=r"of a minloader\.torch\.DataLoader, but this is"):
        core.load_state_dict(state)
    with pytest.raises(ValueError, match=r"this is the state of a BatchSampler, not of a Data"):
        loader.load_state_dict(OurBatchSampler(10, 4).state_dict())
    longer = known | {"loader": known["loader"] | {"length": 9}}
    other = DataLoader(Numbers(), 4)
    other.load_state_dict(state | {"state": (longer,)})
    with pytest.raises(ValueError, match=r"5 batches.*but the state"):
        next(iter(other))
    other = DataLoader(Numbers(), 4, True, generator=torch.Generator())
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"0 generators.*but here are 1"):
        next(iter(other))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_of_the_core(tmp_path):
    """A new loader is the template; the keys are the same before, within and after an epoch."""
    import torch.distributed.checkpoint as dcp

    def make() -> Loader:
        return Loader(Numbers(), batch_size=2, shuffle=True)

    def save(loader: Any, name: str) -> str:
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / name)
        return name

    loader = make()
    names = [save(loader, "new")]
    batches = iter(loader)
    next(batches)
    names.append(save(loader, "within"))
    rest = [list(map(str, batches))]
    names.append(save(loader, "after"))
    rest.append(list(map(str, loader)))
    expected = {"new": 10, "within": rest[0], "after": rest[1]}
    for name in names:
        again = make()
        dcp.load({"loader": again}, checkpoint_id=tmp_path / name)
        given = list(map(str, again))
        assert expected[name] in (given, len(given))
        again.close()
    loader.close()


def test_what_differs_by_rank_has_a_key_of_the_rank(monkeypatch):
    """As the generators do, unless a sampler deals the epoch out."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for options in ({"shuffle": True}, {"dataset": Sharded(3)}):
        loader = DataLoader(**({"dataset": Numbers()} | options))
        state = loader.state_dict()
        assert state.keys() == {"version", "rank1"}
        loader.load_state_dict(state)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        with pytest.raises(ValueError, match=r"the state has \['rank1'\], but none for 'rank0'"):
            loader.load_state_dict(state)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loader = DataLoader(Numbers(), sampler=DistributedSampler(range(20), 2, 1))
    assert loader.state_dict().keys() == {"version", "state"}


# --- subclasses, copies, and arguments of our own


class Again:
    """A sampler that never ends, as subclasses make of theirs."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """Has one iterator for all epochs, and sets its sampler through the back door."""

    def __init__(self, *args: Any, unlock: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        if unlock:  # as timm does
            self._DataLoader__initialized = False
            self.batch_sampler = Again(self.batch_sampler)
            self._DataLoader__initialized = True
        else:  # as Ultralytics does
            object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


@pytest.mark.parametrize("unlock", [False, True])
def test_subclasses_that_never_end_an_epoch(unlock):
    torch.manual_seed(2)
    loader = Endless(Numbers(), 4, shuffle=True, num_workers=1, unlock=unlock)
    epochs = [list(chain(*numbers(loader))) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    loader.reset()
    assert sorted(chain(*numbers(loader))) == list(range(20))
    loader.close()


class Holding(DataLoader[Any]):
    """Has its iterator in a place of its own, within another object."""

    def __iter__(self) -> Any:
        self.__dict__.setdefault("kept", []).append(prefetch(super().__iter__(), list))
        return self.kept[-1]


def take_one(loader: Any) -> None:
    next(iter(loader))


def leave_before_it_begins(loader: Any) -> None:
    list(loader)
    loader.kept = []
    iter(loader)  # the workers are those of the former iterator


def resume(loader: Any) -> None:
    take_one(loader)
    loader.load_state_dict(loader.state_dict())
    take_one(loader)


@pytest.mark.parametrize("use", [take_one, list, leave_before_it_begins, resume])
@pytest.mark.parametrize("make", [partial(Holding, range(9)), partial(Holding, Placed(9))])
def test_a_loader_that_holds_its_iterator_goes_without_the_collector(no_collector, make, use):
    """And its workers with it, as those of torch's loader do."""
    loader = make(batch_size=4, num_workers=1, persistent_workers=True)
    use(loader)
    gone = weakref.ref(loader)
    assert belongings()["children"]
    del loader
    assert gone() is None
    assert eventually(lambda: not belongings()["children"])


@pytest.mark.parametrize("data", [range(9), Placed(9)])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("begins_before", [False, True])
def test_an_iterator_whose_loader_nobody_has(no_collector, data, num_workers, begins_before):
    """It goes on, knows its length and its state, and ends its workers."""
    make = partial(DataLoader, data, 2, num_workers=num_workers)
    expected = list(map(str, make()))
    loader = make()
    batches = prefetch(iter(loader), str)
    begun = [next(batches)] if begins_before else []
    gone = weakref.ref(loader)
    del loader
    assert gone() is None
    begun += [next(batches) for _ in range(2 - len(begun))]
    state = batches.state_dict()
    assert begun + list(batches) == expected
    assert batches.state_dict()["state"][0]["loader"]["epoch"] == 1
    del batches
    assert eventually(lambda: not belongings()["children"])
    other = make()
    other.load_state_dict(state)
    assert list(map(str, other)) == expected[2:]


def test_copies():
    """They have not begun any epoch, whatever the original has."""
    loader = DataLoader(Numbers(), 2)
    first = numbers(loader)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert other.stats.batches == 0
        assert numbers(islice(other, 3)) == first[:3]
    assert numbers(loader) == first


def test_the_epoch_is_told_to_all_who_want_it():
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = DistributedSampler(range(20), 2, 1)
    outer = OurBatchSampler(inner, 2)
    loader = DataLoader(Told(), batch_sampler=outer)
    loader.set_epoch(4)
    assert (inner.epoch, outer.epoch, loader.dataset.epoch) == (4, 4, 4)
    assert DataLoader(Numbers(), 3, sampler=inner).total_batch_size == 6
    assert DataLoader(Numbers(), 3).total_batch_size == 3
    assert DataLoader(Numbers(), batch_size=None).total_batch_size is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arguments_of_our_own(num_workers):
    options: dict[str, Any] = {"num_workers": num_workers, "transform": zoo.doubled}
    with DataLoader(range(5), 2, **options) as loader:
        assert lists(loader) == [[0, 2], [4, 6], [8]]
        assert (loader.retries, loader.worker_memory_limit) == (1, None)
    options = {"num_workers": num_workers, "max_errors": 0, "shared_memory": False}
    with DataLoader(Bad(6, fails=2), 2, **options) as loader:
        batches = iter(loader)
        assert not lies_in_slot(next(batches))
        with pytest.raises(BatchError, match="max_errors=0"):
            next(batches)
        assert loader.stats.memory.slots == 0
    with DataLoader(Numbers(3), None, transform=zoo.skip_all, **options) as loader:
        assert list(loader) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_figures_go_on_with_other_workers(num_workers):
    """Those of a second iterator beside the first, and after an attribute was set."""
    options: dict[str, Any] = {"on_error": "skip", "collate_fn": list}
    with DataLoader(Bad(6, 0), 2, num_workers=num_workers, **options) as loader:
        assert list(zip(loader, loader, strict=True)) == [([2, 3],) * 2, ([4, 5],) * 2]
        assert (loader.stats.batches, loader.stats.errors.failed) == (4, 2)
        loader.retries = 3
        assert len(list(loader)) == 2
        assert (loader.stats.batches, loader.stats.errors.failed) == (6, 3)


def test_numbers_of_numpy():
    with DataLoader(
        Numbers(), 5, num_workers=np.int32(1), timeout=np.float32(30), retries=np.int8(1)
    ) as loader:
        assert len(list(loader)) == 4


def test_too_many_workers():
    with pytest.warns(UserWarning, match="will create 10000 worker processes"):
        DataLoader(Numbers(), num_workers=10_000)


# --- to a device


@pytest.mark.slow
def test_pinning_without_an_accelerator():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    for num_workers in (0, 1):
        loader = DataLoader(Numbers(4), 2, num_workers=num_workers, pin_memory=True)
        with loader, pytest.warns(UserWarning, match="no accelerator"):
            assert numbers(loader) == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_pinning(monkeypatch):
    """Where there is an accelerator; here, of what can pin itself."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for num_workers in (0, 1):
        loader = DataLoader(
            Numbers(8), 2, True, num_workers=num_workers, pin_memory=True, collate_fn=zoo.pinnable
        )
        with loader:
            batches = iter(loader)
            first = next(batches)
            thread = "minloader-prefetch" if num_workers else threading.current_thread().name
            assert first["batch"].where == f"pinned in {thread}"
            assert first["list"] == [1, ("a", 2)]
            rest = [batch["batch"].samples for batch in batches]
            assert sorted(chain(first["batch"].samples, *rest)) == list(range(8))

    def make(**options: Any) -> DataLoader[Any]:
        given = {"num_workers": 1, "pin_memory": True, "collate_fn": zoo.first_numbers}
        return DataLoader(Numbers(12), 2, True, **(given | options))

    with make() as loader, make(num_workers=0) as other:
        batches = iter(loader)
        next(batches)
        other.load_state_dict(plain(loader.state_dict()))
        assert list(other) == list(batches)


def test_a_batch_that_cannot_be_pinned_fails_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    batches = iter(DataLoader(Bad(4), None, pin_memory=True, collate_fn=zoo.Pinned))
    assert next(batches).samples == 0
    monkeypatch.setattr(zoo.Pinned, "pin_memory", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    monkeypatch.undo()
    assert [batch.samples for batch in batches] == [2, 3]


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Box:
    inside: Any
    unset: Any = field(init=False)


class InPlace:
    """A batch that moves itself, and returns nothing."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


class Edge(NamedTuple):
    """Has a ``to`` that is no method."""

    source: Any
    to: Any


def test_arrays_become_tensors_on_the_way_to_a_device():
    frozen = np.ones(2)
    frozen.flags.writeable = False
    numbers = [np.arange(3)[::-1], np.arange(2, dtype=">f4"), frozen, np.array(7)]
    numbers += [np.array([(1, 2.5), (3, 4.5)], [("a", "u1"), ("x", "f4")])["x"]]
    others = [np.array(["a"]), np.ma.masked_equal([1, 2], 2), np.float32(1), 5, "text", None]
    batch = Pair(({"x": numbers},), Box(others))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = to_device([batch], "cpu", convert=True)
    assert type(found) is Pair
    assert type(found.left) is tuple
    for tensor, array in zip(found.left[0]["x"], numbers, strict=True):
        assert_same(tensor, torch.tensor(array.tolist(), dtype=tensor.dtype))
    assert all(here is there for here, there in zip(found.right.inside, others, strict=True))


def test_to_a_device():
    batch = {
        "pair": Pair(torch.ones(2), "text"),
        "list": [torch.zeros(1), (torch.ones(1), 3)],
        "box": Box(torch.ones(3)),
        "array": np.ones(2),
        "own": zoo.Pinned([1]),
        "in place": InPlace(torch.ones(2)),
        "fields": [Edge(1, torch.ones(1)), Edge(1, "text")],
    }
    with to_device([batch, batch], "meta", depth=2) as moved:
        for each in moved:
            assert each["pair"].left.device.type == "meta"
            assert each["pair"].right == "text"
            assert each["list"][1][0].device.type == "meta"
            assert each["box"].inside.device.type == "meta"
            assert each["array"] is batch["array"]
            assert each["own"].where == "meta"
            assert each["in place"].x.device.type == "meta"
            assert each["fields"][0].to.device.type == "meta"
            assert each["fields"][1] == (1, "text")
    assert batch["box"].inside.device.type == "cpu"
    assert batch["list"][0].device.type == "cpu"


def test_a_default_device_that_is_not_the_cpu():
    """It was set in the worker, and here when the epoch had begun."""
    data = [torch.full((3000,), float(n), device="cpu") for n in range(4)]
    options: Any = {"worker_init_fn": lambda number: torch.set_default_device("meta")}
    with DataLoader(data, 2, num_workers=1, **options) as loader:
        batches = iter(loader)
        found = [next(batches)]
        with torch.device("meta"):
            found += batches
    assert [[float(each[0]) for each in batch] for batch in found] == [[0, 1], [2, 3]]


def test_a_sampler_of_batches_in_place_of_one_of_items_is_told():
    with pytest.raises(TypeError) as caught:
        list(DataLoader(list(range(8)), sampler=OurBatchSampler(8, 2)))
    assert "give a sampler of batches as batch_sampler" in caught.value.__notes__[0]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_torch_does_not_find_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device is '{device}', but torch finds no GPU"):
        to_device([], device)
