"""Randomness belongs to the batch, or to the sample, and to the rank."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import require, variants

from minloader import (
    BatchSampler,
    Concatenated,
    DynamicBatchSampler,
    Loader,
    MixtureSampler,
    PackedBatchSampler,
    concurrent,
    get_worker_info,
    shuffled,
    sliced,
)
from minloader._sampling.seeding import derive, sample_key

pytestmark = pytest.mark.usefixtures("quick_starts")


LENGTHS = [1 + 7 * n % 13 for n in range(40)]


class Drawn:
    """Gives the index of a sample, and what was drawn for it and for its batch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        own, batch = int(info.sample_rng.integers(1 << 60)), int(info.rng.integers(1 << 60))
        return index, own, batch, random.random(), np.random.random()


class Awaited(Drawn):
    async def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        return index, int(info.sample_rng.integers(1 << 60)), int(info.rng.integers(1 << 60))


def samples_of(dataset: Any, sampler: Any, **options: Any) -> list[Any]:
    with Loader(dataset, sampler, collate_fn=list, **options) as loader:
        return [sample for batch in loader for sample in batch]


def test_ranks_draw_other_numbers_at_each_step():
    def drawn(rank: int, num_workers: int) -> list[Any]:
        sampler = BatchSampler(40, 4, rank=rank, world_size=2)
        return samples_of(Drawn(), sampler, num_workers=num_workers)

    ranks = [drawn(rank, 0) for rank in range(2)]
    for draw in (2, 3, 4):  # rng, random, numpy.random
        values = [[sample[draw] for sample in samples] for samples in ranks]
        assert not set(values[0]) & set(values[1])
    assert drawn(1, 2) == ranks[1]


class OfTorch:
    """Reads and gives as torch's ``DistributedSampler``; also as a stream."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Any:
        return iter(range(1, 40, 2))


class OfAccelerate:
    num_processes, process_index, batch_sampler = 2, 1, None

    def __iter__(self) -> Any:
        return iter([[1, 3], [5, 7]])


class OfDetectron:
    _world_size, _rank = 2, 1

    def __iter__(self) -> Any:
        return iter(range(1, 40, 2))


class OfNumpy(OfTorch):
    num_replicas, rank = np.int64(2), np.int64(1)


class OfLhotse(OfAccelerate):
    """As lhotse's samplers of several others, which are of one rank themselves."""

    num_processes, process_index, world_size, rank = 1, 0, 1, 0
    samplers = (range(3), OfTorch())


class IterableDatasetShard(OfAccelerate):
    """As Accelerate's: it reads all, and takes the part of its rank."""


class Split:
    """As HF's stream after ``split_dataset_by_node``."""

    _distributed = SimpleNamespace(rank=1, world_size=2)

    def __iter__(self) -> Any:
        return iter(range(1, 40, 2))


class Plain:
    def __iter__(self) -> Any:
        return iter(range(9))


class Wrapping(Plain):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def a_mixture(part: Any) -> Any:
    return MixtureSampler([9, part], [1, 1])


def of_rank_1() -> Any:
    return BatchSampler(20, None, rank=1, world_size=2)


RANKED: dict[str, Any] = {
    "none": (lambda: range(3), 0),
    "torch's": (OfTorch, 1),
    "detectron2's": (OfDetectron, 1),
    "numpy's": (OfNumpy, 1),
    "within torch's": (lambda: BatchSampler(OfTorch(), 3), 1),
    "Accelerate's": (OfAccelerate, 1),
    "lhotse's": (OfLhotse, 1),
    "in a mixture": (lambda: a_mixture(of_rank_1()), 1),
    "in a mixture of mixtures": (lambda: a_mixture(a_mixture(OfNumpy())), 1),
    "in a mixture, packed": (
        lambda: PackedBatchSampler(lambda item: 1, 3, sampler=a_mixture(of_rank_1())),
        1,
    ),
}

