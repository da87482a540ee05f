"""How near concurrent() comes to as many reads at a time as it is told to make.

    python tests/benchmarks/reads.py [--runs 5]

A read takes 50 ms, a batch has 64 samples, a worker reads 16 at a time: at best 5 batches a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from itertools import islice
from typing import Any

from minloader import Loader, concurrent

READ = 0.05  # seconds
SAMPLES, AT_ONCE = 64, 16
WARM, COUNTED = 4, 20  # batches


class Remote:
    """A sample comes from far away."""

    def __len__(self) -> int:
        return SAMPLES * (WARM + COUNTED + 20)  # the end must not come in sight

    def __getitem__(self, index: int) -> int:
        time.sleep(READ)
        return index


class RemoteAsync(Remote):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(READ)
        return index


def share(dataset: Any, workers: int) -> float:
    """Batches a second, of those that so many reads at a time allow."""
    wrapped = concurrent(dataset, threads=AT_ONCE)
    with Loader(wrapped, batch_size=SAMPLES, num_workers=workers) as loader:
        batches = iter(loader)
        for _ in islice(batches, WARM * workers):
            pass
        begin = time.perf_counter()
        for _ in islice(batches, COUNTED):
            pass
        seconds = (time.perf_counter() - begin) / COUNTED
    return SAMPLES / AT_ONCE * READ / workers / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = range(parser.parse_args().runs)
    print("| | 1 worker | 2 workers |\n|---|---|---|")
    for name, dataset in (("threads", Remote()), ("async", RemoteAsync())):
        cells = []
        for workers in (1, 2):
            found = [share(dataset, workers) for _ in runs]
            median = statistics.median(found)
            cells.append(f"{median:.2f} ({min(found):.2f} to {max(found):.2f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
