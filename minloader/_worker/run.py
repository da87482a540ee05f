"""All that runs inside a worker, be it a process, a thread or the calling process itself.

A worker process is born through :func:`start`, makes batches through :func:`run` and dies
with its parent (``processes.py``). An executor that the user brought knows none of
this: what its workers do is in ``foreign.py``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from minloader._errors import TransportError
from minloader._memory.culprit import find_culprit
from minloader._memory.limits import private_memory
from minloader._memory.pickling import pack, pack_batch, pack_out_of_band, size_in_band, unpack
from minloader._memory.slot_writer import SlotWriter, use
from minloader._worker.heartbeat import Beat
from minloader._worker.messages import END, Failure, Job, Reply, Shard, Task, Timings, WorkerInfo
from minloader._worker.seeds import batch_seed, borrow_globals, seeds
from minloader._worker.stream_reader import Cursor, Cursors

logger = logging.getLogger("minloader")

CHUNK_SECONDS = 2e-3

"""Longest that a chunk of quick batches should take. An executor needs 0.15 to 0.3 ms for a task,
which a chunk shares; and a batch waits so long for others in its chunk, twice that at most."""


class Worker:
    """Makes batches, one at a time.

    Args:
        job: what to make them from.
        info: where this is.
        remote: whether parent and worker are different processes, so that items and batches
            are packed, and the process's global generators are the worker's to seed.
        borrow: seed the global generators of the caller's process around each batch. Threads
            do neither: the global generators are shared by all of them.
        packed: whether items come packed even so.
        beside: whether large arrays are to be beside the message, where there is no slot.
        mark: told of each item before it is begun.
        reload: gives the dataset once more, for a stream that is read in several places.
    """

    def __init__(
        self,
        job: Job,
        info: WorkerInfo,
        *,
        remote: bool,
        borrow: bool = False,
        packed: bool = False,
        beside: bool = False,
        mark: Beat = lambda task, index, now: None,
        reload: Callable[[], Any] | None = None,
    ) -> None:
        self.info = info  # while a stream is read, its shard's
        self.id = info.id  # as replies have it
        self._job = job
        self._timings = Timings()
        self._made = 0.0  # when the last batch was ready to be packed
        self._fetch = partial(job.fetch, self._timings)
        shared = not remote and not borrow
        self._cursors = Cursors(job, info.seed, reload, shared=shared)
        self._remote = remote
        self._packed = remote or packed
        self._pack = pack_out_of_band if beside else partial(pack, down=False)
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
        pid = self.info.pid
        if self._broken is not None:
            failures = [self._broken] * len(task.items)
            return Reply(self.id, pid, self._remote, failures)
        writer = SlotWriter(task.slot) if task.slot is not None else None
        if writer is not None:
            use(writer)
        outcomes: list[Any] = []
        overflowed = 0
        state = None
        timings = self._timings
        timings.transform = timings.collate = packing = 0.0
        begin = now = time.perf_counter()
        try:
            for n, item in enumerate(task.items):
                self._mark(task.id, n, now)
                outcomes.append(self._make(task, n, item, writer))
                overflowed += writer is not None and writer.overflowed
                last, now = now, time.perf_counter()
                if self._made > last:
                    packing += now - self._made
                if now - begin > 2 * CHUNK_SECONDS or outcomes[-1] is END:
                    break
            if task.shard is not None:
                state = self._end_stream_task(task.shard, outcomes)
        except BaseException:
            # Of a chunk in a thread, the rest is to be tried one by one.
            if len(task.items) == 1:
                raise
            now = time.perf_counter()
        finally:
            if writer is not None:
                use(None)
        size = sum(map(size_in_band, outcomes)) if self._remote else 0
        spent = timings.transform, timings.collate, packing
        reply = Reply(self.id, pid, self._remote, outcomes, begin, now - begin, spent, size)
        if state is not None:
            reply = reply._replace(state=state)
        if self._job.memory_limit is not None and self._remote:
            reply = reply._replace(memory=private_memory())
        if writer is None:
            return reply
        writer.close()
        return reply._replace(
            size=size + writer.used,
            slot_size=writer.size,
            slot_retired=writer.retired,
            overflowed=overflowed,
        )

    def _make(self, task: Task, n: int, item: Any, writer: SlotWriter | None) -> Any:
        """One batch, or its failure."""
        if writer is not None:
            writer.begin()
        cursor = None
        try:
            if task.shard is not None:
                cursor = self._find_cursor(task, n, task.shard)
                seed = self._batch_seed(task, cursor.begin())
                batch = self._call(cursor.fetch, self._timings, seed)
            else:
                self.info._begin(task.epoch, task.ordinal + n)
                if self._packed:
                    item = unpack(item)
                seed = self._batch_seed(task, task.ordinal + n)
                batch = self._call(self._fetch, item, seed)
        except BaseException as error:
            # In the caller's own process Ctrl-C is Ctrl-C. In a worker nothing may escape:
            # the executor would try to pickle it.
            if not self._remote and not isinstance(error, Exception):
                raise
            self._end_fork()
            stage = READING if cursor is not None and cursor.reading else ""
            return Failure.of(error, packed=self._remote, stage=stage)
        if not self._remote or batch is END:
            return batch
        self._end_fork()
        self._made = time.perf_counter()
        try:
            if writer is None:
                return self._pack(batch)
            packed = pack_batch(batch, writer)
        except BaseException as error:
            try:
                return _unpackable(batch, error)
            except BaseException as other:  # sys.exit() in __reduce__
                return Failure.of(other, packed=True)
        finally:
            self._end_fork()
        del batch
        if isinstance(packed, bytes):
            writer.end([])
            return packed
        return packed._replace(buffers=writer.end(packed.buffers))

    def _batch_seed(self, task: Task, ordinal: int) -> int:
        return batch_seed(self.info.seed, task.epoch, ordinal)

    def _find_cursor(self, task: Task, n: int, shard: Shard) -> Cursor:
        """The cursor before the batch; batches before that are passed over, if need be."""
        index = task.ordinal + n
        cursor = self._cursors.find(shard, task.epoch, index, self.info.pid)
        self.info = cursor.info
        if cursor.ended or cursor.position == index:
            return cursor
        samples = None
        while cursor.position < index and not cursor.ended:
            self._mark(task.id, n, time.perf_counter())  # the time that each may take begins
            try:
                samples = self._call(cursor.draw, None, self._batch_seed(task, cursor.begin()))
            except BaseException as error:
                if cursor.ended or (not self._remote and not isinstance(error, Exception)):
                    raise
                self._end_fork()
                logger.debug("batch %d of shard %d fails again: %r", index, shard.id, error)
        given = cursor.position - (samples is END)
        if given < index:
            raise RuntimeError(
                f"the stream has ended after {given} batches of shard {shard.id}, but gave {index} "
                "when it was read before; it must give the same samples each time, for the same "
                "epoch, shard and seed"
            )
        self._mark(task.id, n, time.perf_counter())
        return cursor

    def _end_stream_task(self, shard: Shard, outcomes: list[Any]) -> bytes | None:
        """The state of the stream behind the outcomes; END behind them if it has ended."""
        cursor = self._cursors.current(shard)
        if cursor is None:
            return None
        if cursor.ended:
            if outcomes[-1] is not END:
                outcomes.append(END)
            return None
        try:
            return cursor.state()
        except BaseException as error:
            if not self._remote and not isinstance(error, Exception):
                raise
            stage = "when the stream was asked for its state"
            outcomes[-1] = Failure.of(error, packed=self._remote, stage=stage)
            return None

    def _end_fork(self) -> None:
        """Ends a fork of the worker that came back from the dataset, before it answers too."""
        if self._remote and os.getpid() != self.info.pid:
            os._exit(1)


READING = "when the stream was read"

"""Stage of a failure after which a stream may have ended: a generator cannot go on."""


def _unpackable(batch: Any, error: BaseException) -> Failure:
    path, part, cause = find_culprit(batch, "batch") or ("batch", batch, error)
    return Failure.of(
        TransportError(
            f"a batch of type {type(batch).__qualname__} cannot be sent to the parent: "
            f"{path} is a {type(part).__qualname__} ({cause}); return arrays, numbers, "
            "strings or containers of them, or use executor='thread'"
        ),
        packed=True,
    )


_thread = threading.local()  # .info: set while this thread makes a batch
