"""The law on atlases whose truth is known: exponents inside their intervals, and breaks that are covered."""

import itertools
import math

import numpy as np
import pytest

from narrowgauge.forecast.curve import CURVES, Power, Shares
from narrowgauge.forecast.fit import NOISE_PRIOR, SCATTER_PRIOR, fit_law, fit_laws
from narrowgauge.forecast.law import GROUPS, KNOT, TAILS, row_of
from narrowgauge.forecast.setting import BACKWARD, FORWARD, NEW, Hint, Observed, Part, Setting
from narrowgauge.forecast.support import extrapolation, refusal, similar_to

NOISE = {"fine": 0.015, "middle": 0.025, "coarse": 0.036}
SIZES = (3e7, 5e7, 1e8, 2e8)
LENGTHS = (25, 50, 100, 200, 400)
PRIORS = {**GROUPS, "noise": NOISE_PRIOR, "scatter": SCATTER_PRIOR}
ATLAS = (  # scheme, its narrow GEMM, its share of wide blocks
    *((name, "fprop", 0.0) for name in NOISE),
    *((f"{name} with a tail", "fprop", 0.25) for name in ("fine", "coarse")),
    *((f"{name} backward", "dgrad", 0.0) for name in NOISE),
)


def setting(name, params, tokens, family="mine", sides=("fprop", "dgrad", "wgrad"), tail=0.0):
    parts = tuple(Part(gemm, f"{name} {gemm}", NOISE[name.split()[0]]) for gemm in sides)
    return Setting(name, parts, params, tokens, family, tail)


def synthetic(draw, exponent, deviation=0.04, schemes=("fine", "middle", "coarse"), bend=lambda params: 1.0):
    """Gaps of a power law with kappas about the power 0.7 of the noise, and additive noise in percent."""
    points = []
    for name in schemes:
        kappa = 2.4 * (NOISE[name] / 0.02) ** 0.7 * math.exp(draw.normal(0, 0.15))
        for params in SIZES:
            for length in LENGTHS:
                truth = kappa * (length / 100) ** exponent * bend(params)
                gap = truth + draw.normal(0, deviation)
                points.append(Observed(setting(name, params, length * params, sides=("fprop",)), gap))
    return points


def drawn(draw):
    """An atlas as the law describes atlases, with each figure drawn from its prior, and its three exponents.

    Three schemes with narrow forward passes, three with narrow backward passes, and two of the former with a
    quarter of the blocks wide, at four sizes and five lengths; one draw of luck for each reference run.
    """
    deviation = {name: s * math.sqrt(d / draw.chisquare(d)) for name, (s, d) in PRIORS.items()}
    p, backward, tau = draw.normal(0.15, 0.1), draw.normal(0, 0.5), draw.normal(1, 0.5)
    alpha = {"fprop": draw.normal(math.log(2), 1.0), "dgrad": draw.normal(math.log(0.5), 1.0)}
    eta, points = draw.normal(0.8, 0.3), []
    walk = {0: 0.0} | {side: draw.normal(0, deviation["size"]) for side in (-1, 1)}
    references = {(n, x): draw.normal(0, deviation["reference"]) for n in SIZES for x in LENGTHS}
    for name, gemm, tail in ATLAS:
        part = FORWARD if gemm == "fprop" else BACKWARD
        level = alpha[gemm] + eta * math.log(NOISE[name.split()[0]] / 0.02) + tau * math.log1p(-tail)
        level += draw.normal(0, deviation[part]) + draw.normal(0, deviation["recipe"])
        for (size, length), luck in references.items():
            steps = math.log(size / 1e8) / KNOT  # about one at most
            exponent = p if part == FORWARD else backward
            log = level + exponent * math.log(length / 100) + luck + abs(steps) * walk[np.sign(steps)]
            noise = math.hypot(
                deviation["noise"] * (size / 1e8) ** -0.25, deviation["scatter"] * math.exp(log)
            )
            here = setting(name, size, length * size, sides=(gemm,), tail=tail)
            points.append(Observed(here, math.exp(log) + noise * draw.standard_t(TAILS)))
    return points, {("curve", "p"): p, ("exponent",): backward, ("tail",): tau}


