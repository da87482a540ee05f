"""The checked arguments of a loader that its epochs go by, and what all of its epochs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from minloader._epochs.counters import Counters
from minloader._errors import BatchError
from minloader._pools.group import PoolGroup
from minloader._worker.messages import Job

if TYPE_CHECKING:
    from minloader._diagnosis.stats import Stats

OnError = Literal["raise", "skip"] | Callable[[BatchError], Any]

CLOSED = "this Loader is closed; make a new one"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a loader that decide how its batches are sent and handed over.

    Those that workers go by are in the job.

    Attributes:
        in_order: whether batches come in the sampler's order.
        retries: how often a batch is tried again whose worker died.
        on_error: what to do with a batch that failed.
        max_errors: how many batches and samples of an epoch may fail; None for any.
        concurrency: most samples that a worker reads at the same time, by ``concurrent``: a task
            has as many, in as many batches as that takes. 0 without.
        chunks: whether a task may have several batches, whatever the sampler is.
    """

    in_order: bool
    retries: int
    on_error: OnError
    max_errors: int | None
    concurrency: int
    chunks: bool


@dataclass(eq=False, repr=False)
class Shared:
    """What all epochs of a loader share. The loader ends its workers when nobody has this any more.

    Attributes:
        options: the checked arguments.
        group: where batches are made.
        counters: what is counted.
        chunk: how many batches like those made last fit into a task.
        is_closed: whether the loader is.
        generation: another one since what was begun before must not go on: the loader was closed,
            or a state was loaded.
        logged: what the log says once at most, and has said, or need not, of a stream: how its
            shards "compared", and that some are "empty".
    """

    options: Options
    group: PoolGroup
    counters: Counters = field(default_factory=Counters)
    chunk: int = 1
    is_closed: bool = False
    generation: int = 0
    logged: set[str] = field(default_factory=set)

    @property
    def job(self) -> Job:
        """What batches are made of."""
        return self.group.job

    @property
    def stats(self) -> Stats:
        """A copy of what was counted so far."""
        from minloader._diagnosis.stats import gather  # a training that never asks has none of it

        return gather(self)

    def check_open(self) -> None:
        """Raise an error if the loader is closed."""
        if self.is_closed:
            raise RuntimeError(CLOSED)
