"""Checks native GEMMs against float64, and a layer under each recipe against the CPU."""

from functools import partial

import torch
from torch import Tensor

from narrowgauge.bench.verify.check import Check, Disagreement, close
from narrowgauge.bench.verify.operations import drawn
from narrowgauge.devices import Device
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.nn import convert, set_step
from narrowgauge.nn.self_test import TINY, product_failure
from narrowgauge.quantization import Cast, gradient_of
from narrowgauge.recipes import device_facts, products_on, recipe, recipe_names
from narrowgauge.recipes.backend import SCHEMES, Scheme

EMULATE = "runs on this machine emulate it automatically and report it; --backend emulated requests it"
LAYER = (
    "train this recipe with --backend emulated; if that loss differs as well, set NARROWGAUGE_KERNELS=0; "
    "please report it with this file"
)
_SHAPES = (TINY, (512, 4096, 1536))
_ALLOWED, _OF_TRANSFORMS = 0.01, 0.02


def product_checks(device: torch.device) -> list[Check]:
    """A check of each scheme of scaled GEMMs, for all operands that shipped recipes give it."""
    facts, checks = device_facts(device), []
    if device.type == "cpu":  # report the requirements on an NVIDIA GPU, which is more informative
        facts = Device(maker="nvidia")
    for scheme in SCHEMES:
        lacks = scheme.needs(facts) and f"it takes {scheme.needs(facts)}"
        if device.type == "cpu" and scheme.words in _ON_A_CPU:
            lacks = ""  # torch 2.13 and later implement it on a CPU
        if not _pairs_of(scheme):
            lacks = "no shipped recipe uses it"
        checks.append(Check("matmuls", scheme.words, partial(_products, scheme), EMULATE, lacks))
    return checks


_ON_A_CPU = {"FP8 with a scale per tensor", "FP8 with a scale per row"}


def _products(scheme: Scheme, device: torch.device) -> str:
    pairs = _pairs_of(scheme)
    for shape in _SHAPES:
        for a, b in pairs:
            if failure := product_failure(a, b, device, shape):
                raise Disagreement(f"{a.name} by {b.name}, {' x '.join(map(str, shape))}: {failure}")
    return f"within the rounding of the result, {len(pairs)} pairs of operands"


def _pairs_of(scheme: Scheme) -> list[tuple[Cast, Cast]]:
    """The operands of all GEMMs of the shipped recipes that use a scheme, once each."""
    cpu = device_facts(torch.device("cpu"))
    products = [product for name in recipe_names() for product in products_on(recipe(name), cpu)]
    return list(dict.fromkeys(p.operands for p in products if scheme.is_of(*p.operands)))


def layer_checks(lacks: str) -> list[Check]:
    """A check of a linear layer under each low-precision recipe; `lacks` is why this machine cannot."""
    narrow = [
        name for name in recipe_names() if recipe(name).is_narrow and not recipe(name).narrows_attention
    ]
    return [Check("layers", name, partial(_layer, name), LAYER, lacks) for name in narrow]


def _layer(name: str, device: torch.device) -> str:
    is_small = device.type == "cpu"
    got = _passes(name, device, "auto", is_small)
    with plain_operations():
        expected = _passes(name, torch.device("cpu"), "emulated", is_small)
    has_transform = any(cast.hadamard.size for cast in recipe(name).casts.values())
    return close(got, expected, _OF_TRANSFORMS if has_transform else _ALLOWED)


def _passes(name: str, device: torch.device, backend: str, is_small: bool) -> dict[str, Tensor | None]:
    """A layer of K x N on 2 x T tokens, forward and backward."""
    T, K, N = (24, 96, 64) if is_small else (1024, 1536, 2048)
    x, dy = drawn((2, T, K), 0, device).requires_grad_(), drawn((2, T, N), 1, device)
    layer = torch.nn.Linear(K, N, bias=False)
    model = torch.nn.Sequential(layer).to(device)
    with torch.no_grad():
        layer.weight.copy_(drawn((N, K), 2, device, torch.float32) / K**0.5)
    convert(model, name, keep=[], backend=backend)
    set_step(model, 1, 1, 0, steps=2, decay=2)
    y = model(x)
    y.backward(dy)
    gradient = gradient_of(next(model.parameters()))
    return {"y": y, "dx": x.grad, "dw": None if gradient is None else gradient.clone()}
