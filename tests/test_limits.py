"""What the system lets a process have: how it is found out, and what happens where it is little."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import printed_by, python, variants

from minloader import Loader
from minloader._diagnosis.processors import processors
from minloader._memory.limits import free_memory, memory_limit, remedy


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_may_not_have_room_are_told_of(method, monkeypatch, caplog):
    monkeypatch.setattr("minloader._pools.group.memory_limit", lambda: 99 << 20)
    for workers, count in (1, 0), (2, 1):
        with Loader([1], num_workers=workers, mp_context=method):
            assert caplog.text.count("2 workers need some 104857") == count


# --- control groups


@pytest.fixture
def group(monkeypatch, tmp_path):
    """The folder of the control group that this process seems to be in, within others."""
    (tmp_path / "groups").write_text("1:name=systemd:/elsewhere\n0::/outer/own\n")

    def open_here(path: str, *args: Any, **options: Any) -> Any:
        path = path.replace("/proc/self/cgroup", f"{tmp_path}/groups")
        return open(path.replace("/sys/fs/cgroup", str(tmp_path)), *args, **options)

    monkeypatch.setattr("minloader._memory.limits.open", open_here, raising=False)
    own = tmp_path / "outer/own"
    own.mkdir(parents=True)
    return own


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_processors_that_a_container_allows(monkeypatch, group, files, count):
    for name, text in files.items():
        (group / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert processors() == count


VERSION_1 = {
    "memory.limit_in_bytes": "1000000\n",
    "memory.usage_in_bytes": "999000\n",
    "memory.stat": "cache 700000\nrss 20\ninactive_anon 9\ninactive_file 3\nactive_file 3\n"
    "total_cache 800000\ntotal_inactive_anon 4\ntotal_inactive_file 600000\n"
    "total_active_file 100000\n",
}
VERSION_2 = {
    "memory.max": "1000000\n",
    "memory.current": "999000\n",
    "memory.stat": "anon 20\nfile 800000\nshmem 4\ninactive_anon 4\nactive_anon 0\n"
    "inactive_file 600000\nactive_file 100000\nunevictable 0\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (VERSION_1, 701_000),
        (VERSION_2, 701_000),
        (VERSION_2 | {"memory.stat": ""}, 1000),
        (VERSION_1 | {"memory.usage_in_bytes": "600000\n"}, 1_000_000),  # it changes meanwhile
        ({"memory.max": "1000000\n"}, 1_000_000),
    ],
)
def test_files_that_a_container_has_read_leave_its_memory_free(group, files, free):
    """The kernel drops what it has cached of them when somebody needs the memory."""
    for name, text in files.items():
        (group / name).write_text(text)
    assert memory_limit() == 1_000_000
    assert free_memory() == free


@pytest.mark.parametrize("files", [{}, {"memory.max": "max\n", "memory.current": "5\n"}])
def test_a_group_without_a_limit(group, files):
    for name, text in files.items():
        (group / name).write_text(text)
    assert memory_limit() == 1 << 60
    assert 0 < free_memory() < 1 << 60


STREAMER = """
import os, pathlib, sys
import numpy as np
folder, file = map(pathlib.Path, sys.argv[1:])
(folder / "cgroup.procs").write_text(str(os.getpid()))
from minloader import Loader
from minloader._memory.limits import free_memory
for _ in range(2):
    with open(file, "rb", buffering=0) as stream:
        while stream.read(1 << 20):
            pass
names = "memory.usage_in_bytes", "memory.current"
print(sum(int((folder / name).read_text()) for name in names if (folder / name).exists()))
with Loader(np.ones, [1_000_000] * 8, num_workers=1) as loader:
    for batch in loader:
        assert batch.sum() == 1_000_000
    print(loader.stats.memory.overflowed)
