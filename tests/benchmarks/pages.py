"""Writes the figures into the pages, so that all of them say the same.

    python tests/benchmarks/pages.py

``figures.py --pages`` writes its tables into docs/benchmarks.md, each below a line
``<!-- figures: NAME -->``. What README.md and docs/index.md show of them is made from there, and
stands between ``<!-- figures -->`` and ``<!-- end of figures -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"

OURS = "minloader"
NONE = "\N{EN DASH}"
PEERS = {
    "torch, tensors": "torch tensors, fork",
    "torch, numpy": "torch numpy, fork",
    "SeqTools": "SeqTools, fork",
    "mpire": "mpire, fork",
}
"""How the short tables name what has its own line in the long ones."""

ROWS = {
    "JPEG photos decoded, images/s (level)": "jpeg",
    "tiny batches, µs each": "tiny",
    "ready batches of 38.5 MB, GB/s": "ready",
    "256 images stacked, batches/s": "stack",
}


def main() -> None:
    """Write the pages that are made from docs/benchmarks.md."""
    source = BENCHMARKS.read_text()
    README.write_text(with_summary(README.read_text(), readme_summary(source)))
    INDEX.write_text(with_summary(INDEX.read_text(), index_summary(source)))


def with_table(page: str, name: str, table: str) -> str:
    """Return docs/benchmarks.md with another table, or paragraph, of a name.

    Raises:
        ValueError: it has no place for it.
    """
    compact = re.sub(r" +(?=\|)", " ", table).strip()
    compact = re.sub(r"-{4,}", "---", compact)
    found = re.compile(rf"(<!-- figures: {name} -->\n\n).*?(?=\n\n|\n*\Z)", re.DOTALL)
    if not found.search(page):
        raise ValueError(f"docs/benchmarks.md has no line <!-- figures: {name} -->")
    return found.sub(lambda match: match[1] + compact, page)


def with_summary(page: str, summary: str) -> str:
    """Return a page with another summary of the figures."""
    region = re.compile(r"(<!-- figures -->\n\n).*(?=\n\n<!-- end of figures -->)", re.DOTALL)
    return region.sub(lambda match: match[1] + summary, page)


def median(source: str, name: str, label: str, column: str) -> float | None:
    """Return a median of a table of docs/benchmarks.md; None if it has no such line."""
    (text,) = re.findall(rf"<!-- figures: {name} -->\n\n((?:\|.*\n)+)", source)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    place = rows[0].index(column) if column else 1
    found = [row[place] for row in rows if row[0] == label]
    return float(found[0].split()[0]) if found else None


def brief(value: float | None) -> str:
    """Return a figure with two digits at least."""
    if value is None:
        return NONE
    digits = 0 if value >= 20 else 1 if value >= 1 else 2
    return f"{value:,.{digits}f}"


def summary_table(source: str, peers: list[str], head: str) -> list[str]:
    """Return the lines of a short table.

    Args:
        source: the text of docs/benchmarks.md.
        peers: the columns beside ours.
        head: what stands above the names of the lines.
    """
    lines = [f"| {head}| {OURS} | {' | '.join(peers)} |", "|---" * (len(peers) + 2) + "|"]
    for title, name in ROWS.items():
        labels = [OURS, *(PEERS[peer] for peer in peers)]
        cells = [brief(median(source, name, label, "")) for label in labels]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def readme_summary(source: str) -> str:
    """Return what stands in README.md."""
    lines = summary_table(source, list(PEERS), "")
    epochs = [
        median(source, "streams", f"webdataset, shuffled, {loader}", "a later epoch, s")
        for loader in ("minloader.torch", "torch")
    ]
    cells = " | ".join(map(brief, epochs))
    lines.append(
        f"| a stream of webdataset, 0.2 ms a sample, s an epoch | {cells}{3 * f' | {NONE}'} |"
    )
    return "\n".join(lines)


def index_summary(source: str) -> str:
    """Return what stands in docs/index.md."""
    return "\n".join(summary_table(source, list(PEERS)[:2], "2 workers "))


if __name__ == "__main__":
    main()
