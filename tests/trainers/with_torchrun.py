"""Plain torch under torchrun: DistributedDataParallel on gloo, two workers a rank.

Prints nothing of its own; each rank leaves its steps in a file. ``--kill worker`` or ``rank`` has
one process die in the middle of an epoch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import client
import torch
import torch.distributed as dist
from task import EPOCHS, Numbers, loss_of, make_loader, make_model, step_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def train(kind: str, workers: int, killed: str | None) -> client.Steps:
    data = Numbers(0.0, 400)
    sampler: Any = DistributedSampler(data, seed=2)
    loader = make_loader(kind, data, sampler=sampler, num_workers=workers)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: client.Steps = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(step_of(batch, loss))
            if killed and client.RANK == 1 and len(steps) == 60:
                kill(killed)
    return steps


def kill(what: str) -> None:
    """Kill this rank, or the first of its workers."""
    if what == "rank":
        client.die()
    multiprocessing.active_children()[0].kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill", choices=["rank", "worker"])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    steps = train(options.kind, options.workers, options.kill)
    (options.folder / f"{os.environ['RANK']}.json").write_text(json.dumps(steps))
    dist.destroy_process_group()
