"""Samples that are read before their batches are made, where the dataset is :class:`concurrent`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minloader._protocols import checked_indices
from minloader._worker.environment import Environment
from minloader._worker.messages import Job, TaskMessage, WorkerInfo, begin_batch


class EarlyReads:
    """What one worker reads of its tasks before it makes them.

    Args:
        job: what it makes them from.
        info: what the user's code is told about where it runs.
        environment: where that is.
    """

    def __init__(self, job: Job, info: WorkerInfo, environment: Environment) -> None:
        self._job = job
        self._info = info
        self._environment = environment
        self._of_tasks: dict[int, list[Any]] = {}

    def begin(self, task: TaskMessage) -> None:
        """Begin to read the samples of a task, before or when it is made."""
        reads: list[Any] = []
        for n, item in enumerate(task.items):
            info = replace(self._info)
            begin_batch(info, task.epoch, task.ordinal + n)
            try:
                item = self._environment.unpack_item(item)
                lists = self._lists(item)
                reads.append([self._job.dataset.__getfutures__(each, info) for each in lists])
            except BaseException as error:
                if self._environment.ends_program(error):
                    raise
                reads.append(error)  # comes when the batch is made
        self._of_tasks[task.id] = reads

    def _lists(self, item: Any) -> list[Any]:
        """Return the indices of the samples of an item, list by list."""
        if self._job.collate_fn is None:
            return [[item]]  # it is the sample
        return item if self._job.is_nested(item) else [checked_indices(item)]

    def take(self, task: TaskMessage) -> list[Any]:
        """Return the reads of a task that is made now, which are begun by then.

        Returns:
            For each item the futures of its samples, list by list, or the error of that.
        """
        if task.id not in self._of_tasks:
            self.begin(task)
        return self._of_tasks.pop(task.id)

    def end(self, reads: list[Any]) -> None:
        """Cancel what is left of the reads of a task, as after Ctrl-C."""
        for lists in reads:
            for futures in lists if type(lists) is list else ():
                for future in futures:
                    future.cancel()
