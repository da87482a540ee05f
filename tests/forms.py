"""What is told by the table of docs/memory.md: an example of each row, and where it lies."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import SHARED

N = 200


def grid() -> Any:
    return np.arange(N * N, dtype="f4").reshape(N, N)


class Photo(np.ndarray[Any, Any]):
    """A class of arrays, which leaves to numpy how they are pickled."""


def images() -> Any:
    return torch.arange(2 * 3 * 80 * 80.0).reshape(2, 3, 80, 80)


def eye() -> Any:
    return torch.arange(1.0, N * N + 1).view(N, N).tril()  # large in each of its parts


def float8_sparse() -> Any:
    sparse = eye().to_sparse()
    values = sparse.values().to(torch.float8_e4m3fn)
    return torch.sparse_coo_tensor(sparse.indices(), values, sparse.shape, is_coalesced=True)


def uncoalesced() -> Any:
    """A sparse tensor that has each number in two parts."""
    sparse = eye().to_sparse()
    return torch.sparse_coo_tensor(
        sparse.indices().repeat(1, 2), sparse.values().repeat(2), sparse.shape
    )


def nested(layout: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(50, N), torch.zeros(60, N)], layout=layout)


def quantized() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(images(), 0.5, 3, torch.quint8)


def typed_storage() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return images().storage()


FORMS: dict[str, list[Callable[[], Any]]] = {
    "numpy arrays": [
        grid,
        lambda: np.asfortranarray(grid()),
        lambda: grid().view(Photo),
        lambda: grid().reshape(4, 50, N).transpose(2, 0, 1),
    ],
    "numpy arrays with gaps": [lambda: grid()[::-1], lambda: grid()[:, ::2]],
    "numpy arrays that overlap themselves": [
        lambda: np.broadcast_to(grid().ravel(), (3, N * N)),
        lambda: np.lib.stride_tricks.sliding_window_view(grid().ravel(), 5),
    ],
    "numpy arrays of objects": [lambda: np.array([*map(str, range(9_000)), None], dtype=object)],
    "numpy arrays of `StringDType`": [
        lambda: np.array([*map(str, range(9_000))], dtype=np.dtypes.StringDType())
    ],
    "`bytes`": [lambda: b"x" * 20_000],
    "strings": [lambda: "x" * 20_000],
    "tensors": [
        images,
        lambda: images().to(memory_format=torch.channels_last),
        lambda: images().transpose(0, 3),
        lambda: images()[0, 0].expand(9, 80, 80),
        lambda: images().flatten().unfold(0, 300, 100),
        lambda: images()[:, :2, 5:75],
        lambda: images().bfloat16(),
        lambda: images().to(torch.float8_e5m2).to(memory_format=torch.channels_last),
        lambda: images().to(torch.complex64).conj(),
    ],
    "tensors that take": [lambda: torch.arange(90_000.0).view(300, 300).t()[::3, :]],
    "sparse tensors": [
        lambda: eye().to_sparse(),
        float8_sparse,
        lambda: eye().to_sparse_csr(),
        lambda: eye().to_sparse_csc(),
        lambda: eye().to_sparse_bsr((2, 2)),
        lambda: eye().to_sparse_bsc((2, 2)),
        uncoalesced,
        lambda: eye().to_sparse().requires_grad_(),
        lambda: eye().to_sparse_csr().requires_grad_(),
        lambda: eye().requires_grad_().to_sparse_csc(),
        lambda: eye().to(torch.complex64).conj().to_sparse_bsr((2, 2)),
    ],
    "nested tensors": [lambda: nested(torch.strided), lambda: nested(torch.jagged)],
    "quantized tensors": [
        quantized,
        lambda: torch.nn.Parameter(images()),
        lambda: images().to(torch.float8_e5m2).requires_grad_(),
        lambda: images().to(memory_format=torch.channels_last).requires_grad_(),
    ],
    "storages": [
        lambda: images().untyped_storage(),
        lambda: images().to(torch.float8_e5m2).untyped_storage(),
        typed_storage,
    ],
    "opaque tensors": [lambda: images().to_mkldnn()],
    "`multiprocessing`": [
        lambda: get_context("spawn").Value("i"),
        lambda: get_context("spawn").Lock(),
        lambda: get_context("spawn").Pipe()[0],
    ],
    "open files": [
        lambda: open(__file__),  # noqa: SIM115
        lambda: (n for n in range(3)),
        threading.Lock,
    ],
}
"""Examples for each row, in their order, by how the row begins."""


def where(thing: Any) -> str:
    """Where the memory of a large thing lies: "shared", if all of it is in shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if SHARED.search(line)]

    def is_shared(address: int) -> bool:
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)

    return "shared" if all(map(is_shared, addresses(thing))) else "own"


def addresses(thing: Any) -> list[int]:
    if isinstance(thing, np.ndarray):
        return [thing.__array_interface__["data"][0]]
    if not isinstance(thing, torch.Tensor):
        return [thing.data_ptr() if hasattr(thing, "data_ptr") else id(thing)]
    if thing.layout == torch.sparse_coo:
        return [thing._indices().data_ptr(), thing._values().data_ptr()]
    return [(thing.values() if strides(thing) is None else thing).data_ptr()]


def strides(thing: Any) -> Any:
    """The strides of an array or of a tensor; None if it has none."""
    if isinstance(thing, np.ndarray):
        return thing.strides
    is_tensor = isinstance(thing, torch.Tensor)
    return (
        thing.stride()
        if is_tensor and thing.layout == torch.strided and not thing.is_nested
        else None
    )


def contents(thing: Any) -> Any:
    """All else that is to be equal."""
    kind = type(thing).__name__
    if isinstance(thing, np.ndarray):
        return kind, thing.dtype, thing.tolist() if thing.dtype.hasobject else thing.tobytes()
    if kind == "TypedStorage":
        with warnings.catch_warnings(action="ignore"):
            return kind, thing.dtype, contents(thing.untyped())
    if kind == "UntypedStorage":
        return kind, contents(torch.empty(0, dtype=torch.uint8).set_(thing))
    if not isinstance(thing, torch.Tensor):
        return kind, thing
    kind = kind, thing.dtype, thing.layout, thing.requires_grad
    if thing.is_nested:
        return kind, *map(contents, thing.unbind())
    if thing.layout == torch.sparse_coo:
        return kind, thing.is_coalesced(), contents(thing._indices()), contents(thing._values())
    if thing.is_quantized:
        return kind, thing.q_scale(), contents(thing.int_repr())
    thing = thing.detach().to_dense().resolve_conj()
    return kind, thing.shape, thing.contiguous().view(torch.uint8).numpy().tobytes()


def make(name: tuple[str, int]) -> Any:
    row, n = name
    return FORMS[row][n]()


class Forms:
    """Tells how a thing arrived, if it was sent one, and gives another of the kind in the batch."""

    def __init__(self, names: list[tuple[str, int]]) -> None:
        self.things = {name: make(name) for name in names}

    def __getitem__(self, name: tuple[str, int]) -> Any:
        thing = self.things.get(name)
        return where(thing), strides(thing), contents(thing), make(name)
