"""CPython's private parts, all in one module.

No other module of the package names an underscored attribute of ``concurrent.futures``,
``importlib``, ``multiprocessing`` or ``threading``. Each piece here says what CPython does, since
which issue or in which function, in which versions, and what happens without the piece.
``tests/test_cpython.py`` shows for each that the running CPython needs it, and fails when it no
longer does.

The states of an executor, and who moves it::

                 submit()                  a worker dies: manager thread
    [ fresh ] -------------> [ running ] ------------------------------> [ broken ]
        |                        |                                           |
        | shutdown()             | shutdown()           the manager thread has ended all workers
        |                        v            the queue is empty             v
        +----------------> [ leaving ] ----------------------------> [ manager ended ]

The *manager thread* belongs to the executor: it moves tasks from a dict to the call queue, reads
replies from the result queue, waits for the sentinels of the workers, and kills them all when one
has died. Everything else happens in the thread that calls.

Guarantees of :class:`Executor` over its base class:

1. Every future that ``submit()`` returned is done once the executor is broken and its manager
   thread has ended, however threads interleave (pieces 5 and 6).
2. The manager thread can be waited for after ``shutdown(wait=False)`` (piece 7).
3. A manager thread that waits for the rest of an unfinished message can be freed (piece 8).
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures.process import _ExecutorManagerThread, _threads_wakeups
from contextlib import contextmanager, suppress
from importlib._bootstrap import _module_locks  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from operator import attrgetter
from types import TracebackType
from typing import Any, cast

from minloader._memory import forks
from minloader._protocols import snapshot

# --- 1. The main module ------------------------------------------------------------------------
#
# CPython: multiprocessing.spawn.get_preparation_data() tells every child of "spawn" and
# "forkserver" where the parent's main module is, and the child imports it before anything else.
# Versions: all.
# Without this piece: a script needs a guard (if __name__ == "__main__") or starts itself again for
# ever; a child that fails in that import may hang the start (cpython #118981), from 3.13.8 and
# 3.14.1 with a BrokenPipeError; and each start takes as long as the imports of the script.
#
# CPython: it tells of the default start method too, which that of the child replaces later.
# Versions: all.
# Without this piece: no worker starts within joblib, where the default is one that no child knows.


class _Starting(threading.local):
    """What this thread is starting.

    Attributes:
        worker: whether that is a worker, or what it needs. A child of "fork" begins in the middle
            of the start.
        locks: those that are to be free in that child: piece 17.
    """

    worker = False
    locks: Sequence[Any] = ()


_starting = _Starting()

_get_preparation_data = multiprocessing.spawn.get_preparation_data


def _leave_main_out(name: str) -> dict[str, Any]:
    # Debuggers run a script in a main module without it (cpython #87115); that of a script is None.
    vars(sys.modules["__main__"]).setdefault("__spec__", None)
    data = _get_preparation_data(name)
    if _starting.worker:
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
        data.pop("start_method", None)
    return data


# Once and for all rather than around each start: other threads may start processes meanwhile,
# which get their main module.
multiprocessing.spawn.get_preparation_data = _leave_main_out


def start_worker(process: BaseProcess, locks: Sequence[Any] = ()) -> None:
    """Start a process without the parent's main module; it may die at once.

    Args:
        process: which.
        locks: those that are to be free in a fork: piece 17.

    Raises:
        BaseException: whatever the start raised; no child is left then.
    """
    _starting.worker = True
    _starting.locks = locks
    try:
        with _no_warning_of_our_threads(process), _allowed_children():
            process.start()
    except BaseException as error:
        if sys.platform == "win32" or not _adopt(process, error.__traceback__):
            raise
        if not isinstance(error, BrokenPipeError):
            process.kill()
            process.join()
            raise
        error.__traceback__ = None  # its frames, whose variables were looked at, lead to it
    finally:
        _starting.worker = False
        _starting.locks = ()
    if sys.platform != "win32":
        _hold(cast(Any, process)._popen)


# --- 14. A daemonic process ---------------------------------------------------------------------
#
# CPython: a daemonic process, as each of multiprocessing.Pool's, may have no children, since it is
# ended by SIGTERM, and they would stay. Ours follow their parent.
# Versions: all.
# Without this piece: no loader has workers in such a process, nor in a task of Celery's.


@contextmanager
def _allowed_children() -> Iterator[None]:
    """Let this process start one in this block, be it daemonic or not."""
    config = getattr(multiprocessing.process.current_process(), "_config", {})
    daemonic = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemonic is not None:
            config["daemon"] = daemonic


# --- 15. The current folder ---------------------------------------------------------------------
#
# CPython: a child of "spawn", and the resource tracker, run "python -c", which imports modules from
# the current folder first. A child takes over the parent's path, but has imported much by then.
# Versions: all.
# Without this piece: where the current folder has a file such as signal.py, no worker starts.
#
# Not in a frozen program: PyInstaller knows what is the tracker's by the very flags.
# Not the fork server: until 3.14 it does not take over the path, and finds the user's modules there
# or nowhere.

_get_flags = multiprocessing.util._args_from_interpreter_flags  # type: ignore[attr-defined]


def _with_safe_path() -> list[str]:
    flags: list[str] = _get_flags()
    is_ours = _starting.worker and not hasattr(sys, "frozen")
    return [*flags, "-P"] if is_ours else flags


multiprocessing.util._args_from_interpreter_flags = _with_safe_path  # type: ignore[attr-defined]


# --- 2. The end of the interpreter -------------------------------------------------------------
#
# CPython: concurrent.futures.process registers _python_exit() with threading._register_atexit().
# It waits until all that was ever submitted is done. The functions run in reverse order, before
# the interpreter waits for threads, and before atexit. In a child of multiprocessing there is one
# more wait: multiprocessing.util._exit_function() joins the child's own children first.
# Versions: all.
# Without this piece: an exit waits for every task that is queued, and for ever if one is stuck; a
# loader still open at the end of a multiprocessing child hangs that child for ever.


def register_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the interpreter ends, before anything waits for processes."""
    threading._register_atexit(function)  # type: ignore[attr-defined]
    _before_joins(function)
    # A child of "fork" clears what was registered in its parent.
    multiprocessing.util.register_after_fork(function, _before_joins)


