"""What a hurried user does wrong: each mistake is told, with what to do instead."""

from __future__ import annotations

import bdb
import copy
import inspect
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import in_a_fork, making, printed_by, require
from helpers import Echo, Faulty, Refuses, Squares, StatefulNumbers
from kinds import same
from trouble import exits

from minloader import (
    SKIP,
    BatchError,
    BatchSampler,
    Concatenated,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    PackedBatchSampler,
    WorkerInfo,
    cached,
    collate,
    get_worker_info,
    pad_collate,
    prefetch,
    sliced,
)
from minloader._diagnosis.mistakes import OTHER_NAMES

pytestmark = pytest.mark.usefixtures("quick_starts")


N = 1000


@pytest.fixture(params=["inline", "thread", "process-1"])
def anywhere(request):
    """Makes loaders in this process, in its threads and in another process."""
    with making(request) as make:
        yield make


# --- one iterator in several threads ---------------------------------------------------------


class Numbers:
    """A stream without a state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


@pytest.mark.parametrize("begin", [iter, lambda it: prefetch(it, same)], ids=["iter", "prefetch"])
def test_one_thread_at_a_time_takes_from_an_iterator(begin):
    """As with a generator; others may take turns."""
    is_making, gate = threading.Event(), threading.Event()

    def make(item: int) -> int:
        if item == 1:
            is_making.set()
            gate.wait()
        return item

    with Loader(make, range(4), num_workers=0) as loader:
        batches = begin(loader)
        taken: list[Any] = []
        thread = threading.Thread(target=lambda: taken.extend(islice(batches, 2)))
        thread.start()
        is_making.wait()
        with pytest.raises(ValueError, match="by another thread"):
            next(batches)
        gate.set()
        thread.join()
        assert taken + list(batches) == list(range(4))


class Asking:
    """Takes a batch of a loader while the loader has it make one, or say which is next."""

    batches: Iterator[Any]

    def __getitem__(self, item: int) -> Any:
        return self(item) if item == 1 else item

    def __iter__(self) -> Iterator[Any]:
        for item in range(3):
            yield self[item]

    def __call__(self, item: Any) -> Any:
        return next(self.batches)


@pytest.mark.parametrize(
    ("make", "rest"),
    [
        (lambda asking: Loader(asking, range(3), num_workers=0), [2]),
        (lambda asking: Loader(asking, range(3), num_workers=0).epochs(1), [(0, 2)]),
        (lambda asking: prefetch(Loader(asking, range(3), num_workers=0), same), [2]),
        (lambda asking: Loader(Echo(), asking, num_workers=0), []),  # a generator has ended then
        (lambda asking: Loader(Faulty(3, {1: ValueError}), num_workers=0, on_error=asking), [4]),
    ],
    ids=["dataset", "epochs", "prefetch", "sampler", "on_error"],
)
def test_an_iterator_cannot_be_asked_by_what_it_calls(make, rest):
    asking = Asking()
    asking.batches = batches = iter(make(asking))
    next(batches)
    with pytest.raises(ValueError, match="by what it calls itself"):
        next(batches)
    assert list(batches) == rest


# --- a fork ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("begin", [iter, lambda loader: loader.epochs(2)])
def test_next_in_a_fork_on_the_iterator_of_its_parent(begin, asks):
    with Loader(Echo(), range(40), num_workers=1, prefetch_factor=4) as loader:
        batches = begin(loader)
        first = next(batches)
        # To ask where the parent's consumer is makes the iterator no one of the fork's.
        answer = in_a_fork(lambda: (asks and loader.state_dict(), next(batches)))
        assert answer.startswith("RuntimeError: this iterator was begun in the process of which")
        assert "call iter(loader) in this process" in answer
        assert len([first, *batches]) == 40 * (2 if begin is not iter else 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_next_in_a_fork_where_no_worker_is_needed():
    with Loader(Echo(), range(4), num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        assert in_a_fork(lambda: list(batches)) == "[1, 2, 3]"


# --- sys.exit --------------------------------------------------------------------------------


def test_sys_exit_in_a_dataset_is_the_error_of_its_batch(anywhere):
    batches = iter(anywhere(exits, range(3)))
    assert next(batches) == 0
    with pytest.raises(BatchError, match=r"batch 1 of epoch 0, item 1, .*SystemExit: 3") as caught:
        next(batches)
    assert "raise an error that says what is wrong, in place of sys.exit()" in str(caught.value)
    assert caught.value.__cause__.code == 3
    assert "in exits" in "".join(traceback.format_exception(caught.value))
    assert next(batches) == 2
    loader = anywhere(exits, range(3), on_error="skip")
    assert list(loader) == [0, 2]
    assert loader.stats.errors.skipped == 1


def exits_at_once(*ignored: Any) -> Any:
    sys.exit("no licence")


def test_sys_exit_in_worker_init_fn():
    with Loader(Squares(3), on_error="skip", worker_init_fn=exits_at_once) as loader:
        for _ in range(2):
            with pytest.raises(BatchError, match="in worker_init_fn: SystemExit: no licence"):
                next(iter(loader))


# --- what cannot be sent ---------------------------------------------------------------------


class HoldsFile:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize(("mode", "kind"), [("w", "TextIOWrapper"), ("wb", "BufferedWriter")])
def test_an_open_file_is_refused(mode, kind, tmp_path, monkeypatch):
    """Unless it is the standard output."""
    with open(tmp_path / "output", mode) as file:
        text = rf"dataset\.file is a {kind} \(cannot pickle '.*{kind}' .*\); .* it is first used"
        with pytest.raises(TypeError, match=text):
            Loader(HoldsFile(file), range(3))
        if mode == "w":
            monkeypatch.setattr(sys, "stdout", file)
            with Loader(HoldsFile(file), range(3)) as loader:
                assert list(loader) == [0, 1, 2]


# --- batches that would be silently wrong ----------------------------------------------------


class Rows:
    """Has ``__getitems__``, which gives something else."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 32

    def __getitems__(self, indices: list[int]) -> Any:
        return self.rows


