"""Prints who has which bug, as a table of Markdown: ``python -m tests.zoo``.

Each program runs by itself, in a folder that is removed afterwards, for a minute at most.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.zoo.bugs import BUGS

LOADERS = {
    "minloader.torch": "minloader.torch",
    "torch": "torch.utils.data",
    "torchdata": "torchdata.stateful_dataloader",
}

SECONDS = 60
"""How long a program may run. One that takes longer hangs."""


def outcome(bug: str, loader: str) -> str:
    """Whether a loader has a bug: "no", "has it", "hangs" or "no states"."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    code += f"from tests.zoo.__main__ import show\nshow({bug!r}, {loader!r})"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        options = {"cwd": folder, "capture_output": True, "text": True, "timeout": SECONDS}
        try:
            done = subprocess.run(command, **options)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            return "hangs"
    lines: list[str] = done.stdout.splitlines() or [done.stderr]
    return lines[-1]


def show(name: str, loader: str) -> None:
    """Print whether a loader has a bug. Runs in a process of its own."""
    module = importlib.import_module(LOADERS[loader])
    bug, kind = BUGS[name], getattr(module, "StatefulDataLoader", None) or module.DataLoader
    try:
        has_it = bug.program(kind)
    except Exception as error:
        print(repr(error), file=sys.stderr)
        if "has no attribute 'state_dict'" in str(error):
            return print("no states")
        has_it = bug.error
    return print("has it" if has_it else "no")


if __name__ == "__main__":
    print("| bug |", " | ".join(LOADERS), "|")
    print("|---|" + "---|" * len(LOADERS))
    for name, bug in BUGS.items():
        found = " | ".join(outcome(name, each) for each in LOADERS)
        print(f"| {bug.title} | {found} |", flush=True)
