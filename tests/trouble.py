"""Datasets and functions that go wrong, each in its own way; worker processes import them.

Numpy is imported where it is needed: a worker starts in half the time without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from helpers import Squares, TwoArguments, once

from minloader import SKIP, WorkerInfo, empty, get_worker_info
from minloader._memory.limits import private_memory


def note(path: str, text: Any) -> None:
    """Appends a line, in one piece whoever else does."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def wait_until(path: str) -> None:
    """Works until a file is there; not for ever, should the test forget it."""
    for _ in range(3000):
        if os.path.exists(path):
            return
        threading.Event().wait(0.01)
    raise TimeoutError(path)


def in_worker() -> bool:
    return multiprocessing.parent_process() is not None


def die() -> None:
    """The death that leaves least behind."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # it is on its way


def hang() -> None:
    """Works for ever."""
    threading.Event().wait()  # the line that a stack shows


class Noisy:
    """Numbers that depend on all generators a batch has; the item on duty does something first.

    Args:
        deeds: what to do at an item, once if ``folder`` is given, else always.
        folder: where it is noted that it has happened, and each call, in ``calls``.
        size: of the array in each batch.
    """

    def __init__(self, deeds: dict[int, Any], folder: Any = None, size: int = 4) -> None:
        self.deeds = deeds
        self.folder = None if folder is None else str(folder)
        self.size = size

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        import numpy as np

        info = get_worker_info()
        assert info is not None
        array = empty(self.size)
        array[:] = info.rng.random(self.size)
        numbers = random.random(), float(np.random.random())
        if self.folder is not None:
            note(f"{self.folder}/calls", item)
        if item in self.deeds and (self.folder is None or once(f"{self.folder}/did-{item}")):
            self.deeds[item]()
        return item, array, numbers


class Scripted:
    """Does what is written for an item, a list of steps, and gives the item back.

    Steps, each a tuple: ("wait", path), ("touch", path), ("once", path, steps...), ("die",),
    ("hang",), ("work", seconds), ("call", function, arguments...).
    """

    def __init__(self, script: dict[int, list[tuple[Any, ...]]]) -> None:
        self.script = script

    def __getitem__(self, item: int) -> int:
        for step in self.script.get(item, []):
            self.do(*step)
        return item

    def do(self, what: str, *arguments: Any) -> None:
        if what == "wait":
            wait_until(str(arguments[0]))
        elif what == "touch":
            note(str(arguments[0]), os.getpid())
        elif what == "once":
            for step in arguments[1:] if once(str(arguments[0])) else ():
                self.do(*step)
        elif what == "work":
            threading.Event().wait(arguments[0])
        elif what == "call":
            arguments[0](*arguments[1:])
        else:
            {"die": die, "hang": hang}[what]()


# --- the zoo: ways to fail, each called where a batch is made ----------------------------------


def raises(cls: type[BaseException], *arguments: Any) -> None:
    raise cls(*arguments)


def sends_itself(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


def kills_its_group() -> None:
    os.killpg(0, signal.SIGKILL)
    threading.Event().wait()


def is_alarmed() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    threading.Event().wait()


def reads_nowhere() -> None:
    ctypes.string_at(0)


def recurses(depth: int = 0) -> int:
    return recurses(depth + 1) + 1


def nests() -> Any:
    nest: list[Any] = []
    for _ in range(50_000):
        nest = [nest]
    return nest


def while_there(path: str, way: Any, *arguments: Any) -> None:
    """Goes wrong while a file is there."""
    if os.path.exists(path):
        way(*arguments)


def in_thread(way: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=way, args=arguments)
    thread.start()
    thread.join()


class Trap:
    """Calls a function when it is pickled, unpickled or deleted; it arrives as "sprung".

    Args:
        when: "pickled", "unpickled", "unpickled above" (in the parent) or "deleted".
        way: the function, and what to call it with.
    """

    def __init__(self, when: str, way: Any, *arguments: Any) -> None:
        self.when, self.way, self.arguments = when, way, arguments

    def __reduce__(self) -> Any:
        if self.when == "pickled":
            self.way(*self.arguments)
        if self.when.startswith("unpickled"):
            return _spring, (self.when, self.way, self.arguments)
        return str, ("sprung",)

    def __del__(self) -> None:
        if self.when == "deleted" and in_worker():
            self.way(*self.arguments)


def _spring(when: str, way: Any, arguments: tuple[Any, ...]) -> str:
    if in_worker() == (when == "unpickled"):
        way(*arguments)
    return "sprung"


class TrapError(Exception):
    """An exception that is a trap."""

    def __init__(self, *trap: Any) -> None:
        super().__init__("a trap")
        self.trap = Trap(*trap)

    def __reduce__(self) -> Any:
        self.trap.__reduce__()
        return _make_error, (self.trap,)


def _make_error(sprung: str) -> ValueError:
    error = TrapError("never", print)
    error.args = (sprung,)
    return error


class Speechless(Exception):
    """Fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Demanding(BaseException):
    """Fails to unpickle by itself, and is no ``Exception``."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)


def forks(way: Any, *arguments: Any) -> str:
    """The worker goes on when its fork has ended."""
    child = os.fork()
    if child == 0:
        way(*arguments)
        return "made by a fork"
    os.waitpid(child, 0)
    return "made by the worker"


def leaves_a_fork_and_dies(path: str, detached: bool) -> None:
    """The fork holds open what the worker had."""
    if os.fork() == 0:
        if detached:
            os.setsid()
        try:
            wait_until(path)
        finally:
            os._exit(0)
    die()


def starts_a_process_and_dies(path: str) -> None:
    """As a dataset does that uses multiprocessing itself."""
    context = multiprocessing.get_context("fork")
    context.Process(target=wait_until, args=(path,), daemon=True).start()
    die()


def closes(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def closes_all(hanging: bool) -> None:
    os.closerange(3, 256)
    if hanging:
        threading.Event().wait()


_kept: list[Any] = []


def exhausts_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    with contextlib.suppress(OSError):
        while True:
            _kept.append(open("/dev/null"))  # noqa: SIM115
    assert len(_kept) > 10


def limits(name: str, amount: int) -> None:
    which = getattr(resource, name)
    resource.setrlimit(which, (amount, resource.getrlimit(which)[1]))


def leaves_its_folder() -> None:
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())


def removes_temporary_folder() -> None:
    shutil.rmtree(tempfile.gettempdir())


def blocks_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def forgets_environment() -> None:
    os.environ.clear()


class Zoo:
    """Item 2 goes wrong; the others are arrays large enough for shared memory.

    Args:
        way: what happens at item 2, called with the arguments; its result is part of the batch.
    """

    def __init__(self, way: Any, *arguments: Any) -> None:
        self.way, self.arguments = way, arguments

    def __getitem__(self, item: int) -> Any:
        import numpy as np

        array = np.full(5000, item)
        return (array, self.way(*self.arguments)) if item == 2 else (array, None)


class Cages:
    """Each item says what goes wrong; the batch is an array with the result of that.

    An item is a number and a function with its arguments, or an empty tuple.
    """

    def __getitem__(self, item: tuple[int, tuple[Any, ...]]) -> Any:
        import numpy as np

        number, (*way,) = item
        return np.full(5000, number), way[0](*way[1:]) if way else None


class Springs(Zoo):
    """A transform or collate_fn that goes wrong in the same way."""

    def __call__(self, batch: Any) -> Any:
        batch = batch[0] if type(batch) is list else batch
        return self[int(batch[0][0])]


class SpringsMany(Zoo):
    def __getitems__(self, items: list[int]) -> list[Any]:
        return [self[item] for item in items]


class SpringsWhenLoaded(Zoo):
    """Goes wrong when a worker loads it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.way(*self.arguments)

    def __getitem__(self, item: int) -> Any:
        import numpy as np

        return np.full(5000, item), None


