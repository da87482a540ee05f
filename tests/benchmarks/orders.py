"""What a shuffled order costs: computed, as BatchSampler has it, or stored by numpy.

    python tests/benchmarks/orders.py [--runs 5]

Batches of 32. Memory is what Python allocates at most until the first batch is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from minloader import BatchSampler

BATCH_SIZE = 32
MOST = 100_000  # batches read for the time of an index


def timed(call: Callable[[int], Any], n: int) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call(n)
    return (time.perf_counter() - begin) * 1e3


def peak(call: Callable[[int], Any], n: int) -> float:
    """Megabytes."""
    tracemalloc.start()
    call(n)
    memory = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return memory


def computed(n: int) -> BatchSampler:
    return BatchSampler(n, BATCH_SIZE, shuffle=True)


def first(n: int) -> Any:
    return next(iter(computed(n)))


def first_stored(n: int) -> Any:
    return np.random.default_rng(0).permutation(n)[:BATCH_SIZE].tolist()


def resume(n: int) -> Any:
    sampler = computed(n)
    steps = len(sampler) // 2
    place = {"batches": steps, "begun": steps, "source": [steps * BATCH_SIZE, None, False]}
    sampler.load_state_dict(sampler.state_dict() | {"between": False} | place)
    return next(iter(sampler))


def read(n: int) -> None:
    for _ in islice(computed(n), MOST):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = range(parser.parse_args().runs)
    print("| indices | first batch, ms | resumed in the middle, ms | MB | an index, ns", end="")
    print(" | numpy: first batch, ms | MB |\n|---|---|---|---|---|---|---|")
    for power in (4, 6, 8, 10):
        n = 10**power

        def median(call: Callable[[int], Any], n: int = n) -> float:
            return statistics.median(timed(call, n) for _ in runs)

        index = median(read) * 1e6 / min(n, MOST * BATCH_SIZE)
        cells = [f"{median(first):.2f}", f"{median(resume):.2f}", f"{peak(first, n):.2f}"]
        stored = ["", "80,000"]  # by arithmetic
        if power < 10:
            stored = [f"{median(first_stored):.3g}", f"{peak(first_stored, n):.3g}"]
        print(f"| 10^{power} | {' | '.join([*cells, f'{index:.0f}', *stored])} |", flush=True)


if __name__ == "__main__":
    main()
