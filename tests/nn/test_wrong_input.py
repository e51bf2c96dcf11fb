"""What a converted layer answers to wrong input, and what a layer does with a state dict's own tensors."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UserError

RECIPES = ("fp32", "fp8", "fp8-delayed", "nvfp4", "bf16-sr", "msamp-o2", "eco")
NO_INPUTS = (torch.tensor(1.0), torch.zeros(4, 63), [1.0, 2.0], None, torch.zeros(0))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_no_input_is_refused(name):
    m = ng.convert(model(), name, keep=[])
    for wrong in NO_INPUTS:
        with pytest.raises(UserError, match=r"the input of a layer has .*: give a tensor \(\.\.\., 64\)"):
            m(wrong)


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_without_values_takes_the_tensors_of_a_state_dict(name):
    """As large models are loaded: on the meta device first, then `load_state_dict(assign=True)`."""
    values, x = model().state_dict(), torch.randn(8, 64)
    m = ng.convert(model().to("meta"), name, keep=[])
    m.load_state_dict(values, assign=True)
    loaded = ng.convert(model(), name, keep=[])
    for each in (m, loaded):
        ng.set_step(each, 0, 1, 0)
        each(x).square().mean().backward()
    assert torch.equal(m(x), loaded(x))
    assert all(not p.is_meta for p in m.parameters())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("name", [*RECIPES, "msamp-o1", "msamp-o3"])
def test_a_layer_without_inputs_returns_its_bias(name):
    layer = ng.convert(nn.Linear(0, 4), name, keep=[])
    optimizer = ng.AdamW(layer.parameters(), name)
    y = layer(torch.zeros(3, 0))
    assert torch.equal(y, layer.bias.expand(3, 4).to(y.dtype))
    y.sum().backward()
    optimizer.step()
