"""Errors that cross from worker to parent, and arguments that make no sense."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import alive, eventually, in_a_fork, losses, making, outcomes, workers
from helpers import Lazily, Numbers, Squares, TwoArguments
from interrupts import TimeLimit, interrupted
from trouble import (
    FailsToLoad,
    Frozen,
    ignore_sigterm,
    loads_badly,
    raise_deep,
    raise_frozen,
    raise_hopeless,
    raise_locked,
    raise_two,
    raise_unprintable,
    unpicklable,
)

from minloader import (
    BatchError,
    BatchSampler,
    Loader,
    SharedList,
    TransportError,
    WorkerDied,
    collate,
    concurrent,
    pack_collate,
    pad_collate,
)
from minloader._diagnosis.inspect import inspect
from minloader._diagnosis.verdict import format_seconds
from minloader._errors import PACKAGE, breaks_in
from minloader._formats import format_bytes
from minloader._memory.cache import pack_entry
from minloader._worker.environment import InlineEnvironment

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.fixture(params=["process-1", "foreign-process"])
def across(request):
    """Makes loaders whose batches are made in another process."""
    with making(request) as make:

        def across(function: Any, items: Any = range(3), **options: Any) -> Loader:
            return make(function, items, **({"num_workers": 1} | options))

        yield across


# --- exceptions on their way back ------------------------------------------------------------

PLACE = {"ordinal": 1, "epoch": 0, "item": 1}


@pytest.mark.parametrize(
    ("function", "error", "message", "attributes", "told"),
    [
        (raise_deep, ValueError, "deep down", {}, "in innermost_function"),
        (raise_two, TwoArguments, "7: seven", {"code": 7, "reason": "seven"}, ""),
        (raise_locked, RuntimeError, r"has a lock.*_thread.lock", {"hint": "kept"}, ""),
        (raise_frozen, Frozen, None, {"code": 5}, ""),
        (raise_hopeless, BatchError, "Hopeless: cannot travel", PLACE, "raise_hopeless"),
        (unpicklable, TransportError, r"batch\['x'\]\[1\] is a lock", PLACE, ""),
        (loads_badly, ZeroDivisionError, "while unp", {}, "when the batch was unpickled"),
    ],
)
def test_an_error_arrives_as_it_was_raised(across, function, error, message, attributes, told):
    """With the worker's traceback, and all of it that can travel."""
    batches = iter(across(function))
    assert next(batches) == 0
    with pytest.raises(error, match=message) as caught:
        next(batches)
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert not hasattr(caught.value, "lock")
    text = "".join(traceback.format_exception(caught.value))
    assert told in text
    if error is ValueError:
        assert f"pid {caught.value.__notes__[0].split('pid ')[1].split(')')[0]}" in text
    assert next(batches) == 2


