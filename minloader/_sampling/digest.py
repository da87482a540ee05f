"""What an item of a sampler is recognized by, in a state.

An item that is read again must be what it was: numbers, strings, lists and arrays are compared by a
digest. Large arrays count by their bytes, since to write them as JSON takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from minloader._errors import breaks_in

logger = logging.getLogger("minloader")

SMALL = 1 << 16
"""Bytes up to which an array is the same as a list of its numbers."""

MOST = 1 << 26
"""Bytes of larger arrays that an item may have: to hash these takes 0.1 s at most. An item that has
more is not compared."""


def digest(item: Any) -> str | None:
    """Return what tells plain items (numbers, strings, arrays, lists of them) apart.

    Returns:
        Sixteen hexadecimal digits, the same in any process; None of an item that is not plain.
    """
    try:
        text = json.dumps(item, cls=_Encoder)
    except Exception as error:  # of the user's own objects, which are not compared
        if breaks_in(error):
            raise
        logger.debug("an item of type %s has no digest: %r", type(item).__name__, error)
        return None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Encoder(json.JSONEncoder):
    """Writes arrays too, and tensors."""

    hashed = 0  # bytes of larger arrays so far

    def default(self, value: Any) -> Any:
        """Return what stands for something that JSON does not have.

        Raises:
            TypeError: it is no array.
            ValueError: the arrays of the item are too large.
        """
        if not hasattr(value, "tolist"):
            raise TypeError(f"{type(value).__name__} is not plain")
        size = getattr(value, "nbytes", 0)
        if size <= SMALL:
            return value.tolist()
        self.hashed += size
        if self.hashed > MOST:
            raise ValueError(f"{self.hashed} bytes of arrays are too many to be compared")
        import numpy as np

        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:  # its bytes are addresses
            return array.tolist()
        content = hashlib.blake2b(array.data.cast("B"), digest_size=16).hexdigest()
        return {"dtype": array.dtype.str, "shape": array.shape, "content": content}
