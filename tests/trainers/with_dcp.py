"""torch.distributed.checkpoint, with one process or two: a plain loop that saves the loader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import EPOCHS, Numbers, loss_of, make_loader, make_model, step_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

warnings.simplefilter("ignore")


def train(
    kind: str, workers: int, noise: float, folder: Path | None, resume: tuple[Path, str] | None
) -> client.Steps:
    """Train with the loader's state where it has one, else with the number of steps to skip."""
    if client.RANKS > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Numbers(noise)
    sampler = DistributedSampler(data, client.RANKS, client.RANK, seed=2)
    loader = make_loader(kind, data, sampler=sampler, num_workers=workers)
    model = make_model()
    if client.RANKS > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = client.places(len(loader))
    state: dict[str, Any] = {"model": model.state_dict()}
    if hasattr(loader, "state_dict"):
        state["loader"] = loader
    step, steps = 0, []
    if resume is not None:
        dcp.load(state, checkpoint_id=resume[0] / resume[1])
        model.load_state_dict(state["model"])
        step = here[resume[1]]

    def save(name: str) -> None:
        if folder is not None and step == here[name]:
            dcp.save(state, checkpoint_id=folder / name)

    # A checkpoint of the last batch is taken inside its epoch, of which nothing is left then.
    first = (step - (resume is not None and resume[1] == "last")) // len(loader)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if "loader" not in state and epoch * len(loader) + number < step:
                continue  # torch's loader can only be read up to there
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(step_of(batch, loss))
            step += 1
            save("last")
            save("mid")
            if folder is not None and step == here["mid"] + 1:
                client.die()
        save("boundary")
    return steps


if __name__ == "__main__":
    client.main(train)
    if dist.is_initialized():
        dist.destroy_process_group()
