"""The pool that makes batches in the calling process, where there are no workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from minloader._errors import breaks_in
from minloader._pools.base import Pool
from minloader._pools.ticket import Bell, Ticket
from minloader._worker.environment import InlineEnvironment
from minloader._worker.make import make_worker
from minloader._worker.messages import Job, Reply, TaskMessage
from minloader._worker.run import Worker
from minloader._worker.seeds import in_turn


@dataclass(eq=False, repr=False, kw_only=True)
class InlinePool(Pool):
    """Makes each batch in the calling process, when it is submitted.

    Args:
        job: what to make batches from.
    """

    job: Job
    is_inline: ClassVar[bool] = True
    _worker: Worker | None = None

    def submit(self, task: TaskMessage, bell: Bell) -> Ticket:
        return Ticket(bell, task)

    def wait(self, ticket: Ticket, bell: Bell) -> None:
        """Make the batches of a task. After Ctrl-C it has not been done."""
        assert ticket.task is not None
        try:
            reply = in_turn(self._run, self.pack(ticket.task))
        except Exception as error:
            if breaks_in(error):
                raise
            ticket.step = "sending"
            ticket.fail(error)
        else:
            ticket.finish(reply)

    def _run(self, task: TaskMessage) -> Reply:
        if self._worker is None:
            environment = InlineEnvironment(is_stream=self.job.options.is_stream)
            self._worker = make_worker(self.job, replace(self.infos[0]), environment)
        return self._worker.run(task)

    def replace_workers(self) -> None:
        if self._worker is not None:
            in_turn(self._worker.rewind)  # those that come are sent the user's own object

    def end(self, deadline: float) -> None:
        super().end(deadline)
        self._worker = None  # a stream that was left has files open, or programs
