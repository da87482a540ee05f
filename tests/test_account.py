"""One account of what was drawn and not handed over: states, Ctrl-C and errors that meet it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from conftest import SLOW, WAYS, eventually, in_a_fork, making, outcomes, plain, variants
from helpers import Deadly, Echo, Faulty, Numbers, Refuses, Scripted
from interrupts import (
    FEEDS,
    FINALIZERS,
    OURS,
    READER,
    SHARD_FEEDS,
    TESTS,
    Outcome,
    TimeLimit,
    Within,
    at_each_step,
    drops_errors,
    each_place,
    interrupted,
    some_steps,
    taken_through,
)
from kinds import (
    BAD_ITEM,
    PASS,
    BeginsAnew,
    Counted,
    Counting,
    Failing,
    OwnGenerator,
    ServesOnce,
    Told,
    ToldWithState,
    same,
    shuffled_indices,
)

from minloader import (
    BatchError,
    BatchSampler,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    concurrent,
    get_worker_info,
    prefetch,
)
from minloader._diagnosis.inspect import inspect
from minloader._pools.group import PoolGroup
from minloader._worker import seeds

N = 9
HERE, THREADS, PROCESSES = WAYS.values()
WAYS_TO_START = WAYS | {"spawn": {"num_workers": 2}}


@pytest.fixture(params=["inline", "thread", pytest.param("process-2", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Loader]]:
    with making(request) as factory:
        yield factory


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever an interrupt came between: no descriptor and no child is left."""
    if "interrupt" not in request.node.name:
        yield
        return
    before = descriptors()
    yield
    gc.collect()
    assert not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
    assert descriptors() <= before


def descriptors() -> set[str]:
    """Shared files and sockets that are open here; pipes may be of multiprocessing's helpers."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    found = {os.readlink(link) for link in links if os.path.exists(link)}
    return {f for f in found if f.startswith(("/memfd:", "socket:"))}


# --- states of samplers ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", [HERE, THREADS])
def test_what_comes_after_batches_that_came_early_keeps_its_place(way):
    """In its draws, and in the states that follow."""

    def drawn(item: int) -> tuple[int, float]:
        info = get_worker_info()
        assert info is not None
        return item, float(info.rng.random())

    with Loader(drawn, range(40), **HERE) as loader:
        expected = list(loader)
    with Loader(drawn, range(40), **HERE) as loader:
        next(iter(loader))
        early = {3, 4, 8, *range(20, 30)}
        state = loader.state_dict() | {"delivered_ahead": sorted(early)}
    rest = [batch for n, batch in enumerate(expected) if n and n not in early]
    for taken in range(0, len(rest), 3):
        with Loader(drawn, range(40), **way) as loader:
            loader.load_state_dict(state)
            batches = iter(loader)
            assert [next(batches) for _ in range(taken)] == rest[:taken]
            later = loader.state_dict()
        with Loader(drawn, range(40), **HERE) as loader:
            loader.load_state_dict(later)
            assert list(loader) == rest[taken:]


@pytest.mark.parametrize("way", [HERE, THREADS])
def test_very_many_that_came_early_do_not_hold_up_the_rest(way):
    """Nor is a batch waited for that was not sent."""
    early = range(2, 2_500)
    with Loader(Echo(), range(3_000), **way) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(Echo(), range(3_000), in_order=False, **way) as loader:
        loader.load_state_dict(state | {"delivered_ahead": [*early]})
        assert sorted(loader) == [1, *range(2_500, 3_000)]


def test_only_so_many_overtake_a_batch(monkeypatch):
    """What was under way by then may, too."""
    monkeypatch.setattr("minloader._epochs.lane.MAX_AHEAD", 5)
    gate = threading.Event()

    def wait(item: int) -> int:
        if item == 0:
            gate.wait()
        return item

    with Loader(wait, map(int, range(100)), in_order=False, **THREADS) as loader:
        batches = iter(loader)
        early = [next(batches)]
        while loader.stats.workers.in_flight > 1:  # the first one is
            early.append(next(batches))
        assert 5 <= len(early) <= 5 + 2 * loader.num_workers
        gate.set()
        assert sorted([*early, *batches]) == list(range(100))


@pytest.mark.parametrize("bad", [4, 6, 9])
@pytest.mark.parametrize("way", [HERE, THREADS])
def test_an_error_of_the_sampler_comes_in_its_turn_between_batches_that_came_early(way, bad):
    early = {3, 4, 7, 8}
    sampler = Failing(12, 99)
    with Loader(Echo(), sampler, **way) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict() | {"delivered_ahead": sorted(early)})
        sampler.bad = bad
        rest = [n for n in range(1, 12) if n not in early]
        place = sum(n < bad for n in rest)
        assert list(outcomes_of(iter(loader))) == [
            *rest[:place],
            f"{BAD_ITEM} is bad",
            *rest[place:],
        ]


OVER: dict[str, Callable[[Any], Any]] = {
    "alone": lambda sampler: sampler,
    "batches": lambda sampler: BatchSampler(sampler, 2),
    "batches of batches": lambda sampler: BatchSampler(BatchSampler(sampler, 2), 2),
    "mixture": lambda sampler: MixtureSampler([sampler, N], [1, 1], 2, stop="last"),
}


class OwnNumpyGenerator(OwnGenerator):
    """As torch's RandomSampler, whose generator is of a class of this name, too."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(self.n).tolist())


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("kind", [OwnGenerator, OwnNumpyGenerator])
def test_an_order_that_nothing_repeats_is_refused_below_ours_and_anywhere_in_an_epoch(over, kind):
    """One item alone may be the same by chance: it proves nothing. Another epoch is not known."""
    states, given = [], []
    with Loader(Echo(), OVER[over](kind(N)), **THREADS) as whole:
        for batch in whole.epochs(2):
            given.append(batch)
            states.append((len(given), plain(whole.state_dict())))
        states.append((len(given), plain(whole.state_dict())))
    for taken, state in states:
        with Loader(Echo(), OVER[over](kind(N)), **HERE) as other:
            if state["epoch"]:
                with pytest.raises(ValueError, match="draws its order from a generator"):
                    other.load_state_dict(state)
            else:
                other.load_state_dict(state)
                rest = list(other.epochs(until=1))
                assert rest == given[taken : taken + len(rest)]


