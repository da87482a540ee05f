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
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import SLOW, WAYS, eventually, in_a_fork, making, outcomes, plain, require, variants
from helpers import SAMPLERS, Deadly, Echo, Faulty, Numbers, Refuses, Scripted
from interrupts import (
    FINALIZERS,
    OURS,
    TESTS,
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
    CountedIterator,
    Counting,
    Failing,
    OwnGenerator,
    ServesOnce,
    Told,
    ToldWithState,
    shuffled_indices,
)

from minloader import (
    SKIP,
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


@pytest.mark.parametrize("way", [HERE, THREADS, PROCESSES])
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
        state = loader.state_dict() | {"delivered_ahead": [[3, 5], [8, 9], [20, 30]]}
    early = {3, 4, 8, *range(20, 30)}
    rest = [batch for n, batch in enumerate(expected) if n and n not in early]
    for taken in range(0, len(rest), 13 if way is PROCESSES else 3):
        with Loader(drawn, range(40), **way) as loader:
            loader.load_state_dict(state)
            batches = iter(loader)
            assert [next(batches) for _ in range(taken)] == rest[:taken]
            later = loader.state_dict()
        with Loader(drawn, range(40), **HERE) as loader:
            loader.load_state_dict(later)
            assert list(loader) == rest[taken:]


@pytest.mark.parametrize("bad", [4, 6, 9])
@pytest.mark.parametrize("way", [HERE, THREADS])
def test_an_error_of_the_sampler_comes_in_its_turn_between_batches_that_came_early(way, bad):
    early = {3, 4, 7, 8}
    sampler = Failing(12, 99)
    with Loader(Echo(), sampler, **way) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict() | {"delivered_ahead": [[3, 5], [7, 9]]})
        sampler.bad = bad
        rest = [n for n in range(1, 12) if n not in early]
        place = sum(n < bad for n in rest)
        assert list(outcomes_of(iter(loader))) == [
            *rest[:place],
            f"{BAD_ITEM} is bad",
            *rest[place:],
        ]


def test_nothing_of_another_order_comes_after_ctrl_c():
    """Wherever it comes while the item is drawn by which the state is recognized."""
    for _, press in each_place(1, f"{OURS}/_epochs/feed.py"):
        with Loader(Echo(), OwnGenerator(300), **THREADS) as loader:
            batches = iter(loader)
            next(batches)
            loader.load_state_dict(loader.state_dict())
            batches = loader.epochs(1)
            before = press(lambda batches=batches: outcomes(batches)).value or []
            found = [*before, *outcomes(batches)]
        (error,) = found
        assert "the state does not fit: item" in str(error)


class Pressed:
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
    with Loader(Echo(), Pressed(9), **THREADS) as loader:
        loader.load_state_dict(state)
        batches = loader.epochs(1)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        (error,) = outcomes(batches)
    assert "the state does not fit: item 1 of the sampler is 7" in str(error)


OVER: dict[str, Callable[[Any], Any]] = {
    "alone": lambda sampler: sampler,
    "batches": lambda sampler: BatchSampler(sampler, 2),
    "batches of batches": lambda sampler: BatchSampler(BatchSampler(sampler, 2), 2),
    "mixture": lambda sampler: MixtureSampler([sampler, N], [1, 1], 2, stop="last"),
}


def torchs_random(n: int) -> Any:
    torch = require("torch")
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.RandomSampler(range(n), generator=generator)


