"""Streams are read once: their batches, copies and states, whatever comes in between."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from conftest import lists, outcomes, plain, require, variants, workers
from helpers import Numbers, Refuses, StatefulIterator, StatefulNumbers
from kinds import (
    IDIOMS,
    PASS,
    FailsWhen,
    Noisy,
    Opened,
    OwnOrder,
    Passes,
    Sometimes,
    Steady,
    open_stream,
    shard_of,
)
from test_streams import in_turns

from minloader import Loader, get_worker_info, shuffled
from minloader._epochs import shard_feed
from minloader._pools.threads import ThreadPool
from minloader._pools.ticket import Bell

pytestmark = pytest.mark.usefixtures("quick_starts")

ways = pytest.mark.parametrize("way", ["thread", "process"])


def samples(batches: Any) -> list[Any]:
    return sorted(itertools.chain.from_iterable(lists(batches)))


# --- an undisturbed epoch -------------------------------------------------------------------------


@ways
@variants("epochs", [True, False])
def test_every_sample_of_an_undisturbed_epoch_comes_once(way, epochs):
    """Of streams whose order is their own, while tasks are cut short, as on a busy machine."""
    n = 1_800
    stream = OwnOrder(n, Sometimes(150))
    with Loader(stream, batch_size=4, num_workers=2, executor=way) as loader:
        for _ in range(2):
            if epochs:
                given: dict[int, Counter[int]] = {}
                for epoch, batch in loader.epochs(2):
                    given.setdefault(epoch, Counter()).update(batch.tolist())
                counts = list(given.values())
            else:
                counts = [Counter(samples(loader))]
            for count in counts:
                assert [(k, count[k]) for k in range(n) if count[k] != 1] == []
        assert loader.stats.errors.reread == 0


@variants(
    ("way", "stream"),
    [
        ("thread", Numbers),
        ("thread", IDIOMS[0]),
        ("process", IDIOMS[0]),
        *itertools.product(["thread", "process"], IDIOMS[1:]),
    ],
    quick=3,
)
def test_an_undisturbed_epoch_reads_nothing_again(way, stream):
    """Nor does a stream with a state."""
    n = 1_200
    with Loader(
        stream(n, Sometimes(100)), batch_size=2, num_workers=2, executor=way, prefetch_factor=3
    ) as loader:
        for epoch in range(2):
            part = 100 * epoch if stream is not Numbers else 0
            expected = [[part + number for number in batch] for batch in in_turns(n, 2, 2)]
            assert lists(loader) == expected
        assert loader.stats.errors.reread == 0


@pytest.mark.slow
def test_a_shuffled_stream_of_hugging_face_comes_once():
    datasets = require("datasets")
    require("torch")
    from minloader.torch import DataLoader

    def generate(parts: list[int]) -> Iterator[dict[str, int]]:
        for part in parts:
            for number in range(part, 1_200, 4):
                Sometimes(100)(number)
                yield {"number": number}

    stream = datasets.IterableDataset.from_generator(
        generate, gen_kwargs={"parts": list(range(4))}
    ).shuffle(seed=3, buffer_size=50)
    with DataLoader(stream, batch_size=4, num_workers=2) as loader:
        for epoch in range(3):
            stream.set_epoch(epoch)
            given = Counter(int(number) for batch in loader for number in batch["number"])
            assert given == Counter(range(1_200))


@ways
def test_no_more_tasks_than_were_asked_for(way, monkeypatch):
    """With more shards than workers too."""
    # Or it lasts until the former ones are done.
    monkeypatch.setattr(shard_feed, "MAX_SHARD_CHUNK", 1)
    with Loader(Steady(600), num_workers=4, executor=way, prefetch_factor=2) as loader:
        batches, given = iter(loader), []
        for count in (4, 1, 3):
            loader.num_workers = count
            # What was under way before is finished where it is.
            given += itertools.islice(batches, 60)
            for _ in range(60):
                given.append(next(batches))
                assert loader.stats.workers.in_flight <= 2 * count
        given += batches
    assert given == list(range(600))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_more_shards_than_tasks_under_way(monkeypatch, num_workers):
    """As after a resume with fewer workers: what is taken next is sent first, and no more."""
    monkeypatch.setattr(shard_feed, "MAX_SHARD_CHUNK", 1)
    sent: list[int] = []
    waited: list[int] = []
    submit = ThreadPool.submit
    wait = Bell.wait

    def note_sent(self: Any, task: Any, bell: Any) -> Any:
        sent.append(task.ordinal)
        return submit(self, task, bell)

    def note_waited(self: Any, seconds: float | None = None) -> None:
        waited.append(loader.stats.workers.in_flight)
        wait(self, seconds)

    options: dict[str, Any] = {"executor": "thread", "prefetch_factor": 1}
    with Loader(Steady(80), num_workers=8, **options) as loader:
        state = loader.state_dict()
        expected = list(loader)
    monkeypatch.setattr(ThreadPool, "submit", note_sent)
    monkeypatch.setattr(Bell, "wait", note_waited)
    with Loader(Steady(80), num_workers=num_workers, **options) as loader:
        loader.load_state_dict(state)
        assert list(loader) == expected
    assert sent == sorted(sent)
    assert max(waited, default=0) <= num_workers


# --- read again -----------------------------------------------------------------------------------


def resumed_states(make: Callable[[], Any], **options: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Each fifth state of an epoch, and the batches that came after it."""
    with Loader(make(), **options) as loader:
        states, given = [], []
        for batch in loader:
            given.append(batch.tolist())
            states.append(plain(loader.state_dict()))
    for k in range(2, len(states) - 1, 5):
        yield states[k], given[k + 1 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_reads_otherwise_again_is_refused(workers):
    """A resumed run gives the rest of the same stream, or an error."""
    options: dict[str, Any] = {"batch_size": 40, "executor": "thread"}
    for state, _ in resumed_states(lambda: OwnOrder(2_000), num_workers=2, **options):
        with Loader(OwnOrder(2_000), num_workers=workers, **options) as loader:
            loader.load_state_dict(state)
            with pytest.raises(Exception, match=r"stream|dataset"):
                list(loader)


@pytest.mark.parametrize(
    ("way", "shards", "stream"),
    [
        ("inline", 1, Steady),
        ("thread", 2, Steady),
        ("process", 1, OwnOrder),
        ("process", 2, StatefulNumbers),
    ],
)
def test_two_iterators_in_turns_read_each_pass_once(way, shards, stream):
    """As zip(loader, loader); in the first epoch, and behind one that both follow."""
    options: Any = {"num_workers": 0} if way == "inline" else {"executor": way}
    with Loader(stream(60), batch_size=2, **{"num_workers": shards, **options}) as loader:
        for _ in range(2):
            passes = zip(loader, loader, strict=True)
            for given in zip(*passes, strict=True):
                assert samples(given) == list(range(60))
            assert samples(loader) == list(range(60))
        assert loader.stats.errors.reread == 0


def test_a_pass_that_was_left_is_closed_while_an_older_one_goes_on(tmp_path):
    """With the next pass that begins."""

    class Open:
        def __iter__(self) -> Iterator[int]:
            path = tmp_path / str(len(list(tmp_path.iterdir())))
            path.touch()
            try:
                yield from range(1000)
            finally:
                path.rename(path.with_suffix(".closed"))

    with Loader(Open(), num_workers=1, mp_context="fork") as loader:
        older, left = iter(loader), iter(loader)
        assert next(older) == next(left) == 0
        del left
        newest = iter(loader)
        assert [next(older), next(newest), next(older)] == [1, 0, 2]
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"0", "1.closed", "2"}


