"""What an algorithm is to an optimizer: a pure update in float32, and perhaps a fused one of narrow state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.quantization import TensorShard

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class UpdateBatch:
    """Float32 tensors of some parameters, local ones where several processes hold a parameter together.

    Attributes:
        w: the weights, updated in place.
        g: their gradients.
        moments: by place ("m", "v"), updated in place.
        steps: how many steps each parameter has taken, 0-dim float32; counted up in place.
        shards: where each local tensor lies in the full one; None where it is all of it.
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
#: is kept for it in place, without float32 copies; returns False, and changes nothing, if it cannot.
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]


@dataclass(frozen=True)
class Algorithm:
    """How weights move: the places of the moments, the update, and the fused update if there is one."""

    moments: tuple[str, ...]
    update: Update
    fused_update: FusedUpdate | None = None