class Frame:
    """A table of three rows and two columns, as libraries have them."""

    columns = ("x", "y")

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.zeros((3, 2))

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.mark.parametrize("name", ["pandas.DataFrame", "polars.DataFrame", "pyarrow.table"])
def test_a_table_is_no_list_of_its_columns(name):
    """A torch loader takes whatever ``__getitems__`` gives, as torch does."""
    library, make = name.split(".")
    rows = Rows(getattr(require(library), make)({"x": [1, 2], "y": [3, 4]}))
    with pytest.raises(TypeError, match="which gives its columns one by one"):
        next(iter(Loader(rows, [[0, 1]], collate_fn=list, num_workers=0)))
    torch_loader = require("minloader.torch").DataLoader
    batch = next(iter(torch_loader(rows, batch_size=2, collate_fn=same)))
    assert batch is rows.rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Rows({"x": [1, 2]}), r"returned one dict with keys \['x'\]; have it return a list of"),
        (Rows(Frame()), "returned a Frame, which gives its columns one by one; have it return"),
    ],
)
def test_transform_gets_no_columns_of_a_batch(rows, message):
    loader = require("minloader.torch").DataLoader(rows, 2, transform=same)
    with pytest.raises(TypeError, match=f"transform is called with each sample, but .*{message}"):
        next(iter(loader))


@pytest.mark.parametrize("make", [list, iter, tuple])
def test_transform_gets_all_that_a_torch_dataset_gives(make):
    """Two views of each sample, say: then it is not known of which index one is."""

    def inverse(view: int) -> float:
        return 1 / view

    views = Rows(make([1, -1, 2, -2]))
    loader = require("minloader.torch").DataLoader(views, 2, transform=inverse, collate_fn=same)
    assert next(iter(loader)) == [1, -1, 0.5, -0.5]
    views = Rows(make([1, -1, 0, -2]))
    options: dict[str, Any] = {"transform": inverse, "on_sample_error": "skip", "collate_fn": same}
    loader = require("minloader.torch").DataLoader(views, 2, **options)
    assert next(iter(loader)) == [1, -1, -0.5]
    assert [sample for *_, sample, _ in loader.stats.errors.last] == [None]


@pytest.mark.parametrize("make", [tuple, iter, np.array, partial(np.array, dtype=object)])
def test_samples_that_are_no_list(make):
    with Loader(Rows(make([3, 4])), [[0, 1]], collate_fn=list, num_workers=0) as loader:
        assert list(loader) == [[3, 4]]


class Gaps:
    """Some samples, or parts of them, are None."""

    def __init__(self, sample: Any, gap: Any) -> None:
        self.sample = sample
        self.gap = gap

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.gap if index in (2, 3) else self.sample


@pytest.mark.parametrize(
    ("dataset", "items", "collate_fn", "error", "message"),
    [
        (Echo(), ["abc"], list, TypeError, "yielded 'abc', but with collate_fn each item must be"),
        (Echo(), [{"a": 1}], list, TypeError, "yielded {'a': 1}, but with collate_fn each item"),
        (
            *(Rows({"x": [1, 2], "y": [3, 4]}), [[0, 1]], list, TypeError),
            r"must return a list with one sample for each index, but returned one dict with keys "
            r"\['x', 'y'\]; .* Loader\(dataset.__getitems__, BatchSampler",
        ),
        (Rows([1, 2, 3]), [range(16)], list, ValueError, "returned 3 for 16 indices"),
        (Rows("ab"), [[0, 1]], list, TypeError, "must return a list .* but returned 'ab'"),
        (Rows(None), [[0, 1]], list, TypeError, "must return a list .* but returned None"),
        (Rows({1, 2}), [[0, 1]], list, TypeError, r"must return a list .* but returned \{1, 2\}"),
        (
            *(Rows(Frame()), [[0, 1]], list, TypeError),
            "returned a Frame, which gives its columns one by one; return a list of its rows; or",
        ),
        (Squares(), [[0, 1]], pad_collate, TypeError, r"write collate_fn=pad_collate\(\), with"),
    ],
)
def test_what_would_be_a_wrong_batch_is_refused(dataset, items, collate_fn, error, message):
    loader = Loader(dataset, items, collate_fn=collate_fn, num_workers=0)
    with pytest.raises(error, match=message):
        next(iter(loader))


