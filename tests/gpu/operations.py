"""The operations that have kernels, each computed once on a device at a shape, forward and backward.

Inputs are drawn on the CPU from a fixed seed, so every device computes with the same values. As elsewhere,
`kernels.dispatch.use_kernels` decides whether kernels run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.testing import assert_close

from narrowgauge.formats import random_stream, stream_key
from narrowgauge.kernels import adamw as narrow_adamw
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.cast import attached_amax, emulate_rows
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.kernels.gradient_sum import add_gradient, through_rounding
from narrowgauge.kernels.head_loss import head_loss
from narrowgauge.kernels.heads import rotary
from narrowgauge.kernels.norm import add_norm
from narrowgauge.nn.gemm import ROWS, Operand, multiply
from narrowgauge.quantization import Cast, GradientState, QuantContext, QuantizedState, make_cast
from narrowgauge.system.collectives import local_amax

Shape = tuple[int, ...]
Found = dict[str, Tensor | None]
_EPS = 1e-5
_OPTIONS = {"lr": 3e-3, "eps": 1e-8, "weight_decay": 0.1}


def drawn(
    shape: Sequence[int], seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normally distributed values."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(device)


def passes(forward: Callable[..., Tensor], names: str, *inputs: Tensor) -> Found:
    """The result of a forward pass, and the gradients of its inputs for a random gradient of the result.

    An amax that a kernel attached to one of them is that of its numbers.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = forward(*leaves)
    dy = torch.ones_like(y) if y.ndim == 0 else drawn(y.shape, 9, y.device, y.dtype)
    gradients = torch.autograd.grad(y, leaves, dy)
    for x in (y, *gradients):
        if (amax := attached_amax(x)) is not None and not x.is_meta:
            assert_close(amax, x.detach().float().abs().amax(), rtol=0, atol=0, equal_nan=True)
    found: Found = {"the result": y.detach()}
    return found | {f"the gradient of {name}": g for name, g in zip(names.split(), gradients, strict=True)}


def matrix_cast(cast: Cast, axis: int, device: torch.device, shape: Shape) -> Found:
    """Codes, scales and emulated values of a matrix whose columns have different magnitudes."""
    if cast.hadamard:  # integers: their sums are exact in any order
        x = (2 * drawn(shape, 0, device, torch.float32)).round().clamp(-8, 8).bfloat16()
    else:
        x = drawn(shape, 0, device) * torch.exp2(torch.arange(shape[1], device=device) % 23 - 11).bfloat16()
    random = random_stream(1, 2, 3, device) if cast.rounding == "stochastic" else None
    context = QuantContext(random)
    q, _ = quantize(x, cast, axis, context)
    numbers, factor = emulate(x, cast, axis, torch.bfloat16, context)
    parts = {"codes": q.codes, "scales": q.scales, "scale codes": q.scale_codes}
    if cast.tensor_scale != "none" and not cast.hadamard:  # known from the kernel that wrote x
        known = QuantContext(random, amax=local_amax(x).float())
        parts["codes, amax known"] = quantize(x, cast, axis, known)[0].codes
    return {**parts, "the tensor's scale": q.tensor_scale, "values": numbers, "factor": factor}


def clamped_cast(device: torch.device, shape: Shape) -> Found:
    """Emulated values of a matrix that is clamped to its quantiles, which a kernel finds."""
    cast = make_cast({"cast": "fp4-row", "outliers": 0.99})
    numbers, factor = emulate(drawn(shape, 0, device), cast, -1, torch.bfloat16)
    return {"values": numbers, "factor": factor}


def product_with_outliers_apart(device: torch.device, shape: Shape) -> Found:
    """FP4's forward matmul, and the gradient of its weight through the slope of rounding."""
    x, w = drawn(shape, 0, device), drawn((96, shape[1]), 1, device)
    casts = make_cast({"cast": "fp4-row", "outliers": 0.99, "compensate": True}), make_cast("fp4-row")

    def operand(numbers: Tensor, cast: Cast) -> Operand:
        parts = emulate_rows(numbers, cast)
        return Operand(*parts, form=ROWS) if parts else Operand(*emulate(numbers, cast, -1, torch.bfloat16))

    y = multiply(operand(x, casts[0]), operand(w, casts[1]), torch.bfloat16)
    slope = casts[1].having(estimator_k=5)
    through = through_rounding(drawn(w.shape, 2, device), w, slope, QuantContext())
    return {"the result": y.bfloat16(), "the gradient of w": through}


def norms(kind: Literal["rms", "layer"], device: torch.device, shape: Shape) -> Found:
    """A sum and its norm."""
    x, delta = drawn(shape, 0, device, torch.float32), drawn(shape, 1, device)
    weight_D, bias_D = (
        drawn(shape[-1:], 2, device, torch.float32),
        drawn(shape[-1:], 3, device, torch.float32),
    )

    def forward(x: Tensor, delta: Tensor, weight_D: Tensor, *bias_D: Tensor) -> Tensor:
        return add_norm(x, delta, weight_D, bias_D[0] if bias_D else None, _EPS, kind, torch.bfloat16)[1]

    biases = [bias_D] if kind == "layer" else []
    return passes(forward, "x delta weight" + " bias" * len(biases), x, delta, weight_D, *biases)


