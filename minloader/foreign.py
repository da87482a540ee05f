"""Executors that the user brings: threads, processes of this machine, or those of a cluster.

All that is asked of one is ``submit``. A task carries the address of the loader's job, some 300
bytes, and each worker process gets the job itself once, when it meets the first task:

* in the loader's own process (threads) it is there;
* on the loader's machine it is mapped from the file in which it was shipped (``shipping.py``);
* elsewhere it is fetched from the loader's process (``depot.py``).

An executor of which it is not known that its workers are on this machine gets no slots either, and
for one more reason: a scheduler that believes a worker dead runs its tasks once more elsewhere, and
should the worker live after all, it would write into memory that has been lent to another batch.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

from minloader import depot
from minloader.pool import Held, Pool, Terms, packed
from minloader.shipping import Cargo, Shipment
from minloader.slots import Slots
from minloader.tasks import Failure, Job, Reply, Task, WorkerInfo
from minloader.worker import Worker

__all__ = ["ForeignPool", "is_in_process", "is_local", "run_attached"]


def _is_of(executor: Executor, package: str) -> bool:
    """Whether the class of an executor, or one that it derives from, is of a package."""
    return any(each.__module__.partition(".")[0] == package for each in type(executor).__mro__)


def is_in_process(executor: Executor) -> bool:
    """Whether an executor is known to run its tasks in this process."""
    return isinstance(executor, ThreadPoolExecutor)


def is_local(executor: Executor) -> bool:
    """Whether an executor is known to run its tasks on this machine, and each of them once."""
    return isinstance(executor, ProcessPoolExecutor) or _is_of(executor, "loky")


class ForeignPool(Pool):
    """Makes batches in an executor that the user brought, and will shut down.

    Args:
        terms: how many tasks the executor runs at once, as the user says.
        job: what workers in this process use as it is.
        shipment: what others load; None if the executor has no others.
        executor: runs the tasks.
        owner: process that made the executor; in a fork of it nothing would ever run.
        slots: shared memory for batches of workers on this machine.
        store: gives the job to workers on other machines; None if there are none.
    """

    def __init__(
        self,
        terms: Terms,
        job: Job,
        shipment: Shipment | None,
        executor: Executor,
        owner: int,
        slots: Slots | None,
        store: depot.Depot | None,
    ) -> None:
        super().__init__(terms, slots)
        self._owner = owner
        self._job = job
        self._shipment = shipment
        self._executor = executor
        self._depot = store
        self._attachment: Attachment | None = None
        self._options: dict[str, Any] = {}
        if _is_of(executor, "distributed"):
            # Equal calls are not one; and without delay an earlier one comes first.
            self._options = {"pure": False, "fifo_timeout": "0 ms"}

    def release(self) -> None:
        self._attachment = None

    def hold(self, item: Any) -> Held:
        return Held(item)

    def pack(self, task: Task) -> Task:
        return packed(task)

    def submit(self, task: Task) -> Future[Reply]:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"executor belongs to process {self._owner}, of which this one is a fork; make "
                "the Loader and its executor here"
            )
        if self._attachment is None:
            self._attachment = Attachment(self._job, self._address())
        return self._executor.submit(run_attached, self._attachment, task, **self._options)

    def _address(self) -> Address:
        terms = self.terms.num_workers, self.terms.seed, _versions()
        if self._shipment is None:
            return Address(*terms)
        if self._depot is None:
            return Address(*terms, self._shipment.cargo)
        return Address(*terms, self._shipment.cargo, *self._depot.open())

    def end(self, deadline: float) -> None:
        if self.slots is not None:
            self.slots.close()

    def is_death(self, error: BaseException) -> bool:
        # Dask runs a task again by itself, until it has seen too many workers die with it.
        killed = getattr(sys.modules.get("distributed.scheduler"), "KilledWorker", ())
        return isinstance(error, killed)


class Address(NamedTuple):
    """What of a loader's job travels with each task.

    Attributes:
        num_workers: of the loader.
        seed: of the loader.
        versions: of what must be the same on both sides.
        cargo: the job, for other processes; None if the executor has none.
        hosts: what other machines may call that of the loader; none if there are none.
        port: where it gives them the job.
    """

    num_workers: int
    seed: int
    versions: tuple[str, str]
    cargo: Cargo | None = None
    hosts: tuple[str, ...] = ()
    port: int = 0

    @property
    def info(self) -> WorkerInfo:
        """What a worker in this process is told."""
        return WorkerInfo(-1, self.num_workers, os.getpid(), self.seed)


def _versions() -> tuple[str, str]:
    """Of minloader and Python: functions that are sent along are that Python's code."""
    return sys.modules["minloader"].__version__, "{}.{}".format(*sys.version_info)


# --- in a worker


