"""Prints who has which bug, as a table of Markdown: ``python -m tests.zoo``.

Each program runs by itself, in a folder that is removed afterwards, for three minutes at most.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.zoo.bugs import BUGS, NoSuchOption

LOADERS = {
    "minloader.torch": "minloader.torch",
    "torch": "torch.utils.data",
    "torchdata": "torchdata.stateful_dataloader",
    "grain": "tests.zoo.with_grain",
    "litdata": "tests.zoo.with_litdata",
}

SECONDS = 180
"""How long a program may run. One that takes longer hangs."""


def outcome(bug: str, loader: str) -> str:
    """Whether a loader has a bug: "no", "has it", "hangs", "no states" or "no such option"."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    code += f"from tests.zoo.__main__ import show\nshow({bug!r}, {loader!r})"
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/out", "w+") as out:
        # Not a pipe, which would be open for as long as a worker that is left.
        options: Any = {"cwd": folder, "stdout": out, "start_new_session": True}
        child = subprocess.Popen([sys.executable, "-c", code], **options)
        try:
            child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        return (out.read().splitlines() or ["fails"])[-1]


def show(name: str, loader: str) -> None:
    """Print whether a loader has a bug. Runs in a process of its own."""
    module = importlib.import_module(LOADERS[loader])
    bug, kind = BUGS[name], getattr(module, "StatefulDataLoader", None) or module.DataLoader
    try:
        has_it = bug.program(kind)
    except NoSuchOption:
        return print("no such option")
    except ImportError:  # of a trainer
        return print("not installed")
    except Exception as error:
        print(repr(error), file=sys.stderr)
        if "has no attribute 'state_dict'" in str(error):
            return print("no states")
        has_it = bug.error
    return print("has it" if has_it else "no")


if __name__ == "__main__":
    loaders = list(filter(importlib.util.find_spec, LOADERS))
    print("| bug |", " | ".join(loaders), "|")
    print("|---|" + "---|" * len(loaders))
    for name, bug in BUGS.items():
        found = " | ".join(outcome(name, each) for each in loaders)
        print(f"| {bug.title} | {found} |", flush=True)
