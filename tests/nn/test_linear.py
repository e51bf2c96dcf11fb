"""A layer's three matmuls against the same matmuls in float64 of the numbers that would be stored.

Legend: M tokens, K inputs, N outputs.
"""

import pytest
import torch

from narrowgauge.formats import random_stream, round_to
from narrowgauge.nn import DTYPES, Linear, convert, set_step
from narrowgauge.quantization import Cast, QuantContext, estimator_slope, quantize_in_context
from narrowgauge.recipes import GEMM_PLACES, Recipe, recipe
from narrowgauge.system.errors import UserError
from nn.layers import COVER, PLAIN

SEED, STEP, INDEX = 7, 3, 5
#: (batch, tokens), K, N; the dtypes of activations and of parameters; whether there is a bias. Neither tokens
#: nor features fill their blocks where a case is ragged.
CASES = {
    "ragged": ((5, 7), 45, 50, torch.float32, torch.float32, True),
    "matrix": ((37,), 70, 19, torch.bfloat16, torch.bfloat16, False),
    "even": ((2, 32), 64, 96, torch.bfloat16, torch.float32, True),
    "one input": ((5,), 1, 7, torch.float32, torch.float32, False),
    "one output": ((1,), 7, 1, torch.float32, torch.float32, False),
    "bf16": ((2, 32), 64, 96, torch.bfloat16, torch.bfloat16, True),
    "fp16": ((129,), 40, 24, torch.float16, torch.float32, True),
    "mixed": ((5, 7), 45, 50, torch.bfloat16, torch.float32, False),
}
#: Each recipe under four cases, each case with half of the recipes.
PAIRS = [(n, c) for i, n in enumerate(PLAIN) for j, c in enumerate(CASES) if (i + j) % 2 == 0 or j == 2]


def numbers(tensor: torch.Tensor, cast: Cast, axis: int, place: str) -> torch.Tensor:
    """What a GEMM sees of a tensor in the first step, in float64."""
    if not cast.is_scaled:
        return tensor.to(DTYPES[cast.name]).double()
    if cast.history:  # the scale is still 1
        return round_to(tensor, cast.element).double()
    bits = random_stream(SEED, STEP, INDEX * len(GEMM_PLACES) + GEMM_PLACES.index(place))
    signs = None
    if cast.signs == "random":
        gemm = ("fprop", "dgrad", "wgrad").index(place.split(".")[0])
        signs = 1 - 2 * (random_stream(SEED, STEP, 2**32 + 3 * INDEX + gemm).bits((cast.hadamard,)) & 1)
    stored = quantize_in_context(tensor, cast, axis, QuantContext(bits, signs)).dequantize().double()
    if cast.compensate:
        ranked = tensor.flatten().sort().values
        low, high = (ranked[int(q * tensor.numel())] for q in (1 - cast.outliers, cast.outliers))
        stored = stored + (tensor.double() - tensor.clamp(low, high).double())
    return stored


def operand(r: Recipe, tensor: torch.Tensor, place: str) -> torch.Tensor:
    """What the GEMM of a place sees: of its tensor, or of the numbers that another place saw of it."""
    cast, axis = r.casts[place], 0 if place in ("dgrad.w", "wgrad.dy", "wgrad.x") else -1
    if cast.of:
        seen = operand(r, tensor, cast.of)
        return numbers(seen.float(), cast, axis, place) if cast.is_scaled else seen
    return numbers(tensor, cast, axis, place)


def by_hand(r: Recipe, x_MK, w_NK, dy_MN, bias_N=None):
    """The matmuls in float64, and for each a bound on the error of fp32 sums and of the last roundings."""
    half_ulp = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[r.compute]
    pairs = {
        "y": (operand(r, x_MK, "fprop.x"), operand(r, w_NK, "fprop.w").T),
        "dx": (operand(r, dy_MN, "dgrad.dy"), operand(r, w_NK, "dgrad.w")),
        "dw": (operand(r, dy_MN, "wgrad.dy").T, operand(r, x_MK, "wgrad.x")),
    }
    products = {name: a @ b for name, (a, b) in pairs.items()}
    # A sum of L terms in fp32 and two tensor scales, then the rounding to the compute format, which in fp16
    # meets subnormals.
    subnormal = 2.0**-25 if r.compute == "fp16" else 0.0
    bounds = {
        name: (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs()) + half_ulp * products[name].abs() + subnormal
        for name, (a, b) in pairs.items()
    }
    if r.casts["fprop.w"].estimator_k:
        slope = estimator_slope(w_NK, r.casts["fprop.w"], -1).double()
        products["dw"], bounds["dw"] = products["dw"] * slope, (bounds["dw"] + 2.0**-24) * slope
    if bias_N is not None:
        products["y"] = products["y"] + bias_N.to(DTYPES[r.compute]).double()
        bounds["y"] += half_ulp * products["y"].abs()
    return products, bounds


def make_case(case):
    """A layer, an input and an output gradient."""
    tokens, k, n, activations, parameters, bias = CASES[case]
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(*tokens, k, generator=g), 1e-3 * torch.randn(*tokens, n, generator=g)
    dy[0] *= 8  # tokens of different size, so that blocks along another axis are other numbers
    x[..., min(3, k - 1)] *= 20
    layer = torch.nn.Linear(k, n, bias=bias).to(parameters)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k, generator=g) / k**0.5)
    return layer, x.to(activations), dy.to(activations)


def run(layer, r, x, dy):
    """y, dx, dw of a layer under a recipe."""
    under = Linear(layer, r, INDEX)
    if under.is_random:
        set_step(under, SEED, STEP, 0)
    x = x.clone().requires_grad_()
    under.weight.grad = None
    y = under(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def flat(t):
    return t.reshape(-1, t.shape[-1])


@pytest.mark.tier("nightly", keep=[pair for pair in PAIRS if pair[0] in COVER])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_products_by_hand(name, case):
    r, (layer, x, dy) = recipe(name), make_case(case)
    got = run(layer, r, x, dy)
    bias_N = None if layer.bias is None else layer.bias.detach()
    products, bounds = by_hand(r, flat(x), layer.weight.detach(), flat(dy), bias_N)
    for which, result in got.items():
        assert result.dtype == (layer.weight.dtype if which == "dw" else x.dtype)
        # The result once more rounded, where compute is fp32.
        last = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(result.dtype, 0.0)
        tiny = 2.0**-24 if result.dtype == torch.float16 else 0.0
        result = flat(result).double()
        excess = ((result - products[which]).abs() - 1.001 * bounds[which] - last * result.abs() - tiny).max()
        assert excess <= 0, f"{which} is {excess} beyond the bound"
    if bias_N is not None:
        exact = flat(dy).double().sum(0)
        rounding = 2.0**-8 if layer.bias.dtype == torch.bfloat16 else 1e-5
        slack = rounding * exact.abs() + 1e-6 * flat(dy).double().abs().sum(0)
        assert ((layer.bias.grad.double() - exact).abs() <= slack).all()


NO_INPUTS = (torch.tensor(1.0), torch.zeros(4, 63), [1.0, 2.0], None, torch.zeros(0))


@pytest.mark.parametrize("name", ["fp32", "fp8-delayed", "nvfp4", "bf16-sr", "msamp-o2", "eco"])
def test_what_is_no_input_is_refused(name):
    m = convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), name, keep=[])
    for wrong in NO_INPUTS:
        with pytest.raises(UserError, match=r"the input of a layer has .*: give a tensor \(\.\.\., 64\)"):
            m(wrong)
