"""Bugs that users of other loaders have reported, each as a program that shows whether it is there.

Each is given a class with the arguments of torch's ``DataLoader``, and returns whether that has the
bug. An error that the user sees may be the bug, or the right end: :func:`bug` says which.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

Program = Callable[[Any], bool]


class NoSuchOption(Exception):
    """The loader has nothing of the kind, and so neither the bug nor what it shows in."""


class Bug(NamedTuple):
    """A bug.

    Attributes:
        title: what goes wrong, and the thread in which it was reported.
        program: shows whether it is there.
        error: whether an error is the bug; else who is told loses nothing.
    """

    title: str
    program: Program
    error: bool


BUGS: dict[str, Bug] = {}


def bug(title: str, thread: str, *, error: bool = False) -> Callable[[Program], Program]:
    """Adds a program to the table."""

    def add(program: Program) -> Program:
        BUGS[program.__name__] = Bug(f"{title} ({thread})", program, error)
        return program

    return add


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


class Drawn:
    """Each sample is its index and a number drawn for it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index, np.random.randint(1 << 30)])


@bug("all ranks draw alike", "transformers#37932")
def alike(loader_of: Any) -> bool:
    draws = []
    for rank in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        sampler = DistributedSampler(Drawn(), 2, rank, shuffle=False)  # type: ignore[arg-type]
        loader = loader_of(Drawn(), batch_size=4, sampler=sampler, num_workers=1)
        draws.append(next(iter(loader))[:, 1].tolist())
    return bool(draws[0] == draws[1])


class Squares:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@bug("a worker that gets SIGTERM ends the run", "preemption", error=True)
def terminated(loader_of: Any) -> bool:
    class Suicidal(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 9 and not Path("done").exists():
                Path("done").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            return index

    return numbers(loader_of(Suicidal(), batch_size=2, num_workers=2)) != list(range(40))


@bug("a state that is loaded after iter() does nothing, in silence", "prime-rl#3299")
def after_iter(loader_of: Any) -> bool:
    first = loader_of(Squares(), batch_size=4, num_workers=1)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    second = loader_of(Squares(), batch_size=4, num_workers=1)
    batches = iter(second)
    second.load_state_dict(state)
    return bool(next(batches)[0] == 0)


class Lines(IterableDataset[int]):
    """A stream without a state, in shards."""

    def __init__(self, shards: int = 2) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine, step = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in range(mine, self.shards, step):
            yield from range(10 * shard, 10 * shard + 10)


@bug("the second resume starts over", "datasets#8308, torchtitan#3907")
def twice(loader_of: Any) -> bool:
    given: list[int] = []
    state = None
    for _ in range(3):
        loader = loader_of(Lines(), batch_size=2, num_workers=2)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        given += numbers(next(batches) for _ in range(3))
        state = loader.state_dict()
    return len(set(given)) != len(given)


@bug("an epoch that is left early spoils the next", "litData#851")
def left_early(loader_of: Any) -> bool:
    loader = loader_of(Lines(), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in loader:
        break
    return sorted(numbers(loader)) != list(range(20))


@bug("an epoch of which every sample is bad is no error", "spdl#942")
def all_bad(loader_of: Any) -> bool:
    class Unmounted(Squares):
        def __getitem__(self, index: int) -> int:
            raise OSError("not mounted")

    list(loader_of(Unmounted(), batch_size=4, num_workers=1))
    return True


@bug("workers without a shard are not told of", "datasets#7999, lerobot#2934")
def idle(loader_of: Any) -> bool:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    list(loader_of(Lines(2), batch_size=2, num_workers=4))
    return not any("gave no batch" in each for each in told)


@bug("a run resumes with another number of ranks, and loses or doubles", "Megatron-Bridge#5637")
def other_size(loader_of: Any) -> bool:
    def loader(rank: int, size: int) -> Any:
        if loader_of.__module__.startswith("minloader"):
            from minloader import BatchSampler

            sampler = BatchSampler(40, 2, rank=rank, world_size=size)
            return loader_of(Squares(), batch_sampler=sampler, num_workers=1)
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(Squares(), size, rank, shuffle=False)
        return loader_of(Squares(), batch_size=2, sampler=sampler, num_workers=1)

    given: list[int] = []
    state: Any = None
    for size, steps in ((4, 2), (2, 100)):
        states = []
        for rank in range(size):
            each = loader(rank, size)
            if state is not None:
                each.load_state_dict(state)
            given += numbers(islice(each, steps))
            states.append(each.state_dict())
        state = states[0]
    return sorted(given) != list(range(40))


@bug("a resumed run of two ranks gets data twice", "accelerate#3938")
def doubled(loader_of: Any) -> bool:
    given: list[int] = []
    for rank in range(2):
        sampler = DistributedSampler(Squares(), 2, rank, shuffle=False)  # type: ignore[arg-type]
        first, second = (
            loader_of(Squares(), batch_size=2, sampler=sampler, num_workers=2) for _ in range(2)
        )
        batches = iter(first)
        given += numbers(next(batches) for _ in range(3))
        state = first.state_dict()
        second.load_state_dict(state)
        given += numbers(second)
    return sorted(given) != list(range(40))


@bug("a trainer that counts the batches first drops the state", "pytorch-lightning#20550")
def dropped(loader_of: Any) -> bool:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    given: list[int] = []

    class Model(BoringModel):  # type: ignore[misc]
        def training_step(self, batch: Any, number: int) -> Any:
            given.extend(batch.tolist())
            return self(torch.zeros(32)).sum()

        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), 0.1)

    for steps, state in ((3, None), (-1, "step.ckpt")):
        loader = loader_of(Squares(), batch_size=4, num_workers=1)
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise NoSuchOption  # a trainer that keeps its state
        assert loader.state_dict  # torch's has none
        keep: list[Any] = [ModelCheckpoint(".", "step", every_n_train_steps=3)]
        if loader_of.__module__.startswith("minloader"):  # as docs/trainers.md says
            from minloader.torch.lightning import KeepLoaderState

            keep.append(KeepLoaderState())
        options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "callbacks": keep}
        trainer = Trainer(max_steps=steps, **options)
        trainer.fit(Model(), loader, ckpt_path=state, weights_only=False)
    return sorted(given) != list(range(40))


