"""Casts of real sizes."""

from functools import partial
from unittest.mock import patch

import torch

from narrowgauge.formats import random_stream
from narrowgauge.kernels.amax import DelayedScale
from narrowgauge.kernels.triton import cast_launch
from narrowgauge.kernels.triton.cast_launch import emulated, quantized
from narrowgauge.quantization import cast, make_cast


def run(name, axis, **changes):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    c = make_cast({"cast": name} | changes) if changes else cast(name)
    random = random_stream(0, 0, 0) if c.rounding.mode == "stochastic" else None
    delayed = DelayedScale(*(torch.ones(()) if c.amax.history else None for _ in range(2)))
    quantized(x, c, axis, random, (), delayed)
    emulated(x, c, axis, torch.bfloat16, random, (), delayed)


def converted(name, axis):
    """As on a GPU that rounds to FP8 by one instruction."""
    with patch.object(cast_launch, "is_converted", lambda *_: True):
        run(name, axis)


CASES = [
    partial(run, name, axis)
    for name in ("e4m3", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4-2d")
    for axis in (-1, 0)
]
CASES += [
    partial(run, "nvfp4", 0, rounding="stochastic", hadamard=16),
    partial(run, "mxfp4", -1, rounding="stochastic", hadamard=32),
    partial(run, "e4m3", -1, history=4),
]
CASES += [
    partial(converted, name, axis)
    for name, axis in (("e4m3", -1), ("e4m3", 0), ("e5m2", -1), ("fp8-1x128", 0), ("mxfp8", -1), ("mxfp8", 0))
]
