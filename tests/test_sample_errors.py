"""Samples that fail, hang or take their worker along; how many may; and what a state knows."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import trouble
from conftest import outcomes, require, variants
from helpers import Deadly, Numbers
from kinds import same

from minloader import (
    SKIP,
    BatchError,
    BatchTimeout,
    Loader,
    WorkerDied,
    concurrent,
    get_worker_info,
    prefetch,
)

pytestmark = pytest.mark.usefixtures("quick_starts")

HANG = 4.0


class Troubled:
    """Samples that cannot be made: each does what is written for it, once with a folder."""

    def __init__(self, deeds: dict[Any, Any], folder: Any = None, size: int = 12) -> None:
        self.deeds = deeds
        self.folder = folder and str(folder)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> int:
        deed = self.deeds.get(index)
        if deed is not None and (self.folder is None or trouble.once(f"{self.folder}/{index}")):
            deed()
        return int(np.sum(index))


class Together(Troubled):
    """All samples of a batch are read by one call, as by torch's Subset."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def fail() -> None:
    raise OSError("corrupt")


def leave() -> None:
    os._exit(3)


def exits() -> None:
    raise SystemExit(3)


def one_of(*deeds: Any) -> dict[int, Any]:
    return dict(zip((1, 4, 5, 9), deeds, strict=False))


class Transform:
    def __init__(self, deeds: dict[int, Any]) -> None:
        self.deeds = deeds

    def __call__(self, sample: int) -> int:
        if sample in self.deeds:
            self.deeds[sample]()
        return sample


def negated(failure: BatchError) -> int:
    return -failure.sample


def lists(batches: Any) -> list[Any]:
    return [list(batch) for batch in batches]


def bad(loader: Any) -> list[Any]:
    return sorted((batch, sample) for _, batch, sample, _ in loader.stats.errors.last)


SKIPPING: dict[str, Any] = {"batch_size": 3, "collate_fn": list, "on_sample_error": "skip"}
WITHOUT = [[0, 2], [3], [6, 7, 8], [10, 11]]
MENDED = [[0, -1, 2], [3, -4, -5], [6, 7, 8], [-9, 10, 11]]
BAD = [(0, 1), (1, 4), (1, 5), (3, 9)]


@variants(
    ("handler", "expected", "in_order"),
    [("skip", WITHOUT, True), (negated, MENDED, True), ("skip", WITHOUT, False)],
)
@pytest.mark.parametrize("where", ["dataset", "transform", "together", "concurrent"])
def test_samples_that_kill_their_worker(handler, expected, where, in_order, caplog):
    """Past ``retries`` the batch is made without them, each by itself, and all others come."""
    deeds = one_of(fail, leave, exits, trouble.die if where == "dataset" else fail)
    options: dict[str, Any] = {"num_workers": 2, "in_order": in_order, "retries": 0}
    dataset: Any = Troubled({})
    if where == "transform":
        options["transform"] = Transform(deeds)
    elif where == "together":
        dataset = Together(deeds)
    else:
        dataset = Troubled(deeds)
    dataset = concurrent(dataset, limit=3) if where == "concurrent" else dataset
    options |= {"batch_size": 3, "collate_fn": list, "on_sample_error": handler}
    with Loader(dataset, **options) as loader:
        found = lists(loader)
        assert (found if in_order else sorted(found, key=lambda batch: abs(batch[0]))) == expected
        assert bad(loader) == BAD
        stats = loader.stats
        assert stats.errors.skipped_samples == (4 if handler == "skip" else 0)
        (text,) = [error for _, _, sample, error in stats.errors.last if sample == 4]
    assert "WorkerDied" in text
    assert "batch 1 of epoch 0, item [3, 4, 5], sample 4: exit code 3" in text
    if handler == "skip":
        assert "left out sample 4: " in caplog.text


@pytest.mark.parametrize("item", [np.array([3, 4]), [[3], [1, 4]]], ids=["array", "nested"])
def test_the_sample_that_kills_is_named(item):
    options: dict[str, Any] = {"collate_fn": list, "num_workers": 1, "retries": 0}
    with Loader(Troubled({4: leave}), [item], **options) as loader:
        with pytest.raises(WorkerDied) as caught:
            list(loader)
        assert caught.value.sample == 4


