"""lhotse's samplers and datasets run through a Loader as they are, and resume where they were."""

from __future__ import annotations

import json
import pickle
import random
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAYS, printed_by, require
from helpers import Echo

from minloader import Loader

lhotse = require("lhotse")
require("soundfile")  # what lhotse reads WAV files with
torch = require("torch")

from lhotse.dataset import (  # noqa: E402
    BucketingSampler,
    DynamicBucketingSampler,
    DynamicCutSampler,
    K2SpeechRecognitionDataset,
    RandomizedSmoothing,
    SimpleCutSampler,
)
from lhotse.dataset.cut_transforms import PerturbVolume  # noqa: E402
from lhotse.dataset.input_strategies import AudioSamples  # noqa: E402

from minloader.torch import DataLoader  # noqa: E402

RATE = 8_000

FORKS = {"num_workers": 2, "mp_context": "fork"}
"""Workers that import no lhotse, which takes seconds."""

PLACES = {"inline": WAYS["inline"], "threads": WAYS["threads"], "processes": FORKS}
"""Where batches are made, as options of a loader."""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WAV files of noise, and the cuts that cover them."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(7)
    recordings, supervisions = [], []
    for number in range(48):
        path = folder / f"u{number:02}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            samples = rng.integers(RATE // 10, RATE)
            file.writeframes(rng.integers(-9_000, 9_000, samples).astype("<i2").tobytes())
        recording = lhotse.Recording.from_file(path)
        recordings.append(recording)
        text = f"text {number}"
        supervisions.append(
            lhotse.SupervisionSegment(path.stem, path.stem, 0, recording.duration, text=text)
        )
    lhotse.CutSet.from_manifests(
        recordings=lhotse.RecordingSet.from_recordings(recordings),
        supervisions=lhotse.SupervisionSet.from_segments(supervisions),
    ).to_file(folder / "cuts.jsonl")
    return folder / "cuts.jsonl"


# Buffers smaller than the corpus, so that most of an epoch is read and shuffled on the way.
SAMPLERS: dict[str, Callable[..., Any]] = {
    "buckets": lambda cuts, **options: DynamicBucketingSampler(
        cuts, max_duration=2, num_buckets=3, buffer_size=20, shuffle=True, seed=5, **options
    ),
    "stream": lambda cuts, **options: DynamicCutSampler(
        cuts, max_duration=2, shuffle_buffer_size=20, shuffle=True, seed=5, **options
    ),
    "simple": lambda cuts, **options: SimpleCutSampler(
        cuts.to_eager(), max_duration=2, shuffle=True, seed=5, **options
    ),
    "eager buckets": lambda cuts, **options: BucketingSampler(
        cuts.to_eager(), max_duration=2, num_buckets=3, shuffle=True, seed=5, **options
    ),
}


def make_sampler(manifest: str | Path, kind: str = "buckets", **options: Any) -> Any:
    """As it would be made in a new process."""
    return SAMPLERS[kind](lhotse.CutSet.from_jsonl_lazy(manifest), **options)


def plain(sampler: Any, epoch: int) -> list[Any]:
    """The epoch as lhotse gives it."""
    sampler.set_epoch(epoch)
    return list(sampler)


def ids(batches: Any) -> list[list[str]]:
    return [[cut.id for cut in cuts] for cuts in batches]


def reading_ahead(sampler: Any) -> Loader:
    """A loader that draws some items before they are asked for, as with processes, but quickly."""
    return Loader(Echo(), sampler, num_workers=2, executor="thread")


def assert_equal(batches: list[Any], others: list[Any]) -> None:
    """Batches of K2SpeechRecognitionDataset, bit by bit."""
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys() == {"inputs", "supervisions"}
        assert batch["inputs"].dtype == other["inputs"].dtype == torch.float32
        assert torch.equal(batch["inputs"], other["inputs"])
        a, b = dict(batch["supervisions"]), dict(other["supervisions"])
        assert a.pop("text") == b.pop("text")
        assert a.keys() == b.keys() == {"sequence_idx", "start_sample", "num_samples"}
        assert all(torch.equal(a[key], b[key]) for key in a)


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_those_of_lhotse_without_workers(manifest: Path, workers: int) -> None:
    dataset = K2SpeechRecognitionDataset(input_strategy=AudioSamples())
    sampler = make_sampler(manifest)
    expected = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        expected.append([dataset[cuts] for cuts in sampler])
    options = FORKS | {"num_workers": workers}
    with Loader(dataset, make_sampler(manifest), **options) as loader:
        epochs = [list(loader), list(loader)]
    for batches, others in zip(epochs, expected, strict=True):
        assert len(batches) > 10
        assert_equal(batches, others)
        texts = [text for batch in batches for text in batch["supervisions"]["text"]]
        assert sorted(texts) == sorted(f"text {number}" for number in range(48))
        largest = max(batch["inputs"].abs().max().item() for batch in batches)
        assert 0.2 < largest < 0.3  # sound, as it was written
    assert epochs[0][0]["supervisions"]["text"] != epochs[1][0]["supervisions"]["text"]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_cuts_arrive_as_they_are(manifest: Path, kind: str) -> None:
    place = "processes" if kind == "buckets" else "threads"
    with Loader(Echo(), make_sampler(manifest, kind), **PLACES[place]) as loader:
        for epoch in (0, 1, 2):
            got, sent = list(loader), plain(make_sampler(manifest, kind), epoch)
            assert [type(cuts) for cuts in got] == [lhotse.CutSet] * len(sent)
            assert [list(cuts) for cuts in got] == [list(cuts) for cuts in sent]


