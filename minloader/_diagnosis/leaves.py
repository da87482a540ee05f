"""The leaves of a batch: digests of its arrays, numbers and strings, by their place in the batch.

Two batches are the same if ``leaves(a) == leaves(b)``. A copy is the same as its original, also
after it was pickled; the order of a dict's keys, or of a set, makes no difference. A container is
a leaf too: its type and its length. The digest of any other leaf is that of its pickle.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from minloader._errors import breaks_in
from minloader._formats import brief_repr

MOST_LEAVES = 1_000
"""Leaves of a batch that are kept one by one, at some 300 bytes each. Of the others only a sum is
kept."""

KINDS = {"numpy.ndarray": "array", "numpy.memmap": "array", "torch.Tensor": "tensor"}
"""Types that are the same if what they hold is."""


@dataclass(slots=True)
class Leaf:
    """A part of a batch that has no parts of its own, or the kind and length of a container.

    Attributes:
        digest: digest of the type and the value. Leaves with the same digest are equal.
        text: the same in short, for people.
    """

    digest: bytes
    text: str = field(compare=False)


Leaves = dict[str, Leaf]
"""The leaves of a batch by path, such as ``batch["audio"][0]``."""


def leaves(batch: Any) -> Leaves:
    """Return the leaves of a batch, with those past MOST_LEAVES as one."""
    walk = _walk(batch, "batch", frozenset())
    kept = dict(itertools.islice(walk, MOST_LEAVES))
    rest = sorted((path, leaf.digest) for path, leaf in walk)
    if rest:
        path = f"what comes after the first {MOST_LEAVES:,} parts of it"
        kept[path] = Leaf(_digest(rest), f"{len(rest):,} parts")
    return kept


def first_leaves(batch: Any) -> Leaves:
    """Return the first hundred leaves of a batch, which is quick also if it has very many."""
    return dict(itertools.islice(_walk(batch, "batch", frozenset()), 100))


def _walk(value: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a value; ``above`` are the ids of the containers that it is in."""
    if id(value) in above:
        yield path, Leaf(b"above", "a container that it is in")
        return
    parts = _parts(value)
    if parts is None:
        yield path, Leaf(_digest(value), _text(value))
        return
    text = f"{_kind(value)} of {len(parts)}"
    yield path, Leaf(_digest(text), text)
    for step, part in parts:
        yield from _walk(part, path + step, above | {id(value)})


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with the step of the path that leads to it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if type(value) in (list, tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(value, ma.MaskedArray):
        return [(".data", value.data), (".mask", ma.getmaskarray(value))]
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if hasattr(value, each.name)]
    return names and [(f".{name}", getattr(value, name)) for name in names]


def _kind(value: Any) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return KINDS.get(name, name)


def _is_strided(value: Any) -> bool:
    plain = str(getattr(value, "layout", "torch.strided")) == "torch.strided"
    return plain and not any(getattr(value, name, False) for name in ("is_quantized", "is_nested"))


def _text(value: Any) -> str:
    if _kind(value) not in KINDS.values() or not _is_strided(value):
        return brief_repr(value)
    flat = value.reshape(-1)
    text = ", ".join(map(str, flat[:16].tolist())) + ", ..." * (len(flat) > 16)
    return f"{_kind(value)} of {value.dtype}, shape {tuple(value.shape)}: {text}"


class _Hashed(pickle.Pickler):
    """Writes a pickle that depends on the value alone into a digest.

    Not on which of several equal strings are one object, nor on the order of a set, nor on the
    memory that an array, or a tensor, is a view of.
    """

    def __init__(self, fast: bool) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        super().__init__(self, protocol=4)
        self.fast = fast  # each object as if it were the only one

    def write(self, data: bytes) -> None:
        self.digest.update(data)

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in place of a value; None for the value itself."""
        torch = sys.modules.get("torch")
        np = sys.modules.get("numpy")
        if isinstance(value, set | frozenset):
            return type(value), sorted(map(_digest, value))
        if torch is not None and isinstance(value, torch.Tensor) and _is_strided(value):
            flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
            data = flat.view(torch.uint8).numpy().tobytes()  # since numpy has no bfloat16
        elif np is not None and type(value) in (np.ndarray, np.memmap):
            if value.dtype.hasobject:
                return None
            # A structured array may have bytes between its fields that mean nothing.
            data = value.tolist() if value.dtype.names else value.tobytes()
        else:
            return None
        return _kind(value), str(value.dtype), tuple(value.shape), data


def _digest(value: Any, fast: bool = True) -> bytes:
    """Return the digest of the type and the value of anything; of the type, if that is all."""
    hashed = _Hashed(fast)
    try:
        hashed.dump(value)
    except Exception as error:  # it leads back to itself, which needs the memo; or has no pickle
        if breaks_in(error):
            raise
        return _digest(value, False) if fast else _kind(value).encode()
    return hashed.digest.digest()
