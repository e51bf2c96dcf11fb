"""Operations that are joined into one kernel in a step, and the parts of FSDP's casts: each computed once.

As in `operations`, kernels run where `kernels.dispatch` lets them. What exists only as a kernel, SwiGLU or
a loss with its casts, has the separate operations as its reference.
"""

from functools import partial

import torch
from torch import Tensor

from narrowgauge.bench.verify.operations import Found, Shape, drawn, passes
from narrowgauge.formats import Format, decode, format, random_stream
from narrowgauge.kernels import quantize
from narrowgauge.kernels.activation import swiglu, swiglu_by_kernel, swiglu_codes, swiglu_gradient_codes
from narrowgauge.kernels.amax import DelayedScale, amax_of
from narrowgauge.kernels.cast import amaxes_of, codes_under, random_signs
from narrowgauge.kernels.cross_entropy import (
    cross_entropy,
    gradient_codes,
    losses_before_codes,
    row_losses,
)
from narrowgauge.kernels.heads import split_heads
from narrowgauge.kernels.norm import add_norm
from narrowgauge.kernels.product import scaled_and_rounded
from narrowgauge.nn.gemm import along_contraction, arguments, quantized_operand, tiled_operand
from narrowgauge.quantization import Cast, QuantContext, cast, make_cast

SIGNS = (16, 32, 64, 128)  # sizes of a Hadamard transform
_Y_SCALE, _GRAD_SCALE = 40.0, 100.0  # of earlier steps; some values saturate


def both_layouts(cast: Cast, given: str, device: torch.device, shape: Shape) -> Found:
    """The codes of a matrix along both axes, from one read.

    `given` is what precedes the cast: "" nothing, "amax" that of the matrix, "scale" one of earlier steps.
    """
    x = drawn(shape, 0, device)
    seen = torch.zeros((), dtype=torch.float32, device=device)
    contexts = {
        "": QuantContext(),
        "amax": QuantContext(amax=amax_of(x)),
        "scale": QuantContext(scale=torch.full_like(seen, _Y_SCALE), seen=seen, amax=amax_of(x)),
    }
    q, other = quantize(x, cast, -1, contexts[given], both=True)
    codes: Found = {"codes": q.codes, "codes along the other axis": q.codes if other is None else other}
    return codes | {"scale": q.scales, "the amax that is noted": seen}


def hardware_layout(cast: Cast, axis: int, device: torch.device, shape: Shape) -> Found:
    """The bytes of codes and scales as matrix units read blocks: packed, and in tiles of 128 x 4 scales."""
    x, context = drawn(shape, 0, device), QuantContext(random_stream(1, 2, 3, device))
    operand = tiled_operand(x, cast, axis, context)
    written = operand or quantized_operand(quantize(x, cast, axis, context)[0], axis)
    given = arguments(written, written)
    tensors = [given["mat_a"], given["mat_b"].T, *given["scale_a"], *given["scale_b"]]
    return {f"argument {i}": t.reshape(-1).contiguous().view(torch.uint8) for i, t in enumerate(tensors)}


def swiglu_with_casts(is_delayed: bool, device: torch.device, shape: Shape) -> Found:
    """SwiGLU between two FP8 matmuls, in one pass with its casts, both ways."""
    gate_up, dy = _swiglu_inputs(device, shape)
    y, grad = format("e4m3"), format("e5m2")
    scales = [_delayed(s, device) for s in (_Y_SCALE, _GRAD_SCALE)]
    found: Found = {}
    if is_delayed:
        codes, y_fact = swiglu_codes(gate_up, y, scales[0])
        found = {"y": _values(codes, y, y_fact[1]), "amaxes that are noted": _seen(scales)}
    else:
        y_fact = swiglu_by_kernel(gate_up)[1]
    g = swiglu_gradient_codes(dy, gate_up, y_fact, grad, y, scales[1] if is_delayed else None)
    if is_delayed:
        found["amaxes that are noted"] = _seen(scales)
    return found | {
        "the gradient": _values(g.grad_M2F, grad, g.grad_scale),
        "the gradient along the other axis": _values(g.grad_2FM, grad, g.grad_scale),
        "y along the other axis": _values(g.y_FM, y, g.y_scale),
    }