class Named(str):
    """A string, as numpy's are."""


FORMS: dict[str, Any] = {
    "another kind of string": lambda number: Named(number),
    "behind what is neither number nor string": lambda number: {"image": object(), "label": number},
}


OTHERS = r"other samples.*; or is the state that of another rank\?"


@pytest.mark.parametrize("form", FORMS)
def test_the_first_number_or_string_tells_streams_apart(form):
    def stream(first: int) -> Any:
        return Steady(20, lambda number: FORMS[form](first + number))

    with Loader(stream(0), num_workers=1, executor="thread") as loader:
        next(iter(loader))
        state = loader.state_dict()
    for first in 0, 1:
        with Loader(stream(first), num_workers=1, executor="thread") as loader:
            loader.load_state_dict(state)
            with pytest.raises(RuntimeError, match=OTHERS) if first else nullcontext():
                assert len(list(loader)) == 19


@pytest.mark.slow
def test_a_stream_that_reads_otherwise_for_another_worker_is_refused():
    with Loader(OwnOrder(4_000), batch_size=4, num_workers=2) as loader:
        batches = iter(loader)
        list(itertools.islice(batches, 20))
        for process in workers(loader):
            process.kill()
            process.join()
        with pytest.raises(Exception, match=r"stream|dataset"):
            list(batches)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class TellsOnlyWhatWorked:
    """Fails in one sample, and in saying where it is behind that."""

    def __iter__(self) -> Any:
        return self.Position()

    class Position:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            if self.at == 5:
                raise StopIteration
            self.at += 1
            if self.at == 3:
                raise ValueError("the third is bad")
            return self.at

        def state_dict(self) -> Any:
            if self.at == 3:
                raise KeyError("the place is not known")
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]


