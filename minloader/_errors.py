"""The errors of a batch. Each says what happened, to which batch, and what to do.

Wrong arguments raise builtin exceptions (``TypeError``, ``ValueError``); what a dataset raises
reaches the caller as it is. The classes here are for the rest.
"""

from __future__ import annotations

# The functions of signal make enums of what they get.
import _signal  # type: ignore[import-not-found]
import logging
import os
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final

logger = logging.getLogger("minloader")

PACKAGE = os.path.dirname(__file__)
STANDARD = os.path.dirname(os.__file__)
OURS = {PACKAGE, *(os.path.join(PACKAGE, name) for name in ("_epochs", "_worker"))}
OURS |= {os.path.dirname(futures.__file__)}
"""Folders whose code leads to the user's: that of a future which has failed, too."""


class _Skip:
    """The type of :data:`SKIP`, a constant that survives pickling."""

    def __repr__(self) -> str:
        return "minloader.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"


SKIP: Final = _Skip()
"""Leaves something out. A dataset or ``transform`` returns it for a sample that is not to be in its
batch, and ``on_sample_error`` for one that failed. A batch of which no sample is left is skipped,
and one for which ``on_error`` returns it.
"""


class MinloaderError(RuntimeError):
    """Base of the errors that minloader itself defines."""


class BatchError(MinloaderError):
    """One batch failed, or one sample. A callable as ``on_error`` is given one of a batch, one as
    ``on_sample_error`` one of a sample; ``__cause__`` is the original error.

    Raised without a batch, it is of an epoch that gives none since its batches failed. It is also
    raised when more batches and samples have failed than ``max_errors`` allows.

    Attributes:
        ordinal: place of the batch in its epoch, from 0.
        epoch: the epoch it belongs to.
        item: what the sampler yielded for it; of a sample, its index.
        sample: the index, of those in ``item``, of the sample that failed; None if it is not known.
        worker: id of the worker that made it, None if no worker is known.
        pid: process that ran it, None if unknown.
    """

    # Every attribute has a default because unpickling an exception calls its class with
    # ``args`` alone and sets the attributes afterwards.
    def __init__(
        self,
        message: str,
        *,
        ordinal: int = -1,
        epoch: int = -1,
        item: Any = None,
        sample: Any = None,
        worker: int | None = None,
        pid: int | None = None,
    ) -> None:
        super().__init__(message)
        self.ordinal = ordinal
        self.epoch = epoch
        self.item = item
        self.sample = sample
        self.worker = worker
        self.pid = pid


class TransportError(BatchError):
    """A batch cannot be pickled, so that it could not come from its worker."""


class WorkerDied(BatchError):
    """A worker process ended while batches were under way.

    Attributes:
        exitcode: exit code of the worker, negative for a signal, None if unknown.
        stack: Python stack of the worker when it crashed, of a segmentation fault, say; "" if there
            was none.
    """

    def __init__(
        self, message: str, *, exitcode: int | None = None, stack: str = "", **batch: Any
    ) -> None:
        super().__init__(message, **batch)
        self.exitcode = exitcode
        self.stack = stack


class BatchTimeout(BatchError):
    """A batch ran longer than ``timeout``.

    Attributes:
        stack: Python stack of the worker when its time was up; "" if it could not be had.
    """

    def __init__(self, message: str, *, stack: str = "", **batch: Any) -> None:
        super().__init__(message, **batch)
        self.stack = stack


class OriginalTraceback(Exception):
    """Carries a traceback as text, such as a worker's: the cause of an error raised here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def summary(error: BaseException) -> str:
    """Return the type and the message of an error."""
    text = _formatted(traceback.format_exception_only, error)
    # None of a SyntaxError, say, whose line is no string.
    return (text or f"{type(error).__qualname__}: it cannot be printed").strip()


def printed(error: BaseException) -> str:
    """Return an error as Python prints it, without frames of ours that lead to the user's."""
    frames = first = error.__traceback__
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) in OURS:
        frames = frames.tb_next
    text = _formatted(traceback.format_exception, type(error), error, frames or first)
    return text or "".join(traceback.format_tb(frames or first)) + summary(error)


def _formatted(function: Callable[..., list[str]], *args: Any) -> str | None:
    """Return what a function makes of an error; None if that fails, by the error's own code."""
    try:
        return "".join(function(*args))
    except Exception as failure:
        if breaks_in(failure):
            raise
        return None


def breaks_in(error: BaseException) -> bool:
    """Return whether an error comes from outside of the code that it was met in, as Ctrl-C does.

    What the handler of another signal has raised does, too: most are time limits.
    """
    return not isinstance(error, Exception) or bool(file_broken_into(error))


def is_own(error: BaseException) -> bool:
    """Return whether an error is of the code that it was met in, be it ``sys.exit()``."""
    return isinstance(error, SystemExit) or not breaks_in(error)


def file_broken_into(error: BaseException) -> str:
    """Return the file whose code was interrupted by a signal, the handler of which has raised an
    error; "" if none has. What the standard library does is for whoever called it.
    """
    handlers = map(_signal.getsignal, range(1, _signal.NSIG))
    codes = {getattr(each, "__code__", None) for each in handlers} - {None}
    file = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return file
        name = frame.f_code.co_filename
        if not name.startswith(STANDARD) or "site-packages" in name:
            file = name
    return ""


def not_the_end(error: Exception, who: str) -> Exception:
    """Return an error as it can be raised in a loop, which StopIteration would end silently.

    Args:
        error: that code of the user's has raised.
        who: that code.
    """
    if not isinstance(error, StopIteration):
        return error
    without_frames(error)
    refusal = RuntimeError(f"{who} raised StopIteration")
    refusal.__cause__ = error
    return refusal


def without_frames(error: BaseException) -> None:
    """Have an error that is to wait for its turn carry its traceback as text. May be repeated.

    Frames lead to those that called them, and so to the iterator, which keeps the error: neither
    would go before the garbage collector comes.
    """
    if error.__traceback__ is not None and not isinstance(error.__cause__, OriginalTraceback):
        BaseException.__setattr__(error, "__cause__", OriginalTraceback(printed(error)))
    BaseException.__setattr__(error, "__context__", None)
    BaseException.__setattr__(error, "__traceback__", None)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if the error takes one."""
    try:
        error.add_note(note)
    except Exception as refusal:  # a frozen dataclass, say: the error matters more than the note
        if breaks_in(refusal):
            raise
        logger.debug("%s; the error takes no notes (%s)", note, refusal)
