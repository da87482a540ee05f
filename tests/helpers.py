"""Datasets and functions that worker processes import by name."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import minloader
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


class Point(NamedTuple):
    parts: list[Any]
    count: int


@dataclass
class Record:
    name: str
    parts: list[Any]


def cook(recipe: Any) -> Any:
    """Makes a batch from a description of it, so that layouts are as the worker made them."""
    kind, *rest = recipe
    if kind == "array":
        return lay_out(*rest)
    if kind == "tensor":
        return _tensor(*rest)
    if kind == "objects":
        return np.array([{"n": n} for n in range(rest[0])] + [None], dtype=object)
    if kind == "value":
        value, times = rest
        return value if times == 1 else value * times
    parts = [cook(part) for part in rest[0]]
    containers: dict[str, Any] = {
        "dict": lambda: {f"key {n}": part for n, part in enumerate(parts)},
        "list": lambda: parts,
        "tuple": lambda: tuple(parts),
        "point": lambda: Point(parts, len(parts)),
        "record": lambda: Record("r", parts),
    }
    return containers[kind]()


def lay_out(dtype: Any, shape: tuple[int, ...], layout: str, seed: int) -> Any:
    """An array of this kind, with values that the seed decides."""
    kind = np.dtype(dtype)
    numbers = (np.arange(np.prod(shape, dtype=int)) * 7 + seed) % 120
    array = np.zeros(numbers.shape, kind)
    for name in kind.names or ():
        field = numbers.reshape(-1, *[1] * (array[name].ndim - 1))
        array[name] = field
    if not kind.names:
        array[...] = numbers.astype(kind)
    if kind.kind in "fc":
        array[::5] = np.nan
    array = array.reshape(shape)
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "reversed" and array.ndim:
        return array[::-1]
    if layout == "frozen":
        array.flags.writeable = False
    if layout == "broadcast":
        return np.broadcast_to(array, (3, *shape))
    if layout == "memmap" and array.size:
        with tempfile.TemporaryFile() as file:
            file.write(array.tobytes())
            file.flush()
            return np.memmap(file, kind, "r", shape=shape)
    if layout == "born":
        born = minloader.empty(shape, kind)
        born[...] = array
        return born
    return array


def _tensor(dtype: str, shape: tuple[int, ...], layout: str) -> Any:
    import torch

    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    if layout == "transposed":
        return tensor.T
    if layout == "conjugate":
        return tensor.conj()
    if layout == "born":
        return torch.from_numpy(lay_out(dtype, shape, "born", 0))
    return tensor.requires_grad_(layout == "gradient")


def numbered(index: int, size: int = 240_000) -> Any:
    """An array that is full of its number, and lies in a slot from 16 KiB."""
    return np.full(size // 4, index, dtype=np.int32)


def sized(item: tuple[int, int]) -> Any:
    """As :func:`numbered`, of the size that the sampler says."""
    return numbered(*item)


class Keeper:
    """Keeps an array that was born in a slot, gives it again, and writes to it in the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: Any = None
        self.value = -1

    def __getitem__(self, index: int) -> Any:
        if self.kept is None:
            self.kept = minloader.empty(self.size, np.int64)
        else:
            assert (self.kept == self.value).all(), "somebody else has written here"
        self.kept[:] = self.value = index
        other = minloader.empty(self.size, np.int64)
        other[:] = -index
        return index, self.kept, other, self.kept[1:]


class Trouble:
    """Fails in some way after a part of its batch was born in the slot."""

    def __getitem__(self, item: tuple[int, str]) -> Any:
        index, trouble = item
        array = minloader.empty(60_000, np.int32)
        array[:] = index
        if trouble == "raises":
            raise ValueError(f"item {index} is bad")
        if trouble == "lock":
            return array, threading.Lock()
        if trouble == "lambda":
            array.flags.writeable = False
            return array, lambda: index
        return array, index


def fork_and_fill(index: int) -> Any:
    """A child fills an array of its own while this process fills one too."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_fill, args=(there, index))
    child.start()
    here.recv()
    ours = minloader.empty(30_000, np.int32)
    ours[:] = index
    here.send("filled")
    theirs = here.recv()
    child.join()
    return ours, theirs


def _fill(pipe: Any, index: int) -> None:
    theirs = minloader.empty(30_000, np.int32)
    theirs[:] = -index
    pipe.send("filled")
    pipe.recv()
    pipe.send(theirs)


class Forker:
    """A child keeps a part of batch 0, and tells of it with batch 30."""

    def __getitem__(self, index: int) -> Any:
        array = minloader.empty(30_000, np.int32)
        array[:] = index
        if index == 0:
            self.here, there = multiprocessing.Pipe()
            context = multiprocessing.get_context("fork")
            self.child = context.Process(target=_tell, args=(there, array))
            self.child.start()
        if index == 30:
            self.here.send("tell")
            array = self.here.recv()
            self.child.join()
        return array


def _tell(pipe: Any, array: Any) -> None:
    pipe.recv()
    pipe.send(array)


def threads_in(item: int) -> Any:
    """What this process says about threads of computing libraries."""
    if item == 0:
        return os.environ.get("OMP_NUM_THREADS")
    import torch

    return torch.get_num_threads()


class AllNoise(Noise):
    """Random data from every generator there is."""

    def __getitem__(self, item: Any) -> Any:
        return item, *super().__getitem__(item), random.random(), float(np.random.random())


class LateSlow:
    """Quick batches until the given index, slow ones from there."""

    def __init__(self, first: int, last: int, seconds: float) -> None:
        self.slow = range(first, last)
        self.seconds = seconds

    def __getitem__(self, index: int) -> int:
        if index in self.slow:
            threading.Event().wait(self.seconds)
        return index


class Bomb:
    """An item that raises when the worker unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise ValueError("the item went off")


class Broken:
    """A dataset that cannot be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()

    def __getitem__(self, item: Any) -> Any:
        raise AssertionError("it was loaded")


def refuse(info: Any) -> None:
    raise ValueError("the worker refuses")


def exit_at(index: int) -> int:
    if index % 10 == 5:
        raise SystemExit(index)
    return index


def kill_at(index: int) -> int:
    if index == 33:
        os.kill(os.getpid(), signal.SIGKILL)
    return index
