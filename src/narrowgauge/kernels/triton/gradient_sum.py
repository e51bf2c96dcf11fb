"""A gradient in one-byte codes plus the gradient of a micro-batch: read, added, rounded with random bits.

    largest_sum    the amax of the sum, and a copy of the old scale; writes nothing else
    add_sum        the same sum again, each element rounded once; the new scale; the number of overflows
    note_overflow  the largest share of elements that overflowed in this step

A scale is known only after the last element, and reading 3 bytes twice is less than writing 4 and reading
them back. A program of `largest_sum` processes four tiles, so that there is one atomic operation for 8192
elements.
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import RandomStream
from narrowgauge.kernels.triton import quantized_state as stored
from narrowgauge.kernels.triton import rounding
from narrowgauge.kernels.triton.arithmetic import magnitude, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, tl, triton
from narrowgauge.quantization import GradientState

BLOCK, TILES = 2048, 4


@triton.jit
def _sum(g, scale, dw, at, inside, IS_EMPTY: tl.constexpr, G: tl.constexpr):
    x = wide(tl.load(dw + at, inside, 0))
    if not IS_EMPTY:
        x = stored.read(g, scale, at, inside, G) + x
    return x


@triton.jit
def largest_sum(
    g, scale, dw, found, n, IS_EMPTY: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The bits of the amax, into the int32 zero `found`; the old scale to `found + 1`."""
    largest = tl.zeros([BLOCK], tl.int32)
    for i in range(TILES):
        at = (tl.program_id(0).to(tl.int64) * TILES + i) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        x = _sum(g, scale, dw, at, inside, IS_EMPTY, G)
        largest = tl.maximum(largest, tl.where(inside, magnitude(x), 0))
    tl.atomic_max(found, tl.max(largest, 0), sem="relaxed")
    if tl.program_id(0) == 0:
        stored.copy_scale(found + 1, scale, G)


@triton.jit
def add_sum(
    g, old_scale, scale, dw, found, mu, key, offset, n,
    IS_EMPTY: tl.constexpr, PRESCALES: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient, in place; adds the number of elements that overflow to `found + 2`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = _sum(g, old_scale, dw, at, inside, IS_EMPTY, G)
    finite, encode, decode = rounding.scale_under(tl.load(found), G[rounding.MAX], G[stored.POWER_OF_TWO])
    if PRESCALES:
        power = (tl.load(mu).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        encode = tl.minimum(encode * power, rounding.FLOAT_MAX)
        decode = tl.where(finite, tl.math.div_rn(1.0, encode), float("nan"))
        beyond = (tl.abs(x) * encode > G[rounding.MAX]) & inside
        tl.atomic_add(found + 2, tl.sum(beyond.to(tl.int32), 0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(scale, decode)
    x = tl.where(finite, x, 0.0) * encode
    random = 0.0
    if G[rounding.ROUNDING] == "stochastic":
        random = rounding.uniform(key, tl.load(offset) + at)
    k, e, sign = rounding.to_grid(x, random, G)
    tl.store(g + at, rounding.code_of(k, e, sign, G), inside)


@triton.jit(do_not_specialize=["n"])
def note_overflow(found, overflowed, n):
    """The larger of `overflowed` and the share of `n` elements, in place."""
    count = tl.load(found + 2).to(tl.float32)
    share = tl.math.div_rn(count, n.to(tl.float32))
    tl.store(overflowed, tl.maximum(tl.load(overflowed), share))


def launch_sum(gradient: GradientState, dw: Tensor, stream: RandomStream | None) -> None:
    """Add `dw` to a gradient in one-byte codes, in place; without a `stream` it rounds to nearest."""
    (codes, scale), prescale, dw = gradient.on_device().values(), gradient.prescale, dw.contiguous()
    cast = gradient.cast.to_nearest if stream is None and gradient.cast.is_random else gradient.cast
    n, G, is_empty = codes.numel(), stored.cast_constants(cast), gradient.is_empty
    found = torch.zeros(4, dtype=torch.int32, device=codes.device)
    casts: dict[str, Any] = {"IS_EMPTY": is_empty, "G": G, "BLOCK": BLOCK, "num_warps": 8}
    launch(
        largest_sum, (cdiv(n, BLOCK * TILES),), codes, scale, dw, found, n,
        writes="found", **casts, TILES=TILES,
    )  # fmt: skip
    old_scale = found.view(torch.float32)[1:2]
    mu = old_scale if prescale is None else prescale.tensors["mu"]
    launch(
        add_sum, (cdiv(n, BLOCK),),
        codes, old_scale, scale, dw, found, mu, *rounding.stream_tensors(stream, found), n,
        writes="scale" + " g" * is_empty, updates="found" + " g" * (not is_empty),
        **casts, PRESCALES=prescale is not None,
    )  # fmt: skip
    if prescale is not None:
        overflowed = prescale.tensors["overflowed"]
        launch(note_overflow, (1,), found, overflowed, n, updates="overflowed", num_warps=1)
    torch.autograd.graph.increment_version([codes, scale])  # autograd does not see a kernel's writes
    gradient.keep([codes, scale])
