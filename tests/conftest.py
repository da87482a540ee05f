"""What every test stands on: nothing may be left behind, and every executor behaves alike."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

import minloader
from minloader import Loader, _formats
from minloader._diagnosis.inspect import inspect
from minloader._diagnosis.processors import processors
from minloader._worker import seeds

SLOW = pytest.mark.slow
"""What is left out unless it is asked for: variants of what another test shows, and soaks."""


def variants(
    names: str | tuple[str, ...], values: Iterable[Any], quick: int = 1, **options: Any
) -> Any:
    """``parametrize``, of whose values only the first ones are tested in any case."""
    parameters = []
    for n, value in enumerate(values):
        each = [value] if isinstance(names, str) else value
        parameters.append(pytest.param(*each, marks=[] if n < quick else SLOW))
    return pytest.mark.parametrize(names, parameters, **options)


PATH = [str(Path(minloader.__file__).parents[1]), str(Path(__file__).parent)]
"""Where programs that tests run find the package, and the modules of the tests."""

LEFT_OUT = pytest.StashKey[int]()
"""How many tests are too slow to be run unless that is asked for."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-xdist, whose option is among those of the project, all run in one process."""
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses", help="nothing: pytest-xdist is not there")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two for each processor, since most tests wait; but each may hold much memory."""
    return min(2 * processors(), 16)


def pytest_configure(config: pytest.Config) -> None:
    """What an environment may have set, and the tests cannot do with."""
    # Ctrl-C is tested. What a shell starts in the background ignores it, and so would workers.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Images of containers set it. Each of thousands of workers would compile the package.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        compiled = tempfile.TemporaryDirectory()
        os.environ["PYTHONPYCACHEPREFIX"] = compiled.name
        config.add_cleanup(compiled.cleanup)


def pytest_deselected(items: list[pytest.Item]) -> None:
    if all("slow" in item.keywords for item in items):  # else it was by other words
        items[0].config.stash[LEFT_OUT] = len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist, all of which collect alike, tells the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("left_out", 0)  # none by one that has crashed
    node.config.stash[LEFT_OUT] = max(told, node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says what was left out, and how to run it."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    slow = config.stash.get(LEFT_OUT, 0)
    if not (reasons or slow):
        return
    terminalreporter.section("left out")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:5} {reason}")
    if any(reason.endswith(" is not installed") for reason in reasons):
        terminalreporter.line("      CONTRIBUTING.md says how to install what is optional")
    if slow:
        terminalreporter.line(f"{slow:5} slow tests, variants and soaks: pytest -m slow runs them")


def pytest_unconfigure(config: pytest.Config) -> None:
    """A test that failed may have left a thread that the interpreter waits for at its end.

    A process of pytest-xdist is ended by the one that reports, when the others are done as well.
    """
    if hasattr(config, "workerinput"):
        return
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests with JAX come last, since it must not be forked."""
    items.sort(key=lambda item: item.path.name == "test_jax.py")


def lacking(what: str) -> NoReturn:
    """Skips a test for want of something to be installed; where all must be there, it fails."""
    reason = f"{what} is not installed"
    if os.environ.get("MINLOADER_REQUIRE_ALL"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def require(name: str) -> Any:
    """Imports an optional module, for want of which the test is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking(error.name or name)


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Looks until the condition holds, and gives its value; at the deadline, whatever it is."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return value


