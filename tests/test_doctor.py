"""The doctor finds what a loader was made to suffer from, and leaves the healthy alone."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import patients
import psutil
import pytest
from conftest import eventually, require

from minloader import Loader
from minloader._insight.counters import Stats
from minloader._inspect import inspect
from minloader.doctor import Report, Row, examine, findings, main, steady_growth
from minloader.doctor.schedule import Schedule, audit_runs
from minloader.testing import NewLoaders

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import argparse
import time

from minloader import Loader

size = argparse.ArgumentParser().parse_args()  # the doctor's arguments are not for it


class Numbers:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        time.sleep(0.003)
        return index


def make_loader(num_workers=1):
    return Loader(Numbers(), num_workers=num_workers)


def fail():
    raise KeyError("no such corpus")


class Deep:
    make = staticmethod(make_loader)
    number = 5


def endless():
    return Loader(lambda index: time.sleep(0.003), iter(int, 1))


def no_loader():
    return [1, 2]


def empty():
    return Loader(Numbers(), [])
"""


def quick(make_loader: Callable[..., Any], **options: Any) -> Report:
    return examine(make_loader, **({"workers": [1, 2], "prefetch": [2], "seconds": 0.5} | options))


def examined(
    make_loader: Callable[..., Any], until: Callable[[Report], bool], **options: Any
) -> Report:
    """Again, where other programs had the machine during one of the trials."""
    for _ in range(10):
        report = quick(make_loader, **options)
        if until(report):
            return report
    pytest.fail(str(report))


def serialized(make_loader: Callable[..., Any], cause: str, **options: Any) -> Report:
    def is_told(report: Report) -> bool:
        found = report.serialized
        return found.answer in ("yes", "in part") and cause in found.text

    return examined(make_loader, is_told, **options)


def is_leaking(report: Report) -> bool:
    """Where the machine is busy, there may be too little to see."""
    return report.leaking.answer not in ("no", "unknown")


# --- verdicts


@pytest.mark.slow
def test_a_healthy_loader():
    """More workers help, so the most that were tried are recommended."""
    shares, texts = [], []

    def progress(share: float, text: str) -> None:
        if text == "num_workers=1, prefetch_factor=2" and texts[-1:] != [text]:
            shares.clear()
            texts.clear()
        shares.append(share)
        if texts[-1:] != [text]:
            texts.append(text)

    report = examined(
        lambda: Loader(patients.Healthy(), shuffle=True),
        lambda report: report.best.num_workers == 2 and report.serialized.answer == "no",
        workers=[2, 1, 0],
        prefetch=[2, 4],
        progress=progress,
    )
    settings = [(row.num_workers, row.prefetch_factor) for row in report.rows]
    assert settings == [(0, 2), (1, 2), (2, 2), (2, 4)]
    assert report.best in report.rows[2:]
    assert report.recommended.startswith("num_workers=2, prefetch_factor=")
    assert "times as many as with 1 worker" in report.recommended
    assert "more may be faster yet" in report.recommended
    assert report.reproducible.answer == "yes"
    assert not is_leaking(report), report.leaking
    assert "the dataset" in report.bottleneck
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert re.fullmatch(r"about \d+ s to go: 3 more settings, and check_reproducible", texts[1])
    assert texts[2:4] == ["num_workers=2, prefetch_factor=2", "num_workers=0, prefetch_factor=2"]

    inline, one, two, _ = report.rows
    assert inline.memory is inline.busy is None
    assert 0 < one.memory < two.memory
    assert one.first > 0
    assert one.byte_rate == pytest.approx(one.rate * 100_000, rel=0.3)
    assert 0.5 < one.busy <= 1

    text = str(report)
    assert all(len(line) <= 96 for line in text.splitlines())
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 5
    assert [line.endswith("<--") for line in table[1:]].count(True) == 1
    assert len({line.removesuffix("  <--").__len__() for line in table}) == 1  # aligned


