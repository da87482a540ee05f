"""Trains on nothing, but as speech recognition does: lhotse's sampler and dataset, our workers.

lhotse knows about speech: manifests, batches of a number of seconds, features, augmentation. Its
sampler and its dataset are given to a Loader as they are. First the script writes a corpus of WAV
files: eight voices sing vowels. Then it goes through epochs with and without workers, is
interrupted, and resumes from a checkpoint with the batches that nobody has seen yet.

Run (needs torch, then ``pip install tqdm lhotse soundfile urllib3``; lhotse forgets to ask for the
last one)::

    python examples/lhotse_speech.py
    python examples/lhotse_speech.py --workers 4 --seconds 120 --folder corpus
"""

import argparse
import pickle
import random
import tempfile
import time
import wave
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lhotse import CutSet, Fbank, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset, SpecAugment
from lhotse.dataset.cut_transforms import PerturbVolume
from lhotse.dataset.input_strategies import OnTheFlyFeatures
from numpy.typing import NDArray
from tqdm import tqdm

from minloader import Loader

RATE = 16_000
FRAMES = 100  # of features in a second
VOWELS = {"a": (800, 1200), "e": (450, 2000), "i": (300, 2500), "o": (450, 900), "u": (300, 700)}
SYLLABLE = 0.25  # seconds of a vowel


def sing(vowel: str, pitch: float) -> NDArray[np.int16]:
    """One syllable: the harmonics of a pitch, loudest where the vowel has its formants."""
    times = np.arange(round(SYLLABLE * RATE)) / RATE
    harmonics = np.arange(pitch, 4000, pitch)
    loudness = sum(np.exp(-(((harmonics - formant) / 150) ** 2)) for formant in VOWELS[vowel])
    sound = loudness @ np.sin(2 * np.pi * harmonics[:, None] * times)
    sound *= np.sin(np.pi * times / SYLLABLE)  # fades in and out
    return np.asarray(8000 * sound / np.abs(sound).max(), np.int16)


def make_corpus(folder: Path, utterances: int) -> None:
    """Writes WAV files of 1 to 15 seconds, and the manifest that lhotse finds them by."""
    rng = np.random.default_rng(0)
    voices = [{v: sing(v, pitch) for v in VOWELS} for pitch in rng.uniform(80, 300, 8)]
    recordings, supervisions = [], []
    for number in tqdm(range(utterances), desc="corpus", unit="file"):
        samples = round(rng.uniform(1, 15) * RATE)
        speaker = int(rng.integers(len(voices)))
        text = "".join(rng.choice(list(VOWELS), 1 + int(samples / RATE / SYLLABLE)))
        sound = np.concatenate([voices[speaker][vowel] for vowel in text])[:samples]
        path = folder / f"utterance{number:04}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(sound.astype("<i2").tobytes())
        recording = Recording.from_file(path)
        recordings.append(recording)
        whole = {"start": 0, "duration": recording.duration}
        supervisions.append(
            SupervisionSegment(
                path.stem, recording.id, **whole, text=text, speaker=f"voice {speaker}"
            )
        )
    CutSet.from_manifests(
        recordings=RecordingSet.from_recordings(recordings),
        supervisions=SupervisionSet.from_segments(supervisions),
    ).to_file(folder / "cuts.jsonl")


def make_loader(manifest: Path, seconds: float, workers: int) -> Loader:
    """Everything from the beginning, as it would be made in a new process."""
    sampler = DynamicBucketingSampler(
        CutSet.from_jsonl_lazy(manifest), max_duration=seconds, num_buckets=8, shuffle=True
    )
    dataset = K2SpeechRecognitionDataset(
        input_strategy=OnTheFlyFeatures(Fbank()),
        # Before each batch its own seed goes to `random`, numpy and torch, so that augmentation
        # is the same for any number of workers and after an interruption. It must use these:
        # without randgen, lhotse would make a generator that nobody can seed.
        cut_transforms=[PerturbVolume(p=0.5, randgen=random)],
        input_transforms=[SpecAugment(p=0.8)],
    )
    return Loader(dataset, sampler, num_workers=workers)


