"""Costs of single places: the estimate against the measurement, and both against what is known."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.quantization import cast
from narrowgauge.recipes import GEMM_PLACES, recipe
from narrowgauge.trainer.analysis import (
    backward_costs,
    exact_backward_costs,
    forward_costs,
    open_probed,
    probe,
    sensitivity_json,
    step_metric,
    worst,
)
from narrowgauge.trainer.analysis.gradient import loss_and_gradient, loss_of
from narrowgauge.trainer.analysis.sensitivity import Cost
from narrowgauge.trainer.analysis.update import lost, progress

#: A tiny model after thirty steps: enough for its predictions not to be uniform.
CHANGES = {"recipe.name": "fp32", "training.steps": 30, "training.batch_size": 8, "checkpoint.every": 30}
CHANGES |= {"model.initial_std": 0.02}


@pytest.fixture(scope="module")
def run(trained):
    return trained(CHANGES)


@pytest.fixture(scope="module")
def costs(run):
    """Costs in MXFP4: of the forward pass, of the backward pass as estimated, and as measured."""
    probed = open_probed(run, "cpu", batches=2, batch_size=4)
    metric, mxfp4 = step_metric(probed.trained), cast("mxfp4")
    return (
        forward_costs(probed.subject, mxfp4),
        backward_costs(probed.subject, mxfp4, metric),
        exact_backward_costs(probed.subject, mxfp4, metric),
    )


@pytest.mark.tier("thorough")
def test_every_layer_has_every_place_and_the_estimate_ranks_as_the_measurement_does(costs):
    forward, estimated, exact = costs
    assert sorted(c.name for c in estimated) == sorted(c.name for c in exact)
    assert len(forward) + len(exact) == 9 * len(GEMM_PLACES)
    assert [{c.unit for c in found} for found in (forward, exact)] == [{"nats"}, {"share"}]
    assert sensitivity_json(*costs)["rank_correlation"] > 0.9


def test_the_gradient_of_a_weight_is_estimated_exactly(costs):
    _, estimated, exact = costs
    measured = {c.name: c.cost for c in exact}
    for estimate in estimated:
        if estimate.place.startswith("wgrad."):
            assert estimate.cost == pytest.approx(measured[estimate.name], rel=1e-3), estimate.name


def test_a_forward_cost_is_the_loss_that_a_recipe_adds(run, costs):
    """The same layer narrowed by a separate recipe, and the means of both batches."""
    subject = open_probed(run, "cpu", batches=2, batch_size=4).subject
    wide = subject.model(recipe("fp32"))
    narrow = subject.model(recipe("fp32").with_places({"fprop.w": "mxfp4"}).in_high_precision(["blocks.*"]))
    added = [
        loss_of(narrow, b, subject.position) - loss_of(wide, b, subject.position) for b in subject.batches
    ]
    (cost,) = (c for c in costs[0] if c.name == "head.fprop.w")
    assert cost.cost == pytest.approx(sum(added) / 2, rel=1e-6)
    assert cost.low < cost.cost < cost.high


@pytest.mark.tier("thorough")
def test_a_wide_cast_costs_nothing(run):
    probed = open_probed(run, "cpu", batches=2)
    metric, fp32 = step_metric(probed.trained), cast("fp32")
    assert all(c.cost == 0 for c in forward_costs(probed.subject, fp32))
    assert all(c.cost == 0 for c in exact_backward_costs(probed.subject, fp32, metric))
    assert all(abs(c.cost) < 1e-12 for c in backward_costs(probed.subject, fp32, metric))


def test_sensitivity_share_is_what_a_best_step_along_the_narrow_gradient_leaves():
    """The oracle minimizes a quadratic loss of curvature 1 / P along P g' by its formula."""
    generator = torch.Generator().manual_seed(0)
    g, error, p = (torch.rand(7, 5, generator=generator, dtype=torch.float64) for _ in range(3))

    def removed(direction):
        lengths = torch.linspace(0, 2, 200_001, dtype=torch.float64)
        linear, square = (g * direction).sum(), (direction.square() / p).sum()
        return (lengths * linear - lengths.square() / 2 * square).max().item()

    share = lost({"w": p}, {"w": g}, {"w": error}) / progress({"w": p}, {"w": g})["w"]
    assert share == pytest.approx(1 - removed(p * (g + error)) / removed(p * g), abs=1e-9)
    assert lost({"w": p}, {"w": g}, {"w": -0.5 * g}) == pytest.approx(0, abs=1e-12)  # only shorter
    assert lost({"w": p}, {"w": g}, {"w": -g}) == progress({"w": p}, {"w": g})["w"]  # nothing is left


def test_the_metric_is_that_of_the_optimizer_of_the_run(run):
    """AdamW's next step is its momentum times P: with a momentum of zero, a step of torch's AdamW shows P."""
    probed = open_probed(run, "cpu", batches=1, batch_size=2)
    metric, subject = step_metric(probed.trained), probed.subject
    _, gradient = loss_and_gradient(subject.model(recipe("fp32")), subject.batches[0], subject.position)
    factors = metric.factors(gradient)
    assert set(metric.moments) == set(gradient)
    for name, g in gradient.items():
        p = torch.nn.Parameter(torch.zeros_like(g))
        optimizer = torch.optim.AdamW([p], lr=1.0, betas=(0.0, metric.beta2), eps=metric.eps, weight_decay=0)
        state = metric.moments[name]
        optimizer.state[p] = {
            "step": torch.tensor(float(state.steps)),
            "exp_avg": torch.zeros_like(g),
            "exp_avg_sq": state.v.clone(),
        }
        p.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(-p.detach(), factors[name] * g, rtol=1e-4, atol=1e-7)


