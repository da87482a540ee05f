"""Random generators that the dataset, ``transform`` or ``collate_fn`` has of its own.

Each worker has copies of them, which draw alike at first, and go on from batch to batch, so that
what a batch draws depends on its worker and on the batches that this has made before. Each worker
looks for them once, in its first batch (a stream is looked through in each copy of it):

* One that ``worker_init_fn`` has seeded, or replaced, is told in the log, by its name.
* After the first batch it compares their states before and after each. One that is drawn from in
  several batches is told to the parent, by its name. Not one of a stream itself: each shard is read
  from its beginning, in a copy of its own.
* With ``seed_generators=True`` each is seeded before each batch, as the global ones are
  (``seeds.py``), and by its name, so that no two of them draw alike. In the calling process they
  are the user's, and put back afterwards. Those that the first batch has made join them after it.

Where there are none, nothing is done for the batches that follow. Nothing is imported for this:
where numpy or torch is not, there is no generator of theirs.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter, methodcaller
from random import Random
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from minloader._sampling.seeding import derive
from minloader._worker import torch_conventions
from minloader._worker.messages import Job, WorkerInfo, current_batch
from minloader._worker.seeds import BatchKey, comparable, global_generators

logger = logging.getLogger("minloader")

LIMIT = 5_000
"""Objects that are looked at, the nearest first; so many take some ten milliseconds."""

WIDTH = 40
"""Elements of a list or dict that are looked at: a dataset may have a list of all its files."""

NEAR = 2
"""Steps from the dataset within which what a function finds among the globals of its module is
looked into. Farther away, in libraries, only generators are taken from there."""

COMPARED_BATCHES = 100
"""Batches of a worker after which one that was drawn from once at most is no longer compared."""

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


def _kinds() -> list[tuple[type, Kind]]:
    """Return the classes of generators that there are in this process."""
    numpy = sys.modules.get("numpy.random")
    torch = sys.modules.get("torch")
    classes = [
        (Random, _PYTHON),
        (getattr(numpy, "Generator", None), _NUMPY),
        (getattr(numpy, "RandomState", None), _LEGACY),
        (getattr(torch, "Generator", None), _TORCH),
    ]
    return [(kind, how) for kind, how in classes if kind is not None]


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
    kinds = _kinds()
    found: dict[str, OwnGenerator] = {}
    seen = {id(each): each for each in global_generators()}
    waiting = deque((path, value, 0) for path, value in roots.items())
    while waiting and len(seen) < LIMIT:
        path, value, steps = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept: another object could have its id
        how = _kind_of(value, kinds)
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
            parts = list(_parts(path, value, kinds, seen, is_near=steps <= NEAR))
        except Exception as error:  # another thread changes it, say
            logger.debug("%s was not looked into: %r", path, error)
            continue
        waiting += [(to, part, steps + 1) for to, part in parts if not _is_leaf(part)]
    return found


def locks(job: Job) -> list[Any]:
    """Return the locks of the generators that a job has of its own."""
    roots = {"dataset": job.dataset, "transform": job.transform, "collate_fn": job.collate_fn}
    generators = find(roots, needs_state=False).values()
    return [own.kind.lock(own.generator) for own in generators if own.kind.lock is not None]


def _kind_of(value: Any, kinds: list[tuple[type, Kind]]) -> Kind | None:
    # By its type: isinstance() would ask a proxy for its class.
    return next((how for kind, how in kinds if issubclass(type(value), kind)), None)


_LEAVES = frozenset({int, float, complex, str, bytes, bytearray, bool, type(None), range, CodeType})


_LEAF_KINDS = (type, ModuleType, logging.Logger)


def _is_leaf(value: Any) -> bool:
    """Whether nothing is to be looked for in an object: most are texts and numbers."""
    kind = type(value)
    # Names of temporary files, and of the semaphores of multiprocessing, are drawn in any case.
    return kind in _LEAVES or issubclass(kind, _LEAF_KINDS) or kind.__module__ == "tempfile"


def _parts(
    path: str, value: Any, kinds: Any, seen: dict[int, Any], *, is_near: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with the path of each."""
    kind = type(value)
    if issubclass(kind, dict):
        for n, (key, part) in enumerate(islice(dict.items(value), WIDTH)):
            yield f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[key {n}]", part
    for sequence in (list, tuple, deque):
        if issubclass(kind, sequence):
            elements: Any = sequence.__iter__(value)
            for n, part in enumerate(islice(elements, WIDTH)):
                yield f"{path}[{n}]", part
    if issubclass(kind, FunctionType):
        yield from _parts_of_function(path, value, kinds, is_near=is_near)
    elif issubclass(kind, MethodType | BuiltinMethodType):
        yield from ((path, value.__self__), (path, getattr(value, "__func__", None)))
    elif issubclass(kind, partial):
        yield from ((path, value.func), (path, value.args), (path, value.keywords))
    # Of a wrapper of ours: it calls them what the user does.
    is_ours = kind.__module__ == torch_conventions.__name__
    own = dict(_attributes(value))
    for name, part in own.items():
        yield name if is_ours else f"{path}.{name}", part
    for cls in kind.__mro__:
        for name, part in list(vars(cls).items()) if cls.__flags__ & _HEAP_TYPE else ():
            function = part.fget if type(part) is property else getattr(part, "__func__", part)
            if type(function) is FunctionType:
                if id(function) not in seen:
                    seen[id(function)] = function
                    yield from _parts_of_function(path, function, kinds, is_near=is_near)
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


