"""Which signals are handled here, and how processes are killed with all that they started."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from minloader._memory.files import pid_in_proc
from minloader._memory.limits import names


def handled_signals() -> list[int]:
    """Return the signals for which this process has a handler in Python."""
    return [each for each in signal.valid_signals() if callable(signal.getsignal(each))]


def kill_each(pids: list[int]) -> None:
    """Kill processes."""
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
    others: list[int] = []
    try:
        for send in leaders.values():
            _send(send, "SIGSTOP")  # so that it starts nothing more while we look
        found = (other for pid in leaders for other in descendants(pid))
        others += [other for other in found if other != os.getpid()]
    finally:  # if Ctrl-C comes meanwhile, too: nobody else would end those that were stopped
        for pid, send in leaders.items():
            kill_group(pid)
            _send(send, "SIGKILL")
        kill_each(others)
    return others


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


def descendants(pid: int) -> list[int]:
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
                kill_each([pid])
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
