"""Lightning's callback that keeps the loaders' states, also at the end of an epoch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves

from minloader.torch.data_loader import DataLoader


class KeepLoaderState(Callback):  # type: ignore[misc]
    """Puts the states of the training loaders into each checkpoint, and resumes from there.

    Lightning does so in mid-epoch alone. ::

        trainer = lightning.Trainer(callbacks=[KeepLoaderState()])
    """

    _loaded: tuple[list[Any], bool] | None = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        states = [each.state_dict() for each in _loaders(trainer)]
        checkpoint["minloader"] = states, trainer.is_last_batch

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("minloader")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (states, was_last), self._loaded = self._loaded or ([], False), None
        for loader, state in zip(_loaders(trainer) if states else [], states, strict=True):
            loader.load_state_dict(state)
            if was_last:  # Lightning begins the next epoch: leave the empty rest behind
                list(loader)


def _loaders(trainer: Any) -> list[DataLoader[Any]]:
    return [each for each in tree_leaves(trainer.train_dataloader) if isinstance(each, DataLoader)]
