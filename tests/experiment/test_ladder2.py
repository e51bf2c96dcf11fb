"""The pilot's figures, its choice, and the page of ladder 2, which is made from rows alone."""

import math
import random
import statistics

import pytest

import ladder2
import ladder2_page
from narrowgauge.experiment.arms import take_arms, take_experiment
from narrowgauge.experiment.design import make_measured
from narrowgauge.nn.histories import history_of
from narrowgauge.recipes.registry import recipe as recipe_from
from narrowgauge.recipes.resolve import casts_at
from narrowgauge.report.verdict.rungs import Row, rows_text
from publish.held_out import Measured, held_out_markdown
from publish.ladder2 import family_of, stages_markdown
from publish.pilot import chi_squared, choose, measure
from publish.predictions import read_predictions
from publish.probed import probe_markdown, spearman

ENDS = {
    "dither-1": (0.001, 0.004),
    "dither-2": (-0.002, 0.001),
    "mxfp8": (0.0, -0.003),
    "mxfp4": (0.04, 0.05),
}


def pilot_rows(scale=1.0, seeds=2):
    rows = [Row("bf16", seed, 1, 100, 5.0, 5.0, "done") for seed in range(1, seeds + 1)]
    for arm, ends in ENDS.items():
        for seed in range(1, seeds + 1):
            loss = 5.0 + ends[seed % 2] * (1 if arm == "mxfp4" else scale)
            rows.append(Row(arm, seed, 1, 100, loss, loss, "done"))
    return rows


def test_the_deviation_of_a_pair_is_that_of_8_bit_arms_within_seeds():
    found = measure("a", pilot_rows())
    within = [[100 * ENDS[arm][i] / 5.0 for arm in ("dither-1", "dither-2", "mxfp8")] for i in (0, 1)]
    expected = math.sqrt(2 * statistics.fmean(map(statistics.variance, within)))
    assert found.deviation == pytest.approx(expected)
    assert (found.low, found.high) == pytest.approx(
        (expected * math.sqrt(4 / 11.1433), expected * math.sqrt(4 / 0.48442)), rel=1e-4
    )
    assert found.four == pytest.approx(0.9)
    assert found.signal == pytest.approx((found.four - found.eight) / expected)
    assert measure("a", [row for row in pilot_rows() if row.arm != "mxfp4"]) is None


@pytest.mark.parametrize(
    ("degrees", "probability", "table"),
    [(1, 0.025, 0.000982), (2, 0.975, 7.378), (6, 0.025, 1.237), (6, 0.975, 14.449), (40, 0.975, 59.342)],
)
def test_quantiles_of_chi_squared_are_those_of_tables(degrees, probability, table):
    assert chi_squared(degrees, probability) == pytest.approx(table, rel=5e-4)


def test_the_least_deviation_wins_among_designs_that_see_4_bits_once_all_have_three_seeds():
    named = {"loud": measure("loud", pilot_rows(1, 3)), "quiet": measure("quiet", pilot_rows(0.5, 3))}
    assert choose(named).name == "quiet"
    assert choose(named | {"early": measure("early", pilot_rows(0.1, 2))}) is None
    blind = [row for row in pilot_rows(0.1, 3) if row.arm != "mxfp4"]
    blind += [Row("mxfp4", seed, 1, 100, 5.0, 5.0, "done") for seed in (1, 2, 3)]
    assert choose(named | {"blind": measure("blind", blind)}).name == "quiet"


@pytest.mark.parametrize("file", ["pilot", "stages"])
def test_every_part_is_an_experiment_with_its_null_arms(file):
    for name, tables in ladder2.read_parts(file).items():
        values, arms = take_arms(tables)
        values, table = take_experiment(values)
        found = make_measured(values, arms[:3], "1,2", table)
        assert found.arms[0] == "bf16", name
        assert (found.chains[0].fork is not None) == ("fork" in table)
        assert found.runs[0].config.training.rounding_seed == -1
        second = found.runs[1].config.training.rounding_seed
        assert second == (-1 if name == "scratch-25" else 101), "a null arm, but where nothing forks"
    assert not any(arm.startswith("null") for arm in family_of(tables))


def test_a_forked_arm_needs_no_state_that_a_bf16_trunk_lacks():
    """A history or a narrow weight is not in the trunk's checkpoint, so its run would stop."""
    for name, tables in ladder2.read_parts("stages").items():
        if "fork" not in tables["experiment"]:
            continue
        for arm, changes in tables["arms"].items():
            recipe = recipe_from(
                changes["recipe.name"] if "recipe.name" in changes else changes["recipe"]["name"]
            )
            for step in (0, 999):
                for place, cast in casts_at(recipe, step, 1000, 200).items():
                    assert history_of(place, cast, 128) is None, (name, arm, place)


