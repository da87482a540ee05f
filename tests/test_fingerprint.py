"""What the samples of a stream are recognized by."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import require

from minloader import Loader
from minloader._worker.fingerprint import fingerprint


class Color(enum.IntEnum):
    RED = 3


class Named(str):
    """A string, as numpy's are."""


class Odd:
    """Its attribute raises, or what it calls does."""

    def __init__(self, name: str, *, calls: bool) -> None:
        self.name = name
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name not in ("flat", "flatten") or name != self.name:
            raise AttributeError(name)
        if self.calls:
            return self.fail
        raise RuntimeError(f"no {name}")

    def fail(self) -> Any:
        raise RuntimeError("not to be flattened")


class OddMapping(dict[str, int]):
    def values(self) -> Any:
        raise OSError("the file is closed")


def nested_tensor() -> Any:
    torch = require("torch")
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])


def of_torch(make: str) -> Any:
    torch = require("torch")
    return eval(make, {"torch": torch})


KNOWN: dict[str, Any] = {
    "an int": (lambda: [5], 30809522),
    "numpy's int": (lambda: [np.array(5)], 897995144),
    "long strings": (lambda: ["a", "b" * 100], 2367474547),
    "bytes": (lambda: [b"x" * 70], 2389748919),
    "floats": (lambda: [1.5, 2.5], 2838556161),
    "an enum": (lambda: [Color.RED], 3637268372),
    "another kind of string": (lambda: [Named("u")], 4047348130),
    "arrays": (lambda: [np.arange(20).reshape(4, 5), np.ones(3, "f4")], 3337858248),
    "behind an array of strings": (lambda: [{"text": np.array(["a"]), "label": 3}], 3637268372),
    "behind an object": (lambda: [{"image": object(), "label": (None, [7])}], 1226845264),
    "tuples": (lambda: [("a", 1), ("b", 2)], 279260038),
    "in the last one alone": (lambda: [object(), 3], 2576737771),
    "far within": (lambda: [[], [[[[1]]]]], 2879620969),
    "a tensor": (lambda: [of_torch("torch.arange(12.).reshape(3, 4).t()")], 2053054045),
    "bfloat16": (lambda: [of_torch("torch.ones(2).bfloat16()")], 2739108637),
}

UNKNOWN: dict[str, Any] = {
    "an object": object,
    "nothing": list,
    "flat raises": lambda: Odd("flat", calls=False),
    "flat is a method": lambda: Odd("flat", calls=True),
    "flatten raises": lambda: Odd("flatten", calls=False),
    "flatten raises when it is called": lambda: Odd("flatten", calls=True),
    "a mapping that is closed": lambda: OddMapping(a=1),
    "sparse": lambda: of_torch("torch.eye(3).to_sparse()"),
    "sparse rows": lambda: of_torch("torch.eye(3).to_sparse_csr()"),
    "nested": nested_tensor,
    "meta": lambda: of_torch("torch.ones(3, device='meta')"),
    "masked": lambda: np.ma.masked_array([1, 2], [True, False]),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_what_samples_are_recognized_by_stays_the_same(kind):
    """States have it."""
    make, expected = KNOWN[kind]
    assert fingerprint(make()) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_fingerprinted_is_not(kind):
    make = UNKNOWN[kind]
    with warnings.catch_warnings(record=True, action="always") as warned:
        assert fingerprint([make()]) is None
    assert not [each for each in warned if "masked" in str(each.message)]
    assert fingerprint([{"odd": make(), "label": 3}]) == fingerprint([3])


class Samples:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        return (UNKNOWN[self.kind]() for _ in range(3))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_stream_of_what_cannot_be_fingerprinted_is_read_and_resumed(kind):
    with Loader(Samples(kind), num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert len(list(loader)) == 3
    with Loader(Samples(kind), num_workers=0) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 2
