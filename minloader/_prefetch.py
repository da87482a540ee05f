"""``prefetch``: a function is called on each batch ahead of the consumer, in a thread.

::

      |=========== the consumer ===========|           |=== the thread ===|
       held by the source --> Work ----------------------> fn(batch)
                                                                |
       the consumer  <--------- Work <------------------ what it made

What is taken ahead of the consumer stands in ``held`` of what it is taken from, until the consumer
has it. So the loader's state counts what the consumer was given, and nothing is noted here that
Ctrl-C could tear. The thread knows its queue, not the iterator, which can therefore be collected.
It is a daemon: nobody waits for longer than a moment for a function that does not return.
"""

from __future__ import annotations

import contextvars
import copy
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Generic, Protocol, Self, TypeVar

from minloader._arguments import checked_int, refuse_copies
from minloader._epochs.iterator import EXECUTING, Batches, SeveralEpochs
from minloader._errors import breaks_in, not_the_end, without_frames
from minloader._formats import brief_repr
from minloader._loader import Loader
from minloader._memory import forks
from minloader._pools.interrupts import Interrupts, interrupts_held
from minloader._protocols import B, is_iterable

A = TypeVar("A")

GRACE = 0.5
"""Seconds that closing waits for the thread, which may be inside the function. An idle thread needs
none. One that takes longer is left to end by itself: what it still makes is dropped."""

