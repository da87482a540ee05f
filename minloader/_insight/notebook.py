"""Show a loader in a notebook, which must not keep its workers alive for that."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

from minloader._insight.counters import Stats

OUTPUT = re.compile(r"_{1,3}|_\d+")
"""Variables that IPython sets to what a cell has shown."""


def show(loader: Any) -> str:
    """Return the stats of a loader as a table in HTML, and have IPython forget the loader.

    IPython keeps what a cell has shown until the kernel ends: as ``_``, as ``_7``, as ``Out[7]``.
    When the cell has run, these become the stats.
    """
    stats = loader.stats
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if shell:
        # With the id: the callback must not be what keeps the loader.
        forget = partial(_forget, shell, id(loader), stats)
        shell.events.register("post_run_cell", forget)
    table: str = stats._repr_html_()
    return table


def _forget(shell: Any, loader_id: int, stats: Stats, result: Any) -> None:
    events = shell.events
    for callback in list(events.callbacks["post_run_cell"]):
        if getattr(callback, "func", None) is _forget:
            events.unregister("post_run_cell", callback)
    places = shell.user_ns, shell.user_ns_hidden, vars(shell.displayhook), shell.user_ns["_oh"]
    for place in places:
        for name, value in list(place.items()):
            if id(value) == loader_id and (isinstance(name, int) or OUTPUT.fullmatch(name)):
                place[name] = stats
    if id(result.result) == loader_id:
        result.result = stats
