"""Layers of a server against ours, one at a time, to name the first tensor and the first layer that disagree.

A server that opens its layers gives, for each linear layer, its weight, its input and its output. Our layers
get the server's input, so that no difference is carried from one layer to the next:

    weight     the server's against what the run multiplies; more than `WEIGHT_MARGIN` is another tensor
    trainer    the server's output against that of the run's layer, under its recipe
    wide       the server's output against that of the run's weight and an input that is not rounded

A server rounds activations as training did, or not at all, or by another rule, so its output should be near
one of the two: `LAYER_MARGIN` is above the noise of 4-bit activations (a tenth of the norm), and below what a
wrong scale of 5/4 makes. Weights are compared in the norm; servers often keep them in bf16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.checkpoint.interop.compressed_tensors import narrow_layers
from narrowgauge.checkpoint.interop.name_map import name_map
from narrowgauge.checkpoint.interop.read_back import is_same
from narrowgauge.models import Transformer
from narrowgauge.nn import Linear
from narrowgauge.runs.use.trained_model import TrainedRun

WEIGHT_MARGIN, LAYER_MARGIN = 2.0**-7, 0.15
Array = NDArray[np.float32]


class Opened(NamedTuple):
    """A linear layer of a server in one pass: input (T, K), output (T, N), weight (N, K) if it is plain."""

    x: Array
    y: Array
    weight: Array | None


@dataclass(frozen=True)
class LayerDifference:
    """Relative differences of a layer, in the norm.

    Attributes:
        name: The layer, by the server's names.
        weight: Its weight against the run's; None if the server keeps it in codes.
        trainer: Its output against the run's layer on the same input.
        wide: Its output against the run's weight on the same input, in float32.
    """

    name: str
    weight: float | None
    trainer: float
    wide: float

    @property
    def has_other_weight(self) -> bool:
        """Whether the server multiplies another weight than the run."""
        return self.weight is not None and not self.weight <= WEIGHT_MARGIN

    @property
    def disagrees(self) -> bool:
        """Whether the output is that of training neither with its activations nor with wide ones."""
        return not min(self.trainer, self.wide) <= LAYER_MARGIN

    def as_json(self) -> dict[str, Any]:
        """The numbers for programs."""
        return {"layer": self.name, "weight": self.weight, "trainer": self.trainer, "wide": self.wide}


def layer_names(model: Transformer) -> list[str]:
    """The linear layers of a server in the order of a pass, by Hugging Face's names."""
    pairs = [p for p in name_map(model.config) if _is_linear(model, p.ours)]
    names = [name.removesuffix(".weight") for pair in pairs for name in pair.theirs]
    return names if not model.config.tied_head else [*names, "lm_head"]


@torch.no_grad()
def layer_differences(trained: TrainedRun, opened: Mapping[str, Opened]) -> list[LayerDifference]:
    """The differences of the layers that a server opened, in the order of a pass.

    Args:
        trained: The run, at the sample whose pass was opened.
        opened: The server's layers by its names.
    """
    found, model = [], trained.model
    for pair in name_map(model.config):
        if not _is_linear(model, pair.ours):
            continue
        layer = model.get_submodule(pair.ours.removesuffix(".weight"))
        weight_NK = _weight(layer)
        rows = pair.rows or (len(weight_NK),)
        for number, name in enumerate(theirs.removesuffix(".weight") for theirs in pair.theirs):
            if name in opened:
                server = opened[name]
                x = torch.from_numpy(server.x)[None]
                bias = layer.bias.float() if isinstance(layer.bias, torch.Tensor) else None
                wide = torch.nn.functional.linear(x, weight_NK, bias)
                outputs = (layer(x.to(model.compute_dtype)).float(), wide)
                differences = [_relative(server.y, y[0].split(rows, -1)[number]) for y in outputs]
                own = weight_NK.split(rows)[number]
                weight = None if server.weight is None else _relative(server.weight, own)
                found.append(LayerDifference(name, weight, *differences))
    return found


@torch.no_grad()
def same_weights(trained: TrainedRun, plain: Transformer) -> tuple[int, int]:
    """(narrow weights whose codes and scales in the file are the run's, narrow weights)."""
    layers = narrow_layers(trained.model)
    pairs = [(layer.forward_weight(), plain.get_parameter(f"{n}.weight")) for n, layer in layers.items()]
    return sum(is_same(theirs, ours) for ours, theirs in pairs), len(pairs)


def _weight(layer: torch.nn.Module) -> torch.Tensor:
    """What a layer multiplies, in the basis of its input: (N, K), float32."""
    if isinstance(layer, Linear) and not layer.spec.casts["fprop.w"].hadamard.size:
        return layer.forward_weight()
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.float()


def first(layers: Sequence[LayerDifference], what: str) -> str | None:
    """The first layer with a property of `LayerDifference`; None if there is none."""
    return next((layer.name for layer in layers if getattr(layer, what)), None)


def _is_linear(model: Transformer, name: str) -> bool:
    module, _, parameter = name.rpartition(".")
    return parameter == "weight" and isinstance(model.get_submodule(module), torch.nn.Linear)


def _relative(theirs: Array, ours: torch.Tensor) -> float:
    t = torch.from_numpy(theirs).double()
    if t.shape != ours.shape:
        return float("inf")
    return float((t - ours.double()).norm() / ours.double().norm().clamp(min=1e-30))
