"""Prints who has which bug, as a table of Markdown: ``python -m tests.zoo``.

Each program runs by itself, in a folder that is removed afterwards, for three minutes at most.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

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


def outcomes(loader: str) -> dict[str, str]:
    """Which bugs a loader has: "no", "has it", "hangs", "no states" or "no such option"."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    code += f"from tests.zoo.__main__ import show_each\nshow_each({loader!r})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return dict(line.split(": ") for line in done.stdout.decode().splitlines())


def show_each(loader: str) -> None:
    """Fork a program for each bug, so that torch is imported once, and print what each says."""
    importlib.import_module(LOADERS[loader])
    for bug in BUGS:
        folder = Path(tempfile.mkdtemp())
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(folder)
            with open("out", "w") as out:  # no pipe: a worker that is left would hold it open
                os.dup2(out.fileno(), 1)
            signal.alarm(SECONDS)
            return show(bug, loader)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        said = (folder / "out").read_text().splitlines() or ["fails"]
        hangs = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        print(f"{bug}: {'hangs' if hangs else said[-1]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)


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
    found = [outcomes(each) for each in loaders]
    for name, bug in BUGS.items():
        print(f"| {bug.title} | {' | '.join(each[name] for each in found)} |")
