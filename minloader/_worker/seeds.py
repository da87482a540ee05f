"""Randomness that belongs to the batch, not to the worker that happens to make it.

Before each batch the global generators of ``random``, ``numpy.random`` and ``torch`` are
seeded from (loader's seed, epoch, ordinal), so every worker count, executor and restart gives
the same batches. Torch only where something else imported it.
"""

from __future__ import annotations

import _random
import hashlib
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from minloader._worker.import_hook import forget, when_imported

Seed = Callable[[int], Callable[[], None] | None]
"""Seeds the global generators for one batch; may return what is to be called after the batch."""


def batch_seed(seed: int, epoch: int, ordinal: int) -> int:
    """Return 128 bits that depend on nothing but the batch's place: a keyed hash, some 0.5 µs."""
    place = b"%d %d %d" % (seed, epoch, ordinal)
    return int.from_bytes(hashlib.blake2b(place, digest_size=16).digest(), "little")


_generator: Any = random.seed.__self__  # type: ignore[attr-defined]  # the module's own

_seed_generator: Any = _random.Random.seed


def _seed_random(module: Any, value: int) -> None:
    # What random.seed does with an int, without its checks: 3 µs rather than 4.
    _seed_generator(_generator, value)
    _generator.gauss_next = None


def _seed_numpy(module: Any, value: int) -> None:
    if hasattr(module, "seed"):  # else it is just being imported
        module.seed(value & 0xFFFF_FFFF)  # one word: 2 µs; the whole 128 bits would take 8


def _seed_torch(module: Any, value: int) -> None:
    if hasattr(module, "default_generator"):
        # torch.manual_seed would also visit every accelerator: 100 µs instead of 1.
        module.default_generator.manual_seed(value & 0x7FFF_FFFF_FFFF_FFFF)


SEEDERS = {"random": _seed_random, "numpy.random": _seed_numpy, "torch": _seed_torch}

_value: int | None = None  # the seed of the present batch; None if we are not to seed anything


def seed_globals(value: int) -> None:
    """Seed the global generators of this process, for one batch.

    A batch may be the first to import numpy.random or torch (numpy imports the former when it is
    first used). They are seeded on arrival then: otherwise the first batch of each worker would
    differ.
    """
    global _value
    if _value is None:
        for name in SEEDERS:
            when_imported(name, _seed_arrival)
    _value = value
    for name, seed in SEEDERS.items():
        if name in sys.modules:
            seed(sys.modules[name], value)


def _seed_arrival(module: ModuleType) -> None:
    if _value is not None:
        SEEDERS[module.__name__](module, _value)


def borrow_globals(value: int) -> Callable[[], None]:
    """Seed the global generators of the caller's own process; return what gives them back."""
    import numpy.random  # the one generator that every batch may use without importing it

    former, torch = _value, sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    torch_state = torch and torch.default_generator.get_state()
    seed_globals(value)

    def give_back() -> None:
        global _value
        _value = former  # that of an outer batch, whose dataset reads a loader of its own
        if former is None:
            for name in SEEDERS:
                forget(name, _seed_arrival)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if torch:
            torch.default_generator.set_state(torch_state)

    return give_back
