"""Conclusions from trials: which setting is best, what limits it, how workers should start."""

from __future__ import annotations

from minloader._checks import amount
from minloader._insight.verdict import BUSY, QUEUED, has_gil, share
from minloader._memory.limits import processors
from minloader.doctor.trials import Row, Trial

TOLERANCE = 0.1
"""Share of the best rate that is not worth more workers, or more prefetching."""

TOO_FEW = "too few batches to tell: run more --seconds, on a quiet machine"


def pick(trials: list[Trial], step: float) -> Trial:
    """Return the trial with the fewest workers of those that are about as fast as the fastest.

    Without a step, num_workers=0 looks better than it is: a real consumer would not work while a
    batch is made. It is left out then, if there is anything else.
    """
    trials = [trial for trial in trials if trial.row.num_workers or step] or trials
    enough = (1 - TOLERANCE) * max(trial.row.rate for trial in trials)
    fast = [trial for trial in trials if trial.row.rate >= enough]
    return min(fast, key=lambda trial: trial.row.num_workers)  # the first of several


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
    if not all(row.is_steady for row in rows):
        text += f". Whether another is better: {TOO_FEW}."
    elif more:
        gain = max(row.rate for row in more) / best.rate - 1
        text += f". More workers add {share(max(0.0, gain))}."
    elif len(rows) > 1:
        text += ". These are the most that were tried: more may be faster yet."
    inline = next((row for row in rows if not row.num_workers), best)
    if inline.rate > best.rate:
        text += (
            f" num_workers=0 makes {inline.rate_text} batches/s, but your step does not run "
            "meanwhile: --step tells which is better."
        )
    return text


def cause(trials: list[Trial], best: Trial, step: float) -> str:
    """Return what limits the loader: why more workers do not help, or else the verdict.

    Args:
        trials: with the same ``prefetch_factor``, by number of workers.
        best: the one with the best setting.
        step: seconds that the consumer slept after each batch.
    """
    trials = [trial for trial in trials if trial.row.num_workers]
    if len(trials) < 2:
        return best.stats.verdict
    few = trials[0].row
    most = max(trials[1:], key=lambda trial: trial.row.rate)
    many = most.row
    if step and min(few.wait, many.wait) < 0.1:
        enough = few if few.wait < 0.1 else many
        text = f"{_workers(enough)} can keep up with a step of {step * 1e3:g} ms"
        return f"{text}, which waits {100 * enough.wait:.0f} % of the time"
    gain = many.rate / few.rate
    useful = min(many.num_workers, max(processors(), few.num_workers + 1))
    if (gain - 1) / (useful / few.num_workers - 1) >= 0.6:
        return best.stats.verdict
    text = f"{_workers(many)} make {gain:.1f} times as many batches as {_workers(few)}"
    if not (few.is_steady and many.is_steady):
        return f"{text}, {TOO_FEW}"
    return f"{text}: {_held_up_by(few, most)}"


def _held_up_by(few: Row, trial: Trial) -> str:
    """Return why a trial with more workers was no faster than one with a few."""
    count, cpus, shards, stats = trial.row.num_workers, processors(), trial.shards, trial.stats
    known = stats._measured
    if shards is not None and shards < count:
        return (
            f"each worker reads a shard of the stream, but num_workers was {shards} when it "
            "was cut into these: let make_loader take num_workers"
        )
    if (trial.row.busy or 0) < 0.6:
        return stats.verdict  # workers are idle, and it says why
    if stats.executor == "thread" and has_gil():
        return "threads share the interpreter's lock: try executor='process'"
    if stats.asleep > 0.4 * known:
        return (
            f"workers compute only {share(stats.computing, known)} of the time, and wait in the "
            "dataset for the rest: for a lock that they share, the disk or the network"
        )
    if few.num_workers >= cpus:
        return f"there are {cpus} processors" if cpus > 1 else "there is one processor"
    if stats.computing >= BUSY * cpus * stats.seconds:
        return "all processors are busy, since a batch takes several of them (threads, programs)"
    if stats.queued > QUEUED * known:
        return (
            f"workers wait for a processor {share(stats.queued, known)} of the time: other "
            "programs have them"
        )
    return "other programs may have the processors"


def notes(trials: list[Trial], best: Row, *, used_up: bool, own: bool) -> list[str]:
    """Return remarks on what the trials show besides, or do not show.

    Args:
        trials: all of them.
        best: the best setting.
        used_up: whether the sampler is an iterator.
        own: whether the executor is the user's.
    """
    found = []
    for trial in trials:
        row = trial.row
        if row.start_method != best.start_method and 2 * row.first < best.first:
            found.append(
                f"mp_context={row.start_method!r} starts sooner: {row.first:.1f} s to the first "
                f"batch, {best.first:.1f} s with {best.start_method!r}"
            )
    grown = {name: size for trial in trials for name, size in trial.stats.growth.items()}
    found += [
        f"{name} grows steadily, by {amount(size)} so far: the dataset keeps something, or a cache "
        "is still being filled: run more --seconds than an epoch takes to tell"
        for name, size in grown.items()
    ]
    if used_up:
        found.append("the sampler is an iterator: a run ends with its one epoch")
    if own:
        found.append(
            "the executor is your own: num_workers is how many tasks it is given, and its workers "
            "are not looked at"
        )
    if any(trial.stats.replaced for trial in trials):
        found.append("workers died or grew too large, and were replaced: the log tells why")
    return found


def _workers(row: Row) -> str:
    return f"{row.num_workers} worker{'s' * (row.num_workers != 1)}"
