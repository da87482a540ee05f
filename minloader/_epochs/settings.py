"""What all epochs of a loader share."""

from __future__ import annotations

from dataclasses import dataclass

from minloader._epochs.failures import OnError
from minloader._insight.counters import Counters

CLOSED = "this Loader is closed; make a new one"


@dataclass(eq=False, repr=False)
class Settings:
    """Settings that all epochs of a loader share.

    Attributes:
        depth: most tasks under way; 0 if submitting one runs it.
        in_order: whether batches come in the sampler's order.
        retries: how often a batch is tried again whose worker died.
        patience: seconds to wait before looking whether a worker is stuck.
        memory_limit: bytes that a worker may have for itself; None for any.
        on_error: what to do with a batch that failed.
        max_errors: how many batches and samples may fail; None for any.
        reads: most samples that a worker reads at the same time, by ``concurrent``: a task has as
            many, in as many batches as that takes. 0 without.
        counters: what is counted.
        chunk: how many batches like those made last fit into a task.
        loaded: how many states were loaded.
        closed: whether the loader is.
        told_empty: whether the log has said that shards of a stream gave no batch.
        compared: whether the first batches of two shards of a stream were compared.
    """

    depth: int
    in_order: bool
    retries: int
    patience: float
    memory_limit: int | None
    on_error: OnError
    max_errors: int | None
    reads: int
    counters: Counters
    chunk: int = 1
    loaded: int = 0
    closed: bool = False
    told_empty: bool = False
    compared: bool = False
