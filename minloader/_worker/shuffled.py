"""Shuffles a stream, where it is read, through a buffer of two halves.

::

    stream ──one sample──> [ the half that is filled ]
                                     | both are through
                                     v
                           [ the half that is given out, in random order ] ──one sample──> batch

With each sample that is given out another one is read, so that reading is steady. A state has the
stream's own state before the half that is given out, and how many samples of that were: whoever
goes on reads no more than the buffer again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minloader._arguments import check_iterable, checked_int
from minloader._errors import is_own
from minloader._protocols import is_stateful, states_of
from minloader._sampling.seeding import generator
from minloader._worker.current import get_worker_info
from minloader._worker.fingerprint import fingerprint
from minloader._worker.messages import DRAWN, WorkerInfo, begin_batch, current_batch
from minloader._worker.seeds import seed_globals
from minloader._worker.stream_reader import begin_at_state, put_back, put_iterator_back

logger = logging.getLogger("minloader")


class shuffled:  # noqa: N801  # used as a function
    """A stream of the same samples in another order, as a dataset for :class:`Loader`.

    It runs in the workers. Each sample is moved by less than ``buffer_size``: while one half of the
    buffer is given out in random order, the other is filled. The order follows from ``seed`` and
    the seed of the loader, the epoch and the shard; in a dataset of items, from the batch.

    If the stream, or its iterator, has ``state_dict`` and ``load_state_dict``, so has this one. Its
    state has a few numbers more than the stream's, and no samples. A resumed run reads at most
    ``buffer_size`` samples again, and gives exactly those that are left. ::

        loader = Loader(shuffled(stream, 1000), batch_size=32, num_workers=2)

    Args:
        stream: what the loader takes as one.
        buffer_size: number of samples in both halves, at least 4. A half of it is in memory.
        seed: non-negative int.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has an impossible value.
    """

    def __init__(self, stream: Iterable[Any], buffer_size: int, seed: int = 0) -> None:
        if stream is None:
            raise TypeError("stream must be an iterable of samples, got None")
        check_iterable("stream", stream)
        self.stream = stream
        self.buffer_size = checked_int("buffer_size", buffer_size, 4)
        self.seed = checked_int("seed", seed, 0)

    def __iter__(self) -> Iterator[Any]:
        if is_stateful(self.stream):
            return StatefulShuffle(self)
        source = iter(self.stream)
        return (StatefulShuffle if is_stateful(source) else Shuffle)(self, source)

    def __getattr__(self, name: str) -> Any:
        stream = vars(self).get("stream")  # it is not there yet in a copy that is being made
        passed = "state_dict", "load_state_dict", "set_epoch", "epoch"
        if name in passed and hasattr(stream, name):
            return partial(put_back, stream) if name == passed[1] else getattr(stream, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(slots=True, eq=False)
class Half:
    """Half of the buffer.

    Attributes:
        samples: that it has.
        state_before: state of the stream before them.
        num_failed: errors while it was filled.
    """

    samples: list[Any] = field(default_factory=list)
    state_before: Any = None
    num_failed: int = 0


class Shuffle:
    """Iterator over the samples of one epoch of a shard.

    Args:
        owner: the dataset.
        source: iterator over the stream; None: it is made with the first sample, since the stream
            may be put back before.
    """

    def __init__(self, owner: shuffled, source: Any = None) -> None:
        self._owner = owner
        self._source = source
        self._size = -(-owner.buffer_size // 2)
        self._half_number = -1  # of the half that is given out
        self._half = Half()  # that is given out, in its order, the next sample last
        self._given = 0  # of this half
        self._next_half = Half()  # the other one
        self._newest: tuple[Any, int | None] = (None, None)  # sample, and what it had in it
        self._has_failed = False  # with the sample that was to be read last
        self._ended = False

    def __iter__(self) -> Shuffle:
        return self

    def __next__(self) -> Any:
        if self._source is None:
            self._open(None)
        if self._half.samples:
            self._fill(len(self._next_half.samples) + 1)  # first: if that fails, no sample is lost
        else:
            self._fill(self._size)
            self._swap_halves()
        if not self._half.samples:
            raise StopIteration
        self._given += 1
        return self._half.samples.pop()

    def _swap_halves(self) -> None:
        """Give out the half that was filled, and fill another."""
        self._half_number += 1
        self._given = 0
        info = get_worker_info()
        key = _order_key(info) if info is not None else ()
        rng = generator("shuffled", self._owner.seed, *key, self._half_number)
        half = self._next_half
        half.samples = [half.samples[n] for n in rng.permutation(len(half.samples))]
        self._half = half
        self._next_half = Half()

    def _fill(self, size: int) -> None:
        """Read until so many samples are there, of a half at most."""
        half = self._next_half
        while len(half.samples) < min(size, self._size) and not self._ended:
            if half.state_before is None and not half.samples and not half.num_failed:
                half.state_before = self._state()
            self._seed(self._half_number * self._size + len(half.samples))
            try:
                sample = next(self._source)
                self._refuse_refilled()
                half.samples.append(sample)
                self._newest = (sample, fingerprint([sample]))
                self._has_failed = False
            except StopIteration:
                self._ended = True
                if self._has_failed:  # who reads this cannot tell: samples have come since
                    logger.warning("a shuffled stream ended with its error, as a generator does")
            except KeyboardInterrupt:
                raise  # not of the stream's own
            except BaseException:
                self._has_failed = True
                half.num_failed += 1
                raise

    def _refuse_refilled(self) -> None:
        sample, former = self._newest
        if fingerprint([sample]) != former:
            raise RuntimeError(
                f"the stream has changed an object, of type {type(sample).__name__}, that it had "
                "yielded before: samples that are shuffled wait in a buffer, so yield a new object "
                "each time, or a copy of that one"
            )

    def _seed(self, n: int) -> None:
        """Have the stream draw what belongs to its sample ``n``, whenever that is read."""
        info = get_worker_info()
        if info is None:
            return
        batch = current_batch(info)
        if not batch.is_of_stream or batch.key[:1] == DRAWN:
            return  # a batch is made, with its own numbers
        key = begin_batch(info, info.epoch, n, key=(2, info.id))
        if batch.seeds_globals:
            seed_globals(key)

    def _state(self) -> dict[str, Any] | None:
        """Return the state of the stream, of its iterator, or of both, as far as they have any."""
        parts = {"dataset": self._owner.stream, "iterator": self._source}
        if self._source is self._owner.stream:
            del parts["dataset"]
        try:
            return states_of(parts)
        except Exception as error:
            if self._half_number < 0 and is_own(error):
                return None  # before its first sample it may have none, and begins anew
            raise

    def _open(self, state: Any) -> None:
        """Begin to read the stream, from a state of it if there is one."""
        stream: Any = self._owner.stream
        if state is not None:
            put_back(stream, state)
        self._seed(-1 - self._size)
        self._source = iter(stream)


def _order_key(info: WorkerInfo) -> tuple[int, ...]:
    """Return what the order follows from: the shard, or the batch of a dataset of items."""
    batch = current_batch(info)
    run_key = (info.seed, info.epoch, info.rank)
    if batch.is_of_stream or batch.ordinal is None:
        return *run_key, info.id  # a stream may read in a thread of its own, at any time
    return *run_key, batch.ordinal, *batch.key


class StatefulShuffle(Shuffle):
    """The same, of a stream that can be put back."""

    @property
    def _is_at_beginning(self) -> bool:
        """Whether its state would have the stream's own from before the epoch.

        That may be of the end of the epoch before. Only who reads the shard knows how to begin
        from one, so no state is taken: the shard is read again from its beginning.
        """
        return self._half_number < 1 and is_stateful(self._owner.stream)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what has been given out, with no samples; None if the stream has no state."""
        if self._half.state_before == {}:
            return None
        return {
            "number": self._half_number,
            "given": self._given,
            "stream": self._half.state_before,
            "failed": self._half.num_failed + self._next_half.num_failed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next sample the one after those that a state has given out.

        What the buffer held is read at once: a batch finds the generators as they would be.
        """
        states = state["stream"] or {}
        if self._source is None:
            self._open(states.get("dataset"))
        if "iterator" in states:
            put_iterator_back(self._source, states["iterator"])
            if self._source is self._owner.stream:
                begin_at_state(self._source, states["iterator"])
        if state["number"] >= 0:
            self._half_number = state["number"] - 1
            self._next_half.state_before = state["stream"]
            self._fill_again(self._size, state["failed"])
            self._swap_halves()
            self._given = state["given"]
            samples = self._half.samples
            del samples[len(samples) - self._given :]
        # With the first sample of a half none of the other was read.
        self._fill_again(self._given - 1, state["failed"] - self._half.num_failed)

    def _fill_again(self, size: int, failures: int) -> None:
        """Read until so many samples are there, and past errors that were raised before."""
        half = self._next_half
        while len(half.samples) < self._size and not self._ended:
            if len(half.samples) >= size and half.num_failed >= failures:
                break
            try:
                self._fill(len(half.samples) + 1)
            except BaseException as error:
                if not is_own(error) or half.num_failed > failures:
                    raise
                logger.debug("a sample of a shuffled stream fails again: %r", error)
