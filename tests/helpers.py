"""Datasets and functions that worker processes import by name."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np

from minloader import get_worker_info


class Squares:
    """Squares of integers, after a random delay that differs from run to run."""

    def __init__(self, n: int = 20, delay: float = 0.0) -> None:
        self.n = n
        self.delay = delay

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if self.delay:
            threading.Event().wait(random.SystemRandom().random() * self.delay)
        return index * index


class Echo:
    """Gives the item back."""

    def __getitem__(self, item: Any) -> Any:
        return item


class Many(Squares):
    """Has a way to fetch many samples at once, and tells that it was used."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, int]]:
        return [("many", index) for index in indices]


class Whereabouts:
    """Tells where a batch is made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: Any) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        return {
            "item": item,
            "pid": os.getpid(),
            "info_pid": info.pid,
            "id": info.id,
            "num_workers": info.num_workers,
            "epoch": info.epoch,
            "seed": info.seed,
        }


class Noise:
    """Random data from the batch's own generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, item: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.rng.random(4)


class GlobalNoise(Noise):
    """Random data from the global generators; numpy.random is first imported here, late."""

    def __getitem__(self, item: Any) -> Any:
        return random.random(), np.random.random(), random.randrange(1 << 60)


class TorchNoise(Noise):
    """Imports torch as late as one can."""

    def __getitem__(self, item: Any) -> Any:
        import torch

        return torch.rand(3).tolist()


class Faulty(Squares):
    """Raises for some items."""

    def __init__(self, n: int, faults: dict[int, Any]) -> None:
        super().__init__(n)
        self.faults = faults

    def __getitem__(self, index: int) -> int:
        if index in self.faults:
            raise self.faults[index](f"item {index} is bad")
        return super().__getitem__(index)


class TwoArguments(Exception):
    """Fails to unpickle by itself: it passes on fewer arguments than it needs."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Gate:
    """Item 0 waits until a file appears."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, item: int) -> int:
        while item == 0 and not os.path.exists(self.path):
            threading.Event().wait(0.01)
        return item
