"""What the system lets a process have: memory, processors, descriptors."""

from __future__ import annotations

import os


def free_memory() -> int:
    """Bytes of memory that this process and its children may still take, as far as known."""
    try:
        with open("/proc/meminfo", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file)
        free = int(fields[b"MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2 << 30  # no way to ask: what any machine for machine learning can spare
    left = (_read(group, "limit") - _read(group, "usage") for group in _groups("memory"))
    return min([free, *left])


def memory_limit() -> int:
    """Bytes that the control groups of this process allow it; very many if there is no limit."""
    return min([_read(group, "limit") for group in _groups("memory")], default=NO_LIMIT)


def oom_kills() -> int:
    """How many processes the kernel has killed because a control group of ours was full."""
    return sum(_read(group, "kills") for group in _groups("memory"))


def processors() -> int:
    """How many processors this process may use, by its affinity and its control groups."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min([count, *map(_quota, _groups("cpu"))])


def _quota(group: str) -> int:
    """Processors that a control group allows, rounded up."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = []
            for name in names:
                with open(f"{group}/{name}") as file:
                    words += file.read().split()
        except OSError:
            continue
        quota, period = words
        if quota not in ("max", "-1"):
            return max(1, -(-int(quota) // int(period)))
    return NO_LIMIT


def private_memory() -> int:
    """Bytes of memory that this process has for itself, not counting what it shares."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


NO_LIMIT = 1 << 60

"""Bytes from which a limit is none."""


_FILES = {
    # versions 1 and 2 of control groups: file and, where it holds several, the name of the number
    "limit": (("memory.limit_in_bytes", None), ("memory.max", None)),
    "usage": (("memory.usage_in_bytes", None), ("memory.current", None)),
    "kills": (("memory.oom_control", "oom_kill"), ("memory.events", "oom_kill")),
}


def _groups(controller: str) -> list[str]:
    """Folders of the control groups that limit this process's "memory" or "cpu", if visible."""
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.strip().split(":", 2) for line in file]
    except OSError:
        return []
    folders = []
    for _, controllers, path in groups:
        if controllers == "" or controller in controllers.split(","):
            base = "/sys/fs/cgroup" + (f"/{controller}" if controllers else "")
            parts = path.strip("/").split("/")
            folders += ["/".join([base, *parts[:depth]]) for depth in range(len(parts) + 1)]
    return folders


def _read(folder: str, what: str) -> int:
    """A number of a control group; no limit, or 0, where it has none."""
    for name, key in _FILES[what]:
        try:
            with open(f"{folder}/{name}") as file:
                words = file.read().split()
            return int(words[words.index(key) + 1] if key else words[0])
        except (OSError, ValueError):  # not this version, not seen from here, or "max"
            continue
    return NO_LIMIT if what == "limit" else 0


def most_files() -> int:
    """How many descriptors this process may have."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
