"""What a run measured of itself: probe and costs, memory, layers of the first step, times of a step."""

import json
import math

import pytest

from narrowgauge.system.t_interval import Interval
from narrowgauge.trainer.laboratory.probe import _cell as cli_cell
from narrowgauge.trainer.report import read_run, render_report

PROBE = {
    "step": 60,
    "recipes": {
        "mxfp4<": {
            "loss_increase": {"mean": 0.004, "low": 0.003, "high": 0.005},
            "noise_ratio": {"mean": None, "low": None, "high": None},
        }
    },
}
LAYERS = [
    {"layer": layer, "place": place, "cost": cost, "unit": "nats" if place == "fprop.x" else "share"}
    for layer, place, cost in (
        ("head", "fprop.x", 0.027),
        ("head", "dgrad.dy", 0.4),
        ("blocks.0.down", "fprop.x", -1e-6),
        ("blocks.0.down", "dgrad.dy", 3e-7),
        ("blocks.1.down", "fprop.x", 1e-3),
    )
]
COSTS = {
    "step": 60,
    "to": "mxfp4",
    "layers": LAYERS,
    "worst": ["head.fprop.x"],
    "worst_backward": ["head.dgrad.dy"],
}
TITLE = "Which number hurts?"


@pytest.fixture
def page(tmp_path):
    """A function that leaves JSON in a run directory without a step, and renders its page."""
    (tmp_path / "config.toml").write_text('[recipe]\nname = "bf16"\n')

    def render(**files):
        for name, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / f"{name}.json").write_text(text)
        return render_report([read_run(tmp_path)])

    return render


def test_probe_and_costs_are_shown(page):
    html = page(probe=PROBE, sensitivity=COSTS)
    for words in (
        TITLE,
        "mxfp4&lt;",
        "0.00400 &#177; 0.00100",
        '<td class="number cost-6">2.7e-02*</td>',
        '<td class="number cost-6">4.0e-01*</td>',  # the darkest of its unit
        '<td class="number cost-0">3.0e-07</td>',
        '<td class="number cost-0">-1.0e-06</td>',
        "Worst forward: head.fprop.x. Worst backward: head.dgrad.dy.",
    ):
        assert words in html
    forked = [line | {"unit": "nats"} for line in LAYERS]
    html = page(sensitivity=COSTS | {"layers": forked, "forks": "nats at the end of 20 steps"})
    assert "after step 60: nats at the end of 20 steps. Worst" in html
    assert '<td class="number cost-6">2.7e-02*</td>' not in html, "0.4 nats of dgrad.dy are the darkest"


def test_what_is_not_finite_is_not_shown_as_if_it_had_not_been_measured(page):
    none, one = (dict.fromkeys(("mean", "low", "high"), value) for value in (None, 1.0))
    lost = dict.fromkeys(("loss_increase", "gradient_cosine", "effective_bits"), none)
    exact = {"loss_increase": one, "gradient_cosine": one, "effective_bits": none, "noise_ratio": none}
    html = page(probe={"step": 1, "recipes": {"lost": lost, "exact": exact}})
    cells = {n: html.partition(f'scope="row">{n}')[2].partition("</tr>")[0] for n in ("lost", "exact")}
    assert [cells[name].count("not finite") for name in cells] == [3, 0]
    assert ">exact</td>" in cells["exact"]
    assert ">no noise</td>" in cells["exact"]
    assert cli_cell(Interval(math.inf, math.nan, math.nan), ".4f", "") == "not finite"


def test_nothing_is_shown_of_what_is_not_there_or_damaged_or_of_another_definition(page):
    assert TITLE not in page()
    for broken in ("", "[]", '{"recipes": 3, "layers": {}}', '{"layers": [{"cost": "x"}]}', "[" * 9999):
        assert TITLE not in page(probe=broken, sensitivity=broken)
    unitless = [{key: value for key, value in line.items() if key != "unit"} for line in LAYERS]
    assert TITLE not in page(sensitivity=COSTS | {"layers": unitless})


MEMORY = {"step": 1, "bytes": {"weights": 3 * 2**20, "m": 2**20}, "host_bytes": {}, "peak": 2**22}
AUDIT = [
    {"layer": "a", "cast": "e4m3 x e4m3", "calls": 2, "gradient": True, "note": ""},
    {"layer": "b<", "cast": None, "calls": None, "gradient": None, "note": "not converted: <why>"},
]


#: The title of a section, its event, and what it draws.
SECTIONS = [
    ("Memory</h2>", {"event": "memory", **MEMORY, "parameters": 2**18, "expected": {"peak": 2**23}},
     ['style="width:37.500%"', 'data-text="fp8, weights: 3.0 MiB (12.00)"', 'style="left:100.000%"']),
    ("The linear layers", {"event": "audit", "step": 1, "layers": AUDIT},
     [" in the first step: 2, 1 with a note", "<code>b&lt;</code>", "<td>e4m3 x e4m3</td><td>2</td>",
      "<td>-</td><td>-</td><td>-</td><td>not converted: &lt;why&gt;</td>"]),
    ("Step time</h2>",
     {"event": "step time", "step": 5, "ms": {"gemm": 30.0, "idle": 10}, "floor_ms": {"gemm": 20}},
     ['style="width:75.000%"', "fp8, floor, gemm: 20 ms"]),
]  # fmt: skip


@pytest.mark.parametrize(("section", "event", "words"), SECTIONS, ids=["memory", "audit", "step time"])
def test_a_section_is_drawn_to_scale_or_left_out(make_run, section, event, words):
    path = make_run()
    assert section not in render_report([read_run(path)])
    make_run.append(path, json.dumps(event) + "\n")
    html = render_report([read_run(path)]).partition(section)[2]
    assert all(word in html for word in words)
