"""The doctor finds what a loader was made to suffer from, and leaves the healthy alone."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import patients
import psutil
import pytest
from conftest import eventually, require

from minloader import Loader
from minloader._diagnosis import examination, findings, trials
from minloader._diagnosis.audit import NewLoaders
from minloader._diagnosis.inspect import inspect, with_arguments
from minloader.doctor import Report, Row, examine, main
from tests.helpers import stats_of

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


def fail_to_import():
    raise ImportError("libfoo.so.1: cannot open shared object file")


def endless():
    return Loader(lambda index: time.sleep(0.003), iter(int, 1))
"""


@pytest.fixture(autouse=True)
def starts_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a busy machine: whoever tries another way to start leaves a fork server."""
    monkeypatch.setattr(examination, "LONG_START", float("inf"))


def quick(make_loader: Callable[..., Any], **options: Any) -> Report:
    return examine(make_loader, **({"workers": [1, 2], "prefetch": [2], "seconds": 0.5} | options))


def examined(
    make_loader: Callable[..., Any], until: Callable[[Report], object], **options: Any
) -> Report:
    """Again, where other programs had the machine during one of the trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "STEADY", float("inf"))  # on a busy machine no rate may ever be
        for _ in range(10):
            report = quick(make_loader, **options)
            if until(report):
                return report
    pytest.fail(str(report))


def limited(make_loader: Callable[..., Any], cause: str, **options: Any) -> Report:
    return examined(make_loader, lambda report: cause in report.cause, **options)


# --- what is found


@pytest.mark.slow
def test_a_healthy_loader():
    """More workers help, so the most that were tried are recommended."""
    texts: list[str] = []

    def is_undisturbed(report: Report) -> bool:
        finds_more = report.best.num_workers == 2 and "are the most" in report.recommended
        return finds_more and "the dataset" in report.cause

    report = examined(
        lambda: Loader(patients.Healthy(), shuffle=True),
        is_undisturbed,
        workers=[2, 1, 0],
        prefetch=[2, 4],
        progress=texts.append,
    )
    settings = [(row.num_workers, row.prefetch_factor) for row in report.rows]
    assert settings == [(0, 2), (1, 2), (2, 2), (2, 4)]
    assert report.best in report.rows[2:]
    assert report.recommended.startswith("num_workers=2, prefetch_factor=")
    assert "times as many as with 1 worker" in report.recommended
    assert "more may be faster yet" in report.recommended
    assert report.is_reproducible
    assert texts[-2:] == ["num_workers=2, prefetch_factor=4", "check_reproducible"]

    inline, one, two, _ = report.rows
    assert (inline.memory, inline.busy) == (0, None)
    assert [row.start_method for row in report.rows] == ["", "spawn", "spawn", "spawn"]
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