@variants(("method", "retries"), [("fork", 0), ("fork", 1), ("spawn", 0), ("spawn", 1)])
def test_samples_that_hang(method, retries, tmp_path):
    hang = partial(trouble.wait_until, tmp_path / "go")
    dataset = Troubled({4: hang, 5: hang})
    options: dict[str, Any] = {"num_workers": 1, "timeout": 2.0, "retries": retries}
    with Loader(
        dataset,
        batch_size=3,
        collate_fn=list,
        on_sample_error=negated,
        mp_context=method,
        **options,
    ) as loader:
        assert lists(loader) == [[0, 1, 2], [3, -4, -5], [6, 7, 8], [9, 10, 11]]
        assert bad(loader) == [(1, 4), (1, 5)]
        assert all("BatchTimeout" in error for *_, error in loader.stats.errors.last)


def test_what_a_callable_is_told():
    """The sample, its place, and the error, in the worker."""

    def told(failure: BatchError) -> Any:
        cause = failure.__cause__
        return (
            type(failure),
            type(cause),
            failure.sample,
            failure.ordinal,
            failure.epoch,
            os.getpid(),
        )

    dataset = Troubled({("a", 4): leave, ("a", 5): fail, ("a", 6): trouble.hang})
    options: dict[str, Any] = {"num_workers": 1, "retries": 0, "timeout": HANG}
    items = [[("a", 3), ("a", 4)], [("a", 5), ("a", 6)]]
    dataset.__class__ = Named
    with Loader(dataset, items, collate_fn=list, on_sample_error=told, **options) as loader:
        (_, died), (failed, hung) = loader
    assert died[:5] == (BatchError, WorkerDied, ("a", 4), 0, 0)
    assert failed[:5] == (BatchError, OSError, ("a", 5), 1, 0)
    assert hung[:5] == (BatchError, BatchTimeout, ("a", 6), 1, 0)
    assert os.getpid() not in (died[5], failed[5], hung[5])


class Named(Troubled):
    """Its indices are numbers, or tuples, and its samples their second parts."""

    def __getitem__(self, index: Any) -> int:
        if index in self.deeds:
            self.deeds[index]()
        return int(index[1] if isinstance(index, tuple) else index)


def test_each_sample_has_tries_of_its_own(tmp_path):
    """One that kills a worker only once is not left out."""
    dataset = Troubled(dict.fromkeys((3, 4, 5), leave), tmp_path)
    options: dict[str, Any] = {"num_workers": 1, "retries": 3, "on_sample_error": "skip"}
    with Loader(dataset, batch_size=6, collate_fn=list, **options) as loader:
        assert lists(loader) == [list(range(6)), list(range(6, 12))]
        assert (loader.stats.errors.retries, loader.stats.errors.failed) == (3, 0)


def test_what_is_put_in_the_place_of_a_sample_kills_too():
    """Or asks for it: then the batch has failed."""

    def fatal(failure: BatchError) -> Any:
        os._exit(4)

    options: dict[str, Any] = {"num_workers": 1, "retries": 0, "on_error": "skip"}
    with Loader(
        Troubled({4: leave}), batch_size=3, collate_fn=list, on_sample_error=fatal, **options
    ) as loader:
        assert lists(loader) == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
        assert bad(loader) == [(1, 4)]


def leaves_with(samples: list[int]) -> list[int]:
    if 4 in samples:
        os._exit(3)
    return samples


@pytest.mark.parametrize("dataset", [Troubled({}), Together({})])
def test_a_batch_that_kills_when_it_is_collated_has_failed(dataset):
    """No sample is to blame."""
    options: dict[str, Any] = {"num_workers": 1, "retries": 0, "on_sample_error": "skip"}
    with Loader(dataset, batch_size=3, collate_fn=leaves_with, **options) as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1, 2]
        with pytest.raises(WorkerDied) as caught:
            next(batches)
        assert caught.value.sample is None
        assert lists(batches) == [[6, 7, 8], [9, 10, 11]]


def test_an_item_that_is_the_sample():
    """Also if it could be a list of samples."""
    dataset = Named({("a", 4): leave, 6: leave})
    options: dict[str, Any] = {"num_workers": 1, "retries": 0, "on_sample_error": "skip"}
    with Loader(dataset, [("a", 3), ("a", 4), 5, 6], **options) as loader:
        assert list(loader) == [3, 5]
        assert bad(loader) == [(1, ("a", 4)), (3, 6)]


