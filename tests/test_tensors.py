"""Tensors and arrays of all kinds arrive as they were, without a copy, with their strides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import require, variants
from numpy.testing import assert_array_equal

from minloader import Loader, TransportError
from minloader._diagnosis.leaves import leaves
from minloader._foreign.worker import OutOfBand
from minloader._memory import tensors
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.job_file import JobFile
from minloader._memory.pickling import PackedBatch, pack, unpack, unpack_batch
from minloader._sampling import torch_collate

torch = require("torch")
forms = require("forms")
minloader_torch = require("minloader.torch")

pytestmark = pytest.mark.usefixtures("quick_starts")

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"


def rows() -> dict[str, tuple[str, str]]:
    """What the table says of each kind of things: how they arrive in a worker, and in a batch."""
    text = PAGE.read_text().partition("## What arrives how")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)[1:]
    for (what, _, _), name in zip(cells, forms.FORMS, strict=True):
        assert what.startswith(name)
    return {name: (down, up) for (_, down, up), name in zip(cells, forms.FORMS, strict=True)}


@pytest.mark.filterwarnings("ignore")  # torch calls some of them a beta
def test_the_table_is_true():
    table = rows()
    names = [(row, n) for row, examples in forms.FORMS.items() for n in range(len(examples))]
    sent = [name for name in names if table[name[0]][0] not in ("refused", "inherited")]
    with Loader(forms.Forms(sent), names, num_workers=1) as loader:
        batches = iter(loader)
        for name in names:
            down, up = table[name[0]]
            original = forms.make(name)
            if down == "inherited":
                Loader([original], [0], num_workers=1).close()
            elif down == "refused":
                with pytest.raises(TypeError, match="cannot be sent to worker processes: dataset"):
                    Loader([original], [0], num_workers=1)
            if hasattr(original, "close"):
                original.close()
            if up == "refused":
                with pytest.raises(TransportError, match="cannot be sent to the parent: batch"):
                    next(batches)
                continue
            place, strides, contents, batch = next(batches)
            assert contents == forms.contents(original) == forms.contents(batch), name
            assert (place == "shared") == down.startswith("mapped"), name
            assert (forms.where(batch) == "shared") == up.startswith("shared"), name
            if "kept" in down:
                assert strides == forms.strides(original), name
            if "kept" in up:
                assert forms.strides(batch) == forms.strides(original), name
            if "clone" in up:
                assert batch.stride() == original.clone().stride() != original.stride()


# --- batches, without a worker


def there_and_back(batch: Any) -> Any:
    data = BatchPacker(OutOfBand()).pack(batch)
    return unpack_batch(data, None) if isinstance(data, PackedBatch) else unpack(data)


def sent(obj: Any, send: str) -> Any:
    """What arrives of it in a batch, as an item, or in a job."""
    if send == "batch":
        return there_and_back([obj])[0]
    if send == "item":
        return unpack(pack(obj, down=True))
    job_file = JobFile(obj)
    try:
        return job_file.address.load()
    finally:
        job_file.close()


@pytest.mark.parametrize("n", [4, 100])
def test_strides_are_kept(n):
    """Of small tensors, in the pickle, and of large ones."""
    base = torch.arange(n * n * 3.0).fmod(256).reshape(1, 3, n, n)  # each dtype holds these
    for tensor in (
        base,
        base.to(memory_format=torch.channels_last),
        base.bfloat16().transpose(1, 3),
        base.to(torch.float8_e4m3fn).permute(3, 0, 2, 1),
        base.expand(5, 3, n, n),
        base[0, 0, 0, :1].expand(1 << 40),  # that takes 4 TB if it is written out
        base.flatten().unfold(0, 3, 1),
        base[..., ::2],
        torch.zeros(2, 0),
        base.bool(),
        base.long(),
        base.half(),
        base[0, 1],
        base[0, 0, 0, 0],
    ):
        arrived = there_and_back([tensor])[0]
        assert (arrived.shape, arrived.stride()) == (tensor.shape, tensor.stride())
        assert arrived.dtype == tensor.dtype
        if tensor.numel() < 1 << 40:
            assert torch.equal(arrived.float(), tensor.float())
        assert arrived.untyped_storage().nbytes() <= 2 * base.nbytes


BITS = {torch.complex32: torch.int32, torch.float8_e4m3fn: torch.int8}
"""To compare what torch cannot compare, or what is equal to nothing: some of its versions make NaN
of large numbers."""


@pytest.mark.parametrize("send", ["batch", "item", "job"])
@pytest.mark.parametrize("size", [6, 40_000])
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_attributes_of_a_tensor_are_kept(send, size):
    """Of every dtype, also those of which torch itself cannot load such a tensor again."""
    names = ("float32", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "bfloat16")
    for name in names:
        tensor = torch.arange(float(size)).view(2, -1).to(getattr(torch, name)).t()
        tensor.label = name
        if name == "float32":
            tensor.itself = tensor
            tensor.requires_grad_()
        arrived = sent(tensor, send)
        assert (arrived.dtype, arrived.label) == (tensor.dtype, name)
        assert arrived.requires_grad == tensor.requires_grad
        assert (getattr(arrived, "itself", None) is arrived) == (name == "float32")
        assert arrived.stride() == tensor.stride()
        bits = BITS.get(tensor.dtype, tensor.dtype)
        assert torch.equal(arrived.detach().view(bits), tensor.detach().view(bits))


@pytest.mark.parametrize("send", ["batch", "job"])
def test_what_is_on_a_device_goes_there_again(send, monkeypatch):
    """Sparse tensors stand for those on a device here: ``test_cuda`` has one."""
    monkeypatch.setattr(tensors, "is_elsewhere", lambda obj: obj.layout == torch.sparse_coo)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.to_dense)
    tensor = torch.eye(3).to_sparse().requires_grad_()
    tensor.label = "far away"
    arrived = sent(tensor, send)
    assert (arrived.layout, arrived.label) == (torch.strided, "far away")
    assert arrived.requires_grad
    assert torch.equal(arrived, torch.eye(3))


def test_a_storage_on_a_device_goes_there_again():
    storage = torch.arange(9).untyped_storage()
    move, args = tensors.reduce_elsewhere(storage)
    assert move(*args).tolist() == storage.tolist()


@pytest.mark.parametrize("send", ["batch", "item", "job"])
@pytest.mark.filterwarnings("ignore")  # torch calls some of them a beta
def test_sparse_tensors_are_let_go_of(send):
    """Torch's own way to load them keeps each until ``torch.load`` is called, which looks at it."""
    kept: list[Any] = torch._utils._sparse_tensors_to_validate
    before = len(kept)
    for make in forms.FORMS["sparse tensors"]:
        tensor = make()
        tensor.label = "sparse"
        arrived = sent(tensor, send)
        assert forms.contents(arrived) == forms.contents(tensor)
        assert arrived.label == "sparse"
        assert arrived.is_leaf
    assert len(kept) == before


