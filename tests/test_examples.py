"""The examples run as a reader would run them, and their summaries hold what they promise."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import sys
import wave
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import complaints, eventually, python, require

ROOT = Path(__file__).resolve().parent.parent


def run_example(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = {"cwd": cwd, "encoding": "utf-8", "stdin": subprocess.DEVNULL}
    environment = {"PYTHONIOENCODING": "utf-8"}
    return python(ROOT / "examples" / name, *arguments, env=environment, **options)


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


# --- quickstart --------------------------------------------------------------------------------


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    require("tqdm")
    budget = 65_536
    done = run_example("quickstart.py", "--workers", 2, "--budget", budget, cwd=tmp_path)
    assert_clean(done)

    found = re.search(r"^([\d,]+) files of .* in ([\d,]+) samples, \d+ files", done.stdout, re.M)
    assert found, done.stdout
    files, samples = map(number, found.groups())
    assert samples >= files > 100

    columns = ("batches", "samples", "tokens", "speed", "padding", "largest")
    rows = {
        name: dict(zip(columns, map(number, figures.split()), strict=True))
        for name, figures in re.findall(r"^(dynamic|fixed size) +([\d,.% ]+)$", done.stdout, re.M)
    }
    dynamic, fixed = rows["dynamic"], rows["fixed size"]
    assert dynamic["batches"] > 0
    assert fixed["batches"] == pytest.approx(dynamic["batches"], rel=0.1)  # a fair comparison
    assert dynamic["samples"] == fixed["samples"] == samples  # nothing lost, nothing twice
    assert dynamic["tokens"] == fixed["tokens"] > samples
    assert dynamic["padding"] <= fixed["padding"] / 3
    assert dynamic["largest"] <= budget < fixed["largest"]


# --- mixture_text ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mixture_is_killed_and_goes_on(tmp_path: Path) -> None:
    done = run_example("mixture_text.py", cwd=tmp_path)
    assert_clean(done)
    assert not complaints(done)
    end = r"step 200, ([\d,]+) tokens, rows ([\d.]+)% full, all ([0-9a-f]{8})"
    (whole,) = re.findall(rf"^uninterrupted: {end}$", done.stdout, re.M)
    (resumed,) = re.findall(rf"^resumed: +{end}$", done.stdout, re.M)
    assert whole == resumed
    assert number(whole[1]) > 95
    (killed,) = re.findall(r"^killed: +at step (\d+)$", done.stdout, re.M)
    (saved,) = re.findall(r"^from checkpoint: step (\d+)$", done.stdout, re.M)
    assert 0 < int(saved) < int(killed) < 200
    row = r"^(code|documentation|licences) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+)% +([\d.]+)%$"
    rows = re.findall(row, done.stdout, re.M)
    assert rows[0][0] == "code"
    assert sum(number(tokens) for _, _, _, tokens, _, _ in rows) == number(whole[0])
    for _, there, drawn, _, asked, got in rows:
        assert number(there) > 0
        assert number(drawn) > 0
        assert abs(number(got) - number(asked)) < 3
    assert list(tmp_path.iterdir()) == []


# --- subprocess_io -----------------------------------------------------------------------------


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    """The numbers of each line of the summary."""
    assert_clean(done)
    lines = (re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    return {name: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", rest)] for name, rest in lines}


def write_wav(path: Path, seconds: float, rate: int = 8_000) -> None:
    """Noise, since silence would be compressed to nothing."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(random.Random(0).randbytes(2 * int(seconds * rate)))


def write_flac(path: Path, seconds: float) -> None:
    import imageio_ffmpeg

    write_wav(path.with_suffix(".wav"), seconds)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-v", "error", "-i"]
    command += [str(path.with_suffix(".wav")), str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)


@pytest.mark.slow
def test_audio_of_its_own(tmp_path: Path) -> None:
    require("tqdm")
    require("imageio_ffmpeg")
    summary = figures(run_example("subprocess_io.py", "--workers", 2, cwd=tmp_path))
    assert summary["files"] == [60, 60]
    (batches,) = summary["batches"]
    assert 1 < batches < 60
    assert 60 * 0.5 < summary["audio"][0] < 60 * 15
    assert summary["speed"][0] > 0
    assert 0 <= summary["padding"][0] < summary["padding if fixed"][0] < 100
    launched, at_once = summary["ffmpeg processes"]
    assert launched == 60
    assert at_once > 1
    assert list(tmp_path.iterdir()) == []


