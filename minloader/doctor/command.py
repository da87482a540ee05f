"""The command ``python -m minloader.doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minloader.doctor.examination import SECONDS, examine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``python -m minloader.doctor``.

    Args:
        argv: its arguments; None: those of this process.

    Returns:
        0, and the report is printed; 1: the loader raised; 130: Ctrl-C.

    Raises:
        SystemExit: with 2, an argument is wrong.
    """
    about = "Runs a loader with several settings, and says which is best, and what limits it."
    parser = argparse.ArgumentParser(prog="python -m minloader.doctor", description=about)
    add = parser.add_argument
    add("make_loader", help="module:function or file.py:function; the function returns a Loader")
    add("--workers", type=_numbers, metavar="N,N", help="default: 0 to processors + 1")
    add("--prefetch", type=_numbers, metavar="N,N", default=[2, 1, 4], help="default: 2,1,4")
    add("--seconds", type=float, metavar="S", default=SECONDS, help="for each setting; default: 3")
    add("--step", type=float, metavar="MS", default=0.0, help="milliseconds of a training step")
    add("--json", type=Path, metavar="FILE", help="also write the report there")
    options = vars(parser.parse_args(argv))
    name, file = options.pop("make_loader"), options.pop("json")
    options["step"] /= 1e3  # in seconds
    if file and not file.parent.is_dir():
        parser.error(f"--json: there is no folder {file.parent}")
    sys.argv[1:] = []  # they are not for the user's module, which may look at its own
    try:
        report = examine(_find(name), progress=_show_progress, **options)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        lines = traceback.format_exception_only if _is_plain(error) else traceback.format_exception
        print("".join(lines(error)), end="", file=sys.stderr)
        return 1
    print(report)
    if file:
        file.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 0


def _find(name: str) -> Any:
    """Return the object that ``module:attribute`` or ``file.py:attribute`` names.

    Raises:
        ArgumentTypeError: there is none.
        Exception: the module raised it when it was imported.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise argparse.ArgumentTypeError(
            f"{name!r} must be module:function or file.py:function, such as train.py:make_loader"
        )
    file = Path(module_name).resolve() if module_name.endswith(".py") else None
    if file and not file.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {file}")
    sys.path.insert(0, str(file.parent if file else Path.cwd()))  # workers get the same path
    try:
        module = importlib.import_module(file.stem if file else module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # another one, which the module imports
        raise argparse.ArgumentTypeError(f"there is no module {error.name}") from error
    if file and Path(module.__file__ or "").resolve() != file:
        raise argparse.ArgumentTypeError(
            f"{file} is hidden by {module.__file__ or 'a module'} of the same name: rename it"
        )
    if not hasattr(module, attribute):
        raise argparse.ArgumentTypeError(f"{module.__name__} has no {attribute}")
    return getattr(module, attribute)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        error = f"must be whole numbers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(error) from None


def _is_plain(error: Exception) -> bool:
    """Return whether an error needs no traceback, since no code but ours had a part in it."""
    package = Path(__file__).parent.parent
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return error.__cause__ is None and all(package in file.parents for file in files)


def _show_progress(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
