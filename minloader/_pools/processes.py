"""Worker processes of our own: a pool of them that loses no task and leaves nothing behind.

A pool has a list of executors, the last of which takes tasks. The states of one, and who moves it::

     _current()              replace_workers(): they grew too large, or have other settings
    -----------> [ current ] -------------------------------> [ leaving ]
                     |                                          |     | all its tasks are done
                     | a worker died: the manager thread sees   |     |
                     | it, or else watch() does, after STUCK    |     |
                     v                                          |     |
                 [ broken ] <-----------------------------------+     |
                     |                                                v
                     +--------------- end_broken() --------------> [ ended ]

All but the manager thread's own move happens in the thread that calls the pool, under its lock.
:meth:`ProcessPool.leave` alone takes no lock: whoever closes a loader need not wait for a thread
that is just submitting to it.

Guarantees:

1. Each future that ``submit()`` returned is done, at the latest when ``end_broken()`` has ended its
   executor, or the pool is closed. Then ``deaths`` has the task that a dead worker was making.
2. When an executor has ended, none of its workers lives, nor a process that they started, wherever
   that went (another group, another session, another parent).
3. Closing waits GRACE for the workers, whatever their batches do, 2 * GRACE at most for the
   manager thread, and GRACE at most until what they logged is shown. It happens by itself when
   the loader is collected and when the interpreter exits.
4. The parent's main module is never imported in a worker, so that scripts need no guard.
5. In a fork of the parent nothing here touches the parent's workers.
6. No signal goes to a pid that may be another process's by now: a worker is sent one by its pidfd,
   a group when its leader lives or no process has that pid.
"""

from __future__ import annotations

import logging
import math
import multiprocessing.spawn
import secrets
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from minloader._checks import snapshot
from minloader._errors import WorkerDied
from minloader._memory.files import interrupts_held
from minloader._memory.inherited import Inheritance
from minloader._memory.job_file import ForkedJob, JobFile
from minloader._memory.limits import NO_LIMIT, memory_limit, oom_kills
from minloader._pools.base import GRACE, Death, RemotePool, close_pools, finish
from minloader._pools.cpython import Executor, register_exit, send_signal, start_worker
from minloader._pools.environment import check_executable, hash_seed, wrong_executable
from minloader._pools.log_reader import LogReader
from minloader._worker.generators import locks
from minloader._worker.heartbeat import READY, Heartbeat, Heartbeats
from minloader._worker.library_settings import LibrarySettings
from minloader._worker.lifetimes import (
    handled_signals,
    kill_group,
    kill_marked,
    kill_trees,
    reap_orphans,
)
from minloader._worker.logs import LogSettings
from minloader._worker.messages import Reply, TaskMessage
from minloader._worker.start import (
    TOKEN,
    WorkerSetup,
    refuse_avalanche,
    run,
    warm_up,
    worker_main,
)

logger = logging.getLogger("minloader")

MOST_FAILED_STARTS = 8
"""How many workers in a row may die before they are ready. Fewer might be bad luck."""

LONGEST_START = 60.0
"""Seconds that a worker may take to load the dataset, if ``timeout`` is set and not longer. On a
busy machine the imports of many workers take their time."""

CRASHES = frozenset(
    getattr(signal, name, 0) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
)
"""Signals at which a worker writes its stack."""

MOST_UNWATCHED = 0.25
"""Share of ``timeout``. A longer gap between two looks after the workers counts as nothing: the
program was stopped meanwhile, or the machine slept, or the consumer was busy."""

TOO_LONG = "a batch took too long"
"""Why a worker is killed that makes a batch for longer than ``timeout``."""

STOOD_STILL = "it stood still between batches while some waited for it; it was at"
"""Why one is killed that makes none, while tasks have waited for it for longer than that."""

STUCK = 1.0
"""Seconds after which an executor that has not noticed a death is taken to be stuck."""


