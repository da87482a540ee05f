"""Where the time and the memory went."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counts of one loader since it was made, over all its epochs.

    Attributes:
        batches: how many were delivered.
        chunk_size: how many batches the task sent last holds, at most.
        slots: how many pieces of shared memory there are now, used and free.
        slot_bytes: most bytes they may take now.
        overflowed: how many batches found no room in shared memory, and came through the pipe.
        retries: how often a batch was tried again whose worker had died.
        replaced: how many workers were replaced since they died, hung or grew too large.
    """

    batches: int = 0
    chunk_size: int = 1
    slots: int = 0
    slot_bytes: int = 0
    overflowed: int = 0
    retries: int = 0
    replaced: int = 0
