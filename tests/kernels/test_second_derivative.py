"""The operations that a kernel computes refuse a second derivative in a sentence, as converted layers do."""

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.kernels.heads import rotary, split_heads
from narrowgauge.kernels.norm import norm
from support.derivatives import SENTENCE, WAYS

LABELS = torch.tensor([0, 3, 5, 1])
TABLE = torch.stack([torch.ones(4, 2), torch.zeros(4, 2)])  # cosines, sines
OPERATIONS = {
    "norm": lambda x: norm(x, torch.ones(8, device=x.device), None, 1e-5, "rms", torch.float32),
    "swiglu": swiglu,
    "gelu": gelu,
    "cross_entropy": lambda x: cross_entropy(x, LABELS.to(x.device)),
    "rotary": lambda x: rotary(x.view(1, 2, 4, 4), TABLE.to(x.device)),
    "split_heads": lambda x: split_heads(x.view(1, 4, 8), None, TABLE[..., :1].to(x.device), (2, 1, 1), 2)[0],
}


@pytest.mark.parametrize("way", ["functional.hessian", "func.grad"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_more_than_a_first_derivative_is_refused(device, name, way):
    def loss(x):
        results = OPERATIONS[name](x)
        return (results[0] if isinstance(results, tuple) else results).sum()

    with pytest.raises(UserError, match=SENTENCE[way]):
        WAYS[way](loss, torch.linspace(-1, 1, 32).view(4, 8).to(device))
