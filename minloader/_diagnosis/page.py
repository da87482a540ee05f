"""Show stats: as text, as a table in a notebook, as a page in a browser.

The page is ``page.html``, a template that draws itself from one JSON object. Whatever comes from
the user (names, errors, arguments) is data in that object and never markup.
"""

from __future__ import annotations

import html
import json
import re
import statistics
from importlib import resources
from typing import Any

from minloader._diagnosis.figures import PlainStats
from minloader._diagnosis.verdict import format_seconds, share
from minloader._formats import format_bytes

Row = tuple[str, str, str]
"""A row of the table: name, value, remark."""


def text(verdict: str, rows: list[Row]) -> str:
    """Return the verdict and the table as plain text."""
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines = [
        f"{name:<{name_width}}  {value:>{value_width}}  {remark}".rstrip()
        for name, value, remark in rows
    ]
    return "\n".join([verdict, "", *lines])


def fragment(verdict: str, rows: list[Row]) -> str:
    """Return the same as HTML for a notebook, in whatever colours it has."""
    shown = text(verdict, rows).encode("utf-8", "replace").decode("utf-8")  # a lone surrogate: "?"
    return f"<pre style='white-space: pre-wrap'>{html.escape(shown)}</pre>"


def render(data: dict[str, Any]) -> str:
    """Return the template with its data in place, as one HTML file that needs no other.

    Args:
        data: as :func:`data` returns it, and none of it trusted. A browser that runs no scripts
            shows the same as a notebook.
    """
    # "<" occurs within strings only, where JSON may write it so: no text can end the script.
    encoded = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    parts = {"data": encoded, "fragment": fragment(data["verdict"], data["rows"])}
    file = resources.files("minloader._diagnosis").joinpath("page.html")
    # In one go, so that what looks like a placeholder in the data stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], file.read_text(encoding="utf-8"))


def data(stats: PlainStats, bottleneck: str, verdict: str) -> dict[str, Any]:
    """Return what the page shows, for JSON.

    Args:
        stats: the figures.
        bottleneck: of :class:`minloader.Stats`.
        verdict: likewise.

    Returns:
        "subtitle" and "verdict" are sentences. "bottleneck" is the kind of span that the verdict
        is about, or "". "bars" has a label, a remark and the seconds of each kind of span for
        the consumer, the sampler and all workers together. "rows" is the table. "events" is the
        timeline: track, name, start in seconds since the first epoch began, seconds, arguments.
    """
    times = stats.time
    workers = stats.workers.count
    start = stats.starting
    running = stats.seconds - start
    consumer = {
        "label": "consumer",
        "seconds": {"wait": times.wait - start, "own": times.consumer},
        "remark": f"the {format_seconds(start)} until workers were ready left out" if start else "",
    }
    sampler = {
        "label": "sampler",
        "seconds": {"draw": times.sampler, "idle": running - times.sampler},
        "remark": "",
    }
    made_by = {
        "label": "workers",
        "seconds": times.stages | {"idle": running * max(workers, 1) - times.work},
        "remark": f"{workers}" if workers else "none: in this process",
    }
    began = stats.timeline.began
    return {
        "subtitle": (
            f"{stats.batches:,} batches in {format_seconds(stats.seconds)}, the first after "
            f"{format_seconds(times.startup)}"
        ),
        "verdict": verdict,
        "bottleneck": bottleneck,
        "bars": [consumer, sampler, made_by],
        "rows": table(stats),
        "events": [each._replace(start=each.start - began) for each in stats.events],
    }


def table(stats: PlainStats) -> list[Row]:
    """Return the figures: name, value, remark of each."""
    return [
        *_loop_rows(stats),
        *_stage_rows(stats),
        *_memory_rows(stats),
        *_worker_rows(stats),
        *_error_rows(stats),
    ]


