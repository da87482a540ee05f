"""Random programs: anything that a program may do with a loader, compared with the model.

A program is a list of steps. Each is written down before it is done, so that a program that fails
can be read: see ``Program.steps``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import os
import random
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import psutil
import pytest
from helpers import StatefulIterator
from interrupts import OURS, Breaking, Outcome, Within, interrupted
from kinds import (
    BAD_ITEM,
    Apart,
    Awaited,
    Cook,
    Counted,
    CountedIterator,
    Counting,
    EverySecond,
    Failing,
    GoesOn,
    Numbered,
    Opened,
    OpenedCounting,
    OwnGenerator,
    OwnIterator,
    OwnOrder,
    OwnToldHowFar,
    Ready,
    Refusing,
    Resuming,
    Reusing,
    SaysNothing,
    Separate,
    Slow,
    Steady,
    Sticky,
    Told,
    ToldHowFar,
    ToldWithState,
    Uneven,
    combined,
    index_of,
    open_stream,
    plain,
    shuffled_indices,
    uneven_part,
)
from our_samplers import OF_SIZE

from minloader import (
    BatchError,
    BatchSampler,
    Loader,
    MixtureSampler,
    cached,
    concurrent,
    prefetch,
    shuffled,
)
from minloader._diagnosis.inspect import inspect
from minloader._sampling.seeding import generator

from .model import Chain, Model, Place, Run


class Break(NamedTuple):
    """Something that breaks into a call.

    Attributes:
        place: at which; how many are passed before.
        raises: what comes.
        within: folder of the code in which places are counted.
    """

    place: int
    raises: Breaking = KeyboardInterrupt
    within: Within = OURS

    def __str__(self) -> str:
        return f"{self.raises.__name__} at {self.place} within {self.within or 'all'}"


HANG = 60.0
"""Seconds after which a step hangs: a thousand times what it takes."""


def samplers_in(state: Any) -> Iterator[dict[str, Any]]:
    """The states of samplers of ours within a state; a sampler before those that it reads."""
    if isinstance(state, dict):
        if {"sampler", "seed", "world_size"} <= state.keys():
            yield state
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from samplers_in(part)


# --- kinds of samplers and streams ---------------------------------------------------------------


class At(NamedTuple):
    """Where an epoch is: its number, passes before it, its chain, number of shards, and the seed of
    the loader."""

    epoch: int
    passes: int
    chain: Chain
    shards: int
    seed: int


@dataclass(frozen=True)
class Kind:
    """A sampler or a stream.

    Attributes:
        make: makes one for so many indices, or samples.
        items: what an epoch of so many has; of a stream, the samples of each shard.
        stream: whether it is a stream.
        alone: whether the place is the object's own, so that only one iteration at a time is
            possible, and none can be left early without a state to go on from.
        is_of_last: whether its state is that of the iterator made last, be that another's.
        sequential: whether its epochs must follow each other.
        repeatable: whether its order can be had again.
        has_state: whether a state may be asked for.
        opened: whether a stream must be opened in a worker, see :class:`Opened`.
        bad: an item of its own that fails.
        lists: whether its items are lists of indices.
        numbers: whether its indices are numbers, alone or in lists.
        options: of the loader.
    """

    make: Callable[[int], Any]
    items: Callable[[int, At], list[Any]]
    stream: bool = False
    alone: bool = False
    is_of_last: bool = False
    sequential: bool = False
    repeatable: bool = True
    has_state: bool = True
    opened: bool = False
    bad: int | None = None
    lists: bool = False
    numbers: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def may_be_looked_at(self) -> bool:
        """Whether somebody may take an item of the sampler without changing what it says."""
        return not (self.stream or self.alone or self.is_of_last)


def numbered(n: int, at: At) -> list[Any]:
    return list(range(n))


def told(n: int, at: At) -> list[Any]:
    return [1000 * at.epoch + each for each in shuffled_indices(n, at.epoch)]


def counted(n: int, at: At) -> list[Any]:
    return told(n, at._replace(epoch=at.passes))


def failing(n: int, at: At) -> list[Any]:
    return [0, 1, 2, *[BAD_ITEM] * (at.passes == 0), *range(3, n)]


def pairs(items: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def cut(n: int, at: At) -> list[Any]:
        values = items(n, at)
        return [values[i : i + 2] for i in range(0, len(values), 2)]

    return cut


def as_alone(make: Callable[..., Any]) -> Callable[..., list[Any]]:
    """What a sampler gives that is told its epoch and read by itself."""

    def items(n: int, at: At) -> list[Any]:
        sampler = make(n)
        sampler.set_epoch(at.epoch)
        return list(sampler)

    return items


def of_ours(make: Callable[[int], Any], others: dict[str, bool]) -> Kind:
    """A sampler of ours that carries nothing from one epoch to the next."""
    items = as_alone(make)
    return Kind(make, lambda n, at: list(plain(items(n, at))), **{"lists": True} | others)


def as_rolled(make: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """The same of one that begins with what the epochs of its chain have left."""

    def items(n: int, at: At) -> list[Any]:
        sampler, given = make(n), []
        for number in (*at.chain, at.epoch):
            sampler.set_epoch(number)
            given = list(sampler)
        return given

    return items


def own_shuffled(n: int, at: At) -> list[Any]:
    sampler = BatchSampler(n, 2, shuffle=True, seed=at.seed)
    sampler.set_epoch(at.epoch)
    return list(sampler)


def in_shards(part: Callable[[int, int, int], list[int]], step: int = 0) -> Callable[..., Any]:
    """The shards of a stream; ``step`` is what each pass adds."""

    def shards(n: int, at: At) -> list[Any]:
        parts = [part(n, shard, at.shards) for shard in range(at.shards)]
        return [[step * at.passes + each for each in numbers] for numbers in parts]

    return shards


def in_told_shards(n: int, at: At) -> list[Any]:
    return in_shards(even_part, 100)(n, at._replace(passes=at.epoch))


HALF = 3
"""Samples in half the buffer of a stream that is shuffled."""


def mixed(kind: Kind) -> Kind:
    """A stream that is shuffled. An error comes where the buffer is filled."""

    def mix(shard: int, samples: list[int], at: At) -> list[int]:
        good = [each for each in samples if each != kind.bad]
        given: list[int] = []
        for number, first in enumerate(range(0, len(good), HALF)):
            half = good[first : first + HALF]
            rng = generator("shuffled", 0, at.seed, at.epoch, 0, shard, number)
            given += [half[place] for place in reversed(rng.permutation(len(half)))]
        if len(good) < len(samples):
            read = [HALF * (j // HALF + 1) + j % HALF for j in range(len(good))]
            behind = [j for j in range(len(good)) if read[j] > samples.index(kind.bad)]
            given.insert((behind or [len(good)])[0], kind.bad)
        return given

    return replace(
        kind,
        make=lambda n: shuffled(kind.make(n), 2 * HALF),
        items=lambda n, at: [mix(*each, at) for each in enumerate(kind.items(n, at))],
    )


def even_part(n: int, shard: int, shards: int) -> list[int]:
    return list(range(shard, n, shards))


def _rolling(n: int) -> Any:
    return BatchSampler(n, 3, shuffle=True, last_batch="rollover")


def _rolling_asked(n: int) -> Any:
    return BatchSampler(lambda: n, 3, shuffle=True, last_batch="rollover")


def _rolling_parts(n: int) -> Any:
    part = BatchSampler(n, 3, last_batch="rollover")
    return MixtureSampler([part, 1 + n // 2], [1, 1], 2, stop="last")


def _over_rolling(n: int) -> Any:
    return BatchSampler(BatchSampler(n, 2, last_batch="rollover"), 2)


def _rolling_told(n: int) -> Any:
    return BatchSampler(Told(n), 2, last_batch="rollover")


def _rolling_list(n: int) -> Any:
    return BatchSampler(list(range(n)), 2, last_batch="rollover")


def _rolling_state(n: int) -> Any:
    return BatchSampler(ToldWithState(n), 2, last_batch="rollover")


RAISED = (ValueError, BatchError)
"""What is raised in the place of what is bad: another error than an Exception is told by ours."""

STREAMS: dict[str, Kind] = {
    "steady": Kind(Steady, in_shards(even_part), stream=True),
    "uneven": Kind(Uneven, in_shards(uneven_part), stream=True),
    "iterator with state": Kind(StatefulIterator, in_shards(even_part), stream=True),
    "failing iterator": Kind(
        lambda n: StatefulIterator(n, bad=4), in_shards(even_part), stream=True, bad=4
    ),
    "exiting iterator": Kind(
        lambda n: StatefulIterator(n, bad=4, error=SystemExit),
        in_shards(even_part),
        stream=True,
        bad=4,
    ),
    "opened": Kind(Opened, in_shards(even_part), stream=True, opened=True),
    "opened counting": Kind(
        OpenedCounting, in_shards(even_part, 100), stream=True, sequential=True, opened=True
    ),
    "counting": Kind(Counting, in_shards(even_part, 100), stream=True, sequential=True),
    "separate": Kind(Separate, in_shards(even_part, 100), stream=True, sequential=True),
    "own iterator": Kind(OwnIterator, in_shards(even_part, 100), stream=True, sequential=True),
    "resuming": Kind(Resuming, in_shards(even_part, 100), stream=True, sequential=True, alone=True),
    "ready": Kind(Ready, in_shards(even_part, 100), stream=True, sequential=True, alone=True),
    "numbered": Kind(Numbered, in_told_shards, stream=True),
    "sticky": Kind(Sticky, in_shards(even_part), stream=True),
    "goes on": Kind(GoesOn, in_shards(even_part), stream=True),
    "told how far": Kind(ToldHowFar, in_shards(even_part), stream=True),
    "own, told how far": Kind(OwnToldHowFar, in_shards(even_part), stream=True),
    "says nothing": Kind(SaysNothing, in_shards(even_part), stream=True),
}

KINDS: dict[str, Kind] = {
    "range": Kind(range, numbered),
    "lists": Kind(
        lambda n: [[k] for k in range(n)], lambda n, at: [[k] for k in range(n)], lists=True
    ),
    "told": Kind(Told, told),
    "every second": Kind(EverySecond, lambda n, at: [] if at.epoch % 2 else told(n, at)),
    "own": Kind(lambda n: None, numbered),
    "own shuffled": Kind(
        lambda n: None, own_shuffled, lists=True, options={"batch_size": 2, "shuffle": True}
    ),
    **{name: of_ours(*row) for name, row in OF_SIZE.items()},
    "rolling": Kind(_rolling, as_rolled(_rolling), lists=True),
    "rolling asked": Kind(_rolling_asked, as_rolled(_rolling), lists=True),
    "rolling parts": Kind(_rolling_parts, as_rolled(_rolling_parts), numbers=False),
    "over rolling": Kind(_over_rolling, as_rolled(_over_rolling), numbers=False),
    "batches of told": Kind(
        lambda n: BatchSampler(Told(n), 2), pairs(told), alone=True, lists=True
    ),
    "reusing": Kind(Reusing, pairs(numbered), alone=True, lists=True),
    "told with state": Kind(ToldWithState, told, alone=True),
    "apart": Kind(Apart, numbered, is_of_last=True),
    "refusing": Kind(Refusing, numbered, is_of_last=True),
    "batches of apart": Kind(
        lambda n: BatchSampler(Apart(n), 2), pairs(numbered), is_of_last=True, lists=True
    ),
    "counted": Kind(Counted, counted, alone=True, sequential=True),
    "counted iterator": Kind(CountedIterator, counted, alone=True, sequential=True),
    "batches of counted": Kind(
        lambda n: BatchSampler(Counted(n), 2),
        pairs(counted),
        alone=True,
        sequential=True,
        lists=True,
    ),
    "batches of batches": Kind(
        lambda n: BatchSampler(BatchSampler(Counted(n), 2), 2),
        pairs(pairs(counted)),
        alone=True,
        sequential=True,
        numbers=False,
    ),
    "rolling told": Kind(
        _rolling_told, as_rolled(_rolling_told), alone=True, sequential=True, lists=True
    ),
    "rolling list": Kind(
        _rolling_list, as_rolled(_rolling_list), alone=True, sequential=True, lists=True
    ),
    "rolling state": Kind(
        _rolling_state, as_rolled(_rolling_state), alone=True, sequential=True, lists=True
    ),
    "own generator": Kind(
        lambda n: OwnGenerator(n + 200),
        lambda n, at: list(range(n + 200)),
        alone=True,
        sequential=True,
        repeatable=False,
    ),
    "failing": Kind(
        lambda n: Failing(n, 3), failing, alone=True, sequential=True, has_state=False, bad=BAD_ITEM
    ),
    "own order": Kind(OwnOrder, in_shards(even_part), stream=True, repeatable=False),
    **STREAMS,
    **{f"{name}, shuffled": mixed(kind) for name, kind in STREAMS.items()},
}


@cache
def users_threads() -> Executor:
    """An executor of the user's, which all programs share."""
    return ThreadPoolExecutor(3)


