"""A comparison of eight recipes, as a user makes it and looks at it: nothing of it is made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.browser import dump, needs_browser, said_by, without_policy

RECIPES = ("bf16", "fp8", "fp8-delayed", "mxfp8", "mxfp4", "nvfp4", "fp4", "msamp-o2")

SMALL = "--model.layers 1 --model.dim 64 --model.ffn_dim 64 --data.sequence_length 64 --steps 30"

CLICK = """
const say = {};
const charts = [...document.querySelectorAll(".chart")];
const plot = (title) =>
  charts.find((c) => c.querySelector("h3")?.textContent === title).querySelector(".plot");
const last = (title) => {
  plot(title).focus();
  plot(title).dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
  return plot(title).querySelector(".readout").innerText.split(/\\s+/);
};
const set = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input", { bubbles: true }));
};
set("smooth", 0);
say.train = last("Train loss");
say.validation = last("Validation loss");
const button = document.querySelectorAll(".legend button")[4];
button.click();
say.pressed = button.getAttribute("aria-pressed");
say.without = last("Validation loss");
button.click();
say.again = last("Validation loss");
document.querySelector("input[value=seconds]").click();
say.seconds = last("Train loss");
const runs = document.getElementById("heat-run");
say.runs = [...runs.options].map((option) => option.textContent);
set("heat-run", say.runs.findIndex((name) => name.includes("mxfp4")));
set("heat-gauge", "underflow");
set("heat-step", 0);
document.querySelector(".heat tbody tr td:not([hidden])").click();
say.cell = document.getElementById("heat-said").textContent;
say.step = document.getElementById("heat-step-says").textContent;
document.title = JSON.stringify(say);
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(readout):
    """Numbers by recipe, of the words of a readout: '1.02 M tokens bf16 4.31 fp8 4.35 ...'."""
    return {name: float(readout[readout.index(name) + 1]) for name in RECIPES if name in readout}


@pytest.mark.tier("thorough")
@needs_browser
def test_a_comparison_of_eight_recipes(tmp_path):
    command = [sys.executable, "-m", "narrowgauge", "compare", "--recipes", ",".join(RECIPES), *SMALL.split()]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = Path(tmp_path / "out" / "report.html")
    assert page.stat().st_size < 5e6
    _, complaints = dump(page, tmp_path / "profile", "--window-size=1280,2000")
    assert complaints == []
    html = without_policy(page.read_text())
    copy = tmp_path / "copy.html"
    copy.write_text(html.replace("</body>", f"<script>{CLICK}</script></body>"))
    dom, complaints = dump(copy, tmp_path / "profile", "--window-size=1280,2000")
    assert complaints == []
    said = said_by(dom)

    metrics = {r: lines(tmp_path / "out" / r / "metrics.jsonl") for r in RECIPES}
    train = {r: [line["loss"] for line in metrics[r] if "loss" in line][-1] for r in RECIPES}
    validation = {r: [line["val_loss"] for line in metrics[r] if "val_loss" in line][-1] for r in RECIPES}
    assert values(said["train"]) == pytest.approx(train, abs=6e-5)
    assert values(said["validation"]) == pytest.approx(validation, abs=6e-5)
    assert said["pressed"] == "false"
    assert values(said["without"]).keys() == set(RECIPES) - {RECIPES[4]}
    assert said["again"] == said["validation"]
    assert said["train"][1:3] == ["k", "tokens"]
    assert said["seconds"][2:4] == ["of", "training"]

    assert len(said["runs"]) == len(RECIPES)
    first = lines(tmp_path / "out" / "mxfp4" / "gauges.jsonl")
    layer, _, rest = said["cell"].partition(", ")
    place = rest.partition(" (")[0]
    found = next(
        line
        for line in first
        if (line["layer"], line["place"], str(line["step"])) == (layer, place, said["step"])
    )
    shown = float(said["cell"].rpartition("underflow ")[2].removesuffix(" %"))
    assert shown == pytest.approx(100 * found["underflow"], rel=0.01)