def python(
    program: str | Path,
    *arguments: object,
    before: Iterable[str] = (),
    options: Iterable[str] = (),
    env: Any = (),
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, which can import the package and the tests' modules.

    Args:
        program: its code, or the file with it; what begins with "-" is an option.
        arguments: of the program.
        before: words of another command, which runs this one.
        options: of the interpreter.
        env: what it has in its environment, beside what this process has.
        more: options of ``subprocess.run``.
    """
    as_it_is = isinstance(program, Path) or program.startswith("-")
    what = [str(program)] if as_it_is else ["-c", textwrap.dedent(program)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATH)} | dict(env)
    return subprocess.run(
        [*before, sys.executable, *options, *what, *map(str, arguments)],
        **{"capture_output": True, "text": True, "timeout": 250, "env": environment} | more,
    )


def complaints(done: subprocess.CompletedProcess[str]) -> str:
    """What a program wrote to stderr, but for the line of the log that a busy machine causes."""
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("a worker took "))


def printed_by(program: str | Path, *arguments: object, **options: Any) -> str:
    """What a program prints that must end well and quietly; see :func:`python`."""
    done = python(program, *arguments, **options)
    assert (done.returncode, complaints(done)) == (0, ""), done.stdout + done.stderr
    return done.stdout


def in_a_fork(function: Callable[[], Any]) -> str:
    """What a function returns, or the error that it raises, in a fork of this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            try:
                answer = repr(function())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(theirs, answer.encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What functions return that are called in threads at the same time."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result() for future in [threads.submit(each) for each in functions]]


def plain(value: Any) -> Any:
    """States or batches as they look after JSON."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def outcomes(batches: Iterator[Any], most: int = 1 << 60) -> list[Any]:
    """The batches that come, so many at most, and errors in the place of others."""
    found: list[Any] = []
    while len(found) < most:
        try:
            found.append(next(batches))
        except StopIteration:
            break
        except Exception as error:
            found.append(error)
    return found


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    """The items of all batches."""
    return [item for batch in batches for item in batch]


def lists(batches: Iterable[Any]) -> list[Any]:
    """Batches that are arrays, as lists."""
    return [batch.tolist() for batch in batches]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> set[int]:
    """Children of a process, and theirs. psutil would look at every process of the machine."""
    if not os.path.exists("/proc/thread-self/children"):  # as this kernel was built
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found = set()
    with suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found |= {int(child), *descendants(int(child))}
    return found


def belongings() -> dict[str, set[Any]]:
    """What there is now of this process, but for what the standard library keeps by design."""
    kept = [getattr(resource_tracker._resource_tracker, "_pid", None)]
    kept += vars(forkserver._forkserver).values()  # its process, and what it is held alive by
    # Twice, since a child that ends meanwhile may hide the next one from whoever looks.
    children = descendants(os.getpid()) | descendants(os.getpid())
    fds = {fd: _target(fd) for fd in os.listdir("/proc/self/fd") if int(fd) not in kept}
    return {
        "children": {child for child in children if child not in kept},
        "threads": set(threading.enumerate()),
        "descriptors": {(fd, target) for fd, target in fds.items() if target},
        "files": {str(path) for path in Path(tempfile.gettempdir()).glob("minloader-*")},
    }


def workers(loader: Any) -> list[Any]:
    """The worker processes that a loader has now, in the order of their numbers."""
    return [worker.process for worker in inspect(loader).workers]


def slots_of(loader: Any) -> Any:
    """The shared memory of a loader's first pool; None where batches need or want none."""
    return inspect(loader).group.pools[0].slots


def leased_slots(loader: Any) -> list[Any]:
    """The slots of the first pool whose memory batches still use."""
    return list(slots_of(loader)._leased)


def has_worked(loader: Any) -> bool:
    """Whether a worker of an executor that is not broken has finished a task."""
    with suppress(ValueError):  # one was ended just now, by another thread
        for executor in inspect(loader).executors:
            beats = map(executor.heartbeats.last, range(len(executor.workers)))
            if not executor.broken and any(each.began == math.inf for each in beats):
                return True
    return False


def losses(loader: Any) -> int:
    """How many workers were lost, of executors that are buried by now."""
    return inspect(loader).group.replaced


def have_come(batches: Any) -> bool:
    """Whether a task of an iterator has come back, and was not looked at."""
    tasks = [task for lane in batches.epoch.lanes for task in lane.tasks]
    return any(task.ticket is not None and task.ticket.is_done for task in tasks)


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
def for_ray() -> Iterator[dict[str, str]]:
    """Environment variables for Ray: it calls nobody, and its sockets have short paths."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
        }


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


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector comes when it is called, and sees what the test makes.

    What earlier tests left would have to be collected more than once: finalizers make garbage.
    """
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def turns_given_back() -> int:
    """Gives back the turn to make batches in this process; how often this thread had taken it."""
    times = 0
    while seeds._lock._is_owned():
        seeds._lock.release()
        times += 1
    return times


@pytest.fixture(autouse=True)
def turn_given_back() -> Iterator[None]:
    """After each test the turn to make batches in this process is nobody's, and waited for."""
    patience = seeds.patience
    yield
    seeds.patience = patience  # a busy machine may have used it up
    assert turns_given_back() == 0


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Each test is a program of its own to the lines of the log that are said once."""
    _formats.said.clear()


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
        assert left() == {}, psutil.Process().children(recursive=True)


@pytest.fixture
def quick_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers come from the fork server in place of "spawn", in a fourth of the time.

    For modules to whose subject it is all the same how a worker starts, but for tests that have
    "spawn" among their parameters.
    """
    if "spawn" in request.node.name:
        return

    def choose(method: str) -> Any:
        return get_context("forkserver" if method == "spawn" else method)

    monkeypatch.setattr("minloader._arguments.get_context", choose)


WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "threads": {"num_workers": 2, "executor": "thread"},
    "processes": {"num_workers": 2, "mp_context": "forkserver"},
}
"""Where batches are made, as options of a loader, without an executor of the user's."""

EXECUTORS = {
    "inline": {"num_workers": 0},
    "thread": {"executor": "thread", "num_workers": 3},
    "process-1": {"num_workers": 1},
    "process-2": {"num_workers": 2, "mp_context": "forkserver"},
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


@pytest.fixture(
    params=[pytest.param(name, marks=SLOW if name == "process-1" else []) for name in EXECUTORS]
)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Loader]]:
    """Makes a Loader as the test says, on each of the executors in turn."""
    with making(request) as factory:
        yield factory
