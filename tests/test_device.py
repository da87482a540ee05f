"""prefetch: order, errors in their place, exact states, and a thread that is never in the way."""

from __future__ import annotations

import decimal
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from conftest import WAYS, eventually, in_a_fork, leased_slots, outcomes, printed_by, variants
from helpers import Faulty, Gate, Squares
from kinds import same

from minloader import Loader, get_worker_info, prefetch
from minloader._prefetch import prefetched

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.fixture(params=["inline", "threads"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "minloader-prefetch"]


class Gated:
    """Applied in the thread: tells what it was called on, and waits until it may go on."""

    def __init__(self) -> None:
        self.called: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.may = threading.Semaphore(0)

    def __call__(self, batch: Any) -> Any:
        self.called.put(batch)
        self.may.acquire()
        return batch


# --- order and reading ahead


@pytest.mark.parametrize("way", WAYS)
def test_order(way):
    with Loader(Squares(20), **WAYS[way]) as loader:
        for depth in (1, 3, 100):
            batches = prefetch(loader, lambda batch: batch + 1, depth)
            assert list(batches) == [n * n + 1 for n in range(20)]
        assert list(prefetch(loader, str)) == [str(n * n) for n in range(20)]


def test_any_iterable():
    """Which is read in the consumer's thread, and the function called in another one."""
    assert list(prefetch(iter("abc"), str.upper, np.int64(2))) == ["A", "B", "C"]
    assert list(prefetch([], str)) == []
    assert list(prefetch((n for n in range(3)), str)) == ["0", "1", "2"]
    here = threading.get_ident()
    assert here not in set(prefetch(range(3), lambda n: threading.get_ident()))
    assert set(prefetch((threading.get_ident() for _ in range(3)), same)) == {here}


class Keeper:
    """A function with an attribute that has no meaning here."""

    keep = 0.5

    def __call__(self, batch: int) -> float:
        return batch * self.keep


def test_attributes_of_fn_are_the_users_own():
    for source in Loader([1, 2], num_workers=0), [1, 2]:
        assert list(prefetch(source, Keeper())) == [0.5, 1.0]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_reads_no_further_ahead_than_depth(depth):
    """The source is read in the consumer's thread, when that asks for a batch."""
    gate, drawn = Gated(), []

    def source() -> Iterator[int]:
        for n in range(10):
            drawn.append(n)
            yield n

    with prefetch(source(), gate, depth) as batches:
        assert drawn == []
        for taken in range(3):
            gate.may.release()
            assert next(batches) == taken
            # While the consumer has this one, others are being made.
            assert drawn == list(range(taken + 1 + depth))
        gate.may.release(depth)


def test_is_made_while_the_consumer_works():
    gate = Gated()
    gate.may.release()
    with prefetch(range(3), gate) as batches:
        assert next(batches) == 0
        assert [gate.called.get(timeout=250) for _ in range(2)] == [0, 1]  # nobody has called next
        gate.may.release(2)
        assert list(batches) == [1, 2]


# --- arguments


@pytest.mark.parametrize(
    ("depth", "error", "message"),
    [(depth, ValueError, f"depth must be at least 1, got {depth}") for depth in (0, -1)]
    + [(depth, TypeError, "depth must be an int") for depth in (1.0, True, None, "1")],
)
def test_wrong_depths(depth, error, message):
    with pytest.raises(error, match=message):
        prefetch([1], same, depth)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="fn must be callable, got None"):
        prefetch([1], None)
    with pytest.raises(TypeError, match="batches must be iterable, got 5"):
        prefetch(5, same)
    loader = Loader(Squares())
    loader.close()
    with pytest.raises(RuntimeError, match="this Loader is closed"):
        prefetch(loader, same)
    assert eventually(lambda: not threads())


# --- errors


def test_an_error_in_the_dataset_comes_in_its_place(options):
    faults = {2: ValueError, 3: KeyError, 9: ValueError}
    with Loader(Faulty(10, faults), **options) as loader:
        for depth in (1, 3):
            found = names(prefetch(loader, same, depth))
            assert found == [0, 1, "ValueError", "KeyError", 16, 25, 36, 49, 64, "ValueError"]


