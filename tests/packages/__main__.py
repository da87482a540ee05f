"""Writes what works with which package into docs/packages.md: ``python -m tests.packages``.

Each package is read without workers and by each start method, and resumed: each time in a process
of its own, for three minutes at most, in one folder. Arguments take some of the packages by their
names; the rows of the others stay, and so does that of a package that is not installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from minloader import Loader
from tests.packages.cases import CASES, N

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "packages.md"
TABLE = re.compile(r"(?<=<!-- packages -->\n\n).*?(?=\n\n<!-- end of packages -->)", re.DOTALL)
METHODS = ["spawn", "fork", "forkserver"]
HEAD = ["package", "version", *METHODS, "without workers", "state"]
SECONDS = 180


def main(names: list[str]) -> None:
    """Try the packages, and write each row as soon as it is known."""
    for name in names or CASES:
        row = tried(name)
        print(table([row]), end="\n\n", flush=True)
        page = PAGE.read_text()
        PAGE.write_text(TABLE.sub(lambda match: with_row(match.group(), row), page))  # noqa: B023


def tried(name: str) -> list[str]:
    """Return the row of a package."""
    try:
        version = metadata.version(CASES[name].distribution)
    except metadata.PackageNotFoundError:
        return [name, "not tried", *[""] * (len(HEAD) - 2)]
    works, states = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        outcome(name, "none", "make", folder)  # elsewhere: what has threads must not be forked
        for method in ["none", *METHODS]:
            works[method] = outcome(name, method, "read", folder)
            if (Path(folder) / f"state {method}").exists():
                states[method] = outcome(name, method, "resume", folder)
    cells = [works[method] for method in [*METHODS, "none"]]
    return [name, version, *cells, in_words(states)]


def in_words(states: dict[str, str]) -> str:
    """Return what becomes of a state: once, if it is the same by each start method."""
    methods: dict[str, list[str]] = {}
    for method, outcome in states.items():
        methods.setdefault(outcome, []).append("no workers" if method == "none" else method)
    if len(methods) < 2:
        return "".join(methods)
    return "; ".join(f"{', '.join(each)}: {outcome}" for outcome, each in methods.items())


def outcome(name: str, method: str, step: str, folder: str) -> str:
    """Return what a step says, or how it fails."""
    command = [sys.executable, "-m", "tests.packages", f"--{step}", name, method]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    said = done.stdout.splitlines()
    return said[-1] if said and done.returncode == 0 else f"exit code {done.returncode}"


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


def step(what: str, name: str, method: str) -> str:
    try:
        dataset, options = CASES[name].make()
        options["num_workers"] = 0 if method == "none" else 2
        if method != "none":
            options["mp_context"] = method
        if what == "read":
            return read(dataset, options, method)
        return resume(dataset, options, method) if what == "resume" else "made"
    except Exception as error:
        print(repr(error), file=sys.stderr)
        return type(error).__name__


def read(dataset: Any, options: dict[str, Any], method: str) -> str:
    """Read an epoch twice; note a state in the midst of it, and what follows."""
    with Loader(dataset, **options) as loader:
        whole = [samples_of(batch) for batch in loader]
    with Loader(dataset, **options) as loader:
        batches = iter(loader)
        begun = [samples_of(batch) for batch in islice(batches, 2)]
        state = loader.state_dict()
        rest = [samples_of(batch) for batch in batches]
    Path(f"state {method}").write_text(json.dumps([state, rest]))

    samples = sorted(sample for batch in whole for sample in batch)
    if len(samples) != N:
        return f"{len(samples)} samples instead of {N}"
    without_workers = Path("samples")
    if not without_workers.exists():
        without_workers.write_text(json.dumps(samples))
    if json.loads(without_workers.read_text()) != samples:
        return "other samples"
    return "yes" if begun + rest == whole else "other batches each time"


def resume(dataset: Any, options: dict[str, Any], method: str) -> str:
    """Read the rest of an epoch."""
    state, rest = json.loads(Path(f"state {method}").read_text())
    with Loader(dataset, **options) as loader:
        loader.load_state_dict(state)
        resumed = [samples_of(batch) for batch in loader]
        reread = loader.stats.errors.reread
    if resumed != rest:
        return "other batches"
    return "exact, read again" if reread else "exact"


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
        print(step(sys.argv[1][2:], *sys.argv[2:]))
    else:
        main(sys.argv[1:])
