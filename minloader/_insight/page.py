"""What ``Stats`` shows in a browser and in a notebook: HTML from plain data.

The page is one file without scripts or fonts from elsewhere, and right without JavaScript, which
only adds zooming. It has one visual language: solid is work, hatched is waiting, so that the one
track that is solid all along is the bottleneck, in colour or not.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from minloader._checks import duration


class Event(Protocol):
    """What the timeline is made of; :class:`minloader.stats.Event` is such."""

    @property
    def track(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


class Part(NamedTuple):
    """A part of a bar: what took how many seconds; "wait" and "idle" are drawn as waiting."""

    kind: str
    seconds: float


class Bar(NamedTuple):
    """Where the time of one track, or of all workers together, went.

    Attributes:
        label: whose time, such as "workers".
        parts: in the order in which they are drawn; together the whole bar.
        remark: a few words, such as "4 processes".
    """

    label: str
    parts: Sequence[Part]
    remark: str = ""


Rows = Iterable[tuple[str, str, str]]

"""Name, value, remark."""


WORDS = {
    "own": "its own work",
    "wait": "waiting",
    "draw": "drawing items",
    "dataset": "dataset",
    "transform": "transform",
    "collate": "collate",
    "transport": "transport",
    "task": "other",
    "idle": "idle",
}

"""The kinds of spans and parts, in the order of the legend. Another kind looks like "task"."""


MARKS = {"died": "\u2715 died", "again": "\u21bb again", "failed": "! failed"}

PERIOD = 90

"""Pixels from one task of a worker to its next. Less: batches cannot be told apart; more: fewer of
them in one view."""


SHORTEST, WIDEST = 600, 16_000

"""Least and most pixels of the timeline; what was before is left out. Browsers draw huge ones
slowly."""


NARROWEST = 0.5

"""Pixels: neighbours that take less are drawn as one. Less: slower, and nothing more to see."""


LANE, AXIS, GLYPH, TICK = 38, 24, 6.6, 100

"""Pixels: height of a track, and of the axis; width of a digit; least from tick to tick."""


LISTED = 12

"""Most deaths and repetitions that are also told in words."""


def _escape(text: object) -> str:
    """Any text as HTML; what cannot be encoded (a lone surrogate) becomes a question mark."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def _share(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{share:.0%}".replace("%", " %")


def _class(kind: str) -> str:
    return kind if kind in WORDS else "task"


def _table(rows: Rows) -> str:
    """The cells carry their own style: in a notebook there is no other."""
    cell = "text-align: left; vertical-align: top; padding: .25em 1em .25em 0;"
    number = cell + " font-variant-numeric: tabular-nums;"
    lines = [
        f'<tr><th scope="row" style="{cell} font-weight: normal">{_escape(name)}</th>'
        f'<td style="{number}"><strong>{_escape(value)}</strong></td>'
        f'<td style="{cell} opacity: .8">{_escape(remark)}</td></tr>'
        for name, value, remark in rows
    ]
    return (
        '<table style="border-collapse: collapse; width: auto; margin: 0"><tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table>"
    )


def table_html(title: str, verdict: str, rows: Rows) -> str:
    """A fragment for notebooks, in whatever colours these have.

    Args:
        title: what this is about.
        verdict: one sentence.
        rows: (name, value, remark) each.
    """
    return (
        f'<div style="color: inherit"><div style="opacity: .8">{_escape(title)}</div>\n'
        f'<div style="font-size: 1.25em; font-weight: 600; margin: .2em 0 .5em; '
        f'padding-left: .6em; border-left: .25em solid currentColor">{_escape(verdict)}</div>\n'
        f"{_table(rows)}</div>"
    )