def test_a_sample_of_a_list_of_batches():
    options: dict[str, Any] = {"retries": 0, "on_sample_error": negated, "num_workers": 1}
    items = [[[0, 1], [2, 3, 4]], [[5], [6, 7]]]
    deeds = {3: leave, 6: leave}
    with Loader(Troubled(deeds), items, collate_fn=list, **options) as loader:
        assert list(loader) == [[[0, 1], [2, -3, 4]], [[5], [-6, 7]]]
        assert bad(loader) == [(0, 3), (1, 6)]


class Draws(Troubled):
    """Draws from the batch's generator."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        from minloader import get_worker_info

        return index, int(get_worker_info().rng.integers(1000))


@pytest.mark.parametrize(
    ("wrap", "counts"), [(same, [1, 2]), (concurrent, [2])], ids=["plain", "concurrent"]
)
def test_other_samples_stay_as_they_are(wrap, counts):
    """Where each read has a generator of its own; the same for any number of workers."""
    options: dict[str, Any] = {"batch_size": 3, "collate_fn": list}
    found = []
    for count in counts:
        skipping = options | {"num_workers": count, "retries": 0, "on_sample_error": "skip"}
        with Loader(wrap(Draws({4: leave})), **skipping) as loader:
            found.append(list(loader))
    assert found == found[:1] * len(counts)
    with Loader(wrap(Draws({})), num_workers=0, **options) as loader:
        whole = list(loader)
    assert found[0][::2] == whole[::2]
    if wrap is concurrent:
        assert found[0][1] == [whole[1][0], whole[1][2]]


# --- samples that kill their worker by what they draw


class Drawing:
    """Draws for each sample, and does something about some draws: a dataset, or a transform."""

    def __init__(self, source: str, fatal: Any, deed: Any) -> None:
        self.source = source
        self.fatal = fatal
        self.deed = deed
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return 12

    def draw(self) -> int:
        if self.source == "random":
            return random.getrandbits(40)
        if self.source == "numpy":
            return int(np.random.randint(1 << 40))
        if self.source == "torch":
            return int(require("torch").randint(1 << 40, ()))
        info = get_worker_info()
        assert info is not None
        return int((self.generator if self.source == "own" else info.rng).integers(1 << 40))

    def __getitem__(self, sample: Any) -> tuple[Any, int]:
        number = self.draw()
        if number in self.fatal:
            self.deed()
        return sample, number


class DrawingTogether(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def drawing_loader(place: str, source: str, fatal: Any, deed: Any, **options: Any) -> Any:
    options = {"collate_fn": list, "on_sample_error": "skip", "batch_size": 4} | options
    drawing = Drawing(source, fatal, deed)
    if source == "own":
        options["seed_generators"] = True
    if place == "drop-in":
        generator = require("torch").Generator().manual_seed(5)
        from minloader.torch import DataLoader

        return DataLoader(drawing, generator=generator, **options)
    datasets = {
        "dataset": drawing,
        "together": DrawingTogether(source, fatal, deed),
        "concurrent": concurrent(drawing, limit=1),
        "transform": range(12),
        "stream": Numbers(12),
    }
    if place in ("transform", "stream"):
        options["transform"] = drawing.__getitem__
    return Loader(datasets[place], **options)


DRAWS = [
    ("dataset", "rng", leave),
    ("dataset", "own", leave),
    ("transform", "numpy", crash),
    ("stream", "random", leave),
    ("together", "random", leave),
    ("dataset", "numpy", trouble.die),
    ("dataset", "random", trouble.hang),
    ("concurrent", "rng", leave),
    ("drop-in", "torch", leave),
    *((place, source, leave) for place in ("transform", "stream") for source in ("rng", "own")),
]


@variants(
    ("place", "source", "deed", "retries"),
    [*((*draw, 0) for draw in DRAWS), *((*draw, 2) for draw in DRAWS if draw[1] != "own")],
    quick=4,
)
def test_a_draw_that_kills_is_not_drawn_by_the_next_sample(place, source, deed, retries, caplog):
    """One sample is left out for it, said and counted once; also for one that is found later."""
    options: dict[str, Any] = {"num_workers": 1, "retries": retries}
    if deed is trouble.hang:
        options["timeout"] = 2.0
    with drawing_loader(place, source, (), deed, **options) as loader:
        whole = list(loader)
    fatal: set[int] = set()
    # One that the first time draws it, and others by what they draw when that is left out. Where
    # a transform kills, all transforms of the batch come behind; so the first is the next one.
    given = whole
    lost = []
    for n in (1, -1, 0) if place == "transform" else (1, -1):
        sample, number = given[1][n]
        fatal.add(number)
        lost.append(sample)
        caplog.clear()
        with drawing_loader(place, source, fatal, deed, **options) as loader:
            given = list(loader)
            left = [sample for sample, _ in whole[1] if sample not in lost]
            assert [sample for sample, _ in given[1]] == left
            assert given[::2] == whole[::2]
            errors = loader.stats.errors
            # Where samples are read together, it must be found first; and who reads ahead of a
            # batch may be thought to have died with that.
            together = place in ("together", "concurrent")
            more = errors.retries - (retries + 1) * (len(lost) + together)
            assert more in ((0, 1) if place == "concurrent" else (0,))
            assert errors.failed == errors.skipped_samples == len(lost)
            assert caplog.text.count("left out ") == len(lost)


@pytest.mark.parametrize("source", ["rng", "own"])
def test_what_is_drawn_behind_it_is_the_same_elsewhere(source):
    """For any number of workers, and from each state."""

    def loader(fatal: set[int], num_workers: int) -> Any:
        return drawing_loader("dataset", source, fatal, leave, num_workers=num_workers, retries=0)

    with loader(set(), 1) as whole:
        _, (_, (_, number), *_), _ = whole
    with loader({number}, 1) as alone:
        given = list(alone)
    assert len(given[1]) == 3
    for n in range(3):
        with loader({number}, 2) as two:
            batches = iter(two)
            assert [next(batches) for _ in range(n)] == given[:n]
            state = two.state_dict()
        with loader({number}, 1 + n % 2) as resumed:
            resumed.load_state_dict(state)
            assert list(resumed) == given[n:]


class Waiting(Drawing):
    """One sample kills the worker once there is a file."""

    path = ""

    def __getitem__(self, sample: int) -> tuple[int, int]:
        if sample == 4:
            trouble.wait_until(self.path)
            leave()
        return super().__getitem__(sample)


def test_it_is_left_out_where_the_batch_is_made_next(tmp_path):
    """Also in the calling process, if there are no workers by then: that does not die of it."""
    dataset = Waiting("random", (), fail)
    before = random.getstate()
    found = []
    for num_workers in (1, 0):
        dataset.path = str(tmp_path / f"{num_workers}")
        with Loader(dataset, num_workers=1, retries=0, **SKIPPING) as loader:
            batches = iter(loader)
            first = next(batches)
            loader.num_workers = num_workers
            trouble.note(dataset.path, "go")
            found.append([first, *batches])
    assert [sample for sample, _ in found[0][1]] == [3, 5]
    assert found[0] == found[1]
    assert random.getstate() == before


def test_each_is_said_once(caplog):
    """However often its batch is made again, for the sake of others."""
    deeds = {6: fail, 7: leave, 8: fail, 9: leave}
    options: dict[str, Any] = {"num_workers": 1, "retries": 1, "on_sample_error": "skip"}
    with Loader(Troubled(deeds), batch_size=6, collate_fn=list, **options) as loader:
        assert lists(loader) == [list(range(6)), [10, 11]]
        assert bad(loader) == [(1, n) for n in deeds]
    said = [caplog.text.count(f"left out sample {n}: ") for n in deeds]
    assert said == [1, 1, 1, 1]


# --- samples that __getitems__ fails on


class Whole(Together):
    """Fails before it has read any sample of a batch."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        for index in indices:
            if index in self.deeds:
                self.deeds[index]()
        return super().__getitems__(indices)


