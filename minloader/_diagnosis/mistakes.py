"""Names that a ``Loader`` does not have, and what was meant by them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

OTHER_NAMES = {
    "batch_sampler": "give it as sampler, with collate_fn=minloader.collate",
    "drop_last": "write last_batch='discard'",
    "generator": "give seed, an int, from which all randomness derives",
    "multiprocessing_context": "write mp_context",
    "persistent_workers": "drop it: workers stay until the loader is closed",
    "pin_memory": "use minloader.torch.to_device(loader, device), which pins memory",
    "pin_memory_device": "use minloader.torch.to_device(loader, device), which pins memory",
}
"""Arguments of torch's ``DataLoader`` that have other names here."""


def argument_meant(name: str, names: Iterable[str]) -> str:
    """Return in words which argument was meant by another name; ``names`` are those there are."""
    if name in OTHER_NAMES:
        return f"{OTHER_NAMES[name]} (minloader.torch.DataLoader has the arguments of torch's)"
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"


def check_attribute(loader: Any, name: str, defaults: Iterable[str]) -> None:
    """Refuse to set an attribute where that would do nothing.

    Args:
        loader: of which it is to be set.
        name: of the attribute.
        defaults: names of the arguments of a loader that have a default.

    Raises:
        AttributeError: it is an argument that the workers were made with, or a typo.
    """
    arguments = {"dataset", "sampler", *defaults}
    if name in arguments:
        raise AttributeError(
            f"{name} cannot be set, since the workers have what the Loader was made with; make "
            f"another Loader with {name}=..."
        )
    near = difflib.get_close_matches(name, [*arguments, "epoch"], 1, cutoff=0.8)
    if near and not hasattr(loader, name):
        raise AttributeError(f"a Loader has no attribute {name!r}; did you mean {near[0]}?")
