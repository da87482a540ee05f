"""Streams: every shard read by one worker at a time, in turns, the same each time."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import eventually, lists, outcomes, plain, require, variants, workers
from helpers import (
    BrokenStream,
    Deadly,
    Numbers,
    Refuses,
    Scripted,
    Slowly,
    StatefulIterator,
    StatefulNumbers,
    add_noise,
    draw,
    open_files,
    whereabouts,
    wide,
)
from kinds import OwnToldHowFar, ServesOnce

from minloader import (
    SKIP,
    BatchError,
    Loader,
    WorkerDied,
    get_worker_info,
    pad_collate,
    shuffled,
)
from minloader._diagnosis.inspect import inspect
from minloader._epochs.lane import Lane
from minloader._epochs.position import NO_SOURCE_STATE, LanePosition, SourceState
from minloader._epochs.shard_feed import ShardFeed
from minloader._epochs.task import Task
from minloader._memory.pickling import pack
from minloader._pools.ticket import Bell, Ticket
from minloader._sampling.seeding import generator
from minloader._worker.environment import Environment
from minloader._worker.fingerprint import fingerprint
from minloader._worker.make import make_worker
from minloader._worker.messages import (
    NOTHING_READ,
    Job,
    JobOptions,
    Reply,
    Shard,
    TaskMessage,
    WorkerInfo,
)

pytestmark = pytest.mark.usefixtures("quick_starts")

own = pytest.mark.parametrize("make", ["inline", "thread", "process-2"], indirect=True)
here = pytest.mark.parametrize("make", ["inline", "thread"], indirect=True)
foreign = pytest.mark.parametrize("make", ["foreign-process", "foreign-thread"], indirect=True)


def one(make: Any) -> int:
    """The number of workers that is one shard."""
    return int(make.name != "inline")


def in_turns(n: int, shards: int, size: int, last: str = "keep") -> list[list[int]]:
    """What a loader over Numbers(n) should give."""
    parts = [list(range(shard, n, shards)) for shard in range(shards)]
    cut = [[part[i : i + size] for i in range(0, len(part), size)] for part in parts]
    if last == "discard":
        cut = [[batch for batch in batches if len(batch) == size] for batches in cut]
    rounds = itertools.zip_longest(*cut)
    return [batch for each in rounds for batch in each if batch is not None]


# --- what is given -------------------------------------------------------------------------------


@own
@pytest.mark.parametrize("last", ["keep", "discard"])
def test_shards_in_turns(make, last):
    lengths = [n for n in (0, 1, 2, 12, 23, 24, 25) for _ in range(2)]
    loader = make(Numbers(lengths), batch_size=3, last_batch=last)
    for n in lengths:
        expected = in_turns(n, max(1, loader.num_workers), 3, last)
        assert lists(loader) == expected


def test_samples_are_transformed_and_collated():
    options: dict[str, Any] = {"transform": np.ones, "collate_fn": pad_collate()}
    with Loader(Numbers(12), batch_size=2, num_workers=2, executor="thread", **options) as loader:
        for padded, numbers in zip(loader, in_turns(12, 2, 2), strict=True):
            assert padded.lengths.tolist() == numbers
            assert padded.values.sum() == sum(numbers)


def test_batches_are_born_in_the_slot():
    stream = Numbers(8)
    with Loader(stream, batch_size=2, transform=wide, num_workers=2) as loader:
        for batch in loader:
            assert batch.shape == (2, 100_000)
            batch += 1
            assert (batch == batch[:, :1]).all()
        assert loader.stats.memory.slots > 0
        assert loader.stats.memory.overflowed == 0


@here
def test_infinite_streams(make):
    loader = make(Numbers(None), batch_size=2)
    shards = max(1, loader.num_workers)
    expected = in_turns(400, shards, 2)[:100]
    for _ in range(2):
        assert lists(itertools.islice(loader, 100)) == expected


def test_tiny_batches_share_tasks(monkeypatch):
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    with Loader(Numbers(4000), batch_size=2, num_workers=2, executor="thread") as loader:
        assert lists(loader) == in_turns(4000, 2, 2)
        assert loader.stats.workers.chunk_size > 1


def test_each_shard_stays_with_its_worker():
    with Loader(Numbers(24), transform=whereabouts, num_workers=3) as loader:
        places = list(loader)
    assert len({pid for pid, _, _ in places}) == 3
    assert [shard for _, shard, _ in places] == [0, 1, 2] * 8
    assert len({(pid, shard) for pid, shard, _ in places}) == 3
    assert {count for _, _, count in places} == {3}


def test_a_slow_shard_does_not_hold_up_the_others(tmp_path):
    gate = tmp_path / "open"
    stream = Scripted(30, {0: ("waits", str(gate))})
    with Loader(stream, num_workers=3, executor="thread", in_order=False) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(20)]
        gate.touch()
        assert sorted(first) == [n for n in range(30) if n % 3]
        assert list(batches) == list(range(0, 30, 3))


@here
def test_several_passes_at_once(make):
    loader = make(StatefulNumbers(20), batch_size=2)
    expected = in_turns(20, max(1, loader.num_workers), 2)
    one, other = iter(loader), iter(loader)
    got: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(4):
        got[0].append(next(one).tolist())
        got[1].append(next(other).tolist())
    third = iter(loader)
    got[0].extend(batch.tolist() for batch in one)
    del other
    assert got[0] == expected
    assert got[1] == expected[:4]
    assert lists(third) == expected


def test_what_was_left_is_let_go(tmp_path):
    """The files that a pass has open are closed when the next one begins."""
    stream = Scripted(100, {}, opens=str(tmp_path / "file"))
    with Loader(stream, transform=open_files, num_workers=1) as loader:
        for _ in range(5):
            assert next(iter(loader)) == 1


@here
def test_streams_are_told_the_epoch(make):
    loader = make(Scripted(6, {}, epochs=True))
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        assert [told for told, _ in loader] == [epoch] * 6


def test_no_length():
    with (
        Loader(Numbers(3), num_workers=0) as loader,
        pytest.raises(TypeError, match="no length, since its dataset is a stream"),
    ):
        len(loader)


def test_torch_streams():
    torch = require("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            for n in range(info.id, 10, info.num_workers):
                yield torch.full((3,), n)

    for num_workers in (0, 2):
        with Loader(Stream(), num_workers=num_workers, mp_context="fork") as loader:
            batches = list(loader)
        assert all(isinstance(batch, torch.Tensor) for batch in batches)
        expected = in_turns(10, max(1, num_workers), 1)
        assert lists(batches) == [number * 3 for number in expected]


# --- randomness ----------------------------------------------------------------------------------


@variants("kind", ["kept", "asked", "global"])
def test_random_streams_are_the_same_everywhere(kind):
    """Also from the middle, where the batches before are passed over."""
    shards = 2
    runs: list[Any] = []
    options: Any
    for options in ({}, {"prefetch_factor": 5}, {"executor": "thread"}):
        if kind == "global" and options.get("executor") == "thread":
            continue  # threads share the global generators
        options = {"batch_size": 3, "transform": add_noise, "num_workers": shards} | options
        with Loader(Scripted(30, {}, noise=kind), **options) as loader:
            epochs = [plain(list(loader)) for _ in range(2)]
            loader.set_epoch(1)
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            state = plain(loader.state_dict())
        runs.append(epochs)
        with Loader(Scripted(30, {}, noise=kind), **options | {"num_workers": 0}) as again:
            for number in (0, 1, 3):
                again.num_workers = number
                if kind == "global" and number == 0:
                    random.seed(99)
                again.load_state_dict(state)
                assert plain(list(again)) == epochs[1][5:]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] != runs[0][1]


@here
def test_every_batch_has_seeds_of_its_own(make):
    """Those of its ordinal; what is done with a sample does not repeat what the stream drew."""
    loader = make(Scripted(7, {}, noise="asked"), transform=draw)
    shards = max(1, loader.num_workers)
    rounds = [(n % shards, n // shards) for n in range(7)]
    for (shard, index), (number, drawn) in zip(rounds, loader, strict=True):
        expected = generator("batch", 0, 0, index * shards + shard, 0).random()
        assert number == shard + index * shards + expected
        assert drawn != expected


# --- state ---------------------------------------------------------------------------------------


@own
def test_a_stream_with_a_state_is_not_read_from_its_beginning(make, monkeypatch):
    monkeypatch.setattr("minloader._epochs.shard_feed.MAX_SHARD_CHUNK", 2)
    loader = make(StatefulNumbers(60), batch_size=2)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    state = plain(loader.state_dict())
    expected = lists(batches)
    shards = state["stream"][0]["shards"]
    assert all(shard["batches"] - shard["at"] <= 2 for shard in shards)
    forbidden = min(shard["at"] for shard in shards) * 2
    again = make(StatefulNumbers(60, forbidden=forbidden), batch_size=2)
    again.load_state_dict(state)
    assert lists(again) == expected


def test_states_that_do_not_fit():
    with Loader(Numbers(20), batch_size=2, num_workers=0) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        state = loader.state_dict()
    with (
        Loader(Numbers(20), batch_size=3, num_workers=0) as loader,
        pytest.raises(ValueError, match=r"batch_size is 3, but.*batch_size=2"),
    ):
        loader.load_state_dict(state)
    with (
        Loader(range(20), num_workers=0) as loader,
        pytest.raises(ValueError, match=r"with a stream.*this one has a sampler"),
    ):
        loader.load_state_dict(state)
    with Loader(Numbers(10), batch_size=2, num_workers=0) as loader:
        for damage in ({}, {"shards": []}, {"shards": [{}]}, {"shards": None}):
            damaged = (state["stream"][0] | damage if damage else None,)
            with pytest.raises(ValueError, match="the state is damaged"):
                loader.load_state_dict(state | {"stream": damaged})
        loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"ended after 5 batches when .* past the 8"):
            next(iter(loader))


# --- resized -------------------------------------------------------------------------------------


def test_who_has_begun_with_a_shard_keeps_it():
    with Loader(Numbers(None), transform=whereabouts, num_workers=2) as loader:
        batches = iter(loader)
        before = dict(next(batches)[1::-1] for _ in range(2))
        loader.num_workers = 3
        assert dict(next(batches)[1::-1] for _ in range(20)) == before


# --- errors, deaths, hangs -----------------------------------------------------------------------


@here
def test_an_error_in_transform_costs_a_batch(make):
    loader = make(Numbers(12), batch_size=2, transform=Refuses(4), num_workers=one(make))
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="4 is bad") as caught:
        next(batches)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("minloader")]
    assert "batch 2 of epoch 0, item (0, 2)" in note
    state = plain(loader.state_dict())
    rest = [[6, 7], [8, 9], [10, 11]]
    assert lists(batches) == rest
    loader.load_state_dict(state)
    assert lists(loader) == rest


@own
def test_an_error_in_the_stream_ends_a_generator(make, caplog):
    """As it does without a loader; but it is said."""
    loader = make(Scripted(12, {5: ("raises",)}), batch_size=2, num_workers=one(make))
    with caplog.at_level(logging.WARNING, "minloader"):
        *given, error = outcomes(iter(loader))
    assert lists(given) == [[0, 1], [2, 3]]
    assert str(error) == "5 is bad"
    assert error.__notes__[0].endswith(", when the stream was read")
    assert "shard 0 of the stream ended with the error in its batch 2" in caplog.text


class Wrapped(Scripted):
    """Its iterator does not show that a generator is behind it."""

    def __iter__(self) -> Any:
        return map(abs, super().__iter__())


@own
@pytest.mark.parametrize("kind", [Scripted, Wrapped])
@pytest.mark.parametrize("chunk", [1, 8])
def test_an_end_by_an_error_is_told_once(make, kind, chunk, caplog, monkeypatch):
    """Also where it shows with the next task only."""
    monkeypatch.setattr("minloader._epochs.shard_feed.MAX_SHARD_CHUNK", chunk)
    loader = make(kind(6, {3: ("raises",)}), num_workers=one(make), on_error="skip")
    assert list(loader) == [0, 1, 2]
    assert caplog.text.count("shard 0 of the stream ended with the error in its batch 3") == 1


@here
def test_an_iterator_that_can_goes_on_after_an_error(make):
    loader = make(StatefulIterator(12, bad=5), batch_size=2, num_workers=one(make), on_error="skip")
    assert lists(loader) == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]


@here
def test_only_the_shard_with_the_error_ends(make):
    loader = make(Scripted(30, {6: ("raises",)}), on_error=lambda error: SKIP)
    shards = max(1, loader.num_workers)
    lost = {n for n in range(6, 30) if n % shards == 6 % shards}
    assert sorted(loader) == [n for n in range(30) if n not in lost]


@here
def test_a_stream_that_cannot_begin(make):
    loader = make(BrokenStream())
    for _ in range(2):
        batches = iter(loader)
        with pytest.raises(OSError, match="no such disk"):
            next(batches)
    with pytest.raises(BatchError, match="nothing is left of epoch 0"):
        list(make(BrokenStream(), on_error="skip"))


def test_a_stream_that_cannot_be_gone_on_with():
    with Loader(Numbers(20), num_workers=0) as loader:
        list(zip(range(5), loader, strict=False))
        state = loader.state_dict()
    with Loader(BrokenStream(), num_workers=0) as loader:
        loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match="has failed when shard 0") as caught:
            next(iter(loader))
        cause = caught.value.__cause__
        assert isinstance(cause, OSError) or "no such disk" in str(cause)


@variants("stream", [Scripted, StatefulNumbers, StatefulIterator])
@variants("where", ["stream", "transform"])
def test_a_death_loses_nothing(stream, where, tmp_path):
    """Another worker goes on, from the stream's own state or by passing over."""
    deadly = Deadly({4, 11, 25, 34}, str(tmp_path))
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "retries": 1}
    if where == "transform":
        dataset = stream(40)
        options["transform"] = deadly
    else:
        dataset = stream(40, on_sample=deadly)
    with Loader(dataset, **options) as loader:
        assert lists(loader) == in_turns(40, 2, 3)
        assert 1 <= loader.stats.errors.retries <= 4
        assert lists(loader) == in_turns(40, 2, 3)