def _before_joins(function: Callable[[], None]) -> None:
    multiprocessing.util.Finalize(None, function, exitpriority=100)


# --- 12. A fork of this process -----------------------------------------------------------------
#
# CPython: a child of "fork" runs its parent's _python_exit() when it ends. That wakes the manager
# threads, of which none runs there, and takes a lock of each of them for that.
# Versions: all; the lock where _ThreadWakeup has one (3.14, not 3.13.0).
# Without this piece: a worker never ends if it was forked while another thread had such a lock,
# and no more does a child that the user forked.
#
# CPython: an executor that is collected wakes its manager thread in the same way, also in a child
# that has it from its parent: weakref_cb().
# Versions: all; the lock until 3.13.0.
# Without this piece: a child that lets go of a loader waits for ever if it was forked while another
# thread had such a lock; and until 3.12 one that ends, with torch imported, prints a traceback.
#
# CPython: a child of os.fork() has its parent's list of children, and looks at each of them when it
# starts a process, or asks for active_children().
# Versions: all.
# Without this piece: it waits for ever if another thread was looking at ours, with piece 4's lock.


def _forget_parents() -> None:
    """Let go of what is the parent's, in a fork of it."""
    for manager in _threads_wakeups:
        cast(Any, manager).executor_reference = None  # the end of an executor calls nothing
    _threads_wakeups.clear()
    children = cast(Any, multiprocessing.process)._children
    children -= {each for each in children if hasattr(each._popen, "looking")}
    _starting.worker = False


forks.in_child.append(_forget_parents)


# --- 3. A child that dies while it starts -------------------------------------------------------
#
# CPython: Popen._launch() starts a child, and then writes into a pipe what it has to run. If the
# child is dead by then, and nobody else has the pipe's other end, the write raises a
# BrokenPipeError: start() fails and forgets the child, which nobody reaps.
# Versions: "forkserver" all; "spawn" from 3.13.8 and 3.14.1, where the parent closes its copy of
# that end first (cpython #118981).
# Without this piece: a worker that is killed while it starts ends the epoch, and stays a zombie.
#
# The same holds where anything else is raised in the middle, by the handler of a signal, say. The
# frames of the error lead to the child.

