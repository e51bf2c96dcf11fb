"""Several seeds in a real browser: gaps in pairs, plots that are saved, the difference of two maps."""

import csv
import io
import json

import pytest

from narrowgauge.report import write_report
from support.browser import dump, needs_browser, said_by, without_policy

pytestmark = needs_browser

ACT = """
const say = {}, blobs = [], names = [];
URL.createObjectURL = (blob) => { blobs.push(blob); return "blob:none"; };
HTMLAnchorElement.prototype.click = function () { names.push(this.download); };
const chart = (title) =>
  [...document.querySelectorAll(".chart")].find((c) => c.querySelector("h3")?.textContent === title);
const save = (title, kind) => {
  const buttons = [...chart(title).querySelectorAll(".save button")];
  buttons.find((button) => button.textContent === kind).click();
};
const set = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input", { bubbles: true }));
};
const named = (id, name) =>
  [...document.getElementById(id).options].find((o) => o.textContent === name).value;
say.legend = [...document.querySelectorAll(".legend button")].map((b) => b.textContent);
set("smooth", 20);
save("Validation gap to bf16", "CSV");
save("Train loss", "CSV");
save("Train gap to bf16", "SVG");
set("heat-run", named("heat-run", "mxfp4"));
set("heat-gauge", "sqnr");
set("heat-less", named("heat-less", "bf16"));
say.options = [...document.getElementById("heat-less").options].map((o) => [o.textContent, o.disabled]);
const cells = [...document.querySelectorAll(".heat tbody td")].filter((td) => !td.hidden);
say.cells = cells.map((td) => [td.textContent, td.classList.contains("cool")]);
say.about = document.getElementById("heat-about").textContent;
document.querySelector(".ramp .save button").click();
Promise.all(blobs.map((blob) => blob.text())).then(([gap, loss, svg, map]) => {
  const picture = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  const paths = [...picture.querySelectorAll("path")];
  Object.assign(say, { names, gap, loss, map });
  say.svg = {
    tag: picture.tagName, words: [...picture.querySelectorAll("text")].map((t) => t.textContent),
    styled: paths.every((p) => p.getAttribute("stroke") && !p.hasAttribute("class")),
    lines: paths.filter((p) => p.getAttribute("stroke-width") === "1.8px").length,
  };
  document.title = JSON.stringify(say);
});
"""


def reading(layer, decibels):
    cast = {"step": 20, "layer": layer, "place": "fprop.x", "cast": "mxfp4"}
    return json.dumps({**cast, "sqnr_db": decibels, "underflow": 0.1}) + "\n"


@pytest.fixture
def seeds(make_run):
    """Two recipes of two seeds, whose luck differs more than the recipes do, and readings of two runs."""
    paths = []
    for seed in (0, 1):
        for recipe in ("bf16", "mxfp4"):
            name = recipe if seed == 0 else f"{recipe}-seed-{seed}"
            path = make_run(name, recipe=recipe, steps=20, worse=seed + 0.01 * (recipe == "mxfp4"))
            text = (path / "config.toml").read_text().replace("seed = 1\n", f"seed = {seed}\n")
            (path / "config.toml").write_text(text)
            paths.append(path)
    (paths[0] / "gauges.jsonl").write_text(reading("a", 30.0) + reading("b", 20.0))
    (paths[1] / "gauges.jsonl").write_text(reading("a", 18.5) + reading("b", 24.3) + reading("c", 9.0))
    return paths


def losses(path, key):
    lines = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return {line.get("tokens", 0): line[key] for line in lines if key in line}


def test_seeds_are_compared_in_pairs_and_plots_can_be_saved(seeds, tmp_path):
    page = write_report(seeds, tmp_path / "report.html")
    html = without_policy(page.read_text())
    page.write_text(html.replace("</body>", f"<script>{ACT}</script></body>"))
    dom, complaints = dump(page, tmp_path / "profile", "--window-size=1280,2000")
    assert complaints == []
    said = said_by(dom)
    assert said["legend"] == ["bf16", "mxfp4"], "a variant is one colour, whatever its seeds"

    rows = list(csv.DictReader(io.StringIO(said["gap"])))
    assert {row["run"] for row in rows} == {"mxfp4"}
    by_seed = [(losses(seeds[i], "val_loss"), losses(seeds[i + 1], "val_loss")) for i in (0, 2)]
    for row in rows:
        at = int(row["tokens"])
        gaps = [100 * (other[at] / base[at] - 1) for base, other in by_seed]
        assert float(row["val_gap"]) == pytest.approx(sum(gaps) / 2, abs=1e-3)
        assert [float(row[end]) for end in ("least", "greatest")] == pytest.approx(sorted(gaps), abs=1e-3)

    rows = list(csv.DictReader(io.StringIO(said["loss"])))
    assert list(rows[0]) == ["run", "step", "tokens", "seconds", "loss"]
    found = {int(row["tokens"]): float(row["loss"]) for row in rows if row["run"] == "bf16-seed-1"}
    assert found == pytest.approx(losses(seeds[2], "loss"), rel=1e-5), "as measured, not as smoothed"

    assert said["names"] == [
        *("validation-gap-to-bf16.csv", "train-loss.csv", "train-gap-to-bf16.svg"),
        "mxfp4-less-bf16-sqnr.csv",
    ]
    assert said["svg"]["tag"] == "svg"
    assert said["svg"]["words"][0].startswith("Train gap to bf16")
    assert said["svg"]["words"][-1] == "mxfp4"
    assert said["svg"]["styled"]
    assert said["svg"]["lines"] == 2, "the curve, and its key"

    assert said["options"] == [["nothing", False], ["bf16", False], ["mxfp4", True]]
    assert said["cells"] == [["-11.5", False], ["+4.3", True]], "what is noisier is orange, c has no partner"
    assert "SQNR of mxfp4 less that of bf16" in said["about"]
    assert [row["sqnr"] for row in csv.DictReader(io.StringIO(said["map"]))] == ["-11.5", "4.3"]