@pytest.mark.usefixtures("quick_starts")
def test_a_dataset_that_depends_on_its_worker():
    report = quick(lambda: Loader(patients.Unlike(), shuffle=True), workers=[1], seconds=0.1)
    assert not report.is_reproducible
    assert report.reproducible.startswith("no: batch ")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_a_sampler_that_is_the_limit():
    limited(
        lambda: Loader(lambda index: time.perf_counter(), patients.Slow()),
        "the sampler is the limit",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_workers_that_wait_for_each_other():
    limited(lambda: Loader(patients.Locked()), "a lock: more workers do not help")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_a_stream_has_its_shards():
    examined(
        lambda num_workers: Loader(patients.Stream(), num_workers=num_workers),
        lambda report: report.best.num_workers == 2,
    )
    # Which need not take num_workers: it is made anew.
    examined(lambda: Loader(patients.Stream()), lambda report: report.best.num_workers == 2)


def test_another_way_to_start_is_tried_where_starts_take_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(examination, "LONG_START", 0.0)
    report = quick(lambda: Loader(patients.Unlike()), workers=[1], seconds=0.1)
    assert [row.start_method for row in report.rows] == ["spawn", "forkserver"]
    options = {"mp_context": "forkserver"}
    report = quick(lambda: Loader(patients.Unlike(), **options), workers=[1], seconds=0.1)
    assert [row.start_method for row in report.rows] == ["forkserver"]
    multiprocessing.forkserver._forkserver._stop()  # it is the standard library's to keep


# --- conclusions, from figures that are given


def trial(
    workers: int, rate: float, *, steady: bool = True, first: float = 0.1, **stats: Any
) -> Any:
    """A trial of a second, in which all workers were busy."""
    method = stats.pop("start_method", "spawn")
    row = Row(workers, 2, method, 100, rate, steady, 0.0, 1.0, 1.0, 1, first)
    counted = stats_of(
        batches=100,
        time_wait=1.0,
        time_dataset=workers,
        workers_count=workers,
        **{f"workers_{name}": value for name, value in stats.items()},
    )
    return trials.Trial(row, counted, False)


WAITS = {"computing": 0.02, "queued": 0.08, "asleep": 1.9}
A_LOCK = "95 % of the work was waiting for files, the network or a lock: more workers do not help"
BUSY = {"computing": 1.0, "queued": 0.2, "asleep": 0.8}


@pytest.mark.parametrize(
    ("few", "cpus", "spent", "cause"),
    [
        (1, 2, {"computing": 1.9, "queued": 0.1}, "there are 2 processors, which it keeps busy"),
        (1, 2, {"computing": 0.8, "queued": 1.2}, "60 % of the work was waiting for a processor"),
        (1, 2, WAITS, A_LOCK),
        (2, 2, WAITS, A_LOCK),
        (1, 1, WAITS, A_LOCK),
        (2, 2, BUSY, "make it cheaper: there are 2 processors"),
        (1, 1, {"computing": 1.0}, "make it cheaper: there is one processor"),
        (1, 4, {}, "other programs may have the processors"),
    ],
)
def test_why_more_workers_do_not_help(
    few: int, cpus: int, spent: dict[str, float], cause: str, monkeypatch: pytest.MonkeyPatch
):
    """What they wait for is looked at before the processors are counted."""
    monkeypatch.setattr("minloader._diagnosis.verdict.processors", lambda: cpus)
    found = [trial(few, 100), trial(few + 1, 101, **spent)]
    text = findings.cause(found, found[1])
    assert f"{few + 1} workers make 1.0 times as many batches as {few} worker" in text
    assert cause in text
    assert ("lock" in text) == (spent is WAITS)
    assert "more workers would help" not in text


def test_threads_without_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch):
    found = [trial(1, 100, executor="thread"), trial(2, 100, executor="thread")]
    for gil in (False, True):
        monkeypatch.setattr("minloader._diagnosis.verdict.has_gil", lambda gil=gil: gil)
        assert ("interpreter's lock" in findings.cause(found, found[1])) == gil


def test_the_fewest_workers_that_are_about_as_fast():
    found = [trial(1, 100), trial(2, 300), trial(4, 310)]
    best = findings.pick(found, 0).row
    assert best.num_workers == 2
    text = findings.recommend([each.row for each in found], best)
    assert "3.0 times as many as with 1 worker" in text
    assert "More workers add 3 %." in text
    # None are enough for a consumer that works meanwhile, as a step does; and where there are none.
    none = trial(0, 305)
    assert findings.pick([none, *found], 0).row.num_workers == 2
    assert findings.pick([none, *found], 0.01).row.num_workers == 0
    assert findings.pick([none], 0) is none


def test_too_few_batches_to_tell():
    found = [trial(1, 100), trial(2, 105, steady=False)]
    best = findings.pick(found, 0).row
    text = findings.recommend([each.row for each in found], best)
    assert "too few batches to tell" in text
    assert "%" not in text
    assert "too few batches to tell" in findings.cause(found, found[0])
    assert found[1].row.cells()[3] == "~105"


def test_a_start_that_is_quicker_is_told():
    slow, quick = trial(2, 100, first=8.0), trial(2, 100, first=1.5, start_method="forkserver")
    said = "starts sooner: 1.5 s to the first batch, 8.0 s with 'spawn'"
    assert said in findings.recommend([slow.row, quick.row], slow.row)
    assert "mp_context" not in findings.recommend([slow.row, slow.row], slow.row)