if sys.platform != "win32":
    from multiprocessing import connection, forkserver, popen_fork, popen_forkserver

    def _adopt(process: Any, trace: TracebackType | None) -> bool:
        """Make the child known that a failed start has left; return whether there is one."""
        while trace is not None:
            popen = trace.tb_frame.f_locals.get("self")
            if isinstance(popen, popen_fork.Popen) and hasattr(popen, "sentinel"):
                if not hasattr(popen, "pid"):  # that of "forkserver" comes after the write
                    popen.pid = forkserver.read_signed(popen.sentinel)
                process._popen = popen
                process._sentinel = popen.sentinel
                cast(Any, multiprocessing.process)._children.add(process)
                return True
            trace = trace.tb_next
        return False


# --- 4. The end of a child ---------------------------------------------------------------------
#
# CPython: whoever looks at a dead child reaps it: exitcode, is_alive(), join(), and
# active_children() and the start of any process for all children. The system may then give its
# pid to another process. From 3.15 the manager thread does so just before it calls terminate().
# Versions: all.
# Without this piece: a signal for a worker may hit somebody else's process.
#
# CPython: a child that the system itself has reaped, since SIGCHLD is ignored (launchers hand that
# down), or that somebody else has waited for, is taken for one that has not ended.
# Versions: all.
# Without this piece: the manager thread waits for its end for ever, as fast as it can.
#
# CPython: Popen.poll() of "forkserver" reads the exit code from a pipe. Of two threads that look at
# a dead child at once, the second finds the pipe's end, and sets the code to 255.
# Versions: all.
# Without this piece: a worker that was killed is said to have ended with exit code 255.
#
# So there is a descriptor for each worker (a pidfd), which never stands for another process. Where
# the system has none, the first remains. And whoever looks asks first whether the child has ended,
# which reaps nothing; then one thread at a time asks for its code.

UNKNOWN = 255
"""Exit code of a child that is gone, when nobody knows its own."""

if sys.platform != "win32":

    class _WorkerPopen(popen_fork.Popen):
        """A child of "spawn" or "fork" whose end is known once and for all."""

        pidfd: int
        looking: Any  # reentrant: garbage may be collected while it is held, and look, too

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            if self.returncode is None and self.has_ended(flag):
                with self.looking:
                    if super().poll(os.WNOHANG) is None:
                        self.returncode = UNKNOWN
            return self.returncode

        def has_ended(self, flag: int) -> bool:
            """Whether the child has ended; without WNOHANG, wait until it has."""
            try:
                return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flag) is not None
            except ChildProcessError:  # somebody else has reaped it
                return True

    class _ServedPopen(_WorkerPopen, popen_forkserver.Popen):
        """A child of "forkserver"; the server reaps it, and then sends its exit code."""

        def has_ended(self, flag: int) -> bool:
            return bool(connection.wait([self.sentinel], 0 if flag else None))

    def _hold(popen: Any) -> None:
        """Get hold of a child that was just started."""
        kinds = {popen_fork.Popen.poll: _WorkerPopen, popen_forkserver.Popen.poll: _ServedPopen}
        kind = kinds.get(type(popen).poll)
        if kind is None or not hasattr(os, "waitid"):
            return  # a class of the user's; macOS, before CPython 3.13
        try:
            popen.pidfd = os.pidfd_open(popen.pid)
            weakref.finalize(popen, os.close, popen.pidfd).atexit = False
        except (AttributeError, OSError):  # no such system, no descriptors; or it is gone already
            popen.pidfd = -1
        popen.looking = threading.RLock()
        popen.__class__ = kind


def send_signal(process: Any, number: int) -> None:
    """Send a worker a signal.

    Raises:
        ProcessLookupError: it has ended.
    """
    popen = process._popen
    if getattr(popen, "pidfd", -1) >= 0:
        signal.pidfd_send_signal(popen.pidfd, number)
    elif popen.poll() is None:
        os.kill(popen.pid, number)
    else:
        raise ProcessLookupError


# --- 13. The warning of a fork beside threads ---------------------------------------------------
#
# CPython: os.fork() warns if the process has other threads, whatever these do.
# Versions: from 3.12.
# Without this piece: with "fork", whoever makes warnings errors can have no second loader, since
# the first has threads. They hold nothing that a worker needs: it is tested with 2,000 forks.
# (Threads that are not Python's count for CPython, not here: they come and go with ours.)


def is_ours(thread: threading.Thread) -> bool:
    """Whether a thread is one of ours, or of an executor of the standard library's."""
    names = ("minloader-", "QueueFeederThread")  # the last is of an executor's call queue
    return isinstance(thread, _ExecutorManagerThread) or thread.name.startswith(names)


