"""What is compiled of a product's scale, and of the signs of a transform."""

import torch

from narrowgauge.kernels.triton.product_scale import launch_scaled
from narrowgauge.kernels.triton.rounding import launch_signs

CASES = [
    lambda: launch_scaled(torch.ones(64, 1536), torch.ones(()), torch.bfloat16),
    lambda: launch_signs(torch.ones(2, dtype=torch.int32), 32),
]
