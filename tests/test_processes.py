"""Workers are ordinary processes, and nothing of them is left, however it ends."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from children import (
    RELEASE,
    Big,
    Large,
    crash_at_exit,
    register_exit,
    run_loader,
    run_pool,
    run_process,
    run_subprocess,
    wait_for_release,
)
from conftest import (
    PATH,
    alive,
    belongings,
    eventually,
    in_a_fork,
    in_threads,
    printed_by,
    python,
    require,
    variants,
    workers,
)
from helpers import Gate, Squares, Whereabouts

import minloader
from minloader import Loader
from minloader._diagnosis.inspect import inspect
from minloader._pools import fork_server
from minloader._pools.processes import WorkerProcess
from minloader._pools.ticket import Bell
from minloader._worker import lifetimes, signals
from minloader._worker.messages import TaskMessage

pytestmark = pytest.mark.usefixtures("quick_starts")

SPAWN = multiprocessing.get_context("spawn")
"""For workers with nothing of the fork server's: it has an environment of its own, and what it
forks calls no exit handlers."""

AT_LAST = 60.0
"""Seconds within which everything must be gone: two are promised, on a machine that is not busy.
What is left here would wait for ten minutes."""


# --- what a worker may do --------------------------------------------------------------------


@variants(
    ("work", "expected"),
    [
        (run_subprocess, ["0", "3", "6", "9"]),
        (run_process, [0, 3, 6, 9]),
        (run_pool, [[], [0], [0, 3], [0, 3, 6]]),
        (run_loader, [[], [0], [0, 3], [0, 3, 6]]),
    ],
)
def test_a_worker_starts_processes_of_its_own(work, expected):
    with Loader(work, range(4), num_workers=2) as loader:
        assert list(loader) == expected


SETTINGS = """
import decimal, logging, multiprocessing, sys
import numpy as np
from minloader import Loader

logging.disable()  # on a busy machine a start may take long, and that is told

def settings(item):
    context = decimal.getcontext()
    found = [repr(context).split(", flags")[0], repr(context).split("traps")[1]]
    return [*found, sorted(np.geterr().items()), sys.getrecursionlimit()]

def check(**options):
    (expected,) = Loader(settings, [0], num_workers=0)
    with Loader(settings, range(4), **options) as loader:
        assert list(loader) == [expected] * 4, (options, list(loader), expected)

context = decimal.Context(prec=50, rounding=decimal.ROUND_UP, traps=[decimal.Inexact])
decimal.setcontext(context)
np.seterr(divide="raise", under="print")
sys.setrecursionlimit(4321)
check(executor="thread")
for method in multiprocessing.get_all_start_methods():
    check(num_workers=2, mp_context=method)
print("well")
"""


def test_what_was_set_in_libraries_holds_in_workers():
    """In one that dies, too, since all get the same."""
    assert printed_by(SETTINGS, options=["-W", "ignore"]) == "well\n"


def test_what_the_script_sets_holds_where_a_module_sets_it_otherwise(tmp_path):
    """A worker imports the module when the settings are there."""
    (tmp_path / "sets_others.py").write_text(
        """
import decimal, sys
import numpy as np
decimal.getcontext().prec = 10
np.seterr(all="print")
sys.setrecursionlimit(5000)
def settings(item):
    return decimal.getcontext().prec, np.geterr()["divide"], sys.getrecursionlimit()
"""
    )
    program = """
import decimal, sys
import numpy as np
from minloader import Loader
import sets_others
decimal.getcontext().prec = 5
np.seterr(all="raise")
sys.setrecursionlimit(3000)
print(*Loader(sets_others.settings, [0], num_workers=1))
"""
    assert printed_by(program, cwd=tmp_path) == "(5, 'raise', 3000)\n"


@pytest.mark.parametrize("users", [None, "3"])
def test_a_worker_computes_in_one_thread(monkeypatch, users):
    """Unless the user says how many there are to be."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    with Loader(lambda item: os.environ["OMP_NUM_THREADS"], [0], mp_context=SPAWN) as loader:
        assert list(loader) == [users or "1"]
    assert os.environ.get("OMP_NUM_THREADS") == users