def test_wide_gaps_are_left_out():
    base = torch.arange(1e6).reshape(1000, 1000)
    column = there_and_back([base.t()[::10, ::10]])[0]
    assert torch.equal(column, base.t()[::10, ::10])
    assert column.stride() == (1, 100)
    assert column.untyped_storage().nbytes() == 40_000


@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("send", ["batch", "job"])
def test_the_axes_of_arrays_keep_their_order(n, send):
    base = np.arange(n**3 * 2, dtype="f4").reshape(n, n, n * 2)
    arrays = [np.asfortranarray(base), base.transpose(2, 0, 1), base.transpose(1, 0, 2)]
    arrays += [base[:, ::-1].transpose(2, 0, 1), base[..., ::2].transpose(1, 2, 0)]
    arrays += [np.broadcast_to(base[0], (2, n, n * 2)), base.astype(">i4").transpose(1, 0, 2)]
    if send == "batch":
        arrived = there_and_back(arrays)
    else:
        job_file = JobFile(arrays)
        arrived = job_file.address.load()
        job_file.close()
    for one, other in zip(arrived, arrays, strict=True):
        assert_array_equal(one, other, strict=True)
        expected = other.copy("C" if 0 in other.strides else "K")
        if send == "job" and n == 40 and 0 in other.strides:  # large: not written out
            expected = other
        if not any(step < 0 for step in other.strides):
            assert one.strides == expected.strides
        assert np.argsort(one.strides).tolist() == np.argsort(np.abs(expected.strides)).tolist()


