"""The way to a device: pinned memory, and copies ahead of the consumer.

::

      |=========== the thread ===========|                |========== the consumer ==========|
       a batch       --> pin --> copy, on a     _Moved
                                 stream of its  ------->   its stream waits for the copy, and
                                 own; event               marks the memory as in use --> batch

Nothing here waits for a copy: the consumer's stream does, on the device.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from minloader._arguments import checked_bool
from minloader._prefetch import Prefetch, prefetched
from minloader._sampling.walk import DEEPER, same_container, walk


def _check_cuda(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {str(device)!r}, but torch finds no GPU (torch.cuda.is_available() is "
            'False); give "cpu", or install a torch that has CUDA'
        )


def check_pinning(device: str) -> None:
    """Refuse a type of device that memory would not be pinned for."""
    accelerator = _accelerator()
    if device and accelerator is not None and torch.device(device).type != accelerator.type:
        raise ValueError(
            f"pin_memory_device={device!r}, but memory is pinned for the accelerator that is in "
            f"use, {accelerator}; drop pin_memory_device"
        )


def _accelerator() -> torch.device | None:
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return torch.device("cuda") if torch.cuda.is_available() else None
    found: torch.device | None = accelerator.current_accelerator()
    return found if accelerator.is_available() else None


def can_pin() -> bool:
    """Return whether memory can be pinned; warn who iterates if not."""
    accelerator = _accelerator()
    if accelerator is not None and accelerator.type != "mps":
        return True
    why = "no accelerator is found" if accelerator is None else "MPS cannot"
    warnings.warn(f"pin_memory=True, but {why}: memory is not pinned", stacklevel=5)
    return False


def pin(batch: Any) -> Any:
    return _replace(batch, "pin_memory", _pinned)


def _pinned(value: Any) -> Any:
    """Return a tensor, or what else can do that, in pinned memory."""
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if is_dense and not value.is_nested and 0 in value.stride():
        value = value.contiguous()  # torch writes to no tensor that was expanded
    return value.pin_memory()


def _replace(batch: Any, method: str, function: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure, with other tensors in it.

    Args:
        batch: not changed; walked through mappings, sequences and dataclasses.
        method: name of a method that all tensors have: "to". Any other object that has it is
            replaced as well; not one that has an attribute of that name which is no method.
        function: returns what is to be there in place of a tensor or of such an object.
    """

    def replaced(parts: Sequence[Any], path: str) -> Any:
        (value,) = parts
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            made = function(value)
            return value if made is None else made  # it has moved itself
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping | Sequence):
            made = copy.copy(value)
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):  # it may not have been set
                    part = _replace(getattr(value, field.name), method, function)
                    object.__setattr__(made, field.name, part)
            return made
        return DEEPER

    return walk([batch], replaced, _rebuilt)


def _rebuilt(like: Any, values: Any) -> Any:
    if isinstance(like, tuple) and not hasattr(like, "_fields"):
        return type(like)(values)  # where collating would make a list
    return same_container(like, values)


def to_device(
    batches: Iterable[Any],
    device: torch.device | str | int,
    depth: int = 1,
    *,
    convert: bool = False,
) -> Prefetch[Any]:
    """Move batches to a device ahead of the consumer, in a thread of this process. ::

        for images, labels in to_device(loader, "cuda"):
            train(images, labels)

    Tensors in dicts, lists, tuples, named tuples and dataclasses are moved, and so is any object
    that has a ``to`` method, which may also work in place and return nothing. All else stays as it
    is, numpy arrays too, unless ``convert`` is True. To a CUDA device tensors are copied through
    pinned memory, on a stream of their own, while the consumer computes.

    ``state_dict()`` of the result, and of the loader, counts the batches that the consumer was
    given.

    Args:
        batches: a loader with workers, or any iterable. It is iterated once, from now on; see
            :func:`minloader.prefetch`.
        device: where to move the batches.
        depth: largest number of batches that are on the device, or on their way there, beyond the
            one that the consumer has. The device must have memory for so many more.
        convert: whether numpy arrays of numbers become tensors, wherever they are: for the batches
            of a :class:`minloader.Loader`.

    Returns:
        An iterator over the batches, in the same order. An error of ``batches`` is raised in place
        of its batch.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: ``depth`` is below 1.
        RuntimeError: torch does not know the device.
    """
    checked_bool("convert", convert)
    target = torch.device(device)
    _check_cuda(target)
    move = _CudaMover(target) if target.type == "cuda" else partial(_move, target)
    function = partial(_convert_and_move, move) if convert else move
    made: Prefetch[Any] = prefetched(batches, function, depth, receive=partial(_received, target))
    return made


def _received(device: torch.device, moved: _Moved) -> Any:
    """Return a batch that the consumer's stream may use. Called in the consumer's thread."""
    if moved.done is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(moved.done)
        for tensor in moved.tensors:
            # This memory is the other stream's, which must not use it again before the work
            # of this stream on it is done.
            tensor.record_stream(stream)
    return moved.batch


class _Moved(NamedTuple):
    """A batch on its way to a device.

    Attributes:
        batch: its tensors are those of the device.
        done: event after which they can be used; None if they can be used now.
        tensors: those that are being copied.
    """

    batch: Any
    done: Any = None
    tensors: Sequence[torch.Tensor] = ()


def _convert_and_move(move: Callable[[Any], _Moved], batch: Any) -> _Moved:
    return move(_replace(batch, "__array__", _tensor_of))


def _tensor_of(array: Any) -> Any:
    """Return the tensor of an array of numbers, over its memory if torch can; all else as it is."""
    if type(array) not in (np.ndarray, np.memmap) or array.dtype.kind not in "biufc":
        return array
    size = array.itemsize
    is_fit = all(step >= 0 and step % size == 0 for step in array.strides)  # not so of a field
    fit = array if is_fit else array.copy()
    return torch.from_numpy(np.require(fit, fit.dtype.newbyteorder("="), "W"))


def _move(device: torch.device, batch: Any) -> _Moved:
    return _Moved(_replace(batch, "to", lambda value: value.to(device)))


class _CudaMover:
    """Copy on a stream of its own. Made in the consumer's thread, and called in the other one."""

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
                value = _pinned(value)
            moved = value.to(self._device, non_blocking=True)
            tensors.append(moved)
            return moved

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = _replace(batch, "to", move)
            return _Moved(batch, self._stream.record_event(), tensors)
