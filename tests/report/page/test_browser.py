"""The page in a real browser: its script runs under its own policy, and the controls do what they say."""

import json
import re
from html import escape

import pytest
import torch

from narrowgauge.quantization import cast, quantize
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.report import write_report
from support.browser import dump, needs_browser, said_by, without_policy

pytestmark = needs_browser

ACT = """
const say = {};
const plots = () => [...document.querySelectorAll(".chart")].filter((c) => !c.hidden);
const line = (chart, run) => plots()[chart].querySelector(`.run${run} .line`)?.getAttribute("d") ?? null;
const set = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input", { bubbles: true }));
};
const plot = plots()[0].querySelector(".plot");
say.titles = plots().map((c) => c.querySelector("h3").textContent);
say.before = line(0, 1) !== null;
const button = document.querySelectorAll(".legend button")[1];
button.click();
say.hidden = [line(0, 1), button.getAttribute("aria-pressed")];
button.click();
say.back = [line(0, 1) !== null, button.getAttribute("aria-pressed")];
const rough = line(2, 0);
set("smooth", 15);
say.smoother = line(2, 0) !== rough;
set("smooth", 0);
for (const axis of ["seconds", "step"]) document.querySelector(`input[value=${axis}]`).click();
say.subtitle = plots()[0].querySelector(".heading .muted").textContent;
document.getElementById("log").click();
set("from", 50);
say.holes = document.querySelector(".charts").innerHTML.includes("NaN");
plot.focus();
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
say.readout = plot.querySelector(".readout").innerText;
say.crosses = [...document.querySelectorAll(".cross")].filter((c) => c.children.length).length;
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
say.silent = plot.querySelector(".readout").hidden;
say.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = JSON.stringify(say);
"""


@pytest.fixture
def five(make_run):
    recipes = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    return [make_run(name, recipe=name, worse=0.05 * i, steps=300) for i, name in enumerate(recipes)]


def test_the_script_draws_under_the_policy_of_the_page(five, make_run, tmp_path):
    lost = make_run("lost", steps=100)
    make_run.append(lost, '{"step": 101, "loss": NaN, "tokens": 6619136}\n{"step": 102, "loss": null}\n')
    page = write_report([*five, lost], tmp_path / "report.html")
    dom, complaints = dump(page, tmp_path / "profile", "--window-size=1280,2000")
    assert complaints == []
    charts = dom[dom.index('<div class="charts" id="charts">') : dom.index("What the models write")]
    assert len(re.findall(r'<path d="M[^"]+" class="line"', charts)) >= 5 * 6 + 5 + 5
    assert len(set(re.findall(r'stroke-dasharray="([^"]*)"', charts))) >= 6, "not by colour alone"
    assert "NaN" not in charts
    assert "undefined" not in charts


def test_the_controls_do_what_they_say(five, tmp_path):
    page = write_report(five, tmp_path / "report.html")
    html = without_policy(page.read_text())
    page.write_text(html.replace("</body>", f"<script>{ACT}</script></body>"))
    dom, complaints = dump(page, tmp_path / "profile", "--window-size=1280,2000")
    assert complaints == []
    said = said_by(dom)
    titles = "Validation loss, Validation gap to bf16, Train loss, Train gap to bf16, Events, Gradient norm"
    assert said.pop("titles") == [*titles.split(", "), "Learning rate", "Tokens per second"]
    readout = said.pop("readout").split()
    assert readout[:2] == ["300", "steps"]
    assert readout[2:12:2] == ["bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"]
    assert said == {
        "before": True,
        "hidden": [None, "false"],
        "back": [True, "true"],
        "smoother": True,
        "subtitle": "nats a token, across steps",
        "holes": False,
        "crosses": 8,
        "silent": True,
        "wide": 0,
    }


LOOK = """
const doc = document.querySelector("iframe").contentDocument, say = {};
const id = (name) => doc.getElementById(name);
const set = (name, value) => {
  id(name).value = value;
  id(name).dispatchEvent(new Event("input", { bubbles: true }));
};
const cell = (row, column) => doc.querySelectorAll(".heat tbody tr")[row].cells[column + 1];
say.width = [doc.defaultView.innerWidth, doc.documentElement.scrollWidth - doc.documentElement.clientWidth];
say.gauges = [...id("heat-gauge").options].map((option) => option.value);
say.noisy = id("heat-said").textContent;
set("heat-gauge", "underflow");
set("heat-step", 0);
say.first = [id("heat-step-says").textContent, cell(0, 0).textContent];
set("heat-step", 1);
say.second = [id("heat-step-says").textContent, cell(0, 0).textContent];
cell(1, 0).click();
say.clicked = id("heat-said").textContent;
cell(1, 0).dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
say.moved = id("heat-said").textContent;
const plot = doc.querySelector("#histogram .plot");
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
say.zero = plot.querySelector(".readout").innerText.split(/\\s+/);
say.bars = [...doc.querySelectorAll("#histogram rect.after")].length > 2;
document.title = JSON.stringify(say);
"""