@cache
def users_processes() -> Executor:
    return ProcessPoolExecutor(2, get_context("spawn"))


WAYS: dict[str, dict[str, Any]] = {
    "here": {"num_workers": 0, "executor": "thread"},  # when it is resized
    "thread": {"num_workers": 1, "executor": "thread"},
    "threads": {"num_workers": 2, "executor": "thread"},
    "three threads": {"num_workers": 3, "executor": "thread"},
    "process": {"num_workers": 1},
    "processes": {"num_workers": 2, "mp_context": "forkserver"},
    "user's threads": {"num_workers": 2, "executor": users_threads},
    "user's processes": {"num_workers": 2, "executor": users_processes},
}

DATASETS: dict[str, Callable[..., Any]] = {
    "plain": Cook,
    "concurrent": lambda *args: concurrent(Cook(*args), 3),
    "awaited": lambda *args: concurrent(Awaited(*args), 3),
    "cached": lambda *args: cached(Cook(*args, draws=False), bytes=42_000),
}


class Hang(BaseException):
    """A step takes longer than any does."""


class Refused(Exception):
    """An order that can be had by nothing was wanted again, and that was said."""


def replaced(failure: Any) -> Any:
    """An ``on_error``."""
    return "replaced", plain(failure.item)


def mended(failure: Any) -> Any:
    """An ``on_sample_error``."""
    return "mended", plain(failure.item)