@contextmanager
def _no_warning_of_our_threads(process: Any) -> Iterator[None]:
    """Have no fork warn in this block if Python has no other threads than this and ours."""
    # The main thread, too, is no other: it has the pool of which this is the thread.
    mine = threading.current_thread(), threading.main_thread()
    others = [each for each in threading.enumerate() if each not in mine]
    forks = sys.version_info >= (3, 12) and process._start_method == "fork"
    if not forks or not all(map(is_ours, others)):
        yield
        return
    with warnings.catch_warnings():  # nobody else's thread is there to see it
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield


# --- 16. An import at a fork ---------------------------------------------------------------------
#
# CPython: a child of "fork" has the lock of each module that another thread was just importing, and
# half of that module. Nobody gives the lock back there.
# Versions: all.
# Without this piece: a worker that imports such a module waits for ever. Much is imported when it
# is first needed, as numpy is here, and so in any thread.
#
# So a fork that starts a worker waits until no other thread imports. Not for long: that one may
# itself be waiting for this, or be a program's main thread, which runs it within an import.

PATIENCE = 5.0
"""Seconds that forks wait for imports. When these have passed, none waits any more."""

_patience = PATIENCE


def _is_importing_elsewhere() -> bool:
    held = [reference() for reference in snapshot(_module_locks.values())]
    return any(
        lock is not None and lock.owner not in (None, threading.get_ident()) for lock in held
    )


def _wait_for_imports() -> None:
    global _patience
    if not _starting.worker:
        return  # a fork that is not ours
    deadline = time.monotonic() + _patience
    while _is_importing_elsewhere():
        if time.monotonic() > deadline:
            _patience = 0.0
            return
        time.sleep(0.001)


forks.before.append(_wait_for_imports)


# --- 17. A draw at a fork ------------------------------------------------------------------------
#
# CPython: locks are not made free in a child of "fork", but for those of the standard library.
# Each generator of numpy has one, which whoever draws or seeds takes.
# Versions: all.
# Without this piece: a worker waits for ever, when it seeds the global generator, or draws from one
# that the dataset has, if it was forked while another thread was drawing. One that makes batches in
# this process does so all the time.


def _free_locks_of_numpy() -> None:
    for lock in _starting.locks:
        lock._at_fork_reinit()
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is not None:  # else it is not there, or was just being imported
        get_state.__self__._bit_generator.lock._at_fork_reinit()


forks.in_child.append(_free_locks_of_numpy)


# --- 18. A fork server of the parent's -----------------------------------------------------------
#
# CPython: ForkServer.ensure_running() looks by waitpid() whether the server runs, which in a child
# of os.fork() is no child of this process.
# Versions: all.
# Without this piece: there no worker of "forkserver" starts, but with a ChildProcessError. So a
# forked worker cannot have a loader whose workers are served.

if sys.platform != "win32":

    def _forget_fork_server() -> None:
        """Have a fork start a fork server of its own, if it needs one."""
        server = cast(Any, forkserver)._forkserver
        server._lock._at_fork_reinit()  # another thread may have been starting it
        if server._forkserver_pid is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_address = None
            server._forkserver_alive_fd = None
            server._forkserver_pid = None

    forks.in_child.append(_forget_fork_server)


# --- 19. The lock of the resource tracker at a fork ----------------------------------------------
#
# CPython: who makes a semaphore, as the thread of a pool does for each executor, has that lock. It
# stays taken in a child of a fork that comes meanwhile (cpython #146313).
# Versions: those without ResourceTracker._after_fork_in_child, which 3.15 has.
# Without this piece: no loader of the child can start workers. It waits for ever, or has a
# ReentrantCallError if its thread happens to have the ident of the one that had the lock.

if sys.platform != "win32":
    from multiprocessing import resource_tracker

    def _free_lock_of_tracker() -> None:
        cast(Any, resource_tracker)._resource_tracker._lock._at_fork_reinit()

    forks.in_child.append(_free_lock_of_tracker)


# --- 5. Futures of a broken executor -----------------------------------------------------------
#
# CPython: _ExecutorManagerThread.terminate_broken() sets an error on each future, also on one
# that was cancelled, or has its error from piece 6 (cpython #107219).
# Versions: 3.11. From 3.12 it catches the InvalidStateError.
# Without this piece: the manager thread ends with that error, and the other futures never do.