class Attachment:
    """Stands for a loader's job in the tasks sent to an executor that we did not start.

    It is the job itself as long as it stays in this process; pickled, it is the job's address.

    Args:
        job: the job.
        address: where it is for other processes.
    """

    def __init__(self, job: Job, address: Address) -> None:
        self._job = job
        self._address = address
        self._pid = os.getpid()
        self._threads = threading.local()
        self._count = itertools.count()
        if address.cargo is not None:
            _sent[address] = self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address.cargo is None:
            raise TypeError("executor: a ThreadPoolExecutor must not pickle its tasks")
        return _attach, (self._address,)

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the loader, not a fork of it."""
        return os.getpid() == self._pid

    def __call__(self) -> Worker:
        """The worker of the calling thread."""
        worker: Worker | None = getattr(self._threads, "worker", None)
        if worker is None:
            info = self._address.info
            worker = self._threads.worker = Worker(self._job, info, remote=False, packed=True)
            worker.id -= next(self._count)  # still no number, but one for each thread
        return worker


_sent: weakref.WeakValueDictionary[Address, Attachment] = weakref.WeakValueDictionary()
"""Those of this process that others may send back to it: a Dask worker may be a thread here."""


def _attach(address: Address) -> Callable[[], _Runner]:
    """What an attachment unpickles to. Loading waits for the call: an error here would be
    raised while the executor reads its queue, which kills the worker."""
    attachment = _sent.get(address)
    if attachment is not None and attachment.is_here:
        return attachment
    return partial(_find_guest, address)


class _Runner(Protocol):
    def run(self, task: Task) -> Reply: ...


_turn = threading.Lock()
"""Whose turn it is in this process. A Dask worker has several threads, but the global generators,
and a slot that arrays are born in, are of the process."""


class _Guest:
    """A loader's job in a process of somebody else's executor, with the worker that does it."""

    def __init__(self, address: Address) -> None:
        assert address.cargo is not None
        if address.versions != _versions():
            ours, theirs = (" and Python ".join(each) for each in (_versions(), address.versions))
            raise RuntimeError(
                f"a worker on {socket.gethostname()} has minloader {ours}, but the loader has "
                f"{theirs}; install the same on all machines"
            )
        if "distributed" in sys.modules:
            _part_generators()
        self._cargo = address.cargo
        self._connection: socket.socket | None = None
        try:
            mapping = self._cargo.map()
        except OSError:
            if not address.hosts:
                raise
            mapping, self._connection = depot.fetch(self._cargo, address.hosts, address.port)
        try:
            self._job: Job = self._cargo.unpickle(mapping, forever=False)
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            raise
        self._worker: Worker | None = None

    @property
    def welcome(self) -> bool:
        """Whether the loader is not known to be closed."""
        return self._connection is not None or self._cargo.exists()

    def follow_loader(self) -> None:
        """Leaves when the loader is closed, if that can be waited for."""
        if self._connection is not None:
            leave = partial(_leave, self._cargo.token, self._connection)
            threading.Thread(target=leave, name="minloader-guest", daemon=True).start()

    def prepare(self, address: Address) -> None:
        """Has a worker that knows what the loader says now."""
        if self._worker is None or self._worker.info.seed != address.seed:
            self._worker = Worker(self._job, address.info, remote=True, beside=True)
        self._worker.info.num_workers = address.num_workers

    def run(self, task: Task) -> Reply:
        assert self._worker is not None
        with _turn:
            return self._worker.run(task)


def _part_generators() -> None:
    """Gives Dask a generator of random numbers of its own.

    Its threads draw from Python's global one several times a second, to estimate sizes, and so
    would change what a batch draws; and a generator that we have seeded would give the delays by
    which its workers avoid each other the same length in all of them.
    """
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, module in list(sys.modules.items()):
        names = vars(module) if name.partition(".")[0] in _DASK else {}
        if names.get("random") is random:
            names["random"] = copy


_DASK = ("dask", "distributed", "tornado")

_guests: dict[bytes, _Guest] = {}
"""By the token of the cargo."""


def _find_guest(address: Address) -> _Guest:
    assert address.cargo is not None
    token = address.cargo.token
    with _turn:
        if token not in _guests:
            for former in [each for each, guest in _guests.items() if not guest.welcome]:
                _guests.pop(former, None)
            _guests[token] = _Guest(address)
            _guests[token].follow_loader()
        guest = _guests[token]
        guest.prepare(address)
        return guest


def _leave(token: bytes, end: socket.socket) -> None:
    """Lets a fetched job go when its loader does."""
    depot.wait_for_end(end)
    _guests.pop(token, None)


def run_attached(attachment: Callable[[], _Runner], task: Task) -> Reply:
    """Makes the batches of a task in a worker of somebody else's executor."""
    try:
        runner = attachment()
    except Exception as error:
        stage = "while the worker loaded the dataset"
        failure = Failure.of(error, packed=True, stage=stage, fatal=True)
        return Reply(-1, os.getpid(), True, [failure] * len(task.items))
    return runner.run(task)
