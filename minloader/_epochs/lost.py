"""What is sent again of a task that was lost, and what has failed of it.

A task is lost where a worker died or hung with it, where its executor broke, or where its reply has
found no room. What may be to blame is tried again alone, so that nothing else of the task fails
with it.
"""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import BrokenExecutor, CancelledError
from typing import Any, Protocol

from minloader._epochs import failures
from minloader._epochs.counters import track_of
from minloader._epochs.failures import BatchLabel
from minloader._epochs.options import Shared
from minloader._epochs.task import Task
from minloader._errors import BatchError, WorkerDied
from minloader._memory.limits import remedy
from minloader._pools.base import Pool
from minloader._pools.ticket import Death, Ticket
from minloader._protocols import has_getitems
from minloader._worker.messages import Failure, Reply, Unready

logger = logging.getLogger("minloader")


class LossyLane(Protocol):
    """A lane whose tasks may be lost."""

    shared: Shared
    feed: Any
    pool: Pool

    def ordinal_in_epoch(self, ordinal: int) -> int:
        """Return the ordinal of a batch in its epoch, as messages give it."""


def replacements(lane: LossyLane, task: Task, ticket: Ticket) -> list[Task]:
    """Return what takes the place of a task that was lost.

    Args:
        lane: that has it.
        task: which.
        ticket: of it, that has an error.
    """
    lane.shared.check_open()
    error = ticket.error
    assert error is not None
    if ticket.step and not isinstance(error, BrokenExecutor):
        return _unsent(lane, task, error, is_packed=ticket.step == "sending")
    labels = {
        "batch": lane.ordinal_in_epoch(task.first),
        "epoch": lane.feed.epoch,
        "count": len(task.items),
    }
    lane.shared.counters.record("consumer", "again", time.perf_counter(), 0.0, labels)
    if ticket.death is not None:
        return _after_death(lane, task, ticket.death)
    return _after_error(lane, task, error)


def _unsent(lane: LossyLane, task: Task, error: BaseException, *, is_packed: bool) -> list[Task]:
    """Return what takes the place of a task that could not be sent."""
    if len(task.items) > 1 and not lane.shared.job.options.is_stream:
        return [task.part(n, n + 1) for n in range(len(task.items))]  # one by one, then
    # An item that cannot be pickled is one batch lost; no workers to be had, all.
    when = "when it was sent to a worker" + (remedy(error) if is_packed else "")
    return [task.failed([error] * len(task.items), when=when, fatal=is_packed)]


def _after_death(lane: LossyLane, task: Task, death: Death) -> list[Task]:
    """Return what takes the place of a task: the batch that its worker died with is by itself."""
    options = lane.shared.options
    counters = lane.shared.counters
    if options.concurrency and death.stack is None and task.suspects is None:
        death = death._replace(sample_number=-1)  # any of those that were read may be to blame
    n = max(0, death.item)
    retry = task.part(n, n + 1, tries=task.tries + 1)
    label = BatchLabel(
        ordinal=lane.ordinal_in_epoch(task.first + n),
        epoch=lane.feed.epoch,
        item=task.item(n),
        sample=_sample_of(lane, task, n, death.sample_number),
    )
    _report_death(lane, death, label)
    if retry.tries <= options.retries:
        counters.retries += 1
    elif death.item < 0 and lane.shared.job.options.is_stream:
        lane.feed.end_before(task, lane)
        return [task]
    else:
        error = failures.death_error(death, label, retry.tries)
        suspects = _suspect_samples(lane, retry, death, error)
        if suspects is not None:
            counters.retries += 1
            retry.suspects = suspects
            retry.tries = 0  # another sample has tries of its own
        else:
            failure = Failure.of(error, packed=False)._replace(sample=label.sample)
            retry.settle(
                Reply(worker=death.worker, pid=death.pid, packed=False, outcomes=[failure])
            )
    pieces = [task.part(0, n), retry, task.part(n + 1, len(task.items))]
    return [each for each in pieces if each.items]


def _sample_of(lane: LossyLane, task: Task, n: int, number: int) -> tuple[Any, ...]:
    """Return the index of a sample of a batch, in a tuple; () if it is not known."""
    job = lane.shared.job
    if number < 0 or job.options.is_stream:
        return ()
    item = task.item(n)
    if job.collate_fn is None:  # the item is the sample
        return (item,)
    if job.is_nested(item):
        item = itertools.chain.from_iterable(item)
    return tuple(item)[number : number + 1]  # the worker could list it, to be at that one


def _suspect_samples(
    lane: LossyLane, retry: Task, death: Death, error: BatchError
) -> dict[int, BatchError] | None:
    """Return which samples of a batch are not made again, since its worker died once too often.

    None: the batch has failed. Where samples are read together it is made once more before
    that, without any of them left out, so that it shows which one is to blame.
    """
    job = lane.shared.job
    if job.options.on_sample_error is None:
        return None
    if death.sample_number < 0:
        together = lane.shared.options.concurrency or has_getitems(job.dataset)
        is_hidden = retry.suspects is None and together and not job.options.is_stream
        return {} if is_hidden else None
    suspects = retry.suspects or {}
    # Else what was put in its place, or was asked for that, takes workers along too.
    return None if death.sample_number in suspects else {**suspects, death.sample_number: error}


def _after_error(lane: LossyLane, task: Task, error: BaseException) -> list[Task]:
    """Return what takes the place of a task of which no batch is known to be to blame."""
    pool = lane.pool
    counters = lane.shared.counters
    if isinstance(error, Unready):
        return [task.part(0, len(task.items))]  # nobody has begun with it
    if isinstance(error, BrokenExecutor | CancelledError):
        if pool.replaces:
            return [task.part(0, len(task.items))]  # another's worker died
        text = (
            f"a worker of the executor died, which is broken since: {error} Spawned workers import "
            "the script, which needs the guard if __name__ == '__main__' then"
        )
        dead = [WorkerDied(text) for _ in task.items]
        return [task.part(0, len(task.items)).failed(dead, fatal=True)]
    # An error of the user's executor, or no room here. Which batch is at fault shows one by
    # one: so each has been tried.
    who = "this process" if pool.replaces else "the executor"
    if len(task.items) > 1 or task.tries < lane.shared.options.retries:
        ordinal = lane.ordinal_in_epoch(task.first)
        logger.warning("%s lost batch %d, which is made again: %s", who, ordinal, error)
        counters.retries += 1
        tries = task.tries + 1
        return [task.part(n, n + 1, tries=tries) for n in range(len(task.items))]
    if pool.is_death(error):
        label = BatchLabel(ordinal=task.first, epoch=lane.feed.epoch, item=task.item(0), sample=())
        died = WorkerDied(f"the workers of the executor died that made {label}: {error}")
        return [task.part(0, 1).failed([died])]
    when = "when it came from a worker" if pool.replaces else "in the executor"
    return [task.part(0, 1).failed([error], when=when, fatal=True)]


def _report_death(lane: LossyLane, death: Death, batch: BatchLabel) -> None:
    """Say in the timeline, and in the log, which batch a worker has died with."""
    labels = {"batch": batch.ordinal, "epoch": batch.epoch, "cause": death.cause}
    where = track_of(death.worker, death.pid)
    lane.shared.counters.record(where, "died", time.perf_counter(), 0.0, labels)
    logger.warning(
        "worker %d (pid %d) died: %s; it was making %s; the workers are replaced, and what was "
        "under way is made again",
        death.worker,
        death.pid,
        death.cause,
        str(batch),  # else a log that is kept keeps the item
    )
