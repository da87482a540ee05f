"""Where a worker process is entered: at its beginning, and for each task.

    interpreter starts ──> worker_main: start(setup, ...), in start.py ──> run(task), run(task), ...

The parent loads this module, to name its functions, but not what they load.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minloader._memory.job_file import JobAddress
from minloader._worker import current
from minloader._worker.messages import NOTHING_READ, Reply, TaskMessage
from minloader._worker.setup import WorkerSetup

if TYPE_CHECKING:
    from minloader._memory.inherited import Inheritance


def refuse_avalanche() -> None:
    """Refuse to start workers for a module that is just being imported in a worker.

    Each of them would import that module too, and start more: 1, 2, 4, 8 processes, and so on.

    Raises:
        RuntimeError: it is so.
        ImportError: the fork server imports the module. It passes over such an error, and no other.
    """
    server: Any = None
    if multiprocessing.parent_process() is None:  # what the server has forked has one
        server = sys.modules.get("multiprocessing.forkserver")
    in_server = server.main.__code__ if server is not None else None
    module: str | None = None  # the innermost one that is being imported
    frame = sys._getframe()
    # A fork has its parent's frames too, behind the one in which the worker begins.
    while frame.f_code not in (worker_main.__code__, JobAddress.unpickle.__code__, in_server):
        if module is None and frame.f_code.co_name == "<module>":
            module = frame.f_globals.get("__name__")
        if frame.f_back is None:
            return  # this is no worker
        frame = frame.f_back
    if module is not None:
        kind = ImportError if frame.f_code is in_server else RuntimeError
        raise kind(
            f"the module {module!r} reads a Loader while it is imported, and a worker has just "
            "imported it: each worker would import it and start workers of its own, without end; "
            f"put what reads the Loader into a function, or in {module!r} under "
            "'if __name__ == \"__main__\":'"
        )


def worker_main(
    setup: WorkerSetup,
    index: int,
    inheritance: Inheritance | None,
    target: Callable[..., Any],
    args: Any,
) -> None:
    """Run a worker process: it starts first, then does what the executor has for it."""
    from minloader._worker.start import start  # which the parent does not need

    start(setup, index, inheritance)
    worker = current.process_worker
    if worker is not None and worker.early_reads is not None:
        from minloader._worker.concurrent import ReadAheadQueue  # of few: it imports asyncio

        args = ReadAheadQueue(args[0], worker.early_reads.begin), *args[1:]
    target(*args)


def run(task: TaskMessage) -> Reply:
    """Make the batches of a task in a worker process."""
    worker = current.process_worker
    if worker is None:
        failed_start = current.failed_start
        assert failed_start is not None
        if task.shard is not None:
            return failed_start._replace(shard=NOTHING_READ)
        return failed_start._replace(outcomes=failed_start.outcomes * len(task.items))
    return worker.run(task)


def warm_up() -> None:
    """Do nothing: a task that makes an executor start a worker for it."""
