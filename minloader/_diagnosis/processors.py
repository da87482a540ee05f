"""How many processors there are for a program."""

from __future__ import annotations

import os

from minloader._memory.limits import NO_LIMIT, groups, words


def processors() -> int:
    """How many processors this process may use, by its affinity and its control groups."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min([count, *map(_quota, groups("cpu"))])


def _quota(group: str) -> int:
    """Processors that a control group allows, rounded up."""
    found = words(group, "cpu.max")
    found = found or words(group, "cpu.cfs_quota_us") + words(group, "cpu.cfs_period_us")
    if len(found) < 2 or found[0] in ("max", "-1"):
        return NO_LIMIT
    return max(1, -(-int(found[0]) // int(found[1])))
