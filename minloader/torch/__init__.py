"""Torch's ``DataLoader`` on minloader's workers, and :func:`to_device`. Imports torch."""

from minloader.torch.data_loader import DataLoader
from minloader.torch.device import to_device

__all__ = ["DataLoader", "to_device"]
