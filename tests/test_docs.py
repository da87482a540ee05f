"""The pages say what is true: their code runs, their links lead somewhere, and nothing is missing.

Each page is one program: its blocks of Python run one after another, in one process. The line
before a block may say ``<!-- not run: why -->``, or ``<!-- needs: torch -->`` for a block that runs
only where that is installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import lacking, printed_by, python, require, variants

import minloader
from minloader import (
    Concatenated,
    Loader,
    cached,
    empty,
    pack_collate,
    pad_collate,
    prefetch,
)
from tests.packages.__main__ import HEAD, PAGE, TABLE, rows, tried, with_row
from tests.packages.cases import CASES

ROOT = Path(__file__).parents[1]
PACKAGE = Path(minloader.__file__).parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
TEXTS = [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]
# Their code starts many workers or ffmpeg, or imports torch.
SLOW = {"clusters", "errors", "memory", "recipes", "samplers", "state", "streams", "torch"}
SLOW |= {"trainers"}
FENCE = "```"


def blocks(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yields the number of the first line, the line before the fence, and the lines of code."""
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if line.startswith(FENCE) and start is not None:
            if lines[start - 1] == FENCE + "python":
                yield start, lines[start - 2], lines[start:number]
            start = None
        elif line.startswith(FENCE):
            start = number + 1
    assert start is None, "a block has no end"


def needed(note: str) -> str | None:
    match = re.fullmatch(r"<!-- needs: (\w+) -->", note)
    return match.group(1) if match else None


def is_run(note: str) -> bool:
    if note.startswith("<!-- not run"):
        assert re.fullmatch(r"<!-- not run: .+ -->", note), "say why"
        return False
    return needed(note) is None or importlib.util.find_spec(needed(note)) is not None


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(rf"^{FENCE}.*?^{FENCE}", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def named(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
        for page in DOCS  # that of the README has a test of its own
        if any(blocks(page))
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path, for_ray):
    found = list(blocks(page))
    optional = {needed(note) for _, note, _ in found} - {None}
    program: list[str] = []
    for start, note, code in found:
        if is_run(note):
            program += [""] * (start - len(program)) + code  # so that errors name the page's lines
    missing = sorted(name for name in optional if importlib.util.find_spec(name) is None)
    if missing and (not program or os.environ.get("MINLOADER_REQUIRE_ALL")):
        lacking(", ".join(missing))
    script = tmp_path / "page.py"
    script.write_text("\n".join(program))
    done = python(script, cwd=tmp_path, env=for_ray)
    assert done.returncode == 0, done.stdout + done.stderr


POLITE = """
import os
from minloader import Loader
import polite


class Loaded:
    def __reduce__(self):
        return os.nice, (0,)


class Priorities:
    def __init__(self):
        self.at_load = Loaded()

    def __getitem__(self, index):
        return self.at_load, os.nice(0)


before = os.nice(0)
with Loader(Priorities(), range(2), num_workers=2, mp_context=polite.PoliteContext()) as loader:
    at_load, later = map(set, zip(*loader))
lowered = {min(before + 10, 19)}
assert later == lowered
assert at_load == lowered or polite.spawn.get_start_method() == "fork"  # nothing is loaded there
assert os.nice(0) == before
"""


@variants("method", ["spawn", "fork", "forkserver"])
def test_workers_of_the_recipe_are_polite_before_they_load_the_dataset(method, tmp_path):
    (code,) = (
        code
        for _, _, code in blocks(ROOT / "docs" / "recipes.md")
        if "class PoliteProcess(spawn.Process):" in code
    )
    module = "\n".join(code).replace('get_context("spawn")', f'get_context("{method}")')
    (tmp_path / "polite.py").write_text(module)
    printed_by(POLITE, cwd=tmp_path, options=["-W", "ignore"])


@named(TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST give to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@named(TEXTS)
def test_files_that_are_named_exist(page):
    places = [ROOT, PACKAGE, page.parent]
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", prose(page)):
        assert any((place / name).exists() for place in places), name


@named(TEXTS)
def test_lines_are_not_too_long(page):
    for line in prose(page).splitlines():
        assert len(line) <= 100 or line.lstrip().startswith("|"), line


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```{toctree}\n(?::.*\n)+\n((?:\w+\n)+)```$", index, re.MULTILINE)
    listed = "".join(trees).split()
    assert sorted(listed) == sorted({page.stem for page in DOCS} - {"index"})


def test_the_signature_is_the_loaders():
    text = (ROOT / "docs" / "loader.md").read_text()
    shown = re.search(r"^Loader\(dataset, .*?\)$", text, re.DOTALL | re.MULTILINE).group()
    parameters = [
        f"{p.name}={p.default!r}".replace("'", '"') if p.default is not p.empty else p.name
        for p in inspect.signature(Loader).parameters.values()
    ]
    parameters.insert(2, "*")
    assert re.sub(r"\s+", " ", shown) == f"Loader({', '.join(parameters)})"


SAMPLERS = {
    name: module
    for module, names in minloader._MODULES.items()
    for name in names.split()
    if name.endswith("Sampler")
}
"""The modules of the samplers, by name."""


@pytest.mark.parametrize(
    ("thing", "page"),
    [
        *((getattr(minloader, name), "samplers") for name in SAMPLERS),
        (Concatenated, "samplers"),
        (pad_collate, "samplers"),
        (pack_collate, "samplers"),
        (prefetch, "loader"),
        (empty, "memory"),
        (cached, "memory"),
    ],
)
def test_other_signatures_name_every_parameter(thing, page):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / f"{page}.md").read_text())
    calls = re.findall(rf"`(?:minloader\.)?{thing.__name__}\((.*?)\)`", text)
    shown = max(calls, key=len)  # others are examples
    names = [re.match(r"\w+", part.strip())[0] for part in re.split(r"[,|]", shown)]
    assert names == list(inspect.signature(thing).parameters)


