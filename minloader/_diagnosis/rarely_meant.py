"""What is said in the log of what may be meant so, but hardly ever is."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from minloader._epochs.course import Cursor
from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._sampling.base import Run, Sampler
from minloader._sampling.ranks import with_inner

logger = logging.getLogger("minloader")


def look_at_bound(stream: Any, functions: Iterable[Any]) -> None:
    """Say in the log if a method of a stream belongs to another object than the one read.

    Args:
        stream: that workers read copies of.
        functions: that they call.
    """
    if any(getattr(each, "__self__", None) is stream for each in functions):
        logger.warning(
            "transform, collate_fn or worker_init_fn is a method of the stream %s: workers read "
            "copies of that, and it does not see what these change in themselves; have the stream "
            "yield it with each sample, or worker_init_fn use info.dataset",
            brief_repr(stream),
        )


def look_at_lengths(dataset: Any, sampler: Any) -> None:
    """Say in the log that some samples never come, since the sampler has no lengths of them.

    Args:
        dataset: of which samples are taken.
        sampler: of the loader.
    """
    found = with_inner(sampler)
    known = [each.n for each in found if hasattr(each, "lengths_digest") and each.n is not None]
    if not known or any(hasattr(each, "parts") for each in found):  # of each part
        return
    try:
        size = len(dataset)
    except Exception as error:  # it has none, or none that is needed
        if breaks_in(error):
            raise
        return
    if max(known) < size:
        logger.warning(
            "the dataset has %d samples, but the sampler has the lengths of %d: the others never "
            "come; give the length of each sample; said once",
            size,
            max(known),
        )


def look_at_left(cursor: Cursor, until: int) -> None:
    """Say in the log that an epoch counts which was begun, and left before its last batch."""
    epoch = cursor.epoch
    if epoch is None or epoch.is_over or cursor.start is not None or cursor.number is not None:
        return  # it was not left, or the user has said what comes next
    if epoch.position().lanes[0].given == epoch.length:
        return
    logger.warning(
        "epochs(until=%d) begins with epoch %d, since epoch %d was begun and left, if only for a "
        "look at a batch; to begin with that again, call loader.set_epoch(%d) before",
        until,
        epoch.number + 1,
        epoch.number,
        epoch.number,
    )


def report_again(number: int) -> None:
    """Say in the log that the epoch whose batches are being taken is to come once more."""
    logger.warning(
        "set_epoch(%d) was called while an iterator of epoch %d is in use: the next epoch is %d "
        "once more; unless that is meant, call it before the loop, or not at all: each loop goes "
        "on to the next epoch; said once",
        number,
        number,
        number,
    )


def look_at_read_ahead(sampler: Sampler, run: Run) -> None:
    """Say in the log that a state is of what a loader has read, not of what was given.

    Args:
        sampler: whose state is asked for.
        run: of it, which the loader has.
    """
    if run.ended or type(sampler).state_dict is not Sampler.state_dict:
        return  # it is of the next epoch; or the loader asks a user's class, which asks this one
    logger.warning(
        "state_dict() of %s was called while a loader reads it ahead: batches that you have not "
        "been given count as given; save loader.state_dict(), which has the state of the sampler; "
        "said once",
        brief_repr(sampler),
    )


def report_growth(former: int, size: int) -> None:
    """Say in the log that a dataset has more samples than when a state was taken.

    Args:
        former: how many there were then.
        size: how many there are now.
    """
    logger.warning(
        "the dataset has %d samples, but the state is of an epoch with %d: that epoch goes on with "
        "the first %d, the next has all; if it is another dataset, start anew without the state; "
        "said once",
        size,
        former,
        former,
    )
