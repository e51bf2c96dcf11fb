"""AdamW of a matrix of a 7B model under each way to keep its state."""

from functools import partial

import torch

from narrowgauge.kernels.adamw import stored_tensors
from narrowgauge.quantization import QuantizedState, make_cast

E4M3 = {"cast": "e4m3", "power_of_two": True}
E5M2 = {"cast": "e5m2", "rounding": "stochastic"}
SR = {"cast": "bf16", "rounding": "stochastic"}
FACTORS = (0.99, 0.1, 0.95, 0.05, 1e-3, 0.5, 1e-8)
KEYS = [(2 * i + 5, -2 * i - 7) for i in range(4)]


def run(w, g, m, v, weight=None, from_m=True):
    from narrowgauge.kernels.triton.adamw import launch_update  # compiled or interpreted

    shape = torch.Size((512, 4096))
    states = [
        None if c is None else stored_tensors(QuantizedState(shape, make_cast(c)))
        for c in (w, g, m, v, weight)
    ]
    launch_update(states[:4], states[4], FACTORS, from_m, KEYS)


CASES = [
    partial(run, "fp16-scaled", E4M3, "fp32", "fp32"),  # msamp-o1
    partial(run, "fp16-scaled", E4M3, E4M3, "fp16-scaled"),  # msamp-o2
    partial(run, "fp16-scaled", E4M3, E4M3, "fp16-scaled", E4M3),  # msamp-o3
    partial(run, SR, SR, "fp32", "fp32"),  # bf16-sr
    partial(run, "fp32", "bf16", "bf16", "bf16", from_m=False),
    partial(run, "fp32", "fp32", E5M2, E5M2, SR),
]
