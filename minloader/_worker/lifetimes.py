"""How a worker process begins and ends, with all that it starts.

A worker leads a process group of its own. Three ways out are covered: the parent ends the worker
(:func:`kill_trees`), the worker leaves by itself (:func:`kill_descendants`), and the parent
vanishes (:func:`follow_parent`).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from minloader._memory.files import pid_in_proc
from minloader._memory.limits import names


def lead_group() -> None:
    """Give the worker, and all it will start, a process group of its own.

    The terminal's Ctrl-C then goes to the parent alone, and the whole group can be killed at once.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    handled = handled_signals()
    for number in handled:
        signal.signal(number, signal.SIG_DFL)  # in a fork they are the script's
    signal.set_wakeup_fd(-1)
    # A handler rather than SIG_IGN, which programs started by the worker would inherit.
    signal.signal(signal.SIGINT, _ignore)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # no nohup
        signal.signal(signal.SIGHUP, _ignore)
    _leave_terminal()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *handled])  # parent's doing


def _leave_terminal() -> None:
    """Let the worker, and all it will start, have no terminal, also not as standard input.

    A group in the background that sets or reads it is stopped, for ever: nobody brings it to the
    foreground, for which an interactive shell even waits.
    """
    with suppress(OSError, ImportError):  # there is none, or no such thing on this system
        terminal = os.open("/dev/tty", os.O_RDWR)
        try:
            from fcntl import ioctl
            from termios import TIOCNOTTY

            ioctl(terminal, TIOCNOTTY)
        finally:
            os.close(terminal)
        if os.isatty(0):  # now nothing would keep it from reading what is typed there
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)


def handled_signals() -> list[int]:
    """Return the signals for which this process has a handler in Python."""
    return [each for each in signal.valid_signals() if callable(signal.getsignal(each))]


def _ignore(signum: int, frame: Any) -> None:
    """Do nothing: the parent decides what Ctrl-C means.

    If a worker is stopped while the parent dies, the kernel sends it SIGHUP and has it go on. It
    must not die of that, but end with all that it started.
    """


def follow_parent(clean_up: Callable[[], object]) -> None:
    """Let this worker process end when its parent does, together with all it started.

    Args:
        clean_up: called before that.
    """
    args = multiprocessing.parent_process(), clean_up
    threading.Thread(target=_watch, args=args, name="minloader-watchdog", daemon=True).start()


def _watch(parent: Any, clean_up: Callable[[], object]) -> None:
    """Wait for the parent to end, in whatever way, and end with all that was started here."""
    parents = []
    if hasattr(os, "pidfd_open"):
        # The sentinel is a pipe that a fork of the parent would hold open; this is not.
        with suppress(OSError):  # no such kernel; or no such process: then the sentinel is ready
            parents.append(os.pidfd_open(parent.pid))
    multiprocessing.connection.wait([parent.sentinel, *parents])
    if parents:  # the pipe is closed first, then the kernel has stopped processes go on
        multiprocessing.connection.wait(parents, LONGEST_END)
    clean_up()
    ending = threading.Thread(target=_end_from_outside, name="minloader-end", daemon=True)
    with suppress(RuntimeError):  # no more threads
        ending.start()
        ending.join(LONGEST_END)
    # In one go: when a child that it waits for is gone, the worker would go on, to its next task.
    kill_descendants()
    kill_group(os.getpid())
    os._exit(1)  # where there are no groups


LONGEST_END = 1.0
"""Seconds for the parent to be gone, and for the worker to be forked then. A lock of the user's may
hold up the fork; another process may have got the parent's pid."""


def _end_from_outside() -> None:
    """Kill this process, and all that it started, by a fork of it.

    A fork can stop it first. Here its other threads might start something just while we look.
    """
    if not hasattr(os, "fork"):
        return
    worker = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads: the fork needs none of their locks
        try:
            if os.fork():
                threading.Event().wait()
        except OSError:  # no more processes, no memory
            return
    os.setsid()  # out of the group that is killed
    kill_trees({worker: partial(os.kill, worker)})
    os._exit(0)


def kill_descendants() -> None:
    """Kill all that this process started, and what that started."""
    _kill_each(_descendants(os.getpid()))


