"""Reads within a batch at the same time: by threads, or on an event loop, of the worker.

::

    the worker makes a batch:   __getfutures__([7, 3, 9])
                                     |  a call for each sample, with a WorkerInfo of its own
                                     v
                    queue ──> daemon threads: dataset[7], dataset[3], ...
              or    event loop, in one daemon thread: await dataset[7], ...
                                     |
                                     v
                                finished futures, in order: BatchMaker takes sample or error

Runs where batches are made. Threads and loop begin with the first batch of a process, and end with
the dataset. They are daemons: a read that never ends does not keep a process from ending.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Any

from minloader._checks import check_int, shown
from minloader._worker.messages import WorkerInfo
from minloader._worker.run import current_info
from minloader._worker.start import get_worker_info

Fetch = Callable[[Any, WorkerInfo | None], "Future[Any]"]


def concurrent(dataset: Any, threads: int = 16) -> Concurrent:
    """Return a dataset that reads the samples of a batch at the same time, in the worker.

    It is for samples that are waited for, as those of an object store or a slow disk. Work that
    computes gains nothing: give the loader more workers. ::

        loader = Loader(concurrent(dataset, threads=32), batch_size=64, num_workers=2)

    The samples come in the order of their indices, and an error, or :data:`minloader.SKIP`, is that
    of its sample, as ever. In each read ``get_worker_info().rng`` is a generator of the sample's
    own, which depends on its place in the batch, and ``sample_rng`` one that depends on its index:
    the same whoever reads, and when. The global generators of ``random``, ``numpy.random`` and
    torch are shared by all reads; what is drawn from these depends on their order.

    Args:
        dataset: its ``__getitem__`` is called by several threads. If that is an ``async def``, all
            are awaited on one event loop, in a thread of its own, which stays the same for all
            batches of a worker.
        threads: most reads at the same time, in each worker.

    Returns:
        A dataset with the length of ``dataset``, which is its attribute ``dataset``.

    Raises:
        TypeError: the dataset has no ``__getitem__``, or ``threads`` is not an int.
        ValueError: ``threads`` is below 1.
    """
    return Concurrent(dataset, threads)


class Concurrent:
    """See :func:`concurrent`."""

    def __init__(self, dataset: Any, threads: int) -> None:
        if not hasattr(type(dataset), "__getitem__"):
            raise TypeError(
                f"dataset must have __getitem__, got {shown(dataset)}; a stream can be read ahead "
                "in threads of its own"
            )
        self.dataset = dataset
        self._threads = check_int("threads", threads, 1)
        self._lock = threading.Lock()  # several threads may make batches
        self._pid = -1  # where the threads are
        self._fetch: Fetch | None = None

    def __reduce__(self) -> Any:
        return Concurrent, (self.dataset, self._threads)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return [future.result() for future in self.__getfutures__(indices)]

    def __getfutures__(self, indices: Sequence[Any]) -> list[Future[Any]]:
        """Read samples; return a future for each, which has its sample or its error."""
        with self._lock:
            if self._fetch is None or self._pid != os.getpid():  # threads do not follow a fork
                self._fetch, self._pid = self._begin(), os.getpid()
            fetch = self._fetch
        info = get_worker_info()
        infos = (info and info._of_sample(*each) for each in enumerate(indices))
        futures = [fetch(*each) for each in zip(indices, infos, strict=True)]
        try:
            wait(futures)
        finally:
            for future in futures:  # after Ctrl-C
                future.cancel()
        return futures

    def _begin(self) -> Fetch:
        """Begin the threads, or the event loop, of this process."""
        if inspect.iscoroutinefunction(type(self.dataset).__getitem__):
            # Outside of the batch's context, which holds the dataset that the loop is to end with.
            loop, limit = Context().run(asyncio.new_event_loop), asyncio.Semaphore(self._threads)
            _start(_run_loop, loop)
            _at_end(self, loop.call_soon_threadsafe, loop.stop)
            return partial(_await_on, loop, limit, self.dataset)
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for number in range(self._threads):
            try:
                _start(_serve, calls)
            except RuntimeError:  # the system has no more threads
                if number == 0:
                    raise
                break
            _at_end(self, calls.put, None)
        return partial(_call_in, calls, self.dataset)


def _start(function: Callable[[Any], None], argument: Any) -> None:
    name = "minloader-read"
    threading.Thread(target=function, args=(argument,), name=name, daemon=True).start()


def _at_end(owner: Concurrent, function: Callable[[Any], Any], argument: Any) -> None:
    """Call a function when the dataset is gone, not at exit: the threads are daemons."""
    weakref.finalize(owner, function, argument).atexit = False


# --- by threads


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make calls until there is a None."""
    while (call := calls.get()) is not None:
        call()
        del call  # with what it has read


def _call_in(calls: Any, dataset: Any, index: Any, info: WorkerInfo | None) -> Future[Any]:
    future: Future[Any] = Future()
    calls.put(partial(_read, future, dataset, index, info))
    return future


def _read(future: Future[Any], dataset: Any, index: Any, info: WorkerInfo | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    current_info.set(info)
    try:
        sample = dataset[index]
    except BaseException as error:  # sys.exit() too is an error of the batch
        future.set_exception(error)
    else:
        future.set_result(sample)
    finally:
        current_info.set(None)  # it holds the dataset, with which this thread is to end


# --- on an event loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _await_on(
    loop: asyncio.AbstractEventLoop, limit: Any, dataset: Any, index: Any, info: WorkerInfo | None
) -> Future[Any]:
    future: Future[Any] = Future()
    task = asyncio.run_coroutine_threadsafe(_await(future, limit, dataset, index, info), loop)
    future.add_done_callback(lambda done: done.cancelled() and task.cancel())
    return future


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
        else:
            if not future.cancelled():
                future.set_result(sample)
