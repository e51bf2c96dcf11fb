"""A training step under torch's default device: tensors are where the model is, not where new ones go."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.trainer.models import Transformer, initialize, model_config

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn_dim": 32, "vocab_size": 64, "max_sequence_length": 16}
RECIPES = ("fp8-attention", "bf16-sr", "msamp-o2", "quartet", "tetrajet2-outliers", "fp8-delayed", "eco")


def a_step(name, device):
    """The weights of a model after two steps under a recipe, and their state saved and loaded."""
    model = Transformer(model_config("debug", **SIZES, dropout=0.1), torch.bfloat16)
    initialize(model, 0)
    with torch.device(device):
        m = ng.convert(model, name)
        optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
        ids = torch.arange(64, device="cpu").reshape(2, 2, 16)
        for step in (1, 2):
            ng.set_step(m, 0, step, 0, steps=4, decay=3)
            m.loss(*ids).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        ng.load_state_dict(m, optimizer, ng.state_dict(m, optimizer))
        return [p.detach().float().clone() for p in m.parameters()]


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_has_the_same_values_whatever_the_default_device(name, kernels, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", kernels)
    assert all(map(torch.equal, a_step(name, "meta"), a_step(name, "cpu")))
