"""The datasets of real_work.py's cases, and the adapters that peers.py does not have.

What is said there of adapters holds here too. Workers import this module: nothing heavy up here.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import Case, Tiny, as_is

# --- one large array after another


class Payloads(Tiny):
    """A batch is an array, which the worker makes once, and its number in a pass of 16."""

    def __init__(self, size: int, large: int) -> None:
        super().__init__(size)
        self.large = large

    @cached_property
    def array(self) -> Any:
        return np.arange(self.large // 4, dtype=np.float32)

    def __getitem__(self, index: int) -> Any:
        return self.array, index % 16

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def spdl_queue(case: Case, arena: Any = None) -> Iterable[Any]:
    # iterate_in_subprocess with its own buffer of 3; without an arena all is pickled.
    from spdl.pipeline import iterate_in_subprocess

    made = partial(as_is, case.dataset)
    return iterate_in_subprocess(made, mp_context=case.start, arena=arena)


def spdl_ring(case: Case) -> Iterable[Any]:
    # The capacity is what its docstring advises: buffer_size + 2 items.
    from spdl.pipeline import SharedMemoryRingBuffer

    multiprocessing.set_start_method(case.start, force=True)  # its Condition has the default
    return spdl_queue(case, SharedMemoryRingBuffer((3 + 2) * case.large))


def spdl_pool(case: Case) -> Iterable[Any]:
    # As many segments as its docstring advises: buffer_size, and what the consumer holds.
    from spdl.pipeline import SharedMemorySegmentPool

    multiprocessing.set_start_method(case.start, force=True)  # its Condition has the default
    return spdl_queue(case, SharedMemorySegmentPool(case.large, 3 + 2))


def batched(dataset: Any, size: int) -> Iterator[range]:
    indices = range(len(dataset))
    return (indices[begin : begin + size] for begin in range(0, len(dataset), size))


def spdl_loader(case: Case, collate_fn: Any = np.stack) -> Iterable[Any]:
    # Made to take the place of torch's; keeps no workers from one epoch to the next.
    from spdl.dataloader import get_pytorch_dataloader

    loader: Iterable[Any] = get_pytorch_dataloader(
        case.dataset,
        batch_size=case.batch_size,
        sampler=range(len(case.dataset)),
        num_workers=case.workers,
        collate_fn=collate_fn,
        prefetch_factor=case.prefetch,
        multiprocessing_context=case.start,
        in_order=True,
    )
    return loader


# --- photos


class Photos(Tiny):
    """A sample is a random part of a photo, now and then flipped, and its number.

    The part depends on the number alone, so that all make the same batches.
    """

    def __init__(self, size: int, paths: Sequence[str]) -> None:
        super().__init__(size)
        self.paths = paths

    def part(self, index: int) -> tuple[int, int, int, bool]:
        """Left, top, side, and whether to flip it; even numbers, to which FFmpeg would round."""
        chance = random.Random(index)
        side = chance.randrange(200, 375, 2)
        left, top = chance.randrange(0, 501 - side, 2), chance.randrange(0, 376 - side, 2)
        return left, top, side, chance.random() < 0.5

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        left, top, side, flip = self.part(index)
        with Image.open(self.paths[index % len(self.paths)]) as photo:
            box = (left, top, left + side, top + side)
            image = photo.resize((224, 224), Image.Resampling.BILINEAR, box)
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image), index


class DecodedBySpdl(Photos):
    """The same, but for what FFmpeg rounds otherwise than Pillow."""

    def __getitem__(self, index: int) -> Any:
        from spdl.io import load_image, to_numpy

        left, top, side, flip = self.part(index)
        steps = [f"crop={side}:{side}:{left}:{top}", "scale=224:224:flags=bilinear"]
        steps += ["hflip"] * flip + ["format=pix_fmts=rgb24"]
        path = self.paths[index % len(self.paths)]
        return to_numpy(load_image(path, filter_desc=",".join(steps))), index


def make_photos(folder: Path, count: int) -> None:
    """500 x 375 pixels of clouds and grain, some 70 kB each."""
    from PIL import Image

    for number in range(count):
        noise = np.random.default_rng(number)
        clouds = Image.fromarray(noise.integers(0, 256, (12, 16, 3), np.uint8))
        grainy = clouds.resize((500, 375)) + noise.normal(0, 8, (375, 500, 1))
        photo = Image.fromarray(grainy.clip(0, 255).astype(np.uint8))
        photo.save(folder / f"{number:04}.jpg", quality=90)


def np_stacked(samples: Iterable[Any]) -> Any:
    images, numbers = zip(*samples, strict=True)
    return np.stack(images), np.array(numbers)


def spdl_photos(case: Case) -> Iterable[Any]:
    # np.stack: with torch's collate, its default, it took more than twice the CPU time an image,
    # as its workers leave torch all its threads.
    return spdl_loader(case, np_stacked)


def _make(dataset: Any, indices: Sequence[int]) -> Any:
    return np_stacked(dataset[index] for index in indices)


def spdl_threads(case: Case) -> Iterable[Any]:
    # A pipeline of threads, which its documentation advises for work outside the interpreter lock.
    from spdl.pipeline import PipelineBuilder

    batches = list(batched(case.dataset, case.batch_size or 1))
    make = partial(_make, case.dataset)
    builder = PipelineBuilder().add_source(batches)
    builder.pipe(make, concurrency=case.workers, output_order="input")
    builder.add_sink(case.prefetch * case.workers)
    pipeline = builder.build(num_threads=case.workers)
    with pipeline.auto_stop():
        yield from pipeline


def our_threads(case: Case) -> Iterable[Any]:
    # Threads in place of worker processes; its own collate.
    from minloader import Loader

    return Loader(
        case.dataset,
        batch_size=case.batch_size,
        num_workers=case.workers,
        prefetch_factor=case.prefetch,
        executor="thread",
    )


def decoded_by_spdl(case: Case) -> Case:
    return replace(case, dataset=DecodedBySpdl(len(case.dataset), case.dataset.paths))


def spdl_threads_io(case: Case) -> Iterable[Any]:
    # The same, with its own decoder, which needs FFmpeg's libraries.
    return spdl_threads(decoded_by_spdl(case))
