"""Torch's datasets and samplers, for torch's kind of loader."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info


class Sharded(IterableDataset):  # type: ignore[type-arg]
    """Gives each worker every n-th number."""

    def __init__(self, stop: int, length: int | None = None) -> None:
        self.stop = stop
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for n in range(first, self.stop, step):
            yield torch.full((2,), n)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


class Placed(Sharded):
    """The same, with a state."""

    i = 0

    def __iter__(self) -> Iterator[Any]:
        for value in islice(super().__iter__(), self.i, None):
            self.i += 1
            yield value
        self.i = 0

    def state_dict(self) -> int:
        return self.i

    def load_state_dict(self, state: int) -> None:
        self.i = state


class Shuffled(IterableDataset):  # type: ignore[type-arg]
    """Shuffles each epoch by a seed that torch offers: of the worker, or in worker_init_fn."""

    seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        seed = info.seed if self.seed is None else self.seed
        yield from torch.randperm(20, generator=torch.Generator().manual_seed(seed))


def keep_seed(worker_id: int) -> None:
    """A worker_init_fn for it."""
    info = get_worker_info()
    assert info is not None
    info.dataset.seed = torch.initial_seed()


class Eager(Sampler):  # type: ignore[type-arg]
    """Draws its order as soon as it is begun."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())

    def __len__(self) -> int:
        return self.n


class Interrupting(Eager):
    """Gives them one by one, and is interrupted once where it is told so."""

    is_armed = False

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if self.is_armed:
                self.is_armed = False
                raise KeyboardInterrupt
            yield index


class EagerBatches(Eager):
    """The same, in batches of two."""

    def __iter__(self) -> Iterator[Any]:
        return iter([batch.tolist() for batch in torch.randperm(self.n).split(2)])

    def __len__(self) -> int:
        return (self.n + 1) // 2


def from_torch(n: int) -> int:
    return int(torch.randint(n, ()).item())


def from_numpy(n: int) -> int:
    return int(np.random.randint(n))


class Lazy(Eager):
    """Draws each item, a list of two, as it is asked for it.

    Args:
        n: number of indices.
        draw: returns a random number below n, of a global generator.
        length: number of items.
    """

    def __init__(self, n: int, draw: Callable[[int], int], length: int = 5) -> None:
        super().__init__(n)
        self.draw = draw
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield [self.draw(self.n), self.draw(self.n)]

    def __len__(self) -> int:
        return self.length


class LazyWithState(Lazy):
    """The same, with a state that does not have the generator."""

    at = 0
    goes_on = False

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.goes_on else 0
        self.goes_on = False
        while self.at < self.length:
            self.at += 1
            yield [self.draw(self.n), self.draw(self.n)]
        self.at = 0

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state
        self.goes_on = True


class InPlace(Eager):
    """Shuffles batches by a function of ``random`` or numpy, when it is first asked for one."""

    def __init__(self, n: int, shuffle: Callable[[list[Any]], None]) -> None:
        super().__init__(n)
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Any]:
        batches = [[i, (i + 1) % self.n] for i in range(self.n)]
        self.shuffle(batches)
        yield from batches


class Nested:
    """A sampler of batches of one over a sampler, or a sampler of indices; each is told its epoch.

    Args:
        over: the other sampler, or the number of indices.
        name: of the attribute that has the number of the epoch; "": there is none.
        is_told: whether the loop tells it.
    """

    def __init__(self, over: Any, name: str, is_told: bool) -> None:
        self.name = name
        self.is_told = is_told
        self.times_told = -1
        if isinstance(over, Nested):
            self.sampler = over
        else:
            self.n = over
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.times_told += 1
        self.random = random.Random(epoch)
        if self.name:
            setattr(self, self.name, epoch)

    def __len__(self) -> int:
        return len(self.sampler) if hasattr(self, "sampler") else int(self.n)

    def __iter__(self) -> Iterator[Any]:
        order = copy.deepcopy(self.random)
        items = [[i] for i in self.sampler] if hasattr(self, "sampler") else list(range(self.n))
        order.shuffle(items)
        return iter(items)

    def all(self) -> list[Nested]:
        return [self, *(self.sampler.all() if hasattr(self, "sampler") else [])]

    def tell(self, epoch: int) -> None:
        for each in self.all():
            if each.is_told:
                each.set_epoch(epoch)


class NestedWithState(Nested):
    """The same, with a state that has the number, and the place of the iterator made last."""

    at = 0
    goes_on = False

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.number = epoch

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        self.at = self.at if self.goes_on else 0
        self.goes_on = False
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: Any) -> None:
        times = self.times_told
        self.set_epoch(state["number"])
        self.times_told = times
        self.at = state["at"]
        self.goes_on = True


class Tensors:
    """Samples that are tensors of these types."""

    def __init__(self, dtypes: list[Any]) -> None:
        data = torch.arange(6 * 100 * 100).view(6, 100, 100)
        self.data = [data.to(dtype) for dtype in dtypes]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return [(data[index], data[index, 0, :3], {"n": data[index, 0, 0]}) for data in self.data]


class Special:
    """A type that torch's collating does not know until it is told."""

    def __init__(self, value: int) -> None:
        self.value = value


def collate_special(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.tensor([each.value for each in batch])


class Specials:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"special": Special(index), "plain": index}


class Drawing:
    """Gives the index and a random number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index, random.random()


class DrawingStream(IterableDataset):  # type: ignore[type-arg]
    """The same of a stream that each worker reads a part of, and that is told its epochs.

    Args:
        n: number of samples.
        stateful: whether it says where it is.
        name: of the attribute that has the number of the epoch, and of the state's key.
    """

    def __init__(self, n: int, stateful: bool, name: str = "epoch") -> None:
        self.n = n
        self.stateful = stateful
        self.name = name
        self.at = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        setattr(self, self.name, epoch)
        if self.name == "round":
            self.at = 0  # else nobody would know after an epoch that was left

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.stateful else 0
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for n in range(first + self.at * step, self.n, step):
            self.at += 1
            yield 1000 * vars(self)[self.name] + n, random.random()
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and vars(self).get("stateful"):
            return getattr(self, f"_{name}")
        raise AttributeError(name)

    def _state_dict(self) -> Any:
        return {self.name: vars(self)[self.name], "at": self.at}

    def _load_state_dict(self, state: Any) -> None:
        self.set_epoch(state[self.name])
        self.at = state["at"]
