"""What all samplers promise, for every one of them: rules x kinds.

Windows are of 24 samples here, so that an epoch has several.
"""

import json
import pickle
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import our_samplers
import pytest
from conftest import outcomes, printed_by, variants
from helpers import Lazily
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import Raising, every_rank, plain
from our_samplers import GIVEN, KINDS, LENGTHS, LIMITED, OF_SIZE, N, Told

import minloader
from minloader import (
    BatchSampler,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    PackedBatchSampler,
    get_worker_info,
)
from minloader._sampling import windows
from minloader._sampling.seeding import Piece


@pytest.fixture(autouse=True, scope="module")
def small_windows() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(windows, "WINDOW", 24)
    yield
    patch.undo()


SINGLES = ["batch singles", "mixture singles"]
ROLLOVER = [kind for kind in KINDS if "rollover" in kind]
PLAIN = [kind for kind in KINDS if kind not in ROLLOVER]
# What an epoch of these has is not all that there is.
PARTIAL = ["mixture singles", "mixture never", "mixture told"]
# Those of which nobody knows beforehand how many batches they have.
UNKNOWN = [kind for kind in KINDS if "lazy" in kind or "told" in kind or "counting" in kind]
UNKNOWN += ["dynamic mixture", "dynamic singles", "packed mixture"]
UNKNOWN += ["mixture singles", "mixture never"]
# Those whose epochs do not follow each from the one before.
REPEATABLE = [kind for kind in PLAIN if "counting" not in kind]
# Those that have an order of their own: parts that are samplers have theirs.
SHUFFLED = [kind for kind, make in KINDS.items() if make().shuffle and kind != "mixture never"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def test_each_sampler_is_here():
    all_samplers = {name for name in minloader.__all__ if name.endswith("Sampler")}
    assert {type(make()).__name__ for make in KINDS.values()} >= all_samplers
    assert {each.__name__ for each, _ in GIVEN.values()} == all_samplers
    assert {type(make(9)).__name__ for make, _ in OF_SIZE.values()} == all_samplers


def items_of(kind: str, batches: Any) -> list[Any]:
    batches = list(batches)
    flat = batches if kind in SINGLES else [item for batch in batches for item in batch]
    return list(map(plain, flat))


def begun(sampler: Any, epoch: int) -> Any:
    sampler.set_epoch(epoch)
    return sampler


def length_of(sampler: Any) -> int | None:
    """Return how many batches the epoch has; None: that is not known beforehand."""
    try:
        return len(sampler)
    except TypeError:
        return None


def saved(sampler: Any) -> Any:
    return json.loads(json.dumps(sampler.state_dict()))


def all_items(kind: str) -> Counter[Any]:
    """Return what an epoch has, whatever the ranks: that of one rank, and what it dropped."""
    expected: Counter[Any] = Counter(items_of(kind, KINDS[kind]()))
    if kind == "batch discard":
        expected = Counter(range(N))
    return expected


@every_kind
@variants("world_size", [3, 8, 1, 2], quick=2)
def test_ranks_share_an_epoch(kind, world_size):
    """At every step they have the same state and length."""
    samplers = every_rank(KINDS[kind], world_size)
    for epoch in range(3):
        iterators = [iter(begun(sampler, epoch)) for sampler in samplers]
        got: Counter[Any] = Counter()
        (known,) = {length_of(sampler) for sampler in samplers}
        steps = 0
        while True:
            assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
            assert {length_of(sampler) for sampler in samplers} == {known}
            batches = [next(each, None) for each in iterators]
            if batches == [None] * world_size:
                break
            got.update(items_of(kind, batches))
            steps += 1
        assert known == (None if kind in UNKNOWN else steps)
        (dropped,) = {sampler.dropped for sampler in samplers}
        if kind not in ROLLOVER + PARTIAL:
            assert max(got.values(), default=1) == 1
            assert got <= all_items(kind)
            drop = sum(length > 30 for length in LENGTHS) if "drop" in kind else 0
            total = N if "mixture" not in kind else sum(all_items(kind).values())
            pieces = sum(all_items(kind).values()) if "split" in kind else total
            left = max(pieces, total) - sum(got.values())
            assert left == dropped >= drop
            most = {"batch discard": 4 * world_size - 1}.get(kind, 4 * world_size + drop)
            assert left <= most


def left_in_mid_epoch(sampler: Any, epoch: int) -> None:
    next(iter(begun(sampler, epoch)))


def loaded(sampler: Any, kind: str, epoch: int) -> None:
    """Load a state from amid an epoch."""
    lived = KINDS[kind]()
    left_in_mid_epoch(lived, epoch)
    sampler.load_state_dict(saved(lived))


def loaded_and_begun(sampler: Any, kind: str) -> None:
    loaded(sampler, kind, 1)
    iter(begun(sampler, 1))  # which is the only one that goes on


def emptied(sampler: Any, kind: str) -> None:
    """What the batches are is the caller's."""
    for batch in begun(sampler, 1):
        if kind not in SINGLES:
            batch.clear()


HISTORIES: dict[str, Callable[[Any, str], Any]] = {
    "the same epoch": lambda sampler, kind: list(begun(sampler, 1)),
    "the one before": lambda sampler, kind: list(begun(sampler, 0)),
    "a later one": lambda sampler, kind: list(begun(sampler, 2)),
    "a part of it": lambda sampler, kind: left_in_mid_epoch(sampler, 1),
    "a part of another": lambda sampler, kind: left_in_mid_epoch(sampler, 0),
    "a state of another": lambda sampler, kind: loaded(sampler, kind, 0),
    "a state, and an iterator": loaded_and_begun,
    "batches that were changed": emptied,
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", REPEATABLE)
def test_an_epoch_follows_from_its_number_alone(kind, history):
    sampler = KINDS[kind]()
    HISTORIES[history](sampler, kind)
    assert list(begun(sampler, 1)) == list(begun(KINDS[kind](), 1))


def uneven() -> DynamicBatchSampler:
    """Return a sampler whose epochs have different numbers of batches."""
    lengths = [1 + 7 * n % 9 for n in range(40)]
    return DynamicBatchSampler(lengths, 13, shuffle=True, world_size=2)


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda: BatchSampler(uneven(), 1), 0),
        (lambda: MixtureSampler([uneven(), 20], [1, 99], 1, "last"), 1),
    ],
)
def test_the_length_after_a_resume_is_of_the_epoch_where_an_inner_one_is_to_begin(make, taken):
    lived, found = make(), set()
    for epoch in range(5):
        iterator = iter(begun(lived, epoch))
        assert len(list(islice(iterator, taken))) == taken
        fresh = make()
        fresh.load_state_dict(saved(lived))
        assert len(fresh) == len(lived) == taken + len(list(iterator))
        found.add(len(lived))
    assert len(found) > 1


