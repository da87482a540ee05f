"""A worker: what makes batches, in a process, in a thread, or in the calling process itself.

    task ──> Worker.run ── for each item: ──────────────────────────────┐
                 |   seed the random generators for this batch          |
                 |   dataset[item], transform, collate_fn               |  the user's code
                 |   pack the batch, large arrays into the task's slot  |
    reply <──────┴── outcomes: a batch or a failure for each item <─────┘

In what the kinds of process differ, each has an :class:`Environment` for. Streams are read by
``stream_worker.py``.

Where batches leave the process, whatever goes wrong is packed too, and nothing may escape from
:meth:`Worker.run`. In the calling process Ctrl-C is Ctrl-C.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from minloader._errors import BatchError, TransportError
from minloader._memory.batch_packer import size_in_band
from minloader._memory.pickling import PackedBatch, pack
from minloader._memory.reducers import arrived
from minloader._memory.slot_writer import NoSlot
from minloader._protocols import reader_of, reads_at_once, snapshot
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.environment import Environment
from minloader._worker.import_hook import when_imported
from minloader._worker.messages import (
    CHUNK_SECONDS,
    Failure,
    Figures,
    Job,
    Reply,
    ShardReply,
    SlotUse,
    TaskMessage,
    Timings,
    WorkerInfo,
    begin_batch,
    current_batch,
    current_info,
    pass_by,
)
from minloader._worker.seeds import BatchKey

if TYPE_CHECKING:
    from minloader._worker.early_reads import EarlyReads
    from minloader._worker.own_generators import SeededGenerators


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """What a worker has made of a task so far.

    Attributes:
        task: which.
        maker: makes its batches, and has what is counted of that.
        writer: takes their large buffers.
        began: when it began, by ``time.perf_counter``.
        done_at: when it was done with the last batch.
        outcomes: a batch or a failure for each item.
        overflowed: how many batches found no room in shared memory.
        packing: seconds that these took to be packed.
    """

    task: TaskMessage
    maker: BatchMaker
    writer: NoSlot
    began: float
    done_at: float
    outcomes: list[Any] = field(default_factory=list)
    overflowed: int = 0
    packing: float = 0.0

    def add(self, outcome: Any) -> None:
        """Add what has become of an item."""
        self.outcomes.append(outcome)
        self.overflowed += self.writer.overflowed
        self.done_at = time.perf_counter()


class Worker:
    """Makes batches, one at a time: what all kinds of it have.

    Args:
        job: what to make them from.
        info: what the user's code is told about where it runs.
        environment: where that is, and how batches leave it.

    Attributes:
        info: that, and while a stream is read, that of its shard.
        id: number of the worker in its replies.
        early_reads: what is read before it is made; None: nothing is.
    """

    early_reads: EarlyReads | None = None

    def __init__(self, job: Job, info: WorkerInfo, environment: Environment) -> None:
        info.dataset = job.dataset
        info.rank = job.options.rank
        for (name, _), action in snapshot(arrived.items()):
            when_imported(name, action)  # before any code of the user's runs
        self.info = info
        self.id = info.id
        self.job = job
        self.environment = environment
        self._own_generators: SeededGenerators | None = None
        if job.options.seed_generators:
            from minloader._worker.own_generators import SeededGenerators  # of few

            self._own_generators = SeededGenerators(job, environment)
        self._turn_to = current_batch(info).turn_to
        self._read = reader_of(job.dataset)

    def close(self) -> None:
        """Let go of what is being read."""

    def rewind(self) -> None:
        """Put back what reading has changed, for other workers."""

    def run(self, task: TaskMessage) -> Reply:
        """Make the batches of a task, until they take too long for one task.

        Whatever the user's code raises is in the reply, never raised; but for what ends a
        program (Ctrl-C) in the process that the program is.
        """
        begin_alone = None
        if task.suspects is not None:
            begin_alone = partial(self._begin_alone, task.id, dict(task.suspects))
        cell = self.environment.sample_cell
        maker = BatchMaker(self.job, self._read, self._turn_to, cell, begin_alone)
        writer = self.environment.open_slot(task.slot)
        begin = time.perf_counter()
        attempt = Attempt(task, maker, writer, began=begin, done_at=begin)
        try:
            shard = self._make(attempt)
        finally:
            self.environment.close_slot()
        use: SlotUse | None = None
        if writer.size is not None:
            use = SlotUse(size=writer.size, is_retired=writer.retired)
        # The worker is not late while its reply waits for a parent that holds the interpreter.
        self.environment.beat(task.id, maker.item, math.inf)
        return Reply(
            worker=self.id,
            pid=self.info.pid,
            packed=self.environment.packs,
            outcomes=attempt.outcomes,
            failed=[(n, self._packed(index), text) for n, index, text in maker.errors],
            slot=use,
            shard=shard,
            figures=self._figures(attempt),
        )

    def _figures(self, attempt: Attempt) -> Figures:
        """Return what is counted of a task that is done."""
        maker = attempt.maker
        seconds = attempt.done_at - attempt.began
        usage = self.environment.measure(seconds, exactly=self.job.options.memory_limit is not None)
        size = attempt.writer.used
        if self.environment.packs:
            size += sum(map(size_in_band, attempt.outcomes))
        return Figures(
            timings=Timings(
                began=attempt.began,
                seconds=seconds,
                transform=maker.transform_seconds,
                collate=maker.collate_seconds,
                packing=attempt.packing,
            ),
            size=size,
            overflowed=attempt.overflowed,
            skipped=maker.skipped,
            usage=usage,
        )

    def _make(self, attempt: Attempt) -> ShardReply | None:
        """Make the batches of a task; of a shard, return how far that was read."""
        raise NotImplementedError

    def pack(self, made: list[Any], attempt: Attempt) -> Any:
        """Return a batch as it leaves this process, if it does; or the failure of that.

        Args:
            made: the batch, which nobody else here may hold: an array that lies in the slot is
                copied if somebody does, since that may change it.
            attempt: takes its large buffers, and the time.
        """
        batch = made.pop()
        if not self.environment.packs:
            return batch
        self.environment.exit_fork()  # before it writes to the slot, where the worker writes too
        begin = time.perf_counter()
        try:
            packed = self.environment.pack(batch)
        except BaseException as error:
            return _unpackable(batch, error, self.job.options.without_processes)
        finally:
            self.environment.exit_fork()
        del batch  # the writer is to see what the dataset keeps of it
        if isinstance(packed, bytes):
            attempt.writer.end([])
        else:
            packed = PackedBatch(packed.stream, attempt.writer.end(packed.buffers))
        attempt.packing += time.perf_counter() - begin
        return packed

    def _begin_alone(self, task_id: int, suspects: dict[int, BatchError], number: int) -> None:
        """Begin with a sample of a batch that its worker died with.

        Args:
            task_id: of the task, which has no other batch.
            suspects: samples that took a worker along, by their numbers, each with its error.
            number: of the sample.

        Raises:
            BatchError: it is one of these. What comes behind it draws anew: else the next sample
                would draw what has killed this one.
        """
        # The time that a batch may take begins anew.
        self.environment.beat(task_id, 0, time.perf_counter())
        self.environment.sample_cell[0] = number
        current_batch(self.info).reads = number  # as where all are read at the same time
        if number in suspects:
            key = pass_by(self.info, number)
            self.seed(key)
            raise suspects.pop(number)  # once: what is put in its place gets to ``transform``

    def call(self, key: BatchKey, function: Callable[..., Any], *args: Any) -> Any:
        """Call the user's code, seeded, and with an answer to :func:`get_worker_info`.

        No context managers: contextlib sets attributes of an exception that passes, which a
        frozen dataclass refuses with an error of its own.
        """
        before = current_info.get()  # of a batch that reads a loader of its own
        restore = self.environment.save_globals()
        if self._own_generators is not None:
            restore = self._own_generators.save(self.info, key, restore)

        def undo() -> None:
            current_info.set(before)
            restore()

        try:
            try:
                current_info.set(self.info)
                self.seed(key)
                return function(*args)
            finally:
                undo()
        except BaseException:
            undo()  # Ctrl-C may have come while that was done
            raise

    def seed(self, key: BatchKey) -> None:
        """Seed what the user's code draws from."""
        self.environment.enter(self.info, key)
        if self._own_generators is not None:
            self._own_generators.seed(key)

    def failure(
        self,
        error: BaseException,
        when: str,
        sample: tuple[Any, ...] = (),
        *,
        fatal: bool = False,
    ) -> Failure:
        """Return the failure that stands for an error; raise what is not for a reply.

        Args:
            error: what was raised.
            when: what was done, or "" for making a batch.
            sample: the index of the sample that it is of; () if that is not known.
            fatal: whether it will be the same for every other batch.
        """
        if self.environment.ends_program(error):
            try:  # Ctrl-C. In a process of ours the executor would try to pickle it.
                raise error
            finally:
                del error  # its traceback holds this frame
        self.environment.exit_fork()
        failure = Failure.of(error, packed=self.environment.packs, when=when, fatal=fatal)
        return failure._replace(sample=self._packed(sample))

    def _packed(self, sample: tuple[Any, ...]) -> Any:
        """Return the index of a sample that failed, fit to travel; () if it is not known."""
        if not sample or not self.environment.packs:
            return sample
        try:
            return pack(sample, down=False)
        except Exception:  # the error matters more
            return ()


