"""Executors that the user brings: threads, processes of this machine, or those of a cluster.

All that is asked of one is ``submit``. A task carries the address of the loader's job, some 300
bytes, and each worker process gets the job itself once, when it meets the first task:

* in the loader's own process (threads) it is there;
* on the loader's machine it is mapped from the file in which it was shipped (``shipping.py``);
* elsewhere it is fetched from the loader's process (``job_server.py``).

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

from minloader._memory.job_file import JobAddress, JobFile
from minloader._memory.pickling import BatchPacker, OutOfBand
from minloader._memory.slots import Slots
from minloader._pools.base import Held, Pool, Terms, packed
from minloader._pools.job_server import JobServer, fetch, wait_for_end
from minloader._worker.messages import Failure, Job, Reply, Task, WorkerInfo
from minloader._worker.run import Worker
from minloader._worker.seeds import seed_globals


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
        job_file: what others load; None if the executor has no others.
        executor: runs the tasks.
        owner: process that made the executor; in a fork of it nothing would ever run.
        slots: shared memory for batches of workers on this machine.
        store: gives the job to workers on other machines; None if there are none.
    """

    def __init__(
        self,
        terms: Terms,
        job: Job,
        job_file: JobFile | None,
        executor: Executor,
        owner: int,
        slots: Slots | None,
        store: JobServer | None,
    ) -> None:
        super().__init__(terms, slots)
        self._owner = owner
        self._job = job
        self._job_file = job_file
        self._executor = executor
        self._job_server = store
        self._handle: JobHandle | None = None
        self._options: dict[str, Any] = {}
        if _is_of(executor, "distributed"):
            # Equal calls are not one; and without delay an earlier one comes first.
            self._options = {"pure": False, "fifo_timeout": "0 ms"}

    def release(self) -> None:
        self._handle = None

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
        if self._handle is None:
            self._handle = JobHandle(self._job, self._address())
        return self._executor.submit(run_attached, self._handle, task, **self._options)

    def _address(self) -> JobReference:
        terms = self.terms.num_workers, self.terms.seed, _versions()
        if self._job_file is None:
            return JobReference(*terms)
        if self._job_server is None:
            return JobReference(*terms, self._job_file.address)
        return JobReference(*terms, self._job_file.address, *self._job_server.open())

    def end(self, deadline: float) -> None:
        if self.slots is not None:
            self.slots.close()

    def is_death(self, error: BaseException) -> bool:
        # Dask runs a task again by itself, until it has seen too many workers die with it.
        killed = getattr(sys.modules.get("distributed.scheduler"), "KilledWorker", ())
        return isinstance(error, killed)


class JobReference(NamedTuple):
    """What of a loader's job travels with each task.

    Attributes:
        num_workers: of the loader.
        seed: of the loader.
        versions: of what must be the same on both sides.
        address: the job, for other processes; None if the executor has none.
        hosts: what other machines may call that of the loader; none if there are none.
        port: where it gives them the job.
    """

    num_workers: int
    seed: int
    versions: tuple[str, str]
    address: JobAddress | None = None
    hosts: tuple[str, ...] = ()
    port: int = 0

    @property
    def info(self) -> WorkerInfo:
        """What a worker in this process is told."""
        return WorkerInfo(-1, self.num_workers, os.getpid(), self.seed)


def _versions() -> tuple[str, str]:
    """Of minloader and Python: functions that are sent along are that Python's code."""
    return sys.modules["minloader"].__version__, "{}.{}".format(*sys.version_info)


