"""16-bit parameters that `convert` does not change: norms, biases and embeddings of a bf16 model.

bfloat16 has 8 significant bits. An update smaller than |w| 2^-9 is less than half of the last bit of w, so
rounding to nearest returns the old w at every step: at a learning rate of 1e-5 most weights never change. The
remedy depends on the format of weights in the recipe:

    stochastic rounding to the parameter's dtype    the update survives on average, without extra memory
    any other                                       a float32 master, kept with the moments

The parameter is the master rounded to nearest. If an element differs from that, other code has written it
(`load_state_dict`, `torch.nn.init`), and its master restarts from the parameter.
"""

import torch

from narrowgauge.formats import torch_dtype
from narrowgauge.quantization import QuantizedState, local_tensor, shard_of, state_of
from narrowgauge.recipes import Recipe


def is_half(p: torch.Tensor) -> bool:
    """Whether a parameter has 16 bits and is not stored in a cast."""
    is_short = p.dtype in (torch.bfloat16, torch.float16)
    return is_short and not state_of(p).by_place().keys() & {"weight", "master"}


def rounded_in_place(p: torch.Tensor, recipe: Recipe) -> QuantizedState | None:
    """A 16-bit parameter as state that shares its memory and rounds stochastically when written.

    None if the recipe stores weights in another format.
    """
    cast = recipe.state["weight"]
    if not is_half(p) or cast is None or recipe.state["master"] is not None:
        return None
    if cast.is_scaled or not cast.is_random or torch_dtype(cast.element) != p.dtype:
        return None
    local = local_tensor(p)
    state = QuantizedState(local.shape, cast, "meta", shard=shard_of(p))
    state.tensors, state.device = {"values": local}, local.device
    return state


def wide_values(local: torch.Tensor, master: QuantizedState | None) -> torch.Tensor:
    """The float32 values of a parameter: the master's, or the parameter's where other code has written it."""
    if master is None:
        return local.float()
    wide = master.read()
    return torch.where(wide.to(local.dtype) == local, wide, local.float())
