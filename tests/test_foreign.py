"""Executors that the user brings: what they give up, and processes of loky, MPI and Ray.

Also loaders within processes of loky's, and loky within workers.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import eventually, lacking, outcomes, printed_by, python, require
from helpers import Echo
from trouble import SpringsWhenLoaded

from minloader import BatchError, Loader, get_worker_info
from minloader._foreign import worker as foreign
from minloader._foreign.pool import ForeignPoolGroup
from minloader._memory import slot_writer
from minloader._memory.job_file import JobAddress, JobFile
from minloader._worker.messages import CHUNK_SECONDS

# --- what they give up -----------------------------------------------------------------------


class Company(Executor):
    """Runs tasks one by one; one with a poisonous item takes all with it that are under way.

    Another is just lost, the first time.
    """

    def __init__(self, poison: int, lost: int) -> None:
        self.poison = poison
        self.lost = lost
        self.losses = 0
        self.threads = ThreadPoolExecutor(1)
        self.under_way: list[Future[Any]] = []

    def submit(self, function: Any, /, attachment: Any, task: Any) -> Future[Any]:
        self.under_way = [future for future in self.under_way if not future.done()]
        future: Future[Any] = Future()
        self.under_way.append(future)
        self.threads.submit(self.run, future, function, attachment, task)
        return future

    def run(self, future: Future[Any], function: Any, attachment: Any, task: Any):
        if future.done():
            return
        reply = function(attachment, task)
        if self.lost in reply.outcomes and not self.losses:
            self.losses += 1
            future.set_exception(ArithmeticError("lost"))
        elif self.poison in reply.outcomes:
            victims = [each for each in self.under_way if not each.done()]
            for each in victims:
                each.set_exception(ArithmeticError("gone"))
        else:
            future.set_result(reply)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.threads.shutdown(*args, **kwargs)


def slow(item: int) -> int:
    threading.Event().wait(2 * CHUNK_SECONDS)
    return item


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("dataset", [slow, Echo()], ids=["tasks of one", "tasks of several"])
def test_what_an_executor_loses_comes_again_or_as_an_error_in_its_place(dataset, in_order):
    """Each loss is a try, also of what was under way beside the one at fault."""
    with Company(poison=40, lost=37) as executor:
        options: dict[str, Any] = {"executor": executor, "num_workers": 4, "in_order": in_order}
        with Loader(dataset, range(100), **options) as loader:
            found = outcomes(iter(loader))
            errors = [each for each in found if isinstance(each, ArithmeticError)]
            got = [each for each in found if each not in errors]
            lost = [int(error.__notes__[0].split("item ")[1].split(",")[0]) for error in errors]
            assert 40 in lost
            assert sorted(got + lost) == list(range(100))
            assert all("in the parent, in the executor" in error.__notes__[0] for error in errors)
        assert loader.stats.errors.retries > 0


class Forgetful(ThreadPoolExecutor):
    """Loses a task, once; Dask's does when a worker dies just after it has answered."""

    lost = 0

    def submit(self, function: Any, /, *args: Any) -> Future[Any]:  # type: ignore[override]
        self.lost += 1
        if self.lost != 3:
            return super().submit(function, *args)
        future: Future[Any] = Future()
        future.set_exception(ValueError("too many values to unpack (expected 3)"))
        return future


def test_a_task_that_is_lost_once_is_made_again(caplog):
    with Forgetful(2) as executor, Loader(Echo(), range(9), executor=executor) as loader:
        assert list(loader) == list(range(9))
        assert loader.stats.errors.retries == 1
    assert "the executor lost batch 2, which is made again: too many values" in caplog.text


class Exits(ThreadPoolExecutor):
    """Its workers call sys.exit() where nobody expects it, as while they unpickle a task."""

    def submit(self, function: Any, /, *args: Any) -> Future[Any]:  # type: ignore[override]
        return super().submit(sys.exit, 3)


def test_an_exit_of_the_executor_s_is_an_error_in_its_place():
    with Exits(1) as executor, Loader(Echo(), range(2), executor=executor) as loader:
        errors = outcomes(iter(loader))
    assert [type(error) for error in errors] == [BatchError] * 2
    assert all("in the executor: SystemExit: 3" in str(error) for error in errors)


def test_an_exit_while_the_job_is_loaded_is_an_error_in_its_place():
    dataset = SpringsWhenLoaded(sys.exit, 3)
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        Loader(dataset, range(2), num_workers=1, executor=executor) as loader,
    ):
        errors = outcomes(iter(loader))
    assert [type(error) for error in errors] == [BatchError] * 2
    text = "while the worker loaded the dataset: SystemExit: 3"
    assert all(text in str(error) for error in errors)