def test_an_iterator_that_goes_later_does_not_undo_set_epoch(make):
    with make(Echo(), range(6)) as loader:
        batches = prefetch(loader, str, 2)
        next(batches)
        batches.close()
        loader.set_epoch(0)
        del batches
        assert loader.epoch == 0


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_an_epoch_that_is_set_within_epochs_comes_next(make, is_prefetched):
    with make(Echo(), Told(3)) as loader:
        batches = loader.epochs(2)
        numbers = []
        for epoch, _ in prefetch(batches, same, 4) if is_prefetched else batches:
            numbers.append(epoch)
            loader.set_epoch(7)
        assert numbers == [0, 0, 0, 7, 7, 7]
        assert list(loader) == [7000 + each for each in shuffled_indices(3, 7)]


@variants("stride", [7, 1])
@pytest.mark.parametrize("way", ["inline", "threads"])
def test_a_state_that_another_thread_takes_leaves_out_nothing(way, stride):
    """Batches are taken at any instruction of ``state_dict``: it counts some of them, or none."""
    states: list[tuple[int, Any]] = []
    threads: list[threading.Thread] = []
    with Loader(Echo(), itertools.count(), **WAYS[way]) as loader:
        batches = iter(loader)
        taken = next(batches) + 1

        def take(done: threading.Event) -> None:
            nonlocal taken
            for _ in range(3):
                taken = next(batches) + 1
            done.set()

        def begin() -> None:
            done = threading.Event()
            threads.append(threading.Thread(target=take, args=(done,)))
            threads[-1].start()
            done.wait()

        def note() -> None:
            before = taken
            states.append((before, loader.state_dict()))
            for thread in threads:
                thread.join()

        assert at_each_step(OURS, note, begin, stride=stride) > 50
    for before, state in states:
        with Loader(Echo(), itertools.count(), num_workers=0) as other:
            other.load_state_dict(state)
            rest = list(itertools.islice(other, 20))
        assert before <= rest[0] <= before + 3
        assert rest == list(range(rest[0], rest[0] + 20))


class Item:
    """A number as numpy has it; counts how often any was looked at to tell it from others."""

    looked = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def tolist(self) -> int:
        Item.looked += 1
        return self.number


