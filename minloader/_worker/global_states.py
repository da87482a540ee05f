"""The global generators of ``random``, ``numpy.random`` and torch, and their states, compared."""

from __future__ import annotations

import sys
from typing import Any

from minloader._worker import seeds


def drawn_from() -> list[str]:
    """Return the names of those that were drawn from, or seeded, since they were for this batch.

    They are seeded for it once more. A module that was imported since has been seeded on arrival.
    """
    found = _states()
    seeds.seed_again()
    return [name for name, state in _states().items() if state != found[name]]


def _states() -> dict[str, Any]:
    """Return the states of the global generators that are there, fit to be compared."""
    states: dict[str, Any] = {"random": seeds.of_random.getstate()}
    if hasattr(numpy := sys.modules.get("numpy.random"), "get_state"):
        states["numpy.random"] = comparable(numpy.get_state(legacy=False))  # type: ignore[union-attr]
    if (torch := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        states["torch"] = comparable(torch.get_state())
    return states


def comparable(state: Any) -> Any:
    """Return the state of a generator in a form that ``==`` compares."""
    if isinstance(state, dict):
        return [comparable(part) for part in state.values()]
    if hasattr(state, "tobytes"):  # an array
        return state.tobytes()
    return state.numpy().tobytes() if hasattr(state, "numpy") else state


def global_generators() -> list[Any]:
    """Return the global generators that are there, as objects."""
    of_numpy = getattr(sys.modules.get("numpy.random"), "get_state", None)  # a method of it
    numpy = getattr(of_numpy, "__self__", None)
    return [seeds.of_random, numpy, getattr(sys.modules.get("torch"), "default_generator", None)]
