"""Casts that follow from a cast are made and validated once, not in each call."""

import copy
import pickle
import sys

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import recipe

KEPT = {"cast": "mxfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}
TABLES = {
    "stochastic": ({"cast": "mxfp4", "rounding": "stochastic"}, "to_nearest"),
    "kept channels": (KEPT, "of_the_rest"),
    "corrected": (recipe("quartet2").casts["dgrad.dy"], "uncorrected"),
    "plain": ("e4m3", "to_nearest"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_derived_cast_is_the_same_object_each_time(kind):
    table, derived = TABLES[kind]
    made = make_cast(table)
    assert getattr(made, derived) is getattr(made, derived)
    assert (getattr(made, derived) is made) == (kind == "plain")
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again == made
        assert getattr(again, derived) == getattr(made, derived)


@pytest.mark.parametrize("name", ["quartet2", "tetrajet2-outliers"])
def test_no_cast_is_validated_while_a_layer_computes(name, monkeypatch):
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), name, keep=[])
    x, validated = torch.randn(64, 64, requires_grad=True), []
    for step in (1, 2):
        ng.set_step(model, 0, step, 0, steps=10)
        model(x).sum().backward()
        monkeypatch.setattr(sys.modules[Cast.__module__], "require_valid", validated.append)
    assert validated == []
