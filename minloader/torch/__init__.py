"""``minloader.torch``: torch's ``DataLoader`` on minloader's workers, and the way to a device."""

from minloader.torch.data_loader import DataLoader
from minloader.torch.device import to_device

__all__ = ["DataLoader", "to_device"]