def test_to_go_past_items_is_not_to_look_at_each():
    with Loader(lambda item: item.number, map(Item, range(300)), num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(250):
            next(batches)
        state = loader.state_dict()
    Item.looked = 0
    with Loader(lambda item: item.number, map(Item, range(300)), num_workers=0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == list(range(250, 300))
    assert Item.looked <= 10


# --- Ctrl-C, again and again in a long run --------------------------------------------------------


def through_interrupts(batches: Iterator[Any]) -> tuple[list[Any], int]:
    """All batches, and how often the loop was interrupted."""
    given, times = [], 0
    while True:
        try:
            given.append(next(batches))
        except KeyboardInterrupt:
            times += 1
        except StopIteration:
            return given, times


EARLY = {each for n in range(10, 10**3, 11) for each in range(n, n + n % 5 + 1)}
"""Batches that came early, and are passed over."""


def past_holes(loader: Loader) -> Iterator[int]:
    next(iter(loader))
    loader.load_state_dict(loader.state_dict() | {"delivered_ahead": sorted(EARLY)})
    return iter(loader)


def prefetched(loader: Loader) -> Iterator[int]:
    return prefetch(loader, abs)


def fail(item: int) -> int:
    if item % 4 == 2:
        raise OSError(f"{item} is bad")
    return item


class outcomes_of:  # noqa: N801  # no generator: that would end with the first Ctrl-C
    """Batches, and the texts of errors in their places."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except (OSError, ValueError) as error:
            return str(error)


def with_errors() -> Iterator[Any]:
    return (f"{n} is bad" if n % 4 == 2 else n for n in itertools.count())


def epochs_of(epoch: Callable[[int], list[Any]]) -> Iterator[Any]:
    """What ``epochs`` gives."""
    return ((number, item) for number in itertools.count() for item in epoch(number))


def pairs(number: int) -> list[list[int]]:
    return [[0, 1], [2, 3], [4, 5]]


def indices_of(number: int) -> list[int]:
    """What the samplers of ``kinds`` give in an epoch of five indices."""
    return [PASS * number + each for each in shuffled_indices(5, number)]


class Long(NamedTuple):
    """A long run.

    Attributes:
        make: makes the loader, with the options of a way.
        expected: gives what must come.
        begin: makes the iterator.
        most: how many places are passed between two interrupts, at most.
        within: folder of the code in which they are counted.
        ways: where batches are made.
        times: how many interrupts there are, and in the slow tests.
    """

    make: Callable[..., Loader]
    expected: Callable[[], Iterator[Any]]
    begin: Callable[[Loader], Iterator[Any]] = iter
    most: int = 2_000  # a batch of a task that has come passes 10 places of ours, a task 300
    within: Within = OURS
    ways: Iterable[str] = ("inline", "threads")
    times: tuple[int, int] = (60, 400)


def counting(dataset: Any = None, **way: Any) -> Loader:
    return Loader(dataset or Echo(), itertools.count(), **way)


def of_pairs(**way: Any) -> Loader:
    return Loader(Echo(), BatchSampler(6, 2), **way)


CLOSE: dict[str, Any] = {
    "begin": Loader.epochs,
    "most": 80,
    "ways": ["threads"],
    "times": (300, 800),
}
"""A second interrupt comes while what the first has left is gone on with."""

LOCKS: dict[str, Any] = {"most": 80, "within": str(Path(threading.__file__).parent)}
"""Within locks of Python's own: for one that is not let go of, a thread would wait for ever."""

LONG: dict[str, Long] = {
    "next": Long(counting, itertools.count, ways=WAYS),
    # Short epochs: their ends and beginnings too.
    "epochs": Long(of_pairs, partial(epochs_of, pairs), Loader.epochs),
    "a stream": Long(lambda **way: Loader(Numbers(None), **way), itertools.count, ways=WAYS),
    "what came early": Long(
        lambda **way: Loader(Echo(), range(10**5), **way),
        lambda: (n for n in itertools.count(1) if n not in EARLY),
        past_holes,
        most=1_000,
    ),
    "errors, and prefetch": Long(
        partial(counting, fail),
        with_errors,
        lambda loader: outcomes_of(prefetched(loader)),
        most=500,
    ),
    "a lock": Long(counting, itertools.count, ways=["threads", "processes"], **LOCKS),
    "a lock, and prefetch": Long(counting, itertools.count, prefetched, ways=["threads"], **LOCKS),
    "close, ours": Long(of_pairs, partial(epochs_of, pairs), within=FEEDS, **CLOSE),
    "close, a stream": Long(
        lambda **way: Loader(Counting(5), **way),
        partial(epochs_of, lambda number: [100 * number + each for each in range(5)]),
        within=SHARD_FEEDS,
        **CLOSE,
    ),
    **{
        f"close, {kind.__name__}": Long(
            lambda kind=kind, **way: Loader(Echo(), kind(5), **way),
            partial(epochs_of, indices_of),
            within=FEEDS,
            **CLOSE,
        )
        for kind in (Counted, ToldWithState)
    },
}


@variants("slow", [False, True])
@pytest.mark.parametrize(
    ("run", "way"), [(name, way) for name, long in LONG.items() for way in long.ways]
)
def test_interrupts_in_a_long_run_lose_nothing(run, way, slow):
    long = LONG[run]
    times = long.times[slow]
    with long.make(**WAYS[way]) as loader:
        steps = some_steps(times, times, long.most)
        given = taken_through(long.begin(loader), steps, long.within)
        assert given == list(itertools.islice(long.expected(), len(given)))
        # What was being sent when an interrupt came may be under way: then a shard is read again.
        assert loader.stats.errors.reread == 0 or way != "inline"


@variants("times", [100, 400])
def test_interrupts_in_a_long_run_lose_nothing_out_of_order(times):
    with Loader(Echo(), itertools.count(), in_order=False, **THREADS) as loader:
        batches = iter(loader)
        given = taken_through(batches, some_steps(times, times, 2_000))
        unseen = set(range(max(given))) - set(given)
        while unseen:  # they are under way, and come before long
            given.append(next(batches))
            unseen.discard(given[-1])
    assert len(set(given)) == len(given)


@pytest.mark.parametrize(
    "data", [(Echo(), itertools.count()), (Numbers(None),)], ids=["map", "stream"]
)
def test_an_interrupt_while_lost_tasks_are_sent_again_loses_nothing(data, tmp_path):
    deadly = Deadly(set(range(100, 10**5, 300)), str(tmp_path))
    with Loader(*data, transform=deadly, retries=5, **PROCESSES) as loader:
        given = taken_through(iter(loader), some_steps(7, 200, 2_000))
        assert loader.stats.errors.replaced
    assert given == list(range(len(given)))


# --- Ctrl-C, at each place of a call --------------------------------------------------------------

Press = Callable[[Callable[[], Any]], Outcome]
"""Makes a call in which Ctrl-C comes."""


def begin_an_order_of_its_own(way: Any, press: Press) -> None:
    """It may be another one then: nobody has seen it."""
    with Loader(Echo(), OwnGenerator(9), **way) as loader:
        press(partial(iter, loader))
        assert sorted(loader) == list(range(9))


class OwnOrder:
    """Another order in each pass, which nothing repeats: of a sampler, or of a stream."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(9), 9)


def given_of(loader: Loader, press: Press) -> tuple[list[Any], Any]:
    """What comes of an epoch, and an error that ends it. Ctrl-C comes behind the first batch."""
    with loader:
        batches = iter(loader)
        given = [next(batches)]
        press(partial(given.extend, batches))
        try:
            given += batches
        except ValueError as error:
            return given, error
        return given, None


def go_on_with_an_order(way: Any, press: Press) -> None:
    """It is not another one; also where all batches that were drawn are of one task."""
    given, error = given_of(Loader(Echo(), OwnOrder(), **way), press)
    assert sorted(given) == list(range(9)) or "it was another one" in str(error)


def go_on_with_a_stream(way: Any, press: Press, batch_size: int | None) -> None:
    """It is not read again, at its end too: it would be another one, or count a pass too many."""
    given, error = given_of(Loader(OwnOrder(), batch_size=batch_size, **way), press)
    assert error is None
    assert sorted(np.hstack(given).tolist()) == list(range(9))


def go_on_from_a_state_that_does_not_fit(way: Any, press: Press) -> None:
    """Nothing of another order comes, wherever the item is drawn by which it is recognized."""
    with Loader(Echo(), OwnGenerator(300), **way) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        batches = loader.epochs(1)
        before = press(partial(outcomes, batches)).value or []
        (error,) = [*before, *outcomes(batches)]
    assert "the state does not fit: item" in str(error)


class Drawing:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        info = get_worker_info()
        assert info is not None
        return index + info.rng.random()


def load_a_state_of_another_seed(way: Any, press: Press) -> None:
    """The loader, the sampler that it made and the workers have one seed."""
    make = partial(Loader, Drawing(), batch_size=2, shuffle=True, **way)
    with make(seed=7) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(seed=None) as loader:
        seed, batches = loader.seed, iter(loader)
        given = [next(batches)]
        press(partial(loader.load_state_dict, state))
        with make(seed=loader.seed) as other:
            expected = [batch.tolist() for _, batch in other.epochs(2)]
        if loader.seed == seed:
            given += batches
        given += [batch for _, batch in loader.epochs(until=2)]
    loaded = loader.seed != seed
    assert [batch.tolist() for batch in given[loaded:]] == expected[loaded:]


def draw(item: int) -> tuple[float, float]:
    return random.random(), np.random.random()


def make_a_batch_here(way: Any, press: Press) -> None:
    """It gives back what it borrowed: the generators, the info, and the turn of threads."""
    random.seed(1)
    np.random.seed(1)
    with Loader(draw, range(3), **way) as loader:
        batches = iter(loader)
        press(partial(next, batches))
    assert draw(0) == (random.Random(1).random(), np.random.RandomState(1).random())
    assert get_worker_info() is None
    held: list[Any] = []
    with ThreadPoolExecutor(1) as thread:
        thread.submit(seeds.reserve_globals, held).result()
        assert [thread.submit(lock.release).result() for lock in held] == [None]


def begin(loader: Loader) -> int:
    return next(iter(loader))


def start_threads(way: Any, press: Press, call: Callable[[Loader], Any]) -> None:
    """No thread is left."""
    before = set(threading.enumerate())
    with Loader(Echo(), range(4), **way) as loader:
        press(partial(call, loader))
        loader.epoch = 0
        assert list(loader) == [0, 1, 2, 3]
    assert eventually(lambda: set(threading.enumerate()) <= before)


def start_processes(way: Any, press: Press) -> None:
    """Nothing is lost."""
    with Loader(Echo(), range(40), **way) as loader:
        begun: list[Iterator[int]] = []
        given: list[int] = []

        def take() -> None:
            begun.append(iter(loader))
            given.append(next(begun[0]))

        press(take)
        given.extend(begun[0] if begun else loader)
    assert given == list(range(40))


def prefetch_from_an_iterator(way: Any, press: Press) -> None:
    """Also not between taking a batch and sending it to the thread."""
    with prefetch(iter(range(6)), lambda n: -n, depth=2) as batches:
        outcome = press(batches.__next__)
        given = [*batches] if outcome.interrupted else [outcome.value, *batches]
    assert given == [0, -1, -2, -3, -4, -5]
    assert outcome.interrupted == outcome.reached


class Pressed(NamedTuple):
    """A program, in a call of which Ctrl-C comes.

    Attributes:
        program: is given where batches are made, and what makes the call.
        strides: how far apart the places are where it comes, and in the slow tests.
        within: folder of the code in which they are counted.
        least: how many there must be.
        ways: where batches are made.
    """

    program: Callable[[Any, Press], None]
    strides: tuple[int, ...] = (1,)
    within: Within = OURS
    least: int = 20
    ways: Iterable[str] = ("inline", "threads")


STREAM_READER = f"{OURS}/_worker/stream_reader.py", READER

PRESSED: dict[str, Pressed] = {
    "iter, of its own order": Pressed(begin_an_order_of_its_own, (5, 1), least=10),
    "an order": Pressed(go_on_with_an_order, within=FEEDS, least=10),
    **{
        f"a stream, by {size}": Pressed(
            partial(go_on_with_a_stream, batch_size=size), strides, STREAM_READER, 10, ["inline"]
        )
        for size, strides in {None: (3, 1), 2: (1,), 3: (3, 1)}.items()
    },
    "a state that does not fit": Pressed(
        go_on_from_a_state_that_does_not_fit, within=FEEDS, ways=["threads"]
    ),
    "a state of another seed": Pressed(load_a_state_of_another_seed, (13, 5)),
    "a batch made here": Pressed(make_a_batch_here, (3, 1), least=100, ways=["inline"]),
    "start": Pressed(partial(start_threads, call=Loader.start), (11, 2), "", ways=["threads"]),
    "start with next": Pressed(partial(start_threads, call=begin), (11, 2), ways=["threads"]),
    "start of processes": Pressed(start_processes, (197, 53), least=1_000, ways=["processes"]),
    "start of spawned processes": Pressed(start_processes, (293,), least=1_000, ways=["spawn"]),
    "prefetch": Pressed(prefetch_from_an_iterator, least=30, ways=["inline"]),
}


@pytest.mark.parametrize(
    ("call", "way", "stride"),
    [
        pytest.param(name, way, stride, marks=SLOW if n or way == "spawn" else [])
        for name, pressed in PRESSED.items()
        for way in pressed.ways
        for n, stride in enumerate(pressed.strides)
    ],
)
def test_an_interrupt_at_each_place(call, way, stride):
    pressed = PRESSED[call]
    for place, press in each_place(stride, pressed.within, pressed.least):
        try:
            pressed.program(WAYS_TO_START[way], press)
        except BaseException as error:
            error.add_note(f"Ctrl-C came at place {place}")
            raise


@variants("stride", [19, 3])
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_anywhere_in_close_leaves_nothing(way, stride):
    """Once it is called again; or else when the loader is let go of."""
    step, reached = 0, True
    while reached and step < 1_000:
        loader = Loader(Echo(), itertools.count(), **WAYS[way])
        batches = iter(loader)
        next(batches)
        workers = [worker.process for worker in inspect(loader).workers]
        reached = interrupted(loader.close, step).reached
        if step % 2:
            loader.close()
            with pytest.raises(RuntimeError, match="closed"):
                next(batches)
            assert eventually(lambda ended=workers: not any(each.is_alive() for each in ended))
        step += stride if step < 60 else stride * step // 24
    assert step


class InterruptsOnce:
    """Ctrl-C comes in it, once, before its second item."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.is_pressed = False

    def __iter__(self) -> Iterator[int]:
        for item in reversed(range(self.n)):
            if item == self.n - 2 and not self.is_pressed:
                self.is_pressed = True
                raise KeyboardInterrupt
            yield item


def test_a_state_is_compared_after_ctrl_c_in_the_sampler():
    with Loader(Echo(), range(9), **THREADS) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with Loader(Echo(), InterruptsOnce(9), **THREADS) as loader:
        loader.load_state_dict(state)
        batches = loader.epochs(1)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        (error,) = outcomes(batches)
    assert "the state does not fit: item 1 of the sampler is 7" in str(error)


@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeLimit])
@pytest.mark.parametrize("way", [{"num_workers": 0}, THREADS], ids=["here", "threads"])
def test_that_a_sampler_does_not_fit_is_told_after_what_comes_meanwhile(way, raises):
    """Also where it comes as the error is looked at: the epoch would be over in silence."""
    for place in itertools.count():
        with Loader(Echo(), OwnGenerator(9), prefetch_factor=1, **way) as loader:
            batches: Any = iter(loader)
            next(batches)
            interrupted(partial(next, batches), 9, f"{OURS}/_epochs/epoch", TimeLimit)
            assert batches.interrupts.is_unsure  # so that all is read again, in another order
            try:
                outcome = interrupted(partial(next, batches, None), place, OURS, raises)
            except ValueError:  # it has come before
                break
            assert outcome.interrupted, outcome
            with pytest.raises(ValueError, match="the state does not fit"):
                next(batches)
    assert place > 100