def test_an_error_in_the_state_behind_another_does_not_hide_that(caplog):
    with Loader(TellsOnlyWhatWorked(), num_workers=0, on_error="skip") as loader:
        assert list(loader) == [1, 2, 4, 5]
    assert "ValueError: the third is bad" in caplog.text
    assert "the state of a stream behind an error is not known: KeyError" in caplog.text


@pytest.mark.parametrize(
    ("way", "error"),  # in the calling process the other one ends the program, as Ctrl-C does
    [
        ("inline", SystemExit),
        *itertools.product(["thread", "process"], [SystemExit, asyncio.CancelledError]),
    ],
)
@variants(
    ("stream", "is_shuffled"),
    [
        *((stream, False) for stream in (Numbers, StatefulIterator, *IDIOMS)),
        *((stream, True) for stream in (Numbers, StatefulIterator, IDIOMS[0])),
    ],
    quick=2,
)
def test_what_is_no_exception_fails_a_batch_of_a_stream_as_any_error(
    stream, is_shuffled, error, way
):
    """And does not have it read again from there, without end."""
    options: Any = {"num_workers": 0} if way == "inline" else {"num_workers": 1, "executor": way}

    def given(error: type[BaseException]) -> Any:
        bad = stream(9, Refuses(4, error))
        loader = Loader(shuffled(bad, 4) if is_shuffled else bad, batch_size=2, **options)
        given = []
        with loader:
            for _ in range(2):
                batches = iter(loader)
                while found := outcomes(batches, 1):
                    has_failed = isinstance(found[0], BaseException)
                    given.append("failed" if has_failed else plain(found[0]))
                    if way == "inline":  # with workers it depends on what has come back
                        given.append(plain(loader.state_dict()["stream"]))
        return given

    assert given(error) == given(ValueError)