def test_a_transform_that_always_kills_costs_one_batch():
    deadly = Deadly({13}, None)
    expected = [batch for batch in in_turns(40, 2, 3) if 13 not in batch]
    with Loader(Numbers(40), batch_size=3, transform=deadly, num_workers=2) as loader:
        found = outcomes(iter(loader))
        (error,) = (each for each in found if isinstance(each, WorkerDied))
        assert lists(each for each in found if each is not error) == expected
        assert (error.ordinal, error.item) == (5, (1, 2))


def test_a_stream_that_always_kills_ends_its_shard(caplog):
    stream = Numbers(None, on_sample=Deadly({13}, None))
    with Loader(stream, num_workers=2, on_error="skip", retries=0) as loader:
        got = list(itertools.islice(loader, 30))
    assert [n for n in got if n % 2] == [1, 3, 5, 7, 9, 11]
    assert [n for n in got if n % 2 == 0] == list(range(0, 48, 2))
    assert "shard 1 of the stream ends: no worker gets past its batch 6" in caplog.text


def test_hangs(tmp_path):
    stream = Scripted(20, {7: ("hangs", str(tmp_path))})
    with Loader(stream, num_workers=2, timeout=4, retries=1) as loader:
        assert list(loader) == list(range(20))
        assert loader.stats.errors.retries == 1