class Wrapped:
    """A dataset of a user's around another."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]


IN_A_BATCH = r"(parent|\(pid \d+\))$"  # the note says no more
PAIRS = MixtureSampler([4, 4], [1, 1], batch_size=4)
PIECES = PackedBatchSampler([3] * 8, 2, 2, long="split")
PAIRS_ONE_BY_ONE = MixtureSampler([4, 4], [1, 1], batch_size=None)


@pytest.mark.parametrize(
    ("dataset", "sampler", "collate_fn", "advice"),
    [
        ([[1, 2, 3]] * 8, PIECES, PIECES.collate(), r"give the loader sliced\(dataset\)"),
        (dict[int, Any](), PIECES, list, "give the loader sliced"),
        (Rows(None), PIECES, list, "give the loader sliced"),
        (np.zeros((8, 3)), PIECES, list, "give the loader sliced"),
        (np.arange(8), PAIRS, list, "give the loader Concatenated"),
        (list(range(8)), PAIRS, list, r"give the loader Concatenated\(\[...\]\) of these"),
        (dict.fromkeys(range(8)), PAIRS_ONE_BY_ONE, None, "give the loader Concatenated"),
        (list(range(8)), [[0, 1]], None, "with collate_fn=minloader.collate it gets one index"),
        ({"a": 1, "b": 2}, [[0, 1]], list, r"a dict with the keys \['a', 'b'\]: give one"),
        # What is wrong there is another thing.
        (Concatenated([[1], [2]]), PAIRS, list, IN_A_BATCH),
        (Wrapped(sliced([])), PIECES, list, IN_A_BATCH),
        ([], [[0]], list, IN_A_BATCH),
        (np.arange(3), [[0, 9]], None, IN_A_BATCH),
        (dict[int, int](), [0], None, IN_A_BATCH),
    ],
)
def test_what_was_forgotten_around_a_dataset(anywhere, dataset, sampler, collate_fn, advice):
    loader = anywhere(dataset, sampler, collate_fn=collate_fn)
    with pytest.raises((TypeError, LookupError)) as caught:
        list(loader)
    (note,) = getattr(caught.value, "__notes__", [str(caught.value)])
    assert re.search(advice, note)


@pytest.mark.parametrize(
    ("shape", "sampler", "advice"),
    [
        ((8, 3, 4), PIECES, r"splits its samples; give the loader sliced\(dataset\)"),
        ((8, 3), PAIRS, r"array of 8 samples, .* from 2 datasets; give the loader Concatenated"),
    ],
)
def test_an_array_would_take_parts_for_indices_along_its_axes(shape, sampler, advice):
    with pytest.raises(TypeError, match=advice):
        Loader(np.zeros(shape), sampler)


def test_an_array_may_be_what_a_sampler_draws_from():
    with Loader(np.arange(8).reshape(2, 4), PAIRS, collate_fn=list, num_workers=0) as loader:
        assert sorted(chain.from_iterable(loader)) == list(range(8))


ARRAY = [1.0, 2.0]


@pytest.mark.parametrize(
    ("sample", "gap", "message"),
    [
        (1, None, "sample is None in sample 2 of the 4 of a batch, and in 1 more"),
        ("text", None, "sample is None in sample 2 of the 4"),
        (np.array(ARRAY), None, "sample is None in sample 2 of the 4"),
        ({"x": 1}, None, "sample is None in sample 2 of the 4"),
        ((1, 2), None, "sample is None in sample 2 of the 4"),
        ({"x": 1}, {"x": None}, r"sample\['x'\] is None in sample 2 of the 4"),
        ((1, np.array(ARRAY)), (1, None), r"sample\[1\] is None in sample 2 of the 4"),
        ({"x": None}, {"x": 1}, r"sample\['x'\] is None in sample 0 of the 4 .*, and in 1 more"),
        (None, None, "sample is None in sample 0 of the 4 of a batch, and in 3 more of them"),
    ],
)
@pytest.mark.parametrize("collate_fn", [None, pad_collate()])
def test_none_among_samples_is_named(sample, gap, message, collate_fn):
    loader = Loader(Gaps(sample, gap), batch_size=4, num_workers=0, collate_fn=collate_fn)
    with pytest.raises(TypeError, match=f"collate: {message}"):
        next(iter(loader))


def test_a_part_that_is_missing_in_all_samples_or_in_some_texts():
    samples = [{"label": None, "text": "a"}, {"label": None, "text": None}]
    assert collate(samples) == {"label": [None, None], "text": ["a", None]}


def test_a_dataset_with_getitems_alone(anywhere):
    with_batches = anywhere(ManyAlone(), batch_size=4)
    assert [batch.tolist() for batch in with_batches] == [[0, 1, 4, 9], [16, 25, 36, 49]]
    assert list(anywhere(ManyAlone())) == [n * n for n in range(8)]


class ManyAlone:
    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * index for index in indices]


class OneByOne(ManyAlone):
    __getitems__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> int:
        return index * index


class Untold(list):  # type: ignore[type-arg]
    set_epoch = state_dict = load_state_dict = None


@pytest.mark.parametrize(
    "wrap",
    [lambda each: each, lambda each: Concatenated([each]), partial(cached, bytes=10_000)],
    ids=["itself", "Concatenated", "cached"],
)
def test_what_a_class_sets_to_none_it_has_not(wrap):
    loader = Loader(wrap(OneByOne()), Untold([[1, 2]]), num_workers=0, collate_fn=list)
    assert list(loader) == [[1, 4]]
    assert loader.state_dict()["epoch"] == 1


class Negated:
    """Has samples of its own, and hands on what else it is asked for."""

    def __getitem__(self, index: int) -> list[int]:
        return [-index]

    def __len__(self) -> int:
        return 8

    def __getattr__(self, name: str) -> Any:
        return getattr(ManyAlone(), name)


@pytest.mark.parametrize(
    ("wrap", "item"),
    [
        (lambda each: each, 1),
        (lambda each: Concatenated([each]), 1),
        (partial(cached, bytes=10_000), 1),
        (sliced, (1, 0, 1)),
    ],
    ids=["itself", "Concatenated", "cached", "sliced"],
)
def test_a_wrapper_with_samples_of_its_own_is_not_passed_by(wrap, item):
    loader = Loader(wrap(Negated()), [[item]], num_workers=0, collate_fn=list)
    assert list(loader) == [[[-1]]]


# --- which sample it was ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"dataset": Faulty(64, {37: ValueError})}, {}])
def test_a_failing_sample_is_named(anywhere, options):
    transform = None if options else Refuses(37 * 37)
    arguments = {"dataset": Squares(64), "transform": transform} | options
    loader = anywhere(**arguments, batch_size=16)
    with pytest.raises(ValueError, match="is bad") as caught:
        list(loader)
    (note,) = caught.value.__notes__
    assert "batch 2 of epoch 0, item [32, 33, 34, 35, 36, 37, ...], sample 37, worker" in note

    failures: list[BatchError] = []
    loader = anywhere(**arguments, batch_size=16, on_error=lambda e: [failures.append(e), SKIP][1])
    assert len(list(loader)) == 3
    assert failures[0].sample == 37
    assert "item [32, 33, 34, 35, 36, 37, ...], sample 37, worker" in str(failures[0])


def test_a_failing_sample_of_several_shards_is_named():
    items, options = [[[1, 2], [36, 37]]], {"collate_fn": list, "num_workers": 0}
    loader = Loader(Faulty(64, {37: ValueError}), items, **options)
    with pytest.raises(ValueError, match="is bad") as caught:
        next(iter(loader))
    assert "item [[1, 2], [36, 37]], sample 37, worker" in caught.value.__notes__[0]


class Key:
    """An index of the user's own kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key {self.name}"


