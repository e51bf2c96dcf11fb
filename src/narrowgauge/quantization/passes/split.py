"""The records that an engine of quantization takes and returns (`passes.in_c`, `passes.in_torch`)."""

from typing import NamedTuple

import torch

from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.quantization.scales import Scales


class Split(NamedTuple):
    """A tensor that is cut into blocks, and what is known before its elements are rounded.

    Attributes:
        x: The tensor, split by its blocks.
        blocks: The blocks.
        cast: The cast.
        axis: The axis that a GEMM contracts.
        context: The random bits, and a scale that is given.
        amax: The amax of each block, float32, inner dimensions kept with size 1; None is found on the way.
        over: The amax that an outer scale comes from: 0-dim, or broadcasts to `amax`.
        scales: The scales; None are found on the way.
    """

    x: torch.Tensor
    blocks: Blocks
    cast: Cast
    axis: int
    context: QuantContext
    amax: torch.Tensor | None = None
    over: torch.Tensor | None = None
    scales: Scales | None = None


class Narrowed(NamedTuple):
    """The elements of a split tensor, and the scales that they need.

    Attributes:
        out: The elements, in the shape of the split tensor.
        block: The scale of each block, inner dimensions kept with size 1; empty beside "stored" elements.
        outer: The outer scale (`Scales.tensor`).
    """

    out: torch.Tensor
    block: torch.Tensor
    outer: torch.Tensor | None
