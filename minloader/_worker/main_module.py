"""What the processes that a worker starts are told of the main module.

The main module is never imported in a worker, nor in what that spawns. A ``multiprocessing.Pool``
refers to functions and classes of it by name all the same, in its own processes::

    parent: __main__ ── job ──> worker: __main__ has the functions and classes that came with it
                                   |── fork ───> has them, too
                                   `── spawn ──> runs a file in place of the main module's, which
                                                 defines them

A forked worker has the main module itself. What it spawns imports that, as multiprocessing does.
This module is loaded where a worker starts a process.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from contextlib import suppress
from typing import Any

from minloader._memory.files import SharedFile
from minloader._memory.pickling import pack, unpack
from minloader._memory.reducers import MAIN

_files: dict[tuple[str, ...], SharedFile] = {}
"""Files that define names of the main module, by these names. There is hardly more than one."""


def with_main(data: dict[str, Any]) -> dict[str, Any]:
    """Return what a child is told, with a main module to run if it would have none.

    Args:
        data: what ``multiprocessing.spawn.get_preparation_data`` gave for it.
    """
    if "init_main_from_path" not in data and "init_main_from_name" not in data:
        definitions = _main_definitions()
        if definitions:
            names = tuple(definitions)
            if names not in _files:
                _files[names] = _write(definitions)
            data["init_main_from_path"] = _files[names].path
    return data


def _main_definitions() -> dict[str, Any]:
    """Return the functions and classes that the main module has here, by their names."""
    main = dict(vars(sys.modules["__main__"]))
    return {
        name: value for name, value in main.items() if getattr(value, "__module__", None) in MAIN
    }


def _write(definitions: dict[str, Any]) -> SharedFile:
    """Write a file of Python that defines some names as they are here."""
    try:
        packed = [pack(definitions, down=True)]
    except Exception:  # one may use what was opened here, and cannot be sent on: the others are
        packed = []
        for name, value in definitions.items():
            with suppress(Exception):
                packed.append(pack({name: value}, down=True))
    file = SharedFile()
    multiprocessing.util.Finalize(None, file.close, exitpriority=0)
    with open(file.fd, "w", encoding="utf-8", closefd=False) as text:
        text.write(f"from {__name__} import define\n")
        for each in packed:
            text.write(f"define(globals(), {each!r})\n")
        text.write("del define\n")
    return file


def define(variables: dict[str, Any], packed: bytes) -> None:
    """Define what was packed in a main module, in a process that a worker has started."""
    variables.update(unpack(packed))
