"""The sum of gradients of a matrix of a 7B model: the first of a step, and a further one."""

from functools import partial

import torch

from narrowgauge.quantization import make_cast

CAST = {"cast": "e4m3", "power_of_two": True, "rounding": "stochastic"}


def run(is_empty, prescales, dtype=torch.bfloat16):
    from narrowgauge.kernels.triton.gradient_sum import launch_sum  # compiled or interpreted

    codes, scale = torch.empty(4096, 4096, dtype=torch.uint8), torch.ones(())
    dw = torch.empty(4096, 4096, dtype=dtype)
    random = torch.zeros(2, dtype=torch.int32), torch.zeros((), dtype=torch.int64)
    factors = (torch.ones(()), torch.ones(())) if prescales else None
    launch_sum(codes, scale, make_cast(CAST), dw, is_empty, random, factors)


CASES = [partial(run, True, True), partial(run, False, True), partial(run, False, False, torch.float32)]
