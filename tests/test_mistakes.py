"""What a hurried user does wrong: each mistake is told, with what to do instead."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from itertools import chain
from typing import Any

import pytest
from conftest import making
from helpers import Echo, Squares
from raising import exits

from minloader import BatchError, Loader, prefetch

N = 3000


@pytest.fixture(params=["inline", "thread", "process-1"])
def anywhere(request):
    """Makes loaders in this process, in its threads and in another process."""
    with making(request) as make:
        yield make


# --- one iterator in several threads ---------------------------------------------------------


def take_in_threads(batches: Any, threads: int = 4) -> list[list[Any]]:
    """What each of some threads gets of one iterator, all of them in a hurry."""
    taken: list[list[Any]] = [[] for _ in range(threads)]
    begin = threading.Barrier(threads)

    def take(mine: list[Any]) -> None:
        begin.wait()
        for batch in batches:
            mine.append(batch)

    consumers = [threading.Thread(target=take, args=(mine,), daemon=True) for mine in taken]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(60)
            assert not consumer.is_alive()
    finally:
        sys.setswitchinterval(interval)
    return taken


def test_each_batch_goes_to_one_of_several_threads(anywhere):
    loader = anywhere(Echo(), range(N))
    batches = iter(loader)
    taken = take_in_threads(batches)
    assert sorted(chain(*taken)) == list(range(N))
    assert all(mine == sorted(mine) for mine in taken)
    assert loader.stats.batches == N
    assert next(batches, "over") == "over"


def test_epochs_in_several_threads():
    with Loader(Echo(), range(N // 3), num_workers=2) as loader:
        taken = chain(*take_in_threads(loader.epochs(3)))
        assert sorted(taken) == [(epoch, n) for epoch in range(3) for n in range(N // 3)]
        assert loader.epoch == 3


def test_a_stream_in_several_threads():
    with Loader(Numbers(N), num_workers=2) as loader:
        assert sorted(chain(*take_in_threads(iter(loader)))) == sorted([*range(N)] * 2)


def test_a_prefetch_in_several_threads():
    with Loader(Echo(), range(N)) as loader:
        taken = take_in_threads(prefetch(loader, abs, depth=8))
        assert sorted(chain(*taken)) == list(range(N))


class Numbers:
    """A stream without a state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


# --- a fork ----------------------------------------------------------------------------------


def in_a_fork(function: Any) -> str:
    """What a function returns, or the error that it raises, in a fork of this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            try:
                answer = repr(function())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(theirs, answer.encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("begin", [iter, lambda loader: loader.epochs(2)])
def test_next_in_a_fork_on_the_iterator_of_its_parent(begin):
    with Loader(Echo(), range(40), num_workers=1, prefetch_factor=4) as loader:
        batches = begin(loader)
        first = next(batches)
        answer = in_a_fork(lambda: next(batches))
        assert answer.startswith("RuntimeError: this iterator was begun in the process of which")
        assert "call iter(loader) in this process" in answer
        assert len([first, *batches]) == 40 * (2 if begin is not iter else 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_next_in_a_fork_where_no_worker_is_needed():
    with Loader(Echo(), range(4), num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        assert in_a_fork(lambda: list(batches)) == "[1, 2, 3]"


# --- sys.exit --------------------------------------------------------------------------------


def test_sys_exit_in_a_dataset_is_the_error_of_its_batch(anywhere):
    batches = iter(anywhere(exits, range(3)))
    assert next(batches) == 0
    with pytest.raises(BatchError, match=r"batch 1 of epoch 0, item 1, .*SystemExit: 3") as caught:
        next(batches)
    assert "raise an error that says what is wrong, in place of sys.exit()" in str(caught.value)
    assert caught.value.__cause__.code == 3
    assert "in exits" in "".join(traceback.format_exception(caught.value))
    assert next(batches) == 2


def test_sys_exit_in_a_dataset_is_skipped(anywhere):
    loader = anywhere(exits, range(3), on_error="skip")
    assert list(loader) == [0, 2]
    assert loader.stats.skipped == 1


def exits_at_once(*ignored: Any) -> Any:
    sys.exit("no licence")


def test_sys_exit_in_worker_init_fn():
    with Loader(Squares(3), on_error="skip", worker_init_fn=exits_at_once) as loader:
        for _ in range(2):
            with pytest.raises(BatchError, match="in worker_init_fn: SystemExit: no licence"):
                next(iter(loader))


# --- what cannot be sent ---------------------------------------------------------------------


class HoldsFile:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize(("mode", "kind"), [("r", "TextIOWrapper"), ("rb", "BufferedReader")])
def test_an_open_file_is_refused(mode, kind, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("{}\n")
    with open(path, mode) as file, pytest.raises(TypeError) as caught:
        Loader(HoldsFile(file), range(3))
    assert f"dataset.file is a {kind} (cannot pickle '_io.{kind}' object" in str(caught.value)
    assert "when it is first used" in str(caught.value)


def test_standard_output_is_no_such_file(tmp_path, monkeypatch):
    with open(tmp_path / "output", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with Loader(HoldsFile(file), range(3)) as loader:
            assert list(loader) == [0, 1, 2]
