"""Random programs by hypothesis: its rules are what a program may do."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interrupts import Deadline, TimeLimit

from .programs import (
    DATASETS,
    KINDS,
    ON_ERROR,
    WAYS,
    WITHIN,
    Break,
    Kind,
    Program,
    Refused,
    end_executors,
)

HERE = ["here"]
THREADS = ["thread", "threads", "three threads"]
PROCESSES = ["process", "processes"]
USERS = ["user's threads", "user's processes"]

counts: Counter[str] = Counter()
"""How often each rule was used by all programs of this process, and how many there were."""

failures: list[BaseException] = []
"""What was wrong in programs of this process."""

some = st.integers(0, 2)

seeds = st.sampled_from([0, 0, 7, None])

places = st.integers(0, 150) | st.integers(0, 1_500)

break_in = st.builds(
    Break, places, st.sampled_from([KeyboardInterrupt, Deadline]), st.sampled_from(WITHIN)
) | st.builds(Break, places, st.just(TimeLimit), st.sampled_from(WITHIN[:2]))
"""In what user's code has called, an Exception would take the place of a batch."""

seldom_broken = st.none() | st.none() | break_in
"""What breaks into a call; None: nothing does."""


class Programs(RuleBasedStateMachine):
    """A program, of one step after the other."""

    ways = (*HERE, *THREADS, USERS[0])
    kinds = tuple(KINDS)

    def __init__(self) -> None:
        super().__init__()
        self.program: Program

    @initialize(data=st.data())
    def begin_program(self, data: Any) -> None:
        kind = data.draw(st.sampled_from(self.kinds), label="kind")
        what = KINDS[kind]
        way = data.draw(st.sampled_from(self.ways_of(what)), label="way")
        # At least three batches, of which at most two do not come: else that is an error.
        n = data.draw(st.integers(12, 17) | st.integers(30, 60), label="n")
        indices = st.frozensets(st.integers(0, n - 1), max_size=1)
        bad, left_out, slow = (data.draw(indices, label=what) for what in ("bad", "skip", "slow"))
        fate = data.draw(st.sampled_from(list(ON_ERROR)), label="fate")
        options = self.drawn_options(data) | {"seed": data.draw(seeds, label="seed")}
        dataset, collated = "plain", False
        if what.stream and not what.repeatable:  # where a batch is, and what is beside it, depends
            bad = frozenset()
        elif what.stream:
            collated = data.draw(st.booleans(), label="collated")
            if collated:
                options["batch_size"] = data.draw(st.integers(1, 3), label="batch_size")
                options["last_batch"] = data.draw(st.sampled_from(["keep", "discard"]))
        else:
            dataset = data.draw(st.sampled_from(datasets_of(what)), label="dataset")
            must = dataset == "cached" or what.options
            collated = what.lists and (must or data.draw(st.booleans(), label="collated"))
        counts["programs"] += 1
        how = fate, options, dataset, bool(collated)
        self.program = Program(kind, way, n, bad, left_out - bad, slow, *how)

    def drawn_options(self, data: Any) -> dict[str, Any]:
        """What may be another in a loader that goes on from a state."""
        in_order = st.sampled_from([True, True, True, False])
        return {
            "prefetch_factor": data.draw(st.integers(1, 3), label="prefetch_factor"),
            "in_order": data.draw(in_order, label="in_order"),
        }

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[Program]:
        counts[name] += 1
        try:
            yield self.program
        except Refused:
            counts["refused"] += 1
            self.program.restart()
        except BaseException as error:
            error.add_note("\n".join(["the program:", *self.program.steps]))
            failures.append(error)
            raise

    def teardown(self) -> None:
        if not hasattr(self, "program"):
            return
        try:
            for which in range(len(self.program.states))[-2:]:
                with self.noted("verify at the end") as program:
                    program.verify(which, self.elsewhere)
                if not self.program.states:
                    break
        finally:
            with self.noted("end") as program:
                program.end()

    # --- what is possible

    def ways_of(self, what: Kind) -> list[str]:
        """With 0 workers, a stream that must be opened for its shard has one copy only."""
        without = USERS * what.stream + HERE * what.opened
        return [way for way in self.ways if way not in without]

    @property
    def elsewhere(self) -> str:
        return "threads" if self.program.what.opened else "here"

    @property
    def live(self) -> int:
        return len(self.program.runs) if hasattr(self, "program") else 0

    @property
    def can_begin(self) -> bool:
        what = self.program.what
        only = what.alone or what.sequential or self.in_epochs
        return self.live < 3 and not (self.live and only)

    @property
    def in_epochs(self) -> bool:
        return any(how != "iter" for _, _, how in self.program.runs)

    def possible(self, breaks: Break | None) -> Break | None:
        """What may break in: not what has the sampler read again, if it cannot be."""
        if breaks is None or breaks.raises is KeyboardInterrupt or self.program.what.has_state:
            return breaks
        return None

    # --- rules

    @precondition(lambda self: self.can_begin)
    @rule(breaks=seldom_broken, count=st.integers(0, 4))
    def begin(self, breaks: Break | None, count: int) -> None:
        breaks = self.possible(breaks)
        if not self.program.what.has_state:  # what it raised then, it does not raise once more
            breaks = None
        with self.noted("iter" if breaks is None else f"{came(breaks)} in iter") as program:
            program.begin("iter", breaks=breaks)
        if count and self.live:  # it may be that an alarm kept it from beginning
            self.take(-1, count)

    @precondition(lambda self: self.can_begin and not self.live)
    @rule(epochs=st.integers(1, 3), breaks=seldom_broken)
    def begin_epochs(self, epochs: int, breaks: Break | None) -> None:
        with self.noted("epochs") as program:
            program.begin("epochs", epochs, breaks=self.possible(breaks))

    @precondition(lambda self: self.can_begin and not self.live)
    @rule(epochs=st.integers(1, 3), depth=st.integers(1, 3), breaks=seldom_broken)
    def begin_prefetch(self, epochs: int, depth: int, breaks: Break | None) -> None:
        with self.noted("prefetch") as program:
            program.begin("prefetched", epochs, depth, self.possible(breaks))

    @precondition(lambda self: self.live)
    @rule(which=some, count=st.integers(1, 4) | st.integers(5, 40))
    def take(self, which: int, count: int) -> None:
        with self.noted("next") as program, program.step(f"take {count} of {which % self.live}"):
            program.take(which % self.live, count)

    @precondition(lambda self: self.live)
    @rule(which=some)
    def finish(self, which: int) -> None:
        with self.noted("next to the end") as program:
            program.finish(which % self.live)

    @precondition(lambda self: self.live)
    @rule(
        which=some,
        breaks=st.lists(break_in, min_size=1, max_size=4),
        at_once=st.booleans(),
        noted=st.booleans(),
    )
    def interrupt(self, which: int, breaks: list[Break], at_once: bool, noted: bool) -> None:
        """Several times: before the ``next`` that makes the first good has ended, or behind it."""
        breaks = [each for each in breaks if self.possible(each)]
        for those in [breaks] if at_once else [[each] for each in breaks]:
            if self.live and those:
                often = "twice" if those[1:] else "once"
                with self.noted(f"{came(those[0])} {often} in next") as program:
                    program.interrupt(which % self.live, those, noted)

    @precondition(lambda self: self.live and not self.in_epochs)
    @rule(which=some, numbers=st.lists(st.integers(1, 5), min_size=2, max_size=3))
    def take_in_threads(self, which: int, numbers: list[int]) -> None:
        with self.noted("next in threads") as program:
            program.take_in_threads(which % self.live, numbers)

    @precondition(
        lambda self: self.live and not self.program.what.alone and self.program.what.repeatable
    )
    @rule(which=some)
    def leave(self, which: int) -> None:
        with self.noted("leave") as program:
            which %= self.live
            if program.runs[which][1].place.coming:  # else its stream may have counted, or not
                program.leave(which)
            else:
                program.finish(which)

    @precondition(
        lambda self: self.program.what.has_state and self.program.steps[-1] != "note a state"
    )
    @rule(look=st.booleans())
    def note(self, look: bool) -> None:
        with self.noted("state_dict") as program:
            if look:
                program.look()
            program.note()

    @precondition(lambda self: self.program.what.may_be_looked_at)
    @rule()
    def look_at_sampler(self) -> None:
        with self.noted("next of the sampler by somebody") as program:
            program.look_at_sampler()

    @precondition(lambda self: self.program.states)
    @rule(which=st.integers(0, 9), breaks=seldom_broken)
    def load(self, which: int, breaks: Break | None) -> None:
        with self.noted("load_state_dict") as program:
            program.load(which % len(program.states), breaks)

    @precondition(lambda self: self.program.states and self.program.options["seed"] is not None)
    @rule(which=st.integers(0, 9))
    def refuse(self, which: int) -> None:
        with self.noted("a state that is refused") as program:
            program.refuse(which % len(program.states))

    @precondition(lambda self: self.program.former is not None)
    @rule()
    def use_former(self) -> None:
        with self.noted("next after load_state_dict") as program:
            program.use_former()

    @precondition(lambda self: self.program.states)
    @rule(which=st.integers(0, 9), data=st.data())
    def move(self, which: int, data: Any) -> None:
        what, options = self.program.what, self.drawn_options(data)
        way = data.draw(st.sampled_from(self.ways_of(what)), label="way")
        if not what.repeatable:
            del options["in_order"]
        with self.noted("load_state_dict elsewhere") as program:
            program.move(which % len(program.states), way, **options)

    @precondition(lambda self: self.program.states)
    @rule(which=st.integers(0, 9))
    def verify(self, which: int) -> None:
        with self.noted("a state leads to the rest") as program:
            program.verify(which % len(program.states), self.elsewhere)

    @precondition(lambda self: not self.program.what.sequential and not self.in_epochs)
    @rule(epoch=st.integers(0, 3), by=st.sampled_from(["set_epoch", "attribute"]))
    def set_epoch(self, epoch: int, by: str) -> None:
        with self.noted("set_epoch") as program:
            program.set_epoch(epoch, by)

    @precondition(lambda self: self.program.can_skip)
    @rule(n=st.integers(0, 3) | st.integers(4, 40))
    def skip(self, n: int) -> None:
        with self.noted("skip") as program:
            program.skip(n)

    @rule(data=st.data())
    def resize(self, data: Any) -> None:
        most = 2 if self.program.loader.stats.workers.executor == "process" else 3
        least = int(self.program.what.opened)
        workers = data.draw(st.integers(least, most), label="workers")
        with self.noted("num_workers") as program:
            program.resize(workers)

    @precondition(lambda self: self.program.loader.stats.workers.executor == "process")
    @rule(seed=st.integers(0, 9))
    def kill(self, seed: int) -> None:
        with self.noted("kill a worker") as program:
            program.kill(seed)

    @precondition(lambda self: "start" not in self.program.steps)
    @rule()
    def start(self) -> None:
        with self.noted("start") as program:
            program.start()

    @precondition(lambda self: self.program.steps[7:])
    @rule(seldom=st.integers(0, 5), stopped=st.booleans())
    def close(self, seldom: int, stopped: bool) -> None:
        if seldom == 5:
            with self.noted("close") as program:
                program.close(stopped)

    @precondition(lambda self: self.live and self.program.steps[7:])
    @rule(which=some, seldom=st.integers(0, 5))
    def close_meanwhile(self, which: int, seldom: int) -> None:
        if seldom == 5:
            with self.noted("close while a thread takes batches") as program:
                program.close_meanwhile(which % self.live)

    @precondition(lambda self: self.can_begin and self.program.way not in USERS)
    @rule(seldom=st.integers(0, 20))
    def fork(self, seldom: int) -> None:
        if seldom == 10:
            with self.noted("fork") as program:
                program.fork()


class ProgramsInProcesses(Programs):
    """The same with worker processes, most of the time."""

    ways = (*PROCESSES, *PROCESSES, "here", "threads", *USERS)


def came(breaks: Break) -> str:
    return "Ctrl-C" if breaks.raises is KeyboardInterrupt else "an alarm"


def datasets_of(what: Kind) -> list[str]:
    """How the samples of a sampler can be read: a cache takes numbers alone."""
    return ["plain", "plain", *(name for name in DATASETS if what.numbers or name != "cached")]


def run_programs(machine: Any, number: int, options: settings) -> None:
    """Runs so many programs, from the seed of that number.

    Hypothesis begins some as it has begun others, and ends if something is not as it was then,
    such as what a busy machine has refused. Then others are run in the place of those left.
    """
    end = counts["programs"] + options.max_examples
    failures.clear()
    while (left := end - counts["programs"]) > 0:
        try:
            those = settings(options, max_examples=left)
            run_state_machine_as_test(seed(number)(machine), settings=those)
            return
        except FlakyStrategyDefinition:
            if failures:
                raise failures[0] from None
            number += 1_000_000
        finally:
            end_executors()


assert set(HERE + THREADS + PROCESSES + USERS) == set(WAYS)