def interrupt() -> str:
    signal.raise_signal(signal.SIGINT)
    return "went on"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_ctrl_c_ends_tasks_of_the_user_s_in_workers_that_a_loader_had_forked():
    """They are forked where a task is sent, and Ctrl-C is held off the parent."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        with Loader(Echo(), range(2), num_workers=1, executor=executor) as loader:
            assert list(loader) == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            executor.submit(interrupt).result()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="there are none before 3.14")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_interpreters_are_refused(num_workers):
    """They are a kind of ThreadPoolExecutor, but not of this interpreter."""
    from concurrent.futures import InterpreterPoolExecutor

    class Own(InterpreterPoolExecutor):
        pass

    with Own(1) as executor:
        with pytest.raises(ImportError, match="does not support loading in subinterpreters"):
            executor.submit(__import__, "numpy").result()
        with pytest.raises(ValueError, match=r"numpy does not load .* use executor='thread'"):
            Loader(Echo(), range(3), executor=executor, num_workers=num_workers)


# --- the job, and when it goes ---------------------------------------------------------------


class Elsewhere(ProcessPoolExecutor):
    """Processes of which nobody knows where they are: they find no file of the loader's."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, get_context("spawn"), find_nothing)
        self.attached = 0
        self.sizes: list[int] = []

    def submit(self, function: Any, /, *args: Any) -> Future[Any]:  # type: ignore[override]
        self.attached += len(args) > 2
        self.sizes.append(len(pickle.dumps(args)))
        return super().submit(function, *args)


def find_nothing() -> None:
    def refuse(self: JobAddress) -> None:
        raise FileNotFoundError(self.path)

    JobAddress.map = refuse  # type: ignore[method-assign, assignment]


class Table:
    def __init__(self) -> None:
        self.table = np.arange(1 << 20)

    def __getitem__(self, index: int) -> Any:
        self.table[0] = index  # it may change its own
        return self.table[index : index + 3].copy(), os.getpid()


def draw(item: int) -> float:
    return random.random()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_forked_from_the_loader_s_process_is_like_any_other():
    """It has what the parent's threads work with, but seeds the global generators, as a process."""
    with Loader(draw, range(4), num_workers=0, seed=0) as loader:
        expected = list(loader)
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor,
        Loader(draw, range(4), executor=executor, num_workers=1, seed=0) as loader,
    ):
        assert list(loader) == expected


@pytest.fixture
def remote(monkeypatch):
    """As an executor of other machines."""
    monkeypatch.setattr(ForeignPoolGroup, "is_local", False)


def test_a_worker_that_lacks_the_job_is_sent_it(remote):
    with Elsewhere(2) as executor:
        with Loader(Table(), range(60), num_workers=2, executor=executor) as loader:
            for _ in range(2):
                batches, pids = zip(*loader, strict=True)
                assert [batch[1:].tolist() for batch in batches] == [
                    [n + 1, n + 2] for n in range(60)
                ]
        # Of two workers, one may be slow to start: its first tasks come back until it has the job.
        assert len(set(pids)) <= executor.attached < 60
        assert min(executor.sizes) < 1000
        assert max(executor.sizes) > 8 << 20


def test_a_job_that_cannot_be_sent_is_an_error(remote, monkeypatch):
    def refuse(self: Any, *args: Any) -> None:
        raise OSError("no room")

    options: Any = {"on_error": "skip", "num_workers": 1}
    with Elsewhere(1) as executor:
        loader = Loader(Table(), range(9), executor=executor, **options)
        batches = iter(loader)
        monkeypatch.setattr(JobFile, "content", refuse)
        with pytest.raises(OSError, match="no room"):
            list(batches)
        loader.close()


def left() -> tuple[int, int, int]:
    """Jobs, mapped slots and threads of ours in this worker."""
    threads = sum(each.name.startswith("minloader") for each in threading.enumerate())
    return len(foreign.loaded_jobs), len(slot_writer.mappings), threads


def test_a_closed_loader_leaves_nothing_in_the_workers_of_an_executor():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        for _ in range(3):
            with Loader(Table(), [[1], [2]], collate_fn=large, executor=executor) as loader:
                assert len(list(loader)) == 2
                assert all(executor.submit(left).result())
            assert eventually(lambda: executor.submit(left).result() == (0, 0, 0), 30)


