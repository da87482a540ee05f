"""What a state is of, samplers with states of their own, `epochs`, and other numbers of workers.

That each state leads to the rest is said by the programs of the model.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import operator
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import (
    WAYS,
    alive,
    eventually,
    lists,
    making,
    outcomes,
    plain,
    printed_by,
    variants,
    workers,
)
from helpers import Echo, Guarded, Noise, Reshuffling, SelfIterating, Stateful
from interrupts import interrupted
from kinds import Apart, Raising, Refusing

from minloader import (
    SKIP,
    BatchError,
    BatchSampler,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    prefetch,
)
from minloader._epochs.feed import STATE_COST, SamplerFeed, SamplerSource
from minloader._epochs.position import NO_SOURCE_STATE, LanePosition
from minloader._epochs.task import Task
from minloader._formats import differences

pytestmark = pytest.mark.usefixtures("quick_starts")

N = 40  # batches of an epoch


@pytest.fixture(params=["inline", "thread"])
def make(request):
    """Samplers are read in this process, wherever batches are made."""
    with making(request) as factory:
        yield factory


def test_what_is_ready_first_is_not_given_again(tmp_path):
    """Batch 0 is held up while 20 others are delivered."""
    gate = tmp_path / "open"
    options = WAYS["threads"] | {"in_order": False, "prefetch_factor": 3}
    with Loader(Guarded(gate=str(gate)), range(N), **options) as loader:
        batches = iter(loader)
        first = [next(batches)[0] for _ in range(20)]
        state = plain(loader.state_dict())
        gate.touch()
    assert state["batches"] == 0
    assert state["delivered_ahead"]
    with Loader(Guarded(), range(N), num_workers=0) as loader:
        loader.load_state_dict(state)
        Guarded.forbid(loader, first)
        assert sorted(first + [batch[0] for batch in loader]) == list(range(N))


def test_chunks(monkeypatch):
    """In the middle of a task of many batches."""
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    with Loader(Guarded(), range(120), executor="thread", num_workers=2) as loader:
        expected = list(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        states = [(k, loader.state_dict()) for k, _ in enumerate(batches, 1)]
        assert loader.stats.workers.chunk_size > 1
    with Loader(Guarded(), range(120), num_workers=0) as loader:
        for k, state in states[::23]:
            loader.load_state_dict(state)
            Guarded.forbid(loader, range(k))
            assert plain(list(loader)) == plain(expected[k:])


# --- what a state is of --------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["inline", "process-2", "foreign-process"], indirect=True)
def test_a_drawn_seed_is_in_the_state(make):
    first = make(Guarded(), batch_size=None, sampler=range(12), seed=None)
    batches = iter(first)
    expected = [next(batches) for _ in range(12)]
    first.set_epoch(0)
    next(iter(first))
    state = first.state_dict()
    again = make(Guarded(), range(12), seed=None)
    again.start()
    assert again.seed != first.seed
    assert plain(next(iter(again))) != plain(expected[0])  # with another seed, so far
    again.load_state_dict(state)
    assert again.seed == first.seed
    assert plain(list(again)) == plain(expected[1:])
    # The loader's own sampler takes it over.
    options: Any = {"batch_size": 2, "shuffle": True, "seed": None, "num_workers": 0}
    with Loader(np.arange(20), **options) as loader, Loader(np.arange(20), **options) as other:
        own = lists(loader)
        loader.set_epoch(0)
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        assert lists(other) == own[1:]


def test_a_state_is_a_copy(make):
    """Neither the loader nor the sampler changes one that was given or taken."""
    sampler = Stateful(range(8))
    loader = make(Guarded(), sampler)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    list(batches)
    assert state == before
    again = make(Guarded(), Stateful(range(8)))
    for _ in range(2):
        again.load_state_dict(state)
        assert [batch[0] for batch in again] == [3, 4, 5, 6, 7]
        assert state == before


def test_small():
    sampler = BatchSampler(1_000_000, 32, shuffle=True)
    with Loader(np.arange(1_000_000), sampler, num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(100):
            next(batches)
        assert len(json.dumps(loader.state_dict())) < 1000


# --- foreign samplers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stateful, SelfIterating])
def test_a_sampler_with_a_state_is_put_back(make, kind, monkeypatch):
    """It is not read from its beginning, unless the batch was drawn by the first task."""
    monkeypatch.setattr("minloader._epochs.lane.MAX_CHUNK", 16)
    loader = make(Guarded(), kind(range(100)))
    batches = iter(loader)
    expected = [next(batches) for _ in range(100)][60:]
    loader.set_epoch(0)
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    state = loader.state_dict()
    assert state["sampler"] is not None
    del batches
    sampler = kind(range(100))
    again = make(Guarded(), sampler)
    again.load_state_dict(state)
    assert plain(list(again)) == plain(expected)
    assert sampler.drawn <= 100 - state["sampler"][0]["at"]
    assert [batch[0] for batch in again] == list(range(100))


@pytest.mark.parametrize("kind", [Stateful, SelfIterating])
def test_what_is_put_back_is_not_for_the_next_epoch(make, kind, monkeypatch):
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)  # the mark is where the state is
    loader, again = make(Guarded(), kind(range(20))), make(Guarded(), kind(range(20)))
    for taken in (0, 5, 20):
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        again.load_state_dict(loader.state_dict())
        iter(again)  # and left at once
        assert [batch[0] for batch in again] == list(range(20))


def test_a_sampler_that_does_not_come_back_is_refused():
    class Forgetful(SelfIterating):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({"position": state["position"] + 1})

    with Loader(Guarded(), Forgetful(range(20)), num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        loader.load_state_dict(state)
        message = (
            "the state that it gave: position is [0-9]+, but the state is of position [0-9]+; its"
        )
        with pytest.raises(ValueError, match=message):
            iter(loader)


class Ranked(SelfIterating):
    """As lhotse's: its state names the rank, which loading passes over, deep within too."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        super().__init__(range(rank, 20, 2))
        self.rank = rank

    def state_dict(self) -> Any:
        within = {"samplers": ({"rank": self.rank, "at": np.array([1, 2])},)}
        return {"position": self.position, "rank": self.rank, **within}


