"""The messages between parent and worker: the job once, then tasks and their replies."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from minloader._errors import SKIP, BatchError, printed, summary
from minloader._memory.files import SlotAddress
from minloader._memory.pickling import pack_error
from minloader._sampling.seeding import generator, sample_key

if TYPE_CHECKING:
    import numpy as np


OnSampleError = Literal["raise", "skip"] | Callable[[BatchError], Any]


def sample_error_handler(on_sample_error: OnSampleError) -> Callable[[BatchError], Any] | None:
    """Return what is called for each sample that fails; None if nothing is."""
    if on_sample_error == "raise":
        return None
    if on_sample_error == "skip":
        return leave_out
    assert callable(on_sample_error)
    return on_sample_error


def leave_out(failure: BatchError) -> Any:
    """Have a sample left out of its batch; the log says so where that is counted."""
    return SKIP


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How batches are made of a job.

    Attributes:
        memory_limit: bytes that a worker process may have for itself.
        batch_size: samples in a batch of a stream; None if its elements are the batches.
        keep_last: whether a stream's incomplete last batch is one.
        on_sample_error: called with the BatchError of a sample that fails; returns what is to be
            in its place, or SKIP. None: the batch fails.
        is_stream: whether the dataset is read by shards, each in a copy of its own.
        rank: that of the sampler: other ranks draw other numbers.
        seed_generators: whether the generators that the job has of its own are seeded, too.
        without_processes: what errors say to do where something cannot be sent to a process.
    """

    memory_limit: int | None = None
    batch_size: int | None = None
    keep_last: bool = True
    on_sample_error: Callable[[BatchError], Any] | None = None
    is_stream: bool = False
    rank: int = 0
    seed_generators: bool = False
    without_processes: str = "use executor='thread'"


@dataclass
class Job:
    """All that a worker needs to make batches. Each worker loads it once.

    Attributes:
        dataset: indexable, or else callable.
        transform: applied to each sample, or to the batch when nothing is collated.
        collate_fn: samples to batch; None if the dataset gives whole batches.
        worker_init_fn: called once in each worker with its :class:`WorkerInfo`.
        options: how batches are made of these.
        beginning: state, packed, that a stream had before any of it was read; None if that is not
            known. Workers that are started later get the stream as it is by then.
    """

    dataset: Any
    transform: Callable[[Any], Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[WorkerInfo], Any] | None = None
    options: JobOptions = field(default_factory=JobOptions)
    beginning: bytes | None = None

    @property
    def is_as_torch(self) -> bool:
        """Whether ``collate_fn`` is of torch's kind: an item is one batch, whatever it is."""
        return getattr(self.collate_fn, "takes_anything", False)

    def is_nested(self, item: Any) -> bool:
        """Return whether an item stands for a list of batches."""
        is_nested = isinstance(item, list) and item and all(isinstance(each, list) for each in item)
        return bool(is_nested) and not self.is_as_torch


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
        pass_number: of the pass over the shard. A worker that reads it goes on where it stands.
        follows: number of the pass that was read to its end before: whoever has done that goes on
            with the same copy of the stream. None: there is none.
        others: numbers of other passes that may be read on, by other iterators of the loader.
    """

    id: int
    total: int
    first: int
    at: int
    state: bytes | None
    check: tuple[int, int | None] | None
    pass_number: int
    follows: int | None
    others: tuple[int, ...] = ()


def ordinal_in_epoch(index: int, *, shard: int, total: int) -> int:
    """Return the place in the epoch of a batch of a shard, as in rounds where none has ended."""
    return index * total + shard


DRAWN: Final = (1,)
"""Key, see :class:`CurrentBatch`, of a batch of a stream whose samples are drawn. What the stream
keeps as its generator must not depend on what is done with them."""

NO_SAMPLE: Final = ...
"""Stands for the index of a sample where none is being made. It survives pickling."""


CHUNK_SECONDS = 8e-3
"""Longest that a chunk of quick batches should take. An executor needs 0.4 to 0.8 ms for a task,
which a chunk shares; and a batch waits so long for others in its chunk, twice that at most."""


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
        suspects: samples that took a worker along, see ``Task``.
    """

    ordinal: int
    epoch: int
    items: list[Any]
    slot: SlotAddress | None = None
    id: int = 0
    shard: Shard | None = None
    alone: bool = False
    suspects: dict[int, BatchError] | None = None


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


class Usage(NamedTuple):
    """What a worker process has used.

    Attributes:
        memory: bytes that it has for itself, measured now and then, and always if there is a
            limit; else 0.
        memory_at_start: bytes that it had before its first batch; 0 if that is not known.
        processor: what :meth:`~minloader._worker.processor_time.CpuMeter.add` returned.
    """

    memory: int = 0
    memory_at_start: int = 0
    processor: tuple[float, float, float] | None = None


class Figures(NamedTuple):
    """What is counted of a task: users and logs are told of it, and how many batches the next has.

    Attributes:
        timings: how long it took.
        size: bytes that its batches have, packed, more or less.
        overflowed: how many of them found no room in shared memory.
        skipped: how many samples were left out.
        usage: of the process.
    """

    timings: Timings = Timings()
    size: int = 0
    overflowed: int = 0
    skipped: int = 0
    usage: Usage = Usage()


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


NOTHING_READ = ShardReply(ended=True, state=None, fingerprints=[], reread=0)
"""Of a shard that cannot be read, and so ends with an error."""


