"""One import changed in an ordinary training script: the same losses, in less time.

    python tests/benchmarks/torch_import.py [--rounds 5]

*Same losses*: a small network learns 28x28 images (random crops by the index, normalized, a
``DistributedSampler``, 2 workers), once with each loader: every loss must be equal.

*Time*: the same script with images of 3x224x224, where loading is the limit, and with the small
ones. Each round runs all in turn; what is printed is the median of the epochs after the first, and
the ratio within a round, lowest to highest; then the CPU time of all processes, likewise, which a
machine that is not quiet blurs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch
from harness import spread
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

from minloader.torch import DataLoader as OurLoader

LOADERS: dict[str, Any] = {"torch": TorchLoader, "minloader": OurLoader}


class Images(Dataset):  # type: ignore[type-arg]
    """Generated images, kept as bytes, cropped and normalized when they are asked for."""

    def __init__(self, count: int, channels: int, size: int, pad: int) -> None:
        self.shape = (channels, size + 2 * pad, size + 2 * pad)
        self.size, self.pad = size, pad
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 10, count)
        kinds = min(count, 64)  # a few, over and over: it is not memory that is measured
        self.pixels = rng.integers(0, 256, (kinds, *self.shape), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = self.pixels[index % len(self.pixels)]
        top, left = index * 7 % (2 * self.pad + 1), index * 5 % (2 * self.pad + 1)
        crop = pixels[:, top : top + self.size, left : left + self.size]
        image = torch.from_numpy(crop.astype(np.float32))
        return image.div_(255).sub_(0.1307).div_(0.3081), int(self.labels[index])


class Net(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


def train(loader_class: Any, data: Images, epochs: int, learn: bool, **options: Any) -> Any:
    """The script. Only ``loader_class`` differs.

    Returns:
        The losses, and for each epoch the seconds it took, and those of CPU time.
    """
    torch.manual_seed(0)
    model = Net(int(np.prod(data[0][0].shape))) if learn else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if model is not None else None
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True, seed=1)
    loader = loader_class(data, batch_size=64, sampler=sampler, num_workers=2, **options)
    losses, seconds = [], []
    for epoch in range(epochs):
        begin, before = time.perf_counter(), cpu_seconds()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if model is None or optimizer is None:
                losses.append(int(labels.sum()) + images.shape[0])
                continue
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds.append((time.perf_counter() - begin, cpu_seconds() - before))
    return losses, seconds


def cpu_seconds() -> float:
    """Of this process and its children, those that have ended too."""
    me = psutil.Process()
    alive = sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))
    return float(sum(me.cpu_times()[:4]) + alive)


def same_losses() -> None:
    data = Images(4096, 1, 28, 4)
    losses = {name: train(loader, data, 2, True)[0] for name, loader in LOADERS.items()}
    assert len(losses["torch"]) == 64
    assert losses["torch"] == losses["minloader"], "the losses differ"
    first, last = losses["torch"][0], losses["torch"][-1]
    print(f"64 losses, from {first:.4f} to {last:.4f}: equal, every bit of them")


SCRIPTS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "3x224x224, persistent": ((2048, 3, 224, 8), False, {"persistent_workers": True}),
    "3x224x224": ((2048, 3, 224, 8), False, {}),
    "1x28x28, persistent": ((20_000, 1, 28, 4), False, {"persistent_workers": True}),
    "1x28x28": ((20_000, 1, 28, 4), False, {}),
    "1x28x28, learning": ((20_000, 1, 28, 4), True, {}),
}


def times(rounds: int) -> None:
    taken: dict[tuple[str, str, int], list[float]] = {}
    for number in range(rounds):
        for script, (shape, learn, options) in SCRIPTS.items():
            data = Images(*shape)
            order = list(LOADERS) if number % 2 else list(reversed(LOADERS))
            for name in order:
                _, epochs = train(LOADERS[name], data, 4, learn, **options)
                for kind, seconds in enumerate(zip(*epochs[1:], strict=True)):
                    taken.setdefault((script, name, kind), []).append(statistics.median(seconds))
    for kind, head in enumerate(("seconds", "CPU seconds")):
        print(f"{head} an epoch, median (lowest to highest); ratio minloader / torch")
        for script in SCRIPTS:
            ours, theirs = (taken[script, name, kind] for name in ("minloader", "torch"))
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            told = [spread(values, ".3f") for values in (ours, theirs, ratios)]
            print(f"{script:24} {told[0]}  torch {told[1]}  ratio {told[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="0: only the losses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the workers have the other processors
    same_losses()
    if arguments.rounds:
        times(arguments.rounds)
