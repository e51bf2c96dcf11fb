"""The gauges of a step: one on each layer under a recipe, and one on the state of each matrix."""

from collections.abc import Mapping

import torch

from narrowgauge.nn import Gauges, Stepped
from narrowgauge.optim import Optimizer
from narrowgauge.quantization import QuantizedState, state_of


def make_gauges(model: torch.nn.Module, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> Gauges:
    """Make the gauges for one step; `names` are the names of the parameters."""
    layers = dict(filter(lambda named: isinstance(named[1], Stepped), model.named_modules()))
    state: dict[tuple[str, str], QuantizedState | torch.Tensor] = {}
    for p, name in names.items():
        if p.ndim < 2:
            continue
        places: dict[str, QuantizedState | torch.Tensor] = {"weight": p}
        places |= state_of(p).by_place() | optimizer.moments(p)
        state |= {(name.removesuffix(".weight"), place): tensor for place, tensor in places.items()}
    return Gauges(layers, state)
