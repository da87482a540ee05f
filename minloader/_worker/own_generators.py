"""Random generators that the dataset, ``transform`` or ``collate_fn`` has of its own.

Each worker has copies of them, which draw alike at first, and go on from batch to batch, so that
what a batch draws depends on its worker and on the batches that this has made before.

With ``seed_generators=True`` each is seeded before each batch, as the global ones are
(``seeds.py``), and by its name, so that no two of them draw alike. In the calling process they are
the user's, and put back afterwards. A worker looks for them once, in its first batch (a stream is
looked through in each copy of it), and those that this has made join them after it.

Else nobody looks, and this module is imported where one was met as the job was written, where
workers are forked, and by the audit. Nothing is imported for this: where numpy or torch is not,
there is no generator of theirs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import attrgetter, methodcaller
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, NamedTuple

from minloader._memory.job_file import GENERATORS
from minloader._memory.parts import globals_of, parts
from minloader._protocols import reads_at_once
from minloader._sampling.seeding import derive
from minloader._worker.environment import Environment
from minloader._worker.global_states import comparable, global_generators
from minloader._worker.messages import Job, WorkerInfo, current_batch
from minloader._worker.seeds import BatchKey

logger = logging.getLogger("minloader")

LIMIT = 5_000
"""Objects that are looked at, the nearest first; so many take some ten milliseconds."""

WIDTH = 40
"""Elements of a list or dict that are looked at: a dataset may have a list of all its files."""

NEAR = 2
"""Steps from the dataset within which what a function finds among the globals of its module is
looked into. Farther away, in libraries, only generators are taken from there."""

MAX_NAMES = 5
"""Names of generators that a message has."""

_HEAP_TYPE = 1 << 9  # flag of a class that Python code has made


# --- the kinds of generators


class Kind(NamedTuple):
    """What can be done with a generator.

    Attributes:
        state: returns its state.
        put_back: gives it a state again.
        seed: seeds it with 128 bits.
        lock: returns the lock that is held by who draws from it; None: it has none.
    """

    state: Callable[[Any], Any]
    put_back: Callable[[Any, Any], None]
    seed: Callable[[Any, int], None]
    lock: Callable[[Any], Any] | None = None


def _put_numpy_back(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _seed_numpy(generator: Any, value: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(value).state


def _seed_legacy(generator: Any, value: int) -> None:
    # Not by seed(), which only knows MT19937.
    state = type(generator._bit_generator)(value).state
    generator.set_state(state | {"has_gauss": 0, "gauss": 0.0})


def _seed_torch(generator: Any, value: int) -> None:
    generator.manual_seed(value & 0x7FFF_FFFF_FFFF_FFFF)


_PYTHON = Kind(
    methodcaller("getstate"),
    lambda generator, state: generator.setstate(state),
    lambda generator, value: generator.seed(value),
)
_NUMPY = Kind(
    attrgetter("bit_generator.state"),
    _put_numpy_back,
    _seed_numpy,
    attrgetter("bit_generator.lock"),
)
_LEGACY = Kind(
    methodcaller("get_state", legacy=False),
    lambda generator, state: generator.set_state(state),
    _seed_legacy,
    attrgetter("_bit_generator.lock"),
)
_TORCH = Kind(
    methodcaller("get_state"),
    lambda generator, state: generator.set_state(state),
    _seed_torch,
)


_KINDS = dict(zip(GENERATORS, (_PYTHON, _NUMPY, _LEGACY, _TORCH), strict=True))


class OwnGenerator(NamedTuple):
    """A generator that was found, and what can be done with it."""

    generator: Any
    kind: Kind


# --- where they are looked for


def find(roots: dict[str, Any], *, needs_state: bool = True) -> dict[str, OwnGenerator]:
    """Return the generators that are reached from some objects, by their paths.

    No code of the objects is run: they are looked at as they lie in memory.

    Args:
        roots: the objects, by names, which the paths begin with.
        needs_state: whether those without a state are left out. To ask for it takes the lock.
    """
    found: dict[str, OwnGenerator] = {}
    seen = {id(each): each for each in global_generators()}
    waiting = deque((path, value, 0) for path, value in roots.items())
    while waiting and len(seen) < LIMIT:
        path, value, steps = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept: another object could have its id
        how = _kind_of(value)
        if how is not None:
            try:
                if needs_state:
                    how.state(value)
            except Exception as error:  # random.SystemRandom has none
                logger.debug("%s has no state: %r", path, error)
                continue
            while path in found:
                path += "'"
            found[path] = OwnGenerator(value, how)
            continue
        try:
            found_in = list(_parts(path, value, seen, is_near=steps <= NEAR))
        except Exception as error:  # another thread changes it, say
            logger.debug("%s was not looked into: %r", path, error)
            continue
        waiting += [(to, part, steps + 1) for to, part in found_in if not _is_leaf(part)]
    return found


def roots_of(job: Job) -> dict[str, Any]:
    """Return what is looked through of a job, by the names that the user knows."""
    return {"dataset": job.dataset, "transform": job.transform, "collate_fn": job.collate_fn}


def find_shared(job: Job) -> dict[str, OwnGenerator]:
    """Return those that one worker draws from for several batches, by their paths.

    Not those of a stream: each shard begins with them as they were sent.
    """
    roots = roots_of(job)
    if job.options.is_stream:
        del roots["dataset"]
    return find(roots)


def states_of(generators: dict[str, OwnGenerator]) -> dict[str, Any]:
    """Return their states, by the same names, fit to be compared."""
    return {name: comparable(own.kind.state(own.generator)) for name, own in generators.items()}


def locks(job: Job) -> list[Any]:
    """Return the locks of the generators that a job has of its own."""
    generators = find(roots_of(job), needs_state=False).values()
    return [own.kind.lock(own.generator) for own in generators if own.kind.lock is not None]


def _kind_of(value: Any) -> Kind | None:
    # By its type: isinstance() would ask a proxy for its class.
    names = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), None)


_LEAVES = frozenset({int, float, complex, str, bytes, bytearray, bool, type(None), range, CodeType})


_LEAF_KINDS = (type, ModuleType, logging.Logger)


def _is_leaf(value: Any) -> bool:
    """Whether nothing is to be looked for in an object: most are texts and numbers."""
    kind = type(value)
    # Names of temporary files, and of the semaphores of multiprocessing, are drawn in any case.
    return kind in _LEAVES or issubclass(kind, _LEAF_KINDS) or kind.__module__ == "tempfile"


def _parts(
    path: str, value: Any, seen: dict[int, Any], *, is_near: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with the path of each."""
    kind = type(value)
    yield from ((path + step, part) for step, part in parts(value, WIDTH))
    yield from _globals(path, value, is_near=is_near)
    # Of a wrapper of ours: it calls them what the user does.
    is_ours = kind.__module__.startswith("minloader._worker.torch_")
    own = dict(_attributes(value))
    for name, part in own.items():
        yield name if is_ours else f"{path}.{name}", part
    for cls in kind.__mro__:
        for name, part in list(vars(cls).items()) if cls.__flags__ & _HEAP_TYPE else ():
            function = part.fget if type(part) is property else getattr(part, "__func__", part)
            if type(function) is FunctionType:
                if id(function) not in seen:
                    seen[id(function)] = function
                    yield from ((path + step, each) for step, each in parts(function))
                    yield from _globals(path, function, is_near=is_near)
            elif name not in own and type(part) is not MemberDescriptorType and name[:2] != "__":
                own[name] = part  # hides what a base class calls so
                yield f"{path}.{name}", part


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object has as attributes, by its dict or in slots."""
    kind = type(value)
    if kind.__dictoffset__:
        yield from list(object.__getattribute__(value, "__dict__").items())
    for cls in kind.__mro__:
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if type(slot) is MemberDescriptorType:
                try:
                    yield name, slot.__get__(value)
                except AttributeError:
                    continue  # it is not set


def _globals(path: str, function: Any, *, is_near: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a function finds among the globals of its module, and is looked into."""
    for step, part in globals_of(function):
        # Not on into other functions: they would lead through whole libraries.
        is_thing = is_near and not issubclass(type(part), FunctionType | BuiltinMethodType)
        if is_thing or _kind_of(part) is not None:
            yield path + step, part


