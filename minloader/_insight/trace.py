"""The timeline: events, and a file of them."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from minloader._checks import shown

logger = logging.getLogger("minloader")


class Event(NamedTuple):
    """Something that was done, or happened.

    Attributes:
        track: by whom: "consumer", "sampler", "worker 0".
        name: what: "wait", "draw", "task", "dataset", "transform", "collate", "transport"; or, in
            an instant, "died", "again", "failed".
        start: when it began, by ``time.perf_counter``.
        seconds: how long it took; 0 if it happened in an instant.
        args: more about it.
    """

    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


def _parts(event: Event) -> Iterator[Event]:
    """An event as it is shown: a task followed by its parts, one behind the other.

    What a task of several batches did in turns is added up, part by part.
    """
    timings = event.args.get("timings")
    if timings is None:
        yield event
        return
    transform, collate, transport = timings
    dataset = max(0.0, event.seconds - sum(timings))
    yield event._replace(args={k: v for k, v in event.args.items() if k != "timings"})
    start = event.start
    for name, seconds in (
        ("dataset", dataset),
        ("transform", transform),
        ("collate", collate),
        ("transport", transport),
    ):
        if seconds > 0:
            yield Event(event.track, name, start, seconds, {})
        start += seconds


class Trace:
    """A file of events, in the format of Chrome's tracing, which Perfetto and others open.

    Each event is written at once. The closing bracket, which the format does not insist on, is
    all that a program killed in the middle leaves out.

    Args:
        path: file to write; overwritten.

    Raises:
        OSError: it cannot be.
        TypeError: it is not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):  # True would be the standard output
            raise TypeError(f"trace must be the path of a file to write, got {shown(path)}")
        self.path = path
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        # No buffer of ours: a fork would write what is left in it once more.
        self._file: io.FileIO | None = io.FileIO(path, "w")
        self._put("[", {"name": "process_name", "ph": "M", "args": {"name": "minloader"}})
        for track in ("consumer", "sampler"):
            self._track(track)

    def write(self, event: Event) -> None:
        """Adds an event. If that fails, the file ends there: a full disk ends no training."""
        if self._file is None or os.getpid() != self._pid:
            return
        tid = self._track(event.track)
        for part in _parts(event):
            entry = {"name": part.name, "tid": tid, "ts": part.start * 1e6, "args": part.args}
            if part.seconds:
                self._put(",\n", entry | {"ph": "X", "dur": part.seconds * 1e6})
            else:
                self._put(",\n", entry | {"ph": "i", "s": "t"})

    def _track(self, name: str) -> int:
        tid = self._tracks.get(name)
        if tid is None:
            tid = self._tracks[name] = len(self._tracks)
            meta = {"ph": "M", "tid": tid}
            self._put(",\n", meta | {"name": "thread_name", "args": {"name": name}})
            self._put(",\n", meta | {"name": "thread_sort_index", "args": {"sort_index": tid}})
        return tid

    def _put(self, before: str, entry: dict[str, Any]) -> None:
        self._send(before + json.dumps({"pid": self._pid} | entry, default=str))

    def _send(self, text: str) -> None:
        if self._file is None:
            return
        data = text.encode()
        try:
            while data:  # a full disk may take a part of it
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            self._file = None
            logger.warning("the trace %s ends here: %s", self.path, error)

    def close(self) -> None:
        """Completes the file. Harmless when repeated, or in a fork."""
        if self._file is None:
            return
        if os.getpid() == self._pid:
            self._send("]\n")
        if self._file is not None:
            self._file.close()
            self._file = None
