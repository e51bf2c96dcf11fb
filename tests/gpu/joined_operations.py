"""Operations that are joined into one kernel in a step, and the parts of FSDP's casts: each computed once.

As in `operations`, kernels run where `kernels.dispatch` lets them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.operations import Found, Shape, drawn, passes
from narrowgauge.formats import random_stream
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.cast import amaxes_of, codes_under, random_signs
from narrowgauge.kernels.heads import split_heads
from narrowgauge.kernels.norm import add_norm
from narrowgauge.kernels.product import scaled_and_rounded
from narrowgauge.nn.gemm import along_contraction, arguments, quantized_operand, tiled_operand
from narrowgauge.quantization import Cast, QuantContext, cast, make_cast
from narrowgauge.system.collectives import local_amax

SIGNS = (16, 32, 64, 128)  # sizes of a Hadamard transform
_SCALE = 40.0  # of earlier steps; some values saturate


def both_layouts(cast: Cast, given: str, device: torch.device, shape: Shape) -> Found:
    """The codes of a matrix along both axes, from one read.

    `given` is what precedes the cast: "" nothing, "amax" that of the matrix, "scale" one of earlier steps.
    """
    x = drawn(shape, 0, device)
    seen = torch.full((), 3.5, dtype=torch.float32, device=device)  # of steps before; some matrices have more
    contexts = {
        "": QuantContext(),
        "amax": QuantContext(amax=local_amax(x).float()),
        "scale": QuantContext(scale=torch.full_like(seen, _SCALE), amax_out=seen, amax=local_amax(x).float()),
    }
    q, other = quantize(x, cast, -1, contexts[given], both=True)
    codes: Found = {"codes": q.codes, "codes along the other axis": q.codes if other is None else other}
    codes |= {"scale": q.scales, "the amax that is noted": seen.clone()}
    if given == "scale":
        seen.fill_(3.5)
        values, factor = emulate(x, cast, 0, torch.bfloat16, contexts[given])
        codes |= {"values": values, "factor": factor, "the amax that is then noted": seen}
    return codes


def bytes_of(given: Mapping[str, Any]) -> list[Tensor]:
    """All tensors among the arguments of a product, as bytes."""
    tensors = [given["mat_a"], given["mat_b"].T, *given["scale_a"], *given["scale_b"]]
    return [t.reshape(-1).contiguous().view(torch.uint8) for t in tensors]


def hardware_layout(cast: Cast, axis: int, device: torch.device, shape: Shape) -> Found:
    """The bytes of codes and scales as matrix units read blocks: packed, and in tiles of 128 x 4 scales."""
    x, context = drawn(shape, 0, device), QuantContext(random_stream(1, 2, 3, device))
    operand = tiled_operand(x, cast, axis, context)
    written = operand or quantized_operand(quantize(x, cast, axis, context)[0], axis)
    return {f"argument {i}": t for i, t in enumerate(bytes_of(arguments(written, written)))}


def heads(has_bias: bool, has_table: bool, device: torch.device, shape: Shape) -> Found:
    """Heads of queries, keys and values from one matmul, with bias and positions; shape [B, T, N, K, H]."""
    B, T, N, K, H = shape
    qkv_BTC = drawn((B, T, (N + 2 * K) * H), 0, device)
    bias_C = drawn(qkv_BTC.shape[-1:], 1, device, torch.float32)
    angles_TH = torch.arange(T, device=device)[:, None] * torch.exp2(-torch.arange(H // 2, device=device) / 4)
    table = torch.stack([angles_TH.cos(), angles_TH.sin()]) if has_table else None

    def forward(qkv_BTC: Tensor, *bias_C: Tensor) -> Tensor:
        split = split_heads(qkv_BTC, bias_C[0] if bias_C else None, table, (N, K, K), H)
        return torch.cat([x.transpose(1, 2).flatten(2) for x in split], -1)

    biases = [bias_C] if has_bias else []
    return passes(forward, "qkv" + " bias" * has_bias, qkv_BTC, *biases)


def norm_of_terms(device: torch.device, shape: Shape) -> Found:
    """A sum and its norm, whose backward pass gets both terms; the sum also has a gradient."""
    x, delta = drawn(shape, 0, device, torch.float32), drawn(shape, 1, device)

    def forward(x: Tensor, delta: Tensor, weight_D: Tensor) -> Tensor:
        s, y = add_norm(x, delta, weight_D, None, 1e-5, "rms", torch.bfloat16, keeps_terms=True)
        return s + y.float()

    return passes(forward, "x delta weight", x, delta, drawn(shape[-1:], 2, device, torch.float32))


def turned_codes(device: torch.device, shape: Shape) -> Found:
    """Codes copied to lie along the other axis."""
    codes = quantize(drawn(shape, 0, device), cast("e4m3"))[0].codes
    return {"codes": along_contraction(codes.T).contiguous()}


def scaled_product(device: torch.device, shape: Shape) -> Found:
    """Sums in fp32, times the scales of both operands, rounded once."""
    product = drawn(shape, 0, device, torch.float32)
    scale, other = (torch.full((), s, dtype=torch.float32, device=device) for s in (1 / 3, 7.0))
    return {
        "by one scale": scaled_and_rounded(product, scale, torch.bfloat16),
        "by two scales": scaled_and_rounded(product, scale, torch.bfloat16, other),
    }


def signs(device: torch.device, shape: Shape) -> Found:
    """The random signs of Hadamard transforms, `shape` of them."""
    key = random_stream(1, 2, 3, device).key
    return {f"of {size}": random_signs(key, size).float() for size in shape}


def sharded_casts(device: torch.device, shape: Shape) -> Found:
    """What FSDP casts before it gathers: the amaxes of many shards at once, and codes under a known scale."""
    shards = [drawn((shape[0] // (i + 1), shape[1]), i, device, torch.float32) for i in range(3)]
    amaxes = amaxes_of(shards)
    encode = torch.full((), 100.0, dtype=torch.float32, device=device)
    codes = {f"codes of {i}": codes_under(x, cast("e4m3"), encode) for i, x in enumerate(shards)}
    return {"amaxes": amaxes, **codes}


POWERS_OF_TWO = {
    name: make_cast({"cast": name, "power_of_two": True})
    for name in ("e4m3", "fp8-row", "fp8-1x128", "fp8-128x128")
}
#: Each cast that matmuls in FP8 read along both axes.
BOTH_LAYOUTS = {
    f"{name} along both axes{words}": partial(both_layouts, cast(name), given)
    for name in ("e4m3", "e5m2")
    for given, words in (("", ""), ("amax", ", amax known"), ("scale", ", scale known"))
} | {
    f"{name} with powers of two along both axes": partial(both_layouts, POWERS_OF_TWO[name], "")
    for name in ("e4m3", "fp8-128x128")
}
