"""Documents kept apart in one sequence: each comes out as it would alone."""

import pytest
import torch

from models.built import built
from narrowgauge.kernels.attention import document_mask

LENGTHS = [7, 1, 12, 4]
POSITION_BT = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(2, -1)


def make(name="debug", **dimensions):
    model = built(name, 3, initial_std=0, **dimensions)
    for parameter in model.parameters():  # larger weights, so that attention looks at something
        parameter.data *= 8 if parameter.dim() > 1 else 1
    return model


def ids(seed):
    return torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dimensions", [{"kv_heads": 2}, {"name": "gpt2-debug"}], ids=str)
def test_each_document_is_as_it_would_be_alone_and_no_gradient_crosses_a_border(dimensions):
    model, x_BT, inputs = make(**dimensions), ids(0), []
    together = model(x_BT, POSITION_BT).split(LENGTHS, dim=1)
    alone = [model(part) for part in x_BT.split(LENGTHS, dim=1)]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x_BT)[:, 8:], torch.cat(together, 1)[:, 8:], rtol=1e-2, atol=1e-2)

    model.embedding.register_forward_hook(
        lambda m, i, out: inputs.append(out.requires_grad_().retain_grad() or out)
    )
    for model.recompute in (False, True):
        model(x_BT, POSITION_BT)[:, 8:20].sum().backward()
        reached = inputs[-1].grad.abs().sum(dim=(0, 2)) > 0
        assert reached.tolist() == [False] * 8 + [True] * 12 + [False] * 4


def test_the_mask_is_made_of_blocks():
    blocks = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)) > 0
    assert document_mask(POSITION_BT).equal(blocks.expand(2, 1, 24, 24))
