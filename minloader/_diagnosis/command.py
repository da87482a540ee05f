"""The command ``python -m minloader.doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minloader._diagnosis.examination import SECONDS, Report, examine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``python -m minloader.doctor``.

    Args:
        argv: its arguments; None: those of this process.

    Returns:
        0, and the report is printed; 1: the loader raised; 130: Ctrl-C. What is known by then is
        printed in any case.

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
    name = options.pop("make_loader")
    file = options.pop("json")
    options["step"] /= 1e3  # in seconds
    if file and (file.is_dir() or not file.parent.is_dir()):
        parser.error(f"--json must be a file in a folder that is there, got {file}")
    sys.argv[1:] = []  # they are not for the user's module, which may look at its own
    told = partial(print, file=sys.stderr)
    try:
        report = examine(_find(name), progress=told, timed=_print_timings, **options)
    except NotFoundError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        ours = Path(__file__).parent.parent in Path(last.filename).parents  # it says all
        traceback.print_exception(error, limit=0 if ours and error.__cause__ is None else None)
        return 1
    print(report.lines("reproducible"))
    if file:
        file.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 0


def _print_timings(report: Report) -> None:
    print(report.timings(), flush=True)  # whatever becomes of the checks


class NotFoundError(Exception):
    """There is nothing of the name that was given."""


def _find(name: str) -> Any:
    """Return the object that ``module:attribute`` or ``file.py:attribute`` names.

    Raises:
        NotFoundError: there is none.
        Exception: the module raised it when it was imported.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise NotFoundError(
            f"{name!r} must be module:function or file.py:function, such as train.py:make_loader"
        )
    file = Path(module_name).resolve() if module_name.endswith(".py") else None
    sys.path.insert(0, str(file.parent if file else Path.cwd()))  # workers get the same path
    wanted = file.stem if file else module_name
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        if not f"{wanted}.".startswith(f"{error.name}."):
            raise  # it was found, and imports what is not there
        text = f"there is no file {file}" if file and not file.exists() else str(error)
        raise NotFoundError(text) from error
    if file and Path(module.__file__ or "").resolve() != file:
        raise NotFoundError(f"{file} is hidden by {module}, which has the same name: rename it")
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise NotFoundError(f"{module.__name__} has no {attribute}{meant}")
    return getattr(module, attribute)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        message = f"must be numbers with commas between them, such as 1,2,4, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
