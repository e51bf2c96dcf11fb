"""A measured gap with its forecast: inside what the format explains, or a fault to look for."""

import pytest

import narrowgauge as ng
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.report import read_runs
from narrowgauge.trainer.report.page.page import expected_section
from narrowgauge.trainer.report.verdict.expected import expectations, own_points

TOKENS = 21_000_000  # of `ladder-1m`: 25 for each parameter


@pytest.fixture
def runs(make_run):
    """Three seeds of bf16 with a loss of 4.0, and of a recipe whose loss is n percent above."""

    def pairs(recipe, gap):
        paths = make_run.seeds("bf16", [4.0] * 3, 1)
        paths += make_run.seeds(recipe, [4.0 * (1 + (gap + luck) / 100) for luck in (-0.02, 0.0, 0.02)], 1)
        for path in paths:
            make_run.set(
                path, '[model]\nname = "gpt2-124m"\ndim = 768\nlayers = 12', '[model]\nname = "ladder-1m"'
            )
            make_run.edit(
                path, lambda line: {"tokens": TOKENS // 20 * line["step"]} if "loss" in line else {}
            )
        return paths

    return pairs


@pytest.mark.tier("thorough", keep=("9.0-worse", "0.0-better"))
@pytest.mark.parametrize(("gap", "word"), [(1.8, "inside"), (9.0, "worse"), (0.0, "better")])
def test_the_word_is_by_the_probability_of_the_gap(runs, gap, word):
    (found,) = expectations(read_runs(runs("mxfp4", gap)))
    assert (found.name, found.word) == ("mxfp4", word), found.text
    assert found.forecast.gap_percent.low < 3 < found.forecast.gap_percent.high + 3
    assert ("look for a fault" in found.text) == (word == "worse")
    assert "mxfp4" in expected_section([found])


def test_a_recipe_that_is_not_forecast_is_not_judged(runs):
    (found,) = expectations(read_runs(runs("coat", 5.0)))
    assert (found.word, found.probability) == ("not forecast", None)
    assert "state in few bits" in found.text


def test_the_report_says_it(runs, capsys):
    paths = runs("mxfp4", 9.0)
    assert not main(["report", *map(str, paths), "--expected"])
    assert "worse than the format explains: look for a fault" in capsys.readouterr().out
    assert "<h2>Expected</h2>" in (paths[0] / "report.html").read_text()


@pytest.mark.tier("thorough")
def test_own_runs_are_points_and_move_the_forecast(runs):
    paths = runs("nvfp4", 4.0)
    points, recipes = own_points(read_runs(paths))
    assert [(p.setting.recipe, round(p.gap, 2), p.seeds) for p in points] == [("nvfp4", 4.0, 3)]
    assert set(recipes) == {"nvfp4"}
    free = ng.predict("nvfp4", 1e8, 2.5e9)[0].gap_percent
    own = ng.predict("nvfp4", 1e8, 2.5e9, runs=paths[0].parent)[0].gap_percent
    assert own.mean > 1.2 * free.mean
    assert own.high / own.low < free.high / free.low