def test_the_state_of_a_rank_serves_another_whatever_it_says_of_the_rank():
    with Loader(Guarded(), Ranked(0), num_workers=0) as lived:
        batches = iter(lived)
        taken = [next(batches)[0] for _ in range(3)]
        state = plain(lived.state_dict())
    assert taken == [0, 2, 4]
    with Loader(Guarded(), Ranked(1), num_workers=0) as resumed:
        resumed.load_state_dict(state)
        assert [batch[0] for batch in resumed] == [7, 9, 11, 13, 15, 17, 19]


@pytest.mark.parametrize(
    ("here", "then", "found"),
    [
        ({"a": 1, "rank": 0}, {"a": 1, "rank": 1}, []),
        ({"a": (1, {"process_index": 0})}, {"a": [1, {"process_index": 1}]}, []),
        ({3: "x"}, {"3": "x"}, []),  # as JSON has it
        ({"a": np.arange(3)}, {"a": np.arange(3)}, []),
        (
            {"a": np.arange(3)},
            {"a": np.arange(4)},
            ["a is array([0, 1, 2]), but the state is of a"],
        ),
        ({"n": 12, "k": 1}, {"n": 10, "k": 1}, ["n is 12, but the state is of n 10"]),
        ({"k": 1}, {"n": 1}, ["k is 1, but the state is of k None", "n is None, but the state is"]),
        (
            {"a": [{"k": 1}, 2]},
            {"a": [{"k": 2}, 3]},
            ["a[0].k is 1, but the state", "a[1] is 2, but"],
        ),
        ({"a": [1]}, {"a": [1, 2]}, ["a is [1], but the state is of a [1, 2]"]),
        (7, 8, ["it is 7, but the state is of 8"]),
    ],
)
def test_what_of_a_state_differs_is_named(here, then, found):
    words = differences(here, then)
    assert len(words) == len(found)
    assert all(word.startswith(begin) for word, begin in zip(words, found, strict=True))


class Interrupting:
    """What is rung for as it is compared."""

    def __eq__(self, other: object) -> bool:
        signal.raise_signal(signal.SIGALRM)
        return True

    __hash__ = None  # type: ignore[assignment]


def test_an_alarm_as_states_are_compared_is_no_difference():
    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(TimeoutError):
            differences([Interrupting()], [Interrupting()])
    finally:
        signal.signal(signal.SIGALRM, former)