class SpringsAtStart(Zoo):
    """A worker_init_fn that goes wrong."""

    def __call__(self, info: Any) -> None:
        self.way(*self.arguments)


def first(batches: list[Any]) -> Any:
    """A collate_fn for batches of one."""
    return batches[0]


class Exit:
    """Leaves with that code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self) -> None:
        os._exit(self.code)


class Until:
    """Acts at each call until that many were made, in whichever process."""

    def __init__(self, path: Any, calls: int, way: Any) -> None:
        self.path, self.calls, self.way = str(path), calls, way

    def __call__(self, info: Any) -> None:
        if any(once(f"{self.path}-call-{n}") for n in range(1, self.calls)):
            self.way()


class FirstByte:
    """Of the item; at item 2 it dies, once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, item: bytes) -> int:
        if item[0] == 2 and once(self.path):
            die()
        return item[0]


def holds_the_interpreter() -> None:
    """Hangs in C code that never gives the lock back: no other thread runs."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


class Leaves:
    """Each worker of it starts a process, and leaves it behind.

    Args:
        end: what a worker does in item 3, once: "die", "hang" or nothing in particular.
        path: of a file, by which it is known whether it was done.
    """

    def __init__(self, end: str, path: str) -> None:
        self.end = end
        self.path = path
        self.started: Any = None

    def __getitem__(self, index: int) -> int:
        if self.started is None:
            self.started = subprocess.Popen(["sleep", "600"])
        if index == 3 and once(self.path):
            if self.end == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.end == "hang":
                hang()
        return index


class StandsStill:
    """A thread of a worker of it comes to a standstill when it is told to, for good.

    Args:
        way: in which.
        folder: it is told to by the file "now", and leaves "stands".
    """

    def __init__(self, way: Callable[[], None], folder: str) -> None:
        self.way = way
        self.folder = folder
        self.thread: threading.Thread | None = None

    def __getitem__(self, index: int) -> int:
        if self.thread is None and once(f"{self.folder}/did"):
            self.thread = threading.Thread(target=self._stand_still, daemon=True)
            self.thread.start()
        return index

    def _stand_still(self) -> None:
        while not os.path.exists(f"{self.folder}/now"):
            threading.Event().wait(0.01)
        once(f"{self.folder}/stands")
        self.way()


def hangs_beside_a_thread() -> None:
    """Hangs, and so does a thread that it has started."""
    threading.Thread(target=hang, daemon=True).start()
    hang()


def stops() -> None:
    """Hangs without an answer to any signal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def starts_children(path: str) -> None:
    """Hangs beside two processes, one in a session of its own; their pids are noted."""
    for detached in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=detached)
        note(path, child.pid)
    hang()


