"""Prints what works with which package, as a table of Markdown: ``python -m tests.packages``.

Each case runs in a process and a folder of its own, for three minutes at most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
METHODS = ["none", "spawn", "fork", "forkserver"]
SECONDS = 180


def main(names: list[str]) -> None:
    from tests.packages.cases import CASES

    print(f"| package | {' | '.join(METHODS[1:])} | without workers | state |")
    print("|---|---|---|---|---|---|")
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            _outcome(name, "made", folder)  # elsewhere: what has threads must not be forked
            none, *others = (_outcome(name, method, folder) for method in METHODS)
        states = sorted({state for _, state in (none, *others) if state})
        cells = [works for works, _ in (*others, none)]
        print(f"| {name} | {' | '.join(cells)} | {', '.join(states)} |", flush=True)


def _outcome(name: str, method: str, folder: str) -> tuple[str, str]:
    """Return whether it works, and what becomes of a state."""
    command = [sys.executable, "-m", "tests.packages", "--one", name, method]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hangs", ""
    if "not installed" in done.stdout:
        return "not installed", ""
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return next(line for line in reversed(said) if not line.startswith("minloader:"))[:80], ""
    works, state = (["", "", *done.stdout.strip().splitlines()])[-2:]
    return works, state


def one(name: str, method: str) -> None:
    """Read an epoch, and the rest of it from a state, in another loader."""
    from minloader import Loader
    from tests.packages.cases import CASES

    try:
        dataset, options = CASES[name]()
    except ModuleNotFoundError as error:
        print("not installed:", error)
        return
    if method == "made":
        return
    workers: dict[str, Any] = {"num_workers": 0}
    if method != "none":
        workers = {"num_workers": 2, "mp_context": method}

    with Loader(dataset, **options, **workers) as loader:
        whole = [_plain(batch) for batch in loader]
    with Loader(dataset, **options, **workers) as loader:
        batches = iter(loader)
        begun = [_plain(batch) for batch in islice(batches, 2)]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [_plain(batch) for batch in batches]
    print("yes" if begun + rest == whole else "other batches each time")
    try:
        dataset, options = CASES[name]()
        with Loader(dataset, **options, **workers) as loader:
            loader.load_state_dict(state)
            resumed = [_plain(batch) for batch in loader]
        print("exact" if resumed == rest else "other batches")
    except Exception as error:
        print(type(error).__name__)


def _plain(batch: Any) -> str:
    if hasattr(batch, "to_dict"):  # of torch_geometric
        batch = batch.to_dict()
    if isinstance(batch, dict):
        return repr({key: _plain(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return repr([_plain(each) for each in batch])
    return repr(batch.tolist() if hasattr(batch, "tolist") else batch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main(sys.argv[1:])
