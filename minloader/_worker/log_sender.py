"""The only handler of a worker process: it sends what is logged and warned to the parent.

``logs.py`` has a drawing of the way there.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

PACKET = 64 * 1024
"""Bytes; longer messages are sent in pieces. The system takes at least 200 kB at once, but has to
find them in one piece of its memory."""

HEAD = 5
"""Bytes before a piece: four for the pid, and whether the piece is the message's last."""


class WorkerWarning(NamedTuple):
    """A warning of a worker; arguments of ``warnings.warn_explicit``."""

    message: Any
    category: type[Warning]
    filename: str
    line: int


class LogSender(logging.Handler):
    """The only handler of a worker process, and of forks of it.

    Args:
        connection: leads to the parent.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        try:
            values = record.__dict__ | {"msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                values["exc_text"] = logging.Formatter().formatException(record.exc_info)
        except Exception:  # arguments that do not fit the text: no error of the batch
            self.handleError(record)
            return
        try:
            data = pickle.dumps(values, 5)
        except Exception:  # something in ``extra``
            standard = logging.makeLogRecord({}).__dict__
            values = {name: values[name] for name in standard if name in values}
            data = pickle.dumps(values, 5)
        self._send(data)

    def show_warning(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        """Stand in for ``warnings.showwarning``."""
        warning = WorkerWarning(message, category, filename, line)
        try:
            data = pickle.dumps(warning, 5)
        except Exception:  # a class that nobody finds by its name
            text = f"{category.__name__}: {message}"
            data = pickle.dumps(warning._replace(message=text, category=UserWarning), 5)
        self._send(data)

    def _send(self, data: bytes) -> None:
        """Send a message."""
        pid = os.getpid().to_bytes(4, "little")
        self.acquire()
        try:
            with suppress(OSError):  # the parent has ended, and we are about to
                for start in range(0, len(data), PACKET):
                    is_last = bytes([start + PACKET >= len(data)])
                    self._connection.sendall(pid + is_last + data[start : start + PACKET])
        finally:
            self.release()


def send_logs(connection: socket.socket) -> LogSender:
    """Have all that this worker process logs and warns come out in the parent. Return the handler.

    Unless logging is set up in the worker itself: then its handlers have what it logs.
    """
    sender = LogSender(connection)
    root = logging.getLogger()
    for each in (root, *root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            each.handlers.clear()  # in a fork they are the parent's
            if each is root or not each.propagate:
                each.addHandler(sender)
    basic_config = logging.basicConfig

    def set_up(**options: Any) -> None:
        root.removeHandler(sender)  # with any handler there basicConfig would do nothing
        basic_config(**options)

    logging.basicConfig = set_up
    warnings.showwarning = sender.show_warning  # type: ignore[assignment]  # others call it, too
    return sender
