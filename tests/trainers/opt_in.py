"""Accelerate makes loaders of minloader's class only where that was asked for; it warns once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from task import Numbers

from minloader.torch import DataLoader, use_in_accelerate

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