def test_audio_files_of_the_command_line(tmp_path: Path) -> None:
    require("tqdm")
    require("imageio_ffmpeg")
    names = ["a.wav", "with space.wav", "-dash: and colon.wav"]
    for seconds, name in enumerate(names, start=1):
        write_wav(tmp_path / name, seconds)
    write_flac(tmp_path / "b.flac", 2.5)

    arguments = ["--workers", 2, "--seconds", 20, "--", *names, "b.flac"]
    summary = figures(run_example("subprocess_io.py", *arguments, cwd=tmp_path))
    assert summary["files"] == [4, 4]
    assert summary["audio"][0] == pytest.approx(1 + 2 + 3 + 2.5, abs=0.1)
    # One batch: 4 files, none longer than 3 s, stay below 20 s.
    assert summary["batches"] == [1]
    assert summary["ffmpeg processes"] == [4, 4]
    assert summary["padding"][0] == pytest.approx(100 * (1 - 8.5 / 12), abs=1)


def assert_blamed(done: subprocess.CompletedProcess[str], name: str, *texts: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "files  " not in done.stdout
    assert f"error: {name}: " in done.stderr
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_audio_that_breaks_off_is_named(tmp_path: Path) -> None:
    """It starts well, so that only a worker finds out."""
    require("tqdm")
    require("imageio_ffmpeg")
    write_wav(tmp_path / "good.wav", 1)
    write_flac(tmp_path / "broken.flac", 3)
    data = bytearray((tmp_path / "broken.flac").read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (tmp_path / "broken.flac").write_bytes(data)

    arguments = ["--workers", 2, "good.wav", "broken.flac"]
    done = run_example("subprocess_io.py", *arguments, cwd=tmp_path)
    said = "Invalid data found when processing input"
    assert_blamed(done, "broken.flac", "ffmpeg failed with exit code", said, "minloader: batch 0")


def test_what_is_no_audio_is_named(tmp_path: Path) -> None:
    require("tqdm")
    require("imageio_ffmpeg")
    write_wav(tmp_path / "good.wav", 1)
    (tmp_path / "notes.mp3").write_text("These are words, not music.\n")
    done = run_example("subprocess_io.py", "good.wav", "notes.mp3", cwd=tmp_path)
    assert_blamed(done, "notes.mp3", "ffmpeg failed with exit code")


def test_audio_longer_than_the_budget_is_named(tmp_path: Path) -> None:
    require("tqdm")
    require("imageio_ffmpeg")
    write_wav(tmp_path / "short.wav", 1)
    write_wav(tmp_path / "long.wav", 3)
    done = run_example("subprocess_io.py", "--seconds", 2, "short.wav", "long.wav", cwd=tmp_path)
    assert_blamed(done, "long.wav", "lasts 3.0 s", "--seconds")


# --- lhotse_speech -----------------------------------------------------------------------------


def test_speech_goes_on_after_an_interruption(tmp_path: Path) -> None:
    require("tqdm")
    require("lhotse")
    require("soundfile")
    arguments = ["--workers", 2, "--utterances", 80, "--folder", "corpus"]
    done = run_example("lhotse_speech.py", *arguments, cwd=tmp_path)
    assert_clean(done)
    assert len(list((tmp_path / "corpus").glob("*.wav"))) == 80

    pattern = r"^(epoch \d, \w+ workers) +([\d,.% ]+)$"
    rows = {
        name: [number(text) for text in figures.split()]
        for name, figures in re.findall(pattern, done.stdout, re.M)
    }
    assert set(rows) == {"epoch 0, no workers", "epoch 0, 2 workers", "epoch 1, 2 workers"}
    for batches, utterances, seconds, speed, padding in rows.values():
        assert 1 < batches < utterances == 80
        assert 80 < seconds < 80 * 15
        assert speed > 0
        assert 0 <= padding < 100
    found = re.search(r"^fixed size: padding ([\d.]+)% in batches", done.stdout, re.M)
    assert found, done.stdout
    assert rows["epoch 0, no workers"][4] < float(found[1]) < 100

    found = re.search(r"^interrupted: after (\d+) of (\d+) batches$", done.stdout, re.M)
    assert found, done.stdout
    before, total = map(int, found.groups())
    assert total == rows["epoch 1, 2 workers"][0]
    assert 0 < before < total
    found = re.search(
        r"^resumed: (\d+) batches from [\d,]+ bytes, all the same$", done.stdout, re.M
    )
    assert found, done.stdout
    assert int(found[1]) == total - before


# --- dask_cluster ------------------------------------------------------------------------------


def assert_same_batches(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    # On a busy machine Dask shows one of its own, when the scheduler ends before a worker.
    assert "Traceback" not in done.stderr or "during heartbeat" in done.stderr
    assert str(ROOT / "minloader") not in done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.startswith("60 utterances, "), done.stdout
    assert re.search(r"^2 workers +(\d+) batches .*\nno workers +\1 batches", done.stdout, re.M)
    assert done.stdout.endswith("\nthe same batches\n")


def test_dask_cluster(tmp_path: Path) -> None:
    require("distributed")
    done = run_example("dask_cluster.py", "--utterances", 60, "--kill", cwd=tmp_path)
    assert_same_batches(done)
    assert re.search(r"^killed worker process \d+ after batch \d+$", done.stdout, re.M)


APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@functools.cache
def can_unshare() -> bool:
    try:
        return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_dask_cluster_that_is_running(tmp_path: Path) -> None:
    """Its workers see no process but their own, where that can be: as on other machines."""
    require("distributed")
    address = str(tmp_path / "scheduler.json")
    scheduler = ["-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    worker = ["-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-nanny"]
    commands = [[sys.executable, *scheduler, "--host", "127.0.0.1"]]
    commands += [[*(APART if can_unshare() else []), sys.executable, *worker, "--no-dashboard"]] * 2
    with ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                [*command, "--scheduler-file", address],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
        file = Path(address)
        assert eventually(lambda: file.exists() and file.read_text().rstrip().endswith("}"))
        address = json.loads(file.read_text())["address"]
        arguments = address, "--workers", 2, "--utterances", 60
        assert_same_batches(run_example("dask_cluster.py", *arguments, cwd=tmp_path))


# --- torch_training, jax_training ---------------------------------------------------------------


@pytest.mark.slow
def test_torch_training_is_killed_and_goes_on(tmp_path: Path) -> None:
    require("torch")
    require("sklearn")
    done = run_example("torch_training.py", cwd=tmp_path)
    assert_clean(done)
    end = r"step 300, test accuracy ([\d.]+)%, weights ([0-9a-f]{16})"
    (whole,) = re.findall(rf"^uninterrupted: {end}$", done.stdout, re.M)
    (resumed,) = re.findall(rf"^resumed: +{end}$", done.stdout, re.M)
    assert whole == resumed
    assert float(whole[0]) >= 95
    (killed,) = re.findall(r"^killed: +at step (\d+)$", done.stdout, re.M)
    (saved,) = re.findall(r"^from checkpoint: step (\d+)$", done.stdout, re.M)
    assert 0 < int(saved) < int(killed) < 300
    assert done.stdout.endswith("the same weights, to the last bit\n")
    assert not complaints(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_jax_training_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    require("jax")
    require("sklearn")
    runs = []
    for workers in (0, 2):
        done = run_example("jax_training.py", "--workers", workers, cwd=tmp_path)
        assert_clean(done)
        losses = re.findall(r"^epoch +(\d+): loss ([\d.]+)$", done.stdout, re.M)
        assert [int(epoch) for epoch, _ in losses] == [4, 9, 14, 19]
        assert float(losses[-1][1]) < float(losses[0][1])
        assert "460 steps in" in done.stdout
        (accuracy,) = re.findall(r"^test accuracy: ([\d.]+)% of 297 images$", done.stdout, re.M)
        assert float(accuracy) >= 95
        runs.append((losses, accuracy))
    assert runs[0] == runs[1]