def test_a_failing_sample_with_an_index_of_the_users_own_kind(anywhere):
    failures: list[BatchError] = []
    items = [[Key("a"), Key("b")]]
    on_error = lambda e: [failures.append(e), SKIP][1]  # noqa: E731
    with pytest.raises(BatchError, match="nothing is left of epoch 0"):
        list(anywhere(abs, items, collate_fn=list, on_error=on_error))
    assert failures[0].sample.name == "a"
    assert "item [Key a, Key b], sample Key a" in str(failures[0])


@pytest.mark.parametrize(
    ("dataset", "batch_size"), [(Rows(1), 4), (Faulty(4, {0: ValueError}), None)]
)
def test_no_sample_is_named_where_none_is_known(dataset, batch_size):
    with pytest.raises((ValueError, TypeError)) as caught:
        next(iter(Loader(dataset, batch_size=batch_size, num_workers=0)))
    assert ", sample" not in caught.value.__notes__[0]


def test_a_failing_sample_of_a_torch_loader_is_named():
    torch_loader = require("minloader.torch").DataLoader
    with torch_loader(Faulty(64, {37: ValueError}), batch_size=16, num_workers=1) as loader:
        with pytest.raises(ValueError, match="item 37 is bad") as caught:
            list(loader)
        assert ", sample 37, worker 0" in caught.value.__notes__[0]


# --- going on --------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 5, 7, 14, 15])
def test_until_counts_the_epochs_before(taken):
    first, loader = (Loader(Echo(), range(5), num_workers=0) for _ in range(2))
    run = first.epochs(until=3)
    got = [next(run) for _ in range(taken)]
    rest = loader.epochs(until=3)
    loader.load_state_dict(first.state_dict())
    assert got + list(rest) == [(epoch, n) for epoch in range(3) for n in range(5)]
    assert loader.epoch == 3
    assert list(loader.epochs(until=3)) == list(loader.epochs(until=2)) == []


def test_epochs_takes_one_number():
    with Loader(Echo(), range(5), num_workers=0) as loader:
        with pytest.raises(ValueError, match=r"epochs takes n=2 more, or all until=3; drop one"):
            loader.epochs(2, until=3)
        with pytest.raises(ValueError, match=r"until must be at least 0, got -1"):
            loader.epochs(until=-1)


def test_a_stream_that_is_read_again_is_told(anywhere, caplog):
    first = anywhere(Numbers(9))
    batches = iter(first)
    shards = max(1, first.num_workers)
    for _ in range(4 * shards):
        next(batches)
    caplog.clear()  # that its shards are the same
    loader = anywhere(Numbers(9))
    loader.load_state_dict(first.state_dict())
    assert not caplog.messages
    assert len(list(loader)) == 5 * shards
    (message,) = caplog.messages
    passed = f"past {4 * shards} batches in {shards} shard{'s' * (shards > 1)}, before"
    assert message.startswith(f"the stream is read again from its beginning, {passed}")
    assert "state_dict and load_state_dict" in message
    assert loader.stats.errors.reread == 4 * shards
    assert "read again" in str(loader.stats)
    assert len(list(loader)) == 9 * shards
    assert len(caplog.messages) == 1
    assert first.stats.errors.reread == 0


# --- arguments and attributes ----------------------------------------------------------------


def test_every_other_name_is_an_argument_of_torchs():
    theirs = inspect.signature(require("torch").utils.data.DataLoader).parameters
    ours = inspect.signature(Loader).parameters
    assert {*OTHER_NAMES} <= {*theirs} - {*ours}


def numbers() -> Any:
    yield 1


class Unopened:
    """A dataset with a bug in its length."""

    file: Any = None

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> int:
        return index


NO_ARGUMENTS = {
    "batch_sampler": r"give it as sampler, with collate_fn=minloader\.collate",
    "drop_last": r"write last_batch='discard' \(minloader\.torch\.DataLoader has",
    "pin_memory": r"use minloader\.torch\.to_device\(loader, device\), which pins",
    "generator": r"give seed, an int",
    "multiprocessing_context": r"write mp_context",
    "persistent_workers": r"drop it: workers stay until the loader is closed",
    "num_worker": r"did you mean num_workers\?",
    "prefetch": r"did you mean prefetch_factor\?",
    "colour": r"it has num_workers, prefetch_factor, .*, worker_memory_limit",
}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        *(
            ((Squares(),), {name: 2}, rf"Loader has no argument '{name}'; {message}")
            for name, message in NO_ARGUMENTS.items()
        ),
        ((Squares(), 32), {}, r"got 32; for batches of 32 samples, write batch_size=32"),
        ((Squares(), range(9)), {"batch_size": 4}, r"batches of its items give BatchSampler\(samp"),
        ((Squares,), {}, r"sampler is needed: .* no len\(\) .*; give an object of that class"),
        (
            (Unopened(),),
            {},
            r"len\(\) of the dataset, .*, fails: .*'NoneType' has no len",
        ),
        ((numbers,), {}, r"; for a stream give an object with this function as its __iter__"),
        (("train.csv",), {}, r"got the string 'train.csv'; if that is a path, pass an"),
        ((Squares(), "abc"), {}, r"sampler must be an iterable of items, got the string 'abc'"),
        ((Squares(),), {"batch_size": 2, "shuffle": "no"}, r"shuffle must be True or False, got"),
        ((Squares(),), {"in_order": "no"}, r"in_order must be True or False, got 'no'"),
    ],
)
def test_an_argument_that_would_mean_something_else_is_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Loader(*arguments, **options)


class Table(Numbers):
    """A stream that is asked by methods of its own."""

    def times(self, sample: int) -> int:
        return 2 * sample

    def open(self, info: WorkerInfo) -> None:
        assert info.dataset is not self


