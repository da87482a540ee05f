"""The last hop: a function is called on each batch ahead of the consumer, in a thread.

::

      |=========== the consumer ===========|           |=== the thread ===|
       next(batches) --> entry --> queue ------------------> fn(batch)
                           | note of the state                  |
                           v                                    v
                    [ entry ][ entry ][ entry ] <--------- what it made, and the bell
                        | popleft, wait
                        v
                      batch, or its error

The consumer takes batches from the source, in ``next``. The thread only runs ``fn``: it knows the
queue, not the iterator, which can therefore be collected. It is a daemon: nobody waits for longer
than a moment for a function that does not return. The deque of entries is the account, as in
``_epochs/lane.py``: an entry is in it before its batch is taken from the source, until its result
is in the consumer's hands.
"""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from minloader._checks import B, check_int, copied, shown
from minloader._epochs.pending import Bell, Handover
from minloader._epochs.state import Note
from minloader._errors import without_frames

GRACE = 0.5
"""Seconds that closing waits for the thread, which may be inside ``fn``. An idle thread needs none.
One that takes longer is left to end by itself: what it still makes is dropped."""

CLOSED = "this prefetch is closed; make a new one"

A = TypeVar("A")


def prefetch(batches: Iterable[A], fn: Callable[[A], B], depth: int = 1) -> Prefetch[B]:
    """Call ``fn`` on each batch, ahead of the consumer, in a thread of this process.

    It is meant for work that is left to do when a batch has arrived here, and that waits more than
    it computes: copying the batch to a device, pinning its memory. The batches themselves are
    taken from ``batches`` in the consumer's thread. ::

        for batch in prefetch(loader, to_gpu):
            train(batch)

    With a :class:`Loader`, ``state_dict()``, the loader's own as well as that of the iterator,
    counts what the consumer was given, not what was taken ahead.

    Args:
        batches: iterated once, here; for several epochs call ``prefetch`` for each, or give
            ``loader.epochs(n)``. Each must have memory of its own: with ``num_workers=0`` a dataset
            must not fill the same buffer again.
        fn: called in the thread with each batch.
        depth: most batches that are ready, or being made ready, beyond the one that the
            consumer has. So many more are held in memory.

    Returns:
        An iterator, in the order of ``batches``. What ``batches`` or ``fn`` raises arrives in the
        batch's place, that of ``batches`` with its traceback as text; the next ``next()`` gives the
        next, if ``batches`` does.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
        Exception: what ``iter(batches)`` raises.
    """
    return Prefetch(batches, fn, depth)


class Prefetch(Handover[B]):
    """Iterator over batches that a thread makes ready, see :func:`prefetch`.

    Its thread ends with the batches, or when the iterator is collected, as it is after a loop that
    was left early; ``with`` and :meth:`close` say when.
    """

    def __init__(self, batches: Iterable[Any], fn: Callable[[Any], B], depth: int = 1) -> None:
        super().__init__()
        self._depth = check_int("depth", depth, 1)
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {shown(fn)}")
        if not hasattr(type(batches), "__iter__") and not hasattr(type(batches), "__getitem__"):
            raise TypeError(f"batches must be iterable, got {shown(batches)}")
        self._source: Iterator[Any] | None = iter(batches)
        self._keep: Callable[[Any], Any] | None = getattr(fn, "keep", None)
        self._take = _note_taker(batches, self._source)
        self._given = self._take()  # the state as of the batch that was given last
        self._entries: deque[_Entry] = deque()
        self._is_drawn = False  # whether the source has no more
        self._is_over = False  # whether the consumer was told so
        self._is_read = False  # whether another prefetch takes batches ahead of its consumer
        self._tell(self._given)
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(fn, self._tasks), name="minloader-prefetch", daemon=True
        )
        # At exit it runs before the loader's, which was made earlier.
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()

    def _check_process(self) -> None:
        raise RuntimeError("the thread of this prefetch is in another process; make one here")

    def _next(self, taken: list[Any]) -> B:
        if self._is_over:
            raise StopIteration
        if not self._end.alive:
            raise RuntimeError(CLOSED)
        while not self._is_drawn and self._may_draw():
            self._draw()
        if not self._entries:
            self._tell(None)  # first: the state is that of the end
            self._given = self._take()
            self._is_over = True
            self.close()
            raise StopIteration
        entry = self._entries[0]
        error = entry.wait()
        value = None if error is not None else self._received(entry.value)
        taken.extend((entry, self._given))
        del entry
        self._entries.popleft()
        self._given = taken[0].note
        self._tell(self._given)
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _may_draw(self) -> bool:
        """Whether to take another batch now: one that has come, if others are on their way."""
        entries = self._entries
        if not entries or not entries[-1].is_ready:
            return True
        return len(entries) <= self._depth and getattr(self._source, "is_ready", _always)()

    def is_ready(self) -> bool:
        """Return whether ``next`` need not wait."""
        return not self._entries or self._entries[0].is_done

    def _put_back(self, taken: list[Any]) -> None:
        entry, self._given = taken
        if entry not in self._entries:
            self._entries.appendleft(entry)
        self._tell(self._given)

    def _draw(self) -> None:
        """Take another batch from the source, or go on with that where an interrupt came."""
        if self._source is None:
            raise RuntimeError(CLOSED)
        entries = self._entries
        if not entries or entries[-1].is_ready:
            entries.append(_Entry())
        entry = entries[-1]
        if not entry.is_drawn:
            if not entry.batch and entry.error is None:
                try:
                    # It goes into the entry in one step, which no interrupt can come between.
                    entry.batch.extend(map(next, repeat(self._source, 1)))
                except Exception as error:
                    entry.error = error
                if not entry.batch and entry.error is None:
                    self._is_drawn = True
                    entries.pop()
                    return
            if self._keep is not None:
                entry.batch[:] = map(self._keep, entry.batch)
            entry.note = self._note_drawn()
            entry.is_drawn = True  # from here on the thread may empty it
        if entry.error is not None:
            without_frames(entry.error)
        else:
            self._tasks.put(entry)  # twice, if an interrupt comes now: the thread makes it once
        entry.is_ready = True

    def _note_drawn(self) -> Note:
        try:
            return self._take()
        except Exception as error:
            without_frames(error)
            return partial(_fail, error)

    def _received(self, value: Any) -> Any:
        """Make the last of a batch, in the consumer's thread."""
        return value

    def state_dict(self) -> Any:
        """Return the state of ``batches`` as of the batch that the consumer was given last.

        Raises:
            TypeError: ``batches`` has no ``state_dict``.
            Exception: what that raised.
        """
        return self._given()

    def close(self) -> None:
        """End the thread, waiting for it for a moment, and drop what is ready.

        Harmless when repeated.
        """
        self._end()
        for entry in copied(self._entries):
            entry.batch.clear()  # the thread need not make it
            entry.finish(RuntimeError(CLOSED))  # another thread may wait for it
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_over:  # else the loader is still told what the consumer was given
                    self._source = None
                    self._take = _no_state  # which leads to the source, too
                self._entries.clear()
                self._is_drawn = self._is_over
            finally:
                self._lock.release()

    def __enter__(self) -> Prefetch[B]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what the loader, and another prefetch, see of it

    def note_handed_over(self) -> Note:
        """Note the state as of the batch that was given last."""
        return self._given

    def set_behind(self, note: Note | None) -> None:
        """Have the loader's state be that of a consumer that another prefetch serves."""
        self._is_read = True
        if self._source is not None and hasattr(self._source, "set_behind"):
            self._source.set_behind(note)

    def _tell(self, note: Note | None) -> None:
        source = self._source
        if source is not None and hasattr(source, "set_behind") and not self._is_read:
            source.set_behind(note)