KINDS: dict[str, Callable[[int], Any]] = {
    "own generator": OwnGenerator,
    "torch's": torchs_random,
    "told": Told,
    "told, with a state": ToldWithState,
}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [HERE, THREADS])
def test_an_order_that_nothing_repeats_is_refused_below_ours_and_anywhere_in_an_epoch(
    over, kind, way
):
    """One item alone may be the same by chance: it proves nothing. Another epoch is not known."""
    is_refused = "told" not in kind

    def loader(sampler: Any, way: Any = HERE) -> Loader:
        return Loader(Echo(), OVER[over](sampler), **way)

    states, given = [], []
    with loader(KINDS[kind](N), way) as whole:
        for batch in whole.epochs(2):
            given.append(batch)
            states.append((len(given), plain(whole.state_dict())))
        states.append((len(given), plain(whole.state_dict())))
    for taken, state in states:
        with loader(KINDS[kind](N)) as other:
            if is_refused and state["epoch"]:
                with pytest.raises(ValueError, match="draws its order from a generator"):
                    other.load_state_dict(state)
                continue
            other.load_state_dict(state)
            rest = list(other.epochs(until=1 if is_refused else 2))
            assert rest == given[taken : taken + len(rest)]
            assert is_refused or len(rest) == len(given) - taken


def test_an_iterator_that_goes_later_does_not_undo_set_epoch(make):
    with make(Echo(), range(6)) as loader:
        batches = prefetch(loader, str, 2)
        next(batches)
        batches.close()
        loader.set_epoch(0)
        del batches
        assert loader.epoch == 0


def test_an_epoch_is_not_set_within_epochs(make):
    """Batches of the next one may be under way."""
    with make(Echo(), Told(3)) as loader:
        numbers = []
        for epoch, _ in loader.epochs(2):
            numbers.append(epoch)
            with pytest.raises(RuntimeError, match="goes through them"):
                loader.set_epoch(7)
        assert numbers == [0, 0, 0, 1, 1, 1]
        loader.epoch = 7
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
            if batches.claims.lock.acquire(blocking=False):
                batches.claims.lock.release()
            else:
                done.set()  # it waits until the call lets go of the lock
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


# --- Ctrl-C ---------------------------------------------------------------------------------------


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


PLACES = [100, pytest.param(400, marks=SLOW)]
"""Interrupts in a test. A batch of a task that has come passes 10 places of ours, a task 300."""


HOLES = [[n, n + n % 5 + 1] for n in range(10, 10**3, 11)]
EARLY = {n for start, stop in HOLES for n in range(start, stop)}
"""Batches that came early, and are passed over."""


def past_holes(loader: Loader) -> Iterator[int]:
    next(iter(loader))
    loader.load_state_dict(loader.state_dict() | {"delivered_ahead": HOLES})
    return iter(loader)


def fail(item: int) -> int:
    if item % 4 == 2:
        raise OSError(f"{item} is bad")
    return item


def with_errors() -> Iterator[Any]:
    return (f"{n} is bad" if n % 4 == 2 else n for n in itertools.count())


INTERRUPTED: dict[str, tuple[Any, Any, Callable[[Loader], Any], int, Any]] = {
    "next": (Echo(), itertools.count, iter, 2_000, itertools.count),
    # Short epochs: their ends and beginnings too.
    "epochs": (
        *(Echo(), lambda: BatchSampler(6, 2), lambda loader: loader.epochs(), 2_000),
        lambda: ((n // 3, [n % 3 * 2, n % 3 * 2 + 1]) for n in itertools.count()),
    ),
    # These samplers are interrupted too. An end that comes too soon is a loss.
    "a sampler with a state": (Echo(), lambda: Counted(10**5), iter, 1_000, itertools.count),
    "a sampler of ours": (
        *(Echo(), lambda: BatchSampler(10**9, 1), iter, 1_000),
        lambda: ([n] for n in itertools.count()),
    ),
    "a stream": (Numbers(None), lambda: None, iter, 2_000, itertools.count),
    "what came early": (
        *(Echo(), lambda: range(10**5), past_holes, 1_000),
        lambda: (n for n in itertools.count(1) if n not in EARLY),
    ),
    "prefetch": (
        *(Echo(), itertools.count, lambda loader: prefetch(loader, abs), 2_000),
        itertools.count,
    ),
    "errors": (fail, itertools.count, lambda loader: outcomes_of(iter(loader)), 500, with_errors),
    "errors, and prefetch": (
        *(fail, itertools.count, lambda loader: outcomes_of(prefetch(loader, abs)), 500),
        with_errors,
    ),
}
"""Dataset, sampler, how it is begun, how far apart interrupts are, and what must come."""


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_interrupt_anywhere_loses_nothing(case, way, places):
    dataset, sampler, begin, most, expected = INTERRUPTED[case]
    with Loader(dataset, sampler(), **WAYS[way]) as loader:
        given = taken_through(begin(loader), some_steps(places, places, most))
        assert given == list(itertools.islice(expected(), len(given)))
        # What was being sent when an interrupt came may be under way: then a shard is read again.
        assert loader.stats.errors.reread == 0 or way != "inline"


def indices_of(number: int) -> list[int]:
    """What the samplers of ``kinds`` give in an epoch of five indices."""
    return [PASS * number + each for each in shuffled_indices(5, number)]


SHORT: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[int], list[Any]]]] = {
    "ours": (lambda: (Echo(), BatchSampler(6, 2)), lambda number: [[0, 1], [2, 3], [4, 5]]),
    "told": (lambda: (Echo(), Told(5)), indices_of),
    "counted": (lambda: (Echo(), Counted(5)), indices_of),
    "counted iterator": (lambda: (Echo(), CountedIterator(5)), indices_of),
    "told, with a state": (lambda: (Echo(), ToldWithState(5)), indices_of),
    "stream": (lambda: (Counting(5),), lambda number: [100 * number + each for each in range(5)]),
}
"""Datasets and samplers of short epochs, and what comes in an epoch."""


