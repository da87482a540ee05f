"""Several batches in one task: nobody may notice, but for the clock."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
from conftest import EXECUTORS, outcomes
from helpers import (
    AllNoise,
    Bomb,
    Broken,
    Echo,
    Faulty,
    LateSlow,
    Squares,
    exit_at,
    refuse,
    sized,
)
from kinds import Reusing

from minloader import SKIP, BatchError, Loader, get_worker_info
from minloader._diagnosis.inspect import inspect
from minloader._epochs.feed import SamplerFeed
from minloader._epochs.lane import CHUNK_BYTES, MAX_CHUNK
from minloader._pools.ticket import Bell, Ticket
from minloader._worker.messages import CHUNK_SECONDS, TaskMessage

pytestmark = pytest.mark.usefixtures("quick_starts")


N = 60
CHUNK = 8

# In the calling process nothing is sent.
away = pytest.mark.parametrize("make", [n for n in EXECUTORS if n != "inline"], indirect=True)


@pytest.fixture
def chunks(make, monkeypatch):
    """Makes loaders that send eight items or more at once, however slow this machine is.

    ``chunks.sent`` are the first ordinals and the sizes of their tasks.
    """
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)

    def factory(*args: Any, **options: Any) -> Loader:
        loader = make(*args, chunks=True, **options)  # no sampler here looks at the loop
        record(loader, factory.sent)
        return loader

    factory.sent = []  # type: ignore[attr-defined]
    factory.remote = "process" in make.name  # type: ignore[attr-defined]
    yield factory
    assert max(size for _, size in factory.sent) >= CHUNK


def record(loader: Loader, sent: list[tuple[int, int]]) -> None:
    """Writes down what is sent to workers, or would have been."""
    (pool,) = inspect(loader).group.pools
    submit = pool.submit

    def recording(task: TaskMessage, bell: Bell) -> Ticket:
        sent.append((task.ordinal, len(task.items)))
        return submit(task, bell)

    pool.submit = recording  # type: ignore[method-assign]


def epoch_of(loader: Loader, size: int = CHUNK) -> Any:
    """An epoch that has found out already that batches are quick."""
    epoch = iter(loader)
    for lane in epoch.epoch.lanes:
        lane._chunk = size
    return epoch


# --- it happens by itself, where it is worth it ------------------------------------------------


def test_tiny_batches_travel_together(make, monkeypatch):
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    loader, sent = make(Squares(), range(1000)), []
    record(loader, sent)
    assert list(loader) == [n * n for n in range(1000)]
    first = max(2 * loader.num_workers, 1)
    assert [size for _, size in sent[:first]] == [1] * first
    assert sum(size for _, size in sent) >= 1000
    if make.name != "inline":
        assert 1 < max(size for _, size in sent) <= MAX_CHUNK
        assert loader.stats.workers.chunk_size > 1
        assert len(sent) < 500


def test_an_epoch_begins_with_what_the_last_one_found_out(chunks):
    loader = chunks(Squares(), range(N))
    assert len(list(epoch_of(loader))) == N
    before = len(chunks.sent)
    assert next(iter(loader)) == 0
    share = MAX_CHUNK // (2 * loader.num_workers) if loader.num_workers else 1
    assert chunks.sent[before] == (0, min(N, share))


class SlowSecond:
    """A stream whose second epoch comes to a stop at its third sample, until a gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        for n in range(400):
            info = get_worker_info()
            assert info is not None
            if info.epoch == 1 and n == 2:
                assert self.gate.wait(60)
            yield n


def test_an_epoch_of_a_stream_begins_with_one_batch(monkeypatch):
    """The last one may have ended with quick batches, of a buffer, which tell nothing of it."""
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    gate = threading.Event()
    with Loader(SlowSecond(gate), num_workers=1, executor="thread") as loader:
        assert list(loader) == list(range(400))
        assert loader.stats.workers.chunk_size > 1
        batches = iter(loader)
        assert next(batches) == 0  # it does not wait for the third
        gate.set()
        assert list(batches) == list(range(1, 400))