class WorkerProcess:
    """A process of the user's context, with what a worker needs on top.

    An executor takes it for a ``multiprocessing.Process``; so does ``connection.wait``. What is not
    here is that process's own (``pid``, ``sentinel``, ``exitcode``, ``join()``, ...).

    Args:
        process: the process.
        seed: of the loader, from which that of hashes follows.
        forks: whether it is started by a fork of this one.
        locks: those that are to be free then, whichever thread holds them here.

    Attributes:
        ended_by_us: whether it lived when another had died, or at the end: that ends it, too.
        killed: pids of what was killed along with it.
        fault: why we killed it, if it was for taking too long, or standing still; else "".
        stack: its Python stack then; else None.
        began: when it was started, by ``time.perf_counter``; 0 if that failed.
    """

    def __init__(
        self, process: BaseProcess, seed: int, *, forks: bool, locks: Sequence[Any]
    ) -> None:
        self._process = process
        self._seed = seed
        self._forks = forks
        self._locks = locks
        self.began = 0.0
        self.ended_by_us = False
        self.fault = ""
        self.killed: list[int] = []
        self.stack: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def start(self) -> None:
        """Start the process, without the main module.

        Ctrl-C is held off the child until it can ignore it, and off a fork all that the parent has
        handlers for: the child inherits the blocked signals, and unblocks them.
        """
        masks = hasattr(signal, "pthread_sigmask")
        held = [signal.SIGINT, *(handled_signals() if self._forks else ())]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, []) if masks else ()
        try:
            if masks:  # only here: a handler of the script's may raise as soon as it is done
                signal.pthread_sigmask(signal.SIG_BLOCK, held)
            with hash_seed(self._seed):
                start_worker(self._process, self._locks)
            self.began = time.perf_counter()
        finally:
            if masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def terminate(self) -> None:
        """Kill the process and all it started. An executor does so to each when one has died.

        SIGTERM would leave alive what the worker started, and a worker that ignores it too: the
        executor would wait for that, from CPython 3.12 with the lock that ``shutdown()`` needs.
        """
        # Also one that seems to have ended: it may just have closed its descriptors.
        _kill([self])

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        # The sentinel is a pipe, which a fork that the worker left behind may hold open.
        return bool(wait([self.sentinel], 0)) or self.exitcode is not None

    def kill_group(self) -> None:
        """Kill what is left of the worker's process group."""
        kill_group(self.pid, reaped=self.exitcode is not None)


def _kill(workers: list[WorkerProcess]) -> None:
    """Kill workers, and all that they started."""
    alive = {worker.pid: partial(send_signal, worker) for worker in workers if worker.is_alive()}
    killed = kill_trees(alive)
    for worker in workers:
        worker.killed += killed
        worker.kill_group()


class _WorkerContext:
    """A multiprocessing context, such that each process of an executor becomes a worker of ours.

    Args:
        context: the user's, which may be of a class of theirs; all but ``Process`` is its own.
        setup: where the workers find what they need.
        inherited: what they must inherit of it.
        locks: those that are to be free in forked ones.
    """

    def __init__(
        self,
        context: BaseContext,
        setup: WorkerSetup,
        inherited: list[Any],
        locks: Sequence[Any],
    ) -> None:
        self._context = context
        self._setup = setup
        self._inherited = inherited
        self._locks = locks
        self._started: list[WorkerProcess] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def workers(self) -> list[WorkerProcess]:
        """The workers that were started, in the order of their numbers; also those that ended."""
        return [process for process in self._started if process.began]

    def Process(self, *, target: Callable[..., Any], args: Any) -> WorkerProcess:  # noqa: N802
        """Return a process that is set up as the next worker before it runs ``target``."""
        # One whose start failed gives its number back.
        self._started = self.workers
        inheritance = Inheritance(self._inherited)  # of this process alone
        index = len(self._started)
        args = (self._setup, index, inheritance, target, args)
        context: Any = self._context  # that it has a Process is true of every real one
        # Not daemonic where this process is: it may start processes, and it follows this one.
        process = context.Process(target=worker_main, args=args, daemon=False)
        forks = context.get_start_method() == "fork"
        seed = self._setup.infos[index].seed
        self._started.append(WorkerProcess(process, seed, forks=forks, locks=self._locks))
        return self._started[-1]


