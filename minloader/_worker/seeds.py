"""Randomness that belongs to the batch, not to the worker that happens to make it.

Before each batch the global generators of ``random``, ``numpy.random`` and ``torch`` are seeded
from (loader's seed, epoch, ordinal, rank), so every worker count, executor and restart gives the
same batches, and no two ranks draw alike. A generator is seeded only once it is in use: numpy's and
torch's from when something has imported them, and in a worker process that of ``random``, which the
standard library imports, from when something has asked that module for any of its functions.
"""

from __future__ import annotations

import _random
import logging
import os
import random
import sys
from collections.abc import Callable
from itertools import compress
from types import ModuleType
from typing import Any, TypeVar

from minloader._memory import forks
from minloader._sampling.seeding import derive
from minloader._worker.import_hook import forget, when_imported

logger = logging.getLogger("minloader")
R = TypeVar("R")

BatchKey = tuple[int, ...]
"""Of a batch: the loader's seed, the epoch, the ordinal and the rank. What is no batch has more
numbers, or an epoch below 0: then it never draws what a batch draws."""


def batch_seed(*key: int) -> int:
    """Return 128 bits that depend on nothing but the key of a batch."""
    return derive("batch", *key)


of_random: Any = random.seed.__self__  # type: ignore[attr-defined]  # the module's own

_seed_generator: Any = _random.Random.seed


def _seed_random(module: Any, value: int) -> None:
    # What random.seed does with an int, without its checks: 3 µs rather than 4.
    _seed_generator(of_random, value)
    of_random.gauss_next = None


def _seed_numpy(module: Any, value: int) -> None:
    if hasattr(module, "seed"):  # else it is just being imported
        # Words of 32 bits. One alone would take 2 µs rather than 8, but two of 77,000 batches
        # would draw alike.
        module.seed([value >> shift & 0xFFFF_FFFF for shift in (0, 32, 64, 96)])
        if type(module.get_bit_generator()) is not module.MT19937:
            # Of another kind, seed() leaves the normal number that was drawn ahead.
            module.set_state(module.get_state(legacy=False) | {"has_gauss": 0, "gauss": 0.0})


def _seed_torch(module: Any, value: int) -> None:
    if hasattr(module, "default_generator"):
        # torch.manual_seed would also visit every accelerator: 100 µs instead of 1.
        module.default_generator.manual_seed(value & 0x7FFF_FFFF_FFFF_FFFF)


SEEDERS = {"random": _seed_random, "numpy.random": _seed_numpy, "torch": _seed_torch}

_key: BatchKey | None = None  # of the present batch; None where nothing is to be seeded


def seed_globals(key: BatchKey) -> None:
    """Seed the global generators of this process, for one batch.

    A batch may be the first to import numpy.random or torch (numpy imports the former when it is
    first used). They are seeded on arrival then: otherwise the first batch of each worker would
    differ.
    """
    global _key
    if _key is None:
        for name in SEEDERS:
            when_imported(name, seed_on_import)
    _key = key
    value = None
    for name, seed in SEEDERS.items():
        module = sys.modules.get(name)
        if module is not None and type(module) is not _UnusedRandom:
            value = batch_seed(*key) if value is None else value
            seed(module, value)


def seed_again() -> None:
    """Seed them once more for the same batch."""
    assert _key is not None
    seed_globals(_key)


def seed_on_import(module: ModuleType) -> None:
    """Seed the global generator of a module that the present batch has imported."""
    key = _key  # once: any thread may import, and the batch may end meanwhile
    if key is not None:
        SEEDERS[module.__name__](module, batch_seed(*key))


_first_use_lock = forks.new_lock()  # reentrant: the handler of a signal may use it, too


class _UnusedRandom(ModuleType):
    """The type of the module ``random`` while nobody in this process has used it.

    Seeding it would take a third of a worker's time for a tiny batch.
    """

    def __getattribute__(self, name: str) -> Any:
        if name != "__spec__":  # which every import of it asks for
            with _first_use_lock:  # or a thread might seed it again when another has drawn from it
                key = _key
                if type(self) is _UnusedRandom and key is not None:
                    _seed_random(self, batch_seed(*key))
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


def seed_random_on_first_use() -> None:
    """Seed ``random`` in this process only from when somebody has asked it for something.

    If somebody has by now, it is seeded for each batch from the first on. That is seen from the
    references to its functions, which are methods of its generator: not only the module has them.
    """
    values = vars(random)
    alone = {"": object()}
    methods = [name for name in values if getattr(values[name], "__self__", None) is of_random]
    references = sys.getrefcount(alone[""])
    # Besides the module and its methods: this module, and what seeds the generator of a fork.
    of_generator = references + len(methods) + 1 + hasattr(os, "fork")
    if sys.getrefcount(globals()["of_random"]) == of_generator and all(
        sys.getrefcount(values[name]) == references for name in methods
    ):
        random.__class__ = _UnusedRandom


patience = 5.0
"""Seconds that a batch of the calling process waits for those of other threads. Few batches take
longer; and if one waits for a thread that makes such batches, the program stands still so long."""

_lock = forks.new_lock()  # reentrant: a dataset may read a loader of its own


def _begin_fork() -> None:
    if type(random) is _UnusedRandom:  # Python has just seeded its generator, for the fork alone
        random.__class__ = ModuleType  # type: ignore[assignment]


forks.in_child.append(_begin_fork)


def in_turn(function: Callable[..., R], *args: Any) -> R:
    """Keep the global generators, and the worker, for this thread while a function is called.

    Threads that make batches in the calling process take turns: each seeds the generators that the
    others draw from. One that has waited for too long goes on all the same, since the other may be
    waiting for it, and then nobody waits any more.
    """
    held: list[Any] = []
    try:
        reserve_globals(held)
        result = function(*args)  # not returned here: no Ctrl-C can come before what follows
    finally:
        for lock in held:
            lock.release()
    return result


def reserve_globals(held: list[Any]) -> None:
    """Take the generators for this thread, and add to a list what is to be released."""
    global patience
    # The lock goes into the list in the step that takes it: no Ctrl-C can come between.
    held.extend(compress((_lock,), map(_lock.acquire, (True,), (patience,))))
    if not held and patience:
        logger.warning(
            "a batch with num_workers=0 has waited %g s for one in another thread, and waits no "
            "longer; both draw from the same global generators, and may not repeat: use a worker, "
            "or draw from get_worker_info().rng; said once, from now on none waits",
            patience,
        )
        patience = 0.0


def save_globals() -> Callable[[], None]:
    """Note how the global generators of the caller's own process are; return what restores that.

    It may be called again, where Ctrl-C has come in the middle of it.
    """
    import numpy.random  # the one generator that every batch may use without importing it

    former = _key
    # It has none yet if another thread is just importing it.
    torch = getattr(sys.modules.get("torch"), "default_generator", None)
    python_state = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    torch_state = torch and torch.get_state()

    def restore_globals() -> None:
        global _key
        _key = former  # that of an outer batch, whose dataset reads a loader of its own
        if former is None:
            for name in SEEDERS:
                forget(name, seed_on_import)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if torch:
            torch.set_state(torch_state)

    return restore_globals