@pytest.mark.parametrize("shared_memory", [True, False, 100])
def test_large_batches_travel_alone(shared_memory):
    sent: list[Any] = []
    items = [(n, CHUNK_BYTES + 1000) for n in range(60)]
    with Loader(sized, items, num_workers=2, shared_memory=shared_memory) as loader:
        record(loader, sent)
        for n, batch in enumerate(loader):
            assert (batch == n).all()
    assert [size for _, size in sent] == [1] * 60


def test_batches_share_a_slot_and_no_memory():
    sent: list[Any] = []
    with Loader(sized, [(n, 20_000) for n in range(N)], num_workers=2) as loader:
        record(loader, sent)
        kept = []
        for n, batch in enumerate(epoch_of(loader)):
            assert (batch == n).all()
            batch += 1000
            kept.append(batch)
        assert all((batch == n + 1000).all() for n, batch in enumerate(kept))
        assert len(sent) < N
        assert loader.stats.memory.slots <= len(sent) + 4


# --- each batch is on its own ------------------------------------------------------------------


@away
def test_randomness_is_of_the_batch(chunks):
    with Loader(AllNoise(), range(N), num_workers=0, seed=4) as loader:
        expected = [list(loader), list(loader)]
    loader = chunks(AllNoise(), range(N), seed=4)
    for epoch in expected:
        batches = list(epoch_of(loader))
        # Threads share the global generators.
        own = slice(None) if chunks.remote else slice(5)
        assert [batch[own] for batch in batches] == [batch[own] for batch in epoch]


def replace(error: BatchError) -> Any:
    assert isinstance(error.__cause__, ValueError)
    return SKIP if error.ordinal % 2 else (error.ordinal, error.item, error.epoch)


@away
@pytest.mark.parametrize("on_error", ["raise", "skip", replace])
def test_errors_are_of_their_batch_alone(chunks, on_error):
    faults = {n: ValueError for n in range(100, 100 + N) if n % 7 == 3}
    loader = chunks(Faulty(0, faults), range(100, 100 + N), on_error=on_error)
    found = outcomes(epoch_of(loader))
    expected: list[Any] = []
    for n in range(N):
        if n + 100 not in faults:
            expected.append((n + 100) ** 2)
        elif on_error == "raise":
            error = found[n]
            assert (type(error), str(error)) == (ValueError, f"item {n + 100} is bad")
            assert f"batch {n} of epoch 0, item {n + 100}," in error.__notes__[0]
            expected.append(error)
        elif on_error is replace and n % 2 == 0:
            expected.append((n, n + 100, 0))
    assert found == expected


@away
@pytest.mark.parametrize("bad", [threading.Lock(), Bomb()], ids=["pickling", "unpickling"])
def test_an_item_that_cannot_travel_takes_no_other_along(chunks, bad):
    items = [bad if n in (17, 45) else n for n in range(N)]
    found = outcomes(epoch_of(chunks(Echo(), items)))
    assert len(found) == N
    for n, (outcome, item) in enumerate(zip(found, items, strict=True)):
        if item is not bad:
            assert outcome == n
        elif isinstance(outcome, Exception):
            assert str(outcome) in ("the item went off", "cannot pickle '_thread.lock' object")
            assert f"batch {n} of epoch 0" in outcome.__notes__[0]
            assert "in the executor" not in outcome.__notes__[0]
        else:
            assert (outcome, chunks.remote) == (bad, False)


def stumble(n: int) -> int:
    if n in (20, 21, 45):
        raise LookupError(f"draw {n}")
    return n


@away
def test_an_error_of_the_sampler_has_its_turn(chunks):
    found = outcomes(epoch_of(chunks(Echo(), map(stumble, range(N)))))
    texts = {n: f"draw {n}" for n in (20, 21, 45)}
    assert [str(each) if isinstance(each, Exception) else each for each in found] == [
        texts.get(n, n) for n in range(N)
    ]
    assert found[20].__notes__ == ["minloader: raised by the sampler, epoch 0"]


