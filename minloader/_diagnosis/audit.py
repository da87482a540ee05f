"""Audit of a user's own loader: does it give the same batches whatever happens to it?

The first run, with the fewest workers, is the *reference*. It keeps digests of the leaves of each
batch (arrays, numbers, strings). Every other run is compared with it as its batches come, and
ends at the first that is not the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from inspect import signature
from typing import Any, NamedTuple

from minloader._arguments import checked_int
from minloader._diagnosis.inspect import inspect, with_arguments
from minloader._diagnosis.leaves import Leaf, Leaves, leaves
from minloader._errors import BatchTimeout, MinloaderError
from minloader._formats import brief_repr
from minloader._loader import Loader
from minloader._worker.own_generators import find_shared, own_message, states_of

logger = logging.getLogger("minloader")

PATIENCE = 10.0
"""Seconds to wait until all workers have started. A worker that is later than that makes no batch,
so that nothing can be seen of it. One that failed to load the dataset is never ready; its error
comes with the first batch. In the run that kills a worker, a batch may take so much longer than all
of the reference."""

LOCKED = (
    "\nA worker that is killed never lets go of a lock of multiprocessing, or of a queue: others "
    "wait for it for ever. Lock a file with fcntl.flock, which the system lets go of; or set "
    "timeout, so that a batch that hangs is an error."
)
"""What is said where batches hang since a worker was killed."""

ABSENT = Leaf(b"", "is not there")
"""Stands for a leaf that the other batch has."""

END: Leaves = {"batch": Leaf(b"end", "is not there: the epoch has ended")}
"""Stands for the leaves of a batch where an epoch ends."""


class IrreproducibleError(MinloaderError, AssertionError):
    """A loader did not give the same batches twice.

    Attributes:
        run: name of the run that differs from the reference, such as "num_workers=3".
        epoch: number of the epoch.
        ordinal: place of the first batch that differs, from 0.
        leaf: path of the first part of it that differs, such as ``batch["audio"][0]``; "batch" if
            one of the two is none, since the epoch has ended or it has failed.
    """

    def __init__(
        self, message: str, run: str = "", epoch: int = -1, ordinal: int = -1, leaf: str = ""
    ) -> None:
        super().__init__(message)
        self.run = run
        self.epoch = epoch
        self.ordinal = ordinal
        self.leaf = leaf


@dataclasses.dataclass
class AuditReport:
    """The runs that were compared, and found to be the same.

    Attributes:
        batches: number of batches compared in each epoch.
        runs: names of the runs, the reference first.
        generators: names of generators of the dataset's own, such as ``dataset.rng``, that were
            drawn from in several batches and are not seeded for each.
    """

    batches: list[int]
    runs: list[str]
    generators: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = " + ".join(map(str, self.batches))
        text = f"reproducible: {counts} batches are the same with " + "; ".join(self.runs)
        return f"{text}\nBut {own_message(self.generators)}" if self.generators else text


def check_reproducible(
    make_loader: Callable[[], Loader],
    *,
    workers: Iterable[int] = (0, 1, 3),
    batches: int = 50,
    epochs: int = 2,
) -> AuditReport:
    """Run a loader in several ways, and check that each batch is the same in all of them.

    The loader is run once more; with other numbers of workers; after an epoch that was left
    early; resumed in a new loader from a pickled ``state_dict()`` (before the first batch, after
    the first, in the middle, at the end); and with a worker process killed in the middle, if it
    has any, which the log mentions. A loader with ``in_order=False`` is run in order: the content
    of a batch does not depend on that, and no order is promised.

    Runs in the calling process, with workers where the loader has them, and closes all loaders.
    Generators of the dataset's own are looked for in an epoch of another loader, without workers.
    That a batch depends on its worker shows only if several workers make batches, so a batch
    should take a millisecond or more.

    Args:
        make_loader: makes a new loader, with a dataset and a sampler of its own, each time. A
            dataset that counts its batches and is shared would remember earlier runs. It may make
            a :class:`minloader.torch.DataLoader`: that is run with workers only, and torch's
            generators are seeded by the number of the epoch.
        workers: numbers of workers to run with, in addition to the loader's own number. A stream
            keeps the shards that it is made with.
        batches: most batches to compare in each epoch: a sampler may be endless.
        epochs: number of epochs to run, from epoch 0. With 1, for a sampler that is an iterator,
            no epoch is left early.

    Returns:
        The runs, and how many batches were compared.

    Raises:
        IrreproducibleError: a batch differs; the message names the run, epoch, batch and leaf,
            and shows both values; and generators of the dataset's own that it draws from. Also if
            only one of two runs raises.
        Exception: the loader raised it in the first run, as it would when used.
        TypeError, ValueError: an argument is wrong, ``make_loader`` makes no new Loader, or it
            has no batches.
    """
    audit = Audit(make_loader, checked_int("batches", batches, 1), checked_int("epochs", epochs, 1))
    return audit.run({checked_int("workers", count, 0) for count in workers})


class NewLoaders:
    """Calls the user's ``make_loader``, and checks that it makes a new Loader each time.

    Raises:
        TypeError: it is not a function.
    """

    def __init__(self, make_loader: Callable[..., Any]) -> None:
        if not callable(make_loader):
            raise TypeError(
                f"make_loader must be a function that makes a Loader, got {brief_repr(make_loader)}"
            )
        self._make_loader = make_loader
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, **settings: Any) -> Any:
        """Return the next loader, as it was made.

        Args:
            settings: arguments for ``make_loader``. It is given those that it takes by name.

        Raises:
            TypeError: it returned no Loader.
            ValueError: it returned one that it had returned before.
        """
        loader = self._make_loader(**{k: v for k, v in settings.items() if self._takes(k)})
        if not isinstance(loader, Loader) and not hasattr(loader, "_as_loader"):  # as torch's has
            raise TypeError(
                "make_loader must return a minloader.Loader, or a minloader.torch.DataLoader, got "
                f"{brief_repr(loader)}"
            )
        if loader in self._made:
            raise ValueError(
                "make_loader returned the same Loader again; it must make a new one each time"
            )
        self._made.add(loader)
        return loader

    def _takes(self, name: str) -> bool:
        try:
            signature(self._make_loader).bind_partial(**{name: None})
        except TypeError:
            return False
        return True


class AuditRun(NamedTuple):
    """One way to run a loader.

    Attributes:
        name: the run's name in messages.
        workers: number of workers.
        leave: number of batches to take of an epoch that is left early; 0 for no such epoch.
        save: ordinals in epoch 0 before which the state is saved.
        state: a pickled state to resume from.
        first: ordinal of the first batch that epoch 0 is to give.
        kill: ordinal in epoch 0 before which a worker is killed.
    """

    name: str
    workers: int
    leave: int = 0
    save: Collection[int] = ()
    state: bytes | None = None
    first: int = 0
    kill: int = -1


class Audit:
    """The runs of one loader. For the arguments see :func:`check_reproducible`."""

    def __init__(self, make_loader: Callable[[], Loader], batches: int, epochs: int) -> None:
        self._make_loader = NewLoaders(make_loader)
        self._batches = batches
        self._epochs = epochs
        self._name = ""  # of the reference
        self._timeout = 0.0  # of the run that kills a worker
        self._reference: dict[tuple[int, int], Leaves] = {}  # as _take gives it, in that order
        self._states: dict[int, bytes] = {}  # by ordinal in epoch 0, from the last run that saves

    def run(self, workers: set[int]) -> AuditReport:
        """Do all runs, those first that have the fewest reasons to differ."""
        with self._make() as loader:
            view = inspect(loader)
            workers = workers | {loader.num_workers}
            inline = loader.num_workers == 0
            counts = sorted(n for n in workers if not view.is_torchs or (n == 0) == inline)
            reference = AuditRun(f"num_workers={counts[0]}", counts[0])
            self._name = reference.name
            _start(loader, reference)
            begin = time.monotonic()
            self._reference = dict(self._take(loader, reference))
            self._timeout = PATIENCE + time.monotonic() - begin
        lengths = [ordinal for (_, ordinal), found in self._reference.items() if found == END]
        if lengths[0] == 0:
            raise ValueError("the loader has no batches in epoch 0: there is nothing to compare")
        names = [self._name]
        for run in self._other_runs(counts, view.executor, lengths[0]):
            self._compare(run)
            names.append(run.name)
        return AuditReport(lengths, names, self._own_generators())

    def _other_runs(self, counts: list[int], executor: Any, count: int) -> Iterator[AuditRun]:
        """Yield the runs to compare with the reference, of which epoch 0 has ``count`` batches."""
        most = counts[-1]
        half = count // 2
        save = (0, 1, half, min(count, self._batches - 1))
        yield AuditRun(f"{self._name} again", counts[0], save=save)
        for workers in counts[1:]:
            yield AuditRun(f"num_workers={workers}", workers, save=save)
        if self._epochs > 1:
            early = max(1, half)
            name = f"an epoch left after {early} of its batches, num_workers={most}"
            yield AuditRun(name, most, leave=early)
        for (first, state), workers in zip(sorted(self._states.items()), itertools.cycle(counts)):
            name = f"a resume after {first} batches, num_workers={workers}"
            yield AuditRun(name, workers, state=state, first=first)
        if executor == "process" and most > 0:
            yield AuditRun(f"a worker killed, num_workers={most}", most, kill=half)

    def _make(self, **arguments: Any) -> Loader:
        return with_arguments(self._make_loader(), in_order=True, **arguments)

    def _take(self, loader: Loader, run: AuditRun) -> Iterator[tuple[tuple[int, int], Leaves]]:
        """Take all batches, and do meanwhile what the run asks for.

        Yields:
            Epoch and ordinal of a batch, and its leaves; where an epoch ends, END in their place.
        """
        for epoch in range(self._epochs):
            ordinal = run.first if epoch == 0 else 0
            if epoch == 0 and run.state is not None:
                loader.load_state_dict(pickle.loads(run.state))
            loader.set_epoch(epoch)
            # No variable holds a batch: the loader wants its memory for the next.
            batches = map(leaves, itertools.islice(loader, self._batches - ordinal))
            while True:
                if epoch == 0 and ordinal in run.save:
                    self._states[ordinal] = pickle.dumps(loader.state_dict())
                if epoch == 0 and ordinal == run.kill:
                    _kill_worker(loader)
                found = next(batches, END)
                yield (epoch, ordinal), found
                if found == END:
                    break
                ordinal += 1

    def _compare(self, run: AuditRun) -> None:
        """Do a run, until a batch differs from the reference."""
        # The batch of a worker that is killed must not fail, nor those that wait for it hang.
        limits = {"retries": 1, "timeout": self._timeout} if run.kill >= 0 else {}
        with self._make(**limits) as loader:
            _start(loader, run)
            taken = self._take(loader, run)
            for (epoch, ordinal), expected in self._reference.items():
                if (epoch, ordinal) < (0, run.first):
                    continue
                error = None
                try:
                    _, found = next(taken)
                except Exception as raised:
                    error = raised
                    found = {"batch": Leaf(b"", f"raised {type(raised).__name__}: {raised}")}
                if found == expected:
                    continue
                paths = expected | found  # those of the reference first
                path = next(path for path in paths if expected.get(path) != found.get(path))
                former = self._name
                width = max(len(former), len(run.name))
                generators = self._own_generators()
                own = f"\n{own_message(generators)}" if generators else ""
                if run.kill >= 0 and isinstance(error, BatchTimeout):
                    own += LOCKED
                raise IrreproducibleError(
                    f"batch {ordinal} of epoch {epoch} is not the same with {run.name} as with "
                    f"{former}; the first difference is in {path}:\n"
                    f"  {former:{width}}  {expected.get(path, ABSENT).text}\n"
                    f"  {run.name:{width}}  {found.get(path, ABSENT).text}{own}",
                    run=run.name,
                    epoch=epoch,
                    ordinal=ordinal,
                    leaf=path,
                ) from error

    def _own_generators(self) -> list[str]:
        """Return the generators of the dataset's own that several batches draw from, by name.

        They are seen in this process, of another loader. What the first batch draws may be an order
        that is drawn once.
        """
        counts = Counter[str]()
        with self._make() as loader:
            job = inspect(loader).group.job
            if job.options.seed_generators:
                return []
            loader.num_workers = 0
            loader.set_epoch(0)
            try:
                batches = itertools.islice(loader, self._batches)
                next(batches, None)
                found = find_shared(job)
                before = states_of(found)
                for _ in batches:
                    now = states_of(found)
                    counts.update(name for name in found if now[name] != before[name])
                    before = now
            except Exception as error:  # only here: the workers have made these batches
                logger.warning("generators of the dataset's own may not all be named: %r", error)
        return [name for name, count in counts.items() if count > 1]


def _start(loader: Loader, run: AuditRun) -> None:
    """Start all workers of a run, and leave an epoch early if it asks for that."""
    loader.num_workers = run.workers
    loader.start()
    view = inspect(loader)
    # Each worker may make some of the batches only if all are there when the first is asked for.
    deadline = time.monotonic() + PATIENCE
    while not all(each.is_ready for each in view.workers) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    if run.leave:
        loader.set_epoch(0)
        for _ in itertools.islice(loader, run.leave):
            continue


def _kill_worker(loader: Loader) -> None:
    """Kill one of the loader's worker processes, whatever it is doing."""
    worker = next(each for each in inspect(loader).workers if each.process.is_alive())
    # As loud as what the loader says of the death, which would else look like a fault.
    logger.warning("check_reproducible kills a worker (pid %d), as a trial", worker.pid)
    worker.process.kill()
