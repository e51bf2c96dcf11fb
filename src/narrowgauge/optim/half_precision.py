"""Parameters of 16 bits that `convert` left alone: norms, biases, embeddings of a bf16 model from a hub.

bfloat16 has 8 significant bits. An update of a weight w that is smaller than |w| 2^-9 is less than half of
the last bit, so rounding to nearest returns the old w, at every step: at a learning rate of 1e-5 most weights
stand still. Two remedies, by what the recipe keeps weights in:

    stochastic rounding to the parameter's own dtype    the update survives on average; no memory
    anything else                                       a float32 master among the moments

The parameter is the master rounded to nearest. An element for which that does not hold was written from
outside since (`load_state_dict`, `torch.nn.init`), and its master starts again from the parameter.
"""

import torch

from narrowgauge.formats import torch_dtype
from narrowgauge.quantization import QuantizedState, local_tensor, shard_of, state_of
from narrowgauge.recipes import Recipe

HALF = (torch.bfloat16, torch.float16)


def is_half(p: torch.Tensor) -> bool:
    """Whether a parameter has 16 bits and `convert` does not keep its weight in a cast."""
    return p.dtype in HALF and not state_of(p).by_place().keys() & {"weight", "master"}


def rounded_in_place(p: torch.Tensor, recipe: Recipe) -> QuantizedState | None:
    """A 16-bit parameter as state whose memory is the parameter's own; writing rounds stochastically.

    None where the recipe keeps weights in another format than the parameter's.
    """
    cast = recipe.state["weight"]
    if not is_half(p) or cast is None or recipe.state["master"] is not None:
        return None
    if cast.is_scaled or cast.state.split or not cast.is_random or torch_dtype(cast.element) != p.dtype:
        return None
    local = local_tensor(p)
    state = QuantizedState(local.shape, cast, "meta", shard=shard_of(p))
    state.tensors, state.device = {"values": local}, local.device
    return state


def wide_values(local: torch.Tensor, master: QuantizedState | None) -> torch.Tensor:
    """The float32 values of a parameter: its master's, or its own where it was written from outside."""
    if master is None:
        return local.float()
    wide = master.read()
    return torch.where(wide.to(local.dtype) == local, wide, local.float())
