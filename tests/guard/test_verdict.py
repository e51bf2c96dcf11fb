"""The guard by itself: what it decides from a history of losses and norms, and what it remembers."""

import json
import math
import random

import pytest

from narrowgauge.guard import Diverged, Guard, GuardRules
from narrowgauge.guard.guard import MAX_RAISES
from narrowgauge.guard.raises import Raise

NAN, INF = math.nan, math.inf
SPIKES = {"off": "take", "warn": "warn", "skip": "skip", "rollback": "rollback"}


def guard(history=(), **rules):
    """A guard that has judged a history."""
    g = Guard(GuardRules(**({"spike_window": 16} | rules)))
    actions(g, history)
    return g


def again(g):
    """The same guard from its state, through JSON."""
    state = json.dumps({"guard": g.state()}, allow_nan=False)
    assert len(state) < 2000
    return Guard.from_state(g.rules, json.loads(state), 0)


def noise(steps, level=3.0, seed=0):
    rng = random.Random(seed)
    return [(level + rng.gauss(0, 0.1), 1 + 0.3 * rng.random()) for _ in range(steps)]


def actions(g, history):
    return [g.judge(loss, norm).action for loss, norm in history]


@pytest.mark.parametrize("bad", [(NAN, 1.0), (3.0, NAN), (INF, 1.0), (3.0, INF), (-INF, 1.0)])
def test_what_is_not_finite_is_skipped_whatever_spikes_do(bad):
    for spike in SPIKES:
        g = guard(noise(130), spike=spike, spike_window=128)
        verdict = g.judge(*bad)
        assert (verdict.action, verdict.accepts, verdict.is_finite) == ("skip", False, False)
        assert "loss" in verdict.reason
        assert (g.skips, g.skips_in_a_row) == (1, 1)
        assert actions(g, noise(200, seed=1)).count("skip") == 0, "good steps after it are taken"
        assert all(map(math.isfinite, g.losses + g.norms))
        assert (g.skips, g.skips_in_a_row) == (1, 0)


#: A loss and a norm after others around 3 and 1, and whether that is a spike.
STEPS = [
    *((30.0, 1.0, True), (3.0, 10.0, True), (4.5, 1.0, True)),
    *((3.4, 1.0, False), (0.1, 0.01, False), (3.0, 3.0, False)),
]


@pytest.mark.parametrize(("loss", "norm", "is_spike"), STEPS)
def test_a_spike_is_far_above_and_what_the_policy_says(loss, norm, is_spike):
    for spike, action in SPIKES.items():
        assert guard(noise(50), spike=spike).judge(loss, norm).action == (action if is_spike else "take")
        before_it_is_full = actions(guard(spike=spike), [*noise(15), (1e6, 1e6)])
        assert set(before_it_is_full) == {"take"}


@pytest.mark.parametrize("spike", ["warn", "skip", "rollback"])
def test_a_spike_in_the_warm_up_is_taken_and_said_once(spike):
    history = [(6.0, 1.0)] * 6 + [(6.0, 3.5)] + [(6.0, 1.0)] * 3 + [(6.0, 9.0)]
    g = guard(spike=spike)
    found = [g.judge(*one, is_warmup=True) for one in history]
    assert [v.action for v in found] == ["take"] * 6 + ["warn"] + ["take"] * 4
    assert all(v.accepts for v in found)
    assert "is 4 times the median before it, so a comparison with this run begins in chaos" in found[6].reason
    assert g.warmup_spikes == again(g).warmup_spikes == 2
    for quiet in (guard(spike="off"), guard(spike=spike)):
        is_warmup = quiet.rules.spike == "off"
        assert {quiet.judge(*one, is_warmup=is_warmup).action for one in history} == {"take"}


def test_the_bounds_are_those_that_are_documented():
    losses, norms = [1.0, 2.0, 3.0, 4.0, 10.0], [1.0, 1.0, 2.0, 5.0, 5.0]
    g = guard(zip(losses, norms, strict=True), spike="skip", spike_window=5, spike_factor=2)
    bound = 3 + 2 * 1.4826 * 1  # the median is 3, the distances from it are 2 1 0 1 7
    for value, action in ((bound - 1e-6, "take"), (bound + 1e-6, "skip")):
        assert again(g).judge(value, 1.0).action == action
    for value, action in ((4.0, "take"), (4.001, "skip")):  # the median of the norms is 2
        assert again(g).judge(3.0, value).action == action
    # a loss that hardly moves makes no spike of a twitch
    g = guard([(2.0, 1.0)] * 16, spike="skip")
    assert actions(g, [(2.1, 1.0), (2.13, 1.0)]) == ["take", "skip"]


def test_spikes_that_are_skipped_for_ever_end_it_and_rollbacks_too():
    g = guard(noise(20), spike="skip", max_skips=3)
    for step in range(3):
        g.require_patience(g.judge(30.0, 1.0), step)
    with pytest.raises(Diverged, match=r"4 steps in a row had a spike, the last is 3; lower optimizer\.lr"):
        g.require_patience(g.judge(30.0, 1.0), 3)
    g = guard(noise(20), spike="rollback", max_rollbacks=1)
    verdict = g.judge(30.0, 1.0)
    g.require_patience(verdict, 21)
    back = guard(spike="rollback", max_rollbacks=1)
    back.samples, g.samples, g.skips = 10, 42, 5
    back.rolled_back(g)
    assert (back.rollbacks, back.samples, back.skips) == (1, 42, 5)
    with pytest.raises(Diverged, match=r"gone back 1 times.*--allow-change guard\.max_rollbacks"):
        back.require_patience(verdict, 22)


@pytest.mark.parametrize("cut", [1, 17, 40, 73])
def test_a_guard_that_was_kept_in_json_decides_alike(cut):
    history = [*noise(30), (NAN, 1.0), (30.0, 1.0), *noise(30, seed=2), (3.0, 20.0), *noise(30, 2.5, seed=3)]
    for spike in ("warn", "skip", "rollback"):
        whole, first = guard(spike=spike), guard(spike=spike)
        expected, begun = actions(whole, history), actions(first, history[:cut])
        second = again(first)
        assert begun + actions(second, history[cut:]) == expected
        assert second.state() == whole.state()


def test_a_spike_raises_until_as_many_places_are_wide_as_may_be():
    g = guard(noise(16), spike="raise")
    for step in range(MAX_RAISES):
        assert actions(g, [(30.0, 1.0), (NAN, 1.0)]) == ["raise", "raise"]
        g.raised.append(Raise("v", ("head",), "e4m3", "fp32", step + 1))
    assert actions(again(g), [(30.0, 1.0), (NAN, 1.0)]) == ["rollback", "skip"]