def test_no_number_beside_a_chart_is_cut_off(make_run, tmp_path):
    """A gap of -0.005 % whose sign lies outside the picture reads as its opposite."""
    runs = [make_run("bf16", recipe="bf16", steps=40), make_run("fp8", steps=40)]
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line.update({key: line[key] * (1 - 2e-6 * line["step"]) for key in line if key.endswith("loss")})
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(runs, tmp_path / "report.html")
    script = """
      const numbers = [...document.querySelectorAll(".chart .grid text[text-anchor=end]")];
      document.title = JSON.stringify({
        first: Math.min(...numbers.map((text) => text.getBBox().x)),
        texts: numbers.map((text) => text.textContent),
      });
    """
    html = without_policy(page.read_text()).replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "acting.html").write_text(html)
    said = said_by(dump(tmp_path / "acting.html", tmp_path / "profile", "--window-size=1280,2000")[0])
    assert any(re.fullmatch(r"-0\.00\d+ %", text) for text in said["texts"]), said
    assert said["first"] >= 0


def test_the_map_of_gauges_on_a_phone(make_run, tmp_path):
    path, mx = make_run("run", steps=100), cast("mxfp4")
    lines = []
    for step in (50, 100):
        for layer in ("a", "b"):
            x = torch.randn(64, 96, generator=torch.Generator().manual_seed(step + ord(layer)))
            vector = gauge_operand(x, quantize(x, mx, -1).dequantize(), mx, -1).tolist()
            lines.append(
                {
                    "step": step,
                    "layer": layer,
                    "place": "fprop.x",
                    "cast": "mxfp4",
                    **figures(vector, mx.element),
                }
            )
    (path / "gauges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = without_policy(write_report([path], tmp_path / "report.html").read_text())
    frame = f'<iframe width="375" height="800" style="border:0" srcdoc="{escape(html)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f"<title></title>{frame}<script>onload = () => {{{LOOK}}}</script>")
    dom, complaints = dump(outer, tmp_path / "profile")
    assert complaints == []
    said = said_by(dom)
    share = [f"{float(format(100 * line['underflow'], '.3g')):.4g}" for line in lines]
    assert said["width"] == [375, 0], "no scrolling to the side"
    assert {"sqnr", "underflow", "zeros", "largest", "clipped", "amax", "bias"} <= set(said["gauges"])
    assert "fprop.x (mxfp4): SQNR" in said["noisy"]
    assert said["first"] == ["50", share[0]]
    assert said["second"] == ["100", share[2]]
    assert said["clicked"] == f"b, fprop.x (mxfp4): underflow {share[3]} %"
    assert said["moved"] == f"a, fprop.x (mxfp4): underflow {share[2]} %"
    zeros = lines[2]["histogram"]["zeros"]
    assert said["zero"][0] == "zero"
    assert float(said["zero"][5]) == pytest.approx(100 * zeros[1] / (64 * 96), rel=0.35), "a sample"
    assert said["bars"]


COLOURS = """
const say = {};
const cells = [...document.querySelectorAll(".heat tbody td")];
say.shares = cells.map((cell) => Number(cell.style.getPropertyValue("--share")));
say.ends = ["low", "high"].map((end) => document.getElementById(`heat-${end}`).textContent);
say.about = document.getElementById("heat-about").textContent;
document.getElementById("heat-gauge").value = "unlike";
document.getElementById("heat-gauge").dispatchEvent(new Event("input", { bubbles: true }));
const products = [...document.querySelectorAll(".heat tbody td")].filter((cell) => cell.textContent);
say.products = products.map((cell) => Number(cell.style.getPropertyValue("--share")));
document.title = JSON.stringify(say);
"""


def test_a_map_of_bf16_has_next_to_no_colour(make_run, tmp_path):
    """A range that is fixed: 40 dB and more has no colour, on the map of a quiet format as well."""
    path = make_run("run", steps=100)
    quiet = {"step": 100, "place": "fprop.x", "cast": "bf16"}
    lines = [{**quiet, "layer": layer, "sqnr_db": db} for layer, db in (("a", 40.4), ("b", 50.7))]
    lines.append({**quiet, "layer": "c", "cast": "mxfp4", "sqnr_db": 17.5})
    lines.append({"step": 100, "layer": "a", "place": "fprop.y", "cosine": 0.999_998})

    def shown(name, kept):
        (path / "gauges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        page = tmp_path / f"{name}.html"
        html = without_policy(write_report([path], page).read_text())
        page.write_text(html.replace("</body>", f"<script>{COLOURS}</script></body>"))
        dom, complaints = dump(page, tmp_path / "profile")
        assert complaints == []
        return said_by(dom)

    alone, beside = shown("alone", [*lines[:2], lines[3]]), shown("beside", lines)
    assert alone["ends"] == beside["ends"] == ["40.0 dB and more", "10.0 dB"]
    assert max(alone["shares"]) == 0
    assert max(beside["shares"]) == pytest.approx(0.75), "17.5 dB is three quarters of the way from 40 to 10"
    assert max(alone["products"]) < 0.05
    assert "Orange is noisy" in alone["about"], "a colour, which is the same word in a light and a dark theme"
