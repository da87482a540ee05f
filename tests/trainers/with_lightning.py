"""Lightning, with one process or by DDP, and Fabric."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import client
import lightning
import torch
from lightning.pytorch.callbacks import Callback
from task import EPOCHS, Numbers, loss_of, make_loader, make_model, step_of

from minloader.torch.lightning import KeepLoaderState

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    """A module that notes its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.steps: client.Steps = []

    def training_step(self, batch: Any) -> Any:
        loss = loss_of(self.model, batch)
        self.steps.append(step_of(batch, loss))
        return loss

    def predict_step(self, batch: Any) -> Any:
        return batch["id"].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Checkpoints(Callback):
    """Saves the checkpoints that the client asks for, and kills the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        here = client.places(trainer.num_training_batches)
        for name in ("last", "mid"):
            if trainer.global_step == here[name]:
                trainer.save_checkpoint(self.folder / name)
        if trainer.global_step == here["mid"] + 1:
            client.die()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "boundary")


def make_trainer(**options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=client.RANKS,
        strategy="ddp" if client.RANKS > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(
    kind: str, workers: int, noise: float, folder: Path | None, resume: tuple[Path, str] | None
) -> client.Steps:
    lightning.seed_everything(1, verbose=False)
    loader = make_loader(kind, Numbers(noise), shuffle=True, num_workers=workers)
    module = Module()
    callbacks = [Checkpoints(folder)] if folder else []
    if kind == "recipe":
        callbacks += [KeepLoaderState()]
    trainer = make_trainer(callbacks=callbacks)
    trainer.fit(module, loader, ckpt_path=resume and resume[0] / resume[1])
    return module.steps


def extras(kind: str) -> Any:
    """Which samples a rank predicts, trains on with ``overfit_batches``, and gets from Fabric."""
    loader = make_loader(kind, Numbers(0.0), shuffle=True)
    predicted = make_trainer().predict(Module(), make_loader(kind, Numbers(0.0)))
    module = Module()
    lightning.seed_everything(1, verbose=False)
    make_trainer(overfit_batches=3).fit(module, loader)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=client.RANKS, strategy="ddp" if client.RANKS > 1 else "auto"
    )
    fabric.launch()
    lightning.seed_everything(1, verbose=False)
    loader = fabric.setup_dataloaders(make_loader(kind, Numbers(0.0), shuffle=True))
    return predicted, module.steps, [batch["id"].tolist() for batch in loader]


if __name__ == "__main__":
    client.main(train, extras)
