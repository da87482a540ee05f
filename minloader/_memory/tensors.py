"""Torch's tensors and storages on their way between processes: as numpy arrays of their memory.

How the numbers of a tensor in a batch travel::

    contiguous                           an array of its shape
    transposed, channels_last, expanded  the memory from its first number to its last, as it is
    that would be much more than needed  an array without the gaps, its axes in the same order

So strides arrive, but for those of a tensor that takes little of the memory that it spans; it gets
the strides that ``Tensor.clone()`` gives. A tensor that is more than numbers (sparse, nested,
quantized) is taken apart by torch itself, into tensors and storages. A sparse one is not put
together by torch's own function for it: that keeps each until somebody calls ``torch.load``, which
looks at them all.

Those of a job go as their storages do, so that what overlaps still does, and what is shared is
inherited.

Nothing here imports torch before there is a tensor.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

from minloader._memory.reducers import JobMemory, as_it_is

MOST_SPAN = 2
"""How many times its numbers the memory of a tensor may be that is sent as it is. A copy without
gaps takes as long, number by number."""


def is_plain_tensor(tensor: Any) -> bool:
    """Whether a tensor is but numbers in this machine's memory, and may require a gradient."""
    return not (
        tensor.device.type != "cpu"
        or tensor.layout != sys.modules["torch"].strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    )


def is_elsewhere(obj: Any) -> bool:
    """Whether the numbers of a tensor or a storage are in the memory of a device."""
    return obj.device.type not in ("cpu", "meta")


def reduce_elsewhere(obj: Any) -> tuple[Any, ...]:
    """Reduce a tensor or an untyped storage on a device to one here, to be moved there again.

    Torch's own way cannot load all of them.
    """
    return move_to, (obj.cpu(), obj.device)


def move_to(obj: Any, device: Any) -> Any:
    """Undo :func:`reduce_elsewhere`."""
    return obj.to(device=device)


def with_attributes(tensor: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how a tensor is made again, with the attributes that somebody has given it.

    Torch's own way to keep them cannot load the dtypes that it has no typed storage for.
    """
    if not tensor.__dict__:
        return reduced
    return (*reduced, tensor.__dict__, None, None, _set_attributes)


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


@functools.cache
def numpy_like(dtype: Any) -> Any:
    """Return the type whose numbers numpy holds in place of a tensor's: its own, or of its bits."""
    torch = sys.modules["torch"]
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:  # bfloat16, float8, ...
        return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return dtype


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to an array. Torch's own way would write a file into the stream."""
    if tensor.requires_grad:
        reduced: tuple[Any, ...] = require_gradient, (tensor.detach(),)
    elif is_plain_tensor(tensor):
        reduced = _reduce_numbers(tensor)
    elif is_elsewhere(tensor):
        reduced = reduce_elsewhere(tensor)
    elif "sparse" in str(tensor.layout):
        reduced = _reduce_sparse(tensor)
    else:
        return as_it_is(tensor)
    return with_attributes(tensor, reduced)


def _reduce_sparse(tensor: Any) -> tuple[Any, ...]:
    layout, parts = tensor.detach().__reduce_ex__(5)[1]  # without attributes
    return load_sparse, (layout, *parts)


def load_sparse(layout: Any, *parts: Any) -> Any:
    """Return a sparse tensor of what torch takes one apart into; nobody has to look at it again."""
    torch = importlib.import_module("torch")
    if layout == torch.sparse_coo:
        *data, is_coalesced = parts
        return torch.sparse_coo_tensor(*data, is_coalesced=is_coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _reduce_numbers(tensor: Any) -> tuple[Any, ...]:
    shape = stride = None
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((length - 1) * step for length, step in steps)
        if span <= MOST_SPAN * tensor.numel():
            shape = tuple(tensor.shape)
            stride = tensor.stride()
            tensor = tensor.as_strided((span,), (1,))
    dtype = tensor.dtype
    like = numpy_like(dtype)
    if like is dtype:
        return as_tensor, (tensor.numpy(), None, shape, stride)
    return as_tensor, (tensor.view(like).numpy(), dtype, shape, stride)


def as_tensor(array: Any, dtype: Any = None, shape: Any = None, stride: Any = None) -> Any:
    """Return a tensor over the memory of an array.

    Args:
        array: its numbers.
        dtype: the type of which the array has the bits; None: the array's.
        shape: shape of the tensor if it is not that of the array; else None.
        stride: its strides then, in numbers.
    """
    tensor = importlib.import_module("torch").from_numpy(array)
    if dtype is not None:
        tensor = tensor.view(dtype)
    return tensor if shape is None else tensor.as_strided(shape, stride)


def require_gradient(tensor: Any) -> Any:
    """Return a tensor that is to require a gradient."""
    return tensor.requires_grad_()


def reduce_storage(storage: Any) -> Any:
    """Reduce an untyped storage to an array. Torch's own way fails where it is loaded."""
    if is_elsewhere(storage):
        return reduce_elsewhere(storage)
    return load_storage, (bytes_of(storage),)


def bytes_of(storage: Any) -> Any:
    """Return an array over the memory of an untyped storage."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def load_storage(memory: Any) -> Any:
    """Return an untyped storage over an array of bytes; or itself, if it was inherited."""
    torch = importlib.import_module("torch")
    if isinstance(memory, torch.UntypedStorage):
        return memory
    with warnings.catch_warnings(action="ignore"):  # of a file that was mapped to be read
        return torch.from_numpy(memory).untyped_storage()


def load_tensor(memory: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> Any:
    """Return a tensor in a storage, see :func:`load_storage`."""
    torch = importlib.import_module("torch")
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        load_storage(memory), offset, shape, stride
    )


def reduce_typed_storage(storage: Any) -> Any:
    """Reduce a storage with a type to one without."""
    return load_typed_storage, (storage._untyped_storage, storage.dtype)


def load_typed_storage(untyped: Any, dtype: Any) -> Any:
    """Undo :func:`reduce_typed_storage`."""
    kind = importlib.import_module("torch.storage").TypedStorage
    return kind(wrap_storage=untyped, dtype=dtype, _internal=True)  # else torch warns


def is_shared(storage: Any) -> bool:
    """Whether a storage of torch's lies in memory that was shared on purpose."""
    return storage.device.type == "cpu" and bool(storage.is_shared())


def reduce_in_job(memory: JobMemory, tensor: Any) -> Any:
    """Reduce a tensor of a job to a view of its memory, which is sent once for all views of it.

    Torch's own way would write a copy for each of them into the stream.
    """
    if tensor.requires_grad or not is_plain_tensor(tensor):
        return reduce_tensor(tensor)
    view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    storage = _memory_of(memory, tensor.untyped_storage())
    return with_attributes(tensor, (load_tensor, (storage, tensor.dtype, *view)))


def reduce_storage_in_job(memory: JobMemory, storage: Any) -> Any:
    """Reduce an untyped storage as those of tensors."""
    if is_elsewhere(storage):
        return reduce_elsewhere(storage)
    return load_storage, (_memory_of(memory, storage),)


def _memory_of(memory: JobMemory, storage: Any) -> Any:
    """Return the memory of a storage, as an array if it is not inherited.

    Once, however many have it.
    """
    key = storage.data_ptr(), storage.nbytes()
    if key not in memory.storages:
        memory.storages[key] = storage if is_shared(storage) else bytes_of(storage)
    return memory.storages[key]
