"""Accelerate makes loaders of minloader's class only where that was asked for.

Where it would make loaders of another kind, it is refused.
"""

from __future__ import annotations

from typing import Any

import accelerate.data_loader
import pytest
import torch
from accelerate import Accelerator
from task import Numbers

from minloader.torch import DataLoader, prepare, use_in_accelerate

accelerator = Accelerator(cpu=True)


def prepared(make: Any, **options: Any) -> Any:
    """Return the kind of loader that Accelerate makes."""
    return type(accelerator.prepare(make(Numbers(0.0), 4, **options)).base_dataloader)


torchs = torch.utils.data.DataLoader
own = {"retries": 3, "on_error": "skip", "max_errors": 5, "shared_memory": False}
assert prepared(DataLoader) is torchs
with use_in_accelerate():
    assert prepared(DataLoader) is DataLoader
    assert prepared(torchs) is torchs
    loader = accelerator.prepare(DataLoader(Numbers(0.0), 4, **own))
    rest = accelerate.skip_first_batches(loader, 2)
    for each in loader, rest, accelerator.skip_first_batches(loader, 2):
        assert type(each.base_dataloader) is DataLoader
        assert {name: getattr(each, name) for name in own} == own
    assert len(list(rest)) == len(loader) - 2
assert prepared(DataLoader) is torchs
assert prepared(torchs) is torchs

accelerator.dataloader_config.use_stateful_dataloader = True
with pytest.raises(ValueError, match="drop use_stateful_dataloader"):
    prepare(accelerator, DataLoader(Numbers(0.0), 4))
