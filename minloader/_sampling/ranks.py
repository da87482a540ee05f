"""Which samplers and streams deal an epoch out to ranks, and which rank this process is.

Samplers and streams of others are looked through too, by the names that their attributes have.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from minloader._sampling.reader import Resettable

MOST_RANKS = 1 << 20
"""More than the processes that any training has; each has its part of what is planned."""


def with_inner(sampler: Any) -> list[Any]:
    """Return a sampler, and the samplers that it reads, as far as it shows them."""
    return _with_parts(sampler, _inner_samplers)


def _inner_samplers(sampler: Any) -> list[Any]:
    # As torch, Accelerate and minloader name it; as lhotse does; and the parts of a mixture.
    inner = [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    several = getattr(sampler, "samplers", None)
    if isinstance(several, list | tuple):
        inner += several
    if isinstance(sampler, Resettable):
        inner += sampler.inner_samplers()
    return inner


def _inner_streams(stream: Any) -> list[Any]:
    # As minloader, and torch, name it; and where HF's split_dataset_by_node notes the rank.
    return [getattr(stream, name, None) for name in ("stream", "dataset", "_distributed")]


def _with_parts(whole: Any, parts_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Return something and its parts, and theirs, each once. None is no part."""
    found = [whole]
    for each in found:
        for part in parts_of(each):
            if part is not None and not any(part is known for known in found):
                found.append(part)
    return found


class Dealer(NamedTuple):
    """Who deals an epoch out to ranks.

    Attributes:
        by: the sampler or stream that does; None: none does.
        ranks: how many there are.
        rank: that of this process.
    """

    by: Any = None
    ranks: int = 1
    rank: int = 0


def _dealer(found: Iterable[Any]) -> Dealer:
    """Return the first of some samplers or streams that deals an epoch out."""
    # As torch, Accelerate, minloader and detectron2 name it.
    words = {
        "num_replicas": "rank",
        "num_processes": "process_index",
        "world_size": "rank",
        "_world_size": "_rank",
    }
    for each in found:
        for of_all, of_one in words.items():
            ranks = _whole_number(getattr(each, of_all, None))
            if ranks is not None and ranks > 1:
                rank = _whole_number(getattr(each, of_one, None)) or 0
                return Dealer(by=each, ranks=ranks, rank=rank)
    return Dealer()


def _whole_number(value: Any) -> int | None:
    """Return a value as an int, numpy's too; None of any other."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def dealer_of(sampler: Any) -> Dealer:
    """Return who deals the epochs of a sampler out to ranks."""
    return _dealer(with_inner(sampler))


def ranks_as_text(sampler: Any) -> str | None:
    """Return what tells samplers apart that deal an epoch out to ranks; None of any other."""
    dealer = dealer_of(sampler)
    if dealer.by is None:
        return None
    seed = _whole_number(getattr(dealer.by, "seed", None))
    return f"{dealer.ranks} ranks" if seed is None else f"{dealer.ranks} ranks, seed {seed}"


def rank_of_stream(stream: Any) -> int:
    """Return the rank that a stream is read for: its own, or else that of the process."""
    found = _with_parts(stream, _inner_streams)
    if any(type(each).__name__ == "IterableDatasetShard" for each in found):
        # Accelerate's, and of HF's Trainer: each rank reads all, and takes its part of it. Ranks
        # that drew other numbers would read other orders, and have other parts of them.
        return 0
    dealer = _dealer(found)
    return dealer_of_process().rank if dealer.by is None else dealer.rank


def dealer_of_process() -> Dealer:
    """Return the rank that torch has for this process, or its launcher, of how many."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Dealer(ranks=distributed.get_world_size(), rank=distributed.get_rank())
    rank = os.environ.get("RANK", "")
    ranks = os.environ.get("WORLD_SIZE", "")
    known = rank.isdecimal() and ranks.isdecimal()
    return Dealer(ranks=int(ranks), rank=int(rank)) if known else Dealer()
