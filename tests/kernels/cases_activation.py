"""What is compiled of the activations: widths of Qwen 2.5 and GPT-2."""

from unittest.mock import patch

import torch

from narrowgauge.formats import format
from narrowgauge.kernels.amax import DelayedScale
from narrowgauge.kernels.triton import activation, swiglu_codes


def swiglu(F, dtype):
    gate_up = torch.ones(2, 2 * F, dtype=dtype)
    activation.launch_swiglu_backward(activation.launch_swiglu(gate_up)[0], gate_up)


def codes(F):
    gate_up, amax = torch.ones(64, 2 * F, dtype=torch.bfloat16), torch.ones(())
    activation.launch_swiglu_backward(gate_up[:, :F].contiguous(), gate_up, writes_gradient=False)
    dy, formats = gate_up[:, :F].contiguous(), (format("e5m2"), format("e4m3"))
    swiglu_codes.launch_swiglu_backward_codes(dy, gate_up, amax, amax, *formats)
    delayed = DelayedScale(amax, torch.ones(()))
    _, scales = swiglu_codes.launch_swiglu_codes(gate_up, formats[1], delayed)
    swiglu_codes.launch_swiglu_backward_codes(dy, gate_up, torch.zeros(()), scales, *formats, delayed)


def converted(F):
    """As on a GPU that rounds to FP8 by one instruction."""
    with patch.object(swiglu_codes, "is_converted", lambda *_: True):
        codes(F)


def gelu(F, dtype):
    x = torch.ones(2, F, dtype=dtype)
    activation.launch_gelu_backward(activation.launch_gelu(x)[0], x)


CASES = [
    lambda: swiglu(8960, torch.bfloat16),
    lambda: swiglu(4864, torch.float16),
    lambda: swiglu(96, torch.float32),
    lambda: codes(8960),
    lambda: converted(8960),
    lambda: gelu(3072, torch.bfloat16),
    lambda: gelu(3072, torch.float32),
]
