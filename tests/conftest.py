"""What every test stands on: nothing may be left behind, and every executor behaves alike."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import psutil
import pytest

from minloader import Loader
from minloader._inspect import inspect

SLOW_MODULES = ["chaos", "dask", "examples", "lhotse", "main", "report", "trainers", "training"]
"""Tests that run whole programs, clusters or a browser."""

SLOW_WAYS = ["process-2", "process-3", "foreign-process"]
"""Parameters that mean several processes, where one process is a parameter too."""

SLOW_TESTS = {
    "deaths": [
        *("a_hang", "what_a_hung_worker", "a_slow_chunk_of_quick", "all_threads_hang"),
        *("threads_that_hang", "a_fork_made_at_the_start", "each_try_is_counted"),
    ],
    "processes": [
        *("the_parent_is_killed", "ctrl_c_just", "impatient_ctrl_c", "no_file_is_left"),
        *("close_from_another_thread", "no_thread_for_the_manager"),
    ],
    "cpython": ["2_a_child_of_multiprocessing", "8_an_unfinished_message"],
    "foreign": ["only_the_one_that_fails"],
    "docs": ["the_code_of_a_page_runs"],
    "skip": ["the_same_after", "streams", "batches_of_several_shards"],
    "logs": ["long_messages", "filters_of", "nothing_is_lost_when"],
    "limits": ["slots_in_a_control_group"],
    "shared_list": ["frames_of_polars", "workers_share_it"],
    "mistakes": ["none_among_the_samples_of_a_torch", "until_counts", "a_notebook_that_has_shown"],
    "chunks": ["slow_batches_end_the_chunks", "a_slow_batch_in_a_chunk"],
    "stats": [
        *("streams_are_counted", "the_verdict_names", "deaths_and_what_is_sent_again"),
        *("every_moment_of_the_loop", "what_is_between_epochs", "the_parts_add_up"),
        *("what_programs_compute", "waiting_for_a_processor", "what_comes_before_the_first"),
        *("the_timeline_has_all",),
    ],
    "torch": [
        *("the_order_is_torchs_with_workers", "state_with", "streams_in", "a_worker_init_fn"),
        *("timeout", "pinning", "a_dataset_that_changes"),
    ],
    "doctor": [
        *("a_healthy_loader", "a_sampler_that_is_the_limit", "a_cache_is_no_leak", "the_command"),
        *("workers_that_wait", "threads_and_one", "a_stream_has_its_shards", "settings_are"),
        *("the_step_decides", "all_that_a_dataset_may_keep", "a_data_loader_of_torchs_kind"),
        *("programs_that_a_dataset", "a_stream_of_torchs_kind", "what_grew_is_told"),
    ],
    "testing": [
        *("quickstart", "audio", "passes", "report", "a_worker_is_killed", "a_counter", "tensors"),
        *("what_a_killed_worker_takes_along", "several_workers_take_part", "the_id_of_the_worker"),
        *("global_generators", "the_order_of_a_set"),
    ],
}
"""Beginnings of names, in modules whose tests are mostly quick."""


def is_slow(module: str, name: str) -> bool:
    """Whether a test belongs to the slow ones by its module, its name or its parameters."""
    if module in SLOW_MODULES or name.startswith(tuple(SLOW_TESTS.get(module, ["\0"]))):
        return True
    parameters = name.partition("[")[2].rstrip("]")
    return module != "streams" and any(way in parameters for way in SLOW_WAYS)


def pytest_unconfigure() -> None:
    """A test that failed may have left a thread that the interpreter waits for at its end."""
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow; puts the tests with JAX last, since it must not be forked."""
    for item in items:
        if is_slow(item.path.stem.removeprefix("test_"), item.name.removeprefix("test_")):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name == "test_jax.py")


