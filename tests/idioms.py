"""Streams with a state, in the ways in which people write them, for worker processes to import.

All but the last give ``100 * epoch + number`` for the numbers of their shard, and count the epochs
themselves.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import minloader


def shard() -> tuple[int, int]:
    """The number of this shard, and how many there are, also in a worker of torch's own."""
    info: Any = minloader.get_worker_info()
    if info is None and "torch" in sys.modules:
        info = sys.modules["torch"].utils.data.get_worker_info()
    return (0, 1) if info is None else (info.id, max(1, info.num_workers))


def same(value: int) -> int:
    return value


class Counting:
    """Keeps its place until it is at its end, where it counts."""

    def __init__(self, n: int = 14, on_sample: Callable[[int], int] = same) -> None:
        self.n = n
        self.on_sample = on_sample
        self.epoch = self.i = 0

    def values(self) -> range:
        first, step = shard()
        return range(100 * self.epoch + first, 100 * self.epoch + self.n, step)

    def __iter__(self):
        while self.i < len(self.values()):
            self.i += 1
            yield self.on_sample(self.values()[self.i - 1])
        self.i = 0
        self.epoch += 1

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "i": self.i}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.i = state["epoch"], state["i"]


class OwnIterator(Counting):
    """Is its own iterator, and has no place before it is begun, where it counts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.epoch = -1
        del self.i

    def __iter__(self):
        self.epoch += 1
        self.i = 0
        return self

    def __next__(self) -> int:
        if self.i >= len(self.values()):
            raise StopIteration
        self.i += 1
        return self.on_sample(self.values()[self.i - 1])


class Resuming(Counting):
    """Goes on once from a state that it is given, and has no place before its first sample."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.epoch = -1
        del self.i
        self.resume: Any = None

    def __iter__(self):
        if self.resume is None:
            self.epoch += 1
            self.i = 0
        else:
            super().load_state_dict(self.resume)
            self.resume = None
        for value in self.values()[self.i :]:
            self.i += 1
            yield self.on_sample(value)

    def load_state_dict(self, state: Any) -> None:
        self.resume = state


class Separate(Counting):
    """Has the count, and its iterators have the place."""

    def __iter__(self):
        return _Place(self)

    def state_dict(self) -> Any:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]


class _Place:
    def __init__(self, stream: Separate) -> None:
        self.stream = stream
        self.values = stream.values()
        self.i = 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.i >= len(self.values):
            self.stream.epoch += 1
            raise StopIteration
        self.i += 1
        return self.stream.on_sample(self.values[self.i - 1])

    def state_dict(self) -> Any:
        return {"i": self.i}

    def load_state_dict(self, state: Any) -> None:
        self.i = state["i"]


IDIOMS = [Counting, OwnIterator, Resuming, Separate]


class Sticky(Counting):
    """Begins at the state that it was given last, each time; as the datasets of Hugging Face do
    while ``set_epoch`` is not called. It counts nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.start = 0

    def __iter__(self):
        self.i = self.start
        while self.i < len(self.values()):
            self.i += 1
            yield self.on_sample(self.values()[self.i - 1])

    def load_state_dict(self, state: Any) -> None:
        self.start = state["i"]


class Logged(Counting):
    """Notes what is called."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def __iter__(self):
        self.calls.append("iter")
        return super().__iter__()

    def state_dict(self) -> Any:
        self.calls.append("state")
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.calls.append("load")
        super().load_state_dict(state)


class Noisy(Counting):
    """Adds random numbers.

    Args:
        kind: from the "global" generator; or from that too, and it is in the state, from which it
            is put back at once ("kept") or with the first sample ("late"); from a generator of its
            "own"; "shuffled" by the global one in ``__iter__``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.own = random.Random(5)
        self.resume: Any = None

    def __iter__(self):
        return _Shuffled(self) if self.kind == "shuffled" else self.generate()

    def generate(self) -> Any:
        if self.resume is not None:
            random.setstate(self.resume)
            self.resume = None
        for value in super().__iter__():
            yield value + (self.own if self.kind == "own" else random).random()

    def state_dict(self) -> Any:
        generator = self.own if self.kind == "own" else random
        return super().state_dict() | {"generator": generator.getstate()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if self.kind == "kept":
            random.setstate(state["generator"])
        elif self.kind == "late":
            self.resume = state["generator"]
        elif self.kind == "own":
            self.own.setstate(state["generator"])


class _Shuffled(_Place):
    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.values: Any = random.sample(self.values, len(self.values))

    def __next__(self) -> Any:
        return super().__next__() + random.random()