@pytest.mark.parametrize("num_workers", [0, 2])
def test_methods_of_a_stream_that_workers_copy_are_told(num_workers, caplog):
    """Their object is another one than what the workers read."""
    table = Table(4)
    for options in ({"transform": table.times}, {"worker_init_fn": table.open}, {"transform": abs}):
        caplog.clear()
        Loader(table, num_workers=num_workers, **options).close()
        assert ("is a method of the stream" in caplog.text) == (options != {"transform": abs})


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_state_of_a_stream_is_not_for_one_without(num_workers, on_error):
    """Nor are its batches skipped."""
    with Loader(StatefulNumbers(9), num_workers=num_workers) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(Numbers(9), num_workers=num_workers, on_error=on_error) as loader:
        with pytest.raises(ValueError, match="has no state_dict and load_state_dict"):
            loader.load_state_dict(state)
        assert len(list(loader)) == 9


def test_a_data_frame_is_told_from_a_dataset():
    frame = require("pandas").DataFrame({"x": [1, 2]})
    with Loader(frame, ["x"], num_workers=0) as loader:
        assert [list(column) for column in loader] == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pandas.DataFrame", "give a function of row numbers, such as lambda rows: frame.iloc[row"),
        ("polars.DataFrame", "give a function of row numbers, such as lambda rows: frame[rows], w"),
        ("polars.LazyFrame", "give frame = frame.collect(), and a function of row numbers, such a"),
        ("pyarrow.table", "give a function of row numbers, such as lambda rows: frame.take(rows),"),
    ],
)
def test_each_kind_of_frame_has_its_own_advice(name, advice):
    library, make = name.split(".")
    frame = getattr(require(library), make)({"x": [1, 2]})
    with pytest.raises(TypeError, match=re.escape(advice)):
        Loader(frame, batch_size=2)


def test_a_series_is_not_read_by_labels_of_its_own():
    pandas = require("pandas")
    series = pandas.Series([12, 13, 11], index=[2, 0, 1])
    text = r"items go by its labels, \[2, 0, 1\], not by 0, 1, 2, ...; give series.to_numpy\(\)"
    with pytest.raises(TypeError, match=text):
        Loader(series, batch_size=2)
    for dataset, sampler in (series.reset_index(drop=True), None), (series, [2, 0, 1]):
        with Loader(dataset, sampler, num_workers=0) as loader:
            assert list(loader) == [12, 13, 11]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_worker", 4, r"a Loader has no attribute 'num_worker'; did you mean num_workers\?"),
        ("dataset", 4, r"dataset cannot be set, .* make another Loader with dataset="),
        ("sampler", 4, r"sampler cannot be set"),
        ("batch_size", 4, r"batch_size cannot be set"),
        ("seed", 4, r"seed cannot be set"),
        *(("epoch", epoch, rf"epoch must be .*, got {epoch!r}") for epoch in ("x", 1.5, -1)),
        *(("num_workers", each, "num_workers must be") for each in (-1, 1.5, "2", None, True)),
    ],
)
def test_an_attribute_that_would_do_nothing_cannot_be_set(name, value, message):
    loader = Loader(Squares(5), num_workers=0)
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        setattr(loader, name, value)
    assert len(list(loader)) == 5


def test_attributes_that_may_be_set():
    class Named(Loader):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.batch_size = 5

    for loader in Named(Squares(5), num_workers=0), Loader(Squares(5), num_workers=0):
        loader.epoch, loader.num_workers, loader.remark = 3, 0, "mine"
        next(iter(loader))
        assert loader.epoch == 4
        assert "num_workers=0" in repr(loader)


def test_a_loader_shows_what_it_was_made_with():
    with Loader(range(500), batch_size=32, shuffle=True, num_workers=0) as loader:
        shown = "Loader(dataset=range(0, 500), batch_size=32, shuffle=True, num_workers={})>"
        assert repr(loader) == "<" + shown.format(0)
        loader.num_workers = 1
        assert repr(loader) == "<" + shown.format(1)
    assert repr(loader) == "<closed " + shown.format(1)


# --- what cannot be copied or sent -----------------------------------------------------------


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_and_its_iterators_cannot_be_copied(make_copy):
    with Loader(Squares(5), num_workers=0) as loader:
        for thing in loader, iter(loader), loader.epochs(2):
            with pytest.raises(TypeError, match=r"^a Loader and its iterators cannot be .* copied"):
                make_copy(thing)


CANNOT_SEND = {
    "a loader": (
        "dataset = Holds(Loader(range(3), num_workers=0))",
        "dataset.thing is a Loader (a Loader and its iterators cannot be pickled or copied",
    ),
    "an iterator": (
        "dataset = Holds(iter(Loader(range(3), num_workers=0)))",
        "is a Batches (",
    ),
    "a global": (
        "class Query(Holds):\n    def __getitem__(self, i): return connection.execute('')\n"
        "dataset = Query(1)",
        "dataset.__getitem__ (global variable 'connection') is a Connection (cannot pickle",
    ),
    "a global of a part, in a property": (
        "class Query(Holds):\n    @property\n    def rows(self): return connection.execute('')\n"
        "dataset = Holds([Query(1)])",
        "dataset.thing[0].rows (global variable 'connection') is a Connection (cannot pickle",
    ),
    "an attribute of the class": (
        "class Query(Holds):\n    opened = connection\ndataset = Query(1)",
        "dataset.opened is a Connection (cannot pickle",
    ),
    "a generator": (
        "dataset = (n for n in range(3))",
        "is a generator (cannot pickle 'generator' object); it can be read once, in one place: "
        "give an object whose __iter__ begins anew",
    ),
}


CANNOT_SEND_HEAD = """
import sqlite3
from minloader import Loader
connection = sqlite3.connect(":memory:")
class Holds:
    def __init__(self, thing): self.thing = thing
    def __len__(self): return 3
    def __getitem__(self, index): return index
def told(dataset):
    try:
        Loader(dataset)
    except TypeError as error:
        print(error)
"""