def test_an_epoch_after_one_left_early_is_whole(manifest: Path) -> None:
    """Though the sampler is its own iterator, of which there is only one."""
    with reading_ahead(make_sampler(manifest)) as loader:
        for _cuts in islice(loader, 3):
            pass
        assert ids(loader) == ids(plain(make_sampler(manifest), 1))
        loader.set_epoch(0)
        assert ids(loader) == ids(plain(make_sampler(manifest), 0))


def test_every_rank_has_its_own(manifest: Path) -> None:
    seen: list[str] = []
    for rank in (0, 1):
        options = {"world_size": 2, "rank": rank}
        with reading_ahead(make_sampler(manifest, **options)) as loader:
            batches = ids(loader)
        assert batches == ids(plain(make_sampler(manifest, **options), 0))
        seen += [name for batch in batches for name in batch]
    assert len(seen) == len(set(seen)) == 48


def augmented(manifest: Path, workers: int) -> Loader:
    dataset = K2SpeechRecognitionDataset(
        input_strategy=AudioSamples(),
        cut_transforms=[PerturbVolume(p=0.5, randgen=random)],  # the module: it is seeded
        input_transforms=[RandomizedSmoothing(sigma=0.1, sample_sigma=True)],  # torch's generator
    )
    options = FORKS | {"num_workers": workers}
    return Loader(dataset, make_sampler(manifest), seed=3, **options)


def test_augmentation_belongs_to_the_batch(manifest: Path) -> None:
    with augmented(manifest, 0) as alone, augmented(manifest, 2) as loader:
        epochs = [list(loader), list(loader)]
        assert_equal(epochs[0], list(alone))
        loader.set_epoch(0)
        assert_equal(epochs[0], list(loader))
    plain_dataset = K2SpeechRecognitionDataset(input_strategy=AudioSamples())
    with Loader(plain_dataset, make_sampler(manifest), num_workers=0) as loader:
        assert not torch.equal(next(iter(loader))["inputs"], epochs[0][0]["inputs"])


# --- state -----------------------------------------------------------------------------------


def save(loader: Loader) -> bytes:
    return pickle.dumps(loader.state_dict())


def resumed(state: bytes, sampler: Any, place: str = "inline") -> Iterator[list[list[str]]]:
    """The rest of the epoch, then the one after it."""
    with Loader(Echo(), sampler, **PLACES[place]) as loader:
        loader.load_state_dict(pickle.loads(state))
        yield ids(loader)
        yield ids(loader)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, {}) for kind in SAMPLERS],
        ("buckets", {"drop_last": True}),
        ("buckets", {"world_size": 2, "rank": 1}),
        ("stream", {"world_size": 2, "rank": 0}),
    ],
)
def test_round_trip_at_every_batch(manifest: Path, kind: str, options: dict[str, Any]) -> None:
    """Of epoch 1, on a sampler that remembers what it did in epoch 0."""

    def sampler() -> Any:
        return make_sampler(manifest, kind, **options)

    this, after = (ids(plain(sampler(), epoch)) for epoch in (1, 2))
    states = []
    with Loader(Echo(), sampler(), num_workers=0) as loader:
        list(loader)
        batches = iter(loader)
        states.append(save(loader))
        for expected in this:
            assert ids([next(batches)]) == [expected]
            states.append(save(loader))
        assert next(batches, None) is None
    for delivered, state in enumerate(states):
        rest = resumed(state, sampler())
        if delivered == len(this):
            # Whether the end was noticed or not: the epoch has nothing left, or is over.
            assert next(rest) in ([], after)
            continue
        assert next(rest) == this[delivered:], delivered
        assert next(rest) == after, delivered