def test_what_close_raises_is_raised_once(monkeypatch):
    """No thread tries again what would fail again."""
    calls: list[PoolGroup] = []

    def fail(group: PoolGroup) -> None:
        calls.append(group)
        raise OSError("the cluster is gone")

    monkeypatch.setattr(PoolGroup, "close", fail)
    loader = Loader(Echo(), range(4), num_workers=0)
    with pytest.raises(OSError, match="the cluster is gone"):
        loader.close()
    loader.close()
    assert len(calls) == 1
    assert "minloader-close" not in {thread.name for thread in threading.enumerate()}


# --- errors ---------------------------------------------------------------------------------------


def stop(error: Any) -> Any:
    raise StopIteration


def test_on_error_that_raises_stop_iteration_ends_no_loop(make):
    loader = make(fail, range(8), on_error=stop)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(RuntimeError, match="on_error"):
        next(batches)
    assert [next(batches), next(batches), next(batches)] == [3, 4, 5]
    with pytest.raises(RuntimeError, match="on_error"):
        next(batches)
    assert list(batches) == [7]


class EndsAtEpoch:
    """A sampler of which a method raises StopIteration, from an epoch on."""

    def __init__(self, method: str, first: int) -> None:
        self.method = method
        self.first = first
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.call("set_epoch")

    def __iter__(self) -> Any:
        self.call("__iter__")
        return iter(range(3))

    def call(self, method: str) -> None:
        if method == self.method and self.epoch >= self.first:
            raise StopIteration


