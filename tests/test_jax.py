"""to_device: batches on devices, ahead of the consumer, whose contents never change again."""

from __future__ import annotations

import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import eventually, leased_slots, printed_by, require
from helpers import Echo

from minloader import BatchSampler, Loader, collate, prefetch

jax = require("jax")

from minloader.jax import to_device  # noqa: E402


class Images:
    """Sample i is full of i; large enough for a slot."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full((64, 64), index, np.float32), "name": f"image {index}"}


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.slow
def test_what_goes_and_what_stays():
    day = np.array(["2026-11-21"], "M8[D]")
    words = np.array(["a", "b"])
    texts = np.array(["a", "b"], np.dtypes.StringDType())
    records = np.zeros(2, [("x", "i4"), ("y", "f4")])
    scalar = np.float64(2.5)
    batch = {
        "tuple": (np.zeros(2, np.int8), None, "text", b"bytes"),
        "pair": Pair([np.zeros((0, 3), bool)], 5),
        "numbers": [1, 2.5, True, 1j, scalar],
        "words": words,
        "texts": texts,
        "day": day,
        "objects": np.array([None]),
        "records": records,
        "zero": np.array(7, np.int32),
        "complex": np.zeros(2, np.complex64),
        "there": jax.numpy.ones(2),
    }
    (found,) = to_device([batch])
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    assert isinstance(found["pair"], Pair)
    arrays = {
        jax.tree_util.keystr(path): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
        if isinstance(leaf, jax.Array)
    }
    assert arrays == {
        "['tuple'][0]": "int8",
        "['pair'].first[0]": "bool",
        "['zero']": "int32",
        "['complex']": "complex64",
        "['there']": "float32",
    }
    assert found["tuple"][1:] == (None, "text", b"bytes")
    assert found["pair"].second == 5
    assert found["numbers"] == [1, 2.5, True, 1j, scalar]
    assert found["words"] is words
    assert found["texts"] is texts
    assert found["records"] is records
    assert found["day"] is day


def test_64_bits_become_32_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = to_device([(np.zeros(2), np.zeros(2, np.int64))])
    assert [array.dtype.name for array in found] == ["float32", "int32"]


def test_what_the_callers_thread_has_set_holds():
    """Another thread puts; as of the call of to_device."""
    mesh = jax.make_mesh((1,), ("data",))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        batches = to_device([np.zeros(2)], jax.sharding.PartitionSpec("data"))
    (found,) = batches
    assert found.dtype == "float64"
    assert found.sharding.mesh == mesh


def test_a_container_that_checks_itself():
    """It never sees anything but arrays in place of its arrays."""

    @jax.tree_util.register_dataclass
    @dataclass
    class Checked:
        x: Any
        name: str

        def __post_init__(self) -> None:
            if not isinstance(self.x, np.ndarray | jax.Array) or not isinstance(self.name, str):
                raise TypeError(f"x must be an array, and name a text, got {self!r}")

    (found,) = to_device([Checked(np.ones(2), "one")])
    assert isinstance(found.x, jax.Array)
    assert found.name == "one"

    @jax.tree_util.register_dataclass
    @dataclass
    class Narrow:
        x: Any

        def __post_init__(self) -> None:
            if not isinstance(self.x, np.ndarray):
                raise TypeError("x must be an array of numpy")

    with pytest.raises(TypeError, match="x must be an array of numpy") as raised:
        next(to_device([Narrow(np.ones(2))]))
    assert "put it together behind to_device()" in raised.value.__notes__[0]


class Metres:
    units = object()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros(2)


def table() -> Any:
    return require("pandas").DataFrame({"a": [1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.ma.masked_equal([1, 2], 2), r"batch\['x'\] is a MaskedArray, whose mask"),
        (Metres, r"batch\['x'\] is a Metres, whose unit would be lost.*magnitude"),
        (table, r"batch\['x'\] is a DataFrame, whose columns would be lost.*a dict of its columns"),
    ],
)
def test_what_would_lose_something_is_refused_in_its_place(make, message):
    batches = to_device([np.zeros(1), {"x": make()}, np.ones(1)])
    next(batches)
    with pytest.raises(TypeError, match=message):
        next(batches)
    assert next(batches).tolist() == [1]
    assert list(batches) == []


@pytest.mark.parametrize(
    ("batch", "prefix", "message"),
    [
        ({"n": np.array(3)}, None, r"batch\['n'\] is a single number, which cannot be split"),
        ({"n": np.zeros(3), "x": 1}, "n", r"device is no prefix of the batch: Dict key mismatch"),
    ],
)
def test_a_device_that_does_not_fit_is_explained(batch, prefix, message):
    mesh = jax.make_mesh((1,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match=message):
        next(to_device([batch], split if prefix is None else {prefix: split}))


@pytest.mark.parametrize("where", ["a device", "a sharding"])
def test_a_single_number_goes_to_a_device(where):
    (device,) = jax.devices()
    place = device if where == "a device" else jax.sharding.SingleDeviceSharding(device)
    (found,) = to_device([{"n": np.array(3), "x": np.zeros(2)}], place)
    assert found["n"].item() == 3
    assert found["n"].devices() == {device}


def test_tensors_of_torch():
    torch = require("torch")
    (found,) = to_device([{"x": torch.arange(3, dtype=torch.int32)}])
    assert isinstance(found["x"], jax.Array)
    assert found["x"].tolist() == [0, 1, 2]
    for name in ("bfloat16", "float8_e5m2"):  # which numpy alone has not
        (found,) = to_device([torch.arange(3).to(getattr(torch, name))])
        assert (found.dtype.name, found.tolist()) == (name, [0, 1, 2])
    (found,) = to_device([torch.ones(2, requires_grad=True)])
    assert found.tolist() == [1, 1]


def test_strided_and_read_only_arrays():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    frozen = array.copy()
    frozen.flags.writeable = False
    (found,) = to_device([(array.T, array[:, ::-2], frozen)])
    for here, there in zip((array.T, array[:, ::-2], frozen), found, strict=True):
        assert (np.asarray(there) == here).all()


# --- memory


@pytest.mark.slow
def test_contents_never_change_though_slots_are_used_again():
    """JAX uses the memory of an aligned numpy array as it is, and slots are aligned."""
    sampler = BatchSampler(160, 4)
    with Loader(Images(), sampler, collate_fn=collate, num_workers=2) as loader:
        kept = []
        for n, batch in enumerate(to_device(loader)):
            if n % 8 == 0:
                kept.append(batch["image"])
        assert len(kept) == 5 <= len(leased_slots(loader))  # nothing was copied
        assert loader.stats.memory.slots < 30  # so that many batches lay where others had
        for n, images in enumerate(kept):
            assert (images[:, 1, 1] == np.arange(32 * n, 32 * n + 4)).all()
        del batch, images
        kept.clear()
        jax.device_put(0)  # JAX lets go of memory when it is called next
        assert eventually(lambda: not leased_slots(loader))


def aligned_array() -> Any:
    """Return an array whose memory JAX uses without a copy."""
    memory = np.zeros(1 << 12, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + 1024]


def test_contents_never_change_though_the_dataset_writes_to_its_arrays():
    aligned = aligned_array()

    class Reusing:
        """Each batch is the same array, with other contents."""

        def __getitem__(self, item: int) -> Any:
            aligned[:] = item
            return aligned

    with Loader(Reusing(), range(6), num_workers=0) as loader:
        found = list(to_device(loader))
    assert [array[5].item() for array in found] == list(range(6))
    # Also after a batch that says nothing of where arrays go.
    reusing = Reusing()
    found = list(to_device("text" if n == 1 else reusing[n] for n in range(6)))
    assert [array[5].item() for array in found if not isinstance(array, str)] == [0, 2, 3, 4, 5]


def test_what_comes_from_no_slot_is_copied():
    """Threads give the very array of the dataset, which may write to it."""
    array = np.zeros(1 << 16, np.float32)
    with Loader(lambda _: array, range(2), executor="thread") as loader:
        found = list(to_device(loader))
    array[:] = 1
    assert not any(there.any() for there in found)


@pytest.mark.parametrize("first", [0, 1])
def test_what_another_prefetch_gives_is_copied(first):
    """Its function may fill the same array again; also where it has given some itself."""
    array = aligned_array()

    def fill(number: int) -> Any:
        array[:] = number
        return array

    with Loader(Echo(), range(6), num_workers=0) as loader:
        batches = prefetch(loader, fill)
        for _ in range(first):
            next(batches)
        found = list(to_device(batches))
    assert [there[0].item() for there in found] == list(range(first, 6))


# --- the iterator


def test_reads_no_further_ahead_than_depth():
    drawn: list[int] = []

    def source() -> Any:
        for n in range(9):
            drawn.append(n)
            yield np.full(3, n)

    for depth, options in ((2, {}), (1, {"depth": 1}), (4, {"depth": 4})):
        drawn.clear()
        with to_device(source(), **options) as batches:
            assert next(batches).tolist() == [0, 0, 0]
            assert drawn == list(range(depth + 1))
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        to_device([], depth=0)


def test_what_jax_refuses_is_raised_in_its_place():
    odd = np.zeros(2, ">f4")  # the other byte order
    batches = to_device([np.zeros(1), odd, np.ones(1)])
    next(batches)
    with pytest.raises(TypeError, match=">f4"):
        next(batches)
    assert next(batches).tolist() == [1]
    assert list(batches) == []


class Unreadable:
    """A leaf that no array can be made of."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise ValueError("unreadable")


