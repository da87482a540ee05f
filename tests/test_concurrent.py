"""minloader.concurrent reads the samples of a batch at the same time; they are what they were."""

from __future__ import annotations

import asyncio
import decimal
import gc
import itertools
import os
import pickle
import subprocess
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import eventually, in_a_fork, require, variants

from minloader import SKIP, BatchError, BatchTimeout, Loader, concurrent, get_worker_info
from minloader._worker.early_reads import EarlyReads

pytestmark = pytest.mark.usefixtures("quick_starts")


class Meeting:
    """Each sample waits for so many others of its batch, so that they must be read at once."""

    def __init__(self, together: int = 4, size: int = 24) -> None:
        self.together, self.size = together, size
        self.barrier: Any = threading.Barrier(together)

    def __reduce__(self) -> Any:
        return type(self), (self.together, self.size)

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Any:
        if index == 5:
            return SKIP
        info = get_worker_info()
        assert info is not None
        assert info.dataset.dataset is self
        return index, int(info.rng.integers(1 << 40))

    def __getitem__(self, index: int) -> Any:
        self.barrier.wait(60)
        return self.sample(index)


class Awaited(Meeting):
    """The same, by coroutines."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        if not isinstance(self.barrier, asyncio.Barrier):
            self.barrier = asyncio.Barrier(self.together)
        await asyncio.wait_for(self.barrier.wait(), 60)
        return self.sample(index)


WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1, "executor": "thread"},
    {"num_workers": 2},
]


def batches(dataset: Any, **options: Any) -> list[Any]:
    with Loader(dataset, batch_size=4, **options) as loader:
        return [[field.tolist() for field in batch] for batch in loader]


def readers() -> int:
    return sum(thread.name == "minloader-read" for thread in threading.enumerate())


@variants("kind", [Meeting, Awaited])
def test_the_same_batches_for_any_number_of_workers(kind):
    """In the order of their indices; each sample has a generator of its own."""
    first, *others = (batches(concurrent(kind(), limit=4), **options) for options in WAYS)
    assert all(other == first for other in others)
    indices = [index for batch in first for index in batch[0]]
    assert indices == [n for n in range(24) if n != 5]
    assert len({number for batch in first for number in batch[1]}) == 23
    gc.collect()
    assert eventually(lambda: readers() == 0)  # they go with the dataset


class Failing:
    """Fails at some indices; the error of index 7 is there last."""

    def __init__(self) -> None:
        self.later = threading.Event()

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.later = threading.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            self.later.wait(20)
            raise LookupError("seven")
        if index == 6:
            return index
        if index == 10:
            self.later.set()
            raise SystemExit(3)
        if index in (8, 9):
            self.later.set()
            raise ValueError(f"no {index}")
        return index


@pytest.mark.parametrize("options", WAYS[::2], ids=str)
def test_errors_are_those_of_their_samples(options, caplog):
    """Of several, the first in the order of the batch is told."""
    dataset = concurrent(Failing(), limit=3)
    with Loader(dataset, [[0, 7, 8], [6, 10], [1, 2]], collate_fn=list, **options) as loader:
        taken = iter(loader)
        with pytest.raises(LookupError, match="seven") as caught:
            next(taken)
        assert "sample 7" in "".join(caught.value.__notes__)
        del caught
        with pytest.raises(Exception, match="SystemExit"):
            next(taken)
        assert next(taken) == [1, 2]
    with Loader(dataset, [[8, 0, 9]], collate_fn=list, on_sample_error="skip", **options) as loader:
        assert list(loader) == [[0]]
        assert loader.stats.errors.skipped_samples == 2
    assert "left out sample 9" in caplog.text
    caplog.clear()  # with the errors, which hold the dataset, which holds the threads


# --- across batches


@variants("kind", [Meeting, Awaited])
@pytest.mark.parametrize("options", WAYS[1:], ids=str)
def test_samples_of_several_batches_are_read_at_once(kind, options, monkeypatch):
    """Of a task, and of the one after it, whose samples only together are as many as must meet."""
    # Else a sampler that is held up for long does not fill a task.
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    dataset = concurrent(kind(together=8), limit=8)
    with Loader(dataset, batch_size=1, **options) as loader:
        assert [int(batch[0][0]) for batch in loader] == [n for n in range(24) if n != 5]
    if options.get("executor") != "thread":
        with Loader(concurrent(kind(together=4), limit=4), batch_size=3, num_workers=1) as loader:
            assert [len(batch[0]) for batch in loader] == [3, 2, 3, 3, 3, 3, 3, 3]


def test_here_nothing_is_read_ahead():
    read: list[int] = []
    dataset = type("Noted", (), {"__getitem__": lambda self, n: read.append(n) or n})()
    with Loader(concurrent(dataset, limit=8), range(9), num_workers=0) as loader:
        next(iter(loader))
        assert read == [0]


class Deadly(Meeting):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        if index == 51:  # by then a task has several batches
            os._exit(3)
        return index


MADE: list[int] = []
"""Numbers of samples in the batches that this worker has made."""


class Noting(Meeting):
    """Says how many batches its worker had made when a sample was read."""

    def __getitem__(self, index: int) -> Any:
        return len(MADE)


def note_made(samples: list[int]) -> list[int]:
    sum(range(500_000))  # other threads come to their turn meanwhile
    MADE.append(len(samples))
    return samples


def read_first(info: Any) -> None:
    """Has the samples of a task read before it is made, as a busy machine may."""
    take = EarlyReads.take

    def take_read(*args: Any) -> Any:
        reads = take(*args)
        for lists in reads:
            wait(itertools.chain.from_iterable(lists))
        return reads

    EarlyReads.take = take_read  # type: ignore[method-assign]


@pytest.mark.parametrize("init", [None, read_first])
@pytest.mark.parametrize("retries", [0, 1])
def test_only_the_batch_that_kills_is_lost(retries, init, monkeypatch):
    """Though the samples of several are read when the worker dies."""
    monkeypatch.setattr("minloader._epochs.lane.CHUNK_SECONDS", 60)
    failed: list[BatchError] = []

    def skip(failure: BatchError) -> Any:
        failed.append(failure)
        return SKIP

    options: dict[str, Any] = {"num_workers": 1, "retries": retries, "on_error": skip}
    options |= {"worker_init_fn": init, "collate_fn": list}  # no worker needs numpy
    with Loader(concurrent(Deadly(), limit=2), batch_size=2, **options) as loader:
        assert list(loader) == [[n, n + 1] for n in range(0, 80, 2) if n != 50]
    assert [(each.ordinal, each.sample) for each in failed] == [(25, None)]  # of two: who knows
    if retries == 0:  # so no task is read before the one before it is made, which would be blamed
        items = iter([[n, n + 1] for n in range(0, 24, 2)])
        options |= {"collate_fn": note_made, "on_error": "raise"}
        with Loader(concurrent(Noting(), limit=2), items, **options) as loader:
            assert list(loader) == [[ordinal] * 2 for ordinal in range(12)]


class Dividing:
    """Says what the settings of libraries make of it, where it is read."""

    def __getitem__(self, index: int) -> Any:
        return str(decimal.Decimal(1) / 3), np.geterr()["divide"]


class AwaitedDividing(Dividing):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return Dividing()[index]


@pytest.mark.parametrize("kind", [Dividing, AwaitedDividing])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_settings_of_libraries_hold_in_reads(kind, options):
    """In those that are read ahead, too."""
    with (
        decimal.localcontext(prec=5),
        np.errstate(divide="raise"),
        Loader(concurrent(kind()), range(6), **options) as loader,
    ):
        assert list(loader) == [("0.33333", "raise")] * 6


class Session(Meeting):
    """Opens something in each worker, and closes it at its end."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.is_open = False

    def __reduce__(self) -> Any:
        return type(self), (self.folder,)

    def note(self, name: str) -> None:
        with open(os.path.join(self.folder, f"{name}-{os.getpid()}"), "a") as file:
            file.write("x")

    def __enter__(self) -> None:
        self.note("opened")
        self.is_open = True
        self.info = get_worker_info()

    def __exit__(self, *args: object) -> None:
        self.note("closed")

    def __getitem__(self, index: int) -> Any:
        return index, self.is_open


