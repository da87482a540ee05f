"""Send what a worker logs and warns to the parent, where it comes out as if it had happened there.

    worker: logger.info(...) ──> root logger's only handler ──┐
            warnings.warn(...) ──> showwarning ───────────────┤ one socket of an executor
    parent: its logger of that name, its warnings  <── thread ┘ (``_pools/log_reader.py``)

Each message is a packet, which the system delivers whole and in order, however many workers send. A
worker that sends faster than the parent reads waits, and nobody else does.
"""

from __future__ import annotations

import logging
import socket
import warnings
from dataclasses import dataclass
from typing import Any

from minloader._worker.log_sender import send_logs
from minloader._worker.messages import WorkerInfo
from minloader._worker.plugins import Plugin


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
        sender: in a worker that sends, the handler that does.
    """

    connection: socket.socket | None
    levels: dict[str, int]
    others: dict[str, int]
    disabled: int
    filters: list[tuple[Any, ...]]
    sender: logging.Handler | None = None

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
            self.sender = send_logs(self.connection)
            self._set_levels()

    def loaded(self) -> None:
        """What the job has imported may have set levels and filters otherwise."""
        if self.sender in logging.root.handlers:
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
