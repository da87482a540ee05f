"""Datasets and functions that worker processes import by name.

Numpy is imported where it is needed: a worker starts in half the time without it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import minloader
from minloader import get_worker_info

SHARED = re.compile(r"(memfd:minloader-\w+|/minloader-\w+)( \(deleted\))?$")
"""The end of a shared file's path. A clone has the package's name too, with all that lies in it."""


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
    """Random data from the global generators; numpy.random is first imported here, late.

    A normal number is drawn with another, which they keep for the next time.
    """

    def __getitem__(self, item: Any) -> Any:
        import numpy as np

        numbers = random.random(), np.random.random(), random.randrange(1 << 60)
        return *numbers, random.gauss(0, 1), np.random.standard_normal()


class TorchNoise(Noise):
    """Imports torch as late as one can."""

    def __getitem__(self, item: Any) -> Any:
        import torch

        return torch.rand(3).tolist()


NUMBER = 0


class Changing:
    """Tells all that may change between epochs."""

    count = 0

    def __init__(self) -> None:
        import numpy as np

        self.labels = np.zeros(5_000, np.int64)
        self.seen = np.zeros(5_000, np.int64)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        self.seen[index] += 1  # of the epoch alone
        changing = [NUMBER, Changing.count, int(os.environ.get("COUNT", 0))]
        return [*changing, int(self.labels[index]), int(self.seen[index])]


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
    import numpy as np

    kind, *rest = recipe
    if kind == "array":
        return lay_out(*rest)
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
    import numpy as np

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


def numbered(index: int, size: int = 240_000) -> Any:
    """An array that is full of its number, and lies in a slot from 16 KiB."""
    import numpy as np

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
            self.kept = minloader.empty(self.size, "i8")
        else:
            assert (self.kept == self.value).all(), "somebody else has written here"
        self.kept[:] = self.value = index
        other = minloader.empty(self.size, "i8")
        other[:] = -index
        return index, self.kept, other, self.kept[1:]


class Trouble:
    """Fails in some way after a part of its batch was born in the slot."""

    def __getitem__(self, item: tuple[int, str]) -> Any:
        index, trouble = item
        array = minloader.empty(60_000, "i4")
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
    ours = minloader.empty(30_000, "i4")
    ours[:] = index
    here.send("filled")
    theirs = here.recv()
    child.join()
    return ours, theirs


def _fill(pipe: Any, index: int) -> None:
    theirs = minloader.empty(30_000, "i4")
    theirs[:] = -index
    pipe.send("filled")
    pipe.recv()
    pipe.send(theirs)


class Forker:
    """A child keeps a part of batch 0, and tells of it with batch 30."""

    def __getitem__(self, index: int) -> Any:
        array = minloader.empty(30_000, "i4")
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


class AllNoise(Noise):
    """Random data from every generator there is."""

    def __getitem__(self, item: Any) -> Any:
        import numpy as np

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


class Guarded:
    """Gives the item and some noise; some items are not to be asked for, some fail.

    Args:
        faulty: items that raise.
        delay: longest that an item takes, in seconds.
        gate: item 0 waits until there is a file of this name.
    """

    def __init__(self, faulty: Any = (), delay: float = 0.0, gate: str | None = None) -> None:
        self.faulty = list(faulty)
        self.delay = delay
        self.gate = gate

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: Any) -> Any:
        if self.delay:
            threading.Event().wait(random.SystemRandom().random() * self.delay)
        while self.gate is not None and item == 0 and not os.path.exists(self.gate):
            threading.Event().wait(0.01)
        if item in self.faulty:
            raise ValueError(f"item {item} is bad")
        info = get_worker_info()
        assert info is not None
        return item, info.rng.integers(1 << 40)

    @staticmethod
    def forbid(loader: Any, items: Any) -> None:
        """From now on, none of these may be loaded: told by whatever submits tasks."""
        from minloader._diagnosis.inspect import inspect  # here: workers import this module

        forbidden = list(items)
        (pool,) = inspect(loader).group.pools
        submit = type(pool).submit.__get__(pool)

        def checked(task: Any, bell: Any) -> Any:
            for item in task.items:
                assert getattr(item, "item", item) not in forbidden, f"{item} is loaded again"
            return submit(task, bell)

        pool.submit = checked


def stats_of(**figures: Any) -> Any:
    """Stats with these figures, by the names that ``as_dict`` has: ``time_wait=1.0``."""
    from minloader import Stats

    stats = Stats()
    for name, value in figures.items():
        part, _, inner = name.partition("_")
        if inner:
            setattr(getattr(stats, part), inner, value)
        else:
            setattr(stats, name, value)
    return stats


class Stateful:
    """A sampler with a state, as torchdata's: iterators are generators, and count on the object."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.drawn = 0
        self.yielded = 0
        self.start = 0

    def __iter__(self):
        self.yielded, self.start = self.start, 0
        for item in list(self.items)[self.yielded :]:
            self.yielded += 1
            self.drawn += 1
            yield item

    def state_dict(self) -> Any:
        return {"yielded": self.yielded, "nested": [1]}

    def load_state_dict(self, state: Any) -> None:
        self.start = state.pop("yielded")
        state["nested"].append(2)