@every_kind
def test_a_copy_begins_where_the_epoch_began_or_with_what_it_has_left(kind):
    sampler = KINDS[kind]()
    expected = list(KINDS[kind]())
    next(iter(sampler))
    assert list(pickle.loads(pickle.dumps(sampler))) == expected
    ended = KINDS[kind]()
    list(ended)
    copied = pickle.loads(pickle.dumps(ended))
    assert list(begun(copied, 1)) == list(begun(ended, 1))


def test_an_inner_epoch_without_a_batch_is_not_begun_once_more_after_a_resume():
    def make() -> Any:
        return MixtureSampler([BatchSampler(2, 3, last_batch="rollover"), 3], [1, 1], stop="last")

    lived, fresh = make(), make()
    fresh.load_state_dict(saved(lived))
    for epoch in range(3):
        assert list(begun(fresh, epoch)) == list(begun(lived, epoch))


def test_items_of_every_kind_are_left_for_the_next_epoch():
    items = [("a", 1), ["b", (2,)], {"path": "c"}, Piece(("d", 3), 0, 5), {"tuple": [2], "item": 1}]
    for at in range(5):
        lived = BatchSampler(items[at:] + items[:at], 4, last_batch="rollover")
        assert list(lived) == [lived.sampler[:4]]
        fresh = BatchSampler(items[at:] + items[:at], 4, last_batch="rollover")
        fresh.load_state_dict(saved(lived))
        for sampler in (begun(lived, 1), begun(fresh, 1)):
            first = next(iter(sampler))[0]
            assert (first, type(first)) == (sampler.sampler[4], type(sampler.sampler[4]))


class Cut(NamedTuple):
    name: str
    start: int


def test_named_tuples_are_left_with_their_names():
    """JSON alone has no names: it makes plain tuples of them."""
    items = [Cut("a", start) for start in range(5)]

    def second(state: Any) -> Any:
        sampler = BatchSampler(items, 2, last_batch="rollover")
        sampler.load_state_dict(state)
        return next(iter(begun(sampler, 1)))[0]

    lived = BatchSampler(items, 2, last_batch="rollover")
    list(lived)
    state = lived.state_dict()
    assert type(second(pickle.loads(pickle.dumps(state)))) is Cut
    assert type(second(json.loads(json.dumps(state)))) is tuple
    assert type(next(iter(begun(lived, 1)))[0]) is Cut


