"""Batches in shared memory: whole, private, alive as long as a view of them, and no longer."""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import weakref
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import numpy as np
import psutil
import pytest
from conftest import (
    eventually,
    in_a_fork,
    leased_slots,
    printed_by,
    python,
    require,
    slots_of,
    variants,
    workers,
)
from helpers import (
    Forker,
    Keeper,
    Numbers,
    Trouble,
    cook,
    fork_and_fill,
    numbered,
    refuse,
    sized,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from minloader import Loader, TransportError, _formats, collate, pack_collate, pad_collate
from minloader._diagnosis.inspect import inspect
from minloader._foreign import worker as foreign
from minloader._memory import files, slot_writer, slots
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.files import ALIGN, LARGE
from minloader._memory.pickling import pack, unpack_batch
from minloader._memory.slot_writer import NoSlot, SlotWriter, empty
from minloader._memory.slots import Slots
from minloader._worker import current, entry
from minloader._worker import run as worker
from minloader._worker.environment import PackingEnvironment
from minloader._worker.make import make_worker
from minloader._worker.messages import Failure, Job, TaskMessage, WorkerInfo
from minloader._worker.run import Worker

pytestmark = pytest.mark.usefixtures("quick_starts")

FINALIZED = """
import gc, pickle
from minloader import Loader

class Bytes:
    # As in PEP 574, and it looks at its data at the end.
    def __init__(self, data):
        self.data = data
    def __reduce_ex__(self, protocol):
        return Bytes, (pickle.PickleBuffer(self.data),)
    def __del__(self):
        seen.append(bytes(self.data[-3:]))

seen = []
with Loader(lambda item: Bytes(bytearray([item]) * 100_000), range(1, 4), num_workers=1) as loader:
    batches = list(loader)
    batches[0].itself = batches[0]
    del batches[0]
    gc.collect()
    assert seen == [bytes([1]) * 3], seen
    for batch in batches:
        batch.itself = batch
del batches, batch
gc.collect()
assert sorted(seen) == [bytes([n]) * 3 for n in (1, 2, 3)], seen
"""


NOT_TO_BE_LOOKED_INTO = """
import os
from minloader import Loader
with Loader(str, range(3), num_workers=1, mp_context="fork") as loader:
    list(loader)  # imports what it needs
os.setuid(65534)
with Loader(str, range(3), num_workers=1, mp_context="fork") as loader:
    try:
        list(loader)
    except PermissionError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_process_that_has_dropped_root_is_told_why_it_has_no_workers(tmp_path):
    done = python(NOT_TO_BE_LOOKED_INTO, options=["-W", "ignore"], cwd=tmp_path)
    assert "the loader's process has changed its user" in done.stdout, done.stderr


def test_a_finalizer_in_a_cycle_still_sees_its_batch():
    """The collector calls weak references before finalizers."""
    assert printed_by(FINALIZED) == ""


def pack_batch(batch: Any, writer: NoSlot) -> Any:
    return BatchPacker(writer).pack(batch)


def mapped_files(pid: int | str = "self") -> set[str]:
    """The slots that a process has mapped, by their marks."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"(minloader-\w+)(?: \(deleted\))?$", maps, re.MULTILINE))


# --- what arrives is what was sent -------------------------------------------------------------

DTYPES = ["?", "i1", "u2", ">i4", "i8", "f2", ">f8", "f4", "c16", "M8[s]", "m8[ms]", "U5", "S3"]
DTYPES += ["V3", [("a", "i4"), ("b", ">f8", (2,)), ("c", "U2")]]
DTYPES += [np.dtype("i1", metadata={"enum": {"NO": 0, "YES": 1}})]  # as h5py has it
SHAPES = [(), (0,), (3,), (0, 5), (7, 3), (LARGE - 1,), (LARGE,), (40, 300), (2, 3, 900)]
LAYOUTS = ["plain", "fortran", "strided", "reversed", "frozen", "broadcast", "memmap", "born"]
VALUES = [None, True, -3, 10**30, 1.5, math.nan, 2j, "", b"", {1, 2}, frozenset("ab"), slice(1, 2)]
VALUES = [(value, 1) for value in [*VALUES, "ü", b"\0z", bytearray(b"q"), np.float32(0.5)]]
VALUES += [("ü", LARGE), (b"\0z", LARGE), (bytearray(b"q"), LARGE)]

arrays = st.tuples(
    st.just("array"),
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(LAYOUTS),
    st.integers(0, 99),
)
values = st.sampled_from(VALUES).map(lambda value: ("value", *value))
leaves = arrays | values | st.just(("objects", 9))
containers = st.sampled_from(["dict", "list", "tuple", "point", "record"])
recipes = st.recursive(
    leaves, lambda parts: st.tuples(containers, st.lists(parts, max_size=3)), max_leaves=6
)


def parts_of(batch: Any) -> list[Any]:
    """The batch and all that is in it."""
    found = [batch]
    for part in found:  # grows while we walk
        if isinstance(part, helpers.Record):
            found.append(part.parts)
        elif isinstance(part, dict):
            found += [*part, *part.values()]
        elif isinstance(part, (list, tuple)):
            found += part
    return found


def assert_same(batch: Any, expected: Any) -> None:
    ours, theirs = parts_of(batch), parts_of(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, np.ndarray):
            assert isinstance(one, np.ndarray)
            assert_array_equal(one, other, strict=True)
            assert one.dtype.metadata == other.dtype.metadata
        else:
            assert type(one) is type(other)
            if not isinstance(other, (dict, list, tuple, helpers.Record)):
                assert one == other or (one != one and other != other)


def scribble(batch: Any) -> None:
    for part in parts_of(batch):
        if isinstance(part, np.ndarray) and part.flags.writeable:
            part[...] = np.zeros((), part.dtype)


def test_whatever_is_sent_arrives_and_is_private(make):
    sampler: list[Any] = []
    loader = make(cook, sampler)
    held: list[Any] = []

    @settings(
        max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(recipes, min_size=1, max_size=5))
    def check(items: list[Any]) -> None:
        sampler[:] = items
        batches = list(loader)
        if "process" in make.name:
            parts = [part for part in parts_of(batches) if isinstance(part, np.ndarray)]
            assert all(type(part) is np.ndarray and part.flags.writeable for part in parts)
        for batch, item in zip(batches, items, strict=True):
            assert_same(batch, cook(item))
            scribble(batch)  # must not be seen in the batches that are still to be compared
        for batch, item in held:
            assert_same(batch, cook(item))
        sampler[:] = items[:1]
        held[:] = [*held[-3:], (next(iter(loader)), items[0])]

    check()
    assert (loader.stats.memory.slots > 0) == ("process" in make.name)
    assert loader.stats.memory.overflowed == 0


# --- how long it lives -------------------------------------------------------------------------


def tensor_of(array: Any) -> Any:
    return require("torch").from_numpy(array)


VIEWS = {
    "arrays": [
        lambda array: array,
        lambda array: array[100:-100:3],
        lambda array: array[::-1].reshape(10, -1)[2:].T,
    ],
    "buffers": [
        lambda array: memoryview(array)[10:2000],
        lambda array: np.frombuffer(array, np.uint8, 4000, offset=80),
        lambda array: np.frombuffer(memoryview(array).cast("B")[64:640], np.float32),
    ],
    "tensors": [tensor_of, lambda array: tensor_of(array)[9:].view(-1, 1)],
}


@variants(
    ("kind", "size"),
    [("arrays", 20_000), ("arrays", 240_000), ("buffers", 240_000), ("tensors", 240_000)],
)
def test_a_slot_lives_as_long_as_any_view(kind, size):
    before = mapped_files()
    with Loader(sized, [(n, size) for n in range(150)], num_workers=2) as loader:
        batches = iter(loader)
        kept = [view(next(batches)) for view in VIEWS[kind] * 2]
        copies = [np.asarray(view).copy() for view in kept]

        def assert_unchanged() -> None:
            for view, copy in zip(kept, copies, strict=True):
                assert_array_equal(np.asarray(view), copy, strict=True)

        for n, batch in enumerate(batches, len(kept)):
            assert (batch == n).all()
        assert_unchanged()
        assert 0 < loader.stats.memory.slots <= len(kept) + 4 + 2
    assert_unchanged()
    pool = slots_of(loader)
    del loader, batches, batch
    gc.collect()
    assert_unchanged()
    files = mapped_files() - before
    assert files
    kept.clear()
    assert pool.used == (0, 0)  # with the last view
    assert not mapped_files() & files


def test_slots_are_used_again_when_nothing_is_kept():
    with Loader(numbered, range(100), num_workers=2) as loader:
        for n, batch in enumerate(loader):
            assert (batch == n).all()
        assert 0 < loader.stats.memory.slots <= 4 + 2
        for _ in range(20):  # left early
            for n, batch in enumerate(loader):
                assert (batch == n).all()
                if n == 3:
                    break
        assert sum(1 for _ in loader) == 100
        assert eventually(lambda: loader.stats.memory.slots <= 4 + 2), loader.stats
        assert loader.stats.memory.slot_bytes <= 6 * 3 * slot_writer.GRAIN


def test_the_end_of_a_batch_while_its_slots_are_ended(bench, monkeypatch):
    """Garbage is collected when it likes; here it is whenever a slot is closed."""
    close = slots.Slot.close
    monkeypatch.setattr(slots.Slot, "close", lambda slot: (close(slot), gc.collect()))

    for end in (bench.pool.retire_leased, bench.pool.close):
        gc.disable()
        try:
            batches = []
            for n in range(5):
                ring = [bench.trip(numbered, [n])]
                ring.append(ring)
                batches.append(weakref.ref(ring[0][0]))
            del ring
            end()
        finally:
            gc.enable()
        assert [batch() for batch in batches] == [None] * 5
    assert bench.pool.used == (0, 0)


def test_nothing_accumulates():
    def held(loader: Loader) -> list[int]:
        """Descriptors but for slots, threads; and the same of the workers."""
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        counts = [count for each in processes for count in (each.num_fds(), each.num_threads())]
        return [counts[0] - loader.stats.memory.slots, *counts[1:]]

    sizes = [1_000, 20_000, 5_000_000, 300_000, 1_200_000]
    items = [(n, sizes[n % 5]) for n in range(150)]
    with Loader(sized, items, num_workers=2) as loader:
        moments: list[Any] = []
        while len(moments) < 2 or moments[-1] != moments[-2]:
            for n, batch in enumerate(loader):
                assert (batch == n).all()
            moments.append(held(loader))
            assert len(moments) < 6, moments  # the workers have long started
        assert loader.stats.memory.slots <= 4 + 2
        pids = [process.pid for process in workers(loader)]
        kept = list(loader)
        assert loader.stats.memory.slots > 50
        del kept  # most slots are closed now, and the workers are to notice
        assert sum(1 for _ in loader) == 150
        assert loader.stats.memory.slots <= 4 + 2
        for pid in pids:
            assert len(mapped_files(pid)) <= 20


# --- born in place -----------------------------------------------------------------------------


def packing_worker(job: Job) -> Worker:
    info = WorkerInfo(0, 1, os.getpid(), 0)
    return make_worker(job, info, PackingEnvironment(BatchPacker()))


@pytest.fixture
def bench(monkeypatch):
    """Both sides of slots in this process."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(worker, "CHUNK_SECONDS", 60)
    pool = Slots(100_000_000, 4)
    workers: dict[Any, Worker] = {}
    lent: list[Any] = []

    def write() -> tuple[Any, SlotWriter]:
        slot = pool.lend()
        writer = SlotWriter(pool.address(slot))
        slot_writer.use(writer)
        return slot, writer

    def trip(dataset: Any, items: list[Any]) -> list[Any]:
        """The batches of one task."""
        if dataset not in workers:
            workers[dataset] = packing_worker(Job(dataset, None, None, None))
        slot = pool.lend()
        lent.append(slot)
        packed = [pack(item, down=True) for item in items]
        reply = workers[dataset].run(TaskMessage(0, 0, packed, pool.address(slot)))
        pool.settle(slot, reply.slot.size, reply.figures.size)
        memory = pool.lease(slot, retire=reply.slot.is_retired)
        return [unpack_batch(outcome, memory) for outcome in reply.outcomes]

    yield SimpleNamespace(pool=pool, write=write, trip=trip, lent=lent)
    slot_writer.use(None)
    pool.close()
    SlotWriter(pool.address(None))  # forgets what the pool has closed


def test_empty_gives_what_numpy_would(bench):
    assert empty((LARGE, 2), "f4").base is None  # it is numpy's outside a worker
    bench.write()
    shapes: Any = [LARGE, [3, LARGE], np.array([3, LARGE]), np.int64(LARGE), (0, LARGE), (), 7, 0]
    for shape in (*shapes, (LARGE + 1, 1)):
        for dtype in ("i1", None, ">f8", [("a", "i4"), ("b", "f8", (2,))], ("f4", (3,)), "U3"):
            array, expected = empty(shape, dtype), np.empty(shape, dtype)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert array.strides == expected.strides
            assert array.flags.owndata == (expected.nbytes < LARGE)
            assert array.flags.owndata or array.ctypes.data % ALIGN == 0
    assert empty(LARGE, object).flags.owndata
    for wrong in (-LARGE, (-2, -LARGE), 1.5, "x"):
        with pytest.raises((TypeError, ValueError)):
            empty(wrong)
    slot_writer.use(None)
    assert empty(LARGE).flags.owndata


def test_what_was_born_in_the_slot_is_not_copied(bench):
    slot, writer = bench.write()
    array = empty((300, 1000), "f4")
    array[:] = np.arange(1000)
    parts = [array, array[10:60], array.T, array.view("i4"), array[0:100].reshape(-1)[8:]]
    used = writer.used
    parcel = pack_batch(parts, writer)
    assert writer.used == used == array.nbytes
    assert pack_batch([array, array[:, ::2]], writer)
    assert writer.used >= used + array.nbytes // 2  # gaps are left out
    slot_writer.use(None)
    copies = [part.copy() for part in parts]
    del array, parts
    spans = writer.end(parcel.buffers)
    assert (spans, writer.retired) == (parcel.buffers, False)
    writer.close()
    bench.pool.settle(slot, writer.size, writer.used)
    memory = bench.pool.lease(slot, retire=False)
    assert_same(unpack_batch(parcel._replace(buffers=spans), memory), copies)


def test_large_parts_of_all_kinds_are_in_the_slot(bench):
    _, writer = bench.write()
    parts: list[Any] = [["many"] * LARGE, np.zeros(LARGE)[::2], np.float32(1), lambda: 0]
    parts += [np.broadcast_to(np.int8(1), (LARGE,))]
    for part in (*parts, parts[:2], parts):
        parcel = pack_batch(part, writer)
        assert len(parcel if type(parcel) is bytes else parcel.stream) < LARGE
        assert type(parcel) is bytes or len(parcel.buffers) >= 1


def test_the_packer_uses_the_slot_that_it_is_given(bench):
    _, writer = bench.write()
    slot_writer.use(None)
    parcel = pack_batch(np.zeros(LARGE)[::2], writer)
    assert [stop - start for start, stop in parcel.buffers] == [4 * LARGE]
    assert writer.used == 4 * LARGE  # there from the beginning, not copied to there


def test_large_tensors_are_in_the_slot(bench, monkeypatch):
    torch = require("torch")
    _, writer = bench.write()
    packer = BatchPacker(writer)
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torch")
        packer.pack([])  # as in a worker that imports it later
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        parcel = packer.pack([torch.zeros(LARGE, dtype=dtype), lambda: 0])
        assert 0 < len(parcel.stream) < 2000
        assert [stop - start >= LARGE for start, stop in parcel.buffers] == [True]
    tensor = torch.from_numpy(empty(LARGE))
    used = writer.used
    packer.pack({"born": tensor.view(2, -1)})
    assert writer.used == used


def test_what_lies_beside_the_slot_was_not_born_there(bench, monkeypatch):
    """A slot that grows is mapped anew; what follows its first mapping is somebody else's."""
    libc, fixed, more = files.libc, 0x10, 100_000
    call, access, private = libc.mmap, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    # The first mapping is to be put into this room, at its beginning.
    start = call(None, slot_writer.GRAIN + more, access, private | mmap.MAP_ANONYMOUS, -1, 0)
    places = iter([start])

    def mmap_there(address: Any, size: int, protection: int, flags: int, *file: int) -> int:
        place = next(places, None)
        return call(place, size, protection, flags | (fixed if place else 0), *file)

    monkeypatch.setattr(libc, "mmap", mmap_there)
    slot, writer = bench.write()
    first = empty(200_000, "u1")
    assert first.ctypes.data == start
    second = empty(2_000_000, "u1")
    beside = np.frombuffer((ctypes.c_char * more).from_address(start + slot_writer.GRAIN), "u1")
    first[:], second[:], beside[:] = 1, 2, 7
    parcel = pack_batch([first, second, beside], writer)
    data = os.pread(slot.fd, writer.size, 0)
    assert [set(data[start:stop]) for start, stop in parcel.buffers] == [{1}, {2}, {7}]
    del first, second, beside
    writer.close()
    bench.pool.free(slot, retire=True)
    libc.munmap(start + slot_writer.GRAIN, more)


@variants("size", [3_000, 60_000])
def test_what_a_dataset_keeps_is_its_own(bench, size):
    dataset = Keeper(size)
    batches = [*bench.trip(dataset, [0, 1, 2])]
    kept = dataset.kept
    assert not kept.flags.owndata  # it was born in the slot, which is retired now
    (retired,) = bench.lent
    assert retired.fd == -1
    for n in range(3, 60, 3):
        batches += bench.trip(dataset, [n, n + 1, n + 2])
    for n, (index, was_kept, other, part) in enumerate(batches):
        assert index == n
        assert set(was_kept) == set(part) == {n}
        assert set(other) == {-n}
    scribble(batches)
    assert dataset.kept is kept
    assert set(kept) == {59}
    with Loader(Keeper(size), range(200), num_workers=2, prefetch_factor=3) as loader:
        for n, (index, was_kept, other, part) in enumerate(list(loader)):
            assert index == n
            assert set(was_kept) == set(part) == {n}
            assert set(other) == {-n}


def test_an_array_kept_from_a_batch_that_failed_is_not_overwritten(bench):
    class Failing:
        kept: Any = None

        def __getitem__(self, index: int) -> Any:
            if self.kept is None:
                self.kept = empty(30_000, "i4")
                self.kept[:] = 5
                raise ValueError("now")
            return numbered(index)

    dataset = Failing()
    job = Job(dataset, None, None, None)
    slot = bench.pool.lend()
    task = TaskMessage(0, 0, [pack(0, down=True)], bench.pool.address(slot))
    reply = packing_worker(job).run(task)
    assert reply.slot.is_retired
    bench.pool.settle(slot, reply.slot.size, reply.figures.size)
    bench.pool.free(slot, retire=reply.slot.is_retired)
    for n in range(5):
        (batch,) = bench.trip(dataset, [n])
        assert (batch == n).all()
    assert (dataset.kept == 5).all()


@pytest.mark.parametrize(
    "collate_fn", [collate, pad_collate(-1), pack_collate(), pack_collate(9_000, 8, -1)]
)
def test_collated_batches_are_born_in_the_slot(bench, collate_fn):
    samples = [{"x": np.arange(n, n + 5_000), "y": (float(n), b"n")} for n in range(8)]
    expected = collate_fn(samples)
    _, writer = bench.write()
    batch = collate_fn(samples)
    used = writer.used
    assert used >= 8 * 5_000 * 8
    assert_same(batch, expected)
    pack_batch(batch, writer)
    assert writer.used == used


def test_a_fork_of_a_worker_has_no_share_in_its_slot():
    with Loader(fork_and_fill, range(1, 5)) as loader:
        for n, (ours, theirs) in enumerate(loader, 1):
            assert set(ours) == {n}
            assert set(theirs) == {-n}
    with Loader(Forker(), range(31)) as loader:
        for n, batch in enumerate(loader):
            assert set(batch) == {n % 30}


# --- no room -----------------------------------------------------------------------------------


def test_beyond_the_budget_batches_come_through_the_pipe(caplog):
    kept = []
    with Loader(numbered, range(60), num_workers=2, shared_memory=1_000_000) as loader:
        for batch in loader:
            kept.append(batch)
            assert loader.stats.memory.slot_bytes <= 1_000_000
        assert 30 < loader.stats.memory.overflowed < 60
        kept[:-5] = [batch.copy() for batch in kept[:-5]]
        batch = None
        before = loader.stats.memory.overflowed
        for n, batch in enumerate(loader):
            assert (batch == n).all()
        assert loader.stats.memory.overflowed < before + 60
    for n, batch in enumerate(kept):
        assert (batch == n).all()
        batch += 1
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("minloader", "WARNING")
    assert "no room in shared memory" in record.message


def in_parts(n: int) -> list[Any]:
    """A batch of 3 MB, of which a slot may have room for a part."""
    return [np.full(125_000, n, np.float32) for _ in range(6)]


def test_the_number_that_is_told_is_enough(caplog):
    """And with less, batches do not lie in parts in slots that are too small for any of them."""

    def overflowed(shared_memory: int) -> int:
        _formats.said.clear()
        with Loader(in_parts, range(40), num_workers=2, shared_memory=shared_memory) as loader:
            for n, batch in enumerate(loader):
                assert all((part == n).all() for part in batch)
            return loader.stats.memory.overflowed

    assert overflowed(10_000_000) < 30
    assert overflowed(15_000_000) < 24
    told = [record.message for record in caplog.records if "so set" in record.message]
    first, _ = told
    assert "6 batches of 3.19 MB, 4 of them under way, take 20 MB, so set" in first
    numbers = [re.search(r"so set shared_memory=(\w+) ", each)[1] for each in told]
    assert numbers == ["20_000_000"] * 2
    assert overflowed(int(numbers[0])) == 0


def resident(pid: int) -> int:
    """Bytes of slots that are in memory, as far as a process has them mapped."""
    blocks = re.split(r"^(?=[0-9a-f]+-)", Path(f"/proc/{pid}/smaps").read_text(), flags=re.M)
    slots = [block for block in blocks if re.search(r"minloader-\w+( \(deleted\))?\n", block)]
    return sum(int(re.search(r"\nRss: +(\d+) kB", block)[1]) * 1024 for block in slots)


def test_memory_is_given_back_without_another_epoch():
    with Loader(in_parts, range(20), num_workers=2) as loader:
        kept = list(loader)
        pids = [os.getpid(), *(process.pid for process in workers(loader))]
        assert loader.stats.memory.slot_bytes >= 20 * 3_000_000
        del kept
        assert loader.stats.memory.slots == 5
        told = loader.stats.memory.slot_bytes
        assert told < 5 * 4_000_000
        assert max(map(resident, pids)) < told + 100_000  # heartbeats are mapped, too


def test_few_descriptors():
    code = """
import logging, resource
logging.disable()  # now and then there may be no room
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import helpers, minloader
with minloader.Loader(helpers.sized, [(n, 40_000) for n in range(300)], num_workers=2) as loader:
    kept = list(loader)
    assert loader.stats.memory.overflowed < 100 and loader.stats.memory.slots > 0, loader.stats
assert all((batch == n).all() for n, batch in enumerate(kept)) and len(kept) == 300
"""
    assert printed_by(code) == ""


def test_no_more_slots_than_descriptors(monkeypatch):
    """Of which they may take a quarter."""
    monkeypatch.setattr(slots, "most_files", lambda: 15)
    pool = Slots(100_000_000, 4)
    assert [pool.lend() is not None for _ in range(5)] == [True] * 3 + [False] * 2
    assert pool.address(None).limit == 0
    pool.close()


def test_the_workers_of_a_resized_stream_share_the_memory_anew():
    with Loader(Numbers(9), num_workers=1, shared_memory=8_000_000) as loader:
        for num_workers in 4, 1, 3:
            loader.num_workers = num_workers
            pools = inspect(loader).group.pools
            assert [pool.slots.budget for pool in pools] == [8_000_000 // num_workers] * num_workers


def test_memory_that_is_for_others_now_is_given_back():
    pool = Slots(12 << 20, 3, share=2)
    lent = [pool.lend() for _ in range(3)]
    for slot in lent:
        os.ftruncate(slot.fd, 2 << 20)
        pool.settle(slot, 2 << 20, 2 << 20)
    for slot in lent[1:]:
        pool.free(slot)
    pool.divide(4)
    assert pool.used == (1, 2 << 20)
    assert pool.lend() is None
    pool.close()


def test_a_slot_that_is_gone_is_not_mistaken_for_another(bench):
    """The number of its descriptor is used again, for anything."""
    address = bench.pool.address(bench.pool.lend())
    writer = SlotWriter(address._replace(mark="minloader-another"))
    assert writer.reserve(LARGE) is None
    assert writer.overflowed
    assert SlotWriter(address).reserve(LARGE) is not None


def test_no_memory_in_the_worker(bench, monkeypatch):
    """Then the batch is in the message, and all that is in the slot already stays good."""

    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)  # where it is emulated
        raise OSError(errno.ENOSPC, "no space")

    slot, writer = bench.write()
    first = empty(50_000, "i4")
    first[:] = 1
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert writer.reserve(1 << 20) is None
    assert writer.overflowed
    second = empty(1 << 20, "i4")
    second[:] = 2
    parcel = pack_batch([first, second], writer)
    assert [type(buffer) for buffer in parcel.buffers] == [tuple]
    assert len(parcel.stream) > second.nbytes
    del first
    spans = writer.end(parcel.buffers)
    writer.begin()
    assert not writer.overflowed
    writer.close()
    assert writer.size == os.fstat(slot.fd).st_size
    bench.pool.settle(slot, writer.size, writer.used)
    memory = bench.pool.lease(slot, retire=False)
    one, two = unpack_batch(parcel._replace(buffers=spans), memory)
    assert (set(one), set(two)) == ({1}, {2})


def test_a_slot_that_is_retired_twice_counts_once():
    pool = Slots(1 << 20, 1)
    first = pool.lend()
    assert first is not None
    for _ in range(2):
        pool.free(first, retire=True)
    assert pool.lend().limit == first.limit  # type: ignore[union-attr]
    pool.close()


def test_no_address_space_in_the_parent(monkeypatch, caplog):
    room = iter([False, False])  # nor when the batch is sent again
    mapping = slots.SharedMapping

    def no_room(fd: int, size: int) -> Any:
        if next(room, True):
            return mapping(fd, size)
        raise OSError(errno.ENOMEM, "cannot map")

    monkeypatch.setattr(slots, "SharedMapping", no_room)
    with Loader(numbered, range(4), num_workers=1, prefetch_factor=1) as loader:
        batches = iter(loader)
        with pytest.raises(MemoryError, match=r"no room for the 2\d\d kB of a batch") as caught:
            next(batches)
        assert caught.value.__notes__[0].endswith(", when it came from a worker")
        assert [set(batch) for batch in batches] == [{1}, {2}, {3}]
    assert "this process lost batch 0, which is made again: this process has no room" in caplog.text


@pytest.mark.parametrize("stage", ["load", "attach"])
def test_a_worker_that_never_opens_its_slot(bench, monkeypatch, stage):
    """What another worker has made of that slot is still there."""
    assert set(bench.trip(numbered, [1])[0]) == {1}
    job = Job(numbered, None, None, refuse)
    run = packing_worker(job).run
    if stage == "load":
        monkeypatch.setattr(current, "failed_start", run(TaskMessage(0, 0, [0])))
        run = entry.run
    elif stage == "attach":
        monkeypatch.setattr(foreign, "find_job", refuse)
        run = partial(foreign.run_task, None)
    slot = bench.pool.lend()
    reply = run(TaskMessage(0, 0, [pack(0, down=True)], bench.pool.address(slot)))
    assert [type(outcome) for outcome in reply.outcomes] == [Failure]
    assert reply.slot is None
    bench.pool.settle(slot, None, reply.figures.size)
    bench.pool.free(slot)
    assert bench.pool.used == (1, os.fstat(slot.fd).st_size)
    assert set(bench.trip(numbered, [2])[0]) == {2}
    assert bench.pool.used == (1, os.fstat(slot.fd).st_size)


WITHOUT_MEMFD = {
    "absent": "del os.memfd_create",
    "no /proc": """
exists = os.path.exists
os.path.exists = lambda path: not str(path).startswith("/proc") and exists(path)
""",
    "ENOSYS": """
def refuse(*args):
    raise OSError(errno.ENOSYS, "Function not implemented")
os.memfd_create = refuse
""",
    "seccomp": """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
# The number of the call; if it is that of memfd_create (on x86-64) EPERM, else all is allowed.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 319), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(lines))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP
""",
}
"""Ways in which a process has no files without names."""


@pytest.mark.parametrize("way", list(WITHOUT_MEMFD))
def test_without_memfd_batches_go_through_the_pipe(way, tmp_path):
    if way == "seccomp" and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the number of the system call is that of x86-64")
    code = f"""
import errno, os, tempfile
{WITHOUT_MEMFD[way]}
tempfile.tempdir = {str(tmp_path)!r}
import helpers, minloader
def named():
    return [name for name in os.listdir(tempfile.tempdir) if name.startswith("minloader-")]
with minloader.Loader(helpers.numbered, range(10), num_workers=1) as loader:
    for n, batch in enumerate(loader):
        assert (batch == n).all() and batch.flags.writeable
    assert len(named()) == 2  # the job, and the heartbeats
    assert (loader.stats.memory.slots, loader.stats.memory.overflowed) == (0, 0), loader.stats
assert named() == []
"""
    assert printed_by(code) == ""


@pytest.fixture(scope="module")
def small_machine():
    """A command before which ``/dev/shm`` has 64 MB."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) to give a program a /dev/shm of its own")
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a /dev/shm of 64 MB can be mounted by root only")
    return "unshare", "-m", "sh", "-c", mount + ' && exec "$@"', "sh"


def test_a_small_dev_shm(small_machine):
    code = """
import helpers, minloader
items = [(n, 50_000_000 if n % 3 else 2_000_000) for n in range(6)]
with minloader.Loader(helpers.sized, items, num_workers=2, shared_memory=1 << 32) as loader:
    for n, batch in enumerate(loader):
        assert (batch == n).all() and batch.nbytes == items[n][1]
        if n == 0:
            kept = batch
    assert loader.stats.memory.overflowed == 0, loader.stats
assert (kept == 0).all()
"""
    printed_by(code, before=small_machine)


# --- errors, forks, surroundings ---------------------------------------------------------------


def test_trouble_after_a_part_was_born():
    troubles = ["none", "raises", "lock", "lambda"] * 15
    with Loader(Trouble(), list(enumerate(troubles)), num_workers=2) as loader:
        batches = iter(loader)
        kept = []
        for n, trouble in enumerate(troubles):
            if trouble == "raises":
                with pytest.raises(ValueError, match=f"item {n} is bad"):
                    next(batches)
            elif trouble == "lock":
                with pytest.raises(TransportError, match=r"batch\[1\] is a lock"):
                    next(batches)
            else:
                kept.append((n, *next(batches)))
        assert loader.stats.memory.overflowed == 0
        assert len(kept) == 30
        for n, array, other in kept:
            assert set(array) == {n}
            assert array.flags.writeable
            assert (other() if callable(other) else other) == n
        files = {slot.mark for slot in leased_slots(loader)}
        assert files == mapped_files() & files  # with a lambda too
        array = other = None
        kept.clear()
        assert eventually(lambda: loader.stats.memory.slots <= 4 + 2), loader.stats


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_made_in_its_slot_is_not_copied(streamed):
    """By collate: a batch that is kept takes its own bytes, and no others."""
    size = 1_000_000
    options: dict[str, Any] = {"num_workers": 2, "transform": partial(np.full, size)}
    if streamed:
        loader = Loader(Numbers(20), batch_size=1, **options)
    else:
        loader = Loader(int, [[n] for n in range(20)], collate_fn=collate, **options)
    with loader:
        kept = list(loader)
        assert sorted(batch[0, 0] for batch in kept) == list(range(20))
        assert loader.stats.memory.slot_bytes < 1.1 * sum(batch.nbytes for batch in kept)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("retired", [False, True])
def test_forks_share_the_batches_that_are_held(retired, monkeypatch):
    """None of them is copied: not by the first fork, nor by those that follow."""
    if retired:  # as where descriptors are scarce
        monkeypatch.setattr(Slots, "lease", partialmethod(Slots.lease, retire=True))
    large = partial(numbered, size=1_000_000)  # each in a task, and so in a slot, of its own
    with Loader(large, range(1, 5), num_workers=1) as loader:
        batches = list(loader)
        held = {slot.mark for slot in leased_slots(loader)}
        assert len(held) == 4
        for _ in range(3):
            assert in_a_fork(lambda: held <= mapped_files()) == "True"
            assert held <= mapped_files()

        def write() -> None:
            batches[0][...] = 7

        assert in_a_fork(write) == "None"
        assert [batches[0].max(), batches[0].min()] == [7, 7]
        assert [set(batch) for batch in batches[1:]] == [{2}, {3}, {4}]


def test_small_arrays_of_types_with_letters_that_numpy_uses():
    ml_dtypes = require("ml_dtypes")
    types = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e5m2]
    data = [np.full(4, 2).astype(each) for each in types]
    with Loader(data, num_workers=1) as loader:
        for batch, dtype in zip(loader, types, strict=True):
            assert batch.dtype == dtype
            assert batch.astype(int).tolist() == [2] * 4


def test_a_fork_keeps_what_it_looks_at():
    code = """
import os, helpers, minloader
def files():
    with os.scandir("/proc/self/fd") as entries:
        return sum(bool(helpers.SHARED.search(os.readlink(entry.path))) for entry in entries)
with minloader.Loader(helpers.numbered, range(60), num_workers=2) as loader:
    batches = iter(loader)
    held = [next(batches) for _ in range(3)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        good = all((batch == n).all() for n, batch in enumerate(held)) and len(held) == 3
        os._exit(0 if good and files() <= 3 else 1)  # the job, and the heartbeats twice
    del held
    for n, batch in enumerate(batches, 3):
        assert (batch == n).all()
    del batch
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert loader.stats.memory.slots <= 6 and loader.stats.memory.overflowed == 0
    assert files() <= loader.stats.memory.slots + 3
"""
    printed_by(code, options=["-W", "ignore::DeprecationWarning"])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_that_are_forks():
    with Loader(numbered, range(30), num_workers=2, mp_context="fork") as loader:
        held = list(loader)[::3]
        with Loader(numbered, range(100, 130), num_workers=2, mp_context="fork") as other:
            for n, (one, two) in enumerate(zip(loader, other, strict=True)):
                assert (one == n).all()
                assert (two == 100 + n).all()
        for n, batch in enumerate(held):
            assert (batch == 3 * n).all()
