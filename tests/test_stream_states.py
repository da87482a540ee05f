"""Streams with a state: when it is taken and put back, and that they count their epochs on."""

from __future__ import annotations

import operator
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from conftest import lists, outcomes, plain, require
from helpers import Numbers, Refuses, StatefulIterator, StatefulNumbers
from interrupts import OURS, interrupted
from kinds import (
    IDIOMS,
    BeginsAnew,
    Counting,
    GoesOn,
    Logged,
    Noisy,
    OwnIterator,
    OwnToldHowFar,
    Ready,
    SaysNothing,
    Separate,
    Sticky,
    Told,
    ToldHowFar,
    Unwritten,
    same,
    shard,
)
from test_streams import in_turns

from minloader import BatchError, BatchSampler, Loader, MixtureSampler, shuffled

pytestmark = pytest.mark.usefixtures("quick_starts")


own = pytest.mark.parametrize("make", ["inline", "thread", "process-2"], indirect=True)
every_idiom = pytest.mark.parametrize("stream", IDIOMS)
EPOCHS = 3


def epoch(number: int, shards: int, stream: Any = Counting) -> list[list[int]]:
    """What an epoch of a stream should give."""
    first = 100 * number if stream in IDIOMS else 0
    return [[first + value for value in batch] for batch in in_turns(14, shards, 2)]


def run(loader: Loader) -> tuple[list[Any], list[list[Any]]]:
    """Every state of some epochs, with all that came after it; and the batches of each epoch."""
    states, given = [(0, 0, plain(loader.state_dict()))], []
    for number in range(EPOCHS):
        given.append([])
        for batch in loader:
            given[-1].append(plain(batch))
            states.append((number, len(given[-1]), plain(loader.state_dict())))
        states.append((number + 1, 0, plain(loader.state_dict())))
    return states, given


# --- the count


def test_workers_that_take_over_leave_the_object_as_it_was():
    """For another loader too, also where it begins an epoch once more."""
    shared = Counting()
    with Loader(shared, batch_size=2, num_workers=0, executor="thread") as loader:
        batches = iter(loader)
        given = lists(islice(batches, 2))
        loader.num_workers = 1
        assert given + lists(batches) == epoch(0, 1)
    with Loader(shared, batch_size=2, num_workers=0) as other:
        for _ in range(2):
            assert lists(islice(other, 1)) == [[0, 1]]


def test_an_object_that_the_user_has_moved_is_read_from_there():
    moved = Counting()
    moved.load_state_dict({"epoch": 0, "i": 5})
    with Loader(moved, num_workers=0) as loader:
        state = loader.state_dict()
        assert list(loader) == list(range(5, 14))
    with Loader(Counting(), num_workers=0) as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == list(range(5, 14))


class Interrupts(BeginsAnew):
    """Ctrl-C comes once, when it has moved on and not given a sample."""

    def __init__(self, at: int) -> None:
        super().__init__(range(9))
        self.at = at

    def __next__(self) -> int:
        sample = super().__next__()
        if sample == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return sample


def interrupting(at: int) -> Any:
    yield from Interrupts(at)