class AwaitedSession(Session):
    async def __aenter__(self) -> None:
        assert asyncio.get_running_loop()
        await asyncio.sleep(0)
        Session.__enter__(self)

    async def __aexit__(self, *args: object) -> None:
        await asyncio.sleep(0)
        self.note("closed")

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return index, self.is_open


@pytest.mark.parametrize("kind", [Session, AwaitedSession])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_session_of_each_worker(kind, options, tmp_path):
    dataset = concurrent(kind(str(tmp_path)), limit=3)
    with Loader(dataset, batch_size=2, **options) as loader:
        assert all(is_open.all() for _, is_open in loader)
    del dataset, loader
    gc.collect()

    def notes(name: str) -> list[str]:
        return sorted(each.name.partition("-")[2] for each in tmp_path.glob(f"{name}-*"))

    assert 1 <= len(notes("opened")) <= max(1, options["num_workers"])
    assert eventually(lambda: notes("closed") == notes("opened"))
    assert all(each.read_text() == "x" for each in tmp_path.iterdir())


class NoSession(Session):
    def __enter__(self) -> None:
        raise ConnectionError("no such host")


@pytest.mark.parametrize("options", WAYS[::2], ids=str)
def test_a_session_that_cannot_be_opened(options):
    with Loader(concurrent(NoSession(""), limit=3), batch_size=12, **options) as loader:
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(ConnectionError, match="no such host"):
                next(batches)
    gc.collect()


