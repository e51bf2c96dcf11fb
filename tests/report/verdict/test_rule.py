"""The rule of verdicts against the tables of Student and Dunnett, and in simulated experiments."""

import math

import numpy as np
import pytest

from narrowgauge.trainer.experiment.power import Plan, power_text, seeds_for_equality, smallest_gap
from narrowgauge.trainer.report.verdict import rule
from narrowgauge.trainer.report.verdict.rule import MARGIN, Judgement, Spread, judge, pooled_spread

# two-sided 5 % points, by (arms, degrees of freedom)
DUNNETT = {(2, 5): 3.03, (2, 10): 2.57, (5, 20): 2.73, (9, 30): 2.86, (3, 60): 2.41, (1, 4): 2.78}


def by_seed(gaps):
    """Gaps by seed, from a list."""
    return dict(enumerate(gaps))


def experiments(arms, seeds, deviation, gap=0.0, count=600):
    """Gaps of experiments, [experiment, arm, seed]: all arms of a seed share the reference's error."""
    rng = np.random.default_rng(0)
    errors = rng.normal(0, deviation / math.sqrt(2), (count, arms + 1, seeds))
    return gap + errors[:, 1:] - errors[:, :1]


def judged(gaps, known=0.0):
    """Judgements of the arms of one experiment, all of one family."""
    return judge({arm: by_seed(values) for arm, values in enumerate(gaps)}, range(len(gaps)), known)


def test_critical_values_are_those_of_dunnetts_table():
    found = {key: rule.critical_value(*key) for key in DUNNETT}
    assert found == pytest.approx(DUNNETT, abs=0.006)


def test_two_seeds_that_agree_by_luck_prove_nothing():
    found = judge({"mxfp8": {0: 0.0100, 1: 0.0112}}, ["mxfp8"], known=0.5)["mxfp8"]
    assert found.word("open") == "open"
    assert found.half_width > 3
    alone = judge({"mxfp8": {0: 0.0100, 1: 0.0112}}, ["mxfp8"])["mxfp8"]
    assert alone.word("open") == "worse, within 0.25 %", "without knowledge the two are all there is"


@pytest.mark.parametrize(
    ("arms", "seeds", "deviation"), [(1, 2, 2.0), (3, 2, 0.5), (7, 5, 0.5), (3, 3, 1.5), (6, 2, 0.5)]
)
def test_one_experiment_in_twenty_at_most_calls_an_equal_arm_different(arms, seeds, deviation):
    """Also where gaps deviate four times as much as was known. Luck excludes no arm from the pool, though by
    luck two gaps deviate three times as much as four others in one experiment of five."""
    for known in (0.5, 0.0):
        found = [judged(gaps, known).values() for gaps in experiments(arms, seeds, deviation, count=400)]
        wrong = [any(j.is_different for j in one) for one in found]
        assert np.mean(wrong) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
        assert np.mean([len({j.spread for j in one}) > 1 for one in found]) < 0.02


@pytest.mark.tier("thorough", keep=("5-1-0.0", "3-2-0.5"))
@pytest.mark.parametrize(("seeds", "arms", "known"), [(5, 1, 0.0), (5, 6, 0.5), (3, 2, 0.5)])
def test_the_power_is_that_of_the_rule(seeds, arms, known):
    """8 of 10 experiments find the smallest gap, and the planned seeds find equality."""
    plan = Plan(seeds, 0.5, arms, known)
    gap = smallest_gap(plan)
    seen = [judged(gaps, known)[0].is_different for gaps in experiments(arms, seeds, 0.5, gap)]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.05)
    count = seeds_for_equality(plan)
    equal = [judged(gaps, known)[0].is_within() for gaps in experiments(arms, count, 0.5, count=200)]
    assert 0.7 < np.mean(equal) < 0.9


