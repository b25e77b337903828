"""The documents: links lead somewhere, files they name exist, the manual's pages stay short.

After a change to ``RULES``, rerun with ``ACCEPT=1`` in the environment: it writes their list.
"""

import html
import importlib
import os
import re
import subprocess
import sys
import textwrap
import unicodedata
import urllib.parse
from pathlib import Path

import pytest

from hot_compile.passes.storage.readers import RULES

ROOT = Path(__file__).parent.parent
MANUAL = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "runtime" / "csrc" / "README.md",
    ROOT / "tests" / "fuzz" / "README.md",
]
ROOMS = ("hot_compile", "passes", "runtime", "tests", "benchmarks", "examples", "docs")
WORDS, README_LINES, COLUMNS = 800, 120, 120


def prose(path):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)


def links(path):
    """Where a page's links within the repository lead: files and anchors ('': none)."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", target):
            place, _, anchor = target.partition("#")
            yield (path.parent / place if place else path), anchor


def anchors(path):
    """What GitHub makes of a page's headings."""
    for heading in re.findall(r"^#+ (.*)$", prose(path), flags=re.M):
        letters = [c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LN"]
        yield "".join(letters).replace(" ", "-")


def named(text):
    """Files of the repository that a text names by their path from the root."""
    return re.findall(rf"(?<![\w/.-])(?:{'|'.join(ROOMS)})/[\w/-]+\.(?:py|md|json|cu|cpp)\b", text)


def by_name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page):
    lost = [
        f"{place}#{anchor}"
        for place, anchor in links(page)
        if not place.exists() or (anchor and anchor not in anchors(place))
    ]
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_files_that_pages_name_exist(page):
    files = {name: [ROOT / name, ROOT / "docs" / name] for name in named(prose(page))}
    assert not {name for name, places in files.items() if not any(f.exists() for f in places)}


def test_pages_that_the_code_names_exist():
    folders = ("hot_compile", "passes", "runtime", "benchmarks", "examples")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    lost = {}
    for path in files:
        if path.suffix in (".py", ".html", ".cu", ".cuh", ".cpp", ".hpp", ".inl"):
            text = path.read_text()
            pages = {name for name in named(text) if name.endswith(".md")}
            missing = {name for name in pages if not (ROOT / name).exists()}
            for number in re.findall(r"docs/adr/(\d{4})\b", text):
                if not list((ROOT / "docs" / "adr").glob(f"{number}-*.md")):
                    missing.add(f"docs/adr/{number}")
            lost |= {path: missing} if missing else {}
    assert not lost


@pytest.mark.parametrize("page", MANUAL, ids=by_name)
def test_pages_of_the_manual_are_short(page):
    assert len(page.read_text().split()) < WORDS


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_lines_of_pages_are_short(page):
    """So that a change to one sentence is a change to few lines; measured tables aside."""
    lines = page.read_text().splitlines()
    if page.parent.name == "measured":
        lines = [line for line in lines if not line.startswith("|")]
    assert not [line for line in lines if len(line) > COLUMNS]
    assert not [line for line in lines if line.startswith(("<<<<<<<", ">>>>>>>"))]


def test_the_readme_fits_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_list_of_readers_is_made_of_the_rules():
    page = ROOT / "docs" / "tolerance.md"
    readers = {None: "{}", True: "{}", False: "computed again: {}"}
    named = ((readers[rule.with_gradient].format(rule.reader), rule.then) for rule in RULES)
    whole = {"width": COLUMNS, "subsequent_indent": "  ", "break_on_hyphens": False}
    table = "\n".join(textwrap.fill(f"- **{reader}**: {then}", **whole) for reader, then in named)
    before, old, after = re.split(
        r"(?<=<!-- readers -->\n)(.*?)(?=<!-- end -->)", page.read_text(), flags=re.S
    )
    if os.environ.get("ACCEPT"):
        page.write_text(f"{before}{table}\n{after}")
    assert old == f"{table}\n" or os.environ.get("ACCEPT"), "rerun with ACCEPT=1 if intended"


def test_measured_tables_are_what_their_json_gives():
    command = [sys.executable, "benchmarks/pages.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readmes_chart_is_what_the_json_gives(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chart = importlib.import_module("beside_stock")
    assert chart.picture() == chart.PICTURE.read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of docs/ as mkdocs makes them, without a warning: a file, and its text."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {path: path.read_text() for path in folder.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
def test_the_site_has_the_reference(site):
    (page,) = [text for path, text in site.items() if path.parent.name == "api"]
    assert "hot_compile.inspect.explain" in page


@pytest.mark.slow
def test_no_link_of_the_site_is_dead(site):
    named = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in site.items()}
    dead = []
    for path, text in site.items():
        for link in re.findall(r'(?:href|src)="?([^"\s>]+)', text):
            place, _, anchor = urllib.parse.unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:|//", place):
                continue
            target = (path.parent / place).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            found = target.exists() and (not anchor or anchor in named.get(target, {anchor}))
            dead += [] if found else [f"{path.parent.name}: {link}"]
    assert not dead
