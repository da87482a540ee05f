"""Accelerate, with one process or two."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.data_loader
import client
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from task import EPOCHS, Numbers, loss_of, make_loader, make_model, step_of

import minloader.torch

warnings.simplefilter("ignore")
minloader.torch.use_in_accelerate()


def make_accelerator(kind: str) -> Any:
    return Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=kind == "torchdata"
        ),
    )


def train(
    kind: str, workers: int, noise: float, folder: Path | None, resume: tuple[Path, str] | None
) -> client.Steps:
    torch.manual_seed(1)
    accelerator = make_accelerator(kind)
    # Accelerate makes torchdata's loader of torch's.
    kind_here = "torch" if kind == "torchdata" else kind
    loader = make_loader(kind_here, Numbers(noise), shuffle=True, num_workers=workers)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare = partial(minloader.torch.prepare, accelerator)
    prepare = prepare if kind == "recipe" else accelerator.prepare
    model, optimizer, loader = prepare(model, optimizer, loader)
    step, steps = 0, []
    here = client.places(len(loader))
    if resume is not None:
        accelerator.load_state(str(resume[0] / resume[1]))
        step = here[resume[1]]

    def save(name: str) -> None:
        if folder is not None and step == here[name]:
            accelerator.save_state(str(folder / name))

    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if kind in ("torch", "minloader") and step % len(loader):
            batches = accelerate.skip_first_batches(loader, step % len(loader))
        for batch in batches:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(step_of(batch, loss))
            step += 1
            save("last")
            save("mid")
            if folder is not None and step == here["mid"] + 1:
                client.die()
        save("boundary")
    return steps


def extras(kind: str) -> Any:
    """What is gathered, when gradients are synchronized, what is dispatched and skipped."""
    accelerator = make_accelerator("torch")
    accelerator.gradient_accumulation_steps = 4
    model = accelerator.prepare(make_model())
    loader = accelerator.prepare(make_loader(kind, Numbers(0.0), shuffle=True))
    gathered, metrics, synchronized = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            synchronized.append(accelerator.sync_gradients)
        gathered.append(accelerator.gather(batch["id"]).tolist())
        metrics.append(accelerator.gather_for_metrics(batch["id"]).tolist())
    dispatched = accelerate.data_loader.prepare_data_loader(
        make_loader(kind, Numbers(0.0)),
        accelerator.device,
        put_on_device=True,
        dispatch_batches=True,
    )
    skipped = accelerate.skip_first_batches(loader, 2)
    return (
        *(gathered, metrics, synchronized, loader.total_batch_size),
        [batch["id"].tolist() for batch in dispatched],
        [batch["id"].tolist() for batch in skipped],
        [batch["id"].tolist() for batch in accelerate.skip_first_batches(dispatched, 2)],
    )


if __name__ == "__main__":
    client.main(train, extras)
