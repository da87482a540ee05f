"""Datasets for torch's kind of loader that worker processes import, without torch."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import OrderedDict, UserDict, UserList, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np

import minloader

Pair = namedtuple("Pair", "left right")  # torch knows it by its _fields


class Tagged(dict):  # type: ignore[type-arg]
    """A dict that has more than its items."""

    tag = "none"


class Fixed(UserList):  # type: ignore[type-arg]
    """A sequence that cannot be made of a list."""

    def __init__(self) -> None:
        super().__init__([1, 2])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("fixed")


class Summary(Mapping):  # type: ignore[type-arg]
    """Cannot be changed, and looks at its values when it is made."""

    def __init__(self, values: Any) -> None:
        self.values_ = dict(values)
        self.tag = str(values)

    def __getitem__(self, key: Any) -> Any:
        return self.values_[key]

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class Doubling(UserList):  # type: ignore[type-arg]
    """Keeps not what it is given, but twice that."""

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value + value)


def tagged(n: int) -> Tagged:
    made = Tagged(value=n)
    made.tag = "kept"
    return made


DTYPES = ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D"]

# What a sample may be: each makes the n-th of some.
KINDS: dict[str, Any] = {
    **{f"array {code}": lambda n, code=code: np.full((2, 3), n, code) for code in DTYPES},
    **{
        f"number {code}": lambda n, code=code: np.dtype(code).type(n)
        for code in DTYPES
        if code != "Q"
    },
    "large": lambda n: np.full((64, 65), n, "f"),
    "array of no dimension": lambda n: np.array(float(n)),
    "empty": lambda n: np.zeros((0, 3)),
    "strided": lambda n: np.arange(12).reshape(3, 4)[:, ::2] + n,
    "types mixed": lambda n: np.full(2, n, ["i4", "f2", "u1"][n % 3]),
    "floats mixed": lambda n: np.full(2, n, ["f4", "f8"][n % 2]),
    "int": lambda n: n - 1,
    "bool": lambda n: n == 1,
    "float": lambda n: n / 3,
    "ints, then floats": lambda n: [0, 1.5, 2][n],
    "floats, then ints": lambda n: [0.5, 1, 2][n],
    "bools, then ints": lambda n: [True, 1, 2][n],
    "numpy's and Python's": lambda n: [np.float32(1), 2.0, 3.0][n],
    "numpy's mixed": lambda n: [np.int64(1), np.float32(2), np.int8(1)][n],
    "str": str,
    "bytes": lambda n: str(n).encode(),
    "tuple": lambda n: (n, np.full(2, n), str(n)),
    "list": lambda n: [n, [n, n + 1.0]],
    "dict": lambda n: {"a": n, "b": {"c": np.full(2, n)}, "d": (n, str(n))},
    "ordered": lambda n: OrderedDict(z=n, a=n),
    "mapping": lambda n: UserDict(a=n),
    "tagged": tagged,
    "named": lambda n: Pair(n, Pair(np.full(2, n), str(n))),
    "user list": lambda n: UserList([n, np.full(2, n)]),
    "range": lambda n: range(n, n + 2),
    "summary": lambda n: Summary({"a": np.float32(n), "b": [np.full(2, n), n]}),
    "doubling": lambda n: Doubling([np.full(2, n), [Doubling([np.full(2, n), np.int8(n)])]]),
    "fixed": lambda n: Fixed(),
    "None": lambda n: None,
    "set": lambda n: {n},
    "complex": lambda n: 1j * n,
    "object": lambda n: object(),
    "text array": lambda n: np.array(["a"]),
    "object array": lambda n: np.array([None]),
    "dates": lambda n: np.zeros(2, "M8[s]"),
    "durations": lambda n: np.timedelta64(n, "s"),
    "long double": lambda n: np.zeros(2, "g"),
    "record": lambda n: np.zeros(2, [("a", "f")]),
    "ragged": lambda n: np.zeros(n + 1),
    "ragged list": lambda n: [0] * (n + 1),
    "other keys": lambda n: {n: n},
    "too large": lambda n: 2**63,
    "too large, negative": lambda n: [2**63, -1, 2**64 - 1][n],
    "None last": lambda n: [1, 2, None][n],
}


class Kinds:
    """Three samples of each kind, in turn."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds

    def __len__(self) -> int:
        return 3 * len(self.kinds)

    def __getitem__(self, index: int) -> Any:
        return KINDS[self.kinds[index // 3]](index % 3)


class Numbers:
    """The index, and whether torch is there."""

    def __init__(self, n: int = 20, size: int = 1) -> None:
        self.n = n
        self.size = size

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return np.full(self.size, index), "torch" in sys.modules


class Imported(Numbers):
    """Whether a module is imported where the samples are made."""

    def __init__(self, name: str) -> None:
        super().__init__(1)
        self.name = name

    def __getitem__(self, index: int) -> Any:
        return self.name in sys.modules


class Whereabouts(Numbers):
    """What torch's get_worker_info says, torch being imported by the first who asks."""

    mark = -1

    def __getitem__(self, index: int) -> Any:
        imported = "torch" in sys.modules
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            return None, imported
        same = info.dataset is self
        return info.id, info.num_workers, info.seed, same, self.mark, imported, os.getpid()


def mark_dataset(worker_id: int) -> None:
    """A worker_init_fn that changes the worker's dataset."""
    from torch.utils.data import get_worker_info

    get_worker_info().dataset.mark = 10 + worker_id


def seed_all(worker_id: int) -> None:
    """A worker_init_fn as many have: it has no effect here."""
    random.seed(worker_id)
    np.random.seed(worker_id)


def fail_to_begin(worker_id: int) -> None:
    raise KeyError(f"no worker {worker_id}")


class Bad(Numbers):
    """Fails at one index, hangs at another."""

    def __init__(self, n: int, fails: Any = None, hangs: int | None = None) -> None:
        super().__init__(n)
        self.fails, self.hangs = fails, hangs

    def __getitem__(self, index: int) -> Any:
        if index == self.fails:
            raise LookupError(f"index {index} is bad")
        if index == self.hangs:
            threading.Event().wait()
        return index


class Whole(Numbers):
    """Fetches a batch as a whole, of its own kind."""

    def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
        return {"whole": indices}


class OneByOne(Whole):
    """Takes that back."""

    __getitems__ = None  # type: ignore[assignment]


class Slices(Numbers):
    """An index is a list of numbers."""

    def __getitem__(self, index: list[int]) -> Any:
        return np.array(index)


def doubled(sample: int) -> int:
    return 2 * sample


def skip_all(sample: Any) -> Any:
    return minloader.SKIP


def same(samples: Any) -> Any:
    return samples


class Pinned:
    """A batch that knows how to pin itself, and how to go to a device."""

    def __init__(self, samples: list[Any], where: str = "") -> None:
        self.samples = samples
        self.where = where

    def pin_memory(self) -> Pinned:
        return Pinned(self.samples, "pinned in " + threading.current_thread().name)

    def to(self, device: Any) -> Pinned:
        return Pinned(self.samples, str(device))


def pinnable(samples: list[Any]) -> Any:
    return {"batch": Pinned(first_numbers(samples)), "list": [1, ("a", 2)]}


def first_numbers(samples: list[Any]) -> list[int]:
    return [int(values[0]) for values, _ in samples]