def _bar(bar: Bar, bottleneck: str) -> str:
    parts = [part for part in bar.parts if part.seconds > 0]
    whole = math.fsum(part.seconds for part in parts)
    pieces, words = [], []
    for kind, seconds in parts:
        told = f"{_escape(WORDS.get(kind, kind))} {_share(seconds, whole)}"
        took = duration(seconds)
        pieces.append(
            f'<span class="{_class(kind)}" style="width: {100 * seconds / whole:.3f}%"'
            f' title="{told}, {took}"></span>'
        )
        told = f"<strong>{told}</strong>" if kind == bottleneck else told
        words.append(
            f'<li><i class="key {_class(kind)}"></i>{told} <span class="dim">{took}</span></li>'
        )
    guilty = any(part.kind == bottleneck for part in parts)
    marked, pill = " guilty" * guilty, " <em>bottleneck</em>" * guilty
    remark = f'<span class="dim">{_escape(bar.remark)}</span>'
    return (
        f'<div class="row{marked}">'
        f'<div class="head"><b>{_escape(bar.label)}</b>{pill}{remark}</div>\n'
        f'<div class="bar">{"".join(pieces)}</div>\n<ul class="keys">{"".join(words)}</ul></div>\n'
    )


class _Cell(NamedTuple):
    kind: str
    start: float
    end: float
    title: str
    label: str = ""


def _told(args: Mapping[str, Any]) -> str:
    """What an event has to say in words: "batches 12 to 15, epoch 0"."""
    rest = [
        str(value) if key == "cause" else f"{key} {value}"
        for key, value in args.items()
        if key not in ("batch", "count")
    ]
    if "batch" not in args:
        return ", ".join(rest)
    first, count = args["batch"], args.get("count", 1)
    batches = f"batch {first}" if count == 1 else f"batches {first} to {first + count - 1}"
    return ", ".join([batches, *rest])


def _layers(events: list[Event], origin: float) -> Iterator[list[_Cell]]:
    """What is drawn of one track, the lowest first: its tasks, then what is inside of these."""
    below: list[_Cell] = []
    above: list[_Cell] = []
    task: Mapping[str, Any] = {}
    for event in events:
        is_task = event.name == "task"
        task = event.args if is_task else task
        name = "task" if is_task else WORDS.get(event.name, event.name)
        lines = [f"{name} {duration(event.seconds)}", _told(event.args or task)]
        lines.append(f"{event.track}, at {duration(event.start - origin)}")
        title = "\n".join(filter(None, lines))
        label = str(event.args.get("batch", ""))
        cell = _Cell(event.name, event.start, event.start + event.seconds, title, label)
        (below if is_task else above).append(cell)
    if any(cell.kind == "wait" for cell in above):  # what the consumer does when it does not wait
        for before, after in list(pairwise(above)):
            took = after.start - before.end
            if took > 0:
                title = f"its own work {duration(took)}"
                above.append(_Cell("own", before.end, after.start, title))
        above.sort(key=lambda cell: cell.start)
    yield below
    yield above


def _merged(cells: Iterable[_Cell], least: float) -> Iterator[_Cell]:
    """Neighbours too narrow to be seen become one, of the kind that took longest."""
    crowd: list[_Cell] = []
    for cell in cells:
        if crowd and cell.end - crowd[0].start > least:
            yield _joined(crowd)
            crowd = []
        crowd.append(cell)
    if crowd:
        yield _joined(crowd)


def _joined(crowd: list[_Cell]) -> _Cell:
    if len(crowd) == 1:
        return crowd[0]
    took: dict[str, float] = {}
    for cell in crowd:
        took[cell.kind] = took.get(cell.kind, 0.0) + cell.end - cell.start
    title = "\n".join(f"{WORDS.get(kind, kind)} {duration(took[kind])}" for kind in took)
    kind = max(took, key=lambda kind: took[kind])
    title = f"{len(crowd)} spans:\n{title}"
    return _Cell(kind, crowd[0].start, max(cell.end for cell in crowd), title, crowd[0].label)


def _is_instant(event: Event) -> bool:
    return event.seconds == 0 and event.name not in WORDS


