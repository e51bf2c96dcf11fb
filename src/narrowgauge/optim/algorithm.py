"""An optimizer's algorithm: a pure update in float32 and, optionally, a fused low-precision update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.quantization import TensorShard

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class UpdateBatch:
    """Float32 tensors of some parameters; local shards if processes share a parameter."""

    w: Tensors  # the weights, updated in place
    g: Tensors  # their gradients
    moments: Mapping[str, Tensors]  # the moments by place ("m", "v"), updated in place
    steps: Tensors  # the steps taken by each parameter, 0-dim float32; incremented in place
    #: The position of each local tensor in the full one; None for a full tensor
    shards: list[TensorShard | None]


#: `update(batch, options)`: `options` are the parameter group's.
Update = Callable[[UpdateBatch, Mapping[str, Any]], None]
#: `key_of(place)`: the key of the random bits that round the tensor of a place.
KeyOf = Callable[[str], tuple[int, int]]
#: `fused_update(parameter, state, options, step, key_of)`: updates a parameter and its state in place,
#: without float32 copies; returns False and changes nothing if it cannot.
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]


@dataclass(frozen=True)
class Algorithm:
    """The places of the moments, the update of weights, and the fused update if there is one."""

    moments: tuple[str, ...]
    update: Update
    fused_update: FusedUpdate | None = None

    def apply(self, batch: UpdateBatch, options: Mapping[str, Any]) -> None:
        """`update` on contiguous tensors: torch's fused kernels ignore strides, and moments have none."""
        w, g = ([x.contiguous() for x in tensors] for tensors in (batch.w, batch.g))
        self.update(replace(batch, w=w, g=g), options)
        for x, updated in zip(batch.w, w, strict=True):
            if updated is not x:
                x.copy_(updated)
