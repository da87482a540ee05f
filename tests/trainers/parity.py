"""Lightning's checkpoints after a resume are those of a run that was not interrupted.

All that its loops save is compared after each step: what they count, and the loader's state. Its
combined loaders can be copied in mid-epoch, as its profilers and its checkpoints do.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from minloader.torch import DataLoader

warnings.simplefilter("ignore")


class Note(lightning.Callback):
    """Notes each batch and what the loops would save, and saves a checkpoint after a step."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at
        self.seen: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        torch.manual_seed(trainer.current_epoch)  # it is in the state, and Lightning keeps it not

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.seen.append((batch.tolist(), copy.deepcopy(trainer.fit_loop.state_dict())))
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


def fit(path: Path, at: int, validates: bool, workers: int, **resume: Path) -> list[Any]:
    """Train for two epochs of three batches, and return what was noted."""
    data = torch.eye(32)[:8]
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, 3, True, generator=generator, num_workers=workers)
    note = Note(path, at)
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 2, "callbacks": [note], "logger": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        **{"enable_checkpointing": False},
    )
    others = [DataLoader(data, 3, num_workers=workers)] if validates else []
    trainer.fit(BoringModel(), loader, *others, **resume)
    return note.seen


if __name__ == "__main__":
    for at, validates, workers in [(1, False, 0), (2, True, 0), (4, True, 1), (5, False, 1)]:
        path = Path(sys.argv[1], f"{at}.ckpt")
        whole = fit(path, at, validates, workers)
        assert len(whole) == 6
        assert fit(path, -1, validates, workers, ckpt_path=path) == whole[at:], (at, validates)
    combined = CombinedLoader([DataLoader(range(20), 4), DataLoader(range(20), 5)], "max_size")
    next(iter(combined))
    for make in (copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
        assert len(list(make(combined))) == 5
