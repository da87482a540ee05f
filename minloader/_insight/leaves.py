"""The leaves of a batch: digests of its arrays, numbers and strings, by their place in the batch.

Two batches are the same if ``leaves(a) == leaves(b)``. A copy is the same as its original, also
after it was pickled; the order of a dict's keys, or of a set, makes no difference. A container is
a leaf too: its type and its length.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from minloader._checks import shown

logger = logging.getLogger("minloader")

MOST_LEAVES = 1_000
"""Leaves of a batch that are kept one by one, at some 300 bytes each. Of the others only a sum is
kept."""


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
    count, total = 0, 0
    for path, leaf in walk:
        count += 1
        total += int.from_bytes(_hash(path, leaf.digest), "little")  # the same in any order
    if count:
        path = f"what comes after the first {MOST_LEAVES:,} parts of it"
        kept[path] = Leaf(_hash(total), f"{count:,} parts")
    return kept


def first_leaves(batch: Any) -> Leaves:
    """Return the first hundred leaves of a batch, which is quick also if it has very many."""
    return dict(itertools.islice(_walk(batch, "batch", frozenset()), 100))


def _walk(value: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a value; ``above`` are the ids of the containers that it is in."""
    if id(value) in above:
        yield path, Leaf(b"above", "a container that it is in")
        return
    leaf = _plain_leaf(value) or _array_leaf(value)
    if leaf is not None:
        yield path, leaf
        return
    above |= {id(value)}
    kind = _name(type(value))
    if isinstance(value, set | frozenset):
        members = ([(p, leaf.digest) for p, leaf in _walk(each, "", above)] for each in value)
        digests = sorted(_hash(*sorted(member)) for member in members)
        yield path, Leaf(_hash(kind, *digests), shown(value))
        return
    parts = _parts(value)
    yield path, Leaf(_hash(kind, len(parts)), f"{kind} of {len(parts)}")
    for step, part in parts:
        yield from _walk(part, path + step, above)


def _hash(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def _plain_leaf(value: Any) -> Leaf | None:
    """Return the leaf of a value that its type and its repr describe completely."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, bytearray):
        return Leaf(_hash(_name(type(value)), value), shown(value))
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return Leaf(_hash(_name(value)), _name(value))
    return None


def _array_leaf(value: Any) -> Leaf | None:
    """Return the leaf of an array or tensor, by its data: a view and a copy are the same."""
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return None
        value = value.detach().cpu().resolve_conj().resolve_neg()
        # As bytes, since numpy has no bfloat16.
        data = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _number_leaf("tensor", value, data)
    if np is None or not isinstance(value, np.generic | np.ndarray) or value.dtype.hasobject:
        return None
    if isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
        # A structured array may have bytes between its fields that mean nothing.
        data = repr(value.tolist()).encode() if value.dtype.names else value.tobytes()
        return _number_leaf("number" if isinstance(value, np.generic) else "array", value, data)
    return None


def _number_leaf(kind: str, value: Any, data: bytes) -> Leaf:
    what, flat = f"{kind} of {value.dtype}, shape {tuple(value.shape)}", value.reshape(-1)
    text = ", ".join(map(str, flat[:16].tolist())) + ", ..." * (len(flat) > 16)
    return Leaf(_hash(what, data), f"{what}: {text}")


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container, each with the step of the path that leads to it."""
    if type(value) is dict:
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if type(value) in (list, tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(value, ma.MaskedArray):
        return [(".data", value.data), (".mask", ma.getmaskarray(value))]
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if is_dataclass(value):
        names = [each.name for each in fields(value) if hasattr(value, each.name)]
    if names is not None:
        return [(f".{name}", getattr(value, name)) for name in names]
    return _pickled_parts(value)


def _pickled_parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts that pickle would write of an object.

    The bytes of the pickle itself would not do: they depend on which of several equal strings are
    one object.
    """
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:  # such an object was made in this process
        logger.debug("%s cannot be looked into: %r", shown(value), error)
        return []
    if isinstance(reduced, str):
        return [(" by name", reduced)]
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    parts = [(f"({index})", part) for index, part in enumerate(arguments)]
    if isinstance(state, dict):
        parts += [(f".{name}", part) for name, part in state.items()]
    else:
        parts.append((" state", state))
    parts += [(f"[{index}]", part) for index, part in enumerate(items or ())]
    return parts + [(f"[{key!r}]", part) for key, part in pairs or ()]
