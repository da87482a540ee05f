"""The protocol of all pools.

A pool runs tasks: in the calling process (``inline.py``), in threads of it (``threads.py``), in
worker processes of our own (``processes.py``), or in an executor that the user brings
(``_foreign/pool.py``, which nothing of the core imports). An epoch drives all of them alike,
through :class:`Pool`, from the parent.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from minloader._errors import breaks_in
from minloader._memory.pickling import pack, unpack
from minloader._memory.slots import Slots
from minloader._pools.ticket import Bell, Ticket
from minloader._protocols import snapshot
from minloader._worker.messages import TaskMessage, WorkerInfo

logger = logging.getLogger("minloader")

POOL_CLOSED = (
    "the pool is closed: the loader was closed, or the main thread has ended, which must wait for "
    "other threads that take batches (thread.join())"
)
"""What is said of a batch that was under way, or was to be."""

GRACE = 0.5
"""Seconds that workers get to finish and leave by themselves, with their exit handlers, before
they are killed. An idle worker needs about 0.05; a longer wait would delay Ctrl-C."""


@dataclass(eq=False, repr=False, kw_only=True)
class Pool:
    """Runs tasks somewhere. This is the protocol of all pools, in three parts:

    * a task goes down by :meth:`submit`, of items that :meth:`hold` keeps, and comes back in its
      ticket, with a reply or an error;
    * of an error the epoch asks what was lost: with ``replaces``, others make it again; ``Unready``
      says that nobody has begun with it; and :meth:`is_death`, that whoever did is dead;
    * :func:`close_pools` ends it, in two halves, :meth:`leave` and :meth:`end`, so that several
      end at the same time.

    A kind of pool overrides ``submit`` and ``wait``, or is a ``ServedPool`` (``served.py``), which
    leaves ``hand_over`` and ``end_all`` to it. All else does nothing unless a kind has something
    to do. What makes pools of a kind is a ``PoolGroup`` (``group.py``).

    Attributes:
        infos: what each worker is told about where it runs, by its index in the pool; new ones are
            for :meth:`replace_workers` to bring in.
        slots: shared memory for the batches; None where they need or want none.
        is_inline: whether :meth:`wait` makes the batches.
        replaces: whether lost workers are replaced, so that lost tasks can be sent again.
        task_ids: gives the next task its id.
        replaced: how many workers were replaced so far.
    """

    infos: list[WorkerInfo]
    slots: Slots | None = None
    is_inline: ClassVar[bool] = False
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.task_ids = itertools.count(1)
        self.replaced = 0

    def hold(self, item: Any) -> Any:
        """Keep an item as it is now; the sampler may change it when it is asked for the next."""
        return item if type(item) in UNCHANGEABLE else _copied(item)

    def pack(self, task: TaskMessage) -> TaskMessage:
        """Make a task fit for where it goes; items may have been held for workers elsewhere.

        The dataset may change what it is given, and the task be sent again.
        """
        if task.shard is not None or UNCHANGEABLE.issuperset(map(type, task.items)):
            return task
        items = [each.item if type(each) is HeldItem else each for each in task.items]
        return task._replace(items=[_copied(each) for each in items])

    def submit(self, task: TaskMessage, bell: Bell) -> Ticket:
        """Hand one task over. Never waits for it; what goes wrong is the ticket's error.

        Args:
            task: without its id, and a slot: the pool adds them.
            bell: rung when the ticket is done.
        """
        raise NotImplementedError

    def wait(self, ticket: Ticket, bell: Bell) -> None:
        """Wait for a ticket that is not done, for a while."""
        bell.wait()

    def start(self) -> None:
        """Start all workers now rather than with their first task. Does not wait for them."""

    def forgive_failed_starts(self) -> None:
        """Try again to start workers, however often that has failed: an epoch begins.

        The machine may have recovered.
        """

    def is_death(self, error: BaseException) -> bool:
        """Whether the error of a future says no more than that workers died, and others live."""
        return False

    def renew(self, pid: int, why: str) -> None:
        """Replace a worker that takes too much memory, when it has done what it was given.

        Args:
            pid: its process.
            why: said to the user.
        """

    def replace_workers(self) -> None:
        """Let the workers leave when they have done what they were given.

        Tasks that are submitted later go to others, which are told what ``infos`` has then.
        """

    def leave(self, deadline: float) -> None:
        """Ask the workers to leave until then; the first half of closing. Does not wait."""

    def end(self, deadline: float) -> None:
        """Wait for them until ``deadline`` (monotonic clock), then kill; the second half."""
        if self.slots is not None:
            self.slots.close()

    def close(self) -> None:
        """End the workers, whatever they are doing. Harmless when repeated."""
        close_pools([self])


def leave_pools(pools: Iterable[Pool], deadline: float) -> list[Pool]:
    """Ask pools to end until then, and return them."""
    ours = snapshot(pools)
    for pool in ours:
        pool.leave(deadline)
    return ours


def close_pools(pools: Iterable[Pool]) -> None:
    """Close pools, all within one GRACE."""
    deadline = time.monotonic() + GRACE
    for pool in leave_pools(pools, deadline):
        pool.end(deadline)


UNCHANGEABLE = frozenset({int, float, str, bool, type(None)})
"""Types of items that need not be pickled by themselves: nobody can change them."""


def _copied(item: Any) -> Any:
    """Return a copy of an item, which a sampler may fill again, and a dataset may change.

    What cannot be copied, and a function, is returned as it is.
    """
    kind = type(item)
    if kind in UNCHANGEABLE:
        return item
    if kind is list or kind is tuple:  # deepcopy takes ten times as long
        plain = UNCHANGEABLE.issuperset(map(type, item))
        return kind(item) if plain else kind([_copied(each) for each in item])
    if callable(item):  # the copy of a method would be of a copied object
        return item
    try:
        return copy.deepcopy(item)
    except Exception as error:
        if breaks_in(error):
            raise
        logger.debug("an item cannot be copied: %r", error)
        return item


class HeldItem:
    """An item as the sampler gave it, which may fill it again: its pickle.

    Args:
        item: one that cannot be pickled is kept itself: what is wrong is raised by :meth:`pack`.
    """

    def __init__(self, item: Any) -> None:
        self._kept = item
        self._packed = b""
        try:
            self._packed = pack(item, down=True)
            self._kept = None
        except Exception as error:
            if breaks_in(error):
                raise

    @property
    def item(self) -> Any:
        """A copy of it, for messages; of one that cannot be unpickled here, a text."""
        if not self._packed:
            return self._kept
        try:
            return unpack(self._packed)
        except Exception as error:
            if breaks_in(error):
                raise
            return f"(what cannot be unpickled: {error!r})"

    def pack(self) -> bytes:
        """Return its pickle."""
        return self._packed or pack(self._kept, down=True)
