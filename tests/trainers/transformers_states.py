"""A run of HF's Trainer that goes on from any of its checkpoints trains on the rest of its batches.

From the checkpoint of each step of three epochs, and through a run that is interrupted at each of
them: with streams that Accelerate dispatches and that it does not, with steps of several batches,
and with samples that are shuffled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset

from minloader.torch.transformers import LoaderMixin

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers whose order is that of the epoch which it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        for number in torch.randperm(8, generator=generator):
            yield {"x": number}


class Trainer(LoaderMixin, transformers.Trainer):
    """It trains from our loader."""


class Model(torch.nn.Module):
    """Notes what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(x.tolist())
        return {"loss": self.weight * 0}


class Interrupted(Exception):
    """A run is over."""


class Note(transformers.TrainerCallback):
    """Notes how many batches there were until each checkpoint.

    Args:
        model: that has them.
        interrupts: whether to interrupt the run there.
    """

    def __init__(self, model: Model, *, interrupts: bool) -> None:
        self.model, self.interrupts = model, interrupts
        self.batches: dict[int, int] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches[state.global_step] = len(self.model.seen)
        if self.interrupts:
            raise Interrupted


def goes_on(folder: Path, data: Any, *, dispatches: bool = False, **options: Any) -> None:
    """Compare what is trained on after each step, and through all of them, with the whole run.

    Args:
        folder: where checkpoints go.
        data: a stream, or samples.
        dispatches: whether a stream is read in the first process alone.
        options: of the trainer.
    """

    def train(step: int = 0, *, interrupts: bool = False) -> Note:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=3,
            save_steps=1,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
            accelerator_config={"dispatch_batches": dispatches},
            **options,
        )
        note = Note(Model(), interrupts=interrupts)
        trainer = Trainer(note.model, arguments, train_dataset=data())
        trainer.add_callback(note)
        with suppress(Interrupted):
            trainer.train(str(folder / f"checkpoint-{step}") if step else None)
        return note

    noted = train()
    whole = noted.model.seen
    noted.batches.popitem()  # behind its last step the Trainer goes on, without a number of batches
    assert len(noted.batches) > 3
    for step, batches in noted.batches.items():
        rest = train(step).model.seen
        assert rest == whole[batches:], (folder.name, step, rest, whole[batches:])
    parts = [
        each for step in [0, *noted.batches] for each in train(step, interrupts=True).model.seen
    ]
    assert parts == whole, (folder.name, parts, whole)


def samples() -> list[Any]:
    return [{"x": torch.tensor(n)} for n in range(8)]


def main(folder: Path) -> None:
    goes_on(folder / "stream", Stream, max_steps=9)
    goes_on(folder / "dispatched", Stream, max_steps=9, dispatches=True)
    goes_on(folder / "accumulated", Stream, max_steps=5, gradient_accumulation_steps=2)
    goes_on(folder / "samples", samples, num_train_epochs=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
