"""For JAX: :func:`to_device`. Nothing else in the package imports jax, and no worker does."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from minloader._memory.files import is_leased
from minloader._prefetch import Prefetch, prefetch

UNFIT = "USOMm"

"""Kinds of numpy's types that no device has: strings, bytes, objects, dates and spans of time."""


def to_device(batches: Iterable[Any], device: Any = None, depth: int = 2) -> Prefetch[Any]:
    """Puts batches on a device, or distributes them over several, ahead of the consumer. ::

        for images, labels in to_device(loader):
            state = train_step(state, images, labels)

    A thread waits for the loader, calls ``jax.device_put`` and waits for the transfer, while the
    consumer is busy with an earlier batch: see :func:`minloader.prefetch`, also for errors, for
    ``state_dict()`` (it and the loader's count what the consumer was given) and for ``close()``.

    A batch is a pytree. Its arrays, and tensors of the CPU, become ``jax.Array`` of the same
    shape; 64-bit types become those of 32 bits unless ``jax_enable_x64`` is set, as everywhere in
    JAX. All other leaves stay as they are: strings, single numbers (the epoch of
    ``loader.epochs()``, say), arrays of strings, bytes, objects or dates.

    The memory that a batch came in is free again when the consumer gets it. On the CPU, JAX goes
    on using it, until the last array dies, without a copy; what did not come in shared memory from
    a worker process may be somebody else's, who may write to it, and is copied.

    Args:
        batches: a :class:`minloader.Loader`, ``loader.epochs(n)``, or any iterable.
        device: what ``jax.device_put`` takes: a device; a sharding, such as ``NamedSharding(mesh,
            PartitionSpec("data"))`` to split each array along its first axis; a pytree of these
            that is a prefix of the batch; None for the default device of the calling thread.
            Of a sharding over devices of several processes each process gives its own part of the
            batch (samplers have ``rank`` and ``world_size``), and gets the whole ``jax.Array``.
        depth: most batches beyond the consumer's that are on the device or on their way; its
            memory must hold as many more.

    Returns:
        An iterator over one epoch (or those of ``epochs``).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind. What JAX says of a batch, such as
            one that a sharding cannot split evenly, is raised in place of that batch.
    """
    return prefetch(batches, _Put(device), depth)


class _Put:
    """Puts one batch after another, in the thread."""

    def __init__(self, device: Any) -> None:
        self._device = device
        here = [getattr(each, "is_fully_addressable", True) for each in jax.tree.leaves(device)]
        self._parts = not all(here)  # whether other processes put parts of the same batch
        # It may be set for a thread, and it is another one that puts.
        config: Any = jax.config
        self._default = config.jax_default_device
        self._copy = True  # until it is known where batches go

    def __call__(self, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        arrays = [_as_array(leaf, copy=self._copy) for leaf in leaves]
        with nullcontext() if self._default is None else jax.default_device(self._default):
            # In place of a leaf that stays here is None, which is no leaf: what is around it must
            # be there, or it would not match a pytree of devices.
            here = jax.tree.unflatten(tree, arrays)
            if self._parts:
                join: Any = jax.make_array_from_process_local_data
                there = join(self._device, here)
            else:
                there = jax.device_put(here, self._device)
        put = jax.tree.leaves(there)
        for array in put:
            array.block_until_ready()
        if put:
            platforms = {device.platform for array in put for device in array.devices()}
            self._copy = "cpu" in platforms
        left = iter(put)
        pairs = zip(leaves, arrays, strict=True)
        leaves = [leaf if array is None else next(left) for leaf, array in pairs]
        return jax.tree.unflatten(tree, leaves)


def _as_array(leaf: Any, *, copy: bool) -> Any:
    """What of a leaf goes to a device; None if it stays here."""
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.generic) or not hasattr(leaf, "__array__"):
        return None
    array = np.asarray(leaf)
    if array.dtype.kind in UNFIT:
        return None
    return array.copy() if copy and not is_leased(array) else array
