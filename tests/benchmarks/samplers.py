"""How much is padding, and how unlike the batches of a step are over 8 ranks, for each sampler.

    python tests/benchmarks/samplers.py [--folder docs]

It prints the table of docs/samplers.md and draws its pictures. All samplers get the same lengths,
a budget of so many rows, and as many batches as it takes.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from packing import Lazy, corpus_lengths

from minloader import BatchSampler, DynamicBatchSampler, MixtureSampler, PackedBatchSampler

RANKS = 8
# Durations of train-clean-360, sped up and slowed down too, as k2-fsa/icefall lists them in
# egs/librispeech/ASR/local/display_manifest_statistics.py: quantile and seconds.
LIBRISPEECH = [
    *((0, 1.0), (0.001, 1.8), (0.005, 2.2), (0.01, 2.5), (0.05, 4.2), (0.1, 6.2), (0.25, 11.2)),
    *((0.5, 13.7), (0.75, 15.3), (0.9, 16.6), (0.95, 17.3), (0.99, 18.1), (0.995, 18.4)),
    *((0.999, 18.8), (1, 33.0)),
]
COLORS = ["#3b6ea5", "#d98c3f"]


def speech_lengths(n: int = 20_000) -> Any:
    """Returns durations in hundredths of a second, between these quantiles along straight lines."""
    quantiles, seconds = zip(*LIBRISPEECH, strict=True)
    durations = np.interp((np.arange(n) + 0.5) / n, quantiles, seconds)
    return np.random.default_rng(0).permutation((100 * durations).round().astype(int))


def samplers(lengths: Any, capacity: int, rows: int) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Returns by name how batches are collated, and what makes a sampler of a rank."""
    budget = rows * capacity
    dynamic = partial(DynamicBatchSampler, lengths, shuffle=True)
    buckets = dynamic(max_padded=budget, buckets=16, world_size=RANKS)
    size = round(len(lengths) / len(buckets) / RANKS)
    packed = partial(PackedBatchSampler, lengths, capacity, rows, shuffle=True)
    lazy = partial(PackedBatchSampler, Lazy(lengths), capacity, rows)
    first = len(lengths) // 2

    def mixed(kind: Callable[..., Any], **ranks: int) -> Any:
        parts = [first, len(lengths) - first]
        mixture = MixtureSampler(parts, parts, shuffle=True)
        return kind(sampler=[part * first + index for part, index in mixture], **ranks)

    return {
        "BatchSampler": ("pad", partial(BatchSampler, len(lengths), size, shuffle=True)),
        "Dynamic, max_padded": ("pad", partial(dynamic, max_padded=budget)),
        "Dynamic, max_padded, 16 buckets": ("pad", partial(dynamic, max_padded=budget, buckets=16)),
        "Dynamic, max_padded, 16 buckets, of a mixture": (
            "pad",
            partial(mixed, partial(dynamic, max_padded=budget, buckets=16)),
        ),
        "Dynamic, max_total": ("one", partial(dynamic, max_total=budget)),
        "Dynamic, max_total, 16 buckets": ("one", partial(dynamic, max_total=budget, buckets=16)),
        "Packed": ("rows", packed),
        "Packed, window=1000": ("rows", partial(packed, window=1000)),
        "Packed, lazy lengths": ("rows", lazy),
        "Packed, of a mixture": ("rows", partial(mixed, packed)),
    }


def rows_in(batch: Any, capacity: int) -> int:
    """Returns in how many rows pack_collate lays out samples of these lengths."""
    rows, room = 0, 0
    for length in batch.tolist():
        if length > room:
            rows, room = rows + 1, capacity
        room -= length
    return rows


def measure(how: str, make: Callable[..., Any], lengths: Any, capacity: int) -> list[float]:
    """Returns in percent the padding, and the spread of sizes and of attention over ranks."""
    ranks = [list(make(rank=rank, world_size=RANKS)) for rank in range(RANKS)]
    sizes, attention, total = [], [], 0
    for step in zip(*ranks, strict=True):
        each = [lengths[batch] for batch in step]
        total += sum(int(batch.sum()) for batch in each)
        if how == "pad":
            sizes.append([len(batch) * batch.max() for batch in each])
            attention.append([len(batch) * batch.max() ** 2 for batch in each])
        else:
            in_rows = [capacity * rows_in(batch, capacity) for batch in each]
            sizes.append([batch.sum() for batch in each] if how == "one" else in_rows)
            attention.append([(batch**2).sum() for batch in each])
    spreads = [(1 - np.min(costs, 1) / np.max(costs, 1)).mean() for costs in (sizes, attention)]
    return [100 * float(value) for value in (1 - total / np.sum(sizes), *spreads)]


def draw(title: str, bars: dict[str, list[float]], names: list[str]) -> str:
    """Returns bars as an SVG image: for each name in ``bars`` one for each of ``names``."""
    most, height = max(max(values) for values in bars.values()), 36 * len(bars) + 52
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">{title}</text>',
    ]
    for at, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        lines.append(f'<rect x="{310 + 240 * at}" y="30" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{328 + 240 * at}" y="41">{name}</text>')
    for line, (label, values) in enumerate(bars.items()):
        top = 52 + 36 * line
        lines.append(f'<text x="300" y="{top + 18}" text-anchor="end">{label}</text>')
        for at, (value, color) in enumerate(zip(values, COLORS, strict=True)):
            y, width = top + 14 * at, 380 * value / most
            lines.append(
                f'<rect x="310" y="{y}" width="{width:.1f}" height="12" fill="{color}"/>'
                f'<text x="{315 + width:.1f}" y="{y + 11}" font-size="11">{value:.1f} %</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    docs = Path(__file__).parents[2] / "docs"
    parser.add_argument("--folder", type=Path, default=docs, help="where to put the pictures")
    folder = parser.parse_args().folder
    corpora = {
        "source code, rows of 4,096 tokens": (corpus_lengths(4096), 4096, 16),
        "speech, rows of 40 s": (speech_lengths(), 4000, 8),
    }
    found: dict[str, list[list[float]]] = {}
    for lengths, capacity, rows in corpora.values():
        print(
            f"{len(lengths):,} samples, {lengths.sum():,} in all, {lengths.mean():,.1f} on average"
        )
        for name, (how, make) in samplers(lengths, capacity, rows).items():
            found.setdefault(name, []).append(measure(how, make, lengths, capacity))
    for name, values in found.items():
        print(f"| {name} |" + "".join(f" {v:.1f} % |" for v in np.transpose(values).flat))
    for at, (file, title) in enumerate(
        [("padding.svg", "Padding"), ("spread.svg", "Spread of sizes over 8 ranks")]
    ):
        bars = {name: [value[at] for value in values] for name, values in found.items()}
        (folder / file).write_text(draw(title, bars, list(corpora)))
    print(f"CPython {platform.python_version()}, numpy {np.__version__}")


if __name__ == "__main__":
    main()