@pytest.mark.parametrize("method", ["set_epoch", "__iter__"])
def test_a_sampler_that_raises_stop_iteration_where_it_begins_ends_no_loop(method):
    for first in range(2):
        loader = Loader(Echo(), EndsAtEpoch(method, first), num_workers=0)
        batches = loader.epochs(2)
        assert list(itertools.islice(batches, 3 * first)) == [(0, n) for n in range(3 * first)]
        with pytest.raises(RuntimeError, match="the sampler raised StopIteration"):
            next(batches)


def unmounted(item: Any) -> Any:
    raise OSError(f"{item} is on a disk that is not there")


def test_batches_that_came_early_are_fruit_of_their_epoch():
    """What is left of it may fail then, in a resumed run as in an undisturbed one."""
    gate = threading.Event()

    def fail_late(item: int) -> int:
        if item == 0:
            gate.wait()
            raise OSError("the disk is full")
        return item

    options = {"on_error": "skip", "executor": "thread", "in_order": False}
    with Loader(fail_late, range(4), num_workers=2, **options) as loader:
        batches = iter(loader)
        assert sorted(next(batches) for _ in range(3)) == [1, 2, 3]
        state = loader.state_dict()
        gate.set()
        assert list(batches) == []
    with Loader(fail_late, range(4), num_workers=0, **options) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []


