"""How many batches several epochs have, before they begin: for progress bars, and schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

from minloader._epochs.course import Course
from minloader._errors import breaks_in
from minloader._formats import brief_repr
from minloader._protocols import has_epochs
from minloader._sampling.ranks import with_inner


def total_length(course: Course, left: int | None, until: int | None) -> int:
    """Return how many batches the next epochs have; of the first, what is left of it.

    The sampler stays as it is: a copy is asked.

    Args:
        course: of the loader.
        left: how many epochs; None: as many as come before ``until``.
        until: the epoch before which to end; None: none.

    Raises:
        TypeError: it is not known, or there are no numbers of epochs.
    """
    first = course.number
    most = math.inf if left is None else first + left
    end = min(most, math.inf if until is None else until)
    if end == math.inf:
        raise TypeError("epochs() without a number goes on for ever; give n, or until")
    if end <= first:
        return 0
    if course.shards is not None:
        raise TypeError("the length of its epochs is not known, since the dataset is a stream")
    length = course.length_ahead()
    (lane,) = course.next_position().lanes
    rest = length - lane.given - len(lane.ahead)
    numbers = range(first + 1, int(end))
    sampler = course.source.items
    if not has_epochs(sampler):
        return rest + len(numbers) * length
    return rest + _length_of_all(_copied(sampler), first, numbers)


def _length_of_all(sampler: Any, first: int, numbers: range) -> int:
    """Return how many batches a sampler has in some epochs, behind a first one."""
    if not any(getattr(each, "last_batch", "") == "rollover" for each in with_inner(sampler)):
        return sum(_length(sampler, number) for number in numbers)
    _read(sampler, first)
    return sum(_read(sampler, number) for number in numbers)


def _length(sampler: Any, number: int) -> int:
    sampler.set_epoch(number)
    return len(sampler)


def _read(sampler: Any, number: int) -> int:
    """Read an epoch to its end: what it leaves is of the next."""
    sampler.set_epoch(number)
    return sum(1 for _ in sampler)


def _copied(sampler: Any) -> Any:
    try:
        return copy.deepcopy(sampler)
    except Exception as error:
        if breaks_in(error):
            raise
        raise TypeError(
            f"the lengths of later epochs are not known, since the sampler, {brief_repr(sampler)}, "
            f"cannot be copied: {error!r}"
        ) from error