def _tracks(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Events by track, in the order in which they are read: consumer, sampler, workers."""
    tracks: dict[str, list[Event]] = {}
    for event in events:
        tracks.setdefault(event.track, []).append(event)

    def place(track: str) -> tuple[int, int, str]:
        number = track.rpartition(" ")[2]
        first = {"consumer": 0, "sampler": 1}.get(track, 2)
        return first, int(number) if number.isdecimal() else 0, track

    return {
        track: sorted(tracks[track], key=lambda event: (event.start, -event.seconds))
        for track in sorted(tracks, key=place)
    }


def _period(tracks: Mapping[str, list[Event]]) -> float:
    """Seconds from one task of a worker to its next, typically; without workers, of all spans."""
    spans = [[e for e in events if not _is_instant(e)] for events in tracks.values()]
    tasks = [[e for e in events if e.name == "task"] for events in spans]
    for found in (tasks, spans):
        steps = [b.start - a.start for track in found for a, b in pairwise(track)]
        steps = sorted(step for step in steps if step > 0)
        if steps:
            return steps[len(steps) // 2]
    return 0.0


class _Axis:
    """Where on the drawing a moment is. Positions are percentages, so that it can be stretched."""

    def __init__(self, tracks: Mapping[str, list[Event]], origin: float) -> None:
        first = min(events[0].start for events in tracks.values())
        self.origin = origin
        self.end = max(e.start + e.seconds for events in tracks.values() for e in events)
        period = max(_period(tracks) or self.end - first, 1e-6)  # the clock sees no less
        self.begin = max(first, self.end - period * WIDEST / PERIOD)
        self.seconds = max(self.end - self.begin, 1e-6)
        self.width = min(max(SHORTEST, round(self.seconds / period * PERIOD)), WIDEST)
        self.cut = self.begin > first

    def x(self, moment: float) -> str:
        return f"{100 * (max(moment, self.begin) - self.begin) / self.seconds:.4f}%"

    def told(self, event: Event) -> str:
        return f"{event.start - self.origin:,.3f} s"

    def px(self, moment: float) -> float:
        return (moment - self.begin) / self.seconds * self.width

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Moments and their labels, at round numbers of seconds since the origin."""
        least = TICK * self.seconds / self.width
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999)
        unit, size = ("s", 1.0) if self.end - self.origin >= 1 else ("ms", 1e-3)
        digits = max(0, -math.floor(math.log10(step / size) + 1e-9))
        first = math.ceil((self.begin - self.origin) / step - 1e-9)
        for n in range(first, math.floor((self.end - self.origin) / step + 1e-9) + 1):
            yield self.origin + n * step, f"{n * step / size:,.{digits}f} {unit}"


def _rect(cell: _Cell, y: int, axis: _Axis) -> str:
    start = max(cell.start, axis.begin)
    wide = " wide" * (axis.px(cell.end) - axis.px(start) >= 4)
    return (
        f'<rect class="{_class(cell.kind)}{wide}" x="{axis.x(start)}" y="{y}"'
        f' width="{100 * (cell.end - start) / axis.seconds:.4f}%" height="20">'
        f"<title>{_escape(cell.title)}</title></rect>"
    )


def _mark(event: Event, y: int, axis: _Axis, anchor: str, word: str) -> str:
    x, top = axis.x(event.start), y - 14 if word else y - 1  # not through the word of another
    title = "\n".join([event.name, _told(event.args), f"{event.track}, at {axis.told(event)}"])
    return (
        f'<g class="mark" id="{anchor}"><line x1="{x}" x2="{x}" y1="{top}" y2="{y + 23}"/>'
        f'<text x="{x}" dx="4" y="{y - 4}">{_escape(word)}</text>'
        f"<title>{_escape(title)}</title></g>"
    )


def _has_room(taken: list[tuple[float, float]], start: float, text: str) -> bool:
    """Whether a text overlaps none of those there already; then it is there too."""
    end = start + GLYPH * len(text) + 8
    place = bisect.bisect(taken, (start, end))
    if (place and taken[place - 1][1] > start) or (place < len(taken) and taken[place][0] < end):
        return False
    taken.insert(place, (start, end))
    return True


def _drawn_lane(events: list[Event], top: int, axis: _Axis, anchors: Mapping[int, str]) -> str:
    """One track: waiting, on it the spans, and above these the marks and the numbers of batches."""
    y = top + 16
    spans = [event for event in events if not _is_instant(event)]
    out, cells = [], []
    if not any(event.name == "wait" for event in spans):
        cells.append(_Cell("idle", events[0].start, axis.end, f"{events[0].track}: idle"))
    for layer in _layers(spans, axis.origin):
        seen = (cell for cell in layer if cell.end > axis.begin)
        cells += _merged(seen, NARROWEST * axis.seconds / axis.width)
    out += [_rect(cell, y, axis) for cell in cells]
    taken = [(float(axis.width), math.inf)]  # from and to, in pixels
    for event in events:
        if id(event) in anchors:
            word = MARKS.get(event.name, event.name)
            if not _has_room(taken, axis.px(event.start), word):
                word = ""
            out.append(_mark(event, y, axis, anchors[id(event)], word))
    for cell in cells:
        at = axis.px(cell.start)
        if cell.label and at >= 0 and _has_room(taken, at, cell.label):
            x = axis.x(cell.start)
            out.append(f'<text class="number" x="{x}" y="{y - 4}">{_escape(cell.label)}</text>')
    return "\n".join(out)


