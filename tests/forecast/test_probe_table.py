"""The measured table of the probe, and its comparison with training."""

import json

import pytest

import probe_kappa
from narrowgauge.forecast import scheme
from narrowgauge.forecast.hints import spreads
from probe_kappa import TABLE, compared, kappa


def test_every_recipe_of_the_table_is_a_scheme_with_a_kappa():
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = compared(table)
    assert {row["scheme"] for row in rows} == set(table["recipes"])
    for row in rows:
        assert scheme(row["scheme"]).recipe.is_narrow
        assert row["factor"] >= 1
    assert table["spread"] == probe_kappa.spreads(rows)  # which `predict --probe` counts with
    assert spreads() == {"forward": 0.35, "backward": 0.197}


def test_kappa_is_the_gap_at_a_hundred_tokens_per_parameter():
    forward, points, is_forward = kappa("nvfp4-forward")
    assert (points, is_forward) == (22, True)
    assert forward == pytest.approx(1.83, abs=0.01)
    backward, _, is_forward = kappa("nvfp4-eden-backward")
    assert not is_forward
    assert backward == pytest.approx(0.215, abs=0.001)


def test_a_forecast_leaves_its_own_scheme_out():
    figures = {
        "gradient_bias": {"mean": 0.0},
        "noise_ratio": {"mean": None},
        "gradient_cosine": {"mean": 0.9},
    }
    names = ("nvfp4-forward", "nvfp4-square-forward")
    x = dict(zip(names, (0.01, 0.02), strict=True))
    recipes = {name: figures | {"loss_increase": {"mean": x[name]}} for name in names}
    first, second = compared({"recipes": recipes})
    assert first["forecast"] == pytest.approx(0.01 * kappa(names[1])[0] / 0.02)
    assert second["forecast"] == pytest.approx(0.02 * kappa(names[0])[0] / 0.01)
