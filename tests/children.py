"""What workers do that start processes of their own, hold much, or wait."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from helpers import Squares

from minloader import Loader


def triple(number: int) -> int:
    return 3 * number


def put_triple(queue: Any, number: int) -> None:
    queue.put(triple(number))


def run_subprocess(item: int) -> str:
    code = f"print({item} * 3)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return result.stdout.decode().strip()


def run_process(item: int) -> int:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=put_triple, args=(queue, item))
    process.start()
    process.join()
    value: int = queue.get()
    return value


def run_pool(item: int) -> list[int]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(triple, range(item)))


def run_loader(item: int) -> list[int]:
    with Loader(triple, range(item), num_workers=1) as loader:
        return list(loader)


class Big:
    """400 MB, and a count of how often it was serialized."""

    serialized = 0

    def __init__(self) -> None:
        import numpy as np

        self.array = np.ones(50_000_000)
        self.blob = np.zeros(50_000_000, np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        Big.serialized += 1
        return self.__dict__

    def __getitem__(self, item: int) -> tuple[int, float, int]:
        self.array[item] = -1  # its own copy of that page
        return os.getpid(), float(self.array[item : item + 10].sum()), len(self.blob)


RELEASE = threading.Event()  # never set in a worker process


def wait_for_release(path: Path) -> None:
    path.touch()
    RELEASE.wait()


def register_exit(folder: str) -> int:
    atexit.register(Path(folder, "left").touch)
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def crash_at_exit(folder: str) -> int:
    Finalize(None, os._exit, (3,), exitpriority=999)  # before anything else is done then
    return register_exit(folder)


class Large(Squares):
    """Has a large array, which must not outlive the loader."""

    def __init__(self) -> None:
        super().__init__(20)
        import numpy as np

        self.table = np.zeros(100_000)
