"""What is compiled around a product, and of the signs of a transform."""

import torch

from narrowgauge.kernels.triton.product import launch_scaled, launch_scaled_rows, launch_transposed
from narrowgauge.kernels.triton.rounding import launch_signs

CASES = [
    lambda: launch_scaled(torch.ones(64, 1536), torch.ones(()), torch.bfloat16),
    lambda: launch_transposed(torch.ones(128, 1536, dtype=torch.uint8)),
    lambda: launch_scaled(torch.ones(64, 1536), torch.ones(()), torch.bfloat16, torch.ones(())),
    lambda: launch_scaled_rows(
        torch.ones(64, 1536), torch.ones(64, 1536), torch.ones(64), torch.ones(1536), torch.bfloat16
    ),
    lambda: launch_signs(torch.ones(2, dtype=torch.int32), 32),
]
