"""A file with all events of the timeline."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

from minloader._diagnosis.figures import split_task
from minloader._epochs.counters import Event
from minloader._epochs.options import Shared
from minloader._formats import brief_repr

logger = logging.getLogger("minloader")


class Trace:
    """A file of events in the format of Chrome's tracing, which Perfetto and others open.

    Each event is written at once, so that a program killed in the middle leaves out only the
    closing bracket. The format does not insist on that.

    Args:
        path: file to write; overwritten.

    Raises:
        OSError: the file cannot be written.
        TypeError: ``path`` is no path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):  # FileIO takes 1 and True for standard output
            raise TypeError(f"trace must be the path of a file to write, got {brief_repr(path)}")
        self.path = path
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        # Without a buffer: a fork would write what is left in it once more.
        self._file: io.FileIO | None = io.FileIO(path, "w")
        self._put("[", {"name": "process_name", "ph": "M", "args": {"name": "minloader"}})

    def write(self, event: Event) -> None:
        """Add an event. If that fails, the file ends there: a full disk ends no training."""
        if os.getpid() != self._pid:
            return
        tid = self._track_id(event.track)
        for part in split_task(event):
            entry = {"name": part.name, "tid": tid, "ts": part.start * 1e6, "args": part.args}
            if part.seconds:
                self._put(",\n", entry | {"ph": "X", "dur": part.seconds * 1e6})
            else:
                self._put(",\n", entry | {"ph": "i", "s": "t"})

    def close(self) -> None:
        """Complete the file. Harmless when repeated, or in a fork."""
        if os.getpid() == self._pid:
            self._send("]\n")
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _track_id(self, name: str) -> int:
        """Return the number of a track. The first time, its name is written."""
        if name not in self._tracks:
            tid = len(self._tracks)
            self._tracks[name] = tid
            self._put(",\n", {"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": name}})
        return self._tracks[name]

    def _put(self, before: str, entry: dict[str, Any]) -> None:
        self._send(before + json.dumps({"pid": self._pid} | entry, default=str))

    def _send(self, text: str) -> None:
        """Write text to the file, if that is still open."""
        file = self._file
        data = text.encode()
        if file is None:
            return
        try:
            while data:  # a full disk may take a part of it
                data = data[file.write(data) :]
        except ValueError:
            return  # another thread has just closed it
        except OSError as error:
            file.close()
            self._file = None
            logger.warning("the trace %s ends here: %s", self.path, error)


class Traced(AbstractContextManager[None]):
    """Writes a timeline while its block lasts; see :meth:`minloader.Loader.trace`.

    Args:
        shared: what the loader's epochs share.
        path: of the file.
    """

    def __init__(self, shared: Shared, path: str | os.PathLike[str]) -> None:
        self._shared = shared
        self._path = path
        self._was_entered = False

    def __enter__(self) -> None:
        self._was_entered = True
        self._shared.check_open()
        counters = self._shared.counters
        if counters.file is not None:
            raise RuntimeError(
                f"a trace is being written to {counters.file.path} already; end that first"
            )
        self._file = Trace(self._path)
        counters.file = self._file

    def __exit__(self, *error: object) -> None:
        self._shared.counters.file = None  # first: another thread may be adding an event
        self._file.close()

    def __del__(self) -> None:
        if not self._was_entered:
            text = f"nothing was written to {self._path}: write `with loader.trace(path):`"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
