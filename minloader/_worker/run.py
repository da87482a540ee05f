"""A worker: what makes batches, in a process, in a thread, or in the calling process itself.

    task ──> Worker.run ── for each item: ──────────────────────────────┐
                 |   seed the random generators for this batch          |
                 |   dataset[item], transform, collate_fn               |  the user's code
                 |   pack the batch, large arrays into the task's slot  |
    reply <──────┴── outcomes: a batch or a failure for each item <─────┘

In what the kinds of worker differ, each has an :class:`Environment` for.

Where batches leave the process, whatever goes wrong is packed too, and nothing may escape from
:meth:`Worker.run`. In the calling process Ctrl-C is Ctrl-C.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minloader._errors import BatchError, TransportError
from minloader._formats import WHOLE_ITEM
from minloader._memory.pickling import PackedBatch, pack, size_in_band, unpack
from minloader._memory.reducers import arrived
from minloader._memory.slot_writer import NoSlot
from minloader._protocols import reads_at_once, snapshot
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.environment import Environment
from minloader._worker.import_hook import when_imported
from minloader._worker.messages import (
    DRAWN,
    NOTHING_READ,
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
    ordinal_in_epoch,
    pass_by,
)
from minloader._worker.seeds import BatchKey
from minloader._worker.stream_reader import END, NOT_LEADING, ShardReader, ShardReaders

if TYPE_CHECKING:
    from minloader._worker.own_generators import SeededGenerators

logger = logging.getLogger("minloader")

CHUNK_SECONDS = 8e-3
"""Longest that a chunk of quick batches should take. An executor needs 0.4 to 0.8 ms for a task,
which a chunk shares; and a batch waits so long for others in its chunk, twice that at most."""


READING = "when the stream was read"
"""``Failure.when`` of one after which a stream may have ended: a generator cannot go on."""

READING_ON = (
    "when the stream was read on from a state of its own: unless it fails there anyway, that "
    f"state does not lead there ({NOT_LEADING})"
)
"""The same, where nothing was read yet since the state was put back."""


@dataclass(slots=True, eq=False)
class _Work:
    """What a worker has made of a task so far.

    Attributes:
        task: which.
        writer: takes large buffers of its batches.
        began: when it began, by ``time.perf_counter``.
        done_at: when it was done with the last batch.
        item: index of the item that it has come to.
        outcomes: a batch or a failure for each item before that.
        failed: samples that failed, as in :class:`Reply`.
        fingerprints: of a stream, of the batches.
        overflowed: how many batches found no room in shared memory.
        packing: seconds that these took to be packed.
        reread: batches of a stream that were passed over.
        reading: whether the stream's own code runs, or has just failed.
    """

    task: TaskMessage
    writer: NoSlot
    began: float
    done_at: float
    item: int = 0
    outcomes: list[Any] = field(default_factory=list)
    failed: list[tuple[int, Any, str]] = field(default_factory=list)
    fingerprints: list[int | None] = field(default_factory=list)
    overflowed: int = 0
    packing: float = 0.0
    reread: int = 0
    reading: bool = False


class Worker:
    """Makes batches, one at a time.

    Args:
        job: what to make them from.
        info: what the user's code is told about where it runs.
        environment: where that is, and how batches leave it.

    Attributes:
        id: number of the worker in its replies.
        reads_ahead: whether the samples of a task can be read before it is made, by
            :meth:`begin_reading`.
        readers: those of the shards of a stream.
    """

    def __init__(self, job: Job, info: WorkerInfo, environment: Environment) -> None:
        info.dataset = job.dataset
        info.rank = job.options.rank
        for (name, _), action in snapshot(arrived.items()):
            when_imported(name, action)  # before any code of the user's runs
        self.info = info  # while a stream is read, that of its shard
        self.id = info.id
        self._job = job
        self._environment = environment
        self._own_generators: SeededGenerators | None = None
        if job.options.seed_generators:
            from minloader._worker.own_generators import SeededGenerators  # of few

            self._own_generators = SeededGenerators(job, environment)
        self._maker = BatchMaker(job, current_batch(info).turn_to, environment.sample_cell)
        # By task: for each item the futures of its samples, or an error.
        self._early_reads: dict[int, list[Any]] = {}
        self.reads_ahead = reads_at_once(job.dataset) > 0 and not job.options.is_stream
        self.readers = ShardReaders(job=job, info=info, environment=environment)
        self._init_failure: Failure | None = None
        if job.worker_init_fn is not None and not job.options.is_stream:
            try:
                self._call((info.seed, -1, info.id, info.rank), job.worker_init_fn, info)
            except BaseException as error:  # for the first task: raised here, it breaks the pool
                self._init_failure = self._failure(error, "in worker_init_fn", fatal=True)

    def begin_reading(self, task: TaskMessage) -> None:
        """Begin to read the samples of a task, before or when it is made."""
        early_reads: list[Any] = []
        for n, item in enumerate(task.items if self._init_failure is None else ()):
            info = replace(self.info)
            begin_batch(info, task.epoch, task.ordinal + n)
            try:
                item = self._environment.unpack_item(item)
                early_reads.append(self._maker.begin_reading(item, info))
            except BaseException as error:
                if self._environment.ends_program(error):
                    raise
                early_reads.append(error)  # comes when the batch is made
        self._early_reads[task.id] = early_reads

    def run(self, task: TaskMessage) -> Reply:
        """Make the batches of a task, until they take too long for one task.

        Whatever the user's code raises is in the reply, never raised; but for what ends a
        program (Ctrl-C) in the process that the program is.
        """
        if self._init_failure is not None:
            return Reply(
                worker=self.id,
                pid=self.info.pid,
                packed=self._environment.packs,
                outcomes=[self._init_failure] * len(task.items),
            )
        writer = self._environment.open_slot(task.slot)
        begin = time.perf_counter()
        work = _Work(task=task, writer=writer, began=begin, done_at=begin)
        self._maker.begin_task()
        if self.reads_ahead and task.suspects is None and task.id not in self._early_reads:
            self._environment.beat(task.id, 0, begin)  # a read may end this process at once
            self.begin_reading(task)
        early_reads = self._early_reads.pop(task.id, [])
        shard: ShardReply | None = None
        try:
            if task.shard is None:
                self._make_batches(work, early_reads)
            else:
                shard = self._read_batches(work)
        finally:
            _cancel(early_reads)  # after Ctrl-C
            self._environment.close_slot()
        use: SlotUse | None = None
        if writer.size is not None:
            use = SlotUse(size=writer.size, is_retired=writer.retired)
        # The worker is not late while its reply waits for a parent that holds the interpreter.
        self._environment.beat(task.id, work.item, math.inf)
        return Reply(
            worker=self.id,
            pid=self.info.pid,
            packed=self._environment.packs,
            outcomes=work.outcomes,
            failed=work.failed,
            slot=use,
            shard=shard,
            figures=self._figures(work),
        )

    def _figures(self, work: _Work) -> Figures:
        """Return what is counted of a task that is done."""
        counts = self._maker.counts
        seconds = work.done_at - work.began
        usage = self._environment.measure(
            seconds, exactly=self._job.options.memory_limit is not None
        )
        size = work.writer.used
        if self._environment.packs:
            size += sum(map(size_in_band, work.outcomes))
        return Figures(
            timings=Timings(
                began=work.began,
                seconds=seconds,
                transform=counts.transform_seconds,
                collate=counts.collate_seconds,
                packing=work.packing,
            ),
            size=size,
            overflowed=work.overflowed,
            skipped=counts.skipped,
            usage=usage,
        )

    def _make_batches(self, work: _Work, early_reads: list[Any]) -> None:
        """Make the batches of a task, of its items.

        Args:
            work: where they go.
            early_reads: for each item what is read ahead, or the error of that; [] if nothing is.
        """
        task = work.task
        maker = self._maker
        for n, item in enumerate(task.items):
            work.item = n
            self._environment.beat(task.id, n, work.done_at)
            if early_reads:
                maker.early_reads = early_reads[n]
            work.writer.begin()
            try:
                self._leave_out_suspects(task, n)
                key = begin_batch(self.info, task.epoch, task.ordinal + n)
                if type(item) is bytes:
                    item = self._environment.unpack_item(item)
                if type(maker.early_reads) is not list:
                    raise maker.early_reads
                made = [self._call(key, maker.fetch, item)]
            except BaseException as error:
                is_whole = type(item) is list and self._job.collate_fn is None
                when = WHOLE_ITEM if is_whole and isinstance(error, TypeError) else ""
                outcome = self._failure(error, when)
            else:
                outcome = self._pack(made, work)
            self._add(outcome, work)
            del outcome
            if work.done_at - work.began > 2 * CHUNK_SECONDS and not early_reads:
                break

    def _add(self, outcome: Any, work: _Work) -> None:
        """Add what has become of an item."""
        work.outcomes.append(outcome)
        work.overflowed += work.writer.overflowed
        errors = self._maker.errors
        if errors:
            work.failed += [(work.item, self._packed(index), text) for index, text in errors]
            errors.clear()
        work.done_at = time.perf_counter()

    def _pack(self, made: list[Any], work: _Work) -> Any:
        """Return a batch as it leaves this process, if it does; or the failure of that.

        Args:
            made: the batch, which nobody else here may hold: an array that lies in the slot is
                copied if somebody does, since that may change it.
            work: takes its large buffers, and the time.
        """
        batch = made.pop()
        if not self._environment.packs:
            return batch
        self._environment.exit_fork()  # before it writes to the slot, where the worker writes too
        begin = time.perf_counter()
        try:
            packed = self._environment.pack(batch)
        except BaseException as error:
            return _unpackable(batch, error, self._job.options.without_processes)
        finally:
            self._environment.exit_fork()
        del batch  # the writer is to see what the dataset keeps of it
        if isinstance(packed, bytes):
            work.writer.end([])
        else:
            packed = PackedBatch(packed.stream, work.writer.end(packed.buffers))
        work.packing += time.perf_counter() - begin
        return packed

    def _leave_out_suspects(self, task: TaskMessage, n: int) -> None:
        """Have the next batch be made without the samples that took a worker along."""
        self._maker.begin_alone = None
        if task.suspects is not None:
            suspects = unpack(task.suspects)
            self._maker.begin_alone = partial(self._begin_alone, task.id, n, suspects)

    def _begin_alone(
        self, task_id: int, n: int, suspects: dict[int, BatchError], number: int
    ) -> None:
        """Begin with a sample of a batch that its worker died with.

        Args:
            task_id: of the task that the batch is of.
            n: its place there.
            suspects: samples that took a worker along, by their numbers, each with its error.
            number: of the sample.

        Raises:
            BatchError: it is one of these. What comes behind it draws anew: else the next sample
                would draw what has killed this one.
        """
        # The time that a batch may take begins anew.
        self._environment.beat(task_id, n, time.perf_counter())
        self._environment.sample_cell[0] = number
        current_batch(self.info).reads = number  # as where all are read at the same time
        if number in suspects:
            key = pass_by(self.info, number)
            self._seed(key)
            raise suspects.pop(number)  # once: what is put in its place gets to ``transform``

    def _call(self, key: BatchKey, function: Callable[..., Any], *args: Any) -> Any:
        """Call the user's code, seeded, and with an answer to :func:`get_worker_info`.

        No context managers: contextlib sets attributes of an exception that passes, which a
        frozen dataclass refuses with an error of its own.
        """
        before = current_info.get()  # of a batch that reads a loader of its own
        restore = self._environment.save_globals()
        if self._own_generators is not None:
            restore = self._own_generators.save(self.info, key, restore)
        try:
            try:
                current_info.set(self.info)
                self._seed(key)
                return function(*args)
            finally:
                current_info.set(before)
                restore()
        except BaseException:  # Ctrl-C may have come while that was done
            current_info.set(before)
            restore()
            raise

    def _seed(self, key: BatchKey) -> None:
        """Seed what the user's code draws from."""
        self._environment.enter(self.info, key)
        if self._own_generators is not None:
            self._own_generators.seed(key)

    def _failure(self, error: BaseException, when: str, *, fatal: bool = False) -> Failure:
        """Return the failure that stands for an error; raise what is not for a reply."""
        if self._environment.ends_program(error):
            try:  # Ctrl-C. In a process of ours the executor would try to pickle it.
                raise error
            finally:
                del error  # its traceback holds this frame
        self._environment.exit_fork()
        sample = self._packed(self._maker.failing)
        self._maker.failing = ()
        failure = Failure.of(error, packed=self._environment.packs, when=when, fatal=fatal)
        return failure._replace(sample=sample)

    def _packed(self, sample: tuple[Any, ...]) -> Any:
        """Return the index of a sample that failed, fit to travel; () if it is not known."""
        if not sample or not self._environment.packs:
            return sample
        try:
            return pack(sample, down=False)
        except Exception:  # the error matters more
            return ()

    # --- streams

    def _prepare(self, info: WorkerInfo) -> None:
        """Call ``worker_init_fn`` for a copy of the stream, which a shard is read in."""
        self.info = info
        if self._job.worker_init_fn is not None:
            key = info.seed, -1 - info.epoch, info.id, info.rank
            self._call(key, self._job.worker_init_fn, info)

    def _read_batches(self, work: _Work) -> ShardReply:
        """Read the batches of a task of a shard, to its end; see :meth:`_make_batches`."""
        task = work.task
        assert task.shard is not None
        # What makes the stream ready may end this process, too.
        self._environment.beat(task.id, -1 if task.shard.first else 0, work.began)
        try:
            reader = self.readers.find(task.shard, task.epoch, self._prepare)
        except BaseException as error:
            when = "when the stream was made ready, by worker_init_fn if there is one"
            work.outcomes.append(self._failure(error, when, fatal=True))
            return NOTHING_READ
        for n in range(len(task.items)):
            work.item = n
            self._environment.beat(task.id, n, work.done_at)
            work.writer.begin()
            try:
                self._leave_out_suspects(task, n)
                made = [self._read(work, reader)]
            except BaseException as error:
                # Whoever leaves out what fails must not leave out that a stream is another one.
                when = ""
                if work.reading:
                    when = READING_ON if reader.was_just_put_back else READING
                outcome = self._failure(error, when, fatal=reader.is_other)
            else:
                if made[0] is END:
                    break
                outcome = self._pack(made, work)
            self._add(outcome, work)
            del outcome
            work.fingerprints.append(reader.last_fingerprint)
        state = self._end_stream_task(reader, work.outcomes)
        return ShardReply(
            ended=reader.is_ended, state=state, fingerprints=work.fingerprints, reread=work.reread
        )

    def _read(self, work: _Work, reader: ShardReader) -> Any:
        """Return a batch of a shard, past batches that are not wanted again; or END."""
        work.reading = True
        self.info = reader.info
        batch = current_batch(self.info)
        batch.is_of_stream = True
        batch.seeds_globals = self._environment.seeds_globals
        if reader.iterator is None and not reader.is_ended:
            self._call(reader.begin(), reader.prepare)
            if reader.next:  # what it draws must not change what the batch does
                self._call(reader.begin(), reader.open)
        if not work.item:
            self._pass_over(work, reader)
        return self._call(reader.begin(), self._fetch, work, reader)

    def _fetch(self, work: _Work, reader: ShardReader) -> Any:
        """Return the next batch of a shard, or END."""
        info = reader.info
        ordinal = ordinal_in_epoch(reader.next, shard=info.id, total=info.num_workers)
        samples = reader.draw()
        work.reading = False
        if samples is END:
            return END
        begin_batch(info, reader.epoch, ordinal, key=DRAWN)
        return self._maker.combine(samples)

    def _pass_over(self, work: _Work, reader: ShardReader) -> None:
        """Read what was delivered before, without making batches of it."""
        task = work.task
        if reader.next >= reader.first or reader.is_ended:
            return
        while reader.next < reader.first and not reader.is_ended:
            index = reader.next
            # The time that each may take begins. Who finds this worker dead knows what it did.
            self._environment.beat(task.id, -1, time.perf_counter())
            work.reread += 1
            try:
                self._call(reader.begin(), reader.draw)
            except BaseException as error:
                if reader.is_other or self._environment.ends_program(error):
                    raise
                check = reader.check
                was_read = check is not None and check.ordinal == index and check.digest is not None
                if not reader.is_ended or (reader.next >= reader.first and not was_read):
                    continue  # as it did before
                raise reader.misfit(f"failed in batch {index}") from error
        self._environment.beat(task.id, 0, time.perf_counter())

    def _end_stream_task(self, reader: ShardReader, outcomes: list[Any]) -> bytes | None:
        """Return the state of the stream behind the outcomes."""
        try:
            if reader.parts and reader.iterator is not None:
                # Seeded for the next batch: a generator in the state is as that will find it.
                state: bytes | None = self._call(reader.begin(), reader.state)
                return state
        except BaseException as error:
            failure = self._failure(error, "when the stream was asked for its state")
            if outcomes and type(outcomes[-1]) is not Failure and not reader.is_ended:
                outcomes[-1] = failure
            else:  # all batches are here, or there is an error in the place of the last
                where = "at its end" if reader.is_ended else "behind an error"
                logger.warning("the state of a stream %s is not known: %s", where, failure.summary)
        return None


def _cancel(early_reads: list[Any]) -> None:
    """Cancel what is read ahead of each item, unless that is an error."""
    for lists in early_reads:
        for futures in lists if type(lists) is list else ():
            for future in futures:
                future.cancel()


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
