"""Executors that the user brings: threads, processes of this machine, or those of a cluster.

All that is asked of one is ``submit``. A task carries a reference to the loader's job, some 300
bytes, and each worker process gets the job itself once:

* in the loader's own process (threads) the job is there;
* on the loader's machine it is mapped from its file (``job_file.py``);
* elsewhere it comes through the executor::

    task ──> a worker that lacks the job says so in its reply, and makes nothing
    the next task, which is mostly that one again ──> takes the job along

With Dask the job is scattered once, and what is attached is Dask's future of it: Dask fetches it
to the worker that lacks it, from another worker, as it fetches everything. With any other executor
it is attached as bytes.

An executor of which it is not known that its workers are on this machine gets no slots either, and
for one more reason: a scheduler that believes a worker dead runs its tasks once more elsewhere. If
the worker lives after all, it would write into memory that has been lent to another batch.

A worker process lets a job go when its loader is closed: on the loader's machine within a second or
two, since the file is gone then; elsewhere when Dask brings the news, or after IDLE_SECONDS without
a task. It is sent again if it is needed after all.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import mmap
import os
import random
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from minloader._checks import snapshot
from minloader._memory import forks
from minloader._memory.job_file import JobAddress, JobFile
from minloader._memory.pickling import BatchPacker, OutOfBand, unpack
from minloader._memory.slot_writer import unmap_closed
from minloader._pools.served import ServedPool, follow
from minloader._pools.ticket import Ticket
from minloader._worker import current
from minloader._worker.environment import Environment, PackingEnvironment
from minloader._worker.messages import Failure, Job, JobMissing, Reply, TaskMessage, WorkerInfo
from minloader._worker.run import Worker


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
        mark: by which each process knows the job.
        num_workers: of the loader.
        seed: of the loader.
        versions: of what must be the same on both sides.
        address: the job, for other processes; None if the executor has none.
        may_be_remote: whether workers may be on other machines.
    """

    mark: str
    num_workers: int
    seed: int
    versions: tuple[str, str]
    address: JobAddress | None
    may_be_remote: bool


LOOK_SECONDS = 1.0
"""How often a worker of the user's executor looks whether loaders were closed."""

IDLE_SECONDS = 300.0
"""How long a worker on another machine keeps a job for which no task comes."""


def versions() -> tuple[str, str]:
    """Return minloader's version and Python's, of which functions that are sent are the code."""
    ours: str = sys.modules["minloader"].__version__
    return ours, f"{sys.version_info.major}.{sys.version_info.minor}"


class Attachment(NamedTuple):
    """The job on its way to a worker on another machine.

    Attributes:
        data: its bytes, or Dask's future of them.
        options: how a task is submitted that takes it along.
    """

    data: Any
    options: dict[str, Any]


class JobSender:
    """Has an executor send the job to its workers on other machines.

    Args:
        executor: the user's.
        job_file: the job.
    """

    def __init__(self, executor: Executor, job_file: JobFile) -> None:
        self._job_file = job_file
        self._process = forks.process
        self._client: Any = getattr(executor, "_client", None)  # Dask's
        self._lacking: deque[str] = deque()  # where workers are that lack the job
        self._scattered: Any = None  # Dask's future of it

    def look(self, done: Future[Reply]) -> None:
        """Note whether the worker that had a task lacks the job."""
        if done.cancelled() or done.exception():
            return
        reply: Reply | JobMissing = done.result()
        if isinstance(reply, JobMissing):
            self._lacking.append(reply.address)

    def attach(self) -> Attachment | None:
        """Return what the next task takes along; None if no worker is known to lack the job."""
        try:
            where = self._lacking.popleft()
        except IndexError:
            return None
        if not where:
            return Attachment(data=bytes(self._job_file.content()), options={})
        if self._scattered is None:
            import numpy as np

            data = np.frombuffer(self._job_file.content(), np.uint8)
            self._scattered = self._client.scatter(data, workers=[where], hash=False)
        # Another worker may run the task too, should this one die.
        options = {"workers": [where], "allow_other_workers": True}
        return Attachment(data=self._scattered, options=options)

    def close(self) -> None:
        """Have the workers of a Dask cluster let the job go. Does not wait for them."""
        scattered = self._scattered
        self._scattered = None
        if scattered is not None and forks.process is self._process:
            threading.Thread(target=self._tell, name="minloader-job", daemon=True).start()

    def _tell(self) -> None:
        with suppress(Exception):  # the cluster is gone, or about to go, and the job with it
            self._client.run(forget, self._job_file.mark, on_error="ignore")


