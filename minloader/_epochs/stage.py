"""The last hop: a function is called on each batch ahead of the consumer, in a thread.

::

      |=========== the consumer ===========|           |=== the thread ===|
       taken ahead --> work --> queue --------------------> fn(batch)
                                                                |
       the consumer  <--------- work <------------------- what it made

What is ahead of the consumer is a cache like all else: the position of the epoch counts what the
consumer was given. The thread knows the queue, not the iterator, which can therefore be collected.
It is a daemon: nobody waits for longer than a moment for a function that does not return.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from minloader._errors import not_the_end, without_frames
from minloader._memory.files import interrupts_held

GRACE = 0.5
"""Seconds that closing waits for the thread, which may be inside the function. An idle thread needs
none. One that takes longer is left to end by itself: what it still makes is dropped."""

CLOSED = "this prefetch is closed; make a new one"


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
        # No future: Ctrl-C within one of its locks would leave that taken.
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, error: BaseException | None, value: Any = None) -> None:
        """Say what has come of the batch, if nobody has said so before."""
        if not self.made:
            self.made.append((error, value))
        with suppress(RuntimeError):  # somebody has said so before
            self._done.release()

    def wait(self) -> tuple[BaseException | None, Any]:
        """Wait until it is made; return the error, or what was made."""
        while not self.made:
            self._done.acquire()
            with suppress(RuntimeError):
                self._done.release()  # another thread may wait
        return self.made[0]

    def drop(self) -> None:
        """Let go of the batch and of what was made of it: nobody will take it."""
        self.batch.clear()
        self.made[:] = [(RuntimeError(CLOSED), None)]
        self.finish(None)


class Stage:
    """A function that is called in a thread of its own, with the context variables of its maker.

    Args:
        fn: called with each batch.
        depth: most batches that are ready, or being made ready, beyond the one that the consumer
            has.
        receive: called in the consumer's thread with what ``fn`` has made, just before it is handed
            over; returns the batch. None: that is the batch.
        keep: called with each batch as soon as it is there, in the consumer's thread; returns what
            to call ``fn`` with. None: that is the batch. Behind another stage both are called in
            the thread.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        depth: int,
        *,
        receive: Callable[[Any], Any] | None = None,
        keep: Callable[[Any], Any] | None = None,
    ) -> None:
        self.depth = depth
        self._functions = [fn]
        self._context = contextvars.copy_context()
        self._receive = receive
        self._keep = keep
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: Any = None
        self.is_closed = False

    def take_over(self, former: Stage, works: list[Work]) -> list[Work]:
        """Follow another stage: do first what that does, up to handing a batch over.

        Args:
            former: the other.
            works: on what was taken ahead of the consumer.

        Returns:
            The same, for this one to go on with.

        Raises:
            RuntimeError: the other is closed.
        """
        former.check_open()
        former.send(works)
        taken_over = []
        for work in works:
            batch, error = former.receive(work)
            taken_over.append(self.work(batch, error))
        between = [each for each in (former._receive, self._keep) if each is not None]
        self._functions = [*former._functions, *between, *self._functions]
        self._keep = former._keep
        return taken_over

    def work(self, batch: Any, error: BaseException | None = None) -> Work:
        """Return the work on a batch, which nobody else changes then. In the consumer's thread.

        Args:
            batch: to call the functions on.
            error: that takes its place; None: there is none.
        """
        work = Work(self._functions)
        if error is None:
            try:
                work.batch.append(batch if self._keep is None else self._keep(batch))
                return work
            except Exception as failure:  # of the user's batch: it takes its place
                without_frames(failure)
                error = failure
        work.finish(error)
        return work

    def send(self, works: Iterable[Work]) -> None:
        """Have the thread make the batches that it does not have."""
        for work in works:
            if not (work.is_sent or work.made):
                self.check_open()
                self.start()
                self._tasks.put(work)  # twice, if Ctrl-C comes now: the thread makes it once
                work.is_sent = True

    def start(self) -> None:
        """Start the thread, if that was not done."""
        if self._thread is not None:
            return
        thread = threading.Thread(
            target=self._context.copy().run,
            args=(_run, self._tasks),
            name="minloader-prefetch",
            daemon=True,
        )
        with interrupts_held():  # the thread would be known to nobody
            thread.start()
            self._thread = thread
            # At exit it runs before the loader's, which was made earlier.
            self._end = weakref.finalize(self, _end, self._tasks, thread)

    def receive(self, work: Work) -> tuple[Any, BaseException | None]:
        """Wait; return the batch as it is handed over, or an error. In the consumer's thread."""
        error, value = work.wait()
        if error is not None or self._receive is None:
            return value, error
        try:
            return self._receive(value), None
        except Exception as failure:
            return None, failure

    def refuse_own_thread(self) -> None:
        """Raise an error in its thread: who waits for that is not to be waited for."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "the function that prefetch calls has asked the iterator for a batch, or called "
                "state_dict or skip of the loader; that waits for the consumer, who waits for the "
                "function: call it in the loop"
            )

    def check_open(self) -> None:
        """Raise an error if it is closed."""
        if self.is_closed:
            raise RuntimeError(CLOSED)

    def close(self) -> None:
        """End the thread, waiting for it for a moment. Harmless when repeated."""
        self.is_closed = True
        if self._end is not None:
            self._end()


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
    if thread is not threading.current_thread():
        thread.join(GRACE)
