"""Keep the samples of a dataset in memory that all processes share, as they are first made.

The cache is a shared file, owned by the process that made it. It only grows::

    | place, place, place, ... | entry | entry | (lost) | entry |
    0    one for each sample                                    end of the file, <= bytes

An entry is one sample, pickled, with its large buffers. A place is where the entry of a sample
begins, 8 bytes; it is 0 while there is none.

    a worker    dataset[i] ── pack ──> lock, write the entry at the end, store its place, unlock
    another     place of i ──> copy the entry out of the file, unpack

Guarantees, whichever process is killed at whatever moment:

* Nobody sees a part of an entry. The place comes last, in one aligned store of 8 bytes; what a
  killed process wrote before that is lost room.
* The lock ends with the process that holds it: it belongs to an open file.
* The file never takes more than it may. A sample that finds no room is made again each time.
"""

from __future__ import annotations

import inspect
import logging
import mmap
import operator
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial
from typing import Any

from minloader._arguments import checked_int
from minloader._errors import SKIP
from minloader._formats import brief_repr, format_bytes
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.files import ALIGN, SharedFile, open_shared, path_of
from minloader._memory.limits import free_memory
from minloader._memory.pickling import PackedBatch, unpack_batch
from minloader._memory.slot_writer import NoSlot
from minloader._protocols import checked_samples, has_getitems, has_samples, is_stream, reader_of

logger = logging.getLogger("minloader")

_PLACE_BYTES = 8
_HEADER = struct.Struct("qq")  # bytes of the pickle, and of the large buffers after it
_MISSING = object()


