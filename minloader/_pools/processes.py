"""Worker processes of our own: a pool of them that loses no task and leaves nothing behind.

A pool has a list of executors, the last of which takes tasks. The states of one, and who moves it::

     _newest()               replace_workers(): they grew too large, or have other settings
    -----------> [ current ] -------------------------------> [ leaving ]
                     |                                          |     | all its tasks are done
                     | a worker died: the manager thread sees   |     |
                     | it, or else watch() does, after STUCK    |     |
                     v                                          |     |
                 [ broken ] <-----------------------------------+     |
                     |                                                v
                     +------------------ look() ------------------> [ ended ]

All but the manager thread's own move happens in the thread of the pool, see ``served.py``.

Guarantees:

1. Each ticket is finished: with its reply; or, when its executor was buried, with an error, and
   with the death of the worker that was making it; at the latest when the pool is closed.
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
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, ClassVar

from minloader._errors import WorkerDied
from minloader._memory import forks
from minloader._memory.job_file import ForkedJob, JobFile
from minloader._memory.limits import NO_LIMIT, memory_limit, oom_kills
from minloader._pools.base import GRACE, POOL_CLOSED, close_pools
from minloader._pools.cpython import Executor, register_exit, send_signal, start_worker
from minloader._pools.environment import check_executable, hash_seed, wrong_executable
from minloader._pools.served import ServedPool, UnderWay
from minloader._pools.ticket import Bell, Death, Ticket
from minloader._protocols import snapshot
from minloader._worker.entry import run, warm_up, worker_main
from minloader._worker.heartbeat import READY, Heartbeats
from minloader._worker.messages import TaskMessage
from minloader._worker.plugins import Plugin
from minloader._worker.setup import TOKEN, WorkerSetup
from minloader._worker.signals import (
    handled_signals,
    kill_group,
    kill_marked,
    kill_trees,
    reap_orphans,
)

if TYPE_CHECKING:
    from minloader._pools.worker_plugins import WorkerPlugins

logger = logging.getLogger("minloader")

MOST_FAILED_STARTS = 8
"""How many workers in a row may die before they are ready. Fewer might be bad luck."""

LONGEST_START = 60.0
"""Seconds that a worker may take to load the dataset, if ``timeout`` is set and not longer. On a
busy machine the imports of many workers take their time."""

MOST_UNWATCHED = 0.25
"""Share of ``timeout``. A longer gap between two looks after the workers counts as nothing: the
program was stopped meanwhile, or the machine slept, or the consumer was busy."""

TOO_LONG = "a batch took too long"
"""Why a worker is killed that makes a batch for longer than ``timeout``."""

STARTS = "its start took too long, here:"
"""The same of one that has not started."""

STOOD_STILL = "it stood still while a task waited that no worker began with; it was at"
"""Why one is killed that makes nothing, where none begins with anything for longer than that."""

PATIENCE = 0.5
"""Seconds that tasks are under way before it is looked whether a worker is stuck."""

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
        before = signal.pthread_sigmask(signal.SIG_BLOCK, held) if masks else ()
        try:
            # A fork hashes as its parent does, and would have the lock of the environment for ever.
            with nullcontext() if self._forks else hash_seed(self._seed):
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
        inheritance = None
        if self._inherited:
            from minloader._memory.inherited import Inheritance  # of few jobs

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
        oom_kills: how many processes the kernel had killed before, for want of memory.
        leaving: whether it takes no more tasks.
        under_way: its tasks.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        heartbeats: Heartbeats,
        plugins: WorkerPlugins,
        context: _WorkerContext,
        wake: Callable[[], object],
    ) -> None:
        self._context = context
        super().__init__(heartbeats.count, self._context)
        self.setup = setup
        self.oom_kills = oom_kills()
        self._dead_since: float | None = None
        self._stopwatch = Stopwatch()
        self._signs: Any = None  # of life, at the last look
        self._still_since = 0.0  # when they were seen first
        self.heartbeats = heartbeats
        self._plugins = plugins
        self.leaving = False
        self.under_way = UnderWay()
        self._wake = wake

    @property
    def workers(self) -> list[WorkerProcess]:
        """The worker processes in the order of their numbers, also those that ended."""
        return self._context.workers

    @property
    def has_left(self) -> bool:
        """Whether all its tasks are done, and it takes no more."""
        return self.leaving and self.manager is not None and not self.manager.is_alive()

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
        self.under_way.lose_all(BrokenProcessPool("the workers have ended"))

    def clean_up(self) -> None:
        """Remove what the workers may have left; the last thing, when they have ended."""
        codes = {worker.exitcode for worker in self.workers}  # of each: to look is to reap
        self.heartbeats.close()
        self._plugins.close(GRACE)
        killed = [pid for worker in self.workers for pid in worker.killed]
        if self.broken or codes - {0}:  # None: another thread is just reaping it
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
        self._wake()

    def watch(self, timeout: float | None) -> None:
        """Kill workers whose batch takes longer than ``timeout``; find out whether it is stuck."""
        if self.broken:
            return
        if timeout is not None:
            self._stopwatch.look(timeout)
            self._kill_late(timeout)
        # The manager thread notices a death at once, unless it is in the middle of a message that
        # the dead did not finish: then it waits for the rest for ever.
        # Nor does it where the dead left a fork behind that detached itself.
        dead = self._reveal_deaths()
        if not dead or (self.leaving and not self.under_way.unfinished):
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > STUCK:
            self._kill([worker for worker in self.workers if worker not in dead])
            self.break_up("a worker died while it sent a reply")

    def _kill_late(self, timeout: float) -> None:
        """Kill workers that are at something for too long, or all at nothing while tasks wait."""
        unfinished = set(snapshot(self.under_way.unfinished))
        beats = [self.heartbeats.last(n) for n in range(len(self.workers))]
        signs = unfinished, beats
        # While there are replies, it is this process that has not come to them.
        if signs != self._signs or self.has_replies:
            self._signs = signs
            self._still_since = self._stopwatch.last
        making = unfinished.intersection([beat.task for beat in beats if beat.began < math.inf])
        for n, worker in enumerate(self.workers):
            beat = beats[n]
            tasks, began, limit, fault = {beat.task}, beat.began, timeout, TOO_LONG
            if not beat.task:
                tasks, began, fault = unfinished, worker.began, STARTS
                limit = max(timeout, LONGEST_START)
            elif not making and not any([each.fault for each in self.workers]):
                # One may be stopped, or a thread of it hold the interpreter, when it is to send a
                # reply, or take the next task. If it is its turn, the others wait for it. One is
                # killed: all are replaced then.
                tasks, began, fault = unfinished, self._still_since, STOOD_STILL
            elif beat.task not in making:
                continue
            is_late = bool(tasks) and self._stopwatch.since(began) > limit
            if not is_late or worker.fault or worker.has_ended():  # by itself
                continue
            stack = self._stack(worker)
            # Else it has gone on, but for a sample of the same batch, or the replies have come.
            is_under_way = tasks <= self.under_way.unfinished.keys()
            if is_under_way and self.heartbeats.last(n)[1:] == beat[1:]:
                if fault is not TOO_LONG:
                    fault += f"\n{stack or '(the worker did not answer)'}"
                worker.fault = fault
                worker.stack = stack
                _kill([worker])

    def _stack(self, worker: WorkerProcess) -> str:
        return self.heartbeats.stack(partial(send_signal, worker), GRACE)


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
class ProcessPool(ServedPool):
    """Makes batches in worker processes, started when there is work for them.

    Args:
        job: what the workers work on, serialized once for all of them, or to be had by fork.
        context: how to start them.
        timeout: seconds that a batch may take.
        plugins: what else hangs on the workers.
    """

    job: JobFile | ForkedJob
    context: BaseContext
    plugins: list[Plugin]
    timeout: float | None = None
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_executable(self.context.get_start_method())
        if getattr(sys, "frozen", False):
            # A worker of a frozen program, as PyInstaller makes it, is that program once more: here
            # it becomes a worker, and does not come back. Others begin at once.
            multiprocessing.spawn.freeze_support()
        super().__post_init__()
        # How those ended that never got ready, one after another.
        self._failed_starts: list[str] = []
        self._executors: list[_Executor] = []  # also those that are leaving
        self._next_watch = 0.0
        _pools.add(self)

    def _newest(self) -> _Executor:
        """Return the executor that takes tasks, a new one if need be."""
        if self.closed:
            raise RuntimeError(POOL_CLOSED)
        self.look()  # one that has broken ends, and gives its slots back
        executor: _Executor | None = self.executor
        if executor is None:
            if len(self._failed_starts) >= MOST_FAILED_STARTS:
                raise WorkerDied(
                    f"workers cannot be started: {len(self._failed_starts)} in a row died before "
                    f"they were ready ({self._failed_starts[-1]}); look at what the dataset does "
                    "when it is unpickled, at worker_init_fn, and at the machine's memory and "
                    "limits" + wrong_executable(self.context.get_start_method())
                )
            self.executor = executor = self._new_executor()
            self._executors.append(executor)
        return executor

    def _new_executor(self) -> _Executor:
        infos = self.infos  # once: the consumer's thread may set num_workers
        heartbeats = Heartbeats(len(infos))
        plugins = self._make_plugins()
        try:
            setup = WorkerSetup(
                address=self.job.address,
                heartbeats=heartbeats.path,
                token=secrets.token_hex(8),
                infos=infos,
                plugins=plugins.sent,
            )
            free = []
            if isinstance(self.job, ForkedJob):
                from minloader._worker.own_generators import locks  # of forked ones

                free = locks(self.job.obj)
            context = _WorkerContext(self.context, setup, self.job.inherited, free)
            wake = partial(self._inbox.put, int)
            return _Executor(setup, heartbeats, plugins, context, wake)
        except BaseException as error:  # no descriptors, no semaphores
            heartbeats.close()
            plugins.close(GRACE)
            advice = wrong_executable(self.context.get_start_method())
            if isinstance(error, BrokenPipeError) and advice:  # the resource tracker has ended
                raise RuntimeError(f"workers cannot be started{advice}") from error
            raise

    def _collect_deaths(self, executor: _Executor) -> None:
        """Find the workers that died by themselves, or were killed for taking too long.

        Tickets of those who are to blame are told, and else the log.
        """
        if executor.under_way.have_come:
            self.forgive_failed_starts()  # the machine can start workers
        out_of_memory = oom_kills() > executor.oom_kills
        for n, worker in enumerate(executor.workers):
            if worker.ended_by_us and not worker.fault:
                continue
            beat = executor.heartbeats.last(n)
            has_crashed = (worker.exitcode or 0) not in (0, -getattr(signal, "SIGKILL", 9))
            cause = f"killed, since {worker.fault}"
            death = Death(
                item=beat.item,
                worker=executor.setup.infos[n].id,
                pid=worker.pid,
                exitcode=worker.exitcode,
                cause=cause if worker.fault else _exit_text(worker.exitcode, out_of_memory),
                stack=worker.stack,
                sample_number=beat.sample_number,
                crash=executor.heartbeats.crash() if has_crashed else "",
            )
            self.replaced += 1
            if beat.task == 0 or (beat.task == READY and worker.fault):
                self._failed_starts.append(death.cause)
            ticket, _ = executor.under_way.lost.get(beat.task, (None, None))
            # One that we killed when it had made all of a task stood still for no fault of that.
            stood_still = worker.fault and beat.began == math.inf
            if ticket is not None and not ticket.is_dropped and not stood_still:
                ticket.death = death
                continue  # whoever has sent the task says what it was
            logger.warning(
                "worker %d (pid %d) died: %s; the workers are replaced, and what was under way "
                "is made again",
                death.worker,
                death.pid,
                death.cause,
            )

    # --- in the consumer's thread

    def prepare(self) -> None:
        from minloader._pools.worker_plugins import plugins_of_this_thread

        # Settings of the pool's own thread would be others.
        self._make_plugins = plugins_of_this_thread(self.plugins)
        super().prepare()
        if self.context.get_start_method() == "fork":
            # A fork has all as it is now, and while this thread waits here.
            self._start()

    def start(self) -> None:
        self.forgive_failed_starts()
        if self.executor is None:
            self.prepare()
        error = self._start()
        if error is not None:
            raise error

    def _start(self) -> BaseException | None:
        """Start all workers, and wait for that. Return what came in between."""
        bell = Bell()
        ticket = Ticket(bell)
        self.ask(self._start_all, ticket)
        while not ticket.is_done:
            bell.wait()
        return ticket.error

    def renew(self, pid: int, why: str) -> None:
        self._inbox.put(partial(self._retire, pid, why))

    def replace_workers(self) -> None:
        self._inbox.put(self._retire)

    def forgive_failed_starts(self) -> None:
        self._failed_starts.clear()

    # --- in the pool's thread

    def hand_over(self, ticket: Ticket, task: TaskMessage) -> None:
        executor: _Executor | None = self.executor
        if executor is None or executor.broken:
            executor = self._newest()
        executor.under_way.follow(executor.submit(run, task), ticket, task.id)

    def _start_all(self, ticket: Ticket) -> None:
        try:
            # If it breaks just now, another takes its place with the first task.
            with suppress(BrokenExecutor):
                executor = self._newest()
                while executor.may_start_workers:
                    executor.submit(warm_up)  # starts a worker, unless one is idle
            ticket.finish(None)
        except BaseException as error:
            ticket.fail(error)

    def _retire(self, pid: int | None = None, why: str = "") -> None:
        """Have the workers leave when they are done, all of them or those of a process."""
        executor: _Executor | None = self.executor
        # Others are leaving already: all that they still send says the same.
        if executor is None or (why and pid not in [worker.pid for worker in executor.workers]):
            return
        if why:
            logger.warning(
                "%s: all workers are replaced, as soon as they have done what they were given", why
            )
            self.replaced += len(executor.workers)
        executor.leave(drop=False)
        self.executor = None

    def look(self) -> float | None:
        now = time.monotonic()
        for executor in list(self._executors):
            if executor.broken or (executor.leaving and executor.has_left):
                self._end(executor, now + GRACE)
        if not any([each.under_way.unfinished or each.leaving for each in self._executors]):
            return None
        patience = PATIENCE if self.timeout is None else min(PATIENCE, self.timeout / 8)
        if now > self._next_watch:
            self.watch()
            self._next_watch = now + patience
        return patience

    def watch(self) -> None:
        """Look for workers that are stuck."""
        for executor in self._executors:
            executor.watch(self.timeout)

    def end_all(self) -> None:
        for executor in self._executors:
            executor.leave(drop=True)
        while self._executors:
            self._end(self._executors[-1], self.deadline)

    def _end(self, executor: _Executor, deadline: float) -> None:
        """End an executor that has broken, or left, and finish the tickets that it has lost."""
        if self.executor is executor:
            self.executor = None
        executor.end(deadline)
        self._executors.remove(executor)
        if executor.broken and not self.closed:
            self._collect_deaths(executor)
        executor.clean_up()
        for ticket, error in executor.under_way.lost.values():
            ticket.fail(error)


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _close_all() -> None:
    """End every worker when the interpreter exits, all of them within one GRACE."""
    close_pools(_pools)


register_exit(_close_all)
forks.in_child.append(_pools.clear)  # they are the parent's
