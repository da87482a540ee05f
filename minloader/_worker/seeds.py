"""Randomness that belongs to the batch, not to the worker that happens to make it.

Before each batch the global generators of ``random``, ``numpy.random`` and ``torch`` are
seeded from (loader's seed, epoch, ordinal), so every worker count, executor and restart gives
the same batches. Torch only where something else imported it.
"""

from __future__ import annotations

import _random
import hashlib
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from minloader._worker.import_hook import forget, when_imported

logger = logging.getLogger("minloader")

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
            when_imported(name, seed_arrival)
    _value = value
    for name, seed in SEEDERS.items():
        module = sys.modules.get(name)
        if module is not None:
            seed(module, value)


def seed_arrival(module: ModuleType) -> None:
    value = _value  # once: any thread may import, and the batch may end meanwhile
    if value is not None:
        SEEDERS[module.__name__](module, value)


patience = 5.0
"""Seconds that a batch of the calling process waits for those of other threads. Few batches take
longer; and if one waits for a thread that makes such batches, the program stands still so long."""

_lock = threading.RLock()  # reentrant: a dataset may read a loader of its own


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # a thread that is not here may have held it


def reserve_globals() -> Callable[[], object]:
    """Keep the global generators for this thread's batch; return what gives them free.

    Threads that make batches in the calling process take turns: each seeds the generators that the
    others draw from. One that has waited for too long goes on all the same, since the other may be
    waiting for it, and then nobody waits any more.
    """
    global patience
    lock = _lock
    if lock.acquire(timeout=patience):
        return lock.release
    if patience:
        logger.warning(
            "a batch with num_workers=0 has waited %g s for one in another thread, and goes on; "
            "both draw from the same global generators, and may not repeat: use a worker, or draw "
            "from get_worker_info().rng; said once, from now on none waits",
            patience,
        )
        patience = 0.0
    return lambda: None


def borrow_globals(value: int) -> Callable[[], None]:
    """Seed the global generators of the caller's own process; return what gives them back."""
    import numpy.random  # the one generator that every batch may use without importing it

    former = _value
    # It has none yet if another thread is just importing it.
    torch = getattr(sys.modules.get("torch"), "default_generator", None)
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    torch_state = torch and torch.get_state()
    seed_globals(value)

    def give_back() -> None:
        global _value
        _value = former  # that of an outer batch, whose dataset reads a loader of its own
        if former is None:
            for name in SEEDERS:
                forget(name, seed_arrival)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if torch:
            torch.set_state(torch_state)

    return give_back
