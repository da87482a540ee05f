"""Torch's ``DataLoader`` on minloader's workers, and what goes with it. Imports torch."""

from minloader.torch.accelerate import prepare, use_in_accelerate
from minloader.torch.data_loader import DataLoader
from minloader.torch.device import to_device

__all__ = ["DataLoader", "prepare", "to_device", "use_in_accelerate"]
