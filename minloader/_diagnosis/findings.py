"""Conclusions from trials: which setting is best, and what limits it."""

from __future__ import annotations

from minloader._diagnosis.processors import processors
from minloader._diagnosis.trials import Row, Trial
from minloader._diagnosis.verdict import judge, share
from minloader._formats import counted

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


def recommend(rows: list[Row], best: Row) -> str:
    """Return the best setting in words, and what it gains over the others."""
    text = f"num_workers={best.num_workers}"
    if best.num_workers:
        text += f", prefetch_factor={best.prefetch_factor}"
    text += f": {best.rate_text} batches/s"
    one = next((row for row in rows if row.num_workers), best)
    if one.num_workers < best.num_workers:
        text += f", {best.rate / one.rate:.1f} times as many as with {_workers(one)}"
    more = [row for row in rows if row.num_workers > best.num_workers]
    if not all(row.is_steady for row in rows):
        text += f". Whether another is better: {TOO_FEW}"
    elif more:
        gain = max(row.rate for row in more) / best.rate - 1
        text += f". More workers add {share(max(0.0, gain))}"
    elif len(rows) > 1:
        text += ". These are the most that were tried: more may be faster yet"
    for row in rows:
        if row.start_method not in ("", best.start_method) and 2 * row.first < best.first:
            text += (
                f". mp_context={row.start_method!r} (of minloader.torch.DataLoader: "
                f"multiprocessing_context) starts sooner: {row.first:.1f} s to the first batch, "
                f"{best.first:.1f} s with {best.start_method!r}"
            )
    return f"{text}."


def cause(trials: list[Trial], best: Trial) -> str:
    """Return what limits the loader: why more workers do not help, or else the verdict.

    Args:
        trials: with the same ``prefetch_factor``, by number of workers.
        best: the one with the best setting.
    """
    trials = [trial for trial in trials if trial.row.num_workers]
    if len(trials) < 2:
        return best.stats.verdict
    few = trials[0].row
    most = max(trials[1:], key=lambda trial: trial.row.rate)
    many = most.row
    gain = many.rate / few.rate
    useful = min(many.num_workers, max(processors(), few.num_workers + 1))
    if (gain - 1) / (useful / few.num_workers - 1) >= 0.6:
        return best.stats.verdict
    text = f"{_workers(many)} make {gain:.1f} times as many batches as {_workers(few)}"
    if not (few.is_steady and many.is_steady):
        return f"{text}, {TOO_FEW}"
    return f"{text}: {judge(most.stats, more=False)[1]}"


def _workers(row: Row) -> str:
    return counted(row.num_workers, "worker")
