"""The MLP of a block, or of one of its experts: down(act(up(x))), act = gelu, or silu(gate) * up."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from narrowgauge.kernels.activation import gelu_and_amax, swiglu_and_amax
from narrowgauge.kernels.amax import KnownAmax, call
from narrowgauge.models.config import ModelConfig

Context = Callable[[], AbstractContextManager[None]]


def add_mlp(module: nn.Module, config: ModelConfig) -> None:
    """Add the linear layers of an MLP to a module: `gate_up` (swiglu) or `up` (gelu), and `down`."""
    D, F = config.dim, config.ffn_dim
    if config.mlp == "swiglu":
        module.gate_up = nn.Linear(D, 2 * F, bias=config.bias)
    else:
        module.up = nn.Linear(D, F, bias=config.bias)
    module.down = nn.Linear(F, D, bias=config.bias)


def mlp(
    layers: Any, x: Tensor, around_down: Context = nullcontext, known: Sequence[KnownAmax | None] = ()
) -> Tensor:
    """[..., D] in and out, by the layers that `add_mlp` gave to a module; the last within a context.

    `known` holds the amax of x, if the kernel that wrote it has computed it.
    """
    if hasattr(layers, "up"):
        hidden, of_hidden = gelu_and_amax(call(layers.up, x, known))
    else:
        hidden, of_hidden = swiglu_and_amax(call(layers.gate_up, x, known))
    with around_down():
        return call(layers.down, hidden, [of_hidden])