class NoIndex:
    def __iter__(self) -> Iterator[int]:
        raise OSError("there is no index")


def pressed(item: Any) -> Any:
    raise KeyboardInterrupt


FAIL: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dataset": lambda: (unmounted, range(6)),
    "sampler": lambda: (Echo(), Failing(6, 3)),
    "iter": lambda: (Echo(), NoIndex()),
    "ctrl-c": lambda: (pressed, range(3)),
    # 1 and 2 have no length: both errors come before the batches, and the second waits.
    "lengths": lambda: (Echo(), DynamicBatchSampler({0: 3, 3: 3}, 4, sampler=range(4))),
}


@pytest.mark.parametrize(
    ("where", "way"),
    [
        *itertools.product(FAIL, ["inline", "threads"]),
        ("dataset", "processes"),
        ("ctrl-c", "processes"),
    ],
)
def test_a_loader_that_failed_goes_when_it_is_let_go_of(where, way, no_collector):
    """At once, without the garbage collector: its iterator, its workers and its memory too."""

    def run() -> list[Any]:
        loader = Loader(*FAIL[where](), **WAYS[way])
        left = [weakref.ref(loader)]
        try:
            batches = iter(loader)
            left.append(weakref.ref(batches))
            list(batches)
        except (BatchError, KeyError, KeyboardInterrupt, OSError, ValueError):
            return left  # not pytest.raises, which keeps the error, and with it all frames
        raise AssertionError("nothing failed")

    assert {each() for each in run()} == {None}


@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeLimit])
@pytest.mark.parametrize("data", [(Echo(), OwnGenerator(6)), (Numbers(6),)])
def test_an_iterator_that_an_interrupt_came_out_of_goes_when_it_is_let_go_of(
    data, raises, no_collector
):
    """At once, from each third place: or ``skip`` would still be of its epoch, not of the next."""
    places = 0
    for place in itertools.count(0, 3):
        loader = Loader(*data, **HERE)
        batches = iter(loader)
        next(batches)
        outcome = interrupted(batches.__next__, place, raises=raises)
        if not outcome.reached:
            break
        places += outcome.interrupted
        seen = weakref.ref(batches)
        del batches
        assert seen() is None, outcome.where
        if len(data) == 2:
            loader.skip(2)
            assert len(list(loader)) == 6 - 2
    assert places > 80


class AwaitedFaulty(Numbers):
    async def __getitem__(self, index: int) -> int:
        if index == 0:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("where", ["dataset", "stream", "read by threads", "awaited"])
def test_a_batch_that_was_replaced_or_skipped_keeps_nothing(where, way, no_collector):
    """The frames of its error are those of who was waiting for it."""

    def run(on_error: Any, expected: int) -> Any:
        options: dict[str, Any] = {"on_error": on_error, **WAYS[way]}
        if where == "stream":
            options["transform"] = Refuses(0)
        sampler = None if where == "stream" else range(6)
        dataset: Any = Numbers(6) if where == "stream" else Faulty(6, {0: ValueError})
        if where in ("read by threads", "awaited"):
            dataset = concurrent(AwaitedFaulty(6) if where == "awaited" else dataset, 1)
        loader = Loader(dataset, sampler, **options)
        for _ in range(2):
            batches = iter(loader)
            assert next(batches) == expected
            seen = weakref.ref(batches)
            del batches
            assert seen() is None
        return weakref.ref(loader)

    assert run("skip", 1)() is None
    assert run(lambda failure: -1, -1)() is None


WAITING: dict[str, tuple[Any, Any]] = {
    "sampler": (Echo(), Failing(6, 3)),
    "item": (Echo(), [0, 1, 2, threading.Lock(), 4]),  # which cannot be pickled
    "dataset": (Faulty(6, {3: ValueError}), range(6)),
    "stream": (Scripted(6, {3: ("raises",)}), None),
}


@pytest.mark.parametrize(
    ("where", "way"),
    [
        ("sampler", "threads"),
        ("item", "processes"),
        ("dataset", "threads"),
        ("dataset", "processes"),
        ("stream", "threads"),
    ],
)
def test_an_error_that_waits_for_its_turn_keeps_nothing(where, way, no_collector):
    """An epoch is left when its iterator is let go of, and what is called then is for the next."""
    dataset, sampler = WAITING[where]

    def run() -> Any:
        loader = Loader(dataset, sampler, prefetch_factor=4, **WAYS[way])
        batches = iter(loader)
        next(batches)
        assert eventually(batches.is_ready)  # the second is here, so that the rest was drawn
        seen = weakref.ref(batches)
        del batches
        assert seen() is None
        if sampler is not None:
            loader.skip(1)
        assert next(iter(loader)) == (0 if sampler is None else 1)
        return weakref.ref(loader)

    assert run()() is None


