"""The page and the fragment of the report: what is said, that it is sound, how it looks."""

from __future__ import annotations

import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import lacking, variants
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minloader import Loader
from minloader._diagnosis.figures import Timeline
from minloader._diagnosis.page import data as page_data
from minloader._diagnosis.page import fragment, render
from minloader._diagnosis.page import text as page_text
from minloader._diagnosis.stats import Stats
from minloader._diagnosis.verdict import format_seconds
from minloader._epochs.counters import Event
from tests.helpers import Squares

pytestmark = pytest.mark.usefixtures("quick_starts")

STAGES = ("dataset", "transform", "collate", "transport")


def event(track: str, name: str, start: float, seconds: float, **args: Any) -> Event:
    return Event(track, name, start, seconds, args)


def simulate(
    batches: int = 120,
    workers: int = 2,
    *,
    draw: float = 0.0005,
    stages: tuple[float, float, float, float] = (0.02, 0.003, 0.004, 0.001),
    own: float = 0.005,
    chunk: int = 1,
    dies: int = -1,
) -> tuple[list[Event], list[dict[str, Any]]]:
    """A run as the loader would record it: two tasks in flight for each worker, first in first
    out; seconds for each batch, give or take. The worker of task ``dies`` dies with it."""
    rng = random.Random(0)
    now, events, took = 0.0, [], dict.fromkeys(("wait", "own", "draw", *STAGES), 0.0)
    free = [0.15 + 0.01 * worker for worker in range(workers)]
    pending: deque[float] = deque()

    def add(track: str, name: str, start: float, seconds: float, **args: Any) -> float:
        events.append(event(track, name, start, seconds, **args))
        if name in took:
            took[name] += seconds
        return start + seconds

    def work(first: int, now: float) -> float:
        worker = min(range(workers), key=free.__getitem__)
        track, begin = f"worker {worker}", max(free[worker], now)
        if first == dies * chunk:
            dead = begin + stages[0] * chunk / 2
            add(track, "died", dead, 0.0, cause="killed by SIGKILL (<out of memory> & co)")
            begin = dead + 0.06
            add(track, "again", begin, 0.0, batch=first, count=chunk)
        end = begin
        for name, seconds in zip(STAGES, stages, strict=True):
            end = add(track, name, end, seconds * chunk * rng.uniform(0.7, 1.4))
        free[worker] = end + 0.0002
        return add(track, "task", begin, free[worker] - begin, batch=first, count=chunk, epoch=0)

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
            now = add("consumer", "wait", now, 1e-5) if more else now
            spent = own * rng.uniform(0.8, 1.2)
            took["own"] += spent
            now += spent
    wall = took["wait"] + took["own"]
    working = {stage: took[stage] for stage in STAGES}
    working["idle"] = workers * wall - sum(working.values())
    rng.shuffle(events)
    return events, [
        bar("consumer", wait=took["wait"], own=took["own"]),
        bar("sampler", draw=took["draw"], idle=wall - took["draw"]),
        bar("workers", f"{workers} processes", **working),
    ]


def bar(label: str, remark: str = "", **seconds: float) -> dict[str, Any]:
    return {"label": label, "seconds": seconds, "remark": remark}


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
    "dataset": (
        "The dataset is the limit, with 71 % of the work: both workers were busy 90 %, the "
        "consumer waited 69 % of the time; more workers would help (num_workers)",
        "dataset",
        {},
    ),
    "long": (
        "transform is the limit, with 100 % of the work: all 128 workers were busy 100 %, the "
        "consumer waited 100 % of the time; 100 % of the work was waiting for a processor, which "
        "other workers, the consumer or other programs have: num_workers=16 would do; the machine "
        "has 128, of which this process may use 16 (its CPU affinity, or the limit of its "
        "container or job)",
        "transform",
        {"stages": (0.004, 0.03, 0.004, 0.001)},
    ),
    "sampler": (
        "The sampler is the limit: it takes 12 ms a batch; the consumer waited 93 % of the time, "
        "the workers were idle 76 %",
        "draw",
        {"draw": 0.012, "stages": (0.004, 0.001, 0.001, 0.0005), "own": 0.001},
    ),
    "consumer": (
        "The consumer is the limit: it waited 6 % of the time, the workers were idle 70 %: "
        "num_workers=1 would do",
        "own",
        {"stages": (0.01, 0.003, 0.004, 0.001), "own": 0.03},
    ),
    "death": (
        "The dataset is the limit, with 71 % of the work",
        "dataset",
        {"batches": 60, "dies": 50},
    ),
    "short": ("It is too early to say", "", {"batches": 6}),
    "eight": (
        "collate_fn is the limit, with 62 % of the work: all 8 workers were busy 94 %, the "
        "consumer waited 86 % of the time; make it cheaper, or set num_workers past the 8 "
        "processors there are if it waits for files or the network",
        "collate",
        {"workers": 8, "stages": (0.01, 0.005, 0.03, 0.004), "own": 0.001, "batches": 500},
    ),
    "chunks": (
        "The consumer waited 96 % of the time, but the workers were idle 75 %: a batch takes "
        "105 µs, most of it to hand it over, so larger batches would help (batch_size, or the "
        "sampler)",
        "",
        {"batches": 64 * 30, "chunk": 64, "stages": (2e-5, 1e-6, 1e-6, 3e-5), "draw": 1e-6,
         "own": 5e-6},
    ),
}  # fmt: skip


