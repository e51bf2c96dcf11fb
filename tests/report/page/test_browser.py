"""Pages in a real browser: scripts run under the page's policy, and the controls do what they say."""

import csv
import io
import re

import pytest
import torch

from narrowgauge.quantization import cast, quantize
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.trainer.laboratory.watch import LIVE, write_pages
from narrowgauge.trainer.report import write_report
from support.driver import driven, needs_driver

pytestmark = [needs_driver, pytest.mark.tier("thorough")]  # the other files read the same pages as text

TOOLS = """
const say = {}, all = (selector) => [...document.querySelectorAll(selector)];
const id = (name) => document.getElementById(name);
const set = (name, value) => {
  id(name).value = value;
  id(name).dispatchEvent(new Event("input", { bubbles: true }));
};
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const chart = (title) => all(".chart").find((c) => c.querySelector("h3")?.textContent === title);
const last = (title) => {
  const plot = chart(title).querySelector(".plot");
  plot.focus();
  press(plot, "End");
  return plot.querySelector(".readout").innerText.split(/\\s+/);
};
const line = (title, run) => chart(title).querySelector(`.run${run} .line`)?.getAttribute("d") ?? null;
const cell = (row, column) => all(".heat tbody tr")[row].cells[column + 1];
"""


@pytest.fixture(scope="module")
def browser():
    with driven() as window:
        yield window


@pytest.fixture
def window(browser):
    """The one window; whatever a test does in it, it has no complaint and nothing to scroll to the side."""
    yield browser
    assert browser.complaints() == []
    assert browser.js("return document.documentElement.scrollWidth - innerWidth") <= 0
    browser.looks()


def better(line, share):
    return {key: loss * (1 - share) for key, loss in line.items() if key.endswith("loss")}


def test_the_controls_of_the_charts(make_run, tmp_path, window):
    recipes = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    runs = [make_run(name, recipe=name, steps=100) for name in recipes]
    for i, run in enumerate(runs):  # gaps of some thousandths of a percent
        make_run.edit(run, lambda line, i=i: better(line, 2e-7 * i * line["step"]))
    make_run.append(runs[4], '{"step": 101, "loss": NaN, "tokens": 6619136}\n{"step": 102, "loss": null}\n')
    window.open(write_report(runs, tmp_path / "report.html").as_uri())
    said = window.js(f"""{TOOLS}
    say.titles = all(".chart").filter((c) => !c.hidden).map((c) => c.querySelector("h3").textContent);
    const dashes = all("#charts [stroke-dasharray]").map((e) => e.getAttribute("stroke-dasharray"));
    say.dashes = new Set(dashes).size;
    const numbers = all(".chart .grid text[text-anchor=end]");
    say.numbers = numbers.map((text) => [text.textContent, text.getBBox().x]);
    say.validation = last("Validation loss");
    const button = all(".legend button")[1], rough = line("Train loss", 0);
    button.click();
    say.hidden = [line("Train loss", 1), button.getAttribute("aria-pressed")];
    button.click();
    set("smooth", 15);
    say.smoother = line("Train loss", 0) !== rough;
    set("smooth", 0);
    say.train = last("Train loss");
    for (const axis of ["seconds", "step"]) document.querySelector(`input[value=${{axis}}]`).click();
    say.subtitle = chart("Train loss").querySelector(".heading .muted").textContent;
    id("log").click();
    set("from", 50);
    say.holes = /NaN|undefined/.test(id("charts").innerHTML);
    say.readout = last("Validation loss").slice(0, 2);
    press(chart("Validation loss").querySelector(".plot"), "Escape");
    say.silent = chart("Validation loss").querySelector(".readout").hidden;
    return say;""")
    titles = "Validation loss, Validation gap to bf16, Train loss, Train gap to bf16, Events, Gradient norm"
    assert said["titles"] == [*titles.split(", "), "Learning rate", "Tokens per second"]
    assert said["dashes"] >= 4, "not by colour alone"
    assert any(re.fullmatch(r"-0\.00\d+ %", text) for text, _ in said["numbers"]), said["numbers"]
    assert min(left for _, left in said["numbers"]) >= 0, "a gap whose sign is cut off reads as its opposite"
    for key, name in (("validation", "val_loss"), ("train", "loss")):
        shown = [float(said[key][said[key].index(recipe) + 1]) for recipe in recipes[:4]]
        ends = [[line[name] for line in make_run.records(run) if name in line][-1] for run in runs[:4]]
        assert shown == pytest.approx(ends, abs=6e-5)
    assert (said["hidden"], said["smoother"], said["holes"]) == ([None, "false"], True, False)
    assert (said["subtitle"], said["readout"]) == ("nats a token, across steps", ["102", "steps"])
    assert said["silent"]


