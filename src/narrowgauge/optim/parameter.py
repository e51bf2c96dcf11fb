"""What of a parameter is here: its numbers, its gradient, its place in the whole.

A parameter may be narrow (`nn.weight_state` hung its master and its gradient on it) and may be held by
several processes (a DTensor, with its `part`).
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.quantization import TensorShard


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient as float32, wherever it is kept; None if there is none."""
    if not has_gradient(p):
        return None
    narrow = hung(p, "gradient")
    return local(p.grad).float() if narrow is None and p.grad is not None else narrow.read()


def has_gradient(p: torch.Tensor) -> bool:
    """Whether the last backward pass reached a parameter."""
    narrow = hung(p, "gradient")
    return p.grad is not None if narrow is None else not narrow.is_empty


def local(t: torch.Tensor) -> torch.Tensor:
    """What of a parameter, or of its gradient, is in this process's memory."""
    return t.to_local() if isinstance(t, DTensor) else t.detach()


def part_of(p: torch.Tensor) -> TensorShard | None:
    """Where that lies in the whole parameter, if others hold some of it."""
    part = getattr(p, "part", None)
    return None if part is None or part.is_full else part


def hung(p: torch.Tensor, name: str) -> Any:
    """What `nn.weight_state` hung on a parameter."""
    return getattr(p, name, None)
