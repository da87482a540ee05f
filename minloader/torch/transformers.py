"""HF's Trainer on minloader's workers, resumed by the loader's state. Runs in each rank."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, trainer

from minloader.torch.accelerate import use_in_accelerate
from minloader.torch.data_loader import DataLoader


class LoaderMixin:
    """Has ``transformers.Trainer`` train from minloader's loader, and resume exactly.

    It comes before the Trainer. ::

        class Trainer(LoaderMixin, transformers.Trainer): ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loader_checkpoints = LoaderCheckpoints()
        self.add_callback(self._loader_checkpoints)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, also from a checkpoint in another folder."""
        is_path = isinstance(resume_from_checkpoint, str | os.PathLike)
        self._loader_checkpoints.resumed = Path(resume_from_checkpoint) if is_path else None
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return the loader that the Trainer would make, but of minloader's class."""

        def make(dataset: Any, worker_init_fn: Any = None, **options: Any) -> DataLoader[Any]:
            return DataLoader(dataset, **options)  # batches are seeded, not workers

        with use_in_accelerate(), ExitStack() as undo:
            undo.callback(setattr, trainer, "DataLoader", trainer.DataLoader)
            trainer.DataLoader = make
            return super().get_train_dataloader()  # type: ignore[misc]


class LoaderCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Puts the loader's state into each checkpoint, and resumes from there.

    Attributes:
        resumed: the checkpoint to resume from. None: that of the step, in the folder which the
            Trainer writes to.
    """

    resumed: Path | None = None
    _undo = ExitStack()
    _next_epoch = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = kwargs["train_dataloader"].state_dict()
        has_ended = known.get("_iterator_finished", False)  # of Accelerate's loaders
        saved = {"loader": known, "epoch": self._next_epoch - (not has_ended)}
        if state.is_world_process_zero or "state" not in known:
            torch.save(saved, self._folder(args, state) / _name(args, known))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        self._next_epoch = 0
        if state.global_step:
            folder = self.resumed or self._folder(args, state)
            file = folder / _name(args, loader.state_dict())
            if not file.exists():
                raise FileNotFoundError(
                    f"{folder} has no {file.name}, the state of minloader's loader: give "
                    "Trainer.train a checkpoint that was saved with LoaderMixin or "
                    "LoaderCheckpoints, or train without them"
                )
            saved = torch.load(file)
            loader.load_state_dict(saved["loader"])
            self._next_epoch = saved["epoch"]
            # The state has skipped them already.
            self._undo.callback(setattr, trainer, "skip_first_batches", trainer.skip_first_batches)
            trainer.skip_first_batches = lambda loader, count: loader

    @staticmethod
    def _folder(args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer takes a stream without a length for one epoch, and counts from 0 when it
        # resumes. What it is about to tell, and then Accelerate's loader, is the right number.
        loader = kwargs["train_dataloader"]
        loader.set_epoch = partial(_tell, weakref.ref(loader), self._next_epoch)
        self._next_epoch += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(kwargs["train_dataloader"]).pop("set_epoch", None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo.close()


def _tell(loader: weakref.ref[Any], right: int, told: int) -> None:
    """Set a loader to the right epoch, whatever it is told."""
    here: Any = loader()
    type(here).set_epoch(here, right)


def _name(args: Any, known: dict[str, Any]) -> str:
    """Return the name of a state's file: one for all ranks, unless each has its own."""
    return "loader.pt" if "state" in known else f"loader-{args.process_index}.pt"