@pytest.mark.parametrize(
    ("delivered", "before", "then"),
    [
        *((k, *ways) for k in (0, 1, 7, -1) for ways in permutations(["inline", "threads"])),
        *((k, "threads", "threads") for k in (0, 1, 7, -1)),
        *((7, *ways) for ways in permutations(["inline", "processes"])),
    ],
)
def test_round_trip_with_workers(manifest: Path, delivered: int, before: str, then: str) -> None:
    """What was read ahead for the workers does not count, and they may be others then."""
    this, after = (ids(plain(make_sampler(manifest), epoch)) for epoch in (1, 2))
    delivered %= len(this)
    with Loader(Echo(), make_sampler(manifest), **PLACES[before]) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        assert ids(islice(batches, delivered)) == this[:delivered]
        state = save(loader)
    rest = resumed(state, make_sampler(manifest), then)
    assert next(rest) == this[delivered:]
    assert next(rest) == after


def test_asking_for_the_length_disturbs_nothing(manifest: Path) -> None:
    """As progress bars do. lhotse's samplers have none."""
    this = ids(plain(make_sampler(manifest), 1))

    def ask(loader: Loader) -> None:
        with pytest.raises(TypeError, match="no length"):
            len(loader)

    with reading_ahead(make_sampler(manifest)) as loader:
        loader.set_epoch(1)
        ask(loader)
        batches = iter(loader)
        got = []
        for _ in range(5):
            ask(loader)
            got += ids([next(batches)])
        ask(loader)
        state = save(loader)
    with reading_ahead(make_sampler(manifest)) as loader:
        loader.load_state_dict(pickle.loads(state))
        ask(loader)
        assert got + ids(loader) == this


def test_audio_and_augmentation_go_on_as_they_would_have(manifest: Path) -> None:
    with augmented(manifest, 0) as loader:
        whole = list(loader)
    with augmented(manifest, 2) as loader:
        batches = iter(loader)
        before = list(islice(batches, 5))
        state = save(loader)
    with augmented(manifest, 0) as loader:
        loader.load_state_dict(pickle.loads(state))
        assert_equal(before + list(loader), whole)


RESUMED = {0: "inline", 5: "processes", 9: "inline"}
"""After how many batches a state is saved, and where batches are made then."""


def resume_here(folder: str, manifest: str) -> None:
    """What the new process of the next test does."""
    for delivered, place in RESUMED.items():
        state = Path(folder, str(delivered)).read_bytes()
        print(json.dumps(list(resumed(state, make_sampler(manifest), place))))


def test_round_trip_in_a_new_process(manifest: Path, tmp_path: Path) -> None:
    this, after = (ids(plain(make_sampler(manifest), epoch)) for epoch in (0, 1))
    for delivered in RESUMED:
        with reading_ahead(make_sampler(manifest)) as loader:
            batches = iter(loader)
            assert ids(islice(batches, delivered)) == this[:delivered]
            (tmp_path / str(delivered)).write_bytes(save(loader))
    command = "import sys, test_lhotse; test_lhotse.resume_here(*sys.argv[1:])"
    said = printed_by(command, tmp_path, manifest).splitlines()
    assert list(map(json.loads, said)) == [[this[delivered:], after] for delivered in RESUMED]


@pytest.mark.parametrize("kind", ["buckets", "stream"])
def test_a_sampler_that_cannot_restore_itself_is_never_believed(manifest: Path, kind: str) -> None:
    """With a filter, lhotse's streaming samplers miscount: they skip more than they gave."""

    def sampler() -> Any:
        return make_sampler(manifest, kind).filter(lambda cut: cut.duration > 0.3)

    this = ids(plain(sampler(), 0))
    with Loader(Echo(), sampler(), num_workers=0) as loader:
        batches = iter(loader)
        assert ids(islice(batches, 4)) == this[:4]
        state = save(loader)
    rest = None
    with (
        Loader(Echo(), sampler(), num_workers=0) as loader,
        suppress(RuntimeError, ValueError),  # it may be refused
    ):
        loader.load_state_dict(pickle.loads(state))
        rest = ids(loader)
    assert rest in (None, this[4:])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_state_of_torchs_loader(kind, manifest):
    """In a loop that tells lhotse's sampler its epochs, also after the resume."""

    def make() -> Any:
        sampler = make_sampler(manifest, kind)
        return DataLoader(Echo(), batch_size=None, sampler=sampler, collate_fn=ids_of)

    epochs: list[list[Any]] = []
    states = []
    loader = make()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        states.append((epoch, 0, loader.state_dict()))
        for batch in loader:
            epochs[epoch].append(batch)
            states.append((epoch, len(epochs[epoch]), loader.state_dict()))
        states.append((epoch + 1, 0, loader.state_dict()))
    assert epochs == [ids(plain(make_sampler(manifest, kind), epoch)) for epoch in range(3)]
    for epoch, taken, state in states[::3]:
        other = make()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        for number in range(epoch, 3):
            other.sampler.set_epoch(number)
            assert list(other) == epochs[number][taken if number == epoch else 0 :]


def ids_of(cuts: Any) -> list[str]:
    return [cut.id for cut in cuts]