"""


@variants("size", [280 << 20, 500 << 20])
def test_slots_in_a_control_group_that_has_streamed_a_file(small_group, tmp_path, size):
    """Twice: the kernel takes a file for one in use then, unless it does not fit."""
    folder, limit = small_group
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(size)
    usage, overflowed = map(int, printed_by(STREAMER, folder, large).split())
    if usage < 0.9 * limit:
        pytest.skip("what is read of a file is not counted in its reader's control group")
    assert overflowed == 0


# --- little of everything


TRIED = """
import errno
from traceback import format_exception_only
from minloader import Loader
format_exception_only(ValueError())  # from 3.15 it imports a module, which takes a descriptor
try:
    with Loader([1, 2, 3], num_workers=2) as loader:
        print(list(loader))
except OSError as error:
    print(errno.errorcode[error.errno], *error.__notes__)
with Loader([1, 2, 3], num_workers=2, executor="thread") as loader:
    assert list(loader) == [1, 2, 3]
del loader
"""


LEAKING = """
import logging, os, resource
from traceback import format_exception_only
from minloader import Loader

format_exception_only(ValueError())  # from 3.15 it imports a module, which takes a descriptor
kept = []


def leak(item):
    while item == 1:
        kept.append(open(os.devnull))
    return item


logging.getLogger("minloader").setLevel(logging.ERROR)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with Loader(leak, range(3), on_error="skip", {options}) as loader:
    print(*loader)
with Loader(leak, range(3), {options}) as loader:
    try:
        list(loader)
    except OSError as error:
        print(*error.__notes__)
"""


@pytest.mark.parametrize("options", ["num_workers=0", "executor='thread', num_workers=1"])
def test_a_dataset_that_takes_all_descriptors_is_told_of(options):
    """What says so opens no file, not even a module of ours."""
    given, note = printed_by(LEAKING.format(options=options)).splitlines()
    assert given == "0 2"
    assert "batch 1 of epoch 0" in note


def test_too_few_descriptors_are_told():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))"
    said = printed_by(TRIED.replace("try:", limit + "\ntry:"))
    assert said.startswith("EMFILE minloader: batch 0 of epoch 0, item 0, in the parent, ")
    assert "need more open files: raise the limit (ulimit -n), or use fewer (num_workers=0" in said


SMALL_FILES = """
import errno, logging, resource
import numpy as np
from minloader import Loader
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
def batch(item):
    return np.full(100_000, item)
with Loader(batch, range(20), num_workers=2) as loader:
    assert all((batch == n).all() for n, batch in enumerate(loader))
    assert loader.stats.memory.overflowed == 20
    assert loader.stats.errors.replaced == 0
try:
    Loader(np.zeros(100_000), range(20), num_workers=2)
except OSError as error:
    assert error.errno == errno.EFBIG, error
    print(error)
"""


def test_small_files_are_enough_for_small_datasets():
    """Which are memory files, but there is one limit for all kinds."""
    done = python(SMALL_FILES)
    assert done.returncode == 0, done.stderr
    assert "a batch takes 80" in done.stderr
    assert "and a file may have 100 kB: raise the limit (ulimit -f)" in done.stderr
    assert "larger than a file may be, 100 kB: raise the limit (ulimit -f), or use" in done.stdout


def unshare(*arguments: str) -> list[str]:
    """A command before a program, which gets namespaces of its own; or the test is skipped."""
    command = ["unshare", *arguments]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], capture_output=True).returncode
    ):
        pytest.skip("programs cannot be given namespaces of their own here")
    return command


WITHOUT_INIT = """
import os, sys
import trouble
from minloader import Loader
assert os.getpid() == 1
dataset = trouble.Leaves(sys.argv[2], sys.argv[3])
with Loader(dataset, range(6), num_workers=2, timeout=5, mp_context=sys.argv[1]) as loader:
    assert list(loader) == list(range(6))
    assert loader.stats.errors.replaced == (sys.argv[2] != "leave")
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/stat") as file:
        name, state = file.read().split()[1:3]
        assert state != "Z", name