def test_every_argument_of_torchs_loader_has_a_line():
    torch = require("torch")
    ours = importlib.import_module("minloader.torch").DataLoader
    text = prose(ROOT / "docs" / "torch.md")

    def lines(title: str) -> list[str]:
        table = text[text.index(title) :]
        table = table[: table.index("\n## ", 1)]
        return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)

    arguments = lines("## Coming from torch")
    assert arguments + lines("## Arguments and methods of ours") == list(
        inspect.signature(ours).parameters
    )
    # In torch the first argument is self.
    theirs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)[1:]
    assert set(arguments) == set(theirs)


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    parts = re.split(r"^\.\. currentmodule:: (\S+)$", text, flags=re.MULTILINE)
    described = {
        module: set(re.findall(r"^\.\. auto\w+:: (\w+)(?![\w.])", part, re.MULTILINE))
        for module, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert described.pop("minloader") == set(minloader.__all__)
    # A table is for who reads it where it is not rendered by Sphinx.
    in_tables = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*\|$", text, re.MULTILINE))))
    assert set.union(*described.values(), minloader.__all__) <= in_tables
    assert set(described) == {f"minloader.{name}" for name in ("torch", "jax", "testing", "doctor")}
    for module, names in described.items():
        # It is read rather than imported: jax in this process would be in the way of later tests.
        name = module.split(".")[1]
        files = [PACKAGE / f"{name}.py", PACKAGE / name / "__init__.py"]
        (source,) = (path.read_text() for path in files if path.exists())
        bound = set()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom):
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
        assert names
        assert names <= bound, module


@pytest.mark.parametrize(("picture", "first"), [("padding", 0), ("spread", 2)])
def test_the_pictures_of_samplers_show_what_the_table_says(picture, first):
    """Both are printed by tests/benchmarks/samplers.py, in one run."""
    path = ROOT / "docs" / f"{picture}.svg"
    assert path.stat().st_size < 20_000
    texts = [text.text for text in ElementTree.parse(path).iter() if text.tag.endswith("text")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "samplers.md").read_text().splitlines()
        if line.startswith(("| BatchSampler |", "| Dynamic", "| Packed"))
    ]
    assert len(rows) == 10
    assert texts[3:] == [
        cell for name, *cells in rows for cell in (name, *cells[first : first + 2])
    ]


README = ROOT / "README.md"


def test_the_quickstart_runs_as_a_plain_script(tmp_path):
    ((_, _, code),) = blocks(README)  # all of the page's code
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join(code))
    lines = printed_by(script).splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    assert len({line.split()[-2] for line in lines}) == 1  # both epochs have all the tokens