def test_a_sampler_without_a_state_at_its_end(monkeypatch):
    """The next epoch begins as without one, and not at the last state that there was."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)
    with Loader(list(range(8)), Apart(8), num_workers=0) as loader:
        assert list(loader) == list(range(8))
        state = plain(loader.state_dict())
        assert list(loader) == list(range(8))
    with Loader(list(range(8)), Apart(8), num_workers=0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == list(range(8))


@pytest.mark.parametrize("cost", [0, 1e9])
@pytest.mark.parametrize("inner", [False, True])
def test_a_sampler_whose_state_raises_at_its_end(inner, cost, monkeypatch):
    """The batches come, and the end: many have none before the first item, or behind the last."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", cost)
    sampler = BatchSampler(Refusing(5), 2) if inner else Refusing(5)
    expected = [[0, 1], [2, 3], [4]] if inner else [0, 1, 2, 3, 4]
    with Loader(Echo(), sampler, num_workers=0) as loader:
        assert outcomes(iter(loader), 10) == expected
        assert outcomes(iter(loader), 10) == expected


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (LookupError("no state"), "no state"),
        (StopIteration(), "state_dict of the (n_or_)?sampler raised StopIteration"),
    ],
)
def test_an_error_of_a_samplers_state_takes_the_place_of_an_item(raised, found, inner, monkeypatch):
    """Between two items, and once for each time that it is asked; no item is lost."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)

    class Failing(Apart):
        def state_dict(self) -> Any:
            if operator.length_hint(self.latest) == 2:
                raise raised
            return super().state_dict()

    sampler = BatchSampler(Failing(5), 1) if inner else Failing(5)
    with Loader(Echo(), sampler, num_workers=0) as loader:
        for epoch in range(2):
            batches = outcomes(iter(loader), 10)
            errors = [each for each in batches if isinstance(each, Exception)]
            assert len(errors) == 1, epoch
            assert re.search(found, str(errors[0])), epoch
            batches.remove(errors[0])
            assert batches == [[n] if inner else n for n in range(5)], epoch


@pytest.mark.parametrize("inner", [False, True])
def test_loops_in_turns_over_a_sampler_with_a_state(inner, monkeypatch):
    """The next epoch of one does not begin where the other one is in the sampler."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)
    sampler = BatchSampler(Apart(8), 1) if inner else Apart(8)
    expected = [[n] if inner else n for n in range(8)]
    with Loader(Echo(), sampler, num_workers=0) as loader:
        one = loader.epochs(2)
        for _ in range(4):
            next(one)
        other = loader.epochs(2)
        begun = [next(other)]
        assert [batch for _, batch in one] == expected[4:] + expected
        assert [batch for _, batch in [*begun, *other]] == 2 * expected


@pytest.mark.parametrize("is_lazy", [False, True])
def test_an_error_of_a_sampler_that_is_read_anew_is_told(is_lazy):
    """Where batches were given ahead of their turn, which are to be passed over."""

    class Interrupted:
        begun = False

        def __iter__(self) -> Any:
            items = self.items()
            return items if is_lazy else itertools.chain([next(items)], items)

        def items(self) -> Any:
            if self.begun:
                raise OSError("the index is gone")
            self.begun = True
            yield from range(4)
            raise KeyboardInterrupt

    with Loader(list(range(9)), Interrupted(), num_workers=0, in_order=False) as loader:
        loader.load_state_dict(loader.state_dict() | {"delivered_ahead": [3, 4, 5]})
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        with pytest.raises((OSError, ValueError)) as caught:
            next(batches)
        assert "the index is gone" in f"{caught.value} {caught.value.__cause__}"


def test_a_sampler_whose_state_is_costly_is_rarely_asked():
    class Costly(SelfIterating):
        asked = 0

        def state_dict(self) -> Any:
            self.asked += 1
            threading.Event().wait(0.02)
            return super().state_dict()

    sampler = Costly(range(50))
    began = time.monotonic()
    with Loader(Guarded(), sampler, num_workers=0) as loader:
        assert len(list(loader)) == 50
    # And once before the first epoch, once at its end.
    assert sampler.asked <= 3 + (time.monotonic() - began) / (STATE_COST * 0.02)


def test_an_iterator_is_drawn_from_once_and_only_as_far_as_needed():
    drawn = []

    def items():
        for n in itertools.count():
            drawn.append(n)
            yield n

    with Loader(Guarded(), items(), num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    drawn.clear()
    with Loader(Guarded(), items(), executor="thread", num_workers=2) as loader:
        loader.load_state_dict(state)
        assert drawn == []  # only when it is iterated
        assert [next(batch)[0] for batch in [iter(loader)]] == [5]
        assert drawn[:6] == list(range(6))


# --- what does not fit ---------------------------------------------------------------------------


def state_of(dataset: Any, taken: int = 3, **options: Any) -> Any:
    with Loader(dataset, num_workers=0, **options) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        return loader.state_dict()


def refuses(state: Any, message: str, error: type[Exception] = ValueError, **options: Any) -> None:
    options = {"dataset": Guarded(), "sampler": range(20)} | options
    with Loader(num_workers=0, **options) as loader:
        with pytest.raises(error, match=message):
            loader.load_state_dict(state)
        given = [batch[0] for batch in itertools.islice(loader, 2)]
        assert given == list(itertools.islice(options["sampler"], 2))  # it is as it was


def test_a_range_is_compared_where_a_task_has_many_of_it():
    """Tasks have as many batches as fit, once it is known how long one takes."""
    options: dict[str, Any] = {"num_workers": 1, "executor": "thread"}
    with Loader(Echo(), range(3000), **options) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        state = loader.state_dict()
    assert state["check"][0] == 3
    with Loader(Echo(), range(7, 3007), **options) as loader:
        list(loader)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="item 3 of the sampler is 10, but it was another"):
            list(loader)


