"""What the system lets a process have: memory, descriptors."""

from __future__ import annotations

import errno
import os
from typing import Any

NO_LIMIT = 1 << 60
"""Bytes from which a limit is none."""


def free_memory() -> int:
    """Bytes of memory that this process and its children may still take, as far as known."""
    try:
        with open("/proc/meminfo", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file)
        free = int(fields[b"MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2 << 30  # no way to ask: what any machine for machine learning can spare
    return min([free, *(_limit(group) - _usage(group) for group in groups("memory"))])


def memory_limit() -> int:
    """Bytes that the control groups of this process allow it; NO_LIMIT or more if they do not."""
    return min([NO_LIMIT, *map(_limit, groups("memory"))])


def oom_kills() -> int:
    """How many processes the kernel has killed because a control group of ours was full."""
    return sum(map(_kills, groups("memory")))


def private_memory(pid: int | str = "self") -> int:
    """Bytes of memory that a process has for itself, not counting what it shares; 0 if unknown."""
    pages = words(f"/proc/{pid}", "statm")  # all, resident, shared
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def words(folder: str, *names: str) -> list[str]:
    """Words in the first of some files of the kernel that can be read; [] if none can."""
    for name in names:
        try:
            with open(f"{folder}/{name}", encoding="utf-8") as file:
                return file.read().split()
        except OSError:  # gone, or not this version, or not seen from here
            continue
    return []


def names(folder: str) -> list[str]:
    """Names in a folder of the kernel; [] where there is none, or no descriptor to look."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def most_files() -> int:
    """How many descriptors this process may have."""
    return _soft_limit("RLIMIT_NOFILE", windows=512, unlimited=1 << 20)


def largest_file() -> int:
    """How many bytes a file may have that this process writes; NO_LIMIT if there is no limit."""
    return _soft_limit("RLIMIT_FSIZE", windows=NO_LIMIT, unlimited=NO_LIMIT)


def _soft_limit(name: str, *, windows: int, unlimited: int) -> int:
    try:
        import resource
    except ImportError:
        return windows
    soft, _ = resource.getrlimit(getattr(resource, name))
    return unlimited if soft == resource.RLIM_INFINITY else soft


_NEEDS: dict[Any, str] = {
    errno.EMFILE: "need more open files: raise the limit (ulimit -n)",
    errno.ENFILE: "need more open files than the machine allows",
    errno.EAGAIN: "are processes and threads, and need more of them: raise the limit (ulimit -u, "
    "or pids.max of a control group)",
    errno.EFBIG: "need larger files: raise the limit (ulimit -f)",
    errno.ENOMEM: "need more memory, or address space (ulimit -v)",
    **dict.fromkeys(
        (errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOSYS, errno.ENOENT),
        "need semaphores, which are in /dev/shm: let it be there, writable, and not full",
    ),
}


NO_FOLDER = "workers begin in the current folder, which is gone: change to another (os.chdir)"


def remedy(error: BaseException) -> str:
    """What to do when the system refuses what a worker needs, to follow a message; "" if unknown.

    An error that names a file is about that file, which is none of these.
    """
    number = getattr(error, "errno", 0) if getattr(error, "filename", None) is None else 0
    if number == errno.ENOENT and not has_current_folder():
        return f"; {NO_FOLDER}"
    if str(error) == "can't start new thread":  # a RuntimeError, which has no number
        number = errno.EAGAIN
    need = _NEEDS.get(number)
    return f"; workers {need}, or use fewer (num_workers=0 needs none of it)" if need else ""


def has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


# --- Control groups. Each file has one name in version 1 and another in version 2.


def groups(controller: str) -> list[str]:
    """Folders of the control groups that limit this process's "memory" or "cpu", if visible."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
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


def _limit(group: str) -> int:
    found = words(group, "memory.limit_in_bytes", "memory.max")
    return int(found[0]) if found and found[0] != "max" else NO_LIMIT


def _usage(group: str) -> int:
    """Bytes that a control group uses, without its cache of files: the kernel frees that at need.

    Shared memory is no part of that cache, though it is made of files: it counts.
    """
    found = words(group, "memory.usage_in_bytes", "memory.current")
    stat = words(group, "memory.stat")
    total = "total_" if "total_cache" in stat else ""  # version 1 counts subgroups apart
    names = [total + "inactive_file", total + "active_file"]
    cache = sum(int(stat[stat.index(name) + 1]) for name in names if name in stat)
    return max(0, int(found[0]) - cache) if found else 0


def _kills(group: str) -> int:
    found = words(group, "memory.oom_control", "memory.events")
    return int(found[found.index("oom_kill") + 1]) if "oom_kill" in found else 0