@pytest.mark.parametrize(
    "stream",
    [Interrupts, interrupting, lambda at: map(int, Interrupts(at))],
    ids=["a class", "a generator", "a map"],
)
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("at", [0, 4, 5, 8])
def test_an_iterator_that_was_interrupted_in_its_own_code_is_not_read_on(stream, batch_size, at):
    """Nobody knows what is missing: it can be read once."""
    with Loader(stream(at), num_workers=0, batch_size=batch_size) as loader:
        batches = iter(loader)
        given = list(islice(batches, at // (batch_size or 1)))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        with pytest.raises(RuntimeError, match="can be read once, and Ctrl-C came while its own"):
            next(batches)
        assert list(batches) == []
        assert np.ravel(given).tolist() == list(range(at // (batch_size or 1) * (batch_size or 1)))


@pytest.mark.parametrize("stream", [Separate, Counting], ids=["goes on", "has ended"])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_that_was_interrupted_on_its_way_comes_again(stream, error):
    """Its batch is read once more, and not the one before it."""
    rest = [5, 6, 7] if stream is Separate else []
    for place in range(0, 10_000, 3):
        with Loader(stream(8, Refuses(4, error)), num_workers=0) as loader:
            batches = iter(loader)
            given = list(islice(batches, 4))
            try:
                interrupted(partial(next, batches), place, f"{OURS}/_worker/stream_worker.py")
            except (ValueError, BatchError):  # there are fewer places
                break
            failure, *others = outcomes(batches)
        assert "4 is bad" in str(failure)
        assert given + others == [0, 1, 2, 3, *rest]
    assert place


def test_an_iterator_that_was_begun_here_is_sent_to_no_worker():
    """What was read of it would be lost: it can be read once."""
    with Loader(iter(range(9)), num_workers=0, executor="thread", seed=None) as loader:
        loader.num_workers = 1
        loader.num_workers = 0
        batches = iter(loader)
        assert next(batches) == 0
        with pytest.raises(RuntimeError, match="can be read once"):
            loader.num_workers = 1
        with Loader(iter(range(9)), seed=5) as other, pytest.raises(RuntimeError, match="once"):
            loader.load_state_dict(other.state_dict())
        assert loader.seed != 5
        assert list(batches) == list(range(1, 9))
        assert loader.num_workers == 0


@every_idiom
def test_a_pass_that_was_resumed_and_left_begins_anew_in_every_shard(stream):
    class Lopsided(stream):
        def values(self) -> range:
            first = 100 * self.epoch
            return range(first + 50, first + 52) if shard()[0] else range(first, first + 7)

    def loader() -> Loader:
        return Loader(Lopsided(), batch_size=2, num_workers=2, executor="thread")

    with loader() as lived:
        first, batches = lists(lived), iter(lived)
        for _ in range(4):
            next(batches)
        state = lived.state_dict()
    assert [each["ended"] for each in state["stream"][0]["shards"]] == [False, True]
    with loader() as resumed:
        resumed.load_state_dict(state)
        iter(resumed)
        for number in 1, 2:
            assert lists(resumed) == [[100 * number + each for each in batch] for batch in first]


# --- when it is asked for, and put back


def test_a_stream_that_is_its_own_iterator_has_one_state():
    with Loader(OwnIterator(), num_workers=0) as loader:
        next(iter(loader))
        (shard,) = loader.state_dict()["stream"][0]["shards"]
    assert shard["state"] == {"iterator": {"epoch": 0, "i": 1}}
    assert shard["beginning"] is None


class GoesWithIter:
    """Goes to the state that was put back when ``iter`` begins, as torchdata's loader has it."""

    goes_to: int | None = None

    def __init__(self, n: int) -> None:
        self.n = n
        self.at = 0

    def __iter__(self) -> Any:
        self.at = self.goes_to or 0
        self.goes_to = None
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.goes_to = state["at"]


@pytest.mark.parametrize("make_stream", [same, lambda stream: shuffled(stream, 8)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_goes_to_its_state_when_it_is_begun(workers, make_stream):
    options: Any = {"batch_size": 2, "num_workers": workers, "executor": "thread"}
    with Loader(make_stream(GoesWithIter(30)), **options) as loader:
        given, states = [], []
        for epoch, batch in loader.epochs(2):
            given.append((epoch, batch.tolist()))
            states.append(loader.state_dict())
    for k in (0, 4, 13, 20):
        with Loader(make_stream(GoesWithIter(30)), **options) as loader:
            loader.load_state_dict(states[k])
            rest = [(epoch, batch.tolist()) for epoch, batch in loader.epochs(until=2)]
            assert rest == given[k + 1 :]


def nodes(n: int = 14) -> Any:
    """A graph of torchdata's, of another order in each epoch, which begins only in its place."""
    tn = require("torchdata.nodes")
    return tn.Loader(tn.SamplerWrapper(Told(n)), restart_on_stop_iteration=False)


@pytest.mark.parametrize(
    "make",
    ["inline", "thread", pytest.param("process-2", marks=pytest.mark.slow)],
    indirect=True,
)
@pytest.mark.parametrize("make_stream", [Ready, nodes, lambda: shuffled(Ready(), 6)])
@pytest.mark.parametrize("in_pairs", [True, False])
def test_a_stream_that_has_an_iterator_ready_when_it_is_put_back(make, make_stream, in_pairs):
    """It was asked where it is before: by us, by the user before that, or as it is read."""
    options: Any = {"num_workers": 2} if make.name != "inline" else {}
    if in_pairs:
        options["batch_size"] = 2
    looked, lived = make(make_stream(), **options), make(make_stream(), **options)
    states, given = run(lived)
    assert given[0] != given[1] != given[2]
    for number, k, state in states[:: {"inline": 1, "thread": 5}.get(make.name, 13)]:
        fresh = make(make_stream(), **options)
        looked.state_dict()
        for loader in fresh, looked, lived:
            loader.load_state_dict(state)
            for each in range(number, EPOCHS):
                assert plain(list(loader)) == given[each][k * (each == number) :]
        looked.close()
        looked = make(make_stream(), **options)


def test_a_node_of_torchdata_is_put_back_nowhere_and_read_once():
    """Only its ``reset`` begins anew."""
    tn = require("torchdata.nodes")
    with Loader(tn.Batcher(tn.IterableWrapper(range(12)), 3), num_workers=0) as loader:
        assert len(list(loader)) == 4
        with pytest.raises(RuntimeError, match="can be read once"):
            list(loader)


class Node(BeginsAnew):
    """As a node of torchdata's: its own iterator, has a state, and ``iter`` does not begin anew."""

    def __init__(self) -> None:
        super().__init__(range(6))

    def __iter__(self) -> Any:
        return super().__iter__() if not self.begun else self

    def state_dict(self) -> Any:
        return {"left": operator.length_hint(getattr(self, "left", ()))}


class StatefulNode(Node):
    """One that can be put back."""

    def load_state_dict(self, state: Any) -> None:
        self.left = iter(self.items[len(self.items) - state["left"] :])


class Sparse(Counting):
    """Every second epoch has nothing. It is not its own iterator."""

    def values(self) -> range:
        return range(0) if self.epoch % 2 else super().values()


class OwnSparse(OwnIterator):
    """The same, its own iterator, which is told its epoch."""

    def values(self) -> range:
        return range(0) if self.epoch % 2 else super().values()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch - 1


@own
@pytest.mark.parametrize("kind", [Node, StatefulNode])
@pytest.mark.parametrize("make_stream", [same, lambda stream: shuffled(stream, 4)])
def test_an_iterator_with_a_state_that_gives_nothing_more_is_used_up(make, kind, make_stream):
    loader = make(make_stream(kind()))
    assert len(list(loader)) == 6 * max(1, loader.num_workers)
    with pytest.raises(RuntimeError, match="can be read once"):
        list(loader)


@pytest.mark.parametrize("kind", [Node, StatefulNode])
def test_a_sampler_with_a_state_that_gives_nothing_more_is_used_up(kind):
    for make_sampler in same, lambda sampler: BatchSampler(sampler, 2):
        with Loader(same, make_sampler(kind()), num_workers=0) as loader:
            assert len(np.ravel(list(loader))) == 6
            with pytest.raises(RuntimeError, match="serves one epoch"):
                list(loader)


@own
@pytest.mark.parametrize("kind", [Sparse, OwnSparse])
def test_an_epoch_of_a_stream_may_be_empty(make, kind):
    loader = make(kind())
    assert [len(list(loader)) > 0 for _ in range(4)] == [True, False, True, False]


def test_the_state_is_first_taken_before_iter_and_not_put_back():
    stream = Logged()
    with Loader(stream, batch_size=2, num_workers=0) as loader:
        for _ in range(EPOCHS):
            list(loader)
        assert stream.calls[:3] == ["state", "iter", "state"]
        assert stream.calls.count("iter") == EPOCHS
        assert "load" not in stream.calls
        batches = iter(loader)
        next(batches)
        del batches
        loader.load_state_dict(loader.state_dict())
        stream.calls.clear()
        next(iter(loader))
        assert stream.calls[:2] == ["state", "load"]
        assert stream.calls[-3:] == ["load", "iter", "state"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Sticky, GoesOn])
def test_a_stream_that_goes_on_from_its_last_state(kind, workers):
    """Only the resumed epoch is shorter."""
    values = epoch(0, 1)
    with Loader(kind(), batch_size=2, num_workers=workers) as loader:
        states, given = run(loader)
        assert given == [values] * EPOCHS
        for _, k, state in states:
            loader.load_state_dict(state)
            assert lists(loader) == values[k:]
            assert lists(loader) == values
            assert lists(islice(loader, 3)) == values[:3]
            assert lists(loader) == values
    with Loader(kind(), batch_size=2, num_workers=workers) as loader:
        loader.load_state_dict(states[3][2])
        assert [lists(loader) for _ in range(3)] == [values[states[3][1] :], values, values]
    with Loader(kind(), batch_size=2, num_workers=workers) as loader:
        batches = iter(loader)
        begun = lists(islice(batches, 2))
        loader.num_workers = 1 - workers
        assert begun + lists(batches) == values
        assert lists(loader) == values


class Late(Counting):
    """Has no state before its first sample."""

    def state_dict(self) -> Any:
        assert self.i or self.epoch
        return super().state_dict()


def test_an_epoch_begins_anew_behind_one_that_was_left_where_no_state_says_how():
    """Not the object is read, but copies of it."""
    with Loader(Late(), batch_size=2, num_workers=0) as loader:
        for number in range(2):
            assert lists(islice(loader, 2)) == epoch(number, 1)[:2]
            assert lists(loader) == epoch(number, 1)


@own
def test_an_error_ends_a_generator_for_a_resumed_run_too(make):
    """Its stream could go on from its state, but this run does not."""
    options: Any = {"batch_size": 2, "num_workers": int(make.name != "inline")}
    loader, other = (make(Counting(14, Refuses(5)), **options) for _ in range(2))
    for _ in range(2):
        batches = iter(loader)
        assert lists(islice(batches, 2)) == epoch(0, 1)[:2]
        with pytest.raises(ValueError, match="5 is bad"):
            next(batches)
        state = plain(loader.state_dict())
        assert list(batches) == []
    other.load_state_dict(state)
    assert list(other) == []
    assert lists(islice(other, 2)) == epoch(0, 1)[:2]


@own
def test_an_epoch_with_an_error_is_repeated_also_when_it_is_resumed(make):
    """An iterator gets past the error; but who counts the epoch does not know of it."""
    options: Any = {"batch_size": 2, "num_workers": int(make.name != "inline"), "on_error": "skip"}
    expected = [batch for batch in epoch(0, 1) if 3 not in batch]
    loader = make(Separate(14, Refuses(3)), **options)
    states = []
    for batch in loader:
        assert batch.tolist() == expected[len(states)]
        states.append(plain(loader.state_dict()))
    assert lists(loader) == expected
    for k, state in enumerate(states[1:], 2):
        other = make(Separate(14, Refuses(3)), **options)
        other.load_state_dict(state)
        assert lists(other) == expected[k:]
        assert lists(other) == expected


# --- random numbers


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["global", "kept", "late", "own", "shuffled"])
def test_random_streams_go_on_alike(kind, workers):
    def make(workers: int) -> Loader:
        return Loader(Noisy(kind), batch_size=2, num_workers=workers, seed=3)

    with make(workers) as loader:
        states, given = [], []
        for number in range(EPOCHS):
            for batch in loader:
                given.append(batch.tolist())
                states.append((number, loader.state_dict()))
    whole = len(given) // EPOCHS
    assert given[:whole] != given[whole : 2 * whole]
    for k, (number, state) in enumerate(states[:-whole]):
        with make(0) as other:
            other.load_state_dict(state)
            assert lists(other) == given[k + 1 : (number + 1) * whole]
            assert lists(other) == given[(number + 1) * whole :][:whole]


# --- a state_dict that says nothing, or must be told how far it was read


def in_the_drop_in(stream: Any, **options: Any) -> Any:
    torch = require("torch")
    from minloader.torch import DataLoader

    kind = type("Stream", (type(stream), torch.utils.data.IterableDataset), {})
    return DataLoader(kind(), batch_size=2, **options)


def as_stream(stream: Any, **options: Any) -> Any:
    return Loader(stream, batch_size=2, **options)


TOLD: dict[str, Any] = {
    "stream": as_stream,
    "shuffled": lambda stream, **options: as_stream(shuffled(stream, 4), **options),
    "drop-in": in_the_drop_in,
    "sampler": lambda sampler, **options: Loader(same, BatchSampler(sampler, 2), **options),
    "inner sampler": lambda sampler, **options: Loader(
        same, BatchSampler(BatchSampler(sampler, None), 2), **options
    ),
    "part": lambda sampler, **options: Loader(
        same, MixtureSampler([sampler], [1], 2, stop="last"), **options
    ),
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *product(TOLD, [ToldHowFar, SaysNothing, Unwritten]),
        *((way, OwnToldHowFar) for way in list(TOLD)[:3]),  # such a sampler serves one epoch
    ],
)
def test_what_is_no_state_for_us_is_none(way, kind, workers):
    with TOLD[way](kind(), num_workers=workers) as lived:
        expected = plain(list(lived))
        assert len(expected) == len(list(lived)) == 4
    with TOLD[way](kind(), num_workers=workers) as lived:
        for _ in zip(range(3), lived, strict=False):
            state = lived.state_dict()
    with TOLD[way](kind(), num_workers=workers) as resumed:
        resumed.load_state_dict(state)
        assert plain(list(resumed)) == expected[3:]


def as_it_is(stream: Any) -> Any:
    return stream


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("wrap", [as_it_is, partial(shuffled, buffer_size=4)])
@pytest.mark.parametrize("other", [Numbers, StatefulNumbers])
def test_a_state_of_an_iterator_that_has_none_is_refused(other, wrap, on_error):
    """Whoever leaves out what fails must not be given an empty epoch."""
    with Loader(wrap(StatefulIterator(20)), num_workers=0) as loader:
        list(islice(loader, 9))
        state = loader.state_dict()
    with Loader(wrap(other(20)), num_workers=0, on_error=on_error) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"one of an iterator.*has no load_state_dict"):
            list(loader)
