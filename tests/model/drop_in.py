"""Random programs with ``minloader.torch.DataLoader``, in loops that call ``set_epoch``.

What an epoch gives follows from where torch's generators are as it begins, or were when a state
fixed that, and from the epoch that the loop has set: torch's own loader says what it is.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from interrupts import OURS, Within, interrupted
from kinds import Told, ToldWithState
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler
from torch_helpers import (
    Drawing,
    DrawingStream,
    Eager,
    EagerBatches,
    InPlace,
    Lazy,
    LazyWithState,
    Nested,
    NestedWithState,
    from_numpy,
    from_torch,
)

from minloader import BatchSampler, DynamicBatchSampler, MixtureSampler, prefetch
from minloader.torch import DataLoader

from .found import COMES
from .machine import break_in, counts, failures
from .programs import Break

Arguments = dict[str, Any]


def ours(make: Callable[[int], Any]) -> Callable[..., Arguments]:
    return lambda n, generator: {"batch_sampler": make(n)}


def one_by_one(make: Callable[[int], Any]) -> Callable[..., Arguments]:
    return lambda n, generator: {"sampler": make(n), "batch_size": 2}


class ToldIterator:
    """A sampler with epochs that is its own iterator, and has a state, as lhotse's."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = self.at = 0
        self.goes_on = False

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.goes_on = False

    def __iter__(self) -> ToldIterator:
        self.at = self.at if self.goes_on else 0
        self.goes_on = False
        return self

    def __next__(self) -> list[int]:
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return [(self.at + 2 * self.epoch) % self.n, self.epoch % self.n]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self.at = state["at"]
        self.goes_on = True


def nested(n: int, outer: str, inner: str, told: str) -> Nested:
    return Nested(Nested(n, inner, "inner" in told), outer, "outer" in told)


def tell(loader: Any, epoch: int) -> None:
    """Tells the epoch to those samplers that the loop tells, or the stream."""
    samplers = loader.batch_sampler, loader.sampler
    found = next((each for each in samplers if isinstance(each, Nested)), None)
    if found is not None:
        found.tell(epoch)
    elif isinstance(loader, DataLoader):
        loader.set_epoch(epoch)
    else:
        for sampler in samplers:
            getattr(sampler, "set_epoch", int)(epoch)


def times_told(loader: Any) -> list[int]:
    found = [each for each in (loader.batch_sampler, loader.sampler) if isinstance(each, Nested)]
    return [each.times_told for outer in found for each in outer.all()]


Generators = tuple[torch.Tensor, Any, Any]
"""States of the global generators: torch's, that of ``random``, and numpy's."""


def global_generators() -> Generators:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_global_generators(states: Generators) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def moved(former: Generators, now: Generators) -> list[bool]:
    """Which of the generators are elsewhere."""
    return [plain_state(a) != plain_state(b) for a, b in zip(former, now, strict=True)]


