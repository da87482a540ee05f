"""Samplers and streams of all kinds that loaders meet, for the model and for worker processes.

Those that count their epochs themselves do so in what they give: ``1000 * pass + index``.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
import time
from asyncio import sleep
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from helpers import Numbers as Steady

from minloader import SKIP, get_worker_info

PASS = 1000


def shuffled_indices(n: int, number: int) -> list[int]:
    """The order of a pass over so many indices; pass 0 is in their own order."""
    order = list(range(n))
    if number:
        random.Random(number).shuffle(order)
    return order


# --- samplers ------------------------------------------------------------------------------------


def every_rank(kind: Callable[..., Any], world_size: int, epoch: int = 0) -> list[Any]:
    """The samplers of all ranks, in an epoch."""
    ranks = [kind(rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return ranks


class Told:
    """Its order follows from ``set_epoch``, and it has no state; as torch's DistributedSampler."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([PASS * self.epoch + each for each in shuffled_indices(self.n, self.epoch)])


class EverySecond(Told):
    """As :class:`Told`, but every second epoch has nothing."""

    def __len__(self) -> int:
        return 0 if self.epoch % 2 else self.n

    def __iter__(self) -> Iterator[int]:
        return iter(()) if self.epoch % 2 else super().__iter__()


class Counted:
    """Counts its passes itself, has a state and no ``set_epoch``. Its ``__iter__`` is a generator.

    At the end of a pass, the state leads to the next.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.passes = self.at = 0
        self.loaded = False

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        yield from self.begin()

    def begin(self) -> Iterator[int]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        return self.read(self.passes, shuffled_indices(self.n, self.passes))

    def read(self, number: int, order: list[int]) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield PASS * number + order[self.at - 1]
        self.end()

    def end(self) -> None:
        self.passes += 1
        self.at = 0

    def state_dict(self) -> Any:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.passes, self.at = state["passes"], state["at"]
        self.loaded = True


class CountedIterator(Counted):
    """As :class:`Counted`, but its ``__iter__`` runs when it is called."""

    def __iter__(self) -> Iterator[int]:
        return self.begin()


class ToldWithState(Counted):
    """Has ``set_epoch`` and a state, as torchdata's and lhotse's."""

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.passes:
            self.passes, self.at, self.loaded = epoch, 0, False

    def end(self) -> None:
        """It stays at its end."""


class Apart:
    """A sampler whose iterators count for themselves. Its state is of the one made last, until that
    has ended."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.start = 0
        self.latest = range(0)

    def __iter__(self) -> Any:
        self.latest = iter(range(self.start, self.n))
        self.start = 0
        return self.latest

    def state_dict(self) -> Any:
        left = operator.length_hint(self.latest)
        return {"at": self.n - left} if left else None

    def load_state_dict(self, state: Any) -> None:
        self.start = state["at"]


class Refusing(Apart):
    """It raises where that has no state."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        if state is None:
            raise LookupError("not begun, or at the end")
        return state


class OwnGenerator:
    """Shuffles by a generator of its own, and can be repeated by nothing; as torch's RandomSampler
    with ``generator``."""

    def __init__(self, n: int, seed: int = 5) -> None:
        self.n = n
        self.generator = random.Random(seed)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.sample(range(self.n), self.n))


class Reusing:
    """Gives the same list again and again, with other indices in it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.item: list[int] = []

    def __len__(self) -> int:
        return -(-self.n // 2)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.n, 2):
            self.item[:] = range(first, min(first + 2, self.n))
            yield self.item


class BeginsAnew:
    """Is its own iterator, and begins anew with each ``iter``."""

    begun = 0

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        self.left = iter(self.items)
        self.begun += 1
        return self

    def __next__(self) -> Any:
        return next(self.left)


class ServesOnce(BeginsAnew):
    """The same, but it can be read once."""

    def __iter__(self) -> Iterator[Any]:
        return self if self.begun else super().__iter__()


BAD_ITEM = 999
"""What an error of :class:`Failing` names."""


class Failing:
    """Raises once, before an item; it goes on behind that.

    Args:
        n: number of items.
        bad: before which of them.
    """

    def __init__(self, n: int, bad: int) -> None:
        self.n = n
        self.bad: int | None = bad

    def __iter__(self) -> Iterator[int]:
        return _FailingItems(self)


class _FailingItems:
    def __init__(self, owner: Failing) -> None:
        self.owner = owner
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.owner.n:
            raise StopIteration
        if self.at == self.owner.bad:
            self.owner.bad = None
            raise ValueError(f"{BAD_ITEM} is bad")
        self.at += 1
        return self.at - 1


class Raising:
    """Raises in place of some items, each time; its iterators are no generators, so they go on."""

    def __init__(self, n: int, bad: Iterable[int]) -> None:
        self.n, self.bad = n, set(bad)

    def __iter__(self) -> Iterator[int]:
        return map(self._give, range(self.n))

    def _give(self, number: int) -> int:
        if number in self.bad:
            raise OSError(f"{number} is bad")
        return number


# --- streams with a state, in the ways in which people write them ---------------------------------
#
# All but the last give ``100 * epoch + number`` for the numbers of their shard, and count the
# epochs themselves.


def shard() -> tuple[int, int]:
    """The number of this shard, and how many there are, also in a worker of torch's own."""
    info: Any = get_worker_info()
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

    def read(self) -> Iterator[Any]:
        while self.i < len(self.values()):
            self.i += 1
            yield self.on_sample(self.values()[self.i - 1])

    def __iter__(self):
        yield from self.read()
        self.i = 0
        self.epoch += 1

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "i": self.i}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.i = state["epoch"], state["i"]


