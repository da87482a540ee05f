"""Runs random programs for a while: ``python -m tests.model --minutes 60``.

Half of the time two processes compute beside it, which it starts and ends. Each round has another
seed, which is printed; ``--seed`` repeats a round. A program that fails is printed with its steps,
after it was made as short as hypothesis can.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import logging
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
# Workers import the tests' modules by name, as tests do under pytest.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])

from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from model.machine import Programs, ProgramsInProcesses, counts, run_programs  # noqa: E402
from model.programs import KINDS  # noqa: E402

COMPUTE = """
import os
parent = os.getppid()
while os.getppid() == parent:  # however it ends
    sum(range(1_000_000))
"""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", COMPUTE]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_round(number: int, programs: int, processes: bool, given: argparse.Namespace) -> str:
    """Runs programs from one seed; returns what failed, or nothing."""
    options = settings(
        max_examples=programs,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if not given.no_shrink else (Phase.generate,),
    )

    class Chosen(ProgramsInProcesses if processes else Programs):  # type: ignore[misc]
        kinds = tuple(given.kind or KINDS)

    machines: list[Any] = [] if given.torch else [Chosen]
    if given.torch or (importlib.util.find_spec("torch") and not given.kind):
        from model.drop_in import TorchPrograms, TorchProgramsInProcesses

        machines.append(TorchProgramsInProcesses if processes else TorchPrograms)
    for name in given.without or ():
        setattr(Chosen, name, None)

    try:
        for machine in machines:
            run_programs(machine, number, options)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "\n".join(told(error))
    return ""


def told(error: BaseException | None) -> Iterator[str]:
    """An error, where it was raised, its causes, and the program that it ended."""
    while error is not None:
        for each in getattr(error, "exceptions", ()):
            yield from told(each)
        yield from getattr(error, "__notes__", ())
        for frame in traceback.extract_tb(error.__traceback__)[-6:]:
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


def main() -> int:
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long; a round is ended")
    parser.add_argument("--seed", type=int, help="repeat the round with this seed")
    parser.add_argument("--programs", type=int, default=40, help="programs in a round")
    parser.add_argument(
        "--kind", nargs="*", choices=list(KINDS), help="of sampler or stream; else all"
    )
    parser.add_argument("--torch", action="store_true", help="only with minloader.torch.DataLoader")
    parser.add_argument("--without", nargs="*", help="rules to leave out")
    parser.add_argument("--processes", choices=["never", "always"], help="else each third round")
    parser.add_argument("--busy", action="store_true", help="with busy processes all the time")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they come")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    options = parser.parse_args()
    # Shells have what runs in the background ignore Ctrl-C, which programs are to be given.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("minloader").setLevel(logging.CRITICAL)  # deaths and skipped batches
    first = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    end = time.monotonic() + 60 * options.minutes
    rounds, failures = 0, Counter[str]()
    while rounds == 0 or (options.seed is None and time.monotonic() < end):
        number = first + rounds
        busy = options.busy or rounds % 2 == 1
        processes = rounds % 3 == 2 if not options.processes else options.processes == "always"
        programs = max(1, options.programs // 4) if processes else options.programs
        where = "with worker processes" if processes else "here and in threads"
        print(f"round {rounds}: --seed {number}, {where}{', busy' if busy else ''}", flush=True)
        with busy_processes(2 if busy else 0):
            failed = run_round(number, programs, processes, options)
        rounds += 1
        if failed:
            print(failed, flush=True)
            failures[failed.strip().splitlines()[-1][:100]] += 1
            if not options.keep_going:
                break
    print(f"{rounds} rounds, {counts['programs']} programs")
    for name, count in sorted(counts.items()):
        print(f"  {count:6} {name}")
    print(f"{sum(failures.values())} rounds failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