class Told(Session):
    """Says where it was entered."""

    def __getitem__(self, index: int) -> Any:
        return self.info.num_workers, self.info.seed, self.info.dataset is self


class AwaitedTold(AwaitedSession):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return Told.__getitem__(self, index)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Told, AwaitedTold])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_session_is_told_where_it_is_opened(kind, options, tmp_path):
    with Loader(concurrent(kind(str(tmp_path))), range(2), seed=5, **options) as loader:
        assert list(loader) == [(options["num_workers"], 5, True)] * 2


def test_a_forgotten_wrapper():
    with pytest.raises(
        TypeError, match=r"a sample is a coroutine.* minloader\.concurrent\(dataset"
    ):
        Loader(Awaited(), batch_size=2)
    with pytest.raises(TypeError, match=r"minloader\.concurrent\(dataset\), which awaits them"):
        Loader(Awaited())
    Loader(Awaited(), transform=asyncio.run, num_workers=0).close()


def test_without_a_loader():
    dataset = concurrent(Meeting(2), limit=2)
    assert get_worker_info() is None
    plain = concurrent([10, 20, 30])
    assert (len(plain), plain[1], plain.__getitems__([2, 0])) == (3, 20, [30, 10])
    assert pickle.loads(pickle.dumps(plain)).__getitems__([1]) == [20]
    assert len(dataset) == 24


def test_within_a_running_event_loop():
    """As in a notebook."""

    async def run() -> list[Any]:
        return batches(concurrent(Awaited(), limit=4), num_workers=0)

    assert len(asyncio.run(run())) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_in_a_fork():
    """Its threads are not there, and are begun anew."""
    dataset = concurrent([1, 2, 3], limit=2)
    assert dataset[0] == 1
    assert in_a_fork(lambda: dataset[1]) == "2"