def _parts_of_function(
    path: str, function: Any, kinds: Any, *, is_near: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    arguments = dict(zip(last, defaults, strict=True)) | (function.__kwdefaults__ or {})
    yield from ((f"{path}:{name}", part) for name, part in arguments.items())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}:{name}", cell.cell_contents
        except ValueError:
            continue  # it is not set
    names = function.__globals__
    for name in _names(code):
        part = names.get(name)
        # Not on into other functions: they would lead through whole libraries.
        is_thing = is_near and not issubclass(type(part), FunctionType | BuiltinMethodType)
        if is_thing or _kind_of(part, kinds) is not None:
            yield f"{names.get('__name__')}.{name}", part


def _names(code: CodeType) -> Iterable[str]:
    """Return the names that code may look up among the globals, also in functions within it."""
    inner = (_names(each) for each in code.co_consts if type(each) is CodeType)
    return dict.fromkeys((*code.co_names, *(name for names in inner for name in names)))


# --- what is done with them


class OwnGenerators:
    """The generators of what one worker makes batches from.

    Args:
        job: what it makes them from.
        restores: whether they are the user's, and put back after each batch.

    Attributes:
        drawn: names of those that were found to be drawn from in several batches, since it was
            emptied.
        counts: in how many batches each was drawn from; it is told after two.
    """

    def __init__(self, job: Job, *, restores: bool) -> None:
        self.job = job
        self.restores = restores
        self.drawn: tuple[str, ...] = ()
        self._batches = 0
        self.counts = Counter[str]()

    def take_drawn(self) -> tuple[str, ...]:
        """Return the names in ``drawn``, and empty it."""
        drawn = self.drawn
        self.drawn = ()
        return drawn

    def for_batch(self, info: WorkerInfo, key: BatchKey) -> BatchGenerators | None:
        """Return those to seed or to compare for a batch; None if there are none to look at.

        Call it only if the info's ``generators`` are no empty dict: then there are none.
        """
        seeds = self.job.options.seed_generators
        is_init = key[1] < 0  # worker_init_fn, which may be what makes them
        if is_init and seeds:
            return None
        noted = current_batch(info).generators
        generators = noted
        if generators is None:
            generators = self.find(info) if is_init or seeds else {}
        states = {}
        if self.restores or not seeds:
            states = {name: own.kind.state(own.generator) for name, own in generators.items()}
        return BatchGenerators(
            owner=self,
            info=info,
            generators=generators,
            states=states,
            is_first=noted is None and not is_init,
            is_init=is_init,
        )

    def find(self, info: WorkerInfo) -> dict[str, OwnGenerator]:
        """Look for them; of a stream that is read, in its copy of the dataset."""
        job = self.job
        roots = {"dataset": info.dataset, "transform": job.transform, "collate_fn": job.collate_fn}
        if job.options.is_stream and not job.options.seed_generators:
            del roots["dataset"]  # each reading of a shard begins with those as they were sent
        return find(roots)

    def count(self, info: WorkerInfo, changed: list[str]) -> None:
        """Note which of them a batch has drawn from."""
        current = current_batch(info)
        compared = current.generators
        assert compared is not None
        self._batches += 1
        self.counts.update(changed)
        several = [name for name in changed if self.counts[name] == 2]
        self.drawn += tuple(several)
        kept = compared if self._batches < COMPARED_BATCHES else {}
        current.generators = {name: own for name, own in kept.items() if name not in several}


