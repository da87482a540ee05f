"""What limits the loop, and the argument to change."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from minloader._checks import duration

if TYPE_CHECKING:
    from minloader._insight.counters import Stats

from minloader._memory.limits import processors

logger = logging.getLogger("minloader")


def judge(stats: Stats) -> tuple[str, str]:
    """What limits the loop: a kind of span, or "" if that cannot be said, and the sentence."""
    if not stats.batches:
        return "", "no batch has been delivered yet"
    workers, start = stats.num_workers, stats._starting
    total, wait = stats.seconds - start, stats.wait - start
    if start > 3 * total:
        return "", (
            f"the first batch took {duration(stats.startup)}, {_share(start, stats.seconds)} of "
            "the time so far: look again after more batches; loader.start() begins earlier"
        )
    waited = f"the consumer waited {_share(wait, total)} of the time"
    busy = min(1.0, stats._work / (total * max(workers, 1)))
    idle = f", the workers were idle {_percent(1 - busy)}" if workers else ""
    if wait < 0.1 * total:
        needed = max(1, math.ceil(workers * busy / 0.8))
        fewer = f": num_workers={needed} would do" if needed < workers else ""
        return "own", f"the consumer is the limit: it waited {_share(wait, total)} of the time" + (
            idle + fewer
        )
    if stats.sampler > wait / 2:
        each = duration(stats.sampler / stats.batches)
        return "draw", f"the sampler is the limit: it takes {each} a batch; {waited}{idle}"
    part, share = _largest(stats)
    limit = f"{_NAMES[part]} is the limit, with {_percent(share)} of the work"
    if not workers:
        return part, f"{limit}: {waited}; num_workers=1 or more makes batches meanwhile"
    if busy > 0.6 and stats._work > _TINY * stats.batches:
        who = f"{_who(workers)} busy {_percent(busy)}"
        return part, f"{limit}: {who}, {waited}; {_advice(stats, part)}"
    return "", f"{waited}{idle.replace(',', ', but')}: {_between(stats, total, wait)}"


_TINY = 30e-6

"""Seconds of a worker below which it is the delivery of a batch that costs, not its making."""


_NAMES = {
    "dataset": "the dataset",
    "transform": "transform",
    "collate": "collate_fn",
    "transport": "packing batches",
}


def _largest(stats: Stats) -> tuple[str, float]:
    """What most of the workers' time goes to, and its share."""
    parts = stats._parts
    part = max(parts, key=lambda name: parts[name])
    return part, parts[part] / (stats._work or 1.0)


def _who(workers: int) -> str:
    return {1: "the worker was", 2: "both workers were"}.get(workers, f"all {workers} workers were")


def _advice(stats: Stats, part: str) -> str:
    """What to do where the workers are the limit."""
    if part == "transport":
        if stats.overflowed > stats.batches / 10:
            return "more shared_memory would help, since batches go through the pipe"
        return "make large arrays with collate or minloader.empty, and few small objects"
    if stats.executor == "thread":
        return "executor='process' would help, unless they wait for files or the network"
    if stats.num_workers < processors():
        return "more workers would help (num_workers)"
    return (
        f"make it cheaper, or set num_workers past the {processors()} processors there are if it "
        "waits for files or the network"
    )


def _between(stats: Stats, total: float, wait: float) -> str:
    """What to do where neither sampler nor workers are the limit."""
    each = total / stats.batches
    if stats.replaced > total / 10:
        return (
            f"workers died or grew too large, and it takes time to replace them ({stats.replaced} "
            "so far); the log says why"
        )
    if stats.overflowed > stats.batches / 10:
        return "batches go through the pipe, so more shared_memory would help"
    if each < 200e-6:
        return (
            f"a batch takes {duration(each)}, little for what it costs to hand over, so larger "
            "batches would help (batch_size, or the sampler)"
        )
    if stats.unpacking > wait / 2:
        return (
            f"unpickling a batch takes {duration(stats.unpacking / stats.batches)} in this "
            "process; have the dataset return arrays rather than many objects"
        )
    if stats.slowest > max(3 * stats._work / stats.batches, each):
        return (
            f"some batches are slow ({duration(stats.slowest)}, against "
            f"{duration(stats._work / stats.batches)} on average) and the others wait for them, so "
            "a larger prefetch_factor or in_order=False would help"
        )
    return "more tasks under way would help (prefetch_factor)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(part: float, whole: float) -> str:
    return _percent(part / whole) if whole else _percent(0.0)
