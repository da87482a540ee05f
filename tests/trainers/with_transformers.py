"""HF's Trainer, with one process or two."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import client
import torch
import transformers
from task import BATCH_SIZE, EPOCHS, Numbers, loss_of, make_loader, make_model, step_of
from torch.utils.data import default_collate

import minloader.torch
from minloader.torch.transformers import LoaderMixin

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
minloader.torch.use_in_accelerate()
STEPS = 11 if client.RANKS == 1 else 6  # in an epoch


class Model(torch.nn.Module):
    """A model that notes its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.steps: client.Steps = []

    def forward(self, **batch: Any) -> Any:
        loss = loss_of(self.model, batch)
        if self.training:
            self.steps.append(step_of(batch, loss))
        return {"loss": loss}


class Trainer(transformers.Trainer):
    """A trainer whose loader is of one of the kinds."""

    kind = ""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(
            make_loader(
                self.kind,
                self.train_dataset,
                sampler=self._get_train_sampler(),
                num_workers=self.args.dataloader_num_workers,
            )
        )


class WithMixin(LoaderMixin, transformers.Trainer):
    """It makes its loader itself."""


class Kill(transformers.TrainerCallback):
    """Kills the process after the last checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == client.places(STEPS)["mid"] + 1:
            client.die()


def train(
    kind: str, workers: int, noise: float, folder: Path | None, resume: tuple[Path, str] | None
) -> client.Steps:
    transformers.set_seed(1)
    steps = client.places(STEPS)
    here = folder or (resume[0] if resume else Path("unused"))
    arguments = transformers.TrainingArguments(
        output_dir=str(here),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=EPOCHS,
        dataloader_num_workers=workers,
        save_strategy="steps" if folder else "no",
        save_steps=1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        optim="sgd",
    )
    model = Model()
    make = WithMixin if kind == "recipe" else Trainer
    trainer = make(model, arguments, train_dataset=Numbers(noise), data_collator=default_collate)
    trainer.kind = kind
    if folder is not None:
        trainer.add_callback(Kill())
    checkpoint = None if resume is None else str(here / f"checkpoint-{steps[resume[1]]}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.steps


if __name__ == "__main__":
    client.main(train)
