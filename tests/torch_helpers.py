"""Torch's datasets and samplers, for torch's kind of loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

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
    """

    def __init__(self, n: int, stateful: bool) -> None:
        self.n = n
        self.stateful = stateful
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.stateful else 0
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for n in range(first + self.at * step, self.n, step):
            self.at += 1
            yield 1000 * self.epoch + n, random.random()
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and vars(self).get("stateful"):
            return getattr(self, f"_{name}")
        raise AttributeError(name)

    def _state_dict(self) -> Any:
        return {"epoch": self.epoch, "at": self.at}

    def _load_state_dict(self, state: Any) -> None:
        self.epoch, self.at = state["epoch"], state["at"]