@pytest.mark.slow
def test_all_that_a_dataset_may_keep():
    report = examined(
        lambda: Loader(patients.Ill(), shuffle=True),
        lambda report: report.leaking.answer == "yes" and " grew by " in report.leaking.text,
        workers=[1],
        seconds=1,
    )
    assert re.search(
        r"worker 0 grew by [\d.]+ MB in [\d,]+ batches, 1[0-4]\d(\.\d)? kB each: the dataset keeps",
        report.leaking.text,
    ), report.leaking.text
    for kind in ("descriptors", "threads", "children"):
        assert re.search(rf"worker 0 had \d+ more {kind} after", report.leaking.text)
    assert report.reproducible.answer == "no"
    assert "get_worker_info" in report.reproducible.text
    assert report.serialized.answer == "unknown"
    assert "this process" not in report.leaking.text


@pytest.mark.slow
def test_a_sampler_that_is_the_limit_and_keeps_what_it_gave():
    """In a process with much free memory, where what is kept would go unseen."""
    *holes, last = [np.ones(12_500) for _ in range(4000)]
    del holes
    report = examined(
        lambda: Loader(lambda index: time.perf_counter(), patients.Keeping()),
        lambda report: (
            "the sampler is the limit" in report.serialized.text
            and "this process grew by" in report.leaking.text
        ),
        seconds=1,
    )
    assert last.size  # had it gone too, the memory would be the system's
    assert report.bottleneck == ""
    assert "worker 0" not in report.leaking.text


@pytest.mark.slow
def test_a_cache_is_no_leak():
    """Not when it is full; while it fills, it cannot be told from one."""
    report = quick(lambda: Loader(patients.Caching(40), shuffle=True), workers=[1])
    assert not is_leaking(report), report.leaking
    report = examined(
        lambda: Loader(patients.Caching(100_000), shuffle=True),
        lambda report: report.leaking.answer == "perhaps",
        workers=[1],
        seconds=1,
    )
    assert "a cache is still being filled" in report.leaking.text


@pytest.mark.slow
def test_workers_that_wait_for_each_other():
    serialized(lambda: Loader(patients.Locked()), "a lock that they share")


@pytest.mark.slow
def test_threads_and_one_processor():
    def threads() -> Loader:
        return Loader(patients.Computing(), executor="thread")

    report = serialized(threads, "interpreter's lock")
    assert all(row.memory is None for row in report.rows)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        serialized(lambda: Loader(patients.Computing()), "there is one processor")
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
def test_a_stream_has_its_shards():
    examined(
        lambda num_workers: Loader(patients.Stream(), num_workers=num_workers),
        lambda report: report.serialized.answer == "no",
    )
    serialized(lambda: Loader(patients.Stream()), "num_workers was 1 when")


# --- conclusions, from figures that are given


def trial(workers: int, rate: float, noise: float = 0.01, **stats: float) -> Any:
    """A trial of a second, in which all workers were busy."""
    row = Row(workers, 2, 100, rate, noise, 0.0, 1.0, 1.0, 1, 0.1)
    counted = Stats(batches=100, wait=1.0, dataset=workers, num_workers=workers, **stats)
    return SimpleNamespace(row=row, stats=counted, inspection=SimpleNamespace(shards=None))


@pytest.mark.parametrize(
    ("spent", "cause"),
    [
        ({"computing": 1.9, "queued": 0.1}, "all processors are busy, since a batch takes several"),
        ({"computing": 0.8, "queued": 1.2}, "workers wait for a processor 60 % of the time"),
        (
            {"computing": 0.02, "queued": 0.08, "asleep": 1.9},
            "workers compute only 1 % of the time, and wait in the dataset for the rest",
        ),
        ({}, "other programs may have the processors"),
    ],
)
def test_why_more_workers_do_not_help(
    spent: dict[str, float], cause: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minloader.doctor.findings.processors", lambda: 2)
    verdict = findings.serialized([trial(1, 100), trial(2, 101, **spent)], 0)
    assert verdict.answer == "yes"
    assert cause in verdict.text
    assert ("lock" in verdict.text) == ("asleep" in spent)


@pytest.mark.slow
def test_programs_that_a_dataset_starts_count():
    """Each batch takes two processors, and there are two."""
    before = os.sched_getaffinity(0)
    two = sorted(before)[:2]
    if len(two) < 2:
        pytest.skip("there is one processor")
    try:
        os.sched_setaffinity(0, two)
        serialized(lambda: Loader(patients.Starting()), "processor", seconds=1)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2])