class JobHandle:
    """Stands for a loader's job in the tasks sent to an executor that we did not start.

    It is the job itself as long as it stays in this process; pickled, it is the job's reference.

    Args:
        job: the job.
        reference: where it is for other processes.
    """

    def __init__(self, job: Job, reference: JobReference) -> None:
        self._job = job
        self._reference = reference
        self._pid = os.getpid()
        self._threads = threading.local()
        self._count = itertools.count()
        if reference.address is not None:
            _sent[reference] = self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reference.address is None:
            raise TypeError("executor: a ThreadPoolExecutor must not pickle its tasks")
        return _attach, (self._reference,)

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the loader, not a fork of it."""
        return os.getpid() == self._pid

    def __call__(self) -> Worker:
        """The worker of the calling thread."""
        worker: Worker | None = getattr(self._threads, "worker", None)
        if worker is None:
            info = self._reference.info
            worker = self._threads.worker = Worker(self._job, info)
            worker.id -= next(self._count)  # still no number, but one for each thread
        return worker


_sent: weakref.WeakValueDictionary[JobReference, JobHandle] = weakref.WeakValueDictionary()

"""Those of this process that others may send back to it: a Dask worker may be a thread here."""


def _attach(reference: JobReference) -> Callable[[], _Runner]:
    """What an handle unpickles to. Loading waits for the call: an error here would be
    raised while the executor reads its queue, which kills the worker."""
    handle = _sent.get(reference)
    if handle is not None and handle.is_here:
        return handle
    return partial(_find_job, reference)


class _Runner(Protocol):
    def run(self, task: Task) -> Reply: ...


_turn = threading.Lock()

"""Whose turn it is in this process. A Dask worker has several threads, but the global generators,
and a slot that arrays are born in, are of the process."""


class _LoadedJob:
    """A loader's job in a process of somebody else's executor, with the worker that does it."""

    def __init__(self, reference: JobReference) -> None:
        assert reference.address is not None
        if reference.versions != _versions():
            ours, theirs = (" and Python ".join(each) for each in (_versions(), reference.versions))
            raise RuntimeError(
                f"a worker on {socket.gethostname()} has minloader {ours}, but the loader has "
                f"{theirs}; install the same on all machines"
            )
        if "distributed" in sys.modules:
            _part_generators()
        self._address = reference.address
        self._connection: socket.socket | None = None
        try:
            mapping = self._address.map()
        except OSError:
            if not reference.hosts:
                raise
            mapping, self._connection = fetch(self._address, reference.hosts, reference.port)
        try:
            self._job: Job = self._address.unpickle(mapping, forever=False)
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            raise
        self._worker: Worker | None = None

    @property
    def welcome(self) -> bool:
        """Whether the loader is not known to be closed."""
        return self._connection is not None or self._address.exists()

    def follow_loader(self) -> None:
        """Leaves when the loader is closed, if that can be waited for."""
        if self._connection is not None:
            leave = partial(_leave, self._address.token, self._connection)
            threading.Thread(target=leave, name="minloader-job", daemon=True).start()

    def prepare(self, reference: JobReference) -> None:
        """Has a worker that knows what the loader says now."""
        if self._worker is None or self._worker.info.seed != reference.seed:
            packer = BatchPacker(OutOfBand())
            self._worker = Worker(self._job, reference.info, packer=packer, seed=seed_globals)
        self._worker.info.num_workers = reference.num_workers

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

_loaded_jobs: dict[bytes, _LoadedJob] = {}

"""By the token of the reference."""


def _find_job(reference: JobReference) -> _LoadedJob:
    assert reference.address is not None
    token = reference.address.token
    with _turn:
        if token not in _loaded_jobs:
            for former in [each for each, job in _loaded_jobs.items() if not job.welcome]:
                _loaded_jobs.pop(former, None)
            _loaded_jobs[token] = _LoadedJob(reference)
            _loaded_jobs[token].follow_loader()
        job = _loaded_jobs[token]
        job.prepare(reference)
        return job


def _leave(token: bytes, end: socket.socket) -> None:
    """Lets a fetched job go when its loader does."""
    wait_for_end(end)
    _loaded_jobs.pop(token, None)


def run_attached(handle: Callable[[], _Runner], task: Task) -> Reply:
    """Makes the batches of a task in a worker of somebody else's executor."""
    try:
        runner = handle()
    except Exception as error:
        stage = "while the worker loaded the dataset"
        failure = Failure.of(error, packed=True, stage=stage, fatal=True)
        return Reply(-1, os.getpid(), True, [failure] * len(task.items))
    return runner.run(task)
