"""Attention, rotary positions and norms against their formulas."""

import math

import pytest
import torch

from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.heads import rotary
from narrowgauge.models import model_config
from narrowgauge.models.layers import Norm, rope_table


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_grouped_attention_equals_the_formula():
    """Query head n reads key-value head n // 3; written out with loops and a mask, in double precision."""
    B, N, K, T, H = 2, 6, 2, 9, 8
    q, k, v = normal(B, N, T, H), normal(B, K, T, H, seed=1), normal(B, K, T, H, seed=2)
    y_BNTH = attend(q, k, v)
    for n in range(N):
        scores_BTT = q[:, n].double() @ k[:, n // 3].double().transpose(1, 2) / math.sqrt(H)
        scores_BTT.masked_fill_(torch.ones(T, T).triu(1).bool(), -math.inf)
        expected_BTH = (scores_BTT.softmax(-1) @ v[:, n // 3].double()).float()
        torch.testing.assert_close(y_BNTH[:, n], expected_BTH)


def test_rope_makes_products_depend_on_distance_only():
    table = rope_table(model_config("debug"), 40, torch.device("cpu"))
    q_H, k_H = normal(64), normal(64, seed=1)
    q_TH, k_TH = (rotary(x.expand(1, 1, 40, 64), table)[0, 0] for x in (q_H, k_H))
    scores_TT = q_TH @ k_TH.T
    for distance in (0, 3, 20):
        diagonal = scores_TT.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q_TH[0], q_H)
    torch.testing.assert_close(q_TH.norm(dim=1), q_H.norm().expand(40))


def test_rope_scaling_stretches_slow_turns_and_leaves_fast_ones():
    configs = model_config("llama3-1b", rope_factor=1.0), model_config("llama3-1b")
    angle = torch.stack([rope_table(c, 2, torch.device("cpu"))[:, 1] for c in configs])
    freqs = torch.atan2(angle[:, 1], angle[:, 0])
    turns, ratio = 8192 * freqs[0] / (2 * math.pi), freqs[0] / freqs[1]
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 32.0), rtol=1e-4, atol=0)
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1) & (between < 32)).all()


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