def test_what_is_within_the_noise_is_not_recommended(noise: float):
    """All are as fast as the other, but for chance: in another run, another one is fastest."""
    rng = random.Random(0)

    def run() -> list[Any]:
        quarters = [[rng.gauss(100, 200 * noise) for _ in range(4)] for _ in range(4)]
        rates = [max(1.0, statistics.fmean(each)) for each in quarters]
        errors = [statistics.stdev(each) / 200 for each in quarters]
        return [trial(n + 1, rates[n], errors[n]) for n in range(4)]

    picked = [findings.pick(run(), 0).row.num_workers for _ in range(1000)]
    assert picked.count(1) > 950


def test_what_is_outside_the_noise_is_recommended():
    trials = [trial(1, 100, 0.5), trial(2, 300, 0.03), trial(4, 310, 0.05)]
    best = findings.pick(trials, 0).row
    assert best.num_workers == 2
    text = findings.recommend(best, [each.row for each in trials], 0)
    assert "3.0 times as many as with 1 worker" in text
    assert "More workers add 3 %." in text


def test_what_may_be_chance_is_called_so():
    trials = [trial(1, 100, 0.05), trial(2, 112, 0.05)]
    best = findings.pick(trials, 0).row
    assert best.num_workers == 1
    text = findings.recommend(best, [each.row for each in trials], 0)
    assert text.endswith(
        "More workers add 12 %, which may be chance (+- 23 %): more --seconds would tell."
    )


# --- how long it takes


@pytest.mark.parametrize("batch", [1e-4, 0.05, 1.0])
@pytest.mark.parametrize("start", [0.1, 1.0, 8.0])
def test_it_takes_as_long_as_was_said(start: float, batch: float, monkeypatch: pytest.MonkeyPatch):
    """Within a quarter, though starting takes as long as it takes, on two processors."""
    monkeypatch.setattr("minloader.doctor.schedule.processors", lambda: 2)
    rng, now = random.Random(0), [0.0]

    def starting(workers: int) -> float:
        return start * max(1, 0.7 * workers) * rng.uniform(0.8, 1.2) if workers else batch

    for _ in range(50):
        audit = audit_runs({0, 2, 3})
        schedule = Schedule(3.0, [1, 2, 3, 0, 2, 2], audit, clock=lambda: now[0])
        said: list[float] = []
        while schedule.trials:
            seconds = schedule.next_seconds()
            assert 2 <= seconds <= 6
            workers = schedule.trials.pop(0)
            took = starting(workers)
            now[0] += 0.3 + took + seconds + rng.uniform(0, batch)
            schedule.learn(workers, 0.3, took, batch)
            said += [now[0], schedule.left]
            assert 0 < schedule.share < 1
        batches = schedule.batches()
        assert 3 <= batches <= 20
        for workers in audit:
            if schedule.is_over(2):
                break
            now[0] += 0.3 + starting(workers)
            now[0] += 2 * batches * batch / max(1, min(workers, 2)) * rng.uniform(0.7, 1)
        assert 0.75 < (now[0] - said[0]) / said[1] < 1.25


def test_an_audit_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Schedule, "is_over", lambda schedule, workers: True)
    report = quick(lambda: Loader(patients.Healthy()), workers=[0], seconds=0.1)
    assert str(report.reproducible) == (
        "perhaps: batches were the same in 2 runs, then the time was up: check_reproducible does "
        "all runs"
    )


# --- settings


@pytest.mark.slow
def test_the_step_decides_how_many_workers_are_enough():
    report = examined(
        lambda: Loader(patients.Unlike()),
        lambda report: report.best.num_workers == 1,
        workers=[0, 1, 3],
        step=0.02,
    )
    assert report.serialized.answer == "no"
    assert "1 worker can keep up with a step of 20 ms" in report.serialized.text
    assert "a step of 20 ms waits" in report.recommended