class _Entry:
    """A batch on its way through the thread.

    Attributes:
        batch: as the source gave it, in a list that is empty before; the thread empties it.
        error: what the source raised in its place.
        note: the state as of this batch.
        made: what ``fn`` raised, and what it returned. The first of them counts: from the thread,
            or from ``close()``.
        is_drawn: whether the first three are there.
        is_ready: whether the thread has it, too.
    """

    def __init__(self) -> None:
        self.batch: list[Any] = []
        self.error: Exception | None = None
        self.note: Note = _no_state
        self.made: list[tuple[BaseException | None, Any]] = []
        self._bell = Bell()  # no future: Ctrl-C within one of its locks would leave it taken
        self.is_drawn = self.is_ready = False

    def finish(self, error: BaseException | None, value: Any = None) -> None:
        """Say what has come of the batch. From any thread."""
        self.made.append((error, value))
        self._bell.ring()

    def wait(self) -> BaseException | None:
        """Wait until ``fn`` is done; return its error, or that of the source."""
        while self.error is None and not self.made:
            self._bell.wait(-1)
        return self.error or self.made[0][0]

    @property
    def is_done(self) -> bool:
        return self.is_ready and (self.error is not None or bool(self.made))

    @property
    def value(self) -> Any:
        return self.made[0][1]


def _run(fn: Callable[[Any], Any], tasks: queue.SimpleQueue[Any]) -> None:
    """Call the function on each batch. Runs in the thread, which has none while it waits."""
    while (entry := tasks.get()) is not None:
        with suppress(IndexError):  # it was made already, or is not wanted any more
            batch = [entry.batch.pop()]
            entry.finish(*_attempt(fn, batch))
        del entry


def _attempt(fn: Callable[[Any], Any], batch: list[Any]) -> tuple[BaseException | None, Any]:
    try:
        return None, fn(batch.pop())
    except StopIteration as error:  # it would end the consumer's loop
        stop = RuntimeError("fn raised StopIteration")
        stop.__cause__ = error
        return stop, None
    except BaseException as error:  # SystemExit too: the consumer's to see
        return error, None


def _end(tasks: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    """End the thread. Called from any thread."""
    tasks.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(GRACE)


def _note_taker(batches: Any, source: Any) -> Callable[[], Note]:
    """Return a function that notes the state as of what the source has handed over."""
    if hasattr(source, "note_handed_over"):  # of a Loader, or what stands for one
        take: Callable[[], Note] = source.note_handed_over
        return take
    if hasattr(batches, "state_dict"):
        return partial(_keep_state, batches.state_dict)
    return lambda: _no_state


def _keep_state(state_dict: Callable[[], Any]) -> Note:
    state = copy.deepcopy(state_dict())  # it may show what goes on changing
    return lambda: state


def _always() -> bool:
    return True


def _no_state() -> Any:
    raise TypeError(
        "there is no state, since the batches that were given to prefetch have no state_dict; give "
        "it the Loader itself, not a generator over it"
    )


def _fail(error: BaseException) -> Any:
    try:
        raise error
    finally:
        del error  # its traceback holds this frame
