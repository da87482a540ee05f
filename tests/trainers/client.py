"""What the programs of the clients share: two processes a rank, of which the second resumes.

The first process trains to the end, then once more with checkpoints, and is killed in the middle
of an epoch. The second goes on from each of its checkpoints. What a run does in a step is noted
and compared. A client's program calls :func:`main`; ``programs.py`` runs it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from programs import free_port

RANK = int(os.environ.get("RANK", 0))
RANKS = int(os.environ.get("WORLD_SIZE", 1))

Steps = list[list[Any]]
Train = Callable[..., Steps]
"""``train(kind, workers, noise, folder, resume)`` returns the steps of a run.

With a ``folder`` it leaves a checkpoint in each of the three places of :func:`places`, and then
calls :func:`die`. ``resume`` is the folder and the name of one of them.
"""


def places(steps_per_epoch: int) -> dict[str, int]:
    """Return how many steps were done at each checkpoint: the last one is in mid-epoch."""
    return {"last": steps_per_epoch, "boundary": steps_per_epoch, "mid": steps_per_epoch * 3 // 2}


def die() -> None:
    """End this process as if by a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def compare(steps: Steps, expected: Steps) -> str:
    """Say whether a run did what was expected."""
    if steps == expected:
        return "yes"
    if [ids for ids, _ in steps] == [ids for ids, _ in expected]:
        return "samples"
    return "no"


def attempt(action: Callable[[], str]) -> str:
    """Return what an action says, or its error."""
    try:
        return action()
    except BaseException as error:  # torch.distributed.checkpoint has such
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def begin(phase: str, seconds: int) -> bool:
    """Fork a process for each rank, wait for them, and return whether this is one of them.

    So the program imports what it needs once, which takes longer than to train.
    """
    global RANK
    port, pids = free_port(), []
    for rank in range(RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            RANK = rank
            if RANKS > 1:
                own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
                os.environ |= {name: str(value) for name, value in own.items()}
            with open(f"log-{rank}.txt", "a") as log:
                for fd in (1, 2):
                    os.dup2(log.fileno(), fd)
            faulthandler.dump_traceback_later(seconds, exit=True)  # what hangs is ended, says where
            return True
    for pid in pids:
        os.waitpid(pid, 0)
    return False


def main(
    train: Train, extras: Callable[[str], Any] | None = None, *, cases: tuple[int, ...] = (0, 2)
) -> None:
    """Run both processes of a client.

    Args:
        train: runs the training.
        extras: does whatever else the client can do, with a loader of a kind, and returns what came
            of it; to be the same with torch's loader.
        cases: numbers of workers to resume with, besides that of the first run.
    """
    kind, folder, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    phase = next((each for each in ("first", "second") if begin(each, seconds)), None)
    if phase is None:
        return  # both have ended
    noted = folder / f"steps-{RANK}.json"
    cells: dict[str, str] = {}

    def save() -> None:
        (folder / f"{phase}-{RANK}.json").write_text(json.dumps(cells))

    if phase == "first":
        expected = train("torch", 0, 0.0, None, None)
        steps: Steps = []

        def shards() -> str:
            steps.extend(train(kind, 1, 0.0, None, None))
            return compare(steps, expected)

        cells["shards"] = attempt(shards)
        cells["runs"] = "yes" if steps else cells["shards"]
        if extras is not None:
            cells["extras"] = attempt(partial(_same, extras, kind))
        save()
        noted.write_text(json.dumps(train(kind, 1, 0.5, None, None)))
        train(kind, 1, 0.5, folder, None)
    whole = json.loads(noted.read_text())
    here = places(len(whole) // 3)
    for name, workers in [*((name, 1) for name in here), *(("mid", n) for n in cases)]:
        rest = whole[here[name] :]

        def resume(name: str = name, workers: int = workers, rest: Steps = rest) -> str:
            return compare(train(kind, workers, 0.5, None, (folder, name)), rest)

        cells[f"{name} {workers}"] = attempt(resume)
        save()


def _same(extras: Callable[[str], Any], kind: str) -> str:
    ours, theirs = extras(kind), extras("torch")
    if ours != theirs:
        print(f"{ours}\nunlike {theirs}")
    return "yes" if ours == theirs else "no"