def test_the_readme_is_one_page_with_the_commands_that_the_whole_run_reads():
    lines = README.read_text().splitlines()
    assert len(lines) <= 140  # CONTRIBUTING.md says so
    for name in ("quickstart", "test"):
        marker = lines.index(f"<!-- command: {name} -->")
        assert lines[marker + 1] == "```sh"
        assert lines[marker + 2].startswith("python3 -m venv .venv && ")
        assert lines[marker + 3] == "```"


def test_each_sampler_has_its_section():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "samplers.md").read_text(), re.MULTILINE)
    # A mixture has one with the dataset that goes with it.
    assert set(SAMPLERS) - {"MixtureSampler"} <= set(headings)


def test_the_packages_are_all_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## Packages and modules") : text.index("## The table of reducers")]
    cells = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    named = re.findall(r"`(\w+(?:\.py)?)`", "\n".join(cells))
    there = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    there |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(named) == sorted(there)


def test_the_map_of_the_tests_is_whole():
    """A module that nobody can find is written again."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`(test_\w+)`", text)
    there = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    assert set(named) == there


def test_each_promise_has_tests():
    """The README's promises are those of the map, by their numbers."""
    readme = (ROOT / "README.md").read_text()
    promises = re.findall(r"^(\d+)\. ", readme[readme.index("## Ten promises") :], re.MULTILINE)
    assert promises == [str(number) for number in range(1, 11)]
    rows = re.findall(r"^\| (\d+) .*`test_", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(rows) == set(promises)


def abilities(page: Path, title: str) -> tuple[str, list[list[bool]]]:
    """A section of a page, and where the first table in it says yes."""
    text = page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    _, _, *rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().splitlines()
    cells = [row.strip("|").split("|")[1:] for row in rows]
    return text, [[cell.strip().startswith("yes") for cell in row] for row in cells]


def test_each_yes_of_the_readme_is_one_of_the_benchmarks_and_has_tests():
    """``tests/benchmarks/abilities.py`` prints the table there."""
    _, shown = abilities(README, "Beside others")
    text, measured = abilities(ROOT / "docs" / "benchmarks.md", "Who can do what")
    assert shown == measured
    assert all(row[0] for row in shown)
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    assert len(named) >= len(shown)
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), name


def test_the_figures_of_all_pages_are_those_of_the_benchmarks():
    """``tests/benchmarks/pages.py`` makes them from that page, and ``figures.py --pages`` both."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "tests/benchmarks/pages.py")
    assert spec
    assert spec.loader
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    source = pages.BENCHMARKS.read_text()
    readme, index = pages.README.read_text(), pages.INDEX.read_text()
    assert readme == pages.with_summary(readme, pages.readme_summary(source))
    assert index == pages.with_summary(index, pages.index_summary(source))
    known = pages.median(source, "tiny", "torch tensors, fork", "")
    other = source.replace(f"| {known} (", "| 123456.7 (")
    for page, summary in (readme, pages.readme_summary), (index, pages.index_summary):
        assert f"| {pages.brief(known)} |" in page
        changed = pages.with_summary(page, summary(other))
        assert changed == page.replace(f"| {pages.brief(known)} |", "| 123,457 |")
    for name in ("jpeg", "tiny", "ready", "stack", "first", "streams", "fit", "heading"):
        written = pages.with_table(source, name, "| a   |\n| ----- |\n| 5.0 |")
        assert f"<!-- figures: {name} -->\n\n| a |\n| --- |\n| 5.0 |\n" in written
        assert len(written) < len(source)


INSTALLED = {each.name for each in metadata.distributions()}


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "distribution", sorted({each.distribution for each in CASES.values()} & INSTALLED)
)
def test_a_package_works_as_the_table_says(distribution):
    names = [name for name, case in CASES.items() if case.distribution == distribution]
    found = rows(TABLE.search(PAGE.read_text()).group())
    assert [row[2:] for row in tried(distribution, names)] == [found[name][2:] for name in names]


def test_the_table_of_packages_has_a_row_for_each_that_is_tried():
    """``python -m tests.packages`` writes it."""
    text = TABLE.search(PAGE.read_text()).group()
    found = rows(text)
    assert list(found) == list(CASES)
    assert {len(row) for row in found.values()} == {len(HEAD)}
    for row in found.values():
        assert with_row(text, row) == text
    other = ["lmdb", "0.1", *found["lmdb"][2:]]
    assert rows(with_row(text, other)) == found | {"lmdb": other}
    assert with_row(text, ["lmdb", "not tried", *[""] * 5]) == text  # what was found before stays