def _loop_rows(stats: PlainStats) -> list[Row]:
    """Return the rows about the consumer's loop."""
    times = stats.time
    start = stats.starting
    running = stats.seconds - start
    rate = stats.batches / stats.seconds if stats.seconds else 0.0
    speed = f"{rate:,.{0 if rate >= 100 else 1}f}/s"
    each = max(stats.batches, 1)
    if stats.bytes:
        speed += f", {format_bytes(stats.bytes)}, {format_bytes(stats.bytes_per_second)}/s"
    waited = share(times.wait - start, running)
    if start:
        waited += f", without the {format_seconds(start)} until workers were ready"
    drawing = f"of the wait; {format_seconds(times.sampler / each)} a batch"
    return [
        ("batches", f"{stats.batches:,}", speed),
        ("consumer's own time", format_seconds(times.consumer), share(times.consumer, running)),
        ("consumer waited", format_seconds(times.wait), waited),
        ("until the first batch", format_seconds(times.startup), "of the wait"),
        ("sampler", format_seconds(times.sampler), drawing),
    ]


def _stage_rows(stats: PlainStats) -> list[Row]:
    """Return the rows about what the workers did in their time."""
    times = stats.time
    workers = stats.workers
    rows = []
    for name, seconds in times.stages.items():
        a_batch = format_seconds(seconds / max(stats.batches, 1))
        remark = f"{share(seconds, times.work)} of the workers' time; {a_batch} a batch"
        if name == "transport":
            remark += f"; and {format_seconds(times.unpacking)} here"
        rows.append((name, format_seconds(seconds), remark))
    if workers.measured:
        computed = share(workers.computing, workers.measured)
        queued = share(workers.queued, workers.measured)
        asleep = share(workers.asleep, workers.measured)
        remark = f"{computed} of it; waited for a processor {queued}, for something else {asleep}"
        rows.append(("computing", format_seconds(workers.computing), remark))
    medians = stats.median.values()
    if medians:
        late = format_seconds(max(stats.p95.values()))
        remark = f"95 % within {late}, the slowest {format_seconds(stats.slowest)}, lately"
        rows.append(("a batch", format_seconds(statistics.median(medians)), remark))
    return rows


def _memory_rows(stats: PlainStats) -> list[Row]:
    """Return the rows about the memory that workers have for themselves."""
    memory = stats.memory
    rows = []
    if memory.workers:
        remark = (
            f"of the workers' own, {format_bytes(sum(memory.at_start.values()))} when they began"
        )
        remark += "".join(f"; {name} grows steadily" for name in memory.growth)
        rows.append(("memory", format_bytes(sum(memory.workers.values())), remark))
    if memory.jumps:
        jump = max(memory.jumps, key=lambda each: each.bytes)
        remark = f"{jump.worker}, at {jump.item} (batch {jump.batch} of epoch {jump.epoch})"
        rows.append(("grew at once", format_bytes(jump.bytes), remark))
    return rows


def _worker_rows(stats: PlainStats) -> list[Row]:
    """Return the rows about what is so now: workers, tasks, shared memory."""
    workers = stats.workers
    memory = stats.memory
    busy = ", ".join(f"{name}: {part:.0%}" for name, part in stats.busy.items())
    chunk = f"up to {workers.chunk_size} batches each" if workers.chunk_size > 1 else ""
    slots = f"{memory.slots} slots"
    if memory.slot_limit:
        slots += f", {format_bytes(memory.slot_limit)} at most"
    return [
        ("workers", f"{workers.count}", busy and f"busy {busy}"),
        ("tasks under way", f"{workers.in_flight}", chunk),
        ("shared memory", format_bytes(memory.slot_bytes), slots),
        ("through the pipe", f"{memory.overflowed}", "batches that found no room there"),
    ]


def _error_rows(stats: PlainStats) -> list[Row]:
    """Return the rows about what went wrong, where something did."""
    errors = stats.errors
    rows = [
        ("retries", errors.retries, "batches whose worker died or hung"),
        ("replaced", errors.replaced, "workers"),
        ("failed", errors.failed, "batches and samples: stats.errors.last has the last ones"),
        ("skipped", errors.skipped, "batches that failed"),
        ("left out", errors.skipped_samples, "samples"),
        ("read again", errors.reread, "batches of a stream, to get past what was delivered"),
    ]
    return [(name, f"{count}", remark) for name, count, remark in rows if count]
