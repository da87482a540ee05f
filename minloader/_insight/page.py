"""Show stats: as text, as a table in a notebook, as a page in a browser.

The page is ``page.html``, a template that draws itself from one JSON object. Whatever comes from
the user (names, errors, arguments) is data in that object and never markup.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

from minloader._checks import amount, duration
from minloader._insight.verdict import share
from minloader._memory.limits import processors

if TYPE_CHECKING:
    from minloader._insight.counters import Stats

MANY = 4
"""Workers for each processor past which most of them wait for one, if they compute at all."""

Row = tuple[str, str, str]
"""A row of the table: name, value, remark."""


def text(stats: Stats) -> str:
    """Return the verdict and the table as plain text."""
    rows = table(stats)
    names, values = (max(len(row[n]) for row in rows) for n in (0, 1))
    lines = [f"{a:<{names}}  {b:>{values}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join([stats.verdict, "", *lines])


def page(stats: Stats) -> str:
    """Return the page of some stats, as one HTML file that needs no other."""
    return render(data(stats))


def render(data: dict[str, Any]) -> str:
    """Return the template with its data in place.

    Args:
        data: as :func:`data` returns it, and none of it trusted. A browser that runs no scripts
            shows the same as a notebook.
    """
    # "<" occurs within strings only, where JSON may write it so: no text can end the script.
    encoded = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    without_scripts = fragment(data["subtitle"], data["verdict"], data["rows"])
    parts = {"data": encoded, "fragment": without_scripts}
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
    kind = {"process": " processes", "thread": " threads"}.get(stats.executor, "")
    bottleneck, verdict = stats._judged

    def bar(label: str, seconds: dict[str, float], remark: str = "") -> dict[str, Any]:
        return {"label": label, "seconds": seconds, "remark": remark}

    left_out = f"the {duration(start)} until workers were ready left out" if start else ""
    idle = {"idle": running * max(workers, 1) - stats._work}
    made_by = f"{workers}{kind}" if workers else "none: in this process"
    return {
        "subtitle": f"{summary(stats)}, the first after {duration(stats.startup)}",
        "verdict": verdict,
        "bottleneck": bottleneck,
        "bars": [
            bar("consumer", {"wait": stats.wait - start, "own": stats.consumer}, left_out),
            bar("sampler", {"draw": stats.sampler, "idle": running - stats.sampler}),
            bar("workers", stats._stages | idle, made_by),
        ],
        "rows": table(stats),
        "events": [each._replace(start=each.start - stats._began) for each in stats.events],
    }


def fragment(subtitle: str, verdict: str, rows: Iterable[Row]) -> str:
    """Return the verdict and the table as HTML for a notebook, in whatever colours it has."""
    # Each cell carries its own style: notebooks drop style sheets, and have rules for tables.
    cell = "text-align: left; vertical-align: top; padding: .25em 1em .25em 0"
    lines = "\n".join(
        f'<tr><th scope="row" style="{cell}; font-weight: normal">{name}</th>'
        f'<td style="{cell}; font-variant-numeric: tabular-nums"><strong>{value}</strong></td>'
        f'<td style="{cell}; opacity: .8">{remark}</td></tr>'
        for name, value, remark in (map(_escape, row) for row in rows)
    )
    return f"""<div style="color: inherit">
<div style="opacity: .8">minloader: {_escape(subtitle)}</div>
<div style="font-size: 1.25em; font-weight: 600; margin: .2em 0 .5em; padding-left: .6em;
  border-left: .25em solid currentColor">{_escape(verdict)}</div>
<table style="border-collapse: collapse; width: auto; margin: 0"><tbody>
{lines}
</tbody></table></div>"""


def table(stats: Stats) -> list[Row]:
    """Return the figures: name, value, remark of each."""
    total, work, each = stats.seconds, stats._work, max(stats.batches, 1)
    rate = stats.batches / total if total else 0.0
    speed = f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"
    if stats.bytes:
        speed += f", {amount(stats.bytes)}, {amount(stats.bytes / total if total else 0)}/s"
    drawing = f"of the wait; {duration(stats.sampler / each)} a batch"
    rows = [
        ("batches", f"{stats.batches:,}", speed),
        ("consumer's own time", duration(stats.consumer), share(stats.consumer, total)),
        ("consumer waited", duration(stats.wait), share(stats.wait, total)),
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
    remarks = [f"busy {busy}"] if busy else []
    if stats.executor == "process" and stats.num_workers > MANY * processors():
        remarks.insert(0, f"more than {MANY} for each of {processors()} processors: try fewer")
    chunk = f"up to {stats.chunk_size} batches each" if stats.chunk_size > 1 else ""
    known = stats._measured
    if known:
        queued, asleep = share(stats.queued, known), share(stats.asleep, known)
        remark = f"of it; waited for a processor {queued}, for something else {asleep}"
        rows.append(
            ("computing", duration(stats.computing), f"{share(stats.computing, known)} {remark}")
        )
    times = stats._times().values()
    if times:
        middle = sorted(each[len(each) // 2] for each in times)[len(times) // 2]
        late = max(each[len(each) * 19 // 20] for each in times)
        remark = f"95 % within {duration(late)}, the slowest {duration(stats.slowest)}, lately"
        rows.append(("a batch", duration(middle), remark))
    if stats.memory:
        at_start = amount(sum(stats.memory_at_start.values()))
        grows = "".join(f"; {name} grows steadily" for name in stats.growth)
        remark = f"of the workers' own, {at_start} when they began{grows}"
        rows.append(("memory", amount(sum(stats.memory.values())), remark))
    rows += [
        ("workers", f"{stats.num_workers}", "; ".join(remarks)),
        ("tasks under way", f"{stats.in_flight}", chunk),
        ("shared memory", amount(stats.slot_bytes), f"{stats.slots} slots{at_most}"),
        ("through the pipe", f"{stats.overflowed}", "batches that found no room there"),
    ]
    failures = [
        ("retries", stats.retries, "batches whose worker died"),
        ("replaced", stats.replaced, "workers"),
        ("failed", stats.failed, "batches and samples: stats.errors has the last ones"),
        ("skipped", stats.skipped, "batches that failed"),
        ("left out", stats.skipped_samples, "samples"),
        ("read again", stats.reread, "batches of a stream, to get past what was delivered"),
    ]
    return rows + [(name, f"{count}", remark) for name, count, remark in failures if count]


def summary(stats: Stats) -> str:
    """Return how many batches there were in which time."""
    return f"{stats.batches:,} batches in {duration(stats.seconds)}"


def _escape(text: object) -> str:
    """Return text as HTML. What UTF-8 cannot encode, a lone surrogate, becomes a "?"."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))
