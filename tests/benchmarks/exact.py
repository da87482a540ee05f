"""Whether a run that was interrupted and resumed gives what an undisturbed run gives.

    python tests/benchmarks/exact.py [--only minloader grain] [--quick]

A run is three shuffled epochs with two workers. Its samples hold their index and what they drew
from the generators of numpy, Python and torch, as an augmentation does. "Exact" means the same
batches with the same draws, those before the interruption and those after it together. Each run has
a process of its own. Printed are a table and, for each cell that is not exact, what happened.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import run_child, workers_of

from minloader import __version__ as minloader_version

SAMPLES, BATCH, EPOCHS, MIDDLE = 82, 4, 3, 7
CHILD_SECONDS = 60  # a run that takes longer hangs
CHILD = f"import sys; sys.path[:] = {sys.path!r}; import exact; exact.child()"

Epochs = list[list[Any]]  # of batches, each a list of samples, each an index and its draws


# --- what is loaded


def draws() -> list[float]:
    """A number of each global generator."""
    numbers = [np.random.random(), random.random()]
    if QUICK in os.environ:
        return [*numbers, 0.0]
    import torch

    return [*numbers, torch.rand(1, dtype=torch.float64).item()]


class Samples:
    """Some samples take long, so that with ``in_order=False`` they come in another order."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002 if index % 7 else 0.03)
        return np.array([index, *draws()])


class StatefulSamples(Samples):
    """Samples whose generators are part of the state, as torchdata's tutorial advises."""

    def state_dict(self) -> Any:
        import torch

        return pickle.dumps((np.random.get_state(), random.getstate(), torch.get_rng_state()))

    def load_state_dict(self, state: Any) -> None:
        import torch

        of_numpy, of_python, of_torch = pickle.loads(state)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        torch.set_rng_state(of_torch)


# --- the loaders: iter() is an epoch, and they have state_dict() and load_state_dict()


def minloader(workers: int, in_order: bool) -> Any:
    # Its defaults: workers are spawned.
    from minloader import Loader

    loader_of: Any = Loader
    settings = {"batch_size": BATCH, "shuffle": True, "seed": 0, "in_order": in_order}
    return loader_of(Samples(), num_workers=workers, **settings)


def minloader_torch(workers: int, in_order: bool) -> Any:
    from minloader.torch import DataLoader

    return DataLoader(Samples(), BATCH, True, num_workers=workers, in_order=in_order)


def torchdata(workers: int, in_order: bool, samples: type[Samples] = Samples) -> Any:
    # A state after each batch, its default; its sampler of shuffled indices keeps its generator.
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(samples(), BATCH, True, num_workers=workers, in_order=in_order)


def torchdata_stateful(workers: int, in_order: bool) -> Any:
    # As its tutorial says: a dataset with generators of its own has state_dict().
    return torchdata(workers, in_order, StatefulSamples)


