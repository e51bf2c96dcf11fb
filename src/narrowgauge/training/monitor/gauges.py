"""The gauges of a step: on each layer under a recipe, and on the state of each matrix."""

import torch

from narrowgauge.nn import Gauges, Stepped
from narrowgauge.quantization import QuantizedState, state_of
from narrowgauge.training.step.train_state import TrainState


def make_gauges(run: TrainState) -> Gauges:
    """Make the gauges for one step of a run."""
    layers = dict(filter(lambda named: isinstance(named[1], Stepped), run.model.named_modules()))
    state: dict[tuple[str, str], QuantizedState | torch.Tensor] = {}
    for p, name in run.names.items():
        if p.ndim < 2:
            continue
        places: dict[str, QuantizedState | torch.Tensor] = {"weight": p}
        places |= state_of(p).by_place() | run.optimizer.moments(p)
        state |= {(name.removesuffix(".weight"), place): tensor for place, tensor in places.items()}
    return Gauges(layers, state)
