"""What crosses between processes arrives whole, is shared where it can be, and leaves nothing."""

import copyreg
import functools
import io
import os
import pickle
import threading
import traceback
import types
import weakref
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from conftest import printed_by
from helpers import TwoArguments
from numpy.testing import assert_array_equal
from trouble import Frozen, Hopeless

from minloader._foreign.worker import OutOfBand
from minloader._memory import unpicklable
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.files import LARGE, unlink
from minloader._memory.job_file import JobFile, JobPickler
from minloader._memory.pickling import (
    pack,
    pack_error,
    unpack,
    unpack_batch,
)
from minloader._memory.reducers import register_reducer, registered
from minloader._memory.unpicklable import find_unpicklable

QUIETLY: Any = {"options": ["-X", "dev"], "env": {"PYTHONWARNINGS": "error"}}
"""How programs are run that must not warn of anything."""

linux = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="without memfd the file has a name"
)


@pytest.fixture(params=["unnamed", "named"])
def ship(request, monkeypatch, tmp_path):
    """Makes job_files of both kinds, and closes them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if request.param == "named":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("no memfd here")
    job_files = []

    def make(obj):
        job_files.append(JobFile(obj))
        assert (job_files[-1].name is not None) == (request.param == "named")
        return job_files[-1]

    yield make
    for job_file in job_files:
        job_file.close()
    assert list(tmp_path.iterdir()) == []


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


class Holder:
    """Stands for a user's dataset."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock", "n")

    def __init__(self):
        self.n, self.lock = 1, threading.Lock()


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


# --- packing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("down", [True, False])
def test_messages_come_back_equal(down):
    """Lambdas and local classes too."""

    class Local:
        value = 5

    n = 3
    message = ("__main__", [1, 2.5, None, b"\0"], {"k": (True, "ü")}, {3})
    assert unpack(pack(message, down=down)) == message
    assert_array_equal(unpack(pack(np.arange(6.0), down=down)), np.arange(6.0), strict=True)
    function, cls = unpack(pack((lambda x: x + n, Local), down=down))
    assert (function(4), cls().value) == (7, 5)
    with pytest.raises(TypeError, match="lock"):
        pack([threading.Lock()], down=down)


# --- job files ---------------------------------------------------------------------------------


def test_round_trip(ship):
    n, shared = 2, [1]
    original = {"array": np.arange(10_000), "blob": b"x" * LARGE, "f": lambda x: x * n}
    original |= {"a": shared, "b": shared, "small": [np.arange(i % 5) for i in range(1000)]}
    original["rows"] = [{"id": i, "name": f"n{i}", "x": (i, None)} for i in range(20_000)]
    original["self"] = original
    job_file = ship(original)
    changed = job_file.address.load()
    changed["array"] += 1  # which stays private
    loaded = job_file.address.load()
    assert_array_equal(loaded["array"], original["array"], strict=True)
    assert loaded["blob"] == original["blob"]
    assert loaded["f"](4) == 8
    assert loaded["a"] is loaded["b"]
    assert loaded["self"] is loaded
    assert loaded["rows"] == original["rows"]
    assert all(map(np.array_equal, loaded["small"], original["small"]))


@pytest.mark.parametrize("n", [10, LARGE])
def test_arrays_that_are_read_only_stay_so(ship, n):
    frozen = np.arange(n)
    frozen.flags.writeable = False
    loaded, free = ship((frozen, np.arange(n))).address.load()
    assert free.flags.writeable
    assert not loaded.flags.writeable
    assert_array_equal(loaded, frozen, strict=True)


grid = np.arange(4 * LARGE, dtype=np.int32).reshape(4, -1)
structured = np.zeros(LARGE, dtype=[("a", "i4"), ("b", "f8", (2,))])
structured["b"] = np.arange(2 * LARGE).reshape(-1, 2)


