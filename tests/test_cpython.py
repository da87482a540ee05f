"""What ``_pools/cpython.py`` mends is really so, and nothing else touches CPython's private parts.

A piece that the running CPython no longer needs makes its test fail: then the piece can go, as soon
as no supported version needs it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import trouble
from conftest import dead_at_once, eventually, in_threads, printed_by, python, variants
from helpers import Squares

import minloader
from minloader import BatchTimeout, Loader
from minloader._pools import cpython
from minloader._pools import processes as spawned

FOLDER = Path(minloader.__file__).parent
MODULE = FOLDER / "_pools" / "cpython.py"

# --- one module ----------------------------------------------------------------------------------

PRIVATE_TO = ("concurrent", "importlib", "multiprocessing", "threading")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Underscored names that a piece of code defines, or has as attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return set(filter(is_private, names))


def names_of_cpython() -> set[str]:
    library = Path(threading.__file__).parent
    paths = [library / "threading.py", *(library / "concurrent" / "futures").glob("*.py")]
    paths += (library / "multiprocessing").glob("*.py")
    return set().union(*(private_names(ast.parse(path.read_text())) for path in paths))


def touches(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Uses of some names, but for those of ``self``, of ``os``, of numpy's arrays, and for methods
    that the module defines itself.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = names - {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            text = ast.unparse(node)
            if text.split("._")[0] not in ("self", "cls", "super()", "os", "array"):
                yield text
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE_TO):
            yield from (each.name for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in names:
                yield ast.unparse(node)


def test_no_other_module_touches_private_parts():
    names = names_of_cpython()
    assert {"_processes", "_pending_work_items", "_popen", "_register_atexit"} <= names
    found = {
        str(path.relative_to(FOLDER)): list(touches(ast.parse(path.read_text()), names))
        for path in FOLDER.rglob("*.py")
    }
    own = found.pop("_pools/cpython.py")
    assert "threading._register_atexit" in own
    assert found.pop("_memory/forks.py") == ["lock._at_fork_reinit"]  # as the library's own
    # Until 3.12 nothing public does in a fork what CPython does itself from 3.13 on.
    assert set(found.pop("_worker/start.py")) <= {"atexit._clear", "atexit._run_exitfuncs"}
    assert {path: texts for path, texts in found.items() if texts} == {}


def derived_classes() -> Iterator[tuple[type, list[type]]]:
    """Classes of the package that derive from CPython's, and those."""
    paths = [*FOLDER.glob("_pools/*.py"), *FOLDER.glob("_worker/*.py"), FOLDER / "_prefetch.py"]
    for path in paths:
        parts = path.relative_to(FOLDER.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        for each in vars(importlib.import_module(name)).values():
            if isinstance(each, type) and each.__module__ == name:
                bases = [b for b in each.__mro__ if b.__module__.startswith(PRIVATE_TO)]
                if bases:
                    yield each, bases


def test_no_derived_class_uses_private_parts_of_its_base():
    """There ``self`` is CPython's too."""
    seen = set()
    for each, bases in derived_classes():
        seen.add(each.__qualname__)
        if Path(inspect.getfile(each)) == MODULE:
            continue
        own = private_names(ast.parse(textwrap.dedent(inspect.getsource(each))))
        theirs = [private_names(ast.parse(inspect.getsource(base))) for base in bases]
        assert own & set().union(*theirs) == set(), each
    assert {"Executor", "_Executor"} <= seen


# --- a context of ours ---------------------------------------------------------------------------


class OwnContext(type(get_context("spawn"))):  # type: ignore[misc]
    """A context that a user has made; the names of its processes are its own."""

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        return super().Process(*args, **kwargs, name="own")


def name(item: int) -> str:
    return multiprocessing.current_process().name


def test_a_context_of_the_users():
    with Loader(name, range(2), num_workers=1, mp_context=OwnContext()) as loader:
        assert list(loader) == ["own"] * 2


# --- what CPython does ---------------------------------------------------------------------------


class Unstarted:
    """Stands for a process, and knows what it would be told when it starts."""

    poll = None
    _start_method = "spawn"

    def __init__(self) -> None:
        self._popen = self

    def start(self) -> None:
        self.told = set(multiprocessing.spawn.get_preparation_data("any"))


def test_1_children_are_told_of_the_main_module(monkeypatch):
    # That of a process of pytest-xdist, which is started with "-c", lies in no file.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    told = {"init_main_from_name", "init_main_from_path"}
    assert told & set(cpython._get_preparation_data("any"))
    assert told & set(multiprocessing.spawn.get_preparation_data("any"))
    process: Any = Unstarted()
    cpython.start_worker(process)
    assert not (told | {"start_method"}) & process.told


def test_2_an_exit_waits_for_what_is_queued(tmp_path):
    """Both ways end; but without the piece all that was queued is done before."""
    code = """
import threading
{before}
from functools import partial
import trouble
from conftest import eventually
from minloader import Loader
from minloader._diagnosis.inspect import inspect
def work(item):
    trouble.wait_until({go!r})
    trouble.note({calls!r}, item)
loader = Loader(work, range(20), num_workers=1, prefetch_factor=8)
batches = iter(loader)
def unfinished():
    return [len(each.under_way.unfinished) for each in inspect(loader).executors]
assert eventually(lambda: 8 in unfinished())
threading.Timer(0.1, lambda: open({go!r}, "w").close()).start()
"""
    counts = []
    # The piece's own call is all that is left out: concurrent.futures must have made its own.
    without = "import concurrent.futures.process; threading._register_atexit = lambda f: None"
    for n, before in enumerate(["", without]):
        calls, go = tmp_path / f"calls{n}", tmp_path / f"go{n}"
        program = code.format(before=before, go=str(go), calls=str(calls))
        assert printed_by(program, options=["-W", "ignore"]) == ""
        counts.append(len(calls.read_text().split()) if calls.exists() else 0)
    assert counts[1] == 8
    assert counts[0] < 8


ENDS = {
    "global": ("", 0, ""),
    "cycle": ("cycle = [batches]; cycle.append(cycle)", 0, ""),
    "exit": ("sys.exit(3)", 3, ""),
    "error": ("raise OSError('planned')", 1, "OSError: planned\n"),
}


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("spawn", "global"),
        ("fork", "global"),
        ("forkserver", "global"),
        # What comes then is the same for any method.
        pytest.param("spawn", "cycle", marks=pytest.mark.slow),
        pytest.param("spawn", "exit", marks=pytest.mark.slow),
        pytest.param("spawn", "error", marks=pytest.mark.slow),
    ],
)
def test_2_a_child_of_multiprocessing_joins_its_children_first(tmp_path, method, end):
    """A loader that is still open there must not hang it, however it ends, nor say anything."""
    line, code, error = ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing
import sys
from minloader import Loader
def use():
    {"global batches" if end == "global" else ""}
    batches = iter(Loader(abs, range(1000), num_workers=2))
    print(next(batches), flush=True)
    {line}
if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=use)
    process.start()
    process.join()
    print(process.exitcode)
""")
    done = python(script, options=["-W", "ignore"])
    assert done.stdout == f"0\n{code}\n"
    assert done.stderr.endswith(error)
    assert done.stderr.count("Traceback") == bool(error)
    assert "ignored" not in done.stderr
    assert bool(done.stderr) == bool(error)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_3_a_start_fails_if_the_child_is_dead(monkeypatch, method):
    """cpython #118981"""
    process, worker = (get_context(method).Process(target=int) for _ in range(2))
    is_needed = method == "forkserver" or sys.version_info >= (3, 13, 8)
    if sys.version_info[:3] == (3, 14, 0):
        is_needed = method == "forkserver"
    with dead_at_once(monkeypatch, method) as pids:
        with pytest.raises(BrokenPipeError) if is_needed else nullcontext():
            process.start()
        cpython.start_worker(worker)
        assert worker.pid == pids[-1]
        assert worker.exitcode == -signal.SIGKILL
    if is_needed and method == "spawn":
        assert os.waitpid(pids[0], os.WNOHANG) == (pids[0], signal.SIGKILL)  # nobody has reaped it
    for each in (process, worker):
        if each.pid is not None:
            each.join()