def test_an_error_that_refuses_attributes_is_raised_here():
    with Loader(raise_frozen, range(3), num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(Frozen) as caught:
            next(batches)
        assert caught.value.code == 5
        assert next(batches) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_that_cannot_be_printed_is_raised(num_workers):
    with Loader(raise_unprintable, range(3), num_workers=num_workers) as loader:
        batches = iter(loader)
        assert next(batches) == 0
        with pytest.raises(SyntaxError) as caught:
            next(batches)
        assert "batch 1 of epoch 0" in caught.value.__notes__[0]
        assert next(batches) == 2
        ((*_, text),) = loader.stats.errors.last
        assert "SyntaxError: " in text  # more on CPythons that can print it


# --- batches that cannot be pickled ----------------------------------------------------------


def test_unpicklable_items_are_the_error_of_their_batch(across):
    batches = iter(across(str, [1, threading.Lock(), 3]))
    assert next(batches) == "1"
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'") as caught:
        next(batches)
    assert "when it was sent to a worker" in caught.value.__notes__[0]
    assert next(batches) == "3"
    assert list(across(str, [1, threading.Lock(), 3], on_error="skip")) == ["1", "3"]


# --- the dataset itself ----------------------------------------------------------------------


class HoldsLock:
    def __init__(self) -> None:
        self.files = [None, {"handle": threading.Lock()}]

    def __getitem__(self, item: int) -> int:
        return item


DEEP: Any = threading.Lock()
for _ in range(40):
    DEEP = {1: DEEP}


class HoldsClient(HoldsLock):
    def __init__(self) -> None:
        self.client = DEEP


def closure_over(lock: Any) -> Any:
    return lambda samples: (samples, lock)[0]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"dataset": HoldsLock()}, r"dataset\.files\[1\]\['handle'\] is a lock"),
        (
            {"dataset": HoldsClient()},
            r"what dataset\.client \(a dict\) has deep inside, at \.\.\.[][1]{40}, is a lock",
        ),
        ({"dataset": DEEP}, r"what dataset \(a dict\) has deep inside, at \.\.\.[][1]{40}, is a "),
        (
            {"dataset": Squares(), "transform": HoldsLock().__getitem__},
            r"transform.*\.files\[1\]\['handle'\]",
        ),
        (
            {"dataset": Squares(), "collate_fn": closure_over(threading.Lock())},
            r"collate_fn \(closure variable 'lock'\) is a lock",
        ),
    ],
)
def test_what_cannot_be_serialized_is_refused_at_once(arguments, culprit):
    with pytest.raises(TypeError, match=culprit) as caught:
        Loader(**arguments, sampler=[1])
    assert "executor='thread'" in str(caught.value)
    assert caught.value.__cause__ is not None
    item = [1] if "collate_fn" in arguments else 1
    with Loader(**arguments, sampler=[item], executor="thread") as loader:
        next(iter(loader))


def test_a_dataset_that_fails_to_load(across):
    batches = iter(across(FailsToLoad(), on_error="skip"))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="database is down") as caught:
            next(batches)
    text = "".join(traceback.format_exception(caught.value))
    assert "__setstate__" in text
    assert "loaded the dataset" in text


# --- a worker that dies ----------------------------------------------------------------------


def test_a_death_while_futures_are_cancelled_leaves_the_pool_usable():
    """On CPython 3.11 the executor's manager died of cancelled futures, and nothing went on."""
    with Loader(Squares(1000, delay=0.2), num_workers=1, prefetch_factor=16) as loader:
        batches = iter(loader)
        next(batches)
        (process,) = workers(loader)
        os.kill(process.pid, signal.SIGSTOP)  # nothing is taken from the queue meanwhile
        del batches  # cancels what is queued
        os.kill(process.pid, signal.SIGKILL)
        other = Loader(Squares(3), num_workers=1)
        assert list(other) == [0, 1, 4]
        other.close()
        assert next(iter(loader)) == 0


@pytest.mark.parametrize("end", ["go on", "close"])
def test_a_death_beside_a_worker_that_ignores_sigterm(end):
    """From CPython 3.12 the executor waits for it, and holds the lock that shutdown() needs."""
    options = {"num_workers": 2, "worker_init_fn": ignore_sigterm}
    with Loader(Squares(200, delay=0.01), **options) as loader:
        loader.start()
        victim, other = workers(loader)
        (orphan,) = eventually(psutil.Process(victim.pid).children)
        (child,) = eventually(psutil.Process(other.pid).children)
        batches = iter(loader)
        got = [next(batches) for _ in range(20)]
        os.kill(victim.pid, signal.SIGKILL)
        if end == "close":
            assert eventually(lambda: losses(loader))
            loader.close()
        else:
            assert got + list(batches) == [i * i for i in range(200)]
        assert eventually(lambda: not alive(other.pid))
        assert eventually(lambda: not alive(child.pid))
        assert eventually(lambda: not alive(orphan.pid))  # in a session of its own