POOL = ThreadPoolExecutor(1)
"""As of a library that reads by threads, which begin where it is first used."""


class Pooled(Squares):
    def __getitem__(self, index: int) -> int:
        return POOL.submit(int, index).result(timeout=15)  # a library waits for ever


@bug("forked workers wait for a library's threads", "iohub#416", error=True)
def threads(loader_of: Any) -> bool:
    data = Pooled()
    assert data[1] == 1
    return numbers(loader_of(data, batch_size=2, num_workers=2)) != list(range(40))


class Read(Squares):
    """Reads a file, a thread at a time, and opens it again where it is unpickled."""

    def __init__(self) -> None:
        Path("file").write_bytes(b"".join(bytes([index]) * 4096 for index in range(40)))
        self.__setstate__({})

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.file, self.lock = os.open("file", os.O_RDONLY), threading.Lock()

    def __getitem__(self, index: int) -> int:
        with self.lock:
            os.lseek(self.file, 4096 * index, os.SEEK_SET)
            return max(int.from_bytes(os.read(self.file, 1)) for _ in range(4096))


@bug("forked workers share the place in a file, and read other samples", "VisCy#417")
def handles(loader_of: Any) -> bool:
    return numbers(loader_of(Read(), batch_size=2, num_workers=2)) != list(range(40))


@bug("a worker that was killed is waited for for ever", "ami-data-companion#140")
def waited_for(loader_of: Any) -> bool:
    class Killed(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    list(loader_of(Killed(), batch_size=2, num_workers=2))
    return True


@bug("a lambda cannot be sent to a fork server's workers", "guidellm#782", error=True)
def lambdas(loader_of: Any) -> bool:
    squares = Squares()
    squares.transform = lambda number: number  # type: ignore[attr-defined]
    options = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "forkserver"}
    return numbers(loader_of(squares, **options)) != list(range(40))


@bug("a resumed epoch is shuffled anew", "transgenic#59")
def reshuffled(loader_of: Any) -> bool:
    torch.manual_seed(0)
    first = loader_of(Squares(), batch_size=4, shuffle=True, num_workers=1)
    batches = iter(first)
    given = numbers(next(batches) for _ in range(3))
    state = first.state_dict()
    torch.manual_seed(1)
    second = loader_of(Squares(), batch_size=4, shuffle=True, num_workers=1)
    second.load_state_dict(state)
    return sorted(given + numbers(second)) != list(range(40))


@bug("shared memory is left when the program ends", "grain#1031")
def left_behind(loader_of: Any) -> bool:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        batches = iter(loader_of([np.zeros(1 << 20)] * 8, batch_size=1, num_workers=2))
        next(batches)
        me = psutil.Process()
        maps = [each.path for process in [me, *me.children()] for each in process.memory_maps()]
        os.write(writing, "\n".join(maps).encode())
        os._exit(0)  # as a crash would
    os.close(writing)
    with open(reading) as pipe:
        mapped = {path for path in pipe.read().split("\n") if path.startswith("/dev/shm/")}
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while left := list(filter(os.path.exists, mapped)):
        if time.monotonic() > deadline:
            print(left)
            return True
        threading.Event().wait(0.05)
    return False