def large(samples: Any) -> Any:
    return np.zeros(100_000)


def test_a_job_for_which_no_task_comes_is_let_go(remote, monkeypatch):
    """And sent again, if one comes after all."""
    with Elsewhere(1) as executor, Loader(Table(), range(4), executor=executor) as loader:
        first = [batch[0].tolist() for batch in loader]
        assert executor.submit(left).result()[0] == 1
        executor.submit(keep_nothing).result()
        assert eventually(lambda: executor.submit(left).result()[0] == 0, 30)
        assert [batch[0].tolist() for batch in loader] == first


def keep_nothing() -> None:
    foreign.IDLE_SECONDS = 0.0


class OwnThreads:
    def __getitem__(self, index: int) -> Any:
        with ThreadPoolExecutor(1) as threads:
            info = threads.submit(get_worker_info).result()
        return info is not None and (info.id, info.num_workers, info.pid == os.getpid())


def read_inside(item: int) -> list[int]:
    """Read a loader whose executor is forked from a worker within a batch."""
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as inner,
        Loader(abs, range(item), num_workers=1, executor=inner) as loader,
    ):
        return list(loader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_an_executor_in_a_worker_of_an_executor():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as outer,
        Loader(read_inside, range(3), num_workers=1, executor=outer) as loader,
    ):
        assert list(loader) == [[], [0], [0, 1]]


def test_threads_of_a_dataset_are_told_where_they_are():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        Loader(OwnThreads(), range(3), num_workers=2, executor=executor) as loader,
    ):
        assert list(loader) == [(-1, 2, True)] * 3


class WaitsForTheOthersEnd(OwnThreads):
    """Its batch is being made while the job of another loader is let go."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> Any:
        if index:
            self.path.touch()
            assert eventually(lambda: len(foreign.loaded_jobs) == 1)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_job_that_is_let_go_is_not_that_of_the_batch_under_way(tmp_path):
    path = tmp_path / "began"
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        Loader(abs, range(2), executor=executor) as other,
        Loader(WaitsForTheOthersEnd(path), [0, 1], executor=executor) as loader,
        ThreadPoolExecutor(1) as thread,
    ):
        assert list(other) == [0, 1]
        told = thread.submit(list, loader)
        assert eventually(path.exists)
        other.close()
        assert told.result() == [(-1, 1, True)] * 2


# --- loky, MPI, Ray -------------------------------------------------------------------------------

PROGRAM = """
import os, random, sys
import numpy as np
from minloader import BatchError, Loader, get_worker_info
from minloader._foreign import worker as foreign

