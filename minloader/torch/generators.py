"""The global generators that a sampler may draw from: torch's, that of ``random``, and numpy's.

Runs in the parent. Their states are values, which are compared, put back, and written as text.
"""

from __future__ import annotations

import _random
import base64
import importlib
import json
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any

import torch

from minloader._worker.global_states import comparable

States = dict[str, Any]
"""States of generators, by the names "torch", "random" and "numpy"."""

MOST_BYTES = 1 << 20
"""Bytes of a state that is read."""

_generator: Any = random.seed.__self__  # type: ignore[attr-defined]  # the module's own


def names() -> list[str]:
    """Return the names of those that are there: numpy imports its own on first use."""
    has_numpy = hasattr(sys.modules.get("numpy.random"), "get_state")
    return ["torch", "random", "numpy"] if has_numpy else ["torch", "random"]


def states_of(names: Iterable[str]) -> States:
    """Return the states of some of them, as they are now."""
    return {name: _state_of(name) for name in names}


def _state_of(name: str) -> Any:
    if name == "torch":
        return torch.default_generator.get_state()
    if name == "random":
        return random.getstate()
    return importlib.import_module("numpy.random").get_state(legacy=False)


def calls_for(states: States) -> Iterable[Any]:
    """Return what puts them back. To call it is a step of C, in which no Ctrl-C comes."""
    found: list[partial[Any]] = []
    for name, state in states.items():
        if name == "torch":
            found.append(partial(torch.default_generator.set_state, state))
        elif name == "random":
            found.append(partial(_random.Random.setstate, _generator, state[1]))
            found.append(partial(setattr, _generator, "gauss_next", state[2]))
        else:
            numpy = importlib.import_module("numpy.random")
            found.append(partial(numpy.set_state, state))
    return map(call, found)


def put(states: States) -> None:
    """Put them back."""
    deque(calls_for(states), 0)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are the same."""
    return bool(comparable(one) == comparable(other))


def is_reseeded(now: Any, former: Sequence[Any], device: Any = "cpu") -> bool:
    """Return whether a generator was seeded since it had either of some states.

    Torch's tell their seed. Another is known to be seeded only if nothing was drawn since.

    Args:
        now: its state.
        former: the others.
        device: of a generator of torch's.
    """
    if any(are_same(now, each) for each in former):
        return False
    if not torch.is_tensor(now):
        words, is_fresh = _block(now)
        return is_fresh and all(words != _block(each)[0] for each in former)
    generator = torch.Generator(device)
    seeds = [generator.set_state(each).initial_seed() for each in (*former, now)]
    return seeds[-1] not in seeds[:-1] or are_same(
        generator.manual_seed(seeds[-1]).get_state(), now
    )


def _block(state: Any) -> tuple[Any, bool]:
    """Return the block of numbers that a Mersenne twister gives, and whether none was given."""
    if isinstance(state, tuple):
        return state[1][:-1], state[1][-1] == len(state[1]) - 1
    of_numpy = state["state"]
    return comparable(of_numpy), of_numpy.get("pos") == len(of_numpy.get("key", ()))


def encode(state: Any) -> str:
    """Return a state as text."""
    if torch.is_tensor(state):
        data = state.numpy().tobytes()
    else:
        data = json.dumps(state, default=_as_dict).encode()
    return base64.b85encode(zlib.compress(data)).decode()


def encode_all(states: States) -> dict[str, str]:
    """Return states of global generators as text."""
    return {name: encode(state) for name, state in states.items()}


def _as_dict(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "numbers": array.tolist()}


def _as_array(known: dict[str, Any]) -> Any:
    if "dtype" not in known:
        return known
    return importlib.import_module("numpy").array(known["numbers"], known["dtype"])


def _data_of(text: str) -> bytes:
    return zlib.decompressobj().decompress(base64.b85decode(text), MOST_BYTES)


def decode(text: str) -> torch.Tensor:
    """Return the state of a generator of torch's; undo :func:`encode`."""
    return torch.frombuffer(bytearray(_data_of(text)), dtype=torch.uint8)


def decode_all(known: Mapping[str, str]) -> States:
    """Return the states of global generators; undo :func:`encode`.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, zlib.error: it is damaged.
    """
    states: States = {}
    if not isinstance(known, Mapping):
        raise TypeError("states of generators must be a dict")
    if "torch" in known:
        states["torch"] = decode(known["torch"])
        torch.Generator().set_state(states["torch"])  # or it is of another size
    if "random" in known:
        version, words, gauss = json.loads(_data_of(known["random"]))
        states["random"] = (version, tuple(words), gauss)
        random.Random().setstate(states["random"])
    if "numpy" in known:
        state = json.loads(_data_of(known["numpy"]), object_hook=_as_array)
        numpy = importlib.import_module("numpy.random")
        numpy.RandomState(vars(numpy)[state["bit_generator"]]()).set_state(state)
        states["numpy"] = state
    return states
