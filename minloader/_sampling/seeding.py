"""All randomness derives from a seed: each use of it gets numbers of its own.

A use is a word, its *domain*, and what tells one case of it from another: the epoch, the place of a
batch, the index of a sample. Two uses never share numbers, however alike their cases are: numpy's
``SeedSequence([s, e])``, for one, is ``SeedSequence([s, e, 0])``.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from minloader._formats import brief_repr

if TYPE_CHECKING:
    import numpy as np

Domain = Literal[
    "order", "part", "batch", "sample", "worker", "shuffled", "epoch", "hash", "generator"
]


class Piece(NamedTuple):
    """A part of a sample, as an item of a :class:`minloader.PackedBatchSampler` that splits.

    Attributes:
        sample: index of the sample; of an inner sampler, its item.
        start: first of the entries.
        stop: the one behind the last.
    """

    sample: Any
    start: int
    stop: int


def derive(domain: Domain, *case: Any) -> int:
    """Return 128 bits that depend on nothing but the arguments: a keyed hash, in about 1 µs."""
    text = repr(case).encode()
    digest = hashlib.blake2b(text, digest_size=16, person=domain.encode())
    return int.from_bytes(digest.digest(), "little")


def generator(domain: Domain, *case: Any) -> np.random.Generator:
    """Return a generator of numpy for one use of a seed."""
    import numpy as np

    return np.random.default_rng(derive(domain, *case))


def sample_key(index: Any) -> Any:
    """Return the index of a sample in one form, whoever gives it: 3, or numpy's 3.

    Raises:
        TypeError: it has a part that is no number, string or bytes, nor a tuple or list of them.
    """
    if isinstance(index, Piece):
        return sample_key(index.sample)
    if hasattr(index, "item") and not getattr(index, "shape", True):
        index = index.item()
    if index is None or isinstance(index, str | bytes | int | float):
        return index
    if isinstance(index, tuple | list):
        return tuple(map(sample_key, index))
    raise TypeError(
        "sample_rng needs an index of numbers, strings or tuples of these, got "
        f"{brief_repr(index)}; draw from rng, which belongs to the batch"
    )