def test_errors_of_a_sampler_that_are_not_in_a_row_are_passed_over():
    sampler = Raising(2400, range(1, 2400, 2))
    with Loader(Echo(), sampler, num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(2301):
            with suppress(OSError):
                next(batches)
        state = loader.state_dict()
    with Loader(Echo(), sampler, num_workers=0) as loader:
        loader.load_state_dict(state)
        assert outcomes(iter(loader))[1] == 2302


def test_states_that_do_not_fit():
    state = state_of(Guarded(), sampler=range(20))
    refuses(state | {"version": 99}, "version 99, but this minloader reads versions up to 1")
    refuses(state, "seed=0, but this one has seed=7", seed=7)
    refuses(state, "21 batches in epoch 0, but the state is of one with 20", sampler=range(21))
    refuses([1, 2], r"dict, got \[1, 2\]", TypeError)
    refuses({}, "this is no state of a Loader")
    refuses({"version": 1, "seed": 0}, "damaged.*epoch")
    refuses(state | {"batches": -1}, "damaged.*at least 0")
    refuses(state | {"batches": "x"}, "damaged.*must be an int")
    refuses(state | {"length": "20"}, "damaged.*length must be an int")
    refuses(state | {"delivered_ahead": ["a"]}, "damaged")
    refuses(state | {"delivered_ahead": [0]}, "damaged")
    refuses(state | {"sampler": {}}, "damaged")
    refuses(state | {"check": 5}, "damaged")
    refuses(state | {"check": [10**6, "x"]}, "damaged.*from later")
    refuses(state | {"stream": {}}, r"a stream \(an iterable dataset\), but this one has a sampler")
    sampler = Stateful(range(20))
    refuses(state_of(Guarded(), sampler=sampler), "has no load_state_dict")


def test_other_samplers_are_refused_with_both_values():
    ranked = partial(BatchSampler, 20, rank=0, world_size=2)
    message = "batch_size is 1, but the state is of batch_size 2"
    refuses(state_of(Guarded(), sampler=ranked(2)), message, sampler=ranked(1))
    one, other = (DynamicBatchSampler(range(n, n + 19), max_total=30) for n in (1, 2))
    refuses(state_of(Guarded(), sampler=one), r"batches|lengths", sampler=other)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([5, 6, 7, 8], [8, 7, 6, 5], "item 2 of the sampler is 6, but it was another one when the"),
        (list(range(20)), list(range(10)), "at batch 15, but the sampler has ended after 10"),
    ],
)
def test_another_order_is_noticed(before, after, message):
    """A sampler that shuffles by itself cannot be gone on with: better an error than other data."""
    state = state_of(Guarded(), 15 if len(before) > 15 else 3, sampler=map(int, before))
    with Loader(Guarded(), after, num_workers=0) as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                iter(loader)
        loader.set_epoch(1)
        assert [batch[0] for batch in loader] == after


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_another_order_of_numpy_s_numbers_is_noticed(executor):
    """Worker processes are sent each of these by itself."""
    items = [np.int64(3), np.str_("four"), np.float32(5), np.int64(6)]
    with Loader(Echo(), items, executor=executor, num_workers=1) as loader:
        states = [loader.state_dict() for _ in loader]
    for n, state in enumerate(states[:3], 1):
        with Loader(Echo(), items, num_workers=0) as loader:
            loader.load_state_dict(state)
            assert list(loader) == items[n:]
        with Loader(Echo(), items[::-1], num_workers=0) as loader:
            loader.load_state_dict(state)
            with pytest.raises(ValueError, match="but it was another one when the state was taken"):
                list(loader)


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_after_one_that_was_left_goes_on_from_its_first_batch(way):
    """How it began, no state says: the sampler was in the middle of the one before."""
    for taken in (1, 2, 3):
        with Loader(Echo(), Reshuffling(9), **WAYS[way]) as loader:
            next(iter(loader))
            batches = iter(loader)
            given = list(itertools.islice(batches, taken))
            state = plain(loader.state_dict())
            rest = list(batches)
        assert sorted(given + rest) == list(range(9))
        with Loader(Echo(), Reshuffling(9), num_workers=0) as loader:
            loader.load_state_dict(state)
            assert list(loader) == rest