def test_3_only_the_death_of_a_worker_is_no_error(monkeypatch):
    """A server that is gone, for instance, is one."""

    def fail(fds: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", fail)
    worker = get_context("forkserver").Process(target=int)
    with pytest.raises(BrokenPipeError):
        cpython.start_worker(worker)


def is_zombie(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


LOOKS: dict[str, Any] = {
    "exitcode": lambda process: process.exitcode,
    "is_alive": lambda process: process.is_alive(),
    "join": lambda process: process.join(),
    "active_children": lambda process: multiprocessing.active_children(),
}

pidfds = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no pidfds")


@pidfds
@pytest.mark.parametrize(
    ("method", "look"),
    [
        *(("spawn", look) for look in LOOKS),
        *(("fork", look) for look in LOOKS),
        ("forkserver", "join"),  # its children are no children of this process
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_4_who_looks_at_a_dead_child_reaps_it(method, look, monkeypatch):
    """So no signal for it goes by its pid."""
    process, worker = (get_context(method).Process(target=signal.pause) for _ in range(2))
    cpython.start_worker(worker)
    process.start()  # which looks at all children: none may have ended before
    for each in (process, worker):
        os.kill(each.pid, signal.SIGTERM)
    if method != "forkserver":
        assert eventually(lambda: is_zombie(process.pid) and is_zombie(worker.pid))
    for each in (process, worker):
        LOOKS[look](each)
    assert not is_zombie(process.pid)
    assert not is_zombie(worker.pid)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("another process has that pid"))
    with pytest.raises(ProcessLookupError):
        cpython.send_signal(worker, signal.SIGKILL)
    assert worker.exitcode == process.exitcode == -signal.SIGTERM
    for each in (process, worker):
        each.join()
    if method == "forkserver":
        multiprocessing.forkserver._forkserver._stop()


@pytest.mark.parametrize("has_pidfds", [pytest.param(True, marks=pidfds), False])
def test_4_a_signal_reaches_a_worker(has_pidfds, monkeypatch):
    if not has_pidfds:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    worker = get_context("spawn").Process(target=signal.pause)
    cpython.start_worker(worker)
    assert worker.exitcode is None
    cpython.send_signal(worker, signal.SIGKILL)
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        cpython.send_signal(worker, signal.SIGKILL)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pidfds), "after", "no pidfds"])
def test_4_somebody_else_has_reaped_a_worker(when, monkeypatch):
    """A plain child is then taken for one that lives."""
    if when == "no pidfds":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process, worker = (get_context("spawn").Process(target=int) for _ in range(2))
    process.start()
    os.waitpid(process.pid, 0)
    assert process.exitcode is None
    if when == "before":
        hold = cpython._hold
        monkeypatch.setattr(cpython, "_hold", lambda popen: (os.waitpid(popen.pid, 0), hold(popen)))
    cpython.start_worker(worker)
    if when != "before":
        os.waitpid(worker.pid, 0)
    worker.join()
    assert worker.exitcode == cpython.UNKNOWN
    process._popen.returncode = 0  # or the library waits for it for ever
    process.join()


@pidfds
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_4_two_threads_look_at_a_dead_child(method):
    """Each sees its code, however it is reaped."""
    for _ in range(20):
        worker = get_context(method).Process(target=os.abort)
        cpython.start_worker(worker)

        def look(worker: Any = worker) -> int | None:
            worker.join()
            code: int | None = worker.exitcode
            return code

        assert in_threads(*[look] * 4) == [-signal.SIGABRT] * 4
    if method == "forkserver":
        multiprocessing.forkserver._forkserver._stop()


def test_4_an_executor_reaps_a_worker_before_it_ends_it(tmp_path, monkeypatch):
    """terminate_broken() reads ``exitcode``."""
    events = []
    process = multiprocessing.process.BaseProcess
    exitcode: Any = vars(process)["exitcode"]

    def look(each: Any) -> int | None:
        events.append("exitcode")
        code: int | None = exitcode.fget(each)
        return code

    monkeypatch.setattr(process, "exitcode", property(look))
    monkeypatch.setattr(process, "terminate", lambda each: events.append("terminate"))
    broken_future(tmp_path / "never", lambda executor, futures: None)
    assert events[0] == ("exitcode" if sys.version_info >= (3, 15) else "terminate")


def wait_for(path: str) -> None:
    trouble.wait_until(path)


def broken_future(path: Path, before: Any) -> tuple[list[Any], list[Future[Any]]]:
    """Kills the worker of a plain executor; what ``before(executor, futures)`` does comes before.

    Returns:
        The types of errors that ended threads, and the futures.
    """
    errors: list[Any] = []
    hook = threading.excepthook
    threading.excepthook = lambda args: errors.append(args.exc_type)
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    try:
        futures = [executor.submit(os.getpid)]
        pid = futures[0].result()
        futures += [executor.submit(wait_for, str(path)) for _ in range(6)]
        assert eventually(futures[1].running)
        before(executor, futures)
        manager: Any = executor._executor_manager_thread
        (process,), tasks = executor._processes.values(), executor._call_queue
        os.kill(pid, signal.SIGKILL)
        manager.join(60)
        assert not manager.is_alive()
        process.join()  # as the manager thread would have done
        tasks.close()
    finally:
        threading.excepthook = hook
        executor.shutdown(wait=False)
    return errors, futures