class Numbered(Counting):
    """Is told the number of its epoch, which its state has, too."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        yield from self.read()
        self.i = 0


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
        yield from self.read()

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


class Ready(Resuming):
    """Makes an iterator to say where it is, which the next ``iter`` returns, whatever was loaded
    meanwhile; as the loader of torchdata's nodes."""

    latest: Any = None
    is_ready = False

    def __iter__(self):
        if not self.is_ready:
            if self.resume is None:
                self.epoch += 1
                self.i = 0
            else:
                Counting.load_state_dict(self, self.resume)
                self.resume = None
            self.latest = _Latest(self)
        self.is_ready = False
        return self.latest

    def state_dict(self) -> Any:
        if self.latest is None:
            iter(self)
            self.is_ready = True
        return super().state_dict()


class _Latest:
    def __init__(self, stream: Ready) -> None:
        self.stream = stream

    def __iter__(self):
        return self

    def __next__(self) -> int:
        return OwnIterator.__next__(self.stream)


IDIOMS = [Counting, OwnIterator, Resuming, Separate, Ready]


class Sticky(Counting):
    """Begins at the state that it was given last, each time; as the datasets of Hugging Face do
    while ``set_epoch`` is not called. It counts nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.start = 0

    def __iter__(self):
        self.i = self.start
        yield from self.read()

    def load_state_dict(self, state: Any) -> None:
        self.start = state["i"]


class GoesOn(Counting):
    """Is its own iterator. The next ``iter`` behind a state goes on there, as that of lhotse's
    samplers. It counts nothing."""

    is_put = False

    def __iter__(self):
        self.i *= self.is_put
        self.is_put = False
        return self

    __next__ = OwnIterator.__next__

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.is_put = True


class ToldHowFar:
    """As MosaicML's streams and litData's: its ``state_dict`` needs arguments."""

    def __init__(self, n: int = 8, on_sample: Callable[[int], int] = same) -> None:
        self.n = n
        self.on_sample = on_sample

    def __iter__(self) -> Any:
        first, step = shard()
        return map(self.on_sample, range(first, self.n, step))

    def state_dict(self, num_samples: int, from_beginning: bool) -> Any:
        return {"samples": num_samples}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it has no state that could be put back")


class OwnToldHowFar(ToldHowFar):
    """The same, its own iterator: it begins anew with each ``iter``."""

    def __iter__(self) -> Any:
        self.left = super().__iter__()
        return self

    def __next__(self) -> int:
        return next(self.left)


class SaysNothing(ToldHowFar):
    """As what inherits from torchdata's or torch's protocol ``Stateful``, and writes neither."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return None


class Unwritten(ToldHowFar):
    """As what inherits from an abstract class."""

    def state_dict(self) -> Any:  # type: ignore[override]
        raise NotImplementedError


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


# --- streams -------------------------------------------------------------------------------------


def shard_of(values: range) -> range:
    first, step = shard()
    return values[first::step]


class OwnOrder(Steady):
    """The order is its own, and another one whenever it is read; as webdataset shuffles.

    Where two orders have the same sample in one place, they are the same: a loader that looks at
    one batch can tell.
    """

    def __iter__(self) -> Iterator[Any]:
        numbers = list(shard_of(range(self.n)))
        first = random.Random(time.time_ns()).randrange(len(numbers) or 1)
        for number in numbers[first:] + numbers[:first]:
            yield self.on_sample(number)


