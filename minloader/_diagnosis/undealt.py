"""What is said where there are several ranks, and nobody deals samples out to them, or two do."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

from minloader._formats import is_news
from minloader._sampling.base import Sampler
from minloader._sampling.ranks import dealer_of, dealer_of_process, with_inner

logger = logging.getLogger("minloader.ranks")
logger.addFilter(is_news)  # the filter of its parent sees none of its lines


def look_at_ranks(sampler: Any) -> None:
    """Say in the log if all ranks get the same batches, or parts of parts, if that can be told.

    Nothing is known of lists and of what users write: they may be of one rank.

    Args:
        sampler: of the epoch that begins.
    """
    found = with_inner(sampler)
    for each in found:
        inner = with_inner(each)[1:]
        if _ranks(each) is not None and _ranks(each) in map(_ranks, inner):
            logger.warning(
                "two samplers, one within the other, have rank=%d and world_size=%d: each rank "
                "gets its part of its part, and the rest is nobody's; give them to the outer one "
                "alone; said once",
                each.rank,
                each.world_size,
            )
    if dealer_of(sampler).by is not None or _is_read_by_accelerate():
        return
    if any(type(each).__module__.split(".")[0] not in ("minloader", "torch") for each in found):
        return
    logger.warning(
        "there are %d ranks, but no sampler deals the epoch out to them, so that each gets the "
        "same batches, unless it has a dataset of its own; give a sampler of minloader's with "
        "rank=... and world_size=..., such as BatchSampler, or else torch's DistributedSampler; "
        "where it is meant so, write "
        'logging.getLogger("minloader.ranks").setLevel("ERROR"); said once',
        dealer_of_process().ranks,
    )


def _ranks(sampler: Any) -> tuple[int, int] | None:
    """Return the rank of a sampler of ours, and of how many; None if it does not deal out."""
    if not isinstance(sampler, Sampler) or sampler.world_size == 1:
        return None
    return sampler.rank, sampler.world_size


def _is_read_by_accelerate() -> bool:
    """Whether Accelerate asks for batches: with dispatch_batches one rank reads for all."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "accelerate.data_loader":
        frame = frame.f_back
    return frame is not None