def _ticks(axis: _Axis, height: int) -> str:
    out = []
    for moment, label in axis.ticks():
        x = axis.x(moment)
        if axis.px(moment) > axis.width - 60:
            label = ""  # cut off, it would tell another time
        out.append(
            f'<g class="tick"><line x1="{x}" x2="{x}" y1="0" y2="{height}"/>'
            f'<text x="{x}" dx="4" y="12">{label}</text></g>'
        )
    return "\n".join(out)


def _timeline(events: Iterable[Event], origin: float | None) -> str:
    tracks = _tracks(events)
    if not tracks:
        return '<p class="dim">No events were recorded.</p>'
    axis = _Axis(tracks, min(e[0].start for e in tracks.values()) if origin is None else origin)
    instants = [e for track in tracks.values() for e in track if _is_instant(e)]
    instants.sort(key=lambda event: event.start)
    anchors = {id(e): f"mark{n}" for n, e in enumerate(instants) if e.start >= axis.begin}
    height = AXIS + LANE * len(tracks)
    drawing = "\n".join(
        _drawn_lane(track, AXIS + LANE * n, axis, anchors)
        for n, track in enumerate(tracks.values())
    )
    names = "".join(f'<div title="{_escape(n)}">{_escape(n)}</div>' for n in tracks)
    kinds = {_class(e.name) for track in tracks.values() for e in track if not _is_instant(e)}
    kinds |= {"own"} if "wait" in kinds else set()
    kinds -= {"wait", "task"} if "dataset" in kinds else {"wait"}  # it covers the task below
    kinds |= {"idle"}
    keys = "".join(
        f'<li><i class="key {kind}"></i>{"waiting" if kind == "idle" else WORDS[kind]}</li>'
        for kind in WORDS
        if kind in kinds
    )
    start = "the first event kept" if origin is None else "the start"
    reach = f"{'The last' if axis.cut else 'All'} {duration(axis.seconds)}"
    return (
        f'<p class="dim">{reach}, the newest at the right: scroll for the rest. The clock'
        f" counts from {start}; the number above a span is its first batch.</p>\n"
        f'<ul class="keys">{keys}</ul>\n'
        '<p class="zoom" hidden><button type="button">\u2212</button>'
        '<button type="button">+</button><button type="button">all</button></p>\n'
        f'<div class="tracks"><div class="names">{names}</div>'
        '<div class="scroll" tabindex="0" role="region" aria-label="timeline"><div class="inner">'
        f'<svg role="img" aria-label="timeline" height="{height}" data-width="{axis.width}"'
        f' style="width: {axis.width}px">\n{_HATCH}{_ticks(axis, height)}\n{drawing}\n</svg>'
        f"</div></div></div>\n{_marks_in_words(instants, anchors, axis)}"
    )


def _marks_in_words(instants: list[Event], anchors: Mapping[int, str], axis: _Axis) -> str:
    lines = []
    for event in instants[-LISTED:]:
        what = f"{_escape(event.track)} {_escape(MARKS.get(event.name, event.name))}"
        if id(event) in anchors:
            what = f'<a href="#{anchors[id(event)]}">{what}</a>'
        about = f": {_told(event.args)}" if event.args else ""
        lines.append(f"<li>{what} at {axis.told(event)}{_escape(about)}</li>")
    if len(instants) > LISTED:
        lines.insert(0, f"<li>{len(instants) - LISTED} more before</li>")
    return f'<ul class="marks">{"".join(lines)}</ul>\n' if lines else ""