@dataclass(eq=False)
class BatchGenerators:
    """Those that there are before a batch: they are seeded for it, or compared after it.

    Attributes:
        owner: those of the worker.
        info: that of the batch.
        generators: those that were there before it, by their paths.
        states: of them, then; empty if nobody asks for these.
        is_first: whether the batch is the first that the worker makes, or of this copy of a stream.
        is_init: whether in place of a batch ``worker_init_fn`` is called.
    """

    owner: OwnGenerators
    info: WorkerInfo
    generators: dict[str, OwnGenerator]
    states: dict[str, Any]
    is_first: bool
    is_init: bool

    def begin(self, key: BatchKey) -> None:
        """Seed them, if that is asked for."""
        for name, own in self.generators.items() if self.owner.job.options.seed_generators else ():
            own.kind.seed(own.generator, derive("generator", name, *key))

    def end(self) -> None:
        """Put them back, or see which were drawn from. Harmless when repeated after Ctrl-C."""
        if self.owner.job.options.seed_generators:
            for name, state in self.states.items():
                own = self.generators[name]
                own.kind.put_back(own.generator, state)
            if self.is_first:
                self._look_again()
        elif self.is_init:
            self._tell_seeded()
        elif self.is_first:
            current_batch(self.info).generators = self.owner.find(self.info)
        else:
            changed = [name for name in self.states if self._has_changed(name)]
            self.states = {}
            self.owner.count(self.info, changed)

    def _has_changed(self, name: str) -> bool:
        own = self.generators[name]
        return bool(comparable(own.kind.state(own.generator)) != comparable(self.states[name]))

    def _tell_seeded(self) -> None:
        """Say which of them ``worker_init_fn`` has seeded, or replaced, or made."""
        found = self.owner.find(self.info)
        new = [name for name, own in found.items() if self.generators.get(name) != own]
        seeded = [*filter(self._has_changed, self.states), *new]
        if seeded:
            self.owner.counts |= Counter(dict.fromkeys(seeded, 2))  # it is told
            logger.warning(f"{own_message(seeded, 'seeded by worker_init_fn')}; said once")

    def _look_again(self) -> None:
        """Look for those that the first batch has made. One that it only gave a nearer place keeps
        its name, since that is what it is seeded by.
        """
        found = self.owner.find(self.info)
        kept = {
            id(own.generator)
            for name, own in self.generators.items()
            if found.get(name, own).generator is own.generator
        }
        new = {name: own for name, own in found.items() if id(own.generator) not in kept}
        made = [name for name in new if name not in self.generators]
        if made and self.info.id <= 0:
            logger.warning(
                "%s made in a batch, and seed_generators could not seed that: its worker's first; "
                "make it in __init__, or in worker_init_fn",
                name_list(made),
            )
        current_batch(self.info).generators = self.generators | new


def name_list(names: Collection[str]) -> str:
    """Return the names of generators as the beginning of a sentence: "dataset.rng is"."""
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    *first, last = [*islice(names, MAX_NAMES), *more]
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def own_message(names: Collection[str], done: str = "drawn from in several batches") -> str:
    """Return the warning about generators with which something is done that does not repeat."""
    return (
        f"{name_list(names)} {done}: a generator of the dataset's own goes on from batch to batch "
        "in each worker, so that what a batch draws depends on the worker that makes it; "
        "seed_generators=True has it seeded for each batch, from the loader's seed (with "
        "minloader.torch call torch.manual_seed before), or draw from get_worker_info().rng (or "
        "seed it for each sample: that cannot be told from here)"
    )
