"""What each worker has done, and whether the memory that it has for itself grows."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minloader._checks import brief_repr, format_bytes, snapshot
from minloader._worker.generators import own_message
from minloader._worker.messages import Reply

logger = logging.getLogger("minloader")

LEAK = 16 << 20
"""Bytes that a worker may grow by in any case, and as a cache of a few samples does."""


JUMP = 50_000_000
"""Bytes from which on it is told by which batch a worker grew."""

JUMPS_KEPT = 100
"""Number of jumps kept, the last ones."""


class Jump(NamedTuple):
    """A worker was seen to have grown by more than 50 MB since its memory was looked at before.

    Attributes:
        worker: its name, as in ``memory``.
        bytes: by which it grew.
        epoch: of the last batch that it had made then.
        batch: the place of that in its epoch.
        item: what it was made of, as text: the item of the sampler, or shard and place in it.
    """

    worker: str
    bytes: int
    epoch: int
    batch: int
    item: str


def too_large(reply: Reply, limit: int, place: str) -> str:
    """Say why a worker is replaced.

    Args:
        reply: what it sent.
        limit: bytes that it may have.
        place: the batch that it made last.
    """
    usage = reply.figures.usage
    at_start = usage.memory_at_start
    began = f" (it began with {format_bytes(at_start)})" if at_start else ""
    return (
        f"worker {reply.worker} (pid {reply.pid}) takes more than worker_memory_limit={limit}: it "
        f"has {format_bytes(usage.memory)} for itself{began} since {place}"
    )


@dataclass(slots=True)
class WorkerCount:
    """What is counted of one worker, or of those that took its place one after the other.

    Attributes:
        seconds: that it was busy.
        batches: that it made.
        memory: bytes that it has for itself; 0 if that is not known.
        at_start: bytes that it had before its first batch.
        growth: bytes by which it has grown steadily; 0 if it has not.
        grown_in: batches that it made meanwhile.
        jump: bytes by which it has grown since it was looked at before.
    """

    seconds: float = 0.0
    batches: int = 0
    memory: int = 0
    at_start: int = 0
    growth: int = 0
    grown_in: int = 0
    jump: int = 0
    _pid: int = 0
    _pid_before: int = 0  # of the process whose place this one took
    _seen: int = 0  # observations, of this process
    _lows: list[tuple[int, int]] = field(default_factory=list)  # the least memory, and batches then

    def note_memory(self, reply: Reply) -> bool:
        """Note what a reply says of memory; return whether it is found to grow steadily.

        The least memory is noted of each span of observations that is twice as long as the one
        before. It grows steadily if this doubles too, more or less: that of a cache which fills
        grows less and less, and that of a worker whose batches differ does not.
        """
        memory, at_start, _ = reply.figures.usage
        if reply.pid == self._pid_before:  # it leaves: it did what it was given beside the next one
            self.jump = 0
            return False
        if self._pid != reply.pid:  # another process took its place
            self._pid_before = self._pid
            self._pid = reply.pid
            self._seen = 0
            self._lows = []
            self.at_start = 0
            self.memory = at_start or memory
        self.jump = memory - self.memory
        self.memory = memory
        self.at_start = self.at_start or at_start
        self._seen += 1
        if self._seen & (self._seen - 1) == 0:  # a power of two: the next span begins
            self._lows.append((self.memory, self.batches))
        self._lows[-1] = min(self._lows[-1], (self.memory, self.batches))
        if self._seen & (self._seen + 1) or len(self._lows) < 4:  # not yet its end
            return False
        first, second, third = (low for low, _ in self._lows[-3:])
        early = second - first
        late = third - second
        if late > LEAK and 1.4 * early < late < 4 * early:
            self.growth = third - first
            self.grown_in = self._lows[-1][1] - self._lows[-3][1]
            return True
        self.growth = 0
        return False


@dataclass(slots=True)
class WorkerLog:
    """What is counted of all workers, and what the log says of them.

    Attributes:
        counts: what is counted of each worker, by name.
        jumps: the last times that one grew much at once.
        own_generators: names of generators of the dataset's own that several batches have drawn
            from; the log has said so of the first.
    """

    counts: dict[str, WorkerCount] = field(default_factory=lambda: defaultdict(WorkerCount))
    jumps: deque[Jump] = field(default_factory=lambda: deque(maxlen=JUMPS_KEPT))
    own_generators: dict[str, None] = field(default_factory=dict)

    def note(self, worker: str, reply: Reply, args: dict[str, Any], item: Any) -> None:
        """Count what a worker made; for the arguments see :meth:`Counters.made`."""
        figures = reply.figures
        count = self.counts[worker]
        count.seconds += figures.timings.seconds
        count.batches += args["count"]
        if figures.usage.memory:
            grows = count.note_memory(reply)
            if count.jump > JUMP:
                jump = Jump(
                    worker=worker,
                    bytes=count.jump,
                    epoch=args["epoch"],
                    batch=args["batch"] + args["count"] - 1,
                    item=brief_repr(item),
                )
                self.jumps.append(jump)
            if grows:
                logger.warning(
                    "%s grew by %s in %d batches, %s each: the dataset keeps something, or a cache "
                    "is still being filled; worker_memory_limit replaces workers that grow too "
                    "large; said once",
                    worker,
                    format_bytes(count.growth),
                    count.grown_in,
                    format_bytes(count.growth / count.grown_in),
                )
        if figures.drawn:
            if not self.own_generators:
                logger.warning(f"{own_message(figures.drawn)}; said once")
            self.own_generators |= dict.fromkeys(figures.drawn)

    def snapshot(self) -> dict[str, WorkerCount]:
        """Return what is counted of each worker, sorted by name, from any thread."""
        return dict(sorted(snapshot(self.counts.items())))