def test_seeds_are_compared_in_pairs_and_plots_can_be_saved(make_run, tmp_path, window):
    """Two recipes of two seeds, whose luck differs more than the recipes do, and readings of two runs."""
    runs = make_run.seeds("bf16", [4.0, 5.0]) + make_run.seeds("mxfp4", [4.04, 5.1])
    for run, decibels in ((runs[0], [30.0, 20.0]), (runs[2], [18.5, 24.3, 9.0])):
        reading = {"step": 20, "place": "fprop.x", "cast": "mxfp4"}
        lines = [
            {**reading, "layer": layer, "sqnr_db": db} for layer, db in zip("abc", decibels, strict=False)
        ]
        make_run.write(run, lines, "gauges.jsonl")
    window.open(write_report(runs, tmp_path / "report.html").as_uri())
    said = window.js(f"""{TOOLS}
    const blobs = [], names = [];
    URL.createObjectURL = (blob) => {{ blobs.push(blob); return "blob:none"; }};
    HTMLAnchorElement.prototype.click = function () {{ names.push(this.download); }};
    const save = (part, kind) =>
      [...part.querySelectorAll(".save button")].find((button) => button.textContent === kind).click();
    const named = (list, name) => [...id(list).options].find((o) => o.textContent === name).value;
    say.legend = all(".legend button").map((b) => b.textContent);
    set("smooth", 20);
    save(chart("Validation gap to bf16"), "CSV");
    save(chart("Train loss"), "CSV");
    save(chart("Train gap to bf16"), "SVG");
    set("heat-run", named("heat-run", "mxfp4"));
    set("heat-gauge", "sqnr");
    set("heat-less", named("heat-less", "bf16"));
    const cells = all(".heat tbody td").filter((td) => !td.hidden);
    say.cells = cells.map((td) => [td.textContent, td.classList.contains("cool")]);
    say.about = id("heat-about").textContent;
    return Promise.all(blobs.map((blob) => blob.text())).then((texts) => ({{ ...say, names, texts }}));""")
    assert said["legend"] == ["bf16", "mxfp4"], "a variant is one colour, whatever its seeds"
    names = ["validation-gap-to-bf16.csv", "train-loss.csv", "train-gap-to-bf16.svg"]
    assert said["names"] == names
    gap, loss = (list(csv.DictReader(io.StringIO(text))) for text in said["texts"][:2])
    assert [float(gap[-1][key]) for key in ("least", "val_gap", "greatest")] == pytest.approx(
        [1, 1.5, 2], abs=1e-3
    )
    found = {int(row["step"]): float(row["loss"]) for row in loss if row["run"] == "bf16-seed-1"}
    measured = {line["step"]: line["loss"] for line in make_run.records(runs[1]) if "loss" in line}
    assert found == pytest.approx(measured, rel=1e-5), "as measured, not as smoothed"
    assert said["texts"][2].startswith("<svg")
    assert not re.search(r"<path[^>]* class=", said["texts"][2]), "styled without the page"
    assert said["cells"] == [["-11.5", False], ["+4.3", True]], "what is noisier is orange, c has no partner"
    assert "SQNR of mxfp4 less that of bf16" in said["about"]


