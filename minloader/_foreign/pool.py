"""A pool over an executor of the user's, and the group of such pools."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import deque
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from minloader._foreign.worker import (
    JobMissing,
    JobReference,
    forget,
    keep_here,
    run_task,
    versions,
)
from minloader._memory import forks
from minloader._memory.job_file import ForkedJob, JobFile
from minloader._memory.slots import Slots
from minloader._pools.base import POOL_CLOSED
from minloader._pools.group import PoolGroup
from minloader._pools.served import ServedPool, UnderWay
from minloader._pools.ticket import Ticket
from minloader._worker.messages import Job, Reply, TaskMessage, WorkerInfo


def _is_of(executor: Executor, package: str) -> bool:
    """Whether the class of an executor, or one that it derives from, is of a package."""
    return any(each.__module__.partition(".")[0] == package for each in type(executor).__mro__)


class JobSender:
    """Has an executor send the job to its workers on other machines.

    Args:
        executor: the user's.
        job_file: the job.
    """

    def __init__(self, executor: Executor, job_file: JobFile) -> None:
        self._job_file = job_file
        self._process = forks.process
        self._client: Any = getattr(executor, "_client", None)  # Dask's
        self._lacking: deque[str] = deque()  # where workers are that lack the job
        self._scattered: Any = None  # Dask's future of it

    def look(self, done: Future[Reply]) -> None:
        """Note whether the worker that had a task lacks the job."""
        if done.cancelled() or done.exception():
            return
        reply: Reply | JobMissing = done.result()
        if isinstance(reply, JobMissing):
            self._lacking.append(reply.address)

    def attach(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what the next task takes along, and how it is submitted then.

        Returns:
            The job, as bytes or as Dask's future of them; nothing if no worker is known to lack it.
        """
        try:
            where = self._lacking.popleft()
        except IndexError:
            return [], {}
        if not where:
            return [bytes(self._job_file.content())], {}
        if self._scattered is None:
            import numpy as np

            data = np.frombuffer(self._job_file.content(), np.uint8)
            self._scattered = self._client.scatter(data, workers=[where], hash=False)
        # Another worker may run the task too, should this one die.
        return [self._scattered], {"workers": [where], "allow_other_workers": True}

    def close(self) -> None:
        """Have the workers of a Dask cluster let the job go. Does not wait for them."""
        scattered = self._scattered
        self._scattered = None
        if scattered is not None and forks.process is self._process:
            threading.Thread(target=self._tell, name="minloader-job", daemon=True).start()

    def _tell(self) -> None:
        with suppress(Exception):  # the cluster is gone, or about to go, and the job with it
            self._client.run(forget, self._job_file.mark, on_error="ignore")


@dataclass(eq=False, repr=False, kw_only=True)
class ForeignPool(ServedPool):
    """Makes batches in an executor that the user brought, and will shut down.

    Args:
        users: the executor.
        owner: the process that made it.
        job: what batches are made from, in threads.
        sent: the same, as processes get it; None in threads.
        sender: sends it to workers on other machines; None where there are none.
    """

    users: Executor
    owner: int
    job: Job
    sent: JobFile | ForkedJob | None
    sender: JobSender | None

    def __post_init__(self) -> None:
        super().__post_init__()
        job = self.sent
        assert not isinstance(job, ForkedJob)
        self._reference = JobReference(
            mark=secrets.token_hex(8) if job is None else job.mark,
            num_workers=len(self.infos),
            seed=self.infos[0].seed,
            versions=versions(),
            address=None if job is None else job.address,
            may_be_remote=self.sender is not None,
        )
        self._job = keep_here(self._reference.mark, self.job)
        self._under_way = UnderWay(is_buried=False)
        self._options: dict[str, Any] = {}
        if _is_of(self.users, "distributed"):
            # Equal calls are not one; and without delay an earlier one comes first.
            self._options = {"pure": False, "fifo_timeout": "0 ms"}

    def prepare(self) -> None:
        if os.getpid() != self.owner:  # in a fork nothing would ever run
            raise RuntimeError(
                f"executor belongs to process {self.owner}, of which this one is a fork; make the "
                "Loader and its executor here"
            )
        super().prepare()
        self.executor = self.users

    def hand_over(self, ticket: Ticket, task: TaskMessage) -> None:
        if self.closed:
            raise RuntimeError(POOL_CLOSED)
        reference = self._reference._replace(num_workers=len(self.infos))
        sender = self.sender
        job, options = ([], {}) if sender is None else sender.attach()
        # Of a reply, or of JobMissing.
        sent: Future[Any] = self.users.submit(
            run_task, reference, task, *job, **self._options | options
        )
        if sender is not None:
            sent.add_done_callback(sender.look)  # before whoever sends the task again
        self._under_way.follow(sent, ticket, task.id)

    def end_all(self) -> None:
        self._under_way.lose_all(CancelledError())
        for ticket, error in self._under_way.lost.values():
            ticket.cancel()
            ticket.fail(error)

    def is_death(self, error: BaseException) -> bool:
        # Dask runs a task again by itself, until it has seen too many workers die with it.
        killed = getattr(sys.modules.get("distributed.scheduler"), "KilledWorker", ())
        return isinstance(error, killed)


@dataclass(eq=False, repr=False, kw_only=True)
class ForeignPoolGroup(PoolGroup):
    """Workers of an executor of the user's.

    Attributes:
        owner: the process that made the executor.
        sender: sends the job to workers on other machines; None where there are none.
    """

    executor: Executor
    owner: int = field(default_factory=os.getpid)
    sender: JobSender | None = None

    def __post_init__(self) -> None:
        """Refuse an executor that cannot make the batches."""
        options = self.job.options
        # From 3.14. It derives from ThreadPoolExecutor. If there is one, its module is imported.
        interpreters: Any = sys.modules.get("concurrent.futures.interpreter")
        if isinstance(self.executor, getattr(interpreters, "InterpreterPoolExecutor", ())):
            raise ValueError(
                "an InterpreterPoolExecutor cannot make batches, since numpy does not load in a "
                "sub-interpreter; use executor='thread', executor='process' or a "
                "ProcessPoolExecutor"
            )
        if options.is_stream:
            raise ValueError(
                "an executor of your own gives a task to any of its workers, but a stream (an "
                "iterable dataset) is read on by the worker that has begun it; use "
                "executor='process' or 'thread'"
            )
        super().__post_init__()

    @property
    def kind(self) -> str:
        if not self.num_workers:
            return super().kind
        return "thread" if isinstance(self.executor, ThreadPoolExecutor) else "foreign"

    @property
    def start_method(self) -> None:
        return None

    @property
    def is_local(self) -> bool:
        """Whether the executor is known to run its tasks on this machine, and each of them once."""
        return isinstance(self.executor, ProcessPoolExecutor) or _is_of(self.executor, "loky")

    def send_job(self) -> JobFile:
        sent = super().send_job()
        assert isinstance(sent, JobFile)  # nobody is forked
        if not self.is_local:
            self.sender = JobSender(self.executor, sent)
        return sent

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        super().close()

    def new_pool(self, infos: list[WorkerInfo], slots: Slots | None) -> ForeignPool:
        return ForeignPool(
            infos=infos,
            slots=slots,
            users=self.executor,
            owner=self.owner,
            job=self.job,
            sent=self.sent,
            sender=self.sender,
        )
