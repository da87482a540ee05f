"""Lightning tells a batch sampler of minloader's its epochs by the callback, and resumes from each.

One whose number of batches is not known is refused, since Lightning reads a batch ahead of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from minloader import BatchSampler
from minloader.torch import DataLoader
from minloader.torch.lightning import KeepLoaderState

warnings.simplefilter("ignore")


class Note(lightning.Callback):
    """Notes each batch, and saves a checkpoint after each step and each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.seen.append(batch.argmax(1).tolist())
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end {trainer.global_step}.ckpt")


class Endless:
    """The batches of a sampler, whose number is not told."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit(folder: Path, sampler: Any, **resume: Path) -> list[Any]:
    """Train for three epochs, and return the batches."""
    loader = DataLoader(torch.eye(32)[:8], batch_sampler=sampler)
    note = Note(folder)
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 3, "callbacks": [note, KeepLoaderState()]},
        **{"enable_progress_bar": False, "enable_model_summary": False, "logger": False},
        **{"enable_checkpointing": False},
    )
    trainer.fit(BoringModel(), loader, **resume)
    return note.seen


if __name__ == "__main__":
    first, second = Path(sys.argv[1], "first"), Path(sys.argv[1], "second")
    whole = fit(first, BatchSampler(8, 3, shuffle=True))
    epochs = [whole[at : at + 3] for at in (0, 3, 6)]
    assert all(sorted(chain(*epoch)) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for name in [*range(1, 9), "end 3", "end 6"]:
        rest = fit(second, BatchSampler(8, 3, shuffle=True), ckpt_path=first / f"{name}.ckpt")
        assert rest == whole[int(str(name)[-1]) :], name
    with pytest.raises(ValueError, match="give its batch_sampler a __len__"):
        fit(second, Endless(BatchSampler(8, 3, shuffle=True)))