@pytest.fixture
def costs_with(narrowgauge, run, text, tmp_path):
    """The JSON of `sensitivity` of the model in a Hugging Face folder, with some weights multiplied."""
    folder, file = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    assert narrowgauge("export", run, "--to", "hf", "--out", folder).code == 0
    weights = {name: w.clone() for name, w in load_file(file).items()}

    def ask(changes):
        assert set(changes) <= set(weights)
        changed = {name: (w * changes.get(name, 1)).contiguous() for name, w in weights.items()}
        save_file(changed, file, metadata={"format": "pt"})
        words = ("--to", "mxfp4", "--data", text, "--batches", 2, "--batch-size", 4, "--sequence-length", 32)
        done = narrowgauge("sensitivity", folder, *words, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return ask


def test_the_sick_layer_is_the_worst(costs_with):
    """An outlier in one channel of a layer's input leaves the function as it is, and a narrow block without
    its other channels."""
    outlier, inverse = torch.ones(32), torch.ones(32)
    outlier[3], inverse[3] = 1000.0, 1 / 1000.0
    layer = "model.layers.1"
    changes = {f"{layer}.self_attn.{name}_proj.weight": inverse for name in "qkv"}
    found = costs_with({f"{layer}.input_layernorm.weight": outlier, **changes})
    first, second = (
        next(c for c in found["layers"] if f"{c['layer']}.{c['place']}" == n) for n in found["worst"][:2]
    )
    assert (first["layer"], first["place"], first["unit"]) == ("blocks.1.qkv", "fprop.x", "nats")
    assert first["low"] > 0.05 > 2 * second["cost"]


@pytest.mark.tier("thorough")
def test_costs_do_not_depend_on_how_a_function_is_written(costs_with):
    """A tensor times 8 and the next one by 8 are the same model, also in each place of the backward pass."""
    layer = "model.layers.0"
    changes = {
        f"{layer}.mlp.up_proj.weight": 8.0,
        f"{layer}.mlp.down_proj.weight": 1 / 8,
        f"{layer}.input_layernorm.weight": 4.0,
        **{f"{layer}.self_attn.{name}_proj.weight": 1 / 4 for name in "qkv"},
    }
    plain, scaled = (costs_with(of)["layers"] for of in ({}, changes))
    for one, other in zip(plain, scaled, strict=True):
        assert (one["layer"], one["place"]) == (other["layer"], other["place"])
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-3, abs=1e-6), one


@pytest.mark.tier("thorough")
def test_the_command_names_the_four_worst(narrowgauge, run, costs):
    done = narrowgauge("sensitivity", run, "--to", "mxfp4", "--batches", 2, "--batch-size", 4, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found == json.loads((run / "sensitivity.json").read_text())
    assert found["worst"] == [cost.name for cost in worst(costs[0])]
    assert found["worst_backward"] == [cost.name for cost in worst(costs[1])]
    assert {(line["place"].startswith("fprop."), line["unit"]) for line in found["layers"]} == {
        (True, "nats"),
        (False, "share"),
    }
    shown = narrowgauge("sensitivity", run, "--to", "mxfp4", "--batches", 2, "--batch-size", 4)
    assert f"worst: {', '.join(found['worst'])}" in shown.out
    assert f"worst backward: {', '.join(found['worst_backward'])}" in shown.out
    assert shown.out.count("*") == 9  # eight in the map, one in the note


@pytest.mark.tier("thorough")
def test_what_is_not_finite_is_null_in_json(narrowgauge, run):
    """Nothing is lost in fp32, and equal costs have no rank."""
    words = ("sensitivity", run, "--to", "fp32", "--batches", 1, "--batch-size", 2, "--exact")
    done = narrowgauge(*words, "--json")
    assert done.code == 0, done.err
    for text in (done.out, (run / "sensitivity.json").read_text()):
        assert json.loads(text, parse_constant=pytest.fail)["rank_correlation"] is None
    assert "measured: none, all are equal" in narrowgauge(*words).out
    costs = [Cost("a", place, math.nan if place == "fprop.x" else 1.0) for place in GEMM_PLACES]
    found = sensitivity_json(costs[:2], costs[2:])
    assert [line["cost"] for line in found["layers"]] == [None, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_cast_of_state_is_refused(narrowgauge, run):
    done = narrowgauge("sensitivity", run, "--to", "fp16-scaled")
    assert done.code == 2
    assert "is for state" in done.err


@pytest.mark.tier("thorough")
def test_dropout_and_z_loss_are_left_out(trained):
    """Both belong to training; with them the same weights would have another loss each time."""
    changes = {"model.dropout": 0.5, "training.z_loss": 1e-2, "training.steps": 2, "recipe.name": "bf16"}
    probed = open_probed(trained(changes), "cpu", batches=2, batch_size=2)
    (found,) = probe(probed.subject, [recipe("fp32")], draws=1)
    assert found.figures["loss_increase"].mean == 0
    assert found.figures["effective_bits"].mean == float("inf")
    assert all(cost.cost == 0 for cost in forward_costs(probed.subject, cast("fp32")))