def with_short_epochs(kind: str, way: str) -> Loader:
    workers = 0 if way == "inline" else 1 if kind == "stream" else 2  # one shard keeps the order
    return Loader(*SHORT[kind][0](), num_workers=workers, executor="thread")


@variants("times", [300, 800])
@pytest.mark.parametrize("kind", SHORT)
def test_interrupts_close_to_each_other_lose_nothing(kind, times):
    """Where items are drawn: the second comes while what the first has left is gone on with."""
    of_epoch, rng = SHORT[kind][1], random.Random(9)
    with with_short_epochs(kind, "threads") as loader:
        steps = (rng.randrange(80) for _ in range(times))
        where = "shard_feed" if kind == "stream" else "feed"
        given = taken_through(loader.epochs(), steps, f"{OURS}/_epochs/{where}.py")
    expected = ((number, item) for number in itertools.count() for item in of_epoch(number))
    assert given == list(itertools.islice(expected, len(given)))


@variants("stride", [5, 1])
@pytest.mark.parametrize("way", ["inline", "threads"])
def test_an_order_that_nobody_has_seen_may_be_another_after_an_interrupt(way, stride):
    with Loader(Echo(), OwnGenerator(9), **WAYS[way]) as loader:
        for _, press in each_place(stride, least=10):
            press(partial(iter, loader))
            assert sorted(loader) == list(range(9))


