"""The last hop: a function is called on each batch ahead of the consumer, in a thread.

::

      |======= the thread =======|                      |===== the consumer =====|
                  .-----------------  room (depth)  <----- took one: room for another
                  v
       next(batches) --> fn ------->  ready (depth)  ----> batch, or its error
                  `-- note of the state ------------------> state_dict()

The two queues are ``queue.SimpleQueue``, whose ``put`` is safe in finalizers and whose ``get`` can
be interrupted by Ctrl-C, with nothing lost. The thread knows the queues, not the iterator, which
can therefore be collected. It is a daemon: nobody waits for longer than a moment for a source that
does not answer.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from minloader._checks import check_int, shown
from minloader._epochs.state import Note, Progress

GRACE = 0.5
"""Seconds that closing waits for the thread, which may be waiting for a batch, or be inside ``fn``.
An idle thread needs none. One that takes longer is left to end by itself: what it still makes is
dropped."""

CLOSED = "this prefetch is closed; make a new one"

A = TypeVar("A")

B = TypeVar("B")


def prefetch(batches: Iterable[A], fn: Callable[[A], B], depth: int = 1) -> Prefetch[B]:
    """Call ``fn`` on each batch, ahead of the consumer, in a thread of this process.

    It is meant for work that is left to do when a batch has arrived here, and that waits more than
    it computes: copying the batch to a device, pinning its memory. ::

        for batch in prefetch(loader, to_gpu):
            train(batch)

    The thread also does the waiting for ``batches``. With a :class:`Loader`, ``state_dict()``, the
    loader's own as well as that of the iterator, counts what the consumer was given, not what
    the thread has read ahead.

    With ``num_workers=0`` it is the thread that makes the batches, and for each it seeds
    ``random``, ``numpy.random`` and torch, which are the consumer's too. If both draw from them,
    use a worker, or ``get_worker_info().rng`` in the dataset.

    Args:
        batches: iterated once, here; for several epochs call ``prefetch`` for each, or give
            ``loader.epochs(n)``. Meanwhile it is the thread's: ask for ``len(loader)`` before.
        fn: called in the thread with each batch.
        depth: most batches that are ready, or being made ready, beyond the one that the
            consumer has. So many more are held in memory.

    Returns:
        An iterator, in the order of ``batches``. What ``batches`` or ``fn`` raises arrives in the
        batch's place; the next ``next()`` goes on, if ``batches`` does.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
        Exception: what ``iter(batches)`` raises.
    """
    return Prefetch(batches, fn, depth)


class Prefetch(Generic[B]):
    """Iterator over batches that a thread makes ready, see :func:`prefetch`.

    Its thread ends with the batches, or when the iterator is collected, as it is after a loop that
    was left early; ``with`` and :meth:`close` say when.
    """

    def __init__(self, batches: Iterable[Any], fn: Callable[[Any], B], depth: int = 1) -> None:
        check_int("depth", depth, 1)
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {shown(fn)}")
        if not hasattr(type(batches), "__iter__") and not hasattr(type(batches), "__getitem__"):
            raise TypeError(f"batches must be iterable, got {shown(batches)}")
        source = iter(batches)
        take = _note_taker(batches)
        self._note = take()  # as of the batch that was given last
        self.progress = Progress(self._note)
        if hasattr(batches, "_note_state"):
            source.progress.nearest = self.progress  # type: ignore[attr-defined]
        self._over = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # several threads may take batches
        self._exchange = _Exchange(source, fn, take, depth)
        # At exit it runs before the loader's, which was made earlier.
        self._end = weakref.finalize(self, self._exchange.close)
        self._exchange.thread.start()

    def __iter__(self) -> Prefetch[B]:
        return self

    def __next__(self) -> B:
        if self._pid != os.getpid():
            raise RuntimeError("the thread of this prefetch is in another process; make one here")
        with self._lock:
            return self._take()

    def _take(self) -> B:
        exchange = self._exchange
        if self._over:
            raise StopIteration
        entry = None if exchange.closed else exchange.ready.get()
        if entry is None or exchange.closed:  # by another thread, meanwhile
            raise RuntimeError(CLOSED)
        self._note = entry.note
        self.progress.note = None if entry.end else entry.note
        if entry.end:
            self._over = True
            self.close()
            raise StopIteration
        exchange.room.put(None)
        if entry.error is None:
            value: B = entry.value
            return value
        try:
            raise entry.error
        finally:
            del entry  # the error's traceback holds this frame

    def state_dict(self) -> Any:
        """Return the state of ``batches`` as of the batch that the consumer was given last.

        Raises:
            TypeError: ``batches`` has no ``state_dict``.
            Exception: what that raised.
        """
        return self._note()

    def close(self) -> None:
        """End the thread, waiting for it for a moment, and drop what is ready.

        Harmless when repeated.
        """
        self._end()

    def __enter__(self) -> Prefetch[B]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _note_state(self) -> Note:
        return self._note


class _Entry(NamedTuple):
    """A batch, or the error in its place, or the end, from the thread to the consumer."""

    value: Any
    error: BaseException | None
    note: Note
    end: bool = False


class _Exchange:
    """The queues between the consumer and the thread, and what the thread works on.

    Attributes:
        ready: entries for the consumer; None wakes it up.
        room: one for each entry that the thread may make, and one to wake it up.
        closed: whether the consumer wants no more.
        thread: not started yet.
    """

    def __init__(
        self,
        source: Iterator[Any],
        fn: Callable[[Any], Any],
        take: Callable[[], Note],
        depth: int,
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._fn = fn
        self._take = take
        self.ready: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.room.put(None)
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="minloader-prefetch", daemon=True)

    def close(self) -> None:
        """End the thread. Called from any thread."""
        self.closed = True
        self.room.put(None)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(GRACE)
        # Normally the last reference: the epoch ends here rather than in the thread.
        self._source = None
        self._drop()

    def _drop(self) -> None:
        """Let go of what was ready when it was closed, or became so since."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.ready.get_nowait()
        self.ready.put(None)

    # --- in the thread, which has no batch in a variable while it waits

    def _run(self) -> None:
        self.room.get()
        while not self.closed and self._hand_over():
            self.room.get()

    def _hand_over(self) -> bool:
        """Make one entry ready. Return whether there may be more."""
        entry = self._make()
        try:
            self.ready.put(entry)
            if self.closed:
                self._drop()
            return not entry.end
        finally:
            del entry  # a traceback in it holds this frame

    def _make(self) -> _Entry:
        value, error = _attempt(next, self._source)
        note, failure = _attempt(self._take)
        try:
            if failure is not None:
                note = partial(_fail, failure)
            if isinstance(error, StopIteration):
                return _Entry(None, None, note, end=True)
            if error is None and not self.closed:
                value, error = _attempt(_apply, self._fn, value)
            return _Entry(value, error, note)
        finally:
            del value, error, failure  # as above


def _attempt(step: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    try:
        return step(*args), None
    except BaseException as error:  # SystemExit too: the consumer's to see
        return None, error


def _apply(fn: Callable[[Any], Any], batch: Any) -> Any:
    try:
        return fn(batch)
    except StopIteration as error:  # it would end the consumer's loop
        raise RuntimeError("fn raised StopIteration") from error


def _note_taker(batches: Any) -> Callable[[], Note]:
    """Return a function that notes the state of the batches, in the thread that draws them."""
    if hasattr(batches, "_note_state"):  # a Loader's, or what stands for one
        take: Callable[[], Note] = batches._note_state
        return take
    if hasattr(batches, "state_dict"):
        return partial(_keep_state, batches.state_dict)
    return lambda: _no_state


def _keep_state(state_dict: Callable[[], Any]) -> Note:
    state = copy.deepcopy(state_dict())  # it may show what goes on changing
    return lambda: state


def _no_state() -> Any:
    raise TypeError(
        "there is no state, since the batches that were given to prefetch have no state_dict; give "
        "it the Loader itself, not an iterator or a generator over it"
    )


def _fail(error: BaseException) -> Any:
    raise error
