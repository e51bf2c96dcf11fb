"""Norms against their formulas."""

import pytest
import torch

from narrowgauge.trainer.models import model_config
from narrowgauge.trainer.models.layers import Norm


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["debug", "gpt2-debug"])
def test_norms_equal_their_formulas_and_emit_the_compute_dtype(name):
    norm = Norm(model_config(name), torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(normal(256, seed=1))
        if norm.bias is not None:
            norm.bias.copy_(normal(256, seed=2))
    x = (normal(2, 3, 256) * 7 + 2).double()
    centred = x if name == "debug" else x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    expected = expected if norm.bias is None else expected + norm.bias
    y = norm(x.float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)