def test_foreign_executor_that_is_shut_down_is_named():
    with ThreadPoolExecutor(1) as pool, Loader(abs, Lazily(range(4)), executor=pool) as loader:
        batches = iter(loader)
        assert next(batches) == 0
        tickets = [task.ticket for task in batches.epoch.lanes[0].tasks]  # type: ignore[attr-defined]
        sent = [each for each in tickets if each is not None]  # the others have come back
        assert eventually(lambda: all(each.is_done or each.future for each in sent))
        pool.shutdown()
        assert [next(batches), next(batches)] == [1, 2]  # were under way
        with pytest.raises(RuntimeError, match="cannot schedule new futures") as caught:
            next(batches)
        assert "when it was sent to a worker" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_foreign_executor_in_a_fork_is_refused():
    with ThreadPoolExecutor(1) as pool, Loader(abs, range(4), executor=pool) as loader:
        assert list(loader) == [0, 1, 2, 3]
        assert "of which this one is a fork" in in_a_fork(lambda: list(loader))


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
        ({"num_workers": 2**70}, ValueError, "num_workers must be at most 10000, got 1180591620"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an int, got 1.5"),
        ({"num_workers": True}, TypeError, "num_workers must be an int, got True"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1"),
        ({"seed": -3}, ValueError, "seed must be at least 0, got -3"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise', 'skip' or a callable"),
        ({"executor": "gpu"}, ValueError, "executor must be .* got 'gpu'"),
        ({"mp_context": "spoon"}, ValueError, "mp_context must be .*'spawn'.* got 'spoon'"),
        ({"mp_context": 3}, TypeError, "mp_context must be"),
        (
            {"mp_context": "spawn", "executor": "thread"},
            ValueError,
            "mp_context='spawn' is for executor='process' alone",
        ),
        ({"transform": 3}, TypeError, "transform must be callable or None, got 3"),
        ({"collate_fn": []}, TypeError, r"collate_fn must be callable or None, got \[\]"),
        ({"worker_init_fn": "x"}, TypeError, "worker_init_fn must be callable"),
        ({"batch_size": 0, "sampler": None}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 4}, ValueError, "batch_size=4 cannot be combined with a sampler"),
        ({"shuffle": True}, ValueError, "shuffle=True cannot be combined"),
        ({"last_batch": "discard"}, ValueError, "last_batch='discard' cannot be combined"),
        (
            {"last_batch": "drop", "batch_size": 2, "sampler": None},
            ValueError,
            "last_batch must be 'keep', 'discard' or 'rollover', got 'drop'",
        ),
        (
            {"last_batch": "discard", "sampler": None},
            ValueError,
            "last_batch='discard' needs a batch_size",
        ),
        ({"sampler": 3}, TypeError, "sampler must be iterable or None, got 3"),
        ({"dataset": 3}, TypeError, "dataset must have __getitem__ or __iter__, or be callable"),
        ({"dataset": iter([])}, TypeError, "dataset is a stream, .* it takes no sampler; drop"),
        ({"dataset": len, "sampler": None}, TypeError, r"sampler is needed.*no len\(\)"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Loader(**({"dataset": Squares(), "sampler": [1]} | options))


@pytest.mark.parametrize("timeout", [np.int64(60), np.float32(60)])
def test_numpy_numbers_are_numbers(timeout):
    options = {"batch_size": np.int64(2), "num_workers": np.int32(0), "seed": np.uint8(3)}
    loader = Loader(Squares(5), timeout=timeout, **options)
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 9], [16]]


def test_numpy_integers_are_taken_for_integers():
    """Of a few bits, they would overflow."""
    with Loader(range(4), num_workers=0) as loader:
        assert list(loader.epochs(np.uint64(0))) == []
        assert list(loader.epochs(until=np.uint64(0))) == []
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": np.int8(100)}
    with Loader(range(4), executor="thread", **options) as loader:
        assert inspect(loader).group.max_in_flight == 200
    with Loader(Numbers(8), batch_size=np.int64(4), num_workers=0) as loader:
        json.dumps(loader.state_dict())
    assert pad_collate(multiple_of=np.uint8(8))([np.ones(300)]).values.shape == (1, 304)
    rows = pack_collate(np.int16(20_000), rows=np.int8(3))  # type: ignore[arg-type]
    assert rows([np.ones(15_000)] * 3).values.shape == (3, 20_000)


def test_many_epochs_without_a_batch():
    for num_workers in (0, 1):
        with Loader(range(5), [], num_workers=num_workers, executor="thread") as loader:
            assert list(loader.epochs(1500)) == []


def test_an_error_of_a_loader_that_the_dataset_reads_is_named_by_its_own_batch():
    class Reading:
        def __getitem__(self, number: int) -> Any:
            raise BatchError("the inner one", ordinal=5, epoch=3)

    reports: list[BatchError] = []
    with Loader(Reading(), [7], num_workers=0, on_error=reports.append) as loader:
        list(loader)
    (report,) = reports
    assert "batch 0 of epoch 0, item 7" in str(report)
    assert (report.ordinal, report.epoch, report.item) == (0, 0, 7)
    cause: Any = report.__cause__
    assert (cause.ordinal, cause.epoch, cause.item) == (5, 3, None)


def test_errors_survive_pickling():
    error = WorkerDied("gone", exitcode=-9, ordinal=3, item=[1], epoch=2, worker=1, pid=5)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (WorkerDied, "gone", vars(error))


def test_skip_survives_pickling():
    from minloader import SKIP

    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
    assert repr(SKIP) == "minloader.SKIP"


def test_broken_repr_does_not_hide_the_error():
    class BadRepr:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    batches = iter(Loader(int, [BadRepr()], num_workers=0))
    with pytest.raises(TypeError, match="int"):
        next(batches)


def test_spans_and_amounts_in_words():
    spans = {0: "0 µs", 3e-7: "0.3 µs", 0.0203: "20.3 ms", 0.9996: "1 s", 999.7: "1,000 s"}
    assert [format_seconds(seconds) for seconds in spans] == list(spans.values())
    amounts = {0: "0 bytes", 1500: "1.5 kB", 999_900: "1 MB", 2.43e7: "24.3 MB", 5e12: "5,000 GB"}
    assert [format_bytes(count) for count in amounts] == list(amounts.values())


@pytest.mark.parametrize("own", [True, False], ids=["ours", "the user's"])
@pytest.mark.parametrize("concurrently", [True, False])
def test_errors_that_are_no_exceptions_come_once_from_threads(own, concurrently):
    def fail(index: int) -> int:
        if index == 3:
            raise asyncio.CancelledError("of the dataset")
        return index

    class Failing:
        def __getitem__(self, index: int) -> int:
            return fail(index)

    dataset = concurrent(Failing(), 2) if concurrently else Failing()
    with ThreadPoolExecutor(2) as threads:
        options: Any = {"executor": "thread" if own else threads, "num_workers": 2}
        with Loader(dataset, range(6), **options) as loader:
            got = outcomes(iter(loader), 9)
    assert got.pop(3).args[0].endswith("CancelledError: of the dataset")
    assert got == [0, 1, 2, 4, 5]


def _length_of_epochs() -> int:
    with Loader(range(9), BatchSampler(9, 2), num_workers=0) as loader:
        return len(loader.epochs(3))  # type: ignore[arg-type]


RAGGED = [{"x": np.arange(2), "y": 0}, {"x": np.arange(3), "y": 1}]

CALLS: list[Any] = [
    partial(pack_entry, "a", 0),
    partial(SharedList, ["a"]),
    _length_of_epochs,
    partial(collate, [{"x": np.arange(2), "y": 0}] * 2),
    partial(pad_collate(axis=0), RAGGED),
    partial(pack_collate(), RAGGED),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_time_limit_is_not_taken_for_an_error_of_what_is_packed_or_stacked(call):
    """Another way would be tried then, or another error be raised."""
    for place in itertools.count():
        outcome = interrupted(call, place, raises=TimeLimit)
        assert outcome.reached == outcome.interrupted, outcome.where
        if not outcome.reached:
            break
    assert place > 9


@pytest.mark.parametrize(("folder", "is_ours"), [(PACKAGE, True), (f"{PACKAGE}_of_mine", False)])
def test_a_time_limit_takes_the_place_of_a_batch_in_the_users_code_alone(folder, is_ours):
    """Without workers; also where the user's folder begins as ours does."""
    code = compile("def load(): signal.raise_signal(signal.SIGALRM)", f"{folder}/data.py", "exec")
    names: dict[str, Any] = {"signal": signal}
    exec(code, names)

    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(TimeoutError) as raised:
            names["load"]()
        assert breaks_in(raised.value)
        assert InlineEnvironment(is_stream=False).ends_program(raised.value) == is_ours
    finally:
        signal.signal(signal.SIGALRM, former)
