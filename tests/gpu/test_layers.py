"""Native matmuls against float64, and a layer under each recipe against the CPU's plain path."""

from functools import partial

import pytest
import torch

from gpu.compare import close, same
from gpu.operations import drawn
from narrowgauge.nn import convert, set_step
from narrowgauge.nn.self_test import TINY, product_failure
from narrowgauge.quantization import gradient_of
from narrowgauge.recipes import device_facts, products_on, recipe, recipe_names
from narrowgauge.recipes.backend import SCHEMES
from support.interpreted import plain_operations

ADVICE = (
    "runs emulate a wrong matmul automatically and report it; train a recipe whose layer differs with "
    "--backend emulated, and if that loss differs as well, under NARROWGAUGE_KERNELS=0"
)
NARROW = [n for n in recipe_names() if recipe(n).is_narrow and not recipe(n).narrows_attention]
HAS_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
ON_A_CPU = ("FP8 with a scale per tensor", "FP8 with a scale per row") if HAS_PRODUCTS else ()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.words)
def test_a_matmul_is_that_of_the_same_values_in_float64(scheme):
    """For all operands that shipped recipes give it."""
    cpu = torch.device("cpu")
    here = torch.device("cuda") if torch.cuda.is_available() else cpu
    is_on_cpu = here == cpu and scheme.words in ON_A_CPU
    if (lacks := scheme.needs(device_facts(here))) and not is_on_cpu:
        pytest.skip(f"it takes {lacks}")
    found = [p for name in recipe_names() for p in products_on(recipe(name), device_facts(cpu))]
    pairs = dict.fromkeys(p.operands for p in found if scheme.is_of(*p.operands))
    for shape in (TINY, (128, 1024, 384) if is_on_cpu else (512, 4096, 1536)):
        for a, b in pairs:
            assert not product_failure(a, b, here, shape), f"{a.name} by {b.name}, {shape}"


def passes(name, device, backend, is_small):
    """A layer of K x N on 2 x T tokens, forward and backward."""
    T, K, N = (24, 96, 64) if is_small else (1024, 1536, 2048)
    x, dy = drawn((2, T, K), 0, device).requires_grad_(), drawn((2, T, N), 1, device)
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(drawn((N, K), 2, device, torch.float32) / K**0.5)
    convert(model, name, keep=[], backend=backend)
    set_step(model, 1, 1, 0, steps=2, decay=2)
    y = model(x)
    y.backward(dy)
    gradient = gradient_of(next(model.parameters()))
    return {"y": y, "dx": x.grad, "dw": None if gradient is None else gradient.clone()}


@pytest.mark.tier("thorough", keep=("fp8-delayed", "nvfp4"))
@pytest.mark.parametrize("name", NARROW)
def test_a_layer_has_the_same_numbers_with_kernels_and_without(name, device):
    """On a GPU nearly. In the interpreter bit for bit, but for sums without an order: in the product of a
    transform they may tip a code, in a product in two parts they are rounded to a neighbour; and but for a
    power that the interpreter computes."""
    is_gpu, casts = device.type == "cuda", recipe(name).casts
    ours = passes(name, device, "auto" if is_gpu else "emulated", not is_gpu)
    with plain_operations():
        plain = passes(name, torch.device("cpu"), "emulated", not is_gpu)
    has_transform = any(cast.hadamard for cast in casts.values())
    is_near = casts["fprop.x"].block == (1, 0) or casts["fprop.w"].estimator_k
    share = 0.02 if has_transform else 0.01 if is_gpu else 2e-3
    (partial(close, share=share) if has_transform or is_near or is_gpu else same)(ours, plain)