class cached:  # noqa: N801  # used as a function
    """A dataset whose samples are made once, and kept in memory that all workers share.

    Whichever worker is first asked for a sample makes it. From then on all of them read it from the
    cache: in later epochs, in other loaders over this same object, and in workers that replace
    others. What is read is a copy, to be changed at will. The memory is free again when this object
    and the loaders over it are gone.

    Samples must not be random: they would stay as they were first made, and ``transform``, where
    random augmentation belongs, would draw other numbers once they are kept. Errors and
    :data:`SKIP` are not kept.

    All of it runs where batches are made. Where the cache cannot be opened (on another machine, or
    when the process that called ``cached`` has ended), the dataset makes every sample.

    Args:
        dataset: has ``__len__``, and ``__getitem__`` or ``__getitems__``, and takes ints from 0.
            ``__getitems__`` is asked for what is not kept yet.
        bytes: most memory to take, for samples as they are pickled, and 8 bytes for the place of
            each. What finds no room is made each time.

    Attributes:
        dataset: the dataset without the cache.
        bytes: most memory to take.

    Raises:
        TypeError: the dataset has no length or takes no index. When called with an index, also: it
            is not an int, or the sample cannot be pickled.
        ValueError: there are not enough bytes for the places alone.
        OSError: the system has no memory for these, or no files of this kind (Windows).
    """

    def __init__(self, dataset: Any, *, bytes: int) -> None:
        if inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None)):
            raise TypeError(
                f"a sample of {brief_repr(dataset)} is a coroutine, which cannot be cached; write "
                "cached(concurrent(dataset), bytes=...), which keeps what was awaited"
            )
        is_sized = isinstance(dataset, Sized)
        if not (is_sized and has_samples(dataset)) or is_stream(dataset, None):
            raise TypeError(
                f"dataset must have __len__ and __getitem__ to be cached, got {brief_repr(dataset)}"
            )
        if not hasattr(os, "preadv"):
            raise OSError("this system cannot share a cache; use the dataset without cached()")
        self.dataset = dataset
        # Where the first entry begins; there is one place at least, since nothing cannot be mapped.
        self._first = _PLACE_BYTES * max(1, len(dataset))
        self.bytes = checked_int("bytes", bytes, self._first)
        if self.bytes > (free := free_memory()):
            logger.warning(
                "cached() may take %s, but %s of memory are free: the kernel may kill workers",
                format_bytes(self.bytes),
                format_bytes(free),
            )
        file = SharedFile()
        weakref.finalize(self, file.close)
        self._name = file.name
        self._mark = file.mark
        # Written, not left as a hole: to write there later could be SIGBUS.
        os.pwrite(file.fd, b"\0" * self._first, 0)
        self._map(file.fd)

    def _map(self, fd: int) -> None:
        self._fd = fd
        self._places = memoryview(mmap.mmap(fd, self._first)).cast("q")

    @property
    def _path(self) -> str:
        """Path of the file, for any process to open as long as this one has it open."""
        return path_of(self._fd, self._name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_fd": -1, "_places": None, "path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = state.pop("path")
        vars(self).update(state, _places=memoryview(b"").cast("q"))
        with suppress(OSError):  # it is gone, or on another machine: there is no place for a sample
            fd = open_shared(path, self._mark, os.O_RDWR)
            weakref.finalize(self, os.close, fd).atexit = False
            self._map(fd)

    @property
    def kept(self) -> tuple[int, int]:
        """How many samples the cache has now, and the bytes that it takes."""
        import numpy as np

        size = os.fstat(self._fd).st_size if self._places else 0
        return int(np.count_nonzero(self._places)), size

    def __repr__(self) -> str:
        samples, size = self.kept
        room = f"{format_bytes(size)} of {format_bytes(self.bytes)}"
        return f"<cached {brief_repr(self.dataset)}: {samples} of {len(self)} samples, {room}>"

    # --- as a dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._get([index], lambda _: [reader_of(self.dataset)(index)])[0]

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        if not has_getitems(self.dataset):
            raise AttributeError("the dataset has no __getitems__")
        return partial(self._get, make=self.dataset.__getitems__)

    def _get(self, indices: list[Any], make: Callable[[list[Any]], Any]) -> list[Any]:
        samples = [self._load(index) for index in indices]
        missing = [n for n, sample in enumerate(samples) if sample is _MISSING]
        if missing:
            wanted = [indices[n] for n in missing]
            made = checked_samples(make(wanted), wanted)
            for n, sample in zip(missing, made, strict=True):
                self._keep(operator.index(indices[n]), sample)
                samples[n] = sample
        return samples

    def _load(self, index: Any) -> Any:
        """Return a copy of a sample that is kept; _MISSING if it is not."""
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(
                f"a cached dataset takes ints, got {brief_repr(index)}; put cached() around what "
                "does"
            ) from None
        place = self._places[number] if 0 <= number < len(self._places) else 0
        if place == 0:
            return _MISSING
        start = place + _HEADER.size
        stream_size, size = _HEADER.unpack(os.pread(self._fd, _HEADER.size, place))
        packed = pickle.loads(os.pread(self._fd, stream_size, start))
        if not isinstance(packed, PackedBatch):
            return pickle.loads(packed)
        import numpy as np

        memory = np.empty(size, np.uint8)
        os.preadv(self._fd, [memory.data], start + stream_size)
        return unpack_batch(packed, memory)

    def _keep(self, number: int, sample: Any) -> None:
        """Add a sample to the cache if there is room, unless another process just did."""
        if sample is SKIP or not 0 <= number < len(self._places):
            return
        if _least_size(sample, set()) > self.bytes - os.fstat(self._fd).st_size:
            return  # to pack it takes long
        entry = pack_entry(sample, number)
        import fcntl  # not on Windows

        with suppress(OSError):  # no memory, no descriptors: the sample is not kept
            # Opened anew, so that the lock excludes other threads, and the parent of a fork, too.
            fd = os.open(self._path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                end = os.fstat(fd).st_size
                if self._places[number] == 0 and end + len(entry) <= self.bytes:
                    if os.pwrite(fd, entry, end) == len(entry):
                        self._places[number] = end
                    else:  # the file system is full, or the entry is above 2 GB
                        os.ftruncate(fd, end)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # which a fork, made just now, would hold on
                os.close(fd)


class _Buffers(NoSlot):
    """Takes the large buffers of a sample that is packed."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, data: memoryview) -> tuple[int, int]:
        self.data += bytes(-len(self.data) % ALIGN)
        self.data += data
        return len(self.data) - data.nbytes, len(self.data)


def _least_size(sample: Any, counted: set[int]) -> int:
    """Return how many bytes an entry has at least, for the usual kinds of samples.

    Args:
        sample: a sample, or a part of one.
        counted: what was counted already: it is packed once, wherever else it is.
    """
    if isinstance(sample, dict | list | tuple):
        parts = sample.values() if isinstance(sample, dict) else sample
        return sum(_least_size(part, counted) for part in parts)
    identity = id(sample)
    size = 0
    kind = type(sample).__name__
    if isinstance(sample, bytes | bytearray | str):
        size = len(sample)
    elif kind == "ndarray" and not sample.dtype.hasobject:  # None is one byte
        size = sample.nbytes
    elif kind == "Tensor" and str(sample.layout) == "torch.strided":
        storage = sample.untyped_storage()
        identity = storage.data_ptr()
        size = min(sample.nbytes, storage.nbytes())
    if identity in counted:
        return 0
    counted.add(identity)
    return int(size)


def pack_entry(sample: Any, number: int) -> bytearray:
    """Return the entry of a sample."""
    buffers = _Buffers()
    try:
        packed = BatchPacker(buffers).pack(sample)
    except Exception as error:
        from minloader._memory.unpicklable import find_unpicklable  # only to tell of an error

        found = find_unpicklable(sample, "sample")
        if found is None:  # no memory, say
            raise
        path, part, cause = found
        raise TypeError(
            f"dataset[{number}] cannot be cached: {path} is a {type(part).__qualname__} "
            f"({cause}); have the dataset return arrays, numbers, strings or containers of them"
        ) from error
    stream = pickle.dumps(packed, 5)
    return bytearray(_HEADER.pack(len(stream), len(buffers.data)) + stream) + buffers.data
