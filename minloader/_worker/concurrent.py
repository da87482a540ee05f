"""Reads at the same time: by threads, or on an event loop, of the worker.

::

    a task arrives:   __getfutures__([7, 3, 9], info)         for each of its batches
                           |  a call for each sample, with a WorkerInfo of its own
                           v
          queue ──> daemon threads: dataset[7], dataset[3], ...
    or    event loop, in one daemon thread: await dataset[7], ...
                           |
                           v
                      futures: BatchMaker takes sample or error, in their order

A worker process takes the next task while it makes the batches of one (:class:`ReadAheadQueue`), so
that the reads never pause. Threads and loop begin with the first read of a process, and end with
the dataset. They are daemons: a read that never ends does not keep a process from ending.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

from minloader._arguments import checked_int
from minloader._formats import brief_repr
from minloader._memory import forks
from minloader._protocols import has_getitem
from minloader._worker.current import get_worker_info
from minloader._worker.messages import NO_SAMPLE, WorkerInfo, current_info

Futures = list["Future[Any]"]
Reads = list[tuple[Any, WorkerInfo | None]]
"""Index and info of each sample."""

CLOSE_SECONDS = 0.3
"""Seconds that a worker may wait at its end until an event loop has closed what it had open; after
0.5 it would be killed."""

EXIT_PRIORITY = 120
"""Priority at the exit of a process: before what a worker has started is killed (``start.py``),
since the dataset may need that to close what it has open."""


def _info_of_sample(info: WorkerInfo, index: Any) -> WorkerInfo:
    """Return what holds for one sample of a batch, which may be made beside others."""
    batch = info._current
    # Without what was passed by: a read has its own numbers, whatever becomes of the others.
    key = (*(n for n in batch.key if n >= 0), batch.reads)
    batch.reads += 1
    if batch.sample is not NO_SAMPLE:
        index = batch.sample  # of a wrapper around what reads
    sample_info = replace(info)
    sample_info._current = replace(batch, key=key, rng=None, sample=index, sample_rng=None)
    return sample_info


class concurrent:  # noqa: N801  # used as a function
    """A dataset that reads samples at the same time, in the worker.

    It is for samples that are waited for, as those of an object store or a slow disk. Work that
    computes gains nothing: give the loader more workers. ::

        loader = Loader(concurrent(dataset, limit=32), batch_size=64, num_workers=2)

    Samples of the batches that are made next are read ahead, whatever the size of a batch; with the
    loader's ``retries=0`` those of one batch at a time, since a read that ends its worker would be
    blamed on the batch before. They come in the order of their indices, and an error, or
    :data:`minloader.SKIP`, is that of its sample, as ever. In each read ``get_worker_info().rng``
    is a generator of the sample's own, which depends on its place in the batch, and ``sample_rng``
    one that depends on its index: the same whoever reads, and when. The global generators of
    ``random``, ``numpy.random`` and torch are shared by all reads, and with ``transform`` and
    ``collate_fn``: if a read draws from these, what they give depends on the order of the reads.

    A dataset that is a context manager (``__enter__`` and ``__exit__``, or ``__aenter__`` and
    ``__aexit__``, awaited on the event loop) opens there what its reads need, a session, say: it is
    entered once in each worker, before the first read, and left when the worker ends. One that is
    killed does not leave it. There ``get_worker_info().rng`` depends on the worker.

    Args:
        dataset: its ``__getitem__`` is called by several threads. If that is an ``async def``, all
            are awaited on one event loop, in a thread of its own, which stays the same for all
            batches of a worker.
        limit: most reads at the same time, in each worker.

    Attributes:
        dataset: the dataset, which has the same length.
        limit: most reads at the same time.

    Raises:
        TypeError: the dataset has no ``__getitem__``, or would be entered by methods of the other
            kind than that; or ``limit`` is not an int.
        ValueError: ``limit`` is below 1.
    """

    def __init__(self, dataset: Any, limit: int = 16) -> None:
        if not has_getitem(dataset):
            raise TypeError(
                f"dataset must have __getitem__, got {brief_repr(dataset)}; a stream can be read "
                "ahead in threads of its own"
            )
        _check_is_entered(dataset)
        self.dataset = dataset
        self.limit = checked_int("limit", limit, 1)
        self._lock = threading.Lock()  # several threads may make batches
        self._read: Callable[[Futures, Reads], object] | None = None
        forks.told.add(self)

    def __reduce__(self) -> Any:
        return concurrent, (self.dataset, self.limit)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return [future.result() for future in self.__getfutures__(indices, get_worker_info())]

    def __getfutures__(self, indices: Sequence[Any], info: WorkerInfo | None) -> Futures:
        """Begin to read the samples of a batch; return a future for each.

        Args:
            indices: of the samples.
            info: that of the batch.
        """
        with self._lock:
            if self._read is None:
                before = current_info.get()
                # Not the batch's, whose dataset the threads, or the loop, are to end with.
                current_info.set(info and replace(info, dataset=self.dataset))
                try:
                    self._read = self._begin()
                finally:
                    current_info.set(before)
            read = self._read
        futures: Futures = [Future() for _ in indices]
        read(futures, [(each, info and _info_of_sample(info, each)) for each in indices])
        return futures

    def begin_fork(self) -> None:
        """Begin anew in a fork: no thread has followed, but one may have had the lock."""
        self._lock = threading.Lock()
        self._read = None

    def _begin(self) -> Callable[[Futures, Reads], object]:
        """Begin the threads, or the event loop, of this process."""
        if _is_async(self.dataset):
            # Outside of the batch's context, which holds the dataset that the loop is to end with.
            loop = Context().run(asyncio.new_event_loop)
            limit = asyncio.Semaphore(self.limit)
            try:
                _start(_run_loop, loop)
                if hasattr(self.dataset, "__aenter__"):
                    asyncio.run_coroutine_threadsafe(self.dataset.__aenter__(), loop).result()
            except BaseException:
                loop.call_soon_threadsafe(loop.stop)
                raise
            Finalize(self, _end_loop, (loop, self.dataset), exitpriority=EXIT_PRIORITY)
            call: Any = loop.call_soon_threadsafe
            return partial(call, _begin_tasks, loop, limit, self.dataset)
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        try:
            self._start_threads(calls)
            if hasattr(self.dataset, "__enter__"):
                self.dataset.__enter__()
        except BaseException:
            _end_threads(calls, self.limit, None)
            raise
        Finalize(self, _end_threads, (calls, self.limit, self.dataset), exitpriority=EXIT_PRIORITY)
        return partial(_call_in, calls, self.dataset)

    def _start_threads(self, calls: Any) -> None:
        """Start as many threads as there may be, but at least one."""
        number = 0
        try:
            for number in range(self.limit):  # noqa: B007
                _start(_serve, calls)
        except RuntimeError:  # the system has no more threads
            if number == 0:
                raise


def _is_async(dataset: Any) -> bool:
    return inspect.iscoroutinefunction(type(dataset).__getitem__)


def _check_is_entered(dataset: Any) -> None:
    """Refuse a context manager of the other kind than its reads, which nobody would enter."""
    if _is_async(dataset):
        kind = "an async"
        needed = "__aenter__"
        other = "__enter__"
    else:
        kind = "a blocking"
        needed = "__enter__"
        other = "__aenter__"
    if hasattr(dataset, other) and not hasattr(dataset, needed):
        raise TypeError(
            f"dataset, {brief_repr(dataset)}, would not be entered: with {kind} __getitem__ it "
            f"needs {needed} rather than {other}"
        )


def _start(function: Callable[[Any], None], argument: Any) -> None:
    """Start a thread, in which the settings of libraries hold as they do here."""
    run = copy_context().run
    name = "minloader-read"
    threading.Thread(target=run, args=(function, argument), name=name, daemon=True).start()


class ReadAheadQueue:
    """The queue of an executor's tasks, of which one is taken while another is made.

    Args:
        tasks: the executor's own queue.
        begin: called with a task, in a thread, as soon as it is taken; not with the first.
    """

    def __init__(self, tasks: Any, begin: Callable[[Any], object]) -> None:
        self._tasks = tasks
        self._begin = begin
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._may_take = threading.Semaphore()  # as often as a task is to be taken
        self._is_alone = False  # whether none is taken while the present one is made
        _start(ReadAheadQueue._take, self)

    def _take(self) -> None:
        # Nothing is made beside the first: who makes it begins to read it, and has said so by then,
        # for the case that a read ends this process.
        is_first = True
        while True:
            self._may_take.acquire()
            call = None
            try:
                call = self._tasks.get(block=True)
                for task in call.args if call is not None else ():
                    if not (task.alone or is_first):
                        self._begin(task)
                is_first = False
            finally:
                self._calls.put(call)
            if call is None:  # the end
                return
            del call

    def get(self, block: bool = True) -> Any:
        """Return the next call of the executor; None at its end."""
        if self._is_alone:
            self._may_take.release()
        call = self._calls.get(block)
        self._is_alone = any(task.alone for task in call.args) if call is not None else False
        if not self._is_alone:
            self._may_take.release()
        return call


# --- by threads


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make calls until there is a None."""
    while (call := calls.get()) is not None:
        call()
        del call  # with what it has read