CLOSED = "this prefetch is closed; make a new one"


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
        batches: iterated once: a loader from the first ``next`` on, others here. For several
            epochs call ``prefetch`` for each, or give ``loader.epochs(n)``. Each batch must have
            memory of its own: with ``num_workers=0`` a dataset must not fill the same buffer again.
        fn: called in the thread with each batch; the context variables (numpy's error state,
            decimal's context) are those of now.
        depth: most batches that are ready, or being made ready, beyond the one that the
            consumer has. So many more are held in memory.

    Returns:
        An iterator, in the order of ``batches``. What ``batches`` or ``fn`` raises arrives in the
        batch's place, that of ``batches`` with its traceback as text; the next ``next()`` gives the
        next, if ``batches`` does.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
        RuntimeError: the loader is closed.
        Exception: what ``iter(batches)`` raises, of others than a loader.
    """
    return prefetched(batches, fn, depth)


def prefetched(
    batches: Iterable[Any],
    fn: Callable[[Any], Any],
    depth: int,
    *,
    receive: Callable[[Any], Any] | None = None,
    keep: Callable[[Any], Any] | None = None,
) -> Prefetch[Any]:
    """The same, with what is done before ``fn`` and behind it.

    Args:
        batches, fn, depth: see :func:`prefetch`.
        receive: called in the consumer's thread with what ``fn`` has made, just before it is handed
            over; returns the batch. None: that is the batch.
        keep: called with each batch as soon as it is there, in the consumer's thread; returns what
            to call ``fn`` with. None: that is the batch. Behind another ``prefetch`` both are
            called in the thread.
    """
    depth = checked_int("depth", depth, 1)
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {brief_repr(fn)}")
    if not is_iterable(batches):
        raise TypeError(f"batches must be iterable, got {brief_repr(batches)}")
    source: Any
    if isinstance(batches, Loader) and type(batches).__iter__ is Loader.__iter__:
        batches._shared.check_open()
        # Not begun yet: if Ctrl-C came here, nobody would have the epoch.
        source = Batches(batches._course)
    else:
        source = iter(batches)
    if isinstance(source, Prefetch):
        return source.followed_by(fn, depth, receive=receive, keep=keep)
    if not isinstance(source, Batches | SeveralEpochs):
        source = Held(batches, source)
    return Prefetch(source, fn, depth, receive=receive, keep=keep)


class Work:
    """A batch on its way through the thread, or an error in its place.

    Attributes:
        batch: what the functions are called on, in a list that the thread empties.
        functions: called one after the other, each on what the one before has returned.
        made: what a function raised, and what the last one returned; empty until then.
        is_sent: whether the thread has it.
    """

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.batch: list[Any] = []
        self.functions = functions
        self.made: list[tuple[BaseException | None, Any]] = []
        self.is_sent = False
        # No future: what breaks in within one of its locks would leave that taken.
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, error: BaseException | None, value: Any = None) -> None:
        """Say what has come of the batch, if nobody has said so before."""
        if not self.made:
            self.made.append((error, value))
        with suppress(RuntimeError):  # somebody has said so before
            self._done.release()

    def wait(self) -> None:
        """Wait until it is made."""
        while not self.made:
            self._done.acquire()

    def drop(self) -> None:
        """Let go of the batch and of what was made of it: nobody will take it."""
        self.batch.clear()
        self.made[:] = [(RuntimeError(CLOSED), None)]
        self.finish(None)


class BatchSource(Protocol):
    """What batches are taken from ahead of the consumer."""

    @property
    def epoch(self) -> Any:
        """What has in ``held`` what was taken, in order; the consumer's are removed from there.

        Each has ``outcome``, ``error``, and ``work``. None: nothing was taken yet.
        """

    def __next__(self) -> Any: ...
    def hold(self) -> None:
        """Have what is taken from now on stand there."""

    def is_ready(self) -> bool:
        """Return whether the next can be taken without waiting."""

    def as_given(self, outcome: Any) -> Any:
        """Return a batch as the consumer is to have it."""

    def giving(self, held: tuple[Any, ...]) -> None:
        """Take note that the consumer is about to have a batch; ``held`` is what is held then."""

    def state_dict(self) -> Any:
        """Return the state as of what the consumer was given."""


class Prefetch(Iterator[B], Generic[B]):
    """Iterator over batches that a thread makes ready, see :func:`prefetch`.

    Its thread ends with the batches, or when the iterator is collected, as it is after a loop that
    was left early; ``with`` and :meth:`close` say when.
    """

    def __init__(
        self,
        source: BatchSource,
        fn: Callable[[Any], Any],
        depth: int,
        *,
        receive: Callable[[Any], Any] | None = None,
        keep: Callable[[Any], Any] | None = None,
    ) -> None:
        self._source = source
        self._functions = [fn]
        self._depth = depth
        self._receive = receive
        self._keep = keep
        self._interrupts = Interrupts()
        self._context = contextvars.copy_context()
        self._process = forks.process
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: Any = None
        self._is_closed = False
        self._is_over = False  # whether the consumer was told that there is no more
        source.hold()

    __reduce__ = refuse_copies

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        interrupts = self._interrupts
        self._refuse_own_thread()
        if interrupts.is_on:
            raise ValueError(EXECUTING)
        interrupts.is_on = True  # no call since the question: no thread has come in between
        error: BaseException | None = None
        held: tuple[Any, ...] = ()
        try:
            with interrupts:
                held = () if self._is_over else self._take_ahead()
                if held:
                    rest = held[1:]
                    outcome, error = self._received(held[0].work)
                    self._check_usable()  # another thread may have closed it meanwhile
                    if error is None:
                        self._source.giving(rest)
                else:
                    self._end_thread()
            if not held:
                self._is_over = True
                if self._source.epoch is not None:
                    self._source.epoch.is_over = True
                raise StopIteration
            # Ctrl-C has come by here. No call behind this line: the batch is the consumer's.
            self._source.epoch.held = rest
            if error is not None:
                raise error
            return outcome  # type: ignore[no-any-return]
        finally:
            interrupts.is_on = False
            held = ()
            del error  # its traceback holds this frame

    def state_dict(self) -> Any:
        """Return the state of the loader as of the batch that the consumer was given last.

        Raises:
            TypeError: the batches are of none, and have no ``state_dict``.
        """
        return self._source.state_dict()

    def close(self) -> None:
        """End the thread, waiting for it for a moment, and drop what is ready.

        Harmless when repeated.
        """
        self._is_closed = True
        self._end_thread()
        for each in self._held:
            if each.work is not None:
                each.work.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def followed_by(
        self,
        fn: Callable[[Any], Any],
        depth: int,
        *,
        receive: Callable[[Any], Any] | None = None,
        keep: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Have the thread call another function behind its own. Return this."""
        self._check_usable()
        added = [each for each in (self._receive, keep, fn) if each is not None]
        for each in self._held:
            if each.work is not None:
                each.work.wait()
                (each.error, each.outcome) = each.work.made[0]
                each.work = self._work(each.outcome, each.error, added)
        self._functions = [*self._functions, *added]
        self._depth = depth
        self._receive = receive
        return self

    # --- ahead of the consumer

    @property
    def _held(self) -> tuple[Any, ...]:
        epoch = self._source.epoch
        return () if epoch is None else epoch.held

    def _take_ahead(self) -> tuple[Any, ...]:
        """Take what may be taken, have the thread work on it, and return all that is held."""
        self._check_usable()
        self._send_held()
        while not self._held or (len(self._held) <= self._depth and self._source.is_ready()):
            before = self._held
            try:
                self._interrupts.let_through(next, self._source)
            except StopIteration:
                break
            except Exception as error:
                if self._held is before or breaks_in(error):  # it is none in a batch's place
                    raise
            self._send_held()  # before the next one is made, which may be in the same memory
        return self._held

    def _send_held(self) -> None:
        """Have the thread work on what is held."""
        for each in self._held:
            if each.work is None:
                outcome = None if each.error else self._source.as_given(each.outcome)
                work = self._work(outcome, each.error, self._functions, self._keep)
                each.work = work
                each.outcome = None
            if not (each.work.is_sent or each.work.made):
                self._start()
                self._tasks.put(each.work)  # twice, if it is interrupted: the thread makes it once
                each.work.is_sent = True

    def _work(
        self,
        batch: Any,
        error: BaseException | None,
        functions: Sequence[Callable[[Any], Any]],
        keep: Callable[[Any], Any] | None = None,
    ) -> Work:
        """Return the work on a batch, which nobody else changes then."""
        work = Work(functions)
        if error is None:
            try:
                work.batch.append(batch if keep is None else keep(batch))
                return work
            except Exception as failure:  # of the user's batch: it takes its place
                if breaks_in(failure):
                    raise
                error = failure
        without_frames(error)
        work.finish(error)
        return work

    def _received(self, work: Work) -> tuple[Any, BaseException | None]:
        """Wait; return the batch as it is handed over, or an error."""
        self._interrupts.let_through(work.wait)
        error, value = work.made[0]
        if error is not None or self._receive is None:
            return value, error
        try:
            return self._interrupts.let_through(self._receive, value), None
        except Exception as failure:
            if breaks_in(failure):
                raise
            return None, failure

    # --- the thread

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._context.copy().run,
                args=(_run, self._tasks),
                name="minloader-prefetch",
                daemon=True,
            )
            # Before it is started, or what breaks in then would leave it. At exit it runs before
            # the loader's, which was made earlier.
            self._end = weakref.finalize(self, _end, self._tasks, thread)
            self._thread = thread
        if self._thread.ident is None:
            with interrupts_held():
                self._thread.start()

    def _end_thread(self) -> None:
        if self._end is not None:
            self._end()

    def _check_usable(self) -> None:
        if self._process is not forks.process:
            raise RuntimeError("the thread of this prefetch is in another process; make one here")
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "the function that prefetch calls has asked the iterator for a batch, which waits "
                "for that function: call next in the loop"
            )


