"""What travels to the page: small, finite, and nothing hidden."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.trainer.report import Run, Step, read_run, verdicts
from narrowgauge.trainer.report.page.curves import POINTS_PER_RUN, page_data


def run_of(losses, batch=100):
    steps = [
        Step(i, batch * i, 0.5 * i, loss, 1e-3, 1.0, 200.0, math.nan, math.nan)
        for i, loss in enumerate(losses, 1)
    ]
    return Run("run", None, {}, steps, [], [], "done", "")


def data_of(runs):
    return page_data(runs, verdicts(runs))["runs"]


def test_a_short_run_keeps_every_step(make_run):
    run = read_run(make_run(steps=300))
    (data,) = data_of([run])
    assert data["x"]["step"] == [step.step for step in run.steps]
    assert data["x"]["tokens"] == [step.tokens for step in run.steps]
    assert data["curves"]["loss"]["mean"] == pytest.approx([step.loss for step in run.steps], rel=1e-5)
    assert set(data["curves"]["loss"]) == {"mean"}, "no band where nothing was averaged"
    assert data["validation"]["mean"] == pytest.approx([at.val_loss for at in run.validation], rel=1e-5)


@pytest.mark.tier("thorough")
@given(
    st.lists(st.floats(0, 100) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(min_value=1, max_value=12),
)
def test_the_band_hides_no_spike_and_the_mean_is_a_mean(losses, repeats):
    run = run_of(losses * repeats)
    (data,) = data_of([run] * 40)[:1]
    curve, finite = data["curves"]["loss"], [loss for loss in losses if math.isfinite(loss)]
    assert len(curve["mean"]) <= POINTS_PER_RUN
    assert len(curve["mean"]) == len(data["x"]["step"])
    assert data["end"]["step"] == len(run.steps), "the axis reaches the last step"
    if finite:
        top = max(v for v in curve.get("greatest", curve["mean"]) if v is not None)
        bottom = min(v for v in curve.get("least", curve["mean"]) if v is not None)
        assert top == pytest.approx(max(finite), rel=1e-5)
        assert bottom == pytest.approx(min(finite), rel=1e-5)
    json.dumps(data, allow_nan=False)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("steps", "batch"), [(3_000, 100), (50_017, 100), (9_000, 700)])
def test_two_runs_of_one_curve_have_no_gap_however_far_each_has_come(steps, batch):
    """Means over unequal spans of a falling loss differ: one at work seemed 5 % better than one done."""

    def falling(steps, batch):
        return run_of([3 + 7 * math.exp(-batch * i / 50_000) for i in range(1, steps + 1)], batch)

    done, working = data_of([falling(100_000, 100), falling(steps, batch)])
    (at, own), (tokens, reference) = (
        np.array([run["x"]["tokens"], run["curves"]["loss"]["mean"]]) for run in (working, done)
    )
    shared = (tokens[0] <= at) & (at <= tokens[-1])
    gaps = 100 * (own / np.interp(at, tokens, reference) - 1)[shared]
    assert len(gaps) > 20
    assert abs(gaps).max() < 0.05


def test_a_hole_in_the_loss_is_a_hole_in_the_curve_and_an_event():
    (data,) = data_of([run_of([3.0, 2.0, math.nan, math.inf, 2.5, math.nan])])
    assert data["curves"]["loss"]["mean"] == [3.0, 2.0, None, None, 2.5, None]
    assert [(event["x"]["step"], event["kind"]) for event in data["events"]] == [
        (3, "not finite"),
        (6, "not finite"),
    ]


def test_events_lie_at_the_tokens_of_their_step_and_thousands_of_saves_are_thinned(make_run):
    path = make_run(steps=200)
    (data,) = data_of([read_run(path)])
    saves = [event["x"] for event in data["events"] if event["kind"] == "save"]
    assert [(x["step"], x["tokens"]) for x in saves] == [(i, 65_536 * i) for i in range(20, 201, 20)]
    make_run.append(path, "".join(f'{{"event": "save", "step": {i}}}\n' for i in range(20_000)))
    (data,) = data_of([read_run(path)])
    kinds = [event["kind"] for event in data["events"]]
    assert kinds.count("save") <= 2000
    assert {"start", "resume", "done"} <= set(kinds), "the rare events stay"
