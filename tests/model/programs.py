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
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import idioms
import psutil
import pytest
from helpers import StatefulIterator
from interrupts import OURS, interrupted
from kinds import (
    BAD_ITEM,
    Cook,
    Counted,
    CountedIterator,
    Failing,
    Opened,
    OwnGenerator,
    OwnOrder,
    Reusing,
    Slow,
    Steady,
    Told,
    ToldWithState,
    Uneven,
    index_of,
    open_stream,
    plain,
    shuffled_indices,
    uneven_part,
    with_draw,
)

from minloader import BatchSampler, DynamicBatchSampler, Loader, MixtureSampler, prefetch

from .model import Chain, Model, Place, Run

HANG = 60.0
"""Seconds after which a step hangs: a thousand times what it takes."""


# --- kinds of samplers and streams ---------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A sampler or a stream.

    Attributes:
        make: makes one for so many indices, or samples.
        items: what it gives: so many, number of the epoch, passes before, number of shards.
        stream: whether it is a stream.
        alone: whether the place is the object's own, so that only one iteration at a time is
            possible, and none can be left early without a state to go on from.
        sequential: whether its epochs must follow each other.
        repeatable: whether its order can be had again.
        has_state: whether a state may be asked for.
        opened: whether a stream must be opened in a worker, see :class:`Opened`.
        bad: an item of its own that fails.
        rolls: whether ``items`` takes the chain too.
    """

    make: Callable[[int], Any]
    items: Callable[[int, int, int, int], list[Any]]
    stream: bool = False
    alone: bool = False
    sequential: bool = False
    repeatable: bool = True
    has_state: bool = True
    opened: bool = False
    bad: int | None = None
    rolls: bool = False


def numbered(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
    return list(range(n))


def told(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
    return [1000 * epoch + each for each in shuffled_indices(n, epoch)]


def counted(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
    return told(n, passes, passes, shards)


def failing(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
    return [0, 1, 2, *[BAD_ITEM] * (passes == 0), *range(3, n)]


def pairs(items: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def cut(n: int, *place: int) -> list[Any]:
        values = items(n, *place)
        return [values[i : i + 2] for i in range(0, len(values), 2)]

    return cut


def as_alone(make: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """What a sampler gives that is told its epoch and read by itself."""

    def items(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
        sampler = make(n)
        sampler.set_epoch(epoch)
        return list(sampler)

    return items


def as_rolled(make: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """The same of one that begins with what the epochs of its chain have left."""

    def items(n: int, epoch: int, passes: int, shards: int, chain: Chain) -> list[Any]:
        sampler, given = make(n), []
        for number in (*chain, epoch):
            sampler.set_epoch(number)
            given = list(sampler)
        return given

    return items


def as_read_through(make: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """The same of one that has read all epochs before."""

    def items(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
        sampler, given = make(n), []
        for number in range(epoch + 1):
            sampler.set_epoch(number)
            given = list(sampler)
        return given

    return items


def in_turns(part: Callable[[int, int, int], list[int]], step: int = 0) -> Callable[..., list[Any]]:
    """The shards of a stream in turns; ``step`` is what each pass adds."""

    def items(n: int, epoch: int, passes: int, shards: int) -> list[Any]:
        rounds = itertools.zip_longest(*(part(n, shard, shards) for shard in range(shards)))
        return [step * passes + each for turn in rounds for each in turn if each is not None]

    return items


def even_part(n: int, shard: int, shards: int) -> list[int]:
    return list(range(shard, n, shards))


def _shuffled(n: int) -> Any:
    return BatchSampler(n, 2, shuffle=True)


def _rolling(n: int) -> Any:
    return BatchSampler(n, 3, shuffle=True, last_batch="rollover")


def _dynamic(n: int) -> Any:
    return DynamicBatchSampler([1 + each % 3 for each in range(n)], max_total=4, shuffle=True)


def _mixture(n: int) -> Any:
    parts = [BatchSampler(n, None, shuffle=True), 1 + n // 2]
    return MixtureSampler(parts, [2, 1], 2, stop="last")


def _rolling_told(n: int) -> Any:
    return BatchSampler(Told(n), 2, last_batch="rollover")


def _rolling_list(n: int) -> Any:
    return BatchSampler(list(range(n)), 2, last_batch="rollover")


def _rolling_state(n: int) -> Any:
    return BatchSampler(ToldWithState(n), 2, last_batch="rollover")


KINDS: dict[str, Kind] = {
    "range": Kind(range, numbered),
    "lists": Kind(lambda n: [[k] for k in range(n)], lambda n, *_: [[k] for k in range(n)]),
    "told": Kind(Told, told),
    "shuffled": Kind(_shuffled, as_alone(_shuffled)),
    "rolling": Kind(_rolling, as_rolled(_rolling), rolls=True),
    "dynamic": Kind(_dynamic, as_alone(_dynamic)),
    "mixture": Kind(_mixture, as_alone(_mixture)),
    "batches of told": Kind(lambda n: BatchSampler(Told(n), 2), pairs(told), alone=True),
    "reusing": Kind(Reusing, pairs(numbered), alone=True),
    "told with state": Kind(ToldWithState, told, alone=True),
    "counted": Kind(Counted, counted, alone=True, sequential=True),
    "counted iterator": Kind(CountedIterator, counted, alone=True, sequential=True),
    "batches of counted": Kind(
        lambda n: BatchSampler(Counted(n), 2), pairs(counted), alone=True, sequential=True
    ),
    "batches of batches": Kind(
        lambda n: BatchSampler(BatchSampler(Counted(n), 2), 2),
        pairs(pairs(counted)),
        alone=True,
        sequential=True,
    ),
    "rolling told": Kind(
        _rolling_told, as_read_through(_rolling_told), alone=True, sequential=True
    ),
    "rolling list": Kind(
        _rolling_list, as_read_through(_rolling_list), alone=True, sequential=True
    ),
    "rolling state": Kind(
        _rolling_state, as_read_through(_rolling_state), alone=True, sequential=True
    ),
    "own generator": Kind(
        lambda n: OwnGenerator(n + 200),
        lambda n, *_: list(range(n + 200)),
        alone=True,
        sequential=True,
        repeatable=False,
    ),
    "failing": Kind(
        lambda n: Failing(n, 3), failing, alone=True, sequential=True, has_state=False, bad=BAD_ITEM
    ),
    "steady": Kind(Steady, in_turns(even_part), stream=True),
    "uneven": Kind(Uneven, in_turns(uneven_part), stream=True),
    "iterator with state": Kind(StatefulIterator, in_turns(even_part), stream=True),
    "failing iterator": Kind(
        lambda n: StatefulIterator(n, bad=4), in_turns(even_part), stream=True, bad=4
    ),
    "opened": Kind(Opened, in_turns(even_part), stream=True, opened=True),
    "counting": Kind(idioms.Counting, in_turns(even_part, 100), stream=True, sequential=True),
    "separate": Kind(idioms.Separate, in_turns(even_part, 100), stream=True, sequential=True),
    "own order": Kind(OwnOrder, in_turns(even_part), stream=True, repeatable=False),
}

WAYS: dict[str, dict[str, Any]] = {
    "here": {"num_workers": 0, "executor": "thread"},  # when it is resized
    "thread": {"num_workers": 1, "executor": "thread"},
    "threads": {"num_workers": 2, "executor": "thread"},
    "three threads": {"num_workers": 3, "executor": "thread"},
    "process": {"num_workers": 1},
    "processes": {"num_workers": 2},
}


class Hang(BaseException):
    """A step takes longer than any does."""


class Refused(Exception):
    """An order that can be had by nothing was wanted again, and that was said."""


def replace(failure: Any) -> Any:
    """An ``on_error``."""
    return "replaced", plain(failure.item)


class Mending:
    """An ``on_error`` that is asked per sample, where that is made."""

    def __call__(self, failure: Any) -> Any:
        raise AssertionError(f"a batch has failed: {failure}")

    def for_sample(self, failure: Any) -> Any:
        return replace(failure)


ON_ERROR: dict[str, Any] = {
    "fails": "raise",
    "left out": "skip",
    "replaced": replace,
    "mended": Mending(),
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
    """

    kind: str
    way: str
    n: int
    bad: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    fate: str = "fails"
    options: dict[str, Any] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.what = KINDS[self.kind]
        self.shards = max(1, WAYS[self.way]["num_workers"]) if self.what.stream else 0
        ordered = self.what.repeatable and self.options.get("in_order", True)
        self.model = Model(self.plan, ordered, self.has_one_order)
        self.states: list[tuple[Any, Place]] = []
        self.loader = self.make(self.way)
        self.runs: list[tuple[Iterator[Any], Run, str]] = []
        self.former: Iterator[Any] | None = None  # from before a state was loaded
        self.disturbed = False  # whether a stream may have to be read again
        self.went_on = False  # from a state
        self.write(f"loader: {self.kind}, n={self.n}, {self.way}, {self.options}")
        for name in ("bad", "left_out", "slow"):
            if getattr(self, name):
                self.write(f"{name}: {sorted(getattr(self, name))}, {self.fate}")

    @property
    def has_one_order(self) -> bool:
        """Whether the order of an epoch is not known here, but must not change."""
        unknown = not self.what.repeatable and not self.what.stream
        return unknown and self.options.get("in_order", True)

    @property
    def can_skip(self) -> bool:
        """Whether it is known which batches are next, and none was taken ahead of the consumer."""
        known = not self.what.stream and self.what.bad is None and self.model.ordered
        return known and not any(how == "prefetched" for _, _, how in self.runs)

    def plan(self, epoch: int, passes: int, chain: Chain) -> list[tuple[Any, str]]:
        chains = (chain,) if self.what.rolls else ()
        items = self.what.items(self.n, epoch, passes, self.shards, *chains)
        return [(plain(item), self.fate_of(item)) for item in items]

    def fate_of(self, item: Any) -> str:
        if item == self.what.bad:
            return "fails"
        if self.what.stream:
            return "given"
        index = index_of(item)
        if index in self.bad:
            return "replaced" if self.fate == "mended" else self.fate
        return "left out" if index in self.left_out else "given"

    def make(self, way: str) -> Loader:
        options = {"on_error": ON_ERROR[self.fate], "retries": 1_000} | self.options | WAYS[way]
        if not self.what.stream:
            dataset = Cook(self.bad, self.left_out, self.slow)
            return Loader(dataset, self.what.make(self.n), **options)
        options.pop("on_error")
        stream = self.what.make(self.n)
        stream.on_sample = Slow(self.slow)
        if self.what.opened:
            options["worker_init_fn"] = open_stream
        return Loader(stream, transform=with_draw, **options)

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
        if not any(how == "prefetched" for _, _, how in self.runs):  # it begins epochs ahead
            if loader.epoch != model.epoch:
                gc.collect()  # the traceback of Ctrl-C may keep an iterator that was left
            assert loader.epoch == model.epoch, f"epoch is {loader.epoch}, not {model.epoch}"
        if self.what.stream and not self.disturbed:
            assert loader.stats.reread == 0, f"{loader.stats.reread} batches were read again"

    # --- iterations

    def begin(self, how: str, epochs: int = 1, depth: int = 1, place: int | None = None) -> None:
        """Begins an iteration: by "iter", "epochs", or with a function "prefetched".

        Args:
            how: which of these.
            epochs: how many.
            depth: of prefetch.
            place: where Ctrl-C comes in what begins: then that is done once more.
        """
        with self.step(f"begin {how}, epochs={epochs}, depth={depth}, Ctrl-C at {place}"):
            batches: Any = self.iterator(place) if how == "iter" else self.loader.epochs(epochs)
            if how == "prefetched":
                batches = prefetch(batches, same, depth)
            run = self.model.begin(1 if how == "iter" else epochs)
            self.runs.append((batches, run, how))
            if how == "iter":
                return
            if place is None:  # the first next of epochs begins
                self.take(-1)
            else:
                self.interrupt(-1, place, OURS)

    def iterator(self, place: int | None) -> Any:
        """Calls ``iter``; where Ctrl-C comes in it, once more."""
        if place is None:
            return iter(self.loader)
        self.disturbed |= self.loader.num_workers > 0
        outcome = interrupted(self.loader.__iter__, place)
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
            except ValueError as error:
                outcome = error
            self.given(run, how, outcome)
        return True

    def given(self, run: Run, how: str, outcome: Any) -> None:
        epoch = None
        if isinstance(outcome, ValueError):
            if not str(outcome).endswith("is bad"):
                raise outcome
            # The item is not told but in the note of the error.
            self.model.advance(run)
            index, place = int(str(outcome).split()[0]), run.place
            bad = [item for item, fate in place.rest.values() if fate == "fails"]
            fitting = [item for item in bad if index_of(item) == index]
            assert fitting, f"{outcome}, which is not to come"
            self.model.give(run, None, fitting[0], "fails", None)
            return
        if how != "iter":
            epoch, outcome = outcome
        first, draw = outcome
        if first == "replaced":
            self.model.give(run, epoch, draw, "replaced", None)
        else:
            known = draw if self.what.repeatable else None
            self.model.give(run, epoch, plain(first), "given", known)

    def drop(self, which: int) -> None:
        batches, _, how = self.runs.pop(which)
        if how == "prefetched":
            batches.close()

    def finish(self, which: int) -> None:
        with self.step(f"finish {which}"):
            while self.take(which):
                pass

    def interrupt(self, which: int, place: int, within: str) -> None:
        """Ctrl-C comes somewhere in ``next``: the ``next`` behind it gives that batch."""
        with self.step(f"interrupt {which} at {place} within {within[len(OURS) - 9 :] or 'all'}"):
            batches, run, how = self.runs[which]
            end = object()
            try:
                outcome = interrupted(lambda: next(batches, end), place, within)
            except ValueError as error:
                self.given(run, how, error)
                return
            assert outcome.reached == outcome.interrupted, "Ctrl-C was swallowed"
            if outcome.interrupted:
                self.write("  it came")
                # What was being sent may be under way, so that its shard is read again.
                self.disturbed |= self.loader.num_workers > 0
                if self.what.has_state:
                    self.loader.state_dict()
                self.take(which)  # in any case one: where a thread was must not decide what follows
            elif outcome.value is end:
                self.model.stop(run)
                self.drop(which)
            else:
                self.given(run, how, outcome.value)

    def take_in_threads(self, which: int, counts: list[int]) -> None:
        """Several threads take so many batches each: each batch goes to one of them."""
        with self.step(f"threads take {counts} of {which}"):
            batches, run, how = self.runs[which]
            got: list[Any] = []
            ends: list[Any] = []

            def taking(count: int) -> None:
                for _ in range(count):
                    try:
                        got.append(next(batches))
                    except StopIteration:
                        ends.append(None)
                        return
                    except Exception as error:
                        got.append(error)

            threads = [threading.Thread(target=taking, args=(count,)) for count in counts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # The threads may have been overtaken before they wrote down what they were given.
            ordered, one_order = self.model.ordered, self.model.one_order
            self.model.ordered = self.model.one_order = False
            for outcome in got:
                if isinstance(outcome, Exception) and not isinstance(outcome, ValueError):
                    raise outcome
                self.given(run, how, outcome)
            self.model.ordered, self.model.one_order = ordered, one_order
            coming = run.place.coming
            if ordered and coming:
                last = max(run.place.rest)
                place = run.place
                fates = dict(enumerate(self.plan(place.epoch, place.passes, place.chain)))
                behind = [k for k in range(coming[0], last) if fates[k][1] != "left out"]
                assert set(behind) <= set(coming), "one is passed over"
            if ends:
                self.model.stop(run)
                self.drop(which)

    def leave(self, which: int) -> None:
        with self.step(f"leave {which}"):
            self.drop(which)

    # --- states

    def note(self) -> None:
        with self.step("note a state"):
            self.states.append((json.loads(json.dumps(self.loader.state_dict())), self.state()))

    def state(self) -> Place:
        return self.model.state()

    def _loaded(self, which: int, interrupt: int | None = None) -> None:
        state, place = self.states[which]
        self.went_on = self.disturbed = True
        self.former = self.runs[-1][0] if self.runs and self.runs[-1][2] != "prefetched" else None
        while self.runs:
            self.drop(-1)
        load = partial(self.loader.load_state_dict, copy.deepcopy(state))
        if interrupt is None or interrupted(load, interrupt).interrupted:
            load()
        self.model.load(place)

    def load(self, which: int, place: int | None) -> None:
        """Goes on from a state, in the same loader, perhaps after Ctrl-C in that."""
        with self.step(f"load state {which}, Ctrl-C at {place}"):
            self._loaded(which, place)

    def refuse(self, which: int) -> None:
        """A state that does not fit is refused, and all goes on as if it had not been there."""
        with self.step(f"load state {which}, of another seed and epoch"):
            state = copy.deepcopy(self.states[which][0])
            known = (state.get("sampler") or [None])[0]
            sampler = known and known["state"]
            other = sampler if isinstance(sampler, dict) and "seed" in sampler else state
            state["epoch"] += 1
            other["seed"] += 1
            with pytest.raises(ValueError, match="seed"):
                self.loader.load_state_dict(state)

    def look(self) -> None:
        """Nothing comes of looking."""
        with self.step("look"), contextlib.suppress(TypeError):
            len(self.loader)

    def use_former(self) -> None:
        """An iterator from before a state was loaded refuses to go on."""
        with self.step("next of the former iterator"):
            former, self.former = self.former, None
            assert former is not None
            try:
                given: Any = next(former)
            except (RuntimeError, StopIteration):
                return
            except ValueError as error:
                given = error
            raise AssertionError(f"the former iterator has given {given}")

    def move(self, which: int, way: str) -> None:
        """Goes on from a state, in a fresh loader."""
        with self.step(f"load state {which} in a fresh loader, {way}"):
            while self.runs:
                self.drop(-1)
            self.loader.close()
            self.loader, self.way = self.make(way), way
            self._loaded(which)

    def verify(self, which: int, way: str = "here") -> None:
        """Goes on from a state elsewhere, to the end of that epoch and of the next."""
        with self.step(f"verify state {which}, {way}"):
            state, place = self.states[which]
            model = copy.copy(self.model)
            if not place.begun:  # an order that is drawn there need not be drawn here
                model.draws = dict(model.draws)
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
            if by == "attribute":
                self.loader.epoch = epoch
            else:
                self.loader.set_epoch(epoch)
            self.model.set_epoch(epoch)

    def skip(self, n: int) -> None:
        with self.step(f"skip {n}"):
            live = any(run.place is self.model.latest for _, run, _ in self.runs)
            self.went_on |= not live
            self.loader.skip(n)
            self.model.skip(n, live=live)

    def resize(self, workers: int) -> None:
        with self.step(f"num_workers = {workers}"):
            self.disturbed = True
            self.loader.num_workers = workers

    def kill(self, seed: int) -> None:
        """Kills a worker of ours, by its pid."""
        with self.step(f"kill a worker, {seed}"):
            mine = psutil.Process().children()
            found = [each for each in mine if is_worker(each)]
            if found:
                self.disturbed = True
                with contextlib.suppress(psutil.NoSuchProcess):
                    random.Random(seed).choice(found).send_signal(signal.SIGKILL)

    def start(self) -> None:
        with self.step("start"):
            self.loader.start()

    def close(self) -> None:
        """Ends the loader; what is used of it from then on refuses."""
        with self.step("close"):
            self.loader.close()
            for batches, _, how in self.runs:
                try:
                    given: Any = next(batches)
                except (RuntimeError, StopIteration):
                    continue
                except ValueError as error:
                    given = error
                # What prefetch has ready was made before.
                assert how == "prefetched", f"a closed loader has given {given}"
            self.restart()

    def restart(self) -> None:
        """Begins anew with a fresh loader."""
        self.write("a fresh loader")
        self.end()
        self.shards = max(1, WAYS[self.way]["num_workers"]) if self.what.stream else 0
        self.loader, self.model = (
            self.make(self.way),
            Model(self.plan, self.model.ordered, self.has_one_order),
        )
        self.states.clear()
        self.disturbed = self.went_on = False

    def end(self) -> None:
        while self.runs:
            self.drop(-1)
        self.former = None
        self.loader.close()


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
        except ValueError as error:
            yield error


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