class Rows:
    """Keeps its place in itself: in a run that goes on, one that was left is in the middle."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.row = 0

    def __iter__(self) -> Iterator[int]:
        while self.row < self.size:
            self.row += 1
            yield self.row - 1
        self.row = 0

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"]


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_that_keeps_its_place_begins_anew_after_an_epoch_that_was_left(way):
    """However far it was read; also where a state was put back in that epoch, or is of the next."""
    with Loader(Echo(), Rows(8), **WAYS[way]) as loader:
        for taken in (1, 3, 8):
            assert list(itertools.islice(loader, taken)) == list(range(taken))
        batches = iter(loader)
        assert next(batches) == 0
        state = plain(loader.state_dict())
        del batches
        assert list(loader) == list(range(8))
    for taken in (1, 3, None):
        with Loader(Echo(), Rows(8), **WAYS[way]) as loader:
            loader.load_state_dict(state)
            assert list(itertools.islice(loader, taken)) == list(range(1, 8))[:taken]
            following = plain(loader.state_dict())
            assert list(loader) == list(range(8))
        if taken is None:
            with Loader(Echo(), Rows(8), num_workers=0) as loader:
                loader.load_state_dict(following)
                assert list(loader) == list(range(8))


class WithoutLength(Reshuffling):
    """Fails at the item behind those that it is to give, if there is one."""

    __len__ = None  # type: ignore[assignment]

    def __init__(self, size: int, given: int) -> None:
        super().__init__(size)
        self.given = given

    def __iter__(self) -> Iterator[int]:
        for n, item in enumerate(super().__iter__()):
            if n == self.given:
                raise OSError("unreadable")
            yield item


@pytest.mark.parametrize("size", [3, 4], ids=["its end", "an error"])
def test_no_state_is_noted_behind(size):
    """All of an epoch is drawn as one task: what the sampler says then is of what comes later."""
    sampler = WithoutLength(size, given=3)
    next(iter(sampler))
    feed = SamplerFeed(SamplerSource(sampler), epoch=1, position=LanePosition())
    feed.open()
    task = Task(first=0, items=[], source_state=NO_SOURCE_STATE)
    feed.draw(task, hold=lambda item: item, most=9, until=math.inf)
    feed.finish(task)
    assert len(task.items) == 3
    assert feed.is_ended or feed.error is not None
    assert feed.known == NO_SOURCE_STATE


class Restarting:
    """Its own iterator, without a state. To be told another epoch, which is longer, begins anew."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return self.size + self.epoch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __iter__(self) -> Restarting:
        self.position = 0
        return self

    def __next__(self) -> int:
        if self.position == len(self):
            raise StopIteration
        self.position += 1
        return self.position - 1


REFUSED: dict[str, Any] = {  # what a loader is made with, and another whose states it refuses
    "any seed": lambda n: {"batch_size": n, "shuffle": True, "seed": None},
    "ours": lambda n: {"sampler": BatchSampler(12, n, shuffle=True)},
    "a mixture": lambda n: {"sampler": MixtureSampler([12, 12], [1, n], 2, stop="last")},
    "ours in ours": lambda n: {"sampler": BatchSampler(BatchSampler(36, n), 2)},
    "theirs": lambda n: {"sampler": Restarting(12) if n == 2 else Stateful(range(12))},
    "theirs in ours": lambda n: {"sampler": BatchSampler(Restarting(12), n)},
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_refused_state_does_not_disturb_the_epoch_under_way(kind, num_workers, monkeypatch):
    """Its batches, the epoch after it and the states of both are what they would have been."""
    monkeypatch.setattr("minloader._epochs.feed.STATE_COST", 0)
    foreign = state_of(Noise(), **REFUSED[kind](3)) | {"epoch": 3}
    options = REFUSED[kind](2) | {"num_workers": num_workers, "executor": "thread"}
    with Loader(Noise(), **options) as loader:
        whole = [list(map(repr, loader)) for _ in range(2)]
        loader.set_epoch(0)
        batches = map(repr, loader)
        first = next(batches)
        with pytest.raises(ValueError, match="the state"):
            loader.load_state_dict(foreign)
        second = next(batches)
        state = loader.state_dict()
        rest = [list(batches), list(map(repr, loader))]
        assert [[first, second, *rest[0]], rest[1]] == whole
        loader.load_state_dict(state)
        assert [list(map(repr, loader)), list(map(repr, loader))] == rest


def test_within_an_epoch_the_length_of_another_is_compared_when_that_begins():
    """A sampler is not told of it before: that might disturb the epoch under way."""
    foreign = state_of(Echo(), sampler=Restarting(7)) | {"epoch": 3}
    with Loader(Echo(), Restarting(6), num_workers=0) as loader:
        batches = iter(loader)
        assert next(batches) == 0
        loader.load_state_dict(foreign)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"has 9 batches in epoch 3, but .* one with 7"):
                iter(loader)
        loader.set_epoch(0)
        assert list(loader) == list(range(6))


