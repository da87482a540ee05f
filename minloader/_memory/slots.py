"""Slots: shared memory in which batches travel from a worker to the parent, copied once at most.

A slot is a shared file without a name that belongs to the parent. Where there are no such files,
there are no slots, and batches go through the pipe.

                    ┌──────────────── last view of the memory dies ────────────────┐
                    v                                                              |
    (new) ──────> free ── lend ──> lent ── settle ──> settled ── lease ──────> leased
                    ^               |                  |                           |
                    ├───────────────┴────── free ──────┘                           |
                    └──────> retired <─────────────────────────────────────────────┘

* **lent**: a task has the slot. Its worker opens the file, makes the arrays of a batch in it or
  copies them there, and lets the file grow up to the limit that it was lent with. Space is
  reserved before it is written, so that a full machine is an error to be handled rather than a
  bus error.
* **settled**: the reply is there; the parent knows the size that the worker made the file.
* **leased**: the arrays of batches are views of the slot's memory. When the last view has died,
  whatever its kind, the slot is free for the next task. Its pages are there then, which is most
  of the speed. The memory of those beyond what is under way goes back to the system at once.
* **retired**: the file is closed, so the slot is never lent again; its memory stays until the last
  view has died. This happens where somebody else might still write to or read from the memory (the
  worker kept an array, the process forked), and where descriptors are scarce.

Guarantees: memory is never lent while anything can see a batch in it. All slots together never
take more than the budget, whatever the workers do with theirs. Every method of :class:`Slots` may
be called from any thread, and from finalizers.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from minloader._formats import format_bytes
from minloader._memory import forks
from minloader._memory.files import (
    SharedFile,
    SharedMapping,
    SlotAddress,
    on_finalize,
)
from minloader._memory.limits import free_memory, largest_file, most_files
from minloader._protocols import snapshot

SPARE = 16
"""A slot is to have room for a 16th more than a batch was seen to need."""


class Slot(SharedFile):
    """One slot, in the parent. Its owner is :class:`Slots`.

    Attributes:
        place: its path, which stays the same: a fork has no slots.
        size: bytes that the file has, as far as the parent knows.
        limit: bytes that it may have when the task that it was lent to is done.
        mapping: of the file; None if it was not mapped at this size.
    """

    size = 0
    limit = 0
    mapping: SharedMapping | None = None

    def __init__(self) -> None:
        super().__init__()
        self.place = self.path


class Slots:
    """All slots of a pool.

    Args:
        budget: most bytes to hold in slots, together with the other pools; None for half of the
            memory that is free.
        max_in_flight: most tasks that will be under way at once.
        share: of how many pools like this the memory and the descriptors are for.

    Attributes:
        max_in_flight: most tasks that will be under way at once.
        budget: most bytes to hold in slots.
    """

    def __init__(self, budget: int | None, max_in_flight: int, share: int = 1) -> None:
        # Reentrant: any line may collect garbage, and so end a lease, while the lock is held.
        self._lock = threading.RLock()
        self.max_in_flight = max_in_flight
        self._whole_budget = free_memory() // 2 if budget is None else budget
        self._all_files = most_files() // 4
        self._all: set[Slot] = set()
        self._free: list[Slot] = []  # the last one freed is the first one lent: its pages are warm
        self._leased: set[Slot] = set()
        self._committed = 0  # bytes that the slots have, or may grow to while they are lent
        self._largest = 0  # bytes that the batches of a task were seen to need
        self._usual = 0  # the same of late
        self._open = 0  # slots that have their file
        self._closed = 0  # files closed so far
        self._ended = False
        self.divide(share)
        all_slots.add(self)
        forks.told.add(self)

    def divide(self, share: int) -> None:
        """Have the memory and the descriptors be for another number of pools."""
        with self._lock:
            self._share = share
            self.budget = self._whole_budget // share
            self._most_open = self._all_files // share
            while self._free and self._committed > self.budget:
                self._give_back(self._free.pop(0))

    @property
    def used(self) -> tuple[int, int]:
        """Number of slots, and the bytes that they have, also those lent that have grown."""
        with self._lock:
            every = list(self._all)
            sizes = [slot.size if slot.fd < 0 else os.fstat(slot.fd).st_size for slot in every]
            return len(every), sum(sizes)

    @property
    def advice(self) -> str:
        """What to do where a batch found no room."""
        # A loop still has its batch while it is given the next, and that one's successor is sent.
        count = self.max_in_flight + 2
        each = self._largest + self._largest // SPARE
        enough = -(-count * each * self._share // 1_000_000) * 1_000_000
        limit = self._whole_budget
        if self._largest > largest_file():
            return (
                f"a batch takes {format_bytes(self._largest)}, and a file may have "
                f"{format_bytes(largest_file())}: raise the limit (ulimit -f)"
            )
        advice = (
            f"{count} batches of {format_bytes(each)}, {self.max_in_flight} of them under way, take"
        )
        if enough > limit:
            return (
                f"{advice} {format_bytes(enough)}, so set shared_memory={enough:_} (it is "
                f"{limit:_})"
            )
        return (
            f"{advice} {format_bytes(enough)}, and there may be {format_bytes(limit)}: let go of "
            "batches sooner, or raise shared_memory"
        )

    def lend(self) -> Slot | None:
        """Return a slot for a task; None where there can be no more, so that batches are piped."""
        with self._lock:
            if self._ended:
                return None
            wanted = self._usual + self._usual // SPARE
            size = self._free[-1].size if self._free else 0
            # Where memory is short, slots that are too small must not take what others need.
            while len(self._free) > 1 and size + self.budget - self._committed < wanted:
                self._give_back(self._free.pop(0))
            left = max(0, self.budget - self._committed)
            if size + left < wanted:
                self._usual -= self._usual // 8  # one large batch does not keep slots from others
                return None
            if self._free:
                slot = self._free.pop()
            elif self._open >= self._most_open or not left:
                return None
            else:
                try:
                    slot = Slot()
                except OSError:  # no descriptors, no space
                    return None
                self._all.add(slot)
                self._open += 1
            # What it may grow to: what a batch was seen to need, or a share of what is left, such
            # that together they stay within the budget whatever each of them does.
            wanted = self._largest + self._largest // SPARE
            lent = len(self._all) - len(self._free) - len(self._leased)  # this one among them
            growth = max(wanted - slot.size, left // max(2, self.max_in_flight + 3 - lent))
            slot.limit = slot.size + min(growth, left)
            self._committed += slot.limit - slot.size
            return slot

    def address(self, slot: Slot | None) -> SlotAddress:
        """Return where a worker finds a slot that was lent to it."""
        if slot is None:
            return SlotAddress("", "", 0, 0, self._closed)
        return SlotAddress(slot.place, slot.mark, slot.size, slot.limit, self._closed)

    def settle(self, slot: Slot, size: int | None, needed: int) -> None:
        """Record the size that the worker made the slot, and the size that it needed."""
        with self._lock:
            self._largest = max(self._largest, needed)
            self._usual = max(needed, self._usual - self._usual // 8)
            size = max(size or 0, slot.size)
            self._committed -= slot.limit - size
            if size != slot.size:
                slot.mapping = None  # of the former size; it has no views
            slot.size = slot.limit = size

    def lease(self, slot: Slot, *, retire: bool) -> Any:
        """Return the memory of a settled slot, which is free again when nothing uses that memory.

        Args:
            slot: the slot.
            retire: never lend it again.

        Raises:
            MemoryError: this process has no address space for it.
        """
        with self._lock:
            if slot.mapping is None:
                try:
                    slot.mapping = SharedMapping(slot.fd, slot.size)
                except OSError:
                    raise MemoryError(
                        f"this process has no room for the {format_bytes(slot.size)} of a batch; "
                        "let go of batches sooner, make them smaller, or raise its limit of memory "
                        "or address space (ulimit -v)"
                    ) from None
            memory = slot.mapping.lease()
            self._leased.add(slot)
            # A consumer that keeps many batches may have their memory, but not so many descriptors.
            if retire or 2 * self._open > self._most_open or self._ended:
                self._retire(slot)
            on_finalize(memory, self.free, slot)
            return memory

    def free(self, slot: Slot, *, retire: bool = False) -> None:
        """Take back a settled or leased slot whose memory nothing uses.

        Args:
            slot: the slot.
            retire: never lend it again: somebody may still write to it. It need not be settled.
        """
        with self._lock:
            self._leased.discard(slot)
            if not (retire or self._ended or slot.fd < 0):
                self._free.append(slot)
                while len(self._free) > self.max_in_flight + 1:
                    self._give_back(self._free.pop(0))
            elif slot in self._all:
                self._retire(slot)
                self._all.remove(slot)
                self._committed -= slot.limit

    def _give_back(self, slot: Slot) -> None:
        """Give a free slot's memory back to the system.

        At once, though workers have the file mapped until their next task: there may be none.
        """
        if slot.fd >= 0:  # else a finalizer, just now, has ended all slots
            os.ftruncate(slot.fd, 0)  # nobody looks at it: no batch, no task, no fork
        self.free(slot, retire=True)

    def _retire(self, slot: Slot) -> None:
        if slot.fd >= 0:
            slot.close()
            slot.mapping = None  # views of it stay
            self._open -= 1
            self._closed += 1

    def retire_leased(self) -> None:
        """Let no memory that is in use be written again: a fork, about to be made, uses it too."""
        with self._lock:
            for slot in list(self._leased):
                if slot in self._leased:  # else collecting garbage has ended it meanwhile
                    self._retire(slot)

    def close(self) -> None:
        """End all slots; batches that are still in use keep their memory."""
        with self._lock:
            self._ended = True
            while self._free:
                self.free(self._free.pop())
            for slot in list(self._all):  # which a finalizer may change meanwhile
                self._retire(slot)

    def begin_fork(self) -> None:
        """Let go of the slots in a fork: they are the parent's."""
        self._lock = threading.RLock()  # a thread that is not here may have held it
        self.close()


all_slots: weakref.WeakSet[Slots] = weakref.WeakSet()


def before_fork() -> None:
    for slots in snapshot(all_slots):
        slots.retire_leased()


forks.before.append(before_fork)