@pytest.mark.parametrize(
    ("array", "in_place"),
    [
        (grid[:, ::2], True),
        (grid.T[::-1], True),
        (np.asfortranarray(grid), True),
        (np.arange(float(LARGE)).astype(">f8"), True),
        (structured, True),
        (structured[["a"]], True),
        (np.array(["ä", "bc"] * LARGE), True),
        (np.array([b"a", b"bc"] * LARGE), True),
        (np.arange(LARGE).astype("M8[s]"), False),
        (np.array([{"i": i} for i in range(LARGE // 8)], dtype=object), False),
        (np.zeros((0, LARGE)), False),
        (np.array(7), False),
    ],
)
def test_arrays_of_all_kinds(array, in_place):
    job_file = JobFile([array, array])
    try:
        one, other = job_file.address.load()
    finally:
        job_file.close()
    assert one is other
    assert_array_equal(one, array, strict=True)
    assert one.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    assert one.flags.writeable
    if in_place:
        assert one.ctypes.data % 64 == 0
        assert not one.flags.owndata


@pytest.mark.parametrize("dtype", [">f8", "i2,f4"])
def test_an_array_that_overlaps_itself_takes_the_memory_that_it_spans(ship, dtype):
    flat = np.zeros(LARGE, dtype)
    flat[flat.dtype.names[0] if flat.dtype.names else ...] = np.arange(LARGE)
    windows = np.lib.stride_tricks.sliding_window_view(flat[::-2], 500, writeable=True)
    broadcast = np.broadcast_to(flat[:, None, None], (LARGE, 500, 3))[::3, ::-1]
    job_file = ship([windows, broadcast, windows[:, ::-1]])
    assert job_file.size < 4 * flat.nbytes
    loaded = job_file.address.load()
    for one, other in zip(loaded, [windows, broadcast, windows[:, ::-1]], strict=True):
        assert_array_equal(one, other, strict=True)
        assert one.flags.writeable == other.flags.writeable
    loaded[0][0, 1] = flat[7]
    assert loaded[0][1, 0] == flat[7]  # it still overlaps
    assert flat[-3] != flat[7]  # and is private


def test_large_buffers_take_their_size_once():
    """One copy in the file, not one in the stream and one beside it, nor one per reference."""
    array, blob = np.ones(LARGE), b"x" * (8 * LARGE)
    job_file = JobFile([array, blob, array[::1], {"again": blob}, array])
    size = job_file.size
    job_file.close()
    assert 16 * LARGE < size < 24 * LARGE + 5000  # a view is an array of its own


def test_a_job_file_is_of_now(ship):
    obj = [np.zeros(LARGE)]
    address = ship(obj).address
    obj[0][:] = 1
    obj.append(2)
    (loaded,) = address.load()
    assert not loaded.any()


# --- and nothing is left -----------------------------------------------------------------------


def test_close_lets_go(ship):
    before = descriptors()
    job_file = ship(np.arange(LARGE))
    address = pickle.loads(pickle.dumps(job_file.address))
    assert address == job_file.address
    assert address.exists()
    loaded = address.load()
    assert len(descriptors()) == len(before) + 2  # the job_file's, and the mapping's own
    job_file.close()
    assert not address.exists()
    with pytest.raises(FileNotFoundError):
        address.load()
    job_file.close()  # a second time is harmless
    assert_array_equal(loaded, np.arange(LARGE))  # what is mapped stays usable
    del loaded
    assert descriptors() == before


def test_a_descriptor_used_again_is_not_mistaken_for_the_job_file():
    first = JobFile(1)
    address = first.address
    first.close()
    second = JobFile(2)
    try:
        if second.name is None:
            assert second.address.path == address.path
        assert not address.exists()
        with pytest.raises(FileNotFoundError):
            address.load()
    finally:
        second.close()


@linux
def test_named_files_are_used_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = descriptors()
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: not str(p).startswith("/proc") and exists(p))
    job_file = JobFile("here")
    assert job_file.name is not None
    assert len(descriptors()) == len(before) + 1
    job_file.close()
    assert descriptors() == before


def test_unlinking_twice_is_harmless(monkeypatch, tmp_path):
    """The workers all do it when their parent dies."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    job_file = JobFile("here")
    address = job_file.address
    unlink(address.path)
    assert list(tmp_path.iterdir()) == []
    assert not address.exists()
    unlink(address.path)
    job_file.close()  # as when a cleaner of /tmp has been there
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_take_the_file_with_it():
    program = """
import os
if NAMED:
    del os.memfd_create
from minloader._memory.job_file import JobFile, JobPickler
job_file = JobFile(7)
address = job_file.address
child = os.fork()
if not child:
    mine = job_file.address
    ok = mine.load() == 7 and (NAMED or str(os.getpid()) in mine.path)
    job_file.close()
    os._exit(0 if ok else 3)
assert os.waitpid(child, 0)[1] == 0
assert address.load() == 7
job_file.close()
assert not address.exists()
"""
    for named in ("True", "False"):
        assert printed_by(program.replace("NAMED", named), **QUIETLY) == ""


# --- reducers of the user's --------------------------------------------------------------------


def in_a_job(obj):
    job_file = JobFile(obj, "spawn")
    try:
        assert job_file.inherited == []
        return job_file.address.load()
    finally:
        job_file.close()


WAYS = {
    "job": in_a_job,
    "item": lambda obj: unpack(pack(obj, down=True)),
    "batch": lambda obj: unpack(BatchPacker().pack(obj)),
    "batch by cloudpickle": lambda obj: unpack(BatchPacker().pack([lambda: 0, obj]))[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,  # which nobody can send
        functools.partial(Holder, name="its own"),
        lambda: np.arange(3),  # for which there is one in the table, too
        lambda: np.arange(3).view(np.recarray),
        get_context("spawn").Lock,  # which a worker would inherit
        lambda: functools.lru_cache(np.sort),
        lambda: get_context("spawn").Pipe()[0],
    ],
)
def test_what_is_registered_comes_first(make, way, monkeypatch):
    obj = make()
    monkeypatch.setitem(copyreg.dispatch_table, type(obj), lambda _: (str, ("copyreg",)))
    assert WAYS[way](obj) == "copyreg"
    monkeypatch.delitem(registered, type(obj), raising=False)
    register_reducer(type(obj), lambda _: (str, ("registered",)))
    assert WAYS[way](obj) == "registered"
    assert pickle.loads(pickle.dumps(obj)) == "copyreg"
    registered.pop(type(obj))
    getattr(obj, "close", int)()


@pytest.mark.parametrize("function", [None, 3])
def test_what_no_function_reduces_is_not_registered(function):
    with pytest.raises(TypeError, match=f"function must be callable, got {function}"):
        register_reducer(Holder, function)
    assert Holder not in registered


# --- what is to blame --------------------------------------------------------------------------


def method_of(obj):
    return types.MethodType(lambda self: None, obj)


def closure_over(lock):
    return lambda: lock


def global_variable(lock):
    module = types.ModuleType("__main__")  # a function that travels by value
    module.lock = lock
    exec("def f(): return lock", vars(module))
    return module.f


def global_of_a_lambda(lock):
    module = types.ModuleType("by_value")
    vars(module)["lock"] = lock
    exec("def f(): return lambda: lock", vars(module))
    return module.f


def knowing_itself(lock):
    holder = Holder()
    holder.child = Holder(parent=holder)
    holder.lock = lock
    return holder


def deep(n, obj):
    return [deep(n - 1, obj)] if n else obj


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda bad: bad, "dataset"),
        (lambda bad: Holder(files=[1, 2, 3, Holder(lock=bad)]), "dataset.files[3].lock"),
        (lambda bad: Holder(a=Holder(b=Holder(c=(0, bad)))), "dataset.a.b.c[1]"),
        (lambda bad: {"ok": 1, "bad": {("k", 2): bad}}, "dataset['bad'][('k', 2)]"),
        (lambda bad: closure_over(bad), "dataset (closure variable 'lock')"),
        (
            lambda bad: Holder(f=closure_over({"x": [bad]})),
            "dataset.f (closure variable 'lock')['x'][0]",
        ),
        (lambda bad: method_of(Holder(lock=bad)), "dataset.__self__.lock"),
        (lambda bad: bad.acquire, "dataset.__self__"),
        (lambda bad: functools.partial(int, 3, base=bad), "dataset.keywords['base']"),
        (
            lambda bad: functools.partial(closure_over(bad)),
            "dataset.func (closure variable 'lock')",
        ),
        (lambda bad: lambda a, b=1, c=bad, *, d=2: a, "dataset (default of 'c')"),
        (lambda bad: lambda a, b=1, *, d=bad: a, "dataset (default of 'd')"),
        (lambda bad: Holder(d=[Slotted()]), "dataset.d[0].lock"),
        (lambda bad: Holder(good=np.ones(3), bad=Unpicklable()), "dataset.bad"),
        (lambda bad: deep(20, bad), "dataset" + "[0]" * 20),
        (global_variable, "dataset (global variable 'lock')"),
        (global_of_a_lambda, "dataset (global variable 'lock')"),
        (knowing_itself, "dataset.lock"),
    ],
)
def test_the_culprit_is_named(make, path):
    found_path, part, error = find_unpicklable(make(threading.Lock()), "dataset")
    assert found_path == path
    assert error in ("not this one", "cannot pickle '_thread.lock' object")
    assert isinstance(part, (Unpicklable, type(threading.Lock())))


def packed_batch(batch):
    return BatchPacker(OutOfBand()).pack(batch)


def test_batches_of_a_task_know_nothing_of_each_other():
    """One pickler packs them, which remembers what it has seen until it is told to forget."""
    packer = BatchPacker()
    part = np.arange(3)
    whole = {"part": part, "name": "x" * 30}
    first = packer.pack(whole)
    assert packer.pack(whole) == first
    with pytest.raises(TypeError, match="cannot pickle"):
        packer.pack([whole, "half a batch", threading.Lock()])
    assert packer.pack(whole) == first
    watch = weakref.ref(part)
    del part, whole
    assert watch() is None
    np.testing.assert_equal(unpack(first), {"part": [0, 1, 2], "name": "x" * 30})


class Endless:
    def __getstate__(self):
        return {"child": Endless()}


def siblings():
    dataset = Holder()
    dataset.items = [Holder(parent=dataset) for _ in range(1000)]
    dataset.lock = threading.Lock()
    return dataset


def bottomless():
    return functools.reduce(lambda inner, _: [inner], range(100_000), 1)


@pytest.mark.parametrize(
    ("make", "path"),
    [(siblings, "dataset.lock"), (Endless, "dataset"), (bottomless, "dataset")],
)
def test_the_search_for_the_culprit_ends(monkeypatch, make, path):
    """One attempt to pickle, and one look at each part: more would be quadratic, or endless."""
    obj, attempts = make(), []

    class Counted(unpicklable._Probe):
        def dump(self, each):
            attempts.append(each)
            super().dump(each)

    monkeypatch.setattr(unpicklable, "_Probe", Counted)
    assert find_unpicklable(obj, "dataset")[0] == path
    assert attempts == [obj]


def test_no_more_parts_are_looked_at_than_may_be(monkeypatch):
    monkeypatch.setattr(unpicklable, "MOST_PARTS", 100)
    shown = []

    class Key:
        def __repr__(self) -> str:
            shown.append(self)
            return "key"

    obj = Holder(wide={Key(): n for n in range(1_000)}, lock=threading.Lock())
    assert find_unpicklable(obj, "dataset")[0] == "dataset.lock"
    assert len(shown) < 100


def test_a_part_that_is_made_anew_each_time():
    path, part, error = find_unpicklable(MakesLocks(), "dataset")
    assert (path, type(part)) == ("dataset", MakesLocks)
    assert error == "cannot pickle '_thread.lock' object"


class MakesLocks:
    def __getstate__(self):
        return {"lock": threading.Lock()}


def test_the_error_of_an_object_without_end_is_short():
    """From CPython 3.14, each of its levels adds a note to the error (cpython #122213)."""
    down, up = functools.partial(pack, down=True), functools.partial(pack, down=False)
    for serialize in (JobFile, down, up, packed_batch):
        with pytest.raises((pickle.PicklingError, RecursionError)) as caught:
            serialize(Endless())
        assert len("".join(traceback.format_exception(caught.value))) < 10_000


@pytest.mark.parametrize(
    "obj",
    [1, lambda: 0, Holder(a=[np.ones(3)], f=closure_over(5)), functools.partial(len, "x"), int],
)
def test_no_culprit_where_all_is_well(obj):
    assert find_unpicklable(obj, "dataset") is None


# --- exceptions --------------------------------------------------------------------------------


class KeywordOnly(ValueError):
    def __init__(self, *, reason):
        super().__init__(reason)
        self.reason = reason


class DiskError(OSError):
    def __init__(self, errno, path):
        super().__init__(errno, "disk on fire", path)


def there_and_back(error):
    """As the parent gets it. The traceback does not travel, and must not stand in the way."""
    try:
        raise error
    except BaseException as caught:
        payload = pack_error(caught)
    assert isinstance(payload, bytes)
    back = unpack(payload)
    assert type(back) is type(error)
    assert back is not error
    return back


def having(error, **attributes):
    vars(error).update(attributes)
    return error


def local_error():
    class LocalError(Exception):
        pass

    return LocalError("here")


def of_file(number, text):
    """What an error of the system knows."""
    return {"errno": number, "strerror": text, "filename": "a.wav"}


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("a", 1), {"args": ("a", 1)}),
        (KeyError("k"), {"args": ("k",)}),
        (StopIteration(3), {"args": (3,)}),
        (SystemExit(2), {"args": (2,)}),
        (KeyboardInterrupt(), {"args": ()}),
        (TwoArguments(404, "gone"), {"args": ("404: gone",), "code": 404, "reason": "gone"}),
        (KeywordOnly(reason="tired"), {"args": ("tired",), "reason": "tired"}),
        (Frozen(3), {"code": 3}),
        (local_error(), {"args": ("here",)}),
        # What cannot travel stays behind, or is described.
        (having(ValueError("oops"), lock=LOCK, row=7), {"args": ("oops",), "__dict__": {"row": 7}}),
        (having(ValueError("oops"), bad=Unpicklable()), {"args": ("oops",), "__dict__": {}}),
        (RuntimeError("held", LOCK), {"args": ("held", repr(LOCK))}),
        # Those of the system know a file, also without their attributes or their own ``__init__``.
        (FileNotFoundError(2, "No such file", "a.wav"), of_file(2, "No such file")),
        (having(PermissionError(13, "denied", "a.wav"), lock=LOCK), of_file(13, "denied")),
        (DiskError(5, "a.wav"), of_file(5, "disk on fire")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exceptions_travel(error, told):
    before = dict(vars(error))
    back = there_and_back(error)
    assert {name: getattr(back, name) for name in told} == told
    assert vars(error) == before


def test_a_hopeless_exception_is_none():
    assert pack_error(Hopeless(1, 2, key="k")) is None


def test_notes_travel():
    for error in (ValueError("oops"), TwoArguments(1, "x"), RuntimeError(threading.Lock())):
        error.add_note("in file 7")
        assert there_and_back(error).__notes__ == ["in file 7"]


def test_groups_travel():
    error = ExceptionGroup("many", [ValueError(1), TwoArguments(2, "x")])
    plain = ExceptionGroup("many", [ValueError(1), ExceptionGroup("more", [OSError(5, "io")])])
    back = there_and_back(plain)
    assert back.message == "many"
    assert [type(e) for e in back.exceptions] == [ValueError, ExceptionGroup]
    assert back.exceptions[1].exceptions[0].errno == 5
    # One that holds what cannot travel as it is may stay behind, but must not raise.
    assert pack_error(error) is None or type(unpack(pack_error(error))) is ExceptionGroup


@pytest.mark.parametrize("mode", ["r", "r+", "w+"])
def test_a_memmap_is_opened_again_rather_than_read(tmp_path, mode):
    """A dataset may be a file far larger than memory."""
    path = tmp_path / "array"
    np.arange(200_000, dtype=np.int32).tofile(path)
    if mode == "w+":
        array = np.memmap(path, np.int32, mode, offset=4, shape=(100, 1000))
        array[:] = np.arange(100_000).reshape(100, 1000)
    else:
        array = np.memmap(path, np.int32, mode, offset=4, shape=(100, 1000), order="F")
    forms = [array, array[:, 7:20], array.T, array[50:], array[::3]]
    job_file = JobFile(forms)
    copied = sum(form.nbytes for form in forms if not form.flags.forc)  # no block of the file
    assert job_file.size < copied + 10_000
    back = job_file.address.load()
    job_file.close()
    for got, sent in zip(back, forms, strict=True):
        assert np.array_equal(got, sent)
        assert got.flags.writeable == sent.flags.writeable
    if mode != "r":
        back[0][3, 4] = -5
        assert array[3, 4] == -5


def test_large_arrays_of_times_travel_beside_the_stream():
    days = np.arange(20_000).astype("M8[D]")
    wide = days.reshape(200, 100)
    swapped = (days - days[7]).astype(">m8[s]")
    for form in days, swapped, wide.T, wide[:, 3:60], np.asfortranarray(wide), days[::-1]:
        pickler = JobPickler(stream := io.BytesIO(), "spawn")
        pickler.dump(form)
        packed = packed_batch(form)
        assert max(len(stream.getvalue()), len(packed.stream)) < 1_000
        sent = pickle.loads(stream.getvalue(), buffers=pickler.buffers)
        for back in sent, unpack_batch(packed, None):
            assert back.dtype == form.dtype
            assert_array_equal(back, form)


def test_a_private_memmap_travels_with_its_changes(tmp_path):
    """Beside the stream, as what is made of any memmap: workers share its pages."""
    path = tmp_path / "array"
    np.zeros(10_000).tofile(path)
    array = np.memmap(path, np.float64, "c")
    array[5] = 1
    for form in array, array[3:], array.astype(np.float32), array.reshape(2, -1).T.copy("K"):
        pickler = JobPickler(stream := io.BytesIO(), "spawn")
        pickler.dump(form)
        assert len(stream.getvalue()) < 1_000
        back = pickle.loads(stream.getvalue(), buffers=pickler.buffers)
        assert type(back) is np.memmap
        assert np.array_equal(back, form)
