"""Streams, where they are read: each shard in a copy of the dataset.

::

    the epoch before has ended here:   the same copy                       iter, draw, draw, ...
    otherwise:                         a fresh copy, worker_init_fn,
                                       its state put back if it has one,   iter, draw, draw, ...
                                       past what was read before

A task names its pass and its first batch. A :class:`ShardReader` of that pass which stands there
goes on; otherwise another one is opened. It draws the samples of a batch, and then the worker makes
the batch of them. The two are apart so that batches which were delivered before can be passed over
without being made, with the same random numbers for the stream as when they were. A state is put
back before the generators are seeded for a batch, and taken when they are seeded for the next.
:class:`ShardReaders` are those of one worker; they hand out the copies of the dataset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import GeneratorType
from typing import Any, ClassVar

from minloader._formats import brief_repr, counted, differences
from minloader._memory.pickling import pack, unpack
from minloader._protocols import (
    has_epochs,
    is_read_once,
    is_stateful,
    known_state,
    states_of,
)
from minloader._sampling.reader import Check, Reader, Source, SourceState
from minloader._worker.environment import Environment
from minloader._worker.messages import Job, Shard, WorkerInfo, begin_batch, ordinal_in_epoch
from minloader._worker.seeds import BatchKey

NOT_LEADING = (
    "those of a shuffled Hugging Face dataset do not: shuffle it with minloader.shuffled instead"
)
"""Whose states do not lead back to where they were taken, as far as is known."""

END = object()
"""Stands for a batch where there are no more."""


class OtherStream(ValueError):
    """A state is of another stream than the one that is to go on from it."""


def put_iterator_back(iterator: Any, state: Any) -> None:
    """Put the iterator of a stream back to a state.

    Raises:
        OtherStream: it has no states.
    """
    if not hasattr(iterator, "load_state_dict"):
        raise OtherStream(
            "the state that was loaded is one of an iterator, but that of the stream, "
            f"{brief_repr(iterator)}, has no load_state_dict; give the stream that the state was "
            "taken with"
        )
    iterator.load_state_dict(state)


def put_back(stream: Any, state: Any) -> None:
    """Put a stream back to a state, for the next ``iter``.

    As torchdata's loader, it may have an iterator ready, made to say where it is, which the next
    ``iter`` returns whatever was loaded. So if loading changes nothing of what it says, it is begun
    and put back once more.
    """
    said = known_state(stream)
    stream.load_state_dict(copy.deepcopy(state))  # some empty what they are given
    if said is not None and _says_it_is_at(stream, said):
        iter(stream)
        stream.load_state_dict(state)


def begin_at_state(stream: Any, state: Any) -> None:
    """Begin a stream once more that was put back to a state, if it has not gone there.

    Args:
        stream: one that is its own iterator. As with torchdata's loader, it may go to its state
            only when ``iter`` begins a pass.
        state: that was put back.
    """
    if _says_it_is_at(stream, state):
        return
    iter(stream)
    if not _says_it_is_at(stream, state):
        stream.load_state_dict(state)  # what it says is another thing


def _says_it_is_at(stream: Any, state: Any) -> bool:
    """Return whether a stream says that it is at a state, or does not say where it is."""
    said = known_state(stream)
    return said is None or not differences(said, state)


class Copy(Source):
    """A copy of a stream, in which one pass over its shard follows the other.

    Args:
        info: what it is told about where it runs, and the copy. Nothing else reads that meanwhile.
    """

    def __init__(self, info: WorkerInfo) -> None:
        super().__init__("dataset", info.dataset)
        self.info = info
        self._iterator_state: Any = None  # to be put back once there is an iterator
        self._ended: Any = None  # the iterator that has come to its end last

    @property
    def stream(self) -> Any:
        """The user's stream, which a shuffled one reads."""
        return getattr(self.items, "stream", self.items)

    @property
    def can_begin_again(self) -> bool:
        return not serves_one_pass(self.items)

    def stands(self, iterator: Any, pass_number: int) -> bool:
        """Return whether nobody has moved the iterator of a pass since that was read last."""
        is_alone = self.last_pass == pass_number
        return is_alone or not (is_stateful(self.items) or self._is_stream(iterator))

    def prepare(self, epoch: int, *, at: int, state: Any) -> bool:
        is_put = state is not None and not self._is_at(state)
        self._known_state = (None, None)
        self._iterator_state = None
        if is_put:
            states = unpack(state)
            self._iterator_state = states.get("iterator")
            if "dataset" in states:
                put_back(self.items, states["dataset"])
        return is_put

    def begin_epoch(self, pass_number: int, *, is_inline: bool) -> None:
        """Get ready to begin an epoch, for the pass of a number."""

    def iterate(self, epoch: int) -> Any:
        dataset = self.items
        if self.has_epochs:
            dataset.set_epoch(epoch)
        iterator = iter(dataset)
        state = self._iterator_state
        self._iterator_state = None  # if it is begun once more
        if state is not None:
            put_iterator_back(iterator, state)
            if _is_own_iterator(dataset, iterator):
                begin_at_state(dataset, state)
        return iterator

    def state_between(self, iterator: Any = None, pass_number: int | None = None) -> Any:
        return None  # the worker asks for it, seeded

    def end(self, iterator: Any, read: int, state: Any) -> None:
        stream = self.stream
        source = getattr(iterator, "_source", iterator)  # of a shuffled one, the stream's
        is_same = source is stream or source is self._ended
        self._ended = source
        if not read and self.has_given and is_same and not has_epochs(stream):
            raise _read_once(stream)

    def _is_stream(self, iterator: Any) -> bool:
        return getattr(iterator, "_source", iterator) is self.stream


