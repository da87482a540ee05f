"""The way to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from minloader._prefetch import Prefetch, prefetch
from minloader._sampling.torch_collate import mapping_like, sequence_like


def _pin(batch: Any) -> Any:
    return _walk(batch, lambda tensor: tensor.pin_memory(), "pin_memory", lambda x: x.pin_memory())


def _walk(
    batch: Any,
    of_tensor: Callable[[torch.Tensor], Any],
    method: str,
    of_object: Callable[[Any], Any],
) -> Any:
    """A batch of the same structure, its tensors, and objects with the method, replaced."""

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if hasattr(value, method) and not isinstance(value, type):
            return of_object(value)
        if isinstance(value, str | bytes):
            return value
        if isinstance(value, Mapping):
            return mapping_like(value, {k: walk(v) for k, v in value.items()})
        if isinstance(value, tuple):
            values = map(walk, value)
            return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
        if isinstance(value, Sequence):
            return sequence_like(value, list(map(walk, value)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(made, field.name, walk(getattr(value, field.name)))
            return made
        return value

    return walk(batch)


def to_device(batches: Iterable[Any], device: torch.device | str | int, depth: int = 1) -> OnDevice:
    """Moves batches to a device, ahead of the consumer, in a thread of this process.

    Tensors are moved wherever they are in dicts, lists, tuples, named tuples and dataclasses, and
    so is what has a ``to`` method; all else, arrays too, stays as it is. For a CUDA device they
    are copied through pinned memory, on a stream of their own, while the consumer computes::

        for images, labels in to_device(loader, "cuda"):
            train(images, labels)

    ``state_dict()`` of the loader counts what the consumer was given.

    Args:
        batches: a loader with workers, or any iterable; iterated once, here, see
            :func:`minloader.prefetch`.
        device: where to.
        depth: most batches that are there, or on their way, beyond the one that the consumer has.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
    """
    return OnDevice(batches, torch.device(device), depth)


class OnDevice:
    """Iterator over batches on a device, see :func:`to_device`. For one thread to use."""

    def __init__(self, batches: Iterable[Any], device: torch.device, depth: int) -> None:
        self._device = device
        mover = _CudaMover(device) if device.type == "cuda" else partial(_move, device)
        self._ahead: Prefetch[_Moved] = prefetch(batches, mover, depth)

    def __iter__(self) -> OnDevice:
        return self

    def __next__(self) -> Any:
        moved = next(self._ahead)
        if moved.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(moved.done)
            for tensor in moved.tensors:
                # Their memory is the other stream's: it must not be used again before this one's
                # work on them is done.
                tensor.record_stream(stream)
        return moved.batch

    def state_dict(self) -> Any:
        """The state of ``batches`` as of the batch that the consumer was given last."""
        return self._ahead.state_dict()

    def close(self) -> None:
        """Ends the thread, and drops what is ready."""
        self._ahead.close()

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Moved(NamedTuple):
    """A batch on its way to a device.

    Attributes:
        batch: there, or on its way.
        done: when it is there; None if it is.
        tensors: that are on their way.
    """

    batch: Any
    done: Any = None
    tensors: Sequence[torch.Tensor] = ()


def _move(device: torch.device, batch: Any) -> _Moved:
    return _Moved(_walk(batch, lambda tensor: tensor.to(device), "to", lambda x: x.to(device)))


class _CudaMover:
    """Copies on a stream of its own. Made in the consumer's thread, called in the other one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._consumers = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> _Moved:
        tensors: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            moved = tensor.to(self._device, non_blocking=True)
            tensors.append(moved)
            return moved

        def move_object(value: Any) -> Any:
            # What memory it has cannot be recorded: let it be the consumer's stream's own.
            with torch.cuda.stream(self._consumers):
                return value.to(self._device)

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = _walk(batch, move, "to", move_object)
            return _Moved(batch, self._stream.record_event(), tensors)
