"""Worker processes of our own: a pool of them that loses nothing and leaves nothing.

The parent's main module is never imported in a worker, so scripts need no ``__main__`` guard.
When a worker dies, all workers of its executor go, another executor takes its place, and the
board tells which batch the dead one was making. At the end workers are asked to leave, then
killed together with all they started.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, cast

from minloader._errors import WorkerDied
from minloader._memory.job_file import JobFile
from minloader._memory.limits import NO_LIMIT, memory_limit, oom_kills
from minloader._memory.slots import Slots
from minloader._pools.base import GRACE, Death, Held, Pool, Terms, packed
from minloader._pools.cpython import CopyingDict, TolerantFuture, starting_worker
from minloader._worker.heartbeat import Heartbeats, Line
from minloader._worker.lifetimes import kill_group, kill_marked, kill_trees
from minloader._worker.messages import Reply, Task
from minloader._worker.start import TOKEN, WorkerSetup, run, start, warm_up

logger = logging.getLogger("minloader")

MOST_FAILED_STARTS = 8

"""How many workers in a row may die before they are ready. Fewer might be bad luck."""


STUCK = 1.0

"""Seconds after which an executor that has not noticed a death is taken to be stuck."""


class _Executor(ProcessPoolExecutor):
    """A ProcessPoolExecutor whose workers have numbers, start as we need it, and are watched.

    Attributes:
        setup: where the workers find what they need.
        board: what they are doing.
        workers: the processes in the order of their numbers; kept when the executor forgets them.
        ended: pids of workers that were ended because another had died.
        stacks: Python stacks of workers that were ended because they took too long, by pid.
        unfinished: ids of tasks under way.
        lost: ids of tasks that were when the executor broke.
        worked: whether any task was finished.
        leaving: whether it takes no more tasks.
    """

    def __init__(
        self, setup: WorkerSetup, board: Heartbeats, num_workers: int, context: BaseContext
    ) -> None:
        # Its arguments are set for each worker, when it is spawned.
        super().__init__(num_workers, mp_context=context)
        self._initializer = start
        self.setup = setup
        self._processes = CopyingDict()
        self._pending_work_items = CopyingDict()
        cast(Any, self)._call_queue.pending_work_items = self._pending_work_items
        self._results = cast(Any, self._result_queue)
        self._dead_since: float | None = None
        self._oom_kills = oom_kills()
        self.board = board
        self.manager: threading.Thread | None = None
        self.workers: list[Any] = []
        self.ended: set[int] = set()
        self.stacks: dict[int, str] = {}
        self.unfinished: set[int] = set()
        self.lost: set[int] = set()
        self.worked = False
        self.leaving = False

    def _spawn_process(self) -> None:
        self._initargs = (self.setup, len(self._processes))
        with starting_worker():
            super()._spawn_process()  # type: ignore[misc]  # not public
        self.workers = list(self._processes.values())
        process = self.workers[-1]
        process.terminate = partial(_end_survivor, process._popen, self.ended)

    def _start_executor_manager_thread(self) -> None:
        super()._start_executor_manager_thread()
        self.manager = cast(Any, self._executor_manager_thread)

    def send(self, task: Task) -> Future[Reply]:
        """Submits a task to the workers."""
        self.unfinished.add(task.id)
        try:
            future = self.submit(run, task)
        except BaseException:
            self.unfinished.discard(task.id)
            raise
        future.add_done_callback(partial(self._done, task.id))
        return future

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            future = super().submit(fn, *args, **kwargs)
        except Exception:
            if self._broken:  # while it started a worker, say, that it can give no queue any more
                raise BrokenProcessPool(self._broken) from None
            raise
        future.__class__ = TolerantFuture
        if self._broken:
            # CPython 3.11 breaks without a lock: it may have looked for tasks just before this.
            future.set_exception(BrokenProcessPool(self._broken))
        return future

    def _done(self, task_id: int, future: Future[Reply]) -> None:
        self.unfinished.discard(task_id)
        if future.cancelled():
            return
        if future.exception() is not None:
            self.lost.add(task_id)
        else:
            self.worked = True

    def retire(self) -> None:
        """Takes no more tasks; what is queued is dropped."""
        self.leaving = True
        self.shutdown(wait=False, cancel_futures=True)

    def end(self, deadline: float) -> None:
        """Waits for the workers to leave until ``deadline`` (monotonic clock), then kills."""
        self._reveal_deaths()
        alive = {process.sentinel: process for process in self.workers}
        while alive and (left := deadline - time.monotonic()) > 0:
            for sentinel in multiprocessing.connection.wait(list(alive), left):
                del alive[sentinel]
        self._kill(process.pid for process in alive.values() if not _has_ended(process._popen))
        for process in self.workers:
            # One that left by itself may have left others. Its pid may be taken again by now, but
            # not as a group while there is anybody in its own.
            kill_group(process.pid)
        # It reaps the processes and closes the pipes; it ends at once now, unless it is this
        # thread itself, come here by garbage collection.
        if self.manager is not None and self.manager is not threading.current_thread():
            self.manager.join(GRACE)
            if self.manager.is_alive():
                self._unblock("the workers have ended")
                self.manager.join(GRACE)
            if not self.manager.is_alive():
                # Their futures know this executor. The collector, which would have to find that,
                # may come while the system's semaphores are counted, which CPython 3.12 refuses.
                self._pending_work_items.clear()

    def _reveal_deaths(self) -> list[Any]:
        """The sentinels of workers that have ended. A fork that one left behind would hide it."""
        dead = [process for process in self.workers if _has_ended(process._popen)]
        for process in dead:
            kill_group(process.pid)
        return [process.sentinel for process in dead]

    def _kill(self, pids: Iterable[int]) -> None:
        pids = list(pids)
        self.ended.update(pids)
        kill_trees(pids)

    def watch(self, timeout: float | None) -> None:
        """Kills workers whose batch takes longer than ``timeout``, and finds what is stuck."""
        if self._broken:
            return
        for worker_id, process in enumerate(self.workers if timeout is not None else ()):
            line = self.board.line(worker_id)
            late = time.perf_counter() - line.began > cast(float, timeout)
            if late and line.task in self.unfinished and process.pid not in self.stacks:
                stack = self.board.stack(process.pid, GRACE)
                if self.board.line(worker_id) == line and line.task in self.unfinished:
                    self.stacks[process.pid] = stack
                    kill_trees([process.pid])
        # The manager thread notices a death at once, unless it is in the middle of a message that
        # the dead did not finish: then it waits for the rest for ever.
        # Nor does it where the dead left a fork behind that detached itself.
        dead = self._reveal_deaths()
        if not dead or (self.leaving and not self.unfinished):
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > STUCK:
            why = self._broken = "a worker died while it sent a reply"  # type: ignore[assignment]
            self._kill(p.pid for p in self.workers if p.sentinel not in dead)
            self._unblock(why)

    def _unblock(self, why: str) -> None:
        """Does what a manager thread would do that reads an unfinished message, and ends that."""
        for item in list(self._pending_work_items.values()):
            item.future.set_exception(BrokenProcessPool(why))
        self._results._writer.close()  # the last one: the message ends here

    def deaths(self) -> Iterator[tuple[Line, Death]]:
        """Those workers that died by themselves, or by us for taking too long."""
        out_of_memory = oom_kills() > self._oom_kills
        for worker_id, process in enumerate(self.workers):
            pid, exitcode = process.pid, process.exitcode
            stack = self.stacks.get(pid)
            if pid in self.ended and stack is None:
                continue
            cause = _exit_text(exitcode, out_of_memory)
            if stack is not None:
                cause = "killed, since a batch took too long"
            line = self.board.line(worker_id)
            name = self.setup.first_id + worker_id
            yield line, Death(line.place, name, pid, exitcode, cause, stack)


def _exit_text(exitcode: int | None, out_of_memory: bool) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = f" ({signal.Signals(-exitcode).name})"
    except ValueError:
        name = ""
    text = f"killed by signal {-exitcode}{name}"
    if exitcode != -getattr(signal, "SIGKILL", 9):
        return text
    if out_of_memory and memory_limit() < NO_LIMIT:
        return f"{text}: out of memory, by the limit of {memory_limit()} bytes of a control group"
    return f"{text}: the machine may be out of memory"


def _has_ended(popen: Any) -> bool:
    """Whether a worker has. Its sentinel alone does not tell: a fork of it may hold that open."""
    if popen.returncode is not None or multiprocessing.connection.wait([popen.sentinel], 0):
        return True
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # that of a fork server
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, popen.pid, how) is not None
    return False


def _end_survivor(popen: Any, ended: set[int]) -> None:
    """What the executor does to every worker when one has died, in place of ``terminate()``.

    SIGTERM would leave alive what the worker started, and a worker that ignores it too: the
    executor would wait for that, from CPython 3.12 with the lock that ``shutdown()`` needs.
    """
    if not _has_ended(popen):
        ended.add(popen.pid)
    # Also one that seems to have ended: it may just have closed its descriptors.
    kill_trees([popen.pid])


class ProcessPool(Pool):
    """Makes batches in worker processes, started when there is work for them.

    An executor that broke is replaced by another; one whose workers have grown too large
    finishes what it was given beside another.

    Args:
        terms: how many processes, at most, and what they are told.
        job_file: the job, serialized once for all workers there will ever be.
        context: how to start them.
        slots: shared memory for their batches.
        timeout: seconds that a batch may take.
    """

    replaces = True

    def __init__(
        self,
        terms: Terms,
        job_file: JobFile,
        context: BaseContext,
        slots: Slots | None,
        timeout: float | None,
    ) -> None:
        super().__init__(terms, slots)
        self._job_file = job_file
        self._context = context
        self._timeout = timeout
        self._lock = threading.RLock()
        self._executors: list[_Executor] = []  # the last one takes tasks
        self._losses = 0
        self._closed = False
        _pools.add(self)

    def _live(self) -> _Executor:
        if self._closed:
            raise RuntimeError("the pool is closed")
        self._remove_dead_executors()
        if len(self.failed_starts) >= MOST_FAILED_STARTS:
            raise WorkerDied(
                f"workers cannot be started: {len(self.failed_starts)} in a row died before "
                f"they were ready ({self.failed_starts[-1]}); look at what the dataset does when "
                "it is unpickled, at worker_init_fn, and at the machine's memory"
            )
        if not self._executors or self._executors[-1].leaving:
            board = Heartbeats(self.num_workers)
            folder = self.slots.folder if self.slots is not None else None
            token = secrets.token_hex(8)
            setup = WorkerSetup(
                *(self._job_file.address, folder, board.path, token),
                *(self.terms.first_id, self.terms.all_workers, self.terms.seed),
            )
            executor = _Executor(setup, board, self.num_workers, self._context)
            self._executors.append(executor)
        return self._executors[-1]

    def _remove_dead_executors(self) -> None:
        """Puts away executors that broke, when all their processes are gone, and spent ones."""
        if self._closed:
            return  # that is close()'s now
        for executor in list(self._executors):
            spent = executor.leaving and executor.manager and not executor.manager.is_alive()
            if not executor._broken and not spent:
                continue
            executor.retire()
            executor.end(time.monotonic() + GRACE)
            self._executors.remove(executor)
            if executor._broken:
                self._losses += 1
                self._collect_deaths(executor)
            self._clean_up(executor)

    def _clean_up(self, executor: _Executor) -> None:
        """Removes what the workers of an ended executor may have left."""
        executor.board.close()
        if executor._broken or any(process.exitcode for process in executor.workers):
            kill_marked(TOKEN, executor.setup.token)

    def _collect_deaths(self, executor: _Executor) -> None:
        if executor.worked:
            self.failed_starts.clear()
        for line, death in executor.deaths():
            self.replaced += 1
            if line.task == 0:
                self.failed_starts.append(death.cause)
            if line.task in executor.lost:
                self.deaths[line.task] = death
            logger.warning(
                "worker %d (pid %d) died: %s; the workers are replaced, and what was under way "
                "is done again",
                *(death.worker, death.pid, death.cause),
            )

    def hold(self, item: Any) -> Held:
        return Held(item)

    def pack(self, task: Task) -> Task:
        return packed(task)

    def submit(self, task: Task) -> Future[Reply]:
        with self._lock:
            while True:
                try:
                    return self._live().send(task)
                except BrokenExecutor:  # just now: the task was not under way, so it is not lost
                    continue

    def start(self) -> None:
        with self._lock:
            self.failed_starts.clear()  # the machine may have recovered
            executor = self._live()
            # An executor starts a process with a task for which none is idle.
            for _ in range(self.num_workers - len(executor.workers)):
                executor.submit(warm_up)

    def watch(self) -> None:
        with self._lock:
            for executor in self._executors:
                executor.watch(self._timeout)

    def losses(self) -> int:
        with self._lock:
            self._remove_dead_executors()
            return self._losses

    def renew(self, pid: int) -> None:
        with self._lock:
            current = self._executors[-1] if self._executors else None
            if current is None or pid not in [process.pid for process in current.workers]:
                return
            logger.warning(
                "worker (pid %d) takes more than worker_memory_limit: all workers are replaced, as "
                "soon as they have done what they were given",
                pid,
            )
            self.replaced += len(current.workers)
            self.release()

    def release(self) -> None:
        with self._lock:
            if self._executors and not self._executors[-1].leaving:
                self._executors[-1].leaving = True
                self._executors[-1].shutdown(wait=False)

    def retire(self) -> bool:
        if os.getpid() != self.pid:
            return False
        self._closed = True
        for executor in list(self._executors):
            executor.retire()
        return True

    def end(self, deadline: float) -> None:
        with self._lock:
            while self._executors:
                self._executors[-1].end(deadline)
                self._clean_up(self._executors[-1])
                self._executors.pop()  # only now: Ctrl-C meanwhile leaves the rest to the exit
        if self.slots is not None:
            self.slots.close()


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    """Ends every worker when the interpreter exits, all of them within one GRACE.

    It must come before the executors' own hook, which first drains what is queued, and before
    the interpreter waits for their threads: atexit would be too late for both.
    """
    deadline = time.monotonic() + GRACE
    for pool in [pool for pool in _pools if pool.retire()]:
        pool.end(deadline)


threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # as concurrent.futures does
