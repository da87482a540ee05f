"""One walk through the parts of samples, with a policy for each use.

::

    parts: the same part of one sample, or of all samples of a batch
      |
      policy(parts, path)  ──>  what stands in their place;  or DEEPER: into the container
      |                                                                    |
      rebuild(container, what came of what is in it)  <────────────────────┘
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

DEEPER = object()
"""A policy's answer for containers: go on with what is in them. What is none stays as it is."""

Policy = Callable[[Sequence[Any], str], Any]


def plain_container(like: Any, values: Any) -> Any:
    """Return a dict of a mapping, a tuple of a tuple, and a list of any other sequence."""
    if isinstance(like, tuple):
        return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
    return values


def same_container(like: Any, values: Any) -> Any:
    """Return a container like another that holds other values, as torch's collating does.

    What else the container may hold, such as attributes, is kept.

    Args:
        like: a mapping or a sequence.
        values: a dict for a mapping, a list for a sequence. It is itself the result if ``like``
            is a tuple without names, or of a type that cannot be made of these values.
    """
    kind = type(like)
    if isinstance(like, tuple):
        return kind(*values) if hasattr(like, "_fields") else values
    try:
        if not isinstance(like, MutableMapping | MutableSequence):
            return kind(values)
        made = copy.copy(like)
        if isinstance(made, MutableMapping):
            made.update(values)  # as torch: a class may have its own
            return made
        for place, value in enumerate(values):
            made[place] = value
        return made
    except TypeError:
        return values


def walk(
    parts: Sequence[Any],
    policy: Policy,
    rebuild: Callable[[Any, Any], Any],
    path: str = "sample",
) -> Any:
    """Return what a policy makes of samples, in a container like that of the first.

    Args:
        parts: the samples, or the same part of each.
        policy: returns what stands in the place of parts, or :data:`DEEPER`. It refuses containers
            that differ.
        rebuild: makes a container of what came of its parts: :func:`plain_container` or
            :func:`same_container`.
        path: which part of a sample this is, for messages.
    """
    made = policy(parts, path)
    if made is not DEEPER:
        return made
    first = parts[0]
    if isinstance(first, Mapping):
        steps = ((key, [part[key] for part in parts], f"{path}[{key!r}]") for key in first)
        return rebuild(first, {key: walk(each, policy, rebuild, to) for key, each, to in steps})
    if isinstance(first, Sequence) and not isinstance(first, str | bytes):
        columns = enumerate(zip(*parts, strict=True))
        return rebuild(first, [walk(each, policy, rebuild, f"{path}[{n}]") for n, each in columns])
    return first
