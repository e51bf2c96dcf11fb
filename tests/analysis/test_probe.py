"""The probe's figures of recipes whose effect on a gradient is known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from narrowgauge.recipes import parse_recipe, recipe, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.analysis import probe, probe_json
from narrowgauge.trainer.analysis.gradient import Position, loss_and_gradient
from narrowgauge.trainer.analysis.probe import Subject
from narrowgauge.trainer.data import Mixture, TokenStream, training_batch
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.build_model import build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject(tiny):
    """The weights of a tiny model at its start, on three batches of random tokens."""
    spec = make_config(tiny({"recipe.name": "fp32", "model.initial_std": 0.02})).spec
    weights = {n: p.detach().clone() for n, p in build_model(spec, CPU).named_parameters()}
    tokens = np.random.default_rng(1).integers(0, 257, 4096, dtype=np.int32)
    train = Mixture((TokenStream((tokens,)),))
    batches = [training_batch(train, 0, first, 4, 32) for first in (0, 4, 8)]
    return Subject(spec, weights, Position(7, 3, 10, 4), batches, CPU)


@pytest.fixture(scope="module")
def probed(subject):
    return probes_of(subject, "quartet", "mxfp4", "nvfp4")


def probes_of(subject, *names):
    return {p.recipe: p for p in probe(subject, [recipe(name) for name in names], draws=4)}


@pytest.mark.tier("thorough")
def test_exact_arithmetic_has_no_error_and_fewer_bits_are_fewer_effective_bits(subject, probed):
    found = probed | probes_of(subject, "fp32", "bf16", "fp8")
    figures = found["fp32"].figures
    assert (figures["loss_increase"].mean, figures["effective_bits"].mean) == (0, math.inf)
    assert figures["gradient_cosine"].mean == pytest.approx(1, abs=1e-12)
    assert figures["gradient_bias"].mean == pytest.approx(0, abs=1e-12)
    assert all(layer.relative_error == 0 for layer in found["fp32"].layers)
    bits = [found[name].figures["effective_bits"].mean for name in ("bf16", "fp8", "mxfp4", "quartet")]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > 7


def test_stochastic_rounding_is_unbiased_and_nearest_is_all_bias(probed):
    slopes = {name: p.figures["averaging_slope"].mean for name, p in probed.items()}
    assert slopes["quartet"] == pytest.approx(0.5, abs=0.05)
    assert slopes["mxfp4"] == 0
    assert 0.05 < slopes["nvfp4"] < 0.45  # random in dy, to nearest in the weights
    assert probed["mxfp4"].figures["noise_ratio"].mean == math.inf
    assert 1 < probed["quartet"].figures["noise_ratio"].mean < 1000


@pytest.mark.tier("thorough")
def test_rounding_the_forward_numbers_at_random_is_unbiased_too(subject):
    """Both recipes round the numbers of the forward pass once more, and their mean is these numbers."""
    fair = [recipe("quartet2"), recipe("tetrajet2")]
    biased = [replace(with_nearest_gradients(r), name=f"{r.name}-nearest") for r in fair]
    slopes = {p.recipe: p.figures["averaging_slope"] for p in probe(subject, fair + biased, draws=16)}
    for r in fair:
        assert slopes[r.name].low <= 0.5 <= slopes[r.name].high, r.name
        assert slopes[r.name].low > 0.45
        assert slopes[f"{r.name}-nearest"].high < 0.4


def with_nearest_gradients(r):
    """The recipe with output gradients rounded to nearest, and without transforms, which dither them."""
    again = {"cast": "nvfp4", "rounding": "stochastic"}
    places = {"dgrad.w": {**again, "of": "fprop.w"}, "wgrad.x": {**again, "of": "fprop.x"}}
    return r.with_places({"dgrad.dy": "nvfp4", "wgrad.dy": "nvfp4", **places})


def test_the_layers_that_a_recipe_keeps_are_hurt_least(probed):
    errors = {layer.parameter: layer.relative_error for layer in probed["nvfp4"].layers}
    assert errors["head.weight"] < 0.01 < errors["blocks.0.qkv.weight"]


# One recipe of each way in which the backward pass reads the forward pass.
@pytest.mark.tier(
    "thorough",
    keep=("bf16", "fp8-delayed", "fp8-attention", "mxfp8-fwd-nvfp4-bwd", "averis", "tetrajet2-outliers"),
)
@pytest.mark.parametrize("name", recipe_names())
def test_the_reference_sees_the_same_forward_pass(name, subject):
    r = recipe(name)
    models = [subject.model(v) for v in (r.with_places({"compute": "fp32"}), r.with_wide_backward())]
    narrow, reference = (loss_and_gradient(m, subject.batches[0], subject.position)[0] for m in models)
    assert narrow.hex() == reference.hex()


def test_a_recipe_with_a_misspelt_layer_is_refused(subject):
    with pytest.raises(UserError, match=r"modules = \['haed'\] matches no layer .* nearest name is 'head'"):
        probe(subject, [recipe("mxfp4"), parse_recipe('[keep]\nmodules = ["haed"]', "mine.toml")])


@pytest.mark.tier("thorough")
def test_the_same_numbers_every_time(subject, probed):
    again = probe(subject, [recipe("quartet")], draws=4)
    assert probe_json(again) == probe_json([probed["quartet"]])


@pytest.mark.tier("thorough")
def test_a_run_is_probed_by_the_command(narrowgauge, trained):
    run = trained({"recipe.name": "bf16"})
    done = narrowgauge("probe", run, "--recipes", "bf16,mxfp4", "--batches", 2, "--draws", 2, "--json")
    assert done.code == 0
    kept = json.loads((run / "probe.json").read_text())
    assert kept == json.loads(done.out)
    assert list(kept["recipes"]) == ["bf16", "mxfp4"]
    figures = "loss_increase gradient_cosine gradient_bias averaging_slope effective_bits noise_ratio layers"
    assert set(kept["recipes"]["mxfp4"]) == set(figures.split())
    assert kept["recipes"]["mxfp4"]["noise_ratio"] == {"mean": None, "low": None, "high": None}
    table = narrowgauge("probe", run, "--recipes", "mxfp4", "--batches", 2)
    assert "largest relative errors of gradients: " in table.out
    one = narrowgauge("probe", run, "--batches", 1)
    assert (one.code, "an interval needs two" in one.err) == (2, True)
