"""What is compiled of the norms: the widths of GPT-2, of Llama, and the widest."""

import torch

from narrowgauge.kernels.triton import norm


def case(D, kind, narrow, add=True, stream=torch.float32):
    M = 8
    x = torch.ones(M, D, dtype=stream)
    delta = x.to(narrow) if add else None
    weight_D = torch.ones(D)
    bias_D = torch.ones(D) if kind == "layer" else None
    mean_M = torch.empty(M) if kind == "layer" else None
    scale_M, amax = torch.empty(M), torch.empty(4)[0]
    norm.launch_forward(
        x, delta, weight_D, bias_D, x if add else None, x.to(narrow), mean_M, scale_M, amax, 1e-5
    )
    is_wide = stream == torch.float32
    ddelta, amax = (delta if is_wide else None, amax) if add else (None, None)
    for kept in (None, delta) if is_wide else (None,):
        norm.launch_backward(
            x.to(narrow), x, x, kept, weight_D, mean_M, scale_M, x, ddelta, amax, kind == "layer"
        )


CASES = [
    lambda: case(768, "layer", torch.bfloat16),
    lambda: case(1536, "rms", torch.bfloat16),
    lambda: case(1536, "rms", torch.bfloat16, stream=torch.bfloat16),
    lambda: case(4096, "rms", torch.bfloat16, add=False),
    lambda: case(4096, "layer", torch.float16),
    lambda: case(8192, "layer", torch.bfloat16),
]
