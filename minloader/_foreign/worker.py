"""In a worker of the user's executor: the job is found or loaded, and the batches are made."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import mmap
import os
import random
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from minloader._memory import forks
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.job_file import JobAddress
from minloader._memory.pickling import unpack
from minloader._memory.slot_writer import NoSlot, unmap_closed
from minloader._protocols import snapshot
from minloader._worker import current
from minloader._worker.environment import Environment, PackingEnvironment
from minloader._worker.make import make_worker
from minloader._worker.messages import Failure, Job, Reply, TaskMessage, Unready, WorkerInfo
from minloader._worker.run import Worker


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


class JobMissing(Unready):
    """A worker of an executor on other machines has no job to make batches from.

    Attributes:
        address: where in Dask's cluster the worker is; "" if it is none of Dask's.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


LOOK_SECONDS = 1.0
"""How often a worker of the user's executor looks whether loaders were closed."""

IDLE_SECONDS = 300.0
"""How long a worker on another machine keeps a job for which no task comes."""


def versions() -> tuple[str, str]:
    """Return minloader's version and Python's, of which functions that are sent are the code."""
    ours: str = sys.modules["minloader"].__version__
    return ours, f"{sys.version_info.major}.{sys.version_info.minor}"


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


class OutOfBand(NoSlot):
    """Keeps large buffers beside the stream, as arrays of bytes.

    For an executor that sends arrays without copying them, as Dask's does. It may send them while
    the next batch is made, in the same array of the dataset's: so they are copied here.
    """

    def put(self, data: memoryview) -> Any:
        import numpy as np

        return np.frombuffer(data, np.uint8).copy()


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
                worker = self.store.worker = make_worker(self.job, info, self.make_environment())
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


def keep_here(mark: str, job: Job) -> _Loaded:
    """Have the job of a loader of this process be found here, as long as it is referred to."""
    # By a cluster's workers too: one of Dask's may be a thread here.
    loaded = _jobs_here[mark] = _Loaded(
        job=job,
        store=threading.local(),
        ids=itertools.count(-1, -1),
        lock=nullcontext(),
        make_environment=_ThreadEnvironment,
    )
    return loaded


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
