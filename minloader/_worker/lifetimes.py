"""How a worker process begins and ends, with all that it starts.

A worker leads a process group of its own. Three ways out are covered: the parent ends the worker
(:func:`kill_trees`, in ``signals.py``), the worker leaves by itself (:func:`kill_descendants`), and
the parent vanishes (:func:`follow_parent`).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from minloader._worker.signals import (
    descendants,
    handled_signals,
    kill_each,
    kill_group,
    kill_trees,
)


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
    kill_each(descendants(os.getpid()))
