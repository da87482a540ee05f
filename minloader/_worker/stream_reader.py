"""Streams, where they are read: each shard in a copy of the dataset.

::

    the epoch before has ended here:   the same copy                       iter, draw, draw, ...
    otherwise:                         a fresh copy, worker_init_fn,
                                       its state put back if it has one,   iter, draw, draw, ...
                                       past what was read before

A task names its first batch. A :class:`ShardReader` that stands there goes on; otherwise another
one is opened. It draws the samples of a batch, and then makes the batch of them. The two are apart
so that batches which were delivered before can be passed over without being made, with the same
random numbers for the stream as when they were. A state is put back before the generators are
seeded for a batch, and taken when they are seeded for the next. :class:`ShardReaders` are those of
one worker; they hand out the copies of the dataset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import GeneratorType
from typing import Any

from minloader._checks import (
    brief_repr,
    counted,
    has_epochs,
    is_read_once,
    is_stateful,
    known_state,
    state_of,
    states_of,
)
from minloader._memory.pickling import pack, unpack
from minloader._worker.batch_maker import BatchMaker
from minloader._worker.environment import Environment
from minloader._worker.fingerprint import fingerprint
from minloader._worker.messages import (
    DRAWN,
    Shard,
    WorkerInfo,
    begin_batch,
    ordinal_in_epoch,
)
from minloader._worker.seeds import BatchKey
from minloader._worker.torch_conventions import Stream, begin_at_state, number_of, put_back

NOT_LEADING = (
    "those of a shuffled Hugging Face dataset do not: shuffle it with minloader.shuffled instead"
)
"""Whose states do not lead back to where they were taken, as far as is known."""

END = object()
"""Stands for a batch where there are no more."""


@dataclass(eq=False)
class ShardReader:
    """Reads one shard once, from where a task has begun.

    Attributes:
        maker: makes batches of what is read.
        info: what the stream is told about where it runs, and the stream. Nothing else reads that
            meanwhile.
        epoch: the epoch that it is read for.
        shard: as the task says that it was opened for.
        is_fresh: whether the stream's state, if there is one, must be put back.
        environment: where it runs. An interrupt may come in the calling process.
        is_read_again: whether this copy of the stream has given something in an earlier pass.
        next_ordinal: of the next batch to draw.
        ended: whether the stream has, with the batch drawn last or before it.
        reading: whether the stream's own code has just failed.
        iterator: of the stream, while it is read.
        last_fingerprint: what the samples of the batch drawn last are recognized by; None: nothing.
        is_other: whether it gave something else when it was read again.
        told_state: its state and its number when the epoch began, where the user tells it that and
            Ctrl-C may come.
    """

    maker: BatchMaker
    info: WorkerInfo
    epoch: int
    shard: Shard
    is_fresh: bool
    environment: Environment
    is_read_again: bool = False
    next_ordinal: int = 0
    ended: bool = False
    reading: bool = False
    iterator: Any = None
    last_fingerprint: int | None = None
    is_other: bool = False
    told_state: tuple[Any, int | None] | None = None
    _samples: list[Any] = field(default_factory=list)  # of the batch that is being drawn, and END
    # Those of the batch drawn last, where an interrupt may come.
    _last_samples: list[Any] | None = None
    _is_inside: bool = False  # whether the iterator's own code runs

    def is_followed_by(self, shard: Shard) -> bool:
        """Return whether the pass of a task can begin with the same copy, after this one."""
        dataset = self.info.dataset
        if shard.follows != self.shard.pass_number or shard.first or serves_one_pass(dataset):
            return False
        # Where a state was put back in mid-epoch, the stream may begin there again.
        is_put = self.is_fresh and self.shard.at
        return self.ended and not (is_put and is_stateful(dataset))

    @property
    def was_just_put_back(self) -> bool:
        """Whether it has given nothing since it was put back to a state within the epoch."""
        # A batch that could not be read counts.
        at = self.shard.at
        return (
            self.is_fresh
            and at > 0
            and self.shard.state is not None
            and self.next_ordinal <= at + 1
        )

    @property
    def _is_finished_generator(self) -> bool:
        """Whether the iterator is a generator that has raised, or returned."""
        return isinstance(self.iterator, GeneratorType) and self.iterator.gi_frame is None

    @property
    def cannot_begin_again(self) -> bool:
        """Whether the stream can only be read on, where an interrupt may come."""
        return self.environment.is_inline and serves_one_pass(self.info.dataset)

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt has come while the stream's own code ran."""
        return self._is_inside and not self._is_batch_drawn

    def begin(self) -> BatchKey:
        """Prepare for the next batch of the shard, and return its key.

        At the end that is the first of the epoch to come.
        """
        index = 0 if self.ended else self.next_ordinal
        epoch = self.epoch + self.ended
        ordinal = ordinal_in_epoch(index, shard=self.shard.id, total=self.shard.total)
        return begin_batch(self.info, epoch, ordinal)

    def restore(self) -> dict[str, Any]:
        """Put the stream's state back, in a copy that is not the one that has reached it.

        Returns:
            All states that there are to put back.
        """
        if not self.shard.at and self._is_told:
            self._try(self._begin_as_told)
            return {}
        packed = self.shard.state if self.is_fresh else None
        states: dict[str, Any] = {} if packed is None else self._try(unpack, packed)
        if "dataset" in states:
            self._try(put_back, self.info.dataset, states["dataset"])
        return states

    @property
    def _is_told(self) -> bool:
        """Whether the user tells the stream its epochs, as with torch."""
        return bool(getattr(self.info.dataset, "is_told", False))

    def _begin_as_told(self) -> None:
        """Begin the epoch as the stream is, or behind one that was left, as that began."""
        stream = self.info.dataset
        if self.told_state is not None:
            state, number = self.told_state
            if state is not None:
                put_back(stream, state)
            if number is not None and number_of(stream.dataset) != number:
                stream.dataset.set_epoch(number)
        elif self.environment.is_inline:
            state = copy.deepcopy(known_state(stream))
            self.told_state = state, number_of(stream.dataset)

    def begin_at(self, states: dict[str, Any]) -> None:
        """Begin to read where a state was put back; at the beginning that is done by the draw."""
        if self.shard.at:
            self._try(self._open, states)

    def _try(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            if not self.environment.ends_program(error):
                self.reading = True
                self.ended = True  # what cannot be begun is over
            raise

    def draw(self) -> Any:
        """Return the samples of the next batch, a list, or END."""
        if self.ended:
            return END
        self.reading = False
        job = self.maker.job
        size = job.options.batch_size or 1
        try:
            if self.iterator is None:
                self._open({})
            samples = self._take(size)
            if not samples and not self.next_ordinal:
                samples = self._take_first_again(size)
        except BaseException as error:
            if self.environment.ends_program(error):
                raise  # ``go_on_with`` finds out what it has left
            self.reading = True
            # What cannot be begun is over, and so is a generator that has raised. It must be known
            # now: what has that for its place would be read on by who has its state.
            self.ended |= self.iterator is None or self._is_finished_generator
            self._samples = []
            self._last_samples = None
            self.last_fingerprint = None
            self._is_inside = False
            self.next_ordinal += 1  # it takes the place of a batch
            raise
        self.ended = len(samples) < size
        if self.ended and self.shard.at and self._is_told and is_stateful(self.info.dataset):
            # Or it might begin its next epoch where it was put back, once it is told that.
            self.info.dataset.load_state_dict(state_of(self.info.dataset))
        if not samples or (self.ended and not job.options.keep_last):
            self._samples = []
            self._last_samples = None
            return END
        self._last_samples = self._samples if self.environment.is_inline else None
        self._samples = []
        self.next_ordinal += 1
        self.last_fingerprint = fingerprint(samples)
        return samples

    def go_on_with(self, shard: Shard) -> bool:
        """Get ready for the first batch of a task, if it is there; return whether it is."""
        if self.next_ordinal == shard.first + 1 and self._last_samples is not None:
            # Ctrl-C came before the batch was delivered. Its samples are still here.
            self._samples = self._last_samples
            self._last_samples = None
            self.next_ordinal = shard.first
            self.ended = False
        if self.was_interrupted and not (self.cannot_begin_again and self.iterator is None):
            return False  # what raised the interrupt may be over, or have lost a sample
        return self.next_ordinal == shard.first or (self.ended and self.next_ordinal < shard.first)

    def _open(self, states: dict[str, Any]) -> None:
        """Begin to read, in one step; ``states`` may have one of the iterator."""
        dataset = self.info.dataset
        self._is_inside = True
        if has_epochs(dataset):
            dataset.set_epoch(self.epoch)
        iterator = iter(dataset)
        if "iterator" in states:
            iterator.load_state_dict(states["iterator"])
            if _is_own_iterator(dataset, iterator):
                begin_at_state(dataset, states["iterator"])
        self.iterator = iterator
        self._samples = []
        self.next_ordinal = self.shard.at
        self._is_inside = False

    @property
    def _is_batch_drawn(self) -> bool:
        """Whether all samples of the batch that is being drawn are there."""
        return bool(self._samples) and self._samples[-1] is END

    def _take(self, size: int) -> list[Any]:
        # Not by islice(), which calls iter(): a stream that is its own iterator would begin anew.
        # A sample goes into the list in one step, which no interrupt can come between, and so does
        # the sign that there are no more to take: of a stream that has ended nothing else tells.
        missing = map(next, repeat(self.iterator, size - len(self._samples)))
        added = chain(missing, (END,))
        if not self._is_batch_drawn:
            self._is_inside = True
            self._samples.extend(added)
        self._is_inside = False
        return self._samples[:-1]

    def _take_first_again(self, size: int) -> list[Any]:
        """Return the first samples of a pass that has given none; none if there are none."""
        samples: list[Any] = []
        beginning = self.maker.job.beginning
        if self.is_fresh and self.shard.state is not None:
            self._open({})  # it was the state of an end, and does not stand for a beginning
            samples = self._take(size)
            if not samples and beginning is not None:
                self.info.dataset.load_state_dict(unpack(beginning)["dataset"])
                self._open({})  # it begins each time where it was put last
                samples = self._take(size)
        stream = _unwrapped(self.info.dataset)
        # The stream that a shuffled one reads, and the iterator over that.
        stream = getattr(stream, "stream", stream)
        iterator = getattr(self.iterator, "_source", self.iterator)
        if not samples and self.is_read_again and iterator is stream and not has_epochs(stream):
            self.ended = True
            raise _read_once(stream)
        return samples

    def fetch(self) -> Any:
        """Return the next batch, or END."""
        samples = self.draw()
        if samples is END:
            return END
        shard = self.shard
        ordinal = ordinal_in_epoch(self.next_ordinal - 1, shard=shard.id, total=shard.total)
        begin_batch(self.info, self.epoch, ordinal, key=DRAWN)
        return self.maker.combine(samples)

    def check(self, shard: Shard) -> None:
        """Check that the batch drawn last, which is passed over, is what was read before.

        Raises:
            RuntimeError: it is not, or there are too few.
        """
        # What was asked for beyond that may never have been there.
        given = 0 if shard.check is None else shard.check[0] + 1
        if self.ended and self.next_ordinal < given:
            raise self.misfit(shard, f"ended after {counted(self.next_ordinal, 'batch')}")
        if shard.check is None or self.next_ordinal - 1 != shard.check[0]:
            return
        if shard.check[1] not in (None, self.last_fingerprint):
            raise self.misfit(shard, "given other samples")

    def misfit(self, shard: Shard, what: str) -> RuntimeError:
        """Return the error for a stream that is not what it was, and read no more of it.

        Args:
            shard: what of it is wanted.
            what: it has done.
        """
        self.ended = True
        self.is_other = True
        given = shard.first if shard.check is None else shard.check[0] + 1
        lead = f" that lead there ({NOT_LEADING})" if is_stateful(self.info.dataset) else ""
        return RuntimeError(
            f"the stream has {what} when shard {self.info.id} was read again, past the "
            f"{counted(given, 'batch')} that it had given: it must give the same samples each "
            "time, for the same epoch, shard and seed, or have state_dict and load_state_dict"
            f"{lead}"
        )

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by names: the shard, or at its end the next pass, goes on from that."""
        dataset = self.info.dataset
        iterator = self.iterator
        if self.ended:
            parts = {"dataset": None if serves_one_pass(dataset) else dataset}
        elif getattr(iterator, "_is_at_beginning", False):
            parts = {}
        elif _is_own_iterator(dataset, iterator):
            parts = {"iterator": iterator}
        else:
            parts = {"dataset": dataset, "iterator": iterator}
        return {name: part for name, part in parts.items() if is_stateful(part)}

    def state(self) -> bytes | None:
        """Return the state of the stream, packed; None if it has none."""
        states = states_of(self.parts)
        return pack(states, down=False) if states else None


@dataclass(eq=False)
class ShardReaders:
    """The readers of one worker.

    Attributes:
        maker: makes batches of what is read.
        info: what the user's code is told about where the worker runs. While it reads a shard, that
            is told of the shard.
        environment: where that is.
    """

    maker: BatchMaker
    info: WorkerInfo
    environment: Environment
    _readers: dict[int, ShardReader] = field(default_factory=dict)  # by shard
    _is_job_object_used: bool = False  # whether the job's own object was given to a reader

    def find(self, shard: Shard, epoch: int, prepare: Callable[[WorkerInfo], None]) -> ShardReader:
        """Return a reader for a task, which may stand before its first batch.

        Args:
            shard: which batches.
            epoch: the epoch that it is read for.
            prepare: calls ``worker_init_fn``, if there is one, on the copy that an info has.

        Raises:
            Exception: what making a copy of the dataset, or ``worker_init_fn``, has raised.
        """
        former = self._readers.get(shard.id)
        told_state = None
        if former is not None and not former.ended:
            told_state = former.told_state
            if told_state is not None and former.shard.pass_number != shard.pass_number:
                # It was left. One whose number is nowhere to be seen stays as it was told since.
                number = number_of(_unwrapped(former.info.dataset))
                told_state = None if number is None else (told_state[0], number)
        if former is not None and former.shard.pass_number == shard.pass_number:
            if former.go_on_with(shard):
                return former
            if former.was_interrupted and former.cannot_begin_again:
                raise RuntimeError(
                    f"dataset, {brief_repr(former.info.dataset)}, is an iterator that can be read "
                    "once, and Ctrl-C came while its own code ran: what it gives from now on may "
                    "lack a sample; give an object whose __iter__ begins anew, or one with "
                    "state_dict and load_state_dict"
                )
        if shard.state is None and self.environment.is_inline:
            shard = shard._replace(state=self.maker.job.beginning)
        is_fresh = former is None or not former.is_followed_by(shard)
        if former is not None and not is_fresh:
            info = former.info
            is_read_again = former.is_read_again or former.next_ordinal > 0
        else:
            dataset, is_read_again = self._copy(shard)
            info = replace(self.info, id=shard.id, num_workers=shard.total, dataset=dataset)
            if serves_one_pass(dataset):
                # No other epoch is read in this copy. Where one may be, worker_init_fn must do the
                # same for a copy that is made in a later epoch, to replace another.
                info.epoch = epoch
            if not is_read_again:
                prepare(info)
        reader = ShardReader(
            maker=self.maker,
            info=info,
            epoch=epoch,
            shard=shard,
            is_fresh=is_fresh,
            environment=self.environment,
            is_read_again=is_read_again,
            told_state=told_state,
        )
        self._readers[shard.id] = reader
        return reader

    def close(self) -> None:
        """Let go of what is being read: a generator runs its ``finally`` then."""
        self._readers.clear()

    def rewind(self) -> None:
        """Put the user's own object back to where it was before it was read, for other readers.

        Raises:
            RuntimeError: it can be read once, and was.
        """
        if self._is_job_object_used and serves_one_pass(self.maker.job.dataset):
            raise _read_once(self.maker.job.dataset)
        job = self.maker.job
        self._readers.clear()  # first: if Ctrl-C comes, those that read on put its state back
        if job.beginning is not None:
            job.dataset.load_state_dict(unpack(job.beginning)["dataset"])

    def _copy(self, shard: Shard) -> tuple[Any, bool]:
        """Return a copy of the dataset, and whether it was prepared and read before."""
        dataset = self.maker.job.dataset
        is_inline = self.environment.is_inline
        reload = self.environment.reload
        is_used = self._is_job_object_used
        if not is_used:
            self._note_beginning(dataset)
        # A forked worker makes copies of this object, so that has to stay as it is.
        if reload is not None and (is_used or shard.total > self.info.num_workers):
            try:
                return reload(), False
            except TypeError as error:
                if is_read_once(dataset):
                    raise _read_once(dataset) from error
                raise
        alone = shard.total == 1
        # What has a state, but none to be put back to when an epoch is left, is not read itself.
        cannot_be_put_back = is_stateful(dataset) and self.maker.job.beginning is None
        if reload is None and not (is_inline and alone and not cannot_be_put_back):
            try:
                return copy.deepcopy(dataset), False
            except Exception as error:
                if not alone and not serves_one_pass(dataset):
                    raise TypeError(
                        f"each of the {shard.total} shards is read in a copy of the dataset, but "
                        f"it cannot be copied: {error}; use executor='process', or one worker"
                    ) from error
        if is_used and is_inline and not is_read_once(dataset):
            return dataset, True  # a class of Python's may begin anew in __iter__
        if serves_one_pass(dataset) and (is_used or not (alone or reload)):
            raise _read_once(dataset)
        self._is_job_object_used = True
        return dataset, is_used

    def _note_beginning(self, dataset: Any) -> None:
        """Note where the stream begins: a pass that is left early moves the user's own object."""
        job = self.maker.job
        state = known_state(dataset) if job.beginning is None else None
        if state is not None:
            job.beginning = pack({"dataset": state}, down=False)


def _is_own_iterator(dataset: Any, iterator: Any) -> bool:
    """Return whether a stream and its iterator have one state."""
    if not (is_stateful(dataset) and is_stateful(iterator)):
        return False
    # Not compared themselves: both may stand for the same object of the user's.
    return bool(iterator.state_dict == dataset.state_dict)


def _unwrapped(dataset: Any) -> Any:
    return dataset.dataset if type(dataset) is Stream else dataset


def _read_once(dataset: Any) -> RuntimeError:
    return RuntimeError(
        f"dataset is an iterator, {brief_repr(dataset)}, which can be read once, by one worker; "
        "pass an object whose __iter__ begins anew"
    )


def serves_one_pass(dataset: Any) -> bool:
    """Return whether a copy of a stream serves one pass, so that each needs another."""
    # One with any state at all begins anew with iter, whatever must be known to ask for the state.
    is_iterator = isinstance(dataset, Iterator) and not hasattr(dataset, "state_dict")
    return is_iterator or getattr(dataset, "read_once", False)
