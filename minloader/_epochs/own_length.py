"""The sampler that a loader makes from the length of its dataset, which may grow between epochs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal, cast

from minloader._checks import dataset_length
from minloader._epochs.feed import SamplerSource
from minloader._epochs.position import Position, SourceState
from minloader._sampling.batch import BatchSampler

logger = logging.getLogger("minloader")


def current_size(dataset: Any) -> int | None:
    """Return how many samples a dataset has; None if it cannot tell any more."""
    try:
        return dataset_length(dataset)
    except Exception as error:  # its file may be closed here, and open in the workers
        logger.debug("the length of the dataset is not known any more: %r", error)
        return None


def source_of_size(source: SamplerSource, size: int | None) -> SamplerSource:
    """Return the source of a sampler for a number of samples: the same, or one like it.

    One like it is another object, since epochs that are under way read the former.

    Args:
        source: a range, or a BatchSampler that the loader has made.
        size: number of samples; None: as it is.
    """
    sampler = source.items
    if isinstance(sampler, BatchSampler):
        if size in (None, sampler.n):
            return source
        made = BatchSampler(
            size,
            sampler.batch_size,
            shuffle=sampler.shuffle,
            last_batch=cast("Literal['keep', 'discard', 'rollover']", sampler.last_batch),
            seed=sampler.seed,
        )
        return SamplerSource(made)
    return source if size in (None, len(sampler)) else SamplerSource(range(size))


def position_of_size(position: Position, source: SamplerSource) -> Position:
    """Return where an epoch begins, of a sampler of which only the number of samples is another.

    What "rollover" has left for it comes first, as ever.
    """
    (lane,) = position.lanes
    source_state = lane.source_state
    if isinstance(source.items, BatchSampler) and isinstance(source_state.state, dict):
        if source_state.state["n"] == source.items.n:
            return position
        source_state = SourceState(source_state.at, {**source_state.state, "n": source.items.n})
    lanes = [replace(lane, source_state=source_state)]
    return replace(position, lanes=lanes, length=source.length_between())
