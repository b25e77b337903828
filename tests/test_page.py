"""The HTML page: whole, harmless, self-contained; and that it works in a real browser."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
import torch
from torch import nn

from hot_compile import Profile, explain, memory_report
from hot_compile.backend import hot
from hot_compile.page import page_data, save_page
from hot_compile.passes.profile.profile import LayerProfile, Measure, gw_variant, gx_variant
from hot_compile.record import NO_PLAN, GraphReport, run_uncompiled
from hot_compile.stock import Compared
from hot_compile.timeline import held_over_step

OPTIONS = {"min_gain": 0, "memory_min_bytes": 1, "exclude": ["*script*"]}
NASTY = "</script><b>&amp;"


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, and what stands between script tags."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

        if tag == "script":
            self.scripts.append((dict(attrs), []))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1][1].append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    (data,) = (parts for own, parts in reader.scripts if own.get("id") == "data")
    return reader, json.loads("".join(data))


def model():
    whole = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96))
    whole.add_module(NASTY, nn.Linear(96, 96))
    whole.add_module("act", nn.ReLU())
    whole.add_module("last", nn.Linear(96, 64))
    whole.add_module("head", nn.Linear(64, 10))
    return whole


@pytest.fixture(scope="module")
def explained():
    return explain(model(), torch.randn(256, 64), options=OPTIONS)


def test_the_page_has_all_of_the_report(explained, tmp_path):
    explained.save_html(tmp_path / "report.html")
    _, data = read(tmp_path / "report.html")
    assert [row["site"] for row in data["layers"]] == [d.site for d in explained.plan]
    for row, decision in zip(data["layers"], explained.plan, strict=True):
        assert (row["strategy"], row["reason"]) == (decision.strategy.value, decision.reason)
    (graph,) = explained.graphs
    assert [c["name"] for c in data["crossing"]] == [c.name for c in graph.crossing]
    assert sum(c["bytes"] for c in data["crossing"]) == data["held"] == explained.held_bytes
    for stage, name in (("before", "joint.before"), ("after", "joint.after")):
        nodes = data["graphs"][0][stage]
        assert [n[0] for n in nodes] == [n.name for n in graph.stages[name].nodes]
        for number, node in enumerate(nodes):
            assert all(place < number for place in node[7])


def test_names_cannot_break_out_of_the_data(explained, tmp_path):
    assert any("<b>" in d.site for d in explained.plan)
    explained.save_html(tmp_path / "report.html")
    reader, data = read(tmp_path / "report.html")
    assert "b" not in {tag for tag, _ in reader.tags}
    assert len([tag for tag, _ in reader.tags if tag == "script"]) == 2
    assert any("<b>" in row["site"] for row in data["layers"])


def test_the_page_needs_nothing_from_elsewhere(explained, tmp_path):
    explained.save_html(tmp_path / "report.html")
    reader, _ = read(tmp_path / "report.html")
    links = [own.get(key) for _, own in reader.tags for key in ("src", "href")]
    assert {link for link in links if link} == {"data:,"}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(", text)


def test_a_layers_kept_input_is_what_crosses_of_it(explained):
    (graph,) = explained.graphs
    kept = {row["site"]: row["kept"] for row in page_data([graph])["layers"]}
    assert kept["last"]  # of a ReLU, which its own backward wants, too
    assert kept["last"] in {c.bytes for c in graph.crossing}


def test_errors_are_the_chosen_strategys(explained):
    d = explained.plan["last"]
    gx = gx_variant(d.gx_bits, d.per_channel)
    names = [gw_variant(d.strategy, rows, d.per_channel) for rows in ("batch", "consecutive")]
    measures = {name: Measure(0.25, 0.9) for name in names}
    layer = LayerProfile(64, 96, 256, "float32", 1, {gx: Measure(0.5, 0.8)}, measures, None, None)
    profile = Profile(8, {"last": layer, "head": layer})
    errors = {
        row["site"]: row["errors"] for row in page_data(explained.graphs, None, profile)["layers"]
    }
    assert errors["last"] == {"gx": 0.5, "gw": 0.25}
    assert errors["head"] == errors["0"] == {}


def test_held_bytes_rise_and_fall_to_nothing(explained):
    timeline = held_over_step(explained.graphs)
    ats = [p.at for p in timeline.points]
    assert ats == sorted(set(ats))
    assert (ats[0], 0.0 < timeline.turn < 1.0) == (0.0, True)
    turn = [p for p in timeline.points if p.at <= timeline.turn]
    rising = [p.stored for p in turn]
    assert rising == sorted(rising)
    assert ats[-1] <= 1.0
    assert (timeline.points[-1].stored, timeline.points[-1].uncompressed) == (0, 0)
    before = sum(c.bytes_before for graph in explained.graphs for c in graph.crossing)
    assert max(p.stored for p in timeline.points) == explained.held_bytes
    assert max(p.uncompressed for p in timeline.points) == before


def test_forwards_run_in_order_and_backwards_the_other_way(explained):
    (graph,) = explained.graphs
    twice = held_over_step([graph, graph])
    once = held_over_step([graph])
    assert max(p.stored for p in twice.points) == 2 * explained.held_bytes
    middle = [p.stored for p in twice.points if p.at <= twice.turn / 2]
    assert max(middle) <= max(p.stored for p in once.points) < max(p.stored for p in twice.points)


def test_timelines_side_by_side_turn_at_one_place(explained):
    own = held_over_step(explained.graphs)
    moved = held_over_step(explained.graphs, turn=0.5)
    assert moved.turn == 0.5 != own.turn
    assert [p.stored for p in moved.points] == [p.stored for p in own.points]
    sides = [[p.at <= timeline.turn for p in timeline.points] for timeline in (own, moved)]
    assert sides[0] == sides[1]
    assert all(0 <= p.at <= 1 for p in moved.points)


def test_stock_and_its_flag_lie_beside(tmp_path):
    compared = Compared()

    def backend(gm, inputs):
        recorder = compared.recorder(gm, inputs)
        return hot(gm, inputs, options=OPTIONS, recorder=recorder, inner_compile=run_uncompiled)

    step = torch.compile(model(), backend=backend)
    step(torch.randn(256, 64)).square().mean().backward()
    torch._dynamo.reset()
    save_page(tmp_path / "report.html", compared.graphs, stock=compared.stock)
    _, data = read(tmp_path / "report.html")
    assert list(data["stock"]) == ["exact", "exact+recompute"]
    most = [max(held for _, held in points) for points in data["stock"].values()]
    assert most[0] > most[1] > data["held"]
    assert all(points[-1][1] == 0 for points in data["stock"].values())


def test_a_notebook_shows_the_tables(explained):
    shown = html.unescape(explained._repr_html_())
    assert shown.startswith("<pre")
    assert all(d.site in shown for d in explained.plan)
    assert "<b>" not in explained._repr_html_().split(">", 1)[1].lower()  # names are escaped


def test_a_report_without_graphs_says_so(tmp_path):
    with pytest.raises(ValueError, match="a report without its graphs"):
        save_page(tmp_path / "report.html", [GraphReport(NO_PLAN, ())])


def test_nothing_compiled_is_a_page_too(tmp_path):
    save_page(tmp_path / "report.html", [])
    _, data = read(tmp_path / "report.html")
    assert (data["layers"], data["crossing"], data["held"]) == ([], [], 0)


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


CLICKS = """
const said = {errors: []};
window.addEventListener("error", event => said.errors.push(event.message));
window.addEventListener("load", () => {
  const all = (id, what) => [...document.querySelectorAll(`#${id} ${what}`)];
  const texts = row => [...row.cells].map(cell => cell.textContent);
  const rows = id => all(id, "tbody tr").map(texts);
  const click = (id, head) => all(id, "th button").find(b => b.textContent === head).click();
  said.layers = rows("layers");
  click("layers", "layer"); said.byName = rows("layers");
  click("layers", "gain"); said.byGain = rows("layers");
  document.querySelector("#layers tbody tr").click();
  said.drawn = ["before", "after"].map(id => all(id, "g").length);
  document.getElementById("which").value = "exact";
  document.getElementById("which").onchange(); said.exact = rows("layers");
  document.getElementById("fold").click(); said.crossing = rows("crossing");
  const last = all("layer", "option").find(option => option.textContent.endsWith("last"));
  document.getElementById("layer").value = last.value;
  document.getElementById("layer").onchange();
  said.last = ["before", "after"].map(id => document.getElementById(id).textContent);
  const box = document.getElementById("after").getAttribute("viewBox");
  document.getElementById("closer").click();
  said.zoomed = box !== document.getElementById("after").getAttribute("viewBox");
  said.glance = document.getElementById("glance").textContent;
  said.curves = all("timeline", ".curve").length;
  said.legends = all("timeline", ".legend").map(text => text.textContent);
  said.sideways = document.documentElement.scrollWidth - window.innerWidth;
  said.measured = document.getElementById("measured")?.textContent;
  document.body.replaceChildren(JSON.stringify(said));
});
"""


def in_browser(page, tmp_path):
    """What the page is after a few clicks, and what the browser logged."""
    text = page.read_text(encoding="utf-8")
    copy = tmp_path / "clicked.html"
    copy.write_text(text.replace("<main>", f"<script>{CLICKS}</script><main>", 1), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += [
        "--window-size=500,900",
        f"--user-data-dir={tmp_path / 'browser'}",
        "--virtual-time-budget=5000",
    ]
    command = [browser(), *flags, "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body>(.*)</body>", done.stdout, re.S).group(1)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(body)), console


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="wants chromium")
def test_the_page_works_in_a_browser(tmp_path):
    report = memory_report(model(), torch.randn(256, 64), options=OPTIONS)
    report.save_html(tmp_path / "report.html")
    said, console = in_browser(tmp_path / "report.html", tmp_path)
    assert (said["errors"], console) == ([], [])
    sites = [d.site for graph in report.graphs for d in graph.plan]
    assert [row[0] for row in said["layers"]] == sites
    plain = [row[0] for row in said["byName"] if row[0].isalpha()]
    assert plain == sorted(plain) != [site for site in sites if site.isalpha()]
    gains = [float(row[3].rstrip("×")) for row in said["byGain"] if row[3]]
    assert gains == sorted(gains, reverse=True)
    assert {row[2] for row in said["exact"]} == {"exact"}
    assert all(row[-1] for row in said["exact"])
    assert len(said["crossing"]) == len(report.crossing)
    assert all(count > 2 for count in said["drawn"])
    assert "hot.scaled_int_mm" in said["last"][1]
    assert "hot." not in said["last"][0]
    assert said["zoomed"]
    assert said["sideways"] <= 0  # on a phone tables scroll inside their boxes
    assert NASTY in said["glance"]
    assert "exact+recompute" in said["measured"]
    assert said["curves"] == len(said["legends"]) == 3
    for name, text in zip(("exact", "exact+recompute", "hot"), said["legends"], strict=True):
        assert f" {name}, most " in text
    for text in (said["legends"][0], said["legends"][2]):  # the headline is the chart's
        assert text.split(", most ")[1] in said["glance"]


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="wants chromium")
def test_several_graphs_and_products_of_no_module_are_drawn(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 96))
            self.last = nn.Linear(96, 96)

        def forward(self, x):
            y = (x @ self.weight).tanh()
            torch._dynamo.graph_break()
            return self.last(y).relu()

    found = explain(Functional(), torch.randn(256, 64), options={"min_gain": 0, "keep_head": False})
    assert len(found.graphs) == 2
    found.save_html(tmp_path / "report.html")
    said, console = in_browser(tmp_path / "report.html", tmp_path)
    assert (said["errors"], console) == ([], [])
    assert [row[0] for row in said["layers"]] == ["weight", "last"]
    assert all(count > 2 for count in said["drawn"])


@pytest.mark.slow
def test_the_page_of_a_vit_b_weighs_under_two_megabytes(tmp_path):
    timm = pytest.importorskip("timm")
    vit = timm.create_model("vit_base_patch16_224")
    explain(vit, torch.randn(2, 3, 224, 224)).save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2e6
