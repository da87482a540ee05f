"""Trains a small network in JAX on handwritten digits, with random shifts made in workers.

The 1,797 images come with scikit-learn. Two worker processes make the batches, each image moved
by up to a pixel; a thread puts them on the device while the step before is computed. The random
numbers belong to the batch: the loss is the same, to the last digit, for any number of workers.

Run (needs ``pip install jax scikit-learn``)::

    python examples/jax_training.py
    python examples/jax_training.py --workers 0
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from minloader import Loader, get_worker_info
from minloader.jax import to_device

BATCH = 64
RATE = 0.1
MOMENTUM = 0.9

Params = dict[str, Any]


class Digits:
    """Sample ``i`` is image ``i``, 8 x 8 and moved by up to a pixel each way, and its label."""

    def __init__(self, images: NDArray[np.float32], labels: NDArray[np.int32]) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], np.int32]:
        info = get_worker_info()
        assert info is not None
        down, right = info.rng.integers(0, 3, 2)  # the batch's own generator
        padded = np.pad(self.images[index], 1)
        return padded[down : down + 8, right : right + 8], self.labels[index]


def make_params(seed: int) -> Params:
    """A layer of 128 units and one of the 10 digits."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (64, 128)) / 8,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(second, (128, 10)) / 128**0.5,
        "b2": jnp.zeros(10),
    }


def predict(params: Params, images: jax.Array) -> jax.Array:
    """Scores of the digits, shape ``(n, 10)``."""
    pixels = 2 * images.reshape(len(images), 64) - 1
    hidden = jax.nn.relu(pixels @ params["w1"] + params["b1"])
    scores: jax.Array = hidden @ params["w2"] + params["b2"]
    return scores


def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy, the mean over the batch."""
    logs = jax.nn.log_softmax(predict(params, images))
    loss: jax.Array = -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()
    return loss


@jax.jit
def train_step(
    params: Params, speed: Params, rate: float, images: jax.Array, labels: jax.Array
) -> tuple[Params, Params, jax.Array]:
    """One step of gradient descent with momentum."""
    loss, slope = jax.value_and_grad(loss_of)(params, images, labels)
    speed = jax.tree.map(lambda v, g: MOMENTUM * v - rate * g, speed, slope)
    return jax.tree.map(jnp.add, params, speed), speed, loss


parser = argparse.ArgumentParser(description="Digits in JAX, batches from workers.")
parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

data = load_digits()
images = (data.images / 16).astype(np.float32)  # brightness from 0 to 1
labels = data.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(images))
training, test = order[:1500], order[1500:]

params = make_params(seed=0)
speed = jax.tree.map(jnp.zeros_like, params)
losses: list[jax.Array] = []
began = time.perf_counter()
# Every batch has the same size, so that the step is compiled once. No `if __name__ ==
# "__main__":`: the workers do not import this script, and thus neither JAX nor scikit-learn.
with Loader(
    Digits(images[training], labels[training]),
    batch_size=BATCH,
    shuffle=True,
    last_batch="discard",
    num_workers=args.workers,
) as loader:
    steps = len(loader)  # of an epoch
    for epoch, (shifted, digits) in to_device(loader.epochs(args.epochs)):
        rate = RATE * (1 - len(losses) / (args.epochs * steps))
        params, speed, loss = train_step(params, speed, rate, shifted, digits)
        losses.append(loss)
        if len(losses) % (5 * steps) == 0:  # rarely: to look at a loss is to wait for the step
            print(f"epoch {epoch:>2}: loss {np.mean(losses[-steps:]):.6f}")
seconds = time.perf_counter() - began

scores = predict(params, jnp.asarray(images[test]))
accuracy = float(np.mean(scores.argmax(axis=1) == labels[test]))
print(f"{len(losses)} steps in {seconds:.1f} s, with {args.workers} workers")
print(f"test accuracy: {accuracy:.1%} of {len(test)} images")
if accuracy < 0.95:
    raise SystemExit("the accuracy should be at least 95%")