def page(
    verdict: str,
    bars: Iterable[Bar],
    rows: Rows,
    events: Iterable[Event],
    *,
    bottleneck: str = "",
    subtitle: str = "",
    origin: float | None = None,
) -> str:
    """A whole page, for a file of its own.

    Args:
        verdict: what limits the loop and what to do. The headline is all before its first colon.
        bars: where the time of the consumer, the sampler and the workers went.
        rows: (name, value, remark) each, for the table at the end.
        events: for the timeline; in any order. Of more than some thousand the last are drawn.
        bottleneck: kind of the part that the verdict is about, such as "dataset", or "" if there
            is none; the headline has its colour, and its bar is marked.
        subtitle: what the run was, such as "1,000 batches in 12 s by 4 workers".
        origin: where the timeline's clock starts, in seconds of ``time.perf_counter()``; the
            first event if None.
    """
    headline, advice = (
        _escape(text[:1].upper() + text[1:]) for text in verdict.partition(": ")[::2]
    )
    kind = f" {_class(bottleneck)}" * bool(bottleneck)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>minloader: {headline}</title>
<style>{_style()}</style>
</head>
<body>
<main>
<header>
<p class="dim">minloader{_escape(f": {subtitle}" if subtitle else "")}</p>
<h1><i class="edge{kind}"></i><span>{headline}</span></h1>
<p class="verdict">{advice}</p>
</header>
<section>
<h2>Where the time went <small><i class="key task"></i>solid: at work
<i class="key idle"></i>hatched: waiting</small></h2>
{"".join(_bar(bar, bottleneck) for bar in bars)}</section>
<section>
<h2>Timeline</h2>
{_timeline(events, origin)}
</section>
<section>
<h2>Figures</h2>
{_table(rows)}
</section>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


_COLOURS = {  # in light and in dark; after Okabe and Ito, darker or lighter for contrast
    "own": ("#0072b2", "#4aa3e6"),
    "draw": ("#aa4499", "#d985c9"),
    "dataset": ("#d55e00", "#f28142"),
    "transform": ("#b98200", "#f0b82e"),
    "collate": ("#009e73", "#2fc497"),
    "transport": ("#2f96d0", "#7dccf7"),
    "task": ("#868b95", "#8d939d"),
}

_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><rect class="pale" width="6" height="6"/>'
    '<rect class="stripe" width="2" height="6"/></pattern></defs>\n'
)

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1600px; margin: 0 auto; padding: 1.2rem clamp(.9rem, 3vw, 2.5rem) 3rem; }
p { margin: .3rem 0; }
h1 { display: flex; gap: .8rem; margin: .3rem 0 .6rem; line-height: 1.2;
  font-size: clamp(1.45rem, 1rem + 2vw, 2.3rem); overflow-wrap: anywhere; }
.edge { flex: none; width: .55rem; border-radius: 3px; background: var(--line); }
.verdict { font-size: 1.15rem; max-width: 60rem; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .6rem; }
h2 small { font-weight: normal; color: var(--dim); white-space: nowrap; margin-left: .6rem; }
.dim { color: var(--dim); }
.row { padding: .5rem .8rem .6rem; margin: 0 -.8rem .3rem; border-radius: 6px; }
.guilty { background: var(--raised); box-shadow: inset 0 0 0 1px var(--line); }
.head { display: flex; flex-wrap: wrap; gap: 0 .6rem; align-items: baseline; }
.head em { font-style: normal; font-size: .8rem; font-weight: 600; padding: 0 .5rem;
  border-radius: 9px; color: var(--page); background: var(--text); }
.bar { display: flex; height: 26px; margin: .25rem 0; border-radius: 4px; overflow: hidden;
  background: var(--pale); }
.bar span + span { border-left: 1px solid var(--page); }
.keys, .marks { list-style: none; margin: 0; padding: 0; }
.keys { display: flex; flex-wrap: wrap; gap: .1rem 1.3rem; }
.key { display: inline-block; width: .85em; height: .85em; margin-right: .4em; border-radius: 2px;
  vertical-align: -.08em; }
