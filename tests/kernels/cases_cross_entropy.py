"""What is compiled for GPUs that are not here: rows of GPT-2's and Llama 3's vocabulary."""

import torch

from narrowgauge.kernels.triton import cross_entropy


def of(width, dtype, ignored, z_loss=0.0):
    z_TV, y_T = torch.empty(4, width, dtype=dtype), torch.empty(4, dtype=torch.long)
    _, stats_2T = cross_entropy.losses(z_TV, y_T, ignored)
    cross_entropy.losses(z_TV, y_T, ignored, torch.empty(()), z_loss)
    cross_entropy.write_gradients(z_TV, y_T, stats_2T, torch.empty(()), ignored, z_TV, z_loss)


CASES = [
    lambda: of(128256, torch.bfloat16, None),
    lambda: of(50257, torch.bfloat16, -100),
    lambda: of(50257, torch.float16, None),
    lambda: of(50257, torch.float32, -100),
    lambda: of(50257, torch.bfloat16, -100, 1e-4),
]