@dataclass(eq=False, repr=False, kw_only=True)
class ForeignPool(ServedPool):
    """Makes batches in an executor that the user brought, and will shut down.

    Args:
        executor: runs the tasks; as many at once as the user says.
        owner: process that made the executor; in a fork of it nothing would ever run.
        job: what workers in this process use as it is.
        job_file: what others load; None if the executor has no others.
        sender: sends it to those that do not find it; None if all are on this machine.
    """

    executor: Executor
    owner: int
    job: Job
    job_file: JobFile | None
    sender: JobSender | None

    def __post_init__(self) -> None:
        super().__post_init__()
        file = self.job_file
        self._mark = secrets.token_hex(8) if file is None else file.mark
        self._address = None if file is None else file.address
        # For a cluster's workers too: one of Dask's may be a thread here.
        ids = itertools.count(-1, -1)
        self._job = _Loaded(
            job=self.job,
            store=threading.local(),
            ids=ids,
            lock=nullcontext(),
            make_environment=_ThreadEnvironment,
        )
        _jobs_here[self._mark] = self._job
        self._unfinished: dict[int, Ticket] = {}
        self._options: dict[str, Any] = {}
        if _is_of(self.executor, "distributed"):
            # Equal calls are not one; and without delay an earlier one comes first.
            self._options = {"pure": False, "fifo_timeout": "0 ms"}

    def _begin(self) -> None:
        if os.getpid() != self.owner:
            raise RuntimeError(
                f"executor belongs to process {self.owner}, of which this one is a fork; make "
                "the Loader and its executor here"
            )
        super()._begin()

    def hand_over(self, ticket: Ticket, task: TaskMessage) -> None:
        if self.closed:
            raise RuntimeError("the pool is closed")
        reference = JobReference(
            mark=self._mark,
            num_workers=self.num_workers,
            seed=self.infos[0].seed,
            versions=versions(),
            address=self._address,
            may_be_remote=self.sender is not None,
        )
        attachment = None if self.sender is None else self.sender.attach()
        task = task._replace(slot=ticket.borrow(self.slots))
        sent: Future[Any]  # of a reply, or of JobMissing
        if attachment is None:
            sent = self.executor.submit(run_task, reference, task, **self._options)
        else:
            options = self._options | attachment.options
            sent = self.executor.submit(run_task, reference, task, attachment.data, **options)
        if self.sender is not None:
            sent.add_done_callback(self.sender.look)  # before whoever sends the task again
        follow(sent, ticket, task.id, self._unfinished, None)

    def end_all(self) -> None:
        while self._unfinished:
            with suppress(KeyError):  # it was done just now
                ticket = self._unfinished.popitem()[1]
                ticket.cancel()
                ticket.fail(CancelledError())

    def is_death(self, error: BaseException) -> bool:
        # Dask runs a task again by itself, until it has seen too many workers die with it.
        killed = getattr(sys.modules.get("distributed.scheduler"), "KilledWorker", ())
        return isinstance(error, killed)


# --- in a worker of the user's executor ----------------------------------------------------------


def run_task(
    reference: JobReference, task: TaskMessage, attached: Any = None
) -> Reply | JobMissing:
    """Make the batches of a task. The executor runs it, wherever its workers are."""
    try:
        job = find_job(reference, attached)
        if job is None:
            return JobMissing(_dask_address())
        worker = job.worker(reference)
    except BaseException as error:  # sys.exit() too: the consumer's to see
        when = "while the worker loaded the dataset"
        failure = Failure.of(error, packed=True, when=when, fatal=True)
        outcomes = [failure] * len(task.items)
        return Reply(worker=-1, pid=os.getpid(), packed=True, outcomes=outcomes)
    with job.lock:
        if job.lock is _lock:  # the process is the worker: threads of the dataset's too
            current.process_worker = worker
        return worker.run(task)


class _ThreadEnvironment(Environment):
    """A thread in the process of the loader, whose items are packed: who sent them did not know."""

    def unpack_item(self, item: Any) -> Any:
        return unpack(item) if type(item) is bytes else item