def test_5_a_cancelled_future_ends_the_manager_thread(tmp_path):
    """cpython #107219"""

    def cancel(executor: Any, futures: list[Future[Any]]) -> None:
        assert futures[-2].cancel()

    errors, futures = broken_future(tmp_path / "never", cancel)
    is_needed = sys.version_info < (3, 12)
    assert errors == [InvalidStateError] * is_needed
    assert futures[-1].done() == (not is_needed)


def test_5_a_tolerant_future_keeps_what_it_has():
    future: Any = Future()
    future.__class__ = cpython._TolerantFuture
    future.cancel()
    future.set_exception(ValueError())
    with pytest.raises(CancelledError):
        future.result()


def test_6_an_executor_breaks_without_the_lock_of_submit(tmp_path):
    """cpython #109047"""
    is_free = []

    def look(executor: Any, futures: list[Future[Any]]) -> None:
        lock = executor._shutdown_lock

        def try_lock(future: Future[Any]) -> None:  # called from the walk over the tasks
            is_free.append(lock.acquire(blocking=False))
            if is_free[-1]:
                lock.release()

        futures[-1].add_done_callback(try_lock)

    errors, futures = broken_future(tmp_path / "never", look)
    assert errors == []
    assert isinstance(futures[-1].exception(), BrokenProcessPool)
    assert is_free == [sys.version_info < (3, 12, 1)]


def test_7_a_shutdown_forgets_the_manager_thread():
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    assert executor.submit(abs, -1).result() == 1
    (thread,) = (each for each in vars(executor).values() if isinstance(each, threading.Thread))
    executor.shutdown(wait=False)
    assert not any(isinstance(each, threading.Thread) for each in vars(executor).values())
    thread.join()


@pytest.mark.skipif(sys.version_info < (3, 12, 1), reason="it waits without a lock")
def test_7_a_manager_thread_waits_for_the_workers_with_the_lock_of_shutdown():
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    pid = executor.submit(os.getpid).result()
    lock, manager = executor._shutdown_lock, executor._executor_manager_thread
    os.kill(pid, signal.SIGSTOP)
    executor.shutdown(wait=False)
    assert eventually(lock.locked)
    assert not lock.acquire(timeout=0.5)
    os.kill(pid, signal.SIGKILL)
    manager.join()


@pytest.mark.timeout(60)
def test_7_closing_ends_a_worker_that_does_not_leave():
    """It is idle, and stands still; the manager thread waits for it when the loader is closed."""
    with Loader(abs, range(4), num_workers=2) as loader:
        loader.start()
        (executor,) = loader._shared.group.pools[0]._executors
        stopped, other = executor.workers
        os.kill(stopped.pid, signal.SIGSTOP)
        executor.leave(drop=False)
        assert eventually(other.has_ended)  # that thread has the lock from before this
    assert not any(worker.is_alive() for worker in executor.workers)


def send_half(path: str) -> bytes:
    trouble.DiesSending(path)(None)
    return bytes(2_000_000)


