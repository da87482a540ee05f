"""On a Dask cluster of separate processes: the same batches, whatever happens to its workers.

What any executor does is in ``test_conformance``, with processes of an executor of the user's.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import belongings, eventually, require, variants
from helpers import SHARED

from minloader import Loader, WorkerDied, get_worker_info
from minloader._foreign import pool
from minloader._foreign import worker as foreign
from minloader._memory.job_file import JobAddress, JobFile

dask = require("dask")
distributed = require("distributed")

pytestmark = [
    # Dask's own: of its event loop, and of workers that are killed.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # Its executor cancels tasks from its event loop's own thread, where that is a coroutine.
    pytest.mark.filterwarnings("ignore:coroutine 'Client._cancel' was never:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test: nothing of ours. What Dask keeps for the next test is Dask's."""
    yield

    def left() -> list[Any]:
        now = belongings()
        threads = [thread for thread in now["threads"] if thread.name.startswith("minloader")]
        return threads + [each for each in now["descriptors"] if SHARED.search(each[1])]

    eventually(lambda: not left())
    assert left() == []


@contextmanager
def running(n_workers: int, **options: Any) -> Iterator[Any]:
    """A cluster of this machine and a client of it."""
    options = {"threads_per_worker": 1, "processes": True} | options
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "30s"}),
        distributed.LocalCluster(n_workers=n_workers, dashboard_address=":0", **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with running(2) as client:
        yield client


@pytest.fixture
def make(cluster: Any) -> Iterator[Callable[..., Loader]]:
    with making(cluster) as factory:
        yield factory


@contextmanager
def making(client: Any) -> Iterator[Callable[..., Loader]]:
    """Gives a function that makes loaders on the cluster."""
    loaders: list[Loader] = []

    def factory(*args: Any, **options: Any) -> Loader:
        executor = client.get_executor(pure=False)
        loaders.append(Loader(*args, **({"num_workers": 2, "executor": executor} | options)))
        return loaders[-1]

    try:
        yield factory
    finally:
        for loader in loaders:
            loader.close()


class Dice:
    """Draws from every generator that there is, before and after a while."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.table = np.arange(1 << 20)

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        first = random.random(), np.random.random()
        threading.Event().wait(self.delay)
        return {
            "index": index,
            "random": (first, random.random(), np.random.random(), info.rng.random()),
            "large": self.table[index : index + 10_000],
            "strings": [str(index)] * 10_000,
        }


def inline(dataset: Any, sampler: Any, **options: Any) -> list[Any]:
    with Loader(dataset, sampler, num_workers=0, **options) as loader:
        return list(loader)


def assert_same(batches: Any, expected: Any) -> None:
    # Arrays compare by their bytes so.
    for batch, other in zip(batches, expected, strict=True):
        assert pickle.dumps(batch["random"]) == pickle.dumps(other["random"])
        assert (batch["index"], batch["strings"]) == (other["index"], other["strings"])
        assert np.array_equal(batch["large"], other["large"])


def test_batches_are_those_without_workers(make):
    """Though Dask's own threads draw from the global generator, several times a second."""
    expected = inline(Dice(), range(60))
    loader = make(Dice(0.02), range(60))
    batches = list(loader)
    assert_same(batches, expected)
    for batch in batches:
        batch["large"] += 1
    assert loader.stats.memory.slots == 0
    loader.set_epoch(0)
    loader.num_workers = 4
    next(iter(loader))  # left early
    loader.set_epoch(0)
    assert_same(loader, expected)
    loader.set_epoch(0)
    loader.num_workers = 0
    assert_same(loader, expected)
    loose = make(Dice(0.005), range(60), in_order=False)
    assert_same(sorted(loose, key=lambda batch: batch["index"]), expected)


def test_an_executor_that_takes_equal_calls_for_one(make, cluster):
    loader = make(Dice(), [0] * 5, executor=cluster.get_executor())
    assert_same(loader, inline(Dice(), [0] * 5))


# --- elsewhere -----------------------------------------------------------------------------------


def go_elsewhere() -> None:
    """What a worker on another machine finds of the file: nothing."""
    vars(foreign)["real_map"] = JobAddress.map

    def find_nothing(self: JobAddress) -> Any:
        raise FileNotFoundError(self.path)

    JobAddress.map = find_nothing  # type: ignore[method-assign]


def come_back() -> None:
    JobAddress.map = vars(foreign).pop("real_map")  # type: ignore[method-assign]


@pytest.fixture
def elsewhere(cluster: Any) -> Iterator[Any]:
    cluster.run(go_elsewhere)
    yield cluster
    cluster.run(come_back)


def loaded() -> int:
    """Jobs that this worker has been sent and not let go of."""
    return sum(job.address is None for job in foreign.loaded_jobs.values())


def received(dask_worker: Any) -> int:
    """Bytes that this worker has got from others."""
    return sum(each["total"] for each in dask_worker.transfer_incoming_log)


class Heavy(Dice):
    def __init__(self) -> None:
        super().__init__(0.01)
        self.table = np.random.default_rng(0).integers(0, 1 << 60, 50_000_000 // 8)


def test_the_dataset_crosses_the_wire_once_for_each_worker(make, elsewhere):
    expected = inline(Heavy(), range(30))
    executor, sizes = elsewhere.get_executor(pure=False), []
    submit = executor.submit

    def weighing(*args: Any, **options: Any) -> Any:
        sizes.append(len(pickle.dumps(args)))
        return submit(*args, **options)

    executor.submit = weighing
    before = sum(elsewhere.run(received).values())
    loader = make(Heavy(), range(30), executor=executor)
    assert_same(loader, expected)
    for workers in (4, 0, 2):
        loader.num_workers = workers
        loader.set_epoch(0)
        assert_same(loader, expected)
    assert set(elsewhere.run(loaded).values()) == {1}
    # One worker gets it from the loader, and the other from that one.
    assert sum(elsewhere.run(received).values()) - before < 50_500_000
    assert 0 < max(sizes) < 2_000
    loader.close()
    assert eventually(lambda: set(elsewhere.run(loaded).values()) == {0})


def test_on_the_loaders_machine_it_does_not_cross_at_all(make, cluster):
    loader = make(Heavy(), range(20))
    assert_same(loader, inline(Heavy(), range(20)))
    assert set(cluster.run(loaded).values()) == {0}


class Buffer:
    """Fills one array, and returns it, each time."""

    def __init__(self) -> None:
        self.array = np.zeros(2_000_000)

    def __getitem__(self, index: int) -> Any:
        self.array[:] = index
        return self.array


def test_a_dataset_that_returns_the_same_array_each_time(make):
    """It is filled again before Dask has sent it."""
    loader = make(Buffer(), range(1, 20), prefetch_factor=4)
    assert [(batch.min(), batch.max()) for batch in loader] == [(n, n) for n in range(1, 20)]


def test_other_versions_are_named(make, monkeypatch):
    monkeypatch.setattr(pool, "versions", lambda: ("9.9", "3.99"))
    with pytest.raises(RuntimeError, match=r"but the loader has 9\.9 and Python 3\.99; install"):
        list(make(Dice(), range(3)))


def test_a_file_of_the_same_place_is_not_taken_for_the_dataset(tmp_path):
    """On another machine the path may lead anywhere."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    other = JobFile("another")
    for fd in (other.fd, pipe):  # to open the pipe would be to wait for a writer
        address = JobAddress(f"/proc/{os.getpid()}/fd/{fd}", "minloader-0123", 0)
        with pytest.raises(FileNotFoundError, match="holds something else"):
            address.map()
    other.close()
    os.close(pipe)


# --- deaths --------------------------------------------------------------------------------------


@pytest.fixture
def mortal() -> Iterator[Any]:
    """A cluster whose workers are killed; each has two threads.

    Each test has one of its own: on a busy machine Dask may take minutes to replace a worker.
    """
    with running(2, threads_per_worker=2) as client:
        yield client


def kill(client: Any, count: int) -> None:
    """Kills so many workers, as the kernel would."""
    for pid in list(client.run(os.getpid).values())[:count]:
        os.kill(pid, signal.SIGKILL)


@variants(
    ("count", "place"), [(1, "elsewhere"), (2, "here"), (1, "here"), (2, "elsewhere")], quick=2
)
def test_a_worker_that_dies_costs_nothing_but_time(mortal, count, place):
    """Two threads in each: they take turns, so that each batch draws its own numbers."""
    expected = inline(Dice(), range(80))
    if place == "elsewhere":
        mortal.run(go_elsewhere)
    with making(mortal) as make:
        loader = make(Dice(0.01), range(80), num_workers=4)
        batches = iter(loader)
        got = [next(batches) for _ in range(20)]
        kill(mortal, count)
        assert_same([*got, *batches], expected)


class Poison:
    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_batch_that_no_worker_survives(mortal):
    mortal.cluster.scheduler.allowed_failures = 0
    with making(mortal) as make:
        # One task under way: others on its worker would be lost with it, and count as tried.
        loader = make(Poison(), range(12), num_workers=1, prefetch_factor=1)
        batches = iter(loader)
        assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(WorkerDied, match="batch 5 of epoch 0, item 5") as caught:
            next(batches)
        assert caught.value.ordinal == 5
        assert list(batches) == [6, 7, 8, 9, 10, 11]


# --- in this process -----------------------------------------------------------------------------


def test_a_cluster_of_threads_shares_the_dataset(monkeypatch):
    class Mine:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # as it is, not loaded again

        def __getitem__(self, index: int) -> float:
            info = get_worker_info()
            assert info is not None
            return float(info.rng.random()) + (info.pid != os.getpid())

        def __getstate__(self) -> dict[str, Any]:
            return {}

    expected = inline(Mine(), range(20))
    # The generators of this process are the program's: Dask itself draws from them.
    monkeypatch.setattr("minloader._worker.seeds.SEEDERS", None)
    with running(1, processes=False, threads_per_worker=2) as client, making(client) as make:
        loader = make(Mine(), range(20))
        assert list(loader) == expected


def listening() -> set[Any]:
    """Addresses at which this process waits for others."""
    found = psutil.Process().net_connections("inet")
    return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}


def test_a_cluster_with_certificates(tmp_path):
    """The dataset goes through its encrypted connections, and nobody listens for it."""
    openssl = shutil.which("openssl") or pytest.skip("there is no openssl")
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    roles = {
        f"tls_{role}_{what}": path
        for role in ("scheduler", "worker", "client")
        for what, path in (("key", key), ("cert", cert))
    }
    security = distributed.Security(tls_ca_file=cert, require_encryption=True, **roles)
    with (
        running(2, security=security, protocol="tls://", host="localhost") as client,
        making(client) as make,
    ):
        client.run(go_elsewhere)
        before = listening(), client.run(listening)
        loader = make(Heavy(), range(20))
        assert_same(loader, inline(Heavy(), range(20)))
        assert set(client.run(loaded).values()) == {1}
        assert (listening(), client.run(listening)) == before


def test_a_client_is_no_executor(cluster):
    with pytest.raises(ValueError, match=r"of a Dask client: client\.get_executor\(pure=False\)"):
        Loader(Dice(), range(3), executor=cluster)