def _kill_each(pids: list[int]) -> None:
    for pid in pids:
        _send(partial(os.kill, pid), "SIGKILL")


def kill_trees(leaders: Mapping[int, Callable[[int], None]]) -> list[int]:
    """Kill processes with their groups, and what they started outside these (setsid).

    All descendants are looked up before the first process dies, because then they lose the
    parent they are found by, and an executor ends all its workers when one is gone.

    Args:
        leaders: how to send a signal to each process, by its pid.

    Returns:
        The pids of the others that were killed.
    """
    descendants: list[int] = []
    try:
        for send in leaders.values():
            _send(send, "SIGSTOP")  # so that it starts nothing more while we look
        others = (other for pid in leaders for other in _descendants(pid))
        descendants += [other for other in others if other != os.getpid()]
    finally:  # if Ctrl-C comes meanwhile, too: nobody else would end those that were stopped
        for pid, send in leaders.items():
            kill_group(pid)
            _send(send, "SIGKILL")
        _kill_each(descendants)
    return descendants


def kill_group(pid: int, *, reaped: bool = False) -> None:
    """Kill what is left of the group that a process leads, or led while it lived.

    If it was reaped, its pid may be another process's. No process gets it while the group has a
    member (POSIX says so): if there is one of that pid, nothing is left of the group.
    """
    if hasattr(os, "killpg") and not (reaped and _exists(pid)):
        _send(partial(os.killpg, pid), "SIGKILL")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _send(send: Callable[[int], None], name: str) -> None:
    number = getattr(signal, name, None if name == "SIGSTOP" else signal.SIGTERM)  # Windows
    try:
        if number is not None:
            send(number)
    except (ProcessLookupError, PermissionError):
        return  # gone already; or no longer ours: it changed user


def _read_all(name: str) -> Iterator[tuple[int, bytes]]:
    """Read a file of each process, with its pid.

    There are none where there is no /proc, or that of another namespace: its pids are others.
    """
    if pid_in_proc() != str(os.getpid()):
        return
    for pid in filter(str.isdigit, names("/proc")):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                content = file.read()
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
        yield int(pid), content


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they did."""
    children = defaultdict(list)
    for child, stat in _read_all("stat"):
        # "pid (name) state ppid": the name may hold anything, spaces and brackets too.
        children[int(stat[stat.rindex(b")") + 2 :].split()[1])].append(child)
    family = [pid]
    for member in family:  # grows while we walk
        family += children[member]
    return family[1:]


LONGEST_EXEC = 0.1
"""Seconds that are waited for programs which have no environment yet. Some never have one."""


def kill_marked(name: str, value: str) -> list[int]:
    """Kill every process that was started with this environment variable, wherever it went.

    Returns:
        Their pids.
    """
    mark = f"{name}={value}".encode()
    killed = []
    deadline = time.monotonic() + LONGEST_EXEC
    while True:
        are_starting = False
        for pid, environment in _read_all("environ"):
            if mark in environment.split(b"\0"):
                _kill_each([pid])
                killed.append(pid)
            # Linux lets go of who has started a program before that has its environment. A process
            # of the kernel has no program.
            are_starting |= not environment and os.path.exists(f"/proc/{pid}/exe")
        if not are_starting or time.monotonic() > deadline:
            return killed
        time.sleep(0.005)


def reap_orphans(leaders: list[int], others: list[int], seconds: float) -> None:
    """Reap what workers have left, where this process is the one that orphans are given to.

    That is the first process of a container which has no init. Nobody else would reap them.

    Args:
        leaders: pids of workers that were reaped: all that was in their groups is meant.
        others: pids of other processes that were killed.
        seconds: how long to wait for their end.
    """
    if not hasattr(os, "waitpid") or not hasattr(os, "WNOHANG"):
        return
    deadline = time.monotonic() + seconds
    # A negative number stands for a group.
    unreaped = [-pid for pid in leaders if not _exists(pid)] + others
    while unreaped := [which for which in unreaped if _reap(which)]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _reap(which: int) -> bool:
    """Reap a process, or those of a group, that have ended; return whether others are to end."""
    try:
        while os.waitpid(which, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True