class Held:
    """Takes batches of any iterable ahead of the consumer, as an epoch does.

    Ctrl-C loses nothing, unless it comes within the code of the iterable.

    Args:
        batches: what was given; it may have a ``state_dict``.
        iterator: over it.
    """

    def __init__(self, batches: Any, iterator: Iterator[Any]) -> None:
        self.held: tuple[Delivered, ...] = ()
        self.is_over = False
        self._batches = batches
        self._iterator: Iterator[Any] | None = iterator
        self._taken: list[Any] = []  # what is not yet held
        self._state = self._state_now()  # as of what was taken last

    @property
    def epoch(self) -> Self:
        return self

    def hold(self) -> None:
        """Nothing: it always does."""

    def is_ready(self) -> bool:
        return True

    def as_given(self, outcome: Any) -> Any:
        return outcome

    def giving(self, held: tuple[Any, ...]) -> None:
        """Take note that the consumer is about to have a batch: nothing."""

    def __next__(self) -> None:
        if self._iterator is None:
            raise StopIteration
        error: Exception | None = None
        try:
            if not self._taken:
                self._taken.extend(map(next, repeat(self._iterator, 1)))
        except Exception as failure:
            if breaks_in(failure):
                raise
            error = failure
        if not self._taken and error is None:
            self._iterator = None
            raise StopIteration
        before = self._state
        state = self._state_now()
        taken = Delivered(None if error else self._taken[0], error, before)
        held = (*self.held, taken)
        nothing: list[Any] = []
        # Without a call in between, and so without Ctrl-C.
        self.held = held
        self._state = state
        self._taken = nothing

    def _state_now(self) -> Callable[[], Any]:
        """Return what gives the state as of now, or raises what asking for it has raised."""
        if not hasattr(self._batches, "state_dict"):
            return _no_state
        try:
            state = copy.deepcopy(self._batches.state_dict())  # it may show what goes on changing
        except Exception as error:
            if breaks_in(error):
                raise
            without_frames(error)
            return partial(_fail, error)
        return lambda: copy.deepcopy(state)

    def state_dict(self) -> Any:
        held = self.held
        return held[0].state() if held else self._state()


@dataclass(eq=False, slots=True, repr=False)
class Delivered:
    """A batch, or an error in its place, that was taken ahead of the consumer.

    Attributes:
        outcome: the batch.
        error: to be raised in its place; None: there is none.
        state: returns the state as of what came before.
        work: what is done with it.
    """

    outcome: Any
    error: BaseException | None
    state: Callable[[], Any]
    work: Work | None = None


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


# --- in the thread


def _run(tasks: queue.SimpleQueue[Any]) -> None:
    """Call the functions on each batch. Runs in the thread, which has none while it waits."""
    while (work := tasks.get()) is not None:
        with suppress(IndexError):  # it was made already, or is not wanted any more
            batch = [work.batch.pop()]
            error, value = _attempt(work.functions, batch)
            work.finish(error, value)
            del error, value
        del work


def _attempt(
    functions: Sequence[Callable[[Any], Any]], batch: list[Any]
) -> tuple[BaseException | None, Any]:
    try:
        for function in functions:
            batch.append(function(batch.pop()))
        return None, batch.pop()
    except Exception as error:
        return not_the_end(error, "fn"), None
    except BaseException as error:  # SystemExit too: the consumer's to see
        return error, None


def _end(tasks: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    """End the thread. Called from any thread."""
    tasks.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(GRACE)