def run_data(name: str) -> dict[str, Any]:
    verdict, bottleneck, how = RUNS[name]
    events, bars = simulate(**how)
    return {
        "subtitle": "120 batches in 2.70 s",
        "verdict": verdict,
        "bottleneck": bottleneck,
        "bars": bars,
        "rows": ROWS,
        "events": events,
    }


def bare(*events: Event) -> dict[str, Any]:
    """The data of a page with nothing but a timeline, and a row to see that it was drawn."""
    rows = [("the last", "thing", "drawn")]
    texts = {"subtitle": "", "verdict": "A verdict", "bottleneck": ""}
    return texts | {"bars": [], "rows": rows, "events": events}


VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Reads a page as a browser would, but strictly: whatever is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert tag in {"rect", "line"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str, **attrs: str) -> list[dict[str, str | None]]:
        return [has for name, has in self.tags if name == tag and attrs.items() <= has.items()]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    def spans(self, kind: str) -> list[tuple[float, float]]:
        """Where the spans of a kind begin and how wide they are, as shares of the drawing."""
        found = [s for s in self.all("rect") if kind in (s["class"] or "").split()]
        return [(float(s["x"] or "") / self.width, float(s["width"] or "") / self.width)
                for s in found]  # fmt: skip

    @property
    def width(self) -> float:
        """Pixels of the drawing."""
        (svg,) = self.all("svg")
        return float((svg["style"] or "").removeprefix("width: ").removesuffix("px;"))

    def is_self_contained(self) -> None:
        """Nothing in it asks for another file or acts on its own."""
        for tag, attrs in self.tags:
            assert tag not in {"link", "img", "iframe"}
            assert not {"src", "srcset", "xlink:href"} & set(attrs)
            assert (attrs.get("href") or "#").startswith("#")
            assert not [key for key in attrs if key.startswith("on")]


# --- the file


HOSTILE = """<!--<script></script><img src=x onerror=alert(1)>{{data}}{{fragment}}"'&amp;'\udc80"""
READ = HOSTILE.replace("\udc80", "?")


def hostile() -> dict[str, Any]:
    """Data whose every text is hostile."""
    return {
        "subtitle": HOSTILE,
        "verdict": HOSTILE,
        "bottleneck": HOSTILE,
        "bars": [{"label": HOSTILE, "seconds": {HOSTILE: 1.0}, "remark": HOSTILE}],
        "rows": [(HOSTILE, HOSTILE, HOSTILE)],
        "events": [
            event(HOSTILE, "task", 0.0, 1.0, batch=HOSTILE, count=1, **{HOSTILE: HOSTILE}),
            event(HOSTILE, HOSTILE, 0.1, 0.2),
            event(HOSTILE, HOSTILE, 0.1, 0.0, cause=HOSTILE),
            event(HOSTILE, "died", 0.1, 0.0, cause=HOSTILE),
        ],
    }


