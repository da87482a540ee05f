"""Which loader can do what: prints the table of yes and no of docs/benchmarks.md.

    python tests/benchmarks/abilities.py [--only minloader grain]

An epoch is 16 shuffled batches of two samples, each its index and a number that it draws; 2
workers. Each answer is that of a process of its own, which has a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import run_child, workers_of
from psutil import NoSuchProcess

SIZE, BATCH, MIDDLE, AILING = 32, 2, 5, 11
SECONDS = 60  # who takes longer hangs
TIMEOUT = 5  # of a sample that hangs, for those who have such an argument
MEGABYTES = 400  # of the array that the workers share, or do not
FOLDER = "ABILITIES_FOLDER"
CHILD = f"import sys; sys.path[:] = {sys.path!r}; import abilities; abilities.child()"
UNGUARDED = f"""
import sys
sys.path[:] = {sys.path!r}
import abilities

class Own(abilities.Samples):
    pass

print(len(list(abilities.LOADERS[sys.argv[1]].make(Own(), 2, "spawn"))))
"""


class Samples:
    """Sample 11 may kill its worker, hang, or press Ctrl-C."""

    def __init__(self, trouble: str = "", megabytes: int = 0) -> None:
        self.trouble, self.array = trouble, np.ones(megabytes * 125_000)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        self.array.sum()  # touches all of it
        if index == AILING and self.trouble == "hang":
            time.sleep(1000)
        if index == AILING and self.trouble in ("kill", "interrupt") and self.first():
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os.killpg(0, signal.SIGINT)  # as a terminal does
        return np.array([index, np.random.random()])

    def first(self) -> bool:
        """Whether it is the first try."""
        try:
            Path(os.environ[FOLDER], self.trouble).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


# --- the loaders


def minloader(samples: Samples, workers: int, start: str) -> Any:
    from minloader import Loader

    loader_of: Any = Loader
    settings = {"batch_size": BATCH, "shuffle": True, "seed": 0, "mp_context": start}
    hang = {"timeout": TIMEOUT, "on_sample_error": "skip"} if samples.trouble == "hang" else {}
    return loader_of(samples, num_workers=workers, **settings, **hang)


def torch(samples: Samples, workers: int, start: str, kind: Any = None, **options: Any) -> Any:
    # Seeded, so that it shuffles and draws alike in each process.
    import torch

    torch.manual_seed(0)
    limit = TIMEOUT if samples.trouble == "hang" else 0
    return (kind or torch.utils.data.DataLoader)(
        samples,
        **(options or {"batch_size": BATCH, "shuffle": True}),
        num_workers=workers,
        multiprocessing_context=start,
        timeout=limit,
        collate_fn=np.stack,
    )


def torchdata(samples: Samples, workers: int, start: str) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return torch(samples, workers, start, StatefulDataLoader)


class Grain:
    """Its iterator, with the names that others have. Its workers are always spawned."""

    def __init__(self, samples: Samples, workers: int, start: str) -> None:
        from absl.flags import FLAGS
        from grain import MapDataset, MultiprocessingOptions

        FLAGS.mark_as_parsed()
        found = MapDataset.source(samples).seed(0).shuffle().random_map(drawn).batch(BATCH)
        self.batches = iter(
            found.to_iter_dataset().mp_prefetch(MultiprocessingOptions(num_workers=workers))
        )

    def __iter__(self) -> Any:
        return self.batches

    def state_dict(self) -> Any:
        return self.batches.get_state()

    def load_state_dict(self, state: Any) -> None:
        self.batches.set_state(state)


def drawn(sample: Any, generator: np.random.Generator) -> Any:
    """The generator that grain's documentation says to draw from."""
    return np.array([sample[0], generator.random()])


def spdl(samples: Samples, workers: int, start: str) -> Any:
    from spdl.dataloader import get_pytorch_dataloader

    def kind(*args: Any, timeout: int, **options: Any) -> Any:
        return get_pytorch_dataloader(*args, timeout=timeout or None, in_order=True, **options)

    return torch(samples, workers, start, kind)