def test_what_float8_and_its_like_collate_to():
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16):
        samples = [torch.full((40,), n, dtype=torch.uint8).view(dtype) for n in range(2)]
        batch = there_and_back(torch_collate.collate(samples))
        assert batch.dtype == dtype
        assert torch.equal(batch.view(torch.uint8), torch.stack(samples).view(torch.uint8))
    pair = [forms.quantized()[0]] * 2
    assert torch.equal(torch_collate.collate(pair).dequantize(), torch.stack(pair).dequantize())


def test_an_expanded_tensor_is_pinned(monkeypatch):
    """Torch itself fails to write to memory of the same strides."""
    from minloader.torch.device import pin

    def pin_memory(tensor: Any) -> Any:
        return torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    base = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="more than one element"):
        base.expand(2, 3).pin_memory()
    expanded, turned = pin([base.expand(2, 3), torch.ones(2, 3).t()])
    assert torch.equal(expanded, base.expand(2, 3))
    assert turned.stride() == (1, 3)


def test_storages_are_one_as_often_as_they_are_met():
    weight = torch.ones(9_000, requires_grad=True)
    storage = weight.untyped_storage()
    one, other = there_and_back([storage, storage])
    assert one is other
    job_file = JobFile([storage, weight])
    assert job_file.size < 2 * storage.nbytes()
    one, parameter = job_file.address.load()
    job_file.close()
    assert parameter.untyped_storage().data_ptr() == one.data_ptr()


def test_nested_tensors_can_be_compared():
    one, other = forms.nested(torch.strided), forms.nested(torch.strided)
    assert leaves(one) == leaves(other)
    other.unbind()[1][3, 4] = 1
    assert leaves(one) != leaves(other)


# --- torch's kind of loader


class Images:
    """Samples whose strides are those of channels_last, and a whole batch of them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return forms.images().to(memory_format=torch.channels_last)[index]


def as_channels_last(samples: Any) -> Any:
    batch = torch.stack(samples).to(memory_format=torch.channels_last)
    return batch, batch.to(torch.float8_e5m2), forms.nested(torch.jagged), batch.to_sparse()


@pytest.mark.slow
def test_a_collate_fn_of_torchs_kind():
    from minloader.torch import DataLoader

    options: Any = {"batch_size": 2, "collate_fn": as_channels_last}
    (expected,) = torch.utils.data.DataLoader(Images(), **options)
    with DataLoader(Images(), num_workers=1, **options) as loader:
        (batch,) = loader
    for one, other in zip(batch, expected, strict=True):
        assert forms.contents(one) == forms.contents(other)
        assert forms.strides(one) == forms.strides(other)


def test_a_default_device_that_is_not_the_cpu():
    """What has no memory stands for a GPU."""
    data = [torch.arange(10_000).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    with torch.device("meta"), Loader(data, num_workers=1) as loader:
        batches = list(loader)
    for batch, tensor in zip(batches, data, strict=True):
        assert batch.device.type == "cpu"
        assert torch.equal(batch, tensor)


def collate_as_torch(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([each for each in samples if each is not None])


def collate_as_geometric(samples: list[Any]) -> Any:
    """As torch_geometric's loader does, also in workers of others."""
    first = samples[1]
    storage = first.untyped_storage()._new_shared(3 * first.numel() * first.element_size())
    batch = first.new_empty(0).set_(storage, 0, (3, *first.shape))
    torch.stack(samples[1:], out=batch)
    return batch


def collate_both_ways(samples: list[Any]) -> Any:
    batches = [collate_as_torch(samples), collate_as_geometric(samples)]
    return [(batch, batch.is_shared()) for batch in batches]


@variants("method", ["spawn", "fork", "forkserver"], quick=2)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_torchs_own_collate_needs_no_room_in_dev_shm(method):
    """Which may be small, and then ended the worker with a bus error."""
    data = [None, *torch.arange(30_000.0).reshape(3, -1)]
    options: Any = {"collate_fn": collate_both_ways, "multiprocessing_context": method}
    with minloader_torch.DataLoader(data, batch_size=4, num_workers=1, **options) as loader:
        (batches,) = loader
    for batch, was_shared in batches:
        assert torch.equal(batch, torch.stack(data[1:]))
        assert not was_shared