"""


@variants(
    ("end", "method"), [("leave", "spawn"), ("die", "fork"), ("hang", "spawn"), ("die", "spawn")]
)
def test_the_first_process_of_a_container_leaves_no_zombies(end, method, tmp_path):
    """Orphans are given to it, and there is no init that reaps them."""
    before = unshare("--pid", "--fork", "--mount-proc")
    done = python(WITHOUT_INIT, method, end, tmp_path / "did", before=before)
    assert done.returncode == 0, done.stderr


@variants("method", ["spawn", "fork", "forkserver"])
def test_another_namespace_of_pids_without_its_proc(method):
    """There a process has another number in /proc than it knows itself by."""
    before = unshare("--pid", "--fork")
    code = """
import os, sys
import helpers
from minloader import Loader, cached
from minloader._worker.signals import kill_marked
assert os.readlink("/proc/self") != str(os.getpid()) == "1"
data = cached(helpers.Squares(40), bytes=1 << 20)
with Loader(data, range(40), num_workers=2, mp_context=sys.argv[1]) as loader:
    assert list(loader) == [n * n for n in range(40)]
with Loader(helpers.numbered, range(40), num_workers=2, mp_context=sys.argv[1]) as loader:
    assert all((batch == n).all() for n, batch in enumerate(loader))
    assert loader.stats.memory.slots > 0 and loader.stats.memory.overflowed == 0
assert kill_marked("PATH", os.environ["PATH"]) == []  # of others they would be the numbers
"""
    done = python(code, method, before=before)
    assert (done.returncode, done.stderr) == (0, "")


@variants("method", ["spawn", "fork", "forkserver"])
def test_every_text_has_its_encoding(method):
    code = """
import sys
import helpers
from minloader import Loader
with Loader(helpers.numbered, range(9), num_workers=2, mp_context=sys.argv[1]) as loader:
    assert len(list(loader)) == 9
"""
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    done = python(code, method, options=options)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_without_semaphores_are_told():
    """They are files in /dev/shm; batches are not."""
    mount = "mount -t tmpfs -o ro tmpfs /dev/shm"
    before = unshare("-m", "sh", "-c", mount + ' && exec "$@"', "sh")
    said = printed_by(TRIED, before=before)
    assert said.startswith("EROFS minloader: batch 0 of epoch 0, item 0, in the parent, ")
    assert "let it be there, writable, and not full, or use fewer (num_workers=0" in said


@pytest.mark.parametrize("name", ["not there", 100 * "x"])
def test_a_fork_server_without_a_place_for_its_socket(name, tmp_path):
    """``tempfile`` itself looks for another folder where there is none."""
    folder = Path("/", name)
    if name != "not there":
        folder = tmp_path / name
        folder.mkdir()
    code = """
import sys, tempfile
from minloader import Loader
tempfile.tempdir = sys.argv[1]
try:
    print(*Loader(abs, range(-2, 0), num_workers=1, mp_context="forkserver"))
except OSError as error:
    print(*error.__notes__)
"""
    printed = printed_by(code, folder)
    if sys.version_info >= (3, 15) and folder.is_dir():  # it takes a folder with a shorter path
        assert printed == "2 1\n"
    else:
        assert "set TMPDIR to a folder that is there, with a shorter path" in printed


@pytest.mark.parametrize(
    ("error", "need"),
    [
        (OSError(errno.EMFILE, "?"), "ulimit -n"),
        (BlockingIOError(errno.EAGAIN, "?"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.ENOSPC, "?"), "/dev/shm"),
        (OSError(errno.EFBIG, "?"), "ulimit -f"),
        (OSError(errno.ENOSPC, "?", "file"), ""),
        (RuntimeError("the pool is closed"), ""),
        (OSError("?"), ""),
        (ValueError(errno.EMFILE), ""),
    ],
)
def test_what_to_do_about_it(error, need):
    assert need in remedy(error)
    assert bool(need) == bool(remedy(error))