@every_kind
@variants("world_size", [3, 1])
def test_every_state_leads_to_the_rest_and_to_the_next_epochs(kind, world_size):
    ranks = {"rank": world_size - 1, "world_size": world_size}
    epochs: list[list[Any]] = []
    states: list[tuple[int, int, Any, Any]] = []
    lived = KINDS[kind](**ranks)

    def note(epoch: int, place: int) -> None:
        states.append((epoch, place, saved(lived), (lived.dropped, length_of(lived))))

    for epoch in range(3):
        begun(lived, epoch)
        note(epoch, 0)
        batches = iter(lived)
        note(epoch, 0)
        epochs.append([])
        for batch in batches:
            epochs[-1].append(batch)
            note(epoch, len(epochs[-1]))
        note(epoch + 1, 0)
    epochs.append(list(begun(lived, 3)))
    for epoch, place, state, counts in states:
        fresh = KINDS[kind](**ranks)
        fresh.load_state_dict(state)
        assert saved(fresh) == state
        assert (fresh.dropped, length_of(fresh)) == counts, (epoch, place)
        begun(fresh, epoch)
        expected = saved(fresh)
        batches = iter(fresh)
        assert saved(fresh) == expected
        assert list(batches) == epochs[epoch][place:], (epoch, place)
        for later in range(epoch + 1, 4):
            assert list(begun(fresh, later)) == epochs[later], (epoch, place, later)


def told() -> dict[str, Any]:
    """What a rank gives, in the middle of an epoch and to its end, of each kind."""
    found = {}
    for kind, make in KINDS.items():
        sampler = begun(make(rank=1, world_size=3), 2)
        iterator = iter(sampler)
        first = list(islice(iterator, 3))
        found[kind] = [first, saved(sampler), list(iterator), sampler.dropped]
    return found


def test_another_process_gives_the_same():
    """Ranks are processes, in each of which strings have hashes of their own."""
    program = "import test_sampler_rules as rules; rules.windows.WINDOW = 24; print(rules.told())"
    said = printed_by(program, env={"PYTHONHASHSEED": "7"})
    assert said == f"{told()}\n"


