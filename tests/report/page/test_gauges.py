"""The table of gauges: its figures of a run's last readings, and that it stays small and harmless."""

import json
import re

import pytest

from narrowgauge.report.page.gauges import gauges
from narrowgauge.report.read.run import read_run


def line(step, layer, place, **values):
    return {"step": step, "layer": layer, "place": place, "cast": "mxfp4", **values}


def operand(decibels, underflow=0.0, nonfinite=0.0):
    return {"sqnr_db": decibels, "underflow": underflow, "nonfinite": nonfinite}


@pytest.fixture
def with_lines(make_run):
    def do(lines, name="run", tail=""):
        path = make_run(name)
        (path / "gauges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
        return read_run(path)

    return do


def rows(html):
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html))
    head, *body = list(cells)
    return [dict(zip(head, row, strict=True)) for row in body]


def test_the_last_step_is_shown_layer_by_layer(with_lines):
    run = with_lines(
        [
            line(50, "a", "fprop.x", **operand(9.0)),
            line(100, "a", "wgrad.dy", **operand(12.345, 0.04321)),
            line(100, "a", "fprop.x", **operand(18.5)),
            line(100, "a", "fprop.y", cosine=0.987654, sqnr_db=16.0),
            line(100, "b", "fprop.x", **operand(None, nonfinite=0.5)),
            line(100, "b", "wgrad.dy", **operand(31.0, 0.0001)),
            line(100, "b", "m", **operand(None)),
            line(100, "embedding", "weight", **operand(None)),
        ],
        tail='{"step": 150, "la',
    )
    html = gauges([run])
    assert "run, step 100</h3>" in html
    assert rows(html) == [
        {"layer": "a", "fprop.x": "18.5 dB", "wgrad.dy": "12.3 dB, 4.3 %", "fprop.y": "0.98765"},
        {"layer": "b", "fprop.x": "not finite", "wgrad.dy": "31.0 dB, &lt;0.1 %", "fprop.y": ""},
    ]


def test_of_many_layers_the_noisiest_are_shown(with_lines):
    run = with_lines([line(1, f"blocks.{i}", "fprop.x", **operand(20 + (i * 37) % 300)) for i in range(300)])
    html = gauges([run])
    shown = rows(html)
    assert "the 100 noisiest of 300 layers" in html
    assert max(float(row["fprop.x"].split()[0]) for row in shown) == 119
    assert len(shown) == 100
    assert [int(row["layer"][7:]) for row in shown] == sorted(int(row["layer"][7:]) for row in shown)
    assert gauges([run] * 8).count("<tr>") <= 4 * html.count("<tr>") + 8, "several runs share the room"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[gauges]\nevery = 0\n", "gauges.every = 0 switched them off; --gauges.every 100 reads every 100th"),
        (
            "[gauges]\nevery = 500\n",
            "gauges.every = 500, and step 200 was the last; besides every 500th step",
        ),
        ("[gauges]\nevery = 100\n", "gauges.jsonl is missing or empty"),
        ("", "gauges.jsonl is missing or empty"),
    ],
)
def test_a_run_without_readings_says_why(make_run, config, words):
    path = make_run()
    (path / "config.toml").write_text((path / "config.toml").read_text() + config)
    assert f"<p>No gauges: {words}" in gauges([read_run(path)])


def test_compiled_code_is_the_reason_it_is(make_run):
    path = make_run()
    text = (path / "config.toml").read_text().replace("compile = false", "compile = true")
    (path / "config.toml").write_text(text + "[gauges]\nevery = 0\n")
    assert "No gauges: training.compile = true, and compiled code" in gauges([read_run(path)])


def test_runs_with_one_reason_are_one_sentence(with_lines, make_run):
    names = [make_run(f"r{i}") for i in range(6)]
    html = gauges([with_lines([line(1, "a", "fprop.x", **operand(1.0))], "read"), *map(read_run, names)])
    assert html.count("No gauges") == 1
    assert "No gauges of r0, r1, r2, r3 and 2 more: " in html


def test_names_are_shown_and_never_obeyed(with_lines):
    html = gauges([with_lines([line(1, "<script>", "fprop.x", **operand(1.0))])])
    assert "<script" not in html
    assert "&lt;script&gt;" in html
