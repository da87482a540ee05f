"""What workers log and warn comes out in the parent, as if it had happened there.

    worker: logger.info(...) ──> root logger's only handler ──┐
            warnings.warn(...) ──> showwarning ───────────────┤ one socket of an executor
    parent: its logger of that name, its warnings  <── thread ┘

Each message is a packet, which the system delivers whole and in order, however many workers send. A
worker that sends faster than the parent reads waits, and nobody else does.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

logger = logging.getLogger("minloader")

PACKET = 64 * 1024
"""Bytes; longer messages are sent in pieces. The system takes at least 200 kB at once, but has to
find them in one piece of its memory."""


class LogSettings(NamedTuple):
    """How the calling process logs and warns, for workers to leave out what nobody wants.

    Attributes:
        levels: of the loggers that have one, by name; "" for the root logger.
        disabled: level up to which all logging is switched off.
        filters: arguments of ``warnings.filterwarnings`` for the filters of built-in categories,
            the first to be asked first. (Others might be of a module that a worker lacks.)
    """

    levels: dict[str, int]
    disabled: int
    filters: list[tuple[Any, ...]]

    @classmethod
    def of_this_process(cls) -> LogSettings:
        """Return those of now."""
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels = {
            name: each.level
            for name, each in loggers.items()
            if isinstance(each, logging.Logger) and each.level
        }
        filters: list[tuple[Any, ...]] = [
            (action, _text(message), category, _text(module), line)
            for action, message, category, module, line in list(warnings.filters)
            if getattr(category, "__module__", None) == "builtins"
        ]
        return cls(levels, root.manager.disable, filters)

    def set_levels(self) -> None:
        """Log in this process what that one wants."""
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)

    def set_filters(self) -> None:
        """Warn in this process as that one does."""
        warnings.resetwarnings()
        for action, message, category, module, line in self.filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


class LogReader:
    """The parent's side of an executor's workers: a thread that hands on what they log.

    Attributes:
        sender: the other end, for the workers to inherit.

    Raises:
        OSError: the system has no such sockets, or no more of them.
        RuntimeError: it has no more threads.
    """

    def __init__(self) -> None:
        self._reader, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # It knows nothing but its socket, so that the executor can be collected.
        self._thread = threading.Thread(
            target=_hand_on, args=(self._reader,), name="minloader-logs", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._reader.close()
            self.sender.close()
            raise

    def close(self, seconds: float) -> None:
        """Hand on what is there, for so many seconds at most. The workers have ended."""
        # What was sent before can still be read. To close the sender would not be enough: a
        # process that a worker left behind may have it.
        with suppress(OSError):  # the thread has failed
            self._reader.shutdown(socket.SHUT_RD)
        self.sender.close()
        if self._thread is not threading.current_thread():  # garbage is collected anywhere
            self._thread.join(seconds)


def open_logs() -> LogReader | None:
    """Return a reader, or None where there cannot be one: then each worker logs for itself."""
    try:
        return LogReader()
    except (OSError, RuntimeError, AttributeError):  # the last on Windows
        return None


_showing = threading.RLock()
"""Held while something is shown. A fork would copy the locks of handlers and files as they are just
then, held for ever by a thread that is not in the child. So a fork waits for this one, unless a
handler blocks."""

_forking = threading.local()  # .waited: whether this thread's fork has the lock


def _before_fork() -> None:
    _forking.waited = _showing.acquire(timeout=0.5)


def _after_fork() -> None:
    if _forking.waited:
        _showing.release()


def _in_forked_child() -> None:
    global _showing
    _showing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child
    )


def _hand_on(reader: socket.socket) -> None:
    pieces: dict[bytes, bytearray] = {}
    shown: dict[Any, Any] = {}
    with reader:
        while packet := reader.recv(PACKET + _HEAD):
            worker, is_last, piece = packet[:2], packet[2], packet[_HEAD:]
            pieces.setdefault(worker, bytearray()).extend(piece)
            if not is_last:
                continue
            try:
                kind, values = pickle.loads(pieces.pop(worker))
                with _showing:
                    if kind == "record":
                        _handle(values)
                    else:
                        _warn(shown, *values)
            except Exception:  # a handler of the user's, or a filter that makes an error of it
                try:
                    logger.exception("what a worker logged could not be shown")
                except Exception:  # the same handler: what other workers say is still to come
                    traceback.print_exc()


def _handle(values: dict[str, Any]) -> None:
    record = logging.makeLogRecord(values)
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)


def _warn(shown: dict[Any, Any], message: Any, category: Any, filename: str, line: int) -> None:
    modules = list(sys.modules.items())
    # Files of which this process has no module are cells of a notebook, or the like.
    found = (name for name, each in modules if getattr(each, "__file__", None) == filename)
    warnings.warn_explicit(
        message, category, filename, line, module=next(found, "__main__"), registry=shown
    )


_HEAD = 3  # bytes before a piece: the worker's index, and whether it is the message's last


class _LogSender(logging.Handler):
    """The only handler of a worker process.

    Args:
        connection: leads to the parent.
        index: of the worker in its executor.
    """

    def __init__(self, connection: socket.socket, index: int) -> None:
        super().__init__()
        self._connection = connection
        self._index = index.to_bytes(2, "little")
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        values = record.__dict__ | {"msg": record.getMessage(), "args": None, "exc_info": None}
        if record.exc_info:
            values["exc_text"] = logging.Formatter().formatException(record.exc_info)
        try:
            data = pickle.dumps(("record", values), 5)
        except Exception:  # something in ``extra``
            known = logging.makeLogRecord({}).__dict__
            values = {name: values[name] for name in known if name in values}
            data = pickle.dumps(("record", values), 5)
        if not self._send(data) and logging.lastResort and record.levelno >= logging.WARNING:
            logging.lastResort.handle(record)

    def show_warning(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        """Stand in for ``warnings.showwarning``."""
        try:
            data = pickle.dumps(("warning", (message, category, filename, line)), 5)
        except Exception:  # a class that nobody finds by its name
            text = f"{category.__name__}: {message}"
            data = pickle.dumps(("warning", (text, UserWarning, filename, line)), 5)
        if not self._send(data):
            sys.stderr.write(warnings.formatwarning(message, category, filename, line))

    def _send(self, data: bytes) -> bool:
        """Send a message; return whether it could be sent."""
        if os.getpid() != self._pid:  # a fork: the parent could not tell its pieces from ours
            return False
        self.acquire()
        try:
            for start in range(0, len(data), PACKET):
                piece = data[start : start + PACKET]
                head = self._index + bytes([start + PACKET >= len(data)])
                self._connection.sendall(head + piece)
            return True
        except OSError:  # the parent has ended, and we are about to
            return False
        finally:
            self.release()


def send_logs(connection: socket.socket, index: int) -> None:
    """Have all that this worker process logs and warns come out in the parent.

    Unless logging is set up in the worker itself: then its handlers have what it logs.
    """
    sender = _LogSender(connection, index)
    root = logging.getLogger()
    for each in (root, *root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            each.handlers.clear()  # in a fork they are the parent's
    root.addHandler(sender)
    basic_config = logging.basicConfig

    def set_up(**options: Any) -> None:
        root.removeHandler(sender)  # with any handler there basicConfig would do nothing
        basic_config(**options)

    logging.basicConfig = set_up
    warnings.showwarning = sender.show_warning  # type: ignore[assignment]  # others call it, too
