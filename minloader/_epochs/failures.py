"""A batch that failed: the error that the user sees, and what ``on_error`` makes of it.

All of it runs in the consumer's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from minloader._checks import ADVICE, shown
from minloader._errors import SKIP, BatchError, BatchTimeout, OriginalTraceback, WorkerDied
from minloader._insight.counters import ERRORS_KEPT, Counters
from minloader._memory import pickling
from minloader._pools.base import Death
from minloader._worker.messages import Failure

logger = logging.getLogger("minloader")

OnError = Literal["raise", "skip", "skip_sample"] | Callable[[BatchError], Any]


class Raised(NamedTuple):
    """An error that is to be raised in the place of a batch: the batch's, or the sampler's.

    It is raised elsewhere: the frames of an error's traceback must not hold the error, or the
    loader would live until the garbage collector finds the cycle.
    """

    error: BaseException


def handle(
    failure: Failure,
    ordinal: int,
    epoch: int,
    item: Any,
    worker: int,
    pid: int,
    on_error: OnError,
) -> Any:
    """Do with a failed batch what ``on_error`` says.

    Args:
        failure: what happened.
        ordinal: what the user is told for the place of the batch in its epoch.
        epoch: number of the epoch.
        item: that the sampler yielded for the batch.
        worker: id of the worker; below 0 if there was none of ours.
        pid: its process; -1 if there was none.
        on_error: as the user gave it.

    Returns:
        What takes the batch's place: SKIP, another batch, or what to raise. That is the original
        error, with a note that names the batch; or a BatchError in place of what would end the loop
        or the program (StopIteration, SystemExit, KeyboardInterrupt).
    """
    known_worker, known_pid = (value if value >= 0 else None for value in (worker, pid))
    who = "a worker" if known_worker is None else f"worker {known_worker}"
    where = "in the parent" if known_pid is None else f"{who} (pid {known_pid})"
    sample = load(failure.sample)
    what = f"{named(ordinal, epoch, item, sample)}, {where}"
    what += failure.stage and f", {failure.stage}"
    place = {"ordinal": ordinal, "epoch": epoch, "item": item}
    place |= {"worker": known_worker, "pid": known_pid, "sample": sample[0] if sample else None}
    remote = OriginalTraceback(failure.traceback) if failure.traceback else None

    error = load(failure.error)
    if error is not None and remote is not None:
        BaseException.__setattr__(error, "__cause__", remote)  # frozen dataclasses have their own
    advice = ADVICE.get(type(error).__name__, "")
    advice = advice and f" ({advice})"
    if isinstance(error, BatchError):  # our own, which does not know its place yet
        vars(error).update(place)
        report: BatchError = error
    else:
        report = BatchError(f"{what}: {failure.summary}{advice}", **place)
        report.__cause__ = error or remote

    skippable = isinstance(error, Exception | SystemExit | None) and not failure.fatal
    if on_error in ("raise", "skip_sample") or not skippable:
        # One that cannot be carried; or that would end the loop as if the epoch were over, or the
        # program without a word.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            return Raised(report)
        add_note(error, f"minloader: {what}{advice}")
        return Raised(error)
    if on_error == "skip":
        logger.warning("skipped %s: %s", what, failure.summary)
        return SKIP
    assert callable(on_error)
    try:
        return on_error(report)
    except StopIteration as stop:  # it would end the loop as if the epoch were over
        raise RuntimeError("on_error raised StopIteration") from stop


def named(ordinal: int, epoch: int, item: Any, sample: Any = ()) -> str:
    """Return how messages name a batch, and in it the sample, whose index is in a tuple."""
    which = f", sample {shown(sample[0])}" if sample else ""
    return f"batch {ordinal} of epoch {epoch}, item {shown(item)}{which}"


def sample_at(item: Any, place: int) -> tuple[Any, ...]:
    """Return the index at a place of an item, in a tuple; () if it is not known."""
    if place < 0 or isinstance(item, str | bytes | Mapping):
        return ()
    try:
        index = list(item)[place]
    except (TypeError, IndexError):
        return ()
    return () if isinstance(index, list) else (index,)  # a list of batches


def too_many(counters: Counters, most: int) -> str:
    """Return what to say if more has failed than may."""
    first = [
        f"  epoch {epoch}, batch {batch}, sample {shown(sample)}: {error}"
        for epoch, batch, sample, error in [*counters.last_errors][:5]
    ]
    failed = counters.errors.failed
    which = "these" if failed <= ERRORS_KEPT else f"the last {ERRORS_KEPT}"
    return (
        f"{failed} batches and samples have failed, more than max_errors={most}; the first of "
        f"{which}:\n" + "\n".join(first)
    )


def load(part: Any) -> Any:
    """Return an error, or the index of a sample, as it was before it was packed; None if lost."""
    if type(part) is not bytes:
        return part
    try:
        return pickling.unpack(part)
    except Exception:  # its class exists in the worker only: the text must do
        return None


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if the error takes one."""
    try:
        error.add_note(note)
    except Exception as refusal:  # a frozen dataclass, say: the error matters more than the note
        logger.debug("%s; the error takes no notes (%s)", note, refusal)


def tell_death(death: Death, ordinal: int, epoch: int, item: Any) -> None:
    """Say in the log which batch a worker has died with."""
    logger.warning(
        "worker %d (pid %d) died: %s; it was making %s; the workers are replaced, and what was "
        "under way is made again",
        *(death.worker, death.pid, death.cause),
        named(ordinal, epoch, item, sample_at(item, death.place)),
    )


def lethal(death: Death, ordinal: int, epoch: int, item: Any, tries: int) -> BatchError:
    """Return the error for a batch that no worker survives."""
    what = named(ordinal, epoch, item, sample_at(item, death.place))
    times = f" (tried {tries} times)" if tries > 1 else ""
    if death.stack is None:
        crash = death.crash and f"; it was at\n{death.crash}"
        return WorkerDied(
            f"a worker (pid {death.pid}) died while it made {what}: {death.cause}{times}{crash}",
            exitcode=death.exitcode,
            stack=death.crash,
        )
    stack = death.stack or "(the worker did not answer)\n"
    return BatchTimeout(
        f"{what}, took longer than timeout allows{times}; worker {death.worker} (pid {death.pid}) "
        f"was at\n{stack}",
        stack=death.stack,
    )
