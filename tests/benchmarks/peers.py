"""The cases' datasets, and one small adapter per peer: given a case, an iterable of its batches.

A peer is imported in its adapter only, so that no worker pays for the others. The first line of
an adapter tells the settings; where it says nothing, they are the peer's defaults.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

WAIT = 0.02
"""Seconds that a batch of :class:`Waiting` waits."""


class Tiny:
    """A batch is eight numbers and a label."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return np.full(8, index, np.float32), index

    expected = __getitem__  # that batch, without the time it takes


class Waiting(Tiny):
    """A batch waits, as for a disk or a network, and says who made it."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(WAIT)
        return os.getpid(), index


def spend(seconds: float) -> None:
    """Takes so much processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Work(Tiny):
    """A batch takes so many seconds of processor time.

    Of processor time: a clock would go on while a worker waits for a processor, as if the work did
    itself, and the parent's share of the processors would cost nothing. Not a fixed number of
    steps either: these take longer while the other processor is busy, if both are one core's.
    """

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__(size)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        spend(self.seconds)
        return super().__getitem__(index)


class Images(Tiny):
    """A batch, or a sample, is one of the images that the dataset holds."""

    def __init__(self, size: int, distinct: int, shape: tuple[int, ...]) -> None:
        super().__init__(size)
        self.images = np.random.default_rng(0).integers(0, 256, (distinct, *shape), np.uint8)

    def __getitem__(self, index: int) -> Any:
        return self.images[index % len(self.images)]

    expected = __getitem__


class Rows(Tiny):
    """Rows of 1,000 float64, 125 rows a megabyte. A batch: who made it, which, and one row."""

    def __init__(self, at_once: int, slow: int, whole: int, megabytes: int) -> None:
        super().__init__(at_once + slow + whole)
        self.at_once, self.slow = at_once, slow
        self.array: Any = np.arange(megabytes * 125_000.0).reshape(-1, 1000)

    def __getitem__(self, index: int) -> Any:
        if index >= self.at_once + self.slow:
            self.array.sum()  # touches all memory
        elif index >= self.at_once:
            time.sleep(0.01)  # leaves some for the other workers
        return os.getpid(), index, self.expected(index)

    def expected(self, index: int) -> Any:
        return self.array[index % len(self.array)] * 2


def tensors() -> Any:
    """A dataset of torch's, which workers import torch for."""
    import torch

    return torch.utils.data.TensorDataset(torch.zeros(1000, 1000))


class Stacks(Tiny):
    """A batch is so many samples stacked, for peers that have no collate of their own."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        super().__init__(len(samples) // batch_size)
        self.samples, self.batch_size = samples, batch_size

    def __getitem__(self, index: int) -> Any:
        begin = index * self.batch_size
        return np.stack([self.samples[i] for i in range(begin, begin + self.batch_size)])

    expected = __getitem__


class Dealt(Tiny):
    """Samples in such an order that every n-th of them, from the k-th on, make batch k."""

    def __init__(self, samples: Any, batch_size: int, n: int) -> None:
        super().__init__(len(samples))
        self.samples, self.batch_size, self.n = samples, batch_size, n

    def __getitem__(self, index: int) -> Any:
        turn, index = divmod(index, self.n * self.batch_size)
        place, worker = divmod(index, self.n)
        return self.samples[(turn * self.n + worker) * self.batch_size + place]


class Tensors(Tiny):
    """The dataset's arrays as tensors, made anew each time.

    A tensor that the dataset itself holds is moved to shared memory once and then sent as a
    handle: the consumer would be given one and the same memory as every batch.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        from torch import from_numpy

        batch = self.dataset[index]
        if isinstance(batch, tuple):
            return from_numpy(batch[0]), batch[1]
        return from_numpy(batch)


