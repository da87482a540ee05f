"""DLIO, the engine of MLPerf Storage, with torch's loader and with ours: how well is a GPU fed?

    python tests/benchmarks/dlio.py [--runs 5]

It needs more than the extras have, and of DLIO's own requirements what its torch part uses::

    pip install --no-deps dlio_benchmark==2.0.0
    pip install torch hydra-core omegaconf pandas psutil h5py mpi4py mpich pillow pydftracer==1.0.2

DLIO makes the files, reads them with its own dataset and sampler, and emulates the step by a sleep.
Both loaders get the same arguments, those of its ``TorchDataLoader``. The files are 1/17 as large
as those of the workload "unet3d", and so the step of the GPU that is emulated is as much shorter:
the bytes that it takes in a second are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import spread

RECORD = 8 * 2**20  # bytes
UNET3D = 146_600_628  # bytes of a record of that workload
STEPS = {"A100": 0.636, "H100": 0.323}  # seconds, for a batch of that workload
LOADERS = "torch", "minloader"
READERS = 1, 2, 4
FILES, EPOCHS = 168, 3


def read(loader: Any) -> None:
    """What DLIO's loader does in ``read``, with ours in place of torch's."""
    from dlio_benchmark.data_loader import torch_data_loader as theirs

    from minloader.torch import DataLoader

    args = theirs.ConfigArguments.get_instance()
    dataset = theirs.TorchDataset(
        *(loader.format_type, loader.dataset_type, loader.epoch_number, loader.num_samples),
        *(args.read_threads, loader.batch_size),
    )
    ranks = args.my_rank, args.comm_size
    loader.batches = DataLoader(
        dataset,
        batch_size=loader.batch_size,
        sampler=theirs.dlio_sampler(
            *ranks, loader.num_samples, args.sample_shuffle, args.epochs, args.seed
        ),
        num_workers=args.read_threads,
        pin_memory=True,
        drop_last=True,
        worker_init_fn=dataset.worker_init,
        multiprocessing_context=args.multiprocessing_context,
        prefetch_factor=math.ceil(args.prefetch_size / args.read_threads) or 2,
        persistent_workers=True,
    )


def give(loader: Any) -> Iterator[Any]:
    """The batches of an epoch."""
    yield from loader.batches


def child(loader: str, *overrides: str) -> None:
    """Run DLIO in this process."""
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")  # imported, but not used
    from dlio_benchmark.data_loader import torch_data_loader
    from dlio_benchmark.main import main

    if loader == "minloader":
        plugin = types.ModuleType("plugin")
        base = torch_data_loader.TorchDataLoader
        plugin.Ours = type("Ours", (base,), {"read": read, "next": give, "__module__": "plugin"})  # type: ignore[attr-defined]
        sys.modules["plugin"] = plugin
        overrides += (
            "++workload.reader.data_loader_classname=plugin.Ours",
            "++workload.reader.data_loader_sampler=index",
        )
    sys.argv[1:] = overrides
    main()


def run(folder: Path, loader: str, gpu: str, readers: int, *, make: bool = False) -> float:
    """Run DLIO in a process of its own; return the share of the time in which the GPU computes."""
    out = folder / "out"
    settings = {
        "workflow.generate_data": make,
        "workflow.train": not make,
        "workflow.checkpoint": False,
        "dataset.data_folder": folder / "data",
        "dataset.num_files_train": FILES,
        "dataset.record_length": RECORD,
        "dataset.record_length_stdev": 0,
        "reader.read_threads": readers,
        "train.epochs": EPOCHS,
        "train.computation_time": STEPS[gpu] * RECORD / UNET3D,
    }
    overrides = [f"++workload.{name}={value}" for name, value in settings.items()]
    command = [__file__, "--child", loader, f"workload=unet3d_{gpu.lower()}", *overrides]
    done = subprocess.run(
        [sys.executable, *command, f"hydra.run.dir={out}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{loader}, {readers} readers: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    if make:
        return 0.0
    summary = json.loads((out / "summary.json").read_text())
    share: float = summary["metric"]["train_au_mean_percentage"]
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "torch", "A100", 1, make=True)
        heads = [f"{gpu}: torch | minloader.torch | ratio" for gpu in STEPS]
        print(f"| readers | {' | '.join(heads)} |\n|---|{'---|---|---|' * len(STEPS)}")
        for readers in READERS:
            cells = [str(readers)]
            for gpu in STEPS:
                pairs = [[run(folder, each, gpu, readers) for each in LOADERS] for _ in range(runs)]
                columns = [*zip(*pairs, strict=True), [ours / theirs for theirs, ours in pairs]]
                cells += map(spread, columns, (".0f", ".0f", ".2f"))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