def test_what_cannot_be_sent_is_named():
    """Of a main module: one program has all cases."""
    program = CANNOT_SEND_HEAD
    for code, _ in CANNOT_SEND.values():
        program += f"{code}\ntold(dataset)\n"
    told = printed_by(program).splitlines()
    for case, line in zip(CANNOT_SEND, told, strict=True):
        assert CANNOT_SEND[case][1] in line, case


# --- other errors that did not say what to do ------------------------------------------------


def test_a_list_in_place_of_an_index(anywhere):
    batches = iter(anywhere([1, 2, 3, 4], BatchSampler(4, 2)))
    with pytest.raises(TypeError, match=r"list indices must be integers") as caught:
        next(batches)
    assert "there is no collate_fn; with collate_fn=minloader.collate" in caught.value.__notes__[0]


def stops(index: int) -> int:
    breakpoint()
    return index


def test_breakpoint_in_a_worker():
    text = r"breakpoint\(\) in a worker: .* num_workers=0"
    with Loader(stops, range(3)) as loader, pytest.raises(RuntimeError, match=text):
        next(iter(loader))


def quits(index: int) -> int:
    raise bdb.BdbQuit


def test_a_debugger_that_quits():
    with Loader(quits, range(3)) as loader, pytest.raises(bdb.BdbQuit) as caught:
        next(iter(loader))
    assert "with num_workers=0" in caught.value.__notes__[0]


def test_a_whole_checkpoint_is_told_from_a_state():
    loader = Loader(Squares(5), num_workers=0)
    checkpoint = {"step": 3, "loader": loader.state_dict()}
    text = r"no state of a Loader, but has keys \['step', 'loader'\]; .* the key 'loader'"
    with pytest.raises(ValueError, match=text):
        loader.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match=r"no state of a Loader, but has keys \['step'\]$"):
        loader.load_state_dict({"step": 3})
    loader = Loader(Squares(5), batch_size=2, num_workers=0)
    with pytest.raises(ValueError, match=r"this is the state of a BatchSampler, not of a Loader"):
        loader.load_state_dict(loader.sampler.state_dict())


def test_a_stream_with_fewer_shards_than_workers(caplog):
    text = "the stream has 1 shards, as many as there were workers when it was first begun: 1 of 2"
    with Loader(Numbers(3), num_workers=1) as first:
        first.num_workers = 2
        state = first.state_dict()
    with Loader(Numbers(3), num_workers=2) as loader:
        loader.load_state_dict(state)
    assert [message.startswith(text) for message in caplog.messages] == [True, True]


class Files:
    """A stream of two files, one for a worker."""

    def __iter__(self) -> Any:
        return iter([0, 1][get_worker_info().id :: get_worker_info().num_workers])


def test_shards_without_a_batch_are_told_once(caplog):
    with Loader(Files(), num_workers=3, executor="thread") as loader:
        assert [*loader, *loader] == [0, 1, 0, 1]
    with Loader(Numbers(0), num_workers=3, executor="thread") as loader:
        assert list(loader) == []  # no other number of workers has any
    (message,) = caplog.messages
    assert message.startswith("1 of the 3 shards of the stream gave no batch")


class Drawn:
    """A stream that draws its numbers, others in each shard."""

    def __iter__(self) -> Any:
        return (get_worker_info().rng.random() for _ in range(3))


@pytest.mark.parametrize(
    ("stream", "num_workers", "messages"),
    [(Numbers(9), 3, 1), (Numbers(9), 1, 0), (Files(), 2, 0), (Drawn(), 3, 0)],
)
def test_shards_that_are_the_same_are_told_once(caplog, stream, num_workers, messages):
    with Loader(stream, num_workers=num_workers, executor="thread") as loader:
        for _ in range(2):
            list(loader)
    text = "shards 0 and 1 of the stream begin with the same batch: unless that is chance, each of"
    assert [message.startswith(text) for message in caplog.messages] == [True] * messages


class Rung:
    """A sample within whose comparison a time limit is up, once."""

    rings: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        if self.rings:
            signal.raise_signal(self.rings.pop())
        return Rung, ()


class Rungs:
    """A stream of them, all of it in each shard."""

    def __iter__(self) -> Any:
        return iter([Rung(), Rung()])


def test_a_time_limit_is_not_taken_for_shards_that_cannot_be_compared(caplog):
    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with Loader(Rungs(), num_workers=2, executor="thread") as loader:
            batches = iter(loader)
            Rung.rings.append(signal.SIGALRM)
            with pytest.raises(TimeoutError):
                next(batches)
            assert len(list(batches)) == 4
    finally:
        signal.signal(signal.SIGALRM, former)
    assert len([message for message in caplog.messages if "the same batch" in message]) == 1


def test_what_on_error_gives_is_not_what_a_shard_begins_with(caplog):
    def fails_at_first(number: int) -> int:
        if number < 2:
            raise ValueError(number)
        return number

    options: Any = {"num_workers": 2, "executor": "thread", "on_error": lambda error: -1}
    with Loader(Files(), transform=fails_at_first, **options) as loader:
        assert list(loader).count(-1) == 2
    assert not any("the same batch" in message for message in caplog.messages)


def test_shards_that_are_the_same_are_told_before_a_resume_alone(caplog):
    options: Any = {"num_workers": 2, "executor": "thread"}
    with Loader(Numbers(9), **options) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [0, 0]
        state = loader.state_dict()
    caplog.clear()
    with Loader(Numbers(9), **options) as loader:
        loader.load_state_dict(state)
        assert list(loader) == sorted([*range(1, 9)] * 2)
    assert not any("the same batch" in message for message in caplog.messages)


class OfThisRank:
    """A sampler of the user's, of which nobody knows what it deals out."""

    def __iter__(self) -> Any:
        return iter([1, 3])


def of_torch(**options: Any) -> Any:
    return require("minloader.torch").DataLoader(range(8), **options)