def lhotse(samples: Samples, workers: int, start: str) -> Any:
    # As its documentation says: torch's loader of a dataset that is given the cuts of a batch; the
    # state is that of the sampler.
    from lhotse import CutSet
    from lhotse.dataset import DynamicCutSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(number, duration=1.0) for number in range(SIZE))
    sampler = DynamicCutSampler(cuts, max_cuts=BATCH, shuffle=True, seed=0)
    loader = torch(OfCuts(samples), workers, start, sampler=sampler, batch_size=None)
    loader.collate_fn = as_it_is
    loader.state_dict, loader.load_state_dict = sampler.state_dict, sampler.load_state_dict
    return loader


class OfCuts:
    def __init__(self, samples: Samples) -> None:
        self.samples, self.trouble = samples, samples.trouble

    def __getitem__(self, cuts: Any) -> Any:
        return np.stack([self.samples[int(cut.id.split("-")[-1])] for cut in cuts])


def as_it_is(batch: Any) -> Any:
    return batch


def seqtools(samples: Samples, workers: int, start: str) -> Any:
    # A sequence of batches; who shuffles it gives it the indices.
    import multiprocessing

    from seqtools import batch, gather, prefetch

    multiprocessing.set_start_method(start, force=True)
    order = np.random.default_rng(0).permutation(SIZE)
    batches = batch(gather(samples, order), BATCH, collate_fn=np.stack)
    return Places(prefetch(batches, workers, "process"))


class Places:
    """Takes a place of a sequence after the other. One that raised is asked for again."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.place = batches, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.batches):
            raise StopIteration
        batch = self.batches[self.place]
        self.place += 1
        return batch


def webdataset(samples: Samples, workers: int, start: str) -> Any:
    # Four shards, which the workers share out; a sample is made in map(), and batched there.
    import tarfile
    from io import BytesIO

    import webdataset

    shards = [f"{os.environ[FOLDER]}/{number}.tar" for number in range(4)]
    for number, path in enumerate(shards):
        with tarfile.open(path, "w") as file:
            for index in range(number, SIZE, 4):
                file.addfile(tarfile.TarInfo(f"{index}.txt"), BytesIO())
    source = webdataset.WebDataset(shards, shardshuffle=4, seed=0)
    stream = source.map(partial(made, samples)).batched(BATCH, collation_fn=np.stack)
    stream.trouble = samples.trouble
    return torch(stream, workers, start, webdataset.WebLoader, batch_size=None)


def made(samples: Samples, found: Any) -> Any:
    return samples[int(found["__key__"])]


class Loader(NamedTuple):
    make: Callable[[Samples, int, str], Any]
    needs: tuple[str, ...] = ()


LOADERS = {
    "minloader": Loader(minloader),
    "torch": Loader(torch, ("torch",)),
    "StatefulDataLoader": Loader(torchdata, ("torch", "torchdata")),
    "Grain": Loader(Grain, ("grain",)),
    "SPDL": Loader(spdl, ("torch", "spdl")),
    "lhotse": Loader(lhotse, ("torch", "lhotse")),
    "webdataset": Loader(webdataset, ("torch", "webdataset")),
    "SeqTools": Loader(seqtools, ("seqtools",)),
}


# --- a run, in the child


def child() -> None:
    """Prints the batches of a run, the errors that it raised, and the workers' megabytes."""
    run = json.loads(sys.argv[1])
    os.setsid()
    samples = Samples(run.get("trouble", ""), run.get("megabytes", 0))
    loader = LOADERS[run["loader"]].make(samples, run.get("workers", 2), run.get("start", "fork"))
    if run.get("save") and not hasattr(loader, "state_dict"):
        sys.exit("no states")
    if run.get("resume"):
        loader.load_state_dict(pickle.loads(Path(run["resume"]).read_bytes()))
    batches, given, errors, memory = iter(loader), [], [], 0.0
    while len(errors) <= 3:
        try:
            given.append(np.asarray(next(batches)).tolist())
        except StopIteration:
            break
        except (Exception, KeyboardInterrupt) as error:
            errors.append(type(error).__name__)
        if len(given) == MIDDLE and run.get("save"):
            Path(run["save"]).write_bytes(pickle.dumps(loader.state_dict()))
        if len(given) == SIZE // BATCH - 2 and run.get("megabytes"):
            memory = sum(each.memory_full_info().pss for each in workers_of(os.getpid())) / 1e6
    print("\n" + json.dumps({"given": given, "errors": errors, "memory": memory}), flush=True)
    for each in workers_of(os.getpid()):
        with suppress(NoSuchProcess):
            each.kill()  # some hang, and their loader with them: that is not what is asked
    os._exit(0)