@pytest.mark.parametrize(
    ("counts", "is_steady"),
    [
        ([0, 10, 20, 30, 40], True),
        ([0, 4, 8, 12, 16], False),  # too few
        ([0, 10, 30, 31, 60], False),  # now fast, now slow
        ([0, 30], False),
    ],
)
def test_which_rates_can_be_compared(counts: list[int], is_steady: bool):
    assert trials.is_steady(list(enumerate(counts))) == is_steady


@pytest.mark.usefixtures("quick_starts")
def test_a_trial_goes_on_until_its_rate_is_steady(monkeypatch: pytest.MonkeyPatch):
    """Four times as long as was asked for, at most."""
    monkeypatch.setattr(trials, "LEAST", 60)
    with Loader(patients.Unlike(), num_workers=1) as loader:
        row = trials.run(loader, 0.2, 0.0).row  # 30 batches
    assert row.batches > 30
    assert row.batches >= 60 or not row.is_steady  # on a busy machine it may never be


def test_a_sampler_that_is_used_up_at_the_first_look():
    """Then all of the trial is counted."""

    def make() -> Loader:
        return Loader(patients.Unlike(), iter([0]), executor="thread")

    report = quick(make, seconds=1e-300)
    assert [row.batches for row in report.rows] == [1, 1]


# --- settings


@pytest.mark.slow
def test_the_step_decides_how_many_workers_are_enough():
    report = examined(
        lambda: Loader(patients.Unlike()),
        lambda report: report.best.num_workers == 1,
        workers=[0, 1, 3],
        step=0.02,
    )
    assert "the consumer is the limit" in report.cause


@pytest.mark.usefixtures("quick_starts")
def test_settings_are_handed_on_and_set():
    loaders = []

    def make(prefetch_factor: int = 7, **others: Any) -> Loader:
        assert others.keys() == {"num_workers"}
        loaders.append(Loader(patients.Unlike(), prefetch_factor=1))  # whatever it is told
        return loaders[-1]

    report = quick(make, workers=[2], prefetch=[3], seconds=0.1)
    assert {inspect(loader).group.max_in_flight for loader in loaders} >= {6}
    assert [(row.num_workers, row.prefetch_factor) for row in report.rows] == [(2, 3)]


def test_one_epoch_and_an_executor_of_ones_own():
    with ThreadPoolExecutor(2) as executor:
        report = quick(
            lambda: Loader(patients.Healthy(), iter(range(5)), executor=executor), workers=[2]
        )
    assert report.is_reproducible
    assert [row.memory for row in report.rows] == [0]
    assert "~" in str(report)


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
    assert report.is_reproducible, report.reproducible
    assert "the sampler" not in report.cause


@pytest.mark.slow
def test_a_stream_of_torchs_kind():
    torch = require("torch")
    from minloader.torch import DataLoader

    class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            info = torch.utils.data.get_worker_info()
            return iter(range(info.id, 8, info.num_workers))

    make = NewLoaders(lambda: DataLoader(Numbers(), batch_size=2))
    with with_arguments(make(), num_workers=2, prefetch_factor=3) as loader:
        assert inspect(loader).group.prefetch_factor == 3
        assert sorted(batch.tolist() for batch in loader) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_order_of_torchs_samplers_follows_from_the_epoch():
    torch = require("torch")
    from minloader.torch import DataLoader

    def orders(**options: Any) -> list[Any]:
        torch.seed()
        before = torch.get_rng_state()
        loader = NewLoaders(lambda: DataLoader(list(range(50)), batch_size=50, **options))
        with with_arguments(loader(), num_workers=0) as made:
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


def test_no_method_is_advised_that_torchs_kind_has_not():
    require("torch")
    from minloader.torch import DataLoader

    with with_arguments(DataLoader([1, 2]), num_workers=0) as loader:
        stats = stats_of(batches=1, time_startup=9.0, time_wait=10.0, workers_count=1)
        assert "start()" in stats.verdict
        stats.workers.started_early = loader.stats.workers.started_early
        assert "start()" not in stats.verdict