def test_an_item_that_plain_pickle_refuses_is_let_go_of(no_collector):
    class Item:  # of a local class: only cloudpickle takes it
        pass

    seen: list[Any] = []

    def items() -> Iterator[Any]:
        for _ in range(3):
            item = Item()
            seen.append(weakref.ref(item))
            yield item

    with Loader(lambda item: 1, items(), num_workers=1) as loader:
        assert list(loader) == [1, 1, 1]
        assert [each() for each in seen[:2]] == [None] * 2  # a state is checked by the last one


# --- prefetch -------------------------------------------------------------------------------------


def test_prefetch_leaves_the_consumers_generators_alone():
    def batch(item: int) -> float:
        return random.random()

    with Loader(batch, range(200), num_workers=0) as loader:
        random.seed(1)
        given = [(batch, random.random(), np.random.default_rng) for batch in prefetch(loader, abs)]
        loader.set_epoch(0)
        expected = list(loader)
    own = random.Random(1)
    assert [(each, number) for each, number, _ in given] == [
        (each, own.random()) for each in expected
    ]


@pytest.mark.parametrize("begin", [iter, lambda loader: prefetch(loader, abs)])
def test_a_signal_while_threads_make_batches_loses_nothing(begin):
    """It comes to the consumer while it takes them, and not where CPython drops it."""
    given: list[int] = []
    interrupts: list[str] = []

    def interrupt(number: int, frame: FrameType) -> None:
        takes = not frame.f_code.co_filename.startswith(TESTS)
        if given and not interrupts and takes and not drops_errors(frame):
            interrupts.append(frame.f_code.co_name)
            raise KeyboardInterrupt

    def batch(item: int) -> int:
        if not interrupts:
            signal.raise_signal(signal.SIGINT)
        return item

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with Loader(batch, range(2_000), **THREADS) as loader:
            batches = begin(loader)
            with pytest.raises(KeyboardInterrupt):
                given.extend(batches)
            given.extend(batches)
    finally:
        signal.signal(signal.SIGINT, before)
    assert given == list(range(2_000))


@pytest.mark.parametrize("begin", [iter, lambda loader: prefetch(loader, abs)])
def test_a_loop_over_threads_runs_nothing_in_which_ctrl_c_is_dropped(begin, no_collector):
    """As the callback of a weak reference to each future would be."""
    found = []

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name.endswith(FINALIZERS):
            found.append(frame.f_code)

    with Loader(Echo(), range(300), **THREADS) as loader:
        batches = begin(loader)
        sys.setprofile(look)
        try:
            given = list(batches)
        finally:
            sys.setprofile(None)
    assert given == list(range(300))
    assert found == []


# --- what datasets, samplers and loops do to each other ------------------------------------------


def sorted_in_place(item: list[int]) -> list[int]:
    """As for h5py, which reads ascending indices only."""
    item.sort()
    return list(item)


@pytest.mark.parametrize("way", ["inline", "threads"])
def test_a_dataset_may_change_its_item(way):
    sampler = DynamicBatchSampler(range(1, 31), max_total=60, shuffle=True)
    with Loader(sorted_in_place, sampler, **WAYS[way]) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = list(batches)
        loader.load_state_dict(state)
        assert list(loader) == rest