def dealt_by_torch() -> Any:
    return require("torch.utils.data").DistributedSampler(range(8), 2, 1)


UNDEALT = {
    "indices": lambda: Loader(range(8), num_workers=0),
    "shuffled": lambda: Loader(range(8), batch_size=2, shuffle=True, num_workers=0),
    "sampler": lambda: Loader(Echo(), BatchSampler(8, 2), num_workers=0),
    "two samplers": lambda: Loader(Echo(), BatchSampler(BatchSampler(8, None), 2), num_workers=0),
    "thread": lambda: Loader(range(8), executor="thread"),
    "torch": of_torch,
    "torch, shuffled": lambda: of_torch(batch_size=2, shuffle=True),
}
"""Loaders whose ranks all get the same."""

DEALT = {
    "by ours": lambda: Loader(Echo(), BatchSampler(8, 2, rank=1, world_size=2), num_workers=0),
    "below ours": lambda: Loader(
        Echo(), BatchSampler(BatchSampler(8, None, rank=1, world_size=2), 2), num_workers=0
    ),
    "a list": lambda: Loader(range(8), [1, 3], num_workers=0),
    "by the user": lambda: Loader(range(8), OfThisRank(), num_workers=0),
    "a stream": lambda: Loader(Numbers(8), num_workers=0),
    "by torch": lambda: of_torch(sampler=dealt_by_torch()),
    "by torch, in ours": lambda: Loader(Echo(), BatchSampler(dealt_by_torch(), 2), num_workers=0),
    "torch, by the user": lambda: of_torch(sampler=OfThisRank()),
}
"""Loaders whose ranks may get others each."""


@pytest.fixture(params=["variables", "torch"])
def two_ranks(request, monkeypatch):
    """Has this process be one of two."""
    if request.param == "variables":
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        return
    distributed = require("torch.distributed")
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda *group: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda *group: 2)


@pytest.mark.parametrize("kind", UNDEALT)
def test_ranks_that_get_the_same_batches_are_told_once(kind, two_ranks, caplog):
    for _ in range(2):
        loader = UNDEALT[kind]()
        assert list(loader)
        assert list(loader)
        loader.close()
    (said,) = caplog.messages
    assert said.startswith("there are 2 ranks, but no sampler deals the epoch out to them")


@pytest.mark.parametrize("kind", DEALT)
def test_nothing_is_said_of_ranks_where_they_may_have_their_parts(kind, two_ranks, caplog):
    with DEALT[kind]() as loader:
        assert list(loader)
    assert caplog.messages == []


def test_nothing_is_said_of_ranks_where_accelerate_reads(two_ranks, caplog):
    """With dispatch_batches one rank reads for all of them; here its module is what asks."""
    names = {"__name__": "accelerate.data_loader", "loader": of_torch(batch_size=2)}
    assert len(eval("list(loader)", names)) == 4
    assert caplog.messages == []


def test_nothing_is_said_of_ranks_where_there_is_one(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert list(Loader(range(2), num_workers=0)) == [0, 1]
    assert caplog.messages == []


def test_what_is_said_of_ranks_can_be_silenced(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    caplog.set_level("ERROR", "minloader.ranks")
    assert list(Loader(range(2), num_workers=0)) == [0, 1]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("steps", "epochs", "said"),
    [
        (lambda loader: None, [0, 1, 2], 0),
        (lambda loader: next(iter(loader)), [1, 2], 1),
        (lambda loader: next(loader.epochs(until=3)), [1, 2], 1),
        (list, [1, 2], 0),
        (lambda loader: list(islice(loader, 2)), [1, 2], 1),
        (lambda loader: list(islice(loader, 3)), [1, 2], 0),  # though nobody asked for the end
        (lambda loader: (next(iter(loader)), loader.set_epoch(0)), [0, 1, 2], 0),
        (lambda loader: (next(iter(loader)), resume(loader)), [0, 1, 2], 0),
    ],
)
def test_an_epoch_that_was_begun_for_a_look_is_told(caplog, steps, epochs, said):
    with Loader(range(6), batch_size=2, num_workers=0) as loader:
        steps(loader)
        assert sorted({epoch for epoch, _ in loader.epochs(until=3)}) == epochs
        list(loader.epochs(1))
    lines = [line for line in caplog.messages if "begins with epoch 1, since epoch 0 was" in line]
    assert len(lines) == said


def resume(loader: Loader[Any]) -> None:
    loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("DataLoader", "torch, with torch's arguments"),
        ("to_device", "torch, or from minloader.jax"),
        ("check_reproducible", "testing"),
        ("as_in_worker", "testing"),
    ],
)
def test_a_look_for_what_is_elsewhere_says_where(name, where):
    with pytest.raises(ImportError, match=f"^{name} is to be had from minloader.{where}$"):
        exec(f"from minloader import {name}")


def test_an_init_function_that_expects_a_number_is_told_what_it_gets(anywhere):
    loader = anywhere(range(3), worker_init_fn=lambda worker_id: 7 + worker_id)
    with pytest.raises(TypeError) as caught:
        list(loader)
    assert "worker_init_fn gets a WorkerInfo, whose id is" in caught.value.__notes__[0]


class Broken:
    """A stream with an error of a type that datasets raise for items of another kind."""

    def __iter__(self) -> Iterator[int]:
        raise TypeError("no number")


def test_an_error_of_a_stream_has_no_advice_on_items_of_samplers(anywhere):
    with pytest.raises(TypeError, match="no number") as caught:
        list(anywhere(Broken()))
    assert "Concatenated" not in caught.value.__notes__[0]


def test_an_empty_dataset_is_told(caplog):
    with Loader([], batch_size=2, num_workers=0) as loader:
        assert list(loader) == []
    assert caplog.messages == ["the dataset, [], has no samples"]


def lengths_of(n: int) -> DynamicBatchSampler:
    return DynamicBatchSampler([1] * n, max_total=5)


