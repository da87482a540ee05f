"""A dataset with one of each object that ``multiprocessing`` shares between processes."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

NUMBERS = ["Value", "RawValue"]
ARRAYS = ["Array", "RawArray"]
LOCKS = ["Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"]
QUEUES = ["Queue", "JoinableQueue", "SimpleQueue"]
KINDS = [*NUMBERS, *ARRAYS, *LOCKS, *QUEUES, "Event", "Barrier", "Pipe"]


def make(kind: str, method: str) -> Any:
    context: Any = get_context(method)
    if kind in ("RawValue", "RawArray"):
        return {"RawValue": RawValue, "RawArray": RawArray}[kind]("i", 1)
    arguments = {"Value": ("i",), "Array": ("i", 1), "Barrier": (2,)}
    return getattr(context, kind)(*arguments.get(kind, ()))


class Sharing:
    """Does with an object what shows that it is the parent's, too. An item is the object's kind."""

    def __init__(self, method: str) -> None:
        self.shared = {kind: make(kind, method) for kind in KINDS}

    def __getitem__(self, kind: str) -> Any:
        it = self.shared[kind]
        if kind in NUMBERS:
            it.value += 1
            return it.value
        if kind in ARRAYS:
            it[0] += 1
            return it[0]
        if kind in LOCKS:
            was_free = it.acquire(False)
            if was_free:
                it.release()
            return was_free
        if kind in QUEUES:
            it.put(it.get() + 1)
            return True
        if kind == "Pipe":
            it[1].send(it[1].recv() + 1)
            return True
        return it.is_set() if kind == "Event" else it.broken

    def prepare(self, number: int) -> dict[str, Any]:
        """Change all objects in the parent; return what a worker must tell of them."""
        free = number % 2 == 0
        for kind, it in self.shared.items():
            if kind in NUMBERS:
                it.value = number
            elif kind in ARRAYS:
                it[0] = number
            elif kind in LOCKS and not free:
                it.acquire()
            elif kind in QUEUES:
                it.put(number)
        self.shared["Pipe"][0].send(number)
        if free:
            self.shared["Event"].set()
            self.shared["Barrier"].abort()
        else:
            self.shared["Event"].clear()
            self.shared["Barrier"].reset()
        expected: dict[str, Any] = dict.fromkeys(KINDS, free)
        expected |= dict.fromkeys([*QUEUES, "Pipe"], True)
        return expected | dict.fromkeys([*NUMBERS, *ARRAYS], number + 1)

    def check(self, number: int) -> None:
        """Look at what a worker did; undo what :meth:`prepare` did."""
        for kind, it in self.shared.items():
            if kind in LOCKS and number % 2:
                it.release()
            elif kind in NUMBERS:
                assert it.value == number + 1
            elif kind in ARRAYS:
                assert it[0] == number + 1
            elif kind in QUEUES:
                assert it.get() == number + 1
                # That this comes back shows that the worker no longer holds the queue's lock, and
                # may be killed: its thread lets go of it a moment after what it put can be had.
                it.put(None)
                assert it.get() is None
        assert self.shared["Pipe"][0].recv() == number + 1

    def close(self) -> None:
        """End the threads of the parent's queues."""
        for kind in QUEUES:
            self.shared[kind].close()
            if kind != "SimpleQueue":
                self.shared[kind].join_thread()


class Made:
    """Makes such an object in the worker, and returns it in a batch."""

    def __getitem__(self, kind: str) -> Any:
        return {"it": make(kind, "spawn")}
