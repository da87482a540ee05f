"""What an item of a sampler is recognized by."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from conftest import require

from minloader._sampling.digest import MOST, SMALL, digest
from minloader._sampling.seeding import Piece


def of_torch(make: str) -> Any:
    torch = require("torch")
    return eval(make, {"torch": torch})


def large(number: int = 0) -> Any:
    array = np.zeros(SMALL, "i4").reshape(2, -1)
    array[1, 77] = number
    return array


PLAIN: dict[str, Any] = {
    "numbers": ([3, 5, 7], "9e95e2f7c955c142"),
    "text": ({"path": "a.wav", "n": (1, None, True, 0.5)}, "3b11d1ad68301bb3"),
    "a piece": ([Piece(("a", 3), 0, 5)], "262a4aaecdafd9a3"),
    "nothing": ([], "71857576257465c7"),
}
"""Items, and what states have of them."""

SAME: dict[str, Any] = {
    "numpy's ints": ([3, 5, 7], [np.int64(3), np.uint8(5), np.array(7)]),
    "an array": ([3, 5, 7], np.array([3, 5, 7], "i2")),
    "a tensor": ([3, 5, 7], of_torch("torch.tensor([3, 5, 7])")),
    "a tuple": ([3, (5, 7)], (3, [5, 7])),
    "arrays in a dict": ({"x": [[1.5, 2.0]]}, {"x": np.array([[1.5, 2.0]])}),
    "another order in memory": (large(1), np.asfortranarray(large(1))),
    "a large tensor": (large(1), of_torch("torch.from_numpy")(large(1))),
    "large and a view": (large(1), large(1)[::-1][::-1]),
}
"""Items that are the same to a state."""

OTHERS: dict[str, Any] = {
    "another number": ([3, 5], [3, 6]),
    "another order": ([3, 5], [5, 3]),
    "large": (large(1), large(2)),
    "large, of another shape": (large(), large().reshape(-1, 2)),
    "large, of another type": (large(), large().astype("u4")),
    "large, in a list": ([0, large(1)], [0, large(2)]),
    "large, of objects": (
        np.array([["a" * 9]] * SMALL, object),
        np.array([["b" * 9]] * SMALL, object),
    ),
}

UNKNOWN: dict[str, Any] = {
    "an object": object(),
    "within": [1, {"x": object()}],
    "bytes": b"abc",
    "a key": {(1, 2): 3},
    "a cycle": [[]],
    "an array that has too much": np.zeros(MOST + 1, "u1"),
    "arrays that have too much": [np.zeros(MOST // 2 + 1, "u1")] * 2,
    "a meta tensor": of_torch("torch.ones(3, device='meta')"),
}
UNKNOWN["a cycle"][0].append(UNKNOWN["a cycle"])


@pytest.mark.parametrize("kind", PLAIN)
def test_what_states_have_stays_the_same(kind):
    item, expected = PLAIN[kind]
    assert digest(item) == expected


@pytest.mark.parametrize("kind", SAME)
def test_what_is_the_same_has_the_same_digest(kind):
    one, other = SAME[kind]
    assert digest(one) == digest(other) is not None


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_has_not(kind):
    one, other = OTHERS[kind]
    assert digest(one) == digest(one) is not None
    assert None is not digest(one) != digest(other) is not None


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_plain_has_none(kind):
    with warnings.catch_warnings(action="ignore"):
        assert digest(UNKNOWN[kind]) is None
