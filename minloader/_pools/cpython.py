"""CPython's private parts, all in one room.

No other module of the package names an underscored attribute of ``concurrent.futures``,
``multiprocessing`` or ``threading``. Each piece here says what CPython does, since which issue or
in which function, in which versions, and what happens without the piece. ``tests/test_cpython.py``
shows for each that the running CPython needs it, and fails when it no longer does.

The states of an executor, and who moves it::

                 submit()                  a worker dies: manager thread
    [ fresh ] -------------> [ running ] ------------------------------> [ broken ]
        |                        |                                           |
        | shutdown()             | shutdown()           the manager thread has ended all workers
        |                        v            the queue is empty             v
        +----------------> [ leaving ] ----------------------------> [ manager ended ]

The *manager thread* belongs to the executor: it moves tasks from a dict to the call queue, reads
replies from the result queue, waits for the sentinels of the workers, and kills them all when one
has died. Everything else happens in the thread that calls.

Guarantees of :class:`Executor` over its base class:

1. Every future that ``submit()`` returned is done once the executor is broken and its manager
   thread has ended, however threads interleave (pieces 3 and 4).
2. The manager thread can be waited for after ``shutdown(wait=False)`` (piece 5).
3. A manager thread that waits for the rest of an unfinished message can be freed (piece 6).
"""

from __future__ import annotations

import multiprocessing.spawn
import multiprocessing.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, cast

# --- 1. The main module ------------------------------------------------------------------------
#
# CPython: multiprocessing.spawn.get_preparation_data() tells every child of "spawn" and
# "forkserver" where the parent's main module is, and the child imports it before anything else.
# Versions: all.
# Without this piece: a script needs a guard (if __name__ == "__main__") or starts itself again for
# ever; a child that fails in that import may hang the start (cpython #118981), from 3.13.8 and
# 3.14.1 with a BrokenPipeError; and each start takes as long as the imports of the script.

_starting = threading.local()  # .worker: this thread is just starting a worker of ours

_get_preparation_data = multiprocessing.spawn.get_preparation_data


def _leave_main_out(name: str) -> dict[str, Any]:
    data = _get_preparation_data(name)
    if getattr(_starting, "worker", False):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


# Once and for all rather than around each start: other threads may start processes meanwhile,
# which get their main module.
multiprocessing.spawn.get_preparation_data = _leave_main_out


@contextmanager
def main_module_left_out() -> Iterator[None]:
    """Keep the parent's main module out of the processes that this thread starts meanwhile."""
    _starting.worker = True
    try:
        yield
    finally:
        _starting.worker = False


# --- 2. The end of the interpreter -------------------------------------------------------------
#
# CPython: concurrent.futures.process registers _python_exit() with threading._register_atexit().
# It waits until all that was ever submitted is done. The functions run in reverse order, before
# the interpreter waits for threads, and before atexit. In a child of multiprocessing there is one
# more wait: multiprocessing.util._exit_function() joins the child's own children first.
# Versions: all.
# Without this piece: an exit waits for every task that is queued, and for ever if one is stuck; a
# loader still open at the end of a multiprocessing child hangs that child for ever.


def register_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the interpreter ends, before anything waits for processes."""
    threading._register_atexit(function)  # type: ignore[attr-defined]
    _before_joins(function)
    # A child of "fork" clears what was registered in its parent.
    multiprocessing.util.register_after_fork(function, _before_joins)


def _before_joins(function: Callable[[], None]) -> None:
    multiprocessing.util.Finalize(None, function, exitpriority=100)


# --- 3. Futures of a broken executor -----------------------------------------------------------
#
# CPython: _ExecutorManagerThread.terminate_broken() sets an error on each future, also on one
# that was cancelled, or has its error from piece 4 (cpython #107219).
# Versions: 3.11. From 3.12 it catches the InvalidStateError.
# Without this piece: the manager thread ends with that error, and the other futures never do.


class _TolerantFuture(Future[Any]):
    """A future that may be given an error after it is done: it keeps what it has."""

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            super().set_exception(exception)
        except InvalidStateError:
            if not self.done():
                raise


# --- 4. Submitting while the executor breaks ---------------------------------------------------
#
# CPython: terminate_broken() walks over the tasks and the processes without the lock that
# submit() holds while it adds to both (cpython #109047).
# Versions: 3.11 and 3.12.0. From 3.12.1 it holds the lock.
# Without this piece: "dictionary changed size during iteration" ends the manager thread, and no
# future is ever done; a task that was added just after the walk is never done either; and a
# worker started then gets queues that are closed already, so that submit() raises an OSError.


class CopyingDict(dict[int, Any]):
    """Tasks or processes of an executor, which may grow while somebody walks over them."""

    def items(self) -> Any:
        return list(super().items())

    def values(self) -> Any:
        return list(super().values())


class Executor(ProcessPoolExecutor):
    """A ProcessPoolExecutor that loses no future when it breaks, and whose end can be waited for.

    Args:
        num_workers: number of worker processes.
        context: what makes them: a multiprocessing context, or an object like one.

    Attributes:
        manager: its manager thread; None before the first task.
    """

    def __init__(self, num_workers: int, context: Any) -> None:
        super().__init__(num_workers, mp_context=context)
        self._processes = CopyingDict()
        self._pending_work_items = CopyingDict()
        cast(Any, self)._call_queue.pending_work_items = self._pending_work_items
        self._results = cast(Any, self._result_queue)  # shutdown() forgets it
        self.manager: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call as the base class does.

        Raises:
            BrokenProcessPool: the executor is broken; the call is not, and never was, under way.
        """
        try:
            future = super().submit(fn, *args, **kwargs)
        except Exception:
            if self._broken:
                raise BrokenProcessPool(self._broken) from None
            raise
        future.__class__ = _TolerantFuture
        if self._broken:
            # Either the manager thread walks over the tasks after this one was added, or it has
            # set the flag before that, and this line sees it.
            future.set_exception(BrokenProcessPool(self._broken))
        return future

    @property
    def broken(self) -> bool:
        """Whether the manager thread has found a worker dead.

        No public name tells before the next ``submit()``. Versions: all.
        """
        return bool(self._broken)

    # --- 5. The manager thread
    #
    # CPython: shutdown(wait=False) forgets the manager thread, which goes on, and nothing can
    # wait for it any more, not even another shutdown().
    # Versions: all.
    # Without this piece: nobody knows when the workers are reaped and the pipes closed.

    def _start_executor_manager_thread(self) -> None:
        super()._start_executor_manager_thread()
        self.manager = cast(Any, self._executor_manager_thread)

    # --- 6. An unfinished message
    #
    # CPython: wait_result_broken_or_wakeup() reads a whole message as soon as one has begun. If
    # its writer died in the middle, the read never ends: the parent itself holds an end for
    # writing open, so the pipe has no end either.
    # Versions: all.
    # Without this piece: every future of the executor waits for ever.

    def break_up(self, reason: str) -> None:
        """Break the executor as its manager thread would, which finds it broken, too.

        This closes the parent's end of the pipe for replies. All workers must be dead, because
        they hold ends as well.
        """
        self._broken = reason  # type: ignore[assignment]  # a string or False
        self._results._writer.close()
