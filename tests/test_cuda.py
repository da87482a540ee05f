"""CUDA: batches on their way to it, datasets with tensors on it. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import require

from minloader import Loader

torch = require("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

minloader_torch = require("minloader.torch")
torch.zeros(1).pin_memory().to("cuda")  # it opens files, which stay open

SIZE = 100_000


class Filled:
    """Sample n is full of n."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, n: int) -> Any:
        return torch.full((SIZE,), float(n)), n


class OnDevice:
    """Its tensors lie on the device, two of them in one storage."""

    def __init__(self) -> None:
        self.numbers = torch.arange(100, device="cuda")
        self.others = self.numbers[50:]
        self.small = torch.ones(100, device="cuda").to(torch.float8_e4m3fn)
        self.small.label = "small"
        self.weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        self.sparse = torch.eye(3, device="cuda").to_sparse()
        self.bits = self.numbers.untyped_storage()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, n: int) -> Any:
        assert self.small.label == "small"
        assert self.weight.requires_grad
        assert self.sparse.is_sparse
        assert self.bits.tolist() == self.numbers.untyped_storage().tolist()
        return (self.numbers[n] + self.others[n] + self.small[n].long()).cpu()


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver", None])
def test_the_consumers_stream_sees_whole_batches(method, depth):
    """Though it is busy when they are given, and writes to them when it gets to them."""
    loader = minloader_torch.DataLoader(
        Filled(),
        8,
        shuffle=True,
        num_workers=2 if method else 0,
        multiprocessing_context=method,
    )
    seen: list[int] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for numbers, indices in minloader_torch.to_device(loader, "cuda", depth):
            torch.cuda._sleep(3_000_000)
            wrong = (numbers != indices[:, None]).sum()
            numbers.zero_()
            seen += indices.tolist()
            assert wrong.item() == 0
    assert sorted(seen) == list(range(256))
    loader.close()


def test_batches_that_are_kept_stay_as_they_are():
    with Loader(Filled(), range(64), num_workers=2) as loader:
        kept = list(minloader_torch.to_device(loader, "cuda", 3))
    assert all((numbers == n).all() for numbers, n in kept)


def test_arrays_become_tensors_there():
    with Loader(lambda n: np.full(1000, n), range(9), num_workers=2) as loader:
        for n, tensor in enumerate(minloader_torch.to_device(loader, "cuda", convert=True)):
            assert tensor.is_cuda
            assert (tensor == n).all()


def test_a_dataset_with_tensors_on_the_device():
    with minloader_torch.DataLoader(
        OnDevice(), 10, num_workers=2, multiprocessing_context="spawn"
    ) as loader:
        batches = torch.cat(list(loader))
    assert batches.tolist() == [51 + 2 * n for n in range(50)]


def test_batches_on_the_device():
    def make(n: int) -> Any:
        numbers = torch.arange(1_000_000, device="cuda")
        return numbers[n : n + 10], numbers[:10].to(torch.float8_e4m3fn).requires_grad_()

    with Loader(make, range(4), num_workers=1) as loader:
        for n, (some, small) in enumerate(loader):
            assert (some.device.type, small.device.type) == ("cuda", "cuda")
            assert some.tolist() == list(range(n, n + 10))
            assert some.untyped_storage().nbytes() == 80  # the others stayed where they were
            assert small.requires_grad


def test_workers_do_not_use_the_device():
    torch.cuda.manual_seed(1)
    with Loader(lambda _: torch.cuda.is_initialized(), range(4), num_workers=1) as loader:
        assert list(loader) == [False] * 4