@pytest.mark.parametrize("source", [iter, lambda items: Loader(items, num_workers=0)])
def test_a_batch_that_cannot_be_copied_is_an_error_in_its_place(source):
    batches = to_device(source([np.zeros(1), Unreadable(), np.ones(1)]))
    next(batches)
    with pytest.raises(ValueError, match="unreadable"):
        next(batches)
    assert next(batches).tolist() == [1]
    assert list(batches) == []


def test_workers_do_not_import_jax():
    with Loader(
        Echo(), range(4), transform=lambda _: "jax" in __import__("sys").modules, num_workers=2
    ) as loader:
        assert list(to_device(loader)) == [False] * 4


# --- several devices

DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import warnings
warnings.simplefilter("error")
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from minloader import BatchSampler, Loader, collate
from minloader.jax import to_device

class Samples:
    def __getitem__(self, i):
        return {"x": np.full((32, 33), i, np.float32), "y": np.int32(i), "name": str(i)}

devices = jax.devices()
assert len(devices) == 4
mesh = Mesh(np.array(devices), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
whole = NamedSharding(mesh, PartitionSpec())
loader = Loader(Samples(), BatchSampler(20, 8), collate_fn=collate, num_workers=2)

# An array is split along its first axis; the last batch, of 4, too.
sizes = []
for n, batch in enumerate(to_device(loader, split)):
    x = batch["x"]
    assert x.sharding == split and x.committed
    assert len(x.addressable_shards) == 4
    for shard in x.addressable_shards:
        rows = np.arange(8 * n, min(8 * n + 8, 20))[shard.index[0]]
        assert (np.asarray(shard.data)[:, 0, 0] == rows).all()
        sizes.append(len(rows))
    assert batch["name"] == [str(i) for i in range(8 * n, min(8 * n + 8, 20))]
assert sizes == [2] * 8 + [1] * 4

# A pytree of shardings, a prefix of the batch, which has strings too.
for batch in to_device(loader, {"x": split, "y": whole, "name": None}):
    assert batch["x"].sharding == split and batch["y"].sharding == whole
    assert isinstance(batch["name"], list)

# One of several devices.
for batch in to_device(loader, devices[2]):
    assert batch["x"].devices() == {devices[2]} and batch["x"].committed

# The default device of this thread, though another puts; as of now.
with jax.default_device(devices[3]):
    batches = to_device(loader)
for batch in batches:
    assert batch["x"].devices() == {devices[3]} and not batch["x"].committed

# What cannot be split evenly is an error in its place.
odd = Loader(Samples(), BatchSampler(11, 4), collate_fn=collate, num_workers=0)
batches = to_device(odd, split)
next(batches), next(batches)
try:
    next(batches)
except ValueError as error:
    assert "divi" in str(error), error
else:
    raise AssertionError
assert list(batches) == []
loader.close()
print("done")
"""


@pytest.mark.slow
def test_several_devices():
    assert printed_by(DEVICES) == "done\n"


PROCESSES = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from minloader import BatchSampler, Loader, collate
from minloader.jax import to_device

rank, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, rank)
mesh = Mesh(np.array(jax.devices()), ("data",))
split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))

class Samples:
    def __getitem__(self, i):
        return {"x": np.full(3, i, np.float32), "y": np.int32(i), "name": str(i)}

sampler = BatchSampler(24, 4, rank=rank, world_size=2)
loader = Loader(Samples(), sampler, collate_fn=collate, num_workers=0)
sums = []
own = jax.local_devices()[1]
for sharding in (split, {"x": split, "name": whole, "y": own}):
    loader.set_epoch(0)
    for batch in to_device(loader, sharding):
        assert batch["x"].shape == (8, 3) and len(batch["name"]) == 4
        assert not batch["x"].is_fully_addressable
        parts = [np.asarray(shard.data)[:, 0] for shard in batch["x"].addressable_shards]
        assert [str(int(i)) for i in np.concatenate(parts)] == batch["name"]
        assert sharding is split or batch["y"].devices() == {own} and len(batch["y"]) == 4
        sums.append(jax.jit(jax.numpy.sum)(batch["x"]).item())
assert sums == 2 * [3 * sum(range(n, n + 8)) for n in (0, 8, 16)], sums
print("done")
"""


@pytest.mark.slow
def test_several_processes():
    """Each loads its own part of a batch, and all have the whole: jax.distributed over CPUs."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESSES]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=250)
            assert rank.returncode == 0, err.decode()
            assert out.decode().endswith("done\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_a_script_ends_in_the_middle():
    script = """
import numpy as np
from minloader import Loader
from minloader.jax import to_device
loader = Loader(lambda n: np.full(1 << 16, n), range(1000), num_workers=2)
batches = to_device(loader)
print(next(batches)[0])
"""
    assert printed_by(script) == "0\n"
