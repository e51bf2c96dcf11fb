"""Each idiom with a narrow weight gives what it gives in fp32, to rounding, or is refused in a sentence."""

import pytest
import torch
from torch import nn

from narrowgauge.system.errors import UserError
from nn import idioms
from nn.own_loop import model

RECIPES = ("bf16-sr", "msamp-o2", "msamp-o3", "eco")
#: The largest relative error of one rounding of a weight; that of bf16-sr may be upward or downward.
ROUNDING = {"bf16-sr": 2.0**-7, "msamp-o2": 2.0**-11, "msamp-o3": 2.0**-4, "eco": 2.0**-4}
#: Norm of the error of a gradient over that of the gradient: matmuls in bf16 or FP8, then its own format.
GRADIENT_ERROR = {"bf16-sr": 0.02, "msamp-o2": 0.15, "msamp-o3": 0.15, "eco": 0.02}
NO_MEMORY = "has no memory with its values: take a copy, "


def pair(name):
    """A model under a recipe, and a plain one with the same values."""
    m = model(name, keep=[])
    twin = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    twin.load_state_dict({k: v.detach().clone() for k, v in m.state_dict().items()})
    return m, twin


def listed(result):
    found = list(result) if isinstance(result, list | tuple) else [result]
    return [t.detach() if isinstance(t, torch.Tensor) else torch.as_tensor(t) for t in found]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("idiom", idioms.READS)
def test_reads_are_exact(name, idiom):
    m, twin = pair(name)
    run = idioms.READS[idiom]
    if idiom == "safetensors_of_parameters":
        with pytest.raises(UserError, match=NO_MEMORY):
            run(m)
        return
    for found, expected in zip(listed(run(m)), listed(run(twin)), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("idiom", idioms.GRADIENTS)
def test_gradients_arrive_by_every_path(name, idiom):
    m, twin = pair(name)
    run = idioms.GRADIENTS[idiom]
    for found, expected in zip(listed(run(m)), listed(run(twin)), strict=True):
        assert found.shape == expected.shape
        assert (found.float() - expected).norm() <= GRADIENT_ERROR[name] * expected.norm()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("idiom", idioms.WRITES)
def test_writes_round_once(name, idiom):
    m, twin = pair(name)
    run = idioms.WRITES[idiom]
    largest = max(w.abs().max().item() for w in idioms.weights(twin))
    atol = 2.0**-8 * largest
    if name == "msamp-o3":
        atol = 2.0**-4 * largest  # it is the master that is written to, and the twin has the rounded weights
    for found, expected in zip(run(m), run(twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=2 * ROUNDING[name], atol=atol)
    layer = m[0]
    again = layer.forward_weight() if name != "eco" else layer.weight.detach()
    assert (again - layer.weight).norm() <= 0.04 * layer.weight.norm(), "the next pass sees what was written"
