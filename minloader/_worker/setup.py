"""What a worker process is given when it starts."""

from __future__ import annotations

from typing import NamedTuple

from minloader._memory.files import unlink
from minloader._memory.job_file import ForkedJob, JobAddress
from minloader._worker.messages import WorkerInfo
from minloader._worker.plugins import Plugin


class WorkerSetup(NamedTuple):
    """All that a worker process is given when it starts.

    Attributes:
        address: where the job is.
        heartbeats: path of the file of heartbeats.
        token: value of the environment variable TOKEN for all that the worker starts.
        infos: what the workers of its pool are told, by their index.
        plugins: what hangs on it.
    """

    address: JobAddress | ForkedJob
    heartbeats: str
    token: str
    infos: list[WorkerInfo]
    plugins: list[Plugin]

    def clean_up(self) -> None:
        """Remove files that have names, when the parent was killed."""
        self.address.remove()
        unlink(self.heartbeats)


TOKEN = "MINLOADER_TOKEN"
"""Environment variable by which the processes that a worker started are known when it is dead."""