def test_file_is_sound_and_self_contained():
    text = render(bare())
    read = Reader(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert read.all("meta", name="viewport")
    read.is_self_contained()
    assert not re.search(r"https?:|@import|url\((?!#)", text)


def test_data_stays_data():
    text = render(hostile())
    text.encode()
    read = Reader(text)
    read.is_self_contained()
    encoded, script = read.said("script")
    assert "<" not in encoded
    assert json.loads(encoded) == json.loads(json.dumps(hostile()))
    assert [script] == Reader(render(bare())).said("script")[1:]
    (shown,) = read.said("pre")  # without scripts
    assert shown.count(READ) == 4


def test_a_fragment_escapes_everything_and_leaves_colours_to_the_notebook():
    read = Reader(fragment(HOSTILE, [(HOSTILE, HOSTILE, HOSTILE)]))
    assert not read.all("script")
    assert "".join(data for _, data in read.texts) == f"{READ}\n\n{READ}  {READ}  {READ}"
    text = fragment("A verdict.", ROWS)
    assert not re.search(r"#[0-9a-f]{3}|rgb|background", text)


def test_page_says_what_the_stats_say():
    with Loader(Squares(30), num_workers=2, executor="thread") as loader:
        list(loader)
        stats = loader.stats
    shown = page_data(stats, stats.bottleneck, stats.verdict)
    assert shown["verdict"] == stats.verdict
    assert shown["subtitle"].startswith("30 batches in ")
    assert str(stats).split("\n")[2:] == ["  ".join(row).rstrip() for row in padded(shown["rows"])]
    assert [bar["label"] for bar in shown["bars"]] == ["consumer", "sampler", "workers"]
    consumer, sampler, workers = (sum(bar["seconds"].values()) for bar in shown["bars"])
    assert consumer == pytest.approx(sampler) == pytest.approx(workers / 2)
    assert consumer <= stats.seconds
    assert len(shown["events"]) == len(stats.events)
    assert min(event.start for event in shown["events"]) == 0
    read = Reader(stats._repr_html_())
    assert read.said("pre") == [str(stats)]


def padded(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    names, values = (max(len(row[n]) for row in rows) for n in (0, 1))
    return [(name.ljust(names), value.rjust(values), remark) for name, value, remark in rows]


def test_the_clock_counts_from_the_first_epoch():
    died = event("worker 0", "died", 12.0, 0.0, cause="SIGKILL")
    stats = Stats(timeline=Timeline(events=(died,), began=10.5))
    assert page_data(stats, stats.bottleneck, stats.verdict)["events"] == [died._replace(start=1.5)]


# --- in a browser


def chromium() -> str:
    """The path of a browser."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    return found or lacking("Chromium")


OPTIONS = (
    "headless",
    "no-sandbox",  # as root it would not start with one
    "disable-gpu",
    "disable-quic",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "no-first-run",
    "hide-scrollbars",
    "window-size=1500,1000",
    "virtual-time-budget=3000",
)


def dump(url: str, folder: Path, *, dark: bool) -> str:
    """The document as it stands when the browser has run its scripts."""
    command = [
        chromium(),
        *(f"--{option}" for option in OPTIONS),
        f"--user-data-dir={folder}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--virtual-time-budget=10000", "--dump-dom", url),
    ]
    browser = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder)},  # where it leaves more than its profile
    )
    try:
        return browser.communicate(timeout=250)[0].decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)  # its helpers leave a moment after itself
        browser.communicate()


class Frame(NamedTuple):
    """A page to show in a browser: its name, at this width, its text, and whether scripts run."""

    name: str
    text: str
    width: int = 1400  # pixels
    scripts: bool = True


def in_frames(
    frames: list[Frame], measure: str, folder: Path, *, dark: bool = False
) -> dict[str, Any]:
    """What the JavaScript function ``measure`` returns of each frame, in one run of the browser."""
    lines = [
        f'<iframe id="{frame.name}" width="{frame.width}" height="800" style="border: 0"'
        f"{'' if frame.scripts else ' sandbox=allow-same-origin'}"
        f' srcdoc="{html.escape(frame.text)}"></iframe>'
        for frame in frames
    ]
    script = """
    addEventListener("load", () => {
      const found = {};
      for (const frame of document.querySelectorAll("iframe")) {
        try { found[frame.id] = measure(frame); }
        catch (error) { found[frame.id] = {error: String(error.stack)}; }
      }
      document.documentElement.textContent = JSON.stringify(found);
    });"""
    file = folder / "frames.html"
    head = f"<!DOCTYPE html><meta charset=utf-8><script>{measure}{script}</script>"
    file.write_text(head + "".join(lines), encoding="utf-8")
    text = dump(file.as_uri(), folder / "profile", dark=dark)
    found: dict[str, Any] = json.loads(html.unescape(re.sub("<[^>]*>", "", text)))
    return found


# --- what a browser draws


SPANS = (0.0, 5e-8, 1.234e-5, 0.0009994, 0.0009996, 0.0203, 0.9994, 0.9996, 1.0, 99.96, 999.4)
SPANS += (999.6, 12345.6)


def cases() -> dict[str, dict[str, Any]]:
    return {
        "hostile": hostile(),
        "nothing": bare(),
        "one event": bare(event("consumer", "wait", 12.0, 0.25)),
        "one instant": bare(event("worker 0", "died", 1.5, 0.0, cause="SIGKILL")),
        "waits": bare(*(event("consumer", "wait", start, 1.0) for start in (4.0, 0.0, 2.0))),
        "stages": bare(
            event("worker 3", "task", 5.0, 0.010, batch=64, count=32, epoch=2),
            event("worker 3", "dataset", 5.0, 0.008),
        ),
        "early": bare(
            event("worker 0", "task", -2.0, 1.0),  # the workers were started before
            event("consumer", "wait", 0.0, 1.0),
        ),
        "tracks": bare(
            *(
                event(track, "task", 0.0, 1.0)
                for track in ("worker 10", "sampler", "worker 9", "other", "consumer")
            )
        ),
        "crowd": bare(
            *[event("worker 0", "task", n * 5e-6, 4e-6) for n in range(20_000)][::-1],
            *(event("worker 1", "task", n * 0.01, 0.009) for n in range(10)),
            *(event("worker 2", "task", n * 0.01, 0.009) for n in range(10)),
        ),
        "joined": bare(
            *(event("worker 0", "task", n * 1e-6, 5e-7) for n in range(50)),
            *(event("worker 1", "task", n * 0.01, 0.009) for n in range(100)),
        ),
        "thousands": bare(
            *(event("worker 0", "task", n, 0.5, batch=n, count=1) for n in range(5000)),
            event("worker 0", "died", 1.0, 0.0),
        ),
        "deaths": bare(*(event("worker 0", "died", n, 0.0) for n in range(100))),
        "durations": bare() | {"bars": [bar("", own=s) for s in SPANS]},
    }


def draw(pages: dict[str, dict[str, Any]], folder: Path) -> dict[str, Reader]:
    """Each page as it stands when its scripts have run in a browser."""
    folder.mkdir(exist_ok=True)
    collect = """function measure(frame) {
      frame.contentDocument.querySelector("noscript").remove();
      return frame.contentDocument.documentElement.outerHTML;
    }"""
    frames = [Frame(name, render(data)) for name, data in pages.items()]
    drawn = {name: Reader(text) for name, text in in_frames(frames, collect, folder).items()}
    assert drawn.keys() == pages.keys()
    for name, read in drawn.items():
        assert pages[name]["rows"][-1][0] in read.said("th"), f"{name}: its script failed"
        assert not read.all("main", hidden="")
    return drawn


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    pages = {name: run_data(name) for name in RUNS}
    return draw(pages | cases(), tmp_path_factory.mktemp("drawn"))


@pytest.mark.parametrize("name", RUNS)
def test_page_is_drawn(name, drawn):
    read = drawn[name]
    verdict, kind, _ = RUNS[name]
    headline, _, advice = f"{verdict}.".partition(": ")
    headline = headline[0].upper() + headline[1:]
    assert read.said("title")[0] == f"minloader: {headline}"
    assert headline in read.said("span")
    assert not advice or advice[0].upper() + advice[1:] in read.said("p")
    assert len(read.all("div", **{"class": "row bottleneck"})) == bool(kind)
    read.is_self_contained()
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {attrs["href"] for attrs in read.all("a")}
    assert links <= {f"#{name}" for name in ids}
    assert (len(links) == 2) == (name == "death")
    assert read.said("strong")[-len(ROWS) :] == [value for _, value, _ in ROWS]


def test_hostile_text_is_shown_and_does_nothing(drawn):
    read = drawn["hostile"]
    read.is_self_contained()
    assert len(read.all("script")) == 2
    assert sum(HOSTILE in data for tag, data in read.texts if tag != "script") >= 10


@pytest.mark.parametrize(
    ("page", "tag", "said"),
    [
        ("nothing", "p", "No events were recorded."),
        ("one instant", "li", " at 1.500 s: SIGKILL"),
        ("stages", "title", "dataset 8 ms\nbatches 64 to 95, epoch 2\nworker 3, at 5 s"),
        ("stages", "text", "64"),
        ("joined", "title", "50 spans:\nother 25 µs"),
        ("thousands", "text", "4999"),  # of a long run the end is drawn
        ("deaths", "li", "88 more before"),
    ],
)
def test_a_page_says(drawn, page, tag, said):
    assert said in drawn[page].said(tag)


@pytest.mark.parametrize(
    ("page", "reach"),
    [
        ("waits", "All 5 s"),
        ("early", "All 3 s"),
        ("stages", "The last 10 ms of 5.01 s"),  # the events before are not kept
        ("thousands", "The last 178 s of 5,000 s"),  # nor is all drawn that is kept
    ],
)
def test_how_much_of_a_run_is_drawn_is_told(drawn, page, reach):
    assert any(text.startswith(f"{reach}, the newest") for text in drawn[page].said("p"))


def test_what_is_drawn(drawn):
    assert drawn["nothing"].all("div", **{"class": "drawn", "hidden": ""})
    assert drawn["one event"].spans("wait") == [(0, 1)]
    assert len(drawn["one instant"].all("g", **{"class": "mark", "id": "mark0"})) == 1
    # The own time of the consumer is what lies between its waits.
    (first, _), (second, _) = drawn["waits"].spans("own")
    assert (first, second) == (pytest.approx(0.2), pytest.approx(0.6))
    # Many tiny spans are drawn as few, and neighbours that are too narrow to see are joined.
    assert 20 < len(drawn["crowd"].spans("task")) < 8_000
    assert len(drawn["joined"].spans("task")) == 101
    assert 100 < len(drawn["thousands"].all("rect")) < 400
    # What has been left out cannot be gone to, but is told.
    assert not drawn["thousands"].all("a")
    assert any("at 1.000 s" in text for text in drawn["thousands"].said("li"))


def test_tracks_are_in_order(drawn):
    names = [attrs["title"] for attrs in drawn["tracks"].all("div") if "title" in attrs]
    assert names == ["consumer", "sampler", "other", "worker 9", "worker 10"]


def test_spans_of_time_are_told_as_everywhere(drawn):
    told = [text for text in drawn["durations"].said("span") if text.strip()]
    assert told[1:] == [format_seconds(span) for span in SPANS if span]  # behind the headline


EVENTS = st.builds(
    Event,
    st.sampled_from(["consumer", "sampler", "worker 0", "worker 1", "x"]),
    st.sampled_from(["wait", "draw", "task", "dataset", "died", "again", "y"]),
    st.floats(-1e6, 1e6) | st.floats(1000, 1000.001),
    st.just(0.0) | st.floats(0, 1e-3) | st.floats(0, 1e4),
    st.sampled_from([{}, {"batch": 3}, {"batch": 3, "count": 4}]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=3, phases=[Phase.generate])
@given(st.lists(st.lists(EVENTS, max_size=12), min_size=50, max_size=50))
def test_any_events_can_be_drawn(tmp_path_factory, pages):
    """Fifty timelines in each start of the browser."""
    data = {f"page {n}": bare(*events) for n, events in enumerate(pages)}
    for name, read in draw(data, tmp_path_factory.mktemp("any")).items():
        if not data[name]["events"]:
            continue
        for tag in ("rect", "line", "text"):
            for attrs in read.all(tag):
                for key in ("x", "x1", "width"):
                    assert -1e-3 <= float(attrs.get(key) or 0) <= read.width + 0.02, attrs


# --- how it looks


RULER = r"""
const rect = e => e.getBoundingClientRect();
function light(colour) {  // relative luminance, of WCAG
  const [r, g, b] = colour.map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(element) {
  const style = getComputedStyle(element);
  const rgb = text => text.match(/[\d.]+/g).map(Number);
  const behind = e => rgb(getComputedStyle(e).backgroundColor);
  let ground = element;
  while (behind(ground).length > 3) ground = ground.parentNode;  // transparent
  const back = behind(ground);
  const front = rgb(style[element.namespaceURI.includes("svg") ? "fill" : "color"]);
  const seen = front.slice(0, 3).map((c, n) => c * style.opacity + back[n] * (1 - style.opacity));
  const [a, b] = [light(seen), light(back)].sort((a, b) => b - a);
  return (a + 0.05) / (b + 0.05);
}
function overlaps(elements) {
  const boxes = elements.map(e => [rect(e), e.textContent]).filter(([r]) => r.width && r.height);
  const found = [];
  boxes.forEach(([a, one], n) => boxes.slice(n + 1).forEach(([b, other]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 3) found.push(one + " / " + other);
  }));
  return found;
}
"""

MEASURE = r"""
function measure(frame) {
  const page = frame.contentDocument, all = s => [...page.querySelectorAll(s)];
  const window = frame.contentWindow, html = page.documentElement;
  const scroll = page.querySelector(".scroll"), svg = page.querySelector("svg");
  const texts = all("p:not(.zoom), h1 span, h2, .head > *, li, th, td, .names div, button");
  const visible = all("svg text").filter(e => e.textContent && rect(e).width);
  const bottleneck = page.querySelector(".bottleneck");
  const kind = page.querySelector(".edge").classList[1];
  const numbers = all(".number");
  const facts = {
    overflow: html.scrollWidth - window.innerWidth,
    verdict_bottom: rect(page.querySelector("h1")).bottom,
    bottleneck_bottom: bottleneck ? rect(bottleneck).bottom : 0,
    height: window.innerHeight,
    background: window.getComputedStyle(page.body).backgroundColor,
    contrasts: Object.fromEntries(
      ["h1 span", "th", "td:last-child", ".dim", ".bottleneck .dim", ".bottleneck em", ".tick text",
       ".number", ".mark text", ".marks"]
      .filter(s => page.querySelector(s)).map(s => [s, contrast(page.querySelector(s))])),
    overlaps: [...overlaps(texts), ...overlaps(visible)],
    clipped: all(".names div, .head, li, td, th").filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.textContent),
    outside: visible.filter(e => rect(e).right > rect(svg).right + 1).map(e => e.textContent),
    seen: all("svg > rect").filter(e => rect(e).width >= 1 && rect(e).right > rect(scroll).left
      && rect(e).left < rect(scroll).right).length,
    untitled: all("svg > rect").filter(e => !e.querySelector("title").textContent).length,
    bars: all(".bar").map(bar => Math.round(
      [...bar.children].reduce((sum, e) => sum + rect(e).width, 0) - rect(bar).width)),
    solid: bottleneck ? window.getComputedStyle(page.querySelector(".bottleneck .bar ." + kind))
      .backgroundColor : "",
    edge: window.getComputedStyle(page.querySelector(".edge")).backgroundColor,
    last: Math.max(...all("svg > rect").map(e => rect(e).right)) - rect(scroll).right,
    empty: scroll.clientWidth - rect(svg).width,
    buttons: rect(page.querySelector(".zoom")).height,
  };
  {
    const [less, more, whole] = all(".zoom button");
    whole.click();
    facts.whole = svg.clientWidth - scroll.clientWidth;
    facts.overlaps_whole = overlaps(all("svg text").filter(e => rect(e).width));
    more.click();
    more.click();
    facts.larger = svg.clientWidth / scroll.clientWidth;
    facts.overlaps_larger = overlaps(all("svg text").filter(e => rect(e).width));
  }
  return facts;
}
"""


MEASURE_FRAGMENT = r"""
function measure(frame) {
  const page = frame.contentDocument, all = s => [...page.querySelectorAll(s)];
  const shown = all("noscript pre");
  return {
    overflow: page.documentElement.scrollWidth - frame.contentWindow.innerWidth,
    contrasts: Object.fromEntries(shown.map(e => [e.textContent, contrast(e)])),
    overlaps: overlaps(shown),
    said: shown.filter(e => rect(e).height).map(e => e.textContent),
    hidden: rect(page.querySelector("main")).height == 0,
  };
}
"""


class Slow:
    def __getitem__(self, item: int) -> int:
        time.sleep(0.005)
        return item


def looks(
    pages: dict[str, str], measure: str, folder: Path, scripts: bool = True
) -> Iterator[tuple[str, bool, Any]]:
    """What is measured of pages, narrow and wide, light and dark; what is right of all is so."""
    frames = [
        Frame(f"{name} {width}", text, width, scripts)
        for name, text in pages.items()
        for width in (1400, 400)
    ]
    for dark in (False, True):
        (folder / str(dark)).mkdir()
        found = in_frames(frames, RULER + measure, folder / str(dark), dark=dark)
        assert len(found) == len(frames)
        for key, is_so in found.items():
            assert "error" not in is_so, (key, is_so)
            what = (key, dark, is_so)
            assert is_so["overflow"] <= 0, what
            assert is_so["overlaps"] == [], what
            assert min(is_so["contrasts"].values()) >= 4.5, what
            yield key, dark, is_so


@variants("most", [2, None])
def test_pages_look_right_in_a_browser(tmp_path, most):
    pages = {name: render(run_data(name)) for name in list(RUNS)[:most]}
    with Loader(Slow(), range(80), num_workers=2) as loader:
        assert len(list(loader)) == 80
        loader.stats.to_html(tmp_path / "real.html")
    pages["real"] = (tmp_path / "real.html").read_text(encoding="utf-8")
    backgrounds: dict[bool, set[str]] = {}
    for what in looks(pages, MEASURE, tmp_path):
        key, dark, is_so = what
        assert is_so["verdict_bottom"] < 300, what
        assert is_so["bottleneck_bottom"] < is_so["height"], what
        assert is_so["clipped"] == is_so["outside"] == [], what
        assert is_so["seen"] >= (3 if key.startswith("real") else 10), what  # it may be a busy run
        assert is_so["untitled"] == 0, what
        assert max(map(abs, is_so["bars"])) <= 1, what
        assert is_so["solid"] in {is_so["edge"], ""}, what
        assert is_so["empty"] <= 4, what
        assert -60 < is_so["last"] < 5, what  # scrolled to the end
        assert is_so["buttons"] > 0, what
        assert abs(is_so["whole"]) <= 4, what
        assert 3.5 < is_so["larger"] < 4.5, what
        assert is_so["overlaps_whole"] == is_so["overlaps_larger"] == [], what
        backgrounds.setdefault(dark, set()).add(is_so["background"])
    assert backgrounds == {False: {"rgb(255, 255, 255)"}, True: {"rgb(21, 23, 27)"}}


def test_without_scripts_the_verdict_and_the_table_are_there(tmp_path):
    data = {name: run_data(name) for name in RUNS}
    pages = {name: render(data[name]) for name in RUNS}
    for what in looks(pages, MEASURE_FRAGMENT, tmp_path, scripts=False):
        key, _, is_so = what
        shown = data[key.split()[0]]
        assert is_so["hidden"], what
        assert is_so["said"] == [page_text(shown["verdict"], shown["rows"])], what


def use(name: str, actions: str, folder: Path, address: str = "") -> str:
    """The document of a run's page after some actions of its user, in JavaScript."""
    file = folder / f"{name}.html"
    text = render(run_data(name)).replace("</body>", f"<script>{actions}</script></body>")
    file.write_text(text, encoding="utf-8")
    return dump(file.as_uri() + address, folder / "profile", dark=False)


def test_a_mark_that_the_address_names_stands_out(tmp_path):
    text = use("death", "", tmp_path, "#mark1")
    marks = re.findall(r'<g class="(mark[^"]*)" id="(\w+)">', text)
    assert marks == [("mark", "mark0"), ("mark chosen", "mark1")]


def test_words_about_a_death_lead_to_its_mark(tmp_path):
    click = """
    const [, more] = document.querySelectorAll(".zoom button");
    more.click();  // so that not all of it is in view
    scroll.scrollLeft = 0;
    addEventListener("load", () => setTimeout(() => find(".marks a").click()));
    (function check() {
      const line = find("#mark0.chosen line")?.getBoundingClientRect();
      const view = scroll.getBoundingClientRect();
      if (line && view.left < line.left && line.left < view.right) document.title = "in view";
      else setTimeout(check, 20);
    })();"""
    assert "<title>in view</title>" in use("death", click, tmp_path)


def test_the_wheel_zooms_where_the_pointer_is(tmp_path):
    turn = """
    window.requestAnimationFrame = draw => setTimeout(draw, 0);  // without a screen come no frames
    const at = scroll.getBoundingClientRect().left + 300, before = svg.clientWidth;
    const point = () => (scroll.scrollLeft + 300) / svg.clientWidth, first = point();
    const event = {deltaY: -1, ctrlKey: true, clientX: at, cancelable: true};
    scroll.dispatchEvent(new WheelEvent("wheel", event));
    (function check() {
      const larger = svg.clientWidth / before, moved = point() - first;
      if (Math.abs(larger - 1.25) < 0.01 && Math.abs(moved) < 0.01) document.title = "larger";
      else setTimeout(check, 20);
    })();"""
    assert "<title>larger</title>" in use("eight", turn, tmp_path)
