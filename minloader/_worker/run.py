"""A worker: what makes batches, in a process, in a thread, or in the calling process itself.

    task ──> Worker.run ── for each item: ──────────────────────────────┐
                 |   seed the random generators for this batch          |
                 |   dataset[item], transform, collate_fn               |  the user's code
                 |   pack the batch, large arrays into the task's slot  |
    reply <──────┴── outcomes: a batch or a failure for each item <─────┘

The kinds of worker differ in two things that they are given:

    made by            packer                     seed
    start.py           BatchPacker()              seed_globals     a process of ours
    InlinePool         None                       seed_globals     the calling process
    ThreadPool         None                       None             its threads
    ForeignPool        BatchPacker(OutOfBand())   seed_globals     a process of an executor
                       None                       None             ... in the calling process

In the calling process the generators are the user's, and borrowed.

A packer means that batches leave the process. Then whatever goes wrong is packed too, and nothing
may escape from :meth:`Worker.run`. Without one Ctrl-C is Ctrl-C.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minloader._checks import WHOLE_ITEM
from minloader._errors import TransportError
from minloader._memory.culprit import find_culprit
from minloader._memory.limits import private_memory
from minloader._memory.pickling import BatchPacker, PackedBatch, pack, size_in_band, unpack
from minloader._memory.slot_writer import NO_SLOT, NoSlot
from minloader._worker import lifetimes
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.generators import OwnGenerators
from minloader._worker.heartbeat import Beat
from minloader._worker.messages import (
    Failure,
    Job,
    Reply,
    Task,
    WorkerInfo,
    current_info,
)
from minloader._worker.processor_time import Meter
from minloader._worker.seeds import Borrow, Place, Seed
from minloader._worker.stream_reader import END, ShardReader, ShardReaders

logger = logging.getLogger("minloader")

CHUNK_SECONDS = 8e-3
"""Longest that a chunk of quick batches should take. An executor needs 0.4 to 0.8 ms for a task,
which a chunk shares; and a batch waits so long for others in its chunk, twice that at most."""


READING = "when the stream was read"
"""Stage of a failure after which a stream may have ended: a generator cannot go on."""


class Worker:
    """Makes batches, one at a time.

    Args:
        job: what to make them from.
        info: what the user's code is told about where it runs.
        packer: packs batches for the parent; None if this is the process that wants them.
        seed: seeds the global random generators for a batch. None if they are to be left alone:
            threads share them, and the dataset too.
        borrow: notes how they are before, where they are the user's.
        beat: called before each item is begun.
        place: its one element is set to the place of each sample in its item.
        reload: gives the dataset once more, for a stream that is read in several places.
        tell: called with what the user's code is to be told, before each call of it.

    Attributes:
        id: number of the worker in its replies.
        meter: tells how the time of a task was spent; None if this process has other work too.
        memory_at_start: bytes that the process had for itself before its first batch, if there is
            a meter.
    """

    def __init__(
        self,
        job: Job,
        info: WorkerInfo,
        *,
        packer: BatchPacker | None = None,
        seed: Seed | None = None,
        borrow: Borrow | None = None,
        beat: Beat = lambda task, index, now: None,
        place: Any = None,
        reload: Callable[[], Any] | None = None,
        tell: Callable[[WorkerInfo], None] | None = None,
    ) -> None:
        info.dataset, info.rank = job.dataset, job.rank
        self._tell = tell
        self.info = info  # while a stream is read, that of its shard
        self.id = info.id
        self._process = lifetimes.process
        self._job = job
        self._packer = packer
        self._seed, self._borrow = seed, borrow
        if job.seed_generators and seed is None:
            raise ValueError(
                "seed_generators=True cannot be where threads make the batches, since they share "
                "the generators; draw from get_worker_info().rng, or use executor='process'"
            )
        self._own = OwnGenerators(job, borrows=borrow is not None)
        self.meter: Meter | None = None
        self.memory_at_start = 0
        self._beat = beat
        self._maker = BatchMaker(job, info._turn_to, place if place is not None else [-1])
        self._reread = 0  # batches of a stream, since the last reply
        self._made = 0.0  # when the last batch was ready to be packed
        self._begun: dict[int, list[Any]] = {}  # by task: what is read ahead of each item
        self.reads_ahead = hasattr(type(job.dataset), "__getfutures__") and not job.is_stream
        self._readers = ShardReaders(self._maker, info.seed, reload, info.num_workers == 0)
        self._init_failure: Failure | None = None
        if job.worker_init_fn is not None and not job.is_stream:
            try:
                self._call((info.seed, -1, info.id, info.rank), job.worker_init_fn, info)
            except BaseException as error:  # for the first task: raised here, it breaks the pool
                self._init_failure = self._failure(error, "in worker_init_fn", fatal=True)

    def begin(self, task: Task) -> list[Any]:
        """Begin to read the samples of a task; return their futures, or an error, of each item."""
        begun: list[Any] = []
        for n, item in enumerate(task.items if self._init_failure is None else ()):
            info = replace(self.info)
            info._begin(task.epoch, task.ordinal + n)
            try:
                begun.append(self._maker.begin(_unpacked(task, item), info))
            except BaseException as error:
                if self._borrow is not None and not isinstance(error, Exception | SystemExit):
                    raise  # Ctrl-C
                begun.append(error)  # comes when the batch is made
        self._begun[task.id] = begun
        return begun

    def run(self, task: Task) -> Reply:
        """Make the batches of a task, until they take too long for one task.

        Whatever the user's code raises is in the reply, never raised; but for what ends a
        program (Ctrl-C) in the process that the program is.
        """
        pid, packed = self.info.pid, self._packer is not None
        if self._init_failure is not None:
            return Reply(self.id, pid, packed, [self._init_failure] * len(task.items))
        writer = NO_SLOT if self._packer is None else self._packer.open(task.slot)
        outcomes: list[Any] = []
        overflowed = 0
        state = reader = None
        maker = self._maker
        maker.transform_seconds = maker.collate_seconds = packing = 0.0
        maker.skipped, maker.begun = 0, []
        lasts: list[int | None] = []
        failed: list[tuple[int, Any, str]] = []
        begin = now = time.perf_counter()
        begun = self._begun.pop(task.id, None)
        if begun is None and self.reads_ahead:
            begun = self.begin(task)
            del self._begun[task.id]
        try:
            if task.shard is not None:
                reader = self._find_reader(task, outcomes)
                if reader is None:
                    return Reply(self.id, pid, packed, outcomes, ended=True)
            for n, item in enumerate(task.items):
                self._beat(task.id, n, now)
                if begun:
                    maker.begun = begun[n]
                outcome = self._make(task, n, item, writer, reader)
                if outcome is END:
                    break
                outcomes.append(outcome)
                del outcome
                if reader is not None:
                    lasts.append(reader.last)
                overflowed += writer.overflowed
                if maker.errors:
                    failed += [(n, self._packed(index), text) for index, text in maker.errors]
                    maker.errors.clear()
                last, now = now, time.perf_counter()
                if self._made > last:
                    packing += now - self._made
                if now - begin > 2 * CHUNK_SECONDS and not begun and reader is None:
                    break
            if reader is not None:
                state = self._end_stream_task(reader, outcomes)
        finally:
            for futures in itertools.chain(*(each for each in begun or () if type(each) is list)):
                for future in futures:  # after Ctrl-C
                    future.cancel()
            if self._packer is not None:
                self._packer.close()
        # The worker is not late while its reply waits for a parent that holds the interpreter.
        self._beat(task.id, n, math.inf)
        size, memory = writer.used, 0
        if packed:
            size += sum(map(size_in_band, outcomes))
        processor = None if self.meter is None else self.meter.add(now - begin)
        if processor is not None or self._job.memory_limit is not None:
            memory = private_memory()
        reread, self._reread = self._reread, 0
        drawn = self._own.drawn
        self._own.drawn = ()
        return Reply(
            worker=self.id,
            pid=pid,
            packed=packed,
            outcomes=outcomes,
            ended=reader is not None and reader.ended,
            began=begin,
            seconds=now - begin,
            timings=(maker.transform_seconds, maker.collate_seconds, packing),
            size=size,
            slot_size=writer.size,
            slot_retired=writer.retired,
            overflowed=overflowed,
            memory=memory,
            memory_at_start=self.memory_at_start,
            state=state,
            processor=processor,
            reread=reread,
            skipped=maker.skipped,
            lasts=lasts,
            failed=failed,
            drawn=drawn,
        )

    def _make(
        self, task: Task, n: int, item: Any, writer: NoSlot, reader: ShardReader | None
    ) -> Any:
        """Make one batch; return it, packed if it leaves the process, or its failure."""
        writer.begin()
        try:
            if reader is not None:
                batch = self._read(task, n, reader)
            else:
                self.info._begin(task.epoch, task.ordinal + n)
                if type(item) is bytes:
                    item = _unpacked(task, item)
                if type(self._maker.begun) is not list:
                    raise self._maker.begun
                place = self.info.seed, task.epoch, task.ordinal + n, self.info.rank
                batch = self._call(place, self._maker.fetch, item)
        except BaseException as error:
            stage = READING if reader is not None and reader.reading else ""
            whole = type(item) is list and reader is None and self._job.collate_fn is None
            if whole and isinstance(error, TypeError):
                stage = WHOLE_ITEM
            # Whoever leaves out what fails must not leave out that a stream is another one.
            return self._failure(error, stage, fatal=reader is not None and reader.is_other)
        if self._packer is None or batch is END:
            return batch
        self._exit_fork()  # before it writes to the slot, where the worker writes too
        self._made = time.perf_counter()
        try:
            packed = self._packer.pack(batch)
        except BaseException as error:
            return _unpackable(batch, error, self._job.without_processes)
        finally:
            self._exit_fork()
        del batch  # the writer is to see what the dataset keeps of it
        if isinstance(packed, bytes):
            writer.end([])
            return packed
        return PackedBatch(packed.stream, writer.end(packed.buffers))

    def _call(self, place: Place, function: Callable[..., Any], *args: Any) -> Any:
        """Call the user's code, seeded, and with an answer to :func:`get_worker_info`.

        No context managers: contextlib sets attributes of an exception that passes, which a
        frozen dataclass refuses with an error of its own.
        """
        before = current_info.get()  # of a batch that reads a loader of its own
        own = None if self.info._generators == {} else self._own.turn(self.info, place)
        give_back = None if self._borrow is None else self._borrow()
        try:
            try:
                current_info.set(self.info)
                if self._tell is not None:
                    self._tell(self.info)
                if self._seed is not None:
                    self._seed(place)
                if own is not None:
                    own.begin()
                return function(*args)
            finally:
                if own is not None:
                    own.end()
                current_info.set(before)
                if give_back is not None:
                    give_back()
        except BaseException:  # Ctrl-C may have come while that was done
            if own is not None:
                own.end()
            current_info.set(before)
            if give_back is not None:
                give_back()
            raise

    def _failure(self, error: BaseException, stage: str, *, fatal: bool = False) -> Failure:
        """Return the failure that stands for an error; raise what is not for a reply."""
        if self._borrow is not None and not isinstance(error, Exception | SystemExit):
            try:  # Ctrl-C. In a process of ours the executor would try to pickle it.
                raise error
            finally:
                del error  # its traceback holds this frame
        self._exit_fork()
        sample, self._maker.failing = self._packed(self._maker.failing), ()
        failure = Failure.of(error, packed=self._packer is not None, stage=stage, fatal=fatal)
        return failure._replace(sample=sample)

    def _packed(self, sample: tuple[Any, ...]) -> Any:
        """Return the index of a sample that failed, fit to travel; () if it is not known."""
        if not sample or self._packer is None:
            return sample
        try:
            return pack(sample, down=False)
        except Exception:  # the error matters more
            return ()

    def _exit_fork(self) -> None:
        """End a fork of the worker that came back from the dataset, before it answers too."""
        if lifetimes.process is not self._process and self._packer is not None:
            os._exit(1)

    # --- streams

    def rewind(self) -> None:
        """Put a stream back to where it was before it was read, for other workers."""
        self._readers.rewind()

    def _prepare(self, info: WorkerInfo) -> None:
        """Call ``worker_init_fn`` for a copy of the stream, which a shard is read in."""
        self.info = info
        if self._job.worker_init_fn is not None:
            place = info.seed, -1 - info.epoch, info.id, info.rank
            self._call(place, self._job.worker_init_fn, info)

    def _find_reader(self, task: Task, outcomes: list[Any]) -> ShardReader | None:
        """Return the reader for a task; None if there is none, for the reason that outcomes has."""
        assert task.shard is not None
        try:
            return self._readers.find(task.shard, task.epoch, self.info.pid, self._prepare)
        except BaseException as error:
            stage = "when the stream was made ready, by worker_init_fn if there is one"
            outcomes.append(self._failure(error, stage, fatal=True))
            return None

    def _read(self, task: Task, n: int, reader: ShardReader) -> Any:
        """Return a batch of a shard, past batches that are not wanted again; or END."""
        self.info = reader.info
        self.info._seeds_globals = self._seed is not None
        if not reader.position and reader.iterator is None and not reader.ended:
            # Seeded as at the beginning: `iter` may draw an order.
            self._call(reader.begin(0), reader.restore)
        if task.shard is not None and not n and not reader.ended:
            self._pass_over(task, reader)
        return self._call(reader.begin(), reader.fetch)

    def _pass_over(self, task: Task, reader: ShardReader) -> None:
        """Read what was delivered before, without making batches of it."""
        shard = task.shard
        assert shard is not None
        if reader.position >= shard.first:
            return
        while reader.position < shard.first and not reader.ended:
            index = reader.position
            # The time that each may take begins. Who finds this worker dead knows what it did.
            self._beat(task.id, -1, time.perf_counter())
            self._reread += 1
            try:
                self._call(reader.begin(), reader.draw)
            except Exception as error:
                if not reader.ended or reader.position >= shard.first:
                    continue  # as it did before
                reader.is_other = True
                raise RuntimeError(
                    f"the stream has failed in batch {index} of shard {reader.info.id}, when that "
                    f"was read again, past the {shard.first} batches that it had given"
                ) from error
            reader.check(shard)
        self._beat(task.id, 0, time.perf_counter())

    def _end_stream_task(self, reader: ShardReader, outcomes: list[Any]) -> bytes | None:
        """Return the state of the stream behind the outcomes."""
        try:
            if reader.parts and reader.iterator is not None:
                # Seeded for the next batch: a generator in the state is as that will find it.
                state: bytes = self._call(reader.begin(), reader.state)
                return state
        except BaseException as error:
            failure = self._failure(error, "when the stream was asked for its state")
            if reader.ended or not outcomes:  # all batches are here
                logger.warning("the state of a stream at its end is not known: %s", failure.summary)
            else:
                outcomes[-1] = failure
        return None


def _unpacked(task: Task, item: Any) -> Any:
    return unpack(item) if task.packed and type(item) is bytes else item


def _unpackable(batch: Any, error: BaseException, otherwise: str) -> Failure:
    try:
        if isinstance(error, MemoryError):
            raise error  # no part of the batch is at fault
        path, part, cause = find_culprit(batch, "batch") or ("batch", batch, error)
        error = TransportError(
            f"a batch of type {type(batch).__qualname__} cannot be sent to the parent: "
            f"{path} is a {type(part).__qualname__} ({cause}); return arrays, numbers, "
            f"strings or containers of them, or {otherwise}"
        )
    except BaseException as other:  # sys.exit() in __reduce__
        error = other
    return Failure.of(error, packed=True)