def require(name: str) -> Any:
    """Imports an optional module, or skips; where all must be there, it fails instead."""
    if os.environ.get("MINLOADER_REQUIRE_ALL"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Looks until the condition holds, and gives its value; at the deadline, whatever it is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def belongings() -> dict[str, set[Any]]:
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    children = psutil.Process().children(recursive=True)
    fds = {fd: _target(fd) for fd in os.listdir("/proc/self/fd")}
    return {
        "children": {child.pid for child in children if child.pid != tracker},
        "threads": set(threading.enumerate()),
        "descriptors": {(fd, target) for fd, target in fds.items() if target},
        "files": {str(path) for path in Path(tempfile.gettempdir()).glob("minloader-*")},
    }


def workers(loader: Any) -> list[Any]:
    """The worker processes that a loader has now, in the order of their numbers."""
    return [worker.process for worker in inspect(loader).workers]


@contextmanager
def dead_at_once(
    monkeypatch: pytest.MonkeyPatch, method: str, times: int = 1_000
) -> Iterator[list[int]]:
    """Kills so many processes as soon as they are started; gives their pids.

    They are dead before their parent has told them what to run.
    """
    pids: list[int] = []
    server: Any = forkserver._forkserver

    def die(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        pids.append(pid)

    def spawn(path: Any, args: Any, fds: Any) -> int:
        pid = spawnv(path, args, fds)
        if len(pids) < times and "spawn_main" in str(args):
            die(pid)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    def connect(fds: Any) -> Any:
        ends = connect_to_server(fds)
        if len(pids) < times:
            children = psutil.Process(server._forkserver_pid).children
            (child,) = eventually(children)
            die(child.pid)
            assert eventually(lambda: not children())
        return ends

    spawnv, connect_to_server = util.spawnv_passfds, forkserver.connect_to_new_process
    with monkeypatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", spawn)
        patch.setattr(forkserver, "connect_to_new_process", connect)
        try:
            yield pids
        finally:
            if method == "forkserver":
                server._stop()  # it is the standard library's to keep


def made_and_room(batches: Any) -> tuple[int, int]:
    """How many batches a prefetch has ready, and how many more its thread may make by now."""
    exchange = batches._exchange
    return exchange.ready.qsize(), exchange.room.qsize()


def _memory_group() -> tuple[Path, str] | None:
    """The control group of this process that limits memory, if it may be divided; its file."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, name = Path("/sys/fs/cgroup/memory", path.strip("/")), "memory.limit_in_bytes"
        elif not controllers:
            folder, name = Path("/sys/fs/cgroup", path.strip("/")), "memory.max"
            control = folder / "cgroup.subtree_control"
            if not control.exists() or "memory" not in control.read_text().split():
                continue
        else:
            continue
        if os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists():
            return folder, name
    return None


@pytest.fixture
def small_group() -> Iterator[tuple[Path, int]]:
    """A control group with little memory, for a process to enter; and how many bytes that is."""
    found, limit = _memory_group(), 300 << 20
    if found is None:
        pytest.skip("no control group for memory that may be divided")
    folder = found[0] / f"test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / found[1]).write_text(str(limit))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    yield folder, limit
    eventually(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.fixture(autouse=True, scope="session")
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What other runs on this machine leave is theirs."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))


@pytest.fixture(autouse=True, scope="session")
def room_for_shared_values() -> None:
    """Values of multiprocessing need it. Once made, it stays, by the standard library's design."""
    RawArray("b", 1 << 20)


@pytest.fixture(scope="module")
def foreign_processes() -> Iterator[ProcessPoolExecutor]:
    """An executor that a user brings. It survives the loaders of all tests of a module."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(int), pool.submit(int)]:  # so that both are started
            future.result()
        yield pool


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no process, thread, descriptor or file more than before."""
    resource_tracker.ensure_running()  # once started, it stays, by the standard library's design
    if "foreign-process" in request.node.name:
        request.getfixturevalue("foreign_processes")
    before = belongings()
    yield

    def left() -> dict[str, set[Any]]:
        now = belongings()
        if all(now[kind] <= before[kind] for kind in now):
            return {}
        gc.collect()  # some 0.1 s, which most tests need not take
        now = belongings()
        return {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}

    if left():  # else there is no need to look twice
        eventually(lambda: not left())
        assert left() == {}


EXECUTORS = {
    "inline": {"num_workers": 0},
    "thread": {"executor": "thread", "num_workers": 3},
    "process-1": {"num_workers": 1},
    "process-2": {"num_workers": 2},
    "foreign-process": {"executor": ProcessPoolExecutor, "num_workers": 2},
    "foreign-thread": {"executor": ThreadPoolExecutor, "num_workers": 2},
}


@contextmanager
def making(request: pytest.FixtureRequest) -> Iterator[Callable[..., Loader]]:
    """Gives a function that makes loaders on the executor that is the fixture's parameter."""
    options = dict(EXECUTORS[request.param])
    with ExitStack() as stack:
        if options.get("executor") is ProcessPoolExecutor:
            options["executor"] = request.getfixturevalue("foreign_processes")
        elif options.get("executor") is ThreadPoolExecutor:
            options["executor"] = stack.enter_context(ThreadPoolExecutor(2))

        def factory(*args: Any, **kwargs: Any) -> Loader:
            return stack.enter_context(Loader(*args, **(options | kwargs)))

        factory.name = request.param  # type: ignore[attr-defined]
        yield factory


@pytest.fixture(params=EXECUTORS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Loader]]:
    """Makes a Loader as the test says, on each of the executors in turn."""
    with making(request) as factory:
        yield factory
