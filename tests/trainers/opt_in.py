"""Accelerate makes loaders of minloader's class only where that was asked for; it warns once.

Where it would make loaders of another kind, it is refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import accelerate.data_loader
import pytest
import torch
from accelerate import Accelerator
from task import Numbers

from minloader.torch import DataLoader, prepare, use_in_accelerate

accelerator = Accelerator(cpu=True)


def prepared(make: Any, **options: Any) -> tuple[Any, int]:
    """Return the loader that Accelerate makes, and how often it warned of that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = accelerator.prepare(make(Numbers(0.0), 4, **options)).base_dataloader
    told = [each for each in caught if "use_in_accelerate" in str(each.message)]
    return type(loader), len(told)


torchs = torch.utils.data.DataLoader
assert prepared(DataLoader) == (torchs, 1)
assert prepared(DataLoader) == (torchs, 0)
with use_in_accelerate():
    assert prepared(DataLoader) == (DataLoader, 0)
    assert prepared(torchs) == (torchs, 0)
    loader = accelerator.prepare(DataLoader(Numbers(0.0), 4, retries=3, on_error="skip"))
    assert (loader.retries, loader.on_error) == (3, "skip")
assert prepared(DataLoader) == (torchs, 0)

accelerator.dataloader_config.use_stateful_dataloader = True
with pytest.raises(ValueError, match="drop use_stateful_dataloader"):
    prepare(accelerator, DataLoader(Numbers(0.0), 4))
accelerator.dataloader_config.use_stateful_dataloader = False
with use_in_accelerate():
    look = "from_it = loader.multiprocessing_context"  # as Accelerate does, and then makes none
    exec(look, vars(accelerate.data_loader) | {"loader": DataLoader(Numbers(0.0), 4)})
with use_in_accelerate():
    assert prepared(torchs) == (torchs, 0)
