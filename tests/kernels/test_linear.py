"""A layer computes the same with kernels and without: its product, and the gradients of both operands."""

import pytest
import torch

from narrowgauge.kernels.amax import known_amax
from narrowgauge.nn import convert, set_step
from narrowgauge.quantization import gradient_of
from narrowgauge.recipes import recipe, recipe_names

NARROW = [n for n in recipe_names() if recipe(n).is_narrow and not recipe(n).narrows_attention]


def results(name, x_BTK, dy_BTN, monkeypatch, kernels):
    """(y, dx, dw) of the layer in two steps."""
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "1" if kernels else "0")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(x_BTK.shape[-1], dy_BTN.shape[-1])).to(x_BTK.device)
    convert(model, name, keep=[], backend="emulated")
    found = []
    for step in (1, 2):
        set_step(model, 1, step, step * len(x_BTK), steps=2, decay=2)
        x = x_BTK.clone().requires_grad_()
        y = model(x)
        y.backward(dy_BTN)
        found += [y.detach(), x.grad, gradient_of(model[0].weight).clone()]
    return found


@pytest.mark.tier("nightly", keep=12)
@pytest.mark.tier("thorough", keep=4)
@pytest.mark.parametrize("name", NARROW)
def test_the_same_numbers_with_kernels_and_without(name, device, monkeypatch):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 24, 48, generator=g).bfloat16().to(device)
    dy = torch.randn(2, 24, 32, generator=g).bfloat16().to(device)
    ours, plain = (results(name, x, dy, monkeypatch, kernels) for kernels in (True, False))
    casts = recipe(name).casts
    has_transform = any(cast.hadamard.size for cast in casts.values())
    is_in_parts = casts["fprop.x"].block == (1, 0)  # whose product is a sum of two, each in fp32
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if has_transform:  # sums without an order, in its matrix product, may tip a code
            assert (a - b).float().norm() <= 0.02 * b.float().norm(), i
        elif is_in_parts and i % 3 == 0:  # y, rounded once to bf16: where two sums differ, by one unit
            assert ((a - b).float().abs() <= 2.0**-7 * b.float().abs()).all()
            assert (a != b).float().mean() < 0.02
        elif casts["fprop.w"].estimator.k and i % 3 == 2:  # dw, times a power that the interpreter computes
            torch.testing.assert_close(a, b, rtol=3e-6, atol=0)
        else:
            assert torch.equal(a, b), i


def test_a_known_amax_of_the_input_is_not_read_from_it(device, monkeypatch):
    from narrowgauge.kernels.triton import cast_launch

    seen = []
    find = cast_launch._largest
    monkeypatch.setattr(cast_launch, "_largest", lambda x, *rest: seen.append(x.shape) or find(x, *rest))
    model = convert(
        torch.nn.Sequential(torch.nn.Linear(32, 16)).to(device), "fp8", keep=[], backend="emulated"
    )
    x = torch.randn(3, 8, 32, device=device).bfloat16()
    plain = model(x)
    assert seen == [(24, 32), (16, 32)]  # the input's and the weight's
    seen.clear()
    known = known_amax(x, x.float().abs().max())
    assert torch.equal(model[0](x, known=known), plain)
    assert seen == [(16, 32)]
    x.mul_(2)  # it is another tensor now
    seen.clear()
    model[0](x, known=known)
    assert seen == [(24, 32), (16, 32)]