class OwnOrder:
    """Another order in each pass, which nothing repeats: of a sampler, or of a stream."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(9), 9)


def after_interrupts(make: Callable[[], Loader], within: str) -> Iterator[tuple[list[Any], Any]]:
    """What comes of an epoch with Ctrl-C at each place behind its first batch, and an error."""
    for _, press in each_place(1, within, 10):
        with make() as loader:
            batches, error = iter(loader), None
            given = [next(batches)]

            def take(batches: Any = batches, given: list[Any] = given) -> None:
                for batch in batches:
                    given.append(batch)

            press(take)
            try:
                given += batches
            except ValueError as failure:
                error = failure
            yield given, error


@pytest.mark.parametrize("way", ["inline", "threads"])
def test_an_order_that_was_seen_is_not_another_after_an_interrupt(way):
    """Also where all batches that were drawn are of one task, which is drawn again."""
    for given, error in after_interrupts(
        lambda: Loader(Echo(), OwnOrder(), **WAYS[way]), f"{OURS}/_epochs/feed.py"
    ):
        assert sorted(given) == list(range(9)) or "it was another one" in str(error)


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
def test_an_interrupt_has_no_stream_read_again(batch_size):
    """It would be another one, or count one pass too many. At its end, too."""
    for given, error in after_interrupts(
        lambda: Loader(OwnOrder(), batch_size=batch_size, num_workers=0),
        f"{OURS}/_worker/stream_reader.py",
    ):
        assert error is None
        assert sorted(np.hstack(given).tolist()) == list(range(9))


class Drawing:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        info = get_worker_info()
        assert info is not None
        return index + info.rng.random()


@variants("stride", [13, 5])
@pytest.mark.parametrize("way", ["inline", "threads"])
def test_an_interrupt_anywhere_leaves_one_seed(way, stride):
    """Of the loader, the sampler that it made and the workers, where a state brings another."""
    make = partial(Loader, Drawing(), batch_size=2, shuffle=True, **WAYS[way])
    with make(seed=7) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for place, press in each_place(stride):
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
        found = [batch.tolist() for batch in given[loaded:]]
        assert found == expected[loaded:], place


@pytest.mark.parametrize("places", PLACES)
def test_an_interrupt_anywhere_loses_nothing_out_of_order(places):
    with Loader(Echo(), itertools.count(), in_order=False, **THREADS) as loader:
        batches = iter(loader)
        given = taken_through(batches, some_steps(places, places, 2_000))
        unseen = set(range(max(given))) - set(given)
        while unseen:  # they are under way, and come before long
            given.append(next(batches))
            unseen.discard(given[-1])
    assert len(set(given)) == len(given)


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


@variants("stride", [7, 1])
@pytest.mark.parametrize(
    "make", [lambda: BatchSampler(30, 2, True), lambda: BatchSampler(BatchSampler(30, 2, True), 2)]
)
def test_an_interrupt_in_a_sampler_that_two_iterators_read(monkeypatch, make, stride):
    """The sampler tells where the later one is, which is not where the earlier one goes on."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # it is asked each time
    expected = list(make())
    step, reached = 0, False
    # From 3.12 on a function's first call with a trace shows none of its instructions.
    while reached or step < 2 * stride:
        with Loader(Echo(), make(), num_workers=0) as loader:
            batches, later = iter(loader), iter(loader)
            given = [next(batches)]
            assert len(list(itertools.islice(later, 4))) == 4
            outcome = interrupted(partial(next, batches), step)
            reached = outcome.reached
            given += [] if reached else [outcome.value]
            assert given + list(batches) == expected, step
        step += stride
    assert step > 20


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("begin", [iter, lambda loader: prefetch(loader, abs)])
def test_an_interrupt_within_a_lock_of_the_library_leaves_it_free(begin, way):
    """Else a thread waits for it for ever, or the consumer."""
    with Loader(Echo(), itertools.count(), **WAYS[way]) as loader:
        given = taken_through(begin(loader), range(80), str(Path(threading.__file__).parent))
    assert given == list(range(len(given)))


@variants(("stride", "method"), [(197, "spawn"), (17, "forkserver"), (97, "spawn")])
def test_an_interrupt_anywhere_in_a_start_loses_nothing(stride, method):
    for place, press in each_place(stride, least=1_000):
        with Loader(Echo(), range(40), num_workers=2, mp_context=method) as loader:
            begun: list[Iterator[int]] = []
            given: list[int] = []

            def take(loader: Any = loader, begun: Any = begun, given: Any = given) -> None:
                begun.append(iter(loader))
                given.append(next(begun[0]))

            press(take)
            given.extend(begun[0] if begun else loader)
            assert given == list(range(40)), place


@pytest.mark.parametrize(
    "data", [(Echo(), itertools.count()), (Numbers(None),)], ids=["map", "stream"]
)
def test_an_interrupt_while_lost_tasks_are_sent_again_loses_nothing(data, tmp_path):
    deadly = Deadly(set(range(100, 10**5, 300)), str(tmp_path))
    with Loader(*data, transform=deadly, retries=5, **PROCESSES) as loader:
        given = taken_through(iter(loader), some_steps(7, 200, 2_000))
        assert loader.stats.errors.replaced
    assert given == list(range(len(given)))


