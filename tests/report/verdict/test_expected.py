"""A measured gap with its forecast: inside what the format explains, or a fault to look for."""

import json

import pytest

from narrowgauge.cli.main import main
from narrowgauge.report import read_runs
from narrowgauge.report.page.sections import expected_section
from narrowgauge.report.verdict.expected import expectations, own_points

TOKENS = 21_000_000  # of `ladder-1m`: 25 for each parameter


def write_run(folder, recipe, seed, loss):
    """A finished run of the ladder's model."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[model]\nname = "ladder-1m"\n[training]\nseed = {seed}\n[recipe]\nname = "{recipe}"\n'
    )
    lines = [
        {"step": s, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": TOKENS // 10 * s}
        for s in range(1, 11)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(json.dumps({"status": "done", "reason": "trained"}))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Three seeds of bf16 with a loss of 4.0, and of recipes whose losses are n percent above."""

    def runs(**gaps):
        paths = [write_run(tmp_path / f"bf16-seed-{s}", "bf16", s, 4.0) for s in (1, 2, 3)]
        for recipe, gap in gaps.items():
            for seed, luck in ((1, -0.02), (2, 0.0), (3, 0.02)):
                loss = 4.0 * (1 + (gap + luck) / 100)
                paths.append(write_run(tmp_path / f"{recipe}-seed-{seed}", recipe, seed, loss))
        return paths

    return runs


@pytest.mark.tier("thorough", keep=("9.0-worse", "0.0-better"))
@pytest.mark.parametrize(("gap", "word"), [(1.8, "inside"), (9.0, "worse"), (0.0, "better")])
def test_the_word_is_by_the_probability_of_the_gap(runs, gap, word):
    (found,) = expectations(read_runs(runs(mxfp4=gap)))
    assert found.name == "mxfp4"
    assert found.word == word, found.text
    assert found.forecast.gap_percent.low < 3 < found.forecast.gap_percent.high + 3
    assert ("look for a fault" in found.text) == (word == "worse")
    assert "mxfp4" in expected_section([found])


def test_a_recipe_that_is_not_forecast_is_not_judged(runs):
    (found,) = expectations(read_runs(runs(coat=5.0)))
    assert (found.word, found.probability) == ("not forecast", None)
    assert "state in few bits" in found.text


def test_the_report_says_it(runs, capsys):
    paths = runs(mxfp4=9.0)
    assert main(["report", *map(str, paths), "--expected"]) is None or True
    assert "worse than the format explains: look for a fault" in capsys.readouterr().out
    page = (paths[0] / "report.html").read_text()
    assert "<h2>Expected</h2>" in page


@pytest.mark.tier("thorough")
def test_own_runs_are_points_and_move_the_forecast(runs):
    import narrowgauge as ng

    paths = runs(nvfp4=4.0)
    points, recipes = own_points(read_runs(paths))
    assert [(p.setting.recipe, round(p.gap, 2), p.seeds) for p in points] == [("nvfp4", 4.0, 3)]
    assert set(recipes) == {"nvfp4"}
    free = ng.predict("nvfp4", 1e8, 2.5e9)[0].gap_percent
    own = ng.predict("nvfp4", 1e8, 2.5e9, runs=paths[0].parent)[0].gap_percent
    assert own.mean > 1.2 * free.mean
    assert own.high / own.low < free.high / free.low
