"""Runs the programs of the clients, and gathers the results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
MARK = "MINLOADER_TRAINER"
RESUMED = ["last 1", "boundary 1", "mid 1", "mid 0", "mid 2"]
WORDS = ["yes", "samples", "no", "error", "hangs"]
"""Answers from the best to the worst; an exception's text counts as "error"."""


def badness(answer: str) -> int:
    """Return the place of an answer among the words."""
    return WORDS.index(answer if answer in WORDS else "error")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(*command: str, folder: Path, seconds: float, **environment: str) -> int:
    """Run Python, and return its exit code; what it prints goes to a file in the folder.

    Raises:
        subprocess.TimeoutExpired: it hangs. It is killed then.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    common = {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder / "tmp"),
        MARK: str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with open(folder / "log-0.txt", "a") as log:
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | common | environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            timeout=seconds,
        ).returncode


def left(folder: Path) -> list[str]:
    """Return what a program that ran in a folder has left: processes and files of ours."""
    found = [str(path) for path in (folder / "tmp").glob("minloader-*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(" ".join(process.cmdline()) or str(process.pid))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def run_client(
    name: str, kind: str, ranks: int, folder: Path, seconds: int = 110
) -> dict[str, str]:
    """Run both processes of a client, on each rank, and return what they say.

    Of the ranks' answers the worst counts; "hangs", if a rank has none in time.
    """
    cells: dict[str, str] = {}
    several = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment = several | {"NODE_RANK": "0"} if ranks > 1 else {}
    command = [str(HERE / f"{name}.py"), kind, str(folder), str(seconds)]
    run(*command, folder=folder, seconds=3 * seconds, **environment)
    for phase in ("first", "second"):
        for rank in range(ranks):
            result = folder / f"{phase}-{rank}.json"
            if not result.exists():
                return cells | {phase: "failed; see log"}
            answers = json.loads(result.read_text())
            missing = [cell for cell in RESUMED if phase == "second" and cell not in answers]
            for cell, answer in (answers | dict.fromkeys(missing, "hangs")).items():
                cells[cell] = max(cells.get(cell, "yes"), answer, key=badness)
    return cells


def run_torchrun(
    kind: str, folder: Path, *arguments: str, seconds: float = 110
) -> tuple[int, list[list[Any]]]:
    """Run torchrun with two ranks; return its exit code, and the steps of each rank that ended."""
    settings = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    program = [str(HERE / "with_torchrun.py"), kind, str(folder), *arguments]
    command = ["-m", "torch.distributed.run", *settings, *program]
    code = run(*command, folder=folder, seconds=seconds)
    return code, [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


if __name__ == "__main__":
    name, kind, ranks = sys.argv[1:]
    place = Path(tempfile.mkdtemp())
    begin = time.monotonic()
    for item in run_client(name, kind, int(ranks), place).items():
        print(*item, sep=": ")
    print(left(place), place, f"{time.monotonic() - begin:.0f} s")
