"""The probe and the costs of a run on its page."""

import json
import math

import pytest

from narrowgauge.laboratory.probe import _cell as cli_cell
from narrowgauge.report import read_run, render_report
from narrowgauge.t_interval import Interval


@pytest.fixture
def run(tmp_path):
    """A run directory without a step, and a function that leaves JSON in it."""
    (tmp_path / "config.toml").write_text('[recipe]\nname = "bf16"\n')

    def page(**files):
        for name, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / f"{name}.json").write_text(text)
        return render_report([read_run(tmp_path)])

    return page


PROBE = {
    "step": 60,
    "recipes": {
        "mxfp4<": {
            "loss_increase": {"mean": 0.004, "low": 0.003, "high": 0.005},
            "noise_ratio": {"mean": None, "low": None, "high": None},
        }
    },
}
COSTS = {
    "step": 60,
    "to": "mxfp4",
    "layers": [
        {"layer": "head", "place": "fprop.x", "cost": 0.027, "unit": "nats"},
        {"layer": "head", "place": "dgrad.dy", "cost": 0.4, "unit": "share"},
        {"layer": "blocks.0.down", "place": "fprop.x", "cost": -1e-6, "unit": "nats"},
        {"layer": "blocks.0.down", "place": "dgrad.dy", "cost": 3e-7, "unit": "share"},
        {"layer": "blocks.1.down", "place": "fprop.x", "cost": 1e-3, "unit": "nats"},
    ],
    "worst": ["head.fprop.x"],
    "worst_backward": ["head.dgrad.dy"],
}


def test_both_are_shown(run):
    html = run(probe=PROBE, sensitivity=COSTS)
    assert "Which number hurts?" in html
    assert "mxfp4&lt;" in html
    assert "0.00400 &#177; 0.00100" in html
    assert '<td class="number cost-6">2.7e-02*</td>' in html
    assert '<td class="number cost-6">4.0e-01*</td>' in html  # the darkest of its unit
    assert '<td class="number cost-0">3.0e-07</td>' in html
    assert '<td class="number cost-0">-1.0e-06</td>' in html
    assert "Worst forward: head.fprop.x. Worst backward: head.dgrad.dy." in html
    forked = [line | {"unit": "nats"} for line in COSTS["layers"]]
    html = run(sensitivity=COSTS | {"layers": forked, "forks": "nats at the end of 20 steps"})
    assert "after step 60: nats at the end of 20 steps. Worst" in html
    assert '<td class="number cost-6">2.7e-02*</td>' not in html, "0.4 nats of dgrad.dy are the darkest"


def test_costs_without_a_unit_are_those_of_another_definition(run):
    lines = [{key: value for key, value in line.items() if key != "unit"} for line in COSTS["layers"]]
    assert "Which number hurts?" not in run(sensitivity=COSTS | {"layers": lines})


def test_what_is_not_finite_is_not_shown_as_if_it_had_not_been_measured(run):
    none = {"mean": None, "low": None, "high": None}
    one = {"mean": 1.0, "low": 1.0, "high": 1.0}
    lost = dict.fromkeys(("loss_increase", "gradient_cosine", "effective_bits"), none)
    exact = {"loss_increase": one, "gradient_cosine": one, "effective_bits": none, "noise_ratio": none}
    cells = run(probe={"step": 1, "recipes": {"lost": lost}}).partition('scope="row">lost')[2]
    assert cells.partition("</tr>")[0].count("not finite") == 3
    cells = run(probe={"step": 1, "recipes": {"exact": exact}}).partition('scope="row">exact')[2]
    assert "not finite" not in cells.partition("</tr>")[0]
    assert ">exact</td>" in cells
    assert ">no noise</td>" in cells
    assert cli_cell(Interval(math.inf, math.nan, math.nan), ".4f", "") == "not finite"


def test_nothing_is_shown_of_what_is_not_there_or_damaged(run):
    assert "Which number hurts?" not in run()
    for broken in (
        "",
        "[]",
        '{"recipes": 3, "layers": {}}',
        '{"recipes": {}, "layers": [{"cost": "x"}]}',
        "[" * 9999,
    ):
        assert "Which number hurts?" not in run(probe=broken, sensitivity=broken)
