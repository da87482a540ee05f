"""Send what a worker logs and warns to the parent, where it comes out as if it had happened there.

    worker: logger.info(...) ──> root logger's only handler ──┐
            warnings.warn(...) ──> showwarning ───────────────┤ one socket of an executor
    parent: its logger of that name, its warnings  <── thread ┘ (``_pools/log_reader.py``)

Each message is a packet, which the system delivers whole and in order, however many workers send. A
worker that sends faster than the parent reads waits, and nobody else does.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from minloader._worker.messages import WorkerInfo
from minloader._worker.plugins import Plugin

PACKET = 64 * 1024
"""Bytes; longer messages are sent in pieces. The system takes at least 200 kB at once, but has to
find them in one piece of its memory."""

HEAD = 5
"""Bytes before a piece: four for the pid, and whether the piece is the message's last."""


said: dict[str, object] = {}
"""Lines of our own that say of themselves that they are said once, and were said."""


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of ours is to come out: one that is said once is so in a program.

    A worker knows of its own lines. They come here once more in the parent, which knows of all.
    """
    line = str(record.msg)
    news = object()
    return "said once" not in line or said.setdefault(line, news) is news  # in one step


logging.getLogger("minloader").addFilter(_is_news)


class WorkerWarning(NamedTuple):
    """A warning of a worker; arguments of ``warnings.warn_explicit``."""

    message: Any
    category: type[Warning]
    filename: str
    line: int


@dataclass
class WorkerLogs(Plugin):
    """Sends what a worker logs and warns to the parent, without what nobody wants there.

    Attributes:
        connection: leads to the parent; None: each worker logs for itself.
        levels: of the loggers that have one, by name; "" for the root logger.
        others: of all others, which a worker need not have: 0, or that of a logger of another class
            than logging's own. Only the libraries that they are of make such.
        disabled: level up to which all logging is switched off.
        filters: arguments of ``warnings.filterwarnings`` for the filters of built-in categories,
            the first to be asked first. (Others might be of a module that a worker lacks.)
    """

    connection: socket.socket | None
    levels: dict[str, int]
    others: dict[str, int]
    disabled: int
    filters: list[tuple[Any, ...]]

    @classmethod
    def to(cls, connection: socket.socket | None) -> WorkerLogs:
        """Return what has workers log as this process does now."""
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels: dict[str, int] = {}
        others: dict[str, int] = {}
        for name, each in loggers.items():
            if each is root or (type(each) is logging.Logger and each.level):
                levels[name] = each.level
            elif isinstance(each, logging.Logger):
                others[name] = each.level
        filters: list[tuple[Any, ...]] = [
            (action, _text(message), category, _text(module), line)
            for action, message, category, module, line in list(warnings.filters)
            if getattr(category, "__module__", None) == "builtins"
        ]
        return cls(connection, levels, others, root.manager.disable, filters)

    def start(self, info: WorkerInfo) -> None:
        if self.connection is not None:
            send_logs(self.connection)
            self._set_levels()

    def loaded(self) -> None:
        """What the job has imported may have set levels and filters otherwise."""
        if any(isinstance(each, _LogSender) for each in logging.root.handlers):
            self._set_levels()
        warnings.resetwarnings()
        for action, message, category, module, line in self.filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)

    def _set_levels(self) -> None:
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        for name, level in self.others.items():
            logger = logging.root.manager.loggerDict.get(name)
            if isinstance(logger, logging.Logger) and logger.level != level:
                logger.setLevel(level)  # which asks each logger of the process to forget its own


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


class _LogSender(logging.Handler):
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


def send_logs(connection: socket.socket) -> None:
    """Have all that this worker process logs and warns come out in the parent.

    Unless logging is set up in the worker itself: then its handlers have what it logs.
    """
    sender = _LogSender(connection)
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