# --- seeded


def check_can_be_seeded(job: Job, executor: Any) -> None:
    """Refuse to seed them where several batches draw from one at the same time.

    Args:
        job: what batches are made of.
        executor: where: the loader's argument.

    Raises:
        ValueError: it is so.
    """
    shared = ""
    if executor == "thread" or isinstance(executor, ThreadPoolExecutor):
        shared = "threads share the generators of one dataset"
    elif reads_at_once(job.dataset):
        shared = "reads of concurrent() share the generators of their dataset"
    if shared:
        raise ValueError(
            f"seed_generators=True cannot be here, since {shared}; draw from "
            "get_worker_info().rng, and drop seed_generators, or use processes without concurrent()"
        )


class SeededGenerators:
    """The generators of what one worker makes batches from, with ``seed_generators=True``.

    Args:
        job: what it makes them from.
        environment: where.
    """

    def __init__(self, job: Job, environment: Environment) -> None:
        if not environment.seeds_globals:
            raise ValueError(
                "seed_generators=True cannot be where threads make the batches, since they share "
                "the generators; draw from get_worker_info().rng, or use executor='process'"
            )
        self._job = job
        self._restores = environment.is_inline  # they are the user's
        self._present: dict[str, OwnGenerator] = {}  # of what is called now

    def save(
        self, info: WorkerInfo, key: BatchKey, restore: Callable[[], None]
    ) -> Callable[[], None]:
        """Look which there are before a batch; return what follows it.

        Args:
            info: that of the batch.
            key: of the batch.
            restore: what is to be called then, besides. Both may be called again, where Ctrl-C has
                come in the middle of it.
        """
        self._present = {}
        if key[1] < 0:  # worker_init_fn, which may be what makes them
            return restore
        noted = current_batch(info).generators
        generators = self._present = self._find(info) if noted is None else noted
        states = {}
        if self._restores:
            states = {name: own.kind.state(own.generator) for name, own in generators.items()}

        def end() -> None:
            for name, state in states.items():
                own = generators[name]
                own.kind.put_back(own.generator, state)
            if noted is None:
                current_batch(info).generators = self._look_again(info, generators)
            restore()

        return end

    def seed(self, key: BatchKey) -> None:
        """Seed them for the batch, or for what is left of it."""
        for name, own in self._present.items():
            own.kind.seed(own.generator, derive("generator", name, *key))

    def _find(self, info: WorkerInfo) -> dict[str, OwnGenerator]:
        """Look for them; of a stream that is read, in its copy of the dataset."""
        return find(roots_of(self._job) | {"dataset": info.dataset})

    def _look_again(
        self, info: WorkerInfo, generators: dict[str, OwnGenerator]
    ) -> dict[str, OwnGenerator]:
        """Look for those that the first batch has made. One that it only gave a nearer place keeps
        its name, since that is what it is seeded by.
        """
        found = self._find(info)
        kept = {
            id(own.generator)
            for name, own in generators.items()
            if found.get(name, own).generator is own.generator
        }
        new = {name: own for name, own in found.items() if id(own.generator) not in kept}
        made = [name for name in new if name not in generators]
        if made and info.id <= 0:
            logger.warning(
                "%s made in a batch, and seed_generators could not seed that: its worker's first; "
                "make it in __init__, or in worker_init_fn",
                name_list(made),
            )
        return generators | new