class Stopwatch:
    """Tells how long something takes, without the time in which nobody looked.

    Attributes:
        last: when somebody looked last, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.last = time.perf_counter()
        # What has outlived so many gaps has taken too long in any case.
        self._gaps: deque[tuple[float, float]] = deque(maxlen=16)

    def look(self, timeout: float) -> None:
        """Note that somebody looks now whether something takes longer than ``timeout``."""
        now = time.perf_counter()
        if now - self.last > MOST_UNWATCHED * timeout:
            self._gaps.append((self.last, now))
        self.last = now

    def since(self, began: float) -> float:
        """Return the seconds from then to the last look that count."""
        uncounted = sum(max(0.0, end - max(start, began)) for start, end in self._gaps)
        return self.last - began - uncounted


class _Executor(Executor):
    """An executor whose workers are watched, and of which nothing is left.

    Attributes:
        setup: what each worker is given when it starts.
        heartbeats: what the workers are doing.
        leaving: whether it takes no more tasks.
        unfinished: futures of tasks under way, by the task's id.
        lost: ids of tasks that were under way when it broke.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        heartbeats: Heartbeats,
        logs: LogReader,
        context: _WorkerContext,
    ) -> None:
        self._context = context
        super().__init__(heartbeats.count, self._context)
        self.setup = setup
        self._oom_kills = oom_kills()
        self._dead_since: float | None = None
        self._stopwatch = Stopwatch()
        self._waiting: dict[int, float] = {}  # tasks for any worker to take, first seen when
        self._looked_at: set[int] = set()  # tasks under way at the last look
        self.heartbeats = heartbeats
        self._logs = logs
        self.leaving = False
        self.unfinished: dict[int, Future[Reply]] = {}
        self.lost: set[int] = set()

    @property
    def workers(self) -> list[WorkerProcess]:
        """The worker processes in the order of their numbers, also those that ended."""
        return self._context.workers

    def is_ready(self, index: int) -> bool:
        """Return whether a worker has loaded the dataset."""
        return bool(self.heartbeats.last(index).task)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        is_done = self.leaving and self.manager is not None and not self.manager.is_alive()
        return is_done or self.broken

    def send(self, task: TaskMessage) -> Future[Reply]:
        """Submit a task to the workers."""
        future = self.submit(run, task)
        self.unfinished[task.id] = future
        future.add_done_callback(partial(_note_done, self.unfinished, self.lost, task.id))
        return future

    def _fail(self, reason: str) -> None:
        """Give all tasks under way an error, unless they are done just now."""
        for future in snapshot(self.unfinished.values()):
            finish(future, BrokenProcessPool(reason))

    def leave(self, *, drop: bool) -> None:
        """Take no more tasks; ``drop`` those that no worker has begun with."""
        self.leaving = True
        self.shutdown(wait=False, cancel_futures=drop)

    def end(self, deadline: float) -> None:
        """Wait for the workers to leave until ``deadline`` (monotonic clock), then kill them."""
        self.leave(drop=True)
        self._reveal_deaths()
        alive = {worker.sentinel: worker for worker in self.workers}
        while alive and (left := deadline - time.monotonic()) > 0:
            for sentinel in wait(list(alive), left):
                del alive[sentinel]
        self._kill([worker for worker in alive.values() if not worker.has_ended()])
        for worker in self.workers:
            worker.kill_group()  # one that left by itself may have left others
        # The manager thread reaps the processes and closes the pipes; it ends at once now.
        if self.manager is not None:
            self.manager.join(GRACE)
            if self.manager.is_alive():
                self.break_up("the workers have ended")
                self.manager.join(GRACE)
        if self.manager is None:  # it could not start
            for worker in self.workers:
                worker.join(GRACE)
        self._fail("the workers have ended")

    def clean_up(self) -> None:
        """Remove what the workers may have left; the last thing, when they have ended."""
        codes = [worker.exitcode for worker in self.workers]  # of each: to look is to reap
        self.heartbeats.close()
        self._logs.close(GRACE)
        killed = [pid for worker in self.workers for pid in worker.killed]
        if self.broken or any(codes):
            killed += kill_marked(TOKEN, self.setup.token)
        reap_orphans([worker.pid for worker in self.workers], killed, GRACE)

    def _reveal_deaths(self) -> list[WorkerProcess]:
        """Return the workers that have ended. Forks that they left, which hide that, are killed."""
        dead = [worker for worker in self.workers if worker.has_ended()]
        for worker in dead:
            worker.kill_group()
        return dead

    def _kill(self, workers: list[WorkerProcess]) -> None:
        for worker in workers:
            worker.ended_by_us = True
        _kill(workers)

    def mark_broken(self, reason: str) -> None:
        # Only what has ended by now is to blame. Others may still take a task, and leave well.
        for worker in self.workers:
            worker.ended_by_us |= not worker.has_ended()
        super().mark_broken(reason)

    def watch(self, timeout: float | None) -> None:
        """Kill workers whose batch takes longer than ``timeout``; find out whether it is stuck."""
        if self.broken:
            return
        if timeout is not None:
            self._stopwatch.look(timeout)
            self._kill_late(timeout)
            self._kill_idle(timeout)
        # The manager thread notices a death at once, unless it is in the middle of a message that
        # the dead did not finish: then it waits for the rest for ever.
        # Nor does it where the dead left a fork behind that detached itself.
        dead = self._reveal_deaths()
        manager = self.manager
        reason = ""
        if manager is not None and not manager.is_alive() and self.unfinished:
            # It has ended with an error: Ctrl-C came in the middle of the executor's submit(),
            # which then gave a number twice.
            reason = "the executor's thread has ended"
        elif not dead or (self.leaving and not self.unfinished):
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > STUCK:
            reason = "a worker died while it sent a reply"
        if reason:
            self._kill([worker for worker in self.workers if worker not in dead])
            self._fail(reason)
            self.break_up(reason)

    def _kill_late(self, timeout: float) -> None:
        for n, worker in enumerate(self.workers):
            heartbeat = self.heartbeats.last(n)
            is_late = not worker.fault and self._is_late(worker, heartbeat, timeout)
            if not is_late or worker.has_ended():  # by itself
                continue
            stack = self._stack(worker)
            if self._is_late(worker, self.heartbeats.last(n), timeout):  # it has not gone on
                starts = heartbeat.task == 0
                fault = f"its start took too long, here:\n{stack}" if starts else TOO_LONG
                self._kill_for(worker, fault, stack)

    def _is_late(self, worker: WorkerProcess, heartbeat: Heartbeat, timeout: float) -> bool:
        if heartbeat.task == 0:  # it has not started
            late = self._stopwatch.since(worker.began) > max(timeout, LONGEST_START)
            return late and bool(self.unfinished)
        late = self._stopwatch.since(heartbeat.began) > timeout
        return late and heartbeat.task in self.unfinished

    def _kill_idle(self, timeout: float) -> None:
        """Kill workers that make nothing, while tasks wait for them, or replies are to be sent.

        A worker may be stopped, or a thread of it hold the interpreter, when it is to send a reply,
        or take the next task. If it is its turn, the others wait for it.
        """
        beats = [self.heartbeats.last(n) for n in range(len(self.workers))]
        making = {beat.task for beat in beats if beat.began < math.inf and beat.task > 0}
        making &= self.unfinished.keys()
        made = {beat.task for beat in beats} - making
        has_read_all = not self.has_replies  # else it is this process that has not come to a reply
        # A future runs when its task is where any worker can take it.
        waiting = [
            task
            for task, future in snapshot(self.unfinished.items())
            if task not in making and future.running() and (has_read_all or task not in made)
        ]
        now = self._stopwatch.last
        tasks = set(snapshot(self.unfinished))
        if not has_read_all and tasks == self._looked_at:
            # This process has read nothing since the last look: nobody is late.
            self._waiting = dict.fromkeys(self._waiting, now)
        self._looked_at = tasks
        # When that was seen for the first time; those that a worker has taken since are gone.
        self._waiting = {task: self._waiting.get(task, now) for task in waiting}
        since = self._stopwatch.since
        overdue = {task for task, seen in self._waiting.items() if since(seen) > timeout}
        # A worker that reads ahead has the next task, too, while it makes the batches of one.
        if len(overdue) <= len(making) or any(worker.fault for worker in self.workers):
            return  # if one was killed, the others are about to be replaced
        stacks = {}
        for n, worker in enumerate(self.workers):
            beat = beats[n]
            if beat.task and beat.task not in making and not worker.has_ended():
                stack = self._stack(worker)
                if self.heartbeats.last(n) == beat:  # else it was between two tasks just then
                    stacks[worker] = stack
        if len(overdue & self.unfinished.keys()) <= len(making):
            return  # replies have come meanwhile, which the manager thread had already read
        # Of several, those are to blame that do not answer, if there are any.
        silent = [worker for worker, stack in stacks.items() if not stack]
        for worker in silent or stacks:
            stack = stacks[worker] or "(the worker did not answer)"
            self._kill_for(worker, f"{STOOD_STILL}\n{stack}", stacks[worker])

    def _stack(self, worker: WorkerProcess) -> str:
        return self.heartbeats.stack(partial(send_signal, worker), GRACE)

    def _kill_for(self, worker: WorkerProcess, fault: str, stack: str) -> None:
        worker.fault = fault
        worker.stack = stack
        _kill([worker])

    def deaths(self) -> Iterator[tuple[Heartbeat, Death]]:
        """Find the workers that died by themselves, or were killed for taking too long."""
        out_of_memory = oom_kills() > self._oom_kills
        for n, worker in enumerate(self.workers):
            if worker.ended_by_us and not worker.fault:
                continue
            heartbeat = self.heartbeats.last(n)
            if worker.fault:
                cause = f"killed, since {worker.fault}"
            else:
                cause = _exit_text(worker.exitcode, out_of_memory)
            yield (
                heartbeat,
                Death(
                    item=heartbeat.item,
                    worker=self.setup.infos[n].id,
                    pid=worker.pid,
                    exitcode=worker.exitcode,
                    cause=cause,
                    stack=worker.stack,
                    sample_number=heartbeat.sample_number,
                    crash=self.heartbeats.crash() if -(worker.exitcode or 0) in CRASHES else "",
                ),
            )