class SlowSession(Session):
    """Takes its time to be opened in the process that has made it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.home = os.getpid()
        self.begins, self.goes_on = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self.begins.set()
        if os.getpid() == self.home:
            self.goes_on.wait(60)


def test_a_fork_while_another_thread_opens_a_session(tmp_path):
    session = SlowSession(str(tmp_path))
    dataset = concurrent(session, limit=2)
    thread = threading.Thread(target=dataset.__getitem__, args=(0,))
    thread.start()
    try:
        assert session.begins.wait(60)
        options: dict[str, Any] = {"mp_context": "fork", "timeout": 5.0, "retries": 0}
        with Loader(dataset, [[1]], collate_fn=list, **options) as loader:
            assert list(loader) == [[(1, False)]]
    finally:
        session.goes_on.set()
        thread.join()


class Program(Session):
    """Has a program open, which must live until the session is closed."""

    def __reduce__(self) -> Any:
        return Program, (self.folder,)

    def __enter__(self) -> None:
        self.program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __exit__(self, *args: object) -> None:
        Path(self.folder, "said").write_bytes(self.program.communicate(b"good bye")[0])


@variants("method", ["spawn", "fork", "forkserver"])
def test_a_program_of_a_session_lives_until_that_is_closed(method, tmp_path):
    with Loader(concurrent(Program(str(tmp_path))), batch_size=4, mp_context=method) as loader:
        assert len(list(loader)) == 6
    assert (tmp_path / "said").read_bytes() == b"good bye"


def test_where_threads_are_few(monkeypatch):
    """Some serve all; where there are none, the error says so, and the next batch tries again."""
    begin, left = threading.Thread.start, [0]

    def start(thread: threading.Thread) -> None:
        if thread.name == "minloader-read":
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    dataset = concurrent(list(range(8)), limit=4)
    with pytest.raises(RuntimeError, match="new thread"):
        dataset[0]
    left[0] = 2
    assert dataset.__getitems__(range(8)) == list(range(8))


@pytest.mark.parametrize("kind", [Session, AwaitedSession])
def test_ctrl_c_while_threads_start_leaves_none(kind, monkeypatch, tmp_path):
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    dataset = concurrent(kind(str(tmp_path)), limit=4)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            dataset[0]
    assert eventually(lambda: not readers())
    assert dataset[0] == (0, True)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="dataset must have __getitem__, got"):
        concurrent(iter([1]))
    with pytest.raises(ValueError, match="limit must be"):
        concurrent([1], limit=0)

    class Blocking(Exits):
        __aenter__ = AwaitedSession.__aenter__

    class Waiting(AwaitedExits):
        __enter__ = Session.__enter__

    for kind, name in ((Blocking, "__enter__"), (Waiting, "__aenter__")):
        with pytest.raises(TypeError, match=f"would not be entered: .* needs {name} "):
            concurrent(kind())


def test_torchs_kind_of_loader():
    require("torch")
    from minloader.torch import DataLoader

    with DataLoader(concurrent(Meeting(), limit=4), batch_size=4, num_workers=1) as loader:
        assert [len(batch[0]) for batch in loader] == [4, 3, 4, 4, 4, 4]


def test_a_batch_that_is_never_read():
    """The worker is killed, and its threads with it."""
    dataset = concurrent(Meeting(together=7), limit=6)
    with (
        Loader(dataset, batch_size=4, num_workers=1, timeout=0.5) as loader,
        pytest.raises(BatchTimeout, match="took longer than timeout") as caught,
    ):
        next(iter(loader))
    assert caught.value.sample == 0
    assert "in __getitem__" in caught.value.stack
    assert "in _serve" not in caught.value.stack  # two threads are idle


class Exits:
    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise SystemExit(3)
        return index


class AwaitedExits:
    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return Exits()[index]


@pytest.mark.parametrize("kind", [Exits, AwaitedExits])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_exits_in_a_read(kind, num_workers):
    """asyncio would end the loop, for which all reads wait."""
    sampler = [[0, 1], [2, 3], [4, 5]]
    with Loader(concurrent(kind()), sampler, num_workers=num_workers, collate_fn=list) as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1]
        with pytest.raises(BatchError, match="SystemExit: 3"):
            next(batches)
        assert next(batches) == [4, 5]


class Wrapper:
    """Has samples of its own, and hands on what else it is asked for."""

    def __init__(self, dataset: Any) -> None:
        self.inner = dataset

    def __getitem__(self, index: int) -> Any:
        return -self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith("__get"):
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


def test_a_wrapper_is_not_passed_by():
    loader = Loader(Wrapper(concurrent(range(9))), [[1, 2]], num_workers=0, collate_fn=list)
    assert list(loader) == [[-1, -2]]
