"""The position of training, as the GEMMs of one layer see it: histories of delayed scales, random bits.

Random bits are a function of (seed, step, tensor, element). Ten tensors of a layer have a stream each step:
the six operands, the signs of the three GEMMs' transforms, and the gradient that is stored in narrow numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.recipes import GEMM_PLACES, GEMMS


def stream_ids(layer: int) -> list[int]:
    """The tensor ids of a layer's streams, in the order of `StepState.keys`."""
    operands = [layer * len(GEMM_PLACES) + i for i in range(len(GEMM_PLACES))]
    signs = [2**32 + layer * len(GEMMS) + i for i in range(len(GEMMS))]
    return [*operands, *signs, 2**33 + layer]


@dataclass(frozen=True, slots=True, eq=False)
class StepState:
    """What a step fixes for a layer.

    Attributes:
        keys: int32 [10, 2], the keys of the step's random streams (`stream_ids`); None if no cast is random.
        first_sample: The index in the global batch of the first sequence of this pass.
        histories: The amax histories of the places with delayed scaling.
        is_training: Whether a backward pass will follow, so that histories are updated.
    """

    keys: torch.Tensor | None = None
    first_sample: int | torch.Tensor = 0
    histories: Mapping[str, AmaxHistory] = field(default_factory=dict)
    is_training: bool = False

    def operand_stream(self, place: str, elements_per_sample: int) -> RandomStream:
        """The random bits of an operand; a weight has the same in every part of the batch."""
        assert self.keys is not None
        offset = 0 if place.endswith(".w") else self.first_sample * elements_per_sample
        return RandomStream(self.keys[GEMM_PLACES.index(place)], offset)

    def signs(self, place: str, size: int) -> torch.Tensor:
        """The signs of the transform of a GEMM, the same for both of its operands."""
        assert self.keys is not None
        gemm = GEMMS.index(place.partition(".")[0])
        return 1 - 2 * (RandomStream(self.keys[len(GEMM_PLACES) + gemm]).bits((size,)) & 1)

    def gradient_stream(self, elements: int) -> RandomStream | None:
        """The random bits with which a gradient of so many elements is added to the stored one."""
        return None if self.keys is None else RandomStream(self.keys[-1], self.first_sample * elements)