@variants("stride", [3, 1])
def test_an_interrupt_anywhere_in_a_batch_made_here_gives_back_what_it_borrowed(stride):
    """The generators, the answer of ``get_worker_info``, and the turn that threads wait for."""

    def left() -> list[Any]:
        numbers = np.random.get_state()
        with ThreadPoolExecutor(1) as thread:
            held: list[Any] = []
            thread.submit(seeds.reserve_globals, held).result()
            free = [thread.submit(lock.release).result() for lock in held]
        return [get_worker_info(), random.getstate(), numbers[1].tolist(), numbers[2], free]

    def draw(item: int) -> tuple[float, float]:
        return random.random(), np.random.random()

    before = left()
    for place, press in each_place(stride, least=100):
        with Loader(draw, range(3), num_workers=0) as loader:
            batches = iter(loader)
            press(partial(next, batches))
        assert left() == before, place


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


def test_what_close_raises_is_raised_once(monkeypatch):
    """No thread tries again what would fail again."""
    calls: list[PoolGroup] = []

    def fail(group: PoolGroup) -> None:
        calls.append(group)
        raise OSError("the cluster is gone")

    loader = Loader(Echo(), range(4), num_workers=0)
    monkeypatch.setattr(PoolGroup, "close", fail)
    with pytest.raises(OSError, match="the cluster is gone"):
        loader.close()
    loader.close()
    assert len(calls) == 1
    assert "minloader-close" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("call", "within"),
    [(Loader.start, ""), (lambda loader: next(iter(loader)), OURS)],
    ids=["start", "next"],
)
@variants("stride", [11, 2])
def test_an_interrupt_anywhere_in_a_start_leaves_no_thread(call, within, stride):
    before = set(threading.enumerate())
    for place, press in each_place(stride, within):
        with Loader(Echo(), range(4), **THREADS) as loader:
            press(partial(call, loader))
            loader.epoch = 0
            assert list(loader) == [0, 1, 2, 3]
        assert eventually(lambda: set(threading.enumerate()) <= before), place


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


def unmounted(item: Any) -> Any:
    raise OSError(f"{item} is on a disk that is not there")


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_that_came_early_comes_once(kind):
    """Also where a state says of the very next batch that it was handed over."""
    gate = threading.Event()
    with Loader(Echo(), SAMPLERS[kind](), num_workers=0) as loader:
        whole = list(map(plain, loader))

    def first_is_late(item: Any) -> Any:
        if plain(item) == whole[0]:
            gate.wait()
        return item

    options = {"executor": "thread", "in_order": False}
    given = []
    with Loader(first_is_late, SAMPLERS[kind](), num_workers=2, **options) as loader:
        given.append(plain(next(iter(loader))))
        state = loader.state_dict()
        gate.set()
    assert given == whole[1:2]
    for _ in range(2):
        with Loader(Echo(), SAMPLERS[kind](), num_workers=0, **options) as loader:
            loader.load_state_dict(state)
            given.append(plain(next(iter(loader))))
            state = loader.state_dict()
    assert given == [whole[n] for n in (1, 0, 2)]


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


def test_an_epoch_of_which_all_was_left_out_on_purpose_is_no_error(make):
    """The dataset says SKIP itself."""
    loader = make(lambda item: SKIP, range(3))
    assert list(loader) == []
    assert loader.stats.errors.skipped == 3


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


@pytest.mark.parametrize("where", FAIL)
@pytest.mark.parametrize("way", WAYS)
def test_a_loader_that_failed_goes_when_it_is_let_go_of(way, where, no_collector):
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


class AwaitedFaulty(Numbers):
    async def __getitem__(self, index: int) -> int:
        if index == 0:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("on_error", ["skip", lambda failure: -1])
@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("where", ["dataset", "stream", "read by threads", "awaited"])
def test_a_batch_that_was_replaced_or_skipped_keeps_nothing(where, way, on_error, no_collector):
    """The frames of its error are those of who was waiting for it."""

    def run() -> Any:
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
            assert next(batches) == (1 if on_error == "skip" else -1)
            seen = weakref.ref(batches)
            del batches
            assert seen() is None
        return weakref.ref(loader)

    assert run()() is None


