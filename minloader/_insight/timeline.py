"""The timeline: what was done when, and the last events of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from minloader._checks import snapshot

EVENTS_KEPT = 3000
"""Number of events kept for the timeline, the last ones: some 1,000 tasks, in less than 1 MB."""


class Event(NamedTuple):
    """Something that took a while, or that happened in an instant.

    Attributes:
        track: row of the timeline that it belongs to: "consumer", "sampler", "worker 0".
        name: "wait", "draw", "task", "dataset", "transform", "collate" or "transport"; in an
            instant "died", "again" or "failed".
        start: when it began, in seconds of ``time.perf_counter``.
        seconds: how long it took; 0 for an instant.
        args: details, such as "batch", "count", "epoch", "cause".
    """

    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


def track_of(worker: int, pid: int) -> str:
    """Return the track of a worker; those of an executor of the user's have no number."""
    if worker >= 0:
        return f"worker {worker}"
    return f"process {pid}" if worker == -1 else f"process {pid}, thread {-worker}"


class EventFile(Protocol):
    """A file that events are written to, see :class:`minloader._diagnosis.trace.Trace`."""

    path: Any

    def write(self, event: Event) -> None:
        """Add an event."""

    def close(self) -> None:
        """Complete the file."""


@dataclass(slots=True, frozen=True)
class Timeline:
    """A copy of the last events.

    Attributes:
        events: those of tasks not split yet.
        began: when the first epoch began, by ``time.perf_counter``.
        taken_at: when this copy was made.
    """

    events: tuple[Event, ...] = ()
    began: float = 0.0
    taken_at: float = 0.0


@dataclass(slots=True)
class EventLog:
    """The last events of a loader, while they are recorded.

    Attributes:
        events: those of tasks not split yet.
        began: when the first epoch began, by ``time.perf_counter``.
        file: where events are written as well, or None.
    """

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    began: float = 0.0
    file: EventFile | None = None

    def end_file(self) -> None:
        """Complete the file, if there is one."""
        file = self.file
        self.file = None
        if file is not None:
            file.close()

    def snapshot(self, now: float) -> Timeline:
        """Return a copy, from any thread."""
        return Timeline(events=tuple(snapshot(self.events)), began=self.began, taken_at=now)


def split_task(event: Event) -> Iterator[Event]:
    """Yield an event as it is shown: a task, then its stages one behind the other.

    For a task of several batches the time of each stage is summed over these.
    """
    args = dict(event.args)
    timings = args.pop("timings", None)
    yield event._replace(args=args)
    if timings is None:
        return
    transform, collate, transport = timings
    stages = {
        "dataset": max(0.0, event.seconds - sum(timings)),
        "transform": transform,
        "collate": collate,
        "transport": transport,
    }
    start = event.start
    for name, seconds in stages.items():
        if seconds > 0:
            yield Event(track=event.track, name=name, start=start, seconds=seconds, args={})
        start += seconds
