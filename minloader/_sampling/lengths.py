"""How long an item is, for samplers that group items by their lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from minloader._errors import breaks_in
from minloader._formats import brief_repr


class LookUp(Protocol):
    """A sequence, a mapping, or what else returns something for an item."""

    def __getitem__(self, item: Any, /) -> Any: ...


def look_up(lengths: LookUp | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives the length of an item, or the error of looking it up.

    Raises:
        TypeError: nothing can be looked up there.
    """
    length_of: Any = getattr(lengths, "__getitem__", lengths)
    if not callable(length_of):
        raise TypeError(
            f"lengths must have __getitem__ or be a function of an item, got {brief_repr(lengths)}"
        )

    return partial(_length_or_error, length_of)  # which can be pickled, as a sampler may be


def _length_or_error(length_of: Callable[[Any], Any], item: Any) -> Any:
    try:
        return length_of(item)
    except Exception as error:
        if breaks_in(error):
            raise
        text = f"minloader: when the length of {brief_repr(item)} was looked up"
        if type(item) is list:
            text += "; if that is a batch, give an inner sampler that gives single items, such as "
            text += "BatchSampler(n, None)"
        error.add_note(text)
        return error