class Result(NamedTuple):
    """What is left of an epoch, or of a part of it."""

    batches: list[int]  # a checksum of each
    lengths: list[int]  # of the utterances, in frames
    cells: int  # frames that the model would have seen, padding included
    time: float

    def row(self, name: str) -> str:
        """A row of the table."""
        frames = sum(self.lengths)
        figures = f"{len(self.batches):>9,}{len(self.lengths):>12,}{frames / FRAMES:>12,.1f}"
        return f"{name:<20}{figures}{frames / FRAMES / self.time:>13,.0f}{self.padding:>9.1%}"

    @property
    def padding(self) -> float:
        """Share of the frames that belong to no utterance."""
        return 1 - sum(self.lengths) / self.cells


def consume(name: str, batches: Iterable[dict[str, Any]]) -> Result:
    """Where a model would be trained."""
    began = time.perf_counter()
    checksums: list[int] = []
    lengths: list[int] = []
    cells = 0
    for batch in tqdm(batches, desc=name, unit="batch"):
        inputs, supervisions = batch["inputs"], batch["supervisions"]  # (utterances, frames, bins)
        checksums.append(crc32(inputs.numpy(), crc32(" ".join(supervisions["text"]).encode())))
        lengths += supervisions["num_frames"].tolist()
        cells += inputs.shape[0] * inputs.shape[1]
    return Result(checksums, lengths, cells, time.perf_counter() - began)


def run(manifest: Path, seconds: float, workers: int) -> None:
    """Goes through epochs, whole ones and an interrupted one, and prints the summary."""
    torch.set_num_threads(1)  # as in a worker: with more of them torch may round otherwise
    with make_loader(manifest, seconds, workers=0) as loader:
        alone = consume("epoch 0, no workers", loader)
    with make_loader(manifest, seconds, workers) as loader:
        first = consume(f"epoch 0, {workers} workers", loader)
        second = consume(f"epoch 1, {workers} workers", loader)
    assert first.batches == alone.batches, "workers changed a batch"

    half = len(second.batches) // 2
    with make_loader(manifest, seconds, workers) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        before = consume("interrupted", islice(batches, half))
        # What was delivered counts; what the workers have ready beyond that does not. The bytes
        # would go into the training's checkpoint, next to the model.
        checkpoint = pickle.dumps(loader.state_dict())
    with make_loader(manifest, seconds, workers) as loader:
        loader.load_state_dict(pickle.loads(checkpoint))
        after = consume("resumed", loader)
    assert before.batches + after.batches == second.batches, "the interruption changed a batch"

    # What the same utterances would cost in as many batches of one size: reckoned, not run.
    size = max(1, round(len(first.lengths) / len(first.batches)))
    shuffled = np.random.default_rng(0).permutation(first.lengths)
    parts = [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    fixed = 1 - shuffled.sum() / sum(len(part) * part.max() for part in parts)
    print("\n                      batches  utterances     seconds   x realtime  padding")
    print(alone.row("epoch 0, no workers"))
    print(first.row(f"epoch 0, {workers} workers"))  # their start included
    print(second.row(f"epoch 1, {workers} workers"))
    print(f"fixed size: padding {fixed:.1%} in batches of {size}")
    print(f"interrupted: after {half} of {len(second.batches)} batches")
    print(f"resumed: {len(after.batches)} batches from {len(checkpoint):,} bytes, all the same")


parser = argparse.ArgumentParser(description="Speech batches by lhotse, made in workers.")
parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
parser.add_argument("--seconds", type=float, default=60, help="of a batch, with padding")
parser.add_argument("--utterances", type=int, default=400, help="in the corpus")
parser.add_argument("--folder", type=Path, help="of a corpus with a cuts.jsonl (none: make one)")
args = parser.parse_args()

# No `if __name__ == "__main__":`, since minloader's workers do not import this script.
with tempfile.TemporaryDirectory() as temporary:
    folder = args.folder or Path(temporary)
    if not (folder / "cuts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_corpus(folder, args.utterances)
    run(folder / "cuts.jsonl", args.seconds, args.workers)
