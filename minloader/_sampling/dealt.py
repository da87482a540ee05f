"""States of an epoch that was dealt out otherwise: to other ranks, or within other limits.

What was given then is dealt out once more as it was then, and passed over; the rest is dealt out
anew. So a state has the ``world_size_history``, see :data:`minloader._sampling.base.RunState`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from minloader._arguments import checked_int
from minloader._formats import brief_repr
from minloader._sampling.ranks import MOST_RANKS
from minloader._sampling.reader import SourceState


def check(own: dict[str, Any], state: dict[str, Any], allowed: Sequence[str]) -> None:
    """Refuse a state that was dealt out by what is not allowed, or cannot be.

    Args:
        own: what the sampler deals out by.
        state: with the same names, and a ``world_size_history``, which is a list.
        allowed: names of what may be others than they were, besides the world size.

    Raises:
        TypeError, ValueError: it is to be refused.
    """
    others = [name for name in own if state[name] != own[name]]
    refused = [name for name in others if name not in ("world_size", *allowed)]
    if refused:
        present = [f"{name} is {own[name]!r}" for name in refused]
        in_state = [f"{name} {state[name]!r}" for name in refused]
        raise ValueError(
            f"{' and '.join(present)}, but the state is of {' and '.join(in_state)}; make the "
            "sampler with that; if the state is of a minloader.Loader, its load_state_dict "
            f"can be given allow={refused}, which deals out anew what was not given"
        )
    last = 0 if state["between"] else state["batches"]
    parts = [*state["world_size_history"], [*(state[name] for name in own), last]]
    before = state["begun"]
    for part in parts:
        if (
            not isinstance(part, list | tuple)
            or len(part) != len(own) + 1
            or type(part[-1]) is not int
            or part[-1] < before
        ):
            raise ValueError(
                "world_size_history must be parts of an epoch, one after another, got "
                f"{brief_repr(state['world_size_history'])}"
            )
        before = part[-1]
        for name, value in zip(own, part, strict=False):
            if name == "world_size":
                checked_int(name, value, 1, MOST_RANKS)
            elif not (isinstance(value, float) and name.startswith("max_") and value > 0):
                checked_int(name, 1 if value is None else value, 1, sys.maxsize)


def anew(start: dict[str, Any], former: Sequence[Any], more: int) -> dict[str, Any]:
    """Return a RunState within an epoch from which the rest is dealt out anew.

    Args:
        start: where the epoch was.
        former: what it was dealt out by.
        more: how many batches each rank was given since then.
    """
    until = start["batches"] + more
    history = start["world_size_history"]
    if until <= (history[-1][-1] if history else start["begun"]):
        return start
    return start | {"batches": until, "world_size_history": [*history, [*former, until]]}


def dealt_anew(
    sampler: Any,
    source_state: SourceState,
    epoch: int,
    given: int,
    ahead: Collection[int],
    allowed: Sequence[str],
) -> SourceState:
    """Return a state of a sampler that was dealt out otherwise as one of the sampler here.

    Args:
        sampler: as it is here.
        source_state: of the sampler as it was then.
        epoch: number of the epoch.
        given: how many batches were handed over.
        ahead: which were before their turn.
        allowed: names of what may be others than they were.

    Raises:
        ValueError: that cannot be.
    """
    if ahead:
        raise ValueError(
            "what is left is to be dealt out anew, since world_size or what limits a batch is "
            "another, but the state has batches that were delivered before their turn "
            "(in_order=False), which are others in each rank; end the epoch with the sampler that "
            "it had, or take a state from between epochs"
        )
    sampler._load(source_state.state, epoch, given - source_state.at, allowed)
    return SourceState(given, sampler.state_dict())