class _TolerantFuture(Future[Any]):
    """A future that may be given an error after it is done: it keeps what it has."""

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            super().set_exception(exception)
        except InvalidStateError:
            if not self.done():
                raise


# --- 6. Submitting while the executor breaks ---------------------------------------------------
#
# CPython: terminate_broken() walks over the tasks and the processes without the lock that
# submit() holds while it adds to both (cpython #109047).
# Versions: 3.11 and 3.12.0. From 3.12.1 it holds the lock.
# Without this piece: "dictionary changed size during iteration" ends the manager thread, and no
# future is ever done; a task that was added just after the walk is never done either; and a
# worker started then gets queues that are closed already, so that submit() raises an OSError. A
# worker whose start has just returned is missed by the walk: it takes a task, and leaves well.
#
# So the executor is marked as broken with that lock, before the walk. From then on submit() adds
# nothing.


# --- 9. Waiting --------------------------------------------------------------------------------
#
# CPython: wait_result_broken_or_wakeup() builds a poll object of the two pipes and of the sentinels
# of all workers each time that it waits, and _ThreadWakeup.clear() builds two more: some eight for
# each task, 10 µs each and 3 µs more for each worker.
# Versions: all.
# Without this piece: the main process needs a third more time for each task, and the manager thread
# of 64 workers is busy with no more than that.
#
# CPython: submit() wakes the manager thread first, and then starts a worker, for whose end that
# does not wait before the next message.
# Versions: all.
# Without this piece: the death of the worker that was started last is not seen as long as nothing
# else happens.


class _ManagerThread(_ExecutorManagerThread):
    """A manager thread that keeps the poll object it waits with, and breaks in one step."""

    watch: Any = None
    watched = -1

    def wait_result_broken_or_wakeup(self) -> Any:
        both: list[Any] = [self.result_queue, self.thread_wakeup]
        results, wakeup = files = [each._reader.fileno() for each in both]
        try:
            # A worker that starts meanwhile is seen with the next message, which its start sends.
            if len(self.processes) != self.watched and hasattr(select, "poll"):
                self.watch_also(files)
            ready = {file for file, _ in self.watch.poll()} if self.watch is not None else set()
        except OSError:  # no descriptors
            ready = set()
        if not ready or not ready <= {*files}:
            return super().wait_result_broken_or_wakeup()  # a worker may have ended
        if wakeup in ready:
            os.read(wakeup, 1 << 16)  # of whole messages, which are empty
        if results not in ready:
            return None, False, None
        try:
            return both[0]._reader.recv(), False, None
        except BaseException as error:
            return None, True, traceback.format_exception(error)

    def watch_also(self, files: list[int]) -> None:
        """Have the next waits be for files, and for the end of any worker that there is now."""
        workers = list(self.processes.values())  # once: it grows meanwhile
        self.watch = select.poll()
        for file in [*files, *(worker.sentinel for worker in workers)]:
            self.watch.register(file, select.POLLIN)
        self.watched = len(workers)

    def terminate_broken(self, cause: Any) -> None:
        executor = self.executor_reference()
        if executor is not None:
            with self.shutdown_lock:  # submit() has it while it starts a worker
                executor.mark_broken("a worker process died")
            del executor
        super().terminate_broken(cause)


# --- 10. Room for replies ----------------------------------------------------------------------
#
# CPython: workers send their replies through one pipe, which holds 64 KiB unless told otherwise.
# Versions: all, on Linux.
# Without this piece: a worker with a larger reply, or behind one, stands still until the manager
# thread reads it, which waits for whichever thread has the interpreter: a tenth of the time of
# workers with tiny batches.

REPLY_BYTES = 512 * 1024
"""Room in the pipe. The kernel takes memory for what is in it, and lets a user have 64 MiB of it in
all his pipes."""


def _make_room(file: int) -> None:
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):  # the user has too many already: they wait, then
            fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, REPLY_BYTES)