@pytest.mark.parametrize("draws", [20, pytest.param(500, marks=pytest.mark.tier("thorough"))])
def test_nine_of_ten_exponents_lie_in_their_intervals(draws):
    """Atlases drawn from the law's own priors (Talts et al. 2018). Fewer: too narrow, more: too wide."""
    draw, inside = np.random.default_rng(1), np.zeros(3)
    for _ in range(draws):
        points, truth = drawn(draw)
        law = fit_law(points, curve=Power())
        found = [law.coefficient(*column) for column in truth]
        off = [(mean - value) / d for (mean, d), value in zip(found, truth.values(), strict=True)]
        inside += np.abs(off) <= 1.645
    assert inside / draws == pytest.approx(0.9, abs=max(0.05, 3 * math.sqrt(0.9 * 0.1 / draws)))


def test_the_evidence_tells_a_bend_from_a_power_law():
    draw = np.random.default_rng(2)
    values = np.array([-1.0, 0.3, 0.65, 0.15, -3.0])
    straight, bent = synthetic(draw, 0.17), []
    for one in synthetic(draw, 0.0, 0.0):
        n, d = math.log(one.setting.params / 1e8), math.log(one.setting.tokens / 1e10)
        log_h, _ = Shares()(values, np.array([n]), np.array([d]))
        bent.append(Observed(one.setting, one.gap * math.exp(log_h[0]) + draw.normal(0, 0.03)))
    for points, least, most in ((straight, -100, 3), (bent, 3, 1000)):
        power, shares = fit_laws(points).each
        assert least < shares.evidence - power.evidence < most


def test_where_the_curves_part_the_interval_holds_both():
    laws = fit_laws(synthetic(np.random.default_rng(2), 0.17))
    near, far = (setting("fine", n, 100 * n, sides=("fprop",)) for n in (1e8, 2e9))
    for here in (near, far):
        both, each = laws.predict(here), [law.predict(here) for law in laws.each]
        assert min(p.gap for p in each) <= both.gap <= max(p.gap for p in each)
        assert both.structure >= min(p.structure for p in each)
        assert laws.terms(here).sum() == pytest.approx(both.gap)
    assert laws.predict(near).structure < laws.predict(far).structure


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_derivatives_of_the_curves_are_those_of_differences(curve):
    values = np.array([mean + 0.1 for mean, _ in curve.priors.values()])
    n, d = np.array([-1.0, 0.0, 2.0]), np.array([1.0, 0.0, 5.0])
    value, slopes = curve(values, n, d)
    assert value[1] == pytest.approx(0.0)  # kappa is the gap at 100 million parameters and 10 billion tokens
    for k, unit in enumerate(np.eye(len(values))):
        ahead, _ = curve(values + 1e-6 * unit, n, d)
        assert (ahead - value) / 1e-6 == pytest.approx(slopes[:, k], abs=1e-4)
    ahead, _ = curve(values, n, d + 1e-6)
    exponent = [curve.exponent(values, float(a), float(b))[0] for a, b in zip(n, d, strict=True)]
    assert (ahead - value) / 1e-6 == pytest.approx(exponent, abs=1e-4)