RANKED_STREAMS: dict[str, Any] = {
    "none": (Plain, 0),
    "own": (OfTorch, 1),
    "shuffled": (lambda: shuffled(OfAccelerate(), 12), 1),
    "split": (Split, 1),
    "split and shuffled": (lambda: shuffled(Split(), 12), 1),
    "wrapped": (lambda: Wrapping(Wrapping(OfNumpy())), 1),
    "takes its part of all": (lambda: Wrapping(IterableDatasetShard()), 0),
}


def told_rank(item: Any) -> int:
    return int(get_worker_info().rank)


@pytest.mark.parametrize("kind", RANKED)
def test_the_rank_of_any_sampler_counts(kind):
    make, rank = RANKED[kind]
    with Loader(told_rank, make(), num_workers=0) as loader:
        assert set(loader) == {rank}


@pytest.mark.parametrize("kind", RANKED_STREAMS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rank_of_any_stream_counts(kind, workers):
    make, rank = RANKED_STREAMS[kind]
    with Loader(make(), transform=told_rank, num_workers=workers) as loader:
        assert set(loader) == {rank}


@pytest.mark.parametrize("way", ["variables", "torch"])
def test_a_stream_that_names_no_rank_has_that_of_the_process(way, monkeypatch):
    """As a launcher tells it, or torch's process group: streams ask there for their part."""
    if way == "variables":
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        distributed = require("torch.distributed")
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_rank", lambda *group: 1)
        monkeypatch.setattr(distributed, "get_world_size", lambda *group: 2)
    with Loader(Plain(), transform=told_rank, num_workers=0) as loader:
        assert set(loader) == {1}
    with Loader(told_rank, range(3), num_workers=0) as loader:
        assert set(loader) == {0}  # what a sampler gives is of no rank unless it says so


def test_ranks_shuffle_a_stream_otherwise_and_draw_other_numbers():
    class Ranked(Plain):
        def __init__(self, rank: int) -> None:
            self.world_size, self.rank = 2, rank

    def draw(sample: Any) -> Any:
        return sample, random.random()

    def epoch(rank: int) -> Any:
        stream = shuffled(Ranked(rank), 12)
        with Loader(stream, transform=draw, num_workers=0) as loader:
            return list(zip(*loader, strict=True))

    (order, drawn), (other_order, other_drawn) = epoch(0), epoch(1)
    assert sorted(order) == sorted(other_order)
    assert order != other_order
    assert not set(drawn) & set(other_drawn)


def test_samples_of_a_shuffled_stream_draw_not_what_batches_draw():
    """From the global generators: a sample belongs to its place in the stream."""

    class Drawing:
        def __iter__(self) -> Any:
            return (random.random() for _ in range(75))

    with Loader(shuffled(Drawing(), 20), num_workers=0) as loader:
        samples = set(loader)
    with Loader(lambda n: random.random(), range(200), num_workers=0) as loader:
        batches = set(loader)
    assert len(samples) == 75
    assert not samples & batches


WAYS: dict[str, Any] = {
    "in order": lambda: BatchSampler(40, 4),
    "other batches": lambda: BatchSampler(40, 7, shuffle=True),
    "dynamic": lambda: DynamicBatchSampler(LENGTHS, max_total=30, shuffle=True),
    "packed": lambda: PackedBatchSampler(LENGTHS, 20, rows=2, shuffle=True),
    "numpy": lambda: [np.arange(20), np.arange(20, 40)],
}


def draws_by_sample(samples: list[Any]) -> dict[Any, Any]:
    return {int(sample[0]): sample[1] for sample in samples}


@pytest.mark.parametrize("way", WAYS)
@variants("num_workers", [0, 2])
def test_what_belongs_to_the_sample_follows_from_its_index_alone(way, num_workers):
    expected = draws_by_sample(samples_of(Drawn(), BatchSampler(40, 4), num_workers=0))
    assert len(set(expected.values())) == 40
    drawn = samples_of(Drawn(), WAYS[way](), num_workers=num_workers)
    assert draws_by_sample(drawn) == expected


@pytest.mark.parametrize("kind", [Drawn, Awaited])
def test_samples_that_are_read_at_the_same_time_draw_alike(kind):
    dataset = concurrent(kind())
    expected = draws_by_sample(samples_of(Drawn(), BatchSampler(40, 4), num_workers=0))
    got = samples_of(dataset, BatchSampler(40, 8, shuffle=True), num_workers=0)
    assert draws_by_sample(got) == expected
    assert len({sample[2] for sample in got}) == 40  # rng, too, is each sample's own


class Wrapped:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[39 - index]


@pytest.mark.parametrize(
    ("make", "items"),
    [
        (Wrapped, [[0, 1, 2], [3, 4]]),
        (lambda dataset: dataset, [[[0, 1], [2, 3]]]),
    ],
)
def test_what_reads_several_times_for_a_batch_draws_other_numbers(make, items):
    dataset = make(concurrent(Drawn()))
    options: Any = {"transform": lambda sample: sample[2], "collate_fn": list, "num_workers": 0}
    with Loader(dataset, items, **options) as loader:
        drawn = list(np.concatenate([np.ravel(batch) for batch in loader]))
    assert len(set(drawn)) == len(drawn) >= 4


def test_a_wrapper_decides_what_the_index_of_a_sample_is():
    assert (
        samples_of(Wrapped(concurrent(Drawn())), [[5]], num_workers=0)[0][1]
        == (samples_of(Wrapped(Drawn()), [[5]], num_workers=0)[0][1])
    )


def test_another_epoch_or_seed_draws_other_numbers():
    def drawn(seed: int, epoch: int) -> set[int]:
        with Loader(Drawn(), batch_size=4, collate_fn=list, num_workers=0, seed=seed) as loader:
            loader.epoch = epoch
            return {sample[1] for batch in loader for sample in batch}

    values = [drawn(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set().union(*values)) == 160
    assert drawn(1, 1) == values[3]


def test_transform_draws_for_the_sample_and_collate_fn_cannot():
    def draw(sample: Any) -> Any:
        return sample, int(get_worker_info().sample_rng.integers(1 << 60))

    def transformed(size: int, dataset: Any) -> dict[Any, Any]:
        options = {"batch_size": size, "transform": draw, "collate_fn": list, "num_workers": 0}
        with Loader(dataset, **options) as loader:
            return dict(pair for batch in loader for pair in batch)

    class Fetching:
        def __len__(self) -> int:
            return 10

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    assert transformed(3, range(10)) == transformed(4, Fetching())
    with (
        Loader(range(4), batch_size=2, collate_fn=draw, num_workers=0) as loader,
        pytest.raises(RuntimeError, match="sample_rng is for code that makes one sample"),
    ):
        list(loader)


@pytest.mark.parametrize("wrap", [Wrapped, concurrent])
@pytest.mark.parametrize("on_sample_error", ["raise", "skip"])
@pytest.mark.parametrize("items", [range(4), [[0, 1], [2, 3]]])
def test_the_dataset_and_transform_draw_other_numbers_however_batches_are_made(
    wrap, on_sample_error, items
):
    def draw(sample: Any) -> Any:
        return sample[1], int(get_worker_info().sample_rng.integers(1 << 60))

    def drawn(dataset: Any, items: Any, **options: Any) -> list[Any]:
        options |= {"transform": draw, "num_workers": 0}
        if type(items) is list:
            options["collate_fn"] = list
        with Loader(dataset, items, **options) as loader:
            return list(np.concatenate([np.ravel(batch) for batch in loader]))

    expected = drawn(Drawn(), range(4))
    assert len(set(expected)) == 8
    assert set(drawn(wrap(Drawn()), items, on_sample_error=on_sample_error)) == set(expected)


def test_whole_lists_streams_and_odd_indices_have_no_samples_generator():
    def draw(item: Any) -> Any:
        return get_worker_info().sample_rng.random()

    with Loader(draw, [[1, 2]], num_workers=0) as loader, pytest.raises(RuntimeError):
        next(iter(loader))
    with Loader(draw, [{"a": 1}], num_workers=0) as loader, pytest.raises(TypeError, match="'a'"):
        next(iter(loader))
    with Loader(draw, ["name", ("a", 3)], num_workers=0) as loader:
        assert len(set(loader)) == 2


def test_all_pieces_and_parts_of_a_mixture_draw_for_their_sample():
    class Text(Drawn):
        def __getitem__(self, index: int) -> Any:
            own = get_worker_info().sample_rng.integers(1 << 60)
            return np.full(LENGTHS[index], own)

    whole = samples_of(Text(), BatchSampler(40, 4), num_workers=0)
    sampler = PackedBatchSampler(LENGTHS, 5, long="split")
    pieces = [
        value for piece in samples_of(sliced(Text()), sampler, num_workers=0) for value in piece
    ]
    expected = Counter({int(each[0]): len(each) for each in whole})
    assert Counter(map(int, pieces)) == expected

    mixture = MixtureSampler([40, 40], [1, 1], batch_size=4)
    both = Concatenated([Drawn(), Drawn()])
    drawn = [sample[1] for sample in samples_of(both, mixture, num_workers=0)]
    assert len(set(drawn)) == 80  # each part's samples are its own


def test_each_use_of_a_seed_has_numbers_of_its_own():
    cases = [
        derive(domain, *case)
        for domain in ("order", "part", "batch", "sample", "worker", "shuffled", "epoch")
        for case in [(0,), (0, 0), (0, 0, 0), (0, (0, 0)), ("0",), (1,), (0, 1), (2**40, 1)]
    ]
    assert len(set(cases)) == len(cases)
    assert sample_key(np.int64(3)) == sample_key(3) == sample_key(np.array(3))
    assert sample_key(["a", (1, 2)]) == ("a", (1, 2))


def test_the_sampler_draws_not_what_the_first_batch_draws():
    """numpy's SeedSequence of [seed, epoch] is that of [seed, epoch, 0]."""
    order = BatchSampler(list(range(100)), None, shuffle=True)
    drawn: list[int] = []
    with Loader(lambda n: get_worker_info().rng.permutation(100), [0], num_workers=0) as loader:
        drawn = next(iter(loader)).tolist()
    assert list(order) != drawn
    parts = [MixtureSampler([50], [1], shuffle=True, seed=seed) for seed in (1, 0)]
    singles = BatchSampler(50, None, shuffle=True, seed=2)
    assert [index for _, index in parts[0]] != list(singles)  # seed + 1 + 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["map-style", "stream", "stream under torch.distributed"])
def test_ranks_of_the_drop_in_draw_other_numbers(kind, workers, monkeypatch):
    torch = require("torch")
    from minloader.torch import DataLoader

    class Noise:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> float:
            return float(torch.rand(1))

    class NoiseStream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return (float(torch.rand(1)) for _ in range(4))

    drawn = []
    for rank in range(2):
        torch.manual_seed(0)
        sampler = torch.utils.data.DistributedSampler(range(8), 2, rank)
        if kind == "map-style":
            loader = DataLoader(Noise(), batch_size=2, sampler=sampler, num_workers=workers)
        else:
            stream = NoiseStream()
            if kind == "stream":
                stream.num_replicas, stream.rank = 2, rank
            else:
                monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
                monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
                monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
            loader = DataLoader(stream, batch_size=2, num_workers=workers)
        drawn.append({float(value) for batch in loader for value in batch})
        loader.close()
    assert not drawn[0] & drawn[1]
    assert len(drawn[0]) == len(drawn[1]) == 4 * (workers if kind != "map-style" and workers else 1)