# --- told


def tell_sent(job: Job, sent: list[Any]) -> None:
    """Say in the log, once, which generators are sent to processes with a job.

    Not those that ``worker_init_fn`` alone has: it is called before any batch.

    Args:
        job: the job.
        sent: the generators.
    """
    paths = {id(own.generator): path for path, own in find_shared(job).items()}
    others = {id(own.generator) for own in find({"worker_init_fn": job.worker_init_fn}).values()}
    names = []
    for generator in sent:
        kind = type(generator)
        name = f"a {kind.__name__} of {kind.__module__.partition('.')[0]}"
        path = paths.get(id(generator))
        if path is not None:
            names.append(f"{path} ({name})")
        elif id(generator) not in others and not job.options.is_stream:
            names.append(name)  # too far to be found
    if names:
        logger.warning("%s; said once", own_message(names, "sent to the workers"))


def name_list(names: Collection[str]) -> str:
    """Return the names of generators as the beginning of a sentence: "dataset.rng is"."""
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    *first, last = [*islice(names, MAX_NAMES), *more]
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def own_message(names: Collection[str], done: str = "drawn from in several batches") -> str:
    """Return the warning about generators with which something is done that does not repeat."""
    return (
        f"{name_list(names)} {done}: a generator of the dataset's own goes on from batch to batch "
        "in each worker, so that what a batch draws from it depends on the worker that makes it; "
        "seed_generators=True has it seeded for each batch, from the loader's seed (with "
        "minloader.torch call torch.manual_seed before); or draw from get_worker_info().rng, or "
        "seed it for each sample"
    )
