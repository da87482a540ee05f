"""Conclusions from trials: what grows, what holds workers up, which setting is best."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minloader._checks import amount
from minloader._insight.verdict import BUSY, QUEUED, share
from minloader._memory.limits import processors
from minloader.doctor.trials import Row, Sample, Trial

TOLERANCE = 0.05
"""Share of the best rate that is not worth more workers, or more prefetching."""

CERTAIN = 3
"""Standard errors from which on a difference is one. Those are estimates themselves, from four
quarters of a trial, and the machine may be busier in one trial than in the next."""

LEAST_SAMPLES = 12
"""Samples from which on a trend can be told from chance."""

LEAK = 2 << 20
"""Bytes that a process may grow by: half for what allocators round up, half for the events that a
loader keeps."""

CACHE = "; or a cache is still being filled: run more --seconds than an epoch takes to tell"


@dataclass
class Verdict:
    """An answer ("yes", "no", "in part", "perhaps" or "unknown"), and the reason for it."""

    answer: str
    text: str

    def __str__(self) -> str:
        return f"{self.answer}: {self.text}"


# --- growth


def steady_growth(values: Sequence[float], tolerance: float) -> float:
    """Return how much a series grew from its first to its last quarter; 0 without steady growth.

    Growth is steady if each quarter has some, if it is larger than the values differ within a
    quarter, and if it does not slow down, as it does while a cache fills.

    Args:
        values: at least four, in order.
        tolerance: growth up to this counts as none.
    """
    quarters = _quarters(values)
    middles = [statistics.median(quarter) for quarter in quarters]
    steps = [after - before for before, after in itertools.pairwise(middles)]
    grown = middles[-1] - middles[0]
    spread = statistics.fmean(max(quarter) - min(quarter) for quarter in quarters)
    is_steady = min(steps) > 0 and steps[-1] >= grown / 6
    return grown if is_steady and grown > max(tolerance, spread) else 0.0


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    cuts = [n * len(values) // 4 for n in range(5)]
    return [values[begin:end] for begin, end in itertools.pairwise(cuts)]


def growth(trial: Trial) -> list[str] | None:
    """Return what the processes of a trial had more and more of; None if it was too short."""
    found, is_long = [], False
    epoch = trial.first_epoch or math.inf
    # Caches had an epoch to fill, if that was over before most of what is looked at.
    over = bool(trial.samples) and epoch <= 0.6 * trial.samples[-1].batches
    for pid, name in trial.names.items():
        series = [sample for sample in trial.samples if pid in sample.usages]
        kept = [s for s in series[len(series) // 3 :] if not over or s.batches >= epoch]
        if len(kept) >= LEAST_SAMPLES:
            is_long = True
            found += _growth_of_process(pid, name, kept, "" if over else CACHE)
    return found if is_long else None


def _growth_of_process(pid: int, name: str, samples: list[Sample], doubt: str) -> list[str]:
    """Return sentences about the process; ``doubt`` is why its memory may have grown for good."""
    found = []
    usages = [sample.usages[pid] for sample in samples]
    first, *_, last = map(statistics.median, _quarters([sample.batches for sample in samples]))
    batches = round(last - first)
    size = steady_growth([usage.memory for usage in usages], LEAK + usages[0].memory / 200)
    if size:
        owner = "the sampler, or what else runs here," if pid == os.getpid() else "the dataset"
        found.append(
            f"{name} grew by {amount(size)} in {batches:,} batches, {amount(size / batches)} "
            f"each: {owner} keeps something{doubt}"
        )
    for kind, why in (
        ("descriptors", "files or sockets are opened and not closed"),
        ("threads", "they are started and do not end"),
        ("children", "processes are started and not waited for"),
    ):
        count = steady_growth([getattr(usage, kind) for usage in usages], 3)
        if count:
            found.append(f"{name} had {count:,.0f} more {kind} after {batches:,} batches: {why}")
    return found


# --- verdicts


def leaking(trials: list[Trial]) -> Verdict:
    """Judge by the trial with the fewest workers, where each sees most of the dataset."""
    trial = next((trial for trial in trials if trial.row.num_workers), trials[0])
    found, batches = growth(trial), f"{trial.stats.batches:,} batches"
    if not Path("/proc/self/statm").exists():
        return Verdict("unknown", "processes can be looked at only where there is /proc")
    if found is None:
        return Verdict("unknown", f"{batches} are too few to tell: run more --seconds")
    if not found:
        return Verdict("no", f"nothing grew steadily over {batches}")
    is_sure = any(not text.endswith(CACHE) for text in found)
    return Verdict("yes" if is_sure else "perhaps", "\n".join(found))


def serialized(trials: list[Trial], step: float) -> Verdict:
    """Judge whether more workers make more batches, and say what holds them up."""
    trials = [trial for trial in trials if trial.row.num_workers]
    if len(trials) < 2:
        return Verdict("unknown", "it takes two numbers of workers above 0 to tell")
    few = trials[0].row
    most = max(trials[1:], key=lambda trial: trial.row.rate)
    many = most.row
    if step and min(few.wait, many.wait) < 0.1:
        enough = few if few.wait < 0.1 else many
        text = f"{_workers(enough)} can keep up with a step of {step * 1e3:g} ms"
        return Verdict("no", f"{text}, which waits {100 * enough.wait:.0f} % of the time")
    gain = many.rate / few.rate
    useful = min(many.num_workers, max(processors(), few.num_workers + 1))
    part = (gain - 1) / (useful / few.num_workers - 1)
    text = f"{_workers(many)} make {gain:.1f} times as many batches as {_workers(few)}"
    if part >= 0.6:
        return Verdict("no", text)
    return Verdict("yes" if part < 0.25 else "in part", f"{text}: {_cause(few, most)}")


def _cause(few: Row, trial: Trial) -> str:
    """Return why a trial with more workers was no faster than one with a few."""
    count, cpus, shards = trial.row.num_workers, processors(), trial.inspection.shards
    gil = getattr(sys, "_is_gil_enabled", lambda: True)
    if few.num_workers >= cpus:
        return f"there are {cpus} processors" if cpus > 1 else "there is one processor"
    if shards is not None and shards < count:
        return (
            f"each worker reads a shard of the stream, but num_workers was {shards} when it "
            "was cut into these: let make_loader take num_workers"
        )
    if (trial.row.busy or 0) < 0.6:
        return trial.stats.verdict  # workers are idle, and it says why
    if trial.stats.executor == "thread" and gil():
        return "threads share the interpreter's lock: try executor='process'"
    stats = trial.stats
    known = stats._measured
    if stats.computing >= BUSY * cpus * stats.seconds:
        return "all processors are busy, since a batch takes several of them (threads, programs)"
    if stats.queued > QUEUED * known:
        return (
            f"workers wait for a processor {share(stats.queued, known)} of the time: other "
            "programs have them"
        )
    if stats.asleep > 0.4 * known:
        return (
            f"workers compute only {share(stats.computing, known)} of the time, and wait in the "
            "dataset for the rest: for a lock that they share, the disk or the network"
        )
    return "other programs may have the processors"


# --- the recommendation


def pick(trials: list[Trial], step: float) -> Trial:
    """Return the trial with the fewest workers of those that are about as fast as the fastest.

    Without a step, num_workers=0 looks better than it is: a real consumer would not work while a
    batch is made. It is left out then, if there is anything else.
    """
    trials = [trial for trial in trials if trial.row.num_workers or step] or trials
    rows = [trial.row for trial in trials]
    best = max(rows, key=lambda row: row.rate)

    def is_fast(row: Row) -> bool:
        return row.rate + max(TOLERANCE * best.rate, _chance(row, best, rows)) >= best.rate

    fast = [trial for trial in trials if is_fast(trial.row)]
    return min(fast, key=lambda trial: trial.row.num_workers)  # the first of several


def _chance(one: Row, other: Row, rows: list[Row]) -> float:
    """Return by how many batches a second two of some rows may differ by chance."""
    usual = statistics.median(row.noise for row in rows)  # a noisy trial may have looked quiet
    return CERTAIN * math.hypot(*(max(row.noise, usual) * row.rate for row in (one, other)))


def recommend(best: Row, rows: list[Row], step: float) -> str:
    """Return the best setting in words, and what it gains over the others."""
    text = f"num_workers={best.num_workers}"
    if best.num_workers:
        text += f", prefetch_factor={best.prefetch_factor}"
    text += f": {best.rate_text} batches/s"
    one = next((row for row in rows if row.num_workers), best)
    if one.num_workers < best.num_workers:
        text += f", {best.rate / one.rate:.1f} times as many as with {_workers(one)}"
    if best.memory is not None:
        text += f"; workers take {amount(best.memory)} of memory"
    if step:
        text += f"; a step of {step * 1e3:g} ms waits {100 * best.wait:.0f} % of the time"
    more = [row for row in rows if row.num_workers > best.num_workers]
    if more:
        fastest = max(more, key=lambda row: row.rate)
        gain = max(0.0, fastest.rate / best.rate - 1)
        text += f". More workers add {share(gain)}"
        if gain > TOLERANCE:
            chance = _chance(best, fastest, rows) / best.rate
            text += f", which may be chance (+- {share(chance)}): more --seconds would tell"
        text += "."
    elif len(rows) > 1:
        text += ". These are the most that were tried: more may be faster yet."
    inline = next((row for row in rows if not row.num_workers), best)
    if inline.rate > best.rate:
        text += (
            f" num_workers=0 makes {inline.rate_text} batches/s, but your step stands still "
            "meanwhile: --step tells what is better."
        )
    return text


def _workers(row: Row) -> str:
    return f"{row.num_workers} worker{'s' * (row.num_workers != 1)}"


def notes(trials: list[Trial]) -> list[str]:
    """Return remarks on what the trials do not show, or show with less certainty."""
    inspection, found = trials[0].inspection, []
    if inspection.sampler_used_up:
        found.append("the sampler is an iterator: a run ends with its one epoch")
    if not isinstance(inspection.executor, str):
        found.append(
            "the executor is your own: num_workers is how many tasks it is given, and its workers "
            "are not looked at"
        )
    if any(trial.stats.replaced for trial in trials):
        found.append("workers died or grew too large, and were replaced: the log tells why")
    if any(trial.row.noise > 0.1 for trial in trials):
        found.append("some rates are uncertain (+-): run more --seconds, on a quiet machine")
    return found
