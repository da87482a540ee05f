"""Decodes audio files by ffmpeg in workers, in batches of a fixed number of seconds.

A worker is an ordinary process, free to launch processes of its own: to make a batch it starts
one ffmpeg for each file, all at once, and reads what they write. Without arguments the script
first encodes a corpus for itself, of tones from half a second to 15 seconds.

Run (needs ``pip install tqdm imageio-ffmpeg``, whose wheel contains the ffmpeg)::

    python examples/subprocess_io.py
    python examples/subprocess_io.py --workers 4 --seconds 60 *.mp3 *.flac
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minloader import DynamicBatchSampler, Loader, Padded, pad_collate

FFMPEG: str = imageio_ffmpeg.get_ffmpeg_exe()
RATE = 16_000
CODECS = {"flac": "flac", "libmp3lame": "mp3", "libvorbis": "ogg", "pcm_s16le": "wav"}


class AudioError(Exception):
    """ffmpeg could not do what it was asked to with a file."""


def ffmpeg(path: Path, *options: str) -> bytes:
    """Runs ffmpeg about one file. Returns what it wrote to its output."""
    command = [FFMPEG, "-nostdin", "-hide_banner", "-v", "error", "-xerror", *options]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise AudioError(f"{path}: ffmpeg failed with exit code {done.returncode}:\n{said}")
    return done.stdout


class Batch(NamedTuple):
    """What a worker makes of a list of indices."""

    indices: list[int]
    audio: Padded  # values: float32 (files, samples), lengths: samples of each file


class AudioFiles:
    """Indexable by a list: ``files[[3, 8]]`` is the batch of these two."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __getitem__(self, indices: list[int]) -> Batch:
        # A thread for each process, since all must be read at once: a pipe holds one second of
        # audio, and then its ffmpeg would stand still until the ones before it are done.
        with ThreadPoolExecutor(len(indices)) as threads:
            waves = list(threads.map(self.decode, (self.paths[index] for index in indices)))
        return Batch(indices, pad_collate()(waves))

    def decode(self, path: Path) -> NDArray[np.float32]:
        """The samples of a file, as 16 kHz mono."""
        # Older ffmpegs pass over a part that is broken, unless they are to check it.
        source = ("-err_detect", "crccheck+explode", "-i", f"file:{path}", "-map", "0:a:0")
        form = ("-ac", "1", "-ar", str(RATE), "-f", "f32le", "-")
        wave = np.frombuffer(ffmpeg(path, *source, *form), "<f4")
        if not len(wave):
            raise AudioError(f"{path}: holds no audio at all")
        return wave


def probe(path: Path) -> float:
    """Seconds that a file lasts: ffmpeg reads its packets, but decodes none of them."""
    copy = ("-map", "0:a:0", "-c", "copy", "-f", "null", "-progress", "-", "-")
    times = re.findall(rb"out_time_us=(\d+)", ffmpeg(path, "-i", f"file:{path}", *copy))
    if not times:
        raise AudioError(f"{path}: ffmpeg cannot tell how long it is")
    return int(times[-1]) / 1e6


def encode(path: Path, codec: str, seconds: float, frequency: int) -> None:
    """Makes a file with a tone in it."""
    tone = f"sine=frequency={frequency}:duration={seconds}:sample_rate=44100"
    ffmpeg(path, "-f", "lavfi", "-i", tone, "-c:a", codec, str(path))


def make_corpus(folder: Path, threads: ThreadPoolExecutor) -> tuple[list[Path], list[float]]:
    """Encodes 60 tones, in all of the formats that this ffmpeg can write."""
    known = ffmpeg(folder, "-encoders").decode()
    codecs = [codec for codec in CODECS if re.search(rf"\b{codec}\b", known)]
    codecs = [codecs[i % len(codecs)] for i in range(60)]
    paths = [folder / f"tone{i:02}.{CODECS[codec]}" for i, codec in enumerate(codecs)]
    rng = np.random.default_rng(0)
    durations = rng.uniform(0.5, 15, 60).round(2).tolist()
    list(threads.map(encode, paths, codecs, durations, rng.integers(100, 2000, 60).tolist()))
    return paths, durations


def run(loader: Loader, total: int) -> str:
    """Goes through one epoch and reports on it."""
    began = time.perf_counter()
    seen: set[int] = set()
    lengths: list[int] = []
    batches = cells = most = 0
    for indices, audio in tqdm(loader, unit="batch"):
        # A model would be fed here: audio.values has one row for each file.
        batches += 1
        seen.update(indices)
        lengths += audio.lengths.tolist()
        cells += audio.values.size
        most = max(most, len(indices))
    seconds = sum(lengths) / RATE
    speed = seconds / (time.perf_counter() - began)

    # What the same files would cost in as many batches of one size: reckoned, not run.
    size = round(len(lengths) / batches)
    shuffled = np.random.default_rng(0).permutation(lengths)
    parts = [shuffled[i : i + size] for i in range(0, len(lengths), size)]
    fixed = 1 - sum(lengths) / sum(len(part) * part.max() for part in parts)
    return f"""\
files              {len(seen)} of {total}
batches            {batches}
audio              {seconds:.1f} s
speed              {speed:.0f} x realtime
padding            {1 - sum(lengths) / cells:.1%}
padding if fixed   {fixed:.1%} in batches of {size}
ffmpeg processes   {len(lengths)}, up to {most} at once in a worker"""


def main() -> None:
    """Reads the command line, goes through one epoch and prints the summary."""
    parser = argparse.ArgumentParser(description="Batches of audio, decoded by ffmpeg.")
    parser.add_argument("files", nargs="*", type=Path, help="audio files (none: make some)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (0: none)")
    parser.add_argument("--seconds", type=float, default=60, help="of a batch, with padding")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            if args.files:
                paths, durations = args.files, list(threads.map(probe, args.files))
            else:
                paths, durations = make_corpus(Path(folder), threads)
        for path, duration in zip(paths, durations, strict=True):
            if duration > args.seconds:
                raise AudioError(f"{path}: lasts {duration:.1f} s; --seconds must allow for it")

        buckets = 1 + len(paths) // 16  # few files in many buckets would make tiny batches
        sampler = DynamicBatchSampler(
            durations, max_padded=args.seconds, buckets=buckets, shuffle=True
        )
        with Loader(AudioFiles(paths), sampler, num_workers=args.workers) as loader:
            print(run(loader, len(paths)))


# No `if __name__ == "__main__":`, since minloader's workers do not import this script. An error
# raised in one arrives here as it was, with a note about its batch.
try:
    main()
except AudioError as error:
    sys.exit("\n".join(["error: " + str(error), *getattr(error, "__notes__", [])]))
