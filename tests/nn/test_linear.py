"""A layer's three matmuls against the same matmuls in float64 of the numbers that would be stored.

Legend: M tokens, K inputs, N outputs.
"""

import inspect
import weakref
from contextlib import nullcontext

import pytest
import torch

from narrowgauge.formats import random_stream, round_to
from narrowgauge.nn import Linear, convert
from narrowgauge.nn.linear import accumulating
from narrowgauge.quantization import Cast, QuantContext, estimator_slope, quantize_in_context
from narrowgauge.recipes import GEMM_PLACES, Recipe, recipe
from nn.plain_recipes import PLAIN

SEED, STEP, INDEX = 7, 3, 5
# (batch, tokens), K, N: neither tokens nor features fill their blocks in the first two.
SHAPES = {"ragged": ((5, 7), 45, 50), "ragged matrix": ((37,), 70, 19), "even": ((2, 32), 64, 96)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The dtypes of activations and of parameters.
TENSORS = {
    "in-fp32": (torch.float32, torch.float32),
    "in-bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
# Each shape, and each pair of dtypes with and without a bias.
PAIRS = [
    ("ragged", "in-fp32", "bias"),
    ("ragged matrix", "in-bf16", "no-bias"),
    ("even", "in-bf16", "bias"),
    ("ragged", "in-fp32", "no-bias"),
    ("even", "mixed", "bias"),
    ("ragged", "mixed", "no-bias"),
]


def numbers(tensor: torch.Tensor, cast: Cast, axis: int, place: str) -> torch.Tensor:
    """What a GEMM sees of a tensor in the first step, in float64."""
    if not cast.is_scaled:
        return tensor.to(DTYPES[cast.name]).double()
    if cast.amax.history:  # the scale is still 1
        return round_to(tensor, cast.element).double()
    bits = random_stream(SEED, STEP, INDEX * len(GEMM_PLACES) + GEMM_PLACES.index(place))
    signs = None
    if cast.hadamard.signs == "random":
        gemm = ("fprop", "dgrad", "wgrad").index(place.split(".")[0])
        signs = 1 - 2 * (random_stream(SEED, STEP, 2**32 + 3 * INDEX + gemm).bits((cast.hadamard.size,)) & 1)
    stored = quantize_in_context(tensor, cast, axis, QuantContext(bits, signs)).dequantize().double()
    if cast.clamp.adds_back:
        ranked = tensor.flatten().sort().values
        low, high = (ranked[int(q * tensor.numel())] for q in (1 - cast.clamp.quantile, cast.clamp.quantile))
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
    c, half_ulp = r.casts, {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[r.compute]
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
    if c["fprop.w"].estimator.k:
        slope = estimator_slope(w_NK, c["fprop.w"], -1).double()
        products["dw"], bounds["dw"] = products["dw"] * slope, (bounds["dw"] + 2.0**-24) * slope
    if bias_N is not None:
        products["y"] = products["y"] + bias_N.to(DTYPES[r.compute]).double()
        bounds["y"] += half_ulp * products["y"].abs()
    return products, bounds


def make_case(shape, dtype=torch.float32, bias=False, seed=0, parameters=None):
    tokens, k, n = SHAPES[shape]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*tokens, k, generator=g).to(dtype)
    dy = (1e-3 * torch.randn(*tokens, n, generator=g)).to(dtype)
    dy[0] *= 8  # tokens of different size, so that blocks along another axis are other numbers
    x[..., 3] *= 20
    layer = torch.nn.Linear(k, n, bias=bias).to(parameters or dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k, generator=g) / k**0.5)
    return layer, x, dy


def run(layer, r, x, dy):
    """y, dx, dw of a layer under a recipe."""
    under = Linear(layer, r, INDEX)
    if under.is_random:
        under.set_position(SEED, STEP, 0)
    x = x.clone().requires_grad_()
    under.weight.grad = None
    y = under(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def flat(t):
    return t.reshape(-1, t.shape[-1])


@pytest.mark.tier("thorough", keep=[(name, *rest) for name in PLAIN for rest in PAIRS])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtypes", TENSORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_products_by_hand(name, shape, dtypes, bias):
    r, (activations, parameters) = recipe(name), TENSORS[dtypes]
    layer, x, dy = make_case(shape, activations, bias, parameters=parameters)
    got = run(layer, r, x, dy)
    bias_N = layer.bias.detach() if bias else None
    products, bounds = by_hand(r, flat(x), layer.weight.detach(), flat(dy), bias_N)
    for which, result in got.items():
        assert result.dtype == (parameters if which == "dw" else activations)
        is_rounded = result.dtype == torch.bfloat16
        result = flat(result).double()
        bound = 1.001 * bounds[which]
        if is_rounded:
            bound += 2.0**-8 * result.abs()  # the result once more rounded, where compute is fp32
        excess = ((result - products[which]).abs() - bound).max()
        assert excess <= 0, f"{which} is {excess} beyond the bound"
    if bias:
        exact = flat(dy).double().sum(0)
        rounding = 2.0**-8 if parameters == torch.bfloat16 else 1e-5
        slack = rounding * exact.abs() + 1e-6 * flat(dy).double().abs().sum(0)
        assert ((layer.bias.grad.double() - exact).abs() <= slack).all()


PRODUCT_OF = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


@pytest.mark.parametrize("cast", ["mxfp4", "e4m3", "nvfp4-2d"])
@pytest.mark.parametrize("place", GEMM_PLACES)
def test_a_place_changes_its_own_product_only(place, cast):
    layer, x, dy = make_case("ragged")
    wide = run(layer, recipe("fp32"), x, dy)
    r = recipe("fp32").with_places({place: cast})
    narrow = run(layer, r, x, dy)
    products, bounds = by_hand(r, flat(x), layer.weight.detach(), flat(dy))
    its_own = PRODUCT_OF[place.partition(".")[0]]
    for which, result in narrow.items():
        assert torch.equal(result, wide[which]) == (which != its_own)
        assert ((flat(result).double() - products[which]).abs() <= bounds[which]).all()


@pytest.mark.parametrize("place", GEMM_PLACES)
def test_blocks_lie_along_the_axis_that_is_contracted(place):
    """The bound of the test above is far below what blocks along the other axis would change."""
    layer, x, dy = make_case("ragged")
    r = recipe("fp32").with_places({place: "mxfp4"})
    tensor = {"x": flat(x), "w": layer.weight.detach(), "y": flat(dy)}[place[-1]]
    along = 0 if place in ("dgrad.w", "wgrad.dy", "wgrad.x") else 1
    right, wrong = (numbers(tensor, r.casts[place], axis, place) for axis in (along, 1 - along))
    products, bounds = by_hand(r, flat(x), layer.weight.detach(), flat(dy))
    which = PRODUCT_OF[place.partition(".")[0]]
    others = {
        "fprop.x": lambda t: t @ layer.weight.double().T,
        "fprop.w": lambda t: flat(x).double() @ t.T,
        "dgrad.dy": lambda t: t @ layer.weight.double(),
        "dgrad.w": lambda t: flat(dy).double() @ t,
        "wgrad.dy": lambda t: t.T @ flat(x).double(),
        "wgrad.x": lambda t: flat(dy).double().T @ t,
    }[place]
    torch.testing.assert_close(others(right), products[which])
    assert ((others(wrong) - products[which]).abs() > 100 * bounds[which]).float().mean() > 0.5


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_hadamard_transform_of_both_operands_leaves_the_product(gemm, size):
    layer, x, dy = make_case("ragged")
    pair = {p: {"cast": "fp32", "hadamard": size} for p in GEMM_PLACES if p.startswith(gemm)}
    wide = run(layer, recipe("fp32"), x, dy)
    turned = run(layer, recipe("fp32").with_places(pair), x, dy)
    for which, result in turned.items():
        torch.testing.assert_close(result, wide[which], rtol=1e-4, atol=1e-5 * wide[which].abs().max().item())
        assert torch.equal(result, wide[which]) == (which != PRODUCT_OF[gemm])


@pytest.mark.parametrize("name", ["fp32", "fp8", "mxfp4"])
@pytest.mark.parametrize("frozen", ["x", "w"])
def test_only_what_is_asked_for_is_computed(name, frozen):
    layer, x, dy = make_case("even", bias=True)
    want = run(layer, recipe(name), x, dy)
    x = x.clone().requires_grad_(frozen != "x")
    layer.weight.requires_grad_(frozen != "w")
    layer.weight.grad = None
    Linear(layer, recipe(name), INDEX)(x).backward(dy)
    got = {"x": x.grad, "w": layer.weight.grad}
    assert got.pop(frozen) is None
    assert torch.equal(*got.values(), want["dw" if frozen == "x" else "dx"])


def test_one_token_without_a_batch_and_a_batch_of_one():
    layer, x, _ = make_case("ragged", bias=True)
    under = Linear(layer, recipe("mxfp8"), 0)
    assert torch.equal(under(x[0, 0]), under(x[:1, :1])[0, 0])


def test_the_layer_says_its_recipe():
    layer, _, _ = make_case("even")
    assert repr(Linear(layer, recipe("mxfp4"), 0)) == (
        "Linear(in_features=64, out_features=96, bias=False, recipe=mxfp4)"
    )
    assert repr(convert(torch.nn.ModuleDict({"up": layer}), "mxfp4", keep="up")["up"]) == (
        "Linear(in_features=64, out_features=96, bias=False, recipe=mxfp4, kept in bf16)"
    )
    assert "kept" not in repr(Linear(layer, recipe("bf16"), 0))


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_what_is_kept_for_backward_is_freed_after_it(name):
    layer, x, dy = make_case("even")
    boxes = []

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor
            boxes.append(weakref.ref(self))

    under = Linear(layer, recipe(name), 0)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        y = under(x * 1)
    alive = [box() is not None for box in boxes]
    assert len(alive) >= 2
    assert all(alive)
    assert sum(isinstance(v, torch.Tensor) for node in nodes(y.grad_fn) for v in attributes(node)) == 0
    y.backward(dy)
    assert not any(box() is not None for box in boxes)


def nodes(node):
    """A node of the autograd graph and all behind it."""
    return [node, *(n for after, _ in node.next_functions if after is not None for n in nodes(after))]


def attributes(node):
    return getattr(node, "__dict__", {}).values()


def test_fp8_keeps_its_narrow_numbers_not_the_wide_ones():
    """A per-tensor cast is the same along every axis, so the numbers of the forward pass serve again."""
    layer, x, dy = make_case("even")
    kept = []
    under = Linear(layer, recipe("fp8"), 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        under(x.requires_grad_()).backward(dy)
    assert [t.dtype for t in kept if t.ndim == 2] == [torch.bfloat16, torch.uint8], "weight, input"


NARROW_IN_FP32 = {p: "e5m2" if p.endswith("dy") else "e4m3" for p in GEMM_PLACES}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*PLAIN, "fp8 in fp32"])
def test_what_is_not_finite_never_comes_out_finite(name, poison):
    r = recipe("fp32").with_places(NARROW_IN_FP32) if name == "fp8 in fp32" else recipe(name)
    layer, x, dy = make_case("ragged matrix")
    m, n, k = 20, 11, 33

    def finite(which):
        tensors = {"x": x.clone(), "dy": dy.clone()}
        under = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        under.load_state_dict(layer.state_dict())
        with torch.no_grad():
            {"x": tensors["x"][m], "dy": tensors["dy"][m], "w": under.weight[n]}[which][
                n if which == "dy" else k
            ] = poison
        return {w: t.isfinite() for w, t in run(under, r, **tensors).items()}

    whole_tensor = all(c.is_scaled and c.block is None for c in r.casts.values())
    in_x, in_dy, in_w = finite("x"), finite("dy"), finite("w")
    assert not in_x["y"][m].any()
    assert not in_x["dw"][:, k].any()
    assert in_x["dx"].all()
    assert not in_dy["dx"][m].any()
    assert not in_dy["dw"][n].any()
    assert not in_w["y"][:, n].any()
    assert not in_w["dx"][:, k].any()
    assert in_w["dw"].all() or r.casts["fprop.w"].estimator.k, "the slope of rounding a NaN is NaN"
    if whole_tensor:  # one scale, so that one element takes all with it
        spoiled = [in_x["y"], in_x["dw"], in_dy["dx"], in_dy["dw"], in_w["y"], in_w["dx"]]
        assert not any(t.any() for t in spoiled)


def test_forward_takes_by_place_what_torch_takes():
    """torchtitan passes on the arguments that a layer declares by place, and no others."""
    declared = inspect.signature(Linear.forward).parameters.values()
    torchs = inspect.signature(torch.nn.Linear.forward).parameters
    assert [p.name for p in declared if p.kind is not p.KEYWORD_ONLY] == list(torchs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16, 64), (5, 7, 33), (2, 129, 96), (3, 0, 8)])
def test_wide_linear_has_the_same_digits_by_torchs_matmul_and_by_its_own_function(shape, bias):
    """Between micro-batches it computes by its own function, which adds gradients itself."""
    generator = torch.Generator().manual_seed(0)
    model = convert(torch.nn.Sequential(torch.nn.Linear(shape[-1], 57, bias=bias)), "fp32")
    found = []
    for inside in (False, True):
        x = torch.randn(shape, generator=generator.manual_seed(1)).requires_grad_()
        with accumulating(model, keeps_codes=False) if inside else nullcontext():
            assert model[0]._is_plain(x) != inside
            y = model(x)
            y.backward(torch.randn(y.shape, generator=generator.manual_seed(2)))
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