def start(loader: str, folder: str, **options: Any) -> dict[str, Any]:
    """Does a run, and returns what it printed, or how it ended."""
    run = json.dumps({"loader": loader, **options})
    os.environ[FOLDER] = folder
    status, out, err = run_child([sys.executable, "-c", CHILD, run], SECONDS)
    last = (out.splitlines() or [""])[-1]
    if status is not None and last.startswith("{"):
        return dict(json.loads(last))
    return {"failed": "hangs" if status is None else (err.splitlines() or ["dies"])[-1]}


def indices(given: Iterable[Any]) -> list[int]:
    return [int(sample[0]) for batch in given for sample in batch]


def column(name: str, folder: str) -> dict[str, str]:
    """The answers of one loader."""
    mine = Path(folder, name)
    mine.mkdir()
    state = str(mine / "state")
    run = partial(start, name, str(mine))
    whole = run()["given"]

    def judged(found: dict[str, Any], want: list[Any], same: Callable[[Any], Any]) -> str:
        if "failed" in found:
            return "hangs" if found["failed"] == "hangs" else f"error: {found['failed'][:90]}"
        got, errors = found["given"], set(found["errors"]) - {"KeyboardInterrupt"}
        if same(got) == same(want):
            return "yes"
        if indices(got) == indices(want):
            return "other draws"
        if errors:
            return f"error: {', '.join(errors)}"
        lost = len(want) - len(got)
        return f"{lost} batches lost" if lost else "other batches"

    def resumed(workers: int) -> str:
        if "failed" in run(save=state):
            return "no states"
        return judged(run(resume=state, workers=workers), whole[MIDDLE:], list)

    def hanging() -> str:
        found = run(trouble="hang")
        left = sorted(set(indices(whole)) - {AILING})
        if "given" in found and sorted(indices(found["given"])) == left:
            return "yes"
        return judged(found, whole, list)

    def unguarded() -> str:
        script = mine / "unguarded.py"
        script.write_text(UNGUARDED)
        status, out, _ = run_child([sys.executable, str(script), name], SECONDS)
        return "hangs" if status is None else "yes" if out.strip() == "16" else "error"

    def shared() -> str:
        found = run(megabytes=MEGABYTES, start="spawn")
        if "failed" in found:
            return str(found["failed"])
        return f"{'yes' if found['memory'] < 1.5 * MEGABYTES else 'no'}, {found['memory']:.0f} MB"

    return {
        "resumed with 2 workers": resumed(2),
        "resumed with 3 workers": resumed(3),
        "1 and 3 workers give what 2 give": ", ".join(
            judged(run(workers=workers), whole, list) for workers in (1, 3)
        ),
        "a worker is killed": judged(run(trouble="kill"), whole, indices),
        "a sample hangs": hanging(),
        "Ctrl-C, and next() again": judged(run(trouble="interrupt"), whole, indices),
        "spawned, no guard": unguarded(),
        f"spawned, one copy of {MEGABYTES} MB": shared(),
    }


def main() -> None:
    """Prints all; the exit status is 1 if an answer of minloader is not yes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=list(LOADERS))
    names = [
        name
        for name in parser.parse_args().only
        if all(map(importlib.util.find_spec, LOADERS[name].needs))
    ]
    with tempfile.TemporaryDirectory() as folder:
        columns = {name: column(name, folder) for name in names}
    print("| |", " | ".join(names), "|")
    print("|---|" + "---|" * len(names))
    for row in columns[names[0]]:
        print(f"| {row} |", " | ".join(columns[name][row] for name in names), "|")
    sys.exit(any(not cell.startswith("yes") for cell in columns.get("minloader", {}).values()))


if __name__ == "__main__":
    main()
