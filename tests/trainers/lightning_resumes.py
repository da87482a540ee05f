"""Lightning's runs from a checkpoint are those of a run that was not interrupted.

All that its loops save is compared after each step: what they count, and the loader's state. A
batch sampler of minloader's is told its epochs by the callback. One whose number of batches is not
known is refused, since Lightning reads a batch ahead of it. Lightning's combined loaders can be
copied in mid-epoch, as its profilers and its checkpoints do. ``lightning_states.py`` resumes from
every checkpoint.
"""

from __future__ import annotations

import copy
import pickle
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
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from minloader import BatchSampler
from minloader.torch import DataLoader
from minloader.torch.lightning import KeepLoaderState

warnings.simplefilter("ignore")

DATA = torch.eye(32)[:8]


class Note(lightning.Callback):
    """Notes each batch and what the loops would save, and saves a checkpoint at each place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[Any] = []
        self.states: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        torch.manual_seed(trainer.current_epoch)  # it is in the state, and Lightning keeps it not

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.batches.append(batch.argmax(1).tolist())
        self.states.append(copy.deepcopy(trainer.fit_loop.state_dict()))
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class Endless:
    """The batches of a sampler, whose number is not told."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit(folder: Path, loaders: list[Any], *callbacks: Any, epochs: int, **resume: Path) -> Note:
    """Train for some epochs of three batches, and return what was noted.

    Args:
        folder: where checkpoints go.
        loaders: that of the samples, and one to validate with, or none.
        callbacks: beside the note.
        epochs: how many.
        resume: the checkpoint to go on from, as ``ckpt_path``.
    """
    note = Note(folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[note, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(BoringModel(), *loaders, **resume)
    return note


def loops_go_on(folder: Path, at: int, validates: bool, workers: int) -> None:
    """After a resume the loops count, and save, what they would have."""

    def run(into: Path, **resume: Path) -> Note:
        generator = torch.Generator().manual_seed(3)
        loaders = [DataLoader(DATA, 3, True, generator=generator, num_workers=workers)]
        loaders += [DataLoader(DATA, 3, num_workers=workers)] * validates
        return fit(into, loaders, epochs=2, **resume)

    whole = run(folder)
    rest = run(folder / "rest", ckpt_path=folder / f"{at}.ckpt")
    assert len(whole.batches) == 6
    assert rest.batches == whole.batches[at:], (at, validates)
    assert rest.states == whole.states[at:], (at, validates)


def batch_samplers_are_told(folder: Path) -> None:
    """Their epochs, by the callback."""

    def run(is_endless: bool = False) -> list[Any]:
        sampler: Any = BatchSampler(8, 3, shuffle=True)
        loader = DataLoader(DATA, batch_sampler=Endless(sampler) if is_endless else sampler)
        return fit(folder, [loader], KeepLoaderState(), epochs=3).batches

    whole = run()
    epochs = [whole[at : at + 3] for at in (0, 3, 6)]
    assert all(sorted(chain(*epoch)) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    with pytest.raises(ValueError, match="give its batch_sampler a __len__"):
        run(is_endless=True)


def combined_loaders_are_copied() -> None:
    combined = CombinedLoader([DataLoader(range(20), 4), DataLoader(range(20), 5)], "max_size")
    next(iter(combined))
    for make in (copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
        assert len(list(make(combined))) == 5


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    combined_loaders_are_copied()
    for at, validates, workers in [(1, False, 0), (2, True, 0), (4, True, 1), (5, False, 1)]:
        loops_go_on(folder / str(at), at, validates, workers)
    batch_samplers_are_told(folder / "sampler")
