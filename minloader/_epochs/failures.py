"""What failed: the error that the user sees, what ``on_error`` makes of it, and how much may fail.

All of it runs in the consumer's thread. What ``on_sample_error`` makes of a sample is done where
that is made, by ``_worker/batch_maker.py``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minloader._epochs.counters import ERRORS_KEPT, plain, track_of
from minloader._epochs.options import Shared
from minloader._epochs.position import Position
from minloader._epochs.task import Delivery
from minloader._errors import (
    SKIP,
    BatchError,
    BatchTimeout,
    OriginalTraceback,
    WorkerDied,
    add_note,
    breaks_in,
)
from minloader._formats import ADVICE, brief_repr
from minloader._memory import pickling
from minloader._pools.ticket import Death
from minloader._worker.messages import Failure, Reply, leave_out

logger = logging.getLogger("minloader")

FEW = 10
"""Of so many failures the log says each. (Some data sets have a million bad samples.)"""


class BatchLabel(NamedTuple):
    """What messages say of a batch: as a string, which one it is.

    Attributes:
        ordinal: in its epoch.
        epoch: number of the epoch.
        item: what it is made from.
        sample: the index of the sample in it that is meant, in a tuple; () if none is known.
    """

    ordinal: int
    epoch: int
    item: Any
    sample: tuple[Any, ...]

    def __str__(self) -> str:
        sample = ""
        if self.sample and self.sample[0] is not self.item:
            sample = f", sample {brief_repr(self.sample[0])}"
        return f"batch {self.ordinal} of epoch {self.epoch}, item {brief_repr(self.item)}{sample}"


class Failures:
    """What has failed in an epoch, and what becomes of it.

    The same sample counts once, and the same batch, unless very many others have failed since.

    Args:
        shared: what all epochs of the loader share.
        start: where the epoch begins.

    Attributes:
        count: how many samples have failed, and batches of which it is not known by which sample.
    """

    def __init__(self, shared: Shared, start: Position) -> None:
        self.count = start.failed
        self._shared = shared
        self._epoch = start.epoch
        # What the last ones are recognized by, as many as a state has errors.
        self._last_keys: dict[str, None] = {}
        if not start.failed:
            return
        # A state has those that were before it; here there may be others since.
        before: Counter[int] = Counter()
        for epoch, batch, sample, _ in start.errors or shared.counters.last_errors:
            if epoch == self._epoch:
                self._last_keys[_key(batch, sample, before[batch])] = None
                before[batch] += 1

    def settle(
        self,
        delivery: Delivery,
        batch: int,
        samples: Sequence[tuple[Any, str]],
        call: Callable[..., Any],
    ) -> None:
        """Count what has failed of a batch, and do with it what ``on_error`` says.

        Args:
            delivery: the batch, or what it has failed with. It is told what takes its place.
            batch: its ordinal in the epoch.
            samples: index and error of those that failed.
            call: calls a function that runs the user's code.
        """
        delivery.has_failed = True
        for number, (sample, text) in enumerate(samples):
            delivery.error = self._add(batch, sample, text, number)
            if self._shared.job.options.on_sample_error is leave_out:
                self._report_left_out(sample, batch, text)
        if type(delivery.outcome) is Failure:
            self._handle(delivery, batch, len(samples), call)
        if delivery.error is not None:
            delivery.outcome = None

    def _handle(
        self, delivery: Delivery, batch: int, number: int, call: Callable[..., Any]
    ) -> None:
        """Do with a failed batch what ``on_error`` says.

        Args:
            delivery, batch, call: likewise.
            number: how many samples of it are known to have failed before.
        """
        failure = delivery.outcome
        task = delivery.task
        reply = task.reply
        assert reply is not None
        where = track_of(reply.worker, reply.pid) if reply.pid >= 0 else "consumer"
        labels = {"batch": batch, "epoch": self._epoch, "error": failure.summary}
        self._shared.counters.record(where, "failed", time.perf_counter(), 0.0, labels)
        if not failure.fatal:
            delivery.error = self._add(batch, failure.sample, failure.summary, number)
            if delivery.error is not None:
                return
        item = task.item(delivery.ordinal - task.first)
        try:
            delivery.outcome, delivery.error = call(self._replace, failure, batch, item, reply)
        except Exception as error:  # of the user's function: it takes the place of the batch
            if breaks_in(error):
                raise
            delivery.error = error

    def _add(self, batch: int, sample: Any, text: str, number: int) -> BatchError | None:
        """Count what has failed; return an error if that is too many.

        Args:
            batch: ordinal of the batch in the epoch.
            sample: its index, in a tuple, maybe packed; or that is empty.
            text: the error.
            number: of the error among those of the batch.
        """
        index = (unpacked(sample) or (None,))[0]
        counters = self._shared.counters
        counters.fail(self._epoch, batch, index, text)
        key = _key(batch, index, number)
        if key not in self._last_keys:
            self._last_keys[key] = None
            self.count += 1
        if len(self._last_keys) > ERRORS_KEPT:
            del self._last_keys[next(iter(self._last_keys))]
        most = self._shared.options.max_errors
        if most is None or self.count <= most:
            return None
        errors = [each for each in counters.last_errors if each[0] == self._epoch]
        first = [
            f"  batch {each[1]}, sample {brief_repr(each[2])}: {each[3]}" for each in errors[:5]
        ]
        which = "these" if self.count <= len(errors) else "those that are known"
        return BatchError(
            f"{self.count} of the batches and samples of epoch {self._epoch} failed, more than "
            f"max_errors={most} allows; the first of {which}:\n" + "\n".join(first),
            ordinal=batch,
            epoch=self._epoch,
            sample=index,
        )

    def _replace(
        self, failure: Failure, batch: int, item: Any, reply: Reply
    ) -> tuple[Any, BaseException | None]:
        """Return what ``on_error`` puts in the place of a failed batch.

        Args:
            failure: what happened.
            batch: ordinal of the batch in the epoch.
            item: that the sampler yielded for the batch.
            reply: that the failure came with.

        Returns:
            What takes the batch's place: SKIP or another batch; or what to raise. That is the
            original error, with a note that names the batch; or a BatchError in place of what would
            end the loop or the program (StopIteration, SystemExit, KeyboardInterrupt). It is raised
            elsewhere: the frames of an error's traceback must not hold the error, or the loader
            would live until the garbage collector finds the cycle.
        """
        on_error = self._shared.options.on_error
        worker = reply.worker if reply.worker >= 0 else None
        pid = reply.pid if reply.pid >= 0 else None
        who = "a worker" if worker is None else f"worker {worker}"
        where = "in the parent" if pid is None else f"{who} (pid {pid})"
        sample = unpacked(failure.sample) or ()
        label = BatchLabel(ordinal=batch, epoch=self._epoch, item=item, sample=sample)
        what = f"{label}, {where}"
        what += failure.when and f", {failure.when}"
        attributes = {
            "ordinal": batch,
            "epoch": self._epoch,
            "item": item,
            "worker": worker,
            "pid": pid,
            "sample": sample[0] if sample else None,
        }
        remote = OriginalTraceback(failure.traceback) if failure.traceback else None

        error = unpacked(failure.error)
        if error is not None and remote is not None:
            BaseException.__setattr__(
                error, "__cause__", remote
            )  # frozen dataclasses have their own
        advice = ADVICE.get(type(error).__name__, "")
        if isinstance(error, TypeError | LookupError):
            from minloader._diagnosis.mistakes import item_meant

            advice = item_meant(error, self._shared.job, item)
        advice = advice and f" ({advice})"
        # Our own, which does not know yet which batch it is of: a loader's that the dataset reads
        # does.
        if isinstance(error, BatchError) and error.ordinal < 0:
            vars(error).update(attributes)
            report: BatchError = error
        else:
            report = BatchError(f"{what}: {failure.summary}{advice}", **attributes)
            report.__cause__ = error or remote

        skippable = isinstance(error, Exception | SystemExit | None) and not failure.fatal
        if on_error == "raise" or not skippable:
            # One that cannot be carried; or that would end the loop as if the epoch were over, or
            # the program without a word.
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                return None, report
            add_note(error, f"minloader: {what}{advice}")
            return None, error
        if on_error == "skip":
            self._say(f"skipped {what}: {failure.summary}")
            return SKIP, None
        assert callable(on_error)
        try:
            return on_error(report), None
        except StopIteration as stop:  # it would end the loop as if the epoch were over
            raise RuntimeError("on_error raised StopIteration") from stop

    def _report_left_out(self, sample: Any, batch: int, error: str) -> None:
        """Say in the log that a sample was left out of its batch.

        Here, where it is counted: its batch may be made again, if another one takes a worker along.
        """
        index = unpacked(sample)
        what = f"sample {brief_repr(index[0])}" if index else f"a sample of batch {batch}"
        self._say(f"left out {what}: {error}")

    def _say(self, line: str) -> None:
        """Say in the log what has failed: of the first few, and of each tenfold as many."""
        count = self._shared.counters.failed
        if count < FEW:
            logger.warning("%s", line)
        elif str(count).strip("0") == "1":
            logger.warning(
                "%s; %d have failed by now; the next line comes at ten times as many, "
                "loader.stats.errors counts all",
                line,
                count,
            )


def _key(batch: int, sample: Any, number: int) -> str:
    return f"batch {batch}, {number}" if sample is None else f"sample {plain(sample)!r}"


def unpacked(part: Any) -> Any:
    """Return an error, or the index of a sample, as it was before it was packed; None if lost."""
    if type(part) is not bytes:
        return part
    try:
        return pickling.unpack(part)
    except Exception as error:  # its class exists in the worker only: the text must do
        if breaks_in(error):
            raise
        return None


def death_error(death: Death, batch: BatchLabel, tries: int) -> BatchError:
    """Return the error for a batch, or a sample, that no worker survives."""
    times = f" (tried {tries} times)" if tries > 1 else ""
    if death.stack is None:
        crash = death.crash and f"; it was at\n{death.crash}"
        return WorkerDied(
            f"a worker (pid {death.pid}) died while it made {batch}: {death.cause}{times}; "
            f"on_sample_error='skip' leaves such samples out{crash}",
            exitcode=death.exitcode,
            stack=death.crash,
        )
    stack = death.stack or "(the worker did not answer)\n"
    return BatchTimeout(
        f"{batch}, took longer than timeout allows{times}; set a longer timeout, or have "
        f"on_sample_error='skip' leave such samples out; worker {death.worker} (pid {death.pid}) "
        f"was at\n{stack}",
        stack=death.stack,
    )