@pytest.mark.parametrize("make", [n for n in EXECUTORS if "process" in n], indirect=True)
def test_an_item_is_what_it_was_when_it_was_drawn(chunks):
    batches = list(epoch_of(chunks(Echo(), Reusing(2 * N))))
    assert batches == [[n, n + 1] for n in range(0, 2 * N, 2)]


@away
def test_epochs_left_early_and_several_at_once(chunks):
    loader = chunks(Squares(), sampler := Endless())
    expected = [n * n for n in range(N)]
    for _ in range(3):
        assert list(islice(epoch_of(loader), N)) == expected
    one, other = epoch_of(loader), epoch_of(loader, 2 * CHUNK)
    assert list(islice(zip(one, other, strict=True), N)) == [
        (square, square) for square in expected
    ]
    assert sampler.most < 2 * N + (2 * loader.num_workers + 1) * MAX_CHUNK


class Endless:
    """Infinite, and knows how far it was read at most."""

    most = 0

    def __iter__(self) -> Any:
        for n in count():
            self.most = max(self.most, n)
            yield n


@pytest.mark.parametrize("make", ["thread", "foreign-thread"], indirect=True)
def test_a_batch_that_exits_is_one_batch(chunks):
    found = outcomes(epoch_of(chunks(exit_at, range(N))))
    assert [each.item if isinstance(each, BatchError) else each for each in found] == [*range(N)]
    assert [type(each) for each in found].count(BatchError) == N // 10


@away
@pytest.mark.parametrize(
    ("dataset", "init", "text"),
    [(Broken(), None, "the item went off"), (Squares(), refuse, "the worker refuses")],
)
def test_a_worker_that_is_of_no_use_says_so_for_each_batch(chunks, dataset, init, text):
    if not chunks.remote and init is None:
        dataset, init, text = Squares(), refuse, "the worker refuses"  # nothing is loaded
    loader = chunks(dataset, range(N), worker_init_fn=init, on_error="skip")
    found = outcomes(epoch_of(loader))
    assert [str(error) for error in found] == [text] * N
    for n, error in enumerate(found):
        # In a thread it is the same error each time, with a note for each batch.
        assert f"batch {n} of epoch 0" in "".join(error.__notes__)


# --- slow batches, slow samplers ---------------------------------------------------------------


@away
def test_a_slow_batch_in_a_chunk_changes_no_order(chunks):
    for slow in (range(20, 21), range(20, 24), range(50, N)):
        dataset = LateSlow(slow.start, slow.stop, 3 * CHUNK_SECONDS)
        assert list(epoch_of(chunks(dataset, range(N)))) == list(range(N))


@away
def test_slow_batches_end_the_chunks_at_once(make, monkeypatch):
    draw = SamplerFeed.draw

    def draw_all(self: SamplerFeed, task: Any, hold: Any, most: int, until: float) -> None:
        draw(self, task, hold, most, math.inf)  # a busy machine is no slow sampler

    monkeypatch.setattr(SamplerFeed, "draw", draw_all)
    sent: list[Any] = []
    loader = make(LateSlow(10, 40, 10 * CHUNK_SECONDS), range(40))
    record(loader, sent)
    epoch = epoch_of(loader, 64)
    for n in range(40):
        assert next(epoch) == n
        assert n < 10 or loader.stats.workers.chunk_size <= 4
        # What a chunk left undone is not made all at once, which could take much memory.
        assert len({ordinal for ordinal, _ in sent if ordinal > n}) <= 16
    assert max(size for _, size in sent) > 16  # cut short by the worker
    assert loader.stats.workers.chunk_size == 1


def test_a_slow_sampler_is_not_read_ahead_for_a_chunk(make):
    def slow() -> Any:
        for n in range(20):
            threading.Event().wait(2 * CHUNK_SECONDS)
            yield n

    sent: list[Any] = []
    loader = make(Squares(), slow())
    record(loader, sent)
    assert list(epoch_of(loader)) == [n * n for n in range(20)]
    assert len(sent) == 20