@pytest.mark.parametrize("kind", SHUFFLED)
def test_the_order_depends_on_seed_and_epoch_alone(kind):
    def batches(seed: int, epoch: int) -> list[Any]:
        return list(begun(KINDS[kind](seed=seed), epoch))

    every = [batches(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert every == [batches(seed, epoch) for seed in range(3) for epoch in range(3)]
    # Not the same batches in another order, nor the same order cut differently.
    assert len({tuple(items_of(kind, one)) for one in every}) == 9
    if kind not in SINGLES:
        assert len({frozenset(map(frozenset, one)) for one in every}) == 9


@pytest.mark.parametrize("kind", [kind for kind in SHUFFLED if kind in REPEATABLE])
def test_a_seed_that_is_set_anew_is_that_of_the_next_epoch(kind):
    sampler = KINDS[kind](seed=0)
    list(sampler)
    sampler.seed = 1
    assert list(sampler) == list(KINDS[kind](seed=1))


@pytest.mark.parametrize("kind", REPEATABLE)
@pytest.mark.parametrize("started", [False, True])
def test_an_iterator_keeps_its_epoch(kind, started):
    if "told" in kind and not started:
        return  # an inner generator begins with its first item
    expected = list(begun(KINDS[kind](), 1))
    sampler = begun(KINDS[kind](), 1)
    iterator = iter(sampler)
    found = [next(iterator)] if started else []
    sampler.set_epoch(2)
    assert found + list(iterator) == expected


def run_through(kind: str, worlds: Any, draw: Callable[[int], int], *, older: bool = False) -> None:
    """Go through an epoch with several world sizes; see that nothing is lost or doubled.

    Args:
        kind: of the sampler.
        worlds: the world sizes.
        draw: chooses a number of steps, up to a number.
        older: whether states are noted some steps before the end, as a loader's are.
    """
    got: Counter[Any] = Counter()
    state: Any = None

    def ranks(world_size: int) -> list[Any]:
        samplers = [KINDS[kind](rank=rank, world_size=world_size) for rank in range(world_size)]
        for sampler in samplers if state is not None else ():
            sampler._load(*state) if older else sampler.load_state_dict(state[0])
        return samplers

    for place, world_size in enumerate(worlds):
        fresh = ranks(world_size)
        before = 0 if state is None else state[0]["batches"] + state[2]
        foreseen = length_of(fresh[0])
        whole = [list(sampler) for sampler in fresh]
        count = len(whole[0])
        assert foreseen in (None, before + count)
        steps = count if place == len(worlds) - 1 else draw(count)
        noted = draw(steps) if older else steps
        samplers = ranks(world_size)
        for sampler, batches in zip(samplers, whole, strict=True):
            iterator = iter(sampler)
            taken = list(islice(iterator, noted))
            found = saved(sampler)
            taken += list(islice(iterator, steps - noted))
            assert taken == batches[:steps]
            got.update(items_of(kind, taken))
        state = found, 0, steps - noted
    if kind in PARTIAL:
        return
    assert max(got.values(), default=1) == 1
    assert got <= all_items(kind)
    lost = sum(all_items(kind).values()) - sum(got.values())
    assert lost <= sum(4 * world_size for world_size in worlds)


@pytest.mark.parametrize("kind", PLAIN)
@settings(deadline=None, max_examples=6)
@given(worlds=st.lists(st.integers(1, 8), min_size=2, max_size=4), data=st.data())
def test_other_world_sizes(kind, worlds, data):
    run_through(kind, worlds, lambda most: data.draw(st.integers(0, most)))


@pytest.mark.parametrize("kind", PLAIN)
def test_other_world_sizes_with_a_state_that_is_older(kind):
    rng = random.Random(kind)
    for worlds in ([2, 3], [3, 1, 2], [1, 2, 1, 3]):
        run_through(kind, worlds, lambda most: rng.randint(0, most), older=True)


@every_kind
def test_between_epochs_any_world_size_will_do(kind):
    sampler = KINDS[kind](world_size=2)
    list(sampler)
    state = saved(sampler)
    others = every_rank(KINDS[kind], 3)
    got: Counter[Any] = Counter()
    for sampler in others:
        sampler.load_state_dict(state)
        got.update(items_of(kind, begun(sampler, 1)))
    if kind not in PARTIAL and kind not in ROLLOVER:
        assert max(got.values()) == 1
        assert sum(got.values()) + others[0].dropped >= sum(all_items(kind).values()) - 12


# --- errors -----------------------------------------------------------------------------------


def parted(found: list[Any]) -> tuple[list[Any], list[str]]:
    """Return the batches, and the errors."""
    errors = [str(each) for each in found if isinstance(each, Exception)]
    return [each for each in found if not isinstance(each, Exception)], errors


BAD = {4, 5, 30, 60}
FAILING: dict[str, Any] = {
    "batch": lambda: BatchSampler(Raising(N, BAD), 4),
    "dynamic": lambda: DynamicBatchSampler(LENGTHS, max_total=60, sampler=Raising(N, BAD)),
    "dynamic lookup": lambda: DynamicBatchSampler(
        {n: LENGTHS[n] for n in range(N) if n not in BAD}, max_total=60, sampler=Lazily(range(N))
    ),
    "dynamic lengths": lambda: DynamicBatchSampler(
        Lazily([99 if n in BAD else 3 for n in range(N)]), max_total=60, shuffle=True
    ),
    "packed": lambda: PackedBatchSampler(
        Lazily([-1 if n in BAD else 3 for n in range(N)]), 40, shuffle=True
    ),
    "packed lookup": lambda: PackedBatchSampler(
        lambda n: "abc" if n in BAD else 3, 40, sampler=Told()
    ),
    "packed ragged": lambda: PackedBatchSampler(
        lambda n: [3] * n if n in BAD else 3, 40, sampler=Lazily(range(N))
    ),
    "dynamic cost": lambda: DynamicBatchSampler(
        Lazily([n if n in BAD else 3 for n in range(N)]), 400, cost=lambda n: {3: 1}[n]
    ),
    "mixture": lambda: MixtureSampler([Raising(N, BAD)], [1], 4),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_error_comes_once_and_every_state_around_it_leads_to_the_rest(kind):
    lived = FAILING[kind]()
    iterator, found, states = iter(lived), [], [saved(lived)]
    while more := outcomes(iterator, 1):
        found += more
        states.append(saved(lived))
    batches, errors = parted(found)
    assert len(errors) == len(set(errors)) == len(BAD)
    got = [item[1] if isinstance(item, tuple) else item for batch in batches for item in batch]
    assert sorted(got) == [n for n in range(N) if n not in BAD]
    raised = []
    for place, state in enumerate(states):
        fresh = FAILING[kind]()
        fresh.load_state_dict(state)
        rest, errors = parted(outcomes(iter(fresh)))
        assert rest == parted(found[place:])[0]
        raised.append(len(errors))
    assert raised == sorted(raised, reverse=True)
    assert raised[-1] == 0


class Busy(Told):
    """It cannot say one of its states, counted from 1, when it is asked first."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at = fails_at

    def state_dict(self) -> dict[str, int]:
        self.fails_at -= 1
        if not self.fails_at:
            raise OSError("busy")
        return super().state_dict()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("kind", [DynamicBatchSampler, PackedBatchSampler])
def test_a_state_that_is_not_there_at_first_costs_no_window(kind, fails_at):
    """Its error comes once, as any other; but the third is that of the end, which may have none."""
    undisturbed = kind(LENGTHS, 45, sampler=Told(), world_size=2)
    sampler = kind(LENGTHS, 45, sampler=Busy(fails_at), world_size=2)
    batches, errors = parted(outcomes(iter(sampler)))
    assert batches == list(undisturbed)
    assert errors == ([] if fails_at == 3 else ["busy"])
    assert sampler.dropped == undisturbed.dropped


class Spoilt(Told):
    """Some of its items raise, and it goes on behind them."""

    def __init__(self, n: int, bad: set[int]) -> None:
        super().__init__(n)
        self.bad = bad

    def __iter__(self) -> Iterator[int]:
        return map(self.checked, super().__iter__())

    def checked(self, item: int) -> int:
        if item in self.bad:
            raise OSError(f"item {item}")
        return item


FAILING_IN_LOADERS = FAILING | {
    "itself": lambda: Spoilt(4, {2}),
    "nothing but errors": lambda: BatchSampler(Raising(3, {0, 1, 2}), 2),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", FAILING_IN_LOADERS)
def test_after_a_resume_come_the_errors_that_were_still_to_come(kind, workers):
    """Also those before the first item, and where the workers have seen the end."""

    def loader() -> Loader:
        options = {"num_workers": workers, "executor": "thread", "prefetch_factor": 9}
        return Loader(repr, FAILING_IN_LOADERS[kind](), **options)

    with loader() as lived:
        batches, found, states = iter(lived), [], [lived.state_dict()]
        while more := outcomes(batches, 1):
            found += map(str, more)
            states.append(lived.state_dict())
    # Its own later states lead past what it has raised.
    for place, state in enumerate(states[:1] if kind == "itself" else states):
        with loader() as fresh:
            fresh.load_state_dict(state)
            assert list(map(str, outcomes(iter(fresh)))) == found[place:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchSampler(BatchSampler(Raising(4, {0, 1, 2, 3}), 2), 2),
        lambda: MixtureSampler([Spoilt(4, {3}), 3], [1, 1], 2),
    ],
)
def test_an_epoch_after_errors_that_a_state_is_amid(make):
    """Also where nothing but errors came behind the state."""
    lived, states = make(), []
    iterator = iter(begun(lived, 0))
    while len(states) < 9:
        states.append(saved(lived))
        with suppress(OSError, StopIteration):
            next(iterator)
    expected = outcomes(iter(begun(lived, 1)))
    for state in states:
        fresh = make()
        fresh.load_state_dict(state)
        outcomes(iter(begun(fresh, 0)))
        assert repr(outcomes(iter(begun(fresh, 1)))) == repr(expected)


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "make"), LIMITED)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loader", [False, True])
def test_a_limit_may_be_another_if_that_is_allowed(limit, make, world_size, loader):
    """In the same world size as in another: what was not given is dealt out anew."""

    def made(most: bool, **w: int) -> Any:
        sampler = make(most, **w)
        return Loader(list, sampler, num_workers=0) if loader else sampler

    lived = made(False)
    first = items_of("", islice(iter(lived), 2))
    state = saved(lived)
    message = rf"{limit} is .*, but the state is of {limit} .* allow=\['{limit}'\]"
    rest: list[Any] = []
    for rank in range(world_size):
        other = made(True, rank=rank, world_size=world_size)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        other.load_state_dict(state, allow=[limit])
        again = made(True, rank=rank, world_size=world_size)
        again.load_state_dict(saved(other))  # it says of which limit each leg was
        given = items_of("", other)
        assert items_of("", again) == given
        rest += given
    dropped = (other.sampler if loader else other).dropped
    assert len({*first, *rest}) == len(first) + len(rest) == N - dropped


@pytest.mark.parametrize("former", [{"world_size": 4}, {"batch_size": 6}])
@pytest.mark.parametrize("taken", [1, N])
def test_as_many_batches_can_be_left_out_as_there_are_once_they_are_dealt_anew(former, taken):
    """Also between epochs, of which the former may have had fewer."""
    with Loader(list, BatchSampler(N, **{"batch_size": 3, **former}), num_workers=0) as lived:
        assert list(islice(iter(lived), taken))
        state = lived.state_dict()
    with Loader(list, BatchSampler(N, 3), num_workers=0) as resumed:
        resumed.load_state_dict(state, allow="batch_size")
        rest = list(resumed)
        resumed.load_state_dict(state, allow="batch_size")
        resumed.skip(12)
        assert list(resumed) == rest[12:]


@pytest.mark.parametrize("loader", [False, True])
def test_what_is_no_limit_cannot_be_allowed(loader):
    sampler = DynamicBatchSampler(LENGTHS, 60)
    whose = Loader(list, sampler, num_workers=0) if loader else sampler
    with pytest.raises(ValueError, match=r"allow must be .*'max_total'.* or .*, got 'seed'"):
        whose.load_state_dict(whose.state_dict(), allow=["seed"])
    split = PackedBatchSampler(LENGTHS, 9, long="split")
    with pytest.raises(
        ValueError, match="capacity is 9, but the state is of capacity 8; give the dataset"
    ):
        split.load_state_dict(PackedBatchSampler(LENGTHS, 8, long="split").state_dict())
    other = Loader(list, range(4), num_workers=0)
    with pytest.raises(ValueError, match="allow is for a sampler of minloader's"):
        other.load_state_dict(other.state_dict(), allow="max_total")


@pytest.mark.parametrize(("former", "later"), [(30, 60), (60, 30), (15, 30)])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ["max_total", "max_padded"])
def test_what_is_too_long_may_be_other_samples_in_another_world(name, lazy, former, later):
    """What was given was planned with what was too long then, and is left out now as it was."""
    lengths = Lazily(LENGTHS[::-1]) if lazy else LENGTHS[::-1]

    def make(budget: int, **world: int) -> Any:
        options: Any = {name: budget, "long": "drop", "shuffle": True}
        return DynamicBatchSampler(lengths, **options, **world)

    given: list[Any] = []
    for rank in range(2):
        lived = make(former, rank=rank, world_size=2)
        given += items_of("", islice(iter(lived), 2))
    resumed = make(later)
    resumed.load_state_dict(saved(lived), allow=name)
    given += items_of("", resumed)
    too_long = {n for n in range(N) if LENGTHS[::-1][n] > later}
    assert len(set(given)) == len(given)
    assert set(range(N)) - set(given) <= too_long
    assert resumed.dropped == N - len(given)


def test_states_of_two_epochs_in_one_sampler():
    def state(epoch: int) -> Any:
        lived = DynamicBatchSampler(LENGTHS, 60, world_size=3)
        lived.set_epoch(epoch)
        deque(islice(iter(lived), len(lived) - 1), 0)
        return saved(lived)

    once, again = DynamicBatchSampler(LENGTHS, 60), DynamicBatchSampler(LENGTHS, 60)
    for epoch in range(8):
        once.load_state_dict(state(epoch))
        again.load_state_dict(state(0))
        list(again)
        again.load_state_dict(state(epoch))
        assert list(again) == list(once)


def test_no_sample_is_dropped_in_every_epoch():
    lengths = [100] + [10] * 999
    for options in ({"max_padded": 110}, {"max_total": 110}, {"max_total": 110, "shuffle": True}):
        samplers = [
            DynamicBatchSampler(lengths, **options, rank=rank, world_size=2) for rank in range(2)
        ]
        came: Counter[int] = Counter()
        for epoch in range(8):
            for sampler in samplers:
                came.update(items_of("", begun(sampler, epoch)))
        assert min(came[n] for n in range(1000)) >= 4
    few = [PackedBatchSampler([1] * 5, 9, rank=rank, world_size=3) for rank in range(3)]
    came = Counter(
        item for epoch in range(30) for each in few for item in items_of("", begun(each, epoch))
    )
    assert len(came) == 5


# --- shares of lengths ------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    growth=st.sampled_from([1.0, 1.1, 1.5]),
    unit=st.sampled_from([1, 0.125]),
)
def test_every_part_is_within_one_longest_sample_of_its_share(weights, seed, growth, unit):
    rng = random.Random(seed)
    lengths: dict[Any, float] = {}

    def length_of(item: Any) -> float:
        top = int(20 * growth ** min(len(lengths), 30))
        return lengths.setdefault(item, rng.randint(1, top) * unit)

    sampler = MixtureSampler([10**6] * len(weights), weights, lengths=length_of)
    given, total, longest = [0.0] * len(weights), 0.0, 0.0
    for part, index in islice(sampler, 150):
        length = lengths[part, index]
        given[part] += length
        total, longest = total + length, max(longest, length)
        for weight, amount in zip(weights, given, strict=True):
            assert abs(amount - total * weight / sum(weights)) <= longest * 1.000001


# --- ranks come and go ------------------------------------------------------------------------


class Augmented:
    """Gives the index of a sample, and what it was augmented with."""

    def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, float(info.sample_rng.random())


AUGMENTED = ["batch shuffled", "dynamic padded", "packed split", "mixture"]
SHORT = ["mixture of one twice"]  # its epoch ends within these steps
AUGMENTED += [kind for kind in PLAIN if kind not in PARTIAL + SINGLES + SHORT + AUGMENTED]


@variants("kind", AUGMENTED, quick=4)
def test_8_ranks_then_6_then_3_augment_every_sample_as_undisturbed(monkeypatch, kind):
    """Through loaders, stopped in mid-epoch: every sample once, each augmented alike."""
    monkeypatch.setattr(our_samplers, "N", 4 * N)
    monkeypatch.setattr(our_samplers, "LENGTHS", LENGTHS * 4)
    monkeypatch.setattr(our_samplers, "PARTS", [80, 120, 44])
    monkeypatch.setattr(our_samplers, "ITEMS", dict(enumerate(LENGTHS * 4)))
    monkeypatch.setattr(windows, "WINDOW", 96)

    def loader(rank: int, world_size: int) -> Loader:
        sampler = KINDS[kind](rank=rank, world_size=world_size)
        return Loader(Augmented(), sampler, collate_fn=list, num_workers=0)

    with loader(0, 1) as alone:
        expected = dict(sample for batch in alone for sample in batch)
    got: list[Any] = []
    state: Any = None
    for world_size, steps in (8, 1), (6, 1), (3, 99):
        states = []
        for rank in range(world_size):
            with loader(rank, world_size) as each:
                if state is not None:
                    each.load_state_dict(state)
                got += [sample for batch in islice(iter(each), steps) for sample in batch]
                states.append(json.dumps(each.state_dict()))
        state = json.loads(states[-1])  # of any rank
        assert state["epoch"] == (world_size == 3)  # in mid-epoch
    assert len(dict(got)) == len(got)
    assert dict(got).items() <= expected.items()
    assert N - 40 <= len(got) <= len(expected) <= len(got) + 4 * 8


@pytest.mark.parametrize("kind", ["batch shuffled", "dynamic lazy", "packed told", "mixture"])
def test_other_ranks_go_on_with_a_later_epoch(kind):
    """Its first batches may have the state of the end of the epoch before."""

    def loader(rank: int, world_size: int) -> Loader:
        return Loader(repr, KINDS[kind](rank=rank, world_size=world_size), num_workers=0)

    for steps in range(1, 4):
        got: list[str] = []
        for rank in range(2):
            with loader(rank, 2) as each:
                list(each)
                got += islice(iter(each), steps)
                state = each.state_dict()
        for rank in range(3):
            with loader(rank, 3) as each:
                each.load_state_dict(state)
                got += each
        items = items_of(kind, map(eval, got))
        assert len(items) == len(set(items)) >= N - 4 * 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_for_other_ranks_is_no_matter_of_how_far_was_read(kind):
    """Also after the last batch, when workers have seen the end of the epoch."""
    steps = len(list(begun(KINDS[kind](world_size=8), 0)))
    for taken in {1, steps - 1, steps}:
        found = []
        for workers in 0, 2:
            options = {"num_workers": workers, "executor": "thread", "prefetch_factor": 4}
            with Loader(repr, KINDS[kind](world_size=8), **options) as loader:
                batches = iter(loader)
                assert all(next(batches) for _ in range(taken))
                state = loader.state_dict()
            with Loader(repr, KINDS[kind](), num_workers=0) as loader:
                loader.load_state_dict(state)
                found.append(list(loader))
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["batch shuffled", "dynamic shuffled", "packed", "mixture"])
def test_batches_out_of_turn_cannot_be_dealt_anew(kind):
    """Those that came before their turn are others in each rank. All come after the refusal."""
    gate, sampler = threading.Event(), KINDS[kind](world_size=2)
    first, second = map(repr, islice(KINDS[kind](world_size=2), 2))

    def slow_at_second(item: Any) -> str:
        if repr(item) == second:
            gate.wait(60)
        return repr(item)

    options = {"num_workers": 2, "executor": "thread", "in_order": False}
    with Loader(slow_at_second, sampler, **options) as loader:
        batches = iter(loader)
        assert next(batches) == first
        assert next(batches) != second
        state = loader.state_dict()
        gate.set()
    for world_size in (2, 3, 1):
        with Loader(repr, KINDS[kind](world_size=world_size), num_workers=0) as other:
            if world_size == 2:
                other.load_state_dict(state)
                assert next(iter(other)) == second
                continue
            with pytest.raises(ValueError, match=r"delivered before their turn .*in_order=False"):
                other.load_state_dict(state)
            assert list(other) == list(map(repr, KINDS[kind](world_size=world_size)))


SHARED = ["batch shuffled", "batch rollover", "dynamic shuffled", "packed split", "mixture"]


@pytest.mark.parametrize("kind", [*SHARED, "mixture rollover"])
def test_lengths_are_of_the_loaders_epoch_whoever_else_iterates_its_sampler(kind):
    with Loader(repr, KINDS[kind](), num_workers=0) as alone:
        numbers = [len(list(alone)) for _ in range(4)]
    sampler = KINDS[kind]()
    with Loader(repr, sampler, num_workers=0) as lived:
        for number in numbers:
            next(iter(sampler))
            assert len(lived) == number
            for _ in lived:
                list(sampler)
                assert (len(lived), lived.state_dict()["length"]) == (number, number)


def test_the_end_of_an_epoch_that_comes_once_more_can_be_skipped_to():
    """It has another length then: it begins with what rollover has left."""
    with Loader(repr, BatchSampler(50, 3, last_batch="rollover"), num_workers=0) as loader:
        assert len(list(loader)) == 16
        loader.set_epoch(0)
        loader.skip(17)
        assert list(loader) == []


ASKED: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 3},
    "shuffled": {"batch_size": 3, "shuffle": True},
    "singles": {"batch_size": None, "shuffle": True},
    "discard": {"batch_size": 2, "last_batch": "discard"},
    "ranked": {"batch_size": 2, "shuffle": True, "rank": 1, "world_size": 2},
}
ASKED_BY: dict[str, Callable[[Any], Any]] = {
    "inline": partial(Loader, repr, num_workers=0),
    "threads": partial(Loader, repr, num_workers=2, executor="thread"),
}


def epoch_of(kind: str, number: int, n: int) -> list[str]:
    return list(map(repr, begun(BatchSampler(n, **ASKED[kind]), number)))


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("way", ASKED_BY)
@pytest.mark.parametrize("kind", ASKED)
def test_a_number_that_is_asked_is_kept_for_an_epoch(kind, way, taken):
    """Also by its states, of which no task of several batches has one of its own."""
    numbers = [23, 41]
    data = list(range(numbers[0]))
    epochs = [epoch_of(kind, number, n) for number, n in enumerate(numbers)]

    def make() -> Any:
        return ASKED_BY[way](BatchSampler(lambda: len(data), **ASKED[kind]))

    with make() as lived:
        assert len(lived) == len(epochs[0])
        iterator = iter(lived)
        given = list(islice(iterator, taken))
        state = json.dumps(lived.state_dict())
        data += range(numbers[0], numbers[1])
        assert len(lived) == len(epochs[0])
        other = iter(lived)  # which begins now, beside the first
        assert next(other) == epochs[1][0]
        later = json.dumps(lived.state_dict())
        assert [*given, *iterator] == epochs[0]
        assert list(other) == epochs[1][1:]
        between = json.dumps(lived.state_dict())
        for number, length in enumerate([numbers[1], 50, 20], 2):
            data[:] = range(length)
            expected = epoch_of(kind, number, length)
            assert len(lived) == len(expected)
            assert list(lived) == expected
    data[:] = range(numbers[1])
    for text, rest in (state, epochs[0][taken:]), (later, epochs[1][1:]):
        with make() as fresh:
            fresh.load_state_dict(json.loads(text))
            if taken or text is later:
                assert list(fresh) == rest
                continue
            # Inline, nobody had begun the sampler's epoch yet.
            assert list(fresh) == (rest if way == "threads" else epoch_of(kind, 0, numbers[1]))
    data[:] = range(40)
    with make() as fresh:
        with pytest.raises(ValueError, match="n, the number of samples, is 40, but the state is"):
            fresh.load_state_dict(json.loads(later))
        fresh.load_state_dict(json.loads(between))
        assert list(fresh) == epoch_of(kind, 2, 40)


# --- nested at random -------------------------------------------------------------------------


def nested(rng: random.Random, depth: int) -> Any:
    """Return a function of rank and world size that makes a sampler over samplers."""
    options = {"shuffle": rng.random() < 0.5, "seed": rng.randint(0, 3)}
    inner: Callable[[], Any] = Told if rng.random() < 0.5 else (lambda: Lazily(range(N)))
    if depth:
        below = nested(rng, depth - 1)
        inner = lambda: Singles(below())  # noqa: E731
    choice = rng.choice(["batch", "rollover", "dynamic", "packed", "mixture"])
    if choice == "mixture":
        return lambda **w: MixtureSampler([inner(), 9], [3, 1], 3, "last", **options, **w)
    if choice == "dynamic":
        return lambda **w: DynamicBatchSampler(length, 60, sampler=inner(), **options, **w)
    if choice == "packed":
        return lambda **w: PackedBatchSampler(length, 60, 2, sampler=inner(), **options, **w)
    options["last_batch"] = "rollover" if choice == "rollover" else "keep"
    if not depth and options.pop("shuffle"):
        return lambda **w: BatchSampler(N, 3, True, **options, **w)
    options.pop("shuffle", None)
    return lambda **w: BatchSampler(inner(), 3, **options, **w)


def length(item: Any) -> int:
    return 1 + hash(str(item).count("1")) % 7


class Singles:
    """The items of the batches of a sampler, one by one, with a state: a user's own wrapper."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.rest = sampler, []
        self.set_epoch = sampler.set_epoch

    def state_dict(self) -> Any:
        return {"inner": self.sampler.state_dict(), "rest": [repr(item) for item in self.rest]}

    def load_state_dict(self, state: Any) -> None:
        self.sampler.load_state_dict(state["inner"])
        self.rest = [eval(item, {"Piece": Piece}) for item in state["rest"]]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.sampler)
        while True:
            if not self.rest:
                self.rest = list(next(batches, []))
            if not self.rest:
                return
            yield self.rest.pop(0)


@variants("seed", range(40), quick=12)
def test_every_state_of_nested_samplers(seed):
    rng = random.Random(seed)
    make = nested(rng, rng.randint(1, 2))
    lived = make()
    list(lived)
    begun(lived, 1)
    iterator, batches, states = iter(lived), [], [saved(lived)]
    for batch in iterator:
        batches.append(batch)
        states.append(saved(lived))
    ended, after = saved(lived), list(begun(lived, 2))
    for place, state in enumerate(states):
        fresh = make()
        fresh.load_state_dict(state)
        assert list(begun(fresh, 1)) == batches[place:]
        assert list(begun(fresh, 2)) == after
    fresh = make()
    fresh.load_state_dict(ended)
    assert list(begun(fresh, 2)) == after
