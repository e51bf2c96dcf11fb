"""What is compiled of a product's scale, and of the signs of a transform."""

import torch

from narrowgauge.kernels.triton.product_scale import launch_scaled, launch_scaled_rows
from narrowgauge.kernels.triton.rounding import launch_signs

CASES = [
    lambda: launch_scaled(torch.ones(64, 1536), torch.ones(()), torch.bfloat16),
    lambda: launch_scaled(torch.ones(64, 1536), torch.ones(()), torch.bfloat16, torch.ones(())),
    lambda: launch_scaled_rows(
        torch.ones(64, 1536), torch.ones(64, 1536), torch.ones(64), torch.ones(1536), torch.bfloat16
    ),
    lambda: launch_signs(torch.ones(2, dtype=torch.int32), 32),
]