class TooShort(list[int]):
    """A sampler that gives twice as many as it says."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()] * 2)


def test_a_state_past_a_length_that_is_too_small_goes_on():
    with Loader(range(6), TooShort(range(6))) as loader:
        batches = iter(loader)
        taken = [next(batches) for _ in range(8)]
        state = loader.state_dict()
    with Loader(range(6), TooShort(range(6))) as loader:
        loader.load_state_dict(state)
        assert taken + list(loader) == [*range(6)] * 2


class Fewer:
    """A sampler whose epochs get shorter."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return max(0, 3 - 2 * self.epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_what_was_left_out_may_be_past_the_end_of_a_shorter_epoch():
    with Loader(range(6), Fewer()) as loader:
        assert list(loader) == [0, 1, 2]
        loader.skip(2)
        batches = iter(loader)
        state = loader.state_dict()
        assert list(batches) == []
    with Loader(range(6), Fewer()) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []


# --- several epochs without a gap ----------------------------------------------------------------


def test_the_length_is_that_of_the_epoch_up_to_its_last_batch():
    options = {"batch_size": 4, "last_batch": "rollover", "executor": "thread"}
    with Loader(range(6), **options) as loader:
        for length in (1, 2):
            assert [len(loader) for _ in loader] == [length] * length
        assert len(loader) == 1  # that of the next
    with Loader(range(6), num_workers=2, **options) as loader:
        next(iter(loader))  # the end was seen, and the epoch is left nevertheless
        assert len(loader) == len(list(loader)) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_to_ask_for_the_length_does_not_disturb_the_epoch_that_is_read_ahead(inner, num_workers):
    sampler = BatchSampler(Restarting(6), None) if inner else Restarting(6)
    with Loader(Echo(), sampler, num_workers=num_workers, executor="thread") as loader:
        found = [(epoch, batch, len(loader)) for epoch, batch in loader.epochs(3)]
    assert found == [(n, batch, 6 + n) for n in range(3) for batch in range(6 + n)]


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_epochs_need_a_number(n):
    loader = Loader(Guarded(), range(3), num_workers=0)
    with pytest.raises((TypeError, ValueError), match=r"n must be"):
        loader.epochs(n)


HERE = ["inline", "threads"]
"""Of WAYS, where batches are made of the dataset itself."""

GROWN: dict[str, tuple[dict[str, Any], Any]] = {
    "single": ({}, [[0, 1, 2, 3], [*range(8)]]),
    "batches": ({"batch_size": 3}, [[[0, 1, 2], [3]], [[0, 1, 2], [3, 4, 5], [6, 7]]]),
    "rollover": (
        {"batch_size": 3, "last_batch": "rollover"},
        [[[0, 1, 2]], [[3, 0, 1], [2, 3, 4], [5, 6, 7]]],
    ),
    "shuffled": ({"batch_size": 4, "shuffle": True}, None),
}
"""Arguments of a loader over 4 samples, which are 8 from the second epoch on, and its epochs, or
None, if they have an order of their own."""


def listed(batches: Any) -> list[Any]:
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


@pytest.mark.parametrize("way", HERE)
@pytest.mark.parametrize("kind", GROWN)
def test_a_dataset_that_has_grown(kind, way):
    options, epochs = GROWN[kind]
    data = [0, 1, 2, 3]
    make = partial(Loader, data, **options, **WAYS[way])
    with make() as loader:
        first = listed(loader)
        before = json.dumps(loader.state_dict())
        data += [4, 5, 6, 7]
        between = json.dumps(loader.state_dict())
        length = len(loader)
        batches = iter(loader)
        second = listed([next(batches)])
        within = json.dumps(loader.state_dict())
        second += listed(batches)
    if epochs is None:
        epochs = [first, second]
        assert sorted(itertools.chain(*second)) == [*range(8)]
    assert [first, second] == epochs
    assert length == len(second)
    for state, given in (before, 0), (between, 0), (within, 1):
        with make() as loader:
            loader.load_state_dict(json.loads(state))
            assert listed(loader) == second[given:]
    del data[7:]
    with make() as loader, pytest.raises(ValueError, match="but the state is of"):
        loader.load_state_dict(json.loads(within))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
@pytest.mark.parametrize("mp_context", ["forkserver", "fork"])
def test_a_dataset_that_has_grown_after_workers_had_it(mp_context, options):
    """They have it as it was: the epochs keep their length, also where there are none for a while.

    What goes on from between two epochs has the length of its own dataset.
    """
    data = [0, 1, 2]
    with Loader(data, num_workers=1, mp_context=mp_context, **options) as loader:
        first = listed(loader)
        state = loader.state_dict()
        data.append(3)
        for count in (1, 0, 1):
            loader.num_workers = count
            assert [listed(loader) for _ in range(2)] == [first] * 2
    with Loader(data, num_workers=1, mp_context=mp_context, **options) as loader:
        loader.load_state_dict(state)
        assert listed(loader) == ([[0, 1], [2, 3]] if options else data)


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}])
@pytest.mark.parametrize("way", HERE)
def test_a_dataset_that_has_grown_since_the_beginning_was_interrupted(way, options):
    for step in itertools.count(0, 5):
        data = [0, 1]
        with Loader(data, **WAYS[way], **options) as loader:
            outcome = interrupted(partial(iter, loader), step)
            if not outcome.reached:
                break
            data.append(2)
            assert len(list(loader)) in (2, 3)
            assert len(list(loader)) == 3
    assert step


