"""Trains a small network on handwritten digits, is killed in the middle, and ends up the same.

This is an ordinary training script for torch with one import changed: ``DataLoader`` comes from
``minloader.torch``. What that gives is shown by two runs: one without interruption; and one that is
killed by SIGKILL between two checkpoints and resumed from the last of them. Shuffling and
augmentation (each image is moved by up to a pixel) continue where they were, and the weights are
the same to the last bit.

Run (needs torch, then ``pip install scikit-learn``, which brings the 1,797 images)::

    python examples/torch_training.py

or one run by hand, which resumes from the checkpoint if there is one::

    python examples/torch_training.py --checkpoint digits.pt --kill-at 200
    python examples/torch_training.py --checkpoint digits.pt --workers 4
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from minloader.torch import DataLoader

STEPS = 300
EVERY = 25  # steps between two checkpoints


class Digits:
    """Sample ``i`` is image ``i``, 8 x 8 and moved by up to a pixel each way, and its label.

    It is in numpy, so that the workers need not import torch, which takes them seconds.
    """

    def __init__(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], np.int64]:
        # The generator is seeded for each batch: the shifts are the same for any number of workers.
        down, right = np.random.randint(3, size=2)
        padded = np.pad(self.images[index], 1, constant_values=-1)
        return padded[down : down + 8, right : right + 8], self.labels[index]


def load_data() -> tuple[Digits, Tensor, Tensor]:
    """1,500 images to train on, and the images and the labels of a test."""
    data = load_digits()
    images = (data.images / 8 - 1).astype(np.float32)  # brightness from -1 to 1
    order = np.random.default_rng(0).permutation(len(images))
    training, test = order[:1500], order[1500:]
    dataset = Digits(images[training], data.target[training])
    return dataset, torch.from_numpy(images[test]), torch.from_numpy(data.target[test])


def train(checkpoints: Path, workers: int, kill_at: int = 0) -> str:
    """One run, from the checkpoint if there is one. Returns where it ended, in words."""
    torch.set_num_threads(1)  # sums are rounded in the same order
    torch.manual_seed(0)
    dataset, test_images, test_labels = load_data()
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, total_iters=STEPS)
    loader: DataLoader[list[Tensor]] = DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=workers
    )

    step = 0
    if checkpoints.exists():
        checkpoint = torch.load(checkpoints)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        loader.load_state_dict(checkpoint["loader"])
        torch.set_rng_state(checkpoint["random"])
        step = checkpoint["step"]
        print(f"from checkpoint: step {step}")
    while step < STEPS:
        for images, labels in loader:  # an epoch, or the rest of one
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVERY == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "loader": loader.state_dict(),  # counts the batches up to this one
                    "random": torch.get_rng_state(),  # what the next epochs are shuffled by
                    "step": step,
                }
                save(checkpoint, checkpoints)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break

    with torch.no_grad():
        accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    if accuracy < 0.95:
        raise SystemExit(f"the accuracy should be at least 95%, not {accuracy:.1%}")
    return f"step {step}, test accuracy {accuracy:.1%}, weights {digest}"


def save(checkpoint: object, path: Path) -> None:
    """Writes a checkpoint beside the former one, then puts it in its place: one is always whole."""
    fresh = path.with_suffix(".new")
    torch.save(checkpoint, fresh)
    fresh.replace(path)


def demonstrate(workers: int) -> None:
    """One run without interruption; one that kills itself, and is resumed. Compares them."""
    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder, "whole.pt"), workers)
        print(f"uninterrupted: {whole}")
        checkpoints = Path(folder, "killed.pt")
        # The standard library's resource tracker clears up after the dead, and says so.
        command = [sys.executable, "-W", "ignore:resource_tracker", __file__]
        command += ["--checkpoint", str(checkpoints), "--kill-at", str(STEPS // 2 + 7)]
        command += ["--workers", str(workers)]
        if subprocess.run(command).returncode != -signal.SIGKILL:
            raise SystemExit("the run that should be killed was not")
        print(f"killed:        at step {STEPS // 2 + 7}")
        resumed = train(checkpoints, workers)
        print(f"resumed:       {resumed}")
    if resumed != whole:
        raise SystemExit("the interruption has changed the weights")
    print("the same weights, to the last bit")


# No `if __name__ == "__main__":`, since minloader's workers do not import this script.
parser = argparse.ArgumentParser(description="Digits in torch, killed and resumed.")
parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
parser.add_argument("--checkpoint", type=Path, help="one run, with checkpoints in this file")
parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="SIGKILL itself then")
args = parser.parse_args()
if args.checkpoint is None:
    demonstrate(args.workers)
else:
    print(train(args.checkpoint, args.workers, args.kill_at))