class Slow:
    """Each batch takes that long, and so does the start of a worker."""

    def __init__(self, seconds: float, start: float = 0.0) -> None:
        self.seconds, self.start = seconds, start

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        threading.Event().wait(self.start)

    def __getitem__(self, item: int) -> int:
        threading.Event().wait(self.seconds)
        return item


# --- a worker that dies in the middle of a message ---------------------------------------------


class DiesSending:
    """A worker_init_fn: the worker's first large message breaks off after a share of it."""

    end: Callable[[], None] = staticmethod(lambda: die())

    def __init__(self, path: Any, least: int = 1_000_000, share: float = 0.5) -> None:
        self.path, self.least, self.share = str(path), least, share

    def __call__(self, info: Any) -> None:
        connection: Any = multiprocessing.connection.Connection
        send = connection._send

        def torn_send(own: Any, data: Any, *arguments: Any) -> None:
            if len(data) >= self.least and once(self.path):
                send(own, data[: int(self.share * len(data))], *arguments)
                self.end()
            send(own, data, *arguments)

        connection._send = torn_send


class StopsSending(DiesSending):
    """The same, but it stands still there."""

    end = staticmethod(lambda: stops())


class DiesReceiving:
    """A worker_init_fn: the worker dies with a message half read, and with the queue's lock.

    Args:
        path: where it is noted that it happened.
        reads: how many reads of a message's parts go well before.
    """

    def __init__(self, path: Any, reads: int) -> None:
        self.path, self.reads = str(path), reads

    def __call__(self, info: Any) -> None:
        connection: Any = multiprocessing.connection.Connection
        receive = connection._recv
        left = iter(range(self.reads))

        def torn_receive(own: Any, *arguments: Any) -> Any:
            if next(left, None) is None and once(self.path):
                die()
            return receive(own, *arguments)

        connection._recv = torn_receive


class Large:
    """Bytes that need many writes to a pipe."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, item: int) -> bytes:
        return bytes([item]) * self.size


# --- memory ------------------------------------------------------------------------------------


class Leaky(Noisy):
    """Keeps so many bytes for each batch; tells its process beside the batch."""

    def __init__(self, leak: int) -> None:
        super().__init__({})
        self.leak = leak
        self.kept: list[Any] = []

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        self.kept.append(b"1" * self.leak)
        return os.getpid(), *super().__getitem__(item)


class Limits:
    """A worker_init_fn that lets the worker have so many bytes of addresses more."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, info: Any) -> None:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limits("RLIMIT_AS", size + self.more)


