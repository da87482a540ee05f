"""Put batches on JAX devices ahead of the consumer: :func:`to_device`.

Runs in the parent. Nothing else in the package imports jax, and no worker does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec

from minloader._memory.files import SharedMapping
from minloader._memory.tensors import numpy_like
from minloader._prefetch import Prefetch, prefetched
from minloader._protocols import is_array_like
from minloader._sampling.collate import labels, refuse_loss, what_numpy_drops

UNFIT = "USTOMm"
"""Kinds of numpy's types that no device has: strings, bytes, objects, dates and time spans. Types
with fields are none of JAX's either."""


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
    ``loader.epochs()``), arrays of strings, bytes, objects, dates or records. What would lose a
    mask, a unit or the names of columns is refused, in its place.

    What the calling thread has set now holds for the transfers, too: ``jax.default_device``,
    ``jax.enable_x64``, ``jax.set_mesh``.

    When the consumer gets a batch, the shared memory that it came in is free again. Not so on the
    CPU, where JAX uses this memory without a copy until the last array over it dies. Arrays that
    did not come from a worker process are copied first, since others may write to them.

    Args:
        batches: a :class:`minloader.Loader`, ``loader.epochs(n)``, or any iterable.
        device: what ``jax.device_put`` takes: a device; a sharding, such as ``NamedSharding(mesh,
            PartitionSpec("data"))``, which splits each array along its first axis; a pytree of
            devices and shardings that is a prefix of the batch; None for the default device of the
            calling thread. For a sharding over devices of several processes, each process gives
            its own part of the batch (samplers have ``rank`` and ``world_size``) and gets the
            whole ``jax.Array``. All parts must be of one shape: see :doc:`trainers`.
        depth: largest number of batches that are on the device, or on their way there, beyond the
            one that the consumer has. The device must have memory for so many more.

    Returns:
        An iterator over one epoch (or over those of ``epochs``).

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or ``depth`` is below 1. An error
            of JAX about a batch, such as one that a sharding cannot split evenly, is raised in
            place of that batch.
    """
    made: Prefetch[Any] = prefetched(batches, _Put(device), depth, keep=_copied)
    return made


class _Put:
    """Put batches on devices. Made in the consumer's thread, and called in the other one."""

    def __init__(self, device: Any) -> None:
        self._devices = jax.tree.leaves(device, is_leaf=_is_none)
        self._prefix: Any = jax.tree.structure(device, is_leaf=_is_none)
        # What the consumer has set for its own thread alone.
        config: Any = jax.config
        self._default = config.jax_default_device
        self._x64 = config.jax_enable_x64
        get_mesh = getattr(jax.sharding, "get_mesh", None)  # which the first versions lack
        mesh = None if get_mesh is None else get_mesh()
        self._mesh = None if mesh is None or mesh.empty else mesh

    def __call__(self, batch: Any) -> Any:
        with ExitStack() as settings:
            settings.enter_context(jax.enable_x64(self._x64))
            if self._default is not None:
                settings.enter_context(jax.default_device(self._default))
            if self._mesh is not None:
                settings.enter_context(jax.set_mesh(self._mesh))
            return self._put(batch)

    def _put(self, batch: Any) -> Any:
        found, tree = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_none)
        leaves = [leaf for _, leaf in found]
        # By place among the leaves: what goes to one device or to several.
        here: dict[int, Any] = {}
        where: dict[int, Any] = {}
        devices = self._devices_of(batch)
        for place, (path, leaf) in enumerate(found):
            name = f"batch{jax.tree_util.keystr(path)}"
            if _loses(leaf):
                _refuse(leaf, name)
            array = _as_array(leaf)
            if array is None:
                continue
            device = devices[place]
            spec = device if isinstance(device, PartitionSpec) else getattr(device, "spec", None)
            if array.ndim == 0 and any(spec or ()):
                raise _not_to_be_split(name, device)
            if getattr(device, "is_fully_addressable", True):
                here[place] = array
                where[place] = device
            else:  # other processes put parts of the same array
                join: Any = jax.make_array_from_process_local_data
                leaves[place] = join(device, array)
        # Only the arrays, never the containers: one that checks what it is given refuses others.
        there: Any = jax.device_put(list(here.values()), list(where.values()))
        for place, array in zip(here, there, strict=True):
            leaves[place] = array
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.block_until_ready()
        try:
            return jax.tree.unflatten(tree, leaves)
        except Exception as error:
            error.add_note(
                "minloader: an object in the batch does not take the jax.Array that an array of "
                "its became; have it take both, or put it together behind to_device()"
            )
            raise

    def _devices_of(self, batch: Any) -> list[Any]:
        """Return the device or sharding of each leaf of a batch."""
        try:
            parts = self._prefix.flatten_up_to(batch)
        except ValueError as error:
            raise ValueError(
                f"device is no prefix of the batch: {error}; give it the containers of the batch, "
                "as far down as their parts differ, with None for the default device"
            ) from None
        return [
            device
            for device, part in zip(self._devices, parts, strict=True)
            for _ in jax.tree.leaves(part, is_leaf=_is_none)
        ]


def _not_to_be_split(name: str, device: Any) -> ValueError:
    return ValueError(
        f"{name} is a single number, which cannot be split by {device}; make it a number of Python "
        "or numpy, which stays here, or give device as a tree with a sharding of its own for it, "
        "PartitionSpec()"
    )


def _copied(batch: Any) -> Any:
    """Copy what others may write to meanwhile."""
    return jax.tree.map(_kept, batch)


def _kept(leaf: Any) -> Any:
    array = None if isinstance(leaf, jax.Array) or _loses(leaf) else _as_array(leaf)
    return leaf if array is None or _is_leased(array) else array.copy()


def _is_none(value: Any) -> bool:
    """Have JAX take None for a leaf: one that stays here, or the default device."""
    return value is None


def _as_array(leaf: Any) -> Any:
    """Return what to put on a device for a leaf; None if the leaf stays here."""
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.generic) or not is_array_like(leaf):
        return None
    is_tensor = type(leaf).__module__.partition(".")[0] == "torch"
    array = _of_tensor(leaf) if is_tensor else np.asarray(leaf)
    return None if array.dtype.kind in UNFIT or array.dtype.names else array


def _of_tensor(tensor: Any) -> Any:
    """Return the array of a tensor, of whatever type; JAX has those that numpy alone lacks."""
    tensor = tensor.detach()
    like = numpy_like(tensor.dtype)
    if like is tensor.dtype:
        return tensor.numpy()
    return tensor.view(like).numpy().view(jax.numpy.dtype(str(tensor.dtype).split(".")[1]))


def _loses(leaf: Any) -> bool:
    """Return whether a leaf would lose something as a bare array: its mask, unit or columns."""
    return is_array_like(leaf) and bool(what_numpy_drops(leaf) or labels(leaf))


def _refuse(leaf: Any, name: str) -> NoReturn:
    if what_numpy_drops(leaf):
        refuse_loss(leaf, name)
    raise TypeError(
        f"{name} is a {type(leaf).__name__}, whose {next(iter(labels(leaf)))} would be lost here; "
        "give the array in it, or a dict of its columns"
    )


def _is_leased(array: Any) -> bool:
    """Whether an array lies in leased memory, which its batch alone uses while the array lives."""
    base: Any = array
    while not isinstance(base, ctypes.Array) and base is not None:
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return isinstance(getattr(base, "mapping", None), SharedMapping)