@pytest.mark.parametrize("kind", [Together, Whole])
def test_the_sample_that_getitems_fails_on_is_found(kind):
    with Loader(kind({4: fail, 9: fail}), num_workers=0, **SKIPPING) as loader:
        assert lists(loader) == [[0, 1, 2], [3, 5], [6, 7, 8], [10, 11]]
        assert bad(loader) == [(1, 4), (3, 9)]


def test_with_torch():
    """The drop-in too, with a Subset, which has ``__getitems__``."""
    torch = require("torch")
    from minloader.torch import DataLoader

    dataset: Any = torch.utils.data.Subset(Troubled(one_of(leave, fail)), range(12))
    options: dict[str, Any] = {"num_workers": 2, "on_sample_error": negated, "retries": 0}
    with DataLoader(dataset, 3, **options) as loader:
        assert lists(loader)[:2] == [[0, -1, 2], [3, -4, 5]]
        assert bad(loader) == BAD[:2]
    options["on_sample_error"] = "skip"
    with DataLoader(Troubled(one_of(leave, fail)), None, **options) as loader:
        assert [int(sample) for sample in loader] == [0, 2, 3, *range(5, 12)]
    for num_workers in (0, 1):
        dataset = Troubled({1: fail, 4: fail, 9: fail})
        options = {"num_workers": num_workers, "on_sample_error": "skip", "max_errors": 2}
        most = "max_errors=2 allows"
        with DataLoader(dataset, 3, **options) as loader, pytest.raises(BatchError, match=most):
            list(loader)
    for wrong in ({"on_sample_error": "ignore"}, {"max_errors": 0.2}, {"max_errors": "3"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            DataLoader(dataset, **wrong)


# --- streams


@variants(("handler", "expected"), [("skip", [6, 10]), (lambda _: -1, [6, -1, 10])])
def test_a_sample_of_a_stream_that_kills_in_transform(handler, expected, caplog):
    """It has no index, but it is known which of its batch it is. The next ones come."""
    deadly = Deadly({8}, None)
    options: dict[str, Any] = {"batch_size": 3, "collate_fn": list, "num_workers": 2}
    with Loader(Numbers(20), transform=deadly, on_sample_error=handler, **options) as loader:
        found = lists(loader)
        assert found[2] == expected
        assert [batch for batch in found if batch != expected] == [
            *([0, 2, 4], [1, 3, 5], [7, 9, 11], [12, 14, 16], [13, 15, 17], [18], [19])
        ]
        ((_, batch, sample, text),) = loader.stats.errors.last
        assert (batch, sample) == (2, None)
        assert "WorkerDied" in text
    assert ("left out a sample of batch 2: " in caplog.text) == (handler == "skip")


def test_a_stream_whose_own_code_kills_fails_with_its_batch():
    options: dict[str, Any] = {"num_workers": 1, "retries": 0, "on_sample_error": "skip"}
    stream = Numbers(6, on_sample=Deadly({3}, None))
    with Loader(stream, **options) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(WorkerDied):
            next(batches)


# --- how many may fail


def pairs(n: int) -> list[list[int]]:
    return [[2 * k, 2 * k + 1] for k in range(n)]


def told(loader: Loader) -> list[tuple[int, str]]:
    """The errors of an epoch: the places of their batches, -1 for the end, and what they say."""
    found = outcomes(iter(loader), 10_000)
    return [(error.ordinal, str(error)) for error in found if isinstance(error, BatchError)]


def test_a_sample_counts_once_an_epoch():
    """However often it fails: in an epoch, and in each epoch anew."""
    options: dict[str, Any] = {"on_sample_error": "skip", "num_workers": 0, "max_errors": 1}
    items = [[3, 0], [1, 3], [3, 2]]
    with Loader(Troubled({3: fail}), items, collate_fn=list, **options) as loader:
        for _ in range(3):
            assert lists(loader) == [[0], [1], [2]]
        assert loader.stats.errors.failed == 9
    with Loader(Troubled({3: fail, 2: fail}), items, collate_fn=list, **options) as loader:
        for _ in range(2):
            assert [n for n, _ in told(loader)] == [2]


def test_a_batch_of_unknown_samples_counts_as_one():
    options: dict[str, Any] = {"on_error": "skip", "num_workers": 0, "max_errors": 1}
    with Loader(Troubled({}), batch_size=3, collate_fn=refuses, **options) as loader:
        assert [n for n, _ in told(loader)] == [1, 2, 3, -1]  # nothing is left


def refuses(samples: list[int]) -> list[int]:
    raise ArithmeticError("never")


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_failed_before_ctrl_c_is_no_other_batchs(goes_on, tmp_path):
    dataset = Troubled({3: fail, 4: interrupt}, tmp_path)
    options = SKIPPING | {"num_workers": 0, "max_errors": 0}
    with Loader(dataset, **options) as loader:
        batches = iter(loader)
        first = next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        given = [first, *batches] if goes_on else lists(loader)
        assert given == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert bad(loader) == []


def test_a_sample_before_ctrl_c_is_not_blamed(tmp_path):
    """For an error of ``collate_fn`` that comes next."""
    dataset = Troubled({4: interrupt}, tmp_path)
    with Loader(dataset, [[4], [0]], collate_fn=refuses, num_workers=0) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert len(outcomes(iter(loader))) == 2
        assert bad(loader) == [(0, None), (1, None)]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1, ValueError, "max_errors must be at least 0, got -1"),
        ("3", TypeError, "max_errors must be an int, got '3'"),
        (True, TypeError, "max_errors must be an int, got True"),
        (0.05, TypeError, "max_errors must be an int or None, got 0.05; for a share .* multiply"),
        (np.float32(0.5), TypeError, "max_errors must be an int, got "),
    ],
)
def test_what_max_errors_may_be(value, error, text):
    with pytest.raises(error, match=text):
        Loader(Troubled({}), max_errors=value)
    with Loader(Troubled({0: fail}), max_errors=np.int8(0), num_workers=0) as loader:
        assert [n for n, _ in told(loader)] == [0]


