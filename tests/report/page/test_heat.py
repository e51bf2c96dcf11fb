"""The map of gauges and the bars: real readings arrive on the page, and odd ones do no harm."""

import json

import pytest
import torch

from narrowgauge.quantization import make_cast, quantize
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.report.page.audit import audit
from narrowgauge.report.page.gauges import heat_data
from narrowgauge.report.page.memory import memory
from narrowgauge.report.page.page import render_report
from narrowgauge.report.page.step_time import step_time
from narrowgauge.report.read.run import read_run


def reading(step, layer, place, seed=0, name="mxfp4"):
    torch.manual_seed(seed)
    x, cast = torch.randn(64, 96), make_cast(name)
    vector = gauge_operand(x, quantize(x, cast, -1).dequantize(), cast, -1)
    return {
        "step": step,
        "layer": layer,
        "place": place,
        "cast": name,
        **figures(vector.tolist(), cast.element),
    }


def run_with(make_run, lines, name="run"):
    path = make_run(name, steps=20)
    (path / "gauges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path)


def test_what_was_read_lies_at_its_step_layer_and_place(make_run):
    lines = [reading(s, la, "fprop.x", 10 * s + i) for s in (1, 2) for i, la in enumerate("ab")]
    (data,) = heat_data([run_with(make_run, lines)])["runs"]
    assert (data["steps"], data["layers"], data["places"]) == ([1, 2], ["a", "b"], ["fprop.x"])
    found = data["values"]["sqnr"]["fprop.x"]
    assert found == [[pytest.approx(lines[2 * s + i]["sqnr_db"], rel=6e-3) for i in (0, 1)] for s in (0, 1)]
    assert data["values"]["underflow"]["fprop.x"][1][1] == pytest.approx(
        100 * lines[3]["underflow"], rel=6e-3
    )
    assert [h["at"] for h in data["histograms"]] == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert data["values"]["unlike"] == {}, "no product was read"


def test_odd_readings_do_no_harm(make_run):
    odd = [
        {"histogram": {"element": "e2m1"}, "amax": "x", "scales": [0, None], "rms": 0, "sqnr_db": "loud"},
        {"histogram": {"element": "<b>", "per_octave": 1}, "amax": [0, 0, 0], "mean_error": []},
    ]
    lines = [{"step": 1, "layer": f"l{i}", "place": "m", **values} for i, values in enumerate(odd)]
    data = heat_data([run_with(make_run, lines)])
    assert data["runs"][0]["histograms"] == []
    json.dumps(data, allow_nan=False)


@pytest.mark.tier("thorough")
def test_a_very_large_model_fits_on_the_page(make_run):
    one = reading(1, "a", "fprop.x")
    lines = [{**one, "step": s, "layer": f"l{i}", "place": p}
             for s in range(5) for i in range(150) for p in ("fprop.x", "wgrad.dy", "dgrad.w")]  # fmt: skip
    runs = [run_with(make_run, lines, f"r{i}") for i in range(4)]
    assert len(json.dumps(heat_data(runs))) < 3_000_000
    assert heat_data(runs)["runs"][0]["steps"][-1] == 4


def test_memory_is_drawn_to_scale(make_run):
    path = make_run()
    event = {"event": "memory", "step": 1, "bytes": {"weights": 3 * 2**20, "m": 2**20}, "host_bytes": {},
             "peak": 2**22, "parameters": 2**18, "expected": {"peak": 2**23}}  # fmt: skip
    make_run.append(path, json.dumps(event) + "\n")
    html = memory([read_run(path)])
    assert 'style="width:37.500%"' in html
    assert 'data-text="fp8, weights: 3.0 MiB, 12.00 bytes a parameter"' in html
    assert 'class="mark" style="left:100.000%"' in html


def test_the_layers_of_the_first_step_are_a_table_with_the_unusual_first(make_run):
    path = make_run()
    assert audit([read_run(path)]) == ""
    layers = [
        {"layer": "a", "cast": "e4m3 x e4m3", "calls": 2, "gradient": True, "note": ""},
        {"layer": "b<", "cast": None, "calls": None, "gradient": None, "note": "not converted: <why>"},
        "odd",
    ]
    make_run.append(path, json.dumps({"event": "audit", "step": 1, "layers": layers}) + "\n")
    html = audit([read_run(path)])
    assert "The linear layers in the first step: 2, 1 with a note" in html
    assert html.index("<code>b&lt;</code>") < html.index("<code>a</code>")
    assert "<td>-</td><td>-</td><td>-</td><td>not converted: &lt;why&gt;</td>" in html
    assert "<td>e4m3 x e4m3</td><td>2</td><td>yes</td><td></td>" in html
    assert html in render_report([read_run(path)])


def test_step_time_stands_beside_its_floor_or_is_left_out(make_run):
    path = make_run()
    assert step_time([read_run(path)]) == ""
    event = {"event": "step time", "step": 5, "ms": {"gemm": 30.0, "idle": 10}, "floor_ms": {"gemm": 20}}
    make_run.append(path, json.dumps(event) + "\n")
    html = step_time([read_run(path)])
    assert 'style="width:75.000%"' in html
    assert "fp8, floor, gemm: 20 ms" in html
