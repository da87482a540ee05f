"""Prints the table of docs/trainers.md: which loader does what with which client.

``python tests/trainers/table.py`` runs all of them, which takes some 15 minutes; arguments take
some of the rows by their names. It needs the extra ``trainers``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import sys
import tempfile
from pathlib import Path

import programs

CLIENTS = {
    "Lightning": ("with_lightning", 1),
    "Lightning DDP": ("with_lightning", 2),
    "Accelerate": ("with_accelerate", 1),
    "Accelerate, 2 ranks": ("with_accelerate", 2),
    "HF Trainer": ("with_transformers", 1),
    "HF Trainer, 2 ranks": ("with_transformers", 2),
    "DCP": ("with_dcp", 1),
    "DCP, 2 ranks": ("with_dcp", 2),
    "torchrun": ("with_torchrun", 2),
}
LOADERS = {
    "torch": "torch's",
    "torchdata": "torchdata's",
    "minloader": "minloader's",
    "recipe": "with its helper",
}
WITHOUT_RECIPE = ["with_dcp", "with_torchrun"]
COLUMNS = {
    "runs": ["runs"],
    "torch's batches": ["shards", "extras"],
    "in mid-epoch": ["mid 1"],
    "at the boundary": ["boundary 1"],
    "at the last batch": ["last 1"],
    "with other workers": ["mid 0", "mid 2"],
}


def results(program: str, loader: str, ranks: int) -> dict[str, str]:
    """Run a client, and return its answers."""
    with tempfile.TemporaryDirectory() as folder:
        if program != "with_torchrun":
            return programs.run_client(program, loader, ranks, Path(folder), 600)
        _, theirs = programs.run_torchrun("torch", Path(folder), "--workers=0")
        code, steps = programs.run_torchrun(loader, Path(folder))
        return {
            "runs": "yes" if code == 0 else "error",
            "shards": "yes" if steps == theirs else "no",
        }


def word(answers: list[str]) -> str:
    """Return the worst of some answers; a dash where there are none."""
    return programs.WORDS[max(map(programs.badness, answers))] if answers else "-"


def main() -> None:
    packages = ["torch", "torchdata", "lightning", "accelerate", "transformers"]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    print(f"Measured on {datetime.date.today()}, with\n{', '.join(versions)}.\n")
    print(f"| client | loader | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for client, (program, ranks) in CLIENTS.items():
        if len(sys.argv) > 1 and client not in sys.argv[1:]:
            continue
        for loader, title in LOADERS.items():
            if loader == "recipe" and program in WITHOUT_RECIPE:
                continue
            found = results(program, loader, ranks)
            print(client, loader, found, file=sys.stderr)
            cells = [
                word([found[name] for name in names if name in found]) for names in COLUMNS.values()
            ]
            print(f"| {client} | {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
