"""Says in the log what looks wrong with the shards of a stream, and with the samples of a batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minloader._diagnosis.leaves import first_leaves
from minloader._errors import breaks_in
from minloader._formats import counted

if TYPE_CHECKING:  # a worker that loads this has no epochs
    from minloader._epochs.lane import Lane
    from minloader._epochs.options import Shared

logger = logging.getLogger("minloader")


class ShardWatch:
    """Compares the first batches of two shards, and counts those that gave nothing.

    Args:
        total: number of shards, above 1.
        shared: what the loader's epochs share: it knows what was said before.
        compares: whether each shard begins, so that their first batches can be compared.
    """

    def __init__(self, total: int, shared: Shared, *, compares: bool) -> None:
        self._total = total
        self._shared = shared
        if not compares:
            shared.logged.add("compared")
        # Shard and beginning of the first batch.
        self._first: tuple[int, dict[str, Any]] | None = None

    @property
    def is_done(self) -> bool:
        """Whether two shards were compared, or need not be."""
        return "compared" in self._shared.logged

    def compare(self, lane: Lane, batch: Any) -> None:
        """Compare the first batches of two shards: alike, each shard is all of the data."""
        shard = lane.feed.shard
        leaves: dict[str, Any] = {}
        try:
            leaves = first_leaves(batch)
        except Exception as error:  # of the user's own objects; the batch matters more
            if breaks_in(error):
                raise
            logger.debug("a batch cannot be compared: %r", error)
        first = self._first
        self._first = (shard, leaves)
        if first is None:
            return
        self._shared.logged.add("compared")
        if shard != first[0] and leaves == first[1] != {}:
            logger.warning(
                "shards %d and %d of the stream begin with the same batch: unless that is chance, "
                "each of the %d workers reads all of the data, and all of it comes %d times; have "
                "__iter__ read a part, by the id and the num_workers of get_worker_info()",
                first[0],
                shard,
                self._total,
                self._total,
            )

    def count_empty(self, lanes: list[Lane]) -> None:
        """Count the shards that gave nothing in an epoch that has ended."""
        empty = sum(not lane.delivered for lane in lanes)
        if 0 < empty < self._total and "empty" not in self._shared.logged:
            self._shared.logged.add("empty")
            logger.warning(
                "%d of the %d shards of the stream gave no batch, so not every worker had work: "
                "share the data out evenly, by get_worker_info(), or set num_workers=%d",
                empty,
                self._total,
                self._total - empty,
            )


def report_idle_workers(num_workers: int, shards: int) -> None:
    """Say in the log that a stream has fewer shards than there are workers."""
    logger.warning(
        "the stream has %d shards, as many as there were workers when it was first begun: %d of %d "
        "workers have nothing to read; more shards take a new Loader, and no state",
        shards,
        num_workers - shards,
        num_workers,
    )


def report_rereading(again: list[int]) -> None:
    """Say in the log that shards of a stream without a state are read again to where they were.

    Args:
        again: how many batches of each are passed over.
    """
    logger.warning(
        "the stream is read again from its beginning, past %s in %s, before the first new batch, "
        "since it has no state; give it, or what its __iter__ returns, state_dict and "
        "load_state_dict to resume at once",
        counted(sum(again), "batch"),
        counted(sum(map(bool, again)), "shard"),
    )


def look_at_refilled(sample: Any, indices: Sequence[Any]) -> None:
    """Say in the log that a batch has one object several times, if that can be filled anew.

    Args:
        sample: the object, which is the first of the batch and the last.
        indices: of the samples; () of a stream.
    """
    is_asked_twice = len(indices) > 1 and repr(indices[0]) == repr(indices[-1])
    if is_asked_twice or not hasattr(sample, "__setitem__"):
        return
    logger.warning(
        "one object, of type %s, comes several times in a batch: if the dataset fills it anew each "
        "time, all of these are the last one; return a new object each time, or a copy of that one "
        "(said once)",
        type(sample).__name__,
    )