def test_7_a_manager_thread_that_cannot_start_is_taken_for_running(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                executor.submit(int)
        future = executor.submit(int)
        assert not executor._executor_manager_thread.is_alive()
        assert not future.done()
        executor._executor_manager_thread.start()
        assert future.result() == 0


def test_8_an_unfinished_message_is_waited_for(tmp_path):
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    future = executor.submit(send_half, str(tmp_path / "did"))
    (worker,) = executor._processes.values()
    results, manager = executor._result_queue, executor._executor_manager_thread
    worker.join()  # it has died, and its reply is in the pipe, as far as it goes
    manager.join(0.5)
    assert not future.done()
    results._writer.close()
    assert isinstance(future.exception(60), BrokenProcessPool)
    executor.shutdown()


def most_waited_for(executor: ProcessPoolExecutor, patch: pytest.MonkeyPatch) -> int:
    """Of how many files a poll object is made at most, while two workers make batches."""
    lengths = [0]

    def wait(files: list[Any], timeout: float | None = None) -> list[Any]:
        lengths.append(len(files))
        return real(files, timeout)

    real = multiprocessing.connection.wait
    with executor, patch.context() as patched:
        patched.setattr(multiprocessing.connection, "wait", wait)
        both = [executor.submit(os.getpid) for _ in range(2)]
        assert len(executor._processes) == len([each.result() for each in both])
        lengths[1:] = []  # the thread may wait before it is given another class
        assert [executor.submit(abs, n).result() for n in range(3)] == [0, 1, 2]
        return max(lengths)


def test_9_each_wait_makes_a_poll_object(monkeypatch):
    context = get_context("spawn")
    assert most_waited_for(ProcessPoolExecutor(2, mp_context=context), monkeypatch) == 4
    if sys.platform == "linux":
        assert most_waited_for(cpython.Executor(2, context), monkeypatch) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do without")
def test_9_a_worker_that_starts_meanwhile_is_waited_for():
    """It is added between the look at the workers and the count of them."""

    class Growing(dict[int, Any]):
        def values(self) -> Any:
            found = list(super().values())
            self[2] = SimpleNamespace(sentinel=ends[1])
            return found

    pipes = [os.pipe() for _ in range(3)]
    try:
        message, *ends = (reader for reader, _ in pipes)
        thread = SimpleNamespace(watched=-1, processes=Growing())
        thread.processes[1] = SimpleNamespace(sentinel=ends[0])
        for count in (1, 2):
            os.write(pipes[0][1], b"x")
            assert thread.watched != len(thread.processes)
            cpython._ManagerThread.watch_also(thread, [message])
            assert thread.watch.poll() == [(message, select.POLLIN)]
            assert thread.watched == count
    finally:
        for file in sum(pipes, ()):
            os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' pipes cannot be told")
def test_10_a_pipe_for_replies_holds_less_than_one():
    reply = bytes(300_000)

    def held(executor):
        with executor:
            queue = executor._result_queue  # of which nobody reads before the first task
            os.set_blocking(queue._writer.fileno(), False)
            return os.write(queue._writer.fileno(), reply)

    context = get_context("spawn")
    assert held(ProcessPoolExecutor(2, mp_context=context)) < len(reply)
    assert held(cpython.Executor(2, context)) == len(reply)


def test_4_who_looks_second_at_a_child_of_the_fork_server_finds_255(monkeypatch):
    wait, codes = multiprocessing.connection.wait, []
    each = get_context("forkserver").Process(target=os.abort)
    each.start()
    wait([each.sentinel])

    def look_in_between(files: Any, timeout: Any) -> Any:
        monkeypatch.undo()
        codes.append(each.exitcode)  # as another thread does
        return files

    monkeypatch.setattr(multiprocessing.connection, "wait", look_in_between)
    codes.append(each.exitcode)
    each.join()
    multiprocessing.forkserver._forkserver._stop()
    assert codes == [-signal.SIGABRT, 255]


ENDS_A_FORK = """
from concurrent.futures import ProcessPoolExecutor, process
from multiprocessing import get_context
{before}
import minloader._pools.cpython
with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
    executor.submit(int).result()
    wakeup = executor._executor_manager_thread_wakeup
    wakeup.wakeup = lambda: print("woken", flush=True)
    child = get_context("fork").Process(target=int)
    child.start()
    child.join()
    del wakeup.wakeup
"""

LETS_GO_IN_A_FORK = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import minloader._pools.cpython
executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
executor.submit(int).result()
wakeup = executor._executor_manager_thread_wakeup
{before}
wakeup.wakeup = lambda: print("woken", flush=True)
with open(os.devnull) if "{before}" else executor._shutdown_lock:
    if os.fork() == 0:
        del executor
        os._exit(0)
    os.wait()
del wakeup.wakeup
executor.shutdown()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("program", "without"),
    [
        (ENDS_A_FORK, "process._threads_wakeups.clear = int"),
        (LETS_GO_IN_A_FORK, "kept = executor._executor_manager_thread.executor_reference"),
    ],
)
def test_12_a_fork_wakes_the_manager_threads_of_its_parent(program, without):
    """When it ends, or lets go of an executor. It takes a lock for that, in some versions, which
    another thread may have had, and which nobody gives back there."""
    said = [
        printed_by(program.format(before=each), options=["-W", "ignore"]) for each in ("", without)
    ]
    assert said == ["", "woken\n"]


