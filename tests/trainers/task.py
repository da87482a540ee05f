"""What all clients train on: a small dataset and model, and a loader of one of three kinds.

The dataset imports no torch, so that our workers start quickly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES = 42
BATCH_SIZE = 4  # the last batch of an epoch is incomplete
EPOCHS = 3


class Numbers:
    """Samples that have their number and, as an augmentation, noise from the global generator.

    Args:
        noise: how much of it.
        samples: number of samples.
    """

    def __init__(self, noise: float, samples: int = SAMPLES) -> None:
        self.noise, self.samples = noise, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        values = np.random.default_rng(index).standard_normal(3)
        values += self.noise * np.random.random(3)
        return {"x": values.astype(np.float32), "id": np.int64(index)}


def make_loader(kind: str, dataset: Any, **options: Any) -> Any:
    """Make a loader of a kind; what torch is asked for is the same for all.

    It shuffles by a generator of its own, since no client keeps torch's global one for it.
    """
    import torch

    if kind in ("minloader", "recipe"):
        from minloader.torch import DataLoader
    elif kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
    else:
        from torch.utils.data import DataLoader
    generator = torch.Generator().manual_seed(5)
    return DataLoader(dataset, **{"batch_size": BATCH_SIZE, "generator": generator, **options})


def make_model() -> Any:
    """Make the same small model each time."""
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def loss_of(model: Any, batch: Any) -> Any:
    """Return the mean of a loss that depends on the samples and their noise."""
    return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()


def step_of(batch: Any, loss: Any) -> list[Any]:
    """Return what a run notes of a step: which samples, and the loss to the last bit."""
    return [batch["id"].tolist(), float(loss.detach()).hex()]
