"""HF's Trainer resumes from a checkpoint in another folder than the one that it writes to."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minloader.torch.transformers import LoaderMixin

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


class Trainer(LoaderMixin, transformers.Trainer):
    """It trains from our loader."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(x.flatten().tolist())
        return {"loss": self.layer(x).square().mean()}


def train(folder: Path, resume: Path | None = None) -> list[Any]:
    transformers.set_seed(1)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=5,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    model = Model()
    samples = [{"x": torch.tensor([float(n)])} for n in range(24)]
    Trainer(model, arguments, train_dataset=samples).train(resume and str(resume))
    return model.seen


if __name__ == "__main__":
    here = Path(sys.argv[1])
    whole = train(here / "one")
    assert train(here / "other", here / "one" / "checkpoint-5") == whole[5:]
    (here / "one" / "checkpoint-5" / "loader.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no loader\.pt"):
        train(here / "third", here / "one" / "checkpoint-5")
