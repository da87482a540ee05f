"""Executors that the user brings: threads, processes of this machine, or those of a cluster.

All that is asked of one is ``submit``. A task carries a reference to the loader's job, some 300
bytes, and each worker process gets the job itself once, with the first task:

* in the loader's own process (threads) the job is there;
* on the loader's machine it is mapped from its file (``job_file.py``);
* elsewhere it is fetched from the loader's process (``job_server.py``).

An executor of which it is not known that its workers are on this machine gets no slots either, and
for one more reason: a scheduler that believes a worker dead runs its tasks once more elsewhere. If
the worker lives after all, it would write into memory that has been lent to another batch.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from minloader._memory.job_file import JobAddress, JobFile
from minloader._memory.pickling import BatchPacker, OutOfBand
from minloader._pools.base import RemotePool
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


class JobReference(NamedTuple):
    """The part of a loader's job that travels with each task.

    Attributes:
        token: by which each process knows the job.
        num_workers: of the loader.
        seed: of the loader.
        versions: of what must be the same on both sides.
        address: the job, for other processes; None if the executor has none.
        hosts: names and addresses of the loader's machine; none if all workers are on it.
        port: where the loader gives them the job.
    """

    token: bytes
    num_workers: int
    seed: int
    versions: tuple[str, str]
    address: JobAddress | None
    hosts: tuple[str, ...]
    port: int


def versions() -> tuple[str, str]:
    """Return minloader's version and Python's, of which functions that are sent are the code."""
    return sys.modules["minloader"].__version__, "{}.{}".format(*sys.version_info)


@dataclass(eq=False, repr=False)
class ForeignPool(RemotePool):
    """Makes batches in an executor that the user brought, and will shut down.

    Args:
        executor: runs the tasks; as many at once as the user says.
        owner: process that made the executor; in a fork of it nothing would ever run.
        job: what workers in this process use as it is.
        job_file: what others load; None if the executor has no others.
        job_server: gives the job to workers on other machines; None if there are none.
    """

    executor: Executor
    owner: int
    job: Job
    job_file: JobFile | None
    job_server: JobServer | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reference: JobReference | None = None
        self._token = secrets.token_bytes(16)
        if self.job_file is not None:
            self._token = self.job_file.address.token
        # For a cluster's workers too: one of Dask's may be a thread here.
        ids = itertools.count(-1, -1)
        self._job = _Job(self.job, threading.local(), ids, nullcontext(), {})
        _jobs_here[self._token] = self._job
        self._options: dict[str, Any] = {}
        if _is_of(self.executor, "distributed"):
            # Equal calls are not one; and without delay an earlier one comes first.
            self._options = {"pure": False, "fifo_timeout": "0 ms"}

    def submit(self, task: Task) -> Future[Reply]:
        if os.getpid() != self.owner:
            raise RuntimeError(
                f"executor belongs to process {self.owner}, of which this one is a fork; make "
                "the Loader and its executor here"
            )
        reference = self._reference  # once: another thread may change the settings
        if reference is None:
            address = self.job_file.address if self.job_file is not None else None
            hosts, port = self.job_server.open() if self.job_server is not None else ((), 0)
            told = self.num_workers, self.settings.seed, versions()
            reference = JobReference(self._token, *told, address, hosts, port)
            self._reference = reference
        return self.executor.submit(run_task, reference, task, **self._options)

    def replace_workers(self) -> None:
        self._reference = None  # the next one has other settings

    def is_death(self, error: BaseException) -> bool:
        # Dask runs a task again by itself, until it has seen too many workers die with it.
        killed = getattr(sys.modules.get("distributed.scheduler"), "KilledWorker", ())
        return isinstance(error, killed)


# --- in a worker of the user's executor ----------------------------------------------------------


def run_task(reference: JobReference, task: Task) -> Reply:
    """Make the batches of a task. The executor runs it, wherever its workers are."""
    try:
        job = find_job(reference)
        worker = job.worker(reference)
    except Exception as error:
        stage = "while the worker loaded the dataset"
        failure = Failure.of(error, packed=True, stage=stage, fatal=True)
        return Reply(-1, os.getpid(), True, [failure] * len(task.items))
    with job.lock:
        return worker.run(task)


@dataclass(eq=False)
class _Job:
    """A loader's job in this process, and the worker that makes its batches.

    In the process of its loader, each thread has a worker of its own. Elsewhere the process has
    one, and a lock: a Dask worker has several threads, but the global generators, and a slot that
    arrays are born in, are of the process.

    Attributes:
        job: the job.
        store: an object whose attribute ``worker`` is the worker.
        ids: ids for workers, below 0.
        lock: held while a worker is made, and while it makes a batch.
        how: keyword arguments of the worker.
        address: where the job was loaded from; None in the process of its loader.
        connection: what the job was fetched over; it ends when the loader does.
        pid: this process.
    """

    job: Job
    store: Any
    ids: Iterator[int]
    lock: AbstractContextManager[Any]
    how: dict[str, Any]
    address: JobAddress | None = None
    connection: socket.socket | None = None
    pid: int = field(default_factory=os.getpid)

    def worker(self, reference: JobReference) -> Worker:
        """Return the worker, which is told what the loader says now."""
        with self.lock:
            worker: Worker | None = getattr(self.store, "worker", None)
            if worker is None or worker.info.seed != reference.seed:
                info = WorkerInfo(-1, reference.num_workers, os.getpid(), reference.seed)
                worker = self.store.worker = Worker(self.job, info, **self.how)
                worker.id = next(self.ids)
            worker.info.num_workers = reference.num_workers
            return worker

    @property
    def may_be_needed(self) -> bool:
        """Whether its loader is not known to be closed."""
        return self.connection is not None or (self.address is not None and self.address.exists())


_jobs_here: weakref.WeakValueDictionary[bytes, _Job] = weakref.WeakValueDictionary()
"""Jobs of the loaders of this process, by their token, as long as a pool of theirs lives."""

loaded_jobs: dict[bytes, _Job] = {}
"""Jobs of loaders of other processes, by their token."""

_lock = threading.Lock()
"""Held while a job of another process is loaded, and while its worker makes a batch."""


def find_job(reference: JobReference) -> _Job:
    """Return the job of a task, loaded if need be."""
    token = reference.token
    here = _jobs_here.get(token)
    if here is not None and here.pid == os.getpid():  # not in a fork of the loader's process
        return here
    with _lock:
        job = loaded_jobs.get(token)
        if job is None:
            for former, each in list(loaded_jobs.items()):  # _forget() takes out, with no lock
                if not each.may_be_needed:
                    loaded_jobs.pop(former, None)
            job = loaded_jobs[token] = _load_job(reference)
            if job.connection is not None:
                args = token, job.connection
                threading.Thread(
                    target=_forget, args=args, name="minloader-job", daemon=True
                ).start()
        return job


def _forget(token: bytes, connection: socket.socket) -> None:
    """Let a fetched job go when its loader is closed."""
    wait_for_end(connection)
    loaded_jobs.pop(token, None)


def _load_job(reference: JobReference) -> _Job:
    """Load the job of a loader of another process.

    Raises:
        RuntimeError: the loader's versions are others.
        OSError: the job is not on this machine, and cannot be fetched.
    """
    address, connection = reference.address, None
    if address is None:
        raise RuntimeError("this is no thread of the loader's process, or the loader is closed")
    if reference.versions != versions():
        ours, theirs = (" and Python ".join(each) for each in (versions(), reference.versions))
        raise RuntimeError(
            f"a worker on {socket.gethostname()} has minloader {ours}, but the loader has "
            f"{theirs}; install the same on all machines"
        )
    if "distributed" in sys.modules:
        _give_dask_a_generator()
    try:
        mapping = address.map()
    except OSError:
        if not reference.hosts:
            raise
        mapping, connection = fetch(address, reference.hosts, reference.port)
    try:
        job = address.unpickle(mapping, forever=False)
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    how = {"packer": BatchPacker(OutOfBand()), "seed": seed_globals}
    return _Job(job, SimpleNamespace(), itertools.repeat(-1), _lock, how, address, connection)


_DASK = ("dask", "distributed", "tornado")


def _give_dask_a_generator() -> None:
    """Give Dask a generator of random numbers of its own.

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