def test_torch_in_a_worker(monkeypatch):
    """It computes in one thread, and has the default type of the calling process."""
    torch = require("torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def look(item: int) -> Any:
        import torch

        return torch.get_num_threads(), str(torch.tensor(1.0).dtype)

    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Loader(look, [0], mp_context=SPAWN) as loader:
            assert list(loader) == [(1, "torch.float64")]
    finally:
        torch.set_default_dtype(former)


def test_a_function_that_numpy_calls_at_errors_stays_here():
    import numpy as np

    def divide(item: int) -> Any:
        return np.ones(1) / np.zeros(1)

    former = np.seterrcall(print)
    try:
        with (
            np.errstate(divide="call"),
            pytest.warns(RuntimeWarning, match="divide by zero"),
            Loader(divide, [0]) as loader,
        ):
            assert list(loader) == [np.inf]
    finally:
        np.seterrcall(former)


def test_nothing_is_imported_for_settings():
    program = """
import sys
from minloader import Loader
def look(item):
    import sys
    before = [name in sys.modules for name in ("numpy", "torch")]
    import decimal
    return before, str(decimal.Decimal(1) / 3)[:9]
print(*Loader(look, [0]))
import decimal
decimal.getcontext().prec = 5
print(*Loader(look, [0]))
"""
    none = [False, False]
    assert printed_by(program) == f"{(none, '0.3333333')}\n{(none, '0.33333')}\n"


AT_A_TERMINAL = """
import fcntl, os, subprocess, sys, termios
from minloader import Loader
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
PROGRAMS = [
    ["stty", "-F", "/dev/tty", "echo"],  # as ffmpeg or ssh does
    ["sh", "-c", "read line"],
    ["sh", "-i", "-c", "exit 3"],  # it asks until it is in the foreground
]
def touch(item):
    if item < len(PROGRAMS):
        return subprocess.run(PROGRAMS[item], stderr=subprocess.DEVNULL).returncode
    try:
        with open("/dev/tty") as terminal:
            return terminal.readline()
    except OSError as error:
        return error.strerror
with Loader(touch, range(4), num_workers=1, mp_context=sys.argv[1]) as loader:
    print(list(loader))
"""


@variants("method", multiprocessing.get_all_start_methods())
def test_a_worker_that_touches_the_terminal_is_not_stopped(method):
    ours, theirs = os.openpty()
    try:
        program = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", AT_A_TERMINAL, method],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(PATH)},
            stdin=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            told, _ = program.communicate(timeout=AT_LAST)
        finally:
            program.kill()
            program.wait()
    finally:
        os.close(ours)
        os.close(theirs)
    assert told == "[1, 1, 3, 'No such device or address']\n"


def test_a_fork_server_imports_what_the_job_needs(tmp_path, monkeypatch):
    """Once: for a worker, for the one that replaces it, and for those of the next loader."""
    (tmp_path / "heavy.py").write_text(
        """
import os
with open(os.environ["IMPORTS"], "a") as file:
    print(os.getpid(), file=file)
class Dataset:
    def __getitem__(self, item):
        if item == 3 and not os.path.exists(os.environ["DIED"]):
            open(os.environ["DIED"], "x").close()
            os.kill(os.getpid(), 9)
        return os.getppid(), os.environ["OMP_NUM_THREADS"]
"""
    )
    code = """
import os, sys, threading
from multiprocessing import forkserver, set_forkserver_preload
from minloader import Loader
from heavy import Dataset
set_forkserver_preload(["colorsys"])  # what the user asks for is kept
print("main runs")
for num_workers in (1, 2):
    with Loader(Dataset(), range(8), num_workers=num_workers, mp_context="forkserver") as loader:
        (server, threads), = set(loader)
def modules(item):
    import sys
    return "colorsys" in sys.modules
with Loader(modules, [0], mp_context="forkserver") as loader:
    assert list(loader) == [True]
imports = list(map(int, open(os.environ["IMPORTS"])))
assert imports == [os.getpid(), server], (imports, os.getpid(), server)
assert threads == "1" and "OMP_NUM_THREADS" not in os.environ
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = {name: str(tmp_path / name) for name in ("IMPORTS", "DIED")}
    # Older fork servers look for modules here, not beside the script.
    environment["PYTHONPATH"] = os.pathsep.join([*PATH, str(tmp_path)])
    done = python(script, env=environment)
    assert (done.stdout, done.stderr.count("Error")) == ("main runs\n", 0), done.stderr


def test_a_fork_server_imports_what_the_modules_of_the_job_import(monkeypatch):
    """A module beside the script may not be found there, but what it imports is."""

    class Context:
        def set_forkserver_preload(self, names: list[str]) -> None:
            self.names = names

    context: Any = Context()
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", int)
    fork_server.start_fork_server(context, [__name__, "__main__"], seed=0)
    needed = {__name__, "numpy", "psutil", "pytest", "minloader", "minloader._worker.logs"}
    assert needed <= set(context.names)
    assert not {"os", "threading", "__main__"} & set(context.names)


def test_a_forked_worker_has_nothing_of_ours_to_import():
    """It may be another user by then, who may not read our files."""
    found = printed_by("""
import sys
from minloader import Loader
with Loader(lambda _: set(sys.modules), [0], num_workers=1, mp_context="fork") as loader:
    (modules,) = loader
print(modules - set(sys.modules))
""")
    assert found == "set()\n"


def test_a_forked_worker_has_what_reads_streams_before_the_first_epoch():
    found = printed_by("""
import sys
from minloader import Loader
class Stream:
    def __iter__(self):
        yield set(sys.modules)
with Loader(Stream(), num_workers=1, mp_context="fork") as loader:
    had = set(sys.modules)
    loader.start()
    (modules,) = loader
print([name for name in modules - had if "stream" in name])
""")
    assert found == "[]\n"


def test_a_fork_server_has_imported_what_reads_streams():
    """Its workers share that, and would otherwise import it each."""

    def has(item: Any) -> bool:
        return "minloader._worker.stream_worker" in sys.modules

    with Loader(has, [0], num_workers=1, mp_context="forkserver") as loader:
        assert list(loader) == [True]


class Pickled:
    """Calls a function when it is pickled."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        self.function()
        return int, ()


@variants("thread", ["manager", "feeder"])
def test_a_loader_is_collected_in_a_thread_that_serves_its_workers(tmp_path, thread, no_collector):
    """The garbage collector comes in any thread, also in the executor's own: another one closes."""
    gate, dropped, collected = tmp_path / "gate", threading.Event(), threading.Event()

    def collect(future: Any = None) -> None:
        dropped.wait(60)
        gc.collect()
        collected.set()

    loader = Loader(Squares(), range(1000), num_workers=2)
    batches = iter(loader)
    next(batches)
    pids = [worker.pid for worker in inspect(loader).workers]
    if thread == "manager":
        item = Gate(str(gate)).__getitem__
        inspect(loader).executors[-1].submit(item, 0).add_done_callback(collect)
    else:
        inspect(loader).executors[-1].submit(print, Pickled(collect))
    cycle: list[Any] = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    dropped.set()
    gate.touch()
    assert collected.wait(60)
    assert eventually(lambda: not any(map(alive, pids)))


# --- the dataset is serialized once and shared -------------------------------------------------


@pytest.mark.slow
def test_the_dataset_is_serialized_once_and_not_copied():
    dataset = Big()
    with Loader(dataset, range(0, 80_000, 100), num_workers=4) as loader:
        for _ in range(2):
            batches = list(loader)
            assert {(total, size) for _, total, size in batches} == {(8.0, 50_000_000)}
        pids = [process.pid for process in workers(loader)]
        assert len(pids) == 4
        assert Big.serialized == 1
        assert (dataset.array == 1).all()
        pss = [psutil.Process(pid).memory_full_info().pss for pid in pids]
        # One copy is 450 MB; the rest depends on who else has the same libraries mapped.
        assert sum(pss) < 400e6, pss


# --- nothing is left ---------------------------------------------------------------------------

PROGRAM = """
import json, os, signal, subprocess, sys, time
{before}
from minloader import Loader

def stuck(folder):
    sleeps = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
        # Of a name that looks like the end of one, in /proc.
        subprocess.Popen(["sh", "-c", "echo 'a) b' > /proc/self/comm; sleep 600 & sleep 600"]),
    ]
    path = os.path.join(folder, str(os.getpid()))
    with open(path + ".tmp", "w") as file:
        json.dump([os.getpid(), *(s.pid for s in sleeps)], file)
    os.rename(path + ".tmp", path + ".json")
    {hang}

loader = Loader(stuck, [sys.argv[1]] * 4, num_workers=2)
batches = iter(loader)
while len([n for n in os.listdir(sys.argv[1]) if n.endswith(".json")]) < 2:
    time.sleep(0.01)
{end}
"""

HANGS = {
    "sleeping": "time.sleep(600)",
    "waiting": "sleeps[0].wait()",
    # When its child is killed it starts another at once, in a session of its own. One that
    # escaped would keep the program's stderr open.
    "starting anew": (
        "while True: subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
    ),
    "waiting for a lock": "import threading; threading.Event().wait()",
}


def run_program(
    folder: Path, end: str, hang: str = "sleeping", before: str = ""
) -> tuple[subprocess.Popen[str], list[int]]:
    """Runs the program until its workers are stuck; returns it and all pids that must go."""
    code = PROGRAM.format(end=end, hang=HANGS[hang], before=before)
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(minloader.__file__).parents[1])},
    )

    def stuck() -> bool:
        return len(list(folder.glob("*.json"))) == 2 or program.poll() is not None

    assert eventually(stuck)
    pids = [pid for path in folder.glob("*.json") for pid in json.loads(path.read_text())]
    for pid in list(pids):
        if alive(pid):
            pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return program, sorted(set(pids))