@pytest.mark.parametrize("way", HERE)
def test_a_dataset_that_grows_while_epochs_are_under_way(way):
    """Each epoch keeps the length that it had when it began."""
    data = [0, 1, 2, 3]
    with Loader(data, **WAYS[way]) as loader:
        batches = iter(loader)
        next(batches)
        within = loader.state_dict()
        data += [4, 5]
        assert len(loader) == 4
        other = list(loader)
        assert [*batches] == [1, 2, 3]
        assert other == [*range(6)]
        loader.skip(1)
        data += [6]
        assert list(loader) == [*range(1, 7)]
        with pytest.raises(ValueError, match="7 batches in epoch 0, but the state"):
            loader.load_state_dict(within)
        assert list(loader) == [*range(7)]


def test_epochs_that_are_over_are_let_go(no_collector):
    with Loader(Guarded(), range(3), executor="thread", num_workers=2) as loader:
        for epoch, _ in loader.epochs(30):
            assert loader.epoch <= epoch + 2
            gc.collect()
            things = Counter(map(type, gc.get_objects()))
            # The consumer's, and one for each task at most.
            assert 1 <= things[SamplerFeed] <= 1 + 2 * 2
            # One for each task, and those that the threads have just been done with.
            assert things[Future] <= 2 * 2 + 2 * 2


def test_epochs_of_what_serves_one(make):
    loader = make(Guarded(), iter(range(5)))
    run = loader.epochs()
    assert [next(run)[1][0] for _ in range(5)] == list(range(5))
    with pytest.raises(RuntimeError, match="serves one epoch"):
        next(run)


@pytest.mark.parametrize("argument", ["on_error", "on_sample_error"])
def test_epochs_without_batches_end(make, argument):
    run = make(Guarded(), []).epochs()
    with pytest.raises(ValueError, match="epoch 0 has no batches"):
        next(run)
    with pytest.raises(StopIteration):
        next(run)
    options = {argument: lambda error: SKIP}
    for run in iter, Loader.epochs:
        with pytest.raises(BatchError, match="nothing is left of epoch 0, of which 2 "):
            next(run(make(Guarded(faulty=[0, 1]), range(2), **options)))


class NeverPutBack(Stateful):
    def load_state_dict(self, state):
        raise AssertionError(f"it was to be put back to {state}")


@pytest.mark.parametrize("over", [lambda inner: inner, lambda inner: BatchSampler(inner, 2)])
def test_a_sampler_stands_where_an_epoch_has_ended(make, over):
    """Another epoch needs no state of it, nor one that could not be put back."""
    with make(repr, over(NeverPutBack(range(5)))) as loader:
        first = list(loader)
        assert list(loader) == first
        assert [batch for _, batch in loader.epochs(2)] == first * 2


@pytest.mark.parametrize("n", [2, None])
def test_the_epochs_are_over_behind_one_without_batches(make, n):
    loader = make(Guarded(), OneEpoch())
    run = loader.epochs(n)
    with suppress(ValueError):  # of epochs that would go on for ever
        assert [batch[0] for _, batch in run] == [0, 1]
    assert list(run) == []
    assert loader.epoch == loader.state_dict()["epoch"] == 2
    loader.set_epoch(0)
    assert [batch[0] for batch in loader] == [0, 1]


class OneEpoch:
    """Sampler whose epoch 0 alone has batches."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(0 if self.epoch else 2))


# --- other numbers of workers --------------------------------------------------------------------


def running(loader: Loader) -> int:
    return sum(alive(process.pid) for process in workers(loader))


def test_the_workers_are_as_many_as_was_said():
    with Loader(Guarded(), range(4), num_workers=2) as loader:
        loader.num_workers = 3
        loader.start()
        assert eventually(lambda: running(loader) == 3)
        those = workers(loader)
        loader.num_workers = 3
        loader.start()
        assert workers(loader) == those  # none is replaced for as many
        loader.num_workers = 1
        loader.start()
        assert eventually(lambda: running(loader) == 1)


def test_resized_to_workers_that_cannot_have_the_dataset():
    lock = threading.Lock()
    with Loader(lambda item: (lock, item)[1], range(4), num_workers=0) as loader:
        with pytest.raises(TypeError, match="dataset cannot be sent to worker processes"):
            loader.num_workers = 2
        assert loader.num_workers == 0
        assert list(loader) == list(range(4))


# --- the end of the program ----------------------------------------------------------------------


@variants("way", ["processes", "threads", "inline"])
def test_a_program_that_ends_in_the_middle_says_nothing(way):
    """Iterators that are collected last of all still note where they are."""
    code = f"""