class Opened(Steady):
    """Is ready to be read only after :func:`open_stream`, of the worker's own shard."""

    opened: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[int]:
        if self.opened is None:
            raise AttributeError("this copy was not opened")
        first, step = self.opened
        for number in range(first, self.n, step):
            yield self.on_sample(number)


class OpenedCounting(Counting):
    """The same with a state, and a count of its passes."""

    opened: tuple[int, int] | None = None

    def values(self) -> range:
        if self.opened is None:
            raise AttributeError("this copy was not opened")
        first, step = self.opened
        return range(100 * self.epoch + first, 100 * self.epoch + self.n, step)


def open_stream(info: Any) -> None:
    """A ``worker_init_fn``."""
    stream = getattr(info.dataset, "stream", info.dataset)  # one that is shuffled
    stream.opened = info.id, info.num_workers


class Passes(Steady):
    """Counts its passes in an attribute, when they begin, and has no state."""

    passes = -1

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for number in shard_of(range(self.n)):
            yield PASS * self.passes + self.on_sample(number)


class Sometimes:
    """Takes 0.04 s at some numbers, and no time at the others.

    Args:
        every: each so many-th number.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, number: int) -> int:
        if number % self.every < 2:
            threading.Event().wait(0.04)
        return number


class FailsWhen:
    """Raises at a number while there is a file.

    Args:
        number: which.
        path: of the file.
    """

    def __init__(self, number: int, path: str) -> None:
        self.number = number
        self.path = path

    def __call__(self, number: int) -> int:
        import os

        if number == self.number and os.path.exists(self.path):
            raise OSError("the network is down")
        return number


class Uneven(Steady):
    """Shard ``k`` has ``k`` numbers fewer than the first, and the last one has none."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.on_sample, uneven_part(self.n, *shard()))


def uneven_part(n: int, shard: int, shards: int) -> list[int]:
    numbers = list(range(shard, n, shards))
    if shard and shard == shards - 1:
        return []
    return numbers[: len(numbers) - shard]


# --- for the model -------------------------------------------------------------------------------


def plain(item: Any) -> Any:
    """An item as tuples and numbers: two that are alike are equal."""
    if isinstance(item, (list, tuple)):
        return tuple(map(plain, item))
    return item if item is None or isinstance(item, str) else int(item)


def index_of(item: Any) -> int:
    """The last index in an item, without the number of its pass."""
    while isinstance(item, (list, tuple)):
        item = item[-1]
    return int(item) % PASS


def drawn() -> int:
    info = get_worker_info()
    assert info is not None
    return int(info.rng.integers(1 << 40))


class Cook:
    """Gives the item and a random number of the batch; what is given such a pair adds another.

    Args:
        bad: indices of items that raise, see :func:`index_of`.
        left_out: those of items for which it says SKIP.
        slow: those of items that take 0.02 s.
        n: its length.
        draws: whether it draws a number.
    """

    def __init__(
        self, bad: Any = (), left_out: Any = (), slow: Any = (), n: int = 0, draws: bool = True
    ) -> None:
        self.bad = set(bad)
        self.left_out = set(left_out)
        self.slow = set(slow)
        self.n = n
        self.draws = draws

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, item: Any) -> Any:
        if index_of(item) in self.slow:
            threading.Event().wait(0.02)
        return self.made(item)

    def __call__(self, sample: Any) -> Any:
        """As a ``transform``."""
        item = sample[0] if isinstance(sample, tuple) else sample
        if isinstance(item, str):
            return sample
        return self.made(item)[0], (getattr(sample, "draw", 0), drawn())

    def made(self, item: Any) -> Any:
        index = index_of(item)
        if index in self.bad:
            raise ValueError(f"{index} is bad")
        return SKIP if index in self.left_out else (plain(item), self.draws and drawn())


class Awaited(Cook):
    """The same, which is awaited."""

    async def __getitem__(self, item: Any) -> Any:
        await sleep(0.02 * (index_of(item) in self.slow))
        return self.made(item)


class Number(int):
    """A number of a stream, and one that the stream has drawn."""

    draw = 0


class Slow:
    """Draws for each number of a stream. Some take 0.02 s, and for some it says SKIP.

    Args:
        slow, left_out: which.
    """

    def __init__(self, slow: Any, left_out: Any = ()) -> None:
        self.slow = set(slow)
        self.left_out = set(left_out)

    def __call__(self, number: int) -> Any:
        if number % 100 in self.slow:
            threading.Event().wait(0.02)
        given = Number(number)
        given.draw = drawn()
        return SKIP if index_of(number) in self.left_out else given


def combined(samples: list[Any]) -> Any:
    """Collates items and draws."""
    items, draws = zip(*samples, strict=True)
    return items, draws
