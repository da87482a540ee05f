"""Writes what works with which package into docs/trainers.md: ``python -m tests.packages``.

Each package is read without workers and by each start method, and resumed in another process: each
time for three minutes at most. Arguments take some of the packages by their names; the rows of the
others stay, and so does that of a package that is not installed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from minloader import Loader
from tests.packages.cases import CASES, N

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainers.md"
TABLE = re.compile(r"(?<=<!-- packages -->\n\n).*?(?=\n\n<!-- end of packages -->)", re.DOTALL)
METHODS = ["spawn", "fork", "forkserver"]
HEAD = ["package", "version", *METHODS, "without workers", "state"]
SECONDS = 180
OUTCOME = "outcome: "
Task = tuple[str, str]
"""The name of a package, and a start method, or "none"."""


def main(names: list[str]) -> None:
    """Try the packages, and write each row as soon as it is known."""
    for distribution, group in groupby(names or CASES, lambda name: CASES[name].distribution):
        for row in tried(distribution, list(group)):
            print(table([row]), end="\n\n", flush=True)
            page = PAGE.read_text()
            PAGE.write_text(TABLE.sub(lambda match: with_row(match.group(), row), page))  # noqa: B023


def tried(distribution: str, names: list[str]) -> Iterator[list[str]]:
    """Yield the rows of the packages of a distribution, which a process imports once for all."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        yield from ([name, "not tried", *[""] * (len(HEAD) - 2)] for name in names)
        return
    with_workers = [(name, method) for name in names for method in reversed(METHODS)]
    without = [(name, "none") for name in names]
    with tempfile.TemporaryDirectory() as folder:
        # What is made or read in a process may leave threads there, which must not be forked.
        works = outcomes("read", without, folder) | outcomes("read", with_workers, folder)
        states = outcomes("resume", [*with_workers, *without], folder)
    for name in names:
        cells = [works[name, method] for method in [*METHODS, "none"]]
        state = in_words({method: states[name, method] for method in ["none", *METHODS]})
        yield [name, version, *cells, state]


def in_words(states: dict[str, str]) -> str:
    """Return what becomes of a state: once, if it is the same by each start method."""
    methods: dict[str, list[str]] = {}
    for method, outcome in states.items():
        if outcome:
            methods.setdefault(outcome, []).append("no workers" if method == "none" else method)
    if len(methods) < 2:
        return "".join(methods)
    return "; ".join(f"{', '.join(each)}: {outcome}" for outcome, each in methods.items())


def outcomes(step: str, tasks: list[Task], folder: str) -> dict[Task, str]:
    """Return what a step says of each task, in one process, and a new one after each that fails."""
    command = [sys.executable, "-m", "tests.packages", f"--{step}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}
    found: list[str] = []
    while rest := tasks[len(found) :]:
        done = subprocess.run(
            [*command, json.dumps(rest)], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
        )
        said = [line for line in done.stdout.splitlines() if line.startswith(OUTCOME)]
        found += [line.removeprefix(OUTCOME) for line in said]
        if done.returncode or not said:  # at its end, if all tasks are done
            hangs = done.returncode == -signal.SIGALRM
            found[len(tasks) - 1 :] = ["hangs" if hangs else f"exit code {done.returncode}"]
    return dict(zip(tasks, found, strict=True))


# --- the table


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of a table, by the packages' names."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return {row[0]: row for row in found}


def table(found: Iterable[list[str]]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_row(text: str, row: list[str]) -> str:
    """Return a table with another row of a package, unless that was tried before and not now."""
    found = rows(text)
    if row[1] != "not tried" or row[0] not in found:
        found[row[0]] = row
    return table(found[name] for name in CASES if name in found)


# --- the steps, in processes of their own


def step(what: str, tasks: list[Task]) -> None:
    """Print what comes of each task."""
    made = functools.cache(lambda name: CASES[name].make())
    for name, method in tasks:
        signal.alarm(SECONDS)  # it ends this process, and the workers follow
        try:
            dataset, options = made(name)
            options = options | {"num_workers": 0 if method == "none" else 2}
            if method != "none":
                options["mp_context"] = method
            function = read if what == "read" else resume
            outcome = function(dataset, options, name, method)
        except Exception as error:
            print(repr(error), file=sys.stderr)
            outcome = type(error).__name__
        print(OUTCOME + outcome, flush=True)


def read(dataset: Any, options: dict[str, Any], name: str, method: str) -> str:
    """Read an epoch; note a state in the midst of it, and what follows.

    It is read once more by the first method that has workers, and by that which has none; the
    epochs of the others are compared with that one.
    """
    with Loader(dataset, **options) as loader:
        batches = iter(loader)
        begun = [samples_of(batch) for batch in islice(batches, 2)]
        state = loader.state_dict()
        rest = [samples_of(batch) for batch in batches]
    Path(f"{name}, {method}, state").write_text(json.dumps([state, rest]))
    samples = sorted(sample for batch in begun + rest for sample in batch)
    if len(samples) != N:
        return f"{len(samples)} samples instead of {N}"
    if noted(f"{name}, samples", lambda: samples) != samples:
        return "other samples"

    def again() -> list[list[str]]:
        with Loader(dataset, **options) as loader:
            return [samples_of(batch) for batch in loader]

    whole = noted(f"{name}, {options['num_workers']} workers", again)
    return "yes" if begun + rest == whole else "other batches each time"


def resume(dataset: Any, options: dict[str, Any], name: str, method: str) -> str:
    """Read the rest of an epoch."""
    path = Path(f"{name}, {method}, state")
    if not path.exists():
        return ""
    state, rest = json.loads(path.read_text())
    with Loader(dataset, **options) as loader:
        loader.load_state_dict(state)
        resumed = [samples_of(batch) for batch in loader]
        reread = loader.stats.errors.reread
    if resumed != rest:
        return "other batches"
    return "exact, read again" if reread else "exact"


def noted(name: str, value: Callable[[], Any]) -> Any:
    """Return what was written into a file, which the first who asks writes."""
    path = Path(name)
    if not path.exists():
        path.write_text(json.dumps(value()))
    return json.loads(path.read_text())


def samples_of(batch: Any) -> list[str]:
    """Return the samples of a batch, in a form that is compared and written."""
    if hasattr(batch, "to_data_list"):  # of torch_geometric
        return [plain(graph.to_dict()) for graph in batch.to_data_list()]
    if isinstance(batch, dict):
        return [
            plain(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)
        ]
    if isinstance(batch, list | tuple):
        return [plain(row) for row in zip(*batch, strict=True)]
    return [plain(row) for row in batch]


def plain(sample: Any) -> str:
    if isinstance(sample, dict):
        return repr({key: plain(value) for key, value in sample.items()})
    if isinstance(sample, list | tuple):
        return repr([plain(each) for each in sample])
    return repr(sample.tolist() if hasattr(sample, "tolist") else sample)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--"):
        step(sys.argv[1][2:], json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
