"""The MLP of a block, or of one of its experts: down(act(up(x))), act = gelu, or silu(gate) * up."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.trainer.models.config import ModelConfig

Context = Callable[[], AbstractContextManager[None]]


def add_mlp(module: nn.Module, config: ModelConfig) -> None:
    """Add the linear layers of an MLP to a module: `gate_up` (swiglu) or `up` (gelu), and `down`."""
    D, F = config.dim, config.ffn_dim
    if config.mlp == "swiglu":
        module.gate_up = nn.Linear(D, 2 * F, bias=config.bias)
    else:
        module.up = nn.Linear(D, F, bias=config.bias)
    module.down = nn.Linear(F, D, bias=config.bias)


def mlp(layers: Any, x: Tensor, around_down: Context = nullcontext) -> Tensor:
    """[..., D] in and out, by the layers that `add_mlp` gave to a module; the last within a context."""
    hidden = gelu(layers.up(x)) if hasattr(layers, "up") else swiglu(layers.gate_up(x))
    with around_down():
        y: Tensor = layers.down(hidden)
    return y
