"""Audit of a user's own loader: does it give the same batches whatever happens to it?

::

    from minloader.testing import check_reproducible

    def test_my_loader():
        check_reproducible(lambda: Loader(MyDataset(), MySampler(), num_workers=4))

One run with the fewest workers is the *reference*: of each of its batches the leaves (arrays,
numbers, strings) are kept, as digests. Every other run is compared with it as its batches come,
and ends at the first that is not the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import pickle
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from minloader._checks import check_int, shown
from minloader._errors import MinloaderError
from minloader._loader import Loader
from minloader._pools.processes import ProcessPool

logger = logging.getLogger("minloader")

MOST_LEAVES = 1_000

"""Leaves of a batch that are kept one by one, of some 300 bytes each; of the others only a sum."""


MOST_VALUES = 64

"""Values of an array up to which they are kept, so that the first that differs can be told."""


PATIENCE = 10.0

"""Seconds to wait until all workers have started. One that is late makes no batch, and shows
nothing; one that failed to load the dataset is never ready, and says so with the first batch."""


AGAIN = (
    "something is not seeded, or remembers: random.SystemRandom, os.urandom, default_rng() without "
    "a seed, the time; or the loaders share a dataset or a sampler that counts. Use "
    "get_worker_info().rng, and let make_loader make everything anew"
)

WORKERS = (
    "a batch depends on the worker that makes it, or on what that made before: "
    "get_worker_info().id, os.getpid(), hash() or the order of a set of strings, a counter, a "
    "cache or an open generator in the dataset"
)

THREADS = "; or on global generators, which are not seeded outside worker processes of our own"

LEAVING = (
    "something remembers the epoch that was left: __iter__ and set_epoch of the sampler must begin "
    "anew, and a dataset must not count its batches"
)

RESUME = (
    "the order of the sampler must follow from its arguments and set_epoch alone, or its "
    "state_dict and load_state_dict must bring it back; and a dataset must not count its batches"
)

DEATH = (
    "the dataset keeps something in the worker, or leaves something behind, that a worker which "
    "takes its place does not have, or should not find"
)


class IrreproducibleError(MinloaderError, AssertionError):
    """A loader did not give the same batches twice.

    Attributes:
        run: what was done otherwise, such as "num_workers=3".
        epoch: number of the epoch.
        ordinal: place of the first batch that differs, from 0.
        leaf: path of the first part of it that differs, such as ``batch["audio"][0]``; "" if
            there was no batch.
    """

    def __init__(
        self, message: str, *, run: str = "", epoch: int = -1, ordinal: int = -1, leaf: str = ""
    ) -> None:
        super().__init__(message)
        self.run = run
        self.epoch = epoch
        self.ordinal = ordinal
        self.leaf = leaf


@dataclasses.dataclass
class Report:
    """What was compared, and found to be the same.

    Attributes:
        batches: how many batches of each epoch.
        runs: what was done, the reference first.
    """

    batches: list[int]
    runs: list[str]

    def __str__(self) -> str:
        counts = " + ".join(map(str, self.batches))
        return f"reproducible: {counts} batches are the same with " + "; ".join(self.runs)


def check_reproducible(
    make_loader: Callable[[], Loader],
    *,
    workers: Iterable[int] = (0, 1, 3),
    batches: int = 50,
    epochs: int = 2,
) -> Report:
    """Runs a loader in several ways, and looks whether each batch is the same in all of them.

    The ways: once more; with other numbers of workers; after an epoch that was left early;
    resumed in a new loader from a pickled ``state_dict()`` (before the first batch, after the
    first, in the middle, at the end); and with a worker process killed in the middle, where
    there is one, which the log tells of. A loader with ``in_order=False`` is run in order: what
    a batch is does not depend on that, and when it comes is nobody's promise.

    Runs in the calling process, with workers as the loader has them. It closes all loaders. What
    depends on the worker shows if several have a part in the batches, so these should take a
    millisecond or more.

    Args:
        make_loader: makes a new loader, and all that it is made of, each time. What the loaders
            share (a dataset that counts) would tell of earlier runs.
        workers: numbers of workers; that of the loader as it is made comes on top. A stream keeps
            the shards that it is made with.
        batches: how many to compare in each epoch, at most: a sampler may be endless.
        epochs: how many, from epoch 0. With 1, for a sampler that is an iterator, no epoch is
            left early.

    Returns:
        What was run.

    Raises:
        IrreproducibleError: a batch differs; it names the run, epoch, batch and leaf, shows both
            values, and says where to look. Also where only one of two runs raises an error.
        Exception: what the loader raises in the first run, as it would when used.
        TypeError, ValueError: an argument is wrong, ``make_loader`` makes no new Loader, or it
            has no batches.
    """
    check_make_loader(make_loader)
    check_int("batches", batches, 1)
    check_int("epochs", epochs, 1)
    counts = {check_int("workers", count, 0) for count in workers}
    return _Audit(make_loader, batches, epochs).run(counts)


class _Run(NamedTuple):
    """A way to run a loader.

    Attributes:
        name: for messages.
        workers: how many.
        hint: what it may mean if this one differs.
        leave: how many batches of an epoch to take before it begins.
        at: the first batch to expect.
        state: to resume from.
        kill: the batch before which a worker is killed.
    """

    name: str
    workers: int
    hint: str
    leave: int = 0
    at: int = 0
    state: bytes | None = None
    kill: int = -1


class _Audit:
    """The runs of one loader.

    Args:
        make_loader: makes it.
        batches: most of an epoch.
        epochs: how many.
    """

    def __init__(self, make_loader: Callable[[], Loader], batches: int, epochs: int) -> None:
        self._make_loader = make_loader
        self._batches = batches
        self._epochs = epochs
        self._made: weakref.WeakSet[Loader] = weakref.WeakSet()
        self._seed: int | None = None
        self._name = ""  # of the reference
        self._reference: list[list[_Leaves]] = []  # by epoch and ordinal
        self._states: dict[int, bytes] = {}  # by ordinal in the first epoch

    def run(self, workers: set[int]) -> Report:
        """All of them, those first that have the fewest reasons to differ."""
        with self._make() as loader:
            executor = loader._group.executor
            counts = sorted(workers | {loader.num_workers})
            self._name = f"num_workers={counts[0]}"
            self._record(loader, counts[0])
        runs = [self._name]
        for run in self._runs(counts, executor):
            logger.info("check_reproducible: %s", run.name)
            self._compare(run)
            runs.append(run.name)
        return Report([len(epoch) for epoch in self._reference], runs)

    def _runs(self, counts: list[int], executor: Any) -> Iterator[_Run]:
        half, most = len(self._reference[0]) // 2, counts[-1]
        hint = WORKERS if executor == "process" else WORKERS + THREADS
        again = AGAIN if counts[0] < 2 else f"{AGAIN}. Or {hint}"
        yield _Run(f"{self._name} again", counts[0], again)
        for count in counts[1:]:
            yield _Run(f"num_workers={count}", count, hint)
        states = sorted(self._states.items())  # of the last run
        if self._epochs > 1:
            early = max(1, half)
            name = f"an epoch left after {early} of its batches, num_workers={most}"
            yield _Run(name, most, LEAVING, leave=early)
        for (at, state), count in zip(states, itertools.cycle(counts)):
            name = f"a resume after {at} batches, num_workers={count}"
            yield _Run(name, count, RESUME, at=at, state=state)
        if executor == "process" and most > 0:
            yield _Run(f"a worker killed, num_workers={most}", most, DEATH, kill=half)

    def _make(self) -> Loader:
        loader = new_loader(self._make_loader(), self._made)
        if self._seed not in (None, loader.seed):
            loader.close()
            raise IrreproducibleError(
                f"every loader has another seed ({self._seed}, then {loader.seed}), and so other "
                "batches; give it one: with seed=None it draws one each time",
                run="another seed",
            )
        self._seed = loader.seed
        loader._settings.in_order = True
        return loader

    def _record(self, loader: Loader, workers: int) -> None:
        """The reference."""
        loader.num_workers = workers
        _start(loader)
        for epoch in range(self._epochs):
            loader.set_epoch(epoch)
            given = itertools.islice(loader, self._batches)
            self._reference.append([_leaves(batch) for batch in given])
        if not self._reference[0]:
            raise ValueError("the loader has no batches in epoch 0: there is nothing to compare")

    def _compare(self, run: _Run) -> None:
        with self._make() as loader:
            loader.num_workers = run.workers
            loader._settings.retries += run.kill >= 0  # no batch may fail for what we do to it
            _start(loader)
            loader.set_epoch(0)
            for _ in itertools.islice(loader, run.leave) if run.leave else ():
                continue
            loader.set_epoch(0)
            for epoch in range(self._epochs):
                self._compare_epoch(loader, run, epoch)

    def _compare_epoch(self, loader: Loader, run: _Run, epoch: int) -> None:
        expected = self._reference[epoch]
        ordinal = run.at if epoch == 0 else 0
        try:
            if epoch == 0 and run.state is not None:
                loader.load_state_dict(pickle.loads(run.state))
            loader.set_epoch(epoch)
            batches = iter(loader)
            while ordinal < self._batches:
                if epoch == 0:
                    self._act(loader, run, ordinal)
                batch = next(batches)
                if ordinal == len(expected):
                    what = f"epoch {epoch} has {ordinal} batches with {self._name}, but more"
                    raise _error(f"{what} with {run.name}", run, epoch, ordinal)
                self._compare_batch(_leaves(batch), run, epoch, ordinal)
                ordinal += 1
                del batch  # its memory is wanted for the next
        except StopIteration:
            if ordinal < len(expected):
                what = f"epoch {epoch} ends after {ordinal} batches with {run.name}"
                or_more = " or more" if len(expected) == self._batches else ""
                what += f", but has {len(expected)} batches{or_more} with {self._name}"
                raise _error(what, run, epoch, ordinal) from None
        except IrreproducibleError:
            raise
        except Exception as error:
            what = f"batch {ordinal} of epoch {epoch}, or what comes before it, raised"
            what += f" {type(error).__name__} with {run.name}, but not with {self._name}"
            raise _error(f"{what}: {error}", run, epoch, ordinal) from error

    def _act(self, loader: Loader, run: _Run, ordinal: int) -> None:
        """What is done in the first epoch, before a batch is taken."""
        if ordinal == run.kill:
            _kill_worker(loader)
        count = len(self._reference[0])
        if run.state is None and ordinal in (0, 1, count // 2, min(count, self._batches - 1)):
            self._states[ordinal] = pickle.dumps(loader.state_dict())

    def _compare_batch(self, found: _Leaves, run: _Run, epoch: int, ordinal: int) -> None:
        expected = self._reference[epoch][ordinal]
        for path in expected | found:  # those of the reference first
            ours, theirs = expected.get(path, ABSENT), found.get(path, ABSENT)
            if ours.digest == theirs.digest:
                continue
            width = max(len(self._name), len(run.name))
            lines = [
                f"batch {ordinal} of epoch {epoch} is not the same with {run.name} as with "
                f"{self._name}; the first difference is in {path}:",
                f"  {self._name:{width}}  {ours.text}",
                f"  {run.name:{width}}  {theirs.text}",
            ]
            lines += _first_value(ours, theirs)
            twin = self._find(found)
            if twin is not None:
                lines.append("  which is batch {1} of epoch {0} of the former".format(*twin))
            raise _error("\n".join(lines), run, epoch, ordinal, path)

    def _find(self, leaves: _Leaves) -> tuple[int, int] | None:
        """Where the reference has just this batch: then it is the order that differs."""
        digests = _digests(leaves)
        for epoch, batches in enumerate(self._reference):
            for ordinal, batch in enumerate(batches):
                if _digests(batch) == digests:
                    return epoch, ordinal
        return None


def _error(
    message: str, run: _Run, epoch: int, ordinal: int, leaf: str = ""
) -> IrreproducibleError:
    text = f"{message}\nLikely: {run.hint}."
    return IrreproducibleError(text, run=run.name, epoch=epoch, ordinal=ordinal, leaf=leaf)


def _start(loader: Loader) -> None:
    """Starts all workers, and waits for them, so that each may have a part in the batches."""
    loader.start()
    deadline = time.monotonic() + PATIENCE
    while not all(map(_are_ready, executors_of(loader))) and time.monotonic() < deadline:
        threading.Event().wait(0.01)


def check_make_loader(make_loader: Any) -> None:
    """An argument that must be a function."""
    if not callable(make_loader):
        raise TypeError(
            f"make_loader must be a function that makes a Loader, got {shown(make_loader)}"
        )


def new_loader(loader: Any, before: weakref.WeakSet[Loader]) -> Loader:
    """What ``make_loader`` returned, if that is a loader and none of those before, which it joins.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"make_loader must return a minloader.Loader, got {shown(loader)}")
    if loader in before:
        raise ValueError(
            "make_loader returned the same Loader again; it must make a new one each time"
        )
    before.add(loader)
    return loader