ON_ERROR: dict[str, Any] = {
    "fails": {"on_error": "raise"},
    "left out": {"on_error": "skip"},
    "replaced": {"on_error": replaced},
    "mended": {"on_sample_error": mended},
    "shorter": {"on_sample_error": "skip"},
}


@dataclass
class Program:
    """A loader and the model of it.

    Args:
        kind: of sampler or stream, by name.
        way: where batches are made, by name.
        n: indices or samples.
        bad, left_out, slow: indices of items, see :class:`Cook`.
        fate: of an item that is bad.
        options: of the loader.
        dataset: how samples are read, by name.
        collated: whether each sample of an item is read by itself.
    """

    kind: str
    way: str
    n: int
    bad: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    fate: str = "fails"
    options: dict[str, Any] = field(default_factory=dict)
    dataset: str = "plain"
    collated: bool = False
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.what = KINDS[self.kind]
        self.options |= self.what.options
        self.shards = max(1, WAYS[self.way]["num_workers"]) if self.what.stream else 0
        self.model = Model(self.plan, self.ordered, self.has_one_order)
        self.states: list[tuple[Any, Place]] = []
        self.loader = self.make(self.way)
        self.runs: list[tuple[Iterator[Any], Run, str]] = []
        self.former: Iterator[Any] | None = None  # from before a state was loaded
        self.disturbed = False  # whether a stream may have to be read again
        self.went_on = False  # from a state
        self.left = 0  # places that the last call in which something was to break in had too few
        how = f"{self.dataset}, {'collated, ' * self.collated}{self.options}"
        self.write(f"loader: {self.kind}, n={self.n}, {self.way}, {how}")
        for name in ("bad", "left_out", "slow"):
            if getattr(self, name):
                self.write(f"{name}: {sorted(getattr(self, name))}, {self.fate}")

    @property
    def ordered(self) -> bool:
        """Whether batches come in the order of their ordinals."""
        return self.what.repeatable and bool(self.options.get("in_order", True))

    @property
    def has_one_order(self) -> bool:
        """Whether the order of an epoch is not known here, but must not change."""
        unknown = not self.what.repeatable and not self.what.stream
        return unknown and self.options.get("in_order", True)

    @property
    def can_skip(self) -> bool:
        """Whether it is known which batches are next, and none was taken ahead of the consumer."""
        known = not self.what.stream and self.what.bad is None and self.model.ordered
        return known and not any(how.startswith("prefetched") for _, _, how in self.runs)

    def plan(self, epoch: int, passes: int, chain: Chain) -> list[tuple[Any, str]]:
        at = At(epoch, passes, chain, self.shards, self.loader.seed)
        items = self.what.items(self.n, at)
        if not self.what.stream:
            return [self.planned(item, item if self.collated else [item]) for item in items]
        shards = [self.cut(shard, samples) for shard, samples in enumerate(items)]
        turns = itertools.zip_longest(*shards)
        return [batch for turn in turns for batch in turn if batch is not None]

    def cut(self, shard: int, samples: list[int]) -> list[tuple[Any, str]]:
        """The batches of a shard; one in which the stream fails has no samples."""
        batches, batch = [], []
        for n, sample in enumerate(samples, 1):
            item, is_bad = (shard, len(batches)), sample == self.what.bad
            batch.append(sample)
            last = n == len(samples) and self.options.get("last_batch") != "discard"
            if is_bad or last or len(batch) == self.options.get("batch_size", 1):
                batches.append(self.failed(item, sample) if is_bad else self.planned(item, batch))
                batch = []
        return batches

    def failed(self, item: Any, sample: Any) -> tuple[Any, str]:
        if self.fate in ("left out", "replaced"):
            return item, self.fate
        return plain(sample), "fails"

    def planned(self, item: Any, samples: list[Any]) -> tuple[Any, str]:
        """What becomes of a batch of some samples."""
        made: list[Any] = []
        if samples == [self.what.bad]:
            return BAD_ITEM, "fails"
        for sample in samples:
            if index_of(sample) not in self.bad | self.left_out:
                made.append(plain(sample))
            elif index_of(sample) in self.bad and self.fate == "mended":
                made.append("mended")
            elif index_of(sample) in self.bad and self.fate != "shorter":
                return plain(self.failed(item, sample)[0]), self.fate
        if not made:
            return plain(item), "left out"
        return tuple(made) if self.collated else made[0], "given"

    def make(self, way: str) -> Loader:
        most = 2 * len(self.bad) + (self.what.bad is not None)  # both parts of a mixture have it
        options = {"retries": 1_000, "max_errors": most} | ON_ERROR[self.fate]
        options |= self.options | WAYS[way]
        if callable(options.get("executor")):
            options["executor"] = options["executor"]()
        if self.collated:
            options["collate_fn"] = combined
        if not self.what.stream:
            dataset = DATASETS[self.dataset](self.bad, self.left_out, self.slow, self.n)
            if self.dataset == "cached":
                options["transform"] = Cook()
            return Loader(dataset, self.what.make(self.n), **options)
        stream = self.what.make(self.n)
        getattr(stream, "stream", stream).on_sample = Slow(self.slow, self.left_out)
        if self.what.opened:
            options["worker_init_fn"] = open_stream
        return Loader(stream, transform=Cook(self.bad), **options)

    def write(self, text: str) -> None:
        self.steps.append(text)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Does a step: it does not hang, and the loader is afterwards as the model says."""
        self.write(text)
        with not_for_ever(), self.refusing():
            yield
            self.check()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, TypeError) as error:
            if self.what.repeatable or not (self.went_on or self.disturbed):
                raise
            if self.what.stream or "sampler" in str(error):
                raise Refused(str(error)) from error
            raise

    def check(self) -> None:
        loader, model = self.loader, self.model
        if loader.epoch != model.epoch:
            gc.collect()  # the traceback of Ctrl-C may keep an iterator that was left
        assert loader.epoch == model.epoch, f"epoch is {loader.epoch}, not {model.epoch}"
        if self.what.stream and not self.disturbed:
            assert loader.stats.errors.reread == 0, (
                f"{loader.stats.errors.reread} batches were read again"
            )

    # --- iterations

    def begin(self, how: str, epochs: int = 1, depth: int = 1, breaks: Break | None = None) -> None:
        """Begins an iteration: by "iter", "epochs", or with a function "prefetched".

        Args:
            how: which of these.
            epochs: how many.
            depth: of prefetch.
            breaks: what breaks into what begins: then that is done once more.
        """
        with self.step(f"begin {how}, epochs={epochs}, depth={depth}, {breaks}"):
            batches: Any = self.iterator(breaks) if how == "iter" else self.loader.epochs(epochs)
            if how == "prefetched" and epochs == 1:
                how = "prefetched loader"  # whose epoch begins with the first next
                batches = self.loader
            if how.startswith("prefetched"):
                batches = prefetch(batches, same, depth)
            self.disturbed |= bool(self.runs)  # several iterators may have a stream read again
            run = self.model.begin(1 if how == "iter" else epochs)
            self.runs.append((batches, run, how))
            if how == "iter":
                return
            if breaks is None:  # the first next of epochs begins
                self.take(-1)
            else:
                self.interrupt(-1, [breaks])

    def iterator(self, breaks: Break | None) -> Any:
        """Calls ``iter``; where something breaks in, once more."""
        if breaks is None:
            return iter(self.loader)
        self.disturbed |= self.loader.num_workers > 0 or breaks.raises is not KeyboardInterrupt
        outcome = self.broken_into(self.loader.__iter__, breaks)
        return iter(self.loader) if outcome.interrupted else outcome.value

    def take(self, which: int, count: int = 1) -> bool:
        """Takes batches; says whether there may be more."""
        batches, run, how = self.runs[which]
        for _ in range(count):
            try:
                outcome: Any = next(batches)
            except StopIteration:
                self.model.stop(run)
                self.drop(which)
                return False
            except RAISED as error:
                outcome = error
            self.given(run, how, outcome)
            outcome = None  # an error leads to this frame: it would keep an iterator that is left
        return True

    def given(self, run: Run, how: str, outcome: Any) -> None:
        epoch = None
        if isinstance(outcome, RAISED):
            bad = re.search(r"(\d+) is bad\b", str(outcome))
            if bad is None:
                raise outcome
            # The item is not told but in the note of the error.
            self.model.advance(run)
            index, place = int(bad[1]), run.place
            fails = [item for item, fate in place.rest.values() if fate == "fails"]
            fitting = [item for item in fails if index_of(item) == index]
            assert fitting, f"{outcome}, which is not to come"
            self.model.give(run, None, fitting[0], "fails", None)
            return
        if how in ("epochs", "prefetched"):
            epoch, outcome = outcome
        first, draw = outcome
        if first == "replaced":
            self.model.give(run, epoch, draw, "replaced", None)
        else:
            known = draw if self.what.repeatable else None
            self.model.give(run, epoch, plain(first), "given", known)

    def drop(self, which: int) -> None:
        batches, _, how = self.runs.pop(which)
        if how.startswith("prefetched"):
            batches.close()

    def finish(self, which: int) -> None:
        with self.step(f"finish {which}"):
            while self.take(which):
                pass

    def broken_into(self, call: Callable[[], Any], breaks: Break) -> Outcome:
        """Makes a call in which something comes."""
        outcome = interrupted(call, breaks.place, breaks.within, breaks.raises)
        self.left = outcome.left
        return outcome

    def interrupt(self, which: int, breaks: list[Break], noted: bool = False) -> None:
        """Something comes somewhere in ``next``: the ``next`` behind it gives that batch.

        Args:
            which: iteration.
            breaks: what comes: the second in the ``next`` behind that which the first came out of.
            noted: whether the state from right after it is noted.
        """
        with self.step(f"next of {which}, {', '.join(map(str, breaks))}"):
            batches, run, how = self.runs[which]
            end = object()
            for each in breaks:
                try:
                    outcome = self.broken_into(lambda: next(batches, end), each)
                except RAISED as error:
                    self.given(run, how, error)
                    return
                assert outcome.reached == outcome.interrupted, f"swallowed: {outcome.where}"
                if not outcome.interrupted:
                    if outcome.value is end:
                        self.model.stop(run)
                        self.drop(which)
                    else:
                        self.given(run, how, outcome.value)
                    return
                self.write(f"  it came, {outcome.where}")
                # What was being sent may be under way, so that its shard is read again; or the
                # stream was in a call, and may have ended with that. Behind what is not Ctrl-C all
                # is read again.
                self.disturbed |= self.loader.num_workers > 0 or "shuffled" in self.kind
                self.disturbed |= not each.within or outcome.in_tests
                self.disturbed |= each.raises is not KeyboardInterrupt
            if noted and self.what.has_state and (run.place.coming or not run.more):
                self.note()
            elif self.what.has_state:
                self.loader.state_dict()
            self.take(which)  # in any case one: where a thread was must not decide what follows

    def take_in_threads(self, which: int, counts: list[int]) -> None:
        """Several threads take so many batches each, by a lock: each batch goes to one of them."""
        with self.step(f"threads take {counts} of {which}"):
            batches, run, how = self.runs[which]
            got: list[Any] = []
            ends: list[Any] = []
            lock = threading.Lock()

            def taking(count: int) -> None:
                for _ in range(count):
                    try:
                        with lock:
                            got.append(next(batches))
                    except StopIteration:
                        ends.append(None)
                        return
                    except Exception as error:
                        got.append(error)

            former, early = run.place, set(run.place.rest)
            threads = [threading.Thread(target=taking, args=(count,)) for count in counts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # The threads may have been overtaken before they wrote down what they were given.
            ordered, one_order = self.model.ordered, self.model.one_order
            self.model.ordered = self.model.one_order = False
            for outcome in got:
                if isinstance(outcome, Exception) and not isinstance(outcome, RAISED):
                    raise outcome
                self.given(run, how, outcome)
            self.model.ordered, self.model.one_order = ordered, one_order
            coming = run.place.coming
            if ordered and coming:
                place = run.place
                planned = len(self.plan(place.epoch, place.passes, place.chain))
                # Of a state with in_order=False some have come before their turn already.
                were_to_come = early if place is former else set(range(planned))
                given = were_to_come - set(place.rest)
                passed = [k for k in place.rest if k < max(given, default=0)]
                assert not set(passed) & set(coming), "one is passed over"
                for ordinal in passed:
                    del place.rest[ordinal]
            if ends:
                self.model.stop(run)
                self.drop(which)

    def leave(self, which: int) -> None:
        with self.step(f"leave {which}"):
            self.drop(which)
            if self.left < 0:
                gc.collect()  # the traceback of what broke in may keep the iterator

    # --- states

    def note(self) -> None:
        with self.step("note a state"):
            self.states.append((json.loads(json.dumps(self.loader.state_dict())), self.state()))

    def state(self) -> Place:
        return self.model.state()

    def _loaded(self, which: int, breaks: Break | None = None) -> None:
        state, place = self.states[which]
        self.went_on = self.disturbed = True
        self.former = None
        if self.runs and not self.runs[-1][2].startswith("prefetched"):
            self.former = self.runs[-1][0]
        while self.runs:
            self.drop(-1)
        load = partial(self.loader.load_state_dict, copy.deepcopy(state))
        if breaks is None or self.broken_into(load, breaks).interrupted:
            load()
        self.model.load(place)

    def load(self, which: int, breaks: Break | None) -> None:
        """Goes on from a state, in the same loader, perhaps after something broke into that."""
        with self.step(f"load state {which}, {breaks}"):
            self._loaded(which, breaks)

    def refuse(self, which: int) -> None:
        """A state that does not fit is refused, and all goes on as if it had not been there."""
        with self.step(f"load state {which}, of another seed of the innermost sampler, and epoch"):
            state = copy.deepcopy(self.states[which][0])
            *_, other = [state, *samplers_in(state)]
            state["epoch"] += 1
            other["seed"] += 1
            with pytest.raises(ValueError, match="seed"):
                self.loader.load_state_dict(state)

    def look(self) -> None:
        """Nothing comes of looking."""
        with self.step("look"), contextlib.suppress(TypeError):
            len(self.loader)

    def look_at_sampler(self) -> None:
        """Somebody takes the first item of the loader's sampler."""
        with self.step("next(iter(sampler))"):
            next(iter(self.loader.sampler), None)

    def use_former(self) -> None:
        """An iterator from before a state was loaded refuses to go on."""
        with self.step("next of the former iterator"):
            former, self.former = self.former, None
            assert former is not None
            try:
                given: Any = next(former)
            except (RuntimeError, StopIteration):
                return
            except RAISED as error:
                given = error
            raise AssertionError(f"the former iterator has given {given}")

    def move(self, which: int, way: str, **options: Any) -> None:
        """Goes on from a state, in a fresh loader, with some options that are others."""
        with self.step(f"load state {which} in a fresh loader, {way}, {options}"):
            while self.runs:
                self.drop(-1)
            self.loader.close()
            self.options |= options
            self.loader, self.way = self.make(way), way
            self.model.ordered = self.ordered
            self._loaded(which)

    def verify(self, which: int, way: str = "here") -> None:
        """Goes on from a state elsewhere, to the end of that epoch and of the next."""
        with self.step(f"verify state {which}, {way}"):
            state, place = self.states[which]
            model = copy.copy(self.model)
            model.load(place)
            with self.make(way) as loader:
                before, self.went_on = self.went_on, True
                loader.load_state_dict(copy.deepcopy(state))
                assert loader.epoch == model.epoch
                for _ in range(2):
                    run = model.begin()
                    outcomes: Any = outcomes_of(iter(loader))
                    own, self.model = self.model, model
                    try:
                        for outcome in outcomes:
                            self.given(run, "iter", outcome)
                        model.stop(run)
                    finally:
                        self.model = own
                    assert loader.epoch == model.epoch
                self.went_on = before

    # --- all else

    def set_epoch(self, epoch: int, by: str) -> None:
        with self.step(f"epoch = {epoch}, by {by}"):
            if self.left < 0:
                gc.collect()  # the traceback of Ctrl-C may keep an iterator that was left
            if by == "attribute":
                self.loader.epoch = epoch
            else:
                self.loader.set_epoch(epoch)
            self.model.set_epoch(epoch)

    def skip(self, n: int, breaks: Break | None = None) -> None:
        """Leaves batches out; if something breaks in some of them: what comes next says which."""
        with self.step(f"skip {n}, {breaks}"):
            live = any(run.place is self.model.latest for _, run, _ in self.runs)
            self.went_on |= not live
            if breaks is None:
                self.loader.skip(n)
                self.model.skip(n, live=live)
                return
            outcome = self.broken_into(partial(self.loader.skip, n), breaks)
            batches, run, how = self.runs[-1]
            batch = next(batches)
            coming = [item for item, _ in run.place.rest.values()]
            done = coming.index(plain(batch[0]))
            assert done <= n if outcome.interrupted else done == n
            self.model.skip(done, live=live)
            self.given(run, how, batch)

    def resize(self, workers: int, breaks: Break | None = None) -> None:
        with self.step(f"num_workers = {workers}, {breaks}"):
            self.disturbed = True
            resize = partial(setattr, self.loader, "num_workers", workers)
            if breaks is None:
                resize()
            else:
                self.broken_into(resize, breaks)

    def kill(self, seed: int) -> None:
        """Kills a worker of ours, by its pid."""
        with self.step(f"kill a worker, {seed}"):
            self.disturbed |= self.signal_worker(seed, signal.SIGKILL)

    def signal_worker(self, seed: int, number: int) -> bool:
        """Sends one of the workers a signal; says whether there is any."""
        mine = psutil.Process().children()
        own = {each.process.pid for each in inspect(self.loader).workers}
        found = [each for each in mine if is_worker(each) and each.pid in own]
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                random.Random(seed).choice(found).send_signal(number)
        return bool(found)

    def start(self) -> None:
        with self.step("start"):
            self.loader.start()

    def close(self, stopped: bool) -> None:
        """Ends the loader; what is used of it from then on refuses.

        Args:
            stopped: whether one of its workers stands still.
        """
        with self.step(f"close, {'a worker' if stopped else 'none'} stands still"):
            if stopped and self.loader.stats.workers.executor == "process":
                self.signal_worker(0, signal.SIGSTOP)
            self.loader.close()
            for batches, _, how in self.runs:
                try:
                    given: Any = next(batches)
                except (RuntimeError, StopIteration):
                    continue
                except RAISED as error:
                    given = error
                # What prefetch has ready was made before.
                assert how.startswith("prefetched"), f"a closed loader has given {given}"
            self.restart()

    def close_meanwhile(self, which: int) -> None:
        """Ends the loader while another thread takes batches, which ends then."""
        with self.step(f"close while a thread takes batches of {which}"):
            batches, ends = self.runs[which][0], []

            def taking() -> None:
                try:
                    while True:
                        with contextlib.suppress(*RAISED):
                            next(batches)
                except (RuntimeError, StopIteration) as error:
                    ends.append(error)

            thread = threading.Thread(target=taking)
            thread.start()
            self.loader.close()
            thread.join()
            assert ends, "the thread has failed"
            self.restart()

    def fork(self) -> None:
        """A fork of this process is given an epoch of its own."""
        with self.step("fork"):
            here, there = os.pipe()
            child = os.fork()
            if child == 0:
                self._in_fork(there)
            try:
                os.close(there)
                with os.fdopen(here) as told:
                    failed = told.read()
            except Hang:
                os.kill(child, signal.SIGABRT)  # faulthandler writes its stack
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                raise
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert not failed, failed

    def _in_fork(self, there: int) -> None:
        try:
            self.disturbed = True
            with contextlib.suppress(Refused):
                self.begin("iter")
                self.finish(-1)
            while self.runs:
                self.drop(-1)
            self.loader.close()
        except BaseException:
            os.write(there, traceback.format_exc().encode())
        finally:
            os._exit(0)

    def restart(self) -> None:
        """Begins anew with a fresh loader."""
        self.write("a fresh loader")
        self.end()
        self.shards = max(1, WAYS[self.way]["num_workers"]) if self.what.stream else 0
        self.loader, self.model = (
            self.make(self.way),
            Model(self.plan, self.ordered, self.has_one_order),
        )
        self.states.clear()
        self.disturbed = self.went_on = False

    def end(self) -> None:
        while self.runs:
            self.drop(-1)
        self.former = None
        self.loader.close()
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            with pytest.raises(KeyboardInterrupt):  # which the handler that was left lets through
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def is_worker(process: psutil.Process) -> bool:
    """Whether a child of this process is one that multiprocessing has spawned for tasks."""
    try:
        return any("spawn_main" in part for part in process.cmdline())
    except psutil.Error:
        return False


def outcomes_of(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of an epoch, and errors in the place of some."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except RAISED as error:
            yield error


def end_executors() -> None:
    """Ends those of the user's."""
    for executor in users_threads, users_processes:
        if executor.cache_info().currsize:
            executor().shutdown()
        executor.cache_clear()


def same(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def not_for_ever() -> Iterator[None]:
    """Raises Hang in the main thread if this takes longer than anything does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGUSR1, _hang)
    timer = threading.Timer(HANG, partial(os.kill, os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, former)


def _hang(number: int, frame: Any) -> None:
    raise Hang(f"a step has taken {HANG} s")


WITHIN = [OURS, f"{OURS}/_epochs", ""]
