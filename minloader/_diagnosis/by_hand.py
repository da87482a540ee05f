"""What a dataset finds in a worker, for who calls it by hand: in a test, or in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minloader._worker.messages import (
    NO_SAMPLE,
    WorkerInfo,
    begin_batch,
    current_batch,
    current_info,
)


@contextmanager
def as_in_worker(
    index: Any = NO_SAMPLE, *, batch: int = 0, epoch: int = 0, seed: int = 0
) -> Iterator[WorkerInfo]:
    """Have :func:`minloader.get_worker_info` answer here, as it does where a batch is made. ::

        with as_in_worker(index=3):
            sample = dataset[3]

    What is drawn from its ``rng`` is what a loader draws for that batch, sample by sample. The
    global generators stay as they are.

    Args:
        index: of the sample that is made, which ``sample_rng`` follows from.
        batch: number of the batch in its epoch.
        epoch: that the batch is of.
        seed: the loader's.

    Yields:
        What it answers.
    """
    info = WorkerInfo(id=0, num_workers=0, pid=os.getpid(), seed=seed)
    begin_batch(info, epoch, batch)
    current_batch(info).turn_to(index)
    token = current_info.set(info)
    try:
        yield info
    finally:
        current_info.reset(token)
