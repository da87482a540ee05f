"""How the user's functions make a batch of an item of the sampler, or of samples of a stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from minloader._errors import SKIP, BatchError, is_own, summary
from minloader._formats import brief_repr
from minloader._protocols import (
    checked_indices,
    checked_rows,
    checked_samples,
    has_getitems,
)
from minloader._worker.messages import (
    NO_SAMPLE,
    Job,
    current_batch,
    current_info,
)


@dataclass(slots=True, eq=False, repr=False)
class BatchMaker:
    """Makes the batches of one task, one at a time, and is thrown away.

    Attributes:
        job: what to make them from.
        read: reads a sample of the dataset.
        turn_to: called with the index of each sample before the user's code makes it.
        sample_cell: its one element is set to the number of that sample in its item, -1 for none.
            It may be shared memory: who finds this worker stuck or dead reads it.
        begin_alone: called with these numbers, before each sample of a batch that its worker died
            with; it raises the error that stands for a sample that took workers along. None: the
            batch is made as ever.
        item: index of the item that it has come to.
        early_reads: the futures of the samples of the item, list by list, where they are read
            already.
        failing: the index of the sample that has just raised an error, in a tuple; () if it is not
            known.
        errors: of each sample that failed and was left out, or replaced: of which item, its index
            as in ``failing``, and the error in words.
        transform_seconds: spent in the loader's ``transform``.
        collate_seconds: spent in its ``collate_fn``. Most of the rest is the dataset's.
        skipped: samples that were left out.
    """

    job: Job
    read: Callable[[Any], Any]
    turn_to: Callable[..., None]
    sample_cell: Any
    begin_alone: Callable[[int], object] | None
    item: int = 0
    early_reads: list[list[Future[Any]]] = field(default_factory=list)
    failing: tuple[Any, ...] = ()
    errors: list[tuple[int, tuple[Any, ...], str]] = field(default_factory=list)
    transform_seconds: float = 0.0
    collate_seconds: float = 0.0
    skipped: int = 0
    _samples_before: int = 0  # of the item in the batches before, of a list of batches

    def fetch(self, item: Any) -> Any:
        """Return the batch of one item, or SKIP."""
        self._samples_before = 0
        if self.job.collate_fn is None:
            if self.job.options.on_sample_error is not None or self.early_reads:
                # The item is a sample.
                return self.combine(self._read([item]), [item])
            self.turn_to(item)
            batch = self.read(item)
            if self.job.transform is None and batch is not SKIP:
                return batch
            self.turn_to(item, ("transform",))
            return self.combine([batch])
        if self.job.is_nested(item):
            batches = []
            for indices in item:
                batches.append(self._gather(indices))
                self._samples_before += len(indices)
            return SKIP if any(batch is SKIP for batch in batches) else batches
        return self._gather(item)

    def combine(self, samples: Any, indices: Sequence[Any] = ()) -> Any:
        """Return the batch of some samples; of a single one, if nothing is collated.

        Args:
            samples: the samples, normally a list.
            indices: of these samples, for errors; () if they have none.

        Returns:
            The batch; SKIP if all samples are left out.
        """
        transform = self.job.transform
        collate_fn = self.job.collate_fn
        given = samples
        samples, numbers = self._without_skipped(samples)
        if isinstance(samples, list) and len(samples) > 1 and samples[0] is samples[-1]:
            from minloader._diagnosis.shard_watch import look_at_refilled  # of few

            look_at_refilled(samples[0], indices)
        if transform is not None:
            begin = time.perf_counter()
            samples = self._each(transform, samples, indices, ("transform",), numbers=numbers)
            self.transform_seconds += time.perf_counter() - begin
            samples, _ = self._without_skipped(samples)
        if isinstance(samples, list) and not samples and len(given):
            return SKIP  # a sampler's empty batch is one
        if collate_fn is None:
            return samples[0]
        self.turn_to(NO_SAMPLE)
        self.sample_cell[0] = -1
        begin = time.perf_counter()
        batch = collate_fn(samples)
        self.collate_seconds += time.perf_counter() - begin
        return batch

    def _read(self, indices: Sequence[Any]) -> list[Any]:
        if not self.early_reads:
            return self._each(self.read, indices, indices)
        futures = deque(self.early_reads.pop(0))
        try:
            # Each is let go of first: it has its error, whose frames lead here.
            return self._each(lambda index: futures.popleft().result(), indices, indices)
        finally:
            for future in futures:  # after an error, or Ctrl-C
                future.cancel()

    def _gather(self, item: Any) -> Any:
        dataset = self.job.dataset
        as_torch = self.job.is_as_torch
        is_one_by_one = self.begin_alone is not None and (not as_torch or type(item) is list)
        if self.early_reads or is_one_by_one or not has_getitems(dataset):
            indices = checked_indices(item)
            return self.combine(self._read(indices), indices)
        self.turn_to(NO_SAMPLE)
        if as_torch:  # the sampler's own item, of any kind
            indices = list(item) if hasattr(type(item), "__len__") else []
            samples = self._read_together(item, indices)
            if self.job.transform is not None:
                samples = checked_rows(samples)
                if len(samples) != len(indices):
                    indices = []  # nobody knows of which index each is
            return self.combine(samples, indices)
        indices = checked_indices(item)
        return self.combine(
            checked_samples(self._read_together(indices, indices), indices), indices
        )

    def _read_together(self, item: Any, indices: list[Any]) -> Any:
        """Return what ``__getitems__`` gives; if that fails, samples that are read one by one."""
        try:
            return self.job.dataset.__getitems__(item)
        except (Exception, SystemExit) as error:
            if self.job.options.on_sample_error is None or not indices or not is_own(error):
                raise
        return self._each(self.read, indices, indices)

    def _each(
        self,
        function: Callable[[Any], Any],
        values: Sequence[Any],
        indices: Sequence[Any],
        stage: tuple[str, ...] = (),
        *,
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return what a function makes of each value; note the index of one that it fails on.

        Args:
            function: gets each of the values.
            values: one for each sample.
            indices: of the samples; () if they have none.
            stage: what the function is, see :meth:`CurrentBatch.turn_to`.
            numbers: of the values among the samples of the batch; None: none is left out.
        """
        results: list[Any] = []
        has_numbers = bool(indices) or self.job.options.is_stream
        for n, value in enumerate(values):
            number = n if numbers is None else numbers[n]
            try:
                if has_numbers:
                    self.sample_cell[0] = self._samples_before + number
                if indices:
                    self.turn_to(indices[number], stage)
                if self.begin_alone is not None:
                    self.begin_alone(self._samples_before + number)
                results.append(function(value))
            except BaseException as error:
                self.failing = tuple(indices[number : number + 1])
                if self.job.options.on_sample_error is None or not is_own(error):
                    raise
                results.append(self.job.options.on_sample_error(self._sample_error(number, error)))
                self.errors.append((self.item, self.failing, summary(error)))
                self.failing = ()
        return results

    def _sample_error(self, n: int, error: BaseException) -> BatchError:
        """Return what ``on_sample_error`` is told of a sample that failed."""
        info = current_info.get()
        assert info is not None
        index = self.failing[0] if self.failing else None
        ordinal = current_batch(info).ordinal
        failed = BatchError(
            f"sample {brief_repr(index) if self.failing else f'{n} of a batch'}: {summary(error)}",
            item=index,
            sample=index,
            ordinal=-1 if ordinal is None else ordinal,
            epoch=info.epoch,
            worker=info.id,
            pid=info.pid,
        )
        failed.__cause__ = error
        return failed

    def _without_skipped(self, samples: Any) -> tuple[Any, list[int] | None]:
        """Return the samples to keep, and their numbers; None for these if all are kept."""
        if not isinstance(samples, list):  # a function of torch's kind takes anything
            return samples, None
        kept = [n for n, sample in enumerate(samples) if sample is not SKIP]
        if len(kept) == len(samples):
            return samples, None
        self.skipped += len(samples) - len(kept)
        return [samples[n] for n in kept], kept
