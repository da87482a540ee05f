"""Prints the table of docs/torch.md: tests of torch and of others, with torch's loader and ours.

``python -m tests.torch_score CHECKOUT...`` takes checkouts, or source distributions, of torch,
torchdata, accelerate, lightning, datasets and the like (``pip download --no-binary :all:
--no-deps accelerate==1.15.0`` gives one), and runs the suites that it finds in them, twice each.
Where it finds none it says what to give. It is a plugin of pytest, too: that is how the loader is
replaced. ``--keep FOLDER`` keeps what every test gave, and goes on from that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

SUITES = {
    "torch, `test_dataloader.py`": "test/test_dataloader.py",
    "torchdata, the same of its own": "test/stateful_dataloader/test_dataloader.py",
    "torchdata, states": "test/stateful_dataloader/test_state_dict.py",
    "torchdata, samplers": "test/stateful_dataloader/test_sampler.py",
    "Accelerate": "tests/test_data_loader.py",
    "Hugging Face datasets, streams": "tests/test_iterable_dataset.py",
    "Lightning, combined loaders": "tests/tests_pytorch/utilities/test_combined_loader.py",
    "Lightning, data": "tests/tests_pytorch/utilities/test_data.py",
    "Lightning, loops": "tests/tests_pytorch/loops/test_loops.py",
    "lhotse, samplers in loaders": "test/dataset/sampling/test_sampler_restoring.py",
    "MONAI": "tests/data/test_dataloader.py",
}
"""Where each suite is in a checkout."""

WHY = {
    "iterdatapipe|IterDataPipe|mapdatapipe|DataPipe": "a `DataPipe` is refused",
    "nested_tensor_multiprocessing": "the same error, in other words",
    "partial_workers|test_get_worker_info": "they look at `_workers` of torch's iterator",
    "ctor_args|test_iterable_style_dataset|test_timeout": "the same errors, in other words",
    "test_worker_init_fn": "it seeds torch in `worker_init_fn`; here each batch is seeded",
    "large_sampler_indices": "it waits for 17 s, too little on a busy machine",
    "restart.*parity": "they compare states of loaders, which have other seeds",
    "workers_are_shutdown": "they derive a class from torch's iterator",
    "initial_state|test_inline|test_mp|one_completed_worker|no_completed_workers|::test$": "they "
    "read torchdata's own format of states",
    "load_then_state": "a state that was loaded, and noted again, has the generators of both times",
    "skip_steps": "whether a shard's state is of the last batch or the one before depends on time",
    "num_workers_mismatch|init_error": "they want an error where ours goes on, or that comes with "
    "`next`",
    "of_order_index_ds|in_order_index_ds|ind_worker_queue": "with torch workers take turns; here "
    "the first that is free makes the batch",
}
"""Why tests differ, by patterns of their names."""

RESULTS = "MINLOADER_SCORE"
LOADER = "MINLOADER_SCORE_LOADER"


# --- as a plugin of pytest


def pytest_configure(config: Any) -> None:
    """Replace torch's loader, or torchdata's, before the suite imports it."""
    if os.environ.get(LOADER) != "ours":
        return
    from minloader.torch import DataLoader

    if "stateful_dataloader" in config.args[0]:
        importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader = DataLoader
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        importlib.import_module(name).DataLoader = DataLoader


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what a run that was cut short has answered."""
    known = answers(Path(os.environ[RESULTS]))
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ[RESULTS], "a") as file:
            print(json.dumps([report.nodeid, report.outcome]), file=file)


# --- as a program


def answers(file: Path) -> dict[str, str]:
    """Return what each test gave: "passed", "failed" or "skipped"."""
    lines = file.read_text().splitlines() if file.exists() else []
    found: dict[str, str] = {}
    for name, outcome in map(json.loads, lines):
        found[name] = outcome if found.get(name) != "failed" else "failed"
    return found


def run(test: Path, loader: str, file: Path) -> dict[str, str]:
    """Run a suite with a loader."""
    with tempfile.TemporaryDirectory() as folder:
        # By another name than tests.torch_score: the checkout may have a package of that name.
        shutil.copy(__file__, Path(folder, "torch_score.py"))
        paths = [folder, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        known = {RESULTS: str(file), LOADER: loader, "PYTHONPATH": os.pathsep.join(paths)}
        options = ["-q", "-c", os.devnull, "--rootdir", str(test.parent), "--timeout=300"]
        command = ["-m", "pytest", "-p", "torch_score", "-p", "no:cacheprovider", *options]
        done = subprocess.run(
            [sys.executable, *command, "--import-mode=importlib", str(test)],
            env=os.environ | known,
            cwd=test.parent,
            stdout=sys.stderr,
        )
    if done.returncode not in (0, 1, 5):
        print(f"{test} ended with {done.returncode}; what it lacks is said above", file=sys.stderr)
    return answers(file)


def why(names: list[str]) -> str:
    """Return the reasons why tests differ, each with its tests."""
    reasons: dict[str, Counter[str]] = {}
    for name in names:
        known = (reason for pattern, reason in WHY.items() if re.search(pattern, name))
        short = name.rsplit("::", 1)[-1].partition("[")[0]
        reasons.setdefault(next(known, "?"), Counter())[short] += 1
    parts = []
    for reason, counts in reasons.items():
        named = [f"`{name}`" + (f" ({n})" if n > 1 else "") for name, n in counts.items()]
        parts.append(f"{', '.join(named)}: {reason}")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for what every test gave")
    options = parser.parse_args()
    keep = Path(tempfile.mkdtemp()) if options.keep is None else options.keep
    keep.mkdir(exist_ok=True)
    print(
        "| suite | tests | pass with its loader | with ours | what differs |\n|---|---|---|---|---|"
    )
    for number, (title, place) in enumerate(SUITES.items()):
        found = [each / place for each in options.checkouts if (each / place).exists()]
        if not found:
            print(f"{title}: give a checkout that has {place}", file=sys.stderr)
            continue
        files = {name: keep.resolve() / f"{number}-{name}.jsonl" for name in ("torch", "ours")}
        theirs, ours = (run(found[0].resolve(), name, file) for name, file in files.items())
        both = [name for name in theirs if "skipped" not in (theirs[name], ours.get(name))]
        passed = [[each.get(name) for name in both].count("passed") for each in (theirs, ours)]
        worse = [name for name in both if theirs[name] == "passed" != ours.get(name)]
        print(f"| {title} | {len(both)} | {passed[0]} | {passed[1]} | {why(worse)} |", flush=True)


if __name__ == "__main__":
    main()