def passes_of(forward: Callable[..., Tensor], device: torch.device, shape: Shape) -> Found:
    """A function of one tensor."""
    return passes(forward, "x", drawn(shape, 0, device))


def rotary_passes(device: torch.device, shape: Shape) -> Found:
    """Heads turned by their positions."""
    T, H = shape[2:]
    angle = torch.arange(T).unsqueeze(1) * 1e4 ** -(torch.arange(H // 2) * (2 / H))
    table = torch.stack([angle.cos(), angle.sin()]).float().to(device)
    x = drawn(shape, 0, device)
    wide = passes(lambda x: rotary(x, table), "x", x.float())  # plain torch rounds bf16 gradients twice more
    return {"the result in bf16": rotary(x, table)} | wide


def losses(chunked: bool, device: torch.device, shape: Shape) -> Found:
    """The loss of T tokens from heads of D columns over a vocabulary of V, shape [T, D, V]."""
    T, D, V = shape
    y_T = torch.randint(V, (T,), generator=torch.Generator().manual_seed(4)).to(device)
    if not chunked:
        return passes(lambda logits: cross_entropy(logits, y_T), "logits", 3 * drawn((T, V), 0, device))
    h_TD, w_VD = drawn((T, D), 0, device), drawn((V, D), 1, device) / D**0.5
    return passes(lambda h, w: head_loss(h, w, y_T), "h weight", h_TD, w_VD)


def attention(device: torch.device, shape: Shape) -> Found:
    """Causal attention, called as in a model."""
    return passes(attend, "q k v", *(drawn(shape, seed, device) for seed in range(3)))


def attention_in_fp32(device: torch.device, shape: Shape) -> Found:
    """The same attention with every matmul in fp32."""

    def forward(*q_k_v: Tensor) -> Tensor:
        q_BNTH, k_BNTH, v_BNTH = (x.float() for x in q_k_v)
        scores_BNTT = q_BNTH @ k_BNTH.mT / shape[-1] ** 0.5
        later_TT = torch.ones(scores_BNTT.shape[-2:], dtype=torch.bool, device=device).triu(1)
        return (scores_BNTT.masked_fill(later_TT, -torch.inf).softmax(-1) @ v_BNTH).to(torch.bfloat16)

    return passes(forward, "q k v", *(drawn(shape, seed, device) for seed in range(3)))


def adamw_update(casts: Mapping[str, Cast | None], device: torch.device, shape: Shape) -> Found:
    """Two updates of low-precision state: by the kernel, or by the reference and then stored."""
    w, g, m, v = (drawn(shape, seed, device, torch.float32) for seed in range(4))
    numbers = {"master": 0.02 * w, "weight": 0.02 * w, "grad": g, "m": m, "v": v.square()}
    states = {place: _stored(x, casts.get(place), device) for place, x in numbers.items()}
    master, weight, *others = states.values()
    first, second = (master, weight) if master else (weight, None)
    for step, betas in ((3, (0.9, 0.95)), (4, (0.3, 0.6))):
        factors = narrow_adamw.Factors.of(_OPTIONS | {"betas": betas}, step)
        if narrow_adamw.supports(first, *others, second):
            keys = {place: stream_key(7, step, i) for i, place in enumerate(("w", "m", "v", "weight"))}
            narrow_adamw.adamw(first, *others, second, factors, keys)
            continue
        new = narrow_adamw.reference(first.read(), *(state.read() for state in others), factors)
        for i, (state, x) in enumerate(zip((first, *others[1:], second), (*new, new[0]), strict=True)):
            if state is not None:
                _write(state, first.read() if state is second else x, step, i)
    return {k: t for place, state in states.items() if state for k, t in _bits(place, state).items()}


def gradient_sums(cast: Cast, device: torch.device, shape: Shape) -> Found:
    """The gradients of three micro-batches, accumulated in low-precision state."""
    state = GradientState(torch.Size(shape), cast, device)
    for micro, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16)):
        dw = drawn(shape, micro, device, dtype) * 10.0**-micro
        dw = dw.T.contiguous().T if micro == 1 else dw  # as that of a transposed layer
        offset = torch.tensor(2**32 - 3000, device=device) if micro == 2 else 5000 * micro
        stream = replace(random_stream(7, 1, micro, device), offset=offset)
        add_gradient(state, dw, stream if cast.is_random else None)
        if state.prescale:  # a factor under which elements of the next sum overflow
            state.prescale.tensors["mu"].fill_(2.5)
    return _bits("the sum", state) | (dict(state.prescale.tensors) if state.prescale else {})


def _bits(place: str, state: QuantizedState) -> Found:
    """What is stored; where a scale is NaN, the codes under it are of no matter."""
    values = state.read()
    is_whole = values.is_meta or bool(values.isfinite().all())
    return {f"{place}'s {n}": t for n, t in state.tensors.items()} if is_whole else {place: values}


def _stored(x: Tensor, cast: Cast | None, device: torch.device) -> QuantizedState | None:
    if cast is None:
        return None
    state = QuantizedState(x.shape, cast, device)
    _write(state, x, 0, 9)
    return state


def _write(state: QuantizedState, x: Tensor, step: int, tensor: int) -> None:
    is_random = state.cast.rounding == "stochastic"
    state.write(x.clone(), random_stream(7, step, tensor, x.device) if is_random else None)