def test_the_map_of_gauges_on_a_phone(make_run, tmp_path, window):
    run, mx, lines = make_run("run", steps=100), cast("mxfp4"), []
    for step, layer in ((50, "a"), (50, "b"), (100, "a"), (100, "b")):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(step + ord(layer)))
        found = figures(gauge_operand(x, quantize(x, mx, -1).dequantize(), mx, -1).tolist(), mx.element)
        lines.append({"step": step, "layer": layer, "place": "fprop.x", "cast": "mxfp4", **found})
    quiet = {"step": 100, "layer": "c", "place": "fprop.x", "cast": "bf16", "sqnr_db": 40.4}
    make_run.write(run, [*lines, quiet], "gauges.jsonl")
    window.looks(width=375)
    window.open(write_report([run], tmp_path / "report.html").as_uri())
    said = window.js(f"""{TOOLS}
    say.gauges = [...id("heat-gauge").options].map((option) => option.value);
    say.ends = ["low", "high"].map((end) => id(`heat-${{end}}`).textContent);
    say.shares = [0, 1, 2].map((row) => Number(cell(row, 0).style.getPropertyValue("--share")));
    set("heat-gauge", "underflow");
    say.cells = [0, 1].map((step) => {{ set("heat-step", step); return cell(0, 0).textContent; }});
    cell(1, 0).click();
    say.clicked = id("heat-said").textContent;
    press(cell(1, 0), "ArrowUp");
    say.moved = id("heat-said").textContent;
    const plot = document.querySelector("#histogram .plot");
    press(plot, "Home");
    say.zero = plot.querySelector(".readout").innerText.split(/\\s+/);
    say.bars = all("#histogram rect.after").length;
    return say;""")
    share = [f"{float(format(100 * line['underflow'], '.3g')):.4g}" for line in lines]
    assert {"sqnr", "underflow", "zeros", "largest", "clipped", "amax", "bias"} <= set(said["gauges"])
    assert said["ends"] == ["40.0 dB and more", "10.0 dB"], "a fixed range"
    loud = [(40 - line["sqnr_db"]) / 30 for line in lines[2:]]
    assert said["shares"] == pytest.approx([*loud, 0], abs=0.01), "and no colour for a quiet format"
    assert said["cells"] == [share[0], share[2]]
    assert said["clicked"] == f"b, fprop.x (mxfp4): underflow {share[3]} %"
    assert said["moved"] == f"a, fprop.x (mxfp4): underflow {share[2]} %"
    zeros = 100 * lines[2]["histogram"]["zeros"][1] / (64 * 96)
    assert (said["zero"][0], float(said["zero"][5])) == ("zero", pytest.approx(zeros, rel=0.35)), "a sample"
    assert said["bars"] > 2


def test_a_live_page_loads_itself_again_and_keeps_the_readers_place(make_run, tmp_path, window):
    step = '{"step": %d, "loss": 3.0, "tokens": %d, "step_ms": 20.0, "tokens_per_s": 3100.0}\n'
    root = tmp_path / "runs" / "compared"
    make_run.plan(root, "bf16", "mxfp4", steps=60)
    runs = [make_run(f"compared/{name}", recipe=name, steps=60) for name in ("bf16", "mxfp4")]
    make_run.works(runs[1])
    write_pages([root], root / LIVE, is_live=True)
    window.looks(width=500, scheme="dark")
    window.open((root / LIVE).as_uri())
    assert window.js("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    window.js(f"""{TOOLS} set("smooth", 9); all("input[value=step]")[0].click();
    all("details")[0].open = true; all(".legend button")[1].click(); window.scrollTo(0, 500);""")
    place = f"""{TOOLS} return [id("smooth").value, all("details")[0].open,
    all("input[value=step]")[0].checked, all(".legend button").map((b) => b.getAttribute("aria-pressed")),
    Math.round(scrollY)]"""
    assert (before := window.js(place))[:4] == ["9", True, True, ["true", "false"]]
    make_run.append(runs[1], "".join(step % (i, 65_536 * i) for i in range(61, 81)))
    write_pages([root], root / LIVE, is_live=True)
    window.until(lambda: "80 of 60" in window.text(".standing"))
    assert "interim" in window.text(".standing")
    assert window.text("#live") == "live"
    assert window.js(place) == before, "the same choices, at the same place"
    make_run.ends(runs[1], "failed", "Diverged: 8 skipped steps in a row")
    write_pages([root], root / LIVE)
    window.until(lambda: "diverged" in window.text(".standing"))
    assert window.text("#live") == ""