class SelfIterating:
    """A sampler that is its own iterator and begins anew with ``iter``, as lhotse's."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)
        self.drawn = 0
        self.position = 0
        self.epoch = 0
        self.restored = False

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.position, self.restored = epoch, 0, False

    def __iter__(self) -> SelfIterating:
        if not self.restored:
            self.position = 0
        return self

    def __next__(self) -> Any:
        self.restored = False
        if self.position == len(self.items):
            raise StopIteration
        self.position += 1
        self.drawn += 1
        return self.items[self.position - 1]

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state.pop("position")
        self.restored = True


class Lazily:
    """An iterable that does not tell its length."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self):
        yield from self.values


def once(path: str) -> bool:
    """Whether this is the first call for that path, in whichever process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def once_in(folder: str, number: int) -> bool:
    """Whether this is the first to ask for the number."""
    return once(f"{folder}/did-{number}")


def _same(number: int) -> int:
    return number


class Numbers:
    """A stream: every shard has each so many-th number.

    Args:
        n: how many there are in all; None: no end of them. A list says it for each epoch.
        on_sample: called with each, when it is read.
    """

    def __init__(self, n: int | list[int] | None, on_sample: Any = _same) -> None:
        self.n = n
        self.on_sample = on_sample

    def numbers(self) -> Any:
        info = get_worker_info()
        assert info is not None
        if self.n is None:
            return itertools.count(info.id, info.num_workers)
        n = self.n[info.epoch] if isinstance(self.n, list) else self.n
        return range(info.id, n, info.num_workers)

    def __iter__(self):
        yield from map(self.on_sample, self.numbers())


class Reshuffling:
    """A sampler with a new order in each pass, from a generator of its own, which its state has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.random = random.Random(5)
        self.began = self.random.getstate()
        self.position = 0
        self.loaded: Any = None

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.position = 0
        if self.loaded is not None:
            (version, numbers, gauss), self.position = self.loaded
            self.random.setstate((version, tuple(numbers), gauss))
            self.loaded = None
        self.began = self.random.getstate()
        order = self.random.sample(range(self.size), self.size)
        while self.position < self.size:
            self.position += 1
            yield order[self.position - 1]
        self.began = self.random.getstate()
        self.position = 0

    def state_dict(self) -> Any:
        return {"place": self.loaded or (self.began, self.position)}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["place"]