def test_predictions_name_arms_and_rungs_that_are_planned():
    text = (ladder2.HERE / "predictions.md").read_text(encoding="utf-8")
    parts = list(ladder2.read_parts("stages").values())
    predictions = read_predictions(text)
    assert len(predictions) > 80
    for one in predictions:
        for rung in filter(None, (one.rung, one.before)):
            assert {one.arm, one.against} <= parts[rung - 1]["arms"].keys(), one


def test_the_interval_of_a_rank_correlation_covers_the_true_one():
    """For normal pairs with correlation r, Spearman's rho is 6 / pi asin(r / 2)."""
    true, covered = 6 / math.pi * math.asin(0.8 / 2), 0
    generator = random.Random(1)
    for _ in range(400):
        a = [generator.gauss(0, 1) for _ in range(15)]
        b = [0.8 * x + 0.6 * generator.gauss(0, 1) for x in a]
        low, _, high = spearman(a, b)
        covered += low <= true <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_probe_is_compared_with_the_arms_that_both_have():
    names = [f"arm-{i}" for i in range(8)]
    rows = [Row("bf16", 1, 1, 100, 5.0, 5.0, "done")]
    rows += [Row(name, 1, 1, 100, 5.0 + 0.01 * i, 5.0, "done") for i, name in enumerate(names)]
    figures = {
        name: {"loss_increase": {"mean": i}, "gradient_cosine": {"mean": -i}} for i, name in enumerate(names)
    }
    table = probe_markdown({"recipes": {**figures, "other": {}}}, {"part": rows, "few": rows[:4]})
    assert "| part | 8 | +1.00 (+1.00 .. +1.00) | -1.00 (-1.00 .. -1.00) | - |" in table
    assert "few" not in table


def test_what_compare_expects_is_what_the_pilot_measured():
    assert ladder2_page.EXPECTED.read_text() == ladder2_page.expected_text()


def test_the_page_is_made_from_the_rows_alone(tmp_path, monkeypatch):
    page = tmp_path / "ladder2.md"
    page.write_text(ladder2_page.PAGE.read_text(encoding="utf-8"))
    (tmp_path / "rows" / "pilot").mkdir(parents=True)
    (tmp_path / "rows" / "pilot" / "role-trunk.csv").write_text(rows_text(pilot_rows(seeds=3)))
    monkeypatch.setattr(ladder2_page, "PAGE", page)
    monkeypatch.setattr(ladder2_page, "ROWS", tmp_path / "rows")
    made = []
    for _ in range(2):
        ladder2_page.main()
        made.append(page.read_text(encoding="utf-8"))
    assert made[0] == made[1]
    assert "The rule chooses `role-trunk`." in made[0]
    before = ladder2_page.PAGE.read_text(encoding="utf-8")
    assert made[0].partition("<!--")[0] == before.partition("<!--")[0]


def test_gaps_deviate_within_their_arms():
    gaps = {"null-1": [0.3, 0.4, 0.5], "null-2": [0.7, 0.6, 0.5]}
    measured = [
        Measured(arm, seed, 65_536, gap, 0.06) for arm, of in gaps.items() for seed, gap in enumerate(of)
    ]
    line = held_out_markdown(measured).splitlines()[2]
    assert line == ("| 65,536 | 6 | 0.100 % | 0.060 .. 0.287 % | 0.060 % | null-1 +0.40 %, null-2 +0.60 % |")


def test_a_part_says_which_arms_are_equal_within_a_tenth_of_a_percent():
    parts = {"300k-5": ladder2.read_parts("stages")["300k-5"]}
    gaps = {"bf16": 0, "null-1": 1e-5, "null-2": -1e-5, "mxfp8": 2e-5, "mxfp4": 0.01}
    rows = [
        Row(arm, seed, 1, 1_638_400, loss, loss, "done")
        for arm, gap in gaps.items()
        for seed in range(1, 6)
        for loss in [4.0 * (1 + gap) + 1e-4 * ((seed * (3 + len(arm))) % 5)]
    ]
    text = stages_markdown(parts, {"300k-5": rows}, [])
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "equal within 0.1 %" in lines["mxfp8"]
    assert "| worse |" in lines["mxfp4"]
    assert f"The family has {len(family_of(parts['300k-5']))} arms" in text
