"""Randomness that belongs to the batch, not to the worker that happens to make it.

Before each batch the global generators of ``random``, ``numpy.random`` and ``torch`` are
seeded from (loader's seed, epoch, ordinal), so every worker count, executor and restart gives
the same batches. Torch only where something else imported it.
"""

from __future__ import annotations

import _random
import hashlib
import importlib.machinery
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any


def batch_seed(seed: int, epoch: int, ordinal: int) -> int:
    """128 bits that depend on nothing but the batch's place: a keyed hash, some 0.5 µs."""
    place = b"%d %d %d" % (seed, epoch, ordinal)
    return int.from_bytes(hashlib.blake2b(place, digest_size=16).digest(), "little")


_generator: Any = random.seed.__self__  # type: ignore[attr-defined]  # the module's own

_seed_generator: Any = _random.Random.seed


def _seed_module(name: str, value: int) -> None:
    module = sys.modules.get(name)
    if name == "random":
        # What random.seed does with an int, without its checks: 3 µs rather than 4.
        _seed_generator(_generator, value)
        _generator.gauss_next = None
    elif name == "numpy.random" and hasattr(module, "seed"):
        # One word: 2 µs; the whole 128 bits would take 8.
        module.seed(value & 0xFFFF_FFFF)  # type: ignore[union-attr]
    elif name == "torch" and hasattr(module, "default_generator"):
        # torch.manual_seed would also visit every accelerator: 100 µs instead of 1.
        module.default_generator.manual_seed(value & 0x7FFF_FFFF_FFFF_FFFF)  # type: ignore[union-attr]


_SEEDED_MODULES = ("random", "numpy.random", "torch")


class _Seeds:
    """Seeds the global generators for each batch.

    It also sits in the import path of a worker process, because a batch may be the first to
    import numpy.random or torch (numpy imports the former when it is first used): without
    being seeded on arrival, the first batch of each worker would differ.
    """

    def __init__(self) -> None:
        self._value: int | None = None

    def seed(self, value: int) -> None:
        self._value = value
        for name in _SEEDED_MODULES:
            if name in sys.modules:
                _seed_module(name, value)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _SEEDED_MODULES or self._value is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, value = spec.loader, self._value
        execute = loader.exec_module

        def exec_and_seed(module: Any) -> None:
            execute(module)
            _seed_module(fullname, value)

        loader.exec_module = exec_and_seed  # type: ignore[method-assign]
        return spec


seeds = _Seeds()

"""The one of this process."""


def borrow_globals() -> Callable[[], None]:
    """Takes the global generators of the caller's own process; the result gives them back."""
    import numpy.random  # the one generator every batch may use without importing it

    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    torch_state = torch and torch.default_generator.get_state()
    sys.meta_path.insert(0, seeds)

    def give_back() -> None:
        sys.meta_path.remove(seeds)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if torch:
            torch.default_generator.set_state(torch_state)

    return give_back