@pytest.mark.parametrize("value", ["skip_sample", "ignore", None, ValueError])
def test_what_on_sample_error_may_be(value):
    with pytest.raises(ValueError, match="on_sample_error must be 'raise', 'skip' or a callable"):
        Loader(Troubled({}), on_sample_error=value)


def test_a_callable_that_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="on_sample_error cannot be sent to worker processes"):
        list(Loader(Troubled({}), on_sample_error=lambda failure: lock))


# --- states


FAULTY = dict.fromkeys((1, 4, 5, 9), fail)


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("there", [{"num_workers": 0}, {"num_workers": 2, "in_order": False}])
def test_bad_samples_survive_a_resume(k, there):
    """The list of them, and what max_errors compares, in JSON, with another number of workers."""
    options = SKIPPING | {"num_workers": 2, "executor": "thread"}
    with Loader(Troubled(FAULTY), max_errors=4, **options) as loader:
        whole = lists(loader)
        errors = sorted(loader.stats.errors.last)
    with Loader(Troubled(FAULTY), max_errors=4, **options) as loader:
        batches = iter(loader)
        given = [list(next(batches)) for _ in range(k)]
        state = json.loads(json.dumps(loader.state_dict()))
        known = len(loader.stats.errors.last)
    (failed,) = state["errors"]
    assert failed["failed"] == len(failed["last"]) == known == [0, 1, 3, 3, 4][k]
    for most, is_enough in ((4, True), (3, False)):
        with Loader(Troubled(FAULTY), max_errors=most, **options | there) as loader:
            loader.load_state_dict(state)
            assert json.loads(json.dumps(loader.state_dict())) == state
            assert len(loader.stats.errors.last) == loader.stats.errors.failed == known
            if is_enough or k == 4:
                assert sorted(given + lists(loader)) == sorted(whole)
                assert sorted(loader.stats.errors.last) == errors
            else:
                with pytest.raises(BatchError, match="4 of the batches and samples of epoch 0"):
                    lists(loader)