class Share(Tiny):
    """What one worker of a MultiLoader makes."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        first, step = int(os.environ["WORKER"]), int(os.environ["NUM_WORKERS"])
        return (self.dataset[index] for index in range(first, len(self), step))


@dataclass(frozen=True)
class Case:
    """What is to be loaded, and how."""

    dataset: Any
    batch_size: int | None = None  # None: dataset[i] is a batch
    large: int = 0  # bytes of a batch, where they matter
    chunk: int = 1  # batches at a time, for peers that want to be told
    workers: int = 2
    start: str = "spawn"
    prefetch: int = 2  # per worker

    @property
    def ahead(self) -> int:
        """Batches that a worker of a peer may have ready: more of the tiny ones, it is faster."""
        return max(self.prefetch, self.chunk)

    def whole(self) -> Any:
        """A dataset of batches."""
        return Stacks(self.dataset, self.batch_size) if self.batch_size else self.dataset


def ours(case: Case) -> Iterable[Any]:
    # With batch_size, its own collate.
    from minloader import Loader

    return Loader(
        case.dataset,
        batch_size=case.batch_size,
        num_workers=case.workers,
        prefetch_factor=case.prefetch,
        mp_context=case.start,
    )


def torch_tensors(case: Case) -> Iterable[Any]:
    # Its own collate, which stacks tensors straight into shared memory (default_collate's source).
    return _torch(case, Tensors(case.dataset), None)


def ours_as_torch(case: Case) -> Iterable[Any]:
    # minloader.torch.DataLoader with torch's arguments.
    from minloader.torch import DataLoader

    return _torch(case, case.dataset, None, DataLoader)


def torch_alone(case: Case) -> Iterable[Any]:
    # Its own collate.
    return _torch(case, case.dataset, None)


def torch_numpy(case: Case) -> Iterable[Any]:
    # np.stack, or batches as they are, so that arrays arrive.
    return _torch(case, case.dataset, np.stack if case.batch_size else as_is)


def as_is(batch: Any) -> Any:
    return batch


def _torch(case: Case, dataset: Any, collate_fn: Any, loader_class: Any = None) -> Iterable[Any]:
    # persistent_workers, so that a second epoch finds them; pin_memory is for a GPU, and would
    # only copy; prefetch_factor is the default, 2, but for tiny batches. All these are in the
    # docstring of DataLoader.
    from torch.utils.data import DataLoader

    loader: Iterable[Any] = (loader_class or DataLoader)(
        dataset,
        batch_size=case.batch_size,
        sampler=range(len(dataset)),
        num_workers=case.workers,
        prefetch_factor=case.ahead,
        collate_fn=collate_fn,
        persistent_workers=True,
        multiprocessing_context=case.start,
    )
    return loader


def seqtools(case: Case) -> Iterable[Any]:
    # shm_size fits the buffers of max_buffered batches, and nobody keeps a batch: both as the
    # docstring of prefetch() asks. max_buffered is its default, 10, of which it keeps two in
    # reserve: with as few as others have it is slower. Shared memory is no faster for tiny batches.
    from seqtools import batch, prefetch

    multiprocessing.set_start_method(case.start, force=True)
    size, slots = case.batch_size, max(10, case.prefetch * case.workers + 2)
    batches = batch(case.dataset, size, collate_fn=np.stack) if size else case.dataset
    return prefetch(batches, case.workers, "process", slots, shm_size=slots * case.large)


def grain(case: Case) -> Iterable[Any]:
    # No reading threads, as the docstring of ReadOptions advises for data in memory. batch() comes
    # after to_iter_dataset(), so that it stacks into shared memory; each worker then stacks every
    # n-th sample, hence the order of the source.
    from absl import flags
    from grain import MapDataset, MultiprocessingOptions, ReadOptions

    flags.FLAGS.mark_as_parsed()  # or else it fails outside of an absl program
    size, source = case.batch_size, case.dataset
    source = Dealt(source, size, case.workers) if size else source
    options = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = MapDataset.source(source).to_iter_dataset(options)
    dataset = dataset.batch(size) if size else dataset
    return dataset.mp_prefetch(MultiprocessingOptions(case.workers, case.ahead))


def joblib(case: Case) -> Iterable[Any]:
    # loky, which maps the dataset's large arrays into memory. batch_size, since the docstring of
    # Parallel wants quick tasks grouped; its "auto" is no faster, and makes groups of up to half
    # a second, which come in bursts.
    from joblib import Parallel, delayed

    dataset = case.whole()
    parallel = Parallel(case.workers, return_as="generator", batch_size=case.chunk)
    return parallel(delayed(getitem)(dataset, index) for index in range(len(dataset)))


def mpire(case: Case) -> Iterable[Any]:
    # The dataset is its shared object, as the README advises. chunk_size, since the default of
    # imap(), 1/64 of a worker's share, depends on how long the epoch is; it is no faster.
    from mpire import WorkerPool

    dataset = case.whole()
    with WorkerPool(case.workers, shared_objects=dataset, start_method=case.start) as pool:
        yield from pool.imap(getitem, range(len(dataset)), chunk_size=case.chunk)


def webdataset(case: Case) -> Iterable[Any]:
    # There is nothing to set. Unordered; each worker runs through its share, up to 2,000 batches
    # ahead of the consumer.
    from webdataset.multi import MultiLoader

    multiprocessing.set_start_method(case.start, force=True)
    with TemporaryDirectory() as sockets:  # it would leave them
        prefix = os.path.join(sockets, "")
        loader = MultiLoader(Share(case.whole()), workers=case.workers, prefix=prefix)
        try:
            yield from loader
        finally:
            loader.kill()  # or else the program would not end


def in_process(case: Case) -> Iterable[Any]:
    # No workers: a loop.
    return map(case.whole().__getitem__, range(len(case.whole())))


def memory_copy(case: Case) -> Iterable[Any]:
    # The limit: one thread copies what a batch takes, between arrays that are warm.
    source = np.ones(case.large, np.uint8)
    target = source.copy()
    while True:
        np.copyto(target, source)
        yield target