def test_the_error_is_the_original_one():
    with Loader(Faulty(3, {1: ValueError}), num_workers=0) as loader:
        batches = prefetch(loader, same)
        next(batches)
        with pytest.raises(ValueError, match="item 1 is bad") as info:
            next(batches)
    assert "batch 1 of epoch 0" in info.value.__notes__[0]
    assert "in __getitem__" in str(info.value.__cause__)  # it waited for its turn
    batches.close()


def names(batches: Iterator[Any]) -> list[Any]:
    """Batches, and the names of the errors between them."""
    found = outcomes(batches)
    return [type(each).__name__ if isinstance(each, Exception) else each for each in found]


def one_and_then_an_error() -> Iterator[int]:
    yield 1
    raise ValueError("no more")


@pytest.mark.parametrize(
    ("batches", "fn", "expected"),
    [
        ([2, 0, 1], lambda n: 6 / n, [3.0, "ZeroDivisionError", 6.0]),
        ([[1], [], [2]], lambda batch: next(iter(batch)), [1, "RuntimeError", 2]),  # no end
        (one_and_then_an_error(), same, [1, "ValueError"]),
    ],
)
def test_an_error_in_fn_or_in_a_generator_comes_in_its_place(batches, fn, expected):
    assert names(prefetch(batches, fn)) == expected