class StatefulNumbers(Numbers):
    """Its position is the object's, and what it goes on from."""

    def __init__(
        self, *args: Any, forbidden: int = 0, broken_state: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.position = 0
        self.forbidden = forbidden
        self.broken_state = broken_state

    def __iter__(self):
        numbers = self.numbers()
        while self.position < len(numbers):
            assert self.position >= self.forbidden, "it was read from the beginning"
            self.position += 1
            yield self.on_sample(numbers[self.position - 1])
        self.position = 0

    def state_dict(self) -> Any:
        if self.broken_state and self.position:
            raise OSError("no state")
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class StatefulIterator(Numbers):
    """Its iterators know their positions, and can go on after an error."""

    def __init__(
        self,
        *args: Any,
        bad: int | None = None,
        error: type[BaseException] = ValueError,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.bad = bad
        self.error = error

    def __iter__(self):
        return _NumbersIterator(self)


class _NumbersIterator:
    def __init__(self, stream: StatefulIterator) -> None:
        self.stream = stream
        self.numbers = stream.numbers()
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.position >= len(self.numbers):
            raise StopIteration
        number = self.numbers[self.position]
        self.position += 1
        if number == self.stream.bad:
            raise self.stream.error(f"{number} is bad")
        return self.stream.on_sample(number)

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class Scripted(Numbers):
    """Numbers, with things that happen at some of them.

    Args:
        deeds: what happens, by number.
        opens: a file that is open while the stream is read.
        epochs: gives the epoch that it was told together with the number.
        noise: adds random numbers, from a generator that is "kept" from the first sample on,
            "asked" for with each, or "global".
        shrinks: a file; if it is there, the stream has 10 numbers.
    """

    def __init__(
        self,
        n: int,
        deeds: Any = (),
        opens: str | None = None,
        epochs: bool = False,
        noise: str | None = None,
        shrinks: str | None = None,
        on_sample: Any = _same,
    ) -> None:
        super().__init__(n, on_sample)
        self.deeds = dict(deeds)
        self.opens = opens
        self.epochs = epochs
        self.noise = noise
        self.shrinks = shrinks
        self.epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        import numpy as np

        with open(self.opens or os.devnull, "a"):
            numbers = self.numbers()
            if self.shrinks is not None and os.path.exists(self.shrinks):
                numbers = numbers[:10]
            info = get_worker_info()
            assert info is not None
            kept = info.rng
            for number in numbers:
                self.act(number, *self.deeds.get(number, (None,)))
                number = self.on_sample(number)
                if self.noise == "global":
                    number += random.random() + np.random.random()
                elif self.noise is not None:
                    number += (kept if self.noise == "kept" else get_worker_info().rng).random()
                yield (self.epoch, number) if self.epochs else number

    def act(self, number: int, deed: str | None, path: str = "") -> None:
        if deed == "raises":
            raise ValueError(f"{number} is bad")
        if deed == "waits":
            while not os.path.exists(path):
                threading.Event().wait(0.01)
        if deed == "dies" and once_in(path, number):
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hangs" and once_in(path, number):
            while not os.path.exists(f"{path}/go"):
                threading.Event().wait(0.01)


def add_noise(number: float) -> float:
    """From the generators that the stream uses too."""
    info = get_worker_info()
    assert info is not None
    return number + 1000 * info.rng.random() + random.random() * 0


class BrokenStream:
    def __iter__(self):
        raise OSError("no such disk")


def wide(number: int) -> Any:
    """A large array that is full of its number."""
    import numpy as np

    return np.full(100_000, number)


def whereabouts(sample: Any) -> Any:
    """The process, the shard and the number of shards."""
    info = get_worker_info()
    assert info is not None
    return os.getpid(), info.id, info.num_workers


def open_files(sample: Any) -> int:
    """How many files of the name "file" the process has open."""
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(name.endswith("file") for name in names)


def draw(sample: float) -> Any:
    """The sample, and a number from the batch's generator."""
    info = get_worker_info()
    assert info is not None
    return sample, info.rng.random()


class Refuses:
    """Fails for one number."""

    def __init__(self, bad: int, error: type[BaseException] = ValueError) -> None:
        self.bad = bad
        self.error = error

    def __call__(self, number: int) -> int:
        if number == self.bad:
            raise self.error(f"{number} is bad")
        return number


class Deadly:
    """Kills the worker at some numbers, once each, or always."""

    def __init__(self, numbers: set[int], folder: str | None) -> None:
        self.numbers = numbers
        self.folder = folder

    def __call__(self, number: int) -> int:
        if number in self.numbers and (self.folder is None or once_in(self.folder, number)):
            os.kill(os.getpid(), signal.SIGKILL)
        return number


class Slowly:
    """Takes 0.05 s."""

    def __call__(self, number: int) -> int:
        threading.Event().wait(0.05)
        return number