def _note_done(
    unfinished: dict[int, Future[Reply]], lost: set[int], task_id: int, future: Future[Reply]
) -> None:
    """Note that a task of an executor is done.

    It does not know the executor: the future leads here, and it would lead to a cycle. The
    collector, which would have to find that, may come while the system's semaphores are counted,
    which CPython 3.12 refuses.
    """
    unfinished.pop(task_id, None)
    if not future.cancelled() and future.exception() is not None:
        lost.add(task_id)


def _exit_text(exitcode: int | None, out_of_memory: bool) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    name = ""
    with suppress(ValueError):  # a real-time signal
        name = f" ({signal.Signals(-exitcode).name})"
    text = f"killed by signal {-exitcode}{name}"
    if exitcode != -getattr(signal, "SIGKILL", 9):
        return text
    if out_of_memory and memory_limit() < NO_LIMIT:
        return f"{text}: out of memory, by the limit of {memory_limit()} bytes of a control group"
    return f"{text}: the machine may be out of memory"


@dataclass(eq=False, repr=False, kw_only=True)
class ProcessPool(RemotePool):
    """Makes batches in worker processes, started when there is work for them.

    Args:
        job: what the workers work on, serialized once for all of them, or to be had by fork.
        context: how to start them.
        timeout: seconds that a batch may take.
    """

    job: JobFile | ForkedJob
    context: BaseContext
    timeout: float | None = None
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_executable(self.context.get_start_method())
        if getattr(sys, "frozen", False):
            # A worker of a frozen program, as PyInstaller makes it, is that program once more: here
            # it becomes a worker, and does not come back. Others begin at once.
            multiprocessing.spawn.freeze_support()
        super().__post_init__()
        self._deaths: dict[int, Death] = {}  # by lost task that the worker was just running
        # How those ended that never got ready, one after another.
        self._failed_starts: list[str] = []
        self._lock = threading.RLock()
        self._executors: list[_Executor] = []  # the last one takes tasks
        self._closed = False
        _pools.add(self)

    @property
    def _last(self) -> _Executor | None:
        """The executor that takes tasks; None if there is none, or it is leaving."""
        return next((each for each in self._executors[-1:] if not each.leaving), None)

    def _current(self) -> _Executor:
        """The executor that takes tasks, a new one if need be."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        self.end_broken()
        if len(self._failed_starts) >= MOST_FAILED_STARTS:
            raise WorkerDied(
                f"workers cannot be started: {len(self._failed_starts)} in a row died before "
                f"they were ready ({self._failed_starts[-1]}); look at what the dataset does when "
                "it is unpickled, at worker_init_fn, and at the machine's memory and limits"
                + wrong_executable(self.context.get_start_method())
            )
        executor = self._last
        if executor is None:
            with interrupts_held():  # it would leave what is open by then
                executor = self._new_executor()
                self._executors.append(executor)
        return executor

    def _new_executor(self) -> _Executor:
        refuse_avalanche()
        infos = self.infos  # once: another thread may set num_workers
        heartbeats = Heartbeats(len(infos))
        logs = LogReader()
        try:
            setup = WorkerSetup(
                address=self.job.address,
                heartbeats=heartbeats.path,
                token=secrets.token_hex(8),
                infos=infos,
                logs=logs.sender,
                log_settings=LogSettings.of_this_process(),
                libraries=LibrarySettings.of_this_thread(),
            )
            free = locks(self.job.obj) if isinstance(self.job, ForkedJob) else []
            context = _WorkerContext(self.context, setup, self.job.inherited, free)
            return _Executor(setup, heartbeats, logs, context)
        except BaseException as error:  # no descriptors, no semaphores
            heartbeats.close()
            logs.close(GRACE)
            advice = wrong_executable(self.context.get_start_method())
            if isinstance(error, BrokenPipeError) and advice:  # the resource tracker has ended
                raise RuntimeError(f"workers cannot be started{advice}") from error
            raise

    def _collect_deaths(self, executor: _Executor) -> None:
        for heartbeat, death in executor.deaths():
            self.replaced += 1
            if heartbeat.task == 0 or (heartbeat.task == READY and death.stack is not None):
                self._failed_starts.append(death.cause)
            if heartbeat.task in executor.lost:
                self._deaths[heartbeat.task] = death
                continue  # whoever has sent the task says what it was
            logger.warning(
                "worker %d (pid %d) died: %s; the workers are replaced, and what was under way "
                "is made again",
                death.worker,
                death.pid,
                death.cause,
            )

    def submit(self, task: TaskMessage) -> Future[Reply]:
        with self._lock:
            return self._current().send(task)

    def start(self) -> None:
        with self._lock:
            self.forgive_failed_starts()
            # If it breaks just now, another takes its place with the first task.
            with suppress(BrokenExecutor):
                executor = self._current()
                while executor.may_start_workers:
                    with interrupts_held():
                        executor.submit(warm_up)  # starts a worker, unless one is idle

    def watch(self) -> None:
        with self._lock:
            for executor in self._executors:
                executor.watch(self.timeout)

    def end_broken(self) -> None:
        with self._lock:
            # If the pool is closed, end() does it.
            over = [each for each in self._executors if each.is_over and not self._closed]
            for executor in over:
                executor.end(time.monotonic() + GRACE)
                with interrupts_held():  # a death counts once
                    self._executors.remove(executor)
                    if executor.broken:
                        self._collect_deaths(executor)
                    executor.clean_up()

    def take_death(self, task_id: int) -> Death | None:
        return self._deaths.pop(task_id, None)

    def forgive_failed_starts(self) -> None:
        self._failed_starts.clear()

    def renew(self, pid: int, why: str) -> None:
        with self._lock:
            # Others are leaving already: all that they still send says the same.
            executor = self._last
            if executor is not None and pid in [worker.pid for worker in executor.workers]:
                logger.warning(
                    "%s: all workers are replaced, as soon as they have done what they were given",
                    why,
                )
                self.replaced += len(executor.workers)
                executor.leave(drop=False)

    def replace_workers(self) -> None:
        with self._lock:
            executor = self._last
            if executor is not None:
                executor.leave(drop=False)

    def needs(self, thread: threading.Thread) -> bool:
        return any(executor.needs(thread) for executor in snapshot(self._executors))

    def leave(self) -> None:
        self._closed = True
        for executor in list(self._executors):
            executor.leave(drop=True)

    def end(self, deadline: float) -> None:
        with self._lock:
            # The collector may come meanwhile, and end the pool within this.
            while last := self._executors[-1:]:
                (executor,) = last
                executor.end(deadline)
                executor.clean_up()
                # Only now: Ctrl-C meanwhile leaves the rest to the exit.
                with suppress(ValueError):
                    self._executors.remove(executor)
        super().end(deadline)


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    """End every worker when the interpreter exits, all of them within one GRACE."""
    close_pools(_pools)


register_exit(_close_all)
