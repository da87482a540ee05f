"""Start the standard library's fork server such that workers find their imports done.

    calling process ── starts ──> fork server: imports what the job needs, once
                                     |── forks ──> worker: has the modules already
                                     `── forks ──> worker, also in place of one that died

A process has one fork server, for as long as it lives. The first loader decides what is imported
there. Nothing of the main module is, and no library gets threads.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from types import ModuleType

from minloader._memory.limits import NO_FOLDER, has_current_folder
from minloader._pools.cpython import modules_to_preload
from minloader._pools.environment import default_environment, hash_seed
from minloader._pools.interrupts import interrupts_held
from minloader._pools.worker_plugins import MODULES
from minloader._worker.entry import refuse_avalanche

OF_WORKERS = "minloader._worker.start", "minloader._worker.stream_worker"
"""What workers need, with all that these import: what they import themselves is not shared."""


def start_fork_server(context: BaseContext, modules: Iterable[str], seed: int) -> None:
    """Start the fork server, unless it runs. Does not wait until it has imported the modules.

    What it raises is the system's: there is no room for its socket, say.

    Args:
        context: of the start method "forkserver".
        modules: names of those that workers will need.
        seed: of the loader, from which that of hashes follows.
    """
    refuse_avalanche()  # in another loader's server, too
    needed = {*modules, *imported_by(modules), *OF_WORKERS, *MODULES}
    asked_for = modules_to_preload()
    context.set_forkserver_preload([*asked_for, *sorted(needed - {"__main__", *asked_for})])
    # Have libraries that are loaded there use one thread: a process with threads should not be
    # forked. A worker sets that for itself, but after these are loaded.
    # Ctrl-C within it would leave the variables set for all that this process starts later.
    with (
        interrupts_held(),
        default_environment("OMP_NUM_THREADS", "1"),
        hash_seed(seed),
    ):
        try:
            forkserver.ensure_running()
        except OSError as error:
            if not has_current_folder():
                error.add_note(f"minloader: {NO_FOLDER}")
            # The folder is not there, or the path of a socket in it too long (without a number).
            elif error.errno in (errno.ENOENT, None):
                error.add_note(
                    "minloader: the fork server has a socket among temporary files: set TMPDIR to "
                    "a folder that is there, with a shorter path, or take mp_context='spawn'"
                )
            raise


def imported_by(names: Iterable[str]) -> Iterator[str]:
    """Name the packages of what some modules have imported.

    The server may not find a module that lies beside the script, since older versions do not take
    over ``sys.path`` (cpython #126631). But it finds torch, which that module imports.
    """
    for name in names:
        for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
            home = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "")
            package = str(home).partition(".")[0]
            if package in sys.modules and package not in sys.stdlib_module_names:
                yield package