class PopsPath:
    """Takes something out of its item, and is interrupted, once for each of some numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)

    def __getitem__(self, item: dict[str, int]) -> int:
        path = item.pop("path")
        if path in self.numbers:
            self.numbers.discard(path)
            raise KeyboardInterrupt
        return path


def test_the_batch_being_made_here_is_not_lost():
    """Neither the first of a task of several, nor one behind it; nor what it took of its item."""
    dataset = PopsPath(0, 1, 5, 6, 299)
    with Loader(dataset, [{"path": n} for n in range(300)], num_workers=0) as loader:
        assert through_interrupts(iter(loader)) == (list(range(300)), 5)


class Follows(BatchSampler):
    """Gives what the loop is at. It derives from a class that does not look at anything."""

    step = 0

    def __init__(self) -> None:
        super().__init__(50, None)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(50):
            yield self.step


@pytest.mark.parametrize(("way", "most"), [("inline", 0), ("threads", 4)])
def test_a_sampler_that_derives_from_ours_may_follow_the_loop(way, most):
    """It is read as far ahead as tasks may be under way, however quick batches are."""
    sampler = Follows()
    with Loader(Echo(), sampler, **WAYS[way] | {"prefetch_factor": 2}) as loader:
        for _ in range(2):
            for k, seen in enumerate(loader):
                assert sampler.step - seen <= most + (k == 0) * most
                sampler.step += 1
            sampler.step = 0


INNER: dict[str, Callable[[Any], Any]] = {
    "alone": lambda items: items,
    "batches": lambda items: BatchSampler(items, 1),
    "lengths looked up": lambda items: DynamicBatchSampler([1] * 9, max_total=1, sampler=items),
    "parts": lambda items: MixtureSampler([items], [1], 1, stop="last"),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("way", ["inline", "threads"])
def test_an_iterator_that_begins_anew_serves_all_epochs(way, inner):
    with Loader(Echo(), INNER[inner](BeginsAnew(range(9))), **WAYS[way]) as loader:
        epochs = [list(loader) for _ in range(3)]
        assert epochs == [epochs[0]] * 3
        assert len(epochs[0]) == 9
    with Loader(Echo(), INNER[inner](ServesOnce(range(9))), **WAYS[way]) as loader:
        assert list(loader) == epochs[0]
        with pytest.raises(RuntimeError, match="serves one epoch"):
            list(loader)


def test_a_sampler_that_was_put_somewhere_is_gone_on_with():
    sampler = BatchSampler(10, 2, shuffle=True)
    sampler.set_epoch(2)
    whole = list(sampler)
    other = BatchSampler(10, 2, shuffle=True)
    other.set_epoch(2)
    given = [next(batches) for batches in [iter(other)] for _ in range(2)]
    state = other.state_dict()
    put = BatchSampler(10, 2, shuffle=True)
    put.load_state_dict(state)
    with Loader(Echo(), put, num_workers=0) as loader:
        assert loader.epoch == 2
        assert given + list(loader) == whole
        assert loader.epoch == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_a_thread_waits_for_a_batch_has_the_state():
    gate = threading.Event()

    def wait(item: int) -> int:
        if item == 2:
            gate.wait()
        return item

    with Loader(wait, map(int, range(6)), executor="thread", num_workers=1) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [0, 1]
        thread = threading.Thread(target=next, args=(batches,))
        thread.start()
        assert eventually(lambda: batches.interrupts.is_on)
        answer = in_a_fork(lambda: loader.state_dict()["batches"])
        gate.set()
        thread.join()
        assert answer == "2"
        assert list(batches) == [3, 4, 5]


@pytest.mark.parametrize("way", ["inline", "threads"])
def test_nothing_is_waited_for_before_an_error_of_a_sampler(way):
    with Loader(Echo(), Failing(4, 2), **WAYS[way]) as loader:
        assert list(outcomes_of(iter(loader))) == [0, 1, f"{BAD_ITEM} is bad", 2, 3]


class ToldLocked(Told):
    """One that cannot be copied."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.lock = threading.Lock()


LENGTHS = [random.Random(0).randint(1, 30) for _ in range(60)]

TOTALS: dict[str, Callable[[], Any]] = {
    "of several lengths": lambda: DynamicBatchSampler(LENGTHS, max_total=70, shuffle=True),
    "with what is left": lambda: BatchSampler(10, 4, last_batch="rollover"),
    "of a mixture": lambda: MixtureSampler([9, 5], [1, 1], batch_size=2, stop="last"),
    "over another": lambda: BatchSampler(Told(7), 3),
    "over what is left": lambda: BatchSampler(BatchSampler(10, 4, last_batch="rollover"), 2),
    "of others": lambda: Told(5),
    "a list": lambda: [1, 2, 3],
}


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("before", [0, 1, 5])
def test_the_length_of_several_epochs_is_that_of_what_comes(name, before):
    """Also behind a state, or a skip, in the middle of an epoch; and asking changes nothing."""
    with Loader(str, TOTALS[name](), num_workers=0) as loader:
        loader.skip(before % 2)
        epochs = loader.epochs(until=4)
        taken = [next(epochs) for _ in range(before)]
        state = loader.state_dict()
        expected = taken + list(epochs)
    with Loader(str, TOTALS[name](), num_workers=0) as loader:
        loader.load_state_dict(state)
        epochs = loader.epochs(until=4)
        length = len(epochs)
        assert loader.state_dict() == state
        assert taken + list(epochs) == expected
        assert (length, len(loader.epochs(2))) == (
            len(expected) - before,
            len(loader.epochs(until=6)),
        )
        assert len(loader.epochs(until=4)) == 0


@pytest.mark.parametrize(
    ("dataset", "sampler", "error"),
    [
        (Numbers(3), None, "the dataset is a stream"),
        (str, (n for n in range(3)), "has no len"),
        (str, ToldLocked(3), "cannot be copied: "),
    ],
)
def test_a_length_of_several_epochs_that_is_not_known(dataset, sampler, error):
    with Loader(dataset, sampler, num_workers=0) as loader:
        with pytest.raises(TypeError, match=error):
            len(loader.epochs(2))
        with pytest.raises(TypeError, match=r"goes on for ever; give n, or until"):
            len(loader.epochs())


class NeverOpened:
    """A stream that fails as it is opened."""

    def __iter__(self) -> Iterator[int]:
        raise OSError("no such file")


def next_behind_an_alarm(batches: Iterator[Any], place: int) -> Any:
    outcome = interrupted(partial(next, batches, None), place, OURS, TimeLimit)
    return next(batches, None) if outcome.interrupted else outcome.value


@pytest.mark.parametrize(("num_workers", "executor"), [(0, "process"), (1, "thread")])
def test_an_error_of_opening_a_stream_is_not_lost_with_an_alarm(num_workers, executor):
    """The reply that had it may be forgotten: what is asked again is no epoch that is over."""
    for place in range(0, 700, 31):
        with Loader(NeverOpened(), num_workers=num_workers, executor=executor) as loader:
            batches = iter(loader)
            with pytest.raises(OSError, match="no such file"):
                next_behind_an_alarm(batches, place)