def test_an_error_of_the_hand_over_comes_in_its_place():
    for source in Loader([1, 0, 2], num_workers=0), [1, 0, 2]:
        batches = prefetched(source, same, 1, receive=lambda number: 6 // number)
        assert names(batches) == [6, "ZeroDivisionError", 3]


def test_system_exit_in_fn_is_the_consumers():
    with prefetch([1, 2], lambda n: sys.exit(n)) as batches, pytest.raises(SystemExit):
        next(batches)


def test_an_error_holds_nothing_for_ever(no_collector):
    """Neither the batch it came from nor the iterator, once the error is gone; without a search
    for cycles."""
    array = np.zeros(3)
    watch = weakref.ref(array)
    batches = prefetch(iter([array]), lambda batch: batch[7])
    del array
    with pytest.raises(IndexError):
        next(batches)
    assert list(batches) == []
    seen = weakref.ref(batches)
    del batches
    assert eventually(lambda: watch() is None)
    assert seen() is None


@pytest.mark.parametrize("call", ["next", "state_dict"])
def test_an_error_that_is_still_to_come_holds_nothing(no_collector, call):
    class Source:
        given = 0

        def __iter__(self) -> Iterator[int]:
            for self.given in range(9):
                self.fail("next")
                yield self.given

        def state_dict(self) -> int:
            self.fail("state_dict")
            return self.given

        def fail(self, here: str) -> None:
            if (here, self.given) == (call, 2):
                raise ValueError(call)

    batches = prefetch(Source(), same, 3)
    assert [next(batches), next(batches)] == [0, 1]  # the third is drawn by now
    seen = weakref.ref(batches)
    del batches
    assert seen() is None


def test_an_epoch_with_an_error_still_to_come_can_be_left(no_collector):
    """Another epoch is chosen then, which is refused while batches are taken ahead."""
    with Loader(Faulty(9, {1: ValueError})) as loader:
        batches = prefetch(loader.epochs(2), same, 3)
        assert next(batches) == (0, 0)
        del batches
        loader.set_epoch(5)
        assert loader.epoch == 5


class OneWaits:
    """A stream of two shards, one of which gives nothing for as long as the other is read."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __iter__(self) -> Iterator[int]:
        if get_worker_info().id == 0:
            self.may.wait()
            return iter(())
        return iter(range(10**6))

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def test_a_shard_that_waits_does_not_keep_others_from_being_made_ready():
    stream = OneWaits()
    called: list[int] = []
    loader = Loader(stream, executor="thread", num_workers=2, in_order=False)
    with loader, prefetch(loader, called.append) as batches:
        try:
            given = (n for n, _ in enumerate(islice(batches, 1000), 1))
            assert any(len(called) > n for n in given)
        finally:
            stream.may.set()


# --- the end


def test_close(options):
    with Loader(Squares(), **options) as loader:
        batches = prefetch(loader, same)
        assert next(batches) == 0
        batches.close()
        batches.close()
        assert eventually(lambda: not threads())
        with pytest.raises(RuntimeError, match="this prefetch is closed"):
            next(batches)
        with prefetch(loader, same) as batches:
            assert next(batches) == 0
        assert eventually(lambda: not threads())
        batches = prefetch([1], same)
        assert list(batches) == [1]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)
        batches.close()
        assert list(batches) == []


def test_a_cycle_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.batches = prefetch(range(9), same)
    holder.itself = holder
    next(holder.batches)
    del holder
    gc.collect()
    assert eventually(lambda: not threads())


def test_the_source_is_let_go_in_the_consumers_thread():
    """Where its finalizers may take their time, and see errors."""
    where = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

        def __del__(self) -> None:
            where.append(threading.current_thread())

    batches = prefetch(Source(), same)
    next(batches)
    batches.close()
    del batches
    assert where == [threading.current_thread()]


def test_closing_wakes_the_consumer(monkeypatch):
    monkeypatch.setattr("minloader._prefetch.GRACE", 0.01)
    gate = Gated()
    batches = prefetch(range(3), gate)
    found: list[Any] = []

    def consume() -> None:
        try:
            next(batches)
        except RuntimeError as error:
            found.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    gate.called.get(timeout=250)
    batches.close()
    consumer.join(60)
    assert found == ["this prefetch is closed; make a new one"]
    gate.may.release()
    assert eventually(lambda: not threads())


def test_a_slow_loader_is_left_alone(tmp_path):
    """Its workers end with the loader; the thread, which sees that, ends without a word."""
    dataset = Gate(str(tmp_path / "never"))
    with Loader(dataset, [1, 0, 2], num_workers=1, prefetch_factor=1) as loader:
        batches = prefetch(loader, same)
        assert next(batches) == 1
        batches.close()
    assert eventually(lambda: not threads())


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_closing_the_loader_in_the_middle(name):
    """From the consumer's thread, at any moment of the other."""
    for rounds in range(5):
        loader = Loader(Squares(10**6), **WAYS[name])
        batches = prefetch(loader, same, 3)
        for _ in range(rounds):
            next(batches)
        loader.close()
        found = names(islice(batches, 4))  # what was ready comes first
        assert found[-1] == "RuntimeError"
        batches.close()
        assert eventually(lambda: not threads())


SCRIPTS = {
    "in the loop": """
for batch in prefetch(loader, fn, 2):
    if batch == 25:
        raise SystemExit
""",
    "at module level": """
batches = prefetch(loader, fn, 2)
print(next(batches))
""",
    "in a cycle": """
batches = prefetch(loader, fn, 2)
holder = [batches]
holder.append(holder)
print(next(batches))
del batches, holder
""",
    "in fn": """
def fn(batch):
    if batch:
        time.sleep(60)
    return batch
batches = prefetch(loader, fn)
print(next(batches))
""",
    "in a slow batch": """
loader = Loader(Slow(), range(5), num_workers=NUM_WORKERS, executor=EXECUTOR)
batches = prefetch(loader, fn)
print(next(batches))
""",
    "with an error nobody saw": """
batches = prefetch([1, 0], lambda n: 1 / n)
print(next(batches))
""",
}


@variants("name", SCRIPTS)
@variants("place", ["processes", "inline", "threads"])
def test_a_script_ends(place, name):
    """Whatever the thread is doing then; without a word on stderr."""
    options = {"executor": "process"} | WAYS[place]
    script = f"""
import time
from minloader import Loader, prefetch
NUM_WORKERS, EXECUTOR = {options["num_workers"]}, {options["executor"]!r}
class Endless:
    def __iter__(self):
        n = 0
        while True:
            yield n
            n += 1
class Slow:
    def __getitem__(self, n):
        if n:
            time.sleep(60 if NUM_WORKERS else 1)  # here it is waited for
        return n
fn = lambda batch: batch
loader = Loader(lambda n: n * n, Endless(), num_workers=NUM_WORKERS, executor=EXECUTOR)
{SCRIPTS[name]}
"""
    printed_by(script)


@pytest.mark.parametrize("runs", [False, True])
def test_an_interrupt_while_the_thread_is_started(monkeypatch, runs):
    """Whether it runs then or not: the function is called by one thread, once a batch."""
    start = threading.Thread.start
    called: list[int] = []

    def interrupted_start(thread: threading.Thread) -> None:
        monkeypatch.undo()
        if runs:
            start(thread)
        signal.raise_signal(signal.SIGINT)
        if not runs:
            start(thread)

    batches = prefetch(iter(range(4)), called.append, depth=2)
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert list(batches) == [None] * 4
    assert called == [0, 1, 2, 3]


def test_ctrl_c_in_the_consumer():
    """It interrupts next(), loses nothing, and the script ends."""
    script = """
import sys, threading
from minloader import prefetch
go = threading.Event()
def fn(n):
    go.wait()
    return n
batches = prefetch(range(3), fn)
try:
    print("ready", flush=True)
    next(batches)
except KeyboardInterrupt:
    go.set()
    print(list(batches), flush=True)
    raise SystemExit(7)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    main = Path(f"/proc/{process.pid}/wchan")  # where the kernel tells, it is in next() by then
    eventually(lambda: "futex" in main.read_text() if main.exists() else True, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert (out, err, process.returncode) == ("[0, 1, 2]\n", "", 7)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told():
    batches = prefetch(range(3), same)
    next(batches)
    answer = in_a_fork(lambda: next(batches))
    assert answer.startswith("RuntimeError")
    assert "is in another process" in answer
    assert list(batches) == [1, 2]


# --- memory


class Batch:
    """It can be seen to die."""


class Noted:
    """Makes a batch of whatever it is given."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Batch]] = []

    def __call__(self, _: Any) -> Batch:
        batch = Batch()
        self.made.append(weakref.ref(batch))
        return batch


def test_the_idle_thread_keeps_no_batch(no_collector):
    make = Noted()
    batches = prefetch(map(make, range(3)), lambda batch: None)
    next(batches)
    assert eventually(lambda: make.made[0]() is None)
    assert list(batches) == [None, None]
    assert eventually(lambda: [ref() for ref in make.made] == [None] * 3)


@pytest.mark.parametrize(
    "source", [lambda: Loader(same, range(9), num_workers=0), lambda: range(9)]
)
@pytest.mark.parametrize("end", ["close", "collect"])
def test_what_was_made_ahead_is_let_go(no_collector, source, end):
    """It may fill a device, while the loader lives on."""
    make = Noted()
    loader = source()
    batches = prefetch(loader, make, 3)
    next(batches)
    assert eventually(lambda: len(make.made) == 4)
    if end == "close":
        batches.close()
    else:
        del batches
    assert eventually(lambda: [ref() for ref in make.made] == [None] * 4)


def test_slots_are_free_again():
    """When the consumer has let go of the arrays, whatever the thread did with them."""
    with Loader(np.zeros, [(1 << 18,)] * 12, num_workers=2) as loader:
        kept = []
        for batch in prefetch(loader, lambda array: array[::2], 2):
            kept.append(batch)
        assert len(leased_slots(loader)) == 12
        del batch
        kept.clear()
        # The thread may still be on its way out of the last call.
        assert eventually(lambda: not leased_slots(loader))
        for _batch in prefetch(loader, lambda array: array.sum(), 2):
            assert len(leased_slots(loader)) <= 4 + 3  # tasks of the loader, entries of prefetch
        assert eventually(lambda: not leased_slots(loader))


# --- state


def test_the_state_counts_an_error_in_fn():
    with Loader(Squares(4), num_workers=0) as loader:
        batches = prefetch(loader, lambda n: 1 / n)
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert batches.state_dict()["batches"] == 1
        batches.close()


def test_one_prefetch_after_another():
    """As for a device after something else: both count what the consumer was given."""
    with Loader(Squares(6), num_workers=0) as loader:
        inner = prefetch(loader, same, 2)
        outer = prefetch(inner, same, 2)
        assert outer.state_dict() == loader.state_dict()
        for k, batch in enumerate(outer):
            assert batch == k * k
            assert outer.state_dict() == loader.state_dict()
            assert loader.state_dict()["batches"] == k + 1
    assert eventually(lambda: not threads())


@pytest.mark.parametrize("source", ["loader", "any"])
def test_a_prefetch_after_batches_of_another_were_taken(options, source):
    """As after a look at the first batch: both functions are called on each of those behind it, and
    between them what the first does as it hands a batch over (``to_device`` waits for its copy)."""
    with Loader(Squares(8), **options) as loader:
        batches = loader if source == "loader" else [k * k for k in range(8)]
        inner = prefetched(batches, lambda number: [str(number)], 3, receive=lambda made: made[0])
        assert [next(inner), next(inner)] == ["0", "1"]
        outer = prefetch(inner, lambda text: text + "!", 2)
        assert list(outer) == [f"{k * k}!" for k in range(2, 8)]
    assert eventually(lambda: not threads())


def test_an_error_that_was_taken_ahead_has_its_place_in_another_prefetch():
    with Loader(Squares(4), num_workers=0) as loader:
        inner = prefetch(loader, lambda n: 6 // (n - 4), 3)
        assert next(inner) == -2
        outer = prefetch(inner, lambda n: n * 10)
        given = outcomes(outer)
        assert (given[0], type(given[1]), given[2]) == (-20, ZeroDivisionError, 10)
        inner.close()
        with pytest.raises(RuntimeError, match="this prefetch is closed"):
            prefetch(inner, same)


class Foreign:
    """Another library's loader, whose states show what goes on changing."""

    def __init__(self) -> None:
        self.state = {"at": {"batches": 0}}

    def __iter__(self) -> Iterator[int]:
        for n in range(5):
            self.state["at"]["batches"] += 1
            yield n

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_the_state_of_another_librarys_loader():
    batches = prefetch(Foreign(), same, 3)
    assert batches.state_dict() == {"at": {"batches": 0}}
    for n in batches:
        assert batches.state_dict() == {"at": {"batches": n + 1}}


def test_a_state_that_cannot_be_had_stops_nothing():
    class Unable(Foreign):
        def state_dict(self) -> dict[str, Any]:
            if self.state["at"]["batches"] == 2:
                raise NotImplementedError("not now")
            return super().state_dict()

    batches = prefetch(Unable(), same)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(NotImplementedError, match="not now"):
        batches.state_dict()
    assert list(batches) == [2, 3, 4]
    assert batches.state_dict() == {"at": {"batches": 5}}


def test_without_a_state():
    with Loader(Squares(3), num_workers=0) as loader:
        for batches in (prefetch([1], same), prefetch((each for each in loader), same)):
            with pytest.raises(TypeError, match="give it the Loader itself"):
                batches.state_dict()
            list(batches)


def test_the_loader_may_be_asked_meanwhile():
    """From the consumer's thread, while the other draws as fast as it can."""
    with Loader(Squares(300), executor="thread", num_workers=2, prefetch_factor=8) as loader:
        for k, _ in enumerate(prefetch(loader, same, 8)):
            assert loader.state_dict()["batches"] == k + 1
            assert loader.stats.batches == k + 1
            assert len(loader) == 300


def test_the_function_may_ask_where_the_consumer_is_and_not_skip(options):
    with Loader(Squares(3), **options) as loader:
        states = list(prefetch(loader, lambda _: loader.state_dict(), 2))
        assert [state["epoch"] for state in states] == [0, 0, 0]
        for error in outcomes(prefetch(loader, lambda _: loader.skip(1), 2)):
            assert isinstance(error, RuntimeError)
            assert "skip is refused" in str(error)
        assert loader.state_dict()["epoch"] == 2


def test_the_function_may_not_ask_for_a_batch():
    for source in Loader(Squares(3), num_workers=0), range(3):
        with prefetch(source, lambda _: next(batches), 2) as batches:
            for _ in range(3):
                with pytest.raises(RuntimeError, match="call next in the loop"):
                    next(batches)
            assert list(batches) == []


def test_the_function_has_the_context_of_the_caller():
    with decimal.localcontext(prec=5), np.errstate(divide="raise"):
        batches = prefetch(range(1, 4), lambda n: (decimal.Decimal(1) / 3, np.geterr()["divide"]))
    assert list(batches) == [(decimal.Decimal("0.33333"), "raise")] * 3
