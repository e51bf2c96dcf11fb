"""Gauges: the table of a run's last readings and the data of its map, which stay small and harmless."""

import json

import pytest
import torch

from narrowgauge.quantization import make_cast, quantize
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.trainer.report import render_report
from narrowgauge.trainer.report.page.measured import gauges, heat_data
from narrowgauge.trainer.report.read.run import read_run


def line(step, layer, place, **values):
    return {"step": step, "layer": layer, "place": place, "cast": "mxfp4", **values}


def operand(decibels, underflow=0.0, nonfinite=0.0):
    return {"sqnr_db": decibels, "underflow": underflow, "nonfinite": nonfinite}


def reading(step, layer, place, seed=0):
    """Real figures of a tensor of random numbers."""
    x, cast = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)), make_cast("mxfp4")
    vector = gauge_operand(x, quantize(x, cast, -1).dequantize(), cast, -1)
    return line(step, layer, place, **figures(vector.tolist(), cast.element))


@pytest.fixture
def with_lines(make_run):
    def do(lines, name="run", tail=""):
        path = make_run(name, steps=20)
        make_run.write(path, [dict(reversed(one.items())) for one in lines], "gauges.jsonl")  # in any order
        with (path / "gauges.jsonl").open("a") as file:
            file.write(tail)
        return read_run(path)

    return do


def rows(runs):
    """The title, and the rows by column, of the table of one run."""
    ((title, table),) = gauges(runs)
    return title, [dict(zip(table.head, row, strict=True)) for row in table.rows]


def test_the_last_step_is_shown_layer_by_layer(with_lines):
    run = with_lines(
        [
            line(50, "a", "fprop.x", **operand(9.0)),
            line(100, "a", "wgrad.dy", **operand(12.345, 0.04321)),
            line(100, "a", "fprop.x", **operand(18.5)),
            line(100, "a", "fprop.y", cosine=0.987654, sqnr_db=16.0),
            line(100, "<script>", "fprop.x", **operand(None, nonfinite=0.5)),
            line(100, "<script>", "wgrad.dy", **operand(31.0, 0.0001)),
            line(100, "<script>", "m", **operand(None)),
            line(100, "embedding", "weight", **operand(None)),
        ],
        tail='{"step": 150, "la',
    )
    title, found = rows([run])
    assert title == "run, step 100"
    script = {"layer": "<script>", "fprop.x": "not finite", "wgrad.dy": "31.0 dB, <0.1 %", "fprop.y": ""}
    assert sorted(found, key=str) == [
        script,
        {"layer": "a", "fprop.x": "18.5 dB", "wgrad.dy": "12.3 dB, 4.3 %", "fprop.y": "0.98765"},
    ]
    html = render_report([run])
    assert html.count("<script") == 2
    assert '<th scope="row">&lt;script&gt;</th><td class="number">not finite</td>' in html


def test_of_many_layers_the_noisiest_are_shown(with_lines):
    run = with_lines([line(1, f"blocks.{i}", "fprop.x", **operand(20 + (i * 37) % 300)) for i in range(300)])
    title, shown = rows([run])
    assert "the 100 noisiest of 300 layers" in title
    assert max(float(row["fprop.x"].split()[0]) for row in shown) == 119
    assert len(shown) == 100
    assert [int(row["layer"][7:]) for row in shown] == sorted(int(row["layer"][7:]) for row in shown)
    together = sum(len(table.rows) for _, table in gauges([run] * 8))
    assert together <= 4 * len(shown), "several runs share the room"


#: Of a run without readings: [training] compile, [gauges] every, and why there are none.
WITHOUT = [
    ("false", 0, "gauges.every = 0 switched them off; --gauges.every 100 reads every 100th"),
    ("false", 500, "gauges.every = 500, and step 200 was the last; besides every 500th step"),
    ("false", 100, "gauges.jsonl is missing or empty"),
    ("true", 0, "training.compile = true, and compiled code"),
]


@pytest.mark.parametrize(("compiled", "every", "words"), WITHOUT)
def test_a_run_without_readings_says_why(make_run, compiled, every, words):
    path = make_run()
    make_run.set(path, "compile = false", f"compile = {compiled}")
    make_run.set(path, "keep = 2\n", f"keep = 2\n[gauges]\nevery = {every}\n")
    assert f"<p>No gauges: {words}" in render_report([read_run(path)])


def test_what_was_read_lies_at_its_step_layer_and_place_of_the_map(with_lines):
    lines = [reading(s, la, "fprop.x", 10 * s + i) for s in (1, 2) for i, la in enumerate("ab")]
    (data,) = heat_data([with_lines(lines)])["runs"]
    assert (data["steps"], data["layers"], data["places"]) == ([1, 2], ["a", "b"], ["fprop.x"])
    for gauge, key, unit in (("sqnr", "sqnr_db", 1), ("underflow", "underflow", 100)):
        expected = [[pytest.approx(unit * lines[2 * s + i][key], rel=6e-3) for i in (0, 1)] for s in (0, 1)]
        assert data["values"][gauge]["fprop.x"] == expected
    assert [h["at"] for h in data["histograms"]] == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert data["values"]["unlike"] == {}, "no product was read"


def test_odd_readings_do_no_harm(with_lines):
    odd = [
        {"histogram": {"element": "e2m1"}, "amax": "x", "scales": [0, None], "rms": 0, "sqnr_db": "loud"},
        {"histogram": {"element": "<b>", "per_octave": 1}, "amax": [0, 0, 0], "mean_error": []},
    ]
    data = heat_data([with_lines([line(1, f"l{i}", "m", **values) for i, values in enumerate(odd)])])
    assert data["runs"][0]["histograms"] == []
    json.dumps(data, allow_nan=False)


@pytest.mark.tier("thorough")
def test_the_map_of_a_very_large_model_fits_on_the_page(with_lines):
    one, places = reading(1, "a", "fprop.x"), ("fprop.x", "wgrad.dy", "dgrad.w")
    keys = [(s, i, p) for s in range(5) for i in range(150) for p in places]
    lines = [{**one, "step": s, "layer": f"l{i}", "place": p} for s, i, p in keys]
    data = heat_data([with_lines(lines, f"r{i}") for i in range(4)])
    assert len(json.dumps(data)) < 3_000_000
    assert data["runs"][0]["steps"][-1] == 4
