"""A head and its loss in one function are the two functions one after the other, bit for bit."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.formats import format
from narrowgauge.kernels import quantize
from narrowgauge.kernels.amax import DelayedScale
from narrowgauge.kernels.cross_entropy import (
    IGNORED,
    gradient_codes,
    losses_before_codes,
    row_losses,
    write_gradients,
)
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import Linear, convert, fused, recipe_tensors, set_step
from narrowgauge.nn.linear import accumulating
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn_dim": 32, "vocab_size": 31, "max_sequence_length": 16}
HAS_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_products = pytest.mark.skipif(not HAS_PRODUCTS, reason="torch before 2.13 has no CPU kernel")


def drawn(rows, width, dtype, device, spread=4.0):
    generator = torch.Generator().manual_seed(rows * width)
    z_TV = (torch.randn(rows, width, generator=generator) * spread).to(dtype)
    return z_TV.to(device), torch.randint(width, (rows,), generator=generator).to(device)


def both_ways(z_TV, y_T, factor, ignores, name, delayed=None):
    """(codes, scale) by the kernel, and the same by the cast of the gradient that a kernel wrote."""
    factor = torch.tensor(factor, device=z_TV.device)
    loss_T, stats_2T, largest = losses_before_codes(z_TV, y_T, ignores)
    found = gradient_codes(z_TV, y_T, stats_2T, largest, factor, ignores, format(name), delayed)
    assert torch.equal(found.codes_TV, found.codes_VT.T)
    alone_T = row_losses(z_TV, y_T, ignores)[0]
    torch.testing.assert_close(loss_T, alone_T, rtol=0, atol=0, equal_nan=True)
    gradient_TV = torch.empty_like(z_TV)
    write_gradients(z_TV, y_T, stats_2T, factor, ignores, gradient_TV)
    q, _ = quantize(gradient_TV, make_cast(name), -1)
    return found, q, gradient_TV


@pytest.mark.tier("thorough", keep=(5, 1))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(5, 137), (70, 200), (1, 64)])
@pytest.mark.parametrize("name", ["e5m2", "e4m3"])
def test_codes_are_those_of_the_gradient(device, rows, width, dtype, name):
    z_TV, y_T = drawn(rows, width, dtype, device)
    y_T[0] = z_TV[0].float().argmax()  # a target that is the largest logit
    found, q, _ = both_ways(z_TV, y_T, 2.0**-9, False, name)
    assert torch.equal(found.codes_TV, q.codes)
    assert torch.equal(found.scale, q.scales)


def test_a_sure_row_of_the_wrong_token_has_the_largest_gradient(device):
    """Two entries are nearly 1 in magnitude; the amax is the larger."""
    z_TV, y_T = drawn(3, 70, torch.bfloat16, device, spread=0.1)
    z_TV[1, 7], y_T[1] = 30.0, 8
    found, q, gradient_TV = both_ways(z_TV, y_T, 0.3, False, "e5m2")
    assert torch.equal(found.codes_TV, q.codes)
    assert gradient_TV[1, 7] == -gradient_TV[1, 8] == torch.tensor(0.3).bfloat16()


def test_ignored_targets_have_codes_of_zero_and_no_part_in_the_scale(device):
    z_TV, y_T = drawn(6, 90, torch.bfloat16, device)
    y_T[2] = y_T[5] = IGNORED
    z_TV[2] *= 8
    found, q, _ = both_ways(z_TV, y_T, 0.25, True, "e5m2")
    assert torch.equal(found.codes_TV, q.codes)
    assert torch.equal(found.scale, q.scales)
    assert not found.codes_TV[2].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "target"])
def test_what_is_not_finite_makes_the_scale_nan(device, bad):
    z_TV, y_T = drawn(4, 40, torch.bfloat16, device)
    if bad == "target":
        y_T[1] = 40
    else:
        z_TV[1, 3] = bad
    found, q, gradient_TV = both_ways(z_TV, y_T, 1.0, False, "e5m2")
    assert not gradient_TV.isfinite().all()
    assert found.scale.isnan()
    assert q.scales.isnan()


def test_a_known_scale_is_used_and_the_amax_recorded(device):
    z_TV, y_T = drawn(5, 137, torch.bfloat16, device)
    delayed = DelayedScale(torch.tensor(2.0**12, device=device), torch.zeros((), device=device))
    found, _, gradient_TV = both_ways(z_TV, y_T, 2.0**-4, False, "e5m2", delayed)
    expected = (gradient_TV.float() * 2.0**12).to(torch.float8_e5m2)
    assert torch.equal(found.codes_TV.view(torch.float8_e5m2).float(), expected.float())
    assert torch.equal(delayed.seen, gradient_TV.float().abs().max())
    assert found.scale == 2.0**-12


def native(name, device):
    """A model whose matmuls are native, head included."""
    model = Transformer(model_config("debug", **TINY), torch.bfloat16)
    initialize(model, 0)
    convert(model.to(device), recipe(name).with_places({"keep": "none"}))
    for module in model.modules():
        if isinstance(module, Linear):
            module.spec = replace(module.spec, native=True)
    return model


def steps(model, device, targets=None):
    """Losses, gradients and histories of three steps of two micro-batches."""
    losses = []
    for number in (1, 2, 3):
        set_step(model, 0, number, 0)
        with accumulating(model, keeps_codes=True):
            for i in range(2):
                g = torch.Generator().manual_seed(10 * number + i)
                ids, y = torch.randint(31, (2, 1, 5), generator=g).to(device)
                if targets:
                    y[0, targets:] = IGNORED
                loss = model.loss(ids, y, targets=targets)
                loss.backward()
                losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p += number * p.grad
    return losses, [p.grad for p in model.parameters()], list(recipe_tensors(model).values())


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@needs_products
@pytest.mark.parametrize(("name", "targets"), [("fp8", None), ("fp8", 3), ("fp8-delayed", None)])
def test_one_function_gives_the_digits_of_two(device, monkeypatch, name, targets):
    functions, function = [], fused.head_loss
    monkeypatch.setattr(fused, "head_loss", lambda *a: functions.append(1) or function(*a))
    found = steps(native(name, device), device, targets)
    assert len(functions) == 6
    monkeypatch.setattr(Linear, "into_loss", lambda *_: None)
    separate = steps(native(name, device), device, targets)
    assert found[0] == separate[0]
    assert len(set(found[0])) == 6
    for a, b in zip(found[1:], separate[1:], strict=True):
        assert all(torch.equal(g, h) for g, h in zip(a, b, strict=True))


@needs_products
def test_where_it_may_not_both_are_called(device):
    model = native("fp8", device)
    x = torch.ones(1, 2, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = torch.zeros(1, 2, dtype=torch.int64, device=device)

    def is_one(x=x):
        return model.head.into_loss(x, y, None) is not None

    assert is_one()
    assert model.head.calls == 1, "one function is a call of the layer, which ng.audit counts"
    assert not is_one(x.float())
    assert not is_one(x[:, :0])
    with torch.no_grad():
        assert not is_one()
    hook = model.head.register_forward_hook(lambda *_: None)
    assert not is_one()
    hook.remove()
    model.head.observer = object()
    assert not is_one()
    model.head.observer = None
    assert is_one()
    assert convert(model, "fp8").head.into_loss(x, y, None) is None