class Grain:
    """One iterator over all epochs, which grain shuffles anew in repeat().

    It keeps count of the batches, as a program does with its steps, to know where an epoch ends.
    """

    def __init__(self, workers: int) -> None:
        from absl.flags import FLAGS
        from grain import MapDataset, MultiprocessingOptions

        FLAGS.mark_as_parsed()  # as absl's app.run() would, without which its workers do not start
        samples = MapDataset.source(Samples()).seed(0).shuffle().random_map(with_draw)
        batches = samples.batch(BATCH).repeat(EPOCHS).to_iter_dataset()
        self.batches = iter(batches.mp_prefetch(MultiprocessingOptions(num_workers=workers)))
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        length = -(-SAMPLES // BATCH)
        for batch in islice(self.batches, length - self.given):
            self.given = (self.given + 1) % length
            yield batch

    def state_dict(self) -> Any:
        return self.batches.get_state(), self.given

    def load_state_dict(self, state: Any) -> None:
        of_iterator, self.given = state
        self.batches.set_state(of_iterator)


def with_draw(sample: Any, generator: np.random.Generator) -> Any:
    """The generator that grain's documentation says to draw from."""
    return np.array([*sample, generator.random()])


def grain(workers: int, in_order: bool) -> Any:
    if not in_order:
        raise LookupError(NO_OPTION)
    return Grain(workers)


def litdata(workers: int, in_order: bool) -> Any:
    # A shuffled dataset of several chunks in local files, which optimize() wrote.
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    folder = os.environ[FOLDER]
    if not os.path.exists(f"{folder}/samples"):
        os.environ |= {
            f"DATA_OPTIMIZER_{name}": folder for name in ("CACHE_FOLDER", "DATA_CACHE_FOLDER")
        }
        options: Any = {"chunk_size": 5, "num_workers": 1, "verbose": False}
        optimize(int, list(range(SAMPLES)), f"{folder}/samples", **options)

    settings: Any = {"shuffle": True, "seed": 0, "transform": Samples().__getitem__}
    samples = StreamingDataset(f"{folder}/samples", f"{folder}/cache", **settings)
    settings = {"batch_size": BATCH, "num_workers": workers, "in_order": in_order}
    return StreamingDataLoader(samples, **settings)


class Loader(NamedTuple):
    """A column.

    Attributes:
        make: gives the loader, for a number of workers and ``in_order``.
        needs: distributions.
        generator: whether its documentation says to save torch's global generator too.
        judged: the generators that count, by their index; the others are told of.
    """

    make: Callable[[int, bool], Any]
    needs: tuple[str, ...]
    generator: bool = False
    judged: tuple[int, ...] = (0, 1, 2)

    @property
    def installed(self) -> bool:
        return all(map(importlib.util.find_spec, self.needs))


LOADERS = {
    "minloader": Loader(minloader, ()),
    "minloader.torch": Loader(minloader_torch, ("torch",), generator=True),
    "torchdata": Loader(torchdata, ("torchdata", "torch")),
    "torchdata-stateful-dataset": Loader(torchdata_stateful, ("torchdata", "torch")),
    "grain": Loader(grain, ("grain",), judged=(3,)),
    "litdata": Loader(litdata, ("litdata", "torch")),
}
QUICK, FOLDER = "EXACT_QUICK", "EXACT_FOLDER"  # in the environment, for the runs
HANGS, NO_OPTION = "hangs", "no such option"
GENERATORS = ["numpy's", "Python's", "torch's", "random_map's"]


# --- a run, in the child


class Run(NamedTuple):
    """What a child is to do.

    Attributes:
        loader: its name.
        epochs: how many that have batches.
        workers: how many.
        in_order: of the loader.
        resume: file with states, epoch and batch of the one to go on from; None: from the start.
        save: file for the states after each batch.
        kill: whether to kill a worker in the middle of the first epoch.
    """

    loader: str
    epochs: int = EPOCHS
    workers: int = 2
    in_order: bool = True
    resume: tuple[str, int, int] | None = None
    save: str | None = None
    kill: bool = False


def child() -> None:
    """Does a run and prints its batches; if it fails, those until then, and the error."""
    run = Run(*json.loads(sys.argv[1]))
    found: dict[str, Any] = {"epochs": []}
    try:
        go_through(run, found["epochs"])
    except Exception as error:
        told = NO_OPTION in error.args
        found["error"] = NO_OPTION if told else f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(found), flush=True)