def test_settings_are_handed_on_and_set():
    loaders = []

    def make(prefetch_factor: int = 7, **others: Any) -> Loader:
        assert others.keys() == {"num_workers"}
        loaders.append(Loader(patients.Unlike(), prefetch_factor=1))  # whatever it is told
        return loaders[-1]

    report = quick(make, workers=[2], prefetch=[3], seconds=0.1)
    assert {inspect(loader).settings.depth for loader in loaders} >= {6}
    assert [(row.num_workers, row.prefetch_factor) for row in report.rows] == [(2, 3)]


def test_one_epoch_and_an_executor_of_ones_own():
    with ThreadPoolExecutor(2) as executor:
        report = quick(
            lambda: Loader(patients.Healthy(), iter(range(5)), executor=executor), workers=[2]
        )
    assert report.reproducible.answer == "yes"
    assert report.leaking.answer == "unknown"
    assert "too few to tell" in report.leaking.text
    assert any("one epoch" in note for note in report.notes)
    assert any("executor is your own" in note for note in report.notes)


# --- torch's DataLoader


@pytest.mark.slow
def test_a_data_loader_of_torchs_kind():
    require("torch")
    from minloader.torch import DataLoader

    report = quick(
        lambda: DataLoader(
            patients.Healthy(), batch_size=2, shuffle=True, timeout=30, num_workers=1
        ),
        workers=[0, 1, 2],
        seconds=0.3,
    )
    assert [row.num_workers for row in report.rows] == [0, 1, 2]
    assert all(row.prefetch_factor == 2 for row in report.rows)
    assert [row.busy is None for row in report.rows] == [True, False, False]
    assert report.reproducible.answer == "yes", report.reproducible
    assert "the sampler" not in report.bottleneck


@pytest.mark.slow
def test_a_stream_of_torchs_kind():
    torch = require("torch")
    from minloader.torch import DataLoader

    class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            info = torch.utils.data.get_worker_info()
            return iter(range(info.id, 8, info.num_workers))

    make = NewLoaders(lambda: DataLoader(Numbers(), batch_size=2))
    with make(num_workers=2, prefetch_factor=3) as loader:
        assert inspect(loader).prefetch_factor == 3
        assert sorted(batch.tolist() for batch in loader) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_order_of_torchs_samplers_follows_from_the_epoch():
    torch = require("torch")
    from minloader.torch import DataLoader

    def orders(**options: Any) -> list[Any]:
        torch.seed()
        before = torch.get_rng_state()
        loader = NewLoaders(lambda: DataLoader(list(range(50)), batch_size=50, **options))
        with loader(num_workers=0) as made:
            found = [batch.tolist() for _ in range(2) for batch in made]
        assert torch.equal(before, torch.get_rng_state())
        return found

    def draws() -> dict[str, Any]:
        generator = torch.Generator()
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 50, 50, generator=generator)
        return {"sampler": sampler}

    for options in (lambda: {"shuffle": True}, draws):
        first, second = orders(**options())
        assert first != second
        assert orders(**options()) == [first, second]


def test_torchs_own_loader_has_a_stand_in():
    torch = require("torch")
    with pytest.raises(TypeError, match=r"import DataLoader from minloader\.torch instead"):
        quick(lambda: torch.utils.data.DataLoader([1, 2]))


# --- errors


