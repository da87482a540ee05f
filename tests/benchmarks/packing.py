"""How full rows get, and how long it takes to plan them: our samplers, and grain if it is there.

    python tests/benchmarks/packing.py [--capacity 4096] [--seeds 5]

The lengths are those of examples/quickstart.py, the tokens of the standard library: in samples of
up to 16,384 bytes, which are split where they are longer than a row; and in samples that are cut
such that none is. All packers get the same lengths in the same orders.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from minloader import DynamicBatchSampler, PackedBatchSampler

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
BUDGET = 16  # rows that a padded batch may be as large as


class Lazy:
    """Lengths that are not known before they are read."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[int]:
        return iter(self.values.tolist())


def corpus_lengths(longest: int) -> Any:
    """Returns the number of tokens of each sample, if samples have so many bytes at most."""
    tree = ast.parse(QUICKSTART.read_text())
    tree.body = list(takewhile(lambda node: "ArgumentParser" not in ast.dump(node), tree.body))
    names: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(tree, str(QUICKSTART), "exec"), names)
    chunks, _ = names["find_chunks"](Path(sysconfig.get_paths()["stdlib"]), longest)
    corpus = names["Corpus"](chunks)
    return np.array([len(corpus[index]) for index in range(len(corpus))])


def padded(batches: Iterable[list[int]], lengths: Any) -> float:
    """Returns the share of padded batches that is no padding."""
    return lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)


def grain_rows(lengths: Any, capacity: int) -> int:
    """Returns how many rows grain's best packer makes."""
    import grain

    source = grain.MapDataset.range(len(lengths)).map(lambda n: {"x": np.zeros(lengths[n], "i1")})
    packer, options = grain.experimental.BestFitPackIterDataset, {"num_packing_bins": 1000}
    made = packer(source.to_iter_dataset(), length_struct={"x": capacity}, **options)
    return sum(1 for _ in made)


def fills(lengths: Any, capacity: int, seed: int) -> dict[str, float]:
    """Returns how full rows are, on average, by packer."""
    whole = PackedBatchSampler(lengths, capacity, long="split")
    pieces = np.array([stop - start for batch in whole for _, start, stop in batch])
    pieces = np.random.default_rng(seed).permutation(pieces)
    room = pieces.sum() / capacity

    def packed(given: Any, **options: Any) -> float:
        return float(room / len(list(PackedBatchSampler(given, capacity, **options))))

    found = {
        "PackedBatchSampler": packed(pieces),
        "PackedBatchSampler, window=1000": packed(pieces, window=1000),
    }
    if importlib.util.find_spec("grain"):
        found["grain's best fit, 1,000 rows open"] = room / grain_rows(pieces, capacity)
    budget = BUDGET * capacity
    buckets = DynamicBatchSampler(pieces, max_padded=budget, buckets=16, shuffle=True, seed=seed)
    found["DynamicBatchSampler, 16 buckets"] = padded(buckets, pieces)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--seeds", type=int, default=5, help="how many orders to take the mean of")
    args = parser.parse_args()
    for longest in (16_384, args.capacity):
        lengths = corpus_lengths(longest)
        print(f"\n{len(lengths):,} samples of up to {longest:,} bytes, rows of {args.capacity:,}")
        every = [fills(lengths, args.capacity, seed) for seed in range(args.seeds)]
        for name in every[0]:
            print(f"{name:<45}{statistics.mean(each[name] for each in every):>8.2%}")
    million = np.random.default_rng(0).lognormal(6, 1, 1_000_000).clip(1, args.capacity)
    for options in ({}, {"window": 10_000}):
        times = []
        for _ in range(args.seeds):
            began = time.process_time()
            len(PackedBatchSampler(million.astype(int), args.capacity, shuffle=True, **options))
            times.append(time.process_time() - began)
        median = statistics.median(times)
        print(f"a million lengths, {options or 'defaults'}: {median:.2f} s of processor time")


if __name__ == "__main__":
    main()
