"""Datasets and samplers for the doctor to examine, healthy and ill; workers import them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
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


class Caching(Unlike):
    """Keeps what it has read, which is the whole dataset in the end."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        self.cache.setdefault(index, np.full(12_500, 1.0))
        return super().__getitem__(index)


class Ill(Unlike):
    """Keeps all that one can, and depends on the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        waiting = threading.Thread(target=threading.Event().wait, daemon=True)
        waiting.start()
        self.kept += [
            np.full(12_500, 1.0),
            os.open(os.devnull, os.O_RDONLY),
            subprocess.Popen(["true"]),
        ]
        return super().__getitem__(index)


class Locked(Unlike):
    """All workers share a lock."""

    def __getitem__(self, index: int) -> Any:
        with open(os.path.join(tempfile.gettempdir(), "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().__getitem__(index)


class Computing(Unlike):
    """Takes 5 ms of a processor, in Python."""

    def __getitem__(self, index: int) -> float:
        begin = time.thread_time()
        while time.thread_time() < begin + 0.005:
            pass
        return time.perf_counter()


class Starting(Unlike):
    """Takes some 20 ms of two processors at once, in programs that it starts."""

    def __getitem__(self, index: int) -> float:
        loop = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
        programs = [subprocess.Popen(["sh", "-c", loop]) for _ in range(2)]
        for program in programs:
            program.wait()
        return time.perf_counter()


class Failing(Healthy):
    """Opens files, until there are no more to open, after 0.8 s."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.kept: list[int] = []
        self.begun = 0.0

    def __getitem__(self, index: int) -> int:
        self.begun = self.begun or time.monotonic()
        self.kept.append(os.open(os.devnull, os.O_RDONLY))
        time.sleep(0.002)
        if time.monotonic() > self.begun + 0.8:
            raise OSError("no more")
        return index


class Keeping:
    """A sampler that takes 5 ms, and keeps something for each item."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            time.sleep(0.005)
            self.kept.append(np.full(50_000, 1.0))
            yield index


class Stream:
    """6 ms each, by shards."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        assert info is not None
        for _ in range(info.id, 60, info.num_workers):
            time.sleep(0.006)
            yield time.perf_counter()
