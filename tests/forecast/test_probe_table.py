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