def test_passing_over_takes_its_time():
    """Not counted as one batch's."""
    stream = Numbers(120, on_sample=Slowly())
    with Loader(stream, num_workers=1, timeout=4.0) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(100)]
        (process,) = workers(loader)
        process.kill()
        assert first + list(batches) == list(range(120))
        assert loader.stats.errors.retries <= 1


class Misleading(StatefulNumbers):
    """Its state leads nowhere, as those of a shuffled Hugging Face dataset."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.position:
            self.forbidden = 100


@pytest.mark.parametrize("at", [5, 4, 1])
def test_a_state_of_a_stream_that_leads_nowhere_is_told(at):
    """Also where all that was given before it is read again, and that fails in its last batch."""
    shard = Shard(
        id=0,
        total=1,
        first=5,
        at=at,
        state=pack({"dataset": {"position": at}}, down=True),
        check=(4, fingerprint([4])),
        pass_number=1,
        follows=None,
    )
    worker = make_worker(
        Job(Misleading(30), options=JobOptions(is_stream=True)),
        WorkerInfo(0, 1, os.getpid(), 0),
        Environment(),
    )
    reply = worker.run(TaskMessage(5, 0, [0] * 4, shard=shard))
    assert reply.shard is not None
    assert reply.shard.ended
    (failure,) = reply.outcomes
    assert "shuffle it with minloader.shuffled" in failure.summary + failure.when


def test_samples_that_differ_when_read_again_are_noticed(tmp_path):
    """The stream is shorter when another worker reads it."""
    stream = Scripted(40, {21: ("dies", str(tmp_path))}, shrinks=str(tmp_path / "did-21"))
    with Loader(stream, num_workers=1, retries=2) as loader:
        found = outcomes(iter(loader), 60)
        errors = [each for each in found if isinstance(each, RuntimeError)]
        got = [each for each in found if each not in errors]
        assert 10 < len(got) <= 21
        assert got == list(range(len(got)))
        text = "ended after 10 batches when shard 0 was read again"
        assert all(text in str(error) for error in errors)
        assert errors


def test_a_stream_that_is_another_one_is_told_again_to_who_asks_again():
    """The first reply may have been forgotten with what broke in: it is no end."""
    shard = Shard(
        id=0,
        total=1,
        first=2,
        at=0,
        state=None,
        check=(1, fingerprint([99])),
        pass_number=1,
        follows=None,
    )
    job = Job(Numbers(10), options=JobOptions(is_stream=True))
    worker = make_worker(job, WorkerInfo(0, 1, os.getpid(), 0), Environment())
    for _ in range(2):
        reply = worker.run(TaskMessage(2, 0, [0] * 4, shard=shard))
        (failure,) = reply.outcomes
        assert "has given other samples when shard 0 was read again" in failure.summary


@pytest.mark.parametrize(
    ("stream", "known", "error"),
    [
        (Numbers, None, None),
        (Numbers, 7, None),
        (Numbers, 11, "the stream has ended after 10 batches when shard 0 was read again"),
        (StatefulNumbers, 11, "do not: shuffle it with minloader.shuffled"),
    ],
)
def test_a_task_beyond_the_end_that_comes_first(stream, known, error):
    """As after a death: what was asked for, but never there, is not missed. What was given is."""
    check = None if known is None else (known, fingerprint([known]))
    shard = Shard(
        id=0, total=1, first=12, at=0, state=None, check=check, pass_number=1, follows=None
    )
    job = Job(stream(10), options=JobOptions(is_stream=True))
    worker = make_worker(job, WorkerInfo(0, 1, os.getpid(), 0), Environment())
    reply = worker.run(TaskMessage(12, 0, [0] * 4, shard=shard))
    assert reply.shard is not None
    assert reply.shard.ended
    found = [outcome.summary for outcome in reply.outcomes]
    assert len(found) == (error is not None)
    assert all(error in each for each in found)


class Unloadable(Numbers):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("the disk is not there")


def test_a_worker_that_cannot_load_the_stream():
    """Each of them says so once, and then the epoch is over."""
    with Loader(Unloadable(9), num_workers=2, retries=0) as loader:
        errors = outcomes(iter(loader))
    assert len(errors) == 2
    assert all("the disk is not there" in str(error) for error in errors)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_end_that_two_tasks_tell_of(order):
    """Whichever worker was quicker: it is behind what there is, and so is the state."""
    feed = ShardFeed(
        shard=0, total=1, epoch=0, position=LanePosition(), pass_number=0, follows=None
    )
    tasks = [Task(first=n, items=[0], source_state=NO_SOURCE_STATE) for n in range(2)]
    feed.next = 2
    lane = SimpleNamespace(tasks=deque(tasks))
    lane.drop_behind = functools.partial(Lane.drop_behind, lane)
    read = NOTHING_READ._replace(state="at its end")
    for task in tasks:
        task.ticket = Ticket(Bell())
    for n in order:
        if tasks[n].ticket is not None:  # it was not forgotten
            feed.receive(tasks[n], Reply(0, 0, False, [], shard=read), lane)
    assert (feed.is_ended, feed.next) == (True, 0)
    assert feed.known == SourceState(0, "at its end")


@variants("method", [None, "fork", "spawn", "forkserver"], 2)
def test_a_stream_that_was_left_is_closed_before_its_worker_ends(method, tmp_path, capfd):
    """As a file that it has open, or a connection; while all modules are still there."""

    class Open:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(1000)
            finally:
                (tmp_path / str(os.getpid())).touch()

    with Loader(Open(), num_workers=2 if method else 0, mp_context=method) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)  # of the other shard
        pids = {worker.pid for worker in inspect(loader).workers} or {os.getpid()}
        del batches
    assert eventually(lambda: {int(path.name) for path in tmp_path.iterdir()} == pids)
    assert capfd.readouterr().err == ""


def test_allow_is_refused():
    """It is for a sampler."""
    loader = Loader(Numbers(9), num_workers=0)
    with loader, pytest.raises(ValueError, match=r"allow is for a sampler .* 'batch_size'"):
        loader.load_state_dict(loader.state_dict(), allow="batch_size")


def test_a_state_that_cannot_be_told():
    stream = StatefulNumbers(9, broken_state=True)
    with Loader(stream, batch_size=3, num_workers=1) as loader:
        with pytest.raises(OSError, match="no state") as caught:
            next(iter(loader))
        assert "when the stream was asked for its state" in caught.value.__notes__[0]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, r"shuffle=True is not for a stream.*minloader\.shuffled\(dataset, "),
        ({"last_batch": "rollover", "batch_size": 2}, "last_batch must be 'keep' or 'discard'"),
        ({"last_batch": "discard"}, "last_batch='discard' needs a batch_size"),
        ({"collate_fn": list}, "collate_fn needs batch_size"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_arguments_that_are_not_for_streams(options, message):
    with pytest.raises(ValueError, match=message):
        Loader(Numbers(3), num_workers=0, **options)


@foreign
def test_streams_need_workers_of_our_own(make):
    with pytest.raises(ValueError, match="an executor of your own gives a task to any"):
        make(Numbers(3))


def test_generators_are_read_once():
    with Loader((n for n in range(4)), num_workers=0) as loader:
        assert list(loader) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match=r"dataset is an iterator.*read once"):
            next(iter(loader))
    with pytest.raises(TypeError, match="dataset is a generator"):
        Loader((n for n in range(4)), num_workers=1)
    loader = Loader((n for n in range(4)), num_workers=2, executor="thread")
    with loader, pytest.raises(RuntimeError, match=r"dataset is an iterator.*read once"):
        next(iter(loader))
    with Loader((n for n in range(4)), num_workers=1, mp_context="fork") as loader:
        assert list(loader) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match=r"dataset is an iterator.*read once"):
            next(iter(loader))


@here
def test_a_stream_that_is_its_own_iterator_begins_anew(make):
    loader = make(OwnToldHowFar(6), batch_size=2)
    expected = in_turns(6, max(1, loader.num_workers), 2)
    assert [lists(loader) for _ in range(2)] == [expected] * 2
    next(iter(loader))  # an epoch that is left
    assert lists(loader) == expected


def test_a_second_pass_that_gives_nothing_is_refused():
    with Loader(ServesOnce(range(6)), num_workers=0) as loader:
        assert list(loader) == [0, 1, 2, 3, 4, 5]
        with pytest.raises(RuntimeError, match=r"dataset is an iterator.*read once"):
            next(iter(loader))


class Keeps:
    """A stream whose ``__iter__`` returns the same iterator each time."""

    def __init__(self) -> None:
        self.kept = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        return self.kept


@variants("stream", [Keeps, lambda: shuffled(Keeps(), 4)])
@here
def test_a_stream_that_returns_the_iterator_that_has_ended_is_refused(make, stream):
    loader = make(stream())
    assert list(loader)
    with pytest.raises(RuntimeError, match=r"dataset is an iterator.*read once"):
        list(loader)


def test_copies_of_an_iterator_are_each_read_once():
    """A process has its own, and takes another one for each epoch."""
    with Loader(iter(range(4)), num_workers=1) as loader:
        for _ in range(3):
            assert list(loader) == [0, 1, 2, 3]
