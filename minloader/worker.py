"""All that runs inside a worker, be it a process, a thread or the calling process itself.

A worker process is born through :func:`start`, makes batches through :func:`run` and dies
with its parent (``processes.py``). An executor that the user brought knows none of
this: its workers meet a loader's job by an :class:`Attachment`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from minloader import processes, shipping, slots, transport
from minloader.board import Mark, attend
from minloader.errors import TransportError
from minloader.seeds import batch_seed, borrow_globals, seeds

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Attachment", "Failure", "Job", "Reply", "Task", "Worker", "WorkerInfo"]


CHUNK_SECONDS = 2e-3
"""Longest that a chunk of quick batches should take. An executor needs 0.15 to 0.3 ms for a task,
which a chunk shares; and a batch waits so long for others in its chunk, twice that at most."""


# --- what a batch is made from


@dataclass
class Job:
    """What a worker must have to make batches; shipped to each worker once.

    Attributes:
        dataset: indexable, or else callable.
        transform: applied to each sample, or to the batch when nothing is collated.
        collate_fn: samples to batch; None if the dataset gives whole batches.
        worker_init_fn: called once in each worker with its :class:`WorkerInfo`.
        seed: the loader's seed.
        num_workers: how many workers there are.
        memory_limit: bytes that a worker process may have for itself.
    """

    dataset: Any
    transform: Callable[[Any], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    worker_init_fn: Callable[[WorkerInfo], Any] | None
    seed: int
    num_workers: int
    memory_limit: int | None = None

    def fetch(self, item: Any) -> Any:
        """Makes the batch of one item."""
        if self.collate_fn is None:
            batch = self._get(item)
            return batch if self.transform is None else self.transform(batch)
        if isinstance(item, list) and item and all(isinstance(shard, list) for shard in item):
            return [self._collated(shard, self.collate_fn) for shard in item]
        return self._collated(item, self.collate_fn)

    def _get(self, item: Any) -> Any:
        # Looked up on the type, as Python itself does: a class can be a callable dataset.
        if hasattr(type(self.dataset), "__getitem__"):
            return self.dataset[item]
        return self.dataset(item)

    def _collated(self, indices: Any, collate_fn: Callable[[list[Any]], Any]) -> Any:
        try:
            indices = list(indices)
        except TypeError as error:
            raise TypeError(
                f"the sampler yielded {indices!r}, but with collate_fn each item must be a list "
                "of indices; use a batch sampler or batch_size, or drop collate_fn"
            ) from error
        if hasattr(self.dataset, "__getitems__"):
            samples = list(self.dataset.__getitems__(indices))
        else:
            samples = [self._get(index) for index in indices]
        if self.transform is not None:
            samples = [self.transform(sample) for sample in samples]
        return collate_fn(samples)


class Task(NamedTuple):
    """A chunk of batches to make, mostly one. Items are packed when they leave the process.

    Attributes:
        ordinal: place of the first batch in its epoch, from 0.
        epoch: their epoch.
        items: what to make them from.
        slot: where to put them; None for the reply itself.
        id: of the task, in its pool.
    """

    ordinal: int
    epoch: int
    items: list[Any]
    slot: slots.Address | None = None
    id: int = 0


class Reply(NamedTuple):
    """What became of a task.

    Attributes:
        worker: id of the worker.
        pid: its process.
        packed: whether batches and errors are packed.
        outcomes: a batch or a failure for each of the first items. A chunk that turns out to be
            slow is cut short.
        seconds: what they took.
        size: bytes they have, packed, more or less.
        slot_size: bytes that the slot has now; None if nobody touched it.
        slot_retired: whether the worker still uses memory of it.
        overflowed: how many batches found no room in shared memory.
        memory: bytes that the worker has for itself, if there is a limit.
    """

    worker: int
    pid: int
    packed: bool
    outcomes: list[Any]
    seconds: float = 0.0
    size: int = 0
    slot_size: int | None = None
    slot_retired: bool = False
    overflowed: int = 0
    memory: int = 0


class Failure(NamedTuple):
    """An exception on its way to the parent.

    Attributes:
        error: the exception, packed if the reply is; None if it could not be.
        summary: its type and message.
        traceback: as printed in the worker, "" if the exception brings its own.
        stage: what was being done, "" for making the batch.
        fatal: whether it will be the same for every other batch. Skipping them would hide it.
    """

    error: Any
    summary: str
    traceback: str
    stage: str = ""
    fatal: bool = False

    @classmethod
    def of(
        cls, error: BaseException, *, packed: bool, stage: str = "", fatal: bool = False
    ) -> Failure:
        """Records an exception where it was caught."""
        summary = "".join(traceback.format_exception_only(error)).strip()
        if not packed:
            return cls(error, summary, "", stage, fatal)
        text = "".join(traceback.format_exception(error))
        return cls(transport.pack_error(error), summary, text, stage, fatal)


@dataclass
class WorkerInfo:
    """What code in a worker may want to know about where it runs.

    Attributes:
        id: number of the worker, from 0; -1 on an executor that the user brought.
        num_workers: number of workers of the loader; 0 in the calling process.
        pid: process the worker is, or runs in.
        seed: the loader's seed.
        epoch: epoch of the batch being made.
    """

    id: int
    num_workers: int
    pid: int
    seed: int
    epoch: int = 0
    _ordinal: int | None = field(default=None, repr=False)
    _rng: np.random.Generator | None = field(default=None, repr=False)

    @property
    def rng(self) -> np.random.Generator:
        """Generator of the batch being made, from ``SeedSequence([seed, epoch, ordinal])``.

        The same whichever worker makes the batch. Made when first asked for in a batch; in
        ``worker_init_fn`` it depends on the worker's id instead.
        """
        if self._rng is None:
            import numpy as np

            if self._ordinal is None:
                entropy = np.random.SeedSequence(self.seed, spawn_key=(max(self.id, 0),))
            else:
                entropy = np.random.SeedSequence([self.seed, self.epoch, self._ordinal])
            self._rng = np.random.default_rng(entropy)
        return self._rng

    def _begin(self, epoch: int, ordinal: int) -> None:
        self.epoch, self._ordinal, self._rng = epoch, ordinal, None


# --- the worker


class Worker:
    """Makes batches, one at a time.

    Args:
        job: what to make them from.
        worker_id: see :class:`WorkerInfo`.
        remote: whether parent and worker are different processes, so that items and batches
            are packed, and the process's global generators are the worker's to seed.
        borrow: seed the global generators of the caller's process around each batch. Threads
            do neither: the global generators are shared by all of them.
        mark: told of each item before it is begun.
    """

    def __init__(
        self,
        job: Job,
        worker_id: int,
        *,
        remote: bool,
        borrow: bool = False,
        mark: Mark = lambda task, index: None,
    ) -> None:
        self.info = WorkerInfo(worker_id, job.num_workers, os.getpid(), job.seed)
        self._job = job
        self._remote = remote
        self._borrow = borrow
        self._mark = mark
        self._broken: Failure | None = None
        if remote and seeds not in sys.meta_path:
            sys.meta_path.insert(0, seeds)
        if job.worker_init_fn is not None:
            self._init(job.worker_init_fn)

    def _init(self, worker_init_fn: Callable[[WorkerInfo], Any]) -> None:
        seed = batch_seed(self.info.seed, -1, self.info.id)
        try:
            self._call(worker_init_fn, self.info, seed)
        except BaseException as error:  # kept for the first task: raised here, it breaks the pool
            if not self._remote and not isinstance(error, Exception):
                raise
            stage = "in worker_init_fn"
            self._broken = Failure.of(error, packed=self._remote, stage=stage, fatal=True)

    def _call(self, function: Callable[[Any], Any], argument: Any, seed: int) -> Any:
        """Calls the user's code, seeded, and with an answer to :func:`get_worker_info`.

        No context managers: contextlib sets attributes of an exception that passes, which a
        frozen dataclass refuses with an error of its own.
        """
        before = getattr(_thread, "info", None)
        _thread.info = self.info
        give_back = borrow_globals() if self._borrow else None
        try:
            if self._borrow or self._remote:
                seeds.seed(seed)
            return function(argument)
        finally:
            _thread.info = before
            if give_back is not None:
                give_back()

    def run(self, task: Task) -> Reply:
        """Makes the batches of a task, until they take too long for one task.

        Whatever the user's code raises is in the reply, never raised; but for what ends a
        program (Ctrl-C) in the process that the program is.
        """
        info = self.info
        if self._broken is not None:
            failures = [self._broken] * len(task.items)
            return Reply(info.id, info.pid, self._remote, failures)
        writer = slots.SlotWriter(task.slot) if task.slot is not None else None
        if writer is not None:
            slots.use(writer)
        outcomes: list[Any] = []
        overflowed = 0
        begin = time.perf_counter()
        try:
            for n, item in enumerate(task.items):
                self._mark(task.id, n)
                outcomes.append(self._make(task.epoch, task.ordinal + n, item, writer))
                overflowed += writer is not None and writer.overflowed
                seconds = time.perf_counter() - begin
                if seconds > 2 * CHUNK_SECONDS:
                    break
        except BaseException:
            # Of a chunk in a thread, the rest is to be tried one by one.
            if len(task.items) == 1:
                raise
            seconds = time.perf_counter() - begin
        finally:
            if writer is not None:
                slots.use(None)
        reply = Reply(info.id, info.pid, self._remote, outcomes, seconds)
        if self._job.memory_limit is not None and self._remote:
            reply = reply._replace(memory=processes.private_memory())
        if writer is None:
            return reply
        writer.close()
        return reply._replace(
            size=sum(map(transport.size_in_band, outcomes)) + writer.used,
            slot_size=writer.size,
            slot_retired=writer.retired,
            overflowed=overflowed,
        )

    def _make(self, epoch: int, ordinal: int, item: Any, writer: slots.SlotWriter | None) -> Any:
        """One batch, or its failure."""
        self.info._begin(epoch, ordinal)
        if writer is not None:
            writer.begin()
        try:
            if self._remote:
                item = transport.unpack(item)
            batch = self._call(self._job.fetch, item, batch_seed(self.info.seed, epoch, ordinal))
        except BaseException as error:
            # In the caller's own process Ctrl-C is Ctrl-C. In a worker nothing may escape:
            # the executor would try to pickle it.
            if not self._remote and not isinstance(error, Exception):
                raise
            self._end_fork()
            return Failure.of(error, packed=self._remote)
        if not self._remote:
            return batch
        self._end_fork()
        try:
            if writer is None:
                return transport.pack(batch, down=False)
            parcel = transport.pack_batch(batch, writer)
        except BaseException as error:
            return _unpackable(batch, error)
        del batch
        if isinstance(parcel, bytes):
            writer.end([])
            return parcel
        return parcel._replace(buffers=writer.end(parcel.buffers))

    def _end_fork(self) -> None:
        """Ends a fork of the worker that came back from the dataset, before it answers too."""
        if self._remote and os.getpid() != self.info.pid:
            os._exit(1)


def _unpackable(batch: Any, error: BaseException) -> Failure:
    path, part, cause = transport.find_culprit(batch, "batch") or ("batch", batch, error)
    return Failure.of(
        TransportError(
            f"a batch of type {type(batch).__qualname__} cannot be sent to the parent: "
            f"{path} is a {type(part).__qualname__} ({cause}); return arrays, numbers, "
            "strings or containers of them, or use executor='thread'"
        ),
        packed=True,
    )


_thread = threading.local()  # .info: set while this thread makes a batch
_process_worker: Worker | None = None  # the one of a worker process, whatever its threads
_start_reply: Reply | None = None  # of a worker that could not load its job


def get_worker_info() -> WorkerInfo | None:
    """Tells code that makes batches where it runs; None outside a worker.

    In a worker process it answers in every thread; in a thread worker, and with
    ``num_workers=0``, in the thread that makes the batch, while it makes one.
    """
    info: WorkerInfo | None = getattr(_thread, "info", None)
    if info is None and _process_worker is not None:
        info = _process_worker.info
    return info


# --- a worker process of our own


class Station(NamedTuple):
    """Where a worker finds what it needs.

    Attributes:
        cargo: the job.
        folder: where slots have names; None if they have none.
        board: path of the board.
        token: what everything is marked with that the worker starts.
    """

    cargo: shipping.Cargo
    folder: str | None
    board: str
    token: str

    def clean_up(self) -> None:
        """Removes files that have names, when the parent was killed."""
        self.cargo.unlink()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if not self.board.startswith("/proc/"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.board)


POOL_VARIABLE = "MINLOADER_POOL"
"""Environment variable by which the processes that a worker started are known when it is dead."""


def start(station: Station, worker_id: int) -> None:
    """First thing that runs in a worker process. Never raises: that would break the pool."""
    global _process_worker, _start_reply
    # Workers share the processors among themselves; these are read when the libraries are
    # loaded, which is later. OpenBLAS, MKL and torch follow the first unless told otherwise.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")
    os.environ[POOL_VARIABLE] = station.token
    processes.lead_group()
    processes.follow_parent(last_act=station.clean_up)
    # Before multiprocessing joins the processes that the dataset started, which could be never.
    multiprocessing.util.Finalize(None, processes.kill_descendants, exitpriority=100)
    try:
        job = station.cargo.load(forever=True)
        mark = attend(station.board, worker_id)
        _process_worker = Worker(job, worker_id, remote=True, mark=mark)
        _check_memory(job.memory_limit)
    except BaseException as error:
        stage = f"while worker {worker_id} loaded the dataset"
        failure = Failure.of(error, packed=True, stage=stage, fatal=True)
        _process_worker = None
        _start_reply = Reply(worker_id, os.getpid(), True, [failure])


def _check_memory(limit: int | None) -> None:
    if limit is not None and processes.private_memory() > limit:
        raise MemoryError(
            f"worker_memory_limit is {limit} bytes, but a worker takes "
            f"{processes.private_memory()} before it makes a batch; set more"
        )


def run(task: Task) -> Reply:
    """Makes the batches of a task in a worker process."""
    if _process_worker is None:
        assert _start_reply is not None
        return _start_reply._replace(outcomes=_start_reply.outcomes * len(task.items))
    return _process_worker.run(task)


def warm_up() -> None:
    """Does nothing: a task that makes an executor start a worker for it."""


# --- a worker of somebody else's executor

_attached: dict[shipping.Cargo, Worker] = {}
_attach_lock = threading.Lock()


class Attachment:
    """Stands for a loader's job in the tasks sent to an executor that we did not start.

    It is the job itself as long as it stays in this process (threads); pickled, it is only
    the address of the shipped job, which each process loads once.
    """

    def __init__(self, job: Job, shipment: shipping.Shipment | None) -> None:
        self._job = job
        self._shipment = shipment
        self._threads = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._shipment is None:
            raise TypeError("executor: a ThreadPoolExecutor must not pickle its tasks")
        return _attach, (self._shipment.cargo,)

    def __call__(self) -> Worker:
        """The worker of the calling thread."""
        worker: Worker | None = getattr(self._threads, "worker", None)
        if worker is None:
            worker = self._threads.worker = Worker(self._job, -1, remote=False)
        return worker


def _attach(cargo: shipping.Cargo) -> Callable[[], Worker]:
    """What an attachment unpickles to. Loading waits for the call: an error here would be
    raised while the executor reads its queue, which kills the worker."""

    def worker() -> Worker:
        with _attach_lock:
            if cargo not in _attached:
                for other in [other for other in _attached if not other.exists()]:
                    del _attached[other]  # its loader is closed
                _attached[cargo] = Worker(cargo.load(forever=False), -1, remote=True)
            return _attached[cargo]

    return worker


def run_attached(attachment: Callable[[], Worker], task: Task) -> Reply:
    """Makes the batches of a task in a worker of somebody else's executor."""
    try:
        worker = attachment()
    except Exception as error:
        stage = "while the worker loaded the dataset"
        failure = Failure.of(error, packed=True, stage=stage, fatal=True)
        return Reply(-1, os.getpid(), True, [failure] * len(task.items))
    if not worker._remote:
        task = task._replace(items=[transport.unpack(item) for item in task.items])
    return worker.run(task)
