"""A run goes on with another number of ranks: no sample of the epoch twice, none left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from helpers import Guarded, Lazily, Stateful
from hypothesis import given, settings
from hypothesis import strategies as st

from minloader import BatchSampler, DynamicBatchSampler, Loader
from minloader._epochs import sampled

Make = Callable[[int, int], Any]  # makes the sampler of a rank, in a world of some size
Step = tuple[list[Any], ...]  # a batch of each rank

GLOBAL_BATCH = 8
N = GLOBAL_BATCH * 41 + 6
LENGTHS = np.random.default_rng(0).integers(10, 31, 500).tolist()  # more than 40 steps


def fixed(over: Callable[[], Any], *options: Any) -> Make:
    def make(rank: int, world_size: int) -> BatchSampler:
        size = GLOBAL_BATCH // world_size
        return BatchSampler(over(), size, *options, seed=2, rank=rank, world_size=world_size)

    return make


def planned(lengths: Any, most: int = 1000, **options: Any) -> Make:
    def make(rank: int, world_size: int) -> DynamicBatchSampler:
        # What all ranks together may have stays the same.
        limits = {"max_padded": 240 // world_size, "max_batch": most // world_size}
        return DynamicBatchSampler(lengths, rank=rank, world_size=world_size, **limits, **options)

    return make


KINDS: dict[str, Make] = {
    "range": fixed(lambda: N, True),
    "in order": fixed(lambda: N, False, "discard"),
    "rollover": fixed(lambda: N, True, "rollover"),
    "list": fixed(lambda: list(range(N)), True),
    "lazily": fixed(lambda: Lazily(range(N))),
    "stateful": fixed(lambda: Stateful(range(N))),
    "planned": planned(LENGTHS, shuffle=True, buckets=3),
    "planned in order": planned(LENGTHS, most=10),
    "planned by the window": planned(Lazily(LENGTHS), shuffle=True),
    "planned as read": planned(Lazily(LENGTHS)),
}


def samples_of(kind: str) -> int:
    return len(LENGTHS) if kind.startswith("planned") else N


def most_dropped(kind: str) -> int:
    return 7 + 7 if kind.startswith("planned") else GLOBAL_BATCH  # for like costs; at the end


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def samples(steps: Iterable[Step]) -> list[Any]:
    return flat(flat(steps))


def in_order(steps: Iterable[Step]) -> list[Any]:
    """Return the samples of a ``BatchSampler`` as one rank alone would get them."""
    found = []
    for step in steps:
        for row in range(len(step[0])):
            found += [batch[row] for batch in step if row < len(batch)]
    return found


class Run:
    """All ranks of a training run; iterates over their steps.

    Args:
        make: makes the sampler of a rank.
        world_size: how many ranks.
        state: of a rank of a run before, to go on from.
        epoch: to begin with, if there is no state.
    """

    def __init__(
        self, make: Make, world_size: int, state: dict[str, Any] | None = None, epoch: int = 1
    ) -> None:
        self.ranks = [make(rank, world_size) for rank in range(world_size)]
        for sampler in self.ranks:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        self._begun = 0 if state is None else state["yielded"]
        self._size = self.size()
        self._steps = zip(*self.ranks, strict=True)

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def size(self) -> int | None:
        try:
            (size,) = {len(sampler) for sampler in self.ranks}
        except TypeError:  # it is not known
            return None
        return size

    def state(self, rank: int = 0) -> dict[str, Any]:
        states = [json.dumps(sampler.state_dict()) for sampler in self.ranks]
        assert set(states) == {states[0]}, "the state of one rank must serve all"
        assert len(states[0]) < 2000
        return json.loads(states[rank % len(states)])  # type: ignore[no-any-return]

    def rest(self) -> list[Step]:
        """Take the rest of an epoch that was not begun, or whose state was loaded."""
        steps = list(self)
        assert self._size in (None, self._begun + len(steps))
        assert self.size() == self._size
        return steps

    @property
    def dropped(self) -> int:
        (dropped,) = {sampler.dropped for sampler in self.ranks}
        return dropped  # type: ignore[no-any-return]


WORLDS = [(before, after) for before in (1, 2, 4) for after in (1, 2, 4, 8) if before != after]
WORLDS += [(8, after) for after in (1, 2, 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("worlds", "places"),
    [
        ([(2, 8)], [1, 40]),
        pytest.param(WORLDS, range(41), marks=pytest.mark.slow, id="all"),
    ],
)
def test_what_k_steps_have_left_is_dealt_out_to_other_ranks(kind, worlds, places):
    make = KINDS[kind]
    if "by the window" in kind or "as read" in kind:
        worlds = worlds[::4]  # these take long, and are dealt out as those with a plan
    for before, after in worlds:
        old = Run(make, before)
        states, steps = [old.state()], []
        for step in islice(old, max(places)):
            steps.append(step)
            states.append(old.state(len(steps)))
        whole = steps + list(old)
        for k in places:
            new = Run(make, after, states[k])
            both = steps[:k] + new.rest()
            taken = samples(both)
            assert new.dropped <= most_dropped(kind)
            if kind != "rollover":
                assert len(taken) == len(set(taken)) == samples_of(kind) - new.dropped
                assert set(taken) <= set(range(samples_of(kind)))
            if not kind.startswith("planned"):  # the same order, cut for other ranks
                expected, found = in_order(whole), in_order(both)
                least = min(len(expected), len(found))
                assert found[:least] == expected[:least]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.slow, id="many")])
def test_the_world_changes_again_and_again(kind, examples):
    make = KINDS[kind]

    @settings(deadline=None, max_examples=examples, database=None)
    @given(
        worlds=st.lists(
            st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 8)), min_size=2, max_size=6
        ),
        epoch=st.integers(0, 2),
    )
    def check(worlds, epoch):
        run, taken = Run(make, worlds[0][0], epoch=epoch), []
        for (_, steps), (world_size, _) in pairwise(worlds):
            taken += samples(islice(run, steps))
            run = Run(make, world_size, run.state(steps))
        taken += samples(run.rest())
        if kind == "rollover":
            carried = epoch * N % GLOBAL_BATCH  # from the epoch before: these may come again
            assert len(taken) == (carried + N) // GLOBAL_BATCH * GLOBAL_BATCH
            assert len(set(taken)) >= len(taken) - carried
        else:
            assert len(taken) == len(set(taken)) == samples_of(kind) - run.dropped
            assert run.dropped <= most_dropped(kind)

    check()


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(0, 60),
    parts=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 5)),
        min_size=2,
        max_size=4,
        unique_by=lambda part: part[0],
    ),
    last_batch=st.sampled_from(["keep", "discard"]),
    over=st.sampled_from([lambda n: n, lambda n: Stateful(range(n)), lambda n: list(range(n))]),
)
def test_any_global_batch(n, parts, last_batch, over):
    """The batch size may change along with the world size, whatever that makes of their product."""
    state, taken = None, []
    for world_size, size, steps in parts:

        def make(rank: int, world_size: int, size: int = size) -> BatchSampler:
            options = {"last_batch": last_batch, "rank": rank, "world_size": world_size}
            return BatchSampler(over(n), size, **options)

        run = Run(make, world_size, state, epoch=0)
        taken += in_order(islice(run, steps))
        state = run.state()
    taken += in_order(run)
    assert taken == list(range(len(taken)))
    for sampler in run.ranks:
        sampler.set_epoch(1)
    assert run.size() == Run(make, world_size, epoch=1).size()
    # Some part may have come to the end, and dropped what is too little for its own ranks.
    assert n - len(taken) < max(w * (1 if last_batch == "keep" else size) for w, size, _ in parts)


def test_costs_in_a_step_stay_alike():
    lengths = np.random.default_rng(1).integers(1, 1000, 4000)
    make = partial(DynamicBatchSampler, lengths, buckets=8, shuffle=True)
    old = make(16_000, rank=5, world_size=8)
    list(islice(old, 10))
    ranks = [make(32_000, rank=rank, world_size=4) for rank in range(4)]
    for sampler in ranks:
        sampler.load_state_dict(old.state_dict())
    costs = np.array([[lengths[batch].sum() for batch in step] for step in zip(*ranks)])  # noqa: B905
    assert costs.max() > 31_000
    assert (costs.min(axis=1) >= 0.95 * costs.max(axis=1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_epoch_is_whole(kind):
    make = KINDS[kind]
    old = Run(make, 2, epoch=0)
    first = list(islice(old, 9))
    new = Run(make, 4, old.state())
    first += new.rest()
    for sampler in new.ranks:
        sampler.set_epoch(1)
    fresh = Run(make, 4, epoch=1)
    assert new.size() == fresh.size()
    second = list(zip(*new.ranks, strict=True))
    assert new.state()["dealt"] == []
    assert second == fresh.rest()
    if kind == "rollover":  # which left some samples for it
        assert in_order(first + second) == in_order([*Run(make, 1, epoch=0), *Run(make, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_between_epochs_any_world_size_will_do(kind):
    make = KINDS[kind]
    begun, fresh = Run(make, 4, Run(make, 2, epoch=3).state()), Run(make, 4, epoch=3)
    assert begun.state() == fresh.state()
    assert begun.rest() == fresh.rest()


@pytest.mark.parametrize("kind", ["in order", "planned in order"])
def test_states_of_version_1_too(kind):
    make = KINDS[kind]
    old = Run(make, 2, epoch=0)
    steps = list(islice(old, 3))
    state = old.state() | {"version": 1}
    del state["dealt"]
    state.pop("order", None)
    new = Run(make, 4, state)
    taken = samples(steps + new.rest())
    assert len(taken) == len(set(taken)) == samples_of(kind) - new.dropped


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "loaded", "message"),
    [
        (
            partial(BatchSampler, 20, 2, world_size=4),
            partial(BatchSampler, 21, 4, world_size=2),
            "n is 21, but the state is of n 20",
        ),
        (
            partial(BatchSampler, 20, 2, world_size=4),
            partial(BatchSampler, 20, None, world_size=2),
            "batch_size is None, but the state is of batch_size 2",
        ),
        (
            partial(BatchSampler, 20, 2, last_batch="rollover", world_size=4),
            partial(BatchSampler, 20, 2, last_batch="rollover", world_size=2),
            r"world_size \* batch_size is 4, but the state is of 8, .* choose the batch_size",
        ),
        (
            partial(DynamicBatchSampler, LENGTHS, 90, world_size=4),
            partial(DynamicBatchSampler, LENGTHS[::-1], 90, world_size=2),
            "lengths is '[0-9a-f]+', but the state is of lengths '[0-9a-f]+'",
        ),
        (
            partial(DynamicBatchSampler, LENGTHS, 90, world_size=4),
            partial(DynamicBatchSampler, LENGTHS, 90, buckets=2, world_size=2),
            "buckets is 2, but the state is of buckets 1",
        ),
        (
            partial(DynamicBatchSampler, LENGTHS, 90, world_size=4),
            partial(DynamicBatchSampler, LENGTHS, 180, world_size=4),
            r"budget is \['max_total', 180.0\], but the state is of budget \['max_total', 90.0\]",
        ),
    ],
)
def test_another_epoch_is_refused(made, loaded, message):
    sampler = loaded()
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(made().state_dict())
    assert sampler.state_dict() == before


@pytest.mark.parametrize("impossible", [0, -3, "4", None, 2.0**70])
def test_impossible_world_sizes(impossible):
    sampler = BatchSampler(20, 2, world_size=2)
    with pytest.raises(ValueError, match="world_size"):
        sampler.load_state_dict(sampler.state_dict() | {"world_size": impossible})


def test_damaged_parts():
    sampler = BatchSampler(20, 2, world_size=2)
    for damaged in (3, "parts", [[1, 2]]):
        with pytest.raises(ValueError, match="dealt must be a list of lists of 3, got"):
            sampler.load_state_dict(sampler.state_dict() | {"dealt": damaged})


# --- through a loader ----------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"executor": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
}

CASES = [
    *[(kind, "inline", 2, 4) for kind in ("range", "stateful", "planned", "planned by the window")],
    *[(kind, "thread", 4, 2) for kind in ("range", "planned")],
    pytest.param("range", "process", 1, 2, marks=pytest.mark.slow),
    pytest.param("planned", "process", 2, 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("asked", ["often", "once"])
@pytest.mark.parametrize(("kind", "way", "before", "after"), CASES)
def test_loaders_of_other_ranks(kind, way, before, after, asked, monkeypatch):
    """With batches under way, and with a state that the sampler gave long before."""
    monkeypatch.setattr(sampled, "STATE_COST", 0 if asked == "often" else 1e9)
    make, k = KINDS[kind], 7
    delivered, states = [], []
    for rank in range(before):
        with Loader(Guarded(), make(rank, before), **WAYS[way]) as loader:
            batches = iter(loader)
            delivered += [batch[0] for batch in islice(batches, k)]
            states.append(json.loads(json.dumps(loader.state_dict())))
            assert len(json.dumps(states[-1])) < 2000
    assert {state["batches"] for state in states} == {k}
    assert (states[0]["sampler"][0]["at"] == 0) == (asked == "once")
    given: list[list[Any]] = []
    for rank in range(after):
        with Loader(Guarded(), make(rank, after), **WAYS[way]) as loader:
            loader.load_state_dict(states[(rank + 1) % before])
            size = len(loader) if kind in ("range", "planned") else None
            batches = iter(loader)
            given.append([batch[0] for batch in islice(batches, 5)])
            state = json.loads(json.dumps(loader.state_dict()))
            rest = [batch[0] for batch in batches]
            assert size in (None, k + 5 + len(rest))
            given[-1] += rest
            fresh = make(rank, after)
            fresh.set_epoch(1)
            assert [batch[0] for batch in islice(loader, 3)] == list(islice(fresh, 3))
            loader.load_state_dict(state)
            assert [batch[0] for batch in loader] == rest
    taken = flat(delivered) + samples(given)
    assert len(taken) == len(set(taken))
    assert len({len(batches) for batches in given}) == 1
    assert samples_of(kind) - len(taken) <= most_dropped(kind)


def test_batches_delivered_before_their_turn_are_refused():
    """Which they are differs from rank to rank."""
    make = KINDS["range"]
    with Loader(Guarded(), make(0, 2), num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict() | {"beyond": [[2, 3]]}
    with Loader(Guarded(), make(0, 4), num_workers=0) as loader:
        with pytest.raises(ValueError, match=r"world_size is 4, but .* world_size 2 .*in_order"):
            loader.load_state_dict(state)
        assert [batch[0] for batch in loader] == list(make(0, 4))
