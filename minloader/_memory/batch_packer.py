"""How a worker packs its batches: see ``pickling.py``, which unpacks them."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from typing import Any

from minloader._errors import breaks_in
from minloader._memory.files import LARGE, SlotAddress
from minloader._memory.pickling import PackedBatch, Pickler, shorten_notes
from minloader._memory.reducers import IN_BATCHES, Reducers
from minloader._memory.slot_writer import NO_SLOT, NoSlot, SlotWriter, use

_PackOne = Callable[[Any], bytes | PackedBatch]


class BatchPacker:
    """Packs the batches of one worker, one at a time.

    Args:
        without_slot: takes the large buffers of a task that has no slot.
    """

    def __init__(self, without_slot: NoSlot = NO_SLOT) -> None:
        self._without_slot = without_slot
        self._writer = without_slot  # of the present task
        self._pack_batch: _PackOne | None = None  # for the next batch of the present task

    def open(self, address: SlotAddress | None) -> NoSlot:
        """Begin with a task; return what takes its large buffers, and arrays made by ``empty``."""
        if address is not None:
            writer = self._writer = SlotWriter(address)
            use(writer)
        return self._writer

    def close(self) -> None:
        """End the task, and let its slot go."""
        self._writer.close()
        self._writer = self._without_slot
        self._pack_batch = None

    def pack(self, batch: Any) -> bytes | PackedBatch:
        """Serialize a batch; return bytes if all of it is in the stream.

        Raises:
            Exception: whatever pickling raised, when cloudpickle cannot do it either.
        """
        pack_batch = self._pack_batch
        self._pack_batch = None  # an error may leave it in the middle
        try:
            if pack_batch is None:
                pack_batch = _batch_packer(self._writer, is_plain=True)
            packed = pack_batch(batch)
            self._pack_batch = pack_batch
            return packed
        except Exception as plain_error:
            if breaks_in(plain_error):
                raise
            shorten_notes(plain_error)
            try:
                # Buffers that were put into the slot already are lost room, until the task ends.
                return _batch_packer(self._writer, is_plain=False)(batch)
            except Exception as error:
                raise error from plain_error


def _batch_packer(writer: NoSlot, *, is_plain: bool) -> _PackOne:
    """Return what packs batches, one after another: with one pickler, which is slow to make.

    Args:
        writer: takes the large buffers.
        is_plain: whether by plain pickle.
    """
    written: list[bytes] = []
    buffers: list[Any] = []

    def put(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        place = writer.put(data) if data.nbytes >= LARGE else None
        if place is not None:
            buffers.append(place)
        return place is None  # whether it stays in the stream

    file = types.SimpleNamespace(write=written.append)  # quicker than a BytesIO to begin anew
    reducers = Reducers(IN_BATCHES, writer)
    if is_plain:
        pickler: Any = pickle.Pickler(file, 5, buffer_callback=put)
        pickler.dispatch_table = reducers
    else:
        pickler = Pickler(file, down=False, reducers=reducers, buffer_callback=put)

    def pack_batch(batch: Any) -> bytes | PackedBatch:
        try:
            pickler.dump(batch)
            stream = written[0] if len(written) == 1 else b"".join(written)
            if len(stream) >= LARGE:  # many strings, say
                place = writer.put(memoryview(stream))
                if place is not None:
                    return PackedBatch(b"", [*buffers, place])
            return PackedBatch(stream, buffers.copy()) if buffers else stream
        finally:
            pickler.clear_memo()  # which has all parts of the batch
            buffers.clear()
            written.clear()

    return pack_batch


def size_in_band(outcome: Any) -> int:
    """Return how many bytes of a packed batch are not in its slot; 0 of anything else."""
    if isinstance(outcome, bytes):
        return len(outcome)
    if not isinstance(outcome, PackedBatch):
        return 0
    return len(outcome.stream) + sum(
        len(each) for each in outcome.buffers if type(each) is not tuple
    )
