"""What is compiled of the ranks: those of an activation."""

import torch

from narrowgauge.kernels.triton.rank import launch_ranked

CASES = [lambda: launch_ranked(torch.ones(64, 1536, dtype=torch.bfloat16), 10, 90)]
