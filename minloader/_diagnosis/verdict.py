"""Say what limits the loop, and which argument to change."""

from __future__ import annotations

import math
import os
import sys

from minloader._diagnosis.figures import PlainStats
from minloader._diagnosis.processors import processors
from minloader._formats import counted, format_bytes

IN_WORDS = {
    "dataset": "the dataset",
    "transform": "transform",
    "collate": "collate_fn",
    "transport": "packing batches",
}
"""The stages of a worker, in a sentence."""

LITTLE_WORK = 30e-6
"""Seconds of work a batch below which its delivery costs more than its making."""

BUSY = 0.8
"""Share of all processors from which on these are busy: the consumer and the system need some."""

LARGE_BATCH = 1_000_000
"""Bytes of a batch from which on the copies that a pipe makes are felt."""

QUEUED = 0.25
"""Share of the workers' time, waited for a processor, from which on others are in the way."""

LITTLE_TIME = 200e-6
"""Seconds of the loop a batch below which larger batches are the advice."""


def judge(stats: PlainStats, *, more: bool = True) -> tuple[str, str]:
    """Return the bottleneck, and the verdict in one sentence.

    The bottleneck is the name of what takes the time on the timeline: "own" for the consumer's
    work, "draw" for the sampler, a stage of the workers, or "" where nothing stands out.

    Args:
        stats: the figures.
        more: whether more workers may help; False where that was tried.
    """
    if not stats.batches:
        return "", "no batch has been delivered yet"
    times = stats.time
    workers = stats.workers.capacity
    start = stats.starting
    total = stats.seconds - start
    wait = times.wait - start
    if start > 3 * total:
        earlier = "" if stats.workers.started_early else "; loader.start() begins earlier"
        return "", (
            f"the first batch took {format_seconds(times.startup)}, {share(start, stats.seconds)} "
            f"of the time so far: look again after more batches{earlier}"
        )
    waited = f"waited {share(wait, total)} of the time"
    busy = min(1.0, times.work / (total * max(workers, 1)))
    idle = f"the workers were idle {share(1 - busy)}"
    also_idle = f", {idle}" if workers else ""

    if wait < 0.1 * total:
        needed = max(1, math.ceil(workers * busy / 0.8))  # with a fifth of their time to spare
        fewer = f": num_workers={needed} would do" if needed < workers else ""
        return "own", f"the consumer is the limit: it {waited}{also_idle}{fewer}"

    if times.sampler > wait / 2:
        each = format_seconds(times.sampler / stats.batches)
        limit = f"the sampler is the limit: it takes {each} a batch"
        return "draw", f"{limit}; the consumer {waited}{also_idle}"

    seconds = times.stages
    stage = max(seconds, key=lambda name: seconds[name])
    part = share(seconds[stage], times.work)
    limit = f"{IN_WORDS[stage]} is the limit, with {part} of the work"
    if stats.memory.overflowed > stats.batches / 10:
        pipe = "batches go through the pipe, so more shared_memory would help"
        return "transport", f"the consumer {waited}, and {pipe}"
    is_piped = stats.workers.executor == "process" and not stats.memory.slot_limit
    is_of_pipe = stage == "transport" or busy <= 0.6  # else the workers are at something else
    if workers and is_piped and is_of_pipe and stats.bytes > LARGE_BATCH * stats.batches:
        each = format_bytes(stats.bytes / stats.batches)
        pipe = f"batches of {each} go through a pipe: without shared_memory=False they would not"
        return "transport", f"the consumer {waited}, and {pipe}"
    if not workers:
        return stage, f"{limit}: the consumer {waited}; num_workers=1 makes batches meanwhile"
    if busy > 0.6 and times.work > LITTLE_WORK * stats.batches:
        who = "the worker was" if workers == 1 else f"all {workers} workers were"
        advice = _speed_up(stats, stage, total, more)
        return stage, f"{limit}: {who} busy {share(busy)}, the consumer {waited}; {advice}"
    return "", f"the consumer {waited}, but {idle}: {_keep_busy(stats, total, wait)}"