class Dice:
    def __init__(self):
        self.table = np.random.default_rng(0).integers(0, 1 << 60, 5_000_000 // 8)

    def __getitem__(self, index):
        draws = random.random(), np.random.random(), get_worker_info().rng.random()
        loaded = [job.address is None for job in foreign.loaded_jobs.values()]
        return Batch(draws, self.table[index : index + 10_000]), os.getpid(), loaded

class Batch:
    def __init__(self, draws, rows):
        self.draws, self.rows = draws, rows

    def __eq__(self, other):
        return self.draws == other.draws and np.array_equal(self.rows, other.rows)

def check(executor, is_writable=True):
    with Loader(Dice(), range(60), num_workers=0) as loader:
        expected = [batch for batch, _, _ in loader]
    with Loader(Dice(), range(60), num_workers=2, executor=executor) as loader:
        batches, pids, loaded = zip(*loader)
        assert all(type(batch) is Batch for batch in batches)
        assert list(batches) == expected
        if is_writable:
            batches[0].rows[:] = 0
        assert os.getpid() not in pids
        assert all(len(each) == 1 for each in loaded)
        sent = {pid for pid, each in zip(pids, loaded) if each[0]}
        assert sent in (set(), set(pids)), (sent, pids)
    print("sent" if sent else "mapped")
"""

LOKY = """
from loky import get_reusable_executor
executor = get_reusable_executor(max_workers=2)
check(executor)
executor.shutdown(wait=True)
"""

MPI = """
if __name__ == "__main__":  # MPI's workers import the program, unless told main=False
    from mpi4py.futures import MPIPoolExecutor
    with MPIPoolExecutor() as executor:
        check(executor)
"""

RAY = """
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
check(RayExecutor(), is_writable=False)  # in Ray's own memory

class Deadly:
    def __getitem__(self, index):
        if index == 3 and not os.path.exists(DEAD):
            open(DEAD, "w").close()
            os._exit(1)
        return index

DEAD = sys.argv[1]
with Loader(Deadly(), range(6), num_workers=2, executor=RayExecutor()) as loader:
    assert list(loader) == list(range(6))
assert os.path.exists(DEAD)
ray.shutdown()
"""

ELSEWHERE = """
import runpy
from minloader._memory.job_file import JobAddress

def find_nothing(self):
    raise FileNotFoundError(self.path)

JobAddress.map = find_nothing
runpy.run_module("mpi4py.futures", run_name="__main__", alter_sys=True)
"""


def run_program(tmp_path: Path, text: str, before: Any = (), options: Any = ()) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + text)
    return printed_by(path, before=before, options=options)


def test_loky(tmp_path):
    require("loky")
    assert run_program(tmp_path, LOKY) == "mapped\n"


WITHIN = {
    "loky": """
from loky import get_reusable_executor
def each(function, values):
    return list(get_reusable_executor(2).map(function, values))
""",
    "joblib": """
from joblib import Parallel, delayed
def each(function, values):
    return Parallel(n_jobs=2)(delayed(function)(value) for value in values)
""",
}

BOTH_WAYS = """
def read(n):
    return sum(each(abs, range(n))), os.getpid(), glob.glob(f"/dev/shm/joblib*_{os.getpid()}_*")

def train(method):
    with Loader(read, range(4), num_workers=1, mp_context=method) as loader:
        return [total for total, _, _ in loader]

print(each(abs, [-1, 2]))
with Loader(read, range(4), num_workers=1, mp_context="fork") as loader:
    totals, _, folders = zip(*loader)
print(totals, [folder for found in folders for folder in found if os.path.exists(folder)])
for batches in each(train, sys.argv[1:]):
    print(batches)
"""


@pytest.mark.parametrize("kind", WITHIN)
def test_loky_in_workers_and_workers_in_loky(kind):
    """What a script has used before, and what its processes call multiprocessing's default."""
    require(kind)
    program = f"import glob, os, sys\nfrom minloader import Loader\n{WITHIN[kind]}{BOTH_WAYS}"
    methods = get_all_start_methods()
    done = python(program, *methods)  # loky warns where its tracker has ended before it
    lines = done.stdout.splitlines()
    assert lines == ["[1, 2]", "(0, 0, 1, 3) []", *["[0, 0, 1, 3]"] * len(methods)], done.stderr


def rays_executor() -> str:
    """The one that the docs show."""
    page = Path(__file__).parents[1] / "docs" / "clusters.md"
    executor = re.search(r"^from concurrent.*?(?=^class Noise)", page.read_text(), re.S | re.M)
    assert executor
    return executor.group()


LIKE_RAY = """
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

def remote(**options):
    assert options == {"num_cpus": 1, "max_retries": 0}
    return lambda call: SimpleNamespace(remote=lambda *args: Reference(pool.submit(call, *args)))

class Reference:
    def __init__(self, task):
        self.future = lambda: task

pool = ProcessPoolExecutor(2)
"""


def test_the_executor_for_ray_asks_for_little_of_it(tmp_path):
    (tmp_path / "ray.py").write_text(LIKE_RAY)
    used = "if __name__ == '__main__':\n    check(RayExecutor())\n    ray.pool.shutdown()\n"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + rays_executor() + used)
    done = python("-W", "ignore:.*fork:DeprecationWarning", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mapped\n" in done.stdout


@pytest.mark.slow
def test_ray(tmp_path, for_ray):
    """By the executor that the docs show, also when a process of Ray's dies."""
    if importlib.util.find_spec("ray") is None:
        lacking("ray")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + rays_executor() + RAY)
    done = python(program, tmp_path / "dead", env=for_ray)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mapped\n" in done.stdout  # Ray tells there of the process that died


def mpiexec() -> str:
    """The launcher, which wheels put beside the interpreter."""
    require("mpi4py")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which("mpiexec", path=path)
    return found or lacking("mpiexec")


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_mpi(place, tmp_path):
    """Elsewhere, as on another machine, workers do not find the file."""
    other = tmp_path / "elsewhere.py"
    other.write_text(ELSEWHERE)
    worker = ["-m", "mpi4py.futures"] if place == "here" else [str(other)]
    told = run_program(tmp_path, MPI, [mpiexec(), "-n", "3"], worker)
    assert told == ("mapped\n" if place == "here" else "sent\n")
