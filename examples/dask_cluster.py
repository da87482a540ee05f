"""Prepares speech features on the workers of a Dask cluster, and checks that nothing changed.

Each utterance gets an echo and noise, drawn anew in every epoch, and becomes a log-mel spectrogram:
more work than the processors next to a GPU may have time for. The corpus is generated, some 50 MB
of it; each worker process is sent it once, or maps it if it is on this machine. The batches are
then made again without workers, and must be the same to the bit.

Run on a cluster of two processes that is started for it (needs ``pip install distributed``)::

    python examples/dask_cluster.py --workers 2
    python examples/dask_cluster.py --kill  # a worker process, in the middle

or on one that is running (``dask scheduler`` on one machine, ``dask worker tcp://HOST:8786
--nthreads 1`` on each of the others, where numpy and minloader are installed)::

    python examples/dask_cluster.py tcp://HOST:8786
"""

import argparse
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from distributed import Client, LocalCluster
from numpy.typing import NDArray

from minloader import DynamicBatchSampler, Loader, get_worker_info, pad_collate

RATE = 16_000  # samples of a waveform a second
WINDOW, HOP, BANDS = 512, 160, 80


class Speech:
    """Item ``i`` is the features of utterance ``i``: frames x bands."""

    def __init__(self, utterances: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(RATE, 5 * RATE, utterances)
        self.ends = np.cumsum(self.lengths)
        # A voice, more or less: a tone that glides, with its overtones.
        pitch = np.repeat(rng.uniform(80, 250, utterances), self.lengths)
        phase = np.cumsum(pitch + 20 * np.sin(np.arange(len(pitch)) / 3_000)) / RATE
        self.waves = (8_000 * (phase % 1.0 - 0.5)).astype(np.int16)
        self.filters = mel_filters()

    def frames(self) -> NDArray[np.int64]:
        """Length of each utterance's features."""
        return (self.lengths - WINDOW) // HOP + 1

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        info = get_worker_info()
        assert info is not None
        end, length = self.ends[index], self.lengths[index]
        wave = self.waves[end - length : end].astype(np.float32)
        # The generator belongs to the batch: whoever makes it, wherever, draws the same.
        wave = add_echo(wave, info.rng)
        wave += info.rng.normal(0, info.rng.uniform(10, 500), length).astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(windows * np.hanning(WINDOW))) ** 2
        return np.log(power @ self.filters + 1.0).astype(np.float32)


def mel_filters() -> NDArray[np.float64]:
    """Triangles over the spectrum, evenly spaced on the mel scale: frequencies x bands."""
    mels = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), BANDS + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return np.clip(np.minimum(rising, falling), 0, None)


def add_echo(wave: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Convolves with a room that dies away within a random time."""
    room = rng.normal(0, 1, RATE // 2) * np.exp(-np.arange(RATE // 2) / rng.uniform(100, 2_000))
    room[0] = 10.0
    size = 1 << (len(wave) + len(room) - 1).bit_length()
    wet = np.fft.irfft(np.fft.rfft(wave, size) * np.fft.rfft(room, size), size)
    return (wet[: len(wave)] / 10.0).astype(np.float32)


def measure(name: str, batches: Iterable[Any]) -> str:
    """Goes through the batches, prints how it went, and returns what identifies them."""
    digest = hashlib.sha256()
    began = time.perf_counter()
    first = frames = size = count = 0.0
    for features, lengths in batches:
        first = first or time.perf_counter() - began
        # A model would be trained here.
        digest.update(features.tobytes())
        digest.update(lengths.tobytes())
        count += 1
        frames += int(lengths.sum())
        size += features.nbytes
    seconds = time.perf_counter() - began
    print(
        f"{name:<12} {count:,.0f} batches in {seconds:.1f} s, {frames / seconds:,.0f} frames/s, "
        f"{size / seconds / 1e6:,.0f} MB/s, the first after {first:.2f} s"
    )
    return digest.hexdigest()


def killing(client: Client, batches: Iterable[Any], after: int) -> Iterator[Any]:
    """Kills one worker process of this machine after some batches."""
    for number, batch in enumerate(batches):
        if number == after:
            pid = min(client.run(os.getpid).values())
            os.kill(pid, signal.SIGKILL)
            print(f"killed worker process {pid} after batch {number}")
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech features, made on a Dask cluster.")
    parser.add_argument("address", nargs="?", help="scheduler of a running cluster")
    parser.add_argument("--workers", type=int, default=2, help="processes to have, or to wait for")
    parser.add_argument("--utterances", type=int, default=520)
    parser.add_argument("--budget", type=int, default=4_000, help="frames in a batch, padded")
    parser.add_argument("--kill", action="store_true", help="kill a worker (of our own cluster)")
    args = parser.parse_args()
    if args.kill and args.address:
        parser.error("--kill is for a cluster of this machine")

    speech = Speech(args.utterances)
    sampler = DynamicBatchSampler(speech.frames(), max_padded=args.budget, buckets=8, shuffle=True)
    print(
        f"{args.utterances} utterances, {speech.waves.nbytes / 1e6:.1f} MB, {len(sampler)} batches"
    )

    def loader(num_workers: int, executor: Any = "process") -> Loader:
        return Loader(
            speech,
            sampler,
            num_workers=num_workers,
            executor=executor,
            collate_fn=pad_collate(),
        )

    with contextlib.ExitStack() as stack:
        if args.address is None:
            # One thread each: the generators that a dataset may draw from are the process's.
            cluster: Any = LocalCluster(
                n_workers=args.workers, threads_per_worker=1, dashboard_address=":0"
            )
            stack.enter_context(cluster)
        # Batches come straight from the workers, not through the scheduler.
        client = stack.enter_context(Client(args.address or cluster, direct_to_workers=True))
        client.wait_for_workers(args.workers)
        workers = len(client.nthreads())
        with loader(workers, client.get_executor(pure=False)) as batches:
            source = killing(client, batches, len(sampler) // 2) if args.kill else batches
            there = measure(f"{workers} workers", source)
    with loader(0) as batches:
        here = measure("no workers", batches)
    print("the same batches" if here == there else "NOT THE SAME BATCHES")


# Dask's own processes import this script once more; those of minloader would not.
if __name__ == "__main__":
    main()