def test_a_failed_batch_counts_once_after_a_resume():
    """No sample of it is known: it is recognized by its number."""
    options: dict[str, Any] = {"num_workers": 0, "max_errors": 1, "on_error": lambda error: -1}
    options["collate_fn"] = second_fails
    with Loader(range(6), pairs(3), **options) as loader:
        batches = prefetch(loader, lambda batch: batch, depth=2)
        assert next(batches) == [0, 1]
        state = loader.state_dict()  # the second has failed, and is not the consumer's
        batches.close()
    assert state["errors"][0]["failed"] == 1
    with Loader(range(6), pairs(3), **options) as loader:
        loader.load_state_dict(state)
        assert list(loader) == [-1, [4, 5]]


def second_fails(samples: list[int]) -> list[int]:
    if samples[0] == 2:
        raise ValueError("the second fails")
    return samples


def test_each_bad_sample_of_a_stream_counts():
    """They have no index, by which to tell them apart."""
    options: dict[str, Any] = {"batch_size": 5, "on_sample_error": "skip", "num_workers": 0}
    with Loader(Numbers(20), transform=odd_fails, max_errors=4, **options) as loader:
        assert told(loader)[0][0] == 1  # in which the fifth fails
        assert loader.stats.errors.failed == 10


def odd_fails(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def test_errors_after_a_state_count_once_more():
    """Where it is loaded by the loader that has met them."""
    with Loader(Troubled(FAULTY), num_workers=0, max_errors=3, **SKIPPING) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        for _ in range(2):
            next(batches)
        loader.load_state_dict(state)
        with pytest.raises(BatchError, match="4 of the batches and samples of epoch 0"):
            lists(loader)


def test_what_a_stage_has_taken_ahead_does_not_count_twice():
    """What failed is known when it was taken; it is made again, for the consumer of the state."""
    options = SKIPPING | {"num_workers": 0, "max_errors": 4}
    with Loader(Troubled(FAULTY), **options) as loader, prefetch(loader, list, depth=2) as batches:
        assert [next(batches), next(batches)] == WITHOUT[:2]
        state = loader.state_dict()
    assert state["errors"][0]["failed"] == 4  # of all batches
    with Loader(Troubled(FAULTY), **options) as loader:
        loader.load_state_dict(state)
        assert lists(loader) == WITHOUT[2:]
        assert len({sample for _, _, sample, _ in loader.stats.errors.last}) == 4
        assert loader.state_dict()["errors"][0]["failed"] == 0


def test_the_next_epoch_of_a_state_counts_anew():
    options = SKIPPING | {"num_workers": 0, "max_errors": 4}
    with Loader(Troubled(FAULTY), **options) as loader:
        list(loader)
        state = loader.state_dict()
    assert (state["errors"][0]["failed"], len(state["errors"][0]["last"])) == (0, 4)
    with Loader(Troubled(FAULTY), **options) as loader:
        loader.load_state_dict(state)
        assert lists(loader) == WITHOUT
        assert len(loader.stats.errors.last) == 8
        loader.load_state_dict(state)  # what is known already is not known twice
        assert len(loader.stats.errors.last) == 8


def test_a_state_has_a_thousand_bad_samples_at_most():
    """Of long errors the beginning, and of indices what JSON can have."""

    class Bad(Troubled):
        def __getitem__(self, index: Any) -> int:
            raise OSError("x" * 10_000)

    size = 1_300
    items: list[Any] = [np.int64(n) for n in range(size)]
    items[-3:] = [("a", np.int32(1)), {"cut": 1}, "y" * 10_000]
    options: dict[str, Any] = {"on_sample_error": "skip", "num_workers": 0}
    with Loader(Bad({}), items, **options) as loader:
        with pytest.raises(BatchError, match="nothing is left of epoch 0"):
            list(loader)
        state = loader.state_dict()
    text = json.dumps(state)
    (failed,) = state["errors"]
    assert (len(failed["last"]), len(text) < 600_000) == (1000, True)
    assert failed["last"][0][2] == 300
    assert [sample for _, _, sample, _ in failed["last"][-3:]] == [
        *(["a", 1], "{'cut': 1}", "y" * 1000)
    ]
    with Loader(Bad({}), items, **options) as loader:
        loader.load_state_dict(json.loads(text))
        assert loader.stats.errors.last[-3][2] == ("a", 1)


@pytest.mark.parametrize(
    "errors",
    [
        None,
        [],
        [{"last": [], "failed": -1}],
        [{"last": [[0, 1, 2]], "failed": 0}],
        [{"last": [[0, 1, 2, 3]], "failed": 0}],
        [{"last": []}],
    ],
)
def test_errors_of_a_state_that_are_damaged(errors):
    with Loader(Troubled({}), num_workers=0) as loader:
        state = loader.state_dict()
        with pytest.raises(ValueError, match="the state is damaged"):
            loader.load_state_dict(state | {"errors": errors})


def test_skip_is_still_a_sample():
    """What a callable returns may be SKIP; then the transform is not asked."""
    options = SKIPPING | {"transform": abs, "on_sample_error": lambda failure: SKIP}
    with Loader(Troubled(FAULTY), num_workers=0, **options) as loader:
        assert lists(loader) == WITHOUT
