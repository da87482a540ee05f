"""How long an examination takes: worked out after its first trial, and kept to from then on.

Most of it may be the start of workers, again and again, which takes as long as it takes. What can
give way is how long each trial runs, how many batches the audit compares, and its last runs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minloader._memory.limits import processors

SHORTEST, LONGEST = 2 / 3, 2.0
"""Shares of the seconds that were asked for between which a trial may be cut or extended."""

GRACE = 5.0
"""Seconds that it may take longer than was said, in any case."""

FEWEST, MOST = 3, 20
"""Batches of an epoch that the audit compares."""


@dataclass
class Schedule:
    """The times of one examination.

    Attributes:
        seconds: how long a trial should run.
        trials: numbers of workers of the trials to come.
        audit: numbers of workers of the runs of the audit, see :func:`audit_runs`.
        clock: gives the time.
        total: seconds in all; 0 until the first trial is over.
    """

    seconds: float
    trials: list[int]
    audit: list[int]
    clock: Callable[[], float] = time.perf_counter
    total: float = 0.0
    _making: float = 0.0  # seconds of make_loader
    _batch: float = 0.0  # seconds of work a batch
    _starts: list[float] = field(default_factory=list)  # seconds of starting, for each worker

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        return min(0.99, (self.clock() - self._began) / self.total) if self.total else 0.0

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.total - (self.clock() - self._began)

    def learn(self, workers: int, making: float, starting: float, batch: float) -> None:
        """Learn from a trial, which is not among those to come any more.

        Args:
            workers: number of workers.
            making: seconds until there was a loader.
            starting: seconds from then to its first batch, and to close it in the end.
            batch: seconds of work that a batch took.
        """
        self._making, self._batch = making, batch
        if workers:
            self._starts.append(starting / _turns(workers))
        if not self.total:
            fixed = self._fixed(self.trials) + self._audit_seconds()
            self.total = self.clock() - self._began + fixed + len(self.trials) * self.seconds

    def next_seconds(self) -> float:
        """Return how long the next of the trials to come should run."""
        if not self.total:
            return self.seconds
        each = (self.left - self._fixed(self.trials) - self._audit_seconds()) / len(self.trials)
        return max(SHORTEST * self.seconds, min(LONGEST * self.seconds, each))

    def is_over(self, workers: int) -> bool:
        """Return whether another run of the audit would be too late by more than a fifth."""
        late = self._fixed([workers]) - self.left
        return late > max(GRACE, self.total / 5)

    def batches(self) -> int:
        """Return how many batches of an epoch the audit should compare."""
        return _batches(self.left - self._fixed(self.audit), self._per_batch())

    def _fixed(self, starts: list[int]) -> float:
        """Return the seconds that it takes to make and start loaders with so many workers."""
        start = statistics.fmean(self._starts or [0.0])
        starting = (start * _turns(workers) if workers else self._batch for workers in starts)
        return len(starts) * self._making + sum(starting)

    def _per_batch(self) -> float:
        """Return the seconds of the audit, without starts, for each batch of its two epochs."""
        return sum(2 * self._batch / max(1, min(n, processors())) for n in self.audit)

    def _audit_seconds(self) -> float:
        """Return the seconds of an audit in which no run takes longer than half a trial."""
        batches = _batches(self.seconds / 4, self._batch)
        return self._fixed(self.audit) + batches * self._per_batch()


def _batches(seconds: float, each: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / (each or 1e-9))))


def _turns(workers: int) -> float:
    """Return how many times as long as one worker some workers take to start.

    Two processors are often the halves of one, and do not start two in the time of one.
    """
    return max(1.0, 1.5 * workers / processors())


def audit_runs(workers: Iterable[int]) -> list[int]:
    """Return the numbers of workers of the runs of ``check_reproducible``, roughly."""
    few, *more = counts = sorted(set(workers))
    most = counts[-1]
    resumes = itertools.islice(itertools.cycle(counts), 4)
    return [few, few, *more, most, *resumes, most, most]  # the last: a worker is killed
