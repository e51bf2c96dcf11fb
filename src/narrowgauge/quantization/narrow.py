"""The door of quantization: rounds the elements of a split tensor under the scales of its blocks.

One engine computes a tensor (`passes.in_c` on a CPU, else `passes.in_torch`), in one pass if no scale depends
on more than its block. What does is found before (`_known`): the amax that an outer scale comes from, the
amaxes of blocks that processes share, a scale that is given or rounded stochastically, and a correction.

Scales come from the amax of each block (`scales.py`). With `candidates`, a block is rounded once for each
candidate magnitude and keeps the scale with the least error; `correct` multiplies the scales by the factor
that makes a projection exact.

A block that contains NaN or infinity gets the scale NaN: non-finite values never come out finite, even in
formats that have no code for them.
"""

from types import ModuleType

import torch

from narrowgauge.formats import Randomness
from narrowgauge.quantization import scales
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.passes import in_c, in_torch
from narrowgauge.quantization.passes.in_torch import Narrowed, Split
from narrowgauge.quantization.scales import Scales


def narrow(s: Split, result: str, dtype: torch.dtype) -> Narrowed:
    """Elements, scales of blocks and outer scale of a split tensor (`passes.in_torch.narrow`)."""
    engine = in_c if in_c.supports(s.x, s.blocks, s.cast, dtype) else in_torch
    return engine.narrow(_known(engine, s), result, dtype)


def scales_of(s: Split) -> Scales:
    """The scales of a split tensor's blocks; for a sharded tensor, the global one's."""
    engine = in_c if in_c.supports(s.x, s.blocks, s.cast) else in_torch
    return engine.scales(_known(engine, s))[0]


def block_amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The amax of each block of a split tensor: float32, inner dimensions kept with size 1."""
    return (in_c if in_c.supports(split, blocks) else in_torch).amax(split, blocks)


def _known(engine: ModuleType, s: Split) -> Split:
    """A split tensor with what must be known before its elements are rounded."""
    cast, context, plain = s.cast, s.context, s.cast.uncorrected
    is_given = context.scale is not None or plain.scale_rounding != "nearest-even"
    amax: torch.Tensor | None = None
    over: torch.Tensor | None = None
    if cast.block is None or context.shard is not None or cast.has_row_scales or is_given:
        amax = context.global_amax(engine.amax(s.x, s.blocks), cast, s.axis)
    if cast.has_row_scales and amax is not None:
        over = context.row_amax(in_torch.finite(amax), s.blocks, s.axis, cast)
    elif cast.tensor_scale != "none":
        amax, top = engine.largest(s.x, s.blocks) if amax is None else (amax, in_torch.finite(amax))
        over = context.tensor_amax(top)
    s = s._replace(cast=plain, amax=amax, over=over)
    if is_given:
        s = s._replace(scales=in_torch.best(s, _bits_of_scales(s)))
    if cast.correct:
        s = s._replace(scales=_corrected(s._replace(cast=cast), *engine.scales(s, with_sums=True)))
    return s._replace(cast=cast)


def _bits_of_scales(s: Split) -> Randomness:
    """The random bits of scales that are rounded stochastically."""
    is_random = s.cast.scale_rounding == "stochastic"
    return s.context.random_over_grid(s.blocks, s.cast, s.axis) if is_random else None


def _corrected(s: Split, found: Scales, sums: tuple[torch.Tensor, ...]) -> Scales:
    """Scales times the factor that makes each group's projection on itself exact, rounded again."""
    assert s.cast.block is not None
    dim = s.blocks.grid_dim(s.axis % len(s.blocks.size))
    per_group = max(s.cast.hadamard // s.cast.block[1], 1)
    above, below = (in_torch.in_order(t.unflatten(dim, (-1, per_group)), dim + 1) for t in sums)
    factor = torch.where(below == 0, 1.0, above / below)
    factor = factor.repeat_interleave(per_group, dim + 1).flatten(dim, dim + 1)
    scale = torch.where(found.finite, found.block, 1.0) * factor
    block, _ = scales.rounded(scale, s.cast, _bits_of_scales(s))
    return found._replace(block=torch.where(found.finite, block, torch.nan))
