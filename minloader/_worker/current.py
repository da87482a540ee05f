"""Which worker this process is, and what :func:`get_worker_info` answers here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minloader._worker.messages import Reply, WorkerInfo, current_info

if TYPE_CHECKING:
    from minloader._worker.run import Worker

process_worker: Worker | None = None
"""The worker that all threads of this process belong to."""

failed_start: Reply | None = None
"""That of a worker process that could not load its job, which is its reply to each task."""


def get_worker_info() -> WorkerInfo | None:
    """Return where this code runs, if it makes batches; None outside a worker.

    In a worker process it answers in every thread; in a thread worker, and with
    ``num_workers=0``, in the thread that makes the batch, while it makes one.
    """
    info = current_info.get()
    worker = process_worker  # once: another thread may let it go meanwhile
    if info is None and worker is not None:
        info = worker.info
    return info
