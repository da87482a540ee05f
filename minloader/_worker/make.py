"""Makes the worker of a job, in whatever thread or process."""

from __future__ import annotations

from minloader._worker.environment import Environment
from minloader._worker.messages import Job, WorkerInfo
from minloader._worker.run import ItemWorker, Worker


def make_worker(job: Job, info: WorkerInfo, environment: Environment) -> Worker:
    """Return the worker for a job, see :class:`Worker`."""
    if not job.options.is_stream:
        return ItemWorker(job, info, environment)
    from minloader._worker.stream_worker import StreamWorker  # spawned workers of others need none

    return StreamWorker(job, info, environment)
