"""What is compiled of the rotary positions: heads of 64 and 128 numbers within the qkv product."""

import torch

from narrowgauge.kernels.triton.heads import launch_rotary


def case(N, H, dtype):
    heads_BTNH = torch.ones(1, 16, N + 4, H, dtype=dtype)
    table = torch.ones(2, 16, H // 2)
    for is_back in (False, True):
        launch_rotary(heads_BTNH[:, :, :N].transpose(1, 2), table, is_back)


CASES = [lambda: case(12, 128, torch.bfloat16), lambda: case(14, 64, torch.bfloat16)]
