"""What is compiled of the heads: Qwen's with a bias, Llama's without, GPT-2's without positions."""

import torch

from narrowgauge.kernels.triton.heads import launch_split, launch_split_backward


def case(N, K, H, has_bias=True, has_table=True):
    C = (N + 2 * K) * H
    qkv_BTC = torch.ones(1, 64, C, dtype=torch.bfloat16)
    table = torch.ones(2, 64, H // 2) if has_table else None
    out_BTC = launch_split(qkv_BTC, torch.ones(C) if has_bias else None, table, (N, K, K), H)
    heads_BTNH = out_BTC.unflatten(-1, (-1, H)).split([N, K, K], dim=2)
    launch_split_backward(*(h.transpose(1, 2) for h in heads_BTNH), table, has_bias)


CASES = [
    lambda: case(12, 2, 128),
    lambda: case(32, 8, 128, has_bias=False),
    lambda: case(12, 12, 64, has_table=False),
]
