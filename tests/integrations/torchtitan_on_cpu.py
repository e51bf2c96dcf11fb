"""torchtitan on a CPU, which it is not made for: import this before it.

Replaced are words and clocks, none of what computes a step but the kernel of attention:

    the device          torchtitan asks torch which accelerator there is, and takes CUDA where there is none
    its memory          is asked of the accelerator, and logged
    timeouts            are set by a function of torch's nightly builds
    flex attention      has no backward pass on a CPU: `scaled_dot_product_attention`, as its diffusion models
"""

from types import SimpleNamespace
from unittest.mock import patch

import torch

WORDS = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
    "current_device": lambda *_: 0,
}
for name, function in WORDS.items():
    setattr(torch.cpu, name, function)
with patch("torch._utils._get_available_device_type", lambda: "cpu"):
    import torchtitan.tools.utils

# isort: split
import torchtitan.distributed.utils  # noqa: E402
import torchtitan.models.llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

assert torchtitan.tools.utils.device_type == "cpu"
torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None
torchtitan.models.llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
