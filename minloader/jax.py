"""Put batches on JAX devices ahead of the consumer: :func:`to_device`.

Runs in the parent. Nothing else in the package imports jax, and no worker does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from minloader._memory.files import is_leased
from minloader._prefetch import Prefetch, prefetch

UNFIT = "USOMm"
"""Kinds of numpy's types that no device has: strings, bytes, objects, dates and time spans."""


def to_device(batches: Iterable[Any], device: Any = None, depth: int = 2) -> Prefetch[Any]:
    """Put batches on a device, or distribute them over several, ahead of the consumer. ::

        for images, labels in to_device(loader):
            state = train_step(state, images, labels)

    A thread of this process waits for the loader, calls ``jax.device_put`` and waits for the
    transfer, while the consumer computes on an earlier batch. See :func:`minloader.prefetch` for
    errors, for ``close()`` and for ``state_dict()``, which counts the batches that the consumer was
    given, as the loader's does.

    A batch is a pytree. Its arrays, and its tensors on the CPU, become ``jax.Array`` of the same
    shape. As everywhere in JAX, 64-bit types become 32-bit types unless ``jax_enable_x64`` is set.
    All other leaves stay as they are: strings, single numbers (such as the epoch of
    ``loader.epochs()``), arrays of strings, bytes, objects or dates.

    When the consumer gets a batch, the shared memory that it came in is free again. Not so on the
    CPU, where JAX uses this memory without a copy until the last array over it dies. Arrays that
    did not come from a worker process are copied on the CPU, since others may write to them.

    Args:
        batches: a :class:`minloader.Loader`, ``loader.epochs(n)``, or any iterable.
        device: what ``jax.device_put`` takes: a device; a sharding, such as ``NamedSharding(mesh,
            PartitionSpec("data"))``, which splits each array along its first axis; a pytree of
            devices and shardings that is a prefix of the batch; None for the default device of the
            calling thread. For a sharding over devices of several processes, each process gives
            its own part of the batch (samplers have ``rank`` and ``world_size``) and gets the
            whole ``jax.Array``.
        depth: largest number of batches that are on the device, or on their way there, beyond the
            one that the consumer has. The device must have memory for so many more.

    Returns:
        An iterator over one epoch (or over those of ``epochs``).

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or ``depth`` is below 1. An error
            of JAX about a batch, such as one that a sharding cannot split evenly, is raised in
            place of that batch.
    """
    return prefetch(batches, _Put(device), depth)


class _Put:
    """Put batches on devices. Made in the consumer's thread, and called in the other one."""

    def __init__(self, device: Any) -> None:
        self._device = device
        here = [getattr(each, "is_fully_addressable", True) for each in jax.tree.leaves(device)]
        self._parts = not all(here)  # whether other processes put parts of the same batch
        # The default may be set for the consumer's thread alone.
        config: Any = jax.config
        self._default = config.jax_default_device
        self._copy = True  # until it is known that batches go to no CPU

    def keep(self, batch: Any) -> Any:
        """Copy what others may write to meanwhile. Called in the consumer's thread."""
        return jax.tree.map(self._kept, batch) if self._copy else batch

    def _kept(self, leaf: Any) -> Any:
        array = None if isinstance(leaf, jax.Array) else _as_array(leaf)
        return leaf if array is None or is_leased(array) else array.copy()

    def __call__(self, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        arrays = [_as_array(leaf) for leaf in leaves]
        with nullcontext() if self._default is None else jax.default_device(self._default):
            # None, which JAX takes for no leaf, stands for one that stays here. The containers
            # around it must stay, or the batch would not match a pytree of devices.
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


def _as_array(leaf: Any) -> Any:
    """Return what to put on a device for a leaf; None if the leaf stays here."""
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.generic) or not hasattr(leaf, "__array__"):
        return None
    array = np.asarray(leaf)
    return None if array.dtype.kind in UNFIT else array