def _speed_up(stats: PlainStats, stage: str, total: float, more: bool) -> str:
    """Return the advice where the workers are the limit, most of all in one stage."""
    workers = stats.workers
    cpus = processors()
    is_asleep = workers.asleep > 0.5 * workers.measured
    may_wait = stage == "dataset" and (is_asleep or not workers.measured)
    also = ""
    if may_wait:
        also = ", or minloader.concurrent(dataset), which waits for several samples at once"
    if stage == "transport":
        return "make large arrays with collate or minloader.empty, and few small objects"
    if may_wait and workers.concurrency:
        limit = workers.concurrency
        return f"a larger limit of minloader.concurrent would help ({limit} now)"
    if workers.executor == "foreign":
        if workers.capacity < workers.count:
            return "more workers of the executor would help"
        return "more workers would help (num_workers), if the executor has them"
    if workers.executor == "thread" and has_gil():
        return (
            "they take turns by the interpreter's lock, so executor='process' would help, unless "
            "they wait for files or the network"
        )
    if is_asleep:
        advice = "more workers do not help"
        if more:
            advice = f"more workers help (num_workers){also}, unless it is a lock"
        asleep = share(workers.asleep, workers.measured)
        return f"{asleep} of the work was waiting for files, the network or a lock: {advice}"
    there_are = f"there are {cpus} processors" if cpus > 1 else "there is one processor"
    if workers.computing > BUSY * cpus * total:
        return f"make it cheaper: {there_are}, which it keeps busy{_others(cpus)}"
    if workers.queued > QUEUED * workers.measured:
        return _held_up(stats)
    if workers.count < cpus:
        if not more:
            return "other programs may have the processors"
        return f"more workers would help (num_workers){also}"
    waits = ""
    if more and not workers.measured:
        waits = f"; if it waits for files or the network, more workers help (num_workers){also}"
    return f"make it cheaper: {there_are}{waits}{_others(cpus)}"


def _keep_busy(stats: PlainStats, total: float, wait: float) -> str:
    """Return the advice where the consumer waits though the workers are idle.

    Args:
        stats: the figures.
        total: seconds of the loop, without those until workers were ready.
        wait: seconds of these in which the consumer waited.
    """
    each = total / stats.batches
    work = stats.time.work / stats.batches
    if each < LITTLE_TIME:
        return (
            f"a batch takes {format_seconds(each)}, little for what it costs to hand over, so "
            "larger batches would help (batch_size, or the sampler)"
        )
    if stats.time.unpacking > wait / 2:
        return (
            f"unpickling a batch takes {format_seconds(stats.time.unpacking / stats.batches)} in "
            "this process; have the dataset return arrays rather than many objects"
        )
    # Of what little the workers do it may be much, and yet nothing of what the consumer waits for.
    if stats.workers.queued > max(QUEUED * stats.workers.measured, 0.1 * wait):
        return _held_up(stats)
    if stats.errors.replaced:
        return (
            f"{counted(stats.errors.replaced, 'worker')} had to be replaced, which takes time, and "
            "so does waiting for one that hangs: the log says why (timeout, "
            "worker_memory_limit, or they died)"
        )
    if stats.workers.executor == "foreign" and each > 3 * work:
        return (
            f"a batch comes each {format_seconds(each)}, and {format_seconds(work)} of work are in "
            "it: to hand it over costs the rest, so larger batches would help (batch_size, or the "
            "sampler)"
        )
    if stats.slowest > max(3 * work, each):
        loosely = " or in_order=False" if stats.workers.in_order else ""
        return (
            f"some batches are slow ({format_seconds(stats.slowest)}, against "
            f"{format_seconds(work)} on average) and the others wait for them, so a larger "
            f"prefetch_factor{loosely} would help"
        )
    return "more tasks under way would help (prefetch_factor)"


def _held_up(stats: PlainStats) -> str:
    """Return the advice where workers wait for a processor."""
    cpus = processors()
    too_many = stats.workers.count > cpus
    who = "other workers, " * too_many + "the consumer or other programs"
    fewer = f": num_workers={cpus} would do" * too_many
    queued = share(stats.workers.queued, stats.workers.measured)
    waited = f"{queued} of the work was waiting for a processor, which {who} have{fewer}"
    return waited + _others(cpus)


def _others(cpus: int) -> str:
    """Say so where the machine has more processors than this process may use; "" if not."""
    all_of_them = os.cpu_count() or 1
    if all_of_them <= cpus:
        return ""
    return (
        f"; the machine has {all_of_them}, of which this process may use {cpus} (its CPU affinity, "
        "or the limit of its container or job)"
    )


def has_gil() -> bool:
    """Return whether threads of this process take turns in Python code."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def share(part: float, whole: float = 1.0) -> str:
    """Return a part of a whole in percent: "71 %"."""
    return f"{100 * part / whole if whole else 0.0:.0f} %"


def format_seconds(seconds: float) -> str:
    """Return a span of time in three digits: "20.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