class Unsized:
    """Its length cannot be told."""

    def __getitem__(self, index: Any) -> Any:
        return index

    def __len__(self) -> int:
        raise NotImplementedError


PARTS = Concatenated([range(5), range(5)])

LENGTHS: dict[str, tuple[Any, Any, bool]] = {
    "of some": (range(20), lengths_of(10), True),
    "of some, packed": (range(20), PackedBatchSampler([1] * 10, 5), True),
    "of some, of rows": (range(20), DynamicBatchSampler(len, 5, sampler=lengths_of(10)), True),
    "of all": (range(20), lengths_of(20), False),
    "of those that come": (abs, lengths_of(10), False),
    "of nobody knows how many": (Unsized(), lengths_of(10), False),
    "of each part": (
        PARTS,
        DynamicBatchSampler(
            lambda item: len(item[1]), 5, sampler=MixtureSampler([lengths_of(5)] * 2, [1, 1])
        ),
        False,
    ),
    "of none": (range(20), BatchSampler(10, 2), False),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_of_some_samples_are_told(case, caplog):
    dataset, sampler, is_told = LENGTHS[case]
    iter(Loader(dataset, sampler, num_workers=0))
    said = [line for line in caplog.messages if "the sampler has the lengths of" in line]
    assert len(said) == is_told


@pytest.mark.parametrize("n", [10, 20])
def test_lengths_of_some_samples_are_told_in_the_drop_in(n, caplog):
    loader = require("minloader.torch").DataLoader(range(20), batch_sampler=lengths_of(n))
    assert sum(map(len, loader)) == n
    said = [line for line in caplog.messages if "the sampler has the lengths of" in line]
    assert len(said) == (n < 20)


@pytest.mark.parametrize("epochs", [iter, lambda loader: (b for _, b in loader.epochs(1))])
def test_the_epoch_of_the_loop_that_is_set_again_is_told(epochs, anywhere, caplog):
    loader = anywhere(abs, range(3))
    batches = epochs(loader)
    next(batches)
    loader.set_epoch(1)  # it would come next anyway
    assert caplog.messages == []
    loader.set_epoch(0)
    (said,) = caplog.messages
    assert "the next epoch is 0 once more; unless that is meant, call it before" in said
    assert list(batches) == [1, 2]


def test_an_epoch_that_is_begun_again_on_purpose_is_not_told(caplog):
    loader = Loader(abs, range(3), num_workers=0)
    assert next(iter(loader)) == 0
    loader.set_epoch(0)
    assert list(loader) == [0, 1, 2]
    loader.set_epoch(0)
    assert caplog.messages == []


def test_a_sampler_that_a_loader_reads_is_not_asked_for_its_state(anywhere, caplog):
    sampler = BatchSampler(100, 2)  # more than are read ahead
    batches = iter(anywhere(list, sampler))
    next(batches)
    sampler.state_dict()
    (said,) = caplog.messages
    assert "save loader.state_dict(), which has the state of the sampler" in said


class Asked(BatchSampler):
    """The user's own, whose state has more."""

    def state_dict(self) -> Any:
        return super().state_dict() | {"mine": 1}


@pytest.mark.parametrize("sampler", [BatchSampler(6, 2), Asked(6, 2)], ids=["ours", "theirs"])
def test_nobody_is_told_of_a_state_that_the_loader_asks_for(sampler, caplog):
    loader = Loader(list, sampler, num_workers=0)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[0])
    assert list(loader) == [[2, 3], [4, 5]]
    sampler.state_dict()  # between epochs it is true
    assert caplog.messages == []


@pytest.mark.parametrize(("n", "said"), [(8, 0), (20, 1)])
def test_a_state_of_fewer_samples_is_told(n, said, caplog):
    former = Loader(range(8), batch_size=4, num_workers=0)
    next(iter(former))
    loader = Loader(range(n), batch_size=4, num_workers=0)
    loader.load_state_dict(former.state_dict())
    assert len(list(loader)) == 1
    lines = [line for line in caplog.messages if "the state is of an epoch with 8" in line]
    assert len(lines) == said


def test_an_inner_sampler_of_batches_is_told():
    sampler = DynamicBatchSampler([3] * 4, max_total=6, sampler=[[0, 1], [2, 3]])
    with pytest.raises(TypeError) as caught:
        list(sampler)
    assert (
        "if that is a batch, give an inner sampler that gives single" in caught.value.__notes__[0]
    )


def test_ranks_within_the_same_ranks_are_told(two_ranks, caplog):
    ranks = {"rank": 1, "world_size": 2}
    inner = BatchSampler(16, None, **ranks)
    sampler = BatchSampler(inner, 2, **ranks)
    with Loader(range(16), sampler, collate_fn=list, num_workers=0) as loader:
        assert len(list(loader)) == 2
        list(loader)
    (said,) = caplog.messages
    assert said.startswith("two samplers, one within the other, have rank=1 and world_size=2")


def test_a_loader_is_shown_as_its_stats():
    with Loader(range(3), num_workers=0) as loader:
        list(loader)
        assert loader._repr_html_() == loader.stats._repr_html_()


class AsLaunched:
    """A sampler, or a stream, that asks its launcher which part is its own."""

    def __init__(self, short: int = 0) -> None:
        self.short = short

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        return iter(range(rank, 16 if rank == 0 else 16 - self.short, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Echo(), AsLaunched()), ValueError, r"rank\? Here is rank 1 of 2"),
        ((Echo(), AsLaunched(short=12)), ValueError, r"ended after 2; .* Here is rank 1 of 2"),
        ((AsLaunched(),), RuntimeError, "or is the state that of another rank"),
    ],
)
def test_a_state_of_another_rank_is_told(monkeypatch, arguments, error, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with Loader(*arguments, num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
    monkeypatch.setenv("RANK", "1")
    with Loader(*arguments, num_workers=0) as loader:
        loader.load_state_dict(state)
        with pytest.raises(error, match=message):
            next(iter(loader))
