"""Process groups and trees: a worker leads a group, follows its parent, takes its children along.

Three ways out are covered: the parent ends a worker (:func:`kill_trees`), the worker leaves by
itself (:func:`kill_descendants`), and the parent vanishes (:func:`follow_parent`). What the
system lets a process have is asked here too.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any


def lead_group() -> None:
    """Gives the worker, and all it will start, a process group of its own.

    It keeps the terminal's Ctrl-C for the parent, and lets all of it be killed at once.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    # A handler rather than SIG_IGN, which programs started by the worker would inherit.
    signal.signal(signal.SIGINT, _ignore)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by the parent


def _ignore(signum: int, frame: Any) -> None:
    """Does nothing: the parent decides what Ctrl-C means."""


def follow_parent(last_act: Callable[[], object]) -> None:
    """Lets this worker process end when its parent does, together with all it started.

    Args:
        last_act: called before that.
    """
    parent = multiprocessing.parent_process()
    args = (parent, last_act)
    threading.Thread(target=_watch, args=args, name="minloader-watchdog", daemon=True).start()


def _watch(parent: Any, last_act: Callable[[], object]) -> None:
    """Waits for the parent to end, in whatever way, and takes everything along."""
    handles = [parent.sentinel]
    if hasattr(os, "pidfd_open"):
        # The sentinel is a pipe that a fork of the parent would hold open; this is not.
        try:
            handles.append(os.pidfd_open(parent.pid))
        except OSError:  # no such kernel; or no such process: then the sentinel is ready
            handles = [parent.sentinel]
    multiprocessing.connection.wait(handles)
    last_act()
    # In one go: when a child that it waits for is gone, the worker would go on, to its next task.
    kill_descendants()
    kill_group(os.getpid())
    os._exit(1)  # where there are no groups


def kill_descendants() -> None:
    """Kills all that this process started, and what that started."""
    for pid in _descendants(os.getpid()):
        _send(pid, "SIGKILL")


def kill_trees(pids: Iterable[int]) -> None:
    """Kills processes with their groups, and what they started outside these (setsid).

    All descendants are looked up before the first process dies, because then they lose the
    parent they are found by, and an executor ends all its workers when one is gone.
    """
    leaders = list(pids)
    for pid in leaders:
        _send(pid, "SIGSTOP")  # so that it starts nothing more while we look
    descendants = [other for pid in leaders for other in _descendants(pid)]
    for pid in leaders:
        kill_group(pid)
    for pid in leaders + descendants:
        _send(pid, "SIGKILL")


def kill_group(pid: int) -> None:
    """Kills what is left of the group that a process leads or led."""
    if hasattr(os, "killpg"):
        _send(pid, "SIGKILL", os.killpg)


def _send(pid: int, name: str, send: Callable[[int, int], None] = os.kill) -> None:
    number = getattr(signal, name, None if name == "SIGSTOP" else signal.SIGTERM)  # Windows
    try:
        if number is not None:
            send(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # gone already; or no longer ours: it changed user


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they did; [] where there is no /proc."""
    children = defaultdict(list)
    for each in _all_pids():
        try:
            with open(f"/proc/{each}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended while we looked
        # "pid (name) state ppid": the name may hold anything, spaces and brackets too.
        children[int(stat[stat.rindex(b")") + 2 :].split()[1])].append(each)
    found = [pid]
    for each in found:  # grows while we walk
        found += children[each]
    return found[1:]


def kill_marked(name: str, value: str) -> None:
    """Kills every process that was started with this environment variable, wherever it went."""
    mark = f"{name}={value}".encode()
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
        if marked:
            _send(pid, "SIGKILL")
