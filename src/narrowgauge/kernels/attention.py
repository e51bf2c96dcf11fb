"""Which of torch's attentions is asked first, where that was measured.

On a Hopper GPU (an H200, torch 2.11, 2026-11-20) cuDNN's reached 620 TFLOP/s forward and 503 forward and
backward, flash-attention 2, which torch asks first, 316 and 277. Elsewhere torch's own order stands. One that
does not take a shape is passed over.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fastest_first(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which torch's attention on a device asks the fastest first."""
    if device.type == "cuda" and _is_hopper(device):
        return sdpa_kernel(CUDNN_FIRST, set_priority=True)
    return nullcontext()


@cache
def _is_hopper(device: torch.device) -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9
