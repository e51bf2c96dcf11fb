"""What is compiled of the activations: widths of Qwen 2.5 and GPT-2."""

import torch

from narrowgauge.kernels.triton import activation


def swiglu(F, dtype):
    gate_up = torch.ones(2, 2 * F, dtype=dtype)
    activation.launch_swiglu_backward(activation.launch_swiglu(gate_up)[0], gate_up)


def gelu(F, dtype):
    x = torch.ones(2, F, dtype=dtype)
    activation.launch_gelu_backward(activation.launch_gelu(x)[0], x)


CASES = [
    lambda: swiglu(8960, torch.bfloat16),
    lambda: swiglu(4864, torch.float16),
    lambda: swiglu(96, torch.float32),
    lambda: gelu(3072, torch.bfloat16),
    lambda: gelu(3072, torch.float32),
]
