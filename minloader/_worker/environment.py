"""Where a worker makes batches, which is all that its kinds differ in. The rest is ``run.py``.

    class                made by       batches               global generators     Ctrl-C
    Environment          ThreadPool    stay in the process   left alone            for the batch
    InlineEnvironment    InlinePool    stay                  seeded, then as       raised
                                                             they were before
    PackingEnvironment   ForeignPool   packed                seeded                for the batch
    ProcessEnvironment   start.py      packed, into slots    seeded                for the batch

An executor of the user's may have its workers in this process: then it is ``Environment``, too, but
for its items, which are packed since nobody knows where they go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from minloader._errors import PACKAGE, file_broken_into
from minloader._memory import forks
from minloader._memory.batch_packer import BatchPacker
from minloader._memory.files import SlotAddress
from minloader._memory.limits import private_memory
from minloader._memory.pickling import PackedBatch, unpack
from minloader._memory.slot_writer import NO_SLOT, NoSlot
from minloader._worker import plugins
from minloader._worker.heartbeat import Beat
from minloader._worker.messages import Usage, WorkerInfo
from minloader._worker.seeds import BatchKey, save_globals, seed_globals

COST = 0.002
"""Most of a worker's time that measuring may take. With many threads it is slow."""


def _no_beat(task: int, index: int, now: float) -> None:
    """Tell nobody that an item is begun."""


def _nothing() -> None:
    """Restore nothing."""


class Environment:
    """A thread, which shares the dataset and the global generators with others.

    Attributes:
        beat: called before each item is begun.
        sample_cell: its one element is set to the number of each sample in its item. Whoever finds
            this worker stuck or dead reads it.
        packs: whether batches leave the process. Then nothing may be raised in place of a reply.
        is_inline: whether this is the calling process, at work for its own loop.
        seeds_globals: whether the global generators are seeded for each batch.
        reload: gives another copy of the dataset, for a stream that is read in several places.
            None: there is only this process's.
    """

    packs: ClassVar[bool] = False
    is_inline: ClassVar[bool] = False
    seeds_globals: ClassVar[bool] = False
    reload: Callable[[], Any] | None = None

    def __init__(self) -> None:
        self.beat: Beat = _no_beat
        self.sample_cell: Any = [-1]

    def unpack_item(self, item: Any) -> Any:
        """Return an item as the sampler gave it."""
        return item

    def open_slot(self, address: SlotAddress | None) -> NoSlot:
        """Begin with a task; return what takes large buffers."""
        return NO_SLOT

    def close_slot(self) -> None:
        """End the task."""

    def pack(self, batch: Any) -> Any:
        """Return a batch in the form in which it leaves."""
        return batch

    def save_globals(self) -> Callable[[], None]:
        """Note what the user's code finds changed by a batch; return what restores that.

        It may be called again, where Ctrl-C has come in the middle of it.
        """
        return _nothing

    def enter(self, info: WorkerInfo, key: BatchKey) -> None:
        """Prepare for a call of the user's code: seed what is to be, and tell torch of the info."""

    def ends_program(self, error: BaseException) -> bool:
        """Whether an error, such as Ctrl-C, is none of the batch's, but ends the program."""
        return False

    def measure(self, seconds: float, *, exactly: bool) -> Usage:
        """Return what this process has used, when a task is done.

        Args:
            seconds: what the task took.
            exactly: whether memory must be looked at, and not just now and then.
        """
        return Usage()

    def exit_fork(self) -> None:
        """End a fork of a worker that came back from the dataset, before it answers too."""


class InlineEnvironment(Environment):
    """The calling process, whose global generators are the user's.

    Args:
        is_stream: whether it reads a stream: where that has several shards, torch is told which.
    """

    is_inline: ClassVar[bool] = True
    seeds_globals: ClassVar[bool] = True

    def __init__(self, *, is_stream: bool) -> None:
        super().__init__()
        self._torch: Any = None
        if is_stream:
            from minloader._worker import torch_conventions

            self._torch = torch_conventions

    def save_globals(self) -> Callable[[], None]:
        return save_globals() if self._torch is None else self._torch.save_with_torch()

    def enter(self, info: WorkerInfo, key: BatchKey) -> None:
        if info.num_workers > 1:  # of a stream with several shards, of which it reads one
            self._torch.set_torch_info(info)
        seed_globals(key)

    def ends_program(self, error: BaseException) -> bool:
        if not isinstance(error, Exception):
            return not isinstance(error, SystemExit)
        # What breaks into the user's code takes the place of the batch.
        return file_broken_into(error).startswith(os.path.join(PACKAGE, ""))


class PackingEnvironment(Environment):
    """A process from which batches go to another one.

    Args:
        packer: packs them.
    """

    packs: ClassVar[bool] = True
    seeds_globals: ClassVar[bool] = True

    def __init__(self, packer: BatchPacker) -> None:
        super().__init__()
        self._packer = packer
        self._process = forks.process

    def open_slot(self, address: SlotAddress | None) -> NoSlot:
        return self._packer.open(address)

    def close_slot(self) -> None:
        self._packer.close()

    def unpack_item(self, item: Any) -> Any:
        return unpack(item) if type(item) is bytes else item

    def pack(self, batch: Any) -> bytes | PackedBatch:
        return self._packer.pack(batch)

    def enter(self, info: WorkerInfo, key: BatchKey) -> None:
        seed_globals(key)

    def exit_fork(self) -> None:
        if forks.process is not self._process:
            os._exit(1)


class ProcessEnvironment(PackingEnvironment):
    """A worker process of ours.

    Args:
        beat, sample_cell: what :func:`open_heartbeat` returned.
        reload: gives another copy of the dataset.
    """

    def __init__(self, beat: Beat, sample_cell: Any, reload: Callable[[], Any]) -> None:
        super().__init__(BatchPacker())
        self.beat = beat
        self.sample_cell = sample_cell
        self.reload = reload
        self.memory_at_start = 0
        self._work = 0.0  # seconds since it measured last
        self._due = 0.0  # how many of these must pass before it measures again

    def enter(self, info: WorkerInfo, key: BatchKey) -> None:
        for told in plugins.before_batch:
            told(info)
        seed_globals(key)

    def measure(self, seconds: float, *, exactly: bool) -> Usage:
        self._work += seconds
        if self._work < self._due and not exactly:
            return Usage(memory_at_start=self.memory_at_start)
        begin = time.thread_time()  # a busy machine may take the processor away meanwhile
        usage = Usage(
            memory=private_memory(),
            memory_at_start=self.memory_at_start,
            processor=next((ask(self._work) for ask in plugins.after_batch), None),
        )
        self._work = 0.0
        self._due = (time.thread_time() - begin) / COST
        return usage
