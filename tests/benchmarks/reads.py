"""How near concurrent() comes to as many reads at a time as it is told to make.

    python tests/benchmarks/reads.py [--runs 5]

A read takes 20 ms, and one worker makes 64 at a time: at best 3,200 samples a second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from harness import spread

from minloader import Loader, concurrent

READ = 0.02  # seconds
LIMIT = 64
SECONDS = 3.0  # of each measurement


class Remote:
    """A sample comes from far away."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(READ)
        return index


class RemoteAsync(Remote):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(READ)
        return index


def share(dataset: Any, batch_size: int) -> float:
    """Samples a second, of those that so many reads at a time allow."""
    with Loader(concurrent(dataset, limit=LIMIT), batch_size=batch_size) as loader:
        batches, begin, count = iter(loader), 0.0, 0
        for number, _ in enumerate(batches, 1):
            now = time.perf_counter()
            if number == 8 * max(1, LIMIT // batch_size):  # from where it runs evenly
                begin, count = now, 0
            elif begin and now > begin + SECONDS:
                return count * batch_size / (now - begin) * READ / LIMIT
            count += 1
    raise AssertionError("an epoch is longer than that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = range(parser.parse_args().runs)
    print("| batch_size | threads | async |\n|---|---|---|")
    for batch_size in (1, 8, 64):
        cells = []
        for dataset in (Remote(), RemoteAsync()):
            cells.append(spread([share(dataset, batch_size) for _ in runs], ".2f"))
        print(f"| {batch_size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