@dataclass(eq=False)
class _Loaded:
    """A loader's job as it is in this process, and the worker that makes its batches.

    In the process of its loader, each thread has a worker of its own. Elsewhere the process has
    one, and a lock: a Dask worker has several threads, but the global generators, and a slot that
    arrays are born in, are of the process.

    Attributes:
        job: the job.
        store: an object whose attribute ``worker`` is the worker.
        ids: ids for workers, below 0.
        lock: held while a worker is made, and while it makes a batch.
        make_environment: makes that of a worker.
        address: where the job was loaded from; None in the process of its loader, and where it
            came with a task.
        used: when a task for it came last, by ``time.monotonic``.
    """

    job: Job
    store: Any
    ids: Iterator[int]
    lock: AbstractContextManager[Any]
    make_environment: Callable[[], Environment]
    address: JobAddress | None = None
    used: float = 0.0

    def worker(self, reference: JobReference) -> Worker:
        """Return the worker, which is told what the loader says now."""
        with self.lock:
            self.used = time.monotonic()
            worker: Worker | None = getattr(self.store, "worker", None)
            if worker is None or worker.info.seed != reference.seed:
                info = WorkerInfo(-1, reference.num_workers, os.getpid(), reference.seed)
                worker = self.store.worker = Worker(self.job, info, self.make_environment())
                worker.id = next(self.ids)
            worker.info.num_workers = reference.num_workers
            return worker

    @property
    def may_be_needed(self) -> bool:
        """Whether its loader is not known to be closed."""
        if self.address is not None:
            return self.address.exists()
        return time.monotonic() - self.used < IDLE_SECONDS


_jobs_here: weakref.WeakValueDictionary[str, _Loaded] = weakref.WeakValueDictionary()
"""Jobs of the loaders of this process, by their mark, as long as a pool of theirs lives."""

loaded_jobs: dict[str, _Loaded] = {}
"""Jobs of loaders of other processes, by their mark."""

_lock = forks.new_lock()
"""Held while a job of another process is loaded, and while its worker makes a batch."""


# A worker that was forked from the loader's process loads the job, as any other.
forks.in_child.append(_jobs_here.clear)


def find_job(reference: JobReference, attached: Any = None) -> _Loaded | None:
    """Return the job of a task, loaded if need be; None if it is not here."""
    mark = reference.mark
    here = _jobs_here.get(mark)
    if here is not None:
        return here
    with _lock:
        job = loaded_jobs.get(mark)
        if job is None:
            job = _load_job(reference, attached)
            if job is not None:
                loaded_jobs[mark] = job
                _watch_loaders()
        return job


def _load_job(reference: JobReference, attached: Any) -> _Loaded | None:
    """Load the job of a loader of another process; return None if it has to be sent.

    Raises:
        RuntimeError: the loader's versions are others.
        OSError: the loader is closed.
    """
    address: JobAddress | None = reference.address
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
        found: JobAddress | None = address
    except OSError:
        if not reference.may_be_remote:
            raise
        if attached is None:
            return None
        mapping = mmap.mmap(-1, len(attached))
        found = None
        mapping[:] = memoryview(attached)  # a copy of its own, for the dataset to change
    return _Loaded(
        job=address.unpickle(mapping),
        store=SimpleNamespace(),
        ids=itertools.repeat(-1),
        lock=_lock,
        make_environment=lambda: PackingEnvironment(BatchPacker(OutOfBand())),
        address=found,
        used=time.monotonic(),
    )


_watcher: threading.Thread | None = None  # it does not follow a fork


def _watch_loaders() -> None:
    """Have a thread look after the jobs that are loaded here, unless one does. Under the lock."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=forget_closed, name="minloader-jobs", daemon=True)
        _watcher.start()


def forget_closed() -> None:
    """Let go of what closed loaders have left, now and then, until there are no more jobs."""
    global _watcher
    while True:
        time.sleep(LOOK_SECONDS)
        for mark, job in snapshot(loaded_jobs.items()):
            if not job.may_be_needed:
                forget(mark)
            del job
        unmap_closed()
        with _lock:
            if not loaded_jobs:
                _watcher = None
                return


def forget(mark: str) -> None:
    """Let a job go. Another's worker may be making a batch meanwhile."""
    job = loaded_jobs.pop(mark, None)
    if job is not None:
        worker = getattr(job.store, "worker", None)
        if current.process_worker is worker:  # else the threads belong to another by now
            current.process_worker = None
        del job, worker
        gc.collect()  # a dataset may be in a cycle


def _dask_address() -> str:
    """Return where Dask's worker is that runs this; "" where it is none of Dask's."""
    try:
        return str(sys.modules["distributed"].get_worker().address)
    except (KeyError, ValueError):
        return ""


_DASK = ("dask", "distributed", "tornado")


def _give_dask_a_generator() -> None:
    """Give Dask a generator of random numbers of its own.

    Its threads draw from Python's global one several times a second, to estimate sizes, and so
    would change what a batch draws; and a generator that we have seeded would give the delays by
    which its workers avoid each other the same length in all of them.
    """
    spec: Any = importlib.util.find_spec("random")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, module in list(sys.modules.items()):
        names = vars(module) if name.partition(".")[0] in _DASK else {}
        if names.get("random") is random:
            names["random"] = copy
