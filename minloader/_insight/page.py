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
from typing import TYPE_CHECKING, Any

from minloader._checks import amount, duration
from minloader._insight.verdict import share

if TYPE_CHECKING:
    from minloader._insight.counters import Stats

Row = tuple[str, str, str]
"""A row of the table: name, value, remark."""


def text(verdict: str, rows: list[Row]) -> str:
    """Return the verdict and the table as plain text."""
    names, values = (max(len(row[n]) for row in rows) for n in (0, 1))
    lines = [f"{a:<{names}}  {b:>{values}}  {c}".rstrip() for a, b, c in rows]
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
    file = resources.files("minloader._insight").joinpath("page.html")
    # In one go, so that what looks like a placeholder in the data stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], file.read_text(encoding="utf-8"))


def data(stats: Stats) -> dict[str, Any]:
    """Return what the page shows, for JSON.

    Returns:
        "subtitle" and "verdict" are sentences. "bottleneck" is the kind of span that the verdict
        is about, or "". "bars" has a label, a remark and the seconds of each kind of span for
        the consumer, the sampler and all workers together. "rows" is the table. "events" is the
        timeline: track, name, start in seconds since the first epoch began, seconds, arguments.
    """
    start, workers = stats._starting, stats.num_workers
    running = stats.seconds - start
    bottleneck = stats._judged[0]
    left_out = f"the {duration(start)} until workers were ready left out" if start else ""
    idle = {"idle": running * max(workers, 1) - stats._work}
    made_by = f"{workers}" if workers else "none: in this process"
    bars = [
        ("consumer", {"wait": stats.wait - start, "own": stats.consumer}, left_out),
        ("sampler", {"draw": stats.sampler, "idle": running - stats.sampler}, ""),
        ("workers", stats._stages | idle, made_by),
    ]
    return {
        "subtitle": (
            f"{stats.batches:,} batches in {duration(stats.seconds)}, the first after "
            f"{duration(stats.startup)}"
        ),
        "verdict": stats.verdict,
        "bottleneck": bottleneck,
        "bars": [dict(zip(("label", "seconds", "remark"), bar, strict=True)) for bar in bars],
        "rows": table(stats),
        "events": [each._replace(start=each.start - stats._began) for each in stats.events],
    }


def table(stats: Stats) -> list[Row]:
    """Return the figures: name, value, remark of each."""
    total, work, each = stats.seconds, stats._work, max(stats.batches, 1)
    start = stats._starting
    running = total - start
    left_out = f", without the {duration(start)} until workers were ready" if start else ""
    rate = stats.batches / total if total else 0.0
    size = f", {amount(stats.bytes)}, {amount(rate * stats.bytes / each)}/s" if stats.bytes else ""
    drawing = f"of the wait; {duration(stats.sampler / each)} a batch"
    rows = [
        ("batches", f"{stats.batches:,}", f"{rate:,.{0 if rate >= 100 else 1}f}/s{size}"),
        ("consumer's own time", duration(stats.consumer), share(stats.consumer, running)),
        ("consumer waited", duration(stats.wait), share(stats.wait - start, running) + left_out),
        ("until the first batch", duration(stats.startup), "of the wait"),
        ("sampler", duration(stats.sampler), drawing),
    ]
    for name, seconds in stats._stages.items():
        a_batch = f"{duration(seconds / each)} a batch"
        here = f"; and {duration(stats.unpacking)} here" if name == "transport" else ""
        remark = f"{share(seconds, work)} of the workers' time; {a_batch}{here}"
        rows.append((name, duration(seconds), remark))
    busy = ", ".join(f"{name}: {part:.0%}" for name, part in stats.busy.items())
    at_most = f", {amount(stats.slot_limit)} at most" if stats.slot_limit else ""
    chunk = f"up to {stats.chunk_size} batches each" if stats.chunk_size > 1 else ""
    known = stats._measured
    if known:
        computed, queued, asleep = (
            share(part, known) for part in (stats.computing, stats.queued, stats.asleep)
        )
        remark = f"{computed} of it; waited for a processor {queued}, for something else {asleep}"
        rows.append(("computing", duration(stats.computing), remark))
    if median := stats.median.values():
        late, slowest = duration(max(stats.p95.values())), duration(stats.slowest)
        remark = f"95 % within {late}, the slowest {slowest}, lately"
        rows.append(("a batch", duration(statistics.median(median)), remark))
    if stats.memory:
        at_start = amount(sum(stats.memory_at_start.values()))
        grows = "".join(f"; {name} grows steadily" for name in stats.growth)
        remark = f"of the workers' own, {at_start} when they began{grows}"
        rows.append(("memory", amount(sum(stats.memory.values())), remark))
    if stats.jumps:
        jump = max(stats.jumps, key=lambda each: each.bytes)
        made_of = f"at {jump.item} (batch {jump.batch} of epoch {jump.epoch})"
        rows.append(("grew at once", amount(jump.bytes), f"{jump.worker}, {made_of}"))
    rows += [
        ("workers", f"{stats.num_workers}", busy and f"busy {busy}"),
        ("tasks under way", f"{stats.in_flight}", chunk),
        ("shared memory", amount(stats.slot_bytes), f"{stats.slots} slots{at_most}"),
        ("through the pipe", f"{stats.overflowed}", "batches that found no room there"),
    ]
    failures = [
        ("retries", stats.retries, "batches whose worker died or hung"),
        ("replaced", stats.replaced, "workers"),
        ("failed", stats.failed, "batches and samples: stats.errors has the last ones"),
        ("skipped", stats.skipped, "batches that failed"),
        ("left out", stats.skipped_samples, "samples"),
        ("read again", stats.reread, "batches of a stream, to get past what was delivered"),
    ]
    return rows + [(name, f"{count}", remark) for name, count, remark in failures if count]
