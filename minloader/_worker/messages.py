"""The messages between parent and worker: the job once, then tasks and their replies."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from minloader._errors import BatchError, printed
from minloader._memory.files import SlotAddress
from minloader._memory.pickling import pack_error
from minloader._sampling.seeding import generator, sample_key

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Job:
    """All that a worker needs to make batches. Each worker loads it once.

    Attributes:
        dataset: indexable, or else callable.
        transform: applied to each sample, or to the batch when nothing is collated.
        collate_fn: samples to batch; None if the dataset gives whole batches.
        worker_init_fn: called once in each worker with its :class:`WorkerInfo`.
        memory_limit: bytes that a worker process may have for itself.
        batch_size: samples in a batch of a stream; None if its elements are the batches.
        keep_last: whether a stream's incomplete last batch is one.
        on_sample_error: called with the BatchError of a sample that fails; returns what is to be
            in its place, or SKIP. None: the batch fails.
        is_stream: whether the dataset is read by shards, each in a copy of its own.
        rank: that of the sampler: other ranks draw other numbers.
        seed_generators: whether the generators that these have of their own are seeded, too.
        without_processes: what errors say to do where something cannot be sent to a process.
    """

    dataset: Any
    transform: Callable[[Any], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    worker_init_fn: Callable[[WorkerInfo], Any] | None
    memory_limit: int | None = None
    batch_size: int | None = None
    keep_last: bool = True
    on_sample_error: Callable[[BatchError], Any] | None = None
    is_stream: bool = False
    rank: int = 0
    seed_generators: bool = False
    without_processes: str = "use executor='thread'"


class Shard(NamedTuple):
    """Which batches of a stream a task is for, and how to get there.

    Attributes:
        id: number of the shard.
        total: number of shards.
        first: ordinal of the first of the batches in the shard.
        at: how many batches had been read when ``state`` was taken; those up to ``first`` are
            passed over.
        state: of the stream, packed; with ``at=0`` that from the end of the epoch before, or from
            before the first. None if it has none to give.
        check: an ordinal from there on, and before ``first``, and what the samples of that batch
            are recognized by; None: there is none.
        number: of the pass over the shard. A worker that reads it goes on where it stands.
        follows: number of the pass that was read to its end before: whoever has done that goes on
            with the same copy of the stream. None: there is none.
    """

    id: int
    total: int
    first: int
    at: int
    state: bytes | None
    check: tuple[int, int | None] | None
    number: int
    follows: int | None

    def ordinal(self, index: int) -> int:
        """Return the place of a batch in the epoch, as in rounds where no shard has ended."""
        return index * self.total + self.id


NO_SAMPLE: Final = ...
"""Stands for the index of a sample where none is being made. It survives pickling."""


class TaskMessage(NamedTuple):
    """A chunk of batches to make, mostly one.

    Attributes:
        ordinal: place of the first batch in its epoch, from 0; of a stream, in the shard.
        epoch: their epoch.
        items: what to make them from; of a stream, as many as there may be batches.
        slot: where to put them; None for the reply itself.
        id: of the task, in its pool.
        shard: of a stream; None if the batches are made from the items.
        alone: whether nothing of another task is to be read meanwhile, so that it is known with
            which a worker dies.
        job: what it takes along for a worker that lacks the job, and how it is submitted then.
        lost: of a task of one batch that is not made as ever: the samples that took a worker along,
            by their places in the item, each with the error that stands for it. They are not made
            again, and the others one after the other, so that it is known with which one a worker
            dies. Packed if the items are. None: the batch is made as ever.
    """

    ordinal: int
    epoch: int
    items: list[Any]
    slot: SlotAddress | None = None
    id: int = 0
    shard: Shard | None = None
    alone: bool = False
    job: Any = None
    lost: Any = None


class Timings(NamedTuple):
    """How long a task took.

    Attributes:
        began: when the worker began with it, by ``time.perf_counter``.
        seconds: what all of it took.
        transform: of these, seconds of ``transform``.
        collate: of ``collate_fn``.
        packing: of packing the batches.
    """

    began: float = 0.0
    seconds: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    packing: float = 0.0


class Figures(NamedTuple):
    """What is counted of a task. Nothing depends on it but what users and logs are told.

    Attributes:
        timings: how long it took.
        size: bytes that its batches have, packed, more or less.
        overflowed: how many of them found no room in shared memory.
        skipped: how many samples were left out.
        memory: bytes that the worker has for itself, told now and then, and always if there is a
            limit; else 0.
        memory_at_start: bytes that it had before its first batch; 0 if that is not known.
        processor: what :meth:`~minloader._worker.processor_time.Meter.add` told.
        drawn: names of generators of the dataset's own, see :mod:`minloader._worker.generators`.
    """

    timings: Timings = Timings()
    size: int = 0
    overflowed: int = 0
    skipped: int = 0
    memory: int = 0
    memory_at_start: int = 0
    processor: tuple[float, float, float] | None = None
    drawn: tuple[str, ...] = ()


class SlotUse(NamedTuple):
    """What has become of the slot of a task.

    Attributes:
        size: bytes that it has now.
        is_retired: whether the worker still uses memory of it.
    """

    size: int
    is_retired: bool


class ShardReply(NamedTuple):
    """How far a shard of a stream was read.

    Attributes:
        ended: whether it has no more batches.
        state: of the stream after the last of the outcomes, packed; None if it has none.
        fingerprints: what the samples of each batch are recognized by; None: they are not.
        reread: how many batches were read again, to get to the first of them.
    """

    ended: bool
    state: bytes | None
    fingerprints: list[int | None]
    reread: int


class Reply(NamedTuple):
    """The result of a task.

    Attributes:
        worker: id of the worker; below 0 on an executor that the user brought.
        pid: its process.
        packed: whether batches and errors are packed.
        outcomes: a batch or a failure for each of the first items. A chunk that turns out to be
            slow is cut short.
        failed: samples that failed and were left out: of which outcome, the index of the sample
            in a tuple (packed if the reply is; () if it is not known), and the error in words.
        slot: what has become of it; None if the worker did not open it.
        shard: how far it was read; None if the task was for none.
        figures: what is counted.
    """

    worker: int
    pid: int
    packed: bool
    outcomes: list[Any]
    failed: list[tuple[int, Any, str]] = []  # noqa: RUF012  # never changed
    slot: SlotUse | None = None
    shard: ShardReply | None = None
    figures: Figures = Figures()


class JobMissing(Exception):
    """A worker of an executor on other machines has no job to make batches from.

    It is returned in place of a reply, not raised: Dask would log it.

    Attributes:
        address: where in Dask's cluster the worker is; "" if it is none of Dask's.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def summary(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return "".join(traceback.format_exception_only(error)).strip()


class Failure(NamedTuple):
    """An exception on its way to the parent.

    Attributes:
        error: the exception, packed if the reply is; None if it could not be.
        summary: its type and message.
        traceback: as printed in the worker, "" if the exception brings its own.
        stage: what was being done, "" for making the batch.
        fatal: whether it will be the same for every other batch. Skipping them would hide it.
        sample: the index of the sample that failed, in a tuple, packed if the reply is; or empty.
    """

    error: Any
    summary: str
    traceback: str
    stage: str = ""
    fatal: bool = False
    sample: Any = ()

    @classmethod
    def of(
        cls, error: BaseException, *, packed: bool, stage: str = "", fatal: bool = False
    ) -> Failure:
        """Make the failure of an exception, where it was caught."""
        return cls(
            error=pack_error(error) if packed else error,
            summary=summary(error),
            traceback=printed(error) if packed else "",
            stage=stage,
            fatal=fatal,
        )


UNSENT: Final = {"dataset": None, "_sample": NO_SAMPLE, "_generators": None}
"""What a copy of a :class:`WorkerInfo` in another process has in the place of large values."""


@dataclass
class WorkerInfo:
    """Where code of a worker runs.

    Attributes:
        id: number of the worker, from 0; -1 on an executor that the user brought. While a
            stream is read: number of the shard.
        num_workers: number of workers of the loader; 0 in the calling process. While a stream
            is read: number of shards.
        pid: process the worker is, or runs in.
        seed: the loader's seed.
        epoch: epoch of the batch being made.
        rank: of the training process, as the sampler has it; 0 if it has none.
        dataset: the object that the worker reads from, which ``worker_init_fn`` may change. Threads
            share one; of a stream that is read, the shard's own. None once the info is pickled.
    """

    id: int
    num_workers: int
    pid: int
    seed: int
    epoch: int = 0
    rank: int = 0
    dataset: Any = field(default=None, repr=False, compare=False)
    _ordinal: int | None = field(default=None, repr=False)
    _rng: np.random.Generator | None = field(default=None, repr=False)
    _key: tuple[int, ...] = field(default=(), repr=False)
    _sample: Any = field(default=NO_SAMPLE, repr=False, compare=False)  # whose turn it is
    _sample_rng: np.random.Generator | None = field(default=None, repr=False, compare=False)
    _stage: tuple[str, ...] = field(default=(), repr=False, compare=False)
    _reads: int = field(default=0, repr=False, compare=False)  # at the same time, in this batch
    # Of the dataset's own, by name; None before they were looked for.
    _generators: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def rng(self) -> np.random.Generator:
        """Generator of the batch being made, which belongs to its place in the run.

        It derives from seed, epoch, ordinal of the batch and rank: the same whichever worker makes
        the batch. Made when first asked for in a batch; in ``worker_init_fn`` it depends on the
        worker's id instead.
        """
        if self._rng is None:
            if self._ordinal is None:
                self._rng = generator("worker", self.seed, self.rank, max(self.id, 0))
            else:
                place = self.seed, self.epoch, self._ordinal, self.rank
                self._rng = generator("batch", *place, *self._key)
        return self._rng

    @property
    def sample_rng(self) -> np.random.Generator:
        """Generator of the sample being made, which belongs to the sample itself.

        It derives from seed, epoch and the index of the sample: the same whatever the number of
        workers and ranks, the batch size, the order, and the batch that the sample is in. It is
        there in the dataset's ``__getitem__`` and in ``transform``, made when first asked for.

        Raises:
            RuntimeError: no single sample is being made: in ``collate_fn``, in ``__getitems__``, in
                a dataset that is given a whole list of indices, or in a stream.
            TypeError: the index is not made of numbers and strings.
        """
        if self._sample is NO_SAMPLE or type(self._sample) is list:
            raise RuntimeError(
                "sample_rng is for code that makes one sample of an index: the dataset's "
                "__getitem__ (with batch_size or collate_fn) and transform; elsewhere draw from "
                "rng, which belongs to the batch"
            )
        if self._sample_rng is None:
            key = sample_key(self._sample)
            self._sample_rng = generator("sample", self.seed, self.epoch, key, *self._stage)
        return self._sample_rng

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | UNSENT  # a batch may hold the info

    _seeds_globals = False  # whether the global generators are seeded where this holds

    def _begin(self, epoch: int, ordinal: int, key: tuple[int, ...] = ()) -> None:
        self.epoch, self._ordinal, self._rng, self._key = epoch, ordinal, None, key
        self._reads = 0
        self._turn_to(NO_SAMPLE)

    def _turn_to(self, index: Any, stage: tuple[str, ...] = ()) -> None:
        """Note whose turn it is: the sample of this index, in the dataset or in another stage."""
        self._sample, self._sample_rng, self._stage = index, None, stage

    def _of_sample(self, index: Any) -> WorkerInfo:
        """Return what holds for one sample of the batch, which may be made beside others."""
        key = (*self._key, self._reads)
        self._reads += 1
        if self._sample is not NO_SAMPLE:
            index = self._sample  # of a wrapper around what reads
        return replace(self, _rng=None, _key=key, _sample=index, _sample_rng=None)


current_info: ContextVar[WorkerInfo | None] = ContextVar("minloader worker", default=None)
"""The WorkerInfo of the batch that this thread, or this coroutine, is making."""