@pytest.mark.timeout(60)
def test_12_a_fork_looks_at_the_children_of_its_parent():
    """At ours it does not: another thread may have had the lock that takes."""
    program = """
import multiprocessing, os, threading
from minloader import Loader
with Loader(abs, range(2), num_workers=1) as loader:
    loader.start()
    (executor,) = loader._shared.group.pools[0]._executors
    locked, done = threading.Event(), threading.Event()
    def look():
        with executor.workers[0]._popen.looking:
            locked.set()
            done.wait()
    thread = threading.Thread(target=look)
    thread.start()
    locked.wait()
    if os.fork() == 0:
        print("in the fork", len(multiprocessing.active_children()), flush=True)
        os._exit(0)
    os.wait()
    done.set()
    thread.join()
    print("here", len(multiprocessing.active_children()))
"""
    assert printed_by(program, options=["-W", "ignore"]) == "in the fork 0\nhere 1\n"


def test_13_a_fork_beside_a_thread_warns_unless_it_is_ours():
    """What warns beside one of the user's is silent beside those of a loader."""
    program = """
import sys, threading
from minloader import Loader
release = threading.Event()
thread = threading.Thread(target=release.wait)
def use():
    loader = Loader(abs, range(3), num_workers=1, mp_context="fork")
    print(list(loader), flush=True)
    return loader
loaders = use(), use()
print("beside one of the user's", file=sys.stderr)
thread.start()
use()
release.set()
"""
    warns = ["-W", "default:This process:DeprecationWarning"]
    result = python(program, options=warns)
    assert (result.returncode, result.stdout) == (0, "[0, 1, 2]\n" * 3)
    assert ("use of fork()" in result.stderr) == (sys.version_info >= (3, 12))
    assert result.stderr.startswith("beside one of the user's\n"), result.stderr


@pytest.mark.parametrize("ours", [True, False])
def test_18_a_fork_asks_for_the_fork_server_of_its_parent(ours):
    program = """
import os
from multiprocessing import get_context
{ours}
def use():
    process = get_context("forkserver").Process(target=print, args=(1,))
    process.start()
    process.join()
if __name__ == "__main__":
    use()
    if os.fork() == 0:
        try:
            use()
        except ChildProcessError:
            print("no child")
        os._exit(0)
    os.wait()
    use()
"""
    imported = "import minloader._pools.cpython" if ours else ""
    said = printed_by(program.format(ours=imported), options=["-u", "-W", "ignore"])
    assert said == ("1\n1\n1\n" if ours else "1\nno child\n1\n")


@pytest.mark.parametrize("ours", [True, False])
def test_19_a_fork_finds_the_lock_of_the_resource_tracker_taken(ours):
    program = """
import os, signal, threading
from multiprocessing import get_context, resource_tracker
{ours}
def hold():
    with resource_tracker._resource_tracker._lock:
        held.set()
        forked.wait()
held, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(3)
    get_context("spawn").Lock()
    os._exit(0)
print(os.waitpid(pid, 0)[1])
forked.set()
"""
    imported = "import minloader._pools.cpython" if ours else ""
    said = printed_by(program.format(ours=imported), options=["-W", "ignore"])
    is_free = ours or hasattr(resource_tracker.ResourceTracker, "_after_fork_in_child")
    assert int(said) == (0 if is_free else signal.SIGALRM)


def test_no_public_name_tells_that_an_executor_is_broken():
    assert [each for each in dir(ProcessPoolExecutor) if "broken" in each] == []
    assert "broken" in dir(cpython.Executor)


def test_workers_are_listed_in_order():
    with Loader(Squares(20), num_workers=3) as loader:
        loader.start()
        assert len(list(loader)) == 20
        (executor,) = loader._shared.group.pools[0]._executors
        assert [type(each) for each in executor.workers] == [spawned.WorkerProcess] * 3
        pids = {worker.pid for worker in executor.workers}
        assert pids == set(executor._processes)