class ItemWorker(Worker):
    """Makes batches of the items of a sampler."""

    def __init__(self, job: Job, info: WorkerInfo, environment: Environment) -> None:
        super().__init__(job, info, environment)
        self._init_failure: Failure | None = None
        if job.worker_init_fn is not None:
            try:
                self.call((info.seed, -1, info.id, info.rank), job.worker_init_fn, info)
            except BaseException as error:  # for the first task: raised here, it breaks the pool
                self._init_failure = self.failure(error, "in worker_init_fn", fatal=True)
        if reads_at_once(job.dataset) and self._init_failure is None:
            from minloader._worker.early_reads import EarlyReads  # of few

            self.early_reads = EarlyReads(job, info, environment)

    def _make(self, attempt: Attempt) -> None:
        task = attempt.task
        if self._init_failure is not None:
            attempt.outcomes = [self._init_failure] * len(task.items)
        elif self.early_reads is None or task.suspects is not None:
            self._make_batches(attempt, [])
        else:
            self.environment.beat(task.id, 0, attempt.began)  # a read may end this process at once
            reads = self.early_reads.take(task)
            try:
                self._make_batches(attempt, reads)
            finally:
                self.early_reads.end(reads)

    def _make_batches(self, attempt: Attempt, early_reads: list[Any]) -> None:
        """Make the batches of a task, of its items.

        Args:
            attempt: where they go.
            early_reads: for each item what is read ahead, or the error of that; [] if nothing is.
        """
        task = attempt.task
        maker = attempt.maker
        for n, item in enumerate(task.items):
            maker.item = n
            self.environment.beat(task.id, n, attempt.done_at)
            attempt.writer.begin()
            try:
                key = begin_batch(self.info, task.epoch, task.ordinal + n)
                if type(item) is bytes:
                    item = self.environment.unpack_item(item)
                if early_reads:
                    reads = early_reads[n]
                    if isinstance(reads, BaseException):
                        raise reads
                    maker.early_reads = reads
                made = [self.call(key, maker.fetch, item)]
            except BaseException as error:
                attempt.add(self.failure(error, "", maker.failing))
                maker.failing = ()
            else:
                attempt.add(self.pack(made, attempt))
            if attempt.done_at - attempt.began > 2 * CHUNK_SECONDS and not early_reads:
                break


def _unpackable(batch: Any, error: BaseException, otherwise: str) -> Failure:
    try:
        if isinstance(error, MemoryError):
            raise error  # no part of the batch is at fault
        from minloader._memory.unpicklable import find_unpicklable  # only to tell of an error

        path, part, cause = find_unpicklable(batch, "batch") or ("batch", batch, error)
        error = TransportError(
            f"a batch of type {type(batch).__qualname__} cannot be sent to the parent: "
            f"{path} is a {type(part).__qualname__} ({cause}); return arrays, numbers, "
            f"strings or containers of them, or {otherwise}"
        )
    except BaseException as other:  # sys.exit() in __reduce__
        error = other
    return Failure.of(error, packed=True)