class Executor(ProcessPoolExecutor):
    """A ProcessPoolExecutor that loses no future when it breaks, and whose end can be waited for.

    Args:
        num_workers: number of worker processes.
        context: what makes them: a multiprocessing context, or an object like one.

    Attributes:
        manager: its manager thread; None before the first task.
    """

    # The base class's own; who checks types knows them otherwise, or not at all.
    _broken: Any
    _call_queue: Any
    _executor_manager_thread: Any
    _executor_manager_thread_wakeup: Any
    _max_workers: int
    _pending_work_items: Any
    _processes: Any
    _queue_count: int
    _result_queue: Any

    def __init__(self, num_workers: int, context: Any) -> None:
        _starting.worker = True  # its semaphores start the resource tracker: piece 15
        try:
            super().__init__(num_workers, mp_context=context)
        finally:
            _starting.worker = False
        self._calls = self._call_queue  # shutdown() forgets it
        self._results = self._result_queue
        _make_room(self._results._writer.fileno())
        self.manager: threading.Thread | None = None
        self._noticed = 0  # workers for whose end the manager thread waits, or soon will

    def mark_broken(self, reason: str) -> None:
        """Take no more calls. Called while no worker is being started."""
        self._broken = reason

    @property
    def may_start_workers(self) -> bool:
        """Whether the next :meth:`submit` may start workers."""
        return len(self._processes or ()) < self._max_workers

    broken = property(attrgetter("_broken"))
    """Why it is broken: the manager thread has found a worker dead; else False.

    No public name tells before the next ``submit()``. Versions: all.
    """

    @property
    def has_replies(self) -> bool:
        """Whether something that workers have sent waits to be read.

        No public name tells. Versions: all.
        """
        try:
            return bool(self._results._reader.poll())
        except (OSError, ValueError):  # it is closed
            return True

    # --- 7. The manager thread
    #
    # CPython: shutdown(wait=False) forgets the manager thread, which goes on, and nothing can
    # wait for it any more, not even another shutdown().
    # Versions: all.
    # Without this piece: nobody knows when the workers are reaped and the pipes closed.
    #
    # CPython: submit() keeps a manager thread that could not start, and the next one takes it for
    # running.
    # Versions: all.
    # Without this piece: that task is never done, and closing fails: workers and files stay.

    def _start_executor_manager_thread(self) -> None:
        try:
            super()._start_executor_manager_thread()
        except RuntimeError:  # no thread is to be had (ulimit -u)
            self._executor_manager_thread = None
            raise
        self.manager = self._executor_manager_thread
        self.manager.__class__ = _ManagerThread  # piece 9; it may wait once as CPython does
        if sys.version_info < (3, 12):
            task = self._pending_work_items.get(self._queue_count - 1)
            if task is not None:  # else it is done already
                task.future.__class__ = _TolerantFuture  # piece 5
        if len(self._processes) != self._noticed:
            self._noticed = len(self._processes)
            self._executor_manager_thread_wakeup.wakeup()

    # CPython: the manager thread waits for the workers to end, with the lock that shutdown() takes.
    # Versions: from 3.12.1.
    # Without this piece: whoever shuts down once more, as to drop what is queued, waits for a
    # worker that does not end, and cannot kill it.

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, as the base class does; a second call only drops what is queued."""
        if self._executor_manager_thread_wakeup is not None:
            super().shutdown(wait, cancel_futures=cancel_futures)
        elif cancel_futures:
            self._cancel_pending_futures = True

    # --- 8. An unfinished message
    #
    # CPython: wait_result_broken_or_wakeup() reads a whole message as soon as one has begun. If
    # its writer died in the middle, the read never ends: the parent itself holds an end for
    # writing open, so the pipe has no end either.
    # Versions: all.
    # Without this piece: every future of the executor waits for ever.

    def break_up(self, reason: str) -> None:
        """Break the executor as its manager thread would, which finds it broken, too.

        This closes the parent's end of the pipe for replies. All workers must be dead, because
        they hold ends as well. No other thread may submit meanwhile; the lock of submit() may be
        the manager thread's for as long as it is stuck.
        """
        self.mark_broken(reason)
        self._results._writer.close()


# --- 11. What the fork server imports ------------------------------------------------------------
#
# CPython: set_forkserver_preload() replaces the list, and nothing tells what is on it. At first it
# is the main module alone.
# Versions: all.
# Without this piece: what the user has put on the list is lost.


def modules_to_preload() -> list[str]:
    """Return what the fork server is to import besides the main module."""
    from multiprocessing import forkserver  # not on Windows

    names: list[str] = cast(Any, forkserver)._forkserver._preload_modules
    return [name for name in names if name != "__main__"]