def executors_of(loader: Loader) -> list[Any]:
    """Of worker processes of our own."""
    pools = [pool for pool in loader._group.pools if isinstance(pool, ProcessPool)]
    return [executor for pool in pools for executor in pool._executors]


def _are_ready(executor: Any) -> bool:
    return bool(executor.broken or executor.is_ready)


def _kill_worker(loader: Loader) -> None:
    """Kills one of our worker processes, whatever it is doing."""
    workers = [worker for executor in executors_of(loader) for worker in executor.workers]
    for worker in workers:
        if worker.is_alive():
            logger.info("check_reproducible: kills a worker (pid %d), as a trial", worker.pid)
            worker.kill()
            return


class _Leaf(NamedTuple):
    """A part of a batch that has no parts, or what kind of container it is.

    Attributes:
        digest: of its type and value.
        text: the same in short, for people.
        values: of a small array, flat.
    """

    digest: bytes
    text: str
    values: Any = None


_Leaves = dict[str, _Leaf]

"""By path: the order of a dict, or of a set, is no difference."""


ABSENT = _Leaf(b"", "is not there")


def _hash(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _digests(leaves: _Leaves) -> dict[str, bytes]:
    return {path: leaf.digest for path, leaf in leaves.items()}


def _leaves(batch: Any) -> _Leaves:
    """The leaves of a batch; those past MOST_LEAVES as one."""
    kept: _Leaves = {}
    count, rest = 0, 0
    for path, leaf in _walk(batch, "batch", frozenset()):
        if len(kept) < MOST_LEAVES:
            kept[path] = leaf
        else:
            count += 1
            rest += int.from_bytes(_hash(path, leaf.digest), "little")  # in whatever order
    if count:
        path = f"what comes after the first {MOST_LEAVES:,} parts of it"
        kept[path] = _Leaf(_hash(rest), f"{count:,} parts")
    return kept


def _walk(value: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, _Leaf]]:
    """The leaves of a value, where ``above`` are the ids of the containers that it is in."""
    leaf = _plain_leaf(value) or _array_leaf(value)
    if id(value) in above:
        leaf = _Leaf(b"above", "a container that it is in")
    if leaf is not None:
        yield path, leaf
        return
    above |= {id(value)}
    if isinstance(value, set | frozenset):
        members = sorted(_hash(*_pairs(_walk(each, "", above))) for each in value)
        yield path, _Leaf(_hash(_name(type(value)), *members), shown(value))
        return
    kind, parts = _name(type(value)), _parts(value)
    yield path, _Leaf(_hash(kind, len(parts)), f"{kind} of {len(parts)}")
    for step, part in parts:
        yield from _walk(part, path + step, above)


