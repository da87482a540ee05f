"""What workers log and warn comes out here: a thread of the parent hands it on.

``_worker/logs.py`` is the other side, with a drawing of both.
"""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from minloader._memory import forks
from minloader._worker.log_sender import HEAD, PACKET, WorkerWarning

logger = logging.getLogger("minloader")


class LogReader:
    """The parent's side of an executor's workers: a thread that hands on what they log.

    Attributes:
        sender: the other end, for the workers to inherit; None where there cannot be one: then each
            worker logs for itself.
    """

    sender: socket.socket | None = None

    def __init__(self) -> None:
        try:
            self._reader, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (OSError, AttributeError):  # no more of them; there are none (Windows)
            return
        for each in (self._reader, sender):
            each.settimeout(None)  # whatever socket.setdefaulttimeout says
        # It knows nothing but its socket, so that the executor can be collected.
        self._thread = threading.Thread(
            target=_hand_on, args=(self._reader,), name="minloader-logs", daemon=True
        )
        try:
            self._thread.start()
            self.sender = sender
        except RuntimeError:  # no more threads
            self._reader.close()
            sender.close()

    def close(self, seconds: float) -> None:
        """Hand on what is there, for so many seconds at most. The workers have ended."""
        if self.sender is None:
            return
        # What was sent before can still be read. To close the sender would not be enough: a
        # process that a worker left behind may have it.
        with suppress(OSError):  # the thread has failed
            self._reader.shutdown(socket.SHUT_RD)
        self.sender.close()
        self._thread.join(seconds)


_showing = forks.new_lock()
"""Held while something is shown. A fork would copy the locks of handlers and files as they are just
then, held for ever by a thread that is not in the child. So a fork waits for this one, unless a
handler blocks."""


def _before_fork() -> None:
    _showing.acquire(timeout=0.5)


def _after_fork() -> None:
    with suppress(RuntimeError):  # the fork has waited in vain: another thread has the lock
        _showing.release()


forks.before.append(_before_fork)
forks.in_parent.append(_after_fork)
forks.in_child.append(_after_fork)


def _hand_on(reader: socket.socket) -> None:
    pieces: dict[bytes, bytearray] = {}
    shown: dict[Any, Any] = {}
    with reader:
        for packet in _packets(reader):
            pid = packet[:4]
            pieces.setdefault(pid, bytearray()).extend(packet[HEAD:])
            is_last = packet[4]
            if not is_last:
                continue
            try:
                message = pickle.loads(pieces.pop(pid))
                with _showing:
                    if isinstance(message, WorkerWarning):
                        _warn(message, shown)
                    else:
                        _handle(message)
            except Exception:  # a handler of the user's, or a filter that makes an error of it
                try:
                    logger.exception("what a worker logged could not be shown")
                except Exception:  # the same handler: what other workers say is still to come
                    traceback.print_exc()


def _packets(reader: socket.socket) -> Iterator[bytes]:
    """Yield what is sent, until the reader is shut down."""
    while True:
        try:
            packet = reader.recv(PACKET + HEAD)
        except OSError:  # gevent ends a wait so; what was sent before can still be read
            packet = reader.recv(PACKET + HEAD)
        if not packet:
            return
        yield packet


def _handle(values: dict[str, Any]) -> None:
    record = logging.makeLogRecord(values)
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)


def _warn(warning: WorkerWarning, shown: dict[Any, Any]) -> None:
    modules = list(sys.modules.items())
    # Files of which this process has no module are cells of a notebook, or the like.
    found = (name for name, each in modules if getattr(each, "__file__", None) == warning.filename)
    warnings.warn_explicit(
        message=warning.message,
        category=warning.category,
        filename=warning.filename,
        lineno=warning.line,
        module=next(found, "__main__"),
        registry=shown,
    )