def plain_state(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return [part.tobytes() if hasattr(part, "tobytes") else part for part in state]


KINDS: dict[str, Callable[[int, torch.Generator], Arguments]] = {
    "shuffle": lambda n, generator: {"shuffle": True, "batch_size": 3},
    "own generator": lambda n, generator: {
        "shuffle": True,
        "batch_size": 3,
        "generator": generator,
    },
    "sampler's generator": lambda n, generator: {
        "sampler": RandomSampler(range(n), replacement=True, generator=generator),
        "batch_size": 2,
    },
    "weighted": one_by_one(lambda n: WeightedRandomSampler([1.0] * n, n)),
    "eager": one_by_one(Eager),
    "eager batches": ours(EagerBatches),
    "list": one_by_one(lambda n: list(range(n))),
    "distributed": one_by_one(lambda n: DistributedSampler(range(n), 2, 1)),
    "told": one_by_one(Told),
    "told with state": one_by_one(ToldWithState),
    "shuffled": ours(lambda n: BatchSampler(n, 2, shuffle=True)),
    "shuffled one by one": one_by_one(lambda n: BatchSampler(n, None, shuffle=True)),
    "ours over torch's": ours(lambda n: BatchSampler(RandomSampler(range(n)), 2)),
    "ours over ours over torch's": lambda n, generator: {
        "batch_sampler": BatchSampler(
            BatchSampler(RandomSampler(range(n), generator=generator), None), 2
        )
    },
    "budget over torch's": ours(
        lambda n: DynamicBatchSampler(
            lambda index: 1 + index % 3, 4, sampler=RandomSampler(range(n)), shuffle=True
        )
    ),
    "own iterator": ours(lambda n: ToldIterator(n)),
    "rolling": ours(lambda n: BatchSampler(n, 3, shuffle=True, last_batch="rollover")),
    "asked": ours(lambda n: BatchSampler(lambda: n, 2, shuffle=True)),
    "dynamic": ours(
        lambda n: DynamicBatchSampler([1 + k % 3 for k in range(n)], max_total=4, shuffle=True)
    ),
    "mixture": ours(
        lambda n: MixtureSampler(
            [BatchSampler(n, None, shuffle=True), 1 + n // 2], [2, 1], 2, stop="last"
        )
    ),
    "drawn as it goes": ours(lambda n: Lazy(n, from_torch)),
    "drawn as it goes, random": ours(lambda n: Lazy(n, random.randrange)),
    "drawn as it goes, numpy": ours(lambda n: Lazy(n, from_numpy)),
    "drawn as it goes, with state": ours(lambda n: LazyWithState(n, from_torch)),
    "drawn as it goes, random, with state": ours(lambda n: LazyWithState(n, random.randrange)),
    "shuffled by random": ours(lambda n: InPlace(n, random.shuffle)),
    "shuffled by numpy": ours(lambda n: InPlace(n, np.random.shuffle)),
    "nested, the inner told": ours(lambda n: nested(n, "epoch", "epoch", "inner")),
    "nested, the outer told": ours(lambda n: nested(n, "_epoch", "epoch", "outer")),
    "nested, both told": ours(lambda n: nested(n, "epoch", "_epoch", "outer and inner")),
    "nested, none told": ours(lambda n: nested(n, "_epoch", "_epoch", "")),
    "nested, hidden": ours(lambda n: nested(n, "pass_number", "", "outer and inner")),
    "nested, hidden, the outer told": ours(lambda n: nested(n, "", "epoch", "outer")),
    "nested, hidden, the inner told": ours(lambda n: nested(n, "epoch", "round", "inner")),
    "nested, with state": one_by_one(lambda n: NestedWithState(n, "", True)),
    "nested, with state, inner": ours(
        lambda n: Nested(NestedWithState(n, "", True), "_epoch", True)
    ),
    "stream": lambda n, generator: {"dataset": DrawingStream(n, False), "batch_size": 2},
    "stream with state": lambda n, generator: {"dataset": DrawingStream(n, True), "batch_size": 2},
    "stream, _epoch": lambda n, generator: {
        "dataset": DrawingStream(n, False, "_epoch"),
        "batch_size": 2,
    },
    "stream with state, _epoch": lambda n, generator: {
        "dataset": DrawingStream(n, True, "_epoch"),
        "batch_size": 2,
    },
    "stream with state, hidden": lambda n, generator: {
        "dataset": DrawingStream(n, True, "round"),
        "batch_size": 2,
    },
    "stream, hidden": lambda n, generator: {
        "dataset": DrawingStream(n, False, "round"),
        "batch_size": 2,
    },
}


@dataclass
class Fixed:
    """Where the generators were, and what torch's loader would have drawn, as an epoch begins."""

    shared: Generators
    own: torch.Tensor
    seeded: bool
    twice: bool


@dataclass
class Place:
    """Where a consumer is.

    Attributes:
        number: of the epoch, counted by the loader.
        told: the epoch that the loop has set.
        chain: epochs that came to their end before, without another that was left.
        rest: what is to come, by place in the epoch; None: the epoch has not begun.
        fixed: what the order follows from, when the epoch has begun, or a state has fixed that.
        behind: the global generators as it began, and behind each item, as torch's loader without
            workers has them.
        skipped: how many of its first batches are left out, if it has not begun.
    """

    number: int = 0
    told: int = 0
    chain: tuple[int, ...] = ()
    rest: dict[int, Any] | None = None
    fixed: Fixed | None = None
    behind: list[Generators] = field(default_factory=list)
    skipped: int = 0


@dataclass
class Saved:
    """A checkpoint: the loader's state, what the script saves beside it, and where that is."""

    state: Any
    shared: Generators
    place: Place


@dataclass
class DropIn:
    """A program, of one step after the other.

    Args:
        kind: of sampler or stream, by name.
        n: indices or samples.
        num_workers: of the loader.
        persistent: whether workers keep the dataset.
    """

    kind: str
    n: int
    num_workers: int
    persistent: bool
    steps: list[str] = field(default_factory=list)
    seed: int = 100

    def __post_init__(self) -> None:
        self.steps.append(f"{self.kind}, n={self.n}, {self.num_workers}, {self.persistent}")
        self.shards = max(1, self.num_workers)
        self.place = Place()
        self.draws: dict[Any, Any] = {}
        self.saved: list[Saved] = []
        self.batches: Any = None
        self.told = 0  # the epoch that the loop has set last
        self.entered = False  # whether the first next was called since
        # Whether Ctrl-C or other draws may have left the script's generators anywhere.
        self.is_disturbed = False
        self.left = False  # whether the epoch of the place was; states are still of that
        self.loader = self.make()

    @property
    def is_stream(self) -> bool:
        return "stream" in self.kind

    @property
    def is_hidden_stream(self) -> bool:
        return self.is_stream and "hidden" in self.kind

    @property
    def draws_as_it_goes(self) -> bool:
        return "drawn as it goes" in self.kind

    @property
    def must_be_told(self) -> bool:
        """Whether its loop tells it again, as with torch: its number is nowhere to be seen.

        That of an inner sampler may be in its state, but behind an epoch that was left there is
        none that begins the next one.
        """
        is_in_state = "with state, inner" in self.kind
        is_behind_left = self.place.number > 0 and not self.place.chain
        return "hidden" in self.kind or (is_in_state and is_behind_left)

    def arguments(self, generator: torch.Generator) -> Arguments:
        return {"dataset": Drawing(self.n), "collate_fn": list} | KINDS[self.kind](
            self.n, generator
        )

    def make(self) -> DataLoader[Any]:
        self.generator = torch.Generator().manual_seed(5)
        # Workers that stay do not hear of a number that nobody sees, as with torch.
        persistent = self.persistent and self.num_workers > 0 and not self.is_hidden_stream
        given = self.arguments(self.generator)
        return DataLoader(**given, num_workers=self.num_workers, persistent_workers=persistent)

    def right(self, place: Place) -> list[Any]:
        """What torch gives in an epoch that begins there."""
        generator = torch.Generator()
        fixed = place.fixed
        assert fixed is not None
        given = self.arguments(generator)
        if self.is_stream:
            numbers = [range(k, self.n, self.shards) for k in range(self.shards)]
            cut = [[list(part[i : i + 2]) for i in range(0, len(part), 2)] for part in numbers]
            turns = itertools.chain(*itertools.zip_longest(*cut))
            return [[1000 * place.told + k for k in batch] for batch in turns if batch]
        theirs = TorchLoader(**given)
        script = global_generators()
        found: list[Any] = []
        for epoch in (*place.chain, place.told):
            tell(theirs, epoch)
            set_global_generators(fixed.shared)
            generator.set_state(fixed.own)
            begun = iter(theirs.batch_sampler)
            if fixed.seeded:
                torch.empty((), dtype=torch.int64).random_(generator=given.get("generator"))
            if fixed.twice and "with state" not in self.kind:
                begun = iter(theirs.batch_sampler)
            found, place.behind = [], [global_generators()]
            for item in begun:
                found.append(list(item))
                place.behind.append(global_generators())
        set_global_generators(script)
        return found

    # --- the loop

    def begin(self, epoch: int | None) -> None:
        """Begins an epoch, or goes on with the state's; the loop sets it, if it has a number."""
        self.steps.append(f"begin, set_epoch({epoch})")
        if epoch is not None:
            tell(self.loader, epoch)
            self.told = epoch
            if not self.left:
                self.place.told = epoch
        self.batches, self.entered = iter(self.loader), False

    def prefetch(self, depth: int) -> None:
        self.steps.append(f"prefetch, depth={depth}")
        self.batches = prefetch(self.loader, same, depth)
        self.take(1)

    def fix(self) -> None:
        if self.place.fixed is None:
            persists = self.loader.persistent_workers and self.place.number > 0
            self.place.fixed = Fixed(
                shared=global_generators(),
                own=self.generator.get_state(),
                seeded=not persists,
                twice=self.num_workers > 0 and not persists,
            )

    def enter(self) -> None:
        """Does what the first ``next`` does."""
        self.entered = True
        self.go_on()
        place = self.place
        if place.rest is None:
            self.fix()
            place.rest = dict([*enumerate(self.right(place))][place.skipped :])

    def go_on(self) -> None:
        """Goes to the next epoch, if the present one was left."""
        if self.left:
            self.place = Place(self.place.number + 1, self.told)
            self.left = False

    def skip(self, count: int) -> None:
        self.steps.append(f"skip {count}")
        before = torch.get_rng_state(), self.generator.get_state()
        refused = ""
        try:
            self.loader.skip(count)
        except (TypeError, RuntimeError) as error:
            refused = str(error)
        if refused or self.is_stream:
            assert ("the dataset is a stream" if self.is_stream else "while prefetch") in refused
            return
        assert torch.equal(torch.get_rng_state(), before[0])
        if "ours over ours" not in self.kind:  # which is drawn from as it is read
            assert torch.equal(self.generator.get_state(), before[1])
        self.go_on()
        place = self.place
        if place.rest is None:
            place.skipped += count
        else:
            place.rest = dict([*place.rest.items()][count:])

    def take(self, count: int, breaks: Sequence[Break] = ()) -> bool:
        """Takes batches; says whether what was to break into the first ``next`` has come.

        Args:
            count: how many.
            breaks: what breaks in; the second in the ``next`` behind that of the first.
        """
        self.steps.append(f"take {count}, {', '.join(map(str, breaks))}")
        is_begun = self.entered
        told = times_told(self.loader)
        self.enter()
        reached = False
        for _ in range(count):
            before = global_generators()
            was_interrupted = True
            for each in breaks:
                outcome = interrupted(self.next, each.place, each.within, each.raises)
                reached, was_interrupted = outcome.reached, outcome.interrupted
                assert reached == was_interrupted, f"swallowed: {outcome.where}"
                # The generators may be behind until the batch after the next is asked for.
                is_begun &= not (was_interrupted and self.draws_as_it_goes)
                self.is_disturbed |= was_interrupted
                if not was_interrupted:
                    break
            batch = self.next() if was_interrupted else outcome.value
            breaks = ()
            if batch is END:
                self.end()
                break
            ordinal = self.given(batch)
            if is_begun:
                self.check_generators(before, ordinal)
            is_begun = True
        assert times_told(self.loader) == told, "a sampler was told an epoch"
        return reached

    def next(self) -> Any:
        return next(self.batches, END)

    def check_generators(self, before: Generators, ordinal: int) -> None:
        """They are drawn from by the sampler alone, and only if nobody else has drawn since."""
        if self.draws_as_it_goes and self.is_disturbed:
            return
        expected, behind = before, self.place.behind
        if self.draws_as_it_goes:  # batches that were left out count, too
            elsewhere = [moved(each, before) for each in behind[: ordinal + 1]]
            is_there = [not all(each) for each in zip(*elsewhere, strict=True)]
            parts = zip(is_there, before, behind[ordinal + 1], strict=True)
            torchs, randoms, numpys = (new if is_in else old for is_in, old, new in parts)
            expected = torchs, randoms, numpys
        now = global_generators()
        # Behind what was left out they may be behind.
        is_just_there = self.draws_as_it_goes and not all(moved(behind[ordinal], before))
        stays = not any(moved(before, now)) and not is_just_there
        assert stays or not any(moved(expected, now)), "a generator is elsewhere"

    def given(self, batch: list[Any]) -> int:
        place = self.place
        assert place.rest, f"{batch}, but nothing is to come"
        ordinal = min(place.rest)
        item = place.rest.pop(ordinal)
        found = [plain(index) for index, _ in batch]
        assert found == [plain(each) for each in item], f"{found} instead of {item}"
        drawn = [draw for _, draw in batch]
        known = self.draws.setdefault((place.number, ordinal, str(item), self.shards), drawn)
        assert known == drawn, f"{item} has drawn {drawn}, but before {known}"
        return ordinal

    def end(self) -> None:
        place = self.place
        assert not place.rest, f"the end, but {place.rest} are to come"
        chain = (*place.chain, place.told)
        self.place = Place(place.number + 1, place.told, chain)
        self.batches = None

    def leave(self) -> None:
        self.steps.append("leave")
        self.left |= self.entered  # iter alone begins nothing
        self.batches = None

    # --- states

    def note(self) -> None:
        self.steps.append("state")
        before, own = global_generators(), self.generator.get_state()
        told = times_told(self.loader)
        state = json.loads(json.dumps(self.loader.state_dict()))
        assert not any(moved(before, global_generators()))
        assert torch.equal(self.generator.get_state(), own)
        assert times_told(self.loader) == told
        self.fix()
        self.saved.append(Saved(state, before, copy.deepcopy(self.place)))

    def load(self, which: int, num_workers: int | None, restores: bool) -> None:
        """Goes on from a state, in a new loader if a number of workers is given."""
        self.steps.append(f"load state {which}, workers {num_workers}, restores {restores}")
        saved = self.saved[which]
        self.batches = None
        if num_workers is not None:
            self.loader.close()
            self.num_workers = num_workers
            self.loader = self.make()
        self.loader.load_state_dict(copy.deepcopy(saved.state))
        self.place, self.left = copy.deepcopy(saved.place), False
        # Nobody can tell such a state from one that was just seeded.
        generator = torch.Generator()
        seed = generator.set_state(saved.shared[0]).initial_seed()
        is_fresh = torch.equal(generator.manual_seed(seed).get_state(), saved.shared[0])
        if restores and not is_fresh:
            set_global_generators(saved.shared)

    def draw(self) -> None:
        self.steps.append("torch.rand")
        self.is_disturbed = True
        torch.rand(1)

    def reseed(self, own: bool) -> None:
        """Seeds all global generators, or that which the loader was given."""
        self.steps.append(f"reseed, own={own}")
        self.seed += 1
        if own:
            self.generator.manual_seed(self.seed)
        else:
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed)
        if self.place.rest is None and not self.left and (not own or self.has_own):
            self.place.fixed = None

    @property
    def has_own(self) -> bool:
        return self.kind in ("own generator", "sampler's generator", "ours over ours over torch's")

    def close(self) -> None:
        self.batches = None
        self.loader.close()


END = object()
"""What ``next`` gives in place of a batch at the end."""


def same(batch: Any) -> Any:
    return batch


def plain(index: Any) -> Any:
    return list(index) if isinstance(index, tuple) else index


STEPS: dict[str, Callable[..., Any]] = {
    "begin": lambda program, epoch: program.begin(epoch),
    "go on": lambda program: program.begin(program.place.told if program.must_be_told else None),
    "prefetch": lambda program, depth: program.prefetch(depth),
    "take": lambda program, count: program.take(count),
    "take each": lambda program: take_each(program),
    "skip": lambda program, count: program.skip(count),
    "finish": lambda program: program.batches is not None and program.take(100),
    "leave": lambda program: program.leave(),
    "note": lambda program: program.note(),
    "load": lambda program, which: program.load(which, None, True),
    "load, not restored": lambda program, which: program.load(which, None, False),
    "move": lambda program, which: program.load(which, program.num_workers, True),
    "torch.rand": lambda program: program.draw(),
    "reseed": lambda program: program.reseed(own=False),
    "reseed own": lambda program: program.reseed(own=True),
    "verify": lambda program: verify(program),
}
"""What may be done, and how; see ``found.py``."""

FOUND: dict[str, str] = {
    "the loop": "begin 0; finish; begin 1; finish; torch.rand; begin 2; finish",
    "states": "note; begin 0; take each; begin 1; take each; verify",
    "states of prefetch": "note; begin 0; prefetch 2; take each; begin 1; prefetch 1; take each; "
    "verify",
    "left": "begin 0; take 1; leave; begin 1; take 2; leave; note; begin 2; finish; begin 3; "
    "take each; verify",
    "left before it began": "begin 0; leave; begin 0; finish; note; begin 1; leave; begin 1; "
    "finish; verify",
    "a state before an epoch": "note; torch.rand; note; begin 0; finish; begin 1; finish; load 0; "
    "torch.rand; begin 0; finish; begin 1; finish",
    "looked at between epochs": "begin 0; finish; note; note; begin 1; finish; note; begin 2; "
    "finish",
    "another epoch than that of a state": "note; begin 2; take 1; note; finish; load 0; begin 2; "
    "finish; move 1; begin 2; finish; begin 3; finish",
    "not restored": "begin 0; take 1; note; finish; begin 1; finish; load, not restored 0; go on; "
    "finish",
    "a state before anything, not restored": "note; torch.rand; load, not restored 0; begin 0; "
    "finish",
    "seeded before each epoch": "note; reseed; begin 0; take 1; note; finish; note; reseed; "
    "begin 1; finish; note; reseed own; begin 2; take each; load 1; reseed; begin 0; finish; "
    "move 2; reseed; begin 1; finish; load 3; reseed own; torch.rand; begin 2; finish",
    "noted before its epoch began": "note; reseed; load 0; torch.rand; note; reseed; move 1; "
    "begin 0; finish; verify",
    "left out": "skip 1; torch.rand; begin 0; take 1; note; skip 1; note; take each; skip 2; note; "
    "begin 1; take 1; note; leave; note; skip 2; note; begin 2; skip 1; note; finish; load 0; "
    "skip 1; note; begin 0; finish; begin 1; skip 99; finish; begin 2; skip 1; leave; begin 2; "
    "take each; verify",
    "left out before anything": "skip 1; note; skip 1; note; verify",
    "resumed, and left": "begin 0; take 1; note; finish; load 0; go on; take 1; leave; begin 1; "
    "take 1; leave; begin 2; finish; move 0; go on; take 1; leave; begin 1; finish",
    "resumed behind one that was left": "begin 0; take 1; leave; begin 1; take 1; leave; note; "
    "begin 2; load, not restored 0; go on; finish",
    "resumed, and resumed again": "begin 0; take 1; note; move 0; go on; take 1; note; move 1; "
    "go on; take each; verify",
}
"""What the model has found, for torch's loader."""

PRESSED: dict[str, str] = {
    "the first next": "begin 0",
    "the first next after a state": "begin 0; take 1; note; load 0; begin 0",
    "the next after an epoch that was left": "begin 0; take 2; leave; begin 1",
    "the first next of the second epoch": "begin 0; finish; begin 1",
    "the second next": "begin 0; take 1",
}
"""Programs before a call of ``next`` in which Ctrl-C comes."""


def run(kind: str, num_workers: int, steps: str, n: int = 9) -> DropIn:
    """Runs a program of so many steps; it is to be closed."""
    torch.manual_seed(1)
    program = DropIn(kind, n, num_workers, persistent=False)
    with explained(program):
        do(program, steps)
    return program


@contextlib.contextmanager
def explained(program: DropIn) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note("\n".join(["the program:", *program.steps]))
        program.close()
        raise


def do(program: DropIn, steps: str) -> None:
    for step in steps.split("; "):
        name = step.rstrip("0123456789")
        arguments = [int(step[len(name) :])] if name != step else []
        STEPS[name.strip()](program, *arguments)


def press(
    kind: str,
    num_workers: int,
    steps: str,
    stride: int,
    comes: str = "Ctrl-C",
    within: Within = OURS,
    n: int = 9,
) -> int:
    """It comes at each so many-th place of ``next``; says how many there are."""
    raises, times = COMES[comes]
    behind = itertools.cycle(range(0, 60, 7))
    for place in itertools.count(0, stride):
        program = run(kind, num_workers, steps, n)
        with explained(program):
            places = [place, next(behind)][:times]
            reached = program.take(1, [Break(each, raises, within) for each in places])
            program.note()
            do(program, f"finish; begin {program.place.number}; finish; verify")
        program.close()
        if not reached:
            return place
    raise AssertionError


def take_each(program: DropIn) -> None:
    """Takes the rest, and notes each state."""
    while program.batches is not None:
        program.take(1)
        program.note()


def verify(program: DropIn) -> None:
    """Goes on from each state, to the end of its epoch and of the next."""
    for which in range(len(program.saved)):
        program.load(which, program.num_workers, True)
        goes_on = program.place.rest is not None
        do(program, f"begin {program.place.told if goes_on else program.place.number}; finish")
        do(program, f"begin {program.place.number}; finish")


class TorchPrograms(RuleBasedStateMachine):
    """Its rules are what a script does."""

    workers = (0, 0, 0, 1)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.program: DropIn

    @initialize(data=st.data())
    def begin_program(self, data: Any) -> None:
        counts["programs"] += 1
        self.program = DropIn(
            kind=data.draw(st.sampled_from(list(KINDS)), label="kind"),
            n=data.draw(st.integers(5, 14), label="n"),
            num_workers=data.draw(st.sampled_from(self.workers), label="num_workers"),
            persistent=data.draw(st.booleans(), label="persistent"),
        )

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[DropIn]:
        counts[f"torch: {name}"] += 1
        try:
            yield self.program
        except BaseException as error:
            error.add_note("\n".join(["the program:", *self.program.steps]))
            failures.append(error)
            raise

    def teardown(self) -> None:
        if hasattr(self, "program"):
            self.program.close()

    @property
    def live(self) -> bool:
        return hasattr(self, "program") and self.program.batches is not None

    @precondition(lambda self: not self.live)
    @rule(again=st.booleans(), depth=st.integers(0, 2), breaks=st.none() | st.lists(break_in))
    def begin(self, again: bool, depth: int, breaks: list[Break] | None) -> None:
        """As a loop does, also once more in the epoch that a state is of."""
        with self.noted("begin") as program:
            goes_on = program.place.rest is not None and not program.left
            again |= program.must_be_told
            epoch = program.place.told if goes_on else program.place.number + program.left
            program.begin(None if goes_on and not again else epoch)
            if depth:
                program.prefetch(depth)
        if breaks is not None and self.live:
            self.take(1, breaks)

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 4), breaks=st.just([]) | st.lists(break_in, max_size=2))
    def take(self, count: int, breaks: list[Break]) -> None:
        with self.noted("next") as program:
            program.take(count, breaks)

    @precondition(lambda self: self.live)
    @rule()
    def finish(self) -> None:
        with self.noted("next to the end") as program:
            program.take(100)

    @precondition(lambda self: self.live)
    @rule()
    def leave(self) -> None:
        with self.noted("leave") as program:
            program.leave()

    @rule(count=st.integers(0, 5))
    def skip(self, count: int) -> None:
        with self.noted("skip") as program:
            program.skip(count)

    @rule()
    def note(self) -> None:
        with self.noted("state_dict") as program:
            program.note()

    @rule(how=st.sampled_from(["torch.rand", "reseed", "reseed own"]))
    def draw(self, how: str) -> None:
        with self.noted(how) as program:
            STEPS[how](program)

    @precondition(lambda self: self.program.saved)
    @rule(which=st.integers(0, 9), data=st.data(), restores=st.booleans())
    def load(self, which: int, data: Any, restores: bool) -> None:
        with self.noted("load_state_dict") as program:
            workers = data.draw(st.none() | st.sampled_from(self.workers), label="num_workers")
            if program.is_stream and workers is not None:
                workers = program.shards if program.num_workers else 0
            program.load(which % len(program.saved), workers, restores)


class TorchProgramsInProcesses(TorchPrograms):
    """The same with worker processes, most of the time."""

    workers = (0, 1, 2)