DAEMONIC = """
import functools, multiprocessing, sys
from minloader import Loader
def plain():
    multiprocessing.Process(target=int).start()
def in_worker(item):
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()  # a worker is not daemonic
    process.join()
    return item
def loader(method):
    with Loader(in_worker, [1, 2], mp_context=method) as batches:
        print(method, list(batches), multiprocessing.current_process().daemon)
def work(function):
    try:
        function()
    except AssertionError as error:
        print(error)
    sys.stdout.flush()
if __name__ == "__main__":
    loaders = [functools.partial(loader, method) for method in ("spawn", "fork", "forkserver")]
    for function in (plain, *loaders, plain):
        process = multiprocessing.get_context("spawn").Process(target=work, args=(function,))
        process.daemon = True
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def test_14_a_daemonic_process_may_have_no_children(tmp_path):
    """Ours follow it, as tests of killed parents show."""
    script = tmp_path / "script.py"
    script.write_text(DAEMONIC)
    refused = "daemonic processes are not allowed to have children"
    told = printed_by(script, options=["-W", "ignore"]).splitlines()
    loaders = [f"{method} [1, 2] True" for method in ("spawn", "fork", "forkserver")]
    assert told == [refused, *loaders, refused]


@pytest.mark.parametrize("is_ours", [True, False])
def test_15_a_child_imports_from_the_current_folder(is_ours, tmp_path):
    for name in ("signal", "random", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the real one')")
    program = """
import sys
import multiprocessing
from minloader import Loader
if len(sys.argv) > 1:
    print(list(Loader([1, 2], num_workers=2)))
else:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    print(process.exitcode)
"""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    done = python(script, *["ours"] * is_ours, cwd=tmp_path)
    assert done.stdout == ("[1, 2]\n" if is_ours else "1\n"), done.stderr
    assert ("not the real one" in done.stderr) != is_ours


@variants("waits", [True, False])
def test_16_a_fork_while_another_thread_imports(waits, monkeypatch, tmp_path):
    """What the worker imports is locked there for ever, unless the fork waits for the thread."""
    (tmp_path / "imported_late.py").write_text("import gates\ngates.begun.set()\ngates.go.wait(60)")
    monkeypatch.syspath_prepend(tmp_path)
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gates", SimpleNamespace(begun=begun, go=go))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: go.set())
    monkeypatch.setattr(cpython, "time", clock)
    if not waits:
        monkeypatch.setattr(cpython, "_is_importing_elsewhere", bool)

    def import_it(index: int) -> int:
        return len(importlib.import_module("imported_late").__name__)

    thread = threading.Thread(target=import_it, args=(0,), name="minloader-test")
    thread.start()
    try:
        assert begun.wait(60)
        options: dict[str, Any] = {"num_workers": 1, "mp_context": "fork", "retries": 0}
        with Loader(import_it, [0], timeout=None if waits else 1.0, **options) as loader:
            if waits:
                assert list(loader) == [13]
            else:
                with pytest.raises(BatchTimeout):
                    list(loader)
    finally:
        go.set()
        thread.join()
        sys.modules.pop("imported_late", None)


def test_16_a_fork_waits_for_an_import_once(monkeypatch):
    """It may never end: a program may run within an import."""
    looks = iter(range(100))
    monkeypatch.setattr(cpython, "_is_importing_elsewhere", lambda: next(looks) < 99)
    monkeypatch.setattr(cpython, "_patience", 0.01)
    for _ in range(2):
        with Loader(abs, [-1], num_workers=1, mp_context="fork") as loader:
            assert list(loader) == [1]
    assert next(looks) < 99
    assert cpython._patience == 0


class Drawing:
    """Draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getitem__(self, item: int) -> int:
        self.generator.random()
        return item


OWN = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("dataset", "lock"),
    [
        (abs, lambda: np.random.get_bit_generator().lock),
        (Drawing(OWN), lambda: OWN.bit_generator.lock),
        (lambda item: OWN.random() and item, lambda: OWN.bit_generator.lock),
    ],
    ids=["global", "of the dataset", "of a module"],
)
def test_17_a_fork_while_another_thread_draws_from_numpy(dataset, lock):
    """That thread has the generator's lock, which nobody gives back there."""
    draws, done = threading.Event(), threading.Event()

    def draw() -> None:
        with lock():
            draws.set()
            done.wait(60)

    thread = threading.Thread(target=draw, name="minloader-test")
    thread.start()
    try:
        assert draws.wait(60)
        options: dict[str, Any] = {"num_workers": 1, "mp_context": "fork"}
        with Loader(dataset, [1], timeout=2.0, retries=0, **options) as loader:
            assert list(loader) == [1]
    finally:
        done.set()
        thread.join()
