"""What all iterators of a loader do: count the consumer's time, and serve one thread at a time.

::

    threads --- next() ---> lock ---> _take(): a batch of this epoch
                              |            | no more
                              |            v
                              `-----> _next_epoch(), or the end
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from minloader._checks import refuse_copies
from minloader._epochs.failures import OnError
from minloader._epochs.state import Progress
from minloader._insight.counters import Counters
from minloader._pools.base import Pool
from minloader._worker import lifetimes

CLOSED = "this Loader is closed; make a new one"


@dataclass(eq=False, repr=False)
class Settings:
    """Settings that all epochs of a loader share.

    Attributes:
        depth: most tasks under way; 0 if submitting one runs it.
        in_order: whether batches come in the sampler's order.
        retries: how often a batch is tried again whose worker died.
        patience: seconds to wait before looking whether a worker is stuck.
        memory_limit: bytes that a worker may have for itself; None for any.
        on_error: what to do with a batch that failed.
        counters: what is counted.
        chunk: how many batches like those made last fit into a task.
        closed: whether the loader is.
        told_empty: whether the log has said that shards of a stream gave no batch.
        compared: whether the first batches of two shards of a stream were compared.
    """

    depth: int
    in_order: bool
    retries: int
    patience: float
    memory_limit: int | None
    on_error: OnError
    counters: Counters
    chunk: int = 1
    closed: bool = False
    told_empty: bool = False
    compared: bool = False


@dataclass(eq=False, repr=False)
class TimedIterator(ABC):
    """Iterator over batches that counts the consumer's time.

    Args:
        settings: what the loader's epochs have in common.
        where: gives the pool that makes the batches, which may become another one.
        coming: a ledger for each epoch, made when the epoch begins.
        progress: how far the consumer has come.
        owner: the loader, which must live as long as this.
        endless: whether epochs never cease to come.
    """

    settings: Settings
    where: Callable[..., Pool]
    coming: Iterator[Any]
    progress: Progress
    owner: Any
    endless: bool = field(default=False, kw_only=True)
    # Reentrant: on_error may take another batch.
    _lock: Any = field(default_factory=threading.RLock, init=False)
    _process: object = field(default_factory=lambda: lifetimes.process, init=False)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the consumer is in."""
        return self.progress.ledgers[0].epoch

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Tasks under way."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the first epoch, and have as many tasks under way as may be.

        Raises:
            Exception: what beginning to read the sampler raised.
        """

    @abstractmethod
    def _take(self) -> Any:
        """Return the next batch of the epoch that the consumer is in.

        Raises:
            StopIteration: there is none.
        """

    @abstractmethod
    def _next_epoch(self) -> None:
        """Let the consumer go on to the next epoch.

        Raises:
            StopIteration: there is none.
        """

    __reduce__ = refuse_copies

    def __iter__(self) -> TimedIterator:
        return self

    def exclusive(self) -> Any:
        """Return a context manager that keeps other threads from taking batches meanwhile.

        Raises:
            RuntimeError: this process is a fork of the one that began the epoch.
        """
        if self._process is not lifetimes.process and (self.settings.depth or self.in_flight):
            # The workers answer to the other process, and a thread there may hold the lock.
            raise RuntimeError(
                "this iterator was begun in the process of which this one is a fork, and its "
                "batches arrive there; call iter(loader) in this process, which starts workers "
                "of its own, or fork before you iterate"
            )
        return self._lock

    def __next__(self) -> Any:
        # Counted here rather than by calls: a tiny batch takes some 10 µs in all.
        counters = self.settings.counters
        with self._lock if self._process is lifetimes.process else self.exclusive():
            begin = perf_counter()
            if counters.left:
                counters.consumer += begin - counters.left
            try:
                while True:
                    try:
                        batch = self._take()
                        break
                    except StopIteration:
                        self._next_epoch()
            except BaseException as error:
                counters.leave(begin, working=not isinstance(error, StopIteration))
                raise
            counters.left = now = perf_counter()
            counters.wait += now - begin
            return batch

    def _check_end(self) -> None:
        """Refuse to go through endless epochs if the one that has just ended gave no batch.

        Raises:
            StopIteration: the last epoch is over, and the consumer was told so.
        """
        ledger = self.progress.ledgers[0]
        if ledger.over:
            raise StopIteration
        if self.endless and not ledger.fruitful:
            ledger.over = True
            raise ValueError(
                f"epoch {ledger.epoch} has no batches, and epochs() without a number would go "
                "through such for ever; look at the sampler, or give a number"
            )