def test_what_grew_is_told_with_an_error():
    def is_told() -> bool:
        with pytest.raises(OSError, match="no more") as caught:
            quick(lambda: Loader(patients.Failing()), workers=[1], seconds=1)
        return any("until then worker 0 had" in note for note in caught.value.__notes__)

    assert eventually(is_told)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (5, {}, "must be a function that makes a Loader, got 5"),
        (list, {}, r"must return a minloader.Loader, got \[\]"),
        (lambda: Loader([]), {}, "no batches in epoch 0"),
        (Loader, {"workers": [-1]}, "workers must be at least 0, got -1"),
        (Loader, {"workers": []}, "at least one number"),
        (Loader, {"prefetch": [0]}, "prefetch must be at least 1, got 0"),
        (Loader, {"seconds": 0}, "seconds must be above 0"),
        (Loader, {"step": -1}, "step at least 0"),
    ],
)
def test_wrong_arguments(make: Any, options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        quick(make, **options)


def test_a_loader_must_be_new():
    with (
        Loader(list(range(9))) as loader,
        pytest.raises(ValueError, match="must make a new one each time"),
    ):
        quick(lambda: loader, workers=[0, 1], seconds=0.1)


# --- a trend


def test_growth_is_told_from_what_goes_up_and_down():
    rng = random.Random(0)
    n = range(27)
    assert steady_growth([100 * i for i in n], 50) == pytest.approx(2000, rel=0.1)
    assert steady_growth([100 * i + rng.gauss(0, 50) for i in n], 50) > 1000
    assert steady_growth([5.0 for _ in n], 0) == 0
    assert steady_growth([100 * min(i, 10) for i in n], 50) == 0  # a cache
    assert steady_growth([100 * (1 - 0.8**i) for i in n], 1) == 0  # one that fills slowly
    assert steady_growth([100 * (i > 13) for i in n], 50) == 0  # once
    assert steady_growth([i for i in n], 50) == 0
    alarms = [steady_growth([rng.random() for _ in n], 0) > 0 for _ in range(1000)]
    assert sum(alarms) <= 5


# --- the command


def doctor(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "minloader.doctor", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        **({"stderr": subprocess.PIPE} | options),
    )


def read_all(terminal: int) -> str:
    """What is written to a terminal, until nobody has it open any more."""
    parts = []
    with suppress(OSError):  # which is how that is told
        while part := os.read(terminal, 4096):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def test_the_command(tmp_path: Path):
    """With a script by its path, a bar on the terminal, and a report to be read by programs."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    process = doctor(
        *("project/train.py:make_loader", "--workers", "0,1", "--prefetch", "2,3"),
        *("--seconds", 0.3, "--step", 5, "--json", "report.json"),
        cwd=tmp_path,
        stderr=theirs,
    )
    os.close(theirs)
    shown = read_all(ours)
    out, _ = process.communicate(timeout=250)
    assert process.returncode == 0, shown
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["num_workers"] for row in found["rows"]][:2] == [0, 1]
    assert found["reproducible"]["answer"] == "yes"
    assert out.splitlines()[0].split()[:3] == ["workers", "prefetch", "batches/s"]
    for name in ("serialized", "reproducible", "leaking", "recommended"):
        assert re.search(rf"^{name} +\S", out, re.M)
    assert "num_workers=1, prefetch_factor=2" in shown
    assert re.search(r"about \d+ s to go: 2 more settings, and check_reproducible\r\n", shown)
    assert "] 100%" in shown
    assert "Traceback" not in shown
    assert "died" not in shown  # of the worker that the audit kills


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train"], 2, "must be module:function or file.py:function"),
        (["nowhere:make_loader"], 2, "there is no module nowhere"),
        (["nowhere.py:make_loader"], 2, "there is no file"),
        (["train:nothing"], 2, "train has no nothing"),
        (["train.py:make_loader", "--workers", "1,x"], 2, "must be whole numbers"),
        (["train.py:make_loader", "--json", "no/report"], 2, "there is no folder no"),
        (["train.py:make_loader", "--workers", "-1"], 1, "must be at least 0, got -1"),
        (["train.py:no_loader"], 1, "must return a minloader.Loader"),
        (["train.py:empty"], 1, "no batches in epoch 0"),
        (["train.py:fail"], 1, 'raise KeyError("no such corpus")'),
        (["signal.py:make_loader"], 2, "rename it"),
    ],
)
def test_errors_of_the_command(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "signal.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    try:
        found = main()
    except SystemExit as error:
        found = error.code
    assert found == code
    shown = capsys.readouterr().err
    assert message in shown
    assert ("Traceback" in shown) == ("KeyError" in message)  # where it is of use


def test_ctrl_c(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process = doctor("train:endless", "--workers", 2, "--seconds", 500, cwd=tmp_path)
    itself = psutil.Process(process.pid)
    workers = eventually(lambda: [each for each in itself.children() if each.num_threads() > 1])
    assert workers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out, err) == (130, "", "")
    assert eventually(lambda: not any(worker.is_running() for worker in workers))