class Reply(NamedTuple):
    """The result of a task.

    Attributes:
        worker: id of the worker; below 0 on an executor that the user brought.
        pid: its process.
        packed: whether batches and errors are packed.
        outcomes: a batch or a failure for each of the first items. A chunk that turns out to be
            slow is cut short.
        failed: samples that failed, and were left out or replaced: of which outcome, the index of
            the sample in a tuple (packed if the reply is; () if it is not known), and the error in
            words.
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


class Unready(Exception):
    """A worker could not begin with a task, which is to be sent again.

    It is returned in place of a reply, not raised: Dask would log it.
    """


class Failure(NamedTuple):
    """An exception on its way to the parent.

    Attributes:
        error: the exception, packed if the reply is; None if it could not be.
        summary: its type and message.
        traceback: as printed in the worker, "" if the exception brings its own.
        when: what was being done, or what it may come from; "" for making the batch.
        fatal: whether it will be the same for every other batch. Skipping them would hide it.
        sample: the index of the sample that failed, in a tuple, packed if the reply is; or empty.
    """

    error: Any
    summary: str
    traceback: str
    when: str = ""
    fatal: bool = False
    sample: Any = ()

    @classmethod
    def of(
        cls, error: BaseException, *, packed: bool, when: str = "", fatal: bool = False
    ) -> Failure:
        """Make the failure of an exception, where it was caught."""
        return cls(
            error=pack_error(error) if packed else error,
            summary=summary(error),
            traceback=printed(error) if packed else "",
            when=when,
            fatal=fatal,
        )


@dataclass(slots=True, eq=False)
class CurrentBatch:
    """What is being made where a :class:`WorkerInfo` holds.

    Attributes:
        ordinal: place of the batch in its epoch; None before the first.
        key: of its generator, beside epoch and ordinal.
        rng: that generator, once somebody has asked for it.
        reads: how many samples are read for it at the same time.
        sample: index of the sample being made; NO_SAMPLE if none is.
        stage: what it is made by, where that is not the dataset.
        sample_rng: the sample's generator, once somebody has asked for it.
        generators: of the dataset's own, by name, if they are seeded; None before they were looked
            for.
        is_of_stream: whether a stream is read.
        seeds_globals: of a stream, whether the global generators are seeded here.
    """

    ordinal: int | None = None
    key: tuple[int, ...] = ()
    rng: np.random.Generator | None = None
    reads: int = 0
    sample: Any = NO_SAMPLE
    stage: tuple[str, ...] = ()
    sample_rng: np.random.Generator | None = None
    generators: dict[str, Any] | None = None
    is_of_stream: bool = False
    seeds_globals: bool = False

    def begin(self, ordinal: int, key: tuple[int, ...]) -> None:
        """Begin with another batch."""
        self.ordinal = ordinal
        self.key = key
        self.rng = None
        self.reads = 0
        self.turn_to(NO_SAMPLE)

    def turn_to(self, index: Any, stage: tuple[str, ...] = ()) -> None:
        """Note whose turn it is: the sample of this index, in the dataset or in another stage."""
        self.sample = index
        self.stage = stage
        self.sample_rng = None


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
    _current: CurrentBatch = field(
        default_factory=CurrentBatch, init=False, repr=False, compare=False
    )

    @property
    def rng(self) -> np.random.Generator:
        """Generator of the batch being made, which belongs to its place in the run.

        It derives from seed, epoch, ordinal of the batch and rank: the same whichever worker makes
        the batch. Made when first asked for in a batch; in ``worker_init_fn`` it depends on the
        worker's id instead.
        """
        batch = self._current
        if batch.rng is None:
            if batch.ordinal is None:
                batch.rng = generator("worker", self.seed, self.rank, max(self.id, 0))
            else:
                key = self.seed, self.epoch, batch.ordinal, self.rank, *batch.key
                batch.rng = generator("batch", *key)
        return batch.rng

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
        batch = self._current
        if batch.sample is NO_SAMPLE or type(batch.sample) is list:
            raise RuntimeError(
                "sample_rng is for code that makes one sample of an index: the dataset's "
                "__getitem__ (with batch_size or collate_fn) and transform; elsewhere draw from "
                "rng, which belongs to the batch"
            )
        if batch.sample_rng is None:
            key = sample_key(batch.sample)
            batch.sample_rng = generator("sample", self.seed, self.epoch, key, *batch.stage)
        return batch.sample_rng

    def __getstate__(self) -> dict[str, Any]:
        # A batch may hold the info: what is large stays here.
        current = replace(self._current, sample=NO_SAMPLE, generators=None)
        return self.__dict__ | {"dataset": None, "_current": current}


def current_batch(info: WorkerInfo) -> CurrentBatch:
    """Return what is being made where an info holds; always the same object."""
    return info._current


def begin_batch(
    info: WorkerInfo, epoch: int, ordinal: int, key: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Have an info hold for another batch; return what its generators are seeded by."""
    info.epoch = epoch
    info._current.begin(ordinal, key)
    return info.seed, epoch, ordinal, info.rank, *key


def pass_by(info: WorkerInfo, number: int) -> tuple[int, ...]:
    """Have other numbers drawn behind a sample of a batch that took its worker along.

    Returns:
        What the generators are seeded by, from there on. It has all that were passed by before,
        since one that is found later may come before these, and all behind it draws anew.
    """
    batch = info._current
    assert batch.ordinal is not None
    batch.key = (*batch.key, -1 - number)  # no other key has numbers below 0
    batch.rng = None
    return info.seed, info.epoch, batch.ordinal, info.rank, *batch.key


current_info: ContextVar[WorkerInfo | None] = ContextVar("minloader worker", default=None)
"""The WorkerInfo of the batch that this thread, or this coroutine, is making."""
