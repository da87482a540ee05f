"""The page and the fragment of the report: what is said, that it is sound, how it looks."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from minloader.report import Bar, Event, Part, page

STAGES = ("dataset", "transform", "collate", "transport")


def simulate(
    batches: int = 120,
    workers: int = 2,
    *,
    draw: float = 0.0005,
    stages: tuple[float, float, float, float] = (0.02, 0.003, 0.004, 0.001),
    own: float = 0.005,
    chunk: int = 1,
    dies: int = -1,
) -> tuple[list[Event], list[Bar]]:
    """A run as the loader would record it: two tasks in flight for each worker, first in first
    out; seconds for each batch, give or take. The worker of task ``dies`` dies with it."""
    rng = random.Random(0)
    now, events, took = 1000.0, [], dict.fromkeys(("wait", "own", "draw", *STAGES), 0.0)
    free = [now + 0.15 + 0.01 * worker for worker in range(workers)]
    pending: deque[float] = deque()

    def add(lane: str, name: str, start: float, seconds: float, **args: Any) -> float:
        events.append(Event(lane, name, start, seconds, args))
        if name in took:
            took[name] += seconds
        return start + seconds

    def work(first: int, now: float) -> float:
        worker = min(range(workers), key=free.__getitem__)
        lane, begin, again = f"worker {worker}", max(free[worker], now), False
        if first == dies * chunk:
            dead = begin + stages[0] * chunk / 2
            cause = "killed by SIGKILL (<out of memory> & co)"
            add(lane, "died", dead, 0.0, cause=cause)
            begin, again = dead + 0.06, True
        if again:
            add(lane, "again", begin, 0.0, batch=first, count=chunk)
        end = begin
        for name, seconds in zip(STAGES, stages, strict=True):
            end = add(lane, name, end, seconds * chunk * rng.uniform(0.7, 1.4))
        end += 0.0002
        add(lane, "task", begin, end - begin, batch=first, count=chunk, epoch=0)
        free[worker] = end
        return end

    drawn = 0
    for _ in range(batches // chunk):
        begin = now
        while len(pending) < 2 * workers and drawn < batches:
            now = add("sampler", "draw", now, draw * chunk * rng.uniform(0.8, 1.3))
            pending.append(work(drawn, now))
            drawn += chunk
        now = max(now, pending.popleft()) + 2e-5
        add("consumer", "wait", begin, now - begin)
        for more in range(chunk):
            if more:
                now = add("consumer", "wait", now, 1e-5)
            spent = own * rng.uniform(0.8, 1.2)
            took["own"] += spent
            now += spent
    wall = took["wait"] + took["own"]
    idle = workers * wall - sum(took[stage] for stage in STAGES)
    bars = [
        Bar("consumer", [Part("wait", took["wait"]), Part("own", took["own"])]),
        Bar("sampler", [Part("draw", took["draw"]), Part("idle", wall - took["draw"])]),
        Bar(
            "workers",
            [*(Part(stage, took[stage]) for stage in STAGES), Part("idle", idle)],
            f"{workers} processes",
        ),
    ]
    rng.shuffle(events)
    return events, bars


ROWS = [
    ("batches", "120", "and 3 skipped"),
    ("consumer waited", "1.92 s", "71 % of 2.70 s; 0.15 s of it for the first batch"),
    ("sampler", "0.05 s", "0.42 ms a batch"),
    ("dataset", "2.51 s", "20.9 ms a batch, in workers"),
    ("transport", "0.12 s", "packing in workers and unpacking here, 4.6 MB a batch"),
    ("workers busy", "0: 97 %, 1: 96 %", ""),
    ("shared memory", "5 slots, 23.1 MB", "none overflowed"),
    ("replaced workers", "0", "no batch was tried again"),
]

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dataset": ("The dataset holds everything up: 86 % of the workers' time.", "dataset", {}),
    "sampler": (
        "The sampler holds everything up: it takes 12 ms a batch, and the workers wait for it.",
        "draw",
        {"draw": 0.012, "stages": (0.004, 0.001, 0.001, 0.0005), "own": 0.001},
    ),
    "consumer": (
        "The loader keeps up: the consumer's own work is 97 % of the time.",
        "own",
        {"stages": (0.01, 0.003, 0.004, 0.001), "own": 0.03},
    ),
    "death": ("The dataset holds everything up.", "dataset", {"batches": 60, "dies": 50}),
    "eight": ("Collating holds everything up.", "collate", {
        "workers": 8, "stages": (0.01, 0.005, 0.03, 0.004), "own": 0.001, "batches": 500}),
    "chunks": ("Transport holds everything up.", "transport", {
        "batches": 64 * 30, "chunk": 64, "stages": (2e-5, 1e-6, 1e-6, 3e-5), "draw": 1e-6,
        "own": 5e-6}),
}  # fmt: skip


def run_page(name: str) -> str:
    verdict, bottleneck, how = RUNS[name]
    events, bars = simulate(**how)
    subtitle = "120 batches in 2.70 s, 2 workers"
    return page(verdict, bars, ROWS, events, bottleneck=bottleneck, subtitle=subtitle)