def _pairs(leaves: Iterable[tuple[str, _Leaf]]) -> list[Any]:
    return sorted((path, leaf.digest) for path, leaf in leaves)


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def _plain_leaf(value: Any) -> _Leaf | None:
    """Of what its type and its repr say all about."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, bytearray):
        return _Leaf(_hash(_name(type(value)), value), shown(value))
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _Leaf(_hash(_name(value)), _name(value))
    return None


def _array_leaf(value: Any) -> _Leaf | None:
    """Of an array or tensor, by its data: a view and a copy are the same."""
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return None
        value = value.detach().cpu().resolve_conj().resolve_neg()
        data = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _numbers("tensor", value, data)
    if np is None or not isinstance(value, np.generic | np.ndarray) or value.dtype.hasobject:
        return None
    if isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
        # Between fields may be bytes that mean nothing.
        data = repr(value.tolist()).encode() if value.dtype.names else value.tobytes()
        return _numbers("number" if isinstance(value, np.generic) else "array", value, data)
    return None


def _numbers(kind: str, value: Any, data: bytes) -> _Leaf:
    what, flat = f"{kind} of {value.dtype}, shape {tuple(value.shape)}", value.reshape(-1)
    text = ", ".join(map(str, flat[:4].tolist())) + ", ..." * (len(flat) > 4)
    values = flat.tolist() if len(flat) <= MOST_VALUES else None
    return _Leaf(_hash(what, data), f"{what}: {text}", values)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container, each with the step of the path to it."""
    if type(value) is dict:
        return [(f"[{key!r}]", part) for key, part in value.items()]
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(value, ma.MaskedArray):
        return [(".data", value.data), (".mask", ma.getmaskarray(value))]
    if type(value) in (list, tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    if names is not None:
        return [(f".{name}", getattr(value, name)) for name in names]
    # Of any other object, what pickle would write. Its bytes would not do: they tell which of
    # equal strings are one object.
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:  # it was made in this process
        logger.debug("%s cannot be looked into: %r", shown(value), error)
        return []
    if isinstance(reduced, str):
        return [(" by name", reduced)]
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    attributes = state if isinstance(state, dict) else {}
    return [
        *((f"({index})", part) for index, part in enumerate(arguments)),
        *((f".{name}", part) for name, part in attributes.items()),
        *([(" state", state)] if state is not attributes else ()),
        *((f"[{index}]", part) for index, part in enumerate(items or ())),
        *((f"[{key!r}]", part) for key, part in pairs or ()),
    ]


def _first_value(ours: _Leaf, theirs: _Leaf) -> list[str]:
    """Which value of two small arrays differs first, in C order."""
    for n, (a, b) in enumerate(zip(ours.values or (), theirs.values or (), strict=False)):
        if repr(a) != repr(b):
            return [f"  value {n}: {a!r} and {b!r}"]
    return []
