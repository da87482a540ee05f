"""The way to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from minloader._prefetch import Prefetch, prefetch
from minloader._sampling.torch_collate import map_children


def _pin(batch: Any) -> Any:
    return _replace(batch, "pin_memory", lambda value: value.pin_memory())


def _replace(batch: Any, method: str, function: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure, with other tensors in it.

    Args:
        batch: not changed; walked through mappings, sequences and dataclasses.
        method: name of a method that all tensors have: "to". Any other object that has it is
            replaced as well.
        function: returns what is to be there in place of a tensor or of such an object.
    """

    def walk(value: Any) -> Any:
        if hasattr(value, method) and not isinstance(value, type):
            return function(value)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return type(value)(map(walk, value))  # where collating would make a list
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping | Sequence):
            made = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(made, field.name, walk(getattr(value, field.name)))
            return made
        return map_children(walk, value)

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
    return _Moved(_replace(batch, "to", lambda value: value.to(device)))


class _CudaMover:
    """Copies on a stream of its own. Made in the consumer's thread, called in the other one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._consumers = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> _Moved:
        tensors: list[torch.Tensor] = []

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                # Its memory cannot be recorded: let it belong to the consumer's stream.
                with torch.cuda.stream(self._consumers):
                    return value.to(self._device)
            if value.device.type == "cpu" and not value.is_pinned():
                value = value.pin_memory()
            moved = value.to(self._device, non_blocking=True)
            tensors.append(moved)
            return moved

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = _replace(batch, "to", move)
            return _Moved(batch, self._stream.record_event(), tensors)
