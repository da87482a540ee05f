"""HF's Trainer on minloader's workers, resumed by the loader's state. Runs in each rank."""

from __future__ import annotations

from contextlib import ExitStack
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
        self.add_callback(LoaderCheckpoints())  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Return the loader that the Trainer would make, but of minloader's class."""

        def make(dataset: Any, worker_init_fn: Any = None, **options: Any) -> DataLoader[Any]:
            return DataLoader(dataset, **options)  # batches are seeded, not workers

        with use_in_accelerate(), ExitStack() as undo:
            undo.callback(setattr, trainer, "DataLoader", trainer.DataLoader)
            trainer.DataLoader = make
            return super().get_train_dataloader()  # type: ignore[misc]


class LoaderCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Puts the loader's state into each checkpoint, and resumes from there."""

    _undo = ExitStack()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = kwargs["train_dataloader"].state_dict()
        if state.is_world_process_zero or "state" not in known:
            torch.save(known, _file(args, state, known))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        if state.global_step:
            loader.load_state_dict(torch.load(_file(args, state, loader.state_dict())))
            # The state has skipped them already.
            self._undo.callback(setattr, trainer, "skip_first_batches", trainer.skip_first_batches)
            trainer.skip_first_batches = lambda loader, count: loader

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo.close()


def _file(args: Any, state: Any, known: dict[str, Any]) -> Path:
    """Return where a state is kept: one for all ranks, unless each has its own."""
    name = "loader.pt" if "state" in known else f"loader-{args.process_index}.pt"
    return Path(args.output_dir, f"checkpoint-{state.global_step}", name)