@pytest.mark.parametrize("way", ["inline", "thread", "process"])
@pytest.mark.parametrize("at", [3, 6])
def test_an_error_met_while_passing_over_is_raised(way, at, tmp_path):
    """With its cause, and nothing is taken for the end."""
    down = tmp_path / "down"
    stream = Steady(40, FailsWhen(at, str(down)))
    with Loader(stream, batch_size=2, num_workers=0) as loader:
        batches = iter(loader)
        head = [next(batches).tolist() for _ in range(6)]
        state = plain(loader.state_dict())
        rest = lists(batches)
    assert head[0] == [0, 1]
    down.touch()
    options: Any = {"num_workers": 0} if way == "inline" else {"num_workers": 1, "executor": way}
    with Loader(stream, batch_size=2, **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(Exception, match=r"."):
            list(loader)
        loader.load_state_dict(state)
        try:
            list(loader)
        except Exception as error:
            found = [str(each) for each in chain_of(error)]
        assert any("the network is down" in each for each in found)
        down.unlink()
        loader.load_state_dict(state)
        assert lists(loader) == rest


# --- copies ---------------------------------------------------------------------------------------


def opened(n: int, **options: Any) -> Loader:
    return Loader(Opened(n), batch_size=2, worker_init_fn=open_stream, **options)


@variants("after", [1, 2])
def test_each_copy_is_opened_for_its_shard(after):
    """In the workers that the loader was made with, after a resize, and in the next epochs."""
    expected = in_turns(60, 3, 2)
    with opened(60, num_workers=3) as loader:
        assert lists(loader) == expected
        batches = iter(loader)
        given = lists(itertools.islice(batches, 4))
        loader.num_workers = after
        given += lists(batches)
        assert given == expected
        assert lists(loader) == expected
        loader.num_workers = 4
        assert lists(loader) == expected


def note_shard(info: Any) -> None:
    info.dataset.seen = [*getattr(info.dataset, "seen", []), (info.id, info.num_workers)]


class Seen:
    """Gives which shards its copy was opened for."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield (info.id, info.num_workers), list(self.seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("way", "count"), [("thread", 1), ("thread", 2), ("thread", 3), ("process", 2)]
)
def test_a_copy_is_opened_once_for_its_own_shard(way, count):
    with Loader(Seen(), num_workers=3, executor=way, worker_init_fn=note_shard) as loader:
        loader.num_workers = count
        for _ in range(2):
            assert list(loader) == [((shard, 3), [(shard, 3)]) for shard in range(3)]


@ways
def test_a_copy_serves_the_next_pass_if_the_last_one_ended_there(way):
    """Else the next pass has a fresh one."""
    with Loader(Passes(12), batch_size=2, num_workers=2, executor=way) as loader:
        assert passes(loader) == {0}
        assert passes(loader) == {1}
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            del batches
            assert passes(loader) == {0}
            assert passes(loader) == {1}


def passes(loader: Loader) -> set[int]:
    given = samples(loader)
    assert [value % PASS for value in sorted(given, key=lambda value: value % PASS)] == list(
        range(12)
    )
    return {value // PASS for value in given}


# --- states ---------------------------------------------------------------------------------------


class Random:
    """Draws random numbers, and has no state."""

    def __iter__(self) -> Iterator[float]:
        for number in shard_of(range(40)):
            yield number + random.random()


def noisy(value: float) -> float:
    return value + 100 * random.random()


@pytest.mark.parametrize(
    ("kind", "workers"), [("no state", 0), ("global", 0), ("own", 0), ("global", 2)]
)
def test_a_shuffled_stream_that_draws_random_numbers_goes_on_alike(kind, workers):
    """So does a transform that draws behind it."""

    def stream() -> Any:
        return shuffled(Random() if kind == "no state" else Noisy(kind), 6)

    with Loader(stream(), transform=noisy, num_workers=workers) as loader:
        given, states = [], []
        for batch in loader:
            given.append(batch)
            states.append(loader.state_dict())
    wrong = []
    for k, state in enumerate(states[:-1], 1):
        with Loader(stream(), transform=noisy, num_workers=0) as loader:
            loader.load_state_dict(state)
            if list(loader) != given[k:]:
                wrong.append(k)
    assert wrong == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_stream_draws_alike_after_an_epoch_that_was_left(workers):
    """Also where it is the user's own object that is read again."""
    with Loader(shuffled(Random(), 6), num_workers=0) as loader:
        whole = [list(loader) for _ in range(2)]
    with Loader(shuffled(Random(), 6), num_workers=workers) as loader:
        assert list(itertools.islice(loader, 1)) == whole[0][:1]
        assert list(loader) == whole[1]


# --- what a stream costs --------------------------------------------------------------------------


def test_a_stream_needs_few_descriptors_and_threads():
    """Of each worker, in this process."""
    count = 6
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with Loader(Steady(60), num_workers=count) as loader:
        batches = iter(loader)
        next(batches)
        files = len(os.listdir("/proc/self/fd")) - files
        threads = threading.active_count() - threads
        assert list(batches) == list(range(1, 60))
    assert files <= 16 * count
    assert threads <= 4 * count
