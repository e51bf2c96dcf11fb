"""What is compiled of the remedies of FP4: ranks, rows of activations and of weights, slopes."""

import torch

from narrowgauge.kernels.triton.remedies import launch_ranked, launch_rows, launch_slope
from narrowgauge.quantization import make_cast


def rows(width, cuts):
    cast, limit = make_cast({"cast": "fp4-row"}), torch.ones((), dtype=torch.bfloat16)
    dtype = torch.bfloat16 if cuts else torch.float32  # activations, or weights
    launch_rows(torch.ones(64, width, dtype=dtype), cast, (limit, limit) if cuts else None, cuts)


def slope():
    cast = make_cast({"cast": "fp4-row", "estimator_k": 5})
    launch_slope(torch.ones(64, 8960), torch.ones(64, 8960, dtype=torch.bfloat16), cast)


CASES = [
    lambda: launch_ranked(torch.ones(64, 1536, dtype=torch.bfloat16), 10, 90),
    lambda: rows(1536, True),
    lambda: rows(8960, False),
    slope,
]
