"""An algorithm for an optimizer: a pure update in float32, and perhaps a fused one of narrow state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.quantization import TensorShard

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class UpdateBatch:
    """Float32 tensors of some parameters, local ones if several processes hold a parameter together.

    Attributes:
        w: The weights, updated in place.
        g: Their gradients.
        moments: The moments by place ("m", "v"), updated in place.
        steps: The number of steps that each parameter has taken, 0-dim float32; counted up in place.
        shards: The shard that each local tensor is; None for a full tensor.
    """

    w: Tensors
    g: Tensors
    moments: Mapping[str, Tensors]
    steps: Tensors
    shards: list[TensorShard | None]


#: `update(batch, options)`: `options` are those of the parameter group.
Update = Callable[[UpdateBatch, Mapping[str, Any]], None]
#: `key_of(place)`: the key words of the random bits with which the tensor of a place is rounded.
KeyOf = Callable[[str], tuple[int, int]]
#: `fused_update(parameter, its state, options, number of the step, key_of)`: updates a parameter and all that
#: is kept for it in place, without float32 copies; returns False and changes nothing if it cannot.
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]


@dataclass(frozen=True)
class Algorithm:
    """The places of the moments, the update of weights, and the fused update if there is one."""

    moments: tuple[str, ...]
    update: Update
    fused_update: FusedUpdate | None = None