def assert_gone(program: subprocess.Popen[str], pids: list[int]) -> tuple[int, str]:
    """All of them end within the promise; gives the program's exit code and errors."""
    try:
        _, errors = program.communicate(timeout=AT_LAST)
        left = eventually(lambda: not any(map(alive, pids)))
        assert left, [pid for pid in pids if alive(pid)]
        return program.returncode, errors
    finally:
        for pid in (program.pid, *pids):  # a failing test must not leave them either
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        program.wait()


@variants("hang", HANGS)
@variants("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], quick=2)
def test_the_parent_is_killed(tmp_path, number, hang):
    """Or Ctrl-C is pressed at its terminal. No file is left, though files need names here."""
    folder, temporary = tmp_path / "pids", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    named = f"del os.memfd_create; import tempfile; tempfile.tempdir = {str(temporary)!r}"
    program, pids = run_program(folder, "next(batches)", hang, before=named)
    files = {path.name[:10] for path in temporary.iterdir()}
    assert len(pids) >= 8
    send = os.killpg if number == signal.SIGINT else os.kill
    send(program.pid, number)
    code, errors = assert_gone(program, pids)
    assert code == -number
    assert files == {"minloader-"}, errors
    assert list(temporary.iterdir()) == []
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        return
    # The standard library's tracker clears the executor's semaphores away, and says so.
    assert "Traceback" not in errors
    assert "leaked semaphore" in errors or not errors


def test_the_parent_is_killed_while_its_workers_are_stopped(tmp_path):
    """The kernel then sends them SIGHUP (POSIX: a stopped group that has become an orphan).

    They would die of it, and what they started outside of their groups would live on.
    """
    program, pids = run_program(tmp_path, "next(batches)")
    leaders = [json.loads(path.read_text())[0] for path in tmp_path.glob("*.json")]
    for pid in leaders:
        os.kill(pid, signal.SIGSTOP)
    threads = [psutil.Process(each.id) for pid in leaders for each in psutil.Process(pid).threads()]
    assert eventually(lambda: {each.status() for each in threads} == {psutil.STATUS_STOPPED})
    program.send_signal(signal.SIGKILL)
    assert_gone(program, pids)


def test_a_worker_waits_until_its_parent_is_gone(monkeypatch):
    """Its pipe is closed before: what is stopped in between is made to go on by the kernel."""
    parent = subprocess.Popen(["sleep", "600"])
    sentinel, writer = os.pipe()
    os.close(writer)
    waited_for: list[list[int]] = []
    has_waited = threading.Event()
    was_alive: list[bool] = []
    wait = multiprocessing.connection.wait

    def noted(handles: list[int], timeout: float | None = None) -> Any:
        waited_for.append(handles)
        if len(waited_for) == 2:
            has_waited.set()
        return wait(handles, timeout)

    def clean_up() -> None:
        was_alive.append(alive(parent.pid))
        has_waited.set()

    monkeypatch.setattr(multiprocessing.connection, "wait", noted)
    monkeypatch.setattr(lifetimes, "LONGEST_END", AT_LAST)
    for name in ("_end_from_outside", "kill_descendants", "kill_group"):
        monkeypatch.setattr(lifetimes, name, lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda _: None)
    seen = SimpleNamespace(pid=parent.pid, sentinel=sentinel)
    watchdog = threading.Thread(target=lifetimes._watch, args=(seen, clean_up))
    watchdog.start()
    assert has_waited.wait(AT_LAST)
    parent.kill()
    watchdog.join()
    parent.wait()
    for handle in waited_for[0]:
        os.close(handle)
    assert was_alive == [False]


def test_the_parent_is_killed_while_a_fork_of_it_lives(tmp_path):
    """The fork holds every pipe of the parent open, so that no end of file tells of its death."""
    end = """
fork = os.fork()
if fork == 0:
    os.close(1), os.close(2)
    signal.alarm(600)
    signal.pause()
with open(os.path.join(sys.argv[1], "fork"), "w") as file:
    print(fork, file=file)
next(batches)"""
    program, pids = run_program(tmp_path, end)
    path = tmp_path / "fork"
    fork = int(eventually(lambda: path.exists() and path.read_text().strip()))
    program.kill()
    try:
        assert eventually(lambda: not any(map(alive, pids)))
    finally:
        for pid in filter(alive, [fork, *pids]):
            os.kill(pid, signal.SIGKILL)
        program.communicate()


def test_a_process_starts_nothing_while_its_descendants_are_looked_up(monkeypatch):
    listdir, seen = os.listdir, []

    def stopped(sleep: Any) -> bool:
        return bool(psutil.Process(sleep.pid).status() == psutil.STATUS_STOPPED)

    def look(folder: str) -> list[str]:
        if folder == "/proc":
            seen.append(eventually(lambda: all(map(stopped, sleeps))))
        return listdir(folder)

    sleeps = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", look)
        signals.kill_trees({sleep.pid: sleep.send_signal for sleep in sleeps})
    assert [sleep.wait() for sleep in sleeps] == [-signal.SIGKILL] * 2
    assert seen
    assert all(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_worker_is_stopped_before_it_is_looked_at_when_its_parent_has_vanished():
    """Else its threads might start a program just then, in a session of its own, that stays."""
    program = """
import os, psutil, subprocess
from types import SimpleNamespace
from conftest import eventually
from minloader._worker import lifetimes, signals
names = signals.names
worker = os.getpid()
def look(folder):
    if folder == "/proc":
        is_other = os.getpid() != worker
        print(is_other and eventually(lambda: psutil.Process(worker).status() == "stopped"))
    return names(folder)
signals.names = look
os.setpgid(0, 0)
nowhere = subprocess.DEVNULL
sleep = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=nowhere, stderr=nowhere)
print(sleep.pid)
gone, end = os.pipe()
os.close(end)
lifetimes._watch(SimpleNamespace(sentinel=gone, pid=worker), lambda: print("clean"))
"""
    done = python(program, options=["-u"])
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    pid, *said = done.stdout.split()
    assert said == ["clean", "True"]
    assert eventually(lambda: not alive(int(pid)))


def test_ctrl_c_in_a_start_of_the_fork_server_finds_no_variable_set(monkeypatch):
    """A handler that raises just as one is taken away would leave it set for good."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seen = []
    press = partial(signal.raise_signal, signal.SIGINT)
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", press)
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("PYTHONHASHSEED" in os.environ))
    try:
        fork_server.start_fork_server(multiprocessing.get_context("forkserver"), [], 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [False]


def test_a_process_that_was_stopped_is_killed_when_ctrl_c_comes():
    def interrupt(folder: str) -> list[str]:
        raise KeyboardInterrupt

    sleep = subprocess.Popen(["sleep", "600"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", interrupt)
        with pytest.raises(KeyboardInterrupt):
            signals.kill_trees({sleep.pid: sleep.send_signal})
    assert sleep.wait() == -signal.SIGKILL


def test_impatient_ctrl_c(tmp_path):
    """Pressed again and again, while the loader is being closed and while the program exits."""
    end = "with loader:\n    next(batches)"
    program, pids = run_program(tmp_path, end)

    def ended() -> bool:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGINT)
        return program.poll() is not None

    eventually(ended)
    assert_gone(program, pids)


def test_ctrl_c_while_workers_start():
    """They are hit by the terminal's signal before they have a process group of their own."""
    code = """
import os, signal, time
from minloader import Loader
loader = Loader(str, range(4), num_workers=4)
loader.start()
for _ in range(20):
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(0.02)
    except KeyboardInterrupt:
        pass
print(list(loader))
"""
    assert printed_by(code, start_new_session=True) == "['0', '1', '2', '3']\n"


INTERRUPTED_CLOSE = """
import threading
from minloader._pools import processes as spawned
kill = spawned.kill_trees
def interrupted(pids):
    spawned.kill_trees = kill
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    return kill(pids)
spawned.kill_trees = interrupted
"""
"""Ctrl-C just when the loader is closed: the exit would wait for batches that are left."""


@variants(
    ("end", "code", "error"),
    [
        ("", 0, ""),
        (f"{INTERRUPTED_CLOSE}loader.close()", -signal.SIGINT, "KeyboardInterrupt\n"),
        (
            INTERRUPTED_CLOSE
            + "try: loader.close()\nexcept KeyboardInterrupt: del batches, loader",
            *(0, ""),
        ),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('main failed')", 1, "ValueError: main failed\n"),
        ("loader.close(); print('closed')", 0, ""),
        ("with loader: pass", 0, ""),
        ("del batches, loader", 0, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("os._exit(4)", 4, ""),
    ],
    quick=3,
)
def test_the_program_ends(tmp_path, end, code, error):
    program, pids = run_program(tmp_path, end)
    status, errors = assert_gone(program, pids)
    assert status == code
    assert errors.endswith(error)
    assert errors.count("Traceback") == bool(error)


def test_threads_do_not_hold_up_the_exit(tmp_path):
    code = """
import threading
from minloader import Loader
begun = threading.Event()
def stuck(item):
    begun.set()
    threading.Event().wait()
loader = Loader(stuck, range(4), num_workers=2, executor='thread')
batches = iter(loader)
begun.wait()
"""
    assert printed_by(code) == ""


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_close_from_another_thread_while_next_waits(executor, tmp_path, monkeypatch):
    """The wait ends, with the reason, and no new workers are started for what is left.

    At once, also where no task waits for a thread.
    """
    monkeypatch.setattr("minloader._pools.processes.PATIENCE", 2 * AT_LAST)
    paths = [tmp_path / str(i) for i in range(2 if executor == "thread" else 9)]
    loader = Loader(wait_for_release, paths, num_workers=2, executor=executor)
    with ThreadPoolExecutor(1) as consumer:
        waiting = consumer.submit(next, iter(loader))
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        loader.close()
        with pytest.raises(RuntimeError, match="this Loader is closed"):
            waiting.result(AT_LAST)
    if executor == "process":  # a consumer that was just past the check
        ticket = inspect(loader).group.pools[0].submit(TaskMessage(0, 0, []), Bell())
        assert ticket.is_done
        assert "closed" in str(ticket.error)
    RELEASE.set()
    RELEASE.clear()


def test_a_loader_in_the_for_statement_lives_as_long_as_the_loop():
    batches = []
    for batch in Loader(Squares(8), num_workers=1, prefetch_factor=1):
        gc.collect()
        batches.append(batch)
    assert batches == [i * i for i in range(8)]


@pytest.mark.parametrize("leave", [register_exit, crash_at_exit])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_worker_leaves(tmp_path, leave, method):
    """Exit handlers run, and what the dataset left running is killed, also where they crash."""
    with Loader(leave, [str(tmp_path)], num_workers=1, mp_context=method) as loader:
        (child,) = loader
    assert leave is crash_at_exit or (tmp_path / "left").exists()
    assert eventually(lambda: not alive(child))


def test_a_worker_leaves_while_another_thread_reaps_it(tmp_path, monkeypatch):
    """Its exit code is not known then."""
    with Loader(crash_at_exit, [str(tmp_path)], num_workers=1) as loader:
        (child,) = loader
        monkeypatch.setattr(WorkerProcess, "exitcode", None, raising=False)
    assert eventually(lambda: not alive(child))


def test_what_is_just_being_started_is_killed(monkeypatch):
    """Whoever starts a program may end before the program has its environment."""
    monkeypatch.setattr(signals, "LONGEST_EXEC", AT_LAST)
    read = signals._read_all
    rounds: list[str] = []

    def read_early(name: str) -> Iterator[tuple[int, bytes]]:
        rounds.append(name)
        for pid, content in read(name):
            yield pid, b"" if pid == sleep.pid and len(rounds) < 3 else content

    monkeypatch.setattr(signals, "_read_all", read_early)
    sleep = subprocess.Popen(["sleep", "600"], env=os.environ | {"MARK_OF_A_TEST": "here"})
    assert signals.kill_marked("MARK_OF_A_TEST", "here") == [sleep.pid]
    assert sleep.wait() == -signal.SIGKILL
    assert len(rounds) == 3


def used(loader: Loader) -> list[Any]:
    """The worker processes of a loader, after an epoch."""
    assert len(list(loader)) == len(loader)
    return workers(loader)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_parent_has_workers_of_its_own_and_leaves_ours_alone():
    with Loader(Whereabouts(), range(6), num_workers=2) as loader:
        ours = {process.pid for process in used(loader)}

        def use() -> list[int]:
            pids = [batch["pid"] for batch in loader]
            loader.close()
            return pids

        theirs = set(json.loads(in_a_fork(use)))
        assert theirs
        assert not theirs & ours
        assert not any(map(alive, theirs))
        assert all(map(alive, ours))
        assert len(list(loader)) == 6


def test_loaders_in_threads():
    """Several loaders start and end workers at the same time."""

    def use() -> list[int]:
        with Loader(Squares(10), num_workers=1, mp_context=SPAWN) as loader:
            return list(loader)

    assert in_threads(*[use] * 4) == [[i * i for i in range(10)]] * 4


STARTS_A_PROCESS = """
import multiprocessing, minloader, __main__
def f():
    print("f of", __name__, flush=True)
def start(item):
    process = multiprocessing.get_context("spawn").Process(target=__main__.f)
    process.start()
    process.join()
if __name__ == "__main__":
    CALL
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "print(list(minloader.Loader(str, [1])), flush=True); start(1)",
            "['1']\nf of __mp_main__",
        ),
        # The worker begins while its parent is just starting it.
        (
            "print(list(minloader.Loader(start, [1], num_workers=1, mp_context='fork')))",
            "f of __mp_main__\n[None]",
        ),
    ],
    ids=["beside workers", "in a forked one"],
)
def test_other_processes_still_get_their_main_module(call, said, tmp_path):
    """Only our own workers go without it."""
    script = tmp_path / "script.py"
    script.write_text(STARTS_A_PROCESS.replace("CALL", call))
    assert printed_by(script, options=["-W", "ignore"]) == f"{said}\n"


BUSY = """
import faulthandler, itertools, logging, sys, threading
from minloader import Loader, prefetch

class Loud:
    def __getitem__(self, index):
        logging.getLogger("loud").warning("item %d", index)
        return bytes(20_000) * (index % 2)

class Stream:
    def __iter__(self):
        return iter(range(10**9))

shown, done = [], threading.Event()
handler = logging.Handler()
handler.emit = lambda record: shown.append(len(logging.Formatter().format(record)))
logging.getLogger("loud").addHandler(handler)
logging.getLogger("loud").propagate = False

def use(batches):
    for _ in batches:
        if done.is_set():
            break

with (
    Loader(Loud(), itertools.count(), num_workers=1) as loud,
    Loader(Stream(), batch_size=64, num_workers=1, mp_context="fork") as stream,
    Loader(abs, itertools.count(), num_workers=1, executor="thread") as threads,
):
    next(iter(stream))
    busy = [threading.Thread(target=use, args=(each,), name="minloader-test")
            for each in (loud, prefetch(stream, str), threads)]
    for thread in busy:
        thread.start()
    sys.setswitchinterval(1e-4)  # or it waits for the busy ones most of the time
    for _ in range(ROUNDS):
        faulthandler.dump_traceback_later(120, exit=True)
        with Loader(abs, range(8), num_workers=8, mp_context="fork") as loader:
            assert list(loader) == list(range(8))
    done.set()
    for thread in busy:
        thread.join()
print(len(shown) > 0)
"""
"""Forks workers while the threads of other loaders are busy, which are all that there are."""


@variants("rounds", [5, *4 * [62]])
def test_forks_beside_busy_threads_of_ours(rounds):
    """Of 2,000, 8 in each round, none hangs, and none warns. A round has two minutes."""
    warns = ["-W", "default:This process:DeprecationWarning"]
    said = printed_by(BUSY.replace("ROUNDS", str(rounds)), options=warns, timeout=380)
    assert said == "True\n"


def leave_early(loader: Loader) -> None:
    for _ in loader:
        break


def close_early(loader: Loader) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()


@variants("use", [list, leave_early, close_early])
def test_nothing_is_left_to_the_garbage_collector(use, no_collector):
    """A pool in a cycle has semaphores, whose end CPython 3.12 refuses if it comes while others
    are being made: they are counted by the same resource tracker."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with Loader(Large(), num_workers=2) as loader:
            use(loader)
        del loader
        gc.collect()
        kinds = Executor, memoryview, np.ndarray, Large
        found = [each for each in gc.garbage if isinstance(each, kinds)]
        found += [each for each in gc.garbage if type(each).__name__ == "SemLock"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not found


# --- where the system refuses --------------------------------------------------------------------


def test_no_thread_for_the_manager_is_an_error_and_the_next_batch_comes(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with Loader(Squares(4), num_workers=1, prefetch_factor=1) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            batches = iter(loader)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(batches)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(batches)  # it was sent meanwhile
        assert list(batches) == [4, 9]
    # One that never got a manager thread ends, too.
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Loader(Squares(4), num_workers=2) as loader:
        for _ in range(4):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(iter(loader))


def shared_files() -> int:
    return len([file for file in belongings()["descriptors"] if "memfd:minloader" in file[1]])


@pytest.mark.parametrize("refused", ["multiprocessing.synchronize.SemLock.__init__", "mmap.mmap"])
def test_an_executor_that_cannot_be_made_leaves_no_file(refused, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    with Loader(Squares(4), num_workers=1, prefetch_factor=1) as loader:
        before = shared_files()
        monkeypatch.setattr(refused, refuse)
        batches = iter(loader)
        for _ in range(4):
            with pytest.raises(OSError, match="Read-only") as caught:
                next(batches)
        assert shared_files() == before, caught.value


def test_a_loader_that_cannot_be_made_leaves_no_file(monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: None)
    before = shared_files()
    with pytest.raises(RuntimeError, match="is empty, so it is not known") as caught:
        Loader(Squares(4), num_workers=1, mp_context=SPAWN)
    del caught  # whose traceback has the files
    gc.collect()
    assert shared_files() == before


class Unaffordable:
    """A batch for which there is no memory when it is pickled."""

    def __reduce__(self):
        raise MemoryError("not so much")


def test_no_memory_to_pickle_a_batch_is_no_fault_of_the_batch():
    with (
        Loader(lambda index: Unaffordable() if index else index, range(2), num_workers=1) as loader,
        pytest.raises(MemoryError, match="not so much"),
    ):
        assert list(loader) == [0]