def go_through(run: Run, epochs: Epochs) -> None:
    """Adds the batches of each epoch."""
    kind = LOADERS[run.loader]
    if "torch" in kind.needs:
        import torch

        torch.manual_seed(0)
    loader = kind.make(run.workers, run.in_order)
    if run.resume is not None:
        file, epoch, batch = run.resume
        state, generator = pickle.loads(pickle.loads(Path(file).read_bytes())[epoch, batch])
        loader.load_state_dict(state)
        if kind.generator:
            torch.set_rng_state(generator)

    def checkpoint() -> bytes:
        generator = torch.get_rng_state() if kind.generator else None
        return pickle.dumps((loader.state_dict(), generator))

    states, empty = {}, 0
    while len(epochs) < run.epochs and empty < 2:
        if run.save and epochs:
            states[len(epochs), 0] = checkpoint()
        batches: list[Any] = []
        epochs.append(batches)
        for batch in loader:
            batches.append(np.asarray(batch).tolist())
            if run.save:
                states[len(epochs) - 1, len(batches)] = checkpoint()
            if run.kill and len(epochs) == 1 and len(batches) == MIDDLE:
                os.kill(workers_of(os.getpid())[0].pid, signal.SIGKILL)
        if not batches:  # the rest of an epoch of which all was given
            epochs.pop()
            empty += 1
    if run.save:
        Path(run.save).write_bytes(pickle.dumps(states))


# --- comparing


def start(run: Run) -> dict[str, Any]:
    """Does a run in a process of its own."""
    command = [sys.executable, "-c", CHILD, json.dumps(run)]
    status, out, err = run_child(command, CHILD_SECONDS)
    if status is None:
        return {"epochs": [], "error": HANGS}
    last = (out.splitlines() or [""])[-1]
    if last.startswith("{"):
        return dict(json.loads(last))
    return {"epochs": [], "error": "".join(err.splitlines()[-1:]) or "dies"}


class Cell(NamedTuple):
    text: str
    remark: str = ""


def judge(want: Epochs, found: dict[str, Any], loader: Loader) -> Cell:
    """Compares what a run gave, or the parts of one together, with what an undisturbed one gave."""
    got = found["epochs"]
    if "error" in found:
        text, given = found["error"], sum(map(len, got))
        if text == NO_OPTION:
            return Cell(text)
        return Cell("hangs" if text == HANGS else "error", f"after {given} batches: {text}"[:300])
    lost: Counter[Any] = Counter()
    doubled: Counter[Any] = Counter()
    for number in range(max(len(want), len(got))):
        wanted, given = (Counter(indices(each[number : number + 1])) for each in (want, got))
        lost, doubled = lost + (wanted - given), doubled + (given - wanted)
    if lost or doubled:
        sizes = ", ".join(str(len(indices([epoch]))) for epoch in got)
        text = f"{lost.total()} lost, {doubled.total()} doubled"
        return Cell(text, f"the epochs have {sizes} samples")
    number = sum(map(len, want))
    if indices(want) != indices(got):
        pairs = zip(chain(*want), chain(*got), strict=False)
        same = sum(indices([[a]]) == indices([[b]]) for a, b in pairs)
        remark = f"none lost or doubled, but {same} of {number} batches are of the right samples"
        return Cell("other batches", remark)
    ours, theirs = (
        np.concatenate([batch for epoch in each for batch in epoch]) for each in (want, got)
    )
    wrong = (ours != theirs).sum(0)[1:]
    told = [f"{GENERATORS[n]} in {wrong[n]} of {len(ours)} samples" for n in wrong.nonzero()[0]]
    remark = (
        "the samples are exact; they drew other numbers from " + ", ".join(told) if told else ""
    )
    return Cell("draws differ" if wrong[[*loader.judged]].any() else "exact", remark)


def indices(epochs: Epochs) -> list[int]:
    return [int(sample[0]) for epoch in epochs for batch in epoch for sample in batch]


def resume(run: Run, given: Epochs, length: int) -> dict[str, Any]:
    """What was given until a state was taken, and what a run gives that goes on from there."""
    ended = len(given[-1]) == length  # that epoch
    rest = start(run._replace(epochs=EPOCHS - len(given) + (not ended)))
    after = [[]] * ended + rest["epochs"] or [[]]
    return rest | {"epochs": [*given[:-1], given[-1] + after[0], *after[1:]]}


