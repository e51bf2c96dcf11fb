"""A custom cast.

Any torch function from a tensor to one of the same shape and dtype. It is always emulated; whatever would
ignore it (kernels, state, exporters, scaled matmuls) refuses it.
"""

import torch

import narrowgauge as ng


def logarithmic(x: torch.Tensor) -> torch.Tensor:
    """Round each value to the nearest power of two."""
    return x.sign() * torch.exp2(x.abs().clamp(min=2.0**-16).log2().round())


ng.register_cast("log2", logarithmic)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
ng.convert(model, {"name": "log2", "fprop": {"w": "log2"}, "dgrad": "log2", "wgrad": "bf16"})
model(torch.randn(16, 64)).square().mean().backward()
print(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
