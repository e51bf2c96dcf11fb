"""Costs of single places: the estimate against the measurement, and both against what is known."""

import json
import math

import pytest
import torch

from narrowgauge.analysis import (
    estimate_costs,
    exact_costs,
    open_probed,
    probe,
    sensitivity_json,
    update_rule,
    worst,
)
from narrowgauge.analysis.sensitivity import Cost
from narrowgauge.analysis.update import Moments, UpdateRule
from narrowgauge.quantization import cast
from narrowgauge.recipes import GEMM_PLACES, recipe


@pytest.fixture(scope="module")
def trained(narrowgauge, line, tmp_path_factory):
    """A tiny model after thirty steps: enough for its predictions not to be uniform."""
    run = tmp_path_factory.mktemp("sensitivity") / "run"
    changes = {"recipe.name": "fp32", "training.steps": 30, "training.batch_size": 8, "checkpoint.every": 30}
    assert narrowgauge(*line(changes), "--out", run).code == 0
    return run


@pytest.fixture(scope="module")
def costs(trained):
    probed = open_probed(trained, "cpu", batches=2, batch_size=4)
    rule, mxfp4 = update_rule(probed.trained), cast("mxfp4")
    return estimate_costs(probed.subject, mxfp4, rule), exact_costs(probed.subject, mxfp4, rule)


def test_every_layer_has_every_place(costs):
    estimated, exact = costs
    assert [c.name for c in estimated] == [c.name for c in exact]
    assert len(estimated) == 9 * len(GEMM_PLACES)


def test_the_estimate_ranks_as_the_measurement_does(costs):
    assert sensitivity_json(*costs)["rank_correlation"] > 0.8


def test_the_gradient_of_a_weight_is_estimated_exactly(costs):
    for estimate, exact in zip(*costs, strict=True):
        if estimate.place.startswith("wgrad."):
            assert estimate.cost == pytest.approx(exact.cost, rel=1e-3), estimate.name


def test_a_wide_cast_costs_nothing(trained):
    probed = open_probed(trained, "cpu", batches=2)
    rule = update_rule(probed.trained)
    assert all(c.cost == 0 for c in exact_costs(probed.subject, cast("fp32"), rule))
    assert all(abs(c.cost) < 1e-12 for c in estimate_costs(probed.subject, cast("fp32"), rule))


def test_adam_moves_as_the_optimizer_does():
    """The direction is that of torch's AdamW, without decay, at a learning rate of one."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 7, generator=generator) for _ in range(4)]
    p = torch.nn.Parameter(torch.zeros(5, 7))
    optimizer = torch.optim.AdamW([p], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    for g in gradients[:3]:
        p.grad = g.clone()
        optimizer.step()
    state, before = optimizer.state[p], p.detach().clone()
    rule = UpdateRule({"p": Moments(state["exp_avg"].clone(), state["exp_avg_sq"].clone(), 3)})
    p.grad = gradients[3].clone()
    optimizer.step()
    torch.testing.assert_close(before - p.detach(), rule.direction("p", gradients[3]), rtol=1e-5, atol=1e-6)


def test_the_command_names_the_four_worst(narrowgauge, trained, costs):
    done = narrowgauge("sensitivity", trained, "--to", "mxfp4", "--batches", 2, "--batch-size", 4, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found == json.loads((trained / "sensitivity.json").read_text())
    assert found["worst"] == [cost.name for cost in worst(costs[0])]
    shown = narrowgauge("sensitivity", trained, "--to", "mxfp4", "--batches", 2, "--batch-size", 4)
    assert f"worst: {', '.join(found['worst'])}" in shown.out
    assert shown.out.count("*") == 5  # four in the map, one in the note


def test_what_is_not_finite_is_null_in_json(narrowgauge, trained):
    """Nothing is lost in fp32, and equal costs have no rank."""
    words = ("sensitivity", trained, "--to", "fp32", "--batches", 1, "--batch-size", 2, "--exact")
    done = narrowgauge(*words, "--json")
    assert done.code == 0, done.err
    for text in (done.out, (trained / "sensitivity.json").read_text()):
        assert json.loads(text, parse_constant=pytest.fail)["rank_correlation"] is None
    assert "measured: none, all are equal" in narrowgauge(*words).out
    costs = [Cost("a", "fprop.x", math.nan), Cost("a", "fprop.w", 1.0)]
    assert [line["cost"] for line in sensitivity_json(costs, None)["layers"]] == [None, 1.0]


def test_a_cast_of_state_is_refused(narrowgauge, trained):
    done = narrowgauge("sensitivity", trained, "--to", "fp16-scaled")
    assert done.code == 2
    assert "is for state" in done.err


def test_dropout_and_z_loss_are_left_out(narrowgauge, line, tmp_path):
    """Both belong to training; with them the same weights would have another loss each time."""
    changes = {"model.dropout": 0.5, "training.z_loss": 1e-2, "training.steps": 2, "recipe.name": "bf16"}
    run = tmp_path / "run"
    assert narrowgauge(*line(changes), "--out", run).code == 0
    probed = open_probed(run, "cpu", batches=2, batch_size=2)
    (found,) = probe(probed.subject, [recipe("fp32")], draws=1)
    assert found.figures["loss_increase"].mean == 0
    assert found.figures["effective_bits"].mean == float("inf")
    costs = exact_costs(probed.subject, cast("fp32"), update_rule(probed.trained))
    assert all(cost.cost == 0 for cost in costs)