def column(name: str, folder: str) -> dict[str, Cell]:
    """All cells of a loader."""
    loader, run = LOADERS[name], Run(name)

    def after(run: Run, saved: dict[str, Any], epoch: int = 0, batch: int = MIDDLE) -> Any:
        if "error" in saved:
            return saved
        *before, begun = saved["epochs"][: epoch + 1]
        return resume(run, [*before, begun[:batch]], length)

    def resumed(run: Run, epoch: int, batch: int) -> Any:
        return after(run._replace(resume=(states, epoch, batch)), saved, epoch, batch)

    def twice() -> Any:
        once = resumed(run._replace(save=again), 0, MIDDLE)
        return after(run._replace(resume=(again, 0, MIDDLE)), once, 0, 2 * MIDDLE)

    states, again = f"{folder}/{name}", f"{folder}/{name}, again"
    start(run._replace(epochs=0))  # writes the dataset, if that is to be done
    undisturbed = start(run)
    saved = undisturbed if "error" in undisturbed else start(run._replace(save=states))
    want = undisturbed["epochs"]
    length = len(want[0]) if want else 0
    runs = {
        "not interrupted, once more": lambda: start(run),
        "in the middle of an epoch": lambda: resumed(run, 0, MIDDLE),
        "with the last batch of an epoch": lambda: resumed(run, 0, length),
        "between two epochs": lambda: resumed(run, 1, 0),
        "in a later epoch": lambda: resumed(run, 2, MIDDLE),
        "twice": twice,
        "resumed with 1 worker": lambda: resumed(run._replace(workers=1), 0, MIDDLE),
        "resumed with 3 workers": lambda: resumed(run._replace(workers=3), 0, MIDDLE),
        "not, but a worker is killed": lambda: start(run._replace(kill=True)),
    }
    failed = "error" in undisturbed
    cells = {
        row: judge(want, undisturbed if failed else make(), loader) for row, make in runs.items()
    }
    loose = run._replace(in_order=False)
    undisturbed = start(loose)
    want = [sorted(epoch) for epoch in undisturbed["epochs"]]
    found = undisturbed
    if "error" not in undisturbed:
        saved = start(loose._replace(save=states))
        found = resumed(loose, 0, MIDDLE)
        found["epochs"] = [sorted(epoch) for epoch in found["epochs"]]
    return cells | {"with `in_order=False`": judge(want, found, loader)}


def main() -> None:
    """Prints all; the exit status is 1 if minloader itself is not exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--quick", action="store_true", help="without torch's generator")
    options = parser.parse_args()
    names = [name for name in options.only if LOADERS[name].installed]
    os.environ |= {QUICK: "1"} if options.quick else {}
    for name in set(options.only) - set(names):
        print(f"{name}: not installed")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        os.environ[FOLDER] = folder
        columns = dict(zip(names, pool.map(partial(column, folder=folder), names), strict=True))
    versions = [f"minloader {minloader_version}"]
    for need in dict.fromkeys(chain(["numpy"], *(LOADERS[name].needs for name in names))):
        versions.append(f"{need} {importlib.metadata.version(need)}")
    print(
        f"{time.strftime('%Y-%m-%d')}, CPython {platform.python_version()}; {', '.join(versions)}"
    )
    rows = [["interrupted ...", *names], ["---"] * (len(names) + 1)]
    rows += [[row, *(columns[name][row].text for name in names)] for row in columns[names[0]]]
    print("", *(f"| {' | '.join(row)} |" for row in rows), "", sep="\n")
    for name, cells in columns.items():
        for remark in dict.fromkeys(cell.remark for cell in cells.values() if cell.remark):
            where = [row for row, cell in cells.items() if cell.remark == remark]
            print(f"- {name}, {'; '.join(where)}: {remark}")
    ours = [
        cell for name in names if name.startswith("minloader") for cell in columns[name].values()
    ]
    sys.exit(any(cell.text != "exact" for cell in ours))


if __name__ == "__main__":
    main()
