"""The beginning of a worker process: it leads a process group, follows the parent, loads the job,
and makes its Worker.

Nothing here raises: an error in an executor's initializer would break the pool, with no more
than a log entry. It is kept, and is the reply to each task.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from minloader._formats import refuse_breakpoint
from minloader._memory.job_file import ForkedJob, JobAddress, JobFile
from minloader._memory.limits import private_memory
from minloader._memory.pickling import unpack
from minloader._worker import current
from minloader._worker.environment import ProcessEnvironment
from minloader._worker.heartbeat import READY, open_heartbeat
from minloader._worker.import_hook import when_imported
from minloader._worker.lifetimes import follow_parent, kill_descendants, lead_group
from minloader._worker.make import make_worker
from minloader._worker.messages import (
    Failure,
    Job,
    Reply,
    current_info,
)
from minloader._worker.plugins import before_batch
from minloader._worker.seeds import seed_random_on_first_use
from minloader._worker.setup import TOKEN, WorkerSetup

if TYPE_CHECKING:
    from minloader._memory.inherited import Inheritance


def start(setup: WorkerSetup, index: int, inheritance: Inheritance | None) -> None:
    """Make this process a worker, before its first task. Never raises."""
    # Workers share the processors among themselves; these are read when the libraries are
    # loaded, which is later. OpenBLAS, MKL and torch follow the first unless told otherwise.
    pid = os.getpid()
    info = setup.infos[index]
    info.pid = pid
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")
    os.environ[TOKEN] = setup.token
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)  # a fork has not the threads that its OpenMP would wait for
    lead_group()
    follow_parent(setup.clean_up)
    # Before multiprocessing joins the processes that the dataset started, which could be never. Its
    # pools end before that, at 15: killed processes may have one of their locks, for ever. So do
    # its semaphores, at 0, which tell the tracker: of one priority what was made first comes last.
    multiprocessing.util.Finalize(None, kill_descendants, exitpriority=0)
    if sys.version_info < (3, 13) and multiprocessing.get_start_method() != "spawn":
        # There a fork ends without what was registered with atexit (cpython #83856).
        atexit._clear()  # the parent's
        multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=101)
    if not os.environ.get("PYTHONBREAKPOINT") and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse_breakpoint
    multiprocessing.spawn.get_preparation_data = _preparation_data
    try:
        for plugin in setup.plugins:
            plugin.start(info)
        # It answers where it is, from now on.
        beat, sample_cell = open_heartbeat(setup.heartbeats, index)
        for name in ("loky.reusable_executor", "joblib.externals.loky.reusable_executor"):
            if name in sys.modules:  # it would reuse an executor whose threads a fork has not
                importlib.reload(sys.modules[name])
        when_imported("torch.storage", _follow_torch)
        inherited = [] if inheritance is None else inheritance.load()
        job = setup.address.load(inherited=inherited)
        for plugin in setup.plugins:
            plugin.loaded()
        seed_random_on_first_use()
        reload = _reloader(setup.address, job, inherited)
        environment = ProcessEnvironment(beat, sample_cell=sample_cell, reload=reload)
        worker = make_worker(job, info, environment)
        for plugin in setup.plugins:
            plugin.ready()
        taken = environment.memory_at_start = private_memory()
        current.process_worker = worker
        # Before what it has started is killed: the stream may need that to end.
        multiprocessing.util.Finalize(None, worker.close, exitpriority=150)
        beat(READY, 0, time.perf_counter())
        limit = job.options.memory_limit
        if limit is not None and taken > limit:
            raise MemoryError(
                f"worker_memory_limit is {limit} bytes, but a worker takes {taken} before it makes "
                "a batch; set more"
            )
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError):
            error.add_note(
                f"a worker has no module {error.name!r} to import, where the dataset or a function "
                "is from: let it be found by that name (sys.path), or have it sent: "
                "cloudpickle.register_pickle_by_value(module)"
            )
        when = f"while worker {info.id} loaded the dataset"
        failure = Failure.of(error, packed=True, when=when, fatal=True)
        current.process_worker = None
        current.failed_start = Reply(worker=info.id, pid=pid, packed=True, outcomes=[failure])
    if os.getpid() != pid:
        os._exit(1)  # a fork that came back from the user's code: it is no worker


_get_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """Return what a process that this worker starts is told first."""
    from minloader._worker.main_module import with_main  # few start any

    return with_main(_get_preparation_data(name))


def _follow_torch(storage: Any) -> None:
    """Keep torch's conventions in this worker process from now on: it has torch."""
    from minloader._worker import torch_conventions

    torch_conventions.collate_in_private_memory(storage)
    if torch_conventions.set_torch_info not in before_batch:  # as in a fork of a worker
        before_batch.append(torch_conventions.set_torch_info)
    worker = current.process_worker
    info = current_info.get() if worker is None else worker.info
    if info is not None:  # in the middle of a batch
        torch_conventions.set_torch_info(info)


def _reloader(address: JobAddress | ForkedJob, job: Job, inherited: Any) -> Callable[[], Any]:
    """Return what gives further copies of the dataset, for a stream that is read in several places.

    A forked worker has one copy, which reading may change. Where it may need more, it pickles the
    dataset before that. Where each epoch has new workers, one is enough, but for resumed runs that
    have more shards than workers.
    """
    if isinstance(address, JobAddress):
        return lambda: address.load(inherited=inherited).dataset
    written = cache(partial(_written, job.dataset))
    if job.options.is_stream and not getattr(job.dataset, "read_once", False):
        written()
    return partial(_load_copy, job, written)


def _written(dataset: Any) -> JobFile | Exception:
    """Pickle a dataset as it is now. An error is kept: it may be that nobody needs a copy."""
    try:
        return JobFile(dataset, "fork")
    except Exception as error:
        return error


def _load_copy(job: Job, written: Callable[[], JobFile | Exception]) -> Any:
    """Return another copy of the dataset of a forked worker.

    What processes share by ``multiprocessing``, or in shared memory, is the same in all of them.

    Raises:
        TypeError: it cannot be pickled.
    """
    file = written()
    if isinstance(file, Exception):
        raise TypeError(
            "a forked worker has one copy of the dataset, and needs another one to read it in "
            f"another place, but it cannot be pickled: {file}; read each epoch to its end, with "
            "as many workers as when the state was taken, or leave out in __getstate__ what "
            "cannot be pickled (of minloader.torch.DataLoader, persistent_workers=False starts "
            "new workers for each epoch)"
        ) from file
    dataset = file.address.load(inherited=file.inherited)
    if getattr(dataset, "read_once", False) and job.beginning is not None:
        dataset.load_state_dict(unpack(job.beginning)["dataset"])  # it was read before
    return dataset