class ShardReader(Reader):
    """Reads the batches of a shard, as lists of their samples, from where a task has begun.

    An error has the place of a batch.

    Args:
        copy: what it reads.
        job: says how many samples a batch has.
        shard: which batches.
        epoch: the epoch that it is read for.
        environment: where it runs. An interrupt may come in the calling process.

    Attributes:
        last_fingerprint: what the samples of the batch drawn last are recognized by; None: nothing.
        reread: how many batches it has passed over for the task.
        is_at_work: whether the stream's own code runs, or has just failed.
        is_other: whether it gave something else when it was read again.
    """

    chances: ClassVar[int] = 2

    def __init__(
        self, copy: Copy, job: Job, shard: Shard, epoch: int, environment: Environment
    ) -> None:
        from minloader._worker.fingerprint import fingerprint  # other datasets need none

        known = SourceState(shard.at, shard.state)
        super().__init__(copy, epoch, known, first=shard.first, pass_number=shard.pass_number)
        self.keeps_last = environment.is_inline
        self.reread = 0
        self._begin_next: Callable[[int], object] | None = None
        self.is_at_work = False
        self.last_fingerprint: int | None = None
        self.is_other = False
        self._fingerprint = fingerprint
        self._job = job
        self._size = job.options.batch_size or 1
        self._environment = environment

    @property
    def info(self) -> WorkerInfo:
        """What the stream is told about where it runs, and the stream."""
        info: WorkerInfo = self.source.info
        return info

    def is_followed_by(self, shard: Shard) -> bool:
        """Return whether the pass of a task can begin with the same copy, after this one."""
        if shard.first or not self.source.can_begin_again:
            return False
        # Where a state was put back in mid-epoch, the stream may begin there again.
        is_put = self.known.at and is_stateful(self.info.dataset)
        return self.is_ended and self.source.last_pass == self.pass_number and not is_put

    @property
    def was_just_put_back(self) -> bool:
        """Whether it has given nothing since it was put back to a state within the epoch."""
        # A batch that could not be read counts.
        at, state = self.known
        return at > 0 and state is not None and self._here <= at + 1

    @property
    def is_behind(self) -> bool:
        """Whether it is to be opened, or to pass over something, before it gives what is wanted."""
        return self.iterator is None or self._here < self.next

    @property
    def here(self) -> int:
        """Ordinal of the batch that it reads next."""
        return self._here

    def go_on_with(self, shard: Shard) -> bool:
        """Get ready for the first batch of a task, if it is there; return whether it is."""
        first = shard.first
        if self.next == first + 1:
            self.give_again(first)  # if Ctrl-C came before it was delivered
        self.reread = 0
        self.check = shard.check and Check(*shard.check)
        if self.is_torn:
            return not self.source.can_begin_again  # then it says so
        if self.is_ended:
            # What has failed as it was opened is opened again: nobody may have had that error.
            has_failed = self.iterator is None or self.is_other
            return self.next <= first and not has_failed
        is_unmoved = self.iterator is None or self.source.stands(self.iterator, self.pass_number)
        return self.next == first and is_unmoved

    def begin(self) -> BatchKey:
        """Prepare for the next batch of the shard, and return its key.

        That is the first of the epoch to begin it, wherever in it that is: ``iter`` may draw an
        order. At the end it is the first of the epoch to come.
        """
        info = self.info
        index = 0 if self.is_ended or self.iterator is None else self._here
        ordinal = ordinal_in_epoch(index, shard=info.id, total=info.num_workers)
        return begin_batch(info, self.epoch + self.is_ended, ordinal)

    def prepare(self) -> None:
        self._or_over(self._prepare)

    def _prepare(self) -> None:
        if not self.known.at:
            self.source.begin_epoch(self.pass_number, is_inline=self._environment.is_inline)
        super().prepare()

    def _begin(self) -> None:
        self._iterate()  # it was prepared, with numbers of its own

    def _begin_once_more(self) -> None:
        if self._chances == 1 and self._job.beginning is not None:
            self.info.dataset.load_state_dict(unpack(self._job.beginning)["dataset"])
        super()._begin_once_more()

    def draw(self) -> Any:
        """Return the samples of the next batch, a list, or END."""
        self.last_fingerprint = None
        batches = self.take(1)
        if not batches:
            return END
        samples = batches[0]
        self.last_fingerprint = self._fingerprint(samples)
        return samples

    def pass_over(self, begin_next: Callable[[int], object]) -> None:
        """Begin to read, past what was delivered before.

        Args:
            begin_next: called before each batch, with -1 for one that is passed over; not before
                the first of an epoch, which goes on with the numbers that ``iter`` has drawn.
        """
        self._begin_next = begin_next
        was_given = self._here < self.next
        try:
            self.open()
        except OtherStream:
            self.is_ended = True
            self.is_other = True
            raise
        except BaseException as error:
            if not was_given or self.is_other or self._ends_program(error):
                raise
            raise self.misfit("failed") from error
        finally:
            self._begin_next = None  # it leads here
        if self.next:
            begin_next(0)

    def _most_to_pass(self) -> int:
        self.reread += 1
        assert self._begin_next is not None
        self._begin_next(-1)
        return 1

    def _draw(self, most: int) -> list[Any]:
        try:
            return super()._draw(most)
        except BaseException as error:
            iterator = self.iterator
            if isinstance(iterator, GeneratorType) and not self._ends_program(error):
                # It must be known now: what has that for its place would be read on by who has its
                # state.
                self.is_ended |= iterator.gi_frame is None
            raise

    def _ends_program(self, error: BaseException) -> bool:
        return self._environment.ends_program(error)

    def _coming(self, most: int) -> Iterator[Any]:
        samples = map(next, repeat(self.iterator, self._size))
        return filter(None, map(list, (samples,)))

    def _sorted(self, drawn: list[Any]) -> tuple[list[Any], bool]:
        batches, is_end = super()._sorted(drawn)
        if batches and len(batches[0]) < self._size:
            return (batches if self._job.options.keep_last else []), True
        return batches, is_end

    def digest(self, ordinal: int, item: Any) -> Any:
        return self._fingerprint(item)

    def _misfit(self, ordinal: int, *item: Any) -> RuntimeError:
        what = "given other samples" if item else f"ended after {counted(ordinal, 'batch')}"
        return self.misfit(what)

    def misfit(self, what: str) -> RuntimeError:
        """Return the error for a stream that is not what it was, and read no more of it.

        Args:
            what: it has done.
        """
        self.is_ended = True
        self.is_other = True
        given = self.next if self.check is None else self.check.ordinal + 1
        lead = f" that lead there ({NOT_LEADING})" if is_stateful(self.info.dataset) else ""
        return RuntimeError(
            f"the stream has {what} when shard {self.info.id} was read again, past the "
            f"{counted(given, 'batch')} that it had given: it must give the same samples each "
            "time, for the same epoch, shard and seed, or have state_dict and load_state_dict"
            f"{lead}; or is the state that of another rank?"
        )

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state, by names: the shard, or at its end the next pass, goes on from that."""
        dataset = self.info.dataset
        iterator = self.iterator
        if self.is_ended:
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
        job: with what is read.
        info: what the user's code is told about where the worker runs. While it reads a shard, that
            is told of the shard.
        environment: where that is.
    """

    job: Job
    info: WorkerInfo
    environment: Environment
    _readers: dict[tuple[int, int], ShardReader] = field(default_factory=dict)
    _own: Copy | None = None  # the job's own object, once it is read

    def find(self, shard: Shard, epoch: int, prepare: Callable[[WorkerInfo], None]) -> ShardReader:
        """Return a reader for a task, which may stand before its first batch.

        Args:
            shard: which batches.
            epoch: the epoch that it is read for.
            prepare: calls ``worker_init_fn``, if there is one, on the copy that an info has.

        Raises:
            Exception: what making a copy of the dataset, or ``worker_init_fn``, has raised.
        """
        for id, pass_number in list(self._readers):
            # Those that were begun later are none of this task's business: it may be older.
            is_older = id == shard.id and pass_number < shard.pass_number
            if is_older and pass_number not in (shard.follows, *shard.others):
                del self._readers[id, pass_number]  # it was left
        reader = self._readers.get((shard.id, shard.pass_number))
        if reader is not None and reader.go_on_with(shard):
            return reader
        if shard.state is None and self.environment.is_inline:
            shard = shard._replace(state=self.job.beginning)
        former = None
        if shard.follows is not None:
            former = self._readers.get((shard.id, shard.follows))
        if former is not None and former.is_followed_by(shard):
            copy = former.source
            copy.note_is_at(shard.state)
        else:
            copy = self._copy(shard, epoch)
            if copy.last_pass < 0:
                prepare(copy.info)
        reader = ShardReader(copy, self.job, shard, epoch, self.environment)
        reader.go_on_with(shard)
        self._readers[shard.id, shard.pass_number] = reader
        return reader

    def close(self) -> None:
        """Let go of what is being read: a generator runs its ``finally`` then."""
        self._readers.clear()

    def rewind(self) -> None:
        """Put the user's own object back to where it was before it was read, for other readers.

        Raises:
            RuntimeError: it can be read once, and was.
        """
        job = self.job
        if self._own is not None and serves_one_pass(job.dataset):
            raise _read_once(job.dataset)
        self._readers.clear()  # first: if Ctrl-C comes, those that read on put its state back
        if job.beginning is not None:
            job.dataset.load_state_dict(unpack(job.beginning)["dataset"])

    def _copy(self, shard: Shard, epoch: int) -> Copy:
        """Return a copy of the dataset, or the user's own object, which may have been read."""
        dataset = self._dataset(shard)
        if self._own is not None and dataset is self._own.items:
            return self._own
        info = replace(self.info, id=shard.id, num_workers=shard.total, dataset=dataset)
        if serves_one_pass(dataset):
            # No other epoch is read in this copy. Where one may be, worker_init_fn must do the
            # same for a copy that is made in a later epoch, to replace another.
            info.epoch = epoch
        is_of_drop_in = getattr(type(dataset), "of_drop_in", False)
        copy = dataset.copied(info) if is_of_drop_in else Copy(info)
        if dataset is self.job.dataset:
            self._own = copy
        return copy

    def _dataset(self, shard: Shard) -> Any:
        """Return an object that the shard can be read in."""
        dataset = self.job.dataset
        reload = self.environment.reload
        is_used = self._own is not None
        if not is_used:
            self._note_beginning(dataset)
        if reload is not None:
            # A forked worker makes copies of this object, so that has to stay as it is.
            if not is_used and shard.total <= self.info.num_workers:
                return dataset
            try:
                return reload()
            except TypeError as error:
                if is_read_once(dataset):
                    raise _read_once(dataset) from error
                others = self._readers.keys() - {(shard.id, shard.pass_number)}
                if others or is_stateful(dataset):
                    raise
                return dataset  # ``iter`` begins it anew, and nobody else reads it
        is_inline = self.environment.is_inline
        alone = shard.total == 1
        # What has a state, but none to be put back to when an epoch is left, is not read itself.
        cannot_be_put_back = is_stateful(dataset) and self.job.beginning is None
        if not (is_inline and alone) or cannot_be_put_back:
            try:
                return copy.deepcopy(dataset)
            except Exception as error:
                if not alone and not serves_one_pass(dataset):
                    raise TypeError(
                        f"each of the {shard.total} shards is read in a copy of the dataset, but "
                        f"it cannot be copied: {error}; make what that is in __iter__, or leave "
                        "it out in __getstate__, or use one worker"
                    ) from error
        may_be_read = is_inline and not is_read_once(dataset) if is_used else alone
        if serves_one_pass(dataset) and not may_be_read:
            raise _read_once(dataset)
        return dataset

    def _note_beginning(self, dataset: Any) -> None:
        """Note where the stream begins: a pass that is left early moves the user's own object."""
        state = known_state(dataset) if self.job.beginning is None else None
        if state is not None:
            self.job.beginning = pack({"dataset": state}, down=False)


def _is_own_iterator(dataset: Any, iterator: Any) -> bool:
    """Return whether a stream and its iterator have one state."""
    if not (is_stateful(dataset) and is_stateful(iterator)):
        return False
    # Not compared themselves: both may stand for the same object of the user's.
    return bool(iterator.state_dict == dataset.state_dict)


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