.idle, .wait { background: repeating-linear-gradient(-45deg,
  var(--stripe) 0 2px, var(--pale) 2px 6px); fill: url(#hatch); }
.pale { fill: var(--pale); }
.stripe { fill: var(--stripe); }
.zoom button { font: inherit; min-width: 2.4rem; margin-right: .3rem; color: inherit;
  background: var(--raised); border: 1px solid var(--line); border-radius: 4px; }
.tracks { display: flex; margin: .6rem 0; }
.names { flex: none; max-width: 9rem; padding: 24px .7rem 0 0; }
.names div { height: 38px; padding-top: 16px; line-height: 20px; overflow: hidden;
  white-space: nowrap; text-overflow: ellipsis; }
.scroll { flex: 1; min-width: 0; overflow-x: auto; direction: rtl; scroll-padding-left: 8rem; }
.inner { direction: ltr; width: max-content; min-width: 100%; padding-right: 2px; }
.more { mask-image: linear-gradient(to right, transparent, #000 1.6rem); }
svg { display: block; min-width: 100%; overflow: visible; font-size: 11px; }
svg text { fill: var(--dim); }
.tick line { stroke: var(--line); }
.wide { stroke: var(--page); }
.mark line { stroke: var(--alarm); stroke-width: 2; }
.mark text { fill: var(--alarm); font-weight: 600; }
.mark:target line { stroke-width: 5; }
.far .number, .far .mark text { display: none; }
.far .wide { stroke: none; }
a { color: inherit; }
.marks { color: var(--alarm); }
@media (max-width: 600px) {
  tr { display: grid; grid-template-columns: 9rem 1fr; padding: .2rem 0; }
  td:last-child { grid-column: 1 / -1; padding-top: 0 !important; }
  h2 small { display: block; margin: 0; } }
@media print { * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .scroll { overflow: hidden; } .zoom { display: none; } }
"""

_SCRIPT = """
for (const scroll of document.querySelectorAll(".scroll")) {
  const svg = scroll.querySelector("svg"), base = +svg.dataset.width;
  const buttons = scroll.parentNode.previousElementSibling;
  const ticks = [...svg.querySelectorAll(".tick")];
  const all = () => scroll.clientWidth / base;
  let zoom = Math.max(1, all());
  function set(wanted, at) {
    const point = (scroll.scrollLeft + at) / svg.clientWidth;
    zoom = Math.min(8, Math.max(wanted, all()));
    svg.style.width = base * zoom + "px";
    svg.classList.toggle("far", zoom < 0.9);
    const apart = svg.clientWidth / base;
    const every = [1, 2, 5, 10, 20, 50, 100, 200].find(n => n * apart >= 0.9) || 1e9;
    ticks.forEach((tick, n) => tick.style.display =
      n % every || svg.clientWidth - tick.getBBox().x < 60 ? "none" : "");
    scroll.scrollLeft = point * svg.clientWidth - at;
  }
  scroll.onscroll = () => scroll.classList.toggle("more", scroll.scrollLeft > 4);
  scroll.style.direction = "ltr";
  scroll.scrollLeft = scroll.scrollWidth;
  buttons.hidden = false;
  [0.5, 2, 0].forEach((factor, n) => buttons.children[n].onclick = () =>
    set(zoom * factor, scroll.clientWidth));
  scroll.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(zoom * (event.deltaY < 0 ? 1.25 : 0.8), event.clientX - scroll.getBoundingClientRect().x);
  }, { passive: false });
  scroll.addEventListener("pointermove", event => {
    if (event.buttons == 1 && event.pointerType == "mouse") scroll.scrollLeft -= event.movementX;
  });
}
"""


def _style() -> str:
    """The style sheet, with the colours of either theme as variables."""
    themes = []
    for n in (0, 1):
        named = {
            "page": ("#ffffff", "#15171b"),
            "raised": ("#f4f5f7", "#1f2228"),
            "text": ("#1b1e23", "#e9ebee"),
            "dim": ("#5a616c", "#a9b0bb"),
            "line": ("#d5d9df", "#3a3f48"),
            "pale": ("#eef0f3", "#23272e"),
            "stripe": ("#cdd2d9", "#414853"),
            "alarm": ("#b3123a", "#ff8fa3"),
        } | _COLOURS
        themes.append(" ".join(f"--{name}: {pair[n]};" for name, pair in named.items()))
    kinds = "\n".join(
        f".{kind} {{ background: var(--{kind}); fill: var(--{kind}); }}" for kind in _COLOURS
    )
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {themes[1]} }} }}"
    return f"\n:root {{ {themes[0]} }}\n{dark}{_STYLE}{kinds}\n"