def swiglu_then_casts(is_delayed: bool, device: torch.device, shape: Shape) -> Found:
    """The same by three operations, one after the other."""
    gate_up, dy = _swiglu_inputs(device, shape)
    leaf = gate_up.requires_grad_()
    y = swiglu(leaf)
    (gradient,) = torch.autograd.grad(y, leaf, dy)
    scales = [_delayed(s, device) for s in (_Y_SCALE, _GRAD_SCALE)]
    values = []
    for x, name, scale in ((y.detach(), "e4m3", scales[0]), (gradient, "e5m2", scales[1])):
        context = QuantContext(scale=scale.encode, seen=scale.seen) if is_delayed else QuantContext()
        values.append(quantize(x, cast(name), -1, context)[0].dequantize())
    own, of_gradient = values
    found: Found = {"y": own, "amaxes that are noted": _seen(scales)} if is_delayed else {}
    return found | {
        "the gradient": of_gradient,
        "the gradient along the other axis": of_gradient.T.contiguous(),
        "y along the other axis": own.T.contiguous(),
    }


def _swiglu_inputs(device: torch.device, shape: Shape) -> tuple[Tensor, Tensor]:
    M, G = shape
    return drawn((M, G), 0, device), drawn((M, G // 2), 1, device)


def _delayed(scale: float, device: torch.device) -> DelayedScale:
    encode = torch.full((), scale, dtype=torch.float32, device=device)
    return DelayedScale(encode, torch.zeros_like(encode))


def _seen(scales: list[DelayedScale]) -> Tensor:
    return torch.stack([s.seen for s in scales if s.seen is not None])


def _values(codes: Tensor, fmt: Format, scale: Tensor) -> Tensor:
    return decode(codes, fmt) * scale


def loss_with_codes(is_delayed: bool, device: torch.device, shape: Shape) -> Found:
    """The loss of a head in FP8, which writes its logits' gradient as codes along both axes; shape [T, V]."""
    z_TV, y_T = _logits(device, shape)
    scale = _delayed(_GRAD_SCALE, device) if is_delayed else None
    loss_T, stats_2T, largest = losses_before_codes(z_TV, y_T, ignores=False)
    factor = torch.full((), 1 / len(y_T), dtype=torch.float32, device=device)
    grad = format("e5m2")
    g = gradient_codes(z_TV, y_T, stats_2T, largest, factor, False, grad, scale)
    found: Found = {"the amax that is noted": _seen([scale])} if scale else {}
    return found | {
        "the losses": loss_T,
        "the gradient": _values(g.codes_TV, grad, g.scale),
        "the gradient along the other axis": _values(g.codes_VT, grad, g.scale),
    }


def loss_then_casts(is_delayed: bool, device: torch.device, shape: Shape) -> Found:
    """The same by a loss, its gradient in the logits' dtype, and a cast."""
    z_TV, y_T = _logits(device, shape)
    scale = _delayed(_GRAD_SCALE, device)
    loss_T = row_losses(z_TV, y_T, ignores=False)[0]
    (gradient,) = torch.autograd.grad(cross_entropy(z_TV.requires_grad_(), y_T), z_TV)
    context = QuantContext(scale=scale.encode, seen=scale.seen) if is_delayed else QuantContext()
    values = quantize(gradient, cast("e5m2"), -1, context)[0].dequantize()
    found: Found = {"the amax that is noted": _seen([scale])} if is_delayed else {}
    return found | {
        "the losses": loss_T,
        "the gradient": values,
        "the gradient along the other axis": values.T.contiguous(),
    }


def _logits(device: torch.device, shape: Shape) -> tuple[Tensor, Tensor]:
    T, V = shape
    y_T = torch.randint(V, (T,), generator=torch.Generator().manual_seed(4))
    return 3 * drawn(shape, 0, device), y_T.to(device)


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
        s, y, _ = add_norm(x, delta, weight_D, None, 1e-5, "rms", torch.bfloat16, keeps_terms=True)
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
    codes = {f"codes of {i}": codes_under(x, cast("e4m3"), encode, 1 / encode) for i, x in enumerate(shards)}
    return {"amaxes": amaxes, **codes}


POWERS_OF_TWO = {
    name: make_cast({"cast": name, "power_of_two": True})
    for name in ("e4m3", "fp8-row", "fp8-1x128", "fp8-128x128")
}
#: (name, run) of each cast that matmuls in FP8 read along both axes.
BOTH_LAYOUTS = [
    (f"{name} along both axes{words}", partial(both_layouts, cast(name), given))
    for name in ("e4m3", "e5m2")
    for given, words in (("", ""), ("amax", ", amax known"), ("scale", ", scale known"))
] + [
    (f"{name} with powers of two along both axes", partial(both_layouts, POWERS_OF_TWO[name], ""))
    for name in ("e4m3", "fp8-128x128")
]
