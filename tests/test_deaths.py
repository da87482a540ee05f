"""Workers die in every way there is, hang, leak and are replaced, and the epoch goes on."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from inspect import getsourcelines
from multiprocessing import active_children, forkserver, get_context, popen_spawn_posix, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import trouble
from conftest import (
    alive,
    dead_at_once,
    eventually,
    have_come,
    losses,
    outcomes,
    python,
    slots_of,
    variants,
    workers,
)
from helpers import Echo, Gate, Numbers, Squares
from trouble import (
    Noisy,
    Scripted,
    Springs,
    SpringsAtStart,
    SpringsMany,
    SpringsWhenLoaded,
    Trap,
    TrapError,
    Zoo,
)

import minloader
from minloader import BatchError, BatchTimeout, Loader, TransportError, WorkerDied, concurrent
from minloader._diagnosis.inspect import inspect
from minloader._pools import cpython
from minloader._pools import processes as spawned

pytestmark = pytest.mark.usefixtures("quick_starts")

SPAWN = get_context("spawn")
"""For what is told of workers that start in this way."""

HANG = 4.0
"""Seconds after which a batch is taken to hang: far more than one takes on a busy machine."""


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def written(path: Path) -> list[str]:
    """Its lines, [] if there is no such file yet."""
    return lines(path) if path.exists() else []


# --- the zoo: every way to fail ends in an error in its place, or in a complete epoch -----------

DIES = "a worker .* died while it made batch 2 of epoch 0, item .*: "
BY = {
    number: rf"{DIES}killed by signal {int(number)} \({number.name}\)" for number in signal.Signals
}
EXIT, SEGV, KILL = DIES + "exit code 7", BY[signal.SIGSEGV], BY[signal.SIGKILL]
EITHER = f"{DIES}(exit code 1|killed by signal 9)"  # it fails to answer, or is found before
FINE = None

EXITS, SEGVS = (os._exit, 7), (trouble.sends_itself, signal.SIGSEGV)
IN_THREAD = trouble.in_thread
FORKS = trouble.forks


def raising(cls: type[BaseException], *arguments: Any) -> tuple[Any, ...]:
    return trouble.raises, cls, *arguments


ZOO: dict[str, tuple[Any, ...]] = {
    # what raises
    "raise": (raising(OSError, "ouch"), OSError, "ouch"),
    "raise StopIteration": (raising(StopIteration, "s"), BatchError, "StopIteration: s"),
    "raise GeneratorExit": (raising(GeneratorExit, "g"), BatchError, "GeneratorExit: g"),
    "raise KeyboardInterrupt": (
        raising(KeyboardInterrupt, "k"),
        BatchError,
        "KeyboardInterrupt: k",
    ),
    "raise CancelledError": (raising(CancelledError, "c"), BatchError, "CancelledError: c"),
    "raise what has no words": (raising(trouble.Speechless), trouble.Speechless, None),
    "raise what fails to unpickle": (
        raising(trouble.Demanding, 5, "r"),
        BatchError,
        "Demanding: 5",
    ),
    "sys.exit": ((sys.exit, 3), BatchError, "SystemExit: 3"),
    "sys.exit in a thread": ((IN_THREAD, sys.exit, 3), FINE),
    "raise in a thread": ((IN_THREAD, trouble.raises, OSError("aside")), FINE),
    "too deep a recursion": ((trouble.recurses,), RecursionError, "maximum recursion"),
    "too much memory": ((bytearray, 1 << 50), MemoryError, None),
    "too deep a batch": ((trouble.nests,), TransportError, "cannot be sent to the parent"),
    # what dies
    "exit": (EXITS, WorkerDied, EXIT),
    "exit with 0": ((os._exit, 0), WorkerDied, DIES + "exit code 0"),
    "exit in a thread": ((IN_THREAD, *EXITS), WorkerDied, EXIT),
    "abort": ((os.abort,), WorkerDied, BY[signal.SIGABRT]),
    "read address 0": ((trouble.reads_nowhere,), WorkerDied, SEGV),
    "read address 0 in a thread": ((IN_THREAD, trouble.reads_nowhere), WorkerDied, SEGV),
    "SIGSEGV": (SEGVS, WorkerDied, SEGV),
    "SIGBUS": ((trouble.sends_itself, signal.SIGBUS), WorkerDied, BY[signal.SIGBUS]),
    "SIGTERM": ((trouble.sends_itself, signal.SIGTERM), WorkerDied, BY[signal.SIGTERM]),
    "SIGKILL": ((trouble.die,), WorkerDied, f"{KILL}: the machine may be out of memory"),
    "SIGALRM": ((trouble.is_alarmed,), WorkerDied, BY[signal.SIGALRM]),
    "kill the group": ((trouble.kills_its_group,), WorkerDied, KILL),
    # what goes wrong with the batch or the error on their way
    "raise when pickled": ((Trap, "pickled", *raising(OSError, "p")), TransportError, "Trap .p.;"),
    "sys.exit when pickled": ((Trap, "pickled", sys.exit, 3), BatchError, "SystemExit: 3"),
    "raise the worst when pickled": (
        (Trap, "pickled", *raising(trouble.Demanding, 5, "reason")),
        *(BatchError, "Demanding: 5"),
    ),
    "exit when pickled": ((Trap, "pickled", *EXITS), WorkerDied, EXIT),
    "SIGSEGV when pickled": ((Trap, "pickled", *SEGVS), WorkerDied, SEGV),
    "fork when pickled": ((Trap, "pickled", FORKS, print), FINE),
    "raise when deleted": ((Trap, "deleted", *raising(OSError, "deleted")), FINE),
    "exit when deleted": ((Trap, "deleted", *EXITS), WorkerDied, EXIT),
    "raise when unpickled": ((Trap, "unpickled above", *raising(OSError, "u")), OSError, "u"),
    "sys.exit when unpickled": ((Trap, "unpickled above", sys.exit, 3), BatchError, "Exit: 3"),
    "an error that raises when pickled": (
        raising(TrapError, "pickled", *raising(OSError, "p")),
        *(TrapError, "a trap"),
    ),
    "an error that sys.exits when pickled": (
        raising(TrapError, "pickled", sys.exit, 3),
        *(TrapError, "a trap"),
    ),
    "an error that raises when unpickled": (
        raising(TrapError, "unpickled above", *raising(OSError, "u")),
        *(BatchError, "TrapError: a trap"),
    ),
    "an error that exits when pickled": (
        raising(TrapError, "pickled", *EXITS),
        *(WorkerDied, EXIT),
    ),
    "an error that exits when unpickled": (
        raising(TrapError, "unpickled", *EXITS),
        *(WorkerDied, EXIT),
    ),
    # what damages the worker, but not its batches
    "close stdin": ((trouble.closes, 0), FINE),
    "close stdout": ((trouble.closes, 1), FINE),
    "close stdin, stdout, stderr": ((trouble.closes, 0, 1, 2), FINE),
    "close everything": ((trouble.closes_all, False), WorkerDied, EITHER),
    "close everything and hang": ((trouble.closes_all, True), WorkerDied, KILL),
    "exhaust descriptors": ((trouble.exhausts_descriptors,), FINE),
    "limit the size of files": ((trouble.limits, "RLIMIT_FSIZE", 1000), FINE),
    "leave the folder": ((trouble.leaves_its_folder,), FINE),
    "remove the temporary folder": ((trouble.removes_temporary_folder,), FINE),
    "block all signals": ((trouble.blocks_signals,), FINE),
    "forget the environment": ((trouble.forgets_environment,), FINE),
    # forks: there must be one worker afterwards, not two
    "fork": ((FORKS, print), FINE),
    "fork and exit": ((FORKS, *EXITS), FINE),
    "fork and sys.exit": ((FORKS, sys.exit, 3), FINE),
    "fork and raise": ((FORKS, *raising(OSError, "in the fork")), FINE),
    "fork and SIGSEGV": ((FORKS, *SEGVS), FINE),
    "fork in a thread": ((IN_THREAD, FORKS, print), FINE),
}

PLACES: dict[str, Callable[..., dict[str, Any]]] = {
    "__getitem__": lambda way: {"dataset": Zoo(*way)},
    "__getitems__": lambda way: {"dataset": SpringsMany(*way), "collate_fn": trouble.first},
    "transform": lambda way: {"dataset": Zoo(print), "transform": Springs(*way)},
    "collate_fn": lambda way: {"dataset": Zoo(print), "collate_fn": Springs(*way)},
}

HARMLESS = [name for name, (_, expected, *_) in ZOO.items() if expected not in (WorkerDied, FINE)]
"""They end their own batch and leave the worker as it was, so that all can be in one epoch."""

CASES = [("__getitem__", name) for name in ZOO if name not in HARMLESS]
CASES += [(place, name) for place in list(PLACES)[1:] for name in ("raise", "exit", "SIGSEGV")]
QUICK = [("__getitem__", name) for name in ("exit", "SIGKILL", "SIGSEGV when pickled", "fork")]


def matches(texts: list[str | None], message: str) -> bool:
    return all(text is None or re.search(text, message, re.DOTALL) for text in texts)


@pytest.fixture(scope="module")
def harmless():
    """The error of each harmless way to fail, as type and text; the batches between are sound."""
    items: list[Any] = []
    for name in HARMLESS:
        items += [(len(items), ZOO[name][0]), (len(items) + 1, ())]
    with Loader(trouble.Cages(), items, num_workers=2, retries=0) as loader:
        results = outcomes(iter(loader))
        assert len(results) == len(items)
        assert loader.stats.errors.replaced == 0
        # A slot that is lent takes what it may grow to: none is lent for ever.
        assert sum(slot.size for slot in slots_of(loader)._all) == loader.stats.memory.slot_bytes
    found = {}
    for n, name in enumerate(HARMLESS):
        array, nothing = results[2 * n + 1]
        assert array.tolist() == [2 * n + 1] * 5000
        assert nothing is None
        error, texts = results[2 * n], ZOO[name][2:]
        found[name] = type(error), str(error) if any(texts) else ""  # one has no words
    results.clear()  # the errors know who has it
    return found


@pytest.mark.parametrize("name", HARMLESS)
def test_the_harmless_part_of_the_zoo(harmless, name):
    _, expected, *texts = ZOO[name]
    error, message = harmless[name]
    assert error is expected
    assert matches(texts, message)


@pytest.mark.parametrize(
    ("place", "name"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_the_zoo(place, name, tmp_path, monkeypatch):
    way, expected, *texts = ZOO[name]
    arguments = PLACES[place](way)
    if way == (trouble.removes_temporary_folder,):  # a fork server would have its socket there
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        arguments["mp_context"] = SPAWN
    if name == "close everything and hang":
        # Of one by a fork server nothing tells that it has closed them: only a timeout ends it.
        arguments["mp_context"] = SPAWN
    items = [[item] for item in range(8)] if "collate_fn" in arguments else range(8)
    with Loader(sampler=items, num_workers=2, retries=0, **arguments) as loader:
        results = outcomes(iter(loader))
        assert len(results) == 8
        others = [result[0].tolist() for n, result in enumerate(results) if n != 2]
        assert others == [[n] * 5000 for n in range(8) if n != 2]
        if expected is FINE:
            assert results[2][0].tolist() == [2] * 5000
            assert results[2][1] != "made by a fork"
        else:
            assert type(results[2]) is expected
            assert matches(texts, str(results[2]))
        assert loader.stats.errors.replaced == (expected is WorkerDied)
        del results
        # A slot that is lent takes what it may grow to: none is lent for ever.
        assert sum(slot.size for slot in slots_of(loader)._all) == loader.stats.memory.slot_bytes


FAILING_ITEMS: list[tuple[Trap, type[Exception], str]] = [
    (Trap("unpickled", *raising(OSError, "unpickling")), OSError, "unpickling"),
    (Trap("unpickled", sys.exit, 3), BatchError, "SystemExit: 3"),
    (Trap("unpickled", *EXITS), WorkerDied, EXIT),
    (Trap("unpickled", *SEGVS), WorkerDied, SEGV),
]


def test_items_that_fail_when_unpickled():
    items = [0, *(trap for trap, *_ in FAILING_ITEMS), 5]
    with Loader(Echo(), items, num_workers=1, retries=0) as loader:
        first, *errors, last = outcomes(iter(loader))
        assert loader.stats.errors.replaced == 2
    assert (first, last) == (0, 5)
    for error, (_, expected, text) in zip(errors, FAILING_ITEMS, strict=True):
        assert type(error) is expected
        assert re.search(text.replace("batch 2", r"batch \d"), str(error), re.DOTALL)


@variants(
    ("start", "way", "num_workers"),
    [
        (SpringsWhenLoaded, EXITS, 1),
        (SpringsAtStart, SEGVS, 1),
        (SpringsAtStart, (IN_THREAD, *EXITS), 2),
    ],
)
def test_workers_that_do_not_get_ready(start, way, num_workers, tmp_path):
    """An error for each batch, after a number of tries. Then the cause is gone, and they do."""
    bad = tmp_path / "bad"
    bad.touch()
    trap = start(trouble.while_there, str(bad), *way)
    arguments = {"dataset": trap}
    if start is SpringsAtStart:
        arguments = {"dataset": Echo(), "worker_init_fn": trap}
    options = {"num_workers": num_workers, "on_error": "skip"}
    with Loader(sampler=range(5), **options, **arguments) as loader:
        errors = outcomes(iter(loader))
        assert [type(error) for error in errors] == [WorkerDied] * 5
        assert [error.ordinal for error in errors] == [0, 1, 2, 3, 4]
        death = "exit code 7" if os._exit in way else "SIGSEGV"
        text = rf"workers cannot be started: \d+ in a row died .*{death}.*worker_init_fn"
        assert all(re.match(text, str(error), re.DOTALL) for error in errors)
        tries = loader.stats.errors.replaced
        assert spawned.MOST_FAILED_STARTS <= tries <= 10
        bad.unlink()
        loader.start()
        assert len(list(loader)) == 5
        assert (loader.stats.errors.retries, loader.stats.errors.replaced) == (0, tries)


def test_forks_made_at_the_start_are_no_workers():
    forking = SpringsWhenLoaded(FORKS, print), SpringsAtStart(FORKS, print)
    with Loader(forking[0], range(8), worker_init_fn=forking[1], num_workers=2) as loader:
        assert [int(array[0]) for array, _ in loader] == list(range(8))
        assert loader.stats.errors.replaced == 0


def test_a_worker_that_is_ready_at_the_third_try(tmp_path):
    init = trouble.Until(tmp_path, 3, trouble.die)
    with Loader(Squares(6), worker_init_fn=init, num_workers=1, retries=0) as loader:
        assert list(loader) == [i * i for i in range(6)]
        assert (loader.stats.errors.retries, loader.stats.errors.replaced) == (0, 2)


STARTS = ["spawn", "forkserver"]


@pytest.mark.parametrize("method", STARTS)
def test_a_worker_that_dies_before_it_is_told_what_to_run(method, monkeypatch):
    """As any other that dies while it starts. From CPython 3.13.8 it is an error (#118981)."""
    options = {"num_workers": 1, "retries": 0, "mp_context": method}
    with (
        dead_at_once(monkeypatch, method, times=3) as pids,
        Loader(Squares(6), **options) as loader,
    ):
        assert list(loader) == [i * i for i in range(6)]
        assert len(pids) == 3
        assert (loader.stats.errors.retries, loader.stats.errors.replaced) == (0, 3)
        assert not any(map(psutil.pid_exists, pids))
        loader.num_workers = 0
        assert list(loader) == [i * i for i in range(6)]
        assert loader.stats.errors.replaced == 3  # those of workers that are gone, too


@pytest.mark.usefixtures("no_collector")
def test_a_start_that_failed_leaves_nothing_to_the_collector(monkeypatch):
    """An executor's semaphores may not go while another counts its own: CPython 3.12 refuses."""
    executors: weakref.WeakSet[Any] = weakref.WeakSet()
    make = ProcessPoolExecutor.__init__

    def note(executor: Any, *args: Any, **kwargs: Any) -> None:
        executors.add(executor)
        make(executor, *args, **kwargs)

    monkeypatch.setattr(ProcessPoolExecutor, "__init__", note)
    with (
        dead_at_once(monkeypatch, "forkserver", times=2),
        Loader(Squares(6), num_workers=1, mp_context="forkserver") as loader,
    ):
        assert list(loader) == [i * i for i in range(6)]
        assert len(executors) >= 1
    assert eventually(lambda: not executors)


@variants("method", STARTS)
def test_workers_that_all_die_before_they_are_told_what_to_run(method, monkeypatch):
    options = {"num_workers": 1, "on_error": "skip", "mp_context": method}
    with dead_at_once(monkeypatch, method) as pids, Loader(Squares(3), **options) as loader:
        errors = outcomes(iter(loader))
        assert [type(error) for error in errors] == [WorkerDied] * 3
        text = r"workers cannot be started: 8 in a row died .*signal 9 \(SIGKILL\)"
        assert all(re.match(text, str(error)) for error in errors)
        assert len(pids) == spawned.MOST_FAILED_STARTS
        assert not any(map(psutil.pid_exists, pids))


def test_failed_starts_are_not_in_a_row_where_a_batch_came_between(monkeypatch):
    options = {"num_workers": 1, "prefetch_factor": 1, "chunks": False}
    times = spawned.MOST_FAILED_STARTS - 1
    with Loader(Squares(9), mp_context="spawn", **options) as loader:
        batches = iter(loader)
        got = list[int]()
        for _ in range(2):
            with dead_at_once(monkeypatch, "spawn", times) as pids:
                for process in workers(loader):
                    process.kill()
                while len(pids) < times:
                    got.append(next(batches))
        assert [*got, *batches] == [n * n for n in range(9)]


# --- what a dead worker leaves behind does not hide its death -----------------------------------


@variants("way", ["fork", "multiprocessing", "detached fork"])
@variants("always", [False, True])
def test_a_fork_outlives_the_worker(way, always, tmp_path):
    """It holds open the pipe by whose end an executor knows that a worker is dead."""
    path = str(tmp_path / "end")
    deed = {
        "fork": (trouble.leaves_a_fork_and_dies, path, False),
        "multiprocessing": (trouble.starts_a_process_and_dies, path),
        "detached fork": (trouble.leaves_a_fork_and_dies, path, True),
    }[way]
    step = ("call", *deed)
    script = {2: [step if always else ("once", tmp_path / "did", step)]}
    with Loader(Scripted(script), range(8), num_workers=2) as loader:
        results = outcomes(iter(loader))
        assert [n for n in results if type(n) is int] == [0, 1, *[2] * (not always), *range(3, 8)]
        if always:
            assert type(results[2]) is WorkerDied
            assert "(SIGKILL)" in str(results[2])
        assert loader.stats.errors.retries == 1
    Path(path).touch()  # lets those go that are nobody's any more


def groups(pids: list[int]) -> list[int]:
    """Processes in the groups that these lead, or led."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getpgid(pid) in pids and alive(pid):
                found.append(pid)
    return found


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no pidfds")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_no_signal_goes_to_a_pid_that_was_reaped(method, tmp_path, monkeypatch):
    """It may be another process's by then. CPython 3.15 reads ``exitcode``, which reaps, before
    ``terminate()``; in any version a look at all children does so. Workers are sent signals by
    their pidfd. What a dead one left is killed all the same."""
    pids: list[int] = []
    sent: list[int] = []
    kill, worker = os.kill, spawned.WorkerProcess
    terminate, start = worker.terminate, worker.start

    def note(pid: int, number: int) -> None:
        if pid in pids and number:
            sent.append(pid)
        kill(pid, number)

    def start_and_note(process: Any) -> None:
        start(process)
        pids.append(process.pid)

    def terminate_late(process: Any) -> None:
        active_children()
        terminate(process)

    monkeypatch.setattr(os, "kill", note)
    monkeypatch.setattr(worker, "start", start_and_note)
    monkeypatch.setattr(worker, "terminate", terminate_late)
    end = tmp_path / "end"
    leave = [
        ("call", subprocess.Popen, ["sleep", "600"]),
        ("call", trouble.leaves_a_fork_and_dies, str(end), False),
    ]
    script = {3: [("once", tmp_path / "did", *leave)]}
    options = {"num_workers": 2, "mp_context": method}
    with Loader(Scripted(script), range(8), **options) as loader:
        assert list(loader) == list(range(8))
        assert loader.stats.errors.retries == 1
        assert eventually(lambda: not groups(pids[:2]))
    assert len(pids) >= 3
    assert eventually(lambda: not groups(pids))
    assert sent == []
    end.touch()
    if method == "forkserver":
        forkserver._forkserver._stop()  # it is the standard library's to keep


# --- replay --------------------------------------------------------------------------------------


def assert_equal(left: Any, right: Any) -> None:
    np.testing.assert_equal(left, right)


DEATHS = {0: trouble.die, 5: trouble.Exit(0), 6: trouble.Exit(3), 15: trouble.die}


@variants(
    ("deeds", "num_workers", "size"),
    [
        (DEATHS, 1, 4),
        ({4: trouble.hang}, 2, 4),
        ({4: trouble.holds_the_interpreter}, 2, 4),
        ({4: trouble.stops}, 2, 4),
        (DEATHS, 1, 300_000),
        (DEATHS, 2, 4),
        (DEATHS, 2, 300_000),
        (DEATHS, 3, 4),
        (DEATHS, 3, 300_000),
    ],
    quick=2,
)
def test_a_disturbed_epoch_equals_an_undisturbed_one(deeds, num_workers, size, tmp_path, caplog):
    """Random data of every kind; tiny batches, and large ones in shared memory."""
    with Loader(Noisy({}, size=size), range(16), num_workers=0) as loader:
        expected = list(loader)
    options = {"num_workers": num_workers, "retries": 1}
    if deeds is not DEATHS:
        options["timeout"] = HANG
    with Loader(Noisy(deeds, tmp_path, size), range(16), **options) as loader:
        assert_equal(list(loader), expected)
        # Two may die at once, and one be taken for ended.
        assert 1 <= loader.stats.errors.retries <= len(deeds)
        assert loader.stats.errors.replaced == loader.stats.errors.retries
        assert loader.stats.batches == 16
    said = [record for record in caplog.records if " died: " in record.message]
    assert {record.levelname for record in said} == {"WARNING"}
    if deeds is DEATHS and num_workers == 1:
        how = ["killed by signal 9 (SIGKILL)", "exit code 0", "exit code 3"]
        for record, item, death in zip(said, DEATHS, [*how, how[0]], strict=True):
            assert re.match(r"worker 0 \(pid \d+\) died: ", record.message)
            assert f"died: {death}" in record.message
            assert f"; it was making batch {item} of " in record.message


def test_batches_that_are_finished_are_not_made_again(tmp_path):
    """Only what was unfinished is, and an epoch that was left does not come back."""
    calls, go = tmp_path / "calls", tmp_path / "go"
    script: dict[int, list[Any]] = {
        n: [("work", 0.01), ("call", trouble.note, calls, n), ("touch", tmp_path / f"{n}")]
        for n in range(9)
    }  # too slow for chunks
    script[5] += [("once", tmp_path / "did", ("wait", go), ("die",))]
    with Loader(Scripted(script), range(9), num_workers=2, prefetch_factor=1) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert eventually((tmp_path / "6").exists)
        go.touch()
        assert list(batches) == [5, 6, 7, 8]
        times = Counter(map(int, lines(calls)))
        assert [times[n] for n in range(5)] == [1] * 5
        assert times[5] == 2
        assert all(1 <= times[n] <= 2 for n in range(6, 9))


def test_the_neighbour_of_a_killer_arrives(tmp_path):
    """It is made again too, but only the killer's batch had its try."""
    begun, calls = tmp_path / "begun", tmp_path / "calls"
    script = {
        0: [("call", trouble.note, calls, 0), ("touch", begun), ("wait", tmp_path / "go")],
        1: [("wait", begun), ("die",)],
    }
    with Loader(Scripted(script), range(4), num_workers=2, retries=0) as loader:
        batches = iter(loader)
        assert eventually(lambda: calls.exists() and losses(loader))
        (tmp_path / "go").touch()
        first, error, *rest = outcomes(batches)
        assert (first, rest) == (0, [2, 3])
        assert type(error) is WorkerDied
        assert lines(calls) == ["0", "0"]
        assert (loader.stats.errors.retries, loader.stats.errors.replaced) == (0, 1)


@variants(("step", "error_type"), [(("die",), WorkerDied), (("hang",), BatchTimeout)])
def test_two_workers_are_lost_at_once(step, error_type, tmp_path):
    """Each batch has its own try."""
    script = {n: [("touch", tmp_path / f"{n}"), ("wait", tmp_path / "go"), step] for n in range(2)}
    options = {"num_workers": 2, "retries": 0, "timeout": HANG}
    with Loader(Scripted(script), range(6), **options) as loader:
        batches = iter(loader)
        assert eventually(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        (tmp_path / "go").touch()
        results = outcomes(batches)
        assert [type(result) for result in results[:2]] == [error_type] * 2
        assert results[2:] == [2, 3, 4, 5]
        assert [result.ordinal for result in results[:2]] == [0, 1]
        assert loader.stats.errors.replaced == 2


def test_the_death_of_an_idle_worker_costs_no_try(tmp_path):
    script = {0: [("touch", tmp_path / "begun"), ("wait", tmp_path / "go")]}
    options = {"num_workers": 2, "prefetch_factor": 1, "retries": 0}
    with Loader(Scripted(script), range(6), **options) as loader:
        loader.start()
        batches = iter(loader)
        (busy,) = map(int, eventually(lambda: written(tmp_path / "begun")))
        assert eventually(lambda: have_come(batches))  # batch 1 is there
        (idle,) = [process.pid for process in workers(loader) if process.pid != busy]
        os.kill(idle, signal.SIGKILL)
        assert eventually(lambda: losses(loader))
        (tmp_path / "go").touch()
        assert list(batches) == list(range(6))
        assert (loader.stats.errors.retries, loader.stats.errors.replaced) == (0, 1)
        assert len(lines(tmp_path / "begun")) == 2


@pytest.mark.parametrize(
    ("on_error", "message"),
    [("raise", r"batch 0 of epoch 0.*tried 2 times"), ("skip", "nothing is left of epoch 0")],
)
def test_a_stream_that_no_worker_makes_ready(on_error, message):
    """It is made ready with its first task, of which each death is a try: they come to an end."""
    init: Any = lambda info: trouble.die()  # noqa: E731
    with Loader(Numbers(4), worker_init_fn=init, num_workers=1, on_error=on_error) as loader:
        with pytest.raises(BatchError, match=message):
            list(loader)
        assert loader.stats.errors.retries > 0


@pytest.mark.parametrize(("deed", "always"), [(trouble.die, False), (trouble.hang, True)])
def test_who_is_lost_in_the_middle_of_a_chunk_is_found(deed, always, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    dataset = Noisy({250: deed}, None if always else tmp_path)
    with Loader(Noisy({}), range(400), num_workers=0) as loader:
        expected = list(loader)
    with Loader(dataset, range(400), num_workers=1, retries=1, timeout=HANG) as loader:
        batches = iter(loader)
        assert_equal([next(batches) for _ in range(200)], expected[:200])
        assert loader.stats.workers.chunk_size > 1
        results = outcomes(batches)
        error = results.pop(50) if always else None
        assert_equal(results, expected[200:250] + expected[250 + always :])
        if always:
            assert (type(error), error.ordinal, error.item) == (BatchTimeout, 250, 250)
            assert "took longer than timeout allows (tried 2 times); set a longer" in str(error)
            assert caplog.text.count("a batch took too long") == 2
        assert loader.stats.errors.retries == 1
        assert loader.stats.errors.replaced == 1 + always


def test_large_items_on_their_way_down(tmp_path):
    """Someone is writing to the pipe that nobody reads any more."""
    items = [bytes([n]) * 3_000_000 for n in range(8)]
    dataset = trouble.FirstByte(str(tmp_path / "did"))
    with Loader(dataset, items, num_workers=2, prefetch_factor=4, retries=1) as loader:
        assert list(loader) == list(range(8))
        assert loader.stats.errors.retries == 1


@variants("on_error", ["skip", "replace", "decline", "raise another"])
@variants("error_type", [WorkerDied, BatchTimeout])
def test_on_error_is_asked_about_deaths_and_hangs(error_type, on_error, caplog):
    reports: list[BatchError] = []

    def handle(report: BatchError) -> Any:
        reports.append(report)
        if on_error == "raise another":
            raise LookupError("handled") from report
        return -1 if on_error == "replace" else minloader.SKIP

    step = ("die",) if error_type is WorkerDied else ("hang",)
    options = {"num_workers": 1, "retries": 0, "timeout": HANG}
    options["on_error"] = "skip" if on_error == "skip" else handle
    with Loader(Scripted({2: [step]}), range(5), **options) as loader:
        results = outcomes(iter(loader))
        assert loader.stats.errors.replaced == 1
    if on_error == "raise another":
        assert type(results.pop(2)) is LookupError
    assert results == [0, 1, *[-1] * (on_error == "replace"), 3, 4]
    if on_error == "skip":
        (line,) = [line for line in caplog.messages if line.startswith("skipped")]
        assert "batch 2 of epoch 0, item 2" in line
        assert error_type.__name__ in line
        return
    (report,) = reports
    assert type(report) is error_type
    assert (report.ordinal, report.epoch, report.item) == (2, 0, 2)
    assert report.worker == 0
    assert not alive(report.pid)


def test_each_try_is_counted_for_its_own_batch(tmp_path):
    """Three tries for one do not use up those of another."""
    script = {n: [("call", trouble.Until(tmp_path / f"{n}", 3, trouble.die), None)] for n in (2, 3)}
    with Loader(Scripted(script), range(6), num_workers=1, retries=2) as loader:
        assert list(loader) == list(range(6))
        assert loader.stats.errors.retries == 4


def test_a_foreign_executor_that_breaks_fails_every_batch_at_once():
    with (
        ProcessPoolExecutor(1, mp_context=SPAWN) as pool,
        Loader(Scripted({1: [("die",)]}), range(5), executor=pool, retries=3) as loader,
    ):
        first, *errors = outcomes(iter(loader))
        assert first == 0
        assert [type(error) for error in errors] == [WorkerDied] * 4
        assert [error.ordinal for error in errors] == [1, 2, 3, 4]
        assert "which is broken since" in str(errors[0])
        assert "needs the guard if __name__" in str(errors[0])


def fail_to_start() -> None:
    raise OSError("no start")


def test_a_foreign_executor_whose_threads_fail_to_start(caplog):
    with (
        caplog.at_level(logging.CRITICAL, "concurrent.futures"),
        ThreadPoolExecutor(1, initializer=fail_to_start) as pool,
        Loader(Echo(), range(3), executor=pool) as loader,
    ):
        errors = outcomes(iter(loader))
        assert [type(error) for error in errors] == [WorkerDied] * 3


# --- which sample it was -------------------------------------------------------------------------


class Bad:
    """Samples of which one does something."""

    def __init__(self, *way: Any) -> None:
        self.way = way

    def __getitem__(self, index: int) -> int:
        if index == 7:
            act, *arguments = self.way
            act(*arguments)
        return index


class BadAfterwards(Bad):
    """The same as a transform, of datasets whose samples are their index."""

    def __call__(self, index: int) -> int:
        return self[index]


ITEMS = [[0, 1], [9, 3, 8, 7, 5], [2, 4]]


class BadAwaited(Bad):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


@variants("where", ["dataset", "transform"])
def test_a_crash_names_its_sample_and_shows_its_stack(where, caplog):
    bad = BadAfterwards(trouble.reads_nowhere)
    given = {"dataset": bad} if where == "dataset" else {"dataset": Echo(), "transform": bad}
    options = {"collate_fn": sum, "num_workers": 2, "retries": 1}
    with (
        caplog.at_level(logging.WARNING, "minloader"),
        Loader(sampler=ITEMS, **given, **options) as loader,
    ):
        first, error, last = outcomes(iter(loader))
    assert (first, last) == (1, 6)
    assert type(error) is WorkerDied
    assert (error.item, error.sample, error.exitcode) == (ITEMS[1], 7, -signal.SIGSEGV)
    assert "item [9, 3, 8, 7, 5], sample 7: killed by signal 11 (SIGSEGV) (tried 2" in str(error)
    assert error.stack in str(error)
    assert re.search(r'trouble.py", line \d+ in reads_nowhere\n', error.stack)
    assert "minloader" not in error.stack.replace(str(Path(__file__).parent), "")
    line = next(line for line in caplog.messages if "SIGSEGV" in line)
    assert "it was making batch 1 of epoch 0, item [9, 3, 8, 7, 5], sample 7;" in line


def test_samples_behind_one_that_was_left_out_keep_their_places():
    options = {"num_workers": 1, "retries": 0}
    leaves_out = trouble.LeavesOut(9)
    transform = BadAfterwards(*EXITS)
    with Loader(leaves_out, ITEMS[1:2], collate_fn=sum, transform=transform, **options) as loader:
        (error,) = outcomes(iter(loader))
    assert (type(error), error.sample) == (WorkerDied, 7)


@pytest.mark.parametrize("kind", [Bad, BadAwaited])
def test_a_traceback_begins_with_the_users_code(kind):
    bad = kind(trouble.raises, OSError, "ouch")
    with (
        Loader(bad if kind is Bad else concurrent(bad), ITEMS, collate_fn=sum) as loader,
        pytest.raises(OSError, match="ouch") as caught,
    ):
        list(loader)
    text = str(caught.value.__cause__)
    assert "in __getitem__" in text
    assert not re.search(r"batch_maker\.py|concurrent\.py|_base\.py", text), text


# --- hangs ---------------------------------------------------------------------------------------


def line_of(function: Any, mark: str) -> int:
    """Number of the line that holds the mark, in a function."""
    source, start = getsourcelines(function)
    return next(start + n for n, line in enumerate(source) if mark in line)


HANGS = {
    "waiting": (Bad(trouble.hangs_beside_a_thread), "hang()"),
    "read at the same time": (concurrent(Bad(trouble.hang), limit=2), "the line that"),
    "awaited": (concurrent(BadAwaited(trouble.hang), limit=2), "the line that"),
    "holding the interpreter": (Bad(trouble.holds_the_interpreter), "read("),
    "stopped": (Bad(trouble.stops), None),
    "endless loop": (Bad(trouble.loops), "while"),
}
"""Ways in which sample 7 hangs, and what is in the line where it is found."""


@variants("way", HANGS, quick=2)
def test_a_hang_is_found_and_shown(way):
    """With its sample, though others are read at the same time, and ahead."""
    dataset, mark = HANGS[way]
    options = {"num_workers": 2, "timeout": HANG, "retries": 0}
    with Loader(dataset, ITEMS, collate_fn=sum, **options) as loader:
        first, error, last = outcomes(iter(loader))
    assert (first, last) == (1, 6)
    assert type(error) is BatchTimeout
    assert (error.ordinal, error.epoch, error.item, error.sample) == (1, 0, ITEMS[1], 7)
    told = "batch 1 of epoch 0, item [9, 3, 8, 7, 5], sample 7, took longer than timeout allows;"
    assert str(error).startswith(told)
    assert f"worker {error.worker} (pid {error.pid}) was at" in str(error)
    assert not alive(error.pid)
    if mark is None:
        assert "(the worker did not answer)" in str(error)
        assert error.stack == ""
        return
    function = getattr(dataset, "dataset", dataset).way[0]
    place = re.search(rf'trouble.py", line (\d+) in {function.__name__}\n', error.stack)
    assert place, error
    assert int(place[1]) - line_of(function, mark) in (0, 1)  # a loop has two lines
    assert error.stack in str(error)
    assert error.stack.startswith("Current thread")  # that which makes the batch
    assert re.search(r'test_deaths.py", line \d+ in __getitem__\n', error.stack)
    assert "batch_maker.py" not in error.stack  # frames of ours are left out
    assert "in _serve\n" not in error.stack  # so are readers without work


def test_a_hang_out_of_order_and_what_its_worker_started_is_killed(tmp_path):
    path = tmp_path / "pids"
    dataset = Scripted({0: [("call", trouble.starts_children, path)]})
    options = {"num_workers": 2, "timeout": HANG, "retries": 0, "in_order": False}
    with Loader(dataset, range(6), **options) as loader:
        *batches, error = outcomes(iter(loader))
        assert sorted(batches) == [1, 2, 3, 4, 5]
        assert type(error) is BatchTimeout
        children = list(map(int, lines(path)))
        assert len(children) == 2
        assert eventually(lambda: not any(map(alive, children)))


def test_time_in_the_queue_and_at_the_start_does_not_count():
    dataset = trouble.Slow(HANG / 4, start=1.25 * HANG)
    with Loader(dataset, range(5), num_workers=1, prefetch_factor=5, timeout=HANG) as loader:
        assert list(loader) == list(range(5))
        assert loader.stats.errors.replaced == 0


def test_time_in_which_the_program_was_stopped_is_no_hang(monkeypatch, tmp_path):
    """By SIGSTOP, or since the machine slept: the clock has gone on, but nobody has looked."""
    clock, stopped, looks = SimpleNamespace(**vars(time)), [0.0], itertools.count()
    clock.perf_counter = lambda: time.perf_counter() + stopped[0]
    clock.monotonic = lambda: time.monotonic() + stopped[0]
    monkeypatch.setattr(spawned, "time", clock)
    gate, watch = tmp_path / "gate", spawned.ProcessPool.watch

    def look(pool: Any) -> None:
        number = next(looks)
        if number == 2:
            stopped[0] = 1000.0
        if number == 5:
            gate.touch()
        watch(pool)

    monkeypatch.setattr(spawned.ProcessPool, "watch", look)
    with Loader(Gate(str(gate)), range(3), num_workers=2, timeout=HANG, retries=0) as loader:
        assert list(loader) == [0, 1, 2]
        assert loader.stats.errors.replaced == 0
    assert next(looks) > 5


@pytest.mark.parametrize("way", [trouble.stops, trouble.holds_the_interpreter])
@variants(("method", "num_workers"), [("spawn", 1), ("fork", 1), ("spawn", 2), ("forkserver", 2)])
def test_a_worker_that_stands_still_between_batches(way, method, num_workers, tmp_path, caplog):
    """If it is to take the next task, the other worker waits for it, too."""
    dataset = trouble.StandsStill(way, str(tmp_path))
    options = {"timeout": HANG / 2, "retries": 0, "mp_context": method, "num_workers": num_workers}
    with Loader(dataset, range(6), **options) as loader:
        assert list(loader) == list(range(6))
        (tmp_path / "now").touch()
        assert eventually((tmp_path / "stands").exists)
        assert list(loader) == list(range(6))
        assert loader.stats.errors.replaced in ([1] if num_workers == 1 else [0, 1, 2])
        assert list(loader) == list(range(6))
    assert all("it stood still while a task waited" in line for line in caplog.messages)


def test_a_worker_that_goes_on_when_it_is_looked_at_is_not_killed(monkeypatch):
    """It may just have been between two tasks."""
    stack, stopped = spawned._Executor._stack, list[int]()

    def look(executor: Any, worker: Any) -> str:
        before = executor.heartbeats.last(0)
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)
            assert eventually(lambda: executor.heartbeats.last(0) != before)
        return stack(executor, worker)

    monkeypatch.setattr(spawned._Executor, "_stack", look)
    with Loader(Squares(3), num_workers=1, timeout=HANG / 2, retries=0) as loader:
        assert list(loader) == [0, 1, 4]
        stopped.append(workers(loader)[0].pid)
        os.kill(stopped[0], signal.SIGSTOP)
        assert list(loader) == [0, 1, 4]
        assert not stopped
        assert list(loader) == [0, 1, 4]  # a killed one makes nothing of this
        assert loader.stats.errors.replaced == 0


def test_a_worker_whose_reply_comes_when_it_is_looked_at_is_not_killed(monkeypatch):
    """The executor's thread has read it, and has not come to its future."""
    stack, read = spawned._Executor._stack, cpython._ManagerThread.wait_result_broken_or_wakeup
    is_looked_at = threading.Event()

    def look(executor: Any, worker: Any) -> str:
        is_looked_at.set()
        assert eventually(lambda: not executor.under_way.unfinished)
        return stack(executor, worker)

    def read_late(thread: Any) -> Any:
        found = read(thread)
        if found[0] is not None:
            is_looked_at.wait(60)
        return found

    monkeypatch.setattr(spawned._Executor, "_stack", look)
    with Loader(Squares(1), num_workers=1, timeout=HANG / 2, retries=0) as loader:
        assert list(loader) == [0]
        monkeypatch.setattr(cpython._ManagerThread, "wait_result_broken_or_wakeup", read_late)
        assert list(loader) == [0]
        assert is_looked_at.is_set()
        assert list(loader) == [0]  # a killed one makes nothing of this
        assert loader.stats.errors.replaced == 0


def test_a_slow_chunk_of_quick_batches_is_no_hang(tmp_path):
    """The time is each batch's own."""
    script = {n: [("once", tmp_path / f"{n}", ("work", HANG / 4))] for n in range(300, 306)}
    with Loader(Scripted(script), range(400), num_workers=1, timeout=HANG) as loader:
        assert list(loader) == list(range(400))
        assert loader.stats.errors.replaced == 0


@variants("shared_memory", [False, True])
def test_batches_that_wait_for_a_slow_consumer_are_no_hang(shared_memory):
    """It even holds the interpreter, so that nobody takes the replies: they are made all the same.

    Replies of that size do not fit into a pipe.
    """
    options = {"num_workers": 2, "timeout": HANG, "retries": 0, "shared_memory": shared_memory}
    with Loader(trouble.Large(8_000_000), range(12), **options) as loader:
        for n, batch in enumerate(loader):
            assert batch == bytes([n]) * 8_000_000
            if n == 2:
                ctypes.PyDLL(None).usleep(int(1.25e6 * HANG))
        assert loader.stats.errors.replaced == 0


def creep(index: int) -> int:
    time.sleep(0.01)
    return index


def test_a_batch_whose_samples_go_on_takes_too_long_all_the_same():
    """Each is quick, but timeout is for the batch: it is at another one when it is looked at."""
    options: dict[str, Any] = {"num_workers": 1, "timeout": 1.0, "retries": 0}
    loader = Loader(creep, [[*range(3_000)]], collate_fn=sum, **options)
    with loader, pytest.raises(BatchTimeout, match="took longer than timeout"):
        list(loader)


def test_a_reply_that_nobody_takes_is_no_hang(tmp_path):
    """The executor's own thread is held up, so that the worker waits with its reply."""
    options = {"num_workers": 1, "timeout": HANG, "retries": 0, "shared_memory": False}
    gate, never = tmp_path / "gate", threading.Event()
    with Loader(trouble.Large(8_000_000), range(8), **options) as loader:
        batches = iter(loader)
        next(batches)
        held = inspect(loader).executors[-1].submit(Gate(str(gate)).__getitem__, 0)
        held.add_done_callback(lambda _: never.wait(1.25 * HANG))
        gate.touch()
        assert [batch[0] for batch in batches] == [1, 2, 3, 4, 5, 6, 7]
        assert loader.stats.errors.replaced == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": 0}, ValueError, "timeout must be more than 0 seconds, got 0"),
        ({"timeout": -1}, ValueError, "timeout must be more than 0 seconds, got -1"),
        ({"timeout": float("nan")}, ValueError, "timeout must be more than 0 seconds, got nan"),
        ({"timeout": "x"}, TypeError, "timeout must be a number of seconds or None, got 'x'"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds or None, got True"),
        (
            {"timeout": 2, "executor": "thread"},
            *(
                ValueError,
                "timeout=2 is for executor='process' alone, but executor is 'thread'; drop",
            ),
        ),
        ({"retries": -1}, ValueError, "retries must be at least 0, got -1"),
        ({"retries": 1.0}, TypeError, r"retries must be an int, got 1\.0"),
        ({"retries": None}, TypeError, "retries must be an int, got None"),
        ({"worker_memory_limit": 0}, ValueError, "worker_memory_limit must be at least 1, got 0"),
        ({"worker_memory_limit": "1G"}, TypeError, "worker_memory_limit must be an int"),
        (
            {"worker_memory_limit": 1 << 30, "executor": "thread"},
            *(ValueError, "worker_memory_limit=1073741824 is for executor='process' alone"),
        ),
        (
            {"timeout": 1, "executor": ThreadPoolExecutor(1)},
            *(ValueError, "timeout=1 is for executor='process' alone"),
        ),
        (
            {"worker_memory_limit": 1, "executor": ThreadPoolExecutor(1)},
            *(ValueError, "worker_memory_limit=1 is for executor='process' alone"),
        ),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Loader(Squares(), **options)


# --- in the middle of a message ------------------------------------------------------------------


@variants(
    ("act", "how", "num_workers"),
    [
        (trouble.DiesSending, {}, 1),  # the executor waits for the rest of it, and would for ever
        (trouble.StopsSending, {"share": 0}, 2),
        # With the lock of the queue: before it knows what it would have made, or with half of it.
        (trouble.DiesReceiving, {"reads": 0}, 2),
        (trouble.DiesSending, {}, 2),
        (trouble.StopsSending, {"share": 0.5}, 2),
        (trouble.DiesReceiving, {"reads": 1}, 2),
    ],
    quick=3,
)
def test_a_worker_is_lost_in_the_middle_of_a_message(act, how, num_workers, tmp_path):
    """What it has not begun costs no try, nor what it had made as it was ended by us."""
    options = {"num_workers": num_workers, "worker_init_fn": act(tmp_path / "did", **how)}
    options |= {"retries": int(act is trouble.DiesSending), "shared_memory": False}
    if act is trouble.StopsSending:
        options["timeout"] = HANG / 2
    with Loader(trouble.Large(5_000_000), range(4), **options) as loader:
        assert list(loader) == [bytes([n]) * 5_000_000 for n in range(4)]
        assert (tmp_path / "did").exists()
        assert loader.stats.errors.retries == options["retries"]
        assert loader.stats.errors.replaced == 1


def test_close_after_a_death_in_the_middle_of_a_reply(tmp_path):
    init = trouble.DiesSending(tmp_path / "did")
    options = {"worker_init_fn": init, "shared_memory": False}
    with Loader(trouble.Large(8_000_000), range(4), **options) as loader:
        loader.start()
        batches = iter(loader)
        assert eventually(lambda: workers(loader)[0].exitcode is not None)
        loader.close()
        with pytest.raises(RuntimeError, match="this Loader is closed"):
            next(batches)


def test_a_death_in_the_middle_of_a_reply_beside_new_workers(tmp_path):
    """The executor takes no more tasks, since its workers have grown too large."""
    init = trouble.DiesSending(tmp_path / "did", least=3_000_000)
    dataset = trouble.LargeOnce(tmp_path / "large", tmp_path / "go")
    options = {"worker_init_fn": init, "shared_memory": False, "num_workers": 2}
    with Loader(dataset, range(8), worker_memory_limit=base() + 20_000_000, **options) as loader:
        batches = iter(loader)
        first = next(batches)
        assert eventually(lambda: loader.stats.errors.replaced == 2)
        (tmp_path / "go").touch()
        assert [len(batch) for batch in [first, *batches]] == [3] * 3 + [4_000_000] + [3] * 4
        assert (tmp_path / "did").exists()


CHILDREN = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a launcher hands that down
from minloader import Loader
from trouble import Noisy, die
for method in ("spawn", "fork", "forkserver"):
    with Loader(Noisy({{3: die}}, {folder!r} + method), range(20), num_workers=1,
                prefetch_factor=8, mp_context=method) as loader:
        assert [batch[0] for batch in loader] == list(range(20))
        assert loader.stats.errors.replaced == 1
print("end")
"""


@pytest.mark.slow
def test_a_death_where_children_are_not_waited_for(tmp_path):
    """The system reaps them, and nobody is told how they ended."""
    for method in ("spawn", "fork", "forkserver"):
        (tmp_path / method).mkdir()
    done = python(CHILDREN.format(folder=f"{tmp_path}/"), options=["-W", "ignore"])
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# --- races in the executor -----------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["at once", "at its task"])
def test_who_starts_while_another_dies_is_not_to_blame(monkeypatch, dies):
    """On CPython 3.11 the executor walks over its workers without the lock that a start holds. One
    that it misses takes a task, is told to leave, and leaves well: that is no death.
    """
    start, terminate = spawned.WorkerProcess.start, spawned.WorkerProcess.terminate
    breaks = threading.Event()
    processes: list[Any] = []
    executor: Any = None

    def start_late(process: Any) -> None:
        nonlocal executor
        start(process)
        processes.append(process)
        if dies == "at once" and len(processes) == 1:
            os.kill(process.pid, signal.SIGSTOP)  # it does not come to its task
        if len(processes) == 2:
            (executor,) = inspect(loader).executors
            if dies == "at once":
                os.kill(processes[0].pid, signal.SIGKILL)
            assert eventually(lambda: any(each.has_ended() for each in processes), 60)
            breaks.wait(0.3)  # in vain, if the executor waits for this start to be over

    def terminate_late(process: Any) -> None:
        breaks.set()
        eventually(lambda: executor.leaving or not executor.may_start_workers)
        terminate(process)

    monkeypatch.setattr(spawned.WorkerProcess, "start", start_late)
    monkeypatch.setattr(spawned.WorkerProcess, "terminate", terminate_late)
    monkeypatch.setattr(spawned, "GRACE", 20.0)  # nobody is killed before it has left well
    script = {0: [("die",)]} if dies == "at its task" else {}
    with Loader(Scripted(script), range(8), num_workers=2, retries=0) as loader:
        first, *rest = outcomes(iter(loader))
        assert (first == 0) if dies == "at once" else (type(first) is WorkerDied)
        assert rest == list(range(1, 8))
        assert loader.stats.errors.replaced == 1


def test_the_death_of_the_last_worker_that_started_is_seen(tmp_path):
    """Though nothing else happens, and nobody waits who would look after the workers."""
    begun = tmp_path / "begun"
    script = {n: [("touch", begun), ("wait", tmp_path / "go")] for n in range(2)}
    with Loader(Scripted(script), range(2), num_workers=2, prefetch_factor=1) as loader:
        batches = iter(loader)
        assert eventually(lambda: len(written(begun)) == 2)
        os.kill(workers(loader)[1].pid, signal.SIGKILL)
        assert eventually(lambda: losses(loader))
        (tmp_path / "go").touch()
        assert list(batches) == [0, 1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ctrl_c_in_the_middle_of_a_start(monkeypatch, method):
    """As Python raises it if another thread takes the signal. Each worker is known all the same."""
    spawnv, connect = util.spawnv_passfds, forkserver.connect_to_new_process
    pressed = []

    def press(result: Any) -> Any:
        pressed.append(result)
        _thread.interrupt_main()
        return result

    with Loader(Squares(20), num_workers=3, mp_context=method) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(util, "spawnv_passfds", lambda *args: press(spawnv(*args)))
            patch.setattr(forkserver, "connect_to_new_process", lambda *args: press(connect(*args)))
            with pytest.raises(KeyboardInterrupt):
                loader.start()
        loader.start()
        assert pressed
        assert [worker.number for worker in inspect(loader).workers] == [0, 1, 2]
        assert list(loader) == [n * n for n in range(20)]
        assert loader.stats.errors.replaced == 0
    if method == "forkserver":
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def test_a_start_that_anything_else_ends_leaves_no_child(monkeypatch):
    spawnv = util.spawnv_passfds
    pids: list[int] = []

    def remember(*args: Any) -> int:
        pids.append(spawnv(*args))
        return pids[-1]

    def fail(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("planned")

    monkeypatch.setattr(util, "spawnv_passfds", remember)
    monkeypatch.setattr(popen_spawn_posix, "open", fail, raising=False)  # before it is told
    with Loader(Squares(20), num_workers=2, mp_context=SPAWN) as loader:
        with pytest.raises(MemoryError, match="planned"):
            loader.start()
        assert not psutil.pid_exists(pids[0])
        assert list(loader) == [n * n for n in range(20)]
        assert {worker.number for worker in inspect(loader).workers} == {0, 1}


def test_workers_are_started_just_when_one_dies(monkeypatch):
    submit = cpython.Executor.submit

    def break_first(executor: Any, *args: Any) -> Any:
        monkeypatch.undo()
        future = submit(executor, *args)
        os.kill(executor.workers[0].pid, signal.SIGKILL)
        assert eventually(lambda: executor.broken)
        return future

    monkeypatch.setattr(cpython.Executor, "submit", break_first)
    with Loader(Squares(20), num_workers=2) as loader:
        loader.start()
        assert list(loader) == [n * n for n in range(20)]


def test_all_workers_are_started_also_where_the_first_is_idle_before(monkeypatch):
    submit = cpython.Executor.submit

    def wait_for_first(executor: Any, *args: Any) -> Any:
        monkeypatch.undo()
        future, idle = submit(executor, *args), executor._idle_worker_semaphore
        assert eventually(lambda: idle.acquire(blocking=False))
        idle.release()
        return future

    monkeypatch.setattr(cpython.Executor, "submit", wait_for_first)
    with Loader(Squares(20), num_workers=3) as loader:
        loader.start()
        assert [worker.number for worker in inspect(loader).workers] == [0, 1, 2]


def test_a_start_that_hangs_is_a_failed_one(monkeypatch, tmp_path, caplog):
    """With its stack. Another worker takes its place."""
    monkeypatch.setattr(spawned, "LONGEST_START", 4.0)
    with Loader(
        trouble.HangsInAnImport(tmp_path / "did"), range(4), num_workers=1, timeout=2
    ) as loader:
        assert list(loader) == [0, 1, 2, 3]
        assert loader.stats.errors.replaced >= 1  # on a busy machine others take too long
    assert "its start took too long, here:" in caplog.text
    assert "in hang" in caplog.text


def test_a_worker_that_is_too_large_is_replaced_once(caplog):
    with Loader(Echo(), range(20), num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        (pool,) = inspect(loader).group.pools
        pid = inspect(loader).workers[0].pid
        for _ in range(5):
            pool.renew(pid, "it takes more than worker_memory_limit")
        assert len(list(batches)) == 19
        assert loader.stats.errors.replaced == 2
    assert caplog.text.count("takes more than worker_memory_limit") == 1


# --- memory --------------------------------------------------------------------------------------


def base() -> int:
    """Bytes that a worker has for itself before it makes a batch."""
    with Loader(trouble.PrivateMemory(), [0]) as loader:
        (memory,) = loader
    return int(memory)


def test_workers_that_leak_are_replaced(caplog):
    leak = 8_000_000
    with Loader(Noisy({}), range(20), num_workers=0) as loader:
        expected = list(loader)
    limit = base() + 3 * leak
    with Loader(
        trouble.Leaky(leak), range(20), num_workers=2, worker_memory_limit=limit, retries=0
    ) as loader:
        pids, batches = set(), []
        for pid, *batch in loader:
            pids.add(pid)
            batches.append(tuple(batch))
        assert_equal(batches, expected)
        # Of two workers one may do all that is done before both are replaced.
        assert len(pids) >= 3
        assert loader.stats.errors.replaced >= 2
        assert loader.stats.errors.retries == 0
    said = (
        rf"worker \d \(pid \d+\) takes more than worker_memory_limit={limit}: it has [\d.]+ MB for "
        r"itself \(it began with [\d.]+ MB\) since batch \d+ of epoch 0: all workers are replaced"
    )
    assert all(re.match(said, line) for line in caplog.messages), caplog.messages


def test_a_limit_below_what_a_start_takes():
    with Loader(Squares(3), worker_memory_limit=1_000_000, on_error="skip") as loader:
        errors = outcomes(iter(loader))
        assert [type(error) for error in errors] == [MemoryError] * 3
        text = r"worker_memory_limit is 1000000 bytes, but a worker takes \d+ before it makes"
        assert re.match(text, str(errors[0]))
        assert loader.stats.errors.replaced == 0


def test_a_death_leaves_the_programs_of_new_workers_alone(tmp_path):
    """While a worker of the old ones dies, the new ones' batches run programs."""
    script: dict[int, list[Any]] = {n: [("work", 0.01)] for n in range(8)}
    script[0] = [("call", trouble.keep, 40_000_000)]
    script[1] = [("once", tmp_path / "did", ("wait", tmp_path / "sleeps"), ("die",))]
    script[4] = [("call", trouble.runs_sleep, str(tmp_path / "sleeps"), 2)]
    options = {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "retries": 1}
    with Loader(
        Scripted(script), range(8), worker_memory_limit=base() + 20_000_000, **options
    ) as loader:
        assert sorted(loader) == list(range(8))
        assert (tmp_path / "did").exists()
        assert len(lines(tmp_path / "sleeps")) == 1


def test_an_address_space_that_ends():
    """The dataset's own MemoryError arrives as itself; what fits goes on."""
    items = [1000, 500_000_000, 2000, 500_000_000, 3000]
    init = trouble.Limits(200_000_000)
    with Loader(trouble.Greedy(), items, worker_init_fn=init, retries=0) as loader:
        results = outcomes(iter(loader))
        assert results[::2] == [1000, 2000, 3000]
        assert [isinstance(error, MemoryError) for error in results[1::2]] == [True, True]
        assert "Unable to allocate" in str(results[1])
        assert loader.stats.errors.replaced == 0


GREEDY = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from trouble import Greedy
from minloader import Loader, WorkerDied
with Loader(Greedy(), [1000, 2_000_000_000, 2000], retries=1) as loader:
    batches = iter(loader)
    print(next(batches))
    try:
        next(batches)
    except WorkerDied as error:
        print(error)
    print(next(batches))
    print(loader.stats.errors.retries)
"""


def test_out_of_memory_in_a_control_group(small_group):
    folder, limit = small_group
    result = python(GREEDY, folder)
    first, error, last, retries = result.stdout.splitlines()
    assert (first, last, retries) == ("1000", "2000", "1")
    assert "killed by signal 9 (SIGKILL): out of memory" in error
    assert f"by the limit of {limit} bytes of a control group (tried 2 times)" in error


# --- after all of it -----------------------------------------------------------------------------