WAITING: dict[str, tuple[Any, Any]] = {
    "sampler": (Echo(), Failing(6, 3)),
    "item": (Echo(), [0, 1, 2, threading.Lock(), 4]),  # which cannot be pickled
    "dataset": (Faulty(6, {3: ValueError}), range(6)),
    "stream": (Scripted(6, {3: ("raises",)}), None),
}


@pytest.mark.parametrize("where", WAITING)
@pytest.mark.parametrize("way", ["threads", "processes"])
def test_an_error_that_waits_for_its_turn_keeps_nothing(way, where, no_collector):
    """An epoch is left when its iterator is let go of, and what is called then is for the next."""
    dataset, sampler = WAITING[where]

    def run() -> Any:
        loader = Loader(dataset, sampler, prefetch_factor=4, **WAYS[way])
        batches = iter(loader)
        next(batches)
        assert eventually(batches._is_ready)  # the second is here, so that the rest was drawn
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


@pytest.mark.parametrize("way", WAYS)
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


class Reuses:
    """Gives one object again and again, with other indices in it."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __iter__(self) -> Iterator[Any]:
        for n in range(0, 20, 2):
            self.item[0], self.item[1] = n, n + 1
            yield self.item


class Subclass(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "item", [array("q", [0, 0]), deque([0, 0]), Subclass([0, 0]), np.zeros(2, int)], ids=type
)
def test_a_sampler_may_fill_one_object_again(item, way):
    expected = [[n, n + 1] for n in range(0, 20, 2)]
    with Loader(list, Reuses(item), chunks=True, **WAYS[way]) as loader:
        assert [list(map(int, batch)) for batch in loader] == expected
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(loader.state_dict())
        assert [list(map(int, batch)) for batch in loader] == expected[1:]


class Follows:
    """Gives what the loop is at."""

    step = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(50):
            yield self.step


class FollowsAndDerives(BatchSampler):
    """The same, of a class that derives from one which does not look."""

    step = 0

    def __init__(self) -> None:
        super().__init__(50, None)

    __iter__ = Follows.__iter__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("way", "most"), [("inline", 0), ("threads", 4), pytest.param("processes", 4, marks=SLOW)]
)
@pytest.mark.parametrize("kind", [Follows, FollowsAndDerives])
def test_a_sampler_may_follow_the_loop(kind, way, most):
    """It is read as far ahead as tasks may be under way, however quick batches are."""
    sampler = kind()
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


def is_held(lock: Any) -> bool:
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


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
        assert eventually(lambda: is_held(batches.claims.lock))
        answer = in_a_fork(lambda: loader.state_dict()["batches"])
        gate.set()
        thread.join()
        assert answer == "2"
        assert list(batches) == [3, 4, 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_iterator_that_was_not_begun_begins_in_a_fork():
    """Though a thread that is not there had its lock."""
    with Loader(Echo(), range(4), num_workers=0) as loader:
        batches = loader.epochs(1)
        released = threading.Event()

        def hold() -> None:
            with batches.claims.lock:
                released.wait()

        def take() -> Any:
            signal.alarm(20)
            return next(batches)

        thread = threading.Thread(target=hold)
        thread.start()
        assert eventually(lambda: is_held(batches.claims.lock))
        try:
            assert in_a_fork(take) == "(0, 0)"
        finally:
            released.set()
            thread.join()


@pytest.mark.parametrize("way", ["inline", "threads"])
def test_nothing_is_waited_for_before_an_error_of_a_sampler(way, monkeypatch):
    monkeypatch.setattr("minloader._epochs.options.PATIENCE", 900)  # longer than a test may take
    with Loader(Echo(), Failing(4, 2), **WAYS[way]) as loader:
        assert list(outcomes_of(iter(loader))) == [0, 1, f"{BAD_ITEM} is bad", 2, 3]