import helpers, minloader
def begin(*source):
    loader = minloader.Loader(*source, **{WAYS[way]!r})
    batches, epochs = iter(loader), loader.epochs()
    next(batches), next(epochs)
    kept = [batches, epochs]
    kept.append(kept)
    return kept
kept = [begin(helpers.Guarded(), range(40)), begin(helpers.Numbers(None))]
"""
    printed_by(code)


def test_the_length_after_a_state_was_loaded_is_that_of_its_epoch():
    def make() -> Loader:
        return Loader(range(23), batch_size=4, last_batch="rollover", num_workers=0)

    with make() as loader, make() as resumed:
        for length in (5, 6, 6):
            for n, _ in enumerate(loader):
                if n == 0:
                    resumed.load_state_dict(loader.state_dict())
                    assert len(resumed) == length
            assert n + 1 == length


# --- a state of the sampler's that JSON has changed ----------------------------------------------


class NumbersAsKeys:
    """Keeps a count for each epoch, by its number, as lhotse's samplers."""

    def __init__(self) -> None:
        self.counts = {0: 0}

    def __iter__(self) -> Iterator[int]:
        while self.counts[0] < 6:
            self.counts[0] += 1
            yield self.counts[0]

    def state_dict(self) -> Any:
        return {"counts": self.counts}

    def load_state_dict(self, state: Any) -> None:
        self.counts = {0: state["counts"][0]}


def test_a_state_whose_keys_json_has_made_text_is_refused():
    with Loader(Echo(), NumbersAsKeys(), num_workers=0) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    with Loader(Echo(), NumbersAsKeys(), num_workers=0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == [3, 4, 5, 6]
        loader.load_state_dict(plain(state))
        with pytest.raises(ValueError, match=r"put back to it: KeyError\(0\);.* went through JSON"):
            list(loader)


# --- another epoch than that of a state -----------------------------------------------------------


class BeginsAnewUnlessPut:
    """Begins anew with each ``iter``, unless a state was just loaded; as torchdata's samplers."""

    def __init__(self) -> None:
        self.epoch = self.at = self.put = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.at, self.put = self.put, 0
        while self.at < 6:
            self.at += 1
            yield 10 * self.epoch + self.at - 1

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = self.put = state["at"]


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_state_of_another_epoch_than_was_loaded_has_what_was_read_ahead(way, is_stream):
    def make(**options: Any) -> Loader:
        if is_stream:
            return Loader(BeginsAnewUnlessPut(), **options)
        return Loader(Echo(), BeginsAnewUnlessPut(), **options)

    options = WAYS[way] | ({"num_workers": 1} if way == "threads" else {})
    with make(**options) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        loader.set_epoch(3)
        state = loader.state_dict()
        here = list(loader)
    with make(**options) as loader:
        loader.load_state_dict(state)
        assert (here, list(loader)) == ([30, 31, 32, 33, 34, 35],) * 2


# --- two epochs at a time -------------------------------------------------------------------------


class DrawsInItsOwnOrder:
    """Its ``__iter__`` is a generator, which looks at the number of the epoch when it is read."""

    def __init__(self, *, tells: bool) -> None:
        if tells:
            self.epoch = 0
        self._number = 0

    def set_epoch(self, epoch: int) -> None:
        self._number = epoch
        if hasattr(self, "epoch"):
            self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [10 * self._number + n for n in range(3)]


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_each_of_two_iterators_over_one_sampler_has_its_epoch(way, loaders):
    sampler = DrawsInItsOwnOrder(tells=loaders == 2)
    with ExitStack() as stack:
        made = [stack.enter_context(Loader(Echo(), sampler, **WAYS[way])) for _ in range(loaders)]
        if loaders == 2:
            made[1].set_epoch(1)
        both = [iter(made[0]), iter(made[-1])]
        got = [[next(each) for each in both] for _ in range(3)]
    assert got == [[0, 10], [1, 11], [2, 12]]


def test_a_state_of_a_lane_that_is_made_anew_while_what_was_ahead_is_held():
    """As an interrupt has it made: the sampler is read on from before what was not given."""
    gate = threading.Event()

    def late(item: int) -> int:
        assert item or gate.wait(60)
        return item

    options: Any = {"num_workers": 2, "executor": "thread", "in_order": False}
    with Loader(late, BatchSampler(range(6), None), **options) as loader:
        batches = iter(prefetch(loader, int, depth=1))
        given = [next(batches)]
        epoch = loader._course.cursor.epoch
        assert epoch is not None
        assert eventually(lambda: len(epoch.held) == 1)
        epoch._begin_again()
        state = loader.state_dict()
        gate.set()
    with Loader(late, BatchSampler(range(6), None), num_workers=0) as resumed:
        resumed.load_state_dict(state)
        assert sorted([*given, *resumed]) == list(range(6))