def _call_in(calls: Any, dataset: Any, futures: Futures, reads: Reads) -> None:
    for future, read in zip(futures, reads, strict=True):
        calls.put(partial(_read, future, dataset, *read))


def _read(future: Future[Any], dataset: Any, index: Any, info: WorkerInfo | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    current_info.set(info)
    try:
        sample = dataset[index]
    except BaseException as error:  # sys.exit() too is an error of the batch
        future.set_exception(error)
        del future  # the error's frames are this one
    else:
        future.set_result(sample)
    finally:
        current_info.set(None)  # it holds the dataset, with which this thread is to end


def _end_threads(calls: SimpleQueue[Any], count: int, dataset: Any) -> None:
    for _ in range(count):
        calls.put(None)
    if hasattr(dataset, "__exit__"):
        dataset.__exit__(None, None, None)


# --- on an event loop


def _end_loop(loop: asyncio.AbstractEventLoop, dataset: Any) -> None:
    async def end() -> None:
        try:
            if hasattr(dataset, "__aexit__"):
                await dataset.__aexit__(None, None, None)
        finally:
            loop.call_soon(loop.stop)

    ending = asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is threading.main_thread():  # the process may be about to end
        wait([ending], CLOSE_SECONDS)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _begin_tasks(
    loop: asyncio.AbstractEventLoop, limit: Any, dataset: Any, futures: Futures, reads: Reads
) -> None:
    for future, read in zip(futures, reads, strict=True):
        task = loop.create_task(_await(future, limit, dataset, *read))
        future.add_done_callback(partial(_cancel, loop, task))


def _cancel(loop: asyncio.AbstractEventLoop, task: Any, done: Future[Any]) -> None:
    if done.cancelled():
        loop.call_soon_threadsafe(task.cancel)


async def _await(
    future: Future[Any], limit: Any, dataset: Any, index: Any, info: WorkerInfo | None
) -> None:
    async with limit:
        current_info.set(info)  # each coroutine has a context of its own
        try:
            sample = await dataset[index]
        except BaseException as error:  # sys.exit() would end the loop, and all that it awaits
            if not future.cancelled():
                future.set_exception(error)
            del future  # the error's frames are this one
        else:
            if not future.cancelled():
                future.set_result(sample)
    # The loop drops timers that were cancelled, with their contexts, when it turns once more.
    await asyncio.sleep(0)