def test_parts_of_a_recipe_add_up_and_a_hint_moves_a_part_nobody_has_trained():
    draw = np.random.default_rng(4)
    law = fit_law(synthetic(draw, 0.17), curve=Power())
    whole = law.predict(setting("fine", 1e8, 1e10)).gap
    parts = [
        law.predict(setting("fine", 1e8, 1e10, sides=(gemm,))).gap for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert whole == pytest.approx(sum(parts))
    part = Part("fprop", "unknown", 0.02)
    unknown = Setting("unknown", (part,), 1e8, 1e10, "mine")
    free = law.predict(unknown)
    told = fit_law(law.observed, [Hint(part, "unknown", math.log(3.0), 0.05)], Power()).predict(unknown)
    assert told.gap == pytest.approx(3 * free.gap, rel=0.3)
    assert told.structure < 1.2 * free.structure  # its surprise widens the groups a little


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_break_at_large_sizes_is_covered_once_seen_and_refused_far_beyond(factor):
    """Gaps of models above a billion parameters are larger by a factor: ten points there cover them."""
    draw = np.random.default_rng(5)
    points = synthetic(draw, 0.17)
    far = setting("fine", 4e9, 4e11, sides=("fprop",))
    fine = [o for o in points if o.setting.recipe == "fine"]
    kappa = np.mean([o.gap / (o.setting.tokens_per_param / 100) ** 0.17 for o in fine])
    seen = []
    for name, length in itertools.product(("middle", "coarse"), LENGTHS):
        gap = 2.4 * (NOISE[name] / 0.02) ** 0.7 * factor * (length / 100) ** 0.17 + draw.normal(0, 0.04)
        seen.append(Observed(setting(name, 2e9, 2e9 * length, sides=("fprop",)), gap))
    low, high = fit_laws([*points, *seen]).predict(far).interval()
    assert low <= kappa * factor <= high
    beyond = setting("fine", 1e11, 1e13, sides=("fprop",))
    assert "times beyond the runs" in str(refusal(beyond, similar_to(beyond.parts, points), ""))


def test_intervals_widen_with_the_distance_from_the_points():
    law = fit_laws(synthetic(np.random.default_rng(6), 0.17))
    widths = [law.predict(setting("fine", n, 100 * n, sides=("fprop",))).structure for n in (1e8, 1e9, 1e10)]
    assert widths[0] < widths[1] < widths[2]
    known, new = (law.predict(setting("fine", 1e8, 1e10, f, ("fprop",))).structure for f in ("mine", NEW))
    assert known < new
    strange = law.predict(setting("fine other", 1e8, 1e10, sides=("fprop",))).structure
    assert strange > 1.5 * known, "of a scheme that nobody has trained"
    own, other = (
        law.each[0].shift(Part("fprop", f"{name} fprop", NOISE["fine"]), name)[1]
        for name in ("fine", "fine other")
    )
    assert other > own > 0, "and what is unknown of its parts is in their deviation"


def test_a_backward_term_is_measured_from_a_hundred_tokens_per_parameter():
    (of_100, of_200) = (setting("fine", 1e8, tokens, sides=("dgrad",)) for tokens in (1e10, 2e10))
    assert row_of(of_100, of_100.parts[0])["exponent",] == 0
    assert row_of(of_200, of_200.parts[0])["exponent",] == pytest.approx(math.log(2))


def test_probability_and_interval_agree():
    law = fit_laws(synthetic(np.random.default_rng(8), 0.17))
    found = law.predict(setting("fine", 1e8, 1e10, sides=("fprop",)))
    low, high = found.interval(math.inf)
    assert low < found.gap < high
    assert found.probability_above(found.gap, 0.01) == pytest.approx(0.5, abs=0.01)
    assert found.probability_above(high, 1e-6) == pytest.approx(0.05, abs=0.01)
    assert found.probability_above(10 * high, 0.01) < 0.001


def test_support_is_the_range_of_points_whose_same_pass_is_narrow():
    points = synthetic(np.random.default_rng(9), 0.17)
    inside = setting("fine", 1e8, 1e10)
    assert extrapolation(inside, similar_to(inside.parts, points)).params == 1.0
    far = extrapolation(setting("fine", 4e8, 4e8 * 1000), points)
    assert (far.params, far.tokens_per_param) == (pytest.approx(2.0), pytest.approx(2.5))
    backward = setting("fine", 1e8, 1e10, sides=("dgrad",))
    assert "no point of the atlas resembles" in str(refusal(backward, similar_to(backward.parts, points), ""))
    coarse = Setting("coarse!", (Part("fprop", "x", 0.5),), 1e8, 1e10)
    assert "times the noise" in str(refusal(coarse, similar_to(coarse.parts, points), ""))