def test_torchs_own_loader_has_a_stand_in():
    torch = require("torch")
    with pytest.raises(TypeError, match=r"or a minloader\.torch\.DataLoader, got"):
        quick(lambda: torch.utils.data.DataLoader([1, 2]))


# --- errors


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Loader, {"workers": []}, "at least one number"),
        (Loader, {"prefetch": [0]}, "prefetch must be at least 1, got 0"),
        (Loader, {"seconds": 0}, "seconds must be above 0"),
        (Loader, {"step": -1}, "step at least 0"),
    ],
)
def test_wrong_arguments(make: Any, options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        quick(make, **options)


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


def test_the_command(tmp_path: Path):
    """With a script by its path, and a report to be read by programs."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    process = doctor(
        *("project/train.py:make_loader", "--workers", "0,1", "--prefetch", "2,3"),
        *("--seconds", 0.3, "--step", 5, "--json", "report.json"),
        cwd=tmp_path,
    )
    out, shown = process.communicate(timeout=250)
    assert process.returncode == 0, shown
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["num_workers"] for row in found["rows"]][:2] == [0, 1]
    assert found["is_reproducible"]
    columns = [each for each in out.splitlines()[0].split() if each != "start"]  # on a slow machine
    assert columns[:3] == ["workers", "prefetch", "batches/s"]
    for name in ("recommended", "cause", "reproducible"):
        assert re.search(rf"^{name} +\S", out, re.M)
    assert shown.splitlines()[:2] == [
        "num_workers=0, prefetch_factor=2",
        "num_workers=1, prefetch_factor=2",
    ]
    assert "Traceback" not in shown
    assert "died" not in shown  # of the worker that the audit kills


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train"], 2, "must be module:function or file.py:function"),
        (["nowhere:make_loader"], 2, "No module named 'nowhere'"),
        (["nowhere.py:make_loader"], 2, "/nowhere.py\n"),
        (["train:nothing"], 2, "train has no nothing"),
        (["train:make_loder"], 2, "train has no make_loder; did you mean make_loader?"),
        (["train.py:make_loader", "--workers", "1,x"], 2, "such as 1,2,4, got '1,x'"),
        (["train.py:make_loader", "--json", "no/report"], 2, "that is there, got no/report"),
        (["train.py:make_loader", "--json", "."], 2, "--json must be a file in a folder"),
        (["train.py:make_loader", "--workers", "-1"], 1, "must be at least 0, got -1"),
        (["train.py:fail"], 1, 'raise KeyError("no such corpus")'),
        (["train.py:fail_to_import"], 1, "ImportError: libfoo.so.1"),
        (["lacking.py:make_loader"], 1, "No module named 'missing_module'"),
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
    (tmp_path / "lacking.py").write_text("import missing_module")
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
    is_users = any(each in message for each in ("KeyError", "libfoo", "missing_module"))
    assert ("Traceback" in shown) == is_users  # where it is of use


def test_ctrl_c(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process = doctor("train:endless", "--workers", 2, "--seconds", 500, cwd=tmp_path)
    itself = psutil.Process(process.pid)
    workers = eventually(lambda: [each for each in itself.children() if each.num_threads() > 1])
    assert workers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out) == (130, "")
    assert err == "num_workers=2, prefetch_factor=2\n"
    assert eventually(lambda: not any(worker.is_running() for worker in workers))


def test_the_timings_are_printed_before_the_batches_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An error, Ctrl-C or a check that hangs does not take them along."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    shown: list[str] = []

    def check(*arguments: Any, **options: Any) -> None:
        shown.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "check_reproducible", check)
    arguments = ["--workers", "0", "--seconds", "0.2"]
    assert main([f"{tmp_path / 'train.py'}:make_loader", *arguments]) == 130
    assert shown[0].startswith("workers")
    assert "\ncause " in shown[0]
