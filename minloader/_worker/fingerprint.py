"""What the samples of a stream are recognized by, when they are read again.

A fingerprint is of a few plain values: to take one costs little, whatever the samples are. What has
none, as a sparse tensor alone, has no fingerprint, and is not compared.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from minloader._errors import breaks_in

logger = logging.getLogger("minloader")

DEPTH = 8
"""How deep into a sample is looked; and how many values of an array count."""


def fingerprint(samples: Sequence[Any]) -> int | None:
    """Return what tells samples from others: the first plain value of the first and the last.

    Args:
        samples: of a batch, at least one.

    Returns:
        A number of 32 bits; None if there is no plain value in either sample.
    """
    first = _plain(samples[0], DEPTH)
    last = first if len(samples) == 1 else _plain(samples[-1], DEPTH)
    if first is last is None:
        return None
    return zlib.crc32(repr((first, last)).encode())


def _plain(value: Any, depth: int) -> Any:
    """Return the first number or string in a sample, or the first ones of an array; else None."""
    try:
        if isinstance(value, str | bytes):
            return value[:64]
        if isinstance(value, int | float):
            return value + 0  # of an enum, without its name
        parts = value.values() if isinstance(value, Mapping) else value
        if parts is not value or isinstance(value, list | tuple):
            found = (_plain(part, depth - 1) for part in islice(parts, depth))
            return next((each for each in found if each is not None), None)
        flat: Any = getattr(value, "flat", None)  # a numpy array
        if flat is None and hasattr(value, "flatten"):  # a tensor
            flat = value.flatten()
        # As a list first: a masked number is None there, and float() of it would warn.
        return None if flat is None else list(map(float, flat[:DEPTH].tolist()))
    except Exception as error:  # of the user's own objects; the batch matters more
        if breaks_in(error):
            raise
        logger.debug("a sample of type %s has no fingerprint: %r", type(value).__name__, error)
        return None