def test_a_plan_is_told_in_words_and_more_arms_ask_for_more_seeds():
    assert [seeds_for_equality(Plan(5, 0.4, arms)) for arms in (1, 7)] == [24, 37]
    one = power_text(5, 7, 204_800, 327_680, {})
    quiet = power_text(1, 1, 100 * 327_680, 327_680, {}, is_quiet=True)
    assert "in 8 of 10 cases, for all 7 variants at once. To prove two recipes equal takes" in one
    assert "deviate by 0.9 % between seeds (known of such lengths)" in one
    assert quiet.startswith("100 tokens per parameter. One seed")
    assert "One seed proves no gap; --seeds 3 detects a gap of " in quiet
    assert "To prove two recipes equal takes 4 seeds within 0.25 %, 15 within 0.1 %. Assumed: " in quiet


def test_seeds_and_arms_are_pooled_and_a_control_counts_for_the_noise_alone():
    """The pooled deviation is the mean square of what neither seed nor arm explains."""
    gaps = experiments(3, 5, 0.5)[0]
    table = np.vstack([np.zeros(5), gaps])
    residuals = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
    by_arm = {arm: by_seed(values) for arm, values in zip("abc", gaps, strict=True)}
    pooled, found = pooled_spread(by_arm), judge(by_arm, ["a", "b"])
    assert pooled.degrees == 12
    assert pooled.measured == pytest.approx(math.sqrt(2 * (residuals**2).sum() / 12))
    assert found["a"].spread == found["c"].spread == pooled
    assert (found["a"].family, found["c"].family) == (2, 1)
    assert found["c"].half_width < found["a"].half_width


def test_an_arm_with_fewer_seeds_counts_with_those_it_has():
    found = judge({"a": by_seed([1.0, 1.2, 0.9]), "b": {0: 2.0, 1: 2.1}, "c": {2: 0.5}}, "abc")
    assert found["b"].spread == found["a"].spread
    assert found["a"].spread.degrees == 3
    assert found["b"].half_width > found["a"].half_width
    assert found["c"].half_width is None


def test_an_arm_about_to_diverge_widens_no_others_interval():
    quiet = {arm: by_seed([0.5, 0.52, 0.48, 0.51, 0.49]) for arm in "ab"}
    quiet["b"] = by_seed([0.1, 0.13, 0.1, 0.08, 0.09])
    before, after = judge(quiet, "abc"), judge({**quiet, "c": by_seed([1, 50, 3, 200, 8])}, "abc")
    assert after["a"].half_width == before["a"].half_width
    assert (after["a"].word("open"), after["c"].word("open")) == ("worse", "open")
    assert after["c"].spread.degrees == 4


def test_an_arm_that_computes_the_same_says_nothing_of_the_others():
    gaps = {"a": by_seed([0.5, 0.1, 0.3])}
    found = judge({**gaps, "same": by_seed([0.0, 0.0, 0.0])}, ["a", "same"])
    assert found["a"].spread == judge(gaps, ["a"])["a"].spread
    assert (found["same"].half_width, found["same"].is_within()) == (0.0, True)


@pytest.mark.parametrize("arms", [1, 3, 7])
def test_equality_divides_its_five_percent_over_the_family(arms):
    """Two one-sided tests of a gap just inside the margin, and one just outside it."""
    spread = Spread(0.1, 10)
    quantile = {1: 1.8125, 3: 2.4660, 7: 2.9601}[arms]  # Student's at 5, 5 / 3 and 5 / 7 %, 10 degrees
    reach = quantile * 0.1 / 2  # of four seeds
    for mean, expected in ((MARGIN - reach - 1e-3, True), (MARGIN - reach + 1e-3, False)):
        assert Judgement(4, mean, arms, spread).is_within() is expected
        assert Judgement(4, -mean, arms, spread).is_within() is expected


def test_what_is_known_only_raises_and_loses_weight_with_every_seed():
    raised = [Spread(0.05, degrees, known=0.5).deviation for degrees in (1, 4, 28, 1000)]
    assert raised == sorted(raised, reverse=True)
    assert raised[0] > 0.35
    assert raised[-1] == pytest.approx(0.05, rel=0.06)
    assert Spread(2.0, 1, known=0.5).deviation == 2.0
