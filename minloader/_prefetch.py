"""``prefetch``: a function is called on each batch ahead of the consumer, in a thread.

Over a loader it is a stage of the loader's own iterator (``_epochs/stage.py``), whose position
counts what the consumer was given. Over any other iterable it is a small iterator without a state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, Generic, Protocol, Self, TypeVar

from minloader._checks import B, brief_repr, check_int, is_iterable
from minloader._epochs.iterator import Batches
from minloader._epochs.stage import Stage, Work
from minloader._errors import without_frames
from minloader._worker import lifetimes

A = TypeVar("A")


class Prefetch(Protocol[B]):  # type: ignore[misc]
    """Iterator over batches that a thread makes ready, see :func:`prefetch`.

    Its thread ends with the batches, or when the iterator is collected, as it is after a loop that
    was left early; ``with`` and :meth:`close` say when.
    """

    def __iter__(self) -> Iterator[B]: ...
    def __next__(self) -> B: ...
    def state_dict(self) -> Any:
        """Return the state of the loader as of the batch that the consumer was given last.

        Raises:
            TypeError: the batches are of none, and have no ``state_dict``.
        """

    def close(self) -> None:
        """End the thread, waiting for it for a moment, and drop what is ready.

        Harmless when repeated.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...


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
        Exception: what ``iter(batches)`` raises.
    """
    made: Prefetch[B] = prefetched(batches, fn, depth)
    return made


def prefetched(
    batches: Iterable[Any],
    fn: Callable[[Any], Any],
    depth: int,
    *,
    receive: Callable[[Any], Any] | None = None,
    keep: Callable[[Any], Any] | None = None,
) -> Any:
    """The same, with what is done before ``fn`` and behind it; see :class:`Stage`."""
    depth = check_int("depth", depth, 1)
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {brief_repr(fn)}")
    if not is_iterable(batches):
        raise TypeError(f"batches must be iterable, got {brief_repr(batches)}")
    stage = Stage(fn, depth, receive=receive, keep=keep)
    source = iter(batches)
    if isinstance(source, Batches):
        source.add_stage(stage)
        return source
    return Prefetched(batches, source, stage)


class Prefetched(Generic[B]):
    """Iterator over batches of any iterable that a thread makes ready.

    Ctrl-C loses nothing, unless it comes within the code of the iterable.

    Args:
        batches: what was given; it may have a ``state_dict``.
        source: iterator over it.
        stage: has the thread.
    """

    def __init__(self, batches: Any, source: Iterator[Any], stage: Stage) -> None:
        self._source: Iterator[Any] | None = source
        self._stage = stage
        self._batches = batches
        self._process = lifetimes.process
        self._is_over = False  # whether the consumer was told that there is no more
        self._taken: list[Any] = []  # a batch of the source that is not yet in ``_staged``
        # The work on a batch, or an error of the source; and the state as of it.
        self._staged: tuple[tuple[Work, Callable[[], Any]], ...] = ()
        self._state = self._state_now()

    def _state_now(self) -> Callable[[], Any]:
        """Return what gives the state as of now, or raises what asking for it has raised."""
        if not hasattr(self._batches, "state_dict"):
            return _no_state
        try:
            state = copy.deepcopy(self._batches.state_dict())  # it may show what goes on changing
        except Exception as error:
            without_frames(error)
            return partial(_fail, error)
        return lambda: copy.deepcopy(state)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        if self._process is not lifetimes.process:
            raise RuntimeError("the thread of this prefetch is in another process; make one here")
        if self._is_over:
            raise StopIteration
        self._stage.refuse_own_thread()
        self._stage.check_open()
        while True:
            self._stage.send([work for work, _ in self._staged])
            if self._source is None or len(self._staged) > self._stage.depth:
                break
            self._take(self._source)
        if not self._staged:
            self._is_over = True
            self._state = self._state_now()
            self._stage.close()
            raise StopIteration
        work, state = self._staged[0]
        outcome, error = self._stage.receive(work)
        self._stage.check_open()  # another thread may have closed it meanwhile
        rest = self._staged[1:]
        # No call behind this line, so no Ctrl-C: the batch is the consumer's.
        self._staged = rest
        self._state = state
        if error is None:
            return outcome  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error, work  # its traceback holds this frame

    def _take(self, source: Iterator[Any]) -> None:
        """Take a batch ahead of the consumer, or an error in its place."""
        try:
            if not self._taken:
                self._taken.extend(map(next, repeat(source, 1)))
            if not self._taken:
                self._source = None
                return
            work = self._stage.work(self._taken[0])
        except Exception as error:
            without_frames(error)
            work = self._stage.work(None, error)
        staged = (*self._staged, (work, self._state_now()))
        nothing: list[Any] = []
        # Without a call in between, and so without Ctrl-C.
        self._staged = staged
        self._taken = nothing

    def state_dict(self) -> Any:
        """Return the state of ``batches`` as of the batch that the consumer was given last.

        Raises:
            TypeError: ``batches`` has no ``state_dict``.
            Exception: what that raised.
        """
        return self._state()

    def close(self) -> None:
        """End the thread, waiting for it for a moment, and drop what is ready."""
        self._stage.close()
        self._source = None
        for work, _ in self._staged:
            work.drop()
        self._staged = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


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