class Greedy:
    """Takes as many bytes as it is told."""

    def __getitem__(self, size: int) -> int:
        import numpy as np

        return int(np.ones(size, np.uint8).sum(dtype=np.int64))


def runs_sleep(path: str, seconds: float) -> None:
    """Has a program run to its end, which must not be disturbed."""
    child = subprocess.Popen(["sleep", str(seconds)])
    note(path, child.pid)
    if child.wait() != 0:
        raise RuntimeError(f"sleep ended with {child.returncode}")


def loops() -> None:
    while True:
        pass


def keep(size: int) -> None:
    """Takes memory for good."""
    _kept.append(b"1" * size)


class LargeOnce:
    """Item 3 is 4 MB and waits for its turn; item 0 takes memory for good."""

    def __init__(self, path: Any, go: Any) -> None:
        self.path, self.go = str(path), str(go)

    def __getitem__(self, item: int) -> bytes:
        threading.Event().wait(0.01)
        if item == 0:
            keep(40_000_000)
        if item == 3:
            wait_until(self.go)
            return bytes(4_000_000)
        return b"abc"


class PrivateMemory:
    """Bytes that the worker has for itself."""

    def __getitem__(self, item: int) -> int:
        return private_memory()


class Noted:
    """Arrays of 40 kB; each call is noted in a file.

    Args:
        path: of the file.
        n: number of samples.
        deadly: index of a sample; the worker dies once, while it keeps that.
    """

    def __init__(self, path: Any, n: int = 12, deadly: int | None = None) -> None:
        self.path = str(path)
        self.n = n
        self.deadly = deadly

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        note(self.path, index)
        if index == self.deadly and once(self.path + "-died"):
            die_writing(0.5)
        return {"number": index, "image": np.full(10_000, index, "i4")}

    def calls(self) -> list[int]:
        with open(self.path) as file:
            return sorted(map(int, file))


def die_writing(share: float) -> None:
    """Lets this process die when that share of an entry is written."""
    pwrite = os.pwrite

    def write(fd: int, data: Any, at: int) -> int:
        pwrite(fd, data[: int(share * len(data))], at)
        die()
        raise AssertionError("it lives")

    os.pwrite = write


class HangsInAnImport:
    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def __getitem__(self, item: int) -> int:
        return item

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if once(self.path):
            hang()


class LeavesOut:
    """Samples that are their index, but for one that is left out."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __getitem__(self, index: int) -> Any:
        return SKIP if index == self.index else index


# --- errors that are hard to send ----------------------------------------------------------------


def raise_deep(item: int) -> int:
    def innermost_function() -> None:
        raise ValueError("deep down")

    if item == 1:
        innermost_function()
    return item


def raise_two(item: int) -> int:
    if item == 1:
        raise TwoArguments(7, "seven")
    return item


def raise_locked(item: int) -> int:
    if item == 1:
        error = RuntimeError("has a lock", threading.Lock())
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        error.hint = "kept"  # type: ignore[attr-defined]
        raise error
    return item


class Hopeless(Exception):
    """Can be made in one way only, which no pickle knows."""

    def __new__(cls, *args: Any, key: str) -> Any:
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, key: str) -> None:
        super().__init__(*args)


def raise_hopeless(item: int) -> int:
    if item == 1:
        raise Hopeless("cannot travel", key="k")
    return item


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raise_unprintable(n: int) -> int:
    """What ``traceback`` itself fails on: the line should be a string."""
    if n == 1:
        raise SyntaxError("bad", ("f.json", 1, 1, b"{"))
    return n


def raise_frozen(item: int) -> int:
    if item == 1:
        raise Frozen(5)
    return item


def exits(item: int) -> int:
    if item == 1:
        raise SystemExit(3)
    return item


def unpicklable(item: int) -> Any:
    return {"x": [0, threading.Lock()]} if item == 1 else item


class LoadsBadly:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("while unpickling")


def loads_badly(item: int) -> Any:
    return LoadsBadly() if item == 1 else item


class FailsToLoad(Squares):
    def __setstate__(self, state: Any) -> None:
        raise ConnectionError("database is down")


def ignore_sigterm(info: WorkerInfo) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
