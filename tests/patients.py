"""Datasets and samplers for the doctor to examine, healthy and ill; workers import them."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from minloader import get_worker_info


class Healthy:
    """100 kB in 6 ms, which takes no processor."""

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.006)
        return np.full(12_500, float(index))


class Unlike(Healthy):
    """Never the same, so that the audit, which other tests are of, ends at once."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.006)
        return time.perf_counter()


class Ill(Unlike):
    """Keeps 500 kB of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        self.kept.append(np.full(62_500, 1.0))
        return super().__getitem__(index)


class Locked(Unlike):
    """All workers share a lock."""

    def __getitem__(self, index: int) -> Any:
        with open(os.path.join(tempfile.gettempdir(), "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().__getitem__(index)


class Slow:
    """A sampler that takes 5 ms."""

    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            time.sleep(0.005)
            yield index


class Stream:
    """6 ms each, by shards."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        assert info is not None
        for _ in range(info.id, 60, info.num_workers):
            time.sleep(0.006)
            yield time.perf_counter()
