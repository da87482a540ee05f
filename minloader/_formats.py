"""How messages show values, and what several of them say.

Nothing here fails, whatever it is given.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from minloader._errors import breaks_in

brief_repr = reprlib.repr
"""How messages show a value: never long, never failing."""


def counted(number: int, noun: str) -> str:
    """Return how many there are of something, for a message: "1 batch", or "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def format_bytes(count: float) -> str:
    """Return an amount of memory in three digits: "24.3 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:,.0f} GB"


RANKS = "rank", "process_index"
"""What states call the rank of the process that they are of."""


def differences(here: Any, then: Any, name: str = "") -> list[str]:
    """Return in words what of a state is another than it was, but for the rank it is of.

    Args:
        here: what is there now.
        then: what was there; perhaps as JSON has it, with lists in place of tuples.
        name: of the part that is compared; "" for the whole.
    """
    if isinstance(here, Mapping) and isinstance(then, Mapping):
        parts = {str(key): value for key, value in here.items()}
        former = {str(key): value for key, value in then.items()}
        found = []
        for key in (parts | former).keys() - {*RANKS}:
            path = f"{name}.{key}" if name else key
            found += differences(parts.get(key), former.get(key), path)
        return sorted(found)
    if isinstance(here, list | tuple) and isinstance(then, list | tuple) and len(here) == len(then):
        found = []
        for n, (now, before) in enumerate(zip(here, then, strict=True)):
            found += differences(now, before, f"{name}[{n}]")
        return found
    if _are_equal(here, then):
        return []
    where = f"{name} " if name else ""
    return [f"{name or 'it'} is {brief_repr(here)}, but the state is of {where}{brief_repr(then)}"]


def _are_equal(here: Any, then: Any) -> bool:
    if hasattr(here, "tolist") and hasattr(then, "tolist"):  # arrays, and tensors
        here = here.tolist()
        then = then.tolist()
    try:
        return bool(here == then)
    except Exception as error:  # of the user's own objects, which are not known to differ
        if breaks_in(error):
            raise
        return True


ADVICE = {
    "SystemExit": "it ends nothing here; raise an error that says what is wrong, in place of "
    "sys.exit()",
    "BdbQuit": "a debugger needs the terminal, which worker processes do not have: make the "
    "batches in your own process, with num_workers=0",
}
"""What to do about errors that say nothing themselves, by the name of their type."""


def refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    """Say where a debugger can be used; for ``sys.breakpointhook`` in a worker process."""
    raise RuntimeError(f"breakpoint() in a worker: {ADVICE['BdbQuit']}")


said: dict[str, object] = {}
"""Lines of the log that say of themselves that they are said once, and were said."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of ours is to come out: one that is said once is so in a program.

    A worker knows of its own lines. They come here once more in the parent, which knows of all.
    """
    line = str(record.msg)
    news = object()
    return "said once" not in line or said.setdefault(line, news) is news  # in one step


logging.getLogger("minloader").addFilter(is_news)
