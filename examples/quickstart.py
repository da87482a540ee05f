"""Tokenizes Python's own standard library in workers, in batches of a fixed token budget.

The corpus is on every machine: source files of up to 800 kB. Batches of a fixed number of
samples would be half padding, and some of them huge. A budget of tokens gives a few long samples
or many short ones instead. Both ways run here, and a table compares them.

Run (needs ``pip install tqdm``)::

    python examples/quickstart.py --workers 2 --budget 65536
"""

import argparse
import os
import re
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minloader import DynamicBatchSampler, Loader, pad_collate

# Words, split at underscores and capitals; single digits; signs; line breaks with indentation.
TOKEN = re.compile(rb"[A-Z]?[a-z]+|[A-Z]+|[0-9]|\n[ \t]*|[^\sA-Za-z0-9]")
VOCABULARY = 32_768
LONGEST = 16_384  # bytes of a sample; a longer file becomes several


class Chunk(NamedTuple):
    """Where a sample is: the parent asks for sizes only, a worker reads the bytes."""

    path: Path
    start: int
    size: int


class Corpus:
    """Sample ``i`` is the token ids of chunk ``i``."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> NDArray[np.uint16]:
        path, start, size = self.chunks[index]
        with path.open("rb") as file:
            file.seek(start)
            tokens = TOKEN.findall(file.read(size))
        # crc32 rather than hash(), which differs from process to process for bytes.
        hashes = np.fromiter(map(crc32, tokens), np.uint32, len(tokens))
        return (1 + hashes % (VOCABULARY - 1)).astype(np.uint16)  # 0 is for padding


def find_chunks(root: Path, longest: int) -> tuple[list[Chunk], int]:
    """Cuts the source files below a folder into chunks, and counts those it cannot read."""
    chunks, unreadable = [], 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            try:
                with path.open("rb") as file:  # opening is the only sure test of permissions
                    size = os.fstat(file.fileno()).st_size
            except OSError:
                unreadable += 1
                continue
            chunks += [Chunk(path, at, min(longest, size - at)) for at in range(0, size, longest)]
    return chunks, unreadable


def run(name: str, loader: Loader) -> tuple[int, str]:
    """Goes through one epoch. Returns the number of batches and a row of the table."""
    began = time.perf_counter()
    batches = samples = tokens = cells = largest = 0
    for ids, lengths in tqdm(loader, desc=name, unit="batch"):
        # A model would be fed here: ids has one row for each sample, padded to the longest.
        batches += 1
        samples += len(ids)
        tokens += int(lengths.sum())
        cells += ids.size
        largest = max(largest, ids.size)
    speed = tokens / (time.perf_counter() - began)
    row = f"{name:<10}{batches:>9,}{samples:>9,}{tokens:>13,}{speed:>12,.0f}"
    return batches, f"{row}{1 - tokens / cells:>9.1%}{largest:>15,}"


# There is no `if __name__ == "__main__":` here, and none is needed: a worker of minloader does
# not import this script again. It is sent the dataset, whose class stands above, by value.

parser = argparse.ArgumentParser(description="Token-budget batches of the standard library.")
parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
parser.add_argument("--budget", type=int, default=65_536, help="tokens in a batch, with padding")
args = parser.parse_args()

stdlib = Path(sysconfig.get_paths()["stdlib"])
# A chunk has no more tokens than bytes, so that none can exceed the budget.
chunks, unreadable = find_chunks(stdlib, longest=min(LONGEST, args.budget))
corpus = Corpus(chunks)
files = len({chunk.path for chunk in chunks})
print(f"{files:,} files of {stdlib} in {len(corpus):,} samples, {unreadable} files unreadable")

# The budget is kept to the token because the lengths are exact: a first pass, which would be
# saved with a corpus that is used more than once, counts in the workers and sends numbers only.
with Loader(corpus, batch_size=64, transform=len, num_workers=args.workers) as loader:
    lengths = np.concatenate(list(tqdm(loader, desc="counting", unit="batch")))

sampler = DynamicBatchSampler(lengths, max_padded=args.budget, buckets=16, shuffle=True)
with Loader(corpus, sampler, collate_fn=pad_collate(), num_workers=args.workers) as loader:
    batches, dynamic_row = run("dynamic", loader)

batch_size = max(1, round(len(corpus) / batches))  # as many samples in a batch on average
with Loader(
    corpus,
    batch_size=batch_size,
    shuffle=True,
    collate_fn=pad_collate(),
    num_workers=args.workers,
) as loader:
    batches, fixed_row = run("fixed size", loader)

print("\nbatching    batches  samples       tokens    tokens/s  padding  largest batch")
print(dynamic_row, fixed_row, sep="\n")
